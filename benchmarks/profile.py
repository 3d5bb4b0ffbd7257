"""`bench.py profile`: where a step's time goes, in six lines, and the trace."""

import os
import re
import statistics
import tempfile
from pathlib import Path

import torch

from benchmarks.harness import Bench, Worker, build_state, table, timed
from train_gpt import train_step

# What an operation or kernel belongs to, by words of its name in lower case; the first that fits
CATEGORIES = {
    "communication": r"nccl|gloo|c10d|all_?reduce|all_?gather|reduce_?scatter|all_?to_?all",
    "attention": r"attention|flash|fmha|cudnn_sdpa|varlen",
    "matmuls": r"(?<![a-z])((add|b|addb|baddb)?mm|linear)(?![a-z])|gemm|gemv|cutlass|nvjet|xmma|cublas",
}
# The compiler's own kernels and graphs: names of all the operations around them, or a hash. Templates (tem) are apart.
FUSED = re.compile(r"triton_(?!tem_)\w*fused|cpp_fused|compiledfxgraph")
UNATTRIBUTED = "unattributed (CPU overhead, idle)"


def category_of(name: str, op) -> str:
    """The category of an operation or kernel called from `op`; "" for an operation that only contains others."""
    parent = op
    while parent is not None:
        if parent.name.startswith("Optimizer.step"):
            return "optimizer"
        parent = parent.cpu_parent
    if FUSED.search(name.lower()):
        return "elementwise"
    for category, words in CATEGORIES.items():
        if re.search(words, name.lower()):
            return category
    return "elementwise" if "::" in name and not name.startswith("autograd::") else ""


def time_by_category(profiler, cuda: bool, steps: int) -> dict[str, float]:
    """Milliseconds of a step by category: of kernels on CUDA, else of operations without those inside them."""
    spent = dict.fromkeys((*CATEGORIES, "elementwise", "optimizer"), 0.0)
    for op in profiler.events():
        if op.device_type != torch.autograd.DeviceType.CPU:
            continue
        pieces = [(k.name, k.duration) for k in op.kernels] if cuda else [(op.name, op.self_cpu_time_total)]
        for name, microseconds in pieces:
            category = category_of(name, op) or ("elementwise" if cuda else "")
            if category:
                spent[category] += microseconds / 1000 / steps
    return spent


def profile_case(flags: dict, steps: int, trace: str):
    """Yields milliseconds of a step by category, and of whole steps with and without profiler; writes the trace.

    Categories are fractions of `step_ms`: on CUDA the step without profiler, as kernels last as long with it; elsewhere
    the profiled step, as the profiler slows every operation.
    """
    state, batch = build_state(flags)
    device = state.dist_ctx.device
    for _ in range(3):
        train_step(state, batch, 1.0)
    plain_ms = 1000 * statistics.median(timed(device, lambda: train_step(state, batch, 1.0)) for _ in range(steps))
    cuda = device.type == "cuda"
    activities = [torch.profiler.ProfilerActivity.CPU] + [torch.profiler.ProfilerActivity.CUDA] * cuda
    with torch.profiler.profile(activities=activities) as profiler:
        profiled_ms = 1000 * timed(device, lambda: [train_step(state, batch, 1.0) for _ in range(steps)]) / steps
    profiler.export_chrome_trace(trace)
    spent, total = time_by_category(profiler, cuda, steps), plain_ms if cuda else profiled_ms
    spent[UNATTRIBUTED] = total - sum(spent.values())
    yield dict(spent=spent, step_ms=total, plain_step_ms=plain_ms, profiled_step_ms=profiled_ms)


def bench_profile(bench: Bench) -> dict:
    """Where a step's time goes."""
    bench.reject_flags("profile")
    trace = Path(tempfile.gettempdir()) / f"bench-trace-{os.getpid()}.json"
    with Worker(bench, profile_case, bench.flags, 3 if bench.quick else 10, str(trace)) as worker:
        facts = worker.request()
    rows = [dict(kind=kind, ms=ms, share=ms / facts["step_ms"]) for kind, ms in facts.pop("spent").items()]
    rows.sort(key=lambda row: -row["ms"])
    whole = "without the profiler" if bench.device.type == "cuda" else "under the profiler"
    note = (
        f"A step takes {facts['profiled_step_ms']:,.1f} ms under the profiler and {facts['plain_step_ms']:,.1f} ms "
        f"without; fractions are of the step {whole}. Trace for https://ui.perfetto.dev: {trace}"
    )
    print(table("Where a step's time goes", rows, "kind ms share".split(), note))
    return dict(profile=rows, trace=str(trace), **facts)
