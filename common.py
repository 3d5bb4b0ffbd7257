"""What every package uses: errors and how they end a process, seeds, and files that are written whole or not at all.

Imports nothing of this project, and no torch.
"""

import contextlib
import errno
import hashlib
import json
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO


class TrainerError(Exception):
    """The base of every error that is reported in one sentence: what was found, what was expected, what to do."""

    def __init__(self, text: str, printed: bool = False):
        super().__init__(text)
        self.printed = printed  # by another rank


class UserError(TrainerError):
    """A user's mistake: exit code 2."""


class RunError(TrainerError):
    """What ends a run and is not the user's mistake: exit code 1."""


PATH_ERRORS = (FileExistsError, IsADirectoryError, NotADirectoryError, PermissionError)


# The words of PyTorch, CUDA, Triton, cuBLAS, the system, and oneDNN when it cannot allocate a kernel's code
NO_MEMORY = re.compile(
    r"(?i)out of ?memory|alloc(ation)?_failed|allocate memory|not enough memory|could not create a primitive\b(?! desc)"
)


def is_out_of_memory(error: Exception) -> bool:
    """Whether an error means that memory ran out, on the device or the host."""
    if isinstance(error, RuntimeError):
        return bool(NO_MEMORY.search(str(error)))
    return isinstance(error, MemoryError) or getattr(error, "errno", None) == errno.ENOMEM


def error_sentence(error: Exception) -> str:
    """The sentence that says what ended a run; "" for what only a traceback can tell."""
    if isinstance(error, TrainerError):
        return str(error)
    if is_out_of_memory(error):
        text = (str(error).strip() or type(error).__name__).splitlines()[0][:160]
        advice = "try a smaller --micro_batch, then --checkpointing full, --offload optimizer, a smaller model"
        return f"memory ran out ({text}); {advice} (sampling: --num_samples); --resume continues from what was saved"
    if "no kernel image is available" in str(error):
        old = "pip install torch --index-url https://download.pytorch.org/whl/cu126"
        advice = f"for Maxwell, Pascal and Volta `{old}`, for a newer one the newest PyTorch"
        return f"this build of PyTorch has no kernels for this GPU; {advice}, or use --device cpu"
    if isinstance(error, OSError) and error.errno in (
        errno.ENOSPC,
        errno.EROFS,
        getattr(errno, "EDQUOT", None),
    ):
        return f"{error.filename or 'a file'} could not be written ({error.strerror}); make room and --resume"
    if isinstance(error, PATH_ERRORS) and error.filename:
        return f"{error.filename} cannot be read or written ({error.strerror}); give another, or fix its permissions"
    lost = re.search(
        r"(?i)connection (closed|reset|refused)|broken pipe|timed out|remote process exited",
        str(error),
    )
    if lost and isinstance(error, RuntimeError) and int(os.environ.get("WORLD_SIZE", 1)) > 1:
        return f"another rank has ended ({lost[0]}); its own message says why"
    return ""


def report_error(error: Exception) -> int:
    """Print an error's sentence on standard error and return the exit code: 2 for the user's mistakes, 1 for the rest.

    Raises the error again when there is nothing better to say of it than its traceback.
    """
    sentence, rank = error_sentence(error), os.environ.get("RANK")
    if not sentence:
        raise error
    if not getattr(error, "printed", False):
        print(
            f"error [rank {rank}]: {sentence}" if rank else f"error: {sentence}",
            file=sys.stderr,
            flush=True,
        )
    return 2 if isinstance(error, (UserError, *PATH_ERRORS)) else 1


def exit_process(code: int) -> None:
    """End this process with an exit code; under torchrun, without Python's clean-up.

    A gloo thread that releases a tensor late would find the interpreter gone, and end the process with SIGABRT.
    """
    if "WORLD_SIZE" in os.environ:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def derive_seed(*names) -> int:
    """A 64-bit pseudo-random seed, a function of the names."""
    return int.from_bytes(hashlib.sha256("/".join(map(str, names)).encode()).digest()[:8], "little")


def largest_divisor(n: int, most: int) -> int:
    """The largest divisor of n that is at most `most`; at least 1."""
    for divisor in range(min(n, max(1, most)), 0, -1):
        if n % divisor == 0:
            return divisor


@contextlib.contextmanager
def atomic_write(path: Path) -> Iterator[BinaryIO]:
    """A binary file, written under a name that starts with `.tmp`, then flushed to disk and renamed to `path`.

    If anything fails, it is removed and `path` stays as it was.
    """
    temporary = path.with_name(f".tmp-{path.name}")
    try:
        with open(temporary, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    with contextlib.suppress(OSError):  # some systems cannot flush a folder, and so the new name
        folder = os.open(path.parent, os.O_RDONLY)
        os.fsync(folder)
        os.close(folder)


def sha256_of_file(path: str | Path) -> str:
    """SHA-256 of a file's bytes, in hex."""
    with open(path, "rb", buffering=0) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def printable(text: str) -> str:
    """The text with control characters, which can change a terminal's state, replaced."""
    return re.sub(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", "\ufffd", text)


def nan_to_none(value):
    """The same dict or list with None for numbers that are not finite, which JSON does not have."""
    return json.loads(json.dumps(value), parse_constant=lambda _: None)
