"""Flags from a dataclass: each field is declared once, with flag(), and the command line, help and checks follow."""

import argparse
import dataclasses
import difflib
import math
from collections.abc import Iterable
from dataclasses import field

from data.shards import UserError


def flag(default, help: str, choices: Iterable[str] = (), const=None, min: float = 0):
    """A dataclass field that is a flag. const: what the flag without a value means. min: of a number."""
    return field(default=default, metadata=dict(help=help, choices=tuple(choices) or None, const=const, min=min))


def closest(name: str, names) -> str:
    """The end of a sentence about an unknown name."""
    near = difflib.get_close_matches(name, list(names), 1, 0.5)
    return f"; did you mean {near[0]}?" if near else "; --help lists them"


def check_values(flags: dict, fields: dict[str, dataclasses.Field]) -> dict:
    """The flags, integers made floats where floats are expected. Raises UserError for a wrong name, type or choice."""
    checked = {}
    for name, value in flags.items():
        if name not in fields:
            raise UserError(f"unknown flag --{name}{closest(name, fields)}")
        kind, choices = type(fields[name].default), fields[name].metadata["choices"]
        if kind is float and type(value) is int:
            value = float(value)
        if type(value) is not kind:
            raise UserError(f"--{name} is {value!r}; expected {kind.__name__}")
        if choices and value not in choices:
            raise UserError(f"--{name} is {value!r}; expected one of {', '.join(choices)}{closest(value, choices)}")
        checked[name] = value
    return checked


def check_ranges(config) -> None:
    """Raises UserError for a number of the dataclass instance that is below its minimum, too large or not finite."""
    for f in dataclasses.fields(config):
        value, least = getattr(config, f.name), f.metadata["min"]
        if isinstance(value, (int, float)) and not least <= value < (math.inf if isinstance(value, float) else 2**48):
            raise UserError(f"--{f.name} is {value}; expected a finite number of at least {least} and below 2**48")


class _Parser(argparse.ArgumentParser):
    def error(self, message):
        raise UserError(f"{message}; --help lists the flags")


def _boolean(text: str) -> bool:
    if text.lower() not in ("true", "1", "false", "0"):
        raise ValueError
    return text.lower() in ("true", "1")


_boolean.__name__ = "true or false"  # argparse puts it into its message


def parse_flags(argv: list[str], fields: tuple[dataclasses.Field, ...], defaults: dict, description: str) -> dict:
    """The flags that a command line names, with their values. defaults: for the help, over the fields' own.

    Raises UserError; --help prints and exits.
    """
    parser = _Parser(prog="train_gpt.py", allow_abbrev=False, description=description,
                     argument_default=argparse.SUPPRESS)  # fmt: skip
    for f in fields:
        kind, meta = type(f.default), f.metadata
        default = defaults.get(f.name, f.default)
        default = "" if default == "" else f" [{str(default).lower() if kind is bool else default}]"
        metavar = None if meta["choices"] else {bool: "true|false", str: "TEXT"}.get(kind, kind.__name__.upper())
        optional = {"nargs": "?", "const": meta["const"]} if meta["const"] else {}
        parser.add_argument(f"--{f.name}", type=_boolean if kind is bool else kind, choices=meta["choices"],
                            metavar=metavar, help=(meta["help"] + default).replace("%", "%%"), **optional)  # fmt: skip
    flags, unknown = parser.parse_known_args(argv)
    if unknown:
        name = unknown[0].lstrip("-").split("=")[0]
        raise UserError(f"unknown flag {unknown[0]}{closest(name, [f.name for f in fields])}")
    return vars(flags)
