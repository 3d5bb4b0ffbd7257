"""The loss in chunks of tokens, so that the logits of a whole batch never exist."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ops.cross_entropy import gradient_scale


def loss_only(function: Callable, x: Tensor, targets: Tensor) -> Tensor:
    """Compute function(x, targets): what is compiled where no gradients are needed."""
    return function(x, targets)


def loss_and_gradients(
    function: Callable, x: Tensor, targets: Tensor, factor: Tensor, params: Sequence[Tensor]
) -> tuple[Tensor | None, ...]:
    """Compute the loss function(x, targets), and the gradients of factor * loss: of x and params.

    x: a leaf that requires a gradient. The gradient is None for a parameter that the loss does not
    use. Compiled, it is one function: one kernel reads the logits and writes their gradient.
    """
    with torch.enable_grad():
        loss = function(x, targets)
        grads = torch.autograd.grad(loss, (x, *params), factor.to(loss.dtype), allow_unused=True)
    return loss.detach(), *grads


class LossFunctions(NamedTuple):
    """How chunked_loss calls a loss: the functions above, or both compiled."""

    loss_only: Callable = loss_only
    loss_and_gradients: Callable = loss_and_gradients


def chunked_loss(
    function: Callable,
    params: Sequence[Tensor],
    x: Tensor,
    targets: Tensor,
    *,
    chunk: int,
    compiled: LossFunctions | None = None,
) -> Tensor:
    """Compute the mean of function(x, targets) over targets that are not -1: fp32, 0 for none.

    function: the mean loss of any rows of x (N, D) against their targets, int64 (N,). It depends on
    x and `params` only. chunk: rows at once; 0 is all. The gradients of a chunk are computed while
    its logits exist, so that nothing is computed twice (Liger Kernel, Hsu et al. 2024).
    compiled: the functions above, compiled.
    """
    how = compiled or LossFunctions()
    if chunk and torch.is_grad_enabled():
        trained = [p for p in params if p.requires_grad]
        return ChunkedLoss.apply(function, how.loss_and_gradients, chunk, x, targets, *trained)

    # By plain autograd
    chunk = chunk or len(x)
    total = torch.zeros((), device=x.device)
    for part, part_targets in zip(x.split(chunk), targets.split(chunk)):
        n = (part_targets >= 0).sum()
        loss = how.loss_only(function, part, part_targets).float()
        total = total + torch.where(n > 0, loss * n, 0)
    return total / (targets >= 0).sum().clamp(min=1)


class ChunkedLoss(torch.autograd.Function):
    """Until backward it stores the gradient of x, in x's dtype, and those of params, in fp32."""

    @staticmethod
    def forward(
        ctx: Any,
        function: Callable,
        loss_and_gradients: Callable,
        chunk: int,
        x: Tensor,
        targets: Tensor,
        *params: Tensor,
    ) -> Tensor:
        scale = gradient_scale(x)
        dx = torch.empty_like(x)
        grads: list[Tensor | None] = [None] * len(params)
        total = torch.zeros((), device=x.device)
        for part, part_targets, dx_part in zip(
            x.split(chunk), targets.split(chunk), dx.split(chunk)
        ):
            n = (part_targets >= 0).sum()
            # Of the sum, not the mean, which would underflow in 16 bits
            part = part.detach().requires_grad_()
            loss, dx_new, *new = loss_and_gradients(function, part, part_targets, n * scale, params)
            total += torch.where(n > 0, loss * n, 0)
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
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        dx, n, *grads = ctx.saved_tensors
        grad = grad.float() / n
        for i, dtype in enumerate(ctx.dtypes):
            if grads[i] is not None:
                grads[i] = (grads[i] * grad).to(dtype)
        # grad.view(1): a tensor without dimensions would be rounded to dx's dtype first
        scaled = torch.mul(dx, grad.view(1), out=torch.empty_like(dx))
        return None, None, None, scaled, None, *grads
