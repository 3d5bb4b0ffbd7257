"""DDP and FSDP2: wrapping, conversion between this rank's shards and full tensors, and what Muon's ranks exchange."""

import contextlib

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel


def to_local(tensor: Tensor) -> Tensor:
    """This rank's shard of an FSDP parameter or gradient; any other tensor as it is."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def to_full(tensor: Tensor) -> Tensor:
    """The whole of a sharded tensor, which every rank must ask for; any other tensor as it is."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def shard_like(full: Tensor, param: Tensor) -> Tensor:
    """A full tensor on the device of a parameter, and sharded like it if it has its shape."""
    full = full.to(param.device)
    if not hasattr(param, "to_local") or full.shape != param.shape:
        return full
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(full, param.device_mesh, param.placements, src_data_rank=None)


def state_to_full(state: Tensor, param: Tensor) -> Tensor:
    """A whole tensor of optimizer state, from a DTensor, a plain shard of the parameter's, or a whole one."""
    if hasattr(param, "to_local") and not hasattr(state, "to_local") and state.dim():
        from torch.distributed.tensor import DTensor

        state = state.to(param.device)
        where = param.device_mesh, param.placements
        state = DTensor.from_local(
            state, *where, run_check=False, shape=param.shape, stride=param.stride()
        )
    return to_full(state)


# ---------------------------------------------------------------------------------------------------------------------
# Wrapping


def apply_ddp(
    model: nn.Module,
    bucket_cap_mb: int,
    grad_comm: torch.dtype,
    find_unused_parameters: bool = False,
) -> DistributedDataParallel:
    """The model in DDP: gradients are averaged over all ranks, and reduced in `grad_comm`.

    find_unused_parameters: for a model in which a rank may skip a layer or an expert.
    """
    wrapped = DistributedDataParallel(
        model,
        gradient_as_bucket_view=True,
        bucket_cap_mb=bucket_cap_mb,
        find_unused_parameters=find_unused_parameters,
    )
    if len(model.state_dict()) == len(dict(model.named_parameters(remove_duplicate=False))):
        wrapped.broadcast_buffers = (
            False  # they are tables, the same on all ranks; as an argument it warns
        )
    if grad_comm == torch.bfloat16:
        from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook

        # under another name: DDP would check for NCCL's bf16 support even with gloo
        wrapped.register_comm_hook(None, lambda group, bucket: bf16_compress_hook(group, bucket))
    return wrapped


def apply_fsdp(
    model: nn.Module,
    device: torch.device,
    dtype: torch.dtype,
    shard_size: int,
    grad_comm: torch.dtype,
) -> None:
    """FSDP2: shards each block by itself, then the rest.

    Every `shard_size` consecutive ranks hold one copy of the model; several such groups are replicas (hybrid
    sharding). Blocks compute in `dtype`, and gradients are reduced in `grad_comm`.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import (
        MixedPrecisionPolicy,
        fully_shard,
        register_fsdp_forward_method,
    )

    replicas = dist.get_world_size() // shard_size
    shape, names = (
        ((replicas, shard_size), ("replicate", "shard"))
        if replicas > 1
        else ((shard_size,), ("shard",))
    )
    mesh = init_device_mesh(device.type, shape, mesh_dim_names=names)
    policy = MixedPrecisionPolicy(
        param_dtype=dtype, reduce_dtype=grad_comm, cast_forward_inputs=False
    )
    for module in (*dict.fromkeys(model.blocks), model):  # a block may stand in several places
        fully_shard(module, mesh=mesh, mp_policy=policy)
    register_fsdp_forward_method(model, "next_logits")


def reshard(model: nn.Module) -> None:
    """Reshard FSDP's root, which still holds full parameters after a forward pass without a backward one."""
    if hasattr(model, "reshard"):
        model.reshard()


@contextlib.contextmanager
def swap_in_eval_weights(model: nn.Module, others: dict[str, Tensor]):
    """Yields the model in eval mode, with the values of `others` for the parameters it names, sharded like them."""
    model.eval()
    swap_weights(model, others)
    try:
        yield model
    finally:
        reshard(model)
        swap_weights(model, others)
        model.train()


@torch.no_grad()
def swap_weights(model: nn.Module, others: dict[str, Tensor]) -> None:
    """Exchange the values of parameters with those of `others`, by name."""
    for name, p in model.named_parameters():
        if name in others:
            ours, theirs = to_local(p), to_local(others[name])
            kept = ours.clone()
            ours.copy_(theirs)
            theirs.copy_(kept)


def maybe_no_sync(model: nn.Module, last: bool):
    """Context for a micro-step's forward and backward: replicas all-reduce gradients on the last micro-step only."""
    if hasattr(
        model, "set_requires_all_reduce"
    ):  # FSDP, which reduces shards of gradients in every micro-step
        model.set_requires_all_reduce(last)
    elif hasattr(model, "no_sync") and not last:
        return model.no_sync()
    return contextlib.nullcontext()


def sum_over_ranks(x: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """The sum of all ranks' tensors; x itself is overwritten."""
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.all_reduce(x, group=group)
    return x


# ---------------------------------------------------------------------------------------------------------------------
# What Muon's ranks exchange: each matrix is orthogonalized by one rank


@contextlib.contextmanager
def state_on_device(device: torch.device, *kept: list[Tensor]):
    """Yields these lists of tensors on the device; those stored elsewhere are copied, and written back at exit."""
    on_device = [[t.to(device, non_blocking=True) for t in tensors] for tensors in kept]
    yield on_device
    for stored_list, used_list in zip(kept, on_device):
        for stored, used in zip(stored_list, used_list):
            if used is not stored:  # with --offload: write back
                stored.copy_(used, non_blocking=True)


def rank_groups(param: Tensor) -> tuple[dist.ProcessGroup | None, dist.ProcessGroup | None]:
    """A parameter's shard group, and the group of ranks with the same shard; None for this rank alone."""
    mesh = getattr(param, "device_mesh", None)
    if mesh is None:
        return (
            None,
            dist.group.WORLD if dist.is_initialized() and dist.get_world_size() > 1 else None,
        )
    groups = mesh.get_all_groups()
    return groups[-1], groups[0] if mesh.ndim == 2 and mesh.size(0) > 1 else None


def chunk_sizes(n: int, world_size: int) -> list[int]:
    """How many of n rows each rank holds when Tensor.chunk cuts them: ceil(n / world_size), then the rest, then 0."""
    most = -(-n // world_size)
    return [max(0, min(most, n - rank * most)) for rank in range(world_size)]


def my_share(params: list[Tensor]) -> slice:
    """Which of the parameters, all of one shape, this rank updates, alone or together with its shard group."""
    replicas = rank_groups(params[0])[1]
    n_parts, part = (replicas.size(), replicas.rank()) if replicas else (1, 0)
    most = chunk_sizes(len(params), n_parts)[0]
    return slice(part * most, (part + 1) * most)


def gather_whole_matrices(x: Tensor, param: Tensor) -> Tensor:
    """From this rank's rows of n matrices, (n, its rows, cols), to the whole matrices that it is to orthogonalize.

    x: of the parameters of my_share, which are like `param`. One all-to-all within the shard group, where matrix i
    goes to rank i // ceil(n / world_size); x itself where parameters are whole.
    """
    shards = rank_groups(param)[0]
    if not shards:
        return x
    n, _, cols = x.shape
    rank, world_size = shards.rank(), shards.size()
    heights, owned = chunk_sizes(len(param), world_size), chunk_sizes(n, world_size)
    received = [owned[rank] * height * cols for height in heights]
    flat = x.new_empty(sum(received))
    dist.all_to_all_single(
        flat, x.flatten(), received, [k * heights[rank] * cols for k in owned], group=shards
    )
    pieces = [t.view(owned[rank], height, cols) for t, height in zip(flat.split(received), heights)]
    return torch.cat(pieces, dim=1)


def exchange_updates(updates: Tensor, params: list[Tensor]) -> Tensor:
    """The inverse, for all ranks: from the updates that this rank made, (n, rows, cols), to its rows of every one's.

    Returns (len(params), its rows, cols), by an all-to-all within the shard group and an all-gather over replicas.
    """
    shards, replicas = rank_groups(params[0])
    mine = my_share(params)
    if shards:
        n, cols = len(params[mine]), updates.size(2)
        rank, world_size = shards.rank(), shards.size()
        heights, owned = chunk_sizes(len(params[0]), world_size), chunk_sizes(n, world_size)
        sent = [owned[rank] * height * cols for height in heights]
        received = [k * heights[rank] * cols for k in owned]
        flat = updates.new_empty(sum(received))
        pieces = torch.cat([piece.flatten() for piece in updates.split(heights, dim=1)])
        dist.all_to_all_single(flat, pieces, received, sent, group=shards)
        updates = flat.view(n, heights[rank], cols)
    if not replicas:
        return updates
    everyones = updates.new_empty(
        (replicas.size() * (mine.stop - mine.start), *to_local(params[0]).shape)
    )
    everyones[mine][: len(updates)] = updates
    all_gather = (
        getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    )  # before 2.13
    all_gather(everyones, everyones[mine], group=replicas)
    return everyones[: len(params)]
