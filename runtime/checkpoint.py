"""Checkpoints: ckpt_<step>.pt, plain tensors and JSON-like values in one file.

They are written under a temporary name, read back, and renamed. They load with `weights_only=True`,
so that no pickled code is executed; the checksums of the zip file find damage that torch.load
misses. The same file can be read with any number of ranks.
"""

import contextlib
import dataclasses
import errno
import math
import time
import zipfile
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_with_path

from common.errors import RunError, UserError, is_out_of_memory
from common.files import atomic_write
from data.tokenizers import get_tokenizer
from ops.parallel import shard_like, state_to_full, to_local
from runtime.ranks import run_on_rank0

BEST = "ckpt_best.pt"  # the weights of the best evaluation

PATIENCE_S = 120  # how long saving the final checkpoint of a run is retried

# Entries of the optimizer's groups that a resumed run makes anew; others are the checkpoint's
MADE_ANEW = "lr initial_lr weight_decay betas momentum kind matrix_rows fused params".split()


class CorruptCheckpointError(UserError):
    """A checkpoint whose bytes have changed since it was saved."""


def checkpoint_step(path: Path) -> int:
    """Return the step in a checkpoint's name."""
    return int(path.stem.removeprefix("ckpt_"))


def best_val_loss(run, state, stream) -> float:
    """Return the validation loss of the folder's ckpt_best.pt; infinity if there is none.

    If its model, its dataset or --eval_tokens differ from ours, so that losses cannot be compared,
    it is renamed.
    """
    path = run.folder / BEST
    with contextlib.suppress(UserError):  # missing, or damaged
        best = read_checkpoint(path, verify=False)
        theirs = best["model_config"], best["data"], best["config"]["eval_tokens"]
        shape = dataclasses.asdict(state.raw_model.cfg)
        ours = shape, stream.fingerprint(), state.cfg.eval_tokens
        if theirs == ours:
            return best["val_loss"]
        kept = path.with_name(f"ckpt_best_{best['step']}.pt")
        path.rename(kept)
        run.info(f"{path} is now {kept.name}, because its loss cannot be compared with this run's")
    return math.inf


def list_checkpoints(folder: Path) -> list[Path]:
    """List the checkpoint files of a run's folder, newest first."""
    found = folder.glob("ckpt_*.pt")
    found = [path for path in found if path.stem.removeprefix("ckpt_").isdecimal()]
    return sorted(found, key=checkpoint_step, reverse=True)


# --------------------------------------------------------------------------------------------------
# Reading


def read_checkpoint(path: Path, verify: bool = True) -> dict:
    """Load a checkpoint, mapped from its file. Without `verify`, checksums are not compared.

    Raises UserError if it is missing or has a different version, CorruptCheckpointError if it is
    damaged, RunError if it cannot be read at the moment, for lack of memory or permission, say.
    """
    is_whole = False
    try:
        with zipfile.ZipFile(path) as archive:
            if verify and archive.testzip():
                raise ValueError("a checksum differs")
        is_whole = True
        checkpoint = load_mapped(path)
        if "optimizer_groups" not in checkpoint:
            raise ValueError("it has other content")
    except FileNotFoundError:
        raise UserError(
            f"there is no checkpoint {path}; give the path of a ckpt_<step>.pt file"
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
        kind = UserError if is_whole else CorruptCheckpointError
        found = "intact, but" if is_whole else "damaged, or"
        raise kind(
            f"{path} is {found} not a checkpoint of this version of the trainer "
            f"({type(error).__name__}); use a different one, or the source that made it"
        ) from None
    return checkpoint


def load_mapped(path: Path) -> dict:
    """Load a file, mapped if its file system allows that, otherwise into memory."""
    options = dict(map_location="cpu", weights_only=True)
    try:
        return torch.load(path, mmap=True, **options)
    except RuntimeError:
        with open(path, "rb") as file:
            return torch.load(file, **options)


def system_error(error: Exception) -> Exception:
    """Return the OSError that torch.save or zipfile wraps in its own, or else the error itself."""
    return error.__context__ if isinstance(error.__context__, OSError) else error


def with_eval_weights(checkpoint: dict) -> dict:
    """Replace the weights of a checkpoint by extra["eval_weights"], where there are any."""
    weights = checkpoint["model"] | checkpoint["extra"].get("eval_weights", {})
    return checkpoint | dict(model=weights)


def model_config(checkpoint: dict, kind: type, path):
    """Return the model's configuration as an instance of `kind`, GPTConfig. Raises UserError."""
    saved = checkpoint["model_config"]
    version = kind().version
    if saved["version"] == version and saved.keys() <= vars(kind()).keys():
        return kind(**saved)
    raise UserError(
        f"{path} does not fit version {version} of the model, its configuration being {saved}; use "
        "the source that made it, a copy of which is in its run's folder"
    )


def document_token(checkpoint: dict) -> int | None:
    """Return the token that starts a document, for a model trained with --doc_mask; else None."""
    if not checkpoint["config"].get("doc_mask"):
        return None
    return get_tokenizer(checkpoint["tokenizer"], checkpoint.get("vocabulary")).eot


def load_weights(model: nn.Module, checkpoint: dict, path) -> None:
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
    model: nn.Module, optimizer: torch.optim.Optimizer, checkpoint: dict, path
) -> None:
    """Copy a checkpoint's optimizer state into ours. Raises UserError if the optimizers differ."""
    if checkpoint["optimizer_type"] != type(optimizer).__name__:
        raise UserError(
            f"{path} was saved by {checkpoint['optimizer_type']}; resume with that optimizer, or "
            "use --init_from"
        )

    # Settings: those that flags decide are ours, the others the checkpoint's
    groups = optimizer.state_dict()["param_groups"]
    for group, saved in zip(groups, checkpoint["optimizer_groups"]):
        group.update({name: saved[name] for name in saved if name not in MADE_ANEW})

    # State: PyTorch numbers parameters in the order of the groups; the checkpoint has names
    names = {p: name for name, p in model.named_parameters()}
    params = [p for group in optimizer.param_groups for p in group["params"]]
    states = {}
    for number, p in enumerate(params):
        state = dict(checkpoint["optimizer"].get(names.get(p), {}))
        for key, value in state.items():
            if isinstance(value, Tensor) and value.dim():
                state[key] = shard_like(value.clone(), p)  # no longer mapped from the file
                if value.shape != p.shape:  # for example a number per row: a plain tensor
                    state[key] = to_local(state[key])
        states[number] = state
    optimizer.load_state_dict(dict(state=states, param_groups=groups))


def load_extra(model: nn.Module, saved: dict) -> dict:
    """Load TrainState.extra onto the model's device; tensors named like a parameter are sharded."""
    params = dict(model.named_parameters())

    def load(path: tuple, value):
        if not isinstance(value, Tensor):
            return value
        value = value.clone()  # no longer mapped from the file
        name = getattr(path[-1], "key", "")
        return shard_like(value, params[name]) if name in params else value.to(model.device)

    return tree_map_with_path(load, saved)


# --------------------------------------------------------------------------------------------------
# Writing


def save_checkpoint(state, stream, run, required: bool = False) -> None:
    """Save a checkpoint, unless this step has one; delete all but the newest `keep`.

    Every rank must call it. If the file cannot be written, that is a warning, because there may be
    room next time; if it is required, see `insist`.
    """
    if run.saved_step == state.step:
        return
    run.saved_step = state.step
    run.saved_at_s = run.clock.process_time
    path = run.folder / f"ckpt_{state.step}.pt"
    checkpoint = collect_values(state, stream, run)
    checkpoint["extra"] = whole_tensors(state.extra, "state.extra", run)
    for name, p in state.raw_model.named_parameters():
        tensors = state.optimizer.state.get(p, {})
        checkpoint["optimizer"][name] = whole_tensors(tensors, name, run, param=p)
    groups = state.optimizer.state_dict()["param_groups"]
    checkpoint["optimizer_groups"] = whole_tensors(groups, "param_groups", run)

    def write() -> bool:
        failed = write_file(path, checkpoint, run)
        if failed and not required:
            run.info(f"WARNING: {failed}")
            return False
        if failed:
            insist(path, checkpoint, run, failed)
        elif state.cfg.keep:
            for old in list_checkpoints(run.folder)[state.cfg.keep :]:
                with contextlib.suppress(OSError):
                    old.unlink()
        return True

    if not run_on_rank0(run.dist_ctx, write):
        run.saved_step = -1  # if the run ends at this step, it is saved again


def save_after_error(run, error: Exception) -> None:
    """Save a checkpoint after an error of all ranks, unless it came amid an update of weights."""
    is_on_all_ranks = run.dist_ctx.world_size == 1 or hasattr(error, "is_on_all_ranks")
    if run.state and is_on_all_ranks and not run.updating:
        with contextlib.suppress(Exception):  # the error that ended the run is raised
            save_checkpoint(run.state, run.stream, run, required=True)


def save_best_weights(state, stream, run) -> None:
    """Save the weights just evaluated as ckpt_best.pt. Every rank must call it."""
    with state.evaluating():
        checkpoint = collect_values(state, stream, run)
        checkpoint["val_loss"] = run.saved_val_loss
        failed = run_on_rank0(run.dist_ctx, lambda: write_file(run.folder / BEST, checkpoint, run))
    if failed:
        run.info(f"WARNING: {failed}")


def collect_values(state, stream, run) -> dict:
    """Collect what both kinds of checkpoints hold. Every rank must call it."""
    return dict(
        step=state.step,
        tokens=state.tokens,
        clock=dict(
            train_time=run.clock.train_time,
            wall_time=run.clock.wall_time,
            typical_step_s=run.clock.typical_step_s,
            last_eval_s=run.clock.last_eval_s,
            eval_begin=run.eval_begin,
        ),
        config=dataclasses.asdict(state.cfg),
        model_config=dataclasses.asdict(state.raw_model.cfg),
        model=whole_tensors(dict(state.raw_model.state_dict()), "model", run),
        optimizer={},
        optimizer_groups=[],
        optimizer_type=type(state.optimizer).__name__,
        scaler=state.scaler.state_dict(),
        extra={},
        tokenizer=stream.meta["tokenizer"],
        vocabulary=stream.vocabulary,  # so that sampling needs no dataset
        data=stream.fingerprint(),
        position=stream.stream_state(state.step),
        eval_part=stream.eval_part,
    )


def write_file(path: Path, checkpoint: dict, run) -> str:
    """Write a checkpoint and read it back; return a sentence if that fails, else ""."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)  # the user may have moved it
        if path.parent == run.folder:
            run.log.sync()
        with atomic_write(path) as file:
            torch.save(checkpoint, file)
            file.flush()
            with contextlib.suppress(RunError):  # a file that cannot be read now may be intact
                read_checkpoint(Path(file.name))
        return ""
    except (OSError, RuntimeError, UserError) as error:
        return f"{path} could not be saved ({system_error(error)})"


def insist(path: Path, checkpoint: dict, run, failed: str) -> None:
    """Retry writing the final checkpoint of a run, then write it below the current folder.

    After a signal there is no time to retry. Raises RunError if neither works.
    """
    deadline = time.monotonic() + PATIENCE_S
    run.info(f"WARNING: {failed}; retrying, then trying a different folder")
    while failed and not run.is_asked_to_stop() and time.monotonic() < deadline:
        time.sleep(1)
        failed = write_file(path, checkpoint, run)
    if failed:
        other = Path(f"{run.folder.name}-saved", path.name)
        if write_file(other, checkpoint, run):
            raise RunError(f"{failed}; make room and --resume")
        run.info(f"WARNING: {failed}; saved as {other} instead; --resume {other} continues")


def whole_tensors(values, name: str, run, param: Tensor | None = None):
    """Return nested values for a checkpoint, with whole tensors on the CPU of rank 0.

    Every rank must call it, because shards are gathered. param: the parameter to which the values
    belong as optimizer state. Raises UserError for values of types that a checkpoint cannot hold.
    """

    def whole(value, name: str):
        if isinstance(value, np.ndarray):
            value = torch.as_tensor(value)
        if isinstance(value, Tensor):
            full = state_to_full(value.detach(), param)
            return full.cpu() if run.dist_ctx.rank == 0 else None
        if isinstance(value, dict):
            return {key: whole(item, f"{name}[{key!r}]") for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [whole(item, name) for item in value]
        if isinstance(value, np.generic):
            return value.item()
        if value is None or isinstance(value, (bool, int, float, str)):
            return value
        raise UserError(
            f"{name} is a {type(value).__name__}; a checkpoint holds tensors, numbers, texts, "
            "lists, dicts"
        )

    return whole(values, name)
