"""Cases in worker processes, interleaved measurements, memory, tables: what the benchmarks share.

A case is a generator that runs in a process of its own. Its first value says what was set up; then it yields one value
each time it is asked.
"""

import contextlib
import itertools
import json
import math
import multiprocessing
import multiprocessing.connection
import os
import platform
import statistics
import sys
import tempfile
import threading
import time
import traceback
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from data.shards import TOKENIZER_SIZES, TrainerError, UserError, load_meta
from ops import attention_kernels
from runtime.dtype import settle_dtype
from runtime.errors import explain_peer_failure
from runtime.launch import (
    ALLOC_CONF_VARIABLES,
    cpu_cores,
    device_name,
    peak_flops,
    peak_memory_mb,
    select_device,
)
from train_gpt import (
    Config,
    TrainState,
    build,
    check_hardware,
    launch,
    make_config,
    train_step,
)

# ---------------------------------------------------------------------------------------------------------------------
# Cases and their processes


@dataclass
class Bench:
    """What the command line asks for."""

    flags: dict  # of the trainer
    quick: bool = False
    repeats: int = 5
    limit_mb: int = 0  # memory that a case may use, in MiB; 0 = all there is

    def __post_init__(self):
        self.device = select_device(make_config(**{k: v for k, v in self.flags.items() if k == "device"}).device)
        if self.device.type == "cuda" and "preset" not in self.flags:
            self.flags = {"preset": "gpt2-small", **(dict(batch_tokens=65536) if self.quick else {}), **self.flags}
        if self.device.type == "cuda" and self.flags.get("alloc_conf"):  # before anything in a case starts CUDA
            os.environ.update(dict.fromkeys(ALLOC_CONF_VARIABLES, self.flags["alloc_conf"]))

    def reject_flags(self, *names: str) -> None:
        """Refuse trainer flags that the benchmark varies itself. Raises UserError."""
        for name in self.flags:
            if name in names:
                raise UserError(f"--{name} is what this benchmark varies itself; remove it")


class CaseFailed(TrainerError):
    """A case that could not be run; the text is the reason.

    worker: whose case it was. kind: "refused" (the user's mistake), "peer" (because another rank ended) or "failed".
    """

    def __init__(self, reason: str, worker: "Worker | None" = None, kind: str = "failed"):
        super().__init__(reason)
        self.worker, self.kind = worker, kind


class Worker:
    """A case in a process of its own: memory, compiler and crashes of one case do not reach the others."""

    def __init__(self, bench: Bench, case, *args):
        methods = multiprocessing.get_all_start_methods()
        context = multiprocessing.get_context("forkserver" if "forkserver" in methods else "spawn")
        if "forkserver" in methods:
            context.set_forkserver_preload(["torch", "torch._dynamo"])  # imported once, for all cases
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=worker_main, args=(theirs, bench, case, args), daemon=True)
        self.process.start()
        theirs.close()
        self.started = False

    def request(self, what=None):
        """The next value of the case, whose yield returns `what` to it. Raises CaseFailed."""
        try:
            if self.started:
                self.pipe.send(what)
            self.started = True
            kind, value = self.pipe.recv()
        except (EOFError, OSError):
            self.process.join()
            code = self.process.exitcode
            reason = "out of memory: killed by the system" if code == -9 else f"FAILED: died with exit code {code}"
            raise CaseFailed(reason, self) from None
        if kind != "value":
            raise CaseFailed(value, self, kind)
        return value

    def close(self) -> None:
        """End the process: it has ten seconds to leave by itself."""
        self.pipe.close()
        self.process.join(10)
        self.process.kill()
        self.process.join()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()


def worker_main(pipe, bench: Bench, case, args: tuple) -> None:
    """What a worker's process runs; it ends with its parent."""
    threading.Thread(target=exit_with_parent, daemon=True).start()
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
    except Exception as error:
        with contextlib.suppress(OSError):  # the parent has gone
            pipe.send(explain_failure(error))


def explain_failure(error: Exception) -> tuple[str, str]:
    """Kind and reason of a CaseFailed, in one line; prints the traceback of an error that nobody expects."""
    if isinstance(error, UserError):
        return "refused", str(error)
    if isinstance(error, TrainerError):
        return "failed", f"FAILED: {error}"
    text = f"{type(error).__name__}: {error}".splitlines()[0]
    if says_out_of_memory(text) or isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return "failed", "out of memory"
    if sentence := explain_peer_failure(error):
        return "peer", f"FAILED: {sentence}"
    traceback.print_exception(error)
    return "failed", f"FAILED: {text}"


def exit_with_parent() -> None:
    """Wait for the end of the process that asked for this one, however it ends; then end this one."""
    multiprocessing.connection.wait([multiprocessing.parent_process().sentinel])
    os._exit(1)


def says_out_of_memory(text: str) -> bool:
    """Whether an error's text says so, in the words of PyTorch, its compiler, CUDA, cuBLAS or the system."""
    words = ("out of memory", "outofmemory", "alloc_failed", "allocate memory", "bad_alloc", "not enough memory",
             "can't start new thread")  # fmt: skip
    return any(word in text.lower() for word in words)


def limit_memory(limit_mb: int, device: torch.device) -> None:
    """Let this process allocate only so many MiB more; 0 = no limit. Raises UserError where that is impossible."""
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
        raise UserError(f"memory cannot be limited on {device.type} of this system; remove --limit_mb")


# ---------------------------------------------------------------------------------------------------------------------
# Measuring


def run_interleaved(workers: list[Worker], rounds: int) -> list[list]:
    """What each worker yields in `rounds` rounds of one request each: A B A B ... Raises CaseFailed."""
    values = [[] for _ in workers]
    for _ in range(rounds):
        for worker, kept in zip(workers, values):
            kept.append(worker.request())
    return values


def median_min_max(values: list[float], name: str) -> dict:
    """Median, minimum and maximum, under the names name, name_min, name_max."""
    return {name: statistics.median(values), f"{name}_min": min(values), f"{name}_max": max(values)}


def synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize()


def timed(device: torch.device, function) -> float:
    """Seconds that function() takes, device included."""
    synchronize(device)
    t0 = time.perf_counter()
    function()
    synchronize(device)
    return time.perf_counter() - t0


def measure_memory(device: torch.device, function) -> tuple[int, int, object]:
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
# Reporting


def progress(text: str) -> None:
    """A line on standard error, with the time."""
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


def system_info(device: torch.device) -> dict:
    """Device and versions, for the report."""
    return dict(
        device=f"{device.type} ({device_name(device)})", cores=cpu_cores(), threads=torch.get_num_threads(),
        torch=torch.__version__, cuda=torch.version.cuda, python=platform.python_version(),
        platform=platform.platform(), capability=torch.backends.cpu.get_cpu_capability(),
    )  # fmt: skip


# ---------------------------------------------------------------------------------------------------------------------
# The trainer's step on dummy tokens


def tokenizer_size(cfg: Config) -> int:
    """Tokens of the data folder's tokenizer; without a folder, of the tokenizer that goes with the preset."""
    if cfg.data:
        return load_meta(Path(cfg.data))["vocab_size"]
    return TOKENIZER_SIZES["bytes" if cfg.preset == "laptop" else "gpt2"][0]


def dummy_batch(cfg: Config, n_seqs: int, device: torch.device) -> Tensor:
    """Random tokens, int64 (n_seqs, seq_len + 1), the same every time."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(tokenizer_size(cfg), (n_seqs, cfg.seq_len + 1), generator=generator).to(device)


def build_state(flags: dict, unfused: bool = False) -> tuple[TrainState, Tensor]:
    """What train_step takes, for these trainer flags. Raises UserError.

    unfused: the optimizer's loop over parameters.
    """
    cfg = make_config(**flags)
    dist_ctx = launch(cfg)
    check_hardware(cfg, dist_ctx)
    settle_dtype(cfg, dist_ctx)
    state = build(cfg, dist_ctx, tokenizer_size(cfg))
    state.optimizer.fused = not unfused
    for slots in state.optimizer.state.values() if unfused else ():
        if "step" in slots:
            slots["step"] = slots["step"].cpu()  # as unfused Adam counts: it would wait for a GPU to read it
    if cfg.attn == "math":  # the naive attention in bf16 multiplies in bf16
        torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(True)
    return state, dummy_batch(cfg, cfg.batch_tokens // cfg.seq_len // dist_ctx.world_size, dist_ctx.device)


def step_case(flags: dict, unfused: bool = False):
    """Yields what was set up, with the loss of the third step; then the seconds of a step."""
    t0 = time.perf_counter()
    state, batch = build_state(flags, unfused)
    device, cfg = state.dist_ctx.device, state.cfg
    losses = [train_step(state, batch, 1.0)[0].item() for _ in range(3)]
    once = timed(device, lambda: train_step(state, batch, 1.0))
    steps = max(1, math.ceil(0.2 / once))
    yield dict(
        loss=losses[-1], tokens=cfg.batch_tokens, micro_batch=state.micro_batch, peak_mb=peak_memory_mb(device),
        flops=cfg.batch_tokens * state.raw_model.flops_per_token(), setup_s=time.perf_counter() - t0,
        attention=attention_kernels(state.raw_model, state.micro_batch),
        datasheet_flops=peak_flops(device, cfg.dtype),
    )  # fmt: skip
    while True:
        yield timed(device, lambda: [train_step(state, batch, 1.0) for _ in range(steps)]) / steps
