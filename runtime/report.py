"""What a run says at its beginning, what is in effect, and at its end: summary.json, what next."""

from __future__ import annotations

import math
import platform
import re
import shlex
from typing import TYPE_CHECKING, Any

import torch

from common.values import nan_to_none
from data.shards import recorded_hashes
from model import get_spec
from ops.recompute import activation_budget
from runtime.device import device_summary
from runtime.progress import losses_so_far
from runtime.sizes import max_epochs

if TYPE_CHECKING:
    from runtime.run import Run
    from train_gpt import TrainState

# Ends of a run that has trained as far as its flags say
COMPLETE = ("max_steps", "minutes", "epochs", "target_val_loss", "patience")


def describe_run(run: Run) -> list[str]:
    """Describe a run that is about to begin, as lines for the console and log.txt."""
    state, stream = run.state, run.stream
    cfg, model = state.cfg, state.raw_model
    meta = stream.meta
    n_ranks = state.dist_ctx.world_size
    n_params = 0
    n_trained = 0
    without_row: set[str] = set()
    for name, param in model.named_parameters():
        n_params += param.numel()
        n_trained += param.numel() * param.requires_grad
        if not get_spec(name, param).pattern:
            without_row.add(re.sub(r"\d+", "N", name))  # once for all layers
    optimizer = state.optimizer
    kinds = {group.get("kind", type(optimizer).__name__) for group in optimizer.param_groups}
    grad_accum_steps = cfg.batch_tokens // cfg.seq_len // n_ranks // state.micro_batch
    epochs = cfg.batch_tokens * cfg.max_steps / (stream.seqs_per_epoch * cfg.seq_len)
    assumed = " (assumed: there is no meta.json)" if meta.get("assumed") else ""
    lines = [
        f"torch {torch.__version__}, cuda {torch.version.cuda or torch.version.hip}, "
        f"python {platform.python_version()}, {platform.platform()}",
        # How it is computed
        f"device: {device_summary(state.dist_ctx)}, {cfg.dtype}, compile {cfg.compile}, "
        f"parallel {cfg.parallel}, attention {cfg.attn}, loss_chunk {cfg.loss_chunk}, "
        f"checkpointing {describe_checkpointing(state)}, "
        f"matmul precision {torch.get_float32_matmul_precision()}",
        f"data: {stream.folder} ({meta['source']}), "
        f"{stream.train.n_tokens:,} + {stream.val.n_tokens:,} tokens, "
        f"tokenizer {meta['tokenizer']}{assumed}, "
        f"evaluation on {stream.num_eval_seqs(cfg.eval_tokens) * cfg.seq_len:,} tokens",
        f"model: n_layer {cfg.n_layer}, n_embd {cfg.n_embd}, n_head {cfg.n_head}, "
        f"{model.flops_per_token() / 1e6:,.1f} MFLOP per token, "
        f"dropout {cfg.dropout:.2g}, ngram {cfg.ngram}, ngram_dropout {cfg.ngram_dropout:.2g}",
        f"{n_params:,} parameters, of which {n_trained:,} are trained; "
        f"without a row in PARAM_TABLE: {', '.join(sorted(without_row)) or 'none'}",
        f"optimizer: {', '.join(sorted(kinds))}, muon_lr {cfg.muon_lr:.4g}, "
        f"adam_lr {cfg.adam_lr:.4g}, weight_decay {cfg.weight_decay:g}, "
        f"embed_decay {cfg.embed_decay:.2g}",
        f"batch: {cfg.batch_tokens:,} tokens = {n_ranks} ranks x "
        f"{grad_accum_steps} grad_accum_steps x {state.micro_batch} micro_batch x "
        f"{cfg.seq_len} seq_len; "
        f"{cfg.max_steps:,} steps{' (about)' if cfg.minutes else ''}, {epochs:.2f} epochs",
    ]
    usual = max_epochs(cfg, stream.train.n_tokens, stream.vocab_size)
    if epochs > 1.2 * usual:
        lines.append(
            f"WARNING: in {epochs:.0f} epochs a model may memorize the dataset, and val_loss rise; "
            f"{usual:.0f} or fewer are usual: give fewer --max_steps, or more text"
        )
    if cfg.init_from and state.step == 0:
        lines.append(
            "fine-tuning: learning rates that are not given are those of a new run of as many "
            "steps; if val_loss rises at once, give lower ones"
        )
    if stream.tokenizer is None:
        lines.append("no samples will be printed, because a rank has no tokenizer for this data")
    return lines


def describe_checkpointing(state: TrainState) -> str:
    """Return the mode of recomputation in effect, or the fraction that the compiler keeps."""
    if activation_budget(state.cfg.checkpointing) < 1:
        return state.cfg.checkpointing
    return getattr(state.raw_model.blocks[0], "recompute_mode", "none")


def summarize(run: Run, stopped_by: str) -> dict[str, Any]:
    """Make the content of summary.json."""
    state, stream, clock = run.state, run.stream, run.clock
    evaluations = run.log.evaluations
    last = evaluations[-1] if evaluations else dict(val_loss=math.nan, val_bpb=math.nan)
    reached = [row for row in evaluations if row["val_loss"] <= state.cfg.target_val_loss]
    target_reached = None
    if reached:
        target_reached = dict(step=reached[0]["step"], train_time_s=reached[0]["train_time_s"])
    return nan_to_none(
        dict(
            stopped_by=stopped_by,
            step=state.step,
            val_loss=last["val_loss"],
            val_bpb=last["val_bpb"],
            best_val_loss=min(losses_so_far(run), default=math.nan),
            target_reached=target_reached,
            tokens=state.tokens,
            tokens_per_s=state.tokens / max(clock.train_time, 1e-9),
            machine=device_summary(state.dist_ctx),
            dtype=state.cfg.dtype,
            eval_part=stream.eval_part,
            val_tokens=stream.num_eval_seqs(state.cfg.eval_tokens) * stream.seq_len,
            files=recorded_hashes(stream.meta),
            data_wait_s=clock.data_wait_s,
            train_time_s=clock.train_time,
            wall_time_s=clock.wall_time,
        )
    )


def closing_lines(run: Run, summary: dict[str, Any]) -> list[str]:
    """Say how the run ended, and what to try next."""
    minutes, stopped_by = run.state.cfg.minutes, summary["stopped_by"]
    folder = shlex.quote(str(run.folder))
    resume = f"python train_gpt.py --out_dir {folder} --resume"
    lines = []
    if run.state.step == run.first_step > 0 and stopped_by in COMPLETE:
        lines = ["the run was complete: nothing was left to train"]
    lines += [
        f"stopped by {stopped_by} at step {summary['step']}: "
        f"train_time {summary['train_time_s']:.1f} s "
        f"({summary['data_wait_s']:.1f} s waiting for data), "
        f"wall time {summary['wall_time_s']:.1f} s; everything is in {folder}"
    ]
    if stopped_by not in COMPLETE:
        return [*lines, f"to continue: {resume}"]
    if stopped_by == "epochs":
        lines.append(
            f"it ended before its {minutes:g} minutes: on small datasets more epochs did not "
            "lower the loss; --max_steps instead of --minutes trains on"
        )

    # Train for longer, unless the loss has risen
    best = summary["best_val_loss"]
    if best and run.log.evaluations[-1]["val_loss"] > 1.01 * best:
        lines.append(f"val_loss has risen from {best:.4f}, its lowest")
        return [*lines, f"next: python sample.py {folder} --best"]
    flags = dict(
        minutes=f"--minutes {2 * minutes:g}",
        target_val_loss="--target_val_loss 0",
        patience="--patience 0",
    )
    longer = flags.get(stopped_by, f"--max_steps {2 * summary['step']}")
    return [*lines, f"next: python sample.py {folder} | longer: {resume} {longer}"]
