"""Learning rates by width, depth, steps and batch: trains what results.jsonl lacks, then draws docs/rates.svg.

    python records/bench/2026-11-23_rates/rates.py PYTHON ENGLISH

In the repository's root. PYTHON and ENGLISH: data folders of 1,024 byte pairs: the default corpus, and Debian's
linux-doc-6.1 and perl-doc (.rst.txt and .pod files, without translations). Without them it draws only. One thread;
the whole table takes about five hours. Needs matplotlib.
"""

import contextlib
import dataclasses
import io
import json
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
import torch
from matplotlib.figure import Figure

import model
from train_gpt import make_config, train

RESULTS = Path(__file__).resolve().with_name("results.jsonl")
BASE = dict(n_layer=2, seq_len=512, batch_tokens=8192, max_steps=400, muon_lr=0.03, adam_lr=0.012, ngram=0, seed=0)
DECAY = dict(weight_decay=0.05)  # the default, which most rows leave out
FIXED = dict(eval_every=0, eval_tokens=262144, compile="default", dtype="bf16", log_every=100)


def row_of(width: int, text: str = "python", factors: dict | None = None, **flags) -> dict:
    """A training: flags, and factors of the parameter table's own multiples of adam_lr."""
    flags = BASE | dict(n_embd=width, n_head=max(1, width // 128)) | flags
    return dict(text=text, factors=factors or {}, flags=flags)


def rows() -> list[dict]:
    """All trainings of the table: around 0.03 and 0.012, one thing at a time."""
    found = []
    for width, steps in ((64, 400), (128, 400), (256, 400), (384, 300)):
        found += [row_of(width, max_steps=steps, muon_lr=lr) for lr in (0.0075, 0.015, 0.03, 0.06)]
        found += [row_of(width, max_steps=steps, adam_lr=lr) for lr in (0.003, 0.006, 0.024, 0.048)]
    found += [row_of(width, n_layer=6, muon_lr=lr) for width in (64, 128) for lr in (0.015, 0.03, 0.06)]
    for batch, steps in ((8192, 1600), (4096, 800), (32768, 100)):
        rates = (0.0075, 0.015, 0.03, 0.06, 0.12)
        found += [row_of(64, max_steps=steps, batch_tokens=batch, muon_lr=lr) for lr in rates]
    grams = dict(ngram=3, ngram_rows=131072)
    found += [row_of(128, muon_lr=lr, **grams) for lr in (0.015, 0.03, 0.06)]
    found += [row_of(128, adam_lr=lr, **grams) for lr in (0.006, 0.024)]
    for width in (64, 128):
        groups = [{name: factor} for name in ("embedding", "head") for factor in (0.25, 0.5, 2.0, 4.0)]
        found += [row_of(width, factors=factors) for factors in groups]
        rates = (0.004, 0.008, 0.016, 0.032)
        found += [row_of(width, adam_lr=lr, optimizer="adamw") for lr in rates]
    found += [row_of(width, seed=seed) for width in (64, 128, 256) for seed in (1, 2)]
    found += [row_of(256, seed=1, adam_lr=lr) for lr in (0.006, 0.024)]
    for seed in (1, 2):
        found += [row_of(width, seed=seed, muon_lr=lr) for width in (64, 128) for lr in (0.015, 0.06)]
        found += [row_of(64, seed=seed, adam_lr=lr) for lr in (0.006, 0.024, 0.048)]
    for decay in (0.0, 0.1, 0.2, 0.4):
        found += [row_of(128, weight_decay=decay), row_of(128, weight_decay=decay, **grams)]
        found += [row_of(64, max_steps=1600, weight_decay=decay)]
    for seed in (1, 2):
        found += [row_of(128, seed=seed, weight_decay=decay) for decay in (0.0, 0.2)]
    for width in (64, 128, 256):
        found += [row_of(width, "english", muon_lr=lr) for lr in (0.015, 0.03, 0.06)]
        found += [row_of(width, "english", adam_lr=lr) for lr in (0.006, 0.024)]
    found += [row_of(384, max_steps=300, seed=1, adam_lr=0.006)]
    return found


def key_of(row: dict) -> str:
    return json.dumps([row["text"], row["factors"], row["flags"]], sort_keys=True)


def read_results() -> dict[str, dict]:
    lines = RESULTS.read_text().splitlines() if RESULTS.exists() else []
    return {key_of(row): row for row in map(json.loads, lines)}


def run(row: dict, data: str) -> dict:
    """The row with its validation loss in nats a token, of 262,144 tokens."""
    table = dict(model.PARAM_TABLE)
    for name, factor in row["factors"].items():
        model.PARAM_TABLE[name] = dataclasses.replace(table[name], lr_mul=factor * table[name].lr_mul)
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        summary = train(make_config(data=data, out_dir=f"{folder}/run", **row["flags"], **FIXED))
    model.PARAM_TABLE.update(table)
    return row | dict(val_loss=summary["val_loss"])


def losses(done: dict, over: str, text: str = "python", **flags) -> list[tuple[float, float, int]]:
    """(rate, loss, seeds) of the rows with these flags, all else as in BASE; the median over seeds."""
    found: dict[float, list[float]] = {}
    width = flags.pop("n_embd")
    expected = row_of(width, text, **flags)
    for row in done.values():
        flags, alike = DECAY | row["flags"], {over: 0, "seed": 0}
        same = flags | alike == DECAY | expected["flags"] | alike
        if same and row["text"] == text and not row["factors"]:
            found.setdefault(flags[over], []).append(row["val_loss"])
    return sorted((rate, statistics.median(each), len(each)) for rate, each in found.items())


WIDTHS = [dict(n_embd=64), dict(n_embd=128), dict(n_embd=256), dict(n_embd=384, max_steps=300)]
STEPS = [dict(), dict(max_steps=1600), dict(max_steps=800, batch_tokens=4096), dict(max_steps=100, batch_tokens=32768)]
GRAMS = dict(ngram=3, ngram_rows=131072)
LINES = [  # name, which rate, and flags
    *((f"{flags['n_embd']} wide", "muon_lr", flags) for flags in WIDTHS),
    *((f"{flags['n_embd']} wide", "adam_lr", flags) for flags in WIDTHS),
    *(
        (f"{f.get('max_steps', 400):,} x {f.get('batch_tokens', 8192):,} tokens", "muon_lr", {"n_embd": 64} | f)
        for f in STEPS
    ),
    ("64 wide, 6 layers", "muon_lr", dict(n_embd=64, n_layer=6)),
    ("128 wide, 6 layers", "muon_lr", dict(n_embd=128, n_layer=6)),
    *((f"{width} wide, English", "muon_lr", dict(n_embd=width, text="english")) for width in (64, 128, 256)),
    *((f"{width} wide, English", "adam_lr", dict(n_embd=width, text="english")) for width in (64, 128, 256)),
    ("128 wide, n-grams", "muon_lr", dict(n_embd=128) | GRAMS),
    ("128 wide, n-grams", "adam_lr", dict(n_embd=128) | GRAMS),
    ("128 wide", "weight_decay", dict(n_embd=128)),
    ("128 wide, n-grams", "weight_decay", dict(n_embd=128) | GRAMS),
    ("1,600 x 8,192 tokens", "weight_decay", dict(n_embd=64, max_steps=1600)),
    ("64 wide, AdamW", "adam_lr", dict(n_embd=64, optimizer="adamw")),
    ("128 wide, AdamW", "adam_lr", dict(n_embd=128, optimizer="adamw")),
]
PANELS = {"muon_lr by width": 0, "adam_lr by width": 4, "muon_lr by steps and batch, 64 wide": 8}  # of four lines


def show(done: dict) -> None:
    """The table of README.md: losses by rate, with the number of seeds where there are several."""
    for name, over, flags in LINES:
        cells = [
            f"{rate:g}: {loss:.3f}" + (f" ({n})" if n > 1 else "") for rate, loss, n in losses(done, over, **flags)
        ]
        print(f"| {name} | {over} | {', '.join(cells)} |")


def draw(done: dict, path: Path) -> None:
    """Loss over Muon's and Adam's learning rate, a line a width, in per cent above the line's lowest."""
    matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "rates", "font.size": 9})
    figure = Figure(figsize=(9, 3.4), layout="constrained")
    for axes, (title, first) in zip(figure.subplots(1, 3, sharey=True), PANELS.items()):
        for number, (name, over, flags) in enumerate(LINES[first : first + 4]):
            rates, found, _ = zip(*losses(done, over, **flags))
            above = [100 * (loss / min(found) - 1) for loss in found]
            axes.plot(rates, above, marker="o", color=f"C{number}", label=name)
        axes.set(xscale="log", title=title, xlabel=over, ylim=(-0.3, 10))
        axes.set_xticks([0.004, 0.0075, 0.015, 0.03, 0.06], ["0.004", "0.0075", "0.015", "0.03", "0.06"])
        axes.minorticks_off()
        axes.grid(alpha=0.3)
        axes.legend(fontsize=7)
    figure.axes[0].set_ylabel("loss above the line's lowest, %")
    figure.savefig(path, metadata=dict.fromkeys(("Date", "Creator")))


if __name__ == "__main__":
    torch.set_num_threads(1)
    done = read_results()
    if len(sys.argv) == 3:
        folders = dict(zip(("python", "english"), sys.argv[1:]))
        for row in rows():
            if key_of(row) not in done:
                done[key_of(row)] = run(row, folders[row["text"]])
                with open(RESULTS, "a") as file:
                    file.write(json.dumps(done[key_of(row)]) + "\n")
    show(done)
    draw(done, Path("docs/rates.svg"))
