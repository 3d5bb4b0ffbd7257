"""`bench.py loss`: time to a validation loss, for AdamW, Muon and each switch of the recipe, over several seeds."""

import contextlib
import json
import os
import statistics
import tempfile
from pathlib import Path

from benchmarks.harness import Bench, CaseFailed, Worker, median_min_max, progress, table
from train_gpt import make_config, train

# Changes to the recipe; the first is the baseline, whose mean final loss is the target
RECIPES = {
    "AdamW": dict(optimizer="adamw"),
    "Muon + Adam": {},
    "without weight decay": dict(weight_decay=0.0),
    "without soft-cap": dict(softcap=0.0),
    "without cooldown": dict(cooldown_frac=0.0),
    "with 5 % warm-up": dict(warmup_frac=0.05),
    "with gradients clipped at 1": dict(grad_clip=1.0),
}


def run_case(flags: dict):
    """Yields nothing of interest, then summary and evaluations of whole training runs with the flags requested."""
    change = yield None
    while True:
        with tempfile.TemporaryDirectory() as folder, open(os.devnull, "w") as quiet:
            with contextlib.redirect_stdout(quiet):
                summary = train(make_config(**{**flags, **change, "out_dir": folder}))
            rows = [json.loads(line) for line in open(Path(folder) / "metrics.jsonl")]
        change = yield summary, [row for row in rows if "val_loss" in row]


def time_to(rows: list[dict], target: float, key: str) -> float | None:
    """Where the validation loss first reaches the target, linear between evaluations; None if never."""
    for before, row in zip([None, *rows], rows):
        if row["val_loss"] is not None and row["val_loss"] <= target:
            if before is None or before["val_loss"] is None:
                return row[key]
            fraction = (before["val_loss"] - target) / (before["val_loss"] - row["val_loss"])
            return before[key] + fraction * (row[key] - before[key])
    return None


def train_once(bench: Bench, flags: dict, change: dict) -> tuple[dict, list[dict]]:
    """Summary and evaluations of a training run in a process of its own: nothing of one run warms the next.

    Raises CaseFailed, for a run that diverged too.
    """
    with Worker(bench, run_case, flags) as worker:
        worker.request()
        summary, evaluations = worker.request(change)
        if summary["val_loss"] is None:
            raise CaseFailed(f"diverged with seed {change['seed']}", worker)
    return summary, evaluations


def train_all(bench: Bench, flags: dict, seeds: int, rows: list[dict]) -> dict[str, list[tuple[dict, list[dict]]]]:
    """The runs of each recipe, interleaved; a recipe stops at its first failure, with a note in its row.

    Raises CaseFailed when no run of the baseline finished.
    """
    runs, baseline = {name: [] for name in RECIPES}, next(iter(RECIPES))
    for seed in range(seeds):
        for row in rows:
            name = row["name"]
            if "note" in row:
                continue
            try:
                runs[name].append(train_once(bench, flags, {**RECIPES[name], "seed": seed}))
            except CaseFailed as error:
                row["note"] = str(error)
                progress(f"seed {seed}, {name}: {error}")
                if name == baseline and not runs[baseline]:
                    reason = f"no run of {baseline} finished, so there is no target loss ({error})"
                    raise CaseFailed(reason, kind=error.kind) from None
                continue
            summary = runs[name][-1][0]
            progress(f"seed {seed}, {name}: {summary['val_loss']:.4f} in {summary['train_time_s']:.1f} s")
    return runs


def summarize(row: dict, runs: list[tuple[dict, list[dict]]], target: float, baseline_s: float) -> None:
    """Fill in a recipe's row. baseline_s: train_time of the baseline's whole run."""
    if not runs:
        return
    reached = [(time_to(e, target, "train_time_s"), time_to(e, target, "step")) for _, e in runs]
    reached = [pair for pair in reached if pair[0] is not None]
    row |= median_min_max([summary["val_loss"] for summary, _ in runs], "val_loss")
    row |= dict(seeds=len(runs), reached=f"{len(reached)} of {len(runs)}")
    row |= median_min_max([summary["train_time_s"] for summary, _ in runs], "train_time_s")
    if 2 * len(reached) > len(runs):
        row |= median_min_max([seconds for seconds, _ in reached], "to_target_s")
        row["steps_to_target"] = statistics.median(step for _, step in reached)
        row["times_sooner"] = baseline_s / row["to_target_s"]


def bench_loss(bench: Bench) -> dict:
    """Time to AdamW's final validation loss, for each recipe, over several seeds."""
    varied = {key for change in RECIPES.values() for key in change}
    bench.reject_flags(*varied, "adam_lr", "seed", "trials", "eval_every", "out_dir", "resume", "target_val_loss")
    small = dict(max_steps=150, eval_tokens=32768)
    small |= dict(n_layer=2, max_steps=40, batch_tokens=2048, eval_tokens=8192) if bench.quick else {}
    flags = {**small, **bench.flags}
    steps, seeds = make_config(**flags).max_steps, 2 if bench.quick else 3
    flags["eval_every"] = max(1, steps // (10 if bench.quick else 20))
    rows, baseline = [dict(name=name) for name in RECIPES], next(iter(RECIPES))
    runs = train_all(bench, flags, seeds, rows)
    target = statistics.mean(summary["val_loss"] for summary, _ in runs[baseline])
    baseline_s = statistics.median(summary["train_time_s"] for summary, _ in runs[baseline])
    for row in rows:
        summarize(row, runs[row["name"]], target, baseline_s)
    columns = {
        "name": ("Config", ""), "val_loss": ("final val_loss", ".4f"), "reached": ("seeds at target", ""),
        "to_target_s": ("train_time to target, s", ".1f"), "steps_to_target": ("steps to target", ".0f"),
        "times_sooner": (f"speedup vs {baseline}", ".2f"), "note": ("", ""),
    }  # fmt: skip
    note = (
        f"Target: {target:.4f}, the mean of {baseline}'s final losses; {steps} steps, {seeds} seeds, interleaved. "
        f"Speedup: {baseline}'s whole train_time over the time to target."
    )
    print(table("Time to a validation loss", rows, columns, (note,)))
    return dict(loss=rows, target=target, steps=steps)
