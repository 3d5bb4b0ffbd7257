"""Prepare a model for training: what is recomputed, the micro-batch, warming up."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn

from common.errors import UserError, is_out_of_memory, print_line
from common.values import largest_divisor
from ops.parallel import get_rank, get_world_size, reshard
from ops.recompute import RECOMPUTE_MODES, apply_offload, apply_recompute
from runtime.ranks import DistContext, any_rank, raise_on_all_ranks

if TYPE_CHECKING:
    from model import GPT
    from train_gpt import Config

# Makes the optimizer of a model, for steps on dummy data
MakeOptimizer = Callable[["Config", "GPT"], torch.optim.Optimizer]

# Tokens per micro-batch: fewer than ENOUGH leave a GPU idle, more than MOST are no faster
ENOUGH_TOKENS = 4096
MOST_TOKENS = 131072
CPU_TOKENS = 8192


def seqs_per_rank(cfg: Config, world_size: int) -> int:
    """Return the number of sequences that each rank takes per step.

    Raises UserError if the batch cannot be divided evenly among ranks or micro-batches.
    """
    n_seqs, rest = divmod(cfg.batch_tokens // cfg.seq_len, world_size)
    if rest:
        raise UserError(
            f"--batch_tokens {cfg.batch_tokens} cannot be shared evenly by {world_size} ranks; use "
            f"a multiple of {world_size * cfg.seq_len}, or a different number of ranks"
        )
    if cfg.micro_batch and n_seqs % cfg.micro_batch:
        raise UserError(
            f"--micro_batch {cfg.micro_batch} does not divide the {n_seqs} sequences that each "
            "rank takes per step; use a divisor of them"
        )
    return n_seqs


# --------------------------------------------------------------------------------------------------
# Memory


def fit_into_memory(
    model: GPT, cfg: Config, make_optimizer: MakeOptimizer, dist_ctx: DistContext
) -> int:
    """Have activations recomputed or offloaded as the flags say or memory requires.

    Returns the micro-batch: how many of a rank's sequences to process at once, the same on every
    rank. On a GPU, steps on dummy data find the largest that fits; weights are unchanged. Raises
    UserError if not even one sequence fits, or if the ranks cannot share the batch.
    """
    with raise_on_all_ranks():
        n_seqs = seqs_per_rank(cfg, dist_ctx.world_size)
    if cfg.is_compiled and dist_ctx.rank == 0:
        print_line("compiling, which takes a minute or more the first time")
    on_cuda = dist_ctx.device.type == "cuda"
    modes = recompute_modes(cfg, on_cuda)
    for block in set(model.blocks):  # an edited model may use a block several times
        apply_recompute(block, modes[0])
        if cfg.offload == "activations" and on_cuda:
            apply_offload(block)
    if cfg.micro_batch:
        micro_batch = cfg.micro_batch
    elif not on_cuda:
        micro_batch = largest_divisor(n_seqs, CPU_TOKENS // cfg.seq_len)
    elif cfg.is_sharded:
        # No trials under FSDP: if one rank ran out of memory, others would wait for its shards
        micro_batch = largest_divisor(n_seqs, ENOUGH_TOKENS // cfg.seq_len)
    else:
        micro_batch = find_micro_batch(model, cfg, make_optimizer, modes, n_seqs)
    return micro_batch


def recompute_modes(cfg: Config, on_cuda: bool) -> list[str]:
    """Return the modes of recomputation to try, the least first."""
    if cfg.checkpointing in RECOMPUTE_MODES:
        return [cfg.checkpointing]
    # With a budget the compiler recomputes, and on a CPU there is enough memory
    if cfg.checkpointing != "auto" or not on_cuda or cfg.offload == "activations":
        return ["none"]
    if cfg.attn == "flex" and not cfg.is_compiled:
        return ["none", "full"]  # selective recomputation does not work with it
    return list(RECOMPUTE_MODES)


def find_micro_batch(
    model: GPT, cfg: Config, make_optimizer: MakeOptimizer, modes: list[str], n_seqs: int
) -> int:
    """Find the largest micro-batch that fits into a GPU, by passes on dummy data.

    Sets the first of the modes in which ENOUGH_TOKENS fit. Raises UserError if nothing fits.
    """
    candidates = [largest_divisor(n_seqs, MOST_TOKENS // cfg.seq_len)]
    while candidates[-1] > 1:
        candidates.append(largest_divisor(n_seqs, candidates[-1] // 2))
    enough = largest_divisor(n_seqs, math.ceil(ENOUGH_TOKENS / cfg.seq_len))
    # Eager, because each size would be compiled. FlexAttention would keep all scores then
    stance = "force_eager" if cfg.is_compiled and cfg.attn != "flex" else "default"

    # The optimizer's state takes memory, too. Its first update is made before the trials, in which
    # a rank may run out of memory: Muon exchanges matrices, and others would wait for that rank
    optimizer = make_optimizer(cfg, model)
    set_mode(model, modes[-1])
    with torch.compiler.set_stance(stance):
        if not passes_fit(model, 1, cfg.seq_len):
            raise UserError(
                "one sequence does not fit into this GPU's memory; leave --checkpointing at auto, "
                "add --offload optimizer, or use a smaller --seq_len or model",
                printed=get_rank() > 0,
            )
        dummy_step(model, optimizer, 1, cfg.seq_len)
        micro_batch = first_that_fits(model, modes, candidates, enough, cfg.seq_len)

    # Compiled blocks keep less for backward: twice as many sequences may fit
    larger = largest_divisor(n_seqs, min(2 * micro_batch, MOST_TOKENS // cfg.seq_len))
    is_tried = cfg.is_compiled and not cfg.uses_cudagraphs and larger > micro_batch
    return larger if is_tried and passes_fit(model, larger, cfg.seq_len) else micro_batch


def first_that_fits(
    model: GPT, modes: list[str], candidates: list[int], enough: int, seq_len: int
) -> int:
    """Return the first candidate that fits, at least `enough` unless in the final mode."""
    for mode in modes:
        set_mode(model, mode)
        for micro_batch in candidates:
            if micro_batch < enough and mode != modes[-1]:
                break
            if passes_fit(model, micro_batch, seq_len):
                return micro_batch
    return 1  # which has fitted


def set_mode(model: GPT, mode: str) -> None:
    """Have the blocks recompute as the mode says, unless they do already."""
    for block in set(model.blocks):
        if getattr(block, "recompute_mode", "none") != mode:
            apply_recompute(block, mode)


def passes_fit(model: GPT, micro_batch: int, seq_len: int) -> bool:
    """Return True if two micro-steps take at most 92 % of the GPU's memory on every rank.

    The rest is left for fragmentation.
    """
    x = torch.zeros((micro_batch, seq_len), dtype=torch.int64, device=model.device)
    torch.cuda.reset_peak_memory_stats()
    needed = math.inf
    try:
        for _ in range(2):  # in the second, there are gradients already
            model(x, x).backward()
        needed = torch.cuda.max_memory_allocated()
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
    if get_world_size() > 1:
        needed += sum(4 * p.numel() for p in model.parameters())  # DDP's buckets, in fp32
    fraction = torch.cuda.get_per_process_memory_fraction()
    available = fraction * torch.cuda.get_device_properties(None).total_memory
    model.zero_grad(set_to_none=True)
    torch.cuda.empty_cache()
    return not any_rank(needed > 0.92 * available)


# --------------------------------------------------------------------------------------------------
# Warming up


def warm_up(
    model: nn.Module,
    raw_model: GPT,
    cfg: Config,
    make_optimizer: MakeOptimizer,
    micro_batch: int,
    seq_lens: set[int],
) -> None:
    """Compile, load kernels, allocate and connect the ranks, so that step 1 takes no longer.

    Makes steps on dummy data of these sequence lengths; the weights are unchanged.
    """
    on_cuda = raw_model.device.type == "cuda"
    if not (cfg.is_compiled or on_cuda or dist.is_initialized()):
        return
    for seq_len in sorted(seq_lens, reverse=True):
        dummy_step(
            model,
            make_optimizer(cfg, raw_model),
            micro_batch * cfg.seq_len // seq_len,
            seq_len,
            keep_gradients=cfg.uses_cudagraphs,
        )
    # CUDA graphs keep their memory
    if on_cuda and not cfg.uses_cudagraphs:
        torch.cuda.reset_peak_memory_stats()


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
