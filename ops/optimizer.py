"""Parts of model.py's optimizer: batches of matrices, where state lies, several ranks, Adam."""

from __future__ import annotations

import contextlib
import functools
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim.adamw import adamw

from ops.parallel import get_world_size, is_dtensor, to_local

if TYPE_CHECKING:
    from model import Optimizer

# Elements that a rank updates at once; Newton-Schulz takes several times their memory
MAX_STACK_NUMEL = 2**26


def batches_by_shape(params: list[Tensor]) -> Iterator[list[Tensor]]:
    """Yield the parameters in lists of one shape, so that they can be stacked within memory."""
    by_shape: defaultdict[torch.Size, list[Tensor]] = defaultdict(list)
    for p in params:
        by_shape[p.shape].append(p)
    for same_shape in by_shape.values():
        # on_whole_matrices divides a list among all ranks
        at_once = get_world_size() * max(1, MAX_STACK_NUMEL // max(1, same_shape[0].numel()))
        for first in range(0, len(same_shape), at_once):
            yield same_shape[first : first + at_once]


@contextlib.contextmanager
def state_tensors(optimizer: Optimizer, name: str, params: list[Tensor]) -> Iterator[list[Tensor]]:
    """Yield the optimizer's state of this name, a tensor per parameter; zeros at first.

    Each has the rows of this rank's shard. With optimizer.offload they are stored in pinned CPU
    memory; copies on the device are yielded, and written back at exit.
    """
    stored = []
    for p in params:
        state = optimizer.state[p]
        if name not in state:
            state[name] = torch.zeros_like(p)
        # Under FSDP, zeros_like and load_state_dict make DTensors: keep this rank's shard
        state[name] = to_local(state[name])
        # load_state_dict moves the state to the device: take it back
        if optimizer.offload and state[name].is_cuda:
            state[name] = state[name].cpu().pin_memory()
        stored.append(state[name])

    on_device = [t.to(p.device, non_blocking=True) for t, p in zip(stored, params)]
    yield on_device
    for t, used in zip(stored, on_device):
        if used is not t:
            t.copy_(used, non_blocking=True)


# --------------------------------------------------------------------------------------------------
# Several ranks


def on_whole_matrices(
    function: Callable[[Tensor], Tensor],
    rows: list[Tensor] | tuple[Tensor, ...],
    params: list[Tensor],
    dtype: torch.dtype,
) -> list[Tensor]:
    """Apply a function to whole matrices, each on one rank; return this rank's rows of the results.

    params: parameters of one shape. rows: what this rank has of a matrix like each: the rows of its
    shard, or all. function: takes and returns a stack of matrices, (M, rows, cols) in `dtype`. M is
    0 where there are more ranks than matrices. The results have the dtype of `rows`.

    FSDP, two ranks and matrices A B C D. A0: the rows of A that rank 0 holds; A1: those of rank 1

        rank 0:  A0 B0 C0 D0    redistribute    A B    function, redistribute    A0 B0 C0 D0
        rank 1:  A1 B1 C1 D1    ----------->    C D    --------------------->    A1 B1 C1 D1

    DDP: both ranks hold A B C D at first, and get the results of all.
    """
    stack = torch.stack(rows).to(dtype)
    if get_world_size() == 1:
        return list(function(stack).to(rows[0].dtype))

    # As DTensors whose first dimension is that of the stack. HSDP: its mesh has two dimensions
    from torch.distributed.tensor import DTensor, Replicate, Shard

    param = params[0]
    if is_dtensor(param):
        mesh = param.device_mesh
        placements = [Shard(1) if p.is_shard() else p for p in param.placements]
    else:
        mesh = mesh_of_all_ranks(param.device.type, dist.group.WORLD)
        placements = [Replicate()]
    shape = torch.Size((len(stack), *param.shape))
    stride = torch.empty(shape, device="meta").stride()
    layout: dict[str, Any] = dict(shape=shape, stride=stride, run_check=False)
    by_matrix = [Shard(0)] * mesh.ndim

    whole = DTensor.from_local(stack, mesh, placements, **layout).redistribute(placements=by_matrix)
    results = DTensor.from_local(function(whole.to_local()), mesh, by_matrix, **layout)
    results = results.redistribute(placements=placements)
    return list(results.to_local().to(rows[0].dtype))


@functools.cache
def mesh_of_all_ranks(device_type: str, group: dist.ProcessGroup) -> dist.device_mesh.DeviceMesh:
    """Make the one-dimensional mesh of a process group, once: it takes half a millisecond."""
    return dist.device_mesh.init_device_mesh(device_type, (group.size(),))


# --------------------------------------------------------------------------------------------------
# Adam


def adam_(optimizer: Optimizer, group: dict, params: list[Tensor]) -> None:
    """Update parameters of one shape by Adam with decoupled weight decay, by PyTorch's kernel."""
    weights = [to_local(p) for p in params]
    grads = [to_local(p.grad) for p in params]
    beta1, beta2 = group["betas"]

    # The fused kernel takes each parameter's number of updates as a tensor on the device, and
    # load_state_dict makes it one on the CPU
    steps = []
    for p in params:
        state = optimizer.state[p]
        state["step"] = state.get("step", torch.zeros(())).to(p.device)
        steps.append(state["step"])

    with (
        state_tensors(optimizer, "exp_avg", params) as exp_avgs,
        state_tensors(optimizer, "exp_avg_sq", params) as exp_avg_sqs,
    ):
        adamw(
            weights,
            grads,
            exp_avgs,
            exp_avg_sqs,
            max_exp_avg_sqs=[],
            state_steps=steps,
            fused=True,
            amsgrad=False,
            maximize=False,
            lr=group["lr"],
            beta1=beta1,
            beta2=beta2,
            weight_decay=group["weight_decay"],
            eps=optimizer.eps,
        )
