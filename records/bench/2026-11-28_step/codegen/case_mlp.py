"""For gpu_codegen.py: case_block.py with mlp.patch; the tool's answer about the device is no constant to Dynamo."""

from case_block import case  # noqa: F401

import ops.functional

ops.functional.is_hopper = lambda x: True
