"""Tools of the benchmarks: cases in their own processes, interleaved measurements, tables."""

import argparse
import contextlib
import math
import multiprocessing
import os
import re
import shlex
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from multiprocessing.context import BaseContext
from pathlib import Path
from statistics import median

import torch
from torch import Tensor

from common.errors import RunError, UserError, error_sentence
from runtime.auto import choose_auto_values
from runtime.device import select_device
from runtime.environment import configure_device
from runtime.flag_checks import check_device, check_flags
from runtime.flags import parse_flags
from runtime.ranks import join_ranks
from runtime.run import open_stream
from train_gpt import (
    Config,
    TrainState,
    build,
    choose_learning_rates,
    get_batch,
    make_config,
    train_step,
)


class Bench:
    """The command line of a benchmark.

    flags: the given trainer flags. options: bench.py's own.
    """

    def __init__(self, flags: dict, options: argparse.Namespace):
        self.options = options
        self.repeats = max(1, options.repeats)
        self.device = select_device(flags.get("device", "auto"))
        self.flags = flags

    def config(self, flags: str) -> Config:
        """Make the Config of a case: the command line's flags, and its own. Raises UserError.

        Sequences have full length, which is most of a run's work.
        """
        values = dict(short_frac=0.0) | self.flags | trainer_flags(shlex.split(flags))
        if self.device.type == "cuda":
            values.setdefault("preset", "gpt2-small")
        # The vocabulary of GPT-2's tokenizer, whatever the dataset
        if values.get("preset", "").startswith("gpt2") and "data" not in values:
            values.setdefault("vocab_size", 50304)
        return make_config(**values)

    def forbid_flags(self, *names: str) -> None:
        """Raise UserError for flags that the benchmark varies itself or cannot apply."""
        for name in names:
            if name in self.flags:
                raise UserError(f"--{name} is varied or not supported by this benchmark; remove it")


def trainer_flags(words: list[str]) -> dict:
    """Read the trainer's flags from words of a command line. Raises UserError."""
    return parse_flags(words, Config, {}, "")


# --------------------------------------------------------------------------------------------------
# Cases in their own processes


def run_case(pipe: Connection, case: Callable) -> None:
    """Run a case in this process; answer each request with its next value, or how it fails."""
    try:
        values = case()
        with contextlib.redirect_stdout(None):
            while pipe.recv():
                pipe.send(next(values))
    except (EOFError, BrokenPipeError, KeyboardInterrupt):
        return
    except UserError as error:
        pipe.send(error)
    except Exception as error:
        sentence = error_sentence(error)
        if not sentence:
            traceback.print_exc()
            sentence = f"FAILED: {type(error).__name__}: {error}"
        pipe.send(dict(note=sentence))


def values_of(context: BaseContext, case: Callable) -> Iterator[dict | UserError]:
    """Run a case in its own process; yield its values one by one, or a note or UserError."""
    pipe, child_pipe = context.Pipe()
    process = context.Process(target=run_case, args=(child_pipe, case), daemon=True)
    process.start()
    child_pipe.close()
    try:
        while True:
            pipe.send("next")
            yield pipe.recv()
    except (EOFError, OSError):
        process.join()
        note = f"FAILED: died with exit code {process.exitcode}"
        if process.exitcode == -9:
            note = "out of memory: killed by the system"
        yield dict(note=note)
    finally:
        process.kill()
        process.join()


def measure(cases: list[Callable], repeats: int) -> list[dict]:
    """Run each case in its own process and return one row per case.

    A case returns a generator, which yields a dict of facts, then one measurement at a time as a
    dict of numbers. Its row holds the facts, the measurements in `values`, and the median of each
    number; if the case failed, only a `note` with the reason. Separate processes isolate memory,
    compiler and crashes of the cases. Measurements are interleaved (A B A B). Under torchrun, cases
    run in its processes. Raises the UserError of the first case, with which all are compared.
    """
    context = multiprocessing.get_context("forkserver")
    # Imported once, for all cases
    multiprocessing.set_forkserver_preload(["benchmarks.harness", "torch._dynamo"])
    if "WORLD_SIZE" in os.environ:
        running = [case() for case in cases]
    else:
        running = [values_of(context, case) for case in cases]
    received = [[next(case)] for case in running]
    if isinstance(received[0][0], UserError):
        raise received[0][0]
    for answers in received:
        if isinstance(answers[0], UserError):
            answers[0] = dict(note=str(answers[0]))
    for _ in range(repeats):
        for case, answers in zip(running, received):
            if "note" not in answers[-1]:
                answers.append(next(case))
    rows = []
    for case, answers in zip(running, received):
        case.close()
        row = answers[-1]
        if "note" not in row:
            facts, *values = answers
            row = facts | dict(values=values)
            for name in values[0]:
                row[name] = median(value[name] for value in values)
        rows.append(row)
    return rows


def run_python(*argv: str | Path) -> None:
    """Run a script in its own process. Raises UserError or RunError with the printed error."""
    command = [sys.executable, *argv]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace")
    if done.returncode == 0:
        return
    sentence = done.stderr.strip()[-200:]
    found = re.search(r"^error.*?: (.*)", done.stderr, re.MULTILINE)
    if found:
        sentence = found[1]
    error_type = UserError if done.returncode == 2 else RunError
    raise error_type(sentence)


# --------------------------------------------------------------------------------------------------
# Measurements


def build_state(cfg: Config) -> tuple[TrainState, Tensor]:
    """Build the state and read the first batch as in the trainer. Raises UserError."""
    dist_ctx = join_ranks()
    configure_device(cfg, dist_ctx)
    check_flags(cfg)
    check_device(cfg, dist_ctx)
    stream = open_stream(cfg, dist_ctx)
    cfg = choose_learning_rates(choose_auto_values(cfg, stream, dist_ctx))
    stream.set_batch_tokens(cfg.batch_tokens)
    return build(cfg, dist_ctx, stream), get_batch(stream, dist_ctx, 0)


def time_steps(state: TrainState, batch: Tensor, n: int) -> float:
    """Train n steps on a batch and return the mean ms per step; each waits for the device."""
    start = time.perf_counter()
    for _ in range(n):
        train_step(state, batch, 1.0)  # the end of a run, whose sequences have full length
    if state.dist_ctx.device.type != "cpu":
        torch.accelerator.synchronize()
    return 1000 * (time.perf_counter() - start) / n


# --------------------------------------------------------------------------------------------------
# Output


def progress(text: str) -> None:
    """Print a line on standard error while a benchmark runs."""
    print(f"  {time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


def format_value(value: object) -> str:
    """Format a number or text of a table; "" for anything else."""
    if isinstance(value, float) and not math.isnan(value):
        if abs(value) >= 1000:
            return f"{value:,.0f}"
        return f"{value:.5g}" if 1 <= value < 10 else f"{value:.4g}"  # losses have more digits
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, str):
        return value.replace("|", "\\|")
    return ""


def format_cell(row: dict, key: str) -> str:
    """Format the row's value of a key; a measured time with (minimum-maximum)."""
    cell = format_value(row.get(key))
    if key.startswith("ms") and "values" in row:
        times = [value[key] for value in row["values"]]
        cell += f" ({format_value(min(times))}-{format_value(max(times))})"
    return cell


def table(title: str, rows: list[dict], note: str = "") -> str:
    """Make a Markdown table, with a column per key that has numbers or texts, and a note below."""
    columns = []
    for row in rows:
        columns += [key for key in row if key not in columns and format_value(row[key])]
    columns.sort(key=lambda key: key == "note")  # notes at the end
    lines = [columns, ["---"] * len(columns)]
    for row in rows:
        lines.append([format_cell(row, key) for key in columns])
    markdown = "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
    return f"### {title}\n\n{markdown}\n\n{note}".rstrip() + "\n"
