"""What carries a run: folder, checkpoints, log, errors, signals. Bad numbers, full disks and kills
lose nothing."""

import contextlib
import hashlib
import json
import math
import os
import random
import re
import signal
import socket
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import train_gpt
from common import SOURCE_FILES, UserError, error_sentence, exit_process, is_out_of_memory
from conftest import (
    ROOT,
    TINY,
    assert_same_run,
    assert_weights_equal,
    final,
    flags_of,
    forked,
    make_data,
    rows,
    run_main,
    run_python,
    run_ranks,
    tiny_run,
)
from data.shards import write_shard
from model import GPT, Optimizer
from runtime import run as run_module
from runtime.checkpoint import list_checkpoints, read_checkpoint
from runtime.ranks import DistContext
from runtime.run import SECTION, Run
from train_gpt import MAX_BAD_STEPS, get_lr_multiplier, get_progress, make_config, train

CPU = DistContext(torch.device("cpu"))


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def read_log(run: Path) -> str:
    return (run / "log.txt").read_text()


def spoil(monkeypatch, at, factor=math.nan, rank=None) -> None:
    """In the training passes `at` (numbers from 1) the loss is multiplied, on one rank or on
    all."""
    forward, count = GPT.forward, [0]

    def spoiled(self, idx, targets=None):
        loss = forward(self, idx, targets)
        if not torch.is_grad_enabled() or targets is None:
            return loss
        count[0] += 1
        return loss * factor if count[0] in at and rank in (os.environ.get("RANK"), None) else loss

    monkeypatch.setattr(GPT, "forward", spoiled)


# --------------------------------------------------------------------------------------------------
# What a run leaves behind


def test_what_a_run_leaves_behind(data, tmp_path):
    folder, flags = tmp_path / "run", dict(data=data, max_steps=7, log_every=3, eval_every=4)
    summary = tiny_run(folder, **flags)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    training, evaluations = (
        [row for row in lines if key in row] for key in ("train_loss", "val_loss")
    )
    assert [row["step"] for row in training] == [1, 3, 6, 7] and [
        row["step"] for row in evaluations
    ] == [4, 7]
    clocks = {"step", "tokens", "train_time_s", "wall_time_s"}
    figures = {"train_loss", "lr", "grad_norm", "tokens_per_s", "mfu", "peak_mem_mb"}
    assert set(training[0]) == clocks | figures and set(evaluations[0]) == clocks | {
        "val_loss",
        "val_bpb",
    }
    assert training[-1]["tokens"] == 7 * 512 and training[0]["mfu"] is None
    assert (
        0 < training[0]["train_time_s"] < training[-1]["train_time_s"] < training[-1]["wall_time_s"]
    )
    assert summary == json.loads((folder / "summary.json").read_text())
    assert (
        summary["val_loss"] == evaluations[-1]["val_loss"] and summary["stopped_by"] == "max_steps"
    )
    text = read_log(folder)
    assert {"train_gpt.py", "model.py", "ops/loss.py", "data/stream.py", "runtime/run.py"} <= set(
        SOURCE_FILES
    )
    for name in SOURCE_FILES:
        content = (ROOT / name).read_bytes()
        assert (folder / "source" / name).read_bytes() == content
        assert f"{name} sha256 {hashlib.sha256(content).hexdigest()}" in text
    assert (
        f"torch {torch.__version__}" in text
        and '"muon_lr": 0.02' in text
        and "step 7/7 | loss" in text
    )
    assert text.startswith(f"{SECTION} run\n{{") and "\ncommand: " in text
    files = [
        ".lock",
        "ckpt_7.pt",
        "ckpt_best.pt",
        "log.txt",
        "metrics.jsonl",
        "source",
        "summary.json",
    ]
    assert sorted(p.name for p in folder.iterdir()) == files
    before = [(folder / name).read_bytes() for name in ("summary.json", "metrics.jsonl")]
    again = tiny_run(folder, **flags, resume="newest")  # is complete, and keeps its figures
    assert all(
        summary[key] == again[key] for key in ("val_loss", "best_val_loss", "step", "tokens")
    )
    assert [(folder / name).read_bytes() for name in ("summary.json", "metrics.jsonl")] == before


def opened_run(folder: Path, step: int = 0, **flags) -> Run:
    """A Run with its files open, as after begin() at this step."""
    opened = Run(folder, make_config(**flags), CPU, [])
    opened.stream = SimpleNamespace(vocabulary=None)
    opened.lock_folder()
    opened.open_files(step)
    return opened


def test_a_resumed_run_keeps_its_sources_too(tmp_path, monkeypatch):
    source, folder = tmp_path / "train_gpt.py", tmp_path / "run"
    monkeypatch.setattr(sources, "SOURCE_FILES", {"train_gpt.py": source})
    for step, text in ((0, "first"), (9, "second")):
        source.write_text(text)
        opened_run(folder, step).close()
    assert (folder / "source" / "train_gpt.py").read_text() == "first"
    assert (folder / "source_9" / "train_gpt.py").read_text() == "second"
    hashes = [hashlib.sha256(text).hexdigest() for text in (b"first", b"second")]
    assert re.findall(r"^sources: train_gpt.py sha256 (\w+)$", read_log(folder), re.M) == hashes


def test_target_profile_and_a_failed_start(data, tmp_path, capsys):
    flags = dict(data=data, max_steps=30, eval_every=2, target_val_loss=4.0, profile=2)
    summary = tiny_run(tmp_path / "a", **flags)
    assert (
        summary["stopped_by"] == "target_val_loss"
        and summary["target_reached"]["step"] == summary["step"] < 30
    )
    assert summary["val_loss"] <= 4.0 and (tmp_path / "a" / f"ckpt_{summary['step']}.pt").exists()
    events = json.loads((tmp_path / "a" / "trace_rank0.json").read_text())["traceEvents"]
    assert any("aten::mm" in event.get("name", "") for event in events)
    assert "Self CPU time total" in read_log(tmp_path / "a")
    own = make_data(tmp_path / "data")
    (own / "meta.json").unlink()
    (own / "meta.json").mkdir()
    (tmp_path / "file").touch()
    for name, out_dir in dict(meta=tmp_path / "b", file=tmp_path / "file").items():
        code, err = run_main(flags_of(TINY | dict(data=own, out_dir=out_dir)), capsys)
        assert code == 2 and re.fullmatch(
            rf"error: \S*{name}\S* cannot be read or written .*\n", err
        ), err
    assert not (tmp_path / "b").exists()  # made for a run that has not begun


def test_wandb_gets_the_rows_and_a_failed_login_is_told(data, tmp_path, monkeypatch, capsys):
    logged = []
    run = SimpleNamespace(
        log=lambda values, step: logged.append((step, values)), finish=lambda: logged.append("end")
    )
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=lambda **_: run))
    tiny_run(tmp_path / "a", data=data, max_steps=2, wandb=True)
    assert (
        logged.pop() == "end"
        and [step for step, _ in logged] == [1, 2, 2]
        and "val_loss" in logged[-1][1]
    )
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace())  # as with a broken package
    code, err = run_main(
        flags_of(TINY | dict(data=data, out_dir=tmp_path / "b", wandb=True)), capsys
    )
    assert code == 2 and re.fullmatch("error: --wandb could not start .* WANDB_MODE=offline\n", err)


def test_a_folder_with_a_run_is_not_overwritten_or_shared(data, plain, tmp_path, capsys):
    code, err = run_main(flags_of(TINY | dict(data=data, out_dir=plain)), capsys)
    assert code == 2 and "already holds ckpt_20.pt; add --resume" in err
    flags = flags_of(TINY | dict(data=data, out_dir=tmp_path / "run", max_steps=1))
    holder = Run(tmp_path / "run", make_config(), CPU, [])
    holder.lock_folder()
    code, err = run_main(flags, capsys)
    assert code == 2 and "another run is using" in err
    holder.close()
    (tmp_path / "run").mkdir(exist_ok=True)
    (tmp_path / "run" / ".tmp-ckpt_1.pt").touch()  # of a run that died
    assert run_main(flags, capsys)[0] == 0 and not list((tmp_path / "run").glob(".tmp*"))


# --------------------------------------------------------------------------------------------------
# Time


def test_progress_of_a_run():
    steps, clock = make_config(max_steps=8), make_config(minutes=2.0)
    assert [get_progress(steps, step, 99, 1e9, 9) for step in (0, 2, 8)] == [0, 0.25, 1]
    assert get_progress(clock, 3, 0, wall_s=53, tail_s=10) == pytest.approx(
        0.5
    )  # of 120 s - 10 s - 4 s
    assert get_progress(clock, 3, 6, 53, 10) == 1  # the text has been seen often enough
    assert get_progress(make_config(minutes=2.0, weight_decay=0.8), 3, 6, 53, 10) == 0.5
    cfg = make_config(max_steps=100, warmup_frac=0.1, cooldown_frac=0.5)
    factors = [get_lr_multiplier(progress, cfg) for progress in (0, 0.04, 0.3, 0.5, 0.75, 1)]
    assert factors == pytest.approx([0.1, 0.5, 1, 1, 0.5, 0])


@pytest.fixture
def clock(monkeypatch) -> list[float]:
    """Seconds of a clock on which a step takes 1 s, an evaluation 3 s, and everything else no
    time."""
    now, step, evaluate = [0.0], train_gpt.train_step, train_gpt.evaluate

    def take(seconds, function):
        def call(*arguments):
            now[0] += seconds
            return function(*arguments)

        return call

    monkeypatch.setattr(
        run_module, "time", SimpleNamespace(perf_counter=lambda: now[0], monotonic=time.monotonic)
    )
    monkeypatch.setattr(train_gpt, "train_step", take(1, step))
    monkeypatch.setattr(train_gpt, "evaluate", take(3, evaluate))
    return now


def test_minutes_follow_the_clock_also_over_a_resume(clock, data, tmp_path):
    flags = {name: value for name, value in TINY.items() if name != "max_steps"} | dict(
        data=str(data), eval_every=20
    )
    flags |= dict(out_dir=str(tmp_path / "run"), minutes=1.0)
    halfway = train(make_config(**flags, max_minutes=0.5))
    assert halfway["stopped_by"] == "max_minutes" and 25 < halfway["step"] < 31
    clock[0] += 1000  # between the two processes
    summary = train(make_config(**flags, max_minutes=0.0, resume="newest"))
    assert summary["stopped_by"] == "minutes" and 50 < summary["wall_time_s"] <= 60
    assert summary["train_time_s"] == summary["step"] and 40 < summary["step"] < 56
    rates = rows(tmp_path / "run", "lr")
    assert (
        rates[:12] == [0.02] * 12
        and 0 < rates[-1] < 0.002
        and max(np.diff(rates)) < 0.001 > min(np.diff(rates))
    )


def test_a_size_chosen_by_minutes_is_trained_and_resumed(data, tmp_path):
    flags = dict(
        data=str(data),
        out_dir=str(tmp_path / "run"),
        device="cpu",
        dtype="fp32",
        seq_len=32,
        ngram=0,
    )
    summary = train(make_config(**flags, minutes=0.1))
    config = final(tmp_path / "run")["config"]
    assert config["params"] > 0 and summary["tokens"] == summary["step"] * config["batch_tokens"]
    again = train(make_config(out_dir=flags["out_dir"], resume="newest"))
    assert (
        again["step"] >= summary["step"]
        and config["batch_tokens"] == final(tmp_path / "run")["config"]["batch_tokens"]
    )


def test_max_minutes_leave_the_schedule_alone(clock, data, tmp_path):
    tiny_run(tmp_path / "whole", data=data)
    assert tiny_run(tmp_path / "run", data=data, max_minutes=0.1)["step"] == 6
    assert tiny_run(tmp_path / "run", data=data, max_minutes=0.1, resume="newest")["step"] == 12
    tiny_run(tmp_path / "run", data=data, max_minutes=0, resume="newest")
    assert rows(tmp_path / "run", "train_loss") == rows(tmp_path / "whole", "train_loss")
    assert_weights_equal(tmp_path / "run", tmp_path / "whole")


def test_trials_end_with_the_first_that_does_not(monkeypatch, capsys):
    ends = ["max_steps"] * 3
    trained = []

    def fake(cfg):
        trained.append(cfg.out_dir)
        return dict(val_loss=2.0 + cfg.seed, train_time_s=3.0, stopped_by=ends[cfg.seed])

    monkeypatch.setattr(train_gpt, "train", fake)
    cfg = make_config(trials=3, out_dir="runs/x")
    train_gpt.run_trials(cfg)
    expected = "3 trials in runs/x: val_loss 3.0000 +- 1.0000, train_time 3.0 s each"
    assert expected in capsys.readouterr().out
    assert trained == ["runs/x/seed_0", "runs/x/seed_1", "runs/x/seed_2"]
    ends[1] = "SIGTERM"
    train_gpt.run_trials(cfg)
    assert len(trained) == 5 and "trials" not in capsys.readouterr().out


# --------------------------------------------------------------------------------------------------
# Checkpoints: damaged, foreign, of other branches, resumed


def test_damaged_checkpoints_are_passed_over(data, tmp_path, capsys):
    folder = tmp_path / "run"
    common = dict(data=data, save_every=5, keep=0, max_steps=15)
    tiny_run(folder, **common)
    os.truncate(folder / "ckpt_15.pt", (folder / "ckpt_15.pt").stat().st_size // 2)
    flipped = bytearray((folder / "ckpt_10.pt").read_bytes())
    flipped[len(flipped) // 2] ^= 1
    (folder / "ckpt_10.pt").write_bytes(flipped)
    torch.load(folder / "ckpt_10.pt", weights_only=True)  # PyTorch itself does not notice
    with pytest.raises(UserError, match="ckpt_10.pt is damaged"):
        read_checkpoint(folder / "ckpt_10.pt")
    tiny_run(folder, **common, resume="newest")
    assert "resumed from" in capsys.readouterr().out.split("ckpt_5.pt")[0]
    assert {path.name for path in folder.glob("*.damaged")} == {
        "ckpt_15.pt.damaged",
        "ckpt_10.pt.damaged",
    }
    for path in folder.glob("ckpt_*.pt"):
        path.unlink()
    for flags, said in (
        (dict(), "holds damaged checkpoints only"),
        (dict(resume="newest"), "has no valid checkpoint"),
    ):
        assert said in run_main(flags_of(TINY | common | dict(out_dir=folder) | flags), capsys)[1]


def test_foreign_checkpoints_are_refused_and_not_executed(tmp_path):
    class Evil:
        def __reduce__(self):
            return (os.mkdir, (str(tmp_path / "executed"),))

    for content in (
        dict(step=1, model=Evil()),
        dict(model={}, optimizer={}, iter_num=5),
        torch.zeros(3),
    ):
        torch.save(content, tmp_path / "ckpt_1.pt")
        with pytest.raises(
            UserError, match="is damaged, or not a checkpoint of this version of the trainer"
        ):
            read_checkpoint(tmp_path / "ckpt_1.pt")
    with pytest.raises(UserError, match="there is no checkpoint"):
        read_checkpoint(tmp_path / "ckpt_2.pt")
    assert not (tmp_path / "executed").exists()


def test_checkpoints_that_do_not_fit(data, plain, tmp_path, capsys):
    content = final(plain)
    assert (
        content["step"] == 20
        and content["config"]["n_embd"] == 32
        and content["tokenizer"] == "bytes"
    )
    assert content["position"] == dict(seed=0, seq_len=32, windows=905, epoch=0, window=320)
    kept = {name: w for name, w in content["model"].items() if name != "head.weight"}
    torch.save(content | dict(model=kept), tmp_path / "ckpt_19.pt")
    content["model_config"]["version"] = 1
    torch.save(content, tmp_path / "ckpt_20.pt")
    other = make_data(tmp_path / "other")
    meta = json.loads((other / "meta.json").read_text())
    meta["files"]["a_train_2.bin"] = dict(tokens=50, sha256="")
    write_shard(other / "a_train_2.bin", np.zeros(50, dtype=np.uint16))
    (other / "meta.json").write_text(json.dumps(meta))
    common = TINY | dict(data=data, out_dir=tmp_path / "run", resume=list_checkpoints(plain)[0])
    elsewhere = "continues at another place of the stream"
    for change, sentence in [
        (
            dict(n_embd=64, n_layer=3),
            "does not fit this model (n_layer 2 there and 3 here, n_embd 32 there and 64",
        ),
        (
            dict(resume=tmp_path / "ckpt_19.pt"),
            'Missing key(s) in state_dict: "head.weight".); use',
        ),
        (dict(data=other), "was trained on other data"),
        (dict(optimizer="adamw"), "--optimizer adamw is for new runs"),
        (
            dict(resume=tmp_path / "ckpt_20.pt"),
            "holds version 1 of the model, and this is version 3",
        ),
        (dict(seed=1), elsewhere),
        (dict(batch_tokens=1024), elsewhere),
        (dict(doc_align=True), elsewhere),
        (dict(init_from=plain), "contradict each other"),
        (dict(resume="", init_from=plain, n_head=1), "n_head 2 there and 1 here"),
    ]:
        code, err = run_main(flags_of(common | change), capsys)
        assert code == 2 and sentence in err and err.count("\n") == 1, err
    assert (
        run_main(
            flags_of(common | dict(resume="", init_from=plain, seq_len=16, micro_batch=1)), capsys
        )[0]
        == 0
    )


def test_which_run_is_resumed_and_branches_are_safe(data, plain, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    runs, common = Path("runs"), dict(data=data, save_every=2, keep=0)
    assert "add --out_dir RUN, a run's folder" in run_main(["--resume"], capsys)[1]
    tiny_run("runs/a", **common, max_steps=2)
    assert "add --out_dir runs/a" in run_main(["--resume"], capsys)[1]
    again = make_config(
        resume=str(runs / "a"), max_steps=4
    )  # a folder is --out_dir, with the flags it had
    assert (again.out_dir, again.resume, again.n_embd, again.max_steps) == (
        str(runs / "a"),
        "newest",
        32,
        4,
    )
    assert make_config(resume=str(runs / "a" / "ckpt_2.pt")).out_dir == str(runs / "a")
    assert train(again)["step"] == 4 and rows("runs/a", "step") == [1, 2, 2, 3, 4, 4]
    (runs / "a" / "ckpt_6 (copy).pt").touch()
    with pytest.raises(
        UserError, match="ckpt_4.pt, later than .*ckpt_2.pt; give another --out_dir"
    ):
        tiny_run("runs/a", resume=runs / "a" / "ckpt_2.pt")
    assert (
        make_config(out_dir="runs/b", resume="auto").n_embd == 128
    )  # a new one, with the preset's
    assert tiny_run("runs/b", data=data, max_steps=1, resume="auto")["step"] == 1
    assert (
        tiny_run("runs/c", data=data, resume=plain, max_steps=21)["step"] == 21
    )  # a branch of another folder
    assert rows("runs/c", "step") == [21, 21]
    tiny_run(
        "runs/d", **common | dict(keep=1), init_from=runs / "a" / "ckpt_2.pt", max_steps=3
    )  # a fresh schedule
    assert rows("runs/d", "step") == [1, 2, 3, 3] and len(list_checkpoints(runs / "d")) == 1


def test_a_restart_continues_from_what_was_saved(data, noisy, plain, tmp_path, monkeypatch):
    common = dict(data=data, init_from=noisy, max_steps=4, save_every=2)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    tiny_run(tmp_path / "run", **common)  # died before it saved: starts from the same weights again
    assert rows(tmp_path / "run", "train_loss")[0] == pytest.approx(
        rows(plain, "train_loss")[0], rel=1e-5
    )
    tiny_run(tmp_path / "run", **common)
    assert "resumed from" in read_log(tmp_path / "run")


def test_saved_before_evaluating_and_what_a_kill_prevented_is_made_up_for(
    data, tmp_path, monkeypatch
):
    common = dict(data=data, save_every=5, eval_every=5, keep=0)
    tiny_run(tmp_path / "whole", **common)

    def die(state, *_):
        assert (tmp_path / "run" / f"ckpt_{state.step}.pt").exists()
        if state.step == 10:
            raise ZeroDivisionError

    evaluate = train_gpt.evaluate
    with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):
        patch.setattr(train_gpt, "evaluate", lambda *inputs: die(*inputs) or evaluate(*inputs))
        tiny_run(tmp_path / "run", **common)
    assert "ended: Traceback" in read_log(tmp_path / "run")
    with open(tmp_path / "run" / "metrics.jsonl", "a") as file:
        file.write(
            '[1]\n{"loss": 2}\n\x00\x00\n{"step": "x"}\n'
            '{"step": 11, "train_loss": 9}\n{"step": 12, "tra'
        )
    tiny_run(tmp_path / "run", **common, resume="newest")
    assert_same_run(tmp_path / "run", tmp_path / "whole", exact=True)
    assert rows(tmp_path / "run", "step") == rows(tmp_path / "whole", "step")


def test_what_an_edit_keeps_and_draws_resumes_exactly(data, tmp_path, monkeypatch):
    forward, step = GPT.forward, train_gpt.train_step

    def with_noise(self, idx, targets=None):
        loss = forward(self, idx, targets)
        return (
            loss * (0.5 + torch.rand(()) + random.random() + np.random.rand())
            if targets is not None
            else loss
        )

    def averaging(state, *inputs):
        found = step(state, *inputs)
        weights, count = state.extra.setdefault("eval_weights", {}), state.extra.get("steps", 0) + 1
        for name, p in state.raw_model.named_parameters():
            weights[name] = p.detach().clone().lerp_(weights.get(name, p.detach()), 0.5)
        state.extra["steps"] = state.metrics["steps"] = count
        return found

    monkeypatch.setattr(GPT, "forward", with_noise)
    monkeypatch.setattr(train_gpt, "train_step", averaging)
    common = dict(
        data=data, save_every=5, keep=0, max_steps=10, ngram=3, ngram_rows=65, ngram_dropout=0.4
    )
    tiny_run(tmp_path / "whole", **common, eval_every=3)
    tiny_run(tmp_path / "half", **common, resume=tmp_path / "whole" / "ckpt_5.pt")
    assert rows(tmp_path / "half", "train_loss") == rows(tmp_path / "whole", "train_loss")[5:]
    assert len(set(rows(tmp_path / "whole", "train_loss"))) == 10
    assert rows(tmp_path / "half", "steps") == [6, 7, 8, 9, 10, 10]
    assert_weights_equal(tmp_path / "half", tmp_path / "whole")
    ours, theirs = (final(tmp_path / name)["extra"]["eval_weights"] for name in ("half", "whole"))
    assert all(torch.equal(ours[name], w) for name, w in theirs.items())
    best = read_checkpoint(
        tmp_path / "whole" / "ckpt_best.pt"
    )  # the weights that were evaluated, and nothing else
    assert best["step"] == 10 and best["optimizer"] == best["extra"] == {}
    assert all(torch.equal(best["model"][name], w) for name, w in theirs.items())
    assert not all(
        torch.equal(final(tmp_path / "whole")["model"][name], w) for name, w in theirs.items()
    )


def test_the_best_weights_are_those_of_the_lowest_evaluation(data, tmp_path, monkeypatch, capsys):
    losses = iter([3.0, 2.0, 2.5, 2.0])
    monkeypatch.setattr(train_gpt, "evaluate", lambda *_: next(losses))
    summary = tiny_run(tmp_path / "run", data=data, max_steps=8, eval_every=2, save_every=4, keep=0)
    assert (summary["best_val_loss"], summary["val_loss"]) == (2.0, 2.0)
    best, then = (
        read_checkpoint(tmp_path / "run" / name)["model"] for name in ("ckpt_best.pt", "ckpt_4.pt")
    )
    assert all(torch.equal(w, then[name]) for name, w in best.items())
    code, err = run_main(
        flags_of(TINY | dict(data=data, resume=tmp_path / "run" / "ckpt_best.pt")), capsys
    )
    assert code == 2 and "holds weights only, so it cannot be resumed; use --init_from" in err


def test_an_old_checkpoint_goes_only_when_the_new_one_has_been_read_back(
    data, tmp_path, monkeypatch, capsys
):
    saving = torch.save

    def torn(content, file):
        saving(content, file)
        if content["step"] > 5:
            file.seek(file.tell() // 2)
            file.write(b"\xff" * 64)

    monkeypatch.setattr(torch, "save", torn)
    flags = TINY | dict(data=data, out_dir=tmp_path / "run", save_every=5, keep=1, max_steps=10)
    code, err = run_main(flags_of(flags), capsys)
    assert code == 1 and "is damaged" in err and "newest checkpoint there is ckpt_5.pt" in err
    assert final(tmp_path / "run")["step"] == 5 and not list((tmp_path / "run").glob(".tmp*"))


# --------------------------------------------------------------------------------------------------
# Bad numbers


@pytest.mark.parametrize("optimizer", ["muon", "adamw"])
def test_bad_steps_are_skipped_and_told(optimizer, data, tmp_path, monkeypatch):
    flags = dict(data=data, micro_batch=16, max_steps=8, optimizer=optimizer, log_every=4)
    step, calls = Optimizer.step, iter(range(1, 9))
    with monkeypatch.context() as patch:
        patch.setattr(Optimizer, "step", lambda self: None if next(calls) in (3, 6) else step(self))
        tiny_run(tmp_path / "without", **flags)
    spoil(monkeypatch, {3, 6}, math.nan if optimizer == "muon" else math.inf)
    tiny_run(tmp_path / "run", **flags)
    assert_weights_equal(tmp_path / "run", tmp_path / "without")
    assert re.findall(r"step (\d) skipped.*\(1 in a row\)", read_log(tmp_path / "run")) == [
        "3",
        "6",
    ]
    assert rows(tmp_path / "run", "step") == [1, 4, 8, 8]


def test_too_many_bad_steps_end_the_run(data, tmp_path, monkeypatch, capsys):
    flags = TINY | dict(data=data, out_dir=tmp_path / "run", micro_batch=16, save_every=2, keep=0)
    spoil(monkeypatch, {3, *range(5, 99)})
    code, err = run_main(flags_of(flags), capsys)
    end = 4 + MAX_BAD_STEPS
    said = f"many steps in a row, to step {end} (ckpt_{end}.pt has the weights from before); try"
    assert code == 1 and err.count("\n") == 1 and said in err and said in read_log(tmp_path / "run")
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["stopped_by"] == "diverged"
    assert (
        rows(tmp_path / "run", "train_loss")[4] is None
        and rows(tmp_path / "run", "grad_norm")[4] is None
    )
    before = read_checkpoint(tmp_path / "run" / "ckpt_4.pt")["model"]
    assert all(torch.equal(w, before[name]) for name, w in final(tmp_path / "run")["model"].items())


# --------------------------------------------------------------------------------------------------
# Full disks and memory


@contextlib.contextmanager
def no_room(size=100_000):
    """The system refuses to write files larger than this, as a full disk would."""
    resource = pytest.importorskip("resource")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_costs_no_row_and_at_the_end_is_an_error(data, tmp_path, monkeypatch, capsys):
    step, room = train_gpt.train_step, contextlib.ExitStack()

    def while_full(state, *inputs):
        if state.step in (8, 19):
            room.enter_context(no_room(0 if state.step == 8 else 100_000))
        if state.step == 12:
            room.close()
        return step(state, *inputs)

    flags = TINY | dict(data=data, out_dir=tmp_path / "run", save_every=5, keep=1)
    with room, monkeypatch.context() as patch:
        patch.setattr(train_gpt, "train_step", while_full)
        assert train_gpt.main(flags_of(flags)) == 1
    out, err = capsys.readouterr()
    assert (
        err.count("\n") == 1 and "ckpt_20.pt could not be saved ([Errno 27] File too large)" in err
    )
    assert "newest checkpoint there is ckpt_15.pt; make room and --resume" in err
    assert (
        "metrics.jsonl cannot be written (File too large)" in out
        and "ckpt_10.pt could not be saved" in out
    )
    assert rows(tmp_path / "run", "step") == [*range(1, 21)] and "step 10/20 | loss" in read_log(
        tmp_path / "run"
    )
    assert [path.name for path in (tmp_path / "run").glob("*ckpt*")] == ["ckpt_15.pt"]
    assert run_main(flags_of(flags | dict(resume="newest")), capsys)[0] == 0
    tiny_run(tmp_path / "whole", data=data)
    assert_same_run(tmp_path / "run", tmp_path / "whole", exact=True)


def test_a_checkpoint_waits_for_the_rows_before_it(tmp_path, capsys):
    """A row that a full disk held back is on the disk before a checkpoint that would resume behind
    it."""
    opened = opened_run(tmp_path)
    with no_room(10):
        opened.write(opened.metrics, '{"step": 1}')
        with pytest.raises(OSError):
            opened.sync_metrics()
    opened.sync_metrics()
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 1}\n'
    opened.close()


def test_out_of_memory_is_one_sentence(data, tmp_path, capsys):
    flags = TINY | dict(data=data, out_dir=tmp_path / "run", n_embd=200_000_000, n_head=1)
    code, err = run_main(flags_of(flags), capsys)  # a real failure: terabytes
    assert code == 1 and err.count("\n") == 1
    assert re.search(r"memory ran out \(.*\); try a smaller --micro_batch", err), err


def test_what_is_a_lack_of_memory():
    said = "CUDA error: out of memory\nTriton Error [CUDA]: out of memory\n"
    said += "could not create a primitive\n"
    said += "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`\n"
    said += "[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory"
    errors = [
        *map(RuntimeError, said.splitlines()),
        MemoryError(),
        OSError(12, "Cannot allocate memory"),
    ]
    for error in (
        *errors,
        torch.OutOfMemoryError("CUDA out of memory."),
        torch.AcceleratorError("out of memory"),
    ):
        assert is_out_of_memory(error) and error_sentence(error).startswith("memory ran out"), error
    no_matmul = RuntimeError("could not create a primitive descriptor for a matmul")
    for error in (no_matmul, UserError("--data 'out of memory'"), ValueError("out of memory")):
        assert not is_out_of_memory(error) and not error_sentence(error).startswith(
            "memory ran out"
        ), error
    old = torch.AcceleratorError(
        "CUDA error: no kernel image is available for execution on the device"
    )
    assert "whl/cu126`, for a newer one the newest PyTorch" in error_sentence(old)


@pytest.mark.parametrize("trained, said", [(0.0, True), (1e9, False)])
def test_a_long_run_is_told_of_compile(trained, said, data, tmp_path, monkeypatch):
    monkeypatch.setattr(run_module, "COMPILE_PAYS_S", trained)
    tiny_run(tmp_path / "run", data=data, max_steps=2)
    assert read_log(tmp_path / "run").rstrip().endswith(" | faster: --compile") == said


# --------------------------------------------------------------------------------------------------
# Signals


@pytest.mark.parametrize(
    "place, name, call, step",
    [(train_gpt, "train_step", 6, 6), (train_gpt, "max_over_ranks", 9, 4), (torch, "save", 3, 7)],
)
def test_a_signal_saves_and_a_resumed_run_is_the_undisturbed_one(
    place, name, call, step, data, tmp_path, monkeypatch
):
    """The signal comes in a step, in an evaluation (whose batches ask all ranks for signals), and
    in a save."""
    flags = dict(data=data, eval_every=4, save_every=3, eval_tokens=0)
    tiny_run(tmp_path / "whole", **flags)
    function, evaluate, calls, values = getattr(place, name), train_gpt.evaluate, [], []

    def and_signal(*arguments):
        calls.append(1)
        if len(calls) == call:
            os.kill(os.getpid(), signal.SIGTERM)
        return function(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(place, name, and_signal)
        patch.setattr(
            train_gpt, "evaluate", lambda *inputs: values.append(evaluate(*inputs)) or values[-1]
        )
        summary = tiny_run(tmp_path / "run", **flags)
    assert summary["stopped_by"] == "SIGTERM" and summary["step"] == step
    assert (None in values) == (name == "max_over_ranks")  # not finished: little time may be left
    assert "to continue: python train_gpt.py --out_dir" in read_log(tmp_path / "run")
    tiny_run(tmp_path / "run", **flags, resume="auto")
    assert_same_run(tmp_path / "run", tmp_path / "whole", exact=True)
    assert rows(tmp_path / "run", "step") == rows(tmp_path / "whole", "step")


def test_a_second_signal_ends_the_process_at_once():
    code = (
        "import os, signal, time; from common import catch_signals\n"
        "with catch_signals() as caught:\n"
        "    os.kill(os.getpid(), signal.SIGUSR1); os.kill(os.getpid(), signal.SIGTERM); "
        "print(caught, flush=True)\n"
        "    time.sleep(0.6); os.kill(os.getpid(), signal.SIGTERM); print('still here')"
    )
    done = run_python("-c", code)
    assert done.returncode == -signal.SIGTERM and done.stdout == "['SIGUSR1', 'SIGTERM']\n"


# --------------------------------------------------------------------------------------------------
# Ranks that fail


def ranks_script(folder: Path, case: str) -> None:
    """What each of two ranks does in the tests below."""
    patch, step = pytest.MonkeyPatch(), train_gpt.train_step
    flags = TINY | dict(
        data=str(folder / "data"), out_dir=str(folder / case), max_steps=6, save_every=1, keep=0
    )

    def dying(state, *inputs):
        if os.environ["RANK"] == "1" and state.step == 3:
            os.kill(os.getpid(), signal.SIGKILL) if case == "kill" else 1 / 0
        return step(state, *inputs)

    if case != "nan":
        patch.setattr(train_gpt, "train_step", dying)
        exit_process(train_gpt.main(flags_of(flags)))
    for name, more in dict(
        ddp={}, fsdp=dict(parallel="fsdp"), adamw=dict(optimizer="adamw")
    ).items():
        with pytest.MonkeyPatch.context() as patch:
            spoil(
                patch, {5, 7}, math.nan if name == "ddp" else math.inf, rank="1"
            )  # after two of the warm-up
            train(make_config(**flags | more | dict(out_dir=str(folder / name))))
    spoil(patch, set(range(5, 99)), rank="1")
    exit_process(train_gpt.main(flags_of(flags | dict(max_steps=20))))


def test_nan_in_one_rank_is_skipped_on_all(data, tmp_path):
    (tmp_path / "data").symlink_to(data)
    done = run_ranks(tmp_path, __file__, tmp_path, "nan")
    said = "".join(done.stderr)
    assert (
        done.codes == [1, 1] and said.count("many steps in a row") == 1 and "error [rank 0]" in said
    ), done
    assert "deprecated" not in said and "FutureWarning" not in said  # PyTorch's own
    for name in ("ddp", "fsdp", "adamw"):
        steps = [read_checkpoint(tmp_path / name / f"ckpt_{step}.pt") for step in range(1, 7)]
        for a, b in ((steps[1], steps[2]), (steps[3], steps[4])):  # nothing moved
            before, after = ([found["model"], found["optimizer"]] for found in (a, b))
            torch.testing.assert_close(before, after, rtol=0, atol=0)
        assert all(w.isfinite().all() for w in steps[5]["model"].values())
        assert not torch.equal(steps[2]["model"]["head.weight"], steps[3]["model"]["head.weight"])


@pytest.mark.parametrize("case", ["raise", "kill"])
def test_a_rank_that_dies_ends_the_others(case, data, tmp_path):
    (tmp_path / "data").symlink_to(data)
    done = run_ranks(tmp_path, __file__, tmp_path, case)
    assert done.codes == [1, 1 if case == "raise" else -signal.SIGKILL], done
    assert "[rank 0]: another rank has ended" in done.stderr[0], done
    assert case == "kill" or "ZeroDivisionError" in done.stderr[1], done
    assert final(tmp_path / case)["step"] == 3


# --------------------------------------------------------------------------------------------------
# Kills


def start_ranks(out: Path, data: Path, world: int) -> list:
    """The processes of a run that continues in its folder; their output is in output.txt beside
    it."""
    flags = dict(
        n_layer=1,
        batch_tokens=256,
        micro_batch=4,
        max_steps=12,
        save_every=1,
        eval_every=5,
        eval_tokens=1024,
    )
    argv = flags_of(TINY | flags | dict(data=data, out_dir=out, resume="auto"))
    shared = dict(
        WORLD_SIZE=world, LOCAL_WORLD_SIZE=world, MASTER_ADDR="127.0.0.1", MASTER_PORT=free_port()
    )
    places = (
        [shared | dict(RANK=rank, LOCAL_RANK=rank) for rank in range(world)] if world > 1 else [{}]
    )
    environments = [
        os.environ | {name: str(value) for name, value in place.items()} for place in places
    ]
    outputs = (out.parent / "output.txt",) * 2
    return [forked(ROOT / "train_gpt.py", *argv, outputs=outputs, env=env) for env in environments]


def exit_codes(ranks: list, patience: float) -> list[int]:
    """As torchrun does, ends ranks that still wait for one which has gone (as while they are
    connecting)."""
    for rank in ranks:
        rank.join(patience)
        rank.kill()
        rank.join()
    return [rank.exitcode for rank in ranks]


@pytest.mark.parametrize("world", [1, 2])
def test_killed_runs_end_as_if_nothing_had_been(world, data, tmp_path):
    """Runs that are killed at random moments, and resumed until they end, are the undisturbed run.

    Half of the kills come after a random time, half when a checkpoint is being written; with two
    ranks, a third hit one rank only, and the other has to end by itself.
    """
    rng, killed, runs, began = random.Random(0), 0, [tmp_path / "run0"], time.monotonic()
    assert exit_codes(start_ranks(tmp_path / "whole", data, world), 60) == [0] * world
    span = time.monotonic() - began
    while killed < int(os.environ.get("KILLS", 2)):
        began = time.monotonic()
        ranks, moment = start_ranks(runs[-1], data, world), began + rng.random() * span
        pattern = ".tmp-ckpt*" if rng.random() < 0.5 else "*"
        while all(rank.is_alive() for rank in ranks):
            if time.monotonic() > moment and any(runs[-1].glob(pattern)):
                break
            time.sleep(0.0005)
        for rank in ranks if world == 1 or rng.random() < 0.67 else [rng.choice(ranks)]:
            rank.kill()
        codes = exit_codes(ranks, 3)
        assert set(codes) <= {0, 1, -signal.SIGKILL}
        killed += -signal.SIGKILL in codes
        if codes == [0] * world:
            span = min(span, time.monotonic() - began)
            runs.append(tmp_path / f"run{len(runs)}")
    for run in runs:
        codes = exit_codes(start_ranks(run, data, world), 60)
        assert codes == [0] * world, (tmp_path / "output.txt").read_text()
        for key in ("step", "train_loss", "grad_norm", "lr", "val_loss", "tokens"):
            assert rows(run, key) == rows(tmp_path / "whole", key), (run, key)
        assert_weights_equal(run, tmp_path / "whole")


if __name__ == "__main__":
    ranks_script(Path(sys.argv[1]), sys.argv[2])
