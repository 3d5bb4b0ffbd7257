"""`bench.py memory`: weights, gradients, optimizer state and activations, by formula and measured."""

import contextlib
import dataclasses
import itertools
import os
import sys

import torch
from torch import Tensor

from benchmarks.harness import (
    COLUMNS,
    Bench,
    build_state,
    measure_interleaved,
    measure_memory,
    progress,
    settle,
    table,
    tokenizer_size,
)
from data.shards import UserError
from model import GPT, optimizer_groups
from runtime.derived import AC_MODES, largest_divisor, ranks_per_copy
from runtime.dtype import resolve_dtype
from runtime.errors import report_error
from runtime.footprint import least_checkpointing, memory_formula
from runtime.launch import DTYPES, peak_memory_mb
from runtime.memory import (
    ENOUGH_TOKENS,
    USABLE,
    DoesNotFit,
    find_max_micro_batch,
    fit_loss_chunk,
    largest_loss_chunk,
    state_bytes,
    update_bytes,
)
from runtime.ranks import DistContext, exit_process
from train_gpt import (
    PRESETS,
    Config,
    build,
    gpt_config,
    learning_rates,
    make_config,
    parse_args,
    select_attn_backend,
    train_step,
)

GB = (8, 16, 24, 40, 80, 141)  # of memory, of the cards in the plan


def planned_model(cfg: Config) -> tuple[GPT, int]:
    """A GPT on the meta device, its loss_chunk still to be set, and the bytes of its optimizer state."""
    with torch.device("meta"):
        attn = select_attn_backend(cfg, torch.device(cfg.device))
        model = GPT(gpt_config(cfg, tokenizer_size(cfg)), DTYPES[cfg.dtype], attn=attn)
    groups = optimizer_groups(model, cfg.optimizer, *learning_rates(cfg), cfg.weight_decay)
    return model, sum(map(state_bytes, groups))


def plan_cards() -> list[dict]:
    """What `auto` chooses for the GPT-2 presets on a GPU of each size, compiled, by formula: a row per preset and card.

    Checkpointing, loss chunk and micro-batch; if nothing else fits, with the optimizer state offloaded to host memory.
    """
    rows = []
    for preset in (name for name in PRESETS if name.startswith("gpt2-")):
        cfg = make_config(preset=preset, dtype="bf16", device="cuda", compile="default", vocab_size=50304)
        model, optimizer_bytes = planned_model(cfg)
        for gb in GB:
            model.loss_chunk = largest_loss_chunk(model.cfg.vocab_size, gb * 10**9)
            row = dict(preset=preset, gb=gb, loss_chunk=model.loss_chunk)
            try:
                row |= dict(offload="none") | plan_card(cfg, model, optimizer_bytes, USABLE * gb * 10**9)
            except DoesNotFit:
                with contextlib.suppress(DoesNotFit):
                    row |= dict(offload="optimizer") | plan_card(cfg, model, 0, USABLE * gb * 10**9)
            rows.append(row)
    return rows


def plan_card(cfg: Config, model: GPT, optimizer_bytes: int, available: float) -> dict:
    """Checkpointing, micro-batch and GiB at the peak, for so many bytes. Raises DoesNotFit."""
    least = -(-ENOUGH_TOKENS // cfg.seq_len)
    mode = least_checkpointing(AC_MODES, model, least, cfg.seq_len, optimizer_bytes, True, 1, available)

    def peak(n: int) -> int:
        return sum(memory_formula(model, mode, n, cfg.seq_len, optimizer_bytes, on_cpu=False, compiled=True).values())

    fits = find_max_micro_batch(cfg.batch_tokens // cfg.seq_len, peak, available, formula=peak)
    return dict(checkpointing=mode, micro_batch=fits, gib=peak(fits) / 2**30)


def card_table(rows: list[dict]) -> str:
    """The plan as a Markdown table: a row a preset, a column a card."""
    lines = ["| Preset | " + " | ".join(f"{gb} GB" for gb in GB) + " |", "| --- |" + " --- |" * len(GB)]
    for preset, cards in itertools.groupby(rows, lambda row: row["preset"]):
        cells = [f"`{preset}`"]
        for row in cards:
            offload = ", offload" if row.get("offload") == "optimizer" else ""
            found = f"{row['micro_batch']}, {row['checkpointing']}, {row['loss_chunk']:,}" if "gib" in row else "-"
            cells.append(found + offload)
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def plan_ranks(bench: Bench) -> dict:
    """Bytes per rank of 1, 2, 4 and 8 ranks under FSDP, by formula."""
    device, rows = bench.device, []
    cfg = make_config(**bench.flags | dict(device=device.type))
    cfg = dataclasses.replace(cfg, dtype=resolve_dtype(cfg, DistContext(device))[0])
    micro_batch = cfg.micro_batch or 1
    model, optimizer_bytes = planned_model(cfg)
    model.loss_chunk = fit_loss_chunk(cfg.loss_chunk, model.cfg.vocab_size, device, cfg.compile != "off")
    mode = cfg.checkpointing if cfg.checkpointing in AC_MODES else "none"
    where = dict(on_cpu=device.type == "cpu", compiled=cfg.compile != "off")
    for ranks in (1, 2, 4, 8):
        parts = memory_formula(model, mode, micro_batch, cfg.seq_len, optimizer_bytes, n_ranks=ranks, **where)
        rows.append({"ranks": ranks, "total": sum(parts.values()) / 2**30} | {k: v / 2**30 for k, v in parts.items()})
    columns = {part: (part, ".2f") for part in (*parts, "total")}
    note = (
        f"GiB per rank under FSDP by formula: {cfg.preset}, {cfg.dtype}, --checkpointing {mode}, {micro_batch} "
        f"sequences of {cfg.seq_len} at once."
    )
    print(table("Memory per rank", rows, ["ranks", *columns], note, COLUMNS | columns))
    return dict(memory=rows)


def memory_case(flags: dict):
    """Yields bytes by formula and measured, of a step with gradients allocated (from the second micro-step on)."""
    state, batch = build_state(flags)
    device, batch = state.dist_ctx.device, batch[: state.micro_batch]
    train_step(state, batch.repeat(state.grad_accum_steps, 1), 1.0)
    params = list(state.raw_model.parameters())
    for p in params:
        p.grad = torch.zeros_like(p)

    def forward() -> Tensor:
        return state.model(batch[:, :-1], batch[:, 1:]) / batch[:, 1:].numel()

    forward().backward()
    activations, _, loss = measure_memory(device, forward)
    loss.backward()
    del loss
    _, peak, _ = measure_memory(device, lambda: forward().backward())
    measured = {
        "weights": sum(p.nbytes for p in params),
        "gradients": sum(p.grad.nbytes for p in params),
        "optimizer": sum(t.nbytes for slots in state.optimizer.state.values() for t in slots.values()),
        "activations": activations,
        "transient": peak - activations,
    }
    cfg, on_cpu = state.cfg, device.type == "cpu"
    shape = (state.raw_model, cfg.checkpointing, state.micro_batch, cfg.seq_len, measured["optimizer"])
    resident_mb = peak_memory_mb(torch.device("cpu"))
    yield dict(formula=memory_formula(*shape, on_cpu=on_cpu), measured=measured, resident_mb=resident_mb)


def measure_mode(bench: Bench, mode: str, micro_batch: int) -> list[dict]:
    """The rows of one checkpointing mode."""
    facts, flags = {}, {**bench.flags, "checkpointing": mode, "micro_batch": micro_batch}
    measure_interleaved(bench, [facts], [(memory_case, flags)], 0)
    if "note" in facts:
        return [dict(checkpointing=mode, note=facts["note"])]
    rows, (formulas, measured) = [], (facts["formula"], facts["measured"])
    for parts in (formulas, measured):
        parts["total at peak"] = sum(parts.values())
    for part, formula in formulas.items():
        row = dict(checkpointing=mode, part=part, formula_mb=formula / 2**20, measured_mb=measured[part] / 2**20)
        rows.append(row | dict(differs=formula / measured[part] - 1))
    rows[-1]["resident_mb"] = facts["resident_mb"]
    progress(f"{mode}: {rows[-1]['measured_mb']:,.0f} MiB at the peak")
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
    note = (
        f"MiB, of a micro-step of {micro_batch} sequences with gradients allocated. Transient: the rest of the peak, "
        "such as a recomputed block, gradients of activations, logits. Error: the formula against the measurement."
    )
    print(table("Memory", rows, "checkpointing part formula_mb measured_mb differs resident_mb note".split(), note))
    return dict(memory=rows)


def measure_card(cfg: Config) -> str:
    """What a run with these flags takes on the GPU at hand, and its peak after two steps of two micro-steps, in GiB."""
    cfg, dist_ctx = settle(cfg)
    if dist_ctx.device.type != "cuda":
        raise UserError(f"this measures a GPU's memory, and this is {dist_ctx.device.type}; use `bench.py memory`")
    state = build(cfg, dist_ctx, tokenizer_size(cfg))
    model, batch = state.raw_model, torch.zeros((2 * state.micro_batch, cfg.seq_len + 1), dtype=torch.int64)
    for _ in range(2):
        train_step(state, batch.pin_memory(), 1.0)
    optimizer_bytes = update_bytes(cfg, state.optimizer.param_groups, dist_ctx.world_size)
    mode, compiled = model.blocks[0].checkpointing, cfg.compile != "off"
    shape = (model, mode, state.micro_batch, cfg.seq_len, optimizer_bytes)
    ranks = ranks_per_copy(cfg, dist_ctx)
    formula = sum(memory_formula(*shape, on_cpu=False, compiled=compiled, n_ranks=ranks).values())
    peak, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    return (
        f"{cfg.preset} on {torch.cuda.mem_get_info()[1] / 1e9:.0f} GB: {state.micro_batch}, {mode}, "
        f"{model.loss_chunk:,}; {peak / 2**30:.2f} GiB allocated, {reserved / 2**30:.2f} reserved, "
        f"{formula / 2**30:.2f} by formula ({formula / peak - 1:+.1%})"
    )


def main(argv: list[str]) -> int:
    """Without flags the table, else what a run with these takes on the GPU at hand. Returns the exit code."""
    try:
        flags = parse_args(argv)
        said = measure_card(make_config(**flags)) if flags else card_table(plan_cards())
    except Exception as error:
        return report_error(error)
    if os.environ.get("RANK", "0") == "0":
        print(said)
    return 0


if __name__ == "__main__":
    exit_process(main(sys.argv[1:]))
