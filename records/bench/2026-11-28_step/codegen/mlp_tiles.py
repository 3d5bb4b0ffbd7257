"""Tiles of mlp.patch's kernel: compiled for sm_90, and, on a card, timed against cuBLAS and Inductor's kernels.

    PYTHONPATH=FOLDER_WITH_THE_PATCH python codegen/mlp_tiles.py
"""

import os
import pathlib
import re
import subprocess
import sys
import tempfile
from importlib.util import find_spec

import torch
import torch.nn.functional as F

if not find_spec("triton"):
    print("no Triton here")  # a build of PyTorch for CPUs
    sys.exit()

import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from ops import triton_mlp

M, C, H = 131072, 768, 3072
TILES = [
    dict(BLOCK_M=m, BLOCK_N=n, BLOCK_K=k, num_warps=warps, num_stages=stages)
    for m, n, k, warps, stages in (
        (128, 256, 64, 8, 3),
        (128, 256, 64, 8, 4),
        (256, 128, 64, 8, 3),
        (256, 128, 64, 8, 4),
        (128, 128, 64, 8, 4),
        (128, 128, 64, 4, 2),
        (128, 128, 32, 4, 4),
        (64, 256, 32, 4, 3),
    )
]
tool = knobs.nvidia.cuobjdump.path
env = os.environ | {"PATH": f"{pathlib.Path(tool).parent}:{os.environ['PATH']}"}
OUT = pathlib.Path(tempfile.mkdtemp())


def needs(tiles: dict, backward: bool) -> str:
    """What a kernel takes, or "" if it does not fit."""
    sizes = {key: value for key, value in tiles.items() if key.startswith("BLOCK")}
    m, n, k = sizes.values()
    programs = 132 * 8 // tiles["num_warps"]
    constants = dict(M=M, N=H, K=C, N_PROGRAMS=programs, BACKWARD=backward) | sizes
    blocks = dict(a=(m, k), w=(k, n) if backward else (n, k), pre=(m, n // 2), out=(m, n // 2))
    signature = {name: f"tensordesc<bf16[{x}, {y}]>" for name, (x, y) in blocks.items()}
    source = ASTSource(triton_mlp.mlp_kernel, signature | dict.fromkeys(constants, "constexpr"), constants)
    options = dict(num_warps=tiles["num_warps"], num_stages=tiles["num_stages"])
    kernel = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    cubin = OUT / "kernel.cubin"
    cubin.write_bytes(kernel.asm["cubin"])
    usage, text = (
        subprocess.run([tool, flag, cubin], env=env, check=True, capture_output=True, text=True).stdout
        for flag in ("-res-usage", "-sass")
    )
    ops = [op for op in re.findall(r"/\*[0-9a-f]{4,}\*/\s+([^;]+)", text) if op[:3] != "NOP"]
    spills = sum(bool(re.search(r"\b(STL|LDL)\b", op)) for op in ops)
    most = 232448 if tiles["num_warps"] == 8 else 115712  # two programs share a multiprocessor
    fits = "" if kernel.metadata.shared <= most else " (too much)"
    registers, stack = (re.search(rf"{word}:(\d+)", usage)[1] for word in ("REG", "STACK"))
    return (
        f"{registers} registers, {stack} B stack, "
        f"{spills} spills, {kernel.metadata.shared} B shared of {most}{fits}, {len(ops)} instructions"
    )


def time_ms(function) -> float:
    """The median of 20, after 3."""
    events = []
    for _ in range(23):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        function()
        end.record()
        events.append((start, end))
    torch.cuda.synchronize()
    return sorted(start.elapsed_time(end) for start, end in events[3:])[10]


on_card = torch.cuda.is_available()
if on_card:
    x, w_fc = torch.randn(M, C, device="cuda").bfloat16(), torch.randn(H, C, device="cuda").bfloat16() / C**0.5
    dy, w_proj = torch.randn_like(x), torch.randn(C, H, device="cuda").bfloat16() / C**0.5
    act = torch.compile(lambda pre: F.leaky_relu(pre, 0.5).square())
    back = torch.compile(lambda g, pre: g * torch.where(pre > 0, 2 * pre.float(), 0.5 * pre.float()).bfloat16())
    pre, g = x @ w_fc.T, dy @ w_proj
    forward, backward = lambda: act(x @ w_fc.T), lambda: back(dy @ w_proj, pre)
    want, want_back = forward(), backward()
    for name, function in (
        ("x @ w_fc.T", lambda: x @ w_fc.T), ("... and activation", forward),
        ("dy @ w_proj", lambda: dy @ w_proj), ("... and derivative", backward),
    ):  # fmt: skip
        print(f"{time_ms(function):.3f} ms {name}", flush=True)
for is_backward in (False, True):
    for tiles in TILES:
        label = f"{'backward' if is_backward else 'forward'} {' '.join(map(str, tiles.values()))}:"
        try:
            text = needs(tiles, is_backward)
            if on_card and "too much" not in text:
                triton_mlp.FORWARD_TILES = triton_mlp.BACKWARD_TILES = tiles
                if is_backward:
                    run, expected = lambda: triton_mlp.leaky_relu_squared_backward_mm(dy, w_proj, pre), want_back
                else:
                    run, expected = lambda: triton_mlp.leaky_relu_squared_mm(x, w_fc)[1], want
                error = ((run().float() - expected.float()).norm() / expected.float().norm()).item()
                text = f"{time_ms(run):.3f} ms, differs by {error:.4f}; {text}"
        except Exception as error:
            text = f"{type(error).__name__} {str(error)[:150]}"
        print(label, text, flush=True)
