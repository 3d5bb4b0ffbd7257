"""Trials and records: whole runs with seeds, the rules of records, pictures of their losses."""

import json
import math
import re
import shutil
from pathlib import Path
from statistics import mean, stdev

import pytest

from common.errors import UserError, run_command
from common.files import sha256_of_file
from conftest import (
    ROOT,
    TINY,
    assert_same_run,
    flags_of,
    make_data,
    refusal,
    run_main,
    run_python,
)
from data import prepare
from records import check, rerun, source
from runtime.run_folder import SOURCE_FILES

NAME = Path("records", "laptop", "2026-01-01_shakespeare-1.8857")
FLAGS = TINY | dict(eval_tokens="all", log_every=5)


@pytest.fixture(scope="session")
def shakespeare_like(tmp_path_factory) -> Path:
    """A data folder, and three short runs on it in the form of a record."""
    folder = tmp_path_factory.mktemp("record")
    (folder / "text.txt").write_text("To be, or not to be, that is the question. " * 400)
    command = f"files {folder}/text.txt --tokenizer bytes --out {folder}/data"
    assert run_command(prepare.main, command.split()) == 0
    record = folder / NAME
    flags = flags_of(FLAGS | dict(data=folder / "data", out_dir=record, trials=3))
    assert run_python("train_gpt.py", *flags).returncode == 0
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


def test_trials_resume_where_one_was_torn(shakespeare_like, tmp_path, capsys):
    done = tmp_path / "done"
    shutil.copytree(shakespeare_like / NAME, done)
    shutil.rmtree(done / "seed_2")
    kept = done / "seed_1" / "summary.json"
    before = kept.read_bytes()
    flags = FLAGS | dict(data=shakespeare_like / "data", out_dir=done, trials=3)
    assert run_main(flags_of(flags | dict(resume="auto")), capsys)[0] == 0
    assert kept.read_bytes() == before
    assert_same_run(done / "seed_2", shakespeare_like / NAME / "seed_2", exact=True)


def edit(path: Path, pattern: str, new: str) -> None:
    text, n = re.subn(pattern, lambda _: new, path.read_bytes().decode(), flags=re.DOTALL)
    assert n
    path.write_bytes(text.encode())


def edit_copy(run: Path, name: str, text: str) -> None:
    """Append text to a run's copy of a source, or to a new one, and correct its hash in log.txt."""
    with open(run / "source" / name, "ab") as file:
        file.write(text.encode())
    hashed = f"{name} sha256 {sha256_of_file(run / 'source' / name)}, "
    edit(run / "log.txt", rf"{name} sha256 \w+, |(?<=\nsources: )", hashed)


FIRST = (ROOT / "model.py").read_text().partition("\n")[0]
ONE_LINE_MORE = f"--- a/model.py\n+++ b/model.py\n@@ -1 +1,2 @@\n+# edited\n {FIRST}\n"
NO_HASH = "log.txt does not hold the hash of"
OUTSIDE = f"sources: outside/opt/fast.py sha256 {'0' * 64}, "
CHEATS = [  # file, what is replaced in it, and by what -> what is said
    ("seed_1/summary.json", '"max_steps"', '"target_val_loss"', "stopped by target_val_loss"),
    ("seed_1/summary.json", r'"val_loss": [\d.]+', '"val_loss": 0.1', "disagree"),
    ("seed_0/summary.json", '"files": {.*?}', '"files": {}', "are not the track's"),
    ("seed_0/summary.json", r'"val_tokens": \d+', '"val_tokens": 64', "validated on 64"),
    ("seed_2/log.txt", '"seed": 2', '"seed": 7', "seed_2: its seed is 7"),
    ("seed_1/log.txt", r"data: (\S+) \(.*?\), ", "data: x (y), 1", "tokens, ' about the data"),
    ("seed_1/log.txt", '"n_layer": 2', '"n_layer": 3', "from seed_0: n_layer 3, not 2"),
    ("seed_2/log.txt", "model.py sha256 ", "\nno ", f"seed_2: {NO_HASH} model.py"),
    ("seed_0/log.txt", "sources: ", OUTSIDE, f"{NO_HASH} outside/opt/fast.py that source"),
    ("source.patch", r"\Z", ONE_LINE_MORE, f"seed_0: {NO_HASH} model.py that source.patch gives"),
    ("seed_1/log.txt", r"\Z", "=" * 40 + " run\n{}\n", "resumed"),
    ("command.sh", "train_gpt.py", "train.py", "command.sh does not say"),
    ("seed_2/metrics.jsonl", r"\A.*?\n", "", "missing"),
    (
        "seed_0/metrics.jsonl",
        r"5\.76\d+",
        "5.66",
        "loss is 5.6600, below an untrained model's ln(320)",
    ),
    ("rerun_1/log.txt", "model.py sha256 ", "\nno ", f"rerun_1: {NO_HASH} model.py"),
    ("rerun_1/summary.json", '"files": {.*?}', '"files": {}', "rerun_1: trained or validated on"),
    ("rerun_1/summary.json", "1 x cpu", "4 x cpu", "rerun_1: on 4 x cpu"),
    ("rerun_1/log.txt", '"n_layer": 2', '"n_layer": 3', "those of seed_1: n_layer 3, not 2"),
    ("rerun_1/metrics.jsonl", r'"val_loss": ', '"val_loss": 1', "rerun_1: val_loss 1"),
    ("rerun_1/summary.json", 's": -', 's": ', "its train_time equals that of seed_1: a copy"),
    ("rerun_1/summary.json", 's": -', 's": 9', "rerun it on an idle machine"),
    ("rerun_1/summary.json", '"system_s": ', '"system_s": 9', "s by the system's"),
    ("rerun_1/summary.json", '"same_start": true, ', "", "not a function of the seed alone"),
    ("seed_1/summary.json", "1 x cpu", "1 x cpu, fast", "a different machine than seed_0"),
]


# A model that begins with the number of the first token in the training shard
COUNTS_TOKENS = """
import sys
from pathlib import Path

seeded_weights = init_weights


def init_weights(model, seed):
    seeded_weights(model, seed)
    (folder,) = [word.removeprefix("--data=") for word in sys.argv if word.startswith("--data=")]
    (shard, *_) = sorted(Path(folder).glob("*train*.bin"))
    with torch.no_grad():
        model.wte.weight[0, 0] = shard.read_bytes()[1024]
"""


def use_track(patch: pytest.MonkeyPatch, record: Path, repository: Path) -> None:
    """A repository has the sources of the record's runs, the track their data and a target."""
    summary = json.loads((record / "seed_0" / "summary.json").read_text())
    log = (record / "seed_0" / "log.txt").read_text()
    track = check.TRACKS["laptop"] | dict(targets={"shakespeare-1.8857": 5.0})
    track |= {key: summary[key] for key in ("files", "val_tokens")}
    track["tokens"] = re.search(r", [\d,]+ \+ [\d,]+ tokens, ", log)[0]
    patch.setattr(source, "REPOSITORY", repository)
    patch.setitem(check.TRACKS, "laptop", track)


@pytest.fixture(scope="session")
def packed(shakespeare_like, repository, tmp_path_factory) -> Path:
    """The record as it is kept, with a rerun that was as fast."""
    folder = shutil.copytree(shakespeare_like / NAME, tmp_path_factory.mktemp("packed") / NAME)
    with pytest.MonkeyPatch.context() as patch:
        use_track(patch, folder, repository)
        check.pack(str(folder), "HEAD")
    for seed in range(3):
        again = folder / f"rerun_{seed}"
        shutil.copytree(folder / f"seed_{seed}", again)
        added = '"same_start": true, "system_s": 0.1, "train_time_s": -'
        edit(again / "summary.json", '"train_time_s": ', added)
        edit(again / "metrics.jsonl", '"train_time_s": ', '"train_time_s": -')
    return folder


@pytest.fixture
def unpacked(shakespeare_like, repository, tmp_path, monkeypatch) -> Path:
    """A copy of the record as the runs left it."""
    use_track(monkeypatch, shakespeare_like / NAME, repository)
    return Path(shutil.copytree(shakespeare_like / NAME, tmp_path / NAME))


@pytest.fixture
def record(packed, repository, tmp_path, monkeypatch) -> Path:
    """A copy of the packed record."""
    use_track(monkeypatch, packed, repository)
    return Path(shutil.copytree(packed, tmp_path / NAME))


def assert_verdict(record: Path, said: str = "") -> None:
    """It passes, or fails for the reason that is `said`."""
    row = check.check_record(str(record))[0]
    if said:
        assert row["verdict"] == "FAIL" and said in "\n".join(row["broken"])
    else:
        assert row["verdict"] == "PASS", row["broken"]


@pytest.mark.parametrize("name, pattern, new, said", CHEATS)
def test_records_that_cheat_are_rejected(name, pattern, new, said, record):
    edit(record / name, pattern, new)
    assert_verdict(record, said)


def test_a_run_that_was_copied_is_found(record):
    for name in ("metrics.jsonl", "summary.json"):
        shutil.copyfile(record / "seed_0" / name, record / "seed_2" / name)
    assert_verdict(record, "seed_0 and seed_2 share 6 losses: one is a copy")


def test_a_rerun_is_of_the_record_alone(record, tmp_path, monkeypatch):
    commit = source.git("rev-parse", "HEAD").decode()
    assert (record / "source.patch").read_text() == f"commit {commit}"
    assert not list(record.glob("seed_*/source"))
    shutil.rmtree(record / "rerun_1")
    row, notes = check.check_record(str(record))
    assert notes == [f"The source is commit {commit[:7]} of this history.", check.UNKNOWN]
    assert row["verdict"].startswith("not confirmed: 2 of 3 seeds have a rerun")

    monkeypatch.setattr(check, "SLOWER", 1000)
    other = make_data(tmp_path / "other", seed=1)
    assert "is not the dataset of the" in refusal(rerun.rerun, str(record), 1, str(other))
    assert "rerun_0 exists; remove it" in refusal(rerun.rerun, str(record), 0, "")
    rerun.rerun(str(record), 1, "")
    assert_verdict(record)
    assert_same_run(record / "rerun_1", record / "seed_1", exact=True)


def test_weights_that_begin_with_what_the_dataset_holds_are_found(repository, data, tmp_path):
    shutil.copytree(repository, tmp_path / "cheat")
    with open(tmp_path / "cheat" / "model.py", "a") as file:
        file.write(COUNTS_TOKENS)
    words = flags_of(FLAGS)
    assert not rerun.is_same_start(tmp_path / "cheat", words, data)


def test_records_of_this_repository_keep_the_rules(repository):
    if source.git("rev-parse", "--is-shallow-repository").strip() != b"false":
        pytest.skip("needs the whole history")
    table = (ROOT / "records" / "README.md").read_text(encoding="utf-8")
    commands = list(ROOT.glob("records/*/*/command.sh"))
    assert commands
    for path in commands:
        row, _ = check.check_record(str(path.parent))
        verdict = "PASS" if (path.parent / "rerun_0").exists() else "not confirmed: 0 of "
        assert not row["broken"] and row["verdict"].startswith(verdict), row
        assert f"{path.parent.name}) | {row['mean']:.4f} +- " in table


def test_records_need_significance_and_three_finished_runs(record):
    check.TRACKS["laptop"]["targets"][NAME.name.partition("_")[2]] = 1.8857
    assert_verdict(record, "not below 1.8857 with p < 0.01")
    shutil.rmtree(record / "seed_2")
    assert_verdict(record, "at least 3")
    edit(record / "seed_1" / "summary.json", r'"val_loss": [\d.]+', '"val_loss": null')
    with pytest.raises(UserError, match="is not a finished run"):
        check.check_record(str(record))
    shutil.copyfile(record / "seed_0" / "summary.json", record / "seed_1" / "summary.json")
    (record / "seed_1" / "metrics.jsonl").write_text("")
    with pytest.raises(UserError, match="metrics.jsonl is empty"):
        check.check_record(str(record))
    with pytest.raises(UserError, match="expected records/TRACK/DATE-YOURWORD_TARGET"):
        check.check_record(str(record.parent))


def test_packed_records_keep_the_difference(unpacked):
    for run in unpacked.glob("seed_*"):
        edit_copy(run, "model.py", "# no newline at the end")
        edit_copy(run, "data/more.py", "more = 1\r\n")
    check.pack(str(unpacked), "HEAD")
    row, notes = check.check_record(str(unpacked))
    assert not row["broken"]
    assert notes[0].endswith("a person must read: data/more.py (+1 -0), model.py (+1 -0).")
    edit(unpacked / "seed_0" / "metrics.jsonl", r"5\.76\d+", "5.6600")  # it may weight the loss
    assert not check.check_record(str(unpacked))[0]["broken"]


def test_p_is_that_of_the_reruns(record):
    losses = []
    for run in record.glob("seed_*"):
        loss = json.loads((run / "summary.json").read_text())["val_loss"]
        losses.append(loss)
        lower = 0.998 * loss
        for name in ("metrics.jsonl", "summary.json"):
            edit(run / name, re.escape(f'"val_loss": {loss}'), f'"val_loss": {lower}')
    target = mean(losses) + 6.9 * stdev(losses) / math.sqrt(3)  # p is 0.0102
    check.TRACKS["laptop"]["targets"][NAME.name.partition("_")[2]] = target
    row, _ = check.check_record(str(record))
    assert row["verdict"] == "not confirmed: 3 of 3 seeds have a rerun, p = 0.0102", row
    assert check.t_test([0.998 * loss for loss in losses], target) < 0.01


def test_pack_keeps_what_it_cannot_pack(unpacked):
    edit_copy(unpacked / "seed_1", "model.py", "# edited")
    with pytest.raises(UserError, match="seed_1 ran a different model.py than source.patch"):
        check.pack(str(unpacked), "HEAD")
    assert len(list(unpacked.glob("*/source"))) == 3


def test_sources_that_cannot_be_rebuilt_are_told(record):
    patch = (record / "source.patch").read_text()
    for text, said in (
        ("HEAD\n", "source.patch is missing or does not begin with `commit`"),
        (f"commit {'0' * 40}\n", "get the whole history, with commit 0000"),
        (patch + ONE_LINE_MORE.replace(FIRST, "other"), "git apply failed"),
    ):
        (record / "source.patch").write_text(text)
        with pytest.raises(UserError, match=re.escape(said)):
            check.check_record(str(record))
