"""What ends a run before its time: signals, and errors explained in one sentence with an exit code."""

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
from collections import deque
from pathlib import Path

import torch
import torch.distributed as dist
from torch.utils.checkpoint import CheckpointError

from data.shards import Stopped, TrainerError, UserError
from generation import GenerationError
from ops.init import ModelError
from runtime.derived import is_sharded

FILE_MISTAKES = (PermissionError, IsADirectoryError, NotADirectoryError)


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


def report_skipped(skipped: deque, step: int, bad_steps: int, max_bad_steps: int, stream, say) -> tuple[int, str]:
    """Report which updates up to `step` were skipped, and clear the list; waits for the device.

    skipped: bool () tensors, true for a skipped update. bad_steps: consecutive skips before these. Returns the new
    count, and why the run must end once it reaches max_bad_steps (0: never), else "". stream: the run's TokenStream.
    """
    flags = torch.stack(list(skipped)).tolist() if skipped else []
    skipped.clear()
    for number, bad in enumerate(flags, step - len(flags) + 1):
        bad_steps = bad_steps + 1 if bad else 0
        if not bad:
            continue
        at = stream.position(number - 1)
        say(
            f"step {number} skipped: its loss or gradient is not finite ({bad_steps} in a row); its data: "
            f"{stream.seqs_per_batch} sequences from number {at['window']} of epoch {at['epoch']} on"
        )
        if bad_steps == max_bad_steps:
            return bad_steps, (
                f"the loss or gradient was not finite in {bad_steps} steps in a row, up to step {number}, and "
                f"ckpt_{step}.pt keeps the weights from before; try lower learning rates, --grad_clip 1 or "
                "--dtype fp32, or look at the data there"
            )
    return bad_steps, ""


# The words of PyTorch, CUDA, Triton, cuBLAS, cuDNN, the system, and oneDNN when it cannot allocate a kernel's code
NO_MEMORY = re.compile(
    "(?i)out of ?memory|alloc(ation)?_failed|allocate memory|not enough memory|bad_alloc|"
    r"could not create a primitive\b(?! descriptor)"
)


def is_out_of_memory(error: Exception) -> bool:
    """Whether an error means that memory ran out, on the device or the host."""
    if isinstance(error, (TrainerError, ModelError, GenerationError)):  # these explain themselves
        return False
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, RuntimeError) and NO_MEMORY.search(str(error)) is not None


def explain_oom(error: Exception) -> str:
    """What to say of an error that means that memory ran out; "" for any other."""
    if not is_out_of_memory(error):
        return ""
    asked = re.search(r"allocate (\d+) bytes|allocate ([\d.]+ \w+)", str(error))
    asked = asked and (asked[2] or f"{int(asked[1]) / 2**30:,.1f} GiB") or "more"
    available, last = "", "a smaller model"
    if torch.cuda.is_initialized():
        free, total = torch.cuda.mem_get_info()
        available, last = f", with {free / 2**30:,.1f} of {total / 2**30:,.1f} GiB free", "--offload optimizer"
    elif "SC_AVPHYS_PAGES" in getattr(os, "sysconf_names", ()):
        available = f", with {os.sysconf('SC_AVPHYS_PAGES') * os.sysconf('SC_PAGE_SIZE') / 2**30:,.1f} GiB free"
    return (
        f"memory ran out: {asked} were asked for{available}; try, in this order, a smaller --micro_batch, "
        f"--checkpointing full, {last} (sampling: a smaller --num_samples); a checkpoint that was saved is kept, and "
        "--resume continues from it"
    )


def explain_io_error(error: Exception) -> str:
    """What to say when there is no room for a file, or it may not be read or written; "" for any other error."""
    if isinstance(error, FILE_MISTAKES) and error.filename:
        return f"{error.filename} cannot be read or written ({error.strerror}); give another, or fix its permissions"
    if not isinstance(error, OSError) or error.errno not in (errno.ENOSPC, errno.EROFS, getattr(errno, "EDQUOT", None)):
        return ""
    return f"{error.filename or 'a file'} could not be written ({error.strerror}); make room and --resume"


def explain_compile_error(error: Exception) -> str:
    """What to say when the C++ compiler refuses a kernel of torch.compile; "" for any other error."""
    if "C++ compile error" not in str(error):
        return ""
    found = re.search(r"error: .*", str(error))
    return (
        f"the C++ compiler could not compile PyTorch's code ({found[0] if found else 'no reason given'}); put "
        "TORCHINDUCTOR_VEC_ISA_OK= before the command, to use only instructions it supports, or remove --compile"
    )


def explain_peer_failure(error: Exception) -> str:
    """What to say of an error that means that another rank has ended, whose own message matters; else ""."""
    found = re.search(r"(?i)connection (closed|reset|refused)|broken pipe|timed out|remote process exited", str(error))
    network = (dist.DistNetworkError, dist.DistBackendError, dist.DistStoreError)
    if not (isinstance(error, network) or type(error) is RuntimeError and found):
        return ""
    if int(os.environ.get("WORLD_SIZE", 1)) == 1:
        return ""
    if not found and "NCCL error" in str(error):  # its own, on all ranks: shared memory, interfaces, drivers
        return f"NCCL failed ({str(error).strip().splitlines()[-1]}); NCCL_DEBUG=INFO before the command says more"
    return (
        f"another rank has ended ({found[0] if found else type(error).__name__}); its own message says why, or under "
        "--parallel fsdp the ranks had gradients for different parameters, which --parallel ddp allows"
    )


def never_fatal(function):
    """A decorator for functions that must not end a run: returns their text, or why they failed.

    The first argument is the TrainState. With sharded weights they do raise, as other ranks would wait for this one.
    """

    @functools.wraps(function)
    def wrapped(state, *args) -> str:
        try:
            return function(state, *args)
        except Exception as error:
            if is_sharded(state.cfg):
                raise
            return f"(failed: {type(error).__name__}: {error})"

    return wrapped


EDIT_ADVICE = (  # what PyTorch says of mistakes of edits, and what to do about them
    (
        "(must|to) have the same dtype|expected scalar type|type .* should be the same|does not match weight dtype",
        "weights are fp32, and activations are in --dtype: use model.Linear, which casts, or .to(x.dtype), or "
        "--dtype fp32",
    ),
    (
        "index out of range in self",
        "inputs hold an id that is not a token: a target to exclude becomes -1 in y of train_step",
    ),
    (
        "meta tensor|[Dd]evice meta",
        "under FSDP the model is first built on the meta device, so constructors cannot read values",
    ),
    (
        "mixed torch.Tensor and DTensor|does not support deepcopy",
        "under FSDP a parameter is sharded: make tensors that go with it by torch.zeros_like(p) or p.detach().clone()"
        ", keep them in state.extra or the optimizer's state under the parameter's name, and losses in GPT.forward",
    ),
    ("storage of size 0", "FSDP gathers weights for loss.backward() alone, not for torch.autograd.grad"),
    ("backward an extra time", "--checkpointing selective allows one backward pass; use full or none"),
    ("different number of tensors was saved", "what a forward pass does must not depend on state that changes between"),
    ("ready only once", "under DDP all of a loss must come from GPT.forward, and checkpoint(..., use_reentrant=False)"),
    (
        "once_differentiable",
        "norm and relu_squared of ops/pointwise.py have no second derivative: call F.rms_norm and F.relu(x).square()",
    ),
    (
        "'TrainState' object has no attribute",
        "what is to survive a resume goes into state.extra, other things become a field of TrainState",
    ),
)


def explain_edit(error: Exception) -> str:
    """What to say of mistakes in edits that PyTorch's message does not explain, and in what cannot compile; else ""."""
    text = str(error).strip()
    if type(error).__module__.startswith("torch._dynamo.exc"):
        places = re.findall(r'File "([^"]+)", line (\d+)', text.partition("from user code")[2])
        places = [place for place in places if "site-packages" not in place[0]] or places
        at = f" {Path(places[-1][0]).name}, line {places[-1][1]}" if places else " a block"
        if "Recompile" in type(error).__name__:  # FailOnRecompileLimitHit
            return (
                f"torch.compile keeps recompiling{at} ({text.splitlines()[0]}): a number that changes from step "
                "to step is a constant to it; make it a tensor, such as a buffer filled in each step, or remove "
                "--compile"
            )
        return f"torch.compile cannot compile{at}: {text.splitlines()[0]}; write it otherwise, or remove --compile"
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "site-packages" not in frame.filename]
    at = f"{Path(frames[-1].filename).name}, line {frames[-1].lineno}: " if frames else ""
    kinds = (RuntimeError, ValueError, AttributeError, AssertionError, IndexError, CheckpointError)
    for pattern, advice in EDIT_ADVICE if type(error) in kinds else ():
        if re.search(pattern, text):
            return f"{at}{text.splitlines()[0]}; {advice}"
    return ""


def explain(error: Exception) -> str:
    """The sentence that says what ended a run; "" for what only a traceback can tell."""
    if isinstance(error, (TrainerError, ModelError, GenerationError)):
        return str(error)
    explanations = (explain_oom, explain_io_error, explain_compile_error, explain_peer_failure, explain_edit)
    return next(filter(None, (explanation(error) for explanation in explanations)), "")


def report_error(error: Exception) -> int:
    """Print an error's sentence on standard error and return the exit code: 2 for the user's mistakes, 1 for the rest.

    Raises the error again when there is nothing better to say of it than its traceback.
    """
    mistakes = (UserError, ModelError, GenerationError, *FILE_MISTAKES)
    sentence = explain(error)
    if not sentence:
        raise error
    rank, stopped = os.environ.get("RANK"), isinstance(error, Stopped)
    if not getattr(error, "printed", False):
        start = "" if stopped else f"error [rank {rank}]: " if rank else "error: "
        print(start + sentence, file=sys.stderr, flush=True)
    return 0 if stopped else 2 if isinstance(error, mistakes) else 1
