"""`bench.py scaling`: weak and strong scaling over 1, 2, 4, ... ranks of this machine, or over torchrun's ranks."""

import contextlib
import json
import math
import os
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.harness import (
    Bench,
    build_state,
    median_min_max,
    progress,
    run_python,
    table,
    timed,
)
from common import TrainerError, largest_divisor
from runtime.device import cpu_cores, peak_memory_mb
from runtime.sources import REPO
from train_gpt import make_config, train_step


def measure_ranks(bench: Bench) -> dict:
    """A row of these ranks' steps, those of DDP interleaved with some whose gradients are not reduced."""
    state, _, batch = build_state(bench.flags)
    device, barrier = state.dist_ctx.device, dist.barrier if dist.is_initialized() else int
    row = {"ranks": state.dist_ctx.world_size, "tokens/step": state.cfg.batch_tokens}
    contexts = [contextlib.nullcontext, *filter(None, [getattr(state.model, "no_sync", None)])]

    def step(context) -> float:
        with context():
            barrier()
            return timed(device, lambda: (train_step(state, batch, 0.0), barrier()))[0]

    seconds = [[step(context) for context in contexts] for _ in range(bench.repeats + 2)][2:]
    row |= median_min_max([1000 * took[0] for took in seconds], "ms/step")
    if len(contexts) > 1:
        row |= median_min_max(
            [100 * (1 - quiet / full) for full, quiet in seconds], "exposed all-reduce, % of step"
        )
    return row | {
        "tokens/s": 1000 * row["tokens/step"] / row["ms/step"],
        "peak MiB per rank": peak_memory_mb(device),
    }


def bench_scaling(bench: Bench) -> dict | None:
    """Strong and weak scaling over ranks on this machine; under torchrun, of its ranks: None but on rank 0."""
    if "WORLD_SIZE" in os.environ:
        row = {"Config": "as given"} | measure_ranks(
            bench
        )  # which frees DDP before its group; else it would hang
        if dist.is_initialized():
            dist.destroy_process_group()
        return None if int(os.environ["RANK"]) else dict(scaling=[row])
    cfg, cores = make_config(**bench.flags), cpu_cores()
    # Ranks on a CPU have two cores or more, but for two: all must have as many threads, and torchrun's 1 means any
    devices = (
        torch.cuda.device_count() if bench.device.type == "cuda" else max(min(2, cores), cores // 2)
    )
    n_seqs = cfg.batch_tokens // cfg.seq_len
    worlds = [2**i for i in range(devices.bit_length()) if 2**i <= devices and n_seqs % 2**i == 0]
    micro_batch = cfg.micro_batch or largest_divisor(n_seqs // worlds[-1], 8192 // cfg.seq_len)
    env = dict(OMP_NUM_THREADS=str(max(1, cores // worlds[-1]))) | os.environ
    plan = [("one rank", 1, 1)]
    for n in worlds[1:]:
        plan += [("strong (fixed global batch)", n, 1), ("weak (fixed batch per rank)", n, n)]
    rows = []
    for name, ranks, times in plan:
        flags = bench.flags | dict(batch_tokens=cfg.batch_tokens * times, micro_batch=micro_batch)
        with tempfile.TemporaryDirectory() as folder:
            command = [
                "-m",
                "torch.distributed.run",
                f"--nproc_per_node={ranks}",
                "--standalone",
                REPO / "bench.py",
            ]
            command += ["scaling", f"--repeats={bench.repeats}", f"--json={folder}/out.json"]
            row = {"Config": name, "ranks": ranks}
            try:
                run_python(*command, *(f"--{key}={value}" for key, value in flags.items()), env=env)
                row = json.loads(Path(folder, "out.json").read_text())["scaling"][0] | row
                row["efficiency, %"] = (
                    100 * row["tokens/s"] / ranks / (rows or [row])[0].get("tokens/s", math.nan)
                )
            except TrainerError as error:
                row["note"] = str(error)
        rows.append(row)
        progress(f"{ranks} ranks, {name}")
    note = f"{micro_batch} sequences a micro-batch. Efficiency: speed per rank against one. Exposed all-reduce: "
    note += "what a step saves by sending no gradients (DDP; Muon's updates are still exchanged)."
    print(table("Scaling", rows, note))
    return dict(scaling=rows)
