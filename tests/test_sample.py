"""sample.py: text and perplexity from a checkpoint."""

import io
import math
import re

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import evaluation
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

    text = out("--run", plain, "--prompt", "abc", "--max_new_tokens", 60, "--seed", 1)
    assert text.startswith("abc") and len(text) > 10
    assert out("--run", plain, "--prompt", "abc", "--max_new_tokens", 60, "--seed", 1) == text
    assert out("--run", plain, "--prompt", "abc", "--max_new_tokens", 60, "--seed", 2) != text
    both = out("--run", plain, "--prompt", "abc", "x", "--num_samples", 2, "--max_new_tokens", 60, "--seed", 1)
    assert [part.split("\n", 1)[0] for part in both.split("--- sample ")[1:]] == ["1", "2", "3", "4"]
    assert both.startswith("--- sample 1\n" + text) and both.split("--- sample ")[3].startswith("3\nx")
    (tmp_path / "text").write_text("hällo wörld " * 9)
    raw = np.frombuffer(("hällo wörld " * 9).encode(), dtype=np.uint8).astype(np.int64)
    checkpoint = read_checkpoint(noisy)
    gpt = GPT(GPTConfig(**checkpoint["model_config"]))
    gpt.load_state_dict(checkpoint["model"])
    stream = torch.from_numpy(np.concatenate(([256], raw)))
    for stride in (32, 7, 1):
        losses, end = [], 0
        while end < len(raw):  # the window that ends at `end` counts what no earlier one has
            counted, end = end, min(len(raw), end + (stride if end else 32))
            window = stream[max(0, end - 32) : end + 1]
            each = F.cross_entropy(gpt(window[None, :-1])[0], window[1:], reduction="none")
            losses += each[counted - end :].tolist()
        assert len(losses) == len(raw)
        flags = ["--stride", stride] if stride < 32 else []
        printed = out("--run", noisy, "--perplexity", tmp_path / "text", "--dtype", "fp32", *flags)
        rows = {unit: re.search(rf"per {unit} +([\d,]+) +(\S+) +([\d.]+)", printed) for unit in ("token", "word")}
        assert rows["token"][1] == str(len(raw)) and rows["word"][1] == "18"
        shown = rows["token"][2].replace(",", "")
        shown = float(shown) if shown[0] != "e" else math.exp(float(shown[2:]))
        assert shown == pytest.approx(math.exp(np.mean(losses)), rel=1e-3)
        assert float(rows["word"][3]) == pytest.approx(sum(losses) / 18, rel=1e-4)
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
        loss = evaluation.summed_loss(gpt, np.frombuffer(tokens, np.uint8), 256, 32) / len(tokens)
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
    evaluation.print_perplexity(model, gpt2, tmp_path / "raw", 24)
    n_tokens, n_bytes, nats, bits = printed_perplexity(capsys)
    tokens = gpt2.tiktoken.encode_ordinary(raw.decode("utf-8", errors="replace"))
    assert (n_tokens, n_bytes) == (len(tokens), len(raw) + 2 * 3)
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


def test_int8_is_sampled_and_measured(noisy, tmp_path, capsys):
    (tmp_path / "text").write_text("some text " * 50)
    nats = []
    for flags in ((), ("--int8",)):
        assert sample.main(["--run", str(noisy), "--perplexity", str(tmp_path / "text"), *flags]) == 0
        nats.append(printed_perplexity(capsys)[2])
        assert sample.main(["--run", str(noisy), "--prompt", "abc", "--max_new_tokens", "20", *flags]) == 0
        assert capsys.readouterr().out.startswith("abc")
    assert nats[0] != nats[1] and nats[1] == pytest.approx(nats[0], rel=0.01)


def test_sample_ends_without_a_traceback(noisy, capsys, monkeypatch):
    def end(error):
        def load(*_):
            raise error

        monkeypatch.setattr(sample, "load", load)
        code = sample.main(["--run", str(noisy)])
        return code, capsys.readouterr().err

    assert end(KeyboardInterrupt())[0] == 130
    code, err = end(RuntimeError("std::bad_alloc"))
    assert code == 1 and err.startswith("error: memory ran out") and "--num_samples" in err
    code, err = end(RuntimeError("C++ compile error: error: no such instruction"))
    assert code == 1 and "remove --compile" in err
