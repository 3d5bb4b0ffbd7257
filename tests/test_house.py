"""What keeps the house: who imports whom, that importing does nothing, and that README and --help are true."""

import ast
import dataclasses
import itertools
import os
import re
import sys
from pathlib import Path

import pytest
from torch.distributed.run import get_args_parser

import bench
import export
import sample
import train_gpt
from conftest import ROOT, run_python
from data import prepare
from runtime.flags import parse_flags
from runtime.launch import SOURCE_FILES
from train_gpt import PRESETS, Config, make_config

BELOW_THE_PAGE = ("runtime", "data", "model", "generation", "ops")
TOOLS = ("sample", "export", "evaluation", "int8", "bench", "benchmarks", "records", "train_gpt", *BELOW_THE_PAGE)
ARROWS = {  # a room -> the rooms that it may import, and the packages; runtime.errors is for all
    "data": (("data",), {"numpy", "tiktoken", "tokenizers"}),
    "ops": (("ops",), {"torch", "numpy"}),
    "generation": (("ops",), {"torch"}),
    "model": (("generation", "ops"), {"torch"}),
    "int8": (("model", "generation", "ops"), {"torch"}),
    "evaluation": (("model", "generation", "ops", "data"), {"torch", "numpy"}),
    "runtime": (("runtime", "data", "ops"), {"torch", "numpy", "wandb"}),
    "train_gpt": (BELOW_THE_PAGE, {"torch", "numpy"}),
    **dict.fromkeys(("sample", "export", "bench", "benchmarks", "records"), (TOOLS, None)),
}
PATHS = [path for folder in (".", *ARROWS) for path in sorted((ROOT / folder).glob("*.py"))]
TREES = {path.relative_to(ROOT): ast.parse(path.read_text(encoding="utf-8")) for path in PATHS}
TREES = {".".join(path.with_suffix("").parts).removesuffix(".__init__"): tree for path, tree in TREES.items()}
OURS = {name: tree for name, tree in TREES.items() if name not in ("conftest", "test_train")}


def imported(name: str) -> set[str]:
    """Every module that a file imports, wherever in it; `from data import prepare` is data.prepare."""
    found = set()
    for node in ast.walk(OURS[name]):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name} imports by a relative name"
            inside = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= inside & OURS.keys() or {node.module}
    return found


@pytest.mark.parametrize("name", OURS)
def test_arrows_go_down_only(name):
    rooms, packages = ARROWS[name.split(".")[0]]
    for module in imported(name):
        first = module.split(".")[0]
        if first in ARROWS:
            assert first in rooms or module == "runtime.errors", f"{name} imports {module}"
        elif first not in sys.stdlib_module_names and packages is not None:
            assert first in packages and name != "runtime.errors", f"{name} imports {module}"


def test_no_circles():
    arrows = {name: imported(name) & OURS.keys() for name in OURS}
    while leaves := {name for name, below in arrows.items() if not below}:
        arrows = {name: below - leaves for name, below in arrows.items() if name not in leaves}
    assert arrows == {}


def test_lower_rooms_do_not_know_the_trainer():
    for name in (name for name in OURS if name.split(".")[0] in BELOW_THE_PAGE):
        names = {node.id for node in ast.walk(OURS[name]) if isinstance(node, ast.Name)}
        assert not names & {"Config", "TrainState"}, name


def test_the_sources_of_a_run_are_all_that_it_imports():
    found, todo = set(), {"train_gpt"}
    while todo:
        name = todo.pop()
        found.add(name)
        todo |= (imported(name) & OURS.keys()) - found
    paths = {f"{name.replace('.', '/')}.py" for name in found} - {"runtime.py", "data.py"}
    assert paths <= set(SOURCE_FILES)


def test_importing_has_no_side_effect():
    code = (
        "import os, sys, random; before = dict(os.environ); state = random.getstate(); import torch; "
        f"drawn = torch.get_rng_state(); import {', '.join(OURS)}; "
        "assert dict(os.environ) == before; "
        "assert random.getstate() == state and torch.equal(torch.get_rng_state(), drawn); "
        "assert not torch.distributed.is_initialized() and not torch.cuda.is_initialized(); "
        "assert not {'wandb', 'tiktoken', 'torch._dynamo', 'matplotlib'} & {*sys.modules}"
    )
    env = {name: os.environ[name] for name in ("PATH", "HOME", "SYSTEMROOT") if name in os.environ}  # no import's doing
    done = run_python("-c", code, env=env)
    assert done.returncode == 0 and not done.stdout, done.stderr


def test_each_test_has_a_name_of_its_own():
    """Two tests of one name in a file: the first never runs. In two files: a failure does not say which."""
    paths = [ROOT / "test_train.py", *(ROOT / "tests").glob("*.py")]
    names = re.findall(r"^def (test_\w+)", "\n".join(path.read_text(encoding="utf-8") for path in paths), re.MULTILINE)
    assert [a for a, b in itertools.pairwise(sorted(names)) if a == b] == []


# ---------------------------------------------------------------------------------------------------------------------
# README and --help


def help_of(main, capsys) -> str:
    with pytest.raises(SystemExit) as end:
        main(["--help"])
    assert end.value.code == 0
    return capsys.readouterr().out


def test_help_shows_every_flag_and_its_default(capsys):
    text = help_of(train_gpt.main, capsys)
    for f in dataclasses.fields(Config):
        value = str(PRESETS["laptop"].get(f.name, f.default)).lower()
        assert re.search(rf"--{f.name} .*?{re.escape(f'[{value}]') if value else ''}", text, re.S | re.I), f.name


@pytest.mark.parametrize("page", ["README.md", *(str(p.relative_to(ROOT)) for p in (ROOT / "docs").glob("*.md"))])
def test_pages_name_real_commands_and_flags(page, capsys):
    known, text = {f.name for f in dataclasses.fields(Config)}, (ROOT / page).read_text(encoding="utf-8")
    for script in (sample, prepare, bench, export):
        known |= set(re.findall(r"--(\w+)", help_of(script.main, capsys)))
    known |= {option.strip("-").split("-")[0] for a in get_args_parser()._actions for option in a.option_strings}
    known |= {"nodes", "ntasks", "gpus", "cpus", "time", "signal", "kill", "pid", "shutdown"}  # of Slurm and py-spy
    known |= {"batch_size", "start"}  # of nanoGPT
    assert set(re.findall(r"(?<![\w-])--(\w+)", text)) - known == set()
    for script, flags in re.findall(r"^(?:torchrun .*?|python )((?:\w+/)*\w+\.py)(.*)$", text, re.MULTILINE):
        assert (ROOT / script).exists(), script
        if script == "train_gpt.py":
            make_config(**parse_flags(flags.split("#")[0].split(), dataclasses.fields(Config), {}, ""))
        if script == "bench.py":
            assert all(f"\n{name} " in bench.__doc__ for name in re.findall(r"^ (\w+)", flags))


def test_the_readmes_files_are_there():
    rows = re.findall(r"^\| (`.*?) \| ", (ROOT / "README.md").read_text(encoding="utf-8"), re.MULTILINE)
    names = [name for row in rows for name in re.findall(r"`([\w/]+\.py|\w+/)`", row)]
    assert len(names) > 9 and [name for name in names if not Path(ROOT / name).exists()] == []
