"""One decoding step: from the newest token of each row to the next one, eager or compiled."""

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from model import GPT, Linear
from ops.compile import keep_gcc_from_copying
from ops.parallel import unshard

if TYPE_CHECKING:
    from inference.generation import KVCache


def next_logits(model: GPT, idx: Tensor, cache: "KVCache | None") -> Tensor:
    """Return the logits of the token that follows each row of idx (B, T): fp32 (B, 1, vocab_size).

    With a cache, idx is the prompts, then the newest token of each row.
    """
    unshard(model)
    return model.logits(model.backbone(idx, cache)[:, -1:])


def sample_token(
    logits: Tensor, uniform: Tensor, temperature: float, top_k: int, top_p: float
) -> Tensor:
    """Draw one token per row from fp32 logits (B, V): int64 (B, 1).

    uniform: random numbers in [0, 1), (B, 1). Probabilities become integers, whose sums are exact:
    the same seed gives the same text on every device.
    """
    if temperature < 1e-6:  # dividing by less overflows
        return logits.argmax(-1, keepdim=True)
    k = min(top_k or logits.size(-1), logits.size(-1))
    top_logits, tokens = logits.topk(k)  # in descending order
    weights = ((top_logits / temperature).softmax(-1) * 2**32).long()
    cumulative = weights.cumsum(-1)
    if top_p < 1:
        # Drop the tokens before which the sum has reached top_p already
        threshold = (cumulative[:, -1:] * max(1, int(top_p * 2**24))) >> 24
        weights = weights.masked_fill(cumulative - weights >= threshold, 0)
        cumulative = weights.cumsum(-1)
    # Inverse transform sampling: the first token at which the sum exceeds a part of the total
    target = (cumulative[:, -1:] * (uniform * 2**24).long()) >> 24
    index = (cumulative <= target).sum(-1, keepdim=True)
    return tokens.gather(1, index.clamp(max=k - 1))  # NaN logits would give k


def decode_step(
    model: GPT,
    idx: Tensor,
    cache: "KVCache | None",
    uniform: Tensor,
    vocab_size: int,
    **sampling: float,
) -> Tensor:
    """Return the token that follows idx (B, T) in each row, int64 (B, 1); compiles as one graph.

    vocab_size: ids from vocab_size on are padding of the head and are never sampled.
    uniform, sampling: the arguments of sample_token.
    """
    logits = next_logits(model, idx, cache)[:, -1, :vocab_size]
    return sample_token(logits, uniform, **sampling)


# --------------------------------------------------------------------------------------------------
# Compiled


def compile_decode_step(model: GPT) -> Callable[..., Tensor]:
    """Compile decode_step for a model, with CUDA graphs on a GPU, else with a C++ wrapper.

    Both keep Python's overhead away from small kernels. Guards are checked once per cache and set
    of sampling options; a cache belongs to one model.
    """
    for layer in model.modules():
        if isinstance(layer, Linear):
            layer.matmul = decode_linear
    if model.device.type == "cuda":
        backend = dict(mode="reduce-overhead")
    else:
        keep_gcc_from_copying()
        backend = dict(options={"cpp_wrapper": True})
    compiled = torch.compile(decode_step, fullgraph=True, dynamic=False, **backend)

    def step(
        model: GPT, idx: Tensor, cache: "KVCache", uniform: Tensor, **sampling: float
    ) -> Tensor:
        guards_checked = cache.compiled_for == sampling
        if not guards_checked:
            for tensor in cache.tensors():  # CUDA graphs write them where they are
                torch._dynamo.mark_static_address(tensor)
        torch.compiler.cudagraph_mark_step_begin()
        with torch.compiler.set_stance("default", skip_guard_eval_unsafe=guards_checked):
            token = compiled(model, idx, cache, uniform, **sampling).clone()
        cache.compiled_for = sampling
        return token

    return step


def is_matvec(x: Tensor) -> bool:
    """True if x (..., K) is one row and compiled: a product by sums fuses with its neighbours."""
    return torch.compiler.is_dynamo_compiling() and x.numel() == x.size(-1)


def matvec(x: Tensor, w: Tensor) -> Tensor:
    """Compute x (..., K) @ w (N, K).T of a single row in fp32, to be compiled. Returns (..., N)."""
    row = x.float().flatten()
    n_parts = 4 if x.is_cpu else 1  # a core adds up four sums as fast as one
    parts = [(row * part.float()).sum(-1) for part in w.chunk(n_parts)]
    return torch.cat(parts).view(*x.shape[:-1], len(w))


def decode_linear(x: Tensor, w: Tensor) -> Tensor:
    """x (..., K) @ w (N, K).T for Linear.matmul; a single compiled row by sums of products."""
    return matvec(x, w).to(x.dtype) if is_matvec(x) else F.linear(x, w)


# Not cuDNN's, which makes a new plan for every number of keys
SDPA_KERNELS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


def cached_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """Softmax attention to the keys of a KV cache, all (B, n_head, T, head_dim)."""
    if torch.compiler.is_dynamo_compiling():
        return one_query_attention(q, k, v, mask)
    with sdpa_kernel(SDPA_KERNELS):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)


def one_query_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Attention of one query (B, n_head, 1, head_dim) by sums of products in fp32, to be compiled.

    The compiler turns them into loops over k and v as they lie in memory. On a CPU they are several
    times as fast as SDPA's kernel, which is made for blocks of queries; on a GPU, SDPA's kernel
    refuses the strides that the compiler gives q.
    """
    scores = (q.float() * k.float()).sum(-1, keepdim=True) / math.sqrt(q.size(-1))
    mask = mask.mT  # (..., number of keys, 1)
    if mask.is_floating_point():
        scores = scores + mask
    else:
        scores = scores.masked_fill(~mask, -math.inf)
    return (scores.softmax(2) * v.float()).sum(2, keepdim=True).to(q.dtype)
