"""The first hour: add parameters, bring an optimizer, continue a run for longer, use Python.

And what test_train.py says of wrong edits.
"""

import inspect
import math
import shutil
import subprocess
import sys
import textwrap

import pytest
import torch
from torch import nn

import model as model_module
import test_train
import train_gpt
from conftest import ROOT, TINY, assert_same_run, final, rows, tiny_run
from model import GPT, GPTConfig, ParamSpec
from tests.test_worked_edits import COPIED
from train_gpt import make_config, train


class Gated(model_module.MLP):
    """An MLP with a scalar, a vector, a layer of PyTorch's, and what is frozen."""

    def __init__(self, cfg):
        super().__init__(cfg)
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.noise = nn.Parameter(torch.randn(cfg.n_embd))
        self.mix = nn.Linear(cfg.n_embd, cfg.n_embd)
        self.fc.requires_grad_(False)


class Counting(torch.optim.Optimizer):
    """Signs of gradients, at a rate by a counter of its own."""

    def __init__(self, params):
        super().__init__(params, dict(lr=1e-3, done=0))

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["done"] += 1
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad.sign(), alpha=group["lr"] / group["done"])


def test_a_parameter_starts_as_its_module_made_it_or_as_its_row_says(monkeypatch):
    monkeypatch.setattr(model_module, "MLP", Gated)
    row = ParamSpec(r".*\.mix\.weight", lambda x, generator: x.fill_(3.0), "adam", 0.5)
    monkeypatch.setattr(model_module, "PARAM_TABLE", [row, *model_module.PARAM_TABLE])
    model = GPT(GPTConfig(vocab_size=64, seq_len=8, n_layer=2, n_head=2, n_embd=32))
    made = model.blocks[1].mlp.noise.detach().clone()
    model_module.init_weights(model, seed=1)
    mlp = model.blocks[1].mlp
    assert mlp.scale == 2 and torch.equal(mlp.noise, made) and (mlp.mix.weight == 3).all()
    rates = dict(muon_lr=0.02, adam_lr=0.004, weight_decay=0.1, embed_decay=1.5)
    optimizer = train_gpt.make_optimizer(make_config(**rates, max_steps=50), model)
    found = {}
    for group in optimizer.param_groups:
        settings = (group["kind"], group["lr"], group["weight_decay"])
        found |= dict.fromkeys(group["params"], settings)
    assert found[mlp.mix.weight] == ("adam", 0.002, 0.0)
    assert found[mlp.noise] == ("adam", 0.004, 0.0)
    assert found[mlp.fc.weight] == ("muon", 0.02, 0.1)
    _, lr, weight_decay = found[model.wte.weight]
    assert (1 - lr * weight_decay) ** 50 == pytest.approx(math.exp(-1.5))  # whatever the rate
    assert found.keys() == set(model.parameters())


def test_any_optimizer_resumes_exactly(data, tmp_path, monkeypatch):
    monkeypatch.setattr(model_module, "MLP", Gated)
    monkeypatch.setattr(
        train_gpt, "make_optimizer", lambda cfg, model: Counting(model.parameters())
    )
    flags = dict(data=data, max_steps=6, save_every=3, keep="all")
    run, rest = tmp_path / "run", tmp_path / "rest"
    tiny_run(run, **flags)
    tiny_run(rest, **flags, resume=run / "ckpt_3.pt")
    assert_same_run(rest, run, exact=True)
    assert final(rest)["optimizer_groups"][0]["done"] == 6
    factors = [min(1, 0.05 + 0.95 * (1 - step / 6) / 0.6) for step in range(6)]
    assert rows(run, "lr") == pytest.approx([1e-3 * x for x in factors])
    # The log's header
    n_params = sum(w.numel() for w in final(run)["model"].values())
    names = ", ".join(
        f"blocks.N.mlp.{name}" for name in ("mix.bias", "mix.weight", "noise", "scale")
    )
    assert (
        f"{n_params:,} parameters, of which {n_params - 2 * 32 * 128:,} are trained; "
        f"without a row in PARAM_TABLE: {names}\noptimizer: Counting, "
    ) in (run / "log.txt").read_text()


def test_weights_fit_another_context_and_bring_their_sizes(undisturbed, data, tmp_path):
    sizes = {"n_layer", "n_embd", "n_head", "ngram"}
    flags = {name: value for name, value in TINY.items() if name not in sizes}
    flags |= dict(data=data, seq_len=16, max_steps=1, init_from=undisturbed, out_dir=tmp_path)
    _, model = train(make_config(**flags), return_model=True)
    assert model.cfg.n_embd == 32 and model.cfg.seq_len == 16
    assert rows(tmp_path, "train_loss")[0] < rows(undisturbed, "train_loss")[0] - 0.5


# Wrong edits: the function, a line of it, what becomes of the line; the test that finds it, and
# words of its message
WRONG = {
    "targets rolled": (
        (train_gpt, "train_step", "batch[:, 1:].clone()", "batch[:, :-1].roll(-1, 1)"),
        ("test_what_is_learned", "targets that train_step gives GPT.forward are not the tokens"),
    ),
    "targets shifted again in training": (
        (
            GPT,
            "loss",
            "x.flatten(0, 1),\n        targets.flatten(),",
            "x[:, :-1].flatten(0, 1),\n        targets[:, 1:].flatten(),",
        ),
        ("test_what_is_learned", "at an offset of 2"),
    ),
    "a branch that is detached": (
        (model_module.Block, "forward", "self.mlp(h)", "self.mlp(h).detach()"),
        ("test_what_is_learned", r"blocks.0.(mlp|previous_in).* learns nothing"),
    ),
    "two zeros multiplied": (
        (model_module.MLP, "forward", "self.fc(x)", "self.fc(x) * self.proj.weight.sum()"),
        ("test_what_is_learned", r"blocks.0.(mlp|previous_in).* learns nothing"),
    ),
    "the mean over all positions": (
        (GPT, "token_loss", "softcap)", "softcap) * (targets >= 0).float().mean()"),
        ("test_trained_loss", "not over all positions"),
    ),
    "evaluation in training mode": (
        (train_gpt, "evaluate", "state.evaluating()", "contextlib.nullcontext(state.raw_model)"),
        ("test_evaluation_is_in_eval_mode", "evaluate calls a module in training mode"),
    ),
    "samples in training mode": (
        (train_gpt, "sample_text", "state.evaluating()", "contextlib.nullcontext(state.raw_model)"),
        ("test_evaluation_is_in_eval_mode", "sample_text calls a module in training mode"),
    ),
    "dropout left active": (
        (train_gpt.TrainState, "evaluating", "self.raw_model.eval()", "pass"),
        ("test_evaluation_is_in_eval_mode", "evaluate calls a module in training mode"),
    ),
    "training in eval mode": (
        (train_gpt.TrainState, "evaluating", "self.raw_model.train()", "pass"),
        ("test_evaluation_is_in_eval_mode", "evaluate leaves the model in eval mode"),
    ),
    "clipping what the optimizer does not get": (
        (train_gpt, "train_step", "norm_(params, cfg", "norm_(params[:1], cfg"),
        ("test_clipping", "gets gradients of norm"),
    ),
    "gradients divided by the number of micro-batches": (
        (train_gpt, "train_step", "scale(micro_loss)", "scale(micro_loss / len(xs))"),
        ("test_micro_batches", "weight each micro-batch"),
    ),
    "a head with the values of the embedding": (
        (GPT, "token_loss", "self.head(x)", "x @ self.wte.weight.T"),
        ("test_a_new_model_is_undecided", "its logits start too large"),
    ),
    "the mean of no targets": (
        (
            GPT,
            "forward",
            "return self.loss(x, targets)",
            "return self.loss(x, targets) + 0 * targets[targets >= 0].float().mean()",
        ),
        ("test_a_step_reports_the_mean", "divides by zero"),
    ),
    "weights in fp32": (
        (model_module.MLP, "forward", "self.fc(x)", "torch.mm(x[0], self.fc.weight.T)[None]"),
        ("test_a_step_in_bf16", "use model.Linear instead of nn.Linear"),
    ),
    "the same part for all ranks": (
        (train_gpt, "get_batch", "dist_ctx.rank, ", "0, "),
        ("test_batches", "not the parts of one rank's"),
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_edit_is_found(name, data, tmp_path, monkeypatch):
    (owner, function_name, old, new), (test_name, words) = WRONG[name]
    function, edited = getattr(owner, function_name), {}
    source = textwrap.dedent(inspect.getsource(function))
    assert source.count(old) == 1
    exec(source.replace(old, new), inspect.unwrap(function).__globals__, edited)
    monkeypatch.setattr(owner, function_name, edited[function_name])
    test_train.draws.cache_clear()
    test_train.bf16_fault.cache_clear()
    test = getattr(test_train, test_name)
    given = dict(data=data, tmp_path=tmp_path, monkeypatch=monkeypatch, micro_batch=4)
    with pytest.raises(AssertionError, match=words):
        test(**{key: given[key] for key in inspect.signature(test).parameters})
    test_train.draws.cache_clear()
    test_train.bf16_fault.cache_clear()


def test_flags_of_an_edit_are_tried(tmp_path):
    """In a repository of its own; the last line names fields that are not."""
    repo = tmp_path / "repo"
    repo.mkdir()
    for name in (*COPIED, "conftest.py", "test_train.py", "pyproject.toml", "docs"):
        if (ROOT / name).is_file():
            shutil.copy(ROOT / name, repo)
            continue
        ignored = shutil.ignore_patterns("python", "__pycache__")
        shutil.copytree(ROOT / name, repo / name, ignore=ignored)

    def output(*command) -> str:
        done = subprocess.run(command, cwd=repo, capture_output=True, text=True)
        return done.stdout + done.stderr

    author = ("-c", "user.name=test", "-c", "user.email=test@localhost")
    output("git", "init", "-q")
    output("git", "add", ".")
    output("git", *author, "commit", "-qm", "before the edit")
    output("git", "apply", "docs/edits/flag.diff")
    tests = "-m pytest -q test_train.py -k reach_the_model".split()
    said = output(sys.executable, *tests).splitlines()
    assert "1 passed" in said[-2] and said[-1].startswith("not tried: min_lr_frac, ")
    said = output(sys.executable, *tests, "--flags", "min_lr_frac=0.1").splitlines()
    assert "1 passed" in said[-1]
    said = output(sys.executable, *tests, "--flags", "min_lr=0.1")
    assert "unknown flag --min_lr=0.1; " in said
