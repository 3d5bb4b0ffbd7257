"""`bench.py train`: systems flags added one by one."""

import math
import time
from dataclasses import replace
from functools import partial
from statistics import median

import torch

from benchmarks.harness import (
    Bench,
    build_state,
    measure,
    progress,
    table,
    time_steps,
)
from runtime.auto import measure_flops
from runtime.device import DTYPES, faster_dtype, peak_memory_mb, select_device
from train_gpt import Config, train_step

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
# Name of a step -> the flags that it changes
LADDER = {
    "TF32": dict(matmul_precision="high"),
    "bf16": dict(dtype="bf16"),
    "fused attention": dict(attn="sdpa"),
    "compile": dict(compile="default"),
    "blockwise attention (compiled)": dict(attn="blocked"),
    "chunked loss": dict(loss_chunk=Config.loss_chunk),
    "auto micro-batch": dict(micro_batch=0),
    "max-autotune": dict(compile="max-autotune"),
    "fp8": dict(fp8=True),
    "selective checkpointing": dict(checkpointing="selective"),
    "full checkpointing": dict(checkpointing="full"),
}


def step_case(cfg: Config):
    """Yield losses, memory and start-up time of a configuration; then the ms of a step."""
    start = time.perf_counter()
    # Two cases share the card while they are compared
    if select_device(cfg.device).type == "cuda":
        torch.cuda.set_per_process_memory_fraction(0.45)
    state, _, batch = build_state(cfg)
    losses = [train_step(state, batch, 0.0)[0].item() for _ in range(3)]
    # As many steps a measurement as take 200 ms
    n_steps = max(1, math.ceil(200 / time_steps(state, batch, 1)))
    yield {
        "micro_batch": state.micro_batch,
        "peak MiB": peak_memory_mb(state.dist_ctx.device),
        "startup, s": time.perf_counter() - start,
        "losses": losses,
        "sizes": (state.cfg.batch_tokens, state.raw_model.flops_per_token()),
    }
    while True:
        yield {"ms/step": time_steps(state, batch, n_steps)}


def compare(bench: Bench, name: str, *flag_sets: dict) -> list[dict]:
    """Measure configurations, interleaved, and return a row for each.

    name: of the last one; its `ratios` are the speedups over the first, measurement by measurement.
    """
    cases = [partial(step_case, replace(bench.cfg, **flags)) for flags in flag_sets]
    rows = []
    for measured in measure(cases, bench.repeats):
        # Keys in the order of the table's columns
        columns = ("ms/step", "tokens/s", "speedup vs last kept", "cumulative speedup")
        row = {"Config": name} | dict.fromkeys(columns) | measured
        rows.append(row)
        if "note" not in row:
            batch_tokens, _ = row["sizes"]
            row["tokens/s"] = 1000 * batch_tokens / row["ms/step"]
    first, last = rows[0], rows[-1]
    pairs = zip(first.get("values", []), last.get("values", []))
    last["ratios"] = [a["ms/step"] / b["ms/step"] for a, b in pairs]
    progress(f"{name}: {last.get('note') or last['ms/step']}")
    return rows


def measure_matmul_peak(device: torch.device) -> tuple[float, str]:
    """FLOP/s of large matmuls in the fastest dtype, and its name."""
    dtypes = ("fp32", "bf16")
    if device.type != "cpu":
        dtypes = (faster_dtype("auto", device, n_embd=0),)  # which does not depend on the width
    return max((measure_flops(device, DTYPES[dtype]), dtype) for dtype in dtypes)


def bench_train(bench: Bench) -> dict:
    """Print the ladder. A step that is slower than the last one kept is not kept."""
    bench.forbid_flags(*BASE)
    cfg = bench.cfg
    on_cuda = bench.device.type == "cuda"
    peak, peak_dtype = measure_matmul_peak(bench.device)
    tokens = 8192 if on_cuda else 1024
    micro_batch = bench.micro_batch(cfg.batch_tokens // cfg.seq_len, tokens)
    base = BASE | dict(micro_batch=micro_batch)
    steps = dict(LADDER)
    if not on_cuda:
        del steps["TF32"]

    # Add one flag after the other, each beside the last kept configuration
    rows = compare(bench, "fp32 eager", base)
    stack = base
    total_speedup = 1.0
    for name, change in steps.items():
        _, row = compare(bench, f"+ {name}", stack, stack | change)
        rows.append(row)
        speedup = 1.0
        # No ratios: this one failed, or the last kept one did, which it then replaces
        if row["ratios"]:
            speedup = median(row["ratios"])
            row["speedup vs last kept"] = speedup
            row["cumulative speedup"] = total_speedup * speedup
        if "note" in row:
            continue
        if speedup < 1:
            row["note"] = "slower: not kept"
            continue
        total_speedup *= speedup
        stack = stack | change | dict(micro_batch=row["micro_batch"])

    for row in rows:
        if row["tokens/s"]:
            _, flops_per_token = row["sizes"]
            row["MFU (measured matmul peak)"] = row["tokens/s"] * flops_per_token / peak
    note = (
        f"Matmuls reach {peak / 1e12:.3f} TFLOP/s in {peak_dtype}. "
        "Speedup: median ratio of interleaved steps against the last kept configuration; "
        "the cumulative column multiplies these ratios."
    )
    print(table("The ladder", rows, note))
    return dict(train=rows, stack=stack, peak_flops=peak)
