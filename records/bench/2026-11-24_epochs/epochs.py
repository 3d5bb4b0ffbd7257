"""Dropout of n-grams by how often the text is seen: trains rows of results.jsonl that have no loss, prints the table.

    python records/bench/2026-11-24_epochs/epochs.py [FOLDER]

In the repository's root. FOLDER holds the data folders that README.md here names; without it, it prints only. One
thread.
"""

import contextlib
import io
import json
import os
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, os.getcwd())
from runtime import set_environment

if __name__ == "__main__":
    set_environment()

import torch

from data.shards import load_meta
from train_gpt import make_config, train

RESULTS = Path(__file__).with_name("results.jsonl")
FIXED = dict(n_head=1, batch_tokens=4096, ngram_rows=131072, eval_tokens=524288, compile="default", dtype="fp32")


def run(row: dict, data: Path) -> dict:
    """The row with its losses, after each quarter of the training, in bits per byte of the whole validation split."""
    max_steps = round(row["epochs"] * load_meta(data)["splits"]["train"]["tokens"] / FIXED["batch_tokens"])
    flags = row["flags"] | FIXED | dict(max_steps=max_steps, eval_every=max_steps // 4)
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        train(make_config(data=str(data), out_dir=f"{folder}/run", **flags))
        lines = [json.loads(line) for line in Path(folder, "run/metrics.jsonl").read_text().splitlines()]
    return row | dict(val_bpb=[round(line["val_bpb"], 4) for line in lines if "val_bpb" in line])


def show(rows: list[dict]) -> None:
    """The table of README.md."""
    for row in rows:
        flags = row["flags"]
        dropout = f"{flags['ngram_dropout']}" if flags["ngram"] else "no n-grams"
        size = f"{flags['n_layer']} x {flags['n_embd']}"
        losses = row["val_bpb"]
        print(f"| {row['text']} | {size} | {row['epochs']:g} | {dropout} | {losses[-1]:.4f} | {min(losses):.4f} |")


if __name__ == "__main__":
    torch.set_num_threads(1)
    rows = [json.loads(line) for line in RESULTS.read_text().splitlines()]
    if len(sys.argv) == 2:
        for i, row in enumerate(rows):
            if "val_bpb" not in row:
                rows[i] = run(row, Path(sys.argv[1], row["text"]))
                RESULTS.write_text("".join(json.dumps(row) + "\n" for row in rows))
    show(rows)
