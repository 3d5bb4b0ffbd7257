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
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from data.shards import UserError, atomic_write

try:
    import fcntl  # not on Windows, where a run's folder is not locked
except ImportError:
    fcntl = None

SECTION = "=" * 40  # begins a section of log.txt: each start of a run, and each later choice of --minutes


class LineWriter:
    """A file to which lines are appended; what a full disk rejects is buffered, and written when there is room."""

    def __init__(self, path: Path, append: bool):
        self.path, self.pending, self.lock = path, b"", threading.Lock()
        self.file = open(path, "ab" if append else "wb", buffering=0)

    def write(self, text: str) -> None:
        """Append text and a newline. A failure is reported on the console; it does not end the run."""
        try:
            self.flush(text.encode("utf-8", errors="replace") + b"\n")
        except OSError as error:
            print(f"WARNING: {self.path} cannot be written ({error.strerror})", flush=True)

    def flush(self, more: bytes = b"") -> None:
        """Write what is pending, then `more`. Raises OSError when not all of it could be written."""
        with self.lock:
            self.pending += more
            while self.pending:
                self.pending = self.pending[self.file.write(self.pending) :]

    def close(self) -> None:
        try:
            self.flush()
        except OSError:
            lines = self.pending.count(10)
            print(f"WARNING: {self.path} lacks its last {lines} lines", flush=True)
        self.file.close()


class RunLogger:
    """The run's folder and everything the run reports. Silent on every rank but 0."""

    def __init__(self, folder: Path, is_rank0: bool = True, made: bool = False):
        """made: the folder was made for this run, and is removed if the run does not begin."""
        self.folder, self.is_rank0, self.made = folder, is_rank0, made
        self.log = self.metrics = self.wandb = self.lock_file = None
        self.early = []  # lines from before log.txt is open

    def lock(self) -> None:
        """Make the folder, lock it against other runs, and delete partial files of a run that died.

        Raises UserError.
        """
        try:
            there = self.folder.exists()
            self.folder.mkdir(parents=True, exist_ok=True)
            self.lock_file = open(self.folder / ".lock", "a")
        except OSError as error:
            raise UserError(
                f"the run's folder {self.folder} cannot be written ({error}); give another --out_dir"
            ) from None
        restarts = int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", 0)) > 0  # not all of them are counted
        deadline = time.monotonic() + 30 * restarts  # a rank whose torchrun was killed ends when it misses the others
        while not self.take_lock():
            if time.monotonic() >= deadline:
                raise UserError(f"another run is using {self.folder}; give another --out_dir or wait for it")
            time.sleep(0.2)
        self.made = self.made or not there  # known only now: another run may have been first
        for pattern in (".tmp-ckpt_*", ".tmp-metrics.jsonl", ".tmp-summary.json"):
            for partial in self.folder.glob(pattern):
                partial.unlink()

    def take_lock(self) -> bool:
        """Whether this process got the folder's lock, or the file system has no locks."""
        try:
            if fcntl:
                fcntl.flock(self.lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError as error:  # some network file systems
            self.info(f"{self.folder} is not locked against a second run ({error})")
        return True

    def open(self, config: dict, first_step: int, sources: dict[str, Path]) -> list[dict]:
        """Start log.txt and metrics.jsonl, or continue them after `first_step` updates; returns the rows up to there.

        log.txt gets the configuration, the command and, in one line, the SHA-256 of the sources (name -> file), which
        are copied beside it.
        """
        if not self.is_rank0:
            return []
        rows, kept = self.folder / "metrics.jsonl", []
        if first_step and rows.exists():
            found = read_rows(rows.read_text(encoding="utf-8", errors="replace"))
            kept = [row for row in found if isinstance(row.get("step"), int) and row["step"] <= first_step]
        with atomic_write(rows) as file:
            file.writelines(json.dumps(row).encode() + b"\n" for row in kept)
        self.metrics = LineWriter(rows, append=True)
        self.log = LineWriter(self.folder / "log.txt", append=first_step > 0)
        self.log_flags(config)
        hashes = self.keep_sources(sources, first_step)
        self.log.write("sources: " + ", ".join(f"{name} sha256 {digest}" for name, digest in hashes.items()))
        for line in self.early:
            self.log.write(line)
        return kept

    def log_flags(self, config: dict) -> None:
        """Begin a section of log.txt: the flags, which hold until the next, and the command."""
        if not self.is_rank0:
            return
        if self.wandb:
            self.wandb.config.update(config, allow_val_change=True)
        for line in (f"{SECTION} run", json.dumps(config), f"command: {shlex.join(sys.argv)}"):
            self.log.write(line)

    def keep_sources(self, sources: dict[str, Path], first_step: int) -> dict[str, str]:
        """Copy the sources (name -> file) into source/, or source_<step>/ if a resumed run's differ; returns hashes."""
        contents = {name: path.read_bytes() for name, path in sources.items()}
        folder = self.folder / "source"
        if first_step and any(not _has(folder / name, content) for name, content in contents.items()):
            folder = self.folder / f"source_{first_step}"
        for name, content in contents.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(content)
        return {name: hashlib.sha256(content).hexdigest() for name, content in contents.items()}

    def start_wandb(self, config: dict) -> None:
        """Log to Weights & Biases as well. Raises UserError when that is not possible."""
        if not self.is_rank0:
            return
        try:
            import wandb

            self.wandb = wandb.init(project="train_gpt", name=self.folder.name, dir=self.folder, config=config)
        except Exception as error:  # no package, no login, no network
            raise UserError(
                f"--wandb could not start ({error}); run `wandb login`, set WANDB_MODE=offline or remove it"
            ) from None

    def info(self, text: str) -> None:
        """Print a line, and keep it in log.txt."""
        if self.is_rank0:
            print(text, flush=True)
            if self.log:
                self.log.write(text)
            else:
                self.early.append(text)

    def log_metrics(self, **values) -> None:
        """One line of metrics.jsonl; non-finite values are written as null."""
        if self.is_rank0:
            values = nan_to_none(values)
            self.metrics.write(json.dumps(values))
            if self.wandb:
                self.wandb.log({k: v for k, v in values.items() if k != "step"}, step=values["step"])

    def sync(self) -> None:
        """Put the metrics so far on the disk: a checkpoint resumes from them. Raises OSError."""
        self.metrics.flush()
        os.fsync(self.metrics.file.fileno())

    def write_summary(self, values: dict) -> None:
        if self.is_rank0:
            with atomic_write(self.folder / "summary.json") as file:
                file.write(json.dumps(values, indent=1).encode() + b"\n")

    def close(self) -> None:
        """Close the files, and remove a folder that was made for a run that has not begun."""
        remove = self.lock_file and self.made and not self.log
        if remove:
            (self.folder / ".lock").unlink(missing_ok=True)  # while it is locked
        for file in (self.log, self.metrics, self.lock_file):
            if file:
                with contextlib.suppress(OSError):  # a full disk has been reported
                    file.close()
        if remove:
            with contextlib.suppress(OSError):  # something else is in it
                self.folder.rmdir()
        if self.wandb:
            self.wandb.finish()


def _has(path: Path, content: bytes) -> bool:
    return path.is_file() and path.read_bytes() == content


def read_rows(metrics: str) -> list[dict]:
    """The rows of a metrics.jsonl, without the torn line of a run that died or is writing."""
    rows = []
    for line in metrics.splitlines():
        with contextlib.suppress(ValueError, RecursionError):
            rows.append(json.loads(line))
    return [row for row in rows if isinstance(row, dict)]


def read_finished_run(folder: Path) -> tuple[dict, dict] | None:
    """Summary and flags of a run that reached its last step; None for any other. Raises UserError if unreadable."""
    if not (folder / "summary.json").exists():
        return None
    try:
        summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
        log = (folder / "log.txt").read_text(encoding="utf-8")
        flags = json.loads(log.rpartition(f"{SECTION} run\n")[2].partition("\n")[0])
        done = summary["stopped_by"] == "max_steps" and summary["step"] == flags["max_steps"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{folder} has an unreadable summary.json or log.txt ({error!r}); delete it or give another --out_dir"
        ) from None
    return (summary, flags) if done else None


def check_metrics(metrics: dict, row: dict) -> None:
    """Raises UserError if an edit's metric has the name of a built-in one."""
    for name in metrics.keys() & (row.keys() | {"train_loss", "val_loss", "val_bpb"}):
        raise UserError(f"state.metrics has {name!r}, which every row of metrics.jsonl has already; use another name")


def figures(metrics: dict[str, float]) -> str:
    """What edits measure, for a line of the console."""
    return "".join(f"{name} {value:.4g} | " for name, value in metrics.items())


def step_line(row: dict, max_steps: int, eta_s: float, spike: bool, metrics: dict[str, float]) -> str:
    """The console's line for a training row of metrics.jsonl, with what edits measure."""
    loss = f"loss {row['train_loss']:.4f}" + (" SPIKE" if spike else "")
    mfu = f"mfu {row['mfu']:.1%} | " if math.isfinite(row["mfu"]) else ""
    return (
        f"step {row['step']:>{len(str(max_steps))}}/{max_steps} | {loss} | lr {row['lr']:.2e} | "
        f"norm {row['grad_norm']:.3f} | {figures(metrics)}"
        f"{row['tokens_per_s']:,.0f} tok/s | {mfu}{row['peak_mem_mb']:,.0f} MiB | "
        f"{format_duration(row['wall_time_s'])} < {format_duration(eta_s)}"
    )


def eval_line(row: dict, max_steps: int, metrics: dict[str, float]) -> str:
    """The console's line for an evaluation row of metrics.jsonl, with what edits measure."""
    return (
        f"step {row['step']:>{len(str(max_steps))}}/{max_steps} | val_loss {row['val_loss']:.4f} | "
        + (f"val_bpb {row['val_bpb']:.4f} | " if math.isfinite(row["val_bpb"]) else "")
        + f"{figures(metrics)}train_time {row['train_time_s']:.1f} s"
    )


def closing_lines(summary: dict, trained_s: float, folder: Path, max_steps: int) -> str:
    """How the run ended, and what to do next. trained_s: seconds of training steps in this process."""
    step, why, folder = summary["step"], summary["stopped_by"], shlex.quote(str(folder))
    hint = (
        f"next: python sample.py --run {folder} | longer: python train_gpt.py --out_dir {folder} --resume --max_steps "
        f"{2 * max_steps} | on your own text: python data/prepare.py files PATH | larger: --preset gpt2-small"
    )
    if step < max_steps:
        hint = f"to continue: python train_gpt.py --out_dir {folder} --resume"
        hint += "; the learning rate has not cooled down" if why == "max_minutes" else ""
    return (
        f"stopped by {why} at step {step}: train_time {summary['train_time_s']:.1f} s (data stall "
        f"{summary['data_wait_s'] / max(trained_s, 1e-9):.2%}), wall time {summary['wall_time_s']:.1f} s; "
        f"everything is in {folder}\n{hint}"
    )


def trials_line(summaries: list[dict], folder: Path) -> str:
    """Mean and deviation of the validation losses of several runs in a folder."""
    losses, seconds = [s["val_loss"] for s in summaries], statistics.mean(s["train_time_s"] for s in summaries)
    return (
        f"{len(losses)} trials in {folder}: val_loss {statistics.mean(losses):.4f} +- {statistics.stdev(losses):.4f}, "
        f"train_time {seconds:.1f} s each"
    )


def new_run_folder(preset: str) -> Path:
    """Make runs/<time>-<preset>, with a number appended if it exists; returns its path. Raises UserError."""
    name = f"runs/{time.strftime('%Y%m%d-%H%M%S')}-{preset}"
    for number in itertools.count(1):
        path = Path(name if number == 1 else f"{name}-{number}")
        try:
            path.mkdir(parents=True)
            return path
        except FileExistsError:
            continue
        except OSError as error:
            raise UserError(f"the run's folder {path} cannot be made ({error}); give another --out_dir") from None


def is_best(evaluations: list[dict], f) -> bool:
    """Whether the last evaluation is the lowest of several; only rank 0 knows those from before a resume.

    f: the flags as attributes.
    """
    *before, last = [row["val_loss"] for row in evaluations]
    return 0 < f.eval_every < f.max_steps and last < min(filter(math.isfinite, before), default=math.inf)


def is_loss_spike(loss: float, before: Sequence[float]) -> bool:
    """Whether a logged loss is above the mean of those before it by 4 standard deviations and by 0.1."""
    return len(before) >= 5 and loss > np.mean(before) + max(0.1, 4 * np.std(before))


def nan_to_none(value):
    """The same, inside dicts and lists too, with None for non-finite numbers, which JSON cannot represent."""
    if isinstance(value, dict):
        return {k: nan_to_none(v) for k, v in value.items()}
    if isinstance(value, list):
        return [nan_to_none(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def format_duration(seconds: float) -> str:
    """h:mm:ss"""
    minutes, seconds = divmod(int(max(0, seconds)), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{seconds:02d}"


class TrainTimer:
    """`train_time`, the seconds of training steps, which stops from pause() to start(); and `wall_time`, everything
    since this object was made, so without the imports. A resumed run adds the time from before."""

    def __init__(self, device: torch.device):
        self.device, self.train_time, self.wall_before, self.created = device, 0.0, 0.0, time.perf_counter()
        self.started = None

    def start(self) -> None:
        """Start the training clock, if it is paused."""
        if self.started is None:
            self.started = time.perf_counter()

    def pause(self) -> float:
        """Pause it once the device has finished its queued work; returns the training time."""
        if self.device.type != "cpu":
            torch.accelerator.synchronize()
        if self.started is not None:
            self.train_time += time.perf_counter() - self.started
        self.started = None
        return self.train_time

    @property
    def wall_time(self) -> float:
        return self.wall_before + self.wall_time_here

    @property
    def wall_time_here(self) -> float:
        """Of this process, without what came before a resumed run."""
        return time.perf_counter() - self.created

    def state(self) -> dict:
        """What a checkpoint keeps. Pauses the training clock."""
        return dict(train_time=self.pause(), wall_time=self.wall_time)
