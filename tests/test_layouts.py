"""The trainer as it is: a plain loop gives its numbers, and no systems flag, layout or number of ranks changes them.

What an edit may break is in test_train.py. torchrun starts this file once, for all cases of two ranks.
"""

import dataclasses
import json
import math
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
    TINY,
    assert_same_run,
    compiler_works,
    final,
    flags_of,
    rows,
    run_python,
    shorten_samples,
    tiny_run,
    torchrun_beside,
)
from data.shards import UserError, write_shard
from data.stream import TokenStream
from model import GPT, GPTConfig, Optimizer, optimizer_groups
from ops.parallel import to_full
from runtime.checkpoint import read_checkpoint
from runtime.launch import cpu_cores
from runtime.ranks import DistContext, exit_process, run_on_rank0

CPU = DistContext(torch.device("cpu"))

# ---------------------------------------------------------------------------------------------------------------------
# One process


def noisy_gpt(noisy) -> GPT:
    checkpoint = read_checkpoint(noisy)
    gpt = GPT(GPTConfig(**checkpoint["model_config"]))
    gpt.load_state_dict(checkpoint["model"])
    return gpt


def plain_loop(data, noisy, steps):
    """Losses and gradient norms of a loop without the trainer's step: no micro-batches."""
    gpt, stream = noisy_gpt(noisy), TokenStream(data, seq_len=32, batch_tokens=512)
    optimizer, losses, norms = Optimizer(optimizer_groups(gpt, "muon", 0.02, 0.004, 0.05)), [], []
    for step in range(steps):
        batch = torch.from_numpy(stream.batch(step))
        loss = F.cross_entropy(gpt(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        loss.backward()
        losses.append(loss.item())
        norms.append(math.sqrt(sum(p.grad.double().square().sum().item() for p in gpt.parameters())))
        for group in optimizer.param_groups:
            group["lr"] = group["initial_lr"] * min(1, (20 - step) / 12)
            group["momentum"] = 0.85 + 0.1 * step / 300
        optimizer.step()
        optimizer.zero_grad()
    return losses, norms


def test_losses_and_gradient_norms_against_a_plain_loop(plain, data, noisy):
    losses, norms = plain_loop(data, noisy, steps=20)
    np.testing.assert_allclose(rows(plain, "train_loss"), losses, rtol=1e-5)
    np.testing.assert_allclose(rows(plain, "grad_norm"), norms, rtol=1e-5)


SAME = {
    "checkpointing full": dict(checkpointing="full"),
    "checkpointing selective": dict(checkpointing="selective"),
    "attention math": dict(attn="math"),
    "attention flash": dict(attn="flash"),
    "attention blocked": dict(attn="blocked"),
    "deterministic": dict(deterministic=True),
    "matmul_precision": dict(matmul_precision="high"),
    "offload activations": dict(offload="activations"),
    "offload optimizer": dict(offload="optimizer"),
    "profile": dict(profile=2),
    "alloc_conf": dict(alloc_conf="expandable_segments:True,roundup_power2_divisions:[256:1,512:2,>:4]"),
    "micro_batch 1": dict(micro_batch=1),
    "micro_batch 4, chunked": dict(micro_batch=4, loss_chunk=50),
    "chunk of everything": dict(micro_batch=16, loss_chunk=10**6),
    "fsdp": dict(parallel="fsdp"),
}


@pytest.mark.parametrize("case", SAME)
def test_flags_do_not_change_the_run(case, data, noisy, plain, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "")
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "")
    tiny_run(tmp_path / "run", data=data, init_from=noisy, **SAME[case])
    assert_same_run(tmp_path / "run", plain)


COMPILED = dict(compile="default", micro_batch=8, loss_chunk=256)  # one shape for all, so that they share kernels


@pytest.mark.parametrize("more", [dict(checkpointing="0.3"), dict(compile="reduce-overhead")])
def test_compiled_run_is_the_same(more, data, noisy, plain, tmp_path):
    if not compiler_works():
        pytest.skip("torch.compile finds no working compiler here")
    tiny_run(tmp_path / "run", data=data, init_from=noisy, sample_every=10, **COMPILED | more)
    assert_same_run(tmp_path / "run", plain)
    assert "attention blocked" in (tmp_path / "run" / "log.txt").read_text()
    assert all("_orig_mod" not in name for name in final(tmp_path / "run")["model"])


def test_evaluation_is_the_mean_over_whole_windows(data, noisy, tmp_path):
    tokens, gpt = np.fromfile(data / "a_val_0.bin", dtype="<u2", offset=1024).astype(np.int64), noisy_gpt(noisy)
    for eval_tokens, n_rows in ((0, 135), (1000, 31)):
        starts = np.arange(n_rows) * 135 // n_rows * 32  # spread over the whole split
        x, y = (torch.from_numpy(np.stack([tokens[start + i : start + i + 32] for start in starts])) for i in (0, 1))
        expected = F.cross_entropy(gpt(x).flatten(0, 1), y.flatten()).item()
        for micro_batch in (1, 16):
            flags = dict(eval_tokens=eval_tokens, micro_batch=micro_batch, max_steps=1, muon_lr=1e-30, adam_lr=1e-30)
            summary = tiny_run(tmp_path / f"{n_rows}-{micro_batch}", data=data, init_from=noisy, **flags)
            assert summary["val_loss"] == pytest.approx(expected, rel=1e-5)
            assert summary["val_bpb"] == pytest.approx(expected / math.log(2), rel=1e-5)


def test_fresh_processes_give_the_same_bits(data, tmp_path):
    flags = dict(data=data, max_steps=5)
    done = run_python("train_gpt.py", *flags_of(TINY | flags | dict(out_dir=tmp_path / "fresh")))
    assert done.returncode == 0, done.stderr
    tiny_run(tmp_path / "here", **flags)
    assert_same_run(tmp_path / "fresh", tmp_path / "here", exact=True)


@pytest.mark.parametrize("optimizer", ["muon", "adamw"])
def test_overfits_one_batch(optimizer, tmp_path):
    tokens = np.random.default_rng(0).integers(0, 250, 300).astype(np.uint16)
    write_shard(tmp_path / "train.bin", tokens)
    write_shard(tmp_path / "val.bin", tokens[:-1])
    splits = {split: dict(tokens=300, bytes=300, documents=1) for split in ("train", "val")}
    meta = dict(tokenizer="bytes", vocab_size=257, eot=256, splits=splits, source="test", files={})
    (tmp_path / "meta.json").write_text(json.dumps(meta))
    flags = dict(optimizer=optimizer, batch_tokens=256, max_steps=75, adam_lr=0.01)
    summary = tiny_run(tmp_path / "run", data=tmp_path, **flags)
    assert summary["val_loss"] < 0.5  # random bytes: 5.5 without memory


# ---------------------------------------------------------------------------------------------------------------------
# Two ranks: every case runs inside one launch, and the tests look at what it left behind

AS_PLAIN = {
    "ddp": dict(micro_batch=8),
    "ddp_accum": dict(micro_batch=2, loss_chunk=0),
    "ddp_bucket": dict(bucket_cap_mb=1, micro_batch=4),
    "ddp_selective": dict(checkpointing="selective"),
    "ddp_half": dict(save_every=10, keep=0),
    "fsdp": dict(parallel="fsdp", save_every=10, keep=0),
    "fsdp_accum": dict(parallel="fsdp", micro_batch=2, checkpointing="full"),
}
NGRAMS = dict(ngram=3, ngram_rows=65, ngram_dropout=0.4, init_from="", max_steps=5)
AS_ONE_PROCESS = {  # with other flags than the plain run
    "ddp_adamw": dict(optimizer="adamw", grad_clip=0.5),
    "ddp_uneven": dict(n_layer=3, max_steps=5, init_from=""),
    "ddp_docs": dict(doc_mask=True, doc_align=True, max_steps=5),
    "ddp_ngrams": NGRAMS | dict(micro_batch=2),
    "fsdp_ngrams": NGRAMS | dict(doc_mask=True, parallel="fsdp"),
    "fsdp_offload": dict(parallel="fsdp", offload="optimizer", grad_clip=0.5),
    "fsdp_thin": dict(parallel="fsdp", n_embd=2, n_head=1, n_layer=3, init_from="", max_steps=5, vocab_size=257),
    "ddp_fp16": dict(dtype="fp16", micro_batch=2, max_steps=6, sample_every=3),
    "ddp_bf16_comm": dict(grad_comm="bf16", max_steps=5),
}
RESUMED = {
    "ddp_resumed": dict(resume="ddp_half/ckpt_10.pt", init_from=""),
    "ddp_watched": dict(eval_every=3, sample_every=7, save_every=4),
    "fsdp_resumed": dict(parallel="fsdp", resume="ddp_half/ckpt_10.pt", init_from=""),
}
COMPILED_CASES = {
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

    for name in ("all_gather", "all_reduce", "all_to_all_single", "all_gather_single", "broadcast"):
        if hasattr(dist, name):
            setattr(dist, name, checked(getattr(dist, name)))


def run_case(folder: Path, flags: dict) -> bool:
    """One run. Returns whether all ranks end with equal weights."""
    build, states = train_gpt.build, []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train_gpt, "build", lambda *args: states.append(build(*args)) or states[0])
        tiny_run(folder, **flags)
    ours = torch.cat([to_full(p.detach()).flatten() for p in states[0].raw_model.parameters()])
    everyones = [torch.empty_like(ours) for _ in range(dist.get_world_size())]
    dist.all_gather(everyones, ours)
    return all(torch.equal(everyones[0], other) for other in everyones)


def worker(folder: Path, cases: dict) -> None:
    """What each rank does under torchrun: all cases, and an error on rank 0, which is everyone's."""
    refuse_what_nccl_refuses()
    patch, report = pytest.MonkeyPatch(), {}
    shorten_samples(patch)
    patch.setattr(model, "MAX_STACK_NUMEL", 4096)  # one matrix of the MLP a rank, so that Muon takes several goes
    for name, case in cases.items():
        flags = dict(data=folder / "data", init_from=folder / "noisy.pt") | case
        if "resume" in case:
            flags["resume"] = folder / case["resume"]
        report[name] = run_case(folder / name, flags)

    def mistake():
        raise UserError("rank 0 only")

    with pytest.raises(UserError, match="rank 0 only"):
        run_on_rank0(train_gpt.launch(dataclasses.asdict(train_gpt.make_config(device="cpu"))), mistake)
    if dist.get_rank() == 0:
        (folder / "report.json").write_text(json.dumps(report))
    exit_process(0)


@pytest.fixture(scope="module", autouse=True)
def launched(request, data, noisy, tmp_path_factory):
    """The launch of two ranks: its process and folder. It runs beside the other tests, and its own come last."""
    folder = tmp_path_factory.mktemp("ranks")
    (folder / "noisy.pt").symlink_to(noisy)
    with torchrun_beside(request, __file__, data, folder, *["compiled"] * compiler_works()) as launched:
        yield launched


@pytest.fixture(scope="module")
def two_ranks(launched) -> Path:
    """The folder of what the two ranks left behind."""
    process, folder = launched
    assert process.wait(600) == 0, (folder / "output.txt").read_text()
    return folder


@pytest.mark.parametrize("case", AS_PLAIN)
def test_two_ranks_train_as_one(case, two_ranks, plain):
    assert_same_run(two_ranks / case, plain)


@pytest.mark.parametrize("case", AS_ONE_PROCESS)
def test_two_ranks_with_other_flags(case, two_ranks, data, noisy, tmp_path):
    one = AS_ONE_PROCESS[case] | dict(parallel="auto", offload="none", grad_comm="fp32")
    tiny_run(tmp_path / "one", **dict(data=data, init_from=noisy) | one)
    if "16" not in case:
        return assert_same_run(two_ranks / case, tmp_path / "one")
    for key, rtol in (("train_loss", 2e-3), ("grad_norm", 2e-2)):
        np.testing.assert_allclose(rows(two_ranks / case, key), rows(tmp_path / "one", key), rtol=rtol)


@pytest.mark.parametrize("case", COMPILED_CASES)
def test_two_compiled_ranks_train_as_one(case, two_ranks, data, noisy, tmp_path):
    if not (two_ranks / case).exists():
        pytest.skip("torch.compile finds no working compiler here")
    tiny_run(tmp_path / "one", data=data, init_from=noisy, max_steps=6)
    assert_same_run(two_ranks / case, tmp_path / "one")


def test_ranks_agree_to_the_bit(two_ranks):
    report = json.loads((two_ranks / "report.json").read_text())
    assert set(report.values()) == {True} and set(report) >= {*AS_PLAIN, *AS_ONE_PROCESS, *RESUMED}
    assert f", {max(1, cpu_cores() // 2)} threads)" in (two_ranks / "ddp" / "log.txt").read_text()


def test_checkpoints_go_on_at_any_number_of_ranks(two_ranks, plain, data, tmp_path):
    tiny_run(tmp_path / "run", data=data, resume=two_ranks / "fsdp" / "ckpt_10.pt")
    for run in (tmp_path / "run", two_ranks / "fsdp_resumed"):
        for key in ("train_loss", "grad_norm"):
            np.testing.assert_allclose(rows(run, key), rows(plain, key)[10:], rtol=1e-5)


def test_two_ranks_resume_exactly_and_watching_disturbs_nothing(two_ranks):
    for case, first in (("ddp_resumed", 10), ("ddp_watched", 0)):
        for key in ("train_loss", "grad_norm"):
            assert rows(two_ranks / case, key) == rows(two_ranks / "ddp_half", key)[first:]
        ours, theirs = final(two_ranks / case)["model"], final(two_ranks / "ddp_half")["model"]
        assert all(torch.equal(ours[name], theirs[name]) for name in ours)


if __name__ == "__main__":
    compiled = COMPILED_CASES if "compiled" in sys.argv else {}
    worker(Path(sys.argv[1]), AS_PLAIN | AS_ONE_PROCESS | RESUMED | compiled)
