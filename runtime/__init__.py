"""What a run needs around the page: flags, sizes, devices and ranks, checks, checkpoints, logs, errors."""

import os


def set_environment(decoding: bool = False) -> None:
    """Set variables that PyTorch and its compiler read on import, unless they are set. Scripts call it first."""
    if (
        "OMP_WAIT_POLICY" not in os.environ and not decoding
    ):  # whose kernels are shorter than waking a thread
        os.environ.setdefault(
            "GOMP_SPINCOUNT", "5000"
        )  # idle threads spin 1/60 as long, or shared cores crawl
    os.environ.setdefault(
        "TORCHINDUCTOR_VEC_ISA_OK", "1"
    )  # no trial compilation for each vector instruction set
    os.environ.setdefault("AOT_INDUCTOR_ENABLE_LINE_TABLES", "0")  # those are for profilers of C++
    os.environ.setdefault(
        "TORCH_CPP_LOG_LEVEL", "ERROR"
    )  # no DDP warning that all parameters were used
    os.environ.setdefault(
        "KINETO_LOG_LEVEL", "6"
    )  # --profile prints no lines of the profiler's own
