"""--profile: PyTorch's profiler over a few steps, with a trace and a table."""

import contextlib

import torch

from runtime.log import RunLogger
from runtime.ranks import DistContext


class StepProfiler(contextlib.ExitStack):
    """A context whose step() is called after each step; it skips 2, warms up for one, and reports the n_steps after.

    Its trace (and on CUDA the history of memory) goes to the run's folder, its table to the log. For 0 steps, or more
    than are left, it does nothing.
    """

    def __init__(self, n_steps: int, steps_left: int, logger: RunLogger, dist_ctx: DistContext):
        super().__init__()
        self.n_steps, self.logger, self.dist_ctx, self.profiler = n_steps, logger, dist_ctx, None
        if n_steps and steps_left < n_steps + 3:
            logger.info(f"--profile {n_steps} has no effect: it starts after 3 steps, and {steps_left} are left")
            self.n_steps = 0

    def __enter__(self):
        if not self.n_steps:
            return self
        if self.dist_ctx.device.type == "cuda":
            torch.cuda.memory._record_memory_history(stacks="python", max_entries=100_000)
            self.callback(torch.cuda.memory._record_memory_history, enabled=None)
        schedule = torch.profiler.schedule(wait=2, warmup=1, active=self.n_steps, repeat=1)
        # there is one cycle: acc_events keeps 2.11 from warning of others
        profiler = torch.profiler.profile(schedule=schedule, on_trace_ready=self.report, acc_events=True)
        self.profiler = self.enter_context(profiler)
        return self

    def step(self) -> None:
        if self.profiler:
            self.profiler.step()

    def report(self, profiler) -> None:
        folder, rank, cuda = self.logger.folder, self.dist_ctx.rank, self.dist_ctx.device.type == "cuda"
        profiler.export_chrome_trace(str(folder / f"trace_rank{rank}.json"))
        by = "self_device_time_total" if cuda else "self_cpu_time_total"
        self.logger.info(profiler.key_averages().table(sort_by=by, row_limit=10, max_name_column_width=60))
        if cuda:
            torch.cuda.memory._dump_snapshot(str(folder / f"memory_rank{rank}.pickle"))
