"""The source files of a run, and the versions of what it runs on."""

import platform
import shutil
import subprocess
from pathlib import Path

import torch

from data.shards import PYTHON_VOCABULARY

REPO = Path(__file__).resolve().parent.parent


def source_files() -> dict[str, Path]:
    """What a run executes, by path relative to the repository, and the vocabulary of its default dataset."""
    packages = ("data", "inference", "ops", "runtime")
    paths = [REPO / "train_gpt.py", REPO / "model.py", REPO / "common.py", PYTHON_VOCABULARY]
    for package in packages:
        paths += sorted((REPO / package).glob("*.py"))
    return {path.relative_to(REPO).as_posix(): path for path in paths}


SOURCE_FILES = source_files()


def software_versions(device: torch.device) -> str:
    """Versions of PyTorch, Python, the system, CUDA and the repository, for log.txt."""
    parts = [
        f"torch {torch.__version__}",
        f"python {platform.python_version()}",
        platform.platform(),
    ]
    if shutil.which("git"):
        command = ["git", "-C", str(REPO), "describe", "--always", "--dirty", "--abbrev=40"]
        parts.append(
            "git "
            + (subprocess.run(command, capture_output=True, text=True).stdout.strip() or "unknown")
        )
    if device.type == "cuda":
        build = f"rocm {torch.version.hip}" if torch.version.hip else f"cuda {torch.version.cuda}"
        parts += [build, f"cudnn {torch.backends.cudnn.version()}", torch.cuda.get_device_name()]
    return ", ".join(parts)
