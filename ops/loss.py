"""The loss in chunks of tokens, so that the logits of a whole batch never exist, and one loss's gradient by hand."""

from collections.abc import Callable

import torch
from torch import Tensor


def chunked_loss(
    function: Callable, params: list[Tensor], x: Tensor, targets: Tensor, chunk: int
) -> Tensor:
    """The mean of function(x, targets) over targets that are not -1, fp32 (); 0 if there are none.

    function: the mean loss of any rows of x (N, D) against their targets (N,), int64, a function of x and `params`
    alone. chunk: rows at once, whose gradients are computed while their logits exist, as in Liger Kernel (Hsu et al.
    2024), so that nothing is computed twice; 0 = all rows, by plain autograd.
    """
    if chunk and torch.is_grad_enabled():
        return ChunkedLoss.apply(
            function, chunk, x, targets, *(p for p in params if p.requires_grad)
        )
    total, n_targets = 0.0, (targets >= 0).sum()
    for part, part_targets in zip(x.split(chunk or len(x)), targets.split(chunk or len(x))):
        n = (part_targets >= 0).sum()
        total += torch.where(n > 0, function(part, part_targets).float() * n, 0)
    return total / n_targets.clamp(min=1)


class ChunkedLoss(torch.autograd.Function):
    """Until backward it stores the gradient of x, in x's dtype, and those of params, in fp32."""

    @staticmethod
    def forward(ctx, function, chunk, x, targets, *params):
        scale = 64.0 if x.dtype == torch.float16 else 1.0  # small probabilities underflow in fp16
        dx, grads, total = (
            torch.empty_like(x),
            [None] * len(params),
            torch.zeros((), device=x.device),
        )
        for part, part_targets, d_part in zip(
            x.split(chunk), targets.split(chunk), dx.split(chunk)
        ):
            n = (part_targets >= 0).sum()
            part = part.detach().requires_grad_()
            with torch.enable_grad():
                loss = function(part, part_targets)
            # Of the sum, each token's gradient is within 1: that of the mean would underflow in 16 bits
            found = torch.autograd.grad(
                loss, (part, *params), (n * scale).to(loss.dtype), allow_unused=True
            )
            d_part.copy_(found[0])
            for i, new in enumerate(found[1:]):
                if new is None:  # the loss does not use this parameter
                    continue
                if grads[i] is None:
                    grads[i] = new.float()
                else:
                    grads[i].add_(new)
            total += torch.where(n > 0, loss.detach() * n, 0)
        n_targets = (targets >= 0).sum().clamp(min=1)
        ctx.dtypes = [p.dtype for p in params]
        ctx.save_for_backward(dx, n_targets * scale, *grads)
        return total / n_targets

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        dx, n, *grads = ctx.saved_tensors
        grad = grad.float() / n
        params = [g if g is None else (g * grad).to(dtype) for g, dtype in zip(grads, ctx.dtypes)]
        return None, None, (dx.float() * grad).to(dx.dtype), None, *params


def fused_softcap_cross_entropy(
    logits: Tensor, targets: Tensor, softcap: float, scale: float
) -> tuple[Tensor, Tensor]:
    """Summed cross entropy, fp32 (), of softcap * tanh(logits / softcap), and its gradient times `scale`.

    logits: (N, V), of any floating dtype, which the gradient gets; targets: int64 (N,), -1 is ignored; softcap: above 0
    and below 35, or probabilities underflow.
    """
    target, counted = targets.clamp(min=0)[:, None], (targets >= 0)[:, None]
    half = (logits.float() * (2 / softcap)).sigmoid_()  # tanh(x) = 2 sigmoid(2 x) - 1
    grad = (half * (2 * softcap)).softmax(-1)
    loss = -torch.where(counted, grad.gather(1, target).log(), 0).sum()
    if torch.compiler.is_compiling():  # to be one pass with what stands around it
        grad = torch.where(
            torch.arange(logits.size(1), device=logits.device) == target, grad - 1, grad
        )
    else:
        grad.scatter_add_(1, target, grad.new_full(target.shape, -1.0))
    grad = torch.ops.aten.sigmoid_backward(grad, half).mul_(torch.where(counted, 4 * scale, 0.0))
    return loss, grad.to(logits.dtype)


class SoftcapCrossEntropy(torch.autograd.Function):
    """The mean of what a kernel like fused_softcap_cross_entropy sums, with the gradient that it makes in the forward pass."""

    @staticmethod
    def forward(ctx, logits, targets, softcap, kernel):
        n = (targets >= 0).sum().clamp(min=1)
        scale = (
            64.0 if logits.dtype == torch.float16 else 1.0
        )  # small probabilities underflow in fp16
        loss, d_logits = kernel(logits, targets, softcap, scale)
        ctx.save_for_backward(d_logits, n * scale)
        return loss / n

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        d_logits, n = ctx.saved_tensors
        factor = grad / n
        is_one = (
            not torch.compiler.is_compiling() and factor.is_cpu and factor == 1
        )  # as in chunks: a pass less
        return d_logits if is_one else d_logits * factor, None, None, None
