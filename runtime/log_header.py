"""The first lines of a run's log: what is in effect, and what was derived from its flags."""

import platform
import shutil
import subprocess

import torch

from common.files import REPO
from data.stream import TokenStream
from runtime.device import device_summary


def describe_run(state, stream: TokenStream) -> list[str]:
    """Describe a run that is about to begin, as lines for the console and log.txt."""
    cfg = state.cfg
    model = state.raw_model
    meta = stream.meta
    n_ranks = state.dist_ctx.world_size
    lines = [software_versions(state.dist_ctx.device)]

    # How it is computed
    parallel = "ddp" if cfg.parallel == "auto" else cfg.parallel
    if n_ranks == 1:
        parallel = "one process"
    ac_mode = getattr(model.blocks[0], "ac_mode", "none")
    lines.append(
        f"device: {device_summary(state.dist_ctx)}, {cfg.dtype}, compile {cfg.compile}, "
        f"{parallel}, attention {cfg.attn}, loss_chunk {cfg.loss_chunk}, "
        f"checkpointing {ac_mode}, matmul precision {torch.get_float32_matmul_precision()}"
    )

    # Data
    assumed = " (assumed: there is no meta.json)" if meta.get("assumed") else ""
    n_eval = stream.num_eval_seqs(cfg.eval_tokens)
    subset = ""
    if n_eval < stream.num_eval_seqs(0):
        subset = " spread over the validation split"
        if stream.eval_subset == "first":
            subset = " (the first)"
    lines.append(
        f"data: {stream.folder} ({meta['source']}), "
        f"{stream.train.n_tokens:,} + {stream.val.n_tokens:,} tokens, "
        f"tokenizer {meta['tokenizer']}{assumed}, "
        f"evaluation on {n_eval * cfg.seq_len:,} tokens{subset}"
    )

    # Model and learning rates
    n_params = sum(p.numel() for p in model.parameters())
    muon_lr = f"muon_lr {cfg.muon_lr:.4g}, " if cfg.optimizer == "muon" else ""
    ngrams = ""
    if cfg.ngram > 1:
        ngrams = f", n-grams to {cfg.ngram}, ngram_dropout {cfg.ngram_dropout:.2g}"
    lines.append(
        f"model: n_layer {cfg.n_layer}, n_embd {cfg.n_embd}, n_head {cfg.n_head}, "
        f"{n_params:,} parameters, {model.flops_per_token() / 1e6:,.1f} MFLOP per token; "
        f"{muon_lr}adam_lr {cfg.adam_lr:.4g}, weight_decay {cfg.weight_decay:g}, "
        f"embed_decay {cfg.embed_decay:.2g}{ngrams}"
    )

    # Batch and steps
    grad_accum_steps = cfg.batch_tokens // cfg.seq_len // n_ranks // state.micro_batch
    epochs = cfg.batch_tokens * cfg.max_steps / (stream.seqs_per_epoch * cfg.seq_len)
    about = " (about)" if cfg.minutes else ""
    lines.append(
        f"batch: {cfg.batch_tokens:,} tokens = {n_ranks} ranks x "
        f"{grad_accum_steps} grad_accum_steps x {state.micro_batch} micro_batch x "
        f"{cfg.seq_len} seq_len; {cfg.max_steps:,} steps{about}, {epochs:.2f} epochs"
    )

    if cfg.alloc_conf and state.dist_ctx.device.type == "cuda":
        settings = torch.cuda.memory._snapshot()["allocator_settings"]
        lines.append(f"allocator: {settings}")
    if stream.tokenizer is None:
        lines.append("no samples will be printed, as a rank has no tokenizer for this data")
    return lines


def software_versions(device: torch.device) -> str:
    """Versions of PyTorch, Python, the system, CUDA and the repository, for log.txt."""
    parts = [f"torch {torch.__version__}", f"python {platform.python_version()}"]
    parts.append(platform.platform())
    if shutil.which("git"):
        command = ["git", "-C", str(REPO), "describe", "--always", "--dirty", "--abbrev=40"]
        described = subprocess.run(command, capture_output=True, text=True).stdout.strip()
        parts.append(f"git {described or 'unknown'}")
    if device.type == "cuda":
        parts.append(f"cuda {torch.version.cuda or torch.version.hip}")
    return ", ".join(parts)
