"""How Muon's work is divided: by stacks of one shape over all groups, among ranks, beside the exchange."""

import itertools
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import model
import ops.exchange
from conftest import random_gpt, run_ranks
from model import GPT, PARAM_TABLE, GPTConfig, Optimizer, newton_schulz, normalize_rows, optimizer_groups
from runtime.ranks import exit_process

MLP_PROJ = PARAM_TABLE["proj"]._replace(pattern=r"blocks\.\d+\.mlp\.proj\.weight", lr_mul=2.0)
ATTN_PROJ = PARAM_TABLE["proj"]._replace(
    pattern=r"blocks\.\d+\.attn\.proj\.weight", lr_mul=0.5, betas=(0.7, 0.0), wd_mul=3.0
)
CASES = {  # rows of PARAM_TABLE that a user changed, the shape of the model, and what is stacked in weights
    "as it is": ({}, {}, {}),
    "another row": (dict(proj=MLP_PROJ, attn_proj=ATTN_PROJ), {}, {}),
    "other splits": (dict(proj=MLP_PROJ, attn_proj=ATTN_PROJ), {}, {"attn.proj": (16, 16), "attn.qkv": (32, 48, 16)}),
    "more ranks than matrices": ({}, dict(n_layer=1), {"attn.qkv": (96,)}),
}


def stepped(case: str, fused: bool = True, plain: bool = False) -> dict[str, torch.Tensor]:
    """Weights and momenta of Muon's matrices after four steps, of which the third is skipped."""
    changed, shape, stacked = CASES[case]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model, "PARAM_TABLE", PARAM_TABLE | changed)
        gpt, generator = random_gpt(**shape), torch.Generator().manual_seed(0)
        for (place, split), block in itertools.product(stacked.items(), gpt.blocks):
            block.get_submodule(place).split = split
        optimizer = Optimizer(optimizer_groups(gpt, "muon", 0.02, 0.004, 0.1))
    optimizer.fused = fused
    for step in range(4):
        for p in gpt.parameters():
            p.grad = torch.randn(p.shape, generator=generator)
        for group in optimizer.param_groups:
            group["momentum"] = group["betas"][0] - 0.1 / (step + 1)
        if not plain:
            optimizer.step(torch.tensor(step == 2))
        elif step != 2:
            plain_muon(optimizer)
    muon = {name: p for g in optimizer.param_groups if g["kind"] == "muon" for name, p in zip(g["names"], g["params"])}
    momenta = {f"{name}, momentum": optimizer.state[p]["momentum"] for name, p in muon.items()}
    return {name: p.detach() for name, p in muon.items()} | momenta


@torch.no_grad()
def plain_muon(optimizer: Optimizer) -> None:
    """Muon one matrix after the other, from its description."""
    for group in (group for group in optimizer.param_groups if group["kind"] == "muon"):
        beta, lr = group["momentum"], group["lr"]
        for p in group["params"]:
            momentum = optimizer.state[p]["momentum"]
            momentum.mul_(beta).add_(p.grad, alpha=1 - beta)
            update = p.grad * (1 - beta) + momentum * beta
            for w, x in zip(p.split(group["split"] or len(p)), update.split(group["split"] or len(p))):
                scale = max(1, len(w) / w.size(1)) ** 0.5
                w.mul_(1 - lr * group["weight_decay"]).sub_(normalize_rows(newton_schulz(x[None]))[0], alpha=lr * scale)


def assert_close(ours: dict, theirs: dict) -> None:
    assert ours.keys() == theirs.keys()
    for name, t in ours.items():
        torch.testing.assert_close(t, theirs[name], rtol=1e-5, atol=1e-5, msg=lambda said, name=name: f"{name}: {said}")


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("case", CASES)
def test_muon_is_a_plain_loop_over_matrices(case, fused):
    assert_close(stepped(case, fused), stepped(case, plain=True))


# ---------------------------------------------------------------------------------------------------------------------
# Several ranks


@pytest.fixture(scope="module")
def ranks_weights(tmp_path_factory) -> list[dict]:
    """What each of two ranks had in the end, for each case, with stacks of all matrices and of few."""
    folder = tmp_path_factory.mktemp("muon")
    done = run_ranks(folder, __file__, folder)
    assert done.codes == [0, 0], done.stderr
    return [torch.load(folder / f"{rank}.pt") for rank in range(2)]


def rank_main(folder: Path) -> None:
    dist.init_process_group("gloo")
    weights = {}
    for stacked in (model.MAX_STACK_NUMEL, 3 * 32 * 32):
        model.MAX_STACK_NUMEL = stacked
        weights |= {(case, stacked): stepped(case) for case in CASES}
    torch.save(weights, folder / f"{dist.get_rank()}.pt")
    dist.barrier()
    exit_process(0)


def test_two_ranks_are_one(ranks_weights):
    first, second = ranks_weights
    assert len(first) == 2 * len(CASES)
    for (case, stacked), weights in first.items():
        assert all(torch.equal(t, second[case, stacked][name]) for name, t in weights.items()), case
        assert_close(weights, stepped(case))


@pytest.fixture
def be_rank(monkeypatch):
    """A function that makes this process a rank of so many, whose collectives do nothing."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    def be(rank: int, world_size: int) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)

    yield be
    dist.destroy_process_group()


def test_eight_ranks_share_the_matrices_of_gpt2_small_evenly(be_rank, monkeypatch):
    shapes, work = [], lambda x: shapes.append(tuple(x.shape)) or x
    monkeypatch.setattr(model, "newton_schulz", work)
    monkeypatch.setattr(model, "normalize_rows", lambda x: x)
    for kernel in ("sgd", "adamw"):
        monkeypatch.setattr(model, kernel, lambda *args, **kwargs: None)
    with torch.device("meta"):
        gpt = GPT(GPTConfig())
        optimizer = Optimizer(optimizer_groups(gpt, "muon", 0.02, 0.004, 0.1))
    for p in gpt.parameters():
        p.grad = torch.empty_like(p)
    for rank in range(8):
        be_rank(rank, 8)
        optimizer.step()
        assert [x[0] for x in shapes] == [6, 3] and shapes[0][1:] == (768, 768) and {*shapes[1][1:]} == {768, 3072}
        shapes.clear()


def test_a_stack_travels_while_the_next_is_orthogonalized(be_rank, monkeypatch):
    be_rank(0, 4)
    events = []

    class Travel:
        def wait(self):
            events.append("arrived")

    def note(name, function, room=model):
        monkeypatch.setattr(room, name, lambda *args, **kwargs: events.append(name) or function(*args, **kwargs))

    note("newton_schulz", newton_schulz)
    note("start_gather", lambda parts, group: Travel(), ops.exchange)
    note("adamw", model.adamw)
    monkeypatch.setattr(model, "MAX_STACK_NUMEL", 32 * 32)
    stepped("as it is")
    step = events[: len(events) // 4]
    travelling = [step[:i].count("start_gather") - step[:i].count("arrived") for i in range(len(step) + 1)]
    assert max(travelling) == 2 and travelling[-1] == 0 and step.count("start_gather") == 3 + 2
    works = [i for i, event in enumerate(step) if event == "newton_schulz"]
    assert [travelling[i] for i in works] == [0] + [1] * (len(works) - 1)
    assert [travelling[i] for i, event in enumerate(step) if event == "adamw"] == [1] * step.count("adamw") != []


if __name__ == "__main__":
    rank_main(Path(sys.argv[1]))
