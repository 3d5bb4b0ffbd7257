"""Flags: mistakes are told in one sentence, rules, automatic values and sizes."""

import dataclasses
import inspect
import os
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from torch._inductor.exc import CppCompileError, InductorError

import train_gpt
from common.errors import UserError, error_sentence
from common.values import largest_divisor
from conftest import (
    TINY,
    final,
    flags_of,
    make_data,
    parsed,
    run_main,
    run_python,
    stream_of,
    tiny_run,
)
from runtime import auto, device, flag_checks, model_setup
from runtime.auto import choose_by_epochs
from runtime.flags import OTHER_NAMES, check_values, flag, integer, kind_of, parse_flags
from runtime.ranks import DistContext
from runtime.resume import Start, keep_flags
from runtime.sizes import (
    SIZES,
    choose_finetuning,
    choose_size,
    expected_loss,
    max_epochs,
    tokens_in_time,
)
from train_gpt import Config, make_config, train

CPU = DistContext(torch.device("cpu"))


# --------------------------------------------------------------------------------------------------
# The user's mistakes: one sentence, exit code 2


@pytest.mark.parametrize(
    "flags, sentence",
    [
        ("--n_layers 3", "unknown flag --n_layers; did you mean n_layer"),
        ("--n_layer 3.5", "invalid integer value: '3.5'"),
        ("--preset laptpo", "--preset is 'laptpo'; expected one of .*; did you mean laptop"),
        ("--block_size 64", "unknown flag --block_size; use --seq_len"),
        ("--muon_lr nan", "--muon_lr is nan; expected auto, a finite number"),
        ("--log_every 0", "--log_every is 0; expected a finite number of at least 1"),
        (
            "--eval_every 0",
            "--eval_every is 0; expected end, auto, a finite number of at least 1",
        ),
        (
            "--embed_decay -1",
            "--embed_decay is -1.0; expected auto, a finite number of at least 0",
        ),
        ("--max_steps 3e14", "below 2\\*\\*48"),
        ("--minutes 1", "--minutes ends the run by the clock, so that --max_steps cannot be given"),
        ("--wandb yes", "invalid boolean value: 'yes'"),
        (
            "--resume",
            "has no valid checkpoint; give a run's folder that has one, or another --out_dir",
        ),
        ("--resume gone.pt", "no checkpoint gone.pt"),
        ("--init_from gone", "no checkpoint gone"),
        ("--micro_batch 5", "does not divide the 16 sequences .* use a divisor of them"),
        ("--attn cudnn", "--attn cudnn trains on CUDA only"),
        ("--doc_align --vocab_size=300 --data NO_DOCS", "finds no document"),
        ("--vocab_size 200", "less than the 257 of"),
        (
            "--seq_len=8192 --batch_tokens=8192 --micro_batch=1",
            "has 4333 tokens, too few .* use more data or a smaller --seq_len",
        ),
        ("--data /nowhere", "/nowhere.*python data/prepare.py"),
    ],
)
def test_mistakes_end_with_a_sentence(flags, sentence, data, tmp_path, capsys):
    if "NO_DOCS" in flags:
        flags = flags.replace("NO_DOCS", str(make_data(tmp_path / "no_docs", eot=False)))
    argv = flags_of(TINY | dict(data=data, out_dir=tmp_path / "run")) + flags.split()
    code, err = run_main(argv, capsys)
    assert code == 2 and re.search(sentence, err), err
    assert err.startswith("error: ") and err.count("\n") == 1, err
    assert not (tmp_path / "run").exists()


def test_a_mistake_ends_a_process_with_exit_code_2():
    done = run_python("train_gpt.py", "--max_step", "3")
    assert done.returncode == 2
    assert done.stderr == "error: unknown flag --max_step; did you mean max_steps?\n"


def test_from_python_values_are_checked_too():
    assert make_config(muon_lr=1).muon_lr == 1.0
    for flags, said in (
        (dict(n_layer="2"), "expected int"),
        (dict(wandb=1), "expected bool"),
        (dict(lr=1), "use --muon_"),
        (dict(resume="x", init_from="x.pt"), "--resume and --init_from contradict each other"),
        (dict(compile="defualt"), "expected one of off, default.*did you mean default"),
    ):
        with pytest.raises(UserError, match=said):
            make_config(**flags)
    assert not OTHER_NAMES.keys() & {f.name for f in dataclasses.fields(Config)}


def test_what_is_not_there_is_told(data, tmp_path, capsys):
    if not torch.cuda.is_available():
        code, err = run_main(["--data", str(data), "--device", "cuda"], capsys)
        assert code == 2 and "PyTorch sees no CUDA device here; use --device cpu" in err
    compiler = tmp_path / "compiler"
    compiler.write_text(
        "#!/bin/sh\ncase $1 in --version) echo g++; exit;; esac\necho no header; exit 1\n"
    )
    compiler.chmod(0o700)
    (tmp_path / "file").touch()
    argv = flags_of(TINY | dict(data=data, out_dir=tmp_path / "run", compile="default"))
    for name, value, words in (
        ("CXX", "/no/such/compiler", "No working C.. compiler found"),
        ("CXX", compiler, "no header"),
        ("TORCHINDUCTOR_CACHE_DIR", tmp_path / "file", "Not a directory|File exists"),
    ):
        done = run_python("train_gpt.py", *argv, env=os.environ | {name: str(value)})
        said = rf"error: --compile failed in the compiler or its cache \(.*({words}).*\); repair"
        assert done.returncode == 2 and re.match(said, done.stderr), done.stderr
        assert done.stderr.count("\n") == 1 and not (tmp_path / "run").exists()


def test_a_compiler_that_fails_in_a_run_is_told():
    for error, sentence in (
        (CppCompileError(["g++"], "x" * 300 + "\ndisk full"), "x disk full); repair"),
        (OSError(28, "disk full"), "its cache ([Errno 28] disk full); repair"),
    ):
        assert sentence in error_sentence(InductorError(error, inspect.currentframe()))
    assert not error_sentence(InductorError(AssertionError(), inspect.currentframe()))


# --------------------------------------------------------------------------------------------------
# Declaring and reading flags


def test_variables_of_a_launcher(data, tmp_path, monkeypatch, capsys):
    flags = flags_of(TINY | dict(data=data, max_steps=1))
    for name, value in (("WORLD_SIZE", "1"), ("WORLD_SIZE", ""), ("RANK", "")):
        with monkeypatch.context() as patch:
            patch.setenv(name, value)
            assert run_main([*flags, "--out_dir", str(tmp_path / (name + value))], capsys)[0] == 0
    for world_size, rank, says in (
        ("2", "", "environment variable RANK expected, but not set"),
        ("two", "0", "WORLD_SIZE is 'two'; expected an integer"),
    ):
        monkeypatch.setenv("WORLD_SIZE", world_size)
        monkeypatch.setenv("RANK", rank)
        code, err = run_main(flags, capsys)
        assert code == 2 and says in err


def test_values_as_they_are_written():
    written = {"1000": 1000, "1_000": 1000, "1e3": 1000, "4k": 4000, "-1": -1}
    written |= {"2M": 2 * 10**6, "1.5B": 1500 * 10**6}
    assert {text: integer(text) for text in written} == written
    for text in ("", "k", "1.5", "1e-3", "nan", "inf", "0x10", "1e999999999", "1e5000"):
        with pytest.raises((ValueError, OverflowError)):
            integer(text)
    assert parsed("--compile --resume --profile --bf16") == dict(
        compile="default", resume="newest", profile=5, dtype="bf16"
    )
    assert parsed("--compile=max-autotune --wandb false --loss_chunk auto --keep all") == dict(
        compile="max-autotune", wandb=False, loss_chunk="auto", keep="all"
    )
    cfg = make_config(loss_chunk="auto", keep="all", eval_every="end", max_steps=None)
    assert (cfg.loss_chunk, cfg.keep, cfg.eval_every, cfg.max_steps) == (None, "all", "end", None)
    assert parsed("") == {}


def test_a_new_field_is_a_flag(capsys):
    @dataclasses.dataclass(frozen=True)
    class Edited(Config):
        z_loss: float = flag(0.1, "weight of the z-loss, in %", min=-1)
        plain: bool = False

    assert parse_flags(["--z_loss", "2", "--plain"], Edited, {}, "") == dict(z_loss=2.0, plain=True)
    with pytest.raises(SystemExit):
        parse_flags(["--help"], Edited, {}, "")
    assert "weight of the z-loss, in % [0.1]" in capsys.readouterr().out
    refused = "--z_loss is -2.0; expected a finite number of at least -1"
    with pytest.raises(UserError, match=refused):
        check_values(dict(z_loss=-2.0), Edited)


# --------------------------------------------------------------------------------------------------
# runtime/flag_checks.py: a case for every sentence, of which no earlier one says anything

FLAG_CASES = (
    (dict(max_steps=None), "--max_steps auto and --batch_tokens auto are for --init_from"),
    (dict(ngram_dropout=1.0), "--ngram_dropout is 1.0; expected a probability below 1, or auto"),
    (dict(warmup_frac=0.5, cooldown_frac=0.6), "add up to more than 1"),
    (dict(n_head=5), "make it a multiple of 10, or change --n_head"),
    (dict(window="SLX"), "--window is 'SLX'; expected letters S and L"),
    (dict(batch_tokens=1000), "not a multiple of --seq_len 2048; change one of them"),
    (
        dict(checkpointing="1.0"),
        "--checkpointing is '1.0'; expected auto, none, selective, full, or a number",
    ),
    (dict(checkpointing="0.5"), "--checkpointing 0.5 .* needs the compiler; add --compile"),
    (dict(attn="flex", checkpointing="selective"), "selective with --attn flex needs the compiler"),
    (dict(compile="max-autotune", parallel="fsdp"), "use --compile max-autotune-no-cudagraphs or"),
    (dict(dtype="fp16", parallel="hsdp"), "--dtype fp16 .* does not work with --parallel hsdp"),
    (dict(compile="reduce-overhead", offload="activations"), "CUDA graphs, which need fixed"),
    (dict(compile="reduce-overhead", attn="varlen", doc_mask=True), "or documents in varlen"),
    (dict(params=None), "--params auto chooses the size of a new model that suits --minutes"),
    (dict(params=None, minutes=1.0, init_from="x"), "add --minutes and remove --init_from"),
    (
        dict(TORCHELASTIC_MAX_RESTARTS="3"),
        "--max-restarts needs a folder to resume from; give --out_dir",
    ),
)
DEVICE_CASES = (
    ("cpu", dict(attn="flex"), "--attn flex trains on CUDA only, not on cpu"),
    ("cuda", dict(attn="flash", doc_mask=True), "--attn flash takes no mask"),
    ("cuda", dict(attn="cudnn", dtype="fp32"), "--attn cudnn needs bf16 or fp16"),
    ("t4", dict(attn="flash", dtype="fp16"), "a GPU of compute capability 8.0"),
    ("t4", dict(fp8=True, dtype="bf16"), "a GPU of compute capability 8.9"),
    ("cpu", dict(fp8=True), "--fp8 needs CUDA, not cpu"),
    ("cuda", dict(fp8=True, dtype="fp16"), "--fp8 needs --dtype bf16"),
    ("cuda", dict(deterministic=True), "--deterministic on CUDA needs --micro_batch"),
    (
        "cuda",
        dict(deterministic=True, micro_batch=4, attn="cudnn"),
        "an --attn other than cudnn and varlen",
    ),
)
NO_EFFECT_CASES = (
    ("--offload", dict(offload="optimizer")),
    ("--short_frac", dict(short_frac=0.5, doc_align=True)),
    ("--muon_lr", dict(optimizer="adamw", muon_lr=0.1)),
    ("--embed_decay", dict(optimizer="adamw", embed_decay=1.5)),
    ("--shard_size", dict(shard_size=2)),
)


def check_device(kind: str, **flags) -> list[str]:
    """The warnings on a device that is good enough for everything, or on an older GPU ("t4")."""
    cfg = make_config(**dict(seq_len=1024, window="L") | flags)
    capability = (7, 5) if kind == "t4" else (9, 0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
        patch.setattr(torch.cuda, "is_bf16_supported", lambda **_: kind != "t4")
        patch.setattr(flag_checks, "check_compiler", lambda device: None)
        device = torch.device("cuda" if kind == "t4" else kind)
        return flag_checks.check_device(cfg, DistContext(device))


@pytest.mark.parametrize("case, sentence", FLAG_CASES)
def test_flags_that_contradict_each_other_are_refused(case, sentence, monkeypatch):
    for name in filter(str.isupper, case):
        monkeypatch.setenv(name, case[name])
    cfg = make_config(**{name: value for name, value in case.items() if name.islower()})
    with pytest.raises(UserError, match=sentence):
        flag_checks.check_flags(cfg)


@pytest.mark.parametrize("kind, flags, sentence", DEVICE_CASES)
def test_flags_that_a_device_cannot_do_are_refused(kind, flags, sentence):
    with pytest.raises(UserError, match=sentence):
        check_device(kind, **flags)


@pytest.mark.parametrize("name, flags", NO_EFFECT_CASES)
def test_a_flag_without_effect_is_told(name, flags):
    assert check_device("cpu", **flags) == [f"{name} has no effect with the other flags on cpu"]


def test_flags_that_suit_a_device_are_silent(data, tmp_path, capsys):
    for kind in ("cpu", "cuda", "mps"):
        assert check_device(kind) == []
    assert check_device("cuda", deterministic=True, micro_batch=4) == []
    tiny_run(tmp_path / "run", data=data, max_steps=1, offload="activations")
    for output in (capsys.readouterr().out, (tmp_path / "run" / "log.txt").read_text()):
        assert "WARNING: --offload has no effect with the other flags on cpu" in output


def test_ranks_share_a_batch_and_copies_evenly():
    def seqs_per_rank(world_size: int, **flags) -> int:
        cfg = make_config(**dict(seq_len=32, batch_tokens=512) | flags)
        return model_setup.seqs_per_rank(cfg, world_size)

    assert seqs_per_rank(2, micro_batch=4) == 8
    assert seqs_per_rank(1) == 16
    refused = "cannot be shared evenly by 5 ranks; use a multiple of 160"
    with pytest.raises(UserError, match=refused):
        seqs_per_rank(5, batch_tokens=12 * 32, micro_batch=2)
    refused = "--micro_batch 2 does not divide the 3 sequences"
    with pytest.raises(UserError, match=refused):
        seqs_per_rank(4, batch_tokens=12 * 32, micro_batch=2)

    dist_ctx = DistContext(torch.device("cpu"), world_size=8, local_world_size=4)
    for flags in (dict(shard_size=2), dict()):
        assert not flag_checks.check_device(make_config(**flags, parallel="hsdp"), dist_ctx)
    refused = "--shard_size 3 .* does not divide the 8 ranks; give a divisor of them"
    with pytest.raises(UserError, match=refused):
        flag_checks.check_device(make_config(parallel="hsdp", shard_size=3), dist_ctx)
    for n, most, divisor in ((16, 5, 4), (12, 6, 6), (7, 6, 1), (1, 0, 1), (36, 100, 36)):
        assert largest_divisor(n, most) == divisor


# --------------------------------------------------------------------------------------------------
# What flags become


def test_learning_rates_by_rule():
    def rates(**flags):
        cfg = train_gpt.choose_learning_rates(make_config(**flags))
        return cfg.muon_lr, cfg.adam_lr

    speedrun = rates(preset="gpt2-small", max_steps=5000)
    assert speedrun == (0.02, 0.006)
    assert rates() == pytest.approx((0.03, 0.012), rel=0.1)  # what was tuned by hand for laptop
    # The best of 0.002, 0.004, 0.008, 0.016
    assert rates(optimizer="adamw")[1] == pytest.approx(0.008, rel=0.05)
    assert rates(preset="gpt2-small", optimizer="adamw")[1] == 0.002
    # Wider models in longer runs take lower rates, both of them
    for kind in (0, 1):
        found = [rates(n_embd=n, max_steps=100 * n)[kind] for n in (64, 128, 256, 512)]
        assert sorted(found, reverse=True) == found


def by_epochs(epochs: float, **flags) -> dict:
    """What is chosen for a dataset of 10,000 tokens, so many epochs and trigrams."""
    steps = dict(batch_tokens=32, seq_len=32, max_steps=round(312 * epochs))
    return choose_by_epochs(make_config(**dict(ngram=3) | steps | flags), stream_of(10**4, 1024))


def test_ngram_dropout_by_epochs():
    """0 where nothing is seen twice; otherwise each n-gram is kept about twice."""
    epochs = (0.2, 0.5, 1, 4, 40, 400)
    chosen = [by_epochs(n)["ngram_dropout"] for n in epochs]
    assert chosen[:2] == [0, 0] and 0.05 < chosen[2] < 0.15 and chosen == sorted(chosen)
    assert all(1.5 < n * (1 - p) < 2.5 for n, p in zip(epochs[3:], chosen[3:], strict=True))


def test_embeddings_decay_where_the_dataset_is_repeated():
    decays = [by_epochs(n)["embed_decay"] for n in (0.6, 1.75, 5, 12)]
    assert decays == pytest.approx([0, 1, 1.5, 1.5])
    for flags in (dict(init_from="runs/x"), dict(optimizer="adamw")):
        assert by_epochs(5, **flags)["embed_decay"] == 0


AUTOMATIC = (
    "dtype",
    "attn",
    "loss_chunk",
    "ngram",
    "muon_lr",
    "adam_lr",
    "ngram_dropout",
    "embed_decay",
)


def test_automatic_values_are_chosen_once_and_kept(data, tmp_path, monkeypatch):
    """Also where a resumed run would choose otherwise: another machine, another --max_steps."""
    flags = {name: value for name, value in TINY.items() if name not in AUTOMATIC}
    flags |= dict(data=str(data), ngram_rows=65, max_steps=120)
    out_dir = dict(out_dir=str(tmp_path / "run"))
    train(make_config(**flags | out_dir))
    config = final(tmp_path / "run")["config"]
    assert config["dtype"] in ("fp32", "bf16") and config["attn"] in ("blocked", "sdpa")
    assert config["loss_chunk"] == 2048 and config["ngram"] == 6
    cfg = train_gpt.choose_learning_rates(make_config(max_steps=120, n_embd=32))
    assert (config["muon_lr"], config["adam_lr"]) == (cfg.muon_lr, cfg.adam_lr)
    epochs = 120 / 56.56
    assert config["embed_decay"] == pytest.approx(epochs - 0.75, rel=1e-3)
    chosen = {name: config[name] for name in AUTOMATIC}

    with monkeypatch.context() as patch:
        patch.setattr(auto, "faster_dtype", lambda dtype, *_: "fp16" if dtype == "auto" else dtype)
        patch.setattr(auto, "choose_attention", lambda *_: "math")
        patch.setattr(auto, "choose_loss_chunk", lambda *_: 64)
        patch.setattr(auto, "choose_ngram", lambda *_, **__: 4)
        train(make_config(**out_dir, resume="newest", max_steps=125))
    again = final(tmp_path / "run")["config"]
    assert {name: again[name] for name in AUTOMATIC} == chosen and again["max_steps"] == 125


def test_params_choose_sizes_that_flags_may_change(data, tmp_path):
    sizes = {"0.3M": 300_000, "2m": 2_000_000, "10M": 10_000_000, "1.5B": 1_500_000_000}
    for text, params in sizes.items():
        cfg = make_config(**parsed(f"--params {text}"))
        n_params = 12 * cfg.n_layer * cfg.n_embd**2
        assert cfg.params == params and n_params == pytest.approx(params, rel=0.32)
        assert cfg.n_embd // cfg.n_head in (64, 128) and cfg.batch_tokens % cfg.seq_len == 0
        assert cfg.batch_tokens * cfg.max_steps == pytest.approx(20 * n_params, rel=0.01)
    small = make_config(params=85_000_000)
    assert (small.n_layer, small.n_embd, small.n_head, small.ngram) == (12, 768, 6, 0)  # GPT-2's
    # What is not given follows from what is
    given = make_config(params=10_000_000, n_embd=256, batch_tokens=65536)
    assert (given.n_head, given.n_layer) == (2, 13)
    assert given.max_steps == round(20 * 12 * 13 * 256**2 / 65536)
    assert make_config(params=290_000, n_layer=2).n_embd == 128
    assert make_config(params=290_000).n_layer == 6

    out_dir = dict(out_dir=str(tmp_path / "run"))
    flags = TINY | out_dir | dict(data=str(data), params=50_000, max_steps=2)
    for name in ("n_layer", "n_embd", "n_head"):
        del flags[name]
    train(make_config(**flags))
    again = out_dir | dict(resume="newest")
    train(make_config(**again, params=50_000, max_steps=4))
    assert final(tmp_path / "run")["config"]["n_embd"] == 64
    with pytest.raises(UserError, match="--params 60000 is for new runs"):
        train(make_config(**again, params=60_000))


def test_minutes_choose_the_size_whose_expected_loss_is_lowest():
    def choose(
        minutes: float, n_tokens: int, vocab_size: int = 1024, flops: float = 1e12
    ) -> Config:
        """The config, with the steps that were chosen with the size."""
        cfg = make_config(minutes=float(minutes), seq_len=1024)
        return dataclasses.replace(cfg, **choose_size(cfg, n_tokens, vocab_size, flops))

    # More time, larger models; each is as good as any, and trains for as long as it may
    n_tokens, sizes = 10**9, []
    for minutes in (1, 10, 60):
        cfg = choose(minutes, n_tokens)
        n_params = 12 * cfg.n_layer * cfg.n_embd**2
        tokens = cfg.max_steps * cfg.batch_tokens
        assert tokens == pytest.approx(tokens_in_time(cfg, n_tokens, 1024, flops=1e12), rel=0.05)
        assert 6 * n_params * tokens < 1e12 * 60 * minutes
        loss = expected_loss(n_params, tokens, n_tokens)
        for n_layer, n_embd in ((2, 64), (2, 128), (4, 256), (8, 512), (16, 1024)):
            other = dataclasses.replace(cfg, n_layer=n_layer, n_embd=n_embd)
            tokens = tokens_in_time(other, n_tokens, 1024, flops=1e12)
            assert loss < 1.01 * expected_loss(12 * n_layer * n_embd**2, tokens, n_tokens)
        sizes.append(n_params)
    assert sizes == sorted(set(sizes)) and sizes[0] > min(SIZES) and sizes[-1] < max(SIZES)

    # A small dataset allows a small model, and few epochs. A slow machine allows 2 x 64
    small = choose(60, 10**5)
    assert 12 * small.n_layer * small.n_embd**2 < 5e5
    epochs = max_epochs(small, 10**5, 1024)
    assert small.max_steps * small.batch_tokens == pytest.approx(epochs * 1e5, rel=0.05)
    for flops, n_embd in ((1e11, 128), (3e10, 64)):
        assert choose(2, 10**6, flops=flops).n_embd == n_embd
    assert (
        make_config(minutes=3.0).params is None and make_config(minutes=3.0, n_layer=2).params == 0
    )


def test_the_law_has_diminishing_returns():
    """Of parameters and of tokens; least of all of repeated ones."""
    n_tokens = 10**6
    for losses in (
        [expected_loss(10**5, tokens, n_tokens) for tokens in (1e5, 1e6, 1e7, 1e8)],
        [expected_loss(n_params, 10**6, n_tokens) for n_params in (10**4, 10**5, 10**6, 10**7)],
    ):
        gains = [a - b for a, b in zip(losses, losses[1:], strict=False)]
        assert gains == sorted(gains, reverse=True) and gains[-1] > 0
    assert expected_loss(10**5, 1e8, n_tokens) > expected_loss(10**5, 3e6, n_tokens=10**9)


def test_finetuning_takes_steps_by_the_size_of_the_dataset():
    cfg = make_config(preset="laptop", init_from="run", seq_len=512)
    assert (cfg.max_steps, cfg.patience, cfg.eval_every) == (None, 3, None)
    cfg = make_config(preset="laptop", init_from="run", seq_len=512, eval_every=150, patience=0)
    assert (cfg.max_steps, cfg.patience, cfg.eval_every) == (None, 0, 150)
    assert make_config(preset="laptop", init_from="run", max_steps=9).patience == 0

    def choose(n_tokens: int, world_size: int = 1, **flags) -> dict:
        sized = dataclasses.replace(cfg, **flags)
        return choose_finetuning(sized, n_tokens, sized.seq_len * world_size)

    assert choose(3584) == dict(batch_tokens=2048, max_steps=154)
    assert choose(94000, seq_len=96)["batch_tokens"] % 96 == 0  # 8,192 is no multiple
    assert choose(3584, world_size=3)["batch_tokens"] == 3 * 512
    assert choose(3584, max_steps=9) == dict(batch_tokens=2048, max_steps=9)
    # A large one: an epoch, or as long as a new model of this size trains
    assert choose(6 * 10**6) == dict(batch_tokens=8192, max_steps=750)
    assert choose(10**8) == dict(batch_tokens=8192, max_steps=960)
    gpt2 = dict(n_layer=12, n_embd=768)
    assert choose(10**9, **gpt2) == dict(batch_tokens=131072, max_steps=7629)
    assert max_epochs(cfg, 3584, 1024) * 3584 == pytest.approx(154 * 2048, rel=0.01)


def resolved(cfg: Config, stream, flops: float = 1e12) -> Config:
    """The config with automatic values, on a machine with so many FLOP/s."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(auto, "large_matmul_flops", lambda *_: flops)
        cfg = auto.choose_auto_values(cfg, stream, CPU)
        return train_gpt.choose_learning_rates(cfg)


@pytest.mark.parametrize("vocab_size, epochs, ngram", [(257, 6, 6), (1024, 5, 4)])
def test_minutes_on_a_small_dataset_end_after_some_epochs(vocab_size, epochs, ngram):
    stream = stream_of(10**5, vocab_size)
    for given in (dict(), dict(n_layer=1, n_embd=64)):
        cfg = resolved(make_config(**given, minutes=5.0, dtype="fp32"), stream)
        assert cfg.max_steps * cfg.batch_tokens == pytest.approx(epochs * 1e5, rel=0.05)
        assert (cfg.ngram, cfg.weight_decay) == (ngram, 0.05)
    assert resolved(make_config(minutes=5.0, doc_align=True), stream).short_frac == 0.0
    # A small table has no room for n-grams of 4 byte pairs
    small = resolved(make_config(ngram_rows=65536), stream)
    assert small.ngram == (6 if vocab_size == 257 else 3)


def start_of(cfg: Config, is_resume: bool = True) -> Start:
    """A checkpoint of a run with these flags."""
    model_config = dataclasses.asdict(train_gpt.gpt_config(cfg, 257))
    checkpoint = dict(config=dataclasses.asdict(cfg), model_config=model_config)
    return Start(Path("ckpt_1.pt"), checkpoint, is_resume)


def test_a_resumed_run_keeps_what_was_chosen():
    stream = stream_of(10**5, vocab_size=257)
    cfg = make_config(minutes=5.0, dtype="fp32")
    saved = resolved(cfg, stream)
    assert resolved(cfg, stream, 1e9).n_embd < saved.n_embd  # measured again: another size
    for given in (cfg, make_config(resume="newest"), make_config(params=None, minutes=5.0)):
        again = resolved(keep_flags(given, start_of(saved)), stream, 1e9)
        assert dataclasses.replace(again, resume="") == saved
    # With fewer minutes, fewer steps of the same model
    fewer = keep_flags(make_config(minutes=0.1, dtype="fp32"), start_of(saved))
    fewer = resolved(fewer, stream, 1e11)
    assert fewer.max_steps < saved.max_steps / 2
    assert fewer == dataclasses.replace(saved, minutes=0.1, max_steps=fewer.max_steps)
    with pytest.raises(UserError, match="--optimizer adamw is for new runs; ckpt_1.pt has muon"):
        keep_flags(make_config(optimizer="adamw"), start_of(saved))
    # New weights take the model's shape, unless a preset gives another one
    source = make_config(n_layer=3, n_embd=64, softcap=20.0, batch_tokens=8192)
    kept = keep_flags(make_config(init_from="x"), start_of(source, is_resume=False))
    assert (kept.n_layer, kept.n_embd, kept.softcap, kept.batch_tokens) == (3, 64, 20.0, None)
    kept = keep_flags(make_config(init_from="x", preset="mini"), start_of(source, is_resume=False))
    assert kept.n_layer == 6


def other_value(field: dataclasses.Field, value):
    """A value of a flag that is neither this one nor "choose it"."""
    special = dict(checkpointing="full", window="SL:64", preset="laptop", data="/data", n_head=2)
    kind = kind_of(field)
    if field.name in special:
        return special[field.name]
    if kind is str and field.metadata["words"]:
        left_out = (value, "auto", "default", "max-autotune", "reduce-overhead")
        return [name for name in field.metadata["words"] if name not in left_out][-1]
    if kind is bool:
        return not value
    if kind is float:
        return 0.05 if value != 0.05 else 0.1
    if kind is int:
        return 2 * value if isinstance(value, int) and value else 64
    return "given"


CONTRADICTIONS = {"max_steps": "minutes", "init_from": "resume"}  # and the other way round


@pytest.mark.parametrize("mode", ["alone", "minutes", "params", "resume", "init_from"])
def test_a_given_flag_is_what_the_run_uses(mode):
    """Every flag with two values, of which one is the preset's or the run's own."""
    flags = dict(alone={}, minutes=dict(minutes=30.0), params=dict(params=300_000)).get(mode, {})
    if mode in ("resume", "init_from"):
        flags = {mode: "ckpt_1.pt"}
    first = dict(n_layer=1, n_embd=64, n_head=1, seq_len=64, batch_tokens=128, eval_tokens=64)
    stream = stream_of(10**5, vocab_size=257)
    start = start_of(resolved(make_config(**first, max_steps=1), stream), mode == "resume")

    def final_config(**given) -> Config:
        cfg = make_config(**given)
        if mode in ("resume", "init_from"):
            cfg = keep_flags(cfg, start)
        return resolved(cfg, stream)

    base = final_config(**flags)
    for field in dataclasses.fields(Config):
        if field.name in (mode, CONTRADICTIONS.get(mode), "given", "resume", "init_from"):
            continue
        own = getattr(base, field.name)
        for value in (own, other_value(field, own)):
            given = flags | {field.name: value}
            # What goes with it
            if field.name == "cooldown_frac" or field.name == "warmup_frac":
                given |= dict(cooldown_frac=0.3, warmup_frac=0.3) | {field.name: value}
            if field.name == "minutes" and value:
                given.pop("max_steps", None)
            try:
                cfg = final_config(**given)
            except UserError as error:
                assert f"--{field.name} " in str(error), error
                continue
            if value not in (None, "auto"):
                assert getattr(cfg, field.name) == value, (mode, field.name)


def test_the_longest_ngrams_are_those_that_repeat():
    rng, lengths = np.random.default_rng(0), set()
    for n_symbols in (2, 3, 4, 6, 60):
        tokens = rng.integers(50304 - n_symbols, 50304, 1000)
        longest = 2
        for length in range(3, 7):
            distinct = {tuple(tokens[i : i + length]) for i in range(1001 - length)}
            if len(distinct) <= (1 - auto.NGRAM_REPEATS) * (1001 - length):
                longest = length
        for most in (3, 4):
            assert auto.choose_ngram(tokens, 50304, most) == min(longest, most)
        lengths.add(longest)
    assert lengths == {2, 3, 4, 5, 6}

    # Only where a run repeats its dataset
    stream = stream_of(10**5, 50304)
    stream.train.read_sequences = lambda starts, length: rng.integers(50304, size=(1, length))
    for max_steps, ngram in ((6, 4), (60, 2)):
        cfg = make_config(dtype="fp32", seq_len=32, max_steps=max_steps)
        assert resolved(cfg, stream).ngram == ngram


def test_micro_batch_is_what_fits(monkeypatch):
    """The decision, with measurements made up: bytes per sequence by mode of recomputation."""
    bytes_per_seq = dict(none=10, selective=4, full=1)
    tried = []

    def choose(memory, n_seqs=64, checkpointing="auto", **flags):
        model = torch.nn.Linear(1, 1)
        model.blocks = torch.nn.ModuleList([torch.nn.Linear(1, 1)])
        set_modes = []

        def passes_fit(model, micro_batch, seq_len) -> bool:
            tried.append(micro_batch)
            return micro_batch * bytes_per_seq[set_modes[-1]] <= memory

        for name in ("apply_recompute", "set_mode"):
            monkeypatch.setattr(model_setup, name, lambda _, mode: set_modes.append(mode))
        monkeypatch.setattr(model_setup, "passes_fit", passes_fit)
        monkeypatch.setattr(model_setup, "dummy_step", lambda *_: tried.append("update"))
        cfg = make_config(
            seq_len=1024, batch_tokens=n_seqs * 1024, checkpointing=checkpointing, **flags
        )
        on_cuda = DistContext(torch.device("cuda"))
        micro_batch = model_setup.fit_into_memory(model, cfg, lambda cfg, model: None, on_cuda)
        return micro_batch, set_modes[-1]

    # An update, in which ranks wait for each other, comes before anything may run out of memory
    assert choose(10**9) == (64, "none") and tried == [1, "update", 64]  # all that there are
    assert choose(100) == (8, "none") and tried[3:] == [1, "update", 64, 32, 16, 8]
    assert choose(30) == (4, "selective")  # of which 4,096 tokens fit: fewer leave a GPU idle
    assert choose(3) == (2, "full") and choose(100, n_seqs=60) == (6, "none")
    assert choose(35, checkpointing="none") == (2, "none")
    with pytest.raises(UserError, match="one sequence does not fit into this GPU's memory"):
        choose(0)
    # Compiled, twice as many are tried once more
    tried.clear()
    assert choose(100, compile="default") == (8, "none") and tried[2:] == [64, 32, 16, 8, 16]


def test_a_peak_is_of_the_device_by_that_name(monkeypatch):
    peaks = {
        "H100 80GB HBM3": 989e12,
        "H100 PCIe": 756e12,
        "H100 NVL": 835e12,
        "H100 80GB HBM3 MIG 1g.10gb": None,
        "H200": 989e12,
        "GH200 480GB": None,
        "A100-SXM4-80GB": 312e12,
        "A10": 125e12,
        "A10-4Q": None,
        "A10G": 70e12,
        "L4": 121e12,
        "L40S": 362e12,
        "RTX A1000": None,
        "RTX A6000": 155e12,
        "GeForce RTX 3090 Ti": None,
        "GeForce RTX 4090": 165e12,
        "GeForce RTX 4090 D": None,
        "GeForce RTX 4090 Laptop GPU": None,
    }
    for name, peak in peaks.items():
        full_name = f"NVIDIA {name}"
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device, name=full_name: name)
        assert device.peak_flops(torch.device("cuda"), "bf16") == peak, name


# --------------------------------------------------------------------------------------------------
# What scripts and imports do to a process


@pytest.mark.parametrize("script", ["train_gpt.py", "bench.py", "sample.py", "export.py"])
def test_scripts_set_what_pytorch_reads_before_it_is_imported(script):
    code = """if True:
        import os, runpy, sys
        class UntilTorch:
            def find_spec(name, *_):
                if name == "torch":
                    print(os.environ.get("GOMP_SPINCOUNT"), end=" ")
                    print(os.environ.get("TORCHINDUCTOR_VEC_ISA_OK"), flush=True)
                    os._exit(0)
        sys.meta_path.insert(0, UntilTorch)
        sys.path[0] = os.getcwd()
        runpy.run_path(sys.argv[1], run_name="__main__")
    """
    env = dict(os.environ)
    for name in ("GOMP_SPINCOUNT", "TORCHINDUCTOR_VEC_ISA_OK"):
        env.pop(name, None)
    done = run_python("-c", code, script, env=env)
    assert done.stdout.split() == ["None" if script == "sample.py" else "5000", "1"], done
    # The user's own stays
    done = run_python("-c", code, script, env=env | dict(GOMP_SPINCOUNT="77"))
    assert done.stdout.split() == ["77", "1"], done
