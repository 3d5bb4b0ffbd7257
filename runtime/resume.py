"""Which checkpoint a run starts from, and what it takes from it."""

from dataclasses import dataclass
from pathlib import Path

import torch

from common.errors import UserError
from common.values import env_int
from runtime.checkpoint import (
    BEST,
    CorruptCheckpointError,
    checkpoint_step,
    list_checkpoints,
    load_extra,
    load_optimizer,
    load_weights,
    read_checkpoint,
    with_eval_weights,
)
from runtime.ranks import any_rank, raise_on_all_ranks, run_on_rank0


@dataclass
class InitCheckpoint:
    """The checkpoint that a run starts from. resumes: it continues that run."""

    path: Path
    checkpoint: dict
    resumes: bool

    def load_weights(self, model: torch.nn.Module) -> None:
        """Load the checkpoint's own weights to resume, else those that were evaluated.

        Raises UserError if they do not fit the model.
        """
        checkpoint = self.checkpoint if self.resumes else with_eval_weights(self.checkpoint)
        load_weights(model, checkpoint, self.path)

    def restore(self, state, stream, run) -> None:
        """Restore the optimizer, loss scale, step, clock and TrainState.extra.

        Raises UserError if the stream or the optimizer differs.
        """
        saved, path = self.checkpoint, self.path
        was = saved["data"], saved["position"]
        position = stream.stream_state(saved["step"])
        if was != (stream.fingerprint(), position):
            raise UserError(
                f"{path} was trained on other data than {stream.folder} holds, or in another order "
                f"({saved['position']}, not {position}); give its --data, --seed, --seq_len, "
                f"--batch_tokens and --doc_align, or start a new run with --init_from {path}"
            )
        load_optimizer(state.raw_model, state.optimizer, saved, path)
        if saved["scaler"]:
            state.scaler.load_state_dict(saved["scaler"])
        state.extra.update(load_extra(state.raw_model, saved["extra"]))
        state.step = saved["step"]
        state.tokens = saved["tokens"]
        stream.eval_part = saved["eval_part"]
        clock = saved["clock"]
        run.clock.train_time = clock["train_time"]
        run.clock.earlier_wall_time = clock["wall_time"]
        # A finished run of --minutes stays finished: one more step and evaluation take as long
        run.clock.typical_step_s = clock["typical_step_s"]
        run.clock.last_eval_s = clock["last_eval_s"]
        run.eval_begin = clock["eval_begin"]
        if saved["config"]["eval_tokens"] != state.cfg.eval_tokens:
            run.eval_begin = state.step + 1
        if state.step > state.cfg.max_steps and not state.cfg.minutes:
            raise UserError(
                f"{self.path} is at step {state.step}, beyond --max_steps {state.cfg.max_steps}; "
                "give more"
            )


def load_init_checkpoint(cfg, run, stream) -> InitCheckpoint | None:
    """Load what --resume or --init_from names, the same on every rank; None to start from scratch.

    Raises UserError.
    """
    # torchrun restarts a job with the flags it had, and not every node counts restarts
    is_restart = any_rank(run.dist_ctx, env_int("TORCHELASTIC_RESTART_COUNT", 0) > 0)
    path, resumes = run_on_rank0(run.dist_ctx, lambda: find_checkpoint(cfg, run, is_restart))
    if path is None:
        return None
    with raise_on_all_ranks(run.dist_ctx):
        checkpoint = read_checkpoint(path, verify=False)
        tokenizer = checkpoint["tokenizer"]
        ours = stream.meta["tokenizer"], stream.vocabulary
        if (tokenizer, checkpoint.get("vocabulary")) != ours:
            source = path.parent if tokenizer.startswith("bpe") else tokenizer
            raise UserError(
                f"{path} has another tokenizer ({tokenizer}) than {stream.folder} ({ours[0]}); "
                f"prepare the data with --tokenizer {source}"
            )
    run.info(f"{'resumed' if resumes else 'weights'} from {path}")
    return InitCheckpoint(path, checkpoint, resumes)


def find_checkpoint(cfg, run, is_restart: bool) -> tuple[Path | None, bool]:
    """The verified file to start from (None: from scratch), and whether to resume it.

    Raises UserError.
    """
    folder, resume = run.folder, cfg.resume
    checkpoints = list_checkpoints(folder)
    saved = [*checkpoints, *folder.glob("ckpt_*.damaged")]
    is_own_folder = bool(resume) and Path(resume).resolve() == folder.resolve()
    if is_own_folder or (saved and (resume == "auto" or is_restart)):
        resume = "newest"  # what the job has saved, not what it was started from
    if resume == "newest":
        return newest_valid(folder, run), True

    # Nothing is overwritten, not even the best weights alone of a run that was killed
    saved += folder.glob(BEST)
    if saved and not resume and not is_restart:
        raise UserError(
            f"{folder} already holds {saved[0].name}; add --resume auto to continue, or give "
            "another --out_dir, with --init_from to start from these weights"
        )

    source = cfg.init_from if resume in ("", "auto") else resume
    if not source:
        return None, False
    path = Path(source)
    if path.is_dir():
        path = newest_valid(path, run)
    step = read_checkpoint(path)["step"]
    if resume and checkpoints and checkpoint_step(checkpoints[0]) > step:
        raise UserError(
            f"{folder} holds {checkpoints[0].name}, later than {path}; give another --out_dir to "
            "branch off"
        )
    return path, bool(resume)


def newest_valid(folder: Path, run) -> Path:
    """The newest intact checkpoint of a folder; in the run's own, damaged ones are renamed.

    Raises UserError.
    """
    for path in list_checkpoints(folder):
        try:
            read_checkpoint(path)
            return path
        except CorruptCheckpointError as error:
            if folder == run.folder:
                path.rename(f"{path}.damaged")
            run.info(
                f"skipping a damaged checkpoint, in the run's folder renamed to .damaged: {error}"
            )
    raise UserError(
        f"{folder} has no valid checkpoint; give a run's folder that has one, or another --out_dir"
    )
