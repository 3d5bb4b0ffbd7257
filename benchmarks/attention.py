"""`bench.py attention`: every attention backend and a naive softmax, forward and backward, over context lengths."""

import contextlib
import functools
import itertools
import math
import time

import torch
from torch import Tensor

from benchmarks.harness import Bench, CaseFailed, Worker, measure_memory, median_min_max, progress, synchronize, table
from ops import ATTENTION_BACKENDS, attention, attention_mask
from runtime.dtype import settle_dtype
from runtime.launch import DTYPES
from train_gpt import check_hardware, launch, make_config

BACKENDS = ("naive", "blocked", "blocked, compiled", "math", "sdpa", "flash", "efficient", "cudnn", "flex", "varlen")
VARIANTS = ("causal", "window", "documents")


def naive_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """Softmax attention that materializes all scores; shapes as ops.attention."""
    mask = torch.ones(q.size(2), q.size(2), dtype=torch.bool, device=q.device).tril() if mask is None else mask
    scores = q @ k.transpose(-2, -1) / math.sqrt(q.size(-1))
    return scores.masked_fill(~mask, -math.inf).softmax(-1) @ v


@functools.cache
def compiled_attention():
    return torch.compile(attention, dynamic=False)


def attention_once(backend: str, q: Tensor, k: Tensor, v: Tensor, dy: Tensor, idx: Tensor, variant: str):
    """Seconds of one call forward and, where q needs a gradient, backward (else None), making the mask included."""
    synchronize(q.device)
    t0 = time.perf_counter()
    length = q.size(2)
    window, eot = length // 4 if variant == "window" else 0, 0 if variant == "documents" else None
    mask = attention_mask(backend, idx, window, eot)
    if backend == "naive":
        out = naive_attention(q, k, v, mask)
    elif backend == "blocked, compiled":
        out = compiled_attention()(q, k, v, mask, "blocked")
    else:
        out = attention(q, k, v, mask, backend)
    synchronize(q.device)
    t1 = time.perf_counter()
    if not q.requires_grad:
        return t1 - t0, None
    out.backward(dy)
    synchronize(q.device)
    return t1 - t0, time.perf_counter() - t1


def attention_case(flags: dict, backend: str):
    """Yields the dtype; for (T, tokens, variant) the most bytes that a call holds; for None its seconds."""
    cfg = make_config(**flags)
    dist_ctx = launch(cfg)
    settle_dtype(cfg, dist_ctx)
    device, dtype = dist_ctx.device, DTYPES[cfg.dtype]
    request = yield str(dtype)
    while True:
        length, tokens, variant = request
        cfg = make_config(**{**flags, "seq_len": length, "batch_tokens": length, "doc_mask": variant == "documents",
                             "window": "S" if variant == "window" else "L",
                             "attn": backend if backend in ATTENTION_BACKENDS else "auto",
                             "compile": "default" if backend == "blocked, compiled" else "off"})  # fmt: skip
        trains = backend != "flex" or device.type == "cuda"
        if trains:
            check_hardware(cfg, dist_ctx)
        generator = torch.Generator().manual_seed(0)
        shape = (max(1, tokens // length), length, cfg.n_head, cfg.n_embd // cfg.n_head)
        q, k, v, dy = (torch.randn(shape, generator=generator).to(device, dtype).transpose(1, 2) for _ in range(4))
        q, k, v = (t.requires_grad_(trains) for t in (q, k, v))
        idx = torch.randint(max(2, length // 4), (shape[0], length), generator=generator).to(device)  # 0: a document
        torch._dynamo.reset()  # or FlexAttention runs into the limit of recompilations, and uncompiled from there
        attention_once(backend, q, k, v, dy, idx, variant)  # whatever it compiles is not of the call
        q.grad = k.grad = v.grad = None
        _, peak, _ = measure_memory(device, lambda call=(backend, q, k, v, dy, idx, variant): attention_once(*call))
        request = yield peak
        while request is None:
            q.grad = k.grad = v.grad = None
            request = yield attention_once(backend, q, k, v, dy, idx, variant)


class Backends:
    """A worker for each backend, started at its first request and again after a failure."""

    def __init__(self, bench: Bench, exits: contextlib.ExitStack):
        self.bench, self.exits, self.workers = bench, exits, {}

    def request(self, row: dict, what=None):
        """The answer of the row's backend; None, and the reason in the row, where it has none."""
        backend = row["backend"]
        try:
            if backend not in self.workers:
                worker = Worker(self.bench, attention_case, self.bench.flags, backend)
                self.workers[backend] = self.exits.enter_context(worker)
                worker.request()
            return self.workers[backend].request(what)
        except CaseFailed as error:
            row["note"] = str(error)
            self.workers.pop(backend).close()


def compare(backends: Backends, length: int, tokens: int, variant: str) -> list[dict]:
    """The rows of all backends at one length and mask, their calls interleaved."""
    rows = [dict(seq_len=length, variant=variant, backend=backend) for backend in BACKENDS]
    times = [[] for _ in rows]
    for row in rows:
        row["more_mb"] = (backends.request(row, (length, tokens, variant)) or math.nan) / 2**20
    for row, kept in [pair for _ in range(backends.bench.repeats) for pair in zip(rows, times)]:
        if "note" not in row:
            kept.append(backends.request(row))
    naive = rows[0]
    for row, kept in zip(rows, times):
        if "note" in row:
            continue
        row |= median_min_max([1000 * forward for forward, _ in kept], "forward_ms")
        if kept[0][1] is not None:
            row |= median_min_max([1000 * backward for _, backward in kept], "backward_ms")
            naive_ms = naive.get("forward_ms", math.nan) + naive.get("backward_ms", math.nan)
            row["vs_naive"] = naive_ms / (row["forward_ms"] + row["backward_ms"])
    return rows


def report(rows: list[dict], tokens: int, heads: str) -> None:
    """Print the table; a backend without a single figure becomes a line under it."""
    columns = {
        "seq_len": ("T", "d"), "variant": ("mask", ""), "backend": ("backend", ""),
        "forward_ms": ("forward, ms", ".2f"), "backward_ms": ("backward, ms", ".2f"),
        "vs_naive": ("speedup vs naive", ".2f"), "more_mb": ("extra peak MiB", ",.1f"), "note": ("", ""),
    }  # fmt: skip
    reasons = {row["backend"]: row["note"] for row in rows if "note" in row}
    for row in rows:
        if "note" not in row:
            reasons.pop(row["backend"], None)
    notes = (
        f"{tokens} tokens a call, {heads}. The window is a quarter of T, as are documents on average. Making the mask "
        "counts as forward (flex keeps those without documents). FlexAttention has no backward pass on a CPU.",
        *(f"Not available here: {backend} ({reason})." for backend, reason in reasons.items()),
    )
    print(table("Attention", [row for row in rows if row["backend"] not in reasons], columns, notes))


def bench_attention(bench: Bench) -> dict:
    """Every backend over context lengths, causal, with windows and with documents."""
    bench.reject_flags("attn", "compile", "seq_len", "window", "doc_mask")
    cuda, cfg, rows = bench.device.type == "cuda", make_config(**bench.flags), []
    lengths = (512, 1024, 2048, 4096, 8192, 16384) if cuda else (256, 512, 1024, 2048)
    lengths, tokens = (lengths[:2], 2048) if bench.quick else (lengths, 16384 if cuda else 4096)
    with contextlib.ExitStack() as exits:
        backends = Backends(bench, exits)
        for length, variant in itertools.product(lengths, VARIANTS):
            rows += compare(backends, length, tokens, variant)
            progress(f"T {length}, {variant}")
    report(rows, tokens, f"{cfg.n_head} heads of {cfg.n_embd // cfg.n_head}")
    return dict(attention=rows, tokens=tokens)
