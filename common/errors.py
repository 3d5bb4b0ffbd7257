"""Errors in one sentence, exit codes, the console, and signals. Imports nothing of this project."""

import contextlib
import errno
import functools
import os
import re
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable


class TrainerError(Exception):
    """An error that is reported in one sentence: what was found, what was expected, what to do."""

    def __init__(self, text: str, printed: bool = False):
        super().__init__(text)
        self.printed = printed  # by another rank


class UserError(TrainerError):
    """A user's mistake: exit code 2."""


class RunError(TrainerError):
    """What ends a run and is not the user's mistake: exit code 1."""


class SavedInterrupt(KeyboardInterrupt):
    """Ctrl-C, after the run has saved: it ends what called train(). A script's exit code is 0."""


# What the system says of a wrong path: exit code 2
BAD_PATH = (
    errno.EACCES,
    errno.EEXIST,
    errno.EISDIR,
    errno.ELOOP,
    errno.ENAMETOOLONG,
    errno.ENOTDIR,
    errno.EPERM,
    errno.EROFS,
)

NO_ROOM = (errno.ENOSPC, getattr(errno, "EDQUOT", None))

# The words of PyTorch, CUDA, Triton, cuBLAS, the system, and of oneDNN when it cannot allocate
NO_MEMORY = re.compile(
    r"(?i)out of ?memory|alloc(ation)?_failed|allocate memory|not enough memory"
    r"|could not create a primitive\b(?! desc)"
)

# The words of gloo and NCCL
NO_CONNECTION = re.compile(
    r"(?i)connection (closed|reset|refused)|broken pipe|timed out|remote process exited"
)


def is_out_of_memory(error: Exception) -> bool:
    """Whether memory ran out, on the device or the host."""
    if isinstance(error, RuntimeError):
        return bool(NO_MEMORY.search(str(error)))
    return isinstance(error, MemoryError) or getattr(error, "errno", None) == errno.ENOMEM


def is_bad_path(error: Exception) -> bool:
    """Whether a path that was given cannot be what it is meant for."""
    return isinstance(error, OSError) and error.errno in BAD_PATH and bool(error.filename)


def is_lost_connection(error: Exception) -> bool:
    """Whether another rank has ended."""
    several_ranks = os.environ.get("WORLD_SIZE", "1") != "1"
    lost = isinstance(error, RuntimeError) and NO_CONNECTION.search(str(error))
    return several_ranks and bool(lost)


def error_sentence(error: Exception) -> str:
    """The sentence that says what ended a run; "" for what only a traceback can tell."""
    text = str(error).strip()
    if isinstance(error, TrainerError):
        return text
    if is_out_of_memory(error):
        first_line = (text or type(error).__name__).splitlines()[0][:160]
        return (
            f"memory ran out ({first_line}); try a smaller --micro_batch, then --checkpointing "
            "full, --offload optimizer, a smaller model (sampling: --num_samples); --resume "
            "continues from what was saved"
        )
    if "no kernel image is available" in text:
        return (
            "this build of PyTorch has no kernels for this GPU; for Maxwell, Pascal and Volta "
            "`pip install torch --index-url https://download.pytorch.org/whl/cu126`, for a newer "
            "one the newest PyTorch, or use --device cpu"
        )
    if isinstance(error, OSError) and error.errno in NO_ROOM:
        path = error.filename2 or error.filename or "a file"  # the second is where it is copied to
        return f"{path} could not be written ({error.strerror}); make room and --resume"
    is_away = isinstance(error, OSError) and error.errno in (errno.EIO, errno.ESTALE)
    if is_bad_path(error) or (is_away and error.filename):
        return (
            f"{error.filename} cannot be read or written ({error.strerror}); give a different "
            "path, or repair this one"
        )
    inner = getattr(error, "inner_exception", None)  # of torch.compile
    if isinstance(inner, OSError) or type(inner).__name__ == "CppCompileError":
        return compile_sentence(error)
    if is_lost_connection(error):
        return f"another rank has ended ({text.splitlines()[0][:160]}); its own message says why"
    return ""


def compile_sentence(error: Exception) -> str:
    """The sentence for an error of torch.compile's C++ compiler or cache, in their words."""
    words = str(getattr(error, "inner_exception", error)).split("Output:\n")[-1]
    return (  # compilers end with what failed
        f"--compile failed in the compiler or its cache ({' '.join(words.split())[-300:]}); repair "
        "that, set TORCHINDUCTOR_CACHE_DIR, or remove --compile"
    )


def command(main: Callable) -> Callable:
    """Decorate a script's main(argv): it returns the exit code, after an error has been printed.

    The code is what main returns (None is 0), 2 after a user's mistake, 1 after another error.
    An error is printed as one sentence if it has one, else as a traceback.
    """

    @functools.wraps(main)
    def run_command(argv: list[str]) -> int:
        for stream in (sys.stdout, sys.stdin):
            with contextlib.suppress(AttributeError, ValueError):
                stream.reconfigure(errors="replace")  # what a terminal cannot encode
        try:
            return main(argv) or 0
        except SavedInterrupt:
            return 0
        except Exception as error:
            return report_error(error)

    return run_command


def report_error(error: Exception) -> int:
    """Print what ended the script on standard error; returns the exit code."""
    sentence = error_sentence(error)
    if not sentence:
        print_line("".join(traceback.format_exception(error)).rstrip(), sys.stderr)
    elif not getattr(error, "printed", False):
        rank = os.environ.get("RANK")
        begin = f"error [rank {rank}]" if rank else "error"
        print_line(f"{begin}: {sentence}", sys.stderr)
    return 2 if isinstance(error, UserError) or is_bad_path(error) else 1


def print_line(text: str, stream=None) -> None:
    """Print a line at once, by default on standard output.

    A console that fails (its pipe or terminal is closed, its disk is full) is given up: what is
    printed to it from then on is lost.
    """
    stream = stream or sys.stdout
    try:
        print(text, file=stream, flush=True)
    except OSError:
        discard_output(stream.fileno())


def discard_output(descriptor: int) -> None:
    """Lose what is written to this file descriptor from now on, without an error."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, descriptor)
    os.close(nowhere)


def exit_process(code: int) -> None:
    """End this process; under torchrun without Python's clean-up.

    A gloo thread that releases a tensor late would find the interpreter gone, and abort.
    """
    if "WORLD_SIZE" in os.environ:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, AttributeError):  # a console that has gone, or none
                stream.flush()
        os._exit(code)
    sys.exit(code)


# --------------------------------------------------------------------------------------------------
# Signals that ask a run to save and end

# Those with which terminals, schedulers and limits announce an end; Windows has SIGBREAK
SIGNALS = "SIGTERM SIGINT SIGHUP SIGUSR1 SIGUSR2 SIGXCPU SIGALRM SIGPWR SIGBREAK".split()

# Schedulers signal both torchrun and its ranks, and torchrun passes it on: what comes within half a
# second of the first signal is the same one
SAME_SIGNAL_S = 0.5


@contextlib.contextmanager
def catch_signals():
    """Yield a list that collects the names of signals.

    A second one does what it did before, at once: it ends the process, or raises KeyboardInterrupt.
    (Not SIGXCPU, which the system repeats for each second of CPU time.)
    """
    caught = []
    first_at = 0.0

    def handle(number, _frame):
        nonlocal first_at
        name = signal.Signals(number).name
        if not caught:
            first_at = time.monotonic()
        elif name != "SIGXCPU" and time.monotonic() > first_at + SAME_SIGNAL_S:
            signal.signal(number, handlers[number])
            signal.raise_signal(number)
        caught.append(name)

    handlers = {}  # as they were
    if threading.current_thread() is threading.main_thread():
        for number in signal.Signals:
            # nohup ignores some, and a program that calls train() may have its own handlers
            is_default = signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler)
            if number.name in SIGNALS and is_default:
                handlers[number] = signal.signal(number, handle)
    try:
        yield caught
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
