"""A run: folder, checkpoints, log, errors, signals; what bad numbers, full disks and kills do."""

import contextlib
import errno
import hashlib
import importlib
import itertools
import json
import math
import os
import random
import re
import signal
import sys
import time
import zipfile
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch

import train_gpt
from common.errors import (
    RunError,
    UserError,
    error_sentence,
    exit_process,
    is_out_of_memory,
    run_command,
)
from conftest import (
    ROOT,
    TINY,
    assert_undisturbed,
    assert_weights_equal,
    final,
    flags_of,
    make_data,
    refusal,
    rows,
    run_python,
    run_ranks,
    seed_all,
    start_ranks,
    tiny_run,
)
from model import GPT
from ops.parallel import to_local
from runtime import checkpoint as checkpoint_module
from runtime import progress as progress_module
from runtime import run as run_module
from runtime import run_folder
from runtime.checkpoint import list_checkpoints, read_checkpoint
from runtime.log import SECTION
from runtime.progress import MAX_BAD_STEPS, Status, reason_to_stop, time_left, time_progress
from runtime.resume import newest_valid
from runtime.run import SIGNALS, catch_signals
from runtime.run_folder import SOURCE_FILES, locked_folder
from runtime.trials import run_trials
from train_gpt import get_batch, make_config, train


def read_log(run: Path) -> str:
    return (run / "log.txt").read_text()


def equal_weights(ours: dict, theirs: dict) -> bool:
    return all(torch.equal(ours[name], w) for name, w in theirs.items())


def spoil(monkeypatch, at, factor=math.nan, rank=None) -> None:
    """Multiply the loss in the training passes `at` (numbers from 1), on one rank or on all."""
    forward = GPT.forward
    count = 0

    def spoiled(self, idx, targets=None):
        nonlocal count
        loss = forward(self, idx, targets)
        if not torch.is_grad_enabled() or targets is None:
            return loss
        count += 1
        if count in at and rank in (os.environ.get("RANK"), None):
            return loss * factor
        return loss

    monkeypatch.setattr(GPT, "forward", spoiled)


# --------------------------------------------------------------------------------------------------
# What a run leaves behind


def test_what_a_run_leaves_behind(data, tmp_path):
    folder = tmp_path / "run"
    flags = dict(data=data, max_steps=9, log_every=3, eval_every=6, target_val_loss=5.5, profile=2)
    losses = []
    summary = tiny_run(folder, **flags, on_step=lambda state, loss: losses.append(loss.item()))
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    first, _, last, evaluation = lines
    assert [row["step"] for row in lines] == [1, 3, 6, 6]
    clocks = {"step", "tokens", "train_time_s", "wall_time_s"}
    figures = {"train_loss", "lr", "grad_norm", "tokens_per_s", "mfu", "peak_mem_mb"}
    assert set(first) == clocks | figures and first["mfu"] is None
    assert set(evaluation) == clocks | {"val_loss", "val_bpb"}
    assert last["tokens"] == 6 * 512
    assert last["train_loss"] == pytest.approx(np.mean(losses[3:]))  # since the previous row
    assert 0 < first["train_time_s"] < last["train_time_s"] < last["wall_time_s"]
    assert summary == json.loads((folder / "summary.json").read_text())
    assert summary["stopped_by"] == "target_val_loss" and summary["target_reached"]["step"] == 6
    assert summary["val_loss"] == evaluation["val_loss"] <= 5.5
    events = json.loads((folder / "trace_rank0.json").read_text())["traceEvents"]
    assert any("aten::mm" in event.get("name", "") for event in events)
    text = read_log(folder)
    for name in SOURCE_FILES:
        content = (ROOT / name).read_bytes()
        assert (folder / "source" / name).read_bytes() == content
        assert f"{name} sha256 {hashlib.sha256(content).hexdigest()}" in text
    said = f"torch {torch.__version__}", '"muon_lr": 0.02', "step 6/9 | loss", "Self CPU time total"
    assert all(words in text for words in said)
    assert text.startswith(f"{SECTION} run\n{{") and "\ncommand: " in text

    # Resumed, it is complete, and keeps its figures. Its sources are kept if they are others
    (folder / "log.txt").write_text(text.replace("model.py sha256 ", "model.py sha256 0"))
    before = [(folder / name).read_bytes() for name in ("summary.json", "metrics.jsonl")]
    again = tiny_run(folder, **flags, resume="newest")
    for key in ("val_loss", "best_val_loss", "step", "tokens"):
        assert summary[key] == again[key]
    assert [(folder / name).read_bytes() for name in ("summary.json", "metrics.jsonl")] == before
    assert read_log(folder).count("\nsources: ") == 2 and (folder / "source_6/model.py").exists()
    assert read_log(folder).count("the run was complete: nothing was left to train") == 1


def test_installed_packages_are_not_sources_of_a_run(tmp_path, monkeypatch):
    for path in ("mine.py", "lib/site-packages/installed.py"):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).touch()
        monkeypatch.syspath_prepend((tmp_path / path).parent)
    monkeypatch.setattr(run_folder, "REPO", tmp_path)
    for name in ("mine", "installed"):
        monkeypatch.setitem(sys.modules, name, importlib.import_module(name))
    assert run_folder.run_sources().keys() - SOURCE_FILES.keys() == {"mine.py"}


def test_wandb_gets_the_rows(data, tmp_path, monkeypatch):
    run, flags = mock.Mock(), dict(data=data, wandb=True)
    wandb = SimpleNamespace(init=mock.Mock(return_value=run))
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    tiny_run(tmp_path, **flags, max_steps=2)
    *logged, end = run.mock_calls
    assert [call.kwargs["step"] for call in logged] == [1, 2, 2] and end == mock.call.finish()
    assert "val_loss" in logged[-1].args[0]
    run.log.side_effect = ConnectionError("the service is gone")
    assert tiny_run(tmp_path, **flags, max_steps=3, resume="newest")["step"] == 3
    first, second = (call.kwargs["id"] for call in wandb.init.call_args_list)
    said = "--wandb has failed (the service is gone); the run continues without it"
    assert first == second and read_log(tmp_path).count(said) == 1
    assert read_log(tmp_path).count("learning rates, which had fallen, rise again") == 1


def test_a_folder_with_a_run_is_not_overwritten_or_shared(data, plain, tmp_path):
    said = refusal(tiny_run, plain, data=data)
    assert "already holds ckpt_20.pt; add --resume auto" in said
    folder = tmp_path / "run"
    with locked_folder(folder):
        said = refusal(tiny_run, folder, data=data)
        assert f"another run (process {os.getpid()} on " in said
    assert not folder.exists()  # nothing was written
    # What a run that died can leave goes, and a folder that prepare.py is making stays
    (folder / ".tmp-data").mkdir(parents=True)
    (folder / ".tmp-ckpt_1.pt").touch()
    with locked_folder(folder):
        assert [path.name for path in folder.glob(".tmp*")] == [".tmp-data"]


# --------------------------------------------------------------------------------------------------
# Time


def test_progress_of_minutes():
    def done(wall_time: float, short_frac: float, minutes=2.0) -> float:
        cfg = make_config(minutes=minutes, short_frac=short_frac)
        clock = SimpleNamespace(wall_time=wall_time, typical_step_s=2.0, last_eval_s=0.0)
        # Of 120 s, 4 are reserved, and 8 are for an evaluation as large as 10 batches
        stream = SimpleNamespace(num_eval_seqs=lambda _: 40, seqs_per_batch=4)
        state = SimpleNamespace(cfg=cfg)
        return time_progress(SimpleNamespace(state=state, clock=clock, stream=stream))

    assert done(54, 0.0) == 0.5 and done(105, 0.7) < 1 == done(106.1, 0.7)
    # Of 13.2 s, 12 are for six steps, after which the run ends: the rate falls to its end
    times = [0.1 + 2 * i for i in range(6)]
    assert [done(time, 0.0, 25.2 / 60) for time in times] == pytest.approx(np.array(times) / 12.1)
    assert done(12.1, 0.0, 25.2 / 60) == 1
    # Where 70 % of the steps have short sequences, these are over after less of the time
    assert done(60, 0.7) > 60 / 105


def test_the_strongest_reason_ends_a_run():
    rows = [dict(val_loss=loss, tokens=2000, step=250) for loss in (2.0, 1.0, 1.5)]
    stream = SimpleNamespace(seqs_per_batch=10, seqs_per_epoch=100, vocab_size=256)
    stream.train = SimpleNamespace(n_tokens=1000)

    def why(progress=0.5, step=50, bad_steps=0, losses=3, flags=(0, 0), **cfg) -> str:
        run = SimpleNamespace(first_step=40, bad_steps=bad_steps, stream=stream)
        run.log = SimpleNamespace(evaluations=rows[:losses])
        run.state = SimpleNamespace(step=step, cfg=make_config(**cfg))
        return reason_to_stop(Status(progress, *flags, is_save_due=True), run)

    ends, minutes = dict(target_val_loss=1.2, patience=1), dict(minutes=1.0, step=600)
    assert why(target_val_loss=0.9, patience=2) == why(patience=1, losses=2) == ""
    assert why(patience=1) == "patience" and why(**ends) == "target_val_loss"
    assert why(patience=1, short_frac=0.9) == ""  # 270 steps have short sequences
    assert why(1, **ends) == "max_steps" and why(1, minutes=1.0, step=59) == "minutes"
    assert why(flags=(0, 1)) == "max_minutes" and why(flags=(0, 1), **minutes) == "epochs"
    assert why(flags=(0, 1), bad_steps=MAX_BAD_STEPS) == "diverged"
    assert why(flags=(1, 1), bad_steps=MAX_BAD_STEPS) == "signal"
    # A step is made first
    assert why(flags=(1, 1), step=40) == "" and why(1, flags=(1, 1), step=40) == "max_steps"
    rows[2]["tokens"] = 1000
    assert why(patience=1) == ""  # in the first epoch


def test_the_time_left_ends_with_the_epochs_of_minutes():
    clock = SimpleNamespace(typical_step_s=1.0, last_eval_s=3.0, wall_time=10.0)
    stream = SimpleNamespace(num_eval_seqs=lambda _: 1, seqs_per_batch=10, seqs_per_epoch=100)
    stream.vocab_size, stream.train = 256, SimpleNamespace(n_tokens=1000)

    def left(**cfg) -> float:
        state = SimpleNamespace(step=20, cfg=make_config(**cfg))
        return time_left(SimpleNamespace(state=state, clock=clock, stream=stream))

    # Six epochs are 60 steps, of which 18 have whole sequences
    assert left(minutes=9.0) == pytest.approx(40 + 0.7 * 18 + 3)
    assert left(minutes=0.5) == 20
    flags = dict(max_steps=100, eval_every=30)  # at 30, 60, 90 and 100
    assert left(short_frac=0.1, **flags) == 80 + 4 * 3
    assert left(short_frac=0.15, **flags) == pytest.approx(1.7 * 80 + 4 * 3)  # the switch is near


@pytest.fixture
def clock(monkeypatch) -> list[float]:
    """The time on a clock: a step takes 1 s, an evaluation 3 s, and everything else no time."""
    now = [0.0]

    def take(seconds: float, name: str) -> None:
        function = getattr(train_gpt, name)

        def call(*arguments):
            now[0] += seconds
            return function(*arguments)

        monkeypatch.setattr(train_gpt, name, call)

    fake = SimpleNamespace(perf_counter=lambda: now[0], monotonic=time.monotonic)
    monkeypatch.setattr(progress_module, "time", fake)
    take(1, "train_step")
    take(3, "evaluate")
    return now


def test_minutes_follow_the_clock_also_over_a_resume(clock, data, tmp_path):
    """Of a model whose size they choose, by the same command again and again."""
    folder = tmp_path / "run"
    flags = dict(data=data, out_dir=folder, seq_len=32, ngram=0, muon_lr=0.02, log_every=1)
    flags |= dict(device="cpu", dtype="fp32", eval_every=20, minutes=1.0, resume="auto")
    halfway = train(make_config(**flags, max_minutes=0.5))
    assert halfway["stopped_by"] == "max_minutes" and 25 < halfway["step"] < 31
    config = final(folder)["config"]
    clock[0] += 1000  # between the two processes
    summary = train(make_config(**flags))
    assert summary["stopped_by"] == "minutes" and 50 < summary["wall_time_s"] <= 60
    assert summary["train_time_s"] == summary["step"] and 40 < summary["step"] < 56
    assert config["params"] > 0 and summary["tokens"] == summary["step"] * config["batch_tokens"]
    # It is over; time does not run backwards
    assert train(make_config(**flags))["step"] == summary["step"] and "longer: " in read_log(folder)
    assert final(folder)["config"]["batch_tokens"] == config["batch_tokens"]
    times = rows(folder, "wall_time_s")
    assert times == sorted(times)
    rates = rows(folder, "lr")
    assert rates[:12] == [0.02] * 12 and 0.001 <= rates[-1] < 0.003
    assert max(np.diff(rates)) < 0.001 > min(np.diff(rates))


def test_max_minutes_leave_the_schedule_alone(clock, data, undisturbed, tmp_path):
    assert tiny_run(tmp_path / "run", data=data, max_minutes=0.1)["step"] == 6
    assert tiny_run(tmp_path / "run", data=data, max_minutes=0.1, resume="newest")["step"] == 12
    tiny_run(tmp_path / "run", data=data, max_minutes=0, resume="newest")
    assert_undisturbed(tmp_path / "run", undisturbed)
    # Seven steps are left, and an evaluation, which is estimated to take 1.6 s
    assert re.search("step 13/20 .* < 0:00:08", read_log(tmp_path / "run"))


def test_trials_end_with_the_first_that_does_not(capsys):
    trained = []

    def fake(cfg):
        trained.append(cfg.out_dir)
        ends = "SIGTERM" if len(trained) == 5 else "max_steps"
        return dict(val_loss=2.0 + cfg.seed, train_time_s=3.0, stopped_by=ends)

    cfg = make_config(trials=3, out_dir="runs/x")
    run_trials(cfg, fake)
    expected = "3 trials in runs/x: val_loss 3.0000 +- 1.0000, train_time 3.0 s each"
    assert expected in capsys.readouterr().out
    assert trained == ["runs/x/seed_0", "runs/x/seed_1", "runs/x/seed_2"]
    run_trials(cfg, fake)
    assert len(trained) == 5 and "1 of 3 trials are complete" in capsys.readouterr().out
    said = refusal(run_trials, make_config(trials=3, target_val_loss=1.0), fake)
    assert said.startswith("--trials compares whole runs")


# --------------------------------------------------------------------------------------------------
# Checkpoints: damaged, foreign, of other branches, resumed


def test_damaged_checkpoints_are_passed_over(data, tmp_path):
    folder = tmp_path / "run"
    common = dict(data=data, save_every=1, keep="all")
    tiny_run(folder, **common, max_steps=3)
    os.truncate(folder / "ckpt_3.pt", (folder / "ckpt_3.pt").stat().st_size // 2)
    flipped = bytearray((folder / "ckpt_2.pt").read_bytes())
    flipped[len(flipped) // 2] ^= 1
    (folder / "ckpt_2.pt").write_bytes(flipped)
    torch.load(folder / "ckpt_2.pt", weights_only=True)  # PyTorch itself does not notice
    assert "ckpt_2.pt is damaged" in refusal(read_checkpoint, folder / "ckpt_2.pt")
    # Also in a run that is named by its folder
    train(make_config(resume=str(folder), max_steps=4))
    assert f"resumed from {folder}/ckpt_1.pt" in read_log(folder)
    damaged = [path.name for path in folder.glob("*.damaged")]
    assert sorted(damaged) == ["ckpt_2.pt.damaged", "ckpt_3.pt.damaged"]
    for path in folder.glob("ckpt_*.pt"):
        path.unlink()
    assert refusal(tiny_run, folder, **common).endswith(".damaged; give another --out_dir")
    for resume in ("newest", "auto"):
        said = refusal(tiny_run, folder, **common, resume=resume)
        assert "has no valid checkpoint" in said


@pytest.mark.parametrize(
    "module, name, error",
    [
        (torch, "load", RuntimeError("unable to mmap 9 bytes: Cannot allocate memory (12)")),
        (zipfile, "_EndRecData", OSError(errno.EIO, "Input/output error")),  # hidden by zipfile
    ],
)
def test_what_cannot_be_read_for_a_moment_stays(module, name, error, tmp_path, monkeypatch):
    path = tmp_path / "ckpt_2.pt"
    torch.save({}, path)
    monkeypatch.setattr(module, name, mock.Mock(side_effect=error))
    said = re.escape(f"{path} cannot be read now ({error}), and is kept")
    with pytest.raises(RunError, match=said):
        newest_valid(tmp_path, SimpleNamespace(folder=tmp_path))
    assert path.exists()


def test_foreign_checkpoints_are_refused_and_not_executed(tmp_path):
    class Evil:
        def __reduce__(self):
            return (os.mkdir, (str(tmp_path / "executed"),))

    path, run = tmp_path / "ckpt_1.pt", SimpleNamespace(folder=tmp_path)
    assert "there is no checkpoint" in refusal(read_checkpoint, path)
    torch.save(dict(step=1, model=Evil()), path)
    assert "is damaged, or not a checkpoint" in refusal(read_checkpoint, path)
    assert not (tmp_path / "executed").exists()
    for content in (torch.zeros(3), dict(model={}, optimizer={}, iter_num=5)):  # nanoGPT's
        torch.save(content, path)
        said = refusal(newest_valid, tmp_path, run)  # nor renamed, nor passed over
        assert "is not a checkpoint of this version of the trainer" in said


def test_checkpoints_that_do_not_fit(data, plain, tmp_path):
    content = final(plain)
    weights = {name: w for name, w in content["model"].items() if name != "head.weight"}
    torch.save(content | dict(model=weights), tmp_path / "ckpt_19.pt")
    content["model_config"]["version"] = 1
    torch.save(content, tmp_path / "ckpt_20.pt")
    common = dict(data=data, resume=list_checkpoints(plain)[0])
    elsewhere = "was trained on other data than "
    shapes = "does not fit this model (n_layer 2 there and 3 here, n_embd 32 there and 64"
    missing = 'Missing key(s) in state_dict: "head.weight".); use'
    version = "does not fit this model (version 1 there and 7 here); use"
    for change, sentence in [
        (dict(n_embd=64, n_layer=3), shapes),
        (dict(resume=tmp_path / "ckpt_19.pt"), missing),
        (dict(resume=tmp_path / "ckpt_20.pt"), version),
        (dict(data=make_data(tmp_path / "other", seed=1)), elsewhere),
        (dict(seed=1), elsewhere),
        (dict(doc_align=True), elsewhere),
        (
            dict(resume=plain / "ckpt_best.pt"),
            "is for samples and --init_from; to continue its run",
        ),
        (dict(resume="", init_from=plain, n_head=1), "n_head 2 there and 1 here"),
    ]:
        assert sentence in refusal(tiny_run, tmp_path / "run", **common | change)


def test_which_run_is_resumed_and_branches_are_safe(data, plain, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    unclear = "--resume does not say which run: add --out_dir and the run's folder"
    for resume in ("newest", "auto"):
        assert refusal(train, make_config(resume=resume)) == unclear
    tiny_run("runs/a", data=data, save_every=2, keep="all", max_steps=2)
    # A folder is --out_dir, with the flags it had
    assert train(make_config(resume="runs/a", max_steps=3))["step"] == 3
    assert train(make_config(resume="runs/a/ckpt_3.pt", max_steps=4))["step"] == 4
    assert rows("runs/a", "step") == [1, 2, 2, 3, 3, 4, 4] and final("runs/a")["step"] == 4
    Path("runs/a/ckpt_6 (copy).pt").touch()
    said = refusal(tiny_run, "runs/a", resume="runs/a/ckpt_2.pt")
    assert re.search("ckpt_4.pt, later than .*ckpt_2.pt; give another --out_dir", said)
    # A branch of another folder
    for step in (20, 21):
        assert tiny_run("runs/b", data=data, resume=plain, max_steps=step)["step"] == step
        assert final("runs/b")["step"] == step
    assert rows("runs/b", "step") == [21, 21]
    assert not list(Path().glob("runs/a/source_*"))  # they have not changed


def test_saved_before_evaluating_and_what_a_kill_prevented_is_made_up_for(
    data, undisturbed, tmp_path, monkeypatch
):
    evaluate, folder = train_gpt.evaluate, tmp_path / "run"
    common = dict(data=data, save_every=4, eval_every=4, eval_tokens="all", keep="all")

    def dying(state, *inputs):
        assert (folder / f"ckpt_{state.step}.pt").exists()
        return 1 / 0 if state.step == 20 else evaluate(state, *inputs)

    with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):
        patch.setattr(train_gpt, "evaluate", dying)
        tiny_run(folder, **common)
    assert "ended: Traceback" in read_log(folder)
    with open(folder / "metrics.jsonl", "a") as file:
        file.write('\x00\x00\n{"step": 21, "train_loss": 9}\n{"step": 22, "tra')
    tiny_run(folder, **common, resume="newest")
    assert_undisturbed(folder, undisturbed)
    for key in ("step", "val_loss"):
        assert rows(folder, key) == rows(undisturbed, key)


def test_what_is_drawn_resumes_exactly(data, tmp_path, monkeypatch):
    forward = GPT.forward

    def with_noise(self, idx, targets=None):
        noise = 0.5 + torch.rand(()) + random.random() + np.random.rand()
        return forward(self, idx, targets) * (noise if self.training else 1)

    monkeypatch.setattr(GPT, "forward", with_noise)
    rest, whole = tmp_path / "rest", tmp_path / "whole"
    common = dict(data=data, save_every=2, keep="all", max_steps=4, dropout=0.2)
    tiny_run(whole, **common)
    tiny_run(rest, **common, resume=whole / "ckpt_2.pt")
    losses = rows(whole, "train_loss")
    assert rows(rest, "train_loss") == losses[2:] and len(set(losses)) == 4
    assert_weights_equal(rest, whole)


def test_the_best_weights_are_those_of_the_lowest_evaluation(data, tmp_path, monkeypatch):
    losses = iter([3.0, 2.0, 2.5, 2.1, 1.9, 1.95])
    monkeypatch.setattr(train_gpt, "evaluate", lambda *_: (next(losses), math.nan))
    folder, best = tmp_path / "run", tmp_path / "run" / "ckpt_best.pt"
    flags = dict(data=data, eval_every=2, save_every=4, keep="all")
    summary = tiny_run(folder, **flags, max_steps=6)
    assert (summary["best_val_loss"], summary["val_loss"]) == (2.0, 2.5)
    then = read_checkpoint(folder / "ckpt_4.pt")["model"]
    assert equal_weights(then, read_checkpoint(best)["model"])
    assert "val_loss has risen from 2.0000, its lowest" in read_log(folder)
    assert re.search(r"next: python sample.py \S+ --best\n", read_log(folder))

    # A resumed run knows it. If the file cannot be written, the next evaluation tries again
    write, failing = checkpoint_module.write_file, iter(["no room"])

    def write_or_fail(path, *rest) -> str:
        return (path == best and next(failing, "")) or write(path, *rest)

    monkeypatch.setattr(checkpoint_module, "write_file", write_or_fail)
    tiny_run(folder, **flags, max_steps=12, resume="newest")
    assert read_checkpoint(best)["step"] == 12
    assert "WARNING: no room" in read_log(folder)

    # A killed run may have left these alone
    for path in list_checkpoints(folder):
        path.unlink()
    said = refusal(tiny_run, folder, **flags)
    assert f"already holds ckpt_best.pt; give another --out_dir, with --init_from {best}" in said


def test_the_model_that_is_returned_is_the_evaluated_one(data, tmp_path):
    def keep_first(state, loss):
        if state.step == 1:
            weights = {name: p.detach().clone() for name, p in state.raw_model.named_parameters()}
            state.extra["eval_weights"] = weights

    flags = TINY | dict(data=data, out_dir=tmp_path, max_steps=3)
    _, gpt = train(make_config(**flags), return_model=True, on_step=keep_first)
    assert equal_weights(gpt.state_dict(), read_checkpoint(tmp_path / "ckpt_best.pt")["model"])
    assert not equal_weights(gpt.state_dict(), final(tmp_path)["model"])


def test_finetuning_ends_when_validation_does_not_improve(data, noisy, tmp_path, monkeypatch):
    losses = iter([4.0, 3.0, 2.0, 2.1, 2.2, 2.0, 2.0, 2.01, 1.0])
    monkeypatch.setattr(train_gpt, "evaluate", lambda *_: (next(losses), math.nan))
    folder = tmp_path / "run"
    flags = TINY | dict(data=data, init_from=noisy, out_dir=folder, preset="laptop", eval_every=14)
    del flags["max_steps"]
    # 29,000 tokens are an epoch, of 57 steps, whose evaluations do not count
    summary = train(make_config(**flags))
    assert (summary["step"], summary["stopped_by"]) == (98, "patience")
    assert list_checkpoints(folder)[0].name == "ckpt_98.pt"
    assert read_checkpoint(folder / "ckpt_best.pt")["step"] == 28
    # It has been evaluated before the first step, and says when its loss rises
    text = read_log(folder)
    assert "step   0/" in text and "fine-tuning: learning rates" in text
    assert text.count("val_loss has risen from 2.0000, that of ckpt_best.pt") == 1

    # Another one starts from its newest weights, and says that there are better ones
    with monkeypatch.context() as patch:
        patch.setattr(train_gpt, "evaluate", lambda *_: (1.0, math.nan))
        train(make_config(**TINY | dict(data=data, init_from=folder, out_dir=tmp_path / "b")))
    said = f"{folder}/ckpt_best.pt has the weights of the lowest val_loss"
    assert said in read_log(tmp_path / "b")

    # It stays finished, until more steps are asked for
    def resumed(**flags) -> tuple:
        again = train(make_config(out_dir=str(folder), resume="newest", **flags))
        return again["step"], again["stopped_by"]

    assert resumed() == resumed(max_steps=99) == (98, "patience")
    assert "--resume --patience 0" in read_log(folder)
    assert resumed(max_steps=99, patience=0) == (99, "max_steps")


def test_an_old_checkpoint_goes_only_when_the_new_one_has_been_read_back(
    data, tmp_path, monkeypatch
):
    saving = torch.save

    def torn(content, file):
        saving(content, file)
        if content["step"] > 5:
            file.seek(file.tell() // 2)
            file.write(b"\xff" * 64)

    monkeypatch.setattr(torch, "save", torn)
    said = r"ckpt_10.pt could not be saved \(.* is damaged.*; make room and --resume"
    with pytest.raises(RunError, match=said):
        tiny_run(tmp_path / "run", data=data, save_every=5, keep=1, max_steps=10)
    assert final(tmp_path / "run")["step"] == 5 and not list((tmp_path / "run").glob(".tmp*"))


# --------------------------------------------------------------------------------------------------
# Bad numbers


@pytest.mark.parametrize("factor", [math.nan, 0.0], ids=["nan", "no targets"])
def test_too_many_bad_steps_end_the_run(factor, data, tmp_path, monkeypatch):
    folder, end = tmp_path / "run", 4 + MAX_BAD_STEPS
    spoil(monkeypatch, {3, *range(5, 99)}, factor)
    said = f"many steps in a row, to step {end} (ckpt_4.pt is from before); if it was 0, see "
    said += "whether all targets are masked, otherwise --resume with lower learning rates"
    with pytest.raises(RunError, match=re.escape(said)):
        tiny_run(folder, data=data, micro_batch=16, save_every=2, keep=1)
    log = read_log(folder)
    assert said in log and "\nstep 3 skipped" in log and log.count("(1 in a row)") == 2
    assert json.loads((folder / "summary.json").read_text())["stopped_by"] == "diverged"
    for key in ("train_loss", "grad_norm"):
        assert rows(folder, key)[4] == (0 if factor == 0 else None)
    # Nothing is saved after a bad step, because the one before may have ruined the weights; and the
    # checkpoint before the newest is kept until another step was good
    assert [path.name for path in list_checkpoints(folder)] == ["ckpt_4.pt", "ckpt_2.pt"]


# --------------------------------------------------------------------------------------------------
# What dies around a run


def test_a_run_saves_every_ten_minutes_even_if_its_folder_is_moved(
    data, tmp_path, monkeypatch, clock
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(progress_module, "SAVE_EVERY_S", 2.0)  # two steps of this clock

    def move(state, loss):
        if state.step == 3:
            Path("run").rename("elsewhere")

    tiny_run("run", move, data=data, max_steps=6, keep="all")
    found = sorted(map(str, Path().glob("*/ckpt_[0-9]*.pt")))
    assert found == ["elsewhere/ckpt_2.pt", "run/ckpt_4.pt", "run/ckpt_6.pt"]


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


def test_a_full_disk_costs_no_row_and_at_the_end_is_an_error(
    data, undisturbed, tmp_path, monkeypatch, capsys
):
    step, room, folder = train_gpt.train_step, contextlib.ExitStack(), tmp_path / "run"

    def while_full(state, *inputs):
        if state.step in (8, 19):
            room.enter_context(no_room(0 if state.step == 8 else 100_000))
        if state.step == 12:
            room.close()
        return step(state, *inputs)

    flags = dict(data=data, save_every=5, keep=1)
    said = r"ckpt_20.pt could not be saved \(.* File too large\); make room and --resume"
    with room, monkeypatch.context() as patch, pytest.raises(RunError, match=said):
        patch.setattr(train_gpt, "train_step", while_full)
        tiny_run(folder, **flags)
    out = capsys.readouterr().out
    assert "metrics.jsonl cannot be written (File too large)" in out
    assert "ckpt_10.pt could not be saved" in out
    assert rows(folder, "step") == [*range(1, 21), 20]  # it was evaluated
    assert "step 10/20 | loss" in read_log(folder)
    assert [path.name for path in folder.glob("*ckpt*")] == ["ckpt_15.pt"]
    tiny_run(folder, **flags, resume="newest")
    assert_undisturbed(folder, undisturbed)


def test_a_lack_of_memory_is_one_sentence(data, tmp_path):
    with pytest.raises(RuntimeError) as real:  # terabytes
        tiny_run(tmp_path / "run", data=data, n_embd=200_000_000, n_head=1)
    for error in (
        real.value,
        RuntimeError("CUDA error: out of memory"),
        RuntimeError("could not create a primitive"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        MemoryError(),
        OSError(12, "Cannot allocate memory"),
        torch.AcceleratorError("out of memory"),
    ):
        said = r"memory ran out \(.*\); try a smaller --micro_batch.*"
        assert is_out_of_memory(error) and re.fullmatch(said, error_sentence(error)), error
    for error in (
        RuntimeError("could not create a primitive descriptor for a matmul"),
        UserError("--data 'out of memory'"),
        ValueError("out of memory"),
    ):
        assert not is_out_of_memory(error) and "ran out" not in error_sentence(error), error


# --------------------------------------------------------------------------------------------------
# Signals


@pytest.mark.parametrize(
    "place, name, call, step",
    [(train_gpt, "train_step", 6, 6), (run_module, "any_rank", 4, 4), (torch, "save", 3, 7)],
)
def test_a_signal_saves_and_a_resumed_run_is_the_undisturbed_one(
    place, name, call, step, data, undisturbed, tmp_path, monkeypatch
):
    """The signal comes in a step, in an evaluation (which asks all ranks), and in a save."""
    function, calls, folder = getattr(place, name), itertools.count(1), tmp_path / "run"

    def and_signal(*arguments):
        if next(calls) == call:
            signal.raise_signal(signal.SIGTERM)
        return function(*arguments)

    flags = dict(data=data, eval_every=4, save_every=3, eval_tokens="all")
    with monkeypatch.context() as patch:
        patch.setattr(place, name, and_signal)
        summary = tiny_run(folder, **flags)
    assert summary["stopped_by"] == "SIGTERM" and summary["step"] == step
    # An evaluation is not finished: little time may be left
    assert len(rows(folder, "val_loss")) == (name != "any_rank")
    assert "to continue: python train_gpt.py --out_dir" in read_log(folder)
    tiny_run(folder, **flags, resume="auto")
    assert_undisturbed(folder, undisturbed)
    for key in ("step", "val_loss"):
        assert rows(folder, key) == rows(undisturbed, key)


def test_signals_that_announce_an_end_are_caught():
    own = []
    before = signal.signal(signal.SIGALRM, lambda *_: own.append("SIGALRM"))  # a program's own
    with catch_signals() as caught:
        for number in (signal.SIGUSR2, signal.SIGALRM, signal.SIGXCPU):
            signal.raise_signal(number)
        time.sleep(0.6)
        signal.raise_signal(signal.SIGXCPU)  # the system repeats it
    signal.signal(signal.SIGALRM, before)
    assert own == ["SIGALRM"] and caught == ["SIGUSR2", "SIGXCPU", "SIGXCPU"]
    assert {"SIGTERM", "SIGHUP", "SIGALRM"} <= set(SIGNALS)


@pytest.mark.parametrize("name, printed", [("SIGTERM", ""), ("SIGINT", "KeyboardInterrupt\n")])
def test_a_second_signal_does_at_once_what_it_did_before(name, printed):
    code = """if True:
        import os, signal, sys, time
        from runtime.run import catch_signals
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's job may ignore it
        number = getattr(signal, sys.argv[1])
        try:
            with catch_signals() as caught:
                os.kill(os.getpid(), signal.SIGUSR1)
                os.kill(os.getpid(), number)
                print(*caught, flush=True)
                time.sleep(0.6)
                os.kill(os.getpid(), number)
                print("still here")
        except KeyboardInterrupt:
            print("KeyboardInterrupt")
    """
    done = run_python("-c", code, name)
    assert done.stdout == f"SIGUSR1 {name}\n{printed}"
    assert done.returncode == (0 if printed else -signal.SIGTERM)


def test_an_interrupt_saves_and_ends_what_called(data, tmp_path, monkeypatch, capfd):
    step, folder = train_gpt.train_step, tmp_path / "run"

    def interrupted(*inputs):
        signal.raise_signal(signal.SIGINT)
        return step(*inputs)

    monkeypatch.setattr(train_gpt, "train_step", interrupted)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's job may ignore it
    with pytest.raises(KeyboardInterrupt) as ended:
        tiny_run(folder, data=data)
    signal.signal(signal.SIGINT, before)
    assert (folder / "ckpt_1.pt").exists() and "stopped by SIGINT" in read_log(folder)
    assert "Ctrl-C: saves and ends after this step" in capfd.readouterr().err
    assert run_command(mock.Mock(side_effect=ended.value), []) == 0  # of a script


def test_a_run_leaves_random_generators_as_they_were(data, tmp_path):
    def draws() -> list[float]:
        return [random.random(), np.random.rand(), torch.rand(()).item()]

    seed_all(1)
    expected = draws()
    seed_all(1)
    flags = TINY | dict(data=data, out_dir=tmp_path / "run", max_steps=1)  # folders as Path
    _, gpt = train(make_config(**flags), return_model=True)
    assert draws() == expected and not gpt.training


def test_a_console_that_goes_costs_nothing(data, tmp_path):
    code = """if True:
        import os, sys, train_gpt
        from common.errors import run_command
        read, write = os.pipe()
        os.dup2(write, 1)
        for end in (read, write):
            os.close(end)
        sys.exit(run_command(train_gpt.main, sys.argv[1:]))
    """
    flags = TINY | dict(data=data, out_dir=tmp_path / "run", max_steps=2)
    done = run_python("-c", code, *flags_of(flags))
    assert (done.returncode, done.stderr) == (0, "")
    assert "step 2/2 | val_loss" in read_log(tmp_path / "run")


def test_ranks_end_when_torchrun_is_gone(data, tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    parents = itertools.chain([7, 7, 7], itertools.repeat(1))
    monkeypatch.setattr(os, "getppid", lambda: next(parents))
    summary = tiny_run(tmp_path / "run", data=data)
    assert (summary["step"], summary["stopped_by"]) == (2, "signal")


# --------------------------------------------------------------------------------------------------
# Ranks that fail


def ranks_script(folder: Path, case: str) -> None:
    """What each of two ranks does in the tests below."""
    flags = TINY | dict(data=str(folder / "data"), out_dir=str(folder / case))
    flags |= dict(max_steps=6, save_every=1 if case == "nan" else 2, keep="all")
    step = train_gpt.train_step

    def dying(state, *inputs):
        if os.environ["RANK"] == "1" and state.step == 3:
            if case == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            raise ZeroDivisionError("the cause")
        return step(state, *inputs)

    def unreadable(stream, dist_ctx, step):
        if dist_ctx.rank == 1 and step == 3:
            raise OSError(errno.EIO, "the cause", "a shard")
        return get_batch(stream, dist_ctx, step)

    if case == "data":
        train_gpt.get_batch = unreadable
        flags |= dict(parallel="fsdp")
        exit_process(run_command(train_gpt.main, flags_of(flags)))
    if case != "nan":
        train_gpt.train_step = dying
        exit_process(run_command(train_gpt.main, flags_of(flags)))

    # Passes 5 and 7, after two of the warm-up
    for parallel, factor in dict(ddp=math.nan, fsdp=math.inf).items():
        weights = [torch.zeros(())]

        def nothing_moves(state, loss, weights=weights):
            weights.append(to_local(state.raw_model.head.weight.detach()).clone())
            assert torch.equal(*weights[-2:]) == (state.step in (3, 5))

        with pytest.MonkeyPatch.context() as patch:
            spoil(patch, {5, 7}, factor, rank="1")
            own = dict(parallel=parallel, out_dir=str(folder / parallel))
            train(make_config(**flags | own), on_step=nothing_moves)
    spoil(pytest.MonkeyPatch(), range(5, 99), rank="1")
    exit_process(run_command(train_gpt.main, flags_of(flags | dict(max_steps=20))))


def test_nan_in_one_rank_is_skipped_on_all(data, tmp_path):
    (tmp_path / "data").symlink_to(data)
    done = run_ranks(tmp_path, __file__, tmp_path, "nan")
    said = "".join(done.stderr)
    assert done.codes == [1, 1] and "error [rank 0]" in said, done
    assert said.count("many steps in a row") == 1, done
    assert "deprecated" not in said and "FutureWarning" not in said  # PyTorch's own
    for name in ("ddp", "fsdp"):
        saved = read_checkpoint(tmp_path / name / "ckpt_6.pt")["model"]
        assert all(w.isfinite().all() for w in saved.values())


@pytest.mark.parametrize(
    "case, code, cause",
    [
        ("raise", 1, "another rank has ended"),
        ("kill", -signal.SIGKILL, "another rank has ended"),
        ("data", 1, "a shard cannot be read or written (the cause)"),
    ],
)
def test_a_rank_that_dies_ends_the_others(case, code, cause, data, tmp_path):
    (tmp_path / "data").symlink_to(data)
    done = run_ranks(tmp_path, __file__, tmp_path, case)
    assert done.codes == [1, code], done
    rank = 1 if case == "data" else 0
    assert f"error [rank {rank}]: {cause}" in done.stderr[rank], done
    assert f"ended: {cause}" in read_log(tmp_path / case)
    if case == "raise":
        for told in (done.stderr[1], read_log(tmp_path / case)):
            assert "ZeroDivisionError: the cause" in told, done
    assert final(tmp_path / case)["step"] == 2  # what an error would save may be half a step


# --------------------------------------------------------------------------------------------------
# Kills


def start_run(out: Path, data: Path, world: int) -> list:
    """Start or continue a run: its processes. Their output is beside its folder."""
    flags = TINY | dict(n_layer=1, batch_tokens=256, micro_batch=4, max_steps=12)
    flags |= dict(save_every=1, eval_every=5, eval_tokens=1024)
    argv = flags_of(flags | dict(data=data, out_dir=out, resume="auto"))
    return start_ranks(out.parent, ROOT / "train_gpt.py", *argv, world_size=world)


def exit_codes(ranks: list, patience: float) -> list[int]:
    """Wait; as torchrun does, end ranks that wait for one which has gone, as while connecting."""
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
    assert exit_codes(start_run(tmp_path / "whole", data, world), 60) == [0] * world
    span = time.monotonic() - began
    while killed < int(os.environ.get("KILLS", 2)):
        began = time.monotonic()
        ranks, moment = start_run(runs[-1], data, world), began + rng.random() * span
        pattern = ".tmp-ckpt*" if rng.random() < 0.5 else "*"
        while all(rank.is_alive() for rank in ranks):
            if time.monotonic() > moment and any(runs[-1].glob(pattern)):
                break
            time.sleep(0.0005)
        one_rank = world > 1 and rng.random() >= 0.67
        for rank in [rng.choice(ranks)] if one_rank else ranks:
            rank.kill()
        codes = exit_codes(ranks, 3)
        assert set(codes) <= {0, 1, -signal.SIGKILL}
        killed += -signal.SIGKILL in codes
        if codes == [0] * world:
            span = min(span, time.monotonic() - began)
            runs.append(tmp_path / f"run{len(runs)}")
    for run in runs:
        codes = exit_codes(start_run(run, data, world), 60)
        assert codes == [0] * world, (tmp_path / "stderr0.txt").read_text()
        for key in ("step", "train_loss", "grad_norm", "lr", "val_loss", "tokens"):
            assert rows(run, key) == rows(tmp_path / "whole", key), (run, key)
        assert_weights_equal(run, tmp_path / "whole")


if __name__ == "__main__":
    ranks_script(Path(sys.argv[1]), sys.argv[2])
