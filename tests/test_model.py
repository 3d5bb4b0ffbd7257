"""The model, its operations and its optimizer against their definitions and PyTorch's own."""

import copy
import functools
import math
import os
import platform

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.testing import CompileCounterWithBackend

import generation
import model
import ops.checkpointing
import train_gpt
from conftest import TINY, compiler_works, final, random_gpt, rows, run_python, saved_for_backward, tiny_run
from data.shards import UserError
from generation import KVCache, compile_decode_step, generate, sample_token
from int8 import quantize, round_to_int8
from model import GPTConfig, Optimizer, newton_schulz, normalize_rows
from ops.attention import add_bias, attention, attention_mask, one_query_attention
from ops.compile import apply_compile
from ops.linear import Fp8Linear
from ops.loss import ChunkedLinearCrossEntropy, ce_fwd_bwd, softcap_logits
from ops.ngrams import hashed_uniform
from ops.pointwise import norm, relu_squared
from ops.warmup import compile_blocks_early
from runtime import start
from runtime.footprint import checkpointed_tensors
from runtime.ranks import DistContext
from train_gpt import make_config, select_attn_backend

# ---------------------------------------------------------------------------------------------------------------------
# Attention


def reference_attention(q, k, v, window):
    """Causal attention from its definition, in float64."""
    q, k, v = (t.double() for t in (q, k, v))
    scores = q @ k.mT / q.size(-1) ** 0.5
    i, j = torch.arange(q.size(2))[:, None], torch.arange(k.size(2))
    visible = (j <= i) & (j > i - (window or 10**9))
    return scores.masked_fill(~visible, -math.inf).softmax(-1) @ v


@pytest.mark.parametrize("window", [0, 1, 5, 64])
def test_attention_against_its_definition(window):
    q, k, v = torch.randn(3, 2, 3, 24, 16, generator=torch.Generator().manual_seed(0)).unbind()
    idx = torch.zeros((2, 24), dtype=torch.int64)
    out = attention(q, k, v, attention_mask("sdpa", idx, window, None))
    torch.testing.assert_close(out.double(), reference_attention(q, k, v, window), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype, rtol", [(torch.float64, 1e-12), (torch.float32, 1e-6), (torch.bfloat16, 3e-3)])
@pytest.mark.parametrize("shape", [(32, 100, 64), (3, 700, 2, 64), (1, 1, 64), (9, 64)])
@pytest.mark.parametrize("transposed", [False, True])
def test_eager_norm_and_relu_against_pytorchs(transposed, shape, dtype, rtol):
    generator = torch.Generator().manual_seed(0)
    wide = torch.randn((*shape[:-1], 96), generator=generator).to(dtype)
    wide[0, -1] *= 1e-5  # where epsilon matters
    wide[0, 0] = 0
    x, dy = wide[..., :64], torch.randn((*shape[:-1], 128), generator=generator).to(dtype)[..., ::2]  # not contiguous
    for ours, theirs in (
        (norm, lambda t: F.rms_norm(t, (64,), eps=torch.finfo(torch.float32).eps)),
        (relu_squared, lambda t: F.relu(t) ** 2),
    ):
        if dtype == torch.float64 and ours is norm:
            theirs = functools.partial(F.rms_norm, normalized_shape=(64,))
        results = []
        for function, kind in ((ours, dtype), (theirs, torch.float64)):
            leaf, grad = x.to(kind, copy=True), dy.to(kind)
            if transposed and leaf.dim() > 2:
                leaf, grad = leaf.transpose(0, 1), grad.transpose(0, 1)
            out = function(leaf.requires_grad_())
            results.append((out.detach(), *torch.autograd.grad(out, leaf, grad)))
        for got, want in zip(*results):
            assert got.dtype == dtype and got.shape == want.shape
            assert (got.double() - want).norm() <= rtol * want.norm()
    with torch.no_grad():
        assert (norm(wide.clone())[0, 0] == 0).all()


@pytest.mark.parametrize(
    "dtype, length, window, docs",
    [
        ("fp32", 300, 0, False),
        ("fp32", 128, 5, False),
        ("fp32", 600, 0, True),
        ("fp32", 257, 40, True),
        ("bf16", 256, 0, False),
    ],
)
def test_blocked_attention_against_pytorchs(dtype, length, window, docs):
    generator = torch.Generator().manual_seed(0)
    dtype, rtol = (torch.float32, 1e-4) if dtype == "fp32" else (torch.bfloat16, 0.02)
    q, k, v, dy = torch.randn(4, 2, 3, length, 16, generator=generator).to(dtype).unbind()
    idx = torch.randint(0, 50, (2, length), generator=generator)
    results = []
    for backend, kind in (("blocked", dtype), ("sdpa", torch.float64)):
        inputs = [t.to(kind, copy=True).requires_grad_() for t in (q, k, v)]
        out = attention(*inputs, attention_mask(backend, idx, window, 3 if docs else None), backend)
        out.backward(dy.to(kind))
        results.append([out.detach(), *(t.grad for t in inputs)])
    for got, want in zip(*results):
        assert got.dtype == dtype
        assert (got.double() - want).norm() < rtol * want.norm()


def test_blocked_attention_compiled():
    if not compiler_works():
        pytest.skip("torch.compile finds no working compiler here")
    q, k, v = torch.randn(3, 2, 300, 2, 16, generator=torch.Generator().manual_seed(0)).transpose(2, 3).unbind()
    documents = attention_mask("blocked", torch.randint(0, 50, (2, 300)), 40, 3)

    def both(q, k, v, backend):  # in one function, which is compiled once
        return attention(q, k, v, None, backend).square().sum(), attention(q, k, v, documents, backend).square().sum()

    compiled = torch.compile(both, dynamic=False, fullgraph=True)
    inputs = [[t.clone().requires_grad_() for t in (q, k, v)] for _ in range(2)]
    losses = [compiled(*inputs[0], "blocked"), both(*inputs[1], "sdpa")]
    for weights in ((1, 0), (0, 1)):
        grads = [
            torch.autograd.grad(sum(w * x for w, x in zip(weights, loss)), qkv, retain_graph=True)
            for loss, qkv in zip(losses, inputs)
        ]
        for got, want in zip(*grads):
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("dtype", "most"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)])
def test_attention_of_one_query_against_pytorchs(dtype, most):
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(3, 2, n, 16, generator=generator).to(dtype) for n in (1, 40, 40))
    seen = torch.rand(3, 1, 1, 40, generator=generator) < 0.4
    for mask in (seen, add_bias(seen, torch.randn(2, 1, 40, generator=generator))):
        got = one_query_attention(q, k, v, mask)
        want = torch.nn.functional.scaled_dot_product_attention(
            q.double(), k.double(), v.double(), mask if mask.dtype == torch.bool else mask.double()
        )
        assert got.dtype == dtype and got.shape == want.shape
        torch.testing.assert_close(got.double(), want, rtol=most, atol=most)


def test_auto_attention_is_blocked_where_that_pays():
    cpu, cuda, compiled = torch.device("cpu"), torch.device("cuda"), dict(attn="auto", compile="default")
    for flags in (compiled, compiled | dict(seq_len=1024), dict(dtype="bf16"), dict(dtype="bf16", seq_len=1024)):
        assert select_attn_backend(make_config(**flags), cpu) == "blocked"
    for flags, device in (
        ({}, cpu),
        (compiled, cuda),
        (compiled | dict(seq_len=2048, batch_tokens=4096), cpu),
        (dict(dtype="fp32"), cpu),
        (dict(dtype="bf16", seq_len=2048), cpu),
        (dict(dtype="bf16", checkpointing="selective"), cpu),
        (compiled | dict(preset="gpt2-small"), cuda),
    ):
        assert select_attn_backend(make_config(**flags), device) == "auto"
    assert select_attn_backend(make_config(attn="flash", compile="default"), cpu) == "flash"


@pytest.mark.parametrize("window, docs", [(0, False), (5, False), (0, True), (5, True)])
def test_flex_attention_means_the_same(window, docs):
    q, k, v = torch.randn(3, 2, 3, 128, 16, generator=torch.Generator().manual_seed(0)).unbind()
    idx = torch.randint(0, 20, (2, 128), generator=torch.Generator().manual_seed(0))
    eot = 3 if docs else None
    with torch.no_grad():
        got = attention(q, k, v, attention_mask("flex", idx, window, eot), "flex")
        want = attention(q, k, v, attention_mask("sdpa", idx, window, eot))
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


def test_varlen_offsets():
    idx = torch.ones((2, 48), dtype=torch.int64)
    idx[0, 0] = idx[0, 7] = idx[1, 10] = 3
    plan = attention_mask("varlen", idx, 5, 3)
    assert plan.cu_seqlens.tolist() == [0, 7, 48, 58, 96] and plan.cu_seqlens.dtype == torch.int32
    assert plan.max_seqlen == 48 and plan.window == (4, 0)  # the window counts the query itself, varlen_attn's does not
    assert attention_mask("varlen", idx, 0, None).cu_seqlens.tolist() == [0, 48, 96]


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


# ---------------------------------------------------------------------------------------------------------------------
# The model


def reference_gpt(weights: dict, cfg: GPTConfig, idx) -> torch.Tensor:
    """Logits of the whole model, written from its description, in float64."""
    w = {name: value.double() for name, value in weights.items()}

    def norm(x):
        return x / (x.square().mean(-1, keepdim=True) + torch.finfo(torch.float32).eps).sqrt()

    d = cfg.n_embd // cfg.n_head
    half = d // 4  # half of the dimensions turn, in pairs
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
        turned, still = [], []
        for t in map(norm, (q, k)):
            pairs = torch.complex(t[..., :half].contiguous(), t[..., half : 2 * half].contiguous()) * turn
            turned.append(torch.cat((pairs.real, pairs.imag), -1))
            still.append(t[..., 2 * half :])
        for t in reversed(range(idx.size(1))):  # a key says what token came before
            still[1][:, :, t] = still[1][:, :, t - 1] if t else 0
        q, k = (torch.cat(parts, -1) for parts in zip(turned, still))
        y = reference_attention(q, k, v, cfg.layer_windows()[layer])
        x = x + y.transpose(1, 2).flatten(2) @ w[f"blocks.{layer}.attn.proj.weight"].T
        hidden = (norm(x) @ w[f"blocks.{layer}.mlp.fc.weight"].T).clamp(min=0) ** 2
        x = x + hidden @ w[f"blocks.{layer}.mlp.proj.weight"].T
    logits = norm(x) @ w["head.weight"].T
    return cfg.softcap * (logits / cfg.softcap).tanh() if cfg.softcap else logits


@pytest.mark.parametrize(
    "shape", [dict(), dict(window="SSL:4"), dict(window="S", softcap=0.0, n_head=1), dict(ngram=4, ngram_rows=50)]
)
def test_model_against_its_description(shape):
    gpt = random_gpt(**shape)
    idx = torch.randint(70, (2, 24), generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(gpt(idx).double(), reference_gpt(gpt.state_dict(), gpt.cfg, idx), rtol=1e-4, atol=1e-4)
    expected = F.cross_entropy(
        reference_gpt(gpt.state_dict(), gpt.cfg, idx).flatten(0, 1), idx.flatten(), reduction="sum"
    )
    torch.testing.assert_close(gpt(idx, idx).double(), expected, rtol=1e-5, atol=1e-4)


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


def test_flops_against_a_counter():
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.flop_counter import FlopCounterMode

    idx = torch.zeros((1, 24), dtype=torch.int64)
    for window, attended in (("L", 12.5), ("S:5", (1 + 2 + 3 + 4 + 20 * 5) / 24)):
        gpt = random_gpt(window=window)
        with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
            gpt(idx, idx).backward()
        full, seen = (3 * 12 * 32 * keys for keys in (24, attended))  # the counter sees a full square of scores
        expected = counter.get_total_flops() / 24 - full + seen
        assert gpt.flops_per_token() == pytest.approx(expected, rel=1e-6)


# ---------------------------------------------------------------------------------------------------------------------
# Loss


@pytest.mark.parametrize("softcap", [0.0, 15.0, 0.7, 69.0])
@pytest.mark.parametrize("chunk", [1, 7, 48, 1000])
def test_chunked_loss_is_the_loss(chunk, softcap):
    torch.manual_seed(0)
    x, w = torch.randn(48, 16, requires_grad=True), torch.randn(30, 16, requires_grad=True)
    targets = torch.randint(-1, 30, (48,))
    logits = x @ w.T
    capped = softcap * torch.tanh(logits / softcap) if softcap else logits
    expected = F.cross_entropy(capped, targets, ignore_index=-1, reduction="sum")
    expected_grads = torch.autograd.grad(expected / 3, (x, w))
    ce_fn = ce_fwd_bwd
    loss = ChunkedLinearCrossEntropy.apply(x, w, targets, softcap, chunk, ce_fn)
    torch.testing.assert_close(loss, expected)
    for got, want in zip(torch.autograd.grad(loss / 3, (x, w)), expected_grads):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("scale", [1.0, 100.0, 1e4])
@pytest.mark.parametrize("softcap", [0.0, 15.0, 69.0, 80.0])
def test_loss_of_extreme_logits(softcap, scale):
    """Without the maximum (softcap below 70) and with it, against fp64."""
    generator = torch.Generator().manual_seed(0)
    logits = (scale * torch.randn(20, 50, generator=generator)).requires_grad_()
    targets = torch.cat([torch.randint(-1, 50, (18,), generator=generator), logits[18:].argmin(-1)])
    want = F.cross_entropy(softcap_logits(logits.double(), softcap), targets, ignore_index=-1, reduction="sum")
    loss, grad, _ = ce_fwd_bwd(logits.detach(), targets, softcap, 1.0)
    torch.testing.assert_close(loss.double(), want, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(grad, torch.autograd.grad(want, logits)[0], rtol=1e-3, atol=1e-5)


def test_blocks_compile_early_and_leave_no_trace(monkeypatch):
    """Each one's forward and backward pass before those of the next, as training has them; then as evaluation does."""
    gpt, seen = random_gpt(window="SL:5"), []
    different = list(gpt.blocks)
    for i, block in enumerate(different):
        forward = block.forward

        def noted(x, ctx, i=i, block=block, forward=forward):
            others = [p.grad is None for other in different[i:] for p in other.parameters()]
            seen.append((i, block.training, torch.is_grad_enabled(), all(others)))
            return forward(x, ctx)

        monkeypatch.setattr(block, "forward", noted)
    before = [p.detach().clone() for p in gpt.parameters()]
    compile_blocks_early(gpt, 2, 8, False)
    assert seen == [call for i in range(len(different)) for call in ((i, True, True, True), (i, False, False, False))]
    assert gpt.training and all(p.grad is None for p in gpt.parameters())
    assert not any(block._forward_pre_hooks for block in gpt.blocks) and all(b.training for b in gpt.blocks)
    assert all(map(torch.equal, before, gpt.parameters()))
    gpt.blocks.append(different[0])  # in two places
    gpt.windows.append(0)
    del seen[:]
    compile_blocks_early(gpt, 2, 8, False)
    assert [i for i, training, *_ in seen if training] == list(range(len(different)))


def test_evaluation_makes_no_gradients(monkeypatch):
    gpt = random_gpt(loss_chunk=10)
    idx = torch.randint(70, (2, 24), generator=torch.Generator().manual_seed(0))
    want = gpt(idx, idx).detach()
    monkeypatch.setattr(gpt, "ce_fn", None)
    with torch.no_grad():
        torch.testing.assert_close(gpt(idx, idx), want)


# ---------------------------------------------------------------------------------------------------------------------
# n-grams


@torch.no_grad()
def test_ngrams_end_at_documents_and_after_n_tokens():
    gpt = random_gpt(ngram=3, ngram_rows=1 << 20)
    idx = torch.tensor([[5, 6, 7, 8, 9, 4, 5, 6, 7]])
    whole = gpt.embed(idx, torch.arange(9))[0]
    assert torch.equal(whole[2], whole[8]) and not torch.equal(whole[1], whole[7])  # 5 6 7, and (4) 5 6 against (-) 5 6
    other = idx.clone()
    other[0, 2] = 60
    differs = (gpt.embed(other, torch.arange(9))[0] != whole).any(-1)
    assert differs.tolist() == [False, False, True, True, True, False, False, False, False]
    assert torch.equal(
        gpt.embed(idx, torch.arange(4))[0], whole[5:]
    )  # tokens before those asked for are seen, as a cache has them
    gpt.doc_eot = 4  # starts a document
    masked = gpt.embed(idx, torch.arange(9))[0]
    assert torch.equal(masked[:5], whole[:5]) and torch.equal(masked[5:], gpt.embed(idx[:, 5:], torch.arange(4))[0])
    assert torch.equal(gpt.embed(idx, torch.arange(3))[0], masked[6:])
    assert not torch.equal(masked[6], whole[6])


def test_ngrams_are_as_long_as_serves_the_tokenizer():
    """-1: of bytes to 6, of longer tokens to 3; what is given is taken, and the presets of GPT-2's sizes have none."""
    for preset, flags, of_bytes, of_others in (
        ("laptop", {}, 6, 3),
        ("mini", {}, 6, 3),
        ("laptop", dict(ngram=4), 4, 4),
        ("laptop", dict(ngram=0), 0, 0),
        ("gpt2-small", {}, 0, 0),
        ("gpt2-small", dict(ngram=-1), 6, 3),
    ):
        cfg = make_config(preset=preset, **flags)
        longest = [train_gpt.gpt_config(cfg, vocab_size).ngram for vocab_size in (257, 258, 1024, 50257)]
        assert longest == [of_bytes, of_others, of_others, of_others]
    with pytest.raises(UserError, match="at least -1"):
        make_config(ngram=-2)


def test_dropped_ngrams():
    idx = torch.randint(70, (8, 24), generator=torch.Generator().manual_seed(0))
    gpt = random_gpt(ngram=2, ngram_rows=1 << 16)
    tokens, whole = gpt.wte(idx), gpt.embed(idx, torch.arange(24))
    gpt.ngram_dropout, fraction, different = 0.4, [], 0
    for gpt.step_seed in range(100):
        got = gpt.embed(idx, torch.arange(24))
        dropped = (got == tokens).all(-1)
        expected = torch.where(dropped[..., None], tokens, tokens + (whole - tokens) / 0.6)
        torch.testing.assert_close(got, expected)
        assert torch.equal(gpt.embed(idx[3:5], torch.arange(24)), got[3:5])  # whatever rows are beside it
        fraction.append(dropped.float())
        different += not torch.equal(fraction[-1], fraction[0])
        assert torch.equal(gpt.eval().embed(idx, torch.arange(24)), whole)  # evaluation and sampling drop nothing
        gpt.train()
    fraction = torch.stack(fraction)
    assert different == 99
    assert fraction.mean() == pytest.approx(0.4, abs=0.015)  # of 19,200 draws: 4 standard deviations
    assert (fraction.mean(0) - 0.4).abs().max() < 0.25 and (fraction.mean((1, 2)) - 0.4).abs().max() < 0.18


def test_hashed_uniform_looks_random():
    place = torch.arange(256)[:, None]
    draws = torch.cat([hashed_uniform(torch.full((256, 1), 12345), place, s).T for s in range(512)])
    assert 0 <= draws.min() and draws.max() < 1
    assert draws.mean() == pytest.approx(0.5, abs=0.005) and draws.var() == pytest.approx(1 / 12, abs=0.002)
    for table in (draws, draws.T):  # steps among each other, and places
        assert torch.corrcoef(table).fill_diagonal_(0).abs().max() < 6 / table.size(1) ** 0.5
    neighbours = torch.arange(54321, 54347).expand(256, -1)  # n-grams that differ in their first letter
    draws = torch.stack([hashed_uniform(neighbours, place, seed) for seed in range(64)], -1).flatten(0, 1)
    assert len((draws < 0.5).unique(dim=0)) == len(draws)  # each n-gram at each place has a history of its own


# ---------------------------------------------------------------------------------------------------------------------
# Generation


PROMPTS = [torch.randint(70, (n,), generator=torch.Generator().manual_seed(n)) for n in (9, 1, 24, 40)]


def likeliest(gpt, prompts, n_tokens, **options) -> list[list[int]]:
    """Each prompt's continuation, of ids below 65."""
    return torch.stack(list(generate(gpt, prompts, n_tokens, 65, temperature=0, **options)), 1).tolist()


def likeliest_uncached(gpt, prompt, n_tokens, context) -> list[int]:
    """From plain forward passes over all that was read."""
    idx = prompt[None, -context:]
    with torch.no_grad():
        for _ in range(n_tokens):
            idx = torch.cat((idx, gpt(idx)[:, -1:, :65].argmax(-1)), 1)
    return idx[0, -n_tokens:].tolist()


@pytest.mark.parametrize("eot", [None, 3])
@pytest.mark.parametrize("shape", [dict(), dict(window="SL:5"), dict(ngram=3), dict(ngram=4, window="SSL:7")])
def test_generation_with_cache_is_generation_without(shape, eot):
    """Prompts of several lengths at once; from the context of 24 on, each layer has a sliding window of it."""
    short, long = random_gpt(**shape, std=0.3), random_gpt(**shape | dict(seq_len=100), std=0.3)
    long.windows = [window or 24 for window in short.windows]
    short.doc_eot = long.doc_eot = eot
    prompts = [prompt.clone() for prompt in PROMPTS]
    prompts[0][4] = prompts[2][0] = prompts[3][33] = 3
    got = likeliest(short, prompts, 60)
    assert got == [likeliest_uncached(long, prompt, 60, 24) for prompt in prompts]
    assert len(set(sum(got, []))) > 6
    with pytest.raises(ValueError, match="25 tokens exceed the model's context of 24"):
        short(torch.zeros((1, 25), dtype=torch.int64))


def test_the_cache_is_as_large_as_it_must_be():
    gpt = random_gpt(seq_len=400, n_layer=1, std=0.3)
    got = likeliest(gpt, PROMPTS[:2], 200)
    assert got == [likeliest_uncached(gpt, prompt, 200, 400) for prompt in PROMPTS[:2]]


def test_sizes_of_the_cache_are_few(monkeypatch):
    """Each is a compilation."""
    sizes, gpt = set(), random_gpt(seq_len=5000, n_layer=1)

    def note(model, idx, cache, *args):
        sizes.add(cache.layers[0].size)
        return idx[:, -1:]

    monkeypatch.setattr(generation, "decode_step", note)
    for length in range(1, 5000, 61):
        list(generate(gpt, [torch.zeros(length, dtype=torch.int64)], 100, 65))
    assert sorted(sizes) == [128, 256, 512, 1024, 2048, 4096, 5000]


def test_without_a_cache_the_context_is_read_again():
    gpt, options = random_gpt(std=0.3), dict(temperature=0.9, top_k=20, seeds=[5])
    cached, uncached = (
        torch.cat(list(generate(gpt, PROMPTS[:1], 40, 65, **options, use_cache=c))) for c in (True, False)
    )
    assert cached[:15].tolist() == uncached[:15].tolist()  # until the context of 24 is full
    got = torch.cat(list(generate(gpt, PROMPTS[:1], 40, 65, temperature=0, use_cache=False)))
    text = torch.cat((PROMPTS[0], got))
    assert all(gpt(text[None, max(0, i - 24) : i])[0, -1, :65].argmax() == text[i] for i in range(9, 49))
    with pytest.raises(ValueError, match="equally long"):
        next(generate(gpt, PROMPTS, 5, 65, use_cache=False))


def test_what_is_drawn_depends_on_the_seed_alone():
    gpt, options = random_gpt(std=0.3), dict(temperature=0.9, top_k=20, top_p=0.9)
    together = torch.stack(list(generate(gpt, PROMPTS, 30, 65, seeds=[5, 6, 7, 5], **options)), 1)
    for prompt, seed, row in zip(PROMPTS, (5, 6, 7, 5), together):
        assert torch.cat(list(generate(gpt, [prompt], 30, 65, seeds=[seed], **options))).tolist() == row.tolist()
    assert together.max() < 65 and not torch.equal(together[0], together[3])


def test_compiled_decoding_writes_the_same_text():
    if not compiler_works():
        pytest.skip("torch.compile finds no working compiler here")
    gpt, step = random_gpt(window="S:5", ngram=3, n_layer=1, std=0.3), compile_decode_step(torch.device("cpu"))
    assert likeliest(gpt, PROMPTS[:1], 40, step=step) == likeliest(gpt, PROMPTS[:1], 40)


@pytest.mark.parametrize("in_int8", [False, True])
def test_one_compiled_step_serves_all_models_and_texts(in_int8, monkeypatch):
    """Traced as the compiler does it and run by PyTorch: a row alone is multiplied by sums, and guards are skipped."""
    compiled = torch.compile
    monkeypatch.setattr(torch, "compile", lambda f, **_: compiled(f, fullgraph=True, dynamic=False, backend="eager"))
    step = compile_decode_step(torch.device("cpu"))
    many = PROMPTS[: 1 if in_int8 else 4]  # int8's kernel for several rows rounds them to bf16
    for shape, prompts in ((dict(), PROMPTS[:1]), (dict(), many), (dict(ngram=3, n_embd=28), PROMPTS[:1])):
        gpt = random_gpt(window="SL:5", std=0.3, **shape)
        fast = quantize(copy.deepcopy(gpt)) if in_int8 else gpt
        if in_int8:
            round_weights(gpt)
        for part in (prompts, [prompt // 2 for prompt in prompts]):
            assert likeliest(fast, part, 40, step=step) == likeliest(gpt, part, 40)
    cache, draws = KVCache(gpt, torch.tensor([1])), torch.full((1, 1), 0.99)
    generation.decode_step(gpt, torch.tensor([[1]]), cache, draws, 65, 0, 0, 1.0)
    colder, hotter = (step(gpt, torch.tensor([[1]]), cache, draws, 65, heat, 0, 1.0).item() for heat in (0.0, 1e6))
    assert colder != hotter  # a cache may be sampled in another way


@torch.no_grad()
def test_a_cache_is_refused_for_a_second_prompt():
    gpt, idx = random_gpt(), torch.zeros((2, 20), dtype=torch.int64)
    cache = KVCache(gpt, torch.tensor([20, 20]))
    torch.testing.assert_close(gpt.next_logits(idx, cache), gpt(idx)[:, -1:])
    with pytest.raises(ValueError, match="takes one token at a time"):
        gpt.next_logits(idx[:, :5], cache)
    assert cache.length.tolist() == [20, 20]


@torch.no_grad()
def round_weights(gpt) -> None:
    """To what int8 stands for."""
    for p in gpt.parameters():
        q, scale = round_to_int8(p)
        assert q.abs().amax(1).eq(127).all() and (q * scale[:, None] - p).abs().le(scale[:, None] * 0.5001).all()
        p.copy_(q * scale[:, None])


@pytest.mark.parametrize("shape", [dict(), dict(ngram=3), dict(n_embd=24)])
def test_int8_is_close(shape):
    """Against the model of the rounded weights, and within a few per cent of the one before."""
    gpt = random_gpt(**shape, vocab_size=128, loss_chunk=16)
    rounded, whole, idx = copy.deepcopy(gpt), quantize(copy.deepcopy(gpt)), torch.arange(48).view(2, 24)
    with torch.no_grad():
        round_weights(rounded)
        torch.testing.assert_close(whole(idx), rounded(idx), rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(whole(idx, idx), rounded(idx, idx), rtol=1e-4, atol=1e-4)
        assert (whole(idx, idx) / gpt(idx, idx) - 1).abs() < 0.02
        few = torch.randn(3, gpt.cfg.n_embd)  # the kernel of few rows computes in bf16
        want = few @ (whole.head.weight_int8 * whole.head.weight_scale[:, None]).T
        assert ((whole.head(few) - want).norm() / want.norm()) < 0.01
    assert sum(b.nbytes for b in whole.state_dict().values()) < 0.32 * sum(p.nbytes for p in gpt.parameters())


def test_top_k_and_top_p_draw_from_the_likeliest():
    logits = torch.log(torch.tensor([[0.5, 0.3, 0.15, 0.05]])).repeat(4000, 1)
    draws = torch.rand((4000, 1), generator=torch.Generator().manual_seed(0))
    p = torch.bincount(sample_token(logits, draws, 1.0, 0, 1.0)[:, 0], minlength=4) / 4000
    torch.testing.assert_close(p, logits[0].exp(), atol=0.03, rtol=0)
    draws[0], draws[1] = 0, 1 - 2**-24  # the ends of what torch.rand draws
    for options, drawn in (
        ((1.0, 2, 1.0), {0, 1}),
        ((1.0, 0, 0.8), {0, 1}),
        ((1.0, 0, 0.81), {0, 1, 2}),
        ((1.0, 0, 1e-9), {0}),
        ((0, 0, 1.0), {0}),
        ((1.0, 9, 1.0), {0, 1, 2, 3}),
    ):
        assert set(sample_token(logits, draws, *options).flatten().tolist()) == drawn


# ---------------------------------------------------------------------------------------------------------------------
# Memory, the compiler, fp8 and fp16


def test_checkpointing_keeps_fewer_bytes_for_backward(monkeypatch):
    selective, caches = ops.checkpointing.create_selective_checkpoint_contexts, []

    def contexts(policy):
        caching, cached = selective(policy)
        caches.append(caching.storage)  # what it keeps does not pass through hooks
        return caching, cached

    monkeypatch.setattr(ops.checkpointing, "create_selective_checkpoint_contexts", contexts)
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


def test_budget_of_the_compiler_acts(monkeypatch):
    if not compiler_works():
        pytest.skip("torch.compile finds no working compiler here")
    kept, idx = {}, torch.zeros((8, 32), dtype=torch.int64)
    no_effects = dict(drawn=False, written=[])
    monkeypatch.setattr(train_gpt, "warm_up", lambda *_: no_effects)  # it compiles for evaluation as well
    for mode in ("0.1", "0.3"):
        cfg = make_config(**TINY | dict(compile="default", checkpointing=mode, loss_chunk=0))
        state = train_gpt.build(cfg, DistContext(idx.device), 257)
        kept[mode] = bytes_kept(state.raw_model, idx)
        # to see how much memory a compiled step needs
        apply_compile(state.raw_model, "default", float(mode), probing=True)
        assert bytes_kept(state.raw_model, idx) == kept[mode]
    assert kept["0.1"] < 0.9 * kept["0.3"], kept


def bytes_kept(gpt, idx) -> int:
    with saved_for_backward() as (storages, _):
        gpt(idx, idx).backward()
    return sum(storages.values())


@pytest.mark.parametrize("mode", ["none", "selective", "full"])
@torch._functorch.config.patch(activation_memory_budget=1.0)
def test_memory_model_knows_what_a_compiled_block_keeps(mode):
    gpt = random_gpt(n_layer=1, seq_len=64, n_embd=64, compute_dtype=torch.bfloat16)
    (block,), x = gpt.blocks, torch.randn(32, 64, 64, dtype=torch.bfloat16, requires_grad=True)
    cos, sin = gpt.cos.bfloat16(), gpt.sin.bfloat16()
    block.checkpointing = mode
    torch._dynamo.reset()
    apply_compile(gpt, "default", probing=True)
    with saved_for_backward() as (storages, _):
        block(x, model.AttnContext(cos, sin, None, None)).sum().backward()
    kept = sum(size for pointer, size in storages.items() if pointer not in {p.data_ptr() for p in block.parameters()})
    kept -= sum(p.numel() * 2 for p in block.parameters()) if mode == "none" else 0  # cast
    formula = sum(checkpointed_tensors(gpt, mode, 32, 64, fused_norms=True).values())
    assert kept == pytest.approx(formula, rel=0.1), (kept, formula)


def test_flex_attention_is_fused_in_probing_too(monkeypatch):
    """Alone it would make all scores, and far fewer sequences would seem to fit."""
    how = []
    monkeypatch.setattr(torch, "compile", lambda function, **options: how.append(options) or function)
    for attn in ("sdpa", "flex"):
        gpt = model.GPT(GPTConfig(vocab_size=70, n_layer=1, n_head=2, n_embd=32), attn=attn)
        apply_compile(gpt, "default", probing=True)
    assert [options.get("backend") for options in how] == ["aot_eager_decomp_partition", None, None, None]


def test_evaluation_is_a_compilation_of_its_own():
    """In eval mode and without gradients, as what people add to a block may ask for."""
    gpt, idx = random_gpt(), torch.arange(48).view(2, 24)
    expected, counter = gpt(idx, idx), CompileCounterWithBackend("aot_eager")
    for block in gpt.blocks:
        block.compiled = torch.compile(block.forward_with_ac, backend=counter, fullgraph=True)
    gpt(idx, idx).backward()
    assert counter.frame_count == 1
    gpt.eval()
    for _ in range(2):
        with torch.no_grad():
            loss = gpt(idx, idx)
        torch.testing.assert_close(loss, expected.detach())
        assert counter.frame_count == 2 and not loss.requires_grad


@pytest.fixture
def rowwise_scales(monkeypatch):
    """PyTorch 2.11 has no float8 matmul with a scale a row on a CPU: there, one of the numbers they stand for."""

    def scaled_mm(a, b, scale_a, scale_b, out_dtype, use_fast_accum=False):
        assert a.is_contiguous() and b.t().is_contiguous() and not a.size(1) % 16 and not b.size(1) % 16
        assert (scale_a.shape, scale_b.shape) in (((1, 1), (1, 1)), ((a.size(0), 1), (1, b.size(1))))
        return ((a.float() * scale_a) @ (b.float() * scale_b)).to(out_dtype)

    a, scale = torch.zeros((32, 16), dtype=torch.float8_e4m3fn), torch.ones((32, 1))
    try:
        torch._scaled_mm(a, a.t(), scale, scale.t(), out_dtype=torch.bfloat16)
    except RuntimeError:
        monkeypatch.setattr(torch, "_scaled_mm", scaled_mm)


def assert_rows_close(got, want, most):
    """Each row's error, in parts of the row; rows of zeros must be zeros."""
    got, want = got.double().flatten(0, -2), want.double().flatten(0, -2)
    assert got.isfinite().all() and ((got - want).norm(dim=-1) <= most * want.norm(dim=-1)).all()


# e4m3 has 3 bits of mantissa: a number moves by 2**-4 at most, by 0.026 in root mean square, a product by 0.037.
# e5m2 has 2, so it moves by twice that: a product of the two by 0.058.
def test_fp8_products_are_close(rowwise_scales):
    torch.manual_seed(0)
    x, w = torch.randn(4, 16, 256).bfloat16(), torch.randn(48, 256).bfloat16()
    sizes = torch.tensor([0.0, 1e-20, 1e-4, 1.0, 300.0, 1e6, 1e30])
    x *= sizes[torch.arange(64) % 7].view(4, 16, 1)
    grad = (torch.randn(4, 16, 48) * sizes[torch.arange(64) % 5].view(4, 16, 1)).bfloat16()
    w[3] = 0
    w[5] *= 1e-4
    x.requires_grad_(), w.requires_grad_()
    got = Fp8Linear.apply(x, w)
    assert got.dtype == torch.bfloat16 and got.shape == (4, 16, 48) and not got[..., 3].any()
    assert_rows_close(got, x.float() @ w.float().T, 0.06)
    at_most = x.float().abs() @ w.float().abs().T
    assert ((got - x.float() @ w.float().T).abs() <= (2**-3 + 2**-7) * at_most).all()
    dx, dw = torch.autograd.grad(got, (x, w), grad)
    assert_rows_close(dx, grad.float() @ w.float(), 0.06)
    assert torch.equal(dw, grad.flatten(0, 1).T @ x.flatten(0, 1))


@pytest.mark.parametrize("softcap", [15.0, 0.0, 80.0])
def test_fp8_gradient_of_logits_stays_in_range(softcap):
    torch.manual_seed(0)
    logits = torch.randn(96, 64) * torch.logspace(-3, 4, 96)[:, None]
    logits[:3], logits[3], logits[4, :32] = 0, 1e3, -1e30
    logits = logits.bfloat16()
    targets = torch.where(torch.arange(96) % 2 > 0, logits.argmin(1), logits.argmax(1))  # surest mistakes, surest hits
    targets[5] = -1
    exact = logits.float().requires_grad_()
    want = torch.autograd.grad(model.cross_entropy(softcap_logits(exact, softcap), targets, True), exact)[0]
    loss, grad, grad8 = ce_fwd_bwd(logits, targets, softcap, 2.0**15, True)
    assert loss.isfinite() and grad8.dtype == torch.float8_e5m2 and not grad[5].any() and not grad8.float()[5].any()
    assert (grad8.float().abs() <= 2**15).all() and grad8.float().abs().max() >= (2**15 if softcap == 0 else 2**13)
    error = (grad8.float() / 2**15 - want).abs()
    assert (error <= 2**-3 * want.abs() + 2e-6).all(), error.max()
    assert ce_fwd_bwd(logits, targets, softcap, 1.0)[2] is None


@pytest.mark.parametrize("softcap", [15.0, 0.0])
@pytest.mark.parametrize("size", [0.0, 1e-6, 0.05, 30.0])
def test_fp8_head_is_close(size, softcap):
    torch.manual_seed(0)
    x, w = torch.randn(72, 256), torch.randn(80, 256) * size
    x[0], x[1] = 0, torch.eye(256)[7]  # as small, and in one number as large, as what is normalized can be
    x, w = norm(x).bfloat16().requires_grad_(), w.requires_grad_()
    targets = torch.randint(-1, 80, (72,))
    values = {}
    for fp8 in (False, True):
        loss = ChunkedLinearCrossEntropy.apply(x, w, targets, softcap, 32, ce_fwd_bwd, fp8)
        values[fp8] = (loss, *torch.autograd.grad(loss / 72, (x, w)))
    (want, *want_grads), (got, *grads) = values[False], values[True]
    assert got.item() == pytest.approx(want.item(), rel=0.05 if size > 1 else 0.01)
    for a, b in zip(grads, want_grads):
        assert a.isfinite().all() and (size > 1 or (a - b).norm() <= 0.08 * b.norm()), (a - b).norm() / b.norm()


def test_fp8_head_adds_small_probabilities_up():
    x, w = torch.ones((16, 16), dtype=torch.bfloat16, requires_grad=True), torch.full((1 << 17, 16), 1e-3)
    w[0] = 0
    loss = ChunkedLinearCrossEntropy.apply(x, w, torch.zeros(16).long(), 15.0, 16, ce_fwd_bwd, True)
    assert_rows_close(torch.autograd.grad(loss, x)[0], torch.full((16, 16), 1e-3), 2**-3)


def test_fp8_loss_is_near_bf16(rowwise_scales):
    idx, values = torch.randint(80, (2, 24), generator=torch.Generator().manual_seed(0)), []
    for fp8 in (False, True):
        gpt = random_gpt(compute_dtype=torch.bfloat16, vocab_size=80, loss_chunk=16)
        gpt.fp8 = fp8
        for block in gpt.blocks:
            block.mlp.fc.fp8 = block.mlp.proj.fp8 = fp8
        loss = gpt(idx, idx)
        loss.backward()
        values.append((loss.item(), [p.grad.flatten() for p in gpt.parameters()]))
    (a, grads), (b, other) = values
    assert a != b == pytest.approx(a, rel=0.02)
    assert min(F.cosine_similarity(x, y, dim=0).item() for x, y in zip(grads, other)) > 0.95


def test_fp16_skips_bad_steps_and_goes_on(data, noisy, tmp_path, monkeypatch):
    from torch.amp import GradScaler

    monkeypatch.setattr(train_gpt.torch.amp, "GradScaler", lambda d, enabled: GradScaler(d, 2.0**40, enabled=enabled))
    flags = dict(data=data, dtype="fp16", max_steps=30, save_every=15, keep=0, max_bad_steps=0)
    tiny_run(tmp_path / "run", init_from=noisy, **flags)
    saved = final(tmp_path / "run")
    assert saved["scaler"]["scale"] < 2.0**40 and all(w.isfinite().all() for w in saved["model"].values())
    losses = rows(tmp_path / "run", "train_loss")
    assert abs(losses[1] - losses[0]) < 0.3 and losses[-1] < losses[0] - 0.5
    tiny_run(tmp_path / "again", resume=tmp_path / "run" / "ckpt_15.pt", **flags)
    assert all(torch.equal(final(tmp_path / "again")["model"][name], w) for name, w in saved["model"].items())


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="about glibc's malloc")
def test_freed_memory_is_kept_for_the_next_step():
    code = """if True:
        import ctypes, os, resource
        ctypes.CDLL(None).prctl(41, 1, 0, 0, 0)  # PR_SET_THP_DISABLE: with large pages a fault may be 4 KiB or 2 MiB
        import torch
        from ops.cpu import tune_glibc_malloc

        def faults():  # of big allocations, when they come again and again
            for repeat in range(6):
                before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
                for size in (1 << 21, 1 << 24):
                    torch.ones(size)
            return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

        print(faults())
        os.environ["MALLOC_TRIM_THRESHOLD_"] = "131072"
        tune_glibc_malloc()
        print(faults())
        del os.environ["MALLOC_TRIM_THRESHOLD_"]
        tune_glibc_malloc()
        print(faults())
    """
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("MALLOC_", "GLIBC_TUNABLES"))}
    for _ in range(3):  # one process in about a hundred gets its blocks from mmap all the same
        done = run_python("-c", code, env=clean)
        assert done.returncode == 0, done.stderr
        plain, users, kept = map(int, done.stdout.split())
        if kept < plain / 4 and kept < users / 4:  # the user's settings win
            return
    raise AssertionError((plain, users, kept))


@pytest.mark.soak
def test_nothing_is_compiled_on_trial_and_kernels_have_no_debug_lines(tmp_path):
    if not compiler_works():
        pytest.skip("torch.compile finds no working compiler here")
    code = """if True:
        import sys
        from runtime import set_environment
        set_environment()
        import torch
        from pathlib import Path
        from ops.cpu import skip_trial_programs
        skip_trial_programs()
        torch.compile(torch.sin)(torch.ones(64))
        kernels = list(Path(sys.argv[1]).rglob("*.so"))
        assert 1 <= len(kernels) <= 2 and not any(b".debug_line" in path.read_bytes() for path in kernels)
    """
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("TORCHINDUCTOR", "AOT_INDUCTOR"))}
    done = run_python("-c", code, tmp_path, env=clean | dict(TMPDIR=str(tmp_path)))
    assert done.returncode == 0, done.stderr


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
    for a, b, c in model.NEWTON_SCHULZ:
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
    monkeypatch.setattr(model, "NEWTON_SCHULZ", 20 * [converging])
    generator = torch.Generator().manual_seed(0)
    shapes = [(32, 16), (32, 16), (16, 32), (24, 24)]
    start = [torch.randn(s, generator=generator) for s in shapes]
    ours, theirs = ([torch.nn.Parameter(p.clone()) for p in start] for _ in range(2))
    group = dict(params=ours, names=list("abcd"), kind="muon", lr=0.05, betas=(0.9, 0.0), weight_decay=0.3, split=())
    monkeypatch.setattr(model, "normalize_rows", lambda x: x)
    optimizer = Optimizer([group], ns_dtype=torch.bfloat16)
    oracle = torch.optim.Muon(theirs, 0.05, 0.3, 0.9, ns_coefficients=converging, ns_steps=20)
    random_steps(optimizer, ours)
    random_steps(oracle, theirs)
    for a, b, p in zip(ours, theirs, start):
        assert ((a - b).norm() / (b - p).norm()) < 0.03
        momentum = oracle.state[b]["momentum_buffer"]
        assert ((optimizer.state[a]["momentum"] - momentum).norm() / momentum.norm()) < 0.03


def test_rows_are_made_even():
    x = torch.randn((3, 6, 4), generator=torch.Generator().manual_seed(0))
    x[1] *= 10
    x[1, 2] = 0
    even = normalize_rows(x)
    torch.testing.assert_close(even.norm(dim=(1, 2)), x.norm(dim=(1, 2)))
    lengths = even.norm(dim=-1)
    assert lengths[1, 2] == 0 and torch.equal(normalize_rows(torch.zeros(1, 2, 3)), torch.zeros(1, 2, 3))
    lengths[1, 2] = lengths[1, 0]
    torch.testing.assert_close(lengths, lengths[:, :1].expand(3, 6))
    torch.testing.assert_close(F.cosine_similarity(even, x, dim=-1), (x.norm(dim=-1) > 0).float())


def test_momentum_rises_over_300_steps():
    rising = [train_gpt.get_momentum(step, 0.95) for step in (0, 150, 299, 300, 10**6)]
    assert rising == pytest.approx([0.85, 0.9, 0.95 - 0.1 / 300, 0.95, 0.95])
    assert train_gpt.get_momentum(0, 0.5) == 0.5  # of a row of the table that wants less
    state = train_gpt.build(make_config(**TINY), start.launch(make_config(**TINY)), 257)
    batch, state.step = torch.zeros((16, 33), dtype=torch.int64), 150
    train_gpt.train_step(state, batch, 1.0)
    assert {group["momentum"] for group in state.optimizer.param_groups if group["kind"] == "muon"} == {rising[1]}


def test_muon_orthogonalizes_stacked_matrices_one_by_one():
    p = torch.nn.Parameter(torch.zeros(12, 4))
    p.grad = torch.randn(12, 4, generator=torch.Generator().manual_seed(0))
    expected = -torch.cat([normalize_rows(newton_schulz(part[None]))[0] for part in p.grad.split(4)])
    Optimizer(
        [dict(params=[p], names=["p"], kind="muon", lr=1.0, betas=(0.95, 0.0), weight_decay=0.0, split=(4, 4, 4))]
    ).step()
    torch.testing.assert_close(p.detach(), expected, rtol=1e-4, atol=1e-5)


def test_adam_against_torch():
    start = torch.randn(20, 10)
    ours, theirs = torch.nn.Parameter(start.clone()), torch.nn.Parameter(start.clone())
    group = dict(params=[ours], names=["a"], kind="adam", lr=0.02, betas=(0.8, 0.95), weight_decay=0.3, split=())
    random_steps(Optimizer([group]), [ours])
    random_steps(torch.optim.AdamW([theirs], lr=0.02, betas=(0.8, 0.95), weight_decay=0.3, eps=1e-10), [theirs])
    torch.testing.assert_close(ours, theirs)


def test_optimizer_one_by_one_is_the_same():
    states, cfg = {}, make_config(**TINY)
    batch = torch.randint(257, (16, 33), generator=torch.manual_seed(0))
    for fused in (True, False):
        states[fused] = train_gpt.build(cfg, start.launch(cfg), 257)
        states[fused].optimizer.fused = fused
        for _ in range(3):
            train_gpt.train_step(states[fused], batch, 1.0)
    for p, q in zip(states[True].raw_model.parameters(), states[False].raw_model.parameters()):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("kind", ["muon", "adamw"])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_skipped_update_leaves_no_trace(bad, kind, offload):
    def after(*plan):
        """Weights and state after updates from the gradients with these numbers; None is a bad one, to be skipped."""
        gpt = random_gpt()
        optimizer = Optimizer(model.optimizer_groups(gpt, kind, 0.02, 0.01, 0.1), offload=offload)
        for number in plan:
            generator = torch.Generator().manual_seed(number or 0)
            for p in gpt.parameters():
                p.grad = torch.randn(p.shape, generator=generator)
                p.grad.flatten()[1:3] *= bad if number is None else 1
            optimizer.step(torch.tensor(number is None))
        return [*gpt.parameters(), *(v for p in gpt.parameters() for v in optimizer.state[p].values())]

    for plan in ((None, 1, 2), (1, None, None, 2), (1, 2, None)):
        assert all(torch.equal(a, b) and a.isfinite().all() for a, b in zip(after(*plan), after(1, 2))), plan


def test_every_parameter_has_exactly_one_role():
    gpt = random_gpt()
    for optimizer in ("muon", "adamw"):
        groups = model.optimizer_groups(gpt, optimizer, 0.02, 0.004, 0.1)
        names = [name for group in groups for name in group["names"]]
        assert sorted(names) == sorted(name for name, _ in gpt.named_parameters())
    gpt.blocks[0].gate = torch.nn.Parameter(torch.zeros(3))
    with pytest.raises(ValueError, match="blocks.0.gate matches (0 rows|no row) of PARAM_TABLE"):
        model.optimizer_groups(gpt, "muon", 0.02, 0.004, 0.1)


def test_schedule():
    cfg = make_config(max_steps=100, warmup_frac=0.1, cooldown_frac=0.5)
    scales = [train_gpt.get_lr_multiplier(step, cfg) for step in range(100)]
    assert scales[0] == pytest.approx(0.1) and scales[9:51] == [1.0] * 42 and scales[75] == pytest.approx(0.5)
    assert scales[-1] == pytest.approx(0.02) and min(scales) > 0
    assert train_gpt.get_lr_multiplier(99, make_config(max_steps=100, cooldown_frac=0)) == 1.0
