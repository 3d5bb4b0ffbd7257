"""Automatic values: --dtype by speed, once; the attention; the chunks of the loss."""

import dataclasses
from types import SimpleNamespace

import pytest
import torch

import sample
from conftest import TINY, final, run_main, stream_of
from runtime import auto, device
from runtime.ranks import DistContext
from train_gpt import make_config, train

AUTO = TINY | dict(dtype="auto", max_steps=2)


@pytest.fixture
def pretend(monkeypatch):
    """A function that pretends that matmuls reach so many FLOP/s; returns the widths asked for."""
    asked = []

    def speeds(fp32: float, bf16: float) -> list:
        known = {torch.float32: fp32, torch.bfloat16: bf16}

        def matmul_flops(device, dtype, width):
            asked.append(width)
            return known[dtype]

        monkeypatch.setattr(device, "matmul_flops", matmul_flops)
        device.bf16_gain.cache_clear()
        return asked

    yield speeds
    device.bf16_gain.cache_clear()


def test_bf16_must_be_faster_on_a_cpu(pretend):
    cases = ((0.184, 0.912, "bf16"), (1, 1.2, "bf16"), (1, 1.19, "fp32"), (0.03, 0.009, "fp32"))
    for fp32, bf16, name in cases:
        pretend(fp32, bf16)
        assert device.faster_dtype("auto", torch.device("cpu"), 128) == name
    assert device.faster_dtype("bf16", torch.device("cpu"), 128) == "bf16"  # as asked for


def test_hardware_decides_on_gpus(monkeypatch, pretend):
    asked = pretend(1.0, 9.0)
    cases = (("cuda", True, "bf16"), ("cuda", False, "fp32"), ("mps", True, "fp32"))
    for kind, has_bf16, name in cases:
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda has=has_bf16, **_: has)
        assert device.faster_dtype("auto", torch.device(kind), 128) == name
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda **_: False)
    cases = (("bf16", "cuda", "fp32"), ("fp16", "cuda", "fp16"), ("bf16", "mps", "fp32"))
    for saved, kind, name in cases:
        assert device.sampling_dtype("auto", saved, 32, torch.device(kind)) == name
    # As asked for
    assert device.sampling_dtype("bf16", None, 32, torch.device("cuda")) == "bf16"
    assert not asked


@pytest.mark.parametrize(
    "flags, attn",
    [
        (dict(dtype="fp32"), "sdpa"),
        (dict(dtype="fp32", window="SL:512"), "blocked"),
        (dict(dtype="fp32", window="SL:512", seq_len=512), "sdpa"),
        (dict(dtype="bf16"), "blocked"),
        (dict(dtype="bf16", checkpointing="selective"), "sdpa"),
        (dict(dtype="bf16", seq_len=4096), "sdpa"),
        (dict(dtype="fp32", compile="default"), "blocked"),
        (dict(dtype="bf16", attn="math", loss_chunk=0), "math"),
    ],
)
def test_attention_and_chunks_suit_a_cpu(flags, attn, monkeypatch):
    cfg = make_config(**dict(window="L") | flags)

    def choose(device: str) -> dict:
        dist_ctx = DistContext(torch.device(device))
        return auto.choose_auto_values(cfg, stream_of(10**6, 1024), dist_ctx)

    # SDPA is faster
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: True)
    expected = attn
    if cfg.dtype == "bf16" and cfg.attn == "auto":
        expected = "sdpa"
    assert choose("cpu").get("attn", attn) == expected
    # SDPA is slower
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    chosen = dataclasses.replace(cfg, **choose("cpu"))
    assert (chosen.attn, chosen.loss_chunk) == (attn, flags.get("loss_chunk", 2048))
    # A GPU of 24 GB, with GPT-2's vocabulary
    gpu = SimpleNamespace(total_memory=24 * 10**9)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: gpu)
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda: 1.0)
    cfg = dataclasses.replace(cfg, vocab_size=50304)
    on_gpu = choose("cuda")
    expected = flags.get("loss_chunk", 4096 if cfg.is_compiled else 2048)
    assert "attn" not in on_gpu and on_gpu.get("loss_chunk", 0) == expected


def test_a_run_settles_its_dtype_once_and_keeps_it(data, tmp_path, pretend, capsys):
    asked, folder = pretend(0.1, 0.5), tmp_path / "run"
    summary = train(make_config(**AUTO, data=str(data), out_dir=str(folder)))
    assert summary["dtype"] == final(folder)["config"]["dtype"] == "bf16"
    # Measured once for all runs of a process
    train(make_config(**AUTO, data=str(data), out_dir=str(tmp_path / "second")))
    assert asked == [32, 32]
    assert ", bf16, compile off" in (folder / "log.txt").read_text()
    # Samples are drawn in its dtype
    for bf16, given, dtype in ((2, "auto", "bf16"), (2, "fp32", "fp32"), (0.5, "auto", "fp32")):
        pretend(1, bf16)
        model, _ = sample.load(sample.find_file(str(folder)), "cpu", given)
        assert model.compute_dtype == device.DTYPES[dtype]
    asked.clear()
    pretend(0.5, 0.1)
    argv = ["--resume", str(folder), "--max_steps"]
    assert run_main([*argv, "3"], capsys)[0] == 0
    assert final(folder)["step"] == 3 and final(folder)["config"]["dtype"] == "bf16" and not asked
    assert run_main([*argv, "4", "--dtype", "fp32"], capsys)[0] == 0
    assert final(folder)["config"]["dtype"] == "fp32"
