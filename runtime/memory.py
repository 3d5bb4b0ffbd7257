"""What fits into a device's memory: activation checkpointing by formula, the micro-batch by measuring."""

import math

import torch

from data.shards import UserError
from ops.compile import apply_compile
from ops.warmup import allocate_gradients, dummy_micro_step
from runtime.derived import (
    AC_MODES,
    activation_budget,
    is_sharded,
    largest_divisor,
    ranks_per_copy,
    seqs_per_rank,
    uses_cudagraphs,
)
from runtime.errors import is_out_of_memory
from runtime.footprint import least_checkpointing, memory_formula
from runtime.ranks import DistContext, dist_max

USABLE = 0.92  # fraction of the memory: the rest is lost to fragmentation, or used by CUDA itself
ENOUGH_TOKENS = 4096  # per micro-step: they keep a GPU busy, so nothing is recomputed to fit more


class DoesNotFit(UserError):
    """Not even one sequence fits."""


def fit_memory(f, model: torch.nn.Module, groups: list[dict], dist_ctx: DistContext) -> int:
    """Set the model's activation checkpointing as the flags `f` say; returns the sequences of a micro-step.

    groups: the optimizer's. `auto` recomputes only what a GPU's memory requires: so that a micro-step of --micro_batch
    sequences, or of ENOUGH_TOKENS, fits by formula, and one sequence fits when measured. The same on every rank.
    Raises UserError.
    """
    n_seqs, cuda = seqs_per_rank(f, dist_ctx.world_size), dist_ctx.device.type == "cuda"
    n_shards = ranks_per_copy(f, dist_ctx)
    optimizer_bytes = update_bytes(f, groups, dist_ctx.world_size)
    modes = [f.checkpointing if f.checkpointing in AC_MODES else "none"]
    if f.checkpointing == "auto" and cuda and f.offload != "activations":
        # selective cannot see into uncompiled FlexAttention
        modes = [mode for mode in AC_MODES if mode != "selective" or f.attn != "flex" or f.compile != "off"]
        least, most_bytes = f.micro_batch or min(n_seqs, -(-ENOUGH_TOKENS // f.seq_len)), available_memory()
        by_formula = least_checkpointing(
            modes,
            model,
            least,
            f.seq_len,
            optimizer_bytes,
            f.compile != "off",
            n_shards,
            -dist_max(dist_ctx, -most_bytes),
        )
        modes = modes[modes.index(by_formula) :]
    if f.attn == "flex":
        torch._dynamo.reset()  # earlier compilations in this process count against the recompile limit
    if f.compile != "off" and cuda and not f.micro_batch:
        apply_compile(model, "default", activation_budget(f), probing=True)
    for mode in modes:
        for block in model.blocks:
            block.checkpointing = mode
        if f.micro_batch or not cuda:
            return f.micro_batch or largest_divisor(n_seqs, 8192 // f.seq_len)  # without CUDA, more are no faster
        try:
            return fit_micro_batch(f, model, mode, optimizer_bytes, dist_ctx)
        except DoesNotFit:
            if mode == modes[-1]:
                raise


def update_bytes(f, groups: list[dict], world_size: int) -> int:
    """Bytes of optimizer state and DDP's buckets on the device, besides weights and gradients, unsharded.

    groups: the optimizer's.
    """
    state = 0 if f.offload == "optimizer" else sum(map(state_bytes, groups))
    if world_size == 1 or is_sharded(f):
        return state
    # Once freed, gradients are no longer views of the buckets, so both exist from the second micro-step on
    return state + 4 * sum(p.numel() for group in groups for p in group["params"] if p.requires_grad)


def state_bytes(group: dict) -> int:
    """Bytes of optimizer state for a group, unsharded: Muon has one fp32 number per parameter, others have two."""
    return (4 if group["kind"] == "muon" else 8) * sum(p.numel() for p in group["params"] if p.requires_grad)


def fit_micro_batch(f, model: torch.nn.Module, mode: str, optimizer_bytes: int, dist_ctx: DistContext) -> int:
    """The most sequences per micro-step that fit into a GPU, with this mode of --checkpointing.

    optimizer_bytes: what the optimizer will need on the device, unsharded. Raises UserError when not even one fits.
    """
    n_seqs, n_shards = seqs_per_rank(f, dist_ctx.world_size), ranks_per_copy(f, dist_ctx)
    compiled, most = f.compile != "off", n_seqs
    compiles = compiled or f.attn == "flex"
    if f.offload == "activations":  # to host memory, and how much of that is free is unknown
        most = largest_divisor(n_seqs, max(1, ENOUGH_TOKENS // f.seq_len))

    def probe(micro_batch: int) -> float:
        copied = 0  # by CUDA graphs, which copy each block's input into their own memory
        if uses_cudagraphs(f):
            copied = len(model.blocks) * micro_batch * f.seq_len * f.n_embd * model.compute_dtype.itemsize
        if compiles:
            torch._dynamo.reset()  # each size recompiles, and the number of recompilations is limited
        torch.cuda.reset_peak_memory_stats()
        dummy_micro_step(model, micro_batch, f.seq_len, cudagraphs=False)
        return torch.cuda.max_memory_allocated() + copied

    def formula(micro_batch: int) -> int:
        shape = (model, mode, micro_batch, f.seq_len, optimizer_bytes)
        return sum(memory_formula(*shape, on_cpu=False, compiled=compiled, n_ranks=n_shards).values())

    def peak(micro_batch: int) -> float:
        waiting = hasattr(model, "reshard") and dist_ctx.world_size > 1  # for shards, under FSDP
        used = agreed_peak(probe, micro_batch, n_seqs if waiting else 0, dist_ctx)
        torch.cuda.empty_cache()
        return used

    allocate_gradients(model)
    budget = -dist_max(dist_ctx, optimizer_bytes // n_shards - available_memory())
    if compiles:
        peak(1)  # not used: it includes the compiler's trials
    fits = find_max_micro_batch(n_seqs, peak, budget, formula, most)
    model.zero_grad(set_to_none=True)
    torch.cuda.reset_peak_memory_stats()  # discards the peaks of what did not fit
    return fits


def available_memory() -> float:
    """Bytes of the GPU's memory that this process may count on."""
    free, total = torch.cuda.mem_get_info()
    return USABLE * min(free + torch.cuda.memory_reserved(), total * torch.cuda.get_per_process_memory_fraction())


def fit_loss_chunk(chunk: int, vocab_size: int, device: torch.device, compiled: bool) -> int:
    """Tokens whose logits exist at once; 0 = all. A `chunk` of -1 becomes 2,048, or on a GPU more if they fit.

    On a CPU, it becomes 512 for vocabularies whose logits then stay in cache.

    Raises UserError for a chunk with more logits than a kernel's 32-bit index can reach.
    """
    if chunk * vocab_size >= 2**31:
        raise UserError(
            f"--loss_chunk {chunk} times a vocabulary of {vocab_size} is 2**31 or more; use {2**31 // vocab_size - 1} "
            "or less, or -1"
        )
    if chunk >= 0:
        return chunk
    if device.type != "cuda":
        return 512 if device.type == "cpu" and 512 < vocab_size <= 4096 else 2048
    total = torch.cuda.get_device_properties(device).total_memory
    return largest_loss_chunk(vocab_size, total * torch.cuda.get_per_process_memory_fraction(), compiled)


def largest_loss_chunk(vocab_size: int, memory: float, compiled: bool = True) -> int:
    """For a GPU with this many bytes: larger matmuls are faster, and the head's gradient is accumulated less often.

    2,048 to 16,384 tokens, so that (beyond 2,048) logits and their gradient, in 16 bits, with the fp32 copies that
    uncompiled code makes of them, take at most a seventh of the memory.
    """
    bytes_per_logit = 4 if compiled else 16
    return max(2048, min(16384, 2 ** int(math.log2(max(1, memory / 7 / (bytes_per_logit * vocab_size))))))


def agreed_peak(probe, micro_batch: int, n_sharded: int, dist_ctx: DistContext) -> float:
    """Peak bytes of probe(micro_batch), the maximum over ranks; infinite when one ran out of memory.

    With sharded weights (`n_sharded`: sequences per step) that raises UserError on every rank instead: the other GPUs
    wait for that rank's shards. The ranks agree over the CPU, which waits for no GPU.
    """
    try:
        used = probe(micro_batch)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        used = math.inf
    used = dist_max(dist_ctx, used)
    if n_sharded and used == math.inf:
        less = "--checkpointing full, or shard over more ranks"
        if micro_batch > 1:
            less = f"--micro_batch {largest_divisor(n_sharded, micro_batch // 2)}"
        raise UserError(f"a rank ran out of memory in trying {micro_batch} sequences at once; give {less}")
    return used


def find_max_micro_batch(n_seqs: int, peak, budget: float, formula=lambda n: 0, most: int = 0) -> int:
    """A large divisor of n_seqs, `most` at most, whose peak(micro_batch) is within budget; only what is predicted to
    fit is measured.

    A prediction is formula(micro_batch), which accounts for what saturates, plus its error, extrapolated linearly from
    the last two measurements. What does not fit after all is halved. Raises DoesNotFit when not even one sequence
    fits.
    """
    one = peak(1)
    if one > budget:
        needed = f"needs {one / 2**30:.1f} GiB, of" if one < math.inf else "needs more than the"
        raise DoesNotFit(
            f"one sequence {needed} {max(0.0, budget) / 2**30:.1f} GiB available on this device; "
            "leave --checkpointing at auto, add --offload optimizer, or use a smaller --seq_len or model"
        )
    most = min(most or n_seqs, n_seqs)
    low, high = 1, min(2, most)
    at_low, at_high = one - formula(low), (peak(high) if high > 1 else one) - formula(high)
    fits = high if n_seqs % high == 0 and at_high + formula(high) <= budget else 1
    while True:
        slope = (at_high - at_low) / (high - low) if high > low else 0.0
        predicted = {n: at_low + slope * (n - low) + formula(n) for n in range(1, most + 1) if n_seqs % n == 0}
        candidate = max((n for n in predicted if predicted[n] <= budget), default=1)
        if candidate <= fits:
            return fits
        used = peak(candidate)
        if used > budget:
            most = max(fits, candidate // 2)
        else:
            (low, at_low), (high, at_high), fits = (high, at_high), (candidate, used - formula(candidate)), candidate
