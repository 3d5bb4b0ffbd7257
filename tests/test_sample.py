"""sample.py: text and perplexity from a checkpoint."""

import io
import math
import unittest.mock

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import evaluation
import sample
from conftest import random_gpt
from data.tokenizers import get_tokenizer
from runtime.checkpoint import read_checkpoint


def test_sampled_text_depends_on_its_seed_alone(plain, tmp_path, capsys):
    def out(*argv):
        assert sample.main(["--run", str(plain), "--max_new_tokens", "60", *argv]) == 0
        return capsys.readouterr().out

    text = out("--prompt", "abc", "--seed", "1")
    assert text.startswith("abc") and len(text) > 10
    assert out("--prompt", "abc", "--seed", "1") == text != out("--prompt", "abc", "--seed", "2")
    both = out("--prompt", "abc", "x", "--num_samples", "2", "--seed", "1")
    assert [part.split("\n", 1)[0] for part in both.split("--- sample ")[1:]] == ["1", "2", "3", "4"]
    assert both.startswith("--- sample 1\n" + text) and both.split("--- sample ")[3].startswith("3\nx")
    assert sample.main(["--run", str(tmp_path)]) == 2 and "holds no ckpt" in capsys.readouterr().err


def test_streamed_text_never_splits_a_character(noisy, capsys, monkeypatch):
    raw = "aé€😀z".encode() + b"\xff\xe2"
    monkeypatch.setattr(sample, "generate", lambda *args: (torch.tensor([byte]) for byte in raw))
    assert sample.main(["--run", str(noisy), "--prompt", "> "]) == 0
    assert capsys.readouterr().out == "> aé€😀z\ufffd\ufffd\n"
    assert get_tokenizer("bytes").decode_bytes([104, 105, 256]) == b"hi<|endoftext|>"


def printed_perplexity(capsys) -> tuple[int, int, float, float]:
    """Tokens, bytes, nats per token and bits per byte, as printed."""
    rows = {line.split()[1]: line.split() for line in capsys.readouterr().out.splitlines() if line.startswith("per ")}
    tokens, n_bytes = (int(rows[unit][2].replace(",", "")) for unit in ("token", "byte"))
    return tokens, n_bytes, float(rows["token"][4]), float(rows["byte"][5])


def loss_by_windows(gpt, raw: bytes, stride: int) -> float:
    """Nats per byte: each window counts what no earlier one has."""
    stream, losses, end = torch.tensor([256, *raw]), [], 0
    while end < len(raw):
        counted, end = end, min(len(raw), end + (stride if end else 32))
        window = stream[max(0, end - 32) : end + 1]
        losses += F.cross_entropy(gpt(window[None, :-1])[0], window[1:], reduction="none")[counted - end :].tolist()
    assert len(losses) == len(raw)
    return sum(losses) / len(raw)


TEXT = "hällo wörld " * 30
FILES = {  # name: bytes of the file, what is read, and the stride
    "plain": (TEXT.encode(), TEXT.encode(), 32),
    "stride": (TEXT.encode(), TEXT.encode(), 7),
}


@pytest.mark.parametrize("name", FILES)
def test_perplexity_against_a_plain_loop(name, noisy, tmp_path, capsys):
    raw, read, stride = FILES[name]
    (tmp_path / "text").write_bytes(raw)
    argv = ["--run", str(noisy), "--perplexity", str(tmp_path / "text"), "--dtype", "fp32"]
    assert sample.main(argv + ["--stride", str(stride)] * (stride < 32)) == 0
    n_tokens, n_bytes, nats, bits = printed_perplexity(capsys)
    loss = loss_by_windows(sample.load(noisy, "cpu", "fp32")[0], read, stride)
    assert n_tokens == n_bytes == len(read)
    assert nats == pytest.approx(loss, abs=1e-4) and bits == pytest.approx(loss / math.log(2), abs=1e-4)


def test_what_has_no_perplexity_is_told(noisy, tmp_path, capsys):
    for raw, says in ((TEXT.encode() + b"\xff", "is not UTF-8 text at byte"), (b"", "is empty")):
        (tmp_path / "text").write_bytes(raw)
        assert sample.main(["--run", str(noisy), "--perplexity", str(tmp_path / "text")]) == 2
        assert says in capsys.readouterr().err


def test_perplexity_with_gpt2_counts_the_text_that_is_tokenized(gpt2, tmp_path, capsys):
    text = "plain text, " * 50 + "漢字🙂" + " and more" * 50
    (tmp_path / "raw").write_text(text)
    model = random_gpt(vocab_size=50304)
    evaluation.print_perplexity(model, gpt2, tmp_path / "raw", 24)
    n_tokens, n_bytes, nats, bits = printed_perplexity(capsys)
    tokens = gpt2.tiktoken.encode_ordinary(text)
    assert (n_tokens, n_bytes) == (len(tokens), len(text.encode()))
    loss = evaluation.summed_loss(model, np.array(tokens), gpt2.eot, 24) / len(tokens)
    assert nats == pytest.approx(loss, abs=1e-4)
    assert bits == pytest.approx(loss * len(tokens) / n_bytes / math.log(2), abs=1e-4)


def test_interactive_continues_each_line(noisy, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("abc\nx\n"))
    assert sample.main(["--run", str(noisy), "--interactive", "--max_new_tokens", "5"]) == 0
    shown = capsys.readouterr()
    assert shown.out.startswith("abc") and "\nx" in shown.out and shown.err.count("> ") == 3
    assert shown.err.count("5 tokens, ") == 2


@pytest.mark.parametrize(
    "flags, says",
    [
        ("--stride 8", "--stride is for --perplexity"),
        ("--perplexity F --compile", "--compile does nothing"),
        ("--no_cache --compile", "remove one of them"),
        ("--perplexity F --top_k 9", "--top_k does nothing"),
        ("--max_new_tokens 0", "expected at least 1"),
        ("--perplexity F --interactive", "does nothing"),
        ("--perplexity F --stride 33", "at most the model"),
        ("--interactive --prompt a", "remove --prompt"),
        ("--stride -1 --perplexity F", "expected at least 0"),
    ],
)
def test_flags_of_sample_that_cannot_be(flags, says, noisy, tmp_path, capsys):
    (tmp_path / "F").write_text("text")
    argv = ["--run", str(noisy), *(str(tmp_path / flag) if flag == "F" else flag for flag in flags.split())]
    assert sample.main(argv) == 2 and says in capsys.readouterr().err


@pytest.mark.parametrize(
    "key, value, says",
    [
        ("vocab_size", 200, "a vocabulary of 200, and its tokenizer has 257"),
        ("head", math.nan, "not finite"),
        ("tokenizer", "llama", "unknown tokenizer 'llama'"),
    ],
)
def test_a_checkpoint_that_cannot_be_sampled_is_said(key, value, says, noisy, tmp_path, capsys):
    checkpoint = read_checkpoint(noisy)
    if key == "tokenizer":
        checkpoint[key] = value
    elif key == "head":
        checkpoint["model"]["head.weight"][0, 0] = value
    else:
        checkpoint["model_config"][key] = value
    torch.save(checkpoint, tmp_path / "ckpt_1.pt")
    assert sample.main(["--run", str(tmp_path), "--max_new_tokens", "5"]) == 2
    shown = capsys.readouterr()
    assert says in shown.err and len(shown.err.splitlines()) == 1 and not shown.out


def test_sample_ends_without_a_traceback(noisy, capsys, monkeypatch):
    for error, code, says in ((KeyboardInterrupt(), 130, ""), (RuntimeError("CUDA out of memory"), 1, "--num_samples")):
        monkeypatch.setattr(sample, "load", unittest.mock.Mock(side_effect=error))
        assert sample.main(["--run", str(noisy)]) == code and says in capsys.readouterr().err
