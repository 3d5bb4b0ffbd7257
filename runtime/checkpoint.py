"""Checkpoints: ckpt_<step>.pt, plain tensors and JSON-like values in one file, written atomically and verified.

`weights_only=True` loads them, so that no pickled code is executed; a content hash finds damage that torch.load misses.
"""

import dataclasses
import hashlib
import itertools
import json
import math
import re
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from pathlib import Path

import torch
from torch import Tensor, nn

from data.shards import TOKENIZER_SIZES, RunError, UserError, atomic_write
from ops.init import persistent_buffers
from ops.parallel import copy_from_full_tensor_, full_tensor_on_rank0, to_local
from ops.params import some
from runtime.logger import RunLogger
from runtime.ranks import DistContext, dist_max, run_on_rank0
from runtime.watch import check_replicas

# Keys that every checkpoint has, see snapshot; old ones lack "position", "tokens", "extra", "optimizer_type",
# "optimizer_settings", "optimizer_numbers", "vocabulary", "eval_part" and "frozen".
CHECKPOINT_SCHEMA = dict(
    step=int,
    clock=dict,
    config=dict,
    model_config=dict,
    tokenizer=str,
    data=str,
    scaler=dict,
    model=dict,
    optimizer=dict,
)


class CorruptCheckpointError(UserError):
    """A checkpoint whose bytes are not what was saved."""


def content_hash(checkpoint: dict) -> str:
    """SHA-256 over every value of a checkpoint but its own "sha256": torch.load itself accepts flipped bytes."""
    digest = hashlib.sha256()

    def feed(value) -> None:
        if isinstance(value, dict):
            for key in sorted(value):
                digest.update(b"k" + str(key).encode())
                feed(value[key])
        elif isinstance(value, Tensor):
            digest.update(f"t{value.dtype}{tuple(value.shape)}".encode())
            digest.update(value.contiguous().reshape(-1).view(torch.uint8).numpy())
        else:
            try:
                digest.update(b"v" + json.dumps(value).encode())
            except TypeError:  # a list with tensors in it
                digest.update(f"l{len(value)}".encode())
                for item in value:
                    feed(item)

    feed({key: value for key, value in checkpoint.items() if key != "sha256"})
    return digest.hexdigest()


BEST = "ckpt_best.pt"  # the weights of the best evaluation


def checkpoint_step(path: Path) -> int:
    """The step in a checkpoint's name; -1 for any other file."""
    match = re.fullmatch(r"ckpt_(\d+)\.pt", path.name)
    return int(match[1]) if match else -1


def list_checkpoints(folder: Path) -> list[Path]:
    """The checkpoint files of a run's folder, newest first."""
    found = (path for path in folder.glob("ckpt_*.pt") if checkpoint_step(path) >= 0)
    return sorted(found, key=checkpoint_step, reverse=True)


def read_checkpoint(path: Path, verify: bool = True) -> dict:
    """The content of a checkpoint, mapped from the file. Raises UserError when it is missing or not ours.

    Raises CorruptCheckpointError when it is damaged; without `verify`, the content hash is not compared.
    """
    if not Path(path).is_file():
        raise UserError(f"there is no checkpoint {path}; give the path of a ckpt_<step>.pt file")
    intact = False
    try:
        checkpoint = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        intact = not verify or content_hash(checkpoint) == checkpoint["sha256"]
        named = [checkpoint["model"], *checkpoint["optimizer"].values()]
        if not (
            all(type(checkpoint[key]) is kind for key, kind in CHECKPOINT_SCHEMA.items())
            and all(isinstance(key, str) and isinstance(value, Tensor) for part in named for key, value in part.items())
            and all(0 <= checkpoint["clock"][key] < math.inf for key in ("train_time", "wall_time"))
            and checkpoint["step"] >= 0
        ):
            raise ValueError
    except (MemoryError, PermissionError) as error:
        raise UserError(f"{path} cannot be read now ({error}); make it readable, or give more memory") from None
    except Exception as error:  # torn and foreign files fail in many ways, all of which mean the same here
        raise (UserError if intact else CorruptCheckpointError)(
            f"{path} is not a checkpoint of this trainer or is damaged ({type(error).__name__}); use another"
        ) from None
    if not intact:
        raise CorruptCheckpointError(
            f"{path} is damaged: its content does not have the hash that it was saved with; use another"
        )
    return checkpoint


def strip_wrapper_prefixes(named: dict, known) -> dict:
    """The dict without the prefixes that DDP and torch.compile add to names; names in `known` stay as they are."""
    return {name if name in known else re.sub(r"(module|_orig_mod)\.", "", name): t for name, t in named.items()}


def state_names(model: nn.Module) -> dict[str, Tensor]:
    """Every parameter and persistent buffer by name; a shared one appears under each of its names."""
    return {**dict(model.named_parameters(remove_duplicate=False)), **persistent_buffers(model)}


def frozen_names(model: nn.Module) -> list[str]:
    """The parameters that are not trained now."""
    return [name for name, p in model.named_parameters() if not p.requires_grad]


def snapshot(state, stream, timer, best: bool = False) -> dict:
    """The content of a checkpoint, copied to host memory; complete on rank 0 only, but every rank must take part.

    state, stream, timer: the trainer's. best: without optimizer state, and with the weights that are evaluated.
    """
    check_replicas(state.model, state.dist_ctx, state.step)
    if best:
        with state.as_evaluated() as model:
            tensors = collect_tensors(model)
    else:
        tensors = collect_tensors(state.raw_model, state.optimizer, state.extra)
    return {
        "step": state.step,
        "clock": timer.state(),
        "config": dataclasses.asdict(state.cfg),
        "model_config": dataclasses.asdict(state.raw_model.cfg),
        "tokenizer": stream.meta["tokenizer"],
        "vocabulary": stream.vocabulary,  # of a custom BPE, so that sampling needs no data folder
        "data": stream.fingerprint(),
        "position": stream.position(state.step),
        "eval_part": stream.eval_part,
        "scaler": state.scaler.state_dict(),
        "tokens": state.tokens,
        "frozen": frozen_names(state.raw_model),
        **tensors,
    }


def collect_tensors(
    model: nn.Module, optimizer: torch.optim.Optimizer | None = None, extra: dict | None = None
) -> dict:
    """Copies in host memory of the model's state and, if given, the optimizer's and edits'; empty except on rank 0.

    Every rank must take part; only rank 0 needs extra memory, and no more than the copies take.
    """
    found = dict(model={}, optimizer={}, extra=collect_extra(extra or {}))
    first: dict[Tensor, str] = {}
    for name, tensor in state_names(model).items():
        if first.setdefault(tensor, name) != name:
            full = found["model"].get(first[tensor])
        else:
            full = full_tensor_on_rank0(tensor, to_local(tensor))
        if full is not None:
            found["model"][name] = full
    if optimizer is None:
        return found
    check_optimizer_state(model, optimizer)
    found["optimizer_type"] = type(optimizer).__name__
    found["optimizer_settings"] = changed_settings(optimizer)
    then = vars(optimizer).get("numbers_at_start", {})
    found["optimizer_numbers"] = {k: v for k, v in own_numbers(optimizer).items() if v != then.get(k)}
    for name, p in model.named_parameters():
        if name in found["model"]:
            found["optimizer"][name] = {}  # also of what is frozen
        for slot, part in optimizer.state.get(p, {}).items():
            part = to_local(torch.as_tensor(part)) if part is not None else None
            full = None if part is None else full_tensor_on_rank0(p, part)
            if full is not None:
                found["optimizer"][name][slot] = full
    return found


def check_optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Raises UserError for state that a checkpoint cannot hold."""
    if not isinstance(optimizer, torch.optim.Optimizer) or optimizer.state is not optimizer.state:
        raise UserError(
            "make_optimizer returns no torch.optim.Optimizer with a `state` of its own, which a resume fills in; "
            "derive from it, and put each parameter's state into self.state[p]"
        )
    for name, p in model.named_parameters():
        for slot, part in optimizer.state.get(p, {}).items():
            if not isinstance(part, (Tensor, bool, int, float, type(None))):
                raise UserError(
                    f"the optimizer's {slot} of {name} is a {type(part).__name__}; a checkpoint holds tensors and "
                    "numbers, each in a slot of its own"
                )
            part = to_local(torch.as_tensor(part)) if part is not None else None
            if part is not None and part.dim() and hasattr(p, "to_local") and part.shape != to_local(p).shape:
                raise UserError(
                    f"the optimizer's {slot} of {name} has the shape {tuple(part.shape)}, and this rank's rows of it "
                    f"{tuple(to_local(p).shape)}: under FSDP, checkpoints need state sharded like the parameter; "
                    "train with --parallel ddp"
                )


NUMBERS = (bool, int, float)


def numbers_of(group: dict) -> dict:
    """The numbers of a parameter group but its learning rate, by name."""
    return {k: v for k, v in group.items() if type(v) in NUMBERS and k not in ("lr", "initial_lr")}


def own_numbers(optimizer: torch.optim.Optimizer) -> dict:
    """The numbers that an optimizer has as attributes, such as counters, by name."""
    return {k: v for k, v in vars(optimizer).items() if type(v) in NUMBERS and not k.startswith("_")}


def note_settings(optimizer: torch.optim.Optimizer) -> None:
    """Record the groups' numbers before the first step, so that changed_settings can tell what steps have changed."""
    optimizer.__dict__.setdefault("settings_at_start", [numbers_of(group) for group in optimizer.param_groups])
    optimizer.__dict__.setdefault("numbers_at_start", own_numbers(optimizer))


def changed_settings(optimizer: torch.optim.Optimizer) -> list[dict]:
    """Each group's numbers that are really optimizer state, as Prodigy and schedule-free optimizers have them.

    For our Optimizer only those that edits add, as flags and schedules set its own. Empty for an optimizer that was
    created after the start.
    """
    if not hasattr(optimizer, "settings_at_start"):
        return []
    ours = hasattr(optimizer, "make_state")
    pairs = itertools.zip_longest(map(numbers_of, optimizer.param_groups), optimizer.settings_at_start, fillvalue={})
    return [
        {key: value for key, value in now.items() if (key not in then if ours else value != then.get(key))}
        for now, then in pairs
    ]


def whole_tensor(tensor: Tensor) -> Tensor | None:
    """A copy of the full tensor in host memory; None except on rank 0."""
    return full_tensor_on_rank0(tensor, to_local(tensor))


def collect_extra(value, name: str = "state.extra", keep=whole_tensor):
    """The state of edits, with keep() applied to each tensor. Raises UserError for what a checkpoint cannot hold."""
    if isinstance(value, Tensor):
        return keep(value)
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {key: collect_extra(item, f"{name}[{key!r}]", keep) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [collect_extra(item, f"{name}[{i}]", keep) for i, item in enumerate(value)]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise UserError(
        f"{name} is of type {type(value).__name__}; a checkpoint holds tensors, numbers, texts, lists and dicts by text"
    )


def load_extra(model: nn.Module, checkpoint: dict) -> dict:
    """What collect_extra saved, on the model's device; tensors of a parameter's name and shape are sharded alike."""
    params = dict(model.named_parameters())
    device = next(iter(params.values())).device

    def restored(value, name: str = ""):
        if isinstance(value, dict):
            return {key: restored(item, key) for key, item in value.items()}
        if isinstance(value, list):
            return [restored(item) for item in value]
        if not isinstance(value, Tensor):
            return value
        if name in params and params[name].shape == value.shape:
            tensor = torch.empty_like(params[name], dtype=value.dtype).detach()
            copy_from_full_tensor_(tensor, value)
            return tensor
        return value.clone().to(device)

    return restored(checkpoint.get("extra", {}))


def as_evaluated(checkpoint: dict) -> dict:
    """The checkpoint with the weights that its run evaluated, if an edit keeps them apart from the trained ones."""
    return checkpoint | dict(model=checkpoint["model"] | checkpoint.get("extra", {}).get("eval_weights", {}))


def is_alike(default, value) -> bool:
    """Whether a field with this default may have the value: same type, a number for a number, or one is None."""
    kinds = {type(default), type(value)}
    return len(kinds) == 1 or kinds == {int, float} or type(None) in kinds


def model_config(checkpoint: dict, kind: type, path):
    """The model's configuration as an instance of the dataclass `kind`. Raises UserError when it is not one."""
    defaults, saved = dataclasses.asdict(kind()), checkpoint["model_config"]
    if saved.get("version", 1) != defaults["version"]:
        raise UserError(
            f"{path} holds version {saved.get('version', 1)} of the model, and this is version {defaults['version']}, "
            "which computes something else; use the source that made it, a copy of which is in its run's folder"
        )
    if any(key not in defaults or not is_alike(defaults[key], value) for key, value in saved.items()):
        raise UserError(
            f"{path} does not fit this GPTConfig: its model is {saved}; use the source that made it, as its run's "
            "folder has it, or another checkpoint"
        )
    cfg, tokenizer = kind(**saved), checkpoint["tokenizer"]
    least, _ = TOKENIZER_SIZES.get(tokenizer, (0, 0))
    if cfg.vocab_size < least:
        raise UserError(
            f"{path} has a vocabulary of {cfg.vocab_size}, less than the {least} of its tokenizer, {tokenizer}; use "
            "another"
        )
    return cfg


def load_weights(
    model: nn.Module, checkpoint: dict, path, may_differ: tuple[str, ...] = (), partial: bool = False
) -> str:
    """Copy the checkpoint's weights and buffers into the model; prefixes that wrappers leave on names are dropped.

    Raises UserError if the configuration (except the fields of may_differ), names or shapes differ from the model's.
    partial: load only what fits. Returns a description of what was left out.
    """
    ours = state_names(model)
    weights = strip_wrapper_prefixes(checkpoint["model"], ours)
    if any(name.endswith("_int8") for name in weights):
        raise UserError(
            f"{path} holds rounded weights, which are for sampling; give the checkpoint they were made from"
        )
    config, here = dataclasses.asdict(model_config(checkpoint, type(model.cfg), path)), dataclasses.asdict(model.cfg)
    fields = [key for key in here if config[key] != here[key] and key not in may_differ]
    differ = [f"{key} {config[key]} there and {here[key]} here" for key in fields]
    shapes = [name for name in ours if name in weights and weights[name].shape != ours[name].shape]
    missing, unknown = [name for name in ours if name not in weights], [name for name in weights if name not in ours]
    first: dict[Tensor, str] = {}
    for name, tensor in ours.items():
        other = first.setdefault(tensor, name)
        if name != other and not {name, other} & {*missing, *shapes} and not torch.equal(weights[name], weights[other]):
            differ.append(f"{name} and {other}, which are one here, differ there")
    if (differ or shapes) and not partial:
        what = ", ".join(differ) or some(shapes)
        raise UserError(f"{path} holds a model of another shape ({what}); give the flags that it was made with")
    if (missing or unknown) and not partial:
        found = [f"lacks {some(missing)}"] * bool(missing) + [f"has {some(unknown)}, unknown here"] * bool(unknown)
        raise UserError(
            f"{path} {' and '.join(found)}, so another model.py made it; use that, as its run's folder has it, or in "
            "training --init_from with --init_partial, which takes what fits"
        )
    for name, tensor in ours.items():
        if first[tensor] == name and name not in missing and name not in shapes:
            copy_from_full_tensor_(tensor, weights[name])
    left = {"another shape": shapes, "not there": missing, "unknown here": unknown, "other settings": differ}
    return "; ".join(f"{why}: {some(names)}" for why, names in left.items() if names)


def load_optimizer(
    model: nn.Module, optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler, checkpoint: dict, path
) -> None:
    """Copy the checkpoint's optimizer state and loss scale into ours. Raises UserError for another optimizer's."""

    def refuse(why: str) -> None:
        raise UserError(f"{path} {why}; give another checkpoint, or use --init_from {path}")

    params = dict(model.named_parameters())
    saved_states = strip_wrapper_prefixes(checkpoint["optimizer"], params)
    groups = {p: group for group in optimizer.param_groups for p in group["params"]}
    slots = {slot for state in optimizer.state.values() for slot in state}  # that it makes itself
    if checkpoint.get("optimizer_type", "Optimizer") != type(optimizer).__name__:
        refuse(f"was made with {checkpoint['optimizer_type']}")
    for name, p in params.items():
        if name not in saved_states:
            refuse("holds no optimizer state" + (f" of {name}" if saved_states else ""))
        saved = saved_states[name]
        if not saved or p not in groups:  # it was frozen, or is in no parameter group now
            continue
        if p not in optimizer.state:
            make_state(optimizer, groups[p], p, saved)
        added = saved.keys() - optimizer.state[p].keys()
        for slot in added if optimizer.state[p].keys() < saved.keys() and not added & slots else ():
            optimizer.state[p][slot] = new_slot(p, saved[slot], p.device)  # of an edit
        parts = {slot: to_local(part) for slot, part in optimizer.state[p].items()}
        shapes = {slot: p.shape if part.shape == to_local(p).shape else part.shape for slot, part in parts.items()}
        if {slot: value.shape for slot, value in saved.items()} != shapes:
            refuse("was made with another --optimizer or PARAM_TABLE")
        for slot, part in parts.items():
            copy_from_full_tensor_(p, saved[slot], part)
    note_settings(optimizer)
    changed, own = checkpoint.get("optimizer_settings", []), checkpoint.get("optimizer_numbers", {})
    are_numbers = isinstance(changed, list) and all(isinstance(c, dict) and numbers_of(c) == c for c in changed)
    if not are_numbers or not isinstance(own, dict) or any(type(v) not in NUMBERS for v in own.values()):
        refuse("holds optimizer settings that are not numbers")
    for group, numbers in zip(optimizer.param_groups, changed):
        group.update(numbers)
    vars(optimizer).update(own)
    if scaler.is_enabled() and checkpoint["scaler"].keys() == scaler.state_dict().keys():
        scaler.load_state_dict(checkpoint["scaler"])


def make_state(optimizer: torch.optim.Optimizer, group: dict, p: Tensor, saved: dict) -> None:
    """State for a parameter that has none yet: it is frozen now, or the optimizer makes state in its first step."""
    if hasattr(optimizer, "make_state"):
        optimizer.make_state(group, p)
        return
    on_device = group.get("fused") or group.get("capturable")  # then torch.optim keeps its step count there too
    for slot, t in saved.items():
        optimizer.state[p][slot] = new_slot(p, t, p.device if t.dim() or on_device else "cpu")


def new_slot(p: Tensor, saved: Tensor, device) -> Tensor:
    """Zeros for a saved tensor of a parameter's state, sharded like the parameter if both have the same shape."""
    return torch.zeros_like(p if saved.shape == p.shape else saved, dtype=saved.dtype, device=device)


def find_checkpoint(
    folder: Path, resume: str, init_from: str, say, restarted: bool = False
) -> tuple[Path | None, bool]:
    """The file to start from, verified (None = from scratch), and whether to resume it. Raises UserError.

    resume and init_from are the flags; restarted: torchrun has restarted the job. A damaged checkpoint that is skipped
    is renamed to .damaged and reported with `say`; best weights without a checkpoint to continue from are deleted.
    """
    there = list_checkpoints(folder)
    if there and restarted:
        resume = "newest"  # what the job saved counts, not what it was started from
    if not there and resume in ("", "auto") and any(folder.glob("ckpt_*.damaged")):
        raise UserError(
            f"{folder} holds damaged checkpoints only; give another --out_dir, or delete them to start over"
        )
    if not there and not resume and not restarted and (folder / BEST).exists():
        raise UserError(f"{folder} holds the {BEST} of another run; give another --out_dir, or delete it to start over")
    if not there:
        (folder / BEST).unlink(missing_ok=True)  # of a start that saved nothing to continue from
    if there and not resume:
        raise UserError(f"{folder} already holds {there[0].name}; add --resume to continue, or give another --out_dir")
    if resume == "newest" or (resume == "auto" and there):
        return newest_valid(folder, say), True
    path = Path(resume) if resume not in ("", "auto") else Path(init_from) if init_from else None
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
    raise UserError(
        f"{folder} has no valid checkpoint; give a run's folder that has one, or another --out_dir to start"
    )


class CheckpointManager:
    """Saves checkpoints: a copy is made between two steps, then hashed and written by a thread, one at a time."""

    def __init__(self, logger: RunLogger, dist_ctx: DistContext, keep: int, step: int = 0):
        """keep: how many of the newest stay in the logger's folder; 0 = all. step: where the run starts."""
        self.logger, self.dist_ctx, self.keep, self.failed = logger, dist_ctx, keep, ""
        self.step = step  # of the newest checkpoint; nothing is lost if the run ends there
        self.writing: dict[str, Future] = {}  # the latest of each name, on rank 0
        self.thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")

    def save(self, step: int, make_snapshot, best: bool = False, wait: bool = True) -> None:
        """Save what make_snapshot() returns on rank 0, unless this step is already saved; every rank must call it.

        Returns once the copy is made. best: saves as BEST. There is one copy of each kind at a time: while the previous
        one is still being written, this one waits for it, or, without `wait`, is skipped after two seconds.
        """
        name = BEST if best else ""
        if not best and step == self.step:
            return
        wait_for([*filter(None, [self.writing.get(name)])], timeout=None if wait else 2)
        busy = name in self.writing and not self.writing[name].done()
        if dist_max(self.dist_ctx, busy):  # the others wait here, on the CPU, and not in a collective that times out
            self.logger.info("WARNING: a checkpoint is left out, as the one before is still being written")
            return
        checkpoint = make_snapshot()
        self.step = self.step if name else step
        if self.dist_ctx.rank == 0:
            self.writing[name] = self.thread.submit(self.write, checkpoint, name)

    def write(self, checkpoint: dict, name: str = "") -> None:
        """Write ckpt_<step>.pt, complete or not at all, then delete old ones; `failed` tells what failed."""
        folder = self.logger.folder
        path = folder / (name or f"ckpt_{checkpoint['step']}.pt")
        try:
            self.logger.sync()
            checkpoint["sha256"] = content_hash(checkpoint)
            with atomic_write(path) as file:
                torch.save(checkpoint, file)
                file.flush()
                read_checkpoint(Path(file.name))  # before an older one goes, this one has been read back
        except Exception as error:  # the run continues, and its next save may find room
            while not isinstance(error, OSError) and error.__context__:  # torch.save hides that the disk is full
                error = error.__context__
            newest = next((path.name for path in list_checkpoints(folder)), "none")
            failed = f"{path} could not be saved ({error}); the newest checkpoint there is {newest}"
            self.logger.info(f"WARNING: {failed}")
            self.failed = self.failed if name else failed
            return
        if name:
            return
        self.failed = ""
        for old in list_checkpoints(folder)[self.keep :] if self.keep else []:
            try:
                old.unlink(missing_ok=True)
            except OSError as error:
                self.logger.info(f"WARNING: {old} could not be deleted ({error})")

    def finish(self) -> None:
        """Wait for pending writes. Raises RunError, on every rank, if the newest checkpoint could not be written."""
        run_on_rank0(self.dist_ctx, self.wait_for_writing)

    def wait_for_writing(self) -> None:
        for written in self.writing.values():
            written.result()
        if self.failed:
            raise RunError(f"{self.failed}; make room and --resume")

    def close(self) -> None:
        self.thread.shutdown(wait=True)
