"""Cases in processes of their own, interleaved measurements, memory, tables: what the benchmarks share."""

import argparse
import contextlib
import itertools
import multiprocessing
import re
import statistics
import subprocess
import sys
import time
import traceback

import torch
from torch import Tensor

from common import RunError, UserError, error_sentence
from data.stream import TokenStream
from runtime.dataset import open_stream
from runtime.device import init_device_and_ranks, select_device
from runtime.flag_checks import check_device, check_flags
from train_gpt import (
    PRESETS,
    Config,
    TrainState,
    build,
    get_batch,
    gpt_config,
    make_config,
    resolve_auto,
)


class Bench:
    """What the command line asks for: flags of the trainer, and options of bench.py."""

    def __init__(self, flags: dict, options: argparse.Namespace):
        self.flags, self.options, self.quick = flags, options, options.quick
        self.repeats = max(1, options.repeats or (3 if options.quick else 5))
        self.device = select_device(flags.get("device", "auto"))
        if self.device.type == "cuda" and "preset" not in flags:
            self.flags = (
                dict(preset="gpt2-small") | (dict(batch_tokens=65536) if self.quick else {}) | flags
            )
        if self.flags.get("preset", "").startswith("gpt2") and "data" not in flags:
            self.flags = dict(vocab_size=50304) | self.flags  # as with GPT-2's tokenizer

    def refuse(self, *names: str) -> None:
        """Raises UserError for trainer flags that the benchmark varies itself, and for sizes by the clock."""
        for name in self.flags.keys() & {*names, "minutes"}:
            raise UserError(f"--{name} is what this benchmark varies or cannot follow; remove it")


def run_case(pipe, case, args: tuple) -> None:
    """What a case's process runs; it ends with its parent."""
    try:
        values = case(*args)
        with contextlib.redirect_stdout(None):
            while pipe.recv():
                pipe.send((None, next(values)))
    except (EOFError, BrokenPipeError, KeyboardInterrupt):
        return
    except Exception as error:
        if not error_sentence(error):
            traceback.print_exc()
        pipe.send((error_sentence(error) or f"FAILED: {type(error).__name__}: {error}", None))


def measure(cases: list[tuple], repeats: int) -> list[dict]:
    """A row for each case, (generator function, *args): what its first value says, and `repeats` more in `values`.

    Cases run in processes of their own, so that memory, compiler and crashes of one do not reach the others; values are
    taken interleaved: A B A B. A case that fails leaves the reason as its `note`, and nothing else.
    """
    forks = "forkserver" in multiprocessing.get_all_start_methods()
    context, rows, started = (
        multiprocessing.get_context("forkserver" if forks else "spawn"),
        [{} for _ in cases],
        [],
    )
    multiprocessing.set_forkserver_preload(
        ["torch", "torch._dynamo"]
    )  # imported once, for all cases
    for case, *args in cases:
        ours, theirs = context.Pipe()
        started.append(
            (ours, context.Process(target=run_case, args=(theirs, case, args), daemon=True))
        )
        started[-1][1].start()
        theirs.close()
    for number, (row, (pipe, process)) in itertools.product(
        range(1 + repeats), [*zip(rows, started)]
    ):
        if "note" in row:
            continue
        try:
            pipe.send("next")
            error, value = pipe.recv()
        except (EOFError, OSError):
            process.join()
            died = f"FAILED: died with exit code {process.exitcode}"
            error = "out of memory: killed by the system" if process.exitcode == -9 else died
        if error:
            row.clear()
            row["note"] = error
        elif number == 0:
            row |= value | dict(values=[])
        else:
            row["values"].append(value)
    for _, process in started:
        process.kill()
        process.join()
    return rows


def run_python(*argv, env: dict | None = None) -> None:
    """Run a script of ours in a process of its own. Raises UserError or RunError with its own sentence."""
    done = subprocess.run(
        [sys.executable, *map(str, argv)], capture_output=True, text=True, errors="replace", env=env
    )
    if done.returncode:
        said = re.findall(r"^error.*?: (.*)", done.stderr, re.MULTILINE) or [
            f"FAILED: {done.stderr.strip()[-200:]}"
        ]
        raise (UserError if done.returncode == 2 else RunError)(said[0])


def build_state(flags: dict) -> tuple[TrainState, TokenStream, Tensor]:
    """What the trainer builds of these flags: the state, its data and the first batch. Raises UserError."""
    cfg = make_config(
        **dict(short_frac=0.0) | flags
    )  # steps on whole sequences, which are most of the work
    dist_ctx = init_device_and_ranks(cfg)
    check_device(cfg, Config(**PRESETS[cfg.preset]), dist_ctx, gpt_config(cfg, 0).layer_windows())
    shape = {
        name: getattr(cfg, name)
        for name in ("seq_len", "batch_tokens", "seed", "vocab_size", "doc_align")
    }
    stream = open_stream(cfg.data, dist_ctx, **shape)
    cfg = resolve_auto(cfg, dist_ctx, stream, {})
    check_flags(cfg)
    state = build(cfg, dist_ctx, stream.meta["vocab_size"], stream.meta["eot"])
    return state, stream, get_batch(stream, dist_ctx, 0)


def timed(device: torch.device, function) -> tuple[float, object]:
    """Seconds that function() takes, device included, and its result."""
    synchronize = int if device.type == "cpu" else torch.accelerator.synchronize
    synchronize()
    began = time.perf_counter()
    result = function()
    synchronize()
    return time.perf_counter() - began, result


def measure_memory(device: torch.device, function) -> tuple[int, int, object]:
    """Bytes that function() leaves allocated while its result lives, its peak beyond those before, and the result."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        result = function()
        return (
            torch.cuda.memory_allocated() - before,
            torch.cuda.max_memory_allocated() - before,
            result,
        )
    with torch.profiler.profile(profile_memory=True, acc_events=True) as profiler:
        result = function()
    events = [
        event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"
    ]
    events.sort(key=lambda event: event.start_ns())
    held = [0, *itertools.accumulate(event.nbytes() for event in events)]
    return held[-1], max(held), result


def median_min_max(values: list[float], name: str) -> dict:
    """Median, minimum and maximum, under the names name, name_min, name_max."""
    return {name: statistics.median(values), f"{name}_min": min(values), f"{name}_max": max(values)}


def progress(text: str) -> None:
    print(f"  {time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


def table(title: str, rows: list[dict], note: str = "") -> str:
    """A Markdown table of the rows' numbers and texts under their keys, key_min and key_max beside key; `note` last."""

    def number(value) -> str:
        if isinstance(value, float):
            return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
        return str(value).replace("|", "\\|") if isinstance(value, (int, str)) else ""

    def cell(row: dict, key: str) -> str:
        low, high = number(row.get(f"{key}_min")), number(row.get(f"{key}_max"))
        return number(row.get(key)) + (f" ({low}-{high})" if low != high else "")

    keys = sorted(dict.fromkeys(key for row in rows for key in row), key=lambda key: key == "note")
    shown = [
        key
        for key in keys
        if not key.endswith(("_min", "_max")) and any(cell(row, key) for row in rows)
    ]
    lines = [" | ".join(shown), " | ".join("---" for _ in shown)]
    lines += [" | ".join(cell(row, key) for key in shown) for row in rows]
    return (
        f"### {title}\n\n"
        + "\n".join(f"| {line} |" for line in lines)
        + f"\n\n{note}".rstrip()
        + "\n"
    )
