"""`bench.py profile`: the time of a step in six categories, and the trace."""

import re
import tempfile
from pathlib import Path
from statistics import median

import torch

from benchmarks.harness import Bench, build_state, table, time_steps

# Category -> pattern for the lower-case name of an operation or kernel; the first match applies
CATEGORIES = {
    # The compiler's kernels and graphs, named after all their operations; not its templates
    "elementwise": r"triton_(?!tem_)\w*fused|cpp_fused|compiledfxgraph",
    "communication": r"nccl|gloo|c10d|all_?reduce|all_?gather|reduce_?scatter|all_?to_?all",
    "attention": r"attention|flash|fmha|cudnn_sdpa|varlen",
    "matmuls": r"(?<![a-z])((add|b|addb|baddb)?mm|linear)(?![a-z])"
    r"|gemm|gemv|cutlass|nvjet|xmma|cublas",
}
UNATTRIBUTED = "unattributed (CPU overhead, idle)"


def category_of(name: str, op, is_kernel: bool = False) -> str:
    """Return the category of an operation `op`, or of a kernel that it launched.

    UNATTRIBUTED for operations that only contain others.
    """
    while op is not None:
        if op.name.startswith("Optimizer.step"):
            return "optimizer"
        op = op.cpu_parent
    for category, pattern in CATEGORIES.items():
        if re.search(pattern, name.lower()):
            return category
    # PyTorch's operations are called aten::add and the like
    if is_kernel or re.match(r"(?!autograd)\w+::", name):
        return "elementwise"
    return UNATTRIBUTED


def spent_ms(profiler: torch.profiler.profile, on_cpu: bool) -> dict[str, float]:
    """Sum the profiled time by category, in ms."""
    spent = dict.fromkeys((*CATEGORIES, "optimizer", UNATTRIBUTED), 0.0)
    for op in profiler.events():
        if op.device_type != torch.autograd.DeviceType.CPU:
            continue
        for kernel in op.kernels:
            spent[category_of(kernel.name, op, is_kernel=True)] += kernel.duration / 1000
        if on_cpu:
            spent[category_of(op.name, op)] += op.self_cpu_time_total / 1000
    return spent


def bench_profile(bench: Bench) -> list[dict]:
    """Print the time of a step by category."""
    bench.forbid_flags("profile", "minutes")
    state, _, batch = build_state(bench.cfg)
    n_steps = 2 * bench.repeats
    time_steps(state, batch, 3)  # warm-up
    plain_ms = median(time_steps(state, batch, 1) for _ in range(n_steps))
    with torch.profiler.profile(acc_events=True) as profiler:
        profiled_ms = time_steps(state, batch, n_steps)
    trace = str(Path(tempfile.mkdtemp(), "trace.json"))
    profiler.export_chrome_trace(trace)

    # The profiler slows every operation on a CPU, but not the kernels on CUDA
    on_cpu = bench.device.type == "cpu"
    step_ms = profiled_ms if on_cpu else plain_ms
    spent = spent_ms(profiler, on_cpu)
    total_ms = n_steps * step_ms
    spent[UNATTRIBUTED] += total_ms - sum(spent.values())
    rows = []
    for category, ms in spent.items():
        share = 100 * ms / total_ms
        rows.append({"category": category, "ms/step": ms / n_steps, "% of step": share})
    rows.sort(key=lambda row: -row["ms/step"])
    note = (
        f"A step takes {profiled_ms:,.1f} ms under the profiler and {plain_ms:,.1f} ms without. "
        f"Trace for https://ui.perfetto.dev: {trace}"
    )
    print(table("Where a step's time goes", rows, note))
    return rows
