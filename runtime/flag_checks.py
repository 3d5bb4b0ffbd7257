"""Rejects flags that contradict each other or cannot work on this device; warns of unused ones."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import torch

from common.errors import UserError
from common.values import env_int
from ops.attention import layer_windows
from ops.recompute import activation_budget
from runtime.device import faster_dtype
from runtime.ranks import DistContext

if TYPE_CHECKING:
    from train_gpt import Config


def has_window(cfg: Config) -> bool:
    """Return True if --window limits a layer to less than the context."""
    return any(layer_windows(cfg.window, cfg.n_layer, cfg.seq_len))


def check_flags(cfg: Config) -> None:
    """Raise UserError for flags that cannot go together."""
    # Formats
    if not re.fullmatch(r"[SL]+(:[1-9]\d*)?", cfg.window):
        raise UserError(
            f"--window is {cfg.window!r}; expected letters S and L, such as SSSL or SSSL:256"
        )
    if not re.fullmatch(r"auto|none|selective|full|0?\.\d+", cfg.checkpointing):
        raise UserError(
            f"--checkpointing is {cfg.checkpointing!r}; expected auto, none, selective, full, or a "
            "number between 0 and 1"
        )
    for name in ("dropout", "ngram_dropout", "short_frac"):
        fraction = getattr(cfg, name)
        if fraction is not None and fraction >= 1:
            raise UserError(f"--{name} is {fraction}; expected a fraction below 1")
    is_flex_selective = cfg.attn == "flex" and cfg.checkpointing == "selective"
    needs_compiler = activation_budget(cfg.checkpointing) < 1 or is_flex_selective
    moves_activations = cfg.is_sharded or cfg.offload == "activations"
    has_varlen_docs = cfg.attn == "varlen" and cfg.doc_mask
    needs_folder = env_int("TORCHELASTIC_MAX_RESTARTS", 0)

    # What is wrong, and what to say then
    for is_wrong, sentence in (
        (
            cfg.trials > 1,
            "--trials is for the command line, and train() makes one run; call it once per seed",
        ),
        (
            needs_folder and "out_dir" not in cfg.given and not cfg.resume,
            "torchrun --max-restarts needs a folder to resume from; give --out_dir",
        ),
        (
            cfg.params is None and (not cfg.minutes or cfg.init_from),
            "--params auto chooses the size of a new model that suits --minutes; add --minutes and "
            "remove --init_from, or give a number of parameters",
        ),
        (
            cfg.n_embd % (2 * cfg.n_head),
            f"--n_embd {cfg.n_embd} cannot be split into {cfg.n_head} heads of even dimension; "
            f"make it a multiple of {2 * cfg.n_head}, or change --n_head",
        ),
        (
            not cfg.init_from and None in (cfg.max_steps, cfg.batch_tokens),
            "--max_steps auto and --batch_tokens auto are for --init_from, which chooses them from "
            "the size of the dataset; give numbers",
        ),
        (
            # --params auto chooses a multiple, unless the batch is given
            (cfg.params is not None or "batch_tokens" in cfg.given)
            and (cfg.batch_tokens or 0) % cfg.seq_len,
            f"--batch_tokens {cfg.batch_tokens} is not a multiple of --seq_len {cfg.seq_len}; "
            "change one of them",
        ),
        (
            cfg.warmup_frac + cfg.cooldown_frac > 1,
            f"--warmup_frac {cfg.warmup_frac} and --cooldown_frac {cfg.cooldown_frac} add up to "
            "more than 1; lower one",
        ),
        (
            cfg.dropout and activation_budget(cfg.checkpointing) < 1,
            f"--checkpointing {cfg.checkpointing} may recompute --dropout with other random "
            "numbers (PyTorch issue 190758); use none, selective or full",
        ),
        (
            needs_compiler and not cfg.is_compiled,
            f"--checkpointing {cfg.checkpointing} with --attn {cfg.attn} needs the compiler; add "
            "--compile",
        ),
        (
            cfg.uses_cudagraphs and (moves_activations or has_varlen_docs),
            f"--compile {cfg.compile} records CUDA graphs, which need fixed addresses and shapes, "
            "not FSDP, offloaded activations, or documents in varlen; use "
            "--compile max-autotune-no-cudagraphs or default",
        ),
        (
            cfg.dtype == "fp16" and cfg.is_sharded,
            f"--dtype fp16 needs loss scaling, which does not work with --parallel {cfg.parallel}; "
            "use --dtype bf16",
        ),
    ):
        if is_wrong:
            raise UserError(sentence)


def check_device(cfg: Config, dist_ctx: DistContext) -> list[str]:
    """Raise UserError for flags that cannot work here; return a warning per flag without effect."""
    device, world_size = dist_ctx.device, dist_ctx.world_size
    shard_size = cfg.shard_size or dist_ctx.local_world_size
    if cfg.parallel == "hsdp" and world_size % shard_size:
        raise UserError(
            f"--shard_size {shard_size} (by default the ranks per node) does not divide the "
            f"{world_size} ranks; give a divisor of them, or use --parallel fsdp"
        )
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
        "--embed_decay": cfg.embed_decay and is_adamw,
        "--shard_size": cfg.shard_size and cfg.parallel != "hsdp",
        "--ngram_dropout": cfg.ngram_dropout and cfg.ngram in (0, 1),
    }
    names = [name for name, is_unused in unused.items() if is_unused and name[2:] in cfg.given]
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


def check_cuda(cfg: Config, device: torch.device) -> None:
    """Raise UserError for flags that cannot work on this GPU, or not together."""
    dtype = faster_dtype(cfg.dtype, device, cfg.n_embd)
    capability = torch.cuda.get_device_capability(device)
    needs_16_bits = cfg.attn in ("flash", "cudnn", "varlen", "fa3", "fa4")
    for is_wrong, sentence in (
        (
            cfg.attn in ("flash", "fa3", "fa4") and (has_window(cfg) or cfg.doc_mask),
            f"--attn {cfg.attn} takes no mask, which --window and --doc_mask need; "
            "use --attn flex or varlen",
        ),
        (
            needs_16_bits and (dtype == "fp32" or capability < (8, 0)),
            f"--attn {cfg.attn} needs bf16 or fp16 and a GPU of compute capability 8.0 or newer "
            "(A100, RTX 30); use --attn efficient",
        ),
        (
            cfg.fp8 and (dtype != "bf16" or capability < (8, 9)),
            "--fp8 needs --dtype bf16 and a GPU of compute capability 8.9 or newer (L4, RTX 40, "
            "H100); remove it",
        ),
        (
            cfg.deterministic and (not cfg.micro_batch or cfg.attn in ("cudnn", "varlen")),
            "--deterministic on CUDA needs --micro_batch, and an --attn other than cudnn and "
            "varlen",
        ),
    ):
        if is_wrong:
            raise UserError(sentence)


def check_compiler(device: torch.device) -> None:
    """Raise UserError if torch.compile fails on a tiny function."""
    try:
        torch.compile(lambda x: x + 1)(torch.zeros(2, device=device))
    except Exception as error:
        # torch.compile wraps the cause, and compilers name the error at the end of their output
        words = str(getattr(error, "inner_exception", error)).split("Output:\n")[-1].split()
        raise UserError(
            f"--compile failed in the compiler or its cache ({' '.join(words)[-300:]}); repair it, "
            "set TORCHINDUCTOR_CACHE_DIR, or remove --compile"
        ) from None
