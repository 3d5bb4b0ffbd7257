"""sample.py: text and perplexity from a checkpoint."""

import math
import re

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import sample
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
