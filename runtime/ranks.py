"""Ranks: rendezvous, agreement on errors and decisions, and sharing the result of one rank."""

import contextlib
import os
import platform
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from common import RunError, TrainerError, UserError, sha256_of_file

PATIENCE_S = 600.0  # how long to wait for late ranks, as torchrun does for nodes
RENDEZVOUS_ADVICE = "start the same command on every node, with torchrun --rdzv_backend=c10d "
RENDEZVOUS_ADVICE += "--rdzv_endpoint=HOST:29500, HOST being one of the nodes that all can reach"


@dataclass
class DistContext:
    """Where this process runs. `cpu_group` is for decisions, so that asking the other ranks never waits for a GPU."""

    device: torch.device
    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    cpu_group: dist.ProcessGroup | None = None


def rendezvous(rank: int, world_size: int, device: str) -> dist.Store:
    """A store for the ranks of this start only. Raises UserError when some do not come, or differ in `device`.

    torchrun keeps its own store across restarts, with stale addresses of ranks that have died, and each node counts
    restarts by itself. So rank 0 draws a random name for this start, and gives it to each rank for a fresh random word.
    """
    endpoint, deadline = (
        f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}",
        time.monotonic() + PATIENCE_S,
    )
    late = (
        f"of {world_size} did not come to {endpoint} within {PATIENCE_S:.0f} s; {RENDEZVOUS_ADVICE}"
    )
    try:
        store = next(dist.rendezvous("env://", timeout=timedelta(seconds=PATIENCE_S)))[0]
    except RuntimeError as error:
        found = f"rank {rank} cannot reach the rendezvous at {endpoint} ({error})"
        raise UserError(f"{found}; {RENDEZVOUS_ADVICE}") from None
    name, verdict, missing = os.urandom(8).hex(), "", list(range(1, world_size))
    if rank:
        word = name
        store.set(f"word of rank {rank}", word)
        try:
            name = store.get(f"to rank {rank}, {word}").decode()
            store.set(f"from rank {rank}, {name}", device)
            verdict = store.get(f"verdict, {name}").decode()
        except dist.DistStoreError:
            raise UserError(f"rank 0 {late}") from None
    while rank == 0 and missing and time.monotonic() < deadline:
        for other in missing:
            if store.check([f"word of rank {other}"]):
                store.set(f"to rank {other}, {store.get(f'word of rank {other}').decode()}", name)
        for other in [other for other in missing if store.check([f"from rank {other}, {name}"])]:
            missing.remove(other)
            if (theirs := store.get(f"from rank {other}, {name}").decode()) != device:
                verdict = f"rank {other} runs on {theirs}, and rank 0 on {device}; give all the same --device"
        time.sleep(0.01)
    if rank == 0:
        verdict = f"rank {', '.join(map(str, missing[:8]))} {late}" if missing else verdict
        store.set(f"verdict, {name}", verdict)
    if verdict:
        raise UserError(verdict, printed=rank > 0)
    return dist.PrefixStore(name, store)


# ---------------------------------------------------------------------------------------------------------------------
# Agreement


@contextlib.contextmanager
def raise_on_all_ranks(dist_ctx: DistContext):
    """If a rank raises a TrainerError in this block, all raise it at its end, and the first such rank prints it."""
    ours = None
    try:
        yield
    except TrainerError as error:
        ours = error
    for rank, error in enumerate(gather_objects(dist_ctx, ours)):
        if error is not None:
            error.printed = rank != dist_ctx.rank
            raise error


def run_on_rank0(dist_ctx: DistContext, function):
    """Call `function` on rank 0 and return its result on every rank; a TrainerError is raised on every rank too."""
    with raise_on_all_ranks(dist_ctx):
        answer = [function() if dist_ctx.rank == 0 else None]
    if dist_ctx.world_size > 1:
        dist.broadcast_object_list(answer, src=0, group=dist_ctx.cpu_group)
    return answer[0]


def gather_objects(dist_ctx: DistContext, ours) -> list:
    """Every rank's object, on every rank."""
    everyones = [ours] * dist_ctx.world_size
    if dist_ctx.world_size > 1:
        dist.all_gather_object(everyones, ours, group=dist_ctx.cpu_group)
    return everyones


def max_over_ranks(dist_ctx: DistContext, *values: float) -> list[float]:
    """The largest of all ranks' values, of each, on every rank; waits for no GPU."""
    box = torch.tensor(values, dtype=torch.float64)
    if dist_ctx.world_size > 1:
        dist.all_reduce(box, dist.ReduceOp.MAX, group=dist_ctx.cpu_group)
    return box.tolist()


def mean_over_ranks(dist_ctx: DistContext, values: dict) -> dict[str, float]:
    """The mean of each number or 0-d tensor over the ranks that have it, by name; waits for the device."""
    ours = {
        name: float(v.full_tensor() if hasattr(v, "full_tensor") else v)
        for name, v in values.items()
    }
    everyones = gather_objects(dist_ctx, ours)
    names = dict.fromkeys(name for theirs in everyones for name in theirs)
    found = {name: [theirs[name] for theirs in everyones if name in theirs] for name in names}
    return {name: sum(numbers) / len(numbers) for name, numbers in found.items()}


# ---------------------------------------------------------------------------------------------------------------------
# What must be the same on all ranks


def check_same_on_all_ranks(dist_ctx: DistContext, facts: dict[str, object], advice: str) -> None:
    """Raises UserError, on every rank, when a rank has another value of one of these facts than rank 0 has."""
    everyones = gather_objects(dist_ctx, (platform.node(), facts))
    host, ours = everyones[0]
    for rank, (there, theirs) in enumerate(everyones):
        for name in (*ours, *theirs):
            a, b = ours.get(name, "none"), theirs.get(name, "none")
            if a != b:
                found = f"rank {rank} on {there} has {name} {b}, and rank 0 on {host} has {a}"
                raise UserError(f"{found}; {advice}", printed=dist_ctx.rank > 0)


def check_ranks(dist_ctx: DistContext, flags: dict, sources: dict[str, Path]) -> None:
    """Raises UserError, on every rank, when one has other flags, code or PyTorch than rank 0."""
    if dist_ctx.world_size == 1:
        return
    facts = {f"--{name}": value for name, value in flags.items()} | {"PyTorch": torch.__version__}
    if flags.get("parallel") == "hsdp" and not flags["shard_size"]:
        facts["so many ranks on its node:"] = dist_ctx.local_world_size
    facts |= {f"a {name} of hash": sha256_of_file(path)[:12] for name, path in sources.items()}
    check_same_on_all_ranks(
        dist_ctx, facts, "start all ranks alike, and resume from a folder that all can read"
    )


def fail_on_ranks_without_signal(dist_ctx: DistContext, signals: list, stopped_by: str) -> None:
    """Raises RunError on nodes whose ranks got no signal when that of another node ended the run.

    Their torchrun then starts them again, with the nodes that are left or when that one is back.
    """
    if stopped_by.lower().startswith("sig"):
        node = os.environ.get("GROUP_RANK", "0")
        told = {
            there
            for there, any_signals in gather_objects(dist_ctx, (node, bool(signals)))
            if any_signals
        }
        if node not in told:
            text = "another node was told to stop; --resume continues from what has been saved"
            raise RunError(text, printed=dist_ctx.local_rank > 0)
