"""The model and how it is computed, against definitions in float64 and PyTorch's own operations."""

import contextlib
import copy
import itertools
import math
import re
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import model
import sample
from common.errors import run_command
from conftest import (
    add_noise,
    assert_weights_equal,
    built,
    compile_with,
    final,
    random_gpt,
    rows,
    tiny_run,
)
from inference import decode, int8
from inference.decode import Repeats, compile_decode_step, decode_step, sample_token
from inference.generation import NO_CACHE, KVCache, cache_is_exact, generate
from inference.int8 import Int8Weight, quantize
from model import GPT, GPTConfig, attention, cross_entropy, may_attend
from ops.attention import attention_mask
from ops.compile import apply_compile
from ops.cross_entropy import FusedCrossEntropy, bounded_cross_entropy
from ops.elementwise import CpuLeakyReLUSquared, CpuRMSNorm
from ops.fp8 import Fp8Linear, apply_fp8
from ops.loss import chunked_loss
from ops.recompute import apply_recompute
from test_train import relative
from tests.edit_cases import Plain, rms_norm

ON_GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


def tokens(n=2, length=24, size=70, seed=0) -> torch.Tensor:
    return torch.randint(size, (n, length), generator=torch.Generator().manual_seed(seed))


def assert_exact(ours, exact, inputs, grad, dtype, most, backward=True) -> None:
    """Value and gradients of ours in this dtype are those of exact in float64.

    grad: of the value. most: the norm of an error, relative to that of what is expected.
    """
    found = []
    for function, computed_in in ((ours, dtype), (exact, torch.float64)):
        leaves = [t.to(dtype).to(computed_in, copy=True).requires_grad_(backward) for t in inputs]
        found.append([function(*leaves)])
        if backward:
            found[-1] += torch.autograd.grad(found[-1], leaves, grad.to(found[-1][0].dtype))
    for got, want in zip(*found):
        assert relative(got, want, 1e-4) < most
    assert all(got.dtype == dtype for got in found[0][1:])


# --------------------------------------------------------------------------------------------------
# Attention


def explicit_mask(idx: torch.Tensor, window: int, eot: int | None) -> torch.Tensor:
    """Which keys each query sees, bool (B, 1, T, T): those from `first` on."""
    seen = torch.zeros(len(idx), 1, idx.size(1), idx.size(1), dtype=torch.bool)
    for row, text in enumerate(idx.tolist()):
        document = 0
        for query, token in enumerate(text):
            document = query if token == eot else document
            first = max(document, query + 1 - (window or len(text)))
            seen[row, 0, query, first : query + 1] = True
    return seen.to(idx.device)


CLOSE = [(torch.float32, 1e-5), (torch.bfloat16, 0.02)]
CASES = [*itertools.product(["cpu"], ["sdpa", "math", "blocked", "flex"], CLOSE)]
for backend in ("flash", "cudnn", "efficient", "flex", "varlen"):
    CASES.append(pytest.param("cuda", backend, (torch.bfloat16, 0.03), marks=ON_GPU))


@pytest.mark.parametrize("window, eot", [(0, None), (40, None), (40, 3), (999, 3)])
@pytest.mark.parametrize("device, backend, close", CASES)
def test_attention_against_pytorchs_with_a_mask(device, backend, close, window, eot):
    if backend == "flash" and window:
        pytest.skip("flash takes no mask")
    generator, length = torch.Generator().manual_seed(0), 290 if device == "cpu" else 256
    *qkv, dy = torch.randn(4, 2, 3, length, 64, generator=generator).to(device)
    idx = tokens(2, length, 50).to(device)
    exact_mask = explicit_mask(idx, window, eot)
    mask = attention_mask(backend, may_attend, idx, window, eot)
    backward = (backend, device) != ("flex", "cpu")  # it has none there
    assert_exact(
        lambda q, k, v: attention(q, k, v, mask, backend, window),
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, exact_mask),
        qkv,
        dy,
        *close,
        backward=backward,
    )


# --------------------------------------------------------------------------------------------------
# The model


@pytest.mark.parametrize(
    "shape",
    [
        dict(),
        dict(window="SSL:4"),
        dict(window="S", softcap=0.0, n_head=1),
        dict(ngram=4, ngram_rows=50),
        dict(n_layer=10),
    ],
)
def test_model_against_its_description(shape):
    gpt, idx, targets = random_gpt(**shape), tokens(), tokens(seed=1)
    targets[0, :9] = -1
    exact = Plain({name: w.double() for name, w in gpt.state_dict().items()}, gpt.cfg)
    torch.testing.assert_close(gpt(idx).double(), exact.logits(idx), rtol=1e-4, atol=1e-4)
    loss = gpt(idx, targets).double()
    torch.testing.assert_close(loss, exact.loss(idx, targets), rtol=1e-5, atol=1e-5)
    assert gpt(idx, targets.fill_(-1)).item() == 0


def test_a_new_model_gives_all_tokens_the_same_probability():
    new = GPT(GPTConfig(vocab_size=70, seq_len=24, n_layer=3, n_head=2, n_embd=32, ngram=2))
    assert new(tokens(), tokens(seed=1)).item() == pytest.approx(math.log(70))
    trained = random_gpt(std=0.2).eval()
    text = trained.generate(tokens()[:, :9], 5, temperature=0)
    assert torch.equal(text[:, 9:], trained(text)[:, 8:-1].argmax(-1))


def test_flops_against_a_counter():
    for window, attended in (("L", 12.5), ("S:5", (1 + 2 + 3 + 4 + 20 * 5) / 24)):
        gpt, idx = random_gpt(window=window), torch.zeros((1, 24), dtype=torch.int64)
        with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
            gpt(idx, idx).backward()
        # The counter sees a full square of scores, 24 keys a query
        counted = counter.get_total_flops() / 24
        expected = counted - 3 * 12 * 32 * (24 - attended)
        assert gpt.flops_per_token() == pytest.approx(expected, rel=1e-6)


# --------------------------------------------------------------------------------------------------
# Loss


def exact_loss(logits, targets, softcap: float) -> torch.Tensor:
    logits = logits.double()
    if softcap:
        logits = softcap * torch.tanh(logits / softcap)
    return F.cross_entropy(logits, targets, ignore_index=-1)


FUSED = (FusedCrossEntropy.apply, bounded_cross_entropy)


@pytest.mark.parametrize(
    "close", [(torch.float32, 1e-4), (torch.bfloat16, 2**-8), (torch.float16, 2**-10)]
)
@pytest.mark.parametrize("scale", [1.0, 1e4])
@pytest.mark.parametrize(
    "function, softcap",
    [(cross_entropy, 0.0), (cross_entropy, 80.0), *itertools.product(FUSED, (0.7, 30.0))],
)
def test_cross_entropy_and_its_gradient_in_float64(function, softcap, scale, close):
    """The page's and those that are put in its place; sure mistakes, masked targets."""
    generator = torch.Generator().manual_seed(0)
    logits = (scale * torch.randn(20, 50, generator=generator)).to(close[0])
    targets = torch.cat([torch.randint(-1, 50, (18,), generator=generator), logits[18:].argmin(-1)])
    targets[:2] = -1
    assert_exact(
        lambda logits: function(logits, targets, softcap),
        lambda logits: exact_loss(logits, targets, softcap),
        [logits],
        torch.tensor(3.0),
        *close,
    )


def test_chunks_of_the_loss_have_their_size():
    """And may have no targets; unused and frozen parameters may be listed."""
    x, w = torch.ones(48, 16, requires_grad=True), torch.ones(30, 16, requires_grad=True)
    listed, n_rows = [w, torch.ones(1, requires_grad=True), torch.ones(1)], []

    def function(x, y):
        n_rows.append(len(x))
        return cross_entropy(x @ w.T, y, 15.0)

    for target, expected in ((0, math.log(30)), (-1, 0)):
        loss = chunked_loss(function, listed, x, torch.full((48,), target), chunk=7)
        assert loss.item() == pytest.approx(expected)
        assert all(g.any() == (target == 0) for g in torch.autograd.grad(loss, (x, w)))
    assert n_rows == 2 * [*[7] * 6, 6]


@pytest.mark.parametrize("close", [(torch.bfloat16, 0.02), (torch.float16, 0.01)])
@pytest.mark.parametrize("softcap, certain", [(0.0, 14.0), (15.0, 60.0)])
def test_chunks_in_16_bits_are_close_and_small_probabilities_add_up(softcap, certain, close):
    """Nearly all tokens of the vocabulary have 1e-7 each, which fp16 holds to one digit."""
    generator = torch.Generator().manual_seed(0)
    x, likely, rest = (torch.randn(n, 16, generator=generator) / 3 for n in (40, 9, 65527))
    targets = torch.randint(-1, 9, (40,), generator=generator)
    shift = torch.where(torch.arange(65536) < 9, certain, 0.0)

    def logits(x, *w):
        return x @ torch.cat(w).T + shift.to(x.dtype)

    def ours(x, *w):
        def loss_of(x, y):
            return cross_entropy(logits(x, *w), y, softcap)

        return chunked_loss(loss_of, w, x, targets, chunk=16)

    def exact(x, *w):
        return exact_loss(logits(x, *w), targets, softcap)

    scaled = torch.tensor(65536.0)  # as by GradScaler
    assert_exact(ours, exact, [x, likely, rest], scaled, *close)


@torch.no_grad()
def test_ngrams_end_at_documents():
    gpt, idx = random_gpt(ngram=3, ngram_rows=1 << 20), torch.tensor([[5, 6, 7, 8, 9, 4, 5, 6, 7]])
    parts = [gpt.embed(part, part.size(1)) for part in idx.split((5, 4), 1)]
    gpt.eot = 4  # starts a document
    assert torch.equal(gpt.embed(idx, 9), torch.cat(parts, 1))


@pytest.mark.parametrize("window, head", [("L", 2), ("SL:8", 1), ("S:8", 2)])
def test_a_layer_starts_by_looking_for_what_followed(window, head, monkeypatch):
    found, gpt = [], random_gpt(n_embd=64, window=window)
    model.init_weights(gpt, seed=0)

    def watch(q, k, v, *_):
        free = slice(gpt.cfg.rotary_dim, None)  # dimensions that are not rotated
        likeliest = (q[..., free] @ k[..., free].mT).argmax(-1)
        found.append(likeliest[0, :, 12:23] == torch.arange(1, 12))
        return v

    monkeypatch.setattr(model, "attention", watch)
    gpt(torch.arange(12).repeat(2)[None])
    assert found.pop(head).all()
    assert max(layer.float().mean() for layer in found) < 0.4


def test_dropped_ngrams():
    idx, gpt = tokens(8), random_gpt(ngram=2, ngram_rows=1 << 16)
    words, whole = gpt.wte(idx), gpt.embed(idx, 24)
    gpt.ngram_dropout, dropped = 0.4, 0
    for gpt.step_seed in range(100):
        got = gpt.embed(idx, 24)
        is_dropped = (got == words).all(-1)
        expected = torch.where(is_dropped[..., None], words, words + (whole - words) / 0.6)
        torch.testing.assert_close(got, expected)
        dropped = dropped + is_dropped / 100
        # Whatever rows are beside it
        assert torch.equal(gpt.embed(idx[3:5], 24), got[3:5])
    assert torch.equal(gpt.eval().embed(idx, 24), whole)
    assert dropped.mean() == pytest.approx(0.4, abs=0.015)  # of 19,200 draws: 4 standard deviations
    assert (dropped - 0.4).abs().max() < 0.25  # of each token


class Dropped(Plain):
    def block(self, x, i):
        x = x + F.dropout(self.attn(rms_norm(x + self.earlier), i), 0.2, self.training)
        return x + F.dropout(self.mixed_mlp(rms_norm(x + self.earlier), i), 0.2, self.training)


def test_dropout():
    """Of what attention and MLP add, the same when blocks are recomputed; nothing in evaluation."""
    cfg = GPTConfig(vocab_size=70, seq_len=24, n_layer=3, n_head=2, n_embd=32)
    gpt, idx = add_noise(GPT(cfg, dropout=0.2)), tokens()
    params = dict(gpt.named_parameters())
    torch.manual_seed(1)
    exact = torch.autograd.grad(Dropped(params, cfg).loss(idx, idx), params.values())
    for mode in ("none", "selective", "full"):
        for block in gpt.blocks:
            apply_recompute(block, mode)
        torch.manual_seed(1)
        grads = torch.autograd.grad(gpt(idx, idx), params.values())
        for ours, want in zip(grads, exact):
            torch.testing.assert_close(ours, want, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(gpt.eval()(idx), Plain(params, cfg).logits(idx))


# --------------------------------------------------------------------------------------------------
# Generation


def likeliest(gpt, prompts, n_tokens, **options) -> list[list[int]]:
    """The continuation of each prompt (B, T), of ids below 65."""
    options = dict(vocab_size=65, temperature=0) | options
    return torch.stack(list(generate(gpt, prompts, n_tokens=n_tokens, **options)), 1).tolist()


@torch.no_grad()
def likeliest_uncached(gpt, prompts, n_tokens, context) -> list[list[int]]:
    """From plain forward passes over all that was read, or as much as the model can."""
    idx = prompts[:, -context:]
    for _ in range(n_tokens):
        logits = gpt(idx[:, -gpt.cfg.seq_len :])
        idx = torch.cat((idx, logits[:, -1:, :65].argmax(-1)), 1)
    return idx[:, -n_tokens:].tolist()


@pytest.mark.parametrize(
    "shape, eot",
    [
        (dict(std=0.4), 3),
        (dict(std=0.4, window="SL:5", n_layer=10), None),
        (dict(std=0.5, ngram=3), None),
        (dict(std=0.4, ngram=4, window="SSL:7"), 3),
    ],
)
def test_generation_with_cache_is_generation_without(shape, eot):
    """Beyond 24 tokens, each layer has a window of them. Documents start at different places."""
    short, long = (random_gpt(**shape, seq_len=seq_len) for seq_len in (24, 100))
    long.windows = [window or 24 for window in short.windows]
    short.eot = long.eot = eot
    drawn = set()
    for length in (1, 9, 24, 40):
        prompts = tokens(3, length, seed=length)
        prompts[0, length // 2] = prompts[1, length - 1] = 3
        got = likeliest(short, prompts, 60)
        assert got == likeliest_uncached(long, prompts, 60, 24)
        drawn.update(*got)
    assert len(drawn) > 6


def test_the_cache_is_as_large_as_it_must_be():
    gpt, prompts = random_gpt(seq_len=400, n_layer=1, std=0.3), tokens(2, 9)
    assert likeliest(gpt, prompts, 200) == likeliest_uncached(gpt, prompts, 200, 400)


def test_without_a_cache_the_context_is_read_again():
    gpt, prompts = random_gpt(std=0.3), tokens(2, 9)
    drawn = likeliest(gpt, prompts, 40, use_cache=False)
    assert drawn == likeliest_uncached(gpt, prompts, 40, 24)
    with pytest.raises(ValueError, match="got 25 tokens; the model's context is 24"):
        gpt(tokens(length=25))


def would_repeat(text: list[int]) -> dict[int, int]:
    """The tokens that followed what the text ends with in its last 40, and its longest length."""
    found: dict[int, int] = {}
    for end in range(max(1, len(text) - 39), len(text)):
        length = 0
        while length < end and text[end - 1 - length] == text[-1 - length]:
            length += 1
        if length >= 4:
            found[text[end]] = max(length, found.get(text[end], 0))
    return found


@pytest.mark.parametrize("length", [1, 7, 60])
def test_tokens_that_lengthen_a_repeat_are_penalized(length, monkeypatch):
    monkeypatch.setattr(decode, "REPEAT_WINDOW", 40)
    text = tokens(3, 150, size=3, seed=length)
    text[2, 50] = 99  # an id that is never sampled
    repeats, logits = Repeats(text[:, :length]), torch.randn(3, 9)
    n_found = 0
    for i in range(length, 150):
        lowered = logits - repeats.penalize(logits, 2.5)
        for row, penalties in zip(text[:, :i].tolist(), lowered):
            found = penalties.nonzero()[:, 0].tolist()
            lengths = would_repeat(row)
            assert set(found) == lengths.keys() - {99}
            expected = [2.5 * 1.05 ** (lengths[token] - 4) for token in found]
            assert penalties[found].tolist() == pytest.approx(expected, rel=1e-4)
            n_found += len(found)
        repeats.append(text[:, i : i + 1])
    assert n_found > 50


def test_sampling_avoids_the_repeat_and_greedy_decoding_does_not(monkeypatch):
    logits = torch.zeros(1, 1, 65)
    logits[..., 2], logits[..., 7] = 1, 0.5
    monkeypatch.setattr(decode, "next_logits", lambda *_: logits)
    prompt = torch.arange(32)[None] % 5  # ends with 0 1, which 2 followed

    def drawn(**options) -> int:
        return likeliest(random_gpt(), prompt, 1, use_cache=False, **options)[0][0]

    assert drawn(temperature=1e-5) == 7
    assert drawn(temperature=1e-5, dry_multiplier=0) == drawn(temperature=0) == 2


@pytest.mark.parametrize(
    "ours, plain",
    [
        (CpuRMSNorm.apply, lambda x: F.rms_norm(x, (24,), eps=2**-23)),  # as in fp32
        (CpuLeakyReLUSquared.apply, lambda x: F.leaky_relu(x, 0.5).square()),
    ],
    ids=["norm", "leaky_relu_squared"],
)
def test_eager_functions_are_pytorchs(ours, plain):
    generator = torch.Generator().manual_seed(0)
    x, grad = torch.randn(2, 4, 7, 2, 24, generator=generator)[..., 1:, :]
    x[0, 0] = 0
    assert_exact(ours, plain, [x], grad, torch.float32, 1e-6)


def test_a_gradient_along_the_output_of_the_norm_is_right_in_bf16():
    """Against float64: what is left of it is small, and rounding before would spoil that."""
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(2, 512, 128, generator=generator)
    x = noise[0].bfloat16().requires_grad_()
    exact = x.detach().double().requires_grad_()
    y = F.rms_norm(exact, (128,), eps=2**-23)
    grad = (2 * y.detach() + 0.1 * noise[1]).bfloat16()
    (ours,) = torch.autograd.grad(CpuRMSNorm.apply(x), x, grad)
    (expected,) = torch.autograd.grad(y, exact, grad.double())
    assert relative(ours, expected) < 0.01  # F.rms_norm: 0.002


def test_top_k_and_top_p_draw_from_the_likeliest():
    p = torch.tensor([0.5, 0.3, 0.15, 0.05])
    logits = p.log().roll(1).repeat(4000, 1)  # the likeliest is not the first
    draws = torch.rand((4000, 1), generator=torch.Generator().manual_seed(0))
    found = torch.bincount(sample_token(logits, draws, 1.0, 0, 1.0, 0.0)[:, 0])
    torch.testing.assert_close(found / 4000, p.roll(1), atol=0.03, rtol=0)
    draws[0], draws[1] = 0, 1 - 2**-24  # the ends of what torch.rand draws
    for top_k, top_p, min_p, n in (
        (2, 1.0, 0.0, 2),
        (0, 0.8, 0.0, 2),
        (0, 0.81, 0.0, 3),
        (0, 1e-9, 0.0, 1),
        (9, 1.0, 0.29, 3),
        (3, 1.0, 0.31, 2),
        (0, 1.0, 1.0, 1),
    ):
        drawn = sample_token(logits, draws, 1.0, top_k, top_p, min_p)
        assert sorted((drawn.unique() - 1) % 4) == list(range(n))


def test_a_compiled_step_serves_all_texts_and_multiplies_a_row_by_sums(monkeypatch):
    """Traced as the compiler does, without guards, and run by PyTorch."""
    traced = []

    def backend(graph, _):
        traced.append(graph.code)
        return graph

    compile_with(monkeypatch, backend)
    monkeypatch.setattr(int8, "FEW_ROWS", 0)  # the kernel for a few rows rounds them to bf16
    cases = (({}, 1, {}), ({}, 4, dict(temperature=1.0)), (dict(ngram=3), 1, {}))
    for shape, n_rows, options in cases:
        gpt = random_gpt(window="SL:5", n_layer=2, std=0.4, **shape)
        fast = copy.deepcopy(gpt)
        if shape:
            quantize(fast)
            round_weights(gpt)
        step = compile_decode_step(fast)
        for length in (1, 20):
            prompts = tokens(n_rows, length, seed=length)
            eager = likeliest(gpt, prompts, 30, **options)
            assert likeliest(fast, prompts, 30, step=step, **options) == eager
        kernels = {name for name in ("linear", "scaled_dot_product") if f".{name}" in traced[-1]}
        assert kernels == ({"linear"} if n_rows > 1 else set())
    # A cache may be sampled in another way
    token = torch.tensor([[1]])
    arguments = gpt, token, KVCache(gpt, 1), Repeats(token), torch.full((1, 1), 0.99)
    options = dict(vocab_size=65, top_k=0, top_p=1.0, min_p=0.0, dry_multiplier=0.0)
    decode_step(*arguments, temperature=0, **options)
    colder, hotter = (step(*arguments, temperature=t, **options).item() for t in (0.0, 1e6))
    assert colder != hotter


@torch.no_grad()
def round_weights(gpt) -> None:
    """To what int8 stands for."""
    for p in gpt.parameters():
        if p.dim() == 1:
            continue
        stored = Int8Weight(p)
        q, scale = stored.weight_int8, stored.weight_scale
        rounded = q * scale[:, None]
        assert q.abs().amax(1).eq(127).all()
        assert (rounded - p).abs().le(scale[:, None] * 0.5001).all()
        p.copy_(rounded)


@pytest.mark.parametrize("shape", [dict(ngram=3), dict(n_embd=24)])
@torch.no_grad()
def test_int8_is_close(shape):
    """To the model of the rounded weights."""
    gpt, idx = random_gpt(**shape, vocab_size=128, loss_chunk=16), tokens(size=128)
    whole, n_bytes = quantize(copy.deepcopy(gpt)), sum(p.nbytes for p in gpt.parameters())
    round_weights(gpt)
    torch.testing.assert_close(whole(idx), gpt(idx), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(whole(idx, idx), gpt(idx, idx), rtol=1e-4, atol=1e-4)
    few = torch.randn(3, gpt.cfg.n_embd)  # the kernel of few rows computes in bf16
    torch.testing.assert_close(whole.head(few), few @ whole.head.weight.T, rtol=0.01, atol=0.02)
    assert sum(b.nbytes for b in whole.state_dict().values()) < 0.32 * n_bytes


# --------------------------------------------------------------------------------------------------
# Checkpointing, the compiler, float8, fp16, malloc


@contextlib.contextmanager
def saved_for_backward():
    """Yields the storages (address: bytes) that autograd keeps for backward."""
    storages = {}

    def note(tensor):
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        yield storages


def test_checkpointing_keeps_fewer_bytes_and_leaves_matmuls_alone():
    gpt, idx = random_gpt(n_layer=6), tokens(8)
    kept, flops = {}, {}
    weights = {p.untyped_storage().data_ptr() for p in gpt.parameters()}
    for mode in ("none", "selective", "full", "none"):
        for block in gpt.blocks:
            apply_recompute(block, mode)
        with saved_for_backward() as storages:
            loss = gpt(idx, idx)
        kept[mode] = sum(size for pointer, size in storages.items() if pointer not in weights)
        with FlopCounterMode(display=False) as counter:
            loss.backward()
        flops[mode] = counter.get_total_flops()
        assert type(copy.deepcopy(gpt).blocks[0]).__name__ == "Block"
    # But for the outputs of matmuls, kept apart
    assert max(kept["full"], kept["selective"]) < 0.2 * kept["none"], kept
    assert flops["selective"] == flops["none"] < flops["full"], flops


def test_what_is_compiled_can_be_traced(monkeypatch):
    """As one graph each, with all that flags add to them, as for a GPU; on a CPU."""

    def scaled_mm(a, b, scale_a, scale_b, out_dtype, use_fast_accum):
        return ((a.float() * scale_a) @ (b.float() * scale_b)).to(out_dtype)

    monkeypatch.setattr(torch, "_scaled_mm", scaled_mm)
    compile_with(monkeypatch, "aot_eager")
    shape = dict(n_layer=1, vocab_size=80, window="S:9", ngram=3)
    gpt, idx = random_gpt(compute_dtype=torch.bfloat16, loss_chunk=16, **shape), tokens(size=80)
    gpt.eot, gpt.ngram_dropout, gpt.attn_backend = 3, 0.2, "blocked"
    apply_fp8(gpt)
    apply_recompute(gpt.blocks[0], "selective")
    params, want = list(gpt.parameters()), gpt(idx, idx)
    want_grads = torch.autograd.grad(want, params)
    apply_compile(gpt, "default")
    for ours, exact in zip(torch.autograd.grad(gpt(idx, idx), params), want_grads):
        assert (ours - exact).norm() <= 0.1 * exact.norm()
    with torch.no_grad():
        assert gpt(idx, idx).item() == pytest.approx(want.item(), rel=0.01)


def test_budget_of_the_compiler_acts(monkeypatch):
    kept, idx = {}, torch.zeros((8, 32), dtype=torch.int64)
    compile_with(monkeypatch, "aot_eager_decomp_partition")
    for budget in ("0.1", "0.3"):
        state = built(compile="default", checkpointing=budget, loss_chunk=100, n_layer=1)
        with saved_for_backward() as storages:
            state.raw_model(idx, idx).backward()
        kept[budget] = sum(storages.values())
    assert kept["0.1"] < 0.9 * kept["0.3"], kept


@pytest.mark.parametrize("device, n_graphs", [("cpu", 1), ("cuda", 2)])
def test_blocks_share_a_compilation_and_evaluation_has_its_own(device, n_graphs, monkeypatch):
    """In eval mode and without gradients, as what people add to a block may ask for."""
    monkeypatch.setattr(model, "cross_entropy", lambda *args: 2 * cross_entropy(*args))  # an edit
    gpt, idx = random_gpt(loss_chunk=24, n_layer=2), tokens()
    counter, params = CompileCounterWithBackend("aot_eager"), list(gpt.parameters())
    want = gpt(idx, idx)
    want_grads = torch.autograd.grad(want, params)
    compile_with(monkeypatch, counter)
    with monkeypatch.context() as patch:
        patch.setattr(GPT, "device", torch.device(device))
        apply_compile(gpt, "default")
    grads = torch.autograd.grad(gpt(idx, idx), params)
    torch.testing.assert_close(grads, want_grads, rtol=1e-4, atol=1e-6)
    assert counter.frame_count == 2  # a block, and the loss
    gpt.eval()
    for _ in range(2):
        with torch.no_grad():
            torch.testing.assert_close(gpt(idx, idx), want.detach())
        assert counter.frame_count == 2 + n_graphs  # on a CPU the loss only in training


SINCE_2_12 = pytest.mark.skipif(torch.__version__ < "2.12", reason="no float8 matmul on CPUs")


# e4m3 has 3 bits of mantissa: a number moves by 2**-4 at most, by 0.026 in root mean square, a
# product by 0.037.
@pytest.mark.parametrize(
    "device", [pytest.param("cpu", marks=SINCE_2_12), pytest.param("cuda", marks=ON_GPU)]
)
def test_fp8_products_are_close(device):
    torch.manual_seed(0)
    sizes = torch.tensor([0.0, 1e-20, 1e-4, 1.0, 300.0, 1e6, 1e30])[torch.arange(64) % 7, None]
    x, w, grad = torch.randn(64, 256), torch.randn(48, 256), torch.randn(64, 48)
    w[3] = 0
    inputs = (sizes * x, w, (sizes.flip(0) * grad).clamp(max=1e4))
    x, w, grad = (t.to(device, torch.bfloat16).requires_grad_() for t in inputs)
    got = Fp8Linear.apply(x.view(4, 16, 256), w).flatten(0, 1)
    dx, dw = torch.autograd.grad(got, (x, w), grad)
    # e4m3, and e5m2. Each row has its scale; rows of zeros stay zeros
    wants = ((got, x.float() @ w.float().T, 0.06), (dx, grad.float() @ w.float(), 0.12))
    for ours, exact, most in wants:
        error = (ours - exact).double().norm(dim=-1)
        assert ours.isfinite().all() and (error <= most * exact.double().norm(dim=-1)).all()
    assert torch.equal(dw, grad.T @ x)


@SINCE_2_12
def test_fp8_takes_layers_by_their_type():
    gpt, idx = random_gpt(compute_dtype=torch.bfloat16, vocab_size=80), tokens(size=80)
    gpt.blocks[0].mlp.narrow = model.Linear(24, 8)  # 16 does not divide these
    before = gpt(idx, idx).item()
    apply_fp8(gpt)
    linears = [(name, m) for name, m in gpt.named_modules() if isinstance(m, model.Linear)]
    expected = [f"blocks.{i}.mlp.{name}" for i in range(3) for name in ("fc", "proj")]
    assert [name for name, m in linears if m.matmul is not F.linear] == [*expected, "head"]
    assert before != gpt(idx, idx).item() == pytest.approx(before, rel=0.02)


def test_fp16_skips_bad_steps_and_continues(data, noisy, tmp_path, monkeypatch):
    scaler = partial(torch.amp.GradScaler, init_scale=2.0**22)
    monkeypatch.setattr(torch.amp, "GradScaler", scaler)
    flags = dict(data=data, dtype="fp16", max_steps=12, save_every=6, keep="all")
    tiny_run(tmp_path / "run", init_from=noisy, **flags)
    saved, losses = final(tmp_path / "run"), rows(tmp_path / "run", "train_loss")
    assert saved["scaler"]["scale"] < 2.0**22 and losses[-1] < losses[0] - 0.5
    tiny_run(tmp_path / "again", resume=tmp_path / "run" / "ckpt_6.pt", **flags)
    assert_weights_equal(tmp_path / "again", tmp_path / "run")


# --------------------------------------------------------------------------------------------------
# Edits: what is refused, and what needs no word


def mix_into_mlp(monkeypatch, mix) -> None:
    forward = model.MLP.forward
    monkeypatch.setattr(model.MLP, "forward", lambda self, x: forward(self, x + mix(x)))


def test_what_bypasses_the_cache_is_sampled_without_one(data, tmp_path, monkeypatch, capsys):
    mix_into_mlp(monkeypatch, lambda x: F.pad(x, (0, 0, 1, -1)))  # the token before
    tiny_run(tmp_path, data=data, max_steps=4, sample_every=2)
    log = (tmp_path / "log.txt").read_text()
    title = r"--- sample at step \d: validation text >>> the model's continuation\n"
    assert len(re.findall(title + r"\(sampling without a KV cache", log)) == 2
    capsys.readouterr()
    assert run_command(sample.main, [str(tmp_path), "--max_new_tokens=40"]) == 0
    assert capsys.readouterr().err.startswith(NO_CACHE + "\n")


def test_a_cache_that_an_edit_cannot_use_is_not_exact(monkeypatch):
    gpt = random_gpt(std=0.3).eval()
    assert cache_is_exact(gpt)
    mix_into_mlp(monkeypatch, lambda x: 0 * x[:, 1][:, None])  # a single token has no second
    assert not cache_is_exact(gpt)


def test_an_edit_of_may_attend_masks_without_a_window_too():
    mask = attention_mask("sdpa", lambda q, k, *_: may_attend(q, k, 3), tokens(), 0, None)
    assert torch.equal(mask, explicit_mask(tokens(1), 3, None)[0, 0])
