"""`bench.py data`: what the loader can deliver, its fraction of a step, prefetch depth, pinned memory, byte pairs."""

import contextlib
import importlib.util
import io
import math
import os
import statistics
import time
from concurrent.futures import ThreadPoolExecutor

from benchmarks.harness import Bench, Worker, median_min_max, settle, synchronize, table, timed
from data.bpe import train_vocabulary
from data.prepare import DEFAULT_SIZE, pieces_of
from data.shards import UserError
from data.stream import TokenStream, prefetch
from data.tokenizers import BPETokenizer, get_tokenizer
from runtime.ranks import DistContext
from runtime.start import open_stream
from train_gpt import TrainState, build, get_batch, make_config, train_step

DEPTHS = (None, 0, 1, 2, 4)  # of prefetching; None: no loader, the same batch every time


def measure_loader(stream: TokenStream, dist_ctx: DistContext, batch_tokens: int) -> dict:
    """The loader by itself, and copies of a batch to a CUDA device."""
    alone = []
    for first in range(0, 50, 10):
        t0 = time.perf_counter()
        for step in range(first, first + 10):
            get_batch(stream, dist_ctx, step)
        alone.append((time.perf_counter() - t0) / 10)
    facts = median_min_max([batch_tokens / seconds for seconds in alone], "loader_tokens_per_s")
    facts["batch_s"] = statistics.median(alone)
    if dist_ctx.device.type == "cuda":
        batch = get_batch(stream, dist_ctx, 0)
        for name, source in [("pinned_s", batch), ("pageable_s", batch.clone())] * 20:  # the least: the first warm up
            seconds = timed(dist_ctx.device, lambda: source.to(dist_ctx.device, non_blocking=True))  # noqa: B023
            facts[name] = min(facts.get(name, math.inf), seconds)
    return facts


def train_steps(state: TrainState, stream: TokenStream, depth: int | None, steps: int) -> tuple[float, float]:
    """Seconds of a step, and of it those that the host waits for data. depth: None = the same batch every time."""
    device, same, wait_s, t0 = state.dist_ctx.device, get_batch(stream, state.dist_ctx, 0), 0.0, 0.0

    def load(step: int):
        return same if depth is None else get_batch(stream, state.dist_ctx, step)

    with contextlib.closing(prefetch(load, 0, depth or 0)) as batches:
        for i in range(steps + 1):
            asked = time.perf_counter()
            batch = next(batches)
            wait_s += time.perf_counter() - asked
            train_step(state, batch, 1.0)
            if i == 0:  # the first batch is always waited for
                synchronize(device)
                wait_s, t0 = 0.0, time.perf_counter()
        synchronize(device)
    return (time.perf_counter() - t0) / steps, wait_s / steps


def measure_byte_pairs(stream: TokenStream, most: int, repeats: int) -> list[dict]:
    """A row for training a vocabulary on `most` bytes of the training split, or all it has, and one for encoding them.

    As in preparation: in pieces, encoded on all cores. Training needs the package tokenizers; without it, the data's
    tokenizer encodes. No rows if the data's tokenizer is unavailable, or is bytes while the package is missing.
    """
    try:
        tokenizer = get_tokenizer(stream.meta["tokenizer"], stream.vocabulary)
    except UserError:
        return []
    text = tokenizer.decode_bytes(stream.train.read_tokens(0, 0, most))[:most]
    pieces = list(pieces_of(io.BytesIO(text), len(text)))
    rows = []
    if importlib.util.find_spec("tokenizers"):
        seconds = []
        for _ in range(repeats):
            t0 = time.perf_counter()
            vocabulary = train_vocabulary(pieces, DEFAULT_SIZE)
            seconds.append(time.perf_counter() - t0)
        tokenizer = BPETokenizer(vocabulary)
        rows.append(dict(name=f"training {tokenizer.vocab_size:,} byte pairs", seconds=seconds))
    if tokenizer.name == "bytes":
        return []
    seconds = []
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for _ in range(repeats):
            t0 = time.perf_counter()
            n_tokens = sum(part.size for part in pool.map(tokenizer.encode_raw, pieces))
            seconds.append(time.perf_counter() - t0)
    rows.append(dict(name=f"encoding, tokenizer {tokenizer.name}", seconds=seconds))
    for row in rows:
        seconds = row.pop("seconds")
        row |= dict(megabytes=len(text) / 1e6, bytes_per_token=len(text) / n_tokens)
        row |= median_min_max(seconds, "seconds") | median_min_max([len(text) / 1e6 / s for s in seconds], "mb_per_s")
    return rows


def data_case(flags: dict, steps: int):
    """Yields the loader's figures, the rows of byte pairs, then what train_steps measures at each of DEPTHS."""
    cfg, dist_ctx = settle(make_config(**flags))
    stream = open_stream(cfg, dist_ctx)
    state = build(cfg, dist_ctx, stream.meta["vocab_size"], stream.meta["eot"])
    yield measure_loader(stream, dist_ctx, cfg.batch_tokens)
    yield measure_byte_pairs(stream, 10**6 if steps < 10 else 10**7, 3)
    while True:
        yield [train_steps(state, stream, depth, steps) for depth in DEPTHS]


def bench_data(bench: Bench) -> dict:
    """What the loader can deliver, and how long a step waits for it."""
    bench.reject_flags("prefetch")
    with Worker(bench, data_case, bench.flags, 3 if bench.quick else 10) as worker:
        facts, byte_pairs = worker.request(), worker.request()
        rounds = [worker.request() for _ in range(bench.repeats)]
    rows, alone = [], [by_depth[0][0] for by_depth in rounds]
    for i, depth in enumerate(DEPTHS):
        seconds, waits = zip(*(by_depth[i] for by_depth in rounds))
        row = dict(name="no loader" if depth is None else f"prefetch {depth}", prefetch=depth)
        row |= median_min_max([1000 * s for s in seconds], "ms")
        row |= median_min_max([s / none for s, none in zip(seconds, alone)], "against_none")
        row |= median_min_max([wait_s / s for s, wait_s in zip(seconds, waits)], "waits")
        rows.append(row)
    tokens = make_config(**bench.flags).batch_tokens
    note = f"The loader alone delivers {facts['loader_tokens_per_s']:,.0f} tokens/s, a batch of {tokens:,} in "
    note += f"{1000 * facts['batch_s']:.2f} ms; training takes {1000 * tokens / rows[-1]['ms']:,.0f} tokens/s. "
    if "pinned_s" in facts:
        note += f"To the device: {1e6 * facts['pinned_s']:.0f} us pinned, {1e6 * facts['pageable_s']:.0f} us pageable."
    else:
        note += "Pinned memory is for CUDA only."
    print(table("Data", rows, "name ms against_none waits".split(), note))
    note = "On text of the training split, on all cores, as in data/prepare.py."
    if len(byte_pairs) < 2:
        note += " Training byte pairs needs the package tokenizers: run `pip install tokenizers`."
    if not byte_pairs:
        note = "Not measured: the data are bytes and tokenizers is not installed, or their tokenizer is unavailable."
    keys = "name megabytes seconds mb_per_s bytes_per_token".split()
    print(table("Tokenizer", byte_pairs, keys, note))
    return dict(data=rows, tokenizer=byte_pairs, **facts)
