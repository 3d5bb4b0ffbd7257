"""Train a GPT.

    python train_gpt.py                                        # one device, the laptop preset
    python train_gpt.py --preset gpt2-small --data data/fineweb10B --compile
    torchrun --nproc_per_node=8 train_gpt.py --preset gpt2-small --data data/fineweb10B
    python train_gpt.py --out_dir runs/NAME --resume

From Python: `summary = train(make_config(n_layer=2, max_steps=100))`.

In this file: 1 config, 2 build, 3 step and evaluation, 4 loop, 5 command line. See model.py, too.
"""

import contextlib
import dataclasses
import math
import random
import sys
from dataclasses import dataclass

from runtime import set_environment

if __name__ == "__main__":
    set_environment()  # before torch is imported, which reads OpenMP's and Inductor's variables

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

# Errors and seeds, data, model
from common.errors import exit_process, run_command
from common.values import derive_seed
from data.stream import TokenStream
from inference.generation import sample_continuation
from model import GPT, GPTConfig, Optimizer, init_weights, optimizer_groups

# Kernels, and several ranks
from ops.attention import ATTENTION_BACKENDS
from ops.parallel import grad_values, reshard, sum_over_ranks, swap_weights, sync_gradients, to_full

# Flags, device, ranks, checkpoints, log
from runtime.auto import choose_auto_values
from runtime.checkpoint import save_checkpoint
from runtime.dataset import open_stream
from runtime.flags import GivenFlags, flag, flags_of_run, parse_flags
from runtime.model_checks import check_causal
from runtime.ranks import DistContext, raise_on_all_ranks, read_on_all_ranks
from runtime.resume import load_init_checkpoint
from runtime.run import Run
from runtime.speed import DTYPES
from runtime.stop import agree_on_status, why_stop
from runtime.trials import run_trials
from runtime.wrap_model import wrap_model

PARALLEL_MODES = ("auto", "ddp", "fsdp", "hsdp")
MATMUL_PRECISIONS = ("highest", "high", "medium")
COMPILE_MODES = ("off", "default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")

# --------------------------------------------------------------------------------------------------
# 1. Config

# Each preset overrides some of Config's defaults
PRESETS = {
    # About a minute on a laptop's CPU
    "laptop": dict(
        n_layer=2,
        n_head=1,
        n_embd=128,
        seq_len=2048,
        window="SL:512",  # the first layer attends to 512 tokens, the second to all
        ngram=-1,  # with embeddings of n-grams, of an automatic length
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
        ngram=-1,
        ngram_rows=65536,
        batch_tokens=16384,
        max_steps=1000,
        eval_tokens=262144,
    ),
    # GPT-2's depths and widths, mostly with fewer, wider heads
    "gpt2-small": dict(n_layer=12, n_head=6, n_embd=768, ngram=2, ngram_rows=251520),
    "gpt2-medium": dict(n_layer=24, n_head=8, n_embd=1024, max_steps=10000),
    "gpt2-large": dict(n_layer=36, n_head=10, n_embd=1280, max_steps=20000),
    "gpt2-xl": dict(n_layer=48, n_head=25, n_embd=1600, max_steps=40000),
}


# Each field is a flag: flag(default, help, choices, const, min). const: the value of a bare --flag.
# min: the smallest number allowed, by default 0. Command line, checks and log are derived from it
@dataclass(frozen=True)
class Config(GivenFlags):
    """The flags of a run. Make it with make_config, which applies a preset: laptop, unless given.

    The values below are for all that a preset does not name; they suit gpt2-small. GivenFlags adds
    `given`: names of the flags that the user has set, which automatic choices do not change.
    """

    # run
    preset: str = flag("laptop", "sizes and schedule; any other flag overrides it", PRESETS)
    data: str = flag("", "folder from data/prepare.py; default: Python's own source code")
    out_dir: str = flag("", "folder of this run (default: runs/<time>-<preset>)")
    resume: str = flag(
        "", "continue out_dir's run; PATH: that run; auto: if there is one", const="newest"
    )
    init_from: str = flag("", "run or checkpoint to load weights from; with a new schedule")
    seed: int = flag(0, "seed for initial weights and data order")
    trials: int = flag(1, "number of runs, with seeds seed, seed+1, ..., under out_dir", min=1)
    device: str = flag("auto", "auto = cuda if available, else cpu", ("auto", "cpu", "cuda", "mps"))
    # model
    params: int = flag(0, "choose a size of so many parameters; -1 = to suit --minutes", min=-1)
    n_layer: int = flag(12, "transformer blocks", min=1)
    n_head: int = flag(6, "attention heads; a head dimension of 128 is fastest", min=1)
    n_embd: int = flag(768, "width", min=1)
    seq_len: int = flag(1024, "context length in tokens", min=1)
    window: str = flag("L", "pattern of layers: L full, S sliding; SSSL:256 sets the width of S")
    vocab_size: int = flag(0, "rows of embedding and head; 0 = the tokenizer's, rounded up")
    # N-grams: an embedding for the newest 2, 3, ... tokens, looked up by hash
    ngram: int = flag(0, "hashed n-gram embeddings up to length N; 0 disables, -1 = auto", min=-1)
    ngram_rows: int = flag(16384, "rows of the hash table that all n-grams share", min=1)
    ngram_dropout: float = flag(-1.0, "dropout of n-grams; -1 = from the number of epochs", min=-1)
    softcap: float = flag(15.0, "tanh soft-cap on logits; 0 disables")
    loss_chunk: int = flag(-1, "tokens per chunk of head and loss; 0 disables, -1 = auto", min=-1)
    # optimizer
    optimizer: str = flag("muon", "muon: Muon for matrices, Adam for the rest", ("muon", "adamw"))
    muon_lr: float = flag(0.0, "learning rate of Muon; 0 = from max_steps (docs/rates.md)")
    adam_lr: float = flag(0.0, "learning rate of Adam; 0 = from the width (docs/rates.md)")
    weight_decay: float = flag(0.05, "decoupled decay of block matrices; with adamw, of everything")
    embed_decay: float = flag(-1.0, "embeddings decay by exp(-X) over the run; -1 = auto", min=-1)
    grad_clip: float = flag(0.0, "max gradient norm; 0 disables")
    batch_tokens: int = flag(524288, "global batch size in tokens; 0 = from the dataset's size")
    micro_batch: int = flag(0, "sequences per device per micro-step; 0 = auto")
    max_steps: int = flag(3250, "optimizer steps; 0 = from the dataset's size")
    minutes: float = flag(0.0, "train for N minutes, with a schedule that ends then; 0 disables")
    max_minutes: float = flag(0.0, "pause after N minutes, to --resume later; 0 disables")
    target_val_loss: float = flag(0.0, "stop at this validation loss; 0 disables")
    patience: int = flag(0, "after one epoch, stop at N evaluations without gain; 0 disables")
    short_frac: float = flag(0.0, "train this first part of the run on sequences of seq_len / 8")
    warmup_frac: float = flag(0.0, "fraction of steps for linear LR warm-up")
    cooldown_frac: float = flag(0.6, "fraction of steps for linear LR decay to 5 %")
    # systems
    compile: str = flag("off", "torch.compile of blocks and loss", COMPILE_MODES, const="default")
    dtype: str = flag("auto", "of activations; auto = bf16 if faster, else fp32", ("auto", *DTYPES))
    fp8: bool = flag(False, "float8 matmuls in MLP and head (sm89 or newer)")
    matmul_precision: str = flag("highest", "of fp32 matmuls; high = TF32", MATMUL_PRECISIONS)
    attn: str = flag("auto", "attention backend (fa3, fa4: untested)", ATTENTION_BACKENDS)
    checkpointing: str = flag("auto", "recompute: none, selective, full, or keep this fraction")
    offload: str = flag("none", "what to keep in CPU memory", ("none", "activations", "optimizer"))
    parallel: str = flag("auto", "auto = ddp; hsdp shards over --shard_size ranks", PARALLEL_MODES)
    shard_size: int = flag(0, "ranks per copy of the weights with hsdp; 0 = those of a node")
    grad_comm: str = flag("fp32", "gradient reduction; bf16 halves traffic", ("fp32", "bf16"))
    bucket_cap_mb: int = flag(25, "DDP bucket size in MiB", min=1)
    alloc_conf: str = flag("", "CUDA allocator settings, e.g. expandable_segments:True")
    deterministic: bool = flag(False, "use only operations with reproducible results")
    doc_align: bool = flag(False, "start each sequence with a document; drop what is too long")
    doc_mask: bool = flag(False, "mask attention across documents")
    # logging and checkpoints
    eval_every: int = flag(250, "steps between evaluations; 0: at the end, -1: ten in all", min=-1)
    eval_tokens: int = flag(10485760, "validation tokens per evaluation; 0 = the whole split")
    save_every: int = flag(0, "steps between checkpoints; 0 = every ten minutes")
    keep: int = flag(2, "number of newest checkpoints to keep; 0 = all")
    sample_every: int = flag(0, "steps between text samples; 0 = only at the end")
    log_every: int = flag(10, "steps between log lines", min=1)
    profile: int = flag(0, "steps to profile; writes a trace to out_dir", const=5)
    wandb: bool = flag(False, "also log to Weights & Biases")

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


def make_config(**flags) -> Config:
    """Build a Config from the given flags. Raises UserError for an unknown name or a wrong value.

    train() refuses flags that contradict each other, and replaces automatic values (resolve_auto).
    """
    # passed: the flags, checked
    # saved: the flags of the run that --resume continues, or the shape of --init_from's model
    # implied: what follows from --params, --minutes or --init_from
    implied, saved, passed = flags_of_run(flags, dataclasses.fields(Config))
    preset = PRESETS[passed.get("preset") or saved.get("preset") or "laptop"]

    # Later ones win
    values = preset | implied | saved | passed
    return Config(**values, given=tuple(sorted(saved | passed)))


def resolve_auto(
    cfg: Config, dist_ctx: DistContext, stream: TokenStream, saved_flags: dict
) -> Config:
    """Replace automatic values. saved_flags: the flags of a resumed checkpoint, or {}."""
    # From the machine and the dataset. saved_flags are in cfg already, except after a restart by
    # torchrun, whose make_config has not seen the checkpoint
    cfg = choose_auto_values(cfg, saved_flags, stream, dist_ctx)
    muon_lr, adam_lr = learning_rates(cfg)
    return dataclasses.replace(cfg, muon_lr=muon_lr, adam_lr=adam_lr)


def learning_rates(cfg: Config) -> tuple[float, float]:
    """Learning rates of Muon (the blocks' matrices) and of Adam (the rest; with adamw, everything).

    A rate of 0 is computed from the number of steps or the width, by formulas fitted to the runs in
    docs/rates.md. For GPT-2 small and 5,000 steps they give the NanoGPT speedrun's rates.
    """
    # Shorter runs and narrower models take higher rates
    muon_lr = 0.02 * (5000 / cfg.max_steps) ** 0.16
    adam_lr = 0.006 * (768 / cfg.n_embd) ** 0.4
    if cfg.optimizer == "adamw":
        muon_lr = 0.0
        adam_lr = 0.002 * (768 / cfg.n_embd) ** 0.75

    # A given rate wins; chosen ones are rounded to the three digits that are logged
    muon_lr = cfg.muon_lr or float(f"{muon_lr:.3g}")
    adam_lr = cfg.adam_lr or float(f"{adam_lr:.3g}")
    return muon_lr, adam_lr


# --------------------------------------------------------------------------------------------------
# 2. Build


@dataclass(slots=True)
class TrainState:
    """What a training step works on."""

    cfg: Config
    dist_ctx: DistContext
    raw_model: GPT
    model: nn.Module  # raw_model, or DDP around it: called in training
    micro_batch: int
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler
    step: int = 0  # updates so far, skipped ones included
    tokens: int = 0  # trained on so far
    n_val_targets: int = 0  # in the newest evaluation, for the log

    # For your own use: values to log. name -> number or 0-d tensor, averaged over ranks and logged
    # with every training and evaluation line, until you change or delete it
    metrics: dict = dataclasses.field(default_factory=dict)

    # For your own use: kept in checkpoints. Tensors, numbers, strings, lists, dicts; a dict from
    # names of parameters to tensors is sharded like these. If extra["eval_weights"] is such a dict,
    # of an EMA for example, evaluation and sampling use it
    extra: dict = dataclasses.field(default_factory=dict)

    @contextlib.contextmanager
    def evaluating(self):
        """Context: the model in eval mode, with extra["eval_weights"] if there are any."""
        eval_weights = self.extra.get("eval_weights", {})
        self.raw_model.eval()
        swap_weights(self.raw_model, eval_weights)
        try:
            yield self.raw_model
        finally:
            reshard(self.raw_model)  # without a backward, FSDP still holds the full weights
            swap_weights(self.raw_model, eval_weights)
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
    cfg: Config, dist_ctx: DistContext, vocab_size: int, eot: int | None = None, init=None
) -> TrainState:
    """Make the model and its optimizer, ready for the first step. Raises UserError.

    vocab_size, eot: of the tokenizer. init: a checkpoint to take the weights from.
    """
    # The model
    torch.manual_seed(cfg.seed)  # for parameters of your own, which init_weights may leave alone
    with dist_ctx.device:
        raw_model = GPT(
            gpt_config(cfg, vocab_size),
            compute_dtype=DTYPES[cfg.dtype],
            loss_chunk=cfg.loss_chunk,
            attn_backend=cfg.attn,
            eot=eot if cfg.doc_mask else None,
            ngram_dropout=cfg.ngram_dropout,
        )
    # No edit may let the model see the tokens that it predicts. Tested before init_weights, whose
    # zeros in head and projections would hide it
    check_causal(raw_model)
    init_weights(raw_model, cfg.seed)
    if init:
        init.load_weights(raw_model)

    # Apply fp8, activation checkpointing, compile, DDP or FSDP. wrap_model then makes steps on
    # dummy data, with an optimizer of its own, to compile the model for each sequence length of the
    # run and to find the micro-batch that fits. It leaves the weights unchanged
    seq_lens = {get_seq_len(percent / 100, cfg) for percent in range(101)}
    model, micro_batch = wrap_model(raw_model, cfg, make_optimizer, dist_ctx, seq_lens)

    # Its optimizer
    optimizer = make_optimizer(cfg, raw_model)
    for group in optimizer.param_groups:
        group.setdefault("initial_lr", group["lr"])  # the schedule multiplies it
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
    """Muon + Adam. Any torch.optim optimizer whose step() needs no closure works here."""
    groups = optimizer_groups(
        model,
        optimizer=cfg.optimizer,
        muon_lr=cfg.muon_lr,
        adam_lr=cfg.adam_lr,
        weight_decay=cfg.weight_decay,
        # The fraction that an embedding loses per step at the peak rate. In a run of any length,
        # (1 - fraction)^max_steps = exp(-embed_decay) (Wang and Aitchison 2024)
        embed_decay=1 - math.exp(-cfg.embed_decay / cfg.max_steps),
    )
    # In fp16 runs Newton-Schulz uses fp32, because GPUs that need fp16 lack bf16
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
    """Muon's momentum: from 0.85 to 0.95 over 1,000 steps (NanoGPT speedrun: over 300)."""
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
    np.random.seed(rank_seed % 2**32)
    torch.manual_seed(rank_seed)


def train_step(state: TrainState, batch: Tensor, progress: float) -> tuple[Tensor, float]:
    """One optimizer step on this rank's batch, at this fraction of the run.

    Returns this rank's loss, a scalar in fp32, and the gradient norm before clipping. The mean of
    the ranks' losses is the loss of the global batch. A norm of 0, inf or nan skips the update.
    """
    cfg, dist_ctx, optimizer = state.cfg, state.dist_ctx, state.optimizer
    seed_random(state)

    # Targets are the next tokens; cloned so that you can exclude some from the loss by -1
    batch = batch.to(dist_ctx.device, non_blocking=True)
    inputs, targets = batch[:, :-1], batch[:, 1:].clone()

    # Split into micro-batches of the same number of tokens: the shorter the sequences, the more of
    # them are in each
    seq_len = get_seq_len(progress, cfg)
    micro_batch = state.micro_batch * cfg.seq_len // seq_len
    xs = inputs.reshape(-1, seq_len).split(micro_batch)
    ys = targets.reshape(-1, seq_len).split(micro_batch)

    # Loss = sum over the global batch's targets that are not -1, / n_targets. The model returns a
    # micro-batch's mean (0 without targets); times its number of targets, that is its sum. DDP and
    # FSDP divide gradients by the number of ranks, so multiply by it
    n_targets = sum_over_ranks((targets >= 0).sum()).clamp(min=1)
    targets_per_rank = n_targets / dist_ctx.world_size

    # Forward and backward
    loss = torch.zeros((), device=dist_ctx.device)
    for i, (x, y) in enumerate(zip(xs, ys)):
        is_last = i == len(xs) - 1
        with sync_gradients(state.model, is_last):  # DDP's all-reduce is in the last alone
            micro_loss = state.model(x, y)
            micro_loss = micro_loss * ((y >= 0).sum() / targets_per_rank)
            state.scaler.scale(micro_loss).backward()
        loss += micro_loss.detach()

    # Gradient norm, for the log; clipping. grad_values: p.grad, or a sparse one's rows (n-grams)
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

    # Update, unless a gradient is not finite or all are 0 (as without targets). Reading the norm
    # waits for the device, once per step
    grad_norm = to_full(norm).item()
    if 0 < grad_norm < math.inf:
        state.scaler.step(optimizer)
    state.scaler.update()
    optimizer.zero_grad(set_to_none=not cfg.uses_cudagraphs)  # CUDA graphs need fixed addresses
    state.tokens += targets.numel() * dist_ctx.world_size
    state.step += 1
    return loss, grad_norm


@torch.no_grad()
def evaluate(state: TrainState, stream: TokenStream, should_stop=None) -> float | None:
    """Mean loss over --eval_tokens validation tokens, in nats; the same on any number of ranks.

    Returns None if should_stop() becomes true, because little time may be left after a signal.
    """
    cfg, dist_ctx = state.cfg, state.dist_ctx
    batches = stream.eval_batches(
        cfg.eval_tokens, state.micro_batch, rank=dist_ctx.rank, world_size=dist_ctx.world_size
    )
    # Sum up the losses of this rank's batches. Every rank has the same number of them; the last may
    # contain padding, with targets of -1. read_on_all_ranks: if one cannot read, all end
    loss_sum, n_targets = 0.0, 0
    with state.evaluating() as model:
        for x, y in read_on_all_ranks(dist_ctx, batches):
            if should_stop and should_stop():
                return None
            x = torch.from_numpy(x).to(dist_ctx.device)
            y = torch.from_numpy(y).to(dist_ctx.device)
            n = int((y >= 0).sum())
            loss_sum += model(x, y).item() * n
            n_targets += n

    # The mean over all ranks
    sums = torch.tensor([loss_sum, n_targets], dtype=torch.float64)
    loss_sum, n_targets = sum_over_ranks(sums, dist_ctx.cpu_group).tolist()
    state.n_val_targets = int(n_targets)
    return loss_sum / n_targets if n_targets else math.nan


def sample_text(state: TrainState, stream: TokenStream, n_tokens: int = 256) -> str:
    """The end of the validation tokens, ">>>", and the model's continuation."""
    prompt = torch.from_numpy(stream.eval_end(state.cfg.eval_tokens, 512))
    with state.evaluating() as model:
        return sample_continuation(model, prompt, stream.tokenizer, n_tokens, seed=state.cfg.seed)


# --------------------------------------------------------------------------------------------------
# 4. The training loop


def train(cfg: Config, return_model: bool = False, on_step=None) -> dict | tuple[dict, GPT]:
    """Run everything, from loading data to the final checkpoint; returns the dict in summary.json.

    return_model: return the model as well, in eval mode. on_step(state, loss) is called after each
    step on each rank, with the loss of train_step. Raises UserError, RunError, or KeyboardInterrupt
    after Ctrl-C, once a checkpoint has been saved.
    """
    # Set up device and ranks; check the flags; make the run's folder; start its clock
    with Run.open(cfg) as run:
        cfg, dist_ctx = run.cfg, run.dist_ctx

        # Data, and the checkpoint of --resume or --init_from, if there is one
        stream = open_stream(cfg, dist_ctx)
        init = load_init_checkpoint(cfg, run, stream)
        resuming = init is not None and init.resumes

        # Automatic values, which may include the batch size
        saved_flags = init.checkpoint["config"] if resuming else {}
        cfg = resolve_auto(cfg, dist_ctx, stream, saved_flags)
        stream.seqs_per_batch = cfg.batch_tokens // cfg.seq_len

        # Model and optimizer; with --resume, also the state of optimizer, steps and clock
        with raise_on_all_ranks(dist_ctx):  # if one fails, the others do not wait for it
            vocab_size, eot = stream.meta["vocab_size"], stream.meta["eot"]
            state = build(cfg, dist_ctx, vocab_size, eot=eot, init=init)
            if resuming:
                init.restore(state, stream, run)
        del init  # its tensors

        # Begin the log with what is in effect; train; write the summary
        run.begin(state, stream)
        stopped_by = loop(state, stream, run, on_step)
        summary = run.finish(stopped_by)
    if return_model:
        return summary, state.raw_model.eval()
    return summary


def is_due(every: int, step: int) -> bool:
    """True on every `every`-th step; never for 0."""
    return every > 0 and step > 0 and step % every == 0


def loop(state: TrainState, stream: TokenStream, run: Run, on_step=None) -> str:
    """Train until there is a reason to stop; returns it, for example "max_steps"."""
    cfg, dist_ctx = state.cfg, state.dist_ctx
    loss, grad_norm = None, None  # of the previous step
    with run.prefetching(lambda step: get_batch(stream, dist_ctx, step)) as next_batch:
        while True:
            # status: progress, signals and whether a save is due, the same on all ranks. stop: the
            # reason to end the run, or "". step: the number of updates so far
            step = state.step
            status = agree_on_status(state, stream, run)
            stop = why_stop(status, state, stream, run)

            # Once in a while: log
            if step > run.first_step and (stop or is_due(cfg.log_every, step) or step == 1):
                run.log.step(state, loss, grad_norm)

            # Once in a while: save a checkpoint. At the end of the run it must succeed
            if stop or is_due(cfg.save_every, step) or status.is_save_due:
                save_checkpoint(state, stream, run, required=bool(stop))

            # After a signal there may be little time left; diverged weights need no evaluation
            if stop in ("signal", "diverged"):
                break

            # Once in a while: evaluate, unless a resumed run did so at this step
            if (stop or is_due(cfg.eval_every, step)) and step != run.log.last_eval_step:
                with run.clock.timing_evaluation():
                    val_loss = evaluate(state, stream, run.any_rank_is_asked_to_stop)
                if val_loss is None:
                    stop = "signal"
                    break
                run.add_evaluation(state, val_loss)  # saves the weights if they are the best so far
                # Ask again: this loss may have reached the target, or be one too many without gain
                stop = why_stop(status, state, stream, run)

            # Once in a while: sample from the model
            if (stop or is_due(cfg.sample_every, step)) and stream.tokenizer:
                title = f"--- sample at step {step}: validation text >>> the model's continuation"
                run.info(f"{title}\n{sample_text(state, stream)}\n---")

            if stop:
                break

            # A single training step
            with run.clock.timing_step():
                loss, grad_norm = train_step(state, next_batch(), status.progress)
            run.after_step(state.step, grad_norm)  # counts bad gradients, for why_stop
            if on_step:
                on_step(state, loss)

    # If the evaluation ended the run, this step is not saved yet. (If it is, nothing happens)
    save_checkpoint(state, stream, run, required=True)
    return stop


# --------------------------------------------------------------------------------------------------
# 5. Command line

HELP = "Train a GPT. In brackets: the defaults of --preset laptop."


def main(argv: list[str]) -> None:
    """Train as the command line says. `command` prints errors and turns them into an exit code."""
    cfg = make_config(**parse_flags(argv, dataclasses.fields(Config), PRESETS["laptop"], HELP))
    if cfg.trials == 1:
        train(cfg)
    else:
        run_trials(cfg, train)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    exit_process(run_command(main, sys.argv[1:]))
