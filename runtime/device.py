"""The device of a run: which it is, what it is called, how fast it is, and its faster dtype."""

from __future__ import annotations

import functools
import platform
import re
import resource
import sys
import time
from pathlib import Path

import torch

from common.errors import UserError
from runtime.ranks import DistContext

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}

# How many times faster bf16 matmuls must be: casts and norms in bf16 use up a part of the gain
BF16_GAIN = 1.2

# Dense bf16 or fp16 TFLOP/s with fp32 accumulation, from the vendors' datasheets, of the first name
# that fits. There is no MFU on other devices
PEAK_TFLOPS = {
    "B300": 2250,
    "B200": 2250,
    "GH200": 989,
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
    "RTX PRO 6000 Blackwell Workstation": 504,
    "RTX 5090": 210,
    "RTX 4090": 165,
    "RTX 4080 SUPER": 104,
    "RTX 4080": 97,
    "RTX 4070 SUPER": 71,
    "RTX 4070": 58,
    "RTX 3090": 71,
    "RTX 3060": 25,
}


def select_device(name: str) -> torch.device:
    """Select the kind of device; "auto" is cuda if available, else cpu. Raises UserError."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name != "cpu" and not getattr(torch, name).is_available():
        raise UserError(
            f"PyTorch sees no {name.upper()} device here; use --device cpu, or install a build of "
            "PyTorch for it (CUDA: check that nvidia-smi works)"
        )
    return torch.device(name)


def peak_memory_mb(device: torch.device) -> float:
    """Most memory held so far, in MiB: the GPU's allocations, or the whole process on a CPU."""
    if device.type == "cuda":
        return round(torch.cuda.max_memory_allocated() / 2**20, 1)
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


# --------------------------------------------------------------------------------------------------
# Speed


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


def matmul_flops(device: torch.device, dtype: torch.dtype, width: int, flop: float = 3e8) -> float:
    """Measure FLOP/s of matmuls as in a block of this width, of about `flop` each, for 0.1 s."""
    rows = max(64, round(flop / (8 * width**2)))
    x = torch.ones(rows, width, dtype=dtype, device=device)
    w = torch.ones(width, 4 * width, dtype=dtype, device=device)
    (x @ w)[0, 0].item()  # not measured: its code may come from a disk
    seconds = []
    deadline = time.perf_counter() + 0.1
    while time.perf_counter() < deadline:
        began = time.perf_counter()
        (x @ w)[0, 0].item()  # waits for the device
        seconds.append(time.perf_counter() - began)
    return 8 * rows * width**2 / min(seconds)


def large_matmul_flops(device: torch.device, dtype: torch.dtype) -> float:
    """Measure FLOP/s of one device in matmuls that are large enough for it."""
    if device.type == "cpu":
        return matmul_flops(device, dtype, 512, 3e9)
    return matmul_flops(device, dtype, 4096, 5e11)


def faster_dtype(
    dtype: str, device: torch.device, n_embd: int, trained_in: str | None = None
) -> str:
    """Resolve "auto" to bf16 on GPUs that have it and CPUs whose matmuls are faster in it.

    trained_in: the dtype of a model to sample from, which is kept where the device is fast in it.
    """
    if dtype != "auto":
        return dtype
    if trained_in == "fp32" or (trained_in == "fp16" and device.type == "cuda"):
        return trained_in
    if device.type == "cuda":
        is_faster = torch.cuda.is_bf16_supported(including_emulation=False)
    else:
        is_faster = device.type == "cpu" and bf16_gain(min(n_embd, 512)) >= BF16_GAIN
    return "bf16" if is_faster else "fp32"


@functools.cache  # so that all runs of a process train in the same dtype
def bf16_gain(width: int) -> float:
    """Measure how many times faster than in fp32 matmuls are in bf16, on the CPU."""
    device = torch.device("cpu")
    fp32_flops = matmul_flops(device, torch.float32, width)
    return matmul_flops(device, torch.bfloat16, width) / fp32_flops
