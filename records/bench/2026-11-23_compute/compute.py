"""Loss over compute, Muon with n-grams, Muon, AdamW: trains what results.jsonl lacks, fits, draws docs/compute.svg.

    python records/bench/2026-11-23_compute/compute.py ENGLISH

In the repository's root. ENGLISH: the data folder that README.md here describes. Without it, it fits and draws only.
One thread. Needs matplotlib.
"""

import contextlib
import io
import json
import math
import os
import statistics
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, os.getcwd())
from runtime import set_environment

if __name__ == "__main__":
    set_environment()

import matplotlib
import numpy as np
import torch
from matplotlib.figure import Figure

from train_gpt import make_config, train

RESULTS = Path(__file__).resolve().with_name("results.jsonl")
FIXED = dict(eval_every=0, eval_tokens=524288, compile="default", dtype="bf16")
KINDS = {"ngram": "Muon with n-grams", "plain": "Muon without", "adamw": "AdamW without"}


def read_results() -> list[dict]:
    """Rows: kind, budget_s (0: of none), seconds of one core by the time of a step, flags, val_loss and val_bpb."""
    return [json.loads(line) for line in RESULTS.read_text().splitlines()]


def run(row: dict, data: str) -> dict:
    """The row with its losses, of 524,288 validation tokens."""
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        summary = train(make_config(data=data, out_dir=f"{folder}/run", **row["flags"], **FIXED))
    return row | {name: summary[name] for name in ("val_loss", "val_bpb")}


def repeated(rows: list[dict], kind: str) -> dict[tuple, list[dict]]:
    """The rows of a kind by budget and flags but seed and, as they follow from the speed, steps."""
    found: dict[tuple, list[dict]] = {}
    for row in rows:
        if row["kind"] == kind and row["budget_s"] and "val_bpb" in row:
            flags = {name: value for name, value in row["flags"].items() if name not in ("seed", "max_steps")}
            found.setdefault((row["budget_s"], json.dumps(flags, sort_keys=True)), []).append(row)
    return found


def best(rows: list[dict], kind: str) -> list[tuple[float, float]]:
    """(seconds, lowest loss) of each budget; means over seeds."""
    found: dict[float, list[tuple[float, float]]] = {}
    for (budget, _), same in repeated(rows, kind).items():
        point = [statistics.mean(row[name] for row in same) for name in ("val_bpb", "seconds")]
        found.setdefault(budget, []).append(tuple(point))
    return sorted((seconds, loss) for loss, seconds in map(min, found.values()))


def noise(rows: list[dict], kind: str) -> float:
    """Standard deviation of the logarithm of the loss between seeds, pooled over what was trained with several."""
    losses = [[math.log(row["val_bpb"]) for row in same] for same in repeated(rows, kind).values() if len(same) > 1]
    total = sum(sum((x - statistics.mean(each)) ** 2 for x in each) for each in losses)
    return math.sqrt(total / sum(len(each) - 1 for each in losses))


def power_law(points: list[tuple[float, float]]) -> tuple[float, float]:
    """Slope and intercept of log loss over log seconds, by least squares."""
    seconds, losses = np.log(np.array(points)).T
    slope, intercept = np.polyfit(seconds, losses, 1)
    return slope, intercept


def show(rows: list[dict]) -> None:
    """The tables of README.md: losses; fits; the time that others need for the loss of Muon with n-grams."""
    for row in sorted(rows, key=lambda r: (list(KINDS).index(r["kind"]), r["seconds"])):
        flags = row["flags"]
        weights = 12 * flags["n_layer"] * flags["n_embd"] ** 2
        tokens = flags["max_steps"] * flags["batch_tokens"]
        rate = f", adam_lr {flags['adam_lr']}" if "adam_lr" in flags else ""
        seed = f", seed {flags['seed']}" if flags.get("seed") else ""
        print(
            f"| {KINDS[row['kind']]} | {row['seconds']:,} | {flags['n_layer']} x {flags['n_embd']}{rate}{seed} | "
            f"{weights / 1e6:.2f}M | {flags['batch_tokens']:,} | {flags['max_steps']:,} | {tokens / weights:.1f} | "
            f"{row.get('val_bpb', math.nan):.4f} |"
        )
    spread, draw_from = {kind: noise(rows, kind) for kind in KINDS}, np.random.default_rng(0)
    for kind, name in KINDS.items():
        slope, intercept = power_law(best(rows, kind))
        print(f"{name}: {math.exp(intercept):.3f} x seconds^{slope:.4f}, seeds differ by {100 * spread[kind]:.1f} %")
    for kind in list(KINDS)[1:]:
        for seconds, loss in best(rows, "ngram"):
            found = []
            for _ in range(2000):  # what other seeds might have given
                points = [(s, x * math.exp(draw_from.normal(0, spread[kind]))) for s, x in best(rows, kind)]
                slope, intercept = power_law(points)
                equal = math.log(loss) + draw_from.normal(0, spread["ngram"])
                found.append((equal - intercept) / slope - math.log(seconds))
            low, middle, high = np.exp(np.quantile(found, (0.05, 0.5, 0.95)))
            times = f"{middle:.1f} times as long ({low:.1f} to {high:.1f})"
            print(f"{KINDS[kind]} to the {loss:.3f} of {seconds:,.0f} s: {times}")


def draw(rows: list[dict], path: Path) -> None:
    """Losses over seconds of one core, all trainings, and each kind's fit through its best."""
    matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "compute", "font.size": 9})
    figure = Figure(figsize=(6.5, 3.6), layout="constrained")
    axes = figure.subplots()
    for number, (kind, name) in enumerate(KINDS.items()):
        there = [row for row in rows if row["kind"] == kind and "val_bpb" in row]
        axes.plot(
            [row["seconds"] for row in there], [row["val_bpb"] for row in there], "o", color=f"C{number}", alpha=0.35
        )
        slope, intercept = power_law(best(rows, kind))
        ends = np.array([50, 6000])
        axes.plot(ends, np.exp(intercept) * ends**slope, color=f"C{number}", label=name)
    axes.set(xscale="log", yscale="log", xlabel="training time on one core, s", ylabel="bits per byte, validation")
    axes.set_xticks([60, 240, 1200, 4800], ["60", "240", "1,200", "4,800"])
    axes.set_yticks([1.2, 1.4, 1.6, 1.8, 2.0, 2.2], ["1.2", "1.4", "1.6", "1.8", "2.0", "2.2"])
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, metadata=dict.fromkeys(("Date", "Creator")))


if __name__ == "__main__":
    torch.set_num_threads(1)
    rows = read_results()
    if len(sys.argv) == 2:
        for i, row in enumerate(rows):
            if "val_bpb" not in row:
                rows[i] = run(row, sys.argv[1])
                RESULTS.write_text("".join(json.dumps(row) + "\n" for row in rows))
    show(rows)
    draw(rows, Path("docs/compute.svg"))
