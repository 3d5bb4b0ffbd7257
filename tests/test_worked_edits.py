"""The worked edits of docs/edits.md: each applies to a copy, and trains, resumes, samples and exports right."""

import json
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

import ops.params
import train_gpt
from conftest import ROOT, compiler_works, make_data, python_process, run_python, run_ranks
from tests.edit_cases import CASES, TINY, name_of, noise

COPIED = "train_gpt.py model.py ops generation.py evaluation.py sample.py export.py int8.py data runtime".split()
DRIVER = ROOT / "tests" / "edit_cases.py"
BEGUN = Path()  # the folder that conftest.py gives to `begin`


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


# ---------------------------------------------------------------------------------------------------------------------
# What the tests look at: made by one process, beside the other tests


def begin(folder: Path, wanted: set[str]) -> subprocess.Popen:
    """Start trying the edits alone and, where wanted, on two ranks: alone.json and ranks.json; `ended` at the end."""
    with open(folder / "output.txt", "w") as file:
        argv = (__file__, folder, *{"alone", "two_ranks"} & wanted)
        return subprocess.Popen(**python_process(*argv), stdout=file, stderr=file)


def make_copies(folder: Path) -> None:
    """An edited copy of the repository for each worked edit, data, and a run of the unedited page."""
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
        patch.setattr(ops.params, "initial_weight", noise)
        train_gpt.train(train_gpt.make_config(**TINY, data=str(folder / "data"), out_dir=str(folder / "base")))
    shutil.copy(folder / "base" / "ckpt_4.pt", folder / "base.pt")


def try_edits(folder: Path, wanted: list[str]) -> None:
    if not wanted or not compiler_works():
        return
    make_copies(folder)
    done = run_python(DRIVER, folder, *CASES, timeout=1200)
    assert done.returncode == 0, done.stderr[-4000:]
    if "two_ranks" in wanted:
        done = run_ranks(folder, DRIVER, folder, *CASES, timeout=1200)
        assert done.codes == [0, 0], [said[-4000:] for said in done.stderr]


def found(name: str) -> dict:
    """What was found wrong, by edit and by what was tried."""
    if not compiler_works():
        pytest.skip("torch.compile finds no working compiler here")
    deadline, ended = time.monotonic() + 1200, False
    while not (BEGUN / name).exists():
        assert not ended and time.monotonic() < deadline, (BEGUN / "output.txt").read_text()
        ended = (BEGUN / "ended").exists()
        time.sleep(0.05)
    return json.loads((BEGUN / name).read_text())


@pytest.fixture(scope="module")
def alone(begun):
    return found("alone.json")


@pytest.fixture(scope="module")
def two_ranks(begun):
    return found("ranks.json")


@pytest.mark.parametrize("title", CASES)
def test_a_worked_edit_is_right(title, alone):
    tried = {"gradients", "full", "selective", "chunks", "resume", "sample", "export"}
    assert {name: wrong for name, wrong in alone[title].items() if wrong} == {} and alone[title].keys() >= tried


@pytest.mark.parametrize("title", CASES)
def test_two_ranks_train_a_worked_edit_as_one(title, two_ranks):
    assert {name: wrong for name, wrong in two_ranks[title].items() if wrong} == {}
    assert two_ranks[title].keys() >= {"ddp full", "fsdp", "fsdp full"}


if __name__ == "__main__":
    try:
        try_edits(Path(sys.argv[1]), sys.argv[2:])
    finally:
        Path(sys.argv[1], "ended").touch()
