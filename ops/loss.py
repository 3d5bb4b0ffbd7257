"""The loss in chunks of tokens, so that the logits of a whole batch never exist."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value


def chunked_loss(
    function: Callable, params: list[Tensor], x: Tensor, targets: Tensor, chunk: int
) -> Tensor:
    """The mean of function(x, targets) over targets that are not -1: a scalar in fp32, 0 for none.

    function: the mean loss of any rows of x (N, D) against their targets, int64 (N,). It depends on
    x and `params` alone. chunk: rows at once; 0 is all. The gradients of a chunk are computed while
    its logits exist, so that nothing is computed twice (Liger Kernel, Hsu et al. 2024).
    """
    if chunk and torch.is_grad_enabled():
        if isinstance(function, CompiledLoss):
            params = function.trained_params().values()
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
            # Of the sum, not the mean, which would underflow in 16 bits
            loss, dx_new, *new = gradients(function, part, part_targets, n * scale, params)
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
    def backward(ctx, grad):
        dx, n, *grads = ctx.saved_tensors
        grad = grad.float() / n
        for i, dtype in enumerate(ctx.dtypes):
            if grads[i] is not None:
                grads[i] = (grads[i] * grad).to(dtype)
        # grad.view(1): a tensor without dimensions would be rounded to dx's dtype first
        scaled = torch.mul(dx, grad.view(1), out=torch.empty_like(dx))
        return None, None, scaled, None, *grads


def loss_scale(x: Tensor) -> float:
    """Factor for gradients: in fp16, those of small probabilities would underflow without it."""
    return 64.0 if x.dtype == torch.float16 else 1.0


def gradients(
    function: Callable, x: Tensor, targets: Tensor, factor: Tensor, params: tuple[Tensor, ...]
) -> tuple[Tensor, ...]:
    """The loss function(x, targets), and the gradients of factor * loss: of x and of each param.

    None for a param that the loss does not use.
    """
    if isinstance(function, CompiledLoss):
        return function.gradients(x, targets, factor, params)
    x = x.detach().requires_grad_()
    with torch.enable_grad():
        loss = function(x, targets)
    found = torch.autograd.grad(loss, (x, *params), factor.to(loss.dtype), allow_unused=True)
    return loss.detach(), *found


# --------------------------------------------------------------------------------------------------
# Compiled


class TokenLoss(nn.Module):
    """A GPT's token_loss as the forward pass of a module, which functional_call takes."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        return type(self.model).token_loss(self.model, x, targets)


class CompiledLoss:
    """A GPT's token_loss, compiled with its gradients as one function.

    One kernel then reads the logits and writes their gradient. model.py's token_loss is what gets
    compiled, edited or not.
    """

    def __init__(self, model: nn.Module, options: dict, compile_forward: bool):
        """options: Inductor's. compile_forward: also without gradients, for evaluation."""
        how = dict(fullgraph=True, dynamic=False, options=options)
        self.module = TokenLoss(model)
        self.evaluated = TokenLoss(model)
        if compile_forward:
            self.evaluated.compile(**how)
        self.compiled_gradients = torch.compile(traceable_gradients, **how)

        # The parameters that the loss uses (frozen ones too) are those that get a gradient
        params = {}
        for name, p in self.module.named_parameters():
            params[name] = p.detach().requires_grad_()
        x = torch.zeros((32, model.cfg.n_embd), dtype=model.compute_dtype, device=model.device)
        targets = torch.zeros((32,), dtype=torch.int64, device=model.device)
        loss = functional_call(self.module, params, (x, targets))
        found = torch.autograd.grad(loss, list(params.values()), allow_unused=True)
        self.names = [name for name, grad in zip(params, found) if grad is not None]

    def __call__(self, x: Tensor, targets: Tensor) -> Tensor:
        return self.evaluated(x, targets)

    def trained_params(self) -> dict[str, Tensor]:
        """Those that it uses, by name, without the frozen ones."""
        params = {name: self.module.get_parameter(name) for name in self.names}
        return {name: p for name, p in params.items() if p.requires_grad}

    def gradients(self, x: Tensor, targets: Tensor, factor: Tensor, params: tuple[Tensor, ...]):
        """As the function above."""
        by_name = dict(zip(self.trained_params(), params))
        return self.compiled_gradients(self.module, x, targets, factor, by_name)


def traceable_gradients(
    module: nn.Module, x: Tensor, targets: Tensor, factor: Tensor, params: dict[str, Tensor]
) -> tuple[Tensor, ...]:
    """As `gradients`, for the compiler, which does not trace torch.autograd.grad."""

    def scaled_loss(x: Tensor, params: dict[str, Tensor]):
        loss = functional_call(module, params, (x, targets))
        return loss.float() * factor, loss

    compute = grad_and_value(scaled_loss, argnums=(0, 1), has_aux=True)
    (dx, grads), (_, loss) = compute(x, params)
    return loss, dx, *grads.values()
