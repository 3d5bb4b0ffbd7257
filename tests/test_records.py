"""Trials and records: whole runs with seeds, the rules of records, pictures of their losses."""

import json
import math
import re
import shutil
from pathlib import Path

import pytest
import torch

import train_gpt
from common import SOURCE_FILES, UserError
from conftest import ROOT, TINY, assert_same_run, flags_of, rows, run_main, tiny_run
from data import prepare
from records import check, source
from train_gpt import make_config

NAME = Path("records", "laptop", "2026-01-01_shakespeare-1.8857")
FLAGS = TINY | dict(eval_tokens=0, log_every=5)


@pytest.fixture(scope="session")
def shakespeare_like(tmp_path_factory) -> Path:
    """A data folder, and three short runs on it in the form of a record."""
    folder = tmp_path_factory.mktemp("record")
    (folder / "text.txt").write_text("To be, or not to be, that is the question. " * 400)
    command = f"files {folder}/text.txt --tokenizer bytes --out {folder}/data"
    assert prepare.main(command.split()) == 0
    record = folder / NAME
    flags = flags_of(FLAGS | dict(data=folder / "data", out_dir=record, trials=3))
    assert train_gpt.main(flags) == 0
    arguments = " \\\n    ".join(flags)
    command = f'OMP_NUM_THREADS=1 python ./train_gpt.py {arguments} 2>&1 | tee "log"  # as it was\n'
    (record / "command.sh").write_text("# how to \\\n" + command)
    (record / "README.md").write_text("A test.")
    return folder


@pytest.fixture(scope="session")
def repository(tmp_path_factory) -> Path:
    """A repository whose one commit holds the sources as they are, committed here or not."""
    if not shutil.which("git"):
        pytest.skip("needs git")
    folder = tmp_path_factory.mktemp("repository")
    for name, path in SOURCE_FILES.items():
        (folder / name).parent.mkdir(exist_ok=True)
        shutil.copyfile(path, folder / name)
    author = "-c user.name=test -c user.email=test@localhost -c commit.gpgsign=false"
    for command in ("init -q", "add -f .", f"{author} commit -q -m test"):
        source.git(*command.split(), folder=folder, advice="mend it")
    return folder


def test_trials_are_runs_with_seeds(shakespeare_like, tmp_path):
    record = shakespeare_like / NAME
    folders = [path.name for path in record.iterdir() if path.is_dir()]
    assert sorted(folders) == ["seed_0", "seed_1", "seed_2"]
    tiny_run(tmp_path / "run", **FLAGS | dict(data=shakespeare_like / "data", seed=1))
    assert_same_run(record / "seed_1", tmp_path / "run", exact=True)
    assert rows(record / "seed_0", "train_loss") != rows(record / "seed_1", "train_loss")


def test_trials_resume_where_one_was_torn(shakespeare_like, tmp_path, capsys):
    done = tmp_path / "done"
    shutil.copytree(shakespeare_like / NAME, done)
    shutil.rmtree(done / "seed_2")
    before = [(done / f"seed_{seed}" / "summary.json").read_bytes() for seed in range(2)]
    flags = FLAGS | dict(data=shakespeare_like / "data", out_dir=done, trials=3)
    assert "already holds ckpt_20.pt" in run_main(flags_of(flags), capsys)[1]
    assert run_main(flags_of(flags | dict(resume="auto")), capsys)[0] == 0
    assert [(done / f"seed_{seed}" / "summary.json").read_bytes() for seed in range(2)] == before
    assert_same_run(done / "seed_2", shakespeare_like / NAME / "seed_2", exact=True)


def edit(path: Path, pattern: str, new: str) -> None:
    text, n = re.subn(pattern, lambda _: new, path.read_bytes().decode(), flags=re.DOTALL)
    assert n
    path.write_bytes(text.encode())


def edit_copy(run: Path, name: str, text: str) -> None:
    """Append text to a run's copy of a source, or to a new one, and correct its hash in log.txt."""
    with open(run / "source" / name, "ab") as file:
        file.write(text.encode())
    hashed = f"{name} sha256 {source.sha256(run / 'source' / name)}, "
    edit(run / "log.txt", rf"{name} sha256 \w+, |(?<=\nsources: )", hashed)


FIRST = (ROOT / "model.py").read_text().partition("\n")[0]
ONE_LINE_MORE = f"--- a/model.py\n+++ b/model.py\n@@ -1 +1,2 @@\n+# edited\n {FIRST}\n"
NO_HASH = "log.txt does not hold the hash of model.py"
CHEATS = [  # file, what is replaced in it, and by what -> what is said
    ("seed_1/summary.json", '"max_steps"', '"target_val_loss"', "stopped by target_val_loss"),
    ("seed_1/summary.json", '"step": 20', '"step": 10', "stopped by max_steps at step 10"),
    ("seed_1/summary.json", "1 x cpu", "1 x cpu, fast", "another machine"),
    ("seed_1/summary.json", r'"val_loss": [\d.]+', '"val_loss": 0.1', "disagree"),
    ("seed_0/summary.json", '"files": {.*?}', '"files": {}', "other data"),
    ("seed_0/summary.json", r'"val_tokens": \d+', '"val_tokens": 64', "validated on 64"),
    ("seed_2/log.txt", '"seed": 2', '"seed": 7', "not 0, 1, 2"),
    ("seed_1/log.txt", '"n_layer": 2', '"n_layer": 3', "other flags"),
    ("seed_1/log.txt", r"train_gpt.py sha256 \w", "train_gpt.py sha256 ", "another source"),
    ("seed_2/log.txt", "model.py sha256 ", "\nno ", f"seed_2: {NO_HASH}"),
    ("source.patch", r"\Z", ONE_LINE_MORE, f"seed_0: {NO_HASH} as source.patch gives it"),
    ("seed_1/log.txt", r"\Z", "=" * 40 + " run\n{}\n", "resumed"),
    ("seed_1/log.txt", r" \| train_time", " | no time", "log.txt disagree"),
    ("command.sh", "train_gpt.py", "train.py", "command.sh does not say"),
    ("command.sh", "--n_embd", "--seed", "other flags than seed_0"),
    ("seed_2/metrics.jsonl", r"\A.*?\n", "", "missing"),
    ("seed_0/metrics.jsonl", r'"train_time_s": [\d.]+', '"train_time_s": 1e6', "clock"),
    ("seed_0/metrics.jsonl", r'"tokens_per_s": [\d.]+', '"tokens_per_s": 1e9', "fit together"),
]


@pytest.fixture
def unpacked(shakespeare_like, repository, tmp_path, monkeypatch) -> Path:
    """A copy of the record as the runs left it.

    A repository has their sources, the track their data and a target.
    """
    monkeypatch.setattr(source, "REPOSITORY", repository)
    record = Path(shutil.copytree(shakespeare_like / NAME, tmp_path / NAME))
    summary = json.loads((record / "seed_0" / "summary.json").read_text())
    track = check.TRACKS["laptop"] | dict(targets={"shakespeare-1.8857": 5.0})
    track |= {key: summary[key] for key in ("files", "val_tokens")}
    monkeypatch.setitem(check.TRACKS, "laptop", track)
    return record


@pytest.fixture
def record(unpacked) -> Path:
    """A copy of the record as it is kept."""
    check.pack(str(unpacked), "HEAD")
    return unpacked


def assert_verdict(record: Path, said: str = "") -> None:
    """It passes, or fails for the reason that is `said`."""
    row, _ = check.check_record(str(record))
    assert row["verdict"] == ("FAIL" if said else "PASS"), row["broken"]
    assert any(said in reason for reason in row["broken"]) or not said


@pytest.mark.parametrize("name, pattern, new, said", CHEATS, ids=[cheat[-1] for cheat in CHEATS])
def test_records_that_cheat_are_rejected(name, pattern, new, said, record):
    edit(record / name, pattern, new)
    assert_verdict(record, said)


def test_a_record_may_leave_open_what_its_log_has_settled(record):
    """Its dtype, attention and learning rates by rule, but no value that the rule does not give."""
    for name, left_open in (("dtype=fp32", "dtype=auto"), ("muon_lr=0.02", "muon_lr=0")):
        edit(record / "command.sh", name, left_open)
    assert_verdict(record, "seed_0 was run with: muon_lr")
    muon_lr = train_gpt.learning_rates(make_config(**TINY | dict(muon_lr=0.0)))[0]
    for run in record.glob("seed_*"):
        edit(run / "log.txt", '"muon_lr": 0.02', f'"muon_lr": {muon_lr}')
    assert_verdict(record)


def test_records_of_this_repository_keep_the_rules():
    if not shutil.which("git"):
        pytest.skip("needs git")
    if source.git("rev-parse", "--is-shallow-repository").strip() != b"false":
        pytest.skip("needs the whole history")
    records = []
    for track in check.TRACKS:
        records += [path for path in ROOT.glob(f"records/{track}/*") if path.is_dir()]
    table = (ROOT / "records" / "README.md").read_text(encoding="utf-8")
    assert records
    for path in records:
        row, _ = check.check_record(str(path))
        assert row["verdict"] == "PASS" and f"{path.name}) | {row['mean']:.4f} +- " in table, row


def test_records_need_significance_and_three_finished_runs(record):
    check.TRACKS["laptop"]["targets"][NAME.name.partition("_")[2]] = 1.8857
    assert_verdict(record, "not below 1.8857 with p < 0.01")
    shutil.rmtree(record / "seed_2")
    assert_verdict(record, "at least 3")
    edit(record / "seed_1" / "summary.json", r'"val_loss": [\d.]+', '"val_loss": null')
    with pytest.raises(UserError, match="is not a finished run"):
        check.check_record(str(record))
    refused = "is not a folder of a track; expected one of records/laptop/DATE_shakesp"
    with pytest.raises(UserError, match=refused):
        check.check_record(str(record.parent))


def test_packed_records_need_no_copies(record):
    commit = source.git("rev-parse", "HEAD").decode()
    assert (record / "source.patch").read_text() == f"commit {commit}"
    assert not list(record.glob("*/source"))
    row, notes = check.check_record(str(record))
    assert row["verdict"] == "PASS" and not any("must read the source" in note for note in notes)


def test_packed_records_keep_the_difference(unpacked):
    for run in unpacked.glob("seed_*"):
        edit_copy(run, "model.py", "# no newline at the end")
        edit_copy(run, "data/more.py", "more = 1\r\n")
    check.pack(str(unpacked), "HEAD")
    row, (*_, note) = check.check_record(str(unpacked))
    assert row["verdict"] == "PASS"
    assert note.endswith("not this repository's: data/more.py, model.py.")
    assert len((unpacked / "source.patch").read_text().splitlines()) < 30


def test_pack_keeps_what_it_cannot_pack(unpacked):
    edit_copy(unpacked / "seed_1", "model.py", "# edited")
    with pytest.raises(UserError, match="seed_1: source.patch does not give model.py"):
        check.pack(str(unpacked), "HEAD")
    with pytest.raises(UserError, match="as in --pack HEAD"):
        check.pack(str(unpacked), "HEAD~7")
    assert len(list(unpacked.glob("*/source"))) == 3
    for folder in unpacked.glob("*/source"):
        shutil.rmtree(folder)
    with pytest.raises(UserError, match="has no runs with source/"):
        check.pack(str(unpacked), "HEAD")


def test_sources_that_cannot_be_rebuilt_are_told(record, monkeypatch):
    patch = (record / "source.patch").read_text()
    for text, said in (
        ("HEAD\n", "source.patch is missing or does not begin with `commit`"),
        (f"commit {'0' * 40}\n", "or `git fetch --unshallow` in a shallow clone"),
        (patch + ONE_LINE_MORE.replace(FIRST, "other"), "git apply failed"),
    ):
        (record / "source.patch").write_text(text)
        with pytest.raises(UserError, match=re.escape(said)) as caught:
            check.check_record(str(record))
        assert "\n" not in str(caught.value)


def test_p_values_against_tables():
    for df, t, p in ((1, 1.0, 0.25), (2, 6.965, 0.01), (9, 2.821, 0.01), (30, 1.697, 0.05)):
        # Values whose t, for a mean below 0, is this one
        values = torch.linspace(-1, 1, df + 1, dtype=torch.float64)
        values = values - t * values.std() / math.sqrt(df + 1)
        assert check.t_test(values.tolist(), 0.0) == pytest.approx(p, rel=2e-3)
        assert check.t_test((-values).tolist(), 0.0) == pytest.approx(1 - p, rel=2e-3)
