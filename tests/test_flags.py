"""Flags: mistakes told in one sentence, notes of flags without effect, help and README against the code."""

import dataclasses
import functools
import json
import math
import os
import platform
import re
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from torch.distributed.run import get_args_parser

import bench
import export
import sample
import train_gpt
from benchmarks.memory import card_table, plan_cards, planned_model
from conftest import ROOT, TINY, compiler_works, final, flags_of, make_data, run_main, run_python
from data import prepare
from data.shards import UserError
from model import optimizer_groups
from runtime import checks, launch, memory, start
from runtime.checkpoint import content_hash
from runtime.derived import seqs_per_rank
from runtime.footprint import memory_formula
from runtime.memory import find_max_micro_batch, fit_loss_chunk, fit_memory, largest_loss_chunk
from runtime.ranks import DistContext
from runtime.trials import train_trials
from train_gpt import make_config, train

# ---------------------------------------------------------------------------------------------------------------------
# The user's mistakes: one sentence, exit code 2


@pytest.mark.parametrize(
    "flags, sentence",
    [
        (["--n_layers", "3"], "unknown flag --n_layers; did you mean n_layer"),
        (["--n_layer", "3.5"], "invalid int value: '3.5'"),
        (["--preset", "laptpo"], "invalid choice: 'laptpo'"),
        (["--batch_tokens", "500"], "not a multiple of --seq_len 32; use --batch_tokens 512"),
        (["--micro_batch", "5"], "does not divide the 16 sequences .* use --micro_batch 4"),
        (["--n_head", "3"], "cannot be cut into 3 heads"),
        (["--window", "SLX"], "window is 'SLX'; expected letters S and L"),
        (["--warmup_frac", "0.7", "--cooldown_frac", "0.7"], "add up to more than 1"),
        (["--muon_lr", "nan"], "--muon_lr is nan; expected a finite number"),
        (["--max_steps", "0"], "--max_steps is 0; expected a finite number of at least 1"),
        (["--bf16", "--dtype", "fp32"], "contradict each other"),
        (["--ngram_dropout", "0.3", "--ngram", "0"], "n-grams to drop"),
        (["--ngram_dropout", "1", "--ngram", "3"], "expected a probability below 1"),
        (["--resume", "--init_from", "x.pt"], "contradict each other"),
        (["--resume"], "has no valid checkpoint; give a run's folder that has one, or another --out_dir to start"),
        (["--wandb", "yes"], "invalid true or false value: 'yes'"),
        (["--resume", "gone.pt"], "no checkpoint gone.pt"),
        (["--attn", "flex"], "flex cannot train here: FlexAttention has a backward pass on CUDA only; use --attn sdpa"),
        (["--attn", "varlen"], "--attn varlen runs on CUDA only, not on cpu; use auto, blocked or sdpa"),
        (["--attn", "cudnn"], "--attn cudnn runs on CUDA only"),
        (["--attn", "fa3"], "--attn fa3 runs on CUDA only"),
        (["--fp8"], "--fp8 needs a CUDA device of compute capability 8.9 or newer"),
        (["--checkpointing", "some"], "expected auto, none, selective, full or a number between 0 and 1"),
        (["--checkpointing", "1.5"], "expected auto, none, selective, full or a number between 0 and 1"),
        (["--checkpointing", "0.5"], "is a budget for the compiler; add --compile"),
        (["--alloc_conf", "expandable_segment:True"], "no setting .*; did you mean expandable_segments"),
        (["--alloc_conf", "backend:cudaMallocAsync"], "cannot set backend, which is fixed when torch is imported"),
        (["--alloc_conf", "max_split_size_mb"], "no setting 'max_split_size_mb'.*expected key:value"),
        (
            ["--compile", "reduce-overhead", "--parallel", "fsdp"],
            "records CUDA graphs, which FSDP's moving weights break",
        ),
        (["--compile", "max-autotune", "--deterministic"], "picks kernels by timing"),
        (["--profile", "50"], "--profile 50 starts after 3 steps; use --max_steps 53 or more"),
        (["--seq_len=32", "--doc_align", "--vocab_size=300", "--data", "NO_DOCS"], "finds no document"),
        (["--vocab_size", "200"], "less than the 257 of"),
        (
            ["--seq_len=8192", "--batch_tokens=8192", "--micro_batch=1"],
            "has 4333 tokens, too few .* --seq_len below 4333",
        ),
        (["--data", "/nowhere"], "/nowhere.*python data/prepare.py"),
    ],
)
def test_mistakes_end_with_a_sentence(flags, sentence, data, tmp_path, capsys):
    if "NO_DOCS" in flags:
        flags = [str(make_data(tmp_path / "no_docs", eot=False)) if flag == "NO_DOCS" else flag for flag in flags]
    code, err = run_main(flags_of(TINY | dict(data=data, out_dir=tmp_path / "run")) + flags, capsys)
    assert code == 2 and re.search(sentence, err) and err.startswith("error: ") and err.count("\n") == 1, err
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_a_mistake_ends_a_process_with_exit_code_2():
    done = run_python("train_gpt.py", "--max_step", "3")
    assert done.returncode == 2 and done.stderr == "error: unknown flag --max_step; did you mean max_steps?\n"


def test_cuda_asked_for_and_absent(data, tmp_path, capsys):
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    code, err = run_main(["--data", str(data), "--device", "cuda"], capsys)
    assert code == 2 and "PyTorch sees no CUDA device here; use --device cpu" in err


def test_cuda_graphs_refuse_what_moves(pretended):
    for flags in (dict(offload="activations"), dict(attn="varlen", doc_mask=True, bf16=True)):
        with pytest.raises(UserError, match="records CUDA graphs"):
            check_hardware("cuda", compile="reduce-overhead", **flags)


def own_lines(stderr: str) -> str:
    """The one line of our own on standard error: PyTorch's compiler may log warnings before it."""
    [line] = [line for line in stderr.splitlines() if not re.match(r"W\d{4} .*torch/", line)]
    return line


def test_no_compiler_is_said(data, tmp_path):
    done = run_python(
        "train_gpt.py",
        *flags_of(TINY | dict(data=data, out_dir=tmp_path / "run")),
        "--compile",
        env=os.environ | {"CXX": "/no/such/compiler"},
    )
    assert done.returncode == 2 and "--compile finds no C++ compiler" in own_lines(done.stderr)


def fussy_compiler(folder):
    """A C++ compiler that knows its version, and refuses to compile anything."""
    path = folder / "g++"
    path.write_text('#!/bin/sh\n[ "$*" = --version ] && exec g++ --version\necho "x: error: -mnew?" >&2\nexit 1\n')
    path.chmod(0o755)
    return path


def test_compiler_that_fails_is_said(data, tmp_path):
    if not compiler_works():
        pytest.skip("torch.compile finds no working compiler here")
    flags = TINY | dict(data=data, out_dir=tmp_path / "run", n_layer=1, micro_batch=1, batch_tokens=32)
    done = run_python(
        "train_gpt.py",
        *flags_of(flags),
        "--compile",
        env=os.environ | {"CXX": str(fussy_compiler(tmp_path)), "TMPDIR": str(tmp_path)},
    )
    said = own_lines(done.stderr)
    assert done.returncode == 1 and "the C++ compiler could not compile" in said and "-mnew?" in said


# ---------------------------------------------------------------------------------------------------------------------
# The tables of runtime/checks.py: a case for every row, of which no earlier row says anything

FLAG_CASES = (
    dict(bf16=True, dtype="fp16"),
    dict(warmup_frac=0.5, cooldown_frac=0.6),
    dict(n_head=5),
    dict(batch_tokens=1000),
    dict(ngram_dropout=0.5, ngram=0),
    dict(checkpointing="1.0"),
    dict(checkpointing="0.5"),
    dict(compile="max-autotune", parallel="fsdp"),
    dict(compile="max-autotune", deterministic=True),
    dict(profile=9, max_steps=9),
    dict(trials=2, target_val_loss=3.0),
    dict(trials=2, minutes=5.0),
    dict(trials=2, resume="newest"),
    dict(TORCHELASTIC_MAX_RESTARTS="3"),
    dict(init_from="gpt2-xl"),
    dict(init_from="scratch"),
    dict(init_partial=True),
    dict(schedule_from="here"),
    dict(schedule_from="1.5"),
    dict(resume="auto", init_from="x.pt"),
)
DEVICE_CASES = (
    ("cpu", dict(attn="flex")),
    ("cpu", dict(attn="varlen")),
    ("cuda", dict(attn="flash", doc_mask=True)),
    ("cuda", dict(attn="cudnn", dtype="fp32")),
    ("t4", dict(attn="flash", dtype="fp16")),
    ("cpu", dict(fp8=True)),
    ("cuda", dict(fp8=True, dtype="fp16")),
    ("mps", dict(parallel="hsdp")),
    ("cuda", dict(deterministic=True)),
    ("cuda", dict(attn="flex", checkpointing="selective")),
    ("cuda", dict(compile="reduce-overhead", offload="activations")),
)
NO_EFFECT_CASES = (
    ("cpu", dict(alloc_conf="max_split_size_mb:64")),
    ("cuda", dict(alloc_conf="max_split_size_mb:64")),
    ("cpu", dict(offload="optimizer")),
    ("cpu", dict(bucket_cap_mb=50)),
    ("cpu", dict(parallel="ddp")),
    ("cpu", dict(shard_size=2)),
    ("cpu", dict(grad_comm="bf16")),
    ("cpu", dict(ngram=1)),
    ("cpu", dict(window="SL:1024")),
    ("cpu", dict(ngram_rows=99, ngram=0)),
    ("cpu", dict(optimizer="adamw", muon_lr=0.5)),
    ("cpu", dict(preset="gpt2-small")),
    ("t4", {}),
    ("t4", dict(dtype="bf16")),
    ("cuda", dict(doc_mask=True)),
)


def unchecked(**flags) -> train_gpt.Config:
    """A Config with these values, whatever the rules say of them."""
    return train_gpt.Config(**train_gpt.PRESETS["laptop"] | flags)


def check_hardware(device: str, **flags) -> list[str]:
    cfg, preset = make_config(**flags), make_config(preset=flags.get("preset", "laptop"))
    windows = train_gpt.gpt_config(cfg, 257).layer_windows()
    with pytest.MonkeyPatch.context() as patch:
        if device == "t4":
            patch.setattr(torch.cuda, "get_device_capability", lambda *_: (7, 5))
            patch.setattr(torch.cuda, "is_bf16_supported", lambda **_: False)
            device = "cuda"
        return start.check_hardware(cfg, preset, DistContext(torch.device(device)), windows)


@pytest.fixture
def pretended(monkeypatch):
    """CUDA and MPS devices that are good enough for everything, and only seem to be there; "t4" is an older GPU."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda **_: True)
    monkeypatch.setattr(checks, "check_compiler", lambda device: None)
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "")


def test_every_rule_about_flags_is_told(monkeypatch):
    assert len(FLAG_CASES) == len(checks.FLAG_RULES)
    for case, (_, text) in zip(FLAG_CASES, checks.FLAG_RULES):
        flags = {name: value for name, value in case.items() if name.islower()}
        with pytest.raises(UserError) as caught, monkeypatch.context() as patch:
            for name in case.keys() - flags.keys():  # set in the environment
                patch.setenv(name, case[name])
            make_config(**flags)
        assert str(caught.value) == checks.sentence_of(text, unchecked(**flags)), flags
        check_sentence(str(caught.value))


def test_every_rule_about_devices_is_told(pretended):
    assert len(DEVICE_CASES) == len(checks.DEVICE_RULES)
    for (device, flags), (_, text) in zip(DEVICE_CASES, checks.DEVICE_RULES):
        cfg = make_config(**flags)
        with pytest.raises(UserError) as caught:
            check_hardware(device, **flags)
        dtype = "bf16" if cfg.dtype == "auto" else cfg.dtype
        assert str(caught.value) == checks.sentence_of(text, cfg, SimpleNamespace(type=device, dtype=dtype)), flags
        check_sentence(str(caught.value))
    for attn in ("cudnn", "varlen"):  # which may be cuDNN's
        with pytest.raises(UserError, match="--deterministic on CUDA needs"):
            check_hardware("cuda", deterministic=True, micro_batch=4, attn=attn)
    assert check_hardware("cuda", deterministic=True, micro_batch=4) == []


def test_every_flag_without_effect_is_told(pretended):
    assert len(NO_EFFECT_CASES) == len(checks.NO_EFFECT)
    for (device, flags), (_, text) in zip(NO_EFFECT_CASES, checks.NO_EFFECT):
        notes = check_hardware(device, **flags)
        assert notes == [checks.sentence_of(text, make_config(**flags), SimpleNamespace(type=device))], flags
        check_sentence(notes[0])
    for device in ("cpu", "cuda", "mps"):
        assert check_hardware(device) == []


def check_sentence(text: str) -> None:
    """Says what was found and what to do, without a value that was not filled in."""
    assert 20 < len(text) < 300 and not re.search(r"[{}\n]|object at|<function", text), text


def test_flags_without_effect_are_named(data, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "")
    flags = dict(offload="activations", alloc_conf="max_split_size_mb:64", max_steps=1, out_dir=str(tmp_path / "run"))
    flags |= dict(bucket_cap_mb=5, ngram_rows=65, optimizer="adamw")
    train(make_config(**TINY | dict(data=str(data)) | flags))
    out = capsys.readouterr().out
    assert "--offload activations has no effect on cpu" in out and "--alloc_conf has no effect on cpu" in out
    assert "--bucket_cap_mb 5 has no effect" in out and "--ngram_rows 65 has no effect without n-grams" in out
    assert "--muon_lr 0.02 has no effect with --optimizer adamw" in out
    assert "attention auto (flash_attention), matmul precision highest" in out


# ---------------------------------------------------------------------------------------------------------------------
# What flags become


def test_learning_rates_by_rule():
    def rates(**flags):
        return train_gpt.learning_rates(make_config(**flags))

    assert rates(preset="gpt2-small") == (0.02, 0.006)  # the NanoGPT speedrun's
    assert rates() == pytest.approx((0.03, 0.012), rel=0.1)  # what was tuned by hand for laptop
    assert rates(optimizer="adamw")[1] == pytest.approx(0.008, rel=0.05)  # the best of 0.002, 0.004, 0.008, 0.016
    assert rates(preset="gpt2-small", optimizer="adamw")[1] == 0.002
    assert rates(muon_lr=0.5, adam_lr=0.1) == (0.5, 0.1) and rates(optimizer="adamw", adam_lr=0.1)[1] == 0.1
    for preset in train_gpt.PRESETS:  # within half an octave of the speedrun's
        muon_lr, adam_lr = rates(preset=preset)
        assert not preset.startswith("gpt2") or 0.014 < muon_lr <= 0.0201 and 0.0042 < adam_lr <= 0.006
    muon, adam = zip(*(rates(n_embd=n_embd, max_steps=100 * n_embd) for n_embd in (64, 128, 256, 512)))
    assert sorted(muon, reverse=True) == list(muon) and sorted(adam, reverse=True) == list(adam)


def test_the_rule_s_learning_rates_are_kept(data, tmp_path, capsys):
    """Whatever --max_steps a resumed run gets, and also those of runs from before the rule."""
    flags = {k: v for k, v in TINY.items() if k not in ("muon_lr", "adam_lr")} | dict(data=str(data))
    train(make_config(**flags, out_dir=str(tmp_path / "run")))
    rates = train_gpt.learning_rates(make_config(**flags))
    kept = final(tmp_path / "run")
    assert (kept["config"]["muon_lr"], kept["config"]["adam_lr"]) == rates
    assert f"muon_lr {rates[0]:g}, adam_lr {rates[1]:g}" in capsys.readouterr().out
    again = make_config(resume="newest", out_dir=str(tmp_path / "run"), max_steps=4000)
    assert train_gpt.learning_rates(again) == rates
    trials = flags | dict(out_dir=str(tmp_path / "trials"), trials=2, resume="auto", max_steps=6, save_every=3)
    for _ in range(3):  # new, finished, and the second trial torn
        train_trials(make_config(**trials), train)
        for newest in (tmp_path / "trials" / "seed_1").glob("*6*"):
            newest.unlink()
        (tmp_path / "trials" / "seed_1" / "summary.json").unlink()
    kept["config"] |= dict(muon_lr=0.02, adam_lr=0.0)
    kept["sha256"] = content_hash(kept)
    torch.save(kept, tmp_path / "ckpt_20.pt")
    assert train_gpt.learning_rates(make_config(resume=str(tmp_path / "ckpt_20.pt"))) == (0.02, 0.006)


def test_micro_batch_is_predicted_verified_and_halved():
    """The decision, with measurements made up."""
    asked = []

    def peak(m, fixed=10, each=5, worse_from=10**9):
        asked.append(m)
        return fixed + each * m if m < worse_from else math.inf

    assert find_max_micro_batch(32, peak, 100) == 16 and asked == [1, 2, 16]
    assert find_max_micro_batch(32, lambda m: peak(m, worse_from=12), 100) == 8  # out of memory at 16
    assert find_max_micro_batch(12, peak, 45) == 6
    assert find_max_micro_batch(7, peak, 45) == 7 and find_max_micro_batch(7, peak, 40) == 1
    assert find_max_micro_batch(1, peak, 100) == 1
    assert find_max_micro_batch(32, lambda m: 99 * min(m, 2) + 10 * m, 500) == 16  # a chunk of the loss is full
    assert find_max_micro_batch(12, lambda m: 10 * m if m < 2 else math.inf, 45) == 1
    asked.clear()
    chunk = functools.partial(peak, fixed=0)  # the loss chunk is full at 8 sequences

    def full_at_8(m):
        return chunk(m) + 20 * min(m, 8)

    assert find_max_micro_batch(64, full_at_8, 340) == 8 and asked == [1, 2, 8]
    asked.clear()
    assert find_max_micro_batch(64, full_at_8, 340, formula=lambda m: 4 * m + 20 * min(m, 8)) == 32
    assert asked == [1, 2, 32]
    assert find_max_micro_batch(64, full_at_8, 340, most=4) == 4
    asked.clear()
    assert find_max_micro_batch(64, chunk, 340, most=1) == 1 and asked == [1]
    assert find_max_micro_batch(6, lambda m: peak(m, worse_from=3), 45) == 2  # what was measured to fit stays
    asked.clear()
    assert find_max_micro_batch(512, peak, 21) == 2 and asked == [1, 2]
    with pytest.raises(UserError, match="one sequence needs .* GiB"):
        find_max_micro_batch(32, peak, 12)


# ---------------------------------------------------------------------------------------------------------------------
# README and --help agree with the code


def help_of(main, capsys) -> str:
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    assert not ended.value.code
    return capsys.readouterr().out


def test_checkpointing_is_what_memory_makes_necessary(monkeypatch):
    ctx = DistContext(torch.device("cuda"))
    monkeypatch.setattr(memory, "fit_micro_batch", lambda f, *_: seqs_per_rank(f, 1))
    monkeypatch.setattr(memory, "apply_compile", lambda *_, **__: None)

    def chosen(gb: float, ctx=ctx, **flags) -> tuple[str, int]:
        monkeypatch.setattr(memory, "available_memory", lambda: memory.USABLE * gb * 10**9)
        cfg = make_config(preset="gpt2-medium", dtype="bf16", vocab_size=50304, device="cuda", **flags)
        gpt, _ = planned_model(cfg)
        gpt.loss_chunk = largest_loss_chunk(50304, int(gb * 10**9))
        groups = optimizer_groups(gpt, cfg.optimizer, 0.02, 0.006, 0.05)
        n_seqs = fit_memory(cfg, gpt, groups, ctx)
        assert len({block.checkpointing for block in gpt.blocks}) == 1
        return gpt.blocks[0].checkpointing, n_seqs

    assert chosen(16, compile="default") == ("none", 512)
    assert chosen(8, compile="default") == ("full", 512)
    assert chosen(10, compile="default") == ("selective", 512)
    assert chosen(8, compile="default", offload="optimizer")[0] == "selective"
    assert chosen(16, micro_batch=4) == ("none", 4) and chosen(16, micro_batch=8) == ("full", 8)
    assert chosen(8, checkpointing="selective")[0] == "selective"
    assert chosen(8, offload="activations")[0] == "none"
    assert chosen(10, compile="default", parallel="fsdp")[0] == "selective"
    assert chosen(8, checkpointing="0.5", compile="default")[0] == "none"
    assert chosen(8, DistContext(torch.device("cpu"))) == ("none", 8)


def test_ddp_holds_gradients_twice():
    """In its buckets, and from the second micro-step on beside them."""
    cfg = make_config(preset="gpt2-small", dtype="bf16", device="cuda")
    gpt, _ = planned_model(cfg)
    groups = optimizer_groups(gpt, cfg.optimizer, 0.02, 0.006, 0.05)
    n_bytes = 4 * sum(p.numel() for p in gpt.parameters())
    assert memory.update_bytes(cfg, groups, 2) == memory.update_bytes(cfg, groups, 1) + n_bytes
    offloaded, sharded = dataclasses.replace(cfg, offload="optimizer"), dataclasses.replace(cfg, parallel="fsdp")
    assert memory.update_bytes(offloaded, groups, 2) == n_bytes and memory.update_bytes(offloaded, groups, 1) == 0
    assert memory.update_bytes(sharded, groups, 2) == memory.update_bytes(cfg, groups, 1)


@pytest.mark.parametrize("flags, most", [(dict(), 512), (dict(offload="activations"), 4), (dict(attn="flex"), 512)])
def test_micro_batch_is_measured_on_what_training_uses(flags, most, monkeypatch):
    """What a probe keeps: no compilation of another size, and of activations in host memory no more than are of use."""
    probed, resets = [], []
    monkeypatch.setattr(memory, "dummy_micro_step", lambda model, n, *_, **__: probed.append(n))
    monkeypatch.setattr(torch._dynamo, "reset", lambda: resets.append(len(probed)))
    monkeypatch.setattr(memory, "available_memory", lambda: 1e12)
    for name in ("empty_cache", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 10**9 * probed[-1])
    cfg = make_config(preset="gpt2-small", dtype="bf16", device="cuda", vocab_size=50304, **flags)
    gpt, _ = planned_model(cfg)
    assert fit_memory(cfg, gpt, [], DistContext(torch.device("cuda"))) == most
    assert probed[-1] == most and len(resets) == (1 + len(probed) if "attn" in flags else 0)
    assert probed[:2] == ([1, 1] if "attn" in flags else [1, 2])  # the first is what the compiler tried


@pytest.mark.parametrize(
    "name, peak",
    [
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H100 NVL", 835),
        ("NVIDIA H200", 989),
        ("NVIDIA GH200 480GB", None),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA A10G", 70),
        ("NVIDIA A10", 125),
        ("NVIDIA RTX A1000", None),
        ("NVIDIA RTX A6000", 155),
        ("NVIDIA L40S", 362),
        ("NVIDIA L4", 121),
        ("NVIDIA GeForce RTX 4090", 165),
        ("NVIDIA GeForce RTX 4090 D", None),
        ("NVIDIA GeForce RTX 5090 D v2", None),
        ("NVIDIA GeForce RTX 3090 Ti", None),
        ("NVIDIA A10-4Q", None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
    ],
)
def test_a_peak_is_of_the_device_by_that_name(name, peak, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    assert launch.peak_flops(torch.device("cuda"), "bf16") == (peak and 1e12 * peak)


def test_memory_is_counted_of_edited_models_too():
    """Another head, and embeddings that are not trained: the formula asks for the shape, not for modules."""
    gpt, optimizer_bytes = planned_model(make_config(preset="gpt2-small", dtype="bf16", device="cuda"))
    gpt.loss_chunk = 2048

    def total():
        return sum(memory_formula(gpt, "full", 1, 1024, optimizer_bytes, on_cpu=False, compiled=True).values())

    before = total()
    gpt.head = torch.nn.Sequential(gpt.head)
    assert total() == before
    gpt.wte.requires_grad_(False)
    assert total() < before


def test_checkpointing_goes_on_where_measuring_finds_no_room(monkeypatch):
    tried, cuda = [], DistContext(torch.device("cuda"))

    def fit(f, model, *_):
        tried.append(model.blocks[0].checkpointing)
        if tried[-1] != "full":
            raise memory.DoesNotFit("one sequence needs more")
        return 2

    monkeypatch.setattr(memory, "fit_micro_batch", fit)
    monkeypatch.setattr(memory, "available_memory", lambda: 1e12)
    cfg = make_config(preset="gpt2-small", dtype="bf16", device="cuda", vocab_size=50304)
    gpt, _ = planned_model(cfg)
    assert fit_memory(cfg, gpt, [], cuda) == 2 and tried == ["none", "selective", "full"]
    tried.clear()
    with pytest.raises(UserError, match="one sequence"):
        fit_memory(dataclasses.replace(cfg, checkpointing="selective"), gpt, [], cuda)
    assert tried == ["selective"]


def test_docs_say_what_presets_train_with():
    assert card_table(plan_cards()) in (ROOT / "docs" / "flags.md").read_text(encoding="utf-8")


def test_loss_chunk_by_device(monkeypatch):
    cpu, cuda, gib = torch.device("cpu"), torch.device("cuda"), 10**9
    for total, vocab_size, chunk in (
        (8, 50304, 4096),
        (16, 50304, 8192),
        (24, 50304, 16384),
        (141, 50304, 16384),
        (141, 320, 16384),
        (24, 2**20, 2048),
        (2, 50304, 2048),
    ):
        properties = SimpleNamespace(total_memory=total * gib)
        monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda: 1.0)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda *_, found=properties: found)
        assert fit_loss_chunk(-1, vocab_size, cuda, compiled=True) == chunk, total
        assert fit_loss_chunk(-1, 4 * vocab_size, cuda, compiled=True) == fit_loss_chunk(-1, vocab_size, cuda, False)
    assert [fit_loss_chunk(chunk, 50304, cuda, True) for chunk in (0, 100)] == [0, 100]
    assert [fit_loss_chunk(-1, size, cpu, False) for size in (64, 320, 1024, 50304)] == [2048, 2048, 512, 2048]
    with pytest.raises(UserError, match="use 42689 or less, or -1"):
        fit_loss_chunk(50000, 50304, cpu, False)
    assert fit_loss_chunk(42689, 50304, cpu, False) * 50304 < 2**31


def test_help_lists_every_flag_with_its_default(capsys):
    text = help_of(train_gpt.main, capsys)
    for f in dataclasses.fields(train_gpt.Config):
        assert f"--{f.name} " in text
        value = getattr(train_gpt.Config(**train_gpt.preset_flags({})), f.name)
        assert value == "" or re.search(rf"--{f.name} .*?\[{re.escape(str(value).lower())}\]", text, re.S | re.I), (
            f.name
        )


def test_readme_names_real_commands_and_flags(capsys):
    known = {f.name for f in dataclasses.fields(train_gpt.Config)}
    for script in (sample, prepare, bench, export):
        known |= set(re.findall(r"--(\w+)", help_of(script.main, capsys)))
    torchrun = [option for action in get_args_parser()._actions for option in action.option_strings]
    known |= {re.match(r"-*(\w+)", option)[1] for option in torchrun} | {"shutdown"}
    known |= {"nodes", "ntasks", "gpus", "cpus", "time", "signal", "kill", "pid"}  # of Slurm and py-spy
    known |= {"batch_size", "start"}  # of nanoGPT
    readme = (ROOT / "README.md").read_text()
    for page in (readme, *(path.read_text() for path in (ROOT / "docs").glob("*.md"))):
        assert set(re.findall(r"(?<![\w-])--(\w+)", page)) - known == set()
        for script, flags in re.findall(r"^(?:torchrun .*?|python )((?:\w+/)*\w+\.py)(.*)$", page, re.M):
            assert (ROOT / script).exists(), script
            if script == "bench.py":
                assert all(f"\n{name} " in bench.__doc__ for name in re.findall(r"^ (\w+)", flags))
            if script == "train_gpt.py":
                make_config(**train_gpt.parse_args(flags.split("#")[0].split()))
    assert "python -m pytest" in readme


def test_script_of_the_first_gpu_run_names_real_commands(tmp_path):
    """It is run with programs that only note how they are called."""
    page = (ROOT / "docs" / "gpu_first_run.md").read_text(encoding="utf-8")
    (script,) = re.findall("^```bash\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    assert max(map(len, page.splitlines())) <= 120
    for name in ("python", "torchrun", "nvidia-smi"):
        (tmp_path / name).write_text(f'#!/bin/sh\necho {name} "$@" >> {tmp_path}/calls\n')
        (tmp_path / name).chmod(0o755)
    env = os.environ | dict(PATH=f"{tmp_path}:{os.environ['PATH']}")
    (tmp_path / "nanoGPT" / "config").mkdir(parents=True)
    command = ["bash", "-c", script, "first_run", tmp_path / "out", tmp_path / "nanoGPT"]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    calls = [line.split() for line in (tmp_path / "calls").read_text().splitlines()]
    assert done.returncode == 0 and not done.stderr, done.stderr
    assert done.stdout.count("exit code 0") == 2 * len(calls) > 50  # as it goes, and all at the end
    (tmp_path / "calls").unlink()
    subprocess.run(command, env=env | dict(ONLY="20 35"), capture_output=True, check=True)
    chosen = [line.split() for line in (tmp_path / "calls").read_text().splitlines()]
    assert len(chosen) == 5 and all(words in calls for words in chosen)
    for program, *words in calls:
        if "train_gpt.py" in words:
            make_config(**train_gpt.parse_args(words[words.index("train_gpt.py") + 1 :]))
        elif words[0] == "bench.py":
            bench.parse(words[1:])
        else:
            assert program == "nvidia-smi" or words[0] in ("-c", "-m", "train.py") or (ROOT / words[0]).exists(), words


# ---------------------------------------------------------------------------------------------------------------------
# What scripts and imports do to a process

SETTINGS = dict(GOMP_SPINCOUNT="2000", TORCHINDUCTOR_VEC_ISA_OK="1", AOT_INDUCTOR_ENABLE_LINE_TABLES="0")


@pytest.mark.parametrize("script", ["train_gpt.py", "bench.py", "bench.py infer", "sample.py", "export.py"])
@pytest.mark.parametrize(
    "given",
    [{}, dict(GOMP_SPINCOUNT="77", AOT_INDUCTOR_ENABLE_LINE_TABLES="1"), dict(OMP_WAIT_POLICY="passive")],
)
def test_scripts_set_what_pytorch_reads_as_it_is_imported(script, given):
    """The script runs until it imports PyTorch, whose OpenMP is loaded alone then: most of a second less."""
    code = """if True:
        import ctypes, importlib.util, json, os, runpy, sys
        from pathlib import Path

        class UntilTorch:
            def find_spec(name, *_):
                if name == "torch":
                    sys.meta_path.remove(UntilTorch)
                    raise SystemExit

        sys.meta_path.insert(0, UntilTorch)
        sys.path[0], sys.argv = os.getcwd(), sys.argv[1].split() + ["--help"]
        try:
            runpy.run_path(sys.argv[0], run_name="__main__")
        except SystemExit:
            assert UntilTorch not in sys.meta_path, "it ended before torch was imported"
        after = json.dumps(dict(os.environ))
        torch = Path(importlib.util.find_spec("torch").submodule_search_locations[0])
        for library in [*torch.glob("lib/libgomp*"), *torch.parent.glob("torch.libs/libgomp*")] or [None]:
            ctypes.CDLL(library) if library else __import__("torch")
        print("\\n" + after)
    """
    env = {k: v for k, v in os.environ.items() if k not in SETTINGS} | given | dict(OMP_DISPLAY_ENV="verbose")
    done = run_python("-c", code, script, env=env)
    assert done.returncode == 0, done.stderr
    longer = dict(GOMP_SPINCOUNT="300000") if script in ("sample.py", "bench.py infer") else {}  # OpenMP's own value
    after, expected = json.loads(done.stdout.splitlines()[-1]), SETTINGS | longer | given
    spin = "0" if "OMP_WAIT_POLICY" in given else expected["GOMP_SPINCOUNT"]
    assert all(after[name] == expected[name] for name in list(SETTINGS)[1:])
    spins = re.findall(r"GOMP_SPINCOUNT = '(\d+)'", done.stderr)  # what GNU's OpenMP read; other PyTorchs have another
    assert set(spins) <= {spin}
    if sys.platform == "linux" and platform.machine() == "x86_64":
        assert spins


def test_importing_has_no_side_effects():
    code = (
        "import os, sys, random; before = dict(os.environ); import train_gpt, model, sample, bench, torch; "
        "import ops, data.prepare, data.stream, records.check, benchmarks.harness; "
        "assert dict(os.environ) == before; assert not torch.distributed.is_initialized(); "
        "assert not torch.cuda.is_initialized(); assert 'wandb' not in sys.modules and 'tiktoken' not in sys.modules"
    )
    env = {name: os.environ[name] for name in ("PATH", "HOME", "SYSTEMROOT") if name in os.environ}  # no import's doing
    done = run_python("-c", code, env=env)
    assert done.returncode == 0, done.stderr


def test_params_choose_sizes_that_flags_may_change(tmp_path):
    for params, text in ((300_000, "0.3M"), (2_000_000, "2m"), (10_000_000, "10M"), (1_500_000_000, "1.5B")):
        cfg = make_config(**train_gpt.parse_args(["--params", text]))
        assert cfg.params == params and 12 * cfg.n_layer * cfg.n_embd**2 == pytest.approx(params, rel=0.32)
        assert cfg.n_embd // cfg.n_head in (64, 128) and cfg.batch_tokens % cfg.seq_len == 0
        assert cfg.batch_tokens * cfg.max_steps == pytest.approx(20 * 12 * cfg.n_layer * cfg.n_embd**2, rel=0.01)
    small = make_config(params=85_000_000)
    assert (small.n_layer, small.n_embd, small.n_head, small.ngram) == (12, 768, 6, 0)  # GPT-2's
    given = make_config(params=10_000_000, n_layer=9, max_steps=50, batch_tokens=8192)
    assert (given.n_layer, given.n_embd, given.max_steps, given.batch_tokens) == (9, 384, 50, 8192)
    given = make_config(params=10_000_000, n_embd=256, batch_tokens=65536)  # what is not given follows from it
    assert (given.n_head, given.n_layer) == (2, 13) and given.max_steps == round(20 * 12 * 13 * 256**2 / 65536)
    assert make_config(params=290_000, n_layer=2).n_embd == 128 and make_config(params=290_000).n_layer == 6
    with pytest.raises(UserError, match="--params is -1"):
        make_config(params=-1)


def test_params_are_kept_by_a_run_that_is_resumed(data, tmp_path):
    flags = {k: v for k, v in TINY.items() if k not in ("n_layer", "n_embd", "n_head")} | dict(data=str(data))
    train(make_config(**flags, params=50_000, out_dir=str(tmp_path / "run")))
    assert final(tmp_path / "run")["config"]["n_embd"] == 64
    again = dict(out_dir=str(tmp_path / "run"), resume="newest")
    assert make_config(**again, params=50_000, max_steps=22).n_embd == make_config(**again).n_embd == 64
    with pytest.raises(UserError, match="--params 60000 is for new runs"):
        make_config(**again, params=60_000)
