"""The trainer as it is: a plain loop gives its numbers, and no systems flag, layout or number of
ranks changes them.

What an edit may break is in test_train.py. Two ranks start this file once, for all of their cases.
"""

import math
import os
import re
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.utils._pytree import tree_leaves

import ops.optimizer
import sample
from common.errors import exit_process
from common.values import cpu_cores
from conftest import (
    TINY,
    assert_same_run,
    compile_with,
    compiler_works,
    groups_of,
    rows,
    run_ranks,
    tiny_run,
)
from data.stream import TokenStream
from model import GPT, GPTConfig, Optimizer
from ops.parallel import to_full
from runtime import auto
from runtime.checkpoint import read_checkpoint
from train_gpt import make_config, train


def test_losses_and_gradient_norms_against_a_plain_loop(plain, data, noisy):
    checkpoint, stream = read_checkpoint(noisy), TokenStream(data, seq_len=32)
    stream.set_batch_tokens(512)
    gpt = GPT(GPTConfig(**checkpoint["model_config"]))
    gpt.load_state_dict(checkpoint["model"])
    optimizer, found = Optimizer(groups_of(gpt)), []
    peak_lrs = [group["lr"] for group in optimizer.param_groups]
    for step in range(20):
        batch = torch.from_numpy(stream.batch(step))
        loss = F.cross_entropy(gpt(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        loss.backward()
        norm = torch.nn.utils.get_total_norm([p.grad for p in gpt.parameters()])
        found.append([loss.item(), norm.item()])
        for group, peak_lr in zip(optimizer.param_groups, peak_lrs):
            group["lr"] = peak_lr * (0.05 + 0.95 * min(1, (20 - step) / 12))
            group["momentum"] = 0.85 + 0.1 * step / 1000
        optimizer.step()
        optimizer.zero_grad()
    logged = zip(rows(plain, "train_loss"), rows(plain, "grad_norm"))
    np.testing.assert_allclose([*logged], found, rtol=1e-5)


def test_flags_do_not_change_the_run(data, noisy, plain, tmp_path):
    """All at once; micro-batches, chunks and recomputation are in test_train.py."""
    flags = dict(attn="blocked", deterministic=True, matmul_precision="high", parallel="fsdp")
    tiny_run(tmp_path / "run", data=data, init_from=noisy, offload="optimizer", **flags)
    assert_same_run(tmp_path / "run", plain)


# The shapes of test_compiled in test_train.py, which compiles the same kernels
COMPILED = dict(compile="default", loss_chunk=128, attn="sdpa", window="S:9", init_from="")


def test_compiled_run_is_the_same(data, tmp_path):
    if not compiler_works():
        pytest.skip("torch.compile finds no working compiler here")
    flags = COMPILED | dict(data=data, sample_every=10)
    tiny_run(tmp_path / "run", **flags)
    tiny_run(tmp_path / "eager", **flags | dict(compile="off"))
    assert_same_run(tmp_path / "run", tmp_path / "eager")


def test_evaluation_is_the_mean_over_whole_windows(data, noisy, tmp_path):
    tokens = np.fromfile(data / "a_val_0.bin", dtype="<u2", offset=1024).astype(np.int64)
    gpt = sample.load(noisy, "cpu", "fp32")[0]
    starts = np.arange(31) * 135 // 31 * 32  # 31 of 135 windows, spread over the whole split
    windows = torch.from_numpy(tokens[starts[:, None] + np.arange(33)])
    loss = gpt(windows[:, :-1], windows[:, 1:]).item()
    flags = dict(data=data, init_from=noisy, max_steps=1, muon_lr=1e-9, adam_lr=1e-9)
    summary = tiny_run(tmp_path, **flags, eval_tokens=1000, micro_batch=16)
    bits = loss / math.log(2) / (windows[:, 1:] != 256).float().mean().item()
    assert (summary["val_loss"], summary["val_bpb"]) == pytest.approx((loss, bits), rel=1e-5)


# --------------------------------------------------------------------------------------------------
# Two ranks: every case runs inside one launch, and the tests look at what it left behind

NGRAMS = dict(ngram=3, ngram_rows=65, ngram_dropout=0.4, embed_decay=1.5, init_from="")
CASES = {
    "ddp_adamw": dict(optimizer="adamw", grad_clip=0.5),
    "ddp_uneven": dict(n_layer=3, init_from=""),
    "ddp_docs": dict(doc_mask=True, doc_align=True, micro_batch=2, bucket_cap_mb=1),
    "fsdp_docs": dict(doc_mask=True, parallel="fsdp", checkpointing="full") | NGRAMS,
    "fsdp_offload": dict(parallel="fsdp", offload="optimizer", grad_clip=0.5),
    "fsdp_thin": dict(parallel="fsdp", n_embd=2, n_head=1, n_layer=3, init_from="", vocab_size=257),
    "ddp_compiled": COMPILED | dict(checkpointing="selective"),
    "fsdp_compiled": COMPILED | dict(checkpointing="full", parallel="fsdp"),
}
# To the rounding of 16 bits
ROUNDED = {
    "ddp_fp16": dict(dtype="fp16", micro_batch=2),
    "ddp_bf16": dict(grad_comm="bf16"),
    "fsdp_bf16": dict(grad_comm="bf16", parallel="fsdp"),
}
ONE_PROCESS = dict(
    parallel="ddp", offload="none", compile="off", checkpointing="none", grad_comm="fp32"
)


def refuse_what_nccl_refuses() -> None:
    """Make collectives take contiguous tensors only: gloo does not insist on it."""

    def checked(function):
        def call(*args, **kwargs):
            tensors = filter(torch.is_tensor, tree_leaves(args))
            assert all(t.is_contiguous() for t in tensors), "NCCL refuses this"
            return function(*args, **kwargs)

        return call

    for name in ("all_gather", "all_reduce", "all_to_all_single", "all_gather_single", "broadcast"):
        if hasattr(dist, name):
            setattr(dist, name, checked(getattr(dist, name)))


def worker(folder: Path) -> None:
    """What each rank does: all cases, of which it leaves its weights beside the run's folder."""
    refuse_what_nccl_refuses()
    compile_with(pytest.MonkeyPatch(), "aot_eager")  # Inductor's kernels are the same on all ranks
    if os.environ["RANK"] == "1":
        auto.faster_dtype = lambda *_: "bf16"  # all ranks take rank 0's
    ops.optimizer.MAX_STACK_NUMEL = 4096  # an MLP's matrix per rank: Muon takes several goes
    common = TINY | dict(data=folder / "data", init_from=folder / "noisy.pt", max_steps=5)
    for case, flags in (CASES | ROUNDED).items():
        cfg = make_config(**common | flags, out_dir=folder / case)
        trained = train(cfg, return_model=True)[1]
        weights = [to_full(p.detach()) for p in trained.parameters()]
        torch.save(weights, f"{folder / case}{dist.get_rank()}.pt")
    exit_process(0)


@pytest.fixture(scope="module")
def two_ranks(data, noisy, tmp_path_factory) -> Path:
    """The folder of what the two ranks left behind."""
    folder = tmp_path_factory.mktemp("ranks")
    (folder / "noisy.pt").symlink_to(noisy)
    (folder / "data").symlink_to(data)
    done = run_ranks(folder, __file__, folder, timeout=600)
    assert done.codes == [0, 0], done.stderr
    return folder


def samples(folder: Path) -> list[str]:
    """The texts that a run has sampled."""
    return re.findall("(?s)--- sample at step.*?\n---\n", (folder / "log.txt").read_text())


@pytest.mark.parametrize("case", CASES | ROUNDED)
def test_two_ranks_train_as_one(case, two_ranks, data, noisy, tmp_path):
    one, flags = tmp_path / "one", dict(data=data, init_from=noisy, max_steps=5)
    tiny_run(one, **flags | (CASES | ROUNDED)[case] | ONE_PROCESS)
    # All ranks' weights are equal to the bit, except those of different kernels
    if "compiled" not in case:
        ours, theirs = (torch.load(f"{two_ranks / case}{rank}.pt") for rank in range(2))
        assert all(map(torch.equal, ours, theirs))
    if case in CASES:
        assert samples(two_ranks / case) == samples(one) != []
        return assert_same_run(two_ranks / case, one)
    loss, norm = (
        np.abs(np.divide(rows(two_ranks / case, key), rows(one, key)) - 1).max()
        for key in ("train_loss", "grad_norm")
    )
    # Gradients are rounded where they are communicated in bf16
    assert loss < 2e-3 and (1e-5 if "bf16" in case else 0) <= norm < 2e-2


def test_ranks_share_the_cores(two_ranks):
    log = (two_ranks / "ddp_docs" / "log.txt").read_text()
    assert f", {max(1, cpu_cores() // 2)} threads)" in log


def test_rounding_errors_stay_small_in_a_deep_model(data, tmp_path):
    """Adam magnifies a gradient that is zero but for rounding; skips from zeros once had one."""
    for micro_batch in (1, 16):
        flags = dict(data=data, n_layer=10, max_steps=8, micro_batch=micro_batch)
        tiny_run(tmp_path / str(micro_batch), **flags)
    assert_same_run(tmp_path / "1", tmp_path / "16")


if __name__ == "__main__":
    worker(Path(sys.argv[1]))
