"""`bench.py memory`: weights, gradients, optimizer state and activations, by formula and measured."""

import contextlib
import itertools

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
from model import GPT, optimizer_groups
from runtime.checks import AC_MODES, largest_divisor
from runtime.dtype import settle_dtype
from runtime.footprint import least_checkpointing, memory_formula
from runtime.launch import DTYPES, peak_memory_mb, select_device
from runtime.memory import (
    ENOUGH_TOKENS,
    USABLE,
    DoesNotFit,
    find_max_micro_batch,
    fit_loss_chunk,
    largest_loss_chunk,
    state_bytes,
)
from runtime.ranks import DistContext
from train_gpt import PRESETS, Config, gpt_config, learning_rates, make_config, select_attn_backend, train_step

GB = (8, 16, 24, 40, 80, 141)  # of memory, of the cards in the plan


def planned_model(cfg: Config) -> tuple[GPT, int]:
    """A GPT without memory behind its tensors, still without its loss_chunk, and the bytes of its optimizer's state."""
    with torch.device("meta"):
        attn = select_attn_backend(cfg, torch.device(cfg.device))
        model = GPT(gpt_config(cfg, tokenizer_size(cfg)), DTYPES[cfg.dtype], attn=attn)
    groups = optimizer_groups(model, cfg.optimizer, *learning_rates(cfg), cfg.weight_decay)
    return model, sum(map(state_bytes, groups))


def plan_cards() -> list[dict]:
    """What presets of GPT-2's sizes train with on a GPU of each size, compiled, by formula: a row a preset and card.

    `auto`'s checkpointing, loss chunk and micro-batch; where only that fits, with the optimizer's state in host memory.
    """
    rows = []
    for preset in (name for name in PRESETS if name.startswith("gpt2-")):
        cfg = make_config(preset=preset, dtype="bf16", device="cuda", compile="default", vocab_size=50304)
        (model, optimizer_bytes), n_seqs = planned_model(cfg), cfg.batch_tokens // cfg.seq_len
        rows += [plan_card(preset, gb, cfg, model, optimizer_bytes, n_seqs) for gb in GB]
    return rows


def plan_card(preset: str, gb: int, cfg: Config, model: GPT, optimizer_bytes: int, n_seqs: int) -> dict:
    """A row of plan_cards; without `gib` where nothing fits."""
    model.loss_chunk, available = largest_loss_chunk(model.cfg.vocab_size, gb * 10**9), USABLE * gb * 10**9
    least = -(-ENOUGH_TOKENS // cfg.seq_len)
    for offload, kept in (("none", optimizer_bytes), ("optimizer", 0)):
        mode = least_checkpointing(AC_MODES, model, least, cfg.seq_len, kept, True, 1, available)

        def peak(n: int, mode=mode, kept=kept) -> int:
            return sum(memory_formula(model, mode, n, cfg.seq_len, kept, on_cpu=False, compiled=True).values())

        with contextlib.suppress(DoesNotFit):
            fits = find_max_micro_batch(n_seqs, peak, available)
            return dict(preset=preset, gb=gb, offload=offload, checkpointing=mode, loss_chunk=model.loss_chunk,
                        micro_batch=fits, gib=peak(fits) / 2**30)  # fmt: skip
    return dict(preset=preset, gb=gb)


def plan_ranks(bench: Bench) -> dict:
    """Bytes per rank of 1, 2, 4 and 8 ranks under FSDP, by formula."""
    cfg, rows = make_config(**bench.flags), []
    device, micro_batch = select_device(cfg.device), cfg.micro_batch or 1
    cfg.device = device.type
    settle_dtype(cfg, DistContext(device))
    (model, optimizer_bytes), mode = planned_model(cfg), cfg.checkpointing if cfg.checkpointing in AC_MODES else "none"
    model.loss_chunk = fit_loss_chunk(cfg.loss_chunk, model.cfg.vocab_size, device)
    for ranks in (1, 2, 4, 8):
        parts = memory_formula(model, mode, micro_batch, cfg.seq_len, optimizer_bytes, on_cpu=device.type == "cpu",
                               compiled=cfg.compile != "off", n_ranks=ranks)  # fmt: skip
        rows.append(dict(ranks=ranks, total=sum(parts.values()) / 2**30) | {k: v / 2**30 for k, v in parts.items()})
    columns = {"ranks": ("ranks", "d")} | {part: (part, ".2f") for part in (*parts, "total")}
    note = (
        f"GiB per rank under FSDP by formula: {cfg.preset}, {cfg.dtype}, --checkpointing {mode}, {micro_batch} "
        f"sequences of {cfg.seq_len} at once."
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
    formula = memory_formula(
        state.raw_model, state.cfg.checkpointing, state.micro_batch, state.cfg.seq_len, parts["optimizer"],
        on_cpu=device.type == "cpu",
    )  # fmt: skip
    yield dict(formula=formula, measured=parts, peak=total,
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


def card_table(rows: list[dict]) -> str:
    """The plan as a Markdown table: a row a preset, a column a card."""
    lines = ["| Preset | " + " | ".join(f"{gb} GB" for gb in GB) + " |", "| --- |" + " --- |" * len(GB)]
    for preset, found in itertools.groupby(rows, lambda row: row["preset"]):
        cells = [f"{row['micro_batch']}, {row['checkpointing']}, {row['loss_chunk']:,}"
                 + (", offload" if row["offload"] == "optimizer" else "") if "gib" in row else "-"
                 for row in found]  # fmt: skip
        lines.append(f"| `{preset}` | " + " | ".join(cells) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(card_table(plan_cards()))
