"""The optimizer against SVD, PyTorch's AdamW, and plain loops."""

import math

import pytest
import torch

import model
import ops.optimizer
import train_gpt
from conftest import built, groups_of, random_gpt, some_batch
from model import PARAM_TABLE, Optimizer, ParamSpec, newton_schulz
from train_gpt import get_lr_multiplier, get_momentum, get_seq_len, make_config


@pytest.mark.parametrize("shape", [(40, 40), (64, 16), (16, 64)])
def test_newton_schulz_against_svd(shape):
    x = torch.randn(5, *shape, generator=torch.Generator().manual_seed(0))
    u, _, vt = torch.linalg.svd(x.double(), full_matrices=False)
    inside = u.mT @ newton_schulz(x).double() @ vt.mT  # diagonal, if the singular vectors are kept
    values = inside.diagonal(dim1=1, dim2=2)
    assert (inside - torch.diag_embed(values)).abs().max() < 2e-3
    least = 0.1 if shape[0] == shape[1] else 0.71  # square ones have tiny values
    assert least < values.min() and values.max() < 1.29
    assert newton_schulz(torch.zeros(2, 3, 4)).abs().max() == 0


def test_adam_against_torch():
    """Gradients change from step to step: only then does momentum show."""
    generator = torch.Generator().manual_seed(1)
    start = [torch.randn(20, 10), torch.randn(7), torch.randn(())]
    ours, theirs = ([torch.nn.Parameter(p.clone()) for p in start] for _ in range(2))
    settings = dict(lr=0.02, betas=(0.8, 0.95), weight_decay=0.3)
    optimizer = Optimizer([settings | dict(params=ours, kind="adam")])
    oracle = torch.optim.AdamW(theirs, **settings, eps=1e-10)
    for _ in range(6):
        for p, other in zip(ours, theirs):
            p.grad = other.grad = torch.randn(p.shape, generator=generator)
        optimizer.step()
        oracle.step()
    torch.testing.assert_close(ours, theirs)


def test_rmsprop_of_rows():
    """By its formula; weight decay is applied once it is 1 %, after three steps."""
    generator = torch.Generator().manual_seed(0)
    ours = torch.nn.Parameter(torch.randn(20, 10, generator=generator))
    group = dict(params=[ours], kind="rmsprop", lr=0.02, betas=(0.0, 0.9), weight_decay=0.2)
    optimizer = Optimizer([group])
    expected, mean_square = ours.detach().clone(), torch.zeros(20, 1)
    for step in range(6):
        ours.grad = torch.randn(20, 10, generator=generator)
        ours.grad[step::4] = 0
        mean_square = 0.9 * mean_square + 0.1 * ours.grad.square().mean(1, keepdim=True)
        expected *= 0.996**3 if step % 3 == 2 else 1
        expected -= 0.02 * ours.grad / mean_square.sqrt().clamp(min=1e-10)
        optimizer.step()
        torch.testing.assert_close(ours.detach(), expected)


def test_sparse_gradients_change_nothing(monkeypatch):
    found = []
    for sparse in (True, False):
        state = built(ngram=3, ngram_rows=999, embed_decay=1.5, grad_clip=0.1, micro_batch=4)
        assert state.raw_model.ngrams.sparse and not state.raw_model.wte.sparse
        state.raw_model.ngrams.sparse = sparse
        norms = [train_gpt.train_step(state, some_batch(), 0.5)[1] for _ in range(3)]
        found.append((norms, state.raw_model.state_dict()))
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-6)

    # An optimizer that takes dense gradients gets them
    assert not built(ngram=3, optimizer="adamw").raw_model.ngrams.sparse
    monkeypatch.setattr(
        train_gpt, "make_optimizer", lambda cfg, model: torch.optim.AdamW(model.parameters())
    )
    state = built(ngram=3)
    assert not state.raw_model.ngrams.sparse
    train_gpt.train_step(state, some_batch(), 0.5)


def test_schedules():
    cfg = make_config(max_steps=10, warmup_frac=0.5, cooldown_frac=0)
    assert [get_lr_multiplier(x, cfg) for x in (0.2, 0.99)] == pytest.approx([0.6, 1])
    cfg = make_config(short_frac=0.5, seq_len=64, batch_tokens=64)
    assert [get_seq_len(progress, cfg) for progress in (0.0, 0.49, 0.5, 1.0)] == [8, 8, 64, 64]
    rising = [get_momentum(step) for step in (0, 500, 1000, 10**6)]
    assert rising == pytest.approx([0.85, 0.9, 0.95, 0.95])


@torch.no_grad()
def plain_muon(groups: list[dict], momenta: dict) -> None:
    """Muon one matrix after the other, from its description."""
    for group in groups:
        for p in group["params"]:
            momentum = momenta[p].lerp_(p.grad, 1 - group["momentum"])
            nesterov = p.grad.lerp(momentum, group["momentum"])
            for w, x in zip(p.split(group["matrix_rows"]), nesterov.split(group["matrix_rows"])):
                x = newton_schulz(x[None])[0]
                even = x / x.norm(dim=1, keepdim=True) * x.norm() / math.sqrt(len(x))
                update = even * math.sqrt(max(1, len(w) / w.size(1)))
                w -= group["lr"] * (update + group["weight_decay"] * w)


ROWS = [
    ParamSpec(r".*\.mlp\.proj\.weight", lr_mul=2.0),
    ParamSpec(r".*\.attn\.proj\.weight", lr_mul=0.5),
]


@pytest.mark.parametrize("at_once", [ops.optimizer.MAX_STACK_NUMEL, 1])
def test_muon_is_a_plain_loop_over_matrices(at_once, monkeypatch):
    monkeypatch.setattr(ops.optimizer, "MAX_STACK_NUMEL", at_once)
    monkeypatch.setattr(model, "PARAM_TABLE", ROWS + PARAM_TABLE)
    found = []
    for plain in (False, True):
        gpt, generator = random_gpt(), torch.Generator().manual_seed(0)
        for block in gpt.blocks:
            block.attn.proj.matrix_rows = (8, 24)  # beside three in attn.qkv
        optimizer = Optimizer(groups_of(gpt, weight_decay=0.1))
        muon = [group for group in optimizer.param_groups if group["kind"] == "muon"]
        momenta = {p: torch.zeros_like(p) for group in muon for p in group["params"]}
        for step in range(4):
            for p in gpt.parameters():
                p.grad = torch.randn(p.shape, generator=generator)
            for group in muon:
                group["momentum"] = 0.95 - 0.1 / (step + 1)
            plain_muon(muon, momenta) if plain else optimizer.step()
        found.append([p.detach() for p in momenta])
    assert len(found[0]) == 4 * 3
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-5)
