"""`bench.py plot`: a picture of the losses of runs and records, or of a ledger of experiments."""

import argparse
import csv
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from benchmarks.compare import differing_flags, find_runs
from benchmarks.harness import Bench
from common.errors import UserError
from runtime.log import read_rows

if TYPE_CHECKING:
    from matplotlib.axes import Axes

X_AXES = dict(step="step", tokens="training tokens", train_time_s="training time (s)")
VERDICTS = dict(keep="oC2", discard="oC7", crash="xC3")  # markers
Y_AXES = dict(val_loss="nats per token", val_bpb="bits per byte")


def draw_ledger(axes: "Axes", path: Path) -> None:
    """Draw a ledger: the score of each experiment, and the best so far, relative to the first base.

    An edit that was kept is part of the next base.
    """
    with open(path, encoding="utf-8", newline="") as file:
        rows = [row for row in csv.DictReader(file, delimiter="\t") if not row["final"]]
    best = [1.0]
    for number, row in enumerate(rows, 1):
        score = best[-1] * float(row["score"] or 1)
        axes.plot(number, score, VERDICTS[row["verdict"]])
        best.append(score if row["verdict"] == "keep" else best[-1])
    axes.step(range(len(best)), best, "C2", where="post", label="best so far")
    axes.set(xlabel=f"experiments of {path}", ylabel="loss relative to the first base")
    axes.legend(title="green: kept; grey: discarded; x: crashed")


def points(rows: list[dict], x: str, y: str) -> np.ndarray:
    """Return x and y of the rows that have both, (2, n)."""
    pairs = [(row[x], row[y]) for row in rows if None not in (row.get(x), row.get(y))]
    return np.array(pairs, dtype=float).reshape(-1, 2).T


def draw_curve(
    axes: "Axes", color: str, label: str, runs: list[Path], options: argparse.Namespace
) -> None:
    """Draw the losses of runs in one color. Raises UserError if one has none yet."""
    x, y = options.x, options.y
    rows_of_runs = [read_rows(run / "metrics.jsonl") for run in runs]
    curves = [points(rows, x, y) for rows in rows_of_runs]
    if not all(curve.size for curve in curves):
        raise UserError(f"{label} has no {y} over {x} yet; wait for an evaluation, or remove it")
    last = np.mean([curve[1, -1] for curve in curves])
    seeds = "seed" if len(runs) == 1 else "seeds"
    label = f"{label}, {len(runs)} {seeds}: {last:.4f}"
    for rows, curve in zip(rows_of_runs, curves):
        if y == "val_loss":
            # Without the first 5 %, which are far above the rest
            train = points(rows, x, "train_loss")[:, len(rows) // 20 :]
            axes.plot(*train, color, alpha=0.3)
        axes.plot(*curve, color, linewidth=1, label=label)
        label = None  # one label for all seeds


def bench_plot(bench: Bench) -> None:
    """Draw the losses of runs into the folder of the first, or to --out. Raises UserError.

    A folder is a run, or holds one run per seed. Their names are --label, or the flags that differ.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise UserError("bench.py plot needs matplotlib: pip install matplotlib") from None
    options = bench.options
    folders = [Path(folder) for folder in options.folders]
    if not folders:
        raise UserError("plot takes folders of runs, such as runs/mine, or a ledger")
    is_ledger = folders[0].suffix == ".tsv"
    default = folders[0].with_suffix(".svg") if is_ledger else folders[0] / f"{options.y}.svg"
    out = Path(options.out or default)
    if out.suffix not in (".svg", ".png"):
        raise UserError(f"--out {out} is not a picture; give an .svg or .png file")
    axes = Figure(figsize=(7.2, 4.2), dpi=150, layout="constrained").add_subplot()
    if is_ledger:
        draw_ledger(axes, folders[0])
        axes.figure.savefig(out)
        print(f"{out}: the experiments of {folders[0]}")
        return

    runs = [find_runs(folder) for folder in folders]
    flags = differing_flags([paths[0] for paths in runs])
    labels = options.label or [text or str(name) for text, name in zip(flags, folders)]
    if len(labels) != len(runs):
        raise UserError(f"there are {len(labels)} --label for {len(runs)} folders; give one each")
    for number, (label, paths) in enumerate(zip(labels, runs)):
        draw_curve(axes, f"C{number % 10}", label, paths, options)
    if options.target:
        axes.axhline(options.target, color="black", label="target")
    axes.set(xlabel=X_AXES[options.x], ylabel=f"validation loss ({Y_AXES[options.y]})")
    axes.legend(title="pale: training loss")
    axes.figure.savefig(out)
    print(f"{out}: validation loss ({Y_AXES[options.y]}) over {options.x}")
