"""--profile: PyTorch's profiler over a few steps, with a trace and a table."""

import contextlib

import torch

from runtime.log import RunLogger


@contextlib.contextmanager
def profile_steps(n_steps: int, steps_left: int, logger: RunLogger):
    """Yields a function to call after each step; it skips 2, warms up for one, and reports the n_steps after.

    The trace (and on CUDA the history of memory) goes to the run's folder, the table to the log. For 0 steps, or more
    than are left, it does nothing.
    """
    folder, rank, cuda = logger.folder, logger.dist_ctx.rank, logger.dist_ctx.device.type == "cuda"

    def report(profiler) -> None:
        profiler.export_chrome_trace(str(folder / f"trace_rank{rank}.json"))
        by = "self_device_time_total" if cuda else "self_cpu_time_total"
        logger.info(
            profiler.key_averages().table(sort_by=by, row_limit=10, max_name_column_width=60)
        )
        if cuda:
            torch.cuda.memory._dump_snapshot(str(folder / f"memory_rank{rank}.pickle"))

    if not n_steps or steps_left < n_steps + 3:
        if n_steps:
            logger.info(
                f"--profile {n_steps} has no effect: it starts after 3 steps, and {steps_left} are left"
            )
        yield lambda: None
        return
    with contextlib.ExitStack() as stack:
        if cuda:
            torch.cuda.memory._record_memory_history(stacks="python", max_entries=100_000)
            stack.callback(torch.cuda.memory._record_memory_history, enabled=None)
        schedule = torch.profiler.schedule(wait=2, warmup=1, active=n_steps, repeat=1)
        # there is one cycle: acc_events keeps 2.11 from warning of others
        profiler = torch.profiler.profile(schedule=schedule, on_trace_ready=report, acc_events=True)
        yield stack.enter_context(profiler).step
