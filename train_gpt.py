"""Train a GPT.

    python train_gpt.py                                        # one device, the laptop preset
    python train_gpt.py --preset gpt2-small --data data/fineweb10B --compile
    torchrun --nproc_per_node=8 train_gpt.py --preset gpt2-small --data data/fineweb10B
    python train_gpt.py --out_dir runs/NAME --resume

From Python: `summary = train(make_config(n_layer=2, max_steps=100))`.

In this file: 1 config, 2 build, 3 step and evaluation, 4 loop, 5 command line. See also model.py.
"""

# No `from __future__ import annotations` here: flags get their types from Config's annotations
import contextlib
import dataclasses
import math
import random
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from runtime import set_environment

# Sets environment variables that PyTorch reads: before torch is imported. A program that imports
# this file sets its own
if __name__ == "__main__":
    set_environment()

import numpy as np
import torch
from torch import Tensor, nn

from common.errors import exit_process, run_command
from common.values import derive_seed
from data.stream import TokenStream
from inference.generation import sample_continuation
from model import GPT, GPTConfig, Optimizer, optimizer_groups
from ops.attention import ATTENTION_BACKENDS
from ops.compile import apply_compile
from ops.fp8 import apply_fp8
from ops.ngrams import grad_values, use_sparse_gradients
from ops.parallel import (
    apply_ddp,
    apply_fsdp,
    sum_over_ranks,
    swap_weights,
    swapped_weights,
    sync_gradients,
    to_full,
)
from runtime.auto import choose_auto_values
from runtime.checkpoint import save_checkpoint
from runtime.device import DTYPES
from runtime.flags import check_values, flag, implied_flags, parse_flags
from runtime.model_setup import fit_into_memory, warm_up
from runtime.progress import agree_on_status, reason_to_stop
from runtime.ranks import DistContext, read_on_all_ranks
from runtime.resume import Start, find_start
from runtime.run import Run, open_stream
from runtime.trials import run_trials

PARALLEL_MODES = ("ddp", "fsdp", "hsdp")
MATMUL_PRECISIONS = ("highest", "high", "medium")
COMPILE_MODES = ("off", "default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")

# --------------------------------------------------------------------------------------------------
# 1. Config

# Each preset overrides some of Config's defaults
PRESETS: dict[str, dict[str, Any]] = {
    # A minute or two on a CPU
    "laptop": dict(
        n_layer=2,
        n_head=1,
        n_embd=128,
        seq_len=2048,
        window="SL:512",  # the first layer attends to 512 tokens, the second to all
        ngram=None,  # with embeddings of n-grams, of an automatic length
        ngram_rows=524288,
        batch_tokens=8192,
        max_steps=300,
        short_frac=0.7,  # 70 % of the run on sequences of seq_len / 8
        eval_every=150,
        eval_tokens=262144,
    ),
    # A few minutes on a GPU, a few hours on a CPU
    "mini": dict(
        n_layer=6,
        n_head=8,
        n_embd=512,
        seq_len=512,
        ngram=None,
        ngram_rows=65536,
        batch_tokens=16384,
        max_steps=1000,
        eval_tokens=262144,
    ),
    # GPT-2's depths and widths. Heads have 128 dimensions (xl: 64, as in GPT-2). small has n-grams,
    # in a table of five rows per token; they were not tried in the larger ones
    "gpt2-small": dict(n_layer=12, n_head=6, n_embd=768, ngram=2, ngram_rows=5 * 50304),
    "gpt2-medium": dict(n_layer=24, n_head=8, n_embd=1024, max_steps=10000),
    "gpt2-large": dict(n_layer=36, n_head=10, n_embd=1280, max_steps=20000),
    "gpt2-xl": dict(n_layer=48, n_head=25, n_embd=1600, max_steps=40000),
}


# Each field but the last is a flag: flag(default, help, choices, const, min, auto). Command line,
# checks and log are derived from it. const: the value of a bare --flag. min: the smallest number.
# A number whose default is None, or with auto=True, may be given as "auto", and is None until
# train() chooses it. vocab_size, micro_batch, shard_size, save_every and keep stay None
@dataclass(frozen=True)
class Config:
    """The flags of a run. Build it with make_config, which applies a preset ("laptop" by default).

    The defaults below fill in what the preset leaves out; they are gpt2-small's, without n-grams.
    """

    # run
    preset: str = flag("laptop", "sizes and schedule; any other flag overrides it", PRESETS)
    data: str = flag("", "folder from data/prepare.py (default: source of this Python's library)")
    out_dir: str = flag("", "folder of this run (default: runs/<time>-<preset>)")
    resume: str = flag(
        "",
        "bare: the newest checkpoint of --out_dir; PATH: that one; auto: as bare, or a new run if "
        "there is none",
        const="newest",
    )
    init_from: str = flag("", "run or checkpoint to load weights from, for a new schedule")
    seed: int = flag(0, "seed for initial weights and data order")
    trials: int = flag(1, "number of runs, with seeds seed, seed+1, ..., under out_dir", min=1)
    device: str = flag(
        "auto", "auto: cuda if available, otherwise cpu", ("auto", "cpu", "cuda", "mps")
    )
    # model
    params: int = flag(
        0,
        "parameters in blocks, such as 10M: chooses shape, batch and steps; 0: use --n_layer and "
        "so on; auto: chosen for --minutes",
        auto=True,
    )
    n_layer: int = flag(12, "transformer blocks", min=1)
    n_head: int = flag(6, "attention heads; a head dimension of 128 is fastest", min=1)
    n_embd: int = flag(768, "width", min=1)
    seq_len: int = flag(1024, "context length in tokens", min=1)
    window: str = flag(
        "L",
        "pattern of layers: L full, S sliding over seq_len / 4 tokens, or over N with :N, as in "
        "SSSL:256",
    )
    vocab_size: int = flag(None, "rows of embedding and head; auto: the tokenizer's, padded", min=1)
    dropout: float = flag(
        None,
        "probability of dropping a number that attention or MLP adds, in training; auto: 0.1 in "
        "more than four epochs, without --init_from",
    )
    # N-grams: an embedding for the newest 2, 3, ... tokens, looked up by hash
    ngram: int = flag(0, "longest n-gram with a hashed embedding; 0: none", auto=True)
    ngram_rows: int = flag(16384, "rows of the n-gram table, n_embd numbers each", min=1)
    ngram_dropout: float = flag(
        None, "probability of dropping an n-gram in training; auto: by the number of epochs"
    )
    softcap: float = flag(15.0, "tanh soft-cap on logits; 0 disables")
    loss_chunk: int = flag(None, "tokens per chunk of head and loss; 0: all at once")
    # optimizer
    optimizer: str = flag(
        "muon",
        "muon: Muon for matrices in blocks, RMSprop for n-grams, Adam for the rest",
        ("muon", "adamw"),
    )
    muon_lr: float = flag(
        None, "learning rate of Muon; auto: 0.02 (5,000 / max_steps)^0.16", min=1e-9
    )
    adam_lr: float = flag(
        None,
        "learning rate of Adam and RMSprop; auto: 0.006 (768 / n_embd)^0.4, with adamw 0.002 "
        "(768 / n_embd)^0.75",
        min=1e-9,
    )
    weight_decay: float = flag(0.05, "decoupled decay of block matrices; with adamw, of everything")
    embed_decay: float = flag(
        None,
        "decay of embeddings: by exp(-X) over the run at the peak rate, about exp(-0.7 X) with the "
        "default schedule; auto: 0 to 1.5, by the epochs",
    )
    grad_clip: float = flag(0.0, "max gradient norm; 0 disables")
    batch_tokens: int = flag(
        524288, "global batch size in tokens; auto: by the dataset (--init_from)", min=1, auto=True
    )
    micro_batch: int = flag(None, "sequences per device per micro-step; auto: what fits", min=1)
    max_steps: int = flag(
        3250, "optimizer steps; auto: by the dataset (--init_from)", min=1, auto=True
    )
    minutes: float = flag(
        0.0,
        "end after N minutes, compiling and evaluating included, with a schedule that ends then; "
        "earlier after 5 epochs (of bytes: 6; with --init_from by its rule); 0 disables",
    )
    max_minutes: float = flag(0.0, "pause after N minutes, to --resume later; 0 disables")
    target_val_loss: float = flag(0.0, "stop at this validation loss; 0 disables")
    patience: int = flag(
        None,
        "stop after N evaluations without a lower loss, after the first epoch; auto: 5 in runs of "
        "more than 10 epochs (of bytes: 12), 3 with --init_from without --max_steps, otherwise 0: "
        "never",
    )
    short_frac: float = flag(
        0.0,
        "fraction of the steps, at the beginning, with sequences of seq_len / 8; if the epochs end "
        "before --minutes do, 0 unless given",
    )
    warmup_frac: float = flag(0.0, "fraction of steps for linear LR warm-up")
    cooldown_frac: float = flag(0.6, "fraction of steps for linear LR decay to 5 %")
    # systems
    compile: str = flag(
        "off", "torch.compile of blocks and loss; bare: default", COMPILE_MODES, const="default"
    )
    dtype: str = flag(
        "auto",
        "of activations and matmuls; auto: bf16 if faster, otherwise fp32",
        ("auto", *DTYPES),
    )
    fp8: bool = flag(False, "float8 matmuls in MLP and head (sm89 or newer)")
    matmul_precision: str = flag("highest", "of fp32 matmuls; high: TF32", MATMUL_PRECISIONS)
    attn: str = flag("auto", "attention backend (fa3, fa4: untested)", ATTENTION_BACKENDS)
    checkpointing: str = flag(
        "auto",
        "recompute activations: none, selective, full, or 0.3: keep 30 % (with --compile); auto: "
        "none, but on GPUs with ddp what --micro_batch auto needs",
    )
    offload: str = flag(
        "none",
        "keep this in CPU memory: slower, less GPU memory",
        ("none", "activations", "optimizer"),
    )
    parallel: str = flag(
        "ddp", "fsdp: shard over all ranks; hsdp: over --shard_size", PARALLEL_MODES
    )
    shard_size: int = flag(None, "ranks per copy with hsdp; auto: those of a node", min=1)
    grad_comm: str = flag(
        "fp32", "dtype in which ranks exchange gradients; bf16: half the bytes", ("fp32", "bf16")
    )
    bucket_cap_mb: int = flag(25, "DDP bucket size in MiB", min=1)
    alloc_conf: str = flag("", "CUDA allocator settings, such as expandable_segments:True")
    deterministic: bool = flag(False, "use only operations with reproducible results")
    doc_align: bool = flag(
        False, "begin each sequence with a document; drop the rest of one that does not fit"
    )
    doc_mask: bool = flag(False, "keep attention and n-grams within a document")
    # logging and checkpoints
    eval_every: int | str = flag(
        250,
        "steps between evaluations; auto: ten in all; end: only at the end",
        ("end",),
        min=1,
        auto=True,
    )
    eval_tokens: int | str = flag(10485760, "validation tokens per evaluation", ("all",), min=1)
    save_every: int = flag(None, "steps between checkpoints; auto: every ten minutes", min=1)
    keep: int | str = flag(
        None, "newest checkpoints to keep; auto: 2, and 1 of a complete run", ("all",), min=1
    )
    sample_every: int | str = flag(
        "end", "steps between text samples; end: only at the end", ("end",), min=1
    )
    log_every: int = flag(10, "steps between log lines", min=1)
    profile: int = flag(0, "steps to profile (bare: 5); writes a trace to out_dir", const="5")
    wandb: bool = flag(False, "also log to Weights & Biases")

    # Names of the flags that the user set, or a checkpoint: automatic choices leave those alone
    given: tuple[str, ...] = dataclasses.field(default=(), compare=False)

    @property
    def is_compiled(self) -> bool:
        return self.compile != "off"

    @property
    def uses_cudagraphs(self) -> bool:
        return self.compile in ("reduce-overhead", "max-autotune")

    @property
    def is_sharded(self) -> bool:
        """True if each rank holds only part of the weights."""
        return self.parallel in ("fsdp", "hsdp")


def make_config(**flags: Any) -> Config:
    """Build a Config from the given flags. Raises UserError for an unknown name or a wrong value.

    train() adds the flags of a checkpoint and chooses automatic values; it also refuses flags that
    contradict each other.
    """
    given = check_values(flags, Config)
    preset = PRESETS[given.get("preset", "laptop")]
    # Later ones win: the preset; what --params, --minutes or --init_from imply; what was given
    values = preset | implied_flags(given) | given
    return Config(**values, given=tuple(sorted(given)))


def choose_learning_rates(cfg: Config) -> Config:
    """Set muon_lr (of the blocks' matrices) and adam_lr (of the rest; with adamw, of everything).

    A rate that is not given is computed by formulas fitted to the runs in docs/recipe.md: Muon's
    from the number of steps, Adam's from the width.
    """
    # Shorter runs and narrower models take higher rates
    if cfg.optimizer == "adamw":
        muon_lr = 0.0
        adam_lr = 0.002 * (768 / cfg.n_embd) ** 0.75
    else:
        muon_lr = 0.02 * (5000 / cfg.max_steps) ** 0.16
        adam_lr = 0.006 * (768 / cfg.n_embd) ** 0.4

    # A given rate wins; chosen ones are rounded to the three digits that are logged
    return dataclasses.replace(
        cfg,
        muon_lr=cfg.muon_lr or float(f"{muon_lr:.3g}"),
        adam_lr=cfg.adam_lr or float(f"{adam_lr:.3g}"),
    )


# --------------------------------------------------------------------------------------------------
# 2. Build


@dataclass(slots=True)
class TrainState:
    """What a training step works on."""

    cfg: Config
    dist_ctx: DistContext
    raw_model: GPT
    model: nn.Module  # raw_model, or DDP around it: called in training
    micro_batch: int  # sequences per micro-step: cfg.micro_batch, or what fits
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler
    step: int = 0  # updates so far, skipped ones included
    tokens: int = 0  # trained on so far

    # For your own use: values to log. name -> number or 0-d tensor, averaged over ranks and logged
    # with every training and evaluation line, until you change or delete it
    metrics: dict[str, float | Tensor] = dataclasses.field(default_factory=dict)

    # For your own use: saved in checkpoints (tensors, numbers, strings, lists, dicts). A dict
    # {parameter name: tensor} is sharded like the parameters. extra["eval_weights"], such a dict
    # (an EMA, say), replaces the weights in evaluation and sampling
    extra: dict[str, Any] = dataclasses.field(default_factory=dict)

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[GPT]:
        """Context: raw_model in eval mode, with extra["eval_weights"] if there are any."""
        self.raw_model.eval()
        with swapped_weights(self.raw_model, self.extra.get("eval_weights", {})):
            yield self.raw_model
        self.raw_model.train()


def gpt_config(cfg: Config, vocab_size: int) -> GPTConfig:
    """The model's shape, for a tokenizer of vocab_size tokens."""
    padded = math.ceil(vocab_size / 64) * 64  # a multiple of 64 makes the head's matmul faster
    return GPTConfig(
        vocab_size=cfg.vocab_size or padded,
        seq_len=cfg.seq_len,
        n_layer=cfg.n_layer,
        n_head=cfg.n_head,
        n_embd=cfg.n_embd,
        window=cfg.window,
        ngram=cfg.ngram,
        ngram_rows=cfg.ngram_rows,
        softcap=cfg.softcap,
    )


def build(
    cfg: Config, dist_ctx: DistContext, stream: TokenStream, start: Start | None = None
) -> TrainState:
    """Make the model and its optimizer, ready for the first step. Raises UserError.

    start: the checkpoint that the weights come from.
    """
    # The model
    torch.manual_seed(cfg.seed)  # for parameters of your own, which PARAM_TABLE may leave alone
    with dist_ctx.device:
        raw_model = GPT(
            gpt_config(cfg, stream.vocab_size),
            compute_dtype=DTYPES[cfg.dtype],
            loss_chunk=cfg.loss_chunk,
            attn_backend=cfg.attn,
            eot=stream.eot if cfg.doc_mask else None,
            dropout=cfg.dropout,
            ngram_dropout=cfg.ngram_dropout,
            seed=cfg.seed,
        )
    if start:
        start.load_weights(raw_model)

    # float8 and torch.compile, both in place: parameters keep their names
    if cfg.fp8:
        apply_fp8(raw_model)
    if cfg.is_compiled:
        apply_compile(raw_model, cfg.compile, cfg.checkpointing)

    # Choose the micro-batch, and what to recompute. A GPU without FSDP tries steps on dummy data,
    # which change no weights. This comes before DDP: its all-reduce would hang if one rank ran out
    # of memory
    micro_batch = fit_into_memory(raw_model, cfg, make_optimizer, dist_ctx)

    # FSDP shards the weights, in place; DDP averages gradients
    model: nn.Module = raw_model
    grad_dtype = DTYPES[cfg.grad_comm]
    if cfg.is_sharded:
        shard_size = dist_ctx.world_size
        if cfg.parallel == "hsdp":
            shard_size = cfg.shard_size or dist_ctx.local_world_size
        apply_fsdp(raw_model, DTYPES[cfg.dtype], grad_dtype, shard_size=shard_size)
    elif dist_ctx.world_size > 1:
        model = apply_ddp(raw_model, grad_dtype, bucket_cap_mb=cfg.bucket_cap_mb)

    # Steps on dummy data, for the first and the final sequence length: compile, and open NCCL's
    # connections, now instead of in step 1
    seq_lens = {get_seq_len(0.0, cfg), get_seq_len(1.0, cfg)}
    warm_up(model, raw_model, cfg, make_optimizer, micro_batch=micro_batch, seq_lens=seq_lens)

    # The optimizer
    optimizer = make_optimizer(cfg, raw_model)
    # On one CPU rank, p.grad of the n-gram table is sparse: a step reads few of its rows
    use_sparse_gradients(raw_model, optimizer)
    for group in optimizer.param_groups:
        group["initial_lr"] = group["lr"]  # the peak; train_step multiplies it by the schedule
    scaler = torch.amp.GradScaler(dist_ctx.device.type, enabled=cfg.dtype == "fp16")
    return TrainState(
        cfg=cfg,
        dist_ctx=dist_ctx,
        raw_model=raw_model,
        model=model,
        micro_batch=micro_batch,
        optimizer=optimizer,
        scaler=scaler,
    )


def make_optimizer(cfg: Config, model: GPT) -> torch.optim.Optimizer:
    """Muon + Adam. Any torch.optim optimizer over model.parameters() works here, too."""
    groups = optimizer_groups(
        model,
        optimizer=cfg.optimizer,
        muon_lr=cfg.muon_lr,
        adam_lr=cfg.adam_lr,
        weight_decay=cfg.weight_decay,
        embed_decay=cfg.embed_decay,
        max_steps=cfg.max_steps,
    )
    # Newton-Schulz in bf16 only with --dtype bf16: fp16 is for GPUs without bf16
    ns_dtype = torch.bfloat16 if cfg.dtype == "bf16" else torch.float32
    return Optimizer(groups, ns_dtype, offload=cfg.offload == "optimizer")


# --------------------------------------------------------------------------------------------------
# 3. One training step, and evaluation


def get_lr_multiplier(progress: float, cfg: Config) -> float:
    """Learning rate relative to its peak: linear warm-up, flat, linear decay to 5 % (nanochat)."""
    if progress < cfg.warmup_frac:
        return min(1.0, (progress + 1 / cfg.max_steps) / cfg.warmup_frac)  # not 0 at first
    if progress > 1 - cfg.cooldown_frac:
        return 0.05 + 0.95 * (1 - progress) / cfg.cooldown_frac
    return 1.0


def get_momentum(step: int) -> float:
    """Muon's momentum: from 0.85 to 0.95 at step 1,000. A shorter run ends below 0.95."""
    return 0.85 + 0.1 * min(1.0, step / 1000)


def get_seq_len(progress: float, cfg: Config) -> int:
    """Sequence length at this fraction of the run: an eighth of seq_len in the first short_frac."""
    if progress < cfg.short_frac:
        return cfg.seq_len // 8
    return cfg.seq_len


def get_batch(stream: TokenStream, dist_ctx: DistContext, step: int) -> Tensor:
    """This rank's part of the global batch, int64 (sequences, seq_len + 1), on the CPU."""
    batch = torch.from_numpy(stream.batch(step, dist_ctx.rank, dist_ctx.world_size))
    if dist_ctx.device.type == "cuda":
        batch = batch.pin_memory()  # lets .to(device, non_blocking=True) return at once
    return batch


def seed_random(state: TrainState) -> None:
    """Seed every generator for this step, so that checkpoints need not hold their states."""
    seed, step, rank = state.cfg.seed, state.step, state.dist_ctx.rank
    # n-gram dropout is the same on any number of ranks; all other random numbers differ by rank
    state.raw_model.step_seed = derive_seed(seed, "step", step)
    rank_seed = derive_seed(seed, "step", step, rank)
    random.seed(rank_seed)
    np.random.seed(rank_seed % 2**32)  # NumPy takes 32 bits
    torch.manual_seed(rank_seed)


def train_step(state: TrainState, batch: Tensor, progress: float) -> tuple[Tensor, float]:
    """One optimizer step on this rank's batch, at this fraction of the run.

    Returns this rank's loss, a scalar in fp32, and the gradient norm before clipping. The mean of
    the ranks' losses is the loss of the global batch. A norm of 0, inf or nan skips the update.
    """
    cfg, dist_ctx, optimizer = state.cfg, state.dist_ctx, state.optimizer
    seed_random(state)

    # Targets are the next tokens; cloned so that you can set some to -1, which the loss ignores
    batch = batch.to(dist_ctx.device, non_blocking=True)
    inputs, targets = batch[:, :-1], batch[:, 1:].clone()

    # In the first short_frac of the run, cut each sequence into eight. Micro-batches have the same
    # number of tokens either way
    seq_len = get_seq_len(progress, cfg)
    micro_batch = state.micro_batch * cfg.seq_len // seq_len
    xs = inputs.reshape(-1, seq_len).split(micro_batch)
    ys = targets.reshape(-1, seq_len).split(micro_batch)

    # The loss is the mean over the global batch's targets that are not -1: the mean of each
    # micro-batch, times its targets / all targets. DDP and FSDP average gradients over the ranks
    # instead of adding them, so divide by the targets per rank
    n_targets = sum_over_ranks((targets >= 0).sum()).clamp(min=1)
    targets_per_rank = n_targets / dist_ctx.world_size

    # Forward and backward, with gradients accumulated over the micro-batches
    loss = torch.zeros((), device=dist_ctx.device)
    for i, (x, y) in enumerate(zip(xs, ys)):
        is_last = i == len(xs) - 1
        with sync_gradients(state.model, is_last):  # DDP all-reduces only in the last micro-step
            micro_loss = state.model(x, y)
            micro_loss = micro_loss * ((y >= 0).sum() / targets_per_rank)
            state.scaler.scale(micro_loss).backward()
        loss += micro_loss.detach()

    # Gradient norm, for the log and clipping. The n-grams' gradient may be sparse (see build):
    # grad_values adds up repeated rows, and returns the rows
    state.scaler.unscale_(optimizer)
    params = [p for p in state.raw_model.parameters() if p.grad is not None]
    norm = nn.utils.get_total_norm([grad_values(p) for p in params])
    if cfg.grad_clip:
        nn.utils.clip_grads_with_norm_(params, cfg.grad_clip, norm)

    # Learning rates and momentum
    for group in optimizer.param_groups:
        group["lr"] = group["initial_lr"] * get_lr_multiplier(progress, cfg)
        if group.get("kind") == "muon":
            group["momentum"] = get_momentum(state.step)

    # Update, unless a gradient is inf or nan, or all are 0 (every target is -1). to_full gathers
    # the norm under FSDP; .item() waits for the device, once per step
    grad_norm = to_full(norm).item()
    if 0 < grad_norm < math.inf:
        state.scaler.step(optimizer)
    state.scaler.update()
    optimizer.zero_grad(set_to_none=not cfg.uses_cudagraphs)  # CUDA graphs need fixed addresses
    state.tokens += targets.numel() * dist_ctx.world_size
    state.step += 1
    return loss, grad_norm


@torch.no_grad()
def evaluate(
    state: TrainState, stream: TokenStream, should_stop: Callable[[], bool] | None = None
) -> tuple[float, float] | None:
    """Mean loss over --eval_tokens validation tokens, the same on any number of ranks.

    Returns it in nats per target and in bits per byte of the targets, which is nan if the
    tokenizer is unknown. Returns None if should_stop() is true: after a signal little time may be
    left. should_stop asks all ranks, so every rank calls it once per batch.
    """
    cfg, dist_ctx = state.cfg, state.dist_ctx
    batches = stream.eval_batches(
        cfg.eval_tokens, state.micro_batch, rank=dist_ctx.rank, world_size=dist_ctx.world_size
    )
    # Sum up the losses of this rank's batches. All ranks get equally many, padded with targets
    # of -1. If one rank fails to read, read_on_all_ranks raises on all of them
    sums = torch.zeros(3, dtype=torch.float64)  # of losses, targets, and bytes of targets
    with state.evaluating() as model:
        for inputs, targets in read_on_all_ranks(batches):
            if should_stop and should_stop():
                return None
            x = torch.from_numpy(inputs).to(dist_ctx.device)
            y = torch.from_numpy(targets).to(dist_ctx.device)
            counted = y[y >= 0]
            n, n_bytes = len(counted), stream.count_bytes(counted.cpu().numpy())
            sums += torch.tensor([model(x, y).item() * n, n, n_bytes], dtype=torch.float64)

    # The mean over all ranks; nan if every target is -1
    total = sum_over_ranks(sums)
    val_loss, val_bpb = total[0] / total[1], total[0] / math.log(2) / total[2]
    return val_loss.item(), val_bpb.item()


def sample_text(state: TrainState, stream: TokenStream) -> str:
    """Continue the last evaluated sequence, of which the model reads 512 tokens at most.

    Returns the end of that sequence, ">>>", and the continuation.
    """
    prompt = torch.from_numpy(stream.eval_end(state.cfg.eval_tokens, 512))
    with state.evaluating() as model:
        return sample_continuation(model, prompt, stream.tokenizer, 256, seed=state.cfg.seed)


# --------------------------------------------------------------------------------------------------
# 4. The training loop


# Called after each step, on each rank, with the loss that train_step returned
OnStep = Callable[[TrainState, Tensor], None]


def train(
    cfg: Config, return_model: bool = False, on_step: OnStep | None = None
) -> dict[str, Any] | tuple[dict[str, Any], GPT]:
    """Run everything, from loading data to the final checkpoint; returns the dict in summary.json.

    return_model: return the model as well, in eval mode, as it was evaluated at the end. Raises
    UserError, RunError, or KeyboardInterrupt after Ctrl-C, once a checkpoint has been saved.
    """
    # Join the ranks, lock the run's folder, catch signals, start the clock
    with Run.open(cfg) as run:
        dist_ctx = run.dist_ctx

        # The checkpoint of --resume or --init_from, or None. Flags that were not given come from
        # it: to resume, all of them; with --init_from, the model's shape
        cfg, start = find_start(cfg, run)

        # Device, threads; checks of the flags
        run.configure(cfg)

        # Data, and the values of flags that are still automatic
        stream = open_stream(cfg, dist_ctx, start)
        cfg = choose_auto_values(cfg, stream, dist_ctx)
        cfg = choose_learning_rates(cfg)
        stream.set_batch_tokens(cfg.batch_tokens)

        # Model and optimizer; to resume, their state, the step, the clock
        state = build(cfg, dist_ctx, stream, start)
        if start and start.is_resume:
            start.restore(state, stream, run)
        del start  # free its tensors

        # Open the log files and write the effective settings; train; write the summary
        run.begin(state, stream)
        stopped_by = loop(run, on_step)
        summary = run.finish(stopped_by)
    if return_model:
        swap_weights(state.raw_model, state.extra.get("eval_weights", {}))
        return summary, state.raw_model.eval()
    return summary


def is_due(every: int | str, step: int) -> bool:
    """True on every `every`-th step; never for "end"."""
    return isinstance(every, int) and step > 0 and step % every == 0


def loop(run: Run, on_step: OnStep | None = None) -> str:
    """Train until there is a reason to stop; returns it, for example "max_steps"."""
    state, stream = run.state, run.stream
    cfg, dist_ctx = state.cfg, state.dist_ctx
    grad_norm = 0.0  # of the previous step
    # A thread reads the batches of the next steps ahead; next_batch() takes them in order
    with run.prefetching(lambda step: get_batch(stream, dist_ctx, step)) as next_batch:
        while True:
            step = state.step  # updates so far
            # The same on all ranks: signals, progress, whether time is up or a save is due
            status = agree_on_status(run)
            # Such as "signal" or "max_steps" (runtime/progress.py); "" to go on
            stop = reason_to_stop(status, run)

            # Once in a while: log the previous step, and the mean loss since the last line
            if step > run.first_step and (stop or is_due(cfg.log_every, step) or step == 1):
                run.log.step(run, grad_norm)

            # Once in a while: save a checkpoint. A run may be killed in the evaluation below
            if stop or status.is_save_due:
                save_checkpoint(run)

            # After a signal there may be little time left; a run that diverged is an error
            if stop in ("signal", "diverged"):
                break

            # Evaluate when due, at the end, and before fine-tuning; not again after a resume
            is_eval_due = is_due(cfg.eval_every, step) or (step == 0 and cfg.init_from)
            if (stop or is_eval_due) and step != run.log.last_eval_step:
                with run.clock.timing_evaluation():
                    losses = evaluate(state, stream, run.any_rank_is_asked_to_stop)
                if losses is None:
                    stop = "signal"
                    break
                run.add_evaluation(*losses)  # saves the weights if they are the best so far
                # Ask again: this loss may have reached the target, or it took the last minute
                status = agree_on_status(run)
                stop = reason_to_stop(status, run)
                if stop == "signal":
                    break

            # Once in a while: sample from the model
            if (stop or is_due(cfg.sample_every, step)) and stream.tokenizer:
                title = f"--- sample at step {step}: validation text >>> the model's continuation"
                run.log.info(f"{title}\n{sample_text(state, stream)}\n---")

            if stop:
                break

            # A single training step
            with run.clock.timing_step():
                loss, grad_norm = train_step(state, next_batch(), status.progress)
            # Counts bad gradients, keeps the loss for the log, deletes old checkpoints
            run.after_step(state.step, loss, grad_norm)
            if on_step:
                on_step(state, loss)

    # Save this step if it has no checkpoint: an evaluation ended the run, or a save failed
    save_checkpoint(run, is_last=True)
    return stop


# --------------------------------------------------------------------------------------------------
# 5. Command line

HELP = "Train a GPT. In brackets: the defaults of --preset laptop."


def main(argv: list[str]) -> None:
    """Train as the command line says."""
    flags = parse_flags(argv, Config, help_defaults=PRESETS["laptop"], description=HELP)
    cfg = make_config(**flags)
    if cfg.trials == 1:
        train(cfg)
    else:
        run_trials(cfg, train)


if __name__ == "__main__":
    # Prints errors, and turns them into an exit code
    exit_process(run_command(main, sys.argv[1:]))
