"""Attention, with one meaning on every backend: causal, with an optional window and document boundaries."""

import contextlib
import functools
import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from common import UserError

SDPA_BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
    "fa3": SDPBackend.FLASH_ATTENTION,
    "fa4": SDPBackend.FLASH_ATTENTION,
}


class VarlenMask(NamedTuple):
    """What varlen_attn takes instead of a mask: sequence offsets, int32 (N,), the longest sequence, and the window."""

    cu_seqlens: Tensor
    max_seqlen: int
    window: tuple[int, int]


class WindowMask(NamedTuple):
    """What blocked_attention takes of a window: the mask, and the keys that each query sees, its own included."""

    mask: Tensor
    window: int


TAKES_BIAS = (
    "auto",
    "sdpa",
    "cudnn",
    "efficient",
    "math",
    "blocked",
)  # backends that can add a bias to the scores


def document_offsets(tokens: Tensor, eot: int) -> Tensor:
    """Offsets of sequences and documents in tokens (B, T) laid out in one row, with the end: int32 (N,).

    On a GPU this waits for the device, as N is not known before.
    """
    starts = tokens == eot
    starts[:, 0] = True
    return F.pad(starts.flatten(), (0, 1), value=True).nonzero()[:, 0].int()


def may_attend(query, key, window: int, query_doc=None, key_doc=None):
    """True where a query may attend to a key: not later, within the window (0 = all), in the same document."""
    allowed = key <= query
    if window:
        allowed = allowed & (key > query - window)
    if query_doc is not None:
        allowed = allowed & (query_doc == key_doc)
    return allowed


def attention_mask(
    backend: str,
    tokens: Tensor,
    window: int,
    eot: int | None,
    bias: Tensor | None = None,
):
    """Which keys each query sees, in the form that `backend` takes; None if that is plain causal attention.

    tokens: integer (B, T). window: keys seen, the query's own included; 0 = all. eot: the token that starts a document,
    which attends to no other document; None = ignore documents. bias: added to the scores, (H, T, T), for TAKES_BIAS
    only.
    Returns a mask for SDPA, bool (T, T) or (B, 1, T, T), or a float one if there is a bias; or what the
    backend takes instead: BlockMask, VarlenMask, WindowMask.
    Raises UserError for a bias that the backend does not take.
    """
    batch, length = tokens.shape
    if bias is not None and backend not in TAKES_BIAS:
        raise UserError(
            f"--attn {backend} adds no bias to scores, as GPT.attention_bias asks; use --attn sdpa"
        )
    window = (
        0 if not torch.compiler.is_exporting() and window >= length else window
    )  # exported, for every length
    if backend == "varlen":
        if eot is None:
            cu_seqlens = torch.arange(
                0, batch * length + 1, length, dtype=torch.int32, device=tokens.device
            )
        else:
            cu_seqlens = document_offsets(tokens, eot)
            torch._dynamo.mark_dynamic(cu_seqlens, 0)  # one compilation for any number of documents
        return VarlenMask(cu_seqlens, length, (window - 1 if window else -1, 0))
    doc_ids = None if eot is None else (tokens == eot).cumsum(1)
    if backend == "flex":
        if doc_ids is None:
            return causal_block_mask(window, length, tokens.device)
        return block_mask(window, length, tokens.device, doc_ids)
    if doc_ids is None and not window and bias is None:
        return None
    key = torch.arange(length, device=tokens.device)
    query = key[:, None]
    if doc_ids is None:
        mask = may_attend(query, key, window)
    else:
        mask = may_attend(query, key, window, doc_ids[:, None, :, None], doc_ids[:, None, None, :])
    mask = add_bias(mask, bias)
    return WindowMask(mask, window) if window and backend == "blocked" else mask


def add_bias(mask: Tensor, bias: Tensor | None) -> Tensor:
    """Combine a bool mask and a bias of the scores into one mask: -inf where nothing is seen."""
    return mask if bias is None else torch.where(mask, bias, -math.inf)


def block_mask(window: int, length: int, device: torch.device, doc_ids: Tensor | None = None):
    """FlexAttention's BlockMask of a causal window (0 = all), within documents numbered by doc_ids (B, T) if given."""
    from torch.nn.attention.flex_attention import (
        create_block_mask,
    )  # takes two seconds; only flex needs it

    def mask_mod(b, h, q, k):
        if doc_ids is None:
            return may_attend(q, k, window)
        return may_attend(q, k, window, doc_ids[b, q], doc_ids[b, k])

    batch = None if doc_ids is None else len(doc_ids)
    make = create_block_mask
    if doc_ids is not None and device.type == "cuda":  # else it would make the whole (B, T, T)
        make = compiled_block_mask()
    return make(mask_mod, batch, None, length, length, device=device)


@functools.cache
def compiled_block_mask():
    """Once, as PyTorch keeps what each call of torch.compile made."""
    from torch.nn.attention.flex_attention import create_block_mask

    return torch.compile(create_block_mask)


causal_block_mask = functools.cache(block_mask)


def sdpa_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, kernel=None) -> Tensor:
    """PyTorch's scaled_dot_product_attention, by one kernel, the best of several or PyTorch's choice."""
    if mask is not None and mask.is_floating_point():
        mask = mask.to(q.dtype)
    with sdpa_kernel(kernel) if kernel is not None else contextlib.nullcontext():
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)


def one_query_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Attention of one query (B, H, 1, D) as sums of products in fp32, made to be compiled.

    On a CPU the compiler turns them into loops over k and v as they lie in memory, several times as fast as SDPA's
    kernel, which is made for blocks of queries.
    """
    scores = (q.float() * k.float()).sum(-1, keepdim=True) / math.sqrt(q.size(-1))
    mask = mask.mT  # (..., S, 1)
    scores = scores + mask if mask.is_floating_point() else scores.masked_fill(~mask, -math.inf)
    return (scores.softmax(2) * v.float()).sum(2, keepdim=True).to(q.dtype)


def cached_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """Attention over a KV cache. Avoids cuDNN, which re-plans for every key length."""
    alike = q.size(2) == 1 and q.size(1) == k.size(1) and mask is not None
    if alike and q.is_cpu and torch.compiler.is_dynamo_compiling():
        return one_query_attention(q, k, v, mask)
    kernels = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    return sdpa_attention(q, k, v, mask, kernels if q.is_cuda else None)


def flex_attention(q: Tensor, k: Tensor, v: Tensor, mask) -> Tensor:
    """FlexAttention (Dong et al. 2024); on a GPU compiled by itself where nothing around it is."""
    from torch.nn.attention.flex_attention import flex_attention as flex

    if torch.compiler.is_compiling() or not q.is_cuda:
        return flex(q, k, v, block_mask=mask)
    return compiled_flex_attention()(q, k, v, block_mask=mask)


@functools.cache
def compiled_flex_attention():
    """Uncompiled, FlexAttention makes the whole matrix of scores."""
    from torch.nn.attention.flex_attention import flex_attention as flex

    return torch.compile(flex, dynamic=False)


def varlen_attention(q: Tensor, k: Tensor, v: Tensor, mask: VarlenMask) -> Tensor:
    """All sequences of the batch in one row, with the offsets of documents."""
    from torch.nn.attention.varlen import varlen_attn

    flat = (t.transpose(1, 2).flatten(0, 1) for t in (q, k, v))
    lengths = (mask.cu_seqlens, mask.cu_seqlens, mask.max_seqlen, mask.max_seqlen)
    out = varlen_attn(*flat, *lengths, window_size=mask.window)
    return out.view(q.size(0), q.size(2), q.size(1), q.size(3)).transpose(1, 2)


def query_blocks(length: int, window: int) -> list[tuple[int, int, int]]:
    """Start and end of each query block of blocked_attention, four at most where they compile; and its first key."""
    size = 256 if window and not torch.compiler.is_compiling() else max(256, -(-length // 4))
    blocks = [(start, min(start + size, length)) for start in range(0, length, size)]
    return [(start, end, max(0, start - window + 1) if window else 0) for start, end in blocks]


def blocked_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | WindowMask | None) -> Tensor:
    """Matmuls and a softmax, one block of queries at a time, on the keys that it sees; as many queries as keys.

    On a CPU it beats SDPA's kernel: compiled in all dtypes, eager in bf16. With SDPA's kernel, steps of `laptop` with
    bytes and `--seq_len 256` take 26 % longer compiled and 19 % longer eager. It keeps the probabilities for backward,
    and uses few blocks, to keep compilation short. Scores are rounded to the dtype of q; SDPA's are fp32.
    """
    (batch, n_head, length, head_dim), out, window = q.shape, [], 0
    if isinstance(mask, WindowMask):
        mask, window = mask
    if mask is None:
        position = torch.arange(length, device=q.device)
        mask = position <= position[:, None]
    q, k, v = (t.flatten(0, 1).contiguous() for t in (q / math.sqrt(head_dim), k, v))
    for start, end, first in query_blocks(length, window):
        bias = mask[..., start:end, first:end]
        if not bias.is_floating_point():
            bias = torch.zeros(bias.shape, dtype=q.dtype, device=q.device).masked_fill_(
                ~bias, -math.inf
            )
        bias = bias.to(q.dtype).expand(batch, n_head, end - start, end - first).flatten(0, 1)
        scores = torch.baddbmm(bias, q[:, start:end], k[:, first:end].mT)
        out.append(scores.softmax(-1) @ v[:, first:end])
    return torch.cat(out, dim=1).view(batch, n_head, length, v.size(-1))


# The values of --attn: each takes q, k and v (B, H, T, D) and what attention_mask made for it, and computes the same.
# What changes the result belongs in model.py (GPT.attention_bias, CausalSelfAttention), which decoding uses as well.
ATTENTION_BACKENDS = {
    "auto": sdpa_attention,
    "sdpa": sdpa_attention,
    **{
        name: functools.partial(sdpa_attention, kernel=kernel)
        for name, kernel in SDPA_BACKENDS.items()
    },
    "blocked": blocked_attention,
    "flex": flex_attention,
    "varlen": varlen_attention,
}


def attention(q: Tensor, k: Tensor, v: Tensor, mask, backend: str = "sdpa") -> Tensor:
    """Softmax attention of q (B, H, T, D) over k and v (B, H, S, D), with the mask that attention_mask made."""
    return ATTENTION_BACKENDS[backend](q, k, v, mask)
