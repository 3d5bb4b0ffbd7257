"""`bench.py tour`: one model through every stage of docs/tour.md, by the commands that a reader would type."""

import json
import math
import os
import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

from benchmarks.harness import Bench, CaseFailed, progress, table
from data.prepare import prepare
from data.shards import load_meta
from data.stream import TokenStream
from data.tokenizers import get_tokenizer
from runtime.logger import read_rows
from train_gpt import HERE, data_folder, make_config

TRAINING = {
    "fp32": "--dtype fp32",
    "+ mixed precision": "--dtype bf16",
    "+ checkpointing": "--dtype bf16 --checkpointing full",
    "+ compile": "--dtype bf16 --checkpointing full --compile",
}
GENERATION = {"no cache": "--no_cache", "+ KV cache": "", "+ compile": "--compile", "+ int8": "--compile --int8"}


def run(script: str, *argv) -> tuple[str, str]:
    """Standard output and error of a script of ours. Raises CaseFailed with its last line."""
    env = os.environ | dict(PYTHONIOENCODING="utf-8")
    command = [sys.executable, str(HERE / script), *map(str, argv)]
    done = subprocess.run(command, capture_output=True, encoding="utf-8", errors="replace", env=env)
    if done.returncode:
        raise CaseFailed(f"FAILED: {(done.stderr.strip() or done.stdout.strip() or 'no word').splitlines()[-1]}")
    return done.stdout, done.stderr


def trained_figures(folder: Path) -> dict:
    """Memory, speed after the first logged step and perplexity of a run."""
    summary = json.loads((folder / "summary.json").read_text())
    rows = read_rows((folder / "metrics.jsonl").read_text())
    logged = [row for row in rows if row.get("tokens_per_s") is not None]
    peak, perplexity = max(row["peak_mem_mb"] for row in logged), math.exp(summary["val_loss"])
    return dict(peak_mb=peak, tokens_per_s=logged[-1]["tokens_per_s"], perplexity=perplexity)


def sampled_figures(trained: Path, command: list, text: Path, device: list) -> dict:
    """Memory, speed, perplexity and the beginning of what sample.py writes."""
    said, speed = run("sample.py", "--run", trained, *command)
    int8 = [flag for flag in command if flag == "--int8"]
    measured, _ = run("sample.py", "--run", trained, "--perplexity", text, *device, *int8)
    figures = {name: re.search(rf"([\d,]+) {name}", speed) for name in ("tokens/s", "MiB")}
    tokens_per_s, peak_mb = (float(found[1].replace(",", "")) if found else None for found in figures.values())
    perplexity = math.exp(float(re.search(r"per token +\S+ +\S+ +(\S+)", measured)[1]))
    sample = " ".join(said.split())[:60].replace("|", " ")
    return dict(peak_mb=peak_mb, tokens_per_s=tokens_per_s, perplexity=perplexity, sample=sample)


def validation_text(folder: Path, n_tokens: int, out: Path) -> Path:
    """The first tokens of the validation split as a text file."""
    tokens = TokenStream(folder, n_tokens, n_tokens).val.read_sequences(np.array([0]), n_tokens)[0]
    tokenizer = get_tokenizer(load_meta(folder)["tokenizer"])
    out.write_bytes(tokenizer.decode_bytes([token for token in tokens.tolist() if token != tokenizer.eot]))
    return out


def bench_tour(bench: Bench) -> dict:
    """Train in four stages, then write text in four: memory, speed, perplexity and a sample of each."""
    bench.reject_flags("dtype", "checkpointing", "compile", "max_steps", "out_dir")
    flags = {"preset": "mini", "batch_tokens": 8192, **bench.flags}
    steps, n_tokens, n_val = (4, 40, 1024) if bench.quick else (30, 500, 8192)
    cfg = make_config(**flags)
    folder = data_folder(cfg)
    if not cfg.data:
        prepare("python", out=folder)
    given = [part for name, value in flags.items() for part in (f"--{name}", str(value))]
    rows, device = [], ["--device", flags["device"]] if "device" in flags else []
    with tempfile.TemporaryDirectory() as temporary:
        out = Path(temporary)
        text, trained = validation_text(folder, n_val, out / "val.txt"), None
        for i, (stage, added) in enumerate(TRAINING.items()):
            command = [*given, "--max_steps", steps, "--eval_tokens", n_val, "--eval_every", 0, *added.split()]
            shown = shlex.join(["python", "train_gpt.py", *map(str, command)])
            rows.append(dict(stage=f"train: {stage}", command=shown, note=""))
            try:
                run("train_gpt.py", *command, "--out_dir", out / str(i))
                trained = out / str(i)
                rows[-1] |= trained_figures(trained)
            except CaseFailed as error:
                rows[-1]["note"] = str(error)
            progress(rows[-1]["stage"])
        for stage, added in GENERATION.items() if trained else ():
            command = ["--prompt", "def ", "--max_new_tokens", n_tokens, *device, *added.split()]
            shown = shlex.join(["python", "sample.py", "--run", "RUN", *map(str, command)])
            rows.append(dict(stage=f"sample: {stage}", command=shown, note=""))
            try:
                rows[-1] |= sampled_figures(trained, command, text, device)
            except CaseFailed as error:
                rows[-1]["note"] = str(error)
            progress(rows[-1]["stage"])
    columns = {"stage": ("stage", ""), "peak_mb": ("peak MiB", ",.0f"), "tokens_per_s": ("tokens/s", ",.0f"),
               "perplexity": ("perplexity", ",.3f"), "command": ("command", ""), "sample": ("text", ""),
               "note": ("", "")}  # fmt: skip
    note = (
        f"Training: {steps} steps a stage; sampling: {n_tokens} tokens of the last stage's model. Perplexity a token: "
        f"training's of {n_val:,} validation tokens, sampling's of the same text."
    )
    print(table("Tour", rows, columns, (note,)))
    return dict(tour=rows)
