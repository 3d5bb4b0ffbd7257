"""What to run after an edit: `python -m pytest test_train.py`; half a minute on two cores.

Each test is an invariant of the trainer, tried on train_gpt.py and model.py as they are now, with a
small model. The message of one that fails says what an edit like that usually did, and what to do.
--flags "NAME=VALUE ..." gives it the flags that switch on an edit of yours. Ranks start this file
as well.
"""

import copy
import dataclasses
import functools
import math
import re
import shutil
import sys
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_leaves

import model as model_page
import train_gpt
from common.errors import UserError, exit_process
from conftest import (
    TINY,
    add_noise,
    built,
    compile_with,
    compiler_works,
    edit_flags,
    final,
    rows,
    run_ranks,
    seed_all,
    some_batch,
    told,
)
from export import traced
from inference.decode import next_logits
from inference.generation import KVCache
from inference.int8 import quantize
from model import GPT, GPTConfig, get_spec
from ops.parallel import to_full
from runtime.checkpoint import load_weights
from runtime.device import faster_dtype
from runtime.run import Run, open_stream
from train_gpt import make_config, train

FLAGS = TINY | dict(
    ngram=3,
    ngram_rows=512,
    ngram_dropout=0.25,
    short_frac=0.5,
    window="LS:9",
    grad_clip=0.3,
    eval_tokens="all",
)
FLAGS |= edit_flags()
EOT = 256


def scrambled(**flags) -> GPT:
    """The edited model with random weights."""
    return add_noise(built(**FLAGS | flags).raw_model)


def run(folder: Path, data: Path, on_step=None, **flags) -> GPT:
    """A run of the edited page; returns the trained model."""
    cfg = make_config(**FLAGS | flags, data=str(data), out_dir=str(folder))
    return train(cfg, return_model=True, on_step=on_step)[1]


def one_step(batch: Tensor, **flags) -> dict[str, Tensor]:
    """Loss, gradients and buffers of one training step from random weights."""
    state, found = built(**FLAGS | flags), {}
    model = add_noise(state.raw_model)
    buffers = copy.deepcopy(dict(model.named_buffers()))

    def note(*_):
        for name, p in model.named_parameters():
            if p.grad is not None:
                found[f"the gradient of {name}"] = p.grad.to_dense().clone()

    def prepare(_, inputs):
        # Micro-batches begin with the same buffers, whatever an earlier one has written
        for name, buffer in buffers.items():
            model.get_buffer(name).copy_(buffer)
        return inputs[0].clamp(min=0), *inputs[1:]

    state.optimizer.register_step_pre_hook(note)
    model.register_forward_pre_hook(prepare)
    found["the loss"] = train_gpt.train_step(state, batch, 0.5)[0]  # no longer short
    assert len(found) > 1, (
        "the gradient norm is not finite on random tokens: look for a division by zero (a "
        "micro-batch without targets is one), a logarithm of zero or an attention row that sees "
        "nothing"
    )
    return found | {f"buffer {name}": buffer for name, buffer in model.named_buffers()}


def difference(ours, theirs, kind: str = "", rtol: float = 1e-5) -> str:
    """Says which of two tensors' or dicts' values is off most, by more than rtol; "" if none is.

    kind: the tensors' name, or how the keys that count start.
    """
    if isinstance(ours, Tensor):
        ours, theirs = {kind: ours}, {kind: theirs}
    # A gradient that is small beside the largest is mostly rounding
    largest = max([x.norm().item() for name, x in theirs.items() if "gradient" in name], default=0)
    apart = {"": 0.0}
    for name in (name for name in {**ours, **theirs} if name.startswith(kind)):
        if name not in ours or name not in theirs or ours[name].shape != theirs[name].shape:
            return f"{name} is missing, or of another shape"
        least = largest / 10 if "gradient" in name else 0.0
        apart[name] = relative(ours[name], theirs[name], least)
    worst = max(apart, key=apart.get)
    return "" if apart[worst] <= rtol else f"{worst} off by {apart[worst]:.1e}"


def relative(ours: Tensor, theirs: Tensor, least: float = 0.0) -> float:
    """The norm of the difference, relative to theirs or `least`; infinite for nan in one alone."""
    ours, theirs = ours.to_dense().double(), theirs.to_dense().double()
    if torch.equal(ours.isnan(), theirs.isnan()):
        ours, theirs = ours.nan_to_num(), theirs.nan_to_num()
    apart = (ours - theirs).norm() / theirs.norm().clamp(min=max(1e-9, least))
    return apart.nan_to_num(torch.inf).item()


@functools.cache
def draws(in_eval_mode: bool = False) -> bool:
    """Whether an edited step draws random numbers, which may be others in another layout."""
    with pytest.MonkeyPatch.context() as patch:
        if in_eval_mode:
            stay_in_eval_mode(patch)
        first = one_step(some_batch(), micro_batch=16, ngram_dropout=0.0)
        seed = train_gpt.derive_seed
        patch.setattr(train_gpt, "derive_seed", lambda *names: seed(*names, "other"))
        second = one_step(some_batch(), micro_batch=16, ngram_dropout=0.0)
    return bool(difference(first, second, "the "))


def stay_in_eval_mode(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(GPT, "train", lambda self, mode=True: nn.Module.train(self, False))


def compare(ours, theirs, kind: str = "", rtol: float = 1e-5) -> str:
    """The difference between what two functions return, which take a step in two layouts.

    A model that draws random numbers in training is kept in eval mode.
    """
    with pytest.MonkeyPatch.context() as patch:
        if draws():
            stay_in_eval_mode(patch)
        found = difference(ours(), theirs(), kind, rtol)
    if found and draws(in_eval_mode=True):
        pytest.skip(f"{found}; but train_step draws random numbers, other ones in another layout")
    return found


# --------------------------------------------------------------------------------------------------
# Two ranks

# Every layout has micro-batches of the same sequences
RANKS = dict(micro_batch=4, max_steps=5, eval_every=2)


def prepare_for_ranks(patch: pytest.MonkeyPatch, in_eval_mode: bool) -> None:
    """Random weights, missing targets, and sequences and losses that differ much between the ranks.

    in_eval_mode: for a model that draws random numbers in training.
    """
    init_weights, batch_of, forward = model_page.init_weights, train_gpt.get_batch, GPT.forward

    def init_and_add_noise(model, *args):
        init_weights(model, *args)
        add_noise(model)

    def some_targets(stream, dist_ctx, step: int, *rest, **named):
        batch = batch_of(stream, dist_ctx, step, *rest, **named)
        batch[:, 1:][(batch[:, 1:] >= ord("a")) & (batch[:, 1:] < ord("h"))] = -1
        # From the third step on, the last 8 of 16 sequences, the second rank's, are of one token,
        # another one in each step
        if step > 1:
            batch[8 - 8 * dist_ctx.rank :] = ord("z") - step
        return batch

    def of_valid_tokens(self, idx, *rest, **named):
        found = forward(self, idx.clamp(min=0), *rest, **named)
        is_of_one_token = self.training and bool((idx == idx[0, 0]).all())
        return 10 * found if is_of_one_token else found

    if in_eval_mode:
        stay_in_eval_mode(patch)
    patch.setattr(model_page, "init_weights", init_and_add_noise)
    patch.setattr(train_gpt, "get_batch", some_targets)
    patch.setattr(GPT, "forward", of_valid_tokens)


def worker(folder: Path, in_eval_mode: bool) -> None:
    """What each rank does: runs, of which it leaves its weights beside the folder; resumed ones."""
    # A rank that waits for the other one in vain fails soon
    timeout = timedelta(seconds=15)
    dist.init_process_group = functools.partial(dist.init_process_group, timeout=timeout)
    prepare_for_ranks(pytest.MonkeyPatch(), in_eval_mode)
    for parallel in ("ddp", "fsdp"):
        whole, resumed = folder / parallel, folder / f"{parallel}-resumed"
        flags = RANKS | dict(parallel=parallel, save_every=3, keep="all")
        model = run(whole, folder / "data", **flags)
        left = [to_full(p.detach()) for p in model.parameters()], plain_attributes(model)
        torch.save(left, f"{folder / parallel}{dist.get_rank()}.pt")
        if dist.get_rank() == 0:
            shutil.copytree(whole, resumed)
            (resumed / "ckpt_5.pt").unlink()
        dist.barrier()
        run(resumed, folder / "data", **flags, resume="newest")


@pytest.fixture(scope="module")
def two_ranks(data, tmp_path_factory, it_trains) -> Path:
    """The folder of what the two ranks left behind."""
    folder = tmp_path_factory.mktemp("ranks")
    (folder / "data").symlink_to(data)
    mode = "eval" if draws() else "train"
    run_ranks(folder, __file__, folder, mode, timeout=120)
    said = ends_of_stderr(folder)
    is_stuck = re.search("Timed out waiting|timeout after|collective mismatch", said)
    assert not is_stuck, (
        "two ranks wait for each other, or get what was not meant for them: they went different "
        "ways, as by `if` on random numbers or on this rank's tokens or loss; let all decide by "
        "one value: sum_over_ranks, or a draw from a generator seeded with GPT.step_seed\n"
        f"{said}"
    )
    return folder


def ends_of_stderr(folder: Path) -> str:
    """What each rank printed last on standard error."""
    said = []
    for rank, path in enumerate(sorted(folder.glob("stderr*"))):
        said += [f"rank {rank}:", *path.read_text()[-1500:].splitlines()[-11:]]
    return "\n".join(said)


# --------------------------------------------------------------------------------------------------
# What all other tests need, which wait for it


@functools.cache
def first_fault() -> str:
    """What keeps the edited page from training or evaluating; "" if nothing does."""
    try:
        one_step(some_batch())
        model, idx = scrambled().eval(), some_batch(4)[:, :-1]
        before = {name: buffer.clone() for name, buffer in model.named_buffers()}
        with torch.no_grad():
            first, second = model(idx), model(idx)
    except Exception as error:
        hint = ""
        if "sparse" in str(error).lower():
            hint = "on one CPU rank p.grad of the n-grams is sparse; change grad_values(p)\n"
        return f"a step or an evaluation fails: {hint}{told(error)}"
    found = difference(first, second, "the logits")
    found = found or difference(dict(model.named_buffers()), before)
    if found:
        return (
            f"two evaluations of the same tokens differ ({found}): in eval mode, draw no random "
            "numbers and write no buffers (`if self.training`)"
        )
    return ""


@pytest.fixture(scope="module")
def it_trains() -> None:
    if first_fault():
        pytest.skip("waits for test_it_trains_and_evaluates")


@pytest.fixture(autouse=True)
def after_the_first_test(request) -> None:
    if request.node.name != "test_it_trains_and_evaluates":
        request.getfixturevalue("it_trains")


def test_it_trains_and_evaluates():
    assert not first_fault(), first_fault()


# --------------------------------------------------------------------------------------------------
# The model


@pytest.mark.parametrize("doc_mask", [False, True])
@torch.no_grad()
def test_causal(doc_mask):
    model, middle = scrambled(doc_mask=doc_mask), 13
    idx, other = some_batch(4)[:, :-1], some_batch(4, seed=1)[:, :-1]
    idx[0, middle] = EOT
    # Other sequences, and in the first one other tokens from the middle on, or before it
    later = torch.cat((idx[:1], other[1:]))
    earlier = later.clone()
    later[0, middle:] = other[0, middle:]
    earlier[0, :middle] = other[0, :middle]

    def logits(tokens: Tensor) -> Tensor:
        seed_all()  # equal seeds: equal draws
        return copy.deepcopy(model)(tokens)[0]  # a copy: forward may write

    for training in (False, True):
        model.train(training)
        ours, after, before = map(logits, (idx, later, earlier))
        found = difference(after[:middle], ours[:middle], "the logits", 1e-3)
        assert not found, (
            f"{found} with later tokens or other sequences: a position may see itself and earlier "
            "ones only, also in training (mask, shift, normalize, route and write buffers so)"
        )
        if doc_mask:
            found = difference(before[middle:], ours[middle:], "the logits", 1e-3)
            assert not found, (
                f"{found} with the document before, under --doc_mask: give attention the mask of "
                "AttnContext, and reach back by previous_token(), which stops at documents"
            )


def test_noise_cannot_be_learned():
    state = built(**FLAGS | dict(adam_lr=0.01))
    n_tokens = state.raw_model.cfg.vocab_size
    losses = []
    for step in range(60):
        generator = torch.Generator().manual_seed(step)
        batch = torch.randint(0, n_tokens, (16, 33), generator=generator)
        losses.append(train_gpt.train_step(state, batch, 0.5)[0].item())
    # Equal probabilities for all tokens are the best for random ones
    last, best = sum(losses[-10:]) / 10, min(losses[0], math.log(n_tokens))
    assert last > 0.97 * best, (
        f"the training loss on random tokens falls to {last:.2f}, below {best:.2f}: what it is "
        "computed from has seen the targets"
    )


@torch.no_grad()
def test_a_new_model_is_undecided():
    model, batch = built(**FLAGS).raw_model.eval(), some_batch()
    loss, best = model(batch[:, :-1], batch[:, 1:]).item(), math.log(model.cfg.vocab_size)
    assert loss < 1.2 * best, (
        f"a new model's loss is {loss:.2f} on random tokens, and {best:.2f} with equal "
        "probabilities: its logits start too large; see the row in PARAM_TABLE of what makes them "
        "(for tied embeddings, wte's: init=normal(0.02), lr_mul=1)"
    )


def test_parameters_are_trained():
    state = built(**FLAGS)
    model = state.raw_model
    known = {*model.parameters(), *model.modules()}
    for name, module in model.named_modules():
        for key, value in vars(module).items():
            if key.startswith("_"):
                continue
            for leaf in tree_leaves(value):
                is_parameter = isinstance(leaf, Tensor) and leaf.is_leaf and leaf.requires_grad
                is_lost = (is_parameter or isinstance(leaf, nn.Module)) and leaf not in known
                assert not is_lost, (
                    f"{key} of {name or 'GPT'} holds a parameter that PyTorch does not know, so "
                    "that it is neither trained nor saved: use nn.ParameterList or nn.ModuleList"
                )
    given = {p for group in state.optimizer.param_groups for p in group["params"]}
    left = [name for name, p in model.named_parameters() if p.requires_grad and p not in given]
    assert not left, (
        f"the optimizer has not been given {left[0]}: make_optimizer must hand out every "
        "parameter that requires a gradient"
    )
    used = set()
    deep = model_page.GPT(dataclasses.replace(model.cfg, n_layer=12), seed=None)  # has skips
    for name, _ in (*model.named_parameters(remove_duplicate=False), *deep.named_parameters()):
        rows = [spec for spec in model_page.PARAM_TABLE if re.fullmatch(spec.pattern, name)]
        used |= {id(spec) for spec in rows[:1]}
    idle = [spec.pattern for spec in model_page.PARAM_TABLE if id(spec) not in used]
    assert not idle, (
        f"the row {idle[0]} of PARAM_TABLE is for no parameter: the first row that matches a "
        "whole name counts; put it before the other, or correct its pattern"
    )


def test_what_is_learned(monkeypatch):
    state, n_steps = built(**FLAGS | dict(max_steps=12)), 12
    model, forward = state.raw_model, GPT.forward
    if not all(p.requires_grad for p in model.parameters()):
        add_noise(model)  # fine-tuning: what is frozen has been trained
    n_tokens = model.cfg.vocab_size
    # Each token is followed by the next one on a circle of all tokens
    circle = torch.randperm(n_tokens, generator=torch.Generator().manual_seed(0))
    place_of, wrong, has_gradient = circle.argsort(), [], set()

    def after(places: Tensor, n: int, offset: int = 0) -> Tensor:
        """The n tokens from each of these places (B, 1) on."""
        return circle[(places + offset + torch.arange(n)) % n_tokens]

    def checked(self, idx, targets=None, *rest, **named):
        if targets is not None and targets.shape == idx.shape:
            # Most tokens say where a sequence begins; a few may have been replaced
            starts = (place_of[idx] - torch.arange(idx.size(1))) % n_tokens
            expected = after(starts.mode(1, keepdim=True).values, idx.size(1), 1)
            wrong.append(((targets >= 0) & (targets != expected)).float().mean().item())
        return forward(self, idx, targets, *rest, **named)

    def note(*_):
        for name, p in model.named_parameters():
            if p.grad is not None and p.grad.norm() > 0:
                has_gradient.add(name)

    monkeypatch.setattr(GPT, "forward", checked)
    state.optimizer.register_step_pre_hook(note)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    for step in range(n_steps):
        places = torch.randint(n_tokens, (16, 1), generator=torch.Generator().manual_seed(step))
        train_gpt.train_step(state, after(places, 33), step / n_steps)
    share = sum(wrong) / max(1, len(wrong))
    assert share < 0.01, (
        f"{share:.0%} of the targets that train_step gives GPT.forward are not the tokens that "
        "follow the inputs: shift by one (batch[:, :-1] and batch[:, 1:]), and set to -1 what is "
        "not to be learned"
    )
    with torch.no_grad():
        logits = model.eval()(after(places, 32)).mT
    losses = {n: nn.functional.cross_entropy(logits, after(places, 32, n)) for n in range(-2, 5)}
    best = min(losses, key=losses.get)
    assert best == 1, (
        f"after {n_steps} steps on sequences in which each token has one successor, the model "
        f"expects the token at an offset of {best} (0: the one that it reads) instead of 1: the "
        "loss that is trained is not the next token's; see GPT.loss and what it calls"
    )

    def family(name: str) -> str:
        """The same for all layers and experts: some may not have been used yet."""
        return re.sub(r"\d+", "N", name)

    learns = set()
    for name, p in model.named_parameters():
        if name in has_gradient and not torch.equal(p, before[name]):
            learns.add(family(name))
    idle = [n for n, p in model.named_parameters() if p.requires_grad and family(n) not in learns]
    assert not idle, (
        f"{idle[0]} learns nothing in a run of {n_steps} steps: its gradient is cut (detach, "
        "no_grad), or always zero (a product of two that start at zero), or the optimizer leaves "
        "it out; if that is meant, freeze it by requires_grad_(False)"
    )


def test_initial_values(monkeypatch):
    # The last layer starts as an induction head, which it is not if there are more
    attention = type(built(**FLAGS).raw_model.blocks[-1].attn)
    monkeypatch.setattr(attention, "init_as_induction_head", lambda self: None, raising=False)

    def drawn(**flags) -> dict[str, Tensor]:
        """What rows of PARAM_TABLE draw, up to a scale, which may depend on the depth."""
        found = {}
        for name, p in built(**FLAGS | dict(window="L") | flags).raw_model.named_parameters():
            if get_spec(name, p).init and p.numel() > 1 and p.std() > 0:
                found[name] = (p - p.mean()) / p.std()
        return found

    ours, deeper, other = drawn(), drawn(n_layer=4), drawn(seed=1)
    moved = []
    for name, p in ours.items():
        if p.shape == deeper[name].shape and relative(p, deeper[name]) > 1e-4:
            moved.append(name)
    assert not moved, (
        f"{moved[0]} starts at other values if there are more layers: init, in its row of "
        "PARAM_TABLE, must draw from the generator that it gets, which is seeded by (seed, name), "
        "and nothing else"
    )
    fixed = [name for name, p in ours.items() if relative(p, other[name]) < 0.1]
    assert not fixed, (
        f"{fixed[0]} starts at the same values with every --seed: draw from the generator that "
        "init gets"
    )


def test_flags_reach_the_model():
    cfg = make_config(**FLAGS)
    for field in dataclasses.fields(GPTConfig):
        if not hasattr(cfg, field.name):
            continue
        value = getattr(cfg, field.name)
        other = "SL:5" if isinstance(value, str) else 2 * (value or 257) + 1
        changed = dataclasses.replace(cfg, **{field.name: other})
        assert getattr(train_gpt.gpt_config(changed, 257), field.name) == other, (
            f"--{field.name} does not reach the model: pass it on in gpt_config"
        )


def test_checkpoint_rebuilds_the_model(whole):
    folder, model = whole
    checkpoint, idx = final(folder), some_batch(4)[:, :-1]
    rebuilt = GPT(GPTConfig(**checkpoint["model_config"])).eval()
    load_weights(rebuilt, checkpoint, folder)
    found = difference(rebuilt(idx), copy.deepcopy(model).eval()(idx), "the logits")
    assert not found, (
        f"{found} between the trained model and one rebuilt from its checkpoint, as for sampling: "
        "what the model computes with belongs in parameters, persistent buffers or fields of "
        "GPTConfig"
    )


@pytest.mark.parametrize(
    "flags", [{}, dict(window="SL:5", doc_mask=True)], ids=["plain", "window and documents"]
)
@torch.no_grad()
def test_cached_decoding(flags):
    model, idx = scrambled(**flags).eval(), some_batch(2)[:, :-1]
    idx[:, 12] = EOT
    whole, cache = model(idx), KVCache(model, len(idx))
    first = 0
    for end in range(7, 33):  # seven tokens at once, then one by one
        logits = next_logits(model, idx[:, first:end], cache)
        found = difference(logits, whole[:, end - 1 : end], "the logits", 1e-3)
        assert not found, (
            f"with a KV cache, {found} at position {end - 1}: what looks at other tokens or at "
            "positions must use previous_token() or GPT.backbone's `position`, and attention do "
            "the same where there is a ctx.kv_cache; otherwise the model is sampled without a "
            "cache, which is slower"
        )
        first = end


@pytest.mark.parametrize("backend", ["sdpa", "blocked"])
@pytest.mark.parametrize(
    "flags", [{}, dict(window="SL:5", doc_mask=True)], ids=["plain", "window and documents"]
)
@torch.no_grad()
def test_attention_masks(flags, backend, monkeypatch):
    model, idx = scrambled(**flags).eval(), some_batch(2)[:, :-1]
    idx[:, 12] = EOT
    model.attn_backend = backend
    logits = model(idx)

    def whole_masks(self, idx, attn_backend):
        position = torch.arange(idx.size(1))
        docs = (None, None)
        if self.eot is not None:
            number = (idx == self.eot).cumsum(1)
            docs = number[:, None, :, None], number[:, None, None, :]
        masks = {}
        for window in self.windows:
            masks[window] = model_page.may_attend(position[:, None], position, window, *docs)
        return masks

    monkeypatch.setattr(GPT, "attention_masks", whole_masks)
    model.attn_backend = "sdpa"
    found = difference(logits, model(idx), "the logits", 1e-4)
    assert not found, (
        f"with --attn {backend}, {found} from attention by a whole mask of may_attend: "
        "attention_mask in ops/attention.py leaves the mask out where attention is plainly causal, "
        "and blocked attention the keys outside of a window; change them like may_attend, or train "
        "with --attn sdpa and a mask in all cases"
    )


def test_trained_loss():
    model, batch = scrambled(), masked_batch()
    x, y = batch[:, :-1].clamp(min=0), batch[:, 1:]

    def loss(targets: Tensor) -> Tensor:
        seed_all()
        return copy.deepcopy(model)(x, targets).detach()

    with_gradients = loss(y)
    with torch.no_grad():
        without, parts = loss(y), []
        for ours in (y < 100, y >= 100):
            part = y.masked_fill(ours, -1)
            parts.append(loss(part) * ((part >= 0).sum() / (y >= 0).sum()))
    found = difference(with_gradients, without, "the loss")
    assert not found, (
        f"in training mode, {found} with gradients from without: the line that is trained is "
        "another one than that which you changed; see GPT.loss and what it calls"
    )
    found = difference(sum(parts), without, "the loss", 1e-4)
    assert not found, (
        f"in training mode, {found} if two calls have a part of the targets each: GPT.forward must "
        "return the mean over targets that are not -1, not over all positions"
    )


def test_evaluated_loss():
    model, batch = scrambled().eval(), masked_batch()
    x, y = batch[:, :-1].clamp(min=0), batch[:, 1:]
    with torch.no_grad():
        evaluated, logits = model(x, y), model(x)
    found = difference(model(x, y), evaluated, "the loss")
    assert not found, (
        f"in eval mode, {found} with gradients from without: what depends on them belongs under "
        "`if self.training`"
    )
    expected = nn.functional.cross_entropy(logits.flatten(0, 1), y.flatten(), ignore_index=-1)
    found = difference(evaluated, expected, "the loss")
    assert not found, (
        f"in evaluation, {found} from the cross entropy of the logits: GPT.loss and GPT.logits "
        "both call head, change both; a term of the training loss alone belongs under `if "
        "self.training`, else val_loss contains it too"
    )


def test_evaluation_is_in_eval_mode(data):
    state, modes = built(**FLAGS | dict(data=str(data), eval_tokens=512)), set()
    stream = open_stream(state.cfg, state.dist_ctx)
    for module in add_noise(state.raw_model).modules():
        module.register_forward_pre_hook(lambda module, _: modes.add(module.training))
    for name in ("evaluate", "sample_text"):
        function = getattr(train_gpt, name)
        found = [function(state, stream) for _ in range(2)]
        assert True not in modes, (
            f"{name} calls a module in training mode, in which dropout is active: "
            "call the model that `with state.evaluating() as model` puts into eval mode"
        )
        assert found[0] == found[1], (
            f"{name} gives {found[0]}, and {found[1]} the next time: evaluate on the "
            "same tokens, and change nothing"
        )
        is_training = state.raw_model.training
        assert is_training, (
            f"{name} leaves the model in eval mode, in which the next step would "
            "train without dropout: put it back, as state.evaluating() does"
        )


@torch.no_grad()
def test_int8_weights():
    model, idx = scrambled().eval(), some_batch(4)[:, :-1]
    found = difference(quantize(copy.deepcopy(model))(idx), model(idx), "the logits", 0.1)
    assert not found, (
        f"with weights in int8, {found}: int8.quantize replaces Linear and Embedding layers; give "
        "one that does more than multiply a class of its own, which it leaves alone, or do without "
        "int8"
    )


def test_traced_graph():
    model, idx = scrambled().eval().requires_grad_(False), some_batch(3)[:, :20]
    model.attn_backend = "sdpa"  # as export.py has it
    expected = model(idx)
    try:
        found = difference(traced(model).module()(idx), expected, "the logits", 1e-3)
    except UserError as error:
        found = str(error)
    assert not found, (
        f"export.py --to torch-export and onnx fail: {found}; keep `if` on tensors, .item() and "
        ".tolist() out of the forward pass, or do without these exports"
    )


# --------------------------------------------------------------------------------------------------
# The step: the layout does not change the result


def masked_batch() -> Tensor:
    """Targets of -1 here and there, and in all of the second of four micro-batches."""
    batch = some_batch()
    batch[:, 1:][torch.rand(16, 32, generator=torch.Generator().manual_seed(2)) < 0.3] = -1
    batch[4:8, 1:] = -1
    return batch


@pytest.mark.parametrize("micro_batch", [1, 4])
def test_micro_batches(micro_batch):
    # As many targets in each sequence: a term that is a mean per sequence is the same then
    batch = some_batch()
    batch[:, 3::4] = -1
    found = compare(
        lambda: one_step(batch, micro_batch=micro_batch, loss_chunk=0),
        lambda: one_step(batch, micro_batch=16, loss_chunk=0),
        "the ",
    )
    assert not found, (
        f"{found} with --micro_batch {micro_batch} instead of 16: train_step must weight each "
        "micro-batch by its number of targets; a term across sequences (contrastive, balance of "
        "experts) may differ: then compare runs of one --micro_batch only"
    )


def test_a_step_reports_the_mean(monkeypatch):
    forward, seen = GPT.forward, []

    def counted(self, idx, targets=None, *rest, **named):
        found = forward(self, idx, targets, *rest, **named)
        if targets is not None:
            seen.append((found.item(), int((targets >= 0).sum())))
        return found

    monkeypatch.setattr(GPT, "forward", counted)
    batch = masked_batch()
    batch[2:4, 7] = EOT
    loss = one_step(batch, micro_batch=4)["the loss"].item()
    assert math.isfinite(loss), (
        f"train_step's loss is {loss} if a micro-batch has no targets: a mean over them divides by "
        "zero; take their sum / n.clamp(min=1)"
    )
    mean = sum(loss * n for loss, n in seen) / sum(n for _, n in seen)
    assert abs(loss - mean) < 1e-5 * mean, (
        f"train_step's loss is {loss / mean:.4f} of the mean over the targets that GPT.forward "
        "got: targets that are set to -1 after they were counted in n_targets, or a weight of a "
        "micro-batch that is not its share of them"
    )


def test_clipping():
    batch = some_batch().fill_(ord("z"))  # equal tokens: a norm of about 9
    batch[:, 0] = ord("=")  # the rest is an answer, if only those are trained
    gradients = one_step(batch, grad_clip=0.3)
    norms = [x.norm() for name, x in gradients.items() if "gradient" in name]
    norm = torch.stack(norms).norm()
    assert norm < 1.5, (  # more than 0.3: each parameter may be clipped by itself, or get noise
        f"with --grad_clip 0.3, the optimizer gets gradients of norm {norm:.2f}: clip what it will "
        "get, once, after the last micro-batch and before optimizer.step()"
    )


@pytest.mark.parametrize("loss_chunk", [7, 128, 4096])
def test_loss_in_chunks(loss_chunk):
    found = compare(
        lambda: one_step(masked_batch(), micro_batch=16, loss_chunk=loss_chunk),
        lambda: one_step(masked_batch(), micro_batch=16, loss_chunk=0),
        "the ",
    )
    assert not found, (
        f"{found} with --loss_chunk {loss_chunk} instead of 0: chunked_loss takes a mean over the "
        "targets that are not -1, of x and the listed parameters alone; what compares tokens "
        "belongs in GPT.forward, outside of the chunks"
    )


@pytest.mark.parametrize("mode", ["full", "selective"])
def test_recomputation(mode):
    # Four layers: what a layer takes from an earlier one goes wrong only where that is recomputed
    plain = one_step(some_batch(), n_layer=4, checkpointing="none")
    recomputed = one_step(some_batch(), n_layer=4, checkpointing=mode)
    found = difference(recomputed, plain, "buffer")
    assert not found, (
        f"{found} with --checkpointing {mode}: backward recomputes a block, which then writes its "
        "buffer again; return the new value and write it in GPT.backbone, after the block, or "
        "train with --checkpointing none"
    )
    found = difference(recomputed, plain)
    assert not found, (
        f"{found} with --checkpointing {mode}: recomputed, a block gave something else, as it "
        "draws from a generator of its own, numpy or Python (draw from torch's global one, which "
        "is restored), or reads what it has written"
    )


def test_compiled():
    if not compiler_works():
        pytest.skip("torch.compile finds no working compiler here")
    # One shape of blocks and one of the loss: compiling takes a while
    flags = dict(short_frac=0.0, loss_chunk=128, window="S:9", attn="sdpa", compile="default")

    def step(is_compiled: bool, backend: str, dtype: str) -> dict[str, Tensor]:
        """A step after the same warm-up on zeros, which attributes do not forget."""
        with pytest.MonkeyPatch.context() as patch:
            compile_with(patch, backend)
            if not is_compiled:
                patch.setattr(train_gpt, "apply_compile", lambda *_: None)
            return one_step(some_batch(), **flags, dtype=dtype)

    # Kernels in fp32, where a difference shows; the graph alone in the dtype of this machine
    chosen = faster_dtype("auto", torch.device("cpu"), TINY["n_embd"])
    if bf16_fault():
        chosen = "fp32"
    found = ""
    try:
        for case, rtol in {("inductor", "fp32"): 1e-4, ("aot_eager", chosen): 0.1}.items():
            ours, theirs = (functools.partial(step, compiled, *case) for compiled in (True, False))
            found = found or compare(ours, theirs, rtol=rtol)
    except Exception as error:
        found = f"training fails:\n{told(error)}\n"
    assert not found, (
        f"under --compile, {found}: each block and the loss are one graph, so keep `if` on "
        "tensors, .item(), bool indices and Python's side effects out of them; all else trains "
        "without --compile"
    )


@functools.cache
def bf16_fault() -> str:
    """What keeps the edited page from a step with activations in bf16, without a compiler."""
    try:
        one_step(some_batch(), dtype="bf16")
    except Exception as error:
        return told(error)
    return ""


def test_a_step_in_bf16():
    assert not bf16_fault(), (
        "a step with --dtype bf16 fails, in which activations are bf16 and weights fp32: use "
        "model.Linear instead of nn.Linear, or cast one of them, x @ w.to(x.dtype) or "
        f"layer(x.to(w.dtype))\n{bf16_fault()}"
    )


def test_bf16():
    if bf16_fault():
        pytest.skip("waits for test_a_step_in_bf16")

    def losses(dtype: str) -> Tensor:
        state = built(**FLAGS | dict(dtype=dtype))
        return torch.stack([train_gpt.train_step(state, some_batch(), 0.5)[0] for _ in range(6)])

    found = compare(lambda: losses("bf16"), lambda: losses("fp32"), "the loss", 2e-3)
    assert not found, (
        f"{found} between bf16 and fp32 in six steps: sum, exponentiate and normalize in fp32 "
        "(.float()), and make tensors in the dtype of x"
    )


def test_batches(data, tmp_path, monkeypatch):
    class Taken(Exception):
        """What the loop calls with the number of a step, and its arguments' rank."""

    def take(run: Run, get_batch):
        raise Taken(get_batch, run.dist_ctx)

    monkeypatch.setattr(Run, "prefetching", take)

    @functools.cache
    def loop_of(seed: int) -> tuple:
        with pytest.raises(Taken) as taken:
            run(tmp_path / str(seed), data, seed=seed)
        return taken.value.args

    def batch(step: int, rank: int = 0, world_size: int = 1, seed: int = 0) -> Tensor:
        get_batch, dist_ctx = loop_of(seed)
        dist_ctx.rank, dist_ctx.world_size = rank, world_size
        return get_batch(step)

    parts = torch.cat([batch(77, rank, 4) for rank in range(4)])
    assert sorted(parts.tolist()) == sorted(batch(77).tolist()), (
        "the batches of four ranks are not the parts of one rank's: get_batch must depend on "
        "(seed, step) alone, and give a rank its part of the sequences"
    )
    differ = not torch.equal(batch(77), batch(78)) and not torch.equal(batch(77), batch(77, seed=1))
    assert torch.equal(batch(77), batch(77)) and differ, (
        "a batch is not a function of (seed, step): draw in get_batch from a generator seeded with "
        "derive_seed(stream.seed, step), and keep no state between calls, which resuming would lose"
    )


# --------------------------------------------------------------------------------------------------
# Runs


def remember(state, loss: Tensor) -> None:
    """What an edit might keep in state.extra."""
    kept = state.extra.get("test_train", dict(sum=0, steps=[]))
    steps = [*kept["steps"], state.step]
    state.extra["test_train"] = dict(sum=kept["sum"] + loss, steps=steps, note="kept")


@pytest.fixture(scope="module")
def whole(data, tmp_path_factory, it_trains) -> tuple[Path, GPT]:
    """A run of 20 steps, and its model."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    return folder, run(folder, data, remember, save_every=10, keep="all")


def record(folder: Path, *keys: str, parts=("model", "optimizer", "extra")) -> dict[str, Tensor]:
    """What a run logged (under these keys), and parts of its newest checkpoint, by name."""
    found = {}
    for key in keys or ("train_loss", "grad_norm", "tokens", "val_loss"):
        values = [math.nan if value is None else value for value in rows(folder, key)]
        found[key] = torch.tensor(values, dtype=torch.float64)
    saved = final(folder)
    for path, leaf in tree_flatten_with_path({part: saved[part] for part in parts})[0]:
        if not isinstance(leaf, Tensor):
            leaf = torch.tensor(hash(leaf))
        found[f"checkpoint{keystr(path)}"] = leaf
    return found


def plain_attributes(model: GPT) -> dict:
    """Numbers and texts that the modules of a model hold, in lists and dicts too, by name."""
    found = {}
    for name, module in model.named_modules():
        for key, value in vars(module).items():
            is_plain = all(isinstance(leaf, (int, float, str)) for leaf in tree_leaves(value))
            if is_plain and not key.startswith("_"):
                found[f"{name}.{key}"] = value
    return found


@pytest.fixture(scope="module")
def resuming_fault(data, whole, tmp_path_factory) -> str:
    """What differs after a kill and --resume; "" if nothing does."""
    theirs, ours = whole[0], tmp_path_factory.mktemp("resumed") / "run"
    shutil.copytree(theirs, ours)
    (ours / "ckpt_20.pt").unlink()
    model = run(ours, data, remember, save_every=10, keep="all", resume="newest")
    attributes, expected = plain_attributes(model), plain_attributes(whole[1])
    apart = [name for name in expected if attributes.get(name) != expected[name]]
    if apart:
        return (
            f"{apart[0]} is {attributes.get(apart[0])}, and {expected[apart[0]]} without them: a "
            "checkpoint does not hold attributes; use a persistent buffer or state.extra"
        )
    found = difference(record(ours), record(theirs), rtol=0)
    return found and (
        f"{found}: keep what later steps need in parameters, persistent buffers, tensors of the "
        "optimizer's state[p] or state.extra, and draw from the global generators, which each step "
        "seeds"
    )


def test_resuming_is_exact(resuming_fault):
    assert not resuming_fault, f"after a kill and --resume, {resuming_fault}"


def test_watching_disturbs_nothing(data, whole, tmp_path):
    run(tmp_path / "run", data, remember, eval_every=3, sample_every=7, save_every=5)
    ours = record(tmp_path / "run", "train_loss", "grad_norm")
    found = difference(ours, record(whole[0], "train_loss", "grad_norm"), rtol=0)
    assert not found, (
        f"with --eval_every 3 --sample_every 7 --save_every 5, {found}: evaluation or sampling "
        "changes training, as by a buffer written without `if self.training`, a generator of its "
        "own, or weights that are not put back"
    )


def test_the_log_is_true(data, tmp_path, monkeypatch):
    forward, trained, seen = GPT.forward, 0, []

    def counted(self, idx, targets=None, *rest, **named):
        nonlocal trained
        if targets is not None and torch.is_grad_enabled():
            trained += targets.numel()
        return forward(self, idx, targets, *rest, **named)

    def note(optimizer, *_):
        seen.append((trained, {group["lr"] for group in optimizer.param_groups}))

    monkeypatch.setattr(GPT, "forward", counted)
    handle = register_optimizer_step_pre_hook(note)
    run(tmp_path / "run", data, max_steps=6, warmup_frac=0.4)
    handle.remove()
    tokens, expected = rows(tmp_path / "run", "tokens")[:6], [count for count, _ in seen]
    assert tokens == expected, (
        f"the log counts {tokens} tokens, and GPT.forward was given {expected}: add to "
        "state.tokens what train_step trains on"
    )
    wrong = [lr for lr, (_, rates) in zip(rows(tmp_path / "run", "lr"), seen) if lr not in rates]
    assert not wrong, (
        f"the log has lr {wrong[0]:.3g}, which no parameter group had in that step: set "
        "group['lr'] before optimizer.step(), and leave it until the step is logged"
    )


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_two_ranks_train_as_one_process(parallel, two_ranks, data, tmp_path, monkeypatch):
    prepare_for_ranks(monkeypatch, in_eval_mode=draws())
    attributes = plain_attributes(run(tmp_path / "one", data, **RANKS))
    said = ends_of_stderr(two_ranks)
    left = [two_ranks / f"{parallel}{rank}.pt" for rank in range(2)]
    likely = {
        "ddp": "where a rank may skip a layer or an expert, pass find_unused_parameters=True to "
        "apply_ddp in train_gpt.py's build",
        "fsdp": "outside of its block's forward, a weight is a shard (to_full gathers it), and "
        "one without dimensions cannot be sharded",
    }
    assert all(path.exists() for path in left), (
        f"two ranks fail with --parallel {parallel}: {likely[parallel]}; else see\n{said}"
    )
    assert ranks_agree(two_ranks, parallel), (
        f"with --parallel {parallel}, two ranks end with different weights: what changes weights "
        "or gradients, or decides on an update (this rank's loss), must be the same on all ranks; "
        "average it by sum_over_ranks, or draw it from a generator seeded with GPT.step_seed"
    )
    ours, theirs = (record(folder, parts=()) for folder in (two_ranks / parallel, tmp_path / "one"))
    found = difference(ours, theirs)
    cause = (
        "the mean of the ranks' losses must be the mean over all targets; what forward writes or "
        "train_step counts is of this rank's tokens, if not averaged"
    )
    firsts = [{key: run[key][:1] for key in ("train_loss", "grad_norm")} for run in (ours, theirs)]
    if found.startswith("val_loss"):
        cause = "evaluate must weight each batch by its number of targets"
    elif not difference(*firsts):
        cause = "the first loss and gradient agree, so it is the update that differs"
    # Attributes that steps change
    theirs, before = torch.load(left[0])[1], plain_attributes(built(**FLAGS).raw_model)
    for name, value in attributes.items():
        if before.get(name) != value != theirs.get(name):
            cause = (
                f"{name} is {theirs.get(name)} there and {value} here: the steps on dummy data "
                "that two ranks begin with change attributes, too; use a buffer, or GPT.step_seed"
            )
    if found and draws(in_eval_mode=True):
        pytest.skip(f"{found}; but train_step draws random numbers, other ones on each rank")
    assert not found, f"with two ranks and --parallel {parallel}, {found} from one process: {cause}"


def ranks_agree(folder: Path, parallel: str) -> bool:
    """Whether both ranks have ended, with the same weights."""
    paths = [folder / f"{parallel}{rank}.pt" for rank in range(2)]
    if not all(path.exists() for path in paths):
        return False
    ours, theirs = (torch.load(path)[0] for path in paths)
    return all(map(torch.equal, ours, theirs))


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_two_ranks_resume(parallel, two_ranks, resuming_fault):
    if resuming_fault:
        pytest.skip("waits for test_resuming_is_exact")
    if not ranks_agree(two_ranks, parallel):
        pytest.skip("waits for test_two_ranks_train_as_one_process")
    whole, resumed = two_ranks / parallel, two_ranks / f"{parallel}-resumed"
    said = ends_of_stderr(two_ranks)
    assert (resumed / "ckpt_5.pt").exists(), f"two ranks cannot resume; see\n{said}"
    found = difference(record(resumed), record(whole), rtol=0)
    assert not found, (
        f"after --resume with two ranks and --parallel {parallel}, {found}: optimizer state that "
        "only one rank keeps is lost in a checkpoint; keep state[p] on all, of the shape or with "
        "the rows of this rank's shard of p"
    )


if __name__ == "__main__":
    try:
        worker(Path(sys.argv[1]), in_eval_mode=sys.argv[2] == "eval")
    except Exception as error:
        print(told(error), file=sys.stderr)
        exit_process(1)
    exit_process(0)
