"""The end of a run: summary.json, and what to try next."""

import math
import shlex

from common.values import nan_to_none
from data.shards import recorded_hashes
from data.stream import TokenStream
from runtime.device import device_summary

# Ends of a run that has trained as far as its flags say
COMPLETE = ("max_steps", "minutes", "epochs", "target_val_loss", "patience")


def summarize(run, state, stream: TokenStream, stopped_by: str) -> dict:
    """Make the content of summary.json."""
    evaluations = run.log.evaluations
    last = evaluations[-1] if evaluations else dict(val_loss=math.nan, val_bpb=math.nan)
    losses = [row["val_loss"] for row in evaluations]
    target_reached = None
    for row in evaluations:
        if row["val_loss"] <= state.cfg.target_val_loss:
            target_reached = dict(step=row["step"], train_time_s=row["train_time_s"])
            break
    tokens_per_s = math.nan
    if run.clock.trained_s:
        tokens_per_s = (state.tokens - run.first_tokens) / run.clock.trained_s
    return nan_to_none(
        dict(
            stopped_by=stopped_by,
            step=state.step,
            val_loss=last["val_loss"],
            val_bpb=last["val_bpb"],
            best_val_loss=min(filter(math.isfinite, losses), default=math.nan),
            target_reached=target_reached,
            tokens=state.tokens,
            tokens_per_s=tokens_per_s,
            machine=device_summary(state.dist_ctx),
            dtype=state.cfg.dtype,
            eval_part=stream.eval_subset,
            val_tokens=run.log.val_tokens,
            files=recorded_hashes(stream.meta),
            data_wait_s=run.clock.data_wait_s,
            train_time_s=run.clock.train_time,
            wall_time_s=run.clock.wall_time,
        )
    )


def closing_lines(run, cfg, summary: dict) -> list[str]:
    """Say how the run ended, and what to try next."""
    stopped_by = summary["stopped_by"]
    folder = shlex.quote(str(run.folder))
    trained_s = run.clock.trained_s
    stall = summary["data_wait_s"] / max(trained_s, 1e-9)
    lines = [
        f"stopped by {stopped_by} at step {summary['step']}: train_time "
        f"{summary['train_time_s']:.1f} s (data stall {stall:.2%}), wall time "
        f"{summary['wall_time_s']:.1f} s; everything is in {folder}"
    ]
    resume = f"python train_gpt.py --out_dir {folder} --resume"
    if stopped_by not in COMPLETE:
        return [*lines, f"to continue: {resume}"]

    if stopped_by == "epochs":
        lines.append(
            f"it ended before its {cfg.minutes:g} minutes: on small datasets more epochs did not "
            "lower the loss; --max_steps instead of --minutes trains on"
        )
    elif stopped_by in ("max_steps", "minutes") and not trained_s:
        lines.append(
            "nothing was left to train: give more --max_steps, or more --minutes, the total of all "
            "starts"
        )

    # Longer, unless that was worse: the last evaluation is over 1 % above the best
    finite = [row for row in run.log.evaluations if math.isfinite(row["val_loss"])]
    best = min(finite, key=lambda row: row["val_loss"], default=None)
    if best and finite[-1]["val_loss"] > 1.01 * best["val_loss"]:
        return [
            *lines,
            f"val_loss has risen since step {best['step']}, where it was {best['val_loss']:.4f}",
            f"next: python sample.py --run {folder} --best",
        ]
    flags = dict(
        minutes=f"--minutes {2 * cfg.minutes:g}",
        target_val_loss="--target_val_loss 0",
        patience="--patience 0",
    )
    longer = flags.get(stopped_by, f"--max_steps {2 * summary['step']}")
    return [*lines, f"next: python sample.py --run {folder} | longer: {resume} {longer}"]
