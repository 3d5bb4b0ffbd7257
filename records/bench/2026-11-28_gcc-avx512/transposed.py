"""Compiled against eager for a function that transposes 16-bit numbers, with and without ops/compile.py's GCC flag.

TORCHINDUCTOR_CPP_MARCH="skylake-avx512 -mtune=generic" TORCHINDUCTOR_CACHE_DIR=$(mktemp -d) \
    PYTHONPATH=. python records/bench/2026-11-28_gcc-avx512/transposed.py [fix]
"""

import sys

import torch

from ops.compile import keep_gcc_from_copying

if len(sys.argv) > 1:
    keep_gcc_from_copying()


def transposed(x):
    g = x.mT
    return torch.cat((g[..., :32] * 2, g[..., 32:]), -1)


for dtype in (torch.bfloat16, torch.float16):
    x = torch.randn(8, 128, 256).to(dtype)
    wrong = int((torch.compile(transposed)(x) != transposed(x)).sum())
    print(f"{dtype}: {wrong:,} of {x.numel():,} wrong")
