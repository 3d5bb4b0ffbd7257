"""`bench.py fit`: the largest micro-batch that fits, by bisection, and throughput over micro-batches."""

import dataclasses
import math
import sys

from benchmarks.harness import Bench, CaseFailed, Worker, median_min_max, proc_kib, progress, step_case, table
from data.shards import UserError
from train_gpt import make_config


def memory_limit_mb(bench: Bench) -> int:
    """MiB that a case may use; 0 = all of a CUDA device's. Raises UserError where no memory limit can be found."""
    if bench.limit_mb or bench.device.type == "cuda":
        return bench.limit_mb
    if bench.device.type != "cpu" or sys.platform != "linux":
        raise UserError("fit cannot limit memory here: it needs CUDA, or Linux for a CPU; use another machine")
    if bench.quick:
        return 1024
    return proc_kib("/proc/meminfo", "MemAvailable") // 1024 * 3 // 4  # a search must not make the system swap


def bench_fit(bench: Bench) -> dict:
    """The largest micro-batch by bisection, and throughput over micro-batches.

    Raises CaseFailed for what is not a lack of memory.
    """
    bench.reject_flags("micro_batch", "batch_tokens", "parallel")
    flags = dict(checkpointing="none") | bench.flags  # auto would change between sizes
    bench = dataclasses.replace(bench, limit_mb=memory_limit_mb(bench), flags=flags)
    seq_len, rows = make_config(**flags).seq_len, {}

    def fits(micro_batch: int) -> bool:
        row = rows[micro_batch] = dict(micro_batch=micro_batch, tokens=micro_batch * seq_len, fits=True)
        with Worker(bench, step_case, flags | dict(micro_batch=micro_batch, batch_tokens=row["tokens"])) as worker:
            try:
                row |= worker.request()
                row |= median_min_max([1000 * worker.request() for _ in range(bench.repeats)], "ms")
                row["tokens_per_s"] = 1000 * row["tokens"] / row["ms"]
                progress(f"micro_batch {micro_batch}: {row['tokens_per_s']:,.0f} tokens/s")
            except CaseFailed as error:
                if not str(error).startswith("out of memory"):
                    raise
                row |= dict(fits=False, note=str(error))
                progress(f"micro_batch {micro_batch}: {error}")
        return row["fits"]

    low, high = 0, 1
    while fits(high):
        low, high = high, 2 * high
    while high - low > max(1, low // 16):
        middle = (low + high) // 2
        if fits(middle):
            low = middle
        else:
            high = middle
    ordered = [rows[m] for m in sorted(rows)]
    best = max((row["tokens_per_s"] for row in ordered if row["fits"]), default=math.nan)
    for row in ordered:
        row["of_best"] = row["tokens_per_s"] / best if row["fits"] else None
    allowed = f"{bench.limit_mb:,} MiB more than at the start" if bench.limit_mb else "all of the device's memory"
    note = f"Largest that fits: {low} (within a sixteenth), allowed {allowed}; one micro-batch a step."
    print(table("Batch size", ordered, "micro_batch tokens ms tokens_per_s of_best peak_mb note".split(), note))
    return dict(fit=ordered, largest=low, limit_mb=bench.limit_mb)
