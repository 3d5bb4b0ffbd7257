"""A record's source: a commit of this repository and the difference to it, which source.patch holds.

Its first line is `commit HASH`; below it stands what `git apply` takes, nothing where the runs were of the commit.
"""

import hashlib
import io
import os
import re
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Iterable
from pathlib import Path

from common import UserError

REPOSITORY = Path(__file__).resolve().parent.parent


def git(*arguments: str, folder: Path | None = None, advice: str = "") -> bytes:
    """What git prints in a folder, by default the repository. Raises UserError with its complaint and the advice."""
    command = ["git", "-c", "core.autocrlf=false", *arguments]
    alone = os.environ | dict(
        GIT_CEILING_DIRECTORIES=tempfile.gettempdir()
    )  # a folder there is in no repository
    try:
        done = subprocess.run(command, cwd=folder or REPOSITORY, env=alone, capture_output=True)
    except OSError as error:
        raise UserError(
            f"git, which reads the sources of records, cannot be started ({error}); install it"
        ) from None
    if done.returncode and advice:
        complaint = (
            done.stderr.decode(errors="replace").strip().splitlines() or ["no reason given"]
        )[-1]
        raise UserError(f"git {arguments[0]} failed ({complaint}); {advice}")
    return done.stdout


def write_commit(commit: str, folder: Path) -> None:
    """Write the files of a commit, as git names it, into a folder. Raises UserError for what is missing."""
    advice = f"get the whole history, with commit {commit}: `git clone`, or `git fetch --unshallow` in a shallow clone"
    with tarfile.open(
        fileobj=io.BytesIO(git("archive", "--format=tar", commit, advice=advice))
    ) as tar:
        tar.extractall(folder, filter="data")


def sha256(path: Path) -> str | None:
    """The SHA-256 of a file in hexadecimal; None if there is none."""
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else None


def read_source(record: Path, names: Iterable[str]) -> tuple[str, dict[str, str | None]]:
    """The commit in a record's source.patch, and the SHA-256 of the named files with the difference applied.

    A file that is not there has None. Raises UserError.
    """
    patch = record / "source.patch"
    first, _, difference = (patch.read_bytes() if patch.is_file() else b"").partition(b"\n")
    found = re.fullmatch(rb"commit ([0-9a-f]{40})\s*", first)
    if not found:
        again = f"make it by `python bench.py record {record} --pack HEAD`"
        raise UserError(
            f"{patch} is missing or does not begin with `commit` and 40 hexadecimal digits; {again}"
        )
    commit = found[1].decode()
    with tempfile.TemporaryDirectory() as work:
        write_commit(commit, Path(work))
        if difference.strip():
            advice = f"{patch} must name the commit that it was made to, not {commit}"
            git("apply", "--whitespace=nowarn", str(patch), folder=Path(work), advice=advice)
        return commit, {name: sha256(Path(work, name)) for name in names}


def write_source(record: Path, commit: str) -> list[Path]:
    """Write source.patch from the source/ of a record's first run; returns the source/ folders of all its runs.

    commit: what the difference is to, in any way git knows it. Raises UserError.
    """
    copies = sorted(record.glob("*/source"))
    if not copies:
        raise UserError(
            f"{record} has no runs with source/; give --pack the --out_dir of --trials as it was left"
        )
    advice = "give --pack a commit of this repository's history, as in --pack HEAD"
    name = git("rev-parse", "--verify", f"{commit}^{{commit}}", advice=advice).decode().strip()
    with tempfile.TemporaryDirectory() as work:
        for side in ("a", "b"):
            write_commit(name, Path(work, side))
        shutil.copytree(
            copies[0], Path(work, "b"), copy_function=shutil.copyfile, dirs_exist_ok=True
        )
        flags = (
            "--no-index",
            "--no-prefix",
            "--no-renames",
            "--no-ext-diff",
            "--no-color",
            "--binary",
        )
        difference = git(
            "diff", *flags, "a", "b", folder=Path(work)
        )  # whose exit code is 1 where they differ
    (record / "source.patch").write_bytes(b"commit " + name.encode() + b"\n" + difference)
    return copies
