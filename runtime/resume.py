"""Which checkpoint a run starts from, and what it takes from it."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common.errors import UserError
from common.values import env_int
from data.stream import TokenStream
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
from runtime.ranks import raise_on_all_ranks, run_on_rank0
from runtime.run_folder import new_run_folder

if TYPE_CHECKING:
    from model import GPT
    from runtime.run import Run
    from train_gpt import Config, TrainState

# Flags of the command, which a resumed run does not take from its checkpoint
COMMAND_FLAGS = {"resume", "out_dir", "trials", "profile", "given"}


def find_start(cfg: Config, run: Run) -> tuple[Config, Start | None]:
    """Find the checkpoint that --resume or --init_from names; None to start from scratch.

    Returns cfg with the flags that it keeps from there as well, the same on every rank. Raises
    UserError.
    """
    path, is_resume = run_on_rank0(lambda: find_checkpoint(cfg, run))
    cfg = dataclasses.replace(cfg, out_dir=str(run.folder))
    if path is None:
        return cfg, None
    with raise_on_all_ranks():
        start = Start(path, read_checkpoint(path, verify=False), is_resume)
        cfg = keep_flags(cfg, start)
    run.log.info(f"{'resumed' if is_resume else 'weights'} from {path}")
    best = path.parent / BEST
    if not is_resume and best.exists() and not best.samefile(path):
        run.log.info(f"{best} has the weights of the lowest val_loss; --init_from takes it, too")
    return cfg, start


@dataclass
class Start:
    """The checkpoint that a run starts from. is_resume: it continues that run."""

    path: Path
    checkpoint: dict[str, Any]
    is_resume: bool

    def check_tokenizer(self, stream: TokenStream) -> None:
        """Raise UserError if the dataset has another tokenizer than the model."""
        tokenizer = self.checkpoint["tokenizer"]
        ours = stream.meta["tokenizer"], stream.vocabulary
        if (tokenizer, self.checkpoint["vocabulary"]) != ours:
            source = self.path.parent if tokenizer.startswith("bpe") else tokenizer
            raise UserError(
                f"{self.path} has another tokenizer ({tokenizer}) than {stream.folder} ({ours[0]});"
                f" prepare the data with --tokenizer {source}"
            )

    def load_weights(self, model: GPT) -> None:
        """Load the checkpoint's own weights to resume, else those that were evaluated.

        Raises UserError, on all ranks, if they do not fit the model.
        """
        checkpoint = self.checkpoint if self.is_resume else with_eval_weights(self.checkpoint)
        with raise_on_all_ranks():
            load_weights(model, checkpoint, self.path)

    def restore(self, state: TrainState, stream: TokenStream, run: Run) -> None:
        """Restore the optimizer, loss scale, step, clock, best loss and TrainState.extra.

        Raises UserError if the stream or the optimizer differs.
        """
        saved, path = self.checkpoint, self.path
        position = stream.stream_state(saved["step"])
        if (saved["data"], saved["position"]) != (stream.fingerprint(), position):
            raise UserError(
                f"{path} was trained on other data than {stream.folder} holds, or in another order "
                f"({saved['position']}, not {position}); give its --data, --seed, --seq_len, "
                f"--batch_tokens and --doc_align, or start a new run with --init_from {path}",
                printed=run.dist_ctx.rank > 0,
            )
        load_optimizer(state.raw_model, state.optimizer, saved)
        before = saved["config"]
        is_longer = any(getattr(state.cfg, k) > before[k] for k in ("max_steps", "minutes"))
        if is_longer and saved["step"] > (1 - before["cooldown_frac"]) * before["max_steps"]:
            run.log.info("the run is longer now: learning rates, which had fallen, rise again")
        if saved["scaler"]:
            state.scaler.load_state_dict(saved["scaler"])
        state.extra.update(load_extra(state.raw_model, saved["extra"]))
        state.step = saved["step"]
        state.tokens = saved["tokens"]
        run.clock.load_state(saved["clock"])
        if path.parent.resolve() == run.folder.resolve():
            run.saved_step = state.step


def keep_flags(cfg: Config, start: Start) -> Config:
    """Return cfg with flags of the checkpoint where none were given.

    To resume, all flags of the run; for new weights, the shape of the model. Raises UserError for
    flags that only a new run can have.
    """
    # Runs from before --dropout had none
    saved, given = dict(dropout=0.0) | start.checkpoint["config"], set(cfg.given)
    if start.is_resume:
        if cfg.params is None:
            given.discard("params")  # the run has its size
        for name in ("preset", "params", "optimizer"):
            if name in given and getattr(cfg, name) != saved[name]:
                raise UserError(
                    f"--{name} {getattr(cfg, name)} is for new runs; {start.path} has "
                    f"{saved[name]}: remove it"
                )
        names = saved.keys() - COMMAND_FLAGS
        if "max_steps" in given:
            names -= {"minutes"}
        if "minutes" in given and cfg.minutes not in (0, saved["minutes"]):
            names -= {"max_steps"}  # more minutes, more steps
    else:
        names = saved.keys() & start.checkpoint["model_config"].keys()
        if {"preset", "params"} & given:
            names = set()  # the shape is given, and has to fit
    kept = {name: saved[name] for name in names - given if hasattr(cfg, name)}
    # A new dataset may be too small for the model's context
    given |= kept.keys() - {"seq_len"}
    return dataclasses.replace(cfg, **kept, given=tuple(sorted(given)))


# --------------------------------------------------------------------------------------------------
# Which folder, which file


def choose_folder(cfg: Config) -> Path:
    """Return the run's folder: --out_dir, that of the run which --resume names, or a new one.

    Raises UserError if it is unclear which run is to be resumed.
    """
    if cfg.out_dir:
        return Path(cfg.out_dir)
    if cfg.resume in ("newest", "auto"):
        raise UserError("--resume does not say which run: add --out_dir and the run's folder")
    path = Path(cfg.resume)
    folder = path if path.is_dir() else path.parent
    if cfg.resume and (folder / "log.txt").exists():
        return folder
    return new_run_folder(cfg.preset)


def find_checkpoint(cfg: Config, run: Run) -> tuple[Path | None, bool]:
    """The verified file to start from (None: from scratch), and whether to resume it.

    Raises UserError.
    """
    folder, resume = run.folder, cfg.resume
    checkpoints = list_checkpoints(folder)
    damaged = [*folder.glob("ckpt_*.damaged")]
    has_checkpoint = bool(checkpoints or damaged)
    # torchrun restarts a job with the flags it had
    has_restarted = env_int("TORCHELASTIC_RESTART_COUNT", 0) > 0 and has_checkpoint
    if has_restarted or (not resume and env_int("TORCHELASTIC_MAX_RESTARTS", 0)):
        resume = "auto"

    # Nothing is overwritten, not even the best weights alone of a run that was killed
    usable = [*checkpoints, *folder.glob(BEST)]
    saved = [*usable, *damaged]
    if saved and not resume:
        advice = "give another --out_dir"
        if usable:
            advice += f", with --init_from {usable[0]} to start from these weights"
        if checkpoints:
            advice = f"add --resume auto to continue, or {advice}"
        raise UserError(f"{folder} already holds {saved[0].name}; {advice}")

    # The run's own checkpoints, those of --resume PATH, or weights for a new run
    is_resume = resume not in ("", "auto") or (resume == "auto" and has_checkpoint)
    source = resume if is_resume else cfg.init_from
    if not source:
        return None, False
    path = folder if source in ("auto", "newest") else Path(source)
    is_folder = path.is_dir()
    if is_folder:
        path = newest_valid(path, run)
    if path.name == BEST and is_resume:
        raise UserError(
            f"{path} is for samples and --init_from; to continue its run, --resume {path.parent}"
        )
    step = read_checkpoint(path, verify=not is_folder)["step"]
    newest = list_checkpoints(folder)[:1]
    if is_resume and newest and checkpoint_step(newest[0]) > step:
        raise UserError(
            f"{folder} holds {newest[0].name}, later than {path}; give another --out_dir to "
            "branch off"
        )
    return path, is_resume


def newest_valid(folder: Path, run: Run) -> Path:
    """The newest intact checkpoint of a folder; in the run's own, damaged ones are renamed.

    Raises UserError.
    """
    for path in list_checkpoints(folder):
        try:
            read_checkpoint(path)
            return path
        except CorruptCheckpointError as error:
            if folder.samefile(run.folder):
                path.rename(f"{path}.damaged")
            run.log.info(
                f"skipping a damaged checkpoint, in the run's folder renamed to .damaged: {error}"
            )
    raise UserError(
        f"{folder} has no valid checkpoint; give a run's folder that has one, or another --out_dir"
    )
