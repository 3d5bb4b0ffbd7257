"""Cross entropy and its gradient in one kernel for NVIDIA GPUs, in Triton.

Inductor's kernel for it takes 57 instructions an element, this one 25 (PyTorch 2.11, for an H100).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor


class TritonCrossEntropy(torch.autograd.Function):
    """bounded_cross_entropy of ops/functional.py for logits in bf16, to be compiled.

    The gradient takes the place of the logits, as in Liger Kernel (Hsu et al. 2024).
    """

    @staticmethod
    def forward(ctx, logits, targets, cap):
        d = logits.clone()  # compiled, this is no copy, unless something else reads the logits
        losses = torch.empty(len(d), device=d.device)
        loss_and_gradient_(d, losses, targets, cap)
        n = (targets >= 0).sum().clamp(min=1)
        ctx.save_for_backward(d, n)
        return losses.sum() / n

    @staticmethod
    def backward(ctx, grad):
        d, n = ctx.saved_tensors
        scale_(d, grad / n)
        return d, None, None


# Operators, which the compiler does not look into


@torch.library.custom_op("gpt::loss_and_gradient_", mutates_args=["logits", "losses"])
def loss_and_gradient_(logits: Tensor, losses: Tensor, targets: Tensor, cap: float) -> None:
    """Write the losses, fp32 (N,), and the gradient of their sum in place of the logits (N, V).

    Both are 0 where a target is -1.
    """
    # 32 warps: two rows on an H100's multiprocessor, so that the L2 cache holds all rows being read
    sizes = dict(N=logits.size(1), CAP=cap, BLOCK=8192, num_warps=32)
    loss_kernel[(len(logits),)](logits, losses, targets, **sizes)


@torch.library.custom_op("gpt::scale_", mutates_args=["x"])
def scale_(x: Tensor, factor: Tensor) -> None:
    """Multiply x (N, V) by a factor, fp32 (), in place. 1, as for a chunk, takes no time."""
    scale_kernel[(len(x),)](x, factor, N=x.size(1), BLOCK=8192)


# --------------------------------------------------------------------------------------------------
# Kernels


@triton.jit
def load_tanh(logits, mask, CAP: tl.constexpr):
    """tanh(logits / CAP) in one instruction, with an error of 2^-11: bf16 rounds logits by more."""
    x = tl.load(logits, mask).to(tl.float32) * (1 / CAP)
    asm: tl.constexpr = "tanh.approx.f32 $0, $1;"
    return tl.inline_asm_elementwise(asm, "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def loss_kernel(logits, losses, targets, N: tl.constexpr, CAP: tl.constexpr, BLOCK: tl.constexpr):
    """A row of N logits. In base 2, soft-capped logits are A t, with t = tanh(logit / CAP)."""
    LOG2: tl.constexpr = 0.6931471805599453
    A: tl.constexpr = CAP / LOG2
    row = tl.program_id(0)
    logits += row.to(tl.int64) * N
    target = tl.load(targets + row).to(tl.int32)
    target_t = load_tanh(logits + tl.maximum(target, 0), None, CAP)

    # They are bounded by A, so the largest need not be known
    sums = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, N, BLOCK):
        i = start + tl.arange(0, BLOCK)
        t = load_tanh(logits + i, i < N, CAP)
        sums += tl.where(i < N, tl.exp2(A * t - A), 0.0)
    log_sum = tl.log2(tl.sum(sums)) + A
    tl.store(losses + row, tl.where(target >= 0, LOG2 * (log_sum - A * target_t), 0.0))

    # The gradient of each logit is (probability - is_target) (1 - t^2). Without a target: zeros
    log_sum = tl.where(target >= 0, log_sum, float("inf"))
    for start in range(0, N, BLOCK):
        i = start + tl.arange(0, BLOCK)
        t = load_tanh(logits + i, i < N, CAP)
        p = tl.exp2(A * t - log_sum)
        p = tl.where(i == target, p - 1, p)
        tl.store(logits + i, p - p * t * t, i < N)


@triton.jit
def scale_kernel(x, factor, N: tl.constexpr, BLOCK: tl.constexpr):
    """A row of N elements."""
    factor = tl.load(factor)
    if factor != 1:
        x += tl.program_id(0).to(tl.int64) * N
        for start in range(0, N, BLOCK):
            i = start + tl.arange(0, BLOCK)
            scaled = tl.load(x + i, i < N).to(tl.float32) * factor
            tl.store(x + i, scaled, i < N)
