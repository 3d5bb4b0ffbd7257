"""What ends a run before its time: errors told in one sentence, with an exit code, and signals. Imports no torch."""

import contextlib
import errno
import os
import re
import signal
import sys
import threading
import time


class TrainerError(Exception):
    """The base of every error that is reported in one sentence: what was found, what was expected, what to do."""

    def __init__(self, text: str, printed: bool = False):
        super().__init__(text)
        self.printed = printed  # by another rank


class UserError(TrainerError):
    """A user's mistake: exit code 2."""


class RunError(TrainerError):
    """What ends a run and is not the user's mistake: exit code 1."""


@contextlib.contextmanager
def catch_signals():
    """Yields a list that collects SIGTERM, SIGINT, SIGUSR1 and SIGHUP by name; a second one ends the process at once.

    Within half a second of the first it counts as the same: systemd and schedulers signal torchrun and its ranks.
    """
    caught, before, since = [], {}, 0.0

    def note(number, _):
        nonlocal since
        if caught and time.monotonic() > since + 0.5:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        since = since or time.monotonic()
        caught.append(signal.Signals(number).name)

    if threading.current_thread() is threading.main_thread():
        found = [
            number
            for number in signal.Signals
            if number.name in ("SIGTERM", "SIGINT", "SIGUSR1", "SIGHUP")
        ]
        found = [
            number for number in found if signal.getsignal(number) != signal.SIG_IGN
        ]  # as nohup sets it
        before = {number: signal.signal(number, note) for number in found}
    try:
        yield caught
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


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


def explain(error: Exception) -> str:
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
    sentence, rank = explain(error), os.environ.get("RANK")
    if not sentence:
        raise error
    if not getattr(error, "printed", False):
        print(
            f"error [rank {rank}]: {sentence}" if rank else f"error: {sentence}",
            file=sys.stderr,
            flush=True,
        )
    return 2 if isinstance(error, (UserError, *PATH_ERRORS)) else 1
