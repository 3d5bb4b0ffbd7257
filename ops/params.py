"""The parameter table: matching parameters to rows, rejecting what cannot be trained, initializing weights."""

import random
import re
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from ops.init import ModelError
from ops.parallel import copy_from_full_tensor_

GENERATORS = (torch.Generator, random.Random, np.random.Generator, np.random.RandomState)


class ParamGroupSpec(NamedTuple):
    """How the parameters whose names match are initialized and optimized."""

    pattern: str  # regular expression for the whole name
    init: Callable | str  # normal(std), zeros, ones, constant(x), orthogonal(), or "module": as its module makes it
    optim: str  # one of OPTIMIZERS: "muon", for matrices, or "adam"
    lr_mul: float = 1.0  # multiple of muon_lr or adam_lr
    betas: tuple[float, float] = (0.8, 0.95)  # Adam's; Muon's momentum, once it has risen, is the first
    wd_mul: float = 0.0  # multiple of weight_decay


def param_spec_name(name: str, table: dict[str, ParamGroupSpec]) -> str:
    """The row of the table that matches the parameter. Raises ModelError unless exactly one does."""
    rows = [row for row, spec in table.items() if re.fullmatch(spec.pattern, name)]
    if len(rows) != 1:
        pattern = re.sub(r"\d+", r"\\d+", re.escape(name))
        row = "_".join(part for part in name.split(".") if part != "blocks" and not part.isdigit())
        example = f'"{row}": ParamGroupSpec(r"{pattern}", "module", "adam"),'
        found = f"rows {', '.join(rows)}" if rows else "no row"
        raise ModelError(f"parameter {name} matches {found} of PARAM_TABLE in model.py; it needs one: {example}")
    return rows[0]


def some(names: list[str]) -> str:
    """The names, or the first of many, for a message."""
    return ", ".join(names[:6]) + f" and {len(names) - 6} more" * (len(names) > 6)


def was_filled_again(model: nn.Module, name: str) -> bool:
    """Whether a weight was overwritten after its module initialized it, as far as PyTorch's version counter tells."""
    place, _, leaf = name.rpartition(".")
    module, param = model.get_submodule(place), model.get_parameter(name)
    once = isinstance(module, (nn.Linear, nn.Embedding)) and getattr(module, "padding_idx", None) is None
    return leaf == "weight" and once and not hasattr(param, "to_local") and param._version > 1


def check_param_table(model: nn.Module, table: dict[str, ParamGroupSpec], optimizers: dict) -> None:
    """Raises ModelError for a parameter without exactly one valid row, and for state that checkpoints cannot hold."""
    first_name: dict[nn.Parameter, str] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        row = param_spec_name(name, table)
        optim = table[row].optim
        if optim not in optimizers or optim == "muon" and param.dim() != 2:
            raise ModelError(
                f"parameter {name} of shape {tuple(param.shape)} has optim {optim!r} in PARAM_TABLE in model.py; "
                f"expected one of {', '.join(optimizers)}, and muon for matrices only"
            )
        if param.requires_grad and (param.dtype == torch.float16 or param.is_complex()):
            raise ModelError(
                f"parameter {name} is {param.dtype}, which the optimizers cannot train; make it float32 (a complex one "
                "with a last dimension of 2, for torch.view_as_complex), and cast it where it is used"
            )
        if table[row].init != "module" and was_filled_again(model, name):
            raise ModelError(
                f"parameter {name} is initialized again after its module did, as by nn.init, and its row {row} of "
                'PARAM_TABLE in model.py replaces that; put its initialization there, or "module" to keep it'
            )
        other = first_name.setdefault(param, name)
        if param_spec_name(other, table) != row:
            names = "|".join(map(re.escape, (other, name)))
            raise ModelError(
                f"{name} is the same parameter as {other}, and each has a row in PARAM_TABLE in model.py; replace them "
                f'by one row for both: "tied": ParamGroupSpec(r"{names}", ...)'
            )
    for name, module in model.named_modules():
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            raise ModelError(f"module {name} has get_extra_state, which checkpoints do not hold; use a buffer")
        if any(isinstance(value, GENERATORS) for value in vars(module).values()):
            raise ModelError(
                f"module {name} keeps a generator, whose draws are neither recomputed nor resumed; draw from torch's, "
                "or make one within the forward pass, seeded from GPT.step_seed"
            )


def initialize(model: nn.Module, table: dict, make_model: Callable, seed_of: Callable[[str], int]) -> None:
    """Initialize weights (drawn whole on the CPU, then placed or sharded) and buffers, from names and seeds alone.

    make_model: builds the same model with its constructors' own values. seed_of: the seed of a parameter, by name.
    """
    made = initialize_buffers(model, table, make_model, seed_of)
    for name, param in model.named_parameters():
        full = initial_weight(name, param.shape, table, seed_of(name), made)
        copy_from_full_tensor_(param, full)


@torch.no_grad()
def initialize_buffers(model: nn.Module, table: dict, make_model: Callable, seed_of) -> nn.Module | None:
    """Set buffers to the constructors' values; returns the model that was built for that, or None if none was needed.

    Raises ModelError for a buffer that the constructors do not make.
    """
    model.reset_buffers()
    inits = {table[param_spec_name(name, table)].init for name, _ in model.named_parameters()}
    buffers = dict(model.named_buffers())
    if "module" not in inits and buffers.keys() == {"cos", "sin", "frequency"}:
        return None
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.manual_seed(seed_of("module"))
        made = make_model()
    values = dict(made.named_buffers())
    for name, buffer in buffers.items():
        if name not in values:
            raise ModelError(f"buffer {name} is not made by GPT(cfg) alone; make it in the constructor of a part of it")
        buffer.copy_(values[name])
    return made


def initial_weight(name: str, shape: torch.Size, table: dict, seed: int, made: nn.Module | None) -> Tensor:
    """The full initial tensor, fp32 on the CPU, for any ranks and devices; `seed` is this tensor's own.

    made: the model as its constructors build it, for rows that say "module". Raises ModelError for what it lacks.
    """
    init = table[param_spec_name(name, table)].init
    if init != "module":
        return init(torch.empty(shape, device="cpu"), torch.Generator().manual_seed(seed))
    try:
        return made.get_parameter(name).detach()
    except AttributeError:
        raise ModelError(
            f'parameter {name} has init "module", and GPT(cfg) alone does not make it; make it in the constructor of a '
            "part of it"
        ) from None
