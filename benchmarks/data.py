"""`bench.py data`: what the loader can deliver, and how long a step waits for it."""

import contextlib

from benchmarks.harness import Bench, build_state, measure, median_min_max, table, timed
from common import RunError
from data.stream import prefetch
from train_gpt import get_batch, train_step


def data_case(flags: dict):
    """Yields what the loader delivers by itself; then seconds to wait for a batch, and those of its step."""
    state, stream, _ = build_state(flags)
    device, dist_ctx = state.dist_ctx.device, state.dist_ctx
    seconds, _ = timed(device, lambda: [get_batch(stream, dist_ctx, step) for step in range(10)])
    yield dict(tokens=state.cfg.batch_tokens, load_s=seconds / 10)
    with contextlib.closing(
        prefetch(lambda step: get_batch(stream, dist_ctx, step), 0, depth=2)
    ) as batches:
        train_step(state, next(batches), 0.0)  # the first batch is always waited for
        while True:
            wait_s, batch = timed(device, lambda: next(batches))
            yield wait_s, wait_s + timed(device, lambda: train_step(state, batch, 0.0))[0]  # noqa: B023


def bench_data(bench: Bench) -> dict:
    (facts,) = measure([(data_case, bench.flags)], 10 * bench.repeats)
    if "note" in facts:
        raise RunError(facts["note"])
    row = median_min_max([1000 * step_s for _, step_s in facts["values"]], "ms/step")
    row |= median_min_max(
        [100 * wait_s / step_s for wait_s, step_s in facts["values"]], "data wait, % of step"
    )
    row["tokens/s"] = 1000 * facts["tokens"] / row["ms/step"]
    row["loader alone, tokens/s"] = facts["tokens"] / facts["load_s"]
    print(table("Data", [row]))
    return dict(data=[row])
