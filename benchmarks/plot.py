"""`bench.py plot`: a picture of the losses of runs and records, or of a ledger of experiments."""

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from benchmarks.compare import differing_flags, find_runs
from benchmarks.experiment import read_ledger
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
    if not path.exists():
        raise UserError(f"there is no ledger {path}; bench.py experiment --ledger writes one")
    rows = [row for row in read_ledger(path) if not row["final"]]
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
    axes: "Axes", color: str, label: str, curves: list[np.ndarray], train_curves: list[np.ndarray]
) -> None:
    """Draw the validation losses of runs in one color, and the training losses in a pale one."""
    last = np.mean([curve[1, -1] for curve in curves])
    seeds = "seed" if len(curves) == 1 else "seeds"
    axes.plot(
        [], [], color, marker=".", label=f"{label}, {len(curves)} {seeds}: final loss {last:.4f}"
    )
    for curve in curves:
        axes.plot(*curve, color, marker=".", linewidth=1)
    for curve in train_curves:
        axes.plot(*curve, color, alpha=0.3)


def draw_target(axes: "Axes", target: float, curves_of: list[list[np.ndarray]], unit: str) -> None:
    """Draw a line at a loss, and say which evaluation is first to be below it.

    curves_of: the curves of each folder, of which the mean over the runs counts.
    """
    axes.axhline(target, color="black", linewidth=0.7, linestyle="--")
    reached = []
    for curves in curves_of:
        below = [curve[0, curve[1] < target] for curve in curves]
        if all(x.size for x in below):
            reached.append(np.mean([x[0] for x in below]))
    if reached:
        text = f"{target:g} after {min(reached):.3g} {unit}"
        axes.plot(min(reached), target, "k*")
        axes.text(0.5, target, text, transform=axes.get_yaxis_transform(), ha="center", va="bottom")


def bench_plot(bench: Bench) -> None:
    """Draw the losses of runs into the folder of the first, or to --out. Raises UserError.

    A folder is a run, or holds one run per seed. Their names are --label, or the flags that differ.
    Training losses are drawn only for a single folder: several hide each other.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise UserError("bench.py plot needs matplotlib: pip install matplotlib") from None
    options = bench.options
    x, y = options.x, options.y
    folders = [Path(folder) for folder in options.folders]
    if not folders:
        raise UserError("plot takes folders of runs, such as runs/mine, or a ledger")
    is_ledger = folders[0].suffix == ".tsv"
    if is_ledger and len(folders) > 1:
        raise UserError(f"{folders[0]} is a ledger, which is drawn alone; remove the others")
    default = folders[0].with_suffix(".svg") if is_ledger else folders[0] / f"{y}.svg"
    out = Path(options.out or default)
    if out.suffix not in (".svg", ".png"):
        raise UserError(f"--out {out} is not a picture; give an .svg or .png file")
    out.parent.mkdir(parents=True, exist_ok=True)
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
    curves_of = []
    for number, (label, paths) in enumerate(zip(labels, runs)):
        rows_of_runs = [read_rows(path / "metrics.jsonl") for path in paths]
        curves = [points(rows, x, y) for rows in rows_of_runs]
        if not all(curve.size for curve in curves):
            raise UserError(
                f"{label} has no {y} over {x} yet; wait for an evaluation, or remove it"
            )
        train_curves = []
        if len(folders) == 1 and y == "val_loss":
            # Without the first 5 %, which are far above the rest
            for rows in rows_of_runs:
                train_curves.append(points(rows, x, "train_loss")[:, len(rows) // 20 :])
        draw_curve(axes, f"C{number % 10}", label, curves, train_curves)
        curves_of.append(curves)

    for target in options.target or ():
        draw_target(axes, target, curves_of, unit="s" if x == "train_time_s" else x)
    axes.set(xlabel=X_AXES[x], ylabel=f"validation loss ({Y_AXES[y]})", title=options.title)
    if options.log:
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter("{x:g}")
    title = "pale: training loss" if len(folders) == 1 else None
    axes.figure.legend(title=title, loc="outside lower left")
    axes.figure.savefig(out)
    print(f"{out}: validation loss ({Y_AXES[y]}) over {x}")
