"""Byte-pair vocabularies of your own: trained, stored, carried by runs; what is evaluated."""

import contextlib
import gzip
import re
import shutil
from pathlib import Path

import numpy as np
import pytest

import export
import sample
from common.errors import UserError, run_command
from conftest import ROOT, final, refusal, tiny_run
from data import corpus, prepare, tokenizers
from data.shards import PYTHON_VOCABULARY, meta_or_gpt2
from data.stream import TokenStream
from data.tokenizers import (
    PATTERN,
    PATTERNS,
    get_tokenizer,
    merge_pairs,
    parse_vocabulary,
    read_vocabulary,
    train_vocabulary,
)

SCRIPTS = (
    "Plain words, don't they'll, 12345 and 3.14159.\n\n\tdef f(x):\n        return x**2  # done\n",
    "Übung macht den Meister, façade, naïve, Ærø. ",
    "Съешь ещё этих мягких французских булок. ",
    "Η γρήγορη καφετιά αλεπού. ",
    "敏捷的棕色狐狸跳过懒狗。",
    "いろはにほへと ちりぬるを。カタカナ ",
    "다람쥐 헌 쳇바퀴에 타고파. ",
    "نص حكيم له سر قاطع وذو شأن عظيم. ",
    "דג סקרן שט בים מאוכזב. ",
    "ऋषियों को सताने वाले दुष्ट राक्षसों के राजा। ",
    "นายสังฆภัณฑ์ เฮงพิทักษ์ฝั่ง ",
    "👩‍👩‍👧‍👦 🤷🏽‍♀️ e\u0301 \u00a0\u2003\u3000 \r\n\r\n \t \u0085x ",
)


@pytest.fixture(scope="module")
def text() -> bytes:
    """Megabytes of several languages, and of code, to train a vocabulary on."""
    code = b"".join(path.read_bytes() for path in sorted(ROOT.glob("*/*.py")))
    return (code + "".join(SCRIPTS).encode() * 40) * 3


def test_the_vocabulary_is_that_of_the_package_tokenizers(text):
    """Of pairs that are equally frequent, either may be first."""
    tokenizers = pytest.importorskip("tokenizers")
    slow = pytest.importorskip("transformers.convert_slow_tokenizer")
    split = tokenizers.pre_tokenizers.Split(tokenizers.Regex(PATTERNS[PATTERN]), "isolated")
    byte_level = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    theirs = tokenizers.Tokenizer(tokenizers.models.BPE())
    theirs.pre_tokenizer = tokenizers.pre_tokenizers.Sequence([split, byte_level])
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=999, initial_alphabet=alphabet, show_progress=False
    )
    theirs.train_from_iterator([text.decode()], trainer)

    byte_of = {letter: byte for byte, letter in slow.bytes_to_unicode().items()}
    expected = {bytes(byte_of[letter] for letter in token) for token in theirs.get_vocab()}
    ours = parse_vocabulary(train_vocabulary([text], 1000))[1]
    assert len(ours) == len(expected) == 999
    assert len(ours.keys() & expected) > 980


def test_pairs_are_merged_by_frequency():
    """As in Sennrich et al. 2016; "aaa" holds one pair, and of equal ones the first by bytes."""
    words = {b"low": 5, b"lower": 2, b"newest": 6, b"widest": 3, b"aaa": 1}
    expected = [b"es", b"est", b"lo", b"low", b"ew", b"ewest", b"newest"]
    assert merge_pairs(words, 7) == expected
    assert merge_pairs({b"aaa": 1}, 9) == [b"aa", b"aaa"]


@pytest.mark.parametrize(
    "name, vocab_size, eot", [("bytes", 257, 256), ("gpt2", 50257, 50256), ("bpe", 1024, 1023)]
)
def test_tokenizers_round_trip(name, vocab_size, eot, gpt2):
    tokenizer = get_tokenizer(name, PYTHON_VOCABULARY.read_text())
    assert (tokenizer.name, tokenizer.vocab_size, tokenizer.eot) == (name, vocab_size, eot)
    for text in (*SCRIPTS, "", " " * 3000, "a <|endoftext|> in the text is text"):
        tokens = tokenizer.encode(text)
        assert tokens.dtype == np.uint16 and tokens.ndim == 1 and eot not in tokens
        assert tokenizer.decode_bytes(tokens) == text.encode()
    assert tokenizer.decode_bytes([eot, *tokens]) == b"<|endoftext|>" + text.encode()
    assert tokenizer.decode_bytes(tokenizer.encode("a\ud800b")) == b"a?b"
    raw = np.random.default_rng(0).bytes(5000)  # of what is not UTF-8, bytes alone come back
    kept = raw if name == "bytes" else raw.decode(errors="replace").encode()
    assert tokenizer.decode_bytes(tokenizer.encode_raw(raw)) == kept


def test_tokenizers_that_cannot_be_loaded(monkeypatch):
    monkeypatch.setattr("tiktoken.get_encoding", None)
    assert "expected gpt2, bytes, integers:N, or bpe" in refusal(get_tokenizer, "gpt3")
    assert re.search("TIKTOKEN_CACHE_DIR .* --tokenizer bytes", refusal(get_tokenizer, "gpt2"))


def test_long_words_are_cut_for_training(monkeypatch):
    """Time is quadratic in the longest word, which here is of 20 letters, not of 400,000."""
    monkeypatch.setattr(tokenizers, "LONGEST_WORD", 20)
    letters = b"x" * 400_000
    ranks = parse_vocabulary(train_vocabulary([letters], 1000))[1]
    assert max(map(len, ranks)) == 20


def prepared(path, out, **options):
    return prepare.prepare("files", paths=[path], out=out, **options)


@pytest.fixture(scope="module")
def notes(tmp_path_factory, text):
    """A data folder with a vocabulary of its own, of a folder of files."""
    folder = tmp_path_factory.mktemp("notes")
    source = folder / "texts"
    source.mkdir()
    for i in range(60):
        (source / f"{i}.txt").write_bytes(text[i * 5000 : (i + 1) * 5000])
    return prepared(source, folder / "data", vocab_size=400)  # can only mean bpe


def test_a_folder_has_its_vocabulary_and_only_learns_from_training(notes):
    meta, kept = meta_or_gpt2(notes), read_vocabulary(notes)
    assert (meta["tokenizer"], meta["vocab_size"], meta["eot"]) == ("bpe", 400, 399)
    tokens = TokenStream(notes, 32).train.read_tokens(0, 0, 10**9)
    documents = np.split(tokens, np.flatnonzero(tokens == 399))[1:]
    texts = [get_tokenizer("bpe", kept).decode_bytes(part[1:]) for part in documents]
    counts = dict(tokens=len(tokens), bytes=sum(map(len, texts)), documents=len(texts))
    assert meta["splits"]["train"] == counts
    assert train_vocabulary(texts, 400) == kept


def test_a_vocabulary_is_trained_on_a_sample_of_all_files(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(corpus, "BLOCK", 1000)
    monkeypatch.setattr(prepare, "BPE_SAMPLE_BYTES", 20_000)
    (tmp_path / "in").mkdir()
    for letter in "aei":
        (tmp_path / "in" / f"{letter}.txt").write_text(f"{letter} word\n" * 5000)
    sampled = []
    monkeypatch.setattr(prepare, "train_vocabulary", lambda *_: sampled.extend(_[0]) or "{}")
    with contextlib.suppress(UserError):  # "{}" is damaged
        prepared(tmp_path / "in", tmp_path / "out", tokenizer="bpe")
    sizes = [b"".join(sampled).count(b"%c word" % letter) * 7 for letter in b"aei"]
    assert 15_000 < sum(sizes) < 22_000 and min(sizes) > 4_500, sizes
    assert "training 512 byte pairs on a sample of 0.0 MB" in capsys.readouterr().out


@pytest.fixture(scope="module")
def trained(notes, tmp_path_factory) -> Path:
    """A run on a copy of the folder, which is gone since."""
    folder = tmp_path_factory.mktemp("trained")
    gone, run = shutil.copytree(notes, folder / "gone"), folder / "run"
    flags = dict(vocab_size=448, max_steps=1)
    tiny_run(run, data=gone, **flags)
    tiny_run(run, **flags | dict(max_steps=2), resume="newest")
    shutil.rmtree(gone)
    return run


def test_runs_and_checkpoints_carry_the_vocabulary(notes, trained, tmp_path):
    kept = read_vocabulary(notes)
    assert read_vocabulary(trained) == kept == final(trained)["vocabulary"]
    model, tokenizer = sample.load(trained / "ckpt_2.pt", "cpu", "fp32")
    assert tokenizer.decode_bytes(tokenizer.encode("déjà vu")) == "déjà vu".encode()
    safe_open = pytest.importorskip("safetensors").safe_open
    out = tmp_path / "model.safetensors"
    assert run_command(export.main, [str(trained), "--to", "safetensors", "--out", str(out)]) == 0
    with safe_open(out, "pt") as file:
        assert file.metadata()["vocabulary"] == kept


def test_another_vocabulary_is_refused(trained, tmp_path, text):
    (tmp_path / "a.txt").write_bytes(text[50000:150000])
    other = prepared(tmp_path / "a.txt", tmp_path / "other", tokenizer="bpe", vocab_size=400)
    same = prepared(tmp_path / "a.txt", tmp_path / "same", tokenizer=str(trained))
    flags = dict(init_from=trained, vocab_size=448, max_steps=1)
    said = refusal(tiny_run, tmp_path / "run", data=other, **flags)
    assert "another tokenizer (bpe)" in said and f"--tokenizer {trained}" in said
    tiny_run(tmp_path / "run", data=same, **flags)


def test_vocabularies_that_cannot_be_are_refused(notes, tmp_path):
    def said() -> str:
        return refusal(prepare.prepare, "python", out=tmp_path / "x", tokenizer=str(tmp_path))

    for wrong in (
        "{}",
        '{"pattern": "mine", "tokens": ["6161"]}',
        '{"pattern": "gpt4-digits2", "tokens": ["6161", "6161"]}',
        '{"pattern": "gpt4-digits2", "tokens": [""]}',
    ):
        (tmp_path / "tokenizer.json").write_text(wrong)
        assert "the vocabulary is damaged" in said()
    (tmp_path / "tokenizer.json").unlink()
    assert re.search("there is no vocabulary .* give --tokenizer gpt2", said())
    # Without a pair of bytes to merge, a vocabulary is bytes
    (tmp_path / "a.txt").write_bytes(b"1\n" * 20)
    out = prepared(tmp_path / "a.txt", tmp_path / "bytes", tokenizer="bpe")
    assert meta_or_gpt2(out)["vocab_size"] == 257
    (out / "tokenizer.json").write_text(read_vocabulary(notes))
    said = refusal(TokenStream, out, 32)
    assert re.search("has the hash .*, but the data were made with", said)


def test_a_tokenizer_is_chosen_and_told(tmp_path, text, capsys, monkeypatch):
    """Bytes for a small text, more byte pairs for a larger one."""
    monkeypatch.setattr(prepare, "BPE_BYTES", 4 * 10**4)
    monkeypatch.setattr(prepare, "LARGE_VOCAB_BYTES", 3 * 10**5)
    for n_bytes, tokenizer, vocab_size in (
        (400_000, "bpe", 1024),
        (100_000, "bpe", 512),
        (20_000, "bytes", 257),
    ):
        path = tmp_path / f"{vocab_size}.gz"
        path.write_bytes(gzip.compress(text[:n_bytes]))
        meta = meta_or_gpt2(prepared(path, tmp_path / f"{vocab_size}"))
        assert (meta["tokenizer"], meta["vocab_size"]) == (tokenizer, vocab_size)
        assert capsys.readouterr().out.startswith(f"tokenizer {tokenizer}, for ")
