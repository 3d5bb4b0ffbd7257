"""The loss in chunks of tokens, so that the logits of a whole batch never exist."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor


def chunked_loss(
    function: Callable, params: list[Tensor], x: Tensor, targets: Tensor, chunk: int
) -> Tensor:
    """The mean of function(x, targets) over targets that are not -1: a scalar in fp32, 0 for none.

    function: the mean loss of any rows of x (N, D) against their targets, int64 (N,). It depends on
    x and `params` alone. chunk: rows at once; 0 is all. The gradients of a chunk are computed while
    its logits exist, so that nothing is computed twice (Liger Kernel, Hsu et al. 2024).
    """
    if chunk and torch.is_grad_enabled():
        trained = [p for p in params if p.requires_grad]
        return ChunkedLoss.apply(function, chunk, x, targets, *trained)

    # By plain autograd
    chunk = chunk or len(x)
    total = 0.0
    for part, part_targets in zip(x.split(chunk), targets.split(chunk)):
        n = (part_targets >= 0).sum()
        total += torch.where(n > 0, function(part, part_targets).float() * n, 0)
    return total / (targets >= 0).sum().clamp(min=1)


class ChunkedLoss(torch.autograd.Function):
    """Until backward it stores the gradient of x, in x's dtype, and those of params, in fp32."""

    @staticmethod
    def forward(ctx, function, chunk, x, targets, *params):
        scale = loss_scale(x)
        dx = torch.empty_like(x)
        grads = [None] * len(params)
        total = torch.zeros((), device=x.device)
        for part, part_targets, dx_part in zip(
            x.split(chunk), targets.split(chunk), dx.split(chunk)
        ):
            n = (part_targets >= 0).sum()
            part = part.detach().requires_grad_()
            with torch.enable_grad():
                loss = function(part, part_targets)
            total += torch.where(n > 0, loss.detach() * n, 0)

            # Take the gradient of the sum, not the mean, which would underflow in 16 bits
            of_the_sum = (n * scale).to(loss.dtype)
            dx_new, *new = torch.autograd.grad(loss, (part, *params), of_the_sum, allow_unused=True)
            dx_part.copy_(dx_new)
            for i in range(len(params)):
                if new[i] is None:  # the loss does not use this parameter
                    continue
                if grads[i] is None:
                    grads[i] = new[i].float()
                else:
                    grads[i].add_(new[i])

        n_targets = (targets >= 0).sum().clamp(min=1)
        ctx.dtypes = [p.dtype for p in params]
        ctx.save_for_backward(dx, n_targets * scale, *grads)
        return total / n_targets

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        dx, n, *grads = ctx.saved_tensors
        grad = grad.float() / n
        for i, dtype in enumerate(ctx.dtypes):
            if grads[i] is not None:
                grads[i] = (grads[i] * grad).to(dtype)
        return None, None, (dx.float() * grad).to(dx.dtype), None, *grads


def loss_scale(x: Tensor) -> float:
    """What gradients are multiplied by: in fp16, those of small probabilities would underflow."""
    return 64.0 if x.dtype == torch.float16 else 1.0


def softcap_cross_entropy(
    logits: Tensor, targets: Tensor, softcap: float, kernel: Callable
) -> Tensor:
    """The mean cross entropy of soft-capped logits over targets that are not -1: a scalar in fp32.

    logits: (N, vocab_size), of any floating dtype; softcap * tanh(logits / softcap) is applied in
    fp32; 0 disables it. targets: int64 (N,). kernel: fused_softcap_cross_entropy, or its compiled
    form. In training it makes the gradient together with the loss, which takes a third less time
    on a CPU, head included (8,192 tokens of 1,024, bf16, 2 cores of an EPYC: 34 ms instead of 47,
    compiled 30 instead of 46).
    """
    if logits.requires_grad and 0 < softcap < 35:
        return FusedSoftcapCrossEntropy.apply(logits, targets, softcap, kernel)
    logits = logits.float()
    if softcap:
        logits = softcap * torch.tanh(logits / softcap)
    return F.cross_entropy(logits, targets, ignore_index=-1)


class FusedSoftcapCrossEntropy(torch.autograd.Function):
    """The mean loss, and the gradient that the kernel has made together with it."""

    @staticmethod
    def forward(ctx, logits, targets, softcap, kernel):
        n = (targets >= 0).sum().clamp(min=1)
        scale = loss_scale(logits)
        loss, d_logits = kernel(logits, targets, softcap, scale)
        ctx.save_for_backward(d_logits, n * scale)
        return loss / n

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        d_logits, n = ctx.saved_tensors
        factor = grad / n
        # A chunk of a loss asks for the gradient of the sum, so that there is nothing to multiply
        if not torch.compiler.is_compiling() and factor.is_cpu and factor == 1:
            return d_logits, None, None, None
        return d_logits * factor, None, None, None


def fused_softcap_cross_entropy(
    logits: Tensor, targets: Tensor, softcap: float, scale: float
) -> tuple[Tensor, Tensor]:
    """The summed cross entropy of soft-capped logits, fp32, and its gradient times `scale`.

    With s = sigmoid(2 l / c), the soft-cap is z = c tanh(l / c) = 2 c s - c. So softmax(z) is
    softmax(2 c s), and dz/dl = 4 s (1 - s).

    logits: (N, vocab_size); the gradient has their dtype. targets: int64 (N,), -1 is ignored.
    softcap: above 0, and below 35, or probabilities underflow.
    """
    counted = (targets >= 0)[:, None]
    target = targets.clamp(min=0)[:, None]
    s = (logits.float() * (2 / softcap)).sigmoid_()
    probs = (s * (2 * softcap)).softmax(-1)
    loss = -torch.where(counted, probs.gather(1, target).log(), 0).sum()

    # dz = probs, minus 1 at the target
    if torch.compiler.is_compiling():  # fuses with the operations around it
        column = torch.arange(logits.size(1), device=logits.device)
        dz = torch.where(column == target, probs - 1, probs)
    else:
        dz = probs.scatter_add_(1, target, probs.new_full(target.shape, -1.0))
    dl = torch.ops.aten.sigmoid_backward(dz, s)  # dz * s * (1 - s)
    dl.mul_(torch.where(counted, 4 * scale, 0.0))
    return loss, dl.to(logits.dtype)
