"""torch.compile, of each block and of the loss, in place."""

import torch
from torch import nn

from ops.cpu import skip_trial_programs
from ops.loss import ce_fwd_bwd


def apply_compile(model: nn.Module, mode: str, budget: float = 1.0, probing: bool = False) -> None:
    """Compile a GPT's blocks and loss: blocks share one compilation, and parameter names stay.

    budget: the fraction of activations that may be kept for backward; the compiler recomputes the others. probing:
    compiles many sizes quickly; blocks save the same for backward, but their operations are not fused.
    """
    torch._dynamo.reset()  # earlier compilations in this process count against the recompile limit
    # Layers with different constants, different windows, and evaluation each recompile the same function.
    torch._dynamo.config.recompile_limit = 16 + 4 * len(model.blocks)
    torch._dynamo.config.skip_nnmodule_hook_guards = False  # also call hooks that are registered later
    # DDPOptimizer would split each block's graph at bucket boundaries; compiled blocks already overlap with all-reduce.
    torch._dynamo.config.optimize_ddp = False
    torch._functorch.config.activation_memory_budget = budget
    if not model.cos.is_cuda:
        skip_trial_programs()
    unfused = probing and model.attn_backend != "flex"  # unfused, flex materializes all scores
    how = dict(backend="aot_eager_decomp_partition") if unfused else dict(mode=mode)
    for block in model.blocks:
        block.compiled = torch.compile(block.forward_with_ac, dynamic=False, fullgraph=True, **how)
    # A CUDA graph would copy each chunk's logits into its memory
    loss_mode = {"reduce-overhead": "default", "max-autotune": "max-autotune-no-cudagraphs"}.get(mode, mode)
    model.ce_fn = torch.compile(ce_fwd_bwd, mode=loss_mode, dynamic=probing, fullgraph=True)
    if model.cos.is_cuda:  # for evaluation and losses without the kernel; not worth its compile time on a CPU
        model.compiled_loss = torch.compile(model.chunk_loss, dynamic=probing, fullgraph=True)
