"""`bench.py tour`: one model through every stage of docs/tour.md, by the commands that a reader would type."""

import json
import math
import re
import shlex
import tempfile
from pathlib import Path

import numpy as np

from benchmarks.harness import Bench, CaseFailed, progress, run_script, table
from data.bpe import read_vocabulary
from data.prepare import prepare
from data.shards import load_meta
from data.stream import TokenStream
from data.tokenizers import get_tokenizer
from runtime.logger import read_rows
from runtime.start import HERE, data_folder
from train_gpt import make_config

TRAINING = {
    "fp32": "--dtype fp32",
    "+ mixed precision": "--dtype bf16",
    "+ checkpointing": "--dtype bf16 --checkpointing full",
    "+ compile": "--dtype bf16 --checkpointing full --compile",
}
GENERATION = {"no cache": "--no_cache", "+ KV cache": "", "+ compile": "--compile", "+ int8": "--compile --int8"}


def train_stage(command: list, folder: Path) -> dict:
    """Memory, speed after the first logged step and perplexity of a run into this folder. Raises CaseFailed."""
    run_script(HERE / "train_gpt.py", *command, "--out_dir", folder)
    rows = read_rows((folder / "metrics.jsonl").read_text())
    logged = [row for row in rows if row.get("tokens_per_s") is not None]
    perplexity = math.exp(json.loads((folder / "summary.json").read_text())["val_loss"])
    peak_mb = max(row["peak_mem_mb"] for row in logged)
    return dict(peak_mb=peak_mb, tokens_per_s=logged[-1]["tokens_per_s"], perplexity=perplexity)


def sample_stage(command: list, run: Path, text: Path, device: list) -> dict:
    """Memory, speed, perplexity of a text file, and the beginning of what sample.py writes. Raises CaseFailed."""
    said, speed = run_script(HERE / "sample.py", "--run", run, *command)
    same = [word for word in command if word == "--int8"]
    measured, _ = run_script(HERE / "sample.py", "--run", run, "--perplexity", text, *device, *same)
    figures = dict(perplexity=math.exp(float(re.search(r"per token +\S+ +\S+ +(\S+)", measured)[1])))
    for key, unit in (("tokens_per_s", "tokens/s"), ("peak_mb", "MiB")):
        found = re.search(rf"([\d,]+) {unit}", speed)
        figures[key] = float(found[1].replace(",", "")) if found else None
    return figures | dict(sample=" ".join(said.split())[:60].replace("|", " "))


def write_validation_text(folder: Path, n_tokens: int, out: Path) -> None:
    """The first tokens of the validation split as a text file."""
    tokens = TokenStream(folder, n_tokens, n_tokens).val.read_sequences(np.array([0]), n_tokens)[0]
    meta = load_meta(folder)
    vocabulary = read_vocabulary(folder) if meta["tokenizer"] == "bpe" else None
    tokenizer = get_tokenizer(meta["tokenizer"], vocabulary)
    out.write_bytes(tokenizer.decode_bytes([token for token in tokens.tolist() if token != tokenizer.eot]))


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

    def run_stage(name: str, script: str, command: list, stage, *args) -> None:
        shown = shlex.join(["python", *script.split(), *map(str, command)])
        rows.append(dict(stage=name, command=shown, note=""))
        try:
            rows[-1] |= stage(command, *args)
        except CaseFailed as error:
            rows[-1]["note"] = str(error)
        progress(name)

    with tempfile.TemporaryDirectory() as temporary:
        out = Path(temporary)
        write_validation_text(folder, n_val, out / "val.txt")
        for i, (name, added) in enumerate(TRAINING.items()):
            command = [*given, "--max_steps", steps, "--eval_tokens", n_val, "--eval_every", 0, *added.split()]
            run_stage(f"train: {name}", "train_gpt.py", command, train_stage, out / str(i))
        trained = [i for i, row in enumerate(rows) if not row["note"]]
        for name, added in GENERATION.items() if trained else ():
            command = ["--prompt", "def ", "--max_new_tokens", n_tokens, *device, *added.split()]
            model = out / str(trained[-1])
            run_stage(f"sample: {name}", "sample.py --run RUN", command, sample_stage, model, out / "val.txt", device)
    note = (
        f"Training: {steps} steps per stage; sampling: {n_tokens} tokens of the last stage's model. Perplexity per "
        f"token: for training on {n_val:,} validation tokens, for sampling on the same text."
    )
    print(table("Tour", rows, "stage peak_mb tokens_per_s perplexity command sample note".split(), note))
    return dict(tour=rows)
