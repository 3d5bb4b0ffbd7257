"""Automatic values: dtype, attention, chunks of the loss; and what is computed with them."""

import time
from types import SimpleNamespace

import pytest
import torch
from torch._inductor import cpp_builder
from torch._inductor.utils import fresh_cache

import sample
from conftest import (
    add_noise,
    assert_loss_follows_its_gradient,
    built,
    compiler_works,
    final,
    stream_of,
    tiny_run,
)
from inference.decode import compile_decode_step, decode_step
from inference.generation import generate
from ops.compile import keep_gcc_from_copying
from runtime import auto
from runtime import device as device_module
from runtime.ranks import DistContext
from test_train import difference, one_step
from train_gpt import make_config, train


@pytest.fixture
def pretend(monkeypatch):
    """A function that pretends that matmuls reach so many FLOP/s; returns the widths asked for."""
    asked = []

    def speeds(fp32: float, bf16: float) -> list:
        known = {torch.float32: fp32, torch.bfloat16: bf16}

        def matmul_flops(device, dtype, width):
            asked.append(width)
            return known[dtype]

        monkeypatch.setattr(device_module, "matmul_flops", matmul_flops)
        device_module.bf16_gain.cache_clear()
        return asked

    yield speeds
    device_module.bf16_gain.cache_clear()


def test_hardware_decides_on_gpus(monkeypatch, pretend):
    asked = pretend(1.0, 9.0)
    cases = (("cuda", True, "bf16"), ("cuda", False, "fp32"), ("mps", True, "fp32"))
    for kind, has_bf16, name in cases:
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda has=has_bf16, **_: has)
        assert device_module.faster_dtype("auto", torch.device(kind), 128) == name
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda **_: False)
    cases = (("bf16", "cuda", "fp32"), ("fp16", "cuda", "fp16"), ("bf16", "mps", "fp32"))
    for saved, kind, name in cases:
        assert device_module.faster_dtype("auto", torch.device(kind), 32, saved) == name
    assert not asked


def chosen_values(cfg, device="cpu"):
    dist_ctx = DistContext(torch.device(device))
    return auto.choose_auto_values(cfg, stream_of(10**6, 1024), dist_ctx)


@pytest.mark.parametrize(
    "flags, with_amx, without_amx",
    [
        (dict(dtype="fp32"), "sdpa", "sdpa"),
        (dict(dtype="fp32", window="SL:512"), "blocked", "blocked"),
        (dict(dtype="bf16"), "sdpa", "blocked"),
        (dict(dtype="bf16", checkpointing="selective"), "sdpa", "sdpa"),
        (dict(dtype="bf16", seq_len=4096), "sdpa", "sdpa"),
        (dict(dtype="fp32", compile="default"), "blocked", "blocked"),
        (dict(dtype="bf16", attn="math"), "math", "math"),
    ],
)
def test_attention_suits_a_cpu(flags, with_amx, without_amx, monkeypatch):
    """Where a CPU has AMX, SDPA is faster in bf16."""
    cfg = make_config(**dict(window="L") | flags)
    for has_amx, attn in ((True, with_amx), (False, without_amx)):
        monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda has=has_amx: has)
        chosen = chosen_values(cfg)
        assert (chosen.attn, chosen.loss_chunk) == (attn, 2048)


@pytest.mark.parametrize(
    "flags, loss_chunk",
    [({}, 2048), (dict(compile="default"), 4096), (dict(loss_chunk=0), 0)],
)
def test_chunks_suit_a_gpu(flags, loss_chunk, monkeypatch):
    """Of 24 GB, with GPT-2's vocabulary."""
    gpu = SimpleNamespace(total_memory=24 * 10**9)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: gpu)
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda: 1.0)
    chosen = chosen_values(make_config(dtype="fp32", vocab_size=50304, **flags), "cuda")
    assert (chosen.attn, chosen.loss_chunk) == ("sdpa", loss_chunk)


def test_loading_code_from_a_disk_is_not_measured(monkeypatch):
    n_calls = 0

    def slow_at_first(x, w, matmul=torch.Tensor.__matmul__):
        nonlocal n_calls
        n_calls += 1
        if n_calls == 1:
            time.sleep(0.2)  # longer than is measured
        return matmul(x, w)

    monkeypatch.setattr(torch.Tensor, "__matmul__", slow_at_first)
    cpu, flop = torch.device("cpu"), 2e6
    assert device_module.matmul_flops(cpu, torch.float32, 64, flop) > 2 * flop / 0.2


def test_a_run_settles_its_dtype_once_and_keeps_it(data, tmp_path, pretend):
    asked, folder = pretend(0.1, 0.5), tmp_path / "run"
    summary = tiny_run(folder, data=data, dtype="auto", max_steps=2)
    assert summary["dtype"] == final(folder)["config"]["dtype"] == "bf16"
    assert asked == [32, 32]
    # Samples are drawn in its dtype
    for bf16, given, dtype in ((2, "auto", "bf16"), (2, "fp32", "fp32"), (0.5, "auto", "fp32")):
        pretend(1, bf16)
        model, _ = sample.load(sample.find_file(str(folder)), "cpu", given)
        assert model.compute_dtype == device_module.DTYPES[dtype]
    asked.clear()
    pretend(0.5, 0.1)
    assert train(make_config(resume=str(folder), max_steps=3))["dtype"] == "bf16" and not asked
    again = make_config(resume=str(folder), max_steps=4, dtype="fp32")
    assert train(again)["dtype"] == "fp32"


# --------------------------------------------------------------------------------------------------
# Every dtype and attention that may be chosen computes what fp32 does, compiled too

# seq_len, window, n_embd, n_head. Compiling one takes 20 seconds: two, and fp32 in other tests
SHAPES = [
    (64, "L", 64, 1),
    (250, "S:100", 128, 2),
    (256, "L", 256, 2),
    (256, "L", 128, 1),
    (512, "S:128", 128, 2),
    (2048, "S:512", 64, 1),
]
COMPILED = {
    (64, "L", 64, 1): dict(dtype="bf16", attn="sdpa", compile="default"),
    (250, "S:100", 128, 2): dict(dtype="fp16", attn="blocked", compile="default"),
}
LIMITS = dict(fp32=1e-4, fp16=0.01, bf16=0.05)  # an error's norm, of the value's


def computed(shape: tuple, **flags) -> dict:
    """The loss and all gradients of a step from random weights."""
    seq_len, window, n_embd, n_head = shape
    batch = torch.randint(257, (1, seq_len + 1), generator=torch.Generator().manual_seed(2))
    flags |= dict(seq_len=seq_len, window=window, n_embd=n_embd, n_head=n_head, n_layer=1)
    flags |= dict(batch_tokens=seq_len, micro_batch=1, loss_chunk=seq_len, ngram_dropout=0.0)
    return one_step(batch, **flags, grad_clip=0.0)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_gradients_are_those_of_fp32(shape):
    expected = computed(shape, dtype="fp32", attn="math")
    cases = [dict(dtype=dtype, attn=attn) for dtype in LIMITS for attn in ("sdpa", "blocked")]
    if shape in COMPILED and compiler_works():
        cases.append(COMPILED[shape])
    for flags in cases:
        found = computed(shape, **flags)
        assert not difference(found, expected, rtol=LIMITS[flags["dtype"]]), flags


@pytest.mark.parametrize("checkpointing", ["none", "full"])
def test_compiled_dropout_has_one_mask(checkpointing):
    if not compiler_works():
        pytest.skip("torch.compile finds no working compiler here")
    flags = dict(compile="default", checkpointing=checkpointing, dropout=0.5, dtype="fp32")
    assert_loss_follows_its_gradient(built(**flags, n_layer=2, attn="math").raw_model)


def test_gcc_deletes_no_stores_before_copies(monkeypatch):
    """Transposed tiles of 16 bits were random with AVX-512."""
    if not compiler_works():
        pytest.skip("torch.compile finds no working compiler here")
    commands = []
    plain = cpp_builder.run_compile_cmd

    def run(cmd_line, cwd):
        commands.append(cmd_line)
        plain(cmd_line, cwd)

    monkeypatch.setattr(cpp_builder, "run_compile_cmd", run)

    def function(x):
        g = x.mT
        return torch.cat((g[..., :32] * 2, g[..., 32:]), -1)

    keep_gcc_from_copying()
    with fresh_cache():
        x = torch.randn(8, 128, 256).bfloat16().requires_grad_()
        ours, theirs = torch.compile(function)(x), function(x)
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
        ours, theirs = (torch.autograd.grad(out, x, function(x)) for out in (ours, theirs))
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
        compare_decoding()
    flags = ["-fno-tree-loop-distribute-patterns" in command for command in commands]
    assert len(flags) >= 3 and set(flags) == {cpp_builder.is_gcc()}


@torch.no_grad()
def compare_decoding() -> None:
    """Most tokens of a compiled step in bf16 are those of an eager one."""
    prompts = torch.randint(257, (64, 20), generator=torch.Generator().manual_seed(3))
    model = add_noise(built(dtype="bf16", window="S:9", n_layer=1).raw_model).eval()
    options = dict(n_tokens=2, vocab_size=257, temperature=0)
    eager, compiled = (
        torch.stack([*generate(model, prompts, step=step, **options)])
        for step in (decode_step, compile_decode_step(model))
    )
    assert (eager == compiled)[1].float().mean() > 0.9
