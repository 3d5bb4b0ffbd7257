"""Matmuls of linear layers in special cases, such as float8."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def linear(x: Tensor, w: Tensor) -> Tensor:
    """x (..., K) @ w (N, K).T."""
    n = len(w)
    if x.is_cuda and n < 64 and n % 8:  # as of a gate per head: cuBLAS is slow unless 8 divides it
        padded = F.pad(w, (0, 0, 0, -n % 8))
        return F.linear(x, padded)[..., :n]
    return F.linear(x, w)


def quantize_fp8(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Convert x (M, K) to a float8 dtype, each row scaled to its range.

    Returns x in float8 and the fp32 scales (M, 1) that it is to be multiplied by.
    """
    largest = x.abs().amax(-1, keepdim=True).float()
    scale = largest.clamp(min=1e-30) / torch.finfo(dtype).max
    return (x / scale).to(dtype), scale  # divided in fp32, the scale's dtype


def fp8_matmul(a: Tensor, b: Tensor, dtype: torch.dtype = torch.float8_e4m3fn) -> Tensor:
    """Multiply a (M, K), converted to `dtype`, by b (N, K).T in e4m3, with a scale per row of both.

    a, b: bf16, contiguous; K and N must be multiples of 16. Returns (M, N) in bf16.
    """
    a_fp8, a_scale = quantize_fp8(a, dtype)
    b_fp8, b_scale = quantize_fp8(b, torch.float8_e4m3fn)
    return torch._scaled_mm(
        a_fp8,
        b_fp8.t(),
        scale_a=a_scale,
        scale_b=b_scale.t(),
        out_dtype=a.dtype,
        # The tensor cores' own accumulation, with fewer bits than fp32
        use_fast_accum=dtype == torch.float8_e4m3fn,
    )


class Fp8Linear(torch.autograd.Function):
    """Compute x (..., K) @ w (N, K).T and the gradient of x in float8, that of w in bf16.

    One scale per token and per row of w, as in torchao's rowwise_with_gw_hp: there is no state, and
    each scale can be computed together with its row.
    """

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return fp8_matmul(x.flatten(0, -2), w).unflatten(0, x.shape[:-1])

    @staticmethod
    def backward(ctx, grad):
        x, w = ctx.saved_tensors
        grad = grad.flatten(0, -2).contiguous()
        # e5m2 reaches further down: e4m3 would lose probabilities below 4e-6 in the head's gradient
        dx = fp8_matmul(grad, w.t().contiguous(), torch.float8_e5m2)
        return dx.view_as(x), grad.T @ x.flatten(0, -2)


def fp8_linear(x: Tensor, w: Tensor) -> Tensor:
    """x (..., K) @ w (N, K).T in float8. A function, as PyTorch 2.11 does not trace Fp8Linear."""
    return Fp8Linear.apply(x, w)


def apply_fp8(module: nn.Module) -> None:
    """Use float8 in the linear layers of a module, those that have a `matmul` like model.Linear.

    Layers with sizes that 16 does not divide stay as they are.
    """
    for layer in module.modules():
        if hasattr(layer, "matmul") and all(size % 16 == 0 for size in layer.weight.shape):
            layer.matmul = fp8_linear
