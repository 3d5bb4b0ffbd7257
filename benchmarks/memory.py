"""`bench.py memory`: weights, gradients, optimizer state and activations, by formula and measured."""

import math
from collections import deque

import torch
from torch import Tensor

from benchmarks.harness import (
    Bench,
    CaseFailed,
    Worker,
    build_state,
    measure_memory,
    progress,
    table,
    tokenizer_size,
)
from data.shards import UserError
from model import GPT, Optimizer, optimizer_groups
from ops import query_blocks
from runtime.checks import largest_divisor
from runtime.dtype import settle_dtype
from runtime.launch import DTYPES, peak_memory_mb, select_device
from runtime.memory import fit_loss_chunk
from runtime.ranks import DistContext
from train_gpt import TrainState, gpt_config, learning_rates, make_config, select_attn_backend, train_step


def block_tensors(state: TrainState) -> dict[str, int]:
    """Bytes that one block's forward pass saves for backward without checkpointing, of each kind of tensor.

    For an eager step without windows or documents.
    """
    model, size = state.raw_model.cfg, state.raw_model.compute_dtype.itemsize
    tokens = state.micro_batch * state.cfg.seq_len
    numbers = tokens * model.n_embd
    kept = {
        "outputs of the two norms": 2 * numbers * size,
        "rotated queries and keys": 2 * numbers * size,
        "output of attention": numbers * size,
        "inside of the MLP": 4 * numbers * size,
        "its squared ReLU": 4 * numbers * size,
    }
    if keeps_normalized(state):
        kept["normalized queries and keys"] = 2 * numbers * size
        kept["scales of the norms"] = 4 * tokens * (2 + 2 * model.n_head)
    else:
        kept["inputs of the two norms"] = 2 * numbers * size
    if state.raw_model.attn == "blocked":
        kept["values"] = numbers * size
        scores = sum((end - start) * end for start, end in query_blocks(state.cfg.seq_len))
        kept["probabilities of attention"] = state.micro_batch * model.n_head * scores * size
    else:
        kept["queries, keys and values"] = 3 * numbers * size
    return kept


def keeps_normalized(state: TrainState) -> bool:
    """Whether norms keep what they put out, as ours does on a CPU, and not what they got."""
    return state.dist_ctx.device.type == "cpu"


def checkpointed_tensors(state: TrainState) -> dict[str, int]:
    """The same, with --checkpointing."""
    numbers = state.micro_batch * state.cfg.seq_len * state.raw_model.cfg.n_embd
    size = state.raw_model.compute_dtype.itemsize
    if state.cfg.checkpointing == "none":
        return block_tensors(state)
    kept = {"input of the block": numbers * size}
    if state.cfg.checkpointing == "selective":  # what matmuls and attention put out
        kept |= {
            "queries, keys and values": 3 * numbers * size,
            "output of attention": numbers * size,
            "its projection": numbers * size,
            "inside of the MLP": 4 * numbers * size,
            "output of the MLP": numbers * size,
        }
    return kept


def saved_tensors(state: TrainState) -> dict[str, int]:
    """Bytes that a micro-step's forward pass keeps for backward, of each kind of tensor."""
    cfg, model, size = state.cfg, state.raw_model.cfg, state.raw_model.compute_dtype.itemsize
    numbers = state.micro_batch * cfg.seq_len * model.n_embd
    saved = {f"blocks: {name}": model.n_layer * size for name, size in checkpointed_tensors(state).items()}
    first = cfg.checkpointing == "none" or not keeps_normalized(state)  # else it is the input of the first block
    saved["first and last norm"] = (1 + first) * numbers * size
    if state.raw_model.loss_chunk:
        saved["gradient of the head's input"] = numbers * size  # both of the head's gradients are made early
        saved["gradient of the head's weight"] = 4 * model.vocab_size * model.n_embd
    else:
        saved["input of the head"] = 0 if keeps_normalized(state) else numbers * size
        saved["soft-capped logits and log-probabilities"] = 2 * logits_bytes(state)
    if size < 4 and cfg.checkpointing == "none":
        saved["blocks' weights, cast"] = size * sum(p.numel() for p in state.raw_model.blocks.parameters())
    return saved


def logits_bytes(state: TrainState) -> int:
    """Bytes of the fp32 logits that exist at once."""
    tokens = min(state.raw_model.loss_chunk or math.inf, state.micro_batch * state.cfg.seq_len)
    return 4 * tokens * state.raw_model.cfg.vocab_size


def transient_bytes(state: TrainState) -> int:
    """Bytes at the peak beyond what is kept: the loss at work, or a block recomputed, with the gradients inside it."""
    size = state.raw_model.compute_dtype.itemsize
    numbers = state.micro_batch * state.cfg.seq_len * state.raw_model.cfg.n_embd
    recomputed = sum(block_tensors(state).values()) - sum(checkpointed_tensors(state).values())
    inside = recomputed + (5 if keeps_normalized(state) else 10) * numbers * size
    logits = logits_bytes(state)
    if state.raw_model.loss_chunk:
        return max(inside, logits * (size + 16) // 4)
    return max(inside - 2 * logits, 2 * logits)


def memory_formula(state: TrainState) -> dict[str, int]:
    """Bytes of a step by counting: weights, gradients, optimizer state, activations kept for backward, transient."""
    weights = sum(p.numel() for p in state.raw_model.parameters())
    adam = sum(p.numel() for g in state.optimizer.param_groups if g["kind"] == "adam" for p in g["params"])
    return dict(
        weights=4 * weights, gradients=4 * weights, optimizer=4 * (weights + adam),
        activations=sum(saved_tensors(state).values()), transient=transient_bytes(state),
    )  # fmt: skip


def fsdp_formula(state: TrainState, n_ranks: int) -> dict[str, int]:
    """The same on each of so many ranks under FSDP, which keep embeddings and head whole from forward to backward."""
    parts, model, size = memory_formula(state), state.raw_model, state.raw_model.compute_dtype.itemsize
    block = sum(p.numel() for p in model.blocks[0].parameters())
    rest = sum(p.numel() for p in model.parameters()) - block * len(model.blocks)
    whole = {"whole weights": 0 if n_ranks == 1 else size * (rest + 2 * block)}  # a block at work, and the next one
    sharded = {part: parts[part] // n_ranks for part in ("weights", "gradients", "optimizer")}
    return parts | sharded | whole


def planned_state(flags: dict) -> TrainState:
    """A state without memory behind its tensors, for formulas."""
    cfg = make_config(**flags)
    dist_ctx = DistContext(select_device(cfg.device))
    settle_dtype(cfg, dist_ctx)
    with torch.device("meta"):
        attn = select_attn_backend(cfg, dist_ctx.device)
        shape = gpt_config(cfg, tokenizer_size(cfg))
        chunk = fit_loss_chunk(cfg.loss_chunk, shape.vocab_size, dist_ctx.device)
        model = GPT(shape, DTYPES[cfg.dtype], chunk, attn=attn)
    optimizer = Optimizer(optimizer_groups(model, cfg.optimizer, *learning_rates(cfg), cfg.weight_decay))
    return TrainState(cfg, dist_ctx, model, model, optimizer, None, cfg.micro_batch or 1, deque())


def plan_ranks(bench: Bench) -> dict:
    """Bytes per rank of 1, 2, 4 and 8 ranks under FSDP, by formula."""
    state, rows = planned_state(bench.flags), []
    for ranks in (1, 2, 4, 8):
        parts = fsdp_formula(state, ranks)
        rows.append(dict(ranks=ranks, total=sum(parts.values()) / 2**30) | {k: v / 2**30 for k, v in parts.items()})
    columns = {"ranks": ("ranks", "d")} | {part: (part, ".2f") for part in (*parts, "total")}
    note = (
        f"GiB per rank under FSDP by formula: {state.cfg.preset}, {state.cfg.dtype}, --checkpointing "
        f"{state.cfg.checkpointing}, {state.micro_batch} sequences of {state.cfg.seq_len} at once."
    )
    print(table("Memory per rank", rows, columns, (note,)))
    return dict(memory=rows)


def memory_case(flags: dict):
    """Yields bytes by formula and measured, of a step with gradients there (the second micro-step and later ones)."""
    state, batch = build_state(flags)
    device, batch = state.dist_ctx.device, batch[: state.micro_batch]
    train_step(state, batch.repeat(state.grad_accum_steps, 1), 1.0)
    for p in state.raw_model.parameters():
        p.grad = torch.zeros_like(p)

    def forward() -> Tensor:
        return state.model(batch[:, :-1], batch[:, 1:]) / batch[:, 1:].numel()

    forward().backward()
    activations, _, loss = measure_memory(device, forward)
    loss.backward()
    del loss
    _, peak, _ = measure_memory(device, lambda: forward().backward())
    parts = dict(
        weights=sum(p.nbytes for p in state.raw_model.parameters()),
        gradients=sum(p.grad.nbytes for p in state.raw_model.parameters()),
        optimizer=sum(t.nbytes for slots in state.optimizer.state.values() for t in slots.values()),
    )
    total = sum(parts.values()) + peak
    parts |= dict(activations=activations, transient=peak - activations)
    yield dict(formula=memory_formula(state), measured=parts, peak=total,
               resident_mb=peak_memory_mb(torch.device("cpu")))  # fmt: skip


def measure_mode(bench: Bench, mode: str, micro_batch: int) -> list[dict]:
    """The rows of one checkpointing mode."""
    with Worker(bench, memory_case, {**bench.flags, "checkpointing": mode, "micro_batch": micro_batch}) as worker:
        try:
            facts = worker.request()
        except CaseFailed as error:
            return [dict(checkpointing=mode, note=str(error))]
    parts = {part: (facts["formula"][part], facts["measured"][part]) for part in facts["formula"]}
    parts["total at peak"] = sum(facts["formula"].values()), facts["peak"]
    rows = [
        dict(checkpointing=mode, part=part, formula_mb=formula / 2**20, measured_mb=measured / 2**20,
             differs=formula / measured - 1)
        for part, (formula, measured) in parts.items()
    ]  # fmt: skip
    rows[-1]["resident_mb"] = facts["resident_mb"]
    progress(f"{mode}: {facts['peak'] / 2**20:,.0f} MiB at the peak")
    return rows


def bench_memory(bench: Bench) -> dict:
    """Weights, gradients, optimizer state, activations: by formula and measured, per checkpointing mode.

    With --parallel fsdp: by formula only, per rank.
    """
    if bench.flags.get("parallel") == "fsdp":
        return plan_ranks(bench)
    bench.reject_flags("checkpointing", "compile", "offload", "parallel")
    if bench.device.type == "mps":
        raise UserError("memory cannot be read on MPS; use --device cpu or a CUDA device")
    cfg = make_config(**bench.flags)  # the same micro-batch in all modes:
    micro_batch = cfg.micro_batch or largest_divisor(cfg.batch_tokens // cfg.seq_len, 8192 // cfg.seq_len)
    rows = [row for mode in ("none", "selective", "full") for row in measure_mode(bench, mode, micro_batch)]
    columns = {
        "checkpointing": ("checkpointing", ""), "part": ("part", ""), "formula_mb": ("formula", ",.1f"),
        "measured_mb": ("measured", ",.1f"), "differs": ("error", "+.0%"),
        "resident_mb": ("process RSS", ",.0f"), "note": ("", ""),
    }  # fmt: skip
    note = (
        f"MiB, of a micro-step of {micro_batch} sequences while gradients are there. Transient is what the peak holds "
        "besides: a recomputed block, gradients of activations, logits. Error: of the formula, against the measurement."
    )
    print(table("Memory", rows, columns, (note,)))
    return dict(memory=rows)
