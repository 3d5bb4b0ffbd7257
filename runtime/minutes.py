"""--minutes: how many steps fit into the time that there is."""

import dataclasses
import statistics
import time

from data.shards import UserError
from runtime.ranks import DistContext, dist_max


def choose_max_steps(state, stream, timer, train_step, evaluate, get_batch) -> tuple[int, str]:
    """For --minutes: how many steps, with their evaluations, end in time, and what to say of it.

    state, train_step, evaluate, get_batch: the trainer's. The learning rate is 0, and the caller makes everything anew
    afterwards. Raises UserError when there is no time for one step.
    """
    cfg, dist_ctx = state.cfg, state.dist_ctx
    seqs_at_once = state.micro_batch * dist_ctx.world_size
    one_batch = dataclasses.replace(state, cfg=dataclasses.replace(cfg, eval_tokens=seqs_at_once * cfg.seq_len))

    def step(i: int) -> None:
        loss, _ = train_step(state, get_batch(stream, dist_ctx, i), 0.0)
        loss.item()  # waits for the device

    n_eval_batches = stream.num_eval_seqs(cfg.eval_tokens) / seqs_at_once
    elapsed_s = timer.wall_time_here
    return steps_within(
        cfg.minutes, step, lambda: evaluate(one_batch, stream), n_eval_batches, cfg.eval_every, elapsed_s, dist_ctx
    )


def steps_within(
    minutes: float,
    step,
    eval_batch,
    n_eval_batches: float,
    eval_every: int,
    elapsed_s: float,
    dist_ctx: DistContext,
) -> tuple[int, str]:
    """Steps that end, with their evaluations, within so many minutes of the run's start, and what to say of it.

    step(i) and eval_batch() do what is timed, and wait for the device. 5 % and 4 s are kept for imports, the last
    checkpoint and sample. The same on every rank. Raises UserError when there is no time for one step.
    """
    seconds, began = [], time.perf_counter()
    while len(seconds) < 3 or dist_max(dist_ctx, time.perf_counter() - began) < min(5.0, 3.0 * minutes):
        t0 = time.perf_counter()
        step(len(seconds))
        seconds.append(time.perf_counter() - t0)
    step_s = dist_max(dist_ctx, statistics.median(seconds[1:]))
    eval_batch()  # what happens once is not counted for every batch
    t0 = time.perf_counter()
    eval_batch()
    eval_s = dist_max(dist_ctx, time.perf_counter() - t0) * n_eval_batches
    used = dist_max(dist_ctx, elapsed_s + time.perf_counter() - began) + 4.0 + 0.05 * 60 * minutes + eval_s
    steps = int((60 * minutes - used) / (step_s + (eval_s / eval_every if eval_every else 0.0)))
    if steps < 1:
        raise UserError(
            f"--minutes {minutes:g} is too short: a step takes {step_s:.1f} s and an evaluation {eval_s:.1f} s here; "
            f"give at least {(used + step_s) / 60:.1f}"
        )
    said = f"--minutes {minutes:g}: steps of {1000 * step_s:,.0f} ms, evaluations of {eval_s:.1f} s, so {steps:,} steps"
    return steps, said
