"""Random damage: shards and checkpoints are used whole or refused in a sentence."""

import json
import random
import struct

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
    before, after = raw[:at], raw[at + n :]
    number = rng.choice([0, 1, -1, 7, 2**31 - 1, -(2**31), 20240520, 20240801, 1 << 20])
    damaged = [
        before + bytes([raw[at] ^ 1 << rng.randrange(8)]) + raw[at + 1 :],
        before,
        before + after,
        before + rng.randbytes(n) + after,
        before + bytes(n) + after,
        before + struct.pack("<i", number) + raw[at + 4 :],
    ]
    return rng.choice(damaged)


def test_damaged_shards(tmp_path, monkeypatch):
    rng, outcomes = random.Random(1), []
    (tmp_path / "text.txt").write_bytes(rng.randbytes(12_000).hex().encode())
    monkeypatch.setattr(prepare, "SHARD_TOKENS", 5000)
    data = prepare.prepare("files", paths=[tmp_path / "text.txt"], out=tmp_path / "data")
    shards = {path: path.read_bytes() for path in sorted(data.glob("*.bin"))}

    def read_all():
        stream = TokenStream(data, 32)
        for shards in (stream.train, stream.val):
            tokens = shards.read_sequence(0, shards.n_tokens)
            stored = [np.fromfile(path, "<u2", offset=1024) for path in shards.paths]
            assert np.array_equal(tokens, np.concatenate(stored)) and tokens.max() < 257

    for i in range(500):
        path, raw = rng.choice(list(shards.items()))
        path.write_bytes(mutated(raw, rng, 16))
        if i == 250:  # from here on without lengths
            meta = json.loads((data / "meta.json").read_text())
            (data / "meta.json").write_text(json.dumps(meta | dict(files={})))
        outcomes.append(bool(refusal(read_all)))
        path.write_bytes(raw)
    assert 200 < sum(outcomes) < 500


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
