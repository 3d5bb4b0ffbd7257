"""A run's folder (log.txt, metrics.jsonl, summary.json, source/), the console, Weights & Biases, and the clock."""

import contextlib
import hashlib
import itertools
import json
import math
import os
import shlex
import statistics
import sys
import time
import traceback
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch

from data.shards import atomic_write, recorded_hashes
from data.tokenizers import VOCABULARY_FILE
from runtime.errors import RunError, UserError, catch_signals, explain
from runtime.launch import SOURCE_FILES, device_summary, peak_flops, peak_memory_mb
from runtime.ranks import DistContext, check_stop, dist_means, printed_by, run_on_rank0

try:
    import fcntl  # not on Windows, where a run's folder is not locked
except ImportError:
    fcntl = None

SECTION = "=" * 40  # begins a section of log.txt: each start of a run


def new_run_folder(preset: str) -> Path:
    """Make runs/<time>-<preset>, with a number appended if it exists."""
    name = f"runs/{time.strftime('%Y%m%d-%H%M%S')}-{preset}"
    for number in itertools.count(1):
        path = Path(name if number == 1 else f"{name}-{number}")
        with contextlib.suppress(FileExistsError):
            path.mkdir(parents=True)
            return path


@contextlib.contextmanager
def open_run(out_dir: str, preset: str, dist_ctx: DistContext):
    """Yields the logger of the run's folder, locked, and the list that signals land in by name.

    out_dir: "" makes runs/<time>-<preset>. The log also gets the error that ends a run. Raises UserError.
    """
    folder = Path(out_dir or run_on_rank0(dist_ctx, lambda: new_run_folder(preset)))
    logger = RunLogger(folder, dist_ctx)
    with contextlib.closing(logger), catch_signals() as signals:
        run_on_rank0(dist_ctx, logger.lock)
        try:
            yield logger, signals
        except Exception as error:
            if logger.log:  # the command line prints it on standard error, which may be lost
                logger.write(logger.log, f"ended: {explain(error) or traceback.format_exc()}")
            raise


class RunLogger:
    """The run's folder and everything the run reports. Silent on every rank but 0."""

    def __init__(self, folder: Path, dist_ctx: DistContext):
        self.folder, self.dist_ctx, self.timer = folder, dist_ctx, TrainTimer(dist_ctx.device)
        self.is_rank0 = dist_ctx.rank == 0
        self.log = self.metrics = self.wandb = self.lock_file = None
        self.made = self.is_rank0 and not any(folder.glob("*"))  # for this run, which may not begin
        self.early = []  # lines from before log.txt is open

    def lock(self) -> None:
        """Make the folder, lock it against other runs, and delete partial files of a run that died. Raises UserError.

        After a restart by torchrun it waits: a rank whose torchrun was killed ends when it misses the others.
        """
        deadline = time.monotonic() + 30 * (int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", 0)) > 0)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self.lock_file = open(self.folder / ".lock", "a")
            while fcntl:
                try:
                    fcntl.flock(self.lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() >= deadline:
                        advice = "give another --out_dir or wait for it"
                        raise UserError(f"another run is using {self.folder}; {advice}") from None
                    time.sleep(0.2)
                except OSError as error:  # some network file systems have no locks
                    self.info(f"{self.folder} is not locked against a second run ({error})")
                    break
            for partial in self.folder.glob(".tmp-*"):
                partial.unlink()
        except OSError as error:
            advice = "give another --out_dir"
            raise UserError(f"the run's folder {self.folder} cannot be written ({error}); {advice}") from None

    def open(self, flags: dict, first_step: int, vocabulary: str | None = None) -> list[dict]:
        """Start log.txt and metrics.jsonl, or continue them after `first_step` updates; returns the rows up to there.

        log.txt gets the flags, the command and, in one line, the SHA-256 of the sources, which are copied beside it,
        into source/, or source_<step>/ if a resumed run's differ; vocabulary: of byte pairs, kept as the data's folder
        has it. All ranks get the rows. Raises UserError.
        """
        return run_on_rank0(self.dist_ctx, lambda: self.open_files(flags, first_step, vocabulary))

    def open_files(self, flags: dict, first_step: int, vocabulary: str | None) -> list[dict]:
        if vocabulary:
            with atomic_write(self.folder / VOCABULARY_FILE) as file:
                file.write(vocabulary.encode())
        rows, kept = self.folder / "metrics.jsonl", []
        if first_step and rows.exists():
            found = read_rows(rows.read_text(encoding="utf-8", errors="replace"))
            kept = [row for row in found if isinstance(row.get("step"), int) and row["step"] <= first_step]
        with atomic_write(rows) as file:
            file.writelines(json.dumps(row).encode() + b"\n" for row in kept)
        self.metrics = open(rows, "a", encoding="utf-8")
        self.log = open(self.folder / "log.txt", "a" if first_step else "w", encoding="utf-8", errors="replace")
        sources, folder = {name: path.read_bytes() for name, path in SOURCE_FILES.items()}, self.folder / "source"
        there = {name: (folder / name).read_bytes() for name in sources if (folder / name).is_file()}
        if first_step and there != sources:
            folder = self.folder / f"source_{first_step}"
            changed = [name for name in sources if there.get(name) != sources[name]]
            self.info(f"the code is not the run's first any more: {', '.join(changed)}; see {folder}")
        for name, content in sources.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(content)
        hashes = ", ".join(f"{name} sha256 {hashlib.sha256(content).hexdigest()}" for name, content in sources.items())
        command = f"command: {shlex.join(sys.argv)}"
        for line in (f"{SECTION} run", json.dumps(flags), command, f"sources: {hashes}", *self.early):
            self.write(self.log, line)
        if flags["wandb"]:
            try:
                import wandb

                self.wandb = wandb.init(project="train_gpt", name=self.folder.name, dir=self.folder, config=flags)
            except Exception as error:  # no package, no login, no network
                advice = "run `wandb login`, set WANDB_MODE=offline or remove it"
                raise UserError(f"--wandb could not start ({error}); {advice}") from None
        return kept

    def write(self, file, line: str) -> None:
        """Append a line to a file; a full disk does not end the run."""
        try:
            file.write(line + "\n")
            file.flush()
        except OSError as error:
            print(f"WARNING: {file.name} cannot be written ({error.strerror})", flush=True)

    def info(self, text: str) -> None:
        """Print a line, and keep it in log.txt."""
        if self.is_rank0:
            print(text, flush=True)
            self.write(self.log, text) if self.log else self.early.append(text)

    def log_metrics(self, values: dict) -> None:
        """One line of metrics.jsonl; non-finite values are written as null."""
        if self.is_rank0:
            values = nan_to_none(values)
            self.write(self.metrics, json.dumps(values))
            if self.wandb:
                self.wandb.log({k: v for k, v in values.items() if k != "step"}, step=values["step"])

    def sync(self) -> None:
        """Put the metrics so far on the disk: a checkpoint resumes from them. Raises OSError."""
        self.metrics.flush()  # what a full disk held back
        os.fsync(self.metrics.fileno())

    def write_summary(self, values: dict) -> None:
        if self.is_rank0:
            with atomic_write(self.folder / "summary.json") as file:
                file.write(json.dumps(values, indent=1).encode() + b"\n")

    def close(self) -> None:
        """Close the files, and remove a folder that was made for a run that has not begun."""
        remove = self.lock_file and self.made and not self.log
        if remove:
            (self.folder / ".lock").unlink(missing_ok=True)  # while it is locked
        for file in filter(None, (self.log, self.metrics, self.lock_file)):
            with contextlib.suppress(OSError):  # a full disk has been reported
                file.close()
        if remove:
            with contextlib.suppress(OSError):  # something else is in it
                self.folder.rmdir()
        if self.wandb:
            self.wandb.finish()


def read_rows(metrics: str) -> list[dict]:
    """The rows of a metrics.jsonl, without the torn line of a run that died or is writing."""
    rows = []
    for line in metrics.splitlines():
        with contextlib.suppress(ValueError, RecursionError):
            rows.append(json.loads(line))
    return [row for row in rows if isinstance(row, dict)]


def nan_to_none(value):
    """The same dict or list with None for numbers that are not finite, which JSON does not have."""
    return json.loads(json.dumps(value), parse_constant=lambda _: None)


def h_mm_ss(seconds: float) -> str:
    return str(timedelta(seconds=int(max(0, seconds))))


class TrainTimer:
    """Seconds of training, which only training() counts, and `wall_time`, everything since this object was made, so
    without the imports. A resumed run adds the time from before."""

    def __init__(self, device: torch.device):
        self.device, self.created = device, time.perf_counter()
        self.train_time = self.wall_before = 0.0
        self.step_s = self.eval_s = 0.0  # of the last step (or the one before, if that was faster) and evaluation
        self.recent_s = [0.0, 0.0]

    @property
    def wall_time_here(self) -> float:
        """Of this process, without what came before a resumed run."""
        return time.perf_counter() - self.created

    @property
    def wall_time(self) -> float:
        return self.wall_before + self.wall_time_here

    @contextlib.contextmanager
    def training(self):
        """Context of a training step, until the device has done it."""
        began = time.perf_counter()
        yield
        if self.device.type != "cpu":
            torch.accelerator.synchronize()
        took = time.perf_counter() - began
        self.train_time += took
        self.recent_s = [self.recent_s[1] or took, took]
        self.step_s = min(self.recent_s)  # a step that compiles or stalls is not what the next one will take

    @contextlib.contextmanager
    def evaluating(self):
        """Context of an evaluation."""
        began = time.perf_counter()
        yield
        self.eval_s = time.perf_counter() - began

    def tail_s(self, steps_per_eval: float) -> float:
        """Seconds that another step and the last evaluation will take.

        steps_per_eval: tokens of an evaluation by tokens of a step, whose forward pass is about 0.4 of it.
        """
        return 1.5 * self.step_s + (self.eval_s or 0.4 * steps_per_eval * self.step_s)


class Reporter:
    """The metrics of a run: rows of metrics.jsonl, lines of the console, and what the summary needs of them."""

    def __init__(self, logger, dist_ctx: DistContext, rows: list[dict], tokens: int, flops: float, dtype: str):
        """rows: of the metrics.jsonl of a run that is resumed, the same on every rank; tokens: trained on so far.

        flops: of the model, per token; dtype: of the matmuls.
        """
        self.logger, self.timer, self.dist_ctx = logger, logger.timer, dist_ctx
        self.flops_per_token = flops
        self.peak_flops = (peak_flops(dist_ctx.device, dtype) or math.nan) * dist_ctx.world_size
        self.evaluations = [row for row in rows if row.get("val_loss") is not None]
        losses = (row["train_loss"] for row in rows if row.get("train_loss") is not None)
        self.recent_losses = deque(losses, maxlen=10)
        self.first = self.last = (tokens, self.timer.train_time)
        self.data_wait_s = 0.0

    @property
    def evaluated_at(self) -> int | None:
        """The step of the last evaluation."""
        return self.evaluations[-1]["step"] if self.evaluations else None

    def next_batch(self, batches):
        """The next of these batches; counts the seconds for which training waits for it."""
        asked = time.perf_counter()
        batch = next(batches)
        self.data_wait_s += time.perf_counter() - asked
        return batch

    def log_step(self, row: dict, groups: list[dict], metrics: dict, max_steps: int, minutes: float) -> None:
        """Record and print a training row, of which step, train_loss, grad_norm and tokens are given.

        train_loss and metrics, what edits measure, are averaged over the ranks. groups: of the optimizer, of which the
        learning rate of Muon's is logged, or the first one's. max_steps, minutes: the flags.
        """
        left_s = 60 * minutes - self.timer.wall_time if minutes else self.timer.step_s * (max_steps - row["step"])
        row["lr"] = next((group for group in groups if group.get("kind") == "muon"), groups[0])["lr"]
        metrics = dist_means(self.dist_ctx, metrics | dict(train_loss=row["train_loss"]))
        row["train_loss"] = loss = metrics.pop("train_loss")
        (tokens, train_time), self.last = self.last, (row["tokens"], self.timer.train_time)
        speed = (row["tokens"] - tokens) / max(self.last[1] - train_time, 1e-9)
        row |= dict(tokens_per_s=speed, mfu=speed * self.flops_per_token / self.peak_flops)
        row |= dict(peak_mem_mb=peak_memory_mb(self.dist_ctx.device))
        row |= dict(train_time_s=self.last[1], wall_time_s=self.timer.wall_time)
        before = self.recent_losses
        spike = len(before) >= 5 and loss > np.mean(before) + max(0.1, 4 * np.std(before))
        mfu = f"mfu {row['mfu']:.1%} | " if math.isfinite(row["mfu"]) else ""
        self.logger.info(
            f"step {row['step']:>{len(str(max_steps))}}/{max_steps} | loss {loss:.4f}{' SPIKE' if spike else ''} | "
            f"lr {row['lr']:.2e} | norm {row['grad_norm']:.3f} | {figures(metrics)}{speed:,.0f} tok/s | {mfu}"
            f"{row['peak_mem_mb']:,.0f} MiB | {h_mm_ss(row['wall_time_s'])} < {h_mm_ss(left_s)}"
        )
        self.logger.log_metrics(row | metrics)
        if math.isfinite(loss):
            before.append(loss)

    def log_eval(self, step: int, val_loss: float, tokens: int, metrics: dict, max_steps: int, stream) -> bool:
        """Record and print a validation loss, in nats per token, and metrics; returns whether it is the lowest."""
        metrics = dist_means(self.dist_ctx, metrics)
        counts = stream.meta["splits"].get("val") or {}
        bits_per_nat = counts["tokens"] / counts["bytes"] / math.log(2) if counts.get("bytes") else math.nan
        row = dict(step=step, val_loss=val_loss, val_bpb=val_loss * bits_per_nat, tokens=tokens)
        row |= dict(train_time_s=self.timer.train_time, wall_time_s=self.timer.wall_time)
        bits = f"val_bpb {row['val_bpb']:.4f} | " if math.isfinite(row["val_bpb"]) else ""
        self.logger.info(
            f"step {row['step']:>{len(str(max_steps))}}/{max_steps} | val_loss {row['val_loss']:.4f} | {bits}"
            f"{figures(metrics)}train_time {row['train_time_s']:.1f} s"
        )
        self.logger.log_metrics(row | metrics)
        before = [past["val_loss"] for past in self.evaluations if math.isfinite(past["val_loss"])]
        self.evaluations.append(row)
        return row["val_loss"] < min(before, default=math.inf)

    def summary(self, stopped_by: str, step: int, tokens: int, flags: dict, stream, signals: list[str]) -> dict:
        """Write summary.json, and say how the run ended and what to try next; returns the summary.

        Raises RunError for a run that diverged, and on nodes that got none of the signals that ended the run.
        """
        trained_s = self.timer.train_time - self.first[1]
        losses = [row["val_loss"] for row in self.evaluations]
        last = self.evaluations[-1] if self.evaluations else dict(val_loss=math.nan, val_bpb=math.nan)
        reached = next((row for row in self.evaluations if row["val_loss"] <= flags["target_val_loss"]), None)
        summary = dict(
            stopped_by=stopped_by,
            step=step,
            val_loss=last["val_loss"],
            best_val_loss=min(filter(math.isfinite, losses), default=math.nan),
            val_bpb=last["val_bpb"],
            target_reached=reached and dict(step=reached["step"], train_time_s=reached["train_time_s"]),
            tokens=tokens,
            tokens_per_s=(tokens - self.first[0]) / trained_s if trained_s else math.nan,
            machine=device_summary(self.dist_ctx),
            val_tokens=stream.num_eval_seqs(flags["eval_tokens"]) * stream.seq_len,
            eval_part=stream.eval_part,
            files=recorded_hashes(stream.meta),
            dtype=flags["dtype"],
            data_wait_s=self.data_wait_s,
            train_time_s=self.timer.train_time,
            wall_time_s=self.timer.wall_time,
        )
        summary = nan_to_none(summary)
        if tokens > self.first[0] or not (self.logger.folder / "summary.json").exists():
            self.logger.write_summary(summary)  # a run that was complete before keeps its figures
        folder = shlex.quote(str(self.logger.folder))
        again = f"python train_gpt.py --out_dir {folder} --resume"
        hint = f"to continue: {again}"
        if stopped_by in ("max_steps", "minutes", "target_val_loss"):
            hint = (
                f"next: python sample.py --run {folder} | longer: {again} --max_steps {2 * step} | on your own text: "
            )
            hint += "python data/prepare.py files PATH | larger: --params 10M"
        train_time, wall_time = (f"{seconds:.1f} s" for seconds in (self.timer.train_time, self.timer.wall_time))
        self.logger.info(
            f"stopped by {stopped_by} at step {step}: train_time {train_time} (data stall "
            f"{self.data_wait_s / max(trained_s, 1e-9):.2%}), wall time {wall_time}; everything is in {folder}\n{hint}"
        )
        check_stop(self.dist_ctx, signals, stopped_by)
        if stopped_by == "diverged":
            found = f"the loss or gradient was not finite in many steps in a row, to step {step}"
            advice = "try lower learning rates, --grad_clip 1 or --dtype fp32, or look at the data"
            error = RunError(f"{found} (ckpt_{step}.pt has the weights from before); {advice}")
            raise printed_by(error, self.dist_ctx.rank == 0)
        return summary


def figures(metrics: dict[str, float]) -> str:
    """What edits measure, for a line of the console."""
    return "".join(f"{name} {value:.4g} | " for name, value in metrics.items())


def run_trials(train: Callable, seed: int, trials: int, out_dir: str) -> list[dict]:
    """train(seed=..., out_dir=..., trials=1) for seed, seed + 1, ..., each in a folder of its own in out_dir.

    Returns the summaries. A single run is in out_dir itself.
    """
    if trials == 1:
        return [train()]
    folder, summaries = Path(out_dir or f"runs/{time.strftime('%Y%m%d-%H%M%S')}-trials"), []
    for number in range(seed, seed + trials):
        summaries.append(train(seed=number, out_dir=str(folder / f"seed_{number}"), trials=1))
        if summaries[-1]["stopped_by"] not in ("max_steps", "minutes"):
            return summaries
    losses = [summary["val_loss"] for summary in summaries]
    if int(os.environ.get("RANK", 0)) == 0 and None not in losses:
        seconds = statistics.mean(summary["train_time_s"] for summary in summaries)
        print(
            f"{len(losses)} trials in {folder}: val_loss {statistics.mean(losses):.4f} +- "
            f"{statistics.stdev(losses):.4f}, train_time {seconds:.1f} s each"
        )
    return summaries
