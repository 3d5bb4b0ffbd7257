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

from data.shards import UserError

REPOSITORY = Path(__file__).resolve().parent.parent


def git(*arguments: str, folder: Path | None = None) -> subprocess.CompletedProcess:
    """git run in a folder, by default the repository, as bytes. Raises UserError where there is no git."""
    command = ["git", "-c", "core.autocrlf=false", *arguments]
    alone = os.environ | dict(GIT_CEILING_DIRECTORIES=tempfile.gettempdir())  # a folder there is in no repository
    try:
        return subprocess.run(command, cwd=folder or REPOSITORY, env=alone, capture_output=True)
    except OSError as error:
        raise UserError(f"git, which reads the sources of records, cannot be started ({error}); install it") from None


def said(done: subprocess.CompletedProcess) -> str:
    """The last line of git's complaint."""
    return (done.stderr.decode(errors="replace").strip().splitlines() or [f"exit code {done.returncode}"])[-1]


def write_commit(commit: str, folder: Path) -> None:
    """Write the files of a commit, as git names it, into a folder. Raises UserError for what is missing."""
    archive = git("archive", "--format=tar", commit)
    if archive.returncode != 0:
        raise no_commit(commit)
    with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as tar:
        tar.extractall(folder, filter="data")


def no_commit(commit: str) -> UserError:
    """Says what of the history is missing, so that there is no such commit, and what to do."""
    shallow = git("rev-parse", "--is-shallow-repository")
    if shallow.returncode != 0:
        return UserError(
            f"{REPOSITORY} has no git history to read commit {commit} from ({said(shallow)}); get the repository by "
            "`git clone`"
        )
    if shallow.stdout.strip() == b"true":
        return UserError(f"this clone is shallow and lacks commit {commit}; run `git fetch --unshallow`")
    return UserError(f"the git history has no commit {commit}; fetch a branch that has it or name another commit")


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
        raise UserError(
            f"{patch} is missing or does not begin with `commit` and 40 hexadecimal digits; make it by "
            f"`python bench.py record {record} --pack HEAD`"
        )
    commit = found[1].decode()
    with tempfile.TemporaryDirectory() as work:
        write_commit(commit, Path(work))
        if difference.strip():
            applied = git("apply", "--whitespace=nowarn", str(patch), folder=Path(work))
            if applied.returncode != 0:
                raise UserError(
                    f"{patch} does not apply to commit {commit} ({said(applied)}); name the commit it was made to"
                )
        return commit, {name: sha256(Path(work, name)) for name in names}


def write_source(record: Path, commit: str) -> list[Path]:
    """Write source.patch from the source/ of a record's first run; returns the source/ folders of all its runs.

    commit: what the difference is to, in any way git knows it. Raises UserError.
    """
    copies = sorted(record.glob("*/source"))
    if not copies:
        raise UserError(f"{record} has no runs with source/; give --pack the --out_dir of --trials as it was left")
    named = git("rev-parse", "--verify", f"{commit}^{{commit}}")
    if named.returncode != 0:
        raise no_commit(commit)
    name = named.stdout.decode().strip()
    with tempfile.TemporaryDirectory() as work:
        for side in ("a", "b"):
            write_commit(name, Path(work, side))
        shutil.copytree(copies[0], Path(work, "b"), copy_function=shutil.copyfile, dirs_exist_ok=True)
        flags = ("--no-index", "--no-prefix", "--no-renames", "--no-ext-diff", "--no-color", "--binary")
        difference = git("diff", *flags, "a", "b", folder=Path(work))
    (record / "source.patch").write_bytes(b"commit " + name.encode() + b"\n" + difference.stdout)
    return copies
