"""Matmuls of linear layers in float8."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from model import GPT


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
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return fp8_matmul(x.flatten(0, -2), w).unflatten(0, x.shape[:-1])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, w = ctx.saved_tensors
        grad = grad.flatten(0, -2).contiguous()
        # e5m2 reaches further down: e4m3 would lose probabilities below 4e-6 in the head's gradient
        dx = fp8_matmul(grad, w.t().contiguous(), torch.float8_e5m2)
        return dx.view_as(x), grad.T @ x.flatten(0, -2)


def fp8_linear(x: Tensor, w: Tensor) -> Tensor:
    """Compute x (..., K) @ w (N, K).T in float8. PyTorch 2.11 traces this, but not Fp8Linear."""
    return Fp8Linear.apply(x, w)


def apply_fp8(model: GPT) -> None:
    """Use float8 in the head and MLPs of a GPT: in layers that have a `matmul`, like model.Linear.

    Layers with sizes that 16 does not divide stay as they are, and so does attention.
    """
    layers: list[Any] = [model.head]
    for block in model.blocks:
        for name, module in block.named_children():
            if name != "attn":
                layers += module.modules()
    for layer in layers:
        if hasattr(layer, "matmul") and all(size % 16 == 0 for size in layer.weight.shape):
            layer.matmul = fp8_linear
