"""Checks of a model when it is built: attention, order and loss are what everything around them takes them for."""

import contextlib
import math
import random

import numpy as np
import torch
from torch import Tensor

from ops.attention import attention, attention_mask
from ops.init import ModelError
from ops.parallel import clone_buffers, eval_mode, restore_buffers, to_local
from ops.params import check_param_table
from ops.warmup import side_effects


def check_model(model, cross_entropy, table: dict, optimizers: dict) -> None:
    """Raises ModelError for what would train something else than it seems to; the others are model.py's.

    Overwrites weights and buffers, which are drawn afterwards.
    """
    check_param_table(model, table, optimizers)
    check_attention(model)
    check_loss(cross_entropy, model.cfg.vocab_size, model.cos.device)
    if model.cfg.seq_len > 1:
        randomize(model)
        with as_plain(model):
            check_order(model)
            check_sum(model, cross_entropy)


@torch.no_grad()
def check_attention(model) -> None:
    """Raises ModelError when the model's attention backend does not compute what the others do, on random numbers.

    A backend is how attention is computed: text is drawn with a KV cache, which not every backend can read.
    """
    cfg, device, name = model.cfg, model.cos.device, model.attn
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
            f"--attn {name} computes something else than softmax attention, so text would be drawn from another model; "
            "a backend is only how attention is computed: put what changes it into model.py, as GPT.attention_bias or "
            "in CausalSelfAttention"
        )


def check_loss(cross_entropy, vocab_size: int, device: torch.device) -> None:
    """Raises ModelError when a loss is not a sum over the tokens whose target is not -1, so that batches can be cut."""
    logits = torch.randn((6, vocab_size), generator=torch.Generator().manual_seed(0)).to(device)
    targets = torch.arange(6, device=device) % vocab_size

    def loss(n: int, padding: int = 0) -> Tensor:
        seed_all(0)  # for a loss that draws numbers
        rows = targets.repeat(n), torch.full((padding,), -1, device=device)
        return cross_entropy(logits.repeat(n + padding // 6, 1), torch.cat(rows), True)

    once, twice = loss(1), loss(2)
    if not isinstance(once, Tensor) or once.dim():
        raise ModelError(
            f"cross_entropy in model.py returns {kind_of(once)}; it must return a sum over tokens, (): reduction='sum'"
        )
    if not torch.allclose(twice, 2 * once, rtol=0.25):
        raise ModelError(
            f"cross_entropy in model.py gives {(twice / once).item():.3g} times the loss for twice the tokens; it must "
            "return their sum, which the trainer divides by the number of targets: reduction='sum'"
        )
    try:
        counted = not torch.allclose(loss(1, padding=6), once, rtol=0.25)
    except IndexError as error:
        raise ModelError(f"cross_entropy in model.py: {error}; {PADDING}") from None
    if counted:
        raise ModelError(f"cross_entropy in model.py gives more loss for tokens whose target is -1; {PADDING}")


PADDING = "a target of -1 is not counted: give F.cross_entropy ignore_index=-1, and another loss a mask"


def kind_of(value) -> str:
    return f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"


def seed_all(seed: int) -> None:
    """Seeds the generators that edits may draw from."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


@torch.no_grad()
def randomize(model) -> None:
    """Weights of which none is so small that it hides what is behind it, as gates do that start at 0."""
    seed_all(0)
    for p in map(to_local, model.parameters()):
        if p.dim() > 1:
            p.normal_(std=p.size(-1) ** -0.5)
        else:
            p.uniform_(0.5, 1.5)


@contextlib.contextmanager
def as_plain(model):
    """The model in fp32, by PyTorch's own attention, with which check_attention has compared the backend."""
    changed = [(model, "attn", "sdpa"), (model, "compute_dtype", torch.float32)]
    for module in model.modules():
        changed += [(module, "backend", "sdpa")] if vars(module).get("backend") == model.attn else []
        changed += [(module, "fp8", False)] if vars(module).get("fp8") else []
    before, precision = [getattr(owner, name) for owner, name, _ in changed], torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("highest")
        for owner, name, value in changed:
            setattr(owner, name, value)
        yield
    finally:
        torch.set_float32_matmul_precision(precision)
        for (owner, name, _), value in zip(changed, before):
            setattr(owner, name, value)


def some_tokens(model, rows: int) -> Tensor:
    """Tokens, int64 (rows, T); of a model that cuts its context into chunks, T has whole ones."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, model.cfg.vocab_size, (rows, min(model.cfg.seq_len, 256)), generator=generator)
    return tokens.to(model.cos.device)


@torch.no_grad()
def check_order(model) -> None:
    """Raises ModelError when logits change with tokens that come later, or belong to another sequence or document.

    A model that sees what it is to predict has a low loss, and no use.
    """
    idx = some_tokens(model, 2)
    half, vocab_size, logits = idx.size(1) // 2, model.cfg.vocab_size, []
    changed = (idx + 1) % vocab_size
    changed[1, :half] = idx[1, :half]
    if model.doc_eot is not None:
        idx[0, half] = changed[0, half] = model.doc_eot
        changed[0, half:] = idx[0, half:]
    with eval_mode(model, {}):
        for tokens in (idx, changed):
            seed_all(1)
            logits.append(model(tokens))
    if not isinstance(logits[0], Tensor):
        raise ModelError(
            f"GPT.forward returns {kind_of(logits[0])}; expected logits (B, T, vocab_size), or with targets the sum of "
            "the tokens' losses, (): keep what is besides them in an attribute"
        )
    off, spread = (logits[1] - logits[0]).abs(), logits[0].std()
    for part, whose in ((off[1, :half], "tokens after it or in another sequence"), (off[0, half:], "another document")):
        if (whose != "another document" or model.doc_eot is not None) and part.max() > 1e-4 * spread:
            raise ModelError(
                f"logits of a token change by {part.max().item():.2g} with {whose}, so the loss would be of a model "
                "that sees what it should not: attention, shifts, pooling, norms and scales of rounding may look at "
                "earlier tokens of the same sequence only, with --doc_mask of the same document; if more is meant, "
                "take check_order out of check_model in ops/checks.py"
            )


@torch.no_grad()
def check_sum(model, cross_entropy) -> None:
    """Raises ModelError for a loss of GPT.forward that is not cross_entropy in evaluation, or no sum in training.

    Of four tokens, beside which a mean over all is large. What draws numbers is not compared.
    """
    idx = some_tokens(model, 1)
    targets = torch.where(torch.arange(idx.size(1), device=idx.device) < idx.size(1) - 4, -1, idx)
    rtol = 3e-2 if hasattr(model, "reshard") else 1e-5  # FSDP gathers weights in the dtype of training
    before, undo = clone_buffers(model), torch.ones((), dtype=torch.bool, device=idx.device)

    def loss(n: int) -> tuple[Tensor, bool]:
        seed_all(1)
        restore_buffers(model, before, undo)
        with side_effects(model, idx.device) as effects:
            total = model(idx.repeat(n, 1), targets.repeat(n, 1))
        return total, effects["drawn"]

    with eval_mode(model, {}):
        evaluated, draws = loss(1)
        seed_all(1)
        expected = cross_entropy(model(idx).flatten(0, 1), targets.flatten(), False)
    if not isinstance(evaluated, Tensor) or evaluated.dim():
        raise ModelError(f"GPT.forward returns {kind_of(evaluated)} as loss; expected the sum over tokens, ()")
    if not draws and not torch.allclose(evaluated, expected, rtol=rtol):
        raise ModelError(
            f"GPT.forward returns a loss of {evaluated.item():.6g} in evaluation, where cross_entropy of its logits is "
            f"{expected.item():.6g}: it must return their sum over tokens; add what only training has where "
            "self.training is true"
        )
    if hasattr(model, "reshard"):  # ranks that run other blocks are told of when they train
        return
    with torch.enable_grad():
        (once, draws), (twice, _) = loss(1), loss(2)
    if not draws and not torch.allclose(twice, 2 * once, rtol=rtol):
        raise ModelError(
            f"GPT.forward gives {(twice / once).item():.6g} times the loss for a batch that holds each sequence twice; "
            "all of a loss must be sums over tokens, or it would depend on --micro_batch: multiply a mean by the "
            "number of its tokens; if it is meant, take check_sum out of check_model in ops/checks.py"
        )
