"""The norm, activation, soft-cap and shift of model.py.

Each is a plain formula. Where PyTorch's own functions would make more passes over memory, as on a
CPU in eager training, an autograd.Function below computes the same.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

if TYPE_CHECKING:
    from model import AttnContext


def norm(x: Tensor) -> Tensor:
    """Apply RMSNorm to the last dimension, without a gain: F.rms_norm(x, (x.size(-1),))."""
    if x.is_cpu and trains_eagerly(x):
        return CpuRMSNorm.apply(x)
    return F.rms_norm(x, (x.size(-1),))


def leaky_relu_squared(x: Tensor) -> Tensor:
    """Compute F.leaky_relu(x, 0.5).square(): x^2 above zero, x^2 / 4 below.

    Squared ReLU (So et al. 2021), with a slope below zero.
    """
    if x.is_cpu and trains_eagerly(x):
        return CpuLeakyReLUSquared.apply(x)
    return F.leaky_relu(x, 0.5).square()


def softcap(logits: Tensor, cap: float) -> Tensor:
    """Soft-cap logits to (-cap, cap): cap * tanh(logits / cap) (Gemma 2, 2024); 0 disables."""
    return cap * torch.tanh(logits / cap) if cap else logits


def shift_right(x: Tensor) -> Tensor:
    """Shift x (B, T, ...) right by one position, with zeros in the first."""
    # Per dimension, from the final one: how much is added before and after. -1 drops a position
    padding = [0, 0] * (x.dim() - 2) + [1, -1]
    return F.pad(x, padding)


def previous_token(x: Tensor, ctx: AttnContext, name: str) -> Tensor:
    """Return the previous token's x (B, T, ...); zeros where a sequence or document starts.

    name: of this x in the layer's KV cache, which keeps the newest; each call in a layer needs its
    own.
    """
    before = shift_right(x) if ctx.kv_cache is None else ctx.kv_cache.shift(name, x)
    if ctx.doc_starts is not None:
        is_start = ctx.doc_starts.view(*ctx.doc_starts.shape, *[1] * (x.dim() - 2))
        before = before.masked_fill(is_start, 0)
    return before


def trains_eagerly(x: Tensor) -> bool:
    """Return True if x needs a gradient from PyTorch's own autograd: the compiler does better."""
    return x.requires_grad and not torch.compiler.is_compiling()


# --------------------------------------------------------------------------------------------------
# In fewer passes


class CpuRMSNorm(torch.autograd.Function):
    """Normalize x (..., D) by its RMS; backward takes half the passes of PyTorch's own.

    Backward is PyTorch's kernel for LayerNorm with a mean of 0, which computes in fp32. The kernel
    also subtracts the mean of the gradient, which is therefore added again.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        wide = torch.promote_types(x.dtype, torch.float32)
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=wide)
        mean_square = norm.square_().div_(x.size(-1))
        scale = mean_square.add_(torch.finfo(wide).eps).rsqrt_()
        ctx.save_for_backward(x, scale)
        return x * scale.to(x.dtype)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        x, scale = ctx.saved_tensors
        gain = scale.new_ones(x.size(-1))
        zero = torch.zeros_like(scale)  # the mean of x
        centered, _, _ = torch.ops.aten.native_layer_norm_backward(
            grad, x, gain.shape, zero, scale, gain, None, [True, False, False]
        )
        mean = grad.mean(-1, keepdim=True, dtype=scale.dtype)
        return centered.add_((mean * scale).to(x.dtype))


class CpuLeakyReLUSquared(torch.autograd.Function):
    """Square the leaky ReLU of x; PyTorch's own functions make two more passes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        half_slope = F.leaky_relu(x, 0.25)  # x above zero, x / 4 below: half the derivative
        ctx.save_for_backward(half_slope)
        return half_slope * x

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (half_slope,) = ctx.saved_tensors
        return (grad * half_slope).mul_(2)
