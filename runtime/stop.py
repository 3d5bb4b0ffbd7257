"""How much of a run is done, and when it ends. All ranks decide alike."""

import math
from dataclasses import dataclass

from data.stream import TokenStream
from runtime.ranks import max_over_ranks
from runtime.sizes import max_epochs

MAX_BAD_STEPS = 10  # end the run after this many steps in a row without a usable gradient
SAVE_EVERY_S = 600  # with --save_every 0

# Seconds of --minutes for imports, the final sample and the final checkpoint
RESERVED_S = 4.0
# How many times as long a step with whole sequences takes as one with short ones (laptop, CPUs). On
# other machines schedules are off by up to 10 %
LONG_STEP = 1.7


@dataclass
class Status:
    """Where a run is between two steps, the same on all ranks."""

    progress: float  # the fraction of the run that is done, which schedules follow
    is_signaled: bool  # a rank was asked to stop
    is_time_up: bool  # --max_minutes are over
    is_save_due: bool  # by the clock, with --save_every 0


def agree_on_status(state, stream: TokenStream, run) -> Status:
    """Exchange the status of all ranks: where one is furthest, all are."""
    cfg, seconds = state.cfg, run.clock.process_time
    progress = state.step / cfg.max_steps
    if cfg.minutes:
        eval_size = stream.num_eval_seqs(cfg.eval_tokens) / stream.seqs_per_batch
        progress = time_progress(run.clock, 60 * cfg.minutes, eval_size, cfg.short_frac)
        progress = max(progress, fraction_of_epochs(state, stream))
    is_time_up = cfg.max_minutes > 0 and seconds >= 60 * cfg.max_minutes
    is_save_due = not cfg.save_every and seconds - run.saved_at_s >= SAVE_EVERY_S
    own = [progress, run.is_asked_to_stop(), is_time_up, is_save_due]
    progress, *flags = max_over_ranks(state.dist_ctx, own)
    return Status(progress, *map(bool, flags))


def why_stop(status: Status, state, stream: TokenStream, run) -> str:
    """The strongest reason to end the run at this step; "" if there is none."""
    cfg = state.cfg
    # A step is made before anything but completion ends the run, so that a job that is restarted
    # often still progresses
    has_trained = state.step > run.first_step
    if has_trained and status.is_signaled:
        return "signal"
    if run.bad_steps >= MAX_BAD_STEPS:
        return "diverged"
    if has_trained and status.is_time_up:
        return "max_minutes"
    if cfg.minutes and fraction_of_epochs(state, stream) >= 1:
        return "epochs"
    if status.progress >= 1:
        return "minutes" if cfg.minutes else "max_steps"

    # The evaluations so far
    losses = [row["val_loss"] for row in run.log.evaluations]
    if cfg.target_val_loss and min(losses, default=math.inf) <= cfg.target_val_loss:
        return "target_val_loss"
    if not cfg.patience or len(losses) <= cfg.patience:
        return ""
    # No improvement, after the first epoch
    after_first_epoch = run.log.evaluations[-1]["tokens"] > stream.train.n_tokens
    has_improved = min(losses[-cfg.patience :]) < min(losses[: -cfg.patience])
    return "patience" if after_first_epoch and not has_improved else ""


def time_progress(clock, seconds: float, eval_size: float, short_frac: float) -> float:
    """The fraction that is done of a run of so many seconds, final evaluation included.

    eval_size: of an evaluation, in training batches. short_frac: the first fraction of the run, in
    which sequences are short.
    """
    # One more step and the final evaluation, which takes 0.4 of the time of training on its tokens
    eval_s = clock.last_eval_s or 0.4 * eval_size * clock.typical_step_s
    training_s = seconds - RESERVED_S - 1.5 * clock.typical_step_s - eval_s
    time_spent = clock.wall_time / max(1e-9, training_s)

    # Schedules are in steps, of which the first, with short sequences, are faster: in units of a
    # short step, the run takes short_frac + (1 - short_frac) * LONG_STEP
    done = time_spent * (short_frac + (1 - short_frac) * LONG_STEP)
    if done > short_frac:
        done = short_frac + (done - short_frac) / LONG_STEP
    return done


def fraction_of_epochs(state, stream: TokenStream) -> float:
    """Epochs so far, divided by those after which --minutes stops: more would overfit."""
    epochs = state.step * stream.seqs_per_batch / stream.seqs_per_epoch
    return epochs / max_epochs(state.cfg, stream.train.n_tokens, stream.meta["vocab_size"])
