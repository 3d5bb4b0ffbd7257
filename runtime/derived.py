"""Values derived from the flags that several modules need. `f` has the flags as attributes."""

import math

from data.shards import UserError
from runtime.ranks import DistContext

AC_MODES = ("none", "selective", "full")

MANY_EPOCHS = 6  # with n-grams, more gave no lower loss on three small texts, at any size (docs/rates.md)


def activation_budget(f) -> float:
    """The fraction of activation memory that --checkpointing leaves the compiler; 1 for its modes, nan for nonsense."""
    if f.checkpointing in ("auto", *AC_MODES):
        return 1.0
    try:
        return float(f.checkpointing)
    except ValueError:
        return math.nan


def lr_cap(f) -> float:
    """The multiple of the learning rates that --schedule_from allows at most; nan for nonsense."""
    try:
        return 1.0 if f.schedule_from in ("start", "here") else float(f.schedule_from)
    except ValueError:
        return math.nan


def uses_cudagraphs(f) -> bool:
    """Whether this --compile mode replays CUDA graphs on a GPU; the modes are treated alike on a CPU."""
    return f.compile in ("reduce-overhead", "max-autotune")


def uses_ngrams(f) -> bool:
    """Whether n-grams have embeddings; -1 leaves their length to the tokenizer."""
    return f.ngram not in (0, 1)


def is_sharded(f) -> bool:
    """Whether each rank holds a part of the weights only."""
    return f.parallel in ("fsdp", "hsdp")


def largest_divisor(n: int, most: int) -> int:
    """The largest divisor of n that is at most `most`; at least 1."""
    return max(m for i in range(1, math.isqrt(n) + 1) if n % i == 0 for m in (i, n // i) if m <= max(1, most))


def ranks_per_copy(f, dist_ctx: DistContext) -> int:
    """The ranks that share one copy of the weights. Raises UserError when they do not divide the world."""
    world_size = dist_ctx.world_size
    if f.parallel != "hsdp":
        return world_size if is_sharded(f) else 1
    shard_size = f.shard_size or dist_ctx.local_world_size
    if world_size % shard_size:
        raise UserError(
            f"--shard_size {shard_size}{'' if f.shard_size else ', the ranks of a node,'} does not divide the "
            f"{world_size} ranks; use --shard_size {largest_divisor(world_size, shard_size)}, or --parallel fsdp"
        )
    return shard_size


def seqs_per_rank(f, world_size: int) -> int:
    """Sequences that each rank takes per step. Raises UserError when the ranks cannot share the batch evenly."""
    n_seqs, micro_batch = f.batch_tokens // f.seq_len, f.micro_batch or 1
    can = [ranks for ranks in range(1, 2 * world_size) if n_seqs % (ranks * micro_batch) == 0]
    or_ranks = f"or {' or '.join(map(str, can[-4:]))} ranks" if can else "or another --batch_tokens"
    if n_seqs % world_size:
        near = max(1, round(n_seqs / world_size)) * world_size * f.seq_len
        raise UserError(
            f"--batch_tokens {f.batch_tokens} is {n_seqs} sequences of {f.seq_len}, which {world_size} ranks cannot "
            f"share evenly; use --batch_tokens {near}, {or_ranks}"
        )
    n_seqs //= world_size
    if n_seqs % micro_batch:
        raise UserError(
            f"--micro_batch {micro_batch} does not divide the {n_seqs} sequences that each rank takes per step; "
            f"use --micro_batch {largest_divisor(n_seqs, micro_batch)}, {or_ranks}"
        )
    return n_seqs


def sizes(params: float, given: dict, tokens: float = 0) -> dict:
    """--params: flags for a model with about this many weights in its blocks, and for a run on this many tokens.

    As in GPT-2 small, the width is 64 times the depth. tokens: 0 = 20 per weight (Hoffmann et al. 2022); the batch
    grows with their square root. N-grams help small models most; from 50M weights on there are none. given: flags that
    are fixed, and from which the others follow.
    """
    n_embd = (16 * params / 3) ** (1 / 3)  # where 12 n_layer n_embd**2 weights have n_embd = 64 n_layer
    unit = 64 if n_embd < 480 else 128  # a head
    n_embd = unit * max(1, round(n_embd / unit))
    if "n_layer" not in given and params < 18 * n_embd**2:  # one layer cannot do induction: narrower
        n_embd = max(64, n_embd - unit)
    n_embd = max(1, given.get("n_embd", n_embd))
    n_layer = max(1, given.get("n_layer", round(params / (12 * n_embd**2))))
    head = next((size for size in (128, 64) if n_embd % size == 0), n_embd)
    weights = 12 * n_layer * n_embd**2
    tokens = tokens or 20 * weights
    batch_tokens = 1024 * 2 ** max(0, round(math.log2(8 * (tokens / 8e6) ** 0.5)))
    batch_tokens = max(1, given.get("batch_tokens", batch_tokens))
    has_ngrams = weights < 5e7
    return dict(
        n_layer=n_layer,
        n_embd=n_embd,
        n_head=n_embd // head,
        batch_tokens=batch_tokens,
        max_steps=max(1, round(tokens / batch_tokens)),
        eval_every=250,
        eval_tokens=min(10485760, max(262144, 16 * batch_tokens)),
        ngram=-1 if has_ngrams else 0,
        ngram_rows=(131072 if n_embd <= 256 else 65536) if has_ngrams else 16384,
    )


SIZED = frozenset(sizes(1, {}))  # the flags that --params chooses
