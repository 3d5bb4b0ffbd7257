"""`bench.py plot`: validation losses of runs, of records and of nanoGPT's logs beside them, as one picture."""

import gzip
import re
from pathlib import Path

import numpy as np

from benchmarks.harness import Bench
from common import UserError, printable
from runtime.log import read_rows

X_AXES = dict(
    step="step", tokens="training tokens", train_time="training time (s)", wall_time="wall time (s)"
)
Y_AXES = dict(val_loss="nats per token", val_bpb="bits per byte")


def read_nanogpt(log: str) -> list[dict]:
    """Rows as in metrics.jsonl, from what nanoGPT's train.py prints; none from other logs.

    "iter N" is the loss before update N + 1, "step N" an evaluation after N updates. The time of an iteration that
    evaluates includes that: training is charged the median of the others.
    """
    found = re.findall(r"^iter (\d+): loss (\d+\.\d+), time (\d+\.\d+)ms", log, re.M)
    evaluations = re.findall(r"^step (\d+): train loss \S+, val loss (\d+\.\d+)", log, re.M)
    batch = re.search(r"^tokens per iteration will be: ([\d,]+)", log, re.M)
    steps, losses, ms = np.array(found, dtype=float).reshape(-1, 3).T + [[1], [0], [0]]
    evaluates = np.isin(steps - 1, [int(step) for step, _ in evaluations])
    if evaluates.all():
        return []
    typical = np.where(evaluates, np.median(ms[~evaluates]), ms)
    train_s = np.cumsum(typical * np.diff(steps, prepend=0)) / 1000
    clocks = dict(train_time_s=train_s, wall_time_s=train_s + np.cumsum(ms - typical) / 1000)
    # Not of step 0: the loss of an untrained model stretches the axes
    rows = [dict(step=int(step), val_loss=float(loss)) for step, loss in evaluations if int(step)]
    rows += [dict(step=step, train_loss=loss) for step, loss in zip(steps, losses)]
    for row in rows:
        row |= {
            key: float(np.interp(row["step"], [0, *steps], [0, *clock]))
            for key, clock in clocks.items()
        }
        row["tokens"] = row["step"] * int(batch[1].replace(",", "")) if batch else None
    return rows


def read_curves(folders: list[str]) -> dict[str, list[list[dict]]]:
    """What to draw: a name -> the rows of a run, or of each seed's run. Raises UserError."""
    curves = {}
    for folder in map(Path, folders):
        files = sorted(folder.glob("metrics.jsonl")) or sorted(folder.glob("seed_*/metrics.jsonl"))
        if not files:
            raise UserError(
                f"{folder} holds no metrics.jsonl and no seed_*/metrics.jsonl; give the folder of a run"
            )
        curves[str(folder)] = [read_rows(file.read_text()) for file in files]
        logs = [
            read_nanogpt(gzip.open(log, "rt").read())
            for log in sorted(folder.glob("baseline/*.txt.gz"))
        ]
        if any(logs) and logs not in curves.values():  # two records can have the same logs
            curves[f"nanoGPT's recipe beside {folder}"] = logs
    return curves


def points(rows: list[dict], x: str, y: str) -> np.ndarray:
    """x and y of the rows that have both, (2, n)."""
    x = x if x in ("step", "tokens") else f"{x}_s"
    found = [(row[x], row[y]) for row in rows if None not in (row.get(x), row.get(y))]
    return np.array(found, dtype=float).reshape(-1, 2).T


def bench_plot(bench: Bench) -> None:
    """Draw the losses of runs. Raises UserError, also where matplotlib is missing."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise UserError(
            "bench.py plot needs matplotlib; install it with `pip install matplotlib`"
        ) from None
    x, y, out = bench.options.x, bench.options.y, Path(bench.options.out)
    if not bench.options.folders or out.suffix not in (".svg", ".png"):
        raise UserError("plot takes folders of runs, and --out a name that ends in .svg or .png")
    axes = Figure(figsize=(7.2, 4.2), dpi=150, layout="constrained").add_subplot()
    for number, (name, runs) in enumerate(read_curves(bench.options.folders).items()):
        seeds = [points(rows, x, y) for rows in runs]
        if not all(seed.size for seed in seeds):
            raise UserError(
                f"{name} has no {y} over {x} yet; wait for its first evaluation, or leave it out"
            )
        last, color = np.mean([seed[1, -1] for seed in seeds]), f"C{number % 10}"
        label = f"{printable(name)}, {len(runs)} seed{'s' * (len(runs) > 1)}: {last:.4f}".lstrip(
            "_"
        )
        for rows, seed in zip(runs, seeds):
            train = points(rows, x, "train_loss")[
                :, len(rows) // 20 :
            ]  # the first twentieth is far above the rest
            if y == "val_loss":
                axes.plot(*train, color, linewidth=0.7, alpha=0.3)
            axes.plot(*seed, color, linewidth=1, label=label if seed is seeds[0] else None)
            axes.plot(*seed[:, -1:], f"o{color}", markersize=5)
    if bench.options.target:
        axes.axhline(
            bench.options.target,
            color="black",
            linestyle="--",
            label=f"target {bench.options.target:g}",
        )
    axes.set(xlabel=X_AXES[x], ylabel=f"validation loss ({Y_AXES[y]})")
    axes.legend(title="thin: training loss", fontsize=8)
    axes.figure.savefig(out)
    print(f"{out}: validation loss ({Y_AXES[y]}) over {x}")
