"""Cases of test_benchmarks.py that go wrong. They run in processes of their own, which import nothing else for them."""

import os
import signal
import sys
import time


def endless_case():
    print(os.getpid(), file=sys.stderr, flush=True)
    while True:
        time.sleep(0.1)
    yield


def killed_case():
    yield "ready"
    os.kill(os.getpid(), signal.SIGKILL)


def broken_case():
    yield "ready"
    yield 1 / 0


def missing_file_case():
    yield "ready"
    yield open("/nonexistent/file")


def full_case():
    yield "ready"
    raise RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate")


def dying_case(flags, unfused):
    """A step of the plain stack takes 20 ms, any other 10; the plain stack's third kills its process."""
    yield dict(loss=1.0, tokens=512, flops=1e6, micro_batch=1, peak_mb=1.0, setup_s=0.1, datasheet_flops=None)
    for _ in range(2):
        yield 0.02 if flags["attn"] == "math" else 0.01
    while flags["attn"] != "math":
        yield 0.01
    os.kill(os.getpid(), signal.SIGKILL)


def small_matmul_case(flags):
    """ladder.matmul_case with matrices that take a hundredth of the time."""
    import torch

    from benchmarks.ladder import matmul_flops
    from runtime.launch import DTYPES, select_dtype

    device = torch.device("cpu")
    name = select_dtype("auto", device)
    yield name
    while True:
        yield max(matmul_flops(512, DTYPES[name], device) for _ in range(3))


def failing_rank(flags, repeats, threads, environment):
    """The last of several ranks fails by itself, while the others wait for it in a collective."""
    os.environ.update(environment)
    world_size = int(environment["WORLD_SIZE"])
    if world_size == 1:
        yield dict(seconds=[0.01], exposed=[], micro_batch=1, threads=1, peak_mb=1.0)
    import torch.distributed as dist

    dist.init_process_group("gloo")
    if environment["RANK"] == str(world_size - 1):
        if flags["seed"] == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        raise ZeroDivisionError("the last rank's own mistake")
    dist.barrier()
    yield


def unlucky_run(flags):
    """A training run that diverges, whatever its flags."""
    yield None
    yield dict(val_loss=None), []


def killed_run(flags):
    """A training run that the system kills."""
    yield None
    os.kill(os.getpid(), signal.SIGKILL)
