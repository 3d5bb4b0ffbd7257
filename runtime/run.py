"""A run: its ranks, folder, clock, log and signals, from the first line to the summary."""

import contextlib
import json
import math
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path

from common.errors import RunError, SavedInterrupt, error_sentence
from common.files import atomic_write
from common.values import env_int
from data.stream import TokenStream, prefetch
from data.tokenizers import VOCABULARY_FILE
from runtime.checkpoint import best_val_loss, save_after_error, save_best_weights
from runtime.clock import Clock
from runtime.device import init_device_and_ranks
from runtime.flag_checks import check_device, check_flags
from runtime.log import Log
from runtime.log_header import describe_run
from runtime.process import restore_process_state
from runtime.profiler import profile_steps
from runtime.ranks import DistContext, any_rank, raise_on_all_ranks, read_on_all_ranks, run_on_rank0
from runtime.run_folder import locked_folder, new_run_folder
from runtime.summary import closing_lines, summarize


class Run:
    """What the parts of a run share. signals: the names of those received."""

    def __init__(self, cfg, dist_ctx: DistContext, folder: Path, signals: list[str]):
        self.cfg = cfg
        self.dist_ctx = dist_ctx
        self.folder = folder
        self.signals = signals
        self.parent_pid = os.getppid()
        self.clock = Clock(dist_ctx.device)
        self.log = Log(folder, dist_ctx, self.clock)
        self.info = self.log.info
        self.eval_begin = 0  # from this step on, evaluations are on the same tokens
        self.bad_steps = 0  # in a row
        self.saved_at_s = 0.0
        self.updating: list[bool] = []  # not empty amid an update of the weights
        self.state = None  # from begin() on

    @classmethod
    @contextlib.contextmanager
    def open(cls, cfg):
        """Context: join the ranks, check the flags, lock the folder and catch signals.

        Yields the Run. An error that ends it is written to log.txt, whichever rank it is on, after
        a checkpoint has been saved. Raises UserError.
        """
        with restore_process_state(), contextlib.ExitStack() as stack:
            dist_ctx = init_device_and_ranks(cfg)
            folder = cfg.out_dir or run_on_rank0(dist_ctx, lambda: new_run_folder(cfg.preset))
            signals = stack.enter_context(catch_signals())
            run = cls(cfg, dist_ctx, Path(folder), signals)
            try:
                run_on_rank0(dist_ctx, lambda: stack.enter_context(locked_folder(run.folder)))
                stack.callback(run.log.close)
                with raise_on_all_ranks(dist_ctx):
                    check_flags(cfg)
                    for warning in check_device(cfg, dist_ctx):
                        run.info(f"WARNING: {warning}")
                yield run
            except Exception as error:
                save_after_error(run, error)
                run.log_error(error)
                raise

    def begin(self, state, stream: TokenStream) -> None:
        """Open the log and say what is in effect. Raises UserError."""
        self.first_step = self.saved_step = state.step
        self.log.begin(state, stream, self.eval_begin)
        # Best weights of a start that was killed are kept until there are better ones
        self.saved_val_loss = run_on_rank0(
            self.dist_ctx, lambda: best_val_loss(self, state, stream)
        )
        with raise_on_all_ranks(self.dist_ctx):
            if self.dist_ctx.rank == 0 and stream.vocabulary:
                with atomic_write(self.folder / VOCABULARY_FILE) as file:
                    file.write(stream.vocabulary.encode())
        for line in describe_run(state, stream):
            self.info(line)

        # For the checkpoint that is saved after an error
        self.state, self.stream = state, stream
        state.optimizer.register_step_pre_hook(lambda *_: self.updating.append(True))
        state.optimizer.register_step_post_hook(lambda *_: self.updating.clear())

    def is_asked_to_stop(self) -> bool:
        """True if this rank has received a signal, or torchrun, which started it, was killed."""
        is_orphan = "TORCHELASTIC_RUN_ID" in os.environ and os.getppid() != self.parent_pid
        return bool(self.signals) or is_orphan

    def any_rank_is_asked_to_stop(self) -> bool:
        return any_rank(self.dist_ctx, self.is_asked_to_stop())

    @contextlib.contextmanager
    def prefetching(self, get_batch: Callable):
        """Context of the training loop: a function that returns the next batch, read in advance.

        get_batch(step) reads it. With --profile, steps are profiled.
        """
        batches = prefetch(get_batch, self.first_step, depth=2)
        batches = read_on_all_ranks(self.dist_ctx, batches)
        profiling = profile_steps(self.state.cfg.profile, self)
        with contextlib.closing(batches), profiling as self.profiler_step:
            yield lambda: self.clock.wait_for(batches)

    def after_step(self, step: int, grad_norm: float) -> None:
        """Count the steps in a row that were skipped because of their gradient; profile."""
        self.profiler_step()
        if 0 < grad_norm < math.inf:
            self.bad_steps = 0
            return
        self.bad_steps += 1
        self.info(
            f"step {step} skipped: its gradient norm is {grad_norm} ({self.bad_steps} in a row)"
        )

    def add_evaluation(self, state, val_loss: float) -> None:
        """Log a validation loss, and save the weights if it is the lowest so far."""
        self.log.evaluation(state, val_loss)
        if val_loss < self.saved_val_loss:
            self.saved_val_loss = val_loss
            save_best_weights(state, self.stream, self)

    def log_error(self, error: Exception) -> None:
        """Write the error that ends the run to log.txt, from the rank that it is on."""
        if self.state and not getattr(error, "printed", False):
            cause = error_sentence(error) or traceback.format_exc().strip()
            with contextlib.suppress(OSError):
                with open(self.folder / "log.txt", "a", encoding="utf-8") as file:
                    file.write(f"ended: {cause}\n")

    def finish(self, stopped_by: str) -> dict:
        """Write summary.json, say how the run ended and what to try next; returns the summary.

        Raises SavedInterrupt after Ctrl-C, RunError for a run that diverged, and on nodes that did
        not get the signal that ended it.
        """
        if stopped_by == "signal" and self.signals:
            stopped_by = self.signals[0]
        summary = summarize(self, stopped_by)
        # A run that was complete before keeps its figures
        path = self.folder / "summary.json"
        if self.dist_ctx.rank == 0 and (self.state.step > self.first_step or not path.exists()):
            with atomic_write(path) as file:
                file.write(json.dumps(summary, indent=1).encode() + b"\n")
        for line in closing_lines(self, summary):
            self.info(line)

        if stopped_by == "SIGINT":
            raise SavedInterrupt
        # Another node was told to stop: torchrun starts this one again, with those that are left
        if stopped_by == "signal" and env_int("GROUP_WORLD_SIZE", 1) > 1:
            text = "another node was told to stop; --resume continues from what has been saved"
            raise RunError(text, printed=self.dist_ctx.local_rank > 0)
        if stopped_by == "diverged":
            step = self.state.step
            raise RunError(
                f"the gradient was 0 or not finite in many steps in a row, to step {step} "
                f"(ckpt_{step}.pt has the weights from before); if it was 0, see whether all "
                "targets are masked, else try lower learning rates, --grad_clip 1 or --dtype fp32, "
                "or look at the data",
                printed=self.dist_ctx.rank > 0,
            )
        return summary


# --------------------------------------------------------------------------------------------------
# Signals that ask a run to save and end

# Sent by terminals, schedulers and resource limits before they end a process; SIGBREAK on Windows
SIGNALS = "SIGTERM SIGINT SIGHUP SIGUSR1 SIGUSR2 SIGXCPU SIGALRM SIGPWR SIGBREAK".split()

# Schedulers signal both torchrun and its ranks, and torchrun forwards the signal, so signals within
# half a second of the first are one request
SAME_SIGNAL_S = 0.5


@contextlib.contextmanager
def catch_signals():
    """Yield a list that collects the names of signals received.

    A second signal has its default effect at once: it ends the process, or raises
    KeyboardInterrupt. (Except SIGXCPU, which the system repeats every second of CPU time.)
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

    handlers = {}  # the previous ones
    if threading.current_thread() is threading.main_thread():
        for number in signal.Signals:
            # nohup ignores some signals, and a program that calls train() may have its own handlers
            is_default = signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler)
            if number.name in SIGNALS and is_default:
                handlers[number] = signal.signal(number, handle)
    try:
        yield caught
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
