"""Checks of a model when it is built: attention and loss are what everything around them takes them for."""

import math

import torch

from ops.attention import attention, attention_mask
from ops.init import ModelError


def check_model(model, cross_entropy) -> None:
    """Raises ModelError for an attention backend or a loss that computes something else; cross_entropy: model.py's."""
    check_attention(model)
    check_loss(cross_entropy, model.cfg.vocab_size)


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
