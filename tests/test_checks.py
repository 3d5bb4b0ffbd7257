"""What is refused, told or made right of edits that would otherwise train, draw or export another model in silence."""

import contextlib
import dataclasses
import json
from collections import deque
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint

import int8
import model as model_module
import sample
import train_gpt
from conftest import TINY, built, final, flags_of, random_gpt, rows, run_main, some_batch, tiny_run
from data.shards import UserError
from generation import GenerationError, check_cache
from model import GPT, PARAM_TABLE, ParamGroupSpec
from ops import checks as checks_of_model
from ops.attention import attention
from ops.init import ModelError, zeros
from runtime import checks
from runtime.checkpoint import is_alike, read_checkpoint
from runtime.errors import explain_edit, explain_peer_failure, report_skipped
from runtime.ranks import DistContext, dist_means
from train_gpt import make_config


def refused(capsys, **flags) -> str:
    """The sentence that a run ends with."""
    code, err = run_main(flags_of(TINY | flags), capsys)
    assert code in (1, 2) and err.count("\n") == 1, err
    return err


def add_rows(monkeypatch, **rows_of) -> None:
    for row, (pattern, init) in rows_of.items():
        monkeypatch.setitem(PARAM_TABLE, row, ParamGroupSpec(pattern, init, "adam"))


# ---------------------------------------------------------------------------------------------------------------------
# The model


def pooled(size):
    return lambda x: x.unflatten(1, (-1, size)).mean(2).repeat_interleave(size, dim=1)


@pytest.mark.parametrize("size, start", [(2, 0), (8, 0), (16, 0), (2, 8)])
def test_a_leak_within_chunks_is_refused(size, start, monkeypatch):
    def embed(self, tokens, position):
        x = of_tokens(self, tokens, position)
        return torch.cat((x[:, :start], pooled(size)(x[:, start:])), dim=1)

    of_tokens = GPT.embed
    monkeypatch.setattr(GPT, "embed", embed)
    with pytest.raises(ModelError, match="tokens after it"):
        built()


def test_a_prefix_that_sees_itself_is_refused(monkeypatch):
    def attention_masks(self, backend, idx, cu_seqlens=None):
        q = torch.arange(idx.size(1))[:, None]
        return {0: (q.T <= q) | ((q < 4) & (q.T < 4))}

    monkeypatch.setattr(GPT, "attention_masks", attention_masks)
    with pytest.raises(ModelError, match="tokens after it"):
        built()


def test_targets_dropped_by_the_model_are_refused(monkeypatch):
    """The trainer divides by those that it knows of."""
    forward = GPT.forward

    def second_half(self, idx, targets=None, *rest):
        if targets is not None:
            targets = torch.where(torch.arange(idx.size(1)) < idx.size(1) // 2, -1, targets)
        return forward(self, idx, targets, *rest)

    monkeypatch.setattr(GPT, "forward", second_half)
    with pytest.raises(ModelError, match="of all targets but -1, which train_step may put there"):
        built()


def per_token(logits, targets):
    return F.cross_entropy(logits, targets, ignore_index=-1, reduction="none")


LOSSES = {
    "normalized": lambda loss, n: (loss * (loss.detach() / loss.detach().sum() * n)).sum(),
    "hardest": lambda loss, n: loss.topk(int(n) // 2).values.sum(),
}


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_that_depends_on_other_tokens_is_refused(name, monkeypatch):
    def loss(logits, targets, training):
        return LOSSES[name](per_token(logits, targets), (targets >= 0).sum())

    monkeypatch.setattr(model_module, "cross_entropy", loss)
    with pytest.raises(ModelError, match="for the same in two parts, so it would depend on --micro_batch"):
        built()


def test_a_parameter_outside_of_the_model_is_refused(monkeypatch):
    temperature = nn.Parameter(torch.ones(()))
    monkeypatch.setattr(
        model_module, "cross_entropy", lambda logits, targets, training: per_token(logits * temperature, targets).sum()
    )
    with pytest.raises(ModelError, match="a parameter that is not the model's"):
        built()


@pytest.mark.parametrize("window", ["S:8", "SL:8"])
def test_a_window_that_attention_ignores_is_told(window, monkeypatch):
    own = lambda q, k, v, mask, backend: F.scaled_dot_product_attention(q, k, v, is_causal=True)  # noqa: E731
    assert built(window=window, doc_mask=True).notes == []
    monkeypatch.setattr(model_module, "attention", own)
    assert built().notes == [] != built(window=window).notes


def test_what_build_alone_gives_the_model_is_refused(monkeypatch):
    """sample.py and export.py make the model from GPTConfig."""

    class Scaled(GPT):
        def __init__(self, cfg, *args, scale=1.0, **rest):
            super().__init__(cfg, *args, **rest)
            self.scale = scale

        def hidden(self, *args):
            return super().hidden(*args) * self.scale

    monkeypatch.setattr(train_gpt, "GPT", Scaled)
    built(doc_mask=True, window="SL:8", dtype="bf16")
    monkeypatch.setattr(train_gpt, "GPT", lambda *args, **rest: Scaled(*args, **rest, scale=3.0))
    with pytest.raises(ModelError, match=r"made by GPT\(cfg\) alone gives other logits"):
        built()


class Statistic(nn.Module):
    """The mean of what passes, kept as a parameter or as a buffer."""

    def __init__(self, kind):
        super().__init__()
        if kind == "parameter":
            self.mean = nn.Parameter(torch.zeros(32), requires_grad=False)
        else:
            self.register_buffer("mean", torch.zeros(32), persistent=kind == "buffer")

    def forward(self, x):
        if self.training:
            with torch.no_grad():
                self.mean.lerp_(x.float().mean((0, 1)), 0.1)
        return x - self.mean.to(x.dtype)


@pytest.mark.parametrize(
    "kind, says", [("parameter", "is a parameter that forward passes write"), ("buffer", ""), ("passing", "")]
)
def test_statistics_belong_into_buffers(kind, says, monkeypatch):
    init, forward = model_module.MLP.__init__, model_module.MLP.forward

    def with_statistic(self, cfg):
        init(self, cfg)
        self.statistic = Statistic(kind)

    monkeypatch.setattr(model_module.MLP, "__init__", with_statistic)
    monkeypatch.setattr(model_module.MLP, "forward", lambda self, x: forward(self, self.statistic(x)))
    add_rows(monkeypatch, statistic=(r"blocks\.\d+\.mlp\.statistic\.mean", zeros))
    if says:
        with pytest.raises(ModelError, match=says):
            built()
        return
    told = [note for note in built().notes if "mlp.statistic.mean" in note and "persistent=False" in note]
    assert len(told) == (kind == "passing")


def test_what_no_gradient_reaches_is_told(data, tmp_path, monkeypatch):
    init = model_module.Linear.__init__

    def with_bias(self, n_in, *n_out):
        init(self, n_in, *n_out)
        self.bias = nn.Parameter(torch.zeros(sum(n_out)))

    monkeypatch.setattr(model_module.Linear, "__init__", with_bias)
    add_rows(monkeypatch, bias=(r".*bias", zeros))
    tiny_run(tmp_path / "run", data=data, max_steps=1)
    assert "\nno gradient reaches blocks.0.attn.qkv.bias, " in (tmp_path / "run" / "log.txt").read_text()


def test_promotion_to_fp32_is_told(monkeypatch):
    assert built(dtype="bf16").notes == []
    monkeypatch.setattr(model_module, "norm", lambda x: F.rms_norm(x, x.shape[-1:]) * torch.ones(1))
    assert any("blocks put out float32, not bfloat16" in note for note in built(dtype="bf16").notes)
    assert built().notes == []


def test_more_keys_than_queries_need_a_mask():
    q, k = torch.randn(1, 2, 4, 8), torch.randn(1, 2, 5, 8)
    with pytest.raises(ModelError, match="attention of 4 queries over 5 keys has no mask"):
        attention(q, k, k, None)
    attention(q, k, k, torch.ones(4, 5, dtype=torch.bool))


def test_values_may_be_narrower_than_keys():
    q, k, v = torch.randn(3, 2, 2, 300, 16, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(attention(q, k, v[..., :8], None, "blocked"), attention(q, k, v[..., :8], None))


@pytest.mark.parametrize("edit", ["double", "shared"])
def test_parameters_that_fsdp_cannot_take_are_refused(edit, monkeypatch):
    init = GPT.__init__

    def edited(self, *args, **rest):
        init(self, *args, **rest)
        if edit == "shared":
            self.blocks[1].attn = self.blocks[0].attn
        else:
            self.scale = nn.Parameter(torch.ones(1, dtype=torch.float64))

    monkeypatch.setattr(GPT, "__init__", edited)
    add_rows(monkeypatch, scale=("scale", zeros))
    with pytest.raises(ModelError, match="is in several blocks" if edit == "shared" else "give them one dtype each"):
        built(parallel="fsdp")


# ---------------------------------------------------------------------------------------------------------------------
# Text, and files


def recurrence(keep, start):
    """Sums of what came before, in each block, of which `keep` keeps the newest after a prompt."""
    forward = model_module.Block._forward

    def _forward(self, x, ctx):
        if ctx.past is None or x.size(1) > 1:
            total = x.cumsum(1)
            if ctx.past is not None:
                ctx.past.total = keep(total, ctx.past)
        else:
            ctx.past.total = total = (getattr(ctx.past, "total", 0) if start else ctx.past.total) + x
        return forward(self, x + 0.1 * total, ctx)

    return _forward


def test_a_state_must_be_right_for_prompts_of_any_length(monkeypatch):
    def own_end(total, past):
        return total[torch.arange(len(total)), past.length - 1][:, None]

    gpt = random_gpt(std=0.3).eval()
    last = lambda total, past: total[:, -1:]  # noqa: E731
    cases = (last, True, "differ by"), (own_end, False, "be read .+AttributeError"), (own_end, True, "")
    for keep, has_start, says in cases:
        monkeypatch.setattr(model_module.Block, "_forward", recurrence(keep, has_start))
        with pytest.raises(GenerationError, match=says) if says else contextlib.nullcontext():
            check_cache(gpt)
        monkeypatch.undo()


def test_shifts_by_hand_are_told_in_a_sentence(monkeypatch):
    forward = model_module.MLP.forward
    monkeypatch.setattr(model_module.MLP, "forward", lambda self, x: forward(self, F.pad(x, (0, 0, 2, -2))))
    with pytest.raises(GenerationError, match="cannot be read .* must pass through the cache"):
        check_cache(random_gpt(std=0.3).eval())


def test_int8_files_are_tried_with_a_cache(data, tmp_path, monkeypatch):
    tiny_run(tmp_path / "run", data=data, max_steps=1)
    checkpoint, gpt = final(tmp_path / "run"), random_gpt(std=0.3, **final(tmp_path / "run")["model_config"]).eval()
    checkpoint["model"] = int8.quantize(gpt).state_dict()
    monkeypatch.setattr(sample, "read_checkpoint", lambda path: checkpoint)
    sample.load(tmp_path, "cpu", "fp32")
    forward = int8.Int8Linear.forward

    def shifted(self, x):
        return forward(self, x + F.pad(x, (0, 0, 1, -1)) if x.size(1) > 1 else x)

    monkeypatch.setattr(int8.Int8Linear, "forward", shifted)
    sample.load(tmp_path, "cpu", "fp32", cached=False)
    with pytest.raises(GenerationError):
        sample.load(tmp_path, "cpu", "fp32")


def test_int8_weights_may_be_used_by_themselves(monkeypatch):
    """As of a head that is tied by hand."""
    monkeypatch.setattr(GPT, "logits", lambda self, x: F.linear(x.float(), self.wte.weight.float()))
    gpt = random_gpt(std=0.3).eval()
    idx = torch.arange(48).view(2, 24)
    before = gpt(idx)
    after = int8.quantize(gpt)(idx)
    assert 0 < (after - before).std() < 0.05 * before.std()


@pytest.mark.parametrize(
    "default, value, alike",
    [(1, 1.0, True), (1.5, 2, True), (None, 3, True), (3, None, True), (True, 1, False), ("a", 1, False)],
)
def test_fields_of_numbers_take_numbers(default, value, alike):
    assert is_alike(default, value) == alike


# ---------------------------------------------------------------------------------------------------------------------
# The loop, the optimizer and data


def test_lists_of_tensors_are_saved_and_resumed(data, tmp_path, monkeypatch):
    step, seen = train_gpt.train_step, {}

    def with_last(state, *args):
        found = step(state, *args)
        last = state.extra.setdefault("last", [])
        last.append({name: p.detach().clone() for name, p in state.raw_model.named_parameters()})
        del last[:-2]
        seen[state.step] = [float(each["head.weight"].double().sum()) for each in last]
        return found

    monkeypatch.setattr(train_gpt, "train_step", with_last)
    flags = dict(data=data, save_every=2, keep=0)
    tiny_run(tmp_path / "run", max_steps=3, **flags)
    kept = final(tmp_path / "run")["extra"]["last"]
    assert [float(each["head.weight"].double().sum()) for each in kept] == seen[2]
    (tmp_path / "again").mkdir()
    (tmp_path / "again" / "ckpt_2.pt").write_bytes((tmp_path / "run" / "ckpt_2.pt").read_bytes())
    want = dict(seen)
    tiny_run(tmp_path / "again", max_steps=3, resume="newest", **flags)
    assert seen == want


def test_what_cannot_be_saved_is_refused_in_the_first_step(data, tmp_path, monkeypatch, capsys):
    step = train_gpt.train_step

    def with_deque(state, *args):
        state.extra["last"] = deque(maxlen=3)
        return step(state, *args)

    monkeypatch.setattr(train_gpt, "train_step", with_deque)
    assert "state.extra['last'] is of type deque" in refused(capsys, data=data, out_dir=tmp_path / "run", max_steps=5)
    assert json.loads((tmp_path / "run" / "metrics.jsonl").read_text() or "{}").get("step", 1) == 1


def test_slots_that_an_edit_adds_to_the_optimizers_state_are_resumed(data, tmp_path, monkeypatch):
    """Lookahead: every other step, weights go half of the way back to where they were."""
    update = train_gpt.update_weights

    @torch.no_grad()
    def lookahead(state, *args):
        found = update(state, *args)
        for p in state.raw_model.parameters():
            slow = state.optimizer.state[p].setdefault("slow", p.detach().clone())
            if state.step % 2:
                slow.lerp_(p, 0.5)
                p.copy_(slow)
        return found

    monkeypatch.setattr(train_gpt, "update_weights", lookahead)
    flags = dict(data=data, max_steps=5, save_every=3, keep=0)
    tiny_run(tmp_path / "run", **flags)
    (tmp_path / "again").mkdir()
    (tmp_path / "again" / "ckpt_3.pt").write_bytes((tmp_path / "run" / "ckpt_3.pt").read_bytes())
    tiny_run(tmp_path / "again", **flags, resume="newest")
    assert rows(tmp_path / "again", "train_loss") == rows(tmp_path / "run", "train_loss")[3:]


def test_what_a_resume_thaws_is_told(data, tmp_path, monkeypatch):
    step = train_gpt.train_step

    def freeze_once(state, *args):
        if state.step == 1:
            state.raw_model.wte.requires_grad_(False)
        return step(state, *args)

    monkeypatch.setattr(train_gpt, "train_step", freeze_once)
    tiny_run(tmp_path / "run", data=data, max_steps=3)
    tiny_run(tmp_path / "run", data=data, max_steps=4, resume="newest")
    told = "\nfrozen when ckpt_3.pt was saved, and trained from here on: wte.weight\n"
    assert told in (tmp_path / "run" / "log.txt").read_text()


@pytest.mark.parametrize("how", ["by hand", "plateau"])
def test_learning_rates_set_by_others_are_refused(how):
    state = built()
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(state.optimizer, factor=1e-9, patience=0)
    train_gpt.train_step(state, some_batch(), 1.0)
    if how == "plateau":
        for loss in (1.0, 2.0):
            plateau.step(loss)
    else:
        for group in state.optimizer.param_groups:
            group["lr"] = 1e-12
    with pytest.raises(UserError, match='or change "initial_lr" or'):
        train_gpt.train_step(state, some_batch(), 1.0)


def test_hooks_that_fsdp_does_not_call_are_refused():
    state = built(parallel="fsdp")
    train_gpt.train_step(state, some_batch(), 1.0)
    state.raw_model.wte.weight.register_hook(lambda grad: grad * 0)
    with pytest.raises(UserError, match="wte.weight has a hook, which FSDP does not call"):
        train_gpt.train_step(state, some_batch(), 1.0)


class Same(nn.Module):
    def forward(self, x):
        return x


def test_a_parametrized_weight_is_still_three_matrices(monkeypatch):
    """With the identity, training is what it was."""
    init = model_module.CausalSelfAttention.__init__

    def parametrized(self, cfg):
        init(self, cfg)
        parametrize.register_parametrization(self.qkv, "weight", Same())

    plain = built()
    monkeypatch.setattr(model_module.CausalSelfAttention, "__init__", parametrized)
    row = PARAM_TABLE["qkv"]._replace(pattern=r"blocks\.\d+\.attn\.qkv\.parametrizations\.weight\.original")
    monkeypatch.setitem(PARAM_TABLE, "qkv", row)
    edited = built()
    splits = [
        {group["role"]: group["split"] for group in state.optimizer.param_groups}["qkv"] for state in (plain, edited)
    ]
    assert splits == [(32, 32, 32)] * 2


def test_momentum_follows_its_schedule_behind_a_wrapper(monkeypatch):
    class Wrapped(torch.optim.Optimizer):
        def __init__(self, inner):
            super().__init__(inner.param_groups, {})
            self.inner, inner.param_groups = inner, self.param_groups

        def step(self):
            self.inner.step()

    make_optimizer = train_gpt.make_optimizer
    monkeypatch.setattr(train_gpt, "make_optimizer", lambda cfg, model: Wrapped(make_optimizer(cfg, model)))
    state = built()
    train_gpt.train_step(state, some_batch(), 1.0)
    momenta = {group["kind"]: group["momentum"] for group in state.optimizer.param_groups}
    assert momenta["muon"] == pytest.approx(0.85)


def test_torchs_own_momentum_is_left_alone(monkeypatch):
    monkeypatch.setattr(
        train_gpt, "make_optimizer", lambda cfg, model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.7)
    )
    state = built()
    train_gpt.train_step(state, some_batch(), 1.0)
    assert state.optimizer.param_groups[0]["momentum"] == 0.7


def test_numbers_that_an_edit_adds_to_groups_are_resumed(data, tmp_path, monkeypatch):
    """And those that flags set are the flags'."""
    step = train_gpt.train_step

    def changed(state, *args):
        for group in state.optimizer.param_groups:
            group["t"] = group.get("t", 0) + 1
            group["weight_decay"] *= 0.5
        return step(state, *args)

    def on_step(state, loss):
        decays.update(group["weight_decay"] for group in state.optimizer.param_groups)

    monkeypatch.setattr(train_gpt, "train_step", changed)
    tiny_run(tmp_path / "run", data=data, max_steps=3)
    monkeypatch.setattr(train_gpt, "train_step", step)
    decays, flags = set(), dict(data=str(data), out_dir=str(tmp_path / "run"), resume="newest", weight_decay=0.3)
    train_gpt.train(make_config(**TINY | flags | dict(max_steps=4)), on_step=on_step)
    groups = read_checkpoint(tmp_path / "run" / "ckpt_4.pt")["optimizer_settings"]
    assert all(group == {"t": 3} for group in groups) and decays == {0.0, 0.3}


def test_hooks_that_come_after_compilation_are_called():
    state, seen = built(compile="default"), []
    state.raw_model.blocks[0].mlp.register_forward_hook(lambda *_: seen.append(1))
    train_gpt.train_step(state, some_batch(), 1.0)
    assert seen


def test_metrics_of_shards_are_of_the_whole():
    shards = SimpleNamespace(full_tensor=lambda: torch.tensor(3.0))
    assert dist_means(DistContext(torch.device("cpu")), {"norm": shards}) == {"norm": 3.0}


def test_a_batch_must_be_a_function_of_the_step(data, tmp_path, monkeypatch, capsys):
    get_batch, generator = train_gpt.get_batch, np.random.default_rng(0)
    monkeypatch.setattr(train_gpt, "get_batch", lambda *args: get_batch(*args).roll(int(generator.integers(1, 9)), 1))
    said = refused(capsys, data=data, out_dir=tmp_path / "run")
    assert "get_batch gives another batch when it is called again" in said


def test_inputs_that_are_no_tokens_are_told_in_a_sentence(data, tmp_path, monkeypatch, capsys):
    get_batch = train_gpt.get_batch
    monkeypatch.setattr(train_gpt, "get_batch", lambda *args: get_batch(*args).index_fill(1, torch.arange(3), -1))
    assert "becomes -1 in y of train_step" in refused(capsys, data=data, out_dir=tmp_path / "run")


def test_groups_may_come_and_rates_change_with_their_initial_value():
    state = built()
    head = state.raw_model.head.weight
    for group in state.optimizer.param_groups:
        group["params"] = [p for p in group["params"] if p is not head]
    head.requires_grad_(False)
    train_gpt.train_step(state, some_batch(), 1.0)
    head.requires_grad_(True)
    group = dict(state.optimizer.param_groups[0], params=[head], names=["head.weight"], lr=0.1, initial_lr=0.1)
    group.pop("after_step")
    state.optimizer.add_param_group(group)
    for group in state.optimizer.param_groups:
        group["lr"] = group["initial_lr"] = 0.01
    before = head.detach().clone()
    train_gpt.train_step(state, some_batch(), 1.0)
    assert not head.equal(before)


def test_what_only_seems_odd_is_built(monkeypatch):
    """Weights that PyTorch renormalizes, a loss with the model's own parameter, reentrant checkpoints."""
    init, made = GPT.__init__, []

    def edited(self, *args, **rest):
        init(self, *args, **rest)
        made.append(self)
        self.wte = nn.Embedding(self.cfg.vocab_size, self.cfg.n_embd, max_norm=1.0)
        self.temperature = nn.Parameter(torch.ones(1))

    monkeypatch.setattr(GPT, "__init__", edited)
    add_rows(monkeypatch, temperature=("temperature", zeros))
    monkeypatch.setattr(
        model_module, "cross_entropy", lambda x, y, training: per_token(x * made[0].temperature, y).sum()
    )
    forward = model_module.MLP.forward
    monkeypatch.setattr(model_module.MLP, "forward", lambda self, x: checkpoint(forward, self, x, use_reentrant=True))
    built()


def test_a_step_without_update_is_no_mistake():
    assert report_skipped(deque(), 3, 0, 10, None, print) == (0, "")


def test_a_number_that_changes_is_told_of_as_such(monkeypatch):
    """Blocks are compiled anew for each value, until that is too much."""
    monkeypatch.setattr(model_module.MLP, "strength", 1.0, raising=False)
    forward = model_module.MLP.forward
    monkeypatch.setattr(model_module.MLP, "forward", lambda self, x: forward(self, x) * self.strength)
    state, said = built(compile="default"), ""
    with torch._dynamo.config.patch(recompile_limit=2):
        try:
            for step in range(4):
                for block in state.raw_model.blocks:
                    block.mlp.strength = 1.0 + step
                train_gpt.train_step(state, some_batch(), 1.0)
        except Exception as error:
            said = explain_edit(error)
    assert "a number that changes from step to step is a constant to it; make it a tensor" in said


# ---------------------------------------------------------------------------------------------------------------------
# State that would neither be recomputed nor resumed


RNG = np.random.default_rng(0)
KEEPS = {
    "mean": lambda self, x: (
        vars(self).update(mean=0.9 * vars(self).get("mean", 0) + 0.1 * x.detach().mean()) or self.mean
    ),
    "counter": lambda self, x: vars(self).update(calls=vars(self).get("calls", 0) + 1) or 1 / self.calls,
    "generator": lambda self, x: RNG.random(),
}


@pytest.mark.parametrize("name", KEEPS)
def test_state_outside_of_buffers_is_refused(name, monkeypatch):
    def forward(self, x):
        x = self.fc(x)
        return self.proj(F.relu(x - KEEPS[name](self, x) if self.training else x).square())

    monkeypatch.setattr(model_module.MLP, "forward", forward)
    with pytest.raises(ModelError, match="another loss for the same tokens, seeds and buffers when it is called again"):
        built()


def test_a_generator_that_a_module_keeps_is_refused(monkeypatch):
    add_to(monkeypatch, model_module.MLP, lambda mlp: setattr(mlp, "rng", np.random.default_rng(0)))
    with pytest.raises(ModelError, match="keeps a generator"):
        built()


@pytest.mark.parametrize("dtype", [torch.float16, torch.complex64])
def test_parameters_of_types_that_no_optimizer_trains_are_refused(dtype, monkeypatch):
    add_rows(monkeypatch, scale=(r"blocks\.\d+\.mlp\.scale", "module"))
    scale = lambda mlp: setattr(mlp, "scale", nn.Parameter(torch.ones(32, dtype=dtype)))  # noqa: E731
    add_to(monkeypatch, model_module.MLP, scale)
    with pytest.raises(ModelError, match="which the optimizers cannot train; make it float32"):
        built()


def add_to(monkeypatch, kind: type, what) -> None:
    """Have the constructor of a module do one thing more to it."""
    init = kind.__init__
    monkeypatch.setattr(kind, "__init__", lambda self, *args, **rest: (init(self, *args, **rest), what(self))[0])


def test_layers_left_out_at_random_are_not_told_to_be_untrained(monkeypatch):
    forward = model_module.Block._forward
    sometimes = lambda self, x, ctx: x if self.training and torch.rand(()) < 0.5 else forward(self, x, ctx)  # noqa: E731
    monkeypatch.setattr(model_module.Block, "_forward", sometimes)
    assert built().notes == []


@pytest.mark.parametrize("checkpointing", ["none", "full"])
def test_a_graph_may_be_used_twice(checkpointing):
    state = built(checkpointing=checkpointing)
    x, y = some_batch()[:, :-1], some_batch()[:, 1:]
    norms = []
    for backwards in (1, 2):
        state.raw_model.zero_grad()
        loss = state.raw_model(x, y)
        for _ in range(backwards):
            loss.backward(retain_graph=True)
        norms.append(nn.utils.get_total_norm([p.grad for p in state.raw_model.parameters()]).item())
    assert norms[1] == pytest.approx(2 * norms[0], rel=1e-5)


def test_flags_replaced_in_training_are_refused(data, tmp_path):
    def on_step(state, loss):
        state.cfg = dataclasses.replace(state.cfg, weight_decay=0.1)

    with pytest.raises(UserError, match="state.cfg was replaced in training"):
        train_gpt.train(make_config(**TINY | dict(data=str(data), out_dir=str(tmp_path / "run"))), on_step=on_step)


def test_momentum_set_by_others_is_refused():
    state = built()
    train_gpt.train_step(state, some_batch(), 1.0)
    for group in state.optimizer.param_groups:
        group["momentum"] = 0.5
    with pytest.raises(UserError, match="something sets learning rates"):
        train_gpt.train_step(state, some_batch(), 1.0)


class Lookahead(model_module.Optimizer):
    """Every third step halfway back to the weights of three steps before (Zhang et al. 2019)."""

    count = 0

    def step(self, skip=None):
        if self.count == 0:
            for group in self.param_groups:
                for p in group["params"]:
                    self.state[p]["slow"] = p.detach().clone()
        super().step(skip)
        self.count += 1
        if self.count % 3 == 0:
            for p, state in self.state.items():
                state["slow"].lerp_(p.detach(), 0.5)
                p.data.copy_(state["slow"])


class Listed(model_module.Optimizer):
    def step(self, skip=None):
        super().step(skip)
        for p in self.state:
            self.state[p]["factors"] = [torch.eye(2)]


class Two:
    """Two optimizers that seem to be one."""

    def __init__(self, first, second):
        self.both = first, second

    param_groups = property(lambda self: [group for one in self.both for group in one.param_groups])
    state = property(lambda self: {p: s for one in self.both for p, s in one.state.items()})
    step = lambda self: [one.step() for one in self.both]  # noqa: E731
    zero_grad = lambda self, **how: [one.zero_grad(**how) for one in self.both]  # noqa: E731


def use_optimizer(monkeypatch, make) -> None:
    monkeypatch.setattr(train_gpt, "make_optimizer", lambda cfg, gpt: make(train_gpt.make_groups(cfg, gpt)))


def test_numbers_that_an_optimizer_counts_are_resumed(data, tmp_path, monkeypatch):
    flags = dict(data=data, max_steps=6, save_every=2, keep=0)
    tiny_run(tmp_path / "ours", **flags)
    assert final(tmp_path / "ours")["optimizer_numbers"] == {}
    use_optimizer(monkeypatch, Lookahead)
    tiny_run(tmp_path / "whole", **flags)
    assert final(tmp_path / "whole")["optimizer_numbers"] == {"count": 6}
    tiny_run(tmp_path / "again", **flags, resume=tmp_path / "whole" / "ckpt_2.pt")
    assert rows(tmp_path / "again", "train_loss") == rows(tmp_path / "whole", "train_loss")[2:]


def test_optimizers_that_cannot_be_saved_are_refused_in_the_first_step(data, tmp_path, monkeypatch, capsys):
    use_optimizer(monkeypatch, Listed)
    assert "factors of wte.weight is a list" in refused(capsys, data=data, out_dir=tmp_path / "a")
    sgd = lambda groups: torch.optim.SGD([dict(params=group["params"]) for group in groups], lr=0.1)  # noqa: E731
    use_optimizer(monkeypatch, lambda groups: Two(sgd(groups[:2]), sgd(groups[2:])))
    assert "no torch.optim.Optimizer with a `state` of its own" in refused(capsys, data=data, out_dir=tmp_path / "b")
    for name in "ab":
        assert "step 2/" not in (tmp_path / name / "log.txt").read_text()


def test_a_batch_with_weights_must_be_a_function_of_the_step():
    tokens = torch.zeros(1)
    with pytest.raises(UserError, match="get_batch gives another batch"):
        checks.check_batch(lambda: (tokens, torch.from_numpy(RNG.random(3))))
    checks.check_batch(lambda: (tokens, tokens))


def test_nccls_own_failures_are_told(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    own = "NCCL error in: x.cpp:1, unhandled system error\nLast error:\nError while creating shared memory segment"
    assert "Error while creating shared memory" in explain_peer_failure(torch.distributed.DistBackendError(own))
    gone = "NCCL error: remote process exited or there was a network error"
    assert "another rank has ended" in explain_peer_failure(torch.distributed.DistBackendError(gone))


def test_metrics_of_an_evaluation_stand_beside_its_loss(data, tmp_path, monkeypatch):
    evaluate = train_gpt.evaluate

    def with_accuracy(state, *args):
        state.metrics["accuracy"] = state.step / 10
        return evaluate(state, *args)

    monkeypatch.setattr(train_gpt, "evaluate", with_accuracy)
    tiny_run(tmp_path / "run", data=data, max_steps=4, eval_every=2)
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    found = [(row["step"], "val_loss" in row, row["accuracy"]) for row in map(json.loads, lines) if "accuracy" in row]
    assert found == [(2, True, 0.2), (4, True, 0.4)]
    assert " | accuracy 0.4 | train_time" in (tmp_path / "run" / "log.txt").read_text()


def test_buffers_may_change_their_shape_or_begin_as_none(monkeypatch):
    def forward(self, x):
        self.last = x.detach()[:, :1]
        if self.training:
            self.sizes = torch.cat((self.sizes, self.sizes))[-4:]
        return of_mlp(self, x)

    of_mlp = model_module.MLP.forward
    begin = lambda mlp: (mlp.register_buffer("last", None), mlp.register_buffer("sizes", torch.ones(1), False))  # noqa: E731
    add_to(monkeypatch, model_module.MLP, begin)
    monkeypatch.setattr(model_module.MLP, "forward", forward)
    checks_of_model.check_sum(random_gpt(), model_module.cross_entropy, 16)


@pytest.mark.parametrize("name", ["val_loss", "train_loss"])
def test_metrics_may_not_take_names_of_other_rows(name, data, tmp_path):
    def on_step(state, loss):
        state.metrics[name] = 0.0

    with pytest.raises(UserError, match="use another name"):
        train_gpt.train(make_config(**TINY | dict(data=str(data), out_dir=str(tmp_path / "run"))), on_step=on_step)
