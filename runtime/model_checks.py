"""A check of the model as it is edited, before it trains."""

import torch
from torch import nn

from common.errors import UserError


@torch.no_grad()
def check_causal(model: nn.Module) -> None:
    """Raise UserError if logits depend on later tokens: the model would learn to copy them."""
    half = min(model.cfg.seq_len, 32) // 2
    if half == 0:
        return
    # Two sequences, and the same with all tokens of the second half changed
    vocab_size = model.cfg.vocab_size
    generator = torch.Generator().manual_seed(0)
    idx = torch.randint(vocab_size, (2, 2 * half), generator=generator).to(model.device)
    changed = idx.clone()
    changed[:, half:] = (idx[:, half:] + 1) % vocab_size

    backend = model.attn_backend
    model.attn_backend = "sdpa"  # others need more tokens, or a compiler
    model.eval()
    logits = []
    for tokens in (idx, changed):
        torch.manual_seed(0)  # for models that draw random numbers in eval mode, too
        logits.append(model(tokens)[:, :half])
    model.train()
    model.attn_backend = backend

    difference = (logits[0] - logits[1]).abs().max()
    if not difference <= 0.02 * logits[0].std():  # also if it is NaN
        raise UserError(
            "the model's logits change with later tokens; "
            "let each depend on itself and earlier ones only"
        )
