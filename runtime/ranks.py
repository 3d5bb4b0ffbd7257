"""Communication between ranks: they meet, agree on errors and decisions, compare flags and code."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections import defaultdict
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from common.errors import TrainerError, UserError
from common.values import env_int
from ops.parallel import get_rank, get_world_size, to_full
from runtime.run_folder import SOURCE_FILES

if TYPE_CHECKING:
    from train_gpt import Config

T = TypeVar("T")


@dataclass
class DistContext:
    """The device and the rank of this process. The device is the CPU until the flags are known."""

    device: torch.device = torch.device("cpu")
    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1


def join_ranks() -> DistContext:
    """Meet the other ranks, if torchrun has started any. Raises UserError.

    The process group is for all runs of a process.
    """
    dist_ctx = DistContext(
        rank=env_int("RANK", 0),
        world_size=env_int("WORLD_SIZE", 1),
        local_rank=env_int("LOCAL_RANK", 0),
        local_world_size=env_int("LOCAL_WORLD_SIZE", 1),
    )
    n_tasks = env_int("SLURM_STEP_NUM_TASKS", 1)
    if n_tasks > 1 and "WORLD_SIZE" not in os.environ:
        raise UserError(
            f"srun has started {n_tasks} tasks, each of which would train on its own; start "
            "one torchrun per node instead: srun --ntasks-per-node=1 torchrun ..."
        )
    if not 0 <= dist_ctx.rank < dist_ctx.world_size:
        raise UserError(
            f"RANK is {dist_ctx.rank}, but WORLD_SIZE is {dist_ctx.world_size}; unset both, or use "
            "torchrun, which sets them"
        )
    if dist_ctx.world_size > 1 and not dist.is_initialized():
        try:
            init_process_group()
        except (dist.DistError, ValueError) as error:  # ValueError: a variable is not set
            endpoint = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
            raise UserError(
                f"rank {dist_ctx.rank} did not meet the other ranks at {endpoint} ({error}); start "
                "the same command on every node, with torchrun --rdzv_backend=c10d "
                "--rdzv_endpoint=HOST:29500, HOST being one of the nodes that all can reach"
            ) from None
    return dist_ctx


def init_process_group(**options: Any) -> None:
    """Make the process group: NCCL for tensors on GPUs, gloo for objects and tensors on CPUs.

    By default it would have only NCCL on a machine with GPUs. With gloo, asking the other ranks
    never waits for a GPU.
    """
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo", **options
    )


# --------------------------------------------------------------------------------------------------
# Agreement


@contextlib.contextmanager
def raise_on_all_ranks() -> Iterator[None]:
    """If a TrainerError or OSError occurs in this block on any rank, raise it on all ranks.

    With several errors, the lowest rank's is raised. Only the rank where it occurred prints it. The
    block must not communicate: a rank that fails would not answer.
    """
    own_error = None
    try:
        yield
    except (TrainerError, OSError) as error:
        own_error = error
    if not any_rank(own_error is not None):  # in each step: cheap
        return
    for rank, first_error in enumerate(gather_objects(own_error)):
        if first_error is not None:
            if rank == get_rank():
                raise own_error  # with its traceback
            first_error.printed = True
            raise first_error


def read_on_all_ranks(batches: Iterator[T]) -> Generator[T, None, None]:
    """Yield batches, equally many on every rank; a reading error is raised on all ranks."""
    while True:
        with raise_on_all_ranks():
            batch = next(batches, None)
        if batch is None:
            return
        yield batch


def run_on_rank0(function: Callable[[], T]) -> T:
    """Call function() on rank 0; return its result, or raise its TrainerError, on all ranks."""
    answer = None
    with raise_on_all_ranks():
        if get_rank() == 0:
            answer = function()
    return gather_objects(answer)[0]


def gather_objects(own: T) -> list[T]:
    """Gather every rank's object on every rank; waits for no GPU."""
    everyones = [own] * get_world_size()
    if dist.is_initialized():
        dist.all_gather_object(everyones, own)
    return everyones


def max_over_ranks(values: list[float]) -> list[float]:
    """Return, on every rank, the elementwise maximum over ranks: one small all-reduce on CPUs."""
    largest = torch.tensor(values, dtype=torch.float64)
    if dist.is_initialized():
        dist.all_reduce(largest, dist.ReduceOp.MAX)
    return largest.tolist()


def any_rank(flag: bool) -> bool:
    """Return True, on every rank, if the flag is set on any of them."""
    return bool(max_over_ranks([flag])[0])


def mean_over_ranks(values: dict[str, float | Tensor]) -> dict[str, float]:
    """Average each number or 0-d tensor over the ranks that have it; waits for the device."""
    own = {name: float(to_full(torch.as_tensor(value))) for name, value in values.items()}
    by_name: defaultdict[str, list[float]] = defaultdict(list)
    for numbers in gather_objects(own):
        for name, number in numbers.items():
            by_name[name].append(number)
    return {name: sum(numbers) / len(numbers) for name, numbers in by_name.items()}


# --------------------------------------------------------------------------------------------------
# Equal flags, code and versions


def check_same_on_all_ranks(facts: dict[str, object], advice: str) -> None:
    """Raise UserError, on every rank, if a rank's value of a fact differs from rank 0's."""
    everyones = gather_objects(facts)
    for rank, theirs in enumerate(everyones):
        for name, value in everyones[0].items():
            if theirs.get(name) != value:
                raise UserError(
                    f"rank {rank} has {name} {theirs.get(name)}, and rank 0 has {value}; {advice}",
                    printed=get_rank() > 0,
                )


def check_ranks(cfg: Config, dist_ctx: DistContext) -> None:
    """Raise UserError, on every rank, if one differs from rank 0 in flags, code or PyTorch."""
    facts = {f"--{name}": value for name, value in vars(cfg).items() if name != "given"}
    facts["a device of type"] = dist_ctx.device.type
    facts["PyTorch"] = torch.__version__
    sources = hashlib.sha256(b"".join(path.read_bytes() for path in SOURCE_FILES.values()))
    facts["source files of hash"] = sources.hexdigest()[:12]
    advice = "start all ranks with the same command, and resume from a folder that all can read"
    check_same_on_all_ranks(facts, advice)
