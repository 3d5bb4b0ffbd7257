"""`bench.py experiment`: compare an edit's loss with a base, over datasets and seeds; the ledger.

docs/experiments.md shows how to use it.
"""

import csv
import hashlib
import json
import math
import shlex
import tempfile
import time
import tokenize
from itertools import chain
from pathlib import Path
from statistics import geometric_mean, mean

import numpy as np

from benchmarks.harness import Bench, progress, run_python, table
from common.errors import RunError, TrainerError, UserError
from records.check import t_test
from records.source import git
from runtime.log import read_rows
from runtime.run_folder import REPO, copy_sources, find_sources

RULE = (
    "keep: a score below 1 with p < 0.05, from three pairs or more; crash: a run failed; else "
    "discard"
)

# Columns of the ledger. base: its commit. edit: a hash of the diff and of the flags. score: loss
# relative to the base's. train_time_s and peak_mem_mb: means of the edit's runs. code_tokens: the
# code that the edit adds
COLUMNS = (
    "date",
    "base",
    "edit",
    "score",
    "p",
    "train_time_s",
    "peak_mem_mb",
    "code_tokens",
    "verdict",
    "description",
)
NO_CODE = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT)


def losses_of(pair: dict[str, dict]) -> dict[str, float]:
    """Return both losses of a pair in bits per byte, or nats per token for data without bytes."""
    key = "val_bpb" if all(run["val_bpb"] for run in pair.values()) else "val_loss"
    return {side: run[key] for side, run in pair.items()}


def time_to(run: dict, loss: float) -> float:
    """Return the train_time at which a run first reaches a loss; nan if before any evaluation.

    The lowest loss so far is interpolated linearly between evaluations.
    """
    losses = np.minimum.accumulate([row["val_loss"] for row in run["evaluations"]])
    seconds = [row["train_time_s"] for row in run["evaluations"]]
    return float(np.interp(loss, losses[::-1], seconds[::-1], right=math.nan))


def speedup(base: dict, edit: dict) -> float:
    """Return the base's time / the edit's time to the higher final loss, which both reach."""
    loss = max(base["val_loss"], edit["val_loss"])
    return time_to(base, loss) / time_to(edit, loss)


def score_rows(runs: dict[str, list[dict]]) -> list[dict]:
    """Return a row per dataset, from its pairs of runs dict(base=..., edit=...), and one for all.

    Scores and speedups are geometric means over pairs, then over datasets. p is from a one-sided
    t-test on the log ratios of all pairs' losses (null hypothesis: the loss is not lower).
    """
    rows = []
    logs = []
    for data, pairs in runs.items():
        losses = [losses_of(pair) for pair in pairs]
        ratios = [pair["edit"] / pair["base"] for pair in losses]
        logs += map(math.log, ratios)
        row = dict(dataset=data or "python", score=geometric_mean(ratios), runs=pairs)
        for side in ("base", "edit"):
            row[side] = mean(pair[side] for pair in losses)
            row[f"{side}, s"] = mean(pair[side]["train_time_s"] for pair in pairs)
        row["speedup"] = geometric_mean(speedup(**pair) for pair in pairs)
        rows.append(row)
    every = dict(dataset="all")
    for key in ("score", "speedup"):
        every[key] = geometric_mean(row[key] for row in rows)
    # Two pairs say too little about their deviation
    every["p"] = t_test(logs, 0.0) if len(logs) > 2 else None
    return rows + [every]


def verdict_of(row: dict) -> str:
    """Apply RULE to the row of all datasets."""
    has_gained = row["score"] < 1 and row["p"] is not None and row["p"] < 0.05
    return "keep" if has_gained else "discard"


# --------------------------------------------------------------------------------------------------
# The ledger


def compare_sources(base: Path, edit: Path) -> tuple[str, int]:
    """Return the diff between two checkouts' sources, and the tokens of code that the edit adds."""
    n_tokens = []
    with tempfile.TemporaryDirectory() as work:
        for side, checkout in (("a", base), ("b", edit)):
            copy_sources(find_sources(checkout), Path(work, side))
            n_tokens.append(sum(map(count_tokens, Path(work, side).rglob("*.py"))))
        options = "--no-index --no-prefix --no-ext-diff --no-color"
        difference = git("diff", *options.split(), "a", "b", folder=Path(work))
    return difference.decode(errors="replace"), n_tokens[1] - n_tokens[0]


def count_tokens(path: Path) -> int:
    """Count the tokens of Python in a file, without comments and layout, up to a syntax error."""
    n = 0
    with open(path, "rb") as file:
        try:
            for token in tokenize.tokenize(file.readline):
                n += token.type not in NO_CODE
        except (SyntaxError, tokenize.TokenError):  # the verdict is crash then
            pass
    return n


def add_to_ledger(path: Path, row: dict, sides: dict) -> None:
    """Append a row to the ledger, and write the edit's diff into the folder beside it."""
    base, _ = sides["base"]
    edit, flags = sides["edit"]
    difference, code_tokens = compare_sources(base, edit)
    identity = hashlib.sha256(f"{difference}{flags}".encode()).hexdigest()[:10]
    folder = path.with_suffix("")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{identity}.diff").write_text(difference, encoding="utf-8")

    row = row | dict(date=time.strftime("%Y-%m-%d %H:%M"), edit=identity, code_tokens=code_tokens)
    row["base"] = git("rev-parse", "--short", "HEAD", folder=base).decode().strip()
    cells = {key: f"{cell:.5g}" if isinstance(cell, float) else cell for key, cell in row.items()}
    is_new = not path.exists()
    with open(path, "a", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, delimiter="\t", lineterminator="\n")
        if is_new:
            writer.writeheader()
        writer.writerow(cells)


# --------------------------------------------------------------------------------------------------
# The experiment


def read_sides(texts: list[str]) -> dict[str, tuple[Path, list[str]]]:
    """Return the checkout and the flags of base and edit from --flags. Raises UserError."""
    if len(texts) == 1:
        texts = ["", *texts]
    if len(texts) != 2:
        raise UserError("give --flags=EDIT, or --flags=BASE --flags=EDIT")
    sides = {}
    for side, text in zip(("base", "edit"), texts):
        words = shlex.split(text)
        checkout = REPO
        if words and not words[0].startswith("--"):
            checkout = Path(words.pop(0))
            if not (checkout / "train_gpt.py").is_file():
                raise UserError(f"{checkout} holds no train_gpt.py; give a checkout, or only flags")
        sides[side] = checkout, words
    return sides


def train_once(checkout: Path, flags: list[str]) -> dict:
    """Run a checkout's train_gpt.py; return its summary and `evaluations`. Raises TrainerError."""
    with tempfile.TemporaryDirectory() as folder:  # deletes its checkpoints
        run_python(checkout / "train_gpt.py", *flags, f"--out_dir={folder}")
        summary = json.loads(Path(folder, "summary.json").read_text(encoding="utf-8"))
        rows = read_rows(Path(folder, "metrics.jsonl").read_text(encoding="utf-8"))
    if summary["val_loss"] is None:
        raise RunError("its validation loss is not finite")
    summary["evaluations"] = [row for row in rows if row.get("val_loss") is not None]
    summary["peak_mem_mb"] = max(row.get("peak_mem_mb") or 0.0 for row in rows)
    return summary


def train_pair(sides: dict, flags: dict) -> dict[str, dict]:
    """Train each side once with these flags. Raises UserError if the base fails, else RunError."""
    runs = {}
    for side, (checkout, words) in sides.items():
        argv = [f"--{key}={value}" for key, value in flags.items()]
        try:
            runs[side] = train_once(checkout, argv + words)
        except TrainerError as error:
            if side == "base":
                raise UserError(f"the base fails: {error}") from None
            raise RunError(str(error)) from None
        flags.setdefault("dtype", runs[side]["dtype"])  # the first run resolves auto for all
    progress(f"{flags}: {runs['base']['val_loss']:.4f}, {runs['edit']['val_loss']:.4f}")
    return runs


def bench_experiment(bench: Bench) -> list[dict]:
    """Train base and edit on each dataset with each seed; print scores, append to the ledger."""
    bench.forbid_flags("seed", "trials", "out_dir", "resume", "target_val_loss")
    options = bench.options
    if options.ledger and Path(options.ledger).suffix != ".tsv":
        raise UserError(f"--ledger {options.ledger} is not a .tsv file; give experiments.tsv")
    sides = read_sides(options.flags)
    other_order = dict(reversed(sides.items()))
    flags = dict(eval_every="end", eval_tokens="all") | bench.flags
    runs = {data: [] for data in options.data or [""]}
    row = dict(verdict="crash")
    try:
        for seed in range(bench.repeats):
            for data, pairs in runs.items():
                flags |= dict(seed=seed, data=data)
                pairs.append(train_pair(other_order if seed % 2 else sides, flags))
        rows = score_rows(runs)
        row |= dict(verdict=verdict_of(rows[-1]), score=rows[-1]["score"], p=rows[-1]["p"])
        edits = [pair["edit"] for pair in chain(*runs.values())]
        for key in ("train_time_s", "peak_mem_mb"):
            row[key] = mean(edit[key] for edit in edits)
    except RunError as error:
        last_line = str(error).splitlines()[-1]
        rows = [dict(dataset=data, note=f"the edit fails: {last_line}")]
    note = (
        f"{row['verdict']} ({RULE}). score: the edit's loss / the base's. "
        "speedup: the base's time / the edit's, to the higher of their final losses."
    )
    print(table("Experiment", rows, note))

    if options.ledger:
        row["description"] = options.describe or options.flags[-1]
        add_to_ledger(Path(options.ledger), row, sides)
    return rows
