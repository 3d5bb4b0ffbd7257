"""Train a GPT: `python train_gpt.py [flags]`, or `torchrun --nproc_per_node=N train_gpt.py [flags]` on many devices.

Read from top to bottom: config, build, step and evaluation, the run and its loop, the command line. The model and its
optimizer are in model.py. From Python, call `train(make_config(n_layer=2, ...))`, as often as you like per process.
"""

import contextlib
import dataclasses
import math
import random
import sys
from dataclasses import dataclass

from runtime import set_environment

if __name__ == "__main__":
    set_environment()  # variables that PyTorch reads at import

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from common import derive_seed, exit_process, report_error
from data.stream import TokenStream, prefetch
from inference.generation import check_causal, sample_continuation
from model import GPT, GPTConfig, Optimizer, init_weights, optimizer_groups
from ops.attention import ATTENTION_BACKENDS
from ops.parallel import maybe_no_sync, sum_over_ranks, swap_in_eval_weights, to_full
from runtime.auto import choose_auto_values, flags_for_size, get_progress
from runtime.checkpoint import save_checkpoint
from runtime.dataset import open_stream
from runtime.device import DTYPES, init_device_and_ranks
from runtime.flag_checks import check_device, check_flags
from runtime.flags import flag, parse_flags
from runtime.log import Reporter, describe_run, open_run, run_trials
from runtime.profiler import profile_steps
from runtime.ranks import DistContext, max_over_ranks, raise_on_all_ranks
from runtime.resume import flags_of_run, load_init_checkpoint
from runtime.wrap_model import wrap_model

PARALLEL_MODES = ("auto", "ddp", "fsdp", "hsdp")
COMPILE_MODES = ("off", "default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")

# ---------------------------------------------------------------------------------------------------------------------
# 1. Config: every flag, declared once. The command line, help, checks, log and checkpoint follow from here.

SMALL = dict(ngram=-1, eval_tokens=262144)
LAPTOP = dict(
    n_layer=2,
    n_head=1,
    n_embd=128,
    ngram_rows=131072,
    batch_tokens=8192,
    max_steps=300,
    eval_every=150,
)
MINI = dict(
    n_layer=6,
    n_head=8,
    n_embd=512,
    seq_len=512,
    ngram_rows=65536,
    batch_tokens=16384,
    max_steps=1000,
)
PRESETS = {
    "laptop": SMALL | LAPTOP | dict(seq_len=2048, window="SL:512", short_frac=0.7),
    "mini": SMALL | MINI,
    "gpt2-small": dict(n_layer=12, n_head=6, n_embd=768, save_every=1000),
    "gpt2-medium": dict(n_layer=24, n_head=8, n_embd=1024, max_steps=10000, save_every=1000),
    "gpt2-large": dict(n_layer=36, n_head=10, n_embd=1280, max_steps=20000, save_every=1000),
    "gpt2-xl": dict(n_layer=48, n_head=25, n_embd=1600, max_steps=40000, save_every=1000),
}


@dataclass(frozen=True)
class Config:
    """The flags of a run. The defaults here suit gpt2-small; make_config overrides them with the preset's values."""

    # run
    preset: str = flag(
        "laptop", "sizes and schedule to start from; any other flag overrides it", PRESETS
    )
    data: str = flag(
        "",
        "folder of token shards from data/prepare.py (default: Python's standard library, made here)",
    )
    out_dir: str = flag("", "folder of this run (default: runs/<time>-<preset>)")
    resume: str = flag(
        "",
        "continue the run in out_dir (or this folder or file); auto: if one exists",
        const="newest",
    )
    init_from: str = flag(
        "", "run or checkpoint file to take the weights from, with a fresh schedule"
    )
    seed: int = flag(0, "seed for initial weights and data order")
    trials: int = flag(
        1, "number of runs, with seeds seed, seed+1, ..., in subfolders of out_dir", min=1
    )
    device: str = flag(
        "auto", "auto is cuda if there is one, else cpu", ("auto", "cpu", "cuda", "mps")
    )
    # model
    params: int = flag(
        0,
        "weights in the blocks, e.g. 10M: sets shape, batch, steps; -1: as suits --minutes",
        min=-1,
    )
    n_layer: int = flag(12, "transformer blocks", min=1)
    n_head: int = flag(6, "attention heads; a head dimension of 128 is fastest", min=1)
    n_embd: int = flag(768, "width", min=1)
    seq_len: int = flag(1024, "context length in tokens", min=1)
    window: str = flag(
        "L", "per-layer pattern, tiled: L full, S sliding window; SSSL:256 sets the width"
    )
    vocab_size: int = flag(
        0, "rows of embedding and head; 0 is the tokenizer's, rounded up to a multiple of 64"
    )
    ngram: int = flag(
        0,
        "add hashed embeddings of n-grams of length 2..N; 0 disables, -1: 6 for bytes, else 3",
        min=-1,
    )
    ngram_rows: int = flag(16384, "rows of the hash table shared by all n-grams", min=1)
    ngram_dropout: float = flag(
        -1.0, "probability of dropping an n-gram embedding in training; -1 = by epochs", min=-1
    )
    softcap: float = flag(15.0, "tanh soft-cap on logits; 0 disables")
    loss_chunk: int = flag(
        -1, "tokens per chunk of lm_head + cross-entropy; 0 disables chunking, -1 = auto", min=-1
    )
    # optimizer
    optimizer: str = flag(
        "muon", "Muon for matrices and Adam for the rest, or the baseline adamw", ("muon", "adamw")
    )
    muon_lr: float = flag(
        0.0, "learning rate of Muon; 0 = set from max_steps (docs/rates.md)", min=0
    )
    adam_lr: float = flag(
        0.0, "learning rate of Adam; 0 = set from the width (docs/rates.md)", min=0
    )
    weight_decay: float = flag(
        0.05, "decoupled decay (times LR) of the blocks' matrices; with adamw, of all weights"
    )
    grad_clip: float = flag(0.0, "max gradient norm; 0 disables")
    batch_tokens: int = flag(524288, "global batch size in tokens", min=1)
    micro_batch: int = flag(
        0, "sequences per device per micro-step; 0 = auto (CUDA: what fits; else 8,192 tokens)"
    )
    max_steps: int = flag(
        5000, "optimizer steps; the learning-rate schedule is fractions of it", min=1
    )
    minutes: float = flag(
        0.0, "end the whole run after N minutes: schedules follow the clock, not steps; 0 disables"
    )
    max_minutes: float = flag(
        0.0, "stop this process after N minutes, wherever the schedule is; 0 = never"
    )
    target_val_loss: float = flag(0.0, "stop when the validation loss is this low; 0 = never")
    short_frac: float = flag(
        0.0, "fraction of steps, at first, on sequences of an eighth of seq_len, which are faster"
    )
    warmup_frac: float = flag(0.0, "fraction of steps for linear LR warm-up")
    cooldown_frac: float = flag(0.6, "fraction of steps for linear LR decay to 0")
    # systems
    compile: str = flag(
        "off",
        "torch.compile blocks and loss (not yet run on a GPU)",
        COMPILE_MODES,
        const="default",
    )
    dtype: str = flag(
        "auto", "activation dtype; auto = bf16 if faster, else fp32", ("auto", *DTYPES)
    )
    bf16: bool = flag(False, "short for --dtype bf16", const=True)
    fp8: bool = flag(
        False,
        "float8 matmuls in MLP and head (CUDA sm89 or newer; not yet run on a GPU)",
        const=True,
    )
    matmul_precision: str = flag(
        "highest", "of fp32 matmuls; high is TF32 on CUDA", ("highest", "high", "medium")
    )
    attn: str = flag(
        "auto", "backend (flex, varlen, fa3, fa4: not yet run on a GPU)", ATTENTION_BACKENDS
    )
    checkpointing: str = flag(
        "auto", "of activations: none, selective, full, a budget in (0, 1) for torch.compile"
    )
    offload: str = flag(
        "none",
        "what stays in CPU memory (not yet run on a GPU)",
        ("none", "activations", "optimizer"),
    )
    parallel: str = flag(
        "auto", "auto is ddp; fsdp shards over all ranks, hsdp over --shard_size", PARALLEL_MODES
    )
    shard_size: int = flag(
        0, "ranks that share one copy of the weights under hsdp; 0 = the ranks of a node"
    )
    grad_comm: str = flag(
        "fp32", "dtype of the gradient reduction; bf16 halves traffic but rounds", ("fp32", "bf16")
    )
    bucket_cap_mb: int = flag(25, "DDP bucket size in MiB", min=1)
    alloc_conf: str = flag(
        "", "CUDA allocator settings, e.g. expandable_segments:True,max_split_size_mb:512"
    )
    deterministic: bool = flag(
        False, "use only operations that give the same bits in every run", const=True
    )
    doc_align: bool = flag(
        False, "start sequences at document boundaries; drop the remainder", const=True
    )
    doc_mask: bool = flag(False, "mask attention across documents", const=True)
    # logging and checkpoints
    eval_every: int = flag(250, "steps between evaluations; 0 = at the end only")
    eval_tokens: int = flag(
        10485760, "validation tokens, spread over the split (FineWeb: the first ones); 0 = all"
    )
    save_every: int = flag(
        0, "steps between checkpoints; 0 = at the end only (the best weights are saved as well)"
    )
    keep: int = flag(2, "how many of the newest checkpoints to keep; 0 = all")
    sample_every: int = flag(0, "steps between text samples; 0 = at the end only")
    log_every: int = flag(10, "steps between log lines", min=1)
    profile: int = flag(
        0, "steps to profile: a trace in out_dir and the ten most expensive operations", const=5
    )
    wandb: bool = flag(
        False, "log to Weights & Biases too (WANDB_MODE=offline needs no network)", const=True
    )

    @property
    def uses_cudagraphs(self) -> bool:
        return self.compile in ("reduce-overhead", "max-autotune")


def make_config(**flags) -> Config:
    """A checked Config: the preset's values (with `resume`, those of the run), overridden by `flags`.

    What it leaves open (a dtype of auto, learning rates of 0, ...) is settled when the run starts. Raises UserError for
    a wrong name or value.
    """
    given, saved = flags_of_run(
        flags, dataclasses.fields(Config)
    )  # saved: of the run to resume, or {}
    size_flags = {"preset", "params", "n_layer", "n_embd", "n_head"}
    if given.get("minutes") and not saved and not size_flags & given.keys():
        given["params"] = -1  # chosen in settle, once the speed of this machine is known
    preset_name = given.get("preset") or saved.get("preset") or "laptop"
    preset = dict(PRESETS[preset_name])
    if given.get("params", 0) > 0:
        preset.update(flags_for_size(given["params"], given))

    # What wins, from last to first: flags, the resumed run, the preset (unless it is given anew), the defaults of Config
    if "preset" in given and preset_name != saved.get("preset"):
        values = saved | preset
    else:
        values = preset | saved
    cfg = Config(**values | given)
    check_flags(cfg)
    if cfg.bf16:
        cfg = dataclasses.replace(cfg, dtype="bf16")
    return cfg


def resolve_auto(cfg: Config, dist_ctx: DistContext, stream: TokenStream, saved: dict) -> Config:
    """The flags with all that they leave open, once and for all; `saved`: those of a run that is resumed, or {}."""
    flags, preset = dataclasses.asdict(cfg), dataclasses.asdict(Config(**PRESETS[cfg.preset]))
    chosen = choose_auto_values(
        flags, preset, stream.train.n_tokens, stream.meta["vocab_size"], dist_ctx
    )
    final = dataclasses.replace(cfg, **chosen)
    muon_lr, adam_lr = learning_rates(final)
    epochs = final.max_steps * final.batch_tokens / (stream.seqs_per_epoch * final.seq_len)
    ngram_dropout = get_ngram_dropout(final, epochs)
    final = dataclasses.replace(
        final, muon_lr=muon_lr, adam_lr=adam_lr, ngram_dropout=ngram_dropout
    )
    # A resumed run keeps what was chosen when it started
    for field in dataclasses.fields(Config):
        was_chosen = getattr(final, field.name) != getattr(cfg, field.name)
        if was_chosen and field.name in saved:
            final = dataclasses.replace(final, **{field.name: saved[field.name]})
    stream.seqs_per_batch = (
        final.batch_tokens // final.seq_len
    )  # --minutes may have chosen another batch
    return final


def learning_rates(cfg: Config) -> tuple[float, float]:
    """Learning rates of Muon (the blocks' matrices) and Adam (all else; everything under --optimizer adamw).

    A flag of 0 means by rule: close to the best at each width and number of steps measured in docs/rates.md, and equal
    to the NanoGPT speedrun's 0.02 and 0.006 at GPT-2's small size and 5,000 steps.
    """
    muon_lr = 0.02 * (5000 / cfg.max_steps) ** 0.16
    adam_lr = 0.006 * (768 / cfg.n_embd) ** 0.4
    if cfg.optimizer == "adamw":
        muon_lr = 0.0
        adam_lr = 0.002 * (768 / cfg.n_embd) ** 0.75
    # three digits, as the log shows them; a rate that is given wins
    muon_lr = cfg.muon_lr or float(f"{muon_lr:.3g}")
    adam_lr = cfg.adam_lr or float(f"{adam_lr:.3g}")
    return muon_lr, adam_lr


def get_ngram_dropout(cfg: Config, epochs: float) -> float:
    """--ngram_dropout. For -1 it grows with the epochs, because n-grams of a repeated text are memorized:
    0 up to 0.75 epochs, then such that each n-gram is kept about twice in the whole run."""
    if cfg.ngram < 2:
        return 0.0
    if cfg.ngram_dropout >= 0:
        return cfg.ngram_dropout
    repeats = max(0.0, epochs - 0.75)
    return 1 - 1 / (1 + 0.45 * repeats)


# ---------------------------------------------------------------------------------------------------------------------
# 2. Build: the model, what goes around it, its optimizer


@dataclass(slots=True)
class TrainState:
    """What a training step works on. `model` is called in training; `raw_model` is the same without DDP around it."""

    cfg: Config
    dist_ctx: DistContext
    raw_model: GPT
    model: nn.Module
    micro_batch: int
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler
    step: int = 0  # updates done, skipped ones included
    tokens: int = 0  # trained on so far
    # For your edits: name -> number or 0-d tensor; averaged over ranks and logged with the loss until you change it
    # (with the validation loss, if evaluate sets it).
    metrics: dict = dataclasses.field(default_factory=dict)
    # For your edits, saved in checkpoints: tensors, numbers, strings, lists, dicts. A tensor named like a parameter is
    # sharded like it; extra["eval_weights"] (name -> tensor) is what is evaluated, sampled and saved as the best.
    extra: dict = dataclasses.field(default_factory=dict)

    def evaluating(self):
        """Context manager: the model in eval mode with eval_weights, as it is evaluated, sampled and saved as best."""
        return swap_in_eval_weights(self.raw_model, self.extra.get("eval_weights", {}))


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
    cfg: Config, dist_ctx: DistContext, vocab_size: int, eot: int | None = None, start=None
) -> TrainState:
    """The model and its optimizer, ready to step. Weights are drawn from the seed, or taken from a checkpoint, `start`.

    vocab_size, eot: of the tokenizer. Raises UserError.
    """
    torch.manual_seed(cfg.seed)  # for parameters that no row of PARAM_TABLE initializes
    with dist_ctx.device:  # parameters are created there
        raw_model = GPT(
            gpt_config(cfg, vocab_size),
            compute_dtype=DTYPES[cfg.dtype],
            loss_chunk=cfg.loss_chunk,
            attn=cfg.attn,
            doc_eot=eot if cfg.doc_mask else None,
            ngram_dropout=cfg.ngram_dropout,
        )
    check_causal(raw_model)  # before head and projections are zero, which would hide a leak
    init_weights(raw_model, lambda name: derive_seed(cfg.seed, name) >> 1)  # 63 bits
    if start and start.path:
        start.load_weights(raw_model)

    # fp8, checkpointing, compile, DDP or FSDP; and the micro-batch that fits, found by steps on dummy data
    seq_lens = {get_seq_len(0.0, cfg), get_seq_len(1.0, cfg)}
    model, micro_batch = wrap_model(
        raw_model, lambda: make_optimizer(cfg, raw_model), cfg, dist_ctx, seq_lens
    )
    optimizer = make_optimizer(cfg, raw_model)
    for group in optimizer.param_groups:
        group.setdefault("initial_lr", group["lr"])  # what the schedule multiplies
    scaler = torch.amp.GradScaler(dist_ctx.device.type, enabled=cfg.dtype == "fp16")
    return TrainState(cfg, dist_ctx, raw_model, model, micro_batch, optimizer, scaler)


def make_optimizer(cfg: Config, model: GPT) -> torch.optim.Optimizer:
    """Muon + Adam, with fresh state. Any torch.optim optimizer whose step() needs no closure works too."""
    groups = optimizer_groups(model, cfg.optimizer, cfg.muon_lr, cfg.adam_lr, cfg.weight_decay)
    ns_dtype = (
        torch.bfloat16 if cfg.dtype == "bf16" else torch.float32
    )  # GPUs that need fp16 have no bf16
    return Optimizer(groups, ns_dtype, offload=cfg.offload == "optimizer")


# ---------------------------------------------------------------------------------------------------------------------
# 3. Step and evaluation


def get_lr_multiplier(progress: float, cfg: Config) -> float:
    """Factor on the learning rates at this fraction of the run: a trapezoidal (WSD) schedule."""
    if progress < cfg.warmup_frac:
        return min(1.0, (progress + 1 / cfg.max_steps) / cfg.warmup_frac)
    if progress > 1 - cfg.cooldown_frac:
        return (1 - progress) / cfg.cooldown_frac
    return 1.0


def get_momentum(step: int) -> float:
    """Muon's momentum in update number `step`: from 0.85 up to 0.95 over the first 300 (NanoGPT speedrun)."""
    return 0.95 - 0.1 * max(0.0, 1 - step / 300)


def get_seq_len(progress: float, cfg: Config) -> int:
    """The context in training at this fraction of the run: shorter at first, when a model learns what is near."""
    can_shorten = cfg.seq_len % 8 == 0 and not cfg.doc_align
    if progress < cfg.short_frac and can_shorten:
        return cfg.seq_len // 8
    return cfg.seq_len


def get_batch(stream: TokenStream, dist_ctx: DistContext, step: int) -> Tensor:
    batch = torch.from_numpy(stream.batch(step, dist_ctx.rank, dist_ctx.world_size))
    if dist_ctx.device.type == "cuda":
        batch = batch.pin_memory()  # lets .to(device, non_blocking=True) return at once
    return batch


def seed_random(state: TrainState) -> None:
    """Seed every generator by (seed, step, rank), so that a resumed run draws the same without saved RNG states."""
    seed, step, rank = state.cfg.seed, state.step, state.dist_ctx.rank
    state.raw_model.step_seed = derive_seed(
        seed, "step", step
    )  # of n-gram dropout: the same on all ranks
    rank_seed = derive_seed(seed, "step", step, rank)
    random.seed(rank_seed)
    np.random.seed(rank_seed % 2**32)
    torch.manual_seed(rank_seed)


def train_step(state: TrainState, batch: Tensor, progress: float) -> tuple[Tensor, float]:
    """One optimizer step on this rank's batch, int64 (sequences, seq_len + 1), at this fraction of the run.

    Returns this rank's loss, fp32 (), whose mean over ranks is the mean loss of the global batch, and the global
    gradient norm before clipping. If that is not finite, every rank skips the update.
    """
    cfg, dist_ctx, optimizer = state.cfg, state.dist_ctx, state.optimizer
    seed_random(state)

    # Inputs, and as targets the next tokens. To leave tokens out of the loss, set their targets to -1
    batch = batch.to(dist_ctx.device, non_blocking=True)
    inputs, targets = batch[:, :-1], batch[:, 1:].clone()

    # Cut into micro-batches of as many tokens, also while sequences are short
    seq_len = get_seq_len(progress, cfg)
    micro_batch = state.micro_batch * cfg.seq_len // seq_len
    xs = inputs.reshape(-1, seq_len).split(micro_batch)
    ys = targets.reshape(-1, seq_len).split(micro_batch)

    # The loss is the mean over all targets of all ranks. Ranks and micro-batches may have different numbers of them, so
    # each micro-batch's mean is weighted by its share. DDP and FSDP average gradients, hence targets per rank
    targets_per_rank = sum_over_ranks((targets >= 0).sum()).clamp(min=1) / dist_ctx.world_size
    loss = torch.zeros((), device=dist_ctx.device)
    for i, (x, y) in enumerate(zip(xs, ys)):
        is_last = i == len(xs) - 1
        with maybe_no_sync(state.model, is_last):  # reduce gradients over ranks only once
            micro_loss = state.model(x, y)
            micro_loss = micro_loss * ((y >= 0).sum() / targets_per_rank)
            state.scaler.scale(micro_loss).backward()
        loss += micro_loss.detach()
    state.tokens += targets.numel() * dist_ctx.world_size

    # Gradient norm, for clipping and the log
    state.scaler.unscale_(optimizer)
    params = [p for p in state.raw_model.parameters() if p.grad is not None]
    norm = nn.utils.get_total_norm([p.grad for p in params])
    if cfg.grad_clip:
        nn.utils.clip_grads_with_norm_(params, cfg.grad_clip, norm)

    # Schedules
    for group in optimizer.param_groups:
        group["lr"] = group["initial_lr"] * get_lr_multiplier(progress, cfg)
        if group.get("kind") == "muon":
            group["momentum"] = get_momentum(state.step)

    # Step, unless the gradient overflowed
    grad_norm = to_full(norm).item()  # waits for the device, once per step
    if math.isfinite(grad_norm):
        state.scaler.step(optimizer)
    state.scaler.update()
    # CUDA graphs need gradients to stay at their addresses
    optimizer.zero_grad(set_to_none=not cfg.uses_cudagraphs)
    state.step += 1
    return loss, grad_norm


@torch.no_grad()
def evaluate(state: TrainState, stream: TokenStream, signals=()) -> float | None:
    """Mean loss over --eval_tokens validation tokens, in nats; independent of ranks and micro-batch.

    All ranks run as many batches; padding is not counted. None if a rank has caught a signal, as time may be short.
    """
    cfg, dist_ctx, device = state.cfg, state.dist_ctx, state.dist_ctx.device
    loss_sum, n_targets = 0.0, 0
    with state.evaluating() as model:
        for x, y in stream.eval_batches(
            cfg.eval_tokens, state.micro_batch, dist_ctx.rank, dist_ctx.world_size
        ):
            if any(max_over_ranks(dist_ctx, bool(signals))):
                return None
            loss = model(torch.from_numpy(x).to(device), torch.from_numpy(y).to(device))
            n = int((y >= 0).sum())  # 0 in a batch of padding alone
            loss_sum += loss.item() * n
            n_targets += n
    sums = torch.tensor([loss_sum, n_targets], dtype=torch.float64)
    loss_sum, n_targets = sum_over_ranks(sums, dist_ctx.cpu_group).tolist()
    return loss_sum / n_targets


def sample_text(state: TrainState, stream: TokenStream, n_tokens: int = 256) -> str:
    """The end of the evaluated text, ">>>", and the model's continuation; the same for the same weights."""
    prompt = torch.from_numpy(stream.eval_end(state.cfg.eval_tokens, 512))[0]
    with state.evaluating() as model:
        return sample_continuation(model, prompt, stream.tokenizer, n_tokens, state.cfg.seed)


# ---------------------------------------------------------------------------------------------------------------------
# 4. The run and its loop

MAX_BAD_STEPS = 10  # skipped in a row, which end a run


def train(cfg: Config, return_model: bool = False, on_step=None) -> dict | tuple[dict, GPT]:
    """A whole run, from data to the last checkpoint; returns what summary.json holds, and the model if asked for.

    on_step(state, loss), if given, is called on each rank after each step, with its TrainState and the loss that
    train_step returned. Raises TrainerError.
    """
    # Device and ranks; the run's folder
    dist_ctx = init_device_and_ranks(cfg)
    with open_run(cfg.out_dir, cfg.preset, dist_ctx) as (logger, signals):
        with raise_on_all_ranks(dist_ctx):  # an error on one rank is raised on all
            preset, windows = (
                Config(**PRESETS[cfg.preset]),
                gpt_config(cfg, vocab_size=0).layer_windows(),
            )
            warnings = check_device(cfg, preset, dist_ctx, windows)

        # Data
        stream = open_stream(
            cfg.data,
            dist_ctx,
            seq_len=cfg.seq_len,
            batch_tokens=cfg.batch_tokens,
            seed=cfg.seed,
            vocab_size=cfg.vocab_size,
            doc_align=cfg.doc_align,
        )

        # The checkpoint that --resume or --init_from names, if any
        start = load_init_checkpoint(logger, cfg.resume, cfg.init_from, stream)
        checkpoint = start.checkpoint if start.resumes else None
        cfg = resolve_auto(cfg, dist_ctx, stream, checkpoint["config"] if checkpoint else {})

        # Model and optimizer
        with raise_on_all_ranks(dist_ctx):
            check_flags(cfg)
            state = build(cfg, dist_ctx, stream.meta["vocab_size"], stream.meta["eot"], start)
            if checkpoint:
                state.step = checkpoint["step"]
                state.tokens = checkpoint["tokens"]
                extra = start.load_state(state.raw_model, state.optimizer, state.scaler, stream)
                state.extra.update(extra)
                stream.eval_subset = checkpoint["eval_part"]
                logger.timer.train_time = checkpoint["clock"]["train_time"]
                logger.timer.wall_before = checkpoint["clock"]["wall_time"]
        del start, checkpoint  # free their tensors

        # Say what runs, train, say how it ended
        history = logger.open(dataclasses.asdict(cfg), state.step, stream.vocabulary)
        for line in (
            describe_run(cfg, state.raw_model, state.micro_batch, stream, dist_ctx) + warnings
        ):
            logger.info(line)
        reporter = Reporter(
            logger, history, state.tokens, state.raw_model.flops_per_token(), cfg, stream
        )
        stopped_by = loop(state, stream, logger, reporter, signals, on_step)
        summary = reporter.summary(stopped_by, state.step, state.tokens, signals)
    if return_model:
        return summary, state.raw_model
    return summary


def save(state: TrainState, stream: TokenStream, logger, must: bool = False) -> None:
    """Save a checkpoint to resume from; raises RunError if it must succeed and does not."""
    content = checkpoint_content(state, logger)
    save_checkpoint(
        logger, stream, content, state.raw_model, state.optimizer, state.extra, state.cfg.keep, must
    )


def save_best(state: TrainState, stream: TokenStream, logger) -> None:
    """Save the weights that were just evaluated as ckpt_best.pt, without optimizer."""
    content = checkpoint_content(state, logger)
    with state.evaluating():
        save_checkpoint(logger, stream, content, state.raw_model, None, {}, keep=0, must=False)


def checkpoint_content(state: TrainState, logger) -> dict:
    """What a checkpoint holds besides tensors."""
    return dict(
        step=state.step,
        tokens=state.tokens,
        clock=dict(train_time=logger.timer.train_time, wall_time=logger.timer.wall_time),
        config=dataclasses.asdict(state.cfg),
        model_config=dataclasses.asdict(state.raw_model.cfg),
        scaler=state.scaler.state_dict(),
    )


def is_due(every: int, step: int) -> bool:
    return 0 < every and 0 < step and step % every == 0


def loop(
    state: TrainState, stream: TokenStream, logger, reporter: Reporter, signals: list, on_step=None
) -> str:
    """Train from state.step until something ends the run; returns the reason: max_steps, minutes, max_minutes,
    target_val_loss, diverged or a signal's name ("signal" on ranks that caught none)."""
    cfg, dist_ctx, timer = state.cfg, state.dist_ctx, logger.timer
    first_step = saved_at = state.step
    loss, norm, bad_steps = None, None, 0
    batches = prefetch(lambda step: get_batch(stream, dist_ctx, step), state.step, depth=2)
    profiling = profile_steps(cfg.profile, cfg.max_steps - state.step, logger)
    with contextlib.closing(batches), profiling as profiler_step:
        while True:
            progress, ran_s, signaled = ask_ranks(state, stream, timer, signals)
            step, last_eval = state.step, reporter.last_eval["step"]
            trained = (
                step > first_step
            )  # a restarted job takes at least one step, whatever else says stop

            # Why the run ends here, if it does
            stop = ""
            if progress >= 1:
                stop = "minutes" if cfg.minutes else "max_steps"
            if trained and cfg.max_minutes and ran_s >= 60 * cfg.max_minutes:
                stop = "max_minutes"
            if trained and bad_steps == MAX_BAD_STEPS:
                stop = "diverged"
            if trained and signaled:
                stop = "signal"

            # Log
            if trained and (stop or is_due(cfg.log_every, step) or step == 1):
                row = dict(step=step, train_loss=loss, grad_norm=norm, tokens=state.tokens)
                reporter.log_step(row, state.optimizer.param_groups, state.metrics)

            # Save before evaluating: there may be little time left
            if (stop or is_due(cfg.save_every, step)) and step != saved_at:
                save(state, stream, logger, must=bool(stop))
                saved_at = step
            if stop in ("signal", "diverged"):
                break

            # Evaluate
            if (stop or is_due(cfg.eval_every, step)) and step != last_eval:
                with timer.evaluating():
                    val_loss = evaluate(state, stream, signals)
                if val_loss is None:  # a signal came meanwhile
                    stop = "signal"
                    break
                is_best = reporter.log_eval(step, val_loss, state.tokens, state.metrics)
                only_one = (
                    stop and len(reporter.evaluations) == 1
                )  # then the last checkpoint has the same weights
                if is_best and not only_one:
                    save_best(state, stream, logger)
                if cfg.target_val_loss and val_loss <= cfg.target_val_loss:
                    stop = "target_val_loss"

            # Sample
            if (stop or is_due(cfg.sample_every, step)) and stream.tokenizer:
                logger.info(f"--- sample at step {step}\n{sample_text(state, stream)}\n---")

            if stop:
                break

            # Train
            with timer.training():
                batch = reporter.next_batch(batches)
                loss, norm = train_step(state, batch, progress)
            if math.isfinite(norm):
                bad_steps = 0
            else:
                bad_steps += 1
                logger.info(
                    f"step {state.step} skipped: its gradient is not finite ({bad_steps} in a row)"
                )
            if on_step:
                on_step(state, loss)
            profiler_step()
    if saved_at != state.step:
        save(state, stream, logger, must=True)
    if stop == "signal" and signals:
        return signals[0]
    return stop


def ask_ranks(
    state: TrainState, stream: TokenStream, timer, signals: list
) -> tuple[float, float, bool]:
    """How much of the run is done, seconds of this process, whether a rank has caught a signal: the same on all ranks."""
    epochs = state.step * stream.seqs_per_batch / stream.seqs_per_epoch
    tail_s = timer.tail_s(stream.num_eval_seqs(state.cfg.eval_tokens) / stream.seqs_per_batch)
    progress = get_progress(state.cfg, state.step, epochs, timer.wall_time, tail_s)
    ran_s = timer.wall_time - timer.wall_before
    progress, ran_s, signaled = max_over_ranks(state.dist_ctx, progress, ran_s, bool(signals))
    return progress, ran_s, bool(signaled)


# ---------------------------------------------------------------------------------------------------------------------
# 5. The command line


def main(argv: list[str]) -> int:
    """The command line; returns the exit code: 0 done, 2 the user's mistake, 1 anything else."""
    sys.stdout.reconfigure(errors="replace")  # samples may hold what a terminal cannot encode
    try:
        description = __doc__.split("\n")[0] + " In brackets: the defaults of --preset laptop."
        cfg = make_config(
            **parse_flags(argv, dataclasses.fields(Config), PRESETS["laptop"], description)
        )
        run_trials(
            lambda **which: train(dataclasses.replace(cfg, **which)),
            cfg.seed,
            cfg.trials,
            cfg.out_dir,
        )
    except Exception as error:
        return report_error(error)
    if dist.is_initialized():  # not after an error: it would wait for the other ranks
        dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    exit_process(main(sys.argv[1:]))
