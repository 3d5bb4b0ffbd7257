"""What carries a run: folder, checkpoints, log, errors, signals. Bad numbers, full disks and kills lose nothing."""

import contextlib
import dataclasses
import functools
import hashlib
import importlib
import importlib.util
import json
import math
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections import deque
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist

import generation
import train_gpt
from benchmarks.harness import explain_failure
from conftest import (
    ROOT,
    TINY,
    assert_same_run,
    assert_weights_equal,
    final,
    flags_of,
    make_data,
    poison,
    rows,
    run_main,
    run_python,
    run_ranks,
    run_torchrun,
    tiny_run,
)
from data.shards import UserError, write_shard
from data.stream import TokenStream
from model import GPT, GPTConfig, Optimizer
from runtime import checkpoint, start
from runtime.checkpoint import content_hash, list_checkpoints, load_weights, read_checkpoint
from runtime.errors import explain_oom, never_fatal
from runtime.launch import gloo_group
from runtime.logger import SECTION, LineWriter, RunLogger, is_loss_spike
from runtime.memory import agreed_peak
from runtime.ranks import DistContext, StopVotes, exit_process
from train_gpt import make_config, train

# ---------------------------------------------------------------------------------------------------------------------
# What a run leaves behind


def test_what_a_run_leaves_behind(data, tmp_path):
    folder = tmp_path / "run"
    summary = train(
        make_config(**TINY | dict(data=str(data), out_dir=str(folder), max_steps=7, log_every=3, eval_every=4))
    )
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    training, evaluations = ([row for row in lines if key in row] for key in ("train_loss", "val_loss"))
    assert [row["step"] for row in training] == [1, 3, 6, 7] and [row["step"] for row in evaluations] == [4, 7]
    assert set(training[0]) == {
        "step",
        "train_loss",
        "lr",
        "grad_norm",
        "tokens",
        "tokens_per_s",
        "mfu",
        "peak_mem_mb",
        "train_time_s",
        "wall_time_s",
    }
    assert set(evaluations[0]) == {"step", "val_loss", "val_bpb", "tokens", "train_time_s", "wall_time_s"}
    assert training[-1]["tokens"] == 7 * 512 and training[0]["mfu"] is None
    assert 0 < training[0]["train_time_s"] < training[-1]["train_time_s"] < training[-1]["wall_time_s"]
    assert summary == json.loads((folder / "summary.json").read_text())
    assert summary["val_loss"] == evaluations[-1]["val_loss"] and summary["stopped_by"] == "max_steps"
    log = (folder / "log.txt").read_text()
    assert {"train_gpt.py", "model.py", "ops/loss.py", "data/stream.py"} <= set(start.SOURCE_FILES)
    for name in start.SOURCE_FILES:
        source = (ROOT / name).read_bytes()
        assert (folder / "source" / name).read_bytes() == source
        assert f"{name} sha256 {hashlib.sha256(source).hexdigest()}" in log
    assert f"torch {torch.__version__}" in log and '"muon_lr": 0.02' in log and "step 7/7 | loss" in log
    assert log.startswith(f"{SECTION} run\n{{") and "\ncommand: " in log
    files = [".lock", "ckpt_7.pt", "ckpt_best.pt", "log.txt", "metrics.jsonl", "source", "summary.json"]
    assert sorted(p.name for p in folder.iterdir()) == files


def test_sources_that_changed_before_a_resume_are_kept_too(tmp_path):
    source, folder = tmp_path / "train_gpt.py", tmp_path / "run"
    for step, text in ((0, "first"), (5, "first"), (9, "second")):
        source.write_text(text)
        with contextlib.closing(RunLogger(folder)) as logger:
            logger.lock()
            logger.open({}, step, {"train_gpt.py": source})
    assert sorted(path.parent.name for path in folder.glob("source*/train_gpt.py")) == ["source", "source_9"]
    assert (folder / "source" / "train_gpt.py").read_text() == "first"
    hashes = [hashlib.sha256(text).hexdigest() for text in (b"first", b"first", b"second")]
    assert re.findall(r"^sources: train_gpt.py sha256 (\w+)$", (folder / "log.txt").read_text(), re.M) == hashes


def test_checkpoint_is_plain_and_names_are_clean(plain):
    path = list_checkpoints(plain)[0]
    content = torch.load(path, weights_only=True)
    assert content["step"] == 20 and content["config"]["n_embd"] == 32 and content["tokenizer"] == "bytes"
    assert "blocks.0.attn.qkv.weight" in content["model"]
    assert "momentum" in content["optimizer"]["blocks.1.mlp.fc.weight"]


def test_summary_covers_what_was_before_a_resume(data, tmp_path):
    common = TINY | dict(data=str(data), out_dir=str(tmp_path / "run"), eval_every=2, max_steps=6, save_every=3)
    whole = train(make_config(**common))
    again = train(make_config(**common | dict(resume="newest")))
    for key in ("val_loss", "best_val_loss", "step", "tokens"):
        assert whole[key] == again[key]
    assert len(rows(tmp_path / "run", "val_loss")) == 3


def test_target_and_time_limit_stop_a_run(data, tmp_path):
    common = TINY | dict(data=str(data), max_steps=30)
    summary = train(make_config(**common | dict(out_dir=str(tmp_path / "a"), eval_every=2, target_val_loss=4.0)))
    assert summary["stopped_by"] == "target_val_loss" and summary["target_reached"]["step"] == summary["step"] < 30
    assert summary["val_loss"] <= 4.0 and (tmp_path / "a" / f"ckpt_{summary['step']}.pt").exists()
    summary = train(make_config(**common | dict(out_dir=str(tmp_path / "b"), max_minutes=1e-4)))
    assert summary["stopped_by"] == "max_minutes" and summary["step"] < 30 and summary["val_loss"]


def test_profile_leaves_a_trace_and_a_table(data, tmp_path):
    train(make_config(**TINY | dict(data=str(data), out_dir=str(tmp_path / "run"), max_steps=6, profile=2)))
    events = json.loads((tmp_path / "run" / "trace_rank0.json").read_text())["traceEvents"]
    assert any("aten::mm" in event.get("name", "") for event in events)
    assert "Self CPU time total" in (tmp_path / "run" / "log.txt").read_text().split("=" * 40 + " run\n")[-1]


def test_wandb_offline(data, tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    train(make_config(**TINY | dict(data=str(data), out_dir=str(tmp_path / "run"), max_steps=2, wandb=True)))
    assert list((tmp_path / "run").glob("wandb/offline-run-*/*.wandb"))


def test_unreadable_data_and_wandb_without_a_login_are_said(data, tmp_path, capsys):
    done = run_python(
        "train_gpt.py",
        *flags_of(TINY | dict(data=data, out_dir=tmp_path / "run", wandb=True)),
        env=os.environ | dict(WANDB_MODE="online", WANDB_API_KEY="short"),
    )
    assert done.returncode == 2 and re.search("error: --wandb could not start .* WANDB_MODE=offline", done.stderr)
    own = make_data(tmp_path / "data")
    (own / "meta.json").unlink()
    (own / "meta.json").mkdir()
    code, err = run_main(flags_of(TINY | dict(data=own, out_dir=tmp_path / "run")), capsys)
    assert code == 2 and re.fullmatch(r"error: .*meta.json cannot be read or written .*\n", err)


def test_a_folder_with_a_run_is_not_overwritten_or_shared(data, plain, tmp_path, capsys):
    code, err = run_main(flags_of(TINY | dict(data=data, out_dir=plain)), capsys)
    assert code == 2 and "already holds ckpt_20.pt; add --resume" in err
    holder = RunLogger(tmp_path / "run")
    holder.lock()
    code, err = run_main(flags_of(TINY | dict(data=data, out_dir=tmp_path / "run")), capsys)
    assert code == 2 and "another run is using" in err
    holder.close()
    assert run_main(flags_of(TINY | dict(data=data, out_dir=tmp_path / "run", max_steps=1)), capsys)[0] == 0


def test_no_secret_is_written(data, tmp_path):
    if importlib.util.find_spec("wandb") is None or not shutil.which("git"):
        pytest.skip("needs wandb and git")
    secrets = dict(
        WANDB_API_KEY="a1b2c3d4" * 5,
        HF_TOKEN="hf_SECRETtoken",
        AWS_SECRET_ACCESS_KEY="SECRETaws",
        MY_PASSWORD="SECRETpw",
        HF_ENDPOINT="https://user:SECRETmirror@mirror.example",
    )
    here = tmp_path / "repo"
    for path in (
        path
        for pattern in ("*.py", "data/*.py", "data/*.json", "ops/*.py", "runtime/*.py")
        for path in ROOT.glob(pattern)
    ):
        (here / path.relative_to(ROOT)).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, here / path.relative_to(ROOT))
    remote = "https://user:SECRETremote@example.com/x.git"
    for command in ("init -q", f"remote add origin {remote}", "add .", "-c user.name=a -c user.email=a@b commit -qm x"):
        subprocess.run(["git", *command.split()], cwd=here, check=True, capture_output=True)
    flags = flags_of(TINY | dict(data=data, out_dir=tmp_path / "run", max_steps=2, wandb="true"))
    env = {**os.environ, **secrets, "WANDB_MODE": "offline", "HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, "train_gpt.py", *flags], cwd=here, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    written = [path for path in (tmp_path / "run").rglob("*") if path.is_file()]
    assert any(path.suffix == ".wandb" for path in written) and (tmp_path / "run" / "log.txt") in written
    texts = {str(path): path.read_bytes() for path in written} | {"output": (done.stdout + done.stderr).encode()}
    for path, text in texts.items():
        for secret in ("SECRET", secrets["WANDB_API_KEY"]):
            assert secret.encode() not in text, (path, secret)


# ---------------------------------------------------------------------------------------------------------------------
# Checkpoints: damaged, foreign, of other branches, resumed


def test_damaged_checkpoints_are_passed_over(data, tmp_path, capsys):
    folder = tmp_path / "run"
    common = TINY | dict(data=str(data), out_dir=str(folder), save_every=5, keep=0, max_steps=15)
    train(make_config(**common))
    whole = (folder / "ckpt_15.pt").read_bytes()
    (folder / "ckpt_15.pt").write_bytes(whole[: len(whole) // 2])
    flipped = bytearray((folder / "ckpt_10.pt").read_bytes())
    flipped[len(flipped) // 2] ^= 1
    (folder / "ckpt_10.pt").write_bytes(bytes(flipped))
    torch.load(folder / "ckpt_10.pt", weights_only=True)  # PyTorch itself does not notice
    with pytest.raises(UserError, match="ckpt_10.pt is damaged"):
        read_checkpoint(folder / "ckpt_10.pt")
    train(make_config(**common | dict(resume="newest")))
    assert "ckpt_5.pt" in capsys.readouterr().out


def test_weights_with_the_prefixes_of_wrappers_load(data, noisy, tmp_path):
    content = read_checkpoint(noisy)
    content["model"] = {f"module._orig_mod.{name}": w for name, w in content["model"].items()}
    gpt = GPT(GPTConfig(**content["model_config"]))
    load_weights(gpt, content, "x.pt")
    assert torch.equal(gpt.head.weight, read_checkpoint(noisy)["model"]["head.weight"])


def test_optimizer_state_with_the_prefixes_of_wrappers_loads(data, plain, tmp_path):
    content = final(plain)
    for part in ("model", "optimizer"):
        content[part] = {f"_orig_mod.module.{name}": value for name, value in content[part].items()}
    content["sha256"] = content_hash(content)
    torch.save(content, tmp_path / "ckpt_20.pt")
    flags = TINY | dict(data=str(data), out_dir=str(tmp_path / "run"), resume=str(tmp_path / "ckpt_20.pt"))
    assert train(make_config(**flags | dict(max_steps=21)))["step"] == 21


def test_malicious_checkpoint_is_not_executed(tmp_path):
    class Evil:
        def __reduce__(self):
            return (os.mkdir, (str(tmp_path / "executed"),))

    torch.save({"step": 1, "sha256": "", "model": Evil()}, tmp_path / "ckpt_1.pt")
    with pytest.raises(UserError, match="not a checkpoint of this trainer or is damaged"):
        read_checkpoint(tmp_path / "ckpt_1.pt")
    assert not (tmp_path / "executed").exists()


def test_checkpoint_of_another_shape_data_or_optimizer(data, plain, tmp_path, capsys):
    path = list_checkpoints(plain)[0]
    common = TINY | dict(data=data, out_dir=tmp_path / "run", resume=path)
    for change, sentence in [
        (dict(n_embd=64), "another shape .n_embd 32 there and 64 here"),
        (dict(n_layer=3), "another shape .n_layer 2 there and 3 here"),
        (dict(optimizer="adamw"), "another --optimizer"),
        (dict(data=make_data(tmp_path / "other")), None),
    ]:
        code, err = run_main(flags_of(common | change), capsys)
        assert (code == 2 and re.search(sentence, err)) if sentence else code == 0, err
    write_shard(tmp_path / "other" / "a_train_2.bin", np.zeros(50, dtype=np.uint16))
    flags = flags_of(common | dict(data=tmp_path / "other", out_dir=tmp_path / "new"))
    code, err = run_main(flags, capsys)
    assert code == 2 and "a_train_2.bin is a shard that" in err and "does not name" in err
    meta = json.loads((tmp_path / "other" / "meta.json").read_text())
    meta["files"]["a_train_2.bin"] = dict(tokens=50, sha256="")
    (tmp_path / "other" / "meta.json").write_text(json.dumps(meta))
    code, err = run_main(flags, capsys)
    assert code == 2 and "was trained on other data" in err


def test_checkpoint_of_another_version_of_the_model(data, plain, tmp_path, capsys):
    content = final(plain)
    del content["model_config"]["version"]  # as before there were versions
    content["sha256"] = content_hash(content)
    torch.save(content, tmp_path / "ckpt_20.pt")
    for flag in ("resume", "init_from"):
        flags = TINY | dict(data=data, out_dir=tmp_path / flag, max_steps=25) | {flag: tmp_path / "ckpt_20.pt"}
        code, err = run_main(flags_of(flags), capsys)
        assert code == 2 and "holds version 1 of the model, and this is version 2" in err


def test_ngram_dropout_by_epochs(data, tmp_path):
    """0 where nothing is seen twice, and else each is kept about twice; what is given stays; a resumed run's own."""
    stream = TokenStream(data, 32, 512)  # 56 steps an epoch
    cfg = make_config(**TINY | dict(ngram=3, ngram_rows=65))
    epochs = (0.2, 0.5, 1, 4, 40, 400)
    chosen = [train_gpt.get_ngram_dropout(dataclasses.replace(cfg, max_steps=round(56 * n)), stream) for n in epochs]
    assert chosen[:2] == [0, 0] and 0.05 < chosen[2] < 0.15 and chosen == sorted(chosen)
    assert all(1.5 < n * (1 - p) < 2.5 for n, p in zip(epochs[3:], chosen[3:], strict=True))
    for given in (0.0, 0.4):
        assert (
            train_gpt.get_ngram_dropout(dataclasses.replace(cfg, ngram_dropout=given, max_steps=999), stream) == given
        )
    common = TINY | dict(
        data=str(data), ngram=3, ngram_rows=65, max_steps=60, save_every=30, out_dir=str(tmp_path / "run")
    )
    model = train(make_config(**common), return_model=True)[1]
    expected = train_gpt.get_ngram_dropout(make_config(**common), stream)
    assert (
        model.ngram_dropout == expected > 0.1
        and f"ngram_dropout {expected:.2g}" in (tmp_path / "run/log.txt").read_text()
    )
    longer = train_gpt.get_ngram_dropout(make_config(**common | dict(max_steps=64)), stream)
    train(make_config(**common | dict(max_steps=64, resume="newest")))
    assert f"n-gram dropout goes from {expected:.2f} to {longer:.2f}" in (tmp_path / "run/log.txt").read_text()


def test_a_text_seen_too_often_is_told(data, tmp_path, capsys):
    per_epoch = TokenStream(data, 32, 512).train.n_tokens // 512
    for epochs in (5, 7):
        flags = TINY | dict(data=str(data), out_dir=str(tmp_path / f"{epochs}"), max_steps=epochs * per_epoch)
        train(make_config(**flags | dict(eval_every=1, target_val_loss=99)))  # stops after one step
        assert ("text: seen more than 6 times" in capsys.readouterr().out) == (epochs == 7)


def test_checkpoints_of_other_branches_are_safe(data, tmp_path):
    common = TINY | dict(data=str(data), out_dir=str(tmp_path / "run"), save_every=2, keep=0, max_steps=6)
    train(make_config(**common))
    (tmp_path / "run" / "ckpt_6 (copy).pt").touch()
    first = str(tmp_path / "run" / "ckpt_2.pt")
    with pytest.raises(UserError, match="ckpt_6.pt, later than .*ckpt_2.pt; give another --out_dir"):
        train(make_config(**common | dict(resume=first)))
    branch = common | dict(out_dir=str(tmp_path / "branch"), keep=1)
    summary = train(make_config(**branch | dict(init_from=str(tmp_path) + "/./run/ckpt_2.pt", max_steps=3)))
    assert rows(tmp_path / "branch", "step") == [1, 2, 3, 3] and summary["step"] == 3  # a fresh schedule
    assert len(list_checkpoints(tmp_path / "branch")) == 1


def test_a_restart_goes_on_from_what_was_saved(data, noisy, plain, tmp_path, monkeypatch):
    common = TINY | dict(data=str(data), out_dir=str(tmp_path / "run"), init_from=str(noisy), max_steps=4, save_every=2)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    train(make_config(**common))  # died before it saved: starts from the same weights again
    assert rows(tmp_path / "run", "train_loss")[0] == pytest.approx(rows(plain, "train_loss")[0], rel=1e-5)
    train(make_config(**common))
    assert "resumed from" in (tmp_path / "run" / "log.txt").read_text()


def test_an_evaluation_that_a_kill_prevented_is_made_up_for(data, tmp_path):
    common = TINY | dict(data=str(data), save_every=5, eval_every=5, keep=0)
    train(make_config(**common | dict(out_dir=str(tmp_path / "whole"))))
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "ckpt_10.pt").write_bytes((tmp_path / "whole" / "ckpt_10.pt").read_bytes())
    lines = (tmp_path / "whole" / "metrics.jsonl").read_text().splitlines()
    cut = next(i for i, line in enumerate(lines) if '"step": 10, "val' in line)
    junk = '\n[1]\n{"loss": 2}\n\x00\x00\n{"step": "x"}\n'
    (tmp_path / "run" / "metrics.jsonl").write_text("\n".join(lines[:cut]) + junk)
    train(make_config(**common | dict(out_dir=str(tmp_path / "run"), resume="newest")))
    assert rows(tmp_path / "run", "step") == rows(tmp_path / "whole", "step")
    assert rows(tmp_path / "run", "val_loss") == rows(tmp_path / "whole", "val_loss")


def test_what_an_edit_draws_at_random_resumes_exactly(data, tmp_path, monkeypatch):
    forward = GPT.forward

    def with_noise(self, idx, targets=None, **rest):
        loss = forward(self, idx, targets, **rest)
        return loss * (0.5 + torch.rand(())) if targets is not None else loss

    monkeypatch.setattr(GPT, "forward", with_noise)
    common = TINY | dict(data=str(data), save_every=5, keep=0, max_steps=10, ngram=3, ngram_dropout=0.4)
    train(make_config(**common | dict(out_dir=str(tmp_path / "whole"), eval_every=3)))
    (tmp_path / "half").mkdir()
    (tmp_path / "half" / "ckpt_5.pt").write_bytes((tmp_path / "whole" / "ckpt_5.pt").read_bytes())
    train(make_config(**common | dict(out_dir=str(tmp_path / "half"), resume="newest")))
    assert rows(tmp_path / "half", "train_loss") == rows(tmp_path / "whole", "train_loss")[5:]
    assert len(set(rows(tmp_path / "whole", "train_loss"))) == 10
    assert_weights_equal(tmp_path / "half", tmp_path / "whole")
    draws, seeds = set(), []
    for seed, step, rank in ((0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1)):
        ctx, model = DistContext(torch.device("cpu"), rank), SimpleNamespace()
        train_gpt.reseed_step(SimpleNamespace(cfg=make_config(seed=seed), dist_ctx=ctx, raw_model=model, step=step))
        draws.add(torch.rand(()).item())
        seeds.append(model.step_seed)
    assert len(draws) == 4
    assert len(set(seeds)) == 3 and seeds[0] == seeds[3]  # what the model draws is the same on all ranks


def test_resuming_goes_on_at_the_same_place_of_the_stream(data, plain, noisy, tmp_path, capsys):
    path = list_checkpoints(plain)[0]
    assert final(plain)["position"] == dict(seed=0, seq_len=32, windows=905, epoch=0, window=320)
    common = TINY | dict(data=data, out_dir=tmp_path / "run", resume=path, max_steps=30)
    for change in (dict(seed=1), dict(batch_tokens=1024), dict(doc_align=True)):
        code, err = run_main(flags_of(common | change), capsys)
        assert code == 2 and "continues at another place of the stream" in err and err.count("\n") == 1, err


def hold_checkpoint(monkeypatch, steps: int) -> list[bool]:
    """The writing of ckpt_4.pt waits for so many steps; the list gets whether they came within a minute."""
    hashing, step, stepped, done, came = content_hash, train_gpt.train_step, threading.Event(), [], []

    def held(content):
        if threading.current_thread() is not threading.main_thread() and content.get("step") == 4:
            came.append(stepped.wait(60))
        return hashing(content)

    def counted(*arguments):
        done.append(1)
        if len(done) == steps:
            stepped.set()
        return step(*arguments)

    monkeypatch.setattr(checkpoint, "content_hash", held)
    monkeypatch.setattr(train_gpt, "train_step", counted)
    return came


def test_training_goes_on_while_a_checkpoint_is_written(data, tmp_path, monkeypatch):
    at_once = hold_checkpoint(monkeypatch, 7)
    train(make_config(**TINY | dict(data=str(data), out_dir=str(tmp_path / "run"), save_every=4, max_steps=10, keep=0)))
    assert at_once[0] is True  # step 7 was reached before ckpt_4.pt was written
    monkeypatch.undo()
    train(
        make_config(**TINY | dict(data=str(data), out_dir=str(tmp_path / "whole"), save_every=4, max_steps=10, keep=0))
    )
    for number in (4, 8, 10):  # what was written is the state of its own step
        a, b = (read_checkpoint(tmp_path / name / f"ckpt_{number}.pt") for name in ("run", "whole"))
        assert all(torch.equal(a["model"][name], w) for name, w in b["model"].items()) and a["step"] == number


def test_a_checkpoint_is_left_out_while_the_one_before_is_written(data, tmp_path, monkeypatch, capsys):
    hold_checkpoint(monkeypatch, 10)
    tiny_run(tmp_path / "run", data=data, save_every=4, max_steps=10, keep=0)
    assert [path.name for path in list_checkpoints(tmp_path / "run")] == ["ckpt_10.pt", "ckpt_4.pt"]  # the last waits
    assert capsys.readouterr().out.count("WARNING: a checkpoint is left out") == 1


def test_an_old_checkpoint_goes_only_when_the_new_one_has_been_read_back(data, tmp_path, monkeypatch, capsys):
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


# ---------------------------------------------------------------------------------------------------------------------
# Bad numbers


def test_bad_steps_are_skipped_and_told(data, tmp_path, monkeypatch, capsys):
    flags = TINY | dict(data=str(data), micro_batch=16, max_steps=8, optimizer="adamw", cooldown_frac=0.0)
    step = Optimizer.step
    calls = []

    def without(self, skip):
        calls.append(skip)
        return None if len(calls) in (3, 6) else step(self, skip)

    with monkeypatch.context() as patch:
        patch.setattr(Optimizer, "step", without)
        train(make_config(**flags | dict(out_dir=str(tmp_path / "without"))))
    poison(monkeypatch, {3, 6})
    train(make_config(**flags | dict(out_dir=str(tmp_path / "run"), log_every=4)))
    assert_weights_equal(tmp_path / "run", tmp_path / "without")
    log = (tmp_path / "run" / "log.txt").read_text()
    assert "step 3 skipped" in log and "(1 in a row)" in log
    assert "its data: 16 sequences from number 80 of epoch 0 on" in log
    assert rows(tmp_path / "run", "step") == [1, 4, 8, 8] and len(re.findall(r"step \d skipped", log)) == 2
    poison(monkeypatch, {2}, math.inf)
    train(make_config(**flags | dict(out_dir=str(tmp_path / "inf"), max_steps=3)))
    assert rows(tmp_path / "inf", "train_loss")[1] is None and rows(tmp_path / "inf", "grad_norm")[1] is None
    assert all(w.isfinite().all() for w in final(tmp_path / "inf")["model"].values())


def test_too_many_bad_steps_end_the_run(data, tmp_path, monkeypatch, capsys):
    flags = TINY | dict(data=data, out_dir=tmp_path / "run", micro_batch=16, save_every=2, max_bad_steps=3)
    poison(monkeypatch, {5, 6, 8, 9, 10, 11, 12})
    code, err = run_main(flags_of(flags), capsys)
    assert code == 1 and err.count("\n") == 1, err
    said = "3 steps in a row, up to step 10, and ckpt_10.pt keeps the weights from before; try lower learning rates"
    assert said in err and said in (tmp_path / "run" / "log.txt").read_text()
    assert all(w.isfinite().all() for w in final(tmp_path / "run")["model"].values())


def test_loss_spikes_are_marked(data, tmp_path, monkeypatch, capsys):
    assert not is_loss_spike(9.0, deque([1.0] * 4)) and not is_loss_spike(1.09, deque([1.0] * 5))
    assert is_loss_spike(1.2, deque([1.0] * 5)) and not is_loss_spike(1.9, deque([1.0, 2.0] * 5))
    poison(monkeypatch, {15}, 512 * 8.0)
    train(make_config(**TINY | dict(data=str(data), out_dir=str(tmp_path / "run"), micro_batch=16)))
    assert re.findall(r"step +(\d+)/20 \| loss \S+ SPIKE", capsys.readouterr().out) == ["15"]


# ---------------------------------------------------------------------------------------------------------------------
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


def test_disk_full_while_saving(data, tmp_path, monkeypatch, capsys):
    saving, full = torch.save, {10, 20}

    def save(content, file):
        with no_room() if content["step"] in full else contextlib.nullcontext():
            saving(content, file)

    monkeypatch.setattr(torch, "save", save)
    flags = TINY | dict(data=data, out_dir=tmp_path / "run", save_every=5, keep=1)
    code, err = run_main(flags_of(flags), capsys)
    assert code == 1 and err.count("\n") == 1 and "ckpt_20.pt could not be saved ([Errno 27] File too large)" in err
    assert "newest checkpoint there is ckpt_15.pt; make room and --resume" in err
    log = (tmp_path / "run" / "log.txt").read_text()
    assert "WARNING: " in log and "ckpt_10.pt could not be saved" in log  # and the run went on
    assert [path.name for path in (tmp_path / "run").glob("*ckpt*")] == ["ckpt_15.pt"]
    full.clear()
    assert run_main(flags_of(flags | dict(resume="newest")), capsys)[0] == 0
    train(make_config(**TINY | dict(data=str(data), out_dir=str(tmp_path / "whole"))))
    assert_same_run(tmp_path / "run", tmp_path / "whole", exact=True)


def test_a_full_disk_does_not_end_the_log(data, tmp_path, capsys):
    if not os.path.exists("/dev/full"):
        pytest.skip("needs /dev/full")
    logger = RunLogger(tmp_path)
    logger.log = LineWriter(Path("/dev/full"), append=True)
    logger.info("told")
    logger.close()
    assert "told\nWARNING: /dev/full cannot be written (No space left on device)" in capsys.readouterr().out


def test_what_a_full_disk_holds_back_is_written_when_there_is_room(tmp_path, capsys):
    logger = RunLogger(tmp_path)
    logger.open(dict(n_layer=2), 0, {})
    logger.log_metrics(step=1, train_loss=5.0)
    logger.info("before")
    with no_room((tmp_path / "metrics.jsonl").stat().st_size + 10):  # part of a line fits, and nothing of log.txt
        for step in (2, 3, 4):
            logger.log_metrics(step=step, train_loss=5.0 / step)
            logger.info(f"during {step}")
        with pytest.raises(OSError):  # a checkpoint that is saved now would resume from rows that are not there
            logger.sync()
    out = capsys.readouterr().out
    for name in ("metrics.jsonl", "log.txt"):
        assert out.count(f"WARNING: {tmp_path / name} cannot be written (File too large)") == 3
    logger.log_metrics(step=5, train_loss=math.nan)
    logger.info("after")
    logger.sync()
    logger.close()
    assert rows(tmp_path, "step") == [1, 2, 3, 4, 5]
    assert rows(tmp_path, "train_loss") == [5.0, 5.0 / 2, 5.0 / 3, 5.0 / 4, None]
    told = (tmp_path / "log.txt").read_text().splitlines()
    assert told[-5:] == ["before", "during 2", "during 3", "during 4", "after"]
    assert "cannot be written" not in capsys.readouterr().out


def test_rows_that_a_full_disk_holds_back_in_the_end_are_counted(tmp_path, capsys):
    logger = RunLogger(tmp_path)
    logger.open({}, 0, {})
    with no_room(0):
        for step in (1, 2):
            logger.log_metrics(step=step)
        logger.close()
    assert f"WARNING: {tmp_path / 'metrics.jsonl'} lacks its last 2 lines" in capsys.readouterr().out


def test_a_run_loses_no_row_to_a_full_disk(data, tmp_path, monkeypatch, capsys):
    step, room = train_gpt.train_step, contextlib.ExitStack()

    def while_full(state, batch, lr_multiplier):
        if state.step == 3:
            room.enter_context(no_room(0))
        if state.step == 6:
            room.close()
        return step(state, batch, lr_multiplier)

    monkeypatch.setattr(train_gpt, "train_step", while_full)
    with room:
        train(make_config(**TINY | dict(data=str(data), out_dir=str(tmp_path / "run"), max_steps=8, eval_every=4)))
    assert rows(tmp_path / "run", "step") == [1, 2, 3, 4, 4, 5, 6, 7, 8, 8]


def test_out_of_memory_is_one_sentence(data, tmp_path, monkeypatch, capsys):
    flags = TINY | dict(data=data, out_dir=tmp_path / "run")
    code, err = run_main(flags_of(flags | dict(n_embd=200_000_000, n_head=1)), capsys)  # a real failure: terabytes
    assert code == 1 and err.count("\n") == 1
    said = r"memory ran out: [\d,.]+ GiB were asked for, with [\d,.]+ GiB free; try, in this order, a smaller --micro_b"
    assert re.search(said, err), err
    text = "CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has a total capacity of 79.10 GiB"

    def fail(*_):
        raise torch.OutOfMemoryError(text)

    monkeypatch.setattr(train_gpt, "train_step", fail)
    code, err = run_main(flags_of(flags | dict(out_dir=tmp_path / "b")), capsys)
    assert code == 1 and "memory ran out: 20.00 GiB were asked for" in err
    assert explain_oom(ValueError("other")) == ""


def test_runs_of_a_process_share_the_group_that_talks_on_the_cpu(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        first = gloo_group(dist.group.WORLD)
        assert gloo_group(dist.group.WORLD) is first and first is not dist.group.WORLD
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB."),
        torch.AcceleratorError("CUDA error: out of memory"),  # cudaHostAlloc
        RuntimeError("Triton Error [CUDA]: out of memory"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
        RuntimeError("[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory"),
        RuntimeError("could not create a primitive"),  # oneDNN
        OSError(12, "Cannot allocate memory"),
        MemoryError(),
    ],
)
def test_whatever_ran_out_of_memory_is_told_alike(error):
    """By trainer, harness and the search for the micro-batch."""
    assert explain_oom(error).startswith("memory ran out")
    assert explain_failure(error) == ("failed", "out of memory")

    def fail(micro_batch):
        raise error

    if not isinstance(error, OSError):
        assert agreed_peak(fail, 8, 0, DistContext(torch.device("cpu"))) == math.inf


@pytest.mark.parametrize(
    "error", [RuntimeError("could not create a primitive descriptor for a matmul"), UserError("--data 'out of memory'")]
)
def test_what_is_not_a_lack_of_memory_is_not_told_as_one(error):
    def fail(micro_batch):
        raise error

    assert explain_oom(error) == "" and "out of memory" not in explain_failure(error)[1].replace("'out of memory'", "")
    with pytest.raises(type(error)):
        agreed_peak(fail, 8, 0, DistContext(torch.device("cpu")))


# ---------------------------------------------------------------------------------------------------------------------
# Signals


def test_a_signal_saves_and_a_resumed_run_is_the_undisturbed_one(data, tmp_path):
    flags = TINY | dict(data=str(data), max_steps=120, prefetch=1)
    command = [sys.executable, "train_gpt.py", *flags_of(flags | dict(out_dir=tmp_path / "run", save_every=5))]
    fcntl = pytest.importorskip("fcntl")
    reading, writing = os.pipe()
    if hasattr(fcntl, "F_SETPIPE_SZ"):  # it waits for its reader at about 40 lines more: it will not be done too early
        fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, 4096)
    process = subprocess.Popen(command, cwd=ROOT, stdout=writing, text=True)
    os.close(writing)
    with open(reading) as output:
        said = []
        for line in output:
            said.append(line)
            if re.match(r"step +6/", line):
                process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 0 and any("stopped by SIGTERM" in line for line in said), said
    assert 5 <= final(tmp_path / "run")["step"] < 120
    train(make_config(**flags | dict(out_dir=str(tmp_path / "run"), resume="auto")))
    train(make_config(**flags | dict(out_dir=str(tmp_path / "whole"))))
    ours, theirs = final(tmp_path / "run"), final(tmp_path / "whole")
    assert all(torch.equal(ours["model"][name], theirs["model"][name]) for name in ours["model"])


@pytest.mark.parametrize("moment", ["evaluation", "saving"])
def test_sigterm_during_evaluation_and_saving(moment, data, tmp_path, monkeypatch):
    flags = TINY | dict(data=str(data), eval_every=4, save_every=3, eval_tokens=0)
    train(make_config(**flags | dict(out_dir=str(tmp_path / "whole"))))
    place, name = dict(evaluation=(train_gpt, "dist_max"), saving=(checkpoint, "content_hash"))[moment]
    function, calls = getattr(place, name), []

    def and_signal(*arguments):
        calls.append(1)
        if len(calls) == (60 if moment == "evaluation" else 3):
            os.kill(os.getpid(), signal.SIGTERM)
        return function(*arguments)

    evaluate, values = train_gpt.evaluate, []
    with monkeypatch.context() as patch:
        patch.setattr(place, name, and_signal)
        patch.setattr(train_gpt, "evaluate", lambda *a: values.append(evaluate(*a)) or values[-1])
        summary = train(make_config(**flags | dict(out_dir=str(tmp_path / "run"))))
    assert summary["stopped_by"] == "SIGTERM" and summary["step"] < 20
    assert (None in values) == (moment == "evaluation")  # not finished: little time may be left
    train(make_config(**flags | dict(out_dir=str(tmp_path / "run"), resume="newest")))
    assert_same_run(tmp_path / "run", tmp_path / "whole", exact=True)
    assert rows(tmp_path / "run", "step") == rows(tmp_path / "whole", "step")


def test_what_fails_after_a_signal_is_a_stop(data, tmp_path, monkeypatch, capsys):
    """A compiler's workers get the signal too, and their end is an error of whatever shape."""
    flags = flags_of(TINY | dict(data=data, out_dir=tmp_path / "run"))

    def build(*_, signalled=True):
        if signalled:
            os.kill(os.getpid(), signal.SIGTERM)
        raise RuntimeError("a process in the process pool was terminated abruptly")

    monkeypatch.setattr(train_gpt, "build", build)
    code, err = run_main(flags, capsys)
    said = "stopped by SIGTERM before the first step, in the middle of a RuntimeError, and with nothing to save\n"
    assert code == 0 and err == said
    monkeypatch.setattr(train_gpt, "build", functools.partial(build, signalled=False))
    with pytest.raises(RuntimeError, match="terminated abruptly"):
        run_main(flags, capsys)


def test_a_second_signal_ends_the_process_at_once():
    code = (
        "import os, signal, time; from runtime.errors import catch_signals\n"
        "with catch_signals() as caught:\n"
        "    os.kill(os.getpid(), signal.SIGUSR1); os.kill(os.getpid(), signal.SIGTERM); print(caught, flush=True)\n"
        "    time.sleep(0.6); os.kill(os.getpid(), signal.SIGTERM); print('still here')"
    )
    done = run_python("-c", code)
    assert done.returncode == -signal.SIGTERM and done.stdout == "['SIGUSR1', 'SIGTERM']\n"


# ---------------------------------------------------------------------------------------------------------------------
# Ranks that fail


def ranks_script(folder: Path, case: str) -> None:
    """What each of two ranks does in the tests below."""
    rank, patch = os.environ["RANK"], pytest.MonkeyPatch()
    flags = TINY | dict(data=str(folder / "data"), micro_batch=8, max_steps=6)
    if case in ("raise", "kill"):
        step, count = train_gpt.train_step, []

        def die(*arguments):
            count.append(1)
            if rank == "1" and len(count) == 4:
                if case == "raise":
                    raise ZeroDivisionError("rank 1's own mistake")
                os.kill(os.getpid(), signal.SIGKILL)
            return step(*arguments)

        patch.setattr(train_gpt, "train_step", die)
        exit_process(train_gpt.main(flags_of(flags | dict(out_dir=folder / case, save_every=1))))
    if case in ("whole", "restarts"):
        step, life = train_gpt.train_step, int(os.environ["TORCHELASTIC_RESTART_COUNT"])
        count = []

        def die_once_a_life(*arguments):
            count.append(1)
            if case == "restarts" and life < 3 and int(rank) == life % 2 and len(count) == 5 + life:
                os.kill(os.getpid(), signal.SIGKILL)
            return step(*arguments)

        patch.setattr(train_gpt, "train_step", die_once_a_life)
        exit_process(train_gpt.main(flags_of(flags | dict(out_dir=folder / case, save_every=2, max_steps=20))))
    for name, more in dict(ddp={}, fsdp=dict(parallel="fsdp"), adamw=dict(optimizer="adamw")).items():
        with pytest.MonkeyPatch.context() as patch:
            poison(patch, {4, 6}, math.nan if name == "ddp" else math.inf, rank="1")  # the first is DDP's warm-up
            train(make_config(**flags | more | dict(out_dir=str(folder / name), save_every=1, keep=0)))
    poison(patch, set(range(5, 99)), rank="1")
    code = train_gpt.main(flags_of(flags | dict(out_dir=folder / "ended", max_bad_steps=2, save_every=1)))
    (folder / f"code{rank}").write_text(str(code))
    exit_process(0)


def test_a_failing_sample_ends_no_run(data, tmp_path, monkeypatch):
    def fail(*_, **__):
        raise RuntimeError("no text today")

    monkeypatch.setattr(generation, "generate", fail)
    summary = tiny_run(tmp_path / "run", data=data, max_steps=2, sample_every=1)
    assert summary["stopped_by"] == "max_steps" and (tmp_path / "run" / "summary.json").exists()
    assert (tmp_path / "run" / "log.txt").read_text().count("(failed: RuntimeError: no text today)") == 2
    with pytest.raises(RuntimeError, match="no text today"):  # the other ranks would wait for this one's shards
        never_fatal(fail)(SimpleNamespace(cfg=make_config(parallel="fsdp")))


def test_other_ranks_log_nothing(tmp_path):
    logger = RunLogger(tmp_path, is_rank0=False)
    logger.log_flags({})
    logger.info("")
    logger.log_metrics(step=1)
    assert not list(tmp_path.iterdir())


def test_votes_to_stop_count_a_step_later_among_ranks(tmp_path):
    alone, two = DistContext(torch.device("cpu")), DistContext(torch.device("cpu"), world_size=2)

    def reasons(ctx):
        timer, signals = SimpleNamespace(wall_time_here=0.0), []
        votes, gpt = StopVotes(ctx, 1.0, timer, signals), torch.nn.Module()
        found = [votes.reason(1, 9, gpt)]
        timer.wall_time_here = 60.0
        found += [votes.reason(2, 9, gpt), votes.reason(9, 9, gpt)]
        signals.append("SIGTERM")
        found += [votes.reason(9, 9, gpt), votes.reason(10, 9, gpt)]
        votes.close()
        return found

    assert reasons(alone) == ["", "max_minutes", "max_steps", "signal", "signal"]
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        assert reasons(two) == ["", "", "max_steps", "max_steps", "signal"]
    finally:
        dist.destroy_process_group()


def test_nan_in_one_rank_is_skipped_on_all(data, tmp_path):
    (tmp_path / "data").symlink_to(data)
    done = run_ranks(tmp_path, __file__, tmp_path, "nan")
    said = "".join(done.stderr)
    assert done.codes == [0, 0], done
    assert "deprecated" not in said and "FutureWarning" not in said  # PyTorch's own
    for name in ("ddp", "fsdp", "adamw"):
        for step in (3, 5):  # nothing moved
            a, b = (read_checkpoint(tmp_path / name / f"ckpt_{s}.pt") for s in (step - 1, step))
            assert all(torch.equal(w, b["model"][n]) for n, w in a["model"].items())
            slots = [(n, slot) for n in a["optimizer"] for slot in a["optimizer"][n]]
            assert all(torch.equal(a["optimizer"][n][slot], b["optimizer"][n][slot]) for n, slot in slots)
        assert all(w.isfinite().all() for w in final(tmp_path / name)["model"].values())
        heads = [read_checkpoint(tmp_path / name / f"ckpt_{step}.pt")["model"]["head.weight"] for step in (3, 4)]
        assert not torch.equal(*heads)
    assert [(tmp_path / f"code{rank}").read_text() for rank in range(2)] == ["1", "1"]
    assert "2 steps in a row, up to step 5" in said


@pytest.mark.parametrize("case", ["raise", "kill"])
def test_a_rank_that_dies_ends_the_others(case, data, tmp_path):
    (tmp_path / "data").symlink_to(data)
    done = run_ranks(tmp_path, __file__, tmp_path, case)
    assert done.codes == [1, 1 if case == "raise" else -signal.SIGKILL], done
    assert "[rank 0]: another rank has ended" in done.stderr[0], done
    if case == "raise":
        assert "rank 1's own mistake" in done.stderr[1], done
        assert (tmp_path / "stderr1.txt").stat().st_mtime_ns <= (tmp_path / "stderr0.txt").stat().st_mtime_ns
    for said in done.stderr:
        assert "gloo" not in said.lower().replace("(gloo: no connection)", ""), done
    assert final(tmp_path / case)["step"] == 3


@pytest.mark.soak
def test_torchrun_restarts_killed_ranks(data, tmp_path):
    (tmp_path / "data").symlink_to(data)
    done = run_torchrun(__file__, tmp_path, "whole", options=["--max-restarts=9"])
    assert done.returncode == 0, done.stderr
    done = run_torchrun(__file__, tmp_path, "restarts", options=["--max-restarts=9"])
    assert done.returncode == 0, done.stderr
    assert len(re.findall("^resumed from", (tmp_path / "restarts" / "log.txt").read_text(), re.M)) == 3
    assert_same_run(tmp_path / "restarts", tmp_path / "whole", exact=True)


# ---------------------------------------------------------------------------------------------------------------------
# Kills


def forked_ranks(argv: list[str], world: int, log: Path, port: int) -> list[int]:
    """Start train_gpt.py's command line in forks of this process, which has imported everything; returns their ids."""
    pids = []
    for rank in range(world):
        if pid := os.fork():
            pids.append(pid)
            continue
        try:
            output = os.open(log, os.O_CREAT | os.O_APPEND | os.O_WRONLY)
            os.dup2(output, 1), os.dup2(output, 2)
            if world > 1:
                os.environ.update(
                    RANK=str(rank),
                    LOCAL_RANK=str(rank),
                    WORLD_SIZE=str(world),
                    MASTER_PORT=str(port),
                    LOCAL_WORLD_SIZE=str(world),
                    MASTER_ADDR="127.0.0.1",
                )
            os._exit(train_gpt.main(argv))
        except BaseException:
            traceback.print_exc()
        os._exit(1)
    return pids


def killed_runs(folder: Path, kills: int, world: int, device: str) -> None:
    """Runs that are killed at random moments and resumed until they end, till `kills` are reached; writes kills.json.

    Half of the kills come after a random time, half when a checkpoint is being written; with two ranks, a third hit
    one rank only, and the other has to end by itself.
    """
    importlib.import_module("torch._dynamo")  # a second of what every fork would import late
    rng, port = random.Random(0), 20000 + os.getpid() % 20000
    flags = TINY | dict(n_layer=1, batch_tokens=256, micro_batch=4, max_steps=12, save_every=1, eval_every=5)
    flags |= dict(data=make_data(folder / "data"), eval_tokens=1024, prefetch=1, resume="auto", device=device)
    flags |= dict(deterministic=True) if device == "cuda" else {}
    report = dict(kills=0, while_saving=0, runs=0, waiting=0, codes=[])

    def start(out):
        nonlocal port
        port += 1
        return forked_ranks(flags_of(flags | dict(out_dir=out)), world, folder / "output.txt", port)

    def ended(pids, patience=60):
        """Exit codes. As torchrun does, ends a rank that waits for one which has gone (while they are connecting)."""
        codes, deadline = {}, time.monotonic() + patience
        while len(codes) < len(pids):
            for pid in set(pids) - set(codes):
                gone, status = os.waitpid(pid, os.WNOHANG)
                if gone:
                    codes[pid] = os.waitstatus_to_exitcode(status)
                elif time.monotonic() > deadline:
                    report["waiting"] += 1
                    os.kill(pid, signal.SIGKILL)
                    codes[pid] = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            time.sleep(0.002)
        return [codes[pid] for pid in pids]

    def saving(out, since):
        with contextlib.suppress(FileNotFoundError):
            return any(path.stat().st_mtime > since for path in out.glob(".tmp-ckpt*"))

    def over(pids):
        return any(os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) for pid in pids)

    began = time.time()
    assert ended(start(folder / "whole")) == [0] * world, (folder / "output.txt").read_text()
    span = time.time() - began  # of a run that nothing disturbs: the time in which to kill the next one
    while report["kills"] < kills:
        out, done = folder / f"run{report['runs']}", False
        report["runs"] += 1
        while not done:
            began, pids = time.time(), start(out)
            moment, while_saving = began + rng.random() * span, rng.random() < 0.5
            while time.time() < moment or while_saving and not saving(out, began):
                if over(pids):
                    span = min(span, time.time() - began)
                    break
                time.sleep(0.0005)
            if while_saving:
                time.sleep(rng.random() * 0.003)
            hit = pids if world == 1 or rng.random() < 0.67 else [rng.choice(pids)]
            for pid in hit:
                os.kill(pid, signal.SIGKILL)
            codes = ended(pids, 3)
            done = 0 in codes and set(codes) <= {0, -9} and (out / "summary.json").exists()
            if -signal.SIGKILL in codes:
                report["kills"] += 1
                report["while_saving"] += bool(saving(out, began))
            report["codes"] += [code for code in codes if code not in (0, -9)]
            if not done and report["kills"] >= kills:  # enough: the last run may end
                assert ended(start(out)) == [0] * world, (folder / "output.txt").read_text()
                done = True
    (folder / "kills.json").write_text(json.dumps(report))


def check_killed_runs(folder: Path, kills: int, world: int, device: str = "cpu") -> None:
    command = [sys.executable, __file__, folder, "kills", str(kills), str(world), device]
    env = os.environ | dict(PYTHONPATH=str(ROOT), PYTORCH_NVML_BASED_CUDA_CHECK="1")  # looking keeps CUDA from forks
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=1500)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((folder / "kills.json").read_text())
    print(report)
    assert report["kills"] >= kills and set(report["codes"]) <= {1}
    for i in range(report["runs"]):
        for key in ("step", "train_loss", "grad_norm", "lr", "val_loss", "tokens"):
            assert rows(folder / f"run{i}", key) == rows(folder / "whole", key), (i, key)
        assert_weights_equal(folder / f"run{i}", folder / "whole")


forks = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")


@forks
@pytest.mark.parametrize("world", [1, 2])
def test_killed_runs_end_as_if_nothing_had_been(world, tmp_path):
    check_killed_runs(tmp_path, 2 if world == 2 else 3, world)


@pytest.mark.soak
@forks
@pytest.mark.parametrize("world", [1, 2])
def test_a_hundred_kills(world, tmp_path):
    check_killed_runs(tmp_path, 100, world)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@forks
def test_gpu_thirty_kills(tmp_path):
    check_killed_runs(tmp_path, 30, 1, "cuda")


if __name__ == "__main__":
    folder, *case = sys.argv[1:]
    if case[0] == "kills":
        killed_runs(Path(folder), int(case[1]), int(case[2]), case[3])
    else:
        ranks_script(Path(folder), *case)
