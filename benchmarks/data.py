"""`bench.py data`: how fast the loader is, and how long a step waits for its batch."""

import contextlib
from functools import partial

from benchmarks.harness import Bench, build_state, measure, table, time_ms, time_steps
from common import RunError
from data.stream import prefetch
from train_gpt import Config, get_batch


def data_case(cfg: Config):
    """Yield the loader's speed; then the ms of a step and the wait for its batch in %."""
    state, stream, _ = build_state(cfg)
    device = state.dist_ctx.device

    def load(step: int):
        return get_batch(stream, state.dist_ctx, step)

    load_ms, _ = time_ms(device, lambda: [load(step) for step in range(10)])
    tokens = state.cfg.batch_tokens
    yield dict(tokens=tokens, loader_speed=1000 * 10 * tokens / load_ms)
    with contextlib.closing(prefetch(load, 0, depth=2)) as batches:
        # The first batch is always waited for
        time_steps(state, next(batches), 1)
        while True:
            wait_ms, batch = time_ms(device, next, batches)
            ms = wait_ms + time_steps(state, batch, 1)
            yield {"ms/step": ms, "data wait, % of step": 100 * wait_ms / ms}


def bench_data(bench: Bench) -> dict:
    """Print how much of a step is spent waiting for data."""
    (row,) = measure([partial(data_case, bench.cfg)], 10 * bench.repeats)
    if "note" in row:
        raise RunError(row["note"])
    row["tokens/s"] = 1000 * row.pop("tokens") / row["ms/step"]
    row["loader alone, tokens/s"] = row.pop("loader_speed")
    print(table("Data", [row]))
    return dict(data=[row])
