"""`bench.py train`: optimizations added one by one, then the full stack without each of them."""

import dataclasses
import statistics

import torch

from benchmarks.harness import Bench, measure_interleaved, median_min_max, progress, step_case, table, timed
from runtime.derived import largest_divisor
from runtime.dtype import hardware_dtype
from runtime.launch import DTYPES
from runtime.start import launch
from train_gpt import Config, make_config

# The configuration at the foot of the ladder; `unfused` is the optimizer's loop over parameters
BASE = {
    "dtype": "fp32",
    "matmul_precision": "highest",
    "attn": "math",
    "compile": "off",
    "unfused": True,
    "loss_chunk": 0,
    "fp8": False,
    "checkpointing": "none",
}
LADDER = (
    ("TF32", dict(matmul_precision="high")),
    ("bf16", dict(dtype="bf16")),
    ("fused attention", dict(attn="sdpa")),
    ("compile", dict(compile="default")),
    ("blockwise attention (compiled)", dict(attn="blocked")),
    ("fused optimizer", dict(unfused=False)),
    ("chunked loss", dict(loss_chunk=Config.loss_chunk)),
    ("auto micro-batch", dict(micro_batch=0)),  # with 8,192 tokens, a GPU's step would measure the host
    ("max-autotune", dict(compile="max-autotune")),
    ("fp8", dict(fp8=True)),
    ("selective checkpointing", dict(checkpointing="selective")),
    ("full checkpointing", dict(checkpointing="full")),
)


def unsupported_reason(change: dict, device: torch.device) -> str:
    """Why this hardware cannot run a step of the ladder; "" if it can, or if the trainer's own checks will tell."""
    cuda = device.type == "cuda"
    if change.get("matmul_precision") == "high" and not (cuda and torch.cuda.get_device_capability() >= (8, 0)):
        return "TF32 needs a CUDA device of compute capability 8.0 or newer"
    if change.get("attn") == "blocked" and cuda:
        return "PyTorch's own kernels are the faster ones on CUDA"
    if change.get("dtype") == "bf16" and cuda and hardware_dtype("auto", device) != "bf16":
        return "this GPU has no bf16 matmuls; PyTorch would emulate them"
    return ""


def matmul_flops(n: int, dtype: torch.dtype, device: torch.device) -> float:
    """FLOP/s of the matmul of two n x n matrices, the best of four."""
    a, b = (torch.randn(n, n, device=device).to(dtype) for _ in range(2))
    out = a @ b
    return 2 * n**3 / min(timed(device, lambda: torch.mm(a, b, out=out)) for _ in range(4))


def matmul_case(flags: dict, sizes: tuple = ()):
    """Yields {}; then the FLOP/s of matmuls by dtype, the best so far, at the best size.

    On a CPU in fp32 and bf16, elsewhere in what --dtype auto is.
    """
    device = launch(make_config(**flags)).device
    sizes = sizes or ((4096, 8192) if device.type == "cuda" else (1024, 2048))
    best = dict.fromkeys(("fp32", "bf16") if device.type == "cpu" else (hardware_dtype("auto", device),), 0.0)
    yield {}
    while True:
        for n in sizes:
            near = [name for name in best if best[name] >= max(best.values()) / 2]  # an emulated dtype takes minutes
            best |= {name: max(best[name], matmul_flops(n, DTYPES[name], device)) for name in near}
        if device.type == "cuda":
            torch.cuda.empty_cache()
        yield best


def measure_matmuls(bench: Bench, peaks: dict[str, float]) -> None:
    """Raise the FLOP/s of each dtype to what matmuls reach now."""
    facts = {}
    (rounds,) = measure_interleaved(bench, [facts], [(matmul_case, bench.flags)], bench.repeats)
    if "note" in facts:
        progress(f"matmuls: {facts['note']}")
    for name, flops in rounds[-1].items() if rounds else ():
        peaks[name] = max(peaks.get(name, 0.0), flops)


def compare(bench: Bench, stack: dict | None, values: dict, row: dict) -> list[float]:
    """Fill in the row by timing steps with `values`, interleaved with steps of the stack, whose seconds are returned.

    If stack is None, the row's steps are timed alone.
    """
    cases = []
    for config in (stack, values) if stack else (values,):
        flags = {**bench.flags, **config}
        unfused = flags.pop("unfused")
        cases.append((step_case, flags, unfused))
    for _ in range(2):  # when memory runs out, the system may kill the stack's process instead: once more
        facts = [{} for _ in cases]
        seconds = measure_interleaved(bench, facts, cases, bench.repeats)
        if stack is None or "note" not in facts[0]:
            break
        progress(f"the last kept configuration: {facts[0]['note']}")
        facts[-1]["note"] = facts[0]["note"]
    row |= facts[-1]
    if "note" not in row:
        row["seconds"] = seconds[-1]
    progress(f"{row['name']}: " + row.get("note", f"{1000 * statistics.median(seconds[-1] or [0]):.1f} ms"))
    return seconds[0]


def climb(bench: Bench, base: dict) -> tuple[list[dict], dict, dict]:
    """Rows of the base and of every ladder step; the stack of kept steps; kept step -> the values that it replaced."""
    rows, stack, replaced, last = [], dict(base), {}, None
    for name, change in (("fp32 eager", {}), *LADDER):
        row = dict(name=f"+ {name}" if change else name)
        rows.append(row)
        if reason := unsupported_reason(change, bench.device):
            row["note"] = reason
            continue
        above = compare(bench, last and stack, stack | change, row)
        if "note" in row:
            continue
        row["vs_first"] = None if change else 1.0
        if last:
            last["seconds"] += above
            row["vs_above"] = statistics.median(a / b for a, b in zip(above, row["seconds"]))
            row["vs_first"] = last["vs_first"] and last["vs_first"] * row["vs_above"]
        if row.get("vs_above", 1) < 1:
            row["note"] = "slower: not kept"
            continue
        if change:
            replaced[name] = {key: stack[key] for key in change}
            stack |= change | dict(micro_batch=row["micro_batch"])
        last = row
    return rows, stack, replaced


def leave_one_out(bench: Bench, base: dict, stack: dict, replaced: dict) -> list[dict]:
    """Rows of the base, then of the full stack without each step that was kept, interleaved with the full stack."""
    rows = []
    for name in ("all of them", *replaced) if replaced else ():
        row = dict(name=f"without {name}")
        rows.append(row)
        full = compare(bench, stack, base if name == "all of them" else stack | replaced[name], row)
        if "note" not in row:
            row |= median_min_max([1000 * s for s in full], "full_ms")
            row |= median_min_max([b / a for a, b in zip(full, row["seconds"])], "worth")
    return rows


def summarize(row: dict, peak: float) -> None:
    """Turn the seconds of a row into its figures. peak: FLOP/s of matmuls, 0 if not known."""
    if seconds := row.pop("seconds", None):
        row |= median_min_max([1000 * s for s in seconds], "ms")
        row["tokens_per_s"] = 1000 * row["tokens"] / row["ms"]
        row["flops_per_s"] = 1000 * row["flops"] / row["ms"]
        row["of_peak"] = row["flops_per_s"] / peak if peak else None
        row["mfu"] = row["datasheet_flops"] and row["flops_per_s"] / row["datasheet_flops"]


def bench_train(bench: Bench) -> dict:
    """The ladder, and the full stack without each optimization."""
    bench.reject_flags(*BASE, "bf16")
    if bench.device.type == "cuda" and not bench.limit_mb:  # two cases share the card while they are compared
        total = torch.cuda.get_device_properties(bench.device).total_memory
        bench = dataclasses.replace(bench, limit_mb=int(0.45 * total / 2**20))
    cfg, tokens = make_config(**bench.flags), 8192 if bench.device.type == "cuda" else 1024
    micro_batch = cfg.micro_batch or largest_divisor(cfg.batch_tokens // cfg.seq_len, tokens // cfg.seq_len)
    base, peaks = BASE | dict(micro_batch=micro_batch), {}
    measure_matmuls(bench, peaks)
    rows, stack, replaced = climb(bench, base)
    without = leave_one_out(bench, base, stack, replaced)
    measure_matmuls(bench, peaks)  # again: a busy machine may slow either
    peak, best = max(((flops, name) for name, flops in peaks.items()), default=(0.0, ""))
    for row in rows + without:
        summarize(row, peak)
    others = "".join(f", {flops / 1e12:.3f} in {name}" for name, flops in peaks.items() if name != best)
    note = (
        f"Matmuls reach {peak / 1e12:.3f} TFLOP/s in {best}{others} in the same run. Speedup: median ratio of "
        "interleaved steps against the last kept configuration; the cumulative column multiplies these ratios."
    )
    if bench.limit_mb:
        note += f" A case may use {bench.limit_mb:,} MiB."
    keys = "name ms tokens_per_s vs_above vs_first mfu of_peak micro_batch peak_mb setup_s note".split()
    print(table("The ladder", rows, keys, note))
    keys = "name ms tokens_per_s full_ms worth peak_mb setup_s note".split()
    print(table("The full stack without one", without, keys))
    return dict(ladder=rows, without=without, product_flops=peak, product_dtype=best, stack=stack)
