"""`bench.py scaling`: weak and strong scaling over ranks of this machine, or torchrun's ranks."""

import json
import os
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.harness import Bench, build_state, medians, progress, run_python, table, time_ms
from common.errors import TrainerError
from common.values import cpu_cores
from runtime.device import peak_memory_mb
from runtime.run_folder import REPO
from train_gpt import Config, train_step


def measure_ranks(cfg: Config, repeats: int) -> dict:
    """Measure steps on torchrun's ranks; with DDP, interleaved with steps without all-reduce."""
    state, _, batch = build_state(cfg)
    device = state.dist_ctx.device

    def step() -> None:
        train_step(state, batch, 0.0)
        dist.barrier()

    values = []
    for _ in range(2 + repeats):
        dist.barrier()
        ms, _ = time_ms(device, step)
        value = {"ms/step": ms}
        if hasattr(state.model, "no_sync"):
            with state.model.no_sync():
                unreduced_ms, _ = time_ms(device, step)
            value["exposed all-reduce, % of step"] = 100 * (1 - unreduced_ms / ms)
        values.append(value)

    tokens = state.cfg.batch_tokens
    row = {"ranks": state.dist_ctx.world_size, "tokens/step": tokens}
    row["values"] = values[2:]  # without the first two steps, which warm up
    row |= medians(row["values"])
    row["tokens/s"] = 1000 * tokens / row["ms/step"]
    row["peak MiB per rank"] = peak_memory_mb(device)
    return row


def run_ranks(ranks: int, flags: dict, repeats: int, env: dict) -> dict:
    """Measure this number of ranks under torchrun and return their row. Raises TrainerError."""
    with tempfile.TemporaryDirectory() as folder:
        command = ["-m", "torch.distributed.run", f"--nproc_per_node={ranks}", "--standalone"]
        command += [REPO / "bench.py", "scaling"]
        command += [f"--repeats={repeats}", f"--json={folder}/out.json"]
        command += [f"--{key}={value}" for key, value in flags.items()]
        run_python(*command, env=env)
        return json.loads(Path(folder, "out.json").read_text())["scaling"][0]


def bench_scaling(bench: Bench) -> list[dict] | None:
    """Print strong and weak scaling over ranks of this machine.

    Under torchrun, measure its ranks and return their row on rank 0, None on the others.
    """
    if "WORLD_SIZE" in os.environ:
        # measure_ranks frees DDP when it returns; freeing it after its group would hang
        row = measure_ranks(bench.cfg, bench.repeats)
        dist.destroy_process_group()
        return [row] if os.environ["RANK"] == "0" else None

    # On a CPU, two cores per rank (one, if there are only two). All configurations have the same
    # number of threads per rank; without OMP_NUM_THREADS, torchrun would choose it
    cores = cpu_cores()
    devices = max(min(2, cores), cores // 2)
    if bench.device.type == "cuda":
        devices = torch.cuda.device_count()
    cfg = bench.cfg
    n_seqs = cfg.batch_tokens // cfg.seq_len
    worlds = [1]
    while 2 * worlds[-1] <= devices and n_seqs % (2 * worlds[-1]) == 0:
        worlds.append(2 * worlds[-1])
    micro_batch = bench.micro_batch(n_seqs // worlds[-1])
    env = dict(OMP_NUM_THREADS=str(max(1, cores // worlds[-1]))) | os.environ

    # Name, ranks, and the factor of the batch size
    plan = [("one rank", 1, 1)]
    for ranks in worlds[1:]:
        plan.append(("strong (fixed global batch)", ranks, 1))
        plan.append(("weak (fixed batch per rank)", ranks, ranks))
    rows = []
    for name, ranks, factor in plan:
        flags = bench.flags | dict(batch_tokens=factor * cfg.batch_tokens, micro_batch=micro_batch)
        row = {"Config": name, "ranks": ranks}
        try:
            row = run_ranks(ranks, flags, bench.repeats, env) | row
        except TrainerError as error:
            row["note"] = str(error)
        rows.append(row)
        progress(f"{ranks} ranks, {name}")
    one_rank = rows[0].get("tokens/s")
    for row in rows:
        if one_rank and "tokens/s" in row:
            row["efficiency, %"] = 100 * row["tokens/s"] / row["ranks"] / one_rank
    note = (
        f"{micro_batch} sequences per micro-batch. Efficiency: speed per rank, relative to one "
        "rank. Exposed all-reduce: time saved by sending no gradients "
        "(DDP; Muon's updates are still exchanged)."
    )
    print(table("Scaling", rows, note))
    return rows
