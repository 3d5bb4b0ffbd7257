"""Measure the effect of each flag on this machine: `python bench.py [SUBCOMMAND] [flags]`

train      (the default) the ladder: systems flags added one by one
experiment compare an edit with a base: losses, the time to an equal loss, and a row in --ledger
           (keep, discard or crash). Each --flags="..." is one side: trainer flags, optionally after
           the folder of an edited checkout (docs/experiments.md)
attention  every attention backend and a naive softmax, forward and backward, over context lengths
memory     measured peaks of weights, gradients, optimizer state, activations per checkpointing mode
scaling    weak and strong scaling over 1, 2, 4, ... ranks of this machine, or torchrun's ranks
profile    the time of a step in six lines, and the trace
record DIR check a folder of records/ against the rules of its track; --pack HEAD replaces its runs'
           source/ folders by source.patch (a commit and a diff); --rerun SEED executes its source
           to repeat that seed (on --data DIR), in its folder
plot DIR   plot the validation losses of runs and records:
           plot DIR... [--x ...] [--y ...] [--target LOSS] [--out FILE]

A step is the trainer's own train_step. Compared cases run in their own processes, interleaved
(A B A B); figures are medians (min-max). Trainer flags apply unless a benchmark varies them.
"""

import argparse
import dataclasses
import itertools
import json
import os
import platform
import shlex
import sys
from pathlib import Path

from runtime import set_environment

if __name__ == "__main__":
    set_environment()

import torch

from benchmarks.attention import bench_attention
from benchmarks.experiment import bench_experiment
from benchmarks.harness import Bench, table
from benchmarks.ladder import bench_train
from benchmarks.memory import bench_memory
from benchmarks.plot import X_AXES, Y_AXES, bench_plot
from benchmarks.profile import bench_profile
from benchmarks.scaling import bench_scaling
from common.errors import UserError, exit_process, run_command
from common.values import cpu_cores, nan_to_none
from records.check import check_record, pack
from records.rerun import rerun
from runtime.device import device_name
from runtime.flags import parse_flags
from train_gpt import Config


def bench_record(bench: Bench) -> list[dict]:
    """Check a record's folder; print its row and the violated rules."""
    if len(bench.options.folders) != 1:
        raise UserError("record takes one folder, such as records/laptop/DATE_NAME")
    folder = bench.options.folders[0]
    if bench.options.pack:
        pack(folder, bench.options.pack)
    if bench.options.rerun is not None:
        print(f"--rerun executes the source in {folder}")
        rerun(folder, bench.options.rerun, bench.cfg.data, bench.options.reference)
    row, notes = check_record(folder)
    shown = row | dict(mean=f"{row['mean']:.4f}")  # a loss has more digits than a time
    broken = [f"- {reason}" for reason in row["broken"]]
    print(table("Record", [shown], "\n".join(broken + notes)))
    return [row]


BENCHMARKS = dict(
    train=bench_train,
    experiment=bench_experiment,
    attention=bench_attention,
    memory=bench_memory,
    scaling=bench_scaling,
    profile=bench_profile,
    record=bench_record,
    plot=bench_plot,
)


def get_args_parser() -> argparse.ArgumentParser:
    """Make the parser of bench.py's own options; all others are the trainer's flags."""
    parser = argparse.ArgumentParser(
        "bench.py",
        description=__doc__,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--repeats", type=int, default=5, help="measurements per case; experiment: seeds [5]")
    add("--json", default="", metavar="FILE", help="write all measurements to this file")
    add("--flags", action="append", default=[], help="experiment: one side, such as '--softcap 0'")
    add("--data", nargs="+", default=[], metavar="DIR", help="dataset; experiment: one or more")
    add("--ledger", default="", metavar="FILE", help="experiment: append a row to this .tsv file")
    add("--describe", default="", metavar="TEXT", help="experiment: description for the ledger")
    add(
        "--pack",
        default="",
        metavar="COMMIT",
        help="record: store source/ as a diff from this commit",
    )
    add("--rerun", type=int, metavar="SEED", help="record: execute its source for this seed")
    add("--reference", default="", metavar="DIR", help="--rerun: a second record to time")
    add("--x", choices=X_AXES, default="train_time_s", help="plot: horizontal axis [train_time_s]")
    add("--y", choices=Y_AXES, default="val_loss", help="plot: vertical axis [val_loss]")
    add("--target", type=float, help="plot: draw a line at this loss")
    add("--out", default="plot.svg", help="plot: an .svg or .png file [plot.svg]")
    return parser


def parse(argv: list[str]) -> tuple[str, Bench]:
    """Read the command line: the subcommand and its Bench. Raises UserError."""
    words = list(itertools.takewhile(lambda word: not word.startswith("-"), argv))
    name = words[0] if words else "train"
    folders = words[1:]
    if name not in BENCHMARKS or (folders and name not in ("record", "plot")):
        raise UserError(
            f"there is no benchmark {' '.join(words)!r}; expected one of {', '.join(BENCHMARKS)}"
        )
    if "WORLD_SIZE" in os.environ and name != "scaling":
        raise UserError(f"{name} starts its own processes; use python instead of torchrun")
    options, trainer_flags = get_args_parser().parse_known_args(argv[len(words) :])
    options.folders = folders
    flags = parse_flags(trainer_flags, dataclasses.fields(Config), {}, "")
    if options.data and name != "experiment":
        if len(options.data) > 1:
            raise UserError(f"{name} takes one --data; only experiment takes several")
        flags["data"] = options.data[0]
    return name, Bench(flags, options)


def main(argv: list[str]) -> int:
    """Run a benchmark; returns the exit code, 1 if a case failed or rules are broken."""
    name, bench = parse(argv)
    rows = BENCHMARKS[name](bench)
    if rows is None:  # a picture, or a rank that does not report
        return 0
    command_line = shlex.join(["python", "bench.py", *argv])
    machine = dict(
        device=f"{bench.device.type} ({device_name(bench.device)})",
        cores=cpu_cores(),
        torch=torch.__version__,
        python=platform.python_version(),
        platform=platform.platform(),
    )
    print(", ".join(f"{key} {value}" for key, value in machine.items()) + f". `{command_line}`")
    if bench.options.json:
        report = {"benchmark": name, "command": command_line, "machine": machine, name: rows}
        text = json.dumps(nan_to_none(report), indent=1) + "\n"
        path = Path(bench.options.json)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    for row in rows:
        if row.get("broken") or row.get("note", "").startswith("FAILED"):
            return 1
    return 0


if __name__ == "__main__":
    exit_process(run_command(main, sys.argv[1:]))
