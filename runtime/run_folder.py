"""The folder of a run, which one run at a time may use, and the sources that are copied into it."""

import contextlib
import fcntl
import os
import platform
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from common.errors import UserError


def new_run_folder(name: str) -> Path:
    """Make runs/<time>-<name>, a second later if another run has just taken that name."""
    while True:
        path = Path(f"runs/{time.strftime('%Y%m%d-%H%M%S')}-{name}")
        with contextlib.suppress(FileExistsError):
            path.mkdir(parents=True)
            return path
        time.sleep(0.1)


@contextlib.contextmanager
def locked_folder(folder: Path) -> Iterator[None]:
    """Context: make a run's folder and lock it. Partial files of a dead run are deleted.

    At the end it is removed, if the run has written nothing. Raises UserError while another run
    uses it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    lock = folder / ".lock"
    with open(lock, "a+") as lock_file:
        try:
            fcntl.flock(lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock_file.seek(0)
            raise UserError(
                f"another run ({lock_file.read()}) is using {folder}; give another --out_dir, or "
                "wait"
            ) from None
        except OSError:
            pass  # some network file systems have no locks
        lock_file.truncate(0)
        lock_file.write(f"process {os.getpid()} on {platform.node()}")
        lock_file.flush()
        for partial in folder.glob(".tmp-*.*"):  # not a folder that prepare.py makes
            partial.unlink()
        try:
            yield
        finally:
            with contextlib.suppress(OSError):
                if list(folder.iterdir()) == [lock]:
                    lock.unlink()
                    folder.rmdir()


# --------------------------------------------------------------------------------------------------
# The source files of a run

REPO = Path(__file__).resolve().parents[1]


def find_sources(repo: Path) -> dict[str, Path]:
    """Find the files of a run and its default vocabulary: path in the repository -> path."""
    paths = [repo / "train_gpt.py", repo / "model.py", repo / "data" / "python_tokenizer.json"]
    for package in ("common", "data", "inference", "ops", "runtime"):
        paths += sorted((repo / package).glob("*.py"))
    return {path.relative_to(repo).as_posix(): path for path in paths if path.is_file()}


SOURCE_FILES = find_sources(REPO)
PACKAGES = {"site-packages", "dist-packages"}  # folders of installed packages


def run_sources() -> dict[str, Path]:
    """Find SOURCE_FILES, and every other module of the repository that is loaded.

    Installed packages are left out: a virtual environment may lie in the repository.
    """
    sources = dict(SOURCE_FILES)
    for module in list(sys.modules.values()):
        file = Path(getattr(module, "__file__", None) or "")
        is_ours = file.is_relative_to(REPO) and PACKAGES.isdisjoint(file.parts)
        if is_ours and file.is_file():
            sources.setdefault(file.relative_to(REPO).as_posix(), file)
    return sources


def copy_sources(sources: dict[str, Path], folder: Path) -> None:
    """Copy files into a folder, under their paths in the repository."""
    for name, path in sources.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, folder / name)
