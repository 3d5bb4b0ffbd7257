"""Continuing a run: which one --resume means, its flags, and that it continues at the same place of the same data."""

from pathlib import Path

import torch

from data.shards import UserError, load_meta, recorded_hashes
from runtime.checkpoint import BEST, list_checkpoints
from runtime.dtype import saved_dtype
from runtime.logger import read_finished_run

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


def flags_of_run(given: dict, fields: set[str], presets: dict[str, dict], runs: Path) -> dict:
    """The flags of the run that --resume continues, from its checkpoint, with the given ones over them.

    given: the flags of the command line; fields: those that exist; runs: where runs go by default. Without --resume, or
    where there is nothing to resume yet, the given ones alone. Raises UserError when it is unclear which run is meant.
    """
    given, resume = dict(given), given.get("resume", "")
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
    saved = next(filter(None, map(saved_flags, candidates)), {})
    replaced = set(RUN_FLAGS)  # by what is given
    replaced |= {"dtype", "bf16"} if given.keys() & {"dtype", "bf16"} else set()
    replaced |= {"minutes"} if "max_steps" in given else set()
    saved = {name: value for name, value in saved.items() if name in fields - replaced}
    if saved and given.get("preset", saved.get("preset")) != saved.get("preset"):
        saved |= presets.get(given["preset"], {})
    return saved | given


def saved_flags(path: Path) -> dict | None:
    """The flags that a checkpoint was made with; None for a file that cannot be read, which is told of later."""
    try:
        return dict(torch.load(path, map_location="cpu", weights_only=True, mmap=True)["config"])
    except Exception:  # torn and foreign files fail in many ways
        return None


def check_same_stream(checkpoint: dict, fingerprint: str, position: dict, folder: Path, path: Path) -> None:
    """Raises UserError when resuming would continue with other data, or at another place of them."""
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


def check_tokenizer(checkpoint: dict, tokenizer: str, folder: Path, path: Path) -> None:
    """Raises UserError when a checkpoint's model reads other tokens than the data are made of."""
    if checkpoint["tokenizer"] != tokenizer:
        raise UserError(
            f"{path} reads tokens of {checkpoint['tokenizer']!r}, and {folder} holds those of {tokenizer!r}; prepare "
            f"the data with --tokenizer {checkpoint['tokenizer']}"
        )


def changed_flags(flags: dict, before: dict, path: Path) -> str:
    """The flags that have other values than before, as "name old -> new".

    Raises UserError under --trials if one of them matters.
    """
    changed = sorted(k for k, v in flags.items() if before.get(k, v) != v and k not in (*RUN_FLAGS, "data"))
    harmless = {"checkpointing", "eval_every", "save_every", "sample_every", "log_every", "keep", "prefetch",
                "max_minutes", "wandb"}  # fmt: skip
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
    """The summary of a trial that is done, for --resume auto. Raises UserError when its flags or data were others."""
    if not flags["resume"] or not (finished := read_finished_run(folder)):
        return None
    summary, before = finished
    changed_flags(flags | dict(dtype=saved_dtype(flags["dtype"], before)), before, folder)
    if summary.get("files") != recorded_hashes(load_meta(data)):
        raise UserError(f"{folder} was trained on other data; give the same --data, or another --out_dir")
    return summary
