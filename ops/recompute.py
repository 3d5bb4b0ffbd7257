"""Recomputing and offloading activations: a block gets a subclass of its class.

A module around the block would change the names of its parameters; with a forward function of their
own, compiled blocks would not share one compilation.
"""

import functools
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

# "none", "selective": all activations but those of matmuls and attention, "full": all of them
RECOMPUTE_MODES = ("none", "selective", "full")
# Parts of the names of operations that "selective" does not recompute
COSTLY_OPS = (
    "mm.default",
    "scaled_dot_product",
    "flash_attention",
    "flex_attention",
    "varlen_attn",
)
OFFLOAD_MIN_NUMEL = 1 << 16  # smaller tensors stay on the device


def activation_budget(checkpointing: str) -> float:
    """Return the fraction of activations that the compiler may keep, for a --checkpointing."""
    return 1.0 if checkpointing.isalpha() else float(checkpointing)


def apply_recompute(block: nn.Module, mode: str) -> None:
    """Have the backward pass recompute the block's activations; replaces an earlier mode.

    mode: one of RECOMPUTE_MODES. Recomputation draws the same random numbers from torch's
    generators; buffers that a forward pass writes are written twice.
    """
    plain_class: Any = getattr(type(block), "plain_class", type(block))
    block.__class__ = recomputed_class(plain_class, mode)


@functools.cache
def recomputed_class(plain_class: Any, mode: str) -> type:
    """Make the subclass whose forward pass is recomputed, one for all blocks."""
    if mode == "none":
        return plain_class
    options: dict = dict(use_reentrant=False)
    if mode == "selective":
        contexts = functools.partial(create_selective_checkpoint_contexts, selective_ac_policy)
        options["context_fn"] = contexts

    def forward(self: nn.Module, *inputs) -> Tensor:
        if not torch.is_grad_enabled():
            return plain_class.forward(self, *inputs)
        return checkpoint(functools.partial(plain_class.forward, self), *inputs, **options)

    attributes = dict(forward=forward, plain_class=plain_class, recompute_mode=mode)
    return type(plain_class.__name__, (plain_class,), attributes)


def selective_ac_policy(ctx: object, op: object, *args, **kwargs) -> CheckpointPolicy:
    """Keep the outputs of matmuls and attention, and recompute everything else."""
    if any(part in str(op) for part in COSTLY_OPS):
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE


def apply_offload(block: nn.Module) -> None:
    """Have the block, compiled or not, keep in pinned host memory what backward needs; for CUDA."""
    plain_class: Any = type(block)
    block.__class__ = offloaded_class(plain_class)


@functools.cache
def offloaded_class(plain_class: Any) -> type:
    """Make the subclass that offloads, around a compiled forward pass as well."""

    def call(self: nn.Module, *inputs) -> Tensor:
        shapes = {p.shape for p in self.parameters()}
        shapes |= {shape[::-1] for shape in shapes}
        with saved_tensors_hooks(functools.partial(pack_to_host, shapes), unpack_to_device):
            return plain_class.__call__(self, *inputs)

    return type(plain_class.__name__, (plain_class,), dict(__call__=call))


Packed = Tensor | tuple[torch.device, Tensor]  # a tensor, or its device and a copy on the host


def pack_to_host(weight_shapes: set[torch.Size], tensor: Tensor) -> Packed:
    """Copy a saved tensor to pinned host memory; small and expanded tensors stay where they are.

    So do those of a weight's shape: matmuls keep weights transposed, and cast to 16 bits.
    """
    if not tensor.is_cuda or tensor.numel() < OFFLOAD_MIN_NUMEL:
        return tensor
    if tensor.shape in weight_shapes or 0 in tensor.stride():
        return tensor
    return tensor.device, copy_with_strides(tensor, pin_memory=True)


def unpack_to_device(packed: Packed) -> Tensor:
    """Undo pack_to_host."""
    if isinstance(packed, Tensor):
        return packed
    device, host = packed
    return copy_with_strides(host, device=device)


def copy_with_strides(tensor: Tensor, **options) -> Tensor:
    """Copy a tensor with its strides, which a compiled backward pass relies on."""
    copy = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, **options)
    return copy.copy_(tensor, non_blocking=True)
