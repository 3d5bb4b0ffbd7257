"""sample.py: text and perplexity from a checkpoint."""

import io
import math
import re
import shutil
import subprocess
import sys
import unittest.mock
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import sample
from common.errors import run_command
from conftest import ROOT, random_gpt
from inference import evaluation
from runtime.checkpoint import read_checkpoint


def test_sampled_text_depends_on_its_seed_alone(plain, capsys):
    def out(*argv):
        assert run_command(sample.main, ["--run", str(plain), "--max_new_tokens", "60", *argv]) == 0
        return capsys.readouterr().out

    text = out("--prompt", "abc", "--seed", "3")
    assert text.startswith("abc") and len(text) > 10
    assert out("--prompt", "abc", "--seed", "3") == text != out("--prompt", "abc", "--seed", "4")
    both = out("--prompt", "abc", "x", "--num_samples", "2", "--seed", "3")
    parts = both.split("--- sample ")
    assert [part.partition("\n")[0] for part in parts] == ["", "1", "2", "3", "4"]
    assert parts[1].startswith("1\n" + text) and parts[3].startswith("3\nx")
    assert parts[1][1:] != parts[2][1:]


def test_a_prompt_that_is_cut_is_said(noisy, capsys):
    for n, cut in ((32, False), (1033, True)):
        argv = ["--run", str(noisy), "--max_new_tokens", "1", "--prompt", "a" * n]
        assert run_command(sample.main, argv) == 0
        said = "the prompt has 1,033 tokens; the model reads the final 32, its context length\n"
        assert (said in capsys.readouterr().err) == cut


def test_the_tours_notebook(plain, capsys):
    (code,) = re.findall("```python\n(.*?)```", (ROOT / "docs/tour.md").read_text(), re.DOTALL)
    names = dict(run=plain)  # a pathlib.Path
    exec(code.replace('"runs/tour"', "run"), names)
    assert names["logits"].shape[:2] == (1, 5) and len(capsys.readouterr().out) > 40


def test_a_closed_console_is_no_error(noisy, monkeypatch):
    command = ["--run", str(noisy), "--max_new_tokens", "5"]
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


WHOLE = "aé€😀z€\ufffd\ufffd"


# The last stop is in the prompt, where it counts for nothing
@pytest.mark.parametrize(
    "stop, kept", [("€", "aé"), ("é€", "a"), ("aé", ""), ("z!", WHOLE), (">", WHOLE)]
)
def test_a_sample_ends_before_the_stop_text_and_splits_no_character(
    stop, kept, noisy, capsys, draw
):
    draw("aé€😀z€".encode() + b"\xff\xe2")
    assert run_command(sample.main, ["--run", str(noisy), "--prompt", "> ", "--stop", stop]) == 0
    assert capsys.readouterr().out == f"> {kept}\n"
    assert (
        run_command(sample.main, ["--run", str(noisy), "--prompt", "> ", "", "--stop", stop]) == 0
    )
    assert capsys.readouterr().out == f"--- sample 1\n> {kept}\n--- sample 2\n{kept}\n"


def test_nothing_of_a_stop_is_shown_while_it_is_drawn(noisy, monkeypatch, draw):
    shown = []
    monkeypatch.setattr(
        "builtins.print", lambda text="", **options: options.get("file") or shown.append(text)
    )
    draw(b"one\nYou: two")
    assert (
        run_command(sample.main, ["--run", str(noisy), "--prompt", "> ", "--stop", "\nYou:"]) == 0
    )
    letter_by_letter = "".join(shown) == "> one" and shown[1:4] == ["o", "n", "e"]
    assert letter_by_letter or shown == ["> ", "one"], shown


def printed_perplexity(capsys) -> list[float]:
    """How many tokens, bytes and words; the nats of one of each; bits per byte."""
    shown = capsys.readouterr().out.replace(",", "")
    rows = [line.split() for line in shown.splitlines() if line.startswith("per ")]
    return [float(row[i]) for i in (2, 4) for row in rows] + [float(rows[1][5])]


def expected_perplexity(loss: float, *counts: int):
    bits_per_byte = loss / counts[1] / math.log(2)
    return pytest.approx([*counts, *(loss / n for n in counts), bits_per_byte], abs=1e-4)


@pytest.mark.parametrize("stride", [0, 7])
def test_perplexity_is_that_of_a_plain_loop(stride, noisy, tmp_path, capsys):
    raw = ("hällo <unk> @-@ \n = " * 30).encode()  # words as in WikiText
    (tmp_path / "text").write_bytes(raw)
    command = f"--run {noisy} --perplexity {tmp_path}/text --dtype fp32 --stride {stride}"
    assert run_command(sample.main, command.split()) == 0
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
    assert printed_perplexity(capsys) == expected_perplexity(sum(losses), len(raw), len(raw), 120)


def test_perplexity_with_gpt2_counts_the_text_that_is_tokenized(gpt2, tmp_path, capsys):
    text = "plain text, " * 50 + "漢字🙂" + " and more" * 50
    (tmp_path / "raw").write_text(text)
    model = random_gpt(vocab_size=50304)
    evaluation.print_perplexity(model, gpt2, tmp_path / "raw", 24)
    tokens = gpt2.tiktoken.encode_ordinary(text)
    loss = evaluation.summed_loss(model, np.array(tokens), gpt2.eot, 24)
    counts = len(tokens), len(text.encode()), len(text.split())
    assert printed_perplexity(capsys) == expected_perplexity(loss, *counts)


@pytest.mark.parametrize("end", ["", "\n"])
def test_interactive_continues_each_line(end, noisy, capsys, monkeypatch, draw):
    draw(b"7")
    monkeypatch.setattr("sys.stdin", io.StringIO("abc\nx"))
    assert (
        run_command(sample.main, ["--run", str(noisy), "--interactive", *filter(None, [end])]) == 0
    )
    shown = capsys.readouterr()
    assert shown.out == f"abc{end}7\nx{end}7\n" and shown.err.count("> ") == 3


def test_flags_of_sample_that_cannot_be(noisy, plain, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("text").write_text("text")
    Path("empty").touch()
    Path("run").mkdir()
    shutil.copy(plain / "ckpt_20.pt", "run")
    for flags, says in (
        ("--stride 8", "--stride is for --perplexity"),
        ("--perplexity text --compile", "--compile has no effect with --perplexity"),
        ("--perplexity text --choices text", "--choices has no effect with --perplexity"),
        ("--choices text --top_k 9", "--top_k has no effect with --choices"),
        ("--no_cache --compile", "--compile has no effect with --no_cache"),
        ("--interactive --prompt a", "--prompt has no effect with --interactive"),
        ("--max_new_tokens 0", "expected at least 1"),
        ("--max_new_tokens 99999999999999999999", "below 2**31"),
        ("--top_p 1.1", "at most 1"),
        ("--perplexity text --stride 33", "at most the context"),
        ("--perplexity none", "is not a plain text file"),
        ("--perplexity empty", "is empty"),
        ("--choices none", "there is no file"),
        ("--choices empty", "has no questions"),
        ("--best", "but --best is for a run's folder"),
        (f"--run {300 * 'x'}", "x; give the folder of a run, or a checkpoint file"),
        ("--run .", "holds no ckpt_<step>.pt; give the folder of a run that has saved"),
        (
            "--run run --best",
            "by evaluations during a run; remove --best to use ckpt_20.pt",
        ),
    ):
        assert run_command(sample.main, ["--run", str(noisy), *flags.split()]) == 2, flags
        assert says in capsys.readouterr().err, flags


@pytest.mark.parametrize("says", ["does not fit this model", "not finite", "unknown tokenizer"])
def test_a_checkpoint_that_cannot_be_sampled_is_said(says, noisy, tmp_path, capsys):
    checkpoint = read_checkpoint(noisy)
    if says == "unknown tokenizer":
        checkpoint["tokenizer"] = "llama"
    elif says == "not finite":
        checkpoint["model"]["head.weight"][0, 0] = math.nan
    else:
        checkpoint["model_config"]["vocab_size"] = 200
    torch.save(checkpoint, tmp_path / "ckpt_1.pt")
    assert run_command(sample.main, ["--run", str(tmp_path)]) == 2
    shown = capsys.readouterr()
    assert says in shown.err and len(shown.err.splitlines()) == 1 and not shown.out


def test_sample_ends_without_a_traceback(noisy, capsys, monkeypatch):
    for error, code, says in (
        (KeyboardInterrupt(), 130, ""),
        (RuntimeError("CUDA out of memory"), 1, "--num_samples"),
    ):
        monkeypatch.setattr(sample, "load", unittest.mock.Mock(side_effect=error))
        assert (
            run_command(sample.main, ["--run", str(noisy)]) == code
            and says in capsys.readouterr().err
        )
