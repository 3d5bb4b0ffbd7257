"""--trials: the same run with several seeds."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from common.errors import UserError
from common.values import env_int
from runtime.report import COMPLETE

if TYPE_CHECKING:
    from train_gpt import Config


def run_trials(cfg: Config, train: Callable) -> None:
    """Train with seeds seed, seed+1, ... in subfolders of out_dir, and print the mean loss.

    Raises UserError for flags that do not go with it.
    """
    if cfg.target_val_loss or cfg.resume not in ("", "auto"):
        raise UserError(
            "--trials compares whole runs; it goes with --resume auto, but not with a different "
            "--resume or with --target_val_loss"
        )
    if not cfg.out_dir and env_int("WORLD_SIZE", 1) > 1:
        raise UserError("--trials on several ranks needs a folder that all know; give --out_dir")
    folder = cfg.out_dir or f"runs/{time.strftime('%Y%m%d-%H%M%S')}-trials"
    losses, seconds = [], []
    for seed in range(cfg.seed, cfg.seed + cfg.trials):
        trial = dataclasses.replace(cfg, seed=seed, out_dir=f"{folder}/seed_{seed}", trials=1)
        summary = train(trial)
        if summary["stopped_by"] not in COMPLETE:  # a signal, --max_minutes
            break
        losses.append(summary["val_loss"])
        seconds.append(summary["train_time_s"])

    if env_int("RANK", 0) > 0:
        return
    if len(losses) < cfg.trials:
        print(f"{len(losses)} of {cfg.trials} trials are complete; --resume auto continues")
    elif None not in losses:  # None: not finite
        mean, deviation = statistics.mean(losses), statistics.stdev(losses)
        print(
            f"{cfg.trials} trials in {folder}: val_loss {mean:.4f} +- {deviation:.4f}, "
            f"train_time {statistics.mean(seconds):.1f} s each"
        )
