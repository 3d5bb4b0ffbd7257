"""Measure what each optimization is worth on this machine: `python bench.py [SUBCOMMAND] [--quick] [trainer flags]`

train      (the default) the ladder: optimizations added one by one; then the full stack without each of them
loss       how much time to a loss a change of the recipe saves, over several seeds: AdamW, Muon and its switches, or
           the flags, edited checkouts, texts and sizes in --recipes FILE.json (docs/benchmarks.md)
attention  every attention backend and a naive softmax, forward and backward, over context lengths
fit        the largest micro-batch that fits, by bisection, and throughput over batch sizes
memory     weights, gradients, optimizer state and activations: by formula and measured, per checkpointing mode
data       loader throughput, its fraction of a step, prefetch depth, pinned memory; training a BPE vocabulary and
           encoding text
infer      prefill and decode: without a KV cache, with one, compiled, in int8
scaling    1, 2, 4, ... ranks of this machine (or the ranks that torchrun started this with): weak and strong scaling
profile    where a step's time goes, in six lines, and the trace
tour       the stages of docs/tour.md: training and sampling in four steps each, by the commands themselves
record DIR check a folder of records/ against the rules of its track, with mean, deviation and p-value; --pack HEAD
           turns its runs' source/ folders into source.patch: a commit and the diff against it
plot DIR   plot the losses of runs and records: plot DIR... [--x step|tokens|train_time|wall_time]
           [--y val_loss|val_bpb] [--target LOSS] [--out FILE.svg|FILE.png]

A step is the trainer's own train_step on dummy tokens. Every case runs in its own process; cases that are compared are
interleaved (A B A B) after an untimed warm-up, with the device synchronized; figures are medians (min-max). Flags of
train_gpt.py set sizes and everything else that a benchmark does not vary itself.
"""

import argparse
import json
import math
import os
import shlex
import sys
import time
from pathlib import Path

from runtime import set_environment

if __name__ == "__main__":
    set_environment(decoding=sys.argv[1:2] in (["infer"], ["tour"]))

from benchmarks.attention import bench_attention
from benchmarks.data import bench_data
from benchmarks.fit import bench_fit
from benchmarks.harness import Bench, CaseFailed, system_info, table
from benchmarks.infer import bench_infer
from benchmarks.ladder import bench_train
from benchmarks.loss import bench_loss
from benchmarks.memory import bench_memory
from benchmarks.plot import X_AXES, Y_AXES, choose_y, plot, read_curves
from benchmarks.profile import bench_profile
from benchmarks.scaling import bench_scaling
from benchmarks.tour import bench_tour
from data.shards import UserError
from records.check import COLUMNS, TRACKS, check_record, pack
from runtime.logger import nan_to_none
from runtime.ranks import exit_process
from train_gpt import make_config, parse_args

BENCHMARKS = {
    "train": bench_train,
    "loss": bench_loss,
    "attention": bench_attention,
    "fit": bench_fit,
    "memory": bench_memory,
    "data": bench_data,
    "infer": bench_infer,
    "scaling": bench_scaling,
    "profile": bench_profile,
    "tour": bench_tour,
}


def report_record(folder: str, commit: str) -> dict:
    """Print a record's row and the rules that it breaks. commit: pack its sources against this commit; "" = do not."""
    if commit:
        pack(folder, commit)
    row, notes = check_record(folder)
    notes = [f"- {reason}" for reason in row["broken"]] + notes
    print(table(f"Track {row['track']}", [row], list(COLUMNS), "\n".join(notes), COLUMNS))
    return dict(record=[row])


class Parser(argparse.ArgumentParser):
    def error(self, message):
        raise UserError(f"{message}; --help lists the flags")


def draw(argv: list[str]) -> int:
    """`plot`, which has its own flags: write the picture and report it; returns 0. Raises UserError."""
    parser = Parser(prog="bench.py plot", description="Draw losses of runs.", allow_abbrev=False)
    parser.add_argument("folders", nargs="+", metavar="RUN_OR_RECORD", help="an --out_dir, or a folder of records/")
    parser.add_argument("--x", choices=X_AXES, default="train_time", help="the horizontal axis [train_time]")
    how = "the vertical axis [val_bpb where tokenizers differ, else val_loss]"
    parser.add_argument("--y", choices=Y_AXES, help=how)
    parser.add_argument("--target", type=float, help="a loss to draw a line at [that of a record's track]")
    parser.add_argument("--out", default="plot.svg", metavar="FILE", help="ends in .svg or .png [plot.svg]")
    args = parser.parse_intermixed_args(argv)
    if args.target is not None and not math.isfinite(args.target):
        raise UserError(f"--target {args.target} is not a loss; give a number")
    curves = read_curves(args.folders)
    y = args.y or choose_y(curves)
    known = {name: target for track in TRACKS.values() for name, target in track["targets"].items()}
    names = [Path(folder).resolve().name.partition("_")[2] for folder in args.folders]
    targets = {known[name] for name in names if name in known and y == "val_loss"}  # in nats
    print(plot(curves, args.x, y, sorted(targets) if args.target is None else [args.target], args.out))
    return 0


def parse(argv: list[str]) -> tuple[str, str, argparse.Namespace, Bench]:
    """Subcommand, folder of a record ("" without one), the parsed arguments, and the Bench that a benchmark takes.

    Raises UserError.
    """
    name, folder = "train", ""
    if argv and not argv[0].startswith("-"):
        name, *argv = argv
    style = argparse.RawDescriptionHelpFormatter
    parser = Parser(prog="bench.py [SUBCOMMAND]", description=__doc__, allow_abbrev=False, formatter_class=style)
    parser.add_argument("--quick", action="store_true", help="smaller sizes, fewer repeats: a first look")
    parser.add_argument("--repeats", type=int, default=0, help="measurements of each case [5; 3 with --quick]")
    parser.add_argument("--limit_mb", type=int, default=0, help="memory that a case may use, in MiB [all there is]")
    parser.add_argument("--json", default="", metavar="FILE", help="write all measurements to this file")
    parser.add_argument("--pack", default="", metavar="COMMIT", help="record: store source/ as a diff against it")
    parser.add_argument("--recipes", default="", metavar="FILE", help="loss: what to compare [AdamW, Muon, switches]")
    if "WORLD_SIZE" in os.environ and name != "scaling":
        raise UserError(f"{name} starts its own processes; use python instead of torchrun (scaling takes both)")
    if name not in (*BENCHMARKS, "record"):
        raise UserError(f"there is no benchmark {name!r}; expected one of {', '.join((*BENCHMARKS, 'record', 'plot'))}")
    if name == "record" and argv and not argv[0].startswith("-"):
        folder, *argv = argv
    args, rest = parser.parse_known_args(argv)
    if args.repeats < 0 or args.limit_mb < 0:
        raise UserError("--repeats and --limit_mb cannot be negative")
    if args.recipes and name != "loss":
        raise UserError("--recipes is for loss only; remove it")
    if args.pack and name != "record":
        raise UserError("--pack is for the sources of a record; remove it")
    if args.json and (not Path(args.json).resolve().parent.is_dir() or Path(args.json).is_dir()):
        raise UserError(f"--json {args.json} is a folder or not in one; give a file's name in a folder that exists")
    flags = {"preset": "laptop"} if name == "loss" else {}  # with other presets it takes hours
    repeats = args.repeats or (3 if args.quick else 5)
    bench = Bench(flags | parse_args(rest), args.quick, repeats, args.limit_mb, args.recipes)
    if bench.flags.get("minutes"):
        raise UserError("--minutes chooses by the speed of the moment, and benchmarks compare equal runs; remove it")
    make_config(**bench.flags)
    return name, folder, args, bench


def main(argv: list[str]) -> int:
    """The command line; returns the exit code: 0 done, 1 a case failed or rules are broken, 2 a user's mistake."""
    try:
        if argv[:1] == ["plot"]:
            return draw(argv[1:])
        name, folder, args, bench = parse(argv)
        t0 = time.perf_counter()
        measured = report_record(folder, args.pack) if name == "record" else BENCHMARKS[name](bench)
    except (UserError, CaseFailed) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2 if isinstance(error, UserError) or error.kind == "refused" else 1
    if measured is None:  # rank 0 reports
        return 0
    about = {
        "benchmark": name,
        "command": shlex.join(["python", "bench.py", *argv]),
        "time": time.strftime("%Y-%m-%dT%H:%M:%S"),
        "flags": bench.flags,
        "quick": bench.quick,
        "repeats": bench.repeats,
        "machine": system_info(bench.device),
        "took_s": time.perf_counter() - t0,
    }
    print(", ".join(f"{k} {v}" for k, v in about["machine"].items() if v is not None) + f". `{about['command']}`")
    if args.json:
        Path(args.json).write_text(json.dumps(nan_to_none(about | measured), indent=1) + "\n", encoding="utf-8")
    rows = [row for rows in measured.values() if isinstance(rows, list) for row in rows]
    return 1 if any(row.get("broken") or str(row.get("note")).startswith("FAILED") for row in rows) else 0


if __name__ == "__main__":
    exit_process(main(sys.argv[1:]))
