"""Flags that cannot go together, cannot work on this device, or have no effect here: one row each.

A row is (when, sentence): the first whose condition holds refuses the run before any work is done. `f` has the flags as
attributes, `hw` the facts check_device collects; sentences are format strings, with values such as {f.n_embd}.
"""

import math
import os
import re
from types import SimpleNamespace

import torch

from runtime.errors import UserError
from runtime.flags import check_ranges
from runtime.launch import ALLOC_CONF_VARIABLES
from runtime.ranks import DistContext
from runtime.sizes import hardware_dtype, largest_divisor

AC_MODES = ("none", "selective", "full")


def activation_budget(checkpointing: str) -> float:
    """The fraction of activation memory that --checkpointing leaves the compiler; 1 for its modes, nan for nonsense."""
    if checkpointing in ("auto", *AC_MODES):
        return 1.0
    try:
        return float(checkpointing)
    except ValueError:
        return math.nan


def uses_cudagraphs(compile: str) -> bool:
    """Whether this --compile mode replays CUDA graphs on a GPU; the modes are treated alike on a CPU."""
    return compile in ("reduce-overhead", "max-autotune")


def is_sharded(parallel: str) -> bool:
    """Whether each rank holds a part of the weights only."""
    return parallel in ("fsdp", "hsdp")


def nearest_batch(f) -> int:
    return max(1, round(f.batch_tokens / f.seq_len)) * f.seq_len


FLAG_RULES = (
    (
        lambda f: f.bf16 and f.dtype not in ("auto", "bf16"),
        "--bf16 and --dtype {f.dtype} contradict each other; give one of them",
    ),
    (
        lambda f: f.warmup_frac + f.cooldown_frac > 1 and not f.resume,  # of what --minutes may have chosen
        "--warmup_frac {f.warmup_frac} and --cooldown_frac {f.cooldown_frac} add up to more than 1; lower one",
    ),
    (
        lambda f: f.n_embd % (2 * f.n_head),
        "--n_embd {f.n_embd} cannot be cut into {f.n_head} heads of even dimension; make it a multiple of {heads}, or "
        "change --n_head",
    ),
    (
        lambda f: not re.fullmatch(r"[SL]+(:[1-9]\d*)?", f.window),
        "--window is {f.window!r}; expected letters S and L, as in SSSL or SSSL:256",
    ),
    (
        lambda f: f.batch_tokens % f.seq_len,
        "--batch_tokens {f.batch_tokens} is not a multiple of --seq_len {f.seq_len}; use --batch_tokens {batch}",
    ),
    (
        lambda f: f.ngram_dropout > 0 and f.ngram in (0, 1) or f.ngram_dropout >= 1 or -1 < f.ngram_dropout < 0,
        "--ngram_dropout is {f.ngram_dropout:g} with --ngram {f.ngram}; expected a probability below 1 (or -1), and "
        "n-grams to drop, as with --ngram 4",
    ),
    (
        lambda f: f.checkpointing not in ("auto", *AC_MODES) and not 0 < activation_budget(f.checkpointing) < 1,
        "--checkpointing is {f.checkpointing!r}; expected auto, none, selective, full or a number between 0 and 1",
    ),
    (
        lambda f: activation_budget(f.checkpointing) < 1 and f.compile == "off",
        "--checkpointing {f.checkpointing} is a budget for the compiler; add --compile",
    ),
    (
        lambda f: uses_cudagraphs(f.compile) and is_sharded(f.parallel),
        "--compile {f.compile} records CUDA graphs, which FSDP's moving weights break; use --compile "
        "max-autotune-no-cudagraphs or default",
    ),
    (
        lambda f: f.deterministic and f.compile.startswith("max-autotune"),
        "--compile {f.compile} picks kernels by timing, so reruns may differ; use default",
    ),
    (
        lambda f: f.profile and f.max_steps < f.profile + 3,
        "--profile {f.profile} starts after 3 steps; use --max_steps {profiled} or more",
    ),
    (
        lambda f: f.dtype == "fp16" and is_sharded(f.parallel),
        "--dtype fp16 scales the loss, which does not go with --parallel {f.parallel}; use --dtype bf16",
    ),
    (
        lambda f: f.trials > 1 and f.target_val_loss,
        "--trials compares runs of one length, so none may stop early; remove --target_val_loss",
    ),
    (
        lambda f: f.trials > 1 and f.resume not in ("", "auto"),
        "--trials continues with --resume auto, not with {f.resume!r}, which is about one run",
    ),
    (
        lambda f: not f.out_dir and int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", 0)) > 0,
        "torchrun --max-restarts needs a folder to resume from; give --out_dir",
    ),
    (
        lambda f: f.init_from.startswith("gpt2") and not os.path.exists(f.init_from),
        "--init_from {f.init_from}: GPT-2's weights do not fit, as this model has no learned positions, biases or "
        "LayerNorm; give a run or checkpoint of this trainer",
    ),
    (
        lambda f: f.init_from in ("scratch", "resume") and not os.path.exists(f.init_from),
        "--init_from {f.init_from} is nanoGPT's; a run starts from scratch by itself, and --resume continues one",
    ),
    (lambda f: f.resume and f.init_from, "--resume and --init_from contradict each other; give one of them"),
)

DEVICE_RULES = (
    (
        lambda f, hw: f.attn == "flex" and not hw.cuda,
        "--attn flex cannot train here: FlexAttention has a backward pass on CUDA only; use --attn sdpa",
    ),
    (
        lambda f, hw: f.attn in ("cudnn", "efficient", "varlen", "fa3", "fa4") and not hw.cuda,
        "--attn {f.attn} runs on CUDA only, not on {hw.type}; use auto, blocked or sdpa",
    ),
    (
        lambda f, hw: f.attn in ("flash", "fa3", "fa4") and hw.cuda and hw.masked,
        "--attn {f.attn} takes no mask, as --window and --doc_mask need; use --attn flex or varlen",
    ),
    (
        lambda f, hw: f.attn in ("flash", "cudnn", "varlen", "fa3", "fa4") and hw.cuda and hw.dtype == "fp32",
        "--attn {f.attn} needs bf16 or fp16; add --bf16, or use --attn efficient",
    ),
    (
        lambda f, hw: f.attn in ("flash", "cudnn", "varlen", "fa3", "fa4") and hw.cuda and hw.capability < (8, 0),
        "--attn {f.attn} needs a GPU of compute capability 8.0 or newer (A100, RTX 30); use --attn efficient",
    ),
    (
        lambda f, hw: f.fp8 and hw.capability < (8, 9),
        "--fp8 needs a CUDA device of compute capability 8.9 or newer (L4, RTX 40, H100); remove it",
    ),
    (
        lambda f, hw: f.fp8 and (hw.dtype != "bf16" or f.n_embd % 16 or f.vocab_size % 16),
        "--fp8 needs bf16 and sizes that 16 divides, not {hw.dtype}, --n_embd {f.n_embd} and "
        "--vocab_size {f.vocab_size}",
    ),
    (
        lambda f, hw: is_sharded(f.parallel) and hw.type == "mps",
        "--parallel {f.parallel} does not run on MPS; remove it",
    ),
    (
        lambda f, hw: f.deterministic and hw.cuda and (not f.micro_batch or f.attn in ("cudnn", "varlen")),
        "--deterministic on CUDA needs an explicit --micro_batch, and an --attn other than cudnn or varlen",
    ),
    (
        lambda f, hw: f.attn == "flex" and f.checkpointing == "selective" and f.compile == "off",
        "--checkpointing selective cannot see into uncompiled FlexAttention; add --compile",
    ),
    (
        lambda f, hw: (
            uses_cudagraphs(f.compile) and hw.cuda and (f.offload == "activations" or f.attn == "varlen" and f.doc_mask)
        ),
        "--compile {f.compile} records CUDA graphs, which need activations at fixed addresses and a fixed number of "
        "documents; use --compile max-autotune-no-cudagraphs or default",
    ),
)

# What is accepted, with one log line: it has no effect here, or not the one that one may expect.
NO_EFFECT = (
    (lambda f, hw: f.alloc_conf and not hw.cuda, "--alloc_conf has no effect on {hw.type}: it is about CUDA memory"),
    (
        lambda f, hw: f.alloc_conf and hw.cuda and os.environ.get(ALLOC_CONF_VARIABLES[0]) != f.alloc_conf,
        "--alloc_conf gives way to PYTORCH_ALLOC_CONF, as the environment or an earlier run here set it",
    ),
    (
        lambda f, hw: f.offload != "none" and not hw.cuda,
        "--offload {f.offload} has no effect on {hw.type}: everything is in host memory already",
    ),
    (
        lambda f, hw: f.bucket_cap_mb != hw.preset.bucket_cap_mb and (hw.world_size == 1 or is_sharded(f.parallel)),
        "--bucket_cap_mb {f.bucket_cap_mb} has no effect: it is about the gradients that DDP's ranks exchange",
    ),
    (
        lambda f, hw: f.parallel == "ddp" and hw.world_size == 1,
        "--parallel ddp has no effect on one process; start several with torchrun",
    ),
    (
        lambda f, hw: f.shard_size and f.parallel != "hsdp",
        "--shard_size {f.shard_size} has no effect without --parallel hsdp",
    ),
    (
        lambda f, hw: f.grad_comm == "bf16" and hw.world_size == 1,
        "--grad_comm bf16 has no effect on one process, which exchanges no gradients",
    ),
    (
        lambda f, hw: f.ngram == 1,
        "--ngram 1 has no effect: every token already has its own embedding; n-grams start at 2",
    ),
    (
        lambda f, hw: "S" in f.window and not hw.windowed,
        "--window {f.window} has no effect: it is as long as the context of {f.seq_len} tokens",
    ),
    (
        lambda f, hw: f.ngram_rows != hw.preset.ngram_rows and f.ngram in (0, 1),
        "--ngram_rows {f.ngram_rows} has no effect without n-grams, as --ngram 4 adds",
    ),
    (
        lambda f, hw: f.optimizer == "adamw" and f.muon_lr != hw.preset.muon_lr,
        "--muon_lr {f.muon_lr:g} has no effect with --optimizer adamw",
    ),
    (
        lambda f, hw: f.preset.startswith("gpt2") and not f.data,
        "--preset {f.preset} without --data trains on Python's source, not with GPT-2's tokenizer; for that run "
        "`python data/prepare.py fineweb10B` and add --data data/fineweb10B",
    ),
    (
        lambda f, hw: hw.cuda and f.dtype == "auto" and hw.dtype == "fp32",
        "--dtype auto is fp32 on a GPU without bf16; --dtype fp16 uses its tensor cores, if it has any",
    ),
    (
        lambda f, hw: hw.cuda and f.dtype == "bf16" and hw.capability < (8, 0),
        "--dtype bf16 is emulated by this GPU, slower than fp32; --dtype fp16 uses its tensor cores, if it has any",
    ),
    (
        lambda f, hw: hw.masked and f.attn in ("auto", "sdpa") and hw.cuda,
        "a window or document mask keeps SDPA from its flash kernel; --attn flex or varlen takes them",
    ),
)


def sentence_of(text: str, f, hw=None) -> str:
    """A rule's sentence with the flags' values, and with the values that would be right."""
    return text.format(f=f, hw=hw, heads=2 * f.n_head, batch=nearest_batch(f), profiled=f.profile + 3)


def check_flags(f) -> None:
    """Raises UserError for numbers out of range and flags that cannot go together."""
    check_ranges(f)
    for when, text in FLAG_RULES:
        if when(f):
            raise UserError(sentence_of(text, f))


def check_device(f, preset, dist_ctx: DistContext, windows: list[int]) -> list[str]:
    """Refuse flags that cannot work on this device with a UserError; returns a line for each that has no effect.

    preset: the preset's flags, with nothing overridden. windows: of the layers, in tokens; 0 = the whole context.
    """
    windowed = any(0 < window < f.seq_len for window in windows)
    device, world_size = dist_ctx.device, dist_ctx.world_size
    seqs_per_rank(f.batch_tokens, f.seq_len, f.micro_batch, world_size)
    cuda = device.type == "cuda"
    capability = torch.cuda.get_device_capability(device) if cuda else (0, 0)
    hw = SimpleNamespace(
        type=device.type,
        cuda=cuda,
        capability=capability,
        windowed=windowed,
        dtype=hardware_dtype(f.dtype, device),
        masked=windowed or f.doc_mask,
        world_size=world_size,
        preset=preset,
    )
    for when, text in DEVICE_RULES:
        if when(f, hw):
            raise UserError(sentence_of(text, f, hw))
    if f.compile != "off" or f.attn == "flex":
        check_compiler(device)
    return [sentence_of(text, f, hw) for when, text in NO_EFFECT if when(f, hw)]


def check_compiler(device: torch.device) -> None:
    """Raises UserError when torch.compile has nothing to compile with."""
    try:
        if device.type == "cuda":
            from torch.utils._triton import has_triton

            missing = "" if has_triton() else "no Triton for this GPU"
        else:
            from torch._inductor.cpp_builder import get_cpp_compiler

            missing = "" if get_cpp_compiler() else "no C++ compiler"
    except Exception as error:
        missing = f"no C++ compiler ({type(error).__name__})"
    if missing:
        raise UserError(f"--compile finds {missing}; install one (on a CPU: g++, or what CXX names) or remove it")


def ranks_per_copy(parallel: str, shard_size: int, world_size: int, local_world_size: int) -> int:
    """The ranks that share one copy of the weights. Raises UserError when they do not divide the world."""
    if parallel != "hsdp":
        return world_size if is_sharded(parallel) else 1
    shards = shard_size or local_world_size
    if world_size % shards:
        raise UserError(
            f"--shard_size {shards}{'' if shard_size else ', the ranks of a node,'} does not divide the {world_size} "
            f"ranks; use --shard_size {largest_divisor(world_size, shards)}, or --parallel fsdp"
        )
    return shards


def seqs_per_rank(batch_tokens: int, seq_len: int, micro_batch: int, world_size: int) -> int:
    """Sequences that each rank takes per step. Raises UserError when the ranks cannot share the batch evenly."""
    n_seqs, micro_batch = batch_tokens // seq_len, micro_batch or 1
    if n_seqs % world_size:
        near = max(1, round(n_seqs / world_size)) * world_size * seq_len
        raise UserError(
            f"--batch_tokens {batch_tokens} is {n_seqs} sequences of {seq_len}, which {world_size} ranks cannot "
            f"share evenly; use --batch_tokens {near}, or another number of ranks"
        )
    n_seqs //= world_size
    if n_seqs % micro_batch:
        raise UserError(
            f"--micro_batch {micro_batch} does not divide the {n_seqs} sequences that each rank takes per step; "
            f"use --micro_batch {largest_divisor(n_seqs, micro_batch)}"
        )
    return n_seqs
