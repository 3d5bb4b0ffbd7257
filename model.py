"""GPT and its optimizer: attention, modules, loss, KV cache, generation, Muon + Adam. Imports torch only.

Read from top to bottom: GPTConfig, attention, modules, loss, KV cache and generation, roles, optimizer.
"""

import contextlib
import functools
import hashlib
import math
import re
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.optim.adamw import adamw
from torch.optim.sgd import sgd
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

# ---------------------------------------------------------------------------------------------------------------------
# 1. GPTConfig


@dataclass(frozen=True)
class GPTConfig:
    """The model's shape. A checkpoint stores these fields, and nothing else is needed to build the model again."""

    vocab_size: int = 50304
    seq_len: int = 1024
    n_layer: int = 12
    n_head: int = 6
    n_embd: int = 768
    window: str = "L"  # a letter a layer, repeated: L full context, S a sliding window; "SSSL:256" sets its size
    ngram: int = 0  # the longest n-gram of tokens that has an embedding besides each token's own; below 2 = off
    ngram_rows: int = 16384  # embeddings that all n-grams share, by hash
    softcap: float = 15.0  # logits are squashed to (-softcap, softcap); 0 = off
    rope_theta: float = 10000.0

    @property
    def head_dim(self) -> int:
        return self.n_embd // self.n_head

    def layer_windows(self) -> list[int]:
        """Tokens that each layer's attention sees, itself included (0 = the whole context).

        Raises ValueError when `window` is not letters S and L with an optional `:size` (default: a quarter of seq_len).
        """
        match = re.fullmatch(r"([SL]+)(?::([1-9]\d*))?", self.window)
        if not match:
            raise ValueError(f"window is {self.window!r}; expected letters S and L, as in SSSL or SSSL:256")
        pattern, size = match[1], int(match[2] or max(1, self.seq_len // 4))
        return [size if pattern[i % len(pattern)] == "S" else 0 for i in range(self.n_layer)]


# ---------------------------------------------------------------------------------------------------------------------
# 2. Attention: one function, one meaning on every backend: causal, with an optional window and document boundaries

SDPA_KERNELS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
    "fa3": SDPBackend.FLASH_ATTENTION,
    "fa4": SDPBackend.FLASH_ATTENTION,
}
COMPILED_FLEX = []  # made at first use


class Varlen(NamedTuple):
    """What varlen_attn needs in place of a mask: where sequences start, int32 (N,), the longest, and the window."""

    starts: Tensor
    longest: int
    window: tuple[int, int]


def attention_mask(backend: str, idx: Tensor, n_key: int, window: int, eot: int | None):
    """Which keys each query sees, in the form that `backend` takes; None where plain causal attention says the same.

    idx: integer (B, T), the last T of n_key positions. window: keys seen, the query's own included; 0 = all.
    eot: the token that starts a document, which sees no other; None = documents do not matter.
    For SDPA a bool mask (T, n_key) or (B, 1, T, n_key), for flex a BlockMask, for varlen a Varlen.
    """
    batch, length = idx.shape
    window = 0 if window >= n_key else window
    if backend == "varlen":
        starts = torch.arange(0, batch * length + 1, length, dtype=torch.int32, device=idx.device)
        if eot is not None:
            starts = torch.cat((starts, (idx.flatten() == eot).nonzero()[:, 0])).unique().int()
            torch._dynamo.mark_dynamic(starts, 0)  # one compilation for any number of documents
        return Varlen(starts, length, (window - 1 if window else -1, 0))
    docs = None if eot is None else (idx == eot).cumsum(1)
    if backend == "flex":
        return (
            causal_blocks(window, length, idx.device) if docs is None else block_mask(window, length, idx.device, docs)
        )
    if docs is None and not window and length == n_key:
        return None
    query = torch.arange(n_key - length, n_key, device=idx.device)[:, None]
    key = torch.arange(n_key, device=idx.device)
    mask = (key <= query) & (key > query - window) if window else key <= query
    return mask if docs is None else mask & (docs[:, None, :, None] == docs[:, None, None, :])


def block_mask(window: int, length: int, device: torch.device, docs: Tensor | None = None):
    """FlexAttention's BlockMask of a causal window (0 = all), within documents numbered by docs (B, T) if given."""
    from torch.nn.attention.flex_attention import create_block_mask  # two seconds that nobody else should pay

    def seen(b, h, q, k):
        inside = (k <= q) & (k > q - window) if window else k <= q
        return inside if docs is None else inside & (docs[b, q] == docs[b, k])

    batch = None if docs is None else len(docs)
    compiled = docs is not None and device.type == "cuda"  # else it would make the whole (B, T, T)
    return create_block_mask(seen, batch, None, length, length, device=device, _compile=compiled)


causal_blocks = functools.cache(block_mask)


def attention(q: Tensor, k: Tensor, v: Tensor, mask, backend: str = "sdpa") -> Tensor:
    """Softmax attention of q (B, H, T, D) over k and v (B, H, S, D), with the mask that attention_mask made."""
    if backend == "flex":
        from torch.nn.attention.flex_attention import flex_attention

        if torch.compiler.is_compiling() or not q.is_cuda:
            return flex_attention(q, k, v, block_mask=mask)
        if not COMPILED_FLEX:  # FlexAttention (Dong et al. 2024) uncompiled makes the whole matrix of scores
            COMPILED_FLEX.append(torch.compile(flex_attention, dynamic=False))
        return COMPILED_FLEX[0](q, k, v, block_mask=mask)
    if backend == "varlen":
        from torch.nn.attention.varlen import varlen_attn

        flat = (t.transpose(1, 2).flatten(0, 1) for t in (q, k, v))
        out = varlen_attn(*flat, mask.starts, mask.starts, mask.longest, mask.longest, window_size=mask.window)
        return out.view(q.size(0), q.size(2), q.size(1), q.size(3)).transpose(1, 2)
    if backend == "blocked":
        return blocked_attention(q, k, v, mask)
    with sdpa_kernel(SDPA_KERNELS[backend]) if backend in SDPA_KERNELS else contextlib.nullcontext():
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)


def blocked_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """Products and a softmax for a block of queries at a time, without the keys after the block; q and k equally long.

    Compiled for a CPU it takes about half the time of SDPA's kernel. It keeps the probabilities for backward, and there
    are four blocks at most, lest compilation take long. Scores are rounded to the dtype of q, SDPA's are fp32.
    """
    length, out = q.size(2), []
    q, k, v = (t.contiguous() for t in (q, k, v))  # else each slice of several heads is copied
    size = max(128, -(-length // 4))
    if mask is None:
        position = torch.arange(length, device=q.device)
        mask = position <= position[:, None]
    for start in range(0, length, size):
        end = min(start + size, length)
        scores = (q[:, :, start:end] @ k[:, :, :end].mT).float() / math.sqrt(q.size(-1))
        seen = mask[..., start:end, :end]
        out.append(torch.where(seen, scores, -math.inf).softmax(-1).to(v.dtype) @ v[:, :, :end])
    return torch.cat(out, dim=2)


# ---------------------------------------------------------------------------------------------------------------------
# 3. Modules


class Linear(nn.Linear):
    """Matrix product without bias in the activations' dtype: the weight stays fp32 and is cast at each use."""

    fp8 = False

    def __init__(self, n_in: int, n_out: int):
        super().__init__(n_in, n_out, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        w = self.weight.to(x.dtype)
        return Fp8Product.apply(x, w) if self.fp8 else F.linear(x, w)


def fp8_scaled(x: Tensor, dtype: torch.dtype = torch.float8_e4m3fn) -> tuple[Tensor, Tensor]:
    """x in float8, scaled as a whole to its range, and the fp32 scale () that undoes it."""
    scale = x.abs().amax().float().clamp(min=1e-12) / torch.finfo(dtype).max
    return (x.float() / scale).to(dtype), scale


def fp8_product(a: Tensor, b: tuple[Tensor, Tensor], a_dtype: torch.dtype = torch.float8_e4m3fn) -> Tensor:
    """a (M, K) @ b (N, K).T in float8 with fp32 sums, in a's dtype; b is already what fp8_scaled makes."""
    a8, a_scale = fp8_scaled(a, a_dtype)
    return torch._scaled_mm(a8, b[0].t(), scale_a=a_scale, scale_b=b[1], out_dtype=a.dtype)


class Fp8Product(torch.autograd.Function):
    """x (..., K) @ w (N, K).T in float8 forward (e4m3) and for the gradient by x (e5m2); that by w stays in x's dtype.

    Dynamic scales for whole tensors, as in Micikevicius et al. 2022. M, K and N must be multiples of 16.
    """

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return fp8_product(x.flatten(0, -2), fp8_scaled(w)).view(*x.shape[:-1], w.size(0))

    @staticmethod
    def backward(ctx, grad):
        x, w = ctx.saved_tensors
        flat = grad.flatten(0, -2)
        dx = fp8_product(flat, fp8_scaled(w.t().contiguous()), torch.float8_e5m2)
        return dx.view_as(x), flat.T @ x.flatten(0, -2)


def norm(x: Tensor) -> Tensor:
    """RMSNorm without a gain (the next matrix can hold one), over the last dimension."""
    return F.rms_norm(x, (x.size(-1),))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding (Su et al. 2021) of x (B, T, H, D), with cos and sin (T, 1, D/2)."""
    x1, x2 = x.chunk(2, dim=-1)
    return torch.cat((x1 * cos + x2 * sin, x2 * cos - x1 * sin), dim=-1)


class Attention(nn.Module):
    """Multi-head causal attention with normalised queries and keys (QK-norm: Henry et al. 2020)."""

    def __init__(self, cfg: GPTConfig):
        super().__init__()
        self.n_head, self.head_dim, self.backend = cfg.n_head, cfg.head_dim, "sdpa"
        self.qkv = Linear(cfg.n_embd, 3 * cfg.n_embd)
        self.proj = Linear(cfg.n_embd, cfg.n_embd)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask, past: "LayerCache | None") -> Tensor:
        batch, length, n_embd = x.shape
        qk, v = self.qkv(x).view(batch, length, 3 * self.n_head, self.head_dim).split((2 * self.n_head, self.n_head), 2)
        q, k = rotate(norm(qk), cos, sin).split(self.n_head, 2)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        if past is not None:
            k, v = past.append(k, v)
        y = attention(q, k, v, mask, self.backend if past is None else "sdpa")
        return self.proj(y.transpose(1, 2).reshape(batch, length, n_embd))


class MLP(nn.Module):
    """Four times as wide inside, with ReLU squared (So et al. 2021)."""

    def __init__(self, cfg: GPTConfig):
        super().__init__()
        self.fc = Linear(cfg.n_embd, 4 * cfg.n_embd)
        self.proj = Linear(4 * cfg.n_embd, cfg.n_embd)

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(F.relu(self.fc(x)).square())


class Block(nn.Module):
    """One transformer layer; a function of tensors only, so that one compilation serves every block."""

    def __init__(self, cfg: GPTConfig):
        super().__init__()
        self.checkpointing, self.offload = "none", False
        self.attn = Attention(cfg)
        self.mlp = MLP(cfg)
        self.compiled = None  # the compiled layer, within the hooks that a wrapper puts around forward

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask=None, past: "LayerCache | None" = None) -> Tensor:
        hooks = contextlib.nullcontext()
        if self.offload:
            hooks = saved_tensors_hooks(functools.partial(to_host, strided=self.compiled is not None), from_host)
        with hooks:
            return (self.compiled or self.checkpointed)(x, cos, sin, mask, past)

    def checkpointed(self, *inputs) -> Tensor:
        """The layer; "full" recomputes all of it in the backward pass, "selective" all but products and attention."""
        if self.checkpointing == "none" or not torch.is_grad_enabled():
            return self.layer(*inputs)
        options = {}
        if self.checkpointing == "selective":
            options["context_fn"] = functools.partial(create_selective_checkpoint_contexts, keep_products)
        return checkpoint(self.layer, *inputs, use_reentrant=False, preserve_rng_state=False, **options)

    def layer(self, x: Tensor, cos: Tensor, sin: Tensor, mask, past: "LayerCache | None") -> Tensor:
        x = x + self.attn(norm(x), cos, sin, mask, past)
        return x + self.mlp(norm(x))


def to_host(tensor: Tensor, strided: bool):
    """What backward needs, waiting in pinned host memory; masks, parameters and what is small or there already stay.

    strided: it comes back with the strides it had, gaps and all, which a compiled backward pass insists on.
    """
    if not tensor.is_cuda or isinstance(tensor, nn.Parameter) or tensor.dtype == torch.bool or tensor.numel() < 1 << 16:
        return tensor
    if strided and 0 in tensor.stride():  # one number stands for many
        return tensor
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return tensor.device, strided and tensor.stride(), host.copy_(tensor, non_blocking=True)


def from_host(packed) -> Tensor:
    if isinstance(packed, Tensor):
        return packed
    device, strides, host = packed
    if not strides:
        return host.to(device, non_blocking=True)
    return torch.empty_strided(host.shape, strides, dtype=host.dtype, device=device).copy_(host, non_blocking=True)


def keep_products(ctx, op, *args, **kwargs) -> CheckpointPolicy:
    """The policy of selective checkpointing: what costs much to compute again is kept."""
    name = str(op)
    costly = any(
        part in name
        for part in ("mm.default", "scaled_dot_product", "flash_attention", "flex_attention", "varlen_attn")
    )
    return CheckpointPolicy.MUST_SAVE if costly else CheckpointPolicy.PREFER_RECOMPUTE


def hashed_uniform(code: Tensor, place: Tensor, seed: int) -> Tensor:
    """Numbers in [0, 1) that look random, fp32: functions of int64 code (N, M), its place (N, 1) and the seed."""
    for mixed_in in (place * 0x85EBCA6B % (1 << 31), seed % (1 << 31)):  # multiplying and folding, as in MurmurHash
        code = (code ^ mixed_in) * 0x9E3779B1 % (1 << 31)
        code = (code ^ code >> 15) * 0x85EBCA6B % (1 << 31)
        code = code ^ code >> 13
    return (code % (1 << 24)) / (1 << 24)


class GPT(nn.Module):
    """Token ids in, loss or logits out. Weights are fp32; activations have the dtype `compute_dtype`.

    None of the other options changes what is computed, rounding apart: `attn` is the attention backend, `checkpointing`
    none, selective or full, `loss_chunk` the tokens whose logits exist at once (0 = all), `offload` sends activations
    to the host; `fp8` (head and MLP) rounds more than the others.
    `ngram_dropout` is the share of n-grams left out wherever gradients are made. Which ones is decided by the n-gram,
    its place in the window and `step_seed`, to be set anew for each step: not by ranks, or the rows beside it.
    `confidence_penalty` times the sum of the predictions' entropies is taken off the loss that is differentiated
    (Pereyra et al. 2017), not off the loss returned.
    With `doc_eot`, tokens do not attend across the documents that this token starts.
    """

    def __init__(self, cfg: GPTConfig, compute_dtype: torch.dtype = torch.float32, loss_chunk: int = 0,
                 attn: str = "sdpa", checkpointing: str = "none", doc_eot: int | None = None,
                 fp8: bool = False, offload: bool = False, ngram_dropout: float = 0.0,
                 confidence_penalty: float = 0.0):  # fmt: skip
        super().__init__()
        self.cfg, self.compute_dtype, self.loss_chunk = cfg, compute_dtype, loss_chunk
        self.ngram_dropout, self.step_seed, self.confidence_penalty = ngram_dropout, 0, confidence_penalty
        self.attn, self.doc_eot = attn, doc_eot
        self.windows = cfg.layer_windows()
        self.wte = nn.Embedding(cfg.vocab_size, cfg.n_embd)
        self.ngrams = nn.Embedding(cfg.ngram_rows, cfg.n_embd) if cfg.ngram > 1 else None
        self.blocks = nn.ModuleList(Block(cfg) for _ in range(cfg.n_layer))
        self.head = Linear(cfg.n_embd, cfg.vocab_size)
        self.loss_grad = cross_entropy_grad
        self.head.fp8 = fp8
        for block in self.blocks:
            block.checkpointing, block.offload, block.attn.backend = checkpointing, offload, attn
            block.mlp.fc.fp8 = block.mlp.proj.fp8 = fp8
        self.register_buffer("cos", torch.empty(cfg.seq_len, 1, cfg.head_dim // 2), persistent=False)
        self.register_buffer("sin", torch.empty(cfg.seq_len, 1, cfg.head_dim // 2), persistent=False)
        self.reset_buffers()

    @torch.no_grad()
    def reset_buffers(self) -> None:
        """(Re)compute the rotary tables, which no checkpoint holds."""
        half, theta = self.cfg.head_dim // 2, self.cfg.rope_theta
        frequency = theta ** -(torch.arange(half, dtype=torch.float64, device="cpu") / half)
        position = torch.arange(self.cfg.seq_len, dtype=torch.float64, device="cpu")  # not every device has float64
        angle = torch.outer(position, frequency)[:, None]
        self.cos.copy_(angle.cos())
        self.sin.copy_(angle.sin())

    def compile_parts(self, mode: str) -> None:
        """Compile each block and the loss in place: blocks share one compilation, and names of parameters stay."""
        for block in self.blocks:
            block.compiled = torch.compile(block.checkpointed, mode=mode, dynamic=False, fullgraph=True)
        self.loss_grad = torch.compile(cross_entropy_grad, mode=mode, dynamic=False, fullgraph=True)

    def forward(self, idx: Tensor, targets: Tensor | None = None, cache: "KVCache | None" = None,
                last: bool = False) -> Tensor:  # fmt: skip
        """idx and targets are integer (B, T), T <= seq_len; a target of -1 is not counted.

        With targets: the *sum* of the token losses in nats, fp32 (), so that means over any split of a batch are exact.
        Without: fp32 logits (B, T, vocab_size), or with `last` those of the last position only, (B, 1, vocab_size).
        With a cache: the same, and idx follows what the cache holds.
        """
        past = 0 if cache is None else cache.length
        end = past + idx.size(1)
        if end > self.cfg.seq_len:
            raise ValueError(f"{end} tokens exceed the model's context of {self.cfg.seq_len}; pass fewer tokens")
        cos, sin = (table[past:end].to(self.compute_dtype) for table in (self.cos, self.sin))
        backend, eot = (self.attn, self.doc_eot) if cache is None else ("sdpa", None)
        masks = {window: attention_mask(backend, idx, end, window, eot) for window in set(self.windows)}
        x = norm(self.embed(idx, eot, cache).to(self.compute_dtype))
        for i, block in enumerate(self.blocks):
            x = block(x, cos, sin, masks[self.windows[i]], cache and cache.layers[i])
        x = norm(x)
        if targets is not None:
            return self.loss(x.flatten(0, 1), targets.flatten())
        if cache is not None:
            cache.length = end
        if last or cache is not None:
            x = x[:, -1:]
        return softcapped(self.head(x).float(), self.cfg.softcap)

    def embed(self, idx: Tensor, eot: int | None, cache: "KVCache | None") -> Tensor:
        """Embeddings of tokens (B, T), each with those of the n-grams that it ends: (B, T, n_embd).

        Hashed n-grams as in Over-Tokenized Transformer (Huang et al. 2025): what follows a few letters need not be
        learnt by attention. An n-gram that would reach over the start of the window or document has "no token" there.
        """
        x = self.wte(idx)
        if self.ngrams is None:
            return x
        tokens = idx if cache is None else torch.cat((cache.recent, idx), dim=1)
        if cache is not None:
            cache.recent = tokens[:, 1 - self.cfg.ngram :]
        docs = None if eot is None else (idx == eot).cumsum(1)
        code, codes = idx.long() + 1, []
        for back in range(1, self.cfg.ngram):
            before = F.pad(tokens + 1, (back, 0))[:, -idx.size(1) - back : -back]
            if docs is not None:
                before = before * (docs == F.pad(docs, (back, 0), value=-1)[:, :-back])
            code = (code * 0x9E3779B1 + before) % (1 << 31)
            codes.append(code)
        codes, weights = torch.stack(codes, -1).flatten(0, 1), None
        if self.ngram_dropout and torch.is_grad_enabled():
            place = torch.arange(idx.size(1), device=idx.device).repeat(idx.size(0))[:, None]
            kept = hashed_uniform(codes, place, self.step_seed) >= self.ngram_dropout
            weights = kept / (1 - self.ngram_dropout)
        rows, table = (codes * 0x85EBCA6B >> 7) % self.cfg.ngram_rows, self.ngrams.weight.float()
        # one sum over all lengths: each lookup of its own would make a gradient as large as the table
        return x + F.embedding_bag(rows, table, mode="sum", per_sample_weights=weights).view(x.shape).to(x.dtype)

    def loss(self, x: Tensor, targets: Tensor) -> Tensor:
        """Sum of the cross entropies of x (N, n_embd) against targets (N,), fp32 ()."""
        if self.loss_chunk:
            options = (self.cfg.softcap, self.loss_chunk, self.loss_grad, self.head.fp8, self.confidence_penalty)
            weight = self.head.weight if torch.is_grad_enabled() else self.head.weight.detach()  # or it makes gradients
            return ChunkedLoss.apply(x, weight, targets, *options)
        logits = softcapped(self.head(x).float(), self.cfg.softcap)
        log_p = logits.log_softmax(-1)
        loss = F.nll_loss(log_p, targets, ignore_index=-1, reduction="sum")
        if self.confidence_penalty and torch.is_grad_enabled():
            penalty = self.confidence_penalty * torch.where(targets >= 0, (log_p.exp() * log_p).sum(-1), 0).sum()
            loss = loss + (penalty - penalty.detach())  # a gradient without a value
        return loss


# ---------------------------------------------------------------------------------------------------------------------
# 4. Loss


def softcapped(logits: Tensor, softcap: float) -> Tensor:
    """Squash logits into (-softcap, softcap) (Gemma 2, 2024); 0 leaves them alone."""
    return softcap * torch.tanh(logits / softcap) if softcap else logits


def cross_entropy_grad(logits: Tensor, targets: Tensor, softcap: float, boost: float,
                       confidence_penalty: float = 0.0) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Summed cross entropy of softcapped logits (N, V), fp32 (), and boost times a gradient by them, in their dtype.

    It is that of the cross entropy less confidence_penalty times the entropy of the predictions.
    """
    capped = softcapped(logits.float(), softcap)
    log_z = capped.logsumexp(-1, keepdim=True)
    counted = (targets >= 0)[:, None]
    target = targets.clamp(min=0)[:, None]
    loss = torch.where(counted, log_z - capped.gather(1, target), 0).sum()
    log_p = capped - log_z
    grad = log_p.exp() if confidence_penalty else log_p.exp_()
    if confidence_penalty:
        grad = grad + confidence_penalty * grad * (log_p - (grad * log_p).sum(-1, keepdim=True))
    grad.scatter_add_(1, target, torch.full_like(log_z, -1.0))
    if softcap:
        grad = grad * (1 - (capped / softcap).square())
    return loss, torch.where(counted, grad * boost, 0).to(logits.dtype)


class ChunkedLoss(torch.autograd.Function):
    """Head and cross entropy, `chunk` rows at a time: the logits of the whole batch never exist.

    The gradients are made in the forward pass while each chunk's logits are at hand, as in Liger Kernel
    (Hsu et al. 2024), so nothing is computed twice and only x and two gradients are kept.
    """

    @staticmethod
    def forward(ctx, x, weight, targets, softcap, chunk, loss_grad, fp8=False, confidence_penalty=0.0):
        w = weight.to(x.dtype)
        need_grad = any(ctx.needs_input_grad[:2])
        ctx.boost = 64.0 if x.dtype == torch.float16 else 1.0  # small probabilities vanish in fp16
        dx, dw = (torch.empty_like(x), torch.zeros_like(weight, dtype=torch.float32)) if need_grad else (None, None)
        total = torch.zeros((), dtype=torch.float32, device=x.device)
        w8, wt8 = (fp8_scaled(w), need_grad and fp8_scaled(w.t().contiguous())) if fp8 else (None, None)
        for rows in (slice(i, i + chunk) for i in range(0, x.size(0), chunk)):
            logits = fp8_product(x[rows], w8) if fp8 else x[rows] @ w.T
            if need_grad:
                loss, dlogits = loss_grad(logits, targets[rows], softcap, ctx.boost, confidence_penalty)
                dx[rows] = fp8_product(dlogits, wt8, torch.float8_e5m2) if fp8 else dlogits @ w
                dw += dlogits.T @ x[rows]
            else:
                logits = softcapped(logits.float(), softcap)
                loss = F.cross_entropy(logits, targets[rows], ignore_index=-1, reduction="sum")
            total += loss
        if need_grad:
            ctx.save_for_backward(dx, dw)
            ctx.weight_dtype = weight.dtype
        return total

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        dx, dw = ctx.saved_tensors
        grad = grad.float() / ctx.boost
        return (dx.float() * grad).to(dx.dtype), (dw * grad).to(ctx.weight_dtype), *(None,) * 6


# ---------------------------------------------------------------------------------------------------------------------
# 5. KV cache and generation


class LayerCache:
    """One layer's keys and values, (B, n_head, max_len, head_dim) each, filled from the left."""

    def __init__(self, k: Tensor, v: Tensor):
        self.k, self.v, self.length = k, v, 0

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Write k and v (B, n_head, T, head_dim) behind what is there; returns all keys and values so far."""
        start, self.length = self.length, self.length + k.size(2)
        self.k[:, :, start : self.length] = k
        self.v[:, :, start : self.length] = v
        return self.k[:, :, : self.length], self.v[:, :, : self.length]


class KVCache:
    """Keys and values of the tokens a model has read: each new token then costs one position, not the whole text."""

    def __init__(self, model: GPT, batch: int):
        cfg, device = model.cfg, model.wte.weight.device
        shape = (2, batch, cfg.n_head, cfg.seq_len, cfg.head_dim)
        self.layers = [
            LayerCache(*torch.zeros(shape, dtype=model.compute_dtype, device=device)) for _ in range(cfg.n_layer)
        ]
        self.length, self.recent = 0, torch.zeros((batch, 0), dtype=torch.int64, device=device)


@torch.no_grad()
def generate(model: GPT, idx: Tensor, n_tokens: int, vocab_size: int, temperature: float = 1.0, top_k: int = 0,
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
        token = draw(logits[:, :vocab_size], temperature, top_k, top_p, generator)
        yield token
        context = torch.cat((context, token[:, None]), dim=1)


def draw(logits: Tensor, temperature: float, top_k: int, top_p: float, generator: torch.Generator | None) -> Tensor:
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


# ---------------------------------------------------------------------------------------------------------------------
# 6. Roles and optimizer


class Role(NamedTuple):
    """How the parameters whose names match are initialised and optimized."""

    names: str  # regular expression for the whole name
    std: float  # of the initial normal distribution, times fan_in ** -0.5 for matrices; 0 = zeros
    kind: str  # "muon" or "adam"
    lr: float  # multiple of muon_lr or adam_lr
    betas: tuple[float, float]  # Adam's; Muon's momentum is the first
    decay: float  # multiple of weight_decay
    split: int = 1  # square matrices stacked in this parameter; Muon orthogonalises each on its own


# The one table of parameters: every parameter must match exactly one row.
ROLES = {
    "embedding": Role(r"wte\.weight", 1.0, "adam", 75.0, (0.8, 0.95), 0.0),
    "ngrams": Role(r"ngrams\.weight", 0.0, "adam", 12.0, (0.8, 0.95), 0.0),
    "head": Role(r"head\.weight", 0.0, "adam", 1.0, (0.8, 0.95), 0.0),
    "qkv": Role(r"blocks\.\d+\.attn\.qkv\.weight", 0.33**0.5, "muon", 1.0, (0.95, 0.0), 1.0, split=3),
    "mlp_in": Role(r"blocks\.\d+\.mlp\.fc\.weight", 0.33**0.5, "muon", 1.0, (0.95, 0.0), 1.0),
    "proj": Role(r"blocks\.\d+\.(attn|mlp)\.proj\.weight", 0.0, "muon", 1.0, (0.95, 0.0), 1.0),
}


def role_of(name: str) -> str:
    """The row of ROLES that the parameter belongs to. Raises ValueError unless exactly one row matches."""
    rows = [role for role, row in ROLES.items() if re.fullmatch(row.names, name)]
    if len(rows) != 1:
        raise ValueError(f"parameter {name} matches {len(rows)} rows of ROLES in model.py {rows}; it needs exactly one")
    return rows[0]


def seed_of(*names) -> int:
    """64 bits that look random, a function of what is named."""
    return int.from_bytes(hashlib.sha256("/".join(map(str, names)).encode()).digest()[:8], "little")


def initial_weight(name: str, shape: torch.Size, seed: int) -> Tensor:
    """The full initial tensor, fp32 on the CPU: a function of (seed, name), whatever the ranks and devices."""
    role = ROLES[role_of(name)]
    fan_in = 1 if name == "wte.weight" else shape[-1]
    generator = torch.Generator().manual_seed(seed_of(seed, name) >> 1)  # the shift: weights as ever
    return torch.empty(shape, device="cpu").normal_(0, 1, generator=generator).mul_(role.std / math.sqrt(fan_in))


def optimizer_groups(model: GPT, optimizer: str, muon_lr: float, adam_lr: float, weight_decay: float) -> list[dict]:
    """Parameter groups for `Optimizer`: one a role. With "adamw", one learning rate and decay for every matrix."""
    groups: dict[str, dict] = {}
    for name, param in model.named_parameters():
        role = ROLES[role_of(name)]
        if optimizer == "adamw":
            kind, lr, betas, decay = "adam", adam_lr, (0.9, 0.95), weight_decay
        else:
            lr = role.lr * (muon_lr if role.kind == "muon" else adam_lr)
            kind, betas, decay = role.kind, role.betas, role.decay * weight_decay
        group = groups.setdefault(role_of(name), dict(
            params=[], names=[], role=role_of(name), kind=kind, lr=lr, base_lr=lr, betas=betas, weight_decay=decay,
            split=role.split,
        ))  # fmt: skip
        group["params"].append(param)
        group["names"].append(name)
    return list(groups.values())


# a x + b x^3 + c x^5: each brings what the one before leaves as near to 1 as can be, with 1 % to spare, beginning with
# singular values in [0.01, 1] (Polar Express, Amsel et al. 2025).
NEWTON_SCHULZ = ((7.9339, -22.2516, 15.7938), (3.5701, -2.5678, 0.4861), (2.6780, -1.9908, 0.4541))


def newton_schulz(x: Tensor) -> Tensor:
    """A nearly semi-orthogonal matrix for each of x (M, rows, cols): all but tiny singular values end in [0.7, 1.3].

    Quintic Newton-Schulz iteration of Muon (Jordan et al. 2024), in the dtype of x. All-zero matrices stay zero.
    """
    tall = x.size(1) > x.size(2)
    x = x.mT if tall else x
    gram = x @ x.mT
    scale = torch.linalg.vector_norm(gram, dim=(1, 2), keepdim=True).clamp(min=1e-14)
    gram, x = gram / scale, x / scale.sqrt()  # a closer bound of singular values than the norm of x
    exact = x.dtype == torch.float32 and torch.get_float32_matmul_precision() == "highest"
    if exact and x.size(2) >= 4 * x.size(1):  # all on the Gram matrix, 17 small products for 27; bf16, TF32 blow it up
        product, factor = None, None
        for a, b, c in NEWTON_SCHULZ:
            gram = gram if product is None else factor @ gram @ factor
            factor = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
            factor.diagonal(dim1=1, dim2=2).add_(a)
            product = factor if product is None else factor @ product
        x = product @ x
    else:
        for i, (a, b, c) in enumerate(NEWTON_SCHULZ):
            gram = x @ x.mT if i else gram
            x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


def local(tensor: Tensor) -> Tensor:
    """This rank's shard of a parameter or gradient of FSDP; any other tensor as it is."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def shard_heights(rows: int, world: int) -> list[int]:
    """Rows of a matrix that each rank holds under FSDP, which cuts as Tensor.chunk does; the last may hold none."""
    most = -(-rows // world)
    return [max(0, min(most, rows - rank * most)) for rank in range(world)]


class Optimizer(torch.optim.Optimizer):
    """Muon for the matrices inside the blocks, Adam (decoupled decay) for the other roles; for 1..N ranks.

    Muon (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon): Nesterov momentum, then each matrix's update
    is replaced by its orthogonal factor. All matrices of a shape are stacked and orthogonalised in one batched call,
    in `ns_dtype`; the ranks share the stack out between them, evenly or not, and exchange the results.
    Under DDP every rank holds whole parameters, and they stay bit-identical. Under FSDP each holds rows: the shards of
    a matrix meet on its owner, so that never a shard is orthogonalised, and its update goes back in shards.
    `state[p]` holds this rank's part, on the device or, with `offload`, in (pinned) host memory.
    """

    fused = True  # False: a parameter at a time, as in plain loops; the baseline of bench.py

    def __init__(self, groups: list[dict], ns_dtype=torch.float32, eps: float = 1e-10, offload: bool = False):
        super().__init__(groups, dict(lr=0.0))
        self.ns_dtype, self.eps, self.offload = ns_dtype, eps, offload
        self.rank, self.world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        for group in self.param_groups:
            slots = ("momentum",) if group["kind"] == "muon" else ("exp_avg", "exp_avg_sq")
            for p in group["params"]:
                place = dict(device="cpu", pin_memory=p.is_cuda) if offload else dict(device=p.device)
                self.state[p] = {slot: torch.zeros(local(p).shape, dtype=p.dtype, **place) for slot in slots}
                if group["kind"] == "adam":
                    self.state[p]["step"] = torch.zeros((), dtype=torch.float32, device=p.device)

    @torch.no_grad()
    def step(self, skip: Tensor | None = None) -> None:
        """Update every parameter from its gradient, with the groups' present `lr`. Every gradient must be there.

        skip: bool () on the device. Where it is true, weights and state stay as they are (a -0 may become 0).
        """
        device = self.param_groups[0]["params"][0].device
        skip = torch.zeros((), dtype=torch.bool, device=device) if skip is None else skip
        if device.type == "mps" and skip.item():  # the fused kernels of MPS do not look at found_inf
            return
        for group in self.param_groups:
            update, slots = self.adam_update, ("exp_avg", "exp_avg_sq")
            if group["kind"] == "muon":
                update, slots = self.muon_update, ("momentum",)
            by_shape: dict[torch.Size, list[Tensor]] = {}
            for p in group["params"]:
                by_shape.setdefault(p.shape, []).append(p)
            for params in by_shape.values() if self.fused else ([p] for p in group["params"]):
                kept = [[self.state[p][slot] for p in params] for slot in slots]
                used = (
                    [[t.to(params[0].device, non_blocking=True) for t in ts] for ts in kept] if self.offload else kept
                )
                update(group, params, skip, *used)
                if self.offload:
                    for host, ours in zip(sum(kept, []), sum(used, [])):
                        host.copy_(ours, non_blocking=True)

    def adam_update(self, group: dict, params: list[Tensor], skip: Tensor, exp_avgs: list[Tensor],
                    exp_avg_sqs: list[Tensor]) -> None:  # fmt: skip
        steps = [self.state[p]["step"] for p in params]
        adamw(
            [local(p) for p in params], [local(p.grad) for p in params], exp_avgs, exp_avg_sqs, [], steps,
            fused=self.fused, foreach=False, amsgrad=False, beta1=group["betas"][0], beta2=group["betas"][1],
            lr=group["lr"], weight_decay=group["weight_decay"], eps=self.eps, maximize=False,
            found_inf=skip.float() if self.fused else None,
        )  # fmt: skip

    def muon_update(self, group: dict, params: list[Tensor], skip: Tensor, momenta: list[Tensor]) -> None:
        weights, grads, beta = [local(p) for p in params], [local(p.grad) for p in params], group["betas"][0]
        count, (rows, cols), sharded = len(params), params[0].shape, hasattr(params[0], "to_local")
        for grad, momentum in zip(grads, momenta):  # the mean of a momentum and itself is that momentum
            torch.where(skip, momentum, grad, out=grad)
        torch._foreach_lerp_(momenta, grads, 1 - beta)
        share = -(-count // self.world)
        mine = slice(min(count, self.rank * share), min(count, (self.rank + 1) * share))
        parts = slice(None) if sharded else mine
        updates = weights[0].new_empty((len(grads[parts]), *weights[0].shape), dtype=self.ns_dtype)
        if len(updates):
            torch._foreach_copy_(list(updates.unbind()), torch._foreach_lerp(grads[parts], momenta[parts], beta))
        if sharded:
            updates = self.exchange(updates, count, rows, to_owners=True)
        if len(updates):
            updates = newton_schulz(updates.view(-1, rows // group["split"], cols)).reshape(-1, rows, cols).contiguous()
        if sharded:
            updates = self.exchange(updates, count, rows, to_owners=False)
        elif self.world > 1:
            gathered = updates.new_zeros((self.world, share, rows, cols))
            dist.all_gather(list(gathered.unbind()), F.pad(updates, (0, 0, 0, 0, 0, share - len(updates))))
            updates = gathered.flatten(0, 1)[:count]
        scale = max(1.0, rows / group["split"] / cols) ** 0.5
        updates = updates.to(weights[0].dtype)
        sgd(
            weights, list(updates.unbind()), [None] * count, fused=True, found_inf=skip.float(),
            lr=group["lr"] * scale, weight_decay=group["weight_decay"] / scale, momentum=0.0, dampening=0.0,
            nesterov=False, maximize=False,
        )  # fmt: skip

    def exchange(self, parts: Tensor, count: int, rows: int, to_owners: bool) -> Tensor:
        """Turn every matrix's shard on this rank (count, my rows, cols) into its whole matrices (n, rows, cols).

        Not to_owners: the way back. One all-to-all; matrix i belongs to rank i // ceil(count / world).
        """
        heights, cols = shard_heights(rows, self.world), parts.size(2)
        owned = shard_heights(count, self.world)
        shards = [n * heights[self.rank] * cols for n in owned]  # numbers that pass between this rank and each owner
        wholes = [owned[self.rank] * height * cols for height in heights]
        if to_owners:
            received = parts.new_empty(sum(wholes))
            dist.all_to_all_single(received, parts.flatten(), wholes, shards)
            pieces = [t.view(owned[self.rank], h, cols) for t, h in zip(received.split(wholes), heights)]
            return torch.cat(pieces, dim=1)
        received = parts.new_empty(sum(shards))
        sent = torch.cat([piece.flatten() for piece in parts.split(heights, dim=1)])
        dist.all_to_all_single(received, sent, shards, wholes)
        return received.view(count, heights[self.rank], cols)
