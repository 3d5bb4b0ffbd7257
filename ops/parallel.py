"""DDP and FSDP2: wrapping a model, shards and whole tensors."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, TypeGuard

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

    from model import GPT


def is_dtensor(tensor: Tensor) -> TypeGuard[DTensor]:
    """True if FSDP has sharded a tensor. Checks an attribute: importing DTensor takes a second."""
    return hasattr(tensor, "full_tensor")


def to_local(tensor: Tensor) -> Tensor:
    """Return this rank's shard of an FSDP parameter or gradient; any other tensor as it is."""
    return tensor.to_local() if is_dtensor(tensor) else tensor


def to_full(tensor: Tensor) -> Tensor:
    """Gather a sharded tensor, which every rank must ask for; return any other tensor as it is."""
    return tensor.full_tensor() if is_dtensor(tensor) else tensor


def shard_like(full: Tensor, param: Tensor) -> Tensor:
    """Move a full tensor to the device of `param`; shard it like that if it has as many rows."""
    full = full.to(param.device)
    if not is_dtensor(param) or full.dim() == 0 or len(full) != len(param):
        return full
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(full, param.device_mesh, param.placements, src_data_rank=None)


def state_to_full(state: Tensor, param: Tensor) -> Tensor:
    """Gather a tensor of optimizer state.

    state: a DTensor, a full tensor, or a plain one with the rows of this rank's shard of `param`,
    for example Adam's moments, or one number per row.
    """
    if is_dtensor(param) and not is_dtensor(state) and state.dim():
        from torch.distributed.tensor import DTensor

        shape = torch.Size([len(param), *state.shape[1:]])
        state = DTensor.from_local(
            state.to(param.device),
            param.device_mesh,
            param.placements,
            shape=shape,
            stride=torch.empty(shape, device="meta").stride(),
        )
    return to_full(state)


# -------------------------------------------------------------------------------------------------
# Wrapping


def apply_ddp(
    model: nn.Module,
    grad_dtype: torch.dtype,
    bucket_cap_mb: int = 25,
    find_unused_parameters: bool = False,
) -> DistributedDataParallel:
    """Wrap the model in DDP, which averages gradients over all ranks, reduced in `grad_dtype`.

    find_unused_parameters: for a model in which a rank may skip a layer or an expert.
    """
    wrapped = DistributedDataParallel(
        model,
        gradient_as_bucket_view=True,
        bucket_cap_mb=bucket_cap_mb,
        find_unused_parameters=find_unused_parameters,
    )
    if grad_dtype == torch.bfloat16:
        from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook

        # Under a lambda's name: DDP would check for NCCL's bf16 support even with gloo
        wrapped.register_comm_hook(None, lambda group, bucket: bf16_compress_hook(group, bucket))
    return wrapped


def apply_fsdp(model: GPT, dtype: torch.dtype, grad_dtype: torch.dtype, shard_size: int) -> None:
    """Shard each block of a GPT by itself, then the rest, with FSDP2.

    dtype: of blocks. grad_dtype: of the reduction of gradients. shard_size: so many consecutive
    ranks hold one copy of the model; several such groups are replicas (HSDP).
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    replicas = dist.get_world_size() // shard_size
    if replicas == 1:
        mesh = init_device_mesh(model.device.type, (shard_size,))
    else:
        names = ("replicate", "shard")
        mesh = init_device_mesh(model.device.type, (replicas, shard_size), mesh_dim_names=names)
    policy = MixedPrecisionPolicy(
        param_dtype=dtype, reduce_dtype=grad_dtype, cast_forward_inputs=False
    )
    blocks = dict.fromkeys(model.blocks)  # a block may stand in several places
    for module in (*blocks, model):
        fully_shard(module, mesh=mesh, mp_policy=policy)


def unshard(model: GPT) -> None:
    """Gather the parameters outside of blocks, which FSDP itself does in forward() only."""
    if hasattr(model, "unshard"):
        model.unshard()


def reshard(model: nn.Module) -> None:
    """Free these parameters, which FSDP also keeps after a forward pass without a backward."""
    if hasattr(model, "reshard"):
        model.reshard()


def sync_gradients(model: nn.Module, is_last: bool) -> contextlib.AbstractContextManager:
    """Return the context of a micro-step: replicas all-reduce gradients only after the last one."""
    if isinstance(model, DistributedDataParallel) and not is_last:
        return model.no_sync()
    # FSDP reduces shards of gradients after every micro-step
    if hasattr(model, "set_requires_all_reduce"):
        model.set_requires_all_reduce(is_last)
    return contextlib.nullcontext()


@contextlib.contextmanager
def swapped_weights(model: GPT, weights: dict[str, Tensor]) -> Iterator[None]:
    """Context in which parameters, by name, have these values instead of their own."""
    swap_weights(model, weights)
    try:
        yield
    finally:
        reshard(model)  # FSDP keeps whole weights after a forward pass without a backward pass
        swap_weights(model, weights)


@torch.no_grad()
def swap_weights(model: GPT, weights: dict[str, Tensor]) -> None:
    """Exchange parameters, by name, with these tensors, in place."""
    for name, other in weights.items():
        weight, other = to_local(model.get_parameter(name)), to_local(other)
        before = weight.clone()
        weight.copy_(other)
        other.copy_(before)


def get_rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def get_world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def sum_over_ranks(x: Tensor) -> Tensor:
    """Sum x over all ranks, in place, and return it; for a tensor on the CPU, waits for no GPU."""
    if dist.is_initialized():
        dist.all_reduce(x)
    return x
