"""torch.compile, of each block and of the loss, in place."""

import torch
from torch import nn

from ops.cpu import skip_inductor_isa_test


def apply_compile(model: nn.Module, mode: str, budget: float, device: torch.device) -> None:
    """Compile a GPT's blocks and cross entropy: blocks share one compilation, and parameter names stay.

    budget: the fraction of activations that may be kept for backward; the compiler recomputes the others.
    """
    torch._dynamo.reset()  # earlier compilations in this process count against the recompile limit
    # Layers with different constants, different windows, and evaluation each recompile the same function.
    torch._dynamo.config.recompile_limit = 16 + 4 * len(model.blocks)
    torch._dynamo.config.skip_nnmodule_hook_guards = (
        False  # also call hooks that are registered later
    )
    # DDPOptimizer would split each block's graph at bucket boundaries; compiled blocks already overlap with all-reduce.
    torch._dynamo.config.optimize_ddp = False
    torch._functorch.config.activation_memory_budget = budget
    if device.type == "cpu":
        skip_inductor_isa_test()
    for block in model.blocks:
        block.compile(mode=mode, fullgraph=True, dynamic=False)
    # A CUDA graph would copy each chunk's logits into its memory
    loss_mode = {"reduce-overhead": "default", "max-autotune": "max-autotune-no-cudagraphs"}.get(
        mode, mode
    )
    how = dict(mode=loss_mode, fullgraph=True, dynamic=False)
    if device.type == "cpu":  # its other parts, and evaluation, are not worth their compile time
        model.cross_entropy.kernel = torch.compile(model.cross_entropy.kernel, **how)
    else:
        model.cross_entropy.compile(**how)
    if mode in (
        "reduce-overhead",
        "max-autotune",
    ):  # tell CUDA graphs that earlier outputs may be overwritten
        model.register_forward_pre_hook(lambda *_: torch.compiler.cudagraph_mark_step_begin())
