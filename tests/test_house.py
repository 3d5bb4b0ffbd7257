"""The structure: who imports whom, that importing does nothing, that README and --help are true."""

import ast
import dataclasses
import os
import re
import subprocess
import sys
from collections.abc import Iterator

import pytest
from torch.distributed.run import get_args_parser

import bench
import export
import sample
import train_gpt
from conftest import ROOT, run_python
from data import prepare
from runtime.flags import parse_flags
from runtime.run_folder import SOURCE_FILES
from train_gpt import PRESETS, Config, make_config

BELOW_THE_PAGE = ("inference", "runtime", "data", "model", "ops", "common")
COMMANDS = ("sample", "export", "bench", "benchmarks", "records")
ARROWS = {  # package -> the packages of ours that it may import, and those of others (None: any)
    "common": (("common",), set()),
    "data": (("data", "common"), {"numpy", "tiktoken", "regex", "pyarrow"}),
    "ops": (("ops", "common"), {"torch", "numpy"}),
    # GPT.generate imports what it is a name for
    "model": (("inference", "ops", "common"), {"torch"}),
    "inference": (("inference", "model", "ops", "data", "common"), {"torch", "numpy"}),
    "runtime": (("runtime", "model", "data", "ops", "common"), {"torch", "numpy", "wandb"}),
    "train_gpt": (BELOW_THE_PAGE, {"torch", "numpy"}),
    **dict.fromkeys(COMMANDS, ((*COMMANDS, "train_gpt", *BELOW_THE_PAGE), None)),
}
PATHS = [path for folder in (".", *ARROWS) for path in sorted((ROOT / folder).glob("*.py"))]
NAMES = [
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    for path in PATHS
]
OURS = {name: ast.parse(path.read_text(encoding="utf-8")) for name, path in zip(NAMES, PATHS)}
# The last imports nothing of ours
for other in ("conftest", "test_train", "inference.modeling_gpt"):
    del OURS[other]


def without_types(tree: ast.Module) -> Iterator[ast.AST]:
    """Every node of a file, except for imports under `if TYPE_CHECKING:`."""
    for node in ast.iter_child_nodes(tree):
        if not (isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"):
            yield from ast.walk(node)


def imported(name: str) -> set[str]:
    """Every module that a file imports, anywhere; `from data import prepare` is data.prepare."""
    found = set()
    for node in without_types(OURS[name]):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name} imports by a relative name"
            inside = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= inside & OURS.keys() or {node.module}
    return found


@pytest.mark.parametrize("name", OURS)
def test_arrows_go_down_only(name):
    room = name.split(".")[0]
    rooms, packages = ARROWS[room]
    for module in imported(name):
        first = module.split(".")[0]
        if first in ARROWS:
            assert first in rooms, f"{name} imports {module}"
        elif first not in sys.stdlib_module_names and packages is not None:
            assert first in packages, f"{name} imports {module}"


def test_the_sources_of_a_run_are_all_that_it_imports():
    found, todo = set(), {"train_gpt"}
    while todo:
        found |= todo
        todo = set().union(*map(imported, todo)) & OURS.keys() - found
    packages = {"runtime.py", "data.py", "inference.py"}
    paths = {f"{name.replace('.', '/')}.py" for name in found} - packages
    assert paths <= set(SOURCE_FILES)


def test_importing_has_no_side_effect():
    code = f"""if True:
        import os, sys, random
        before = dict(os.environ)
        state = random.getstate()
        import torch
        drawn = torch.get_rng_state()
        import {", ".join(OURS)}
        assert dict(os.environ) == before
        assert random.getstate() == state
        assert torch.equal(torch.get_rng_state(), drawn)
        assert not torch.distributed.is_initialized()
        unwanted = {{'wandb', 'tiktoken', 'torch._dynamo', 'matplotlib', 'triton'}}
        assert not unwanted & {{*sys.modules}}
    """
    # Without variables that imports might find set already
    env = {name: os.environ[name] for name in ("PATH", "HOME", "SYSTEMROOT") if name in os.environ}
    done = run_python("-c", code, env=env)
    assert done.returncode == 0 and not done.stdout, done.stderr


IN_THE_ROOT = (
    ".ci .github .gitignore CONTRIBUTING.md LICENSE README.md bench.py benchmarks common "
    "conftest.py data docs export.py inference model.py ops pyproject.toml records "
    "requirements.txt runtime sample.py test_train.py tests train_gpt.py"
)


def test_nothing_else_stands_in_the_root():
    done = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    names = {path.split("/")[0] for path in done.stdout.splitlines()}
    assert names <= set(IN_THE_ROOT.split())


# --------------------------------------------------------------------------------------------------
# README and --help


def help_of(main, capsys) -> str:
    with pytest.raises(SystemExit) as end:
        main(["--help"])
    assert end.value.code == 0
    return capsys.readouterr().out


def test_help_shows_every_flag_and_its_default(capsys):
    text = help_of(train_gpt.main, capsys)
    for f in dataclasses.fields(Config):
        if f.name == "given":  # not a flag
            continue
        value = PRESETS["laptop"].get(f.name, f.default)
        shown = re.escape(f"[{'auto' if value is None else value}]") if value != "" else ""
        assert re.search(rf"--{f.name} .*?{shown}", text, re.S | re.I), f.name


@pytest.mark.parametrize("page", [ROOT / "README.md", *(ROOT / "docs").glob("*.md")], ids=str)
def test_pages_name_real_commands_and_flags(page, capsys):
    text = page.read_text(encoding="utf-8")
    fields = dataclasses.fields(Config)
    known = {f.name for f in fields}
    for script in (sample, prepare, bench, export, train_gpt):
        known |= set(re.findall(r"--(\w+)", help_of(script.main, capsys)))
    for action in get_args_parser()._actions:  # of torchrun
        known |= {option.strip("-").split("-")[0] for option in action.option_strings}
    known |= set("nodes ntasks gpus cpus time signal kill pid shutdown".split())  # Slurm, py-spy
    known |= {"batch_size", "start", "model", "model_args"}  # of nanoGPT, of lm_eval
    assert set(re.findall(r"(?<![\w-])--(\w+)", text)) - known == set()
    lines = text.replace("\\\n", "")
    commands = re.findall(r"^(?:torchrun .*?|python )((?:\w+/)*\w+\.py)(.*)$", lines, re.MULTILINE)
    for script, flags in commands:
        assert (ROOT / script).exists(), script
        if script == "train_gpt.py":
            make_config(**parse_flags(flags.split("#")[0].split(), Config, {}, ""))
        if script == "bench.py":
            assert all(f"\n{name} " in bench.__doc__ for name in re.findall(r"^ (\w+)", flags))


def test_the_readmes_files_are_there():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    names = re.findall(r"`([\w/]+\.py|\w+/)`", "".join(re.findall(r"(?m)^\| `.*? \| ", text)))
    assert len(names) > 9 and all((ROOT / name).exists() for name in names)


def numbers_in(text: str) -> list[str]:
    return re.findall(r"(?<![\w.])\d+(?:\.\d+)?(?!\.?\d)", text.replace(",", ""))


def test_the_readmes_figures_are_those_of_their_records():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    n_compared = 0
    for block in re.split(r"\n(?=\||- |\n)", text):  # a row of a table, an item, a paragraph
        facts = []
        for name in re.findall(r"\((records/(?:bench|laptop)/[^/)]+)", block):
            logs = [path.read_text() for path in (ROOT / name).glob("*/log.txt")]
            facts += numbers_in((ROOT / name / "README.md").read_text(encoding="utf-8"))
            facts += re.findall(r"\d+(?= parameters)", "".join(logs).replace(",", ""))
        shown = re.sub(r"\]\([^)]*\)|`[^`]*`", "", block)
        for number in numbers_in(re.sub(r"(?<=\d)[Mk]\b", "", shown)) if facts else ():
            n_decimals = len(number.partition(".")[2])
            values = [float(fact) / scale for fact in facts for scale in (1, 1e6)]
            assert number in {f"{value:.{n_decimals}f}" for value in values}, block
            n_compared += 1
    assert n_compared > 30


def test_the_readme_quotes_the_log_of_the_default_run():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    source, lines = re.findall(
        r"<!-- .*default run.*: (\S+) -->\n.*?\n```\n(.*?)\n```", text, re.S
    )[0]
    commit, _, path = source.rpartition(":")
    if commit:
        done = subprocess.run(["git", "show", source], cwd=ROOT, capture_output=True, text=True)
        log = done.stdout or pytest.skip("needs the whole history")
    else:
        log = (ROOT / path).read_text(encoding="utf-8")
    assert all(line in log.splitlines() for line in lines.splitlines())
