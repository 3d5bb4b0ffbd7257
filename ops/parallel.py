"""DDP and FSDP2: gradients, buffers, and conversion between this rank's shards and full tensors."""

import contextlib
from collections import Counter

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ops.init import ModelError, persistent_buffers


def to_local(tensor: Tensor) -> Tensor:
    """This rank's shard of an FSDP parameter or gradient; any other tensor as it is."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def rank_groups(param: Tensor) -> tuple[dist.ProcessGroup | None, dist.ProcessGroup | None]:
    """A parameter's shard group, and the group of ranks with the same shard; None for this rank alone."""
    mesh = getattr(param, "device_mesh", None)
    if mesh is None:
        return None, dist.group.WORLD if dist.is_initialized() and dist.get_world_size() > 1 else None
    groups = mesh.get_all_groups()
    return groups[-1], groups[0] if mesh.ndim == 2 and mesh.size(0) > 1 else None


def chunk_sizes(n: int, world_size: int) -> list[int]:
    """How many of n rows each rank holds when Tensor.chunk cuts them: ceil(n / world_size), then the rest, then 0."""
    most = -(-n // world_size)
    return [max(0, min(most, n - rank * most)) for rank in range(world_size)]


@torch.no_grad()
def copy_from_full_tensor_(param: Tensor, full: Tensor, part: Tensor | None = None) -> None:
    """Copy a full tensor into a parameter, or into `part` of its size: under FSDP, the rows that this rank holds."""
    part = to_local(param) if part is None else part
    if hasattr(param, "to_local") and full.dim():
        mesh = param.device_mesh
        full = full.split(chunk_sizes(len(full), mesh.size(-1)))[mesh.get_local_rank(mesh.ndim - 1)]
    part.copy_(full)


@torch.no_grad()
def full_tensor_on_rank0(param: Tensor, part: Tensor) -> Tensor | None:
    """A copy in host memory of the full tensor whose shard on this rank is `part`, sharded like the parameter.

    None except on rank 0, which receives one shard at a time from its group; every rank must call it.
    """
    shards = rank_groups(param)[0] if part.dim() else None
    members = dist.get_process_group_ranks(shards) if shards else [0]
    rank = dist.get_rank() if dist.is_initialized() else 0
    part = part.detach()
    if members[0] == 0 and rank in members[1:] and len(part):  # other groups hold the same
        dist.send(part.to(param.device).contiguous(), 0, group=shards)
    if rank:
        return None
    full = torch.empty(param.shape if shards else part.shape, dtype=part.dtype, device="cpu")
    for member, rows in zip(members, full.split(chunk_sizes(len(full), len(members))) if shards else [full]):
        shard = part if member == 0 else rows
        if member and len(rows):
            shard = rows if param.device.type == "cpu" else torch.empty_like(rows, device=param.device)
            dist.recv(shard, member, group=shards)
        if shard is not rows:
            rows.copy_(shard)
    return full


def apply_ddp(model: nn.Module, bucket_cap_mb: int, grad_comm: torch.dtype) -> DistributedDataParallel:
    """The model in DDP: gradients are averaged over all ranks, and reduced in `grad_comm`."""
    # Layers that a rank skips, and experts without tokens, get no gradient in a step.
    wrapped = DistributedDataParallel(
        model, gradient_as_bucket_view=True, bucket_cap_mb=bucket_cap_mb, find_unused_parameters=True
    )
    wrapped.synchronized = {p for p in model.parameters() if p.requires_grad}
    wrapped.broadcast_buffers = False  # sync_buffers does that; as an argument it warns from 2.13 on
    if grad_comm == torch.bfloat16:
        from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook

        # under another name: DDP would check for NCCL's bf16 support even with gloo
        wrapped.register_comm_hook(None, lambda group, bucket: bf16_compress_hook(group, bucket))
    return wrapped


def apply_fsdp(
    model: nn.Module, device: torch.device, dtype: torch.dtype, shard_size: int, grad_comm: torch.dtype
) -> None:
    """FSDP2: shards the blocks first, then the rest, from the meta device; the weights must be filled in afterwards.

    Every `shard_size` consecutive ranks hold one copy of the model; several such groups are replicas (hybrid
    sharding). Gradients are reduced in `grad_comm`. Raises ModelError for a parameter that cannot be sharded.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method

    for name, param in model.named_parameters():
        if param.dim() == 0:
            raise ModelError(f"parameter {name} is a scalar, which FSDP cannot shard; give it the shape (1,)")
        if param._backward_hooks or param._post_accumulate_grad_hooks or vars(param):
            raise ModelError(f"parameter {name} has hooks or attributes, which FSDP drops; use --parallel ddp")
    blocks = list(dict.fromkeys(model.blocks))
    places = Counter(p for block in blocks for p in dict.fromkeys(block.parameters()))
    groups = [[*block.parameters()] for block in blocks] + [[p for p in model.parameters() if p not in places]]
    if any(len({p.dtype for p in group}) > 1 for group in groups):
        raise ModelError("FSDP shards each block's parameters, and all others, together: give them one dtype each")
    for name, param in model.named_parameters():
        if places[param] > 1:
            raise ModelError(
                f"parameter {name} is in several blocks, each of which FSDP shards by itself; use one block in all "
                "their places, or --parallel ddp"
            )
    for prefix, module in model.named_modules():
        for name in (name for name, value in vars(module).items() if isinstance(value, Tensor)):
            place = f"{prefix}.{name}".lstrip(".")
            raise ModelError(f"{place} is a tensor that FSDP knows nothing of; make it a buffer, by register_buffer")
    replicas = dist.get_world_size() // shard_size
    shape, names = ((replicas, shard_size), ("replicate", "shard")) if replicas > 1 else ((shard_size,), ("shard",))
    mesh = init_device_mesh(device.type, shape, mesh_dim_names=names)
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=grad_comm, cast_forward_inputs=False)
    for module in (*blocks, model):  # a block may stand in several places
        fully_shard(module, mesh=mesh, mp_policy=policy)
    register_fsdp_forward_method(model, "next_logits")
    model.to_empty(device=device)  # swaps what is in the parameters, so that tied ones stay tied


def sync_buffers(model: nn.Module) -> None:
    """Synchronize buffers that forward passes have written: floats are averaged over ranks, others are rank 0's.

    DDP would broadcast rank 0's before every forward pass, and FSDP none. Equal values stay as they are, to the bit.
    """
    for buffer in persistent_buffers(model).values():
        first = buffer.clone()
        dist.broadcast(first, 0)
        if buffer.is_floating_point():
            apart = buffer - first
            dist.all_reduce(apart)
            first += apart / dist.get_world_size()
        buffer.copy_(first)


@contextlib.contextmanager
def eval_mode(model: nn.Module, others: dict[str, Tensor]):
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


def clone_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Copies of the persistent buffers, by name, for restore_buffers."""
    return {name: buffer.clone() for name, buffer in persistent_buffers(model).items()}


@torch.no_grad()
def restore_buffers(model: nn.Module, before: dict[str, Tensor], skip: Tensor) -> None:
    """Restore the buffers from `before` if skip, bool (), is true; then synchronize them over all ranks."""
    for name, buffer in persistent_buffers(model).items():
        torch.where(skip, before[name], buffer, out=buffer)
    if dist.is_initialized() and dist.get_world_size() > 1:
        sync_buffers(model)


def sum_over_ranks(x: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """The sum of all ranks' tensors; x itself is overwritten."""
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.all_reduce(x, group=group)
    return x


def maybe_no_sync(model: nn.Module, last: bool):
    """Context for a micro-step's forward and backward: replicas all-reduce gradients on the last micro-step only."""
    if hasattr(model, "set_requires_all_reduce"):  # FSDP, which reduces shards of gradients in every micro-step
        model.set_requires_all_reduce(last)
    elif hasattr(model, "no_sync") and not last:
        return model.no_sync()
    return contextlib.nullcontext()


def reshard(model: nn.Module) -> None:
    """Reshard FSDP's root, which still holds full parameters after a forward pass without a backward one."""
    if hasattr(model, "reshard"):
        model.reshard()
