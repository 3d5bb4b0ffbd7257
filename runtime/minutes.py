"""--minutes: how many steps fit into the given time, and which model size is best for it."""

import dataclasses
import math
import statistics
import time

from data.shards import UserError
from runtime.derived import MANY_EPOCHS, sizes
from runtime.ranks import DistContext, dist_max

# Fraction of the time after which the speed is measured again; of the steps left, by which they may be wrong
WINDOW, TOLERANCE = 0.05, 0.1
USED, END_S = 0.98, 4.0  # fraction of the time to fill; seconds kept for imports, the last sample and checkpoint

# Tokens per weight of the blocks that gave the lowest loss in half a minute to 40 on two cores, weights per token of a
# small text (docs/rates.md), and the fraction of matmul speed that training reached on a CPU.
TOKENS_PER_WEIGHT, WEIGHTS_PER_TOKEN, REACHED = 10, 4, 0.6


def sizes_within(f, vocab_size: int, text_tokens: float, flop_s: float) -> dict:
    """--minutes alone: params, and sizes for the flags that are None: the largest model that sees enough tokens.

    f: the flags; text_tokens: of the training split; flop_s: matmul FLOP/s of all devices together.
    """
    given = {name: value for name, value in dataclasses.asdict(f).items() if value is not None}
    for exponent in range(50):  # 0.1M to 1.5B
        params = 1e5 * 1.22**exponent
        shape = sizes(params, given)
        weights = 12 * shape["n_layer"] * shape["n_embd"] ** 2
        attention = 6 * shape["n_layer"] * shape["n_embd"] * f.seq_len
        tokens = REACHED * flop_s * 0.9 * 60 * f.minutes / (6 * (weights + vocab_size * shape["n_embd"]) + attention)
        if exponent == 0 or (tokens >= TOKENS_PER_WEIGHT * weights and weights <= WEIGHTS_PER_TOKEN * text_tokens):
            best = params, min(tokens, MANY_EPOCHS * text_tokens)
    chosen = {name: value for name, value in sizes(best[0], given, best[1]).items() if name not in given}
    return chosen | dict(params=round(best[0]))


@dataclasses.dataclass
class Pace:
    """The speed from which --minutes chooses the steps: seconds per step and per evaluation, the same on all ranks."""

    step_s: float
    eval_s: float
    most_steps: float = math.inf  # so many see the text MANY_EPOCHS times
    mark: tuple[int, float] = (0, 0.0)  # step and training time at which the present measurement began
    keeps_steps: bool = False  # as the schedule needs them

    def steps_in(self, seconds: float, step: int, eval_every: int) -> int:
        """How many steps after `step` fit into this time, with their evaluations and the one at the end; 0 if none."""

        def needed_s(n: int) -> float:
            evaluations = (step + n - 1) // eval_every - max(0, step - 1) // eval_every if eval_every else 0
            return n * self.step_s + (evaluations + 1) * self.eval_s

        often = self.eval_s / eval_every if eval_every else 0.0
        n = max(0, int((seconds + often) / (self.step_s + often)))  # no more than that
        while n > 0 and needed_s(n) > seconds:
            n -= 1
        return n

    def measure(self, state, timer) -> bool:
        """Whether a WINDOW has passed since the last measurement; then the speed is that of its steps."""
        first_step, first_s = self.mark
        n = state.step - first_step
        if n < max(2, WINDOW * 60 * state.cfg.minutes / self.step_s):
            return False
        self.mark = state.step, timer.pause()
        step_s = dist_max(state.dist_ctx, (self.mark[1] - first_s) / n)
        self.step_s, self.eval_s = step_s, self.eval_s * step_s / self.step_s
        return True

    def revise(self, state, progress, lr_multiplier) -> bool:
        """Measure and choose again where that is due; returns whether state.cfg has a new number of steps.

        If the learning rate is still flat, its decay starts where the new number says; if it is falling, it continues
        from its current value to 0 at the new end. A schedule that cannot do so (by lr_multiplier(step, cfg), the
        trainer's) keeps its steps.
        """
        cfg, step = state.cfg, state.step
        if self.keeps_steps or not self.measure(state, progress.timer):
            return False
        left_s = seconds_left(cfg.minutes, dist_max(state.dist_ctx, progress.timer.wall_time))
        max_steps = min(self.most_steps, step + max(1, self.steps_in(left_s, step, cfg.eval_every)))
        present, warmup_steps = lr_multiplier(step, cfg), cfg.warmup_frac * cfg.max_steps
        is_close = abs(max_steps - cfg.max_steps) <= TOLERANCE * (cfg.max_steps - step)
        if is_close or present <= 0:
            return False
        is_flat = present == lr_multiplier(step, dataclasses.replace(cfg, cooldown_frac=0.0))
        falling = (max_steps - step) / (present * max_steps)  # cooldown_frac with which it falls from here on
        revised = dataclasses.replace(
            cfg,
            max_steps=max_steps,
            warmup_frac=warmup_steps / max_steps,
            cooldown_frac=min(cfg.cooldown_frac, falling) if is_flat else falling,
        )
        if not math.isclose(present, lr_multiplier(step, revised)):
            self.keeps_steps = True
            progress.logger.info(
                f"--minutes {cfg.minutes:g}: still {cfg.max_steps:,} steps, as the schedule needs them"
            )
            return False
        state.cfg = revised
        found = f"steps of {1000 * self.step_s:,.0f} ms now, so {max_steps:,} steps instead of {cfg.max_steps:,}"
        progress.logger.info(f"--minutes {cfg.minutes:g}: {found}")
        progress.logger.log_flags(dataclasses.asdict(revised))
        return True


def seconds_left(minutes: float, wall_time: float) -> float:
    """For steps and evaluations, when so many seconds have passed."""
    return USED * 60 * minutes - END_S - wall_time


def choose_max_steps(state, stream, timer, train_step, evaluate, get_batch) -> tuple[int, Pace, str]:
    """For --minutes: how many steps, with their evaluations, end in time; the measured Pace; and a line for the log.

    state, train_step, evaluate, get_batch: the trainer's. The learning rate is 0, and the caller resets everything
    afterwards. Raises UserError if there is no time for one step.
    """
    cfg, dist_ctx = state.cfg, state.dist_ctx
    seqs_at_once = state.micro_batch * dist_ctx.world_size
    one_batch = dataclasses.replace(state, cfg=dataclasses.replace(cfg, eval_tokens=seqs_at_once * cfg.seq_len))

    def step(i: int) -> None:
        loss, _ = train_step(state, get_batch(stream, dist_ctx, i), 0.0)
        loss.item()  # waits for the device

    n_eval_batches = stream.num_eval_seqs(cfg.eval_tokens) / seqs_at_once
    elapsed_s = timer.wall_time_here
    steps, pace, said = steps_within(
        cfg.minutes, step, lambda: evaluate(one_batch, stream), n_eval_batches, cfg.eval_every, elapsed_s, dist_ctx
    )
    pace.most_steps = max(1, MANY_EPOCHS * stream.per_epoch // stream.seqs_per_batch)
    if steps > pace.most_steps:
        steps = pace.most_steps
        said += f"; {steps:,} are taken, which see the text {MANY_EPOCHS} times: more would overfit (docs/rates.md)"
    return steps, pace, said


def steps_within(
    minutes: float,
    step,
    eval_batch,
    n_eval_batches: float,
    eval_every: int,
    elapsed_s: float,
    dist_ctx: DistContext,
) -> tuple[int, Pace, str]:
    """Steps that end, with their evaluations, within so many minutes of the run's start; the speed; what to say of it.

    step(i) and eval_batch() do what is timed, and wait for the device. The same on every rank. Raises UserError when
    there is no time for one step.
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
    pace = Pace(step_s, dist_max(dist_ctx, time.perf_counter() - t0) * n_eval_batches)
    left_s = seconds_left(minutes, dist_max(dist_ctx, elapsed_s + time.perf_counter() - began))
    steps = pace.steps_in(left_s, 0, eval_every)
    if steps < 1:
        needed = math.ceil(10 * (minutes + (pace.eval_s + step_s - left_s) / (60 * USED))) / 10
        raise UserError(
            f"--minutes {minutes:g} is too short: a step takes {step_s:.1f} s and an evaluation {pace.eval_s:.1f} s "
            f"here; give at least {needed:g}"
        )
    said = f"steps of {1000 * step_s:,.0f} ms, evaluations of {pace.eval_s:.1f} s, so {steps:,} steps"
    return steps, pace, f"--minutes {minutes:g}: {said}"
