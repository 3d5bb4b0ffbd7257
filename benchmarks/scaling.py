"""`bench.py scaling`: weak and strong scaling over 1, 2, 4, ... ranks of this machine, or over torchrun's ranks."""

import contextlib
import multiprocessing.connection
import os

import torch
import torch.distributed as dist

from benchmarks.harness import Bench, CaseFailed, Worker, build_state, median_min_max, progress, table, timed
from runtime.checks import largest_divisor
from runtime.launch import cpu_cores, peak_memory_mb
from train_gpt import make_config, train_step

COLUMNS = {
    "name": ("batch", ""), "ranks": ("ranks", "d"), "tokens": ("tokens/step", ",d"), "ms": ("ms/step", ",.1f"),
    "tokens_per_s": ("tokens/s", ",.0f"), "efficiency": ("efficiency", ".0%"),
    "communication": ("exposed all-reduce", ".1%"), "peak_mb": ("peak MiB per rank", ",.0f"), "note": ("", ""),
}  # fmt: skip

# ---------------------------------------------------------------------------------------------------------------------
# The program of a rank


def measure_rank(flags: dict, repeats: int, threads: int = 0) -> dict:
    """The figures of this rank: seconds of a step, and the fraction of it that is exposed gradient all-reduce.

    The fraction is found by steps that do not exchange gradients, interleaved with the others (DDP only). threads: of
    a CPU; 0 = the trainer's. Leaves the process group.
    """
    state, batch = build_state(flags)
    device, world_size = state.dist_ctx.device, state.dist_ctx.world_size
    if threads and device.type == "cpu":
        torch.set_num_threads(threads)
    cases = [contextlib.nullcontext]
    if hasattr(state.model, "no_sync"):  # DDP
        cases.append(state.model.no_sync)
    times = [[] for _ in cases]
    for repeat in range(repeats + 2):
        for case, kept in zip(cases, times):
            if world_size > 1:
                dist.barrier()
            with case():
                seconds = timed(device, lambda: train_step(state, batch, 1.0))
            if repeat >= 2:
                kept.append(seconds)
    row = dict(ranks=world_size, tokens=state.cfg.batch_tokens, micro_batch=state.micro_batch, seconds=times[0])
    row |= dict(threads=torch.get_num_threads(), peak_mb=peak_memory_mb(device))
    row["exposed"] = [1 - without / step for step, without in zip(*times)] if len(times) == 2 else []
    if dist.is_initialized():
        dist.barrier()  # no rank leaves while another is at work
        dist.destroy_process_group()
    return row


def rank_case(flags: dict, repeats: int, threads: int, environment: dict):
    """Yields what measure_rank returns, as the rank that the environment says."""
    os.environ.update(environment)
    torch.set_num_threads(threads)
    yield measure_rank(flags, repeats, threads)


def scale_torchrun(bench: Bench) -> dict | None:
    """The row of the ranks that torchrun started; None but on rank 0."""
    row = measure_rank(bench.flags, bench.repeats)
    if int(os.environ["RANK"]):
        return None
    row["name"] = "as given"
    summarize_scaling(row)
    print(table("Scaling: the ranks that torchrun started", [row], COLUMNS))
    return dict(scaling=[row])


# ---------------------------------------------------------------------------------------------------------------------
# The launcher


def run_ranks(bench: Bench, flags: dict, world_size: int, threads: int) -> dict:
    """Start ranks on this machine, as torchrun would; returns what rank 0 measured.

    They meet at a store of this process, on a port that the system chose. Raises CaseFailed with the reason of the rank
    that failed, not of those that lost it.
    """
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    environment = dict(
        MASTER_ADDR="localhost", MASTER_PORT=str(store.port), TORCHELASTIC_USE_AGENT_STORE="True",
        WORLD_SIZE=str(world_size), LOCAL_WORLD_SIZE=str(world_size), OMP_NUM_THREADS=str(threads),
    )  # fmt: skip
    with contextlib.ExitStack() as exits:
        workers = []
        for rank in range(world_size):
            place = environment | dict(RANK=str(rank), LOCAL_RANK=str(rank))
            workers.append(exits.enter_context(Worker(bench, rank_case, flags, bench.repeats, threads, place)))
        try:
            return first_values(workers)[0]
        except CaseFailed:
            for worker in workers:  # the others may wait for the one that failed, for minutes
                worker.process.kill()
            raise


def first_values(workers: list[Worker]) -> list:
    """The first value of each worker. Raises CaseFailed, of one that failed by itself and not for want of a peer."""
    waiting, values, failures = {worker.pipe: i for i, worker in enumerate(workers)}, [None] * len(workers), []
    while waiting:
        ready = multiprocessing.connection.wait(list(waiting), 5 if failures else None)
        if not ready:
            break
        for pipe in ready:
            i = waiting.pop(pipe)
            try:
                values[i] = workers[i].request()
            except CaseFailed as error:
                failures.append(error)
        if any(error.kind != "peer" for error in failures):
            break
    if failures:
        raise min(failures, key=lambda error: error.kind == "peer")
    return values


def summarize_scaling(row: dict) -> None:
    """Sum up what measure_rank measured, in one launch or more."""
    row |= median_min_max([1000 * s for s in row["seconds"]], "ms")
    row["tokens_per_s"] = 1000 * row["tokens"] / row["ms"]
    if row["exposed"]:
        row |= median_min_max(row["exposed"], "communication")


def scale_machine(bench: Bench) -> dict:
    """Strong and weak scaling over the cores or GPUs of this machine."""
    cfg, cores = make_config(**bench.flags), cpu_cores()
    devices = torch.cuda.device_count() if bench.device.type == "cuda" else cores
    n_seqs = cfg.batch_tokens // cfg.seq_len
    worlds = [2**i for i in range(devices.bit_length()) if 2**i <= devices and n_seqs % 2**i == 0]
    micro_batch = cfg.micro_batch or largest_divisor(n_seqs // worlds[-1], 8192 // cfg.seq_len)
    threads = os.environ.get("OMP_NUM_THREADS", "").split(",")[0]
    threads = int(threads) if threads.isdigit() else max(1, cores // worlds[-1])  # of a rank, in every world
    rows = [dict(name="one rank", ranks=1, tokens=cfg.batch_tokens)]
    for world in worlds[1:]:
        rows.append(dict(name="strong (fixed global batch)", ranks=world, tokens=cfg.batch_tokens))
        rows.append(dict(name="weak (fixed batch per rank)", ranks=world, tokens=cfg.batch_tokens * world))
    rounds = 1 if bench.quick else 2
    for row in [row for _ in range(rounds) for row in rows]:
        if "note" in row:
            continue
        flags = {**bench.flags, "batch_tokens": row["tokens"], "micro_batch": micro_batch}
        try:
            found = run_ranks(bench, flags, row["ranks"], threads)
            row["seconds"] = row.get("seconds", []) + found["seconds"]
            row["exposed"] = row.get("exposed", []) + found["exposed"]
            row |= {key: found[key] for key in ("micro_batch", "threads", "peak_mb")}
        except CaseFailed as error:
            row["note"] = str(error)
        progress(f"{row['ranks']} ranks, {row['name']}: " + row.get("note", "done"))
    done = [row for row in rows if "note" not in row]
    for row in done:
        summarize_scaling(row)
        if "note" not in rows[0]:
            row["efficiency"] = row["tokens_per_s"] / rows[0]["tokens_per_s"] / row["ranks"]
    note = (
        f"{micro_batch} sequences a micro-batch, {threads} threads a rank. Efficiency is tokens/s per rank against one "
        f"rank; each row was started {rounds} times, interleaved. Exposed all-reduce: the fraction of a step that is "
        "saved by exchanging no gradients. For several nodes, start this command with torchrun on each."
    )
    print(table("Scaling", rows, COLUMNS, (note,)))
    return dict(scaling=rows)


def bench_scaling(bench: Bench) -> dict | None:
    """Strong and weak scaling over ranks on this machine; under torchrun, of the ranks that it started."""
    return scale_torchrun(bench) if "WORLD_SIZE" in os.environ else scale_machine(bench)
