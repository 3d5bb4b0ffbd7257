"""Activation checkpointing, and activations offloaded to host memory: put around blocks from outside."""

import functools

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)


def selective_ac_policy(ctx, op, *args, **kwargs) -> CheckpointPolicy:
    """Selective activation checkpointing: keep the outputs of matmuls and attention, recompute everything else."""
    name = str(op)
    costly = (
        "mm.default",
        "scaled_dot_product",
        "flash_attention",
        "flex_attention",
        "varlen_attn",
    )
    keep = any(part in name for part in costly)
    return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE


@functools.cache  # one class for all blocks, so that they share one compilation
def wrapped_class(kind: type[nn.Module], mode: str) -> type[nn.Module]:
    """A subclass of a module's class whose forward is checkpointed ("full", "selective") or offloaded ("offload")."""
    contexts = functools.partial(create_selective_checkpoint_contexts, selective_ac_policy)
    options = dict(context_fn=contexts) if mode == "selective" else {}

    def checkpointed(self, *inputs):
        if not torch.is_grad_enabled():
            return kind.forward(self, *inputs)
        return checkpoint(
            functools.partial(kind.forward, self), *inputs, use_reentrant=False, **options
        )

    def offloaded(self, *inputs):
        shapes = {shape for p in self.parameters() for shape in (p.shape, p.shape[::-1])}
        with saved_tensors_hooks(functools.partial(pack_to_host, shapes), unpack_to_device):
            return kind.__call__(self, *inputs)

    method = dict(__call__=offloaded) if mode == "offload" else dict(forward=checkpointed)
    return type(kind.__name__, (kind,), method)


def apply_ac(block: nn.Module, mode: str) -> None:
    """Have the backward pass recompute nothing of the block, all of it, or all but matmuls and attention.

    mode: "none", "full" or "selective"; replaces an earlier one. Names of parameters stay. Recomputation draws the same
    random numbers from torch's generators; buffers that a forward pass writes are written twice.
    """
    kind = getattr(type(block), "plain_class", type(block))
    block.__class__ = kind
    if mode != "none":
        block.__class__ = wrapped_class(kind, mode)
        block.__class__.plain_class, block.__class__.ac_mode = kind, mode


def apply_offload(block: nn.Module) -> None:
    """Have the block, compiled or not, keep in pinned host memory what backward needs; for CUDA."""
    block.__class__ = wrapped_class(type(block), "offload")


OFFLOAD_MIN_NUMEL = 1 << 16  # smaller tensors stay on the device


def pack_to_host(shapes: set, tensor: Tensor):
    """Moves a saved tensor to pinned host memory; small and expanded tensors stay where they are.

    So do those of a weight's shape: matmuls keep weights transposed, and cast to 16 bits.
    """
    stays = tensor.shape in shapes or tensor.numel() < OFFLOAD_MIN_NUMEL or 0 in tensor.stride()
    if stays or not tensor.is_cuda:
        return tensor
    # With its strides, which a compiled backward pass relies on
    host = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, pin_memory=True)
    return tensor.device, host.copy_(tensor, non_blocking=True)


def unpack_to_device(packed) -> Tensor:
    if isinstance(packed, Tensor):
        return packed
    device, host = packed
    empty = torch.empty_strided(host.shape, host.stride(), dtype=host.dtype, device=device)
    return empty.copy_(host, non_blocking=True)
