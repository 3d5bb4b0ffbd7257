"""Flags from a dataclass: each field is declared once, with flag(), and the command line, help and checks follow."""

import argparse
import dataclasses
import difflib
import math
from collections.abc import Iterable
from dataclasses import field
from decimal import Decimal

from common import UserError


def flag(default, help: str, choices: Iterable[str] = (), const=None, min: float = 0):
    """A dataclass field that is a flag. const: what the flag without a value means. min: the least number."""
    return field(
        default=default,
        metadata=dict(help=help, choices=tuple(choices) or None, const=const, min=min),
    )


OTHER_NAMES = {  # names in nanoGPT and elsewhere -> what there is here
    "block_size": "use --seq_len",
    "max_iters": "use --max_steps",
    "learning_rate": "use --muon_lr for matrices and --adam_lr for the rest (--adam_lr alone with --optimizer adamw)",
    "lr": "use --muon_lr for matrices and --adam_lr for the rest (--adam_lr alone with --optimizer adamw)",
    "min_lr": "the rate falls to 0 over the last --cooldown_frac of the steps",
    "lr_decay_iters": "the rate falls to 0 over the last --cooldown_frac of the steps",
    "warmup_iters": "use --warmup_frac, a fraction of --max_steps",
    "batch_size": "use --batch_tokens for the tokens of a step, --micro_batch for a device's sequences at once",
    "gradient_accumulation_steps": "it follows from --batch_tokens, --micro_batch and the number of devices",
    "dropout": "there is none; against overfitting use --weight_decay or --ngram_dropout",
    "dataset": "use --data with a folder from data/prepare.py",
    "eval_interval": "use --eval_every",
    "eval_iters": "use --eval_tokens",
    "log_interval": "use --log_every",
    "epochs": "use --max_steps; the log says how many epochs that is",
    "wandb_log": "use --wandb",
    "prefetch": "batches are always prepared in the background",
}


def closest(name: str, names) -> str:
    """The end of a sentence about an unknown name."""
    if name in OTHER_NAMES:
        return f"; {OTHER_NAMES[name]}"
    near = difflib.get_close_matches(name, list(names), 1, 0.5)
    return f"; did you mean {near[0]}?" if near else "; --help lists them"


def check_values(flags: dict, fields: dict[str, dataclasses.Field]) -> dict:
    """The flags, integers made floats where floats are expected. Raises UserError for a wrong name, type or choice."""
    checked = {}
    for name, value in flags.items():
        if name not in fields:
            raise UserError(f"unknown flag --{name}{closest(name, fields)}")
        kind, choices = type(fields[name].default), fields[name].metadata.get("choices")
        if kind is float and type(value) is int:
            value = float(value)
        if kind is int and type(value) is float and value.is_integer():
            value = int(value)
        if type(value) is not kind:
            raise UserError(f"--{name} is {value!r}; expected {kind.__name__}")
        if choices and value not in choices:
            raise UserError(
                f"--{name} is {value!r}; expected one of {', '.join(choices)}{closest(value, choices)}"
            )
        checked[name] = value
    return checked


def check_ranges(config) -> None:
    """Raises UserError for a number of the dataclass instance that is below its minimum, too large or not finite."""
    for f in dataclasses.fields(config):
        value, least = getattr(config, f.name), f.metadata.get("min", -math.inf)
        if isinstance(value, (int, float)) and not least <= value < (
            math.inf if isinstance(value, float) else 2**48
        ):
            raise UserError(
                f"--{f.name} is {value}; expected a finite number of at least {least} and below 2**48"
            )


def integer(text: str) -> int:
    """An integer, as in 1000, 1_000, 1e3, 4k (4,000), 2M or 1.5B. Raises ValueError."""
    number, unit = (
        (text[:-1], text[-1].lower()) if text[-1:].lower() in ("k", "m", "b") else (text, "")
    )
    try:
        value = Decimal(number) * {"": 1, "k": 10**3, "m": 10**6, "b": 10**9}[unit]
        if value == value.to_integral_value():
            return int(value)
    except ArithmeticError:  # not a number, or not a finite one
        pass
    raise ValueError


class _Parser(argparse.ArgumentParser):
    def error(self, message):
        raise UserError(f"{message}; --help lists the flags")


def _boolean(text: str) -> bool:
    if text.lower() not in ("true", "1", "false", "0"):
        raise ValueError
    return text.lower() in ("true", "1")


_boolean.__name__, integer.__name__ = "true or false", "int"  # argparse puts them into its messages
PARSERS = {int: integer, float: float, bool: _boolean, str: str}


def parse_flags(
    argv: list[str], fields: tuple[dataclasses.Field, ...], defaults: dict, description: str
) -> dict:
    """The flags that a command line names, with their values. defaults: shown in the help instead of the fields' own.

    Raises UserError; --help prints and exits.
    """
    parser = _Parser(
        prog="train_gpt.py",
        allow_abbrev=False,
        description=description,
        argument_default=argparse.SUPPRESS,
    )
    for f in fields:
        kind, meta = type(f.default), dict(help="", choices=None, const=None) | dict(f.metadata)
        if kind not in PARSERS:
            raise UserError(
                f"field {f.name} of Config is a {kind.__name__}; a flag is an int, float, bool or str"
            )
        default = defaults.get(f.name, f.default)
        default = "" if default == "" else f" [{str(default).lower() if kind is bool else default}]"
        metavar = (
            None
            if meta["choices"]
            else {bool: "true|false", str: "TEXT"}.get(kind, kind.__name__.upper())
        )
        const = meta["const"] or kind is bool
        optional = {"nargs": "?", "const": const} if const else {}
        parser.add_argument(
            f"--{f.name}",
            type=PARSERS[kind],
            choices=meta["choices"],
            metavar=metavar,
            help=(meta["help"] + default).replace("%", "%%"),
            **optional,
        )
    flags, unknown = parser.parse_known_args(argv)
    if unknown:
        name = unknown[0].lstrip("-").split("=")[0]
        raise UserError(f"unknown flag {unknown[0]}{closest(name, [f.name for f in fields])}")
    return vars(flags)
