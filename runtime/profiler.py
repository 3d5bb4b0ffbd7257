"""--profile: PyTorch's profiler over a few steps, with a trace and a table."""

from pathlib import Path

import torch


def maybe_profiler(n_steps: int, steps_left: int, folder: Path, rank: int, cuda: bool, say):
    """A profiler that skips 2 steps, warms up for one, and reports the n_steps after them; None for 0 steps.

    Its trace (and on CUDA the history of memory) goes to `folder`, its table to `say`.
    """
    if not n_steps:
        return None
    if steps_left < n_steps + 3:
        say(f"--profile {n_steps} has no effect: it starts after 3 steps, and {steps_left} are left")

    def report(profiler) -> None:
        profiler.export_chrome_trace(str(folder / f"trace_rank{rank}.json"))
        by = "self_device_time_total" if cuda else "self_cpu_time_total"
        say(profiler.key_averages().table(sort_by=by, row_limit=10, max_name_column_width=60))
        if cuda:
            torch.cuda.memory._dump_snapshot(str(folder / f"memory_rank{rank}.pickle"))
            torch.cuda.memory._record_memory_history(enabled=None)

    if cuda:
        torch.cuda.memory._record_memory_history(stacks="python", max_entries=100_000)
    schedule = torch.profiler.schedule(wait=2, warmup=1, active=n_steps, repeat=1)
    return torch.profiler.profile(schedule=schedule, on_trace_ready=report)
