"""Rejects flags that contradict each other or cannot work on this device; warns of unused ones."""

import re

import torch

from common.errors import UserError, compile_sentence
from common.values import env_int
from ops.compile import keep_gcc_from_copying
from runtime.ranks import DistContext
from runtime.speed import faster_dtype

AC_MODES = ("none", "selective", "full")


def check_flags(cfg) -> None:
    """Raise UserError for flags that cannot go together."""
    if not cfg.out_dir and env_int("TORCHELASTIC_MAX_RESTARTS", 0):
        raise UserError("torchrun --max-restarts needs a folder to resume from; give --out_dir")

    if cfg.trials > 1 and (cfg.target_val_loss or cfg.resume not in ("", "auto")):
        raise UserError(
            "--trials compares whole runs; it goes with --resume auto, but not with a different "
            "--resume or with --target_val_loss"
        )
    if cfg.trials > 1 and not cfg.out_dir and env_int("WORLD_SIZE", 1) > 1:
        raise UserError("--trials on several ranks needs a folder that all know; give --out_dir")

    # Sizes and schedule
    if cfg.params == -1 and (not cfg.minutes or cfg.init_from):
        raise UserError(
            "--params -1 chooses the size of a new model that suits --minutes; add --minutes and "
            "remove --init_from, or give a number of parameters"
        )
    if cfg.n_embd % (2 * cfg.n_head):
        raise UserError(
            f"--n_embd {cfg.n_embd} cannot be split into {cfg.n_head} heads of even dimension; "
            f"make it a multiple of {2 * cfg.n_head}, or change --n_head"
        )
    if not re.fullmatch(r"[SL]+(:[1-9]\d*)?", cfg.window):
        raise UserError(
            f"--window is {cfg.window!r}; expected letters S and L, such as SSSL or SSSL:256"
        )
    if not cfg.init_from and not (cfg.max_steps and cfg.batch_tokens):
        raise UserError(
            "--max_steps 0 and --batch_tokens 0 are for --init_from, which chooses them from the "
            "size of the dataset; give numbers"
        )
    if cfg.batch_tokens % cfg.seq_len:
        raise UserError(
            f"--batch_tokens {cfg.batch_tokens} is not a multiple of --seq_len {cfg.seq_len}; "
            "change one of them"
        )
    if cfg.warmup_frac + cfg.cooldown_frac > 1:
        raise UserError(
            f"--warmup_frac {cfg.warmup_frac} and --cooldown_frac {cfg.cooldown_frac} add up to "
            "more than 1; lower one"
        )

    if cfg.ngram_dropout != -1 and not 0 <= cfg.ngram_dropout < 1:
        raise UserError(
            f"--ngram_dropout is {cfg.ngram_dropout:g}; expected a probability below 1, or -1"
        )

    # Activation checkpointing
    if not re.fullmatch(r"auto|none|selective|full|0?\.\d+", cfg.checkpointing):
        raise UserError(
            f"--checkpointing is {cfg.checkpointing!r}; expected auto, none, selective, full, or a "
            "number between 0 and 1"
        )
    is_flex_selective = cfg.attn == "flex" and cfg.checkpointing == "selective"
    if (activation_budget(cfg) < 1 or is_flex_selective) and not cfg.is_compiled:
        raise UserError(
            f"--checkpointing {cfg.checkpointing} with --attn {cfg.attn} needs the compiler; add "
            "--compile"
        )

    # CUDA graphs, fp16
    moves_activations = cfg.is_sharded or cfg.offload == "activations"
    has_varlen_docs = cfg.attn == "varlen" and cfg.doc_mask
    if cfg.uses_cudagraphs and (moves_activations or has_varlen_docs):
        raise UserError(
            f"--compile {cfg.compile} records CUDA graphs, which need fixed addresses and shapes, "
            "not FSDP, offloaded activations, or documents in varlen; use "
            "--compile max-autotune-no-cudagraphs or default"
        )
    if cfg.dtype == "fp16" and cfg.is_sharded:
        raise UserError(
            f"--dtype fp16 needs loss scaling, which does not work with --parallel {cfg.parallel}; "
            "use --dtype bf16"
        )


def has_window(cfg) -> bool:
    """True if --window limits a layer to less than the context."""
    pattern, _, width = cfg.window.partition(":")
    return "S" in pattern and int(width or 1) < cfg.seq_len


def check_device(cfg, dist_ctx: DistContext) -> list[str]:
    """Raise UserError for flags that cannot work here; return a warning per flag without effect."""
    device = dist_ctx.device
    if device.type == "cuda":
        check_cuda(cfg, device)
    elif cfg.attn in ("flex", "cudnn", "efficient", "varlen", "fa3", "fa4"):
        raise UserError(
            f"--attn {cfg.attn} trains on CUDA only, not on {device.type}; "
            "use auto, blocked or sdpa"
        )
    elif cfg.fp8:
        raise UserError(f"--fp8 needs CUDA, not {device.type}; remove it")
    if cfg.is_compiled or cfg.attn == "flex":
        check_compiler(device)

    is_adamw = cfg.optimizer == "adamw"
    unused = {
        "--offload": cfg.offload != "none" and device.type != "cuda",
        "--short_frac": cfg.short_frac and (cfg.seq_len % 8 or cfg.doc_align),
        "--muon_lr": cfg.muon_lr and is_adamw,
        "--embed_decay": cfg.embed_decay > 0 and is_adamw,
        "--shard_size": cfg.shard_size and cfg.parallel != "hsdp",
    }
    names = [name for name, is_unused in unused.items() if is_unused]
    warnings = [f"{name} has no effect with the other flags on {device.type}" for name in names]
    if device.type == "cuda" and cfg.attn in ("auto", "sdpa") and (has_window(cfg) or cfg.doc_mask):
        warnings.append(
            "a window or document mask keeps SDPA from its flash kernel; use --attn flex or varlen"
        )
    if cfg.preset.startswith("gpt2") and not cfg.data:
        warnings.append(
            f"--preset {cfg.preset} without --data trains on Python's source, not GPT-2's tokens; "
            "run `python data/prepare.py fineweb10B`, and add --data data/fineweb10B"
        )
    return warnings


def check_cuda(cfg, device: torch.device) -> None:
    """Raise UserError for flags that cannot work on this GPU, or not together."""
    dtype = faster_dtype(cfg.dtype, device, cfg.n_embd)
    capability = torch.cuda.get_device_capability(device)
    if torch.version.hip:  # AMD's numbers mean something else
        capability = (99, 0)
    if cfg.attn in ("flash", "fa3", "fa4") and (has_window(cfg) or cfg.doc_mask):
        raise UserError(
            f"--attn {cfg.attn} takes no mask, which --window and --doc_mask need; "
            "use --attn flex or varlen"
        )
    needs_16_bits = cfg.attn in ("flash", "cudnn", "varlen", "fa3", "fa4")
    if needs_16_bits and (dtype == "fp32" or capability < (8, 0)):
        raise UserError(
            f"--attn {cfg.attn} needs bf16 or fp16 and a GPU of compute capability 8.0 or newer "
            "(A100, RTX 30); use --attn efficient"
        )
    if cfg.fp8 and (dtype != "bf16" or capability < (8, 9)):
        raise UserError(
            "--fp8 needs --dtype bf16 and a GPU of compute capability 8.9 or newer (L4, RTX 40, "
            "H100); remove it"
        )
    if cfg.deterministic and (not cfg.micro_batch or cfg.attn in ("cudnn", "varlen")):
        raise UserError(
            "--deterministic on CUDA needs --micro_batch, and an --attn other than cudnn and varlen"
        )


def check_compiler(device: torch.device) -> None:
    """Raise UserError if torch.compile fails on a tiny function."""
    try:
        keep_gcc_from_copying()
        torch.compile(lambda x: x + 1)(torch.zeros(2, device=device))
    except Exception as error:
        raise UserError(compile_sentence(error)) from None


def activation_budget(cfg) -> float:
    """Return the fraction of activation memory that --checkpointing allows the compiler."""
    return 1.0 if cfg.checkpointing.isalpha() else float(cfg.checkpointing)


def ranks_per_copy(cfg, dist_ctx: DistContext) -> int:
    """Return the number of ranks that share one copy of the weights.

    Raises UserError if it does not divide the number of ranks.
    """
    if not cfg.is_sharded:
        return 1
    if cfg.parallel == "fsdp":
        return dist_ctx.world_size
    shard_size = cfg.shard_size or dist_ctx.local_world_size
    if dist_ctx.world_size % shard_size:
        raise UserError(
            f"--shard_size {shard_size} (by default the ranks per node) does not divide the "
            f"{dist_ctx.world_size} ranks; give a divisor of them, or use --parallel fsdp"
        )
    return shard_size


def seqs_per_rank(cfg, world_size: int) -> int:
    """Return the number of sequences that each rank takes per step.

    Raises UserError if the batch cannot be divided evenly among ranks or micro-batches.
    """
    n_seqs, rest = divmod(cfg.batch_tokens // cfg.seq_len, world_size)
    if rest:
        raise UserError(
            f"--batch_tokens {cfg.batch_tokens} cannot be shared evenly by {world_size} ranks; use "
            f"a multiple of {world_size * cfg.seq_len}, or a different number of ranks"
        )
    if cfg.micro_batch and n_seqs % cfg.micro_batch:
        raise UserError(
            f"--micro_batch {cfg.micro_batch} does not divide the {n_seqs} sequences that each "
            "rank takes per step; use a divisor of them"
        )
    return n_seqs
