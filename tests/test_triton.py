"""Triton's kernels, in Triton's interpreter on a CPU, and on a GPU."""

import os
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import ops.functional
from conftest import ROOT, compile_with, random_gpt, run_python, triton_runs
from ops.compile import apply_compile


def check_gradient(device: str, most: float) -> None:
    """Of rows longer than a block of the kernel; masked targets, the last column, sure mistakes."""
    from ops.triton_loss import TritonCrossEntropy

    generator = torch.Generator().manual_seed(0)
    for scale, cap, n in ((1.0, 15.0, 9001), (8.0, 15.0, 9001), (100.0, 30.0, 64), (1.0, 0.7, 64)):
        logits = (scale * torch.randn(9, n, generator=generator)).bfloat16()
        targets = torch.randint(n, (9,), generator=generator)
        targets[2], targets[3], targets[4] = -1, n - 1, logits[4].argmin()
        exact = logits.double().requires_grad_()
        capped = cap * torch.tanh(exact / cap)
        want = F.cross_entropy(capped, targets, ignore_index=-1)
        (want_grad,) = torch.autograd.grad(want, exact)

        logits, targets = logits.to(device).requires_grad_(), targets.to(device)
        for factor in (8.0, 3.0):  # 8 targets count: the gradient of the sum needs no scaling
            loss = TritonCrossEntropy.apply(logits, targets, cap)
            (grad,) = torch.autograd.grad(factor * loss, logits)
            assert grad.dtype == torch.bfloat16 and not grad[2].any()
            assert loss.item() == pytest.approx(want.item(), rel=most / 4), (scale, cap)
            error = grad.cpu().double() - factor * want_grad
            assert error.norm() < most * factor * want_grad.norm(), (scale, cap, factor)
            assert error.abs().max() < most * factor * want_grad.abs().max()


def check_compiled(patch: pytest.MonkeyPatch, device: str) -> None:
    """Compiled training in bf16 uses the kernel; evaluation, fp32 and no soft-cap do not."""
    from ops import triton_loss

    n_launches, kernel = [], triton_loss.loss_kernel

    class Counted:
        def __getitem__(self, grid):
            n_launches.append(1)
            return kernel[grid]

    patch.setattr(triton_loss, "loss_kernel", Counted())
    idx = torch.arange(48, device=device).view(2, 24)
    targets = idx.roll(1, 1)
    targets[0, :5] = -1
    shape = dict(n_layer=0, softcap=15.0)
    cases = [(dict(), 3), (dict(loss_chunk=0), 1)]  # a launch for each chunk
    cases += [(dict(compute_dtype=torch.float32), 0), (dict(softcap=0.0), 0)]
    for changed, expected in cases:
        flags = shape | dict(compute_dtype=torch.bfloat16, loss_chunk=16) | changed
        gpt, plain_gpt = random_gpt(**flags).to(device), random_gpt(**flags).to(device)
        apply_compile(gpt, "default", 1.0, torch.device("cuda"))
        n_launches.clear()
        with torch.no_grad():
            torch.testing.assert_close(
                gpt(idx, targets), plain_gpt(idx, targets), rtol=1e-3, atol=0
            )
        assert not n_launches
        loss, want = gpt(idx, targets), plain_gpt(idx, targets)
        assert len(n_launches) == expected, (changed, len(n_launches))
        torch.testing.assert_close(loss, want, rtol=1e-3, atol=0)
        (3 * loss).backward()
        (3 * want).backward()
        for p, q in zip(gpt.parameters(), plain_gpt.parameters()):
            if q.grad is not None:
                assert (p.grad - q.grad).norm() <= 0.01 * q.grad.norm()


def test_triton_loss_in_the_interpreter():
    pytest.importorskip("triton")
    env = os.environ | dict(TRITON_INTERPRET="1", PYTHONPATH=str(ROOT))
    done = run_python(__file__, env=env)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_gpu_triton_loss(monkeypatch):
    if not triton_runs():
        pytest.skip("Triton's kernels do nothing on this device")
    check_gradient("cuda", most=0.02)
    compile_with(monkeypatch, "aot_eager")
    check_compiled(monkeypatch, "cuda")


def main() -> None:
    """In the interpreter, with NumPy's tanh in place of the instruction."""
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    def tanh(self, asm, constraints, values, *_):
        assert asm == "tanh.approx.f32 $0, $1;"
        result = TensorHandle(np.tanh(values[0].data), values[0].dtype)
        return SimpleNamespace(get_result=lambda _: result)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(InterpreterBuilder, "create_inline_asm", tanh)
        check_gradient("cpu", most=0.006)
        compile_with(patch, "aot_eager")
        patch.setattr(ops.functional, "is_nvidia", lambda x: True)
        check_compiled(patch, "cpu")


if __name__ == "__main__":
    main()
