"""--trials: whole runs, one after the other."""

import contextlib
import dataclasses
from pathlib import Path

from runtime.dtype import saved_dtype
from runtime.logger import trials_line
from runtime.ranks import run_on_rank0
from runtime.resume import load_finished_trial
from runtime.start import data_folder, launch, run_folder


def train_trials(cfg, train) -> list[dict]:
    """--trials runs of train(cfg), seed after seed, each in its own folder; returns their summaries."""
    dist_ctx = launch(cfg)
    folder, summaries = run_folder(cfg, dist_ctx), []
    for seed in range(cfg.seed, cfg.seed + cfg.trials):
        trial = dataclasses.replace(cfg, seed=seed, out_dir=str(folder / f"seed_{seed}"))
        args = (Path(trial.out_dir), dataclasses.asdict(trial), data_folder(trial))
        try:
            summaries.append(run_on_rank0(dist_ctx, lambda args=args: load_finished_trial(*args)) or train(trial))
        finally:
            with contextlib.suppress(OSError):
                folder.rmdir()  # a mistake leaves no empty folder
        if summaries[-1]["stopped_by"] != "max_steps":
            break
        cfg = dataclasses.replace(cfg, dtype=saved_dtype(cfg.dtype, summaries[-1]))  # the first settles auto
    if dist_ctx.rank == 0 and len(summaries) > 1 and all(s["val_loss"] is not None for s in summaries):
        print(trials_line(summaries, folder))
    return summaries
