"""Checks of a model when it is built: attention, order and loss are what everything around them takes them for."""

import math

import torch

from ops.attention import attention, attention_mask
from ops.init import ModelError
from ops.parallel import eval_mode, to_local


def check_model(model, cross_entropy) -> None:
    """Raises ModelError for what would train something else than it seems to; cross_entropy: model.py's.

    Overwrites weights and buffers, which are drawn afterwards.
    """
    check_attention(model)
    check_loss(cross_entropy, model.cfg.vocab_size)
    check_order(model)


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


def check_loss(cross_entropy, vocab_size: int) -> None:
    """Raises ModelError when a loss is not a sum over tokens, as batches of any cut need it."""
    logits = torch.randn((6, vocab_size), generator=torch.Generator().manual_seed(0))
    targets = torch.arange(6) % vocab_size
    once = cross_entropy(logits, targets, True)
    twice = cross_entropy(torch.cat((logits, logits)), torch.cat((targets, targets)), True)
    if not torch.allclose(twice, 2 * once, rtol=1e-3):
        raise ModelError(
            f"cross_entropy in model.py gives {(twice / once).item():.3g} times the loss for twice the tokens; it must "
            "return their sum, which the trainer divides by the number of targets: reduction='sum'"
        )


@torch.no_grad()
def check_order(model) -> None:
    """Raises ModelError when logits change with tokens that come later, or that belong to another sequence.

    A model that sees what it is to predict has a low loss, and no use. Random weights take the place of zeros, which
    hide what is behind them, and of those that FSDP has not made yet.
    """
    cfg, device, n = model.cfg, model.cos.device, min(model.cfg.seq_len, 64)
    if n < 2:
        return
    torch.manual_seed(0)
    for p in map(to_local, model.parameters()):
        if hasattr(model, "reshard") or not p.any():
            p.normal_(std=0.1)
    idx = torch.randint(0, cfg.vocab_size, (2, n)).to(device)
    changed = idx.clone()
    changed[1, n // 2 :] = (changed[1, n // 2 :] + 1) % cfg.vocab_size
    backends, logits = {m: m.backend for m in model.modules() if "backend" in vars(m)}, []
    own, model.attn = model.attn, "sdpa"  # which needs no compiler, and is what check_attention has compared with
    for module in backends:
        module.backend = "sdpa"
    try:
        with eval_mode(model, {}):
            for tokens in (idx, changed):
                torch.manual_seed(1)  # for edits that draw numbers, the same both times
                logits.append(model(tokens))
    finally:
        model.attn = own
        for module, backend in backends.items():
            module.backend = backend
    off = (logits[1] - logits[0]).abs()
    off[1, n // 2 :] = 0
    if off.max() > (0.5 if model.fp8 else 1e-2) * logits[0].std() + 1e-6:
        where = "another sequence" if off[0].max() > off[1].max() else "the tokens after it"
        raise ModelError(
            f"logits of a token change by {off.max().item():.2g} with {where}, so the loss would be of a model that "
            "sees what it is to predict: attention, shifts, pooling and norms may look at earlier tokens of the same "
            "sequence only; if more is meant, take check_order out of check_model in ops/checks.py"
        )
