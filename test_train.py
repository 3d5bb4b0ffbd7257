"""All tests: `python -m pytest test_train.py`. Cases for two ranks run in one launch of this file under torchrun."""

import contextlib
import dataclasses
import gzip
import hashlib
import http.server
import importlib.util
import io
import json
import math
import os
import platform
import random
import re
import shutil
import signal
import struct
import subprocess
import sys
import sysconfig
import threading
import time
import traceback
import zipfile
from collections import deque
from pathlib import Path
from types import SimpleNamespace

os.environ.setdefault("OMP_NUM_THREADS", "1")  # tiny matrices: threads only cost, here and in the processes started

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import bench
import data.prepare as prep
import model as model_module
import sample
import train_gpt
from data.prepare import UserError, get_tokenizer, write_shard
from model import GPT, GPTConfig, Optimizer, attention, attention_mask, generate, initial_weight, newton_schulz
from train_gpt import attention_of, config, content_hash, permuted, read_checkpoint, train, window_starts

HERE = Path(__file__).resolve().parent

# ---------------------------------------------------------------------------------------------------------------------
# Helpers

TINY = dict(n_layer=2, n_head=2, n_embd=32, seq_len=32, batch_tokens=512, micro_batch=8, max_steps=20, device="cpu",
            dtype="fp32", loss_chunk=100, eval_every=0, eval_tokens=2048, log_every=1,
            muon_lr=0.02, adam_lr=0.004)  # fmt: skip


def make_data(folder: Path, eot: bool = True) -> Path:
    """Two training shards and a validation shard of learnable bytes, with windows that cross from shard to shard."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(0)
    words = [bytes(rng.integers(97, 123, n, dtype=np.uint8)) + b" " for n in rng.integers(2, 7, 50)]
    text = b"".join(words[i] for i in rng.integers(0, 50, 9000))
    tokens = np.concatenate(([256], np.frombuffer(text, dtype=np.uint8))).astype(np.uint16)
    tokens[::97] = 256 if eot else 32
    parts = {"a_train_0.bin": tokens[:11111], "a_train_1.bin": tokens[11111:29000], "a_val_0.bin": tokens[29000:33333]}
    for name, part in parts.items():
        write_shard(folder / name, part)
    splits = {"train": dict(tokens=29000, bytes=28999, documents=1), "val": dict(tokens=4333, bytes=4333, documents=1)}
    meta = dict(tokenizer="bytes", vocab_size=257, eot=256, splits=splits, source="test",
                files={name: dict(tokens=len(part), sha256="") for name, part in parts.items()})  # fmt: skip
    (folder / "meta.json").write_text(json.dumps(meta))
    return folder


def rows(folder, key: str) -> list[float]:
    lines = (Path(folder) / "metrics.jsonl").read_text().splitlines()
    return [row[key] for row in map(json.loads, lines) if key in row]


def final(folder) -> dict:
    return read_checkpoint(train_gpt.checkpoints(Path(folder))[0])


def assert_same_run(a, b, exact=False, rtol=1e-5) -> None:
    """Same losses, gradient norms, weights and optimizer state: to the bit, or to rounding."""
    for key in ("train_loss", "grad_norm", "val_loss"):
        x, y = rows(a, key), rows(b, key)
        assert len(x) == len(y) > 0
        np.testing.assert_allclose(x, y, rtol=0 if exact else rtol, err_msg=key)
    ours, theirs = final(a), final(b)
    assert ours["step"] == theirs["step"]
    for name, w in ours["model"].items():
        if exact:
            assert torch.equal(w, theirs["model"][name]), name
            for slot, value in ours["optimizer"][name].items():
                assert torch.equal(value, theirs["optimizer"][name][slot]), (name, slot)
        else:
            torch.testing.assert_close(w, theirs["model"][name], rtol=1e-3, atol=2e-5)


@pytest.fixture(scope="session")
def data(tmp_path_factory) -> Path:
    return make_data(tmp_path_factory.mktemp("data") / "tiny")


@pytest.fixture(scope="session")
def noisy(data, tmp_path_factory) -> Path:
    """A checkpoint whose every weight is random: fresh weights hide most gradients behind matrices of zeros."""
    folder = tmp_path_factory.mktemp("noisy")
    train(config(**TINY | dict(data=str(data), out_dir=str(folder / "run"), max_steps=1)))
    checkpoint = final(folder / "run")
    generator = torch.Generator().manual_seed(1)
    for w in checkpoint["model"].values():
        w.add_(torch.randn(w.shape, generator=generator) * 0.1)
    checkpoint["sha256"] = content_hash(checkpoint)
    torch.save(checkpoint, folder / "noisy.pt")
    return folder / "noisy.pt"


@pytest.fixture(scope="session")
def plain(data, noisy, tmp_path_factory) -> Path:
    """The run that others are compared with: one process, one micro-step, no chunks."""
    folder = tmp_path_factory.mktemp("plain") / "run"
    train(
        config(**TINY | dict(data=str(data), out_dir=str(folder), init_from=str(noisy), micro_batch=16, loss_chunk=0))
    )
    return folder


@contextlib.contextmanager
def saved_for_backward():
    """Yields the storages (address: bytes) that autograd keeps for backward, and a function that adds a tensor."""
    storages = {}

    def note(tensor):
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        yield storages, note


def run_main(argv: list[str], capsys) -> tuple[int, str]:
    """Exit code and standard error of train_gpt.py's command line, run in this process."""
    capsys.readouterr()
    code = train_gpt.main(argv)
    return code, capsys.readouterr().err


def flags_of(values: dict) -> list[str]:
    return [f"--{key}={value}" for key, value in values.items()]


def run_python(*argv, **kwargs) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, *map(str, argv)], capture_output=True, text=True, cwd=HERE, timeout=300, **kwargs
    )


# ---------------------------------------------------------------------------------------------------------------------
# Several ranks: every case runs inside one launch, and the tests look at what it left behind

RANK_CASES = {
    "ddp": dict(micro_batch=8),
    "ddp_accum": dict(micro_batch=2, loss_chunk=0),
    "ddp_adamw": dict(optimizer="adamw", grad_clip=0.5),
    "ddp_uneven": dict(n_layer=3, max_steps=5, init_from=""),
    "ddp_half": dict(max_steps=20, save_every=10, keep=0),
    "ddp_resumed": dict(resume="ddp_half/ckpt_10.pt", init_from=""),
    "ddp_watched": dict(eval_every=3, sample_every=7, save_every=4, prefetch=0),
    "ddp_bucket": dict(bucket_cap_mb=1, micro_batch=4),
    "fsdp": dict(parallel="fsdp", save_every=10, keep=0),
    "fsdp_accum": dict(parallel="fsdp", micro_batch=2, checkpointing="full"),
    "fsdp_offload": dict(parallel="fsdp", offload="optimizer", grad_clip=0.5),
    "fsdp_resumed": dict(parallel="fsdp", resume="ddp_half/ckpt_10.pt", init_from=""),
    "fsdp_thin": dict(parallel="fsdp", n_embd=2, n_head=1, n_layer=3, init_from="", max_steps=5, vocab_size=257),
    "ddp_fp16": dict(dtype="fp16", micro_batch=2, max_steps=6, sample_every=3),
    "fsdp_fp16": dict(dtype="fp16", micro_batch=2, max_steps=6, parallel="fsdp", sample_every=3),
    "ddp_selective": dict(checkpointing="selective"),
    "ddp_docs": dict(doc_mask=True, doc_align=True, max_steps=5),
    "fsdp_ngrams": dict(
        ngram=3, ngram_rows=65, ngram_dropout=0.4, doc_mask=True, parallel="fsdp", init_from="", max_steps=5
    ),
    "ddp_dropout": dict(
        confidence_penalty=0.2, ngram=3, ngram_rows=65, ngram_dropout=0.4, micro_batch=2, init_from="", max_steps=8
    ),
}
COMPILED_RANK_CASES = {
    "ddp_compiled": dict(compile="default", checkpointing="selective", max_steps=6),
    "fsdp_compiled": dict(compile="default", checkpointing="full", parallel="fsdp", micro_batch=8, max_steps=6),
}


def worker(folder: Path) -> None:
    """What each rank does under torchrun: all RANK_CASES, then the checks that need every rank."""
    import torch.distributed as dist

    def whole(function):  # NCCL wants what gloo does not ask for
        def checked(*args, **kwargs):
            tensors = [t for arg in args for t in (arg if isinstance(arg, list) else [arg]) if torch.is_tensor(t)]
            assert all(t.is_contiguous() for t in tensors), "NCCL takes contiguous tensors only"
            return function(*args, **kwargs)

        return checked

    for name in ("all_gather", "all_reduce", "all_to_all_single", "broadcast"):
        setattr(dist, name, whole(getattr(dist, name)))
    common = TINY | dict(data=str(folder / "data"), init_from=str(folder / "noisy.pt"))
    report, cases = {}, dict(RANK_CASES)
    if compiler_works():
        cases |= COMPILED_RANK_CASES
    for name, case in cases.items():
        grads = {}
        step, built = Optimizer.step, []

        def step_and_note(self, skip, built=built, grads=grads, step=step):
            built[:] = [self]
            if not grads:
                named = [(n, p.grad) for g in self.param_groups for n, p in zip(g["names"], g["params"])]
                grads.update({n: g.full_tensor() if hasattr(g, "full_tensor") else g.clone() for n, g in named})
            step(self, skip)

        Optimizer.step = step_and_note
        case = {k: str(folder / v) if k == "resume" else v for k, v in case.items()}
        train(config(**common | case | dict(out_dir=str(folder / name))))
        Optimizer.step = step
        torch.save(grads, folder / f"{name}.grads{dist.get_rank()}.pt")
        params = [p.detach() for g in built[0].param_groups for p in g["params"]]
        weights = torch.cat([(p.full_tensor() if hasattr(p, "full_tensor") else p).flatten() for p in params])
        everyones = [torch.empty_like(weights) for _ in range(dist.get_world_size())]
        dist.all_gather(everyones, weights)
        report[name] = all(torch.equal(everyones[0], other) for other in everyones)
    with pytest.raises(UserError, match="rank 0 only"):  # an error on rank 0 is everyone's
        train_gpt.from_rank0(
            train_gpt.launch(config(device="cpu")), lambda: (_ for _ in ()).throw(UserError("rank 0 only"))
        )
    if dist.get_rank() == 0:
        (folder / "report.json").write_text(json.dumps(report))
    dist.destroy_process_group()


@pytest.fixture(scope="session")
def two_ranks(data, noisy, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("ranks")
    (folder / "data").symlink_to(data)
    (folder / "noisy.pt").symlink_to(noisy)
    done = run_python("-m", "torch.distributed.run", "--nproc_per_node=2", "--master_port=0", "--standalone",
                      __file__, folder)  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.mark.parametrize("case", ["ddp", "ddp_accum", "ddp_bucket", "ddp_selective", "fsdp", "fsdp_accum"])
def test_two_ranks_train_as_one(case, two_ranks, plain):
    assert_same_run(two_ranks / case, plain)


def test_ranks_agree_to_the_bit(two_ranks):
    report = json.loads((two_ranks / "report.json").read_text())
    assert set(report.values()) == {True} and set(report) >= set(RANK_CASES)


@pytest.mark.parametrize("case", ["ddp", "ddp_accum", "ddp_bucket", "ddp_selective", "fsdp", "fsdp_accum"])
def test_first_gradients_of_two_ranks(case, two_ranks, data, noisy):
    expected = plain_loop(data, noisy, steps=1)[1]
    for rank in range(2):
        grads = torch.load(two_ranks / f"{case}.grads{rank}.pt")
        assert grads.keys() == expected.keys()
        for name, grad in grads.items():
            assert grad.abs().max() > 0
            torch.testing.assert_close(grad, expected[name], rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize(
    "case", ["ddp_adamw", "ddp_uneven", "fsdp_offload", "fsdp_thin", "ddp_docs", "fsdp_ngrams", "ddp_dropout"]
)
def test_two_ranks_other_optimizers_and_uneven_shares(case, two_ranks, data, noisy, tmp_path):
    one = RANK_CASES[case] | dict(out_dir=str(tmp_path / "one"), parallel="auto", offload="none", micro_batch=0)
    train(config(**TINY | dict(data=str(data), init_from=str(noisy)) | one))
    assert_same_run(two_ranks / case, tmp_path / "one")


@pytest.mark.parametrize("case", ["ddp_fp16", "fsdp_fp16"])
def test_two_ranks_in_fp16(case, two_ranks, data, noisy, tmp_path):
    flags = TINY | dict(data=str(data), init_from=str(noisy), out_dir=str(tmp_path / "one"), dtype="fp16", max_steps=6)
    train(config(**flags))
    np.testing.assert_allclose(rows(two_ranks / case, "train_loss"), rows(tmp_path / "one", "train_loss"), rtol=2e-3)
    np.testing.assert_allclose(rows(two_ranks / case, "grad_norm"), rows(tmp_path / "one", "grad_norm"), rtol=2e-2)


@pytest.mark.parametrize("case", COMPILED_RANK_CASES)
def test_two_compiled_ranks_train_as_one(case, two_ranks, data, noisy, tmp_path):
    if not (two_ranks / case).exists():
        pytest.skip("torch.compile finds no working compiler here")
    train(config(**TINY | dict(data=str(data), init_from=str(noisy), out_dir=str(tmp_path / "one"), max_steps=6)))
    assert_same_run(two_ranks / case, tmp_path / "one")


def test_fsdp_and_ddp_share_their_checkpoints(two_ranks, plain):
    for key in ("train_loss", "grad_norm"):
        np.testing.assert_allclose(rows(two_ranks / "fsdp_resumed", key), rows(plain, key)[10:], rtol=1e-5)
    a, b = (read_checkpoint(two_ranks / case / "ckpt_10.pt") for case in ("fsdp", "ddp_half"))
    assert a["model"].keys() == b["model"].keys()
    for name in a["model"]:
        for slot in a["optimizer"][name]:
            torch.testing.assert_close(a["optimizer"][name][slot], b["optimizer"][name][slot], rtol=1e-3, atol=1e-6)


def test_resume_at_another_world_size(two_ranks, data, noisy, tmp_path, plain):
    train(
        config(
            **TINY
            | dict(data=str(data), out_dir=str(tmp_path / "run"), resume=str(two_ranks / "ddp_half" / "ckpt_10.pt"))
        )
    )
    for key in ("train_loss", "grad_norm"):
        np.testing.assert_allclose(rows(tmp_path / "run", key), rows(plain, key)[10:], rtol=1e-5)


def test_two_ranks_resume_exactly_and_watching_disturbs_nothing(two_ranks):
    for case, start in (("ddp_resumed", 10), ("ddp_watched", 0)):
        for key in ("train_loss", "grad_norm"):
            assert rows(two_ranks / case, key) == rows(two_ranks / "ddp_half", key)[start:]
        ours, theirs = final(two_ranks / case)["model"], final(two_ranks / "ddp_half")["model"]
        assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_threads_are_shared_out_under_torchrun(two_ranks):
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    assert f", {max(1, cores // 2)} threads)" in (two_ranks / "ddp" / "log.txt").read_text()


# ---------------------------------------------------------------------------------------------------------------------
# The stream


@pytest.mark.parametrize("n", [1, 2, 3, 16, 17, 1000, 4097])
def test_permutation_visits_everything_once(n):
    order = permuted(np.arange(n), n, key=7)
    assert sorted(order.tolist()) == list(range(n))
    if n > 100:
        assert not np.array_equal(order, permuted(np.arange(n), n, key=8))
        assert abs(np.corrcoef(np.arange(n), order)[0, 1]) < 0.1


@pytest.mark.parametrize("n_tokens", [33, 63, 64, 65, 1000])
def test_windows_of_an_epoch(n_tokens):
    n_windows = max(1, (n_tokens - 32) // 32)
    offsets = set()
    for epoch in range(40):
        starts = window_starts(epoch * n_windows + np.arange(n_windows), n_tokens, 32, seed=3)
        offsets.add(int(starts.min()))
        assert np.array_equal(np.sort(starts), starts.min() + 32 * np.arange(n_windows))  # every window once
        assert starts.min() >= 0 and starts.max() + 33 <= n_tokens
    assert len(offsets) > 10 or n_tokens < 64


def test_batch_does_not_depend_on_ranks(data):
    cfg = config(**TINY | dict(data=str(data)))
    cpu = torch.device("cpu")
    opened = train_gpt.open_data(cfg, train_gpt.Launch(cpu))
    whole = train_gpt.train_batch(opened, cfg, train_gpt.Launch(cpu), 77)
    parts = [train_gpt.train_batch(opened, cfg, train_gpt.Launch(cpu, rank, 4), 77) for rank in range(4)]
    assert torch.equal(whole, torch.cat(parts))
    everything = np.concatenate([np.fromfile(p, dtype="<u2", offset=1024) for p in sorted(data.glob("*train*"))])
    starts = window_starts(77 * 16 + np.arange(16), len(everything), 32, cfg.seed)
    assert torch.equal(whole, torch.from_numpy(np.stack([everything[s : s + 33] for s in starts]).astype(np.int64)))


def test_window_over_the_end_of_a_shard(data):
    split = train_gpt.Split(data, "train", 257)
    everything = np.concatenate([np.fromfile(p, dtype="<u2", offset=1024) for p in sorted(data.glob("*train*"))])
    starts = np.array([11100, 11110, 11111, 0])
    assert np.array_equal(split.read(starts, 33), np.stack([everything[s : s + 33] for s in starts]))


def test_prefetch_keeps_order_and_passes_errors_on():
    assert list(train_gpt.prefetched(lambda i: i * i, 3, 9, depth=2)) == [9, 16, 25, 36, 49, 64]
    assert list(train_gpt.prefetched(lambda i: i, 0, 2, depth=0)) == [0, 1]

    def bad(i):
        if i == 2:
            raise UserError("shard gone")
        return i

    with pytest.raises(UserError, match="shard gone"):
        list(train_gpt.prefetched(bad, 0, 5, depth=3))


# ---------------------------------------------------------------------------------------------------------------------
# The model


def reference_attention(q, k, v, window):
    """Causal attention from its definition, in float64."""
    q, k, v = (t.double() for t in (q, k, v))
    scores = q @ k.mT / q.size(-1) ** 0.5
    i, j = torch.arange(q.size(2))[:, None], torch.arange(k.size(2))
    seen = (j <= i) & (j > i - (window or 10**9))
    return scores.masked_fill(~seen, -math.inf).softmax(-1) @ v


@pytest.mark.parametrize("window", [0, 1, 5, 64])
def test_attention_against_its_definition(window):
    q, k, v = torch.randn(3, 2, 3, 24, 16, generator=torch.Generator().manual_seed(0)).unbind()
    idx = torch.zeros((2, 24), dtype=torch.int64)
    out = attention(q, k, v, attention_mask("sdpa", idx, 24, window, None))
    torch.testing.assert_close(out.double(), reference_attention(q, k, v, window), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype, length, window, docs",
                         [("fp32", 300, 0, False), ("fp32", 128, 5, False), ("fp32", 600, 0, True),
                          ("fp32", 257, 40, True), ("bf16", 256, 0, False)])  # fmt: skip
def test_blocked_attention_against_pytorchs(dtype, length, window, docs):
    generator = torch.Generator().manual_seed(0)
    dtype, rtol = (torch.float32, 1e-4) if dtype == "fp32" else (torch.bfloat16, 0.02)
    q, k, v, dy = torch.randn(4, 2, 3, length, 16, generator=generator).to(dtype).unbind()
    idx = torch.randint(0, 50, (2, length), generator=generator)
    results = []
    for backend, kind in (("blocked", dtype), ("sdpa", torch.float64)):
        inputs = [t.to(kind, copy=True).requires_grad_() for t in (q, k, v)]
        out = attention(*inputs, attention_mask(backend, idx, length, window, 3 if docs else None), backend)
        out.backward(dy.to(kind))
        results.append([out.detach(), *(t.grad for t in inputs)])
    for got, want in zip(*results):
        assert got.dtype == dtype
        assert (got.double() - want).norm() < rtol * want.norm()


def test_blocked_attention_compiled():
    if not compiler_works():
        pytest.skip("torch.compile finds no working compiler here")
    q, k, v = torch.randn(3, 2, 300, 2, 16, generator=torch.Generator().manual_seed(0)).transpose(2, 3).unbind()
    mask = attention_mask("blocked", torch.randint(0, 50, (2, 300)), 300, 40, 3)
    compiled = torch.compile(attention, dynamic=False, fullgraph=True)
    for seen in (None, mask):
        inputs = [[t.clone().requires_grad_() for t in (q, k, v)] for _ in range(2)]
        compiled(*inputs[0], seen, "blocked").square().sum().backward()
        attention(*inputs[1], seen, "sdpa").square().sum().backward()
        for got, want in zip(*inputs):
            torch.testing.assert_close(got.grad, want.grad, rtol=1e-4, atol=1e-4)


def test_auto_attention_is_blocked_where_a_cpu_compiles():
    cpu, cuda, compiled = torch.device("cpu"), torch.device("cuda"), dict(attn="auto", compile="default")
    assert attention_of(config(**compiled), cpu) == "blocked"
    for flags, device in (({}, cpu), (compiled, cuda), (compiled | dict(seq_len=2048, batch_tokens=4096), cpu),
                          (compiled | dict(preset="gpt2-small"), cuda)):  # fmt: skip
        assert attention_of(config(**flags), device) == "auto"
    assert attention_of(config(attn="flash", compile="default"), cpu) == "flash"


def reference_gpt(weights: dict, cfg: GPTConfig, idx) -> torch.Tensor:
    """Logits of the whole model, written from its description, in float64."""
    w = {name: value.double() for name, value in weights.items()}

    def norm(x):
        return x / (x.square().mean(-1, keepdim=True) + torch.finfo(torch.float32).eps).sqrt()

    d, half = cfg.n_embd // cfg.n_head, cfg.n_embd // cfg.n_head // 2
    angle = torch.arange(idx.size(1))[:, None] * cfg.rope_theta ** (-torch.arange(half).double() / half)
    turn = torch.polar(torch.ones_like(angle), -angle)  # a rotation is a complex product
    x = w["wte.weight"][idx]
    for row, tokens in enumerate(idx.tolist() if cfg.ngram > 1 else []):
        for t in range(len(tokens)):
            code = tokens[t] + 1
            for back in range(1, cfg.ngram):
                code = (code * 0x9E3779B1 + (tokens[t - back] + 1 if back <= t else 0)) % 2**31
                x[row, t] += w["ngrams.weight"][(code * 0x85EBCA6B // 128) % cfg.ngram_rows]
    x = norm(x)
    for layer in range(cfg.n_layer):
        q, k, v = (norm(x) @ w[f"blocks.{layer}.attn.qkv.weight"].T).chunk(3, -1)
        q, k, v = (t.view(*idx.shape, cfg.n_head, d).transpose(1, 2) for t in (q, k, v))
        q, k = (
            torch.complex(norm(t)[..., :half].contiguous(), norm(t)[..., half:].contiguous()) * turn for t in (q, k)
        )
        q, k = (torch.cat((t.real, t.imag), -1) for t in (q, k))
        y = reference_attention(q, k, v, cfg.layer_windows()[layer])
        x = x + y.transpose(1, 2).flatten(2) @ w[f"blocks.{layer}.attn.proj.weight"].T
        hidden = (norm(x) @ w[f"blocks.{layer}.mlp.fc.weight"].T).clamp(min=0) ** 2
        x = x + hidden @ w[f"blocks.{layer}.mlp.proj.weight"].T
    logits = norm(x) @ w["head.weight"].T
    return cfg.softcap * (logits / cfg.softcap).tanh() if cfg.softcap else logits


def random_gpt(std=0.1, compute_dtype=torch.float32, loss_chunk=0, **shape) -> GPT:
    cfg = GPTConfig(**dict(vocab_size=70, seq_len=24, n_layer=3, n_head=2, n_embd=32) | shape)
    gpt = GPT(cfg, compute_dtype, loss_chunk)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for p in gpt.parameters():
            p.normal_(0, std, generator=generator)
    return gpt


@pytest.mark.parametrize("shape", [dict(), dict(window="SSL:4"), dict(window="S", softcap=0.0, n_head=1),
                                   dict(ngram=4, ngram_rows=50)])  # fmt: skip
def test_model_against_its_description(shape):
    gpt = random_gpt(**shape)
    idx = torch.randint(70, (2, 24), generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(gpt(idx).double(), reference_gpt(gpt.state_dict(), gpt.cfg, idx), rtol=1e-4, atol=1e-4)
    expected = F.cross_entropy(
        reference_gpt(gpt.state_dict(), gpt.cfg, idx).flatten(0, 1), idx.flatten(), reduction="sum"
    )
    torch.testing.assert_close(gpt(idx, idx).double(), expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("softcap", [0.0, 15.0, 0.7])
@pytest.mark.parametrize("chunk", [1, 7, 48, 1000])
@pytest.mark.parametrize("penalty", [0.0, 0.3])
def test_chunked_loss_is_the_loss(penalty, chunk, softcap):
    torch.manual_seed(0)
    x, w = torch.randn(48, 16, requires_grad=True), torch.randn(30, 16, requires_grad=True)
    targets = torch.randint(-1, 30, (48,))
    logits = x @ w.T
    capped = softcap * torch.tanh(logits / softcap) if softcap else logits
    expected = F.cross_entropy(capped, targets, ignore_index=-1, reduction="sum")
    entropy = torch.distributions.Categorical(logits=capped[targets >= 0]).entropy().sum()
    expected_grads = torch.autograd.grad((expected - penalty * entropy) / 3, (x, w))
    loss_grad = model_module.cross_entropy_grad
    loss = model_module.ChunkedLoss.apply(x, w, targets, softcap, chunk, loss_grad, False, penalty)
    torch.testing.assert_close(loss, expected)
    for got, want in zip(torch.autograd.grad(loss / 3, (x, w)), expected_grads):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    with torch.no_grad():
        torch.testing.assert_close(model_module.ChunkedLoss.apply(x, w, targets, softcap, chunk, loss_grad), expected)


def test_confidence_penalty_is_in_the_gradient_alone():
    idx = torch.randint(70, (2, 24), generator=torch.Generator().manual_seed(0))
    targets = idx.clone()
    targets[:, :5] = -1
    losses, grads = [], []
    for penalty, chunk in ((0, 0), (0.3, 0), (0.3, 10)):
        gpt = random_gpt(loss_chunk=chunk)
        gpt.confidence_penalty = penalty
        losses.append(gpt(idx, targets))
        losses[-1].backward()
        grads.append({name: p.grad for name, p in gpt.named_parameters()})
        with torch.no_grad():
            losses.append(gpt(idx, targets))
    for loss in losses[1:]:
        torch.testing.assert_close(loss, losses[0])
    gpt = random_gpt()
    capped = gpt(idx).flatten(0, 1)[targets.flatten() >= 0]
    entropy = torch.distributions.Categorical(logits=capped).entropy().sum()
    (gpt(idx, targets) - 0.3 * entropy).backward()
    for name, p in gpt.named_parameters():
        for got in grads[1:]:
            torch.testing.assert_close(got[name], p.grad, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(grads[0]["head.weight"], grads[1]["head.weight"], rtol=1e-2)


def test_the_flag_for_a_confidence_penalty_arrives(plain, data, noisy, tmp_path):
    flags = TINY | dict(data=str(data), init_from=str(noisy), out_dir=str(tmp_path / "run"), max_steps=1)
    train(config(**flags, confidence_penalty=0.3))
    np.testing.assert_allclose(rows(tmp_path / "run", "train_loss"), rows(plain, "train_loss")[:1], rtol=1e-5)
    assert abs(rows(tmp_path / "run", "grad_norm")[0] / rows(plain, "grad_norm")[0] - 1) > 1e-3


def test_evaluation_makes_no_gradients(monkeypatch):
    gpt = random_gpt(loss_chunk=10)
    idx = torch.randint(70, (2, 24), generator=torch.Generator().manual_seed(0))
    want = gpt(idx, idx).detach()
    monkeypatch.setattr(gpt, "loss_grad", None)
    with torch.no_grad():
        torch.testing.assert_close(gpt(idx, idx), want)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="about glibc's malloc")
def test_freed_memory_is_kept_for_the_next_step():
    code = """if True:
        import resource, sys, torch, train_gpt
        if sys.argv[1] == "kept":
            train_gpt.keep_freed_memory()
        for repeat in range(3):
            faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
            for size in (1 << 21, 1 << 24):
                torch.ones(size)
        print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults)
    """
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("MALLOC_", "GLIBC_TUNABLES"))}
    faults = {}
    for how, env in (("kept", clean), ("", clean), ("kept", clean | dict(MALLOC_TRIM_THRESHOLD_="131072"))):
        done = subprocess.run([sys.executable, "-c", code, how], cwd=HERE, env=env, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        faults[how, len(env)] = int(done.stdout)
    kept, plain, users = faults.values()
    assert kept < plain / 4 and kept < users / 4  # the user's settings win


SETTINGS = dict(GOMP_SPINCOUNT="10000", TORCHINDUCTOR_VEC_ISA_OK="1", AOT_INDUCTOR_ENABLE_LINE_TABLES="0")


def test_header_compiled_ahead_is_the_one_that_kernels_use(tmp_path):
    if not compiler_works():
        pytest.skip("torch.compile finds no working compiler here")
    code = """if True:
        import sys, threading, torch, train_gpt
        from pathlib import Path
        folder = Path(sys.argv[1])
        train_gpt.precompile_header()
        [thread] = set(threading.enumerate()) - {threading.main_thread()}
        thread.join()
        ahead = sorted(folder.glob("*/precompiled_headers/*"))
        torch.compile(torch.sin)(torch.ones(64))
        assert sorted(folder.glob("*/precompiled_headers/*")) == ahead != []
        kernels = list(folder.rglob("*.so"))
        assert kernels and not any(b".debug_line" in path.read_bytes() for path in kernels)
    """
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("TORCHINDUCTOR", "AOT_INDUCTOR"))}
    clean |= SETTINGS | dict(TMPDIR=str(tmp_path))
    done = run_python("-c", code, tmp_path, env=clean)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("script", ["train_gpt.py", "bench.py", "sample.py"])
@pytest.mark.parametrize(
    "given",
    [{}, dict(GOMP_SPINCOUNT="77", AOT_INDUCTOR_ENABLE_LINE_TABLES="1"), dict(OMP_WAIT_POLICY="passive")],
)
def test_scripts_set_what_pytorch_reads_as_it_is_imported(script, given):
    code = """if True:
        import json, os, runpy, sys
        sys.argv = [sys.argv[1], "--help"]
        try:
            runpy.run_path(sys.argv[0], run_name="__main__")
        except SystemExit:
            print("\\n" + json.dumps(dict(os.environ)))
    """
    env = {k: v for k, v in os.environ.items() if k not in SETTINGS} | given | dict(OMP_DISPLAY_ENV="verbose")
    done = run_python("-c", code, script, env=env)
    after, expected = json.loads(done.stdout.splitlines()[-1]), SETTINGS | given
    spin = "0" if "OMP_WAIT_POLICY" in given else expected["GOMP_SPINCOUNT"]
    assert script == "sample.py" or all(after[name] == expected[name] for name in list(SETTINGS)[1:])
    spins = re.findall(r"GOMP_SPINCOUNT = '(\d+)'", done.stderr)  # what GNU's OpenMP read; other PyTorchs have another
    assert set(spins) <= {spin}
    if sys.platform == "linux" and platform.machine() == "x86_64":
        assert spins


def test_bf16_model_is_close_and_keeps_fp32_weights():
    exact, rounded = random_gpt(loss_chunk=10), random_gpt(compute_dtype=torch.bfloat16, loss_chunk=10)
    idx = torch.randint(70, (2, 24), generator=torch.Generator().manual_seed(0))
    a, b = exact(idx, idx), rounded(idx, idx)
    assert b.dtype == torch.float32 and a.item() != b.item()
    torch.testing.assert_close(a, b, rtol=2e-2, atol=0)
    a.backward(), b.backward()
    for p, q in zip(exact.parameters(), rounded.parameters()):
        assert q.grad.dtype == torch.float32
        assert F.cosine_similarity(p.grad.flatten(), q.grad.flatten(), dim=0) > 0.995


@pytest.mark.parametrize("shape", [dict(), dict(window="SL:5"), dict(ngram=3)])
def test_generation_with_cache_is_generation_without(shape):
    gpt = random_gpt(**shape, std=0.3)
    prompt = torch.randint(70, (3, 9), generator=torch.Generator().manual_seed(0))
    for options in (dict(temperature=0), dict(temperature=1.0, top_k=20), dict(temperature=0.9, top_p=0.8)):
        runs = []
        for use_cache in (True, False):
            g = torch.Generator().manual_seed(1)
            tokens = list(generate(gpt, prompt, 40, 65, **options, generator=g, use_cache=use_cache))  # past seq_len 24
            runs.append(torch.stack(tokens))
        assert torch.equal(*runs) and runs[0].max() < 65 and len(runs[0].unique()) > 3
    with pytest.raises(ValueError, match="exceed the model's context"):
        gpt(torch.zeros((1, 25), dtype=torch.int64))


@torch.no_grad()
def test_cached_logits_equal_uncached():
    gpt = random_gpt(window="SL:5", ngram=4)
    idx = torch.randint(70, (2, 24), generator=torch.Generator().manual_seed(0))
    cache, whole = model_module.KVCache(gpt, 2), gpt(idx)
    for start, end in ((0, 7), (7, 8), (8, 15), (15, 24)):  # pieces of several lengths
        got = gpt(idx[:, start:end], cache=cache)
        torch.testing.assert_close(got[:, 0], whole[:, end - 1], rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_ngrams_end_at_documents_and_after_n_tokens():
    gpt = random_gpt(ngram=3, ngram_rows=1 << 20)
    idx = torch.tensor([[5, 6, 7, 8, 9, 4, 5, 6, 7]])
    whole = gpt.embed(idx, None, None)[0]
    assert torch.equal(whole[2], whole[8]) and not torch.equal(whole[1], whole[7])  # 5 6 7, and (4) 5 6 against (-) 5 6
    other = idx.clone()
    other[0, 2] = 60
    differs = (gpt.embed(other, None, None)[0] != whole).any(-1)
    assert differs.tolist() == [False, False, True, True, True, False, False, False, False]
    masked = gpt.embed(idx, 4, None)[0]  # 4 starts a document
    assert torch.equal(masked[:5], whole[:5]) and torch.equal(masked[5:], gpt.embed(idx[:, 5:], None, None)[0])
    assert not torch.equal(masked[6], whole[6])


def test_dropped_ngrams():
    idx = torch.randint(70, (8, 24), generator=torch.Generator().manual_seed(0))
    gpt = random_gpt(ngram=2, ngram_rows=1 << 16)
    tokens, whole = gpt.wte(idx), gpt.embed(idx, None, None)
    gpt.ngram_dropout, share, different = 0.4, [], 0
    for gpt.step_seed in range(100):
        got = gpt.embed(idx, None, None)
        left_out = (got == tokens).all(-1)
        expected = torch.where(left_out[..., None], tokens, tokens + (whole - tokens) / 0.6)
        torch.testing.assert_close(got, expected)
        assert torch.equal(gpt.embed(idx[3:5], None, None), got[3:5])  # whatever rows are beside it
        share.append(left_out.float())
        different += not torch.equal(share[-1], share[0])
        with torch.no_grad():  # evaluation and sampling leave nothing out
            assert torch.equal(gpt.embed(idx, None, None), whole)
    share = torch.stack(share)
    assert different == 99
    assert share.mean() == pytest.approx(0.4, abs=0.015)  # of 19,200 draws: 4 standard deviations
    assert (share.mean(0) - 0.4).abs().max() < 0.25 and (share.mean((1, 2)) - 0.4).abs().max() < 0.18


def test_hashed_uniform_looks_random():
    place = torch.arange(256)[:, None]
    draws = torch.cat([model_module.hashed_uniform(torch.full((256, 1), 12345), place, s).T for s in range(512)])
    assert 0 <= draws.min() and draws.max() < 1
    assert draws.mean() == pytest.approx(0.5, abs=0.005) and draws.var() == pytest.approx(1 / 12, abs=0.002)
    for rows in (draws, draws.T):  # steps among each other, and places
        assert torch.corrcoef(rows).fill_diagonal_(0).abs().max() < 6 / rows.size(1) ** 0.5
    neighbours = torch.arange(54321, 54347).expand(256, -1)  # n-grams that differ in their first letter
    draws = torch.stack([model_module.hashed_uniform(neighbours, place, seed) for seed in range(64)], -1).flatten(0, 1)
    assert len((draws < 0.5).unique(dim=0)) == len(draws)  # each n-gram at each place has a history of its own


def test_bf16_gradients_have_the_right_scale():
    gpt = random_gpt(compute_dtype=torch.bfloat16, loss_chunk=10)
    idx = torch.randint(70, (2, 24), generator=torch.Generator().manual_seed(0))
    gradients = []
    for divisor in (1, 491520):  # 1 / 491520 is off by 0.3 % in bf16
        gpt.zero_grad()
        (gpt(idx, idx) / divisor).backward()
        gradients.append({name: p.grad * divisor for name, p in gpt.named_parameters()})
    for name, grad in gradients[0].items():
        assert (gradients[1][name] * grad).sum() / grad.square().sum() == pytest.approx(1, abs=1.5e-3), name


def test_top_k_and_top_p_draw_from_the_likeliest():
    logits = torch.log(torch.tensor([[0.5, 0.3, 0.15, 0.05]])).repeat(4000, 1)
    g = torch.Generator().manual_seed(0)
    p = torch.bincount(model_module.draw(logits, 1.0, 0, 1.0, g), minlength=4) / 4000
    torch.testing.assert_close(p, logits[0].exp(), atol=0.03, rtol=0)
    assert set(model_module.draw(logits, 1.0, 2, 1.0, g).tolist()) == {0, 1}
    assert set(model_module.draw(logits, 1.0, 0, 0.8, g).tolist()) == {0, 1}
    assert set(model_module.draw(logits, 1.0, 0, 0.81, g).tolist()) == {0, 1, 2}
    assert set(model_module.draw(logits, 0, 0, 1.0, g).tolist()) == {0}


def test_initial_weights_depend_on_seed_and_name_alone():
    a = initial_weight("blocks.0.attn.qkv.weight", (96, 32), 0)
    assert torch.equal(a, initial_weight("blocks.0.attn.qkv.weight", (96, 32), 0))
    assert not torch.equal(a, initial_weight("blocks.1.attn.qkv.weight", (96, 32), 0))
    assert not torch.equal(a, initial_weight("blocks.0.attn.qkv.weight", (96, 32), 1))
    assert abs(a.std().item() - (0.33 / 32) ** 0.5) < 0.005
    assert initial_weight("head.weight", (64, 32), 0).abs().max() == 0
    with pytest.raises(ValueError, match="blocks.0.extra.*exactly one"):
        initial_weight("blocks.0.extra", (4,), 0)


def test_flops_against_a_counter():
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.flop_counter import FlopCounterMode

    idx = torch.zeros((1, 24), dtype=torch.int64)
    for window, attended in (("L", 12.5), ("S:5", (1 + 2 + 3 + 4 + 20 * 5) / 24)):
        gpt = random_gpt(window=window)
        with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
            gpt(idx, idx).backward()
        full, seen = (3 * 12 * 32 * keys for keys in (24, attended))  # the counter sees a full square of scores
        cfg = config(n_layer=3, n_head=2, n_embd=32, seq_len=24, batch_tokens=24, window=window)
        expected = counter.get_total_flops() / 24 - full + seen
        assert train_gpt.flops_per_token(cfg, gpt) == pytest.approx(expected, rel=1e-6)


# ---------------------------------------------------------------------------------------------------------------------
# The optimizer


@pytest.mark.parametrize("shape", [(40, 40), (64, 16), (16, 64)])
def test_newton_schulz_against_svd(shape):
    x = torch.randn(5, *shape, generator=torch.Generator().manual_seed(0))
    got = newton_schulz(x).double()
    u, _, vt = torch.linalg.svd(x.double(), full_matrices=False)
    inside = u.mT @ got @ vt.mT  # diagonal, if the singular vectors are kept
    values = inside.diagonal(dim1=1, dim2=2)
    assert (inside - torch.diag_embed(values)).abs().max() < 2e-3
    assert values.min() > (0.1 if shape[0] == shape[1] else 0.71)  # square ones have tiny values
    assert values.max() < 1.29
    torch.testing.assert_close(newton_schulz(1e-5 * x), newton_schulz(1e5 * x), rtol=0, atol=1e-3)
    assert newton_schulz(torch.zeros(2, 3, 4)).abs().max() == 0


def test_newton_schulz_of_singular_values():
    values = torch.logspace(-2, 0, 1000, dtype=torch.float64)
    for a, b, c in model_module.NEWTON_SCHULZ:
        values = a * values + b * values**3 + c * values**5
    assert 0.7 < values.min() and values.max() < 1.3


@pytest.mark.parametrize("small", [1.0, 1e-2, 1e-4, 0.0])
def test_newton_schulz_on_the_gram_matrix(small):
    generator = torch.Generator().manual_seed(0)
    u, _, vt = torch.linalg.svd(torch.randn(3, 64, 256, generator=generator).double(), full_matrices=False)
    values = torch.full((64, 1), small, dtype=torch.float64)
    values[0] = 1.0
    x = u @ (values * vt)
    torch.testing.assert_close(newton_schulz(x.float()).double(), newton_schulz(x), rtol=0, atol=1e-4)
    try:  # less exact products go the plain way
        torch.set_float32_matmul_precision("high")
        plain = newton_schulz(x.float())
    finally:
        torch.set_float32_matmul_precision("highest")
    assert small == 0 or not torch.equal(plain, newton_schulz(x.float()))


def random_steps(optimizer, params, steps=6):
    """Gradients that change from step to step: only then do momentum and its Nesterov form show."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        for p in params:
            p.grad = torch.randn(p.shape, generator=generator)
        optimizer.step()


def test_muon_against_torch(monkeypatch):
    converging = (1.875, -1.25, 0.375)  # torch divides by another norm: only what converges is the same in the end
    monkeypatch.setattr(model_module, "NEWTON_SCHULZ", 20 * [converging])
    generator = torch.Generator().manual_seed(0)
    shapes = [(32, 16), (32, 16), (16, 32), (24, 24)]
    start = [torch.randn(s, generator=generator) for s in shapes]
    ours, theirs = ([torch.nn.Parameter(p.clone()) for p in start] for _ in range(2))
    group = dict(params=ours, names=list("abcd"), kind="muon", lr=0.05, betas=(0.9, 0.0), weight_decay=0.3, split=1)
    optimizer = Optimizer([group], ns_dtype=torch.bfloat16)
    oracle = torch.optim.Muon(theirs, 0.05, 0.3, 0.9, ns_coefficients=converging, ns_steps=20)
    random_steps(optimizer, ours)
    random_steps(oracle, theirs)
    for a, b, p in zip(ours, theirs, start):
        assert ((a - b).norm() / (b - p).norm()) < 0.03
        momentum = oracle.state[b]["momentum_buffer"]
        assert ((optimizer.state[a]["momentum"] - momentum).norm() / momentum.norm()) < 0.03


def test_muon_orthogonalises_stacked_matrices_one_by_one():
    p = torch.nn.Parameter(torch.zeros(12, 4))
    p.grad = torch.randn(12, 4, generator=torch.Generator().manual_seed(0))
    expected = -torch.cat([newton_schulz(part[None])[0] for part in p.grad.chunk(3)])
    Optimizer([dict(params=[p], names=["p"], kind="muon", lr=1.0, betas=(0.95, 0.0), weight_decay=0.0, split=3)]).step()
    torch.testing.assert_close(p.detach(), expected, rtol=1e-4, atol=1e-5)


def test_adam_against_torch():
    start = torch.randn(20, 10)
    ours, theirs = torch.nn.Parameter(start.clone()), torch.nn.Parameter(start.clone())
    group = dict(params=[ours], names=["a"], kind="adam", lr=0.02, betas=(0.8, 0.95), weight_decay=0.3, split=1)
    random_steps(Optimizer([group]), [ours])
    random_steps(torch.optim.AdamW([theirs], lr=0.02, betas=(0.8, 0.95), weight_decay=0.3, eps=1e-10), [theirs])
    torch.testing.assert_close(ours, theirs)


def test_every_parameter_has_exactly_one_role():
    gpt = random_gpt()
    for optimizer in ("muon", "adamw"):
        groups = model_module.optimizer_groups(gpt, optimizer, 0.02, 0.004, 0.1)
        names = [name for group in groups for name in group["names"]]
        assert sorted(names) == sorted(name for name, _ in gpt.named_parameters())
    gpt.blocks[0].gate = torch.nn.Parameter(torch.zeros(3))
    with pytest.raises(ValueError, match="blocks.0.gate matches 0 rows of ROLES"):
        model_module.optimizer_groups(gpt, "muon", 0.02, 0.004, 0.1)


def test_schedule():
    cfg = config(max_steps=100, warmup_frac=0.1, cooldown_frac=0.5)
    scales = [train_gpt.lr_scale(step, cfg) for step in range(100)]
    assert scales[0] == pytest.approx(0.1) and scales[9:51] == [1.0] * 42 and scales[75] == pytest.approx(0.5)
    assert scales[-1] == pytest.approx(0.02) and min(scales) > 0
    assert train_gpt.lr_scale(99, config(max_steps=100, cooldown_frac=0)) == 1.0


# ---------------------------------------------------------------------------------------------------------------------
# Training: the laws


def plain_loop(data, noisy, steps):
    """Losses and gradient norms of a loop without the trainer's step, and its first gradients: all rows at once."""
    cfg = config(**TINY | dict(data=str(data)))
    gpt = GPT(GPTConfig(**read_checkpoint(noisy)["model_config"]))
    gpt.load_state_dict(read_checkpoint(noisy)["model"])
    optimizer = Optimizer(model_module.optimizer_groups(gpt, "muon", 0.02, 0.004, cfg.weight_decay))
    here = train_gpt.Launch(torch.device("cpu"))
    opened, losses, norms, first = train_gpt.open_data(cfg, here), [], [], None
    for step in range(steps):
        windows = train_gpt.train_batch(opened, cfg, here, step)
        x, y = windows[:, :-1], windows[:, 1:]
        loss = F.cross_entropy(gpt(x).flatten(0, 1), y.flatten())
        loss.backward()
        first = first or {name: p.grad.clone() for name, p in gpt.named_parameters()}
        losses.append(loss.item())
        norms.append(math.sqrt(sum(p.grad.double().square().sum().item() for p in gpt.parameters())))
        for group in optimizer.param_groups:
            group["lr"] = group["base_lr"] * min(1, (cfg.max_steps - step) / (cfg.cooldown_frac * cfg.max_steps))
        optimizer.step()
        optimizer.zero_grad()
    return (losses, norms), first


def test_losses_and_gradient_norms_against_a_plain_loop(plain, data, noisy):
    losses, norms = plain_loop(data, noisy, steps=20)[0]
    np.testing.assert_allclose(rows(plain, "train_loss"), losses, rtol=1e-5)
    np.testing.assert_allclose(rows(plain, "grad_norm"), norms, rtol=1e-5)


SAME = {
    "checkpointing full": dict(checkpointing="full"),
    "checkpointing selective": dict(checkpointing="selective"),
    "attention math": dict(attn="math"),
    "attention flash": dict(attn="flash"),
    "attention sdpa": dict(attn="sdpa"),
    "attention blocked": dict(attn="blocked"),
    "deterministic": dict(deterministic=True),
    "matmul_precision": dict(matmul_precision="high"),
    "offload activations": dict(offload="activations"),
    "offload optimizer": dict(offload="optimizer"),
    "prefetch": dict(prefetch=7),
    "profile": dict(profile=2),
    "window as wide as the context": dict(window="S:32"),
    "alloc_conf": dict(alloc_conf="expandable_segments:True,roundup_power2_divisions:[256:1,512:2,>:4]"),
    "micro_batch 1": dict(micro_batch=1),
    "micro_batch 4, chunked": dict(micro_batch=4, loss_chunk=50),
    "chunk of everything": dict(micro_batch=16, loss_chunk=10**6),
}


@pytest.mark.parametrize("case", SAME)
def test_launch_shape_does_not_change_the_run(case, data, noisy, plain, tmp_path, monkeypatch):
    flags = TINY | dict(data=str(data), init_from=str(noisy), out_dir=str(tmp_path / "run")) | SAME[case]
    if case == "window as wide as the context":  # another field in the checkpoint's shape, the same model
        checkpoint = read_checkpoint(noisy)
        checkpoint["model_config"]["window"] = "S:32"
        checkpoint["sha256"] = content_hash(checkpoint)
        torch.save(checkpoint, tmp_path / "window.pt")
        flags["init_from"] = str(tmp_path / "window.pt")
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "")
    train(config(**flags))
    assert_same_run(tmp_path / "run", plain)


def test_watching_disturbs_nothing(data, noisy, plain, tmp_path):
    watched = dict(eval_every=3, sample_every=7, save_every=5, prefetch=0, micro_batch=16, loss_chunk=0)
    train(config(**TINY | dict(data=str(data), init_from=str(noisy), out_dir=str(tmp_path / "run")) | watched))
    for key in ("train_loss", "grad_norm"):
        assert rows(tmp_path / "run", key) == rows(plain, key)
    assert len(rows(tmp_path / "run", "val_loss")) == 7
    assert [path.name for path in train_gpt.checkpoints(tmp_path / "run")] == ["ckpt_20.pt", "ckpt_15.pt"]


def test_evaluation_is_the_mean_over_whole_windows(data, noisy, tmp_path):
    tokens = np.fromfile(data / "a_val_0.bin", dtype="<u2", offset=1024).astype(np.int64)
    for eval_tokens, n_rows in ((0, 135), (1000, 31)):
        gpt = GPT(GPTConfig(**read_checkpoint(noisy)["model_config"]))
        gpt.load_state_dict(read_checkpoint(noisy)["model"])
        x, y = (torch.from_numpy(tokens[i : i + n_rows * 32].reshape(n_rows, 32)) for i in (0, 1))
        expected = F.cross_entropy(gpt(x).flatten(0, 1), y.flatten()).item()
        for micro_batch in (1, 16):
            flags = TINY | dict(eval_tokens=eval_tokens, micro_batch=micro_batch, max_steps=1, muon_lr=1e-30)
            flags |= dict(adam_lr=1e-30, data=str(data), init_from=str(noisy))
            summary = train(config(**flags, out_dir=str(tmp_path / f"{n_rows}-{micro_batch}")))
            assert summary["val_loss"] == pytest.approx(expected, rel=1e-5)
            assert summary["val_bpb"] == pytest.approx(expected / math.log(2), rel=1e-5)


def test_resume_is_exact(data, tmp_path):
    common = TINY | dict(data=str(data), save_every=10, keep=0)
    train(config(**common | dict(out_dir=str(tmp_path / "whole"))))
    (tmp_path / "half").mkdir()
    (tmp_path / "half" / "ckpt_10.pt").write_bytes((tmp_path / "whole" / "ckpt_10.pt").read_bytes())
    lines = (tmp_path / "whole" / "metrics.jsonl").read_text().splitlines()
    (tmp_path / "half" / "metrics.jsonl").write_text("\n".join(lines[:15]) + '\n{"step": 16, "tra')  # killed in a write
    train(config(**common | dict(out_dir=str(tmp_path / "half"), resume="newest")))
    assert_same_run(tmp_path / "half", tmp_path / "whole", exact=True)
    assert rows(tmp_path / "half", "step") == rows(tmp_path / "whole", "step")


def test_fresh_processes_give_the_same_bits(data, tmp_path):
    flags = TINY | dict(data=str(data), max_steps=5)
    for i in range(2):
        done = run_python("train_gpt.py", *flags_of(flags | dict(out_dir=tmp_path / str(i))))
        assert done.returncode == 0, done.stderr
    train(config(**flags | dict(out_dir=str(tmp_path / "here"))))
    assert_same_run(tmp_path / "0", tmp_path / "1", exact=True)
    assert_same_run(tmp_path / "0", tmp_path / "here", exact=True)


def test_overfits_one_batch(tmp_path):
    folder = tmp_path / "one"
    folder.mkdir()
    tokens = np.random.default_rng(0).integers(0, 250, 300).astype(np.uint16)
    write_shard(folder / "train.bin", tokens)
    write_shard(folder / "val.bin", tokens[:-1])
    meta = dict(tokenizer="bytes", vocab_size=257, eot=256, splits={}, source="test", files={})
    meta["splits"] = {split: dict(tokens=300, bytes=300, documents=1) for split in ("train", "val")}
    (folder / "meta.json").write_text(json.dumps(meta))
    for optimizer in ("muon", "adamw"):
        flags = TINY | dict(data=str(folder), optimizer=optimizer, batch_tokens=256, max_steps=150, adam_lr=0.01)
        summary = train(config(**flags | dict(out_dir=str(tmp_path / optimizer))))
        assert summary["val_loss"] < 0.5, (optimizer, summary["val_loss"])  # random bytes: 5.5 without memory


def compiler_works() -> bool:
    try:
        return torch.compile(lambda x: x + 1)(torch.zeros(2)).sum().item() == 2
    except Exception:
        return False


@pytest.mark.parametrize("more", [dict(), dict(checkpointing="0.3"), dict(compile="reduce-overhead", micro_batch=4)])
def test_compiled_run_is_the_same(more, data, noisy, plain, tmp_path):
    if not compiler_works():
        pytest.skip("torch.compile finds no working compiler here")
    flags = TINY | dict(data=str(data), init_from=str(noisy), micro_batch=8, loss_chunk=256, compile="default")
    train(config(**flags | more | dict(out_dir=str(tmp_path / "run"), sample_every=10)))
    assert_same_run(tmp_path / "run", plain)
    assert "attention blocked" in (tmp_path / "run" / "log.txt").read_text()
    assert all("_orig_mod" not in name for name in final(tmp_path / "run")["model"])


# ---------------------------------------------------------------------------------------------------------------------
# The run's folder


def test_what_a_run_leaves_behind(data, tmp_path):
    folder = tmp_path / "run"
    summary = train(config(**TINY | dict(data=str(data), out_dir=str(folder), max_steps=7, log_every=3, eval_every=4)))
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    training, evaluations = ([row for row in lines if key in row] for key in ("train_loss", "val_loss"))
    assert [row["step"] for row in training] == [1, 3, 6, 7] and [row["step"] for row in evaluations] == [4, 7]
    assert set(training[0]) == {"step", "train_loss", "lr", "grad_norm", "tokens", "tokens_per_s", "mfu", "peak_mem_mb",
                                "train_time_s", "wall_time_s"}  # fmt: skip
    assert set(evaluations[0]) == {"step", "val_loss", "val_bpb", "tokens", "train_time_s", "wall_time_s"}
    assert training[-1]["tokens"] == 7 * 512 and training[0]["mfu"] is None
    assert 0 < training[0]["train_time_s"] < training[-1]["train_time_s"] < training[-1]["wall_time_s"]
    assert summary == json.loads((folder / "summary.json").read_text())
    assert summary["val_loss"] == evaluations[-1]["val_loss"] and summary["stopped_by"] == "max_steps"
    log = (folder / "log.txt").read_text()
    assert (HERE / "train_gpt.py").read_text() in log and (HERE / "model.py").read_text() in log
    assert f"torch {torch.__version__}" in log and '"muon_lr": 0.02' in log and "step 7/7 | loss" in log
    assert sorted(p.name for p in folder.iterdir()) == [
        ".lock",
        "ckpt_7.pt",
        "log.txt",
        "metrics.jsonl",
        "summary.json",
    ]


def test_checkpoint_is_plain_and_names_are_clean(plain):
    path = train_gpt.checkpoints(plain)[0]
    checkpoint = torch.load(path, weights_only=True)
    assert checkpoint["step"] == 20 and checkpoint["config"]["n_embd"] == 32 and checkpoint["tokenizer"] == "bytes"
    assert (
        "blocks.0.attn.qkv.weight" in checkpoint["model"]
        and "momentum" in checkpoint["optimizer"]["blocks.1.mlp.fc.weight"]
    )


def test_damaged_checkpoints_are_passed_over(data, tmp_path, capsys):
    folder = tmp_path / "run"
    common = TINY | dict(data=str(data), out_dir=str(folder), save_every=5, keep=0, max_steps=15)
    train(config(**common))
    whole = (folder / "ckpt_15.pt").read_bytes()
    (folder / "ckpt_15.pt").write_bytes(whole[: len(whole) // 2])
    flipped = bytearray((folder / "ckpt_10.pt").read_bytes())
    flipped[len(flipped) // 2] ^= 1
    (folder / "ckpt_10.pt").write_bytes(bytes(flipped))
    torch.load(folder / "ckpt_10.pt", weights_only=True)  # PyTorch itself does not notice
    with pytest.raises(UserError, match="ckpt_10.pt is damaged"):
        read_checkpoint(folder / "ckpt_10.pt")
    train(config(**common | dict(resume="newest")))
    assert "ckpt_5.pt" in capsys.readouterr().out


def test_weights_with_the_prefixes_of_wrappers_load(data, noisy, tmp_path):
    checkpoint = read_checkpoint(noisy)
    checkpoint["model"] = {f"module._orig_mod.{name}": w for name, w in checkpoint["model"].items()}
    gpt = GPT(GPTConfig(**checkpoint["model_config"]))
    train_gpt.load_weights(gpt, checkpoint, "x.pt")
    assert torch.equal(gpt.head.weight, read_checkpoint(noisy)["model"]["head.weight"])


def test_malicious_checkpoint_is_not_executed(tmp_path):
    class Evil:
        def __reduce__(self):
            return (os.mkdir, (str(tmp_path / "executed"),))

    torch.save({"step": 1, "sha256": "", "model": Evil()}, tmp_path / "ckpt_1.pt")
    with pytest.raises(UserError, match="not a checkpoint of this trainer or is damaged"):
        read_checkpoint(tmp_path / "ckpt_1.pt")
    assert not (tmp_path / "executed").exists()


def test_target_and_time_limit_stop_a_run(data, tmp_path):
    common = TINY | dict(data=str(data), max_steps=30)
    summary = train(config(**common | dict(out_dir=str(tmp_path / "a"), eval_every=2, target_val_loss=4.0)))
    assert summary["stopped_by"] == "target_val_loss" and summary["target_reached"]["step"] == summary["step"] < 30
    assert summary["val_loss"] <= 4.0 and (tmp_path / "a" / f"ckpt_{summary['step']}.pt").exists()
    summary = train(config(**common | dict(out_dir=str(tmp_path / "b"), max_minutes=1e-4)))
    assert summary["stopped_by"] == "max_minutes" and summary["step"] < 30 and summary["val_loss"]


def test_a_signal_saves_and_a_resumed_run_is_the_undisturbed_one(data, tmp_path):
    flags = TINY | dict(data=str(data), max_steps=400, log_every=100, prefetch=1)
    command = [sys.executable, "train_gpt.py", *flags_of(flags | dict(out_dir=tmp_path / "run", save_every=5))]
    process = subprocess.Popen(command, cwd=HERE, stdout=subprocess.PIPE, text=True)
    deadline = time.time() + 100
    while not train_gpt.checkpoints(tmp_path / "run") and time.time() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 0 and "stopped by SIGTERM" in process.stdout.read()
    assert 5 <= final(tmp_path / "run")["step"] < 400
    train(config(**flags | dict(out_dir=str(tmp_path / "run"), resume="auto")))
    train(config(**flags | dict(out_dir=str(tmp_path / "whole"))))
    ours, theirs = final(tmp_path / "run"), final(tmp_path / "whole")
    assert all(torch.equal(ours["model"][name], theirs["model"][name]) for name in ours["model"])


def test_checkpoints_of_other_branches_are_safe(data, tmp_path):
    common = TINY | dict(data=str(data), out_dir=str(tmp_path / "run"), save_every=2, keep=0, max_steps=6)
    train(config(**common))
    (tmp_path / "run" / "ckpt_6 (copy).pt").touch()
    first = str(tmp_path / "run" / "ckpt_2.pt")
    with pytest.raises(UserError, match="ckpt_6.pt, later than .*ckpt_2.pt; give another --out_dir"):
        train(config(**common | dict(resume=first)))
    branch = common | dict(out_dir=str(tmp_path / "branch"), keep=1)
    summary = train(config(**branch | dict(init_from=str(tmp_path) + "/./run/ckpt_2.pt", max_steps=3)))
    assert rows(tmp_path / "branch", "step") == [1, 2, 3, 3] and summary["step"] == 3  # a fresh schedule
    assert len(train_gpt.checkpoints(tmp_path / "branch")) == 1


def test_a_restart_goes_on_from_what_was_saved(data, noisy, plain, tmp_path, monkeypatch):
    common = TINY | dict(data=str(data), out_dir=str(tmp_path / "run"), init_from=str(noisy), max_steps=4, save_every=2)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    train(config(**common))  # died before it saved: starts from the same weights again
    assert rows(tmp_path / "run", "train_loss")[0] == pytest.approx(rows(plain, "train_loss")[0], rel=1e-5)
    train(config(**common))
    assert "resumed from" in (tmp_path / "run" / "log.txt").read_text()


def test_summary_covers_what_was_before_a_resume(data, tmp_path):
    common = TINY | dict(data=str(data), out_dir=str(tmp_path / "run"), eval_every=2, max_steps=6, save_every=3)
    whole = train(config(**common))
    again = train(config(**common | dict(resume="newest")))
    for key in ("val_loss", "best_val_loss", "step", "tokens"):
        assert whole[key] == again[key]
    assert len(rows(tmp_path / "run", "val_loss")) == 3


def test_wandb_offline(data, tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    train(config(**TINY | dict(data=str(data), out_dir=str(tmp_path / "run"), max_steps=2, wandb=True)))
    assert list((tmp_path / "run").glob("wandb/offline-run-*/*.wandb"))


# ---------------------------------------------------------------------------------------------------------------------
# Micro-batch that fits: the decision, with measurements made up


def test_micro_batch_is_predicted_verified_and_halved():
    asked = []

    def peak(m, fixed=10, each=5, worse_from=10**9):
        asked.append(m)
        return fixed + each * m if m < worse_from else math.inf

    assert train_gpt.largest_that_fits(32, peak, 100) == 16 and asked == [1, 2, 16]
    assert train_gpt.largest_that_fits(32, lambda m: peak(m, worse_from=12), 100) == 8  # out of memory at 16
    assert train_gpt.largest_that_fits(12, peak, 45) == 6
    assert train_gpt.largest_that_fits(7, peak, 45) == 7 and train_gpt.largest_that_fits(7, peak, 40) == 1
    assert train_gpt.largest_that_fits(1, peak, 100) == 1
    assert train_gpt.largest_that_fits(32, lambda m: 99 * min(m, 2) + 10 * m, 500) == 16  # a chunk of the loss is full
    assert train_gpt.largest_that_fits(12, lambda m: 10 * m if m < 2 else math.inf, 45) == 1
    asked.clear()
    assert train_gpt.largest_that_fits(512, peak, 21) == 2 and asked == [1, 2]
    with pytest.raises(UserError, match="one sequence needs .* GiB"):
        train_gpt.largest_that_fits(32, peak, 12)


# ---------------------------------------------------------------------------------------------------------------------
# The user's mistakes: one sentence, exit code 2


@pytest.mark.parametrize("flags, sentence", [
    (["--n_layers", "3"], "no flag --n_layers; did you mean n_layer"),
    (["--n_layer", "3.5"], "invalid int value: '3.5'"),
    (["--preset", "laptpo"], "invalid choice: 'laptpo'"),
    (["--batch_tokens", "500"], "not a multiple of --seq_len 32; use --batch_tokens 512"),
    (["--micro_batch", "5"], "does not divide the 16 sequences .* use --micro_batch 4"),
    (["--n_head", "3"], "cannot be cut into 3 heads"),
    (["--window", "SLX"], "window is 'SLX'; expected letters S and L"),
    (["--warmup_frac", "0.7", "--cooldown_frac", "0.7"], "add up to more than 1"),
    (["--muon_lr", "nan"], "--muon_lr is nan; expected a finite number"),
    (["--max_steps", "0"], "--max_steps is 0; expected a finite number of at least 1"),
    (["--bf16", "--dtype", "fp32"], "contradict each other"),
    (["--ngram_dropout", "0.3", "--ngram", "0"], "n-grams to leave out"),
    (["--ngram_dropout", "1", "--ngram", "3"], "expected a share below 1"),
    (["--resume", "--init_from", "x.pt"], "contradict each other"),
    (["--resume"], "--resume found no valid checkpoint in .*; leave it out"),
    (["--wandb", "yes"], "invalid true or false value: 'yes'"),
    (["--resume", "gone.pt"], "no checkpoint gone.pt"),
    (["--attn", "flex"], "flex cannot train here: FlexAttention has a backward pass on CUDA only; use --attn sdpa"),
    (["--attn", "varlen"], "--attn varlen runs on CUDA only, not on cpu; use auto, blocked or sdpa"),
    (["--attn", "cudnn"], "--attn cudnn runs on CUDA only"),
    (["--attn", "fa3"], "--attn fa3 runs on CUDA only"),
    (["--fp8"], "--fp8 needs a CUDA device of compute capability 8.9 or newer"),
    (["--checkpointing", "some"], "expected none, selective, full or a number between 0 and 1"),
    (["--checkpointing", "1.5"], "expected none, selective, full or a number between 0 and 1"),
    (["--checkpointing", "0.5"], "is a budget for the compiler; add --compile"),
    (["--alloc_conf", "expandable_segment:True"], "no setting .*; did you mean expandable_segments"),
    (["--alloc_conf", "backend:cudaMallocAsync"], "cannot set backend, which is fixed when torch is imported"),
    (["--alloc_conf", "max_split_size_mb"], "no setting 'max_split_size_mb'.*expected key:value"),
    (["--compile", "reduce-overhead", "--parallel", "fsdp"], "records CUDA graphs, which FSDP's moving weights break"),
    (["--compile", "max-autotune", "--deterministic"], "picks kernels by timing"),
    (["--profile", "50"], "--profile 50 starts after 3 steps; use --max_steps 53 or more"),
    (["--seq_len=32", "--doc_align", "--vocab_size=300", "--data", "NO_DOCS"], "finds no document"),
    (["--vocab_size", "200"], "less than the 257 of"),
    (["--seq_len=8192", "--batch_tokens=8192", "--micro_batch=1"], "has 4333 tokens, too few .* --seq_len below 4333"),
    (["--data", "/nowhere"], "/nowhere.*python data/prepare.py"),
])  # fmt: skip
def test_mistakes_end_with_a_sentence(flags, sentence, data, tmp_path, capsys):
    if "NO_DOCS" in flags:
        flags = [str(make_data(tmp_path / "no_docs", eot=False)) if flag == "NO_DOCS" else flag for flag in flags]
    code, err = run_main(flags_of(TINY | dict(data=data, out_dir=tmp_path / "run")) + flags, capsys)
    assert code == 2 and re.search(sentence, err) and err.startswith("error: ") and err.count("\n") == 1, err
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_no_compiler_is_said(data, tmp_path):
    done = run_python("train_gpt.py", *flags_of(TINY | dict(data=data, out_dir=tmp_path / "run")), "--compile",
                      env=os.environ | {"CXX": "/no/such/compiler"})  # fmt: skip
    assert done.returncode == 2 and "--compile finds no C++ compiler" in done.stderr and done.stderr.count("\n") == 1


def test_compiler_that_fails_is_said(data, tmp_path):
    if not compiler_works():
        pytest.skip("torch.compile finds no working compiler here")
    fussy = tmp_path / "g++"
    fussy.write_text('#!/bin/sh\n[ "$*" = --version ] && exec g++ --version\necho "x: error: -mnew?" >&2\nexit 1\n')
    fussy.chmod(0o755)
    done = run_python("train_gpt.py", *flags_of(TINY | dict(data=data, out_dir=tmp_path / "run")), "--compile",
                      env=os.environ | {"CXX": str(fussy), "TMPDIR": str(tmp_path)})  # fmt: skip
    assert done.returncode == 1 and "the C++ compiler could not compile" in done.stderr and "-mnew?" in done.stderr
    assert done.stderr.count("\n") == 1


def test_adam_alone_has_learning_rates_of_its_own():
    rates = [
        train_gpt.learning_rates(config(**flags))[1]
        for flags in (
            dict(),
            dict(optimizer="adamw"),
            dict(optimizer="adamw", adam_lr=0.1),
            dict(preset="gpt2-small"),
            dict(preset="gpt2-small", optimizer="adamw"),
        )
    ]
    assert rates == [0.012, 0.008, 0.1, 0.006, 0.002]


def test_unreadable_data_and_wandb_without_a_login_are_said(data, tmp_path, capsys):
    done = run_python("train_gpt.py", *flags_of(TINY | dict(data=data, out_dir=tmp_path / "run", wandb=True)),
                      env=os.environ | dict(WANDB_MODE="online", WANDB_API_KEY="short"))  # fmt: skip
    assert done.returncode == 2 and re.search("error: --wandb could not start .* WANDB_MODE=offline", done.stderr)
    own = make_data(tmp_path / "data")
    (own / "meta.json").unlink()
    (own / "meta.json").mkdir()
    code, err = run_main(flags_of(TINY | dict(data=own, out_dir=tmp_path / "run")), capsys)
    assert code == 2 and re.fullmatch(r"error: .*meta.json cannot be read or written .*\n", err)


def test_cuda_graphs_refuse_what_moves():
    for flags in (dict(offload="activations"), dict(attn="varlen", doc_mask=True, bf16=True)):
        with pytest.raises(UserError, match="records CUDA graphs"):
            train_gpt.check_device(config(compile="reduce-overhead", **flags), torch.device("cuda"))


def test_flags_without_effect_are_named(data, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "")
    flags = dict(offload="activations", alloc_conf="max_split_size_mb:64", max_steps=1, out_dir=str(tmp_path / "run"))
    train(config(**TINY | dict(data=str(data)) | flags))
    out = capsys.readouterr().out
    assert "--offload activations has no effect on cpu" in out and "--alloc_conf has no effect on cpu" in out
    assert "attention auto (flash_attention), matmul precision highest" in out


def test_profile_leaves_a_trace_and_a_table(data, tmp_path):
    train(config(**TINY | dict(data=str(data), out_dir=str(tmp_path / "run"), max_steps=6, profile=2)))
    events = json.loads((tmp_path / "run" / "trace_rank0.json").read_text())["traceEvents"]
    assert any("aten::mm" in event.get("name", "") for event in events)
    assert "Self CPU time total" in (tmp_path / "run" / "log.txt").read_text().split("=" * 40 + " run\n")[-1]


def test_windows_start_at_documents(data):
    cfg = config(**TINY | dict(data=str(data), doc_align=True))
    opened = train_gpt.open_data(cfg, train_gpt.Launch(torch.device("cpu")))
    steps = -(-len(opened.aligned) // 16)
    windows = torch.cat(
        [train_gpt.train_batch(opened, cfg, train_gpt.Launch(torch.device("cpu")), s) for s in range(steps)]
    )
    assert (windows[:, 0] == 256).all()
    assert (np.diff(opened.aligned) >= 32).all() and len(opened.aligned) == len(np.unique(opened.aligned))
    assert len(opened.aligned) > 0.9 * 29000 / 97


def test_documents_do_not_see_each_other():
    gpt = random_gpt(window="SL:5")
    gpt.doc_eot = 3
    idx = torch.randint(4, 70, (2, 24), generator=torch.Generator().manual_seed(0))
    idx[0, 9] = idx[1, 4] = idx[1, 5] = idx[1, 20] = 3
    targets = idx.roll(-1, 1)
    with torch.no_grad():
        together = gpt(idx)
        gpt.doc_eot = None
        for row, starts in ((0, (0, 9, 24)), (1, (0, 4, 5, 20, 24))):
            for a, b in zip(starts, starts[1:]):  # rotary positions are relative: alone, a document reads the same
                torch.testing.assert_close(together[row, a:b], gpt(idx[row : row + 1, a:b])[0], rtol=1e-4, atol=1e-4)
        assert (together - gpt(idx)).abs().max() > 0.1 and targets.shape == idx.shape


@pytest.mark.parametrize("window, docs", [(0, False), (5, False), (0, True), (5, True)])
def test_flex_attention_means_the_same(window, docs):
    q, k, v = torch.randn(3, 2, 3, 128, 16, generator=torch.Generator().manual_seed(0)).unbind()
    idx = torch.randint(0, 20, (2, 128), generator=torch.Generator().manual_seed(0))
    eot = 3 if docs else None
    with torch.no_grad():
        got = attention(q, k, v, attention_mask("flex", idx, 128, window, eot), "flex")
        want = attention(q, k, v, attention_mask("sdpa", idx, 128, window, eot))
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


def test_varlen_offsets():
    idx = torch.ones((2, 48), dtype=torch.int64)
    idx[0, 0] = idx[0, 7] = idx[1, 10] = 3
    plan = attention_mask("varlen", idx, 48, 5, 3)
    assert plan.starts.tolist() == [0, 7, 48, 58, 96] and plan.starts.dtype == torch.int32
    assert plan.longest == 48 and plan.window == (4, 0)  # the window counts the query itself, varlen_attn's does not
    assert attention_mask("varlen", idx, 48, 0, None).starts.tolist() == [0, 48, 96]


def test_budget_of_the_compiler_acts():
    if not compiler_works():
        pytest.skip("torch.compile finds no working compiler here")
    kept, idx = {}, torch.zeros((8, 32), dtype=torch.int64)
    for mode in ("0.1", "0.9"):
        run = train_gpt.build(
            config(**TINY | dict(compile="default", checkpointing=mode)), train_gpt.Launch(idx.device), 257
        )
        with saved_for_backward() as (storages, _):
            run.gpt(idx, idx).backward()
        kept[mode] = sum(storages.values())
    assert kept["0.1"] < 0.9 * kept["0.9"], kept


def test_checkpointing_keeps_fewer_bytes_for_backward(monkeypatch):
    selective, caches = model_module.create_selective_checkpoint_contexts, []

    def contexts(policy):
        caching, cached = selective(policy)
        caches.append(caching.storage)  # what it keeps does not pass through hooks
        return caching, cached

    monkeypatch.setattr(model_module, "create_selective_checkpoint_contexts", contexts)
    kept = {}
    for mode in ("none", "selective", "full"):
        gpt = random_gpt(n_layer=6, loss_chunk=10)
        weights = {p.untyped_storage().data_ptr() for p in gpt.parameters()}
        for block in gpt.blocks:
            block.checkpointing = mode
        idx = torch.zeros((8, 24), dtype=torch.int64)

        with saved_for_backward() as (storages, note):
            loss = gpt(idx, idx)
        for value in torch.utils._pytree.tree_leaves([list(cache.values()) for cache in caches]):
            tensor = getattr(value, "val", value)
            if isinstance(tensor, torch.Tensor):
                note(tensor)
        kept[mode] = sum(size for pointer, size in storages.items() if pointer not in weights)
        loss.backward()
    assert kept["full"] < 0.2 * kept["none"] and 1.5 * kept["full"] < kept["selective"] < 0.7 * kept["none"], kept


def test_fp8_products_are_close():
    torch.manual_seed(0)
    x, w = torch.randn(64, 32).bfloat16().requires_grad_(), torch.randn(48, 32).bfloat16().requires_grad_()
    try:
        got = model_module.Fp8Product.apply(x, w)
    except RuntimeError as error:
        pytest.skip(f"no float8 products on this CPU: {error}")
    want = x @ w.T
    assert ((got - want).norm() / want.norm()) < 0.06
    grad = torch.randn_like(want)
    for a, b in zip(torch.autograd.grad(got, (x, w), grad), torch.autograd.grad(want, (x, w), grad)):
        assert ((a - b).norm() / b.norm()) < 0.1


def test_fp8_loss_is_near_bf16():
    idx, values = torch.randint(80, (2, 24), generator=torch.Generator().manual_seed(0)), []
    for fp8 in (False, True):
        gpt = random_gpt(compute_dtype=torch.bfloat16, vocab_size=80, loss_chunk=16)
        gpt.head.fp8 = fp8
        for block in gpt.blocks:
            block.mlp.fc.fp8 = block.mlp.proj.fp8 = fp8
        try:
            loss = gpt(idx, idx)
        except RuntimeError as error:
            pytest.skip(f"no float8 products on this CPU: {error}")
        loss.backward()
        values.append((loss.item(), [p.grad.flatten() for p in gpt.parameters()]))
    (a, grads), (b, other) = values
    assert a != b == pytest.approx(a, rel=0.02)
    assert min(F.cosine_similarity(x, y, dim=0).item() for x, y in zip(grads, other)) > 0.95


def test_fp16_skips_bad_steps_and_goes_on(data, noisy, tmp_path, monkeypatch):
    from torch.amp import GradScaler

    monkeypatch.setattr(train_gpt.torch.amp, "GradScaler", lambda d, enabled: GradScaler(d, 2.0**40, enabled=enabled))
    flags = TINY | dict(data=str(data), init_from=str(noisy), dtype="fp16", max_steps=30, save_every=15, keep=0)
    flags["max_bad_steps"] = 0
    train(config(**flags | dict(out_dir=str(tmp_path / "run"))))
    saved = final(tmp_path / "run")
    assert saved["scaler"]["scale"] < 2.0**40 and all(w.isfinite().all() for w in saved["model"].values())
    losses = rows(tmp_path / "run", "train_loss")
    assert abs(losses[1] - losses[0]) < 0.3 and losses[-1] < losses[0] - 0.5
    train(
        config(
            **flags | dict(out_dir=str(tmp_path / "again"), resume=str(tmp_path / "run" / "ckpt_15.pt"), init_from="")
        )
    )
    assert all(torch.equal(final(tmp_path / "again")["model"][name], w) for name, w in saved["model"].items())


def test_cuda_asked_for_and_absent(data, tmp_path, capsys):
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    code, err = run_main(["--data", str(data), "--device", "cuda"], capsys)
    assert code == 2 and "PyTorch sees no CUDA device here; use --device cpu" in err


def damage(name, how):
    return pytest.param(how[0], how[1], id=name)


@pytest.mark.parametrize("how, sentence", [
    damage("magic", (lambda raw: b"\0\0\0\0" + raw[4:], "train_0.bin.*magic")),
    damage("version", (lambda raw: raw[:4] + b"\x09" + raw[5:], "train_0.bin.*version")),
    damage("truncated", (lambda raw: raw[:-100], "train_0.bin")),
    damage("vocabulary", (lambda raw: raw[:2000] + b"\xff\xff" + raw[2002:], "train_0.bin holds token 65535")),
])  # fmt: skip
def test_wrong_shards_are_refused_by_name(how, sentence, tmp_path, capsys):
    data = make_data(tmp_path / "data")
    shard = data / "a_train_0.bin"
    shard.write_bytes(how(shard.read_bytes()))
    code, err = run_main(flags_of(TINY | dict(data=data, out_dir=tmp_path / "run")), capsys)
    assert code == 2 and re.search(sentence, err) and err.count("\n") == 1, err


def test_tokens_beyond_the_vocabulary_are_caught_wherever_they_are(data, monkeypatch):
    monkeypatch.setattr(train_gpt.Split, "CHECKED", 0)  # as in a corpus too large to scan on opening
    split = train_gpt.Split(data, "train", 100)
    with pytest.raises(UserError, match="a_train_0.bin holds token .* ends at 99"):
        split.read(np.array([0]), 33)


def test_checkpoint_of_another_shape_data_or_optimizer(data, plain, tmp_path, capsys):
    path = train_gpt.checkpoints(plain)[0]
    common = TINY | dict(data=data, out_dir=tmp_path / "run", resume=path)
    for change, sentence in [
        (dict(n_embd=64), "another shape .n_embd 32 there and 64 here"),
        (dict(n_layer=3), "another shape .n_layer 2 there and 3 here"),
        (dict(optimizer="adamw"), "another --optimizer"),
        (dict(data=make_data(tmp_path / "other")), None),
    ]:
        code, err = run_main(flags_of(common | change), capsys)
        assert (code == 2 and re.search(sentence, err)) if sentence else code == 0, err
    write_shard(tmp_path / "other" / "a_train_2.bin", np.zeros(50, dtype=np.uint16))
    flags = flags_of(common | dict(data=tmp_path / "other", out_dir=tmp_path / "new"))
    code, err = run_main(flags, capsys)
    assert code == 2 and "a_train_2.bin is a shard that" in err and "does not name" in err
    meta = json.loads((tmp_path / "other" / "meta.json").read_text())
    meta["files"]["a_train_2.bin"] = dict(tokens=50, sha256="")
    (tmp_path / "other" / "meta.json").write_text(json.dumps(meta))
    code, err = run_main(flags, capsys)
    assert code == 2 and "was trained on other data" in err


def test_a_folder_with_a_run_is_not_overwritten_or_shared(data, plain, tmp_path, capsys):
    code, err = run_main(flags_of(TINY | dict(data=data, out_dir=plain)), capsys)
    assert code == 2 and "already holds ckpt_20.pt; add --resume" in err
    here = train_gpt.Launch(torch.device("cpu"))
    holder = train_gpt.Log(tmp_path / "run", here)
    holder.claim()
    code, err = run_main(flags_of(TINY | dict(data=data, out_dir=tmp_path / "run")), capsys)
    assert code == 2 and "another run is using" in err
    holder.close()
    assert run_main(flags_of(TINY | dict(data=data, out_dir=tmp_path / "run", max_steps=1)), capsys)[0] == 0


def test_a_mistake_ends_a_process_with_exit_code_2():
    done = run_python("train_gpt.py", "--max_step", "3")
    assert done.returncode == 2 and done.stderr == "error: there is no flag --max_step; did you mean max_steps?\n"


# ---------------------------------------------------------------------------------------------------------------------
# sample.py


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


# ---------------------------------------------------------------------------------------------------------------------
# data/prepare.py


VOCABULARY = Path(os.environ.get("TIKTOKEN_CACHE_DIR") or HERE.parent / "shared" / "tiktoken_cache")
TEXT = "First Citizen: déjà vu, naïve 漢字かな 🙂\n\nno\u00a0break <|endoftext|> don't  stop\t\n end"


@pytest.fixture
def gpt2(monkeypatch):
    if not VOCABULARY.is_dir():
        pytest.skip("needs GPT-2's vocabulary in TIKTOKEN_CACHE_DIR")
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(VOCABULARY))
    return prep.get_tokenizer("gpt2")


def independent_read(path):
    """A shard's tokens by the format's description alone, as a list of ints."""
    content = Path(path).read_bytes()
    magic, version, count = struct.unpack("<3i", content[:12])
    assert content[12:1024] == bytes(1012)
    letter = {(20240520, 1): "H", (20240801, 7): "I"}[magic, version]
    assert len(content) == 1024 + count * struct.calcsize(f"<{letter}")
    return list(struct.unpack(f"<{count}{letter}", content[1024:]))


def independent_split(folder, split):
    return [token for path in sorted(folder.glob(f"{split}_*.bin")) for token in independent_read(path)]


def in_val(name, fraction):
    return int(hashlib.sha256(name.encode()).hexdigest(), 16) < fraction * 2**256


def quiet(line):
    pass


def run_prepare(*arguments, **environment):
    command = [sys.executable, "data/prepare.py", *map(str, arguments)]
    env = {**os.environ, **environment}
    return subprocess.run(command, cwd=HERE, env=env, capture_output=True, text=True, timeout=60)


# ---- Shards and folders


@pytest.mark.parametrize("dtype, top", [(np.uint16, 65535), (np.uint32, 2**32 - 1)])
def test_shard_is_what_the_format_describes(tmp_path, dtype, top):
    tokens = np.array([0, 1, 258, 50256, top], dtype=dtype)
    prep.write_shard(tmp_path / "train.bin", tokens)
    assert independent_read(tmp_path / "train.bin") == tokens.tolist()
    mapped = prep.read_shard(tmp_path / "train.bin")
    assert isinstance(mapped, np.memmap) and mapped.dtype == dtype and mapped.tolist() == tokens.tolist()
    with pytest.raises(ValueError):
        mapped[0] = 1
    assert [path.name for path in tmp_path.iterdir()] == ["train.bin"]


def test_write_shard_refuses_other_arrays(tmp_path):
    for tokens in (np.zeros(3, np.int64), np.zeros((2, 2), np.uint16), np.zeros(0, np.uint16)):
        with pytest.raises(ValueError):
            prep.write_shard(tmp_path / "x.bin", tokens)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "content, says",
    [
        (b"", "0 bytes, too short"),
        (bytes(1023), "1023 bytes, too short"),
        (struct.pack("<256i", 20240519, 1, 2, *[0] * 253) + bytes(4), "magic is 20240519 instead of 20240520"),
        (struct.pack("<256i", 20240520, 7, 2, *[0] * 253) + bytes(4), "version 7 instead of 1"),
        (struct.pack("<256i", 20240801, 1, 2, *[0] * 253) + bytes(8), "version 1 instead of 7"),
        (struct.pack("<256i", 20240520, 1, 0, *[0] * 253), "0 tokens"),
        (struct.pack("<256i", 20240520, 1, -1, *[0] * 253) + bytes(4), "-1 tokens"),
        (struct.pack("<256i", 20240520, 1, 3, *[0] * 253) + bytes(4), "truncated, 1028 bytes instead of 1030"),
        (struct.pack("<256i", 20240520, 1, 1, *[0] * 253) + bytes(4), "too long, 1028 bytes instead of 1026"),
    ],
)
def test_read_shard_refuses_damage(tmp_path, content, says):
    (tmp_path / "bad_train.bin").write_bytes(content)
    with pytest.raises(prep.UserError, match="bad_train.bin.*" + re.escape(says)):
        prep.read_shard(tmp_path / "bad_train.bin")


def test_find_shards(tmp_path):
    for name in ("b_train_1.bin", "a_train_0.bin", "x_val.bin", ".tmp-train_9.bin", "train.txt"):
        (tmp_path / name).touch()
    assert [path.name for path in prep.find_shards(tmp_path, "train")] == ["a_train_0.bin", "b_train_1.bin"]
    assert [path.name for path in prep.find_shards(str(tmp_path), "val")] == ["x_val.bin"]
    with pytest.raises(prep.UserError, match="python data/prepare.py fineweb10B --out"):
        prep.find_shards(tmp_path / "fineweb10B", "train")
    with pytest.raises(prep.UserError, match="make it with `python data/prepare.py shakespeare --tokenizer gpt2`"):
        prep.find_shards(HERE / "data" / "shakespeare_gpt2", "train")
    (tmp_path / "empty").mkdir()
    with pytest.raises(prep.UserError, match=r"no shards \*val\*.bin: make them with `python data/prepare.py python"):
        prep.find_shards(tmp_path / "empty", "val")


def test_load_meta(tmp_path):
    assumed = prep.load_meta(tmp_path)
    assert assumed["assumed"] is True and assumed["tokenizer"] == "gpt2" and assumed["splits"] == {}
    assert (assumed["vocab_size"], assumed["eot"]) == (50257, 50256)
    split = {"tokens": 2, "bytes": None, "documents": None}
    good = {"tokenizer": "bytes", "vocab_size": 257, "eot": 256, "splits": {"train": split, "val": split}}
    good |= {"source": "x", "files": {"train_000000.bin": {"tokens": 2, "sha256": ""}}}

    def load(meta):
        (tmp_path / "meta.json").write_text(meta if isinstance(meta, str) else json.dumps(meta))
        return prep.load_meta(tmp_path)

    assert load(good) == good
    for bad in (
        "{", "[]", good | {"vocab_size": "257"}, good | {"eot": True}, good | {"splits": {"train": split}},
        good | {"splits": {"train": split | {"bytes": 1.5}, "val": split}}, {k: good[k] for k in good if k != "files"},
        good | {"files": {"../../train_0.bin": {"tokens": 2}}}, good | {"files": {"train_0.bin": {}}},
    ):  # fmt: skip
        with pytest.raises(prep.UserError, match="meta.json"):
            load(bad)


# ---- Tokenizers


def check_tokenizer(tokenizer, vocab_size, eot):
    assert (tokenizer.vocab_size, tokenizer.eot) == (vocab_size, eot)
    tokens = tokenizer.encode(TEXT)
    assert isinstance(tokens, np.ndarray) and tokens.dtype == np.uint16 and tokens.ndim == 1
    assert eot not in tokens  # the text contains <|endoftext|>, which is ordinary text here
    assert tokenizer.decode_bytes(tokens) == TEXT.encode() == tokenizer.decode_bytes(tokens.tolist())
    assert tokenizer.decode_bytes([eot, *tokens[:3]]) == b"<|endoftext|>" + tokenizer.decode_bytes(tokens[:3])
    assert tokenizer.decode_bytes(tokenizer.encode("a\ud800b")) == b"a?b"
    assert tokenizer.encode("").size == 0


def test_bytes_tokenizer():
    check_tokenizer(prep.get_tokenizer("bytes"), 257, 256)
    assert prep.get_tokenizer("bytes").encode("é").tolist() == [0xC3, 0xA9]
    with pytest.raises(prep.UserError, match="gpt2 or bytes"):
        prep.get_tokenizer("gpt3")


def test_gpt2_tokenizer(gpt2):
    check_tokenizer(gpt2, 50257, 50256)
    assert gpt2.encode("hello world").tolist() == [31373, 995]


def test_pieces_have_the_tokens_of_the_whole(gpt2, monkeypatch):
    monkeypatch.setattr(prep, "PIECE", 48)
    draw = random.Random(1)
    words = ["word", "é", "漢字", "。", "don't", "'", "12", "...", "🙂", " ", "  ", "\n", "\n\n", "\t", "\r\n"]
    words += ["\u00a0", "\u2003", "\u3000", "\u0085", "\x1c", "\u0300", "\u1680", "ж", "かな", "µ", "²"]
    for raw in [" ".join(draw.choices(words, k=3000)).encode(), "".join(draw.choices(words, k=3000)).encode()] + [
        # not UTF-8: the decoder's replacements must not depend on the cuts either
        b" ".join(draw.choices([b"\xff", b"\xe2\x80", b"\xf0\x9f", b"ok", b"\xc3", b"\x80 ", b"\xa0"], k=2000))
    ]:
        pieces = list(prep.pieces_of(prep.io.BytesIO(raw), len(raw)))
        assert b"".join(pieces) == raw and len(pieces) > 100
        joined = [token for piece in pieces for token in gpt2.encode_raw(piece).tolist()]
        assert joined == gpt2.tiktoken.encode_ordinary(raw.decode("utf-8", errors="replace"))


def test_pieces_without_a_place_to_cut_stay_small(monkeypatch):
    monkeypatch.setattr(prep, "PIECE", 48)
    raw = "漢字🙂".encode() * 500
    pieces = list(prep.pieces_of(prep.io.BytesIO(raw), len(raw)))
    assert b"".join(pieces) == raw and max(map(len, pieces)) <= 4 * 48
    assert "".join(piece.decode() for piece in pieces) == raw.decode()  # no character was cut


# ---- Sources


def test_python_source_is_the_standard_library(tmp_path):
    folder = prep.prepare("python", out=tmp_path / "python", say=quiet)
    root = Path(sysconfig.get_path("stdlib"))
    names = sorted(path.relative_to(root).as_posix() for path in root.glob("*.py"))
    assert {"argparse.py", "this.py"} <= set(names)
    splits = {split: bytes(t % 256 for t in independent_split(folder, split)) for split in ("train", "val")}
    for name in names:  # the top level is enough to check order and split
        content = b"\0" + (root / name).read_bytes() + b"\0"  # end-of-text is 256, so 0 here
        split = "val" if in_val(name, 0.1) else "train"
        if len(content) > 2:
            assert content in splits[split] + b"\0", name
    meta = prep.load_meta(folder)
    assert meta["tokenizer"] == "bytes" and meta["source"].startswith("standard library of Python 3.")
    for split, counts in meta["splits"].items():
        shards = [prep.read_shard(path) for path in prep.find_shards(folder, split)]
        assert counts["tokens"] == sum(map(len, shards)) == counts["bytes"] + counts["documents"]
        assert counts["documents"] == sum(int((shard == 256).sum()) for shard in shards)
    assert 0.02 < meta["splits"]["val"]["documents"] / meta["splits"]["train"]["documents"] < 0.25
    assert sum(counts["documents"] for counts in meta["splits"].values()) > 300


def test_python_files_leave_out_tests_and_installed_packages(tmp_path, monkeypatch):
    kept = ["b.py", "a/c.py", "a/test_it.py", "a-b.py"]
    dropped = ["test/x.py", "a/tests/x.py", "site-packages/p.py", "dist-packages/p.py", "idlelib/idle_test/x.py",
               "__pycache__/x.py", "a/readme.txt"]  # fmt: skip
    for name in kept + dropped:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    monkeypatch.setattr(prep.sysconfig, "get_path", lambda name: str(tmp_path))
    assert [name for name, _ in prep._python_files()] == sorted(kept)


def test_split_is_a_sha256_of_the_name():
    for name, begins, share in (("a.txt", "18b7", 0.0965), ("argparse.py", "c93f", 0.7861)):  # share = 0x18b7 / 65536
        assert hashlib.sha256(name.encode()).hexdigest()[:4] == begins
        assert prep.split_of(name, share + 1e-4) == "val" and prep.split_of(name, share - 1e-4) == "train"


def test_files_of_all_kinds(tmp_path):
    corpus = tmp_path / "corpus"
    (corpus / "deep").mkdir(parents=True)
    documents = {}  # name -> bytes, in the order in which they must appear
    lines = [f"line {i} é" for i in range(20)]
    written = "\n".join([json.dumps({"id": 1, "text": line}, ensure_ascii=i % 2 == 0) for i, line in enumerate(lines)])
    (corpus / "a.jsonl").write_text(written + "\n\n", encoding="utf-8")  # with a blank line at the end
    documents |= {f"corpus/a.jsonl:{i + 1}": line.encode() for i, line in enumerate(lines)}
    with gzip.open(corpus / "b.jsonl.gz", "wt", encoding="utf-8") as file:
        file.write(written)
    documents |= {f"corpus/b.jsonl.gz:{i + 1}": line.encode() for i, line in enumerate(lines)}
    for i in range(8):
        (corpus / "deep" / f"{i}.txt").write_bytes(documents.setdefault(f"corpus/deep/{i}.txt", b"raw \xff%d\r\n" % i))
    for i in range(8):
        path = tmp_path / f"glob{i}.md"
        path.write_bytes(documents.setdefault(path.name, b"glob %d" % i))
    (corpus / ".hidden").write_text("no")
    (corpus / "deep" / "empty.txt").touch()
    expected = {"train": [], "val": []}
    for name, raw in documents.items():
        expected["val" if in_val(name, 0.3) else "train"] += [256, *raw]
    assert all(len(tokens) > 50 for tokens in expected.values())

    arguments = [corpus, str(tmp_path / "glob*.md"), corpus / "a.jsonl"]  # what is named twice is taken once
    folder = prep.prepare("files", arguments, "bytes", corpus / "out", val_fraction=0.3, shard_tokens=100, say=quiet)
    for split in ("train", "val"):
        assert independent_split(folder, split) == expected[split]
        sizes = [len(prep.read_shard(path)) for path in prep.find_shards(folder, split)]
        assert sizes == [100] * (len(expected[split]) // 100) + [len(expected[split]) % 100]
    meta = prep.load_meta(folder)
    assert {name: shard["sha256"] for name, shard in meta["files"].items()} == {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.glob("*.bin")
    }
    said = []
    prep.prepare("files", arguments, "bytes", corpus / "out", val_fraction=0.3, shard_tokens=100, say=said.append)
    assert "already there" in said[0]  # its own output, in the folder that it reads, is no input


@pytest.mark.parametrize("fraction", [0.1, 0.37])
def test_single_text_is_split_by_position(tmp_path, fraction):
    raw = bytes(random.Random(0).choices(range(32, 127), k=9973))
    (tmp_path / "one.txt").write_bytes(raw)
    folder = prep.prepare("files", [tmp_path / "one.txt"], "bytes", tmp_path / "out", fraction, say=quiet)
    cut = int(9973 * (1 - fraction))
    assert independent_split(folder, "train") == [256, *raw[:cut]]
    assert independent_split(folder, "val") == [256, *raw[cut:]]
    counts = prep.load_meta(folder)["splits"]
    assert counts["train"] == {"tokens": cut + 1, "bytes": cut, "documents": 1} and counts["val"]["bytes"] == 9973 - cut


def test_single_text_is_cut_between_characters(tmp_path):
    for size in range(20, 32):
        (tmp_path / "one.txt").write_text("🙂" * size, encoding="utf-8")
        folder = prep.prepare("files", [tmp_path / "one.txt"], "bytes", tmp_path / f"out{size}", 0.4, say=quiet)
        train, val = (bytes(independent_split(folder, split)[1:]).decode() for split in ("train", "val"))
        assert train + val == "🙂" * size and len(train) == -(-int(4 * size * 0.6) // 4)  # rounded up


def test_gpt2_tokens_of_a_prepared_text(tmp_path, gpt2, monkeypatch):
    monkeypatch.setattr(prep, "PIECE", 1000)
    monkeypatch.setattr(prep, "BATCH", 3000)
    text = " ".join(random.Random(2).choices(TEXT.split(" ") + ["\n", "  x"], k=20000))
    (tmp_path / "a.txt").write_text(text, encoding="utf-8", newline="")
    folder = prep.prepare("files", [tmp_path / "a.txt"], None, tmp_path / "out", say=quiet)
    meta = prep.load_meta(folder)
    assert (meta["tokenizer"], meta["vocab_size"], meta["eot"]) == ("gpt2", 50257, 50256)
    size = meta["splits"]["train"]["bytes"]
    train, val = text.encode()[:size].decode(), text.encode()[size:].decode()
    assert independent_split(folder, "train") == [50256, *gpt2.tiktoken.encode_ordinary(train)]
    assert independent_split(folder, "val") == [50256, *gpt2.tiktoken.encode_ordinary(val)]
    assert meta["splits"]["val"] == {"tokens": len(independent_split(folder, "val")), "bytes": len(val.encode()),
                                     "documents": 1}  # fmt: skip


# ---- Running again, stopping, running twice at once


def test_running_again(tmp_path):
    (tmp_path / "a.txt").write_text("some text " * 50)
    arguments = dict(source="files", paths=[tmp_path / "a.txt"], tokenizer="bytes", out=tmp_path / "out")
    said = []
    folder = prep.prepare(**arguments, say=said.append)
    assert not any("already there" in line for line in said) and any("MB/s" in line for line in said)
    before = {path.name: (path.stat().st_mtime_ns, path.read_bytes()) for path in folder.iterdir()}
    said.clear()
    assert prep.prepare(**arguments, say=said.append) == folder and said == [f"already there: {folder}"]
    assert {path.name: (path.stat().st_mtime_ns, path.read_bytes()) for path in folder.iterdir()} == before
    for change in (dict(val_fraction=0.2), dict(shard_tokens=7), dict(source="python", paths=())):
        with pytest.raises(prep.UserError, match="another --out or delete it"):
            prep.prepare(**arguments | change, say=quiet)
    (tmp_path / "a.txt").write_text("other text " * 50)
    with pytest.raises(prep.UserError, match=r"\(inputs differs\)"):
        prep.prepare(**arguments, say=quiet)
    assert {path.name: (path.stat().st_mtime_ns, path.read_bytes()) for path in folder.iterdir()} == before


def test_lost_shard_is_made_again(tmp_path):
    (tmp_path / "a.txt").write_text("some text " * 50)
    folder = prep.prepare("files", [tmp_path / "a.txt"], "bytes", tmp_path / "out", say=quiet)
    content = (folder / "val_000000.bin").read_bytes()
    (folder / "val_000000.bin").write_bytes(content[:-1])
    prep.prepare("files", [tmp_path / "a.txt"], "bytes", tmp_path / "out", say=quiet)
    assert (folder / "val_000000.bin").read_bytes() == content


def test_shards_of_others_are_not_touched(tmp_path):
    prep.write_shard(tmp_path / "train_000000.bin", np.arange(3, dtype=np.uint16))
    with pytest.raises(prep.UserError, match="another origin"):
        prep.prepare("python", out=tmp_path, say=quiet)
    assert [path.name for path in tmp_path.iterdir()] == ["train_000000.bin"]


@pytest.mark.parametrize("moment", [0, 1, 2])  # before the first shard's rename, the second's, and meta.json's
def test_killed_run_leaves_nothing_that_looks_complete(tmp_path, moment):
    (tmp_path / "a.txt").write_text("some text " * 50)
    script = f"""
import os, signal, data.prepare as prep
renames, replace = [], os.replace
def killing(*names):
    if len(renames) == {moment}:
        os.kill(os.getpid(), signal.SIGKILL)
    renames.append(replace(*names))
os.replace = killing
prep.prepare("files", [{str(tmp_path / "a.txt")!r}], "bytes", {str(tmp_path / "out")!r})
"""
    killed = subprocess.run([sys.executable, "-c", script], cwd=HERE, capture_output=True, timeout=60)
    assert killed.returncode == -signal.SIGKILL
    folder = tmp_path / "out"
    assert not (folder / "meta.json").exists() and list(folder.iterdir())
    with pytest.raises(prep.UserError, match=f"not complete.*prepare.py files {tmp_path / 'a.txt'} --tokenizer=bytes"):
        prep.find_shards(folder, "train")
    prep.prepare("files", [tmp_path / "a.txt"], "bytes", folder, say=quiet)
    clean = prep.prepare("files", [tmp_path / "a.txt"], "bytes", tmp_path / "clean", say=quiet)
    for path in [path for path in clean.iterdir() if path.name != ".lock"]:
        assert (folder / path.name).read_bytes() == path.read_bytes()
    assert {path.name for path in folder.iterdir()} == {path.name for path in clean.iterdir()}


def test_two_processes_at_once(tmp_path):
    fcntl = pytest.importorskip("fcntl")
    (tmp_path / "a.txt").write_text("some text " * 200_000)
    (tmp_path / "out").mkdir()
    command = [sys.executable, "-u", "data/prepare.py", "files", tmp_path / "a.txt", "--tokenizer", "bytes"]
    command += ["--out", tmp_path / "out"]
    with open(tmp_path / "out" / ".lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        both = [subprocess.Popen(command, cwd=HERE, stdout=subprocess.PIPE, text=True) for _ in range(2)]
        assert all("waiting for another process" in process.stdout.readline() for process in both)
    said = sorted(process.communicate(timeout=60)[0].count("already there") for process in both)
    assert [process.returncode for process in both] == [0, 0] and said == [0, 1]
    assert len(independent_split(tmp_path / "out", "train")) == 1_800_001


# ---- Downloads


class Server(http.server.BaseHTTPRequestHandler):
    """Serves `files` (path -> bytes); `ranges` False ignores Range, `cut` ends that many next answers half way."""

    files, redirects, ranges, cut, requests = {}, {}, True, 0, []

    def do_GET(self):
        asked = self.headers.get("Range")
        type(self).requests.append((self.path, asked))
        if self.path in self.redirects:
            self.send_response(302)
            self.send_header("Location", self.redirects[self.path])
            self.send_header("X-Linked-ETag", f'"{self.linked_sha256}"')
            self.end_headers()
            return
        if self.path not in self.files:
            self.send_error(404)
            return
        body = self.files[self.path]
        start = int(asked.removeprefix("bytes=").rstrip("-")) if asked and self.ranges else 0
        if start >= len(body) > 0:
            self.send_error(416)
            return
        self.send_response(206 if start else 200)
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(body) - 1}/{len(body)}")
        body = body[start:]
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.cut > 0:
            type(self).cut -= 1
            body = body[: len(body) // 2]
        self.wfile.write(body)

    def log_message(self, *arguments):
        pass


@pytest.fixture
def server(monkeypatch):
    """(handler class, address) of an HTTP server on this machine."""
    handler = type("Handler", (Server,), dict(files={}, redirects={}, requests=[]))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as running:
        thread = threading.Thread(target=running.serve_forever, args=(0.02,))
        thread.start()
        handler.address = f"http://127.0.0.1:{running.server_address[1]}"
        monkeypatch.setenv("no_proxy", "127.0.0.1")
        monkeypatch.setenv("HF_ENDPOINT", handler.address + "/")
        monkeypatch.setattr(prep.time, "sleep", lambda seconds: None)
        yield handler
        running.shutdown()
        thread.join()


BODY = random.Random(3).randbytes(1_000_000)
SHA = hashlib.sha256(BODY).hexdigest()


def test_download_goes_on_after_a_cut(server, tmp_path):
    server.files["/x"] = BODY
    server.cut = 2
    assert prep.download(server.address + "/x", tmp_path / "x", SHA, len(BODY), quiet) == SHA
    assert (tmp_path / "x").read_bytes() == BODY and os.listdir(tmp_path) == ["x"]
    assert [asked for _, asked in server.requests] == [None, "bytes=500000-", "bytes=750000-"]
    assert prep.download(server.address + "/x", tmp_path / "x", SHA, say=quiet) == SHA
    assert len(server.requests) == 3  # it is there: nothing was asked for


def test_download_goes_on_in_the_next_run(server, tmp_path):
    server.files["/x"] = BODY
    server.cut = 4
    with pytest.raises(prep.UserError, match=r"could not be downloaded \(the connection ended after 937500 of 1000000"):
        prep.download(server.address + "/x", tmp_path / "x", SHA, say=quiet)
    assert os.listdir(tmp_path) == [".tmp-x"]
    prep.download(server.address + "/x", tmp_path / "x", SHA, say=quiet)
    assert (tmp_path / "x").read_bytes() == BODY and server.requests[-1] == ("/x", "bytes=937500-")


def test_download_from_a_server_without_range(server, tmp_path):
    server.files["/x"], server.ranges, server.cut = BODY, False, 1
    prep.download(server.address + "/x", tmp_path / "x", SHA, say=quiet)
    assert (tmp_path / "x").read_bytes() == BODY and len(server.requests) == 2


def test_download_replaces_a_partial_file_that_is_too_long(server, tmp_path):
    server.files["/x"] = BODY
    (tmp_path / ".tmp-x").write_bytes(BODY + b"more")
    prep.download(server.address + "/x", tmp_path / "x", SHA, say=quiet)
    assert (tmp_path / "x").read_bytes() == BODY


def test_download_refuses_wrong_hash_and_size(server, tmp_path):
    server.files["/x"] = BODY
    for expected in (dict(sha256="0" * 64), dict(size=len(BODY) + 1)):
        with pytest.raises(prep.UserError, match=f"gave 1000000 bytes with SHA-256 {SHA} instead of"):
            prep.download(server.address + "/x", tmp_path / "x", **expected, say=quiet)
        assert os.listdir(tmp_path) == []


def test_download_checks_the_hash_that_hugging_face_names(server, tmp_path):
    server.files["/store/x"], server.redirects["/x"] = BODY, "/store/x"
    server.linked_sha256 = SHA
    assert prep.download(server.address + "/x", tmp_path / "x", say=quiet) == SHA
    server.linked_sha256 = "0" * 64
    with pytest.raises(prep.UserError, match="with 0000.*deleted"):
        prep.download(server.address + "/x", tmp_path / "y", say=quiet)
    assert os.listdir(tmp_path) == ["x"]


def test_download_says_what_to_do_offline(server, tmp_path):
    with pytest.raises(prep.UserError) as caught:
        prep.download(server.address + "/missing", tmp_path / "x", say=quiet)
    assert len(server.requests) == 1  # a 404 is final
    for words in ("/missing", "404", "HF_ENDPOINT", "TIKTOKEN_CACHE_DIR", "python data/prepare.py python"):
        assert words in str(caught.value)
    said = []
    with pytest.raises(prep.UserError, match="refused"):
        prep.download("http://127.0.0.1:9/x", tmp_path / "x", say=said.append)
    assert len(said) == 3 and os.listdir(tmp_path) == []


def test_fineweb(server, tmp_path):
    base = "/datasets/kjj0/fineweb10B-gpt2/resolve/main/"
    tokens = {}
    for number, name in enumerate(["fineweb_val_000000.bin", "fineweb_train_000001.bin", "fineweb_train_000002.bin"]):
        tokens[name] = np.full(10 + number, number, dtype=np.uint16)
        prep.write_shard(tmp_path / name, tokens[name])
        server.files[base + name] = (tmp_path / name).read_bytes()
    said = []
    folder = prep.prepare("fineweb10B", out=tmp_path / "fw", shards=1, say=said.append)
    assert "1 training shards and one for validation, 0.4 GB" in said[0]
    assert sorted(path.name for path in folder.glob("*.bin")) == ["fineweb_train_000001.bin", "fineweb_val_000000.bin"]
    before = len(server.requests)
    prep.prepare("fineweb10B", out=folder, shards=1, say=said.append)
    assert "already there" in said[-1] and len(server.requests) == before
    prep.prepare("fineweb10B", out=folder, shards=2, say=quiet)  # more of them: only the new one is fetched
    assert [path for path, _ in server.requests[before:]] == [base + "fineweb_train_000002.bin"]
    meta = prep.load_meta(folder)
    assert meta["splits"]["train"] == {"tokens": 23, "bytes": None, "documents": None}
    for name, array in tokens.items():
        content = server.files[base + name]
        assert (folder / name).read_bytes() == content and independent_read(folder / name) == array.tolist()
        assert meta["files"][name] == {"tokens": array.size, "sha256": hashlib.sha256(content).hexdigest()}
    server.files[base + "fineweb_train_000003.bin"] = b"<html>not a shard"
    with pytest.raises(prep.UserError, match="fineweb_train_000003.bin has 17 bytes"):
        prep.prepare("fineweb10B", out=folder, shards=3, say=quiet)
    with pytest.raises(prep.UserError, match="not complete"):
        prep.find_shards(folder, "train")


def serve_zip(server, monkeypatch, path, members):
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    content = Path(path).read_bytes()
    url = prep.DOWNLOADS["wikitext2"][0]
    server.files[url.replace("{hub}", "")] = content
    monkeypatch.setitem(prep.DOWNLOADS, "wikitext2", (url, hashlib.sha256(content).hexdigest(), len(content)))


def test_wikitext_has_a_document_for_each_article(server, tmp_path, monkeypatch):
    articles = [" \n = Títle one = \n \n Text = of = it . \n = not after a blank = \n",
                " \n = = Part = = \n \n more \n \n",
                " = Second = \n \n Text . \n \n = = = Sub = = = \n end \n"]  # fmt: skip
    train = "".join(articles)
    members = {"w/wiki.train.raw": train, "w/wiki.valid.raw": " \n = V = \n x \n", "w/wiki.test.raw": "no"}
    members |= {"../../evil.txt": "no", "/tmp/evil-absolute.txt": "no"}
    (tmp_path / "a" / "b").mkdir(parents=True)
    serve_zip(server, monkeypatch, tmp_path / "a" / "zip", members)
    folder = prep.prepare("wikitext2", tokenizer="bytes", out=tmp_path / "a" / "b" / "out", say=quiet)
    expected = [256, *(articles[0] + articles[1]).encode(), 256, *articles[2].encode()]
    assert independent_split(folder, "train") == expected
    assert independent_split(folder, "val") == [256, *b" \n = V = \n x \n"]
    assert not list(tmp_path.rglob("evil*")) and not os.path.exists("/tmp/evil-absolute.txt")
    source = prep.load_meta(folder)["source"]
    assert source == server.address + "/datasets/ggml-org/ci/resolve/main/wikitext-2-raw-v1.zip"


def test_shakespeare(server, tmp_path, monkeypatch):
    text = b"First Citizen:\n" * 100
    server.files["/main/input.txt"] = text
    entry = (server.address + "/main/input.txt", hashlib.sha256(text).hexdigest(), len(text))
    monkeypatch.setitem(prep.DOWNLOADS, "shakespeare", entry)
    folder = prep.prepare("shakespeare", out=tmp_path, say=quiet)
    assert independent_split(folder, "train") == [256, *text[:1350]]
    assert independent_split(folder, "val") == [256, *text[1350:]]


# ---- Bad input, by the command line


@pytest.mark.parametrize(
    "arguments, says",
    [
        ("pyton", "did you mean python?"),
        ("python --tokeniser bytes", "unknown flag --tokeniser: did you mean --tokenizer?"),
        ("python --tok bytes", "unknown flag --tok: did you mean --tokenizer?"),
        ("python --val_fracton=0.1", "unknown flag --val_fracton=0.1: did you mean --val_fraction?"),
        ("python --tokenizer gpt4", "must be gpt2 or bytes"),
        ("fineweb10B --tokenizer bytes", "leave out --tokenizer"),
        ("fineweb10B --shards 0", "must be 1 to 103"),
        ("python --shards 2", "for fineweb10B"),
        ("python --shards two", "invalid int value: 'two'"),
        ("python --val_fraction 1", "between 0 and 1"),
        ("python --shard_tokens 0", "must be 1 to 2147483647"),
        ("python --out {tmp}/a.txt", "is a file where a folder"),
        ("python {tmp}/a.txt", "takes no PATH"),
        ("files", "at least one PATH"),
        ("files {tmp}/none*.txt", "none*.txt' is no file or folder"),
        ("files {tmp}/empty", "there are no files in"),
        ("files {tmp}/a.txt.gz --tokenizer bytes", "unpack it first"),
        ("files {tmp}/bad.jsonl --tokenizer bytes --out {tmp}/out", "line 2 of {tmp}/bad.jsonl is no JSON object"),
        ("files {tmp}/bad2.jsonl --tokenizer bytes --out {tmp}/out", "line 1 of {tmp}/bad2.jsonl is no JSON object"),
        ("files {tmp}/bad3.jsonl.gz --tokenizer bytes --out {tmp}/out", "bad3.jsonl.gz is a damaged gzip file"),
        ("files {tmp}/one.jsonl --tokenizer bytes --out {tmp}/out", "no text fell into the"),
        ("", "required: source"),
    ],
)
def test_mistakes_get_one_sentence(tmp_path, capsys, arguments, says):
    (tmp_path / "empty").mkdir()
    for name in ("a.txt", "a.txt.gz"):
        (tmp_path / name).write_text("text")
    (tmp_path / "bad.jsonl").write_text('{"text": "good"}\n{"text": \n')
    (tmp_path / "bad2.jsonl").write_text('{"text": 5}\n')
    (tmp_path / "bad3.jsonl.gz").write_bytes(gzip.compress(b'{"text": "good"}\n' * 9)[:-9])
    (tmp_path / "one.jsonl").write_text('{"text": "good"}\n')
    assert prep.main(arguments.format(tmp=tmp_path).split()) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1 and says.format(tmp=tmp_path) in error


def test_command_line(tmp_path):
    (tmp_path / "a.txt").write_text("text " * 100)
    (tmp_path / "b.txt").write_text("more " * 100)
    # flags may stand between the paths
    done = run_prepare("files", tmp_path / "a.txt", "--tokenizer", "bytes", tmp_path / "b.txt", "--val_fraction", "0.5",
                       "--out", tmp_path / "out")  # fmt: skip
    split = ["val" if in_val(name, 0.5) else "train" for name in ("a.txt", "b.txt")]
    assert split == ["val", "train"] and done.returncode == 0, done.stderr
    assert len(independent_split(tmp_path / "out", "val")) == 501
    wrong = run_prepare("pythn")
    assert wrong.returncode == 2 and wrong.stderr.startswith("error: unknown source") and not wrong.stdout


def test_gpt2_without_network(tmp_path):
    (tmp_path / "a.txt").write_text("text " * 100)
    (tmp_path / "cache").mkdir()
    nowhere = dict.fromkeys(("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"), "http://127.0.0.1:9")
    environment = dict(nowhere, TIKTOKEN_CACHE_DIR=str(tmp_path / "cache"), no_proxy="", NO_PROXY="")
    done = run_prepare("files", tmp_path / "a.txt", "--out", tmp_path / "out", **environment)
    assert done.returncode == 2 and done.stderr.startswith("error: the gpt2 vocabulary could not be loaded")
    assert "TIKTOKEN_CACHE_DIR" in done.stderr and "--tokenizer bytes" in done.stderr
    assert done.stderr.count("\n") == 1 and not (tmp_path / "out").exists()


def test_import_is_light(tmp_path):
    script = "import sys, data.prepare; sys.exit(bool({'torch', 'tiktoken', 'requests'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", script], cwd=HERE, timeout=60).returncode == 0


# ---------------------------------------------------------------------------------------------------------------------
# README and --help agree with the code


def test_help_lists_every_flag_with_its_default():
    text = run_python("train_gpt.py", "--help").stdout
    for f in dataclasses.fields(train_gpt.Config):
        assert f"--{f.name} " in text
        value = getattr(config(), f.name)
        assert value == "" or re.search(rf"--{f.name} .*?\[{re.escape(str(value).lower())}\]", text, re.S | re.I), (
            f.name
        )


def test_readme_names_real_commands_and_flags():
    readme = (HERE / "README.md").read_text()
    known = {f.name for f in dataclasses.fields(train_gpt.Config)}
    for script in ("sample.py", "data/prepare.py", "bench.py"):
        known |= set(re.findall(r"--(\w+)", run_python(script, "--help").stdout))
    known |= {"nproc_per_node", "nnodes", "rdzv_backend", "rdzv_endpoint", "max", "standalone"}  # torchrun's and pip's
    assert set(re.findall(r"(?<![\w-])--(\w+)", readme)) - known == set()
    for command in re.findall(r"^(?:torchrun .*?|python )((?:\w+/)*\w+\.py)(.*)$", readme, re.M):
        assert (HERE / command[0]).exists(), command
        if command[0] == "bench.py":
            assert all(f"\n{name} " in bench.__doc__ for name in re.findall(r"^ (\w+)", command[1]))
        if command[0] == "train_gpt.py":
            train_gpt.parse_flags([w for w in command[1].split("#")[0].split()])
    assert "python -m pytest test_train.py" in readme


def test_importing_has_no_side_effects():
    code = (
        "import os, sys, random; before = dict(os.environ); import train_gpt, model, sample, bench, torch; "
        "assert dict(os.environ) == before; assert not torch.distributed.is_initialized(); "
        "assert not torch.cuda.is_initialized(); assert 'wandb' not in sys.modules and 'tiktoken' not in sys.modules"
    )
    env = {name: os.environ[name] for name in ("PATH", "HOME", "SYSTEMROOT") if name in os.environ}  # no import's doing
    done = run_python("-c", code, env=env)
    assert done.returncode == 0, done.stderr


def gpu(function):
    no_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
    return pytest.mark.gpu(no_cuda(function))


GPU_SAME = {
    "eager": dict(),
    "efficient attention": dict(attn="efficient"),
    "flex attention": dict(attn="flex"),
    "flex, compiled": dict(attn="flex", compile="default"),
    "checkpointing full": dict(checkpointing="full", compile="default"),
    "checkpointing selective": dict(checkpointing="selective", compile="default"),
    "CUDA graphs": dict(compile="reduce-overhead", micro_batch=4),
    "offload activations": dict(offload="activations"),
    "offload activations, compiled": dict(offload="activations", compile="default"),
    "offload optimizer": dict(offload="optimizer"),
    "FSDP": dict(parallel="fsdp"),
    "fitted micro-batch": dict(micro_batch=0),
}


@gpu
@pytest.mark.parametrize("case", GPU_SAME)
def test_gpu_run_matches_cpu_run(case, data, noisy, plain, tmp_path):
    flags = TINY | dict(data=str(data), init_from=str(noisy), out_dir=str(tmp_path / "run"), device="cuda")
    train(config(**flags | GPU_SAME[case]))
    assert_same_run(tmp_path / "run", plain, rtol=1e-4)


@gpu
@pytest.mark.parametrize("docs", [False, True])
@pytest.mark.parametrize("window", [0, 100])
@pytest.mark.parametrize("backend", ["flash", "cudnn", "efficient", "flex", "varlen"])
def test_gpu_attention_means_the_same(backend, window, docs):
    if backend == "flash" and (window or docs):
        pytest.skip("flash takes no mask")
    q, k, v = torch.randn(3, 2, 3, 256, 64, device="cuda", dtype=torch.bfloat16).requires_grad_().unbind()
    idx = torch.randint(0, 50, (2, 256), device="cuda")
    eot = 3 if docs else None
    got = attention(q, k, v, attention_mask(backend, idx, 256, window, eot), backend)
    want = attention(q.float(), k.float(), v.float(), attention_mask("sdpa", idx, 256, window, eot), "math")
    assert (got - want).norm() / want.norm() < 0.01
    for a, b in zip(torch.autograd.grad(got.sum(), (q, k, v)), torch.autograd.grad(want.sum(), (q, k, v))):
        assert (a - b).norm() / b.norm().clamp(min=1e-3) < 0.03


@gpu
def test_gpu_trains_in_bf16_fp16_and_fp8(data, tmp_path):
    losses = {}
    for name, more in dict(bf16=dict(dtype="bf16"), fp16=dict(dtype="fp16"), fp8=dict(dtype="bf16", fp8=True)).items():
        flags = TINY | dict(data=str(data), device="cuda", compile="default", max_steps=60, loss_chunk=256) | more
        losses[name] = train(config(**flags, out_dir=str(tmp_path / name)))["val_loss"]
    assert max(losses.values()) - min(losses.values()) < 0.05 and losses["bf16"] < 3.0, losses


@gpu
def test_gpu_allocator_settings_are_in_force(data, tmp_path):
    flags = TINY | dict(data=data, out_dir=tmp_path / "run", device="cuda", max_steps=1)
    done = run_python("train_gpt.py", *flags_of(flags), "--alloc_conf", "max_split_size_mb:77")
    assert done.returncode == 0 and "max_split_size" in done.stdout and str(77 * 2**20) in done.stdout, done.stdout


# ---------------------------------------------------------------------------------------------------------------------
# Nothing is lost: bad numbers, failing disks, signals, damaged data, kills


def poison(monkeypatch, at, value=math.nan, rank=None):
    """In the forward passes `at` (numbers from 1) `value` is added to the summed loss, on one rank or on all.

    The gradients alone would not show it.
    """
    forward, count, here = GPT.forward, [0], os.environ.get("RANK")

    def poisoned(self, idx, targets=None, **rest):
        loss = forward(self, idx, targets, **rest)
        if not torch.is_grad_enabled() or targets is None:
            return loss
        count[0] += 1
        return loss + value if count[0] in at and rank in (here, None) else loss

    monkeypatch.setattr(GPT, "forward", poisoned)


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("kind", ["muon", "adamw"])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_skipped_update_leaves_no_trace(bad, kind, offload):
    def after(*plan):
        """Weights and state after updates from the gradients with these numbers; None is a bad one, to be skipped."""
        gpt = random_gpt()
        optimizer = Optimizer(model_module.optimizer_groups(gpt, kind, 0.02, 0.01, 0.1), offload=offload)
        for number in plan:
            generator = torch.Generator().manual_seed(number or 0)
            for p in gpt.parameters():
                p.grad = torch.randn(p.shape, generator=generator)
                p.grad.flatten()[1:3] *= bad if number is None else 1
            optimizer.step(torch.tensor(number is None))
        return [*gpt.parameters(), *(v for p in gpt.parameters() for v in optimizer.state[p].values())]

    for plan in ((None, 1, 2), (1, None, None, 2), (1, 2, None)):
        assert all(torch.equal(a, b) and a.isfinite().all() for a, b in zip(after(*plan), after(1, 2))), plan


def test_bad_steps_are_skipped_and_told(data, tmp_path, monkeypatch, capsys):
    flags = TINY | dict(data=str(data), micro_batch=16, max_steps=8, optimizer="adamw", cooldown_frac=0.0)
    step = Optimizer.step
    calls = []

    def without(self, skip):
        calls.append(skip)
        return None if len(calls) in (3, 6) else step(self, skip)

    with monkeypatch.context() as patch:
        patch.setattr(Optimizer, "step", without)
        train(config(**flags | dict(out_dir=str(tmp_path / "without"))))
    poison(monkeypatch, {3, 6})
    train(config(**flags | dict(out_dir=str(tmp_path / "run"), log_every=4)))
    assert_weights_equal(tmp_path / "run", tmp_path / "without")
    log = (tmp_path / "run" / "log.txt").read_text()
    assert "step 3 skipped" in log and "(1 in a row)" in log and "16 windows from number 80 of epoch 0" in log
    assert rows(tmp_path / "run", "step") == [1, 4, 8, 8] and len(re.findall(r"step \d skipped", log)) == 2
    poison(monkeypatch, {2}, math.inf)
    train(config(**flags | dict(out_dir=str(tmp_path / "inf"), max_steps=3)))
    assert rows(tmp_path / "inf", "train_loss")[1] is None and rows(tmp_path / "inf", "grad_norm")[1] is None
    assert all(w.isfinite().all() for w in final(tmp_path / "inf")["model"].values())


def assert_weights_equal(a, b) -> None:
    """Weights and optimizer state of the newest checkpoints are the same, to the bit."""
    ours, theirs = final(a), final(b)
    for name, w in ours["model"].items():
        assert torch.equal(w, theirs["model"][name]), name
        assert all(torch.equal(v, theirs["optimizer"][name][slot]) for slot, v in ours["optimizer"][name].items()), name


def test_too_many_bad_steps_end_the_run(data, tmp_path, monkeypatch, capsys):
    flags = TINY | dict(data=data, out_dir=tmp_path / "run", micro_batch=16, save_every=2, max_bad_steps=3)
    poison(monkeypatch, {5, 6, 8, 9, 10, 11, 12})
    code, err = run_main(flags_of(flags), capsys)
    assert code == 1 and err.count("\n") == 1, err
    said = "3 steps in a row, up to step 10, and ckpt_10.pt keeps the weights from before; try lower learning rates"
    assert said in err and said in (tmp_path / "run" / "log.txt").read_text()
    assert all(w.isfinite().all() for w in final(tmp_path / "run")["model"].values())


def test_loss_spikes_are_marked(data, tmp_path, monkeypatch, capsys):
    assert not train_gpt.spikes(9.0, deque([1.0] * 4)) and not train_gpt.spikes(1.09, deque([1.0] * 5))
    assert train_gpt.spikes(1.2, deque([1.0] * 5)) and not train_gpt.spikes(1.9, deque([1.0, 2.0] * 5))
    poison(monkeypatch, {15}, 512 * 8.0)
    train(config(**TINY | dict(data=str(data), out_dir=str(tmp_path / "run"), micro_batch=16)))
    assert re.findall(r"step +(\d+)/20 \| loss \S+ SPIKE", capsys.readouterr().out) == ["15"]


@contextlib.contextmanager
def no_room(size=100_000):
    """The system refuses to write files larger than this, as a full disk would."""
    resource = pytest.importorskip("resource")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_disk_full_while_saving(data, tmp_path, monkeypatch, capsys):
    saving, full = torch.save, {10, 20}

    def save(checkpoint, file):
        with no_room() if checkpoint["step"] in full else contextlib.nullcontext():
            saving(checkpoint, file)

    monkeypatch.setattr(train_gpt.torch, "save", save)
    flags = TINY | dict(data=data, out_dir=tmp_path / "run", save_every=5, keep=1)
    code, err = run_main(flags_of(flags), capsys)
    assert code == 1 and err.count("\n") == 1 and "ckpt_20.pt could not be saved ([Errno 27] File too large)" in err
    assert "newest checkpoint there is ckpt_15.pt; make room and --resume" in err
    log = (tmp_path / "run" / "log.txt").read_text()
    assert "WARNING: " in log and "ckpt_10.pt could not be saved" in log  # and the run went on
    assert [path.name for path in (tmp_path / "run").glob("*ckpt*")] == ["ckpt_15.pt"]
    full.clear()
    assert run_main(flags_of(flags | dict(resume="newest")), capsys)[0] == 0
    train(config(**TINY | dict(data=str(data), out_dir=str(tmp_path / "whole"))))
    assert_same_run(tmp_path / "run", tmp_path / "whole", exact=True)


def test_a_full_disk_does_not_end_the_log(data, tmp_path, capsys):
    if not os.path.exists("/dev/full"):
        pytest.skip("needs /dev/full")
    log = train_gpt.Log(tmp_path, train_gpt.Launch(torch.device("cpu")))
    log.file = open("/dev/full", "w", buffering=1)
    log.line("told")
    log.close()
    assert "told\nWARNING: /dev/full cannot be written (No space left on device)" in capsys.readouterr().out


def test_an_old_checkpoint_goes_only_when_the_new_one_has_been_read_back(data, tmp_path, monkeypatch, capsys):
    saving = torch.save

    def torn(checkpoint, file):
        saving(checkpoint, file)
        if checkpoint["step"] > 5:
            file.seek(file.tell() // 2)
            file.write(b"\xff" * 64)

    monkeypatch.setattr(train_gpt.torch, "save", torn)
    flags = TINY | dict(data=data, out_dir=tmp_path / "run", save_every=5, keep=1, max_steps=10)
    code, err = run_main(flags_of(flags), capsys)
    assert code == 1 and "is damaged" in err and "newest checkpoint there is ckpt_5.pt" in err
    assert final(tmp_path / "run")["step"] == 5 and not list((tmp_path / "run").glob(".tmp*"))


def test_training_goes_on_while_a_checkpoint_is_written(data, tmp_path, monkeypatch):
    hashing, step, stepped, at_once = train_gpt.content_hash, train_gpt.train_step, threading.Event(), []
    done = []

    def held(checkpoint):
        if threading.current_thread() is not threading.main_thread() and checkpoint.get("step") == 4:
            at_once.append(stepped.wait(60))
        return hashing(checkpoint)

    def counted(run, windows, scale):
        done.append(1)
        if len(done) == 7:
            stepped.set()
        return step(run, windows, scale)

    monkeypatch.setattr(train_gpt, "content_hash", held)
    monkeypatch.setattr(train_gpt, "train_step", counted)
    train(config(**TINY | dict(data=str(data), out_dir=str(tmp_path / "run"), save_every=4, max_steps=10, keep=0)))
    assert at_once[0] is True  # step 7 was reached before ckpt_4.pt was written
    monkeypatch.undo()
    train(config(**TINY | dict(data=str(data), out_dir=str(tmp_path / "whole"), save_every=4, max_steps=10, keep=0)))
    for number in (4, 8, 10):  # what was written is the state of its own step
        a, b = (read_checkpoint(tmp_path / name / f"ckpt_{number}.pt") for name in ("run", "whole"))
        assert all(torch.equal(a["model"][name], w) for name, w in b["model"].items()) and a["step"] == number


@pytest.mark.parametrize("moment", ["evaluation", "saving"])
def test_sigterm_during_evaluation_and_saving(moment, data, tmp_path, monkeypatch):
    flags = TINY | dict(data=str(data), eval_every=4, save_every=3, eval_tokens=0)
    train(config(**flags | dict(out_dir=str(tmp_path / "whole"))))
    name = dict(evaluation="largest", saving="content_hash")[moment]
    function, calls = getattr(train_gpt, name), []

    def and_signal(*arguments):
        calls.append(1)
        if len(calls) == (60 if moment == "evaluation" else 3):
            os.kill(os.getpid(), signal.SIGTERM)
        return function(*arguments)

    evaluate, values = train_gpt.evaluate, []
    with monkeypatch.context() as patch:
        patch.setattr(train_gpt, name, and_signal)
        patch.setattr(train_gpt, "evaluate", lambda *a: values.append(evaluate(*a)) or values[-1])
        summary = train(config(**flags | dict(out_dir=str(tmp_path / "run"))))
    assert summary["stopped_by"] == "SIGTERM" and summary["step"] < 20
    assert (None in values) == (moment == "evaluation")  # not finished: little time may be left
    train(config(**flags | dict(out_dir=str(tmp_path / "run"), resume="newest")))
    assert_same_run(tmp_path / "run", tmp_path / "whole", exact=True)
    assert rows(tmp_path / "run", "step") == rows(tmp_path / "whole", "step")


def test_a_second_signal_ends_the_process_at_once():
    code = (
        "import os, signal, time, train_gpt\n"
        "with train_gpt.signals_noted() as caught:\n"
        "    os.kill(os.getpid(), signal.SIGUSR1); os.kill(os.getpid(), signal.SIGTERM); print(caught, flush=True)\n"
        "    time.sleep(0.6); os.kill(os.getpid(), signal.SIGTERM); print('still here')"
    )
    done = run_python("-c", code)
    assert done.returncode == -signal.SIGTERM and done.stdout == "['SIGUSR1', 'SIGTERM']\n"


def test_an_evaluation_that_a_kill_prevented_is_made_up_for(data, tmp_path):
    common = TINY | dict(data=str(data), save_every=5, eval_every=5, keep=0)
    train(config(**common | dict(out_dir=str(tmp_path / "whole"))))
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "ckpt_10.pt").write_bytes((tmp_path / "whole" / "ckpt_10.pt").read_bytes())
    lines = (tmp_path / "whole" / "metrics.jsonl").read_text().splitlines()
    cut = next(i for i, line in enumerate(lines) if '"step": 10, "val' in line)
    junk = '\n[1]\n{"loss": 2}\n\x00\x00\n{"step": "x"}\n'
    (tmp_path / "run" / "metrics.jsonl").write_text("\n".join(lines[:cut]) + junk)
    train(config(**common | dict(out_dir=str(tmp_path / "run"), resume="newest")))
    assert rows(tmp_path / "run", "step") == rows(tmp_path / "whole", "step")
    assert rows(tmp_path / "run", "val_loss") == rows(tmp_path / "whole", "val_loss")


def test_what_an_edit_draws_at_random_resumes_exactly(data, tmp_path, monkeypatch):
    forward = GPT.forward

    def with_noise(self, idx, targets=None, **rest):
        loss = forward(self, idx, targets, **rest)
        return loss * (0.5 + torch.rand(())) if targets is not None else loss

    monkeypatch.setattr(GPT, "forward", with_noise)
    common = TINY | dict(data=str(data), save_every=5, keep=0, max_steps=10, ngram=3, ngram_dropout=0.4)
    train(config(**common | dict(out_dir=str(tmp_path / "whole"), eval_every=3)))
    (tmp_path / "half").mkdir()
    (tmp_path / "half" / "ckpt_5.pt").write_bytes((tmp_path / "whole" / "ckpt_5.pt").read_bytes())
    train(config(**common | dict(out_dir=str(tmp_path / "half"), resume="newest")))
    assert rows(tmp_path / "half", "train_loss") == rows(tmp_path / "whole", "train_loss")[5:]
    assert len(set(rows(tmp_path / "whole", "train_loss"))) == 10
    assert_weights_equal(tmp_path / "half", tmp_path / "whole")
    draws, seeds = set(), []
    for seed, step, rank in ((0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1)):
        run = SimpleNamespace(
            cfg=config(seed=seed), on=train_gpt.Launch(torch.device("cpu"), rank), gpt=SimpleNamespace()
        )
        train_gpt.seed_step(run, step)
        draws.add(torch.rand(()).item())
        seeds.append(run.gpt.step_seed)
    assert len(draws) == 4
    assert len(set(seeds)) == 3 and seeds[0] == seeds[3]  # what the model draws is the same on all ranks


def test_resuming_goes_on_at_the_same_place_of_the_stream(data, plain, noisy, tmp_path, capsys):
    path = train_gpt.checkpoints(plain)[0]
    assert final(plain)["position"] == dict(seed=0, seq_len=32, windows=905, epoch=0, window=320)
    common = TINY | dict(data=data, out_dir=tmp_path / "run", resume=path, max_steps=30)
    for change in (dict(seed=1), dict(batch_tokens=1024), dict(doc_align=True)):
        code, err = run_main(flags_of(common | change), capsys)
        assert code == 2 and "goes on at another place of the stream" in err and err.count("\n") == 1, err


def test_optimizer_state_with_the_prefixes_of_wrappers_loads(data, plain, tmp_path):
    checkpoint = final(plain)
    for part in ("model", "optimizer"):
        checkpoint[part] = {f"_orig_mod.module.{name}": value for name, value in checkpoint[part].items()}
    checkpoint["sha256"] = content_hash(checkpoint)
    torch.save(checkpoint, tmp_path / "ckpt_20.pt")
    flags = TINY | dict(data=str(data), out_dir=str(tmp_path / "run"), resume=str(tmp_path / "ckpt_20.pt"))
    assert train(config(**flags | dict(max_steps=21)))["step"] == 21


# ---- Data that changes


@pytest.mark.parametrize("how", ["truncated", "emptied"])
def test_a_shard_that_shrinks_while_it_is_read(how, tmp_path, monkeypatch, capsys):
    data = make_data(tmp_path / "data")
    step = train_gpt.train_step

    def and_damage(run, windows, scale):
        os.truncate(data / "a_train_1.bin", 20_000 if how == "truncated" else 0)
        return step(run, windows, scale)

    monkeypatch.setattr(train_gpt, "train_step", and_damage)
    code, err = run_main(flags_of(TINY | dict(data=data, out_dir=tmp_path / "run", max_steps=200)), capsys)
    assert code == 2 and re.search(r"a_train_1.bin ended at byte \d+ while it was in use", err), err
    assert err.count("\n") == 1


def test_a_shard_that_is_deleted_while_it_is_read_is_named(tmp_path):
    data = make_data(tmp_path / "data")
    split = train_gpt.Split(data, "train", 257)
    split.read(np.array([0, 12000, 28900]), 33)
    (data / "a_train_1.bin").unlink()
    with pytest.raises(UserError, match="a_train_1.bin ended at byte .* No such file"):
        split.read(np.array([0, 12000, 28900]), 33)


def test_missing_changed_and_shared_shards_are_refused(tmp_path, capsys):
    data = make_data(tmp_path / "data")
    flags = TINY | dict(data=data, out_dir=tmp_path / "run", max_steps=1)
    shard, meta = data / "a_train_1.bin", json.loads((data / "meta.json").read_text())
    content = shard.read_bytes()
    shard.unlink()
    code, err = run_main(flags_of(flags), capsys)
    assert code == 2 and "a_train_1.bin is missing, where meta.json says 17889 tokens" in err
    write_shard(shard, np.zeros(50, np.uint16))
    code, err = run_main(flags_of(flags), capsys)
    assert code == 2 and "a_train_1.bin has 50 tokens, where meta.json says 17889" in err
    shard.write_bytes(content)
    meta["files"]["a_train_1.bin"]["sha256"] = hashlib.sha256(content).hexdigest()
    (data / "meta.json").write_text(json.dumps(meta))
    assert run_main(flags_of(flags), capsys)[0] == 0
    shard.write_bytes(content[:5000] + b"a\0" + content[5002:])
    code, err = run_main(flags_of(flags), capsys)
    assert code == 2 and "a_train_1.bin is not the shard whose hash meta.json holds" in err
    shard.write_bytes(content)
    for link in (os.link, os.symlink, lambda a, b: Path(b).write_bytes(Path(a).read_bytes())):
        link(data / "a_val_0.bin", data / "more_train.bin")
        code, err = run_main(flags_of(flags), capsys)
        assert code == 2 and "the same tokens for training in more_train.bin and for validation in a_val_0.bin" in err
        (data / "more_train.bin").unlink()
    (data / "a_val_0.bin").rename(data / "a_val_of_train.bin")  # both patterns match it
    (data / "meta.json").write_text(json.dumps(meta | dict(files={})))
    code, err = run_main(flags_of(flags), capsys)
    assert code == 2 and "a_val_of_train.bin and for validation in a_val_of_train.bin" in err


def test_other_content_is_other_data_without_meta_json_too(tmp_path):
    def fingerprint():
        here = train_gpt.Launch(torch.device("cpu"))
        return train_gpt.open_data(config(data=str(data), seq_len=32, batch_tokens=64), here).fingerprint()

    data = make_data(tmp_path / "data")
    (data / "meta.json").unlink()
    before = fingerprint()
    assert fingerprint() == before
    content = (data / "a_train_1.bin").read_bytes()
    (data / "a_train_1.bin").write_bytes(content[:5000] + b"a\0" + content[5002:])
    assert fingerprint() != before


# ---- Memory and ranks


def test_out_of_memory_is_one_sentence(data, tmp_path, monkeypatch, capsys):
    flags = TINY | dict(data=data, out_dir=tmp_path / "run")
    code, err = run_main(flags_of(flags | dict(n_embd=200_000_000, n_head=1)), capsys)  # a real failure: terabytes
    assert code == 1 and err.count("\n") == 1
    said = r"memory ran out: [\d,.]+ GiB were asked for, with [\d,.]+ GiB free; try, in this order, a smaller --micro_b"
    assert re.search(said, err), err
    text = "CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has a total capacity of 79.10 GiB"

    def fail(*_):
        raise torch.OutOfMemoryError(text)

    monkeypatch.setattr(train_gpt, "train_step", fail)
    code, err = run_main(flags_of(flags | dict(out_dir=tmp_path / "b")), capsys)
    assert code == 1 and "memory ran out: 20.00 GiB were asked for" in err
    assert train_gpt.out_of_memory(ValueError("other")) == ""


def ranks_script(folder: Path, case: str) -> None:
    """What each of two ranks does under torchrun in the tests below."""
    import torch.distributed as dist

    rank, patch = os.environ["RANK"], pytest.MonkeyPatch()
    flags = TINY | dict(data=str(folder / "data"), micro_batch=8, max_steps=6)
    if case in ("raise", "kill"):
        step, count = train_gpt.train_step, []

        def die(*arguments):
            count.append(1)
            if rank == "1" and len(count) == 4:
                if case == "raise":
                    raise ZeroDivisionError("rank 1's own mistake")
                os.kill(os.getpid(), signal.SIGKILL)
            return step(*arguments)

        patch.setattr(train_gpt, "train_step", die)
        sys.exit(train_gpt.main(flags_of(flags | dict(out_dir=folder / case, save_every=1))))
    if case in ("whole", "restarts"):
        step, life = train_gpt.train_step, int(os.environ["TORCHELASTIC_RESTART_COUNT"])
        count = []

        def die_once_a_life(*arguments):
            count.append(1)
            if case == "restarts" and life < 3 and int(rank) == life % 2 and len(count) == 5 + life:
                os.kill(os.getpid(), signal.SIGKILL)
            return step(*arguments)

        patch.setattr(train_gpt, "train_step", die_once_a_life)
        sys.exit(train_gpt.main(flags_of(flags | dict(out_dir=folder / case, save_every=2, max_steps=20))))
    for name, more in dict(ddp={}, fsdp=dict(parallel="fsdp"), adamw=dict(optimizer="adamw")).items():
        with pytest.MonkeyPatch.context() as patch:
            poison(patch, {4, 6}, math.nan if name == "ddp" else math.inf, rank="1")  # the first is DDP's warm-up
            train(config(**flags | more | dict(out_dir=str(folder / name), save_every=1, keep=0)))
    poison(patch, set(range(5, 99)), rank="1")
    code = train_gpt.main(flags_of(flags | dict(out_dir=folder / "ended", max_bad_steps=2, save_every=1)))
    (folder / f"code{rank}").write_text(str(code))
    dist.destroy_process_group()


def run_ranks(folder, data, case, *options) -> subprocess.CompletedProcess:
    with contextlib.suppress(FileExistsError):
        (folder / "data").symlink_to(data)
    return run_python("-m", "torch.distributed.run", "--nproc_per_node=2", "--standalone", *options, __file__, folder,
                      case)  # fmt: skip


def test_nan_in_one_rank_is_skipped_on_all(data, tmp_path):
    done = run_ranks(tmp_path, data, "nan")
    assert done.returncode == 0, done.stdout + done.stderr
    for name in ("ddp", "fsdp", "adamw"):
        for step in (3, 5):  # nothing moved
            a, b = (read_checkpoint(tmp_path / name / f"ckpt_{s}.pt") for s in (step - 1, step))
            assert all(torch.equal(w, b["model"][n]) for n, w in a["model"].items())
            slots = [(n, slot) for n in a["optimizer"] for slot in a["optimizer"][n]]
            assert all(torch.equal(a["optimizer"][n][slot], b["optimizer"][n][slot]) for n, slot in slots)
        assert all(w.isfinite().all() for w in final(tmp_path / name)["model"].values())
        heads = [read_checkpoint(tmp_path / name / f"ckpt_{step}.pt")["model"]["head.weight"] for step in (3, 4)]
        assert not torch.equal(*heads)
    assert [(tmp_path / f"code{rank}").read_text() for rank in range(2)] == ["1", "1"]
    assert "2 steps in a row, up to step 5" in done.stderr


@pytest.mark.parametrize("case", ["raise", "kill"])
def test_a_rank_that_dies_ends_the_others(case, data, tmp_path):
    done = run_ranks(tmp_path, data, case)
    assert done.returncode == 1
    workers = done.stderr.split("torch/distributed/elastic")[0]
    if case == "raise":
        own, other = workers.find("rank 1's own mistake"), workers.find("[rank 0]: another rank has ended")
        assert -1 < own < other or other == -1, done.stderr  # torchrun may have ended rank 0 before it noticed
    else:
        assert "exitcode  : -9" in done.stderr and "[rank 0]: another rank has ended" in done.stderr, done.stderr
    assert "gloo" not in re.sub("[(]gloo: no connection[)]", "", workers.lower()), workers
    assert final(tmp_path / case)["step"] == 3


# ---- Kills


def forked_ranks(argv: list[str], world: int, log: Path, port: int) -> list[int]:
    """Start train_gpt.py's command line in forks of this process, which has imported everything; returns their ids."""
    pids = []
    for rank in range(world):
        if pid := os.fork():
            pids.append(pid)
            continue
        try:
            output = os.open(log, os.O_CREAT | os.O_APPEND | os.O_WRONLY)
            os.dup2(output, 1), os.dup2(output, 2)
            if world > 1:
                os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), MASTER_PORT=str(port),
                                  LOCAL_WORLD_SIZE=str(world), MASTER_ADDR="127.0.0.1")  # fmt: skip
            os._exit(train_gpt.main(argv))
        except BaseException:
            traceback.print_exc()
        os._exit(1)
    return pids


def killed_runs(folder: Path, kills: int, world: int) -> None:
    """Runs that are killed at random moments and resumed until they end, till `kills` are reached; writes kills.json.

    Half of the kills come after a random time, half when a checkpoint is being written; with two ranks, a third hit
    one rank only, and the other has to end by itself.
    """
    rng, port = random.Random(0), 20000 + os.getpid() % 20000
    flags = TINY | dict(
        n_layer=1, batch_tokens=256, micro_batch=4, max_steps=12, save_every=1, eval_every=5, prefetch=1
    )
    flags |= dict(data=make_data(folder / "data"), eval_tokens=1024, resume="auto")
    report = dict(kills=0, while_saving=0, runs=0, waiting=0, codes=[])

    def start(out):
        nonlocal port
        port += 1
        return forked_ranks(flags_of(flags | dict(out_dir=out)), world, folder / "output.txt", port)

    def ended(pids, patience=60):
        """Exit codes. As torchrun does, ends a rank that waits for one which has gone (while they are connecting)."""
        codes, deadline = {}, time.monotonic() + patience
        while len(codes) < len(pids):
            for pid in set(pids) - set(codes):
                gone, status = os.waitpid(pid, os.WNOHANG)
                if gone:
                    codes[pid] = os.waitstatus_to_exitcode(status)
                elif time.monotonic() > deadline:
                    report["waiting"] += 1
                    os.kill(pid, signal.SIGKILL)
                    codes[pid] = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            time.sleep(0.002)
        return [codes[pid] for pid in pids]

    def saving(out, since):
        with contextlib.suppress(FileNotFoundError):
            return any(path.stat().st_mtime > since for path in out.glob(".tmp-ckpt*"))

    def over(pids):
        return any(os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) for pid in pids)

    assert ended(start(folder / "whole")) == [0] * world, (folder / "output.txt").read_text()
    while report["kills"] < kills:
        out, done = folder / f"run{report['runs']}", False
        report["runs"] += 1
        while not done:
            began, pids = time.time(), start(out)
            if rng.random() < 0.5:
                time.sleep(rng.random() * 1.2 * world)
            else:
                moment, limit = began + rng.random() * world, began + 10
                while time.time() < moment or not (saving(out, began) or over(pids) or time.time() > limit):
                    time.sleep(0.0005)
                time.sleep(rng.random() * 0.003)
            hit = pids if world == 1 or rng.random() < 0.67 else [rng.choice(pids)]
            for pid in hit:
                os.kill(pid, signal.SIGKILL)
            codes = ended(pids, 3)
            done = 0 in codes and set(codes) <= {0, -9} and (out / "summary.json").exists()
            if -signal.SIGKILL in codes:
                report["kills"] += 1
                report["while_saving"] += bool(saving(out, began))
            report["codes"] += [code for code in codes if code not in (0, -9)]
            if not done and report["kills"] >= kills:  # enough: the last run may end
                assert ended(start(out)) == [0] * world, (folder / "output.txt").read_text()
                done = True
    (folder / "kills.json").write_text(json.dumps(report))


def check_killed_runs(folder: Path, kills: int, world: int) -> None:
    done = subprocess.run([sys.executable, __file__, folder, "kills", str(kills), str(world)], capture_output=True,
                          text=True, cwd=HERE, timeout=1500)  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((folder / "kills.json").read_text())
    print(report)
    assert report["kills"] >= kills and set(report["codes"]) <= {1}
    for i in range(report["runs"]):
        for key in ("step", "train_loss", "grad_norm", "lr", "val_loss", "tokens"):
            assert rows(folder / f"run{i}", key) == rows(folder / "whole", key), (i, key)
        assert_weights_equal(folder / f"run{i}", folder / "whole")


forks = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")


@forks
@pytest.mark.parametrize("world", [1, 2])
def test_killed_runs_end_as_if_nothing_had_been(world, tmp_path):
    check_killed_runs(tmp_path, 2 if world == 2 else 3, world)


@pytest.mark.soak
@forks
@pytest.mark.parametrize("world", [1, 2])
def test_a_hundred_kills(world, tmp_path):
    check_killed_runs(tmp_path, 100, world)


@pytest.mark.soak
def test_torchrun_restarts_killed_ranks(data, tmp_path):
    done = run_ranks(tmp_path, data, "whole", "--max-restarts=9")
    assert done.returncode == 0, done.stderr
    done = run_ranks(tmp_path, data, "restarts", "--max-restarts=9")
    assert done.returncode == 0, done.stderr
    assert len(re.findall("^resumed from", (tmp_path / "restarts" / "log.txt").read_text(), re.M)) == 3
    assert_same_run(tmp_path / "restarts", tmp_path / "whole", exact=True)


# ---- Fuzzing, with fixed seeds


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
        out[at : at + 4] = struct.pack(
            "<i", rng.choice([0, 1, -1, 7, 2**31 - 1, -(2**31), 20240520, 20240801, 1 << 20])
        )
    else:
        a, b = sorted(rng.randrange(len(out)) for _ in range(2))
        out[a:b] = out[a:b][::-1]
    return bytes(out)


JUNK = (None, True, -1, 0, 1, 2**40, 10**30, 1.5, math.nan, math.inf, "", "x", "../../etc/passwd", "bytes", [], [1], {},
        {"tokens": 1}, {"x": {"tokens": -5}})  # fmt: skip


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
    """Whether it raises a UserError that is one sentence; any other exception is the test's failure."""
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
    (folder / "text.txt").write_text(" ".join(rng.choice(["one", "two", "three"]) for _ in range(3000)))
    return prep.prepare("files", [folder / "text.txt"], "bytes", folder / "data", shard_tokens=5000, say=quiet)


def open_fuzzed(folder: Path) -> train_gpt.Data:
    flags = dict(data=str(folder), seq_len=32, batch_tokens=64)
    return train_gpt.open_data(config(**flags), train_gpt.Launch(torch.device("cpu")))


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
                tokens = [t for p in sorted(shards) if name in p.name for t in independent_tokens(p)]
                assert split.read(np.array([0]), split.n_tokens)[0].tolist() == tokens
        path.write_bytes(raw)
    print(f"shards: {sum(outcomes)} of {len(outcomes)} refused")
    assert 200 < sum(outcomes) < 500


def independent_tokens(path: Path) -> list[int]:
    magic, _, count = struct.unpack("<3i", path.read_bytes()[:12])
    return np.frombuffer(path.read_bytes(), {20240520: "<u2", 20240801: "<u4"}[magic], count, 1024).tolist()


def test_fuzzed_meta_json(prepared, tmp_path):
    rng, outcomes = random.Random(2), []
    data = tmp_path / "data"
    shutil.copytree(prepared, data)
    raw = (data / "meta.json").read_bytes()
    expected = open_fuzzed(data).train.read(np.array([0]), 1000)
    for i in range(500):
        content = mutated(raw, rng, len(raw)) if i % 2 else json.dumps(replaced(json.loads(raw), rng)).encode()
        if i == 2:
            content = b"[" * 100_000
        (data / "meta.json").write_bytes(content)
        opened = []
        outcomes.append(refused(lambda: opened.append(open_fuzzed(data))))  # noqa: B023
        if opened:
            assert np.array_equal(opened[0].train.read(np.array([0]), 1000), expected)
            assert opened[0].meta["vocab_size"] == 257 or opened[0].meta["tokenizer"] != "bytes"
    print(f"meta.json: {sum(outcomes)} of {len(outcomes)} refused")
    assert 150 < sum(outcomes) < 500


def test_fuzzed_checkpoints(data, plain, tmp_path):
    rng, outcomes, path = random.Random(3), [], tmp_path / "ckpt_20.pt"
    original = train_gpt.checkpoints(plain)[0]
    raw, content = original.read_bytes(), read_checkpoint(original)
    cfg = config(**TINY | dict(data=str(data)))
    run = train_gpt.build(cfg, train_gpt.launch(cfg), 257)
    before = [p.detach().clone() for p in run.gpt.parameters()]
    junk = (*JUNK, torch.zeros(3), torch.zeros(()), torch.tensor([[math.nan]]), torch.zeros(2, dtype=torch.bool))

    def load():
        checkpoint = read_checkpoint(path)
        train_gpt.load_weights(run.gpt, checkpoint, path)
        train_gpt.load_optimizer(run, checkpoint, path)
        loaded.append(checkpoint)

    for i in range(500):
        if i % 2:
            path.write_bytes(mutated(raw, rng, 4096 if rng.random() < 0.5 else len(raw)))
        else:
            changed = replaced({k: v for k, v in content.items() if k != "sha256"}, rng, junk)
            changed["sha256"] = content_hash(changed) if rng.random() < 0.9 else rng.choice(JUNK)
            torch.save(changed, path)
        loaded = []
        outcomes.append(refused(load))
        if loaded:
            for name, w in content["model"].items():
                assert torch.equal(loaded[0]["model"][name], w)
                assert all(
                    torch.equal(v, loaded[0]["optimizer"][name][k]) for k, v in content["optimizer"][name].items()
                )
    assert before and sum(outcomes) > 250
    print(f"checkpoints: {sum(outcomes)} of {len(outcomes)} refused")


FLAG_LINES = (
    "--preset gpt2-small --data data/fineweb10B --compile", "--n_layer 3 --n_head 2 --n_embd 64 --seq_len 128",
    "--window SSSL:256 --softcap 0 --loss_chunk 100", "--optimizer adamw --adam_lr 1e-3 --weight_decay 0.1",
    "--batch_tokens 65536 --seq_len 256 --micro_batch 4", "--dtype bf16 --bf16 --checkpointing full --offload none",
    "--compile reduce-overhead --checkpointing 0.5 --attn sdpa", "--warmup_frac 0.1 --cooldown_frac 0.5 --max_steps 9",
    "--resume auto --out_dir runs/x --save_every 10 --keep 3", "--alloc_conf pinned_num_register_threads:8",
    "--doc_align --doc_mask true --wandb false --profile", "--eval_every 5 --eval_tokens 0 --target_val_loss 3.28",
)  # fmt: skip


def fuzzed_flags(rng: random.Random) -> list[str]:
    words = rng.choice(FLAG_LINES).split()
    for _ in range(rng.choice([1, 1, 2, 3])):
        at = rng.randrange(len(words))
        how = rng.randrange(5)
        if how == 0:
            words[at] = rng.choice(["-1", "0", "nan", "inf", "1e400", "9" * 30, "9" * 400, "", "None", "%s", "--", "=",
                                    "--x", "é", "1_000", "0x10", "true", "../..", "\udc80", "SS", "L:0"])  # fmt: skip
        elif how == 1:
            letter = rng.randrange(len(words[at]) + 1)
            words[at] = words[at][:letter] + rng.choice("-_=x7 .,:\t[") + words[at][letter + rng.randrange(2) :]
        elif how == 2:
            del words[at]
        elif how == 3:
            words.insert(at, rng.choice(rng.choice(FLAG_LINES).split()))
        else:
            words[at] = words[at].replace(" ", "=").upper() if rng.random() < 0.5 else words[at] * 2
        if not words:
            break
    return words


def test_fuzzed_flags(monkeypatch):
    rng, outcomes = random.Random(4), []
    monkeypatch.setattr(train_gpt, "check_compiler", lambda device: None)
    for _ in range(500):
        words, parsed = fuzzed_flags(rng), []

        def parse(words=words, parsed=parsed):
            cfg = train_gpt.parse_flags(words)
            train_gpt.check_device(cfg, torch.device("cpu"))
            train_gpt.rows_per_rank(cfg, 2)
            parsed.append(cfg)

        outcomes.append(refused(parse))
        for value in dataclasses.asdict(parsed[0]).values() if parsed else ():
            assert isinstance(value, str) or 0 <= value < math.inf
    print(f"flags: {sum(outcomes)} of {len(outcomes)} refused")
    assert 150 < sum(outcomes) < 500


def check_fuzzed_processes(count: int, data: Path, checkpoint: Path, folder: Path) -> None:
    """Damaged shards, meta.json, checkpoints and flags, given to train_gpt.py as a user would."""
    rng, codes = random.Random(5), []
    for i in range(count):
        here = folder / str(i)
        shutil.copytree(data, here / "data")
        flags = TINY | dict(data=here / "data", out_dir=here / "run", max_steps=21, eval_tokens=64)
        words = []
        if i % 4 == 0:
            path = rng.choice(sorted((here / "data").glob("*.bin")))
            path.write_bytes(mutated(path.read_bytes(), rng, 1024))
        elif i % 4 == 1:
            path = here / "data" / "meta.json"
            path.write_text(json.dumps(replaced(json.loads(path.read_text()), rng)))
        elif i % 4 == 2:
            (here / "ckpt_20.pt").write_bytes(mutated(checkpoint.read_bytes(), rng, 4096))
            flags["resume"] = here / "ckpt_20.pt"
        else:  # the tiny model's flags come last, and win
            words = [
                word for word in fuzzed_flags(rng) if "compile" not in word and "\udc80" not in word and len(word) < 99
            ]
            flags["max_steps"] = 2
        done = run_python("train_gpt.py", *words, *flags_of(flags))
        codes.append(done.returncode)
        assert done.returncode in (0, 2), (i, words, done.stderr)
        assert "Traceback" not in done.stderr, done.stderr
        if done.returncode == 2:
            assert len(re.findall("^error: ", done.stderr, re.M)) == 1, done.stderr
        elif "-h" not in words and "--help" not in words:
            assert (here / "run" / "summary.json").exists() or "--help" in " ".join(words)
    print(f"processes: {codes.count(2)} of {count} refused, {codes.count(0)} correct runs")


def test_some_fuzzed_processes(prepared, tmp_path):
    train(config(**TINY | dict(data=str(prepared), out_dir=str(tmp_path / "base"), eval_tokens=64)))
    check_fuzzed_processes(3, prepared, tmp_path / "base" / "ckpt_20.pt", tmp_path)


@pytest.mark.soak
def test_fifty_fuzzed_processes(prepared, tmp_path):
    train(config(**TINY | dict(data=str(prepared), out_dir=str(tmp_path / "base"), eval_tokens=64)))
    check_fuzzed_processes(50, prepared, tmp_path / "base" / "ckpt_20.pt", tmp_path)


@gpu
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_gpu_step_skips_without_waiting(dtype, data, monkeypatch):
    cfg = config(**TINY | dict(data=str(data), device="cuda", dtype=dtype))
    here = train_gpt.launch(cfg)
    run = train_gpt.build(cfg, here, 257)
    windows = train_gpt.train_batch(train_gpt.open_data(cfg, here), cfg, here, 0).cuda()
    train_gpt.train_step(run, windows, 1.0)
    before = [p.detach().clone() for p in run.gpt.parameters()]
    poison(monkeypatch, {1, 2})
    try:
        torch.cuda.set_sync_debug_mode("error")
        train_gpt.train_step(run, windows, 1.0)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert run.skipped[-1].item() is True
    assert all(torch.equal(a, p) for a, p in zip(before, run.gpt.parameters()))


# ---- Secrets, and what is outside


def test_no_secret_is_written(data, tmp_path):
    if importlib.util.find_spec("wandb") is None or not shutil.which("git"):
        pytest.skip("needs wandb and git")
    secrets = dict(WANDB_API_KEY="a1b2c3d4" * 5, HF_TOKEN="hf_SECRETtoken", AWS_SECRET_ACCESS_KEY="SECRETaws",
                   MY_PASSWORD="SECRETpw", HF_ENDPOINT="https://user:SECRETmirror@mirror.example")  # fmt: skip
    here = tmp_path / "repo"
    (here / "data").mkdir(parents=True)
    for name in ("train_gpt.py", "model.py", "data/__init__.py", "data/prepare.py"):
        shutil.copy(HERE / name, here / name)
    remote = "https://user:SECRETremote@example.com/x.git"
    for command in ("init -q", f"remote add origin {remote}", "add .",
                    "-c user.name=a -c user.email=a@b commit -qm x"):  # fmt: skip
        subprocess.run(["git", *command.split()], cwd=here, check=True, capture_output=True)
    flags = flags_of(TINY | dict(data=data, out_dir=tmp_path / "run", max_steps=2, wandb="true"))
    env = {**os.environ, **secrets, "WANDB_MODE": "offline", "HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, "train_gpt.py", *flags], cwd=here, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    written = [path for path in (tmp_path / "run").rglob("*") if path.is_file()]
    assert any(path.suffix == ".wandb" for path in written) and (tmp_path / "run" / "log.txt") in written
    texts = {str(path): path.read_bytes() for path in written} | {"output": (done.stdout + done.stderr).encode()}
    for path, text in texts.items():
        for secret in ("SECRET", secrets["WANDB_API_KEY"]):
            assert secret.encode() not in text, (path, secret)


def test_an_endpoint_with_a_password_is_refused(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("HF_ENDPOINT", "https://user:SECRETmirror@mirror.example")
    assert prep.main(["wikitext2", "--out", str(tmp_path / "out")]) == 2
    err = capsys.readouterr().err
    assert "HF_ENDPOINT holds a user name or a password" in err and "SECRET" not in err


def test_a_download_stays_in_its_folder(server, tmp_path, monkeypatch):
    """Neither a redirect's name, a header nor a name inside an archive chooses where something is written."""
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w") as members:
        members.writestr("../../escaped.txt", "x")
        members.writestr("../w/wiki.train.raw", " \n = A = \n text \n" * 50)
        members.writestr("/w/wiki.valid.raw", " \n = B = \n text \n" * 50)
    body = archive.getvalue()
    server.files["/real/..%2F..%2Fescaped.zip"] = body
    server.redirects["/w.zip"] = server.address + "/real/..%2F..%2Fescaped.zip"
    server.linked_sha256 = hashlib.sha256(body).hexdigest()
    monkeypatch.setitem(prep.DOWNLOADS, "wikitext2", ("{hub}/w.zip", server.linked_sha256, len(body)))
    inside = tmp_path / "a" / "b" / "out"
    prep.prepare("wikitext2", tokenizer="bytes", out=inside, say=quiet)
    outside = [path for path in tmp_path.rglob("*") if path.is_file() and inside not in path.parents]
    assert outside == [] and (inside / "meta.json").exists()


# ---------------------------------------------------------------------------------------------------------------------
# bench.py

SIZES = "--device cpu --n_layer 1 --n_embd 32 --n_head 2 --quick --repeats 2"
SMALL = SIZES + " --seq_len 64 --batch_tokens 512"


def measured(folder, name: str, flags: str = SMALL) -> dict:
    """The JSON of a benchmark run in a tiny form."""
    assert bench.main([name, *flags.split(), "--json", str(folder / "out.json")]) == 0
    report = json.loads((folder / "out.json").read_text())
    assert report["machine"]["torch"] == torch.__version__ and report["benchmark"] == name and name in report["command"]
    return report


def numbers_are_finite(rows: list[dict]) -> None:
    for row in rows:
        for key, value in row.items():
            assert not isinstance(value, float) or math.isfinite(value), (key, row)
            if f"{key}_min" in row:
                assert row[f"{key}_min"] <= value <= row[f"{key}_max"], (key, row)


def test_bench_ladder(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(bench, "LADDER", [rung for rung in bench.LADDER if "compile" not in rung[1]])
    report = measured(tmp_path, "train")
    rungs = {row["name"]: row for row in report["ladder"]}
    assert list(rungs) == ["fp32 eager", *(f"+ {name}" for name, _ in bench.LADDER)]
    assert "compute capability" in rungs["+ fp8"]["note"] and "CUDA" in rungs["+ TF32"]["note"]
    done = [row for row in report["ladder"] + report["without"] if "ms" in row]
    numbers_are_finite(done)
    assert {"fp32 eager", "+ fused attention", "+ fused optimizer", "+ chunked loss"} <= {row["name"] for row in done}
    for row in done:
        assert row["tokens_per_s"] * row["ms"] / 1000 == pytest.approx(row["tokens"])
        exact = report["product_dtype"] == "fp32" or row["name"] in ("fp32 eager", "without bf16")
        assert row["loss"] == pytest.approx(done[0]["loss"], rel=1e-4 if exact else 5e-4)  # bf16 rounds
        assert abs(row["loss"] - math.log(320)) > 0.01
        assert row["flops_per_s"] < report["product_flops"] and row["peak_mb"] > 50
    assert [row["name"] for row in report["without"]][:1] in (["without all of them"], [])
    assert {row["micro_batch"] for row in report["without"]} <= {report["stack"]["micro_batch"], 8}
    assert rungs["+ fitted batch"]["micro_batch"] == 8
    text = capsys.readouterr().out
    assert "### The ladder" in text and "| + fused attention |" in text


def test_optimizer_one_by_one_is_the_same():
    runs, cfg = {}, config(**TINY)
    windows = torch.randint(257, (16, 33), generator=torch.manual_seed(0))
    for fused in (True, False):
        runs[fused] = train_gpt.build(cfg, train_gpt.launch(cfg), 257)
        runs[fused].optimizer.fused = fused
        for _ in range(3):
            train_gpt.train_step(runs[fused], windows, 1.0)
    for p, q in zip(runs[True].gpt.parameters(), runs[False].gpt.parameters()):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-5)


@pytest.mark.skipif(sys.platform != "linux", reason="memory is limited on Linux only")
def test_bench_out_of_memory_is_a_row(tmp_path, monkeypatch):
    monkeypatch.setattr(bench, "LADDER", [rung for rung in bench.LADDER if rung[0] == "fused attention"])
    long = "--device cpu --n_layer 1 --n_embd 32 --n_head 4 --seq_len 2048 --batch_tokens 4096 --quick --limit_mb 220"
    scores, fused = measured(tmp_path, "train", long)["ladder"]
    assert scores["note"] == "out of memory" and "ms" not in scores
    assert fused["ms"] > 0 and "vs_above" not in fused


def test_bench_survives_a_case_that_dies(tmp_path):
    setting = bench.Bench({"device": "cpu"})
    for case, reason in (
        (killed_case, "killed by the system"),
        (broken_case, "FAILED: ZeroDivisionError"),
        (missing_file_case, "FAILED: FileNotFoundError"),
        (full_case, "^out of memory"),
    ):
        with bench.Worker(setting, case) as worker:
            assert worker.ask() == "ready"
            with pytest.raises(bench.Failed, match=reason):
                worker.ask()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_bench_workers_end_with_their_parent(tmp_path):
    code = "import bench, test_train, sys; bench.Worker(bench.Bench({'device': 'cpu'}), test_train.endless_case).ask()"
    parent = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True, cwd=HERE)
    worker = int(parent.stderr.readline())
    parent.kill()
    parent.wait()
    deadline = time.monotonic() + 60
    while Path(f"/proc/{worker}").exists() and "zombie" not in Path(f"/proc/{worker}/status").read_text():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def endless_case():
    print(os.getpid(), file=sys.stderr, flush=True)
    while True:
        time.sleep(0.1)
    yield


def killed_case():
    yield "ready"
    os.kill(os.getpid(), signal.SIGKILL)


def broken_case():
    yield "ready"
    yield 1 / 0


def missing_file_case():
    yield "ready"
    yield open("/nonexistent/file")


def full_case():
    yield "ready"
    raise RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate")


def dying_case(flags, unfused):
    """A step of the plain stack takes 20 ms, any other 10; the plain stack's third kills its process."""
    yield dict(loss=1.0, tokens=512, flops=1e6, micro_batch=1, peak_mb=1.0, setup_s=0.1, datasheet_flops=None)
    for _ in range(2):
        yield 0.02 if flags["attn"] == "math" else 0.01
    while flags["attn"] != "math":
        yield 0.01
    os.kill(os.getpid(), signal.SIGKILL)


def test_bench_ladder_goes_on_when_a_peer_dies(tmp_path, monkeypatch):
    monkeypatch.setattr(bench, "step_case", dying_case)
    monkeypatch.setattr(bench, "LADDER", [rung for rung in bench.LADDER if rung[0] in ("fused attention", "fp8")])
    plain, fused, _ = measured(tmp_path, "train")["ladder"]
    assert "note" not in plain and "killed" not in fused.get("note", "") and fused["vs_above"] == pytest.approx(2)


def test_bench_loss(tmp_path, monkeypatch):
    monkeypatch.setattr(bench, "RECIPES", dict(list(bench.RECIPES.items())[:2]))
    report = measured(tmp_path, "loss", SMALL + " --max_steps 20 --eval_tokens 2048")
    adam, muon = report["loss"]
    numbers_are_finite(report["loss"])
    assert adam["seeds"] == muon["seeds"] == 2 and report["target"] == pytest.approx(adam["val_loss"])
    assert muon["val_loss"] < adam["val_loss"] and muon["reached"] == "2 of 2"
    assert 0 < muon["to_target_s"] < muon["train_time_s"] and 0 < muon["steps_to_target"] <= 20


def test_time_to_a_loss():
    rows = [
        dict(step=10 * i, train_time_s=float(i), val_loss=loss) for i, loss in enumerate((4.0, None, 3.0, 2.0, 2.5))
    ]
    assert bench.time_to(rows, 2.25, "train_time_s") == pytest.approx(2.75)
    assert bench.time_to(rows, 2.25, "step") == pytest.approx(27.5)
    assert bench.time_to(rows, 4.5, "step") == 0 and bench.time_to(rows, 1.0, "step") is None


def test_bench_attention(tmp_path):
    report = measured(tmp_path, "attention", SIZES)
    numbers_are_finite([row for row in report["attention"] if "note" not in row])
    done = {row["backend"] for row in report["attention"] if "backward_ms" in row}
    assert done == {"explicit", "blocked, compiled", "math", "sdpa", "flash"}
    flex = [row for row in report["attention"] if row["backend"] == "flex"]
    assert all("forward_ms" in row and "backward_ms" not in row for row in flex)
    more = {row["backend"]: row["more_mb"] for row in report["attention"] if row["seq_len"] == 512}
    assert more["sdpa"] < more["explicit"]  # the scores


def test_explicit_attention_is_attention():
    q, k, v = torch.randn(3, 2, 2, 50, 8, generator=torch.manual_seed(0))
    torch.testing.assert_close(bench.explicit(q, k, v, None), attention(q, k, v, None))
    mask = attention_mask("sdpa", torch.zeros(2, 50, dtype=torch.long), 50, 7, None)
    torch.testing.assert_close(bench.explicit(q, k, v, mask), attention(q, k, v, mask))


@pytest.mark.skipif(sys.platform != "linux", reason="memory is limited on Linux only")
def test_bench_fit(tmp_path):
    wide = "--device cpu --n_layer 2 --n_embd 64 --n_head 1 --seq_len 512 --quick --repeats 1 --limit_mb 150"
    report = measured(tmp_path, "fit", wide)
    rows = report["fit"]
    assert [row["micro_batch"] for row in rows] == sorted(row["micro_batch"] for row in rows)
    fits = [row["micro_batch"] for row in rows if row["fits"]]
    fails = [row["micro_batch"] for row in rows if not row["fits"]]
    assert report["largest"] == max(fits) < min(fails) <= report["largest"] + max(1, report["largest"] // 16)
    assert all(row["note"] == "out of memory" for row in rows if not row["fits"])
    for row in rows:
        if row["fits"]:
            assert row["tokens_per_s"] * row["ms"] / 1000 == pytest.approx(512 * row["micro_batch"])


@pytest.mark.parametrize("flags", ["", " --dtype bf16 --loss_chunk 0"])
def test_bench_memory(tmp_path, flags):
    rows = measured(tmp_path, "memory", "--device cpu --n_layer 3 --n_embd 64 --n_head 2 --seq_len 64 --quick" + flags)[
        "memory"
    ]
    numbers_are_finite(rows)
    for mode in ("none", "selective", "full"):
        parts = {row["part"]: row for row in rows if row["checkpointing"] == mode}
        total = parts.pop("together, at the peak")
        for kind in ("formula_mb", "measured_mb"):
            assert sum(part[kind] for part in parts.values()) == pytest.approx(total["measured_mb"], rel=0.2), (
                mode,
                kind,
            )
        assert parts["activations"]["formula_mb"] == pytest.approx(parts["activations"]["measured_mb"], rel=0.05)
    kept = {row["checkpointing"]: row["measured_mb"] for row in rows if row["part"] == "activations"}
    assert kept["none"] > 1.3 * kept["selective"] and kept["selective"] > 1.5 * kept["full"]


def test_bench_data(data, tmp_path):
    report = measured(tmp_path, "data", SMALL + f" --data {data}")
    numbers_are_finite(report["data"])
    assert [row["prefetch"] for row in report["data"]] == [None, 0, 1, 2, 4]
    assert report["loader_tokens_per_s"] * report["batch_s"] == pytest.approx(512, rel=0.5)
    assert all(0 <= row["waits"] < 1 for row in report["data"])


def test_bench_infer(tmp_path):
    rows = measured(tmp_path, "infer", SIZES)["infer"]
    numbers_are_finite(rows)
    assert {(row["batch"], row["mode"], row["cache"]) for row in rows} == {
        (b, m, c) for b in (1, 8) for m in ("eager", "compiled") for c in ("none", "KV cache")
    }
    for row in rows:
        if row["cache"] == "none" and "tokens_per_s" not in row:  # not done in its time: kernels made for every length
            continue
        assert row["tokens_per_s"] * row["decode_ms"] / 1000 == pytest.approx(row["batch"])
        assert 0 < row["s_50"] < row["s_200"] and row["prefill_ms"] / 1000 < row["s_50"]
        assert all(value > 0 for key, value in row.items() if key.startswith("gain"))


def test_bench_scaling(tmp_path):
    rows = measured(tmp_path, "scaling", SMALL.replace("512", "1024"))["scaling"]
    numbers_are_finite(rows)
    assert rows[0]["ranks"] == 1 and rows[0]["efficiency"] == 1
    assert all(row["tokens_per_s"] * row["ms"] / 1000 == pytest.approx(row["tokens"]) for row in rows)
    assert all(row["communication"] < 1 and row["efficiency"] > 0 for row in rows[1:])
    assert [row["tokens"] for row in rows[1:3]] in ([1024, 2048], [])


def test_bench_profile(tmp_path):
    report = measured(tmp_path, "profile")
    spent = {row["kind"]: row["ms"] for row in report["profile"]}
    assert list(sorted(spent)) == [
        "attention",
        "communication",
        "elementwise",
        "matrix products",
        "optimizer",
        "waiting",
    ]
    assert sum(spent.values()) == pytest.approx(report["step_ms"])
    assert all(spent[kind] > 0 for kind in ("attention", "elementwise", "matrix products", "optimizer"))
    assert json.loads(Path(report["trace"]).read_text())["traceEvents"]
    Path(report["trace"]).unlink()


@pytest.mark.parametrize(
    "argv", ["frain", "--n_layers 2", "train --compile", "train --repeats -1", "loss --json no/x.json"]
)
def test_bench_refuses(argv, capsys):
    assert bench.main(argv.split()) == 2
    assert capsys.readouterr().err.startswith("error: ")


@pytest.mark.gpu
def test_bench_on_cuda(tmp_path):
    small = "--preset laptop --n_layer 2 --quick --repeats 2"
    for name in ("train", "attention", "memory", "profile", "fit"):
        report = measured(tmp_path, name, small + (" --limit_mb 4000" if name == "fit" else ""))
        assert report["machine"]["device"].startswith("cuda")
    peak = [row for row in report["fit"] if row["fits"]]
    assert peak


# ---------------------------------------------------------------------------------------------------------------------
# Trials and records


@pytest.fixture(scope="session")
def shakespeare_like(tmp_path_factory) -> Path:
    """A data folder, and three short runs on it in the form of a record."""
    folder = tmp_path_factory.mktemp("record")
    (folder / "text.txt").write_text("To be, or not to be, that is the question. " * 400)
    assert prep.main(["files", str(folder / "text.txt"), "--tokenizer", "bytes", "--out", str(folder / "data")]) == 0
    record = folder / "records" / "laptop" / "2026-01-01_shakespeare-1.8857"
    flags = flags_of(TINY | dict(data=str(folder / "data"), out_dir=str(record), trials=3, eval_tokens=0, log_every=5))
    assert train_gpt.main(flags) == 0
    command = "OMP_NUM_THREADS=1 python ./train_gpt.py " + " \\\n    ".join(flags) + ' 2>&1 | tee "log"  # as it was\n'
    (record / "command.sh").write_text("# how to \\\n" + command)
    (record / "README.md").write_text("A test.")
    return folder


def test_trials_are_runs_with_seeds(shakespeare_like, tmp_path):
    record = shakespeare_like / "records" / "laptop" / "2026-01-01_shakespeare-1.8857"
    assert sorted(path.name for path in record.iterdir() if path.is_dir()) == ["seed_0", "seed_1", "seed_2"]
    train(
        config(
            **TINY
            | dict(
                data=str(shakespeare_like / "data"), out_dir=str(tmp_path / "run"), eval_tokens=0, seed=1, log_every=5
            )
        )
    )
    assert_same_run(record / "seed_1", tmp_path / "run", exact=True)
    assert rows(record / "seed_0", "train_loss") != rows(record / "seed_1", "train_loss")


def test_trials_go_on_with_the_same_flags_only(shakespeare_like, tmp_path, capsys):
    done = tmp_path / "done"
    shutil.copytree(shakespeare_like / "records" / "laptop" / "2026-01-01_shakespeare-1.8857", done)
    shutil.rmtree(done / "seed_2")
    flags = TINY | dict(data=str(shakespeare_like / "data"), out_dir=str(done), eval_tokens=0, log_every=5,
                        trials=3, resume="auto")  # fmt: skip
    code, err = run_main(flags_of(flags | dict(muon_lr=0.01, n_embd=64)), capsys)
    assert code == 2 and "other values of muon_lr, n_embd" in err
    code, err = run_main(flags_of(flags | dict(data=make_data(tmp_path / "other"))), capsys)
    assert code == 2 and "trained on other data" in err
    for path in (done / "seed_1").glob("*.pt"):
        path.unlink()  # as in a folder of records/
    before = (done / "seed_1" / "log.txt").read_bytes()
    assert run_main(flags_of(flags | dict(log_every=2)), capsys)[0] == 0
    assert (done / "seed_1" / "log.txt").read_bytes() == before and (done / "seed_2" / "summary.json").exists()


@pytest.mark.parametrize("flags", [dict(target_val_loss=2.0), dict(resume="newest")])
def test_trials_refuse_what_compares_nothing(flags):
    with pytest.raises(UserError, match="--trials"):
        config(trials=2, **flags)


def edit_json(path: Path, **values) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def edit_log(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def edit_rows(folder: Path, change) -> None:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    change(lines)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def resumed(record: Path) -> None:
    path = record / "seed_1" / "log.txt"
    text = path.read_text()
    path.write_text(text + "=" * 40 + " run\n{}\n")


CHEATS = {  # what was done -> what is said of it
    "early stop": (lambda r: edit_json(r / "seed_1" / "summary.json", stopped_by="target_val_loss"), "stopped by"),
    "fewer steps": (lambda r: edit_json(r / "seed_1" / "summary.json", step=10), "stopped by"),
    "seed hunting": (lambda r: edit_log(r / "seed_2" / "log.txt", '"seed": 2', '"seed": 7'), "not 0, 1, 2"),
    "one seed twice": (lambda r: edit_log(r / "seed_2" / "log.txt", '"seed": 2', '"seed": 1'), "not 0, 1, 2"),
    "two runs": (lambda r: (r / "seed_2").rename(r.parent.parent / "hidden"), "at least 3"),
    "other data": (lambda r: edit_json(r / "seed_0" / "summary.json", files={"val_000000.bin": "0"}), "other data"),
    "fewer tokens": (lambda r: edit_json(r / "seed_0" / "summary.json", val_tokens=64), "validated on 64"),
    "other flags": (lambda r: edit_log(r / "seed_1" / "log.txt", '"n_layer": 2', '"n_layer": 3'), "other flags"),
    "other source": (
        lambda r: edit_log(r / "seed_1" / "log.txt", "def train_step", "def train_stop"),
        "another source",
    ),
    "resumed": (resumed, "resumed"),
    "other machine": (lambda r: edit_json(r / "seed_1" / "summary.json", machine="1 x cpu (fast)"), "another machine"),
    "no command": (lambda r: (r / "command.sh").unlink(), "command.sh"),
    "other command": (lambda r: edit_log(r / "command.sh", "--n_layer", "--seed"), "other flags than seed_0"),
    "other console": (lambda r: edit_log(r / "seed_1" / "log.txt", " | train_time", " | no time"), "log.txt disagree"),
    "rows removed": (lambda r: edit_rows(r / "seed_2", lambda rows: rows.pop(0)), "missing"),
    "better loss": (lambda r: edit_json(r / "seed_1" / "summary.json", val_loss=0.1), "disagree"),
    "slow clock": (lambda r: edit_rows(r / "seed_0", lambda rows: rows[0].update(train_time_s=1e6)), "clock"),
    "quick clock": (lambda r: edit_rows(r / "seed_0", lambda rows: rows[1].update(tokens_per_s=1e9)), "fit together"),
}


@pytest.mark.parametrize("cheat", ["none", *CHEATS])
def test_records_that_cheat_are_rejected(cheat, shakespeare_like, tmp_path, monkeypatch, capsys):
    source = shakespeare_like / "records" / "laptop" / "2026-01-01_shakespeare-1.8857"
    record = tmp_path / "records" / "laptop" / source.name
    shutil.copytree(source, record)
    meta = json.loads((shakespeare_like / "data" / "meta.json").read_text())
    files = {name: shard["sha256"] for name, shard in meta["files"].items()}
    tokens = json.loads((source / "seed_0" / "summary.json").read_text())["val_tokens"]
    track = bench.TRACKS["laptop"] | dict(files=files, val_tokens=tokens, targets={"shakespeare-1.8857": 5.0})
    monkeypatch.setitem(bench.TRACKS, "laptop", track)
    if cheat != "none":
        CHEATS[cheat][0](record)
    code = bench.main(["record", str(record), "--json", str(tmp_path / "out.json")])
    report = json.loads((tmp_path / "out.json").read_text())
    assert report["record"][0]["verdict"] == ("PASS" if cheat == "none" else "FAIL") and code == (cheat != "none")
    assert cheat == "none" or any(CHEATS[cheat][1] in reason for reason in report["record"][0]["broken"])
    assert report["record"][0]["verdict"] in capsys.readouterr().out


def test_records_need_significance_and_source(shakespeare_like, tmp_path, monkeypatch, capsys):
    record = tmp_path / "records" / "laptop" / "2026-01-01_shakespeare-1.8857"
    shutil.copytree(shakespeare_like / "records" / "laptop" / record.name, record)
    assert bench.main(["record", str(record)]) == 1
    said = capsys.readouterr().out
    assert "not below 1.8857 with p < 0.01" in said and "other data" in said
    edit_json(record / "seed_1" / "summary.json", val_loss=None)
    assert bench.main(["record", str(record)]) == 2
    edit_log(record / "seed_1" / "log.txt", "=" * 40 + " model.py", "model.py")
    assert bench.main(["record", str(record)]) == 2 and bench.main(["record", str(tmp_path)]) == 2
    assert "no finished run with its source" in capsys.readouterr().err


@pytest.mark.parametrize(
    "df, t, p", [(2, 6.965, 0.01), (4, 3.747, 0.01), (9, 2.821, 0.01), (1, 1.0, 0.25), (30, 1.697, 0.05)]
)
def test_p_values_against_tables(df, t, p):
    values = torch.linspace(-1, 1, df + 1, dtype=torch.float64)
    values = values - t * values.std() / math.sqrt(df + 1)  # so that this is their t for a mean below 0
    assert bench.t_test(values.tolist(), 0.0) == pytest.approx(p, rel=2e-3)
    assert bench.t_test((-values).tolist(), 0.0) == pytest.approx(1 - p, rel=2e-3)


if __name__ == "__main__":
    folder, *case = sys.argv[1:]
    if not case:
        worker(Path(folder))
    elif case[0] == "kills":
        killed_runs(Path(folder), *map(int, case[1:]))
    else:
        ranks_script(Path(folder), *case)
