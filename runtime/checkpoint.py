"""Checkpoints: ckpt_<step>.pt, plain tensors and JSON-like values in one file, written atomically and read back.

`weights_only=True` loads them, so that no pickled code is executed; the zip's own checksums find damage that torch.load
misses. The same file serves every number of ranks.
"""

import dataclasses
import math
import re
import zipfile
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from common import RunError, UserError, atomic_write
from data.shards import TOKENIZER_SIZES
from ops.parallel import shard_like, state_to_full, to_full
from runtime.log import RunLogger
from runtime.ranks import run_on_rank0

# What every checkpoint holds, besides "vocabulary", a text or None
DICTS = ("clock", "config", "model_config", "position", "scaler", "extra", "model", "optimizer")
CHECKPOINT_SCHEMA = dict(step=int, tokens=int, optimizer_groups=list) | dict.fromkeys(DICTS, dict)
CHECKPOINT_SCHEMA |= dict.fromkeys(("tokenizer", "data", "eval_part", "optimizer_type"), str)
BEST = "ckpt_best.pt"  # the weights of the best evaluation


class CorruptCheckpointError(UserError):
    """A checkpoint whose bytes are not what was saved."""


def checkpoint_step(path: Path) -> int:
    """The step in a checkpoint's name; -1 for any other file."""
    match = re.fullmatch(r"ckpt_(\d+)\.pt", path.name)
    return int(match[1]) if match else -1


def list_checkpoints(folder: Path) -> list[Path]:
    """The checkpoint files of a run's folder, newest first."""
    found = (path for path in folder.glob("ckpt_*.pt") if checkpoint_step(path) >= 0)
    return sorted(found, key=checkpoint_step, reverse=True)


def read_checkpoint(path: Path, verify: bool = True) -> dict:
    """The content of a checkpoint, mapped from the file. Raises UserError when it is missing or cannot be read.

    Raises CorruptCheckpointError when it is damaged or not ours; without `verify`, checksums are not compared.
    """
    if not Path(path).is_file():
        raise UserError(f"there is no checkpoint {path}; give the path of a ckpt_<step>.pt file")
    try:
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip() if verify else None
        checkpoint = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        if (
            damaged
            or not all(type(checkpoint[key]) is kind for key, kind in CHECKPOINT_SCHEMA.items())
            or not all(isinstance(value, Tensor) for value in checkpoint["model"].values())
            or not all(isinstance(state, dict) for state in checkpoint["optimizer"].values())
            or not all(
                0 <= checkpoint["clock"][key] < math.inf for key in ("train_time", "wall_time")
            )
            or min(checkpoint["step"], checkpoint["tokens"]) < 0
        ):
            raise ValueError(damaged or "it has other content")
    except (MemoryError, PermissionError) as error:
        raise UserError(
            f"{path} cannot be read now ({error}); make it readable, or give more memory"
        ) from None
    except (
        Exception
    ) as error:  # torn and foreign files fail in many ways, all of which mean the same here
        found = f"{path} is damaged, or not a checkpoint of this version of the trainer"
        raise CorruptCheckpointError(f"{found} ({type(error).__name__}); use another") from None
    return checkpoint


def save_checkpoint(
    logger: RunLogger, stream, content: dict, model, optimizer, extra: dict, keep: int, must: bool
):
    """Write content, tensors, and where the stream is, as ckpt_<step>.pt into the run's folder; every rank must call.

    Then delete old ones, but for the newest `keep`; 0 keeps all. Without an optimizer, write BEST. A file that cannot
    be written is a warning, as the next save may find room; with `must`, a RunError on all ranks.
    """
    path = logger.folder / (f"ckpt_{content['step']}.pt" if optimizer else BEST)
    content |= collect_tensors(model, optimizer, extra, logger.dist_ctx.rank)
    content |= dict(
        data=stream.fingerprint(),
        position=stream.stream_state(content["step"]),
        eval_part=stream.eval_subset,
    )
    content |= dict(
        tokenizer=stream.meta["tokenizer"], vocabulary=stream.vocabulary
    )  # sampling needs no data folder

    def write() -> None:
        try:
            logger.sync()
            with atomic_write(path) as file:
                torch.save(content, file)
                file.flush()
                read_checkpoint(
                    Path(file.name)
                )  # before an older one goes, this one has been read back
        except (OSError, RuntimeError, UserError) as error:
            reason = (
                error.__context__ if isinstance(error.__context__, OSError) else error
            )  # torch.save hides it
            newest = next((path.name for path in list_checkpoints(logger.folder)), "none")
            failed = (
                f"{path} could not be saved ({reason}); the newest checkpoint there is {newest}"
            )
            if must:
                raise RunError(f"{failed}; make room and --resume") from None
            return logger.info(f"WARNING: {failed}")
        for old in list_checkpoints(logger.folder)[keep:] if keep and optimizer else []:
            old.unlink(missing_ok=True)

    run_on_rank0(logger.dist_ctx, write)


# ---------------------------------------------------------------------------------------------------------------------
# Tensors to the file, and back


def collect_tensors(
    model: nn.Module, optimizer: torch.optim.Optimizer | None, extra: dict, rank: int
) -> dict:
    """The state of the model, the optimizer and edits as whole tensors in host memory, on rank 0; every rank must call.

    Optimizer state goes by the names of parameters. Raises UserError for what a checkpoint cannot hold.
    """
    copies: dict[Tensor, Tensor] = {}  # a tied parameter is copied once

    def whole(value, param=None, name: str = "state.extra"):
        if isinstance(value, (np.ndarray, np.generic)):
            value = torch.as_tensor(value) if value.ndim else value.item()
        if isinstance(value, Tensor):
            if value not in copies:
                full = (
                    to_full(value.detach())
                    if param is None
                    else state_to_full(value.detach(), param)
                )
                copies[value] = full.to("cpu", copy=True) if rank == 0 else torch.empty(0)
            return copies[value]
        if isinstance(value, dict):
            return {key: whole(item, param, f"{name}[{key!r}]") for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [whole(item, param, name) for item in value]
        if value is None or isinstance(value, (bool, int, float, str)):
            return value
        raise UserError(
            f"{name} is a {type(value).__name__}; a checkpoint holds tensors, numbers, texts, lists, dicts"
        )

    found = dict(model=whole(model.state_dict(keep_vars=True)), extra=whole(extra))
    found |= dict(optimizer={}, optimizer_type=type(optimizer).__name__, optimizer_groups=[])
    if optimizer is not None:
        for name, p in model.named_parameters():
            if p in optimizer.state:
                found["optimizer"][name] = whole(optimizer.state[p], p, name)
        groups = optimizer.state_dict()["param_groups"]
        found["optimizer_groups"] = whole(
            [{k: v for k, v in g.items() if k != "params"} for g in groups]
        )
    return found


def load_extra(model, saved: dict) -> dict:
    """What edits have saved, on the model's device; tensors of a parameter's name and shape are sharded like it."""
    params = dict(model.named_parameters())

    def restored(value, name: str = ""):
        if isinstance(value, dict):
            return {key: restored(item, key) for key, item in value.items()}
        if isinstance(value, list):
            return [restored(item) for item in value]
        if not isinstance(value, Tensor):
            return value
        return shard_like(value, params[name]) if name in params else value.clone().to(model.device)

    return restored(saved)


def with_eval_weights(checkpoint: dict) -> dict:
    """The checkpoint with the weights that its run evaluated, if an edit keeps them apart from the trained ones."""
    return checkpoint | dict(
        model=checkpoint["model"] | checkpoint["extra"].get("eval_weights", {})
    )


def model_config(checkpoint: dict, kind: type, path):
    """The model's configuration as an instance of the dataclass `kind`. Raises UserError when it is not one."""
    saved, advice = (
        checkpoint["model_config"],
        "use the source that made it, a copy of which is in its run's folder",
    )
    if saved.get("version") != kind().version:
        found = f"version {saved.get('version')} of the model, and this is version {kind().version}"
        raise UserError(f"{path} holds {found}, which computes something else; {advice}")
    try:
        cfg, least = kind(**saved), TOKENIZER_SIZES.get(checkpoint["tokenizer"], (0, 0))[0]
        cfg.layer_windows()
    except (TypeError, ValueError, AttributeError):
        raise UserError(
            f"{path} does not fit this GPTConfig: its model is {saved}; {advice}"
        ) from None
    if cfg.vocab_size < least:
        raise UserError(
            f"{path} has a vocabulary of {cfg.vocab_size}, and its tokenizer has {least}; use another"
        )
    return cfg


def load_weights(
    model: nn.Module, checkpoint: dict, path, may_differ: tuple[str, ...] = ()
) -> None:
    """Copy the checkpoint's weights and buffers into the whole model.

    Raises UserError if the configuration (except the fields of may_differ), names or shapes differ from the model's.
    """
    there, here = (
        dataclasses.asdict(model_config(checkpoint, type(model.cfg), path)),
        dataclasses.asdict(model.cfg),
    )
    differ = [
        f"{k} {there[k]} there and {here[k]} here"
        for k in here
        if there[k] != here[k] and k not in may_differ
    ]
    try:
        if not differ:
            model.load_state_dict(checkpoint["model"])
    except RuntimeError as error:
        differ = [" ".join(str(error).split())[:300]]
    if differ:
        advice = "use the flags and the model.py that made it, as its run's folder has them"
        raise UserError(f"{path} does not fit this model ({', '.join(differ)}); {advice}")


SET_BY_FLAGS = (
    "lr",
    "initial_lr",
    "weight_decay",
    "betas",
    "momentum",
    "kind",
    "split",
    "fused",
    "params",
)


def load_optimizer(
    model: nn.Module, optimizer: torch.optim.Optimizer, checkpoint: dict, path
) -> None:
    """Copy the checkpoint's optimizer state into ours. Raises UserError for another optimizer's."""
    if checkpoint["optimizer_type"] != type(optimizer).__name__:
        raise UserError(
            f"{path} was made with {checkpoint['optimizer_type']}; resume it with that, or --init_from it"
        )
    groups, saved = optimizer.state_dict()["param_groups"], checkpoint["optimizer_groups"]
    if len(groups) == len(saved):
        ours = [{k: v for k, v in group.items() if k in SET_BY_FLAGS} for group in groups]
        groups = [was | dict(initial_lr=now["lr"]) | now for was, now in zip(saved, ours)]
    index = {
        p: i for i, p in enumerate(p for group in optimizer.param_groups for p in group["params"])
    }
    states = {}
    for name, p in model.named_parameters():
        state = checkpoint["optimizer"].get(name, {})
        alike = {
            slot: v for slot, v in state.items() if isinstance(v, Tensor) and v.shape == p.shape
        }
        if p in index and state:
            states[index[p]] = state | {slot: shard_like(value, p) for slot, value in alike.items()}
    optimizer.load_state_dict(dict(state=states, param_groups=groups))
