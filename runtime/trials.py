"""--trials: the same run with several seeds."""

import dataclasses
import statistics
import time
from collections.abc import Callable

from common.values import env_int
from runtime.summary import COMPLETE


def run_trials(cfg, train: Callable) -> None:
    """Train with seeds seed, seed+1, ... in subfolders of out_dir, and print the mean loss."""
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
