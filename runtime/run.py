"""What the user sees of a run: log.txt, metrics.jsonl, summary.json, the console; and its clock."""

import contextlib
import dataclasses
import json
import math
import os
import platform
import shlex
import sys
import time
import traceback
from datetime import timedelta
from pathlib import Path

import torch

from common.errors import (
    RunError,
    SavedInterrupt,
    UserError,
    catch_signals,
    error_sentence,
    print_line,
)
from common.files import (
    atomic_write,
    copy_sources,
    fsync,
    new_run_folder,
    read_rows,
    run_sources,
    source_hashes,
)
from common.values import env_int, nan_to_none
from data.shards import recorded_hashes
from data.stream import TokenStream
from data.tokenizers import VOCABULARY_FILE
from runtime.auto import max_epochs
from runtime.checkpoint import best_val_loss
from runtime.device import device_summary, peak_flops, peak_memory_mb
from runtime.log_header import describe_run
from runtime.profiler import profile_steps
from runtime.ranks import DistContext, mean_over_ranks, run_on_rank0

try:
    import fcntl  # not on Windows, where a run's folder is not locked
except ImportError:
    fcntl = None

SECTION = "=" * 40  # a line of log.txt begins so at each start of a run

# --compile is advised after so many seconds of training: on two cores it takes 45 s the first time,
# and saves a sixth of the rest
COMPILE_PAYS_S = 300


@contextlib.contextmanager
def open_run(cfg, dist_ctx: DistContext):
    """Make a run's folder, lock it and catch signals; yields the Run. Raises UserError.

    An error that ends the run is written to log.txt, whichever rank it is on.
    """
    folder = cfg.out_dir or run_on_rank0(dist_ctx, lambda: new_run_folder(cfg.preset))
    with catch_signals() as signals:
        run = Run(Path(folder), cfg, dist_ctx, signals)
        try:
            run_on_rank0(dist_ctx, run.lock_folder)
            yield run
        except Exception as error:
            cause = run.log_error(error)
            if cause is error:
                raise
            raise cause from None
        finally:
            run.close()


class Run:
    """What a run reports, and its clock. Only rank 0 writes and prints.

    signals: the names of those received. train_time: seconds of training, by timing_step().
    """

    def __init__(self, folder: Path, cfg, dist_ctx: DistContext, signals: list[str]):
        self.folder = folder
        self.cfg = cfg
        self.dist_ctx = dist_ctx
        self.signals = signals
        self.is_rank0 = dist_ctx.rank == 0
        self.parent_pid = os.getppid()
        self.torchrun_has_ended = False

        # Files, open from begin() on
        self.log = None
        self.metrics = None
        self.wandb = None
        self.lock_file = None
        self.early_lines = []  # for log.txt, from before it is open
        self.has_begun = False

        # Clock
        self.created = time.perf_counter()
        self.earlier_wall_time = 0.0  # of the starts before a resume
        self.eval_begin = 0  # from this step on, evaluations are on the same tokens
        self.train_time = 0.0
        self.data_wait_s = 0.0
        self.last_step_s = 0.0
        self.typical_step_s = 0.0
        self.last_eval_s = 0.0

    # ----------------------------------------------------------------------------------------------
    # Clock

    @property
    def process_time(self) -> float:
        """Seconds since this process began the run, without imports."""
        return time.perf_counter() - self.created

    @property
    def wall_time(self) -> float:
        return self.earlier_wall_time + self.process_time

    @property
    def trained_s(self) -> float:
        """Seconds of training in this process."""
        return self.train_time - self.first_train_time

    @contextlib.contextmanager
    def timing_step(self):
        """Context of a training step, until the device has finished it."""
        began = time.perf_counter()
        yield
        if self.dist_ctx.device.type != "cpu":
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

    def time_to_finish(self, eval_size: float) -> float:
        """Seconds for one more step and the last evaluation.

        eval_size: of an evaluation, in batches of training, of which it takes 0.4 of the time.
        """
        eval_s = self.last_eval_s or 0.4 * eval_size * self.typical_step_s
        return 1.5 * self.typical_step_s + eval_s

    def asked_to_stop(self) -> bool:
        """Whether a signal has come, or torchrun, which started this rank, has been killed."""
        is_orphan = "TORCHELASTIC_RUN_ID" in os.environ and os.getppid() != self.parent_pid
        # Not into self.signals, where a signal that comes while it saves would be the second
        self.torchrun_has_ended = self.torchrun_has_ended or is_orphan
        return self.torchrun_has_ended or bool(self.signals)

    def signal_name(self) -> str:
        """What has asked this rank to stop; "signal" if it was another rank that was asked."""
        if self.signals:
            return self.signals[0]
        return "end of torchrun" if self.torchrun_has_ended else "signal"

    def next_batch(self, batches):
        """Take the next batch, and count the time that training waits for it."""
        asked = time.perf_counter()
        batch = next(batches)
        self.data_wait_s += time.perf_counter() - asked
        return batch

    def profiling(self, steps_left: int):
        """Context of the training loop, for --profile."""
        return profile_steps(self.cfg.profile, steps_left, self)

    # ----------------------------------------------------------------------------------------------
    # The folder, and the start and end of its files

    def lock_folder(self) -> None:
        """Make the folder, lock it against other runs, and delete partial files of a dead run.

        After a restart by torchrun it waits half a minute: ranks of the last start may still end.
        Raises UserError.
        """
        patience_s = 0
        if env_int("TORCHELASTIC_MAX_RESTARTS", 0) > 0:
            patience_s = 30
        deadline = time.monotonic() + patience_s
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(
                f"{self.folder} cannot be made ({error.strerror}); give another --out_dir"
            ) from None
        lock_file = open(self.folder / ".lock", "a+")
        while fcntl:
            try:
                fcntl.flock(lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    lock_file.seek(0)
                    raise UserError(
                        f"another run ({lock_file.read()}) is using {self.folder}; give another "
                        "--out_dir, or wait"
                    ) from None
                time.sleep(0.2)
            except OSError as error:  # some network file systems have no locks
                self.info(f"{self.folder} is not locked against a second run ({error})")
                break
        self.lock_file = lock_file
        lock_file.truncate(0)
        lock_file.write(f"process {os.getpid()} on {platform.node()}")
        lock_file.flush()
        for partial in self.folder.glob(".tmp-*"):
            if partial.is_file():
                partial.unlink()

    def begin(self, state, stream: TokenStream, warnings: list[str]) -> None:
        """Open log.txt and metrics.jsonl, and say what is in effect. Raises UserError.

        A resumed run continues its files after its last step. log.txt gets the flags, the command
        and the SHA-256 of the sources, which are copied to source/, or source_<step>/ at a resume.
        """
        self.cfg = state.cfg
        self.stream = stream
        self.saved_step = state.step
        self.first_tokens = self.logged_tokens = state.tokens
        self.first_train_time = self.logged_train_time = self.train_time
        self.flops_per_token = state.raw_model.flops_per_token()
        self.peak_flops = math.nan
        peak = peak_flops(self.dist_ctx.device, self.cfg.dtype)
        if peak:
            self.peak_flops = peak * self.dist_ctx.world_size
        self.bits_per_nat = math.nan
        counts = stream.meta["splits"].get("val") or {}
        if counts.get("bytes"):
            self.bits_per_nat = counts["tokens"] / counts["bytes"] / math.log(2)
        self.val_tokens = stream.num_eval_seqs(self.cfg.eval_tokens) * stream.seq_len

        # What was logged before the step that is resumed, the same on all ranks
        history = run_on_rank0(self.dist_ctx, lambda: self.open_files(state.step))
        self.evaluations = []  # on the same tokens
        for row in history:
            if row.get("val_loss") is not None and row["step"] >= self.eval_begin:
                self.evaluations.append(row)
            self.earlier_wall_time = max(self.earlier_wall_time, row.get("wall_time_s") or 0.0)

        # Best weights of a start that was killed stay until there are better
        self.saved_val_loss = run_on_rank0(
            self.dist_ctx, lambda: best_val_loss(self, state, stream)
        )
        self.has_begun = True
        for line in describe_run(state, stream) + warnings:
            self.info(line)

    def open_files(self, step: int) -> list[dict]:
        """Open the files on rank 0; returns the rows of metrics.jsonl up to this step."""
        if self.stream.vocabulary:
            with atomic_write(self.folder / VOCABULARY_FILE) as file:
                file.write(self.stream.vocabulary.encode())

        # metrics.jsonl
        path = self.folder / "metrics.jsonl"
        history = []
        if step and path.exists():
            for row in read_rows(path.read_text(encoding="utf-8", errors="replace")):
                if isinstance(row.get("step"), int) and row["step"] <= step:
                    history.append(row)
        with atomic_write(path) as file:
            file.writelines(json.dumps(row).encode() + b"\n" for row in history)
        self.metrics = open(path, "a", encoding="utf-8")

        # log.txt and source/
        path = self.folder / "log.txt"
        self.log = open(path, "a" if step else "w", encoding="utf-8", errors="replace")
        flags = dataclasses.asdict(self.cfg)
        self.write(self.log, f"{SECTION} run")
        self.write(self.log, json.dumps(flags))
        self.write(self.log, f"command: {shlex.join(sys.argv)}")
        self.write(self.log, f"sources: {', '.join(source_hashes())}")
        for line in self.early_lines:
            self.write(self.log, line)

        copy_sources(run_sources(), self.folder / (f"source_{step}" if step else "source"))

        if self.cfg.wandb:
            self.start_wandb(flags, step)
        return history

    def start_wandb(self, flags: dict, step: int) -> None:
        try:
            import wandb

            # A resumed run continues its own
            id_file = self.folder / "wandb_id"
            if not step or not id_file.exists():
                id_file.write_text(os.environ.get("WANDB_RUN_ID") or os.urandom(4).hex())
            self.wandb = wandb.init(
                project=os.environ.get("WANDB_PROJECT") or "train_gpt",
                name=os.environ.get("WANDB_NAME") or self.folder.name,
                id=id_file.read_text(),
                resume="allow",
                dir=self.folder,
                config=flags,
            )
        except Exception as error:  # no package, no login, no network
            raise UserError(
                f"--wandb could not start ({error}); use `wandb login` or WANDB_MODE=offline"
            ) from None

    def log_error(self, error: Exception) -> Exception:
        """Write the error that ends the run on this rank to log.txt, and tell the other ranks.

        Returns what to raise: if another rank has ended first, an error that says why.
        """
        cause = error_sentence(error) or traceback.format_exc().strip()
        others = self.dist_ctx.error_of_others(cause.splitlines()[-1])
        if others:
            error = RunError(others)
            cause = others
        is_told = getattr(error, "printed", False)  # by the rank that it is from
        if self.has_begun and not is_told:
            with contextlib.suppress(OSError):
                with open(self.folder / "log.txt", "a", encoding="utf-8") as file:
                    file.write(f"ended: {cause}\n")
        return error

    def close(self) -> None:
        """Close the files, and remove a folder that was made for a run that has not begun."""
        if self.lock_file and not self.log:
            with contextlib.suppress(OSError):  # something else is in it
                (self.folder / ".lock").unlink(missing_ok=True)  # while it is locked
                self.folder.rmdir()
        for file in (self.log, self.metrics, self.lock_file):
            if file:
                with contextlib.suppress(OSError):  # a full disk has been reported
                    file.close()
        if self.wandb:
            try:
                self.wandb.finish()
            except Exception as error:  # whatever the service raises
                print_line(f"WARNING: --wandb could not finish ({error})")

    # ----------------------------------------------------------------------------------------------
    # Lines and rows

    def write(self, file, line: str) -> None:
        """Append a line to a file; a full disk does not end the run."""
        try:
            file.write(line + "\n")
            file.flush()
        except OSError as error:
            print_line(f"WARNING: {file.name} cannot be written ({error.strerror})")

    def info(self, text: str) -> None:
        """Print a line, and keep it in log.txt."""
        if not self.is_rank0:
            return
        print_line(text)
        if self.log:
            self.write(self.log, text)
        else:
            self.early_lines.append(text)

    def sync_metrics(self) -> None:
        """Put the metrics so far on the disk: a checkpoint resumes from them. Raises OSError."""
        self.metrics.flush()  # what a full disk held back
        fsync(self.metrics.fileno())

    def log_step(self, state, loss: torch.Tensor, grad_norm: float) -> None:
        """Log a training step, with the mean over ranks of its loss and of state.metrics."""
        metrics = mean_over_ranks(self.dist_ctx, {**state.metrics, "train_loss": loss})
        loss = metrics.pop("train_loss")

        # The learning rate is that of Muon's group, or of the first
        groups = state.optimizer.param_groups
        muon_groups = [group for group in groups if group.get("kind") == "muon"]
        lr = (muon_groups or groups)[0]["lr"]

        # Speed since the last logged step
        seconds = max(self.train_time - self.logged_train_time, 1e-9)
        speed = (state.tokens - self.logged_tokens) / seconds
        self.logged_tokens = state.tokens
        self.logged_train_time = self.train_time
        mfu = speed * self.flops_per_token / self.peak_flops
        memory = peak_memory_mb(self.dist_ctx.device)

        left_s = self.typical_step_s * (self.cfg.max_steps - state.step)
        if self.cfg.minutes:
            left_s = 60 * self.cfg.minutes - self.wall_time
        clock = f"{as_time(self.wall_time)} < {as_time(left_s)}"

        begin = f"loss {loss:.4f} | lr {lr:.2e} | norm {grad_norm:.3f}"
        end = f"{speed:,.0f} tok/s | {memory:,.0f} MiB | {clock}"
        if math.isfinite(mfu):
            end = f"{speed:,.0f} tok/s | mfu {mfu:.1%} | {memory:,.0f} MiB | {clock}"
        row = dict(
            step=state.step,
            train_loss=loss,
            grad_norm=grad_norm,
            tokens=state.tokens,
            lr=lr,
            tokens_per_s=speed,
            mfu=mfu,
            peak_mem_mb=memory,
        )
        self.log_row(row, metrics, begin, end)

    def log_eval(self, state, val_loss: float) -> bool:
        """Log a validation loss, in nats per token, and state.metrics.

        True if it is lower than that of ckpt_best.pt, in whose place these weights then belong.
        """
        metrics = mean_over_ranks(self.dist_ctx, state.metrics)
        val_bpb = math.nan
        # Where some targets are masked, nobody counts the others' bytes
        if state.n_val_targets == self.val_tokens:
            val_bpb = val_loss * self.bits_per_nat
        begin = f"val_loss {val_loss:.4f}"
        if math.isfinite(val_bpb):
            begin += f" | val_bpb {val_bpb:.4f}"
        row = dict(step=state.step, val_loss=val_loss, val_bpb=val_bpb, tokens=state.tokens)
        self.log_row(row, metrics, begin, f"train_time {self.train_time:.1f} s")

        self.evaluations.append(row)
        is_best = math.isfinite(val_loss) and val_loss < self.saved_val_loss
        if is_best:
            self.saved_val_loss = val_loss
        return is_best

    def stop_by_val_loss(self) -> str:
        """What the evaluations so far end the run by: target_val_loss, patience or nothing, "".

        Patience begins to count after the first epoch.
        """
        losses = [row["val_loss"] for row in self.evaluations]
        patience = self.cfg.patience
        if self.cfg.target_val_loss and min(losses, default=math.inf) <= self.cfg.target_val_loss:
            return "target_val_loss"
        if not patience or len(losses) <= patience:
            return ""
        in_first_epoch = self.evaluations[-1]["tokens"] <= self.stream.train.n_tokens
        has_improved = min(losses[-patience:]) < min(losses[:-patience])
        return "" if in_first_epoch or has_improved else "patience"

    def log_row(self, row: dict, metrics: dict, begin: str, end: str) -> None:
        """Record a row with metrics and clock; print a line with metrics between begin and end."""
        row["train_time_s"] = self.train_time
        row["wall_time_s"] = self.wall_time
        max_steps = str(self.cfg.max_steps)
        parts = [f"step {row['step']:>{len(max_steps)}}/{max_steps}", begin]
        parts += [f"{name} {value:.4g}" for name, value in metrics.items()]
        self.info(" | ".join([*parts, end]))
        if not self.is_rank0:
            return
        values = nan_to_none(row | metrics)
        self.write(self.metrics, json.dumps(values))
        if self.wandb:
            step = values.pop("step")
            try:
                self.wandb.log(values, step=step)
            except Exception as error:  # whatever the service raises
                self.wandb = None
                self.info(f"WARNING: --wandb has failed ({error}); the run continues without it")

    @property
    def last_eval_step(self) -> int | None:
        return self.evaluations[-1]["step"] if self.evaluations else None

    # ----------------------------------------------------------------------------------------------
    # The end

    def finish(self, state, stopped_by: str) -> dict:
        """Write summary.json, say how the run ended and what to try next; returns the summary.

        Raises SavedInterrupt after Ctrl-C, RunError for a run that diverged, and on nodes that did
        not get the signal that ended it.
        """
        summary = self.summary(state, stopped_by)
        # A run that was complete before keeps its figures
        path = self.folder / "summary.json"
        if self.is_rank0 and (self.trained_s or not path.exists()):
            try:
                with atomic_write(path) as file:
                    file.write(json.dumps(summary, indent=1).encode() + b"\n")
            except OSError as error:
                raise RunError(f"{path} could not be written ({error.strerror})") from None

        stall = self.data_wait_s / max(self.trained_s, 1e-9)
        self.info(
            f"stopped by {stopped_by} at step {state.step}: train_time {self.train_time:.1f} s "
            f"(data stall {stall:.2%}), wall time {summary['wall_time_s']:.1f} s; "
            f"everything is in {shlex.quote(str(self.folder))}"
        )
        for line in self.remarks(stopped_by):
            self.info(line)
        self.info(self.hint(state.step, stopped_by))

        if stopped_by == "SIGINT":
            raise SavedInterrupt
        # Another node was told to stop: torchrun starts this one again, with those that are left
        if stopped_by == "signal" and env_int("GROUP_WORLD_SIZE", 1) > 1:
            text = "another node was told to stop; --resume continues from what has been saved"
            raise RunError(text, printed=self.dist_ctx.local_rank > 0)
        if stopped_by == "diverged":
            raise RunError(
                "the gradient was 0 or not finite in many steps in a row, to step "
                f"{state.step} (ckpt_{state.step}.pt has the weights from before); if it was 0, "
                "see whether all targets are masked, else try lower learning rates, --grad_clip 1 "
                "or --dtype fp32, or look at the data",
                printed=not self.is_rank0,
            )
        return summary

    def summary(self, state, stopped_by: str) -> dict:
        """What summary.json holds."""
        last = dict(val_loss=math.nan, val_bpb=math.nan)
        if self.evaluations:
            last = self.evaluations[-1]
        losses = [row["val_loss"] for row in self.evaluations]
        target_reached = None
        for row in self.evaluations:
            if row["val_loss"] <= self.cfg.target_val_loss:
                target_reached = dict(step=row["step"], train_time_s=row["train_time_s"])
                break
        tokens_per_s = math.nan
        if self.trained_s:
            tokens_per_s = (state.tokens - self.first_tokens) / self.trained_s
        return nan_to_none(
            dict(
                stopped_by=stopped_by,
                step=state.step,
                val_loss=last["val_loss"],
                val_bpb=last["val_bpb"],
                best_val_loss=min(filter(math.isfinite, losses), default=math.nan),
                target_reached=target_reached,
                tokens=state.tokens,
                tokens_per_s=tokens_per_s,
                machine=device_summary(self.dist_ctx),
                dtype=self.cfg.dtype,
                eval_part=self.stream.eval_subset,
                val_tokens=self.val_tokens,
                files=recorded_hashes(self.stream.meta),
                data_wait_s=self.data_wait_s,
                train_time_s=self.train_time,
                wall_time_s=self.wall_time,
            )
        )

    def remarks(self, stopped_by: str) -> list[str]:
        """What is not obvious about the end of the run."""
        cfg = self.cfg
        lines = []
        if stopped_by == "epochs":
            meta, n_tokens = self.stream.meta, self.stream.train.n_tokens
            epochs = max_epochs(cfg, n_tokens, meta["vocab_size"])
            lines.append(
                f"it ended after {epochs:.3g} epochs, before its {cfg.minutes:g} minutes: on small "
                "datasets more did not lower the loss; --max_steps instead of --minutes trains on"
            )
        elif stopped_by == "patience":
            lines.append(
                f"{cfg.patience} evaluations in a row were no better than one before; with "
                "--patience 0 it trains on"
            )
        elif stopped_by == "max_steps" and not self.trained_s:
            lines.append(f"all {cfg.max_steps} steps had been trained before: give --max_steps")
        elif stopped_by == "minutes" and not self.trained_s:
            lines.append(
                f"its {cfg.minutes:g} minutes, the total of all starts, were over before: give "
                "more --minutes"
            )

        best = self.better_evaluation()
        if best:
            line = (
                f"val_loss has risen since step {best['step']}, where it was "
                f"{best['val_loss']:.4f}: sample.py --best takes those weights"
            )
            if stopped_by != "patience":
                line += "; fewer steps, more data or --weight_decay 0.8 may end lower"
            lines.append(line)
        return lines

    def better_evaluation(self) -> dict | None:
        """The row of the best evaluation, if the last is over 1 % worse."""
        finite = [row for row in self.evaluations if math.isfinite(row["val_loss"])]
        best = min(finite, key=lambda row: row["val_loss"], default=None)
        return best if best and finite[-1]["val_loss"] > 1.01 * best["val_loss"] else None

    def hint(self, step: int, stopped_by: str) -> str:
        """What to try next."""
        folder = shlex.quote(str(self.folder))
        resume = f"python train_gpt.py --out_dir {folder} --resume"
        if stopped_by not in ("max_steps", "minutes", "epochs", "target_val_loss", "patience"):
            return f"to continue: {resume}"
        longer = f"--max_steps {2 * step}"
        if stopped_by == "minutes":
            longer = f"--minutes {2 * self.cfg.minutes:g}"
        elif stopped_by == "target_val_loss":
            longer = "--target_val_loss 0"
        elif stopped_by == "patience":
            longer = "--patience 0"
        hints = [f"next: python sample.py --run {folder}", f"longer: {resume} {longer}"]
        if self.better_evaluation():
            hints = [f"next: python sample.py --run {folder} --best"]  # longer was worse
        hints += ["on your own text: python data/prepare.py files PATH", "larger: --params 10M"]
        can_compile = self.cfg.compile == "off" and self.dist_ctx.device.type != "mps"
        if can_compile and self.trained_s > COMPILE_PAYS_S:
            hints.append("faster: --compile")
        return " | ".join(hints)


def as_time(seconds: float) -> str:
    return str(timedelta(seconds=int(max(0, seconds))))
