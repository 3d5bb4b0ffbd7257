"""--fp8's head and loss of the patch, against the present path, in Triton's interpreter: errors against fp64.

    TRITON_INTERPRET=1 PYTHONPATH=FOLDER_WITH_THE_PATCH python codegen/fp8_check.py
"""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

import ops.functional
import ops.linear
from conftest import compile_with, random_gpt
from ops import triton_loss
from ops.compile import apply_compile


def tanh(self, asm, constraints, values, *_):
    result = TensorHandle(np.tanh(values[0].data), values[0].dtype)
    return SimpleNamespace(get_result=lambda _: result)


def scaled_mm(a, b, scale_a, scale_b, out_dtype, use_fast_accum):
    """What a tensor core computes, up to its accumulation."""
    return ((a.float() * scale_a) @ (b.float() * scale_b)).to(out_dtype)


InterpreterBuilder.create_inline_asm = tanh
torch._scaled_mm = scaled_mm
CAP = 15.0


def present(x, w, targets, cap):
    return triton_loss.TritonCrossEntropy.apply(ops.linear.fp8_linear(x, w), targets, cap)


def exact(x, w, targets, cap):
    logits = (x @ w.T).double()
    return torch.nn.functional.cross_entropy(cap * torch.tanh(logits / cap), targets, ignore_index=-1)


def error(a, b):
    return ((a.double() - b).norm() / b.norm()).item()


torch.manual_seed(0)
print("logits' size, rows: loss, errors of dx and dW (of dx of the surest row); present path, then patch")
for size, rows, n, width in ((0.1, 64, 9008, 64), (1.0, 64, 9008, 64), (4.0, 64, 9008, 64), (16.0, 48, 1008, 64)):
    x = torch.randn(rows, width).bfloat16()
    w = (size * torch.randn(n, width) / width**0.5).bfloat16()
    targets = torch.randint(n, (rows,))
    likely = (x.float() @ w.float().T).argmax(-1)
    targets[: rows // 2] = likely[: rows // 2]  # half of the rows are sure, one is masked
    targets[5] = -1
    results = []
    # The logits are those of float8 in all three, so that the loss's own errors are seen
    for function, wide in ((exact, True), (present, False), (triton_loss.Fp8CrossEntropy.apply, False)):
        a, b = x.clone().requires_grad_(), w.clone().requires_grad_()
        if wide:
            logits = ops.linear.fp8_matmul(x, w).double().requires_grad_()
            loss = exact(logits, torch.eye(n, dtype=torch.double), targets, CAP)
            (d,) = torch.autograd.grad(loss, logits)
            results.append((loss, d @ w.double(), d.T @ x.double()))
        else:
            loss = function(a, b, targets, CAP)
            results.append((loss, *torch.autograd.grad(loss, (a, b))))
    want, *found = results
    surest = want[1].norm(dim=1).masked_fill(targets < 0, torch.inf).argmin()
    line = " | ".join(
        f"{loss.item():.5f} {error(dx, want[1]):.5f} {error(dw, want[2]):.5f} ({error(dx[surest], want[1][surest]):.5f})"
        for loss, dx, dw in found
    )
    print(f"{size}, {rows} x {n}: exact {want[0].item():.5f}; {line}", flush=True)
    assert not found[1][1][5].any() and error(found[1][1], want[1]) < 1.1 * error(found[0][1], want[1]) + 0.005

# In a compiled model
launches, kernel = [], triton_loss.loss_kernel


class Counted:
    def __getitem__(self, grid):
        def run(logits, losses, targets, fp8, scales, **sizes):
            launches.append("plain" if fp8 is None else "float8")
            return kernel[grid](logits, losses, targets, fp8, scales, **sizes)

        return run


triton_loss.loss_kernel = Counted()
ops.functional.is_nvidia = lambda x: True
with pytest.MonkeyPatch.context() as monkeypatch:
    compile_with(monkeypatch, "aot_eager")
    idx = torch.arange(48).view(2, 24)
    targets = idx.roll(1, 1)
    targets[0, :5] = -1
    for changed, expected in (
        (dict(), ["float8"] * 3),
        (dict(loss_chunk=0), ["float8"]),
        (dict(fp8=False), ["plain"] * 3),
        (dict(compute_dtype=torch.float32, fp8=False), []),
        (dict(softcap=0.0), []),
    ):
        flags = dict(n_layer=0, vocab_size=64, compute_dtype=torch.bfloat16, loss_chunk=16, fp8=True) | changed
        fp8 = flags.pop("fp8")
        gpt, plain_gpt = random_gpt(**flags), random_gpt(**flags)
        idx, targets = idx % 64, torch.where(targets < 0, -1, targets % 64)
        if fp8:
            ops.linear.apply_fp8(gpt.head)
        apply_compile(gpt, "default", 1.0, torch.device("cuda"))
        launches.clear()
        loss, want = gpt(idx, targets), plain_gpt(idx, targets)
        (3 * loss).backward()
        (3 * want).backward()
        pairs = [(p.grad, q.grad) for p, q in zip(gpt.parameters(), plain_gpt.parameters()) if q.grad is not None]
        worst = max(((a - b).norm() / b.norm()).item() for a, b in pairs)
        print(changed, f"{launches}, loss {loss.item():.5f} ({want.item():.5f}), gradients differ by {worst:.4f}", flush=True)
        assert launches == expected and abs(loss - want) < 0.01 * want and worst < 0.06
