"""Cases in worker processes, interleaved measurements, memory, tables: what the benchmarks share.

A case is a generator in a process of its own: its first value says what was set up, each later one is a measurement.
"""

import contextlib
import dataclasses
import itertools
import json
import math
import multiprocessing
import multiprocessing.connection
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from data.bpe import read_vocabulary
from data.shards import PYTHON_VOCABULARY, TOKENIZER_SIZES, TrainerError, UserError, load_meta
from data.tokenizers import BPETokenizer
from ops.attention import attention_kernels
from runtime.dtype import resolve_dtype
from runtime.errors import explain_peer_failure, is_out_of_memory
from runtime.launch import ALLOC_CONF_VARIABLES, cpu_cores, device_name, peak_flops, peak_memory_mb, select_device
from runtime.ranks import DistContext
from runtime.start import check_hardware, launch
from train_gpt import Config, TrainState, build, gpt_config, make_config, preset_flags, train_step

COLUMNS = {  # key in a row -> heading, format; other keys are their own headings
    "name": ("Config", ""),
    "seq_len": ("T", "d"),
    "variant": ("mask", ""),
    "kind": ("category", ""),
    "ms": ("ms/step", ",.1f"),
    "tokens_per_s": ("tokens/s", ",.0f"),
    "tokens": ("tokens/step", ",d"),
    "peak_mb": ("peak MiB", ",.0f"),
    "setup_s": ("startup, s", ".1f"),
    "note": ("", ""),
    # train
    "vs_above": ("speedup vs last kept", ".2f"),
    "vs_first": ("cumulative speedup", ".2f"),
    "mfu": ("MFU (datasheet)", ".1%"),
    "of_peak": ("MFU (measured matmul peak)", ".1%"),
    "full_ms": ("full stack (interleaved), ms/step", ",.1f"),
    "worth": ("slowdown", ".2f"),
    # attention
    "forward_ms": ("forward, ms", ".2f"),
    "backward_ms": ("backward, ms", ".2f"),
    "vs_naive": ("speedup vs naive", ".2f"),
    "more_mb": ("extra peak MiB", ",.1f"),
    # fit, profile
    "of_best": ("fraction of best", ".0%"),
    "share": ("fraction of step", ".1%"),
    # memory
    "formula_mb": ("formula", ",.1f"),
    "measured_mb": ("measured", ",.1f"),
    "differs": ("error", "+.0%"),
    "resident_mb": ("process RSS", ",.0f"),
    # data
    "against_none": ("slowdown vs no loader", ".3f"),
    "waits": ("data wait, % of step", ".2%"),
    "megabytes": ("MB", ",.1f"),
    "seconds": ("s", ",.2f"),
    "mb_per_s": ("MB/s", ",.1f"),
    "bytes_per_token": ("bytes per token", ".2f"),
    # infer, tour
    "prefill_ms": ("TTFT, ms", ",.1f"),
    "decode_ms": ("ms/token", ",.2f"),
    "perplexity": ("perplexity", ",.3f"),
    "sample": ("text", ""),
    # scaling
    "efficiency": ("efficiency", ".0%"),
    "communication": ("exposed exchange", ".1%"),
    "predicted_ms": ("predicted ms", ",.1f"),
    "sent_mb": ("MiB sent per step and rank", ",.1f"),
    "mbit": ("Mbit/s", ",.0f"),
    # loss
    "val_bpb": ("final val_bpb", ".4f"),
    "val_loss": ("final val_loss", ".4f"),
    "sooner": ("paired speedup (time)", ".3f"),
    "fewer": ("paired speedup (steps)", ".3f"),
    "reached": ("seeds at target", ""),
    "to_target_s": ("train_time to target, s", ".1f"),
    "steps_to_target": ("steps to target", ".0f"),
    "speedup": ("speedup", ".2f"),
    "time_saved": ("time saved", ".1%"),
    "time_p": ("p (time)", ".2g"),
    "step_saved": ("steps saved", ".1%"),
    "step_p": ("p (steps)", ".2g"),
    "worst": ("worst text (time)", ""),
}

# ---------------------------------------------------------------------------------------------------------------------
# Cases and their processes


@dataclass
class Bench:
    """What the command line asks for."""

    flags: dict  # of the trainer
    quick: bool = False
    repeats: int = 5
    limit_mb: int = 0  # memory that a case may use, in MiB; 0 = all there is
    recipes: str = ""  # a file of them, for `loss`

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

    kind: "refused" (the user's mistake), "peer" (because another rank ended) or "failed".
    """

    def __init__(self, reason: str, kind: str = "failed"):
        super().__init__(reason)
        self.kind = kind


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

    def request(self):
        """The next value of the case. Raises CaseFailed."""
        try:
            if self.started:
                self.pipe.send("next")
            self.started = True
            kind, value = self.pipe.recv()
        except (EOFError, OSError):
            self.process.join()
            raise CaseFailed(explain_exit(self.process.exitcode)) from None
        if kind != "value":
            raise CaseFailed(value, kind)
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
        for value in case(*args):
            try:
                pipe.send(("value", value))
                pipe.recv()
            except (EOFError, OSError):  # the parent has closed the pipe
                return
    except KeyboardInterrupt:
        return
    except Exception as error:
        with contextlib.suppress(OSError):  # the parent has gone
            pipe.send(explain_failure(error))


def explain_exit(code: int) -> str:
    """Why a process ended that said nothing; negative codes are signals."""
    return "out of memory: killed by the system" if code == -9 else f"FAILED: died with exit code {code}"


def explain_failure(error: Exception) -> tuple[str, str]:
    """Kind and reason of a CaseFailed, in one line; prints the traceback of an unexpected error."""
    if isinstance(error, UserError):
        return "refused", str(error)
    if isinstance(error, TrainerError):
        return "failed", f"FAILED: {error}"
    text = f"{type(error).__name__}: {error}".splitlines()[0]
    if is_out_of_memory(error) or "can't start new thread" in text:  # a memory limit also limits threads
        return "failed", "out of memory"
    if sentence := explain_peer_failure(error):
        return "peer", f"FAILED: {sentence}"
    traceback.print_exception(error)
    return "failed", f"FAILED: {text}"


def exit_with_parent() -> None:
    """Wait until the parent process ends, however it ends; then end this one."""
    multiprocessing.connection.wait([multiprocessing.parent_process().sentinel])
    os._exit(1)


def limit_memory(limit_mb: int, device: torch.device) -> None:
    """Let this process allocate only so many MiB more; 0 = no limit. Raises UserError where that is impossible."""
    if not limit_mb:
        return
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, limit_mb * 2**20 / total), device)
    elif device.type == "cpu" and sys.platform == "linux":
        import resource

        now = proc_kib("/proc/self/status", "VmData") * 1024
        resource.setrlimit(resource.RLIMIT_DATA, (now + limit_mb * 2**20,) * 2)
    else:
        raise UserError(f"memory cannot be limited on {device.type} of this system; remove --limit_mb")


def proc_kib(path: str, key: str) -> int:
    """A figure in KiB out of one of Linux's files of "key: n kB" lines."""
    return int(re.search(rf"^{key}:\s+(\d+)", Path(path).read_text(), re.MULTILINE)[1])


def run_script(path: Path, *argv) -> tuple[str, str]:
    """Standard output and error of a script of ours, in a process of its own. Raises CaseFailed with its last line."""
    env = os.environ | dict(PYTHONIOENCODING="utf-8")
    command = [sys.executable, str(path), *map(str, argv)]
    done = subprocess.run(command, capture_output=True, encoding="utf-8", errors="replace", env=env)
    if done.returncode == 0:
        return done.stdout, done.stderr
    lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    said = lines[-1].removeprefix("error: ") if lines else ""
    if done.returncode == 2:
        raise CaseFailed(said, "refused")
    if said.startswith("memory ran out"):
        raise CaseFailed(said)
    raise CaseFailed(f"FAILED: {said}" if said and done.returncode != -9 else explain_exit(done.returncode))


# ---------------------------------------------------------------------------------------------------------------------
# Measuring


def measure_interleaved(
    bench: Bench, rows: list[dict], cases: list[tuple], repeats: int, workers: dict[int, Worker] | None = None
) -> list[list]:
    """Run a case, (function, *args), for each row: its first value goes into the row, `repeats` more are returned.

    The values are taken interleaved: A B A B. A case that fails leaves the reason as `note` in its row. workers: by row
    index, those of an earlier call, whose cases yield as much again, and those of this one; the caller closes them.
    """
    values, running = [[] for _ in rows], {} if workers is None else workers
    try:
        for round_number, (i, row) in itertools.product(range(1 + repeats), enumerate(rows)):
            if "note" in row:
                continue
            if i not in running:
                running[i] = Worker(bench, *cases[i])
            try:
                value = running[i].request()
            except CaseFailed as error:
                row["note"] = str(error)
                running.pop(i).close()
                continue
            if round_number == 0:
                row |= value
            else:
                values[i].append(value)
    finally:
        for worker in running.values() if workers is None else ():
            worker.close()
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


def table(title: str, rows: list[dict], keys: list[str], note: str = "", columns: dict = COLUMNS) -> str:
    """A Markdown table of the rows' `keys`, under the headings of `columns`; what all rows lack is left out.

    A cell is a figure with its range (name_min, name_max) or standard error (name_se), if the row has these.
    """

    def cell(row: dict, key: str) -> str:
        value, (_, form) = row.get(key), columns.get(key, (key, ""))
        if value is None or isinstance(value, float) and not math.isfinite(value):
            return ""
        text = format(value, form)
        if f"{key}_se" in row:
            text += f" +- {row[f'{key}_se']:{form}}"
        if f"{key}_min" in row and row[f"{key}_min"] < row[f"{key}_max"]:
            text += f" ({row[f'{key}_min']:{form}}-{row[f'{key}_max']:{form}})"
        return text.replace("|", "\\|")

    shown = [key for key in keys if any(cell(row, key) for row in rows)]
    lines = [f"### {title}", ""]
    lines.append("| " + " | ".join(columns.get(key, (key, ""))[0] for key in shown) + " |")
    lines.append("|" + " --- |" * len(shown))
    lines += ["| " + " | ".join(cell(row, key) for key in shown) + " |" for row in rows]
    return "\n".join([*lines, "", note]).rstrip() + "\n"


def system_info(device: torch.device) -> dict:
    """Device and versions, for the report."""
    return {
        "device": f"{device.type} ({device_name(device)})",
        "cores": cpu_cores(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "capability": torch.backends.cpu.get_cpu_capability(),
    }


# ---------------------------------------------------------------------------------------------------------------------
# The trainer's step on dummy tokens


def tokenizer_size(cfg: Config) -> int:
    """Vocabulary size of the data folder's tokenizer; without a folder, --vocab_size, else that of the default run for
    its preset, else GPT-2's."""
    if cfg.data:
        return load_meta(Path(cfg.data))["vocab_size"]
    if cfg.vocab_size:
        return cfg.vocab_size
    if cfg.preset == "laptop":
        return BPETokenizer(read_vocabulary(PYTHON_VOCABULARY)).vocab_size
    return TOKENIZER_SIZES["gpt2"][0]


def settle(cfg: Config, check: bool = True) -> tuple[Config, DistContext]:
    """The flags with their dtype resolved and checked against this device, and where it runs. Raises UserError."""
    dist_ctx = launch(cfg)
    if check:
        check_hardware(
            cfg, Config(**preset_flags(dataclasses.asdict(cfg))), dist_ctx, gpt_config(cfg, 0).layer_windows()
        )
    return dataclasses.replace(cfg, dtype=resolve_dtype(cfg, dist_ctx)[0]), dist_ctx


def build_state(flags: dict, unfused: bool = False) -> tuple[TrainState, Tensor]:
    """train_step's arguments for these trainer flags: the state, and a step's tokens, int64 (sequences, seq_len + 1).

    unfused: the optimizer's loop over parameters. Raises UserError.
    """
    cfg, dist_ctx = settle(make_config(**flags))
    state = build(cfg, dist_ctx, tokenizer_size(cfg))
    state.optimizer.fused = not unfused
    for slots in state.optimizer.state.values() if unfused else ():
        if "step" in slots:
            slots["step"] = slots["step"].cpu()  # as unfused Adam keeps it: reading it from a GPU would wait
    if cfg.attn == "math":  # the naive attention in bf16 multiplies in bf16
        torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(True)
    shape = (cfg.batch_tokens // cfg.seq_len // dist_ctx.world_size, cfg.seq_len + 1)
    batch = torch.randint(tokenizer_size(cfg), shape, generator=torch.Generator().manual_seed(0))
    return state, batch.to(dist_ctx.device)


def step_case(flags: dict, unfused: bool = False):
    """Yields what was set up, with the loss of the third step; then the seconds of a step."""
    t0 = time.perf_counter()
    state, batch = build_state(flags, unfused)
    device, cfg = state.dist_ctx.device, state.cfg
    losses = [train_step(state, batch, 1.0)[0].item() for _ in range(3)]
    once = timed(device, lambda: train_step(state, batch, 1.0))
    steps = max(1, math.ceil(0.2 / once))
    yield {
        "loss": losses[-1],
        "tokens": cfg.batch_tokens,
        "micro_batch": state.micro_batch,
        "peak_mb": peak_memory_mb(device),
        "flops": cfg.batch_tokens * state.raw_model.flops_per_token(),
        "setup_s": time.perf_counter() - t0,
        "attention": attention_kernels(state.raw_model, state.micro_batch),
        "datasheet_flops": peak_flops(device, cfg.dtype),
    }
    while True:
        yield timed(device, lambda: [train_step(state, batch, 1.0) for _ in range(steps)]) / steps
