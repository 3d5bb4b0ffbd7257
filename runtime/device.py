"""Devices, ranks and threads: where a run happens, and what that hardware and its PyTorch can do."""

import ctypes
import dataclasses
import functools
import logging
import math
import os
import platform
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from common import UserError
from ops.attention import blocked_attention
from runtime.ranks import (
    DistContext,
    check_ranks,
    rendezvous,
)
from runtime.sources import SOURCE_FILES

ALLOC_CONF_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
ENVIRONMENT = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")  # of torchrun


def init_device_and_ranks(cfg) -> DistContext:
    """Choose the device, join the other ranks, if torchrun started any, and check that they match.

    Sets what belongs to the process: CUDA's allocator, threads, determinism, matmul precision, the flash kernel; may be
    called again in a process. Raises UserError.
    """
    rank = int(os.environ.get("RANK", 0))
    world_size = int(os.environ.get("WORLD_SIZE", 1))
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    device, deterministic, alloc_conf = select_device(cfg.device), cfg.deterministic, cfg.alloc_conf
    if device.type == "mps" and world_size > 1:
        raise UserError(
            "--device mps is for one process; start it with python, not torchrun, or use --device cpu"
        )
    if alloc_conf and not any(
        map(os.environ.get, ALLOC_CONF_VARIABLES)
    ):  # the user's wins; read as CUDA starts
        os.environ.update(dict.fromkeys(ALLOC_CONF_VARIABLES, alloc_conf))
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    if device.type == "cuda":
        n_devices = torch.cuda.device_count()
        if local_rank >= n_devices:
            wrong = f"{local_world_size} processes were started for {n_devices} CUDA device(s)"
            raise UserError(f"{wrong}; use torchrun --nproc_per_node={n_devices}")
        os.environ.setdefault(
            "TRITON_DEFAULT_FP_FUSION", "1"
        )  # the old default; Triton 3.9 warns that it will change
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
        set_flash_impl(cfg.attn)
    elif device.type == "cpu":
        tune_glibc_malloc()
        logging.getLogger("torch.utils.cpp_extension").setLevel(
            logging.ERROR
        )  # CUDA builds warn of a missing GPU
        if (
            local_world_size > 1 and os.environ.get("OMP_NUM_THREADS") == "1"
        ):  # torchrun's doing, not the user's
            torch.set_num_threads(max(1, cpu_cores() // local_world_size))
    if (
        deterministic != torch.are_deterministic_algorithms_enabled()
    ):  # the call imports the compiler: a second
        torch.use_deterministic_algorithms(deterministic)
    torch.set_float32_matmul_precision(cfg.matmul_precision)
    on_cuda, by_torchrun, cpu_group = device.type == "cuda", "WORLD_SIZE" in os.environ, None
    if (by_torchrun or cfg.parallel in ("fsdp", "hsdp")) and not dist.is_initialized():
        store = rendezvous(rank, world_size, device.type) if by_torchrun else dist.HashStore()
        where = dict(backend="nccl", device_id=device) if on_cuda else dict(backend="gloo")
        dist.init_process_group(**where, store=store, rank=rank, world_size=world_size)
    if dist.is_initialized():
        cpu_group = gloo_group(dist.group.WORLD) if on_cuda else dist.group.WORLD
    dist_ctx = DistContext(device, rank, world_size, local_rank, local_world_size, cpu_group)
    check_ranks(dist_ctx, dataclasses.asdict(cfg), SOURCE_FILES)
    return dist_ctx


def tune_glibc_malloc() -> None:
    """Have glibc keep the memory that a step frees.

    Returned to the system, every 4 KiB of it would page-fault again: steps of the default run would take
    4 % longer in fp32, 16 % in bf16 and 17 % compiled (2 cores of an EPYC). Does nothing with other C
    libraries, or if the environment configures malloc (GLIBC_TUNABLES, MALLOC_...).
    """
    if sys.platform != "linux" or any(
        name.startswith(("GLIBC_TUNABLES", "MALLOC_")) for name in os.environ
    ):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return
    mallopt(-4, 0)  # M_MMAP_MAX: large blocks come from the heap, too
    mallopt(-1, -1)  # M_TRIM_THRESHOLD: the heap never shrinks
    # Huge pages; PyTorch reads this at its first allocation
    if Path("/sys/kernel/mm/transparent_hugepage").exists():
        os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")


@functools.cache
def gloo_group(everyone: dist.ProcessGroup) -> dist.ProcessGroup:
    """A group of the same ranks that talks on the CPU; one for all runs in this process."""
    return dist.new_group(backend="gloo")


def set_flash_impl(attn: str) -> None:
    """Select SDPA's flash kernel: FlashAttention 3 or 4 ("fa3", "fa4": separate packages) or PyTorch's ("flash").

    Raises UserError when the package does not load.
    """
    kernels = torch.nn.attention
    if hasattr(kernels, "restore_flash_attention_impl") and kernels.current_flash_attention_impl():
        kernels.restore_flash_attention_impl()  # an earlier run in this process took another
    if attn in ("fa3", "fa4"):
        try:
            kernels.activate_flash_attention_impl(attn.upper())
        except Exception as error:  # whatever its package raises
            raise UserError(
                f"--attn {attn} needs a package that does not load ({error}); use flash"
            ) from None


# ---------------------------------------------------------------------------------------------------------------------
# The device


def select_device(name: str) -> torch.device:
    """The kind of device to run on; "auto" is cuda where there is one, else cpu. Raises UserError if it is absent."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        advice = (
            "use --device cpu, or install a CUDA build of PyTorch and check that nvidia-smi works"
        )
        raise UserError(
            f"--device cuda was asked for, but PyTorch sees no CUDA device here; {advice}"
        )
    if name == "mps" and not torch.backends.mps.is_available():
        raise UserError(
            "--device mps was asked for, but PyTorch sees no Apple GPU here; use --device cpu"
        )
    return torch.device(name)


# ---------------------------------------------------------------------------------------------------------------------
# The machine

# Dense bf16 or fp16 TFLOP/s with fp32 accumulation, from the vendors' datasheets; MFU is blank for anything else.
PEAK_TFLOPS = {
    "B200": 2250,
    "H200 NVL": 835,
    "H200": 989,
    "H100 NVL": 835,
    "H100 PCIe": 756,
    "H100": 989,
    "A100": 312,
}
PEAK_TFLOPS |= {"L40S": 362, "L40": 181, "L4": 121, "A10G": 70, "A10": 125, "A6000": 155}
PEAK_TFLOPS |= {"RTX 5090": 210, "RTX 4090": 165, "RTX 3090": 71}


def peak_flops(device: torch.device, dtype: str) -> float | None:
    """FLOP/s of one device's 16-bit matmuls by its datasheet; None for fp32 and where it is not known."""
    if device.type != "cuda" or dtype not in ("bf16", "fp16"):
        return None
    name = torch.cuda.get_device_name(device)
    if re.search(
        r"Laptop|Max-Q|MIG|GRID|-\d+[CQ]$| (D|Ti)\b", name
    ):  # a part of the device, or another one
        return None
    return next(
        (1e12 * peak for key, peak in PEAK_TFLOPS.items() if re.search(rf"\b{key}\b", name)), None
    )


def cpu_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


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
    models = re.findall(
        r"^model name\s*: (.+)$", info.read_text() if info.exists() else "", re.MULTILINE
    )
    return models[0] if models else platform.processor() or platform.machine()


def device_summary(dist_ctx: DistContext) -> str:
    """The devices of all ranks, with the threads of each where the CPU works."""
    device = dist_ctx.device
    threads = f", {torch.get_num_threads()} threads" if device.type == "cpu" else ""
    return f"{dist_ctx.world_size} x {device.type} ({device_name(device)}{threads})"


# Speed

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


BF16_GAIN = (
    1.2  # how many times faster bf16 matmuls must be: casts and norms in bf16 cost a part of that
)


def fastest_s(function: Callable, least: int = 1) -> float:
    """Seconds of the fastest of the calls that 0.1 s allows, and of at least so many."""
    seconds, end = [], time.perf_counter() + 0.1
    while len(seconds) < least or time.perf_counter() < end:
        t0 = time.perf_counter()
        function()
        seconds.append(time.perf_counter() - t0)
    return min(seconds)


def matmul_flops(device: torch.device, dtype: torch.dtype, width: int, flop: float = 3e8) -> float:
    """FLOP/s of matmuls of this width, of about `flop` each: the fastest of those that 0.1 s allows, at least one."""
    rows = max(64, round(flop / (8 * width**2)))
    x, w = (
        torch.ones(rows, width, dtype=dtype, device=device),
        torch.ones(width, 4 * width, dtype=dtype, device=device),
    )
    return (
        8 * rows * width**2 / fastest_s(lambda: (x @ w)[0, 0].item())
    )  # which waits for the device


def attention_s(backend: str, shape: tuple[int, int, int, int]) -> float:
    """Seconds of causal attention in bf16 on a CPU, forward and backward, of this shape (B, H, T, D)."""
    q = torch.ones(shape, dtype=torch.bfloat16, requires_grad=True)
    if backend == "blocked":
        return fastest_s(lambda: blocked_attention(q, q, q, None).sum().backward(), least=3)
    sdpa = torch.nn.functional.scaled_dot_product_attention
    return fastest_s(lambda: sdpa(q, q, q, is_causal=True).sum().backward(), least=3)


def hardware_dtype(dtype: str, device: torch.device) -> str:
    """`dtype`; for auto bf16 on CUDA devices that have it and fp32 on other GPUs, but still auto on a CPU."""
    if dtype != "auto" or device.type == "cpu":
        return dtype
    has_bf16 = device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
    return "bf16" if has_bf16 else "fp32"


def faster_dtype(dtype: str, device: torch.device, n_embd: int) -> str:
    """`dtype`; for auto, bf16 where it is there and, on a CPU, faster than fp32 in a block's matmuls."""
    dtype = hardware_dtype(dtype, device)
    if dtype != "auto":
        return dtype
    fp32, bf16 = (matmul_flops(device, DTYPES[name], min(n_embd, 512)) for name in ("fp32", "bf16"))
    return "bf16" if bf16 >= BF16_GAIN * fp32 else "fp32"


def sampling_dtype(dtype: str, trained_in: str, n_embd: int, device: torch.device) -> str:
    """What to run a model in: `dtype`; for auto what it was trained in, where the device is fast in that."""
    if dtype != "auto" or trained_in == "fp32":
        return trained_in if dtype == "auto" else dtype
    return (
        "fp16"
        if device.type == "cuda" and trained_in == "fp16"
        else faster_dtype("auto", device, n_embd)
    )
