"""What a PyTorch user expects of a page to edit: modes, buffers, frozen and unused parameters, other optimizers."""

import contextlib
import copy
import math
import os
import random
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import model as model_module
import ops.params
import sample
import train_gpt
from conftest import TINY, built, final, flags_of, random_gpt, rows, run_main, run_ranks, some_batch, tiny_run
from data.shards import UserError
from generation import GenerationError, check_cache, generate
from model import GPT, PARAM_TABLE, GPTConfig, Linear, ParamGroupSpec, optimizer_groups
from ops.attention import ATTENTION_BACKENDS, attention_mask, document_offsets, offsets_of_micro_batches
from ops.init import ModelError, normal
from ops.loss import kernel_fits
from ops.pointwise import norm
from runtime import minutes as minutes_room
from runtime import start
from runtime.checkpoint import read_checkpoint
from runtime.ranks import exit_process
from train_gpt import make_config, train

SHAPE = dict(vocab_size=64, seq_len=8, n_layer=2, n_head=2, n_embd=32)


# ---------------------------------------------------------------------------------------------------------------------
# A step waits for no GPU


class NoWaiting(TorchDispatchMode):
    """Fails on what would wait for a GPU, if the tensors were on one: numbers for Python, and shapes by content."""

    WAITS = "_local_scalar_dense nonzero masked_select _unique2 unique_dim unique_consecutive equal is_nonzero"

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.name().removeprefix("aten::").split(".")[0]
        by_mask = name == "index" and any(i is not None and i.dtype == torch.bool for i in args[1])
        assert name not in self.WAITS.split() and not by_mask, f"{func} waits"
        return func(*args, **(kwargs or {}))


STEPS = {
    "default": dict(),
    "AdamW": dict(optimizer="adamw", grad_clip=1.0),
    "bf16, chunked loss": dict(dtype="bf16", loss_chunk=64),
    "whole loss": dict(loss_chunk=0),
    "n-grams": dict(ngram=3, ngram_dropout=0.4),
    "documents, windows": dict(doc_mask=True, window="SL:8"),
    "varlen": dict(attn="varlen", doc_mask=True, window="SL:8"),
    "full": dict(checkpointing="full"),
    "selective": dict(checkpointing="selective"),
}


@pytest.mark.parametrize("case", STEPS)
def test_a_step_waits_for_no_gpu(case, monkeypatch):
    def varlen(q, k, v, mask):  # the offsets as a mask: there is no such kernel on a CPU
        starts, position = mask.cu_seqlens[:-1], torch.arange(q.size(0) * q.size(2))
        row = (position[:, None] >= starts).sum(1).view(q.size(0), -1)  # sequence or document of each token
        key = torch.arange(q.size(2))
        seen = (row[:, :, None] == row[:, None, :]) & (key <= key[:, None])
        if mask.window[0] >= 0:
            seen &= key >= key[:, None] - mask.window[0]
        return F.scaled_dot_product_attention(q, k, v, attn_mask=seen[:, None])

    monkeypatch.setitem(ATTENTION_BACKENDS, "varlen", varlen)
    cfg = make_config(**TINY | STEPS[case])
    state = train_gpt.build(cfg, start.launch(cfg), 257, 256)
    batch = some_batch()
    batch[:, ::5] = 256
    train_gpt.train_step(state, batch, 1.0)
    offsets = [] if case != "varlen" else [document_offsets(p[:, :-1], 256) for p in batch.split(state.micro_batch)]
    if offsets:  # of a batch on the host they are made there, where nothing waits
        monkeypatch.setattr(GPT, "offsets_of_micro_batches", lambda *_: [offsets])
    before = [p.detach().clone() for p in state.raw_model.parameters()]
    with NoWaiting():
        loss, _ = train_gpt.train_step(state, batch, 1.0)
    assert loss.isfinite() and not all(map(torch.equal, before, state.raw_model.parameters()))


def test_documents_by_offsets_are_those_of_the_mask(monkeypatch):
    tokens = some_batch(4)[:, :32]
    tokens[:, ::7] = 256
    tokens[1, 0] = 256
    tokens[2] = 5
    offsets = document_offsets(tokens, 256)
    starts = sorted({*range(0, 129, 32), *(tokens.flatten() == 256).nonzero()[:, 0].tolist()})
    assert offsets.dtype == torch.int32 and offsets.tolist() == starts
    for backend, eot, want in (("varlen", 256, 3), ("sdpa", 256, 0), ("varlen", None, 0)):
        model = SimpleNamespace(attn_backend=backend, doc_eot=eot, cos=torch.empty(0))
        parts = offsets_of_micro_batches(model, torch.cat([tokens, tokens[:, :1]], dim=1), 2)
        assert [len(p) for p in parts] == [2] * bool(want)
        for part, sequences in zip(*parts, tokens.split(2)) if parts else ():
            assert torch.equal(part, document_offsets(sequences, 256))


# ---------------------------------------------------------------------------------------------------------------------
# Modes


def test_training_and_evaluation_have_their_modes(data, tmp_path, monkeypatch):
    seen, forward = [], model_module.MLP.forward

    def noted(self, x):
        seen.append((self.training, torch.is_grad_enabled()))
        return forward(self, x)

    def build_and_forget(*args):
        state = build(*args)
        seen.clear()  # what the checks of a new model did
        return state

    build = train_gpt.build
    monkeypatch.setattr(train_gpt, "build", build_and_forget)
    monkeypatch.setattr(model_module.MLP, "forward", noted)
    tiny_run(tmp_path / "run", data=data, max_steps=2, eval_every=1, sample_every=1, checkpointing="full")
    assert set(seen) == {(True, True), (False, False)}
    assert seen[0] == (True, True) and seen[-1] == (False, False)


@pytest.mark.parametrize("compiled", [False, True])
def test_grad_mode_tells_the_truth_within_blocks(compiled, monkeypatch):
    """Compiled blocks too: evaluation is no training with its gradients thrown away."""
    forward = model_module.MLP.forward
    monkeypatch.setattr(model_module.MLP, "forward", lambda self, x: forward(self, x) * (1 + torch.is_grad_enabled()))
    gpt, idx = random_gpt(), torch.arange(48).view(2, 24)
    with torch.no_grad():
        expected = gpt(idx, idx)
    assert gpt(idx, idx) != expected
    if compiled:
        for block in gpt.blocks:
            block.compiled = torch.compile(block.forward_with_ac, backend="eager", fullgraph=True)
    gpt(idx, idx).backward()
    with torch.no_grad():
        torch.testing.assert_close(gpt(idx, idx), expected)


def test_evaluation_draws_the_same_every_time(data, tmp_path, monkeypatch):
    """What an edit draws in evaluation, as masks of a denoising loss, neither depends on nor changes the training."""
    forward = GPT.forward

    def noisy(self, idx, targets=None, **rest):
        loss = forward(self, idx, targets, **rest)
        return loss if self.training or targets is None else loss * (1 + torch.rand(()))

    monkeypatch.setattr(GPT, "forward", noisy)
    for name, eval_every in (("often", 1), ("once", 0)):
        tiny_run(tmp_path / name, data=data, max_steps=4, eval_every=eval_every)
    assert rows(tmp_path / "often", "val_loss")[-1] == rows(tmp_path / "once", "val_loss")[-1]
    assert rows(tmp_path / "often", "train_loss") == rows(tmp_path / "once", "train_loss")


# ---------------------------------------------------------------------------------------------------------------------
# The loss


def test_the_kernel_computes_the_loss_that_stands_in_model_py():
    """Whoever changes the loss for good changes the kernel with it, and KERNEL_SOURCES in ops.py."""
    sources = (Linear.forward, GPT.logits, GPT.chunk_loss, model_module.cross_entropy)
    assert kernel_fits(*sources) and random_gpt().loss_kernel
    assert not kernel_fits(*sources[:-1], lambda logits, targets, training: logits.sum())


@pytest.mark.parametrize("what", ["cross_entropy", "subclass", "head", "hook"])
def test_an_edited_loss_keeps_its_chunks(what, monkeypatch):
    """Not by the kernel, which knows another loss; the logits of all tokens still never exist at once."""
    largest, cross_entropy, gpt = [], model_module.cross_entropy, random_gpt()
    assert gpt.loss_kernel

    def edited(logits, targets, training):
        largest.append(len(logits))
        return 0.5 * cross_entropy(logits, targets, training)

    if what == "cross_entropy":
        monkeypatch.setattr(model_module, "cross_entropy", edited)
    elif what == "subclass":
        gpt.__class__ = type("Cooler", (GPT,), dict(logits=lambda self, x: 0.5 * GPT.logits(self, x)))
    elif what == "head":
        gpt.head = nn.Linear(32, 70)
    else:
        gpt.head.register_forward_hook(lambda module, inputs, out: 0.5 * out)
    assert not gpt.loss_kernel
    idx = torch.arange(48).view(2, 24)
    expected = F.cross_entropy(gpt(idx).flatten(0, 1), idx.flatten(), reduction="sum")
    want = torch.autograd.grad(expected * (0.5 if what == "cross_entropy" else 1), gpt.parameters())
    for gpt.loss_chunk in (0, 10):
        for a, b in zip(want, torch.autograd.grad(gpt(idx, idx), gpt.parameters())):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    assert what != "cross_entropy" or largest[1:6] == [10, 10, 10, 10, 8]


def test_a_loss_that_is_a_mean_is_refused(data, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(
        model_module, "cross_entropy", lambda logits, targets, training: F.cross_entropy(logits, targets)
    )
    code, err = run_main(flags_of(TINY | dict(data=data, out_dir=tmp_path / "run")), capsys)
    assert code == 2 and err.count("\n") == 1 and "gives 1 times the loss for twice the tokens" in err


def loss_of_edit(edit: str):
    """A GPT.forward or a cross_entropy that is edited, in place of which to put it."""
    forward = GPT.forward

    def changed(self, idx, targets=None, **rest):
        out = forward(self, idx, targets, **rest)
        if edit == "pair":
            return out, None
        if targets is None:
            return out[:, -1:] if edit == "last" else out
        if edit == "last" or edit == "balance" and not self.training:
            return out
        if edit == "mean":
            return out / targets.numel()
        return out + 0.01 * (1 + self.wte(idx).mean())  # "balance", and "everywhere"

    losses = {
        "rows": lambda x, y, training: F.cross_entropy(x, y, ignore_index=-1, reduction="none"),
        "hundred": lambda x, y, training: F.cross_entropy(x, y, reduction="sum"),
        "focal": lambda x, y, training: -x.log_softmax(-1)[torch.arange(len(y)), y].sum(),
        "gather": lambda x, y, training: -x.log_softmax(-1).gather(1, y[:, None]).sum(),
        "noisy": lambda x, y, training: F.cross_entropy(x + torch.randn_like(x), y, ignore_index=-1, reduction="sum"),
    }
    return (model_module, "cross_entropy", losses[edit]) if edit in losses else (GPT, "forward", changed)


@pytest.mark.parametrize(
    "edit, says",
    [
        ("mean", "GPT.forward returns a loss of"),
        ("everywhere", "add what only training has where self.training is true"),
        ("balance", "times the loss for a batch that holds each sequence twice"),
        ("pair", "GPT.forward returns a tuple"),
        ("rows", r"cross_entropy in model.py returns a tensor of shape \(6,\)"),
        ("hundred", "Target -1 is out of bounds.; a target of -1 is not counted"),
        ("focal", "gives another loss with tokens whose target is -1"),
        ("gather", "a target of -1 is not counted"),
        ("last", r"GPT.forward returns a tensor of shape \(3, 1, 320\) for tokens of shape \(3, 32\)"),
        ("noisy", None),
    ],
)
def test_a_loss_that_is_no_sum_over_targets_is_refused(edit, says, monkeypatch):
    monkeypatch.setattr(*loss_of_edit(edit))
    with pytest.raises(ModelError, match=says) if says else contextlib.nullcontext():
        built()


def test_inputs_may_be_corrupted_in_place(monkeypatch):
    state, batch, targets = built(), some_batch(), []
    forward = state.raw_model.forward

    def corrupted(idx, y):
        idx.fill_(256)
        targets.append(y.clone())
        return forward(idx, y)

    state.model.forward = corrupted
    train_gpt.train_step(state, batch.clone(), 1.0)
    assert torch.equal(torch.cat(targets), batch[:, 1:])


def test_evaluation_is_a_mean_over_the_targets_that_count(data, monkeypatch):
    state, stream = built(), start.open_stream(make_config(**TINY, data=str(data)), start.launch(make_config(**TINY)))
    ops.checks.show_zeros(state.raw_model)
    batches, losses = list(stream.eval_batches(2048, 8, 0, 1)), []
    masked = [(x, np.where(np.arange(y.shape[1]) < 16, -1, y)) for x, y in batches]
    monkeypatch.setattr(stream, "eval_batches", lambda *_: iter(masked))
    for x, y in masked:
        logits, y = state.raw_model(torch.from_numpy(x)).detach(), torch.from_numpy(y).long()
        losses.append(
            F.cross_entropy(logits.flatten(0, 1), y.flatten(), ignore_index=-1, reduction="none")[y.flatten() >= 0]
        )
    assert train_gpt.evaluate(state, stream) == pytest.approx(torch.cat(losses).mean().item(), rel=1e-5)


def test_the_mean_is_over_the_targets_that_count():
    """As of F.cross_entropy(ignore_index=-1) over the whole batch, however unevenly micro-batches are masked."""
    state, batch = built(micro_batch=4), some_batch()
    with torch.no_grad():
        for p in state.raw_model.parameters():
            p.normal_(0, 0.1, generator=torch.Generator().manual_seed(1))
    x, y = batch[:, :-1], batch[:, 1:].clone()
    y[:6, 5:] = -1
    expected = F.cross_entropy(state.raw_model(x).flatten(0, 1), y.flatten(), ignore_index=-1)
    masked = torch.cat((x[:, :1], y), dim=1)  # the inputs are masked as well: token 0 stands for what is not counted
    want = [torch.autograd.grad(expected, state.raw_model.head.weight)[0]]
    step, seen = state.optimizer.step, []
    state.optimizer.step = lambda skip: seen.append(state.raw_model.head.weight.grad.clone()) or step(skip)
    forward = state.raw_model.forward
    order = iter(x.split(4))
    state.model.forward = lambda idx, targets: forward(next(order), targets)
    loss, _ = train_gpt.train_step(state, masked, 1.0)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    torch.testing.assert_close(seen, want, rtol=1e-4, atol=1e-7)


# ---------------------------------------------------------------------------------------------------------------------
# What would be lost: parameters, rates, draws, state


def test_a_copy_of_the_model_is_not_tied_to_its_compiled_blocks():
    gpt = random_gpt()
    gpt.blocks[0].compiled, gpt.compiled_loss = gpt.blocks[0].forward_with_ac, gpt.chunk_loss
    copied = copy.deepcopy(gpt)
    assert copied.blocks[0].compiled is copied.compiled_loss is None and gpt.compiled_loss and gpt.blocks[0].compiled


def test_a_parameter_that_no_group_has_is_refused():
    state = built()
    linear = state.raw_model.blocks[0].mlp.fc
    state.raw_model.blocks[0].mlp.fc = nn.Sequential(linear, nn.Linear(128, 128))
    with pytest.raises(UserError, match="blocks.0.mlp.fc.1.weight has a gradient and is in no parameter group"):
        train_gpt.train_step(state, some_batch(), 1.0)


def test_a_scheduler_of_pytorch_is_refused():
    state = built()
    torch.optim.lr_scheduler.StepLR(state.optimizer, 1)
    with pytest.raises(UserError, match="put the schedule into get_lr_multiplier"):
        train_gpt.train_step(state, some_batch(), 1.0)


@pytest.mark.parametrize("fill", [nn.init.zeros_, nn.init.trunc_normal_, nn.init.orthogonal_])
def test_values_that_the_table_replaces_are_refused(fill, monkeypatch):
    init = model_module.MLP.__init__

    def filled(self, cfg):
        init(self, cfg)
        fill(self.fc.weight)

    monkeypatch.setattr(model_module.MLP, "__init__", filled)
    with pytest.raises(ModelError, match="mlp.fc.weight is initialized again .* its row mlp_in of PARAM_TABLE"):
        random_gpt()
    monkeypatch.setitem(PARAM_TABLE, "mlp_in", PARAM_TABLE["mlp_in"]._replace(init="module"))
    random_gpt()


def test_pytorchs_own_modules_may_fill_what_they_made(monkeypatch):
    init = model_module.MLP.__init__

    def with_others(self, cfg):
        init(self, cfg)
        self.padded, self.heads = nn.Embedding(4, 4, padding_idx=0), nn.MultiheadAttention(4, 1)

    monkeypatch.setattr(model_module.MLP, "__init__", with_others)
    others = ParamGroupSpec(r".*\.(padded|heads)\..*", ops.init.zeros, "adam")
    monkeypatch.setitem(PARAM_TABLE, "others", others)
    random_gpt()


def test_weights_tied_when_the_table_has_been_read_are_refused(monkeypatch):
    init = GPT.__init__

    def tied(self, *args, **kwargs):
        init(self, *args, **kwargs)
        self.head.weight = self.wte.weight

    monkeypatch.setattr(GPT, "__init__", tied)
    with pytest.raises(ModelError, match="head.weight is the same parameter as wte.weight"):
        built()


def test_an_attribute_that_no_checkpoint_would_hold_is_refused(data, tmp_path, monkeypatch, capsys):
    step = train_gpt.train_step

    def with_average(state, *args):
        state.ema = 0
        return step(state, *args)

    monkeypatch.setattr(train_gpt, "train_step", with_average)
    code, err = run_main(flags_of(TINY | dict(data=data, out_dir=tmp_path / "run")), capsys)
    assert code == 1 and "'ema'" in err and "what is to survive a resume goes into state.extra" in err


@pytest.mark.parametrize("draw", [lambda: random.random(), lambda: np.random.rand(), lambda: torch.rand(())], ids="pnt")
def test_a_batch_that_draws_from_a_global_generator_is_refused(draw, data, tmp_path, monkeypatch, capsys):
    get_batch = train_gpt.get_batch
    monkeypatch.setattr(train_gpt, "get_batch", lambda *args: [draw(), get_batch(*args)][1])
    code, err = run_main(flags_of(TINY | dict(data=data, out_dir=tmp_path / "run")), capsys)
    assert code == 2 and err.count("\n") == 1 and "np.random.default_rng(derive_seed(stream.seed" in err


class Counting(torch.optim.SGD):
    """Keeps a number in its groups, as schedule-free optimizers and Prodigy do."""

    def step(self):
        for group in self.param_groups:
            group["k"] = group.get("k", 0) + 1
            group["lr"] /= group["k"]
        super().step()


def test_numbers_that_an_optimizer_keeps_in_its_groups_are_resumed(data, tmp_path, monkeypatch):
    def make_optimizer(cfg, model):
        return Counting(model.parameters(), lr=0.1, weight_decay=cfg.weight_decay)

    monkeypatch.setattr(train_gpt, "make_optimizer", make_optimizer)
    flags = dict(data=data, max_steps=6, save_every=2, keep=0, eval_every=0)
    tiny_run(tmp_path / "whole", **flags)
    for stop in (2, 4):
        (tmp_path / f"from {stop}").mkdir()
        saved = f"ckpt_{stop}.pt"
        (tmp_path / f"from {stop}" / saved).write_bytes((tmp_path / "whole" / saved).read_bytes())
        tiny_run(tmp_path / f"from {stop}", **flags, resume="newest", weight_decay=0.05)
        assert rows(tmp_path / f"from {stop}", "train_loss") == rows(tmp_path / "whole", "train_loss")[stop:]
    kept = read_checkpoint(tmp_path / "from 4" / "ckpt_6.pt")
    assert kept["optimizer_settings"] == [{"k": 6}]


def test_state_that_no_checkpoint_holds_is_told_in_a_sentence(data, tmp_path, monkeypatch, capsys):
    class Lists(torch.optim.SGD):
        def step(self):
            for group in self.param_groups:
                for p in group["params"]:
                    self.state[p]["factors"] = [torch.eye(2), torch.eye(2)]

    monkeypatch.setattr(train_gpt, "make_optimizer", lambda cfg, model: Lists(model.parameters(), lr=0.1))
    code, err = run_main(flags_of(TINY | dict(data=data, out_dir=tmp_path / "run", max_steps=2)), capsys)
    assert code == 2 and "the optimizer's factors of wte.weight is a list" in err


# ---------------------------------------------------------------------------------------------------------------------
# Attention and positions while text is drawn


def test_a_backend_that_changes_attention_is_refused(data, tmp_path, monkeypatch):
    from ops.attention import ATTENTION_BACKENDS

    def alibi(q, k, v, mask):
        position = torch.arange(q.size(2))
        return F.scaled_dot_product_attention(q, k, v, attn_mask=(position - position[:, None]).tril() * 0.1 + mask)

    def sharper(q, k, v, mask):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, scale=0.3)

    def own(q, k, v, mask):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)

    for name, function in dict(sharper=sharper, own=own).items():
        monkeypatch.setitem(ATTENTION_BACKENDS, name, function)
        monkeypatch.setitem(train_gpt.ATTENTION_BACKENDS, name, function)
    with pytest.raises(ModelError, match="--attn sharper computes something else than softmax attention"):
        gpt = random_gpt()
        gpt.attn_backend = "sharper"
        model_module.GPT.attention_masks  # noqa: B018
        ops.checks.check_attention(gpt)
    gpt.attn_backend = "own"
    ops.checks.check_attention(gpt)


MIXES = {  # what an MLP may add to its input, and what a page with it is told
    "mean": (lambda mlp, x: x.mean(1, keepdim=True), "tokens after it"),
    "next": (lambda mlp, x: torch.cat((x[:, 1:], x[:, -1:]), 1), "tokens after it"),
    "rolled": (lambda mlp, x: x.roll(1, 1), "tokens after it"),  # the last token comes before the first
    "gated": (lambda mlp, x: mlp.gate * x.mean(1, keepdim=True), "tokens after it"),  # by 0 at the start
    "rows": (lambda mlp, x: x.mean(0, keepdim=True), "in another sequence"),
    "sum": (lambda mlp, x: x.cumsum(1), None),
}


def mix_tokens(mix: str) -> None:
    """MLPs that see other tokens than attention shows them."""
    init, forward = model_module.MLP.__init__, model_module.MLP.forward

    def with_gate(self, cfg):
        init(self, cfg)
        self.gate = nn.Parameter(torch.zeros(1))

    model_module.MLP.__init__ = with_gate
    model_module.MLP.forward = lambda self, x: forward(self, x + MIXES[mix][0](self, x) + 0 * self.gate)
    model_module.PARAM_TABLE["gate"] = ParamGroupSpec(r"blocks\.\d+\.mlp\.gate", ops.init.zeros, "adam")


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("flags", [{}, dict(dtype="bf16", attn="blocked", checkpointing="full")], ids=["plain", "bf16"])
def test_a_model_that_sees_what_it_predicts_is_refused(mix, flags, monkeypatch):
    for name in ("__init__", "forward"):
        monkeypatch.setattr(model_module.MLP, name, getattr(model_module.MLP, name))
    monkeypatch.setattr(model_module, "PARAM_TABLE", PARAM_TABLE | dict(gate=None))
    mix_tokens(mix)
    with pytest.raises(ModelError, match=MIXES[mix][1]) if MIXES[mix][1] else contextlib.nullcontext():
        built(**flags)


@pytest.mark.parametrize("leaks", [False, True])
def test_a_model_that_sees_another_document_is_refused(leaks, monkeypatch):
    """Attention by hand, that is causal and knows of no documents."""
    if leaks:
        own = lambda q, k, v, mask, backend: F.scaled_dot_product_attention(q, k, v, is_causal=True)  # noqa: E731
        monkeypatch.setattr(model_module, "attention", own)
    cfg = make_config(**TINY, doc_mask=True)
    with pytest.raises(ModelError, match="with another document") if leaks else contextlib.nullcontext():
        train_gpt.build(cfg, start.launch(cfg), 257, 256)
    built()


def test_a_checked_model_is_what_it_was():
    """But for its weights; also where forward passes keep things, as masks of their length."""
    gpt = GPT(GPTConfig(**SHAPE))
    gpt.attn_backend = gpt.blocks[0].attn.backend = "blocked"
    gpt.kept, forward = [], gpt.forward
    hook = gpt.register_forward_hook(lambda *_: (gpt.kept.append(1), setattr(gpt, "mask", 1)) and None)
    before = {name: list(vars(module)) for name, module in gpt.named_modules()}
    model_module.check_model(gpt)
    assert (
        gpt.attn_backend == gpt.blocks[0].attn.backend == "blocked"
        and gpt.training
        and gpt.compute_dtype == torch.float32
    )
    assert {name: list(vars(module)) for name, module in gpt.named_modules()} == before and gpt.kept == []
    hook.remove()
    assert not gpt._forward_hooks and gpt.forward == forward


def own_generator(self, x):
    generator = torch.Generator().manual_seed(self.step_seed if self.training else 0)
    return x * (torch.rand(x.shape, generator=generator) > 0.1 * self.training)


def numpys_mask(self, x):
    return x * torch.from_numpy(np.random.rand(*x.shape) > 0.1 * self.training)


def decay(self, x):
    """A linear recurrence, which values above 1 would let grow without bounds."""
    state, out = torch.zeros_like(x[:, 0]), []
    for token in x.unbind(1):
        state = state * self.wte.weight.new_full((1,), 0.9) + token
        out.append(state)
    return torch.stack(out, dim=1)


def one_dtype(self, x):
    assert x.dtype == torch.bfloat16
    return x


def whole_chunks(self, x):
    assert x.size(1) in (1, 320), x.shape
    return x


@pytest.mark.parametrize(
    "edit, flags",
    [
        (own_generator, {}),
        (numpys_mask, {}),
        (decay, {}),
        (one_dtype, dict(dtype="bf16")),
        (whole_chunks, dict(seq_len=320, batch_tokens=2560)),
    ],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_models_that_only_seem_odd_are_built(edit, flags, monkeypatch):
    embed = GPT.embed
    monkeypatch.setattr(GPT, "embed", lambda self, *args: edit(self, embed(self, *args).to(self.compute_dtype)))
    built(**flags)


@pytest.mark.parametrize("filled", [-math.inf, -1e9])
def test_masked_logits_hide_no_leak(filled, monkeypatch):
    logits = GPT.logits
    monkeypatch.setattr(GPT, "logits", lambda self, x: logits(self, x).masked_fill(torch.arange(320) > 256, filled))
    built()
    monkeypatch.setattr(
        GPT,
        "logits",
        lambda self, x: logits(self, x + x.mean(1, keepdim=True)).masked_fill(torch.arange(320) > 256, filled),
    )
    with pytest.raises(ModelError, match="tokens after it"):
        built()


def test_a_bias_needs_a_backend_that_takes_it():
    bias = torch.zeros(2, 4, 4)
    for backend in ("flash", "flex", "varlen"):
        with pytest.raises(ModelError, match=f"--attn {backend} adds no bias"):
            attention_mask(backend, torch.zeros((1, 4), dtype=torch.int64), 0, None, bias)


@pytest.mark.parametrize("windows", [dict(), dict(window="SL:5")])
def test_a_bias_is_added_in_training_and_decoding(windows, monkeypatch):
    """T5's kind, learned: by a plain softmax over explicit scores, with every backend, and token by token."""

    def bias(self, query, key):
        apart = (query[..., :, None] - key[..., None, :]).clamp(0, 23)
        return self.table[apart].movedim(-1, -3)

    monkeypatch.setattr(GPT, "attention_bias", bias)
    monkeypatch.setattr(GPT, "table", torch.randn(24, 2, generator=torch.Generator().manual_seed(0)), raising=False)
    gpt, idx = random_gpt(std=0.3, **windows), torch.arange(48).view(2, 24)
    logits = {}
    for attn in ("sdpa", "math", "blocked"):
        gpt.attn_backend = attn
        for block in gpt.blocks:
            block.attn.backend = attn
        logits[attn] = gpt(idx)
    torch.testing.assert_close(logits["math"], logits["sdpa"])
    torch.testing.assert_close(logits["blocked"], logits["sdpa"], rtol=1e-4, atol=1e-4)
    check_cache(gpt.eval())
    monkeypatch.setattr(GPT, "attention_bias", lambda *_: None)
    assert not torch.allclose(gpt(idx), logits["sdpa"], atol=1e-2)


def test_what_bypasses_the_cache_is_refused_where_text_is_drawn(data, tmp_path, monkeypatch, capsys):
    """A look at the token before that decoding does not have: the text would come from another model."""
    monkeypatch.setattr(ops.params, "initial_weight", lambda name, shape, table, seed, made: torch.randn(shape) * 0.1)
    forward = model_module.MLP.forward
    monkeypatch.setattr(model_module.MLP, "forward", lambda self, x: forward(self, x + F.pad(x, (0, 0, 1, -1))))
    tiny_run(tmp_path / "run", data=data, max_steps=1, sample_every=1)
    assert "(failed: GenerationError: logits with a KV cache differ" in (tmp_path / "run" / "log.txt").read_text()
    capsys.readouterr()
    assert sample.main(["--run", str(tmp_path / "run"), "--max_new_tokens", "3"]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and "must pass through the cache" in err and "--no_cache" in err
    assert sample.main(["--run", str(tmp_path / "run"), "--max_new_tokens", "3", "--no_cache"]) == 0
    with pytest.raises(GenerationError):
        check_cache(random_gpt(std=0.3))


def test_learned_positions_that_end_are_told(monkeypatch):
    monkeypatch.setattr(GPT, "wpe", torch.randn(24, 32), raising=False)
    embed = GPT.embed
    monkeypatch.setattr(GPT, "embed", lambda self, tokens, position: embed(self, tokens, position) + self.wpe[position])
    gpt, prompt = random_gpt(std=0.3), torch.arange(5)
    with pytest.raises(GenerationError, match="set GPT.extrapolates to False"):
        list(generate(gpt, [prompt], 30, 70))
    monkeypatch.setattr(GPT, "extrapolates", False)
    assert len(list(generate(gpt, [prompt], 30, 70))) == 30


def test_a_layer_of_pytorchs_in_bf16_is_told(data, tmp_path, monkeypatch, capsys):
    init = model_module.MLP.__init__

    def plain(self, cfg):
        init(self, cfg)
        self.fc = nn.Linear(cfg.n_embd, 4 * cfg.n_embd, bias=False)

    monkeypatch.setattr(model_module.MLP, "__init__", plain)
    code, err = run_main(flags_of(TINY | dict(data=data, out_dir=tmp_path / "run", dtype="bf16")), capsys)
    assert code == 1 and err.count("\n") == 1 and "model.py, line" in err and "use model.Linear" in err


def test_numpys_draws_resume_and_are_recomputed(data, tmp_path, monkeypatch):
    forward = model_module.MLP.forward

    def noisy(self, x):
        return forward(self, x) * (np.random.uniform(0.5, 1.5) if self.training else 1.0)

    monkeypatch.setattr(model_module.MLP, "forward", noisy)
    monkeypatch.setattr(
        ops.params, "initial_weight", lambda name, shape, table, seed, made: torch.ones(shape).cumsum(0) % 7 * 0.03
    )
    flags = dict(data=data, max_steps=4, save_every=2, keep=0, micro_batch=16)
    tiny_run(tmp_path / "run", **flags)
    tiny_run(tmp_path / "full", **flags, checkpointing="full")
    assert rows(tmp_path / "full", "grad_norm") == pytest.approx(rows(tmp_path / "run", "grad_norm"), rel=1e-5)
    tiny_run(tmp_path / "half", **flags, resume=tmp_path / "run" / "ckpt_2.pt")
    assert rows(tmp_path / "half", "train_loss") == rows(tmp_path / "run", "train_loss")[2:]


# ---------------------------------------------------------------------------------------------------------------------
# Parameters: frozen, without a gradient, in two places, unknown to a checkpoint


def test_parameters_without_a_gradient_stay_as_they_are():
    """Adam's and Muon's, and their state, as torch.optim leaves them; the others move as if these were not there."""
    state, other = built(), built()
    for s in (state, other):
        train_gpt.train_step(s, some_batch(), 1.0)
    before = {name: p.detach().clone() for name, p in state.raw_model.named_parameters()}
    slots = {
        n: {k: t.clone() for k, t in state.optimizer.state[p].items()} for n, p in state.raw_model.named_parameters()
    }
    unused = ("wte.weight", "blocks.0.mlp.fc.weight")
    for s in (state, other):
        for name, p in s.raw_model.named_parameters():
            p.grad = None if name in unused and s is state else torch.ones_like(p)
        s.optimizer.step()
    for (name, p), theirs in zip(state.raw_model.named_parameters(), other.raw_model.parameters()):
        if name in unused:
            assert torch.equal(p, before[name])
            assert all(torch.equal(t, slots[name][k]) for k, t in state.optimizer.state[p].items())
        else:
            torch.testing.assert_close(p, theirs, rtol=1e-4, atol=1e-6)


def test_unfreezing_on_the_way(data, tmp_path, monkeypatch):
    """A parameter that is frozen for two steps has no state, starts with the third, and resumes exactly."""
    init = GPT.__init__

    def frozen(self, *args, **kwargs):
        init(self, *args, **kwargs)
        self.wte.requires_grad_(False)

    monkeypatch.setattr(GPT, "__init__", frozen)

    def thaw(state, loss):
        state.raw_model.wte.requires_grad_(state.step >= 2)

    flags = TINY | dict(data=str(data), max_steps=4, save_every=1, keep=0)
    train(make_config(**flags, out_dir=str(tmp_path / "run")), on_step=thaw)
    weights = [read_checkpoint(tmp_path / "run" / f"ckpt_{i}.pt") for i in (1, 2, 3)]
    assert torch.equal(weights[0]["model"]["wte.weight"], weights[1]["model"]["wte.weight"])
    assert not torch.equal(weights[1]["model"]["wte.weight"], weights[2]["model"]["wte.weight"])
    assert not weights[1]["optimizer"]["wte.weight"] and weights[2]["optimizer"]["wte.weight"]
    for at in (1, 3):  # still frozen, and thawed
        resumed = flags | dict(resume=str(tmp_path / "run" / f"ckpt_{at}.pt"), out_dir=str(tmp_path / f"from{at}"))
        monkeypatch.setattr(GPT, "__init__", frozen if at == 1 else init)
        train(make_config(**resumed), on_step=thaw)
        assert rows(tmp_path / f"from{at}", "train_loss") == rows(tmp_path / "run", "train_loss")[at:]


def test_tied_parameters_need_one_row(monkeypatch):
    init = GPT.__init__

    def tied(self, *args, **kwargs):
        check, model_module.check_param_table = model_module.check_param_table, lambda *_: None
        init(self, *args, **kwargs)
        model_module.check_param_table = check
        self.head.weight = self.wte.weight
        check(self, model_module.PARAM_TABLE, model_module.OPTIMIZERS)

    monkeypatch.setattr(GPT, "__init__", tied)
    with pytest.raises(ModelError, match=r'head.weight is the same .* "tied": ParamGroupSpec\(r"wte\\.weight\|head'):
        GPT(GPTConfig(**SHAPE))


def test_a_missing_row_has_an_example_with_a_name_of_its_own():
    for name, row in (("blocks.3.mlp.mix.weight", "mlp_mix_weight"), ("blocks.0.attn.mix.weight", "attn_mix_weight")):
        with pytest.raises(ModelError, match=f'"{row}": ParamGroupSpec'):
            model_module.param_spec_name(name, model_module.PARAM_TABLE)


def test_a_generator_of_ones_own_is_refused(monkeypatch):
    init = model_module.MLP.__init__

    def drawing(self, cfg):
        init(self, cfg)
        self.generator = torch.Generator()

    monkeypatch.setattr(model_module.MLP, "__init__", drawing)
    with pytest.raises(ModelError, match="blocks.0.mlp keeps a generator"):
        GPT(GPTConfig(**SHAPE))


def test_groups_differ_by_all_their_settings(monkeypatch):
    monkeypatch.setitem(PARAM_TABLE, "head", PARAM_TABLE["embedding"]._replace(pattern=r"head\.weight"))
    gpt = random_gpt()
    groups = optimizer_groups(gpt, "muon", 0.02, 0.006, 0.1)
    assert sorted(name for g in groups for name in g["names"]) == sorted(name for name, _ in gpt.named_parameters())
    assert {g["role"]: g["split"] for g in groups}["qkv"] == (32, 32, 32)
    assert len(groups) == len({g["role"] for g in groups})


def test_a_checkpoint_of_another_model_lists_the_names(data, tmp_path, monkeypatch, capsys):
    tiny_run(tmp_path / "run", data=data, max_steps=1)
    path = tmp_path / "run" / "ckpt_1.pt"
    init = model_module.MLP.__init__

    def scaled(self, cfg):
        init(self, cfg)
        self.scale = nn.Parameter(torch.ones(cfg.n_embd))

    with monkeypatch.context() as patch:
        patch.setattr(model_module.MLP, "__init__", scaled)
        patch.setitem(PARAM_TABLE, "scale", ParamGroupSpec(r".*\.scale", "module", "adam"))
        flags = flags_of(TINY | dict(data=data, max_steps=1, init_from=path))
        code, err = run_main([*flags, f"--out_dir={tmp_path / 'a'}"], capsys)
        assert code == 2 and err.count("\n") == 1 and "lacks blocks.0.mlp.scale, blocks.1.mlp.scale" in err
        assert "--init_partial" in err
        assert run_main([*flags, f"--out_dir={tmp_path / 'b'}", "--init_partial"], capsys)[0] == 0
        assert "not there: blocks.0.mlp.scale, blocks.1.mlp.scale" in (tmp_path / "b" / "log.txt").read_text()
    capsys.readouterr()
    assert sample.main(["--run", str(tmp_path / "b"), "--max_new_tokens", "3"]) == 2  # the page of before
    assert "has blocks.0.mlp.scale, blocks.1.mlp.scale, unknown here" in capsys.readouterr().err
    code, err = run_main([*flags_of(TINY | dict(data=data, out_dir=tmp_path / "c")), "--init_partial"], capsys)
    assert code == 2 and "--init_partial is about the weights that --init_from takes" in err


def test_partial_weights_name_what_differs(data, tmp_path):
    tiny_run(tmp_path / "run", data=data, max_steps=1)
    flags = dict(data=data, max_steps=1, init_from=tmp_path / "run", init_partial=True, n_layer=3, softcap=20)
    tiny_run(tmp_path / "more", **flags, muon_lr=1e-30, adam_lr=1e-30, weight_decay=0)
    said = (tmp_path / "more" / "log.txt").read_text()
    assert "not there: blocks.2.attn.qkv.weight" in said and "softcap 15.0 there and 20.0 here" in said
    ours, theirs = final(tmp_path / "more")["model"], final(tmp_path / "run")["model"]
    assert all(torch.allclose(ours[name], w, atol=1e-20) for name, w in theirs.items())


# ---------------------------------------------------------------------------------------------------------------------
# Optimizers and state of one's own


def test_any_optimizer_of_torch_will_do(data, noisy, tmp_path, monkeypatch):
    """SGD with momentum: as a plain loop, with skipped steps, resumed exactly, by one sentence from another's state."""

    def make_optimizer(cfg, model):
        return torch.optim.SGD(optimizer_groups(model, "adamw", 0.1, 0.1, 0.0), lr=0.1, momentum=0.8)

    monkeypatch.setattr(train_gpt, "make_optimizer", make_optimizer)
    flags = dict(data=data, max_steps=6, save_every=3, keep=0, cooldown_frac=0.0, micro_batch=16, loss_chunk=0)
    tiny_run(tmp_path / "run", **flags, init_from=noisy)
    cfg = make_config(**TINY | flags | dict(data=str(data)))
    gpt, dist_ctx = GPT(GPTConfig(**final(tmp_path / "run")["model_config"])), start.launch(cfg)
    gpt.load_state_dict(read_checkpoint(noisy)["model"])
    optimizer, stream = torch.optim.SGD(gpt.parameters(), lr=0.1, momentum=0.8), start.open_stream(cfg, dist_ctx)
    for step in range(6):
        batch = train_gpt.get_batch(stream, dist_ctx, step)
        loss = F.cross_entropy(gpt(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        assert rows(tmp_path / "run", "train_loss")[step] == pytest.approx(loss.item(), rel=1e-5)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    tiny_run(tmp_path / "half", **flags, resume=tmp_path / "run" / "ckpt_3.pt")
    assert rows(tmp_path / "half", "train_loss") == rows(tmp_path / "run", "train_loss")[3:]
    monkeypatch.undo()
    with pytest.raises(UserError, match="was made with SGD; give another checkpoint, or use --init_from"):
        tiny_run(tmp_path / "other", **flags, resume=tmp_path / "run" / "ckpt_3.pt")


def test_another_optimizer_skips_steps_that_are_not_finite(monkeypatch):
    monkeypatch.setattr(train_gpt, "make_optimizer", lambda cfg, model: torch.optim.AdamW(model.parameters(), lr=0.1))
    state = built()
    before = [p.detach().clone() for p in state.raw_model.parameters()]
    forward = GPT.forward
    with monkeypatch.context() as patch:
        patch.setattr(GPT, "forward", lambda self, *args: forward(self, *args) * math.nan)
        train_gpt.train_step(state, some_batch(), 1.0)
    assert all(torch.equal(a, p) for a, p in zip(before, state.raw_model.parameters())) and state.skipped[-1]
    train_gpt.train_step(state, some_batch(), 1.0)
    assert not any(torch.equal(a, p) for a, p in zip(before[:1], state.raw_model.parameters()))


def test_a_skipped_step_leaves_buffers_alone(monkeypatch):
    init, forward = GPT.__init__, GPT.forward

    def with_buffer(self, *args, **kwargs):
        init(self, *args, **kwargs)
        self.register_buffer("seen", torch.ones(()))

    def counting(self, idx, targets=None, **rest):
        loss = forward(self, idx, targets, **rest)
        if targets is None:
            return loss
        self.seen.add_(loss.detach() * self.factor)
        return loss * self.factor

    monkeypatch.setattr(GPT, "__init__", with_buffer)
    monkeypatch.setattr(GPT, "forward", counting)
    monkeypatch.setattr(GPT, "factor", 1.0, raising=False)
    state = built()
    monkeypatch.setattr(GPT, "factor", math.nan)
    train_gpt.train_step(state, some_batch(), 1.0)
    assert state.raw_model.seen == 1
    monkeypatch.setattr(GPT, "factor", 1.0)
    train_gpt.train_step(state, some_batch(), 1.0)
    assert 1 < state.raw_model.seen < math.inf


def test_minutes_leave_no_trace_in_buffers_and_extra_state(data, tmp_path, monkeypatch):
    init, forward, step = GPT.__init__, GPT.forward, train_gpt.train_step

    def with_buffer(self, *args, **kwargs):
        init(self, *args, **kwargs)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def counting(self, idx, targets=None, **rest):
        self.calls += self.training
        return forward(self, idx, targets, **rest)

    def noted(state, *args):
        state.extra["steps"] = state.extra.get("steps", 0) + 1
        return step(state, *args)

    monkeypatch.setattr(GPT, "__init__", with_buffer)
    monkeypatch.setattr(GPT, "forward", counting)
    monkeypatch.setattr(train_gpt, "train_step", noted)
    monkeypatch.setattr(minutes_room.Pace, "revise", lambda *_: False)
    chosen = (4, minutes_room.Pace(step_s=1.0, eval_s=0.0), "4")
    monkeypatch.setattr(minutes_room, "steps_within", lambda _, step, *rest: [step(i) for i in range(3)] and chosen)
    flags = {k: v for k, v in TINY.items() if k != "max_steps"} | dict(data=str(data), minutes=1.0)
    train(make_config(**flags, out_dir=str(tmp_path / "run")))
    saved = final(tmp_path / "run")
    assert saved["step"] == 4 and saved["model"]["calls"] == 8 and saved["extra"] == dict(steps=4)


def test_extra_state_is_saved_and_restored_as_it_was(data, tmp_path):
    kept = dict(tensor=torch.arange(3), deep=dict(a=[1, 2.5, "x", None, True]), **{"wte.weight": torch.zeros(257, 32)})
    seen = []

    def on_step(state, loss):
        seen.append({k: v for k, v in state.extra.items()})
        state.extra.update(kept)

    flags = TINY | dict(data=str(data), max_steps=2, save_every=1, keep=0)
    train(make_config(**flags, out_dir=str(tmp_path / "run")), on_step=on_step)
    resumed = flags | dict(resume=str(tmp_path / "run" / "ckpt_1.pt"), out_dir=str(tmp_path / "other"))
    seen.clear()
    train(make_config(**resumed), on_step=on_step)
    (found,) = seen
    assert found.keys() == kept.keys() and found["deep"] == kept["deep"]
    assert torch.equal(found["tensor"], kept["tensor"]) and torch.equal(found["wte.weight"], kept["wte.weight"])
    kept["bad"] = {1, 2}
    with pytest.raises(UserError, match=r"state.extra\['bad'\] is of type set"):
        train(make_config(**flags, out_dir=str(tmp_path / "bad")), on_step=on_step)


@pytest.mark.parametrize(
    "metrics, says",
    [
        (dict(train_loss=1.0), "state.metrics has 'train_loss'"),
        (dict(x=torch.zeros(3)), r"tensor of shape \(3,\)"),
    ],
)
def test_metrics_that_cannot_be_are_refused(metrics, says, data, tmp_path):
    with pytest.raises(UserError, match=says):
        train(
            make_config(**TINY, data=str(data), out_dir=str(tmp_path / "run")),
            on_step=lambda state, loss: state.metrics.update(metrics),
        )


# ---------------------------------------------------------------------------------------------------------------------
# Two ranks that do not compute the same graph


def run_blocks(n: int) -> None:
    """On rank 1, run the first n blocks only."""
    forward = GPT.forward

    class Blocks(nn.ModuleList):
        def __iter__(self):
            here = dist.get_rank() == 1 and self.training
            return iter(list(super().__iter__())[: n if here else None])

    def changed(self, *args, **kwargs):
        self.blocks.__class__ = Blocks
        return forward(self, *args, **kwargs)

    GPT.forward = changed


def leave_unused() -> None:
    """On rank 1, the first matrix of each MLP is not used."""
    forward = model_module.MLP.forward

    def without_fc(self, x):
        used = dist.get_rank() == 0 or not self.training
        return forward(self, x) if used else self.proj(torch.cat([x] * 4, dim=-1))

    model_module.MLP.forward = without_fc


def route_by_rank() -> None:
    """Two experts of one size, of which each rank uses its own from the third step on."""
    init = model_module.Block.__init__

    def with_experts(self, cfg):
        init(self, cfg)
        self.experts = nn.ModuleList([self.mlp, model_module.MLP(cfg)])
        self.steps = 0

    def routed(self, x, *inputs):
        self.steps += self.training
        x = x + self.attn(norm(x), *inputs)
        h, alone = norm(x), self.training and self.steps > 2
        return x + (self.experts[dist.get_rank()](h) if alone else self.mlp(h) + 0 * self.experts[1](h))

    model_module.Block.__init__, model_module.Block._forward = with_experts, routed
    for name in ("mlp_in", "proj"):
        spec = PARAM_TABLE[name]
        pattern = spec.pattern.replace("mlp", r"(mlp|experts\.\d)")
        PARAM_TABLE[name] = spec._replace(pattern=pattern)


def add_noise() -> None:
    """Noise on the gradients, which every rank must draw alike."""
    norm = nn.utils.get_total_norm

    def noisy(grads):
        for grad in grads:
            grad.add_(torch.randn(grad.shape) * 0.01)
        return norm(grads)

    nn.utils.get_total_norm = noisy


def update_by_rank() -> None:
    step = model_module.Optimizer.step

    def apart(self, skip=None):
        step(self, skip)
        with torch.no_grad():
            self.param_groups[0]["params"][0].add_(0.01 * dist.get_rank())

    model_module.Optimizer.step = apart


def thaw() -> None:
    init, step = GPT.__init__, train_gpt.train_step

    def frozen(self, *args, **kwargs):
        init(self, *args, **kwargs)
        self.wte.requires_grad_(False)

    def thawed(state, *args):
        state.raw_model.wte.requires_grad_(state.step > 0)
        return step(state, *args)

    GPT.__init__, train_gpt.train_step = frozen, thawed


EDITS = {
    "blocks": lambda: run_blocks(1),
    "unused": leave_unused,
    "experts": route_by_rank,
    "noise": add_noise,
    "apart": update_by_rank,
    "thaw": thaw,
    "mean": lambda: mix_tokens("mean"),
}


def rank_main(data: str, out: str, parallel: str, edit: str) -> None:
    EDITS[edit]()
    ops.params.initial_weight = lambda name, shape, table, seed, made: normal(0.1, by_fan_in=False)(
        torch.empty(shape), torch.Generator().manual_seed(seed)
    )
    flags = flags_of(TINY | dict(data=data, out_dir=out, parallel=parallel, max_steps=4, save_every=2))
    exit_process(train_gpt.main(flags))


@pytest.mark.parametrize("edit", ["blocks", "unused", "noise"])
def test_two_ranks_may_have_different_graphs_and_draws_under_ddp(edit, data, tmp_path):
    done = run_ranks(tmp_path, __file__, data, tmp_path / "run", "ddp", edit, timeout=120)
    assert done.codes == [0, 0], done.stderr  # with equal weights, which saving has compared
    losses = rows(tmp_path / "run", "train_loss")
    assert len(losses) == 4 and all(map(math.isfinite, losses)) and losses[-1] < losses[0]


@pytest.mark.parametrize(
    "parallel, edit, says",
    [
        ("fsdp", "blocks", "under --parallel fsdp every rank must run the same blocks"),
        ("fsdp", "unused", "the ranks had gradients for different parameters"),
        ("fsdp", "experts", "gradients for different parameters"),
        ("ddp", "apart", "the ranks hold different values of wte.weight"),
        ("ddp", "thaw", "wte.weight was frozen when DDP was set up"),
        ("fsdp", "mean", "tokens after it"),
    ],
)
def test_two_ranks_that_fall_apart_end_in_a_sentence(parallel, edit, says, data, tmp_path):
    done = run_ranks(tmp_path, __file__, data, tmp_path / "run", parallel, edit, timeout=120)
    assert 0 not in done.codes and any(says in said for said in done.stderr), done


if __name__ == "__main__":
    assert os.environ["RANK"]
    rank_main(*sys.argv[1:])
