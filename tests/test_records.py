"""Trials and records: whole runs with seeds, and the rules that a record keeps."""

import hashlib
import json
import math
import shutil
import sys
import xml.etree.ElementTree as xml
from pathlib import Path

import numpy as np
import pytest
import torch

import bench
import train_gpt
from benchmarks.plot import mean_and_band, points, read_nanogpt, read_text, thinned
from conftest import ROOT, TINY, assert_same_run, flags_of, make_data, rows, run_main
from data import prepare
from data.shards import UserError
from records import check, source
from runtime.logger import read_rows
from runtime.start import SOURCE_FILES
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


@pytest.fixture(scope="session")
def repository(tmp_path_factory) -> Path:
    """A repository whose one commit holds the sources as they are, committed here or not."""
    if not shutil.which("git"):
        pytest.skip("needs git")
    folder = tmp_path_factory.mktemp("repository")
    for name, path in SOURCE_FILES.items():
        (folder / name).parent.mkdir(exist_ok=True)
        shutil.copyfile(path, folder / name)
    run_git(folder, "init", "-q")
    run_git(folder, "add", "-f", ".")
    commit_all(folder)
    return folder


def run_git(folder: Path, *arguments: str) -> None:
    done = source.git("-c", "user.name=test", "-c", "user.email=test@localhost", *arguments, folder=folder)
    assert done.returncode == 0, done.stderr


def commit_all(folder: Path) -> None:
    run_git(folder, "-c", "commit.gpgsign=false", "commit", "-q", "-a", "--allow-empty", "-m", "A test")


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
    flags = TINY | dict(
        data=str(shakespeare_like / "data"), out_dir=str(done), eval_tokens=0, log_every=5, trials=3, resume="auto"
    )
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


def edit_source(record: Path) -> None:
    """A line more in front of model.py, by the difference."""
    first = (ROOT / "model.py").read_text().splitlines()[0]
    with open(record / "source.patch", "a", newline="") as file:
        file.write(f"--- a/model.py\n+++ b/model.py\n@@ -1 +1,2 @@\n+# edited\n {first}\n")


def edit_copy(run: Path, name: str, text: str) -> None:
    """Put text behind a run's copy of a source, or into a new one, with the hash in log.txt that fits."""
    path = run / "source" / name
    before = path.read_bytes() if path.exists() else b""
    path.write_bytes(before + text.encode())
    logged = f"{name} sha256 {hashlib.sha256(before).hexdigest()}"
    hashed = f"{name} sha256 {hashlib.sha256(path.read_bytes()).hexdigest()}"
    edit_log(run / "log.txt", *((logged, hashed) if before else ("sources: ", f"sources: {hashed}, ")))


def remove_hashes(record: Path) -> None:
    for run in record.glob("seed_*"):
        edit_log(run / "log.txt", ", model.py sha256 ", "\nno source ")


def edit_hash(run: Path) -> None:
    logged = hashlib.sha256((ROOT / "train_gpt.py").read_bytes()).hexdigest()
    edit_log(run / "log.txt", f"train_gpt.py sha256 {logged}", f"train_gpt.py sha256 {'0' * 64}")


CHEATS = {  # what was done -> what is said of it
    "early stop": (lambda r: edit_json(r / "seed_1" / "summary.json", stopped_by="target_val_loss"), "stopped by"),
    "fewer steps": (lambda r: edit_json(r / "seed_1" / "summary.json", step=10), "stopped by"),
    "seed hunting": (lambda r: edit_log(r / "seed_2" / "log.txt", '"seed": 2', '"seed": 7'), "not 0, 1, 2"),
    "one seed twice": (lambda r: edit_log(r / "seed_2" / "log.txt", '"seed": 2', '"seed": 1'), "not 0, 1, 2"),
    "two runs": (lambda r: (r / "seed_2").rename(r.parent.parent / "hidden"), "at least 3"),
    "other data": (lambda r: edit_json(r / "seed_0" / "summary.json", files={"val_000000.bin": "0"}), "other data"),
    "fewer tokens": (lambda r: edit_json(r / "seed_0" / "summary.json", val_tokens=64), "validated on 64"),
    "other flags": (lambda r: edit_log(r / "seed_1" / "log.txt", '"n_layer": 2', '"n_layer": 3'), "other flags"),
    "other source": (lambda r: edit_hash(r / "seed_1"), "another source"),
    "other hash": (lambda r: edit_hash(r / "seed_2"), "seed_2: log.txt does not hold the hash of train_gpt.py"),
    "hashes removed": (remove_hashes, "seed_1: log.txt does not hold the hash of model.py"),
    "edited source": (edit_source, "seed_0: log.txt does not hold the hash of model.py as source.patch gives it"),
    "resumed": (resumed, "resumed"),
    "other machine": (lambda r: edit_json(r / "seed_1" / "summary.json", machine="1 x cpu (fast)"), "another machine"),
    "no command": (lambda r: (r / "command.sh").unlink(), "command.sh"),
    "other command": (lambda r: edit_log(r / "command.sh", "--n_embd", "--seed"), "other flags than seed_0"),
    "other console": (lambda r: edit_log(r / "seed_1" / "log.txt", " | train_time", " | no time"), "log.txt disagree"),
    "rows removed": (lambda r: edit_rows(r / "seed_2", lambda rows: rows.pop(0)), "missing"),
    "better loss": (lambda r: edit_json(r / "seed_1" / "summary.json", val_loss=0.1), "disagree"),
    "slow clock": (lambda r: edit_rows(r / "seed_0", lambda rows: rows[0].update(train_time_s=1e6)), "clock"),
    "quick clock": (lambda r: edit_rows(r / "seed_0", lambda rows: rows[1].update(tokens_per_s=1e9)), "fit together"),
}


@pytest.fixture
def unpacked(shakespeare_like, repository, tmp_path, monkeypatch) -> Path:
    """A copy of the record as the runs left it, beside a repository that holds their sources."""
    monkeypatch.setattr(source, "REPOSITORY", repository)
    return Path(shutil.copytree(shakespeare_like / NAME, tmp_path / NAME))


@pytest.fixture
def track(shakespeare_like, monkeypatch) -> None:
    """The track has the record's data and a target that it reaches."""
    meta = json.loads((shakespeare_like / "data" / "meta.json").read_text())
    files = {name: shard["sha256"] for name, shard in meta["files"].items()}
    tokens = json.loads((shakespeare_like / NAME / "seed_0" / "summary.json").read_text())["val_tokens"]
    reached = check.TRACKS["laptop"] | dict(files=files, val_tokens=tokens, targets={"shakespeare-1.8857": 5.0})
    monkeypatch.setitem(check.TRACKS, "laptop", reached)


@pytest.fixture
def record(unpacked, track) -> Path:
    """A copy of the record as it is kept."""
    check.pack(str(unpacked), "HEAD")
    return unpacked


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


@pytest.mark.parametrize(
    "logged, says", [("auto", ""), ("bf16", ""), ("fp32", ""), ("fp16", "seed_0 was run with: dtype")]
)
def test_a_record_may_leave_its_dtype_to_auto(logged, says, record, capsys):
    edit_log(record / "command.sh", "--dtype=fp32", "--dtype=auto")
    for run in record.glob("seed_*"):
        if logged != "fp32":
            edit_log(run / "log.txt", '"dtype": "fp32"', f'"dtype": "{logged}"')
    assert_verdict(record, capsys, says)


def test_records_of_this_repository_keep_the_rules(capsys):
    if not shutil.which("git") or source.git("rev-parse", "--is-shallow-repository").stdout.strip() != b"false":
        pytest.skip("needs git and the whole history")
    records = [path for path in ROOT.glob("records/*/*") if path.is_dir() and path.parent.name in check.TRACKS]
    assert records
    for path in records:
        assert bench.main(["record", str(path)]) == 0 and "PASS" in capsys.readouterr().out, path


def test_records_need_significance_and_finished_runs(unpacked, capsys):
    assert bench.main(["record", str(unpacked), "--pack", "HEAD"]) == 1
    said = capsys.readouterr().out
    assert "not below 1.8857 with p < 0.01" in said and "other data" in said
    before = (unpacked / "seed_1" / "summary.json").read_bytes()
    edit_json(unpacked / "seed_1" / "summary.json", val_loss=None)
    assert bench.main(["record", str(unpacked)]) == 2
    (unpacked / "seed_1" / "summary.json").write_bytes(before)
    (unpacked / "seed_1" / "metrics.jsonl").unlink()
    assert bench.main(["record", str(unpacked)]) == 2 and bench.main(["record", str(unpacked.parent)]) == 2
    assert "is not a finished run" in capsys.readouterr().err


# ---------------------------------------------------------------------------------------------------------------------
# Sources of records: a commit and a difference


def test_packed_records_need_no_copies(unpacked, track, repository, capsys):
    assert bench.main(["record", str(unpacked), "--pack", "HEAD"]) == 0
    assert "must read the source" not in capsys.readouterr().out
    commit = source.git("rev-parse", "HEAD").stdout.decode()
    assert (unpacked / "source.patch").read_text() == f"commit {commit}" and not list(unpacked.glob("*/source"))


def test_packed_records_keep_the_difference(unpacked, track, capsys):
    for run in unpacked.glob("seed_*"):
        edit_copy(run, "model.py", "# no newline at the end")
        edit_copy(run, "data/more.py", "more = 1\r\n")
    assert bench.main(["record", str(unpacked), "--pack", "HEAD"]) == 0
    assert "with source.patch: it is not this repository's data/more.py and model.py." in capsys.readouterr().out
    assert_verdict(unpacked, capsys)
    assert len((unpacked / "source.patch").read_text().splitlines()) < 30


def test_pack_keeps_what_it_cannot_pack(unpacked, capsys):
    edit_copy(unpacked / "seed_1", "model.py", "# edited")
    assert bench.main(["record", str(unpacked), "--pack", "HEAD"]) == 2
    assert "seed_1: log.txt does not hold the hash of model.py" in capsys.readouterr().err
    assert len(list(unpacked.glob("*/source"))) == 3
    assert bench.main(["record", str(unpacked), "--pack", "HEAD~7"]) == 2
    assert "has no commit HEAD~7" in capsys.readouterr().err
    for folder in unpacked.glob("*/source"):
        shutil.rmtree(folder)
    assert bench.main(["record", str(unpacked), "--pack", "HEAD"]) == 2
    assert "has no runs with source/" in capsys.readouterr().err
    assert bench.main(["record", "--pack", "HEAD"]) == 2
    assert "nothing is not a folder of a track" in capsys.readouterr().err
    assert bench.main(["data", "--pack", "HEAD"]) == 2 and "--pack is for" in capsys.readouterr().err


def name_commit(record: Path, repository: Path, monkeypatch) -> None:
    (record / "source.patch").write_text(f"commit {'0' * 40}\n")


def edit_context(record: Path, repository: Path, monkeypatch) -> None:
    edit_source(record)
    edit_log(record / "source.patch", '\n """', '\n "')


def lose_history(record: Path, repository: Path, monkeypatch) -> None:
    (record.parent / "download").mkdir()
    monkeypatch.setattr(source, "REPOSITORY", record.parent / "download")


def clone_last_commit(record: Path, repository: Path, monkeypatch) -> None:
    longer, shallow = record.parent / "longer", record.parent / "shallow"
    shutil.copytree(repository, longer)
    commit_all(longer)
    run_git(longer, "clone", "-q", "--depth", "1", longer.as_uri(), str(shallow))
    monkeypatch.setattr(source, "REPOSITORY", shallow)


LOST = {  # what was done -> what is said of it
    "no patch": (lambda record, *_: (record / "source.patch").unlink(), "source.patch is missing or does not begin"),
    "no commit": (lambda record, *_: (record / "source.patch").write_text("HEAD\n"), "does not begin with `commit`"),
    "unknown commit": (name_commit, f"has no commit {'0' * 40}; fetch a branch that has it"),
    "other context": (edit_context, "source.patch does not apply to commit"),
    "no history": (lose_history, "has no git history to read commit"),
    "shallow clone": (clone_last_commit, "run `git fetch --unshallow`"),
    "no git": (lambda _, __, monkeypatch: monkeypatch.setenv("PATH", ""), "cannot be started"),
}


@pytest.mark.parametrize("lost", LOST)
def test_sources_that_cannot_be_rebuilt_are_told(lost, record, repository, monkeypatch, capsys):
    do, said = LOST[lost]
    do(record, repository, monkeypatch)
    assert bench.main(["record", str(record)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and said in error and error.count("\n") == 1


@pytest.mark.parametrize(
    "df, t, p", [(2, 6.965, 0.01), (4, 3.747, 0.01), (9, 2.821, 0.01), (1, 1.0, 0.25), (30, 1.697, 0.05)]
)
def test_p_values_against_tables(df, t, p):
    values = torch.linspace(-1, 1, df + 1, dtype=torch.float64)
    values = values - t * values.std() / math.sqrt(df + 1)  # so that this is their t for a mean below 0
    assert check.t_test(values.tolist(), 0.0) == pytest.approx(p, rel=2e-3)
    assert check.t_test((-values).tolist(), 0.0) == pytest.approx(1 - p, rel=2e-3)


# ---------------------------------------------------------------------------------------------------------------------
# Pictures

ZEN4 = ROOT / "records" / "laptop" / "2026-11-21-zen4_shakespeare-1.4697"


def run_with_rows(folder: Path, steps: int, every: int) -> Path:
    """A run that is still going: metrics.jsonl alone, its last line torn, an evaluation that was not finite."""
    lines = []
    for step in range(1, steps + 1):
        clocks = dict(step=step, tokens=64 * step, train_time_s=step / 4, wall_time_s=step / 3)
        lines.append(clocks | dict(train_loss=1 + 4 / step))
        lines += [clocks | dict(val_loss=None if step == every else 1 + 5 / step)] if step % every == 0 else []
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)) + '\n{"step": 10, "tra')
    return folder


def test_what_a_picture_reads_of_rows(tmp_path):
    rows = read_rows((run_with_rows(tmp_path / "a", 20, 5) / "metrics.jsonl").read_text())
    assert len(rows) == 24 and read_rows("") == [] == read_rows('7\n[1]\n{"st\n')
    assert points(rows, "tokens", "val_loss").tolist() == [[640, 960, 1280], [1.5, 1 + 5 / 15, 1.25]]
    again = [dict(step=10, tokens=640, val_loss=9.0), dict(step=0, tokens=0, val_loss=9.0), dict(step="1"), {}]
    assert points(rows + again, "tokens", "val_loss")[1, 0] == 9.0  # a resumed run makes a step twice
    assert points(rows, "seconds", "val_loss").shape == (2, 0)


def test_mean_and_band_of_seeds():
    a, b = np.array([[1.0, 2, 4], [4, 3, 1]]), np.array([[0.5, 3, 5], [5.5, 3, 1]])
    x, mean, low, high = mean_and_band([a, b])
    assert x.tolist() == [1, 2, 3, 4] and mean.tolist() == [4.5, 3.5, 2.5, 1.5]
    assert low.tolist() == [4, 3, 2, 1] and high.tolist() == [5, 4, 3, 2]
    assert mean_and_band([a])[:2].tolist() == a.tolist() and mean_and_band([a[:, :1], b[:, 1:]]).shape == (4, 0)
    assert thinned(np.arange(2000.0).reshape(2, -1)).shape == (2, 300) and thinned(a) is a


def test_nanogpt_logs_have_the_trainers_clock():
    rows = read_nanogpt(read_text(ZEN4 / "baseline" / "seed_0.txt.gz"))
    val = [row for row in rows if "val_loss" in row]
    assert [(row["step"], row["val_loss"], row["tokens"]) for row in val] == [(0, 4.1649, 0), (2000, 1.8802, 1536000)]
    assert val[1]["train_time_s"] == pytest.approx(81.93, abs=0.005)  # what the log's first line says
    assert 82 < val[1]["wall_time_s"] < 86.3 and len(rows) == 2003
    log = "step 0: train loss 4.2, val loss 4.1\niter 0: loss 4.0, time 900.0ms\niter 10: loss nan, time 50.0ms"
    assert [row["train_time_s"] for row in read_nanogpt(log)] == pytest.approx([0.05, 0.55, 0.0])
    assert read_nanogpt("step:1/10 val_loss:3.2") == []


def test_plot_without_matplotlib_says_what_to_install(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert bench.main(["plot", str(ZEN4), "--out", str(tmp_path / "a.svg")]) == 2
    said = capsys.readouterr().err
    assert said == "error: bench.py plot needs matplotlib; install it with `pip install matplotlib`\n"


def test_plot_of_runs_and_a_record(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    a, b = run_with_rows(tmp_path / "one $run", 60, 10), run_with_rows(tmp_path / "_two & more", 3, 3)
    empty, out = run_with_rows(tmp_path / "empty", 0, 1), tmp_path / "a.svg"
    assert bench.main(["plot", str(a), str(b), "--x", "tokens", str(ZEN4), str(empty), "--out", str(out)]) == 0
    assert "empty has no loss over tokens" in capsys.readouterr().out
    texts = [element.text for element in xml.parse(out).iter("{http://www.w3.org/2000/svg}text")]
    expected = {
        "one $run: 1.0833",
        "two & more: not evaluated yet",
        "2026-11-21-zen4_shakespeare-1.4697, 3 seeds: 1.4316",
        "nanoGPT's recipe, 3 seeds: 1.8961",
        "target 1.4697",
        "training tokens",
        "validation loss (nats per token)",
    }
    assert expected <= set(texts) and out.stat().st_size < 100_000
    for name in ("b.svg", "c.svg", "d.PNG"):
        assert bench.main(["plot", str(a), "--target", "1.3", "--out", str(tmp_path / name)]) == 0
    picture = (tmp_path / "b.svg").read_text()
    assert "target 1.3<" in picture and picture == (tmp_path / "c.svg").read_text()
    assert (tmp_path / "d.PNG").read_bytes().startswith(b"\x89PNG")


def test_plot_compares_tokenizers_by_bits_per_byte(tmp_path, capsys):
    """By default where tokens differ; not where all are alike, or the bytes of one run are not known."""
    pytest.importorskip("matplotlib")
    a, b = run_with_rows(tmp_path / "a", 60, 10), run_with_rows(tmp_path / "b", 60, 10)
    for folder, bytes_per_token in ((a, 1.0), (b, 2.5)):
        path = folder / "metrics.jsonl"
        lines = read_rows(path.read_text())
        for line in lines:
            line |= {"val_bpb": line["val_loss"] / math.log(2) / bytes_per_token} if line.get("val_loss") else {}
        path.write_text("\n".join(map(json.dumps, lines)) + "\n")

    def drawn(*flags):
        assert bench.main(["plot", *map(str, flags), "--out", str(tmp_path / "x.svg")]) == 0
        return [text.text for text in xml.parse(tmp_path / "x.svg").iter("{http://www.w3.org/2000/svg}text")]

    texts = drawn(a, b)
    assert "validation loss (bits per byte)" in texts
    assert {f"a: {1.083333 / math.log(2):.4f}", f"b: {1.083333 / math.log(2) / 2.5:.4f}"} <= set(texts)
    assert "validation loss (nats per token)" in drawn(a, b, "--y", "val_loss")
    assert "validation loss (nats per token)" in drawn(a, a)
    nats = drawn(a, b, ZEN4)  # whose rows have bits, and beside them logs that have none
    assert "validation loss (nats per token)" in nats and "target 1.4697" in nats
    bits = drawn(a, b, ZEN4, "--y", "val_bpb")
    assert "target 1.4697" not in bits and "nanoGPT's recipe has no loss" in capsys.readouterr().out


@pytest.mark.parametrize(
    "flags, said",
    [
        ("", "RUN_OR_RECORD"),
        ("no", "no metrics.jsonl"),
        ("empty", "wait for"),
        ("run --x loss", "--x"),
        ("run --target nan", "not a loss"),
        ("run --out a.pdf", ".svg or .png"),
        ("run --out no/a.svg", "written"),
        ("run --quick", "unrecognized"),
    ],
)
def test_plot_refuses(flags, said, tmp_path, monkeypatch, capsys):
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    for name, steps in (("run", 4), ("empty", 0)):
        run_with_rows(Path(name), steps, 2)
    assert bench.main(["plot", *flags.split()]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and said in error and error.count("\n") == 1
