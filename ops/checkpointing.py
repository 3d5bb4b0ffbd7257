"""Activation checkpointing, and activations offloaded to host memory."""

import contextlib
import functools
import random

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts


def apply_ac(mode: str, module: nn.Module, *inputs) -> Tensor:
    """module._forward(*inputs), of which backward recomputes nothing, all, or all but matmuls and attention.

    mode: "none", "full" or "selective". Recomputation draws the same random numbers (from the global RNGs of torch,
    Python and numpy) and sees the module's buffers as they were.
    """
    if mode == "none" or not torch.is_grad_enabled():
        return module._forward(*inputs)
    contexts = functools.partial(create_selective_checkpoint_contexts, selective_ac_policy)
    if torch.compiler.is_compiling():  # the compiler handles buffers and RNG itself
        options = dict(context_fn=contexts) if mode == "selective" else {}
    else:
        options = dict(context_fn=functools.partial(ac_contexts, module, contexts if mode == "selective" else None))
    return checkpoint(module._forward, *inputs, use_reentrant=False, **options)


def recomputed(module: nn.Module, function):
    """The function, a part of the module, with full checkpointing: backward recomputes it from its saved inputs."""

    def call(*inputs):
        contexts = functools.partial(ac_contexts, module, None)
        return checkpoint(function, *inputs, use_reentrant=False, context_fn=contexts)

    return call


def ac_contexts(module: nn.Module, contexts) -> tuple:
    """The contexts of a forward pass and of its recomputation; `contexts()`, if given, makes those that they wrap."""
    forward, again = contexts() if contexts else (contextlib.nullcontext(), contextlib.nullcontext())
    buffers = [(owner, name, t.clone()) for owner in module.modules() for name, t in owner._buffers.items()]
    return forward, Reusable(
        functools.partial(recomputation, again, (random.getstate(), np.random.get_state()), buffers)
    )


class Reusable:
    """A context manager that may be entered again, as a second backward pass through one graph does."""

    def __init__(self, make):
        self.make = make

    def __enter__(self):
        self.inner = self.make()
        return self.inner.__enter__()

    def __exit__(self, *error):
        return self.inner.__exit__(*error)


@contextlib.contextmanager
def recomputation(context, draws: tuple, buffers: list[tuple[nn.Module, str, Tensor]]):
    """Context manager: Python's and numpy's RNGs and these buffers as before forward; afterwards as they are now."""
    buffers_now, draws_now = (
        [owner._buffers[name] for owner, name, _ in buffers],
        (random.getstate(), np.random.get_state()),
    )
    random.setstate(draws[0])
    np.random.set_state(draws[1])
    for owner, name, before in buffers:
        owner._buffers[name] = before.clone()
    try:
        with context:
            yield
    finally:
        random.setstate(draws_now[0])
        np.random.set_state(draws_now[1])
        for (owner, name, _), now in zip(buffers, buffers_now):
            owner._buffers[name] = now


def selective_ac_policy(ctx, op, *args, **kwargs) -> CheckpointPolicy:
    """Selective activation checkpointing: keep the outputs of matmuls and attention, recompute everything else."""
    name = str(op)
    costly = ("mm.default", "scaled_dot_product", "flash_attention", "flex_attention", "varlen_attn")
    keep = any(part in name for part in costly)
    return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE


def offload_activations(module: nn.Module, n_tokens: int, strided: bool):
    """Context manager: the module's forward pass saves what backward needs, except weights, in host memory.

    n_tokens: of the batch. strided: for a compiled backward pass.
    """
    weights = {p.untyped_storage().data_ptr() for p in module.parameters()}
    shapes = {shape for p in module.parameters() if p.dim() > 1 for shape in (p.shape, p.mT.shape)}
    pack = functools.partial(offload_pack, strided=strided, n_tokens=n_tokens, weights=weights, shapes=shapes)
    return saved_tensors_hooks(pack, offload_unpack)


OFFLOAD_MIN_NUMEL = 1 << 16  # smaller tensors stay on the device


def offload_pack(tensor: Tensor, strided: bool, n_tokens: int, weights: set[int], shapes: set[tuple]):
    """Moves a saved tensor to pinned host memory; masks, weights, small tensors and CPU tensors stay where they are.

    strided: its strides, gaps included, are restored, as a compiled backward pass requires. weights: addresses of
    their storages. shapes: of weights and their transposes, to recognize cast copies of them. A tensor of such a shape
    with one row per token is ambiguous, and is moved unless it is transposed, as weights saved by F.linear are.
    """
    if not tensor.is_cuda or tensor.dtype == torch.bool or tensor.numel() < OFFLOAD_MIN_NUMEL:
        return tensor
    cast = tensor.shape in shapes and (tensor.size(0) != n_tokens or tensor.stride(0) == 1)
    if cast or tensor.untyped_storage().data_ptr() in weights:
        return tensor
    if strided and 0 in tensor.stride():  # an expanded tensor
        return tensor
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return tensor.device, strided and tensor.stride(), host.copy_(tensor, non_blocking=True)


def offload_unpack(packed) -> Tensor:
    """The tensor that offload_pack was given, on its device."""
    if isinstance(packed, Tensor):
        return packed
    device, strides, host = packed
    if not strides:
        return host.to(device, non_blocking=True)
    return torch.empty_strided(host.shape, strides, dtype=host.dtype, device=device).copy_(host, non_blocking=True)
