"""`bench.py experiment`: whether an edit lowers the loss, over datasets and seeds; and a ledger.

docs/experiments.md is the loop around it.
"""

import csv
import hashlib
import math
import tempfile
import time
import tokenize
from pathlib import Path
from statistics import mean

from benchmarks.harness import Bench, progress, table
from benchmarks.loss import read_sides, train_once
from common import RunError, TrainerError, UserError, copy_sources, find_sources
from records.check import t_test
from records.source import git

RULE = (
    "keep: a score below 1 with p < 0.05, of three pairs or more; crash: a run failed; else discard"
)

# Of the ledger. base: its commit. edit: a hash of the difference to it and of the flags. score: of
# the losses, relative to the base's. The next three are the edit's: means, and code that it adds
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


def log_ratio(base: dict, run: dict) -> float:
    """log(loss of a run / loss of its base): bits per byte, or nats where bytes are not known."""
    key = "val_bpb" if base["val_bpb"] and run["val_bpb"] else "val_loss"
    return math.log(run[key] / base[key])


def score_rows(runs: dict[str, list[tuple[dict, dict]]]) -> list[dict]:
    """A row for each dataset, given its pairs of runs (base, edit), and one for all.

    The score of all is the geometric mean over the datasets. p: of a one-sided t-test on the log
    ratios of all pairs (null hypothesis: the loss is not lower).
    """
    rows = []
    logs = []
    for name, pairs in runs.items():
        ratios = [log_ratio(base, run) for base, run in pairs]
        logs += ratios
        row = dict(dataset=name, score=math.exp(mean(ratios)))
        for i, side in enumerate(("base", "edit")):
            summaries = [pair[i] for pair in pairs]
            row[side] = mean(summary["val_bpb"] or summary["val_loss"] for summary in summaries)
            row[f"{side}, s"] = mean(summary["train_time_s"] for summary in summaries)
        rows.append(row)
    score = math.exp(mean(math.log(row["score"]) for row in rows))
    # Two pairs tell nothing of their deviation
    rows.append(dict(dataset="all", score=score, p=t_test(logs, 0.0) if len(logs) > 2 else None))
    return rows


def verdict_of(row: dict) -> str:
    """RULE, for the row of all datasets."""
    has_gained = row["score"] < 1 and row["p"] is not None and row["p"] < 0.05
    return "keep" if has_gained else "discard"


# --------------------------------------------------------------------------------------------------
# The ledger


def compare_sources(base: Path, edit: Path) -> tuple[str, int]:
    """The difference between two checkouts' sources, and the tokens of code that the edit adds."""
    n_tokens = []
    with tempfile.TemporaryDirectory() as work:
        for side, checkout in (("a", base), ("b", edit)):
            copy_sources(find_sources(checkout), Path(work, side))
            n_tokens.append(sum(map(count_tokens, Path(work, side).rglob("*.py"))))
        options = "--no-index --no-prefix --no-ext-diff --no-color"
        difference = git("diff", *options.split(), "a", "b", folder=Path(work))
    return difference.decode(errors="replace"), n_tokens[1] - n_tokens[0]


def count_tokens(path: Path) -> int:
    """Tokens of Python in a file, without comments and layout; up to the first that is none."""
    n = 0
    with open(path, "rb") as file:
        try:
            for token in tokenize.tokenize(file.readline):
                n += token.type not in NO_CODE
        except (SyntaxError, tokenize.TokenError):  # a crash has been noted
            pass
    return n


def add_to_ledger(path: Path, row: dict, sides: dict, description: str) -> None:
    """Append a row to the ledger, and write the edit's difference into the folder beside it."""
    (base, _), (edit, _) = sides.values()
    name = list(sides)[1]
    difference, code_tokens = compare_sources(base, edit)
    identity = hashlib.sha256(f"{difference}{name}".encode()).hexdigest()[:10]
    folder = path.with_suffix("")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{identity}.diff").write_text(difference, encoding="utf-8")

    row = row | dict(date=time.strftime("%Y-%m-%d %H:%M"), edit=identity, code_tokens=code_tokens)
    row["base"] = git("rev-parse", "--short", "HEAD", folder=base).decode().strip()
    row["description"] = " ".join((description or name).split())
    cells = {key: f"{cell:.5g}" if isinstance(cell, float) else cell for key, cell in row.items()}
    is_new = not path.exists()
    with open(path, "a", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, delimiter="\t", lineterminator="\n")
        if is_new:
            writer.writeheader()
        writer.writerow(cells)


# --------------------------------------------------------------------------------------------------
# The experiment


def train_pair(sides: dict, flags: dict, edit_first: bool) -> tuple[dict, dict]:
    """Train base and edit once, with these flags. Raises UserError for the base, RunError else."""
    names = list(sides)
    runs = {}
    for name in reversed(names) if edit_first else names:
        checkout, words = sides[name]
        argv = [f"--{key}={value}" for key, value in flags.items()]
        try:
            runs[name] = train_once(checkout, argv + words)
        except TrainerError as error:
            if name == names[0]:
                raise UserError(f"the base, {name}, fails: {error}") from None
            raise RunError(str(error)) from None
        flags.setdefault("dtype", runs[name]["dtype"])  # the first run decides what auto is
    base, edit = (runs[name] for name in names)
    progress(f"{flags}: {base['val_loss']:.4f}, {edit['val_loss']:.4f}")
    return base, edit


def bench_experiment(bench: Bench) -> dict:
    """Train base and edit on each dataset with each seed; print scores, and a row of the ledger."""
    bench.forbid_flags("seed", "trials", "out_dir", "resume", "target_val_loss", minutes=False)
    sides = read_sides(bench.options.flags)
    if len(sides) != 2:
        raise UserError("give --flags=EDIT, or --flags=BASE --flags=EDIT")
    if bench.options.ledger and Path(bench.options.ledger).suffix != ".tsv":
        raise UserError(f"--ledger {bench.options.ledger} is no .tsv file; give experiments.tsv")
    flags = dict(eval_every=0, eval_tokens=0) | bench.flags
    datasets = bench.options.data or [""]
    runs = {data or "python": [] for data in datasets}
    row = dict(verdict="crash")
    try:
        for seed in range(bench.repeats):
            for data in datasets:
                flags |= dict(seed=seed, data=data)
                runs[data or "python"].append(train_pair(sides, flags, edit_first=seed % 2 == 1))
        rows = score_rows(runs)
        row |= dict(verdict=verdict_of(rows[-1]), score=rows[-1]["score"], p=rows[-1]["p"])
        edits = [edit for pairs in runs.values() for _, edit in pairs]
        for key in ("train_time_s", "peak_mem_mb"):
            row[key] = mean(edit[key] for edit in edits)
    except RunError as error:
        last_line = str(error).splitlines()[-1]
        rows = [dict(dataset=data, note=f"the edit fails: {last_line}")]
    note = f"{row['verdict']} ({RULE}). score: loss of the edit / loss of the base."
    print(table("Experiment", rows, note))

    if bench.options.ledger:
        add_to_ledger(Path(bench.options.ledger), row, sides, bench.options.describe)
    return dict(experiment=rows, runs=runs)
