"""For CPUs only: settings of malloc and the compiler, gradients of large tables, eager functions in fewer passes."""

import contextlib
import ctypes
import os
import subprocess
import sys
import unittest.mock
from pathlib import Path
from types import FunctionType

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def tune_glibc_malloc() -> None:
    """Have glibc keep the memory that a step frees: returned to the system, every 4 KiB would page-fault again.

    Without it, steps of the default run take 4 % longer in fp32, 16 % in bf16 and 17 % compiled (2 cores of an EPYC).

    Does nothing with other C libraries, or if the environment configures malloc (GLIBC_TUNABLES, MALLOC_...).
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt and not any(
        name == "GLIBC_TUNABLES" or name.startswith("MALLOC_") for name in os.environ
    ):
        mallopt(-4, 0)  # M_MMAP_MAX: large blocks come from the heap as well ...
        mallopt(-1, -1)  # M_TRIM_THRESHOLD: ... which never shrinks
        if Path("/sys/kernel/mm/transparent_hugepage").exists():
            os.environ.setdefault(
                "THP_MEM_ALLOC_ENABLE", "1"
            )  # huge pages; PyTorch reads this at its first allocation


def densify(p: Tensor) -> None:
    if p.grad is not None and p.grad.is_sparse:
        p.grad = p.grad.to_dense()


def use_sparse_embedding_gradients(table: nn.Embedding) -> None:
    """Have a leaf table's micro-steps make sparse gradients, which are added to the dense one of the first.

    Dense ones are as large as the table: 8 micro-steps of 1,024 tokens take 48 ms instead of 6 with the n-grams of
    `laptop` (2 cores of an EPYC). Gradients by torch.autograd.grad are sparse, `.grad` is dense.
    """
    if table.weight.requires_grad and table.weight.is_leaf:
        table.sparse = True
        table.weight.register_post_accumulate_grad_hook(densify)


def refuse_second_derivative() -> None:
    if torch.is_grad_enabled():  # as with create_graph=True
        raise RuntimeError(
            "norm and relu_squared have no second derivative: use F.rms_norm and F.relu in model.py"
        )


class CpuRMSNorm(torch.autograd.Function):
    """RMSNorm of x (..., D) from its output and a number per row, in the dtype of x: half the passes of PyTorch's own.

    Without it and CpuReLUSquared, eager steps of the default run take 14 % longer (2 cores of a Xeon with AMX, bf16).
    """

    @staticmethod
    def forward(ctx, x):
        wide = torch.promote_types(x.dtype, torch.float32)
        square = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=wide).square_()
        scale = square.div_(x.size(-1)).add_(torch.finfo(wide).eps).rsqrt_().to(x.dtype)
        y = x * scale
        ctx.save_for_backward(y, scale)
        return y

    @staticmethod
    def backward(ctx, grad):
        refuse_second_derivative()
        y, scale = ctx.saved_tensors
        return torch.addcmul(grad, y, (grad * y).mean(-1, keepdim=True), value=-1).mul_(scale)


class CpuReLUSquared(torch.autograd.Function):
    """ReLU squared; PyTorch's own makes two more passes."""

    @staticmethod
    def forward(ctx, x):
        positive = torch.relu(x)
        ctx.save_for_backward(positive)
        return positive * positive

    @staticmethod
    def backward(ctx, grad):
        refuse_second_derivative()
        (positive,) = ctx.saved_tensors
        return (grad * positive).mul_(2)


def rms_norm(x: Tensor) -> Tensor:
    """model.norm, by CpuRMSNorm where that is faster."""
    return CpuRMSNorm.apply(x) if trains_eagerly(x) else plain_norm(x)


def relu_squared(x: Tensor) -> Tensor:
    """model.relu_squared, by CpuReLUSquared where that is faster."""
    return CpuReLUSquared.apply(x) if trains_eagerly(x) else plain_relu_squared(x)


def trains_eagerly(x: Tensor) -> bool:
    """Whether the functions above are faster than PyTorch's; torch.func cannot transform them."""
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        return False
    return x.is_cpu and x.requires_grad


def plain_norm(x: Tensor) -> Tensor:
    """As in model.py."""
    return F.rms_norm(x, (x.size(-1),))


def plain_relu_squared(x: Tensor) -> Tensor:
    """As in model.py."""
    return F.relu(x).square()


def use_cpu_functions(functions: dict) -> None:
    """Put the functions above in the place of norm and relu_squared in model.py's global names.

    Only where these are still the plain ones: an edit of them is what is computed.
    """
    if same_code(functions.get("norm"), plain_norm):
        functions["norm"] = rms_norm
    if same_code(functions.get("relu_squared"), plain_relu_squared):
        functions["relu_squared"] = relu_squared


def same_code(function, plain: FunctionType) -> bool:
    """Whether a function computes what the plain one does, docstrings aside."""
    if not isinstance(function, FunctionType):
        return False
    ours, theirs = plain.__code__, function.__code__
    same_constants = ours.co_consts[1:] == theirs.co_consts[1:]  # the first is the docstring
    same_names = ours.co_names == theirs.co_names
    return ours.co_code == theirs.co_code and same_names and same_constants


def skip_inductor_isa_test() -> None:
    """Skip the programs that Inductor compiles, for 4 seconds, to see if g++ supports the CPU's AMX instructions.

    Whether it accepts their flags tells as much, unless TORCHINDUCTOR_VEC_ISA_OK asks for the programs.
    """
    if sys.platform != "linux" or os.environ.get("TORCHINDUCTOR_VEC_ISA_OK") != "1":
        return
    with contextlib.suppress(
        Exception
    ):  # a real problem fails in the compiler too, and is reported there
        from torch._inductor.cpp_builder import get_cpp_compiler
        from torch._inductor.cpu_vec_isa import VecISA, pick_vec_isa

        def takes_flags(isa: VecISA, code: str) -> bool:
            trial = [
                get_cpp_compiler(),
                *isa.build_arch_flags().split(),
                "-fsyntax-only",
                "-x",
                "c++",
                os.devnull,
            ]
            return subprocess.run(trial, capture_output=True).returncode == 0

        with unittest.mock.patch.object(VecISA, "check_build", takes_flags):
            pick_vec_isa()  # keeps its answer
