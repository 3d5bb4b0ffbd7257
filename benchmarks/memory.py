"""`bench.py memory`: the measured memory of the parts of a step, per checkpointing mode."""

from dataclasses import replace
from functools import partial

import torch

from benchmarks.harness import Bench, build_state, measure, measure_memory, table
from ops.parallel import grad_values
from runtime.flag_checks import AC_MODES
from train_gpt import Config, train_step

MIB = 2**20


def memory_case(cfg: Config):
    """Yield the MiB of each part of a micro-step, with gradients allocated."""
    state, _, batch = build_state(cfg)
    device = state.dist_ctx.device
    train_step(state, batch, 0.0)
    x = batch[: state.micro_batch, :-1].to(device)
    y = batch[: state.micro_batch, 1:].to(device)
    state.model(x, y).backward()

    # Forward alone, then forward and backward
    activations, _, loss = measure_memory(device, lambda: state.model(x, y))
    loss.backward()
    del loss
    _, peak, _ = measure_memory(device, lambda: state.model(x, y).backward())

    weights = list(state.raw_model.parameters())
    gradients = [grad_values(p) for p in weights if p.grad is not None]
    state_tensors = []
    for values in state.optimizer.state.values():
        state_tensors += filter(torch.is_tensor, values.values())
    row = dict(
        weights=sum(tensor.nbytes for tensor in weights) / MIB,
        gradients=sum(tensor.nbytes for tensor in gradients) / MIB,
        optimizer=sum(tensor.nbytes for tensor in state_tensors) / MIB,
        activations=activations / MIB,
        transient=(peak - activations) / MIB,
    )
    row["total at peak"] = sum(row.values())
    yield row


def bench_memory(bench: Bench) -> list[dict]:
    """Print the memory of each checkpointing mode, with the same micro-batch."""
    bench.forbid_flags("checkpointing", "compile", "offload", "parallel", "minutes")
    cfg = bench.cfg
    micro_batch = bench.micro_batch(cfg.batch_tokens // cfg.seq_len)
    rows = []
    for mode in AC_MODES:
        varied = dict(checkpointing=mode, micro_batch=micro_batch)
        (row,) = measure([partial(memory_case, replace(cfg, **varied))], 0)
        rows.append(varied | row)
    note = (
        f"MiB in a micro-step of {micro_batch} sequences of {cfg.seq_len} "
        "with gradients allocated. Transient: the rest of the peak, such as a recomputed block, "
        "gradients of activations, and logits."
    )
    print(table("Memory", rows, note))
    return rows
