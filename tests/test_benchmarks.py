"""bench.py: every benchmark in a tiny form, and what its cases may do: fail, be killed, run out of memory."""

import functools
import json
import math
import os
import re
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path

import bench_cases
import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

import bench
import train_gpt
from benchmarks import attention, ladder, loss, scaling
from benchmarks.harness import Bench, CaseFailed, Worker, build_state
from conftest import ROOT, SIZES, SMALL, measured, run_python
from data.shards import load_meta
from ops.attention import attention as attention_op
from ops.attention import attention_mask
from ops.parallel import rank_groups
from records.check import t_test
from runtime import start

COMPILED = "blocked, compiled"
# Benchmarks that compile, or start many processes: they run beside the other tests. Test -> what python is given
EAGER_MODES = ("no cache", "KV cache", "KV cache, int8")
SIDE_JOBS = {
    "test_bench_scaling_of_torchruns_ranks": [
        "-m",
        "torch.distributed.run",
        "--nproc_per_node=2",
        "--standalone",
        "bench.py",
        "scaling",
        *SMALL.split(),
    ],
    "test_bench_attention": [
        "-c",
        "import sys, bench; from benchmarks import attention; "
        f"attention.BACKENDS, attention.VARIANTS = ('naive', {COMPILED!r}), ('documents',); "
        "sys.exit(bench.main(sys.argv[1:]))",
        "attention",
        *SIZES.split(),
    ],
    "test_bench_tour": [
        "-c",
        "import sys, bench; from benchmarks import tour; tour.TRAINING = {'fp32': '--dtype fp32'}; "
        "tour.GENERATION = {'no cache': '--no_cache', 'int8': '--int8'}; sys.exit(bench.main(sys.argv[1:]))",
        "tour",
        *SIZES.split(),
        "--seq_len",
        "64",
    ],
    "test_bench_infer": [
        "-c",
        f"import sys, bench; from benchmarks import infer; infer.MODES = {EAGER_MODES}; "
        "sys.exit(bench.main(sys.argv[1:]))",
        "infer",
        *SIZES.split(),
        "--dtype",
        "fp32",
    ],
}


@pytest.fixture(scope="module", autouse=True)
def side_jobs(request, tmp_path_factory):
    """Starts those SIDE_JOBS whose tests were chosen, one after the other: name -> what waits for (process, JSON).

    Where pytest-xdist runs tests side by side anyhow, a job starts when its test asks for it.
    """

    chosen = {item.originalname for item in request.session.items} & SIDE_JOBS.keys()
    outs = {name: tmp_path_factory.mktemp(name) / "out.json" for name in sorted(chosen)}  # not in the thread: a race

    def run(name: str) -> tuple[subprocess.CompletedProcess, Path]:
        return run_python(*SIDE_JOBS[name], "--json", outs[name]), outs[name]

    pool = ThreadPoolExecutor(1)
    if "PYTEST_XDIST_WORKER" in os.environ:
        yield {name: functools.partial(run, name) for name in chosen}
    else:
        yield {name: pool.submit(run, name).result for name in SIDE_JOBS if name in chosen}
    pool.shutdown(cancel_futures=True)


def measured_aside(side_jobs, name: str) -> dict:
    """The JSON of a side job."""
    done, out = side_jobs[name]()
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
    assert "ms" in rungs["+ bf16"]  # as any rung, whatever auto is here
    done = [row for row in report["ladder"] + report["without"] if "ms" in row]
    numbers_are_finite(done)
    assert {"fp32 eager", "+ fused attention", "+ fused optimizer", "+ chunked loss"} <= {row["name"] for row in done}
    for row in done:
        assert row["tokens_per_s"] * row["ms"] / 1000 == pytest.approx(row["tokens"])
        fp32 = report["stack"]["dtype"] == "fp32" and row["name"] != "+ bf16"
        exact = fp32 or row["name"] in ("fp32 eager", "without bf16")
        assert row["loss"] == pytest.approx(done[0]["loss"], rel=1e-4 if exact else 5e-4)  # bf16 rounds
        assert abs(row["loss"] - math.log(320)) > 0.01
        assert row["flops_per_s"] < report["product_flops"] and row["peak_mb"] > 50
    assert [row["name"] for row in report["without"]][:1] in (["without all of them"], [])
    assert {row["micro_batch"] for row in report["without"]} <= {report["stack"]["micro_batch"], 8}
    assert rungs["+ auto micro-batch"]["micro_batch"] == 8
    text = capsys.readouterr().out
    assert "### The ladder" in text and "| + fused attention |" in text
    assert re.search(
        r"Matmuls reach [\d.]+ TFLOP/s in (bf16, [\d.]+ in fp32|fp32, [\d.]+ in bf16) in the same run", text
    )


def test_the_matmul_peak_is_that_of_the_best_dtype(monkeypatch):
    asked, speeds = [], {torch.float32: 3.0, torch.bfloat16: 5.0}

    def flops(n, dtype, device):
        asked.append((n, dtype))
        return speeds[dtype] * n

    monkeypatch.setattr(ladder, "matmul_flops", flops)
    case = ladder.matmul_case({"device": "cpu"}, (1, 2))
    assert next(case) == {} and next(case) == {"fp32": 6.0, "bf16": 10.0} and len(asked) == 4
    speeds[torch.bfloat16] = 1.0  # emulated: it is not asked for larger ones
    asked.clear()
    case = ladder.matmul_case({"device": "cpu"}, (1, 2))
    assert next(case) == {} and next(case) == {"fp32": 6.0, "bf16": 1.0} and next(case)["fp32"] == 6.0
    assert [n for n, dtype in asked if dtype == torch.bfloat16] == [1]


def test_the_rung_of_bf16_is_refused_by_gpus_without_it_only(monkeypatch):
    for has_bf16 in (True, False):
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda has=has_bf16, **_: has)
        reasons = [ladder.unsupported_reason(dict(dtype="bf16"), torch.device(kind)) for kind in ("cpu", "mps", "cuda")]
        assert reasons[:2] == ["", ""] and ("emulate" in reasons[2]) == (not has_bf16)


@pytest.mark.skipif(sys.platform != "linux", reason="memory is limited on Linux only")
def test_bench_out_of_memory_is_a_row(tmp_path, monkeypatch):
    monkeypatch.setattr(ladder, "LADDER", [rung for rung in ladder.LADDER if rung[0] == "fused attention"])
    long = "--device cpu --n_layer 1 --n_embd 32 --n_head 4 --seq_len 2048 --batch_tokens 4096 --ngram 0 --limit_mb 220"
    scores, fused = measured(tmp_path, "train", long + " --quick")["ladder"]
    assert scores["note"] == "out of memory" and "ms" not in scores
    assert fused["ms"] > 0 and "vs_above" not in fused


def test_bench_ladder_goes_on_when_a_peer_dies(tmp_path, monkeypatch):
    monkeypatch.setattr(ladder, "step_case", bench_cases.dying_case)
    monkeypatch.setattr(ladder, "LADDER", [rung for rung in ladder.LADDER if rung[0] in ("fused attention", "fp8")])
    report = measured(tmp_path, "train", SMALL + f" --out_dir {tmp_path / 'starts'}")
    plain, fused, _ = report["ladder"]
    assert "note" not in plain and "note" not in fused and fused["vs_above"] == pytest.approx(2)
    assert (tmp_path / "starts").read_text().startswith("xxx")  # alone, dying beside the next rung, once more
    assert report["without"][0]["worth"] == pytest.approx(2)


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


def bench_recipes(tmp_path, plan: dict, flags: str = SMALL) -> tuple[int, dict]:
    """Exit code and JSON, if any, of `bench.py loss` with such a file of recipes."""
    (tmp_path / "recipes.json").write_text(json.dumps(plan))
    out = tmp_path / "out.json"
    code = bench.main(["loss", "--recipes", str(tmp_path / "recipes.json"), *flags.split(), "--json", str(out)])
    return code, json.loads(out.read_text()) if out.exists() else {}


@pytest.fixture
def fake(tmp_path) -> str:
    """A repository whose trainer makes up its losses."""
    (tmp_path / "fake").mkdir()
    (tmp_path / "fake" / "train_gpt.py").write_text(bench_cases.FAKE_TRAINER)
    return str(tmp_path / "fake")


def test_bench_loss_runs_an_edited_repository(data, tmp_path, capsys):
    for name in start.SOURCE_FILES:
        (tmp_path / "edited" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / "edited" / name)
    source = (tmp_path / "edited" / "train_gpt.py").read_text()
    assert source.count('group["lr"]) * lr_multiplier') == 1
    edited = source.replace('group["lr"]) * lr_multiplier', 'group["lr"]) * 0')
    (tmp_path / "edited" / "train_gpt.py").write_text(edited)
    before = {path: path.stat().st_mtime_ns for path in [data, *data.iterdir()]}
    recipes = {"as it is": {}, "an edit": {"repository": str(tmp_path / "edited"), "doc_align": False}}
    plan = {"data": [str(data)], "seeds": 1, "recipes": recipes}
    code, report = bench_recipes(tmp_path, plan, SMALL + " --max_steps 20 --eval_tokens 2048")
    ours, edit = report["loss"]
    assert code == 0 and edit["val_loss"] == pytest.approx(math.log(320)) and ours["val_loss"] < edit["val_loss"] - 0.5
    numbers_are_finite(report["loss"])
    assert ours["speedup"] == pytest.approx(1) and "speedup" not in edit and edit["reached"] == "0 of 1"
    assert edit["step_ratios"] == [1.0]  # neither is evaluated before the loss that both reach
    assert [len(run["evaluations"]) for run in report["runs"]] == [10, 10] and report["recipes"] == recipes
    assert before == {path: path.stat().st_mtime_ns for path in [data, *data.iterdir()]}
    text = capsys.readouterr().out
    assert "20 steps a run, 1 seeds, interleaved" in text and "### What is saved over all texts" in text


def test_bench_loss_interleaves_and_judges_over_texts_and_sizes(fake, data, tmp_path, capsys):
    texts = [str(shutil.copytree(data, tmp_path / name)) for name in ("better", "worse")]
    fast, slow = {"repository": fake, "speed": 2}, {"repository": fake, "speed": 0.5, "max_steps": 40}
    plan = {
        "data": texts,
        "seeds": 2,
        "sizes": {"small": {"n_embd": 32, "max_steps": 20}, "wide": {"n_embd": 64, "max_steps": 20}},
        "recipes": {"baseline": {"repository": fake}, "fast": fast, "slow": slow},
    }
    code, report = bench_recipes(tmp_path, plan)
    order = Path(fake, "order.txt").read_text().splitlines()
    rotated = (("0 ", "0 2", "0 0.5"), ("1 2", "1 0.5", "1 "))
    assert order == [
        f"{size} {text} {run}" for size in (32, 64) for text in ("better", "worse") for seed in rotated for run in seed
    ]
    assert code == 0 and len(report["runs"]) == 24 and len(report["loss"]) == 12
    better, worse = (next(r for r in report["loss"] if r["name"] == "fast" and r["data"] == text) for text in texts)
    for ratios in (better["time_ratios"], better["step_ratios"]):
        assert ratios == pytest.approx([1 / 2, 1 / 2.2])
    assert (better["sooner"], better["fewer"]) == pytest.approx((math.sqrt(2 * 2.2),) * 2) and better["seeds"] == 2
    assert better["sooner_se"] == pytest.approx(better["sooner"] * math.log(2.2 / 2) / 2)  # of two: half their distance
    assert (better["target"], better["reached"]) == (4, "2 of 2")
    assert better["speedup"] == pytest.approx(2 / (1 / 2 + 1 / 2.2))  # against the median of the two
    assert worse["time_ratios"] == pytest.approx([1 / 0.8, 1 / 0.88])  # up to its own end, which is the higher
    assert worse["reached"] == "0 of 2" and "speedup" not in worse
    fast, slow = (v for v in report["verdicts"] if v["size"] == "wide")
    logs = [math.log(ratio) for ratio in better["time_ratios"] + worse["time_ratios"]]
    assert fast["pairs"] == 4 and fast["time_saved"] == pytest.approx(1 - math.exp(sum(logs) / 4))
    assert fast["time_p"] == pytest.approx(t_test(logs, 0.0)) and 0.05 < fast["time_p"] < 0.5
    assert fast["worst"] == f"{texts[1]}: {1 - math.exp((logs[2] + logs[3]) / 2):.1%}" and "-19" in fast["worst"]
    assert slow["time_saved"] < -0.1 and slow["step_saved"] < 2 * slow["time_saved"] and slow["time_p"] > 0.9
    text = capsys.readouterr().out
    assert text.count("20 or 40 steps a run, 2 seeds, interleaved") == 6 and f"{texts[1]}, wide" in text


@pytest.mark.parametrize(
    "how, code, reason",
    [
        ("refused", 2, "by its own words"),
        ("crashed", 1, "FAILED: by its own words"),
        ("killed", 1, "out of memory: killed by the system"),
        ("diverged", 1, "diverged with seed 1"),
        ("gone", 1, "FAILED: left no whole run (FileNotFoundError"),
        ("stopped", 1, "FAILED: left no whole run (ValueError: stopped by signal"),
    ],
)
def test_bench_loss_says_why_a_run_failed(how, code, reason, fake, data, tmp_path, capsys):
    good, bad = {"repository": fake}, {"repository": fake, "how": how}
    plan = {"data": [str(data)], "recipes": {"bad": bad, "good": good}}
    assert bench_recipes(tmp_path, plan) == (code, {})
    *_, said = capsys.readouterr().err.splitlines()
    assert said.startswith(f"error: bad did not finish, so there is nothing to compare with ({reason}"), said
    assert len(Path(fake, "order.txt").read_text().splitlines()) == (4 if how == "diverged" else 1)
    plan = {"data": [str(data)], "seeds": 3, "recipes": {"good": good, "bad": bad, "other": good}}
    found, report = bench_recipes(tmp_path, plan)
    _, row, other = report["loss"]
    assert found == reason.startswith("FAILED") and row["note"].startswith(reason) and "val_loss" not in row
    verdict, _ = report["verdicts"]
    assert "time_saved" not in verdict and reason in verdict["worst"] and other["time_ratios"] == [1, 1, 1]


GOOD_RECIPES = {"a": {}, "b": {"softcap": 0}}


@pytest.mark.parametrize(
    "plan, reason",
    [
        ("{", "is not JSON"),
        ([1], "holds [1]; expected an object"),
        ({}, "recipes is missing; expected two or more"),
        ({"recipes": {"a": {}}}, "expected two or more"),
        ({"recipes": {"a": {}, "b": 3}}, "expected two or more"),
        ('{"recipes": {"a": {}, "a": {}}}', "names 'a' twice"),
        ({"recipes": GOOD_RECIPES, "seed": 3}, "has the key 'seed'; expected recipes, data"),
        ({"recipes": GOOD_RECIPES, "seeds": True}, "seeds is True; expected a whole number"),
        ({"recipes": GOOD_RECIPES, "data": "DATA"}, "expected a list of folders"),
        ({"recipes": GOOD_RECIPES, "data": ["DATA", "DATA/"]}, "names a folder twice"),
        ({"recipes": GOOD_RECIPES, "data": ["DATA/none"]}, "there is no data folder"),
        ({"recipes": GOOD_RECIPES, "sizes": {"s": {"n_embed": 3}}}, "'a' at size 's': unknown flag --n_embed"),
        ({"recipes": {"a": {}, "b": {"softcap": "0"}}}, "'b': --softcap is '0'; expected float"),
        ({"recipes": {"a": {}, "b": {"max_steps": "9"}}}, "'b': --max_steps is '9'; expected int"),
        ({"recipes": {"a": {}, "b": {"seed": 3}}}, "'b' sets seed, which must be the same for all"),
        ({"recipes": {"a": {}, "b": {"data": "DATA"}}}, "'b' sets data, which must be the same for all"),
        ({"recipes": {"a": {}, "b": {"eval_tokens": 0}}}, "'b' sets eval_tokens, which must be the same for all"),
        ({"recipes": {"a": {}, "b": {"repository": "DATA"}}}, "expected a checkout of this repository"),
        ({"recipes": {"a": {}, "b": {"repository": str(ROOT), "new": [3]}}}, "'b': new is [3]; expected a number"),
    ],
)
def test_bench_loss_refuses_files_of_recipes(plan, reason, data, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(loss, "train_once", lambda *_: pytest.fail("a run was started"))
    plan = plan if isinstance(plan, str) else json.dumps(plan)
    (tmp_path / "recipes.json").write_text(plan.replace("DATA", str(data)))
    assert bench.main(["loss", "--recipes", str(tmp_path / "recipes.json"), *SMALL.split()]) == 2
    (said,) = capsys.readouterr().err.splitlines()
    assert said.startswith("error: ") and reason in said


@pytest.mark.parametrize(
    "argv",
    ["loss --recipes no.json", "data --recipes no.json", "loss --limit_mb 9", "profile --minutes 5"]
    + [f"loss --{flag}" for flag in ("seed 1", "minutes 1", "softcap 0", "adam_lr 0.1")],
)
def test_bench_loss_refuses(argv, monkeypatch, capsys):
    monkeypatch.setattr(loss, "train_once", lambda *_: pytest.fail("a run was started"))
    assert bench.main(argv.split()) == 2
    (said,) = capsys.readouterr().err.splitlines()
    assert said.startswith("error: ") and re.search("cannot be read|remove it$|remove --limit_mb$", said)


def curve(*losses: float, seconds: float = 1.0) -> dict:
    """A run that is evaluated every ten steps, of so many seconds together."""
    evaluations = [dict(step=10 * i, train_time_s=seconds * i, val_loss=x) for i, x in enumerate(losses, 1)]
    last = evaluations[-1]
    return dict(
        evaluations=evaluations,
        val_loss=last["val_loss"],
        train_time_s=last["train_time_s"],
        steps=last["step"],
        dtype="fp32",
    )


def test_bench_loss_of_the_recipes_built_in(tmp_path, monkeypatch):
    runs = []

    def train_once(repository, flags):
        runs.append((repository, flags))
        adamw = flags.get("optimizer") == "adamw"
        return curve(4.0, 3.0, 2.0) if adamw else curve(3.0, 2.0, 1.0)

    monkeypatch.setattr(loss, "train_once", train_once)
    report = measured(tmp_path, "loss")
    assert [row["name"] for row in report["loss"]] == list(loss.RECIPES) and len(runs) == 2 * len(loss.RECIPES)
    assert report["loss"][2]["sooner"] == pytest.approx(1.5) and report["loss"][2]["speedup"] == pytest.approx(1.5)
    for repository, flags in runs:
        assert (Path(repository), flags["data"]) == (ROOT, str(ROOT / "data" / "python"))
        assert flags["max_steps"] == 40 and flags["eval_every"] == 4 and "adam_lr" not in flags
    assert ["dtype" in flags for _, flags in runs] == [False] + [True] * (len(runs) - 1)  # the first settles it
    assert {flags["dtype"] for _, flags in runs[1:]} == {"fp32"}


def test_time_to_a_loss():
    rows = [
        dict(step=10 * i, train_time_s=float(i), val_loss=value) for i, value in enumerate((4.0, None, 3.0, 2.0, 2.5))
    ]
    assert loss.time_to(rows, 2.25, "train_time_s") == pytest.approx(2.75)
    assert loss.time_to(rows, 2.25, "step") == pytest.approx(27.5)
    assert loss.time_to(rows, 4.5, "step") == 0 and loss.time_to(rows, 1.0, "step") is None


def test_a_pair_is_compared_at_the_higher_final_loss():
    slow, fast = curve(4.0, 3.0, 2.0, seconds=2.0), curve(3.5, 2.5, 1.0)
    assert loss.paired_ratio(fast, slow, "step") == pytest.approx((20 + 10 / 3) / 30)
    assert loss.paired_ratio(slow, fast, "step") == pytest.approx(30 / (20 + 10 / 3))
    assert loss.paired_ratio(fast, slow, "train_time_s") == pytest.approx((2 + 1 / 3) / 6)
    assert loss.paired_ratio(slow, slow, "train_time_s") == 1
    rising = curve(4.0, 1.5, 2.5)  # ends above a loss that it has had: that counts
    assert loss.paired_ratio(rising, slow, "step") == pytest.approx((10 + 10 * 1.5 / 2.5) / 25)


def test_the_verdict_over_texts():
    base = [curve(4.0, 3.0, 2.0), curve(4.0, 3.0, 2.0), curve(4.0, 3.0, 2.0)]
    quicker = [curve(4.0, 3.0, 2.0, seconds=math.exp(log)) for log in (-1, -2, -3)]
    rows = [
        loss.judge_text({"base": base, "new": new}, {})[1] | dict(data=text)
        for text, new in (("good", quicker), ("bad", [curve(4.0, 3.0, 2.0, seconds=1.25)] * 3))
    ]
    verdict = loss.judge_recipe(rows[:1])
    assert verdict["time_saved"] == pytest.approx(1 - math.exp(-2)) and verdict["pairs"] == 3
    assert verdict["time_saved_se"] == pytest.approx(math.exp(-2) / math.sqrt(3)) and "worst" not in verdict
    assert verdict["time_p"] == pytest.approx((1 - math.sqrt(12 / 14)) / 2)  # Student's t of 2 degrees, in closed form
    assert verdict["step_saved"] == 0 and verdict["step_p"] == 1  # as many steps, only quicker ones
    verdict = loss.judge_recipe(rows)
    assert verdict["pairs"] == 6 and verdict["worst"] == "bad: -25.0%" and verdict["time_p"] > 0.05
    assert verdict["time_saved"] == pytest.approx(1 - math.exp((-6 + 3 * math.log(1.25)) / 6))
    base_row, row = loss.judge_text({"base": base[:1], "new": quicker}, {"base": CaseFailed("diverged with seed 1")})
    assert base_row == dict(name="base", note="diverged with seed 1") and "base failed" in row["note"] and len(row) == 2


# ---------------------------------------------------------------------------------------------------------------------
# Fit, memory, data, profile


@pytest.mark.skipif(sys.platform != "linux", reason="memory is limited on Linux only")
def test_bench_fit(tmp_path):
    wide = "--device cpu --n_layer 2 --n_embd 64 --n_head 1 --seq_len 512 --ngram 0 --quick --repeats 1 --limit_mb 150"
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
    sizes = "--device cpu --n_layer 3 --n_embd 64 --n_head 2 --seq_len 64 --ngram 0 --vocab_size 320 --quick"
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


def test_bench_memory_per_rank(tmp_path, capsys):
    rows = measured(tmp_path, "memory", SMALL + " --parallel fsdp")["memory"]
    assert [row["ranks"] for row in rows] == [1, 2, 4, 8]
    header, _, *lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    headings = [cell.strip() for cell in header.strip("|").split("|")]
    assert {"ranks", "weights", "whole weights", "total"} <= set(headings) == set(rows[-1]) and len(lines) == 4
    assert all(cell.strip() for cell in lines[-1].strip("|").split("|"))  # one rank has no weights of others


def test_bench_data(data, tmp_path):
    report = measured(tmp_path, "data", SMALL + f" --data {data}")
    numbers_are_finite(report["data"])
    assert [row["prefetch"] for row in report["data"]] == [None, 0, 1, 2, 4]
    assert report["loader_tokens_per_s"] * report["batch_s"] == pytest.approx(512, rel=0.5)
    assert all(0 <= row["waits"] < 1 for row in report["data"])
    assert report["data"][0]["against_none_min"] == report["data"][0]["against_none_max"] == 1
    numbers_are_finite(report["tokenizer"])
    names = ["training .* byte pairs", "encoding, tokenizer bpe"] if find_spec("tokenizers") else []  # data of bytes
    assert len(report["tokenizer"]) == len(names)
    assert all(re.fullmatch(name, row["name"]) for name, row in zip(names, report["tokenizer"]))
    text = load_meta(data)["splits"]["train"]["bytes"]
    assert all(0 < 1e6 * row["megabytes"] <= min(text, 10**6) for row in report["tokenizer"])
    assert all(1 < row["bytes_per_token"] < 8 for row in report["tokenizer"])


def test_bench_profile(tmp_path):
    report = measured(tmp_path, "profile", SMALL + " --dtype fp32")
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
    for row in rows:
        if row["ranks"] > 1:
            assert row["communication"] < 1 and row["predicted_ms"] > 1000 * min(row["compute"]) > 0
            measured_mb = row.get("measured_mb_max", math.inf)  # other tests send too
            assert set(row["sent"]) == {"gradients, averaged", "Muon, to all"} and 0 < row["sent_mb"] < measured_mb


@pytest.mark.parametrize(
    "seed, reason",
    [(0, "FAILED: ZeroDivisionError: the last rank's own mistake"), (1, "out of memory: killed by the system")],
)
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


@pytest.fixture
def rank_of_four(monkeypatch):
    """This process is rank 0 of four, whose collectives do nothing."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    for name, value in dict(RANK=0, WORLD_SIZE=4, LOCAL_RANK=0, LOCAL_WORLD_SIZE=1).items():
        monkeypatch.setenv(name, str(value))
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    yield
    dist.destroy_process_group()


class SentBytes(TorchDispatchMode):
    """Adds up what rings would make rank 0 send or receive, whichever is more, by kind of what is sent."""

    def __init__(self, state):
        super().__init__()
        self.sent = dict.fromkeys(scaling.exchanges(state), 0)
        self.replicas = rank_groups(state.raw_model.head.weight)[1]

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.name()
        if name == "c10d::_allgather_base_":
            group = dist.ProcessGroup.unbox(args[2])
            kind = "Muon, to all" if self.replicas and group.group_name == self.replicas.group_name else "weights"
            self.sent[kind] += args[0].nbytes - args[1].nbytes
        elif name == "c10d::_reduce_scatter_base_":
            self.sent["gradients, scattered"] += args[1].nbytes - args[0].nbytes
        elif name == "c10d::allreduce_":
            n = dist.ProcessGroup.unbox(args[1]).size()
            numbers = [t for t in args[0] if t.dim()]  # a count of targets is not counted
            self.sent["gradients, averaged"] += 2 * (n - 1) * sum(t.nbytes for t in numbers) / n
        elif name == "c10d::alltoall_base_":
            most = max(sum(sizes[1:]) for sizes in args[3:5])
            self.sent["Muon, to the owner and back"] += most * args[0].itemsize
        else:
            assert func.namespace != "c10d", name
        return func(*args, **(kwargs or {}))


ODD = dict(
    n_layer=3,
    n_embd=32,
    n_head=2,
    seq_len=32,
    batch_tokens=512,
    micro_batch=2,
    ngram=3,
    ngram_rows=65,
    vocab_size=257,
    device="cpu",
)


@pytest.mark.parametrize(
    "flags",
    [
        dict(parallel="fsdp", dtype="fp32"),
        dict(parallel="fsdp", dtype="bf16", grad_comm="bf16", micro_batch=4),
        dict(parallel="hsdp", dtype="bf16", shard_size=2),
        dict(parallel="hsdp", dtype="fp32", grad_comm="bf16", shard_size=1),
    ],
    ids=["fsdp", "fsdp bf16", "hsdp", "hsdp of one"],
)
def test_the_bytes_of_a_step_are_those_of_its_collectives(flags, rank_of_four):
    state, batch = build_state(ODD | flags)
    with SentBytes(state) as spy:
        train_gpt.train_step(state, batch, 1.0)
    assert scaling.bytes_per_step(state) == pytest.approx(spy.sent) and sum(spy.sent.values()) > 0
    with scaling.nothing_sent(state.model), SentBytes(state) as spy:
        train_gpt.train_step(state, batch, 1.0)
    assert set(spy.sent.values()) == {0} and scaling.early_fraction(state) == 0


def test_the_bytes_of_a_step_of_ddp(rank_of_four, monkeypatch):
    monkeypatch.setattr(
        train_gpt, "warm_up", lambda *_: dict(drawn=False, written=[])
    )  # DDP's all-reduce needs real ranks
    state, batch = build_state(ODD | dict(dtype="fp32", grad_comm="bf16", n_embd=256, bucket_cap_mb=2))
    with scaling.nothing_sent(state.model), SentBytes(state) as spy:
        train_gpt.train_step(state, batch, 1.0)
    assert set(spy.sent.values()) == {0}
    block, rest = 12 * 256**2, (65 + 257 + 257) * 256
    sent = {kind: n for kind, n in scaling.bytes_per_step(state).items() if n}
    # a rank has three of 12 squares and two of the MLPs' six matrices, the last one none; gradients travel as bf16
    muon = 3 / 4 * 4 * (12 + 8 * 4) * 256**2
    assert sent == {"gradients, averaged": 2 * 3 / 4 * 2 * (3 * block + rest), "Muon, to all": muon}
    for p in state.raw_model.parameters():
        p.grad = torch.zeros_like(p)
    with SentBytes(state) as spy:
        state.optimizer.step()
    assert spy.sent["Muon, to all"] == muon == sum(spy.sent.values())
    # buckets: the head and an MLP, an attention and half an MLP, as much; then an MLP, and the rest with the embeddings
    assert scaling.early_fraction(state) == pytest.approx((257 * 256 + 2 * block) / (3 * block + rest))


def test_the_predicted_step():
    sent, speeds = {"gradients, averaged": 100.0, "Muon, to all": 10.0, "weights": 0.0}, {}
    speeds = {"gradients, averaged": 50.0, "Muon, to all": 5.0}
    assert scaling.predicted_seconds(1.0, sent, speeds) == 1 + 2 + 2
    assert scaling.predicted_seconds(1.0, sent, speeds, early=0.5, backward=3.0) == 1 + 2 + 2 - 1
    assert scaling.predicted_seconds(1.0, sent, speeds, early=0.5, backward=0.25) == 1 + 2 + 2 - 0.25


# ---------------------------------------------------------------------------------------------------------------------
# Attention and generation: last, as most of their work is done aside


def test_explicit_attention_is_attention():
    q, k, v = torch.randn(3, 2, 2, 50, 8, generator=torch.manual_seed(0))
    torch.testing.assert_close(attention.naive_attention(q, k, v, None), attention_op(q, k, v, None))
    mask = attention_mask("sdpa", torch.zeros(2, 50, dtype=torch.long), 7, None)
    torch.testing.assert_close(attention.naive_attention(q, k, v, mask), attention_op(q, k, v, mask))


def test_bench_attention(tmp_path, monkeypatch, side_jobs):
    monkeypatch.setattr(attention, "BACKENDS", tuple(b for b in attention.BACKENDS if b != COMPILED))
    eager = measured(tmp_path, "attention", SIZES)["attention"]
    compiled = measured_aside(side_jobs, "test_bench_attention")["attention"]
    numbers_are_finite([row for row in eager + compiled if "note" not in row])
    done = {row["backend"] for row in eager + compiled if "backward_ms" in row}
    assert done == {"naive", "blocked", COMPILED, "math", "sdpa", "flash"}
    assert all("backward_ms" in row for row in compiled)
    flex = [row for row in eager if row["backend"] == "flex"]
    assert all("forward_ms" in row and "backward_ms" not in row for row in flex)
    more = {row["backend"]: row.get("more_mb") for row in eager if row["seq_len"] == 512}
    assert more["sdpa"] < more["naive"]  # the scores


def test_bench_infer(side_jobs):
    rows = measured_aside(side_jobs, "test_bench_infer")["infer"]
    numbers_are_finite(rows)
    assert [(row["batch"], row["mode"]) for row in rows] == [(4, mode) for mode in EAGER_MODES]
    for row in rows:
        assert row["tokens_per_s"] * row["decode_ms"] / 1000 == pytest.approx(row["batch"])
        assert 0 < row["s_50"] < row["s_200"] and row["prefill_ms"] / 1000 < row["s_50"]
        assert row["mode"] == "no cache" or row["gain_50"] > 0


@pytest.mark.soak
def test_bench_tour(side_jobs):
    """Its commands work, and what does not change the model does not change its perplexity."""
    rows = measured_aside(side_jobs, "test_bench_tour")["tour"]
    assert [row["stage"] for row in rows] == ["train: fp32", "sample: no cache", "sample: int8"]
    numbers_are_finite(rows)
    assert all(row["tokens_per_s"] > 0 and row["peak_mb"] > 0 for row in rows)
    assert "--dtype fp32" in rows[0]["command"] and "--no_cache" in rows[1]["command"] and len(rows[1]["sample"]) > 9
    assert rows[1]["perplexity"] == pytest.approx(rows[0]["perplexity"], rel=0.02)  # without the text's first token
    assert rows[2]["perplexity"] == pytest.approx(rows[1]["perplexity"], rel=0.02)
