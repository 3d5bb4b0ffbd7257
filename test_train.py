"""All tests: `python -m pytest test_train.py`. Cases for two ranks run in one launch of this file under torchrun."""

import dataclasses
import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # tiny matrices: threads only cost, here and in the processes started

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import model as model_module
import sample
import train_gpt
from data.prepare import UserError, get_tokenizer, write_shard
from model import GPT, GPTConfig, Optimizer, attention, attention_mask, generate, initial_weight, newton_schulz
from train_gpt import config, content_hash, permuted, read_checkpoint, train, window_starts

HERE = Path(__file__).resolve().parent

# ---------------------------------------------------------------------------------------------------------------------
# Helpers

TINY = dict(n_layer=2, n_head=2, n_embd=32, seq_len=32, batch_tokens=512, micro_batch=8, max_steps=20, device="cpu",
            dtype="fp32", loss_chunk=100, eval_every=0, eval_tokens=2048, log_every=1,
            muon_lr=0.02, adam_lr=0.004)  # fmt: skip


def make_data(folder: Path) -> Path:
    """Two training shards and a validation shard of learnable bytes, with windows that cross from shard to shard."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(0)
    words = [bytes(rng.integers(97, 123, n, dtype=np.uint8)) + b" " for n in rng.integers(2, 7, 50)]
    text = b"".join(words[i] for i in rng.integers(0, 50, 9000))
    tokens = np.concatenate(([256], np.frombuffer(text, dtype=np.uint8))).astype(np.uint16)
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
}


def worker(folder: Path) -> None:
    """What each rank does under torchrun: all RANK_CASES, then the checks that need every rank."""
    import torch.distributed as dist

    common = TINY | dict(data=str(folder / "data"), init_from=str(folder / "noisy.pt"))
    report = {}
    for name, case in RANK_CASES.items():
        grads = {}
        step, built = Optimizer.step, []

        def step_and_note(self, built=built, grads=grads, step=step):
            built[:] = [self]
            if not grads:
                grads.update({n: p.grad.clone() for g in self.param_groups for n, p in zip(g["names"], g["params"])})
            step(self)

        Optimizer.step = step_and_note
        train(config(**common | case | dict(out_dir=str(folder / name))))
        Optimizer.step = step
        torch.save(grads, folder / f"{name}.grads{dist.get_rank()}.pt")
        weights = torch.cat([p.detach().flatten() for g in built[0].param_groups for p in g["params"]])
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


@pytest.mark.parametrize("case", ["ddp", "ddp_accum"])
def test_two_ranks_train_as_one(case, two_ranks, plain):
    assert_same_run(two_ranks / case, plain)


def test_ranks_agree_to_the_bit(two_ranks):
    assert json.loads((two_ranks / "report.json").read_text()) == dict.fromkeys(RANK_CASES, True)


@pytest.mark.parametrize("case", ["ddp", "ddp_accum"])
def test_first_gradients_of_two_ranks(case, two_ranks, data, noisy):
    expected = plain_loop(data, noisy, steps=1)[1]
    for rank in range(2):
        grads = torch.load(two_ranks / f"{case}.grads{rank}.pt")
        assert grads.keys() == expected.keys()
        for name, grad in grads.items():
            assert grad.abs().max() > 0
            torch.testing.assert_close(grad, expected[name], rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("case", ["ddp_adamw", "ddp_uneven"])
def test_two_ranks_other_optimizers_and_uneven_shares(case, two_ranks, data, noisy, tmp_path):
    train(
        config(
            **TINY | dict(data=str(data), init_from=str(noisy)) | RANK_CASES[case] | dict(out_dir=str(tmp_path / "one"))
        )
    )
    assert_same_run(two_ranks / case, tmp_path / "one")


def test_resume_at_another_world_size(two_ranks, data, noisy, tmp_path, plain):
    train(
        config(
            **TINY
            | dict(data=str(data), out_dir=str(tmp_path / "run"), resume=str(two_ranks / "ddp_half" / "ckpt_10.pt"))
        )
    )
    for key in ("train_loss", "grad_norm"):
        np.testing.assert_allclose(rows(tmp_path / "run", key), rows(plain, key)[10:], rtol=1e-5)


def test_threads_are_shared_out_under_torchrun(two_ranks):
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    assert f"({max(1, cores // 2)} threads)" in (two_ranks / "ddp" / "log.txt").read_text()


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
    split = train_gpt.Split(data, "train", 257)
    cpu = torch.device("cpu")
    whole = train_gpt.train_batch(split, cfg, train_gpt.Launch(cpu), 77)
    parts = [train_gpt.train_batch(split, cfg, train_gpt.Launch(cpu, rank, 4), 77) for rank in range(4)]
    for i in (0, 1):
        assert torch.equal(whole[i], torch.cat([part[i] for part in parts]))
    everything = np.concatenate([np.fromfile(p, dtype="<u2", offset=1024) for p in sorted(data.glob("*train*"))])
    starts = window_starts(77 * 16 + np.arange(16), len(everything), 32, cfg.seed)
    assert torch.equal(whole[0], torch.from_numpy(np.stack([everything[s : s + 32] for s in starts]).astype(np.int64)))
    assert torch.equal(whole[0][:, 1:], whole[1][:, :-1])


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
    out = attention(q, k, v, attention_mask(24, 24, window, q.device))
    torch.testing.assert_close(out.double(), reference_attention(q, k, v, window), rtol=1e-5, atol=1e-5)


def reference_gpt(weights: dict, cfg: GPTConfig, idx) -> torch.Tensor:
    """Logits of the whole model, written from its description, in float64."""
    w = {name: value.double() for name, value in weights.items()}

    def norm(x):
        return x / (x.square().mean(-1, keepdim=True) + torch.finfo(torch.float32).eps).sqrt()

    d, half = cfg.n_embd // cfg.n_head, cfg.n_embd // cfg.n_head // 2
    angle = torch.arange(idx.size(1))[:, None] * cfg.rope_theta ** (-torch.arange(half).double() / half)
    turn = torch.polar(torch.ones_like(angle), -angle)  # a rotation is a complex product
    x = norm(w["wte.weight"][idx])
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


@pytest.mark.parametrize("shape", [dict(), dict(window="SSL:4"), dict(window="S", softcap=0.0, n_head=1)])
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
def test_chunked_loss_is_the_loss(chunk, softcap):
    torch.manual_seed(0)
    x, w = torch.randn(48, 16, requires_grad=True), torch.randn(30, 16, requires_grad=True)
    targets = torch.randint(-1, 30, (48,))
    logits = x @ w.T
    capped = softcap * torch.tanh(logits / softcap) if softcap else logits
    expected = F.cross_entropy(capped, targets, ignore_index=-1, reduction="sum")
    expected_grads = torch.autograd.grad(expected / 3, (x, w))
    for loss_grad in (model_module.cross_entropy_grad,):
        loss = model_module.ChunkedLoss.apply(x, w, targets, softcap, chunk, loss_grad)
        torch.testing.assert_close(loss, expected)
        for got, want in zip(torch.autograd.grad(loss / 3, (x, w)), expected_grads):
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    with torch.no_grad():
        torch.testing.assert_close(model_module.ChunkedLoss.apply(x, w, targets, softcap, chunk, loss_grad), expected)


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


@pytest.mark.parametrize("window", ["L", "SL:5"])
def test_generation_with_cache_is_generation_without(window):
    gpt = random_gpt(window=window, std=0.3)
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
    gpt = random_gpt(window="SL:5")
    idx = torch.randint(70, (2, 24), generator=torch.Generator().manual_seed(0))
    cache, whole = model_module.KVCache(gpt, 2), gpt(idx)
    for start, end in ((0, 7), (7, 8), (8, 15), (15, 24)):  # pieces of several lengths
        got = gpt(idx[:, start:end], cache=cache)
        torch.testing.assert_close(got[:, 0], whole[:, end - 1], rtol=1e-4, atol=1e-5)


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
    assert (
        values.min() > (0.2 if shape[0] == shape[1] else 0.65) and values.max() < 1.25
    )  # a square one has tiny values
    assert newton_schulz(torch.zeros(2, 3, 4)).abs().max() == 0


def quadratic_steps(optimizer, params, targets, steps=6):
    for _ in range(steps):
        for p, t in zip(params, targets):
            p.grad = (p - t).detach() * torch.linspace(0.1, 2, p.size(1))
        optimizer.step()


def test_muon_against_torch():
    generator = torch.Generator().manual_seed(0)
    shapes = [(32, 16), (32, 16), (16, 32), (24, 24)]
    start = [torch.randn(s, generator=generator) for s in shapes]
    targets = [torch.randn(s, generator=generator) for s in shapes]
    ours, theirs = ([torch.nn.Parameter(p.clone()) for p in start] for _ in range(2))
    group = dict(params=ours, names=list("abcd"), kind="muon", lr=0.05, betas=(0.9, 0.0), weight_decay=0.3, split=1)
    optimizer = Optimizer([group], ns_dtype=torch.bfloat16)
    quadratic_steps(optimizer, ours, targets)
    quadratic_steps(torch.optim.Muon(theirs, lr=0.05, momentum=0.9, weight_decay=0.3), theirs, targets)
    for a, b, p in zip(ours, theirs, start):
        assert ((a - b).norm() / (b - p).norm()) < 0.03
    for a, b in zip(ours, theirs):
        assert torch.allclose(optimizer.state[a]["momentum"], optimizer.state[a]["momentum"]) and a.shape == b.shape


def test_muon_orthogonalises_stacked_matrices_one_by_one():
    p = torch.nn.Parameter(torch.zeros(12, 4))
    p.grad = torch.randn(12, 4, generator=torch.Generator().manual_seed(0))
    expected = -torch.cat([newton_schulz(part[None])[0] for part in p.grad.chunk(3)])
    Optimizer([dict(params=[p], names=["p"], kind="muon", lr=1.0, betas=(0.95, 0.0), weight_decay=0.0, split=3)]).step()
    torch.testing.assert_close(p.detach(), expected, rtol=1e-4, atol=1e-5)


def test_adam_against_torch():
    start, target = torch.randn(20, 10), torch.randn(20, 10)
    ours, theirs = torch.nn.Parameter(start.clone()), torch.nn.Parameter(start.clone())
    group = dict(params=[ours], names=["a"], kind="adam", lr=0.02, betas=(0.8, 0.95), weight_decay=0.3, split=1)
    quadratic_steps(Optimizer([group]), [ours], [target])
    quadratic_steps(
        torch.optim.AdamW([theirs], lr=0.02, betas=(0.8, 0.95), weight_decay=0.3, eps=1e-10), [theirs], [target]
    )
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
    split, losses, norms, first = train_gpt.Split(data, "train", 257), [], [], None
    for step in range(steps):
        x, y = train_gpt.train_batch(split, cfg, train_gpt.Launch(torch.device("cpu")), step)
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
    "micro_batch 1": dict(micro_batch=1),
    "micro_batch 4, chunked": dict(micro_batch=4, loss_chunk=50),
    "chunk of everything": dict(micro_batch=16, loss_chunk=10**6),
}


@pytest.mark.parametrize("case", SAME)
def test_launch_shape_does_not_change_the_run(case, data, noisy, plain, tmp_path):
    train(config(**TINY | dict(data=str(data), init_from=str(noisy), out_dir=str(tmp_path / "run")) | SAME[case]))
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
    write_shard(folder / "val.bin", tokens)
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


def test_compiled_run_is_the_same(data, noisy, plain, tmp_path):
    if not compiler_works():
        pytest.skip("torch.compile finds no working compiler here")
    flags = TINY | dict(data=str(data), init_from=str(noisy), micro_batch=8, loss_chunk=256, compile="default")
    train(config(**flags | dict(out_dir=str(tmp_path / "run"), sample_every=10)))
    assert_same_run(tmp_path / "run", plain)
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
    (["--resume", "--init_from", "x.pt"], "contradict each other"),
    (["--resume"], "holds no valid checkpoint; leave it out"),
    (["--resume", "gone.pt"], "no checkpoint gone.pt"),
    (["--vocab_size", "200"], "less than the 257 tokens"),
    (["--seq_len", "8192", "--batch_tokens", "8192"], "has 4333 tokens, too few .* --seq_len below 4333"),
    (["--data", "/nowhere"], "/nowhere.*python data/prepare.py"),
])  # fmt: skip
def test_mistakes_end_with_a_sentence(flags, sentence, data, tmp_path, capsys):
    code, err = run_main(flags_of(TINY | dict(data=data, out_dir=tmp_path / "run")) + flags, capsys)
    assert code == 2 and re.search(sentence, err) and err.startswith("error: ") and err.count("\n") == 1, err
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


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
    code, err = run_main(flags_of(common | dict(data=tmp_path / "other", out_dir=tmp_path / "new")), capsys)
    assert code == 2 and "was trained on other data" in err


def test_a_folder_with_a_run_is_not_overwritten_or_shared(data, plain, tmp_path, capsys):
    code, err = run_main(flags_of(TINY | dict(data=data, out_dir=plain)), capsys)
    assert code == 2 and "already holds ckpt_20.pt; add --resume" in err
    here = train_gpt.Launch(torch.device("cpu"))
    holder = train_gpt.Log(tmp_path / "run", here, config())
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
    printed = out("--run", noisy, "--perplexity", tmp_path / "text")
    per_token, per_byte = (float(re.search(rf"per {unit} ([\d.]+)", printed)[1]) for unit in ("token", "byte"))
    assert per_token == pytest.approx(math.exp(np.mean(losses)), rel=1e-4) == per_byte
    assert sample.main(["--run", str(tmp_path)]) == 2 and "holds no ckpt" in capsys.readouterr().err


def test_streamed_text_never_splits_a_character():
    raw, shown, held = "aé€😀z".encode() + b"\xff\xe2", "", b""
    for byte in raw:
        text, held = sample.printable(held + bytes([byte]))
        shown += text
    assert shown == "aé€😀z\ufffd" and held == b"\xe2"
    assert get_tokenizer("bytes").decode_bytes([104, 105, 256]) == b"hi<|endoftext|>"


# ---------------------------------------------------------------------------------------------------------------------
# README and --help agree with the code


def test_help_lists_every_flag_with_its_default():
    text = run_python("train_gpt.py", "--help").stdout
    for f in dataclasses.fields(train_gpt.Config):
        assert f"--{f.name} " in text
    assert "[524288]" in text and "[muon]" in text


def test_readme_names_real_commands_and_flags():
    readme = (HERE / "README.md").read_text()
    known = {f.name for f in dataclasses.fields(train_gpt.Config)}
    for script in ("sample.py", "data/prepare.py"):
        known |= set(re.findall(r"--(\w+)", run_python(script, "--help").stdout))
    known |= {"nproc_per_node", "nnodes", "rdzv_backend", "rdzv_endpoint", "max", "standalone"}  # torchrun's and pip's
    assert set(re.findall(r"(?<![\w-])--(\w+)", readme)) - known == set()
    for command in re.findall(r"^(?:torchrun .*?|python )((?:\w+/)*\w+\.py)(.*)$", readme, re.M):
        assert (HERE / command[0]).exists(), command
        if command[0] == "train_gpt.py":
            train_gpt.parse_flags([w for w in command[1].split("#")[0].split()])
    assert "python -m pytest test_train.py" in readme


def test_importing_has_no_side_effects():
    code = (
        "import os, sys, random; before = dict(os.environ); import train_gpt, model, sample, torch; "
        "assert dict(os.environ) == before; assert not torch.distributed.is_initialized(); "
        "assert not torch.cuda.is_initialized(); assert 'wandb' not in sys.modules and 'tiktoken' not in sys.modules"
    )
    done = run_python("-c", code)
    assert done.returncode == 0, done.stderr


@pytest.mark.gpu
def test_gpu_run_matches_cpu_run(data, noisy, plain, tmp_path):
    flags = TINY | dict(data=str(data), init_from=str(noisy), out_dir=str(tmp_path / "run"), device="cuda")
    train(config(**flags))
    assert_same_run(tmp_path / "run", plain, rtol=1e-4)


@pytest.mark.gpu
def test_gpu_finds_a_micro_batch_and_trains_in_bf16(data, tmp_path):
    flags = TINY | dict(data=str(data), device="cuda", dtype="auto", micro_batch=0, compile="default", max_steps=60)
    summary = train(config(**flags | dict(out_dir=str(tmp_path / "run"))))
    assert summary["val_loss"] < 3.0
    assert "bf16" in (tmp_path / "run" / "log.txt").read_text()


if __name__ == "__main__":
    worker(Path(sys.argv[1]))
