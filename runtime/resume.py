"""Continuing a run: which one --resume means, its flags, and that it continues at the same place of the same data."""

import dataclasses
import os
from pathlib import Path
from typing import NamedTuple

import torch

from data.tokenizers import vocabulary_hash
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
from runtime.errors import UserError
from runtime.flags import check_values
from runtime.log import RunLogger
from runtime.ranks import DistContext, agree, dist_max, run_on_rank0

RUN_FLAGS = ("resume", "out_dir", "init_from", "trials", "profile")  # not taken from a checkpoint
SHAPE = ("n_layer", "n_head", "n_embd", "ngram", "ngram_rows", "window", "softcap")  # taken with --init_from


def saved_flags(paths: list[Path]) -> dict:
    """The flags of the first of these checkpoints that can be read; {} where none can, which is reported later."""
    for path in paths:
        try:
            return dict(torch.load(path, map_location="cpu", weights_only=True, mmap=True)["config"])
        except Exception:  # torn and foreign files fail in many ways
            continue
    return {}


def flags_of_run(given: dict, fields: tuple[dataclasses.Field, ...]) -> tuple[dict, dict]:
    """The given flags, checked, and those of the run that is continued: all with --resume, sizes with --init_from.

    Raises UserError for wrong names and values, and when it is unclear which run is meant.
    """
    known = {field.name: field for field in fields}
    given, saved = with_run(check_values(given, known))
    if given.get("minutes") and "max_steps" in given:
        raise UserError("--minutes ends the run by the clock, so that --max_steps cannot be given; remove one of them")
    return given, check_values({name: value for name, value in saved.items() if name in known}, known)


def with_run(given: dict) -> tuple[dict, dict]:
    resume, given = given.get("resume", ""), dict(given)
    if given.get("init_from") and not given.keys() & {"preset", "params"}:
        path = Path(given["init_from"])
        saved = saved_flags([path] if path.is_file() else [*list_checkpoints(path), path / BEST])
        return given, {name: saved[name] for name in SHAPE if name in saved}
    if not resume or given.get("trials", 1) > 1:
        return given, {}
    path = Path(resume) if resume not in ("newest", "auto") else None
    if resume == "newest" and not given.get("out_dir"):
        found = [path for folder in Path("runs").glob("*") for path in list_checkpoints(folder)[:1]]
        newest = max(found, key=lambda path: path.stat().st_mtime).parent if found else "RUN, a run's folder"
        raise UserError(f"--resume does not say which run: add --out_dir {newest}")
    if path and path.name == BEST:
        raise UserError(f"{path} holds weights only, so it cannot be resumed; use --init_from {path}")
    if path and path.is_dir():
        given["out_dir"] = given.get("out_dir") or resume
        if Path(given["out_dir"]).resolve() == path.resolve():
            given["resume"], path = "newest", None
    if path and path.is_file() and not given.get("out_dir") and (path.parent / "log.txt").exists():
        given["out_dir"] = str(path.parent)
    source = path or (Path(given["out_dir"]) if given.get("out_dir") else None)
    candidates = [] if source is None else [source] if source.is_file() else list_checkpoints(source)
    saved = saved_flags(candidates)
    for name in ("params", "optimizer"):
        if saved and given.get(name, saved.get(name)) != saved.get(name):
            raise UserError(f"--{name} {given[name]} is for new runs, and {source} has {saved.get(name)}; remove it")
    replaced = {old for new, old in (("max_steps", "minutes"), ("dtype", "bf16"), ("bf16", "dtype")) if new in given}
    return given, {name: value for name, value in saved.items() if name not in (*RUN_FLAGS, *replaced)}


def find_checkpoint(folder: Path, resume: str, init_from: str, restarted: bool, say) -> tuple[Path | None, bool]:
    """The file to start from, verified (None = from scratch), and whether to resume it. Raises UserError.

    resume and init_from are the flags; restarted: torchrun has restarted the job. A damaged checkpoint that is skipped
    is renamed to .damaged and reported with `say`; best weights without a checkpoint to continue from are deleted.
    """
    there = list_checkpoints(folder)
    if there and restarted:
        resume = "newest"  # what the job saved counts, not what it was started from
    if there and not resume:
        raise UserError(f"{folder} already holds {there[0].name}; add --resume to continue, or give another --out_dir")
    if not there and resume in ("", "auto") and any(folder.glob("ckpt_*.damaged")):
        raise UserError(f"{folder} holds damaged checkpoints only; give another --out_dir, or delete them")
    if resume == "newest" or (resume == "auto" and there):
        return newest_valid(folder, say), True
    path = Path(resume) if resume not in ("", "auto") else Path(init_from) if init_from else None
    if not there and not path:
        (folder / BEST).unlink(missing_ok=True)  # of a start that saved nothing to continue from
    if path and path.is_dir():
        path = newest_valid(path, say, rename=False)
    if path:
        read_checkpoint(path)
    if resume and path and there and checkpoint_step(there[0]) > checkpoint_step(path):
        raise UserError(f"{folder} holds {there[0].name}, later than {path}; give another --out_dir to branch off")
    return path, bool(resume and path)


def newest_valid(folder: Path, say, rename: bool = True) -> Path:
    """The newest intact checkpoint; damaged ones are reported and renamed. Raises UserError if there is none."""
    for path in list_checkpoints(folder):
        try:
            read_checkpoint(path)
            return path
        except CorruptCheckpointError as error:
            if rename:
                path.rename(path.with_name(path.name + ".damaged"))
            say(f"skipping a damaged checkpoint{f', renamed to {path.name}.damaged' if rename else ''}: {error}")
    raise UserError(f"{folder} has no valid checkpoint; give a run's folder that has one, or another --out_dir")


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

    def load_state(self, model, optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler, stream) -> dict:
        """Resume: load the state of optimizer and loss scale; returns that of edits.

        Raises UserError for other data, another place in them, or another optimizer.
        """
        check_same_stream(self.checkpoint, stream, self.path)
        load_optimizer(model, optimizer, self.checkpoint, self.path)
        if scaler.is_enabled() and self.checkpoint["scaler"]:
            scaler.load_state_dict(self.checkpoint["scaler"])
        return load_extra(model, self.checkpoint["extra"])


def find_start(logger: RunLogger, resume: str, init_from: str, dist_ctx: DistContext, stream) -> Start:
    """What --resume and --init_from mean, on every rank the same; also after torchrun's restart. Raises UserError."""
    restarts = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))
    restarted = any(dist_max(dist_ctx, restarts))  # not all nodes count them
    args = (logger.folder, resume, init_from, restarted, logger.info)
    path, resumes = run_on_rank0(dist_ctx, lambda: find_checkpoint(*args))
    with agree(dist_ctx):
        checkpoint = read_checkpoint(path, verify=False) if path else None
        if path:
            check_tokenizer(checkpoint, stream, path)
            logger.info(f"{'resumed' if resumes else 'weights'} from {path}")
    return Start(path, checkpoint, resumes)


def check_tokenizer(checkpoint: dict, stream, path: Path) -> None:
    """Raises UserError when a checkpoint's model was trained with another tokenizer than the data's."""
    texts = (checkpoint["tokenizer"], checkpoint.get("vocabulary")), (stream.meta["tokenizer"], stream.vocabulary)
    was, now = (name + (" " + vocabulary_hash(text)[:12] if text else "") for name, text in texts)
    if was != now:
        source = path.parent if was.startswith("bpe") else was
        advice = f"prepare the data with --tokenizer {source}, and give their folder as --data"
        raise UserError(f"{path} reads tokens of {was}, and {stream.folder} holds those of {now}; {advice}")


def check_same_stream(checkpoint: dict, stream, path: Path) -> None:
    """Raises UserError when resuming would continue with other data, or at another place in them."""
    if checkpoint["data"] != stream.fingerprint():
        advice = f"give the same --data, or start a new run with --init_from {path}"
        raise UserError(f"{path} was trained on other data than {stream.folder} holds now; {advice}")
    was, position = checkpoint["position"], stream.position(checkpoint["step"])
    moved = [f"{key} {was.get(key)} there and {now} here" for key, now in position.items() if was.get(key) != now]
    if moved:
        advice = f"give its --seed, --seq_len, --batch_tokens and --doc_align, or use --init_from {path}"
        raise UserError(f"{path} continues at another place of the stream ({', '.join(moved)}); {advice}")
