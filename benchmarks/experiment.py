"""`bench.py experiment`: compare an edit's loss with a base, over datasets and seeds; the ledger.

docs/changing.md shows how to use it.
"""

import csv
import hashlib
import json
import math
import shlex
import tempfile
import time
from itertools import chain
from pathlib import Path
from statistics import geometric_mean, mean

import numpy as np

from benchmarks.harness import Bench, progress, run_python, table, trainer_flags
from common.errors import RunError, TrainerError, UserError
from data.shards import DATA_DIR, HEADER_BYTES, check_shard, meta_or_gpt2, shard_paths, write_meta
from records.check import t_test
from records.source import git
from runtime.log import read_rows
from runtime.run_folder import REPO, copy_sources, find_sources

RULE = (
    "keep: a score below 1 with p < 0.05, from three pairs or more; crash: a run failed; else "
    "discard"
)
P = "p (edit not lower)"  # heading
# Flags that the experiment sets itself
VARIED = {"seed", "trials", "out_dir", "resume", "target_val_loss"}

# Columns of the ledger. base: its commit, with -dirty if files differ from it. edit: a hash of the
# diff and of the flags. score: loss relative to the base's. train_time_s and peak_mem_mb: means of
# the edit's runs. final: how many experiments of the ledger have read the holdout, this one
# included; else empty
COLUMNS = (
    "date",
    "base",
    "edit",
    "score",
    "p",
    "train_time_s",
    "peak_mem_mb",
    "final",
    "verdict",
    "description",
)


# --------------------------------------------------------------------------------------------------
# The holdout


def write_part(dataset: Path, is_final: bool, folder: Path) -> None:
    """Make a dataset with the training shards of another and half of its validation tokens.

    The second half of each validation shard is the holdout, which only --final reads. Raises
    UserError if the dataset is not there.
    """
    folder.mkdir()
    val_shards = shard_paths(dataset, "val")
    for path in dataset.iterdir():
        if path.is_file() and path not in val_shards:
            (folder / path.name).symlink_to(path.resolve())
    for path in val_shards:
        count, dtype = check_shard(path)
        content = path.read_bytes()
        middle = HEADER_BYTES + count // 2 * dtype.itemsize
        tokens = content[middle:] if is_final else content[HEADER_BYTES:middle]
        header = np.frombuffer(content[:HEADER_BYTES], dtype="<i4").copy()
        header[2] = len(tokens) // dtype.itemsize
        (folder / path.name).write_bytes(header.tobytes() + tokens)

    meta = meta_or_gpt2(dataset)
    if "assumed" not in meta:
        meta["files"] = {}  # whose hashes no longer hold
        # Their bytes are not counted, so losses are in nats per token
        meta["splits"]["val"].pop("bytes", None)
        write_meta(folder, meta)


# --------------------------------------------------------------------------------------------------
# Scores


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
        ratios = [pair["edit"]["val_loss"] / pair["base"]["val_loss"] for pair in pairs]
        logs += map(math.log, ratios)
        row = dict(dataset=data, score=geometric_mean(ratios), runs=pairs)
        for side in ("base", "edit"):
            row[f"{side}, nats/token"] = mean(pair[side]["val_loss"] for pair in pairs)
            row[f"{side}, s"] = mean(pair[side]["train_time_s"] for pair in pairs)
        row["speedup"] = geometric_mean(speedup(**pair) for pair in pairs)
        rows.append(row)
    every = dict(dataset="all")
    for key in ("score", "speedup"):
        every[key] = geometric_mean(row[key] for row in rows)
    # Two pairs say too little about their deviation
    every[P] = t_test(logs, 0.0) if len(logs) > 2 else None
    return rows + [every]


def verdict_of(row: dict) -> str:
    """Apply RULE to the row of all datasets."""
    has_gained = row["score"] < 1 and row[P] is not None and row[P] < 0.05
    return "keep" if has_gained else "discard"


# --------------------------------------------------------------------------------------------------
# The ledger


def read_ledger(path: Path) -> list[dict]:
    """Return the rows of a ledger, none if it is new. Raises UserError for another file."""
    if path.suffix != ".tsv":
        raise UserError(f"--ledger {path} is not a .tsv file; give experiments.tsv")
    if not path.exists():
        return []
    with open(path, encoding="utf-8", newline="") as file:
        reader = csv.DictReader(file, delimiter="\t")
        if reader.fieldnames != list(COLUMNS):
            raise UserError(f"{path} has other columns than this version's; give a new file")
        return list(reader)


def compare_sources(base: Path, edit: Path) -> str:
    """Return the diff between two checkouts' sources."""
    with tempfile.TemporaryDirectory() as work:
        for side, checkout in (("a", base), ("b", edit)):
            copy_sources(find_sources(checkout), Path(work, side))
        options = "--no-index --no-prefix --no-ext-diff --no-color"
        difference = git("diff", *options.split(), "a", "b", folder=Path(work))
    return difference.decode(errors="replace")


def add_to_ledger(path: Path, row: dict, sides: dict) -> None:
    """Append a row to the ledger, and write the edit's diff into the folder beside it."""
    base, _ = sides["base"]
    edit, flags = sides["edit"]
    difference = compare_sources(base, edit)
    identity = hashlib.sha256(f"{difference}{flags}".encode()).hexdigest()[:10]
    folder = path.with_suffix("")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{identity}.diff").write_text(difference, encoding="utf-8")

    row = row | dict(date=time.strftime("%Y-%m-%d %H:%M"), edit=identity)
    row["base"] = (
        git("describe", "--always", "--dirty", "--exclude=*", folder=base).decode().strip()
    )
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
        names = {word.split("=")[0].removeprefix("--") for word in words}
        for name in sorted({"data", "eval_tokens"} & names):
            raise UserError(f"both sides have the same --{name}; give it outside of --flags")
        for name in sorted(VARIED & names):
            raise UserError(f"--{name} is varied by this benchmark; remove it from --flags")
        if checkout == REPO:  # another one may have other flags
            trainer_flags(words)
        sides[side] = checkout, words
    return sides


def train_once(checkout: Path, flags: list[str]) -> dict:
    """Run a checkout's train_gpt.py; return its summary and `evaluations`. Raises TrainerError."""
    with tempfile.TemporaryDirectory() as folder:  # deletes its checkpoints
        run_python(checkout / "train_gpt.py", *flags, f"--out_dir={folder}")
        summary = json.loads(Path(folder, "summary.json").read_text(encoding="utf-8"))
        rows = read_rows(Path(folder, "metrics.jsonl"))
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
        # What the first run chooses is for all, unless its side gives a dtype
        if not any(word.startswith(("--dtype", "--bf16")) for word in words):
            flags.setdefault("dtype", runs[side]["dtype"])
    return runs


def train_all(bench: Bench, sides: dict) -> dict[str, list[dict]]:
    """Train base and edit on each dataset with each seed; return the pairs by dataset.

    Raises UserError if the base fails or a dataset is missing, RunError if the edit fails.
    """
    datasets = bench.options.data or [str(DATA_DIR / "python")]
    other_order = dict(reversed(sides.items()))
    flags = dict(eval_every="end", eval_tokens="all") | bench.flags
    runs = {data: [] for data in datasets}
    with tempfile.TemporaryDirectory() as work:
        parts = {}
        for number, data in enumerate(runs):
            parts[data] = Path(work, f"{number}_{Path(data).name}")
            write_part(Path(data), bench.options.final, parts[data])
        for seed in range(bench.repeats):
            for data, pairs in runs.items():
                flags |= dict(seed=seed, data=parts[data])
                pair = train_pair(other_order if seed % 2 else sides, flags)
                pairs.append(pair)
                losses = f"{pair['base']['val_loss']:.4f}, {pair['edit']['val_loss']:.4f}"
                progress(f"{data}, seed {seed}: {losses}")
    return runs


def bench_experiment(bench: Bench) -> list[dict]:
    """Train base and edit on each dataset with each seed; print scores, append to the ledger."""
    bench.forbid_flags(*VARIED)
    options = bench.options
    sides = read_sides(options.flags)
    row = dict(verdict="crash")
    if options.ledger:
        finals = [earlier for earlier in read_ledger(Path(options.ledger)) if earlier["final"]]
        if options.final:
            row["final"] = len(finals) + 1
    elif options.final:
        raise UserError("--final counts its uses in the ledger; give --ledger")

    try:
        runs = train_all(bench, sides)
        rows = score_rows(runs)
        row |= dict(verdict=verdict_of(rows[-1]), score=rows[-1]["score"], p=rows[-1][P])
        edits = [pair["edit"] for pair in chain(*runs.values())]
        for key in ("train_time_s", "peak_mem_mb"):
            row[key] = mean(edit[key] for edit in edits)
    except RunError as error:
        last_line = str(error).splitlines()[-1]
        rows = [dict(note=f"FAILED: the edit: {last_line}")]
    note = (
        f"{row['verdict']} ({RULE}). score: the edit's loss / the base's. p: one-sided t-test of "
        "the pairs' log ratios, that the edit's loss is not lower. speedup, with --eval_every: the "
        "base's training time / the edit's, to the higher of their final losses."
    )
    if options.final:
        note += f" Experiments of this ledger that have read the holdout: {row['final']}."
    print(table("Experiment", rows, note))

    if options.ledger:
        row["description"] = options.describe or options.flags[-1]
        add_to_ledger(Path(options.ledger), row, sides)
    return rows
