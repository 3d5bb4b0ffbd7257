"""sample.py: text and perplexity from a checkpoint."""

import math
import re

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import sample
from conftest import quiet, random_gpt
from data.prepare import prepare
from data.shards import load_meta
from data.tokenizers import get_tokenizer
from model import GPT, GPTConfig
from runtime.checkpoint import read_checkpoint


def test_sample_and_perplexity(data, noisy, plain, tmp_path, capsys):
    def out(*argv):
        capsys.readouterr()
        assert sample.main([str(a) for a in argv]) == 0
        return capsys.readouterr().out

    text = out("--run", plain, "--prompt", "abc", "--max_new_tokens", 60, "--seed", 3)
    assert text.startswith("abc") and len(text) > 10
    assert out("--run", plain, "--prompt", "abc", "--max_new_tokens", 60, "--seed", 3) == text
    assert out("--run", plain, "--prompt", "abc", "--max_new_tokens", 60, "--seed", 4) != text
    assert out("--run", noisy, "--num_samples", 2, "--max_new_tokens", 5).count("--- sample") == 2
    (tmp_path / "text").write_text("hällo wörld " * 9)
    raw = np.frombuffer(("hällo wörld " * 9).encode(), dtype=np.uint8).astype(np.int64)
    checkpoint = read_checkpoint(noisy)
    gpt = GPT(GPTConfig(**checkpoint["model_config"]))
    gpt.load_state_dict(checkpoint["model"])
    stream, losses = torch.from_numpy(np.concatenate(([256], raw))), []
    for i in range(0, len(raw), 32):
        piece = stream[i : i + 33]
        losses += F.cross_entropy(gpt(piece[None, :-1])[0], piece[1:], reduction="none").tolist()
    printed = out("--run", noisy, "--perplexity", tmp_path / "text", "--dtype", "fp32")
    per_token, per_byte = (float(re.search(rf"per {unit} ([\d.]+)", printed)[1]) for unit in ("token", "byte"))
    assert per_token == pytest.approx(math.exp(np.mean(losses)), rel=1e-4) == per_byte
    assert sample.main(["--run", str(tmp_path)]) == 2 and "holds no ckpt" in capsys.readouterr().err


def test_streamed_text_never_splits_a_character(noisy, capsys, monkeypatch):
    raw = "aé€😀z".encode() + b"\xff\xe2"
    monkeypatch.setattr(sample, "generate", lambda *args: map(torch.tensor, raw))
    assert sample.main(["--run", str(noisy), "--prompt", "> "]) == 0
    assert capsys.readouterr().out == "> aé€😀z\ufffd\ufffd\n"
    assert get_tokenizer("bytes").decode_bytes([104, 105, 256]) == b"hi<|endoftext|>"


def printed_perplexity(capsys) -> tuple[int, int, float, float]:
    """Tokens, bytes, nats per token and bits per byte, as printed."""
    form = r": ([\d,]+) tokens, ([\d,]+) bytes\n.*\(([\d.]+) nats\)\n.*\(([\d.]+) bits\)"
    tokens, n_bytes, nats, bits = re.search(form, capsys.readouterr().out).groups()
    return int(tokens.replace(",", "")), int(n_bytes.replace(",", "")), float(nats), float(bits)


def test_perplexity_reads_a_file_as_preparation_does(noisy, tmp_path, capsys):
    """With the bytes tokenizer every byte is a token, whether it is UTF-8 or not, and the loss is that of these."""
    checkpoint = read_checkpoint(noisy)
    gpt = GPT(GPTConfig(**checkpoint["model_config"]))
    gpt.load_state_dict(checkpoint["model"])
    text = "hällo wörld " * 99
    for name, raw, tokens in (
        ("stray", text.encode() + b"\xff\n", text.encode() + b"\xff\n"),
        ("noise", bytes(range(256)) * 4, bytes(range(256)) * 4),
        ("latin", text.encode("latin-1"), text.encode("latin-1")),
        ("utf16", text.encode("utf-16"), text.encode()),
        ("marked", text.encode("utf-8-sig"), text.encode()),
    ):
        (tmp_path / name).write_bytes(raw)
        capsys.readouterr()
        assert sample.main(["--run", str(noisy), "--perplexity", str(tmp_path / name), "--dtype", "fp32"]) == 0
        n_tokens, n_bytes, nats, bits = printed_perplexity(capsys)
        assert n_tokens == n_bytes == len(tokens)
        loss = sample.mean_loss(gpt, np.frombuffer(tokens, np.uint8), 256)
        assert nats == pytest.approx(loss, abs=1e-4) and bits == pytest.approx(loss / math.log(2), abs=1e-4)
        if name not in ("noise", "latin"):  # which preparation refuses
            folder = prepare("files", [tmp_path / name], "bytes", tmp_path / f"{name}.data", say=quiet)
            splits = load_meta(folder)["splits"].values()
            assert (
                sum(counts["bytes"] for counts in splits) == n_bytes == sum(counts["tokens"] - 1 for counts in splits)
            )
    (tmp_path / "bad").write_bytes("text".encode("utf-16") + b"\0")
    (tmp_path / "empty").write_bytes(b"\xef\xbb\xbf")
    for name, says in (("bad", "is not text (byte 10 does not decode as utf-16)"), ("empty", "empty is empty")):
        assert sample.main(["--run", str(noisy), "--perplexity", str(tmp_path / name)]) == 2
        assert says in capsys.readouterr().err


def test_perplexity_with_gpt2_counts_the_text_that_is_tokenized(gpt2, tmp_path, capsys):
    raw = b"plain text, " * 50 + b"\xff\xfe\x80" + b" and more" * 50
    (tmp_path / "raw").write_bytes(raw)
    model = random_gpt(vocab_size=50304)
    sample.print_perplexity(model, gpt2, tmp_path / "raw")
    n_tokens, n_bytes, nats, bits = printed_perplexity(capsys)
    tokens = gpt2.tiktoken.encode_ordinary(raw.decode("utf-8", errors="replace"))
    assert (n_tokens, n_bytes) == (len(tokens), len(raw) + 2 * 3)
    loss = sample.mean_loss(model, np.array(tokens), gpt2.eot)
    assert nats == pytest.approx(loss, abs=1e-4)
    assert bits == pytest.approx(loss * len(tokens) / n_bytes / math.log(2), abs=1e-4)
