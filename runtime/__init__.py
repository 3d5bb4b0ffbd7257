"""What a run needs besides data and model: flags, device, ranks, checkpoints, log."""

import os


def set_environment(decoding: bool = False) -> None:
    """Set variables that PyTorch reads when it is imported, unless the user has set them.

    decoding: the script generates text, token by token.
    """
    # Let idle OpenMP threads spin for a sixtieth of the default: spinning slows other programs on
    # the same cores. Not for decoding, whose kernels take less time than waking a sleeping thread
    if "OMP_WAIT_POLICY" not in os.environ and not decoding:
        os.environ.setdefault("GOMP_SPINCOUNT", "5000")
    # Inductor compiles no test program for each vector instruction set, and no line tables, which
    # are for profilers of C++
    os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")
    os.environ.setdefault("AOT_INDUCTOR_ENABLE_LINE_TABLES", "0")
    # Huge pages for large tensors on CPUs; read at the first allocation
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    # DDP does not warn that all parameters were used, and the profiler prints no lines of its own
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")
