"""Queries and keys of attention: norm, key offset and rotary embedding."""

import torch
import torch.nn.functional as F
from torch import Tensor

from ops.functional import norm, shift_right


def queries_and_keys(
    qk: Tensor, cos: Tensor, sin: Tensor, doc_starts: Tensor | None = None, kv_cache=None
) -> tuple[Tensor, Tensor]:
    """Normalize queries and keys, take half of each key from the previous token, and rotate both.

    qk: (B, T, 2 * n_head, head_dim), queries first. cos, sin: (T, 1, R/2), or (B, T, 1, R/2) in
    generation. doc_starts: bool (B, T), True where a document starts, or None. kv_cache: a
    LayerCache in generation. Returns q and k, (B, T, n_head, head_dim).
    """
    is_half = 4 * cos.size(-1) == qk.size(-1)
    if qk.is_cuda and torch.compiler.is_compiling() and kv_cache is None and is_half:
        return fused_queries_and_keys(qk, cos, sin, doc_starts)

    q, k = norm(qk).chunk(2, dim=2)
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


def fused_queries_and_keys(
    qk: Tensor, cos: Tensor, sin: Tensor, doc_starts: Tensor | None
) -> tuple[Tensor, Tensor]:
    """As queries_and_keys without a cache, where half of each head is rotated."""
    # For all dimensions of a head: those that are not rotated are multiplied by 1, partners by 0
    rest = qk.size(-1) - 2 * cos.size(-1)
    cos = F.pad(torch.cat((cos, cos), dim=-1), (0, rest), value=1.0)
    sin = F.pad(torch.cat((sin, -sin), dim=-1), (0, rest))
    return FusedQueriesAndKeys.apply(qk, cos, sin, doc_starts)


class FusedQueriesAndKeys(torch.autograd.Function):
    """Queries and keys in one pass, and their gradient in another.

    A rotation keeps the norm, so that both share a pass. Where a key takes the previous token's
    dimensions, that token's input is normalized again.
    """

    @staticmethod
    def forward(ctx, qk, cos, sin, doc_starts):
        """cos, sin: (T, 1, head_dim)."""
        ctx.save_for_backward(qk, cos, sin, doc_starts)
        n_head = qk.size(2) // 2
        x = qk.float()
        scale = inverse_rms(x)  # before the shift; after it, Inductor would store x in fp32
        # The keys of the previous token, and zeros in the queries' place, which are not read
        before = F.pad(qk[:, :, n_head:], (0, 0, n_head, 0, 1, -1))
        if doc_starts is not None:
            before = before.masked_fill(doc_starts[..., None, None], 0)
        before = before.float()

        y = (x * cos + swap_pairs(x) * sin) * scale
        y = torch.where(is_offset(qk), before * inverse_rms(before), y)
        return y.to(qk.dtype).chunk(2, dim=2)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dq, dk):
        qk, cos, sin, doc_starts = ctx.saved_tensors
        # What a key took from the previous token gives that token its gradient
        after = dk
        if doc_starts is not None:
            after = after.masked_fill(doc_starts[..., None, None], 0)
        after = F.pad(after, (0, 0, dq.size(2), 0, -1, 1))
        dy = torch.where(is_offset(qk), after, torch.cat((dq, dk), dim=2)).float()

        # Rotate back; then the gradient of RMSNorm
        dy = dy * cos - swap_pairs(dy) * sin
        x = qk.float()
        scale = inverse_rms(x)
        projection = (dy * x).mean(-1, keepdim=True) * scale.square()
        dx = (dy - x * projection) * scale
        return dx.to(qk.dtype), None, None, None


def inverse_rms(x: Tensor) -> Tensor:
    return (x.square().mean(-1, keepdim=True) + torch.finfo(x.dtype).eps).rsqrt()


def swap_pairs(x: Tensor) -> Tensor:
    """Exchange 0..R/2 and R/2..R, the pairs of a rotation; and, for the same shape, the rest."""
    return x.unflatten(-1, (2, 2, -1)).flip(-2).flatten(-3)


def is_offset(qk: Tensor) -> Tensor:
    """True in the second half of each key, which partial_key_offset takes from the token before."""
    head = torch.arange(qk.size(2), device=qk.device)[:, None]
    channel = torch.arange(qk.size(3), device=qk.device)
    return (2 * head >= qk.size(2)) & (2 * channel >= qk.size(3))
