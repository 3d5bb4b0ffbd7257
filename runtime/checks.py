"""Flags that cannot go together, cannot work on this device, or have no effect here: one row each.

A row is (when, sentence): the first whose condition holds refuses the run before any work is done. `f` has the flags as
attributes, `hw` the facts check_device collects; sentences are format strings, with values such as {f.n_embd}.
"""

import os
import random
import re
from types import SimpleNamespace

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from data.shards import UserError
from runtime.derived import AC_MODES, activation_budget, is_sharded, lr_cap, uses_cudagraphs, uses_ngrams
from runtime.dtype import hardware_dtype
from runtime.flags import check_ranges, closest
from runtime.launch import ALLOC_CONF_VARIABLES


def nearest_batch(f) -> int:
    return max(1, round(f.batch_tokens / f.seq_len)) * f.seq_len


FLAG_RULES = (
    (
        lambda f: f.bf16 and f.dtype not in ("auto", "bf16"),
        "--bf16 and --dtype {f.dtype} contradict each other; give one of them",
    ),
    (
        lambda f: f.warmup_frac + f.cooldown_frac > 1 and not f.resume,  # of what --minutes may have chosen
        "--warmup_frac {f.warmup_frac} and --cooldown_frac {f.cooldown_frac} add up to more than 1; lower one",
    ),
    (
        lambda f: f.n_embd % (2 * f.n_head),
        "--n_embd {f.n_embd} cannot be cut into {f.n_head} heads of even dimension; make it a multiple of {heads}, or "
        "change --n_head",
    ),
    (
        lambda f: f.batch_tokens % f.seq_len,
        "--batch_tokens {f.batch_tokens} is not a multiple of --seq_len {f.seq_len}; use --batch_tokens {batch}",
    ),
    (
        lambda f: f.ngram_dropout > 0 and not uses_ngrams(f) or f.ngram_dropout >= 1 or -1 < f.ngram_dropout < 0,
        "--ngram_dropout is {f.ngram_dropout:g} with --ngram {f.ngram}; expected a probability below 1 (or -1), and "
        "n-grams to drop, as with --ngram 4",
    ),
    (
        lambda f: f.checkpointing not in ("auto", *AC_MODES) and not 0 < activation_budget(f) < 1,
        "--checkpointing is {f.checkpointing!r}; expected auto, none, selective, full or a number between 0 and 1",
    ),
    (
        lambda f: activation_budget(f) < 1 and f.compile == "off",
        "--checkpointing {f.checkpointing} is a budget for the compiler; add --compile",
    ),
    (
        lambda f: uses_cudagraphs(f) and is_sharded(f),
        "--compile {f.compile} records CUDA graphs, which FSDP's moving weights break; use --compile "
        "max-autotune-no-cudagraphs or default",
    ),
    (
        lambda f: f.deterministic and f.compile.startswith("max-autotune"),
        "--compile {f.compile} picks kernels by timing, so reruns may differ; use default",
    ),
    (
        lambda f: f.profile and f.max_steps < f.profile + 3,
        "--profile {f.profile} starts after 3 steps; use --max_steps {profiled} or more",
    ),
    (
        lambda f: f.trials > 1 and f.target_val_loss,
        "--trials compares runs of one length, so none may stop early; remove --target_val_loss",
    ),
    (
        lambda f: f.trials > 1 and f.minutes,
        "--trials compares runs of one length, which --minutes would choose for each; give --max_steps instead",
    ),
    (
        lambda f: f.trials > 1 and f.resume not in ("", "auto"),
        "--trials continues with --resume auto, not with {f.resume!r}, which is about one run",
    ),
    (
        lambda f: not f.out_dir and int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", 0)) > 0,
        "torchrun --max-restarts needs a folder to resume from; give --out_dir",
    ),
    (
        lambda f: f.init_from.startswith("gpt2") and not os.path.exists(f.init_from),
        "--init_from {f.init_from}: GPT-2's weights do not fit, as this model has no learned positions, biases or "
        "LayerNorm; give a run or checkpoint of this trainer",
    ),
    (
        lambda f: f.init_from in ("scratch", "resume") and not os.path.exists(f.init_from),
        "--init_from {f.init_from} is nanoGPT's; a run starts from scratch by itself, and --resume continues one",
    ),
    (
        lambda f: f.init_partial and not f.init_from,
        "--init_partial is about the weights that --init_from takes, which was not given; remove it",
    ),
    (
        lambda f: f.schedule_from == "here" and not f.resume,
        "--schedule_from here keeps the learning rate of a resumed run; add --resume",
    ),
    (
        lambda f: f.schedule_from not in ("start", "here") and not 0 <= lr_cap(f) <= 1,
        "--schedule_from is {f.schedule_from!r}; expected start, here or a fraction of the learning rates",
    ),
    (lambda f: f.resume and f.init_from, "--resume and --init_from contradict each other; give one of them"),
)

DEVICE_RULES = (
    (
        lambda f, hw: f.attn == "flex" and not hw.cuda,
        "--attn flex cannot train here: FlexAttention has a backward pass on CUDA only; use --attn sdpa",
    ),
    (
        lambda f, hw: f.attn in ("cudnn", "efficient", "varlen", "fa3", "fa4") and not hw.cuda,
        "--attn {f.attn} runs on CUDA only, not on {hw.type}; use auto, blocked or sdpa",
    ),
    (
        lambda f, hw: f.attn in ("flash", "fa3", "fa4") and hw.cuda and hw.masked,
        "--attn {f.attn} takes no mask, as --window and --doc_mask need; use --attn flex or varlen",
    ),
    (
        lambda f, hw: f.attn in ("flash", "cudnn", "varlen", "fa3", "fa4") and hw.cuda and hw.dtype == "fp32",
        "--attn {f.attn} needs bf16 or fp16; add --bf16, or use --attn efficient",
    ),
    (
        lambda f, hw: f.attn in ("flash", "cudnn", "varlen", "fa3", "fa4") and hw.cuda and hw.capability < (8, 0),
        "--attn {f.attn} needs a GPU of compute capability 8.0 or newer (A100, RTX 30); use --attn efficient",
    ),
    (
        lambda f, hw: f.fp8 and hw.capability < (8, 9),
        "--fp8 needs a CUDA device of compute capability 8.9 or newer (L4, RTX 40, H100); remove it",
    ),
    (
        lambda f, hw: f.fp8 and (hw.dtype != "bf16" or f.n_embd % 16 or f.vocab_size % 16),
        "--fp8 needs bf16 and sizes that 16 divides, not {hw.dtype}, --n_embd {f.n_embd} and "
        "--vocab_size {f.vocab_size}",
    ),
    (lambda f, hw: is_sharded(f) and hw.type == "mps", "--parallel {f.parallel} does not run on MPS; remove it"),
    (
        lambda f, hw: f.deterministic and hw.cuda and (not f.micro_batch or f.attn in ("cudnn", "varlen")),
        "--deterministic on CUDA needs an explicit --micro_batch, and an --attn other than cudnn or varlen",
    ),
    (
        lambda f, hw: f.attn == "flex" and f.checkpointing == "selective" and f.compile == "off",
        "--checkpointing selective cannot see into uncompiled FlexAttention; add --compile",
    ),
    (
        lambda f, hw: (
            uses_cudagraphs(f) and hw.cuda and (f.offload == "activations" or f.attn == "varlen" and f.doc_mask)
        ),
        "--compile {f.compile} records CUDA graphs, which need activations at fixed addresses and a fixed number of "
        "documents; use --compile max-autotune-no-cudagraphs or default",
    ),
)

# What is accepted, with one log line: it has no effect here, or not the one that one may expect.
NO_EFFECT = (
    (lambda f, hw: f.alloc_conf and not hw.cuda, "--alloc_conf has no effect on {hw.type}: it is about CUDA memory"),
    (
        lambda f, hw: f.alloc_conf and hw.cuda and os.environ.get(ALLOC_CONF_VARIABLES[0]) != f.alloc_conf,
        "--alloc_conf gives way to PYTORCH_ALLOC_CONF, as the environment or an earlier run here set it",
    ),
    (
        lambda f, hw: f.offload != "none" and not hw.cuda,
        "--offload {f.offload} has no effect on {hw.type}: everything is in host memory already",
    ),
    (
        lambda f, hw: f.bucket_cap_mb != hw.preset.bucket_cap_mb and (hw.world_size == 1 or is_sharded(f)),
        "--bucket_cap_mb {f.bucket_cap_mb} has no effect: it is about the gradients that DDP's ranks exchange",
    ),
    (
        lambda f, hw: f.parallel == "ddp" and hw.world_size == 1,
        "--parallel ddp has no effect on one process; start several with torchrun",
    ),
    (
        lambda f, hw: f.shard_size and f.parallel != "hsdp",
        "--shard_size {f.shard_size} has no effect without --parallel hsdp",
    ),
    (
        lambda f, hw: f.grad_comm == "bf16" and hw.world_size == 1,
        "--grad_comm bf16 has no effect on one process, which exchanges no gradients",
    ),
    (
        lambda f, hw: f.ngram == 1,
        "--ngram 1 has no effect: every token already has its own embedding; n-grams start at 2",
    ),
    (
        lambda f, hw: "S" in f.window and not hw.windowed,
        "--window {f.window} has no effect: it is as long as the context of {f.seq_len} tokens",
    ),
    (
        lambda f, hw: f.ngram_rows != hw.preset.ngram_rows and not uses_ngrams(f),
        "--ngram_rows {f.ngram_rows} has no effect without n-grams, as --ngram 4 adds",
    ),
    (
        lambda f, hw: f.optimizer == "adamw" and f.muon_lr != hw.preset.muon_lr,
        "--muon_lr {f.muon_lr:g} has no effect with --optimizer adamw",
    ),
    (
        lambda f, hw: f.preset.startswith("gpt2") and not f.data,
        "--preset {f.preset} without --data trains on Python's source, not with GPT-2's tokenizer; for that run "
        "`python data/prepare.py fineweb10B` and add --data data/fineweb10B",
    ),
    (
        lambda f, hw: hw.cuda and f.dtype == "auto" and hw.dtype == "fp32",
        "--dtype auto is fp32 on a GPU without bf16; --dtype fp16 uses its tensor cores, if it has any",
    ),
    (
        lambda f, hw: hw.cuda and f.dtype == "bf16" and hw.capability < (8, 0),
        "--dtype bf16 is emulated by this GPU, slower than fp32; --dtype fp16 uses its tensor cores, if it has any",
    ),
    (
        lambda f, hw: hw.masked and f.attn in ("auto", "sdpa") and hw.cuda,
        "a window or document mask keeps SDPA from its flash kernel; --attn flex or varlen takes them",
    ),
)


def sentence_of(text: str, f, hw=None) -> str:
    """A rule's sentence with the flags' values, and with the values that would be right."""
    return text.format(f=f, hw=hw, heads=2 * f.n_head, batch=nearest_batch(f), profiled=f.profile + 3)


def check_flags(f) -> None:
    """Raises UserError for numbers out of range and flags that cannot go together."""
    check_ranges(f)
    for when, text in FLAG_RULES:
        if when(f):
            raise UserError(sentence_of(text, f))
    check_alloc_conf(f.alloc_conf)


def check_device(f, preset, device: torch.device, windowed: bool, world_size: int) -> list[str]:
    """Refuse flags that cannot work on this device with a UserError; returns a line for each that has no effect.

    preset: the preset's flags, with nothing overridden. windowed: whether a layer's window is shorter than the context.
    """
    cuda = device.type == "cuda"
    capability = torch.cuda.get_device_capability(device) if cuda else (0, 0)
    hw = SimpleNamespace(
        type=device.type,
        cuda=cuda,
        capability=capability,
        windowed=windowed,
        dtype=hardware_dtype(f.dtype, device),
        masked=windowed or f.doc_mask,
        world_size=world_size,
        preset=preset,
    )
    for when, text in DEVICE_RULES:
        if when(f, hw):
            raise UserError(sentence_of(text, f, hw))
    if f.compile != "off" or f.attn == "flex":
        check_compiler(device)
    return [sentence_of(text, f, hw) for when, text in NO_EFFECT if when(f, hw)]


def check_compiler(device: torch.device) -> None:
    """Raises UserError when torch.compile has nothing to compile with."""
    try:
        if device.type == "cuda":
            from torch.utils._triton import has_triton

            missing = "" if has_triton() else "no Triton for this GPU"
        else:
            from torch._inductor.cpp_builder import get_cpp_compiler

            missing = "" if get_cpp_compiler() else "no C++ compiler"
    except Exception as error:
        missing = f"no C++ compiler ({type(error).__name__})"
    if missing:
        raise UserError(f"--compile finds {missing}; install one (on a CPU: g++, or what CXX names) or remove it")


def check_recomputation(f, checkpointing: str, effects: dict) -> None:
    """Raises UserError if compiled blocks would recompute other values for the backward pass than they computed.

    checkpointing: the blocks' mode; effects: as warm_up returns them.
    """
    given = "--checkpointing" + f" {f.checkpointing}" * (f.checkpointing != "auto")
    if effects["drawn"] and activation_budget(f) < 1:
        raise UserError(
            f"{given} lets the compiler redraw random numbers, as of dropout, for the backward pass, which would make "
            "the gradients wrong; use --checkpointing full, selective or none"
        )
    if effects["written"] and f.compile != "off" and (checkpointing != "none" or activation_budget(f) < 1):
        raise UserError(
            f"{given} with --compile recomputes blocks with buffers as the forward pass left them ("
            f"{', '.join(effects['written'][:4])}), so gradients would be wrong; remove one of the two flags"
        )


def check_schedule(optimizer: torch.optim.Optimizer) -> None:
    """Raises UserError for learning rates set by others, e.g. PyTorch's schedulers: the trainer sets them itself."""
    changed = any(
        name in group and group[name] != value and group[f"initial_{name}"] == initial
        for group in optimizer.param_groups
        for name, (value, initial) in group.get("after_step", {}).items()
    )
    if hasattr(optimizer.step, "_wrapped_by_lr_sched") or changed:
        raise UserError(
            "something sets learning rates or momenta, as a torch.optim.lr_scheduler would, but update_weights "
            "overwrites them in each step; put the schedule into get_lr_multiplier or get_momentum, or change "
            '"initial_lr" or "initial_momentum" of a parameter group'
        )


def keep_rates(optimizer: torch.optim.Optimizer) -> None:
    """Notes the learning rates and momenta that a step leaves behind, for check_schedule."""
    for group in optimizer.param_groups:
        names = [name for name in ("lr", "momentum") if f"initial_{name}" in group]
        group["after_step"] = {name: (group[name], group[f"initial_{name}"]) for name in names}


def check_same_flags(before, now) -> None:
    """Raises UserError when a step has replaced the flags, which are settled when a run starts."""
    if now is not before:
        raise UserError(
            "state.cfg was replaced in training, where flags are no longer read, though a resume would read them; put "
            'schedules into get_lr_multiplier or get_momentum, or change "initial_lr" of a parameter group'
        )


def check_batch(get_batch) -> None:
    """Raises UserError if get_batch() is not a function of the step.

    It runs ahead of the steps in a thread, beside steps that draw from the global generators.
    """

    def states() -> list:
        _, key, *rest = np.random.get_state()
        return [random.getstate(), key.tolist(), rest, torch.get_rng_state().tolist()]

    before = states()
    batch, again = get_batch(), get_batch()
    if states() != before:
        raise UserError(
            "get_batch draws from a global generator, in its own thread, so that no two runs would be the same; draw "
            'from np.random.default_rng(derive_seed(stream.seed, "batch", step)), with dist_ctx.rank where ranks differ'
        )
    batch, again = (tree_leaves(parts) for parts in (batch, again))
    if not all(torch.equal(a, b) for a, b in zip(batch, again) if isinstance(a, Tensor)):
        raise UserError(
            "get_batch gives another batch when it is called again for the same step, so that a resumed run would see "
            "other data; it must be a function of stream, ranks and step, without iterators or generators that go on"
        )


ALLOC_CONF_KEYS = {
    "expandable_segments",
    "garbage_collection_threshold",
    "graph_capture_record_stream_reuse",
    "max_non_split_rounding_mb",
    "max_split_size_mb",
    "per_process_memory_fraction",
    "pinned_num_register_threads",
    "pinned_reserve_segment_size_mb",
    "pinned_use_background_threads",
    "pinned_use_cuda_host_register",
    "release_lock_on_cudamalloc",
    "roundup_power2_divisions",
    "throw_on_cudamalloc_oom",
}


def check_alloc_conf(text: str) -> None:
    """Raises UserError for settings unknown to PyTorch's allocator, which silently accepts many of them."""
    for part in filter(None, re.sub(r"\[.*?\]", "", text).split(",")):
        key, colon, _ = part.strip().partition(":")
        if key == "backend":
            raise UserError(
                "--alloc_conf cannot set backend, which is fixed when torch is imported; set PYTORCH_ALLOC_CONF in the "
                "environment instead"
            )
        if key not in ALLOC_CONF_KEYS or not colon:
            raise UserError(
                f"--alloc_conf has no setting {part.strip()!r}{closest(key, ALLOC_CONF_KEYS)}; expected key:value"
            )
