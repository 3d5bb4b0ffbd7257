"""`bench.py loss`: whether B reaches a loss sooner than A, in flags or in code, over several seeds."""

import json
import math
import shlex
import statistics
import tempfile
from pathlib import Path

from benchmarks.harness import Bench, median_min_max, progress, run_python, table
from records.check import t_test
from runtime.log import read_rows
from runtime.sources import REPO
from train_gpt import make_config


def train_once(checkout: str, flags: list[str]) -> dict:
    """The summary and evaluations of a run of a checkout's train_gpt.py. Raises TrainerError."""
    with tempfile.TemporaryDirectory() as folder:  # its checkpoints are deleted with it
        run_python(Path(checkout, "train_gpt.py"), *flags, f"--out_dir={folder}")
        summary = json.loads(Path(folder, "summary.json").read_text(encoding="utf-8"))
        rows = read_rows(Path(folder, "metrics.jsonl").read_text(encoding="utf-8"))
    return summary | dict(evaluations=[row for row in rows if row.get("val_loss") is not None])


def time_to(run: dict, target: float, key: str) -> float | None:
    """Where a run's validation loss first reaches the target, linear between evaluations; None if never."""
    rows = run["evaluations"]
    for before, row in zip([rows[0], *rows], rows):
        if row["val_loss"] <= target:
            fall = before["val_loss"] - row["val_loss"]
            return row[key] - (row[key] - before[key]) * (target - row["val_loss"]) / (fall or 1.0)
    return None


def judge(runs: dict[str, list[dict]]) -> list[dict]:
    """A row for each side, the first of which the others are compared with, seed by seed.

    p: of a one-sided t-test on the log ratios (null hypothesis: nothing is saved).
    """
    base, rows = next(iter(runs.values())), []
    target = statistics.mean(run["val_loss"] for run in base)
    for name, own in runs.items():
        losses = [run["val_loss"] for run in own]
        row = {"side": name, "final val_loss": statistics.mean(losses)}
        row["deviation"] = statistics.stdev(losses) if len(losses) > 1 else None
        row |= median_min_max([run["train_time_s"] for run in own], "train_time, s")
        there = [run for run in own if time_to(run, target, "step") is not None]
        row["seeds at target"] = f"{len(there)} of {len(own)}"
        for key, unit in (("train_time_s", "time"), ("step", "steps")):
            if there:
                row[f"{unit} to target"] = statistics.median(
                    time_to(run, target, key) for run in there
                )
            if own is not base:
                pairs = [
                    (a, b, max(a["val_loss"], b["val_loss"])) for a, b in zip(base, own)
                ]  # which both reach
                logs = [
                    math.log(time_to(b, loss, key) / time_to(a, loss, key)) for a, b, loss in pairs
                ]
                row[f"speedup ({unit})"] = math.exp(-statistics.mean(logs))
                row[f"p ({unit})"] = t_test(logs, 0.0)
        rows.append(row)
    return rows


def bench_loss(bench: Bench) -> dict:
    bench.refuse("seed", "trials", "eval_every", "out_dir", "resume", "target_val_loss")
    sides, given = {}, bench.options.flags
    for text in [""] * (len(given) == 1) + given or [
        "--optimizer adamw",
        "",
    ]:  # one is compared with the defaults
        words = shlex.split(text)
        checkout = words.pop(0) if words and not words[0].startswith("--") else REPO
        sides[text or "defaults"] = checkout, words
    small = dict(n_layer=2, batch_tokens=2048, max_steps=40, eval_tokens=8192)
    common = (small if bench.quick else dict(max_steps=150, eval_tokens=32768)) | bench.flags
    common["eval_every"] = max(1, make_config(**common).max_steps // 20)
    runs = {name: [] for name in sides}
    for seed in range(bench.repeats):
        for name in [*sides][seed % len(sides) :] + [*sides][: seed % len(sides)]:
            checkout, words = sides[name]
            flags = [f"--{key}={value}" for key, value in (common | dict(seed=seed)).items()]
            runs[name].append(train_once(checkout, flags + words))
            common = (
                dict(dtype=runs[name][-1]["dtype"]) | common
            )  # the first run decides what auto is
            progress(f"seed {seed}, {name}: {runs[name][-1]['val_loss']:.4f}")
    rows = judge(runs)
    note = f"{bench.repeats} seeds, interleaved. Target: {rows[0]['final val_loss']:.4f}, the first side's mean. "
    note += "Speedup: its time (steps) over the side's, seed by seed, each up to the higher of the two final losses."
    print(table("Time to a validation loss", rows, note))
    return dict(loss=rows, runs=runs)
