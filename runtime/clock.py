"""The clock of a run: seconds of training, of evaluations, and in all."""

import contextlib
import time
from collections.abc import Iterator

import torch


class Clock:
    """Times in seconds: of this process, and of the starts before a resume."""

    def __init__(self, device: torch.device):
        self.device = device
        self.began = time.perf_counter()
        self.earlier_wall_time = 0.0  # of the starts before a resume
        self.train_time = 0.0  # training steps of all starts
        self.data_wait_s = 0.0  # waiting for data in this start, which is part of train_time
        self.last_step_s = 0.0
        self.typical_step_s = 0.0
        self.last_eval_s = 0.0

    @property
    def process_time(self) -> float:
        """Seconds since this process began the run, without imports."""
        return time.perf_counter() - self.began

    @property
    def wall_time(self) -> float:
        """Seconds of all starts of the run."""
        return self.earlier_wall_time + self.process_time

    @contextlib.contextmanager
    def timing_step(self):
        """Context of a training step, until the device has finished it."""
        began = time.perf_counter()
        yield
        if self.device.type != "cpu":
            torch.accelerator.synchronize()
        took = time.perf_counter() - began
        self.train_time += took
        # A step that compiles or stalls does not tell how long the next one takes
        self.typical_step_s = min(self.last_step_s or took, took)
        self.last_step_s = took

    @contextlib.contextmanager
    def timing_evaluation(self):
        """Context of an evaluation."""
        began = time.perf_counter()
        yield
        self.last_eval_s = time.perf_counter() - began

    def wait_for(self, batches: Iterator):
        """Take the next batch, and add up the time that training waits for it."""
        asked = time.perf_counter()
        batch = next(batches)
        self.data_wait_s += time.perf_counter() - asked
        return batch
