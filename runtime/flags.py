"""Flags: fields of train_gpt.py's Config. Command line, --help, checks, and implied flags."""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import math
import types
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, get_args

import numpy as np

from common.errors import UserError
from common.values import boolean, integer
from runtime.sizes import flags_for_size

if TYPE_CHECKING:
    from train_gpt import Config

# With one of these, --minutes chooses no size
SIZE_FLAGS = {"preset", "params", "n_layer", "n_embd", "n_head", "init_from"}

# The first flag of each group in --help, and the group's heading
HEADINGS = {
    "preset": "run",
    "params": "model",
    "optimizer": "optimizer and schedule",
    "compile": "systems",
    "eval_every": "logging and checkpoints",
}

# Type of a flag -> how its text is read
READERS: dict[type, Callable] = {int: integer, float: float, bool: boolean, str: str}

# Names and values in nanoGPT and elsewhere, and what there is here
OTHER_NAMES = {
    "block_size": "use --seq_len",
    "max_iters": "use --max_steps",
    "learning_rate": "use --muon_lr for matrices and --adam_lr for the rest",
    "lr": "use --muon_lr for matrices and --adam_lr for the rest",
    "min_lr": "the rate falls to 5 % of its peak in the final --cooldown_frac of the steps",
    "lr_decay_iters": "the rate falls to 5 % of its peak in the final --cooldown_frac of the steps",
    "warmup_iters": "use --warmup_frac, a fraction of --max_steps",
    "batch_size": "use --batch_tokens for the tokens of a step, --micro_batch for a device's part",
    "gradient_accumulation_steps": "it follows from --batch_tokens, --micro_batch and the devices",
    "dataset": "use --data with a folder from data/prepare.py",
    "eval_interval": "use --eval_every",
    "eval_iters": "use --eval_tokens",
    "log_interval": "use --log_every",
    "epochs": "use --max_steps; the log says how many epochs that is",
    "wandb_log": "use --wandb",
    "wandb_project": "set the variable WANDB_PROJECT",
    "wandb_run_name": "set the variable WANDB_NAME",
    "decay_lr": "use --cooldown_frac 0 for a constant rate",
    "always_save_checkpoint": "use --save_every; the best weights are always saved",
    "eval_only": "use sample.py RUN --perplexity FILE",
    "bias": "there are none",
    "beta1": "betas are fixed in optimizer_groups in model.py",
    "beta2": "betas are fixed in optimizer_groups in model.py",
    "backend": "it follows from --device",
    "start": "use --prompt",
    "out_dir": "give the run's folder without a flag",  # to sample.py and export.py
    "gpu": "use cuda",
    "True": "give the flag without a value",
    "False": "leave the flag out",
}
# What nanoGPT's --init_from takes
NANOGPT_STARTS = {
    "scratch": "leave it out",
    "resume": "use --out_dir RUN --resume",
    "gpt2": "GPT-2's weights do not fit this model, so train one with --preset gpt2-small",
}


def flag(
    default: Any,
    help: str,
    choices: Iterable[str] = (),
    const: Any = None,
    min: float = 0,
    auto: bool = False,
) -> Any:
    """Declare a field that is a flag.

    choices: the texts allowed; for a number, words besides numbers. const: the value of a bare
    flag, as in --compile (bool: true). min: the smallest number allowed. auto: `auto` is allowed,
    too; the value is then None until it is chosen, as for a default of None.
    """
    words = tuple(choices) + ("auto",) * (auto or default is None)
    metadata = dict(help=help, words=words, const=const, min=min)
    return dataclasses.field(default=default, metadata=metadata)


def flags_of(config: type[Config]) -> dict[str, dataclasses.Field]:
    """Return the fields that are flags, by name."""
    return {field.name: field for field in dataclasses.fields(config) if kind_of(field) in READERS}


def kind_of(field: dataclasses.Field) -> type:
    """Return the type of a flag: int for `int` and for `int | str`, whose texts are words."""
    kind: Any = field.type
    return get_args(kind)[0] if isinstance(kind, types.UnionType) else kind


def closest(name: str, names: Iterable[str]) -> str:
    """End a sentence about an unknown name."""
    if name.endswith(".py"):
        return "; there are no configuration files: use --preset NAME and flags"
    if name in names:  # without --
        return f"; did you mean --{name}?"
    if name in OTHER_NAMES:
        return f"; {OTHER_NAMES[name]}"
    matches = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    return f"; did you mean {matches[0]}?" if matches else "; --help lists them"


# --------------------------------------------------------------------------------------------------
# Checks


def check_values(flags: dict[str, Any], config: type[Config]) -> dict[str, Any]:
    """Check names, types, choices and ranges of flags, which are fields of the dataclass `config`.

    Returns the flags with 1 as 1.0 where a float is due. Raises UserError.
    """
    fields = flags_of(config)
    checked = {}
    value: Any
    for name, value in flags.items():
        if name not in fields:
            raise UserError(f"unknown flag --{name}{closest(name, fields)}")
        kind = kind_of(fields[name])
        metadata = fields[name].metadata
        words = metadata.get("words", ())
        is_number = kind in (int, float)

        # Values from Python
        if isinstance(value, np.generic):
            value = value.item()
        if value is None and "auto" in words:
            value = "auto"
        if kind is float and type(value) is int:
            value = float(value)
        if kind is str and isinstance(value, Path):
            value = str(value)

        least = metadata.get("min", -math.inf)
        if is_number and value in words:
            value = None if value == "auto" else value
        elif type(value) is not kind:
            expected = ", ".join([kind.__name__, *words])
            raise UserError(f"--{name} is {value!r}; expected {expected}")
        elif kind is str and words and value not in words:
            hint = closest(str(value), words)
            raise UserError(f"--{name} is {value!r}; expected one of {', '.join(words)}{hint}")
        elif is_number and not least <= value < 2**48:
            expected = "".join(f"{word}, " for word in words)
            expected += f"a finite number of at least {least} and below 2**48"
            raise UserError(f"--{name} is {value}; expected {expected}")
        checked[name] = value
    return checked


# --------------------------------------------------------------------------------------------------
# Command line


class Parser(argparse.ArgumentParser):
    """A parser of whole names, whose errors are UserErrors that know other names of a flag."""

    def __init__(self, prog: str, **options: Any):
        super().__init__(prog, allow_abbrev=False, **options)

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}; --help lists the flags")

    def read(self, argv: list[str]) -> argparse.Namespace:
        """Read a command line. Raises UserError."""
        flags, unknown = self.parse_known_args(argv)
        if unknown:
            name = unknown[0].lstrip("-").split("=")[0]
            names = [text.lstrip("-") for text in self._option_string_actions]
            raise UserError(f"unknown flag {unknown[0]}{closest(name, names)}")
        return flags


def reader(kind: type, words: tuple[str, ...]) -> Callable[[str], Any]:
    """Return a function that reads a flag's text: one of the words, or a value of its type."""

    def read(text: str) -> Any:
        return text if text in words else READERS[kind](text)

    read.__name__ = READERS[kind].__name__  # for argparse's messages
    return read


def parse_flags(
    argv: list[str], config: type[Config], help_defaults: dict[str, Any], description: str
) -> dict[str, Any]:
    """Read the flags that a command line names; --help prints and exits.

    config: the dataclass whose fields they are. help_defaults: what --help shows in place of the
    fields' own. Raises UserError.
    """
    parser = Parser("train_gpt.py", description=description, argument_default=argparse.SUPPRESS)
    fields = flags_of(config)
    group: Any = parser  # of flags before the first heading
    parser.usage = "train_gpt.py [--FLAG VALUE]..."
    for field in fields.values():
        kind, words = kind_of(field), field.metadata.get("words", ())
        kinds = () if kind is str and words else (kind.__name__,)
        options: dict[str, Any] = dict(type=reader(kind, words), metavar="|".join(kinds + words))

        # The value of a bare flag
        const = field.metadata.get("const") or kind is bool
        if const:
            options.update(nargs="?", const=const)

        # The help text, with the default in brackets
        help_text = field.metadata.get("help", "").replace("%", "%%")
        default = help_defaults.get(field.name, field.default)
        if default != "":
            help_text = f"{help_text} [{'auto' if default is None else default}]"
        if field.name in HEADINGS:
            group = parser.add_argument_group(HEADINGS[field.name])
        group.add_argument(f"--{field.name}", help=help_text, **options)

    short: dict[str, Any] = dict(dest="dtype", action="store_const", const="bf16")
    parser.add_argument("--bf16", **short, help="short for --dtype bf16")

    return vars(parser.read(argv))


# --------------------------------------------------------------------------------------------------
# Flags that follow from others


def implied_flags(given: dict[str, Any]) -> dict[str, Any]:
    """Return what --params, --minutes and --init_from change in the preset.

    Raises UserError if it is unclear how long to train, or what to start from.
    """
    if given.get("minutes") and "max_steps" in given:
        raise UserError(
            "--minutes ends the run by the clock, so that --max_steps cannot be given; remove one "
            "of them"
        )
    source = given.get("init_from", "")
    if source.partition("-")[0] in NANOGPT_STARTS and not Path(source).exists():
        hint = NANOGPT_STARTS[source.partition("-")[0]]
        raise UserError(f"there is no run or checkpoint {source}; {hint}")
    if given.get("resume") not in (None, "", "auto") and source:
        raise UserError("--resume and --init_from contradict each other; give one of them")
    implied: dict[str, Any] = {}
    if given.get("params"):
        implied = flags_for_size(given["params"], given)
    if given.get("minutes") and not SIZE_FLAGS & given.keys():
        implied["params"] = None
    if given.get("init_from"):
        # The model has learned from short sequences already. None: from the size of the dataset
        implied |= dict(short_frac=0.0, batch_tokens=None)
        if "max_steps" not in given:
            implied |= dict(max_steps=None, eval_every=None)
    return implied
