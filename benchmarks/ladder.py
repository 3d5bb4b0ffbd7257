"""`bench.py train`: the ladder, systems flags added one by one."""

import math
import time
from dataclasses import replace
from functools import partial
from statistics import median

import torch

from benchmarks.harness import Bench, build_state, measure, progress, table, time_steps
from runtime.auto import measure_flops
from runtime.device import peak_memory_mb, select_device
from runtime.speed import DTYPES
from train_gpt import Config

# The first configuration
BASE = dict(
    dtype="fp32",
    matmul_precision="highest",
    attn="math",
    compile="off",
    loss_chunk=0,
    fp8=False,
    checkpointing="none",
)
# Name of a step of the ladder -> the flags that it changes
LADDER = {
    "TF32": dict(matmul_precision="high"),
    "bf16": dict(dtype="bf16"),
    "fused attention": dict(attn="sdpa"),
    "compile": dict(compile="default"),
    "blockwise attention (compiled)": dict(attn="blocked"),
    "chunked loss": dict(loss_chunk=Config.loss_chunk),
    "auto micro-batch": dict(micro_batch=None),
    "max-autotune": dict(compile="max-autotune"),
    "fp8": dict(fp8=True),
    "selective checkpointing": dict(checkpointing="selective"),
    "full checkpointing": dict(checkpointing="full"),
}


def step_case(cfg: Config):
    """Yield memory, sizes and start-up time of a configuration; then the ms per step."""
    start = time.perf_counter()
    # Two cases share the card while they are compared
    if select_device(cfg.device).type == "cuda":
        torch.cuda.set_per_process_memory_fraction(0.45)
    state, _, batch = build_state(cfg)
    time_steps(state, batch, 3)  # compiles, warms up
    # Enough steps per measurement to take 200 ms
    n_steps = max(1, math.ceil(200 / time_steps(state, batch, 1)))
    yield {
        "micro_batch": state.micro_batch,
        "peak MiB": peak_memory_mb(state.dist_ctx.device),
        "startup, s": time.perf_counter() - start,
        "sizes": (state.cfg.batch_tokens, state.raw_model.flops_per_token()),
    }
    while True:
        yield {"ms/step": time_steps(state, batch, n_steps)}


def compare(bench: Bench, name: str, *flag_sets: dict) -> list[dict]:
    """Measure configurations, interleaved, and return a row for each. name: the new one's."""
    cases = [partial(step_case, replace(bench.cfg, **flags)) for flags in flag_sets]
    rows = []
    for flags, measured in zip(flag_sets, measure(cases, bench.repeats)):
        row = {"Config": name, "flags": flags} | measured
        rows.append(row)
        if "note" not in row:
            batch_tokens, _ = row["sizes"]
            row["tokens/s"] = 1000 * batch_tokens / row["ms/step"]
    progress(f"{name}: {row.get('note') or row['ms/step']}")
    return rows


def bench_train(bench: Bench) -> list[dict]:
    """Print the ladder. A step that is slower than the configuration so far is not kept."""
    bench.forbid_flags(*BASE, "minutes")
    cfg = bench.cfg
    on_cuda = bench.device.type == "cuda"
    speeds = [(measure_flops(bench.device, DTYPES[dtype]), dtype) for dtype in ("fp32", "bf16")]
    peak, peak_dtype = max(speeds)
    tokens = 8192 if on_cuda else 1024
    micro_batch = bench.micro_batch(cfg.batch_tokens // cfg.seq_len, tokens)
    base = BASE | dict(micro_batch=micro_batch)
    steps = dict(LADDER)
    if not on_cuda:
        del steps["TF32"]

    # Add one flag after the other, each measured beside the configuration so far
    rows = compare(bench, "fp32 eager", base)
    stack = base
    total_speedup = 1.0
    for name, change in steps.items():
        kept, row = compare(bench, f"+ {name}", stack, stack | change)
        rows.append(row)
        if "note" in row:
            continue
        speedup = 1.0  # if the configuration so far failed, this one replaces it
        if "note" not in kept:
            pairs = zip(kept["values"], row["values"])
            speedup = median(before["ms/step"] / after["ms/step"] for before, after in pairs)
            row["speedup vs last kept"] = speedup
            row["cumulative speedup"] = total_speedup * speedup
        if speedup < 1:
            row["note"] = "slower: not kept"
            continue
        total_speedup *= speedup
        stack = stack | change | dict(micro_batch=row["micro_batch"])

    for row in rows:
        if "tokens/s" in row:
            _, flops_per_token = row["sizes"]
            row["MFU (measured matmul peak)"] = row["tokens/s"] * flops_per_token / peak
    note = (
        f"Matmuls reach {peak / 1e12:.3f} TFLOP/s in {peak_dtype}. "
        "Speedup: median ratio of interleaved steps to the most recent configuration that was "
        "kept; the cumulative column multiplies these ratios."
    )
    print(table("The ladder", rows, note))
    return rows
