"""Measure what each flag is worth on this machine: `python bench.py [SUBCOMMAND] [--quick] [trainer flags]`

train      (the default) the ladder: systems flags added one by one; then the full stack without each of them
loss       A against B over several seeds: time and steps to a loss, mean, deviation, p. Each --flags="..." is a side:
           trainer flags, after the folder of an edited checkout if it begins with one
attention  every attention backend and a naive softmax, forward and backward, over context lengths
memory     measured peaks: weights, gradients, optimizer state and activations, per checkpointing mode
data       loader throughput, and how long a step waits for it
infer      prefill and decode: without a KV cache, with one, compiled, in int8
scaling    1, 2, 4, ... ranks of this machine (or the ranks that torchrun started this with): weak and strong scaling
profile    where a step's time goes, in six lines, and the trace
record DIR check a folder of records/ against the rules of its track; --pack HEAD turns its runs' source/ folders into
           source.patch: a commit and the diff against it
plot DIR   plot the validation losses of runs and records: plot DIR... [--x ...] [--y ...] [--target LOSS] [--out FILE]

A step is the trainer's own train_step. Cases run in processes of their own, and those that are compared are interleaved
(A B A B); figures are medians (min-max). Trainer flags set what a benchmark does not vary itself.
"""

import argparse
import dataclasses
import json
import os
import platform
import shlex
import sys
from pathlib import Path

from runtime import set_environment

if __name__ == "__main__":
    set_environment(decoding=sys.argv[1:2] == ["infer"])

import torch

from benchmarks.attention import bench_attention
from benchmarks.data import bench_data
from benchmarks.harness import Bench, table
from benchmarks.infer import bench_infer
from benchmarks.ladder import bench_train
from benchmarks.loss import bench_loss
from benchmarks.memory import bench_memory
from benchmarks.plot import X_AXES, Y_AXES, bench_plot
from benchmarks.profile import bench_profile
from benchmarks.scaling import bench_scaling
from common import UserError, exit_process, nan_to_none, report_error
from records.check import COLUMNS, check_record, pack
from runtime.device import cpu_cores, device_name
from runtime.flags import parse_flags
from train_gpt import Config


def bench_record(bench: Bench) -> dict:
    """A record's row, and the rules that it breaks."""
    folder = "".join(bench.options.folders)
    if bench.options.pack:
        pack(folder, bench.options.pack)
    row, notes = check_record(folder)
    shown = {
        heading: format(row[key], form)
        for key, (heading, form) in COLUMNS.items()
        if row[key] is not None
    }
    notes = [f"- {reason}" for reason in row["broken"]] + notes
    print(table(f"Track {row['track']}", [shown], "\n".join(notes)))
    return dict(record=[row])


BENCHMARKS = dict(
    train=bench_train,
    loss=bench_loss,
    attention=bench_attention,
    memory=bench_memory,
    data=bench_data,
)
BENCHMARKS |= dict(infer=bench_infer, scaling=bench_scaling, profile=bench_profile)
BENCHMARKS |= dict(record=bench_record, plot=bench_plot)


def parse(argv: list[str]) -> tuple[str, Bench]:
    """Subcommand, and what the benchmark takes. Raises UserError."""
    n_words = next((i for i, word in enumerate(argv) if word.startswith("-")), len(argv))
    name, *folders = argv[:n_words] or ["train"]
    if name not in BENCHMARKS or folders and name not in ("record", "plot"):
        raise UserError(
            f"there is no benchmark {' '.join(argv[:n_words])!r}; expected one of {', '.join(BENCHMARKS)}"
        )
    if "WORLD_SIZE" in os.environ and name != "scaling":
        raise UserError(
            f"{name} starts its own processes; use python instead of torchrun (scaling takes both)"
        )
    style = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        "bench.py", description=__doc__, allow_abbrev=False, formatter_class=style
    )
    parser.add_argument(
        "--quick", action="store_true", help="smaller sizes, fewer repeats: a first look"
    )
    parser.add_argument("--repeats", type=int, help="measurements of each case, seeds [5; quick 3]")
    parser.add_argument(
        "--json", default="", metavar="FILE", help="write all measurements to this file"
    )
    parser.add_argument(
        "--flags", action="append", default=[], help="loss: a side, as in --flags='--softcap 0'"
    )
    parser.add_argument(
        "--pack", default="", metavar="COMMIT", help="record: store source/ as a diff against it"
    )
    parser.add_argument(
        "--x", choices=X_AXES, default="train_time", help="plot: the horizontal axis [train_time]"
    )
    parser.add_argument(
        "--y", choices=Y_AXES, default="val_loss", help="plot: the vertical axis [val_loss]"
    )
    parser.add_argument("--target", type=float, help="plot: a loss to draw a line at")
    parser.add_argument(
        "--out", default="plot.svg", help="plot: a file that ends in .svg or .png [plot.svg]"
    )
    options, rest = parser.parse_known_args(argv[n_words:])
    if options.json and not Path(options.json).resolve().parent.is_dir():
        raise UserError(f"--json {options.json} is not in a folder that exists; give another name")
    flags = parse_flags(rest, dataclasses.fields(Config), {}, "")
    return name, Bench(flags, argparse.Namespace(**vars(options), folders=folders))


def main(argv: list[str]) -> int:
    """The command line; returns the exit code: 0 done, 1 a case failed or rules are broken, 2 a user's mistake."""
    try:
        name, bench = parse(argv)
        measured = BENCHMARKS[name](bench)
    except Exception as error:
        return report_error(error)
    if measured is None:  # a picture, or a rank that does not report
        return 0
    command = shlex.join(["python", "bench.py", *argv])
    machine = dict(device=f"{bench.device.type} ({device_name(bench.device)})", cores=cpu_cores())
    machine |= dict(
        torch=torch.__version__, python=platform.python_version(), platform=platform.platform()
    )
    print(", ".join(f"{key} {value}" for key, value in machine.items()) + f". `{command}`")
    if bench.options.json:
        report = dict(benchmark=name, command=command, machine=machine) | measured
        Path(bench.options.json).write_text(
            json.dumps(nan_to_none(report), indent=1) + "\n", encoding="utf-8"
        )
    return int(
        any(row.get("broken") or row.get("note", "").startswith("FAILED") for row in measured[name])
    )


if __name__ == "__main__":
    exit_process(main(sys.argv[1:]))
