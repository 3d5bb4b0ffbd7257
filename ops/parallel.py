"""DDP and FSDP2: wrapping, conversion of shards to full tensors, updates of whole matrices."""

import contextlib
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel


def is_dtensor(tensor: Tensor) -> bool:
    """True if FSDP has sharded a tensor. Checks an attribute: importing DTensor takes a second."""
    return hasattr(tensor, "full_tensor")


def to_local(tensor: Tensor) -> Tensor:
    """Return this rank's shard of an FSDP parameter or gradient; any other tensor as it is."""
    return tensor.to_local() if is_dtensor(tensor) else tensor


def to_full(tensor: Tensor) -> Tensor:
    """Gather a sharded tensor, which every rank must ask for; return any other tensor as it is."""
    return tensor.full_tensor() if is_dtensor(tensor) else tensor


def grad_values(param: Tensor) -> Tensor:
    """The gradient of a parameter; of a sparse one the values, which have the same norm.

    A sparse gradient is coalesced first: rows that occur in it twice are added up.
    """
    if param.grad.is_sparse:
        param.grad = param.grad.coalesce()
        return param.grad.values()
    return param.grad


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
    bucket_cap_mb: int,
    grad_comm: torch.dtype,
    find_unused_parameters: bool = False,
) -> DistributedDataParallel:
    """Wrap the model in DDP, which averages gradients over all ranks, reduced in dtype `grad_comm`.

    find_unused_parameters: for a model in which a rank may skip a layer or an expert.
    """
    wrapped = DistributedDataParallel(
        model,
        gradient_as_bucket_view=True,
        bucket_cap_mb=bucket_cap_mb,
        find_unused_parameters=find_unused_parameters,
    )
    if grad_comm == torch.bfloat16:
        from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook

        # Under a lambda's name: DDP would check for NCCL's bf16 support even with gloo
        wrapped.register_comm_hook(None, lambda group, bucket: bf16_compress_hook(group, bucket))
    return wrapped


def apply_fsdp(
    model: nn.Module,
    device: torch.device,
    dtype: torch.dtype,
    shard_size: int,
    grad_comm: torch.dtype,
) -> None:
    """Shard each block by itself, then the rest, with FSDP2.

    Every `shard_size` consecutive ranks hold one copy of the model; several such groups are
    replicas (hybrid sharding). Blocks compute in `dtype`; gradients are reduced in `grad_comm`.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    replicas = dist.get_world_size() // shard_size
    if replicas == 1:
        mesh = init_device_mesh(device.type, (shard_size,))
    else:
        names = ("replicate", "shard")
        mesh = init_device_mesh(device.type, (replicas, shard_size), mesh_dim_names=names)
    policy = MixedPrecisionPolicy(
        param_dtype=dtype, reduce_dtype=grad_comm, cast_forward_inputs=False
    )
    blocks = dict.fromkeys(model.blocks)  # a block may stand in several places
    for module in (*blocks, model):
        fully_shard(module, mesh=mesh, mp_policy=policy)


def unshard(model: nn.Module) -> None:
    """Gather the parameters outside of blocks, which FSDP itself does in forward() only."""
    if hasattr(model, "unshard"):
        model.unshard()


def reshard(model: nn.Module) -> None:
    """Free these parameters, which FSDP also keeps after a forward pass without a backward."""
    if hasattr(model, "reshard"):
        model.reshard()


def sync_gradients(model: nn.Module, is_last: bool):
    """Return the context of a micro-step: replicas all-reduce gradients only after the last one."""
    if isinstance(model, DistributedDataParallel) and not is_last:
        return model.no_sync()
    # FSDP reduces shards of gradients after every micro-step
    if hasattr(model, "set_requires_all_reduce"):
        model.set_requires_all_reduce(is_last)
    return contextlib.nullcontext()


@torch.no_grad()
def swap_weights(model: nn.Module, weights: dict[str, Tensor]) -> None:
    """Exchange parameters, by name, with these tensors, in place."""
    for name, other in weights.items():
        weight, other = to_local(model.get_parameter(name)), to_local(other)
        before = weight.clone()
        weight.copy_(other)
        other.copy_(before)


def sum_over_ranks(x: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """Sum x over all ranks, in place, and return it."""
    if dist.is_initialized():
        dist.all_reduce(x, group=group)
    return x


# -------------------------------------------------------------------------------------------------
# The optimizer's view of ranks and offload
#
# FSDP, two ranks and matrices A B C D. A0: the rows of A that rank 0 holds; A1: those of rank 1
#
#     rank 0:  A0 B0 C0 D0    gather_whole_matrices    A B    exchange_updates    A0 B0 C0 D0
#     rank 1:  A1 B1 C1 D1    --------------------->   C D    --------------->    A1 B1 C1 D1
#
# DDP: my_share is A B on rank 0 and C D on rank 1; exchange_updates gives both the updates of all.
# HSDP: my_share is A B in one replica, C D in the other; each then gathers its own as with FSDP.

# Elements that a rank updates at once; Newton-Schulz takes several times their memory
MAX_STACK_NUMEL = 2**26


def equal_shapes(params: list[Tensor]) -> Iterator[list[Tensor]]:
    """Yield the parameters by shape, in lists that memory suffices for."""
    by_shape: dict[torch.Size, list[Tensor]] = {}
    for p in params:
        by_shape.setdefault(p.shape, []).append(p)

    # on_whole_matrices divides a list among all ranks
    n_ranks = dist.get_world_size() if dist.is_initialized() else 1
    for same_shape in by_shape.values():
        at_once = n_ranks * max(1, MAX_STACK_NUMEL // max(1, same_shape[0].numel()))
        for first in range(0, len(same_shape), at_once):
            yield same_shape[first : first + at_once]


@contextlib.contextmanager
def state_tensors(optimizer: torch.optim.Optimizer, name: str, params: list[Tensor]):
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


def on_whole_matrices(
    function: Callable[[Tensor], Tensor],
    rows: list[Tensor],
    params: list[Tensor],
    dtype: torch.dtype,
) -> list[Tensor]:
    """Apply a function to whole matrices, each on one rank; return this rank's rows of the results.

    params: parameters of one shape. rows: what this rank has of a matrix like each: the rows of its
    shard, or all. function: takes and returns a stack of matrices, (M, rows, cols) in `dtype`. M is
    0 where there are more ranks than matrices. The results have the dtype of `rows`.
    """
    share = rows[my_share(params)]
    stack = torch.stack(share) if share else rows[0].new_empty((0, *rows[0].shape))
    matrices = gather_whole_matrices(stack.to(dtype), params[0])
    updates = exchange_updates(function(matrices), params)
    return list(updates.to(rows[0].dtype))


def shard_group(param: Tensor) -> dist.ProcessGroup | None:
    """Return the ranks that together hold one copy of a parameter; None if it is not sharded."""
    return param.device_mesh.get_all_groups()[-1] if is_dtensor(param) else None


def replica_group(param: Tensor) -> dist.ProcessGroup | None:
    """Return the ranks that hold the same shard of a parameter, or all of it; None if alone."""
    if not is_dtensor(param):
        return dist.group.WORLD  # None without process groups
    mesh = param.device_mesh
    return mesh.get_group("replicate") if mesh.ndim == 2 else None


def chunk_sizes(n: int, n_ranks: int) -> list[int]:
    """Return how many of n rows each rank holds, divided as by Tensor.chunk; some may hold none."""
    most = -(-n // n_ranks)  # rounded up
    return [max(0, min(most, n - rank * most)) for rank in range(n_ranks)]


def my_share(params: list[Tensor]) -> slice:
    """Return which parameters of one shape this rank updates, alone or with its shard group."""
    replicas = replica_group(params[0])
    if replicas is None:
        return slice(0, len(params))
    most = chunk_sizes(len(params), replicas.size())[0]
    first = replicas.rank() * most
    return slice(first, first + most)


def gather_whole_matrices(x: Tensor, param: Tensor) -> Tensor:
    """Exchange this rank's rows of matrices for the whole ones that it is to orthogonalize.

    x: (n, its rows, cols), of matrices like `param`. Returns (its part of n, rows, cols), or x if
    parameters are not sharded.
    """
    group = shard_group(param)
    if group is None:
        return x
    return shard_dim_alltoall(x, len(param), group)


def exchange_updates(updates: Tensor, params: list[Tensor]) -> Tensor:
    """Undo gather_whole_matrices: exchange whole updates for this rank's rows of all updates.

    updates: (n, rows, cols), in the order of `params`. Returns (len(params), its rows, cols).
    """
    mine = my_share(params)
    group = shard_group(params[0])
    if group is not None:
        by_row = updates.transpose(0, 1)
        by_row = shard_dim_alltoall(by_row, len(params[mine]), group)
        updates = by_row.transpose(0, 1).contiguous()

    replicas = replica_group(params[0])
    if replicas is None:
        return updates
    # All replicas send as many as the first, if need be some that nobody reads
    n_each = mine.stop - mine.start
    gathered = updates.new_empty((replicas.size() * n_each, *updates.shape[1:]))
    gathered[mine][: len(updates)] = updates
    # It had a different name before PyTorch 2.13
    all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    all_gather(gathered, gathered[mine], group=replicas)
    return gathered[: len(params)]


def shard_dim_alltoall(x: Tensor, size: int, group: dist.ProcessGroup) -> Tensor:
    """Shard the first dimension instead of the second: one all-to-all within the group.

    x: (n, this rank's part of `size`, cols). Returns (this rank's part of n, size, cols).
    """
    counts = chunk_sizes(len(x), group.size())
    parts = chunk_sizes(size, group.size())
    n = counts[group.rank()]
    sent = [count * x.size(1) for count in counts]
    received = [n * part for part in parts]
    flat = x.new_empty((n * size, x.size(2)))
    dist.all_to_all_single(flat, x.flatten(0, 1), received, sent, group=group)
    pieces = [t.unflatten(0, (n, part)) for t, part in zip(flat.split(received), parts)]
    return torch.cat(pieces, dim=1)
