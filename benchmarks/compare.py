"""`bench.py compare RUN...`: a table of runs, with the flags that tell them apart."""

import json
import re
from pathlib import Path

from benchmarks.harness import Bench, table
from common.errors import UserError
from runtime.log import SECTION, read_rows

# Flags whose values are often chosen by others, such as --minutes
SIZES = {"n_layer", "n_embd", "seq_len", "batch_tokens", "ngram", "max_steps"}
KEYS = ("val_loss", "val_bpb", "step", "tokens", "train_time_s")
IN_THE_LOG = dict(parameters=r"([\d,]+) parameters", machine=r"^device: (.+?), \w+, compile")


def find_runs(folder: Path) -> list[Path]:
    """List the runs in a folder: itself, or one per seed. Raises UserError if there are none."""
    logs = sorted(folder.glob("metrics.jsonl")) or sorted(folder.glob("seed_*/metrics.jsonl"))
    if not logs:
        raise UserError(
            f"{folder} holds neither metrics.jsonl nor seed_*/metrics.jsonl; give the folder of a "
            "run, or of one run per seed"
        )
    return [log.parent for log in logs]


def read_log(folder: Path) -> str:
    """Return a run's log.txt, or "" if it is missing."""
    path = folder / "log.txt"
    return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""


def differing_flags(folders: list[Path]) -> list[str]:
    """Return, for each run, its sizes and the flags given by the user that differ between runs."""
    starts = []  # the flags of each run's first start, {} if there is no log
    for folder in folders:
        found = re.search(rf"^{SECTION} run\n(.*)", read_log(folder), re.MULTILINE)
        starts.append(json.loads(found[1]) if found else {})
    given = set().union(*(flags.get("given", ()) for flags in starts))
    shown = (given | SIZES) - {"out_dir", "resume"}
    texts = []
    for flags in starts:
        others = [other for other in starts if other]
        names = [name for name in flags if any(flags[name] != other.get(name) for other in others)]
        # An empty one, such as --init_from, was not given to this run
        names = [name for name in names if name in shown and flags[name] != ""]
        texts.append(" ".join(f"--{name} {flags[name]}" for name in names))
    return texts


def row_of_run(folder: Path) -> dict:
    """Return a run's newest losses, its size and machine; None for what is not known."""
    newest = {}
    for row in read_rows(folder / "metrics.jsonl"):
        newest |= row
    row = {key: newest.get(key) for key in KEYS}
    for name, pattern in IN_THE_LOG.items():
        found = re.search(pattern, read_log(folder), re.MULTILINE)
        row[name] = found[1] if found else None
    return row


def bench_compare(bench: Bench) -> list[dict]:
    """Print a row for each run. Raises UserError."""
    folders = [run for folder in bench.options.folders for run in find_runs(Path(folder))]
    if not folders:
        raise UserError("compare takes folders of runs, such as runs/*")
    rows = []
    for folder, flags in zip(folders, differing_flags(folders)):
        rows.append(dict(run=str(folder), flags=flags) | row_of_run(folder))
    print(table("Runs", rows, "val_loss: nats per token. val_bpb: bits per byte."))
    return rows
