"""What the user sees of a run: log.txt, metrics.jsonl, Weights & Biases, and the console."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import shlex
import sys
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import torch
from torch import Tensor

from common.errors import UserError, print_line
from common.files import atomic_write, fsync, sha256_of_file
from common.values import nan_to_none
from runtime.device import peak_flops, peak_memory_mb
from runtime.progress import Clock, time_left
from runtime.ranks import DistContext, mean_over_ranks, run_on_rank0
from runtime.run_folder import copy_sources, run_sources

if TYPE_CHECKING:
    from runtime.run import Run
    from train_gpt import Config, TrainState

SECTION = "=" * 40  # a line of log.txt begins so at each start of a run


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Read the rows of a metrics.jsonl, if there is one. The final line of a killed run is torn."""
    rows = []
    if path.exists():
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            with contextlib.suppress(ValueError):
                rows.append(json.loads(line))
    return rows


class Log:
    """The lines and rows of a run. Only rank 0 writes and prints."""

    def __init__(self, folder: Path, dist_ctx: DistContext, clock: Clock):
        self.folder = folder
        self.dist_ctx = dist_ctx
        self.clock = clock
        self.evaluations: list[dict[str, Any]] = []  # their rows
        # Open from begin() on, on rank 0
        self.text: TextIO | None = None
        self.metrics: TextIO | None = None
        self.wandb: Any = None
        self.early_lines: list[str] = []  # for log.txt, from before it is open
        self.losses: list[Tensor] = []  # of the steps since the previous logged one
        # At the previous logged step
        self.logged_tokens = 0
        self.logged_train_time = 0.0
        self.mfu_per_speed = math.nan  # MFU / (tokens/s)

    # ----------------------------------------------------------------------------------------------
    # Files

    def begin(self, run: Run) -> None:
        """Open the files. A resumed run continues them after its step. Raises UserError."""
        state = run.state
        cfg = state.cfg
        self.logged_tokens = state.tokens
        self.logged_train_time = self.clock.train_time
        peak = peak_flops(self.dist_ctx.device, cfg.dtype) or math.nan
        flops_per_token = state.raw_model.flops_per_token()
        self.mfu_per_speed = flops_per_token / (peak * self.dist_ctx.world_size)

        # What was logged before the step that is resumed, the same on all ranks
        is_branch = run.saved_step != state.step  # from a checkpoint of another folder
        history = run_on_rank0(lambda: self.open_files(cfg, state.step, is_branch))
        self.evaluations = [row for row in history if "val_loss" in row]
        for row in self.evaluations:
            row["val_loss"] = math.nan if row["val_loss"] is None else row["val_loss"]
        # An evaluation may have come after the checkpoint
        times = [row["wall_time_s"] for row in history]
        self.clock.earlier_wall_time = max([self.clock.earlier_wall_time, *times])

    def open_files(self, cfg: Config, step: int, is_branch: bool) -> list[dict[str, Any]]:
        """Open the files on rank 0; returns the rows of metrics.jsonl that the run continues.

        log.txt gets the flags, the command and the SHA-256 of the sources, which are copied to
        source/, or to source_<step>/ at a resume with changed ones.
        """
        # metrics.jsonl
        path = self.folder / "metrics.jsonl"
        rows = read_rows(path)
        history = [row for row in rows if row["step"] <= step and not is_branch]
        with atomic_write(path) as file:
            file.writelines(json.dumps(row).encode() + b"\n" for row in history)
        self.metrics = open(path, "a", encoding="utf-8")

        # log.txt and source/
        path = self.folder / "log.txt"
        self.text = open(path, "a+" if step else "w+", encoding="utf-8", errors="replace")
        self.text.seek(0)
        earlier = self.text.read()
        flags = dataclasses.asdict(cfg)
        sources = run_sources()
        hashes = [f"{name} sha256 {sha256_of_file(source)}" for name, source in sources.items()]
        hashes_line = f"sources: {', '.join(hashes)}"
        if hashes_line not in earlier:  # else a start with the same sources has copied them
            source_folder = f"source_{step}" if step else "source"
            copy_sources(sources, self.folder / source_folder)
        for line in (
            f"{SECTION} run",
            json.dumps(flags),
            f"command: {shlex.join(sys.argv)}",
            hashes_line,
            *self.early_lines,
        ):
            self.write(self.text, line)

        if cfg.wandb:
            self.start_wandb(flags, step, is_new=not step or history != rows)
        return history

    def start_wandb(self, flags: dict[str, Any], step: int, is_new: bool) -> None:
        try:
            import wandb

            # A resumed run continues its own, unless that has rows of later steps
            id_file = self.folder / "wandb_id"
            name = os.environ.get("WANDB_NAME") or self.folder.name
            if is_new or not id_file.exists():
                id_file.write_text(os.environ.get("WANDB_RUN_ID") or os.urandom(4).hex())
                name += f" from step {step}" if step else ""
            self.wandb = wandb.init(
                project=os.environ.get("WANDB_PROJECT") or "train_gpt",
                name=name,
                id=id_file.read_text(),
                resume="allow",
                dir=self.folder,
                config=flags,
            )
        except Exception as error:  # no package, no login, no network
            raise UserError(
                f"--wandb could not start ({error}); use `wandb login` or WANDB_MODE=offline"
            ) from None

    def sync(self) -> None:
        """Put the metrics so far on the disk: a checkpoint resumes from them. Raises OSError."""
        self.metrics.flush()  # what a full disk held back
        fsync(self.metrics.fileno())

    def close(self) -> None:
        for file in (self.text, self.metrics):
            if file:
                with contextlib.suppress(OSError):  # a full disk has been reported
                    file.close()
        if self.wandb:
            self.wandb.finish()

    # ----------------------------------------------------------------------------------------------
    # Lines and rows

    def write(self, file: TextIO, line: str) -> None:
        """Append a line to a file; a full disk does not end the run."""
        try:
            file.write(line + "\n")
            file.flush()
        except OSError as error:
            print_line(f"WARNING: {file.name} cannot be written ({error.strerror})")

    def info(self, text: str) -> None:
        """Print a line, and keep it in log.txt."""
        if self.dist_ctx.rank > 0:
            return
        print_line(text)
        if self.text:
            self.write(self.text, text)
        else:
            self.early_lines.append(text)

    def step(self, run: Run, grad_norm: float) -> None:
        """Log a training step, with the mean loss, over ranks, of the steps since the last line."""
        state = run.state
        train_loss = mean_over_ranks(dict(loss=torch.stack(self.losses).mean()))["loss"]
        self.losses.clear()

        # The learning rate of Muon's group, or of the first
        groups = state.optimizer.param_groups
        muon_groups = [group for group in groups if group.get("kind") == "muon"]
        lr = (muon_groups or groups)[0]["lr"]

        # Speed since the previous logged step
        train_time = self.clock.train_time
        seconds = max(train_time - self.logged_train_time, 1e-9)
        speed = (state.tokens - self.logged_tokens) / seconds
        self.logged_tokens = state.tokens
        self.logged_train_time = train_time
        mfu = speed * self.mfu_per_speed
        memory = peak_memory_mb(self.dist_ctx.device)

        # Time so far and still to go
        eta = f"{as_time(self.clock.wall_time)} < {as_time(time_left(run))}"

        mfu_text = f"mfu {mfu:.1%} | " if math.isfinite(mfu) else ""
        line = (
            f"loss {train_loss:.4f} | lr {lr:.2e} | norm {grad_norm:.3f} | {speed:,.0f} tok/s | "
            f"{mfu_text}{memory:,.0f} MiB | {eta}"
        )
        self.row(
            state,
            line,
            train_loss=train_loss,
            grad_norm=grad_norm,
            lr=lr,
            tokens_per_s=speed,
            mfu=mfu,
            peak_mem_mb=memory,
        )

    def evaluation(self, state: TrainState, val_loss: float, val_bpb: float) -> None:
        """Log a validation loss, in nats per token and in bits per byte."""
        bpb_text = f"val_bpb {val_bpb:.4f} | " if math.isfinite(val_bpb) else ""
        line = f"val_loss {val_loss:.4f} | {bpb_text}train_time {self.clock.train_time:.1f} s"
        self.evaluations.append(self.row(state, line, val_loss=val_loss, val_bpb=val_bpb))

    def row(self, state: TrainState, line: str, **values: float) -> dict[str, Any]:
        """Print a line and record a row, with step, times, and state.metrics averaged over ranks.

        Returns the row.
        """
        metrics = mean_over_ranks(state.metrics)
        max_steps = str(state.cfg.max_steps)
        words = [f"step {state.step:>{len(max_steps)}}/{max_steps}", line]
        words += [f"{name} {value:.4g}" for name, value in metrics.items()]
        self.info(" | ".join(words))

        row = dict(step=state.step, tokens=state.tokens) | values
        row = row | metrics | row  # a metric of this name replaces none of them
        row["train_time_s"] = self.clock.train_time
        row["wall_time_s"] = self.clock.wall_time
        if self.metrics:
            self.write(self.metrics, json.dumps(nan_to_none(row)))
        if self.wandb:
            try:
                self.wandb.log(nan_to_none(row), step=state.step)
            except Exception as error:  # whatever the service raises
                self.wandb = None
                self.info(f"WARNING: --wandb has failed ({error}); the run continues without it")
        return row

    @property
    def last_eval_step(self) -> int | None:
        return self.evaluations[-1]["step"] if self.evaluations else None


def as_time(seconds: float) -> str:
    return str(timedelta(seconds=int(max(0, seconds))))
