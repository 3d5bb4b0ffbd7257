"""What is in effect in a run and what was derived from its flags, as lines for the console and log.txt."""

from pathlib import Path

import torch

from ops.attention import attention_kernels
from runtime.derived import MANY_EPOCHS, is_sharded, ranks_per_copy
from runtime.launch import allocator_settings, device_summary, software_versions
from runtime.ranks import DistContext


def describe(f, dist_ctx: DistContext, stream, model, micro_batch: int, repository: Path) -> list[str]:
    """f: the flags as attributes; stream: the run's TokenStream; model: its GPT."""
    device, meta, tokens = dist_ctx.device, stream.meta, f.batch_tokens * f.max_steps
    parallel = "DDP" if dist_ctx.world_size > 1 else "one process"
    if is_sharded(f):
        parallel = f"FSDP2, 1/{ranks_per_copy(f, dist_ctx)} of the weights a rank"
    n_params = sum(p.numel() for p in model.parameters())
    grad_accum_steps = f.batch_tokens // f.seq_len // dist_ctx.world_size // micro_batch
    assumed = " (assumed: there is no meta.json)" if meta.get("assumed") else ""
    muon = f"muon_lr {f.muon_lr:.4g}, " if f.optimizer == "muon" else ""
    ngrams = f", n-grams to {model.cfg.ngram}, ngram_dropout {model.ngram_dropout:.2g}"
    evaluated = f"{stream.num_eval_seqs(f.eval_tokens) * f.seq_len:,} tokens"
    if stream.num_eval_seqs(f.eval_tokens) < stream.num_eval_seqs(0):
        parts = dict(first="the first {}", spread="{} spread over the validation split")
        evaluated = parts[stream.eval_part].format(evaluated)
    lines = [
        software_versions(device, repository),
        f"device: {device_summary(dist_ctx)}, {f.dtype}, compile {f.compile}, {parallel}, "
        f"attention {attention_kernels(model, micro_batch)}, matmul precision {torch.get_float32_matmul_precision()}",
        f"data: {stream.folder} ({meta['source']}), {stream.train.n_tokens:,} + {stream.val.n_tokens:,} tokens, "
        f"tokenizer {meta['tokenizer']}{assumed}, "
        f"evaluation on {evaluated}",
        f"model: n_layer {f.n_layer}, n_embd {f.n_embd}, n_head {f.n_head}, {n_params:,} parameters, "
        f"{model.flops_per_token() / 1e6:,.1f} MFLOP a token; {muon}"
        f"adam_lr {f.adam_lr:.4g}{ngrams * (model.ngrams is not None)}",
        f"batch: {f.batch_tokens:,} tokens = {dist_ctx.world_size} ranks x {grad_accum_steps} grad_accum_steps x "
        f"{micro_batch} micro_batch x {f.seq_len} seq_len; {f.max_steps:,} steps, {tokens:,} tokens, "
        f"{tokens / stream.train.n_tokens:.2f} epochs",
    ]
    frozen = sum(p.numel() for p in model.parameters() if not p.requires_grad)
    if frozen:
        lines.append(f"frozen: {frozen:,} of the parameters")
    if tokens > MANY_EPOCHS * stream.train.n_tokens:
        lines.append(
            f"text: seen more than {MANY_EPOCHS} times, which overfits (docs/rates.md): give more of it or less time; "
            "sample.py --best takes the lowest evaluation's weights"
        )
    if not model.loss_kernel:
        lines.append("loss: edited, so that autograd makes its gradient, chunk by chunk, and not the kernel")
    if device.type == "cuda":
        recomputed = model.blocks[0].checkpointing if f.checkpointing == "auto" else f.checkpointing
        memory = f"checkpointing {recomputed}, loss_chunk {model.loss_chunk:,}, allocator {allocator_settings()}"
        lines.insert(2, f"memory: {memory}")
    return lines
