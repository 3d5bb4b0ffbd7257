"""Measure the effect of flags and edits on this machine: `python bench.py [SUBCOMMAND] [flags]`

train      (the default) the ladder: systems flags added one by one, what is slower is not kept.
           --cases attention: each attention backend over lengths of sequences
           --cases memory: each mode of activation checkpointing
           --flags="...": a case each, such as --flags="--attn flex --compile"; one is compared
           with none. --ranks 1,2,4: each case under torchrun, on so many ranks
experiment compare an edit with a base: losses, time, and a row in --ledger
           (keep, discard or crash). Each --flags="..." is one side: trainer flags, optionally after
           the folder of an edited checkout (docs/changing.md). --final: on validation tokens
           that no other experiment reads
compare RUN... a table of runs: losses, steps, time, machine, and the flags that differ
plot RUN... or LEDGER.tsv: a picture of losses, in the first run's folder, or beside the ledger:
           [--x ...] [--y ...] [--log] [--target LOSS]... [--label NAME]... [--title TEXT]
           [--out FILE]
record DIR check a folder of records/ against the rules of its track; --pack HEAD replaces its runs'
           source/ folders by source.patch (a commit and a diff); --rerun SEED trains that seed
           again with the record's source (on --data DIR), into rerun_SEED

On one core of a busy AMD EPYC, with the preset laptop, the ladder takes 13 minutes, --cases
attention takes 3, --cases memory 2, each --flags 1. experiment and --rerun take as long as their
runs, the others seconds.

A step is the trainer's own train_step. Compared cases run in their own processes, interleaved
(A B A B); figures are medians (min-max). Trainer flags apply to all cases; on a GPU the default
preset of train is gpt2-small. `train_gpt.py --profile` says where the time of a step goes.
"""

import argparse
import itertools
import json
import platform
import shlex
import sys
from pathlib import Path

from runtime import set_environment

if __name__ == "__main__":
    set_environment()

import torch

from benchmarks.compare import bench_compare
from benchmarks.experiment import bench_experiment
from benchmarks.harness import Bench, table, trainer_flags
from benchmarks.plot import X_AXES, Y_AXES, bench_plot
from benchmarks.train import CASES, bench_train
from common.errors import UserError, exit_process, run_command
from common.values import cpu_cores, nan_to_none
from records.check import check_record, pack
from records.rerun import rerun
from runtime.device import device_name


def bench_record(bench: Bench) -> list[dict]:
    """Check a record's folder; print its row and the violated rules."""
    if len(bench.options.folders) != 1:
        raise UserError("record takes one folder, such as records/laptop/DATE_shakespeare-1.4697")
    folder = bench.options.folders[0]
    if bench.options.pack:
        pack(folder, bench.options.pack)
    if bench.options.rerun is not None:
        print(f"--rerun executes the source in {folder}")
        rerun(folder, bench.options.rerun, bench.flags.get("data", ""))
    row, notes = check_record(folder)
    broken = [f"- {reason}" for reason in row["broken"]]
    print(table("Record", [row], "\n".join(broken + notes)))
    return [row]


BENCHMARKS = dict(
    train=bench_train,
    experiment=bench_experiment,
    compare=bench_compare,
    plot=bench_plot,
    record=bench_record,
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

    def numbers(text: str) -> list[int]:
        found = [int(word) for word in text.split(",")]
        if min(found) < 1:
            raise ValueError
        return found

    add("--repeats", type=int, default=5, help="measurements per case, or seeds of experiment [5]")
    add("--json", default="", metavar="FILE", help="write all measurements to this file")
    add("--data", nargs="+", default=[], metavar="DIR", help="dataset; experiment: one or more")
    add(
        "--flags",
        action="append",
        default=[],
        help="a case of train, or a side of experiment, such as '--softcap 0'",
    )
    add("--cases", choices=CASES, help="train: a list of cases instead of the ladder")
    add("--ranks", type=numbers, metavar="N,...", help="train: under torchrun, such as 1,2,4")
    add("--ledger", default="", metavar="FILE", help="experiment: append a row to this .tsv file")
    add("--describe", default="", metavar="TEXT", help="experiment: description for the ledger")
    add("--final", action="store_true", help="experiment: validate on the holdout, seldom")
    add(
        "--pack",
        default="",
        metavar="COMMIT",
        help="record: store source/ as a diff from this commit",
    )
    add("--rerun", type=int, metavar="SEED", help="record: execute its source for this seed")
    add("--x", choices=X_AXES, default="train_time_s", help="plot: horizontal axis [train_time_s]")
    add("--y", choices=Y_AXES, default="val_loss", help="plot: vertical axis [val_loss]")
    add("--log", action="store_true", help="plot: logarithmic horizontal axis")
    add(
        "--target",
        type=float,
        action="append",
        metavar="LOSS",
        help="plot: draw a line at this loss, and mark what is first below it",
    )
    add(
        "--label",
        action="append",
        metavar="NAME",
        help="plot: name of a folder in the picture, one for each",
    )
    add("--title", default="", metavar="TEXT", help="plot: title of the picture")
    add("--out", default="", help="plot: an .svg or .png file [RUN/val_loss.svg]")
    return parser


def parse(argv: list[str]) -> tuple[str, Bench]:
    """Read the command line: the subcommand and its Bench. Raises UserError."""
    words = list(itertools.takewhile(lambda word: not word.startswith("-"), argv))
    name = words[0] if words else "train"
    folders = words[1:]
    if name not in BENCHMARKS or (folders and name in ("train", "experiment")):
        raise UserError(
            f"there is no benchmark {' '.join(words)!r}; expected one of {', '.join(BENCHMARKS)}"
        )
    parser = get_args_parser()
    options, words_of_trainer = parser.parse_known_args(argv[len(words) :])
    options.folders = folders
    flags = trainer_flags(words_of_trainer)
    # Options without effect. The help of one that belongs to a subcommand begins with its name
    for action in parser._actions:
        owner = str(action.help).partition(":")[0]
        is_given = getattr(options, action.dest, None) != action.default
        if owner in BENCHMARKS and owner != name and is_given:
            raise UserError(f"{action.option_strings[0]} is for {owner}, not {name}; remove it")
    trains = name in ("train", "experiment")
    if not trains and (flags or options.flags or (options.data and name != "record")):
        raise UserError(f"{name} trains nothing; remove the flags of the trainer")
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
