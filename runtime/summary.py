"""The end of a run: summary.json, and what to try next."""

import math
import shlex

from common.values import nan_to_none
from data.shards import recorded_hashes
from runtime.device import device_summary

# Ends of a run that has trained as far as its flags say
COMPLETE = ("max_steps", "minutes", "epochs", "target_val_loss", "patience")


def summarize(run, stopped_by: str) -> dict:
    """Make the content of summary.json."""
    state, stream, clock = run.state, run.stream, run.clock
    evaluations = run.log.evaluations
    last = evaluations[-1] if evaluations else dict(val_loss=math.nan, val_bpb=math.nan)
    losses = [row["val_loss"] for row in evaluations]
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
            best_val_loss=min(filter(math.isfinite, losses), default=math.nan),
            target_reached=target_reached,
            tokens=state.tokens,
            tokens_per_s=state.tokens / max(clock.train_time, 1e-9),
            machine=device_summary(state.dist_ctx),
            dtype=state.cfg.dtype,
            eval_part=stream.eval_subset,
            val_tokens=run.log.val_tokens,
            files=recorded_hashes(stream.meta),
            data_wait_s=clock.data_wait_s,
            train_time_s=clock.train_time,
            wall_time_s=clock.wall_time,
        )
    )


def closing_lines(run, summary: dict) -> list[str]:
    """Say how the run ended, and what to try next."""
    minutes, stopped_by = run.state.cfg.minutes, summary["stopped_by"]
    folder = shlex.quote(str(run.folder))
    resume = f"python train_gpt.py --out_dir {folder} --resume"
    lines = [
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
