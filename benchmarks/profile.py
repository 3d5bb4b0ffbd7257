"""`bench.py profile`: where a step's time goes, in six lines, and the trace."""

import re
import statistics
import tempfile
from pathlib import Path

import torch

from benchmarks.harness import Bench, build_state, measure, table, timed
from common import RunError
from train_gpt import train_step

# What an operation or kernel belongs to, by words of its name in lower case; the first that fits
CATEGORIES = {
    # The compiler's own kernels and graphs, which have names of all the operations around them; templates are apart
    "elementwise": r"triton_(?!tem_)\w*fused|cpp_fused|compiledfxgraph",
    "communication": r"nccl|gloo|c10d|all_?reduce|all_?gather|reduce_?scatter|all_?to_?all",
    "attention": r"attention|flash|fmha|cudnn_sdpa|varlen",
    "matmuls": r"(?<![a-z])((add|b|addb|baddb)?mm|linear)(?![a-z])|gemm|gemv|cutlass|nvjet|xmma|cublas",
}
UNATTRIBUTED = "unattributed (CPU overhead, idle)"


def category_of(name: str, op, is_kernel: bool = False) -> str:
    """The category of an operation, or of a kernel called from `op`; UNATTRIBUTED for what only contains others."""
    while op is not None:
        if op.name.startswith("Optimizer.step"):
            return "optimizer"
        op = op.cpu_parent
    other = "elementwise" if is_kernel or re.match(r"(?!autograd)\w+::", name) else UNATTRIBUTED
    return next(
        (category for category, words in CATEGORIES.items() if re.search(words, name.lower())),
        other,
    )


def profile_case(flags: dict, steps: int, trace: str):
    """Yields milliseconds of a step by category, and of whole steps with and without profiler; writes the trace."""
    state, _, batch = build_state(flags)
    device, spent = (
        state.dist_ctx.device,
        dict.fromkeys((*CATEGORIES, "optimizer", UNATTRIBUTED), 0.0),
    )
    plain = [timed(device, lambda: train_step(state, batch, 0.0))[0] for _ in range(3 + steps)][3:]
    with torch.profiler.profile(acc_events=True) as profiler:
        seconds, _ = timed(device, lambda: [train_step(state, batch, 0.0) for _ in range(steps)])
    profiler.export_chrome_trace(trace)
    for op in profiler.events():
        if op.device_type == torch.autograd.DeviceType.CPU:
            for kernel in op.kernels:
                spent[category_of(kernel.name, op, True)] += kernel.duration / 1000 / steps
            if device.type == "cpu":
                spent[category_of(op.name, op)] += op.self_cpu_time_total / 1000 / steps
    yield dict(
        spent=spent, plain_ms=1000 * statistics.median(plain), profiled_ms=1000 * seconds / steps
    )


def bench_profile(bench: Bench) -> dict:
    bench.refuse("profile")
    trace = str(Path(tempfile.gettempdir(), "bench-trace.json"))
    (facts,) = measure([(profile_case, bench.flags, 3 if bench.quick else 10, trace)], 0)
    if "note" in facts:
        raise RunError(facts["note"])
    # On CUDA, kernels last as long with the profiler; on a CPU it slows every operation
    spent, step_ms = (
        facts["spent"],
        facts["plain_ms" if bench.device.type == "cuda" else "profiled_ms"],
    )
    spent[UNATTRIBUTED] += step_ms - sum(spent.values())
    rows = [
        {"category": kind, "ms/step": ms, "% of step": 100 * ms / step_ms}
        for kind, ms in spent.items()
    ]
    rows.sort(key=lambda row: -row["ms/step"])
    note = f"A step takes {facts['profiled_ms']:,.1f} ms under the profiler and {facts['plain_ms']:,.1f} ms without. "
    note += f"Trace for https://ui.perfetto.dev: {trace}"
    print(table("Where a step's time goes", rows, note))
    return dict(profile=rows, trace=trace, step_ms=step_ms)
