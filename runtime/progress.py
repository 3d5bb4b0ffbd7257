"""The clock of a run, how much of it is done, and when it ends. All ranks decide alike."""

from __future__ import annotations

import contextlib
import math
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from runtime.ranks import DistContext, max_over_ranks
from runtime.sizes import max_epochs

if TYPE_CHECKING:
    from runtime.run import Run

T = TypeVar("T")

MAX_BAD_STEPS = 10  # end the run after this many steps in a row without a usable gradient
SAVE_EVERY_S = 600  # with --save_every auto

# Seconds of --minutes for imports, the final sample and the final checkpoint
RESERVED_S = 4.0
# How many times as long a step with whole sequences takes as one with short ones (laptop, CPUs). On
# other machines schedules are off by up to 10 %
LONG_STEP = 1.7


class Clock:
    """Times in seconds: of this process, and of the starts before a resume."""

    def __init__(self, dist_ctx: DistContext):
        self.dist_ctx = dist_ctx
        self.began = time.perf_counter()
        self.earlier_wall_time = 0.0  # of the starts before a resume
        self.train_time = 0.0  # training steps of all starts
        self.data_wait_s = 0.0  # waiting for data in this start, which is part of train_time
        self.newest_steps_s: deque[float] = deque(maxlen=20)
        self.last_eval_s = 0.0

    @property
    def process_time(self) -> float:
        """Seconds since this process began the run, without imports."""
        return time.perf_counter() - self.began

    @property
    def wall_time(self) -> float:
        """Seconds of all starts of the run."""
        return self.earlier_wall_time + self.process_time

    @property
    def typical_step_s(self) -> float:
        """The median of the newest steps: one that compiles or stalls does not count."""
        return median(self.newest_steps_s or [0.0])

    @contextlib.contextmanager
    def timing_step(self) -> Iterator[None]:
        """Context of a training step, until the device has finished it."""
        began = time.perf_counter()
        yield
        if self.dist_ctx.device.type != "cpu":
            torch.accelerator.synchronize()
        took = time.perf_counter() - began
        self.train_time += took
        self.newest_steps_s.append(took)

    @contextlib.contextmanager
    def timing_evaluation(self) -> Iterator[None]:
        """Context of an evaluation."""
        began = time.perf_counter()
        yield
        self.last_eval_s = time.perf_counter() - began

    def wait_for(self, batches: Iterator[T]) -> T:
        """Take the next batch, and add up the time that training waits for it."""
        asked = time.perf_counter()
        batch = next(batches)
        self.data_wait_s += time.perf_counter() - asked
        return batch

    def state(self) -> dict[str, float]:
        """Return what a checkpoint keeps.

        With the times of a step and an evaluation, a finished run of --minutes stays finished.
        """
        return dict(
            train_time=self.train_time,
            wall_time=self.wall_time,
            typical_step_s=self.typical_step_s,
            last_eval_s=self.last_eval_s,
        )

    def load_state(self, state: dict[str, float]) -> None:
        self.train_time = state["train_time"]
        self.earlier_wall_time = state["wall_time"]
        self.newest_steps_s.append(state["typical_step_s"])
        self.last_eval_s = state["last_eval_s"]


# --------------------------------------------------------------------------------------------------
# Between two steps


@dataclass
class Status:
    """Where a run is between two steps, the same on all ranks."""

    progress: float  # the fraction of the run that is done, which schedules follow
    is_signaled: bool  # a rank was asked to stop
    is_time_up: bool  # --max_minutes are over
    is_save_due: bool


def agree_on_status(run: Run) -> Status:
    """Exchange the status of all ranks: where one is furthest, all are."""
    cfg, step, seconds = run.state.cfg, run.state.step, run.clock.process_time
    progress = step / cfg.max_steps
    if cfg.minutes:
        progress = max(time_progress(run), fraction_of_epochs(run))
    is_time_up = cfg.max_minutes > 0 and seconds >= 60 * cfg.max_minutes
    if cfg.save_every:  # also if the step that was due has been skipped
        is_save_due = step // cfg.save_every > run.tried_step // cfg.save_every
    else:
        is_save_due = seconds - run.tried_at_s >= SAVE_EVERY_S
    own = [progress, run.is_asked_to_stop(), is_time_up, is_save_due]
    progress, *flags = max_over_ranks(own)
    return Status(progress, *map(bool, flags))


def reason_to_stop(status: Status, run: Run) -> str:
    """Return the strongest reason to end the run at this step; "" if there is none."""
    cfg = run.state.cfg
    # A step is made before these end the run, so that a job that is restarted often progresses,
    # unless an evaluation that is due comes first
    has_trained = run.state.step > run.first_step
    reasons = {
        "signal": has_trained and status.is_signaled,
        "diverged": run.bad_steps >= MAX_BAD_STEPS,
        "epochs": cfg.minutes > 0 and fraction_of_epochs(run) >= 1,
        "minutes" if cfg.minutes else "max_steps": status.progress >= 1,
        "target_val_loss": min(losses_so_far(run), default=math.inf) <= cfg.target_val_loss,
        "patience": is_out_of_patience(run),
        "max_minutes": has_trained and status.is_time_up,  # of a run that is not complete
    }
    return next((reason for reason, holds in reasons.items() if holds), "")


def losses_so_far(run: Run) -> list[float]:
    """Return the validation losses, infinite where they were not finite."""
    losses = [row["val_loss"] for row in run.log.evaluations]
    return [loss if math.isfinite(loss) else math.inf for loss in losses]


def is_out_of_patience(run: Run) -> bool:
    """Return True if the newest evaluations have not lowered the loss, because of overfitting."""
    patience, losses = run.state.cfg.patience, losses_so_far(run)
    if not patience or len(losses) <= patience:
        return False
    has_risen = min(losses[-patience:]) >= min(losses[:-patience])
    return has_risen and may_overfit(run, run.log.evaluations[-patience])


def may_overfit(run: Run, evaluation: dict[str, Any]) -> bool:
    """Return True after the first epoch, and after steps with short sequences.

    In these, val_loss may rise for a time.
    """
    cfg = run.state.cfg
    has_whole_sequences = evaluation["step"] > cfg.short_frac * cfg.max_steps
    return has_whole_sequences and evaluation["tokens"] > run.stream.train.n_tokens


# --------------------------------------------------------------------------------------------------
# Progress of --minutes


def time_progress(run: Run) -> float:
    """Return the fraction of --minutes that is done, final evaluation included."""
    cfg, clock = run.state.cfg, run.clock
    left_s = 60 * cfg.minutes - RESERVED_S - evaluation_time(run) - clock.wall_time
    if left_s < clock.typical_step_s:
        return 1.0
    # No step is cut: the run ends with the last one that fits
    training_s = clock.wall_time + left_s
    if clock.typical_step_s:
        training_s -= left_s % clock.typical_step_s

    # Schedules are in steps, of which the first, with short sequences, are faster: in units of a
    # short step, the run takes short_frac + (1 - short_frac) * LONG_STEP
    short_frac = cfg.short_frac
    total = short_frac + (1 - short_frac) * LONG_STEP
    done = total * clock.wall_time / training_s
    return done if done <= short_frac else short_frac + (done - short_frac) / LONG_STEP


def evaluation_time(run: Run) -> float:
    """Return the seconds of an evaluation: 0.4 of those of training on its tokens, until known."""
    cfg, stream, clock = run.state.cfg, run.stream, run.clock
    eval_size = stream.num_eval_seqs(cfg.eval_tokens) / stream.seqs_per_batch
    return clock.last_eval_s or 0.4 * eval_size * clock.typical_step_s


def fraction_of_epochs(run: Run) -> float:
    """Return epochs so far, divided by those after which --minutes stops: more would overfit."""
    stream = run.stream
    epochs = run.state.step * stream.seqs_per_batch / stream.seqs_per_epoch
    return epochs / max_epochs(run.state.cfg, stream.train.n_tokens, stream.vocab_size)


# --------------------------------------------------------------------------------------------------
# The time left


def time_left(run: Run) -> float:
    """Estimate the seconds to the end of a run, evaluations included."""
    cfg, clock, step = run.state.cfg, run.clock, run.state.step
    n_steps: float = cfg.max_steps
    if cfg.minutes:
        n_steps = step / max(1e-9, fraction_of_epochs(run))
    steps_left = n_steps - step
    n_evaluations = 1.0
    if cfg.eval_every != "end":
        n_evaluations += (math.ceil(n_steps) - 1) // cfg.eval_every - (step - 1) // cfg.eval_every
    # While most of the newest steps had short sequences, those with whole ones will take longer
    if cfg.short_frac and step < cfg.short_frac * n_steps + 10:
        steps_left += (LONG_STEP - 1) * min(steps_left, (1 - cfg.short_frac) * n_steps)
    seconds = steps_left * clock.typical_step_s + n_evaluations * evaluation_time(run)
    return min(seconds, 60 * cfg.minutes - clock.wall_time) if cfg.minutes else seconds
