"""Matmuls of linear layers in special cases: float8, and compiled matrix-vector products."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def linear(x: Tensor, w: Tensor) -> Tensor:
    """x (..., K) @ w (N, K).T, by sums of products where a single row is compiled."""
    if is_matvec(x):
        return matvec(x, w).to(x.dtype)
    return F.linear(x, w)


def is_matvec(x: Tensor) -> bool:
    """Whether to compile x (..., K) @ w.T as a sum of products, which fuses with neighbouring operations."""
    return torch.compiler.is_dynamo_compiling() and x.numel() == x.size(-1)


def matvec(x: Tensor, w: Tensor) -> Tensor:
    """x (..., K) of a single row @ w (N, K).T in fp32, written to be compiled: (..., N)."""
    row, parts = (
        x.float().flatten(),
        w.chunk(4 if x.is_cpu else 1),
    )  # a core accumulates four sums as fast as one
    return torch.cat([(row * part.float()).sum(-1) for part in parts]).view(*x.shape[:-1], len(w))


def quantize_fp8(x: Tensor, dtype: torch.dtype = torch.float8_e4m3fn) -> tuple[Tensor, Tensor]:
    """x (M, K) in float8, each row scaled to its range, and the fp32 scales that undo it, (M, 1)."""
    scale = x.abs().amax(-1, keepdim=True).float().clamp(min=1e-30) / torch.finfo(dtype).max
    return (x / scale).to(dtype), scale  # divided in fp32, the scale's dtype


def fp8_matmul(a: Tensor, b: Tensor, dtype: torch.dtype = torch.float8_e4m3fn) -> Tensor:
    """a (M, K) in this dtype @ b (N, K).T in e4m3, a scale for each row of both, in a's own dtype, which is bf16.

    Both contiguous; K and N must be multiples of 16.
    """
    (a8, a_scale), (b8, b_scale) = quantize_fp8(a, dtype), quantize_fp8(b)
    fast = (
        dtype == torch.float8_e4m3fn
    )  # the tensor cores' own accumulation, with fewer bits than fp32
    return torch._scaled_mm(
        a8, b8.t(), a_scale, b_scale.t(), out_dtype=a.dtype, use_fast_accum=fast
    )


class Fp8Linear(torch.autograd.Function):
    """x (..., K) @ w (N, K).T and the gradient of x in float8; the gradient of w stays in x's dtype, which is bf16.

    One scale per token and per row of w, as in torchao's rowwise_with_gw_hp: there is no state, and each scale can be
    computed together with its row.
    """

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return fp8_matmul(x.flatten(0, -2), w).view(*x.shape[:-1], w.size(0))

    @staticmethod
    def backward(ctx, grad):
        x, w = ctx.saved_tensors
        flat = grad.flatten(0, -2).contiguous()
        # e5m2 reaches further down: of the head's gradient, e4m3 would lose probabilities below 4e-6
        dx = fp8_matmul(flat, w.t().contiguous(), torch.float8_e5m2)
        return dx.view_as(x), flat.T @ x.flatten(0, -2)


def apply_fp8(module: nn.Module) -> None:
    """Compute the matmuls of all linear layers in a module in float8, by layers that have a `matmul`, as model.Linear.

    Layers with sizes that 16 does not divide stay as they are.
    """
    for layer in module.modules():
        if hasattr(layer, "matmul") and not any(size % 16 for size in layer.weight.shape):
            layer.matmul = Fp8Linear.apply
