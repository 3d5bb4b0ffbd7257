"""`bench.py train`: optimizations added one by one, then the full stack without each of them."""

import contextlib
import dataclasses
import statistics

import torch

from benchmarks.harness import (
    Bench,
    CaseFailed,
    Worker,
    median_min_max,
    progress,
    run_interleaved,
    step_case,
    table,
    timed,
)
from runtime.checks import largest_divisor
from runtime.dtype import hardware_dtype
from runtime.launch import DTYPES
from train_gpt import Config, launch, make_config

# The configuration at the foot of the ladder; `unfused` is the optimizer's loop over parameters
BASE = dict(dtype="fp32", matmul_precision="highest", attn="math", compile="off", unfused=True, loss_chunk=0, fp8=False,
            checkpointing="none")  # fmt: skip
LADDER = (
    ("TF32", dict(matmul_precision="high")),
    ("bf16", dict(dtype="bf16")),
    ("fused attention", dict(attn="sdpa")),
    ("compile", dict(compile="default")),
    ("blockwise attention (compiled)", dict(attn="blocked")),
    ("fused optimizer", dict(unfused=False)),
    ("chunked loss", dict(loss_chunk=Config.loss_chunk)),
    ("max-autotune", dict(compile="max-autotune")),
    ("fp8", dict(fp8=True)),
    ("selective checkpointing", dict(checkpointing="selective")),
    ("full checkpointing", dict(checkpointing="full")),
    ("auto micro-batch", dict(micro_batch=0)),
)


def unsupported_reason(change: dict, device: torch.device) -> str:
    """Why this hardware cannot do what a rung of the ladder asks for; "" when the trainer's own checks will tell."""
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


class Ladder:
    """Climbs rung by rung: a rung that is faster, interleaved with the last kept configuration, is kept in turn."""

    def __init__(self, bench: Bench, exits: contextlib.ExitStack):
        cfg, tokens = make_config(**bench.flags), 8192 if bench.device.type == "cuda" else 1024
        micro_batch = cfg.micro_batch or largest_divisor(cfg.batch_tokens // cfg.seq_len, tokens // cfg.seq_len)
        self.bench, self.exits = bench, exits
        self.base = {"micro_batch": micro_batch, **BASE}
        self.stack = dict(self.base)  # the last kept configuration ...
        self.worker, self.row = None, {}  # ... with its process and its row, once there is one
        self.kept = {}  # rung -> the values that it replaced
        self.rows, self.without = [], []
        self.matmuls = exits.enter_context(Worker(bench, matmul_case, bench.flags))
        self.peaks = self.matmuls.request()  # dtype -> FLOP/s, the best during the run

    @property
    def matmul_peak(self) -> tuple[float, str]:
        """FLOP/s of matmuls in the dtype that is best at them, and that dtype; 0 and "" when none could be measured."""
        return max(((flops, name) for name, flops in self.peaks.items()), default=(0.0, ""))

    def start(self, values: dict) -> Worker:
        values = {**self.bench.flags, **values}
        unfused = values.pop("unfused")
        return self.exits.enter_context(Worker(self.bench, step_case, values, unfused))

    def measure_matmuls(self) -> None:
        try:
            self.peaks = self.matmuls.request()
        except CaseFailed as error:
            progress(f"matmuls: {error}")

    def measure(self, row: dict, values: dict) -> tuple[Worker | None, list[float]]:
        """Fill in the row by steps with these values, interleaved with those of the last kept configuration.

        Returns the worker (None, and a note in the row, if it failed), and the seconds of the last kept steps.
        """
        for attempt in (1, 2):
            worker = self.start(values)
            try:
                facts = worker.request()
                *kept, ours = run_interleaved([self.worker, worker] if self.worker else [worker], self.bench.repeats)
                row |= facts | dict(seconds=ours)
                return worker, kept[0] if kept else []
            except CaseFailed as error:
                worker.close()
                if error.worker is not self.worker or attempt == 2:
                    row["note"] = str(error)
                    break
                progress(f"the last kept configuration: {error}; once more")
                self.worker.close()
                self.worker = self.start(self.stack)
                self.worker.request()
        progress(f"{row['name']}: {row['note']}")
        return None, []

    def climb(self) -> None:
        """Fill `rows`: the base, then every rung."""
        for name, change in (("fp32 eager", {}), *LADDER):
            row = dict(name=f"+ {name}" if change else name)
            self.rows.append(row)
            if reason := unsupported_reason(change, self.bench.device):
                row["note"] = reason
            else:
                self.try_rung(name, change, row)

    def try_rung(self, name: str, change: dict, row: dict) -> None:
        """Measure the stack with this change; keep it if it is not slower."""
        worker, kept_seconds = self.measure(row, self.stack | change)
        if not worker:
            return
        row["vs_first"] = None if change else 1.0
        if self.worker:
            self.row["seconds"] += kept_seconds
            row["vs_above"] = statistics.median(a / b for a, b in zip(kept_seconds, row["seconds"]))
            row["vs_first"] = self.row["vs_first"] and self.row["vs_first"] * row["vs_above"]
        progress(f"{row['name']}: {1000 * statistics.median(row['seconds']):.1f} ms")
        if row.get("vs_above", 1) < 1:
            row["note"] = "slower: not kept"
            worker.close()
            return
        if change:
            self.kept[name] = {key: self.stack[key] for key in change}
            self.stack |= change | dict(micro_batch=row["micro_batch"])
        if self.worker:
            self.worker.close()
        self.worker, self.row = worker, row
        self.measure_matmuls()

    def leave_one_out(self) -> None:
        """Fill `without`: the base, then the full stack without each rung that was kept, interleaved with all of it."""
        for name in ("all of them", *self.kept) if self.kept else ():
            row = dict(name=f"without {name}")
            self.without.append(row)
            values = self.base if name == "all of them" else self.stack | self.kept[name]
            worker, full = self.measure(row, values)
            if not worker:
                continue
            worker.close()
            row |= median_min_max([1000 * s for s in full], "full_ms")
            row |= median_min_max([b / a for a, b in zip(full, row["seconds"])], "worth")
            progress(f"{row['name']}: {row['worth']:.2f} times slower")
            self.measure_matmuls()

    def summarize(self) -> None:
        """Turn the seconds of every row into its figures."""
        for row in self.rows + self.without:
            if seconds := row.pop("seconds", None):
                row |= median_min_max([1000 * s for s in seconds], "ms")
                row["tokens_per_s"] = 1000 * row["tokens"] / row["ms"]
                row["flops_per_s"] = 1000 * row["flops"] / row["ms"]
                row["of_peak"] = row["flops_per_s"] / self.matmul_peak[0] if self.peaks else None
                row["mfu"] = row["datasheet_flops"] and row["flops_per_s"] / row["datasheet_flops"]


def report(ladder: Ladder) -> None:
    """Print both tables."""
    shape = {"name": ("Config", ""), "ms": ("ms/step", ",.1f"), "tokens_per_s": ("tokens/s", ",.0f")}
    end = {"peak_mb": ("peak MiB", ",.0f"), "setup_s": ("startup, s", ".1f"), "note": ("", "")}
    climb = {
        "vs_above": ("speedup vs last kept", ".2f"), "vs_first": ("cumulative speedup", ".2f"),
        "mfu": ("MFU (datasheet)", ".1%"), "of_peak": ("MFU (measured matmul peak)", ".1%"),
        "micro_batch": ("micro_batch", "d"),
    }  # fmt: skip
    limit, (peak, name) = ladder.bench.limit_mb, ladder.matmul_peak
    others = "".join(f", {flops / 1e12:.3f} in {other}" for other, flops in ladder.peaks.items() if other != name)
    note = (
        f"Matmuls reach {peak / 1e12:.3f} TFLOP/s in {name}{others} in the same run. Speedup: "
        "median ratio of interleaved steps against the last kept configuration; the cumulative column multiplies these "
        "ratios." + (f" A case may use {limit:,} MiB." if limit else "")
    )
    print(table("The ladder", ladder.rows, shape | climb | end, (note,)))
    without = {"full_ms": ("full stack (interleaved), ms/step", ",.1f"), "worth": ("slowdown", ".2f")}
    print(table("The full stack without one", ladder.without, shape | without | end))


def bench_train(bench: Bench) -> dict:
    """The ladder, and the full stack without each optimization."""
    bench.reject_flags(*BASE, "bf16")
    if bench.device.type == "cuda" and not bench.limit_mb:  # two cases share the card while they are compared
        total = torch.cuda.get_device_properties(bench.device).total_memory
        bench = dataclasses.replace(bench, limit_mb=int(0.45 * total / 2**20))
    with contextlib.ExitStack() as exits:
        ladder = Ladder(bench, exits)
        ladder.climb()
        ladder.leave_one_out()
    ladder.summarize()
    report(ladder)
    flops, name = ladder.matmul_peak
    return dict(ladder=ladder.rows, without=ladder.without, product_flops=flops, product_dtype=name, stack=ladder.stack)
