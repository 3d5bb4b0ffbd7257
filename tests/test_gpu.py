"""What needs a GPU: `python -m pytest -m gpu`.

In four processes on one card: `PYTORCH_ALLOC_CONF=per_process_memory_fraction:0.2` and `-n 4`.
"""

import warnings

import pytest
import torch
from torch._dynamo.utils import counters

import ops.recompute
import train_gpt
from benchmarks import train as bench_train
from conftest import (
    TINY,
    assert_loss_follows_its_gradient,
    assert_same_run,
    built,
    flags_of,
    measured,
    random_gpt,
    run_python,
    some_batch,
    tiny_run,
)
from inference.decode import compile_decode_step
from inference.generation import generate, tokens_to_cpu
from inference.int8 import quantize
from model import GPT, GPTConfig
from ops.compile import apply_compile
from ops.recompute import OFFLOAD_MIN_NUMEL, apply_offload, pack_to_host
from runtime.model_setup import dummy_step
from test_train import difference, one_step

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


GPU_SAME = {
    "eager": dict(),
    "efficient attention": dict(attn="efficient"),
    "flex attention": dict(attn="flex"),
    "checkpointing selective": dict(checkpointing="selective", compile="default"),
    "CUDA graphs": dict(compile="reduce-overhead", micro_batch=4),
    "offload activations": dict(offload="activations", micro_batch=16),
    "offload activations, compiled": dict(offload="activations", micro_batch=16, compile="default"),
    "offload optimizer": dict(offload="optimizer"),
    "FSDP": dict(parallel="fsdp"),
    "FSDP, fitted micro-batch": dict(parallel="fsdp", micro_batch=None),
    "fitted micro-batch": dict(micro_batch=None),
}


@pytest.fixture
def packed(monkeypatch) -> list[int]:
    """Sizes of the tensors that go to host memory."""
    sizes = []

    def noting(shapes, tensor):
        kept = pack_to_host(shapes, tensor)
        if kept is not tensor:
            assert kept[-1].is_pinned()
            sizes.append(tensor.numel())
        return kept

    monkeypatch.setattr(ops.recompute, "pack_to_host", noting)
    return sizes


def started(**flags) -> tuple:
    """The TrainState of a tiny run before its first step, and four batches, always the same."""
    batches = [some_batch(seed=seed).pin_memory() for seed in range(4)]
    return built(device="cuda", **flags), batches


def test_gpu_run_leaves_the_generator_as_it_was_and_takes_allocator_settings(
    data, tmp_path, monkeypatch
):
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)  # it would come before --alloc_conf
    torch.manual_seed(5)
    drawn = torch.rand(3, device="cuda")
    # The first run of a process also starts CUDA
    code = """if True:
        import sys, torch, train_gpt
        from common.errors import run_command
        torch.manual_seed(5)
        assert run_command(train_gpt.main, sys.argv[1:]) == 0
        print(torch.rand(3, device="cuda").tolist())
        print(torch.cuda.memory._snapshot()["allocator_settings"]["max_split_size"])
    """
    flags = TINY | dict(data=data, device="cuda", max_steps=1, out_dir=tmp_path / "run")
    done = run_python("-c", code, *flags_of(flags), "--alloc_conf=max_split_size_mb:77")
    assert done.stdout.endswith(f"{drawn.tolist()}\n{77 * 2**20}\n"), done.stderr


@pytest.mark.parametrize("case", GPU_SAME)
def test_gpu_run_matches_cpu_run(case, data, noisy, plain, tmp_path, packed):
    tiny_run(tmp_path / "run", data=data, init_from=noisy, device="cuda", **GPU_SAME[case])
    assert_same_run(tmp_path / "run", plain, rtol=1e-4)
    # 16 sequences of 32 tokens make 1 << 16 numbers in an MLP's hidden layer: just enough to be
    # worth sending
    least_times = 2 * TINY["max_steps"] if "offload activations" in case else 0
    assert len(packed) >= least_times and bool(packed) == bool(least_times)
    assert set(packed) <= {OFFLOAD_MIN_NUMEL}


def test_gpu_offloaded_optimizer_resumes(data, tmp_path):
    flags = dict(data=data, device="cuda", offload="optimizer", ngram=2, ngram_rows=64)
    whole, rest = tmp_path / "whole", tmp_path / "rest"
    tiny_run(whole, **flags, save_every=2, keep="all")
    tiny_run(rest, **flags, resume=whole / "ckpt_2.pt")
    assert_same_run(rest, whole)


def test_gpu_compiled_step_is_the_plain_one():
    plain, compiled = (
        one_step(some_batch(), device="cuda", compile=compile, doc_mask=True)
        for compile in ("off", "default")
    )
    assert not difference(compiled, plain, rtol=1e-4)


def test_gpu_trial_takes_the_memory_of_a_step():
    peaks = []
    for is_trial in (True, False):
        state, batches = started(n_embd=256, micro_batch=8)
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        if is_trial:
            optimizer = train_gpt.make_optimizer(state.cfg, state.raw_model)
            dummy_step(state.raw_model, optimizer, state.micro_batch, state.cfg.seq_len)
            del optimizer
        else:
            for batch in batches[:2]:
                train_gpt.train_step(state, batch, 0.0)
        peaks.append(torch.cuda.max_memory_allocated() - before)
        del state
    assert peaks[0] == pytest.approx(peaks[1], rel=0.02)


@pytest.mark.parametrize("compile", ["off", "default"])
def test_gpu_weights_are_not_offloaded(compile, packed):
    """Activations of 5 x 100 tokens, 256 wide, are taken; weights are not, nor their casts."""
    with torch.device("cuda"):
        cfg = GPTConfig(vocab_size=64, n_layer=2, n_head=2, n_embd=256, seq_len=100)
        gpt = GPT(cfg, torch.bfloat16)
    if compile != "off":
        apply_compile(gpt, compile)
    for block in gpt.blocks:
        apply_offload(block)
    idx = torch.zeros((5, 100), dtype=torch.int64, device="cuda")
    gpt(idx, idx).backward()
    # The compiler pads some activations to 504 tokens
    sizes_of_weights = {p.numel() for p in gpt.parameters()}
    assert {500 * 256, 500 * 1024} <= set(packed) and not sizes_of_weights & set(packed), packed


def test_gpu_trains_in_bf16_fp16_and_fp8(data, tmp_path):
    flags = dict(data=data, device="cuda", compile="default", max_steps=60, loss_chunk=256)
    losses = {}
    for name in ("bf16", "fp16", "fp8"):
        flags |= dict(dtype="fp16" if name == "fp16" else "bf16", fp8=name == "fp8")
        losses[name] = tiny_run(tmp_path / name, **flags)["val_loss"]
    assert max(losses.values()) - min(losses.values()) < 0.05 and losses["bf16"] < 3.0, losses


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
@pytest.mark.parametrize("attn", ["flash", "cudnn", "varlen"])
def test_gpu_samples_of_a_run_with_a_16_bit_backend(attn, parallel, data, tmp_path):
    flags = dict(data=data, device="cuda", dtype="bf16", n_embd=128, sample_every=3)
    tiny_run(tmp_path / "run", **flags, attn=attn, parallel=parallel)
    log = (tmp_path / "run" / "log.txt").read_text()
    assert log.count("--- sample at step") > 1 and "(no sample" not in log


@pytest.mark.parametrize("compile", ["off", "default", "reduce-overhead"])
@pytest.mark.parametrize("checkpointing", ["none", "full"])
def test_gpu_dropout_has_one_mask(compile, checkpointing):
    flags = dict(device="cuda", dtype="fp32", dropout=0.5, n_layer=2)
    state = built(**flags, compile=compile, checkpointing=checkpointing)
    assert_loss_follows_its_gradient(state.raw_model)


STEPS = {  # flags, and how often a step waits for the device: for the gradient norm
    "eager": (dict(), 1),
    "CUDA graphs": (dict(compile="reduce-overhead"), 1),
    "clipped, with n-grams": (dict(grad_clip=1.0, ngram=3, ngram_dropout=0.4), 1),
    "documents": (dict(doc_mask=True, attn="efficient"), 1),
    # Also for the number of each micro-batch's documents
    "documents, varlen": (dict(doc_mask=True, attn="varlen"), 1 + 2),
    "recomputed": (dict(checkpointing="selective", compile="default"), 1),
    "offloaded": (dict(offload="activations", micro_batch=16), 1),
    "AdamW in fp16": (dict(optimizer="adamw", dtype="fp16"), 1 + 1),  # GradScaler.step asks as well
}


@pytest.mark.parametrize("case", STEPS)
def test_gpu_a_step_waits_for_the_device_once(case):
    flags, expected = STEPS[case]
    state, batches = started(**dict(dtype="bf16") | flags)
    for batch in batches[:3]:
        train_gpt.train_step(state, batch, 0.0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        train_gpt.train_step(state, batches[3], 0.0)
        torch.cuda.set_sync_debug_mode("default")
    waits = [w for w in caught if "a synchronizing CUDA operation" in str(w.message)]
    assert len(waits) == expected


@pytest.mark.parametrize("cases", ["", "--cases attention", "--cases memory", "--ranks 1"])
def test_bench_on_cuda(cases, tmp_path, monkeypatch):
    # Each case is a process that starts CUDA: a part of them, in two minutes for all GPU tests
    steps = {step: bench_train.LADDER[step] for step in ("bf16", "compile")}
    monkeypatch.setattr(bench_train, "LADDER", steps)
    report = measured(tmp_path, "train", f"--preset laptop --n_layer 2 --repeats 2 {cases}")
    assert report["machine"]["device"].startswith("cuda")


def drawn(gpt: GPT, prompts, **options) -> list[list[int]]:
    steps = generate(gpt, prompts, **dict(n_tokens=40, vocab_size=65, temperature=0) | options)
    return list(tokens_to_cpu(steps))


def test_gpu_decoding_is_a_cuda_graph_and_writes_the_same_text():
    gpt = random_gpt(window="SL:5", ngram=3, std=0.3)
    prompts = torch.stack([torch.arange(9), torch.arange(30, 39)])
    on_cpu, eager = drawn(gpt, prompts), drawn(gpt.cuda(), prompts)
    step = compile_decode_step(gpt)
    counters.clear()
    assert drawn(gpt, prompts, step=step) == eager
    assert counters["inductor"]["cudagraph_skips"] == 0
    # Rounding may change a letter, and all after it
    assert sum(a == b for a, b in zip(eager, on_cpu)) > 20


def test_gpu_int8_and_deterministic_draws():
    gpt = random_gpt(std=0.3, compute_dtype=torch.bfloat16).cuda()
    prompts, options = torch.arange(9)[None], dict(temperature=0.8, seeds=[1])
    torch.use_deterministic_algorithms(True)
    try:
        assert drawn(gpt, prompts, **options) == drawn(gpt, prompts, **options)
    finally:
        torch.use_deterministic_algorithms(False)
    idx = torch.arange(48, device="cuda").view(2, 24)
    before = gpt(idx, idx).item()
    assert quantize(gpt)(idx, idx).item() == pytest.approx(before, rel=0.02)
    assert len(drawn(gpt, prompts, **options)) == 40
