"""Trials and records: whole runs with seeds, and the rules that a record keeps."""

import hashlib
import json
import math
import shutil
from pathlib import Path

import pytest
import torch

import bench
import train_gpt
from conftest import ROOT, TINY, assert_same_run, flags_of, make_data, rows, run_main
from data import prepare
from data.shards import UserError
from records import check
from runtime.logger import SECTION
from train_gpt import make_config, train

NAME = Path("records", "laptop", "2026-01-01_shakespeare-1.8857")


@pytest.fixture(scope="session")
def shakespeare_like(tmp_path_factory) -> Path:
    """A data folder, and three short runs on it in the form of a record."""
    folder = tmp_path_factory.mktemp("record")
    (folder / "text.txt").write_text("To be, or not to be, that is the question. " * 400)
    arguments = ["files", folder / "text.txt", "--tokenizer", "bytes", "--out", folder / "data"]
    assert prepare.main(list(map(str, arguments))) == 0
    record = folder / NAME
    flags = flags_of(TINY | dict(data=str(folder / "data"), out_dir=str(record), trials=3, eval_tokens=0, log_every=5))
    assert train_gpt.main(flags) == 0
    command = "OMP_NUM_THREADS=1 python ./train_gpt.py " + " \\\n    ".join(flags) + ' 2>&1 | tee "log"  # as it was\n'
    (record / "command.sh").write_text("# how to \\\n" + command)
    (record / "README.md").write_text("A test.")
    return folder


# ---------------------------------------------------------------------------------------------------------------------
# Trials


def test_trials_are_runs_with_seeds(shakespeare_like, tmp_path):
    record = shakespeare_like / NAME
    assert sorted(path.name for path in record.iterdir() if path.is_dir()) == ["seed_0", "seed_1", "seed_2"]
    flags = dict(data=str(shakespeare_like / "data"), out_dir=str(tmp_path / "run"), eval_tokens=0, seed=1, log_every=5)
    train(make_config(**TINY | flags))
    assert_same_run(record / "seed_1", tmp_path / "run", exact=True)
    assert rows(record / "seed_0", "train_loss") != rows(record / "seed_1", "train_loss")


def test_trials_go_on_with_the_same_flags_only(shakespeare_like, tmp_path, capsys):
    done = tmp_path / "done"
    shutil.copytree(shakespeare_like / NAME, done)
    shutil.rmtree(done / "seed_2")
    flags = TINY | dict(data=str(shakespeare_like / "data"), out_dir=str(done), eval_tokens=0, log_every=5,
                        trials=3, resume="auto")  # fmt: skip
    code, err = run_main(flags_of(flags | dict(muon_lr=0.01, n_embd=64)), capsys)
    assert code == 2 and "other values of muon_lr, n_embd" in err
    code, err = run_main(flags_of(flags | dict(data=make_data(tmp_path / "other"))), capsys)
    assert code == 2 and "trained on other data" in err
    for path in (done / "seed_1").glob("*.pt"):
        path.unlink()  # as in a folder of records/
    before = (done / "seed_1" / "log.txt").read_bytes()
    assert run_main(flags_of(flags | dict(log_every=2)), capsys)[0] == 0
    assert (done / "seed_1" / "log.txt").read_bytes() == before and (done / "seed_2" / "summary.json").exists()


@pytest.mark.parametrize("flags", [dict(target_val_loss=2.0), dict(resume="newest")])
def test_trials_refuse_what_compares_nothing(flags):
    with pytest.raises(UserError, match="--trials"):
        make_config(trials=2, **flags)


# ---------------------------------------------------------------------------------------------------------------------
# Records


def edit_json(path: Path, **values) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def edit_log(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def edit_rows(folder: Path, change) -> None:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    change(lines)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def resumed(record: Path) -> None:
    path = record / "seed_1" / "log.txt"
    text = path.read_text()
    path.write_text(text + "=" * 40 + " run\n{}\n")


def edit_source(run: Path, and_hash: bool = True) -> None:
    """Other content in a run's source/, with a hash in log.txt that fits."""
    path = run / "source" / "train_gpt.py"
    before = hashlib.sha256(path.read_bytes()).hexdigest()
    edit_log(path, "def train_step", "def train_stop")
    if and_hash:
        edit_log(run / "log.txt", before, hashlib.sha256(path.read_bytes()).hexdigest())


def edit_all_sources(record: Path) -> None:
    for run in record.glob("seed_*"):
        edit_source(run, and_hash=False)


def sources_into_log(record: Path) -> None:
    """The runs in the form that has its sources in log.txt."""
    for run in record.glob("seed_*"):
        lines = (run / "log.txt").read_text().splitlines(keepends=True)
        texts = [f"{SECTION} {name}\n{(run / 'source' / name).read_text()}\n" for name in ("train_gpt.py", "model.py")]
        kept = [line for line in lines if not line.startswith(("source ", "command: "))]
        (run / "log.txt").write_text("".join(texts + kept))
        shutil.rmtree(run / "source")


CHEATS = {  # what was done -> what is said of it
    "early stop": (lambda r: edit_json(r / "seed_1" / "summary.json", stopped_by="target_val_loss"), "stopped by"),
    "fewer steps": (lambda r: edit_json(r / "seed_1" / "summary.json", step=10), "stopped by"),
    "seed hunting": (lambda r: edit_log(r / "seed_2" / "log.txt", '"seed": 2', '"seed": 7'), "not 0, 1, 2"),
    "one seed twice": (lambda r: edit_log(r / "seed_2" / "log.txt", '"seed": 2', '"seed": 1'), "not 0, 1, 2"),
    "two runs": (lambda r: (r / "seed_2").rename(r.parent.parent / "hidden"), "at least 3"),
    "other data": (lambda r: edit_json(r / "seed_0" / "summary.json", files={"val_000000.bin": "0"}), "other data"),
    "fewer tokens": (lambda r: edit_json(r / "seed_0" / "summary.json", val_tokens=64), "validated on 64"),
    "other flags": (lambda r: edit_log(r / "seed_1" / "log.txt", '"n_layer": 2', '"n_layer": 3'), "other flags"),
    "other source": (lambda r: edit_source(r / "seed_1"), "another source"),
    "edited source": (lambda r: edit_source(r / "seed_2", and_hash=False), "seed_2: source/train_gpt.py is not the"),
    "all sources edited": (edit_all_sources, "seed_0: source/train_gpt.py is not the file whose hash log.txt holds"),
    "resumed": (resumed, "resumed"),
    "other machine": (lambda r: edit_json(r / "seed_1" / "summary.json", machine="1 x cpu (fast)"), "another machine"),
    "no command": (lambda r: (r / "command.sh").unlink(), "command.sh"),
    "other command": (lambda r: edit_log(r / "command.sh", "--n_layer", "--seed"), "other flags than seed_0"),
    "other console": (lambda r: edit_log(r / "seed_1" / "log.txt", " | train_time", " | no time"), "log.txt disagree"),
    "rows removed": (lambda r: edit_rows(r / "seed_2", lambda rows: rows.pop(0)), "missing"),
    "better loss": (lambda r: edit_json(r / "seed_1" / "summary.json", val_loss=0.1), "disagree"),
    "slow clock": (lambda r: edit_rows(r / "seed_0", lambda rows: rows[0].update(train_time_s=1e6)), "clock"),
    "quick clock": (lambda r: edit_rows(r / "seed_0", lambda rows: rows[1].update(tokens_per_s=1e9)), "fit together"),
}
CHEATS_IN_LOG = {  # where log.txt holds the sources
    "resumed": CHEATS["resumed"],
    "other source": (
        lambda r: edit_log(r / "seed_1" / "log.txt", "def train_step", "def train_stop"),
        "another source",
    ),
}


@pytest.fixture
def record(shakespeare_like, tmp_path, monkeypatch) -> Path:
    """A copy of the record, on a track that has its data and a target that it reaches."""
    shutil.copytree(shakespeare_like / NAME, tmp_path / NAME)
    meta = json.loads((shakespeare_like / "data" / "meta.json").read_text())
    files = {name: shard["sha256"] for name, shard in meta["files"].items()}
    tokens = json.loads((tmp_path / NAME / "seed_0" / "summary.json").read_text())["val_tokens"]
    track = check.TRACKS["laptop"] | dict(files=files, val_tokens=tokens, targets={"shakespeare-1.8857": 5.0})
    monkeypatch.setitem(check.TRACKS, "laptop", track)
    return tmp_path / NAME


def assert_verdict(record: Path, capsys, said: str = "") -> None:
    """It passes, or fails for the reason that is `said`."""
    report_file = record.parent.parent / "out.json"
    capsys.readouterr()
    code = bench.main(["record", str(record), "--json", str(report_file)])
    report = json.loads(report_file.read_text())
    verdict = "FAIL" if said else "PASS"
    assert report["record"][0]["verdict"] == verdict and code == bool(said), report["record"][0]["broken"]
    assert any(said in reason for reason in report["record"][0]["broken"]) or not said
    assert verdict in capsys.readouterr().out


@pytest.mark.parametrize("cheat", ["none", *CHEATS])
def test_records_that_cheat_are_rejected(cheat, record, capsys):
    if cheat != "none":
        CHEATS[cheat][0](record)
    assert_verdict(record, capsys, CHEATS[cheat][1] if cheat != "none" else "")


@pytest.mark.parametrize("cheat", ["none", *CHEATS_IN_LOG])
def test_records_with_their_sources_in_the_log(cheat, record, capsys):
    sources_into_log(record)
    if cheat != "none":
        CHEATS_IN_LOG[cheat][0](record)
    assert_verdict(record, capsys, CHEATS_IN_LOG[cheat][1] if cheat != "none" else "")


def test_records_of_this_repository_keep_the_rules(capsys):
    records = [path for path in ROOT.glob("records/*/*") if path.is_dir() and path.parent.name in check.TRACKS]
    assert records
    for path in records:
        assert bench.main(["record", str(path)]) == 0 and "PASS" in capsys.readouterr().out, path


def test_records_need_significance_and_source(shakespeare_like, tmp_path, capsys):
    record = tmp_path / NAME
    shutil.copytree(shakespeare_like / NAME, record)
    assert bench.main(["record", str(record)]) == 1
    said = capsys.readouterr().out
    assert "not below 1.8857 with p < 0.01" in said and "other data" in said
    edit_json(record / "seed_1" / "summary.json", val_loss=None)
    assert bench.main(["record", str(record)]) == 2
    shutil.copy(shakespeare_like / NAME / "seed_1" / "summary.json", record / "seed_1" / "summary.json")
    (record / "seed_1" / "source" / "model.py").unlink()
    assert bench.main(["record", str(record)]) == 2 and bench.main(["record", str(tmp_path)]) == 2
    assert "is not a finished run with its source" in capsys.readouterr().err
    shutil.copytree(shakespeare_like / NAME, record, dirs_exist_ok=True)
    edit_log(record / "seed_1" / "log.txt", ", model.py sha256 ", "\nno source ")
    assert bench.main(["record", str(record)]) == 2
    assert "log.txt has no hash of model.py" in capsys.readouterr().err
    shutil.copytree(shakespeare_like / NAME, record, dirs_exist_ok=True)
    sources_into_log(record)
    edit_log(record / "seed_1" / "log.txt", f"{SECTION} model.py", "model.py")
    assert bench.main(["record", str(record)]) == 2
    assert "is not a finished run with its source" in capsys.readouterr().err


@pytest.mark.parametrize(
    "df, t, p", [(2, 6.965, 0.01), (4, 3.747, 0.01), (9, 2.821, 0.01), (1, 1.0, 0.25), (30, 1.697, 0.05)]
)
def test_p_values_against_tables(df, t, p):
    values = torch.linspace(-1, 1, df + 1, dtype=torch.float64)
    values = values - t * values.std() / math.sqrt(df + 1)  # so that this is their t for a mean below 0
    assert check.t_test(values.tolist(), 0.0) == pytest.approx(p, rel=2e-3)
    assert check.t_test((-values).tolist(), 0.0) == pytest.approx(1 - p, rel=2e-3)
