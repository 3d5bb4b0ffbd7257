"""How the model is computed, with the same result: attention, chunked loss, fp8, checkpointing, offload, DDP, FSDP.

Whatever is chosen here changes speed and memory; the mathematics stands in model.py. Imports torch only.
"""

import contextlib
import functools
import hashlib
import inspect
import math
import random
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

# ---------------------------------------------------------------------------------------------------------------------
# 1. Attention: one function, one meaning on every backend: causal, with an optional window and document boundaries

SDPA_BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
    "fa3": SDPBackend.FLASH_ATTENTION,
    "fa4": SDPBackend.FLASH_ATTENTION,
}


class Varlen(NamedTuple):
    """What varlen_attn takes in place of a mask: where sequences start, int32 (N,), the longest, and the window."""

    cu_seqlens: Tensor
    max_seqlen: int
    window: tuple[int, int]


TAKES_BIAS = ("auto", "sdpa", "cudnn", "efficient", "math", "blocked")  # backends that can add a bias to the scores


def attention_mask(backend: str, tokens: Tensor, window: int, eot: int | None, bias: Tensor | None = None):
    """Which keys each query sees, in the form that `backend` takes; None where plain causal attention says the same.

    tokens: integer (B, T). window: keys seen, the query's own included; 0 = all. eot: the token that starts a document,
    which sees no other; None = documents do not matter. bias: added to the scores, (H, T, T), for TAKES_BIAS only.
    Returns a mask for SDPA, bool (T, T) or (B, 1, T, T), or with a bias floating; else a BlockMask or Varlen. Raises
    ParamTableError for a bias that the backend does not take.
    """
    batch, length = tokens.shape
    if bias is not None and backend not in TAKES_BIAS:
        raise ParamTableError(f"--attn {backend} adds no bias to scores, as GPT.attention_bias asks; use --attn sdpa")
    window = 0 if not torch.compiler.is_exporting() and window >= length else window  # exported, for every length
    if backend == "varlen":
        cu_seqlens = torch.arange(0, batch * length + 1, length, dtype=torch.int32, device=tokens.device)
        if eot is not None:
            cu_seqlens = torch.cat((cu_seqlens, (tokens.flatten() == eot).nonzero()[:, 0])).unique().int()
            torch._dynamo.mark_dynamic(cu_seqlens, 0)  # one compilation for any number of documents
        return Varlen(cu_seqlens, length, (window - 1 if window else -1, 0))
    doc_ids = None if eot is None else (tokens == eot).cumsum(1)
    if backend == "flex":
        if doc_ids is None:
            return causal_block_mask(window, length, tokens.device)
        return block_mask(window, length, tokens.device, doc_ids)
    if doc_ids is None and not window and bias is None:
        return None
    key = torch.arange(length, device=tokens.device)
    query = key[:, None]
    mask = (key <= query) & (key > query - window) if window else key <= query
    mask = mask if doc_ids is None else mask & (doc_ids[:, None, :, None] == doc_ids[:, None, None, :])
    return add_bias(mask, bias)


def add_bias(mask: Tensor, bias: Tensor | None) -> Tensor:
    """A bool mask and what is added to the scores as one mask: -inf where nothing is seen."""
    return mask if bias is None else torch.where(mask, bias, -math.inf)


def block_mask(window: int, length: int, device: torch.device, doc_ids: Tensor | None = None):
    """FlexAttention's BlockMask of a causal window (0 = all), within documents numbered by doc_ids (B, T) if given."""
    from torch.nn.attention.flex_attention import create_block_mask  # two seconds that nobody else should pay

    def mask_mod(b, h, q, k):
        inside = (k <= q) & (k > q - window) if window else k <= q
        return inside if doc_ids is None else inside & (doc_ids[b, q] == doc_ids[b, k])

    batch = None if doc_ids is None else len(doc_ids)
    compiled = doc_ids is not None and device.type == "cuda"  # else it would make the whole (B, T, T)
    return create_block_mask(mask_mod, batch, None, length, length, device=device, _compile=compiled)


causal_block_mask = functools.cache(block_mask)


def sdpa_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, kernel=None) -> Tensor:
    """PyTorch's scaled_dot_product_attention, by one kernel, the best of several or PyTorch's choice."""
    if mask is not None and mask.is_floating_point():
        mask = mask.to(q.dtype)
    with sdpa_kernel(kernel) if kernel is not None else contextlib.nullcontext():
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)


def cached_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """Attention to a KV cache. Not by cuDNN, which makes a plan for each number of keys, and prompts have any."""
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


def varlen_attention(q: Tensor, k: Tensor, v: Tensor, mask: Varlen) -> Tensor:
    """All sequences of the batch in one row, with the offsets of documents."""
    from torch.nn.attention.varlen import varlen_attn

    flat = (t.transpose(1, 2).flatten(0, 1) for t in (q, k, v))
    lengths = (mask.cu_seqlens, mask.cu_seqlens, mask.max_seqlen, mask.max_seqlen)
    out = varlen_attn(*flat, *lengths, window_size=mask.window)
    return out.view(q.size(0), q.size(2), q.size(1), q.size(3)).transpose(1, 2)


def query_blocks(length: int) -> list[tuple[int, int]]:
    """Start and end of each block of queries of blocked_attention, which sees the keys before its end: four at most."""
    size = max(128, -(-length // 4))
    return [(start, min(start + size, length)) for start in range(0, length, size)]


def blocked_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """Matmuls and a softmax for a block of queries at a time, without the keys after the block; q and k equally long.

    On a CPU it beats SDPA's kernel, compiled in all dtypes, else in bf16. It keeps the probabilities for backward, and
    has few blocks, to keep compilation short. Scores are rounded to the dtype of q; SDPA's are fp32.
    """
    (batch, n_head, length, head_dim), out = q.shape, []
    if mask is None:
        position = torch.arange(length, device=q.device)
        mask = position <= position[:, None]
    if mask.is_floating_point():
        bias = mask.to(q.dtype)
    else:
        bias = torch.zeros(mask.shape, dtype=q.dtype, device=q.device).masked_fill_(~mask, -math.inf)
    bias = bias.expand(batch, n_head, length, length)
    q, k, v = (t.flatten(0, 1).contiguous() for t in (q / math.sqrt(head_dim), k, v))
    for start, end in query_blocks(length):
        hidden = bias[:, :, start:end, :end].flatten(0, 1)
        scores = torch.baddbmm(hidden, q[:, start:end], k[:, :end].mT)
        out.append(scores.softmax(-1) @ v[:, :end])
    return torch.cat(out, dim=1).view(batch, n_head, length, head_dim)


# The values of --attn: each takes q, k and v (B, H, T, D) and what attention_mask made for it, and computes the same.
# What changes the result belongs in model.py (GPT.attention_bias, CausalSelfAttention), which decoding uses as well.
ATTENTION_BACKENDS = {
    "auto": sdpa_attention,
    "sdpa": sdpa_attention,
    **{name: functools.partial(sdpa_attention, kernel=kernel) for name, kernel in SDPA_BACKENDS.items()},
    "blocked": blocked_attention,
    "flex": flex_attention,
    "varlen": varlen_attention,
}


def attention(q: Tensor, k: Tensor, v: Tensor, mask, backend: str = "sdpa") -> Tensor:
    """Softmax attention of q (B, H, T, D) over k and v (B, H, S, D), with the mask that attention_mask made."""
    return ATTENTION_BACKENDS[backend](q, k, v, mask)


@torch.no_grad()
def check_attention(model) -> None:
    """Raises ParamTableError when the model's attention backend does not compute what the others do, on random numbers.

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
        raise ParamTableError(
            f"--attn {name} computes something else than softmax attention, so text would be drawn from another model; "
            "a backend is only how attention is computed: put what changes it into model.py, as GPT.attention_bias or "
            "in CausalSelfAttention"
        )


def attention_kernels(model, micro_batch: int) -> str:
    """Backend and kernels of a GPT's attention: as PyTorch chooses for such tensors, not as a flag says."""
    backend, cfg, device = model.attn, model.cfg, model.cos.device
    if backend not in ("auto", "sdpa", *SDPA_BACKENDS):
        return backend
    q = torch.empty((micro_batch, cfg.n_head, cfg.seq_len, cfg.head_dim), dtype=model.compute_dtype, device=device,
                    requires_grad=True)  # fmt: skip
    names, tokens = [], torch.zeros((micro_batch, cfg.seq_len), dtype=torch.int64, device=device)
    for _, mask in sorted(model.attention_masks("sdpa", tokens).items()):
        mask = mask if mask is None or mask.dtype == torch.bool else mask.to(q.dtype)
        with sdpa_kernel(SDPA_BACKENDS[backend]) if backend in SDPA_BACKENDS else contextlib.nullcontext():
            choice = torch._fused_sdp_choice(q, q, q, mask, 0.0, mask is None)
        names += [name.lower() for name, kernel in SDPBackend.__members__.items() if int(kernel) == choice]
    return f"{backend} ({', '.join(dict.fromkeys(names))})"


# ---------------------------------------------------------------------------------------------------------------------
# 2. RMSNorm and squared ReLU, on a CPU without a compiler in fewer trips to memory


def is_eager_on_cpu(x: Tensor) -> bool:
    if torch.compiler.is_compiling() or x.device.type != "cpu":
        return False
    return x.dim() > 2 and x.size(1) > 1 and x.numel() > 0  # one token at a time, nothing leaves the cache anyhow


def norm(x: Tensor) -> Tensor:
    """RMSNorm over the last dimension of x (..., D), without a gain: the next matrix can hold one."""
    if is_eager_on_cpu(x):
        return EagerRMSNorm.apply(x)
    return F.rms_norm(x, (x.size(-1),))


def relu_squared(x: Tensor) -> Tensor:
    """ReLU squared (So et al. 2021)."""
    if is_eager_on_cpu(x):
        return EagerReLUSquared.apply(x)
    return F.relu(x).square()


class EagerRMSNorm(torch.autograd.Function):
    """RMSNorm of x (B, T, ..., D), in fp32 inside: a few rows at a time go through all its steps, in the cache.

    PyTorch's own takes the whole tensor through memory twenty times. Backward needs the result and a number a row.
    """

    @staticmethod
    def forward(ctx, x):
        wide = torch.promote_types(x.dtype, torch.float32)
        y, scales = x.new_empty(x.shape), x.new_empty((*x.shape[:-1], 1), dtype=wide)
        for part, scale, out in cache_sized(x, scales, y):
            part = part.to(wide)
            torch.linalg.vector_norm(part, dim=-1, keepdim=True, out=scale)
            scale.square_().div_(x.size(-1)).add_(torch.finfo(wide).eps).rsqrt_()
            out.copy_(part * scale)
        ctx.save_for_backward(y, scales)
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        y, scales = ctx.saved_tensors
        dx = torch.empty_like(y)
        for g, part, scale, out in cache_sized(grad, y, scales, dx):
            g, part = g.to(scale.dtype), part.to(scale.dtype)
            out.copy_(torch.addcmul(g, part, (g * part).mean(-1, keepdim=True), value=-1).mul_(scale))
        return dx


class EagerReLUSquared(torch.autograd.Function):
    """ReLU squared, a few rows at a time."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        y = x.new_empty(x.shape)
        for part, out in cache_sized(x, y):
            torch.clamp_min(part, 0, out=out).square_()
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        dx = x.new_empty(x.shape)  # contiguous, so that views of it can be written
        for g, part, out in cache_sized(grad, x, dx):
            torch.clamp_min(part, 0, out=out).mul_(g).mul_(2)
        return dx


def cache_sized(*tensors: Tensor):
    """Views of the same few rows of all the tensors (B, T, ...), as many as the cores' caches hold."""
    rows = [t.flatten(0, 1) for t in tensors]
    count = max(1, 65536 * torch.get_num_threads() // rows[0][0].numel())
    return zip(*(t.split(count) for t in rows))


# ---------------------------------------------------------------------------------------------------------------------
# 3. Matrices that a single row multiplies, and fp8


def one_row(x: Tensor) -> bool:
    """Whether to compile x (..., K) @ w.T as a sum of products, which fuses with what is beside it."""
    return torch.compiler.is_dynamo_compiling() and x.numel() == x.size(-1)


def matvec(x: Tensor, w: Tensor) -> Tensor:
    """x (..., K) of one row @ w (N, K).T in fp32, made to be compiled: (..., N)."""
    row, parts = x.float().flatten(), w.chunk(4 if x.is_cpu else 1)  # a core adds four sums up in the time of one
    return torch.cat([(row * part.float()).sum(-1) for part in parts]).view(*x.shape[:-1], len(w))


def quantize_fp8(x: Tensor, dim=-1) -> tuple[Tensor, Tensor]:
    """x (M, K) in e4m3, scaled to its range, and the fp32 scales that undo it: (M, 1) a row, or (1, 1) with dim=()."""
    scale = x.abs().amax(dim, keepdim=True).float().clamp(min=1e-30) / torch.finfo(torch.float8_e4m3fn).max
    return (x / scale).to(torch.float8_e4m3fn), scale  # divided in fp32, the scale's dtype


def fp8_matmul(a: Tensor, b: Tensor, fast: bool) -> Tensor:
    """a (M, K) @ b (N, K).T in e4m3, with a scale for each row of both, in a's dtype, which is bf16; both contiguous.

    fast: sums as the tensor cores make them, with fewer bits than fp32. K and N must be multiples of 16.
    """
    (a8, a_scale), (b8, b_scale) = quantize_fp8(a), quantize_fp8(b)
    return torch._scaled_mm(a8, b8.t(), a_scale, b_scale.t(), out_dtype=a.dtype, use_fast_accum=fast)


class Fp8Linear(torch.autograd.Function):
    """x (..., K) @ w (N, K).T in float8, and the gradient by x; that by w stays in x's dtype, which is bf16.

    A scale for each token and for each row of w, as in torchao's rowwise_with_gw_hp: there is no state, and each scale
    can be made where its row is made.
    """

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return fp8_matmul(x.flatten(0, -2), w, fast=True).view(*x.shape[:-1], w.size(0))

    @staticmethod
    def backward(ctx, grad):
        x, w = ctx.saved_tensors
        flat = grad.flatten(0, -2)
        return fp8_matmul(flat, w.t().contiguous(), fast=False).view_as(x), flat.T @ x.flatten(0, -2)


# ---------------------------------------------------------------------------------------------------------------------
# 4. Loss


def softcap_logits(logits: Tensor, softcap: float) -> Tensor:
    """tanh soft-capping to (-softcap, softcap) (Gemma 2, 2024); 0 disables."""
    return softcap * torch.tanh(logits / softcap) if softcap else logits


# SHA-256 of the sources that the loss kernel below was derived from: Linear.forward, GPT.logits, GPT.chunk_loss and
# cross_entropy in model.py, softcap_logits and ce_fwd_bwd here. Whoever changes them for good, all alike, renews it.
KERNEL_SOURCES = "d401f50f3a77e4d617c29902064e04b32dc5d33b4f0cbfc3400d79ee72d1e1ef"


@functools.cache
def kernel_fits(*functions) -> bool:
    """Whether these functions are the ones that the loss kernel was derived from, letter by letter."""
    try:
        text = "".join(inspect.getsource(function) for function in (*functions, softcap_logits, ce_fwd_bwd))
    except OSError:  # typed into a notebook
        return False
    return hashlib.sha256(text.encode()).hexdigest() == KERNEL_SOURCES


def check_loss(cross_entropy, vocab_size: int) -> None:
    """Raises ParamTableError when a loss is not a sum over tokens, as batches of any cut need it."""
    logits = torch.randn((6, vocab_size), generator=torch.Generator().manual_seed(0))
    targets = torch.arange(6) % vocab_size
    once = cross_entropy(logits, targets, True)
    twice = cross_entropy(torch.cat((logits, logits)), torch.cat((targets, targets)), True)
    if not torch.allclose(twice, 2 * once, rtol=1e-3):
        raise ParamTableError(
            f"cross_entropy in model.py gives {(twice / once).item():.3g} times the loss for twice the tokens; it must "
            "return their sum, which the trainer divides by the number of targets: reduction='sum'"
        )


def ce_fwd_bwd(logits: Tensor, targets: Tensor, softcap: float, grad_scale: float,
               fp8: bool = False) -> tuple[Tensor, Tensor, Tensor | None]:  # fmt: skip
    """Summed cross entropy of soft-capped logits (N, V), fp32 (), and grad_scale times its gradient, in their dtype.

    Each number of the gradient is within 1 before it is scaled. With fp8 it comes in e5m2 as well, else None does.
    """
    target, counted = targets.clamp(min=0)[:, None], (targets >= 0)[:, None]
    at_target = softcap_logits(logits.gather(1, target).float(), softcap)
    if 0 < softcap < 70:  # then no exponential overflows without the maximum, and tanh(x) = 2 sigmoid(2 x) - 1
        half = (logits.float() * (2 / softcap)).sigmoid_()
        capped = (half * (2 * softcap)).sub_(softcap)
        log_z = capped.exp().sum(-1, keepdim=True).log()
        slope = (half - half.square()) * 4
    else:
        capped = softcap_logits(logits.float(), softcap)
        log_z = capped.logsumexp(-1, keepdim=True)
        slope = 1 - (capped / softcap).square() if softcap else 1.0
    loss = torch.where(counted, log_z - at_target, 0).sum()
    grad = (capped - log_z).exp_()
    if torch.compiler.is_compiling():  # to be one pass with what stands around it
        grad -= (torch.arange(logits.size(1), device=logits.device) == target).float()
    else:
        grad.scatter_add_(1, target, torch.full_like(log_z, -1.0))
    grad = grad.mul_(slope).mul_(torch.where(counted, grad_scale, 0.0))
    return loss, grad.to(logits.dtype), grad.to(torch.float8_e5m2) if fp8 else None


def add_matmul_(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total (M, N), fp32, += a (M, K) @ b (K, N). CUDA adds 16-bit matrices up in fp32, unrounded, as in Liger."""
    if total.is_cuda and a.dtype != total.dtype:
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    else:
        total += a @ b


class ChunkedLinearCrossEntropy(torch.autograd.Function):
    """lm_head and cross entropy, `chunk` tokens at a time: the logits of the whole batch never exist.

    The gradients are made in the forward pass while each chunk's logits are there, as in Liger Kernel (Hsu et al.
    2024), so nothing is computed twice. Until backward it keeps the gradient by x, in x's dtype, and that by the
    weight, in fp32; the caller's graph keeps x and the weight besides.

    fp8: logits and dx are float8 matmuls, whose sizes must be multiples of 16; the weight's gradient sums over tokens
    and stays in x's dtype. Scales are known before, as in modded-nanogpt, but the weight's, which is made once: x is
    RMS-normalized, so it is within sqrt(n_embd) and e4m3 holds it as it is.
    """

    @staticmethod
    def forward(ctx, x, weight, targets, softcap, chunk, ce_fn, fp8=False):
        w = weight.to(x.dtype)
        ctx.grad_scale = 64.0 if x.dtype == torch.float16 else 1.0  # small probabilities vanish in fp16
        if fp8:
            ctx.grad_scale = 2.0**15  # the power of two below e5m2's largest number
            w8, w_scale = quantize_fp8(w, dim=())
            wt8, one = w8.t().contiguous(), torch.ones_like(w_scale)
        dx, dw = torch.empty_like(x), torch.zeros_like(weight, dtype=torch.float32)
        total = torch.zeros((), dtype=torch.float32, device=x.device)
        for rows in (slice(i, i + chunk) for i in range(0, x.size(0), chunk)):
            if fp8:
                x8 = x[rows].to(torch.float8_e4m3fn)
                logits = torch._scaled_mm(x8, w8.t(), one, w_scale, out_dtype=x.dtype, use_fast_accum=True)
            else:
                logits = x[rows] @ w.T
            loss, dlogits, dlogits8 = ce_fn(logits, targets[rows], softcap, ctx.grad_scale, fp8)
            dx[rows] = torch._scaled_mm(dlogits8, wt8.t(), one, w_scale, out_dtype=x.dtype) if fp8 else dlogits @ w
            add_matmul_(dw, dlogits.T, x[rows])
            total += loss
        ctx.save_for_backward(dx, dw)
        ctx.weight_dtype = weight.dtype
        return total

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        dx, dw = ctx.saved_tensors
        grad = grad.float() / ctx.grad_scale
        return (dx.float() * grad).to(dx.dtype), (dw * grad).to(ctx.weight_dtype), *(None,) * 5


# ---------------------------------------------------------------------------------------------------------------------
# 5. Activation checkpointing and offload


def apply_ac(mode: str, module: nn.Module, *inputs) -> Tensor:
    """module._forward(*inputs), of which backward recomputes nothing, all, or all but matmuls and attention.

    mode: "none", "full" or "selective". What is recomputed draws the same numbers (from the global generators of torch,
    Python and numpy), and finds the module's buffers as they were.
    """
    if mode == "none" or not torch.is_grad_enabled():
        return module._forward(*inputs)
    contexts = functools.partial(create_selective_checkpoint_contexts, selective_ac_policy)
    if torch.compiler.is_compiling():  # which sees buffers and draws itself
        options = dict(context_fn=contexts) if mode == "selective" else {}
    else:
        options = dict(context_fn=functools.partial(ac_contexts, module, contexts if mode == "selective" else None))
    return checkpoint(module._forward, *inputs, use_reentrant=False, **options)


def recomputed(module: nn.Module, function):
    """The function, of which backward keeps the inputs and recomputes the rest; it is a part of the module."""

    def call(*inputs):
        contexts = functools.partial(ac_contexts, module, None)
        return checkpoint(function, *inputs, use_reentrant=False, context_fn=contexts)

    return call


def ac_contexts(module: nn.Module, contexts) -> tuple:
    """The contexts of a forward pass and of its recomputation, around those that `contexts()` makes if it is given."""
    forward, again = contexts() if contexts else (contextlib.nullcontext(), contextlib.nullcontext())
    buffers = [(owner, name, t.clone()) for owner in module.modules() for name, t in owner._buffers.items()]
    return forward, recomputation(again, (random.getstate(), np.random.get_state()), buffers)


@contextlib.contextmanager
def recomputation(context, draws: tuple, buffers: list[tuple[nn.Module, str, Tensor]]):
    """Python's and numpy's generators and these buffers as they were, within; as they are now, afterwards."""
    buffers_now, draws_now = (
        [owner._buffers[name] for owner, name, _ in buffers],
        (random.getstate(), np.random.get_state()),
    )
    random.setstate(draws[0])
    np.random.set_state(draws[1])
    for owner, name, before in buffers:
        owner._buffers[name] = before.clone()
    try:
        with context:
            yield
    finally:
        random.setstate(draws_now[0])
        np.random.set_state(draws_now[1])
        for (owner, name, _), now in zip(buffers, buffers_now):
            owner._buffers[name] = now


def selective_ac_policy(ctx, op, *args, **kwargs) -> CheckpointPolicy:
    """Selective activation checkpointing: keep the outputs of matmuls and attention, recompute everything else."""
    name = str(op)
    costly = ("mm.default", "scaled_dot_product", "flash_attention", "flex_attention", "varlen_attn")
    keep = any(part in name for part in costly)
    return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE


def offload_activations(strided: bool):
    """A context whose forward passes keep what backward needs in host memory; strided: for a compiled backward pass."""
    return saved_tensors_hooks(functools.partial(offload_pack, strided=strided), offload_unpack)


OFFLOAD_MIN_NUMEL = 1 << 16  # smaller tensors stay on the device


def offload_pack(tensor: Tensor, strided: bool):
    """What backward needs, in pinned host memory; masks, parameters, small tensors and CPU tensors stay where they are.

    strided: it comes back with the strides it had, gaps and all, which a compiled backward pass insists on.
    """
    stays = not tensor.is_cuda or isinstance(tensor, nn.Parameter) or tensor.dtype == torch.bool
    if stays or tensor.numel() < OFFLOAD_MIN_NUMEL:
        return tensor
    if strided and 0 in tensor.stride():  # one number stands for many
        return tensor
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return tensor.device, strided and tensor.stride(), host.copy_(tensor, non_blocking=True)


def offload_unpack(packed) -> Tensor:
    """The tensor that offload_pack was given, on its device."""
    if isinstance(packed, Tensor):
        return packed
    device, strides, host = packed
    if not strides:
        return host.to(device, non_blocking=True)
    return torch.empty_strided(host.shape, strides, dtype=host.dtype, device=device).copy_(host, non_blocking=True)


# ---------------------------------------------------------------------------------------------------------------------
# 6. Hashes of n-grams

HASH_A, HASH_B, HASH_MODULUS = 0x9E3779B1, 0x85EBCA6B, 1 << 31  # multipliers of MurmurHash and xxHash


def ngram_hashes(tokens: Tensor, length: int, longest: int, eot: int | None) -> Tensor:
    """Hashes of the n-grams of 2 to `longest` tokens that end at each of the last `length` of tokens (B, S).

    int64 (B, length, longest - 1). An n-gram that would reach over the start of the context, or of the document that
    begins with `eot`, has "no token" there.
    """
    tokens = tokens[:, -(length + longest - 1) :]
    doc_ids = None if eot is None else (tokens == eot).cumsum(1)
    code, codes = tokens[:, -length:].long() + 1, []
    for back in range(1, longest):
        before = F.pad(tokens + 1, (back, 0))[:, -length - back : -back]
        if doc_ids is not None:
            same_doc = doc_ids == F.pad(doc_ids, (back, 0), value=-1)[:, :-back]
            before = before * same_doc[:, -length:]
        code = (code * HASH_A + before) % HASH_MODULUS
        codes.append(code)
    return torch.stack(codes, -1)


def ngram_rows(codes: Tensor, n_rows: int) -> Tensor:
    """The row of a table of n_rows that each n-gram's hash falls into."""
    return (codes * HASH_B >> 7) % n_rows


def hashed_uniform(code: Tensor, place: Tensor, seed: int) -> Tensor:
    """Numbers in [0, 1) that look random, fp32: functions of int64 code (N, M), its place (N, 1) and the seed."""
    for mixed_in in (place * HASH_B % HASH_MODULUS, seed % HASH_MODULUS):  # multiplying and folding, as in MurmurHash
        code = (code ^ mixed_in) * HASH_A % HASH_MODULUS
        code = (code ^ code >> 15) * HASH_B % HASH_MODULUS
        code = code ^ code >> 13
    return (code % (1 << 24)) / (1 << 24)


# ---------------------------------------------------------------------------------------------------------------------
# 7. Initial values: functions that fill a tensor on the CPU with torch's generator


class ParamTableError(ValueError):
    """A parameter that has no row of PARAM_TABLE, or one that cannot be."""


def normal(std: float, by_fan_in: bool = True):
    """Normal with this standard deviation, for matrices times fan_in ** -0.5 (unless not by_fan_in)."""

    def fill(x: Tensor, generator: torch.Generator) -> Tensor:
        scale = x.size(-1) ** 0.5 if by_fan_in and x.dim() > 1 else 1.0
        return x.normal_(0, 1, generator=generator).mul_(std / scale)

    return fill


def constant(value: float):
    return lambda x, generator: x.fill_(value)


zeros, ones = constant(0.0), constant(1.0)


def orthogonal(gain: float = 1.0):
    """(Semi-)orthogonal (Saxe et al. 2014), for tensors of two dimensions and more."""
    return lambda x, generator: nn.init.orthogonal_(x, gain, generator=generator)


def constructed(make_model, seed: int) -> nn.Module:
    """make_model() on the CPU, with all that its constructors draw, torch's generator starting from `seed`."""
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.manual_seed(seed)
        return make_model()


def persistent_buffers(model: nn.Module) -> dict[str, Tensor]:
    """The buffers that belong to the model's state_dict(), by name."""
    buffers = {}
    for prefix, module in model.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                buffers[f"{prefix}.{name}".lstrip(".")] = buffer
    return buffers


@torch.no_grad()
def copy_buffers_(model: nn.Module, made: nn.Module) -> None:
    """The model's buffers as `made` has them. Raises ParamTableError for one that it lacks."""
    values = dict(made.named_buffers())
    for name, buffer in model.named_buffers():
        if name not in values:
            raise ParamTableError(
                f"buffer {name} is not made by GPT(cfg) alone; make it in the constructor of a part of it"
            )
        buffer.copy_(values[name])


# ---------------------------------------------------------------------------------------------------------------------
# 8. Ranks: DDP, FSDP2 and, between the rows that this rank holds and whole tensors, the way there and back


def to_local(tensor: Tensor) -> Tensor:
    """This rank's shard of an FSDP parameter or gradient; any other tensor as it is."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def rank_groups(param: Tensor) -> tuple[dist.ProcessGroup | None, dist.ProcessGroup | None]:
    """The ranks that share a parameter's shards, and those that hold the same part of it; None for this rank alone."""
    mesh = getattr(param, "device_mesh", None)
    if mesh is None:
        return None, dist.group.WORLD if dist.is_initialized() and dist.get_world_size() > 1 else None
    groups = mesh.get_all_groups()
    return groups[-1], groups[0] if mesh.ndim == 2 and mesh.size(0) > 1 else None


def chunk_sizes(n: int, world_size: int) -> list[int]:
    """How many of n rows each rank holds when Tensor.chunk cuts them: ceil(n / world_size), then the rest, then 0."""
    most = -(-n // world_size)
    return [max(0, min(most, n - rank * most)) for rank in range(world_size)]


@torch.no_grad()
def copy_from_full_tensor_(param: Tensor, full: Tensor, part: Tensor | None = None) -> None:
    """Copy a full tensor into a parameter, or into `part` of its size: under FSDP, the rows that this rank holds."""
    part = to_local(param) if part is None else part
    if hasattr(param, "to_local") and full.dim():
        mesh = param.device_mesh
        full = full.split(chunk_sizes(len(full), mesh.size(-1)))[mesh.get_local_rank(mesh.ndim - 1)]
    part.copy_(full)


@torch.no_grad()
def full_tensor_on_rank0(param: Tensor, part: Tensor) -> Tensor | None:
    """A copy in host memory of the full tensor of which `part`, cut as the parameter is, is this rank's shard.

    None but on rank 0, which receives a shard at a time from its group; every rank has to call it.
    """
    shards = rank_groups(param)[0] if part.dim() else None
    members = dist.get_process_group_ranks(shards) if shards else [0]
    rank = dist.get_rank() if dist.is_initialized() else 0
    part = part.detach()
    if members[0] == 0 and rank in members[1:] and len(part):  # other groups hold the same
        dist.send(part.to(param.device).contiguous(), 0, group=shards)
    if rank:
        return None
    full = torch.empty(param.shape if shards else part.shape, dtype=part.dtype, device="cpu")
    for member, rows in zip(members, full.split(chunk_sizes(len(full), len(members))) if shards else [full]):
        shard = part if member == 0 else rows
        if member and len(rows):
            shard = rows if param.device.type == "cpu" else torch.empty_like(rows, device=param.device)
            dist.recv(shard, member, group=shards)
        if shard is not rows:
            rows.copy_(shard)
    return full


def gather_whole_matrices(shards: Tensor, rows: int, group: dist.ProcessGroup) -> Tensor:
    """From this rank's shard of every matrix (count, its rows, cols) to the whole matrices it owns (n, rows, cols).

    One all-to-all; matrix i is owned by rank i // ceil(count / world_size) of the group.
    """
    count, _, cols = shards.shape
    rank, world_size = group.rank(), group.size()
    heights, owned = chunk_sizes(rows, world_size), chunk_sizes(count, world_size)
    sent = [n * heights[rank] * cols for n in owned]
    received = [owned[rank] * height * cols for height in heights]
    flat = shards.new_empty(sum(received))
    dist.all_to_all_single(flat, shards.flatten(), received, sent, group=group)
    pieces = [t.view(owned[rank], height, cols) for t, height in zip(flat.split(received), heights)]
    return torch.cat(pieces, dim=1)


def scatter_updates(updates: Tensor, count: int, group: dist.ProcessGroup) -> Tensor:
    """The way back: from updates of the matrices that this rank owns (n, rows, cols) to its shard of all `count`."""
    _, rows, cols = updates.shape
    rank, world_size = group.rank(), group.size()
    heights, owned = chunk_sizes(rows, world_size), chunk_sizes(count, world_size)
    sent = [owned[rank] * height * cols for height in heights]
    received = [n * heights[rank] * cols for n in owned]
    flat = updates.new_empty(sum(received))
    pieces = torch.cat([piece.flatten() for piece in updates.split(heights, dim=1)])
    dist.all_to_all_single(flat, pieces, received, sent, group=group)
    return flat.view(count, heights[rank], cols)


def start_gather(parts: Tensor, group: dist.ProcessGroup) -> dist.Work:
    """Begins to fill in the other ranks' parts of `parts` (n, ...), n / world_size rows a rank, in the ranks' order.

    They are there after wait(); until then nobody may touch `parts`.
    """
    all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # before 2.13
    return all_gather(parts, parts.chunk(group.size())[group.rank()], group=group, async_op=True)


@contextlib.contextmanager
def state_on_device(device: torch.device, *kept: list[Tensor]):
    """Yields these lists of tensors; of those that are kept elsewhere, copies on the device that are written back."""
    used = [[t.to(device, non_blocking=True) for t in tensors] for tensors in kept]
    yield used
    for ours, theirs in zip(sum(kept, []), sum(used, [])):
        if theirs is not ours:
            ours.copy_(theirs, non_blocking=True)


class Matrix(NamedTuple):
    """What Muon updates at once: one of the matrices in a parameter, or under FSDP this rank's rows of all of them.

    weight, grad and momentum are views of one shape, of the parameter, its gradient and its state. split: the heights
    of the parameter's matrices.
    """

    group: dict
    param: Tensor
    split: tuple[int, ...]
    weight: Tensor
    grad: Tensor
    momentum: Tensor


def matrix_stacks(groups: list[dict], state: dict, numel: int, batched: bool) -> list[list[Matrix]]:
    """Muon's matrices of all groups that have a gradient, in stacks to be orthogonalized in one call.

    A stack has whole matrices of one shape first, then those of it transposed; or, under FSDP, shards of one group's
    parameters of one shape. numel: the most numbers of a stack for each rank, unless a matrix has more. Not `batched`:
    the matrices of one parameter.
    """
    alike: dict[object, list[Matrix]] = {}
    for group in groups:
        for p in group["params"] if group["kind"] == "muon" else ():
            if p.grad is None:
                continue
            shards, replicas = rank_groups(p)
            split = group["split"] or (len(p),)
            parts = (
                t.split(max(1, len(t)) if shards else split)
                for t in (to_local(p), to_local(p.grad), state[p]["momentum"])
            )
            for views in zip(*parts):
                shape = views[0].shape
                key = (p.shape, id(group)) if shards else frozenset(shape) if replicas else shape
                alike.setdefault(key if batched else (p, shape), []).append(Matrix(group, p, split, *views))
    stacks = []
    for stack in alike.values():
        first = stack[0]
        shards, replicas = rank_groups(first.param)
        n_ranks = math.prod(ranks.size() for ranks in (shards, replicas) if ranks)
        most = n_ranks * max(1, numel // (first.param if shards else first.weight).numel())
        stack = sorted(stack, key=lambda matrix: matrix.weight.shape != first.weight.shape)
        stacks += [stack[i : i + most] for i in range(0, len(stack), most)]
    return stacks


def apply_ddp(model: nn.Module, bucket_cap_mb: int, grad_comm: torch.dtype) -> DistributedDataParallel:
    """The model with gradients that are averaged over all ranks, travelling as `grad_comm`."""
    # Layers that a rank leaves out, and experts without tokens, have no gradient in a step.
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True, bucket_cap_mb=bucket_cap_mb,
                                      find_unused_parameters=True)  # fmt: skip
    wrapped.synchronized = {p for p in model.parameters() if p.requires_grad}
    wrapped.broadcast_buffers = False  # sync_buffers does; as an argument it warns from 2.13 on
    if grad_comm == torch.bfloat16:
        from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook

        # by another name, as DDP looks whether NCCL takes bf16, of gloo too
        wrapped.register_comm_hook(None, lambda group, bucket: bf16_compress_hook(group, bucket))
    return wrapped


def apply_fsdp(model: nn.Module, device: torch.device, dtype: torch.dtype, shard_size: int,
               grad_comm: torch.dtype) -> None:  # fmt: skip
    """FSDP2: blocks first, then the rest, from the meta device; the weights are still to be put in.

    Each `shard_size` ranks in a row hold the model once, and several such groups the same one (hybrid sharding);
    gradients travel as `grad_comm`. Raises ParamTableError for a parameter that cannot be sharded.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    for name, param in model.named_parameters():
        if param.dim() == 0:
            raise ParamTableError(f"parameter {name} is a single number, which FSDP cannot cut; give it the shape (1,)")
        if param._backward_hooks or param._post_accumulate_grad_hooks or vars(param):
            raise ParamTableError(f"parameter {name} has hooks or attributes, which FSDP drops; use --parallel ddp")
    for prefix, module in model.named_modules():
        for name in (name for name, value in vars(module).items() if isinstance(value, Tensor)):
            place = f"{prefix}.{name}".lstrip(".")
            raise ParamTableError(
                f"{place} is a tensor that FSDP knows nothing of; make it a buffer, by register_buffer"
            )
    replicas = dist.get_world_size() // shard_size
    shape, names = ((replicas, shard_size), ("replicate", "shard")) if replicas > 1 else ((shard_size,), ("shard",))
    mesh = init_device_mesh(device.type, shape, mesh_dim_names=names)
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=grad_comm, cast_forward_inputs=False)
    for module in dict.fromkeys((*model.blocks, model)):  # a block may stand in several places
        fully_shard(module, mesh=mesh, mp_policy=policy)
    model.to_empty(device=device)  # swaps what is in the parameters, so that tied ones stay tied


def sync_buffers(model: nn.Module) -> None:
    """What forward passes wrote into the model's state is the same on all ranks: floats are averaged, others rank 0's.

    DDP would take rank 0's before every forward pass, and FSDP none. Equal values stay as they are, to the bit.
    """
    for buffer in persistent_buffers(model).values():
        first = buffer.clone()
        dist.broadcast(first, 0)
        if buffer.is_floating_point():
            apart = buffer - first
            dist.all_reduce(apart)
            first += apart / dist.get_world_size()
        buffer.copy_(first)


@torch.no_grad()
def swap_weights(model: nn.Module, others: dict[str, Tensor]) -> None:
    """Exchange the values of parameters with those of `others`, by name, sharded as they are."""
    for name, p in model.named_parameters():
        if name in others:
            ours, theirs = to_local(p), to_local(others[name])
            kept = ours.clone()
            ours.copy_(theirs)
            theirs.copy_(kept)


@torch.no_grad()
def keep_buffers(model: nn.Module, before: dict[str, Tensor], skip: Tensor) -> None:
    """Buffers as they were before, where skip, bool (), is true; else the same on all ranks."""
    for name, buffer in persistent_buffers(model).items():
        torch.where(skip, before[name], buffer, out=buffer)
    if dist.is_initialized() and dist.get_world_size() > 1:
        sync_buffers(model)


def reshard(model: nn.Module) -> None:
    """After a forward pass without a backward one, FSDP's root still holds whole parameters: back to shards."""
    if hasattr(model, "reshard"):
        model.reshard()


# ---------------------------------------------------------------------------------------------------------------------
# 9. Compiler warm-up


def cudagraph_mark_step(cudagraphs: bool) -> None:
    """Tell CUDA graphs, if there are any, that what an earlier call returned may be overwritten."""
    if cudagraphs:
        torch.compiler.cudagraph_mark_step_begin()  # imports the compiler: more than a second


def dummy_micro_step(model: nn.Module, micro_batch: int, seq_len: int, cudagraphs: bool, train: bool = True) -> None:
    """One forward pass, with `train` a backward one too, on zeros, for what it compiles, loads or allocates."""
    x = torch.zeros((micro_batch, seq_len), dtype=torch.int64, device=next(model.parameters()).device)
    cudagraph_mark_step(cudagraphs)
    with torch.set_grad_enabled(train):
        loss = model(x, x) / x.numel()
        if train:
            loss.backward()


@contextlib.contextmanager
def side_effects(model: nn.Module, device: torch.device):
    """Yields a dict that afterwards says what happened within: "drawn", whether torch's global generators gave numbers,
    and "written", the names of buffers that were written."""

    def draws() -> list[Tensor]:
        return [torch.get_rng_state(), *([torch.cuda.get_rng_state()] if device.type == "cuda" else [])]

    def writes() -> dict[str, tuple]:
        return {name: (id(buffer), buffer._version) for name, buffer in model.named_buffers()}

    effects, drawn, written = {}, draws(), writes()
    yield effects
    effects["drawn"] = not all(map(torch.equal, drawn, draws()))
    effects["written"] = [name for name, now in writes().items() if now != written[name]]


def warm_up(model: nn.Module, optimizer, micro_batch: int, seq_len: int, cudagraphs: bool) -> None:
    """Compile and load kernels for training and evaluation. Weights, buffers and the optimizer are to be made anew."""
    calls = 3 if cudagraphs else 1  # a graph is recorded at the second call
    for _ in range(calls):
        dummy_micro_step(model, micro_batch, seq_len, cudagraphs)
    nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
    optimizer.step()
    model.zero_grad(set_to_none=not cudagraphs)
    model.eval()
    for _ in range(calls):
        dummy_micro_step(model, micro_batch, seq_len, cudagraphs, train=False)
    model.train()
    reshard(model)
