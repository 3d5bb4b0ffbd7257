"""What needs a GPU: `python -m pytest -m gpu`."""

import math
import warnings

import pytest
import torch

import ops.checkpointing
import train_gpt
from benchmarks import attention as bench_attention
from benchmarks import ladder
from conftest import (
    TINY,
    assert_same_run,
    built,
    flags_of,
    measured,
    random_gpt,
    run_python,
    tiny_run,
)
from inference.generation import compile_decode_step, generate, tokens_to_cpu
from inference.int8 import quantize
from model import GPT, GPTConfig, attention, may_attend
from ops.attention import attention_mask
from ops.checkpointing import OFFLOAD_MIN_NUMEL, apply_offload, pack_to_host, unpack_to_device
from ops.compile import apply_compile
from ops.linear import Fp8Linear
from runtime.wrap_model import dummy_step

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

GPU_SAME = {
    "eager": dict(),
    "efficient attention": dict(attn="efficient"),
    "flex attention": dict(attn="flex"),
    "flex, compiled": dict(attn="flex", compile="default"),
    "checkpointing full": dict(checkpointing="full", compile="default"),
    "checkpointing selective": dict(checkpointing="selective", compile="default"),
    "CUDA graphs": dict(compile="reduce-overhead", micro_batch=4),
    "offload activations": dict(offload="activations", micro_batch=16),
    "offload activations, compiled": dict(offload="activations", micro_batch=16, compile="default"),
    "offload optimizer": dict(offload="optimizer"),
    "FSDP": dict(parallel="fsdp"),
    "FSDP, fitted micro-batch": dict(parallel="fsdp", micro_batch=0),
    "HSDP on one rank": dict(parallel="hsdp"),
    "fitted micro-batch": dict(micro_batch=0),
}


@pytest.fixture
def packed(monkeypatch) -> list[int]:
    """Sizes of the tensors that go to host memory."""
    sizes = []

    def noting(shapes, tensor):
        kept = pack_to_host(shapes, tensor)
        if kept is not tensor:
            sizes.append(tensor.numel())
        return kept

    monkeypatch.setattr(ops.checkpointing, "pack_to_host", noting)
    return sizes


def started(**flags) -> tuple:
    """The TrainState of a tiny run before its first step, and four batches, always the same."""
    generator = torch.Generator().manual_seed(0)
    batches = []
    for _ in range(4):
        batches.append(torch.randint(0, 257, (16, 33), generator=generator).pin_memory())
    return built(device="cuda", **flags), batches


def test_gpu_run_leaves_the_generator_as_it_was(data, tmp_path):
    torch.manual_seed(5)
    drawn = torch.rand(3, device="cuda")
    torch.manual_seed(5)
    tiny_run(tmp_path / "run", data=data, device="cuda", max_steps=1)
    assert torch.equal(torch.rand(3, device="cuda"), drawn)
    # The first run of a process also starts CUDA
    code = """if True:
        import sys, torch, train_gpt
        torch.manual_seed(5)
        assert train_gpt.main(sys.argv[1:]) == 0
        print(torch.rand(3, device="cuda").tolist())
    """
    flags = TINY | dict(data=data, device="cuda", max_steps=1, out_dir=tmp_path / "first")
    done = run_python("-c", code, *flags_of(flags))
    assert done.stdout.endswith(f"{drawn.tolist()}\n"), done.stderr


@pytest.mark.parametrize("case", GPU_SAME)
def test_gpu_run_matches_cpu_run(case, data, noisy, plain, tmp_path, packed):
    tiny_run(tmp_path / "run", data=data, init_from=noisy, device="cuda", **GPU_SAME[case])
    assert_same_run(tmp_path / "run", plain, rtol=1e-4)
    # 16 sequences of 32 tokens make 1 << 16 numbers in an MLP's hidden layer: just enough to be
    # worth sending
    least_times = 2 * TINY["max_steps"] if "offload activations" in case else 0
    assert len(packed) >= least_times and bool(packed) == bool(least_times)
    assert set(packed) <= {OFFLOAD_MIN_NUMEL}


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


def test_gpu_offload_returns_what_it_took():
    x = torch.randn(300, 500, device="cuda")
    views = [x.view(10, 30, 500).transpose(0, 1), x[:, ::2], x[:256, :256]]
    for tensor in (x, x.bfloat16(), *views):
        packed = pack_to_host({(500, 300)}, tensor)
        assert packed is not tensor and packed[-1].is_pinned()
        back = unpack_to_device(packed)
        assert back.device == tensor.device and back.dtype == tensor.dtype
        assert torch.equal(back, tensor)
        assert back.stride() == torch.empty_strided(tensor.shape, tensor.stride()).stride()
    small, on_cpu = torch.randn(100, device="cuda"), torch.ones(300, 500)
    for tensor in (small, on_cpu, x.t(), x[:1].expand(300, 500)):
        assert pack_to_host({(500, 300)}, tensor) is tensor


@pytest.mark.parametrize("compile", ["off", "default"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gpu_weights_are_not_offloaded(dtype, compile, packed):
    """Activations of 5 x 100 tokens, 256 wide, are taken; weights are not, nor their casts."""
    with torch.device("cuda"):
        gpt = GPT(GPTConfig(vocab_size=64, n_layer=2, n_head=2, n_embd=256, seq_len=100), dtype)
    if compile != "off":
        apply_compile(gpt, compile, 1.0, torch.device("cuda"))
    for block in gpt.blocks:
        apply_offload(block)
    idx = torch.zeros((5, 100), dtype=torch.int64, device="cuda")
    gpt(idx, idx).backward()
    # The compiler pads some activations to 504 tokens
    sizes_of_weights = {p.numel() for p in gpt.parameters()}
    assert {500 * 256, 500 * 1024} <= set(packed) and not sizes_of_weights & set(packed), packed


@pytest.mark.parametrize("docs", [False, True])
@pytest.mark.parametrize("window", [0, 100])
@pytest.mark.parametrize("backend", ["flash", "cudnn", "efficient", "flex", "varlen"])
def test_gpu_attention_means_the_same(backend, window, docs):
    if backend == "flash" and (window or docs):
        pytest.skip("flash takes no mask")
    qkv = torch.randn(3, 2, 3, 256, 64, device="cuda", dtype=torch.bfloat16).requires_grad_()
    idx = torch.randint(0, 50, (2, 256), device="cuda")
    eot = 3 if docs else None
    mask = attention_mask(backend, may_attend, idx, window, eot)
    got = attention(*qkv.unbind(), mask, backend, window)
    plain_mask = attention_mask("sdpa", may_attend, idx, window, eot)
    want = attention(*qkv.float().unbind(), plain_mask, "math", window)
    assert (got - want).norm() / want.norm() < 0.01
    grad = torch.autograd.grad(got.sum(), qkv)[0]
    want_grad = torch.autograd.grad(want.sum(), qkv)[0]
    for a, b in zip(grad, want_grad):
        assert (a - b).norm() / b.norm().clamp(min=1e-3) < 0.03


def test_gpu_trains_in_bf16_fp16_and_fp8(data, tmp_path):
    flags = dict(data=data, device="cuda", compile="default", max_steps=60, loss_chunk=256)
    losses = {}
    for name in ("bf16", "fp16", "fp8"):
        flags |= dict(dtype="fp16" if name == "fp16" else "bf16", fp8=name == "fp8")
        losses[name] = tiny_run(tmp_path / name, **flags)["val_loss"]
    assert max(losses.values()) - min(losses.values()) < 0.05 and losses["bf16"] < 3.0, losses


@pytest.mark.parametrize("compiled", [False, True])
def test_gpu_fp8_matmuls_are_close(compiled):
    torch.manual_seed(0)
    wrap = torch.compile if compiled else lambda function: function
    x, w = torch.randn(3, 100, 256, device="cuda").bfloat16(), torch.randn(80, 256, device="cuda")
    x[0, :9] *= 1e6  # a scale a token keeps the others
    x[0, 9], w[3] = 0, 0
    x.requires_grad_(), w.requires_grad_()
    got, want = wrap(Fp8Linear.apply)(x, w.bfloat16()), x.float() @ w.T
    grad = torch.randn_like(want).bfloat16()
    dx, dw = torch.autograd.grad(got, (x, w), grad)
    want_dx, want_dw = torch.autograd.grad(want, (x, w), grad.float())
    # The product in e4m3; gradients of x in e5m2, of w in bf16
    for a, b, most in ((got, want, 0.06), (dx, want_dx, 0.12), (dw, want_dw, 0.06)):
        assert ((a - b).norm(dim=-1) <= most * b.norm(dim=-1)).all()


@pytest.mark.parametrize("parallel", ["auto", "fsdp"])
@pytest.mark.parametrize("attn", ["flash", "cudnn", "varlen"])
def test_gpu_samples_of_a_run_with_a_16_bit_backend(attn, parallel, data, tmp_path):
    flags = dict(data=data, device="cuda", dtype="bf16", n_embd=128, sample_every=3)
    tiny_run(tmp_path / "run", **flags, attn=attn, parallel=parallel)
    log = (tmp_path / "run" / "log.txt").read_text()
    assert log.count("--- sample at step") > 1 and "(no sample" not in log


def test_gpu_allocator_settings_are_in_force(data, tmp_path):
    code = """if True:
        import sys, torch, train_gpt
        assert train_gpt.main(sys.argv[1:]) == 0
        print(torch.cuda.memory._snapshot()["allocator_settings"]["max_split_size"])
    """
    flags = TINY | dict(data=data, out_dir=tmp_path / "run", device="cuda", max_steps=1)
    done = run_python("-c", code, *flags_of(flags), "--alloc_conf=max_split_size_mb:77")
    assert done.returncode == 0 and done.stdout.endswith(f"\n{77 * 2**20}\n"), done


STEPS = {  # flags, and how often a step waits for the device: for the gradient norm
    "eager": (dict(), 1),
    "compiled": (dict(compile="default"), 1),
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


@pytest.mark.parametrize("compile", ["off", "default"])
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_gpu_steps_that_are_not_finite_are_skipped(dtype, compile):
    state, batches = started(dtype=dtype, compile=compile)
    train_gpt.train_step(state, batches[0], 0.0)
    before = [p.detach().clone() for p in state.raw_model.parameters()]
    hook = state.raw_model.head.weight.register_hook(lambda grad: grad * math.nan)
    _, norm = train_gpt.train_step(state, batches[1], 0.0)
    hook.remove()
    assert math.isnan(norm) and all(map(torch.equal, before, state.raw_model.parameters()))
    assert train_gpt.train_step(state, batches[2], 0.0)[1] < 100 and state.step == 3


@pytest.mark.parametrize("name", ["train", "attention", "memory", "profile"])
def test_bench_on_cuda(name, tmp_path, monkeypatch):
    # Each case is a process that starts CUDA: a part of them, in two minutes for all GPU tests
    steps = {step: ladder.LADDER[step] for step in ("bf16", "compile")}
    monkeypatch.setattr(ladder, "LADDER", steps)
    monkeypatch.setattr(bench_attention, "BACKENDS", ("naive", "sdpa", "flex"))
    causal = bench_attention.VARIANTS["causal"]
    monkeypatch.setattr(bench_attention, "VARIANTS", dict(causal=causal))
    monkeypatch.setattr(bench_attention, "CUDA_LENGTHS", (512, 1024))
    report = measured(tmp_path, name, "--preset laptop --n_layer 2 --repeats 2")
    assert report["machine"]["device"].startswith("cuda")


def test_gpu_decoding_is_a_cuda_graph_and_writes_the_same_text():
    from torch._dynamo.utils import counters

    gpt = random_gpt(window="SL:5", ngram=3, std=0.3).cuda()
    prompts = [torch.arange(9), torch.arange(30, 34)]
    step = compile_decode_step(torch.device("cuda"))
    counters.clear()
    options = dict(n_tokens=40, vocab_size=65, temperature=0)
    eager = list(tokens_to_cpu(generate(gpt, prompts, **options)))
    compiled = list(tokens_to_cpu(generate(gpt, prompts, step=step, **options)))
    assert eager == compiled and counters["inductor"]["cudagraph_skips"] == 0
    # Rounding may change a letter, and all after it
    gpt = random_gpt(window="SL:5", ngram=3, std=0.3)
    on_cpu = list(tokens_to_cpu(generate(gpt, prompts, **options)))
    assert sum(a == b for a, b in zip(eager, on_cpu)) > 20


def test_gpu_int8_and_deterministic_draws():
    gpt = random_gpt(std=0.3, compute_dtype=torch.bfloat16).cuda()
    options = dict(n_tokens=40, vocab_size=65, temperature=0.8, seeds=[1])
    torch.use_deterministic_algorithms(True)
    try:
        texts = [list(tokens_to_cpu(generate(gpt, [torch.arange(9)], **options))) for _ in range(2)]
    finally:
        torch.use_deterministic_algorithms(False)
    assert texts[0] == texts[1]
    idx = torch.arange(48, device="cuda").view(2, 24)
    before = gpt(idx, idx).item()
    assert quantize(gpt)(idx, idx).item() == pytest.approx(before, rel=0.02)
    assert len(list(tokens_to_cpu(generate(gpt, [torch.arange(9)], **options)))) == 40
