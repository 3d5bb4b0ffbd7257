"""What a run reports: rows of metrics.jsonl, lines of the console, the summary, and what follows from them."""

import math
import time
from collections import deque

import torch
from torch import Tensor

from data.shards import recorded_hashes
from runtime.checkpoint import check_optimizer_state, collect_extra
from runtime.errors import report_skipped
from runtime.launch import device_summary, peak_flops, peak_memory_mb
from runtime.logger import (
    RunLogger,
    TrainTimer,
    check_metrics,
    closing_lines,
    eval_line,
    is_best,
    is_loss_spike,
    nan_to_none,
    step_line,
)
from runtime.ranks import check_stop, dist_max, dist_means, run_on_rank0
from runtime.watch import check_replicas


class Progress:
    """Records and prints the metrics of a run; every rank calls its methods, rank 0 writes."""

    def __init__(self, state, stream, logger: RunLogger, timer: TrainTimer, past_metrics: list[dict]):
        """state: the trainer's; stream: its TokenStream; past_metrics: rows of a resumed metrics.jsonl."""
        self.state, self.stream, self.logger, self.timer = state, stream, logger, timer
        self.evaluations = [row for row in past_metrics if row.get("val_loss") is not None]
        losses = (row["train_loss"] for row in past_metrics if row.get("train_loss") is not None)
        self.recent_losses = deque(losses, maxlen=10)
        self.flops_per_token = state.raw_model.flops_per_token()
        self.peak_flops = peak_flops(state.dist_ctx.device, state.cfg.dtype)
        self.first_step = state.step
        self.first_tokens = self.last_tokens = state.tokens
        self.first_train_time = self.last_train_time = timer.train_time
        self.bad_steps = 0  # skipped updates in a row, as of the last report
        self.data_stall_s = 0.0

    def next_batch(self, batches) -> Tensor:
        """The next of these batches; counts the seconds for which training waits for it."""
        asked = time.perf_counter()
        batch = next(batches)
        self.data_stall_s += time.perf_counter() - asked
        return batch

    def log_step(self, loss: Tensor, norm: Tensor, lr: float) -> str:
        """Print and record the metrics of the last step, and which updates were skipped; waits for the device.

        loss, norm: as train_step returns them. Returns why the run must end, or "".
        """
        state, cfg, train_time = self.state, self.state.cfg, self.timer.pause()
        collect_extra(state.extra, keep=lambda tensor: None)  # refuses what the first checkpoint would
        if state.step == self.first_step + 1:
            check_optimizer_state(state.raw_model, state.optimizer)
            check_replicas(state.model, state.dist_ctx, state.step)
        metrics = dist_means(state.dist_ctx, {**state.metrics, "train_loss": loss})
        train_loss = metrics.pop("train_loss")
        tokens_per_s = (state.tokens - self.last_tokens) / max(train_time - self.last_train_time, 1e-9)
        self.last_tokens, self.last_train_time = state.tokens, train_time
        peak = (self.peak_flops or math.nan) * state.dist_ctx.world_size
        row = dict(
            step=state.step,
            train_loss=train_loss,
            lr=lr,
            grad_norm=norm.item(),
            tokens=state.tokens,
            tokens_per_s=tokens_per_s,
            mfu=tokens_per_s * self.flops_per_token / peak,
            peak_mem_mb=peak_memory_mb(state.dist_ctx.device),
            train_time_s=train_time,
            wall_time_s=self.timer.wall_time,
        )
        check_metrics(state.metrics, row)
        seconds_per_step = (train_time - self.first_train_time) / (state.step - self.first_step)
        eta_s = seconds_per_step * (cfg.max_steps - state.step)
        spike = is_loss_spike(train_loss, self.recent_losses)
        self.logger.info(step_line(row, cfg.max_steps, eta_s, spike, metrics))
        self.logger.log_metrics(**row, **metrics)
        if math.isfinite(train_loss):
            self.recent_losses.append(train_loss)
        self.bad_steps, failure = report_skipped(
            state.skipped, state.step, self.bad_steps, cfg.max_bad_steps, self.stream, self.logger.info
        )
        return failure

    def log_eval(self, val_loss: float, metrics: dict) -> None:
        """Print and record a validation loss, in nats per token, and what evaluate has put into state.metrics."""
        metrics = dist_means(self.state.dist_ctx, metrics)
        counts = self.stream.meta["splits"].get("val") or {}
        bits_per_nat = counts["tokens"] / counts["bytes"] / math.log(2) if counts.get("bytes") else math.nan
        row = dict(
            step=self.state.step,
            val_loss=val_loss,
            val_bpb=val_loss * bits_per_nat,
            tokens=self.state.tokens,
            train_time_s=self.timer.pause(),
            wall_time_s=self.timer.wall_time,
        )
        check_metrics(metrics, row)
        self.logger.info(eval_line(row, self.state.cfg.max_steps, metrics))
        self.logger.log_metrics(**row, **metrics)
        self.evaluations.append(row)

    def is_evaluated(self) -> bool:
        """Whether the current weights are evaluated, here or before a resume (whose rows rank 0 has)."""
        steps = [row["step"] for row in self.evaluations]
        return dist_max(self.state.dist_ctx, self.state.step in steps) > 0

    def is_best(self) -> bool:
        """Whether the last evaluation is the lowest of several."""
        return run_on_rank0(self.state.dist_ctx, lambda: is_best(self.evaluations, self.state.cfg))

    def summarize(self, stopped_by: str, signals: list[str]) -> dict:
        """Write summary.json, say how the run ended and what to try next; returns the summary.

        Raises RunError on nodes that got none of the signals that ended the run.
        """
        state, cfg, train_time = self.state, self.state.cfg, self.timer.pause()
        trained_s = train_time - self.first_train_time
        if state.dist_ctx.device.type == "cuda":
            stats = torch.cuda.memory_stats()
            self.logger.info(
                f"allocator: {stats['num_alloc_retries']} retries, {stats['num_ooms']} times out of memory"
            )
        finite = [row["val_loss"] for row in self.evaluations if math.isfinite(row["val_loss"])]
        last = self.evaluations[-1] if self.evaluations else dict(val_loss=math.nan, val_bpb=math.nan)
        reached = next((row for row in self.evaluations if row["val_loss"] <= cfg.target_val_loss), None)
        summary = dict(
            stopped_by=stopped_by,
            step=state.step,
            val_loss=last["val_loss"],
            best_val_loss=min(finite, default=math.nan),
            val_bpb=last["val_bpb"],
            target_reached=reached and dict(step=reached["step"], train_time_s=reached["train_time_s"]),
            tokens=state.tokens,
            tokens_per_s=(state.tokens - self.first_tokens) / trained_s if trained_s else math.nan,
            machine=device_summary(state.dist_ctx),
            val_tokens=self.stream.num_eval_seqs(cfg.eval_tokens) * cfg.seq_len,
            eval_part=self.stream.eval_part,
            files=recorded_hashes(self.stream.meta),
            dtype=cfg.dtype,
            data_wait_s=self.data_stall_s,
            train_time_s=train_time,
            wall_time_s=self.timer.wall_time,
        )
        summary = nan_to_none(summary)
        if state.step > self.first_step or not (self.logger.folder / "summary.json").exists():
            self.logger.write_summary(summary)  # a run that was complete before keeps its figures
        self.logger.info(closing_lines(summary, trained_s, self.logger.folder, cfg.max_steps))
        check_stop(state.dist_ctx, signals, stopped_by)
        return summary
