"""`bench.py scaling`: weak and strong scaling over 1, 2, 4, ... ranks of this machine, or over torchrun's ranks."""

import contextlib
import functools
import math
import multiprocessing.connection
import os
import re
import statistics
import unittest.mock
from collections import Counter
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.harness import COLUMNS, Bench, CaseFailed, Worker, build_state, median_min_max, progress, table, timed
from ops.exchange import start_gather
from ops.parallel import rank_groups
from ops.warmup import cudagraph_mark_step
from runtime.derived import largest_divisor, uses_cudagraphs
from runtime.launch import DTYPES, cpu_cores, peak_memory_mb
from train_gpt import TrainState, make_config, train_step

KEYS = "name ranks tokens ms tokens_per_s efficiency communication predicted_ms sent_mb measured_mb mbit".split()
KEYS += ["peak_mb", "note"]
HEADINGS = COLUMNS | {"peak_mb": ("peak MiB per rank", ",.0f")}
NOTE = (
    "Exposed exchange: the fraction of a step that is saved by sending no gradients, weights or Muon updates. "
    "Predicted: a step that sends nothing, plus the time of the bytes at the speed of their collectives alone, Mbit/s. "
    "Sent: counted for ring algorithms (gloo's reduce-scatter sends as much as an all-reduce, twice NCCL's); "
    "and measured, on Linux CPUs, at the network interfaces of rank 0's machine, headers and other programs included."
)

# ---------------------------------------------------------------------------------------------------------------------
# What a step sends, and how long that takes


def ring_factor(collective: str, group: dist.ProcessGroup | None) -> float:
    """Bytes that a rank sends in a collective of this group, over those of its largest input or output tensor.

    For ring algorithms, as in NCCL and gloo; but gloo's reduce-scatter is an all-reduce of which a part is kept.
    """
    n = group.size() if group else 1
    twice = collective == "all-reduce" or collective == "reduce-scatter" and n > 1 and dist.get_backend(group) == "gloo"
    return (1 + twice) * (n - 1) / n


def exchanges(state: TrainState) -> dict[str, tuple]:
    """What ranks exchange in one optimizer step: kind -> collective, group, dtype, elements of the busiest rank.

    A group is the ranks that shard one copy of the weights, or those that hold the same shard (under DDP, all of it).
    Norms and scalars are not counted.
    """
    params = dict(state.raw_model.named_parameters())
    shards, replicas = rank_groups(params["wte.weight"])
    n_shards, n_replicas = shards.size() if shards else 1, replicas.size() if replicas else 1
    padded = {name: -(-len(p) // n_shards) * n_shards * p.shape[1:].numel() for name, p in params.items()}
    total, blocks = sum(padded.values()), sum(n for name, n in padded.items() if name.startswith("blocks."))
    matrices: Counter = Counter()  # that Muon divides together
    for group in state.optimizer.param_groups:
        for p in group["params"] if group["kind"] == "muon" else ():
            for height in (len(p),) if shards else group["split"] or (len(p),):
                rows, cols = (height, p.size(1)) if shards else sorted((height, p.size(1)))
                matrices[group["role"] if shards else "", rows, cols] += 1
    owned = updates = 0
    for (_, rows, cols), count in matrices.items():
        mine = -(-count // n_replicas)
        owned += 2 * -(-mine // n_shards) * rows * cols
        updates += mine * n_replicas * -(-rows // n_shards) * cols
    # Gradients are scattered in each micro-step and averaged in the last. Weights are gathered for the forward and
    # again for the backward pass of each, except the root's, which stay gathered in between.
    steps, grads, weights = state.grad_accum_steps, DTYPES[state.cfg.grad_comm], DTYPES[state.cfg.dtype]
    return {
        "gradients, scattered": ("reduce-scatter", shards, grads, steps * total),
        "gradients, averaged": ("all-reduce", replicas, grads, total / n_shards),
        "weights": ("all-gather", shards, weights, steps * (total + blocks)),
        "Muon, to the owner and back": ("all-to-all", shards, state.optimizer.ns_dtype, owned),
        "Muon, to all": ("all-gather", replicas, state.optimizer.ns_dtype, updates),
    }


def bytes_per_step(state: TrainState) -> dict[str, float]:
    """Bytes that the busiest rank sends in one optimizer step, by kind of exchange; it receives as many."""
    return {
        kind: ring_factor(collective, group) * numel * dtype.itemsize
        for kind, (collective, group, dtype, numel) in exchanges(state).items()
    }


def early_fraction(state: TrainState) -> float:
    """The fraction of gradients that are sent during the backward pass: those in all full DDP buckets but the last.

    DDP fills them from the last parameter on; the embeddings' gradients come at the end of the backward pass. On a CPU,
    FSDP waits for each exchange. (On GPUs it does not: the prediction is an upper bound there.)
    """
    early = last = bucket = 0
    for name, p in reversed(list(state.raw_model.named_parameters())):
        if name in ("wte.weight", "ngrams.weight"):
            break
        bucket += p.nbytes
        if bucket >= state.cfg.bucket_cap_mb * 2**20:
            early, last, bucket = early + last, bucket, 0
    return early / sum(p.nbytes for p in state.raw_model.parameters()) if hasattr(state.model, "no_sync") else 0.0


def predicted_seconds(
    compute: float, sent: dict[str, float], speeds: dict[str, float], early: float = 0.0, backward: float = 0.0
) -> float:
    """Seconds of a step: those of one that sends nothing, plus bytes over bytes/s of each kind, less what DDP hides.

    early: the fraction of gradients whose all-reduce runs during the last backward pass, of `backward` seconds.
    """
    seconds = {kind: n / speeds[kind] for kind, n in sent.items() if n}
    return compute + sum(seconds.values()) - min(early * seconds.get("gradients, averaged", 0.0), backward)


def measure_speeds(state: TrainState) -> dict[str, float]:
    """Bytes/s that a rank sends by kind of exchange, each alone, of 32 MiB (GPUs: 512), in all groups at once."""
    device, speeds = state.dist_ctx.device, {}
    size = 2 ** (29 if device.type == "cuda" else 25)
    reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor  # before 2.13
    for kind, (collective, group, dtype, _) in exchanges(state).items():
        if ring_factor(collective, group) == 0:
            continue
        pieces = torch.zeros((group.size(), size // group.size() // dtype.itemsize), dtype=dtype, device=device)
        piece, whole = pieces[0].clone(), pieces.flatten()
        call = {
            "all-reduce": functools.partial(dist.all_reduce, whole, group=group),
            "reduce-scatter": functools.partial(reduce_scatter, piece, whole, group=group),
            "all-gather": lambda pieces=pieces, group=group: start_gather(pieces, group).wait(),
            "all-to-all": functools.partial(dist.all_to_all_single, torch.empty_like(whole), whole, group=group),
        }[collective]
        seconds = [time_together(device, call) for _ in range(3)]
        speeds[kind] = ring_factor(collective, group) * whole.nbytes / statistics.mean(seconds[1:])
    return speeds


def time_together(device: torch.device, function) -> float:
    """Seconds that the slowest rank takes for function()."""
    barrier = dist.barrier if dist.is_initialized() else int
    barrier()
    return timed(device, lambda: (function(), barrier()))


def bytes_sent_here(device: torch.device) -> float:
    """Bytes that this machine's network interfaces, loopback included, have sent so far; nan where not counted."""
    path = Path("/proc/net/dev")
    if device.type != "cpu" or not path.exists():  # GPUs use other links
        return math.nan
    return sum(int(line.split(":")[1].split()[8]) for line in path.read_text().splitlines()[2:])


@contextlib.contextmanager
def nothing_sent(model: nn.Module):
    """Context manager: ranks compute everything but send only norms; what they would receive is zeros."""

    def receive_zeros(output: Tensor | list[Tensor], *_, **__) -> unittest.mock.Mock:
        for tensor in output if isinstance(output, list) else [output]:
            tensor.zero_()
        return unittest.mock.Mock()  # to be waited for

    collectives = (
        "all_gather|all_gather_(into_tensor|single)|all_reduce|all_to_all_single|reduce_scatter_(tensor|single)"
    )
    names = [name for name in dir(dist) if re.fullmatch(collectives, name)]  # they vary with PyTorch's version
    with model.no_sync() if hasattr(model, "no_sync") else contextlib.nullcontext():  # DDP
        with unittest.mock.patch.multiple(dist, **dict.fromkeys(names, receive_zeros)):
            yield


# ---------------------------------------------------------------------------------------------------------------------
# The program of a rank


def measure_rank(flags: dict, repeats: int, threads: int = 0) -> dict:
    """What measure_steps returns; leaves the process group.

    DDP is freed before that: freed with the group, it would wait for gloo's threads while they wait for the GIL.
    """
    row = measure_steps(flags, repeats, threads)
    if dist.is_initialized():
        dist.barrier()  # no rank leaves while another is at work
        dist.destroy_process_group()
    return row


def measure_steps(flags: dict, repeats: int, threads: int = 0) -> dict:
    """The figures of this rank: seconds of steps, interleaved with some that send nothing; what is sent; predictions.

    threads: of a CPU; 0 = the trainer's.
    """
    state, batch = build_state(flags)
    device, world_size = state.dist_ctx.device, state.dist_ctx.world_size
    if threads and device.type == "cpu":
        torch.set_num_threads(threads)
    row = dict(ranks=world_size, tokens=state.cfg.batch_tokens, micro_batch=state.micro_batch)
    row |= dict(threads=torch.get_num_threads(), seconds=[], compute=[], predicted=[], counted=[])
    for repeat in range(repeats + 2):
        before = bytes_sent_here(device)
        seconds = time_together(device, lambda: train_step(state, batch, 1.0))
        if repeat >= 2:
            row["seconds"].append(seconds)
            row["counted"].append((bytes_sent_here(device) - before) / state.dist_ctx.local_world_size)
        if world_size > 1:
            with nothing_sent(state.model):
                seconds = time_together(device, lambda: train_step(state, batch, 1.0))
            row["compute"] += [seconds] if repeat >= 2 else []
    row["peak_mb"] = peak_memory_mb(device)
    if world_size > 1:
        row["sent"] = {kind: n for kind, n in bytes_per_step(state).items() if n}
        row["speeds"] = measure_speeds(state)
        early = early_fraction(state)
        row["overlap"] = (early, backward_seconds(state, batch) if early else 0.0)
        row["predicted"] = [predicted_seconds(s, row["sent"], row["speeds"], *row["overlap"]) for s in row["compute"]]
    return row


def backward_seconds(state: TrainState, batch: Tensor) -> float:
    """Seconds of the backward pass of a micro-step that sends nothing. Drops its gradients."""
    rows, graphs, seconds = batch[: state.micro_batch], uses_cudagraphs(state.cfg), []
    with nothing_sent(state.model):
        for _ in range(3):
            cudagraph_mark_step(graphs)
            loss = state.model(rows[:, :-1], rows[:, 1:]) / rows.numel()
            seconds.append(time_together(state.dist_ctx.device, loss.backward))
    state.optimizer.zero_grad(set_to_none=not graphs)
    return statistics.median(seconds)


def rank_case(flags: dict, repeats: int, threads: int, environment: dict):
    """Yields what measure_rank returns, as the rank that the environment says."""
    os.environ.update(environment)
    torch.set_num_threads(threads)
    yield measure_rank(flags, repeats, threads)


# ---------------------------------------------------------------------------------------------------------------------
# The launcher


def run_ranks(bench: Bench, flags: dict, world_size: int, threads: int) -> dict:
    """Start ranks on this machine, as torchrun would; returns what rank 0 measured.

    They meet at a store of this process, on a port that the system chose. Raises CaseFailed with the reason of the rank
    that failed, not of its peers.
    """
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    environment = {
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "OMP_NUM_THREADS": str(threads),
    }
    with contextlib.ExitStack() as exits:
        workers = {}  # those whose figures are still waited for, by their pipe
        for rank in range(world_size):
            place = environment | dict(RANK=str(rank), LOCAL_RANK=str(rank))
            worker = exits.enter_context(Worker(bench, rank_case, flags, bench.repeats, threads, place))
            exits.callback(worker.process.kill)  # the others may wait for one that failed, for minutes
            workers[worker.pipe] = rank, worker
        values, failure = {}, None
        while workers and (failure is None or failure.kind == "peer"):
            ready = multiprocessing.connection.wait(list(workers), 5 if failure else None)
            if not ready:  # no rank has its own reason
                break
            for pipe in ready:
                rank, worker = workers.pop(pipe)
                try:
                    values[rank] = worker.request()
                except CaseFailed as error:
                    if failure is None or failure.kind == "peer":
                        failure = error
    if failure:
        raise failure
    return values[0]


def summarize_scaling(row: dict) -> None:
    """Sum up what measure_rank measured, in one launch or more."""
    row |= median_min_max([1000 * s for s in row["seconds"]], "ms")
    row["tokens_per_s"] = 1000 * row["tokens"] / row["ms"]
    if row["ranks"] > 1:
        exposed = [1 - alone / step for step, alone in zip(row["seconds"], row["compute"])]
        row |= median_min_max(exposed, "communication")
        row |= median_min_max([1000 * s for s in row["predicted"]], "predicted_ms")
        if math.isfinite(sum(row["counted"])):
            row |= median_min_max([n / 2**20 for n in row["counted"]], "measured_mb")
        row["sent_mb"] = sum(row["sent"].values()) / 2**20
        row["mbit"] = 8e-6 * sum(row["sent"].values()) / sum(n / row["speeds"][kind] for kind, n in row["sent"].items())


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
            for name in ("seconds", "compute", "predicted", "counted"):
                found[name] = row.get(name, []) + found[name]
            row |= found
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
        f"rank; each row was started {rounds} times, interleaved. {NOTE} For several nodes, start this command with "
        "torchrun on each."
    )
    print(table("Scaling", rows, KEYS, note, HEADINGS))
    return dict(scaling=rows)


def bench_scaling(bench: Bench) -> dict | None:
    """Strong and weak scaling over ranks on this machine; under torchrun, of its ranks: None but on rank 0."""
    if "WORLD_SIZE" not in os.environ:
        return scale_machine(bench)
    row = dict(name="as given") | measure_rank(bench.flags, bench.repeats)
    if int(os.environ["RANK"]):
        return None
    summarize_scaling(row)
    print(table("Scaling: the ranks that torchrun started", [row], KEYS, NOTE, HEADINGS))
    return dict(scaling=[row])
