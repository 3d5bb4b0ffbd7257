"""`bench.py attention`: every attention backend and a naive softmax, forward and backward, over context lengths."""

import itertools
import math
import statistics

import torch
from torch import Tensor

from benchmarks.harness import (
    Bench,
    measure,
    measure_memory,
    median_min_max,
    progress,
    table,
    timed,
)
from model import attention, may_attend
from ops.attention import ATTENTION_BACKENDS, attention_mask
from runtime.device import DTYPES, faster_dtype, init_device_and_ranks
from runtime.flag_checks import check_device
from train_gpt import Config, gpt_config, make_config

BACKENDS = (
    "naive",
    "blocked",
    "blocked, compiled",
    "math",
    "sdpa",
    "flash",
    "efficient",
    "cudnn",
    "flex",
    "varlen",
)
VARIANTS = ("causal", "window", "documents")


def naive_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, backend: str = ""
) -> Tensor:
    """Softmax attention that materializes all scores; arguments as of ops.attention."""
    mask = (
        torch.ones(q.size(2), q.size(2), dtype=torch.bool, device=q.device).tril()
        if mask is None
        else mask
    )
    scores = q @ k.transpose(-2, -1) / math.sqrt(q.size(-1))
    return scores.masked_fill(~mask, -math.inf).softmax(-1) @ v


def attention_case(flags: dict, name: str, length: int, variant: str, tokens: int):
    """Yields the peak MiB of a call; then seconds forward, making the mask included, and backward."""
    backend, compiled = name.split(",")[0], "compiled" in name
    window, eot = length // 4 if variant == "window" else 0, 0 if variant == "documents" else None
    varied = dict(
        seq_len=length, batch_tokens=length, window="S" if window else "L", doc_mask=eot == 0
    )
    varied["attn"] = backend if backend in ATTENTION_BACKENDS else "auto"
    cfg = make_config(**flags | varied, compile="default" if compiled else "off")
    dist_ctx = init_device_and_ranks(cfg)
    check_device(cfg, Config(), dist_ctx, gpt_config(cfg, 0).layer_windows())
    device, generator = dist_ctx.device, torch.Generator().manual_seed(0)
    shape = (4, tokens // length, length, cfg.n_head, cfg.n_embd // cfg.n_head)
    drawn = torch.randn(shape, generator=generator).to(
        device, DTYPES[faster_dtype(cfg.dtype, device, cfg.n_embd)]
    )
    *inputs, d_out = drawn.transpose(2, 3)
    inputs = [tensor.requires_grad_() for tensor in inputs]
    idx = torch.randint(length // 4, shape[1:3], generator=generator).to(
        device
    )  # 0 starts a document
    function = naive_attention if name == "naive" else attention
    function = torch.compile(function, dynamic=False) if compiled else function

    def call() -> tuple[float, float]:
        forward_s, out = timed(
            device,
            lambda: function(
                *inputs, attention_mask(backend, may_attend, idx, window, eot), backend
            ),
        )
        return forward_s, timed(device, lambda: torch.autograd.grad(out, inputs, d_out))[0]

    call()  # compiles
    yield {"peak MiB": measure_memory(device, call)[1] / 2**20}
    while True:
        yield call()


def bench_attention(bench: Bench) -> dict:
    bench.refuse("attn", "compile", "seq_len", "batch_tokens", "window", "doc_mask")
    cuda, cfg, rows = bench.device.type == "cuda", make_config(**bench.flags), []
    lengths, tokens = (
        ((512, 1024, 2048, 4096, 8192, 16384), 16384) if cuda else ((256, 512, 1024, 2048), 4096)
    )
    for length, variant in itertools.product(lengths[:2] if bench.quick else lengths, VARIANTS):
        group = measure(
            [(attention_case, bench.flags, b, length, variant, tokens) for b in BACKENDS],
            bench.repeats,
        )
        group = [
            dict(T=length, mask=variant, backend=backend) | row
            for backend, row in zip(BACKENDS, group)
        ]
        for row in group:
            if "note" not in row:
                for key, seconds in zip(("forward, ms", "backward, ms"), zip(*row["values"])):
                    row |= median_min_max([1000 * s for s in seconds], key)
                seconds = [sum(call) for call in row["values"]]
                naive = [sum(call) for call in group[0].get("values", [])]
                row["speedup vs naive"] = (
                    statistics.median(naive) / statistics.median(seconds) if naive else None
                )
        progress(f"T {length}, {variant}")
        rows += group
    missing = {row["backend"]: row["note"] for row in rows if "note" in row}
    note = f"{tokens} tokens a call, {cfg.n_head} heads of {cfg.n_embd // cfg.n_head}. Windows and documents are "
    note += "a quarter of T (documents on average). Making the mask counts as forward."
    note += "".join(
        f"\nNot everywhere: {backend} ({reason})." for backend, reason in missing.items()
    )
    print(table("Attention", [row for row in rows if "note" not in row], note))
    return dict(attention=rows, tokens=tokens)
