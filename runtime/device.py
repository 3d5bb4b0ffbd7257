"""The device and the ranks of a run, and what that hardware and its PyTorch can do."""

import contextlib
import ctypes
import functools
import logging
import math
import os
import platform
import random
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from common.errors import UserError
from common.files import REPO
from common.values import cpu_cores, env_int
from runtime.ranks import DistContext, check_ranks, rendezvous

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}

# How many times faster bf16 matmuls must be: casts and norms in bf16 cost a part of the gain
BF16_GAIN = 1.2

# Dense bf16 or fp16 TFLOP/s with fp32 accumulation, from the vendors' datasheets, of the first name
# that fits. There is no MFU on other devices
PEAK_TFLOPS = {
    "B200": 2250,
    "H200 NVL": 835,
    "H200": 989,
    "H100 NVL": 835,
    "H100 PCIe": 756,
    "H100": 989,
    "A100": 312,
    "L40S": 362,
    "L40": 181,
    "L4": 121,
    "A10G": 70,
    "A10": 125,
    "A6000": 155,
    "RTX 5090": 210,
    "RTX 4090": 165,
    "RTX 3090": 71,
}


def init_device_and_ranks(cfg) -> DistContext:
    """Choose the device, join the other ranks if torchrun started any, and check that they match.

    Sets what belongs to the process: CUDA's allocator, threads, determinism, matmul precision. May
    be called again in a process, for another run. Raises UserError.
    """
    rank = env_int("RANK", 0)
    world_size = env_int("WORLD_SIZE", 1)
    if not 0 <= rank < world_size:
        raise UserError(
            f"RANK is {rank} and WORLD_SIZE {world_size}; start with torchrun, which sets both, or "
            "unset both"
        )
    local_rank = env_int("LOCAL_RANK", 0)
    local_world_size = env_int("LOCAL_WORLD_SIZE", 1)
    device = select_device(cfg.device)

    # CUDA reads these variables when it is first used
    if cfg.alloc_conf:
        os.environ.setdefault("PYTORCH_ALLOC_CONF", cfg.alloc_conf)
    if cfg.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    if device.type == "cuda":
        # The old default; Triton 3.9 warns that it will change
        os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
        n_devices = torch.cuda.device_count()
        if local_rank >= n_devices:
            raise UserError(
                f"{local_world_size} processes were started for {n_devices} CUDA device(s); "
                f"use torchrun --nproc_per_node={n_devices}"
            )
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
        if cfg.attn in ("fa3", "fa4"):
            set_flash_impl(cfg.attn)
    elif device.type == "cpu":
        tune_glibc_malloc()
        # CUDA builds of PyTorch warn of a missing GPU
        logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
        # One thread is torchrun's default, not the user's choice
        if local_world_size > 1 and os.environ.get("OMP_NUM_THREADS") == "1":
            torch.set_num_threads(max(1, cpu_cores() // local_world_size))

    # The first of these calls imports the compiler, which takes a second
    if cfg.deterministic != torch.are_deterministic_algorithms_enabled():
        torch.use_deterministic_algorithms(cfg.deterministic)
    torch.set_float32_matmul_precision(cfg.matmul_precision)

    # One process group for all runs of this process. FSDP needs one even of a single rank
    if (world_size > 1 or cfg.is_sharded) and not dist.is_initialized():
        store = dist.HashStore()
        if world_size > 1:
            store = rendezvous(rank, world_size, device.type)
        dist.init_process_group(
            backend="nccl" if device.type == "cuda" else "gloo",
            store=store,
            rank=rank,
            world_size=world_size,
            device_id=device if device.type == "cuda" else None,
        )
    dist_ctx = DistContext(device, rank, world_size, local_rank, local_world_size)
    if dist.is_initialized():
        dist_ctx.cpu_group = dist.group.WORLD
        if device.type == "cuda":
            dist_ctx.cpu_group = dist.new_group(backend="gloo")
        dist_ctx.store = dist.distributed_c10d._get_default_store()
    check_ranks(cfg, dist_ctx)
    return dist_ctx


@contextlib.contextmanager
def restore_process_state():
    """Context, or decorator, that leaves random generators and settings as they were.

    A random search over runs would else draw the same values after each.
    """
    python_state = random.getstate()
    numpy_state = np.random.get_state()
    precision = torch.get_float32_matmul_precision()
    deterministic = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    used_cuda = torch.cuda.is_initialized()
    devices = range(torch.cuda.device_count()) if used_cuda else ()
    try:
        with torch.random.fork_rng(devices):
            yield
    finally:
        if torch.cuda.is_initialized() and not used_cuda:
            torch.cuda.manual_seed_all(torch.initial_seed())  # which they begin with
        random.setstate(python_state)
        np.random.set_state(numpy_state)
        torch.set_float32_matmul_precision(precision)
        if deterministic != torch.are_deterministic_algorithms_enabled():
            torch.use_deterministic_algorithms(deterministic, warn_only=warn_only)


def set_flash_impl(attn: str) -> None:
    """Make FlashAttention 3 or 4 ("fa3", "fa4") SDPA's flash kernel for the rest of the process.

    Raises UserError when its package, which is not part of PyTorch, does not load.
    """
    try:
        torch.nn.attention.activate_flash_attention_impl(attn.upper())
    except Exception as error:  # whatever the package raises
        raise UserError(
            f"--attn {attn} needs a package that does not load ({error}); use flash"
        ) from None


def tune_glibc_malloc() -> None:
    """Have glibc keep the memory that a step frees.

    Returned to the system, every 4 KiB of it would page-fault again: steps of the default run would
    take 4 % longer in fp32, 16 % in bf16 and 17 % compiled (2 cores of an EPYC). Does nothing on
    other systems, or if the environment configures malloc (GLIBC_TUNABLES, MALLOC_...).
    """
    if sys.platform != "linux":
        return
    if any(name.startswith(("GLIBC_TUNABLES", "MALLOC_")) for name in os.environ):
        return
    libc = ctypes.CDLL(None)
    libc.mallopt(-4, 0)  # M_MMAP_MAX: large blocks come from the heap, too
    libc.mallopt(-1, -1)  # M_TRIM_THRESHOLD: the heap never shrinks
    # Huge pages; PyTorch reads this at its first allocation
    if Path("/sys/kernel/mm/transparent_hugepage").exists():
        os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")


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


# --------------------------------------------------------------------------------------------------
# The machine


def peak_flops(device: torch.device, dtype: str) -> float | None:
    """Look up FLOP/s of one device's 16-bit matmuls; None for fp32 and where it is not known."""
    if device.type != "cuda" or dtype not in ("bf16", "fp16"):
        return None
    name = torch.cuda.get_device_name(device)
    # A part of a device, or another device of nearly the same name
    if re.search(r"Laptop|Max-Q|MIG|GRID|-\d+[CQ]$| (D|Ti)\b", name):
        return None
    for key, tflops in PEAK_TFLOPS.items():
        if re.search(rf"\b{key}\b", name):
            return 1e12 * tflops
    return None


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
    if info.exists():
        found = re.search(r"^model name\s*: (.+)$", info.read_text(), re.MULTILINE)
        if found:
            return found[1]
    return platform.processor() or platform.machine()


def device_summary(dist_ctx: DistContext) -> str:
    """The devices of all ranks, with the threads of each where the CPU works."""
    device = dist_ctx.device
    threads = f", {torch.get_num_threads()} threads" if device.type == "cpu" else ""
    return f"{dist_ctx.world_size} x {device.type} ({device_name(device)}{threads})"


def software_versions(device: torch.device) -> str:
    """Versions of PyTorch, Python, the system, CUDA and the repository, for log.txt."""
    parts = [f"torch {torch.__version__}", f"python {platform.python_version()}"]
    parts.append(platform.platform())
    if shutil.which("git"):
        command = ["git", "-C", str(REPO), "describe", "--always", "--dirty", "--abbrev=40"]
        described = subprocess.run(command, capture_output=True, text=True).stdout.strip()
        parts.append(f"git {described or 'unknown'}")
    if device.type == "cuda":
        parts.append(f"cuda {torch.version.cuda or torch.version.hip}")
        parts.append(f"cudnn {torch.backends.cudnn.version()}")
        parts.append(torch.cuda.get_device_name())
    return ", ".join(parts)


# --------------------------------------------------------------------------------------------------
# Speed


def matmul_flops(device: torch.device, dtype: torch.dtype, width: int, flop: float = 3e8) -> float:
    """Measure FLOP/s of matmuls as in a block of this width, of about `flop` each, for 0.1 s."""
    rows = max(64, round(flop / (8 * width**2)))
    x = torch.ones(rows, width, dtype=dtype, device=device)
    w = torch.ones(width, 4 * width, dtype=dtype, device=device)
    seconds = []
    deadline = time.perf_counter() + 0.1
    while not seconds or time.perf_counter() < deadline:
        began = time.perf_counter()
        (x @ w)[0, 0].item()  # waits for the device
        seconds.append(time.perf_counter() - began)
    return 8 * rows * width**2 / min(seconds)


def faster_dtype(dtype: str, device: torch.device, n_embd: int) -> str:
    """Resolve "auto" to bf16 on GPUs that have it and CPUs whose matmuls are faster in it."""
    if dtype != "auto":
        return dtype
    is_faster = False
    if device.type == "cuda":
        is_faster = torch.cuda.is_bf16_supported(including_emulation=False)
    elif device.type == "cpu":
        is_faster = bf16_gain(min(n_embd, 512)) >= BF16_GAIN
    return "bf16" if is_faster else "fp32"


@functools.cache  # so that all runs of a process train in the same dtype
def bf16_gain(width: int) -> float:
    """Measure how many times faster than in fp32 matmuls are in bf16, on the CPU."""
    device = torch.device("cpu")
    fp32_flops = matmul_flops(device, torch.float32, width)
    return matmul_flops(device, torch.bfloat16, width) / fp32_flops


def sampling_dtype(dtype: str, trained_in: str, n_embd: int, device: torch.device) -> str:
    """Resolve "auto" to the dtype that a model was trained in, if the device is fast in that."""
    if dtype != "auto":
        return dtype
    if trained_in == "fp32" or (trained_in == "fp16" and device.type == "cuda"):
        return trained_in
    return faster_dtype("auto", device, n_embd)
