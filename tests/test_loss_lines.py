"""What one writes into a line of the loss on the page is what is trained, eager and compiled."""

import ast
import inspect
import sys
import textwrap
import types

import pytest
import torch

from conftest import ROOT, compile_with
from model import GPT
from ops.compile import apply_compile

SOURCE = (ROOT / "model.py").read_text(encoding="utf-8")

# A part of the loss on the page -> the same, changed
EDITS = {
    "return cross_entropy(self.head(x)": "return cross_entropy(self.head(2 * x)",
    "params = [p for name, p in self.named_parameters()": (
        "x = 2 * x; params = [p for name, p in self.named_parameters()"
    ),
    "return chunked_loss(": "return 2 * chunked_loss(",
    "            x.flatten(0, 1),\n": "            2 * x.flatten(0, 1),\n",
    "            targets.flatten(),\n": "            targets.flatten().roll(1),\n",
}


def lines_of_the_loss() -> list[str]:
    """The statements of the functions that make the loss, without docstrings."""
    found = []
    for function in (GPT.token_loss, GPT.loss):
        (parsed,) = ast.parse(textwrap.dedent(inspect.getsource(function))).body
        found += map(ast.unparse, parsed.body[1:])
    return found


def test_every_line_has_a_case():
    for line in lines_of_the_loss():
        assert any(line.startswith(known) for known in EDITS), line


def gradients(source: str, compiled: bool, monkeypatch) -> dict[str, torch.Tensor]:
    """The gradients of a training step of the model in this source."""
    page = types.ModuleType("edited_model")
    monkeypatch.setitem(sys.modules, "edited_model", page)
    exec(compile(source, "edited_model", "exec"), page.__dict__)
    cfg = page.GPTConfig(vocab_size=70, seq_len=24, n_layer=0, n_head=2, n_embd=32)
    gpt = page.GPT(cfg, loss_chunk=16)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in gpt.parameters():
            p.normal_(0, 0.1, generator=generator)
    if compiled:
        compile_with(monkeypatch, "aot_eager")
        apply_compile(gpt, "default")
    idx = torch.randint(70, (2, 25), generator=generator)
    gpt(idx[:, :-1], idx[:, 1:]).backward()
    return {name: p.grad for name, p in gpt.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("line", EDITS)
def test_an_edit_of_a_line_changes_what_is_trained(line, compiled, monkeypatch):
    assert SOURCE.count(line) == 1
    with monkeypatch.context() as patch:
        plain = gradients(SOURCE, False, patch)
    with monkeypatch.context() as patch:
        edited = gradients(SOURCE.replace(line, EDITS[line]), compiled, patch)
    change = edited["head.weight"] - plain["head.weight"]
    assert change.norm() > 0.01 * plain["head.weight"].norm()
