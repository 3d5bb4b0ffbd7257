"""A record's source: a commit of this repository and the difference from it, in source.patch.

Its first line is `commit HASH`; the rest is a diff for `git apply`, empty if there is no
difference.
"""

import io
import os
import re
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Iterable
from pathlib import Path

from common.errors import UserError
from common.files import sha256_of_file

REPOSITORY = Path(__file__).resolve().parent.parent


def git(*arguments: str, folder: Path | None = None, advice: str = "") -> bytes:
    """Run git in a folder, by default the repository, and return its output.

    Raises UserError with git's message and the advice; without advice, failures are ignored.
    """
    command = ["git", "-c", "core.autocrlf=false", *arguments]
    # Git must not look for a repository above temporary folders
    env = os.environ | dict(GIT_CEILING_DIRECTORIES=tempfile.gettempdir())
    done = subprocess.run(command, cwd=folder or REPOSITORY, env=env, capture_output=True)
    if done.returncode and advice:
        complaint = done.stderr.decode(errors="replace").strip().rpartition("\n")[2]
        raise UserError(f"git {arguments[0]} failed ({complaint}); {advice}")
    return done.stdout


def write_commit(commit: str, folder: Path) -> None:
    """Write the files of a commit into a folder. Raises UserError if the commit is missing."""
    advice = f"get the whole history, with commit {commit}, by `git fetch --unshallow`"
    archive = git("archive", "--format=tar", commit, advice=advice)
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        tar.extractall(folder, filter="data")


def rebuild(record: Path, folder: Path) -> str:
    """Rebuild a record's source from the commit and the diff in source.patch, in a folder.

    Returns the commit. Raises UserError.
    """
    patch = record.resolve() / "source.patch"
    content = patch.read_bytes() if patch.is_file() else b""
    first, _, difference = content.partition(b"\n")
    found = re.fullmatch(rb"commit ([0-9a-f]{40})\s*", first)
    if not found:
        wrong = f"{patch} is missing or does not begin with `commit` and 40 hexadecimal digits"
        advice = f"make it with `python bench.py record {record} --pack HEAD`"
        raise UserError(f"{wrong}; {advice}")
    commit = found[1].decode()
    write_commit(commit, folder)
    if difference.strip():
        advice = f"{patch} must name the commit that it was made from, not {commit}"
        git("apply", "--whitespace=nowarn", str(patch), folder=folder, advice=advice)
    return commit


def read_source(record: Path, names: Iterable[str]) -> tuple[dict, dict, str]:
    """Return hashes of a record's source, its changes to this repository's history, and the commit.

    hashes: name -> SHA-256, None for a missing file. changes: name -> lines added and removed, such
    as "+3 -1". The commit is the record's own, or its newest ancestor in the history. Raises
    UserError.
    """
    hashes = {}
    changes = {}
    with tempfile.TemporaryDirectory() as work:
        folder = Path(work, "b")
        commit = rebuild(record, folder)
        advice = f"{record} must be based on a commit of this repository"
        base = git("merge-base", commit, "HEAD", advice=advice).decode().strip()
        write_commit(base, Path(work, "a"))
        for name in names:
            path = folder / name
            hashes[name] = sha256_of_file(path) if path.is_file() else None
        options = "--no-index --no-renames --no-ext-diff --numstat -z"
        counts = git("diff", *options.split(), "a", "b", folder=Path(work)).decode()
    for added, removed, old, new in re.findall(r"(\S+)\t(\S+)\t\0(.+?)\0(.+?)\0", counts):
        name = old[2:] if new == "/dev/null" else new[2:]
        changes[name] = f"+{added} -{removed}"
    return hashes, changes, base


def write_source(record: Path, commit: str) -> list[Path]:
    """Write source.patch from the source/ of a record's first run; return the source/ of all runs.

    commit: the base of the difference, in any form that git accepts. Raises UserError.
    """
    copies = sorted(record.glob("*/source"))
    if not copies:
        advice = "give --pack the unchanged --out_dir of --trials"
        raise UserError(f"{record} has no runs with source/; {advice}")
    advice = "give --pack a commit of this repository's history, as in --pack HEAD"
    name = git("rev-parse", "--verify", f"{commit}^{{commit}}", advice=advice).decode().strip()
    with tempfile.TemporaryDirectory() as work:
        for side in ("a", "b"):
            write_commit(name, Path(work, side))
        copy = shutil.copyfile
        shutil.copytree(copies[0], Path(work, "b"), copy_function=copy, dirs_exist_ok=True)
        options = "--no-index --no-prefix --no-renames --no-ext-diff --no-color --binary"
        # Git's exit code is 1 if they differ
        difference = git("diff", *options.split(), "a", "b", folder=Path(work))
    (record / "source.patch").write_bytes(b"commit " + name.encode() + b"\n" + difference)
    return copies
