"""`bench.py memory`: weights, gradients, optimizer state and activations, measured, per checkpointing mode."""

import torch

from benchmarks.harness import Bench, build_state, measure, measure_memory, table
from common import largest_divisor
from runtime.device import peak_memory_mb
from runtime.flag_checks import AC_MODES
from train_gpt import make_config, train_step


def memory_case(flags: dict):
    """Yields the MiB of a micro-step's parts, with gradients allocated, as from the second micro-step on."""
    state, _, batch = build_state(flags)
    device, model = state.dist_ctx.device, state.raw_model
    train_step(state, batch, 0.0)
    x, y = batch[: state.micro_batch, :-1].to(device), batch[: state.micro_batch, 1:].to(device)
    state.model(x, y).backward()
    activations, _, loss = measure_memory(device, lambda: state.model(x, y))
    loss.backward()
    del loss
    _, peak, _ = measure_memory(device, lambda: state.model(x, y).backward())
    slots = [t for slots in state.optimizer.state.values() for t in slots.values()]
    parts = dict(
        weights=list(model.parameters()),
        gradients=[p.grad for p in model.parameters()],
        optimizer=slots,
    )
    row = {
        part: sum(t.nbytes for t in tensors if t is not None) / 2**20
        for part, tensors in parts.items()
    }
    row |= dict(activations=activations / 2**20, transient=(peak - activations) / 2**20)
    row["total at peak"] = sum(row.values())
    yield row | {"process RSS": peak_memory_mb(torch.device("cpu"))}


def bench_memory(bench: Bench) -> dict:
    bench.refuse("checkpointing", "compile", "offload", "parallel")
    cfg, rows = make_config(**bench.flags), []  # the same micro-batch in all modes:
    micro_batch = cfg.micro_batch or largest_divisor(
        cfg.batch_tokens // cfg.seq_len, 8192 // cfg.seq_len
    )
    for mode in AC_MODES:
        varied = dict(checkpointing=mode, micro_batch=micro_batch)
        rows.append(varied | measure([(memory_case, bench.flags | varied)], 0)[0])
    note = f"MiB, of a micro-step of {micro_batch} sequences of {cfg.seq_len} with gradients allocated. Transient: the "
    note += "rest of the peak, such as a recomputed block, gradients of activations, logits."
    print(table("Memory", rows, note))
    return dict(memory=rows)
