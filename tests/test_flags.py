"""Flags: mistakes told in one sentence, rules, what is left open and settled, help and README against the code."""

import dataclasses
import inspect
import os
import re

import pytest
import torch

import train_gpt
from common import UserError, largest_divisor
from conftest import TINY, final, flags_of, make_data, run_main, run_python, tiny_run
from data.stream import TokenStream
from runtime import auto, device, flag_checks, wrap_model
from runtime.auto import largest_size_for_time, max_epochs, tokens_within
from runtime.flags import OTHER_NAMES, flag, integer, parse_flags
from runtime.ranks import DistContext
from train_gpt import Config, make_config, train

CPU = DistContext(torch.device("cpu"))


def parsed(line: str) -> dict:
    return parse_flags(line.split(), dataclasses.fields(Config), {}, "")


# ---------------------------------------------------------------------------------------------------------------------
# The user's mistakes: one sentence, exit code 2


@pytest.mark.parametrize(
    "flags, sentence",
    [
        ("--n_layers 3", "unknown flag --n_layers; did you mean n_layer"),
        ("--n_layer 3.5", "invalid int value: '3.5'"),
        ("--preset laptpo", "invalid choice: 'laptpo'"),
        ("--block_size 64", "unknown flag --block_size; use --seq_len"),
        ("--prefetch 2", "unknown flag --prefetch; batches are always prepared"),
        ("--muon_lr nan", "--muon_lr is nan; expected a finite number"),
        ("--max_steps 0", "--max_steps is 0; expected a finite number of at least 1"),
        ("--max_steps 3e14", "below 2\\*\\*48"),
        ("--minutes 1", "--minutes ends the run by the clock, so that --max_steps cannot be given"),
        ("--wandb yes", "invalid true or false value: 'yes'"),
        (
            "--resume",
            "has no valid checkpoint; give a run's folder that has one, or another --out_dir",
        ),
        ("--resume gone.pt", "no checkpoint gone.pt"),
        ("--init_from gone", "no checkpoint gone"),
        ("--micro_batch 5", "does not divide the 16 sequences .* use --micro_batch 4"),
        ("--alloc_conf expandable_segments:True --attn cudnn", "--attn cudnn runs on CUDA only"),
        ("--doc_align --vocab_size=300 --data NO_DOCS", "finds no document"),
        ("--vocab_size 200", "less than the 257 of"),
        (
            "--seq_len=8192 --batch_tokens=8192 --micro_batch=1",
            "has 4333 tokens, too few .* use more data, or --seq_len 4096",
        ),
        ("--data /nowhere", "/nowhere.*python data/prepare.py"),
    ],
)
def test_mistakes_end_with_a_sentence(flags, sentence, data, tmp_path, capsys):
    if "NO_DOCS" in flags:
        flags = flags.replace("NO_DOCS", str(make_data(tmp_path / "no_docs", eot=False)))
    code, err = run_main(
        flags_of(TINY | dict(data=data, out_dir=tmp_path / "run")) + flags.split(), capsys
    )
    assert (
        code == 2
        and re.search(sentence, err)
        and err.startswith("error: ")
        and err.count("\n") == 1
    ), err
    assert not (tmp_path / "run").exists()


def test_a_mistake_ends_a_process_with_exit_code_2():
    done = run_python("train_gpt.py", "--max_step", "3")
    assert (
        done.returncode == 2
        and done.stderr == "error: unknown flag --max_step; did you mean max_steps?\n"
    )


def test_from_python_values_are_checked_too():
    assert make_config(muon_lr=1, max_steps=2e3).max_steps == 2000
    for flags, said in (
        (dict(n_layer="2"), "expected int"),
        (dict(wandb=1), "expected bool"),
        (dict(lr=1), "use --muon_"),
    ):
        with pytest.raises(UserError, match=said):
            make_config(**flags)
    with pytest.raises(UserError, match="expected one of off, default.*did you mean default"):
        make_config(compile="defualt")
    assert not OTHER_NAMES.keys() & {f.name for f in dataclasses.fields(Config)}


def test_what_is_not_there_is_told(data, tmp_path, capsys):
    if not torch.cuda.is_available():
        code, err = run_main(["--data", str(data), "--device", "cuda"], capsys)
        assert code == 2 and "PyTorch sees no CUDA device here; use --device cpu" in err
    argv = flags_of(TINY | dict(data=data, out_dir=tmp_path / "run", compile="default"))
    done = run_python("train_gpt.py", *argv, env=os.environ | {"CXX": "/no/such/compiler"})
    assert (
        done.returncode == 2 and "--compile finds no C++ compiler" in done.stderr.splitlines()[-1]
    )


# ---------------------------------------------------------------------------------------------------------------------
# Declaring and reading flags


def test_values_as_they_are_written():
    written = dict.fromkeys(("1000", "1_000", "1e3"), 1000) | {
        "4k": 4000,
        "2M": 2 * 10**6,
        "1.5B": 1500 * 10**6,
        "-1": -1,
    }
    assert {text: integer(text) for text in written} == written
    for text in ("", "k", "1.5", "1e-3", "nan", "inf", "0x10", "1e999999999"):
        with pytest.raises((ValueError, OverflowError)):
            integer(text)
    assert parsed("--compile --resume --profile --bf16") == dict(
        compile="default", resume="newest", profile=5, bf16=True
    )
    assert parsed("--compile=max-autotune --bf16 false --loss_chunk -1") == dict(
        compile="max-autotune", bf16=False, loss_chunk=-1
    )
    assert (
        parsed("") == {}
        and make_config().n_layer == 2
        and make_config(preset="gpt2-xl", n_layer=3).n_layer == 3
    )


def test_a_new_field_is_a_flag(capsys):
    @dataclasses.dataclass(frozen=True)
    class Edited(Config):
        z_loss: float = flag(0.1, "weight of the z-loss, in %", min=-1)
        plain: bool = False

    fields = dataclasses.fields(Edited)
    assert parse_flags(["--z_loss", "2", "--plain"], fields, {}, "") == dict(z_loss=2.0, plain=True)
    with pytest.raises(SystemExit):
        parse_flags(["--help"], fields, {}, "")
    assert "weight of the z-loss, in % [0.1]" in capsys.readouterr().out
    with pytest.raises(
        UserError, match="--z_loss is -2.0; expected a finite number of at least -1"
    ):
        flag_checks.check_flags(Edited(z_loss=-2.0))
    with pytest.raises(UserError, match="field sizes of Config is a tuple; a flag is an int"):
        parse_flags(
            [],
            dataclasses.fields(
                dataclasses.make_dataclass("Config", [("sizes", tuple, flag((1, 2), ""))])
            ),
            {},
            "",
        )


# ---------------------------------------------------------------------------------------------------------------------
# runtime/flag_checks.py: a case for every sentence, of which no earlier one says anything

FLAG_CASES = (
    (dict(bf16=True, dtype="fp16"), "--bf16 and --dtype fp16 contradict each other"),
    (dict(resume="auto", init_from="x.pt"), "--resume and --init_from contradict each other"),
    (dict(warmup_frac=0.5, cooldown_frac=0.6), "add up to more than 1"),
    (dict(n_head=5), "make it a multiple of 10, or change --n_head"),
    (dict(window="SLX"), "--window is 'SLX'; expected letters S and L"),
    (dict(batch_tokens=1000), "not a multiple of --seq_len 2048; use --batch_tokens 2048"),
    (
        dict(ngram_dropout=0.5, ngram=0),
        "--ngram_dropout is 0.5 with --ngram 0; expected a probability",
    ),
    (
        dict(checkpointing="1.0"),
        "--checkpointing is '1.0'; expected auto, none, selective, full or a number",
    ),
    (dict(checkpointing="0.5"), "--checkpointing 0.5 is a budget for the compiler; add --compile"),
    (
        dict(compile="max-autotune", parallel="fsdp"),
        "use --compile max-autotune-no-cudagraphs or default",
    ),
    (
        dict(compile="max-autotune", deterministic=True),
        "picks kernels by timing, so reruns may differ",
    ),
    (dict(profile=9, max_steps=9), "--profile 9 starts after 3 steps; use --max_steps 12 or more"),
    (dict(dtype="fp16", parallel="hsdp"), "--dtype fp16 .* does not go with --parallel hsdp"),
    (dict(params=-1), "--params -1 chooses a size for --minutes"),
    (dict(trials=2, WORLD_SIZE="2"), "--trials on several ranks needs a folder"),
    (dict(trials=2, target_val_loss=3.0), "remove --target_val_loss"),
    (dict(trials=2, resume="newest"), "--trials continues with --resume auto, not with 'newest'"),
    (
        dict(TORCHELASTIC_MAX_RESTARTS="3"),
        "--max-restarts needs a folder to resume from; give --out_dir",
    ),
    (dict(init_from="gpt2-xl"), "--init_from gpt2-xl: GPT-2's weights do not fit"),
    (
        dict(init_from="scratch"),
        "--init_from scratch is nanoGPT's; a run starts from scratch by itself",
    ),
)
DEVICE_CASES = (
    ("cpu", dict(attn="flex"), "--attn flex cannot train here"),
    ("cpu", dict(attn="varlen"), "--attn varlen runs on CUDA only, not on cpu"),
    ("cuda", dict(attn="flash", doc_mask=True), "--attn flash takes no mask"),
    ("cuda", dict(attn="cudnn", dtype="fp32"), "--attn cudnn needs bf16 or fp16"),
    (
        "t4",
        dict(attn="flash", dtype="fp16"),
        "--attn flash needs .* a GPU of compute capability 8.0",
    ),
    ("cpu", dict(fp8=True), "--fp8 needs a CUDA device"),
    ("cuda", dict(fp8=True, dtype="fp16"), "not fp16, --n_embd 128"),
    ("cuda", dict(deterministic=True), "--deterministic on CUDA needs a --micro_batch"),
    (
        "cuda",
        dict(deterministic=True, micro_batch=4, attn="cudnn"),
        "an --attn other than cudnn or varlen",
    ),
    (
        "cuda",
        dict(attn="flex", checkpointing="selective"),
        "cannot see into uncompiled FlexAttention",
    ),
    (
        "cuda",
        dict(compile="reduce-overhead", offload="activations"),
        "records CUDA graphs, which need activations",
    ),
    (
        "cuda",
        dict(compile="reduce-overhead", attn="varlen", doc_mask=True),
        "a fixed number of documents",
    ),
)
NO_EFFECT_CASES = (
    ("cpu", dict(alloc_conf="max_split_size_mb:64"), "--alloc_conf has no effect on cpu"),
    (
        "cuda",
        dict(alloc_conf="max_split_size_mb:64"),
        "--alloc_conf gives way to PYTORCH_ALLOC_CONF",
    ),
    ("cpu", dict(offload="optimizer"), "--offload optimizer has no effect on cpu"),
    ("cpu", dict(bucket_cap_mb=50), "--bucket_cap_mb 50 has no effect"),
    ("cpu", dict(parallel="ddp"), "--parallel ddp has no effect on one process"),
    ("cpu", dict(shard_size=2), "--shard_size 2 has no effect"),
    ("cpu", dict(grad_comm="bf16"), "--grad_comm bf16 has no effect"),
    ("cpu", dict(ngram=1), "--ngram 1 has no effect"),
    ("cpu", dict(window="SL:1024"), "--window SL:1024 has no effect"),
    ("cpu", dict(ngram_rows=99, ngram=0), "--ngram_rows 99 has no effect"),
    ("cpu", dict(short_frac=0.3, doc_align=True), "--short_frac has no effect"),
    ("cpu", dict(optimizer="adamw", muon_lr=0.5), "--muon_lr 0.5 has no effect"),
    ("cpu", dict(preset="gpt2-small"), "python data/prepare.py fineweb10B"),
    ("t4", {}, "--dtype auto is fp32 on a GPU without bf16"),
    ("t4", dict(dtype="bf16"), "--dtype bf16 is emulated"),
    ("apple", {}, "an Apple GPU is here and idle: --device mps"),
    ("cuda", dict(doc_mask=True), "keeps SDPA from its flash kernel"),
)


def check_device(device: str, **flags) -> list[str]:
    cfg = make_config(**dict(seq_len=1024, window="L") | flags)
    preset, windows = make_config(preset=cfg.preset), train_gpt.gpt_config(cfg, 257).layer_windows()
    kind = dict(t4="cuda", amd="cuda", apple="cpu").get(device, device)
    with (
        pytest.MonkeyPatch.context() as patch
    ):  # devices that are good enough for everything, but for an older GPU
        patch.setattr(
            torch.cuda,
            "get_device_capability",
            lambda *_: (7, 5) if device in ("t4", "amd") else (9, 0),
        )
        patch.setattr(torch.version, "hip", "7.0" if device == "amd" else None)
        patch.setattr(torch.backends.mps, "is_available", lambda: device == "apple")
        patch.setattr(torch.cuda, "is_bf16_supported", lambda **_: device != "t4")
        patch.setattr(flag_checks, "check_compiler", lambda device: None)
        patch.setenv("PYTORCH_ALLOC_CONF", "")
        return flag_checks.check_device(cfg, preset, DistContext(torch.device(kind)), windows)


@pytest.mark.parametrize("case, sentence", FLAG_CASES)
def test_flags_that_contradict_each_other_are_refused(case, sentence, monkeypatch):
    for name in filter(str.isupper, case):
        monkeypatch.setenv(name, case[name])
    with pytest.raises(UserError, match=sentence):
        make_config(**{name: value for name, value in case.items() if name.islower()})


@pytest.mark.parametrize("device, flags, sentence", DEVICE_CASES)
def test_flags_that_a_device_cannot_do_are_refused(device, flags, sentence):
    with pytest.raises(UserError, match=sentence):
        check_device(device, **flags)


@pytest.mark.parametrize("device, flags, sentence", NO_EFFECT_CASES)
def test_a_flag_without_effect_is_told(device, flags, sentence):
    (note,) = check_device(device, **flags)
    assert re.search(sentence, note), note


def test_every_sentence_of_the_rules_has_a_case(data, tmp_path, capsys):
    said = [
        inspect.getsource(check) for check in (flag_checks.check_flags, flag_checks.check_device)
    ]
    assert said[0].count("raise UserError") == len(FLAG_CASES) and said[1].count(
        "notes.append"
    ) == len(NO_EFFECT_CASES)
    assert all(check_device(device) == [] for device in ("cpu", "cuda", "mps"))
    assert check_device("cuda", deterministic=True, micro_batch=4) == []
    assert check_device("amd", attn="flash", dtype="bf16") == []
    tiny_run(tmp_path / "run", data=data, max_steps=1, offload="activations", bucket_cap_mb=5)
    for place in (capsys.readouterr().out, (tmp_path / "run" / "log.txt").read_text()):
        assert (
            "--offload activations has no effect on cpu" in place
            and "--bucket_cap_mb 5 has no effect" in place
        )


def test_ranks_share_a_batch_and_copies_evenly():
    assert (
        flag_checks.seqs_per_rank(512, 32, 4, 2) == 8
        and flag_checks.seqs_per_rank(512, 32, 0, 1) == 16
    )
    with pytest.raises(
        UserError,
        match="12 sequences of 32, which 5 ranks cannot share evenly; use --batch_tokens 320",
    ):
        flag_checks.seqs_per_rank(12 * 32, 32, 2, 5)
    with pytest.raises(
        UserError, match="--micro_batch 2 does not divide the 3 sequences .* use --micro_batch 1"
    ):
        flag_checks.seqs_per_rank(12 * 32, 32, 2, 4)
    assert [flag_checks.ranks_per_copy(kind, 2, 8, 4) for kind in ("ddp", "fsdp", "hsdp")] == [
        1,
        8,
        2,
    ]
    assert flag_checks.ranks_per_copy("hsdp", 0, 8, 4) == 4
    with pytest.raises(
        UserError, match="--shard_size 3 does not divide the 8 ranks; use --shard_size 2"
    ):
        flag_checks.ranks_per_copy("hsdp", 3, 8, 4)
    assert [
        largest_divisor(n, most) for n, most in ((16, 5), (12, 6), (7, 6), (1, 0), (36, 100))
    ] == [4, 6, 1, 1, 36]


# ---------------------------------------------------------------------------------------------------------------------
# What flags become


def test_learning_rates_by_rule():
    def rates(**flags):
        return train_gpt.learning_rates(make_config(**flags))

    assert rates(preset="gpt2-small") == (0.02, 0.006)  # the NanoGPT speedrun's
    assert rates() == pytest.approx((0.03, 0.012), rel=0.1)  # what was tuned by hand for laptop
    assert rates(optimizer="adamw")[1] == pytest.approx(
        0.008, rel=0.05
    )  # the best of 0.002, 0.004, 0.008, 0.016
    assert rates(preset="gpt2-small", optimizer="adamw")[1] == 0.002
    assert (
        rates(muon_lr=0.5, adam_lr=0.1) == (0.5, 0.1)
        and rates(optimizer="adamw", adam_lr=0.1)[1] == 0.1
    )
    muon, adam = zip(
        *(rates(n_embd=n_embd, max_steps=100 * n_embd) for n_embd in (64, 128, 256, 512))
    )
    assert sorted(muon, reverse=True) == list(muon) and sorted(adam, reverse=True) == list(adam)


def test_ngram_dropout_by_epochs():
    """0 where nothing is seen twice, and else each is kept about twice; what is given stays."""
    cfg, epochs = make_config(ngram=3), (0.2, 0.5, 1, 4, 40, 400)
    chosen = [train_gpt.get_ngram_dropout(cfg, n) for n in epochs]
    assert chosen[:2] == [0, 0] and 0.05 < chosen[2] < 0.15 and chosen == sorted(chosen)
    assert all(1.5 < n * (1 - p) < 2.5 for n, p in zip(epochs[3:], chosen[3:], strict=True))
    assert [
        train_gpt.get_ngram_dropout(dataclasses.replace(cfg, ngram_dropout=p), 99)
        for p in (0.0, 0.4)
    ] == [0, 0.4]


OPEN = ("dtype", "attn", "loss_chunk", "ngram", "muon_lr", "adam_lr", "ngram_dropout")


def test_open_flags_are_settled_once_and_kept(data, tmp_path, monkeypatch):
    """Also where a resumed run would choose otherwise, as on another machine or for another --max_steps."""
    flags = {k: v for k, v in TINY.items() if k not in OPEN} | dict(
        data=str(data), ngram_rows=65, max_steps=120
    )
    out_dir = dict(out_dir=str(tmp_path / "run"))
    train(make_config(**flags | out_dir))
    config = final(tmp_path / "run")["config"]
    assert (
        config["dtype"] in ("fp32", "bf16")
        and config["attn"] in ("blocked", "sdpa")
        and config["loss_chunk"] == 2048
    )
    assert (config["muon_lr"], config["adam_lr"]) == train_gpt.learning_rates(
        make_config(max_steps=120, n_embd=32)
    )
    epochs = 120 / 56.56
    assert config["ngram"] == 6 and config["ngram_dropout"] == pytest.approx(
        1 - 1 / (1.45 + 0.45 * (epochs - 1.75)), rel=1e-3
    )
    monkeypatch.setattr(
        train_gpt,
        "choose_auto_values",
        lambda *_: dict(dtype="fp16", attn="math", loss_chunk=64, ngram=4),
    )
    train(make_config(**out_dir, resume="newest", max_steps=125))
    again = final(tmp_path / "run")["config"]
    assert {name: again[name] for name in OPEN} == {name: config[name] for name in OPEN} and again[
        "max_steps"
    ] == 125
    stream = TokenStream(data, 32, 512)
    given = make_config(
        **flags
        | {name: value for name, value in config.items() if name in OPEN}
        | dict(data=str(data))
    )
    monkeypatch.undo()
    assert train_gpt.resolve_auto(given, CPU, stream, {}) == given  # what is given stays


def test_params_choose_sizes_that_flags_may_change(data, tmp_path):
    for params, text in (
        (300_000, "0.3M"),
        (2_000_000, "2m"),
        (10_000_000, "10M"),
        (1_500_000_000, "1.5B"),
    ):
        cfg = make_config(**parsed(f"--params {text}"))
        assert cfg.params == params and 12 * cfg.n_layer * cfg.n_embd**2 == pytest.approx(
            params, rel=0.32
        )
        assert cfg.n_embd // cfg.n_head in (64, 128) and cfg.batch_tokens % cfg.seq_len == 0
        assert cfg.batch_tokens * cfg.max_steps == pytest.approx(
            20 * 12 * cfg.n_layer * cfg.n_embd**2, rel=0.01
        )
    small = make_config(params=85_000_000)
    assert (small.n_layer, small.n_embd, small.n_head, small.ngram) == (12, 768, 6, 0)  # GPT-2's
    given = make_config(
        params=10_000_000, n_embd=256, batch_tokens=65536
    )  # what is not given follows from it
    assert (given.n_head, given.n_layer) == (2, 13) and given.max_steps == round(
        20 * 12 * 13 * 256**2 / 65536
    )
    assert (
        make_config(params=290_000, n_layer=2).n_embd == 128
        and make_config(params=290_000).n_layer == 6
    )
    flags = {k: v for k, v in TINY.items() if k not in ("n_layer", "n_embd", "n_head")} | dict(
        data=str(data)
    )
    train(make_config(**flags | dict(params=50_000, max_steps=2, out_dir=str(tmp_path / "run"))))
    again = dict(out_dir=str(tmp_path / "run"), resume="newest")
    assert (
        make_config(**again, params=50_000, max_steps=22).n_embd
        == make_config(**again).n_embd
        == 64
    )
    with pytest.raises(UserError, match="--params 60000 is for new runs"):
        make_config(**again, params=60_000)


def test_minutes_choose_a_model_that_sees_enough_tokens():
    chosen = [
        largest_size_for_time(minutes, {}, 1024, 1024, 1e9, flop_s=1e12) for minutes in (1, 10, 60)
    ]
    weights = [12 * flags["n_layer"] * flags["n_embd"] ** 2 for flags in chosen]
    assert weights == sorted(set(weights))
    for minutes, flags, n in zip((1, 10, 60), chosen, weights):
        tokens = flags["max_steps"] * flags["batch_tokens"]
        assert tokens == pytest.approx(
            tokens_within(minutes, 1e12, flags["n_layer"], flags["n_embd"], 1024, 1024), rel=0.05
        )
        assert 10 * n <= 1.05 * tokens and 6 * n * tokens < 1e12 * 60 * minutes
    small = largest_size_for_time(
        60, {}, 1024, 1024, 1e5, flop_s=1e12
    )  # a small text allows a small model, and few epochs
    assert (
        small["max_steps"] * small["batch_tokens"] <= 1.1 * max_epochs(small["weight_decay"]) * 1e5
    )
    assert make_config(minutes=3.0).params == -1 and make_config(minutes=3.0, n_layer=2).params == 0


def test_minutes_on_a_small_text_ask_for_more_weight_decay_of_large_models(monkeypatch):
    preset = dataclasses.asdict(make_config())
    monkeypatch.setattr(auto, "matmul_flops", lambda *_: 1e12)
    for given, text_tokens, epochs, decay in (
        (dict(), 1e5, 12, 0.8),
        (dict(), 1e8, 6, 0.05),
        (dict(n_layer=1, n_embd=64), 1e5, 6, 0.05),
        (dict(weight_decay=0.1), 1e5, 6, 0.1),
    ):
        flags = preset | given | dict(minutes=5.0, dtype="fp32", params=-1)
        settled = flags | auto.choose_auto_values(flags, preset, text_tokens, 257, CPU)
        assert settled["weight_decay"] == decay
        assert settled["max_steps"] * settled["batch_tokens"] <= 1.1 * epochs * text_tokens


def test_micro_batch_is_what_fits(monkeypatch):
    """The decision, with measurements made up: bytes per sequence by checkpointing mode."""
    tried = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)

    def fit(budget, n_seqs=64, seq_len=1024, modes=("none", "selective", "full")):
        mode, each, model = [], dict(none=10, selective=4, full=1), torch.nn.Linear(1, 1)
        model.blocks = torch.nn.ModuleList([torch.nn.Linear(1, 1)])
        monkeypatch.setattr(wrap_model, "apply_ac", lambda block, now: mode.append(now))
        monkeypatch.setattr(
            wrap_model,
            "step_fits",
            lambda model, opt, m, _: tried.append(m) or m * each[mode[-1]] <= budget,
        )
        return wrap_model.fit_micro_batch(
            model, lambda: None, n_seqs, seq_len, [*modes], CPU
        ), mode[-1]

    assert fit(10**9) == (64, "none") and tried == [64]
    assert fit(100) == (8, "none") and tried[1:] == [64, 32, 16, 8]
    assert fit(30) == (4, "selective")  # of which 4,096 tokens fit: fewer leave a GPU idle
    assert fit(3) == (2, "full") and fit(100, n_seqs=60) == (6, "none")
    assert fit(35, modes=["none"]) == (2, "none")
    with pytest.raises(UserError, match="one sequence does not fit into this GPU's memory"):
        fit(0)


def test_a_peak_is_of_the_device_by_that_name(monkeypatch):
    peaks = {
        "H100 80GB HBM3": 989,
        "H100 PCIe": 756,
        "H100 NVL": 835,
        "H200": 989,
        "GH200 480GB": None,
        "A10G": 70,
    }
    peaks |= {
        "H100 80GB HBM3 MIG 1g.10gb": None,
        "A100-SXM4-80GB": 312,
        "A10": 125,
        "RTX A1000": None,
        "L4": 121,
    }
    peaks |= {
        "RTX A6000": 155,
        "L40S": 362,
        "GeForce RTX 4090": 165,
        "GeForce RTX 4090 D": None,
        "A10-4Q": None,
    }
    peaks |= {"GeForce RTX 3090 Ti": None, "GeForce RTX 4090 Laptop GPU": None}
    for name, peak in peaks.items():
        monkeypatch.setattr(
            torch.cuda, "get_device_name", lambda device, name=name: f"NVIDIA {name}"
        )
        assert device.peak_flops(torch.device("cuda"), "bf16") == (peak and 1e12 * peak), name


# ---------------------------------------------------------------------------------------------------------------------
# What scripts and imports do to a process


@pytest.mark.parametrize("script", ["train_gpt.py", "bench.py", "sample.py", "export.py"])
def test_scripts_set_what_pytorch_reads_before_it_is_imported(script):
    code = """if True:
        import os, runpy, sys
        class UntilTorch:
            def find_spec(name, *_):
                if name == "torch":
                    print(*(os.environ.get(n) for n in ("GOMP_SPINCOUNT", "TORCHINDUCTOR_VEC_ISA_OK")), flush=True)
                    os._exit(0)
        sys.meta_path.insert(0, UntilTorch)
        sys.path[0] = os.getcwd()
        runpy.run_path(sys.argv[1], run_name="__main__")
    """
    env = {
        k: v
        for k, v in os.environ.items()
        if k not in ("GOMP_SPINCOUNT", "TORCHINDUCTOR_VEC_ISA_OK")
    }
    for given in ({}, dict(GOMP_SPINCOUNT="77")):  # the user's own stays
        done = run_python("-c", code, script, env=env | given)
        assert done.stdout.split() == [
            "None" if script == "sample.py" and not given else given.get("GOMP_SPINCOUNT", "5000"),
            "1",
        ], done
