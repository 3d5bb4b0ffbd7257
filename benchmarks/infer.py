"""`bench.py infer`: prefill and decode, without a KV cache, with one, compiled, in int8."""

import itertools
import math
import time

import torch

from benchmarks.harness import (
    COLUMNS,
    Bench,
    measure_interleaved,
    median_min_max,
    progress,
    settle,
    synchronize,
    table,
    tokenizer_size,
)
from generation import compile_decode_step, generate
from int8 import quantize
from model import GPT, init_weights
from ops.cpu import skip_trial_programs
from runtime.checks import check_compiler
from runtime.launch import DTYPES, peak_memory_mb
from train_gpt import gpt_config, make_config, seed_of

MODES = ("no cache", "KV cache", "KV cache, compiled", "KV cache, int8", "KV cache, compiled, int8")


def infer_case(flags: dict, batch: int, mode: str, prompt: int, n_tokens: int, patience: float):
    """Yields warm-up seconds; then seconds to each of n_tokens, or to the first after `patience`, and peak MiB."""
    cfg, dist_ctx = settle(make_config(**flags), check=False)
    device, vocab_size, step = dist_ctx.device, tokenizer_size(cfg), None
    with device:
        model = GPT(gpt_config(cfg, vocab_size), DTYPES[cfg.dtype])
    init_weights(model, seed_of(cfg))
    if "int8" in mode:
        quantize(model)
    model.freeze()  # as sample.py holds it
    if "compiled" in mode:
        check_compiler(device)
        skip_trial_programs()
        step = compile_decode_step(device)
    idx = torch.randint(vocab_size, (batch, prompt), generator=torch.Generator().manual_seed(0)).to(device)

    def token_times(n: int, patience: float = math.inf) -> list[float]:
        synchronize(device)
        t0, times = time.perf_counter(), []
        drawn = generate(model, list(idx), n_tokens, vocab_size, 0, step=step, use_cache=mode != "no cache")
        for _ in itertools.islice(drawn, n):
            synchronize(device)
            times.append(time.perf_counter() - t0)
            if times[-1] > patience:
                break
        return times

    yield dict(setup_s=token_times(8)[-1])
    while True:
        yield token_times(n_tokens, patience), peak_memory_mb(device)


def summarize(row: dict, rounds: list[tuple[list[float], float]], lengths: tuple[int, ...]) -> None:
    """Fill in what infer_case measured; decoding, and the seconds to a length, only if every round got that far."""
    runs = [times for times, _ in rounds]
    row["peak_mb"] = rounds[-1][1]
    row |= median_min_max([1000 * times[0] for times in runs], "prefill_ms")
    done = min(map(len, runs))
    if done == max(lengths):
        row |= median_min_max([1000 * (times[-1] - times[0]) / (done - 1) for times in runs], "decode_ms")
        row["tokens_per_s"] = 1000 * row["batch"] / row["decode_ms"]
    for n in lengths:
        if n <= done:
            row |= median_min_max([times[n - 1] for times in runs], f"s_{n}")


def bench_infer(bench: Bench) -> dict:
    """Prefill and decode, without a KV cache, with one, compiled, in int8."""
    bench.reject_flags("seq_len", "batch_tokens", "compile")
    lengths, prompt = ((50, 100, 200), 32) if bench.quick else ((100, 500, 1000), 128)
    batches, patience = ((4,), 20.0) if bench.quick else ((1, 8, 32), 60.0)
    repeats = min(bench.repeats, 1 if bench.quick else 3)  # without a cache it takes minutes
    context, rows = prompt + max(lengths), []
    flags = {**bench.flags, "seq_len": context, "batch_tokens": context}
    for batch in batches:
        group = [dict(batch=batch, mode=mode) for mode in MODES]
        cases = [(infer_case, flags, batch, mode, prompt, max(lengths), patience) for mode in MODES]
        for row, rounds in zip(group, measure_interleaved(bench, group, cases, repeats)):
            if "note" not in row:
                summarize(row, rounds, lengths)
        for row, n in itertools.product(group[1:], lengths):
            if f"s_{n}" in row and f"s_{n}" in group[0]:  # that is without a cache
                row[f"gain_{n}"] = group[0][f"s_{n}"] / row[f"s_{n}"]
        rows += group
        progress(f"batch {batch}")
    columns = {f"s_{n}": (f"{n} tokens, s", ",.2f") for n in lengths}
    columns |= {f"gain_{n}": (f"KV-cache speedup @{n}", ".1f") for n in lengths}
    keys = f"batch mode prefill_ms decode_ms tokens_per_s {' '.join(columns)} peak_mb setup_s note".split()
    note = (
        f"A prompt of {prompt} tokens. No cache: all is read again for each token. TTFT: time to first token. ms/token "
        f"and tokens/s (of all sequences): decoding. Blank: not done in {patience:.0f} s."
    )
    print(table("Generation", rows, keys, note, COLUMNS | columns))
    return dict(infer=rows, prompt=prompt, repeats=repeats)
