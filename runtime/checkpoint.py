"""Checkpoints: ckpt_<step>.pt, plain tensors and JSON-like values in one file.

They are written under a temporary name, read back, and renamed. They load with `weights_only=True`,
so that no pickled code is executed; the checksums of the zip file find damage that torch.load
misses. The same file can be read with any number of ranks.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import os
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_with_path

from common.errors import RunError, UserError, is_out_of_memory
from common.files import atomic_write
from data.tokenizers import get_tokenizer
from model import GPT, GPTConfig
from ops.parallel import get_rank, shard_like, state_to_full, to_local
from runtime.progress import MAX_BAD_STEPS
from runtime.ranks import run_on_rank0

if TYPE_CHECKING:
    from runtime.run import Run

FORMAT = 2  # bump it when the content changes: older files are then refused
BEST = "ckpt_best.pt"  # the weights of the best evaluation

# Entries of the optimizer's groups that follow from the flags; a resumed run takes all others, such
# as counters that an optimizer of your own keeps there, from the checkpoint
SET_BY_FLAGS = "lr initial_lr weight_decay betas momentum kind matrix_rows params".split()


class CorruptCheckpointError(UserError):
    """A checkpoint whose bytes have changed since it was saved."""


def checkpoint_step(path: Path) -> int:
    """Return the step in a checkpoint's name."""
    return int(path.stem.removeprefix("ckpt_"))


def list_checkpoints(folder: Path) -> list[Path]:
    """List the checkpoint files of a run's folder, newest first."""
    paths = folder.glob("ckpt_*.pt")
    numbered = [path for path in paths if path.stem.removeprefix("ckpt_").isdecimal()]
    return sorted(numbered, key=checkpoint_step, reverse=True)


# --------------------------------------------------------------------------------------------------
# Reading


def read_checkpoint(path: Path, verify: bool = True) -> dict[str, Any]:
    """Load a checkpoint, mapped from its file. Without `verify`, checksums are not compared.

    Raises UserError if it is missing or of another version, CorruptCheckpointError if it is
    damaged, RunError if it cannot be read at the moment, for lack of memory or permission, say.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            if verify and archive.testzip():
                raise ValueError("a checksum differs")
        checkpoint = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except FileNotFoundError:
        raise UserError(
            f"there is no checkpoint {path}; give the path of a ckpt_<step>.pt file "
            "that all ranks can read"
        ) from None
    except Exception as error:  # torn and foreign files fail in many ways
        reason = system_error(error)
        # EINVAL: a torn file with an offset before its beginning
        has_failed = isinstance(reason, OSError) and reason.errno != errno.EINVAL
        if has_failed or is_out_of_memory(reason):
            raise RunError(
                f"{path} cannot be read now ({reason}), and is kept; try again once that is "
                "resolved, or --resume an older one with a different --out_dir"
            ) from None
        raise CorruptCheckpointError(
            f"{path} is damaged, or not a checkpoint ({type(error).__name__}); use a different one"
        ) from None
    if not isinstance(checkpoint, dict) or checkpoint.get("format") != FORMAT:
        raise UserError(
            f"{path} is not a checkpoint of this version of the trainer; use the source that made "
            "it, a copy of which is in its run's folder"
        )
    return checkpoint


def system_error(error: Exception) -> Exception:
    """Return the OSError that torch.save or zipfile wraps in its own, or else the error itself."""
    return error.__context__ if isinstance(error.__context__, OSError) else error


def with_eval_weights(checkpoint: dict[str, Any]) -> dict[str, Any]:
    """Replace the weights of a checkpoint by extra["eval_weights"], where there are any."""
    weights = checkpoint["model"] | checkpoint["extra"].get("eval_weights", {})
    return checkpoint | dict(model=weights)


def model_config(checkpoint: dict[str, Any], path: Path) -> GPTConfig:
    """Return the model's configuration. Raises UserError if it is of another version."""
    saved, ours = checkpoint["model_config"], GPTConfig()
    if saved["version"] == ours.version and saved.keys() <= vars(ours).keys():
        return GPTConfig(**saved)
    raise UserError(
        f"{path} does not fit version {ours.version} of the model, its configuration being "
        f"{saved}; use the source that made it, a copy of which is in its run's folder"
    )


def document_token(checkpoint: dict[str, Any]) -> int | None:
    """Return the token that starts a document, for a model trained with --doc_mask; else None."""
    if not checkpoint["config"].get("doc_mask"):
        return None
    return get_tokenizer(checkpoint["tokenizer"], checkpoint.get("vocabulary")).eot


def load_weights(model: GPT, checkpoint: dict[str, Any], path: Path) -> None:
    """Copy a checkpoint's weights and buffers into the model, before it is sharded.

    Raises UserError if names, shapes or fields of the configuration differ. The context length may.
    """
    differ = []
    for name, theirs in checkpoint["model_config"].items():
        ours = getattr(model.cfg, name, None)
        if theirs != ours and name != "seq_len":
            differ.append(f"{name} {theirs} there and {ours} here")
    try:
        if not differ:
            model.load_state_dict(checkpoint["model"])
    except RuntimeError as error:
        differ = [" ".join(str(error).split())[:300]]
    if differ:
        raise UserError(
            f"{path} does not fit this model ({', '.join(differ)}); use the flags and the model.py "
            "that made it, which are in its run's folder"
        )


def load_optimizer(
    model: nn.Module, optimizer: torch.optim.Optimizer, checkpoint: dict[str, Any]
) -> None:
    """Copy a checkpoint's optimizer state into ours."""
    # Settings: those that flags decide are ours, the others the checkpoint's
    groups = optimizer.state_dict()["param_groups"]
    for group, saved in zip(groups, checkpoint["optimizer_groups"]):
        group.update({name: saved[name] for name in saved if name not in SET_BY_FLAGS})

    # State: PyTorch numbers parameters in the order of the groups; the checkpoint has names
    names = {p: name for name, p in model.named_parameters()}
    params = [p for group in optimizer.param_groups for p in group["params"]]
    states = {}
    for number, p in enumerate(params):
        state = dict(checkpoint["optimizer"][names[p]])
        for key, value in state.items():
            if isinstance(value, Tensor):
                state[key] = value.clone()  # no longer mapped from the file
                if value.dim():
                    state[key] = shard_like(state[key], p)
                if value.shape != p.shape:  # for example a number per row: a plain tensor
                    state[key] = to_local(state[key])
        states[number] = state
    optimizer.load_state_dict(dict(state=states, param_groups=groups))
    # That moves state to the device, where with --offload optimizer there is no room in training
    if getattr(optimizer, "offload", False):
        for p, state in optimizer.state.items():
            for key, value in state.items():
                if isinstance(value, Tensor) and p.is_cuda and value.shape == p.shape:
                    state[key] = to_local(value).cpu().pin_memory()


def load_extra(model: GPT, saved: dict[str, Any]) -> dict[str, Any]:
    """Load TrainState.extra onto the model's device; tensors named like a parameter are sharded."""
    params = dict(model.named_parameters())

    def load(path: tuple, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        value = value.clone()  # no longer mapped from the file
        name = getattr(path[-1], "key", "")
        return shard_like(value, params[name]) if name in params else value.to(model.device)

    return tree_map_with_path(load, saved)


# --------------------------------------------------------------------------------------------------
# Writing


def save_checkpoint(run: Run, is_last: bool = False) -> None:
    """Save a checkpoint, unless this step has one. Every rank must call it.

    A file that cannot be written is a warning, because there may be room next time; at the end of
    the run it raises RunError. After a step that was skipped because of its gradient, the weights
    may be ruined: nothing is saved, except at the end of a run that has not diverged.
    """
    state = run.state
    most_bad_steps = MAX_BAD_STEPS if is_last else 1
    may_be_ruined = run.bad_steps >= most_bad_steps
    if run.saved_step == state.step or may_be_ruined:
        return
    path = run.folder / f"ckpt_{state.step}.pt"
    checkpoint = collect_values(run)
    checkpoint["extra"] = whole_tensors(state.extra, "state.extra")
    for name, p in state.raw_model.named_parameters():
        tensors = state.optimizer.state.get(p, {})
        checkpoint["optimizer"][name] = whole_tensors(tensors, name, param=p)
    groups = state.optimizer.state_dict()["param_groups"]
    checkpoint["optimizer_groups"] = whole_tensors(groups, "param_groups")

    failed = run_on_rank0(lambda: write_file(path, checkpoint, run))
    run.tried_at_s = run.clock.process_time
    run.tried_step = state.step
    if failed and is_last:
        raise RunError(failed, printed=run.dist_ctx.rank > 0)
    if failed:
        run.log.info(f"WARNING: {failed}")
    else:
        run.saved_step = state.step


def delete_old_checkpoints(run: Run, keep: int | str) -> None:
    """Delete all but the newest `keep` checkpoints, a number or "all"."""
    if run.dist_ctx.rank == 0 and isinstance(keep, int):
        for old in list_checkpoints(run.folder)[keep:]:
            with contextlib.suppress(OSError):
                old.unlink()


def save_best_weights(run: Run, val_loss: float) -> None:
    """Save the weights just evaluated, if no loss was lower so far. Every rank must call it.

    If the file cannot be written, that is a warning: the next evaluation tries again.
    """
    if not val_loss < run.best_val_loss:
        return
    failed = ""
    if not run_on_rank0(lambda: link_as_best(run)):
        path = run.folder / BEST
        with run.state.evaluating():
            checkpoint = collect_values(run)
            failed = run_on_rank0(lambda: write_file(path, checkpoint, run))
    if failed:
        run.log.info(f"WARNING: {failed}")
    else:
        run.best_val_loss = val_loss


def link_as_best(run: Run) -> bool:
    """Give the checkpoint of this step a second name, if there is one that has these weights."""
    if run.saved_step != run.state.step or "eval_weights" in run.state.extra:
        return False
    link = run.folder / ".tmp-link.pt"
    try:
        link.unlink(missing_ok=True)
        os.link(run.folder / f"ckpt_{run.saved_step}.pt", link)
        os.replace(link, run.folder / BEST)
        link.unlink(missing_ok=True)  # where both were names of one file, replace does nothing
    except OSError:  # some file systems have no links
        return False
    return True


def collect_values(run: Run) -> dict[str, Any]:
    """Collect what both kinds of checkpoints hold. Every rank must call it."""
    state, stream = run.state, run.stream
    return dict(
        format=FORMAT,
        step=state.step,
        tokens=state.tokens,
        clock=run.clock.state(),
        config=dataclasses.asdict(state.cfg),
        model_config=dataclasses.asdict(state.raw_model.cfg),
        model=whole_tensors(dict(state.raw_model.state_dict()), "model"),
        optimizer={},
        optimizer_groups=[],
        scaler=state.scaler.state_dict(),
        extra={},
        tokenizer=stream.meta["tokenizer"],
        vocabulary=stream.vocabulary,  # so that sampling needs no dataset
        data=stream.fingerprint(),
        position=stream.stream_state(state.step),
    )


def write_file(path: Path, checkpoint: dict[str, Any], run: Run) -> str:
    """Write a checkpoint and read it back; return a sentence if that fails, else ""."""
    names = [name for name, _ in run.state.raw_model.named_parameters()]
    # A sum, because isfinite() of a large table would take more memory than the table
    if not all(checkpoint["model"][name].sum().isfinite() for name in names):
        return (
            f"{path} is not saved, because weights are not finite; resume from an earlier "
            "checkpoint with lower learning rates, --grad_clip 1 or --dtype fp32"
        )
    try:
        path.parent.mkdir(parents=True, exist_ok=True)  # the user may have moved it
        run.log.sync()
        with atomic_write(path) as file:
            torch.save(checkpoint, file)
            file.flush()
            with contextlib.suppress(RunError):  # a file that cannot be read now may be intact
                read_checkpoint(Path(file.name))
        return ""
    except (OSError, RuntimeError, UserError) as error:
        return f"{path} could not be saved ({system_error(error)}); make room and --resume"


def whole_tensors(values: Any, name: str, param: Tensor | None = None) -> Any:
    """Return nested values for a checkpoint, with whole tensors on the CPU of rank 0.

    Every rank must call it, because shards are gathered. param: the parameter to which the values
    belong as optimizer state. Raises UserError for values of types that a checkpoint cannot hold.
    """

    if isinstance(values, np.generic):  # such as float64, which is a float
        values = values.item()
    kind = type(values)
    if isinstance(values, Tensor):
        full = state_to_full(values.detach(), param)
        return full.cpu() if get_rank() == 0 else None
    if values is None or kind in (bool, int, float, str):
        return values
    # Only what torch.load accepts with weights_only=True: no deque, no defaultdict
    if kind in (list, tuple):
        return kind(whole_tensors(v, f"{name}[{i}]", param) for i, v in enumerate(values))
    if kind is dict and all(type(key) in (int, str) for key in values):
        return {key: whole_tensors(v, f"{name}[{key!r}]", param) for key, v in values.items()}
    raise UserError(
        f"{name} is a {kind.__name__}; a checkpoint holds tensors, numbers, texts, lists, and "
        "dicts whose keys are texts or integers"
    )
