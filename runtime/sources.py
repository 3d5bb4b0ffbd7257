"""The source files of a run, and the versions of what it runs on."""

import platform
import shutil
import subprocess
from pathlib import Path

import torch

from common import sha256_of_file
from data.shards import PYTHON_VOCABULARY

REPO = Path(__file__).resolve().parent.parent


def find_sources() -> dict[str, Path]:
    """What a run executes, and the vocabulary of its default dataset, by path in the repository."""
    paths = [REPO / "train_gpt.py", REPO / "model.py", REPO / "common.py", PYTHON_VOCABULARY]
    for package in ("data", "inference", "ops", "runtime"):
        paths += sorted((REPO / package).glob("*.py"))
    return {path.relative_to(REPO).as_posix(): path for path in paths}


SOURCE_FILES = find_sources()


def source_hashes() -> list[str]:
    """A text with the name and SHA-256 of each source."""
    return [f"{name} sha256 {sha256_of_file(path)}" for name, path in SOURCE_FILES.items()]


def copy_sources(folder: Path) -> None:
    """Copy the sources to a folder, with their paths in the repository."""
    for name, path in SOURCE_FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, folder / name)


def software_versions(device: torch.device) -> str:
    """Versions of PyTorch, Python, the system, CUDA and the repository, for log.txt."""
    parts = [f"torch {torch.__version__}", f"python {platform.python_version()}"]
    parts.append(platform.platform())
    if shutil.which("git"):
        command = ["git", "-C", str(REPO), "describe", "--always", "--dirty", "--abbrev=40"]
        described = subprocess.run(command, capture_output=True, text=True).stdout.strip()
        parts.append(f"git {described or 'unknown'}")
    if device.type == "cuda":
        if torch.version.hip:
            parts.append(f"rocm {torch.version.hip}")
        else:
            parts.append(f"cuda {torch.version.cuda}")
        parts.append(f"cudnn {torch.backends.cudnn.version()}")
        parts.append(torch.cuda.get_device_name())
    return ", ".join(parts)
