"""Compiles loss_kernel of ops/triton_loss.py for sm_90 without a GPU, without and with the gradient in float8.

    PYTHONPATH=FOLDER_WITH_THE_PATCH python codegen/fp8_sass.py
"""

import os
import pathlib
import re
import subprocess
import tempfile

import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from ops.triton_loss import loss_kernel

tool = knobs.nvidia.cuobjdump.path
env = os.environ | {"PATH": f"{pathlib.Path(tool).parent}:{os.environ['PATH']}"}
for pointers in (dict(), dict(fp8="*fp8e5", scales="*fp32")):
    signature = dict(logits="*bf16", losses="*fp32", targets="*i64") | pointers
    attrs = {(i,): [["tt.divisibility", 16]] for i in range(len(signature))}
    constants = dict(N=50304, CAP=15.0, BLOCK=8192) | ({} if pointers else dict(fp8=None, scales=None))
    names = ("logits", "losses", "targets", "fp8", "scales", "N", "CAP", "BLOCK")
    signature = {name: signature.get(name, "constexpr") for name in names}
    source = ASTSource(loss_kernel, signature, constants, attrs)
    kernel = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=dict(num_warps=32))
    cubin = pathlib.Path(tempfile.mkdtemp(), "kernel.cubin")
    cubin.write_bytes(kernel.asm["cubin"])
    usage, text = (
        subprocess.run([tool, flag, cubin], env=env, check=True, capture_output=True, text=True).stdout
        for flag in ("-res-usage", "-sass")
    )
    code = [(int(at, 16), op) for at, op in re.findall(r"/\*([0-9a-f]{4,})\*/\s+([^;]+)", text) if op[:3] != "NOP"]
    jumps = [(int(m[1], 16), at) for at, op in code if (m := re.search(r"\bBRA\b.* 0x([0-9a-f]+)", op))]
    sizes = [sum(a <= at <= b for at, _ in code) for a, b in sorted(jumps) if a < b]
    registers, stack = (re.search(rf"{word}:(\d+)", usage)[1] for word in ("REG", "STACK"))
    spills = sum(bool(re.search(r"\b(STL|LDL)\b", op)) for _, op in code)
    converts = {op.split()[0] if op[0] != "@" else op.split()[1] for _, op in code if "E5M2" in op}
    print(
        "with float8:" if pointers else "without:", f"{registers} registers, {stack} B stack, {spills} spills,",
        f"{kernel.metadata.shared} B shared, {len(code)} instructions, loops {sizes}: {sum(sizes) / 8:.1f} an element {converts or ''}",
    )
