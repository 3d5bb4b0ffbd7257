"""`bench.py loss`: whether B reaches a loss sooner than A, in flags or code, over several seeds."""

import json
import math
import shlex
import tempfile
from pathlib import Path
from statistics import mean, median, stdev

from benchmarks.harness import Bench, progress, run_python, summarize, table
from common import REPO, RunError, UserError, read_rows
from records.check import t_test
from train_gpt import make_config


def train_once(checkout: Path, flags: list[str]) -> dict:
    """Run a checkout's train_gpt.py; return its summary and `evaluations`. Raises TrainerError."""
    with tempfile.TemporaryDirectory() as folder:  # its checkpoints are deleted with it
        flags = flags + [f"--out_dir={folder}"]
        run_python(checkout / "train_gpt.py", *flags)
        summary = json.loads(Path(folder, "summary.json").read_text(encoding="utf-8"))
        rows = read_rows(Path(folder, "metrics.jsonl").read_text(encoding="utf-8"))
    if summary["val_loss"] is None:
        raise RunError("its validation loss is not finite")
    summary["evaluations"] = [row for row in rows if row.get("val_loss") is not None]
    summary["peak_mem_mb"] = max(row.get("peak_mem_mb") or 0.0 for row in rows)
    return summary


def read_sides(texts: list[str]) -> dict[str, tuple[Path, list[str]]]:
    """The checkout and the flags of each side, by its --flags; a single one joins the defaults."""
    sides = {}
    for text in ["", *texts] if len(texts) == 1 else texts:
        words = shlex.split(text)
        checkout = REPO
        if words and not words[0].startswith("--"):
            checkout = Path(words.pop(0))
            if not (checkout / "train_gpt.py").is_file():
                raise UserError(f"{checkout} holds no train_gpt.py; give a checkout, or --FLAG")
        sides[text or "defaults"] = checkout, words
    return sides


def time_to(run: dict, target: float, key: str) -> float | None:
    """Where a run's validation loss first reaches the target; None if never.

    Linear between evaluations. key: "step" or "train_time_s".
    """
    before = run["evaluations"][0]
    for row in run["evaluations"]:
        if row["val_loss"] <= target:
            fall = before["val_loss"] - row["val_loss"]
            if fall == 0:  # the first evaluation
                return row[key]
            return row[key] - (row[key] - before[key]) * (target - row["val_loss"]) / fall
        before = row
    return None


def log_time_ratios(base: list[dict], runs: list[dict], key: str) -> list[float]:
    """log(time of a run / time of its base) for each seed, to the higher of their final losses."""
    logs = []
    for base_run, run in zip(base, runs):
        loss = max(base_run["val_loss"], run["val_loss"])  # which both reach
        logs.append(math.log(time_to(run, loss, key) / time_to(base_run, loss, key)))
    return logs


def compare_sides(sides: dict[str, list[dict]]) -> list[dict]:
    """Return a row for each side, given its runs: the others are compared with the first.

    Runs of a seed are compared. p: of a one-sided t-test on the log ratios of three seeds or more
    (null hypothesis: nothing is saved).
    """
    base = next(iter(sides.values()))
    target = mean(run["val_loss"] for run in base)
    rows = []
    for name, runs in sides.items():
        losses = [run["val_loss"] for run in runs]
        row = {"side": name, "final val_loss": mean(losses)}
        row["deviation"] = stdev(losses) if len(losses) > 1 else None
        row |= summarize([{"train_time, s": run["train_time_s"]} for run in runs])
        at_target = [run for run in runs if time_to(run, target, "step") is not None]
        row["seeds at target"] = f"{len(at_target)} of {len(runs)}"
        for key, unit in (("train_time_s", "time"), ("step", "steps")):
            if at_target:
                times = [time_to(run, target, key) for run in at_target]
                row[f"{unit} to target"] = median(times)
            if runs is not base:
                logs = log_time_ratios(base, runs, key)
                row[f"speedup ({unit})"] = math.exp(-mean(logs))
                # Two seeds tell nothing of their deviation
                row[f"p ({unit})"] = t_test(logs, 0.0) if len(logs) > 2 else None
        rows.append(row)
    return rows


def bench_loss(bench: Bench) -> dict:
    """Train each side with each seed; print how much sooner than the first it reaches a loss."""
    if "eval_every" in bench.flags:
        raise UserError("--eval_every is set so that each run has 20 evaluations; remove it")
    bench.forbid_flags("seed", "trials", "out_dir", "resume", "target_val_loss")
    sides = read_sides(bench.options.flags or ["--optimizer adamw", ""])
    flags = dict(max_steps=150, eval_tokens=32768)
    if bench.quick:
        flags = dict(n_layer=2, batch_tokens=2048, max_steps=40, eval_tokens=8192)
    flags |= bench.flags
    flags["eval_every"] = max(1, make_config(**flags).max_steps // 20)

    names = list(sides)
    runs = {name: [] for name in names}
    for seed in range(bench.repeats):
        flags["seed"] = seed
        for name in names:
            checkout, words = sides[name]
            common = [f"--{key}={value}" for key, value in flags.items()]
            run = train_once(checkout, common + words)
            runs[name].append(run)
            flags.setdefault("dtype", run["dtype"])  # the first run decides what auto is
            progress(f"seed {seed}, {name}: {run['val_loss']:.4f}")
        names = names[1:] + names[:1]  # another side goes first
    rows = compare_sides(runs)
    note = (
        f"{bench.repeats} seeds, interleaved. "
        f"Target: {rows[0]['final val_loss']:.4f}, the first side's mean. "
        "Speedup: its time (steps) over the side's, seed by seed, "
        "each up to the higher of the two final losses."
    )
    print(table("Time to a validation loss", rows, note))
    return dict(loss=rows, runs=runs)
