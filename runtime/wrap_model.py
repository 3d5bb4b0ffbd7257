"""Around the model: float8, checkpointing, compiling, ranks; what fits into a GPU's memory; and warming it all up."""

from collections.abc import Callable

import torch
from torch import nn

from common import UserError, is_out_of_memory, largest_divisor
from ops.checkpointing import apply_ac, apply_offload
from ops.compile import apply_compile
from ops.cpu import use_cpu_functions, use_sparse_embedding_gradients
from ops.linear import apply_fp8
from ops.parallel import apply_ddp, apply_fsdp, reshard
from runtime.device import DTYPES
from runtime.flag_checks import (
    AC_MODES,
    activation_budget,
    is_sharded,
    ranks_per_copy,
    seqs_per_rank,
    uses_cudagraphs,
)
from runtime.ranks import DistContext, max_over_ranks

ENOUGH_TOKENS, MOST_TOKENS = (
    4096,
    65536,
)  # per micro-step: fewer leave a GPU idle, and more are no faster


def wrap_model(
    model: nn.Module, make_optimizer: Callable, cfg, dist_ctx: DistContext, seq_lens: set[int]
) -> tuple[nn.Module, int]:
    """A GPT as it is trained, and the sequences of a micro-step: systems flags are put around it, in this order.

    make_optimizer() makes an optimizer for the model as it then is; seq_lens: that the run will
    train in. Weights and buffers keep their values and names. Raises UserError when the ranks cannot share the batch,
    or nothing fits into memory.
    """
    device, world_size, wrapped = dist_ctx.device, dist_ctx.world_size, model
    compiled, sharded, on_gpu = (
        cfg.compile != "off",
        is_sharded(cfg.parallel),
        device.type == "cuda",
    )
    n_seqs = seqs_per_rank(cfg.batch_tokens, cfg.seq_len, cfg.micro_batch, world_size)
    shards = ranks_per_copy(cfg.parallel, cfg.shard_size, world_size, dist_ctx.local_world_size)
    if device.type == "cpu":
        use_cpu_functions(type(model).backbone.__globals__)
    blocks = [*dict.fromkeys(model.blocks)]  # an edit may use one several times
    if cfg.fp8:
        feed_forward = [
            m for block in blocks for name, m in block.named_children() if name != "attn"
        ]
        for module in (*feed_forward, model.head):
            apply_fp8(module)
    modes = [cfg.checkpointing if cfg.checkpointing in AC_MODES else "none"]
    if cfg.checkpointing == "auto" and on_gpu and cfg.offload != "activations":
        opaque = cfg.attn == "flex" and not compiled  # selective checkpointing cannot see into it
        modes = [mode for mode in AC_MODES if mode != "selective" or not opaque]
    for block in blocks:
        apply_ac(block, modes[0])
    micro_batch = cfg.micro_batch
    if (
        not micro_batch and on_gpu and not sharded
    ):  # a rank without memory would leave others waiting for its shards
        micro_batch = fit_micro_batch(model, make_optimizer, n_seqs, cfg.seq_len, modes, dist_ctx)
    elif not micro_batch:
        micro_batch = largest_divisor(n_seqs, (ENOUGH_TOKENS if on_gpu else 8192) // cfg.seq_len)
    if compiled:
        apply_compile(model, cfg.compile, activation_budget(cfg.checkpointing), device)
    if cfg.offload == "activations" and on_gpu:
        for block in blocks:
            apply_offload(block)
    if sharded:
        apply_fsdp(model, device, DTYPES[cfg.dtype], shards, DTYPES[cfg.grad_comm])
    elif world_size > 1:
        wrapped = apply_ddp(model, cfg.bucket_cap_mb, DTYPES[cfg.grad_comm])
    elif device.type == "cpu" and micro_batch < n_seqs and isinstance(model.ngrams, nn.Embedding):
        lookups = micro_batch * cfg.seq_len * (cfg.ngram - 1)
        if 4 * lookups <= cfg.ngram_rows:  # for more, a dense gradient is faster
            use_sparse_embedding_gradients(model.ngrams)
    if (
        compiled or on_gpu or world_size > 1
    ):  # compiles, loads kernels, allocates, connects: step 1 is like any other
        cudagraphs = uses_cudagraphs(cfg.compile)
        for seq_len in sorted(seq_lens, reverse=True):
            same_tokens = micro_batch * cfg.seq_len // seq_len
            dummy_step(wrapped, make_optimizer(), same_tokens, seq_len, keep_gradients=cudagraphs)
        if on_gpu and not cudagraphs:  # these allocated theirs at recording
            torch.cuda.reset_peak_memory_stats()
    return wrapped, micro_batch


def dummy_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    micro_batch: int,
    seq_len: int,
    keep_gradients: bool = False,
) -> None:
    """Two micro-steps on made-up tokens, an update with learning rates of 0, and an evaluation; weights stay.

    keep_gradients: they keep their memory, as CUDA graphs need.
    """
    x = torch.zeros(
        (micro_batch, seq_len), dtype=torch.int64, device=next(model.parameters()).device
    )
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    for p in model.parameters():
        p.grad = torch.zeros_like(p) if keep_gradients and p.requires_grad else None
    for _ in range(3 if keep_gradients else 2):  # CUDA graphs are recorded at the second call
        model(x, x).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for p in model.parameters():
        if p.grad is not None:
            p.grad.zero_()  # those of 16 bits may have overflowed, and 0 times infinity would reach the weights
    optimizer.step()
    model.zero_grad(set_to_none=not keep_gradients)
    model.eval()
    with torch.no_grad():
        model(x, x)
        reshard(model)
        for name, buffer in model.named_buffers():
            buffer.copy_(buffers[name])
    model.train()


def fit_micro_batch(
    model, make_optimizer, n_seqs: int, seq_len: int, modes: list[str], dist_ctx: DistContext
) -> int:
    """How many of a rank's n_seqs sequences to take at once on a GPU: what fits, found by trying steps.

    modes: of activation checkpointing: the first is set in which ENOUGH_TOKENS fit, or the last. The same on every
    rank. Raises UserError when not even one sequence fits.
    """
    enough = largest_divisor(n_seqs, -(-ENOUGH_TOKENS // seq_len))
    buckets = (
        sum(p.numel() for p in model.parameters()) if dist_ctx.world_size > 1 else 0
    )  # of DDP, in fp32
    for mode in modes:
        for block in dict.fromkeys(model.blocks):
            apply_ac(block, mode)
        micro_batch, least = (
            largest_divisor(n_seqs, MOST_TOKENS // seq_len),
            1 if mode == modes[-1] else enough,
        )
        while micro_batch >= least:
            reserved = torch.empty(buckets, device=dist_ctx.device)
            fits = step_fits(model, make_optimizer(), micro_batch, seq_len)
            del reserved
            model.zero_grad(set_to_none=True)
            torch.cuda.empty_cache()
            if not any(max_over_ranks(dist_ctx, not fits)):
                return micro_batch
            if micro_batch == 1:
                break
            micro_batch = largest_divisor(n_seqs, micro_batch // 2)
    advice = "leave --checkpointing at auto, add --offload optimizer, or use a smaller --seq_len or model"
    raise UserError(f"one sequence does not fit into this GPU's memory; {advice}")


def step_fits(
    model: nn.Module, optimizer: torch.optim.Optimizer, micro_batch: int, seq_len: int
) -> bool:
    """Whether a step takes at most 92 % of the GPU's memory: the rest is lost to fragmentation, or CUDA's."""
    try:
        torch.cuda.reset_peak_memory_stats()
        dummy_step(model, optimizer, micro_batch, seq_len)
        total = (
            torch.cuda.get_device_properties(None).total_memory
            * torch.cuda.get_per_process_memory_fraction()
        )
        return torch.cuda.max_memory_allocated() <= 0.92 * total
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        return False
