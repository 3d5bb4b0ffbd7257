"""Attention masks in the form that each backend takes, and equivalent attention kernels.

All masks are built from may_attend in model.py.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask  # takes two seconds

# --------------------------------------------------------------------------------------------------
# Masks


def layer_windows(pattern: str, n_layer: int, seq_len: int) -> list[int]:
    """Return how many keys a query attends to in each layer, its own included; 0 is all of them.

    pattern: letters, tiled over the layers: L full, S sliding over seq_len / 4 keys; "SL:256": over
    256 keys.
    """
    letters, _, width = pattern.partition(":")
    window = int(width) if width else max(1, seq_len // 4)
    if window >= seq_len:
        window = 0
    return [window if letters[layer % len(letters)] == "S" else 0 for layer in range(n_layer)]


class VarlenMask(NamedTuple):
    """Arguments of varlen_attn: offsets of sequences, int32 (N,), length of the longest, window."""

    cu_seqlens: Tensor
    max_seqlen: int
    window: tuple[int, int]


# None: plain causal attention. bool (T, T) or (B, 1, T, T), or a bias, for SDPA and blocked
Mask: TypeAlias = Any  # None for causal attention; otherwise what the kernel takes


def attention_mask(
    attn_backend: str, may_attend: Callable, idx: Tensor, window: int, eot: int | None
) -> Mask:
    """Make the attention mask for a backend.

    idx: integer (B, T). window: how many keys a query attends to, its own included; 0 is all.
    eot: the token that starts a document, if documents do not attend to each other.
    """
    length = idx.size(1)
    # An exported model takes any length, so it keeps its window
    if not torch.compiler.is_exporting() and window >= length:
        window = 0

    if attn_backend == "varlen":
        return varlen_mask(idx, window, eot)
    docs = None
    if eot is not None:
        docs = (idx == eot).cumsum(1)  # each token's document, by number
    if attn_backend == "flex":
        make_mask = cached_flex_mask if docs is None else flex_mask
        return make_mask(may_attend, window, length, idx.device, docs)
    if window == 0 and docs is None:
        if torch.compiler.is_exporting() or is_plain_causal(may_attend, length):
            return None

    position = torch.arange(length, device=idx.device)
    query, key = position[:, None], position
    if docs is None:
        return may_attend(query, key, window)
    return may_attend(query, key, window, docs[:, None, :, None], docs[:, None, None, :])


@functools.cache
def is_plain_causal(may_attend: Callable, length: int) -> bool:
    """True if a token may attend to itself and all before, unless an edit changes may_attend."""
    key = torch.arange(length, device="cpu")
    # Some rows of a long mask: all of the first, and a thousand of the others
    rows = torch.cat((key[:1024], torch.linspace(0, length - 1, 1024).long()))
    query = rows[:, None]
    return torch.equal(may_attend(query, key, 0), key <= query)


def flex_mask(
    may_attend: Callable, window: int, length: int, device: torch.device, docs: Tensor | None
) -> BlockMask:
    """Make FlexAttention's mask; docs: the number of each token's document, int64 (B, T)."""
    from torch.nn.attention.flex_attention import create_block_mask

    def mask_mod(b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        if docs is None:
            return may_attend(query, key, window)
        return may_attend(query, key, window, docs[b, query], docs[b, key])

    # With documents it is a mask per sequence; uncompiled, the whole (B, T, T) would be made
    batch = None if docs is None else len(docs)
    if docs is not None and device.type == "cuda":
        create_block_mask = compile_once(create_block_mask)
    return create_block_mask(mask_mod, batch, None, length, length, device=device)


cached_flex_mask = functools.cache(flex_mask)  # without documents, it is the same in all steps


def varlen_mask(idx: Tensor, window: int, eot: int | None) -> VarlenMask:
    """The offsets of sequences and documents in idx (B, T), laid out in one row, and its end.

    With documents it waits for the GPU, because their number is not known before.
    """
    batch, length = idx.shape
    if eot is None:
        end = batch * length + 1
        offsets = torch.arange(0, end, length, dtype=torch.int32, device=idx.device)
    else:
        starts = idx == eot
        starts[:, 0] = True
        starts = F.pad(starts.flatten(), (0, 1), value=True)
        offsets = starts.nonzero()[:, 0].int()
        torch._dynamo.mark_dynamic(offsets, 0)  # one compilation for any number of documents
    keys_back = window - 1 if window else -1
    return VarlenMask(offsets, length, (keys_back, 0))


# --------------------------------------------------------------------------------------------------
# Kernels: each takes q, k, v (B, n_head, T, head_dim), its mask, and the window that the mask has


@functools.cache
def compile_once(function: Callable, dynamic: bool | None = None) -> Callable:
    """torch.compile, cached: torch.compile itself would compile again at every call."""
    return torch.compile(function, dynamic=dynamic)


def flex_attention(q: Tensor, k: Tensor, v: Tensor, block_mask: BlockMask, window: int) -> Tensor:
    """FlexAttention (Dong et al. 2024), compiled on GPUs; eager, it makes all scores at once."""
    from torch.nn.attention.flex_attention import flex_attention as flex  # takes two seconds

    if q.is_cuda and not torch.compiler.is_compiling():
        flex = compile_once(flex, dynamic=False)
    return flex(q, k, v, block_mask=block_mask)


def sdpa_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    window: int,
    kernels: SDPBackend | list[SDPBackend],
) -> Tensor:
    """PyTorch's scaled_dot_product_attention by one kernel, or the best of several."""
    with sdpa_kernel(kernels):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)


def varlen_attention(q: Tensor, k: Tensor, v: Tensor, mask: VarlenMask, window: int) -> Tensor:
    """PyTorch's varlen_attn: all sequences in one row, with the offsets of documents."""
    from torch.nn.attention.varlen import varlen_attn

    B, H, T, D = q.shape
    q, k, v = (t.transpose(1, 2).flatten(0, 1) for t in (q, k, v))  # (B * T, H, D)
    y = varlen_attn(
        q,
        k,
        v,
        mask.cu_seqlens,
        mask.cu_seqlens,
        mask.max_seqlen,
        mask.max_seqlen,
        window_size=mask.window,
    )
    return y.view(B, T, H, D).transpose(1, 2)


def blocked_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, window: int) -> Tensor:
    """Matmuls and a softmax for one block of queries at a time, on the keys that they attend to.

    window: keys further back are hidden by the mask; 0 if none are.
    On a CPU it beats SDPA's kernel: compiled in all dtypes, eager in bf16. With SDPA's, steps of
    `laptop` with bytes and `--seq_len 256` take 26 % longer compiled and 19 % longer eager. It
    keeps the probabilities for backward. Scores are rounded to the dtype of q; SDPA's are fp32.
    """
    B, H, T, D = q.shape
    window = window if window < T else 0  # one that hides nothing
    if mask is None:
        position = torch.arange(T, device=q.device)
        mask = position <= position[:, None]
    q = (q / math.sqrt(D)).flatten(0, 1).contiguous()  # (B * H, T, D)
    k = k.flatten(0, 1).contiguous()
    v = v.flatten(0, 1).contiguous()

    # With a window, small blocks leave out keys; compiled, four blocks at most compile quickly
    block = max(256, math.ceil(T / 4))
    if window and not torch.compiler.is_compiling():
        block = 256
    outputs = []
    for start in range(0, T, block):
        end = min(start + block, T)
        first_key = max(0, start - window + 1) if window else 0
        bias = mask[..., start:end, first_key:end]
        if not bias.is_floating_point():
            zeros = torch.zeros(bias.shape, dtype=q.dtype, device=q.device)
            bias = zeros.masked_fill_(~bias, -math.inf)
        bias = bias.expand(B, H, end - start, end - first_key).flatten(0, 1)
        scores = torch.baddbmm(bias, q[:, start:end], k[:, first_key:end].mT)
        outputs.append(scores.softmax(-1) @ v[:, first_key:end])
    return torch.cat(outputs, dim=1).view(B, H, T, v.size(-1))


SDPA_KERNELS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
    "fa3": SDPBackend.FLASH_ATTENTION,
    "fa4": SDPBackend.FLASH_ATTENTION,
}
ATTENTION_KERNELS: dict[str, Callable[..., Tensor]] = {}
for name, kernel in SDPA_KERNELS.items():
    ATTENTION_KERNELS[name] = functools.partial(sdpa_attention, kernels=kernel)
ATTENTION_KERNELS["blocked"] = blocked_attention
ATTENTION_KERNELS["flex"] = flex_attention
ATTENTION_KERNELS["varlen"] = varlen_attention
ATTENTION_BACKENDS = ("auto", "sdpa", *ATTENTION_KERNELS)  # the values of --attn
