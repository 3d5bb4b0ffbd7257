"""What every package uses: errors, exit codes, signals, seeds, and files that are written whole.

Imports nothing of this project, and no torch.
"""

import contextlib
import errno
import functools
import hashlib
import json
import os
import re
import shutil
import signal
import site
import sys
import sysconfig
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from decimal import Decimal
from pathlib import Path
from typing import BinaryIO

# --------------------------------------------------------------------------------------------------
# Errors


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
    several_ranks = env_int("WORLD_SIZE", 1) > 1
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


# --------------------------------------------------------------------------------------------------
# Numbers, texts and files


def derive_seed(*names) -> int:
    """A 64-bit pseudo-random seed, a function of the names."""
    digest = hashlib.sha256("/".join(map(str, names)).encode()).digest()
    return int.from_bytes(digest[:8], "little")


def env_int(name: str, default: int) -> int:
    """An integer of the environment, as torchrun sets them; the default if it is unset or empty.

    Raises UserError for another text.
    """
    text = os.environ.get(name)
    try:
        return int(text or default)
    except ValueError:
        raise UserError(f"{name} is {text!r}; expected an integer, as torchrun sets it") from None


def largest_divisor(n: int, most: int) -> int:
    """The largest divisor of n that is at most `most`; at least 1."""
    for divisor in range(min(n, max(1, most)), 0, -1):
        if n % divisor == 0:
            return divisor


UNITS = {"k": 10**3, "m": 10**6, "b": 10**9}


def integer(text: str) -> int:
    """Read an integer, as in 1000, 1_000, 1e3, 4k (4,000), 2M or 1.5B. Raises ValueError."""
    unit = UNITS.get(text[-1:].lower(), 1)
    number = text if unit == 1 else text[:-1]
    try:
        value = Decimal(number) * unit
        if value == value.to_integral_value() and abs(value) < 2**63:
            return int(value)
    except ArithmeticError:  # not a number, or not a finite one
        pass
    raise ValueError


def boolean(text: str) -> bool:
    """Read true, 1, false or 0. Raises ValueError."""
    if text.lower() not in ("true", "1", "false", "0"):
        raise ValueError
    return text.lower() in ("true", "1")


def nan_to_none(value):
    """Replace numbers that are not finite, which JSON does not have, by None in a dict or list."""
    return json.loads(json.dumps(value), parse_constant=lambda _: None)


def printable(text: str) -> str:
    """Replace control characters, which can change a terminal's state."""
    return re.sub(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", "\ufffd", text)


def sha256_of_file(path: str | Path) -> str:
    """SHA-256 of a file's bytes, in hex."""
    with open(path, "rb", buffering=0) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_rows(metrics: str) -> list[dict]:
    """The rows of a metrics.jsonl, without the torn line of a run that died or is writing."""
    rows = []
    for line in metrics.splitlines():
        with contextlib.suppress(ValueError, RecursionError):
            rows.append(json.loads(line))
    return [row for row in rows if isinstance(row, dict)]


def new_run_folder(name: str) -> Path:
    """Make runs/<time>-<name>; a second later if another run has just made it."""
    while True:
        path = Path(f"runs/{time.strftime('%Y%m%d-%H%M%S')}-{name}")
        with contextlib.suppress(FileExistsError):
            path.mkdir(parents=True)
            return path
        time.sleep(0.1)


def cpu_cores() -> int:
    """Count the cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count()


def fsync(descriptor: int) -> None:
    """Flush a file or folder to the disk, unless its file system cannot."""
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS):
            raise


@contextlib.contextmanager
def atomic_write(path: Path) -> Iterator[BinaryIO]:
    """Open a binary file that appears at `path` only once it is complete and on the disk.

    Until then its name begins with .tmp; if anything fails, it is removed and `path` stays.
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

REPO = Path(__file__).resolve().parent


def find_sources(repo: Path) -> dict[str, Path]:
    """What a run executes, and the vocabulary of its default dataset, by path in the repository."""
    paths = [repo / "train_gpt.py", repo / "model.py", repo / "common.py"]
    paths.append(repo / "data" / "python_tokenizer.json")
    for package in ("data", "inference", "ops", "runtime"):
        paths += sorted((repo / package).glob("*.py"))
    return {path.relative_to(repo).as_posix(): path for path in paths if path.is_file()}


SOURCE_FILES = find_sources(REPO)


def run_sources() -> dict[str, Path]:
    """Find SOURCE_FILES, and every loaded module that is neither Python's nor a package's.

    Those outside of the repository are named outside/PATH. What Inductor compiles, anew on each
    machine, is left out.
    """
    # PYTHONPATH may name a different folder of packages, in which PyTorch is
    packages = [str(Path(sys.modules["torch"].__file__).parents[1]), *site.getsitepackages()]
    libraries = (sysconfig.get_path("stdlib"), site.getusersitepackages(), *packages)
    compiled = Path(os.environ.get("TORCHINDUCTOR_CACHE_DIR", REPO)).resolve()  # Inductor sets it
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
    """A text with the name and SHA-256 of each source."""
    return [f"{name} sha256 {sha256_of_file(path)}" for name, path in run_sources().items()]


def copy_sources(sources: dict[str, Path], folder: Path) -> None:
    """Copy files, by their paths in the repository, to these paths in a folder."""
    for name, path in sources.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, folder / name)
