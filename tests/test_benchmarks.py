"""bench.py: every benchmark in a tiny form, and what its cases may do.

They may fail, be killed, and run out of memory.
"""

import gzip
import json
import math
from functools import partial
from pathlib import Path

import bench_cases
import pytest
import torch

import bench
from benchmarks import attention, harness, ladder, loss, plot
from conftest import ROOT, measured, run_python, tiny_run
from model import attention as attention_op
from model import may_attend
from ops.attention import attention_mask
from records.check import t_test

SIZES = "--device cpu --n_layer 1 --n_embd 32 --n_head 2 --quick --repeats 2"
SMALL = SIZES + " --seq_len 64 --batch_tokens 512"


def numbers_are_finite(rows: list[dict]) -> None:
    for row in rows:
        for key, value in row.items():
            assert not isinstance(value, float) or math.isfinite(value), (key, row)
            if f"{key}_min" in row:
                assert row[f"{key}_min"] <= value <= row[f"{key}_max"], (key, row)


def test_cases_are_interleaved():
    cases = [partial(bench_cases.counting_case, start) for start in (0, 10)]
    a, b = harness.measure(cases, 3)
    assert [value["count"] for value in a["values"]] == [1, 2, 3]
    assert [value["count"] for value in b["values"]] == [11, 12, 13]
    assert (b["count"], b["count_min"], b["count_max"]) == (12, 11, 13)
    times = [a["started"], b["started"]]
    for pair in zip(a["values"], b["values"]):
        times += [value["time"] for value in pair]
    assert times == sorted(times)


def test_what_ends_a_case_is_its_note():
    cases = [bench_cases.killed_case, bench_cases.broken_case, bench_cases.full_case]
    *failed, well = harness.measure([*cases, partial(bench_cases.counting_case, 0)], 2)
    notes = [row["note"] for row in failed]
    assert notes[:2] == [
        "out of memory: killed by the system",
        "FAILED: ZeroDivisionError: division by zero",
    ]
    assert (
        notes[2].startswith("memory ran out")
        and all(len(row) == 1 for row in failed)
        and len(well["values"]) == 2
    )


def test_a_table_has_what_its_rows_have():
    rows = [
        dict(a="x|y", note="last", ms=1234.5, ms_min=1.0, ms_max=2000.0),
        dict(a="z", ms=0.12345, hidden=[1]),
    ]
    lines = harness.table("Title", rows).splitlines()[2:6]
    assert lines[0] == "| a | ms | note |" and lines[3] == "| z | 0.1235 |  |"
    assert lines[2] == "| x\\|y | 1,234 (1-2,000) | last |"


def test_bench_refuses(capsys):
    for argv in (
        "frain",
        "--n_layers 2",
        "train --compile",
        "profile --minutes 5",
        "loss --json no/x.json",
        "plot",
    ):
        assert bench.main(argv.split()) == 2 and capsys.readouterr().err.startswith("error: "), argv


def test_the_ladder_keeps_what_is_faster(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(ladder, "step_case", bench_cases.step_case)
    report = measured(tmp_path, "train", SMALL + " --micro_batch 1", code=1)  # the fp8 step fails
    rows = {row["Config"]: row for row in report["train"]}
    assert list(rows) == ["fp32 eager", *(f"+ {name}" for name in [*ladder.LADDER][1:])]
    fused, compiled = rows["+ fused attention"], rows["+ compile"]
    assert fused["speedup vs last kept"] == fused["cumulative speedup"] == 2 and "note" not in fused
    assert (
        compiled["speedup vs last kept"] == pytest.approx(1 / 1.5)
        and compiled["note"] == "slower: not kept"
    )
    assert (
        compiled["cumulative speedup"] == pytest.approx(2 / 1.5)
        and rows["+ compile"]["tokens/s"] == 512 / 0.015
    )
    assert (
        rows["+ fp8"]["note"] == "FAILED: RuntimeError: no such kernel"
        and not rows["+ fp8"]["ms/step"]
    )
    stack = report["stack"]
    assert (stack["dtype"], stack["attn"], stack["compile"], stack["fp8"]) == (
        "bf16",
        "blocked",
        "off",
        False,
    )
    without = {row["Config"].removeprefix("without "): row["slowdown"] for row in report["without"]}
    assert without["all of them"] == without["fused attention"] == 2 and without["bf16"] == 1
    assert "compile" not in without and "MFU (measured matmul peak)" in capsys.readouterr().out


def test_steps_of_the_ladder_compute_the_same(tmp_path, monkeypatch):
    names = ("fused attention", "chunked loss", "auto micro-batch", "full checkpointing")
    monkeypatch.setattr(
        ladder, "LADDER", {"TF32": {}} | {name: ladder.LADDER[name] for name in names}
    )
    rows = measured(tmp_path, "train", SMALL + " --micro_batch 2")["train"]
    numbers_are_finite(rows)
    assert [row["Config"] for row in rows] == ["fp32 eager", *(f"+ {name}" for name in names)]
    for row in rows:
        assert (
            row["losses"] == pytest.approx(rows[0]["losses"], rel=1e-4)
            and row["losses"][2] < row["losses"][0]
        )
        assert (
            row["tokens/s"] * row["ms/step"] / 1000 == pytest.approx(512) and row["peak MiB"] > 50
        )
        assert 0 < row["MFU (measured matmul peak)"] < 1
    assert [row["micro_batch"] for row in rows[:3]] == [2, 2, 2] and rows[3]["micro_batch"] == 8


def run(*losses: float, seconds: float = 1.0) -> dict:
    """A run that is evaluated every ten steps, each of which takes so many seconds."""
    rows = [
        dict(step=10 * i, train_time_s=seconds * i, val_loss=x) for i, x in enumerate(losses, 1)
    ]
    return rows[-1] | dict(evaluations=rows)


def test_time_to_a_loss():
    found, cases = (
        run(4.0, 3.0, 2.0, 2.5),
        ((2.25, "train_time_s", 2.75), (2.25, "step", 27.5), (4.5, "step", 10)),
    )
    assert all(
        loss.time_to(found, target, key) == pytest.approx(want) for target, key, want in cases
    )
    assert loss.time_to(found, 1.0, "step") is None


def test_sides_are_compared_seed_by_seed():
    base = [run(4.0, 3.0, 2.0)] * 3
    quicker = [run(4.0, 3.0, 2.0, seconds=math.exp(log)) for log in (-1, -2, -3)]
    lower, higher = (
        [run(3.5, 2.5, 1.0)] * 3,
        [run(4.5, 4.0, 3.5), run(4.0, 3.0, 1.5), run(4.5, 4.0, 3.5)],
    )
    a, b, c, d = loss.compare_sides(dict(a=base, b=quicker, c=lower, d=higher))
    assert (a["steps to target"], a["seeds at target"], a["deviation"]) == (
        30,
        "3 of 3",
        0,
    ) and "p (time)" not in a
    assert b["speedup (time)"] == pytest.approx(math.exp(2)) and b[
        "time to target"
    ] == pytest.approx(3 * math.exp(-2))
    assert b["p (time)"] == pytest.approx(
        (1 - math.sqrt(12 / 14)) / 2
    )  # Student's t of 2 degrees, in closed form
    assert b["speedup (steps)"] == 1 and b["p (steps)"] == 1  # as many steps, only quicker ones
    assert c["speedup (steps)"] == pytest.approx(30 / (20 + 10 / 3))  # at 2.0, which both reach
    assert d["seeds at target"] == "1 of 3" and d["speedup (steps)"] < 1 and d["p (steps)"] > 0.5


def test_loss_interleaves_sides_of_checkouts(tmp_path, capsys):
    (tmp_path / "train_gpt.py").write_text(bench_cases.FAKE_TRAINER)
    sides = [f"{tmp_path} --softcap={fall}" for fall in (1, 2)]
    flags = [f"--flags={side}" for side in sides] + [
        "--json",
        str(tmp_path / "out.json"),
        "--max_steps",
        "20",
    ]
    assert bench.main(["loss", *SMALL.split(), *flags]) == 0
    order = (tmp_path / "order.txt").read_text().splitlines()
    assert order == ["0 1 ", "0 2 fp32", "1 2 fp32", "1 1 fp32"]  # the first run settles auto
    report = json.loads((tmp_path / "out.json").read_text())
    base, fast = report["loss"]
    assert (base["side"], base["final val_loss"], base["deviation"]) == (sides[0], 4, 0)
    assert fast["final val_loss"] == pytest.approx(2.9) and fast["deviation"] == pytest.approx(
        0.2 / math.sqrt(2)
    )
    assert fast["speedup (time)"] == fast["speedup (steps)"] == pytest.approx(math.sqrt(2 * 2.2))
    assert (
        fast["p (time)"] == pytest.approx(t_test([-math.log(2), -math.log(2.2)], 0.0))
        and fast["p (time)"] < 0.05
    )
    assert (
        fast["time to target"] == pytest.approx((1 / 2 + 1 / 2.2) / 2)
        and fast["seeds at target"] == "2 of 2"
    )
    assert len(report["runs"][sides[0]][0]["evaluations"]) == 20
    capsys.readouterr()
    assert (
        bench.main(
            ["loss", *SMALL.split(), f"--flags={tmp_path} --softcap=1 --adam_lr=9", *flags[:1]]
        )
        == 1
    )
    assert capsys.readouterr().err.splitlines()[-1] == "error: it diverged"


def test_loss_of_the_trainer(data, tmp_path):
    flags = f"{SMALL} --repeats 1 --max_steps 20 --eval_tokens 2048 --data {data}"
    argv = [
        *flags.split(),
        "--flags=--muon_lr 1e-9 --adam_lr 1e-9",
        "--json",
        str(tmp_path / "out.json"),
    ]
    assert bench.main(["loss", *argv]) == 0
    ours, still = json.loads((tmp_path / "out.json").read_text())["loss"]
    assert (ours["side"], still["side"]) == ("defaults", "--muon_lr 1e-9 --adam_lr 1e-9")
    assert (
        still["final val_loss"] == pytest.approx(math.log(320))
        and ours["final val_loss"] < math.log(320) - 0.5
    )


def test_bench_memory(tmp_path):
    sizes = "--device cpu --n_layer 3 --n_embd 64 --n_head 2 --seq_len 64 --ngram 0"
    sizes += " --vocab_size 1024 --quick"
    rows = measured(tmp_path, "memory", sizes)["memory"]
    numbers_are_finite(rows)
    adam, muon = 4 * (3 * 1024 * 64 + 3 * 2 * 64) / 2**20, 4 * 3 * 12 * 64**2 / 2**20
    for row in rows:
        assert row["weights"] == row["gradients"] == pytest.approx(adam + muon)
        assert row["optimizer"] == pytest.approx(2 * adam + muon, rel=1e-3) and row["transient"] > 0
        parts = ("weights", "gradients", "optimizer", "activations", "transient")
        assert row["total at peak"] == pytest.approx(sum(row[part] for part in parts))
    kept = {row["checkpointing"]: row["activations"] for row in rows}
    assert kept["none"] > 1.3 * kept["selective"] and kept["selective"] > 1.2 * kept["full"]


def test_memory_is_that_of_what_is_allocated():
    held, peak, _ = harness.measure_memory(
        torch.device("cpu"), lambda: torch.zeros(1 << 20).exp().sum(0, keepdim=True)
    )
    assert held < 1 << 10 and peak == pytest.approx(2 * 4 << 20, rel=0.01)


def test_bench_data(data, tmp_path):
    (row,) = measured(tmp_path, "data", SMALL + f" --data {data}")["data"]
    numbers_are_finite([row])
    assert (
        0 <= row["data wait, % of step"] < 100 and row["loader alone, tokens/s"] > row["tokens/s"]
    )
    assert row["tokens/s"] * row["ms/step"] / 1000 == pytest.approx(512)


def test_bench_profile(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    report = measured(tmp_path, "profile", SMALL + " --dtype fp32 --attn sdpa")
    spent = {row["category"]: row["ms/step"] for row in report["profile"]}
    unattributed = "unattributed (CPU overhead, idle)"
    assert sorted(spent) == [
        "attention",
        "communication",
        "elementwise",
        "matmuls",
        "optimizer",
        unattributed,
    ]
    assert sum(spent.values()) == pytest.approx(report["step_ms"])
    assert all(spent[kind] > 0 for kind in ("attention", "elementwise", "matmuls", "optimizer"))
    assert json.loads(Path(report["trace"]).read_text())["traceEvents"]


def test_bench_scaling_of_torchruns_ranks(tmp_path):
    torchrun = ("-m", "torch.distributed.run", "--nproc_per_node=2", "--standalone")
    done = run_python(
        *torchrun, "bench.py", "scaling", *SMALL.split(), "--json", tmp_path / "out.json"
    )
    assert done.returncode == 0, done.stderr
    (row,) = json.loads((tmp_path / "out.json").read_text())["scaling"]
    assert (row["Config"], row["ranks"], row["tokens/step"]) == ("as given", 2, 512)
    assert row["exposed all-reduce, % of step"] < 100 and "### Scaling" not in done.stdout


def test_bench_scaling_starts_ranks(tmp_path, monkeypatch):
    started = []

    def fake(*argv, env):
        flags = dict(
            part[2:].split("=") for part in argv if str(part).startswith("--") and "=" in part
        )
        ranks = int(flags["nproc_per_node"])
        started.append(
            (ranks, int(flags["batch_tokens"]), flags["micro_batch"], env["OMP_NUM_THREADS"])
        )
        if started[-1][:2] == (2, 1024):
            raise harness.RunError("no room")
        row = {
            "Config": "as given",
            "ranks": ranks,
            "tokens/s": 1000.0 * ranks * (0.9 if ranks > 1 else 1),
        }
        Path(flags["json"]).write_text(json.dumps(dict(scaling=[row])))

    monkeypatch.setattr("benchmarks.scaling.run_python", fake)
    monkeypatch.setattr("benchmarks.scaling.cpu_cores", lambda: 4)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    one, strong, weak = measured(tmp_path, "scaling", SMALL)["scaling"]
    assert started == [(1, 512, "4", "2"), (2, 512, "4", "2"), (2, 1024, "4", "2")]
    assert (
        one["efficiency, %"] == 100
        and strong["efficiency, %"] == pytest.approx(90)
        and weak["note"] == "no room"
    )


def test_explicit_attention_is_attention():
    q, k, v = torch.randn(3, 2, 2, 50, 8, generator=torch.manual_seed(0))
    torch.testing.assert_close(
        attention.naive_attention(q, k, v, None), attention_op(q, k, v, None, "sdpa")
    )
    mask = attention_mask("sdpa", may_attend, torch.zeros(2, 50, dtype=torch.long), 7, None)
    torch.testing.assert_close(
        attention.naive_attention(q, k, v, mask), attention_op(q, k, v, mask, "sdpa")
    )


def test_bench_attention(tmp_path, monkeypatch):
    monkeypatch.setattr(attention, "BACKENDS", ("naive", "blocked", "sdpa", "varlen"))
    rows = measured(tmp_path, "attention", SIZES)["attention"]
    numbers_are_finite(rows)
    assert len(rows) == 2 * 3 * 4 and {
        row["backend"] for row in rows if "backward, ms" not in row
    } == {"varlen"}
    assert all("CUDA only" in row["note"] for row in rows if row["backend"] == "varlen")
    assert {row["speedup vs naive"] for row in rows if row["backend"] == "naive"} == {1}
    more = {
        row["backend"]: row.get("peak MiB")
        for row in rows
        if (row["T"], row["mask"]) == (512, "causal")
    }
    assert more["sdpa"] < more["naive"]  # the scores


def test_nanogpts_log_has_the_trainers_clock():
    log = gzip.open(
        ROOT / "records/laptop/2026-11-21-zen4_shakespeare-1.4697/baseline/seed_0.txt.gz", "rt"
    ).read()
    rows = plot.read_nanogpt(log)
    (row,) = (row for row in rows if "val_loss" in row)  # without step 0
    assert len(rows) == 2002 and plot.points(rows, "step", "train_loss").shape == (2, 2001)
    assert (row["step"], row["val_loss"], row["tokens"]) == (2000, 1.8802, 1536000)
    assert row["train_time_s"] == pytest.approx(81.93, abs=0.005) and 82 < row["wall_time_s"] < 86.3
    assert plot.read_nanogpt("step:1/10 val_loss:3.2") == []


def test_plot(data, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    tiny_run(tmp_path / "run", data=str(data), eval_every=5)
    record = str(ROOT / "records/laptop/2026-11-21-zen4_shakespeare-1.4697")
    out = ["--out", str(tmp_path / "a.svg"), "--target", "1.4697"]
    assert bench.main(["plot", str(tmp_path / "run"), record, "--x", "tokens", *out]) == 0
    assert (tmp_path / "a.svg").read_text().startswith(
        "<?xml"
    ) and "over tokens" in capsys.readouterr().out
    assert bench.main(["plot", str(tmp_path), *out]) == 2
