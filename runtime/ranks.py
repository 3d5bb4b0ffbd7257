"""Communication between ranks: the rendezvous, agreement on errors and decisions, equal flags."""

import contextlib
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from common.errors import TrainerError, UserError
from common.files import sha256_of_file
from ops.parallel import to_full
from runtime.run_folder import SOURCE_FILES

RENDEZVOUS_TIMEOUT_S = 600.0  # as torchrun's for nodes


@dataclass
class DistContext:
    """The device and the rank of this process.

    cpu_group: for decisions, so that asking the other ranks never waits for a GPU.
    """

    device: torch.device
    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    cpu_group: dist.ProcessGroup | None = None


def connect_ranks(dist_ctx: DistContext) -> None:
    """Set up the process group, once for all runs of a process. Raises UserError."""
    on_cuda = dist_ctx.device.type == "cuda"
    if not dist.is_initialized():
        store = dist.HashStore()
        if dist_ctx.world_size > 1:
            store = rendezvous(dist_ctx.rank, dist_ctx.world_size, dist_ctx.device.type)
        dist.init_process_group(
            backend="nccl" if on_cuda else "gloo",
            store=store,
            rank=dist_ctx.rank,
            world_size=dist_ctx.world_size,
            device_id=dist_ctx.device if on_cuda else None,
        )
    dist_ctx.cpu_group = dist.group.WORLD
    if on_cuda:
        dist_ctx.cpu_group = dist.new_group(backend="gloo")


def rendezvous(rank: int, world_size: int, device_type: str) -> dist.Store:
    """Meet the other ranks, and return a store for this start only. Raises UserError.

    torchrun's store survives restarts and then holds addresses of dead ranks, and its nodes count
    restarts differently. So each start has a random prefix for its keys. Rank 0 writes it for each
    rank until all have answered; each rank first deletes a prefix left by a dead rank 0.
    """
    timeout = timedelta(seconds=RENDEZVOUS_TIMEOUT_S)
    deadline = time.monotonic() + RENDEZVOUS_TIMEOUT_S
    try:
        store, _, _ = next(dist.rendezvous("env://", timeout=timeout))
        if rank == 0:
            prefix = f"{device_type} {os.urandom(8).hex()}"
            while store.add(f"{prefix} joined", 0) < world_size - 1:
                if time.monotonic() > deadline:
                    raise dist.DistStoreError("some are missing")
                for other in range(1, world_size):
                    store.set(f"prefix for rank {other}", prefix)
                time.sleep(0.01)
        else:
            store.delete_key(f"prefix for rank {rank}")
            prefix = store.get(f"prefix for rank {rank}").decode()
            store.add(f"{prefix} joined", 1)
    except (dist.DistError, ValueError) as error:  # ValueError: a variable is not set
        endpoint = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        raise UserError(
            f"rank {rank} did not meet the other ranks at {endpoint} ({error}); start the same "
            "command on every node, with torchrun --rdzv_backend=c10d --rdzv_endpoint=HOST:29500, "
            "HOST being one of the nodes that all can reach"
        ) from None
    if not prefix.startswith(device_type):
        raise UserError(
            f"rank {rank} runs on {device_type}, but rank 0 on {prefix.split()[0]}; "
            "give all ranks the same --device"
        )
    return dist.PrefixStore(prefix, store)


# --------------------------------------------------------------------------------------------------
# Agreement


@contextlib.contextmanager
def raise_on_all_ranks(dist_ctx: DistContext):
    """If a TrainerError or OSError occurs in this block on any rank, raise it on all ranks.

    With several errors, the lowest rank's is raised. Only the rank where it occurred prints it.
    """
    own_error = None
    try:
        yield
    except (TrainerError, OSError) as error:
        own_error = error
    if not any_rank(dist_ctx, own_error is not None):  # in each step: cheap
        return
    for rank, error in enumerate(gather_objects(dist_ctx, own_error)):
        if error is not None:
            error.printed = rank != dist_ctx.rank
            error.is_on_all_ranks = True
            raise error


def read_on_all_ranks(dist_ctx: DistContext, batches: Iterator) -> Iterator:
    """Yield batches, equally many on every rank; a reading error is raised on all ranks."""
    while True:
        with raise_on_all_ranks(dist_ctx):
            batch = next(batches, None)
        if batch is None:
            return
        yield batch


def run_on_rank0(dist_ctx: DistContext, function):
    """Call function() on rank 0; return its result, or raise its TrainerError, on all ranks."""
    answer = None
    with raise_on_all_ranks(dist_ctx):
        if dist_ctx.rank == 0:
            answer = function()
    return gather_objects(dist_ctx, answer)[0]


def gather_objects(dist_ctx: DistContext, own) -> list:
    """Gather every rank's object on every rank; waits for no GPU."""
    everyones = [own] * dist_ctx.world_size
    if dist_ctx.world_size > 1:
        dist.all_gather_object(everyones, own, group=dist_ctx.cpu_group)
    return everyones


def max_over_ranks(dist_ctx: DistContext, values: list[float]) -> list[float]:
    """Return, on every rank, the elementwise maximum over ranks: one small all-reduce on CPUs."""
    largest = torch.tensor(values, dtype=torch.float64)
    if dist_ctx.world_size > 1:
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=dist_ctx.cpu_group)
    return largest.tolist()


def any_rank(dist_ctx: DistContext, flag: bool) -> bool:
    """Return True, on every rank, if the flag is set on any of them."""
    return bool(max_over_ranks(dist_ctx, [flag])[0])


def mean_over_ranks(dist_ctx: DistContext, values: dict) -> dict[str, float]:
    """Average each number or 0-d tensor over the ranks that have it; waits for the device."""
    own = {name: float(to_full(value)) for name, value in values.items()}
    by_name: dict[str, list[float]] = {}
    for numbers in gather_objects(dist_ctx, own):
        for name, number in numbers.items():
            by_name.setdefault(name, []).append(number)
    return {name: sum(numbers) / len(numbers) for name, numbers in by_name.items()}


# --------------------------------------------------------------------------------------------------
# Equal flags, code and versions


def check_same_on_all_ranks(dist_ctx: DistContext, facts: dict[str, object], advice: str) -> None:
    """Raise UserError, on every rank, if a rank's value of a fact differs from rank 0's."""
    everyones = gather_objects(dist_ctx, facts)
    for rank, theirs in enumerate(everyones):
        for name, value in everyones[0].items():
            if theirs.get(name) != value:
                raise UserError(
                    f"rank {rank} has {name} {theirs.get(name)}, and rank 0 has {value}; {advice}",
                    printed=dist_ctx.rank > 0,
                )


def check_ranks(cfg, dist_ctx: DistContext) -> None:
    """Raise UserError, on every rank, if one differs from rank 0 in flags, code or PyTorch."""
    facts = {f"--{name}": value for name, value in vars(cfg).items() if name != "given"}
    facts["PyTorch"] = torch.__version__
    for name, path in SOURCE_FILES.items():
        facts[f"a {name} of hash"] = sha256_of_file(path)[:12]
    advice = "start all ranks with the same command, and resume from a folder that all can read"
    check_same_on_all_ranks(dist_ctx, facts, advice)
