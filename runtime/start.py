"""From flags to the first step: the device and the ranks, the run's folder and log, the data."""

import contextlib
import dataclasses
import math
import random
import traceback
from pathlib import Path

import numpy as np
import torch

from data.bpe import VOCABULARY_FILE
from data.prepare import prepare
from data.shards import PYTHON_VOCABULARY, UserError, atomic_write, load_meta
from data.stream import TokenStream
from data.tokenizers import get_tokenizer
from runtime.checkpoint import list_checkpoints, note_settings
from runtime.checks import check_device, check_flags
from runtime.derived import SIZED, is_sharded, ranks_per_copy, seqs_per_rank
from runtime.describe import describe
from runtime.dtype import matmul_speed
from runtime.errors import catch_signals, explain
from runtime.launch import init_distributed
from runtime.logger import RunLogger, new_run_folder
from runtime.minutes import sizes_within
from runtime.ranks import DistContext, agree, check_ranks, check_same_on_all_ranks, dist_max, run_on_rank0
from runtime.resume import flags_of_first, was_restarted

HERE = Path(__file__).resolve().parent.parent
PAGES = ["train_gpt.py", "model.py", "generation.py"]
ROOMS = [path.relative_to(HERE).as_posix() for room in ("data", "ops", "runtime") for path in HERE.glob(f"{room}/*.py")]
NAMES = [*PAGES, *sorted(ROOMS), PYTHON_VOCABULARY.relative_to(HERE).as_posix()]
SOURCE_FILES = {name: HERE / name for name in NAMES}


def launch(f) -> DistContext:
    """Choose the device, join the other ranks, if torchrun started any, check that they match, and seed the RNGs.

    f: the flags. Raises UserError.
    """
    dist_ctx = init_distributed(
        f.device, f.alloc_conf, f.deterministic, f.matmul_precision, f.attn, need_group=is_sharded(f)
    )
    check_ranks(dist_ctx, dataclasses.asdict(f), SOURCE_FILES)
    torch.manual_seed(f.seed)  # nothing draws from the global generators before the first step
    random.seed(f.seed)
    np.random.seed(f.seed % 2**32)
    return dist_ctx


def fit_sizes(f, dist_ctx: DistContext):
    """The flags, with the sizes that --minutes chooses (None until now), the same on every rank, and log lines.

    A job that torchrun restarts keeps those of its checkpoint. Raises UserError.
    """
    free = {name for name in SIZED if getattr(f, name) is None}
    if not free:
        return f, []
    restarted = was_restarted(dist_ctx)

    def choose() -> tuple[dict, list[str]]:
        saved = flags_of_first(list_checkpoints(Path(f.out_dir))) if restarted and f.out_dir else {}
        if free <= saved.keys():
            return {name: saved[name] for name in free} | dict(params=saved.get("params", 0)), []
        flop_s = matmul_speed(f, dist_ctx.device) * dist_ctx.world_size
        meta = load_meta(f.data or prepare("python", out=data_folder(f)))
        text_tokens = meta["splits"].get("train", {}).get("tokens", math.inf)  # shards of elsewhere have no meta.json
        chosen = sizes_within(f, f.vocab_size or meta["vocab_size"], text_tokens, flop_s)
        if "batch_tokens" in free:  # a power of two, which not every number of ranks can share
            step = f.seq_len * dist_ctx.world_size * (f.micro_batch or 1)
            chosen["batch_tokens"] = max(1, round(chosen["batch_tokens"] / step)) * step
        note = f"matmuls reach {flop_s / 1e12:.3f} TFLOP/s, so a model as by --params {chosen['params']}"
        return chosen, [f"--minutes {f.minutes:g}: {note}"]

    chosen, notes = run_on_rank0(dist_ctx, choose)
    f = dataclasses.replace(f, **chosen)
    with agree(dist_ctx):
        check_flags(f)
    return f, notes


def check_hardware(f, preset, dist_ctx: DistContext, windows: list[int]) -> list[str]:
    """Refuse what cannot work on this device with a UserError; returns a line for each flag without effect.

    preset: the preset's own flags. windows: of the layers, in tokens; 0 = the whole context.
    """
    with agree(dist_ctx):
        seqs_per_rank(f, dist_ctx.world_size)
        ranks_per_copy(f, dist_ctx)
        windowed = any(0 < window < f.seq_len for window in windows)
        notes = check_device(f, preset, dist_ctx.device, windowed, dist_ctx.world_size)
    return notes


def data_folder(f) -> Path:
    return Path(f.data or HERE / "data" / "python")


def open_stream(f, dist_ctx: DistContext) -> TokenStream:
    """Open the data folder and check it, also across ranks; makes the default corpus first. Raises UserError."""
    folder = data_folder(f)
    with agree(dist_ctx):
        if not f.data and dist_ctx.local_rank == 0:  # each node has its own standard library
            prepare("python", out=folder)
    with agree(dist_ctx):
        stream = TokenStream(folder, f.seq_len, f.batch_tokens, f.seed, f.vocab_size, f.doc_align)
    check_same_on_all_ranks(dist_ctx, stream.facts(), f"give every node the same data in {folder}")
    return stream


def run_folder(f, dist_ctx: DistContext) -> Path:
    """--out_dir, or a new folder that is named by the time; the same on every rank. Raises UserError."""
    return Path(f.out_dir or run_on_rank0(dist_ctx, lambda: new_run_folder(f.preset)))


@contextlib.contextmanager
def open_run(f, dist_ctx: DistContext):
    """Yields the logger of the run's folder, locked, and the list that signals land in by name.

    The log also gets the error that ends a run. Raises UserError.
    """
    logger = RunLogger(run_folder(f, dist_ctx), dist_ctx.rank == 0, made=not f.out_dir)
    with contextlib.closing(logger), catch_signals() as signals:
        run_on_rank0(dist_ctx, logger.lock)
        try:
            yield logger, signals
        except Exception as error:
            if logger.log:  # the command line prints it on standard error, which may be lost
                logger.log.write(f"ended: {explain(error) or traceback.format_exc()}")
            raise


def start_log(logger: RunLogger, state, stream: TokenStream, notes: list[str]) -> list[dict]:
    """Open the run's log and say what is in effect; returns the rows of metrics.jsonl of a resumed run.

    state: the trainer's; notes: more lines. Raises UserError.
    """
    flags = dataclasses.asdict(state.cfg)
    if state.cfg.wandb:
        run_on_rank0(state.dist_ctx, lambda: logger.start_wandb(flags))
    note_settings(state.optimizer)
    past_metrics = logger.open(flags, state.step, SOURCE_FILES)
    if stream.vocabulary and logger.is_rank0:
        with atomic_write(logger.folder / VOCABULARY_FILE) as file:
            file.write(stream.vocabulary.encode("utf-8"))
    described = describe(state.cfg, state.dist_ctx, stream, state.raw_model, state.micro_batch, HERE)
    for line in (*described, *notes):
        logger.info(line)
    return past_metrics


def find_tokenizer(stream: TokenStream, dist_ctx: DistContext, logger: RunLogger):
    """The tokenizer for samples; None, with a line that says why, if a rank has none: tokens suffice to train."""
    tokenizer, reason = None, "another rank has no tokenizer"
    try:
        tokenizer = get_tokenizer(stream.meta["tokenizer"], stream.vocabulary)
    except UserError as error:
        reason = str(error)
    if dist_max(dist_ctx, tokenizer is None):  # sampling under FSDP takes all ranks
        logger.info(f"no samples will be printed: {reason}")
        return None
    return tokenizer
