"""Flags: mistakes are told in one sentence, rules, automatic values and sizes."""

import dataclasses
import os
import re
from pathlib import Path

import numpy as np
import pytest
import torch

import train_gpt
from common.errors import UserError
from common.values import largest_divisor
from conftest import (
    ROOT,
    TINY,
    flags_of,
    make_data,
    parsed,
    refusal,
    run_forked,
    run_main,
    run_python,
    stream_of,
    tiny_run,
)
from runtime import auto, flag_checks, model_setup
from runtime.auto import choose_by_epochs
from runtime.device import peak_flops
from runtime.flags import OTHER_NAMES, integer, kind_of
from runtime.ranks import DistContext, join_ranks
from runtime.resume import Start, keep_flags
from runtime.sizes import (
    SIZES,
    choose_finetuning,
    choose_size,
    expected_loss,
    max_epochs,
    tokens_in_time,
)
from train_gpt import Config, make_config

CPU = DistContext()


# --------------------------------------------------------------------------------------------------
# The user's mistakes: one sentence, exit code 2


@pytest.mark.parametrize(
    "flags, sentence",
    [
        ("max_steps=3", "unknown flag max_steps=3; did you mean --max_steps?"),
        ("--n_layers 3", "unknown flag --n_layers; did you mean n_layer"),
        ("--n_layer 3.5", "invalid integer value: '3.5'"),
        ("--preset laptpo", "--preset is 'laptpo'; expected one of .*; did you mean laptop"),
        ("--block_size 64", "unknown flag --block_size; use --seq_len"),
        ("config/train_gpt2.py", "unknown flag config/.*; there are no configuration files"),
        ("--device gpu", "expected one of auto, .*; use cuda"),
        ("--compile=True", "expected one of off, .*; give the flag without a value"),
        ("--init_from gpt2-xl", "no run or checkpoint gpt2-xl; .* --preset gpt2-small"),
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
        ("--doc_align --vocab_size=300 --data NO_DOCS", "finds no document"),
        ("--vocab_size 200", "less than the 257 of"),
        (
            "--seq_len=8192 --batch_tokens=8192 --micro_batch=1",
            "has 4333 tokens, too few .* use more data or a smaller --seq_len",
        ),
        ("--data /nowhere", "no folder /nowhere; .*python data/prepare.py shakespeare"),
        (f"--data {__file__}", "test_flags.py is a file; expected a folder"),
        (f"--out_dir {__file__}", "test_flags.py cannot be read or written .* a different path"),
        pytest.param(
            "--device cuda",
            "PyTorch sees no CUDA device here; use --device cpu",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is one"),
        ),
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


# The flags of its train.py
NANOGPT = """
    out_dir eval_interval log_interval eval_iters eval_only always_save_checkpoint init_from
    wandb_log wandb_project wandb_run_name dataset gradient_accumulation_steps batch_size
    block_size n_layer n_head n_embd dropout bias learning_rate max_iters weight_decay beta1
    beta2 grad_clip decay_lr warmup_iters lr_decay_iters min_lr backend device dtype compile
"""


def test_from_python_values_are_checked_too():
    assert make_config(muon_lr=1).muon_lr == 1.0
    assert make_config(max_steps=np.int64(3), adam_lr=np.float32(0.5)).max_steps == 3
    for flags, said in (
        (dict(n_layer="2"), "expected int"),
        (dict(wandb=1), "expected bool"),
        (dict(lr=1), "use --muon_"),
        (dict(resume="x", init_from="x.pt"), "--resume and --init_from contradict each other"),
        (dict(compile="defualt"), "no-cudagraphs; did you mean default"),
    ):
        assert said in refusal(make_config, **flags)
    ours = {f.name for f in dataclasses.fields(Config)}
    assert OTHER_NAMES.keys() & ours == {"out_dir"}
    assert set(NANOGPT.split()) <= OTHER_NAMES.keys() | ours


def test_a_compiler_that_does_not_work_is_told(data, tmp_path):
    argv = flags_of(TINY | dict(data=data, out_dir=tmp_path / "run", compile="default"))
    env = os.environ | dict(TORCHINDUCTOR_CACHE_DIR=__file__)
    done = run_forked(tmp_path, ROOT / "train_gpt.py", *argv, env=env)
    said = r"error: --compile failed in the compiler or its cache \(.*\); repair it.*\n"
    assert done.code == 2 and re.fullmatch(said, done.stderr), done
    assert not (tmp_path / "run").exists()


# --------------------------------------------------------------------------------------------------
# Declaring and reading flags


def test_variables_of_a_launcher(monkeypatch):
    for name, value, says in (
        ("SLURM_STEP_NUM_TASKS", "2", "srun has started 2 tasks"),
        ("RANK", "1", "RANK is 1, but WORLD_SIZE is 1; unset both"),
        ("WORLD_SIZE", "two", "is 'two'; expected an"),
        ("WORLD_SIZE", "2", "RANK expected, but not set"),
    ):
        with monkeypatch.context() as patch:
            patch.setenv(name, value)
            assert says in refusal(join_ranks)
    for name, value in (("WORLD_SIZE", "1"), ("WORLD_SIZE", ""), ("RANK", "")):
        monkeypatch.setenv(name, value)
        assert join_ranks() == CPU
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "3")
    said = "--max-restarts needs a folder to resume from; give --out_dir"
    assert said in refusal(flag_checks.check_flags, make_config())


def test_values_as_they_are_written():
    written = {"1000": 1000, "1_000": 1000, "1e3": 1000, "4k": 4000, "-1": -1}
    written |= {"2M": 2 * 10**6, "1.5B": 1500 * 10**6}
    assert {text: integer(text) for text in written} == written
    for text in ("", "k", "1.5", "1e-3", "nan", "inf", "0x10", "1e999999999", "1e5000"):
        with pytest.raises((ValueError, OverflowError)):
            integer(text)
    bare = dict(compile="default", resume="newest", profile=5, dtype="bf16")
    assert parsed("--compile --resume --profile --bf16") == bare and parsed("") == {}
    given = dict(compile="max-autotune", wandb=False, loss_chunk="auto", keep="all")
    assert parsed(" ".join(flags_of(given))) == given
    assert make_config(**given).loss_chunk is None


# --------------------------------------------------------------------------------------------------
# runtime/flag_checks.py: a case for every sentence, of which no earlier one says anything

REFUSED = (
    ("cpu", "--max_steps auto", "--max_steps auto and --batch_tokens auto are for --init_from"),
    ("cpu", "--dropout 1.0", "--dropout is 1.0; expected a fraction below 1"),
    ("cpu", "--short_frac 70", "--short_frac is 70.0; expected a fraction below 1"),
    ("cpu", "--dropout 0.1 --checkpointing 0.3 --compile", "use none, selective or full"),
    ("cpu", "--ngram_dropout 1.0", "--ngram_dropout is 1.0; expected a fraction below 1"),
    ("cpu", "--warmup_frac 0.5 --cooldown_frac 0.6", "add up to more than 1"),
    ("cpu", "--n_head 5", "make it a multiple of 10, or change --n_head"),
    ("cpu", "--window SLX", "--window is 'SLX'; expected letters S and L"),
    ("cpu", "--batch_tokens 1000", "not a multiple of --seq_len 1024; change one of them"),
    ("cpu", "--minutes 1 --batch_tokens 1000", "not a multiple of --seq_len 1024; change one"),
    ("cpu", "--checkpointing 1.0", "is '1.0'; expected auto, none, selective, full, or a"),
    ("cpu", "--checkpointing 0.5", "with --attn auto needs the compiler; add --compile"),
    ("cpu", "--attn flex --checkpointing selective", "with --attn flex needs the compiler"),
    ("cpu", "--compile max-autotune --parallel fsdp", "--compile max-autotune-no-cudagraphs"),
    ("cpu", "--compile reduce-overhead --offload activations", "CUDA graphs, which need"),
    ("cpu", "--compile reduce-overhead --attn varlen --doc_mask", "documents in varlen"),
    ("cpu", "--dtype fp16 --parallel fsdp", "which does not work with --parallel fsdp"),
    ("cpu", "--params auto", "--params auto chooses the size of a new model that suits --min"),
    ("cpu", "--params auto --minutes 1.0 --init_from x", "add --minutes and remove --init_from"),
    # On a device
    ("cpu", "--attn flex", "--attn flex trains on CUDA only, not on cpu"),
    ("cuda", "--attn flash --doc_mask", "--attn flash takes no mask"),
    ("cuda", "--attn cudnn --dtype fp32", "--attn cudnn needs bf16 or fp16"),
    ("t4", "--attn flash --dtype fp16", "a GPU of compute capability 8.0"),
    ("t4", "--fp8 --dtype bf16", "a GPU of compute capability 8.9"),
    ("cpu", "--fp8", "--fp8 needs CUDA, not cpu"),
    ("cpu", "--trials 2", "--trials is for the command line"),
    ("cuda", "--fp8 --dtype fp16", "--fp8 needs --dtype bf16"),
    ("cuda", "--deterministic", "--deterministic on CUDA needs --micro_batch"),
    ("cuda", "--deterministic --micro_batch 4 --attn cudnn", "other than cudnn and varlen"),
)
NO_EFFECT = (
    "--offload optimizer",
    "--short_frac 0.5 --doc_align",
    "--muon_lr 0.1 --optimizer adamw",
    "--embed_decay 1.5 --optimizer adamw",
    "--shard_size 2",
    "--ngram_dropout 0.5 --ngram 0",
)


def warnings_of(kind: str, flags: str = "") -> list[str]:
    """On a device that is good enough for everything, or on an older GPU ("t4")."""
    cfg = make_config(**dict(seq_len=1024, window="L") | parsed(flags))
    flag_checks.check_flags(cfg)
    capability = (7, 5) if kind == "t4" else (9, 0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
        patch.setattr(torch.cuda, "is_bf16_supported", lambda **_: kind != "t4")
        patch.setattr(flag_checks, "check_compiler", lambda device: None)
        device = torch.device("cuda" if kind == "t4" else kind)
        return flag_checks.check_device(cfg, DistContext(device))


@pytest.mark.parametrize("kind, flags, sentence", REFUSED)
def test_flags_that_cannot_work_are_refused(kind, flags, sentence):
    assert sentence in refusal(warnings_of, kind, flags)


def test_a_flag_without_effect_is_told(data, tmp_path):
    for flags in NO_EFFECT:
        said = f"{flags.split()[0]} has no effect with the other flags on cpu"
        assert warnings_of("cpu", flags) == [said]
    for kind in ("cpu", "cuda", "mps"):
        assert warnings_of(kind) == []
    assert warnings_of("cuda", "--deterministic --micro_batch 4") == []
    tiny_run(tmp_path, data=data, max_steps=1, offload="activations")
    assert "WARNING: --offload has no effect with" in (tmp_path / "log.txt").read_text()


def test_ranks_share_a_batch_and_copies_evenly():
    def seqs_per_rank(world_size: int, n_seqs: int = 16, **flags) -> int:
        cfg = make_config(seq_len=32, batch_tokens=32 * n_seqs, **flags)
        return model_setup.seqs_per_rank(cfg, world_size)

    assert seqs_per_rank(2, micro_batch=4) == 8 and seqs_per_rank(1) == 16
    refused = "cannot be shared evenly by 5 ranks; use a multiple of 160"
    assert refused in refusal(seqs_per_rank, 5, 12)
    refused = "--micro_batch 2 does not divide the 3 sequences"
    assert refused in refusal(seqs_per_rank, 4, 12, micro_batch=2)
    for n, most, divisor in ((16, 5, 4), (12, 6, 6), (7, 6, 1), (1, 0, 1), (36, 100, 36)):
        assert largest_divisor(n, most) == divisor


# --------------------------------------------------------------------------------------------------
# What flags become


def test_learning_rates_by_rule():
    def rates(**flags):
        cfg = train_gpt.choose_learning_rates(make_config(**flags))
        return cfg.muon_lr, cfg.adam_lr

    assert rates(preset="gpt2-small", max_steps=5000) == (0.02, 0.006)  # the speedrun's
    assert rates() == pytest.approx((0.03, 0.012), rel=0.1)  # what was tuned by hand for laptop
    assert rates(preset="gpt2-small", optimizer="adamw")[1] == 0.002
    # Wider models in longer runs take lower rates, both of them
    for kind in (0, 1):
        found = [rates(n_embd=n, max_steps=100 * n)[kind] for n in (64, 128, 256, 512)]
        assert sorted(found, reverse=True) == found


def test_dropout_and_decay_by_epochs():
    """0 where nothing is seen twice; otherwise each n-gram is kept about twice."""

    def chosen(epochs: float, name: str, **flags) -> float:
        """What is chosen for a dataset of 10,000 tokens, so many epochs and trigrams."""
        flags |= dict(ngram=3, batch_tokens=32, seq_len=32, max_steps=round(312 * epochs))
        return choose_by_epochs(make_config(**flags), stream_of(10**4, 1024))[name]

    epochs = (0.2, 0.5, 1, 4, 40)
    dropout = [chosen(n, "ngram_dropout") for n in epochs]
    assert dropout[:2] == [0, 0] and 0.05 < dropout[2] < 0.15
    assert all(1.5 < n * (1 - p) < 2.5 for n, p in zip(epochs[3:], dropout[3:]))
    assert [chosen(n, "dropout") for n in (3.9, 4.1)] == [0, 0.1]
    for flags in (dict(init_from="runs/x"), dict(checkpointing="0.3")):
        assert chosen(5, "dropout", **flags) == 0
    # Embeddings decay where the dataset is repeated
    decays = [chosen(n, "embed_decay") for n in (0.6, 1.75, 5)]
    assert decays == pytest.approx([0, 1, 1.5])
    for flags in (dict(init_from="runs/x"), dict(optimizer="adamw")):
        assert chosen(5, "embed_decay", **flags) == 0
    assert [chosen(n, "patience") for n in (1, 5, 9, 11, 40)] == [0, 0, 0, 5, 5]
    for flags in (dict(patience=0), dict(init_from="runs/x")):
        assert chosen(40, "patience", **flags) == 0


def test_params_choose_sizes_that_flags_may_change():
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


def test_minutes_choose_the_size_whose_expected_loss_is_lowest():
    def choose(minutes: float, n_tokens: int, flops: float = 1e12) -> Config:
        """The config, with the steps that were chosen with the size."""
        cfg = make_config(minutes=float(minutes), seq_len=1024)
        return dataclasses.replace(cfg, **choose_size(cfg, n_tokens, 1024, flops))

    # More time, larger models; each is as good as any, and trains for as long as it may
    n_tokens, sizes = 10**9, []
    for minutes in (1, 10, 60):
        cfg = choose(minutes, n_tokens)
        n_params, tokens = 12 * cfg.n_layer * cfg.n_embd**2, cfg.max_steps * cfg.batch_tokens
        assert tokens == pytest.approx(tokens_in_time(cfg, n_tokens, 1024, flops=1e12), rel=0.05)
        assert 6 * n_params * tokens < 1e12 * 60 * minutes
        other = dataclasses.replace(cfg, n_layer=4, n_embd=256)
        other_tokens = tokens_in_time(other, n_tokens, 1024, flops=1e12)
        other_loss = expected_loss(12 * 4 * 256**2, other_tokens, n_tokens)
        assert expected_loss(n_params, tokens, n_tokens) < 1.01 * other_loss
        sizes.append(n_params)
    assert sizes == sorted(set(sizes)) and sizes[0] > min(SIZES) and sizes[-1] < max(SIZES)

    # A small dataset allows a small model, and few epochs. A slow machine allows 2 x 64
    small = choose(60, 10**5)
    assert 12 * small.n_layer * small.n_embd**2 < 5e5
    epochs = max_epochs(small, 10**5, 1024)
    assert small.max_steps * small.batch_tokens == pytest.approx(epochs * 1e5, rel=0.05)
    assert [choose(2, 10**6, flops).n_embd for flops in (1e11, 3e10)] == [128, 64]


def test_finetuning_takes_steps_by_the_size_of_the_dataset():
    base = dict(preset="laptop", init_from="run", seq_len=512)
    for flags, chosen in (
        ({}, (None, None, None)),
        (dict(eval_every=150, patience=0), (None, 0, 150)),
        (dict(max_steps=9), (9, None, 150)),
    ):
        cfg = make_config(**base | flags)
        assert (cfg.max_steps, cfg.patience, cfg.eval_every) == chosen

    chosen = dict(max_steps=9, batch_tokens=512)
    cfg = dataclasses.replace(make_config(**base), **chosen)
    assert choose_by_epochs(cfg, stream_of(10**4, 1024))["patience"] == 3

    def choose(n_tokens: int, world_size: int = 1, **flags) -> tuple[int, int]:
        cfg = make_config(**base | flags)
        chosen = choose_finetuning(cfg, n_tokens, cfg.seq_len * world_size)
        return chosen["batch_tokens"], chosen["max_steps"]

    assert choose(3584) == (2048, 154) and choose(3584, max_steps=9) == (2048, 9)
    assert choose(94000, seq_len=96)[0] % 96 == 0  # 8,192 is no multiple
    assert choose(3584, world_size=3)[0] == 3 * 512
    # A large one: an epoch, or as long as a new model of this size trains
    assert choose(6 * 10**6) == (8192, 750) and choose(10**8) == (8192, 960)
    assert choose(10**9, n_layer=12, n_embd=768) == (131072, 7629)
    assert max_epochs(make_config(**base), 3584, 1024) * 3584 == pytest.approx(154 * 2048, rel=0.01)


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
        cfg = resolved(make_config(**given, minutes=5.0), stream)
        assert cfg.max_steps * cfg.batch_tokens == pytest.approx(epochs * 1e5, rel=0.05)
        assert (cfg.ngram, cfg.weight_decay) == (ngram, 0.05)
        # Short sequences save time, unless the epochs leave some
        assert cfg.short_frac == 0
        assert resolved(make_config(**given, minutes=5.0, short_frac=0.2), stream).short_frac == 0.2
    for n_tokens, epochs_done, short_frac in ((4e5, 5, 0), (9e5, 2.9, 0.7)):
        small = make_config(minutes=5.0, n_layer=2, n_embd=128)
        cfg = resolved(small, stream_of(n_tokens, 1024), 1e11)
        assert cfg.max_steps * cfg.batch_tokens == pytest.approx(epochs_done * n_tokens, rel=0.02)
        assert cfg.short_frac == short_frac
    # A context is that of a small dataset; a large evaluation comes seldom
    assert cfg.eval_every == 150
    stream.seq_len, stream.num_eval_seqs = 512, lambda eval_tokens: eval_tokens // 512
    cfg = resolved(make_config(**given, minutes=5.0), stream)
    assert cfg.seq_len == 512 and cfg.eval_every * cfg.batch_tokens >= 8 * 2**18
    # A small table has no room for n-grams of 4 byte pairs. auto: ten evaluations
    small = resolved(make_config(ngram_rows=65536, max_steps=19, eval_every=None), stream)
    assert (small.ngram, small.eval_every) == (6 if vocab_size == 257 else 3, 2)


def start_of(cfg: Config, is_resume: bool = True) -> Start:
    """A checkpoint of a run with these flags."""
    model_config = dataclasses.asdict(train_gpt.gpt_config(cfg, 257))
    checkpoint = dict(config=dataclasses.asdict(cfg), model_config=model_config)
    return Start(Path("ckpt_1.pt"), checkpoint, is_resume)


def test_a_resumed_run_keeps_what_was_chosen(monkeypatch):
    stream = stream_of(10**5, vocab_size=257)
    cfg = make_config(minutes=5.0)
    saved = resolved(cfg, stream)
    assert resolved(cfg, stream, 1e9).n_embd < saved.n_embd  # measured again: another size
    # On another machine
    monkeypatch.setattr(auto, "faster_dtype", lambda dtype, *_: dtype.replace("auto", "fp16"))
    for name in ("choose_attention", "choose_loss_chunk", "choose_ngram"):
        monkeypatch.setattr(auto, name, None)
    for given in (cfg, make_config(resume="newest"), make_config(params=None, minutes=5.0)):
        again = resolved(keep_flags(given, start_of(saved)), stream, 1e9)
        assert dataclasses.replace(again, resume="") == saved
    # With fewer minutes, fewer steps of the same model
    endless = keep_flags(make_config(minutes=0.0), start_of(saved))
    assert (endless.minutes, endless.max_steps) == (0, saved.max_steps)
    fewer = resolved(keep_flags(make_config(minutes=0.1), start_of(saved)), stream, 1e11)
    assert fewer.max_steps < saved.max_steps / 2
    assert fewer == dataclasses.replace(saved, minutes=0.1, max_steps=fewer.max_steps)
    before = start_of(saved)
    del before.checkpoint["config"]["dropout"]  # a run from before the flag
    assert keep_flags(cfg, before).dropout == 0
    said = "--optimizer adamw is for new runs; ckpt_1.pt has muon"
    assert said in refusal(keep_flags, make_config(optimizer="adamw"), start_of(saved))
    # New weights take the model's shape, unless a preset gives another one
    kept = keep_flags(make_config(init_from="x"), start_of(saved, is_resume=False))
    assert "seq_len" not in kept.given  # the context may be shortened
    kept = keep_flags(make_config(init_from="x", preset="mini"), start_of(saved, is_resume=False))
    assert kept.n_layer == 6


def other_value(field: dataclasses.Field, value):
    """A value of a flag that is neither this one nor "choose it"."""
    special = dict(checkpointing="full", window="SL:64", preset="laptop", data="/data", n_head=2)
    kind = kind_of(field)
    if field.name in special:
        return special[field.name]
    if kind is str:
        return ["given", *(word for word in field.metadata["words"] if word != value)][-1]
    if kind is bool:
        return not value
    if kind is float:
        return 0.05 if value != 0.05 else 0.1
    return 2 * value if isinstance(value, int) and value else 64


CONTRADICTIONS = {"max_steps": "minutes", "init_from": "resume"}  # and the other way round


@pytest.mark.parametrize("mode", ["alone", "minutes", "params", "resume", "init_from"])
def test_a_given_flag_is_what_the_run_uses(mode):
    """Every flag with two values, of which one is the preset's or the run's own."""
    first = dict(n_layer=1, n_embd=64, n_head=1, seq_len=64, batch_tokens=128, eval_tokens=64)
    stream = stream_of(10**5, vocab_size=257)
    start = start_of(resolved(make_config(**first, max_steps=1), stream), mode == "resume")
    flags = {mode: dict(minutes=30.0, params=300_000).get(mode, "ckpt_1.pt")}
    if mode == "alone":
        flags = {}

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


def test_micro_batch_is_what_fits(monkeypatch):
    """The decision, with measurements made up: bytes per sequence by mode of recomputation."""
    bytes_per_seq, modes, tried = dict(none=10, selective=4, full=1), [], []
    monkeypatch.setattr(model_setup, "apply_recompute", lambda _, mode: modes.append(mode))
    monkeypatch.setattr(model_setup, "set_mode", lambda _, mode: modes.append(mode))
    monkeypatch.setattr(model_setup, "dummy_step", lambda *_: tried.append("update"))

    def choose(memory, n_seqs=64, **flags) -> tuple[int, str]:
        def passes_fit(model, micro_batch, seq_len) -> bool:
            tried.append(micro_batch)
            return micro_batch * bytes_per_seq[modes[-1]] <= memory

        monkeypatch.setattr(model_setup, "passes_fit", passes_fit)
        tried.clear()
        cfg = make_config(seq_len=1024, batch_tokens=n_seqs * 1024, **flags)
        model, on_cuda = torch.nn.Linear(1, 1), DistContext(torch.device("cuda"))
        model.blocks = [model]
        micro_batch = model_setup.fit_into_memory(model, cfg, lambda *_: None, on_cuda)
        return micro_batch, modes[-1]

    # An update, in which ranks wait for each other, comes before anything may run out of memory
    assert choose(10**9) == (64, "none") and tried == [1, "update", 64]  # all that there are
    assert choose(100) == (8, "none")
    assert choose(30) == (4, "selective")  # of which 4,096 tokens fit: fewer leave a GPU idle
    assert choose(3) == (2, "full") and choose(100, n_seqs=60) == (6, "none")
    assert choose(35, checkpointing="none") == (2, "none")
    assert "one sequence does not fit into this GPU's memory" in refusal(choose, 0)
    # Compiled, twice as many are tried once more
    assert choose(100, compile="default") == (8, "none") and tried[2:] == [64, 32, 16, 8, 16]


def test_a_peak_is_of_the_device_by_that_name(monkeypatch):
    peaks = {
        "H100 80GB HBM3": 989e12,
        "H200": 989e12,
        "A10-4Q": None,
        "RTX A1000": None,
        "GeForce RTX 4090": 165e12,
        "GeForce RTX 4080 SUPER": 104e12,
        "GH200 480GB": 989e12,
        "GeForce RTX 4090 Laptop GPU": None,
    }
    for name, peak in peaks.items():
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda _, name=name: f"NVIDIA {name}")
        assert peak_flops(torch.device("cuda"), "bf16") == peak, name


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
