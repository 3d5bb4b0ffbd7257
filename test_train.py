"""The invariants of the trainer: `python -m pytest test_train.py`. For two ranks, torchrun launches this file once."""

import dataclasses
import hashlib
import itertools
import json
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

import model
import train_gpt
from conftest import (
    ROOT,
    TINY,
    TORCHRUN,
    assert_same_run,
    compiler_works,
    final,
    flags_of,
    python_process,
    rows,
    run_python,
    shorten_samples,
    tiny_run,
)
from data.shards import UserError, write_shard
from data.stream import TokenShards, TokenStream, feistel_permute, prefetch, sequence_starts
from model import GPT, GPTConfig, Optimizer, optimizer_groups, param_spec_name
from ops import parallel
from runtime import start
from runtime.checkpoint import content_hash, list_checkpoints, read_checkpoint
from runtime.launch import cpu_cores
from runtime.ranks import DistContext, exit_process, run_on_rank0
from runtime.start import open_stream
from train_gpt import get_batch, make_config

CPU = DistContext(torch.device("cpu"))


@pytest.fixture(scope="module", autouse=True)
def launched(request, tmp_path_factory):
    """The launch of two ranks: its process and folder. It runs beside the other tests, and its own come last."""
    if not any("two_ranks" in item.fixturenames for item in request.session.items):
        yield
        return
    folder = tmp_path_factory.mktemp("ranks")
    (folder / "data").symlink_to(request.getfixturevalue("data"))
    (folder / "noisy.pt").symlink_to(request.getfixturevalue("noisy"))
    argv = (*TORCHRUN, __file__, folder, *["compiled"] * compiler_works())
    with open(folder / "output.txt", "w") as output:
        process = subprocess.Popen(**python_process(*argv), stdout=output, stderr=output)
    yield process, folder
    process.terminate()
    process.wait()


# ---------------------------------------------------------------------------------------------------------------------
# The stream


@pytest.mark.parametrize("n", [1, 2, 3, 16, 17, 1000, 4097])
def test_permutation_visits_everything_once(n):
    order = feistel_permute(np.arange(n), n, key=7)
    assert sorted(order.tolist()) == list(range(n))
    if n > 100:
        assert not np.array_equal(order, feistel_permute(np.arange(n), n, key=8))
        assert abs(np.corrcoef(np.arange(n), order)[0, 1]) < 0.1


@pytest.mark.parametrize("n_tokens", [33, 63, 64, 65, 1000])
def test_windows_of_an_epoch(n_tokens):
    per_epoch = max(1, (n_tokens - 32) // 32)
    offsets = set()
    for epoch in range(40):
        starts = sequence_starts(epoch * per_epoch + np.arange(per_epoch), n_tokens, 32, seed=3)
        offsets.add(int(starts.min()))
        assert np.array_equal(np.sort(starts), starts.min() + 32 * np.arange(per_epoch))  # every sequence once
        assert starts.min() >= 0 and starts.max() + 33 <= n_tokens
    assert len(offsets) > 10 or n_tokens < 64


def every_token(data: Path) -> np.ndarray:
    return np.concatenate([np.fromfile(path, dtype="<u2", offset=1024) for path in sorted(data.glob("*train*"))])


def test_batch_does_not_depend_on_ranks(data):
    cfg = make_config(**TINY | dict(data=str(data)))
    stream = open_stream(cfg, CPU)
    whole = get_batch(stream, CPU, 77)
    parts = [get_batch(stream, dataclasses.replace(CPU, rank=rank, world_size=4), 77) for rank in range(4)]
    assert torch.equal(whole, torch.cat(parts))
    everything = every_token(data)
    starts = sequence_starts(77 * 16 + np.arange(16), len(everything), 32, cfg.seed)
    assert torch.equal(whole, torch.from_numpy(np.stack([everything[s : s + 33] for s in starts]).astype(np.int64)))


def test_the_stream_alone_gives_the_batches_of_a_run(data, tmp_path, monkeypatch):
    code = """if True:
        import sys
        sys.modules["torch"] = None  # importing it fails
        import numpy as np
        from data.stream import TokenStream
        for seed, doc_align in ((0, False), (3, True)):
            stream = TokenStream(sys.argv[1], seq_len=32, batch_tokens=512, seed=seed, doc_align=doc_align)
            np.save(f"{sys.argv[2]}/{seed}.npy", np.stack([stream.batch(step) for step in range(4)]))
    """
    done = run_python("-c", code, data, tmp_path)
    assert done.returncode == 0, done.stderr
    step, batches = train_gpt.train_step, []
    monkeypatch.setattr(
        train_gpt, "train_step", lambda state, batch, lr: batches.append(batch) or step(state, batch, lr)
    )
    for seed, doc_align in ((0, False), (3, True)):
        batches.clear()
        tiny_run(tmp_path / f"run{seed}", data=data, seed=seed, doc_align=doc_align, max_steps=4, loss_chunk=0)
        alone = np.load(tmp_path / f"{seed}.npy")
        assert alone.shape == (4, 16, 33) and alone.dtype == np.int64
        assert np.array_equal(torch.stack(batches).numpy(), alone)


def test_window_over_the_end_of_a_shard(data):
    shards, everything = TokenShards(data, "train", 257), every_token(data)
    starts = np.array([11100, 11110, 11111, 0])
    assert np.array_equal(shards.read_sequences(starts, 33), np.stack([everything[s : s + 33] for s in starts]))


def test_windows_start_at_documents(data):
    stream = TokenStream(data, seq_len=32, batch_tokens=512, doc_align=True)
    batches = np.concatenate([stream.batch(step) for step in range(-(-len(stream.aligned) // 16))])
    assert (batches[:, 0] == 256).all()
    assert (np.diff(stream.aligned) >= 32).all() and len(stream.aligned) == len(np.unique(stream.aligned))
    assert len(stream.aligned) > 0.9 * 29000 / 97


def test_prefetch_keeps_order_and_passes_errors_on():
    assert list(itertools.islice(prefetch(lambda i: i * i, 3, depth=2), 6)) == [9, 16, 25, 36, 49, 64]
    assert list(itertools.islice(prefetch(lambda i: i, 0, depth=0), 2)) == [0, 1]

    def bad(i):
        if i == 2:
            raise UserError("shard gone")
        return i

    with pytest.raises(UserError, match="shard gone"):
        list(prefetch(bad, 0, depth=3))


# ---------------------------------------------------------------------------------------------------------------------
# One process: the layout changes nothing


def noisy_gpt(noisy) -> GPT:
    checkpoint = read_checkpoint(noisy)
    gpt = GPT(GPTConfig(**checkpoint["model_config"]))
    gpt.load_state_dict(checkpoint["model"])
    return gpt


def plain_loop(data, noisy, steps):
    """Losses and gradient norms of a loop without the trainer's step, and its first gradients: no micro-batches."""
    cfg, gpt = make_config(**TINY | dict(data=str(data))), noisy_gpt(noisy)
    optimizer = Optimizer(optimizer_groups(gpt, "muon", 0.02, 0.004, cfg.weight_decay))
    stream, losses, norms, first = open_stream(cfg, CPU), [], [], None
    for step in range(steps):
        batch = get_batch(stream, CPU, step)
        x, y = batch[:, :-1], batch[:, 1:]
        loss = F.cross_entropy(gpt(x).flatten(0, 1), y.flatten())
        loss.backward()
        first = first or {name: p.grad.clone() for name, p in gpt.named_parameters()}
        losses.append(loss.item())
        norms.append(math.sqrt(sum(p.grad.double().square().sum().item() for p in gpt.parameters())))
        for group in optimizer.param_groups:
            group["lr"] = group["initial_lr"] * min(1, (cfg.max_steps - step) / (cfg.cooldown_frac * cfg.max_steps))
            group["momentum"] = 0.85 + 0.1 * step / 300
        optimizer.step()
        optimizer.zero_grad()
    return (losses, norms), first


def test_losses_and_gradient_norms_against_a_plain_loop(plain, data, noisy):
    losses, norms = plain_loop(data, noisy, steps=20)[0]
    np.testing.assert_allclose(rows(plain, "train_loss"), losses, rtol=1e-5)
    np.testing.assert_allclose(rows(plain, "grad_norm"), norms, rtol=1e-5)


SAME = {
    "checkpointing full": dict(checkpointing="full"),
    "checkpointing selective": dict(checkpointing="selective"),
    "attention math": dict(attn="math"),
    "attention flash": dict(attn="flash"),
    "attention sdpa": dict(attn="sdpa"),
    "attention blocked": dict(attn="blocked"),
    "deterministic": dict(deterministic=True),
    "matmul_precision": dict(matmul_precision="high"),
    "offload activations": dict(offload="activations"),
    "offload optimizer": dict(offload="optimizer"),
    "prefetch": dict(prefetch=7),
    "profile": dict(profile=2),
    "window as wide as the context": dict(window="S:32"),
    "alloc_conf": dict(alloc_conf="expandable_segments:True,roundup_power2_divisions:[256:1,512:2,>:4]"),
    "micro_batch 1": dict(micro_batch=1),
    "micro_batch 4, chunked": dict(micro_batch=4, loss_chunk=50),
    "chunk of everything": dict(micro_batch=16, loss_chunk=10**6),
}


@pytest.mark.parametrize("case", SAME)
def test_launch_shape_does_not_change_the_run(case, data, noisy, plain, tmp_path, monkeypatch):
    flags = dict(data=data, init_from=noisy) | SAME[case]
    if case == "window as wide as the context":  # another field in the checkpoint's shape, the same model
        checkpoint = read_checkpoint(noisy)
        checkpoint["model_config"]["window"] = "S:32"
        checkpoint["sha256"] = content_hash(checkpoint)
        torch.save(checkpoint, tmp_path / "window.pt")
        flags["init_from"] = tmp_path / "window.pt"
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "")
    tiny_run(tmp_path / "run", **flags)
    assert_same_run(tmp_path / "run", plain)


COMPILED = dict(compile="default", micro_batch=8, loss_chunk=256)  # one shape for all, so that they share kernels


@pytest.mark.parametrize("more", [dict(loss_chunk=100), dict(checkpointing="0.3"), dict(compile="reduce-overhead")])
def test_compiled_run_is_the_same(more, data, noisy, plain, tmp_path):
    if not compiler_works():
        pytest.skip("torch.compile finds no working compiler here")
    tiny_run(tmp_path / "run", data=data, init_from=noisy, sample_every=10, **COMPILED | more)
    assert_same_run(tmp_path / "run", plain)
    assert "attention blocked" in (tmp_path / "run" / "log.txt").read_text()
    assert all("_orig_mod" not in name for name in final(tmp_path / "run")["model"])


# ---------------------------------------------------------------------------------------------------------------------
# Evaluation, resuming, initial weights, memorizing


def test_watching_disturbs_nothing(data, noisy, plain, tmp_path):
    watched = dict(eval_every=3, sample_every=7, save_every=5, prefetch=0, micro_batch=16, loss_chunk=0)
    tiny_run(tmp_path / "run", data=data, init_from=noisy, **watched)
    for key in ("train_loss", "grad_norm"):
        assert rows(tmp_path / "run", key) == rows(plain, key)
    assert len(rows(tmp_path / "run", "val_loss")) == 7
    assert [path.name for path in list_checkpoints(tmp_path / "run")] == ["ckpt_20.pt", "ckpt_15.pt"]


def test_evaluation_is_the_mean_over_whole_windows(data, noisy, tmp_path):
    tokens = np.fromfile(data / "a_val_0.bin", dtype="<u2", offset=1024).astype(np.int64)
    for eval_tokens, n_rows in ((0, 135), (1000, 31)):
        gpt = noisy_gpt(noisy)
        starts = np.arange(n_rows) * 135 // n_rows * 32  # spread over the whole split
        x, y = (torch.from_numpy(np.stack([tokens[start + i : start + i + 32] for start in starts])) for i in (0, 1))
        expected = F.cross_entropy(gpt(x).flatten(0, 1), y.flatten()).item()
        for micro_batch in (1, 16):
            flags = dict(eval_tokens=eval_tokens, micro_batch=micro_batch, max_steps=1, muon_lr=1e-30, adam_lr=1e-30)
            summary = tiny_run(tmp_path / f"{n_rows}-{micro_batch}", data=data, init_from=noisy, **flags)
            assert summary["val_loss"] == pytest.approx(expected, rel=1e-5)
            assert summary["val_bpb"] == pytest.approx(expected / math.log(2), rel=1e-5)


def test_resume_is_exact(data, tmp_path):
    whole, half = tmp_path / "whole", tmp_path / "half"
    tiny_run(whole, data=data, save_every=10, keep=0)
    half.mkdir()
    (half / "ckpt_10.pt").write_bytes((whole / "ckpt_10.pt").read_bytes())
    lines = (whole / "metrics.jsonl").read_text().splitlines()
    (half / "metrics.jsonl").write_text("\n".join(lines[:15]) + '\n{"step": 16, "tra')  # killed in a write
    tiny_run(half, data=data, save_every=10, keep=0, resume="newest")
    assert_same_run(half, whole, exact=True)
    assert rows(half, "step") == rows(whole, "step")


def test_fresh_processes_give_the_same_bits(data, tmp_path):
    flags = dict(data=data, max_steps=5)
    for i in range(2):
        done = run_python("train_gpt.py", *flags_of(TINY | flags | dict(out_dir=tmp_path / str(i))))
        assert done.returncode == 0, done.stderr
    tiny_run(tmp_path / "here", **flags)
    assert_same_run(tmp_path / "0", tmp_path / "1", exact=True)
    assert_same_run(tmp_path / "0", tmp_path / "here", exact=True)


def test_initial_weights_depend_on_seed_and_name_alone():
    def drawn(seed, **shape) -> dict:
        gpt = GPT(GPTConfig(**dict(vocab_size=64, seq_len=8, n_layer=2, n_head=2, n_embd=32) | shape))
        train_gpt.init_weights(gpt, train_gpt.seed_of(make_config(seed=seed)))
        return gpt.state_dict()

    name = "blocks.0.attn.qkv.weight"
    weights, larger, others = drawn(0), drawn(0, n_layer=3, vocab_size=128, window="S"), drawn(1)
    assert torch.equal(weights[name], larger[name]) and torch.equal(weights[name], drawn(0)[name])
    assert not torch.equal(weights[name], weights["blocks.1.attn.qkv.weight"])
    assert not torch.equal(weights[name], others[name])
    assert abs(weights[name].std().item() - (0.33 / 32) ** 0.5) < 0.005
    assert weights["head.weight"].abs().max() == 0
    seed = (
        int.from_bytes(hashlib.sha256(f"0/{name}".encode()).digest()[:8], "little") >> 1
    )  # hashes are part of the format of seeds
    drawn_here = torch.empty(96, 32).normal_(generator=torch.Generator().manual_seed(seed))
    torch.testing.assert_close(weights[name], drawn_here * (0.33 / 32) ** 0.5, rtol=1e-6, atol=0)
    with pytest.raises(ValueError, match="blocks.0.extra matches .*; it needs (exactly )?one"):
        param_spec_name("blocks.0.extra", model.PARAM_TABLE)


def test_overfits_one_batch(tmp_path):
    folder = tmp_path / "one"
    folder.mkdir()
    tokens = np.random.default_rng(0).integers(0, 250, 300).astype(np.uint16)
    write_shard(folder / "train.bin", tokens)
    write_shard(folder / "val.bin", tokens[:-1])
    meta = dict(tokenizer="bytes", vocab_size=257, eot=256, splits={}, source="test", files={})
    meta["splits"] = {split: dict(tokens=300, bytes=300, documents=1) for split in ("train", "val")}
    (folder / "meta.json").write_text(json.dumps(meta))
    for optimizer in ("muon", "adamw"):
        flags = dict(optimizer=optimizer, batch_tokens=256, max_steps=75, adam_lr=0.01)
        summary = tiny_run(tmp_path / optimizer, data=folder, **flags)
        assert summary["val_loss"] < 0.5, (optimizer, summary["val_loss"])  # random bytes: 5.5 without memory


# ---------------------------------------------------------------------------------------------------------------------
# The run's folder and its clock; importing


def test_a_run_keeps_its_sources(plain):
    log, kept, names = (plain / "log.txt").read_text(), plain / "source", sorted(start.SOURCE_FILES)
    assert {"train_gpt.py", "model.py", "ops/loss.py", "data/stream.py"} <= set(names)
    assert sorted(path.relative_to(kept).as_posix() for path in kept.rglob("*") if path.is_file()) == names
    for name in names:
        content = (ROOT / name).read_bytes()
        assert (kept / name).read_bytes() == content
        assert any(name in line and hashlib.sha256(content).hexdigest() in line for line in log.splitlines()), name
    assert "def train_step" not in log and 0 <= log.index('"muon_lr": 0.02') < log.index("step  1/20 | loss")


# ---------------------------------------------------------------------------------------------------------------------
# Several ranks: every case runs inside one launch, and the tests look at what it left behind

RANK_CASES = {
    "ddp": dict(micro_batch=8),
    "ddp_accum": dict(micro_batch=2, loss_chunk=0),
    "ddp_adamw": dict(optimizer="adamw", grad_clip=0.5),
    "ddp_uneven": dict(n_layer=3, max_steps=5, init_from=""),
    "ddp_half": dict(max_steps=20, save_every=10, keep=0),
    "ddp_resumed": dict(resume="ddp_half/ckpt_10.pt", init_from=""),
    "ddp_watched": dict(eval_every=3, sample_every=7, save_every=4, prefetch=0),
    "ddp_bucket": dict(bucket_cap_mb=1, micro_batch=4),
    "fsdp": dict(parallel="fsdp", save_every=10, keep=0),
    "fsdp_accum": dict(parallel="fsdp", micro_batch=2, checkpointing="full"),
    "fsdp_offload": dict(parallel="fsdp", offload="optimizer", grad_clip=0.5),
    "fsdp_resumed": dict(parallel="fsdp", resume="ddp_half/ckpt_10.pt", init_from=""),
    "fsdp_thin": dict(parallel="fsdp", n_embd=2, n_head=1, n_layer=3, init_from="", max_steps=5, vocab_size=257),
    "ddp_fp16": dict(dtype="fp16", micro_batch=2, max_steps=6, sample_every=3),
    "fsdp_fp16": dict(dtype="fp16", micro_batch=2, max_steps=6, parallel="fsdp", sample_every=3),
    "ddp_selective": dict(checkpointing="selective"),
    "ddp_docs": dict(doc_mask=True, doc_align=True, max_steps=5),
    "fsdp_ngrams": dict(
        ngram=3, ngram_rows=65, ngram_dropout=0.4, doc_mask=True, parallel="fsdp", init_from="", max_steps=5
    ),
    "ddp_dropout": dict(ngram=3, ngram_rows=65, ngram_dropout=0.4, micro_batch=2, init_from="", max_steps=8),
}
COMPILED_RANK_CASES = {
    "ddp_compiled": COMPILED | dict(checkpointing="selective", max_steps=6),
    "fsdp_compiled": COMPILED | dict(checkpointing="full", parallel="fsdp", max_steps=6),
}


def refuse_what_nccl_refuses() -> None:
    """Make collectives take contiguous tensors only: gloo does not insist on it."""

    def checked(function):
        def call(*args, **kwargs):
            tensors = [t for arg in args for t in (arg if isinstance(arg, list) else [arg]) if torch.is_tensor(t)]
            assert all(t.is_contiguous() for t in tensors), "NCCL takes contiguous tensors only"
            return function(*args, **kwargs)

        return call

    for name in ("all_gather", "all_reduce", "all_to_all_single", "broadcast"):
        setattr(dist, name, checked(getattr(dist, name)))


def full(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().full_tensor() if hasattr(tensor, "full_tensor") else tensor.detach().clone()


def run_case(folder: Path, flags: dict) -> bool:
    """One run, which leaves its first gradients beside its folder. Returns whether all ranks end with equal weights."""
    step, grads, used = Optimizer.step, {}, []

    def step_and_note(self, skip=None):
        used[:] = [(name, p) for group in self.param_groups for name, p in zip(group["names"], group["params"])]
        if not grads and skip is not None:  # as in the warm-up
            grads.update({name: full(p.grad) for name, p in used})
        step(self, skip)

    no_sync, calls = parallel.maybe_no_sync, []

    def checked(model, last):
        """FSDP's gradients are there after every micro-step: in shards, as none are kept whole until the last."""
        if flags.get("parallel") == "fsdp" and calls and not calls[-1]:
            assert all(p.grad is not None for p in model.parameters())
        calls.append(last)
        return no_sync(model, last)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Optimizer, "step", step_and_note)
        patch.setattr(parallel, "maybe_no_sync", checked)
        tiny_run(folder, **flags)
    torch.save(grads, f"{folder}.grads{dist.get_rank()}.pt")
    weights = torch.cat([full(p).flatten() for _, p in used])
    everyones = [torch.empty_like(weights) for _ in range(dist.get_world_size())]
    dist.all_gather(everyones, weights)
    return all(torch.equal(everyones[0], other) for other in everyones)


def worker(folder: Path, cases: dict) -> None:
    """What each rank does under torchrun: all cases, then the checks that need every rank."""
    refuse_what_nccl_refuses()
    patch = pytest.MonkeyPatch()
    shorten_samples(patch)
    patch.setattr(model, "MAX_STACK_NUMEL", 4096)  # one matrix of the MLP a rank, so that Muon takes several goes
    report = {}
    for name, case in cases.items():
        flags = dict(data=folder / "data", init_from=folder / "noisy.pt") | case
        if "resume" in case:
            flags["resume"] = folder / case["resume"]
        report[name] = run_case(folder / name, flags)

    def mistake():
        raise UserError("rank 0 only")

    with pytest.raises(UserError, match="rank 0 only"):  # an error on rank 0 is everyone's
        run_on_rank0(start.launch(make_config(device="cpu")), mistake)
    if dist.get_rank() == 0:
        (folder / "report.json").write_text(json.dumps(report))
    exit_process(0)


@pytest.fixture(scope="module")
def two_ranks(launched) -> Path:
    """The folder of what the two ranks left behind."""
    process, folder = launched
    assert process.wait(600) == 0, (folder / "output.txt").read_text()
    return folder


@pytest.mark.parametrize("case", ["ddp", "ddp_accum", "ddp_bucket", "ddp_selective", "fsdp", "fsdp_accum"])
def test_two_ranks_train_as_one(case, two_ranks, plain):
    assert_same_run(two_ranks / case, plain)


def test_ranks_agree_to_the_bit(two_ranks):
    report = json.loads((two_ranks / "report.json").read_text())
    assert set(report.values()) == {True} and set(report) >= set(RANK_CASES)


@pytest.mark.parametrize("case", ["ddp", "ddp_accum", "ddp_bucket", "ddp_selective", "fsdp", "fsdp_accum"])
def test_first_gradients_of_two_ranks(case, two_ranks, data, noisy):
    expected = plain_loop(data, noisy, steps=1)[1]
    for rank in range(2):
        grads = torch.load(two_ranks / f"{case}.grads{rank}.pt")
        assert grads.keys() == expected.keys()
        for name, grad in grads.items():
            assert grad.abs().max() > 0
            torch.testing.assert_close(grad, expected[name], rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize(
    "case", ["ddp_adamw", "ddp_uneven", "fsdp_offload", "fsdp_thin", "ddp_docs", "fsdp_ngrams", "ddp_dropout"]
)
def test_two_ranks_other_optimizers_and_uneven_shares(case, two_ranks, data, noisy, tmp_path):
    one = RANK_CASES[case] | dict(parallel="auto", offload="none", micro_batch=0)
    tiny_run(tmp_path / "one", **dict(data=data, init_from=noisy) | one)
    assert_same_run(two_ranks / case, tmp_path / "one")


@pytest.mark.parametrize("case", ["ddp_fp16", "fsdp_fp16"])
def test_two_ranks_in_fp16(case, two_ranks, data, noisy, tmp_path):
    tiny_run(tmp_path / "one", data=data, init_from=noisy, dtype="fp16", max_steps=6)
    np.testing.assert_allclose(rows(two_ranks / case, "train_loss"), rows(tmp_path / "one", "train_loss"), rtol=2e-3)
    np.testing.assert_allclose(rows(two_ranks / case, "grad_norm"), rows(tmp_path / "one", "grad_norm"), rtol=2e-2)


@pytest.mark.parametrize("case", COMPILED_RANK_CASES)
def test_two_compiled_ranks_train_as_one(case, two_ranks, data, noisy, tmp_path):
    if not (two_ranks / case).exists():
        pytest.skip("torch.compile finds no working compiler here")
    tiny_run(tmp_path / "one", data=data, init_from=noisy, max_steps=6)
    assert_same_run(two_ranks / case, tmp_path / "one")


def test_fsdp_and_ddp_share_their_checkpoints(two_ranks, plain):
    for key in ("train_loss", "grad_norm"):
        np.testing.assert_allclose(rows(two_ranks / "fsdp_resumed", key), rows(plain, key)[10:], rtol=1e-5)
    a, b = (read_checkpoint(two_ranks / case / "ckpt_10.pt") for case in ("fsdp", "ddp_half"))
    assert a["model"].keys() == b["model"].keys()
    for name in a["model"]:
        for slot in a["optimizer"][name]:
            torch.testing.assert_close(a["optimizer"][name][slot], b["optimizer"][name][slot], rtol=1e-3, atol=1e-6)


def test_resume_at_another_world_size(two_ranks, data, noisy, tmp_path, plain):
    tiny_run(tmp_path / "run", data=data, resume=two_ranks / "ddp_half" / "ckpt_10.pt")
    for key in ("train_loss", "grad_norm"):
        np.testing.assert_allclose(rows(tmp_path / "run", key), rows(plain, key)[10:], rtol=1e-5)


def test_two_ranks_resume_exactly_and_watching_disturbs_nothing(two_ranks):
    for case, first in (("ddp_resumed", 10), ("ddp_watched", 0)):
        for key in ("train_loss", "grad_norm"):
            assert rows(two_ranks / case, key) == rows(two_ranks / "ddp_half", key)[first:]
        ours, theirs = final(two_ranks / case)["model"], final(two_ranks / "ddp_half")["model"]
        assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_threads_are_shared_out_under_torchrun(two_ranks):
    assert f", {max(1, cpu_cores() // 2)} threads)" in (two_ranks / "ddp" / "log.txt").read_text()


if __name__ == "__main__":
    worker(Path(sys.argv[1]), RANK_CASES | (COMPILED_RANK_CASES if "compiled" in sys.argv else {}))
