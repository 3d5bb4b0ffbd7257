"""Flags from a dataclass: each field is one, and the command line, --help and checks follow."""

import argparse
import dataclasses
import difflib
import math
from collections.abc import Iterable
from pathlib import Path

from common.errors import UserError
from common.values import boolean, integer

# Names in nanoGPT and elsewhere, and what there is here
OTHER_NAMES = {
    "block_size": "use --seq_len",
    "max_iters": "use --max_steps",
    "learning_rate": "use --muon_lr for matrices and --adam_lr for the rest",
    "lr": "use --muon_lr for matrices and --adam_lr for the rest",
    "min_lr": "the rate falls to 5 % over the last --cooldown_frac of the steps",
    "lr_decay_iters": "the rate falls to 5 % over the last --cooldown_frac of the steps",
    "warmup_iters": "use --warmup_frac, a fraction of --max_steps",
    "batch_size": "use --batch_tokens for the tokens of a step, --micro_batch for a device's part",
    "gradient_accumulation_steps": "it follows from --batch_tokens, --micro_batch and the devices",
    "dropout": "there is none; against overfitting use --weight_decay or --ngram_dropout",
    "dataset": "use --data with a folder from data/prepare.py",
    "eval_interval": "use --eval_every",
    "eval_iters": "use --eval_tokens",
    "log_interval": "use --log_every",
    "epochs": "use --max_steps; the log says how many epochs that is",
    "wandb_log": "use --wandb",
    "prefetch": "batches are always prepared in the background",
}


def flag(default, help: str, choices: Iterable[str] = (), const=None, min: float = 0):
    """Declare a field that is a flag.

    const: the value of the flag without one, as in --compile. min: the least number.
    """
    metadata = dict(help=help, choices=tuple(choices), const=const, min=min)
    return dataclasses.field(default=default, metadata=metadata)


def closest(name: str, names: Iterable[str]) -> str:
    """End a sentence about an unknown name."""
    if name in OTHER_NAMES:
        return f"; {OTHER_NAMES[name]}"
    matches = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    return f"; did you mean {matches[0]}?" if matches else "; --help lists them"


# --------------------------------------------------------------------------------------------------
# Checks


def check_values(flags: dict, fields: dict[str, dataclasses.Field]) -> dict:
    """Check names, types and choices of flags; returns them, with 1 as 1.0 where a float is due.

    fields: of Config, by name. Raises UserError.
    """
    checked = {}
    for name, value in flags.items():
        if name not in fields:
            raise UserError(f"unknown flag --{name}{closest(name, fields)}")
        kind = type(fields[name].default)
        choices = fields[name].metadata.get("choices")
        if kind is float and type(value) is int:
            value = float(value)
        if kind is int and type(value) is float and value.is_integer():
            value = int(value)
        if kind is str and isinstance(value, Path):
            value = str(value)
        if type(value) is not kind:
            raise UserError(f"--{name} is {value!r}; expected {kind.__name__}")
        if choices and value not in choices:
            raise UserError(
                f"--{name} is {value!r}; expected one of {', '.join(choices)}"
                f"{closest(value, choices)}"
            )
        checked[name] = value
    return checked


def check_types(cfg):
    """Check a Config that was made in Python; returns it with paths as texts. Raises UserError."""
    known = {field.name: field for field in dataclasses.fields(cfg)}
    return dataclasses.replace(cfg, **check_values(vars(cfg), known))


def check_ranges(cfg) -> None:
    """Raise UserError for a number that is below its minimum, too large or not finite."""
    for field in dataclasses.fields(cfg):
        value = getattr(cfg, field.name)
        least = field.metadata.get("min", -math.inf)
        if isinstance(value, (int, float)) and not least <= value < 2**48:
            raise UserError(
                f"--{field.name} is {value}; expected a finite number of at least {least} and "
                "below 2**48"
            )


# --------------------------------------------------------------------------------------------------
# Command line


class Parser(argparse.ArgumentParser):
    def error(self, message):
        raise UserError(f"{message}; --help lists the flags")


# Type of a flag -> how it is read, and what --help calls its value
TYPES = {
    int: (integer, "INT"),
    float: (float, "FLOAT"),
    bool: (boolean, "true|false"),
    str: (str, "TEXT"),
}


def parse_flags(
    argv: list[str], fields: tuple[dataclasses.Field, ...], defaults: dict, description: str
) -> dict:
    """Read the flags that a command line names; --help prints and exits.

    defaults: what --help shows in place of the fields' own. Raises UserError.
    """
    parser = Parser(
        prog="train_gpt.py",
        allow_abbrev=False,
        description=description,
        argument_default=argparse.SUPPRESS,
    )
    for field in fields:
        kind = type(field.default)
        if kind not in TYPES:
            continue  # not a flag
        read, metavar = TYPES[kind]
        options = dict(type=read, metavar=metavar)
        if field.metadata.get("choices"):
            options.update(choices=field.metadata["choices"], metavar=None)

        # The value of the flag without one
        const = field.metadata.get("const") or kind is bool
        if const:
            options.update(nargs="?", const=const)

        # The help text, with the default in brackets
        help_text = field.metadata.get("help", "")
        default = defaults.get(field.name, field.default)
        if kind is bool:
            default = str(default).lower()
        if default != "":
            help_text = f"{help_text} [{default}]"
        parser.add_argument(f"--{field.name}", help=help_text.replace("%", "%%"), **options)

    short = dict(dest="dtype", action="store_const", const="bf16")
    parser.add_argument("--bf16", **short, help="short for --dtype bf16")

    flags, unknown = parser.parse_known_args(argv)
    if unknown:
        name = unknown[0].lstrip("-").split("=")[0]
        raise UserError(f"unknown flag {unknown[0]}{closest(name, [f.name for f in fields])}")
    return vars(flags)
