"""Flags that cannot go together, cannot work on this device, or have no effect here: two or three lines each."""

import math
import os
import re

import torch

from common import UserError, largest_divisor
from runtime.device import ALLOC_CONF_VARIABLES, hardware_dtype
from runtime.flags import check_ranges
from runtime.ranks import DistContext

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


def check_flags(f) -> None:
    """Raises UserError for numbers out of range and flags that cannot go together. f: the flags as attributes."""
    check_ranges(f)
    budget, cudagraphs, sharded = (
        activation_budget(f.checkpointing),
        uses_cudagraphs(f.compile),
        is_sharded(f.parallel),
    )
    if f.bf16 and f.dtype not in ("auto", "bf16"):
        raise UserError(f"--bf16 and --dtype {f.dtype} contradict each other; give one of them")
    if f.resume and f.init_from:
        raise UserError("--resume and --init_from contradict each other; give one of them")
    if f.warmup_frac + f.cooldown_frac > 1:
        both = f"--warmup_frac {f.warmup_frac} and --cooldown_frac {f.cooldown_frac}"
        raise UserError(f"{both} add up to more than 1; lower one")
    if f.n_embd % (2 * f.n_head):
        wrong = f"--n_embd {f.n_embd} cannot be cut into {f.n_head} heads of even dimension"
        raise UserError(f"{wrong}; make it a multiple of {2 * f.n_head}, or change --n_head")
    if not re.fullmatch(r"[SL]+(:[1-9]\d*)?", f.window):
        raise UserError(
            f"--window is {f.window!r}; expected letters S and L, as in SSSL or SSSL:256"
        )
    if f.batch_tokens % f.seq_len:
        near = max(1, round(f.batch_tokens / f.seq_len)) * f.seq_len
        wrong = f"--batch_tokens {f.batch_tokens} is not a multiple of --seq_len {f.seq_len}"
        raise UserError(f"{wrong}; use --batch_tokens {near}")
    if (
        f.ngram_dropout > 0
        and f.ngram in (0, 1)
        or f.ngram_dropout >= 1
        or -1 < f.ngram_dropout < 0
    ):
        wrong = f"--ngram_dropout is {f.ngram_dropout:g} with --ngram {f.ngram}"
        raise UserError(
            f"{wrong}; expected a probability below 1 (or -1), and n-grams to drop, as with --ngram 4"
        )
    if f.checkpointing not in ("auto", *AC_MODES) and not 0 < budget < 1:
        expected = "auto, none, selective, full or a number between 0 and 1"
        raise UserError(f"--checkpointing is {f.checkpointing!r}; expected {expected}")
    if budget < 1 and f.compile == "off":
        raise UserError(
            f"--checkpointing {f.checkpointing} is a budget for the compiler; add --compile"
        )
    if cudagraphs and sharded:
        wrong = f"--compile {f.compile} records CUDA graphs, which FSDP's moving weights break"
        raise UserError(f"{wrong}; use --compile max-autotune-no-cudagraphs or default")
    if f.deterministic and f.compile.startswith("max-autotune"):
        raise UserError(
            f"--compile {f.compile} picks kernels by timing, so reruns may differ; use default"
        )
    if f.profile and f.max_steps < f.profile + 3:
        raise UserError(
            f"--profile {f.profile} starts after 3 steps; use --max_steps {f.profile + 3} or more"
        )
    if f.dtype == "fp16" and sharded:
        wrong = f"--dtype fp16 scales the loss, which does not go with --parallel {f.parallel}"
        raise UserError(f"{wrong}; use --dtype bf16")
    if f.params == -1 and not f.minutes:
        raise UserError(
            "--params -1 chooses a size for --minutes; give those, or a number of weights"
        )
    if f.trials > 1 and not f.out_dir and int(os.environ.get("WORLD_SIZE", 1)) > 1:
        raise UserError("--trials on several ranks needs a folder that all know; give --out_dir")
    if f.trials > 1 and f.target_val_loss:
        raise UserError(
            "--trials compares runs of one length, so none may stop early; remove --target_val_loss"
        )
    if f.trials > 1 and f.resume not in ("", "auto"):
        raise UserError(
            f"--trials continues with --resume auto, not with {f.resume!r}, which is about one run"
        )
    if not f.out_dir and int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", 0)) > 0:
        raise UserError("torchrun --max-restarts needs a folder to resume from; give --out_dir")
    if f.init_from and not os.path.exists(f.init_from):
        if f.init_from.startswith("gpt2"):
            why = "as this model has no learned positions, biases or LayerNorm"
            advice = "give a run or checkpoint of this trainer"
            raise UserError(
                f"--init_from {f.init_from}: GPT-2's weights do not fit, {why}; {advice}"
            )
        if f.init_from in ("scratch", "resume"):
            ours = "a run starts from scratch by itself, and --resume continues one"
            raise UserError(f"--init_from {f.init_from} is nanoGPT's; {ours}")


def check_device(f, preset, dist_ctx: DistContext, windows: list[int]) -> list[str]:
    """Refuse flags that cannot work on this device with a UserError; returns a line for each that has no effect.

    f, preset: flags as attributes, as given and as the preset has them. windows: of the layers, in tokens; 0 = the
    whole context.
    """
    kind, alone = dist_ctx.device.type, dist_ctx.world_size == 1
    cuda, sharded, cudagraphs = kind == "cuda", is_sharded(f.parallel), uses_cudagraphs(f.compile)
    capability = torch.cuda.get_device_capability(dist_ctx.device) if cuda else (0, 0)
    if cuda and torch.version.hip:  # AMD's numbers mean something else: nothing is refused by them
        capability = (99, 0)
    dtype = hardware_dtype(f.dtype, dist_ctx.device)
    windowed = any(0 < window < f.seq_len for window in windows)
    masked = windowed or f.doc_mask
    seqs_per_rank(f.batch_tokens, f.seq_len, f.micro_batch, dist_ctx.world_size)

    if f.attn == "flex" and not cuda:
        raise UserError(
            "--attn flex cannot train here: it has a backward pass on CUDA only; use --attn sdpa"
        )
    if f.attn in ("cudnn", "efficient", "varlen", "fa3", "fa4") and not cuda:
        raise UserError(
            f"--attn {f.attn} runs on CUDA only, not on {kind}; use auto, blocked or sdpa"
        )
    if f.attn in ("flash", "fa3", "fa4") and cuda and masked:
        raise UserError(
            f"--attn {f.attn} takes no mask, as --window and --doc_mask need; use --attn flex or varlen"
        )
    if (
        f.attn in ("flash", "cudnn", "varlen", "fa3", "fa4")
        and cuda
        and (dtype == "fp32" or capability < (8, 0))
    ):
        needs = "bf16 or fp16 and a GPU of compute capability 8.0 or newer (A100, RTX 30)"
        raise UserError(f"--attn {f.attn} needs {needs}; add --bf16, or use --attn efficient")
    if f.fp8 and capability < (8, 9):
        raise UserError(
            "--fp8 needs a CUDA device of compute capability 8.9 or newer (L4, RTX 40, H100); remove it"
        )
    if f.fp8 and (dtype != "bf16" or f.n_embd % 16 or f.vocab_size % 16):
        found = f"{dtype}, --n_embd {f.n_embd} and --vocab_size {f.vocab_size}"
        raise UserError(f"--fp8 needs bf16 and sizes that 16 divides, not {found}")
    if f.deterministic and cuda and (not f.micro_batch or f.attn in ("cudnn", "varlen")):
        raise UserError(
            "--deterministic on CUDA needs a --micro_batch, and an --attn other than cudnn or varlen"
        )
    if f.attn == "flex" and f.checkpointing == "selective" and f.compile == "off":
        raise UserError(
            "--checkpointing selective cannot see into uncompiled FlexAttention; add --compile"
        )
    if cudagraphs and cuda and (f.offload == "activations" or f.attn == "varlen" and f.doc_mask):
        needs = "activations at fixed addresses and a fixed number of documents"
        use = "use --compile max-autotune-no-cudagraphs or default"
        raise UserError(f"--compile {f.compile} records CUDA graphs, which need {needs}; {use}")
    if f.compile != "off" or f.attn == "flex":
        check_compiler(dist_ctx.device)

    notes = []
    if kind == "cpu" and f.device == "auto" and torch.backends.mps.is_available():
        notes.append(
            "an Apple GPU is here and idle: --device mps trains on it, which has never been tried"
        )
    if f.alloc_conf and not cuda:
        notes.append(f"--alloc_conf has no effect on {kind}: it is about CUDA memory")
    if f.alloc_conf and cuda and os.environ.get(ALLOC_CONF_VARIABLES[0]) != f.alloc_conf:
        notes.append(
            "--alloc_conf gives way to PYTORCH_ALLOC_CONF, as the environment or an earlier run here set it"
        )
    if f.offload != "none" and not cuda:
        notes.append(
            f"--offload {f.offload} has no effect on {kind}: everything is in host memory already"
        )
    if f.bucket_cap_mb != preset.bucket_cap_mb and (alone or sharded):
        notes.append(
            f"--bucket_cap_mb {f.bucket_cap_mb} has no effect: it is about what DDP's ranks exchange"
        )
    if f.parallel == "ddp" and alone:
        notes.append("--parallel ddp has no effect on one process; start several with torchrun")
    if f.shard_size and f.parallel != "hsdp":
        notes.append(f"--shard_size {f.shard_size} has no effect without --parallel hsdp")
    if f.grad_comm == "bf16" and alone:
        notes.append("--grad_comm bf16 has no effect on one process, which exchanges no gradients")
    if f.ngram == 1:
        notes.append(
            "--ngram 1 has no effect: every token has its own embedding already; n-grams start at 2"
        )
    if "S" in f.window and not windowed and f.window != preset.window:
        notes.append(
            f"--window {f.window} has no effect: it is no shorter than the context of {f.seq_len} tokens"
        )
    if f.ngram_rows != preset.ngram_rows and f.ngram in (0, 1):
        notes.append(
            f"--ngram_rows {f.ngram_rows} has no effect without n-grams, as --ngram 4 adds"
        )
    if f.short_frac and (f.seq_len % 8 or f.doc_align):
        notes.append(
            "--short_frac has no effect with --doc_align, or a --seq_len that 8 does not divide"
        )
    if f.optimizer == "adamw" and f.muon_lr != preset.muon_lr:
        notes.append(f"--muon_lr {f.muon_lr:g} has no effect with --optimizer adamw")
    if f.preset.startswith("gpt2") and not f.data:
        advice = "for that run `python data/prepare.py fineweb10B` and add --data data/fineweb10B"
        notes.append(
            f"--preset {f.preset} without --data trains on Python's source, not GPT-2's tokens; {advice}"
        )
    if cuda and f.dtype == "auto" and dtype == "fp32":
        notes.append(
            "--dtype auto is fp32 on a GPU without bf16; --dtype fp16 uses its tensor cores, if it has any"
        )
    if cuda and f.dtype == "bf16" and capability < (8, 0):
        notes.append(
            "--dtype bf16 is emulated by this GPU, slower than fp32; --dtype fp16 may use its tensor cores"
        )
    if masked and f.attn in ("auto", "sdpa") and cuda:
        notes.append(
            "a window or document mask keeps SDPA from its flash kernel; --attn flex or varlen takes them"
        )
    return notes


def check_compiler(device: torch.device) -> None:
    """Raises UserError when torch.compile has nothing to compile with."""
    try:
        if device.type == "cuda":
            from torch.utils._triton import has_triton

            found = has_triton()
        else:
            from torch._inductor.cpp_builder import get_cpp_compiler

            found = get_cpp_compiler()
    except Exception:  # it raises when it finds none
        found = False
    if not found:
        missing = "Triton for this GPU" if device.type == "cuda" else "C++ compiler"
        raise UserError(
            f"--compile finds no {missing}; install one (on a CPU: g++, or what CXX names) or remove it"
        )


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
