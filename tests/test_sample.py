"""sample.py: text and perplexity from a checkpoint."""

import io
import math
import os
import re
import shutil
import subprocess
import sys
import unittest.mock
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import sample
from common.errors import run_command
from conftest import ROOT, random_gpt
from inference import evaluation
from runtime.checkpoint import read_checkpoint


@pytest.fixture
def run(noisy, capsys):
    """A function that runs sample.py, on the noisy checkpoint unless another is given."""

    def command(*argv, path=noisy, code=0):
        capsys.readouterr()
        assert run_command(sample.main, [*filter(None, [str(path)]), *map(str, argv)]) == code, argv
        return capsys.readouterr()

    return command


def test_sampled_text_depends_on_its_seed_alone(plain, run):
    def texts(*argv):
        return run("--max_new_tokens", 60, *argv, path=plain).out

    text = texts("--prompt", "abc", "--seed", 3)
    assert text.startswith("abc") and len(text) > 10
    assert texts("--prompt", "abc", "--seed", 3) == text != texts("--prompt", "abc", "--seed", 4)
    both = texts("--prompt", "abc", "x", "--num_samples", 34, "--seed", 3).split("--- seed ")[1:]
    assert [part.partition("\n")[0] for part in both] == [*map(str, range(3, 37))] * 2
    assert both[0] == f"3\n{text}" and both[33] != both[32] and both[34].startswith("3\nx")


def test_a_prompt_that_is_cut_is_said(run):
    for n, cut in ((32, False), (1033, True)):
        said = "the prompt has 1,033 tokens; the model reads the final 32, its context length\n"
        assert (said in run("--max_new_tokens", 1, "--prompt", "a" * n).err) == cut


def test_the_notebook_of_the_docs(plain, capsys):
    text = (ROOT / "docs/using.md").read_text()
    code = re.findall("```python\n(.*?)```", text, re.DOTALL)[-1]
    names = dict(run=plain)  # a pathlib.Path
    exec(code.replace('"runs/mine"', "run"), names)
    assert names["logits"].shape[:2] == (1, 4) and len(names["text"]) == 50
    assert len(capsys.readouterr().out) > 40


def test_a_closed_console_is_no_error(noisy, monkeypatch):
    command = [str(noisy), "--max_new_tokens", "5"]
    for stream, flags in (("stdout", []), ("stdin", ["--interactive"])):
        with monkeypatch.context() as patch:
            patch.setattr(sys, stream, None)  # as Python starts without the descriptor
            assert run_command(sample.main, [*command, *flags]) == 0
    line = f"{sys.executable} sample.py {' '.join(command)} --num_samples 2 | true"
    line = f"unset PYTHONUNBUFFERED; {line}; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", line], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and "Error" not in done.stderr


@pytest.fixture
def draw(monkeypatch):
    """A function that makes these bytes the continuation of every prompt."""

    def set_bytes(raw: bytes) -> None:
        def generate(model, prompts, **options):
            for byte in raw:
                yield torch.tensor([byte] * len(prompts))

        monkeypatch.setattr(sample, "generate", generate)

    return set_bytes


# The last stop is in the prompt, where it counts for nothing
WHOLE = "aé€😀z€\ufffd"


@pytest.mark.parametrize("stop, kept", [("€", "aé"), ("aé", ""), ("€z", WHOLE), (">", WHOLE)])
def test_a_sample_ends_before_the_stop_text_and_splits_no_character(stop, kept, run, draw):
    draw("aé€😀z€".encode() + b"\xff\xe2")
    flags = ["--prompt", "> ", "--stop", stop, "--num_samples"]
    assert run(*flags, 2).out == f"--- seed 0\n> {kept}\n--- seed 1\n> {kept}\n"
    assert run(*flags, 1).out == f"> {kept}\n"  # printed letter by letter


def test_interactive_continues_each_line(run, monkeypatch, draw):
    draw(b"7\nYou: 8")
    for end in ("", "\n"):
        monkeypatch.setattr("sys.stdin", io.StringIO("abc\nx"))
        shown = run("--interactive", *filter(None, [end]), "--stop", "\n")
        assert shown.out == f"abc{end}7\nx{end}7\n" and shown.err.count("> ") == 3


@pytest.mark.parametrize("stride", [0, 7])
def test_perplexity_is_that_of_a_plain_loop(stride, noisy, tmp_path, monkeypatch):
    raw = ("hällo <unk> @-@ \n = " * 30).encode()  # words as in WikiText
    (tmp_path / "text").write_bytes(raw)
    tables = []
    monkeypatch.setattr(sample, "print_table", lambda title, table: tables.append(table))
    flags = f"{noisy} --perplexity {tmp_path}/text --dtype fp32 --stride {stride}"
    assert run_command(sample.main, flags.split()) == 0
    gpt, stream = sample.load(noisy, "cpu", "fp32")[0], torch.tensor([256, *raw])
    # Each window counts what no earlier one has
    losses, end = [], 0
    while end < len(raw):
        counted = end
        end += stride if stride and end else 32
        end = min(len(raw), end)
        window = stream[max(0, end - 32) : end + 1]
        loss = F.cross_entropy(gpt(window[None, :-1])[0], window[1:], reduction="none")
        losses += loss[counted - end :].tolist()
    assert len(losses) == len(raw)
    for row, n in zip(tables[0].values(), (len(raw), len(raw), 120)):
        nats = sum(losses) / n
        expected = [n, math.exp(nats), nats, nats / math.log(2)]
        assert [*row.values()] == pytest.approx(expected, rel=1e-4)


def test_perplexity_with_gpt2_counts_the_text_that_is_tokenized(gpt2, tmp_path):
    text = "plain text, " * 50 + "漢字🙂" + " and more" * 50
    (tmp_path / "raw").write_text(text)
    table = evaluation.perplexity(random_gpt(vocab_size=50304), gpt2, tmp_path / "raw", 24)
    tokens = gpt2.tiktoken.encode_ordinary(text)
    counts = [len(tokens), len(text.encode()), len(text.split())]
    assert [row["count"] for row in table.values()] == counts
    (tmp_path / "raw").write_text("two<|endoftext|>documents")
    table = evaluation.perplexity(random_gpt(vocab_size=50304), gpt2, tmp_path / "raw", 24)
    assert table["per word"]["count"] == 2


def test_best_weights_alone_are_sampled(plain, tmp_path, run):
    shutil.copy(plain / "ckpt_20.pt", tmp_path / "ckpt_best.pt")
    assert run("--max_new_tokens", 1, path=tmp_path).out


def test_the_newest_run_is_sampled(plain, tmp_path, monkeypatch, run):
    monkeypatch.chdir(tmp_path)
    for age, name in enumerate(("trials/seed_0", "older"), 1):
        path = Path("runs", name, "ckpt_20.pt")
        path.parent.mkdir(parents=True)
        shutil.copy(plain / "ckpt_20.pt", path)
        os.utime(path, (1e9 - age, 1e9 - age))
    shown = run("--max_new_tokens", 1, path="")
    assert "the newest run is runs/trials/seed_0\n" in shown.err


def test_flags_of_sample_that_cannot_be(noisy, plain, tmp_path, monkeypatch, run):
    monkeypatch.chdir(tmp_path)
    Path("text").write_text("text")
    Path("run").mkdir()
    shutil.copy(plain / "ckpt_20.pt", "run")
    for path, flags, says in (
        (noisy, "--max_new_tokens 0", "expected 1 to"),
        (noisy, "--min_p 1.1", "expected 0 to 1"),
        (noisy, "--perplexity text --stride 33", "at most the context"),
        (noisy, "--perplexity none", "there is no file none; --perplexity needs a text"),
        (noisy, "--choices none", "there is no file"),
        (noisy, "--best", "but --best is for a run's folder"),
        ("none", "", "there is no checkpoint in none; give the folder of a run that has saved"),
        ("", "", "there is no checkpoint in runs; give"),
        ("run", "--best", "there is no ckpt_best.pt in run; give"),
        ("", "--prompt a run", "run is read as text, because it follows --prompt"),
        ("", "--interactive run", "run is read as text"),
    ):
        assert says in run(*flags.split(), path=path, code=2).err, flags
    for flags, says in (
        ("--perplexity text --choices text", "not allowed with argument"),
        ("--interactive --prompt a", "not allowed with argument"),
        ("--out_dir=out", "--out_dir=out; give the run's folder without a flag"),
        ("--start a", "--start; use --prompt"),
    ):
        assert says in run(*flags.split(), code=2).err


def test_a_checkpoint_that_cannot_be_sampled_is_said(noisy, tmp_path, run):
    checkpoint = read_checkpoint(noisy) | dict(tokenizer="llama")
    torch.save(checkpoint, tmp_path / "ckpt_1.pt")
    shown = run(path=tmp_path, code=2)
    assert "unknown tokenizer" in shown.err and len(shown.err.splitlines()) == 1 and not shown.out


def test_sample_ends_without_a_traceback(run, monkeypatch):
    for error, code, says in (
        (KeyboardInterrupt(), 130, ""),
        (RuntimeError("CUDA out of memory"), 1, "--num_samples"),
    ):
        monkeypatch.setattr(sample, "load", unittest.mock.Mock(side_effect=error))
        assert says in run(code=code).err
