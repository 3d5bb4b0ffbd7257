"""The worked edits of docs/edits.md: each applies to a copy, and trains, resumes, samples and exports right."""

import json
import re
import shutil
import subprocess

import pytest

import train_gpt
from conftest import ROOT, TORCHRUN, compiler_works, make_data, run_python
from tests.edit_cases import CASES, TINY, name_of, noise

COPIED = ("train_gpt.py", "model.py", "ops.py", "generation.py", "sample.py", "export.py", "int8.py", "data", "runtime")
DRIVER = "tests/edit_cases.py"


def worked_edits() -> dict[str, str]:
    """Title -> diff, of every diff in docs/edits.md."""
    text = (ROOT / "docs" / "edits.md").read_text(encoding="utf-8")
    return dict(re.findall(r"^## ([^\n]+)\n(?:(?!^## ).)*?^```diff\n(.*?)^```", text, re.M | re.S))


def test_every_worked_edit_is_small_and_has_a_case():
    edits = worked_edits()
    assert edits.keys() == CASES.keys() and len(edits) >= 14
    for title, diff in edits.items():
        changed = [line for line in diff.splitlines() if re.match(r"[+-](?![+-])", line)]
        assert len(changed) <= 15, title
    assert f"\n{len(edits)} edits of the page" in (ROOT / "docs" / "edits.md").read_text()


@pytest.fixture(scope="module")
def copies(tmp_path_factory):
    """A folder with an edited copy of the repository for each worked edit, data, and a run of the unedited page."""
    folder = tmp_path_factory.mktemp("edits")
    make_data(folder / "data")
    for title, diff in worked_edits().items():
        repo = folder / name_of(title) / "repo"
        repo.mkdir(parents=True)
        for name in COPIED:
            if (ROOT / name).is_file():
                shutil.copy(ROOT / name, repo / name)
            else:
                ignored = shutil.ignore_patterns("python", "__pycache__", "*.bin")
                shutil.copytree(ROOT / name, repo / name, ignore=ignored)
        patched = subprocess.run(["patch", "-p1"], input=diff, text=True, cwd=repo, capture_output=True)
        assert patched.returncode == 0, f"{title}: {patched.stdout}{patched.stderr}"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train_gpt, "initial_weight", noise)
        train_gpt.train(train_gpt.make_config(**TINY, data=str(folder / "data"), out_dir=str(folder / "base")))
    shutil.copy(folder / "base" / "ckpt_4.pt", folder / "base.pt")
    return folder


@pytest.fixture(scope="module")
def alone(copies):
    """What one process found wrong, by edit and by what was tried."""
    if not compiler_works():
        pytest.skip("torch.compile finds no working compiler here")
    done = run_python(DRIVER, copies, *CASES, timeout=600)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads((copies / "alone.json").read_text())


@pytest.fixture(scope="module")
def two_ranks(copies, alone):
    done = run_python(*TORCHRUN, DRIVER, copies, *CASES, timeout=600)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads((copies / "ranks.json").read_text())


@pytest.mark.parametrize("title", CASES)
def test_a_worked_edit_is_right(title, alone):
    tried = {"gradients", "full", "selective", "chunks", "resume", "sample", "export"}
    assert {name: wrong for name, wrong in alone[title].items() if wrong} == {} and alone[title].keys() >= tried


@pytest.mark.parametrize("title", CASES)
def test_two_ranks_train_a_worked_edit_as_one(title, two_ranks):
    assert {name: wrong for name, wrong in two_ranks[title].items() if wrong} == {}
    assert two_ranks[title].keys() >= {"ddp full", "fsdp", "fsdp full"}
