"""`bench.py train`: systems flags added one by one, then the full stack without each of them."""

import math
import statistics
import time

import torch

from benchmarks.harness import Bench, build_state, measure, median_min_max, progress, table, timed
from common import largest_divisor
from runtime.device import DTYPES, hardware_dtype, matmul_flops, peak_memory_mb, select_device
from train_gpt import Config, make_config, train_step

# The flags at the foot of the ladder
BASE = dict(
    dtype="fp32", matmul_precision="highest", attn="math", compile="off", loss_chunk=0, fp8=False
)
BASE |= dict(checkpointing="none")
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


def step_case(flags: dict):
    """Yields what was set up, with the losses of three steps; then the seconds of a step."""
    began = time.perf_counter()
    if (
        select_device(flags.get("device", "auto")).type == "cuda"
    ):  # two cases share the card while they are compared
        torch.cuda.set_per_process_memory_fraction(0.45)
    state, _, batch = build_state(flags)
    device = state.dist_ctx.device
    losses = [train_step(state, batch, 0.0)[0].item() for _ in range(3)]
    steps = max(1, math.ceil(0.2 / timed(device, lambda: train_step(state, batch, 0.0))[0]))
    facts = {"micro_batch": state.micro_batch, "peak MiB": peak_memory_mb(device)}
    facts |= {"startup, s": time.perf_counter() - began, "losses": losses}
    yield facts | dict(sizes=(state.cfg.batch_tokens, state.raw_model.flops_per_token()))
    while True:
        yield (
            timed(device, lambda: [train_step(state, batch, 0.0) for _ in range(steps)])[0] / steps
        )


def compare(bench: Bench, name: str, *configs: dict) -> list[dict]:
    """Rows of steps with these flags, interleaved, the last of them under this name, its speedups in `ratios`."""
    cases = [(step_case, bench.flags | config) for config in configs]
    order = dict.fromkeys(
        ("ms/step", "tokens/s", "speedup vs last kept", "cumulative speedup")
    )  # of columns
    rows = [{"Config": name} | order | row for row in measure(cases, bench.repeats)]
    for row in rows:
        if "note" not in row:
            row |= median_min_max([1000 * seconds for seconds in row["values"]], "ms/step")
            row["tokens/s"] = 1000 * row["sizes"][0] / row["ms/step"]
    rows[-1]["ratios"] = [
        a / b for a, b in zip(rows[0].get("values", []), rows[-1].get("values", []))
    ]
    progress(f"{name}: {rows[-1].get('note') or rows[-1]['ms/step']}")
    return rows


def bench_train(bench: Bench) -> dict:
    bench.refuse(*BASE, "bf16")
    cfg, device = make_config(**bench.flags), bench.device
    size, tokens = ((4096, 5e11), 8192) if device.type == "cuda" else ((512, 3e9), 1024)
    dtypes = ("fp32", "bf16") if device.type == "cpu" else (hardware_dtype("auto", device),)
    peak, peak_dtype = max((matmul_flops(device, DTYPES[name], *size), name) for name in dtypes)
    micro_batch = cfg.micro_batch or largest_divisor(
        cfg.batch_tokens // cfg.seq_len, tokens // cfg.seq_len
    )
    base = stack = BASE | dict(micro_batch=micro_batch)
    rows, without, replaced, total = compare(bench, "fp32 eager", base), [], {}, 1.0
    for name, change in (
        LADDER.items() if device.type == "cuda" else [*LADDER.items()][1:]
    ):  # which TF32 is for
        _, row = compare(bench, f"+ {name}", stack, stack | change)
        rows.append(row)
        if row[
            "ratios"
        ]:  # else the kept one has failed, as when memory runs out, and this one takes over
            row["speedup vs last kept"] = statistics.median(row["ratios"])
            row["cumulative speedup"] = total * row["speedup vs last kept"]
        if "note" not in row and (row["speedup vs last kept"] or 1.0) < 1:
            row["note"] = "slower: not kept"
        elif "note" not in row:
            replaced[name], total = (
                {key: stack[key] for key in change},
                row["cumulative speedup"] or total,
            )
            stack = stack | change | dict(micro_batch=row["micro_batch"])
    for name, change in {"all of them": base, **replaced}.items() if replaced else ():
        full, row = compare(bench, f"without {name}", stack, stack | change)
        without.append(row)
        if row["ratios"]:
            row |= median_min_max(
                [1000 * s for s in full["values"]], "full stack (interleaved), ms/step"
            )
            row |= median_min_max([1 / ratio for ratio in row["ratios"]], "slowdown")
    for row in rows:
        if row["tokens/s"]:
            row["MFU (measured matmul peak)"] = row["tokens/s"] * row["sizes"][1] / peak
    note = f"Matmuls reach {peak / 1e12:.3f} TFLOP/s in {peak_dtype}. Speedup: median ratio of interleaved steps "
    note += "against the last kept configuration; the cumulative column multiplies these ratios."
    print(table("The ladder", rows, note))
    print(table("The full stack without one", without))
    return dict(train=rows, without=without, stack=stack, peak_flops=peak)
