"""Compiler warm-up, and the side effects of a forward pass."""

import contextlib

import torch
from torch import Tensor, nn

from ops.parallel import reshard


def cudagraph_mark_step(cudagraphs: bool) -> None:
    """Tell CUDA graphs, if they are used, that the outputs of earlier calls may be overwritten."""
    if cudagraphs:
        torch.compiler.cudagraph_mark_step_begin()  # imports the compiler: more than a second


def dummy_micro_step(model: nn.Module, micro_batch: int, seq_len: int, cudagraphs: bool, train: bool = True) -> None:
    """A forward pass on zeros, and with `train` a backward pass, to compile, load and allocate what they need."""
    x = torch.zeros((micro_batch, seq_len), dtype=torch.int64, device=next(model.parameters()).device)
    cudagraph_mark_step(cudagraphs)
    with torch.set_grad_enabled(train):
        loss = model(x, x) / x.numel()
        if train:
            loss.backward()


def allocate_gradients(model: nn.Module) -> None:
    """Zero gradients for all trained parameters, as they exist in every micro-step but the first."""
    for p in model.parameters():
        p.grad = torch.zeros_like(p) if p.requires_grad else None


@contextlib.contextmanager
def side_effects(model: nn.Module, device: torch.device):
    """Yields a dict that is filled in at exit: "drawn", whether torch's global RNGs were used inside, and "written",
    the names of buffers that were written."""

    def draws() -> list[Tensor]:
        return [torch.get_rng_state(), *([torch.cuda.get_rng_state()] if device.type == "cuda" else [])]

    def writes() -> dict[str, tuple]:
        return {name: (id(buffer), buffer._version) for name, buffer in model.named_buffers()}

    effects, drawn, written = {}, draws(), writes()
    yield effects
    effects["drawn"] = not all(map(torch.equal, drawn, draws()))
    effects["written"] = [name for name, now in writes().items() if now != written[name]]


def compile_blocks_early(model: nn.Module, micro_batch: int, seq_len: int, cudagraphs: bool) -> None:
    """Compile each block's forward and backward pass while memory is otherwise free: the compiler runs trials.

    Otherwise backward is compiled only when it begins, with the saved activations of all blocks in memory.
    """

    def compile_now(block, args, kwargs):
        hooks.pop(block).remove()
        copies = {}

        def own(value):  # the same tensor gets the same copy
            if not isinstance(value, Tensor) or not value.is_floating_point():
                return value
            return copies.setdefault(id(value), value.detach().requires_grad_())

        block.train()
        with torch.enable_grad():
            out = block(*map(own, args), **{name: own(value) for name, value in kwargs.items()})
            outs = out if isinstance(out, (tuple, list)) else [out]
            sum(t.sum() for t in outs if isinstance(t, Tensor) and t.requires_grad).backward()
        block.eval()

    hooks = {b: b.register_forward_pre_hook(compile_now, with_kwargs=True) for b in dict.fromkeys(model.blocks)}
    model.eval()
    try:
        dummy_micro_step(model, micro_batch, seq_len, cudagraphs, train=False)
    finally:
        model.train()
        for hook in hooks.values():  # of blocks that did not run
            hook.remove()
        model.zero_grad(set_to_none=not cudagraphs)


def warm_up(model: nn.Module, optimizer, micro_batch: int, seq_len: int, cudagraphs: bool) -> dict:
    """Compile and load kernels for training and evaluation. Weights, buffers and optimizer must be reset after it.

    Returns what side_effects saw of training.
    """
    raw_model = getattr(model, "module", model)
    calls = 3 if cudagraphs else 1  # a graph is recorded at the second call
    if cudagraphs:  # gradients keep their addresses
        allocate_gradients(raw_model)
    if raw_model.cos.is_cuda and raw_model.blocks[0].compiled and not hasattr(raw_model, "reshard"):  # FSDP has hooks
        compile_blocks_early(raw_model, micro_batch, seq_len, cudagraphs)
        torch.cuda.reset_peak_memory_stats()
    with side_effects(raw_model, raw_model.cos.device) as effects:
        for _ in range(calls):
            dummy_micro_step(model, micro_batch, seq_len, cudagraphs)
        nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
        optimizer.step()
        model.zero_grad(set_to_none=not cudagraphs)
        model.eval()
        for _ in range(calls):
            dummy_micro_step(model, micro_batch, seq_len, cudagraphs, train=False)
        model.train()
        reshard(model)
    return effects
