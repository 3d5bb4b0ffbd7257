"""mlp.patch in Triton's interpreter, against the plain function and its gradients.

    TRITON_INTERPRET=1 PYTHONPATH=FOLDER_WITH_THE_PATCH python codegen/mlp_check.py
"""
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import triton.runtime.interpreter as interpreter

# The interpreter multiplies the bits of bf16, and newer NumPy makes no index of an array of one
plain_dot, plain_patch = interpreter.InterpreterBuilder.create_dot, interpreter._patch_lang_tensor


def dot(self, a, b, *rest):
    for handle in (a, b):
        if handle.data.dtype == np.uint16:
            handle.data = (handle.data.astype(np.uint32) << 16).view(np.float32)
    return plain_dot(self, a, b, *rest)


def patch(tensor, scope):
    plain_patch(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())


interpreter.InterpreterBuilder.create_dot, interpreter._patch_lang_tensor = dot, patch
torch.cuda.get_device_properties = lambda _: SimpleNamespace(multi_processor_count=3)

import ops.functional  # noqa: E402
import ops.linear  # noqa: E402
from conftest import compile_with, random_gpt  # noqa: E402
from ops import triton_mlp  # noqa: E402
from ops.checkpointing import apply_ac  # noqa: E402
from ops.compile import apply_compile  # noqa: E402


def plain(x, w_fc, w_proj):
    return F.leaky_relu(x @ w_fc.T, 0.5).square() @ w_proj.T


# Relative errors of y and of the gradients of x, w_fc and w_proj, against fp64: the kernel's, and
# the plain function's in the same dtype. Widths that tiles do not divide; several tiles a program
torch.manual_seed(0)
for rows, width in ((3, 8), (300, 72), (513, 128)):
    for dtype, most in ((torch.bfloat16, 0.015), (torch.float16, 0.002)):
        x = torch.randn(1, rows, width)
        w_fc = torch.randn(4 * width, width) / width**0.5
        w_proj = torch.randn(width, 4 * width) / width**0.5
        grad = torch.randn(1, rows, width).to(dtype)
        results = []
        for wide, function in (
            (torch.float64, plain),
            (dtype, triton_mlp.triton_mlp),
            (dtype, plain),
        ):
            inputs = [t.to(dtype).to(wide).requires_grad_() for t in (x, w_fc, w_proj)]
            y = function(*inputs)
            results.append([y, *torch.autograd.grad(y, inputs, grad.to(wide))])
        exact, kernel, eager = results
        errors = [((a - b).norm() / b.norm()).item() for a, b in zip(kernel, exact)]
        plains = [((a - b).norm() / b.norm()).item() for a, b in zip(eager, exact)]
        print(rows, width, dtype, *(f"{a:.5f} ({b:.5f})" for a, b in zip(errors, plains)), flush=True)
        assert max(errors) < most

# In a compiled model: launches of a training step of 3 layers, and its loss and gradients
launches, launch = [], triton_mlp.launch
triton_mlp.launch = lambda *args, **options: (launches.append(1), launch(*args, **options))
ops.functional.is_hopper = lambda x: True
ops.linear.fp8_linear = lambda x, w: F.linear(x, w)  # a CPU has no float8
with pytest.MonkeyPatch.context() as monkeypatch:
    compile_with(monkeypatch, "aot_eager")
    monkeypatch.setattr(
        torch.nn.Module, "compile", lambda self, **_: setattr(self, "_compiled_call_impl", torch.compile(self._call_impl, fullgraph=True))
    )
    for mode, dtype, fp8, expected in (
        ("none", torch.bfloat16, False, 6),
        ("full", torch.bfloat16, False, 9),
        ("selective", torch.bfloat16, False, 6),
        ("none", torch.bfloat16, True, 0),
        ("none", torch.float32, False, 0),
    ):
        gpt, plain_gpt = (random_gpt(compute_dtype=dtype) for _ in range(2))
        for block in gpt.blocks:
            if fp8:
                ops.linear.apply_fp8(block.mlp)
            apply_ac(block, mode)
        apply_compile(gpt, "default", 1.0, torch.device("cpu"))
        idx = torch.arange(48).view(2, 24)
        with torch.no_grad():
            gpt(idx, idx)
        assert not launches
        loss, want = gpt(idx, idx.roll(1, 1)), plain_gpt(idx, idx.roll(1, 1))
        loss.backward()
        want.backward()
        worst = 0.0
        for p, q in zip(gpt.parameters(), plain_gpt.parameters()):
            worst = max(worst, ((p.grad - q.grad).norm() / q.grad.norm()).item())
        print(mode, dtype, f"fp8 {fp8}: {len(launches)} launches, loss {loss.item():.5f} ({want.item():.5f}), gradients differ by {worst:.4f}", flush=True)
        assert len(launches) == expected and abs(loss - want) < 2e-3 and worst < 0.03
        launches.clear()
