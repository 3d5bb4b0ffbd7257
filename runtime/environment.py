"""Settings of the process in which a run takes place: environment, threads, determinism."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import logging
import os
import random
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.distributed as dist

from common.errors import UserError
from common.values import cpu_cores
from runtime.device import select_device
from runtime.ranks import DistContext, init_process_group

if TYPE_CHECKING:
    from train_gpt import Config


def check_caller() -> None:
    """Raise UserError for settings of the calling program that would change how a run computes."""
    dtype, device = torch.get_default_dtype(), torch.get_default_device()
    settings = {
        f"torch.set_default_dtype({dtype})": dtype != torch.float32,
        f"torch.set_default_device({str(device)!r})": device.type != "cpu",
        "torch.no_grad or inference_mode": not torch.is_grad_enabled(),
        "torch.autocast": torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"),
    }
    for setting, is_on in settings.items():
        if is_on:
            raise UserError(f"{setting} is in effect; undo it before train()")


def configure_device(cfg: Config, dist_ctx: DistContext) -> None:
    """Choose the device of dist_ctx; set CUDA's variables, threads, determinism and precision.

    Raises UserError, also if FlashAttention 3 or 4, which is not part of PyTorch, does not load.
    """
    device = select_device(cfg.device)
    if device.type == "cuda":
        n_devices = torch.cuda.device_count()
        if dist_ctx.local_rank >= n_devices:
            raise UserError(
                f"{dist_ctx.local_world_size} processes were started for {n_devices} CUDA "
                f"device(s); use torchrun --nproc_per_node={n_devices}"
            )
        device = torch.device("cuda", dist_ctx.local_rank)
    dist_ctx.device = device

    # CUDA reads these variables when it is first used
    if cfg.alloc_conf:
        os.environ["PYTORCH_ALLOC_CONF"] = cfg.alloc_conf
    if cfg.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    if device.type == "cuda":
        # The old default; Triton 3.9 warns that it will change
        os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
        torch.cuda.set_device(device)
        if cfg.attn in ("fa3", "fa4"):  # SDPA's flash kernel, for the rest of the process
            try:
                torch.nn.attention.activate_flash_attention_impl(cfg.attn.upper())
            except Exception as error:  # whatever the package raises
                raise UserError(
                    f"--attn {cfg.attn} needs a package that does not load ({error}); use flash"
                ) from None
    elif device.type == "cpu":
        tune_glibc_malloc()
        # CUDA builds of PyTorch warn of a missing GPU, and DTensor that gloo has no all-to-all
        logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
        logging.getLogger("torch.distributed.tensor").setLevel(logging.ERROR)
        # One thread is torchrun's default, not the user's choice
        if dist_ctx.local_world_size > 1 and os.environ.get("OMP_NUM_THREADS") == "1":
            torch.set_num_threads(max(1, cpu_cores() // dist_ctx.local_world_size))

    # Only if it changes: the call imports the compiler, which takes a second
    if cfg.deterministic != torch.are_deterministic_algorithms_enabled():
        torch.use_deterministic_algorithms(cfg.deterministic)
    torch.set_float32_matmul_precision(cfg.matmul_precision)

    # FSDP needs a process group of a single rank, too; later runs of the process then use it
    if cfg.is_sharded and not dist.is_initialized():
        init_process_group(store=dist.HashStore(), rank=0, world_size=1)
        atexit.register(lambda: dist.is_initialized() and dist.destroy_process_group())


@contextlib.contextmanager
def restored_process_state() -> Iterator[None]:
    """Context that leaves random generators, determinism and matmul precision as they were.

    Otherwise, a random search over runs would draw the same values after each run.
    """
    python_state = random.getstate()
    numpy_state = np.random.get_state()
    precision = torch.get_float32_matmul_precision()
    deterministic = torch.are_deterministic_algorithms_enabled()
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    try:
        with torch.random.fork_rng(devices):
            yield
    finally:
        torch.set_float32_matmul_precision(precision)
        if deterministic != torch.are_deterministic_algorithms_enabled():
            torch.use_deterministic_algorithms(deterministic)
        random.setstate(python_state)
        np.random.set_state(numpy_state)


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
