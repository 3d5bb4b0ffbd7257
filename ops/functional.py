"""The norm, activation, soft-cap, cross entropy and shift of model.py.

Each is a plain formula. Where PyTorch's own functions would make more passes over memory, as on a
CPU in training, an autograd.Function below computes the same.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from ops.loss import loss_scale


def norm(x: Tensor) -> Tensor:
    """RMSNorm over the last dimension, without a gain: F.rms_norm(x, (x.size(-1),))."""
    if x.is_cpu and trains_eagerly(x):
        return CpuRMSNorm.apply(x)
    return F.rms_norm(x, (x.size(-1),))


def leaky_relu_squared(x: Tensor) -> Tensor:
    """F.leaky_relu(x, 0.5).square(): x^2 above zero, x^2 / 4 below.

    Squared ReLU (So et al. 2021), with a slope below zero.
    """
    if x.is_cpu and trains_eagerly(x):
        return CpuLeakyReLUSquared.apply(x)
    return F.leaky_relu(x, 0.5).square()


def softcap(logits: Tensor, cap: float) -> Tensor:
    """Soft-cap logits to (-cap, cap): cap * tanh(logits / cap) (Gemma 2, 2024); 0 disables."""
    return cap * torch.tanh(logits / cap) if cap else logits


def cross_entropy(logits: Tensor, targets: Tensor, cap: float) -> Tensor:
    """Mean cross entropy of the soft-capped logits, in nats: a scalar in fp32.

    F.cross_entropy(softcap(logits.float(), cap), targets, ignore_index=-1). logits: (N,
    vocab_size), in the compute dtype. targets: int64 (N,); those of -1 are left out.
    """
    if 0 < cap < 35:  # beyond that, probabilities would underflow
        if torch.compiler.is_compiling():
            if logits.requires_grad and logits.dtype == torch.bfloat16 and is_nvidia(logits):
                from ops.triton_loss import TritonCrossEntropy  # Triton is for GPUs alone

                return TritonCrossEntropy.apply(logits, targets, cap)
            return bounded_cross_entropy(logits, targets, cap)
        if trains_eagerly(logits):
            return FusedCrossEntropy.apply(logits, targets, cap)
    return F.cross_entropy(softcap(logits.float(), cap), targets, ignore_index=-1)


def shift_right(x: Tensor) -> Tensor:
    """Shift x (B, T, ...) right by one position, with zeros in the first."""
    # Per dimension, from the last: how much is added before and after. -1 drops the last position
    padding = [0, 0] * (x.dim() - 2) + [1, -1]
    return F.pad(x, padding)


def is_nvidia(x: Tensor) -> bool:
    """True if x is on an NVIDIA GPU; AMD's are "cuda" as well."""
    return x.is_cuda and torch.version.cuda is not None


def trains_eagerly(x: Tensor) -> bool:
    """True if x needs a gradient from PyTorch's own autograd.

    The compiler does better, and torch.func does not transform these autograd.Functions.
    """
    is_traced = torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active()
    return x.requires_grad and not is_traced


# --------------------------------------------------------------------------------------------------
# In fewer passes


def refuse_second_derivative() -> None:
    """Raise RuntimeError in a backward pass with create_graph=True."""
    if torch.is_grad_enabled():
        raise RuntimeError(
            "norm and leaky_relu_squared of ops/functional.py have no second derivative: in "
            "model.py, call F.rms_norm and F.leaky_relu in their place"
        )


class CpuRMSNorm(torch.autograd.Function):
    """Normalize x (..., D) by its RMS; backward takes half the passes of PyTorch's own.

    It needs the output and a scale per row, in x's dtype.
    """

    @staticmethod
    def forward(ctx, x):
        wide = torch.promote_types(x.dtype, torch.float32)
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=wide)
        mean_square = norm.square_().div_(x.size(-1))
        scale = mean_square.add_(torch.finfo(wide).eps).rsqrt_().to(x.dtype)
        y = x * scale
        ctx.save_for_backward(y, scale)
        return y

    @staticmethod
    def backward(ctx, grad):
        refuse_second_derivative()
        y, scale = ctx.saved_tensors
        projection = (grad * y).mean(-1, keepdim=True)
        return torch.addcmul(grad, y, projection, value=-1).mul_(scale)


class CpuLeakyReLUSquared(torch.autograd.Function):
    """Square the leaky ReLU of x; PyTorch's own functions make two more passes."""

    @staticmethod
    def forward(ctx, x):
        half_slope = F.leaky_relu(x, 0.25)  # x above zero, x / 4 below: half the derivative
        ctx.save_for_backward(half_slope)
        return half_slope * x

    @staticmethod
    def backward(ctx, grad):
        refuse_second_derivative()
        (half_slope,) = ctx.saved_tensors
        return (grad * half_slope).mul_(2)


class FusedCrossEntropy(torch.autograd.Function):
    """The mean cross entropy of soft-capped logits, and its gradient, made together with it.

    With s = sigmoid(2 l / c), the soft-cap is z = c tanh(l / c) = 2 c s - c. So softmax(z) is
    softmax(2 c s), and dz/dl = 4 s (1 - s). Head and loss take a third less time than by PyTorch's
    own functions (8,192 tokens of 1,024, bf16, 2 cores of an EPYC: 34 ms instead of 47).
    """

    @staticmethod
    def forward(ctx, logits, targets, cap):
        counted = (targets >= 0)[:, None]
        target = targets.clamp(min=0)[:, None]
        n = counted.sum().clamp(min=1)
        scale = loss_scale(logits)

        s = (logits.float() * (2 / cap)).sigmoid_()
        probs = (s * (2 * cap)).softmax(-1)
        loss = -torch.where(counted, probs.gather(1, target).log(), 0).sum()
        dz = probs.scatter_add_(1, target, probs.new_full(target.shape, -1.0))
        dl = torch.ops.aten.sigmoid_backward(dz, s)  # dz * s * (1 - s)
        dl.mul_(torch.where(counted, 4 * scale, 0.0))
        ctx.save_for_backward(dl.to(logits.dtype), n * scale)
        return loss / n

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        dl, n = ctx.saved_tensors
        factor = grad / n
        # A chunk of a loss asks for the gradient of the sum, so that there is nothing to multiply
        if factor.is_cpu and factor == 1:
            return dl, None, None
        return dl * factor, None, None


def bounded_cross_entropy(logits: Tensor, targets: Tensor, cap: float) -> Tensor:
    """The mean cross entropy of soft-capped logits, for the compiler: a single kernel, few steps.

    Soft-capped logits need no maximum subtracted: with that of cap, they lie between -2 cap and 0.
    In base 2, and with sigmoid, 57 instructions an element instead of 143 (PyTorch 2.11, H100).
    """
    # (softcap(logits) - cap) / log(2), because c tanh(l / c) - c = -2 c sigmoid(-2 l / c)
    z = (-2 * cap / math.log(2)) * torch.sigmoid(logits.float() * (-2 / cap))
    log_sum = z.exp2().sum(-1).log2()
    # A masked sum: the gradient of gather would be scattered into a tensor of zeros
    is_target = torch.arange(z.size(1), device=z.device) == targets[:, None]
    target_z = torch.where(is_target, z, 0.0).sum(-1)
    counted = targets >= 0
    losses = torch.where(counted, log_sum - target_z, 0.0)
    return math.log(2) * losses.sum() / counted.sum().clamp(min=1)
