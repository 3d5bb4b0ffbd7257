"""`bench.py profile`: where a step's time goes, in six lines, and the trace."""

import re
import tempfile
from functools import partial
from pathlib import Path
from statistics import median

import torch

from benchmarks.harness import Bench, build_state, measure, table, time_steps
from common import RunError
from train_gpt import Config

# What an operation or kernel belongs to, by words of its name in lower case; the first that fits
CATEGORIES = {
    # The compiler's kernels and graphs, named after all the operations in them; not its templates
    "elementwise": r"triton_(?!tem_)\w*fused|cpp_fused|compiledfxgraph",
    "communication": r"nccl|gloo|c10d|all_?reduce|all_?gather|reduce_?scatter|all_?to_?all",
    "attention": r"attention|flash|fmha|cudnn_sdpa|varlen",
    "matmuls": r"(?<![a-z])((add|b|addb|baddb)?mm|linear)(?![a-z])"
    r"|gemm|gemv|cutlass|nvjet|xmma|cublas",
}
UNATTRIBUTED = "unattributed (CPU overhead, idle)"


def category_of(name: str, op, is_kernel: bool = False) -> str:
    """The category of an operation `op`, or of a kernel that it started.

    UNATTRIBUTED for what only contains other operations.
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


def profile_case(cfg: Config, n_steps: int, trace: str):
    """Write the trace; yield the ms of a step by category, and with and without the profiler."""
    state, _, batch = build_state(cfg)
    device = state.dist_ctx.device
    time_steps(state, batch, 3)  # warm-up
    plain_ms = [time_steps(state, batch, 1) for _ in range(n_steps)]
    with torch.profiler.profile(acc_events=True) as profiler:
        profiled_ms = time_steps(state, batch, n_steps)
    profiler.export_chrome_trace(trace)

    spent_us = dict.fromkeys((*CATEGORIES, "optimizer", UNATTRIBUTED), 0.0)
    for op in profiler.events():
        if op.device_type != torch.autograd.DeviceType.CPU:
            continue
        for kernel in op.kernels:
            spent_us[category_of(kernel.name, op, is_kernel=True)] += kernel.duration
        if device.type == "cpu":
            spent_us[category_of(op.name, op)] += op.self_cpu_time_total
    yield dict(
        spent={category: us / 1000 / n_steps for category, us in spent_us.items()},
        plain_ms=median(plain_ms),
        profiled_ms=profiled_ms,
    )


def bench_profile(bench: Bench) -> dict:
    """Print the time of a step by category."""
    bench.forbid_flags("profile")
    n_steps = 3 if bench.quick else 10
    trace = str(Path(tempfile.mkdtemp(), "trace.json"))
    (facts,) = measure([partial(profile_case, bench.cfg, n_steps, trace)], 0)
    if "note" in facts:
        raise RunError(facts["note"])
    # The profiler slows every operation on a CPU, but no kernel on CUDA
    step_ms = facts["profiled_ms"]
    if bench.device.type == "cuda":
        step_ms = facts["plain_ms"]
    spent = facts["spent"]
    spent[UNATTRIBUTED] += step_ms - sum(spent.values())
    rows = []
    for category, ms in spent.items():
        rows.append({"category": category, "ms/step": ms, "% of step": 100 * ms / step_ms})
    rows.sort(key=lambda row: -row["ms/step"])
    note = (
        f"A step takes {facts['profiled_ms']:,.1f} ms under the profiler "
        f"and {facts['plain_ms']:,.1f} ms without. "
        f"Trace for https://ui.perfetto.dev: {trace}"
    )
    print(table("Where a step's time goes", rows, note))
    return dict(profile=rows, trace=trace, step_ms=step_ms)
