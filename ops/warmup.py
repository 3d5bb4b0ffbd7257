"""Compiler warm-up, and what a forward pass leaves behind."""

import contextlib

import torch
from torch import Tensor, nn

from ops.parallel import reshard


def cudagraph_mark_step(cudagraphs: bool) -> None:
    """Tell CUDA graphs, if there are any, that what an earlier call returned may be overwritten."""
    if cudagraphs:
        torch.compiler.cudagraph_mark_step_begin()  # imports the compiler: more than a second


def dummy_micro_step(model: nn.Module, micro_batch: int, seq_len: int, cudagraphs: bool, train: bool = True) -> None:
    """One forward pass, with `train` a backward one too, on zeros, for what it compiles, loads or allocates."""
    x = torch.zeros((micro_batch, seq_len), dtype=torch.int64, device=next(model.parameters()).device)
    cudagraph_mark_step(cudagraphs)
    with torch.set_grad_enabled(train):
        loss = model(x, x) / x.numel()
        if train:
            loss.backward()


@contextlib.contextmanager
def side_effects(model: nn.Module, device: torch.device):
    """Yields a dict that afterwards says what happened within: "drawn", whether torch's global generators gave numbers,
    and "written", the names of buffers that were written."""

    def draws() -> list[Tensor]:
        return [torch.get_rng_state(), *([torch.cuda.get_rng_state()] if device.type == "cuda" else [])]

    def writes() -> dict[str, tuple]:
        return {name: (id(buffer), buffer._version) for name, buffer in model.named_buffers()}

    effects, drawn, written = {}, draws(), writes()
    yield effects
    effects["drawn"] = not all(map(torch.equal, drawn, draws()))
    effects["written"] = [name for name, now in writes().items() if now != written[name]]


def compile_first_blocks(model: nn.Module, micro_batch: int, seq_len: int, cudagraphs: bool) -> None:
    """A micro-step of a GPT's first blocks alone, one at least of each window: what the compiler tries out finds room.

    The backward pass of all blocks is compiled as soon as it begins, when everything that it needs is in memory.
    """
    blocks = model.blocks
    n_blocks = next(n for n in range(1, len(blocks) + 1) if {*model.windows[:n]} == {*model.windows})
    model.blocks = blocks[:n_blocks]
    try:
        dummy_micro_step(model, micro_batch, seq_len, cudagraphs)
    finally:
        model.blocks = blocks
    model.zero_grad(set_to_none=not cudagraphs)


def warm_up(model: nn.Module, optimizer, micro_batch: int, seq_len: int, cudagraphs: bool) -> dict:
    """Compile and load kernels for training and evaluation. Weights, buffers and the optimizer are to be made anew.

    Returns what side_effects saw of training.
    """
    raw_model = getattr(model, "module", model)
    calls = 3 if cudagraphs else 1  # a graph is recorded at the second call
    if cudagraphs:  # gradients stay where they are
        for p in raw_model.parameters():
            p.grad = torch.zeros_like(p) if p.requires_grad else None
    if raw_model.blocks[0].compiled and not hasattr(raw_model, "reshard"):  # FSDP would remember these blocks as all
        compile_first_blocks(raw_model, micro_batch, seq_len, cudagraphs)
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
