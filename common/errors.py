"""Errors in one sentence, exit codes, the console. Imports nothing of this project."""

import contextlib
import errno
import os
import re
import sys
import traceback
from collections.abc import Callable
from typing import TextIO


class TrainerError(Exception):
    """An error reported in one sentence: what was found, what was expected, what to do."""

    def __init__(self, text: str, printed: bool = False):
        super().__init__(text)
        self.printed = printed  # True if a different rank prints it


class UserError(TrainerError):
    """A user's mistake: exit code 2."""


class RunError(TrainerError):
    """An error that ends a run and is not the user's mistake: exit code 1."""


class SavedInterrupt(KeyboardInterrupt):
    """Ctrl-C, after the run has saved. It propagates through callers of train(); exit code 0."""


# errno values of a bad path: exit code 2
BAD_PATH = (
    errno.EACCES,
    errno.EEXIST,
    errno.EISDIR,
    errno.ENAMETOOLONG,
    errno.ENOTDIR,
    errno.EPERM,
    errno.EROFS,
)

NO_ROOM = (errno.ENOSPC, errno.EDQUOT)

# In messages of PyTorch, CUDA, Triton, cuBLAS, the system, and of oneDNN when it cannot allocate
NO_MEMORY = re.compile(
    r"(?i)out of ?memory|alloc(ation)?_failed|allocate memory|not enough memory"
    r"|could not create a primitive\b(?! desc)"
)

# In messages of gloo and NCCL
NO_CONNECTION = re.compile(
    r"(?i)connection (closed|reset|refused)|broken pipe|timed out|remote process exited"
)


def is_out_of_memory(error: Exception) -> bool:
    """Return True if memory ran out, on the device or the host."""
    if isinstance(error, RuntimeError):
        return bool(NO_MEMORY.search(str(error)))
    return isinstance(error, MemoryError) or getattr(error, "errno", None) == errno.ENOMEM


def is_bad_path(error: Exception) -> bool:
    """Return True if a given path cannot be used as intended."""
    return isinstance(error, OSError) and error.errno in BAD_PATH and bool(error.filename)


def error_sentence(error: Exception) -> str:
    """Say in one sentence what ended a run; return "" for errors that need a traceback."""
    text = str(error).strip()
    if isinstance(error, TrainerError):
        return text
    if is_out_of_memory(error):
        return (
            f"memory ran out ({' '.join(text.split())[:160]}); try a smaller --micro_batch, then "
            "--checkpointing full, --offload optimizer, or a smaller model (sampling: fewer "
            "--num_samples); --resume continues from the newest checkpoint"
        )
    if isinstance(error, OSError) and error.errno in NO_ROOM:
        path = error.filename2 or error.filename or "a file"  # filename2: destination of a copy
        return f"{path} could not be written ({error.strerror}); make room and --resume"
    no_path = (*BAD_PATH, errno.EIO, errno.ESTALE)
    if isinstance(error, OSError) and error.errno in no_path and error.filename:
        return (
            f"{error.filename} cannot be read or written ({error.strerror}); give a different "
            "path, or repair this one"
        )
    has_ranks = "WORLD_SIZE" in os.environ
    if has_ranks and isinstance(error, RuntimeError) and NO_CONNECTION.search(text):
        return f"another rank has ended ({text.splitlines()[0][:160]}); its own message says why"
    return ""


def run_command(main: Callable[[list[str]], int | None], argv: list[str]) -> int:
    """Call a script's main(argv), print the error that ends it, and return the exit code.

    The code is main's own (0 for None), 2 after a user's mistake, 1 after any other error. Errors
    are printed as one sentence if there is one, otherwise as a traceback.
    """
    for stream in (sys.stdout, sys.stdin):
        with contextlib.suppress(AttributeError, ValueError):
            stream.reconfigure(errors="replace")  # characters that a terminal cannot encode
    try:
        return main(argv) or 0
    except SavedInterrupt:
        return 0
    except Exception as error:
        return report_error(error)


def report_error(error: Exception) -> int:
    """Print the error that ended the script on standard error, and return the exit code."""
    sentence = error_sentence(error)
    if not sentence:
        print_line("".join(traceback.format_exception(error)).rstrip(), sys.stderr)
    elif not getattr(error, "printed", False):
        rank = os.environ.get("RANK")
        begin = f"error [rank {rank}]" if rank else "error"
        print_line(f"{begin}: {sentence}", sys.stderr)
    return 2 if isinstance(error, UserError) or is_bad_path(error) else 1


def print_line(text: str, stream: TextIO | None = None) -> None:
    """Print a line, unbuffered, by default on standard output.

    If the console fails (a closed pipe or terminal, a full disk), further output is discarded.
    """
    stream = stream or sys.stdout
    try:
        print(text, file=stream, flush=True)
    except OSError:
        discard_output(stream.fileno())


def discard_output(descriptor: int) -> None:
    """Discard everything written to this file descriptor from now on, without errors."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, descriptor)
    os.close(nowhere)


def exit_process(code: int) -> None:
    """End this process, under torchrun without Python's clean-up.

    Otherwise a gloo thread that releases a tensor late would find no interpreter, and abort.
    """
    if "WORLD_SIZE" in os.environ:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, AttributeError):  # the console is closed, or None
                stream.flush()
        os._exit(code)
    sys.exit(code)
