"""Continuing a run: which one --resume means, its flags, and that it continues at the same place of the same data."""

import contextlib
import dataclasses
import os
from pathlib import Path
from typing import NamedTuple

import torch

from common import UserError
from runtime.checkpoint import (
    BEST,
    CorruptCheckpointError,
    checkpoint_step,
    list_checkpoints,
    load_extra,
    load_optimizer,
    load_weights,
    read_checkpoint,
)
from runtime.flags import check_values
from runtime.log import RunLogger
from runtime.ranks import max_over_ranks, raise_on_all_ranks, run_on_rank0

RUN_FLAGS = ("resume", "out_dir", "init_from", "trials", "profile")  # not taken from a checkpoint
SHAPE = (
    "seq_len",
    "n_layer",
    "n_head",
    "n_embd",
    "ngram",
    "ngram_rows",
    "window",
    "softcap",
)  # taken with --init_from


def saved_flags(path: Path) -> dict:
    """The flags of a checkpoint file, or of the newest in a folder; {} where none can be read, which is told later."""
    for file in [path] if path.is_file() else list_checkpoints(path):
        with contextlib.suppress(UserError):
            return read_checkpoint(file, verify=False)["config"]
    return {}


def flags_of_run(given: dict, fields: tuple[dataclasses.Field, ...]) -> tuple[dict, dict]:
    """The given flags, checked, and those of the run that is continued: all with --resume, sizes with --init_from.

    Raises UserError for wrong names and values, and when it is unclear which run is meant.
    """
    known, saved = {field.name: field for field in fields}, {}
    given = check_values(given, known)
    resume, out_dir, path = given.get("resume", ""), given.get("out_dir", ""), None
    if given.get("minutes") and "max_steps" in given:
        raise UserError(
            "--minutes ends the run by the clock, so that --max_steps cannot be given; remove one of them"
        )
    if given.get("init_from"):
        given = dict(short_frac=0.0) | given  # such a model knows what is near
    if given.get("init_from") and not given.keys() & {"preset", "params"}:
        saved = saved_flags(Path(given["init_from"]))
        saved = {name: saved[name] for name in SHAPE if name in saved}
    elif resume and given.get("trials", 1) == 1:
        if resume == "newest" and not out_dir:
            newest = max(
                Path("runs").glob("*/ckpt_*.pt"),
                key=lambda path: path.stat().st_mtime,
                default=None,
            )
            folder = newest.parent if newest else "RUN, a run's folder"
            raise UserError(f"--resume does not say which run: add --out_dir {folder}")
        if resume not in ("newest", "auto"):
            path = Path(resume)
            folder = path if path.is_dir() else path.parent
            if path.name == BEST:
                raise UserError(
                    f"{path} holds weights only, so it cannot be resumed; use --init_from {path}"
                )
            if not out_dir and (folder / "log.txt").exists():
                given["out_dir"] = out_dir = str(folder)
            if path.is_dir() and path.resolve() == Path(out_dir).resolve():
                given["resume"] = "newest"
        source = path or Path(out_dir)
        saved = saved_flags(source) if path or out_dir else {}
        if saved:  # what is newer than the run has its default, not the preset's value of today
            saved = {name: field.default for name, field in known.items()} | saved
        for name in ("params", "optimizer"):
            if saved and given.get(name, saved.get(name)) != saved.get(name):
                raise UserError(
                    f"--{name} {given[name]} is for new runs; {source} has {saved.get(name)}: remove it"
                )
        replaced = {"minutes"} if "max_steps" in given else set()
        replaced |= {"dtype", "bf16"} if given.keys() & {"dtype", "bf16"} else set()
        saved = {
            name: saved[name] for name in saved.keys() & known.keys() - replaced - {*RUN_FLAGS}
        }
    return given, check_values(saved, known)


def find_checkpoint(
    logger: RunLogger, resume: str, init_from: str, restarted: bool
) -> tuple[Path | None, bool]:
    """The file to start from, verified (None = from scratch), and whether to resume it. Raises UserError.

    resume and init_from are the flags; restarted: torchrun has restarted the job. Best weights without a checkpoint to
    continue from are deleted.
    """
    folder, there = logger.folder, list_checkpoints(logger.folder)
    if there and restarted:
        resume = "newest"  # what the job saved counts, not what it was started from
    if there and not resume:
        raise UserError(
            f"{folder} already holds {there[0].name}; add --resume to continue, or give another --out_dir"
        )
    if not there and resume in ("", "auto") and any(folder.glob("ckpt_*.damaged")):
        raise UserError(
            f"{folder} holds damaged checkpoints only; give another --out_dir, or delete them"
        )
    if resume == "newest" or (resume == "auto" and there):
        return newest_valid(folder, logger), True
    source = init_from if resume in ("", "auto") else resume
    if not source:
        (folder / BEST).unlink(missing_ok=True)  # of a start that saved nothing to continue from
        return None, False
    path = newest_valid(Path(source), logger) if Path(source).is_dir() else Path(source)
    read_checkpoint(path)
    if resume and there and checkpoint_step(there[0]) > checkpoint_step(path):
        raise UserError(
            f"{folder} holds {there[0].name}, later than {path}; give another --out_dir to branch off"
        )
    return path, bool(resume)


def newest_valid(folder: Path, logger: RunLogger) -> Path:
    """The newest intact checkpoint; damaged ones are told, and renamed in the run's folder. Raises UserError."""
    for path in list_checkpoints(folder):
        try:
            read_checkpoint(path)
            return path
        except CorruptCheckpointError as error:
            if folder == logger.folder:
                path.rename(f"{path}.damaged")
            logger.info(
                f"skipping a damaged checkpoint, in the run's folder renamed to .damaged: {error}"
            )
    raise UserError(
        f"{folder} has no valid checkpoint; give a run's folder that has one, or another --out_dir"
    )


# ---------------------------------------------------------------------------------------------------------------------
# What a run starts from


class Start(NamedTuple):
    """A checkpoint to start from, with the path of its file, and whether to resume its run; or None."""

    path: Path | None
    checkpoint: dict | None
    resumes: bool

    def load_weights(self, model: torch.nn.Module) -> None:
        """Raises UserError if they do not fit the model."""
        load_weights(model, self.checkpoint, self.path, () if self.resumes else ("seq_len",))

    def load_state(
        self, model, optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler, stream
    ) -> dict:
        """Resume: load the state of optimizer and loss scale; returns that of edits.

        Raises UserError for other data, another place in them, or another optimizer.
        """
        saved, path, position = self.checkpoint, self.path, stream.stream_state(self.checkpoint["step"])
        if saved["data"] != stream.fingerprint():
            advice = f"give the same --data, or start a new run with --init_from {path}"
            raise UserError(
                f"{path} was trained on other data than {stream.folder} holds now; {advice}"
            )
        was = {key: saved["position"].get(key) for key in position}
        if was != position:
            advice = f"give its --seed, --seq_len, --batch_tokens and --doc_align, or use --init_from {path}"
            raise UserError(
                f"{path} continues at another place of the stream ({was}, not {position}); {advice}"
            )
        load_optimizer(model, optimizer, saved, path)
        if scaler.is_enabled() and saved["scaler"]:
            scaler.load_state_dict(saved["scaler"])
        return load_extra(model, saved["extra"])


def load_init_checkpoint(logger: RunLogger, resume: str, init_from: str, stream) -> Start:
    """What --resume and --init_from mean, on every rank the same; also after torchrun's restart. Raises UserError."""
    (restarts,) = max_over_ranks(
        logger.dist_ctx, int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))
    )  # not all count them
    path, resumes = run_on_rank0(
        logger.dist_ctx, lambda: find_checkpoint(logger, resume, init_from, restarts > 0)
    )
    with raise_on_all_ranks(logger.dist_ctx):
        checkpoint = read_checkpoint(path, verify=False) if path else None
        if path:
            was, vocabulary, now = (
                checkpoint["tokenizer"],
                checkpoint.get("vocabulary"),
                stream.meta["tokenizer"],
            )
            if (was, vocabulary) != (now, stream.vocabulary):
                advice = f"prepare the data with --tokenizer {path.parent if was.startswith('bpe') else was}"
                raise UserError(
                    f"{path} has another tokenizer ({was}) than {stream.folder} ({now}); {advice}"
                )
            logger.info(f"{'resumed' if resumes else 'weights'} from {path}")
    return Start(path, checkpoint, resumes)
