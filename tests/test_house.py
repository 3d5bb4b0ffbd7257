"""The shape of the code: who imports whom, and how long files and functions are."""

import ast
import itertools
import sys
from pathlib import Path

import pytest

from conftest import ROOT
from runtime import start

TESTS = ("conftest", "test_train", "tests")
ARROWS = {  # files of this room -> what of ours they may import
    "data.": ("data.",),
    "runtime": ("runtime", "data.", "generation", "ops"),
    "ops": ("ops",),
    "generation": ("ops",),
    "model": ("generation", "ops"),
    "int8": ("model", "generation", "ops"),
    "train_gpt": ("runtime", "data.", "model", "generation", "ops"),
    "evaluation": ("data.", "model", "generation", "ops"),
    "sample": ("evaluation", "train_gpt", "runtime", "data.", "int8", "model", "generation", "ops"),
    "export": ("sample", "evaluation", "train_gpt", "runtime", "data.", "int8", "model", "generation", "ops"),
    "benchmarks": (
        "benchmarks",
        "records",
        "sample",
        "evaluation",
        "train_gpt",
        "runtime",
        "data.",
        "int8",
        "model",
        "generation",
        "ops",
    ),
    "records": ("records", "train_gpt", "runtime", "data.", "model", "generation", "ops"),
    "bench": ("benchmarks", "records", "train_gpt", "runtime", "data.", "model", "generation", "ops"),
}
PACKAGES = {
    "data.": {"numpy", "tiktoken", "tokenizers"},
    "ops": {"torch", "numpy"},
    "generation": {"torch"},
    "int8": {"torch"},
    "model": {"torch"},
    "runtime": {"torch", "numpy", "wandb"},
}
MOST_NAMES = 45  # that train_gpt.py imports from other rooms


def module_name(path: Path) -> str:
    """data/stream.py is data.stream, data/__init__.py is data."""
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


FOLDERS = (".", "data", "ops", "runtime", "benchmarks", "records", "tests")
PATHS = [path for folder in FOLDERS for path in sorted((ROOT / folder).glob("*.py"))]
FILES = {module_name(path): ast.parse(path.read_text(encoding="utf-8")) for path in PATHS}
OURS = {name: tree for name, tree in FILES.items() if name.split(".")[0] not in TESTS}


def imported(name: str) -> set[str]:
    """Every module that a file imports, wherever in it; `from data import prepare` is data.prepare."""
    found = set()
    for node in ast.walk(FILES[name]):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name} imports by a relative name"
            inside = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= inside & FILES.keys() or {node.module}
    return found


def starts_with(module: str, prefix: str) -> bool:
    return f"{module}.".startswith(prefix if prefix.endswith(".") else f"{prefix}.")


def test_every_file_is_in_a_room():
    assert {"train_gpt", "model", "ops", "sample", "bench", "data.stream", "runtime.launch"} <= OURS.keys()
    assert [name for name in OURS if not any(starts_with(name, room) for room in ARROWS)] == []


@pytest.mark.parametrize("room", ARROWS)
def test_arrows_go_down_only(room):
    for name in (name for name in OURS if starts_with(name, room)):
        for module in imported(name):
            first = module.split(".")[0]
            if module in FILES or first in {other.split(".")[0] for other in FILES}:
                assert any(starts_with(module, allowed) for allowed in ARROWS[room]), f"{name} imports {module}"
            elif first not in sys.stdlib_module_names and room in PACKAGES:
                assert first in PACKAGES[room], f"{name} imports {module}"


def test_no_circles():
    arrows = {name: imported(name) & FILES.keys() for name in FILES}
    while leaves := {name for name, below in arrows.items() if not below}:
        arrows = {name: below - leaves for name, below in arrows.items() if name not in leaves}
    assert arrows == {}


def test_lower_rooms_do_not_know_the_trainer():
    for name, tree in OURS.items():
        if any(starts_with(name, room) for room in ("data.", "runtime", "ops", "generation", "model")):
            names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
            assert not names & {"Config", "TrainState"}, name


def test_the_page_imports_few_names():
    ours = {name.split(".")[0] for name in FILES}
    found = [
        alias.name
        for node in ast.walk(FILES["train_gpt"])
        if isinstance(node, ast.ImportFrom) and node.module.split(".")[0] in ours
        for alias in node.names
    ]
    assert len(found) <= MOST_NAMES


def test_ranks_agree_in_few_places_of_the_page():
    calls = [node.func for node in ast.walk(FILES["train_gpt"]) if isinstance(node, ast.Call)]
    names = [func.id if isinstance(func, ast.Name) else func.attr for func in calls if hasattr(func, "id") or func.attr]
    asked = {"agree", "dist_max", "dist_means", "run_on_rank0", "sum_over_ranks", "gather_objects"}
    assert sum(name in asked for name in names) <= 8


def test_formatting_is_standard_everywhere():
    mark = "# fmt" + ":"
    assert [str(path) for path in PATHS if mark in path.read_text(encoding="utf-8")] == []


def test_functions_fit_on_a_screen():
    lines = {
        (name, node.name): node.end_lineno - node.lineno + 1
        for name, tree in OURS.items()
        for node in ast.walk(tree)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
    }
    assert {place: n for place, n in lines.items() if n > 70} == {}
    assert lines["train_gpt", "loop"] <= 60


def test_each_test_has_a_name_of_its_own():
    """Two tests of one name in a file: the first never runs. In two files: a failure does not say which."""
    names = [
        node.name
        for name, tree in FILES.items()
        if name.split(".")[0] in TESTS
        for node in tree.body
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    ]
    assert [a for a, b in itertools.pairwise(sorted(names)) if a == b] == []


def test_the_sources_of_a_run_are_all_that_it_imports():
    found, todo = set(), {"train_gpt"}
    while todo:
        name = todo.pop()
        found.add(name)
        todo |= (imported(name) & FILES.keys()) - found
    paths = {f"{name.replace('.', '/')}.py" for name in found} - {"runtime.py", "data.py"}
    assert paths <= set(start.SOURCE_FILES)
