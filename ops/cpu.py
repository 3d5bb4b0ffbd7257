"""For CPUs only: eager pointwise functions in fewer memory passes, and settings of malloc and the compiler."""

import contextlib
import ctypes
import os
import subprocess
import sys
import unittest.mock
from pathlib import Path

import torch
from torch import Tensor


class EagerRMSNorm(torch.autograd.Function):
    """RMSNorm of x (B, T, ..., D), computed in fp32: a few rows at a time go through all steps while in cache.

    Without it and EagerReLUSquared, eager steps of the default run take 5 % longer in fp32 and 6 % in bf16.

    PyTorch's own makes twenty passes over the whole tensor. Backward needs the output and one number per row.
    """

    @staticmethod
    def forward(ctx, x):
        wide = torch.promote_types(x.dtype, torch.float32)
        y, scales = x.new_empty(x.shape), x.new_empty((*x.shape[:-1], 1), dtype=wide)
        for part, scale, out in cache_sized(x, scales, y):
            part = part.to(wide)
            torch.linalg.vector_norm(part, dim=-1, keepdim=True, out=scale)
            scale.square_().div_(x.size(-1)).add_(torch.finfo(wide).eps).rsqrt_()
            out.copy_(part * scale)
        ctx.save_for_backward(y, scales)
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        y, scales = ctx.saved_tensors
        dx = torch.empty_like(y)
        for g, part, scale, out in cache_sized(grad, y, scales, dx):
            g, part = g.to(scale.dtype), part.to(scale.dtype)
            out.copy_(torch.addcmul(g, part, (g * part).mean(-1, keepdim=True), value=-1).mul_(scale))
        return dx


class EagerReLUSquared(torch.autograd.Function):
    """ReLU squared, a few rows at a time."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        y = x.new_empty(x.shape)
        for part, out in cache_sized(x, y):
            torch.clamp_min(part, 0, out=out).square_()
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        dx = x.new_empty(x.shape)  # contiguous, so that views of it can be written
        for g, part, out in cache_sized(grad, x, dx):
            torch.clamp_min(part, 0, out=out).mul_(g).mul_(2)
        return dx


def is_eager(x: Tensor) -> bool:
    """Whether to use the functions above: without a compiler, and beyond a single token, which stays in cache."""
    if torch.compiler.is_compiling() or x.device.type != "cpu":
        return False
    return x.dim() > 2 and x.size(1) > 1 and x.numel() > 0


def cache_sized(*tensors: Tensor):
    """The tensors (B, T, ...), split alike into views of a few rows each, as many as fit into the cores' caches."""
    rows = [t.flatten(0, 1) for t in tensors]
    count = max(1, 65536 * torch.get_num_threads() // rows[0][0].numel())
    return zip(*(t.split(count) for t in rows))


# ---------------------------------------------------------------------------------------------------------------------
# The allocator and the compiler


def tune_glibc_malloc() -> None:
    """Have glibc keep the memory that a step frees: returned to the system, every 4 KiB would page-fault again.

    Without it, steps of the default run take 4 % longer in fp32, 16 % in bf16 and 17 % compiled (2 cores of an EPYC).

    Does nothing with other C libraries, or if the environment configures malloc (GLIBC_TUNABLES, MALLOC_...).
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt and not any(name == "GLIBC_TUNABLES" or name.startswith("MALLOC_") for name in os.environ):
        mallopt(-4, 0)  # M_MMAP_MAX: large blocks come from the heap as well ...
        mallopt(-1, -1)  # M_TRIM_THRESHOLD: ... which never shrinks
        if Path("/sys/kernel/mm/transparent_hugepage").exists():
            os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")  # huge pages; PyTorch reads this at its first allocation


def skip_trial_programs() -> None:
    """Skip the programs that Inductor compiles, for 4 seconds, to see if g++ supports the CPU's AMX instructions.

    Whether it accepts their flags tells as much, unless TORCHINDUCTOR_VEC_ISA_OK asks for the programs.
    """
    if sys.platform != "linux" or os.environ.get("TORCHINDUCTOR_VEC_ISA_OK") != "1":
        return
    with contextlib.suppress(Exception):  # a real problem fails in the compiler too, and is reported there
        from torch._inductor.cpp_builder import get_cpp_compiler
        from torch._inductor.cpu_vec_isa import VecISA, pick_vec_isa

        def takes_flags(isa: VecISA, code: str) -> bool:
            trial = [get_cpp_compiler(), *isa.build_arch_flags().split(), "-fsyntax-only", "-x", "c++", os.devnull]
            return subprocess.run(trial, capture_output=True).returncode == 0

        with unittest.mock.patch.object(VecISA, "check_build", takes_flags):
            pick_vec_isa()  # keeps its answer
