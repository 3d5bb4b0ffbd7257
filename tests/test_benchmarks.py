"""bench.py: every benchmark in a tiny form; cases that fail, are killed, run out of memory."""

import csv
import json
import math
from functools import partial

import bench_cases
import numpy as np
import pytest

import bench
from benchmarks import experiment, harness, train
from common.errors import run_command
from conftest import make_data, measured, run_forked, tiny_run
from data.shards import check_shard

SIZES = "--device cpu --n_layer 1 --n_embd 32 --n_head 2 --ngram 0 --repeats 2"
SMALL = SIZES + " --seq_len 64 --batch_tokens 512"


def test_cases_are_interleaved_and_what_ends_one_is_its_note():
    cases = [partial(bench_cases.counting_case, start) for start in (0, 10)]
    cases += [bench_cases.killed_case, bench_cases.broken_case, bench_cases.full_case]
    a, b, *failed = harness.measure(cases, 3)
    assert [value["ms"] for value in a["values"]] == [1, 2, 3]
    assert "| 12 (11-13) |" in harness.table("T", [b])
    times = [value["time"] for pair in zip(a["values"], b["values"]) for value in pair]
    assert times == sorted(times)
    killed, broken, full = (row["note"] for row in failed)
    assert killed == "out of memory: killed by the system"
    assert broken == "FAILED: ZeroDivisionError: division by zero"
    assert full.startswith("memory ran out")


@pytest.mark.parametrize(
    "line",
    (
        "frain",
        "--n_layers 2",
        "train --compile",
        "--cases memory --offload optimizer",
        "--cases memory --batch_tokens auto",
        "--init_from a",
        "train --data a b",
        "train --flags=--no_flag",
        "compare",
        "plot",
        "plot nothing.tsv",
        "experiment --flags= --final",
        "experiment --flags=--data=a",
        "experiment --flags=--seed=5",
        "experiment --flags=nowhere",
        "experiment --flags=--no_flag",
        "experiment --flags=--eval_tokens=64",
        "train --data nowhere --flags=--softcap=0 --preset laptop --device cpu",
        "plot a.tsv b.tsv",
        "compare a --cases memory",
        "record a --seed 1",
    ),
)
def test_bench_refuses(line, capsys):
    assert run_command(bench.main, line.split()) == 2
    assert "error: " in capsys.readouterr().err


def test_the_ladder_keeps_what_is_faster(tmp_path, monkeypatch):
    monkeypatch.setattr(train, "step_case", bench_cases.step_case)
    report = measured(tmp_path, "train", SMALL + " --micro_batch 1", code=1)  # the fp8 step fails
    rows = {row["Config"]: row for row in report["train"]}
    assert list(rows) == ["fp32 eager", *(f"+ {name}" for name in train.LADDER)]
    fused, compiled = rows["+ fused attention"], rows["+ compile"]
    assert fused["speedup vs last kept"] == fused["cumulative speedup"] == 2 and "note" not in fused
    assert compiled["speedup vs last kept"] == pytest.approx(1 / 1.5)
    assert compiled["note"] == "slower: not kept" and compiled["tokens/s"] == 512 / 0.015
    assert rows["+ fp8"]["note"] == "FAILED: RuntimeError: no such kernel"
    # The last step has what was kept before
    assert rows["+ full checkpointing"]["flags"] == ["bf16", "blocked", "off", False, "full"]


def test_cases_of_flags_and_lists(tmp_path, monkeypatch):
    rows = measured(tmp_path, "train", SMALL + " --flags=--ngram=3")["train"]
    assert [row["Config"] for row in rows] == ["base", "--ngram=3"] and len(rows[0]["values"]) == 2
    assert rows[1]["speedup vs first"] > 0 and rows[1]["tokens/s"] > 0 and rows[1]["startup, s"] > 0
    monkeypatch.setattr(train, "step_case", bench_cases.step_case)
    rows = measured(tmp_path, "train", SIZES + " --cases attention")["train"]
    assert len(rows) == 9 and [row["speedup vs first"] for row in rows[1:3]] == [2, 2]
    assert rows[3]["micro_batch"] == 8 and "speedup vs first" not in rows[3]
    (_, _, full) = measured(tmp_path, "train", SMALL + " --cases memory")["train"]
    assert full["flags"][-1] == "full"


def test_steps_of_two_ranks(tmp_path):
    (row,) = measured(tmp_path, "train", SMALL + " --ranks 2")["train"]
    assert row["Config"] == "base, --ranks 2" and len(row["values"]) == 2, row
    assert row["micro_batch"] == 4  # half of the sequences
    assert row["efficiency, %"] == pytest.approx(100)


def run(*losses: float, seconds: float = 10.0) -> dict:
    """A run that is evaluated after so many seconds, and again after each time as many."""
    rows = [dict(val_loss=loss, train_time_s=seconds * i) for i, loss in enumerate(losses, 1)]
    return rows[-1] | dict(val_bpb=None, evaluations=rows)


def test_the_time_to_a_loss():
    # The first time that it is as low counts, whatever follows; halfway from 3.0 to 2.0
    noisy = run(4.0, 3.0, 3.5, 2.0, 2.5)
    assert [experiment.time_to(noisy, loss) for loss in (4.0, 3.0, 2.5, 2.0)] == [10, 20, 35, 40]
    # Not known: the edit has passed it before it was evaluated
    assert math.isnan(experiment.speedup(run(4.0, 2.0), run(1.9)))


def scores(loss: float = 5.0, **ratios: list[float]) -> list[dict]:
    """Rows of an experiment whose edit has these ratios of the base's loss, by dataset."""
    pairs = {}
    for data, of_runs in ratios.items():
        pairs[data] = [dict(base=run(loss), edit=run(loss * ratio)) for ratio in of_runs]
    return experiment.score_rows(pairs)


def test_the_score_of_an_experiment():
    a, b, every = scores(a=[0.9, 0.8], b=[0.99])
    assert a["score"] == pytest.approx(math.sqrt(0.72))
    assert b["edit, nats/token"] == pytest.approx(4.95)
    assert every["score"] == pytest.approx(math.sqrt(0.99 * a["score"]))  # datasets weigh the same
    logs = np.log([0.9, 0.8, 0.99])
    t = -logs.mean() / (logs.std(ddof=1) / math.sqrt(3))
    assert every[experiment.P] == pytest.approx((1 - t / math.sqrt(2 + t * t)) / 2)  # of 2 degrees
    for ratios, verdict in (
        ([0.9, 0.91, 0.92], "keep"),
        ([1.1, 1.11, 1.12], "discard"),
        ([0.9, 0.9], "discard"),
        ([0.8, 1.19, 1.0], "discard"),
    ):
        assert experiment.verdict_of(scores(a=ratios)[-1]) == verdict


def test_a_ledger_of_experiments(tmp_path, capsys):
    ledger, order = tmp_path / "experiments.tsv", tmp_path / "order.txt"
    sides = {}
    for name in ("base", "edit"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "train_gpt.py").write_text(bench_cases.FAKE_TRAINER)
        sides[name] = f"--flags={tmp_path}/{name} --softcap="
    with open(tmp_path / "edit" / "train_gpt.py", "a") as page:
        page.write("\nONE = 1\n# and a comment\n")
    base, edit = sides["base"] + "1", sides["edit"]
    texts = [str(make_data(tmp_path / name)) for name in "ab"]
    flags = f"{SMALL} --max_steps 20 --eval_every 2 --ledger {ledger} --data".split() + texts

    def ended(*more: str) -> tuple[int, str]:
        code = run_command(bench.main, ["experiment", *flags, *more])
        return code, capsys.readouterr().out

    more = ["--describe", "one\tmore", "--json", str(tmp_path / "out.json")]
    assert "keep (keep: a score below 1 with p < 0.05" in ended(base, edit + "2", *more)[1]
    ran = order.read_text().splitlines()
    assert ran[:3] == ["0 0_a 1 ", "0 0_a 2 fp32", "0 1_b 1 fp32"]  # the first run settles auto
    assert ran[4:] == ["1 0_a 2 fp32", "1 0_a 1 fp32", "1 1_b 2 fp32", "1 1_b 1 fp32"]
    a, b, _ = json.loads((tmp_path / "out.json").read_text())["experiment"]
    # To 4, where the base ends after a second
    assert a["speedup"] == b["speedup"] == pytest.approx(math.sqrt(2 * 2.2))
    assert len(b["runs"]) == 2 and len(b["runs"][1]["edit"]["evaluations"]) == 10
    code, out = ended(base, edit + "1 --adam_lr=9")
    assert code == 1 and "FAILED: the edit: it diverged" in out
    assert ended(base + " --adam_lr=9", edit + "1")[0] == 2
    order.unlink()
    assert "holdout: 1." in ended("--final", base + " --dtype=bf16", edit + "2")[1]
    # A given dtype is its side's alone; the other side's first run settles auto
    assert order.read_text().splitlines()[:3] == ["0 0_a 1 bf16", "0 0_a 2 ", "0 1_b 1 bf16"]

    with open(ledger) as file:
        rows = list(csv.DictReader(file, delimiter="\t"))
    found = [[row[key] for key in ("verdict", "score", "final")] for row in rows]
    score = f"{math.sqrt(3 / 4 * 2.8 / 4):.5g}"  # the losses are 4, and 3 and 2.8 with two seeds
    assert found == [["keep", score, ""], ["crash", "", ""], ["keep", score, "1"]]
    difference = (tmp_path / "experiments" / f"{rows[0]['edit']}.diff").read_text()
    assert "+ONE = 1\n" in difference and difference.count("\n+") == 4
    pytest.importorskip("matplotlib")
    assert run_command(bench.main, ["plot", str(ledger)]) == 0
    assert (tmp_path / "experiments.svg").stat().st_size


def test_an_experiment_of_the_trainer(data, tmp_path, monkeypatch):
    def run_script(path, *argv):
        assert run_forked(tmp_path, path, *argv).code == 0

    monkeypatch.setattr(experiment, "run_python", run_script)
    flags = f"{SMALL} --repeats 1 --max_steps 12 --eval_every 3 --eval_tokens 2048 --data {data}"
    flags += " --dtype fp32 --attn sdpa --flags=--adam_lr=1e-9 --flags="
    row, every = measured(tmp_path, "experiment", flags)["experiment"]
    base, edit = row["runs"][0]["base"], row["runs"][0]["edit"]
    assert base["val_loss"] == pytest.approx(math.log(320), abs=0.3)
    assert edit["val_loss"] < base["val_loss"] - 0.3 and every["score"] == row["score"] < 1
    assert [len(run["evaluations"]) for run in (base, edit)] == [4, 4]


def test_the_holdout_is_the_other_half(data, tmp_path):
    halves = []
    for is_final in (False, True):
        folder = tmp_path / str(is_final)
        experiment.write_part(data, is_final, folder)
        n_tokens, _ = check_shard(folder / "a_val_0.bin")
        halves.append((folder / "a_val_0.bin").read_bytes()[1024:])
        assert len(halves[-1]) == 2 * n_tokens
        shard = "a_train_1.bin"
        assert (folder / shard).read_bytes() == (data / shard).read_bytes()
    assert b"".join(halves) == (data / "a_val_0.bin").read_bytes()[1024:]


def test_a_table_and_a_picture_of_runs(data, tmp_path):
    a, b = tmp_path / "a", tmp_path / "b"
    for folder, seed, width in ((a / "seed_0", 0, 32), (a / "seed_1", 1, 32), (b, 0, 64)):
        tiny_run(folder, data=data, seed=seed, n_embd=width)
    with open(b / "metrics.jsonl", "a") as file:
        file.write('{"step": 30, "val')  # torn
    log = b / "log.txt"
    text = log.read_text().replace('"init_from": ""', '"init_from": "x"', 1)
    log.write_text(text.replace('"given": [', '"given": ["init_from", '))
    rows = measured(tmp_path, "compare", f"{a} {b}")["compare"]
    summary = json.loads((b / "summary.json").read_text())
    keys = ("val_loss", "val_bpb", "step", "tokens", "train_time_s", "machine")
    assert {key: rows[2][key] for key in keys} == {key: summary[key] for key in keys}
    assert [row["flags"] for row in rows[1:]] == [
        "--seed 1 --n_embd 32",
        "--init_from x --seed 0 --n_embd 64",
    ]

    pytest.importorskip("matplotlib")
    command = f"plot {a} {b} --x tokens --target 1.4697".split()
    assert run_command(bench.main, command) == 0
    assert (a / "val_loss.svg").read_bytes().startswith(b"<?xml")
    assert run_command(bench.main, [*command, "--label", "one of two"]) == 2
