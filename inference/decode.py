"""One decoding step: from the newest token of each row to the next one, eager or compiled."""

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from model import GPT, Linear
from ops.compile import fuse_loops_that_overwrite, keep_gcc_from_copying
from ops.parallel import unshard

if TYPE_CHECKING:
    from inference.generation import KVCache


def next_logits(model: GPT, idx: Tensor, cache: "KVCache | None") -> Tensor:
    """Return the logits of the token that follows each row of idx (B, T): fp32 (B, 1, vocab_size).

    With a cache, idx is the prompts, then the newest token of each row.
    """
    unshard(model)
    return model.logits(model.backbone(idx, cache)[:, -1:])


REPEAT_WINDOW = 512  # dry_penalty_last_n of llama.cpp
ALLOWED_REPEAT = 4  # dry_allowed_length
DRY_BASE = 1.05  # dry_base: a larger one would change most words that bytes spell twice


class Repeats:
    """The newest tokens of each row, and which of them end a repeat of the newest ones.

    tokens: int64 (B, REPEAT_WINDOW), in order; -1 where there is none yet.
    lengths: how many tokens, up to each of these but the last, equal the newest ones; int64.
    """

    def __init__(self, prompts: Tensor):
        """Read prompts, int64 (B, T)."""
        self.tokens = prompts.new_full((len(prompts), REPEAT_WINDOW), -1)
        self.lengths = torch.zeros_like(self.tokens[:, 1:])
        for token in prompts.split(1, dim=1):
            self.append(token)

    def append(self, token: Tensor) -> None:
        """Append the next token of each row, (B, 1)."""
        following = self.tokens[:, 1:]
        self.lengths.add_(1).mul_(following == token)
        self.tokens.copy_(torch.cat((following, token), dim=1))

    def penalize(self, logits: Tensor, penalty: float) -> Tensor:
        """Lower the logits (B, V) of tokens that would lengthen a repeat: DRY sampling.

        As in llama.cpp with dry_multiplier = penalty, but without dry_sequence_breakers.
        """
        # One more column, for tokens that are none of these or are never sampled
        n = logits.size(1)
        would_repeat = torch.where(self.lengths >= ALLOWED_REPEAT, self.tokens[:, 1:], n)
        penalties = logits.new_zeros((len(logits), n + 1))
        by_length = penalty * DRY_BASE ** (self.lengths - ALLOWED_REPEAT).clamp(max=100)
        penalties = penalties.scatter_reduce(1, would_repeat.clamp(max=n), by_length, "amax")
        return logits - penalties[:, :n]


def sample_token(
    logits: Tensor, uniform: Tensor, temperature: float, top_k: int, top_p: float, min_p: float
) -> Tensor:
    """Draw one token per row from fp32 logits (B, V): int64 (B, 1).

    uniform: random numbers in [0, 1), (B, 1). Probabilities become integers, whose sums are exact:
    the same seed gives the same text on every device.
    """
    if temperature < 1e-6:  # dividing by less overflows
        return logits.argmax(-1, keepdim=True)
    tokens = None
    if top_k or top_p < 1:  # else no order is needed
        logits, tokens = logits.topk(min(top_k or logits.size(-1), logits.size(-1)))
    weights = ((logits / temperature).softmax(-1) * 2**32).long()
    if top_p < 1:
        # Drop the tokens before which the sum has reached top_p already
        cumulative = weights.cumsum(-1)
        threshold = (cumulative[:, -1:] * max(1, int(top_p * 2**24))) >> 24
        weights = weights.masked_fill(cumulative - weights >= threshold, 0)
    if min_p > 0:
        threshold = (weights.amax(-1, keepdim=True) * int(min_p * 2**24)) >> 24
        weights = weights.masked_fill(weights < threshold, 0)
    # Inverse transform sampling: the first token at which the sum exceeds a part of the total
    cumulative = weights.cumsum(-1)
    target = (cumulative[:, -1:] * (uniform * 2**24).long()) >> 24
    index = (cumulative <= target).sum(-1, keepdim=True)
    index = index.clamp(max=logits.size(-1) - 1)  # NaN logits would give one more
    return index if tokens is None else tokens.gather(1, index)


def decode_step(
    model: GPT,
    idx: Tensor,
    cache: "KVCache | None",
    repeats: Repeats,
    uniform: Tensor,
    vocab_size: int,
    dry_multiplier: float,
    **sampling: Any,
) -> Tensor:
    """Return the token that follows idx (B, T) in each row, int64 (B, 1); compiles as one graph.

    vocab_size: ids from vocab_size on are padding of the head and are never sampled.
    dry_multiplier: the penalty of Repeats. uniform, sampling: the arguments of sample_token.
    """
    logits = next_logits(model, idx, cache)[:, -1, :vocab_size]
    token = sample_token(repeats.penalize(logits, dry_multiplier), uniform, **sampling)
    repeats.append(token)
    return token


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
    backend: dict[str, Any] = dict(mode="reduce-overhead")
    if model.device.type != "cuda":
        keep_gcc_from_copying()
        fuse_loops_that_overwrite()
        backend = dict(options={"cpp_wrapper": True})
    compiled = torch.compile(decode_step, fullgraph=True, dynamic=False, **backend)

    def step(
        model: GPT,
        idx: Tensor,
        cache: "KVCache",
        repeats: Repeats,
        uniform: Tensor,
        **sampling: Any,
    ) -> Tensor:
        guards_checked = cache.compiled_for == sampling
        if not guards_checked:
            # CUDA graphs write them where they are
            for tensor in (*cache.tensors(), repeats.tokens, repeats.lengths):
                torch._dynamo.mark_static_address(tensor)
        torch.compiler.cudagraph_mark_step_begin()
        with torch.compiler.set_stance("default", skip_guard_eval_unsafe=guards_checked):
            token = compiled(model, idx, cache, repeats, uniform, **sampling).clone()
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
