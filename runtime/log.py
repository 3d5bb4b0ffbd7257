"""A run's folder (log.txt, metrics.jsonl, summary.json, source/), the console, Weights & Biases, and the clock."""

import contextlib
import hashlib
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

from common import RunError, UserError, atomic_write, error_sentence, nan_to_none
from data.shards import recorded_hashes
from data.stream import TokenStream
from data.tokenizers import VOCABULARY_FILE
from runtime.device import ALLOC_CONF_VARIABLES, device_summary, peak_flops, peak_memory_mb
from runtime.ranks import DistContext, fail_on_ranks_without_signal, mean_over_ranks, run_on_rank0
from runtime.signals import catch_signals
from runtime.sources import SOURCE_FILES, software_versions

try:
    import fcntl  # not on Windows, where a run's folder is not locked
except ImportError:
    fcntl = None

COMPILE_PAYS_S = 300  # of training: on two cores --compile takes 45 s, the first time, and saves a sixth of the rest
SECTION = "=" * 40  # begins a section of log.txt: each start of a run


def new_run_folder(preset: str) -> Path:
    """Make runs/<time>-<preset>; if another run has just made it, in the next second."""
    while True:
        path = Path(f"runs/{time.strftime('%Y%m%d-%H%M%S')}-{preset}")
        with contextlib.suppress(FileExistsError):
            path.mkdir(parents=True)
            return path
        time.sleep(0.1)


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
                logger.write(
                    logger.log, f"ended: {error_sentence(error) or traceback.format_exc()}"
                )
            raise


class RunLogger:
    """The run's folder and everything the run reports. Silent on every rank but 0."""

    def __init__(self, folder: Path, dist_ctx: DistContext):
        self.folder, self.dist_ctx, self.timer = folder, dist_ctx, TrainTimer(dist_ctx.device)
        self.is_rank0 = dist_ctx.rank == 0
        self.log = self.metrics = self.wandb = self.lock_file = None
        self.early = []  # lines from before log.txt is open

    def lock(self) -> None:
        """Make the folder, lock it against other runs, and delete partial files of a run that died. Raises UserError.

        After a restart by torchrun it waits: a rank whose torchrun was killed ends when it misses the others.
        """
        deadline = time.monotonic() + 30 * (int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", 0)) > 0)
        self.folder.mkdir(parents=True, exist_ok=True)
        lock_file = open(self.folder / ".lock", "a")
        while fcntl:
            try:
                fcntl.flock(lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    raise UserError(
                        f"another run is using {self.folder}; give another --out_dir or wait"
                    ) from None
                time.sleep(0.2)
            except OSError as error:  # some network file systems have no locks
                self.info(f"{self.folder} is not locked against a second run ({error})")
                break
        self.lock_file = lock_file
        for partial in self.folder.glob(".tmp-*"):
            partial.unlink()

    def open(self, flags: dict, first_step: int, vocabulary: str | None = None) -> list[dict]:
        """Start log.txt and metrics.jsonl, or continue them after `first_step` updates; returns the rows up to there.

        log.txt gets the flags, the command and, in one line, the SHA-256 of the sources, which are copied beside it,
        into source/, or source_<step>/ if they have changed before a resume; vocabulary: of byte pairs, kept as the
        data's folder has it. All ranks get the rows. Raises UserError.
        """
        return run_on_rank0(self.dist_ctx, lambda: self.open_files(flags, first_step, vocabulary))

    def open_files(self, flags: dict, first_step: int, vocabulary: str | None) -> list[dict]:
        if vocabulary:
            with atomic_write(self.folder / VOCABULARY_FILE) as file:
                file.write(vocabulary.encode())
        metrics, log, kept, before = self.folder / "metrics.jsonl", self.folder / "log.txt", [], ""
        if first_step and metrics.exists():
            found = read_rows(metrics.read_text(encoding="utf-8", errors="replace"))
            kept = [
                row
                for row in found
                if isinstance(row.get("step"), int) and row["step"] <= first_step
            ]
        if first_step and log.exists():
            before = log.read_text(encoding="utf-8", errors="replace").rpartition("\nsources: ")[2]
        with atomic_write(metrics) as file:
            file.writelines(json.dumps(row).encode() + b"\n" for row in kept)
        self.metrics = open(metrics, "a", encoding="utf-8")
        self.log = open(log, "a" if first_step else "w", encoding="utf-8", errors="replace")
        sources = {name: path.read_bytes() for name, path in SOURCE_FILES.items()}
        hashes = {
            name: f"{name} sha256 {hashlib.sha256(content).hexdigest()}"
            for name, content in sources.items()
        }
        changed = [name for name in sources if hashes[name] not in before]
        copies = self.folder / (f"source_{first_step}" if first_step else "source")
        for name, content in sources.items() if changed else ():
            (copies / name).parent.mkdir(parents=True, exist_ok=True)
            (copies / name).write_bytes(content)
        lines = f"{SECTION} run", json.dumps(flags), f"command: {shlex.join(sys.argv)}"
        for line in (*lines, f"sources: {', '.join(hashes.values())}", *self.early):
            self.write(self.log, line)
        if changed and first_step:
            self.info(
                f"the code has changed since the last start: {', '.join(changed)}; see {copies}"
            )
        if flags["wandb"]:
            try:
                import wandb

                self.wandb = wandb.init(
                    project="train_gpt", name=self.folder.name, dir=self.folder, config=flags
                )
            except Exception as error:  # no package, no login, no network
                raise UserError(
                    f"--wandb could not start ({error}); use `wandb login` or WANDB_MODE=offline"
                ) from None
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
            if self.log:
                self.write(self.log, text)
            else:
                self.early.append(text)

    def log_metrics(self, values: dict) -> None:
        """One line of metrics.jsonl; non-finite values are written as null."""
        if self.is_rank0:
            values = nan_to_none(values)
            self.write(self.metrics, json.dumps(values))
            if self.wandb:
                self.wandb.log(
                    {k: v for k, v in values.items() if k != "step"}, step=values["step"]
                )

    def sync(self) -> None:
        """Put the metrics so far on the disk: a checkpoint resumes from them. Raises OSError."""
        self.metrics.flush()  # what a full disk held back
        os.fsync(self.metrics.fileno())

    def close(self) -> None:
        """Close the files, and remove a folder that was made for a run that has not begun."""
        if self.lock_file and not self.log:
            with contextlib.suppress(OSError):  # something else is in it
                (self.folder / ".lock").unlink(missing_ok=True)  # while it is locked
                self.folder.rmdir()
        for file in filter(None, (self.log, self.metrics, self.lock_file)):
            with contextlib.suppress(OSError):  # a full disk has been reported
                file.close()
        if self.wandb:
            self.wandb.finish()


def read_rows(metrics: str) -> list[dict]:
    """The rows of a metrics.jsonl, without the torn line of a run that died or is writing."""
    rows = []
    for line in metrics.splitlines():
        with contextlib.suppress(ValueError, RecursionError):
            rows.append(json.loads(line))
    return [row for row in rows if isinstance(row, dict)]


class TrainTimer:
    """Seconds of training, which only training() counts, and `wall_time`, everything since this object was made, so
    without the imports. A resumed run adds the time from before."""

    def __init__(self, device: torch.device):
        self.device, self.created = device, time.perf_counter()
        self.train_time = self.wall_before = 0.0
        self.last_s = self.step_s = self.eval_s = (
            0.0  # of the last step, of a typical one, and the last evaluation
        )

    @property
    def wall_time(self) -> float:
        return self.wall_before + time.perf_counter() - self.created

    @contextlib.contextmanager
    def training(self):
        """Context of a training step, until the device has done it."""
        began = time.perf_counter()
        yield
        if self.device.type != "cpu":
            torch.accelerator.synchronize()
        took = time.perf_counter() - began
        self.train_time += took
        # One that compiles or stalls is not what the next one will take
        self.step_s, self.last_s = min(self.last_s or took, took), took

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

    def __init__(
        self, logger: RunLogger, rows: list[dict], tokens: int, flops_per_token: float, cfg, stream
    ):
        """rows: of the metrics.jsonl of a run that is resumed, the same on every rank; tokens: trained on so far."""
        self.logger, self.timer, self.dist_ctx = logger, logger.timer, logger.dist_ctx
        self.cfg, self.stream = cfg, stream
        peak = peak_flops(self.dist_ctx.device, cfg.dtype) or math.nan
        self.flops_per_token, self.peak_flops = flops_per_token, peak * self.dist_ctx.world_size
        counts = stream.meta["splits"].get("val") or {}
        self.bits_per_nat = (
            counts["tokens"] / counts["bytes"] / math.log(2) if counts.get("bytes") else math.nan
        )
        self.evaluations = [row for row in rows if row.get("val_loss") is not None]
        self.last_eval = (
            self.evaluations or [dict(step=None, val_loss=math.nan, val_bpb=math.nan)]
        )[-1]
        losses = (row["train_loss"] for row in rows if row.get("train_loss") is not None)
        self.recent_losses = deque(losses, maxlen=10)
        self.first = self.last = (tokens, self.timer.train_time)
        self.data_wait_s = 0.0

    def next_batch(self, batches):
        """The next of these batches; counts the seconds for which training waits for it."""
        asked = time.perf_counter()
        batch = next(batches)
        self.data_wait_s += time.perf_counter() - asked
        return batch

    def log_step(self, row: dict, groups: list[dict], metrics: dict) -> None:
        """Record and print a training row, of which step, train_loss, grad_norm and tokens are given.

        train_loss and metrics, what edits measure, are averaged over the ranks. groups: of the optimizer, of which the
        learning rate of Muon's is logged, or the first one's.
        """
        metrics = mean_over_ranks(self.dist_ctx, metrics | dict(train_loss=row["train_loss"]))
        row["train_loss"] = loss = metrics.pop("train_loss")
        row["lr"] = next((group for group in groups if group.get("kind") == "muon"), groups[0])[
            "lr"
        ]
        (tokens, train_time), self.last = self.last, (row["tokens"], self.timer.train_time)
        speed = (row["tokens"] - tokens) / max(self.last[1] - train_time, 1e-9)
        memory, minutes = peak_memory_mb(self.dist_ctx.device), self.cfg.minutes
        row |= dict(
            tokens_per_s=speed,
            mfu=speed * self.flops_per_token / self.peak_flops,
            peak_mem_mb=memory,
        )
        left_s = self.timer.step_s * (self.cfg.max_steps - row["step"])
        if minutes:
            left_s = 60 * minutes - self.timer.wall_time
        past = self.recent_losses
        spike = (
            " SPIKE" if len(past) >= 5 and loss > np.mean(past) + max(0.1, 4 * np.std(past)) else ""
        )
        mfu = f"mfu {row['mfu']:.1%} | " if math.isfinite(row["mfu"]) else ""
        clock = " < ".join(
            str(timedelta(seconds=int(max(0, s)))) for s in (self.timer.wall_time, left_s)
        )
        begin = f"loss {loss:.4f}{spike} | lr {row['lr']:.2e} | norm {row['grad_norm']:.3f}"
        self.log_row(row, metrics, begin, f"{speed:,.0f} tok/s | {mfu}{memory:,.0f} MiB | {clock}")
        if math.isfinite(loss):
            past.append(loss)

    def log_eval(self, step: int, val_loss: float, tokens: int, metrics: dict) -> bool:
        """Record and print a validation loss, in nats per token, and metrics; returns whether it is the lowest."""
        row = dict(
            step=step, val_loss=val_loss, val_bpb=val_loss * self.bits_per_nat, tokens=tokens
        )
        bits = f" | val_bpb {row['val_bpb']:.4f}" if math.isfinite(row["val_bpb"]) else ""
        metrics, end = (
            mean_over_ranks(self.dist_ctx, metrics),
            f"train_time {self.timer.train_time:.1f} s",
        )
        self.log_row(row, metrics, f"val_loss {val_loss:.4f}{bits}", end)
        is_best = math.isfinite(val_loss) and not any(
            past["val_loss"] <= val_loss for past in self.evaluations
        )
        self.evaluations.append(row)
        self.last_eval = row
        return is_best

    def log_row(self, row: dict, metrics: dict, begin: str, end: str) -> None:
        """Record a row, with metrics and the clock, and print a line, with metrics between its begin and end."""
        row |= dict(train_time_s=self.timer.train_time, wall_time_s=self.timer.wall_time)
        max_steps, figures = (
            self.cfg.max_steps,
            [f"{name} {value:.4g}" for name, value in metrics.items()],
        )
        step = f"step {row['step']:>{len(str(max_steps))}}/{max_steps}"
        self.logger.info(" | ".join((step, begin, *figures, end)))
        self.logger.log_metrics(row | metrics)

    def summary(self, stopped_by: str, step: int, tokens: int, signals: list[str]) -> dict:
        """Write summary.json, and say how the run ended and what to try next; returns the summary.

        Raises RunError for a run that diverged, and on nodes that got none of the signals that ended the run.
        """
        cfg, stream, timer, folder, last = (
            self.cfg,
            self.stream,
            self.timer,
            self.logger.folder,
            self.last_eval,
        )
        trained_s = timer.train_time - self.first[1]
        losses = [row["val_loss"] for row in self.evaluations]
        reached = next(
            (row for row in self.evaluations if row["val_loss"] <= cfg.target_val_loss), None
        )
        summary = dict(
            stopped_by=stopped_by, step=step, val_loss=last["val_loss"], val_bpb=last["val_bpb"]
        )
        summary["best_val_loss"] = min(filter(math.isfinite, losses), default=math.nan)
        summary["target_reached"] = reached and dict(
            step=reached["step"], train_time_s=reached["train_time_s"]
        )
        summary |= dict(
            tokens=tokens,
            tokens_per_s=(tokens - self.first[0]) / trained_s if trained_s else math.nan,
        )
        summary |= dict(
            machine=device_summary(self.dist_ctx), dtype=cfg.dtype, eval_part=stream.eval_subset
        )
        summary["val_tokens"] = stream.num_eval_seqs(cfg.eval_tokens) * stream.seq_len
        summary |= dict(files=recorded_hashes(stream.meta), data_wait_s=self.data_wait_s)
        summary = nan_to_none(
            summary | dict(train_time_s=timer.train_time, wall_time_s=timer.wall_time)
        )
        trained = tokens > self.first[0] or not (folder / "summary.json").exists()
        if trained and self.logger.is_rank0:  # a run that was complete before keeps its figures
            with atomic_write(folder / "summary.json") as file:
                file.write(json.dumps(summary, indent=1).encode() + b"\n")
        name = shlex.quote(str(folder))
        again = f"python train_gpt.py --out_dir {name} --resume"
        hint = f"to continue: {again}"
        if stopped_by in ("max_steps", "minutes", "target_val_loss"):
            hint = (
                f"next: python sample.py --run {name} | longer: {again} --max_steps {2 * step} | "
            )
            hint += "on your own text: python data/prepare.py files PATH | larger: --params 10M"
            slow = cfg.compile == "off" and self.dist_ctx.device.type != "mps"
            hint += " | faster: --compile" if trained_s > COMPILE_PAYS_S and slow else ""
        stall = f"data stall {self.data_wait_s / max(trained_s, 1e-9):.2%}"
        times = f"train_time {timer.train_time:.1f} s ({stall}), wall time {timer.wall_time:.1f} s"
        self.logger.info(
            f"stopped by {stopped_by} at step {step}: {times}; everything is in {name}\n{hint}"
        )
        fail_on_ranks_without_signal(self.dist_ctx, signals, stopped_by)
        if stopped_by == "diverged":
            found = f"the loss or gradient was not finite in many steps in a row, to step {step}"
            advice = "try lower learning rates, --grad_clip 1 or --dtype fp32, or look at the data"
            error = f"{found} (ckpt_{step}.pt has the weights from before); {advice}"
            raise RunError(error, printed=self.dist_ctx.rank > 0)
        return summary


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


def describe_run(
    cfg, model, micro_batch: int, stream: TokenStream, dist_ctx: DistContext
) -> list[str]:
    """What is in effect in a run and what was derived from its flags, as lines for the console and log.txt."""
    device, meta, world_size = dist_ctx.device, stream.meta, dist_ctx.world_size
    parallel = (
        "one process" if world_size == 1 else cfg.parallel if cfg.parallel != "auto" else "ddp"
    )
    grad_accum_steps = cfg.batch_tokens // cfg.seq_len // world_size // micro_batch
    muon = f"muon_lr {cfg.muon_lr:.4g}, " if cfg.optimizer == "muon" else ""
    ngrams = (
        f", n-grams to {cfg.ngram}, ngram_dropout {cfg.ngram_dropout:.2g}" if cfg.ngram > 1 else ""
    )
    n_eval, n_all = (stream.num_eval_seqs(n) * cfg.seq_len for n in (cfg.eval_tokens, 0))
    mode = getattr(model.blocks[0], "ac_mode", "none")  # chosen with the micro-batch
    part = (
        ""
        if n_eval == n_all
        else dict(first=" (the first)", spread=" spread over the validation split")
    )
    n_params = sum(p.numel() for p in model.parameters())
    n_frozen = sum(p.numel() for p in model.parameters() if not p.requires_grad)
    lines = [
        software_versions(device),
        f"device: {device_summary(dist_ctx)}, {cfg.dtype}, compile {cfg.compile}, {parallel}, attention {cfg.attn}, "
        f"loss_chunk {cfg.loss_chunk}, checkpointing {mode}, matmul precision {torch.get_float32_matmul_precision()}",
        f"data: {stream.folder} ({meta['source']}), {stream.train.n_tokens:,} + {stream.val.n_tokens:,} tokens, "
        f"tokenizer {meta['tokenizer']}{' (assumed: there is no meta.json)' if meta.get('assumed') else ''}, "
        f"evaluation on {n_eval:,} tokens{part and part[stream.eval_subset]}",
        f"model: n_layer {cfg.n_layer}, n_embd {cfg.n_embd}, n_head {cfg.n_head}, {n_params:,} parameters"
        f"{f' ({n_frozen:,} frozen)' * (n_frozen > 0)}, "
        f"{model.flops_per_token() / 1e6:,.1f} MFLOP a token; {muon}adam_lr {cfg.adam_lr:.4g}, "
        f"weight_decay {cfg.weight_decay:g}{ngrams}",
        f"batch: {cfg.batch_tokens:,} tokens = {world_size} ranks x {grad_accum_steps} grad_accum_steps x {micro_batch} "
        f"micro_batch x {cfg.seq_len} seq_len; {cfg.max_steps:,} steps{' (about)' if cfg.minutes else ''}, "
        f"{cfg.batch_tokens * cfg.max_steps / (stream.seqs_per_epoch * cfg.seq_len):.2f} epochs",
    ]
    if device.type == "cuda" and any(map(os.environ.get, ALLOC_CONF_VARIABLES)):
        settings = torch.cuda.memory._snapshot()["allocator_settings"]
        lines.append(
            "allocator: " + ", ".join(f"{name} {value}" for name, value in settings.items())
        )
    if stream.tokenizer is None:
        lines.append("no samples will be printed, as a rank has no tokenizer for this data")
    return lines
