"""`bench.py fit`: the largest micro-batch that fits, by bisection, and throughput over micro-batches."""

import dataclasses
import math
import sys
from pathlib import Path

from benchmarks.harness import Bench, CaseFailed, Worker, median_min_max, progress, run_interleaved, step_case, table
from data.shards import UserError
from train_gpt import make_config


def free_memory_mb() -> int:
    """MiB of main memory that are available without swapping."""
    lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    return int(lines["MemAvailable"].split()[0]) // 1024


def memory_limit_mb(bench: Bench) -> int:
    """MiB that a case may use; 0 = all of a CUDA device's. Raises UserError where memory has no end to find."""
    if bench.limit_mb or bench.device.type == "cuda":
        return bench.limit_mb
    if bench.device.type != "cpu" or sys.platform != "linux":
        raise UserError("fit finds no end of memory here: it needs CUDA, or Linux for a CPU; use another machine")
    return 1024 if bench.quick else free_memory_mb() * 3 // 4  # a system that swaps is no place to search


def measure_micro_batch(bench: Bench, micro_batch: int) -> dict:
    """The row of one micro-batch, `fits` included. Raises CaseFailed for what is not a lack of memory."""
    tokens = micro_batch * make_config(**bench.flags).seq_len
    row = dict(micro_batch=micro_batch, tokens=tokens)
    with Worker(bench, step_case, {**bench.flags, "micro_batch": micro_batch, "batch_tokens": tokens}) as worker:
        try:
            row |= worker.request()
            row |= median_min_max([1000 * s for s in run_interleaved([worker], bench.repeats)[0]], "ms")
            row["tokens_per_s"] = 1000 * row["tokens"] / row["ms"]
        except CaseFailed as error:
            row["note"] = str(error)
            if not row["note"].startswith("out of memory"):
                raise
    row["fits"] = "note" not in row
    said = f"{row['tokens_per_s']:,.0f} tokens/s" if row["fits"] else row["note"]
    progress(f"micro_batch {micro_batch}: {said}")
    return row


def bench_fit(bench: Bench) -> dict:
    """The largest micro-batch by bisection, and throughput over micro-batches."""
    bench.reject_flags("micro_batch", "batch_tokens", "parallel")
    flags = dict(checkpointing="none") | bench.flags  # auto would change in between
    bench = dataclasses.replace(bench, limit_mb=memory_limit_mb(bench), flags=flags)
    rows = {}

    def fits(micro_batch: int) -> bool:
        rows[micro_batch] = measure_micro_batch(bench, micro_batch)
        return rows[micro_batch]["fits"]

    low, high = 0, 1
    while fits(high):
        low, high = high, 2 * high
    while high - low > max(1, low // 16):
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    ordered = [rows[m] for m in sorted(rows)]
    best = max((row["tokens_per_s"] for row in ordered if row["fits"]), default=math.nan)
    for row in ordered:
        row["of_best"] = row["tokens_per_s"] / best if row["fits"] else None
    columns = {
        "micro_batch": ("micro_batch", "d"), "tokens": ("tokens", ",d"), "ms": ("ms/step", ",.1f"),
        "tokens_per_s": ("tokens/s", ",.0f"), "of_best": ("fraction of best", ".0%"),
        "peak_mb": ("peak MiB", ",.0f"), "note": ("", ""),
    }  # fmt: skip
    allowed = f"{bench.limit_mb:,} MiB more than at the start" if bench.limit_mb else "all of the device's memory"
    note = f"Largest that fits: {low} (within a sixteenth), allowed {allowed}; one micro-batch a step."
    print(table("Batch size", ordered, columns, (note,)))
    return dict(fit=ordered, largest=low, limit_mb=bench.limit_mb)
