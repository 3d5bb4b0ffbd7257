"""--profile: PyTorch's profiler over a few steps, with a trace and a table."""

import contextlib

import torch

from runtime.logger import RunLogger
from runtime.ranks import DistContext


@contextlib.contextmanager
def maybe_profiler(n_steps: int, steps_left: int, logger: RunLogger, dist_ctx: DistContext):
    """Yields a profiler that skips 2 steps, warms up for one, and reports the n_steps after them; None for 0 steps.

    Its trace (and on CUDA the history of memory) goes to the run's folder, its table to the log.
    """
    folder, rank, cuda = logger.folder, dist_ctx.rank, dist_ctx.device.type == "cuda"
    if n_steps and steps_left < n_steps + 3:
        logger.info(f"--profile {n_steps} has no effect: it starts after 3 steps, and {steps_left} are left")
    if not n_steps or steps_left < n_steps + 3:
        yield None
        return

    def report(profiler) -> None:
        profiler.export_chrome_trace(str(folder / f"trace_rank{rank}.json"))
        by = "self_device_time_total" if cuda else "self_cpu_time_total"
        logger.info(profiler.key_averages().table(sort_by=by, row_limit=10, max_name_column_width=60))
        if cuda:
            torch.cuda.memory._dump_snapshot(str(folder / f"memory_rank{rank}.pickle"))

    if cuda:
        torch.cuda.memory._record_memory_history(stacks="python", max_entries=100_000)
    try:
        schedule = torch.profiler.schedule(wait=2, warmup=1, active=n_steps, repeat=1)
        # there is one cycle: acc_events keeps 2.11 from warning of others
        with torch.profiler.profile(schedule=schedule, on_trace_ready=report, acc_events=True) as profiler:
            yield profiler
    finally:
        if cuda:
            torch.cuda.memory._record_memory_history(enabled=None)
