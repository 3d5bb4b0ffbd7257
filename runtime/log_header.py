"""The first lines of a run's log: what is in effect, and what was derived from its flags."""

import platform

import torch

from data.stream import TokenStream
from runtime.device import device_summary


def describe_run(state, stream: TokenStream) -> list[str]:
    """Describe a run that is about to begin, as lines for the console and log.txt."""
    cfg = state.cfg
    model = state.raw_model
    meta = stream.meta
    n_ranks = state.dist_ctx.world_size
    n_params = sum(p.numel() for p in model.parameters())
    grad_accum_steps = cfg.batch_tokens // cfg.seq_len // n_ranks // state.micro_batch
    epochs = cfg.batch_tokens * cfg.max_steps / (stream.seqs_per_epoch * cfg.seq_len)
    assumed = " (assumed: there is no meta.json)" if meta.get("assumed") else ""
    lines = [
        f"torch {torch.__version__}, cuda {torch.version.cuda or torch.version.hip}, "
        f"python {platform.python_version()}, {platform.platform()}",
        # How it is computed
        f"device: {device_summary(state.dist_ctx)}, {cfg.dtype}, compile {cfg.compile}, "
        f"parallel {cfg.parallel}, attention {cfg.attn}, loss_chunk {cfg.loss_chunk}, "
        f"checkpointing {getattr(model.blocks[0], 'ac_mode', 'none')}, "
        f"matmul precision {torch.get_float32_matmul_precision()}",
        f"data: {stream.folder} ({meta['source']}), "
        f"{stream.train.n_tokens:,} + {stream.val.n_tokens:,} tokens, "
        f"tokenizer {meta['tokenizer']}{assumed}, "
        f"evaluation on {stream.num_eval_seqs(cfg.eval_tokens) * cfg.seq_len:,} tokens",
        f"model: n_layer {cfg.n_layer}, n_embd {cfg.n_embd}, n_head {cfg.n_head}, "
        f"{n_params:,} parameters, {model.flops_per_token() / 1e6:,.1f} MFLOP per token, "
        f"ngram {cfg.ngram}, ngram_dropout {cfg.ngram_dropout:.2g}",
        f"optimizer: {cfg.optimizer}, muon_lr {cfg.muon_lr:.4g}, adam_lr {cfg.adam_lr:.4g}, "
        f"weight_decay {cfg.weight_decay:g}, embed_decay {cfg.embed_decay:.2g}",
        f"batch: {cfg.batch_tokens:,} tokens = {n_ranks} ranks x "
        f"{grad_accum_steps} grad_accum_steps x {state.micro_batch} micro_batch x "
        f"{cfg.seq_len} seq_len; "
        f"{cfg.max_steps:,} steps{' (about)' if cfg.minutes else ''}, {epochs:.2f} epochs",
    ]
    if stream.tokenizer is None:
        lines.append("no samples will be printed, because a rank has no tokenizer for this data")
    return lines
