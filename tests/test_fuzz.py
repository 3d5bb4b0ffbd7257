"""Random damage: shards, meta.json and checkpoints are used whole or refused in a sentence."""

import json
import math
import random
import shutil
import struct
from pathlib import Path

import numpy as np
import pytest
import torch

from common import UserError
from conftest import built, final
from data import prepare
from data.stream import TokenStream
from runtime.checkpoint import (
    list_checkpoints,
    load_extra,
    load_optimizer,
    load_weights,
    read_checkpoint,
)


def mutated(raw: bytes, rng: random.Random, head: int) -> bytes:
    """The bytes with some damage: half of the time in the first `head` of them."""
    out, end = bytearray(raw), head if rng.random() < 0.5 else len(raw)
    how = rng.randrange(6)
    if how == 0:
        for _ in range(rng.choice([1, 1, 2, 8])):
            out[rng.randrange(end)] ^= 1 << rng.randrange(8)
    elif how == 1:
        return bytes(out[: rng.randrange(len(out))])
    elif how == 2:
        out += rng.randbytes(rng.choice([1, 2, 512, 4096]))
    elif how == 3:
        at = rng.randrange(end)
        out[at : at + rng.choice([1, 2, 4, 64, 512])] = bytes(rng.choice([1, 2, 4, 64, 512]))
    elif how == 4:
        at = rng.randrange(max(1, end - 4))
        number = rng.choice([0, 1, -1, 7, 2**31 - 1, -(2**31), 20240520, 20240801, 1 << 20])
        out[at : at + 4] = struct.pack("<i", number)
    else:
        a, b = sorted(rng.randrange(len(out)) for _ in range(2))
        out[a:b] = out[a:b][::-1]
    return bytes(out)


JUNK = (None, True, -1, 0, 1, 2**40, 10**30, 1.5, math.nan, math.inf)
JUNK += ("", "x", "../../etc/passwd", "bytes", [], [1])
JUNK += ({}, {"tokens": 1}, {"x": {"tokens": -5}})


def replaced(value, rng: random.Random, junk=JUNK):
    """A copy of nested dicts in which one entry has gone, has other content or has another name."""
    value = dict(value)
    key = rng.choice(list(value))
    if isinstance(value[key], dict) and value[key] and rng.random() < 0.7:
        value[key] = replaced(value[key], rng, junk)
    elif rng.random() < 0.25:
        del value[key]
    elif rng.random() < 0.25:
        value[rng.choice(["", "..", "x", f"../{key}", f"{key}.", "7"])] = value.pop(key)
    else:
        value[key] = rng.choice(junk)
    return value


def refused(function) -> bool:
    """Whether it raises a UserError of one sentence; any other exception fails the test."""
    try:
        function()
    except UserError as error:
        text = str(error)
        assert "\n" not in text.strip() and 20 < len(text) < 1500 and "Traceback" not in text, text
        return True
    return False


@pytest.fixture(scope="module")
def prepared(tmp_path_factory) -> Path:
    """A folder from data/prepare.py, with its hashes."""
    folder = tmp_path_factory.mktemp("prepared")
    rng = random.Random(0)
    words = [rng.choice(["one", "two", "three"]) for _ in range(3000)]
    (folder / "text.txt").write_text(" ".join(words))
    options = dict(out=folder / "data", shard_tokens=5000)
    return prepare.prepare("files", [folder / "text.txt"], "bytes", **options)


def open_fuzzed(folder: Path) -> TokenStream:
    return TokenStream(folder, seq_len=32, batch_tokens=64)


def test_fuzzed_shards(prepared, tmp_path):
    rng, outcomes = random.Random(1), []
    data = tmp_path / "data"
    shutil.copytree(prepared, data)
    shards = {path: path.read_bytes() for path in sorted(data.glob("*.bin"))}
    meta = (data / "meta.json").read_bytes()
    for i in range(500):
        path, raw = rng.choice(list(shards.items()))
        path.write_bytes(mutated(raw, rng, 1024))
        (data / "meta.json").unlink(missing_ok=True)
        if i % 2:
            (data / "meta.json").write_bytes(meta)
        opened = []
        outcomes.append(refused(lambda: opened.append(open_fuzzed(data))))  # noqa: B023
        if opened:
            if i % 2:  # the hash admits nothing but the whole shard
                assert path.read_bytes() == raw
            for split, name in ((opened[0].train, "train"), (opened[0].val, "val")):
                tokens = []
                for shard in sorted(shards):
                    if name in shard.name:
                        tokens += independent_tokens(shard)
                assert split.read_sequences(np.array([0]), split.n_tokens)[0].tolist() == tokens
        path.write_bytes(raw)
    print(f"shards: {sum(outcomes)} of {len(outcomes)} refused")
    assert 200 < sum(outcomes) < 500


def independent_tokens(path: Path) -> list[int]:
    raw = path.read_bytes()
    magic, _, count = struct.unpack("<3i", raw[:12])
    dtype = {20240520: "<u2", 20240801: "<u4"}[magic]
    return np.frombuffer(raw, dtype, count, offset=1024).tolist()


def test_fuzzed_meta_json(prepared, tmp_path):
    rng, outcomes = random.Random(2), []
    data = tmp_path / "data"
    shutil.copytree(prepared, data)
    raw = (data / "meta.json").read_bytes()
    expected = open_fuzzed(data).train.read_sequences(np.array([0]), 1000)
    for i in range(500):
        if i % 2:
            content = mutated(raw, rng, len(raw))
        else:
            content = json.dumps(replaced(json.loads(raw), rng)).encode()
        if i == 2:
            content = b"[" * 100_000
        (data / "meta.json").write_bytes(content)
        opened = []
        outcomes.append(refused(lambda: opened.append(open_fuzzed(data))))  # noqa: B023
        if opened:
            assert np.array_equal(opened[0].train.read_sequences(np.array([0]), 1000), expected)
            assert opened[0].meta["vocab_size"] == 257 or opened[0].meta["tokenizer"] != "bytes"
    print(f"meta.json: {sum(outcomes)} of {len(outcomes)} refused")
    assert 150 < sum(outcomes) < 500


def test_fuzzed_checkpoints(data, plain, tmp_path):
    """Damaged bytes are refused; other content is refused or leaves no trace in what is loaded."""
    rng, outcomes, path = random.Random(3), [], tmp_path / "ckpt_20.pt"
    raw, content, state = list_checkpoints(plain)[0].read_bytes(), final(plain), built()
    junk = (*JUNK, torch.zeros(3), torch.zeros(()), torch.tensor([[math.nan]]))
    junk += (torch.zeros(2, dtype=torch.bool),)

    def load():
        checkpoint = read_checkpoint(path)
        load_weights(state.raw_model, checkpoint, path)
        load_optimizer(state.raw_model, state.optimizer, checkpoint, path)
        load_extra(state.raw_model, checkpoint["extra"])
        loaded.append(checkpoint)

    for i in range(300):
        if i % 2:
            path.write_bytes(mutated(raw, rng, 4096 if rng.random() < 0.5 else len(raw)))
        else:
            torch.save(replaced(content, rng, junk), path)
        loaded = []
        outcomes.append(refused(load))
        if loaded and i % 2:
            for part in ("model", "optimizer"):
                torch.testing.assert_close(loaded[0][part], content[part], rtol=0, atol=0)
    print(f"checkpoints: {sum(outcomes)} of {len(outcomes)} refused")
    assert sum(outcomes) > 150
