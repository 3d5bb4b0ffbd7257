"""Train a GPT: `python train_gpt.py [flags]`, or `torchrun --nproc_per_node=N train_gpt.py [flags]` on many devices.

Read from top to bottom: config, build, step and evaluation, the run and its loop, the command line. The model and its
optimizer are in model.py. From Python, call `train(make_config(n_layer=2, ...))`, as often as you like per process.
"""

import contextlib
import dataclasses
import random
import sys
from collections import deque
from dataclasses import dataclass

from runtime import set_environment

if __name__ == "__main__":
    set_environment()  # variables that PyTorch reads at import

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from data.shards import RunError, UserError
from data.stream import TokenStream, derive_seed, prefetch
from generation import complete
from model import GPT, GPTConfig, Optimizer, check_model, init_buffers, init_weights, optimizer_groups
from ops import parallel
from ops.attention import ATTENTION_BACKENDS
from ops.compile import apply_compile
from ops.warmup import cudagraph_mark_step, warm_up
from runtime import checks, derived, resume, start
from runtime.checkpoint import CheckpointManager, snapshot
from runtime.errors import never_fatal, report_error
from runtime.flags import flag, parse_flags
from runtime.launch import DTYPES
from runtime.logger import TrainTimer
from runtime.memory import fit_loss_chunk, fit_memory
from runtime.minutes import choose_max_steps
from runtime.profiler import StepProfiler
from runtime.progress import Progress
from runtime.ranks import DistContext, StopVotes, agree, dist_max, exit_process
from runtime.trials import train_trials
from runtime.watch import check_gradients, watch_blocks

COMPILE_MODES = ("off", "default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")

# ---------------------------------------------------------------------------------------------------------------------
# 1. Config: every flag, declared once. The command line, help, checks, log and checkpoint follow from here.

PRESETS = {
    "laptop": dict(
        n_layer=2,
        n_head=1,
        n_embd=128,
        seq_len=1024,
        ngram=-1,
        ngram_rows=131072,
        batch_tokens=8192,
        max_steps=260,
        eval_every=130,
        eval_tokens=262144,
    ),
    "mini": dict(
        n_layer=6,
        n_head=8,
        n_embd=512,
        seq_len=512,
        ngram=-1,
        ngram_rows=65536,
        batch_tokens=16384,
        max_steps=1000,
        eval_tokens=262144,
    ),
    "gpt2-small": dict(n_layer=12, n_head=6, n_embd=768, save_every=1000),
    "gpt2-medium": dict(n_layer=24, n_head=8, n_embd=1024, max_steps=10000, save_every=1000),
    "gpt2-large": dict(n_layer=36, n_head=10, n_embd=1280, max_steps=20000, save_every=1000),
    "gpt2-xl": dict(n_layer=48, n_head=25, n_embd=1600, max_steps=40000, save_every=1000),
}


@dataclass(frozen=True)
class Config:
    """The flags of a run. The defaults here suit gpt2-small; make_config overrides them with the preset's values."""

    # run
    preset: str = flag("laptop", "sizes and schedule to start from; any other flag overrides it", PRESETS)
    data: str = flag("", "folder of token shards from data/prepare.py (default: Python's standard library, made here)")
    out_dir: str = flag("", "folder of this run (default: runs/<time>-<preset>)")
    resume: str = flag("", "continue the run in out_dir (or this folder or file); auto: if one exists", const="newest")
    init_from: str = flag("", "run or checkpoint file to take the weights from, with a fresh schedule")
    init_partial: bool = flag(False, "with --init_from, load what fits by name and shape; the rest is new", const=True)
    seed: int = flag(0, "seed for initial weights and data order")
    trials: int = flag(1, "number of runs, with seeds seed, seed+1, ..., in subfolders of out_dir", min=1)
    device: str = flag("auto", "auto is cuda if there is one, else cpu", ("auto", "cpu", "cuda", "mps"))
    # model
    params: int = flag(0, "weights in the blocks, e.g. 10M: sets their shape, the batch, steps and n-grams", min=0)
    n_layer: int = flag(12, "transformer blocks", min=1)
    n_head: int = flag(6, "attention heads; a head dimension of 128 is fastest", min=1)
    n_embd: int = flag(768, "width", min=1)
    seq_len: int = flag(1024, "context length in tokens", min=1)
    window: str = flag("L", "per-layer pattern, tiled: L full, S sliding window; SSSL:256 sets the width")
    vocab_size: int = flag(0, "rows of embedding and head; 0 is the tokenizer's, rounded up to a multiple of 64")
    ngram: int = flag(0, "add hashed embeddings of n-grams of length 2..N; 0 disables, -1: 6 for bytes, else 3", min=-1)
    ngram_rows: int = flag(16384, "rows of the hash table shared by all n-grams", min=1)
    ngram_dropout: float = flag(-1.0, "probability of dropping an n-gram embedding in training; -1 = by epochs", min=-1)
    softcap: float = flag(15.0, "tanh soft-cap on logits; 0 disables")
    loss_chunk: int = flag(-1, "tokens per chunk of lm_head + cross-entropy; 0 disables chunking, -1 = auto", min=-1)
    # optimizer
    optimizer: str = flag("muon", "Muon for matrices and Adam for the rest, or the baseline adamw", ("muon", "adamw"))
    muon_lr: float = flag(0.0, "learning rate of Muon; 0 = set from max_steps (docs/rates.md)", min=0)
    adam_lr: float = flag(0.0, "learning rate of Adam; 0 = set from the width (docs/rates.md)", min=0)
    weight_decay: float = flag(0.05, "decoupled decay (times LR) of the blocks' matrices; with adamw, of all weights")
    grad_clip: float = flag(0.0, "max gradient norm; 0 disables")
    batch_tokens: int = flag(524288, "global batch size in tokens", min=1)
    micro_batch: int = flag(0, "sequences per device per micro-step; 0 = auto (CUDA: what fits; else 8,192 tokens)")
    max_steps: int = flag(5000, "optimizer steps; the learning-rate schedule is fractions of it", min=1)
    minutes: float = flag(0.0, "choose max_steps by measured speed so that the run ends within N minutes; 0 disables")
    max_minutes: float = flag(0.0, "stop this process after N minutes, wherever the schedule is; 0 = never")
    target_val_loss: float = flag(0.0, "stop when the validation loss is this low; 0 = never")
    warmup_frac: float = flag(0.0, "fraction of steps for linear LR warm-up")
    cooldown_frac: float = flag(0.6, "fraction of steps for linear LR decay to 0")
    schedule_from: str = flag("start", "start or here; here caps a resumed run's LR at its current value")
    # systems
    compile: str = flag(
        "off", "torch.compile blocks and loss, in this mode (not yet run on a GPU)", COMPILE_MODES, const="default"
    )
    dtype: str = flag("auto", "activation dtype; auto = bf16 if faster, else fp32", ("auto", *DTYPES))
    bf16: bool = flag(False, "short for --dtype bf16", const=True)
    fp8: bool = flag(False, "float8 matmuls in MLP and head (CUDA sm89 or newer; not yet run on a GPU)", const=True)
    matmul_precision: str = flag(
        "highest", "precision of fp32 matmuls; high is TF32 on CUDA", ("highest", "high", "medium")
    )
    attn: str = flag(
        "auto",
        "backend; auto is PyTorch's, or blocked on CPUs where faster (flex, varlen, fa3, fa4: not yet run on a GPU)",
        ATTENTION_BACKENDS,
    )
    checkpointing: str = flag(
        "auto",
        "activation checkpointing: none, selective, full, or a torch.compile memory budget in (0, 1); auto recomputes "
        "only what it must to fit 4,096 tokens on the GPU",
    )
    offload: str = flag("none", "what stays in CPU memory (not yet run on a GPU)", ("none", "activations", "optimizer"))
    parallel: str = flag(
        "auto",
        "for several ranks: auto is ddp; fsdp shards weights, gradients and optimizer state over all ranks, hsdp "
        "within groups of --shard_size",
        ("auto", "ddp", "fsdp", "hsdp"),
    )
    shard_size: int = flag(0, "ranks that share one copy of the weights under hsdp; 0 = the ranks of a node")
    grad_comm: str = flag("fp32", "dtype of the gradient reduction; bf16 halves traffic but rounds", ("fp32", "bf16"))
    bucket_cap_mb: int = flag(25, "DDP bucket size in MiB", min=1)
    alloc_conf: str = flag("", "CUDA allocator settings, e.g. expandable_segments:True,max_split_size_mb:512")
    deterministic: bool = flag(False, "use only operations that give the same bits in every run", const=True)
    prefetch: int = flag(2, "batches prepared ahead in the background")
    doc_align: bool = flag(False, "start sequences at document boundaries; drop the remainder", const=True)
    doc_mask: bool = flag(False, "mask attention across documents", const=True)
    # logging and checkpoints
    eval_every: int = flag(250, "steps between evaluations; 0 = at the end only")
    eval_tokens: int = flag(10485760, "validation tokens, spread over the split (FineWeb: the first ones); 0 = all")
    save_every: int = flag(0, "steps between checkpoints; 0 = at the end only (the best weights are saved as well)")
    keep: int = flag(2, "how many of the newest checkpoints to keep; 0 = all")
    sample_every: int = flag(0, "steps between text samples; 0 = at the end only")
    log_every: int = flag(10, "steps between log lines", min=1)
    max_bad_steps: int = flag(10, "abort after N consecutive skipped (non-finite) steps; 0 = never")
    profile: int = flag(0, "steps to profile: a trace in out_dir and the ten most expensive operations", const=5)
    wandb: bool = flag(False, "log to Weights & Biases too (WANDB_MODE=offline needs no network)", const=True)


def make_config(**flags) -> Config:
    """A checked Config: the preset's values (with `resume`, those of the run), overridden by `flags`.

    Under `minutes`, sizes that train() is to choose are None, and rates by rule stay 0 until the steps are known.
    Raises UserError for a wrong name or value.
    """
    given = resume.merge_flags(flags, dataclasses.fields(Config), PRESETS)
    cfg = Config(**(preset_flags(given) | given))
    sized = given.keys() & {"preset", "params", "n_layer", "n_embd", "n_head", "init_from"}
    chosen_later = derived.SIZED - given.keys() if cfg.minutes and not sized else set()  # by --minutes, in train()
    checked = cfg
    if "batch_tokens" in chosen_later:  # any that --seq_len and --micro_batch divide
        checked = dataclasses.replace(cfg, batch_tokens=cfg.seq_len * max(1, cfg.micro_batch))
    checks.check_flags(checked)
    try:
        gpt_config(cfg, 0).layer_windows()
    except ValueError as error:
        raise UserError(f"--{error}") from None
    if cfg.bf16:
        cfg = dataclasses.replace(cfg, dtype="bf16")
    if cfg.minutes:
        return dataclasses.replace(cfg, **dict.fromkeys(chosen_later))
    return with_rates(cfg)


def preset_flags(given: dict) -> dict:
    """Defaults of the flags that are not given: the preset's, overridden by what --params chooses."""
    preset = PRESETS[given.get("preset", "laptop")]
    return preset | derived.sizes(given["params"], given) if given.get("params", 0) > 0 else preset


def parse_args(argv: list[str]) -> dict:
    """The flags given on a command line. Raises UserError."""
    description = __doc__.split("\n")[0] + " In brackets: the defaults of --preset laptop."
    return parse_flags(argv, dataclasses.fields(Config), PRESETS["laptop"], description)


# ---------------------------------------------------------------------------------------------------------------------
# 2. Build, in the order in which these compose: model, FSDP, micro-batch, compile, DDP, warm-up, weights, optimizer


@dataclass(slots=True)
class TrainState:
    """What a training step works on. `model` is what is called; `raw_model` is the same model without wrappers."""

    cfg: Config
    dist_ctx: DistContext
    raw_model: GPT
    model: nn.Module
    micro_batch: int
    skipped: deque  # for each step since the last log, bool () on the device: whether its update was skipped
    optimizer: torch.optim.Optimizer = None
    scaler: torch.amp.GradScaler = None
    step: int = 0  # updates done, skipped ones included
    tokens: int = 0  # trained on so far
    # For your edits: name -> number or 0-d tensor; averaged over ranks and logged with the loss until you change it
    # (with the validation loss, if evaluate sets it).
    metrics: dict = dataclasses.field(default_factory=dict)
    # For your edits, saved in checkpoints: tensors, numbers, strings, lists, dicts. A tensor named like a parameter is
    # sharded like it; extra["eval_weights"] (name -> tensor) is what is evaluated, sampled and saved as the best.
    extra: dict = dataclasses.field(default_factory=dict)
    notes: list = dataclasses.field(default_factory=list)  # lines on the model, for the log

    @property
    def grad_accum_steps(self) -> int:
        return self.cfg.batch_tokens // self.cfg.seq_len // self.dist_ctx.world_size // self.micro_batch

    def as_evaluated(self):
        """Context manager: the model in eval mode with eval_weights, as it is evaluated, sampled and saved as best."""
        return parallel.eval_mode(self.raw_model, self.extra.get("eval_weights", {}))


def select_attn_backend(cfg: Config, device: torch.device) -> str:
    """The attention backend: auto is PyTorch's choice, or `blocked` where that is faster and takes little memory."""
    if cfg.attn != "auto" or device.type != "cpu":
        return cfg.attn
    if cfg.compile != "off":
        longest = 1024
    elif cfg.dtype == "bf16" and cfg.checkpointing in ("auto", "none"):
        longest = 1024 if cfg.n_layer * cfg.n_head <= 8 else 512  # the scores of each head are kept for backward
    else:
        longest = 0
    return "blocked" if cfg.seq_len <= longest else "auto"


def gpt_config(cfg: Config, vocab_size: int) -> GPTConfig:
    """The model's shape, for a tokenizer of vocab_size tokens."""
    shape = {f.name: getattr(cfg, f.name) for f in dataclasses.fields(GPTConfig) if hasattr(cfg, f.name)}
    shape["vocab_size"] = cfg.vocab_size or -(-vocab_size // 64) * 64  # matmuls are faster so
    if cfg.ngram == -1:
        shape["ngram"] = 6 if vocab_size < 258 else 3  # a byte tokenizer, or longer tokens
    return GPTConfig(**shape)


def build(cfg: Config, dist_ctx: DistContext, vocab_size: int, eot: int | None = None) -> TrainState:
    """The model and its optimizer, ready to step. Weights are drawn from the seed after the compiler is warmed up."""
    device, dtype = dist_ctx.device, DTYPES[cfg.dtype]
    shape = gpt_config(cfg, vocab_size)
    with torch.device("meta" if derived.is_sharded(cfg) else device):
        raw_model = GPT(
            shape,
            dtype,
            loss_chunk=fit_loss_chunk(cfg.loss_chunk, shape.vocab_size, device, cfg.compile != "off"),
            attn=select_attn_backend(cfg, device),
            doc_eot=eot if cfg.doc_mask else None,
            fp8=cfg.fp8,
            offload=cfg.offload == "activations" and device.type == "cuda",
            ngram_dropout=max(0.0, cfg.ngram_dropout),
        )
    if derived.is_sharded(cfg):
        parallel.apply_fsdp(raw_model, device, dtype, derived.ranks_per_copy(cfg, dist_ctx), DTYPES[cfg.grad_comm])
        init_buffers(raw_model, seed_of(cfg))
        watch_blocks(raw_model, dist_ctx)
    notes = check_model(raw_model)
    micro_batch = fit_memory(cfg, raw_model, make_groups(cfg, raw_model), dist_ctx)
    if cfg.compile != "off":
        apply_compile(raw_model, cfg.compile, derived.activation_budget(cfg))
    model = raw_model
    if dist_ctx.world_size > 1 and not derived.is_sharded(cfg):
        model = parallel.apply_ddp(raw_model, cfg.bucket_cap_mb, DTYPES[cfg.grad_comm])
    if cfg.compile != "off" or device.type == "cuda" or dist_ctx.world_size > 1:
        # So that step 1 is like any other: all that compiles, allocates or connects ranks has then happened.
        effects = warm_up(model, make_optimizer(cfg, raw_model), micro_batch, cfg.seq_len, derived.uses_cudagraphs(cfg))
        checks.check_recomputation(cfg, raw_model.blocks[0].checkpointing, effects)
    state = TrainState(cfg, dist_ctx, raw_model, model, micro_batch, deque(maxlen=cfg.log_every), notes=notes)
    reset_state(state)
    if device.type == "cuda" and not derived.uses_cudagraphs(cfg):  # CUDA graphs allocated theirs at recording
        torch.cuda.reset_peak_memory_stats()
    return state


def learning_rates(cfg: Config) -> tuple[float, float]:
    """Learning rates of Muon (the blocks' matrices) and Adam (all else; everything under --optimizer adamw).

    A flag of 0 means by rule: close to the best at each width and number of steps measured in docs/rates.md, and equal
    to the NanoGPT speedrun's 0.02 and 0.006 at GPT-2's small size and 5,000 steps.
    """

    def rounded(lr: float) -> float:
        return float(f"{lr:.3g}")  # as the log prints it

    if cfg.optimizer == "adamw":
        return cfg.muon_lr, cfg.adam_lr or rounded(0.002 * (768 / cfg.n_embd) ** 0.75)
    by_steps, by_width = 0.02 * (5000 / cfg.max_steps) ** 0.16, 0.006 * (768 / cfg.n_embd) ** 0.4
    return cfg.muon_lr or rounded(by_steps), cfg.adam_lr or rounded(by_width)


def with_rates(cfg: Config) -> Config:
    """The flags with learning rates of 0 replaced by the rule's; checkpoints store the result."""
    muon_lr, adam_lr = learning_rates(cfg)
    return dataclasses.replace(cfg, muon_lr=muon_lr, adam_lr=adam_lr)


def logged_lr(state: TrainState, lr_multiplier: float) -> float:
    if isinstance(state.optimizer, Optimizer):
        return (state.cfg.adam_lr if state.cfg.optimizer == "adamw" else state.cfg.muon_lr) * lr_multiplier
    return state.optimizer.param_groups[0]["lr"]


def make_groups(cfg: Config, model: GPT) -> list[dict]:
    """Parameter groups: optimizer, learning rate, betas and decay of each row of PARAM_TABLE in model.py."""
    return optimizer_groups(model, cfg.optimizer, *learning_rates(cfg), cfg.weight_decay)


def make_optimizer(cfg: Config, model: GPT) -> torch.optim.Optimizer:
    """Muon + Adam, with fresh state.

    Any torch.optim optimizer whose step() needs no closure works too; with `--optimizer adamw`, all groups share one
    learning rate.
    """
    ns_dtype = torch.bfloat16 if cfg.dtype == "bf16" else torch.float32  # GPUs that need fp16 have no bf16
    return Optimizer(make_groups(cfg, model), ns_dtype, offload=cfg.offload == "optimizer")


def seed_of(cfg: Config):
    """A function from a parameter's name to the seed of its initial values."""
    return lambda name: derive_seed(cfg.seed, name) >> 1  # 63 bits


def reset_state(state: TrainState) -> None:
    """Reset all that training changes to step 0: weights, buffers, optimizer, scaler, counters, state of edits."""
    init_weights(state.raw_model, seed_of(state.cfg))
    state.optimizer = None  # free its memory first
    state.optimizer = make_optimizer(state.cfg, state.raw_model)
    state.scaler = torch.amp.GradScaler(state.dist_ctx.device.type, enabled=state.cfg.dtype == "fp16")
    for kept in (state.skipped, state.metrics, state.extra):
        kept.clear()
    state.step = state.tokens = 0


# ---------------------------------------------------------------------------------------------------------------------
# 3. Step and evaluation


def get_lr_multiplier(step: int, cfg: Config) -> float:
    """Factor on the learning rate for update `step` (from 0): a trapezoidal (WSD) schedule."""
    warmup, cooldown = cfg.warmup_frac * cfg.max_steps, cfg.cooldown_frac * cfg.max_steps
    up = (step + 1) / warmup if warmup else 1.0
    down = (cfg.max_steps - step) / cooldown if cooldown else 1.0
    return min(derived.lr_cap(cfg), up, down)  # the cap: 1, or where --schedule_from here resumed


def get_momentum(step: int, final: float) -> float:
    """Muon's momentum in update number `step`: from 0.85 up to `final` over the first 300 steps (NanoGPT speedrun)."""
    return final - max(0.0, final - 0.85) * max(0.0, 1 - step / 300)


def get_ngram_dropout(cfg: Config, stream: TokenStream) -> float:
    """--ngram_dropout; for -1, the rate at which each n-gram is kept about twice, however many epochs there are."""
    if not derived.uses_ngrams(cfg) or cfg.ngram_dropout >= 0:
        return max(0.0, cfg.ngram_dropout)
    epochs = cfg.max_steps * stream.seqs_per_batch / stream.per_epoch
    return 1 - 1 / (1 + 0.45 * max(0.0, epochs - 0.75))  # n-grams of a text seen many times are memorized


def get_batch(stream: TokenStream, dist_ctx: DistContext, step: int) -> Tensor:
    """This rank's part of step's global batch, int64 (sequences, seq_len + 1) on the CPU; pinned for a GPU."""
    return host_tensor(stream.batch(step, dist_ctx.rank, dist_ctx.world_size), dist_ctx.device)


def host_tensor(array: np.ndarray, device: torch.device) -> Tensor:
    """The array as a tensor on the CPU; pinned for a GPU, so that copying it does not block the host."""
    tensor = torch.from_numpy(array)
    return tensor.pin_memory() if device.type == "cuda" else tensor


def reseed_step(state: TrainState, purpose: str = "train") -> None:
    """Reseed every step: n-gram dropout and Python's and numpy's RNGs from (seed, step), torch's also from the rank.

    No RNG state needs checkpointing, and random draws in your own edits resume exactly. For decisions that all ranks
    must share, such as which layers to drop, use Python's `random`.
    """
    seed, step, dist_ctx = state.cfg.seed, state.step, state.dist_ctx
    state.raw_model.step_seed = derive_seed(seed, "step", step)
    suffix = () if purpose == "train" else (purpose,)
    shared_seed = derive_seed(seed, "step", step, *suffix)
    random.seed(shared_seed)
    np.random.seed(shared_seed % 2**32)
    own = dist_ctx.rank
    if purpose == "update":  # ranks with the same weights must draw alike
        own %= derived.ranks_per_copy(state.cfg, dist_ctx)
    torch.manual_seed(derive_seed(seed, "step", step, own, *suffix))


def train_step(state: TrainState, batch: Tensor, lr_multiplier: float) -> tuple[Tensor, Tensor]:
    """One optimizer step on this rank's batch, int64 (sequences, seq_len + 1), on the device or pinned on the host.

    Returns this rank's loss, whose mean over ranks is the mean loss of the global batch, and the global gradient norm
    before clipping, both fp32 () on the device: nothing here waits for it. If that norm is not finite, every rank
    skips the update and records it.
    """
    world_size = state.dist_ctx.world_size
    reseed_step(state)
    buffers = parallel.clone_buffers(state.raw_model)  # as of batch norm in an edit; restored if the step is skipped
    # Edits that change the batch go above this line
    offsets = state.raw_model.offsets_of_micro_batches(batch, state.micro_batch)  # [] or [cu_seqlens], from the host
    batch = batch.to(state.dist_ctx.device, non_blocking=batch.is_pinned())
    x, y = batch[:, :-1], batch[:, 1:].clone()  # edits may write into one of them
    n_targets = parallel.sum_over_ranks((y >= 0).sum()) / world_size  # DDP and FSDP average the ranks' gradients
    loss = torch.zeros((), device=state.dist_ctx.device)
    micro_batches = list(zip(x.split(state.micro_batch), y.split(state.micro_batch), *offsets))
    for i, micro_batch in enumerate(micro_batches):
        cudagraph_mark_step(derived.uses_cudagraphs(state.cfg))
        with parallel.maybe_no_sync(state.model, last=i == len(micro_batches) - 1):
            micro_loss = state.model(*micro_batch) / n_targets  # the model returns a sum over targets
            # To add a loss term that is not a sum over targets, divide it by len(micro_batches)
            # A non-finite loss makes all gradients NaN, so that the norm is NaN on every rank and all skip the update
            nan_or_0 = 0 * micro_loss.detach()
            state.scaler.scale(micro_loss).backward(1 + nan_or_0)
        loss += micro_loss.detach()
    check_gradients(state.model, state.optimizer)
    reseed_step(state, "update")
    norm, skip = update_weights(state, lr_multiplier)
    parallel.restore_buffers(state.raw_model, buffers, skip)
    state.optimizer.zero_grad(set_to_none=not derived.uses_cudagraphs(state.cfg))
    state.skipped.append(skip)
    state.tokens += y.numel() * world_size
    return loss, norm


def update_weights(state: TrainState, lr_multiplier: float) -> tuple[Tensor, Tensor]:
    """Clip the gradients, apply the schedules and update the weights, unless a gradient is not finite.

    Returns the global gradient norm, fp32 (), and whether the update was skipped, bool (), both on the device.
    """
    cfg, optimizer, scaler = state.cfg, state.optimizer, state.scaler
    scaler.unscale_(optimizer)  # edits that change gradients go below this line
    grads = [p.grad for p in state.raw_model.parameters() if p.grad is not None]
    norm = nn.utils.get_total_norm(grads)
    norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
    skip = ~norm.isfinite()
    if scaler.is_enabled():  # tell it what all ranks decided, not this rank alone
        for found_inf in scaler._found_inf_per_device(optimizer).values():
            found_inf.copy_(skip)
    if cfg.grad_clip:
        torch._foreach_mul_([parallel.to_local(grad) for grad in grads], (cfg.grad_clip / (norm + 1e-6)).clamp(max=1.0))
    checks.check_schedule(optimizer)
    for group in optimizer.param_groups:
        group["lr"] = group.setdefault("initial_lr", group["lr"]) * lr_multiplier
        if "initial_momentum" in group:
            group["momentum"] = get_momentum(state.step, group["initial_momentum"])
    if isinstance(optimizer, Optimizer):
        optimizer.step(skip)
    elif not skip:  # waits for the device
        optimizer.step()
    checks.keep_rates(optimizer)
    scaler.update()
    return norm, skip


@torch.no_grad()
def evaluate(state: TrainState, stream: TokenStream, signals=()) -> float | None:
    """Mean loss over --eval_tokens validation tokens, in nats; independent of ranks and micro-batch.

    Every rank runs the same number of batches; padding in the last ones is not counted. None if a rank has caught a
    signal: there may be little time left to save.
    """
    cfg, dist_ctx, device = state.cfg, state.dist_ctx, state.dist_ctx.device
    losses, n_targets = [], 0
    reseed_step(state, "evaluate")
    with state.as_evaluated() as model:
        for x, y in stream.eval_batches(cfg.eval_tokens, state.micro_batch, dist_ctx.rank, dist_ctx.world_size):
            if dist_max(dist_ctx, bool(signals)):
                return None
            cudagraph_mark_step(derived.uses_cudagraphs(cfg))
            n_targets += int((y >= 0).sum())
            x, y = (host_tensor(t, device).to(device, non_blocking=True) for t in (x, y))
            losses.append(model(x, y))
    loss_sum = torch.stack(losses).cpu().double().sum().item()
    sums = torch.tensor([loss_sum, n_targets], dtype=torch.float64)
    loss_sum, n_targets = parallel.sum_over_ranks(sums, dist_ctx.cpu_group).tolist()
    return loss_sum / n_targets


@never_fatal
def sample_text(state: TrainState, stream: TokenStream, tokenizer, n_tokens: int) -> str:
    """The end of the evaluated text, ">>>", and the model's continuation; always the same for the same weights."""
    prompt = torch.from_numpy(stream.eval_end(state.cfg.eval_tokens, 64))[0]
    with state.as_evaluated() as model:
        return complete(model, prompt, tokenizer, n_tokens, state.cfg.seed)


# ---------------------------------------------------------------------------------------------------------------------
# 4. The run and its loop


def train(cfg: Config, return_model: bool = False, on_step=None) -> dict | tuple[dict, GPT]:
    """A whole run, from data to the last checkpoint; returns what summary.json holds, and the model if asked for.

    on_step(state, loss), if given, is called on each rank after each step, with its TrainState and the loss that
    train_step returned. Raises TrainerError.
    """
    dist_ctx = start.launch(cfg)
    timer = TrainTimer(dist_ctx.device)
    cfg, notes = start.fit_sizes(cfg, dist_ctx)
    preset_cfg = Config(**preset_flags(dataclasses.asdict(cfg)))
    notes += start.check_hardware(cfg, preset_cfg, dist_ctx, gpt_config(cfg, 0).layer_windows())
    stream = start.open_stream(cfg, dist_ctx)
    with start.open_run(cfg, dist_ctx) as (logger, signals):
        origin = resume.find_start(cfg, dist_ctx, logger)
        # From here on cfg has a resumed run's flags and a concrete dtype; the log notes changes of the schedules.
        schedules = (get_lr_multiplier, get_ngram_dropout)
        cfg, new_notes = resume.resolve_flags(cfg, origin, dist_ctx, stream, GPTConfig, *schedules)
        notes += new_notes
        with agree(dist_ctx, signals):
            state = build(cfg, dist_ctx, stream.meta["vocab_size"], stream.meta["eot"])
            state.raw_model.ngram_dropout = get_ngram_dropout(cfg, stream)
            notes += state.notes
            pace = None
            if cfg.minutes and not origin.resumes:
                max_steps, pace, note = choose_max_steps(state, stream, timer, train_step, evaluate, get_batch)
                cfg = state.cfg = dataclasses.replace(cfg, max_steps=max_steps)
                state.raw_model.ngram_dropout = get_ngram_dropout(cfg, stream)
                reset_state(state)
                notes.append(note)
            cfg = state.cfg = with_rates(cfg)
            if origin.path:
                notes += resume.load_start(state, stream, timer, origin)
            checks.check_batch(lambda: get_batch(stream, dist_ctx, state.step))
        del origin  # its tensors
        past_metrics = start.start_log(logger, state, stream, notes)
        progress = Progress(state, stream, logger, timer, past_metrics)
        stopped_by = loop(state, stream, progress, pace, signals, on_step)
        summary = progress.summarize(stopped_by, signals)
    return (summary, state.raw_model) if return_model else summary


def loop(state: TrainState, stream: TokenStream, progress: Progress, pace, signals: list[str], on_step=None) -> str:
    """Train from state.step until something ends the run; returns the reason: max_steps, max_minutes, target_val_loss
    or a signal's name ("signal" on ranks that caught none). pace: the Pace of --minutes, or None."""
    cfg, dist_ctx = state.cfg, state.dist_ctx
    logger, timer = progress.logger, progress.timer
    loss, norm, lr_multiplier, stop = None, None, 1.0, ""
    tokenizer = start.find_tokenizer(stream, dist_ctx, logger)
    batches = prefetch(lambda step: get_batch(stream, dist_ctx, step), state.step, cfg.prefetch)
    profiling = StepProfiler(cfg.profile, cfg.max_steps - state.step, logger, dist_ctx)
    saver = CheckpointManager(logger, dist_ctx, cfg.keep, state.step)
    votes = StopVotes(dist_ctx, cfg.max_minutes, timer, signals)

    def due(every: int) -> bool:
        return bool(stop) or (every > 0 and state.step > 0 and state.step % every == 0)

    def save(best: bool = False) -> None:
        timer.pause()
        saver.save(state.step, lambda: snapshot(state, stream, timer, best), best, wait=bool(stop))

    with contextlib.closing(saver), contextlib.closing(batches), profiling:
        while True:
            # Work due after the previous step comes first: every N-th step, stopping and resuming share one code path.
            stop = votes.reason(state.step, cfg.max_steps, state.raw_model)
            if loss is None and stop in ("max_minutes", "signal"):  # every start does one step, or restarts would loop
                stop = ""
            if pace and not stop and pace.revise(state, progress, get_lr_multiplier):
                cfg = state.cfg  # with another max_steps
                state.raw_model.ngram_dropout = get_ngram_dropout(cfg, stream)
            if loss is not None and (due(cfg.log_every) or state.step == 1):
                failure = progress.log_step(loss, norm, logged_lr(state, lr_multiplier))
                if failure:
                    stop = "failure"
                    save()
                    saver.finish()
                    with agree(dist_ctx):  # all ranks have the same failure, and one prints it
                        raise RunError(failure)
            if due(cfg.eval_every) and stop != "signal" and not progress.is_evaluated():
                stop = run_eval(state, stream, progress, signals) or stop
                if stop != "signal" and progress.is_best():
                    save(best=True)
            if due(cfg.save_every):
                save()
            if due(cfg.sample_every) and stop != "signal" and tokenizer:
                timer.pause()
                logger.info(f"--- sample at step {state.step}\n{sample_text(state, stream, tokenizer, 256)}\n---")
            if stop:
                break
            timer.start()
            batch = progress.next_batch(batches)
            lr_multiplier = get_lr_multiplier(state.step, cfg)
            loss, norm = train_step(state, batch, lr_multiplier)
            state.step += 1
            if on_step:
                on_step(state, loss)
            checks.check_same_flags(cfg, state.cfg)
            profiling.step()
        votes.close()  # not after an error, as it waits for the other ranks
        saver.finish()
    return signals[0] if stop == "signal" and signals else stop


def run_eval(state: TrainState, stream: TokenStream, progress: Progress, signals: list[str]) -> str:
    """Evaluate and log the loss; returns why to stop, "signal" or "target_val_loss", or "" to continue."""
    progress.timer.pause()
    of_training = dict(state.metrics)
    val_loss = evaluate(state, stream, signals)
    if val_loss is None:
        return "signal"
    measured = {name: value for name, value in state.metrics.items() if of_training.get(name) is not value}
    state.metrics = of_training
    progress.log_eval(val_loss, measured)
    reached = state.cfg.target_val_loss and val_loss <= state.cfg.target_val_loss
    return "target_val_loss" if reached else ""


# ---------------------------------------------------------------------------------------------------------------------
# 5. The command line


def main(argv: list[str]) -> int:
    """The command line; returns the exit code: 0 done, 2 the user's mistake, 1 anything else."""
    sys.stdout.reconfigure(errors="replace")  # samples may hold what a terminal cannot encode
    try:
        cfg = make_config(**parse_args(argv))
        train_trials(cfg, train) if cfg.trials > 1 else train(cfg)
    except Exception as error:
        return report_error(error)
    if dist.is_initialized():  # not after an error: it would wait for the other ranks
        dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    exit_process(main(sys.argv[1:]))
