"""What is left when a run ends, however it ends, and what the next start makes of it."""

import collections
import math

import numpy as np
import pytest
import torch

import train_gpt
from common.errors import RunError, UserError
from conftest import TINY, final, rows, tiny_run
from runtime import checkpoint as checkpoint_module
from runtime.checkpoint import read_checkpoint, whole_tensors
from train_gpt import make_config, train


def names(folder) -> list[str]:
    return sorted(path.name for path in folder.glob("*ckpt*"))


def with_losses(monkeypatch, losses) -> None:
    """Evaluations find these losses, one after the other."""
    losses = iter(losses)
    monkeypatch.setattr(train_gpt, "evaluate", lambda *_: (next(losses), math.nan))


# --------------------------------------------------------------------------------------------------
# Checkpoints


def test_a_complete_run_leaves_one_checkpoint(data, tmp_path):
    folder = tmp_path / "run"
    tiny_run(folder, data=data, save_every=2, max_steps=6, eval_every=3)
    assert names(folder) == ["ckpt_6.pt", "ckpt_best.pt"]
    assert (folder / "ckpt_6.pt").samefile(folder / "ckpt_best.pt")
    tiny_run(tmp_path / "kept", data=data, save_every=2, max_steps=6, keep=2)
    assert names(tmp_path / "kept") == ["ckpt_4.pt", "ckpt_6.pt", "ckpt_best.pt"]


def test_the_best_weights_are_a_link_that_nothing_writes_through(data, tmp_path, monkeypatch):
    with_losses(monkeypatch, [3.0, 2.9, 2.8])
    folder = tmp_path / "run"
    flags = dict(data=data, save_every=2, eval_every=2, keep="all")
    tiny_run(folder, **flags, max_steps=4)
    # Then a file of its own
    monkeypatch.setattr(checkpoint_module, "link_as_best", lambda run: False)
    tiny_run(folder, **flags, max_steps=6, resume="newest")
    for step in (2, 4, 6):
        assert read_checkpoint(folder / f"ckpt_{step}.pt")["step"] == step
    assert read_checkpoint(folder / "ckpt_best.pt")["step"] == 6
    assert not list(folder.glob(".tmp*"))


def test_best_weights_that_a_kill_prevented_are_made_up_for(data, tmp_path, monkeypatch):
    folder = tmp_path / "run"
    flags = dict(data=data, save_every=2, eval_every=2, max_steps=4)
    with_losses(monkeypatch, [3.0, 2.0, 2.0])

    def die(run, val_loss):
        if val_loss == 2.0:
            raise ZeroDivisionError

    with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):
        patch.setattr("runtime.run.save_best_weights", die)
        tiny_run(folder, **flags)
    assert rows(folder, "val_loss") == [3.0] and "ckpt_best.pt" not in names(folder)
    assert tiny_run(folder, **flags, resume="newest")["val_loss"] == 2.0
    assert rows(folder, "val_loss") == [3.0, 2.0]
    assert read_checkpoint(folder / "ckpt_best.pt")["step"] == 4


def test_weights_that_are_not_finite_are_not_saved(data, tmp_path, monkeypatch):
    def spoil(state, loss):
        with torch.no_grad():
            state.raw_model.head.weight[0] = math.inf if state.step == 3 else 0

    flags = TINY | dict(data=str(data), max_steps=3, save_every=1, out_dir=str(tmp_path / "run"))
    with pytest.raises(RunError, match="ckpt_3.pt is not saved, because weights are not finite"):
        train(make_config(**flags), on_step=spoil)
    assert final(tmp_path / "run")["step"] == 2


# --------------------------------------------------------------------------------------------------
# Figures


def test_a_loss_that_is_not_a_number_ends_nothing(data, tmp_path, monkeypatch):
    with_losses(monkeypatch, [math.nan, 2.0, 1.0, math.nan, math.nan, math.nan])
    flags = dict(data=data, eval_every=2, max_steps=12)
    assert tiny_run(tmp_path / "a", **flags, target_val_loss=1.5)["stopped_by"] == "target_val_loss"
    # In a resumed run as well; its row is not repeated
    assert tiny_run(tmp_path / "b", **flags | dict(max_steps=2))["val_loss"] is None
    assert tiny_run(tmp_path / "b", **flags | dict(max_steps=4), resume="newest")["step"] == 4
    assert rows(tmp_path / "b", "val_loss") == [None, None]


# --------------------------------------------------------------------------------------------------
# Settings of the process


@pytest.mark.parametrize("setting", ["float64", "device", "no_grad", "autocast"])
def test_settings_of_the_calling_program_are_refused(setting, data, tmp_path):
    contexts = dict(
        device=torch.device("meta"), no_grad=torch.no_grad(), autocast=torch.autocast("cpu")
    )
    try:
        if setting == "float64":
            torch.set_default_dtype(torch.float64)
        with contexts.get(setting, torch.enable_grad()), pytest.raises(UserError, match="undo it"):
            tiny_run(tmp_path / "run", data=data)
    finally:
        torch.set_default_dtype(torch.float32)


def test_skipped_last_steps_and_numpy_numbers_are_saved(data, tmp_path, monkeypatch):
    step = train_gpt.train_step

    def last_is_skipped(state, batch, progress):
        loss, grad_norm = step(state, batch, progress)
        state.optimizer.param_groups[0]["betas_of_mine"] = np.float64(0.5)
        state.extra["mine"] = np.float32(2)
        return loss, 0.0 if state.step == 4 else grad_norm

    monkeypatch.setattr(train_gpt, "train_step", last_is_skipped)
    tiny_run(tmp_path / "run", data=data, max_steps=4)
    saved = read_checkpoint(tmp_path / "run" / "ckpt_4.pt")
    # What could be saved and not loaded is refused
    for value in (collections.deque([1]), {np.int64(3): 1.0}, collections.defaultdict(int)):
        with pytest.raises(UserError, match=r"extra\['a'\] is a (deque|dict|defaultdict);"):
            whole_tensors(dict(a=value), "state.extra")
    assert (saved["extra"], saved["optimizer_groups"][0]["betas_of_mine"]) == ({"mine": 2.0}, 0.5)
