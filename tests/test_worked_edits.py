"""Each worked edit of docs/edits.md, in a copy: compared with plain PyTorch, resumed, sampled."""

import contextlib
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
from data.shards import write_shard
from tests import edit_cases as plain
from tests.edit_cases import Case, Plain, pages

COPIED = "common train_gpt.py model.py ops inference sample.py export.py data runtime".split()
FLAGS = TINY | dict(
    micro_batch=16, loss_chunk=0, ngram=3, ngram_rows=512, max_steps=4, save_every=2, keep=0
)
EQUALS, EOT = 61, 256


def worked_edits() -> dict[str, str]:
    """Title -> diff, of every diff in docs/edits.md."""
    text = (ROOT / "docs" / "edits.md").read_text(encoding="utf-8")
    return dict(re.findall(r"^## ([^\n]+)\n(?:(?!^## ).)*?^```diff\n(.*?)^```", text, re.M | re.S))


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
            in_answer = token == EQUALS or in_answer and token != EOT
            y[i, t] = y[i, t] if in_answer else -1
    return y


def only_answers_count(run) -> bool:
    """Also in evaluation."""
    x, y = run.batch[:, :-1], answers(run.batch[:, :-1], run.batch[:, 1:])
    want, cfg = Plain(run.weights, run.state.raw_model.cfg).loss(x, y).item(), run.state.cfg
    stream = run.ours.train_gpt.TokenStream(cfg.data, cfg.seq_len, cfg.batch_tokens, cfg.seed)
    batches = [map(torch.from_numpy, batch) for batch in stream.eval_batches(cfg.eval_tokens, 8)]
    x_val, y_val = (torch.cat(parts) for parts in zip(*batches))
    plain = Plain(run.checkpoint["model"], run.state.raw_model.cfg)
    evaluated = plain.loss(x_val, torch.where(y_val < 0, y_val, answers(x_val, y_val))).item()
    same = math.isclose(rows(run.folder, "train_loss")[0], want, rel_tol=2e-6)
    same &= math.isclose(rows(run.folder, "val_loss")[-1], evaluated, rel_tol=2e-6)
    same &= not any(rows(run.folder, "val_bpb"))  # the answers' bytes are not counted
    some = (y >= 0).any(1)
    return same and 0.1 < some.float().mean() < 0.9


def sources_are_mixed(run) -> bool:
    """70 of 100 sequences are those of the first folder's stream, in its order; for any ranks.

    The others are those of the second.
    """
    state, stream_of = run.state, run.ours.train_gpt.TokenStream
    a, b = (part.rsplit(":", 1)[0] for part in state.cfg.data.split(","))
    mixed = sys.modules["data.stream"].MixedStream(state.cfg.data, 32, 32 * 20)
    parts = [stream_of(folder, 32, 32 * n).batch(0).tolist() for folder, n in ((a, 70), (b, 30))]
    drawn = [row for step in range(5) for row in mixed.batch(step).tolist()]
    for part in parts:
        assert [row for row in drawn if row in part] == part
    ranks = [mixed.batch(3, rank, 4) for rank in range(4)]
    return np.array_equal(np.concatenate(ranks), mixed.batch(3)) and len(drawn) == 100


def half_the_keys_are_cached(run) -> bool:
    cache = run.ours.generation.KVCache(run.sampled, torch.tensor([5]))
    run.sampled.backbone(torch.arange(5)[None], cache)
    matrix_rows = {group.get("matrix_rows") for group in run.state.optimizer.param_groups}
    return cache.layers[0].k.shape[1] == 1 and (32, 16, 16) in matrix_rows


def experts_are_orthogonalized_apart(run) -> bool:
    return (32,) * 4 in {group.get("matrix_rows") for group in run.state.optimizer.param_groups}


def texts_are_longer_than_the_context(run) -> bool:
    prompts = [torch.arange(9)]
    steps = run.ours.sample.generate(run.sampled, prompts, n_tokens=60, vocab_size=257)
    return len(list(steps)) == 60


def lion_is_lion(run) -> bool:
    """Chen et al. 2023, algorithm 2."""
    torch.manual_seed(0)
    p = torch.nn.Parameter(torch.randn(4, 3))
    w, m = p.detach().clone(), torch.zeros(4, 3)
    group = dict(params=[p], kind="lion", lr=0.1, betas=(0.9, 0.99), weight_decay=0.2)
    optimizer = run.ours.model.Optimizer([group])
    for _ in range(3):
        p.grad = torch.randn(4, 3)
        optimizer.step()
        w = w - 0.1 * ((0.9 * m + 0.1 * p.grad).sign() + 0.2 * w)
        m = 0.99 * m + 0.01 * p.grad
    trained = run.checkpoint["optimizer"]["head.weight"].keys() == {"momentum"}
    return trained and torch.allclose(p, w) and torch.allclose(optimizer.state[p]["momentum"], m)


def rows_are_evened(run) -> bool:
    """As Li et al. 2025, but v begins at what is expected; for a matrix and its transpose."""
    page = run.ours.model
    for shape in ((4, 6), (6, 4)):
        torch.manual_seed(0)
        p = torch.nn.Parameter(torch.randn(shape))
        w, v = p.detach().clone(), torch.full(shape[:1], 1 / shape[1])
        group = dict(params=[p], kind="muon", lr=0.1, momentum=0.0, weight_decay=0.2)
        optimizer = page.Optimizer([group | dict(matrix_rows=(shape[0],))])
        for _ in range(3):
            p.grad = torch.randn(shape)
            optimizer.step()
            update = page.newton_schulz(p.grad[None])[0]
            update *= max(1.0, shape[0] / shape[1]) ** 0.5
            v = 0.95 * v + 0.05 * update.square().mean(1)
            w = 0.98 * w - 0.1 * update / (update.size(1) * v[:, None]).sqrt()
        torch.testing.assert_close(p.detach(), w, rtol=1e-4, atol=1e-5)
    return run.checkpoint["optimizer"]["blocks.0.mlp.fc.weight"]["row_square"].shape == (128, 1)


def layers_have_their_rates(run) -> bool:
    rates = {
        p: group["initial_lr"]
        for group in run.state.optimizer.param_groups
        for p in group["params"]
    }
    pairs = zip(*(block.parameters() for block in run.state.raw_model.blocks))
    return all(math.isclose(rates[second], 0.9 * rates[first]) for first, second in pairs)


def average_is_what_is_evaluated(run) -> bool:
    average = run.after[0]
    for weights in run.after:
        average = {name: 0.9 * w + 0.1 * weights[name] for name, w in average.items()}
    return all(
        torch.allclose(w, average[name], atol=1e-6) for name, w in run.sampled.named_parameters()
    )


def embedding_stays(run) -> bool:
    kept = torch.equal(run.checkpoint["model"]["wte.weight"], run.weights["wte.weight"])
    return (
        kept
        and not run.checkpoint["optimizer"].get("wte.weight")
        and "head.weight" in run.checkpoint["optimizer"]
    )


def what_fits_is_loaded(run) -> bool:
    base = torch.load(run.base, weights_only=True)["model"]
    loaded = all(torch.equal(run.weights[name], w) for name, w in base.items())
    return (
        loaded
        and "not loaded: " in run.said
        and run.said.count("blocks.2.") == 5
        and "blocks.1." not in run.said
    )


def base_stays(run) -> bool:
    base, now = torch.load(run.base, weights_only=True)["model"], run.checkpoint["model"]
    moved = [
        name for name in now if "lora" in name and not torch.equal(now[name], run.weights[name])
    ]
    kept = [name for name in base if torch.equal(base[name], now[name])]
    return len(moved) == 22 and len(kept) == 11  # two layers of five matrices, and the head


def figure_is_logged(run) -> bool:
    norms = [weights["head.weight"].norm().item() for weights in run.after]
    return np.allclose(rows(run.folder, "head_norm")[:4], norms) and "| head_norm " in run.said


def student_is_taught(run) -> bool:
    """The first half's weights are the teacher; the second half begins anew."""
    cfg, teacher, student = run.state.cfg, run.checkpoint["extra"]["teacher"], run.sampled
    noise(student, derive_seed(cfg.seed, "student"))
    weights = {name: p.detach().clone().requires_grad_() for name, p in student.named_parameters()}
    stream = run.ours.train_gpt.TokenStream(cfg.data, cfg.seq_len, cfg.batch_tokens, cfg.seed)
    batch = torch.from_numpy(stream.batch(2))
    x, y = batch[:, :-1], batch[:, 1:].clone()
    probs = Plain(teacher, student.cfg).logits(x).softmax(-1)

    def plain_loss():
        ours = Plain(weights, student.cfg)
        soft = -(probs * ours.logits(x).log_softmax(-1)).sum(-1)
        return (ours.loss(x, y) + soft[y >= 0].mean()) / 2

    want = plain_loss()
    grads = torch.autograd.grad(want, list(weights.values()))
    norm = torch.stack([grad.norm() for grad in grads]).norm()
    same = np.allclose(figures(run.folder)[:, 2], [want.item(), norm.item()], rtol=1e-5)
    y[:, ::5] = y[1] = -1
    same &= torch.allclose(student(x, y, probs), plain_loss(), rtol=1e-5)
    same &= rows(run.folder, "lr") == 2 * rows(run.folder, "lr")[:2]
    same &= run.checkpoint["optimizer"]["head.weight"]["step"].item() == 2
    return same and all(torch.equal(w, run.after[1][name]) for name, w in teacher.items())


CASES = {
    "A flag": Case(flags=dict(min_lr_frac=0.5), holds=rates(lambda x: 0.5 + 0.5 * x)),
    "A learning-rate schedule": Case(holds=rates(lambda x: 0.5 - 0.5 * math.cos(math.pi * x))),
    "A parameter": Case(plain.Scaled),
    "Dropout": Case(plain.Dropped, any_layout=False),
    "Layers left out": Case(plain.LayersLeftOut, flags=dict(n_layer=4)),
    "A buffer": Case(plain.MeanSubtracted),
    "Label smoothing": Case(plain.Smoothed),
    "A loss term": Case(plain.ZLoss),
    "Weights of tokens": Case(plain.Weighted),
    "Loss on answers alone": Case(holds=only_answers_count),
    "An auxiliary head": Case(plain.SecondHead),
    "A contrastive term": Case(plain.Contrastive),
    "A student of the model": Case(holds=student_is_taught),
    "Mixture of experts": Case(plain.Experts, holds=experts_are_orthogonalized_apart),
    "Tied embeddings": Case(plain.Tied),
    "Grouped queries": Case(plain.Grouped, holds=half_the_keys_are_cached),
    "ALiBi": Case(plain.Alibi),
    "Learned positions": Case(plain.Positions, holds=texts_are_longer_than_the_context),
    "The previous token": Case(plain.TokenBefore),
    "Another optimizer": Case(holds=lion_is_lion),
    "NorMuon": Case(holds=rows_are_evened),
    "A learning rate by layer": Case(holds=layers_have_their_rates),
    "An average of the weights": Case(holds=average_is_what_is_evaluated),
    "Frozen parameters": Case(holds=embedding_stays),
    "A part of a checkpoint": Case(
        flags=dict(n_layer=3, init_from="base.pt"), holds=what_fits_is_loaded
    ),
    "Fine-tuning by LoRA": Case(plain.LowRank, flags=dict(init_from="base.pt"), holds=base_stays),
    "A mixture of sources": Case(flags=dict(data="data:0.7,other:0.3"), holds=sources_are_mixed),
    "Your own metric": Case(holds=figure_is_logged),
}
# The others: 12
MOST_LINES = {"A student of the model": 22, "Grouped queries": 19, "A mixture of sources": 40}
RANKS = (
    "Layers left out",
    "A buffer",
    "Mixture of experts",
    "Tied embeddings",
    "NorMuon",
    "An average of the weights",
)


@torch.no_grad()
def noise(model, seed: int) -> None:
    """Weights that are random everywhere: zeros would hide gradients."""
    for name, p in model.named_parameters():
        generator = torch.Generator().manual_seed(derive_seed(seed, name) >> 1)
        p.copy_(0.1 * torch.randn(p.shape, generator=generator))


def edited(title: str, repo: Path) -> Path:
    """A copy of the sources with a worked edit."""
    for name in COPIED:
        if (ROOT / name).is_file():
            repo.mkdir(exist_ok=True)
            shutil.copy(ROOT / name, repo / name)
        else:
            shutil.copytree(
                ROOT / name,
                repo / name,
                ignore=shutil.ignore_patterns("python", "__pycache__", "*.bin"),
            )
    edits = worked_edits()
    for diff in filter(
        None, (title == "Fine-tuning by LoRA" and edits["A part of a checkpoint"], edits[title])
    ):
        done = subprocess.run(
            ["patch", "-p1", "-F0"], input=diff, text=True, cwd=repo, capture_output=True
        )
        assert done.returncode == 0, done.stdout + done.stderr
    return repo


def trained(ours, folder: Path, at_first=None, **flags) -> SimpleNamespace:
    """A run of an edited page; at_first(state, batch) is called before its first step."""
    run = SimpleNamespace(ours=ours, folder=folder, after=[])
    page, step = ours.train_gpt, ours.train_gpt.train_step

    def train_step(state, batch, progress):
        if state.step == 0 and at_first:
            at_first(state, batch)
        result, run.state = step(state, batch, progress), state
        run.after.append(
            {name: p.detach().clone() for name, p in state.raw_model.named_parameters()}
        )
        return result

    page.sample_text, page.init_weights, page.train_step = (lambda *_: ""), noise, train_step
    try:
        with contextlib.redirect_stdout(io.StringIO()) as said:
            page.train(page.make_config(**FLAGS | flags, out_dir=str(folder)))
    finally:
        page.train_step = step
    run.said = said.getvalue()
    return run


def figures(folder: Path) -> np.ndarray:
    """Losses and gradient norms, float64 (2, steps)."""
    return np.array([rows(folder, "train_loss"), rows(folder, "grad_norm")])


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A folder with data that have answers, and a run of the unedited page."""
    folder = tmp_path_factory.mktemp("edits")
    make_data(folder / "data")
    make_data(folder / "other", seed=1)
    for path in (folder / "data").glob("*.bin"):
        tokens = np.fromfile(path, dtype="<u2", offset=1024)
        tokens[np.flatnonzero(tokens == EOT)[:-1] + 40] = EQUALS
        write_shard(path, tokens)
    with pages(ROOT) as ours:
        trained(ours, folder / "base", data=str(folder / "data"))
    return folder


def assert_plain(case: Case, state, batch) -> None:
    """The loss and its gradients are those of plain PyTorch, in chunks too.

    Some targets are -1, and all of one chunk.
    """
    model, x, y = state.raw_model, batch[:3, :-1], batch[:3, 1:].clone()
    y[:, ::5] = y[1] = -1
    weights = {
        name: w.detach().clone().requires_grad_(w.is_floating_point())
        for name, w in model.state_dict().items()
    }
    model.step_seed = 14  # every other layer is left out
    torch.manual_seed(1)
    theirs = case.plain(weights, model.cfg, True, model.step_seed).loss(x, y)
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    wants = torch.autograd.grad(theirs, [weights[name] for name, _ in named], allow_unused=True)
    for model.loss_chunk in (16, 0):
        torch.manual_seed(1)
        ours = model(x, y)
        torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-6)
        grads = torch.autograd.grad(ours, [p for _, p in named], allow_unused=True)
        model.load_state_dict(weights)  # buffers that the pass has written
        for (name, _), grad, want in zip(named, grads, wants):
            assert (grad is None) == (want is None), name
            if grad is not None:
                apart = (grad.to_dense() - want).norm() / want.norm().clamp(min=1)
                assert apart <= 2e-6, (name, apart)


@torch.no_grad()
def assert_samples(case: Case, run, path: Path) -> None:
    """The model that sample.py loads gives plain PyTorch's logits, with and without a KV cache."""
    run.sampled, _ = run.ours.sample.load(path, "cpu", "fp32")
    idx = torch.randint(0, 257, (2, 20), generator=torch.Generator().manual_seed(3))
    want = case.plain(dict(run.sampled.state_dict()), run.sampled.cfg, False).logits(idx)
    torch.testing.assert_close(run.sampled(idx), want, rtol=0, atol=1e-5)
    run.ours.generation.check_cache(run.sampled)


@pytest.mark.parametrize("title", CASES)
def test_a_worked_edit_is_right(title, base, tmp_path):
    case, first = CASES[title], {}

    def at_first(state, batch):
        first.update(
            weights={k: v.detach().clone() for k, v in state.raw_model.state_dict().items()},
            batch=batch,
        )
        assert_plain(case, state, batch)

    data = ",".join(str(base / part) for part in case.flags.get("data", "data").split(","))
    flags = case.flags | dict(data=data)
    if "init_from" in flags:
        flags["init_from"] = str(base / "base" / "ckpt_4.pt")
    with pages(edited(title, tmp_path / "repo")) as ours:
        run = trained(ours, tmp_path / "run", at_first, **flags)
        run.checkpoint, run.base = (
            torch.load(tmp_path / "run" / "ckpt_4.pt", weights_only=True),
            base / "base" / "ckpt_4.pt",
        )
        run.weights, run.batch = first["weights"], first["batch"]
        assert_samples(case, run, tmp_path / "run" / "ckpt_4.pt")
        resume = flags | dict(resume=str(tmp_path / "run" / "ckpt_2.pt"))
        resume.pop("init_from", None)  # the run's own
        trained(ours, tmp_path / "rest", **resume)
        assert np.array_equal(figures(tmp_path / "rest"), figures(tmp_path / "run")[:, 2:])
        other = torch.load(tmp_path / "rest" / "ckpt_4.pt", weights_only=True)
        for part in ("model", "optimizer", "extra"):
            torch.testing.assert_close(other[part], run.checkpoint[part], rtol=0, atol=0)
        layout = dict(
            micro_batch=(1 if "answers" in title else 4) if case.any_layout else 16,
            loss_chunk=100,
            checkpointing="full",
        )
        trained(ours, tmp_path / "again", **flags | layout)
        np.testing.assert_allclose(
            figures(tmp_path / "again"), figures(tmp_path / "run"), rtol=2e-5
        )
        assert case.holds is None or case.holds(run)


def test_every_worked_edit_has_a_case_and_is_small():
    edits = worked_edits()
    assert edits.keys() == CASES.keys()
    for title, diff in edits.items():
        changed = [line for line in diff.splitlines() if re.match(r"[+-](?![+-])", line)]
        assert len(changed) <= MOST_LINES.get(title, 12), title
        assert max(map(len, changed)) <= 1 + 100, title
    assert f"\n{len(edits)} edits" in (ROOT / "docs" / "edits.md").read_text()


def test_two_ranks_train_worked_edits_as_one(base, tmp_path):
    for title in RANKS:
        flags = CASES[title].flags | dict(data=str(base / "data"), micro_batch=8)
        with pages(edited(title, tmp_path / title)) as ours:
            trained(ours, tmp_path / "alone" / title, **flags)
    (tmp_path / "data").symlink_to(base / "data")
    done = run_ranks(tmp_path, __file__, tmp_path)
    assert done.codes == [0, 0], [text[-3000:] for text in done.stderr]
    for parallel, title in itertools.product(("ddp", "fsdp"), RANKS):
        rtol = 2e-5 if CASES[title].any_layout else 2e-2
        found, want = (figures(tmp_path / name / title) for name in (parallel, "alone"))
        np.testing.assert_allclose(found, want, rtol=rtol, err_msg=f"{parallel}: {title}")


def main(folder: Path) -> None:
    for title in RANKS:
        with pages(folder / title) as ours:
            for parallel in ("ddp", "fsdp"):
                flags = CASES[title].flags | dict(
                    data=str(folder / "data"), micro_batch=4, parallel=parallel
                )
                trained(ours, folder / parallel / title, **flags)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
