"""The memory model: bytes of a training step by formula, and the least activation checkpointing that fits."""

from ops.attention import query_blocks


def block_tensors(model, micro_batch: int, seq_len: int, fused_norms: bool) -> dict[str, int]:
    """Bytes that one block's forward pass saves for backward without checkpointing, of each kind of tensor.

    Without windows or documents. fused_norms: norms save their output instead of their input, as compiled ones do, and
    ours on a CPU.
    """
    cfg, size, tokens = model.cfg, model.compute_dtype.itemsize, micro_batch * seq_len
    numel = tokens * cfg.n_embd
    kept = {
        "outputs of the two norms": 2 * numel * size,
        "rotated queries and keys": 2 * numel * size,
        "output of attention": numel * size,
        "inside of the MLP": 4 * numel * size,
        "its squared ReLU": 4 * numel * size,
    }
    if fused_norms:
        kept["normalized queries and keys"] = 2 * numel * size
        kept["scales of the norms"] = 4 * tokens * (2 + 2 * cfg.n_head)
    else:
        kept["inputs of the two norms"] = 2 * numel * size
    if model.attn_backend == "blocked":
        kept["values"] = numel * size
        scores = sum((end - start) * end for start, end in query_blocks(seq_len))
        kept["probabilities of attention"] = micro_batch * cfg.n_head * scores * size
    else:
        kept["queries, keys and values"] = 3 * numel * size
    if model.attn_backend == "math":
        kept["probabilities of attention"] = micro_batch * cfg.n_head * seq_len**2 * size
    return kept


def checkpointed_tensors(model, mode: str, micro_batch: int, seq_len: int, fused_norms: bool) -> dict[str, int]:
    """The same, with this --checkpointing."""
    numel, size = micro_batch * seq_len * model.cfg.n_embd, model.compute_dtype.itemsize
    if mode == "none":
        return block_tensors(model, micro_batch, seq_len, fused_norms)
    kept = {"input of the block": numel * size}
    if mode == "selective":  # the outputs of matmuls and attention
        kept |= {
            "queries, keys and values": 3 * numel * size,
            "output of attention": numel * size,
            "its projection": numel * size,
            "inside of the MLP": 4 * numel * size,
            "output of the MLP": numel * size,
        }
    return kept


def saved_tensors(model, mode: str, micro_batch: int, seq_len: int, fused_norms: bool) -> dict[str, int]:
    """Bytes that a micro-step's forward pass keeps for backward, of each kind of tensor."""
    cfg, size = model.cfg, model.compute_dtype.itemsize
    numel, kept = (
        micro_batch * seq_len * cfg.n_embd,
        checkpointed_tensors(model, mode, micro_batch, seq_len, fused_norms),
    )
    saved = {f"blocks: {name}": cfg.n_layer * size for name, size in kept.items()}
    first = mode == "none" or not fused_norms  # else it is the input of the first block
    saved["first and last norm"] = (1 + first) * numel * size
    if model.loss_chunk:
        saved["gradient of the head's input"] = numel * size  # both of the head's gradients are made early
        saved["gradient of the head's weight"] = 4 * cfg.vocab_size * cfg.n_embd
    else:
        saved["input of the head"] = 0 if fused_norms else numel * size
        saved["soft-capped logits and log-probabilities"] = 2 * logits_bytes(model, micro_batch * seq_len)
    if size < 4 and mode == "none":
        saved["blocks' weights, cast"] = size * sum(p.numel() for p in model.blocks.parameters())
    return saved


def logits_bytes(model, n_tokens: int) -> int:
    """Bytes of the fp32 logits that exist at once."""
    return 4 * min(model.loss_chunk or n_tokens, n_tokens) * model.cfg.vocab_size


def transient_bytes(model, mode: str, micro_batch: int, seq_len: int, fused_norms: bool, compiled: bool) -> int:
    """Bytes at the peak beyond what is saved: computing the loss, or recomputing a block, with its inner gradients."""
    size, numel = model.compute_dtype.itemsize, micro_batch * seq_len * model.cfg.n_embd
    whole = sum(block_tensors(model, micro_batch, seq_len, fused_norms).values())
    recomputed = whole - sum(checkpointed_tensors(model, mode, micro_batch, seq_len, fused_norms).values())
    inside, logits = recomputed + (5 if fused_norms else 10) * numel * size, logits_bytes(model, micro_batch * seq_len)
    if model.loss_chunk:  # logits and their gradient, three fp32 copies if not compiled, and the head's cast
        cast = size * model.cfg.vocab_size * model.cfg.n_embd if size < 4 else 0
        return max(inside, logits * (2 * size + (0 if compiled else 12)) // 4 + cast)
    return max(inside - 2 * logits, 2 * logits)


def rest_of_block(n_bytes: int) -> int:
    """Bytes lost in a tensor's own block of PyTorch's CUDA allocator, which is rounded up to 2 MiB and not split."""
    rest = -n_bytes % 2**21 if n_bytes >= 10 * 2**20 else 0
    return rest if rest <= 2**20 else 0


def memory_formula(
    model,
    mode: str,
    micro_batch: int,
    seq_len: int,
    optimizer_bytes: int,
    *,
    on_cpu: bool,
    compiled: bool = False,
    n_ranks: int = 1,
) -> dict[str, int]:
    """Bytes of a step by formula: weights, gradients, optimizer state, activations kept for backward, transient.

    optimizer_bytes: on the device, unsharded. n_ranks shard the weights under FSDP; embeddings and head then stay
    gathered from forward to backward, and so are the running block and the next one.
    """
    weights, size, fused_norms = (
        sum(p.numel() for p in model.parameters()),
        model.compute_dtype.itemsize,
        on_cpu or compiled,
    )
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    block = sum(p.numel() for p in model.blocks[0].parameters())
    saved = saved_tensors(model, mode, micro_batch, seq_len, fused_norms)
    if n_ranks > 1:
        saved.pop("blocks' weights, cast", None)  # FSDP gathers them cast, and again for backward
    kept = sum(saved.values())
    # The embeddings' gradient is computed and accumulated last, when no other activation is kept any more
    named = model.named_parameters()
    tables = [p.numel() for name, p in named if name.startswith(("wte.", "ngrams.")) and p.requires_grad]
    rounding = 0  # of weights, gradients and optimizer state
    if not on_cpu and n_ranks == 1:
        copies = 2 + (optimizer_bytes > 0)
        rounding = sum(rest_of_block(4 * p.numel()) * (copies if p.requires_grad else 1) for p in model.parameters())
    parts = dict(
        weights=4 * weights // n_ranks,
        gradients=4 * trained // n_ranks,
        optimizer=optimizer_bytes // n_ranks,
        activations=kept,
        transient=max(
            transient_bytes(model, mode, micro_batch, seq_len, fused_norms, compiled),
            4 * max(tables, default=0) - kept,
        )
        + rounding,
    )
    if n_ranks > 1:
        parts["whole weights"] = size * (weights - block * (len(model.blocks) - 2))
    return parts


def least_checkpointing(
    modes: list[str],
    model,
    micro_batch: int,
    seq_len: int,
    optimizer_bytes: int,
    compiled: bool,
    n_ranks: int,
    available: float,
) -> str:
    """The first of the modes of --checkpointing whose formula is at most `available` bytes; else the last one."""
    for mode in modes:
        parts = memory_formula(
            model, mode, micro_batch, seq_len, optimizer_bytes, on_cpu=False, compiled=compiled, n_ranks=n_ranks
        )
        if sum(parts.values()) <= available:
            break
    return mode
