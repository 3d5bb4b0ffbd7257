"""Each worked edit in docs/edits, in a copy: compared with plain PyTorch, resumed, sampled."""

import contextlib
import copy
import functools
import io
import itertools
import math
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from common.values import derive_seed
from conftest import ROOT, TINY, make_data, rows, run_ranks
from test_train import difference
from tests import edit_cases as plain
from tests.edit_cases import Case, Plain, pages

COPIED = "common train_gpt.py model.py ops inference sample.py export.py data runtime".split()
FLAGS = TINY | dict(
    micro_batch=16, loss_chunk=0, ngram=3, ngram_rows=512, max_steps=4, save_every=2, keep="all"
)
NEWLINE, EOT = 10, 256
BASE = "base/ckpt_4.pt"


EDITS = sorted((ROOT / "docs" / "edits").glob("*.diff"))


def rates(form):
    """A check that the rate decays as form(x), x from 1 to 0 in the last 60 % of 4 steps."""
    expected = [0.02 * form(min(1, (1 - step / 4) / 0.6)) for step in range(4)]
    return lambda run: np.allclose(rows(run.folder, "lr"), expected)


def answers(x, y):
    """Targets y (B, T), -1 where no answer is."""
    y = y.clone()
    for i, row in enumerate(x.tolist()):
        in_answer = False
        for t, token in enumerate(row):
            in_answer = token == NEWLINE or in_answer and token != EOT
            y[i, t] = y[i, t] if in_answer else -1
    return y


def only_answers_count(run) -> bool:
    """Also in evaluation."""
    x, y = run.batch[:, :-1], answers(run.batch[:, :-1], run.batch[:, 1:])
    model_cfg, cfg = run.state.raw_model.cfg, run.state.cfg
    stream = run.ours.train_gpt.TokenStream(cfg.data, cfg.seq_len, cfg.seed)
    (x_val, y_val), *_ = (map(torch.from_numpy, b) for b in stream.eval_batches(2048, 99))
    evaluated = Plain(run.checkpoint["model"], model_cfg).loss(x_val, answers(x_val, y_val))
    same = math.isclose(rows(run.folder, "val_loss")[-1], evaluated, rel_tol=2e-6)
    trained_on = Plain(run.weights, model_cfg).loss(x, y)
    same &= math.isclose(rows(run.folder, "train_loss")[0], trained_on, rel_tol=2e-6)
    n_answers = (answers(x_val, y_val) >= 0).sum().item()
    n_bytes = ((answers(x_val, y_val) >= 0) & (y_val != EOT)).sum().item()
    bits = evaluated / math.log(2) * n_answers / n_bytes
    same &= math.isclose(rows(run.folder, "val_bpb")[-1], bits, rel_tol=2e-6)
    return same and 0.1 < (y >= 0).any(1).float().mean() < 0.9


def sources_are_mixed(run) -> bool:
    """70 of 100 sequences are those of the first folder's stream, in its order; for any ranks.

    The others are those of the second.
    """
    state, stream_of = run.state, run.ours.train_gpt.TokenStream
    a, b = (part.rsplit(":", 1)[0] for part in state.cfg.data.split(","))
    mixed = sys.modules["data.stream"].MixedStream(state.cfg.data, 32)
    mixed.set_batch_tokens(32 * 20)
    parts = []
    for folder, n in ((a, 70), (b, 30)):
        stream = stream_of(folder, 32)
        stream.set_batch_tokens(32 * n)
        parts.append(stream.batch(0).tolist())
    drawn = [row for step in range(5) for row in mixed.batch(step).tolist()]
    for part in parts:
        assert [row for row in drawn if row in part] == part
    ranks = [mixed.batch(3, rank, 4) for rank in range(4)]
    return np.array_equal(np.concatenate(ranks), mixed.batch(3)) and len(drawn) == 100


def half_the_keys_are_cached(run) -> bool:
    cache = run.ours.generation.KVCache(run.sampled, 1)
    run.sampled.backbone(torch.arange(5)[None], cache)
    matrix_rows = {group.get("matrix_rows") for group in run.state.optimizer.param_groups}
    return cache.layers[0].k.shape[1] == 1 and (32, 16, 16) in matrix_rows


def experts_are_orthogonalized_apart(run) -> bool:
    return (32,) * 4 in {group.get("matrix_rows") for group in run.state.optimizer.param_groups}


def texts_are_longer_than_the_context(run) -> bool:
    prompts = torch.arange(9)[None]
    steps = run.ours.sample.generate(run.sampled, prompts, n_tokens=60, vocab_size=257)
    return len(list(steps)) == 60


def assert_steps(run, shape: tuple, update, **group):
    """Steps of an edited optimizer change a matrix as this function of its gradients says."""
    torch.manual_seed(0)
    p = torch.nn.Parameter(torch.randn(shape))
    w, settings = p.detach().clone(), dict(params=[p], lr=0.1, weight_decay=0.2)
    optimizer = run.ours.model.Optimizer([settings | group])
    for _ in range(3):
        p.grad = torch.randn(shape)
        optimizer.step()
        w = 0.98 * w - 0.1 * update(p.grad)
    torch.testing.assert_close(p.detach(), w, rtol=1e-4, atol=1e-5)


def lion_is_lion(run) -> bool:
    """Chen et al. 2023, algorithm 2."""
    m = torch.zeros(4, 3)

    def update(grad):
        changed = (0.9 * m + 0.1 * grad).sign()
        m.lerp_(grad, 0.01)
        return changed

    assert_steps(run, (4, 3), update, kind="lion", betas=(0.9, 0.99))
    return run.checkpoint["optimizer"]["head.weight"].keys() == {"momentum"}


def rows_are_evened(run) -> bool:
    """As Li et al. 2025, but v begins at what is expected; for a matrix and its transpose."""
    for shape in ((4, 6), (6, 4)):
        v, scale = torch.full(shape[:1], 1 / shape[1]), max(1.0, shape[0] / shape[1]) ** 0.5

        def update(grad, v=v, scale=scale):
            found = scale * run.ours.model.newton_schulz(grad[None])[0]
            v.lerp_(found.square().mean(1), 0.05)
            return found / (found.size(1) * v[:, None]).sqrt()

        assert_steps(run, shape, update, kind="muon", momentum=0.0, matrix_rows=shape[:1])
    return run.checkpoint["optimizer"]["blocks.0.mlp.fc.weight"]["row_square"].shape == (128, 1)


def layers_have_their_rates(run) -> bool:
    rates = {}
    for group in run.state.optimizer.param_groups:
        rates |= dict.fromkeys(group["params"], group["initial_lr"])
    first, second = ([*block.parameters()] for block in run.state.raw_model.blocks)
    return all(math.isclose(rates[b], 0.9 * rates[a]) for a, b in zip(first, second))


def average_is_what_is_evaluated(run) -> bool:
    expected = run.after[0]
    for weights in run.after:
        expected = {name: 0.9 * w + 0.1 * weights[name] for name, w in expected.items()}
    found = dict(run.sampled.named_parameters())
    return all(torch.allclose(found[name], w, atol=1e-6) for name, w in expected.items())


def embedding_stays(run) -> bool:
    weights, state = run.checkpoint["model"], run.checkpoint["optimizer"]
    kept = torch.equal(weights["wte.weight"], run.weights["wte.weight"])
    return kept and not state.get("wte.weight") and "head.weight" in state


def what_fits_is_loaded(run) -> bool:
    base = torch.load(BASE, weights_only=True)["model"]
    loaded = all(torch.equal(run.weights[name], w) for name, w in base.items())
    return (
        loaded
        and "not loaded: " in run.said
        and run.said.count("blocks.2.") == 7
        and "blocks.1." not in run.said
    )


def base_stays(run) -> bool:
    base, now = torch.load(BASE, weights_only=True)["model"], run.checkpoint["model"]
    moved = [
        name for name in now if "lora" in name and not torch.equal(now[name], run.weights[name])
    ]
    kept = [name for name in base if torch.equal(base[name], now[name])]
    return len(moved) == 22 and len(kept) == len(base)  # two layers of five matrices, and the head


def figure_is_logged(run) -> bool:
    norms = [weights["head.weight"].norm().item() for weights in run.after]
    return np.allclose(rows(run.folder, "head_norm")[:4], norms) and "| head_norm " in run.said


def student_is_taught(run) -> bool:
    """The first half's weights are the teacher; the second half begins anew."""
    cfg, teacher, student = run.state.cfg, run.checkpoint["extra"]["teacher"], run.sampled
    noise(student, derive_seed(cfg.seed, "student"))
    stream = run.ours.train_gpt.TokenStream(cfg.data, cfg.seq_len, cfg.seed)
    stream.set_batch_tokens(cfg.batch_tokens)
    batch = torch.from_numpy(stream.batch(2))
    x, y = batch[:, :-1], batch[:, 1:].clone()
    probs = Plain(teacher, student.cfg).logits(x).softmax(-1)

    def plain_loss():
        ours = Plain(dict(student.state_dict()), student.cfg)
        soft = -(probs * ours.logits(x).log_softmax(-1)).sum(-1)
        return (ours.loss(x, y) + soft[y >= 0].mean()) / 2

    same = math.isclose(rows(run.folder, "train_loss")[2], plain_loss(), rel_tol=1e-5)
    y[:, ::5] = y[1] = -1
    same &= torch.allclose(student(x, y, probs), plain_loss(), rtol=1e-5)
    same &= rows(run.folder, "lr") == 2 * rows(run.folder, "lr")[:2]
    return same and all(torch.equal(w, run.after[1][name]) for name, w in teacher.items())


CASES = {
    "flag": Case(flags=dict(min_lr_frac=0.5), holds=rates(lambda x: 0.5 + 0.5 * x)),
    "learning-rate-schedule": Case(holds=rates(lambda x: 0.5 - 0.5 * math.cos(math.pi * x))),
    "parameter": Case(plain.Scaled),
    "swiglu": Case(plain.SwiGLU),
    "layers-left-out": Case(plain.LayersLeftOut, flags=dict(n_layer=4)),
    "buffer": Case(plain.MeanSubtracted),
    "label-smoothing": Case(plain.Smoothed),
    "loss-term": Case(plain.ZLoss),
    "weights-of-tokens": Case(plain.Weighted),
    "loss-on-answers-alone": Case(holds=only_answers_count),
    "auxiliary-head": Case(plain.SecondHead),
    "contrastive-term": Case(plain.Contrastive),
    "student-of-the-model": Case(holds=student_is_taught),
    "mixture-of-experts": Case(plain.Experts, holds=experts_are_orthogonalized_apart),
    "tied-embeddings": Case(plain.Tied),
    "grouped-queries": Case(plain.Grouped, holds=half_the_keys_are_cached),
    "alibi": Case(plain.Alibi),
    "learned-positions": Case(plain.Positions, holds=texts_are_longer_than_the_context),
    "another-optimizer": Case(holds=lion_is_lion),
    "normuon": Case(holds=rows_are_evened),
    "learning-rate-by-layer": Case(holds=layers_have_their_rates),
    "average-of-the-weights": Case(holds=average_is_what_is_evaluated),
    "frozen-parameters": Case(holds=embedding_stays),
    "part-of-a-checkpoint": Case(flags=dict(n_layer=3, init_from=BASE), holds=what_fits_is_loaded),
    "fine-tuning-by-lora": Case(plain.LowRank, flags=dict(init_from=BASE), holds=base_stays),
    "mixture-of-sources": Case(flags=dict(data="data:0.7,other:0.3"), holds=sources_are_mixed),
    "metric": Case(holds=figure_is_logged),
}
# The others: 10
MOST_LINES = {
    "student-of-the-model": 20,
    "grouped-queries": 13,
    "loss-on-answers-alone": 13,
    "mixture-of-sources": 35,
}
# Of the run that is compared, 4 for the others: answers are in some micro-batches only
MICRO_BATCH = {"loss-on-answers-alone": 1}
RANKS = (
    "layers-left-out",
    "buffer",
    "mixture-of-experts",
    "tied-embeddings",
    "normuon",
    "average-of-the-weights",
)


@torch.no_grad()
def noise(model, seed: int) -> None:
    """Weights that are random everywhere: zeros would hide gradients."""
    for name, p in model.named_parameters():
        generator = torch.Generator().manual_seed(derive_seed(seed, name) >> 1)
        p.copy_(0.1 * torch.randn(p.shape, generator=generator))


def edited(name: str, repo: Path) -> Path:
    """A copy of the sources with a worked edit."""
    ignored = shutil.ignore_patterns("python", "__pycache__", "*.bin")
    repo.mkdir()
    for source in COPIED:
        copy = shutil.copy
        if (ROOT / source).is_dir():
            copy = functools.partial(shutil.copytree, ignore=ignored)
        copy(ROOT / source, repo / source)
    needs = {"fine-tuning-by-lora": ["part-of-a-checkpoint"]}
    for edit in (*needs.get(name, []), name):
        path = ROOT / "docs" / "edits" / f"{edit}.diff"
        command = ["git", "apply", "--whitespace=nowarn", path]
        done = subprocess.run(command, cwd=repo, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    return repo


def trained(ours, folder: Path, case: Case | None = None, **flags) -> SimpleNamespace:
    """A run of an edited page; with a case, its first step is compared with plain PyTorch."""
    run = SimpleNamespace(ours=ours, folder=folder, after=[])
    page, step = ours.train_gpt, ours.train_gpt.train_step

    def train_step(state, batch, progress):
        if state.step == 0:
            run.weights, run.batch = copy.deepcopy(state.raw_model.state_dict()), batch
            if case:
                assert_plain(case, state, batch)
        result, run.state = step(state, batch, progress), state
        run.after.append(copy.deepcopy(dict(state.raw_model.named_parameters())))
        return result

    page.sample_text, page.train_step = (lambda *_: ""), train_step
    page.init_weights = ours.model.init_weights = noise
    with contextlib.redirect_stdout(io.StringIO()) as said:
        page.train(page.make_config(**FLAGS | flags, out_dir=str(folder)))
    page.train_step = step
    run.said = said.getvalue()
    return run


def figures(run) -> np.ndarray:
    """Losses and gradient norms, float64 (2, steps)."""
    return np.array([rows(run.folder, "train_loss"), rows(run.folder, "grad_norm")])


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A folder with data, and a run of the unedited page."""
    folder = tmp_path_factory.mktemp("edits")
    make_data(folder / "data")
    make_data(folder / "other", seed=1)
    with pages(ROOT) as ours:
        trained(ours, folder / "base", data=str(folder / "data"))
    return folder


def gradients(named: dict) -> dict[str, torch.Tensor]:
    kept = {name: w.grad for name, w in named.items() if w.grad is not None}
    return {f"gradient of {name}": grad for name, grad in kept.items()}


def assert_plain(case: Case, state, batch) -> None:
    """The loss and its gradients are those of plain PyTorch, in chunks too.

    Some targets are -1, and all of one chunk.
    """
    model, x, y = state.raw_model, batch[:3, :-1], batch[:3, 1:].clone()
    y[:, ::5] = y[1] = -1
    model.step_seed = 14  # every other layer is left out
    weights = copy.deepcopy(model.state_dict(keep_vars=True))
    torch.manual_seed(1)
    theirs = case.plain(weights, model.cfg, True, model.step_seed).loss(x, y)
    theirs.backward()
    trained_names = dict(model.named_parameters())
    wants = gradients({name: weights[name] for name in trained_names}) | dict(loss=theirs)
    for model.loss_chunk in (16, 0):
        torch.manual_seed(1)
        ours = model(x, y)
        ours.backward()
        found = gradients(dict(model.named_parameters())) | dict(loss=ours)
        assert not difference(found, wants, rtol=2e-6)
        model.load_state_dict(weights)  # buffers that the pass has written
        model.zero_grad()


@torch.no_grad()
def assert_samples(case: Case, run, path: Path) -> None:
    """The model that sample.py loads gives plain PyTorch's logits, with and without a KV cache."""
    run.sampled, _ = run.ours.sample.load(path, "cpu", "fp32")
    idx = torch.randint(0, 257, (2, 20), generator=torch.Generator().manual_seed(3))
    want = case.plain(dict(run.sampled.state_dict()), run.sampled.cfg, False).logits(idx)
    torch.testing.assert_close(run.sampled(idx), want, rtol=0, atol=1e-5)
    assert run.ours.generation.cache_is_exact(run.sampled)


@pytest.mark.parametrize("name", CASES)
def test_a_worked_edit_is_right(name, base, tmp_path, monkeypatch):
    monkeypatch.chdir(base)
    case, flags = CASES[name], dict(data="data") | CASES[name].flags
    with pages(edited(name, tmp_path / "repo")) as ours:
        run = trained(ours, tmp_path / "run", case, **flags)
        path = tmp_path / "run" / "ckpt_4.pt"
        run.checkpoint = torch.load(path, weights_only=True)
        assert_samples(case, run, path)
        resume = flags | dict(init_from="", resume=str(tmp_path / "run" / "ckpt_2.pt"))
        rest = trained(ours, tmp_path / "rest", **resume)
        assert np.array_equal(figures(rest), figures(run)[:, 2:])
        other = torch.load(rest.folder / "ckpt_4.pt", weights_only=True)
        for part in ("model", "optimizer", "extra"):
            torch.testing.assert_close(other[part], run.checkpoint[part], rtol=0, atol=0)
        layout = dict(micro_batch=MICRO_BATCH.get(name, 4), loss_chunk=100, checkpointing="full")
        again = trained(ours, tmp_path / "again", **flags, **layout)
        np.testing.assert_allclose(figures(again), figures(run), rtol=2e-5)
        assert case.holds is None or case.holds(run)


def test_every_worked_edit_has_a_case_and_is_small():
    assert {path.stem for path in EDITS} == CASES.keys()
    text = (ROOT / "docs" / "edits.md").read_text()
    assert f"\n{len(EDITS)} edits" in text
    for path in EDITS:
        assert text.count(f"(edits/{path.name})") == 1
        lines = path.read_text().splitlines()
        added = [line for line in lines if re.match(r"\+(?!\+)", line)]
        assert len(added) <= MOST_LINES.get(path.stem, 10), path.name
        assert max(map(len, added)) <= 1 + 100, path.name


def test_two_ranks_train_worked_edits_as_one(base, tmp_path):
    alone = {}
    for name in RANKS:
        flags = CASES[name].flags | dict(data=str(base / "data"), micro_batch=8)
        with pages(edited(name, tmp_path / name)) as ours:
            alone[name] = figures(trained(ours, tmp_path / "alone" / name, **flags))
    (tmp_path / "data").symlink_to(base / "data")
    done = run_ranks(tmp_path, __file__, tmp_path)
    assert done.codes == [0, 0], [text[-3000:] for text in done.stderr]
    for parallel, name in itertools.product(("ddp", "fsdp"), RANKS):
        found = SimpleNamespace(folder=tmp_path / parallel / name)
        np.testing.assert_allclose(figures(found), alone[name], rtol=2e-5, err_msg=name)


def main(folder: Path) -> None:
    for name in RANKS:
        with pages(folder / name) as ours:
            for parallel in ("ddp", "fsdp"):
                flags = CASES[name].flags | dict(
                    data=str(folder / "data"), micro_batch=4, parallel=parallel
                )
                trained(ours, folder / parallel / name, **flags)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
