"""Queries and keys of attention: norm, key offset and rotary embedding."""

import torch
import torch.nn.functional as F
from torch import Tensor

from ops.functional import norm, shift_right


def queries_and_keys(
    qk: Tensor,
    n_head: int,
    cos: Tensor,
    sin: Tensor,
    doc_starts: Tensor | None = None,
    kv_cache=None,
) -> tuple[Tensor, Tensor]:
    """Normalize queries and keys, take half of each key from the previous token, and rotate both.

    qk: (B, T, heads, head_dim): n_head queries, then keys. cos, sin: (T, 1, R/2), or (B, T, 1, R/2)
    in generation. doc_starts: bool (B, T), True where a document starts, or None. kv_cache: a
    LayerCache in generation. Returns q and k.
    """
    is_half = 4 * cos.size(-1) == qk.size(-1)
    if qk.is_cuda and torch.compiler.is_compiling() and kv_cache is None and is_half:
        return FusedQueriesAndKeys.apply(qk, n_head, cos, sin, doc_starts)

    q, k = norm(qk).split((n_head, qk.size(2) - n_head), dim=2)
    k = partial_key_offset(k, 2 * cos.size(-1), doc_starts, kv_cache)
    return apply_rotary_emb(q, cos, sin), apply_rotary_emb(k, cos, sin)


def apply_rotary_emb(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate pairs of x's first R dimensions by angles that grow with the position.

    Su et al. 2021. x: (B, T, n_head, head_dim). cos, sin: (T, 1, R/2) or (B, T, 1, R/2).
    """
    half = cos.size(-1)
    x1, x2, rest = x.split((half, half, x.size(-1) - 2 * half), dim=-1)
    y1 = x1 * cos + x2 * sin
    y2 = x2 * cos - x1 * sin
    return torch.cat((y1, y2, rest), dim=-1)


def partial_key_offset(k: Tensor, rotary_dim: int, doc_starts: Tensor | None, kv_cache) -> Tensor:
    """Take the dimensions beyond rotary_dim of each key from the previous token.

    Half of key j then describes token j - 1. A query that looks for its own token A thus finds the
    token after an earlier A: induction in one layer instead of two (NanoGPT speedrun).
    k: (B, T, n_head, head_dim).
    """
    k_rot, k_pass = k.split((rotary_dim, k.size(-1) - rotary_dim), dim=-1)
    return torch.cat((k_rot, previous_token(k_pass, doc_starts, kv_cache, "key")), dim=-1)


def previous_token(x: Tensor, doc_starts: Tensor | None, kv_cache, cache_name: str) -> Tensor:
    """The previous token's x (B, T, ...), or zeros where a sequence or document starts.

    cache_name: the KV cache's key for the newest x; each call in a layer needs its own.
    """
    before = shift_right(x) if kv_cache is None else kv_cache.shift(cache_name, x)
    if doc_starts is not None:
        while doc_starts.dim() < x.dim():
            doc_starts = doc_starts[..., None]
        before = before.masked_fill(doc_starts, 0)
    return before


# --------------------------------------------------------------------------------------------------
# For the compiler on a GPU. It makes seven kernels of the functions above and their gradients, and
# two of this one, which move 0.6 times as many bytes (PyTorch 2.11, H100). A change above belongs
# here too


class FusedQueriesAndKeys(torch.autograd.Function):
    """queries_and_keys in one pass, and its gradient in another, where half a head is rotated.

    A rotation keeps the norm, so that both share a pass. Where a key takes the previous token's
    dimensions, that token's input is normalized again.
    """

    @staticmethod
    def forward(ctx, qk, n_head, cos, sin, doc_starts):
        # For all of a head: dimensions that are not rotated are multiplied by 1, partners by 0
        rest = qk.size(3) // 2
        cos = F.pad(torch.cat((cos, cos), dim=-1), (0, rest), value=1.0)
        sin = F.pad(torch.cat((sin, -sin), dim=-1), (0, rest))
        # True for the dimensions of keys that come from the previous token
        n_keys = qk.size(2) - n_head
        is_offset = torch.ones((n_keys, rest), dtype=torch.bool, device=qk.device)
        is_offset = F.pad(is_offset, (rest, 0, n_head, 0))
        ctx.save_for_backward(qk, cos, sin, is_offset, doc_starts)

        # The norm before the shift: in the other order, Inductor would store x in fp32
        x = norm(qk.float())
        before = previous_token(qk[:, :, n_head:], doc_starts, None, "")
        before = norm(F.pad(before, (0, 0, n_head, 0)).float())
        y = torch.where(is_offset, before, x * cos + swap_pairs(x) * sin)
        return y.to(qk.dtype).split((n_head, n_keys), dim=2)

    @staticmethod
    def backward(ctx, dq, dk):
        qk, cos, sin, is_offset, doc_starts = ctx.saved_tensors
        # What a key took from the previous token gives that token its gradient
        after = dk
        if doc_starts is not None:
            after = after.masked_fill(doc_starts[..., None, None], 0)
        after = F.pad(after, (0, 0, dq.size(2), 0, -1, 1))
        dy = torch.where(is_offset, after, torch.cat((dq, dk), dim=2)).float()

        # Rotate back; then the gradient of RMSNorm
        dy = dy * cos - swap_pairs(dy) * sin
        x = qk.float()
        scale = (x.square().mean(-1, keepdim=True) + torch.finfo(x.dtype).eps).rsqrt()
        x = x * scale
        dx = (dy - x * (dy * x).mean(-1, keepdim=True)) * scale
        return dx.to(qk.dtype), None, None, None, None


def swap_pairs(x: Tensor) -> Tensor:
    """Exchange 0..R/2 and R/2..R, the pairs of a rotation; and, for the same shape, the rest."""
    return x.unflatten(-1, (2, 2, -1)).flip(-2).flatten(-3)
