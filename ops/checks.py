"""Checks of a freshly built model: attention, causal order and loss are what the code around them assumes."""

import contextlib
import copy
import math
import random

import numpy as np
import torch
from torch import Tensor

from ops.attention import attention, attention_mask
from ops.init import ModelError, persistent_buffers
from ops.parallel import eval_mode, to_local
from ops.params import check_param_table, some


def check_model(model, cross_entropy, table: dict, optimizers: dict) -> list[str]:
    """Raises ModelError if the model would silently train something wrong; the other arguments are model.py's.

    Overwrites weights and buffers, which are initialized afterwards. Returns lines for the log about what is allowed,
    but perhaps not intended.
    """
    check_param_table(model, table, optimizers)
    check_attention(model)
    check_loss(cross_entropy, model)
    if model.cfg.seq_len < 2:
        return []
    show_zeros(model)
    notes = take_notes(model)
    try:
        check_values(model, cross_entropy, torch.float32, min(model.cfg.seq_len, 128))
    except (ModelError, torch.OutOfMemoryError):
        raise
    except Exception:  # kernels of one dtype, chunks of a longer context: then as it is trained
        check_values(model, cross_entropy, model.compute_dtype, model.cfg.seq_len)
    return notes


@torch.no_grad()
def check_values(model, cross_entropy, dtype: torch.dtype, length: int) -> None:
    """The checks that compare logits and losses, in this dtype, on `length` tokens."""
    trained_in = model.compute_dtype
    with as_plain(model, dtype):
        check_order(model, length)
        check_sum(model, cross_entropy, length)
        if not hasattr(model, "reshard"):
            check_config(model, trained_in, length)


@torch.no_grad()
def take_notes(model) -> list[str]:
    """Notes on what is allowed, but perhaps not intended; only for models that run on a few tokens."""
    found, takers = [], [(note_windows, torch.float32), (note_dtype, model.compute_dtype)]
    if not hasattr(model, "reshard"):  # under FSDP, weights are not those that blocks see
        takers.append((note_traces, torch.float32))
    for taker, dtype in takers:
        try:
            with as_plain(model, dtype):
                found += taker(model)
        except ModelError:
            raise
        except Exception:
            continue
    return found


@torch.no_grad()
def check_attention(model) -> None:
    """Raises ModelError if the model's attention backend disagrees with plain attention on random numbers.

    A backend may only change how attention is computed: generation uses a KV cache, which not every backend can read.
    """
    cfg, device, name = model.cfg, model.cos.device, model.attn_backend
    length = min(cfg.seq_len, 128)
    place = torch.device("cpu") if name == "flex" else device  # where it needs no compiler
    dtype = torch.float32 if name == "flex" else model.compute_dtype
    generator = torch.Generator().manual_seed(0)
    q, k, v = torch.randn((3, 1, cfg.n_head, length, cfg.head_dim), generator=generator).to(place, dtype)
    tokens = torch.arange(length, device=place)[None] % cfg.vocab_size
    masks, plain = (
        {w: attention_mask(backend, tokens, w, model.doc_eot) for w in set(model.windows)}
        if hasattr(model, "reshard")  # FSDP: a bias may be of parameters that are in shards
        else model.attention_masks(backend, tokens)
        for backend in (name, "sdpa")
    )
    scores = q.float() @ k.float().mT / math.sqrt(cfg.head_dim)
    causal = torch.ones((length, length), dtype=torch.bool, device=place).tril()
    exact = dtype == torch.float32 and torch.get_float32_matmul_precision() == "highest"
    apart = 0.0
    for window, mask in masks.items():
        got, seen = attention(q, k, v, mask, name).float(), causal if plain[window] is None else plain[window]
        bias = torch.where(seen, 0.0, -math.inf) if seen.dtype == torch.bool else seen.float()
        want = (scores + bias).softmax(-1) @ v.float()
        off = torch.linalg.vector_norm(got - want, dim=-1) / torch.linalg.vector_norm(want, dim=-1)
        apart = max(apart, off.max().item())
    if not apart < (1e-3 if exact else 3e-2):
        raise ModelError(
            f"--attn {name} computes something else than softmax attention, so sampling would use another model; "
            "a backend may only change how attention is computed: put what changes the result into model.py, in "
            "GPT.attention_bias or CausalSelfAttention"
        )


PADDING = "a target of -1 is not counted: give F.cross_entropy ignore_index=-1, and another loss a mask"


def check_loss(cross_entropy, model) -> None:
    """Raises ModelError unless the loss is a sum over tokens whose target is not -1, so that batches can be split.

    A loss that draws random numbers is only checked to be a single number.
    """
    vocab_size, device = model.cfg.vocab_size, model.cos.device
    logits = torch.randn((6, vocab_size), generator=torch.Generator().manual_seed(0))
    targets = torch.arange(6) % vocab_size

    def loss(n: int, padding: int = 0, seed: int = 0, device: torch.device = device) -> Tensor:
        seed_all(seed)
        rows = torch.cat((targets.repeat(n), torch.full((padding,), -1)))
        return cross_entropy(logits.repeat(n + padding // 6, 1).to(device), rows.to(device), True)

    once = loss(1)
    if not isinstance(once, Tensor) or once.dim():
        raise ModelError(
            f"cross_entropy in model.py returns {kind_of(once)}; it must return a sum over tokens, (): reduction='sum'"
        )
    params = [p for p in model.parameters() if p.requires_grad]
    if once.requires_grad and all(g is None for g in torch.autograd.grad(once, params, allow_unused=True)):
        raise ModelError(
            "cross_entropy in model.py uses a parameter that is not the model's, so nothing would train it; make it in "
            "GPT.__init__ and use it in GPT.logits or GPT.chunk_loss"
        )
    if not torch.equal(once, loss(1, seed=1)):
        return
    twice = loss(2)
    if not torch.allclose(twice, 2 * once, rtol=1e-3):
        raise ModelError(
            f"cross_entropy in model.py gives {(twice / once).item():.3g} times the loss for twice the tokens; it must "
            "return their sum, which the trainer divides by the number of targets: reduction='sum'"
        )
    seed_all(0)
    parts = [cross_entropy(*part, True) for part in zip(*(t.to(device).split((1, 5)) for t in (logits, targets)))]
    if not torch.allclose(sum(parts), once, rtol=1e-3):
        raise ModelError(
            f"cross_entropy in model.py gives a loss of {once.item():.4g} for six tokens and {sum(parts).item():.4g} "
            "for the same in two parts, so it would depend on --micro_batch and --loss_chunk: a token's loss may not "
            "depend on others; if it is meant, take check_loss out of check_model in ops/checks.py"
        )
    try:  # not on a GPU, where no process survives that reads beyond a tensor
        padded = loss(1, padding=6, device=torch.device("cpu"))
    except (IndexError, RuntimeError) as error:
        if device.type != "cpu" and "device" in str(error):  # the loss has tensors there
            return
        raise ModelError(f"cross_entropy in model.py: {error}; {PADDING}") from None
    if not torch.allclose(padded, once.cpu(), rtol=1e-3):
        raise ModelError(f"cross_entropy in model.py gives another loss with tokens whose target is -1; {PADDING}")


def kind_of(value) -> str:
    return f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"


def seed_all(seed: int) -> None:
    """Seeds the generators that edits may draw from."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


@torch.no_grad()
def show_zeros(model) -> None:
    """Replace zeros and small constants, e.g. of gates, by random numbers, as they hide what is behind them.

    Under FSDP, replace all parameters, as none has values yet.
    """
    sharded = hasattr(model, "reshard")
    seed_all(0)
    for p in map(to_local, model.parameters()):
        hides = p.numel() and p.flatten()[0].abs() < 0.5 and bool((p == p.flatten()[0]).all())
        if p.is_floating_point() and (sharded or hides and p.requires_grad):
            p.normal_(std=p.size(-1) ** -0.5) if p.dim() > 1 else p.uniform_(0.5, 1.5)


@contextlib.contextmanager
def as_plain(model, dtype: torch.dtype):
    """Context manager: the model in this dtype, with PyTorch's attention (check_attention has checked the backend).

    Afterwards its modules have the attributes they had before, whatever forward passes have changed.
    """
    modules = list(model.modules())
    attributes = [dict(vars(module)) for module in modules]
    containers = [v for kept in attributes for v in kept.values() if isinstance(v, (dict, set, list))]
    contents = [copy.copy(container) for container in containers]
    for module in modules:
        if vars(module).get("backend") == model.attn_backend:
            module.backend = "sdpa"
        if vars(module).get("fp8"):
            module.fp8 = False
        if vars(module).get("compiled"):  # for other shapes it would be compiled again
            module.compiled = None
    model.attn_backend, model.compute_dtype = "sdpa", dtype
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(precision)
        for module, kept in zip(modules, attributes):
            vars(module).clear()
            vars(module).update(kept)
        for container, content in zip(containers, contents):  # the same ones, which hooks refer to
            if isinstance(container, list):
                container[:] = content
            else:
                container.clear()
                container.update(content)


def some_tokens(model, rows: int, length: int) -> Tensor:
    """Tokens to try a model with, int64 (rows, length), always the same ones."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, model.cfg.vocab_size, (rows, length), generator=generator).to(model.cos.device)


def check_order(model, length: int) -> None:
    """Raises ModelError if logits depend on later tokens, or on another sequence or document.

    A model that sees what it should predict has a low loss, and no use.
    """
    half, logits = length // 2, []
    cuts = (1, max(1, half - 1))  # neither of which is between chunks
    idx = some_tokens(model, 1 + len(cuts), length)
    changed = (idx + 1) % model.cfg.vocab_size
    for row, cut in enumerate(cuts, 1):
        changed[row, :cut] = idx[row, :cut]
    if model.doc_eot is not None:
        idx[0, half] = model.doc_eot
        changed[0, half:] = idx[0, half:]
    with eval_mode(model, {}):
        for tokens in (idx, changed):
            seed_all(1)
            logits.append(model(tokens))
    if not isinstance(logits[0], Tensor) or logits[0].shape[:2] != idx.shape:
        raise ModelError(
            f"GPT.forward returns {kind_of(logits[0])} for tokens of shape {tuple(idx.shape)}; expected logits (B, T, "
            "vocab_size), or with targets the sum of the tokens' losses, (): keep what is besides them in an attribute"
        )
    first, second = (x.clamp(-100, 100) for x in logits)  # of masked ones too
    off = (second - first).abs().nan_to_num(0)
    seen = {"tokens after it or in another sequence": max(off[row, :cut].max() for row, cut in enumerate(cuts, 1))}
    if model.doc_eot is not None:
        seen["another document"] = off[0, half:].max()
    for what, most in seen.items():
        if most > 1e-4 * first.nan_to_num(0).std():
            raise ModelError(
                f"logits of a token change by {most.item():.2g} with {what}, so the model sees what it should not: "
                "attention, shifts, pooling, norms and rounding scales may only look at earlier tokens of the same "
                "sequence (with --doc_mask, of the same document); if more is intended, take check_order out of "
                "check_values in ops/checks.py"
            )


def check_sum(model, cross_entropy, length: int) -> None:
    """Raises ModelError if GPT.forward's loss is not cross_entropy in evaluation, or not a sum in training.

    Checked on one target, where a mean over all stands out, and on all; what draws random numbers is not compared. Or
    if its training loss is another one when it is called again with the same seeds and buffers.
    """
    idx = some_tokens(model, 1, length)
    last = torch.where(torch.arange(length, device=idx.device) < length - 1, -1, idx)
    sharded = hasattr(model, "reshard")
    rtol = 2e-4 if model.compute_dtype == torch.float32 and not sharded else 3e-2  # FSDP has its own dtype
    buffers = [(module._buffers, dict(module._buffers)) for module in model.modules() if module._buffers]

    def loss(n: int, targets: Tensor = last, seed: int = 1) -> Tensor:
        seed_all(seed)
        model.step_seed = seed
        for present, before in buffers:
            present.clear()
            present.update({name: buffer if buffer is None else buffer.clone() for name, buffer in before.items()})
        return model(idx.repeat(n, 1), targets.repeat(n, 1))

    for targets in (last, idx):
        with eval_mode(model, {}):
            evaluated, again = loss(1, targets), loss(1, targets, seed=2)
            seed_all(1)
            expected = cross_entropy(model(idx).flatten(0, 1), targets.flatten(), False)
        if not isinstance(evaluated, Tensor) or evaluated.dim():
            raise ModelError(f"GPT.forward returns {kind_of(evaluated)} as loss; expected the sum over tokens, ()")
        if not expected.isfinite():  # random weights tell nothing
            return
        if torch.equal(evaluated, again) and not torch.allclose(evaluated, expected, rtol=rtol):
            raise ModelError(
                f"GPT.forward returns a loss of {evaluated.item():.6g} in evaluation, where cross_entropy of its "
                f"logits is {expected.item():.6g}: it must return their sum over tokens, of all targets but -1, which "
                "train_step may put there; add what only training has where self.training is true"
            )
    if sharded:  # ranks that run other blocks are told of when they train
        return
    with torch.enable_grad():
        once, again, twice = (loss(n, seed=seed).detach() for n, seed in ((1, 1), (1, 2), (2, 1)))
        repeated = [loss(1).detach() for _ in range(2)]
    if not all(torch.allclose(once, other, rtol=rtol / 20) for other in repeated):
        raise ModelError(
            "GPT.forward gives another loss for the same tokens, seeds and buffers when it is called again, so that "
            "neither recomputation nor a resume would repeat it: make state that a forward pass keeps a buffer "
            "(register_buffer), and draw from the global generators, or from one seeded from GPT.step_seed"
        )
    if torch.equal(once, again) and not torch.allclose(twice, 2 * once, rtol=rtol):
        raise ModelError(
            f"GPT.forward gives {(twice / once).item():.6g} times the loss for a batch that holds each sequence twice; "
            "all of a loss must be sums over tokens, or it would depend on --micro_batch: multiply a mean by the "
            "number of its tokens; if it is meant, take check_sum out of check_values in ops/checks.py"
        )


def check_config(model, trained_in: torch.dtype, length: int) -> None:
    """Raises ModelError when GPT(cfg), which is all that sample.py and export.py know of, is another model.

    trained_in: the dtype that the model was made with.
    """
    idx = some_tokens(model, 1, length)
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    try:
        with torch.random.fork_rng(devices=[]), torch.device("meta"):
            made = type(model)(model.cfg, compute_dtype=trained_in, doc_eot=model.doc_eot).eval()
        made.compute_dtype, logits = model.compute_dtype, []
        with eval_mode(model, {}):
            for function in (model, lambda idx: torch.func.functional_call(made, tensors, idx)):
                seed_all(1)
                logits.append(function(idx))
    except Exception:  # constructors that read values
        return
    ours, its = logits
    if not (ours - its).abs().nan_to_num(0).max() <= 1e-2 * ours.nan_to_num(0).std() + 1e-6:
        raise ModelError(
            "a model made by GPT(cfg) alone gives other logits than this one, so sample.py and export.py would use "
            "another model than is trained: what changes it must be a field of GPTConfig, which a flag of the same "
            "name sets, not an argument or attribute set in build; if it is intended, take check_config out of "
            "check_values in ops/checks.py"
        )


def note_windows(model) -> list[str]:
    """A line when windows change nothing."""
    length = min(model.cfg.seq_len, 128)
    if not any(0 < window < model.cfg.seq_len for window in model.windows) or length < 16:
        return []
    logits, model.doc_eot = [], None
    with eval_mode(model, {}):
        for window in (0, 8):
            model.windows = [window] * len(model.windows)
            seed_all(1)
            logits.append(model(some_tokens(model, 1, length)))
    return ["--window has no effect: the attention must use ctx.mask"] * torch.equal(*logits)


def note_traces(model) -> list[str]:
    """Notes on parameters that no gradient reaches, and on buffers that are written but not saved.

    Raises ModelError if forward passes write frozen parameters.
    """
    idx = some_tokens(model, 1, min(model.cfg.seq_len, 128))
    saved, params = persistent_buffers(model).keys(), dict(model.named_parameters())
    trained = {name: p for name, p in params.items() if p.requires_grad}

    def versions() -> dict[str, tuple]:
        tensors = params | {name: t for name, t in model.named_buffers() if name not in saved}
        return {name: (id(t), t._version) for name, t in tensors.items() if name not in trained}

    before = versions()
    seed_all(1)
    with torch.enable_grad():
        loss = model(idx, idx)
    written = [name for name, now in versions().items() if now != before.get(name)]
    frozen = [name for name in written if name in params]
    if frozen:
        raise ModelError(
            f"{frozen[0]} is a parameter that forward passes write, so recomputation would write it twice, and ranks "
            "and skipped steps would leave it inconsistent; make it a buffer with register_buffer"
        )
    notes = [f"{some(written)}: written in training but not saved in checkpoints (persistent=False)"] * bool(written)
    missed, seed = list(trained), 1
    while True:
        reached = torch.autograd.grad(loss, [trained[name] for name in missed], allow_unused=True)
        missed = [name for name, gradient in zip(missed, reached) if gradient is None]
        if not missed or seed == 8:
            break
        seed += 1  # layers may be left out at random
        seed_all(seed)
        model.step_seed = seed
        with torch.enable_grad():
            loss = model(idx, idx)
    return notes + [f"no gradient reaches {some(missed)}: no training changes it"] * bool(missed)


def note_dtype(model) -> list[str]:
    """A note if blocks output fp32 although the flags say otherwise, as when x meets fp32 weights uncast."""
    if model.compute_dtype == torch.float32:
        return []
    found = []

    def note(block, args, out) -> None:
        out = out[0] if isinstance(out, (tuple, list)) else out
        found.append(isinstance(out, Tensor) and out.dtype)

    hook = model.blocks[0].register_forward_hook(note)
    try:
        with eval_mode(model, {}):
            model(some_tokens(model, 1, min(model.cfg.seq_len, 16)))
    finally:
        hook.remove()
    if torch.float32 not in found:
        return []
    dtype = str(model.compute_dtype).removeprefix("torch.")
    return [f"blocks put out float32, not {dtype}: if that is not meant, a weight meets x without .to(x.dtype)"]
