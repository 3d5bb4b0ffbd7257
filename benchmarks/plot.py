"""`bench.py plot`: a picture of the losses of runs, records, and nanoGPT's logs beside them."""

import csv
import gzip
import re
from pathlib import Path
from statistics import mean

import numpy as np

from benchmarks.harness import Bench
from common.errors import UserError
from runtime.log import read_rows

X_AXES = dict(step="step", tokens="training tokens", train_time_s="training time (s)")
VERDICTS = dict(keep="oC2", discard="oC7", crash="xC3")  # markers
Y_AXES = dict(val_loss="nats per token", val_bpb="bits per byte")


def read_nanogpt(log: str) -> list[dict]:
    """Convert the output of nanoGPT's train.py to rows as in metrics.jsonl; none for other logs.

    "iter N" is the loss before update N + 1, "step N" an evaluation after N updates. Some
    iterations include an evaluation, so the time per update is the mean of the others.
    """
    iterations = re.findall(r"^iter (\d+): loss (\d+\.\d+), time (\d+\.\d+)ms", log, re.M)
    evaluations = dict(re.findall(r"^step (\d+): train loss \S+, val loss (\d+\.\d+)", log, re.M))
    batch = re.search(r"^tokens per iteration will be: ([\d,]+)", log, re.M)
    update_ms = [float(ms) for step, _, ms in iterations if step not in evaluations]
    if batch is None or not update_ms:
        return []

    update_s = mean(update_ms) / 1000
    evaluations.pop("0", None)  # the loss of an untrained model stretches the axes
    rows = [dict(step=int(step), val_loss=float(loss)) for step, loss in evaluations.items()]
    rows += [dict(step=int(step) + 1, train_loss=float(loss)) for step, loss, _ in iterations]
    for row in rows:
        row["train_time_s"] = row["step"] * update_s
        row["tokens"] = row["step"] * int(batch[1].replace(",", ""))
    return rows


def read_curves(folders: list[str]) -> dict[str, list[list[dict]]]:
    """Read the curves to draw: name -> the rows of each of its runs. Raises UserError.

    A folder is a run or holds one run per seed. nanoGPT's logs in its baseline/ are a second curve.
    """
    curves = {}
    for folder in map(Path, folders):
        files = sorted(folder.glob("metrics.jsonl")) or sorted(folder.glob("seed_*/metrics.jsonl"))
        if not files:
            raise UserError(
                f"{folder} holds neither metrics.jsonl nor seed_*/metrics.jsonl; give a run"
            )
        curves[str(folder)] = [read_rows(file.read_text()) for file in files]
        logs = []
        for path in sorted(folder.glob("baseline/*.txt.gz")):
            log = gzip.decompress(path.read_bytes()).decode()
            logs.append(read_nanogpt(log))
        if any(logs):
            curves[f"nanoGPT's recipe beside {folder}"] = logs
    return curves


def draw_ledger(axes, path: Path) -> None:
    """Draw a ledger: the score of each experiment, and the best so far, relative to the first base.

    An edit that was kept is part of the next base.
    """
    with open(path, encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file, delimiter="\t"))
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


def draw_curve(axes, color: str, name: str, runs: list[list[dict]], options) -> None:
    """Draw the losses of runs in one color. Raises UserError if one has none yet."""
    x, y = options.x, options.y
    curves = [points(rows, x, y) for rows in runs]
    if not all(curve.size for curve in curves):
        raise UserError(f"{name} has no {y} over {x} yet; wait for an evaluation, or remove it")
    last = np.mean([curve[1, -1] for curve in curves])
    seeds = "seed" if len(runs) == 1 else "seeds"
    label = f"{name}, {len(runs)} {seeds}: {last:.4f}"
    for rows, curve in zip(runs, curves):
        if y == "val_loss":
            # Without the first 5 %, which are far above the rest
            train = points(rows, x, "train_loss")[:, len(rows) // 20 :]
            axes.plot(*train, color, alpha=0.3)
        axes.plot(*curve, color, linewidth=1, label=label)
        label = None  # one label for all seeds


def bench_plot(bench: Bench) -> None:
    """Draw the losses of runs. Raises UserError."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise UserError("bench.py plot needs matplotlib: pip install matplotlib") from None
    options = bench.options
    out = Path(options.out)
    if not options.folders or out.suffix not in (".svg", ".png"):
        raise UserError("plot takes folders of runs; give some, and an .svg or .png file as --out")
    axes = Figure(figsize=(7.2, 4.2), dpi=150, layout="constrained").add_subplot()
    first = Path(options.folders[0])
    if first.suffix == ".tsv":
        draw_ledger(axes, first)
        axes.figure.savefig(out)
        print(f"{out}: the experiments of {first}")
        return
    for number, (name, runs) in enumerate(read_curves(options.folders).items()):
        draw_curve(axes, f"C{number % 10}", name, runs, options)
    if options.target:
        axes.axhline(options.target, color="black", label="target")
    axes.set(xlabel=X_AXES[options.x], ylabel=f"validation loss ({Y_AXES[options.y]})")
    axes.legend(title="pale: training loss")
    axes.figure.savefig(out)
    print(f"{out}: validation loss ({Y_AXES[options.y]}) over {options.x}")
