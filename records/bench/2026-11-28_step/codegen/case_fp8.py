"""For gpu_codegen.py: a block with --fp8. READS=30 OPS=60; MODEL=mlp: without attention's projections, as before."""

import os

from case_block import case as plain_case

from ops.linear import apply_fp8


def case():
    module, args = plain_case()
    apply_fp8(module.block.mlp if os.environ.get("MODEL") == "mlp" else module.block)
    return module, args
