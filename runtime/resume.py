"""Continuing a run: which one --resume means, its flags, and that it continues at the same place of the same data."""

import dataclasses
import os
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch

from data.bpe import vocabulary_hash
from data.shards import UserError, load_meta, recorded_hashes
from data.stream import eval_part_of
from ops.params import some
from runtime.checkpoint import (
    BEST,
    find_checkpoint,
    frozen_names,
    list_checkpoints,
    load_extra,
    load_optimizer,
    load_weights,
    model_config,
    read_checkpoint,
)
from runtime.dtype import resolve_dtype, saved_dtype
from runtime.flags import check_values
from runtime.logger import RunLogger, read_finished_run
from runtime.ranks import DistContext, agree, dist_max, run_on_rank0

CHOSEN = ("max_steps", "warmup_frac", "cooldown_frac")  # by --minutes
RUN_FLAGS = ("resume", "out_dir", "init_from", "init_partial", "trials", "profile")  # not taken from a checkpoint


def newest_run(runs: Path) -> str:
    """The end of a sentence about --out_dir: the folder of `runs` with the newest checkpoint, if there is one."""
    found = [path for folder in runs.glob("*") if folder.is_dir() for path in list_checkpoints(folder)[:1]]
    if not found:
        return f" and a run's folder; there is none in {runs}/"
    return f" {max(found, key=lambda path: path.stat().st_mtime).parent}, the newest here, or another run's folder"


def check_minutes(given: dict) -> None:
    """Raises UserError when --minutes and what it chooses are both given."""
    if given.get("minutes") and "max_steps" in given:
        raise UserError("--minutes chooses --max_steps, so that both cannot be given; remove one of them")


def merge_flags(given: dict, fields: tuple[dataclasses.Field, ...], presets: dict[str, dict]) -> dict:
    """The flags that are given, or with --resume those of the run with the given ones over them. Raises UserError."""
    by_name = {field.name: field for field in fields}
    return check_values(flags_of_run(given, set(by_name), presets, Path("runs")), by_name)


def sizes_of_start(given: dict) -> dict:
    """The model's sizes in the checkpoint that --init_from names, where the flags give none."""
    sizes = {"n_layer", "n_head", "n_embd", "ngram", "ngram_rows"}
    if not given.get("init_from") or given.keys() & {"preset", "params", *sizes}:
        return {}
    path = Path(given["init_from"])
    candidates = [path] if path.is_file() else [*list_checkpoints(path), path / BEST]
    saved = flags_of_first(candidates)
    return {name: saved[name] for name in sizes & saved.keys()}


def flags_of_run(given: dict, fields: set[str], presets: dict[str, dict], runs: Path) -> dict:
    """The flags of the run that --resume continues, from its checkpoint, with the given ones over them.

    given: the flags of the command line; fields: those that exist; runs: where runs go by default. Without --resume, or
    where there is nothing to resume yet, the given ones alone. Raises UserError when it is unclear which run is meant.
    """
    given, resume = sizes_of_start(given) | given, given.get("resume", "")
    check_minutes(given)
    if not resume or given.get("trials", 1) > 1:
        return given
    if resume == "newest" and not given.get("out_dir"):
        raise UserError(f"--resume does not say which run: add --out_dir{newest_run(runs)}")
    path = Path(resume) if resume not in ("newest", "auto") else None
    if path and path.is_dir():
        given["out_dir"] = given.get("out_dir") or resume
        if Path(given["out_dir"]).resolve() == path.resolve():
            given["resume"], path = "newest", None
    if path and path.is_file() and not given.get("out_dir") and (path.parent / "log.txt").exists():
        given["out_dir"] = str(path.parent)
    if path and path.name == BEST:
        raise UserError(f"{path} holds weights only, so it cannot be resumed; use --init_from {path}")
    source = path or (Path(given["out_dir"]) if given.get("out_dir") else None)
    candidates = [] if source is None else [source] if source.is_file() else list_checkpoints(source)
    saved = flags_of_first(candidates)
    if saved and given.get("params", saved.get("params")) != saved.get("params"):
        raise UserError(f"--params {given['params']} is for new runs, and {source} has its sizes; remove it")
    replaced = set(RUN_FLAGS)  # by what is given
    replaced |= {"dtype", "bf16"} if given.keys() & {"dtype", "bf16"} else set()
    if given.get("minutes") and given["minutes"] == saved.get("minutes"):  # the same command again: as it was chosen
        given = {name: value for name, value in given.items() if name not in CHOSEN}
    replaced |= {"minutes"} if given.keys() & set(CHOSEN) else set()
    saved = {name: value for name, value in saved.items() if name in fields - replaced}
    if saved and given.get("preset", saved.get("preset")) != saved.get("preset"):
        saved |= presets.get(given["preset"], {})
    return saved | given


def of_today(saved: dict) -> dict:
    """A checkpoint's flags; an adam_lr of 0 is from before the learning rate depended on the width."""
    old = dict(muon_lr=0.0, adam_lr=0.002) if saved.get("optimizer") == "adamw" else dict(adam_lr=0.006)
    return saved | old if saved.get("adam_lr") == 0.0 else dict(saved)


def saved_flags(path: Path) -> dict | None:
    """The flags that a checkpoint was made with; None for a file that cannot be read, which is reported later."""
    try:
        return of_today(torch.load(path, map_location="cpu", weights_only=True, mmap=True)["config"])
    except Exception:  # torn and foreign files fail in many ways
        return None


def flags_of_first(paths: list[Path]) -> dict:
    """The flags of the first of these checkpoints that can be read; {} where none can."""
    return next(filter(None, map(saved_flags, paths)), {})


def was_restarted(dist_ctx: DistContext) -> bool:
    """Whether torchrun has started this job again, on every rank the same."""
    return dist_max(dist_ctx, int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))) > 0  # not all nodes count them


def check_same_stream(checkpoint: dict, fingerprint: str, position: dict, folder: Path, path: Path) -> None:
    """Raises UserError when resuming would continue with other data, or at another place in them."""
    if checkpoint["data"] != fingerprint:
        raise UserError(
            f"{path} was trained on other data than {folder} holds now; give the same --data, or start a new run with "
            f"--init_from {path}"
        )
    was, now = checkpoint.get("position", {}), position
    moved = [f"{key} {was[key]} there and {now[key]} here" for key in now if was.get(key, now[key]) != now[key]]
    if moved:
        raise UserError(
            f"{path} continues at another place of the stream ({', '.join(moved)}), so data were lost or seen twice; "
            f"give its --seed, --seq_len, --batch_tokens and --doc_align, or use --init_from {path}"
        )


def check_tokenizer(checkpoint: dict, stream, path: Path) -> None:
    """Raises UserError when a checkpoint's model was trained with another tokenizer than the data's."""
    was, tokenizer, folder = checkpoint["tokenizer"], stream.meta["tokenizer"], stream.folder
    if was != tokenizer:
        raise UserError(
            f"{path} reads tokens of {was!r}, and {folder} holds those of {tokenizer!r}; prepare the data with "
            f"--tokenizer {path.parent if was == 'bpe' else was}, and give their folder as --data"
        )
    theirs, ours = (
        (vocabulary_hash(text) if text else "") for text in (checkpoint.get("vocabulary"), stream.vocabulary)
    )
    if theirs != ours:
        raise UserError(
            f"{path} reads byte pairs of the vocabulary with hash {theirs[:12]}, and {folder} holds those of "
            f"{ours[:12]}; prepare the data with --tokenizer {path.parent}, and give their folder as --data"
        )


def changed_flags(flags: dict, before: dict, path: Path) -> str:
    """The flags that have other values than before, as "name old -> new".

    Raises UserError under --trials if one of them matters.
    """
    changed = sorted(k for k, v in flags.items() if before.get(k, v) != v and k not in (*RUN_FLAGS, "data"))
    harmless = {
        "checkpointing",
        "eval_every",
        "save_every",
        "sample_every",
        "log_every",
        "keep",
        "prefetch",
        "max_minutes",
        "wandb",
    }
    if flags["trials"] > 1 and set(changed) - harmless:
        raise UserError(
            f"{path} was made with other values of {', '.join(k for k in changed if k not in harmless)}, and --trials "
            "compares runs of equal flags; give those, or another --out_dir"
        )
    gone = [f"--{k} {v} -> no longer there" for k, v in before.items() if k not in flags and v]
    return ", ".join([f"--{k} {before[k]} -> {flags[k]}" for k in changed] + gone)


def check_steps(flags: dict, checkpoint: dict, path: Path) -> None:
    """Raises UserError when the run would end before the steps that are done, or is given another --minutes."""
    done, before = checkpoint["step"], checkpoint["config"]
    if flags["max_steps"] < done:
        raise UserError(
            f"{path} has done {done} steps already; give --max_steps {done} or more, not {flags['max_steps']}"
        )
    if flags["minutes"] not in (0.0, before.get("minutes", 0.0)):
        raise UserError(
            f"--minutes chooses the steps when a run begins, and that of {path} has {before['max_steps']}; give "
            "another --max_steps instead"
        )


def load_finished_trial(folder: Path, flags: dict, data: Path) -> dict | None:
    """The summary of a finished trial, for --resume auto. Raises UserError if its flags or data were different."""
    if not flags["resume"] or not (finished := read_finished_run(folder)):
        return None
    summary, before = finished
    changed_flags(flags | dict(dtype=saved_dtype(flags["dtype"], before)), before, folder)
    meta = load_meta(data)
    if summary.get("files") != recorded_hashes(meta):
        raise UserError(f"{folder} was trained on other data; give the same --data, or another --out_dir")
    if flags["eval_tokens"] and summary.get("eval_part", "first") != eval_part_of(meta):
        raise UserError(f"{folder} was evaluated on the first tokens, as older versions did; give another --out_dir")
    return summary


# ---------------------------------------------------------------------------------------------------------------------
# What a run starts from


class Start(NamedTuple):
    """A checkpoint to take weights from, with the path of its file, and whether to resume its run; or None."""

    path: Path | None
    checkpoint: dict | None
    resumes: bool


def find_start(f, dist_ctx: DistContext, logger: RunLogger) -> Start:
    """What --resume and --init_from mean, on every rank the same; also after torchrun's restart. Raises UserError."""
    args = (logger.folder, f.resume, f.init_from, logger.info, was_restarted(dist_ctx))
    path, resumes = run_on_rank0(dist_ctx, lambda: find_checkpoint(*args))
    with agree(dist_ctx):
        checkpoint = read_checkpoint(path, verify=False) if path else None
    return Start(path, checkpoint, resumes)


def resolve_flags(
    f, start: Start, dist_ctx: DistContext, stream, model_kind: type, lr_multiplier: Callable, ngram_dropout: Callable
):
    """The flags in effect, and lines to say of them: a resumed run's, and --dtype. Raises UserError.

    f: the flags as given; model_kind: GPTConfig; lr_multiplier(step, f) and ngram_dropout(f, stream): of training.
    """
    notes = []
    with agree(dist_ctx):
        if start.path:
            model_config(start.checkpoint, model_kind, start.path)
            check_tokenizer(start.checkpoint, stream, start.path)
            notes = [f"weights from {start.path}"]
        if start.resumes:
            f, note = resolve_resume_flags(f, start, stream, lr_multiplier, ngram_dropout)
            notes = [note]
    if f.schedule_from == "here":
        f = dataclasses.replace(f, schedule_from="start")  # nothing was resumed
    dtype, dtype_notes = resolve_dtype(f, dist_ctx)
    return dataclasses.replace(f, dtype=dtype), notes + dtype_notes


def resolve_resume_flags(f, start: Start, stream, lr_multiplier: Callable, ngram_dropout: Callable) -> tuple:
    """The flags to continue a run with, and a line about those that have changed. Raises UserError."""
    path, step, saved = start.path, start.checkpoint["step"], of_today(start.checkpoint["config"])
    known = {field.name for field in dataclasses.fields(f)}
    before = type(f)(**{name: value for name, value in saved.items() if name in known})
    present = lr_multiplier(max(0, step - 1), before)
    chosen = {name: getattr(before, name) for name in CHOSEN} if f.minutes and f.minutes == before.minutes else {}
    rates = {name: getattr(before, name) for name in ("muon_lr", "adam_lr") if getattr(f, name) == 0.0}
    f = dataclasses.replace(
        f,
        **chosen,
        **rates,
        dtype=saved_dtype(f.dtype, saved),  # measured when the run began
        schedule_from=repr(present) if f.schedule_from == "here" else f.schedule_from,
    )
    flags = dataclasses.asdict(f)
    check_steps(flags, start.checkpoint, path)
    note, changed = f"resumed from {path}", changed_flags(flags, saved, path)
    if chosen:
        note += f", as --minutes {f.minutes:g} chose: " + ", ".join(f"--{name} {chosen[name]}" for name in chosen)
    if changed:
        note += f"; flags that have changed: {changed}"
    if f.max_steps != before.max_steps and step < f.max_steps:
        following = lr_multiplier(step, f)
        note += f"; the learning rate goes from {present:.3g} to {following:.3g} of its full value"
        note += " (--schedule_from here keeps it from rising)" if following > present else ""
    was, now = ngram_dropout(before, stream), ngram_dropout(f, stream)
    if was != now:
        note += f"; n-gram dropout goes from {was:.2f} to {now:.2f}"
    return f, note


def load_start(state, stream, timer, start: Start) -> list[str]:
    """Take a checkpoint's weights; to resume its run, the optimizer, step and clock too. Raises UserError.

    state: the trainer's; returns lines to say of it.
    """
    path, checkpoint = start.path, start.checkpoint
    may_differ = () if start.resumes else ("seq_len",)
    partial = state.cfg.init_partial and not start.resumes
    left = load_weights(state.raw_model, checkpoint, path, may_differ, partial)
    if not start.resumes:
        return [f"not taken from {path}: {left}"] if left else []
    state.step = checkpoint["step"]
    state.tokens = checkpoint.get("tokens", state.step * state.cfg.batch_tokens)
    state.extra.update(load_extra(state.raw_model, checkpoint))
    stream.eval_part = checkpoint.get("eval_part", "first")  # its losses stay comparable
    check_same_stream(checkpoint, stream.fingerprint(), stream.position(state.step), stream.folder, path)
    load_optimizer(state.raw_model, state.optimizer, state.scaler, checkpoint, path)
    timer.train_time, timer.wall_before = checkpoint["clock"]["train_time"], checkpoint["clock"]["wall_time"]
    frozen = frozen_names(state.raw_model)
    thawed = [name for name in checkpoint.get("frozen", frozen) if name not in frozen]
    return [f"frozen when {path.name} was saved, and trained from here on: {some(thawed)}"] if thawed else []
