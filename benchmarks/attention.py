"""`bench.py attention`: every attention backend and a naive softmax, forward and backward, over context lengths."""

import itertools
import math
import time

import torch
from torch import Tensor

from benchmarks.harness import (
    Bench,
    measure_interleaved,
    measure_memory,
    median_min_max,
    progress,
    settle,
    synchronize,
    table,
)
from ops.attention import ATTENTION_BACKENDS, attention, attention_mask
from runtime.launch import DTYPES, select_device
from train_gpt import make_config

BACKENDS = ("naive", "blocked", "blocked, compiled", "math", "sdpa", "flash", "efficient", "cudnn", "flex", "varlen")
VARIANTS = ("causal", "window", "documents")


def naive_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """Softmax attention that materializes all scores; shapes as ops.attention."""
    mask = torch.ones(q.size(2), q.size(2), dtype=torch.bool, device=q.device).tril() if mask is None else mask
    scores = q @ k.transpose(-2, -1) / math.sqrt(q.size(-1))
    return scores.masked_fill(~mask, -math.inf).softmax(-1) @ v


def prepare_call(flags: dict, backend: str, length: int, tokens: int, variant: str):
    """The device, and a function: a call of attention that returns seconds forward, making the mask included, and
    backward (None for what cannot train). Raises UserError for what this device cannot do."""
    varied = {
        "seq_len": length,
        "batch_tokens": length,
        "doc_mask": variant == "documents",
        "window": "S" if variant == "window" else "L",
        "attn": backend if backend in ATTENTION_BACKENDS else "auto",
        "compile": "default" if backend == "blocked, compiled" else "off",
    }
    cfg = make_config(**flags | varied)
    trains = backend != "flex" or select_device(cfg.device).type == "cuda"
    cfg, dist_ctx = settle(cfg, check=trains)
    device = dist_ctx.device
    generator = torch.Generator().manual_seed(0)
    shape = (max(1, tokens // length), length, cfg.n_head, cfg.n_embd // cfg.n_head)
    inputs = [torch.randn(shape, generator=generator).to(device, DTYPES[cfg.dtype]).transpose(1, 2) for _ in range(4)]
    q, k, v, dy = inputs
    for tensor in (q, k, v):
        tensor.requires_grad_(trains)
    idx = torch.randint(max(2, length // 4), (shape[0], length), generator=generator).to(device)  # 0: a document
    window = length // 4 if variant == "window" else 0
    eot = 0 if variant == "documents" else None
    torch._dynamo.reset()  # or FlexAttention hits the recompile limit, and runs uncompiled from then on
    compiled = torch.compile(attention, dynamic=False)

    def call() -> tuple[float, float | None]:
        synchronize(device)
        t0 = time.perf_counter()
        mask = attention_mask(backend, idx, window, eot)
        if backend == "naive":
            out = naive_attention(q, k, v, mask)
        elif backend == "blocked, compiled":
            out = compiled(q, k, v, mask, "blocked")
        else:
            out = attention(q, k, v, mask, backend)
        synchronize(device)
        t1 = time.perf_counter()
        if not trains:
            return t1 - t0, None
        out.backward(dy)
        synchronize(device)
        t2 = time.perf_counter()
        q.grad = k.grad = v.grad = None
        return t1 - t0, t2 - t1

    return device, call


def attention_case(flags: dict, backend: str, todo: list[tuple[int, str]], tokens: int, repeats: int):
    """Yields, for each (T, variant) in todo, the peak MiB of a call; then `repeats` times the seconds of a call."""
    for length, variant in todo:
        device, call = prepare_call(flags, backend, length, tokens, variant)
        call()  # compiles
        yield dict(more_mb=measure_memory(device, call)[1] / 2**20)
        for _ in range(repeats):
            yield call()


def add_figures(rows: list[dict], measured: list[list]) -> None:
    """Fill in the rows of all backends at one length and mask, the naive one first."""
    naive_ms = math.nan
    for row, seconds in zip(rows, measured):
        if "note" in row:
            continue
        row |= median_min_max([1000 * forward for forward, _ in seconds], "forward_ms")
        if seconds[0][1] is not None:
            row |= median_min_max([1000 * backward for _, backward in seconds], "backward_ms")
            total_ms = row["forward_ms"] + row["backward_ms"]
            naive_ms = total_ms if row["backend"] == "naive" else naive_ms
            row["vs_naive"] = naive_ms / total_ms


def bench_attention(bench: Bench) -> dict:
    """Every backend over context lengths, causal, with windows and with documents."""
    bench.reject_flags("attn", "compile", "seq_len", "window", "doc_mask")
    cuda, cfg, rows, workers = bench.device.type == "cuda", make_config(**bench.flags), [], {}
    lengths = (512, 1024, 2048, 4096, 8192, 16384) if cuda else (256, 512, 1024, 2048)
    lengths, tokens = (lengths[:2], 2048) if bench.quick else (lengths, 16384 if cuda else 4096)
    todo = list(itertools.product(lengths, VARIANTS))
    while todo:
        length, variant = todo[0]
        group = [dict(seq_len=length, variant=variant, backend=backend) for backend in BACKENDS]
        cases = [(attention_case, bench.flags, backend, todo, tokens, bench.repeats) for backend in BACKENDS]
        add_figures(group, measure_interleaved(bench, group, cases, bench.repeats, workers))
        progress(f"T {length}, {variant}")
        rows += group
        todo = todo[1:]
    for worker in workers.values():
        worker.close()
    done = {row["backend"] for row in rows if "note" not in row}
    reasons = {row["backend"]: row["note"] for row in rows if row["backend"] not in done}
    note = (
        f"{tokens} tokens a call, {cfg.n_head} heads of {cfg.n_embd // cfg.n_head}. The window is a quarter of T, as "
        "are documents on average. Making the mask counts as forward (flex keeps those without documents). "
        "FlexAttention has no backward pass on a CPU."
    )
    note += "".join(f"\nNot available here: {backend} ({reason})." for backend, reason in reasons.items())
    keys = "seq_len variant backend forward_ms backward_ms vs_naive more_mb note".split()
    print(table("Attention", [row for row in rows if row["backend"] in done], keys, note))
    return dict(attention=rows, tokens=tokens)
