"""lm_head and cross-entropy in chunks: the logits of a whole batch never exist."""

import functools
import hashlib
import inspect

import torch
from torch import Tensor

from ops.linear import quantize_fp8


def softcap_logits(logits: Tensor, softcap: float) -> Tensor:
    """tanh soft-capping to (-softcap, softcap) (Gemma 2, 2024); 0 disables."""
    return softcap * torch.tanh(logits / softcap) if softcap else logits


# SHA-256 of the sources that the loss kernel below was derived from: Linear.forward, GPT.logits, GPT.chunk_loss and
# cross_entropy in model.py, softcap_logits and ce_fwd_bwd here. If you change all of them alike, renew it.
KERNEL_SOURCES = "574f2275cac9c9b25cb28551ca9da571276cb5dfc02d3a8696de78191f910dd4"


@functools.cache
def kernel_fits(*functions) -> bool:
    """Whether these functions are verbatim those that the loss kernel was derived from."""
    try:
        text = "".join(inspect.getsource(function) for function in (*functions, softcap_logits, ce_fwd_bwd))
    except OSError:  # typed into a notebook
        return False
    return hashlib.sha256(text.encode()).hexdigest() == KERNEL_SOURCES


def ce_fwd_bwd(
    logits: Tensor, targets: Tensor, softcap: float, grad_scale: float, fp8: bool = False
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Summed cross entropy of soft-capped logits (N, V), fp32 (), and grad_scale times its gradient, in their dtype.

    Each number of the gradient is within 1 before it is scaled. With fp8 it comes in e5m2 as well, else None does.
    """
    target, counted = targets.clamp(min=0)[:, None], (targets >= 0)[:, None]
    at_target = softcap_logits(logits.gather(1, target).float(), softcap)
    bounded = 0 < softcap < 70  # then no exponential overflows without the maximum, and tanh(x) = 2 sigmoid(2 x) - 1
    if bounded:
        half = (logits.float() * (2 / softcap)).sigmoid_()
        grad = (half * (2 * softcap)).sub_(softcap).exp_()
        z = grad.sum(-1, keepdim=True)
        log_z = z.log()
    else:
        capped = softcap_logits(logits.float(), softcap)
        largest = capped.amax(-1, keepdim=True)
        grad = (capped - largest).exp_()
        z = grad.sum(-1, keepdim=True)
        log_z = z.log() + largest
    loss = torch.where(counted, log_z - at_target, 0).sum()
    if torch.compiler.is_compiling():  # to be one pass with what stands around it
        grad = torch.where(torch.arange(logits.size(1), device=logits.device) == target, grad - z, grad)
    else:
        grad.scatter_add_(1, target, -z)
    scale = torch.where(counted, grad_scale / z, 0.0)
    if bounded:
        grad, scale = torch.ops.aten.sigmoid_backward(grad, half), 4 * scale
    elif softcap:
        grad *= 1 - (capped / softcap).square()
    grad = grad.mul_(scale)
    return loss, grad.to(logits.dtype), grad.to(torch.float8_e5m2) if fp8 else None


def add_matmul_(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total (M, N), fp32, += a (M, K) @ b (K, N). On CUDA, 16-bit matmuls accumulate into it unrounded, as in Liger."""
    if total.is_cuda and a.dtype != total.dtype:
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    else:
        total += a @ b


class ChunkedLinearCrossEntropy(torch.autograd.Function):
    """lm_head and cross entropy, `chunk` tokens at a time: the logits of the whole batch never exist.

    The gradients are computed in the forward pass while each chunk's logits exist, as in Liger Kernel (Hsu et al.
    2024), so nothing is computed twice. Until backward it stores the gradient of x, in x's dtype, and that of the
    weight, in fp32; the caller's graph also keeps x and the weight.

    fp8: logits and dx are float8 matmuls, whose sizes must be multiples of 16; the weight's gradient, a sum over
    tokens, stays in x's dtype. Scales are fixed in advance, as in modded-nanogpt, except the weight's, computed once
    per call: x is RMS-normalized, so it is within sqrt(n_embd) and e4m3 holds it unscaled.
    """

    @staticmethod
    def forward(ctx, x, weight, targets, softcap, chunk, ce_fn, fp8=False):
        w = weight.to(x.dtype)
        ctx.grad_scale = 64.0 if x.dtype == torch.float16 else 1.0  # small probabilities underflow in fp16
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
            del logits
            dx[rows] = torch._scaled_mm(dlogits8, wt8.t(), one, w_scale, out_dtype=x.dtype) if fp8 else dlogits @ w
            add_matmul_(dw, dlogits.T, x[rows])
            del dlogits, dlogits8  # the next chunk's logits take their place
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
