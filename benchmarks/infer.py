"""`bench.py infer`: prefill and decode, without a KV cache, with one, compiled, in int8."""

import contextlib
import itertools
import math
import time

import torch

from benchmarks.harness import (
    Bench,
    CaseFailed,
    Worker,
    median_min_max,
    progress,
    synchronize,
    table,
    tokenizer_size,
)
from generation import compile_decode_step, generate
from int8 import quantize
from model import GPT
from runtime.checks import check_compiler
from runtime.dtype import settle_dtype
from runtime.launch import DTYPES, peak_memory_mb, skip_trial_programs
from train_gpt import gpt_config, init_weights, launch, make_config

MODES = ("no cache", "KV cache", "KV cache, compiled", "KV cache, int8", "KV cache, compiled, int8")


def inference_model(flags: dict, int8: bool) -> GPT:
    """The trainer's model for these flags, with weights as sample.py holds them."""
    cfg = make_config(**flags)
    dist_ctx = launch(cfg)
    settle_dtype(cfg, dist_ctx)
    with dist_ctx.device:
        model = GPT(gpt_config(cfg, tokenizer_size(cfg)), DTYPES[cfg.dtype])
    init_weights(model, cfg.seed)
    if int8:
        quantize(model)
    return model.freeze()


def infer_case(flags: dict, batch: int, mode: str, prompt: int, lengths: tuple, patience: float):
    """Yields seconds of warming up; then seconds to the first token and to each of `lengths` (None where patience,
    in seconds, ended), seconds a token of decoding, and peak MiB."""
    model, step = inference_model(flags, int8="int8" in mode), None
    device, vocab_size = model.cos.device, tokenizer_size(make_config(**flags))
    if "compiled" in mode:
        check_compiler(device)
        skip_trial_programs()
        step = compile_decode_step(device)
    idx = torch.randint(vocab_size, (batch, prompt), generator=torch.Generator().manual_seed(0)).to(device)

    def token_times(n_tokens: int, patience: float = math.inf) -> list[float]:
        synchronize(device)
        t0, times = time.perf_counter(), []
        drawn = generate(model, list(idx), max(lengths), vocab_size, 0, step=step, use_cache=mode != "no cache")
        for _ in itertools.islice(drawn, n_tokens):
            synchronize(device)
            times.append(time.perf_counter() - t0)
            if times[-1] > patience:
                break
        return times

    yield dict(setup_s=token_times(8)[-1])
    while True:
        times = token_times(max(lengths), patience)
        done = len(times) == max(lengths)
        yield dict(
            prefill=times[0], decode=(times[-1] - times[0]) / (len(times) - 1) if done else None,
            to={n: times[n - 1] if len(times) >= n else None for n in lengths}, peak_mb=peak_memory_mb(device),
        )  # fmt: skip


def measure(bench: Bench, rows: list[dict], repeats: int, *args) -> dict[int, list[dict]]:
    """What the cases of these rows measure, interleaved, by the row's number; a case that fails leaves a note.

    args: prompt, lengths and patience of infer_case, after the trainer's flags.
    """
    flags, *rest = args
    results = {}
    with contextlib.ExitStack() as exits:
        workers = {}
        for i, row in enumerate(rows):
            case = (flags, row["batch"], row["mode"], *rest)
            workers[i] = exits.enter_context(Worker(bench, infer_case, *case))
            try:
                row |= workers[i].request()
                results[i] = []
            except CaseFailed as error:
                row["note"] = str(error)
        for i in [i for _ in range(repeats) for i in results]:
            if "note" in rows[i]:
                continue
            try:
                results[i].append(workers[i].request())
            except CaseFailed as error:
                rows[i]["note"] = str(error)
    return results


def summarize(row: dict, results: list[dict], lengths: tuple) -> None:
    """Fill in a row that has no note."""
    row |= median_min_max([1000 * result["prefill"] for result in results], "prefill_ms")
    row["peak_mb"] = results[-1]["peak_mb"]
    if all(result["decode"] for result in results):  # patience did not end on the way
        row |= median_min_max([1000 * result["decode"] for result in results], "decode_ms")
        row["tokens_per_s"] = 1000 * row["batch"] / row["decode_ms"]
    for n in lengths:
        took = [result["to"][n] for result in results]
        if None not in took:
            row |= median_min_max(took, f"s_{n}")


def add_speedups(rows: list[dict], lengths: tuple) -> None:
    """gain_N of each row: seconds without a cache over its own, where both are known."""
    plain = {row["batch"]: row for row in rows if row["mode"] == "no cache"}
    for row in rows:
        for n in lengths:
            if row["mode"] != "no cache" and f"s_{n}" in row and f"s_{n}" in plain[row["batch"]]:
                row[f"gain_{n}"] = plain[row["batch"]][f"s_{n}"] / row[f"s_{n}"]


def bench_infer(bench: Bench) -> dict:
    """Prefill and decode, without a KV cache, with one, compiled, in int8."""
    bench.reject_flags("seq_len", "batch_tokens", "compile")
    lengths, prompt = ((50, 100, 200), 32) if bench.quick else ((100, 500, 1000), 128)
    batches, patience = ((4,), 20.0) if bench.quick else ((1, 8, 32), 60.0)
    repeats = min(bench.repeats, 1 if bench.quick else 3)  # without a cache it takes minutes
    context = prompt + max(lengths)
    flags = {**bench.flags, "seq_len": context, "batch_tokens": context}
    rows = [dict(batch=batch, mode=mode) for batch, mode in itertools.product(batches, MODES)]
    for batch, group in itertools.groupby(rows, lambda row: row["batch"]):
        group = list(group)
        for i, results in measure(bench, group, repeats, flags, prompt, lengths, patience).items():
            if "note" not in group[i]:
                summarize(group[i], results, lengths)
        progress(f"batch {batch}")
    add_speedups(rows, lengths)
    columns = {
        "batch": ("batch", "d"), "mode": ("mode", ""), "prefill_ms": ("TTFT, ms", ",.1f"),
        "decode_ms": ("ms/token", ",.2f"), "tokens_per_s": ("tokens/s", ",.0f"),
        **{f"s_{n}": (f"{n} tokens, s", ",.2f") for n in lengths},
        **{f"gain_{n}": (f"times sooner @{n}", ".1f") for n in lengths},
        "peak_mb": ("peak MiB", ",.0f"), "setup_s": ("startup, s", ".1f"), "note": ("", ""),
    }  # fmt: skip
    note = (
        f"A prompt of {prompt} tokens. No cache: all is read again for each token. TTFT: time to first token. ms/token "
        f"and tokens/s (of all sequences): decoding. Blank: not done in {patience:.0f} s."
    )
    print(table("Generation", rows, columns, (note,)))
    return dict(infer=rows, prompt=prompt, repeats=repeats)
