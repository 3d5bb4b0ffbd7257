"""What people do in their first hour: edit the page, resume, continue for longer, and mistype."""

import contextlib
import copy as copy_module
import dataclasses
import itertools
import json
import math
import re
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

import model as model_module
import runtime.derived
import runtime.dtype
import runtime.logger
import runtime.minutes
import sample
import train_gpt
from conftest import ROOT, TINY, final, flags_of, rows, run_main, run_python
from data.shards import UserError
from data.tokenizers import get_tokenizer
from model import GPT, GPTConfig, ParamGroupSpec
from ops.init import constant, normal, ones, orthogonal, zeros
from runtime import start
from runtime.checkpoint import BEST, content_hash, read_checkpoint
from runtime.flags import integer
from runtime.logger import read_finished_run
from train_gpt import make_config, train

SHAPE = dict(vocab_size=64, seq_len=8, n_layer=2, n_head=2, n_embd=32)


# ---------------------------------------------------------------------------------------------------------------------
# Edits of the parameter table


class Gated(model_module.MLP):
    """An MLP with parameters of its own: a number, a vector, a matrix of PyTorch's."""

    fill = 3.0

    def __init__(self, cfg):
        super().__init__(cfg)
        self.gate = nn.Parameter(torch.full((1,), 0.7))
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.noise = nn.Parameter(torch.randn(cfg.n_embd))
        self.mix = nn.Linear(cfg.n_embd, cfg.n_embd)
        if self.fill:
            nn.init.constant_(self.mix.weight[0], self.fill)  # what a constructor does to a layer of PyTorch's holds

    def forward(self, x):
        return self.gate * self.scale * super().forward(x + self.noise) + self.mix(x)


@pytest.fixture
def gated(monkeypatch):
    """GPT whose MLPs are Gated; a function that sets the rows of their parameters, by name."""
    monkeypatch.setattr(model_module, "MLP", Gated)

    def rows_of(optim="adam", **inits):
        inits = {name: "module" for name in ("gate", "scale", "noise", "mix.weight", "mix.bias")} | inits
        table = {n: ParamGroupSpec(rf"blocks\.\d+\.mlp\.{re.escape(n)}", init, optim) for n, init in inits.items()}
        monkeypatch.setattr(model_module, "PARAM_TABLE", model_module.PARAM_TABLE | table)

    return rows_of


def drawn(seed=0, **shape) -> dict:
    gpt = GPT(GPTConfig(**SHAPE | shape))
    train_gpt.init_weights(gpt, train_gpt.seed_of(make_config(seed=seed)))
    return gpt.state_dict()


def test_a_parameter_starts_as_its_module_made_it(gated):
    gated()
    weights, again, other = drawn(), drawn(), drawn(1)
    assert weights["blocks.1.mlp.gate"].tolist() == pytest.approx([0.7]) and weights["blocks.0.mlp.scale"] == 2
    for name in ("noise", "mix.weight", "mix.bias"):  # functions of the seed
        first, second = (f"blocks.{i}.mlp.{name}" for i in range(2))
        assert torch.equal(weights[first], again[first]) and weights[first].std() > 0
        assert not torch.equal(weights[first], weights[second]) and not torch.equal(weights[first], other[first])
    mix = weights["blocks.0.mlp.mix.weight"]
    assert mix[0].tolist() == [3.0] * 32 and 0 < mix[1:].abs().max() <= 32**-0.5  # the rest is nn.Linear's own


def test_a_constructor_may_read_other_layers(monkeypatch):
    """As weight norm and copies do: what they read has been drawn."""
    init = model_module.MLP.__init__

    def more(self, cfg):
        init(self, cfg)
        self.mix = nn.utils.parametrizations.weight_norm(nn.Linear(cfg.n_embd, cfg.n_embd))
        self.teacher = copy_module.deepcopy(self.fc).requires_grad_(False)
        self.register_buffer("norms", self.fc.weight.detach().norm(dim=1))

    monkeypatch.setattr(model_module.MLP, "__init__", more)
    row = ParamGroupSpec(r".*\.mlp\.(mix|teacher)\..*", "module", "adam")
    monkeypatch.setattr(model_module, "PARAM_TABLE", model_module.PARAM_TABLE | {"more": row})
    for place in ("cpu", "meta"):
        with torch.device(place):
            gpt = GPT(GPTConfig(**SHAPE))
        train_gpt.init_weights(gpt.to_empty(device="cpu"), train_gpt.seed_of(make_config(seed=3)))
        mlp = gpt.blocks[1].mlp
        parts = mlp.mix.parametrizations.weight
        torch.testing.assert_close(parts.original0[:, 0], parts.original1.norm(dim=1))
        torch.testing.assert_close(mlp.norms, mlp.teacher.weight.norm(dim=1))
        assert 0 < mlp.teacher.weight.std() < 1 and torch.equal(gpt.cos, GPT(GPTConfig(**SHAPE)).cos)


def test_a_row_says_how_a_parameter_starts(gated, monkeypatch):
    monkeypatch.setattr(Gated, "fill", None)  # as it would contradict the row
    inits = {"gate": ones, "scale": constant(0.25), "noise": normal(0.5), "mix.weight": orthogonal(), "mix.bias": zeros}
    gated(**inits)
    weights = {name.removeprefix("blocks.0.mlp."): w for name, w in drawn().items()}
    assert weights["gate"].tolist() == [1] and weights["scale"] == 0.25 and weights["mix.bias"].abs().max() == 0
    assert 0.3 < weights["noise"].std() < 0.7
    torch.testing.assert_close(weights["mix.weight"] @ weights["mix.weight"].T, torch.eye(32), rtol=0, atol=1e-5)


@pytest.mark.parametrize("optimizer", ["muon", "adamw"])
def test_parameters_of_any_shape_are_trained_saved_and_resumed(optimizer, gated, data, tmp_path):
    gated()
    flags = TINY | dict(data=str(data), out_dir=str(tmp_path / "run"), optimizer=optimizer, max_steps=6, save_every=3)
    train(make_config(**flags, keep=0))
    model = final(tmp_path / "run")["model"]
    assert model["blocks.0.mlp.scale"].shape == () and model["blocks.0.mlp.scale"] != 2
    assert model["blocks.0.mlp.gate"] != pytest.approx(0.7) and model["blocks.0.mlp.gate"].shape == (1,)
    other = flags | dict(out_dir=str(tmp_path / "other"), resume=str(tmp_path / "run" / "ckpt_3.pt"))
    train(make_config(**other))
    assert rows(tmp_path / "run", "train_loss")[3:] == rows(tmp_path / "other", "train_loss")


def test_rows_that_cannot_be_are_refused_when_the_model_is_built(gated, data, tmp_path, capsys):
    flags = flags_of(TINY | dict(data=data, out_dir=tmp_path / "run"))
    code, err = run_main(flags, capsys)  # no rows at all: the sentence holds one that works
    assert code == 2 and err.count("\n") == 1 and "blocks.0.mlp.gate matches no row of PARAM_TABLE" in err
    example = re.search(r'"mlp_gate": ParamGroupSpec\(r"(.*)", "module", "adam"\),', err)
    assert example and re.fullmatch(example[1], "blocks.11.mlp.gate")
    gated(optim="muon")
    code, err = run_main(flags, capsys)
    assert code == 2 and err.count("\n") == 1 and "of shape (1,) has optim 'muon'" in err
    gated()
    code, err = run_main([*flags, "--parallel", "fsdp"], capsys)
    assert code == 2 and err.count("\n") == 1 and "blocks.0.mlp.scale is a scalar, which FSDP cannot shard" in err
    assert not (tmp_path / "run").exists()


# ---------------------------------------------------------------------------------------------------------------------
# Flags


@pytest.mark.parametrize(
    "text, value",
    [
        ("12", 12),
        ("1e3", 1000),
        ("4k", 4000),
        ("2M", 2_000_000),
        ("1.5b", 1.5e9),
        ("1_000", 1000),
        ("0.5k", 500),
        ("16.1k", 16100),
    ],
)
def test_integers_as_people_write_them(text, value):
    assert integer(text) == value and type(integer(text)) is int
    assert train_gpt.parse_args(["--max_steps", text])["max_steps"] == value


@pytest.mark.parametrize("text", ["1.5", "1e-3", "k", "", "4kk", "nan", "inf", "ten"])
def test_what_is_not_an_integer_is_refused(text):
    with pytest.raises(UserError):
        make_config(**train_gpt.parse_args(["--max_steps", text]))


def test_whole_floats_are_integers():
    assert make_config(max_steps=1e3).max_steps == 1000 and type(make_config(max_steps=1e3).max_steps) is int
    with pytest.raises(UserError, match="expected int"):
        make_config(max_steps=1.5)


def test_a_plain_dataclass_field_is_a_flag(monkeypatch, data, tmp_path):
    edited = dataclasses.make_dataclass(
        "Config",
        [("z_loss", float, 0.5), ("loud", bool, False), ("tag", str, "x")],
        bases=(train_gpt.Config,),
        frozen=True,
    )
    monkeypatch.setattr(train_gpt, "Config", edited)
    given = train_gpt.parse_args(["--z_loss", "0.25", "--loud", "--n_layer", "2"])
    assert given == dict(z_loss=0.25, loud=True, n_layer=2) and make_config(**given).tag == "x"
    with pytest.raises(UserError, match="--z_loss is 'a'; expected float"):
        make_config(z_loss="a")
    train(make_config(**TINY | dict(data=str(data), out_dir=str(tmp_path / "run"), max_steps=1, z_loss=1)))
    assert final(tmp_path / "run")["config"]["z_loss"] == 1.0


@pytest.mark.parametrize(
    "argv, says",
    [
        ("--block_size 256", "--seq_len"),
        ("--max_iters 5000", "--max_steps"),
        ("--learning_rate 1e-3", "--muon_lr"),
        ("--batch_size 12", "--micro_batch"),
        ("--dropout 0.1", "--weight_decay"),
        ("--eval_interval 10", "--eval_every"),
        ("--init_from gpt2", "GPT-2's weights do not fit"),
        ("--init_from scratch", "starts from scratch by itself"),
        ("--schedule_from here", "add --resume"),
        ("--minutes 5 --max_steps 10", "remove one of them"),
        ("--resume --out_dir x --minutes 5 --max_steps 10", "remove one of them"),
        ("--trials 2 --minutes 5", "give --max_steps instead"),
    ],
)
def test_names_of_other_trainers_get_the_right_answer(argv, says, capsys):
    code, err = run_main(argv.split(), capsys)
    assert code == 2 and err.count("\n") == 1 and says in err


# ---------------------------------------------------------------------------------------------------------------------
# Resuming


@pytest.fixture(scope="module")
def halfway(tmp_path_factory, request):
    """A finished run of 8 steps, with flags that are nobody's defaults, as a folder to copy."""
    data = request.getfixturevalue("data")
    folder = tmp_path_factory.mktemp("halfway") / "run"
    flags = dict(max_steps=8, cooldown_frac=0.5, weight_decay=0.1, save_every=4, keep=0)
    train(make_config(**TINY | flags | dict(data=str(data), out_dir=str(folder))))
    return folder


@pytest.fixture
def copy(halfway, tmp_path) -> Path:
    return Path(shutil.copytree(halfway, tmp_path / "run"))


@pytest.mark.parametrize("how", ["--out_dir RUN --resume", "--resume RUN", "--resume RUN/ckpt_8.pt"])
def test_a_resumed_run_takes_its_flags_from_the_checkpoint(how, copy, capsys):
    assert (
        run_main(how.replace("RUN", str(copy)).split() + ["--max_steps", "10", "--weight_decay", "0.2"], capsys)[0] == 0
    )
    log = (copy / "log.txt").read_text()
    assert "; flags that have changed: --max_steps 8 -> 10, --weight_decay 0.1 -> 0.2;" in log
    saved = final(copy)
    assert saved["step"] == 10 and saved["config"]["cooldown_frac"] == 0.5 and saved["config"]["n_embd"] == 32
    assert [row for row in rows(copy, "step")][-1] == 10


def test_a_run_that_is_resumed_elsewhere_branches_off(copy, tmp_path, capsys):
    argv = ["--resume", str(copy / "ckpt_4.pt"), "--out_dir", str(tmp_path / "branch")]
    assert run_main(argv, capsys)[0] == 0
    assert rows(tmp_path / "branch", "train_loss") == rows(copy, "train_loss")[4:]


def test_resume_without_a_folder_offers_the_newest_run_and_makes_nothing(copy, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    code, err = run_main(["--resume"], capsys)
    assert code == 2 and "there is none in runs/" in err and list(tmp_path.iterdir()) == [copy]
    shutil.copytree(copy, tmp_path / "runs" / "older")
    shutil.copytree(copy, tmp_path / "runs" / "newer")
    (tmp_path / "runs" / "newer" / "ckpt_8.pt").touch()
    code, err = run_main(["--resume"], capsys)
    assert code == 2 and err.count("\n") == 1 and "--out_dir runs/newer, the newest here" in err
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == ["newer", "older"]


def test_more_steps_say_what_they_do_to_the_learning_rate(copy, tmp_path, capsys):
    longer = shutil.copytree(copy, tmp_path / "longer")
    assert run_main(["--resume", str(copy), "--max_steps", "16"], capsys)[0] == 0
    assert (
        "the learning rate goes from 0.25 to 1 of its full value (--schedule_from here keeps it from rising)"
        in (copy / "log.txt").read_text()
    )  # 1 of 4 cool-down steps left
    assert rows(copy, "lr")[8] == pytest.approx(0.02)
    assert run_main(["--resume", str(longer), "--max_steps", "16", "--schedule_from", "here"], capsys)[0] == 0
    rates = rows(longer, "lr")[8:]
    assert rates == pytest.approx([min(0.005, 0.02 * (16 - step) / 8) for step in range(8, 16)])
    assert run_main(["--resume", str(longer), "--max_steps", "18"], capsys)[0] == 0  # it is kept in the checkpoint
    assert max(rows(longer, "lr")[16:]) <= 0.005


def test_fewer_steps_than_are_done_are_refused(copy, capsys):
    before = sorted(path.name for path in copy.iterdir())
    code, err = run_main(["--resume", str(copy), "--max_steps", "5"], capsys)
    assert code == 2 and "has done 8 steps already; give --max_steps 8 or more, not 5" in err
    assert sorted(path.name for path in copy.iterdir()) == before


def test_weights_come_from_a_folder_and_fit_another_context(copy, data, tmp_path, capsys):
    flags = TINY | dict(data=data, init_from=copy, out_dir=tmp_path / "new", seq_len=16, max_steps=1)
    assert run_main(flags_of(flags), capsys)[0] == 0
    assert f"weights from {copy / 'ckpt_8.pt'}" in (tmp_path / "new" / "log.txt").read_text()
    meta = shutil.copytree(data, tmp_path / "data") / "meta.json"
    meta.write_text(json.dumps(json.loads(meta.read_text()) | dict(tokenizer="words", vocab_size=300, eot=256)))
    flags |= dict(data=tmp_path / "data", out_dir=tmp_path / "other", vocab_size=320)
    code, err = run_main(flags_of(flags), capsys)
    assert code == 2 and "reads tokens of 'bytes'" in err and "holds those of 'words'" in err
    assert not (tmp_path / "other").exists()


def test_the_best_weights_are_kept(data, tmp_path, monkeypatch, capsys):
    losses = iter([3.0, 2.0, 2.5, 2.0, 4.0])
    evaluated = []

    def evaluate(state, stream, signals=()):
        evaluated.append({name: p.detach().clone() for name, p in state.raw_model.named_parameters()})
        return next(losses)

    monkeypatch.setattr(train_gpt, "evaluate", evaluate)
    flags = TINY | dict(data=str(data), out_dir=str(tmp_path / "run"), max_steps=10, eval_every=2)
    train(make_config(**flags))
    best = read_checkpoint(tmp_path / "run" / BEST)
    assert best["step"] == 4 and best["optimizer"] == {}
    assert all(torch.equal(w, evaluated[1][name]) for name, w in best["model"].items())
    assert sorted(path.name for path in (tmp_path / "run").glob("*.pt")) == ["ckpt_10.pt", BEST]
    monkeypatch.undo()
    for argv, says in (
        (["--run", str(tmp_path / "run"), "--best"], ""),
        (["--run", str(tmp_path), "--best"], "no ckpt_best"),
    ):
        capsys.readouterr()
        assert sample.main([*argv, "--max_new_tokens", "5"]) == (2 if says else 0)
        assert says in capsys.readouterr().err
    flags |= dict(resume=str(tmp_path / "run" / BEST), out_dir=str(tmp_path / "other"))
    with pytest.raises(UserError, match="holds weights only, so it cannot be resumed; use --init_from"):
        train(make_config(**flags))
    flags |= dict(resume="", init_from=str(tmp_path / "run" / BEST), eval_every=0)
    train(make_config(**flags))
    assert not (tmp_path / "other" / BEST).exists()  # one evaluation, at the end: the checkpoint is the best


def test_best_weights_survive_a_resume(data, tmp_path, monkeypatch):
    losses = iter([1.0, 3.0, 2.0, 0.5])
    monkeypatch.setattr(train_gpt, "evaluate", lambda *_: next(losses))
    flags = TINY | dict(data=str(data), out_dir=str(tmp_path / "run"), max_steps=4, eval_every=2, save_every=2)
    train(make_config(**flags))
    train(make_config(**flags | dict(resume="newest", max_steps=6)))
    assert read_checkpoint(tmp_path / "run" / BEST)["step"] == 2  # 2.0 after the resume is no better than 1.0 before
    train(make_config(**flags | dict(resume="newest", max_steps=8)))
    assert read_checkpoint(tmp_path / "run" / BEST)["step"] == 8


def test_best_weights_alone_are_not_started_over(data, tmp_path, capsys):
    flags = TINY | dict(data=data, out_dir=tmp_path / "run", max_steps=1)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / BEST).write_bytes(b"weights")
    code, err = run_main(flags_of(flags), capsys)
    assert code == 2 and f"holds the {BEST} of another run" in err
    assert run_main([*flags_of(flags), "--resume", "auto"], capsys)[0] == 0  # for jobs that start again by themselves
    assert not (tmp_path / "run" / BEST).exists()
    code, err = run_main(["--resume", str(tmp_path / "run" / BEST)], capsys)
    assert code == 2 and "holds weights only, so it cannot be resumed; use --init_from" in err


def test_schedule_from_here_without_anything_to_resume(data, tmp_path):
    flags = TINY | dict(data=str(data), max_steps=4, resume="auto", schedule_from="here")
    train(make_config(**flags, out_dir=str(tmp_path / "run")))
    assert np.isfinite(rows(tmp_path / "run", "lr")).all() and rows(tmp_path / "run", "lr")[0] == 0.02


@pytest.mark.parametrize("after", [25, 45], ids=["flat", "falling"])
@pytest.mark.parametrize("factor", [1.0, 2.0, 0.5, 0.2], ids=["as before", "twice as slow", "twice as fast", "5 x"])
def test_minutes_choose_the_steps_again(factor, after, data, tmp_path, monkeypatch):
    """Steps of 0.5 s and evaluation batches of 0.25 s, by a clock of our own; after 25 or 45, `factor` times that."""
    clock, trained = [0.0], [0]
    fake = type("Clock", (), dict(perf_counter=lambda: clock[0], monotonic=lambda: clock[0]))
    for room in (runtime.minutes, runtime.logger):
        monkeypatch.setattr(room, "time", fake)
    step, evaluate = train_gpt.train_step, train_gpt.evaluate

    def slow_step(state, batch, lr_multiplier):
        trained[0] += lr_multiplier > 0
        clock[0] += 0.5 * (factor if trained[0] > after else 1)
        return step(state, batch, lr_multiplier)

    def slow_eval(state, *args):
        n_batches = state.cfg.eval_tokens // (state.micro_batch * state.cfg.seq_len)
        clock[0] += 0.25 * n_batches * (factor if trained[0] > after else 1)
        return evaluate(state, *args)

    monkeypatch.setattr(train_gpt, "train_step", slow_step)
    monkeypatch.setattr(train_gpt, "evaluate", slow_eval)
    flags = {k: v for k, v in TINY.items() if k != "max_steps"} | dict(
        data=str(data), eval_every=10, save_every=2, keep=0, eval_tokens=1024, warmup_frac=0.05
    )
    train(make_config(**flags, out_dir=str(tmp_path / "run"), minutes=1.0))
    saved = final(tmp_path / "run")
    log = (tmp_path / "run" / "log.txt").read_text()
    # 98 % of 60 s - 3 (six steps) - 0.5 - 4 = 51.3 s: 84 steps and 9 evaluations
    assert "--minutes 1: steps of 500 ms, evaluations of 1.0 s, so 84 steps" in log
    assert 51 < clock[0] < 57  # 4 s are for what takes no time here
    assert saved["step"] == saved["config"]["max_steps"] == read_finished_run(tmp_path / "run")[1]["max_steps"]
    assert (saved["step"] < 75) == (factor == 2) and (saved["step"] > 95) == (factor < 1)
    rates = [lr / 0.02 for lr in rows(tmp_path / "run", "lr")]
    steepest = max(before - now for before, now in zip(rates[6:], rates[7:]))
    assert max(rates[6:]) == 1 and sorted(rates[6:], reverse=True) == rates[6:] and rates[-1] < 0.06 and steepest < 0.06
    monkeypatch.undo()
    kept = {n: read_checkpoint(tmp_path / "run" / f"ckpt_{n}.pt")["config"] for n in range(2, saved["step"], 2)}
    first = min(n for n, config in kept.items() if config == saved["config"])
    again = dict(out_dir=str(tmp_path / "again"), resume=str(tmp_path / "run" / f"ckpt_{first}.pt"), minutes=1.0)
    train(make_config(**flags | again))
    assert rows(tmp_path / "again", "train_loss") == rows(tmp_path / "run", "train_loss")[first:]
    assert make_config(resume="newest", out_dir=str(tmp_path / "run"), max_steps=999).minutes == 0
    with pytest.raises(UserError, match="--minutes chooses the steps when a run begins, and that of .* has"):
        train(make_config(**flags | again | dict(out_dir=str(tmp_path / "third"), minutes=2.0, warmup_frac=0.01)))


def test_minutes_alone_choose_the_size_too(data, tmp_path, monkeypatch):
    """By the speed of matmuls; of the steps that follow, a run with these sizes cannot be told."""
    monkeypatch.setattr(start, "matmul_speed", lambda *_: 1e11)
    monkeypatch.setattr(runtime.minutes.Pace, "revise", lambda *_: False)
    flags = dict(data=str(data), seq_len=64, device="cpu", dtype="fp32", eval_tokens=1024, softcap=20.0)
    cfg = make_config(**flags, minutes=0.15, out_dir=str(tmp_path / "run"))
    assert (cfg.n_embd, cfg.batch_tokens, cfg.max_steps, cfg.eval_tokens) == (None, None, None, 1024)
    train(cfg)
    kept = final(tmp_path / "run")["config"]
    assert kept["params"] == 100_000 and kept["n_embd"] == 64 and kept["eval_tokens"] == 1024
    assert (
        "--minutes 0.15: matmuls reach 0.100 TFLOP/s, so a model as by --params 100000"
        in (tmp_path / "run/log.txt").read_text()
    )
    sizes = {name: kept[name] for name in runtime.derived.SIZED}
    train(make_config(**flags | sizes, out_dir=str(tmp_path / "plain")))
    assert rows(tmp_path / "run", "train_loss") == rows(tmp_path / "plain", "train_loss")
    again = make_config(resume="newest", out_dir=str(tmp_path / "run"), minutes=0.15)
    assert {name: getattr(again, name) for name in sizes} == sizes
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    monkeypatch.setattr(start, "matmul_speed", lambda *_: 1e14)
    assert train(cfg)["step"] == kept["max_steps"]  # of the checkpoint, not of the speed now
    for given in (dict(n_embd=128), dict(preset="laptop"), dict(params=300_000), dict(init_from="x")):
        assert make_config(minutes=1, **given).n_embd is not None
    assert make_config(minutes=1, seq_len=3000, micro_batch=3).n_embd is None  # no batch has been chosen yet


def test_sizes_come_with_the_weights_of_init_from(data, tmp_path):
    train(make_config(**TINY | dict(data=str(data), out_dir=str(tmp_path / "run"), max_steps=2)))
    for start_from in (tmp_path / "run", tmp_path / "run" / "ckpt_2.pt"):
        cfg = make_config(init_from=str(start_from), n_layer=TINY["n_layer"])
        assert cfg.n_embd == 128  # a size was given, so that the others are the preset's
        cfg = make_config(init_from=str(start_from), minutes=1)
        assert (cfg.n_layer, cfg.n_embd, cfg.n_head) == (TINY["n_layer"], TINY["n_embd"], TINY["n_head"])
    flags = {k: v for k, v in TINY.items() if k not in ("n_layer", "n_embd", "n_head", "ngram", "ngram_rows")}
    flags |= dict(data=str(data), max_steps=2, init_from=str(tmp_path / "run"), out_dir=str(tmp_path / "tuned"))
    assert train(make_config(**flags))["step"] == 2


def test_more_time_and_speed_is_a_larger_model():
    cfg, found = make_config(minutes=1, eval_every=7, dtype="bf16"), []
    of_much_text = ((1, 1024, 1e11), (30, 1024, 1e11), (30, 1024, 1e13), (30, 50304, 1e13))
    for minutes, vocab_size, flop_s in of_much_text:
        timed = dataclasses.replace(cfg, minutes=minutes)
        sizes = runtime.minutes.sizes_within(timed, vocab_size, math.inf, flop_s)
        assert sizes.keys() == runtime.derived.SIZED - {"eval_every"} | {"params"}
        found.append(sizes["params"])
        chosen = dataclasses.replace(cfg, minutes=minutes, **sizes)
        assert chosen.n_embd % chosen.n_head == 0 and chosen.eval_every == 7
        runtime.checks.check_flags(chosen)
    assert found[0] < found[1] < found[3] < found[2]


def test_a_small_text_is_for_a_small_model_and_batch():
    hour = make_config(minutes=60, dtype="bf16")
    little, some, much = (runtime.minutes.sizes_within(hour, 1024, n, 3e11) for n in (1.4e5, 1e6, math.inf))
    weights = [12 * each["n_layer"] * each["n_embd"] ** 2 for each in (little, some, much)]
    assert weights[0] <= 4 * 1.4e5 < weights[1] <= 4 * 1e6 and weights[1] <= weights[2]
    assert little["batch_tokens"] < some["batch_tokens"] < much["batch_tokens"]
    assert 6 * 1.4e5 / little["batch_tokens"] > 200  # steps enough


def test_sizes_by_minutes_suit_any_number_of_ranks(data, monkeypatch):
    monkeypatch.setattr(start, "matmul_speed", lambda *_: 1e11)
    monkeypatch.setattr(start, "load_meta", lambda _: dict(vocab_size=257, splits={}))  # of shards of elsewhere
    dist_ctx = SimpleNamespace(world_size=6, rank=0, device=torch.device("cpu"), cpu_group=None)
    monkeypatch.setattr(start, "was_restarted", lambda _: False)
    monkeypatch.setattr(start, "run_on_rank0", lambda _, function: function())
    monkeypatch.setattr(start, "agree", lambda _: contextlib.nullcontext())
    flags = dict(minutes=60, data=str(data), seq_len=250, micro_batch=3)
    cfg, _ = start.fit_sizes(make_config(**flags), dist_ctx)
    assert runtime.derived.seqs_per_rank(cfg, 6) % 3 == 0
    large_head, _ = start.fit_sizes(make_config(**flags, vocab_size=50304), dist_ctx)
    assert large_head.params < cfg.params  # its matmuls take their part of the time


def test_matmuls_are_timed_in_the_dtype_of_training(monkeypatch):
    monkeypatch.setattr(runtime.dtype, "matmul_speeds", lambda *_: dict(fp32=10.0, bf16=30.0))
    flags = (dict(), dict(deterministic=True), dict(dtype="fp32"), dict(bf16=True))
    found = [runtime.dtype.matmul_speed(make_config(**each), torch.device("cpu")) for each in flags]
    assert found == [30.0, 10.0, 10.0, 30.0]


def test_minutes_have_measured_without_a_trace(data, tmp_path, monkeypatch):
    monkeypatch.setattr(runtime.minutes.Pace, "revise", lambda *_: False)
    flags = {k: v for k, v in TINY.items() if k != "max_steps"} | dict(data=str(data))
    train(make_config(**flags, out_dir=str(tmp_path / "run"), minutes=0.2))
    n = final(tmp_path / "run")["step"]
    assert train(make_config(**flags, out_dir=str(tmp_path / "plain"), max_steps=n))["step"] == n
    assert rows(tmp_path / "run", "train_loss") == rows(tmp_path / "plain", "train_loss")


def test_steps_in_a_time_are_all_that_fit():
    pace = runtime.minutes.Pace(step_s=1.0, eval_s=3.0)
    for step, every, seconds in itertools.product((0, 7, 8, 10), (0, 4, 5, 100), (0.0, 3.9, 4.0, 12.0, 55.0)):
        found = pace.steps_in(seconds, step, every)
        for n in (found, found + 1):
            evaluated = {at for at in range(step, step + n) if every and at > 0 and at % every == 0} | {step + n}
            assert n == 0 or (n + 3 * len(evaluated) <= seconds) == (n == found)


def test_minutes_of_a_few_slow_steps_are_measured_by_two_at_least():
    pace, found = runtime.minutes.Pace(2.7, 0.1), []
    state = SimpleNamespace(cfg=SimpleNamespace(minutes=0.5), dist_ctx=SimpleNamespace(world_size=1))
    for state.step in range(6):
        found.append(pace.measure(state, SimpleNamespace(pause=lambda: 3.0 * state.step)))
    assert found == [False, False, True, False, True, False] and pace.step_s == pytest.approx(3.0)


def test_minutes_are_fewer_steps_also_during_warm_up():
    """Steps of 0.5 s take 2 s from the first on; the learning rate goes on from where it is, and ends at 0."""
    pace = runtime.minutes.Pace(0.5, 0.0)
    cfg = dataclasses.replace(make_config(max_steps=100, eval_every=0), minutes=1.0, warmup_frac=0.4)
    state = SimpleNamespace(cfg=cfg, dist_ctx=SimpleNamespace(world_size=1), step=6)
    logger = SimpleNamespace(info=print, log_flags=print)
    progress = SimpleNamespace(timer=SimpleNamespace(pause=lambda: 12.0, wall_time=14.0), logger=logger)
    assert pace.revise(state, progress, train_gpt.get_lr_multiplier)
    assert state.cfg.max_steps == 6 + int((0.98 * 60 - 4 - 14) / 2)
    rates = [train_gpt.get_lr_multiplier(step, each) for each in (cfg, state.cfg) for step in (6,)]
    assert rates[0] == pytest.approx(rates[1]) and train_gpt.get_lr_multiplier(state.cfg.max_steps, state.cfg) == 0


def test_minutes_do_not_repeat_a_small_text_for_ever(data, tmp_path, monkeypatch):
    pace = runtime.minutes.Pace(step_s=0.01, eval_s=0.0)  # far more steps fit, now and whenever it is asked again
    monkeypatch.setattr(runtime.minutes, "steps_within", lambda *_: (10**6, pace, "so 1,000,000 steps"))
    monkeypatch.setattr(runtime.minutes, "MANY_EPOCHS", 3)
    flags = TINY | dict(data=str(data), minutes=60.0, log_every=1000)
    del flags["max_steps"]
    n_tokens = json.loads((data / "meta.json").read_text())["splits"]["train"]["tokens"]
    steps = 3 * ((n_tokens - 32) // 32) // 16  # of 16 sequences each

    def on_step(state, _):
        assert state.step <= steps

    assert train(make_config(**flags, out_dir=str(tmp_path / "run")), on_step=on_step)["step"] == steps
    log = (tmp_path / "run" / "log.txt").read_text()
    assert f"so 1,000,000 steps; {steps:,} are taken, which see the text 3 times" in log


def test_a_restart_of_torchrun_keeps_what_minutes_chose(data, tmp_path, monkeypatch):
    """Also where it does not say --resume; and what is given instead of --minutes is taken."""
    left_out = ("max_steps", "muon_lr", "adam_lr")
    flags = {k: v for k, v in TINY.items() if k not in left_out} | dict(data=str(data), out_dir=str(tmp_path / "run"))
    train(make_config(**flags | dict(max_steps=20, cooldown_frac=0.35, save_every=10)))
    saved = read_checkpoint(tmp_path / "run" / "ckpt_10.pt")
    saved["config"] |= dict(minutes=0.5, muon_lr=0.031)  # chosen for another number of steps, before the last choice
    saved["sha256"] = content_hash(saved)
    shutil.rmtree(tmp_path / "run")
    (tmp_path / "run").mkdir()
    torch.save(saved, tmp_path / "run" / "ckpt_10.pt")
    (tmp_path / "run" / "log.txt").touch()
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    train(make_config(**flags, minutes=0.5))
    kept = final(tmp_path / "run")["config"]
    assert (kept["max_steps"], kept["cooldown_frac"], kept["minutes"]) == (20, 0.35, 0.5)
    assert kept["muon_lr"] == 0.031 and kept["adam_lr"] == saved["config"]["adam_lr"] > 0
    log = (tmp_path / "run" / "log.txt").read_text()
    assert "as --minutes 0.5 chose: --max_steps 20" in log and "--muon_lr 0.031 ->" not in log
    changed = make_config(resume="newest", out_dir=str(tmp_path / "run"), cooldown_frac=0.2)
    assert (changed.minutes, changed.max_steps, changed.cooldown_frac) == (0, 20, 0.2)


def test_minutes_keep_a_schedule_that_depends_on_the_steps_from_the_start(data, tmp_path, monkeypatch):
    monkeypatch.setattr(train_gpt, "get_lr_multiplier", lambda step, cfg: 1 - step / cfg.max_steps)
    monkeypatch.setattr(
        runtime.minutes, "steps_within", lambda *_: (20, runtime.minutes.Pace(step_s=1.0, eval_s=0.0), "")
    )
    flags = {k: v for k, v in TINY.items() if k != "max_steps"} | dict(data=str(data), minutes=1.0)
    assert train(make_config(**flags, out_dir=str(tmp_path / "run")))["step"] == 20
    assert "still 20 steps, as the schedule needs them" in (tmp_path / "run" / "log.txt").read_text()


def test_too_few_minutes_are_refused(data, tmp_path, capsys):
    flags = {k: v for k, v in TINY.items() if k != "max_steps"} | dict(
        data=data, out_dir=tmp_path / "run", minutes=0.01
    )
    code, err = run_main(flags_of(flags), capsys)
    assert code == 2 and "--minutes 0.01 is too short" in err and "give at least" in err
    assert not (tmp_path / "run").exists()


# ---------------------------------------------------------------------------------------------------------------------
# Small things that cost trust


def test_default_folders_never_collide(data, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    flags = {k: v for k, v in TINY.items()} | dict(data=str(data), max_steps=1)
    for _ in range(3):
        train(make_config(**flags))
    train_gpt.train_trials(make_config(**flags, trials=2), train)
    folders = list((tmp_path / "runs").iterdir())
    assert len(folders) == 4 and all(list(folder.rglob("summary.json")) for folder in folders)


@pytest.mark.parametrize(
    "more",
    [["--init_from", "none.pt"], ["--resume", "none.pt"], ["--window", "S:3", "--n_head", "3"], ["--data", "nowhere"]],
)
def test_mistakes_leave_no_folder(more, data, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    flags = {k: v for k, v in TINY.items() if f"--{k}" not in more} | dict(data=data)
    assert run_main([*flags_of(flags), *more], capsys)[0] == 2
    assert not list(tmp_path.glob("runs/*")) and not list(tmp_path.glob("none*"))


@pytest.mark.parametrize(
    "end, says, not_says",
    [
        (dict(max_steps=2), "next: python sample.py --run", "--max_steps 20 "),
        (dict(max_minutes=1e-9), "--resume; the learning rate has not cooled down", "next:"),
        (dict(target_val_loss=100.0, eval_every=1), "to continue: python train_gpt.py --out_dir", "cooled"),
    ],
)
def test_the_last_line_fits_the_end(end, says, not_says, data, tmp_path):
    train(make_config(**TINY | dict(data=str(data), out_dir=str(tmp_path / "run")) | end))
    last = (tmp_path / "run" / "log.txt").read_text().splitlines()[-1]
    assert says in last and not_says not in last


def test_the_head_of_a_log_says_what_runs(plain):
    head = (plain / "log.txt").read_text().splitlines()[:11]
    for begin in ("command: ", "sources: train_gpt.py sha256 ", "torch ", "device: ", "data: ", "batch: ", "step  1/"):
        assert any(line.startswith(begin) for line in head), begin


def test_samples_of_bytes_do_not_reach_the_terminal_as_commands(data, tmp_path, monkeypatch, capsys):
    class Tokenizer:
        eot, vocab_size = 256, 257

        def decode_bytes(self, tokens):
            return b"a\x1b[2Jb\x07\x9b\r\n\tc"

    monkeypatch.setattr(start, "get_tokenizer", lambda *_: Tokenizer())
    train(make_config(**TINY | dict(data=str(data), out_dir=str(tmp_path / "run"), max_steps=1)))
    out = capsys.readouterr().out
    assert "\x1b" not in out and "\x07" not in out and "\n\tc" in out


@pytest.mark.parametrize("terminal", [True, False])
def test_sampled_bytes_on_a_terminal(terminal, monkeypatch, capsys):
    tokenizer = get_tokenizer("bytes")
    monkeypatch.setattr(sample, "generate", lambda *args: iter(torch.tensor([[27], [91], [65], [10]])))
    monkeypatch.setattr(sys.stdout, "isatty", lambda: terminal, raising=False)
    drawing = dict(max_new_tokens=4, temperature=1, top_k=0, top_p=1, no_cache=False)
    args = SimpleNamespace(seed=0, num_samples=1, prompt=[""], **drawing)
    sample.print_samples(GPT(GPTConfig(**SHAPE)), tokenizer, [""], args, None)
    assert capsys.readouterr().out == ("\ufffd[A\n\n" if terminal else "\x1b[A\n\n")


def test_an_ordinary_run_prints_nothing_of_pytorchs_own(data, tmp_path):
    flags = TINY | dict(data=data, out_dir=tmp_path / "run", max_steps=10)
    done = run_python("train_gpt.py", *flags_of(flags), "--profile")
    assert done.returncode == 0 and done.stderr == ""


def test_where_runs_and_data_go_from_another_folder(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert start.data_folder(make_config()) == ROOT / "data" / "python"  # and runs/ lies in the present folder
    readme = " ".join((ROOT / "README.md").read_text().split())
    assert "in the folder that you are in, the default corpus to `data/python`, beside the code" in readme


def test_train_returns_the_model(data, tmp_path):
    summary, model = train(make_config(**TINY | dict(data=str(data), out_dir=str(tmp_path / "run"))), return_model=True)
    assert summary["step"] == 20 and torch.equal(model.head.weight, final(tmp_path / "run")["model"]["head.weight"])


# ---------------------------------------------------------------------------------------------------------------------
# The end of a run


def test_a_finished_run_is_finished_however_late(data, tmp_path, monkeypatch):
    """The last step also passes --max_minutes: the run has done what it was to do, and --trials go on."""
    monkeypatch.setattr(train_gpt.TrainTimer, "wall_time_here", 61.0)
    summary = train(
        make_config(**TINY | dict(data=str(data), out_dir=str(tmp_path / "run"), max_steps=1, max_minutes=1))
    )
    assert summary["stopped_by"] == "max_steps" and summary["step"] == 1
    summary = train(make_config(**TINY | dict(data=str(data), out_dir=str(tmp_path / "b"), max_steps=9, max_minutes=1)))
    assert summary["stopped_by"] == "max_minutes" and summary["step"] < 9


@pytest.mark.parametrize(
    "error, says",
    [
        (torch.OutOfMemoryError("Tried to allocate 2.00 GiB"), "ended: memory ran out: 2.00 GiB were asked for"),
        (ZeroDivisionError("of a kind"), "ZeroDivisionError: of a kind"),
    ],
)
def test_every_end_stands_in_the_log(error, says, data, tmp_path, monkeypatch):
    def train_step(*_):
        raise error

    monkeypatch.setattr(train_gpt, "train_step", train_step)
    with pytest.raises(type(error)):
        train(make_config(**TINY | dict(data=str(data), out_dir=str(tmp_path / "run"))))
    log = (tmp_path / "run" / "log.txt").read_text()
    assert says in log and ("Traceback" in log) == isinstance(error, ZeroDivisionError)


def test_a_resume_from_python_takes_the_flags_of_the_run(copy):
    cfg = make_config(resume=str(copy), max_steps=12)
    assert cfg.out_dir == str(copy) and cfg.resume == "newest" and cfg.n_embd == 32 and cfg.weight_decay == 0.1
    assert train(cfg)["step"] == 12


def test_an_evaluation_that_was_missed_comes_first_after_a_resume(copy):
    """The run was stopped between its checkpoint and its evaluation."""
    (copy / "ckpt_8.pt").unlink()
    lines = [line for line in (copy / "metrics.jsonl").read_text().splitlines() if json.loads(line)["step"] <= 4]
    (copy / "metrics.jsonl").write_text("".join(f"{line}\n" for line in lines))
    train(make_config(resume=str(copy), eval_every=4))
    found = [json.loads(line) for line in (copy / "metrics.jsonl").read_text().splitlines()]
    steps = [(row["step"], "val_loss" in row) for row in found]
    assert steps[4:6] == [(4, True), (5, False)] and steps[-1] == (8, True) and steps.count((8, True)) == 1


def test_what_a_step_draws_is_not_what_orders_an_epoch(data, tmp_path):
    seeds = []
    flags = TINY | dict(data=str(data), out_dir=str(tmp_path / "run"), max_steps=3)
    train(make_config(**flags), on_step=lambda state, loss: seeds.append(state.raw_model.step_seed))
    assert len({*seeds, *(train_gpt.derive_seed(0, epoch) for epoch in range(3))}) == 6


def test_a_start_that_is_late_does_one_step_and_saves_it(data, tmp_path, monkeypatch):
    """Or a job that is started again and again, each time with less time than it takes to start, would never move."""
    monkeypatch.setattr(train_gpt.TrainTimer, "wall_time_here", 61.0)
    flags = TINY | dict(data=str(data), out_dir=str(tmp_path / "run"), max_steps=3, max_minutes=1, resume="auto")
    steps = [train(make_config(**flags))["step"] for _ in range(3)]
    assert steps == [1, 2, 3]


def test_the_logged_rate_is_that_of_the_optimizer(data, tmp_path, monkeypatch):
    monkeypatch.setattr(train_gpt, "make_optimizer", lambda cfg, model: torch.optim.AdamW(model.parameters(), lr=3e-4))
    train(make_config(**TINY | dict(data=str(data), out_dir=str(tmp_path / "run"), max_steps=2, cooldown_frac=0.0)))
    assert rows(tmp_path / "run", "lr") == pytest.approx([3e-4, 3e-4])
