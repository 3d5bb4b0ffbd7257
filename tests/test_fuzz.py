"""Random damage: shards and checkpoints are used whole or refused in a sentence."""

import random
import struct
from pathlib import Path

import numpy as np
import torch

from conftest import built, final, refusal
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
    at, n = rng.randrange(rng.choice([head, len(raw)])), rng.choice([1, 2, 4, 64, 512])
    before, hit, after = raw[:at], raw[at : at + n], raw[at + n :]
    number = rng.choice([0, 1, -1, 7, 2**31 - 1, -(2**31), 20240520, 20240801, 1 << 20])
    damaged = [
        before + bytes([raw[at] ^ 1 << rng.randrange(8)]) + raw[at + 1 :],
        before,
        before + after,
        raw + rng.randbytes(n),
        before + bytes(n) + after,
        before + struct.pack("<i", number) + raw[at + 4 :],
        before + hit[::-1] + after,
    ]
    return rng.choice(damaged)


def test_damaged_shards(tmp_path, monkeypatch):
    rng, outcomes = random.Random(1), []
    words = [rng.choice(["one", "two", "three"]) for _ in range(3000)]
    (tmp_path / "text.txt").write_text(" ".join(words))
    monkeypatch.setattr(prepare, "SHARD_TOKENS", 5000)
    data = prepare.prepare("files", paths=[tmp_path / "text.txt"], out=tmp_path / "data")
    shards = {path: path.read_bytes() for path in sorted(data.glob("*.bin"))}

    def read_all():
        stream = TokenStream(data, 32)
        for split, name in ((stream.train, "train"), (stream.val, "val")):
            tokens = []
            for shard in sorted(shards):
                if name in shard.name:
                    tokens += independent_tokens(shard)
            assert split.read_sequence(0, split.n_tokens).tolist() == tokens
            assert max(tokens) < 257

    for i in range(500):
        path, raw = rng.choice(list(shards.items()))
        path.write_bytes(mutated(raw, rng, 16))
        if i == 250:  # from here on without lengths
            (data / "meta.json").write_text(
                '{"tokenizer": "bytes", "vocab_size": 257, "eot": 256, "source": "", "files": {}, '
                '"splits": {"train": {"tokens": 1}, "val": {"tokens": 1}}}'
            )
        outcomes.append(bool(refusal(read_all)))
        path.write_bytes(raw)
    assert 200 < sum(outcomes) < 500


def independent_tokens(path: Path) -> list[int]:
    raw = path.read_bytes()
    *format, count = struct.unpack("<3i", raw[:12])
    dtype = {(20240520, 1): "<u2", (20240801, 7): "<u4"}[tuple(format)]
    assert len(raw) == 1024 + count * np.dtype(dtype).itemsize
    return np.frombuffer(raw, dtype, offset=1024).tolist()


def test_damaged_checkpoints(plain, tmp_path):
    rng, outcomes, path = random.Random(3), [], tmp_path / "ckpt_20.pt"
    raw, content, state = list_checkpoints(plain)[0].read_bytes(), final(plain), built()

    def load():
        checkpoint = read_checkpoint(path)
        load_weights(state.raw_model, checkpoint, path)
        load_optimizer(state.raw_model, state.optimizer, checkpoint)
        load_extra(state.raw_model, checkpoint["extra"])
        loaded.append(checkpoint)

    for _ in range(150):
        path.write_bytes(mutated(raw, rng, 4096 if rng.random() < 0.5 else len(raw)))
        loaded = []
        outcomes.append(bool(refusal(load)))
        if loaded:
            for part in ("model", "optimizer"):
                torch.testing.assert_close(loaded[0][part], content[part], rtol=0, atol=0)
    assert sum(outcomes) > 75
