"""Text from a model: the KV cache, and tokens drawn one after the other."""

import functools

import torch
from torch import Tensor, nn


class LayerCache:
    """One layer's keys and values, (B, n_head, max_len, head_dim) each, filled from the left; and what look_back needs.

    still: the last token's key in the dimensions that the next one's will have, (B, 1, n_head, head_dim - rotary_dim).
    """

    def __init__(self, k: Tensor, v: Tensor, still: Tensor):
        self.k, self.v, self.still, self.length = k, v, still, 0

    def exchange(self, still: Tensor) -> Tensor:
        """Keep the last token's; returns the one before."""
        before, self.still = self.still, still.clone()  # a view would keep every key of the prompt
        return before

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Write k and v (B, n_head, T, head_dim) behind what is there; returns all keys and values so far."""
        start, self.length = self.length, self.length + k.size(2)
        self.k[:, :, start : self.length] = k
        self.v[:, :, start : self.length] = v
        return self.k[:, :, : self.length], self.v[:, :, : self.length]


class KVCache:
    """Keys and values of the tokens a model has read: each new token then costs one position, not the whole text."""

    def __init__(self, model: nn.Module, batch: int):
        cfg, device = model.cfg, model.wte.weight.device
        shape = (2, batch, cfg.n_head, cfg.seq_len, cfg.head_dim)
        empty = functools.partial(torch.zeros, dtype=model.compute_dtype, device=device)
        still = empty((batch, 1, cfg.n_head, cfg.head_dim - cfg.rotary_dim))
        self.layers = [LayerCache(*empty(shape), still) for _ in range(cfg.n_layer)]
        self.length, self.tokens = 0, torch.zeros((batch, cfg.seq_len), dtype=torch.int64, device=device)

    def append_tokens(self, idx: Tensor) -> Tensor:
        """Note the tokens idx (B, T) that are about to be read; returns all of them so far, int64 (B, length)."""
        start, self.length = self.length, self.length + idx.size(1)
        self.tokens[:, start : self.length] = idx
        return self.tokens[:, : self.length]


@torch.no_grad()
def generate(model: nn.Module, idx: Tensor, n_tokens: int, vocab_size: int, temperature: float = 1.0, top_k: int = 0,
             top_p: float = 1.0, generator: torch.Generator | None = None, use_cache: bool = True):  # fmt: skip
    """Continue the prompt idx, integer (B, T >= 1): yields n_tokens times the next tokens, int64 (B,).

    temperature 0 takes the likeliest token; top_k keeps the k likeliest (0 = all); top_p the fewest whose probability
    reaches it (Holtzman et al. 2019). Ids from vocab_size on are padding of the head and never drawn. Past the
    model's context, the last half of it is read again as the new context.
    """
    context, cache = idx[:, -model.cfg.seq_len :], None
    for _ in range(n_tokens):
        if context.size(1) > model.cfg.seq_len:
            context, cache = context[:, -(model.cfg.seq_len // 2 or 1) :], None
        if not use_cache:
            logits = model(context, last=True)[:, -1]
        elif cache is None:
            cache = KVCache(model, context.size(0))
            logits = model(context, cache=cache)[:, -1]
        else:
            logits = model(context[:, -1:], cache=cache)[:, -1]
        token = sample_token(logits[:, :vocab_size], temperature, top_k, top_p, generator)
        yield token
        context = torch.cat((context, token[:, None]), dim=1)


def sample_token(logits: Tensor, temperature: float, top_k: int, top_p: float,
                 generator: torch.Generator | None) -> Tensor:  # fmt: skip
    """One token a row from fp32 logits (B, V), int64 (B,)."""
    if temperature < 1e-6:  # dividing by less overflows
        return logits.argmax(-1)
    values, order = (logits / temperature).sort(descending=True)
    p = values.softmax(-1)
    if top_k:
        p[:, top_k:] = 0
    if top_p < 1:
        p[p.cumsum(-1) - p >= top_p * p.sum(-1, keepdim=True)] = 0
    return order.gather(1, torch.multinomial(p, 1, generator=generator))[:, 0]
