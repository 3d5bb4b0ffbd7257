"""bench.py: every benchmark in a tiny form; cases that fail, are killed, run out of memory."""

import csv
import json
import math
import re
from functools import partial
from pathlib import Path

import bench_cases
import numpy as np
import pytest

import bench
from benchmarks import attention, experiment, harness, ladder, plot
from common.errors import run_command
from conftest import ROOT, measured, run_ranks, tiny_run

SIZES = "--device cpu --n_layer 1 --n_embd 32 --n_head 2 --ngram 0 --repeats 2"
SMALL = SIZES + " --seq_len 64 --batch_tokens 512"


def test_cases_are_interleaved():
    cases = [partial(bench_cases.counting_case, start) for start in (0, 10)]
    a, b = harness.measure(cases, 3)
    assert [value["count"] for value in a["values"]] == [1, 2, 3]
    assert [value["count"] for value in b["values"]] == [11, 12, 13]
    assert "| 12 (11-13) |" in harness.table("T", [b])
    times = [value["time"] for pair in zip(a["values"], b["values"]) for value in pair]
    assert times == sorted(times)


def test_what_ends_a_case_is_its_note():
    cases = [bench_cases.killed_case, bench_cases.broken_case, bench_cases.full_case]
    *failed, well = harness.measure([*cases, partial(bench_cases.counting_case, 0)], 2)
    notes = [row["note"] for row in failed]
    assert notes[0] == "out of memory: killed by the system"
    assert notes[1] == "FAILED: ZeroDivisionError: division by zero"
    assert notes[2].startswith("memory ran out")
    assert all(len(row) == 1 for row in failed) and len(well["values"]) == 2


def test_bench_refuses(capsys):
    for argv in (
        "frain",
        "--n_layers 2",
        "train --compile",
        "profile --minutes 5",
        "train --data a b",
        "plot",
    ):
        assert run_command(bench.main, argv.split()) == 2 and capsys.readouterr().err.startswith(
            "error: "
        ), argv


def test_the_ladder_keeps_what_is_faster(tmp_path, monkeypatch):
    monkeypatch.setattr(ladder, "step_case", bench_cases.step_case)
    report = measured(tmp_path, "train", SMALL + " --micro_batch 1", code=1)  # the fp8 step fails
    rows = {row["Config"]: row for row in report["train"]}
    assert list(rows) == ["fp32 eager", *(f"+ {name}" for name in [*ladder.LADDER][1:])]
    fused, compiled = rows["+ fused attention"], rows["+ compile"]
    assert fused["speedup vs last kept"] == fused["cumulative speedup"] == 2 and "note" not in fused
    assert compiled["speedup vs last kept"] == pytest.approx(1 / 1.5)
    assert compiled["note"] == "slower: not kept" and compiled["tokens/s"] == 512 / 0.015
    assert rows["+ fp8"]["note"] == "FAILED: RuntimeError: no such kernel"
    stack = dict(dtype="bf16", attn="blocked", compile="off", fp8=False)
    assert stack.items() <= report["train"][-1]["flags"].items()


def run(*losses: float, seconds: float = 10.0) -> dict:
    """A run that is evaluated after so many seconds, and again after each time as many."""
    rows = [dict(val_loss=loss, train_time_s=seconds * i) for i, loss in enumerate(losses, 1)]
    return rows[-1] | dict(val_bpb=None, evaluations=rows)


def test_the_speedup_to_an_equal_loss():
    base, lower = run(4.0, 3.0, 2.0), run(3.5, 2.5, 1.0)
    # To 2.0, which both reach: the base at its end, the edit between its second and third row
    seconds = 20 + 10 / 3
    assert experiment.speedup(base, lower) == pytest.approx(30 / seconds)
    assert experiment.speedup(lower, base) == pytest.approx(seconds / 30)
    # The first time that it is as low counts, whatever follows; halfway from 3.0 to 2.0
    noisy = run(4.0, 3.0, 3.5, 2.0, 2.5)
    assert [experiment.time_to(noisy, loss) for loss in (4.0, 3.0, 2.5, 2.0)] == [10, 20, 35, 40]
    # Not known: the edit has passed it before it was evaluated
    assert math.isnan(experiment.speedup(base, run(1.9)))


def pairs(*ratios: float, bpb: float = 2.0) -> list[dict]:
    """Runs whose edit has these ratios of the base's bpb, in that part of its time."""
    found = []
    for ratio in ratios:
        base, edit = (run(9.0, seconds=seconds) for seconds in (10.0, 10.0 * ratio))
        found.append(dict(base=base | dict(val_bpb=bpb), edit=edit | dict(val_bpb=bpb * ratio)))
    return found


def test_the_score_of_an_experiment():
    a, b, every = experiment.score_rows(dict(a=pairs(0.9, 0.8), b=pairs(0.99, bpb=5.0)))
    assert a["score"] == pytest.approx(math.sqrt(0.72)) and b["edit"] == pytest.approx(4.95)
    assert every["score"] == pytest.approx(math.sqrt(0.99 * a["score"]))  # datasets weigh the same
    assert every["speedup"] == pytest.approx(1 / every["score"])  # as these runs are made
    logs = np.log([0.9, 0.8, 0.99])
    t = -logs.mean() / (logs.std(ddof=1) / math.sqrt(3))
    assert every["p"] == pytest.approx((1 - t / math.sqrt(2 + t * t)) / 2)  # of 2 degrees
    verdicts = [
        experiment.verdict_of(experiment.score_rows(dict(a=pairs(*ratios)))[-1])
        for ratios in ((0.9, 0.91, 0.92), (1.1, 1.11, 1.12), (0.9, 0.9), (0.8, 1.19, 1.0))
    ]
    assert verdicts == ["keep", "discard", "discard", "discard"]
    # An edit that masks targets has no bytes: both are compared in nats
    masked = [dict(base=run(1.5) | dict(val_bpb=2.2), edit=run(1.5))]
    assert experiment.score_rows(dict(a=masked))[0]["score"] == 1


def test_a_ledger_of_experiments(tmp_path, capsys):
    for name in ("base", "edit"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "train_gpt.py").write_text(bench_cases.FAKE_TRAINER)
    base, edit = (f"--flags={tmp_path}/{name} --softcap=" for name in ("base", "edit"))
    page = tmp_path / "edit" / "train_gpt.py"
    ledger = tmp_path / "experiments.tsv"
    flags = f"{SMALL} --max_steps 20 --eval_every 2 --ledger {ledger} --data a b".split()
    assert run_command(bench.main, ["experiment", *flags, "--flags=nowhere"]) == 2
    assert run_command(bench.main, ["experiment", *flags, f"{base}1", f"{edit}1"]) == 0
    assert "| all | 1 |" in capsys.readouterr().out
    page.write_text(page.read_text() + "\nONE = 1\n# and a comment\n")
    more = ["--describe", "one\tmore", "--json", str(tmp_path / "out.json")]
    (tmp_path / "order.txt").unlink()
    assert run_command(bench.main, ["experiment", *flags, f"{base}1", f"{edit}2", *more]) == 0
    assert "keep (keep: a score below 1 with p < 0.05" in capsys.readouterr().out
    order = (tmp_path / "order.txt").read_text().splitlines()
    assert order[:3] == ["0 a 1 ", "0 a 2 fp32", "0 b 1 fp32"]  # the first run settles auto
    assert order[4:] == ["1 a 2 fp32", "1 a 1 fp32", "1 b 2 fp32", "1 b 1 fp32"]
    a, b, _ = json.loads((tmp_path / "out.json").read_text())["experiment"]
    # To 4, where the base ends after a second
    assert a["speedup"] == b["speedup"] == pytest.approx(math.sqrt(2 * 2.2))
    assert len(b["runs"]) == 2 and len(b["runs"][1]["edit"]["evaluations"]) == 10
    assert run_command(bench.main, ["experiment", *flags, f"{base}1", f"{edit}1 --adam_lr=9"]) == 0
    assert "the edit fails: it diverged" in capsys.readouterr().out
    assert run_command(bench.main, ["experiment", *flags, f"{base}1 --adam_lr=9", f"{edit}1"]) == 2

    with open(ledger) as file:
        rows = list(csv.DictReader(file, delimiter="\t"))
    found = [[row[key] for key in ("verdict", "score", "code_tokens")] for row in rows]
    score = f"{math.sqrt(3 / 4 * 2.8 / 4):.5g}"  # the losses are 4, and 3 and 2.8 with two seeds
    assert found == [["discard", "1", "0"], ["keep", score, "3"], ["crash", "", "3"]]
    difference = (tmp_path / "experiments" / f"{rows[1]['edit']}.diff").read_text()
    assert "+ONE = 1\n" in difference and difference.count("\n+") == 4
    pytest.importorskip("matplotlib")
    assert run_command(bench.main, ["plot", str(ledger), "--out", str(tmp_path / "a.svg")]) == 0


def test_an_experiment_of_the_trainer(data, tmp_path):
    flags = SMALL + f" --repeats 1 --max_steps 12 --eval_every 3 --eval_tokens 2048 --data {data}"
    flags += " --dtype fp32 --attn sdpa"
    report = measured(tmp_path, "experiment", flags + " --flags=--adam_lr=1e-9 --flags=")
    row, every = report["experiment"]
    base, edit = row["runs"][0]["base"], row["runs"][0]["edit"]
    assert base["val_loss"] == pytest.approx(math.log(320), abs=0.3)
    assert edit["val_loss"] < base["val_loss"] - 0.3 and every["score"] == row["score"] < 1
    assert [len(run["evaluations"]) for run in (base, edit)] == [4, 4]


def test_bench_memory(tmp_path):
    sizes = "--device cpu --n_layer 3 --n_embd 64 --n_head 2 --seq_len 64 --ngram 2"
    sizes += " --ngram_rows 512 --vocab_size 1024 --batch_tokens 2048 --dtype fp32 --attn sdpa"
    rows = measured(tmp_path, "memory", sizes)["memory"]
    adam, muon = 4 * (3 * 1024 * 64 + 3 * 2 * 16) / 2**20, 4 * 3 * 12 * 64**2 / 2**20
    table = 4 * 512 * 64 / 2**20
    for row in rows:
        assert row["weights"] == pytest.approx(adam + muon + table)
        # Of the table, the rows that were read
        assert adam + muon < row["gradients"] <= row["weights"]
        optimizer = 2 * adam + muon + table / 64
        assert row["optimizer"] == pytest.approx(optimizer, rel=1e-3) and row["transient"] > 0
        parts = ("weights", "gradients", "optimizer", "activations", "transient")
        assert row["total at peak"] == pytest.approx(sum(row[part] for part in parts))
    kept = {row["checkpointing"]: row["activations"] for row in rows}
    assert kept["none"] > 1.3 * kept["selective"] and kept["selective"] > 1.2 * kept["full"]


def test_bench_profile(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    rows = measured(tmp_path, "profile", SMALL + " --dtype fp32 --attn sdpa")["profile"]
    spent = {row["category"]: row["ms/step"] for row in rows}
    kinds = ["attention", "elementwise", "matmuls", "optimizer"]
    assert set(spent) == {*kinds, "communication", "unattributed (CPU overhead, idle)"}
    assert sum(row["% of step"] for row in rows) == pytest.approx(100)
    assert all(spent[kind] > 0 for kind in kinds)
    (trace,) = tmp_path.glob("*/trace.json")
    assert json.loads(trace.read_text())["traceEvents"]


def test_bench_scaling_of_torchruns_ranks(tmp_path):
    argv = ["scaling", *SMALL.split(), "--json", tmp_path / "out.json"]
    done = run_ranks(tmp_path, ROOT / "bench.py", *argv)
    assert done.codes == [0, 0], done.stderr
    (row,) = json.loads((tmp_path / "out.json").read_text())["scaling"]
    assert (row["ranks"], row["tokens/step"], len(row["values"])) == (2, 512, 2)
    assert row["exposed all-reduce, % of step"] < 100 and "### Scaling" not in done.stdout[0]


def test_bench_scaling_starts_ranks(tmp_path, monkeypatch):
    started = []

    def fake(*argv, env):
        flags = dict(re.findall(r"--(\w+)=(\S+)", " ".join(map(str, argv))))
        names = ("nproc_per_node", "batch_tokens", "micro_batch")
        case = [int(flags[name]) for name in names] + [int(env["OMP_NUM_THREADS"])]
        started.append(case)
        if case[1] == 1024:
            raise harness.RunError("no room")
        row = {"ranks": case[0], "tokens/s": 1000.0 if case[0] == 1 else 1800.0}
        Path(flags["json"]).write_text(json.dumps(dict(scaling=[row])))

    monkeypatch.setattr("benchmarks.scaling.run_python", fake)
    monkeypatch.setattr("benchmarks.scaling.cpu_cores", lambda: 4)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    one, strong, weak = measured(tmp_path, "scaling", SMALL)["scaling"]
    assert started == [[1, 512, 4, 2], [2, 512, 4, 2], [2, 1024, 4, 2]]
    assert one["efficiency, %"] == 100 and strong["efficiency, %"] == pytest.approx(90)
    assert weak["note"] == "no room"


def test_bench_attention(tmp_path, monkeypatch):
    monkeypatch.setattr(attention, "BACKENDS", ("naive", "sdpa", "varlen"))
    monkeypatch.setattr(attention, "CPU_LENGTHS", (256, 512))
    causal = attention.VARIANTS["causal"]
    monkeypatch.setattr(
        attention, "VARIANTS", dict(causal=causal, window=causal | dict(window="S"))
    )
    rows = measured(tmp_path, "attention", SIZES)["attention"]
    assert len(rows) == 2 * 2 * 3
    peaks = {}
    for row in rows:
        assert ("backward, ms" not in row) == (row["backend"] == "varlen")
        if (row["T"], row["mask"]) == (512, "causal"):
            peaks[row["backend"]] = row.get("peak MiB")
    assert peaks["sdpa"] < peaks["naive"]  # the scores


ZEN4 = ROOT / "records/laptop/2026-11-21-zen4_shakespeare-1.4697"


def test_nanogpts_log_has_the_trainers_clock():
    curves = plot.read_curves([str(ZEN4)])
    (name,) = [name for name in curves if "nanoGPT" in name]
    rows = curves[name][0]
    (row,) = [row for row in rows if "val_loss" in row]  # without step 0
    assert plot.points(rows, "step", "train_loss").shape == (2, 2001)
    assert (row["step"], row["val_loss"], row["tokens"]) == (2000, 1.8802, 1536000)
    assert row["train_time_s"] == pytest.approx(81.93, abs=0.005)  # in the log's first line


def test_plot_of_a_run_and_a_record(data, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    tiny_run(tmp_path / "run", data=str(data), eval_every=5)
    with open(tmp_path / "run" / "metrics.jsonl", "a") as file:
        file.write('{"step": 30, "val')  # torn
    out = tmp_path / "a.svg"
    command = f"plot {tmp_path}/run {ZEN4} --x tokens --target 1.4697 --out {out}"
    assert run_command(bench.main, command.split()) == 0
    assert "over tokens" in capsys.readouterr().out and out.read_bytes().startswith(b"<?xml")
    assert run_command(bench.main, ["plot", str(tmp_path)]) == 2
