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
    """The base of every error that is reported in one sentence: what was found, what was expected, what to do.

    printed: another rank prints it.
    """

    printed = False


class UserError(TrainerError):
    """A user's mistake: exit code 2."""


class RunError(TrainerError):
    """What ends a run and is not the user's mistake: exit code 1."""


@contextlib.contextmanager
def catch_signals():
    """Yields a list that collects SIGTERM, SIGINT, SIGUSR1 and SIGHUP by name; a second one ends the process at once.

    Within half a second of the first it counts as the same: systemd and schedulers signal torchrun and its ranks.
    """
    caught, before, since = [], {}, [0.0]

    def note(number, _):
        if not caught:
            since[0] = time.monotonic()
        elif time.monotonic() - since[0] > 0.5:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        caught.append(signal.Signals(number).name)

    if threading.current_thread() is threading.main_thread():
        for name in ("SIGTERM", "SIGINT", "SIGUSR1", "SIGHUP"):
            if hasattr(signal, name) and signal.getsignal(getattr(signal, name)) != signal.SIG_IGN:  # as nohup sets it
                before[getattr(signal, name)] = signal.signal(getattr(signal, name), note)
    try:
        yield caught
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


# The words of PyTorch, CUDA, Triton, cuBLAS, the system, and oneDNN when it cannot allocate a kernel's code
NO_MEMORY = re.compile(
    r"(?i)out of ?memory|alloc(ation)?_failed|allocate memory|not enough memory|could not create a primitive\b(?! desc)"
)


def is_out_of_memory(error: Exception) -> bool:
    """Whether an error means that memory ran out, on the device or the host."""
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, MemoryError) or isinstance(error, RuntimeError) and bool(NO_MEMORY.search(str(error)))


def explain(error: Exception) -> str:
    """The sentence that says what ended a run; "" for what only a traceback can tell."""
    text = (str(error).strip().splitlines() or [type(error).__name__])[0]
    if isinstance(error, TrainerError):
        return str(error)
    if is_out_of_memory(error):
        advice = "a smaller --micro_batch, --checkpointing full, --offload optimizer, a smaller model (sampling: "
        advice += "a smaller --num_samples); a checkpoint that was saved is kept, and --resume continues from it"
        return f"memory ran out ({text[:160]}); try, in this order, {advice}"
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EROFS, getattr(errno, "EDQUOT", None)):
        return f"{error.filename or 'a file'} could not be written ({error.strerror}); make room and --resume"
    if isinstance(error, (PermissionError, IsADirectoryError, NotADirectoryError)) and error.filename:
        return f"{error.filename} cannot be read or written ({error.strerror}); give another, or fix its permissions"
    lost = re.search(r"(?i)connection (closed|reset|refused)|broken pipe|timed out|remote process exited", str(error))
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
        print(f"error [rank {rank}]: {sentence}" if rank else f"error: {sentence}", file=sys.stderr, flush=True)
    user = isinstance(error, (UserError, PermissionError, IsADirectoryError, NotADirectoryError))
    return 2 if user else 1
