"""Flags: each field of a dataclass is one. The command line, --help, checks and precedence."""

import argparse
import contextlib
import dataclasses
import difflib
import math
from collections.abc import Iterable
from pathlib import Path

from common.errors import UserError
from common.values import boolean, integer
from runtime.checkpoint import BEST, list_checkpoints, read_checkpoint
from runtime.sizes import flags_for_size

# Flags of the command, which a resumed run does not take from its checkpoint
COMMAND_FLAGS = {"resume", "out_dir", "trials", "profile", "given"}

# Flags of the model's shape, which --init_from takes from a checkpoint
SHAPE_FLAGS = {"seq_len", "n_layer", "n_head", "n_embd", "window", "softcap", "ngram", "ngram_rows"}

# With one of these, --minutes chooses no size
SIZE_FLAGS = {"preset", "params", "n_layer", "n_embd", "n_head", "init_from"}

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
}


@dataclasses.dataclass(frozen=True)
class GivenFlags:
    """Base of Config. given: names of the flags that were given or come from a checkpoint.

    No other value is chosen for them.
    """

    given: tuple = dataclasses.field(default=(), compare=False)


def flag(default, help: str, choices: Iterable[str] = (), const=None, min: float = 0):
    """Declare a field that is a flag.

    const: the value of a bare flag, as in --compile (bool: true). min: the smallest number allowed.
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
    """Check names, types, choices and ranges of flags.

    Returns the flags with 1 as 1.0 where a float is due. fields: of Config, by name. Raises
    UserError.
    """
    checked = {}
    for name, value in flags.items():
        if name not in fields:
            raise UserError(f"unknown flag --{name}{closest(name, fields)}")
        kind, metadata = type(fields[name].default), fields[name].metadata

        # Values from Python
        if kind is float and type(value) is int:
            value = float(value)
        if kind is str and isinstance(value, Path):
            value = str(value)
        if type(value) is not kind:
            raise UserError(f"--{name} is {value!r}; expected {kind.__name__}")

        choices = metadata.get("choices")
        if choices and value not in choices:
            raise UserError(
                f"--{name} is {value!r}; expected one of {', '.join(choices)}"
                f"{closest(value, choices)}"
            )
        least = metadata.get("min", -math.inf)
        if kind in (int, float) and not least <= value < 2**48:
            raise UserError(
                f"--{name} is {value}; expected a finite number of at least {least} and below 2**48"
            )
        checked[name] = value
    return checked


# --------------------------------------------------------------------------------------------------
# Command line


class Parser(argparse.ArgumentParser):
    def error(self, message):
        raise UserError(f"{message}; --help lists the flags")


# Type of a flag -> how its text is read
READERS = {int: integer, float: float, bool: boolean, str: str}


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
        if kind not in READERS:
            continue  # not a flag
        choices = field.metadata.get("choices", ())
        options = dict(type=READERS[kind], metavar="|".join(choices) or kind.__name__)

        # The value of a bare flag
        const = field.metadata.get("const") or kind is bool
        if const:
            options.update(nargs="?", const=const)

        # The help text, with the default in brackets
        help_text = field.metadata.get("help", "").replace("%", "%%")
        default = defaults.get(field.name, field.default)
        if default != "":
            help_text = f"{help_text} [{default}]"
        parser.add_argument(f"--{field.name}", help=help_text, **options)

    short = dict(dest="dtype", action="store_const", const="bf16")
    parser.add_argument("--bf16", **short, help="short for --dtype bf16")

    flags, unknown = parser.parse_known_args(argv)
    if unknown:
        name = unknown[0].lstrip("-").split("=")[0]
        raise UserError(f"unknown flag {unknown[0]}{closest(name, [f.name for f in fields])}")
    return vars(flags)


# --------------------------------------------------------------------------------------------------
# Precedence; later ones win: Config's defaults, the preset, flags that --params, --minutes and
# --init_from imply, the flags in a checkpoint, those that are given


def flags_of_run(flags: dict, fields: tuple[dataclasses.Field, ...]) -> tuple[dict, dict, dict]:
    """Return the flags that others imply, those kept from a checkpoint, and those given.

    --resume keeps all flags of the run, --init_from the model's shape. fields: Config's. Raises
    UserError for wrong names and values, and if it is unclear which run is meant.
    """
    known = {field.name: field for field in fields}
    given = check_values(flags, known)
    if given.get("minutes") and "max_steps" in given:
        raise UserError(
            "--minutes ends the run by the clock, so that --max_steps cannot be given; remove one "
            "of them"
        )
    if given.get("resume") and given.get("init_from"):
        raise UserError("--resume and --init_from contradict each other; give one of them")
    saved = {}
    if given.get("init_from"):
        if not given.keys() & {"preset", "params"}:
            saved = saved_flags(Path(given["init_from"]))
            saved = {name: value for name, value in saved.items() if name in SHAPE_FLAGS}
    elif given.get("resume"):
        saved = flags_to_resume(given, known)
    return implied_flags(given, saved), saved, given


def implied_flags(given: dict, saved: dict) -> dict:
    """Return what --params, --minutes and --init_from change in the preset."""
    implied = {}
    if given.get("params", 0) > 0:
        implied = flags_for_size(given["params"], given)
    if given.get("minutes") and not saved and not SIZE_FLAGS & given.keys():
        implied["params"] = -1
    if given.get("init_from"):
        # The model has learned from short sequences already. 0: from the size of the dataset
        implied |= dict(short_frac=0.0, batch_tokens=0)
        if "max_steps" not in given:
            implied |= dict(max_steps=0, eval_every=-1, patience=3)  # until val_loss rises
    return implied


def flags_to_resume(given: dict, known: dict[str, dataclasses.Field]) -> dict:
    """Return the flags of the run that --resume names, except those that are given anew.

    Sets given["out_dir"] to the run's folder if --resume names a run or a checkpoint.
    """
    source = find_run_to_resume(given)
    saved = saved_flags(source) if source else {}
    if not saved:
        return {}
    if given.get("params") == -1:
        del given["params"]  # the run has its size
    for name in ("preset", "params", "optimizer"):
        if given.get(name, saved[name]) != saved[name]:
            raise UserError(
                f"--{name} {given[name]} is for new runs; {source} has {saved[name]}: remove it"
            )
    return flags_to_keep(saved, given, known)


def flags_to_keep(saved: dict, given: dict, known: Iterable[str]) -> dict:
    """Return the flags in a checkpoint that a resumed run keeps: known ones not given anew."""
    left_out = COMMAND_FLAGS | given.keys()
    if "max_steps" in given:
        left_out.add("minutes")
    if given.get("minutes", saved.get("minutes")) != saved.get("minutes"):
        left_out.add("max_steps")  # more minutes, more steps
    return {name: saved[name] for name in known if name in saved and name not in left_out}


def keep_flags(cfg, saved: dict):
    """Return cfg with the flags in the checkpoint that it resumes, except those that were given.

    After a restart by torchrun, and with --trials, make_config has not read the checkpoint.
    """
    given = {name: getattr(cfg, name) for name in cfg.given}
    kept = flags_to_keep(saved, given, known=vars(cfg))
    return dataclasses.replace(cfg, **kept, given=(*cfg.given, *kept))


def find_run_to_resume(given: dict) -> Path | None:
    """Return the folder or file that --resume names; None if the run is yet to be made."""
    resume, out_dir = given["resume"], given.get("out_dir", "")
    if resume == "newest" and not out_dir:
        raise UserError("--resume does not say which run: add --out_dir and the run's folder")
    if resume in ("newest", "auto"):
        return Path(out_dir) if out_dir else None

    path = Path(resume)
    if path.name == BEST:
        raise UserError(
            f"{path} holds weights only, so it cannot be resumed; use --init_from {path}"
        )
    folder = path if path.is_dir() else path.parent
    if not out_dir and (folder / "log.txt").exists():
        given["out_dir"] = str(folder)
    return path


def saved_flags(path: Path) -> dict:
    """Return the flags in this checkpoint, or in the newest readable one of this folder.

    {} if there is none, which find_checkpoint reports.
    """
    for file in [path] if path.is_file() else list_checkpoints(path):
        with contextlib.suppress(UserError):
            return read_checkpoint(file, verify=False)["config"]
    return {}
