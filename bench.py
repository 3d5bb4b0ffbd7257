"""Measure what each optimization is worth on this machine: `python bench.py [SUBCOMMAND] [--quick] [trainer flags]`

train      (the default) the ladder: optimizations added one by one; then the full stack without each of them
loss       time to a validation loss: AdamW against Muon and each switch of the recipe, several seeds
attention  every attention backend and the textbooks' explicit softmax, forward and backward, over context lengths
fit        the largest micro-batch that fits, by bisection, and throughput over batch sizes
memory     weights, gradients, optimizer state and activations: by formula and measured, per checkpointing mode
data       what the loader can deliver, its share of a step, prefetch depth, pinned memory
infer      prefill and decode, with and without a KV cache, eager and compiled
scaling    1, 2, 4, ... ranks by torchrun (or the ranks that torchrun started this with): weak and strong scaling
profile    where a step's time goes, in six lines, and the trace
record DIR whether a folder of records/ keeps the rules of its track, with mean, deviation and p-value

A step is the trainer's own train_step on dummy tokens. Every case has a process of its own; what is compared is run in
turn (A B A B) after an untimed warm-up, with the device synchronised; figures are medians, with the least and the most.
Flags of train_gpt.py set sizes and everything else that a benchmark does not vary itself.
"""

import argparse
import contextlib
import dataclasses
import functools
import itertools
import json
import math
import multiprocessing
import multiprocessing.connection
import os
import platform
import re
import shlex
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from dataclasses import dataclass
from pathlib import Path

if __name__ == "__main__":  # as in train_gpt.py
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "10000")
    os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")
    os.environ.setdefault("AOT_INDUCTOR_ENABLE_LINE_TABLES", "0")

import torch
import torch.distributed as dist
from torch import Tensor

from data.prepare import UserError, load_meta
from model import GPT, attention, attention_mask, generate, initial_weight
from train_gpt import (
    ALLOCATOR_VARIABLES,
    ATTENTION,
    DTYPES,
    SECTION,
    Config,
    Run,
    attention_kernels,
    build,
    check_compiler,
    check_device,
    config,
    cpu_cores,
    device_name,
    device_of,
    divisors,
    dtype_of,
    finite,
    flops_per_token,
    given_flags,
    launch,
    model_config,
    open_data,
    peak_flops,
    peak_memory_mb,
    prefetched,
    put,
    train,
    train_batch,
    train_step,
)

HERE = Path(__file__).resolve().parent

# ---------------------------------------------------------------------------------------------------------------------
# 1. Cases: generators in processes of their own. What they yield first says what was set up; then one value each time
# they are asked.


@dataclass
class Bench:
    """What the command line asks for."""

    flags: dict  # of the trainer
    quick: bool = False
    repeats: int = 5
    limit_mb: int = 0  # memory that a case may use; 0 is what there is

    def __post_init__(self):
        self.device = device_of(config(**{k: v for k, v in self.flags.items() if k == "device"}))
        if self.device.type == "cuda" and "preset" not in self.flags:
            self.flags = {"preset": "gpt2-small", **(dict(batch_tokens=65536) if self.quick else {}), **self.flags}
        if self.device.type == "cuda" and self.flags.get("alloc_conf"):  # before anything in a case starts CUDA
            os.environ.update(dict.fromkeys(ALLOCATOR_VARIABLES, self.flags["alloc_conf"]))

    def reserve(self, **varied) -> None:
        """Refuse trainer flags that the benchmark varies itself."""
        for name in varied.keys() & self.flags.keys():
            raise UserError(f"--{name} is what this benchmark varies itself; leave it out")


class Failed(Exception):
    """A case that could not be run, in this worker; the text is the reason."""

    def __init__(self, reason: str, worker: "Worker"):
        super().__init__(reason)
        self.worker = worker


class Worker:
    """A case in a process of its own: its memory, its compiler and its end are its own."""

    def __init__(self, bench: Bench, case, *args):
        methods = multiprocessing.get_all_start_methods()
        context = multiprocessing.get_context("forkserver" if "forkserver" in methods else "spawn")
        if "forkserver" in methods:
            context.set_forkserver_preload(["torch", "torch._dynamo"])  # imported once, for all cases
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=serve, args=(theirs, bench, case, args), daemon=True)
        self.process.start()
        theirs.close()
        self.asked = False

    def ask(self, what=None):
        """The next value of the case, which gets `what` from its yield. Raises Failed."""
        try:
            if self.asked:
                self.pipe.send(what)
            self.asked = True
            kind, value = self.pipe.recv()
        except (EOFError, OSError):
            self.process.join()
            code = self.process.exitcode
            reason = "out of memory: killed by the system" if code == -9 else f"FAILED: died with exit code {code}"
            raise Failed(reason, self) from None
        if kind == "failed":
            raise Failed(value, self)
        return value

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.pipe.close()
        self.process.join(10)
        self.process.kill()
        self.process.join()


def serve(pipe, bench: Bench, case, args: tuple) -> None:
    """The life of a worker's process, which ends with that of its parent."""
    threading.Thread(target=end_with_parent, daemon=True).start()
    try:
        limit_memory(bench.limit_mb, bench.device)
        values = case(*args)
        value = next(values)
        while True:
            try:
                pipe.send(("value", value))
                what = pipe.recv()
            except (EOFError, OSError):  # nobody asks any more
                return
            value = values.send(what)
    except KeyboardInterrupt:
        return
    except UserError as error:
        pipe.send(("failed", str(error)))
    except Exception as error:
        text = f"{type(error).__name__}: {error}".splitlines()[0]
        if out_of_memory(text) or isinstance(error, (MemoryError, torch.OutOfMemoryError)):
            pipe.send(("failed", "out of memory"))
        else:
            traceback.print_exc()
            pipe.send(("failed", f"FAILED: {text}"))


def end_with_parent() -> None:
    """Wait for the end of the process that asked for this one, however it ends; then end this one."""
    multiprocessing.connection.wait([multiprocessing.parent_process().sentinel])
    os._exit(1)


def out_of_memory(text: str) -> bool:
    """Whether an error's text says so, in the words of PyTorch, its compiler, CUDA, cuBLAS or the system."""
    words = ("out of memory", "outofmemory", "alloc_failed", "allocate memory", "bad_alloc", "not enough memory",
             "can't start new thread")  # fmt: skip
    return any(word in text.lower() for word in words)


def limit_memory(limit_mb: int, device: torch.device) -> None:
    """Let this process allocate only so much more. Raises UserError where that cannot be done."""
    if not limit_mb:
        return
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, limit_mb * 2**20 / total))
    elif device.type == "cpu" and sys.platform == "linux":
        import resource

        status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
        now = int(status["VmData"].split()[0]) * 1024
        resource.setrlimit(resource.RLIMIT_DATA, (now + limit_mb * 2**20,) * 2)
    else:
        raise UserError(f"memory cannot be limited on {device.type} of this system; leave out --limit_mb")


def in_turn(workers: list[Worker], rounds: int) -> list[list]:
    """What each worker yields in `rounds` rounds of one question each: A B A B ..."""
    values = [[] for _ in workers]
    for _ in range(rounds):
        for worker, kept in zip(workers, values):
            kept.append(worker.ask())
    return values


def spread(values: list[float], name: str) -> dict:
    """Median, least and most, under the names name, name_min, name_max."""
    return {name: statistics.median(values), f"{name}_min": min(values), f"{name}_max": max(values)}


def synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize()


def timed(device: torch.device, function) -> float:
    """Seconds that function() takes, device included."""
    synchronize(device)
    began = time.perf_counter()
    function()
    synchronize(device)
    return time.perf_counter() - began


def allocated(device: torch.device, function) -> tuple[int, int, object]:
    """Bytes that function() leaves allocated while its result lives, its peak beyond those before, and the result."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        result = function()
        return torch.cuda.memory_allocated() - before, torch.cuda.max_memory_allocated() - before, result
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        result = function()
    with tempfile.TemporaryDirectory() as folder:
        profiler.export_chrome_trace(f"{folder}/trace.json")
        events = json.loads(Path(f"{folder}/trace.json").read_text())["traceEvents"]
    events = [(e["ts"], i, e["args"]["Bytes"]) for i, e in enumerate(events) if e["name"] == "[memory]"]
    held = list(itertools.accumulate((more for _, _, more in sorted(events)), initial=0))
    return held[-1], max(held), result


# ---------------------------------------------------------------------------------------------------------------------
# 2. Report


def progress(text: str) -> None:
    print(f"  {time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


def table(title: str, rows: list[dict], columns: dict[str, tuple[str, str]], notes: tuple[str, ...] = ()) -> str:
    """A Markdown table of the rows' keys in `columns` (key -> heading, format); what a row lacks stays blank."""

    def cell(row: dict, key: str, form: str) -> str:
        value = row.get(key)
        if value is None or isinstance(value, float) and not math.isfinite(value):
            return ""
        text = format(value, form)
        if f"{key}_min" in row and row[f"{key}_min"] < row[f"{key}_max"]:
            text += f" ({row[f'{key}_min']:{form}}-{row[f'{key}_max']:{form}})"
        return text.replace("|", "\\|")

    columns = {k: v for k, v in columns.items() if any(cell(row, k, v[1]) for row in rows)}
    lines = [f"### {title}", ""]
    lines.append("| " + " | ".join(heading for heading, _ in columns.values()) + " |")
    lines.append("|" + " --- |" * len(columns))
    lines += ["| " + " | ".join(cell(row, k, form) for k, (_, form) in columns.items()) + " |" for row in rows]
    return "\n".join([*lines, "", *notes]).rstrip() + "\n"


def machine(device: torch.device) -> dict:
    """Device and versions, for the report."""
    return dict(
        device=f"{device.type} ({device_name(device)})", cores=cpu_cores(), threads=torch.get_num_threads(),
        torch=torch.__version__, cuda=torch.version.cuda, python=platform.python_version(),
        platform=platform.platform(), capability=torch.backends.cpu.get_cpu_capability(),
    )  # fmt: skip


# ---------------------------------------------------------------------------------------------------------------------
# 3. The step


def vocabulary(cfg: Config) -> int:
    """Tokens of the data folder's tokenizer; without one, of the tokenizer that goes with the preset."""
    return load_meta(Path(cfg.data))["vocab_size"] if cfg.data else 257 if cfg.preset == "laptop" else 50257


def dummy_windows(cfg: Config, rows: int, device: torch.device) -> Tensor:
    """Random tokens, int64 (rows, seq_len + 1), the same every time."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(vocabulary(cfg), (rows, cfg.seq_len + 1), generator=generator).to(device)


def ready(flags: dict, unfused: bool = False) -> tuple[Run, Tensor]:
    """What train_step takes, for these trainer flags. Raises UserError."""
    cfg = config(**flags)
    run_on = launch(cfg)
    check_device(cfg, run_on.device)
    run = build(cfg, run_on, vocabulary(cfg))
    run.optimizer.fused = not unfused
    for state in run.optimizer.state.values() if unfused else ():
        if "step" in state:
            state["step"] = state["step"].cpu()  # as unfused Adam counts: it would wait for a GPU to read it
    if cfg.attn == "math":  # the textbooks' attention in bf16 multiplies in bf16
        torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(True)
    return run, dummy_windows(cfg, cfg.batch_tokens // cfg.seq_len // run_on.world, run_on.device)


def step_case(flags: dict, unfused: bool = False):
    """Yields what was set up, with the loss of the third step; then the seconds of a step."""
    began = time.perf_counter()
    run, windows = ready(flags, unfused)
    device, cfg = run.on.device, run.cfg
    losses = [train_step(run, windows, 1.0)[0].item() for _ in range(3)]
    once = timed(device, lambda: train_step(run, windows, 1.0))
    steps = max(1, math.ceil(0.2 / once))
    yield dict(
        loss=losses[-1], tokens=cfg.batch_tokens, micro_batch=run.micro_batch, peak_mb=peak_memory_mb(device),
        flops=cfg.batch_tokens * flops_per_token(cfg, run.gpt), setup_s=time.perf_counter() - began,
        attention=attention_kernels(run), datasheet_flops=peak_flops(device, "bf16"),
    )  # fmt: skip
    while True:
        yield timed(device, lambda: [train_step(run, windows, 1.0) for _ in range(steps)]) / steps


def product_flops(n: int, dtype: torch.dtype, device: torch.device) -> float:
    """FLOP/s of the product of two n x n matrices, the best of four."""
    a, b = (torch.randn(n, n, device=device).to(dtype) for _ in range(2))
    out = a @ b
    return 2 * n**3 / min(timed(device, lambda: torch.mm(a, b, out=out)) for _ in range(4))


def product_case(flags: dict):
    """Yields the name of the best dtype; then the FLOP/s of its matrix products, of the best size."""
    device = launch(config(**flags)).device
    name = dtype_of(config(device=device.type), device)
    yield name
    while True:
        best = max(
            product_flops(n, DTYPES[name], device) for n in ((4096, 8192) if device.type == "cuda" else (1024, 2048))
        )
        if device.type == "cuda":
            torch.cuda.empty_cache()
        yield best


BASE = dict(dtype="fp32", matmul_precision="highest", attn="math", compile="off", unfused=True, loss_chunk=0, fp8=False,
            checkpointing="none")  # fmt: skip
LADDER = (
    ("TF32", dict(matmul_precision="high")),
    ("bf16", dict(dtype="bf16")),
    ("fused attention", dict(attn="sdpa")),
    ("compile", dict(compile="default")),
    ("attention for the compiler", dict(attn="blocked")),
    ("fused optimizer", dict(unfused=False)),
    ("chunked loss", dict(loss_chunk=Config.loss_chunk)),
    ("max-autotune", dict(compile="max-autotune")),
    ("fp8", dict(fp8=True)),
    ("selective checkpointing", dict(checkpointing="selective")),
    ("full checkpointing", dict(checkpointing="full")),
    ("fitted batch", dict(micro_batch=0)),
)


def missing(change: dict, device: torch.device) -> str:
    """Why this hardware cannot do what a rung of the ladder asks for; "" when the trainer's own checks will tell."""
    cuda = device.type == "cuda"
    if change.get("matmul_precision") == "high" and not (cuda and torch.cuda.get_device_capability() >= (8, 0)):
        return "TF32 is of CUDA devices from compute capability 8.0 on"
    if change.get("attn") == "blocked" and cuda:
        return "PyTorch's own kernels are the faster ones on CUDA"
    if change.get("dtype") == "bf16" and dtype_of(config(device=device.type), device) != "bf16":
        return "this hardware has no bf16 products; PyTorch would emulate them"
    return ""


def divisor(rows: int, most: int) -> int:
    """The largest divisor of rows that is at most `most`; at least 1."""
    return max(m for m in divisors(rows) if m <= max(1, most))


def bench_train(bench: Bench) -> dict:
    """The ladder, and the full stack without each optimization."""
    bench.reserve(**BASE, bf16=True)
    if bench.device.type == "cuda" and not bench.limit_mb:  # two cases share the card while they are compared
        total = torch.cuda.get_device_properties(bench.device).total_memory
        bench = dataclasses.replace(bench, limit_mb=int(0.45 * total / 2**20))
    cfg, tokens = config(**bench.flags), 8192 if bench.device.type == "cuda" else 1024
    stack = {"micro_batch": cfg.micro_batch or divisor(cfg.batch_tokens // cfg.seq_len, tokens // cfg.seq_len), **BASE}
    first = dict(stack)
    names, taken = [], {}  # rungs that are carried on, and what they replaced
    rows, without, peak, above, carried = [], [], 0.0, None, {}

    def start(values: dict) -> Worker:
        values = {**bench.flags, **values}
        unfused = values.pop("unfused")
        return Worker(bench, step_case, values, unfused)

    def reach() -> float:
        """FLOP/s of matrix products now."""
        try:
            return products.ask()
        except Failed as error:
            progress(f"matrix products: {error}")
            return 0.0

    def measure(row: dict, values: dict) -> tuple[Worker | None, list[float]]:
        """Fill in the row by steps with these values, in turn with those of the stack so far.

        Returns the worker (None, and a note in the row, if it failed), and what the stack took meanwhile.
        """
        nonlocal above
        for attempt in (1, 2):
            worker = exits.enter_context(start(values))
            try:
                facts = worker.ask()
                *theirs, ours = in_turn([above, worker] if above else [worker], bench.repeats)
                row |= facts | dict(seconds=ours)
                return worker, theirs[0] if theirs else []
            except Failed as error:
                worker.__exit__()
                if error.worker is not above or attempt == 2:
                    row["note"] = str(error)
                    break
                progress(f"the stack so far: {error}; once more")
                above.__exit__()
                above = exits.enter_context(start(stack))
                above.ask()
        progress(f"{row['name']}: {row['note']}")
        return None, []

    with contextlib.ExitStack() as exits:
        products = exits.enter_context(Worker(bench, product_case, bench.flags))
        best_dtype = products.ask()
        for name, change in (("fp32 eager", {}), *LADDER):
            row = dict(name=f"+ {name}" if change else name)
            rows.append(row)
            if reason := missing(change, bench.device):
                row["note"] = reason
                continue
            worker, theirs = measure(row, stack | change)
            if not worker:
                continue
            row["vs_first"] = None if change else 1.0
            if above:
                carried["seconds"] += theirs
                row["vs_above"] = statistics.median(a / b for a, b in zip(theirs, row["seconds"]))
                row["vs_first"] = carried["vs_first"] and carried["vs_first"] * row["vs_above"]
            progress(f"{row['name']}: {1000 * statistics.median(row['seconds']):.1f} ms")
            if row.get("vs_above", 1) < 1:
                row["note"] = "slower: not carried on"
                worker.__exit__()
                continue
            if change:
                names.append(name)
                taken[name] = {key: stack[key] for key in change}
                stack |= change | dict(micro_batch=row["micro_batch"])
            if above:
                above.__exit__()
            above, carried = worker, row
            peak = max(peak, reach())
        for name in ("all of them", *names) if names else ():
            row = dict(name=f"without {name}")
            without.append(row)
            worker, full = measure(row, first if name == "all of them" else stack | taken[name])
            if not worker:
                continue
            worker.__exit__()
            row |= spread([1000 * s for s in full], "full_ms")
            row |= spread([b / a for a, b in zip(full, row["seconds"])], "worth")
            progress(f"{row['name']}: {row['worth']:.2f} times slower")
            peak = max(peak, reach())
    for row in rows + without:
        if seconds := row.pop("seconds", None):
            row |= spread([1000 * s for s in seconds], "ms")
            row["tokens_per_s"] = 1000 * row["tokens"] / row["ms"]
            row["flops_per_s"] = 1000 * row["flops"] / row["ms"]
            row["of_peak"] = row["flops_per_s"] / peak if peak else None
            row["mfu"] = row["datasheet_flops"] and row["flops_per_s"] / row["datasheet_flops"]
    shape = {"name": ("Row", ""), "ms": ("ms per step", ",.1f"), "tokens_per_s": ("tokens/s", ",.0f")}
    end = {"peak_mb": ("peak MB", ",.0f"), "setup_s": ("ready after s", ".1f"), "note": ("", "")}
    ladder = {
        "vs_above": ("against the row above", ".2f"), "vs_first": ("against the first", ".2f"),
        "mfu": ("MFU, datasheet", ".1%"), "of_peak": ("MFU, measured peak", ".1%"), "micro_batch": ("micro_batch", "d"),
    }  # fmt: skip
    note = (
        f"Matrix products reach {peak / 1e12:.3f} TFLOP/s in {best_dtype} in the same run. A ratio is the median over "
        "steps taken in turn with the last row that was carried on; those to the first row are products of such ratios."
        + (f" A case may use {bench.limit_mb:,} MB." if bench.limit_mb else "")
    )
    print(table("The ladder", rows, shape | ladder | end, (note,)))
    off = {"full_ms": ("full stack in turn, ms", ",.1f"), "worth": ("times slower", ".2f")}
    print(table("The full stack without one", without, shape | off | end))
    return dict(ladder=rows, without=without, product_flops=peak, product_dtype=best_dtype, stack=stack)


# ---------------------------------------------------------------------------------------------------------------------
# 4. Loss

# Changes to the recipe; the first is the baseline, whose final loss is the target.
RECIPES = {
    "AdamW": dict(optimizer="adamw"),
    "Muon + Adam": {},
    "without weight decay": dict(weight_decay=0.0),
    "without soft-cap": dict(softcap=0.0),
    "without cooldown": dict(cooldown_frac=0.0),
    "with 5 % warm-up": dict(warmup_frac=0.05),
    "with gradients clipped at 1": dict(grad_clip=1.0),
}


def run_case(flags: dict):
    """Yields nothing of interest, then the rows and the summary of whole training runs with the flags asked for."""
    change = yield None
    while True:
        with tempfile.TemporaryDirectory() as folder, open(os.devnull, "w") as quiet:
            with contextlib.redirect_stdout(quiet):
                summary = train(config(**{**flags, **change, "out_dir": folder}))
            rows = [json.loads(line) for line in open(Path(folder) / "metrics.jsonl")]
        change = yield summary, [row for row in rows if "val_loss" in row]


def time_to(rows: list[dict], target: float, key: str) -> float | None:
    """Where the validation loss first reaches the target, between evaluations in a straight line; None if never."""
    for before, row in zip([None, *rows], rows):
        if row["val_loss"] is not None and row["val_loss"] <= target:
            if before is None or before["val_loss"] is None:
                return row[key]
            share = (before["val_loss"] - target) / (before["val_loss"] - row["val_loss"])
            return before[key] + share * (row[key] - before[key])
    return None


def bench_loss(bench: Bench) -> dict:
    """Time to AdamW's final validation loss, for each recipe, over several seeds."""
    varied = {key: 0 for change in RECIPES.values() for key in change}
    bench.reserve(**varied, adam_lr=0, seed=0, trials=0, eval_every=0, out_dir=0, resume=0, target_val_loss=0)
    small = dict(max_steps=150, eval_tokens=32768)
    small |= dict(n_layer=2, max_steps=40, batch_tokens=2048, eval_tokens=8192) if bench.quick else {}
    flags = {**small, **bench.flags}
    steps, seeds = config(**flags).max_steps, 2 if bench.quick else 3
    flags["eval_every"] = max(1, steps // (10 if bench.quick else 20))
    runs = {name: [] for name in RECIPES}
    rows = [dict(name=name) for name in RECIPES]
    for seed in range(seeds):
        for row in rows:
            if "note" in row:
                continue
            with Worker(bench, run_case, flags) as worker:  # a process each: nothing of one run warms the next
                try:
                    worker.ask()
                    summary, evaluations = worker.ask({**RECIPES[row["name"]], "seed": seed})
                except Failed as error:
                    row["note"] = str(error)
                    continue
            if summary["val_loss"] is None:
                row["note"] = f"diverged with seed {seed}"
                continue
            runs[row["name"]].append((summary, evaluations))
            progress(f"seed {seed}, {row['name']}: {summary['val_loss']:.4f} in {summary['train_time_s']:.1f} s")
    losses = {name: [s["val_loss"] for s, _ in done] for name, done in runs.items()}
    baseline = next(iter(RECIPES))
    if not losses[baseline]:
        raise Failed(rows[0]["note"])
    target = statistics.mean(losses[baseline])
    for row in rows:
        done = runs[row["name"]]
        if not done:
            continue
        reached = [(time_to(e, target, "train_time_s"), time_to(e, target, "step")) for _, e in done]
        reached = [pair for pair in reached if pair[0] is not None]
        row |= spread(losses[row["name"]], "val_loss") | dict(seeds=len(done), reached=f"{len(reached)} of {len(done)}")
        row |= spread([s["train_time_s"] for s, _ in done], "train_time_s")
        if 2 * len(reached) > len(done):
            row |= spread([seconds for seconds, _ in reached], "to_target_s")
            row["steps_to_target"] = statistics.median(step for _, step in reached)
    for row in rows:
        if "to_target_s" in row:
            row["times_sooner"] = rows[0]["train_time_s"] / row["to_target_s"]
    columns = {
        "name": ("Recipe", ""), "val_loss": ("final val_loss", ".4f"), "reached": ("seeds that reach it", ""),
        "to_target_s": ("train_time to the target, s", ".1f"), "steps_to_target": ("steps", ".0f"),
        "times_sooner": ("times sooner than AdamW's end", ".2f"), "note": ("", ""),
    }  # fmt: skip
    note = f"Target: {target:.4f}, the mean of {baseline}'s final losses; {steps} steps, {seeds} seeds, in turn."
    print(table("Time to a validation loss", rows, columns, (note,)))
    return dict(loss=rows, target=target, steps=steps)


# ---------------------------------------------------------------------------------------------------------------------
# 5. Attention


def explicit(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """Softmax attention as the textbooks write it; shapes as model.attention."""
    mask = torch.ones(q.size(2), q.size(2), dtype=torch.bool, device=q.device).tril() if mask is None else mask
    scores = q @ k.transpose(-2, -1) / math.sqrt(q.size(-1))
    return scores.masked_fill(~mask, -math.inf).softmax(-1) @ v


@functools.cache
def compiled_attention():
    return torch.compile(attention, dynamic=False)


def attention_once(backend: str, q: Tensor, k: Tensor, v: Tensor, dy: Tensor, idx: Tensor, variant: str):
    """Seconds of one call forward and, where q needs a gradient, backward (else None), making the mask included."""
    synchronize(q.device)
    began = time.perf_counter()
    length = q.size(2)
    window, eot = length // 4 if variant == "window" else 0, 0 if variant == "documents" else None
    mask = attention_mask(backend, idx, length, window, eot)
    if backend == "explicit":
        out = explicit(q, k, v, mask)
    elif backend == "blocked, compiled":
        out = compiled_attention()(q, k, v, mask, "blocked")
    else:
        out = attention(q, k, v, mask, backend)
    synchronize(q.device)
    between = time.perf_counter()
    if not q.requires_grad:
        return between - began, None
    out.backward(dy)
    synchronize(q.device)
    return between - began, time.perf_counter() - between


def attention_case(flags: dict, backend: str):
    """Yields the dtype; for (T, tokens, variant) the most bytes that a call holds; for None its seconds."""
    device = launch(config(**flags)).device
    dtype = DTYPES[dtype_of(config(**flags), device)]
    question = yield str(dtype)
    while True:
        length, tokens, variant = question
        cfg = config(**{**flags, "seq_len": length, "batch_tokens": length, "doc_mask": variant == "documents",
                        "window": "S" if variant == "window" else "L",
                        "attn": backend if backend in ATTENTION else "auto",
                        "compile": "default" if backend == "blocked, compiled" else "off"})  # fmt: skip
        trains = backend != "flex" or device.type == "cuda"
        if trains:
            check_device(cfg, device)
        generator = torch.Generator().manual_seed(0)
        shape = (max(1, tokens // length), length, cfg.n_head, cfg.n_embd // cfg.n_head)
        q, k, v, dy = (torch.randn(shape, generator=generator).to(device, dtype).transpose(1, 2) for _ in range(4))
        q, k, v = (t.requires_grad_(trains) for t in (q, k, v))
        idx = torch.randint(max(2, length // 4), (shape[0], length), generator=generator).to(device)  # 0: a document
        torch._dynamo.reset()  # or FlexAttention runs into the limit of recompilations, and uncompiled from there
        attention_once(backend, q, k, v, dy, idx, variant)  # whatever it compiles is not of the call
        q.grad = k.grad = v.grad = None
        _, peak, _ = allocated(device, lambda call=(backend, q, k, v, dy, idx, variant): attention_once(*call))
        question = yield peak
        while question is None:
            q.grad = k.grad = v.grad = None
            question = yield attention_once(backend, q, k, v, dy, idx, variant)


def bench_attention(bench: Bench) -> dict:
    """Every backend over context lengths, causal, with windows and with documents."""
    bench.reserve(attn=0, compile=0, seq_len=0, window=0, doc_mask=0)
    cuda = bench.device.type == "cuda"
    lengths = (512, 1024, 2048, 4096, 8192, 16384) if cuda else (256, 512, 1024, 2048)
    lengths, tokens = (lengths[:2], 2048) if bench.quick else (lengths, 16384 if cuda else 4096)
    backends = ("explicit", "blocked, compiled", "math", "sdpa", "flash", "efficient", "cudnn", "flex", "varlen")
    rows, workers, cfg = [], {}, config(**bench.flags)

    def ask(row: dict, what=None):
        """The answer of the row's backend; None, and the reason in the row, where it has none."""
        backend = row["backend"]
        try:
            if backend not in workers:
                workers[backend] = exits.enter_context(Worker(bench, attention_case, bench.flags, backend))
                workers[backend].ask()
            return workers[backend].ask(what)
        except Failed as error:
            row["note"] = str(error)
            workers.pop(backend).__exit__()

    with contextlib.ExitStack() as exits:
        for length, variant in itertools.product(lengths, ("causal", "window", "documents")):
            here = [dict(seq_len=length, variant=variant, backend=b, times=[]) for b in backends]
            for row in here:
                row["more_mb"] = (ask(row, (length, tokens, variant)) or math.nan) / 2**20
            for row in [row for _ in range(bench.repeats) for row in here]:
                if "note" not in row:
                    row["times"].append(ask(row))
            for row in here:
                times = row.pop("times")
                if "note" not in row:
                    row |= spread([1000 * forward for forward, _ in times], "forward_ms")
                    if times[0][1] is not None:
                        row |= spread([1000 * backward for _, backward in times], "backward_ms")
                        row["vs_explicit"] = (
                            here[0].get("forward_ms", math.nan) + here[0].get("backward_ms", math.nan)
                        ) / (row["forward_ms"] + row["backward_ms"])
            rows += here
            progress(f"T {length}, {variant}")
    columns = {
        "seq_len": ("T", "d"), "variant": ("mask", ""), "backend": ("backend", ""),
        "forward_ms": ("forward, ms", ".2f"), "backward_ms": ("backward, ms", ".2f"),
        "vs_explicit": ("times faster than explicit", ".2f"), "more_mb": ("MiB more", ",.1f"), "note": ("", ""),
    }  # fmt: skip
    nowhere = {
        b: r["note"] for r in rows if (b := r["backend"]) and all("note" in x for x in rows if x["backend"] == b)
    }
    shown = [row for row in rows if row["backend"] not in nowhere]
    notes = (
        f"{tokens} tokens a call, {cfg.n_head} heads of {cfg.n_embd // cfg.n_head}. The window is a quarter of T, as "
        "are documents on average. Making the mask counts as forward (flex keeps those without documents). "
        "FlexAttention has no backward pass on a CPU.",
        *(f"Not here: {backend} ({reason})." for backend, reason in nowhere.items()),
    )
    print(table("Attention", shown, columns, notes))
    return dict(attention=rows, tokens=tokens)


# ---------------------------------------------------------------------------------------------------------------------
# 6. Fit and memory


def bench_fit(bench: Bench) -> dict:
    """The largest micro-batch by bisection, and throughput over micro-batches."""
    bench.reserve(micro_batch=0, batch_tokens=0, parallel=0)
    limit = bench.limit_mb
    if not limit and bench.device.type != "cuda":
        if bench.device.type != "cpu" or sys.platform != "linux":
            raise UserError("fit finds no end of memory here: it needs CUDA, or Linux for a CPU; use another machine")
        limit = 1024 if bench.quick else memory_free_mb() * 3 // 4  # a system that swaps is no place to search
    inside = dataclasses.replace(bench, limit_mb=limit)
    rows, cfg = {}, config(**bench.flags)

    def fits(m: int) -> bool:
        """Measure micro-batch m; whether it ran."""
        row = rows[m] = dict(micro_batch=m, tokens=m * cfg.seq_len)
        flags = {**bench.flags, "micro_batch": m, "batch_tokens": m * cfg.seq_len}
        with Worker(inside, step_case, flags) as worker:
            try:
                row |= worker.ask()
                row |= spread([1000 * s for s in in_turn([worker], bench.repeats)[0]], "ms")
                row["tokens_per_s"] = 1000 * row["tokens"] / row["ms"]
            except Failed as error:
                row["note"] = str(error)
                if not row["note"].startswith("out of memory"):
                    raise
        row["fits"] = "note" not in row
        progress(f"micro_batch {m}: " + (f"{row['tokens_per_s']:,.0f} tokens/s" if row["fits"] else row["note"]))
        return row["fits"]

    low, high = 0, 1
    while fits(high):
        low, high = high, 2 * high
    while high - low > max(1, low // 16):
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    ordered = [rows[m] for m in sorted(rows)]
    best = max((r["tokens_per_s"] for r in ordered if r["fits"]), default=math.nan)
    for row in ordered:
        row["of_best"] = row["tokens_per_s"] / best if row["fits"] else None
    columns = {
        "micro_batch": ("micro_batch", "d"), "tokens": ("tokens", ",d"), "ms": ("ms per step", ",.1f"),
        "tokens_per_s": ("tokens/s", ",.0f"), "of_best": ("of the best", ".0%"), "peak_mb": ("peak MB", ",.0f"),
        "note": ("", ""),
    }  # fmt: skip
    allowed = f"{limit:,} MB more than at the start" if limit else "all of the device's memory"
    note = f"Largest that fits: {low} (within a sixteenth), allowed {allowed}; one micro-batch a step."
    print(table("Batch size", ordered, columns, (note,)))
    return dict(fit=ordered, largest=low, limit_mb=limit)


def memory_free_mb() -> int:
    """MB of main memory that can be had without swapping."""
    lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    return int(lines["MemAvailable"].split()[0]) // 1024


def memory_formula(run: Run) -> dict:
    """Bytes of a step by counting: weights, gradients, optimizer state, activations kept for backward, passing ones.

    Activations are counted for an eager step without windows or documents, in multiples of tokens x n_embd numbers.
    """
    cfg, shape, s = run.cfg, run.gpt.cfg, run.gpt.compute_dtype.itemsize
    weights = sum(p.numel() for p in run.gpt.parameters())
    adam = sum(p.numel() for g in run.optimizer.param_groups if g["kind"] == "adam" for p in g["params"])
    numbers = run.micro_batch * cfg.seq_len * shape.n_embd
    wide = s < 4 and run.on.device.type == "cpu"  # norms upcast their inputs there: PyTorch has no kernel for them
    block = 24 if wide else 18  # norms' inputs and outputs 4, qkv 3, rotated q and k 2, attention's output 1, the MLP 8
    # selective: the input 1, and what products and attention put out, 3 + 1 + 1 + 4 + 1; full: the input
    layer = {"none": block, "selective": 11, "full": 1}[cfg.checkpointing]
    kept = numbers * s * (layer * shape.n_layer + (4 if wide else 2))  # and the inputs of the first and the last norm
    logits = (cfg.loss_chunk or run.micro_batch * cfg.seq_len) * shape.vocab_size
    if cfg.loss_chunk:
        kept += numbers * s + 4 * shape.vocab_size * shape.n_embd  # the head's two gradients are made early
    else:
        kept += numbers * s + 8 * logits
    if s < 4 and cfg.checkpointing == "none":
        kept += s * (weights - 2 * shape.vocab_size * shape.n_embd)  # the blocks' weights in the activations' dtype
    # at the peak either the loss is at work, or a block is computed again, with the gradients inside it
    inside = numbers * s * (block - layer + 10)
    passing = max(inside, logits * (s + 16)) if cfg.loss_chunk else max(inside - 8 * logits, 8 * logits)
    return dict(
        weights=4 * weights, gradients=4 * weights, optimizer=4 * (weights + adam), activations=kept, passing=passing
    )


def memory_case(flags: dict):
    """Yields bytes by formula and measured, of a step with gradients there (the second micro-step and later ones)."""
    run, windows = ready(flags)
    device, windows = run.on.device, windows[: run.micro_batch]
    train_step(run, windows.repeat(run.grad_accum_steps, 1), 1.0)
    for p in run.gpt.parameters():
        p.grad = torch.zeros_like(p)

    def forward() -> Tensor:
        return run.model(windows[:, :-1], windows[:, 1:]) / windows[:, 1:].numel()

    forward().backward()
    activations, _, loss = allocated(device, forward)
    loss.backward()
    del loss
    _, peak, _ = allocated(device, lambda: forward().backward())
    parts = dict(
        weights=sum(p.nbytes for p in run.gpt.parameters()),
        gradients=sum(p.grad.nbytes for p in run.gpt.parameters()),
        optimizer=sum(t.nbytes for state in run.optimizer.state.values() for t in state.values()),
    )
    total = sum(parts.values()) + peak
    parts |= dict(activations=activations, passing=peak - activations)
    yield dict(formula=memory_formula(run), measured=parts, peak=total, resident_mb=peak_memory_mb(device))


def bench_memory(bench: Bench) -> dict:
    """Weights, gradients, optimizer state, activations: by formula and measured, per checkpointing mode."""
    bench.reserve(checkpointing=0, compile=0, offload=0, parallel=0)
    if bench.device.type == "mps":
        raise UserError("memory cannot be read on MPS; use --device cpu or a CUDA device")
    rows, cfg = [], config(**bench.flags)
    micro_batch = cfg.micro_batch or divisor(
        cfg.batch_tokens // cfg.seq_len, 8192 // cfg.seq_len
    )  # the same in all modes
    for mode in ("none", "selective", "full"):
        flags = {**bench.flags, "checkpointing": mode, "micro_batch": micro_batch}
        with Worker(bench, memory_case, flags) as worker:
            try:
                facts = worker.ask()
            except Failed as error:
                rows.append(dict(checkpointing=mode, note=str(error)))
                continue
        parts = {part: (facts["formula"][part], facts["measured"][part]) for part in facts["formula"]}
        parts["together, at the peak"] = sum(facts["formula"].values()), facts["peak"]
        for part, (formula, measured) in parts.items():
            rows.append(dict(checkpointing=mode, part=part, formula_mb=formula / 2**20, measured_mb=measured / 2**20,
                             differs=formula / measured - 1))  # fmt: skip
        rows[-1]["resident_mb"] = facts["resident_mb"]
        progress(f"{mode}: {facts['peak'] / 2**20:,.0f} MB at the peak")
    columns = {
        "checkpointing": ("checkpointing", ""), "part": ("part", ""), "formula_mb": ("formula", ",.1f"),
        "measured_mb": ("measured", ",.1f"), "differs": ("formula against measured", "+.0%"),
        "resident_mb": ("whole process", ",.0f"), "note": ("", ""),
    }  # fmt: skip
    note = (
        f"MiB, of a micro-step of {micro_batch} sequences while gradients are there. Passing is what the peak holds "
        "besides: a block computed again, gradients of activations, logits."
    )
    print(table("Memory", rows, columns, (note,)))
    return dict(memory=rows)


# ---------------------------------------------------------------------------------------------------------------------
# 7. Data


def data_case(flags: dict):
    """Yields the loader's own tokens/s; for (depth, steps) seconds that a step takes, and that the host waits in it.

    A depth of None is no loader, the same batch again and again.
    """
    cfg = config(**flags)
    run_on = launch(cfg)
    check_device(cfg, run_on.device)
    data = open_data(cfg, run_on)
    run = build(cfg, run_on, data.meta["vocab_size"], data.meta["eot"])
    device = run_on.device
    alone = []
    for first in range(0, 50, 10):
        began = time.perf_counter()
        for step in range(first, first + 10):
            train_batch(data, cfg, run_on, step)
        alone.append((time.perf_counter() - began) / 10)
    facts = spread([cfg.batch_tokens / s for s in alone], "loader_tokens_per_s") | dict(
        batch_s=statistics.median(alone)
    )
    if device.type == "cuda":
        windows = train_batch(data, cfg, run_on, 0)
        sources = {"pinned_s": windows, "pageable_s": windows.clone()}
        for name in sources:
            facts[name] = math.inf
        for name in [*sources] * 20:  # the least: the first ones warm up
            facts[name] = min(facts[name], timed(device, lambda t=sources[name]: t.to(device, non_blocking=True)))
    question = yield facts
    while True:
        depth, steps = question
        waited, began, same = 0.0, None, train_batch(data, cfg, run_on, 0)
        load = (lambda s: same) if depth is None else (lambda s: train_batch(data, cfg, run_on, s))  # noqa: B023
        batches = prefetched(load, 0, steps + 1, depth or 0)
        with contextlib.closing(batches):
            for i in range(steps + 1):
                asked = time.perf_counter()
                windows = next(batches).to(device, non_blocking=device.type == "cuda")
                waited += time.perf_counter() - asked
                train_step(run, windows, 1.0)
                if i == 0:  # the first batch is always waited for
                    synchronize(device)
                    waited, began = 0.0, time.perf_counter()
            synchronize(device)
        question = yield (time.perf_counter() - began) / steps, waited / steps


def bench_data(bench: Bench) -> dict:
    """What the loader can deliver, and what a step waits for it."""
    bench.reserve(prefetch=0)
    steps = 3 if bench.quick else 10
    rows = [dict(name="no loader", prefetch=None)] + [dict(name=f"prefetch {n}", prefetch=n) for n in (0, 1, 2, 4)]
    times = [[] for _ in rows]
    with Worker(bench, data_case, bench.flags) as worker:
        facts = worker.ask()
        for row, kept in [pair for _ in range(bench.repeats) for pair in zip(rows, times)]:
            kept.append(worker.ask((row["prefetch"], steps)))
    for row, kept in zip(rows, times):
        row |= spread([1000 * seconds for seconds, _ in kept], "ms")
        row |= spread([seconds / alone for (seconds, _), (alone, _) in zip(kept, times[0])], "against_none")
        row |= spread([waited / seconds for seconds, waited in kept], "waits")
    tokens = config(**bench.flags).batch_tokens
    note = f"The loader alone makes {facts['loader_tokens_per_s']:,.0f} tokens/s, a batch of {tokens:,} in "
    note += f"{1000 * facts['batch_s']:.2f} ms; training takes {1000 * tokens / rows[-1]['ms']:,.0f} tokens/s. "
    if "pinned_s" in facts:
        note += f"To the device: {1e6 * facts['pinned_s']:.0f} us pinned, {1e6 * facts['pageable_s']:.0f} us pageable."
    else:
        note += "Pinned memory is of CUDA."
    columns = {"name": ("data", ""), "ms": ("ms per step", ",.1f"), "against_none": ("times without a loader", ".3f"),
               "waits": ("of it the host waits", ".2%")}  # fmt: skip
    print(table("Data", rows, columns, (note,)))
    return dict(data=rows, **facts)


# ---------------------------------------------------------------------------------------------------------------------
# 8. Generation


def infer_case(flags: dict, batch: int, use_cache: bool, compiled: bool, prompt: int, lengths: tuple, patience: float):
    """Yields peak MB; then seconds to the first token and to each length of new tokens (None where patience ended)."""
    cfg = config(**flags)
    device = launch(cfg).device
    with device:
        gpt = GPT(model_config(cfg, vocabulary(cfg)), DTYPES[dtype_of(cfg, device)])
    for name, param in gpt.named_parameters():
        put(param, initial_weight(name, param.shape, cfg.seed))
    gpt.requires_grad_(False)
    if compiled:
        check_compiler(device)
        for block in gpt.blocks:
            block.compiled = torch.compile(block.layer, dynamic=True)  # one compilation for every length
    generator = torch.Generator().manual_seed(0)
    idx = torch.randint(vocabulary(cfg), (batch, prompt), generator=generator).to(device)

    def go(n_tokens: int, patience: float = math.inf) -> list[float]:
        synchronize(device)
        began, times = time.perf_counter(), []
        for _ in generate(gpt, idx, n_tokens, vocabulary(cfg), 0, use_cache=use_cache):
            synchronize(device)
            times.append(time.perf_counter() - began)
            if times[-1] > patience:
                break
        return times

    began = time.perf_counter()
    go(8)
    ready_s = time.perf_counter() - began
    yield dict(setup_s=ready_s)
    while True:
        times = go(max(lengths), patience)
        yield dict(
            prefill=times[0], decode=(times[-1] - times[0]) / (len(times) - 1) if len(times) == max(lengths) else None,
            to={n: times[n - 1] if len(times) >= n else None for n in lengths}, peak_mb=peak_memory_mb(device),
        )  # fmt: skip


def bench_infer(bench: Bench) -> dict:
    """Prefill and decode, with and without a KV cache, eager and compiled."""
    bench.reserve(seq_len=0, batch_tokens=0, compile=0)
    lengths, prompt = ((50, 100, 200), 32) if bench.quick else ((100, 500, 1000), 128)
    batches, patience = ((1, 8), 2.0) if bench.quick else ((1, 8, 32), 60.0)
    repeats = min(bench.repeats, 1 if bench.quick else 3)  # without a cache it takes minutes
    context = prompt + max(lengths)
    flags = {**bench.flags, "seq_len": context, "batch_tokens": context}
    rows = []
    for batch in batches:
        with contextlib.ExitStack() as exits:
            running = []
            for compiled in (False, True):
                for use_cache in (False, True):
                    row = dict(batch=batch, cache="KV cache" if use_cache else "none", compiled=compiled,
                               mode="compiled" if compiled else "eager")  # fmt: skip
                    rows.append(row)
                    args = (flags, batch, use_cache, compiled, prompt, lengths, patience)
                    worker = exits.enter_context(Worker(bench, infer_case, *args))
                    try:
                        row |= worker.ask()
                        running.append((row, worker, []))
                    except Failed as error:
                        row["note"] = str(error)
            for _ in range(repeats):
                for row, worker, results in running:
                    try:
                        results.append(worker.ask())
                    except Failed as error:
                        row["note"] = str(error)
            for row, _, results in running:
                if "note" in row:
                    continue
                row |= spread([1000 * r["prefill"] for r in results], "prefill_ms") | dict(
                    peak_mb=results[-1]["peak_mb"]
                )
                if all(r["decode"] for r in results):  # patience did not end on the way
                    row |= spread([1000 * r["decode"] for r in results], "decode_ms")
                    row["tokens_per_s"] = 1000 * batch / row["decode_ms"]
                for n in lengths:
                    took = [r["to"][n] for r in results]
                    if None not in took:
                        row |= spread(took, f"s_{n}")
            plain = {row["mode"]: row for row, _, _ in running if row["cache"] == "none"}
            for row, _, _ in running:
                without = plain.get(row["mode"], {})
                for n in lengths:
                    if row["cache"] != "none" and f"s_{n}" in row and f"s_{n}" in without:
                        row[f"gain_{n}"] = without[f"s_{n}"] / row[f"s_{n}"]
        progress(f"batch {batch}")
    columns = {
        "batch": ("batch", "d"), "mode": ("mode", ""), "cache": ("cache", ""), "prefill_ms": ("prefill, ms", ",.1f"),
        "decode_ms": ("ms a new token", ",.2f"), "tokens_per_s": ("tokens/s", ",.0f"),
        **{f"s_{n}": (f"{n} tokens, s", ",.2f") for n in lengths},
        **{f"gain_{n}": (f"cache's gain at {n}", ".1f") for n in lengths},
        "peak_mb": ("peak MB", ",.0f"), "setup_s": ("ready after s", ".1f"), "note": ("", ""),
    }  # fmt: skip
    note = f"A prompt of {prompt} tokens; tokens/s of all sequences, decoding; blank: not done in {patience:.0f} s."
    print(table("Generation", rows, columns, (note,)))
    return dict(infer=rows, prompt=prompt, repeats=repeats)


# ---------------------------------------------------------------------------------------------------------------------
# 9. Scaling


def scaling_rank(bench: Bench) -> dict | None:
    """What each rank of torchrun measures, a step with and without exchanging gradients; None but on rank 0."""
    run, windows = ready(bench.flags)
    if run.on.device.type == "cpu" and "BENCH_THREADS" in os.environ:
        torch.set_num_threads(int(os.environ["BENCH_THREADS"]))
    cases = [contextlib.nullcontext]
    if hasattr(run.model, "no_sync"):  # DDP
        cases.append(run.model.no_sync)
    times = [[] for _ in cases]
    for repeat in range(bench.repeats + 2):
        for case, seconds in zip(cases, times):
            if run.on.world > 1:
                dist.barrier()
            with case():
                took = timed(run.on.device, lambda: train_step(run, windows, 1.0))
            if repeat >= 2:
                seconds.append(took)
    row = dict(ranks=run.on.world, tokens=run.cfg.batch_tokens, micro_batch=run.micro_batch, seconds=times[0])
    row |= dict(threads=torch.get_num_threads(), peak_mb=peak_memory_mb(run.on.device))
    row["communication"] = [1 - b / a for a, b in zip(*times)] if len(times) == 2 else []
    return row if run.on.rank == 0 else None


def with_rates(row: dict) -> None:
    """Sum up the figures of a row of scaling_rank."""
    row |= spread([1000 * s for s in row["seconds"]], "ms")
    row["tokens_per_s"] = 1000 * row["tokens"] / row["ms"]
    row["shares"] = row.pop("communication")
    return row.update(spread(row["shares"], "communication") if row["shares"] else {})


def bench_scaling(bench: Bench) -> dict | None:
    """Strong and weak scaling over ranks on this machine; under torchrun, of the ranks that it started."""
    columns = {
        "name": ("batch", ""), "ranks": ("ranks", "d"), "tokens": ("tokens a step", ",d"),
        "ms": ("ms per step", ",.1f"),
        "tokens_per_s": ("tokens/s", ",.0f"), "efficiency": ("efficiency", ".0%"),
        "communication": ("all-reduce of gradients", ".1%"), "peak_mb": ("peak MB a rank", ",.0f"), "note": ("", ""),
    }  # fmt: skip
    if "WORLD_SIZE" in os.environ:
        row = scaling_rank(bench)
        if dist.is_initialized():
            dist.destroy_process_group()
        if row:
            with_rates(row)
            row["name"] = "as given"
            print(table("Scaling: the ranks that torchrun started", [row], columns))
        return row and dict(scaling=[row])
    cores = cpu_cores()
    most = torch.cuda.device_count() if bench.device.type == "cuda" else cores
    cfg = config(**bench.flags)
    rows_in_batch = cfg.batch_tokens // cfg.seq_len
    worlds = [2**i for i in range(most.bit_length()) if 2**i <= most and rows_in_batch % 2**i == 0]
    micro = cfg.micro_batch or divisor(rows_in_batch // worlds[-1], 8192 // cfg.seq_len)
    threads = os.environ.get("OMP_NUM_THREADS", str(max(1, cores // worlds[-1])))  # a rank's, at every world
    rows = [dict(name="one rank", ranks=1, tokens=cfg.batch_tokens)]
    for world in worlds[1:]:
        rows.append(dict(name="strong: the same in all", ranks=world, tokens=cfg.batch_tokens))
        rows.append(dict(name="weak: the same a rank", ranks=world, tokens=cfg.batch_tokens * world))
    rounds = 1 if bench.quick else 2
    for row in [row for _ in range(rounds) for row in rows]:
        flags = {**bench.flags, "batch_tokens": row["tokens"], "micro_batch": micro}
        with tempfile.TemporaryDirectory() as folder:
            torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node"]
            command = [*torchrun, str(row["ranks"]), __file__, "scaling", "--json", f"{folder}/row.json"]
            command += ["--repeats", str(bench.repeats)]
            command += [part for key, value in flags.items() for part in (f"--{key}", str(value))]
            env = {**os.environ, "OMP_NUM_THREADS": threads, "BENCH_THREADS": threads}
            process = subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
            try:
                errors = process.communicate()[1]
            except BaseException:  # torchrun ends its ranks, which have a session of their own
                process.terminate()
                process.wait(40)
                raise
            if process.returncode:
                lines = [line for line in errors.splitlines() if "rror" in line] or ["no message"]
                row["note"] = "out of memory" if out_of_memory(errors) else f"FAILED: {lines[0]}"
            else:
                found = json.loads(Path(f"{folder}/row.json").read_text())["scaling"][0]
                row["seconds"] = row.get("seconds", []) + found["seconds"]
                row["communication"] = row.get("communication", []) + found["shares"]
                row |= {key: found[key] for key in ("micro_batch", "threads", "peak_mb")}
        progress(f"{row['ranks']} ranks, {row['name']}: " + row.get("note", "done"))
    for row in rows:
        if "note" not in row:
            with_rates(row)
    if "note" not in rows[0]:
        for row in rows:
            if "note" not in row:
                row["efficiency"] = row["tokens_per_s"] / rows[0]["tokens_per_s"] / row["ranks"]
    note = (
        f"{micro} sequences a micro-batch, {threads} threads a rank. Efficiency is tokens/s a rank against one rank; "
        f"each row was started {rounds} times, in turn. For several nodes, start this command with torchrun on each."
    )
    print(table("Scaling", rows, columns, (note,)))
    return dict(scaling=rows)


# ---------------------------------------------------------------------------------------------------------------------
# 10. Profile

# What an operation or kernel belongs to, by what its name holds; the first that fits.
KINDS = {
    "communication": ("nccl", "gloo", "c10d", "all_reduce", "all_gather", "reduce_scatter", "all_to_all"),
    "attention": ("attention", "flash", "fmha", "cudnn_sdpa", "varlen"),
    "matrix products": ("mm", "linear", "gemm", "gemv", "cutlass", "nvjet", "xmma", "cublas"),
}


def kind_of(name: str, op) -> str:
    """The line of the profile that an operation belongs to; "" for one that only contains others."""
    parent = op
    while parent is not None:
        if parent.name.startswith("Optimizer.step"):
            return "optimizer"
        parent = parent.cpu_parent
    for kind, parts in KINDS.items():
        if any(part in name.lower() for part in parts):
            return kind
    return "elementwise" if "::" in name and not name.startswith("autograd::") or "CompiledFxGraph" in name else ""


def profile_case(flags: dict, steps: int, trace: str):
    """Yields milliseconds of a step by kind, and those of the step; writes the trace."""
    run, windows = ready(flags)
    device = run.on.device
    for _ in range(3):
        train_step(run, windows, 1.0)
    plain = [timed(device, lambda: train_step(run, windows, 1.0)) for _ in range(steps)]
    cuda = device.type == "cuda"
    activities = [torch.profiler.ProfilerActivity.CPU] + [torch.profiler.ProfilerActivity.CUDA] * cuda
    with torch.profiler.profile(activities=activities) as profiler:
        took = timed(device, lambda: [train_step(run, windows, 1.0) for _ in range(steps)])
    profiler.export_chrome_trace(trace)
    spent = dict.fromkeys((*KINDS, "elementwise", "optimizer"), 0.0)
    for op in profiler.events():
        if op.device_type != torch.autograd.DeviceType.CPU:
            continue
        pieces = [(k.name, k.duration) for k in op.kernels] if cuda else [(op.name, op.self_cpu_time_total)]
        for name, microseconds in pieces:
            kind = kind_of(name, op) or ("elementwise" if cuda else "")
            if kind:
                spent[kind] += microseconds / 1000 / steps
    total = 1000 * (
        statistics.median(plain) if cuda else took / steps
    )  # on a GPU kernels last as long without profiler
    spent["waiting"] = total - sum(spent.values())  # for Python, launches, data and other ranks
    yield dict(spent=spent, total=total, plain_ms=1000 * statistics.median(plain), tokens=run.cfg.batch_tokens)


def bench_profile(bench: Bench) -> dict:
    """Where a step's time goes."""
    bench.reserve(profile=0)
    trace = Path(tempfile.gettempdir()) / f"bench-trace-{os.getpid()}.json"
    with Worker(bench, profile_case, bench.flags, 3 if bench.quick else 10, str(trace)) as worker:
        facts = worker.ask()
    rows = [dict(kind=kind, ms=ms, share=ms / facts["total"]) for kind, ms in facts["spent"].items()]
    rows.sort(key=lambda row: -row["ms"])
    columns = {"kind": ("what", ""), "ms": ("ms per step", ",.1f"), "share": ("of the step", ".1%")}
    note = (
        f"A step takes {facts['total']:,.1f} ms under the profiler and {facts['plain_ms']:,.1f} without. Waiting is "
        f"what no operation accounts for: Python, launching kernels. Trace for https://ui.perfetto.dev: {trace}"
    )
    print(table("Where a step's time goes", rows, columns, (note,)))
    return dict(profile=rows, step_ms=facts["total"], plain_step_ms=facts["plain_ms"], trace=str(trace))


# ---------------------------------------------------------------------------------------------------------------------
# 11. Records

SHAKESPEARE = {  # what `data/prepare.py shakespeare` makes
    "train_000000.bin": "c991171e6f61b88dae0b0aa9ca8446624e9270fc928f227e31ca5a203ced9d1d",
    "val_000000.bin": "2130c5424137786d6e83983090afb3dda627e81db7f23ece0ea31c72f3b719d9",
}
# folder of records/ -> targets by name, where it runs, its data (None: no hash is known yet, and none is accepted)
TRACKS = {
    "laptop": dict(targets={"shakespeare-1.8857": 1.8857, "shakespeare-1.4697": 1.4697}, device="1 x cpu",
                   files=SHAKESPEARE, val_tokens=111540),
    "single-gpu": dict(targets={"fineweb-3.28": 3.28}, device="1 x cuda", files=None, val_tokens=10485760),
    "8-gpus": dict(targets={"fineweb-3.28": 3.28}, device="8 x cuda", files=None, val_tokens=10485760),
    "steps": dict(targets={"fineweb-3.28": 3.28}, device="", files=None, val_tokens=10485760,
                  fixed=dict(n_layer=12, n_head=6, n_embd=768, seq_len=1024, batch_tokens=524288)),
}  # fmt: skip


def t_test(values: list[float], target: float) -> float:
    """One-sided p-value of "the mean is below the target" by Student's t-test; 1 for fewer than two values."""
    n = len(values)
    if n < 2:
        return 1.0
    deviation, gap = statistics.stdev(values), target - statistics.mean(values)
    if deviation == 0:
        return 0.0 if gap > 0 else 1.0
    t, df = gap / deviation * math.sqrt(n), n - 1
    # P(T > t) = P(0 < angle of the tail), with T = sqrt(df) tan(angle): an integral of cos^(df - 1) over a finite range
    begin, steps = math.atan(t / math.sqrt(df)), 2000
    width = (math.pi / 2 - begin) / steps
    heights = [math.cos(begin + i * width) ** (df - 1) for i in range(steps + 1)]
    area = width / 3 * (heights[0] + heights[-1] + 4 * sum(heights[1:-1:2]) + 2 * sum(heights[2:-1:2]))  # Simpson
    return area * math.gamma((df + 1) / 2) / (math.gamma(df / 2) * math.sqrt(math.pi))


def read_run(folder: Path) -> dict:
    """A run's folder as it stands: log, source, flags, rows, summary. Raises UserError for what is missing."""
    try:
        log = (folder / "log.txt").read_text(encoding="utf-8")
        summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
        rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
        head, sources = log.split(f"{SECTION} run\n"), {}
        for name in ("train_gpt.py", "model.py"):
            sources[name] = head[0].split(f"{SECTION} {name}\n")[1].split(SECTION)[0].strip()
        flags, lines = head[1].split("\n", 1)
        run = dict(name=folder.name, starts=len(head) - 1, flags=json.loads(flags), sources=sources, lines=lines)
        if not all(math.isfinite(summary[key]) for key in ("val_loss", "train_time_s", "wall_time_s")):
            raise ValueError("a figure of summary.json is not finite")
        return run | dict(rows=rows, evaluations=[row for row in rows if "val_loss" in row], summary=summary)
    except (OSError, ValueError, IndexError, KeyError, TypeError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise UserError(f"{folder} is no finished run with its source in log.txt ({reason})") from None


def commanded(path: Path) -> dict:
    """The flags in command.sh's call of train_gpt.py. Raises UserError, OSError or ValueError when there is no such."""
    lines = [line for line in path.read_text(encoding="utf-8").splitlines() if not line.lstrip().startswith("#")]
    calls = re.findall(r"train_gpt\.py[\"']?(?=\s|$)(.*)", "\n".join(lines).replace("\\\n", " "))
    if len(calls) != 1:
        raise UserError(f"expected one call of train_gpt.py, found {len(calls)}")
    return given_flags(shlex.split(re.split(r"\s\d?[<>|&;]|;", calls[0])[0], comments=True))  # up to "2>&1 | tee log"


def broken_rules(track: dict, runs: list[dict], folder: Path, changed: list[str]) -> list[str]:
    """Why the runs are no record of this track; empty when they are one. changed: files whose source is not ours."""
    reasons = []

    def rule(holds: bool, reason: str) -> None:
        if not holds and reason not in reasons:
            reasons.append(reason)

    def plain(flags: dict) -> dict:
        return {k: v for k, v in flags.items() if k not in ("seed", "out_dir", "data", "trials")}

    first, seeds = runs[0], sorted(run["flags"]["seed"] for run in runs)
    rule((folder / "README.md").is_file(), "README.md is missing")
    try:
        ours = commanded(folder / "command.sh")
        if not changed:  # else defaults and flags may be others than then
            ours = dataclasses.asdict(config(**ours))
        other = [key for key, value in plain(ours).items() if first["flags"].get(key) != value]
        rule(not other, f"command.sh gives other flags than {first['name']} was run with: {', '.join(other)}")
    except (UserError, OSError, ValueError) as error:
        known = bool(changed) and "there is no flag" in str(error)
        rule(known, f"command.sh does not say how to run it again: {error}")
    rule(seeds == list(range(len(runs))), f"the seeds are {seeds}, not 0, 1, 2, ...: every run counts")
    rule(len(runs) >= 3, f"{len(runs)} runs; a record needs at least 3")
    rule(
        track["files"] is not None,
        "no hash of the track's data is known yet; add those of a verified download to TRACKS",
    )
    for run in runs:
        name, flags, summary, rows = run["name"], run["flags"], run["summary"], run["rows"]
        last = run["evaluations"][-1] if run["evaluations"] else {}
        times = [(0.0, 0.0)] + [(row["train_time_s"], row["wall_time_s"]) for row in rows]
        logged = [row for row in rows if "tokens_per_s" in row]
        rule(run["sources"] == first["sources"], f"{name}: another source than {first['name']}")
        rule(plain(flags) == plain(first["flags"]), f"{name}: other flags than {first['name']}")
        rule(summary["machine"] == first["summary"]["machine"], f"{name}: another machine than {first['name']}")
        rule(summary["machine"].startswith(track["device"]), f"{name}: on {summary['machine']}, not {track['device']}")
        rule(run["starts"] == 1 and not flags["resume"] + flags["init_from"], f"{name}: resumed, or not from scratch")
        ended = f"{name}: stopped by {summary['stopped_by']} at step {summary['step']}, not {flags['max_steps']}"
        rule(summary["stopped_by"] == "max_steps" and summary["step"] == flags["max_steps"], ended)
        wrong = [key for key, value in track.get("fixed", {}).items() if flags[key] != value]
        rule(not wrong, f"{name}: the track fixes {', '.join(wrong)}")
        rule(track["files"] in (None, summary["files"]), f"{name}: trained or validated on other data than the track's")
        seen = 0 <= track["val_tokens"] - summary["val_tokens"] < min(flags["seq_len"], track["val_tokens"] // 100)
        rule(seen, f"{name}: validated on {summary['val_tokens']:,} tokens of {track['val_tokens']:,}")
        agrees = all(last.get(key) == summary[key] for key in ("step", "val_loss", "train_time_s", "tokens"))
        rule(agrees, f"{name}: summary.json and the last evaluation in metrics.jsonl disagree")
        said = f"val_loss {summary['val_loss']:.4f} | ", f"train_time {summary['train_time_s']:.1f} s"
        agrees = any(said[0] in line and line.endswith(said[1]) for line in run["lines"].splitlines())
        rule(agrees, f"{name}: summary.json and log.txt disagree")
        due = {1, *range(flags["log_every"], flags["max_steps"], flags["log_every"]), flags["max_steps"]}
        rule([row["step"] for row in logged] == sorted(due), f"{name}: rows of metrics.jsonl are missing")
        forward = all(a[0] <= b[0] and a[1] <= b[1] and b[0] <= b[1] for a, b in zip(times, times[1:]))
        rule(forward, f"{name}: the clock runs backwards, or train_time is above the wall time")
        for before, row in zip([dict(step=0, train_time_s=0.0), *logged], logged):
            tokens = flags["batch_tokens"] * (row["step"] - before["step"])
            counted = row["tokens_per_s"] * (row["train_time_s"] - before["train_time_s"])
            fits = row["tokens"] == flags["batch_tokens"] * row["step"] and abs(counted / tokens - 1) < 0.01
            rule(fits, f"{name}: tokens and seconds of step {row['step']} do not fit together")
    return reasons


def bench_record(bench: Bench, path: str = "") -> dict:
    """Check a record's folder against its track's rules; print the row of the table, or why it is none."""
    folder = Path(path).resolve()
    track, (_, _, target_name) = folder.parent.name, folder.name.partition("_")
    if track not in TRACKS or target_name not in TRACKS[track]["targets"]:
        known = ", ".join(f"records/{t}/DATE_{name}" for t, spec in TRACKS.items() for name in spec["targets"])
        raise UserError(f"{path} is no folder of a track; expected one of {known}")
    spec, target = TRACKS[track], TRACKS[track]["targets"][target_name]
    runs = [read_run(log.parent) for log in sorted(folder.glob("*/log.txt")) if log.parent.name != "baseline"]
    if not runs:
        raise UserError(f"{path} holds no runs; expected folders with log.txt, metrics.jsonl and summary.json")
    changed = [
        name for name, text in runs[0]["sources"].items() if text != (HERE / name).read_text(encoding="utf-8").strip()
    ]
    reasons = broken_rules(spec, runs, folder, changed)
    losses, p = [run["summary"]["val_loss"] for run in runs], 1.0
    if all(isinstance(loss, float) for loss in losses):
        p = t_test(losses, target)
    if p >= 0.01:
        reasons.append(f"the mean is not below {target} with p < 0.01 (p = {p:.4f})")
    row = dict(
        track=track, record=folder.name, runs=len(runs), mean=statistics.mean(losses), p=p, target=target,
        deviation=statistics.stdev(losses) if len(losses) > 1 else None, steps=runs[0]["summary"]["step"],
        **spread([run["summary"]["train_time_s"] for run in runs], "train_time_s"),
        **spread([run["summary"]["wall_time_s"] for run in runs], "wall_time_s"),
        machine=runs[0]["summary"]["machine"], verdict="FAIL" if reasons else "PASS",
    )  # fmt: skip
    columns = {
        "record": ("record", ""), "target": ("target", ""), "mean": ("mean val_loss", ".4f"),
        "deviation": ("sd", ".4f"),
        "p": ("p", ".1e"), "runs": ("runs", "d"), "steps": ("steps", ",d"), "train_time_s": ("train_time, s", ".1f"),
        "wall_time_s": ("wall time, s", ".1f"), "machine": ("machine", ""), "verdict": ("", ""),
    }  # fmt: skip
    notes = [f"- {reason}" for reason in reasons]
    if any(re.search(r"git \S+-dirty", run["lines"]) for run in runs):
        notes.append("A person must ask what was changed: the runs were made from files that were not committed.")
    if changed:
        notes.append(f"A person must read the source in log.txt: it is not this repository's {' and '.join(changed)}.")
    print(table(f"Track {track}", [row], columns, tuple(notes)))
    return dict(record=[row | dict(broken=reasons)])


# ---------------------------------------------------------------------------------------------------------------------
# 12. Command line

BENCHES = {
    "train": bench_train, "loss": bench_loss, "attention": bench_attention, "fit": bench_fit, "memory": bench_memory,
    "data": bench_data, "infer": bench_infer, "scaling": bench_scaling, "profile": bench_profile,
    "record": bench_record,
}  # fmt: skip


def main(argv: list[str]) -> int:
    """The command line; returns the exit code: 0 done, 1 a case failed or a record is none, 2 a user's mistake."""
    command, name = shlex.join(["python", "bench.py", *argv]), "train"
    if argv and not argv[0].startswith("-"):
        name, *argv = argv

    class Parser(argparse.ArgumentParser):
        def error(self, message):
            raise UserError(f"{message}; --help lists the flags")

    parser = Parser(prog="bench.py [SUBCOMMAND]", description=__doc__, allow_abbrev=False,
                    formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("--quick", action="store_true", help="smaller and fewer: a first look")
    parser.add_argument("--repeats", type=int, default=0, help="measurements of each case [5; 3 with --quick]")
    parser.add_argument("--limit_mb", type=int, default=0, help="memory that a case may use [all there is]")
    parser.add_argument("--json", default="", metavar="FILE", help="write everything that was measured there")
    try:
        if "WORLD_SIZE" in os.environ and name != "scaling":
            raise UserError(f"{name} starts its own processes; use python instead of torchrun (scaling takes both)")
        if name not in BENCHES:
            raise UserError(f"there is no benchmark {name!r}; expected one of {', '.join(BENCHES)}")
        folder = [argv.pop(0)] if name == "record" and argv and not argv[0].startswith("-") else []
        args, rest = parser.parse_known_args(argv)
        if args.repeats < 0 or args.limit_mb < 0:
            raise UserError("--repeats and --limit_mb cannot be negative")
        given = {"preset": "laptop"} if name == "loss" else {}  # with other presets it takes hours
        bench = Bench(given | given_flags(rest), args.quick, args.repeats or (3 if args.quick else 5), args.limit_mb)
        config(**bench.flags)
        if args.json and (not Path(args.json).resolve().parent.is_dir() or Path(args.json).is_dir()):
            raise UserError(f"--json {args.json} is a folder or in none; give a file's name in a folder that exists")
        began = time.perf_counter()
        measured = BENCHES[name](bench, *folder)
    except (UserError, Failed) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1 if str(error).startswith("FAILED") else 2
    if measured is None:  # rank 0 reports
        return 0
    about = dict(benchmark=name, command=command, time=time.strftime("%Y-%m-%dT%H:%M:%S"), flags=bench.flags,
                 quick=bench.quick, repeats=bench.repeats, machine=machine(bench.device))  # fmt: skip
    about["took_s"] = time.perf_counter() - began
    print(", ".join(f"{k} {v}" for k, v in about["machine"].items() if v is not None) + f". `{command}`")
    if args.json:
        Path(args.json).write_text(json.dumps(finite(about | measured), indent=1) + "\n", encoding="utf-8")
    rows = [row for rows in measured.values() if isinstance(rows, list) for row in rows]
    return 1 if any(row.get("broken") or str(row.get("note")).startswith("FAILED") for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
