"""`bench.py plot`: validation losses of runs, of records and of nanoGPT's logs beside them, as one picture."""

import gzip
import io
import math
import re
from pathlib import Path

import numpy as np

from data.shards import UserError, atomic_write
from generation import printable
from runtime.logger import read_rows

X_AXES = {  # --x -> key in metrics.jsonl, the axis' label
    "step": ("step", "step"),
    "tokens": ("tokens", "training tokens"),
    "train_time": ("train_time_s", "training time (s)"),
    "wall_time": ("wall_time_s", "wall time (s)"),
}
Y_AXES = {"val_loss": "nats per token", "val_bpb": "bits per byte"}  # --y -> unit
STYLES = ("-", "--", "-.", ":")  # for the first, second, ... turn of matplotlib's ten colors
MOST_POINTS = 300  # per line; longer ones are averaged


def read_text(path: Path) -> str:
    """The text of a file, decompressed if its name ends in .gz. Raises UserError."""
    try:
        content = path.read_bytes()
        return (gzip.decompress(content) if path.suffix == ".gz" else content).decode("utf-8", errors="replace")
    except (OSError, EOFError) as error:
        raise UserError(f"{path} cannot be read ({error}); give folders whose files you may read") from None


def read_nanogpt(log: str) -> list[dict]:
    """Rows as in metrics.jsonl, from what nanoGPT's train.py prints; none from other logs.

    "iter N" is the loss before update N + 1, "step N" an evaluation after N updates. The time of an iteration that
    evaluates includes that: training is charged the median of the others.
    """
    found = re.findall(r"^iter (\d+): loss (\d+\.\d+|nan), time (\d+\.\d+)ms", log, re.M)
    evaluations = re.findall(r"^step (\d+): train loss \S+, val loss (\d+\.\d+|nan)", log, re.M)
    batch = re.search(r"^tokens per iteration will be: ([\d,]+)", log, re.M)
    steps, losses, ms = np.array(found, dtype=float).reshape(-1, 3).T + [[1], [0], [0]]
    evaluates = np.isin(steps - 1, [int(step) for step, _ in evaluations])
    if evaluates.all():
        return []
    typical = np.where(evaluates, np.median(ms[~evaluates]), ms)
    train_s = np.cumsum(typical * np.diff(steps, prepend=0)) / 1000
    wall_s = train_s + np.cumsum(ms - typical) / 1000
    rows = [dict(step=int(step), train_loss=float(loss)) for step, loss in zip(steps, losses)]
    rows += [dict(step=int(step), val_loss=float(loss)) for step, loss in evaluations]
    for key, clock in (("train_time_s", train_s), ("wall_time_s", wall_s)):
        for row, seconds in zip(rows, np.interp([row["step"] for row in rows], [0, *steps], [0, *clock])):
            row[key] = float(seconds)
    tokens = int(batch[1].replace(",", "")) if batch else math.nan
    return [row | dict(tokens=tokens * row["step"]) for row in rows]


def read_curves(folders: list[str]) -> dict[str, list[list[dict]]]:
    """What to draw: a name -> the rows of a run, or of each seed's run. Raises UserError."""
    curves, names = {}, [Path(folder).resolve().name for folder in folders]
    for folder, name in zip(folders, names):
        files = sorted(Path(folder).glob("metrics.jsonl")) or sorted(Path(folder).glob("seed_*/metrics.jsonl"))
        if not files:
            raise UserError(
                f"{folder} holds no metrics.jsonl and no seed_*/metrics.jsonl; give the --out_dir of a run or a folder "
                "of records/"
            )
        curves[name if names.count(name) == 1 else folder] = [read_rows(read_text(file)) for file in files]
        logs = [read_nanogpt(read_text(log)) for log in sorted(Path(folder).glob("baseline/*.txt.gz"))]
        if any(logs) and logs not in curves.values():  # two records can have the same logs
            recipe = "nanoGPT's recipe"
            curves[recipe if recipe not in curves else f"{recipe} beside {name}"] = logs
    return curves


def bits_per_nat(rows: list[dict]) -> float:
    """val_bpb over val_loss, the same in all of a run's rows; nan where bytes are not known."""
    found = [row["val_bpb"] / row["val_loss"] for row in rows if row.get("val_bpb") and row.get("val_loss")]
    return found[-1] if found else math.nan


def choose_y(curves: dict[str, list[list[dict]]]) -> str:
    """Bits per byte if tokenizers differ and all runs have them; else nats."""
    ratios = [bits_per_nat(rows) for runs in curves.values() for rows in runs]
    return "val_bpb" if max(ratios) > 1.001 * min(ratios) and not any(map(math.isnan, ratios)) else "val_loss"


def in_bits(rows: list[dict]) -> list[dict]:
    """The rows with losses in bits per byte; training losses use the validation split's bytes per token."""
    ratio = bits_per_nat(rows)
    return [row | {key: row[key] * ratio for key in ("train_loss", "val_loss") if row.get(key)} for row in rows]


def points(rows: list[dict], x: str, loss: str) -> np.ndarray:
    """x and loss (2 x n) of the rows that hold both, by step; the last row of a step that was run twice.

    Not of step 0: the loss of an untrained model says nothing and stretches the axes.
    """
    found = {}
    for row in rows:
        values = [row.get(key) for key in ("step", x, loss)]
        if all(isinstance(value, (int, float)) and abs(value) < math.inf for value in values) and values[0] > 0:
            found[values[0]] = values[1:]
    return np.array([found[step] for step in sorted(found)], dtype=float).reshape(-1, 2).T


def mean_and_band(seeds: list[np.ndarray]) -> np.ndarray:
    """x, mean, minimum and maximum (4 x n) over the seeds' `points`, from where all have begun to where the first ends.

    Their losses are interpolated linearly at every x of any of them.
    """
    first, last = max(seed[0, 0] for seed in seeds), min(seed[0, -1] for seed in seeds)
    x = np.unique(np.concatenate([seed[0] for seed in seeds]))
    x = x[(x >= first) & (x <= last)]
    losses = np.array([np.interp(x, *seed) for seed in seeds])
    return np.array([x, losses.mean(0), losses.min(0), losses.max(0)])


def thinned(lines: np.ndarray) -> np.ndarray:
    """At most MOST_POINTS columns: means of neighbours."""
    if lines.shape[1] <= MOST_POINTS:
        return lines
    return np.stack([part.mean(1) for part in np.array_split(lines, MOST_POINTS, axis=1)], axis=1)


def draw_curve(axes, label: str, train: list[np.ndarray], val: list[np.ndarray], look: dict) -> list[np.ndarray]:
    """Draw the `points` of a curve's seeds; returns those that the picture must show, each 2 x n."""
    shown, dots = [], dict(marker="o", markersize=5, zorder=4)
    axes.plot([], [], label=label, **dots, **look)
    if train:
        line = thinned(mean_and_band(train))
        axes.plot(line[0], line[1], linewidth=0.8, alpha=0.4, **look)
        shown.append(line[:2, -(-line.shape[1] // 20) :])  # the first twentieth is far above the rest
    if val:
        line, ends = thinned(mean_and_band(val)), np.stack([seed[:, -1] for seed in val], axis=1)
        axes.fill_between(line[0], line[2], line[3], color=look["color"], alpha=0.2, linewidth=0)
        axes.plot(line[0], line[1], **look)
        axes.plot(ends[0], ends[1], color=look["color"], linestyle="", **dots)
        shown += [line[[0, 1]], line[[0, 2]], line[[0, 3]], ends]
    return [line for line in shown if line.size] or [train[0]]


def set_axes(axes, shown: list[np.ndarray], targets: list[float], x: str, y: str) -> None:
    """Limits, ticks, labels and lines at the targets."""
    from matplotlib import ticker

    ends, losses = [line[0].max() for line in shown], np.concatenate([*(line[1] for line in shown), targets])
    axes.set_xlim(0, max(ends) * 1.03)
    if max(ends) > 20 * min(ends) > 0:
        axes.set_xscale("log", subs=())
        axes.xaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
        axes.set_xlim(min(line[0].min() for line in shown), max(ends) * 1.15)
    axes.xaxis.set_major_formatter(ticker.EngFormatter(sep="") if x == "tokens" else "{x:,.10g}")
    space = 0.05 * np.ptp(losses) or 0.1
    axes.set_ylim(losses.min() - space, losses.max() + space)
    for target in targets:
        axes.axhline(target, color="black", linewidth=0.9, linestyle="--", zorder=1)
        axes.annotate(f"target {target:g}", (0, target), (4, 3), ("axes fraction", "data"), "offset points", fontsize=8)
    axes.set(xlabel=X_AXES[x][1], ylabel=f"validation loss ({Y_AXES[y]})", axisbelow=True)
    axes.grid(axis="y", alpha=0.4)


def plot(curves: dict[str, list[list[dict]]], x: str, y: str, targets: list[float], out: str) -> str:
    """Draw the losses of what read_curves found over `x`, a key of X_AXES, into a file; returns what to tell of it.

    y: a key of Y_AXES, in which targets are too. Raises UserError, also where matplotlib is missing.
    """
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError:
        raise UserError("bench.py plot needs matplotlib; install it with `pip install matplotlib`") from None
    kind, shown, notes, picture = Path(out).suffix[1:].lower(), [], "", io.BytesIO()
    if kind not in ("svg", "png"):
        raise UserError(f"--out {out} does not end in .svg or .png; give a file's name that does")
    with matplotlib.rc_context():
        matplotlib.rcdefaults()  # not the user's style: the same picture everywhere
        matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "plot", "text.parse_math": False})
        figure = Figure(dpi=150, layout="constrained")
        axes = figure.add_subplot()
        for number, (name, runs) in enumerate(curves.items()):
            runs = [in_bits(rows) for rows in runs] if y == "val_bpb" else runs
            series = [[points(rows, X_AXES[x][0], loss) for rows in runs] for loss in ("train_loss", "val_loss")]
            train, val = ([seed for seed in seeds if seed.size] for seeds in series)
            label = printable(name).lstrip("_")  # matplotlib hides what begins with one
            if not train + val:
                notes += f"\n{label} has no loss over {x} and is left out"
                continue
            label += f", {len(runs)} seeds" if len(runs) > 1 else ""
            label += f": {np.mean([seed[1, -1] for seed in val]):.4f}" if val else ": not evaluated yet"
            look = dict(color=f"C{number % 10}", linestyle=STYLES[number // 10 % 4])
            shown += draw_curve(axes, label, train, val, look)
        if not shown:
            raise UserError(f"{', '.join(curves)}: no loss over {x} yet; wait for the first logged step")
        axes.plot([], [], color="grey", linewidth=0.8, label="thin: training loss; numbers: last validation loss")
        set_axes(axes, shown, targets, x, y)
        figure.legend(loc="outside upper left", fontsize=8, frameon=False)
        figure.set_size_inches(7.2, 3.6 + 0.18 * len(axes.get_legend_handles_labels()[1]))
        without = ("Date", "Creator") if kind == "svg" else ("Software",)
        figure.savefig(picture, format=kind, metadata=dict.fromkeys(without))
    try:
        with atomic_write(Path(out)) as file:
            file.write(picture.getvalue())
    except OSError as error:
        raise UserError(f"--out {out} cannot be written ({error.strerror}); give one in an existing folder") from None
    return f"{out}: validation loss ({Y_AXES[y]}) over {x}, {len(picture.getvalue()) / 1000:.0f} kB{notes}"
