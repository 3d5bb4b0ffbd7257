"""A run: its ranks, folder, clock, log and signals, from the first line to the summary."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from common.errors import RunError, SavedInterrupt, UserError, error_sentence, print_line
from common.files import atomic_write
from common.values import env_int
from data.prepare import prepare
from data.shards import DATA_DIR
from data.stream import TokenStream, map_ahead
from data.tokenizers import VOCABULARY_FILE, get_tokenizer
from runtime.checkpoint import delete_old_checkpoints, list_checkpoints, save_best_weights
from runtime.environment import check_caller, configure_device, restored_process_state
from runtime.flag_checks import check_device, check_flags
from runtime.log import Log
from runtime.progress import Clock, losses_so_far, may_overfit
from runtime.ranks import (
    DistContext,
    any_rank,
    check_ranks,
    check_same_on_all_ranks,
    join_ranks,
    raise_on_all_ranks,
    read_on_all_ranks,
    run_on_rank0,
)
from runtime.report import COMPLETE, closing_lines, describe_run, summarize
from runtime.resume import Start, choose_folder
from runtime.run_folder import locked_folder

if TYPE_CHECKING:
    from train_gpt import Config, TrainState


class Run:
    """What the parts of a run share."""

    state: TrainState  # from begin() on
    stream: TokenStream

    def __init__(self, dist_ctx: DistContext, folder: Path, signals: list[str]):
        self.dist_ctx = dist_ctx
        self.folder = folder
        self.signals = signals  # names of those received
        self.parent_pid = os.getppid()
        self.clock = Clock(dist_ctx)
        self.log = Log(folder, dist_ctx, self.clock)
        self.has_begun = False
        self.first_step = 0  # of this start
        self.bad_steps = 0  # in a row, skipped because of their gradient
        self.saved_step = -1  # of the newest checkpoint
        # Of the newest attempt to save one, in this start
        self.tried_step = 0
        self.tried_at_s = 0.0
        self.best_val_loss = math.inf  # of ckpt_best.pt
        self.profiler: torch.profiler.profile | None = None

    @classmethod
    @contextlib.contextmanager
    def open(cls, cfg: Config) -> Iterator[Run]:
        """Context: join the ranks, lock the run's folder and catch signals; yields the Run.

        An error that ends it is written to log.txt, whichever rank it is on. Raises UserError.
        """
        check_caller()
        with restored_process_state(), contextlib.ExitStack() as stack:
            dist_ctx = join_ranks()
            folder = run_on_rank0(lambda: choose_folder(cfg))
            run = cls(dist_ctx, folder, stack.enter_context(catch_signals()))
            run_on_rank0(lambda: stack.enter_context(locked_folder(folder)))
            stack.callback(run.log.close)
            try:
                yield run
            except Exception as error:
                run.log_error(error)
                raise

    def configure(self, cfg: Config) -> None:
        """Set up the device and the process, and check the flags. Raises UserError."""
        with raise_on_all_ranks():
            configure_device(cfg, self.dist_ctx)
            check_flags(cfg)
            for warning in check_device(cfg, self.dist_ctx):
                self.log.info(f"WARNING: {warning}")
        check_ranks(cfg, self.dist_ctx)

    def begin(self, state: TrainState, stream: TokenStream) -> None:
        """Open the log, and say what is in effect. Raises UserError."""
        self.state = state
        self.stream = stream
        with raise_on_all_ranks():
            if self.dist_ctx.rank == 0 and stream.vocabulary:
                with atomic_write(self.folder / VOCABULARY_FILE) as file:
                    file.write(stream.vocabulary.encode())
        self.first_step = state.step
        self.tried_step = state.step
        self.log.begin(self)
        self.has_begun = True
        self.best_val_loss = min(losses_so_far(self), default=math.inf)
        for line in describe_run(self):
            self.log.info(line)

    def is_asked_to_stop(self) -> bool:
        """Return True if this rank has received a signal, or torchrun, its parent, is gone."""
        is_orphan = "TORCHELASTIC_RUN_ID" in os.environ and os.getppid() != self.parent_pid
        return bool(self.signals) or is_orphan

    def any_rank_is_asked_to_stop(self) -> bool:
        return any_rank(self.is_asked_to_stop())

    @contextlib.contextmanager
    def prefetching(self, get_batch: Callable[[int], Tensor]) -> Iterator[Callable[[], Tensor]]:
        """Context of the training loop: yields a function that returns the next step's batch.

        get_batch(step) reads it; a thread calls it up to two steps ahead. With --profile, steps are
        profiled.
        """
        batches = map_ahead(get_batch, itertools.count(self.first_step), depth=2, threads=1)
        batches = read_on_all_ranks(batches)
        with contextlib.closing(batches), profiling(self) as self.profiler:
            yield lambda: self.clock.wait_for(batches)

    def after_step(self, step: int, loss: Tensor, grad_norm: float) -> None:
        """Count the steps in a row that were skipped because of their gradient; profile.

        After a good step, old checkpoints are deleted. loss: what train_step returned, for the log.
        """
        self.log.losses.append(loss)
        if self.profiler:
            self.profiler.step()
        if 0 < grad_norm < math.inf:
            self.bad_steps = 0
            # Only now: the newest checkpoint's weights have been good for another step
            if self.saved_step == step - 1:
                delete_old_checkpoints(self, self.state.cfg.keep or 2)
            return
        self.bad_steps += 1
        self.log.info(
            f"step {step} skipped: its gradient norm is {grad_norm} ({self.bad_steps} in a row)"
        )

    def add_evaluation(self, val_loss: float, val_bpb: float) -> None:
        """Log a validation loss, and save the weights if it is the lowest so far."""
        # The weights first: a run that is killed in between evaluates this step again
        save_best_weights(self, val_loss)
        self.log.evaluation(self.state, val_loss, val_bpb)
        has_risen = val_loss > self.best_val_loss
        if has_risen and may_overfit(self, self.log.evaluations[-1]):
            self.log.info(
                f"val_loss has risen from {self.best_val_loss:.4f}, that of ckpt_best.pt: the "
                "model may be memorizing the dataset"
            )

    def log_error(self, error: Exception) -> None:
        """Write the error that ends the run to log.txt, from the rank that it is on."""
        if self.has_begun and not getattr(error, "printed", False):
            cause = error_sentence(error) or traceback.format_exc().strip()
            with contextlib.suppress(OSError):
                with open(self.folder / "log.txt", "a", encoding="utf-8") as file:
                    file.write(f"ended: {cause}\n")

    def finish(self, stopped_by: str) -> dict[str, Any]:
        """Write summary.json, say how the run ended and what to try next; returns the summary.

        Raises SavedInterrupt after Ctrl-C, RunError for a run that diverged, and on nodes that did
        not get the signal that ended it.
        """
        if stopped_by == "signal" and self.signals:
            stopped_by = self.signals[0]
        cfg, summary = self.state.cfg, summarize(self, stopped_by)
        path = self.folder / "summary.json"
        if self.dist_ctx.rank == 0:
            # A run that was complete before keeps its figures
            was_complete = path.exists() and json.loads(path.read_text())["stopped_by"] in COMPLETE
            if self.state.step > self.first_step or not was_complete:
                with atomic_write(path) as file:
                    file.write(json.dumps(summary, indent=1).encode() + b"\n")
        if stopped_by in COMPLETE and summary["val_loss"] and not self.bad_steps:
            delete_old_checkpoints(self, cfg.keep or 1)
        for line in closing_lines(self, summary):
            self.log.info(line)

        if stopped_by == "SIGINT":
            raise SavedInterrupt
        # Another node was told to stop: torchrun starts this one again, with those that are left
        if stopped_by == "signal" and env_int("GROUP_WORLD_SIZE", 1) > 1:
            text = "another node was told to stop; --resume continues from what has been saved"
            raise RunError(text, printed=self.dist_ctx.local_rank > 0)
        if stopped_by == "diverged":
            saved = [path.name for path in list_checkpoints(self.folder)[:1]]
            raise RunError(
                "the gradient was 0 or not finite in many steps in a row, to step "
                f"{self.state.step} ({', '.join(saved) or 'no checkpoint'} is from before); if it "
                "was 0, see whether all targets are masked, otherwise "
                f"{'--resume' if saved else 'start again'} with lower learning rates, "
                "--grad_clip 1 or --dtype fp32, or look at the data",
                printed=self.dist_ctx.rank > 0,
            )
        return summary


# --------------------------------------------------------------------------------------------------
# Parts of a run


def open_stream(cfg: Config, dist_ctx: DistContext, start: Start | None = None) -> TokenStream:
    """Open the folder cfg.data, and check that it is the same on all ranks. Raises UserError.

    By default it is Python's own source code, prepared on first use.
    """
    path = Path(cfg.data or DATA_DIR / "python")
    with raise_on_all_ranks():
        # Each node prepares it for itself
        if not cfg.data and dist_ctx.local_rank == 0 and not (path / "meta.json").exists():
            prepare("python", out=path)
    with raise_on_all_ranks():
        stream = TokenStream(
            path,
            seq_len=cfg.seq_len,
            seed=cfg.seed,
            vocab_size=cfg.vocab_size,
            doc_align=cfg.doc_align,
            may_shorten="seq_len" not in cfg.given,
        )
        if start:
            start.check_tokenizer(stream)
    if stream.seq_len < cfg.seq_len and dist_ctx.rank == 0:
        print_line(
            f"WARNING: --seq_len is {stream.seq_len}, not {cfg.seq_len}, because a split of {path} "
            "has fewer tokens"
        )
    # For example, a node may lack meta.json, and would assume GPT-2's tokenizer
    facts = {
        f"the shards of {path} with hash": stream.fingerprint()[:12],
        "a meta.json with tokenizer": stream.meta["tokenizer"],
    }
    check_same_on_all_ranks(facts, f"give every node the same data in {path}")

    # Training does without a tokenizer; sampling needs it on all ranks, as under FSDP all take part
    with contextlib.suppress(UserError):
        with raise_on_all_ranks():
            tokenizer = get_tokenizer(stream.meta["tokenizer"], stream.vocabulary)
        stream.tokenizer = tokenizer
    return stream


@contextlib.contextmanager
def profiling(run: Run) -> Iterator[torch.profiler.profile | None]:
    """Context: PyTorch's profiler over --profile steps after the first three; None for 0.

    Its step() is to be called after each step. A trace goes to the run's folder, a table to the
    log.
    """
    n_steps = run.state.cfg.profile
    steps_left = run.state.cfg.max_steps - run.state.step
    if n_steps and steps_left < n_steps + 3:
        run.log.info(
            f"WARNING: --profile {n_steps} needs {n_steps + 3} steps, and {steps_left} are left"
        )
    if not n_steps:
        yield None
        return

    on_cuda = run.dist_ctx.device.type == "cuda"

    def report(profiler: torch.profiler.profile) -> None:
        profiler.export_chrome_trace(str(run.folder / f"trace_rank{run.dist_ctx.rank}.json"))
        sort_by = "self_device_time_total" if on_cuda else "self_cpu_time_total"
        averages = profiler.key_averages()
        run.log.info(averages.table(sort_by=sort_by, row_limit=10, max_name_column_width=60))

    schedule = torch.profiler.schedule(wait=2, warmup=1, active=n_steps, repeat=1)
    # There is one cycle: acc_events keeps PyTorch 2.11 from warning of others
    profiler = torch.profiler.profile(schedule=schedule, on_trace_ready=report, acc_events=True)
    with profiler:
        yield profiler


# --------------------------------------------------------------------------------------------------
# Signals that ask a run to save and end

# Sent by terminals, schedulers and resource limits before they end a process
SIGNALS = "SIGTERM SIGINT SIGHUP SIGUSR1 SIGUSR2 SIGXCPU SIGALRM SIGPWR".split()

# Schedulers signal both torchrun and its ranks, and torchrun forwards the signal, so signals within
# half a second of the first are one request
SAME_SIGNAL_S = 0.5


@contextlib.contextmanager
def catch_signals() -> Iterator[list[str]]:
    """Yield a list that collects the names of signals received.

    A second signal has its default effect at once: it ends the process, or raises
    KeyboardInterrupt. (Except SIGXCPU, which the system repeats every second of CPU time.)
    """
    caught: list[str] = []
    first_at = 0.0

    def handle(number: int, _frame: object) -> None:
        nonlocal first_at
        name = signal.Signals(number).name
        if not caught:
            first_at = time.monotonic()
            if name == "SIGINT" and os.environ.get("RANK", "0") == "0":
                # Not print(), which may be what was interrupted
                os.write(2, b"\nCtrl-C: saves and ends after this step; again: ends at once\n")
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
