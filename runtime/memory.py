"""How many sequences fit: the micro-batch that a device's memory allows, found by measuring."""

import math

import torch

from data.shards import UserError
from ops import dummy_micro_step
from runtime.checks import largest_divisor
from runtime.ranks import DistContext, dist_max


def fit_micro_batch(model: torch.nn.Module, n_seqs: int, seq_len: int, optimizer_bytes: int, cudagraphs: bool,
                    dist_ctx: DistContext) -> int:  # fmt: skip
    """The sequences of a micro-step: on a GPU as many as fit; elsewhere those of 8,192 tokens, as more are no faster.

    n_seqs: those of a step, which the result divides. optimizer_bytes: what the optimizer will need on the device.
    Raises UserError when not even one fits.
    """
    if dist_ctx.device.type != "cuda":
        return largest_divisor(n_seqs, 8192 // seq_len)

    def probe(micro_batch: int) -> float:
        torch.cuda.reset_peak_memory_stats()
        dummy_micro_step(model, micro_batch, seq_len, cudagraphs)
        return torch.cuda.max_memory_allocated()

    def peak(micro_batch: int) -> float:
        used = agreed_peak(probe, micro_batch, n_seqs if hasattr(model, "reshard") else 0, dist_ctx)  # FSDP
        torch.cuda.empty_cache()
        return used

    for p in model.parameters():
        p.grad = torch.zeros_like(p)  # as they are there in all micro-steps but the first
    free, total = torch.cuda.mem_get_info()
    budget = 0.92 * min(free + torch.cuda.memory_reserved(), total * torch.cuda.get_per_process_memory_fraction())
    fits = find_max_micro_batch(n_seqs, peak, -dist_max(dist_ctx, optimizer_bytes - budget))
    model.zero_grad(set_to_none=True)
    return fits


def fit_loss_chunk(chunk: int, vocab_size: int, device: torch.device) -> int:
    """Tokens whose logits exist at once; 0 = all. A `chunk` of -1 is replaced: 2,048, or on a GPU more, as fits.

    There larger matmuls are faster, and the head's gradient is added up more rarely: up to 16,384 tokens, as long as
    logits and their gradient, in 16 bits, take a seventh of the memory at most. Raises UserError for a chunk of more
    numbers than a kernel's 32-bit index reaches.
    """
    if chunk * vocab_size >= 2**31:
        raise UserError(
            f"--loss_chunk {chunk} times a vocabulary of {vocab_size} is 2**31 or more; use {2**31 // vocab_size - 1} "
            "or less, or -1"
        )
    if chunk >= 0:
        return chunk
    if device.type != "cuda":
        return 2048
    fits = torch.cuda.get_device_properties(device).total_memory / 7 / (4 * vocab_size)
    return max(2048, min(16384, 2 ** int(math.log2(max(1, fits)))))


def agreed_peak(probe, micro_batch: int, n_sharded: int, dist_ctx: DistContext) -> float:
    """Bytes at the peak of probe(micro_batch), the largest of the ranks; infinite when one ran out of memory.

    Raises UserError for that, on every rank, when `n_sharded` sequences a step are trained on sharded weights: the
    other GPUs then wait for the shards of that rank. The ranks agree on the CPU, which waits for no GPU.
    """
    try:
        used = probe(micro_batch)
    except torch.OutOfMemoryError:
        used = math.inf
    used = dist_max(dist_ctx, used)
    if n_sharded and used == math.inf:
        less = "--checkpointing full, or shard over more ranks"
        if micro_batch > 1:
            less = f"--micro_batch {largest_divisor(n_sharded, micro_batch // 2)}"
        raise UserError(f"a rank ran out of memory in trying {micro_batch} sequences at once; give {less}")
    return used


def find_max_micro_batch(n_seqs: int, peak, budget: float) -> int:
    """A large divisor of n_seqs whose peak(micro_batch) is within budget, by measuring what is predicted to fit.

    Each prediction is a line through the last two measurements; what does not fit after all is halved. Raises UserError
    when not even one sequence fits.
    """
    one = peak(1)
    if one > budget:
        raise UserError(
            f"one sequence needs {one / 2**30:.1f} GiB, of {budget / 2**30:.1f} GiB available on this device; "
            "use a smaller --seq_len or a smaller model"
        )
    (low, at_low), (high, at_high), most = (1, one), (min(2, n_seqs), peak(min(2, n_seqs))), n_seqs
    fits = high if n_seqs % high == 0 and at_high <= budget else 1
    while True:
        predicted = low + (budget - at_low) * (high - low) / (at_high - at_low) if at_high > at_low else most
        candidate = largest_divisor(n_seqs, min(predicted, most))
        if candidate <= fits:
            return fits
        used = peak(candidate)
        if used > budget:
            most = candidate // 2
        else:
            (low, at_low), (high, at_high), fits = (high, at_high), (candidate, used), candidate
