"""Blocks in groups, compiled by Inductor on a CPU: losses and gradients as one by one and as eager; compilations.

    PYTHONPATH=FOLDER_WITH_THE_PATCH python codegen/groups_check.py
"""

import time

import torch
from torch._dynamo.utils import counters

from conftest import random_gpt
from ops.checkpointing import apply_ac
from ops.compile import apply_compile

idx = torch.randint(70, (2, 24), generator=torch.Generator().manual_seed(0))
targets = idx.roll(-1, 1)
for n_layer, flags, eot, mode in (
    (4, dict(), None, "none"),
    (8, dict(), None, "none"),
    (8, dict(window="SSL:5"), 3, "none"),  # groups of SSLS and SLSS, documents
    (6, dict(window="S:5", compute_dtype=torch.bfloat16), None, "none"),  # two of three
    (4, dict(), None, "full"),
):
    shape = dict(n_layer=n_layer, **flags)
    eager = random_gpt(**shape)
    eager.eot = eot
    want = eager(idx, targets)
    want.backward()
    print(n_layer, flags, f"eot {eot}, checkpointing {mode}: eager loss {want.item():.6f}")
    for most_blocks in (1, 4):
        gpt = random_gpt(**shape)
        gpt.eot = eot
        for block in gpt.blocks:
            apply_ac(block, mode)
        apply_compile(gpt, "default", 1.0, torch.device("cpu"), most_blocks)
        counters.clear()
        began = time.process_time()
        loss = gpt(idx, targets)
        loss.backward()
        n_graphs = counters["stats"]["unique_graphs"]
        took = time.process_time() - began
        with torch.no_grad():
            evaluated = gpt(idx, targets)
        pairs = [*zip(gpt.parameters(), eager.parameters())]
        worst = max(((p.grad - q.grad).norm() / q.grad.norm()).item() for p, q in pairs)
        print(f"  at most {most_blocks}: loss {loss.item():.6f}, evaluated {evaluated.item():.6f}, gradients differ by {worst:.6f}, {n_graphs} graphs, {took:.1f} s", flush=True)
        close = 1e-5 if gpt.compute_dtype == torch.float32 else 2e-3
        assert abs(loss - want) < close and abs(evaluated - want) < close and worst < 30 * close
