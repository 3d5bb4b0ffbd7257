"""bench.py: every benchmark in a tiny form, and what its cases may do: fail, be killed, run out of memory."""

import json
import math
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import bench_cases
import pytest
import torch

import bench
from benchmarks import attention, ladder, loss, scaling
from benchmarks.harness import Bench, CaseFailed, Worker
from conftest import ROOT, SIZES, SMALL, measured, run_python
from ops import attention as attention_op
from ops import attention_mask

COMPILED = "blocked, compiled"
# Benchmarks that compile, or start many processes: they run beside the other tests. Test -> what python is given
SIDE_JOBS = {
    "test_bench_scaling_of_torchruns_ranks": [
        "-m", "torch.distributed.run", "--nproc_per_node=2", "--standalone", "bench.py", "scaling", *SMALL.split()
    ],
    "test_bench_attention": [
        "-c", "import sys, bench; from benchmarks import attention; "
        f"attention.BACKENDS, attention.VARIANTS = ('naive', {COMPILED!r}), ('documents',); "
        "sys.exit(bench.main(sys.argv[1:]))",
        "attention", *SIZES.split(),
    ],
    "test_bench_infer": ["bench.py", "infer", *SIZES.split(), "--dtype", "fp32"],
}  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def side_jobs(request, tmp_path_factory):
    """Starts those SIDE_JOBS whose tests were chosen, one after the other: name -> their (process, JSON) to come."""

    chosen = {item.originalname for item in request.session.items} & SIDE_JOBS.keys()
    outs = {name: tmp_path_factory.mktemp(name) / "out.json" for name in sorted(chosen)}  # not in the thread: a race

    def run(name: str) -> tuple[subprocess.CompletedProcess, Path]:
        return run_python(*SIDE_JOBS[name], "--json", outs[name]), outs[name]

    pool = ThreadPoolExecutor(1)
    yield {name: pool.submit(run, name) for name in SIDE_JOBS if name in chosen}
    pool.shutdown(cancel_futures=True)


def measured_aside(side_jobs, name: str) -> dict:
    """The JSON of a side job."""
    done, out = side_jobs[name].result()
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(out.read_text())
    assert report["machine"]["torch"] == torch.__version__ and report["benchmark"] in report["command"]
    return report


def numbers_are_finite(rows: list[dict]) -> None:
    for row in rows:
        for key, value in row.items():
            assert not isinstance(value, float) or math.isfinite(value), (key, row)
            if f"{key}_min" in row:
                assert row[f"{key}_min"] <= value <= row[f"{key}_max"], (key, row)


# ---------------------------------------------------------------------------------------------------------------------
# The ladder


def test_bench_ladder(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(ladder, "LADDER", [rung for rung in ladder.LADDER if "compile" not in rung[1]])
    monkeypatch.setattr(ladder, "matmul_case", bench_cases.small_matmul_case)
    report = measured(tmp_path, "train")
    rungs = {row["name"]: row for row in report["ladder"]}
    assert list(rungs) == ["fp32 eager", *(f"+ {name}" for name, _ in ladder.LADDER)]
    assert "compute capability" in rungs["+ fp8"]["note"] and "CUDA" in rungs["+ TF32"]["note"]
    done = [row for row in report["ladder"] + report["without"] if "ms" in row]
    numbers_are_finite(done)
    assert {"fp32 eager", "+ fused attention", "+ fused optimizer", "+ chunked loss"} <= {row["name"] for row in done}
    for row in done:
        assert row["tokens_per_s"] * row["ms"] / 1000 == pytest.approx(row["tokens"])
        exact = report["product_dtype"] == "fp32" or row["name"] in ("fp32 eager", "without bf16")
        assert row["loss"] == pytest.approx(done[0]["loss"], rel=1e-4 if exact else 5e-4)  # bf16 rounds
        assert abs(row["loss"] - math.log(320)) > 0.01
        assert row["flops_per_s"] < report["product_flops"] and row["peak_mb"] > 50
    assert [row["name"] for row in report["without"]][:1] in (["without all of them"], [])
    assert {row["micro_batch"] for row in report["without"]} <= {report["stack"]["micro_batch"], 8}
    assert rungs["+ auto micro-batch"]["micro_batch"] == 8
    text = capsys.readouterr().out
    assert "### The ladder" in text and "| + fused attention |" in text


@pytest.mark.skipif(sys.platform != "linux", reason="memory is limited on Linux only")
def test_bench_out_of_memory_is_a_row(tmp_path, monkeypatch):
    monkeypatch.setattr(ladder, "LADDER", [rung for rung in ladder.LADDER if rung[0] == "fused attention"])
    long = "--device cpu --n_layer 1 --n_embd 32 --n_head 4 --seq_len 2048 --batch_tokens 4096 --quick --limit_mb 220"
    scores, fused = measured(tmp_path, "train", long)["ladder"]
    assert scores["note"] == "out of memory" and "ms" not in scores
    assert fused["ms"] > 0 and "vs_above" not in fused


def test_bench_ladder_goes_on_when_a_peer_dies(tmp_path, monkeypatch):
    monkeypatch.setattr(ladder, "step_case", bench_cases.dying_case)
    monkeypatch.setattr(ladder, "LADDER", [rung for rung in ladder.LADDER if rung[0] in ("fused attention", "fp8")])
    plain, fused, _ = measured(tmp_path, "train")["ladder"]
    assert "note" not in plain and "killed" not in fused.get("note", "") and fused["vs_above"] == pytest.approx(2)


# ---------------------------------------------------------------------------------------------------------------------
# Cases and their processes


def test_bench_survives_a_case_that_dies():
    setting = Bench({"device": "cpu"})
    for case, reason in (
        (bench_cases.killed_case, "killed by the system"),
        (bench_cases.broken_case, "FAILED: ZeroDivisionError"),
        (bench_cases.missing_file_case, "FAILED: FileNotFoundError"),
        (bench_cases.full_case, "^out of memory"),
    ):
        with Worker(setting, case) as worker:
            assert worker.request() == "ready"
            with pytest.raises(CaseFailed, match=reason):
                worker.request()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_bench_workers_end_with_their_parent():
    code = "import bench_cases; from benchmarks.harness import Bench, Worker; "
    code += "Worker(Bench({'device': 'cpu'}), bench_cases.endless_case).request()"
    env = os.environ | dict(PYTHONPATH=os.pathsep.join((str(ROOT), str(ROOT / "tests"))))
    parent = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True, env=env)
    worker = int(parent.stderr.readline())
    parent.kill()
    parent.wait()
    deadline = time.monotonic() + 60
    while Path(f"/proc/{worker}").exists() and "zombie" not in Path(f"/proc/{worker}/status").read_text():
        assert time.monotonic() < deadline
        time.sleep(0.1)


@pytest.mark.parametrize(
    "argv", ["frain", "--n_layers 2", "train --compile", "train --repeats -1", "loss --json no/x.json"]
)
def test_bench_refuses(argv, capsys):
    assert bench.main(argv.split()) == 2
    assert capsys.readouterr().err.startswith("error: ")


# ---------------------------------------------------------------------------------------------------------------------
# Loss


def test_bench_loss(tmp_path, monkeypatch):
    monkeypatch.setattr(loss, "RECIPES", dict(list(loss.RECIPES.items())[:2]))
    report = measured(tmp_path, "loss", SMALL + " --max_steps 20 --eval_tokens 2048")
    adam, muon = report["loss"]
    numbers_are_finite(report["loss"])
    assert adam["seeds"] == muon["seeds"] == 2 and report["target"] == pytest.approx(adam["val_loss"])
    assert muon["val_loss"] < adam["val_loss"] and muon["reached"] == "2 of 2"
    assert 0 < muon["to_target_s"] < muon["train_time_s"] and 0 < muon["steps_to_target"] <= 20


@pytest.mark.parametrize("how", ["refused", "killed", "diverged"])
def test_bench_loss_without_a_baseline_says_why(how, monkeypatch, capsys):
    if how == "refused":
        monkeypatch.setattr(loss, "RECIPES", {"AdamW": dict(optimizer="adamw", ngram_dropout=0.5), "Muon": {}})
    else:
        case = dict(killed=bench_cases.killed_run, diverged=bench_cases.unlucky_run)[how]
        monkeypatch.setattr(loss, "run_case", case)
    code = bench.main(["loss", *SMALL.split(), "--max_steps", "2"])
    reasons = dict(refused="--ngram_dropout is 0.5 with --ngram 0", killed="killed by the system",
                   diverged="diverged with seed 0")  # fmt: skip
    *_, said = capsys.readouterr().err.splitlines()
    assert code == (2 if how == "refused" else 1), said
    assert said.startswith("error: no run of AdamW finished, so there is no target loss (") and reasons[how] in said


def test_time_to_a_loss():
    rows = [
        dict(step=10 * i, train_time_s=float(i), val_loss=value) for i, value in enumerate((4.0, None, 3.0, 2.0, 2.5))
    ]
    assert loss.time_to(rows, 2.25, "train_time_s") == pytest.approx(2.75)
    assert loss.time_to(rows, 2.25, "step") == pytest.approx(27.5)
    assert loss.time_to(rows, 4.5, "step") == 0 and loss.time_to(rows, 1.0, "step") is None


# ---------------------------------------------------------------------------------------------------------------------
# Fit, memory, data, profile


@pytest.mark.skipif(sys.platform != "linux", reason="memory is limited on Linux only")
def test_bench_fit(tmp_path):
    wide = "--device cpu --n_layer 2 --n_embd 64 --n_head 1 --seq_len 512 --quick --repeats 1 --limit_mb 150"
    report = measured(tmp_path, "fit", wide)
    rows = report["fit"]
    assert [row["micro_batch"] for row in rows] == sorted(row["micro_batch"] for row in rows)
    fits = [row["micro_batch"] for row in rows if row["fits"]]
    fails = [row["micro_batch"] for row in rows if not row["fits"]]
    assert report["largest"] == max(fits) < min(fails) <= report["largest"] + max(1, report["largest"] // 16)
    assert all(row["note"] == "out of memory" for row in rows if not row["fits"])
    for row in rows:
        if row["fits"]:
            assert row["tokens_per_s"] * row["ms"] / 1000 == pytest.approx(512 * row["micro_batch"])


@pytest.mark.parametrize("flags", ["", " --dtype bf16 --loss_chunk 0"])
def test_bench_memory(tmp_path, flags):
    sizes = "--device cpu --n_layer 3 --n_embd 64 --n_head 2 --seq_len 64 --quick"
    rows = measured(tmp_path, "memory", sizes + flags)["memory"]
    numbers_are_finite(rows)
    for mode in ("none", "selective", "full"):
        parts = {row["part"]: row for row in rows if row["checkpointing"] == mode}
        total = parts.pop("total at peak")
        for kind in ("formula_mb", "measured_mb"):
            found = sum(part[kind] for part in parts.values())
            assert found == pytest.approx(total["measured_mb"], rel=0.2), (mode, kind)
        assert parts["activations"]["formula_mb"] == pytest.approx(parts["activations"]["measured_mb"], rel=0.05)
    kept = {row["checkpointing"]: row["measured_mb"] for row in rows if row["part"] == "activations"}
    assert kept["none"] > 1.3 * kept["selective"] and kept["selective"] > 1.5 * kept["full"]


def test_bench_data(data, tmp_path):
    report = measured(tmp_path, "data", SMALL + f" --data {data}")
    numbers_are_finite(report["data"])
    assert [row["prefetch"] for row in report["data"]] == [None, 0, 1, 2, 4]
    assert report["loader_tokens_per_s"] * report["batch_s"] == pytest.approx(512, rel=0.5)
    assert all(0 <= row["waits"] < 1 for row in report["data"])


def test_bench_profile(tmp_path):
    report = measured(tmp_path, "profile")
    spent = {row["kind"]: row["ms"] for row in report["profile"]}
    unattributed = "unattributed (CPU overhead, idle)"
    assert sorted(spent) == ["attention", "communication", "elementwise", "matmuls", "optimizer", unattributed]
    assert sum(spent.values()) == pytest.approx(report["step_ms"])
    assert all(spent[kind] > 0 for kind in ("attention", "elementwise", "matmuls", "optimizer"))
    assert json.loads(Path(report["trace"]).read_text())["traceEvents"]
    Path(report["trace"]).unlink()


# ---------------------------------------------------------------------------------------------------------------------
# Scaling


def test_bench_scaling(tmp_path):
    rows = measured(tmp_path, "scaling", SMALL.replace("512", "1024"))["scaling"]
    check_scaling(rows)
    assert rows[0]["ranks"] == 1 and rows[0]["efficiency"] == 1
    assert all(row["efficiency"] > 0 for row in rows[1:])
    assert [row["tokens"] for row in rows[1:3]] in ([1024, 2048], [])


def check_scaling(rows: list[dict]) -> None:
    numbers_are_finite(rows)
    assert all(row["tokens_per_s"] * row["ms"] / 1000 == pytest.approx(row["tokens"]) for row in rows)
    assert all(row["communication"] < 1 for row in rows if row["ranks"] > 1)


@pytest.mark.parametrize("seed, reason", [(0, "FAILED: ZeroDivisionError: the last rank's own mistake"),
                                          (1, "out of memory: killed by the system")])  # fmt: skip
def test_bench_scaling_tells_the_failing_ranks_own_reason(seed, reason, tmp_path, monkeypatch):
    monkeypatch.setattr(scaling, "rank_case", bench_cases.failing_rank)
    monkeypatch.setattr(scaling, "cpu_cores", lambda: 2)
    code = bench.main(["scaling", *SMALL.split(), "--seed", str(seed), "--json", str(tmp_path / "out.json")])
    one, *two = json.loads((tmp_path / "out.json").read_text())["scaling"]
    assert "note" not in one and [row["note"] for row in two] == [reason] * 2
    assert code == reason.startswith("FAILED")


def test_bench_scaling_of_torchruns_ranks(side_jobs):
    report = measured_aside(side_jobs, "test_bench_scaling_of_torchruns_ranks")
    check_scaling(report["scaling"])
    assert [(row["name"], row["ranks"]) for row in report["scaling"]] == [("as given", 2)]


# ---------------------------------------------------------------------------------------------------------------------
# Attention and generation: last, as most of their work is done aside


def test_explicit_attention_is_attention():
    q, k, v = torch.randn(3, 2, 2, 50, 8, generator=torch.manual_seed(0))
    torch.testing.assert_close(attention.naive_attention(q, k, v, None), attention_op(q, k, v, None))
    mask = attention_mask("sdpa", torch.zeros(2, 50, dtype=torch.long), 50, 7, None)
    torch.testing.assert_close(attention.naive_attention(q, k, v, mask), attention_op(q, k, v, mask))


def test_bench_attention(tmp_path, monkeypatch, side_jobs):
    monkeypatch.setattr(attention, "BACKENDS", tuple(b for b in attention.BACKENDS if b != COMPILED))
    eager = measured(tmp_path, "attention", SIZES)["attention"]
    compiled = measured_aside(side_jobs, "test_bench_attention")["attention"]
    numbers_are_finite([row for row in eager + compiled if "note" not in row])
    done = {row["backend"] for row in eager + compiled if "backward_ms" in row}
    assert done == {"naive", COMPILED, "math", "sdpa", "flash"}
    assert all("backward_ms" in row for row in compiled)
    flex = [row for row in eager if row["backend"] == "flex"]
    assert all("forward_ms" in row and "backward_ms" not in row for row in flex)
    more = {row["backend"]: row["more_mb"] for row in eager if row["seq_len"] == 512}
    assert more["sdpa"] < more["naive"]  # the scores


def test_bench_infer(side_jobs):
    rows = measured_aside(side_jobs, "test_bench_infer")["infer"]
    numbers_are_finite(rows)
    assert {(row["batch"], row["mode"], row["cache"]) for row in rows} == {
        (b, m, c) for b in (1, 8) for m in ("eager", "compiled") for c in ("none", "KV cache")
    }
    for row in rows:
        if row["cache"] == "none" and "tokens_per_s" not in row:  # not done in its time: kernels made for every length
            continue
        assert row["tokens_per_s"] * row["decode_ms"] / 1000 == pytest.approx(row["batch"])
        assert 0 < row["s_50"] < row["s_200"] and row["prefill_ms"] / 1000 < row["s_50"]
        assert all(value > 0 for key, value in row.items() if key.startswith("gain"))
