"""Files that are written whole, and the source files of a run."""

import contextlib
import errno
import hashlib
import json
import os
import shutil
import site
import sys
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO


def sha256_of_file(path: Path) -> str:
    """Compute the SHA-256 of a file's bytes, in hex."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_rows(metrics: str) -> list[dict]:
    """Parse the rows of a metrics.jsonl, without the torn line of a run that died or is writing."""
    rows = []
    for line in metrics.splitlines():
        with contextlib.suppress(ValueError, RecursionError):
            rows.append(json.loads(line))
    return [row for row in rows if isinstance(row, dict)]


def new_run_folder(name: str) -> Path:
    """Make runs/<time>-<name>, a second later if another run has just taken that name."""
    while True:
        path = Path(f"runs/{time.strftime('%Y%m%d-%H%M%S')}-{name}")
        with contextlib.suppress(FileExistsError):
            path.mkdir(parents=True)
            return path
        time.sleep(0.1)


def fsync(descriptor: int) -> None:
    """Flush a file or folder to the disk, if its file system can."""
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise


@contextlib.contextmanager
def atomic_write(path: Path) -> Iterator[BinaryIO]:
    """Open a binary file that appears at `path` only once it is complete and on the disk.

    Until then its name begins with .tmp. If anything fails, it is removed and `path` is unchanged.
    """
    temporary = path.with_name(f".tmp-{path.name}")
    try:
        with open(temporary, "wb") as file:
            yield file
            file.flush()
            fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    with contextlib.suppress(OSError):  # some systems cannot open a folder
        folder = os.open(path.parent, os.O_RDONLY)
        fsync(folder)
        os.close(folder)


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


def run_sources() -> dict[str, Path]:
    """Find SOURCE_FILES, and every loaded module that belongs to neither Python nor a package.

    Modules outside of the repository are named outside/PATH. Modules that Inductor compiles, anew
    on each machine, are left out.
    """
    # PYTHONPATH may name a different folder of packages, in which PyTorch is
    packages = [str(Path(sys.modules["torch"].__file__).parents[1]), *site.getsitepackages()]
    libraries = (sysconfig.get_path("stdlib"), site.getusersitepackages(), *packages)
    compiled = Path(os.environ.get("TORCHINDUCTOR_CACHE_DIR", REPO)).resolve()  # set by Inductor
    sources = dict(SOURCE_FILES)
    for name, module in list(sys.modules.items()):
        path = getattr(module, "__file__", None)
        # The package decides: PyTorch also loads modules that it has written to other folders
        package = sys.modules.get(name.partition(".")[0], module)
        home = getattr(package, "__file__", None) or path
        if not path or home.startswith(libraries):
            continue
        file = Path(path).resolve()
        if not file.is_file():
            continue
        if file.is_relative_to(REPO):
            sources.setdefault(file.relative_to(REPO).as_posix(), file)
        elif file.suffix == ".py" or not file.is_relative_to(compiled):
            sources[Path("outside", file.relative_to(file.anchor)).as_posix()] = file
    return sources


def source_hashes() -> list[str]:
    """List the name and SHA-256 of each source, one text per file."""
    return [f"{name} sha256 {sha256_of_file(path)}" for name, path in run_sources().items()]


def copy_sources(sources: dict[str, Path], folder: Path) -> None:
    """Copy files into a folder, under their paths in the repository."""
    for name, path in sources.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, folder / name)
