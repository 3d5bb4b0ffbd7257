"""Wraps the model for training, chooses the micro-batch that fits, and warms everything up."""

import math
from collections.abc import Callable

import torch
from torch import nn

from common.errors import UserError, is_out_of_memory
from common.values import largest_divisor
from ops.checkpointing import apply_ac, apply_offload
from ops.compile import apply_compile
from ops.linear import apply_fp8
from ops.parallel import apply_ddp, apply_fsdp, reshard
from runtime.flag_checks import AC_MODES, activation_budget, ranks_per_copy, seqs_per_rank
from runtime.ranks import DistContext, any_rank
from runtime.speed import DTYPES

# Tokens per micro-batch: fewer than ENOUGH leave a GPU idle, more than MOST are no faster
ENOUGH_TOKENS = 4096
MOST_TOKENS = 131072
CPU_TOKENS = 8192


def wrap_model(
    model: nn.Module, cfg, make_optimizer: Callable, dist_ctx: DistContext, seq_lens: set[int]
) -> tuple[nn.Module, int]:
    """Apply fp8, checkpointing, compile, DDP or FSDP to a GPT; return it and the micro-batch.

    make_optimizer(cfg, model): called for steps on dummy data. seq_lens: sequence lengths of the
    run. Weights and buffers keep their values and names. Raises UserError if the ranks cannot share
    the batch, or if not even one sequence fits into memory.
    """
    device = dist_ctx.device
    n_seqs = seqs_per_rank(cfg, dist_ctx.world_size)
    blocks = set(model.blocks)  # an edited model may use a block several times

    # 1. float8
    if cfg.fp8:
        for block in blocks:
            for name, module in block.named_children():
                if name != "attn":
                    apply_fp8(module)
        apply_fp8(model.head)

    # 2. Activation checkpointing
    ac_modes = choose_ac_modes(cfg, device)
    for block in blocks:
        apply_ac(block, ac_modes[0])

    # 3. Micro-batch
    micro_batch = choose_micro_batch(model, cfg, make_optimizer, ac_modes, n_seqs, dist_ctx)

    # 4. Compile. Compiled blocks keep less for backward: twice as many sequences may fit
    if cfg.is_compiled:
        apply_compile(model, cfg.compile, activation_budget(cfg), device)
        larger = largest_divisor(n_seqs, min(2 * micro_batch, MOST_TOKENS // cfg.seq_len))
        is_tried = device.type == "cuda" and not cfg.micro_batch and not cfg.is_sharded
        if is_tried and larger > micro_batch and not cfg.uses_cudagraphs:
            if step_fits(model, cfg, make_optimizer, larger, dist_ctx):
                micro_batch = larger

    # 5. Offload activations
    if cfg.offload == "activations" and device.type == "cuda":
        for block in blocks:
            apply_offload(block)

    # 6. DDP or FSDP
    wrapped = model
    grad_dtype = DTYPES[cfg.grad_comm]
    if cfg.is_sharded:
        shard_size = ranks_per_copy(cfg, dist_ctx)
        apply_fsdp(model, device, DTYPES[cfg.dtype], shard_size, grad_dtype)
    elif dist_ctx.world_size > 1:
        wrapped = apply_ddp(model, cfg.bucket_cap_mb, grad_dtype)

    # 7. Warm up (compile, load kernels, allocate, connect), so that step 1 takes no longer
    if cfg.is_compiled or device.type == "cuda" or dist_ctx.world_size > 1:
        for seq_len in sorted(seq_lens, reverse=True):
            dummy_step(
                wrapped,
                make_optimizer(cfg, model),
                micro_batch * cfg.seq_len // seq_len,
                seq_len,
                keep_gradients=cfg.uses_cudagraphs,
            )
        # CUDA graphs keep their memory
        if device.type == "cuda" and not cfg.uses_cudagraphs:
            torch.cuda.reset_peak_memory_stats()

    # 8. Sparse gradients: a step reads few rows of an n-gram table, and on a CPU updating the
    # others would take as long as a layer. DDP and FSDP need dense gradients
    if device.type == "cpu" and dist_ctx.world_size == 1 and not cfg.is_sharded:
        use_sparse_gradients(model, make_optimizer(cfg, model))
    return wrapped, micro_batch


def use_sparse_gradients(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Give embeddings sparse gradients if model.py's RMSprop, which accepts them, trains them."""
    weights = set()
    for group in optimizer.param_groups:
        if hasattr(optimizer, "rmsprop") and group["kind"] == "rmsprop":
            weights.update(group["params"])
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            module.sparse = module.weight in weights


def choose_ac_modes(cfg, device: torch.device) -> list[str]:
    """Choose the modes of activation checkpointing to try, the least recomputation first."""
    if cfg.checkpointing in AC_MODES:
        return [cfg.checkpointing]
    # With a budget the compiler recomputes, and on a CPU there is enough memory
    if cfg.checkpointing != "auto" or device.type != "cuda" or cfg.offload == "activations":
        return ["none"]
    if cfg.attn == "flex" and not cfg.is_compiled:
        return ["none", "full"]  # selective checkpointing does not work with it
    return list(AC_MODES)


def choose_micro_batch(
    model: nn.Module,
    cfg,
    make_optimizer: Callable,
    ac_modes: list[str],
    n_seqs: int,
    dist_ctx: DistContext,
) -> int:
    """Choose how many of a rank's n_seqs sequences to process at once, the same on every rank.

    On a GPU, try steps to find the largest number that fits, in the first of ac_modes in which
    ENOUGH_TOKENS fit, and set that mode. Raises UserError if not even one sequence fits.
    """
    if cfg.micro_batch:
        return cfg.micro_batch
    if dist_ctx.device.type != "cuda":
        return largest_divisor(n_seqs, CPU_TOKENS // cfg.seq_len)
    # No trials under FSDP: if one rank ran out of memory, others would wait for its shards
    if cfg.is_sharded:
        return largest_divisor(n_seqs, ENOUGH_TOKENS // cfg.seq_len)

    candidates = [largest_divisor(n_seqs, MOST_TOKENS // cfg.seq_len)]
    while candidates[-1] > 1:
        candidates.append(largest_divisor(n_seqs, candidates[-1] // 2))
    enough = largest_divisor(n_seqs, -(-ENOUGH_TOKENS // cfg.seq_len))
    for mode in ac_modes:
        for block in model.blocks:
            apply_ac(block, mode)
        for micro_batch in candidates:
            if micro_batch < enough and mode != ac_modes[-1]:
                break
            if step_fits(model, cfg, make_optimizer, micro_batch, dist_ctx):
                return micro_batch
    raise UserError(
        "one sequence does not fit into this GPU's memory; leave --checkpointing at auto, add "
        "--offload optimizer, or use a smaller --seq_len or model"
    )


def step_fits(
    model: nn.Module, cfg, make_optimizer: Callable, micro_batch: int, dist_ctx: DistContext
) -> bool:
    """Return True if a trial step takes at most 92 % of the GPU's memory on every rank.

    The rest is left for fragmentation.
    """
    torch.cuda.reset_peak_memory_stats()
    needed = math.inf
    try:
        dummy_step(model, make_optimizer(cfg, model), micro_batch, cfg.seq_len)
        needed = torch.cuda.max_memory_allocated()
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
    if dist_ctx.world_size > 1:
        needed += sum(4 * p.numel() for p in model.parameters())  # DDP's buckets, in fp32
    available = torch.cuda.get_device_properties(None).total_memory
    available *= torch.cuda.get_per_process_memory_fraction()
    model.zero_grad(set_to_none=True)
    torch.cuda.empty_cache()
    return not any_rank(dist_ctx, needed > 0.92 * available)


def dummy_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    micro_batch: int,
    seq_len: int,
    keep_gradients: bool = False,
) -> None:
    """Run a micro-step on zeros, an update with learning rate 0, a micro-step and an evaluation.

    Weights and buffers keep their values. keep_gradients: keep the gradients' memory and run a
    third micro-step, in which CUDA graphs are recorded.
    """
    device = next(model.parameters()).device
    x = torch.zeros((micro_batch, seq_len), dtype=torch.int64, device=device)
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    if keep_gradients:
        for p in model.parameters():
            if p.requires_grad:
                p.grad = torch.zeros_like(p)

    # An update, which makes the optimizer's state
    model(x, x).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    # 16-bit gradients may have overflowed, and 0 times infinity would reach the weights
    model.zero_grad(set_to_none=False)
    optimizer.step()

    # As in training, gradients and now also the optimizer's state are in memory
    for _ in range(2 if keep_gradients else 1):
        model(x, x).backward()
    model.zero_grad(set_to_none=not keep_gradients)

    model.eval()
    with torch.no_grad():
        model(x, x)
        reshard(model)
        for name, buffer in model.named_buffers():
            buffer.copy_(buffers[name])
    model.train()
