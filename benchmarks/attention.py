"""`bench.py attention`: each attention backend and a naive softmax, over context lengths."""

import math
from dataclasses import replace
from functools import partial
from itertools import product

import torch
from torch import Tensor

from benchmarks.harness import Bench, measure, measure_memory, progress, table, time_ms
from model import attention, may_attend
from ops.attention import ATTENTION_BACKENDS, attention_mask
from runtime.device import init_device_and_ranks
from runtime.flag_checks import check_device
from runtime.speed import DTYPES, faster_dtype
from train_gpt import Config, gpt_config

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
CPU_LENGTHS = (256, 512, 1024, 2048)
CUDA_LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
# Windows, and documents on average, are a quarter of the context
VARIANTS = dict(
    causal=dict(window="L", doc_mask=False),
    window=dict(window="S", doc_mask=False),
    documents=dict(window="L", doc_mask=True),
)


def naive_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *_) -> Tensor:
    """Softmax attention that materializes all scores. Arguments are those of model.attention."""
    length = q.size(2)
    if mask is None:
        mask = torch.ones(length, length, dtype=torch.bool, device=q.device).tril()
    scores = q @ k.transpose(-2, -1) / math.sqrt(q.size(-1))
    return scores.masked_fill(~mask, -math.inf).softmax(-1) @ v


def attention_case(cfg: Config, name: str, tokens: int):
    """Yield the peak MiB of a call; then the ms of its forward and its backward pass.

    name: one of BACKENDS. tokens: per call, in sequences of cfg.seq_len. Forward includes making
    the mask.
    """
    backend = name.removesuffix(", compiled")
    if backend in ATTENTION_BACKENDS:
        cfg = replace(cfg, attn=backend)
    if name.endswith(", compiled"):
        cfg = replace(cfg, compile="default")
    dist_ctx = init_device_and_ranks(cfg)
    check_device(cfg, dist_ctx)
    window = gpt_config(cfg, 0).layer_windows()[0]
    device = dist_ctx.device
    dtype = DTYPES[faster_dtype(cfg.dtype, device, cfg.n_embd)]

    # q, k, v and the gradient of the output: (B, H, T, D)
    length = cfg.seq_len
    shape = (4, tokens // length, length, cfg.n_head, cfg.n_embd // cfg.n_head)
    generator = torch.Generator().manual_seed(0)
    random = torch.randn(shape, generator=generator).to(device, dtype)
    q, k, v, d_out = random.transpose(2, 3)
    for tensor in (q, k, v):
        tensor.requires_grad_()
    idx = torch.randint(length // 4, shape[1:3], generator=generator).to(device)
    eot = 0 if cfg.doc_mask else None

    function = naive_attention if name == "naive" else attention
    if cfg.compile != "off":
        function = torch.compile(function, dynamic=False)

    def forward() -> Tensor:
        mask = attention_mask(backend, may_attend, idx, window, eot)
        return function(q, k, v, mask, backend, window)

    def call() -> dict:
        forward_ms, out = time_ms(device, forward)
        backward_ms, _ = time_ms(device, torch.autograd.grad, out, (q, k, v), d_out)
        return {"forward, ms": forward_ms, "backward, ms": backward_ms}

    call()  # compiles
    _, peak, _ = measure_memory(device, call)
    yield {"peak MiB": peak / 2**20}
    while True:
        yield call()


def bench_attention(bench: Bench) -> list[dict]:
    """Print the speed and memory of each backend for each context length and mask."""
    bench.forbid_flags(
        "attn", "compile", "seq_len", "batch_tokens", "window", "doc_mask", "minutes"
    )
    lengths = CUDA_LENGTHS if bench.device.type == "cuda" else CPU_LENGTHS
    tokens = max(4096, lengths[-1])
    rows = []
    for length, (variant, mask_flags) in product(lengths, VARIANTS.items()):
        cfg = replace(bench.cfg, seq_len=length, batch_tokens=length, **mask_flags)
        cases = [partial(attention_case, cfg, name, tokens) for name in BACKENDS]
        naive_ms = math.nan
        for name, row in zip(BACKENDS, measure(cases, bench.repeats)):
            row = dict(T=length, mask=variant, backend=name) | row
            rows.append(row)
            if "note" in row:
                continue
            call_ms = row["forward, ms"] + row["backward, ms"]
            if name == "naive":
                naive_ms = call_ms
            row["speedup vs naive"] = naive_ms / call_ms
        progress(f"T {length}, {variant}")

    measured = [row for row in rows if "note" not in row]
    failed = {row["backend"]: row["note"] for row in rows if "note" in row}
    n_head = bench.cfg.n_head
    note = (
        f"{tokens} tokens per call, {n_head} heads of {bench.cfg.n_embd // n_head}. "
        "Windows and documents are a quarter of T (documents on average). "
        "Forward includes making the mask."
    )
    for name, reason in failed.items():
        note += f"\nFailed for some T or masks: {name} ({reason})."
    print(table("Attention", measured, note))
    return rows
