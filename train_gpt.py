"""Train a GPT: `python train_gpt.py [flags]`, or `torchrun --nproc_per_node=N train_gpt.py [flags]` on many devices.

Read from top to bottom: config, build, step and evaluation, start and resume, the loop, main. The model and its
optimizer are in model.py. `train(make_config(n_layer=2, ...))` does the same from Python, again and again.
"""

import contextlib
import dataclasses
import math
import os
import random
import sys
import time
import traceback
from collections import deque
from dataclasses import dataclass
from pathlib import Path

from runtime import set_environment

if __name__ == "__main__":
    set_environment()

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

# fmt: off
# isort: off
from data.prepare import prepare
from data.shards import RunError, UserError, recorded_hashes
from data.stream import TokenStream, derive_seed, prefetch
from data.tokenizers import get_tokenizer
from generation import check_cache, generate, on_host
from model import (GPT, GPTConfig, Optimizer, constructors_matter, cross_entropy, initial_weight,
                   optimizer_groups)
from ops import (ATTENTION_BACKENDS, apply_ddp, apply_fsdp, check_attention, check_loss, constructed, copy_buffers_,
                 copy_from_full_tensor_, cudagraph_mark_step, keep_buffers, persistent_buffers, reshard, side_effects,
                 swap_weights, to_local, warm_up)
from runtime.checkpoint import (BEST, CheckpointManager, collect_tensors, find_checkpoint, load_extra, load_optimizer,
                                load_weights, model_config, read_checkpoint)
from runtime.checks import (activation_budget, check_device, check_flags, check_recomputation, is_sharded, lr_cap,
                            ranks_per_shard, seqs_per_rank, uses_cudagraphs)
from runtime.describe import describe
from runtime.dtype import saved_dtype, settle_dtype
from runtime.errors import catch_signals, explain, or_reason, report_error, report_skipped
from runtime.flags import check_ranges, check_values, flag, parse_flags
from runtime.launch import DTYPES, device_summary, init_distributed, peak_flops, peak_memory_mb, precompile_header
from runtime.logger import (RunLogger, TrainTimer, check_metrics, closing_lines, eval_line, is_best, is_loss_spike,
                            nan_to_none, new_run_folder, printable, step_line, trials_line)
from runtime.memory import fit_loss_chunk, fit_memory
from runtime.minutes import steps_within
from runtime.profiler import maybe_profiler
from runtime.ranks import (DistContext, agree, check_alike, check_ranks, check_stop, dist_max, dist_means, late_max,
                           leave, run_on_rank0, said_here)
from runtime.resume import (changed_flags, check_same_stream, check_steps, check_tokenizer, flags_of_run,
                            load_finished_trial)
from runtime.watch import check_gradients, check_replicas, watch_blocks
# isort: on
# fmt: on

HERE = Path(__file__).resolve().parent
ROOMS = [path for room in ("data", "runtime") for path in sorted((HERE / room).glob("*.py"))]
SOURCES = [*map(HERE.joinpath, ("train_gpt.py", "model.py", "generation.py", "ops.py")), *ROOMS]
SOURCE_FILES = {path.relative_to(HERE).as_posix(): path for path in SOURCES}
COMPILE_MODES = ("off", "default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")

# ---------------------------------------------------------------------------------------------------------------------
# 1. Config: every flag, declared once. The command line, help, checks, log and checkpoint follow from here.

PRESETS = {
    "laptop": dict(n_layer=2, n_head=1, n_embd=128, seq_len=256, ngram=6, ngram_rows=65536, batch_tokens=8192,
                   max_steps=400, muon_lr=0.03, adam_lr=0.012, eval_every=100, eval_tokens=131072),
    "mini": dict(n_layer=6, n_head=8, n_embd=512, seq_len=512, ngram=6, ngram_rows=65536, batch_tokens=16384,
                 max_steps=1000, eval_tokens=262144),
    "gpt2-small": dict(n_layer=12, n_head=6, n_embd=768, save_every=1000),
    "gpt2-medium": dict(n_layer=24, n_head=8, n_embd=1024, max_steps=10000, save_every=1000),
    "gpt2-large": dict(n_layer=36, n_head=10, n_embd=1280, max_steps=20000, save_every=1000),
    "gpt2-xl": dict(n_layer=48, n_head=25, n_embd=1600, max_steps=40000, save_every=1000),
}  # fmt: skip


@dataclass
class Config:
    # run
    preset: str = flag("laptop", "sizes and schedule to start from; any other flag overrides it", PRESETS)
    data: str = flag("", "folder of token shards from data/prepare.py (default: Python's standard library, made here)")
    out_dir: str = flag("", "folder of this run (default: runs/<time>-<preset>)")
    resume: str = flag("", "continue the run in out_dir (or this folder or file); auto: or start one", const="newest")
    init_from: str = flag("", "run or checkpoint file to take the weights from, with a fresh schedule")
    init_partial: bool = flag(False, "of --init_from, take what fits by name and shape; the rest is new", const=True)
    seed: int = flag(0, "decides initial weights and the order of the data")
    trials: int = flag(1, "whole runs one after the other, with seeds from --seed on, in folders of out_dir", min=1)
    device: str = flag("auto", "auto is cuda where there is one, else cpu", ("auto", "cpu", "cuda", "mps"))
    # model
    n_layer: int = flag(12, "transformer blocks", min=1)
    n_head: int = flag(6, "attention heads; a head of 128 dimensions is fastest", min=1)
    n_embd: int = flag(768, "width", min=1)
    seq_len: int = flag(1024, "context length in tokens", min=1)
    window: str = flag("L", "a letter a layer, repeated: L full context, S sliding window; SSSL:256 sets its size")
    vocab_size: int = flag(0, "rows of the head; 0 is the tokenizer's, rounded up to a multiple of 64")
    ngram: int = flag(0, "add hashed embeddings of n-grams of length 2..N; 0 disables")
    ngram_rows: int = flag(16384, "rows of the table that all n-grams share", min=1)
    ngram_dropout: float = flag(-1.0, "probability of dropping an n-gram in training; -1 is by epochs", min=-1)
    softcap: float = flag(15.0, "tanh soft-cap on logits; 0 disables")
    loss_chunk: int = flag(-1, "tokens per chunk of lm_head + cross-entropy; 0 = all, -1 = 2,048 (CUDA: more)", min=-1)
    # optimizer
    optimizer: str = flag("muon", "muon is Muon for matrices, Adam for the rest; adamw the baseline", ("muon", "adamw"))
    muon_lr: float = flag(0.02, "learning rate of Muon")
    adam_lr: float = flag(0.0, "learning rate of Adam; 0 is 0.006 beside Muon, 0.002 alone (laptop: 0.012 and 0.008)")
    weight_decay: float = flag(0.05, "decoupled decay of the blocks' matrices (adamw: of all), times the learning rate")
    grad_clip: float = flag(0.0, "max gradient norm; 0 disables")
    batch_tokens: int = flag(524288, "global batch size in tokens", min=1)
    micro_batch: int = flag(0, "sequences per device per micro-step; 0 = auto (CUDA: what fits; else 8,192 tokens)")
    max_steps: int = flag(5000, "optimizer steps; the schedules are fractions of it", min=1)
    minutes: float = flag(0.0, "choose max_steps, by measured speed, so that all ends within N minutes; 0 disables")
    max_minutes: float = flag(0.0, "stop after N minutes of this process, however far the schedule is; 0 = never")
    target_val_loss: float = flag(0.0, "stop when the validation loss is this low; 0 = never")
    warmup_frac: float = flag(0.0, "fraction of steps for linear LR warm-up")
    cooldown_frac: float = flag(0.6, "fraction of steps for linear LR decay to 0")
    schedule_from: str = flag("start", "here: a resumed run's learning rate never rises above its present one again")
    # systems
    compile: str = flag("off", "torch.compile every block, in this mode", COMPILE_MODES, const="default")
    dtype: str = flag("auto", "of activations; auto is bf16 where that is faster, else fp32", ("auto", *DTYPES))
    bf16: bool = flag(False, "short for --dtype bf16", const=True)
    fp8: bool = flag(False, "float8 matmuls in MLP and head (CUDA sm89 or newer)", const=True)
    matmul_precision: str = flag("highest", "of fp32 matmuls; high is TF32 on CUDA", ("highest", "high", "medium"))
    attn: str = flag("auto", "backend; auto is PyTorch's, or blocked on CPUs where faster", ATTENTION_BACKENDS)
    checkpointing: str = flag("auto", "of activations: none, selective, full, or a compiler budget in (0, 1); auto is "
                              "the least that lets 4,096 tokens fit into a GPU")  # fmt: skip
    offload: str = flag("none", "what lives in host memory", ("none", "activations", "optimizer"))
    parallel: str = flag("auto", "several ranks: auto is ddp; fsdp shards weights, gradients and optimizer state over "
                         "all, hsdp within groups of --shard_size", ("auto", "ddp", "fsdp", "hsdp"))  # fmt: skip
    shard_size: int = flag(0, "ranks that share one copy of the weights under hsdp; 0 is those of a node")
    grad_comm: str = flag("fp32", "of gradients that travel; bf16 halves the bytes, and rounds", ("fp32", "bf16"))
    bucket_cap_mb: int = flag(25, "gradients that DDP sends together, in MiB", min=1)
    alloc_conf: str = flag("", "settings of the CUDA allocator, as in expandable_segments:True,max_split_size_mb:512")
    deterministic: bool = flag(False, "only operations whose reruns give the same bits", const=True)
    prefetch: int = flag(2, "batches prepared ahead in the background")
    doc_align: bool = flag(False, "start sequences at document boundaries; drop the remainder", const=True)
    doc_mask: bool = flag(False, "mask attention across documents", const=True)
    # watching
    eval_every: int = flag(250, "steps between evaluations; 0 = at the end only")
    eval_tokens: int = flag(10485760, "validation tokens, rounded down to whole sequences; 0 = all")
    save_every: int = flag(0, "steps between checkpoints; 0 = at the end only")
    keep: int = flag(2, "newest checkpoints kept; 0 = all")
    sample_every: int = flag(0, "steps between samples of text; 0 = at the end only")
    log_every: int = flag(10, "steps between logged steps", min=1)
    max_bad_steps: int = flag(10, "abort after N consecutive skipped (non-finite) steps; 0 = never")
    profile: int = flag(0, "steps to profile: a trace in out_dir and the ten most expensive operations", const=5)
    wandb: bool = flag(False, "log to Weights & Biases too (WANDB_MODE=offline needs no network)", const=True)


def make_config(**flags) -> Config:
    """A checked Config: the preset's values, or with `resume` those of the run, with `flags` over them.

    Raises UserError for a wrong name or value.
    """
    fields = {f.name: f for f in dataclasses.fields(Config)}
    flags = check_values(flags_of_run(flags, set(fields), PRESETS, Path("runs")), fields)
    cfg = Config(**{**PRESETS[flags.get("preset", "laptop")], **flags})
    if cfg.preset == "laptop" and cfg.optimizer == "adamw" and "adam_lr" not in flags:
        cfg.adam_lr = 0.008  # the best of 0.002, 0.004, 0.008 and 0.016; the preset's is for Adam beside Muon
    check_ranges(cfg)
    check_flags(cfg)
    cfg.dtype = "bf16" if cfg.bf16 else cfg.dtype
    try:
        GPTConfig(window=cfg.window).layer_windows()
    except ValueError as error:
        raise UserError(f"--{error}") from None
    return cfg


def parse_args(argv: list[str]) -> dict:
    """The flags of a command line, those that were given. Raises UserError."""
    description = __doc__.split("\n")[0] + " In brackets: the defaults of --preset laptop."
    return parse_flags(argv, dataclasses.fields(Config), PRESETS["laptop"], description)


# ---------------------------------------------------------------------------------------------------------------------
# 2. Build, in the order in which these compose: model, FSDP, micro-batch, compile, DDP, warm-up, weights, optimizer


@dataclass
class TrainState:
    """What a training step works on. `model` is what is called; `raw_model` is the same model without wrappers."""

    cfg: Config
    dist_ctx: DistContext
    raw_model: GPT
    model: nn.Module
    optimizer: Optimizer
    scaler: torch.amp.GradScaler
    micro_batch: int
    skipped: deque  # of the last --log_every steps, bool () on the device: whether the update was skipped
    bad_steps: int = 0  # skipped updates in a row, as of the last report
    step: int = 0  # updates done, skipped ones included
    tokens: int = 0  # trained on so far
    ran: list = dataclasses.field(default_factory=lambda: [0])  # its end: a hash of what all ranks must do alike
    metrics: dict = dataclasses.field(default_factory=dict)  # name -> number, logged beside the loss; for your edits
    # What your edits keep, in checkpoints too: tensors, numbers, texts, lists, dicts. Tensors under the name of a
    # parameter are sharded as it is; those of the dict "eval_weights" are evaluated, sampled and kept as the best.
    extra: dict = dataclasses.field(default_factory=dict)

    @property
    def grad_accum_steps(self) -> int:
        return self.cfg.batch_tokens // self.cfg.seq_len // self.dist_ctx.world_size // self.micro_batch


def select_attn_backend(cfg: Config, device: torch.device) -> str:
    """The attention backend: auto is PyTorch's choice, and `blocked` where that is faster and needs little memory."""
    recomputes = cfg.checkpointing not in ("auto", "none")
    longest = 1024 if cfg.compile != "off" else 512 if cfg.dtype == "bf16" and not recomputes else 0
    return "blocked" if cfg.attn == "auto" and device.type == "cpu" and cfg.seq_len <= longest else cfg.attn


def gpt_config(cfg: Config, vocab_size: int) -> GPTConfig:
    """The model's shape, for a tokenizer with so many tokens."""
    shape = {f.name: getattr(cfg, f.name) for f in dataclasses.fields(GPTConfig) if hasattr(cfg, f.name)}
    shape["vocab_size"] = cfg.vocab_size or -(-vocab_size // 64) * 64  # matmuls like multiples of 64
    return GPTConfig(**shape)


def build(cfg: Config, dist_ctx: DistContext, vocab_size: int, eot: int | None = None) -> TrainState:
    """The model and its optimizer, ready to step: weights are drawn from the seed, after the compiler is warm."""
    device, sharded, compiled = dist_ctx.device, is_sharded(cfg), cfg.compile != "off"
    dtype, graphs, shape = DTYPES[cfg.dtype], uses_cudagraphs(cfg), gpt_config(cfg, vocab_size)
    if compiled and device.type == "cpu":
        precompile_header()
    with torch.device("meta" if sharded else device):
        raw_model = GPT(shape, dtype, fit_loss_chunk(cfg.loss_chunk, shape.vocab_size, device),
                        attn=select_attn_backend(cfg, device), fp8=cfg.fp8,
                        doc_eot=eot if cfg.doc_mask else None, ngram_dropout=max(0.0, cfg.ngram_dropout),
                        offload=cfg.offload == "activations" and device.type == "cuda")  # fmt: skip
    if sharded:
        apply_fsdp(raw_model, device, dtype, ranks_per_shard(cfg, dist_ctx), DTYPES[cfg.grad_comm])
        init_buffers(raw_model, cfg.seed)
        ran = watch_blocks(raw_model, dist_ctx)
    check_attention(raw_model)
    check_loss(cross_entropy, shape.vocab_size)
    if compiled:
        # DDPOptimizer would split each block's graph at bucket boundaries; blocks overlap with all-reduce as they are.
        torch._dynamo.config.optimize_ddp = False
        torch._functorch.config.activation_memory_budget = activation_budget(cfg)
    micro_batch = fit_memory(cfg, raw_model, optimizer_groups(raw_model, cfg.optimizer, 0, 0, 0), dist_ctx)
    if compiled or cfg.attn == "flex":
        torch._dynamo.reset()  # what else was compiled in this process counts against the limit of recompilations
    if compiled:
        raw_model.apply_compile(cfg.compile)
    model = raw_model
    if dist_ctx.world_size > 1 and not sharded:
        model = apply_ddp(raw_model, cfg.bucket_cap_mb, DTYPES[cfg.grad_comm])
    if graphs:
        for p in raw_model.parameters():
            p.grad = torch.zeros_like(p) if p.requires_grad else None
    if compiled or device.type == "cuda" or dist_ctx.world_size > 1:  # DDP sorts its buckets in step 1
        with side_effects(raw_model, device) as effects:
            warm_up(model, make_optimizer(cfg, raw_model), micro_batch, cfg.seq_len, graphs)
        check_recomputation(cfg, raw_model.blocks[0].checkpointing, effects)
    state = TrainState(cfg, dist_ctx, raw_model, model, None, None, micro_batch, deque(maxlen=cfg.log_every))
    if sharded:
        state.ran = ran
    start_anew(state)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    return state


def make_optimizer(cfg: Config, model: GPT) -> Optimizer:
    """Muon and Adam, with new state. Any optimizer of torch.optim for the same groups does as well."""
    groups = optimizer_groups(model, cfg.optimizer, *learning_rates(cfg), cfg.weight_decay)
    ns_dtype = torch.float32 if cfg.dtype == "fp32" else torch.bfloat16
    return Optimizer(groups, ns_dtype, offload=cfg.offload == "optimizer")


def make_scaler(cfg: Config, device: torch.device) -> torch.amp.GradScaler:
    return torch.amp.GradScaler(device.type, enabled=cfg.dtype == "fp16")


def start_anew(state: TrainState) -> None:
    """All that training changes as it is before step 0, whatever warming up or measuring did to it."""
    init_weights(state.raw_model, state.cfg.seed)
    state.optimizer = None  # its memory goes first
    state.optimizer = make_optimizer(state.cfg, state.raw_model)
    state.scaler = make_scaler(state.cfg, state.dist_ctx.device)
    for kept in (state.skipped, state.metrics, state.extra):
        kept.clear()
    state.step = state.tokens = 0


def init_weights(model: GPT, seed: int) -> None:
    """Initial weights, functions of (seed, parameter name): drawn whole on the CPU, then placed or sharded; buffers."""
    made = init_buffers(model, seed)
    for name, param in model.named_parameters():
        own_seed = derive_seed(seed, name) >> 1  # torch's generators take 63 bits
        copy_from_full_tensor_(param, initial_weight(name, param.shape, own_seed, made))


def init_buffers(model: GPT, seed: int) -> GPT | None:
    """Buffers as the constructors make them; returns the model that these made, where they matter."""
    model.reset_buffers()
    if not constructors_matter(model):
        return None
    made = constructed(lambda: GPT(model.cfg), derive_seed(seed, "module") >> 1)
    copy_buffers_(model, made)
    return made


def learning_rates(cfg: Config) -> tuple[float, float]:
    """Muon's and Adam's. Adam's own default depends on whether it has the matrices to train as well."""
    return cfg.muon_lr, cfg.adam_lr or (0.006 if cfg.optimizer == "muon" else 0.002)


# ---------------------------------------------------------------------------------------------------------------------
# 3. Step and evaluation


def get_lr_multiplier(step: int, cfg: Config) -> float:
    """Multiple of the learning rate in update number `step` (from 0): a trapezoidal (WSD) schedule."""
    warmup, cooldown = cfg.warmup_frac * cfg.max_steps, cfg.cooldown_frac * cfg.max_steps
    up, down = (step + 1) / warmup if warmup else 1.0, (cfg.max_steps - step) / cooldown if cooldown else 1.0
    return min(lr_cap(cfg), up, down)


def get_momentum(step: int, final: float) -> float:
    """Muon's momentum in update number `step`: it rises to the parameter table's over 300 steps (NanoGPT speedrun)."""
    return final - max(0.0, final - 0.85) * max(0.0, 1 - step / 300)


def get_ngram_dropout(cfg: Config, stream: TokenStream) -> float:
    """--ngram_dropout; by itself the higher, the more often the run sees its data, as n-grams are learned by heart."""
    epochs = cfg.max_steps * stream.seqs_per_batch / stream.per_epoch
    return cfg.ngram_dropout if cfg.ngram_dropout >= 0 else min(0.6, 0.25 * math.log2(max(1.0, 1.3 * epochs)))


def get_batch(stream: TokenStream, dist_ctx: DistContext, step: int) -> Tensor:
    """This rank's part of step's global batch, int64 (sequences, seq_len + 1) on the CPU; pinned for a GPU."""
    batch = torch.from_numpy(stream.batch(step, dist_ctx.rank, dist_ctx.world_size))
    return batch.pin_memory() if dist_ctx.device.type == "cuda" else batch  # copied without holding up the host


def reseed_step(state: TrainState, purpose: str = "train") -> None:
    """Reseed every step: n-gram dropout, Python's and numpy's generators from (seed, step), torch's also from rank.

    No random state needs checkpointing, and what your own edits draw resumes exactly. What ranks must decide alike, as
    which layers to leave out, takes Python's `random`.
    """
    key = () if purpose == "train" else (purpose,)
    state.raw_model.step_seed = derive_seed(state.cfg.seed, state.step)
    for_all_ranks = derive_seed(state.cfg.seed, state.step, *key)
    random.seed(for_all_ranks)
    np.random.seed(for_all_ranks % 2**32)
    # The update is the same on ranks that hold the same weights.
    n_shards = ranks_per_shard(state.cfg, state.dist_ctx)
    rank = state.dist_ctx.rank % n_shards if purpose == "update" else state.dist_ctx.rank
    torch.manual_seed(derive_seed(state.cfg.seed, state.step, rank, *key))


def maybe_no_sync(state: TrainState, last: bool):
    """Copies of the weights share gradients on the last micro-step only; a context for its forward and backward."""
    if hasattr(state.model, "set_requires_all_reduce"):  # FSDP, whose shards of gradients meet in every micro-step
        state.model.set_requires_all_reduce(last)
    elif state.dist_ctx.world_size > 1 and not last:
        return state.model.no_sync()
    return contextlib.nullcontext()


def train_step(state: TrainState, batch: Tensor, lr_multiplier: float) -> tuple[Tensor, Tensor]:
    """One optimizer step on this rank's batch, int64 (sequences, seq_len + 1).

    Returns the mean loss of this rank's tokens and the norm of the whole gradient before clipping, both fp32 () on the
    device: nothing here waits for it. Where that norm is not finite, every rank skips the update and notes it.
    """
    cfg, dist_ctx, params = state.cfg, state.dist_ctx, list(state.raw_model.parameters())
    buffers = {name: buffer.clone() for name, buffer in persistent_buffers(state.raw_model).items()}
    x, y = batch[:, :-1], batch[:, 1:]
    n_targets = (y >= 0).sum()
    if dist_ctx.world_size > 1:
        dist.all_reduce(n_targets)
        n_targets = n_targets / dist_ctx.world_size  # DDP and FSDP average the ranks' gradients
    loss = torch.zeros((), device=dist_ctx.device)
    micro_batches = list(zip(x.split(state.micro_batch), y.split(state.micro_batch)))
    for i, (inputs, targets) in enumerate(micro_batches):
        cudagraph_mark_step(uses_cudagraphs(cfg))
        with maybe_no_sync(state, i == len(micro_batches) - 1):
            part = state.model(inputs, targets) / n_targets
            # A non-finite loss becomes NaN in all ranks' gradients.
            state.scaler.scale(part).backward(1 + 0 * part.detach())
        loss += part.detach()
    check_gradients(state.model, state.ran)
    reseed_step(state, "update")
    state.scaler.unscale_(state.optimizer)
    grads = [p.grad for p in params if p.grad is not None]
    norm = nn.utils.get_total_norm(grads)
    norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
    skip = ~norm.isfinite()
    state.skipped.append(skip)
    if state.scaler.is_enabled():
        for found_inf in state.scaler._found_inf_per_device(state.optimizer).values():
            found_inf.copy_(skip)
    if cfg.grad_clip:
        torch._foreach_mul_([to_local(grad) for grad in grads], (cfg.grad_clip / (norm + 1e-6)).clamp(max=1.0))
    for group in state.optimizer.param_groups:
        group["lr"] = group.setdefault("initial_lr", group["lr"]) * lr_multiplier
        if isinstance(state.optimizer, Optimizer):
            group["momentum"] = get_momentum(state.step, group["betas"][0])
    if isinstance(state.optimizer, Optimizer):
        state.optimizer.step(skip)
    elif not skip:  # waits for the device
        state.optimizer.step()
    keep_buffers(state.raw_model, buffers, skip)
    state.scaler.update()
    state.optimizer.zero_grad(set_to_none=not uses_cudagraphs(cfg))
    state.tokens += y.numel() * dist_ctx.world_size
    return loss, norm


@contextlib.contextmanager
def as_evaluated(state: TrainState):
    """The model as it is evaluated, sampled and kept as the best: in eval mode, with the weights that edits keep."""
    others = state.extra.get("eval_weights", {})
    state.model.eval()
    swap_weights(state.raw_model, others)
    try:
        yield state.raw_model
    finally:
        swap_weights(state.raw_model, others)
        state.model.train()


@torch.no_grad()
def evaluate(state: TrainState, stream: TokenStream, signals=()) -> float | None:
    """Mean loss over the first --eval_tokens validation tokens, in nats; the same for any ranks and micro-batch.

    None when `signals` of any rank has something in it: there may be little time left to save.
    """
    cfg, dist_ctx, losses = state.cfg, state.dist_ctx, []
    reseed_step(state, "evaluate")
    with as_evaluated(state) as model:
        for x, y in stream.eval_batches(cfg.eval_tokens, state.micro_batch, dist_ctx.rank, dist_ctx.world_size):
            if dist_max(dist_ctx, bool(signals)):
                reshard(model)
                return None
            cudagraph_mark_step(uses_cudagraphs(cfg))
            losses.append(model(*(torch.from_numpy(t).to(dist_ctx.device) for t in (x, y))))
        reshard(model)
    total = torch.stack(losses).cpu().double().sum()
    if dist_ctx.world_size > 1:
        dist.all_reduce(total, group=dist_ctx.cpu_group)
    return total.item() / (stream.num_eval_seqs(cfg.eval_tokens) * cfg.seq_len)


@or_reason
def sample_text(state: TrainState, stream: TokenStream, tokenizer, n_tokens: int) -> str:
    """The end of what is evaluated, ">>>", and how the model goes on; the same every time for the same weights."""
    prompt = torch.from_numpy(stream.eval_end(state.cfg.eval_tokens, 64))[0]
    with as_evaluated(state) as model:
        check_cache(model)
        drawn = generate(model, [prompt], n_tokens, tokenizer.vocab_size, 0.8, seeds=[state.cfg.seed])
        tokens = [token for (token,) in on_host(drawn)]
        reshard(model)
    known = prompt[prompt < tokenizer.vocab_size].tolist()  # data may hold more tokens than their tokenizer
    texts = [tokenizer.decode_bytes(part).decode("utf-8", errors="replace") for part in (known, tokens)]
    return printable(">>>".join(texts))


# ---------------------------------------------------------------------------------------------------------------------
# 4. Start and resume


def launch(cfg: Config) -> DistContext:
    """Choose the device and join the other ranks, if torchrun started any and they are alike. Raises UserError."""
    dist_ctx = init_distributed(cfg.device, cfg.alloc_conf, cfg.deterministic, cfg.matmul_precision, cfg.attn,
                                need_group=is_sharded(cfg))  # fmt: skip
    check_ranks(dist_ctx, dataclasses.asdict(cfg), SOURCE_FILES)
    return dist_ctx


def check_hardware(cfg: Config, dist_ctx: DistContext) -> list[str]:
    """Refuse what cannot work on this device with a UserError; returns a line for each flag without effect."""
    windows = GPTConfig(window=cfg.window, seq_len=cfg.seq_len, n_layer=cfg.n_layer).layer_windows()
    windowed = any(0 < window < cfg.seq_len for window in windows)
    seqs_per_rank(cfg, dist_ctx.world_size)
    ranks_per_shard(cfg, dist_ctx)
    return check_device(cfg, Config(**PRESETS[cfg.preset]), dist_ctx.device, windowed, dist_ctx.world_size)


def data_folder(cfg: Config) -> Path:
    return Path(cfg.data or HERE / "data" / "python")


def run_folder(cfg: Config, dist_ctx: DistContext) -> Path:
    """--out_dir, or a new folder that is named by the time; the same on every rank. Raises UserError."""
    return Path(cfg.out_dir or run_on_rank0(dist_ctx, lambda: new_run_folder(cfg.preset)))


def open_stream(cfg: Config, dist_ctx: DistContext) -> TokenStream:
    """The data folder, checked, the same on all ranks; makes the default corpus first. Raises UserError."""
    folder = data_folder(cfg)
    with agree(dist_ctx):
        if not cfg.data and dist_ctx.local_rank == 0:  # each node has its own standard library
            prepare("python", out=folder)
    with agree(dist_ctx):
        stream = TokenStream(folder, cfg.seq_len, cfg.batch_tokens, cfg.seed, cfg.vocab_size, cfg.doc_align)
    check_alike(dist_ctx, stream.facts(), f"give every node the same data in {folder}")
    return stream


def snapshot(state: TrainState, stream: TokenStream, clock: dict, optimizer: Optimizer | None) -> dict:
    """What a checkpoint holds, as a copy in host memory; on rank 0, but every rank has to take part.

    Without an optimizer: the weights as they are evaluated.
    """
    check_replicas(state.model, dist_ctx=state.dist_ctx, step=state.step)
    if optimizer:
        tensors = collect_tensors(state.raw_model, optimizer, state.extra)
    else:
        with as_evaluated(state) as model:
            tensors = collect_tensors(model)
    return {
        "step": state.step,
        "clock": clock,
        "config": dataclasses.asdict(state.cfg),
        "model_config": dataclasses.asdict(state.raw_model.cfg),
        "tokenizer": stream.meta["tokenizer"],
        "data": stream.fingerprint(),
        "position": stream.position(state.step),
        "scaler": state.scaler.state_dict(),
        "tokens": state.tokens,
        **tensors,
    }


def settle_flags(cfg: Config, checkpoint: dict, path: Path, stream: TokenStream, resumes: bool) -> list[str]:
    """Settle the flags to continue from a checkpoint with; returns what to say of it. Raises UserError."""
    model_config(checkpoint, GPTConfig, path)
    check_tokenizer(checkpoint, stream.meta["tokenizer"], stream.folder, path)
    if not resumes:
        return [f"weights from {path}"]
    step, known = checkpoint["step"], {f.name for f in dataclasses.fields(Config)}
    before = Config(**{name: value for name, value in checkpoint["config"].items() if name in known})
    if cfg.minutes and cfg.minutes == before.minutes:
        cfg.max_steps = before.max_steps  # chosen when the run began
    cfg.dtype = saved_dtype(cfg.dtype, checkpoint["config"])  # measured then
    check_steps(dataclasses.asdict(cfg), checkpoint, path)
    present = get_lr_multiplier(max(0, step - 1), before)
    if cfg.schedule_from == "here":
        cfg.schedule_from = repr(present)
    note, changed = f"resumed from {path}", changed_flags(dataclasses.asdict(cfg), checkpoint["config"], path)
    if changed:
        note += f"; flags that have changed: {changed}"
    if cfg.max_steps != before.max_steps and step < cfg.max_steps:
        rate, following = learning_rates(cfg)[cfg.optimizer == "adamw"], get_lr_multiplier(step, cfg)
        note += f"; the learning rate goes from {rate * present:.3g} to {rate * following:.3g}"
        note += " (--schedule_from here keeps it from rising)" if following > present else ""
    dropout = [get_ngram_dropout(c, stream) for c in (before, cfg)] if cfg.ngram > 1 else [0.0]
    if dropout[0] != dropout[-1]:
        note += f"; n-gram dropout goes from {dropout[0]:.2f} to {dropout[1]:.2f}"
    return [note]


def load_checkpoint(state: TrainState, stream: TokenStream, timer: TrainTimer, checkpoint: dict, path: Path,
                    resumes: bool) -> list[str]:  # fmt: skip
    """Take a checkpoint's weights; to resume its run, the optimizer, step and clock too. Raises UserError.

    Returns what to say of it.
    """
    partial = state.cfg.init_partial and not resumes
    left = load_weights(state.raw_model, checkpoint, path, () if resumes else ("seq_len",), partial)
    if not resumes:
        return [f"not taken from {path}: {left}"] * bool(left)
    state.step = checkpoint["step"]
    state.tokens = checkpoint.get("tokens", state.step * state.cfg.batch_tokens)
    state.extra.update(load_extra(state.raw_model, checkpoint))
    check_same_stream(checkpoint, stream.fingerprint(), stream.position(state.step), stream.folder, path)
    load_optimizer(state.raw_model, state.optimizer, state.scaler, checkpoint, path)
    timer.train_time, timer.wall_before = (checkpoint["clock"][k] for k in ("train_time", "wall_time"))
    return []


def choose_max_steps(state: TrainState, stream: TokenStream, timer: TrainTimer) -> tuple[int, str]:
    """For --minutes: how many steps, with their evaluations, end in time, and what to say of it. Raises UserError.

    It measures steps that change nothing, at a learning rate of 0, and resets what they leave behind.
    """
    cfg, dist_ctx, n_seqs = state.cfg, state.dist_ctx, state.micro_batch * state.dist_ctx.world_size
    one_batch = dataclasses.replace(state, cfg=dataclasses.replace(cfg, eval_tokens=n_seqs * cfg.seq_len))
    batches = stream.num_eval_seqs(cfg.eval_tokens) / n_seqs
    chosen = steps_within(
        cfg.minutes, lambda i: train_step(state, get_batch(stream, dist_ctx, i).to(dist_ctx.device), 0.0)[0].item(),
        lambda: evaluate(one_batch, stream), batches, cfg.eval_every, timer.wall_time_here, dist_ctx,
    )  # fmt: skip
    start_anew(state)
    return chosen


# ---------------------------------------------------------------------------------------------------------------------
# 5. The loop


def train(cfg: Config, return_model: bool = False, on_step=None) -> dict | tuple[dict, GPT]:
    """A whole run, from data to the last checkpoint; returns what summary.json holds, and the model if asked for.

    on_step(state, loss), if given, is called on each rank after each step, with its TrainState and the mean loss of
    this rank's tokens, fp32 () on the device. Raises TrainerError.
    """
    cfg, dist_ctx = dataclasses.replace(cfg), launch(cfg)
    timer = TrainTimer(dist_ctx.device)
    torch.manual_seed(cfg.seed)  # nothing below draws from the global generators; your own edits may
    random.seed(cfg.seed)
    np.random.seed(cfg.seed % 2**32)
    with agree(dist_ctx):
        notes = check_hardware(cfg, dist_ctx)
    stream = open_stream(cfg, dist_ctx)
    logger = RunLogger(run_folder(cfg, dist_ctx), dist_ctx.rank == 0, made=not cfg.out_dir)
    with contextlib.closing(logger), catch_signals() as signals:
        run_on_rank0(dist_ctx, logger.lock)
        restarted = dist_max(dist_ctx, int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))) > 0  # some nodes count
        given = (logger.folder, cfg.resume, cfg.init_from, logger.info, restarted)
        path, resumes = run_on_rank0(dist_ctx, lambda: find_checkpoint(*given))
        with agree(dist_ctx):
            checkpoint = path and read_checkpoint(path, verify=False)
            if path:
                notes += settle_flags(cfg, checkpoint, path, stream, resumes)
        cfg.schedule_from = "start" if cfg.schedule_from == "here" else cfg.schedule_from  # nothing was resumed
        notes += settle_dtype(cfg, dist_ctx)
        with agree(dist_ctx):
            state = build(cfg, dist_ctx, stream.meta["vocab_size"], stream.meta["eot"])
            state.raw_model.ngram_dropout = get_ngram_dropout(cfg, stream)
            if cfg.minutes and not resumes:
                cfg.max_steps, note = choose_max_steps(state, stream, timer)
                state.raw_model.ngram_dropout = get_ngram_dropout(cfg, stream)
                notes.append(note)
            if path:
                notes += load_checkpoint(state, stream, timer, checkpoint, path, resumes)
        checkpoint, flags = None, dataclasses.asdict(cfg)
        if cfg.wandb:
            run_on_rank0(dist_ctx, lambda: logger.start_wandb(flags))
        rows = logger.open(flags, state.step, SOURCE_FILES)
        rates = learning_rates(cfg)
        for line in (*describe(cfg, dist_ctx, stream, state.raw_model, state.micro_batch, rates, HERE), *notes):
            logger.info(line)
        try:
            summary = loop(state, stream, logger, timer, signals, rows, on_step or (lambda *_: None))
            check_stop(dist_ctx, signals, summary["stopped_by"])
        except Exception as error:
            if logger.log:  # the command line prints it on standard error, which may be lost
                logger.log.write(f"ended: {explain(error) or traceback.format_exc()}")
            raise
    return (summary, state.raw_model) if return_model else summary


@dataclass
class Progress:
    """What the loop remembers besides the training state."""

    evaluations: list[dict]  # rows of metrics.jsonl
    recent_losses: deque  # logged ones
    flops_per_token: float
    peak_flops: float | None
    first_step: int
    first_tokens: int
    first_train_time: float
    last_logged: tuple[int, float]  # tokens, train_time
    data_wait_s: float = 0.0


def start_progress(state: TrainState, timer: TrainTimer, rows: list[dict]) -> Progress:
    evaluations = [row for row in rows if row.get("val_loss") is not None]
    losses = deque((row["train_loss"] for row in rows if row.get("train_loss") is not None), maxlen=10)
    flops = state.raw_model.flops_per_token(), peak_flops(state.dist_ctx.device, state.cfg.dtype)
    logged = state.tokens, timer.train_time
    return Progress(evaluations, losses, *flops, state.step, state.tokens, timer.train_time, logged)


def loop(state: TrainState, stream: TokenStream, logger: RunLogger, timer: TrainTimer, signals: list,
         rows: list[dict], on_step) -> dict:  # fmt: skip
    """Train from state.step until something stops the run; returns the summary. rows: of a resumed metrics.jsonl."""
    cfg, dist_ctx = state.cfg, state.dist_ctx
    progress, tokenizer = start_progress(state, timer, rows), find_tokenizer(stream.meta["tokenizer"], dist_ctx, logger)
    batches = prefetch(lambda step: get_batch(stream, dist_ctx, step), state.step, cfg.max_steps, cfg.prefetch)
    profiling = maybe_profiler(cfg.profile, cfg.max_steps - state.step, logger, dist_ctx)
    saver, votes = CheckpointManager(logger, dist_ctx, cfg.keep, state.step), late_max(dist_ctx)
    stop, loss, norm = "max_steps" if state.step >= cfg.max_steps else "", None, None

    def due(every: int) -> bool:
        return bool(stop) or (every > 0 and state.step > 0 and state.step % every == 0)

    def save(best: bool = False) -> None:
        clock, optimizer = timer.state(), None if best else state.optimizer
        saver.save(state.step, lambda: snapshot(state, stream, clock, optimizer), BEST if best else "", bool(stop))

    with contextlib.closing(saver), contextlib.closing(batches), profiling as profiler:
        while True:
            if loss is not None and (due(cfg.log_every) or state.step == 1):
                failure = log_step(state, stream, logger, timer, progress, loss, norm)
                if failure:
                    stop = "failure"
                    save()
                    run_on_rank0(dist_ctx, saver.finish)
                    raise said_here(RunError(failure), dist_ctx.rank == 0)
            if due(cfg.eval_every) and stop != "signal" and not is_evaluated(progress, state):
                stop = run_eval(state, stream, logger, timer, progress, signals) or stop
                if stop != "signal" and run_on_rank0(dist_ctx, lambda: is_best(progress.evaluations, cfg)):
                    save(best=True)
            if due(cfg.save_every):
                save()
            if due(cfg.sample_every) and stop != "signal" and tokenizer:
                timer.pause()
                logger.info(f"--- sample at step {state.step}\n{sample_text(state, stream, tokenizer, 256)}\n---")
            if stop:
                break
            timer.start()
            t0 = time.perf_counter()
            batch = next(batches).to(dist_ctx.device, non_blocking=dist_ctx.device.type == "cuda")
            progress.data_wait_s += time.perf_counter() - t0
            reseed_step(state)
            loss, norm = train_step(state, batch, get_lr_multiplier(state.step, cfg))
            state.step += 1
            on_step(state, loss)
            if profiler:
                profiler.step()
            stop = stop_reason(state, timer, signals, votes)
        votes(None)  # the last one is under way
        run_on_rank0(dist_ctx, saver.finish)
    return write_summary(state, stream, logger, timer, progress, signals[0] if stop == "signal" and signals else stop)


def is_evaluated(progress: Progress, state: TrainState) -> bool:
    """Whether the present weights are, in this process or before a resume, of which rank 0 has the rows."""
    return dist_max(state.dist_ctx, any(row["step"] == state.step for row in progress.evaluations)) > 0


def find_tokenizer(name: str, dist_ctx: DistContext, logger: RunLogger):
    """The tokenizer for samples; None, with a line that says why, if a rank has none: tokens suffice to train."""
    tokenizer, reason = None, "another rank has no tokenizer"
    try:
        tokenizer = get_tokenizer(name)
    except UserError as error:
        reason = str(error)
    if dist_max(dist_ctx, tokenizer is None):  # sampling under FSDP takes all ranks
        logger.info(f"no samples will be printed: {reason}")
        return None
    return tokenizer


def stop_reason(state: TrainState, timer: TrainTimer, signals: list, votes) -> str:
    """Why to stop before the next step, the same on every rank; "" to continue. votes: late_max's, of the ranks."""
    timed_out = state.cfg.max_minutes and timer.wall_time_here >= 60 * state.cfg.max_minutes
    vote = ("", "max_minutes", "signal")[int(votes(2 if signals else 1 if timed_out else 0, state.ran[-1]))]
    return "max_steps" if state.step >= state.cfg.max_steps and vote != "signal" else vote


def log_step(state: TrainState, stream: TokenStream, logger: RunLogger, timer: TrainTimer, progress: Progress,
             loss: Tensor, norm: Tensor) -> str:  # fmt: skip
    """Print and keep the figures of the step just done, and which updates were skipped; waits for the device.

    Returns why the run must end, or "".
    """
    cfg, dist_ctx, step = state.cfg, state.dist_ctx, state.step
    means, grad_norm = dist_means(dist_ctx, {**state.metrics, "train_loss": loss}), norm.item()
    train_loss, train_time = means.pop("train_loss"), timer.pause()
    tokens, seconds = state.tokens - progress.last_logged[0], train_time - progress.last_logged[1]
    tokens_per_s = tokens / max(seconds, 1e-9)
    progress.last_logged = state.tokens, train_time
    peak = progress.peak_flops and progress.peak_flops * dist_ctx.world_size
    mfu = tokens_per_s * progress.flops_per_token / peak if peak else math.nan
    lr = learning_rates(cfg)[0 if cfg.optimizer == "muon" else 1] * get_lr_multiplier(step - 1, cfg)
    if not isinstance(state.optimizer, Optimizer):
        lr = state.optimizer.param_groups[0]["lr"]
    row = dict(
        step=step, train_loss=train_loss, lr=lr, grad_norm=grad_norm, tokens=state.tokens,
        tokens_per_s=tokens_per_s, mfu=mfu, peak_mem_mb=peak_memory_mb(dist_ctx.device), train_time_s=train_time,
        wall_time_s=timer.wall_time,
    )  # fmt: skip
    eta_s = (train_time - progress.first_train_time) / (step - progress.first_step) * (cfg.max_steps - step)
    check_metrics(state.metrics, row)
    logger.info(step_line(row, cfg.max_steps, eta_s, is_loss_spike(train_loss, progress.recent_losses), means))
    logger.log_metrics(**row, **means)
    progress.recent_losses.extend([train_loss] if math.isfinite(train_loss) else [])
    state.bad_steps, failure = report_skipped(
        state.skipped, state.step, state.bad_steps, cfg.max_bad_steps, stream, logger.info
    )
    return failure


def run_eval(state: TrainState, stream: TokenStream, logger: RunLogger, timer: TrainTimer, progress: Progress,
             signals: list) -> str:  # fmt: skip
    """Evaluate, print and keep the figures; returns why to stop: "signal", "target_val_loss" or "" to continue."""
    cfg, train_time = state.cfg, timer.pause()
    val_loss = evaluate(state, stream, signals)
    if val_loss is None:
        return "signal"
    counts = stream.meta["splits"].get("val") or {}
    bits_per_nat = counts["tokens"] / counts["bytes"] / math.log(2) if counts.get("bytes") else math.nan
    row = dict(step=state.step, val_loss=val_loss, val_bpb=val_loss * bits_per_nat,
               tokens=state.tokens, train_time_s=train_time, wall_time_s=timer.wall_time)  # fmt: skip
    logger.info(eval_line(row, cfg.max_steps))
    logger.log_metrics(**row)
    progress.evaluations.append(row)
    return "target_val_loss" if val_loss <= cfg.target_val_loss else ""


def write_summary(state: TrainState, stream: TokenStream, logger: RunLogger, timer: TrainTimer, progress: Progress,
                  stopped_by: str) -> dict:  # fmt: skip
    """Write summary.json, say how the run ended and what to try next; returns the summary."""
    cfg, dist_ctx = state.cfg, state.dist_ctx
    train_time = timer.pause()
    trained = train_time - progress.first_train_time
    if dist_ctx.device.type == "cuda":
        stats = torch.cuda.memory_stats()
        logger.info(f"allocator: {stats['num_alloc_retries']} retries, {stats['num_ooms']} times out of memory")
    evaluations = progress.evaluations
    reached = next((row for row in evaluations if row["val_loss"] <= cfg.target_val_loss), None)
    last = evaluations[-1] if evaluations else dict(val_loss=math.nan, val_bpb=math.nan)
    summary = nan_to_none(dict(
        stopped_by=stopped_by, step=state.step, val_loss=last["val_loss"],
        best_val_loss=min((row["val_loss"] for row in evaluations if math.isfinite(row["val_loss"])), default=math.nan),
        val_bpb=last["val_bpb"],
        target_reached=reached and dict(step=reached["step"], train_time_s=reached["train_time_s"]),
        tokens=state.tokens,
        tokens_per_s=(state.tokens - progress.first_tokens) / trained if trained else math.nan,
        machine=device_summary(dist_ctx), val_tokens=stream.num_eval_seqs(cfg.eval_tokens) * cfg.seq_len,
        files=recorded_hashes(stream.meta), dtype=cfg.dtype,
        data_wait_s=progress.data_wait_s, train_time_s=train_time, wall_time_s=timer.wall_time,
    ))  # fmt: skip
    if state.step > progress.first_step or not (logger.folder / "summary.json").exists():
        logger.write_summary(summary)  # a run that was complete before keeps its figures
    logger.info(closing_lines(summary, trained, logger.folder, cfg.max_steps))
    return summary


# ---------------------------------------------------------------------------------------------------------------------
# 6. Trials and the command line


def train_trials(cfg: Config) -> list[dict]:
    """--trials whole runs, seed after seed, each in its own folder; returns their summaries."""
    dist_ctx = launch(cfg)
    folder, summaries = run_folder(cfg, dist_ctx), []
    for seed in range(cfg.seed, cfg.seed + cfg.trials):
        one = dataclasses.replace(cfg, seed=seed, out_dir=str(folder / f"seed_{seed}"))
        args = (Path(one.out_dir), dataclasses.asdict(one), data_folder(one))
        try:
            summaries.append(run_on_rank0(dist_ctx, lambda args=args: load_finished_trial(*args)) or train(one))
        finally:
            with contextlib.suppress(OSError):
                folder.rmdir()  # a mistake leaves no empty folder
        if summaries[-1]["stopped_by"] != "max_steps":
            break
        cfg = dataclasses.replace(cfg, dtype=saved_dtype(cfg.dtype, summaries[-1]))  # the first settles auto
    if dist_ctx.rank == 0 and len(summaries) > 1 and all(s["val_loss"] is not None for s in summaries):
        print(trials_line(summaries, folder))
    return summaries


def main(argv: list[str]) -> int:
    """The command line; returns the exit code: 0 done, 2 the user's mistake, 1 anything else."""
    sys.stdout.reconfigure(errors="replace")  # a sample may hold what a terminal cannot show
    try:
        cfg = make_config(**parse_args(argv))
        train_trials(cfg) if cfg.trials > 1 else train(cfg)
    except Exception as error:
        return report_error(error)
    if dist.is_initialized():  # not after an error: it would wait for the other ranks
        dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    leave(main(sys.argv[1:]))
