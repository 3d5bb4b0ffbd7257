"""The device of a run: which it is, and what it is called."""

import math
import platform
import re
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from common.errors import UserError
from common.values import env_int
from runtime.process import configure_process
from runtime.ranks import DistContext, check_ranks, connect_ranks


def init_device_and_ranks(cfg) -> DistContext:
    """Choose the device, join the other ranks if torchrun started any, and check that they match.

    Also configures the process. May be called again in a process, for a different run. Raises
    UserError.
    """
    device = select_device(cfg.device)
    dist_ctx = DistContext(
        device,
        rank=env_int("RANK", 0),
        world_size=env_int("WORLD_SIZE", 1),
        local_rank=env_int("LOCAL_RANK", 0),
        local_world_size=env_int("LOCAL_WORLD_SIZE", 1),
    )
    if device.type == "cuda":
        n_devices = torch.cuda.device_count()
        if dist_ctx.local_rank >= n_devices:
            raise UserError(
                f"{dist_ctx.local_world_size} processes were started for {n_devices} CUDA "
                f"device(s); use torchrun --nproc_per_node={n_devices}"
            )
        dist_ctx.device = torch.device("cuda", dist_ctx.local_rank)
    configure_process(cfg, dist_ctx)
    # FSDP needs a process group even of a single rank; later runs of the process then use it, too
    if dist_ctx.world_size > 1 or cfg.is_sharded or dist.is_initialized():
        connect_ranks(dist_ctx)
    check_ranks(cfg, dist_ctx)
    return dist_ctx


def select_device(name: str) -> torch.device:
    """Select the kind of device; "auto" is cuda if available, else cpu. Raises UserError."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise UserError(
            "--device cuda was asked for, but PyTorch sees no CUDA device here; use --device cpu, "
            "or install a CUDA build of PyTorch and check that nvidia-smi works"
        )
    return torch.device(name)


def peak_memory_mb(device: torch.device) -> float:
    """Most memory held so far, in MiB: the GPU's allocations, or the whole process on a CPU."""
    if device.type == "cuda":
        return round(torch.cuda.max_memory_allocated() / 2**20, 1)
    try:
        import resource
    except ImportError:  # Windows
        return math.nan
    unit = 1 if sys.platform == "darwin" else 1024
    return round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**20, 1)


def device_name(device: torch.device) -> str:
    """The model name of the GPU or the processor."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    info = Path("/proc/cpuinfo")
    text = info.read_text() if info.exists() else ""
    found = re.search(r"^model name\s*: (.+)$", text, re.MULTILINE)
    return found[1] if found else platform.processor() or platform.machine()


def device_summary(dist_ctx: DistContext) -> str:
    """The devices of all ranks, with the threads of each where the CPU works."""
    device = dist_ctx.device
    threads = f", {torch.get_num_threads()} threads" if device.type == "cpu" else ""
    return f"{dist_ctx.world_size} x {device.type} ({device_name(device)}{threads})"
