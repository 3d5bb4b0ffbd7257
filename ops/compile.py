"""torch.compile, of each block and of the loss, in place."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from ops.loss import LossFunctions, loss_and_gradients, loss_only
from ops.recompute import activation_budget

if TYPE_CHECKING:
    from model import GPT

# The modes that use CUDA graphs, and what they are without
WITHOUT_CUDAGRAPHS = {
    "reduce-overhead": "default",
    "max-autotune": "max-autotune-no-cudagraphs",
}


@functools.cache
def reduce_short_rows_at_once() -> None:
    """Have Triton reduce rows of few elements without a loop over them.

    Before PyTorch 2.15, Inductor makes such a loop for the norm of queries and keys, as these lie
    beside the values: it runs at a third of the memory's speed (H100).
    """
    from torch._inductor.choices import InductorChoices
    from torch._inductor.virtualized import V

    if torch.__version__ >= "2.15":
        return
    plain = InductorChoices.should_use_persistent_reduction

    def should_use_persistent_reduction(features, cooperative_reduction: bool) -> bool:
        is_short = V.graph.sizevars.statically_known_leq(features.reduction_numel, 256)
        return is_short or plain(features, cooperative_reduction)

    # In the class: backward passes are compiled in another thread, which has other handlers
    choose = staticmethod(should_use_persistent_reduction)
    InductorChoices.should_use_persistent_reduction = choose


def keep_gcc_from_copying() -> None:
    """Have GCC make no memcpy of a loop in the C++ of Inductor's kernels.

    GCC 11 and 12 delete the stores of what such a memcpy reads, on CPUs with AVX-512 that they have
    no tuning for: transposed bf16 and fp16 were wrong.
    """
    from torch._inductor import config, cpp_builder

    if "gcc version" in cpp_builder.get_compiler_version_info(config.cpp.cxx[-1]):
        # No setting is for flags alone; the value of this one ends a flag
        contract = config.cpp.enable_floating_point_contract_flag.split()[0]
        config.cpp.enable_floating_point_contract_flag = (
            f"{contract} -fno-tree-loop-distribute-patterns"
        )


@functools.cache
def fuse_loops_that_overwrite() -> None:
    """Have Inductor fuse, for a CPU, a loop with one that overwrites what it has read.

    PyTorch 2.11 to 2.13 ask the latter for the index at which it reads the former's result, and
    end in a KeyError if it does not read it: a cache that keeps the newest tokens.
    """
    from torch._inductor.loop_body import LoopBody

    if torch.__version__ >= "2.15":
        return
    plain = LoopBody.get_read_expr

    def get_read_expr(self: LoopBody, buffer_name: str) -> Any:
        try:
            return plain(self, buffer_name)
        except KeyError:
            return None  # not a contiguous index, which alone matters to its only caller

    LoopBody.get_read_expr = get_read_expr


def apply_compile(model: GPT, mode: str, checkpointing: str = "none") -> None:
    """Compile a GPT's blocks, which share one compilation, and its loss; parameter names stay.

    mode: of torch.compile. checkpointing: a value of the flag; if it is a number, the compiler
    keeps that fraction of activations for backward, and recomputes the others.
    """
    # Earlier compilations in this process count against the recompile limit
    torch._dynamo.reset()
    # Layers with other constants or windows recompile the same function, and so does evaluation
    torch._dynamo.config.recompile_limit = 16 + 4 * len(model.blocks)
    # Also call hooks that are registered later
    torch._dynamo.config.skip_nnmodule_hook_guards = False
    # DDPOptimizer would split each block's graph at bucket boundaries; compiled blocks already
    # overlap all-reduce with backward
    torch._dynamo.config.optimize_ddp = False
    torch._dynamo.config.trace_autograd_ops = True  # for loss_and_gradients
    torch._functorch.config.activation_memory_budget = activation_budget(checkpointing)
    on_cuda = model.device.type == "cuda"
    if on_cuda:
        reduce_short_rows_at_once()
    else:
        keep_gcc_from_copying()
    options = dict(torch._inductor.list_mode_options(mode))
    for block in model.blocks:
        block.compile(options=options, fullgraph=True, dynamic=False)
    if mode in WITHOUT_CUDAGRAPHS:
        # Tell CUDA graphs that earlier outputs may be overwritten
        model.register_forward_pre_hook(lambda *_: torch.compiler.cudagraph_mark_step_begin())

    # The loss without CUDA graphs, which would copy each chunk's logits into their memory
    options = dict(torch._inductor.list_mode_options(WITHOUT_CUDAGRAPHS.get(mode, mode)))
    if on_cuda:
        # Otherwise, with --fp8, the gradient of all logits is stored in fp32 before it is quantized
        options["realize_opcount_threshold"] = 60

    def compiled(function: Callable) -> Callable:
        return torch.compile(function, fullgraph=True, dynamic=False, options=options)

    functions = LossFunctions(loss_and_gradients=compiled(loss_and_gradients))
    # On a CPU, evaluation is not worth its compile time; without chunks, training needs it
    if on_cuda or model.loss_chunk == 0:
        functions = functions._replace(loss_only=compiled(loss_only))
    model.compiled_loss = functions
