"""--profile: PyTorch's profiler over a few steps, with a trace and a table."""

import contextlib

import torch


@contextlib.contextmanager
def profile_steps(n_steps: int, run):
    """Profile n_steps steps after the first three; yields a function to call after each step.

    The trace goes to the folder of the Run, the table to its log. For 0 steps it does nothing.
    """
    steps_left = run.state.cfg.max_steps - run.state.step
    if n_steps and steps_left < n_steps + 3:
        run.info(
            f"WARNING: --profile {n_steps} needs {n_steps + 3} steps, and {steps_left} are left"
        )
    if not n_steps:
        yield lambda: None
        return

    rank = run.dist_ctx.rank
    on_cuda = run.dist_ctx.device.type == "cuda"

    def report(profiler) -> None:
        profiler.export_chrome_trace(str(run.folder / f"trace_rank{rank}.json"))
        sort_by = "self_device_time_total" if on_cuda else "self_cpu_time_total"
        averages = profiler.key_averages()
        run.info(averages.table(sort_by=sort_by, row_limit=10, max_name_column_width=60))

    schedule = torch.profiler.schedule(wait=2, warmup=1, active=n_steps, repeat=1)
    # There is one cycle: acc_events keeps PyTorch 2.11 from warning of others
    profiler = torch.profiler.profile(schedule=schedule, on_trace_ready=report, acc_events=True)
    with profiler:
        yield profiler.step
