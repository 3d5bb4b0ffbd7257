"""What carries a run and never changes its mathematics: flags, devices and ranks, checks, checkpoints, logs, errors."""

import os


def set_environment(decoding: bool = False) -> None:
    """Set what PyTorch and its compiler read as they are imported; what is set already stays. Scripts call it first."""
    if "OMP_WAIT_POLICY" not in os.environ and not decoding:  # whose kernels take less than to wake a thread
        os.environ.setdefault("GOMP_SPINCOUNT", "2000")  # idle threads spin 150 times shorter, or shared cores crawl
    os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")  # no compiling of headers for each vector instruction set
    os.environ.setdefault("AOT_INDUCTOR_ENABLE_LINE_TABLES", "0")  # those are for profilers of C++
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # DDP's warning that no parameter was unused, as is hoped
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # --profile prints no lines of the profiler's own
