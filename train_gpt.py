"""Train a GPT: `python train_gpt.py [flags]`, or `torchrun --nproc_per_node=N train_gpt.py [flags]` on many devices.

Read from top to bottom: config, launch, data, build, step and evaluation, checkpoint, log, main loop.
`train(config(n_layer=2, ...))` does the same from Python, as often as you like in one process.
"""

import argparse
import contextlib
import ctypes
import dataclasses
import difflib
import errno
import functools
import hashlib
import json
import math
import os
import platform
import re
import shutil
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

if __name__ == "__main__":  # read as PyTorch and its compiler are imported; what is set already stays
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "10000")  # idle threads spin 30 times shorter, or shared cores crawl
    os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")  # or it compiles headers for each set of vector instructions
    os.environ.setdefault("AOT_INDUCTOR_ENABLE_LINE_TABLES", "0")  # those are for profilers of C++

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.attention import SDPBackend
from torch.nn.parallel import DistributedDataParallel

from data.prepare import HEADER_BYTES, UserError, find_shards, get_tokenizer, load_meta, prepare, read_shard, whole_file
from model import (
    GPT,
    SDPA_KERNELS,
    GPTConfig,
    Optimizer,
    attention_mask,
    generate,
    initial_weight,
    local,
    optimizer_groups,
    seed_of,
    shard_heights,
)

try:
    import fcntl  # not on Windows, where a run's folder is not locked
except ImportError:
    fcntl = None

HERE = Path(__file__).resolve().parent
SECTION = "=" * 40  # begins each part of log.txt
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
ATTENTION = ("auto", "sdpa", "flash", "cudnn", "efficient", "math", "blocked", "flex", "varlen", "fa3", "fa4")
COMPILE_MODES = ("off", "default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")


class Damaged(UserError):
    """A checkpoint whose bytes are not what was saved."""


class RunError(UserError):
    """What ends a run and is not the user's mistake, told in one sentence as well; exit code 1."""


# ---------------------------------------------------------------------------------------------------------------------
# 1. Config: every knob, declared once. Flags, help, checks, log and checkpoint follow from here.

PRESETS = {
    "laptop": dict(n_layer=4, n_head=1, n_embd=128, seq_len=256, batch_tokens=4096, max_steps=500, muon_lr=0.04,
                   adam_lr=0.012, eval_every=100, eval_tokens=131072),
    "gpt2-small": dict(n_layer=12, n_head=6, n_embd=768, save_every=1000),
    "gpt2-medium": dict(n_layer=24, n_head=8, n_embd=1024, max_steps=10000, save_every=1000),
    "gpt2-large": dict(n_layer=36, n_head=10, n_embd=1280, max_steps=20000, save_every=1000),
    "gpt2-xl": dict(n_layer=48, n_head=25, n_embd=1600, max_steps=40000, save_every=1000),
}  # fmt: skip


def knob(default, text, choices=None, bare=None, least=0):
    """A field of Config: default, help, values allowed, what the flag means without a value, the least of a number."""
    return field(default=default, metadata=dict(help=text, choices=choices, bare=bare, least=least))


@dataclass
class Config:
    # run
    preset: str = knob("laptop", "sizes and schedule to start from; any other flag overrides it", tuple(PRESETS))
    data: str = knob("", "folder of token shards from data/prepare.py (default: Python's standard library, made here)")
    out_dir: str = knob("", "folder of this run (default: runs/<time>-<preset>)")
    resume: str = knob("", "newest checkpoint in out_dir; auto: the same, or start if none; or a file", bare="newest")
    init_from: str = knob("", "checkpoint file to take the weights from, with a fresh schedule")
    seed: int = knob(0, "decides initial weights and the order of the data")
    trials: int = knob(1, "whole runs one after the other, with seeds from --seed on, in folders of out_dir", least=1)
    device: str = knob("auto", "auto is cuda where there is one, else cpu", ("auto", "cpu", "cuda", "mps"))
    # model
    n_layer: int = knob(12, "blocks", least=1)
    n_head: int = knob(6, "attention heads; a head of 128 dimensions is fastest", least=1)
    n_embd: int = knob(768, "width", least=1)
    seq_len: int = knob(1024, "context length in tokens", least=1)
    window: str = knob("L", "a letter a layer, repeated: L full context, S sliding window; SSSL:256 sets its size")
    vocab_size: int = knob(0, "rows of the head; 0 is the tokenizer's, rounded up to a multiple of 64")
    ngram: int = knob(0, "n-grams of 2 to so many tokens have embeddings too, found by hash; 0 is off")
    ngram_rows: int = knob(16384, "embeddings that all n-grams share", least=1)
    ngram_dropout: float = knob(0.0, "share of n-grams left out in training, lest it learn the corpus by heart")
    softcap: float = knob(15.0, "logits are squashed to within this; 0 is off")
    loss_chunk: int = knob(2048, "tokens whose logits exist at once; 0 is all of them")
    # optimizer
    optimizer: str = knob("muon", "muon is Muon for matrices, Adam for the rest; adamw the baseline", ("muon", "adamw"))
    muon_lr: float = knob(0.02, "learning rate of Muon")
    adam_lr: float = knob(0.0, "learning rate of Adam; 0 is 0.006 beside Muon, 0.002 alone (laptop: 0.012 and 0.008)")
    weight_decay: float = knob(0.05, "decoupled decay of the blocks' matrices (adamw: of all), times the learning rate")
    confidence_penalty: float = knob(0.0, "this times the entropy of the predictions is taken off the loss in training")
    grad_clip: float = knob(0.0, "largest gradient norm; 0 is off")
    batch_tokens: int = knob(524288, "tokens in one optimizer step, all devices together", least=1)
    micro_batch: int = knob(0, "sequences a device takes at once; 0 is as many as fit")
    max_steps: int = knob(5000, "optimizer steps; the schedules are fractions of it", least=1)
    max_minutes: float = knob(0.0, "stop after so many minutes of wall time; 0 is never")
    target_val_loss: float = knob(0.0, "stop when the validation loss is this low; 0 is never")
    warmup_frac: float = knob(0.0, "first part of the run, in which the learning rate rises from 0")
    cooldown_frac: float = knob(0.6, "last part of the run, in which the learning rate falls to 0")
    # systems
    compile: str = knob("off", "torch.compile every block, in this mode", COMPILE_MODES, bare="default")
    dtype: str = knob("auto", "of activations; auto is bf16 where the hardware has it, else fp32", ("auto", *DTYPES))
    bf16: bool = knob(False, "short for --dtype bf16", bare=True)
    fp8: bool = knob(False, "float8 matrix products in MLP and head (CUDA sm89 or newer)", bare=True)
    matmul_precision: str = knob("highest", "of fp32 products on CUDA; high is TF32", ("highest", "high", "medium"))
    attn: str = knob("auto", "attention backend; auto is PyTorch's choice, or blocked on a compiling CPU", ATTENTION)
    checkpointing: str = knob("none", "activations recomputed: none, selective, full, or a compiler's budget as 0.5")
    offload: str = knob("none", "what lives in host memory", ("none", "activations", "optimizer"))
    parallel: str = knob("auto", "several ranks: auto is ddp; fsdp shards weights, gradients and optimizer state",
                         ("auto", "ddp", "fsdp"))  # fmt: skip
    bucket_cap_mb: int = knob(25, "gradients that DDP sends together, in MB", least=1)
    alloc_conf: str = knob("", "settings of the CUDA allocator, as in expandable_segments:True,max_split_size_mb:512")
    deterministic: bool = knob(False, "only operations whose reruns give the same bits", bare=True)
    prefetch: int = knob(2, "batches prepared ahead in the background")
    doc_align: bool = knob(False, "training windows start where documents do; what does not fit is left out", bare=True)
    doc_mask: bool = knob(False, "no attention from one document to another", bare=True)
    # watching
    eval_every: int = knob(250, "steps between evaluations; 0 is at the end only")
    eval_tokens: int = knob(10485760, "validation tokens, rounded down to whole windows; 0 is all")
    save_every: int = knob(0, "steps between checkpoints; 0 is at the end only")
    keep: int = knob(2, "newest checkpoints kept; 0 is all")
    sample_every: int = knob(0, "steps between samples of text; 0 is at the end only")
    log_every: int = knob(10, "steps between logged steps", least=1)
    max_bad_steps: int = knob(10, "skipped steps in a row (loss or gradient not finite) that end the run; 0 is never")
    profile: int = knob(0, "steps to profile: a trace in out_dir and the ten most expensive operations", bare=5)
    wandb: bool = knob(False, "log to Weights & Biases too (WANDB_MODE=offline needs no network)", bare=True)


def config(**flags) -> Config:
    """A checked Config: the preset's values, with `flags` over them. Raises UserError for a wrong name or value."""
    fields = {f.name: f for f in dataclasses.fields(Config)}
    for name, value in flags.items():
        if name not in fields:
            raise UserError(f"there is no flag --{name}{closest(name, fields)}")
        kind, choices = type(fields[name].default), fields[name].metadata["choices"]
        if kind is float and type(value) is int:
            flags[name] = value = float(value)
        if type(value) is not kind:
            raise UserError(f"--{name} is {value!r}; expected {kind.__name__}")
        if choices and value not in choices:
            raise UserError(f"--{name} is {value!r}; expected one of {', '.join(choices)}{closest(value, choices)}")
    cfg = Config(**{**PRESETS[flags.get("preset", "laptop")], **flags})
    if cfg.preset == "laptop" and cfg.optimizer == "adamw" and "adam_lr" not in flags:
        cfg.adam_lr = 0.008  # the best of 0.002, 0.004, 0.008 and 0.016; the preset's is for Adam beside Muon
    if cfg.bf16:
        if cfg.dtype not in ("auto", "bf16"):
            raise UserError(f"--bf16 and --dtype {cfg.dtype} contradict each other; give one of them")
        cfg.dtype = "bf16"
    for name, f in fields.items():
        value, least = getattr(cfg, name), f.metadata["least"]
        if isinstance(value, (int, float)) and not least <= value < (math.inf if isinstance(value, float) else 2**48):
            raise UserError(f"--{name} is {value}; expected a finite number of at least {least} and below 2**48")
    if cfg.warmup_frac + cfg.cooldown_frac > 1:
        raise UserError(
            f"--warmup_frac {cfg.warmup_frac} and --cooldown_frac {cfg.cooldown_frac} add up to more than 1; lower one"
        )
    if cfg.n_embd % (2 * cfg.n_head):
        raise UserError(
            f"--n_embd {cfg.n_embd} cannot be cut into {cfg.n_head} heads of an even size; "
            f"make it a multiple of {2 * cfg.n_head} or change --n_head"
        )
    if cfg.batch_tokens % cfg.seq_len:
        near = max(1, round(cfg.batch_tokens / cfg.seq_len)) * cfg.seq_len
        raise UserError(
            f"--batch_tokens {cfg.batch_tokens} is not a multiple of --seq_len {cfg.seq_len}; use --batch_tokens {near}"
        )
    if cfg.ngram_dropout and (cfg.ngram < 2 or cfg.ngram_dropout >= 1):
        raise UserError(
            f"--ngram_dropout is {cfg.ngram_dropout:g} with --ngram {cfg.ngram}; expected a share below 1, and n-grams "
            "to leave out, as with --ngram 4"
        )
    if activation_budget(cfg) < 1 and cfg.compile == "off":
        raise UserError(f"--checkpointing {cfg.checkpointing} is a budget for the compiler; add --compile")
    if cuda_graphs(cfg) and cfg.parallel == "fsdp":
        raise UserError(
            f"--compile {cfg.compile} records CUDA graphs, which FSDP's moving weights break; "
            "use --compile max-autotune-no-cudagraphs or default"
        )
    if cfg.deterministic and cfg.compile.startswith("max-autotune"):
        raise UserError(
            f"--compile {cfg.compile} picks kernels by timing, so no rerun is sure to be the same; use default"
        )
    if cfg.profile and cfg.max_steps < cfg.profile + 3:
        raise UserError(f"--profile {cfg.profile} starts after 3 steps; use --max_steps {cfg.profile + 3} or more")
    allocator_keys(cfg.alloc_conf)
    if cfg.trials > 1 and cfg.target_val_loss:
        raise UserError("--trials compares runs of one length, so none may stop early; leave out --target_val_loss")
    if cfg.trials > 1 and cfg.resume not in ("", "auto"):
        raise UserError(f"--trials goes on with --resume auto, not with {cfg.resume!r}, which is about one run")
    if cfg.resume and cfg.init_from:
        raise UserError("--resume and --init_from contradict each other; give one of them")
    try:
        GPTConfig(window=cfg.window).layer_windows()
    except ValueError as error:
        raise UserError(f"--{error}") from None
    return cfg


def activation_budget(cfg: Config) -> float:
    """The share of activation memory that --checkpointing leaves the compiler; 1 for its modes. Raises UserError."""
    if cfg.checkpointing in ("none", "selective", "full"):
        return 1.0
    try:
        budget = float(cfg.checkpointing)
    except ValueError:
        budget = math.nan
    if not 0 < budget < 1:
        raise UserError(
            f"--checkpointing is {cfg.checkpointing!r}; expected none, selective, full or a number between 0 and 1"
        )
    return budget


ALLOCATOR_KEYS = {
    "expandable_segments", "garbage_collection_threshold", "graph_capture_record_stream_reuse",
    "max_non_split_rounding_mb", "max_split_size_mb", "per_process_memory_fraction", "pinned_num_register_threads",
    "pinned_reserve_segment_size_mb", "pinned_use_background_threads", "pinned_use_cuda_host_register",
    "release_lock_on_cudamalloc", "roundup_power2_divisions", "throw_on_cudamalloc_oom",
}  # fmt: skip


def allocator_keys(text: str) -> None:
    """Raises UserError for what PyTorch's allocator does not know: it would accept much of that without a word."""
    for part in filter(None, re.sub(r"\[.*?\]", "", text).split(",")):
        key, colon, _ = part.strip().partition(":")
        if key == "backend":
            raise UserError(
                "--alloc_conf cannot set backend, which is fixed when torch is imported; set PYTORCH_ALLOC_CONF in the "
                "environment instead"
            )
        if key not in ALLOCATOR_KEYS or not colon:
            raise UserError(
                f"--alloc_conf has no setting {part.strip()!r}{closest(key, ALLOCATOR_KEYS)}; expected key:value"
            )


def closest(name: str, names) -> str:
    near = difflib.get_close_matches(name, list(names), 1, 0.5)
    return f"; did you mean {near[0]}?" if near else "; --help lists them"


def given_flags(argv: list[str]) -> dict:
    """The flags that a command line names, with their values. Raises UserError."""

    class Parser(argparse.ArgumentParser):
        def error(self, message):
            raise UserError(f"{message}; --help lists the flags")

    def boolean(text: str) -> bool:
        if text.lower() not in ("true", "1", "false", "0"):
            raise ValueError
        return text.lower() in ("true", "1")

    boolean.__name__ = "true or false"

    parser = Parser(prog="train_gpt.py", allow_abbrev=False,
                    description=__doc__.split("\n")[0] + " In brackets: the defaults of --preset laptop.",
                    argument_default=argparse.SUPPRESS)  # fmt: skip
    for f in dataclasses.fields(Config):
        kind, meta = type(f.default), f.metadata
        default = PRESETS["laptop"].get(f.name, f.default)
        default = "" if default == "" else f" [{str(default).lower() if kind is bool else default}]"
        metavar = None if meta["choices"] else {bool: "true|false", str: "TEXT"}.get(kind, kind.__name__.upper())
        bare = {"nargs": "?", "const": meta["bare"]} if meta["bare"] else {}
        parser.add_argument(f"--{f.name}", type=boolean if kind is bool else kind, choices=meta["choices"],
                            metavar=metavar, help=(meta["help"] + default).replace("%", "%%"), **bare)  # fmt: skip
    flags, unknown = parser.parse_known_args(argv)
    if unknown:
        name = unknown[0].lstrip("-").split("=")[0]
        raise UserError(f"there is no flag {unknown[0]}{closest(name, [f.name for f in dataclasses.fields(Config)])}")
    return vars(flags)


def parse_flags(argv: list[str]) -> Config:
    """The Config that a command line asks for. Raises UserError."""
    return config(**given_flags(argv))


# ---------------------------------------------------------------------------------------------------------------------
# 2. Launch: device, ranks, threads


@dataclass
class Launch:
    """Where this process runs. `control` is a CPU group for decisions, so that asking never waits for the GPU."""

    device: torch.device
    rank: int = 0
    world: int = 1
    local_rank: int = 0
    control: dist.ProcessGroup | None = None


def launch(cfg: Config) -> Launch:
    """Choose the device and join the other ranks, if torchrun started any. Raises UserError."""
    env = {key: int(os.environ.get(key, default)) for key, default in
           dict(RANK=0, WORLD_SIZE=1, LOCAL_RANK=0, LOCAL_WORLD_SIZE=1).items()}  # fmt: skip
    if not cfg.out_dir and int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", 0)) > 0:
        raise UserError("torchrun --max-restarts needs a folder to come back to; give --out_dir")
    device = device_of(cfg)
    if device.type == "mps" and env["WORLD_SIZE"] > 1:
        raise UserError("--device mps is for one process; start it with python, not torchrun, or use --device cpu")
    if cfg.alloc_conf and not any(map(os.environ.get, ALLOCATOR_VARIABLES)):  # the user's wins; read as CUDA starts
        os.environ.update(dict.fromkeys(ALLOCATOR_VARIABLES, cfg.alloc_conf))
    if cfg.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    if device.type == "cuda":
        if env["LOCAL_RANK"] >= torch.cuda.device_count():
            raise UserError(
                f"{env['LOCAL_WORLD_SIZE']} processes were started for {torch.cuda.device_count()} CUDA device(s); "
                f"use torchrun --nproc_per_node={torch.cuda.device_count()}"
            )
        device = torch.device("cuda", env["LOCAL_RANK"])
        torch.cuda.set_device(device)
    elif device.type == "cpu":
        keep_freed_memory()
        if env["LOCAL_WORLD_SIZE"] > 1 and os.environ.get("OMP_NUM_THREADS") == "1":  # torchrun's doing, not the user's
            torch.set_num_threads(max(1, cpu_cores() // env["LOCAL_WORLD_SIZE"]))
    if cfg.deterministic != torch.are_deterministic_algorithms_enabled():  # the call imports the compiler: a second
        torch.use_deterministic_algorithms(cfg.deterministic)
    torch.set_float32_matmul_precision(cfg.matmul_precision)
    if ("WORLD_SIZE" in os.environ or cfg.parallel == "fsdp") and not dist.is_initialized():
        on_cuda = device.type == "cuda"
        store = dist.HashStore()
        if "WORLD_SIZE" in os.environ:  # torchrun keeps its store over a restart, and the dead ranks' addresses in it
            store = next(dist.rendezvous("env://"))[0]
            life = store.add(f"lives of rank {env['RANK']}", 1)  # torchrun's own count differs between nodes
            store = dist.PrefixStore(f"life {life}", store)
        dist.init_process_group("nccl" if on_cuda else "gloo", device_id=device if on_cuda else None, store=store,
                                rank=env["RANK"], world_size=env["WORLD_SIZE"])  # fmt: skip
    control = None
    if dist.is_initialized():
        control = dist.new_group(backend="gloo") if device.type == "cuda" else dist.group.WORLD
    return Launch(device, env["RANK"], env["WORLD_SIZE"], env["LOCAL_RANK"], control)


def keep_freed_memory() -> None:
    """Have glibc keep what a step frees for the next one: given back, it costs a page fault for every 4 KiB again.

    Other C libraries are left alone, and so is one that the environment sets up (GLIBC_TUNABLES, MALLOC_...).
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt and not any(name == "GLIBC_TUNABLES" or name.startswith("MALLOC_") for name in os.environ):
        mallopt(-4, 0)  # M_MMAP_MAX: large blocks come from the heap as well ...
        mallopt(-1, -1)  # M_TRIM_THRESHOLD: ... which never shrinks


ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


def check_device(cfg: Config, device: torch.device) -> list[str]:
    """Refuse flags that cannot work on this device with a UserError; returns a line for each that has no effect."""
    cuda, dtype = device.type == "cuda", dtype_of(cfg, device)
    masked = cfg.doc_mask or any(GPTConfig(window=cfg.window, seq_len=cfg.seq_len).layer_windows())
    if cfg.attn == "flex" and not cuda:
        raise UserError(
            "--attn flex cannot train here: FlexAttention has a backward pass on CUDA only; use --attn sdpa"
        )
    if cfg.attn in ("cudnn", "efficient", "varlen", "fa3", "fa4") and not cuda:
        raise UserError(f"--attn {cfg.attn} runs on CUDA only, not on {device.type}; use auto, blocked or sdpa")
    if cfg.attn in ("flash", "fa3", "fa4") and cuda and masked:
        raise UserError(f"--attn {cfg.attn} takes no mask, as --window and --doc_mask need; use --attn flex or varlen")
    if cfg.attn in ("flash", "cudnn", "varlen", "fa3", "fa4") and cuda and dtype == "fp32":
        raise UserError(f"--attn {cfg.attn} needs bf16 or fp16; add --bf16, or use --attn efficient")
    if cuda and cfg.attn == "flash" and hasattr(torch.nn.attention, "restore_flash_attention_impl"):
        torch.nn.attention.restore_flash_attention_impl()  # an earlier run in this process may have taken another
    if cfg.attn in ("fa3", "fa4"):
        try:
            torch.nn.attention.activate_flash_attention_impl(cfg.attn.upper())
        except Exception as error:  # whatever its package raises
            raise UserError(f"--attn {cfg.attn} needs a package that does not load ({error}); use flash") from None
    if cfg.fp8 and (not cuda or torch.cuda.get_device_capability(device) < (8, 9)):
        raise UserError("--fp8 needs a CUDA device of compute capability 8.9 or newer (L4, RTX 40, H100); leave it out")
    if cfg.fp8 and (dtype != "bf16" or cfg.n_embd % 16 or cfg.vocab_size % 16):
        raise UserError(
            f"--fp8 goes with bf16 and sizes that 16 divides, not with {dtype}, --n_embd {cfg.n_embd} and --vocab_size "
            f"{cfg.vocab_size}"
        )
    if cfg.parallel == "fsdp" and device.type == "mps":
        raise UserError("--parallel fsdp does not run on MPS; leave it out")
    if cfg.parallel == "fsdp" and cuda and not cfg.micro_batch:
        raise UserError(
            "--parallel fsdp cannot probe memory, as a rank that runs out would hang the others; give --micro_batch"
        )
    if cfg.deterministic and cuda and (not cfg.micro_batch or cfg.attn == "cudnn"):
        raise UserError("--deterministic on CUDA needs a given --micro_batch, and another --attn than cudnn")
    if cfg.attn == "flex" and cfg.checkpointing == "selective" and cfg.compile == "off":
        raise UserError("--checkpointing selective cannot see into uncompiled FlexAttention; add --compile")
    if cuda_graphs(cfg) and cuda and (cfg.offload == "activations" or cfg.attn == "varlen" and cfg.doc_mask):
        raise UserError(
            f"--compile {cfg.compile} records CUDA graphs, which want activations in their places and as many "
            "documents each time; use --compile max-autotune-no-cudagraphs or default"
        )
    if cfg.compile != "off" or cfg.attn == "flex":
        check_compiler(device)
    lines = []
    if cfg.alloc_conf and not cuda:
        lines.append(f"--alloc_conf has no effect on {device.type}: it is about CUDA memory")
    elif cfg.alloc_conf and os.environ.get(ALLOCATOR_VARIABLES[0]) != cfg.alloc_conf:
        lines.append("--alloc_conf gives way to PYTORCH_ALLOC_CONF, as the environment or an earlier run here set it")
    if cfg.offload != "none" and not cuda:
        lines.append(f"--offload {cfg.offload} has no effect on {device.type}: everything is in host memory already")
    if masked and cfg.attn in ("auto", "sdpa") and cuda:
        lines.append("a window or document mask keeps SDPA from its flash kernel; --attn flex or varlen takes them")
    return lines


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
        raise UserError(f"--compile finds {missing}; install one (on a CPU: g++, or what CXX names) or leave it out")


def cpu_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


def device_of(cfg: Config) -> torch.device:
    """The kind of device to run on. Raises UserError when it is not there."""
    kind = cfg.device if cfg.device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    if kind == "cuda" and not torch.cuda.is_available():
        raise UserError(
            "--device cuda was asked for, but PyTorch sees no CUDA device here; use --device cpu, or install a CUDA "
            "build of PyTorch and check that nvidia-smi works"
        )
    if kind == "mps" and not torch.backends.mps.is_available():
        raise UserError("--device mps was asked for, but PyTorch sees no Apple GPU here; use --device cpu")
    return torch.device(kind)


def attention_of(cfg: Config, device: torch.device) -> str:
    """The attention backend: auto is PyTorch's choice, and `blocked` where that is faster and needs little memory."""
    compiled_cpu = device.type == "cpu" and cfg.compile != "off"
    return "blocked" if cfg.attn == "auto" and compiled_cpu and cfg.seq_len <= 1024 else cfg.attn


def dtype_of(cfg: Config, device: torch.device) -> str:
    """bf16 or fp32. Auto takes bf16 only where the hardware has it: CUDA sm80+, CPUs with AMX or AVX512-BF16."""
    if cfg.dtype != "auto":
        return cfg.dtype
    if device.type == "cuda":
        return "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp32"
    if device.type == "cpu":
        flags = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
        return "bf16" if "amx_bf16" in flags or "avx512_bf16" in flags else "fp32"
    return "fp32"


def from_rank0(run_on: Launch, function):
    """Call `function` on rank 0 and return its result on every rank; a UserError is raised on every rank too."""
    answer = [None, None]
    if run_on.rank == 0:
        try:
            answer[0] = function()
        except UserError as error:
            answer[1] = error
    if run_on.world > 1:
        dist.broadcast_object_list(answer, src=0, group=run_on.control)
    if answer[1] is not None:
        raise answer[1]
    return answer[0]


def largest(run_on: Launch, value: float) -> float:
    """The largest of all ranks' values, on every rank."""
    if run_on.world == 1:
        return value
    box = torch.tensor(float(value), dtype=torch.float64)
    dist.all_reduce(box, dist.ReduceOp.MAX, group=run_on.control)
    return box.item()


# ---------------------------------------------------------------------------------------------------------------------
# 3. Data: the stream of training windows is a pure function of (seed, step)


class Split:
    """The shards of one split as one long row of tokens, read and not mapped: a mapped file that shrinks kills."""

    CHECKED = 1 << 28  # tokens checked on opening: against the vocabulary, and the shard against its hash
    PIECE = 1 << 22  # tokens read at once where all are read

    def __init__(self, folder: Path, split: str, vocab_size: int, sha256: dict[str, str] | None = None):
        """sha256: the hashes of shards by name, where they are known. Raises UserError for what is not as it should."""
        self.paths, self.vocab_size = find_shards(folder, split), vocab_size
        shards = [read_shard(path) for path in self.paths]
        self.lengths, self.dtypes = [len(shard) for shard in shards], [shard.dtype for shard in shards]
        self.ends = np.cumsum(self.lengths)
        self.n_tokens = int(self.ends[-1])
        unchecked = self.CHECKED
        for i, path in enumerate(self.paths):
            expected = (sha256 or {}).get(path.name) if self.lengths[i] <= unchecked else None
            digest = hashlib.sha256(self.bytes_of(i, 0, HEADER_BYTES))
            for begin in range(0, min(unchecked, self.lengths[i]), self.PIECE):
                tokens = self.piece(i, begin, self.PIECE)
                self.check(tokens, path)
                if expected:
                    digest.update(tokens)
            if expected and digest.hexdigest() != expected:
                raise UserError(f"{path} is not the shard whose hash meta.json holds; prepare the data again")
            unchecked = max(0, unchecked - self.lengths[i])

    def bytes_of(self, i: int, offset: int, size: int) -> bytes:
        """Bytes of shard i. Raises UserError when they are there no more."""
        error = ""
        try:
            with open(self.paths[i], "rb") as file:  # not kept open: a corpus may have more shards than a process files
                file.seek(offset)
                raw = file.read(size)
        except OSError as e:
            raw, error = b"", f" ({e})"
        if len(raw) < size:
            raise UserError(
                f"{self.paths[i]} ended at byte {offset + len(raw)} while it was in use{error}, where {offset + size} "
                "or more are expected; put the whole shard back and --resume"
            )
        return raw

    def piece(self, i: int, begin: int, count: int) -> np.ndarray:
        """At most `count` tokens of shard i from its token `begin` on, of the file's own type. Raises UserError."""
        size, count = self.dtypes[i].itemsize, min(count, self.lengths[i] - begin)
        return np.frombuffer(self.bytes_of(i, HEADER_BYTES + begin * size, count * size), self.dtypes[i])

    def sample_hash(self, i: int) -> str:
        """SHA-256 over 16 pieces of 2,048 tokens of shard i, evenly spread: all of a small shard."""
        last = max(0, self.lengths[i] - 2048)
        pieces = (self.piece(i, last * k // 15, 2048) for k in range(16))
        return hashlib.sha256(str(self.lengths[i]).encode() + b"".join(map(np.ndarray.tobytes, pieces))).hexdigest()

    def check(self, tokens: np.ndarray, path: Path) -> None:
        if tokens.size and (worst := int(tokens.max())) >= self.vocab_size:
            raise UserError(
                f"{path} holds token {worst}, but the vocabulary ends at {self.vocab_size - 1}; "
                f"make the data again with the tokenizer that meta.json names, or raise --vocab_size"
            )

    def read(self, starts: np.ndarray, length: int) -> np.ndarray:
        """Windows of `length` tokens from each start, int64 (len(starts), length)."""
        out = np.empty((len(starts), length), dtype=np.int64)
        for row, start in zip(out, starts.tolist()):
            filled, i = 0, int(np.searchsorted(self.ends, start, side="right"))
            while filled < length:  # a window may run over the end of a shard
                piece = self.piece(i, start + filled - int(self.ends[i]) + self.lengths[i], length - filled)
                row[filled : filled + len(piece)] = piece
                filled, i = filled + len(piece), i + 1
            if row.max() >= self.vocab_size:
                self.check(row, self.paths[i - 1])
        return out


def permuted(index: np.ndarray, n: int, key: int) -> np.ndarray:
    """Where a pseudo-random permutation of range(n) sends each index, uint64; computed, never stored.

    A Feistel network over the next power of four, walked until it lands inside the range (Black and Rogaway 2002).
    """
    half = np.uint64(max(1, ((n - 1).bit_length() + 1) // 2))
    mask = np.uint64((1 << int(half)) - 1)
    keys = np.frombuffer(hashlib.sha256(str(key).encode()).digest(), dtype=np.uint64)
    out = index.astype(np.uint64)
    todo = np.ones(len(out), dtype=bool)
    while todo.any():
        left, right = out[todo] >> half, out[todo] & mask
        for k in keys:
            mixed = (right + k) * np.uint64(0x9E3779B97F4A7C15)
            mixed = (mixed ^ (mixed >> np.uint64(29))) * np.uint64(0xBF58476D1CE4E5B9)
            left, right = right, left ^ ((mixed >> np.uint64(32)) & mask)
        out[todo] = (left << half) | right
        todo = out >= n
    return out


def document_windows(split: Split, eot: int, seq_len: int) -> np.ndarray:
    """Starts of windows that begin with a document and do not overlap, int64 (n,); rests of documents are left out."""
    starts = []
    for i, length in enumerate(split.lengths):
        for begin in range(0, length, split.PIECE):
            found = np.flatnonzero(split.piece(i, begin, split.PIECE) == eot)
            starts.append(found + begin + int(split.ends[i]) - length)
    starts = np.concatenate(starts)
    starts = starts[starts + seq_len < split.n_tokens]
    following, chosen, i = np.searchsorted(starts, starts + seq_len).tolist(), [], 0
    while i < len(starts):
        chosen.append(i)
        i = following[i]
    return starts[chosen].astype(np.int64)


def window_starts(
    rows: np.ndarray, n_tokens: int, seq_len: int, seed: int, aligned: np.ndarray | None = None
) -> np.ndarray:
    """Where the training windows with these numbers start, int64 (len(rows),).

    Each epoch cuts the stream into windows of stride seq_len from its own offset and visits them in its own order;
    with `aligned`, the windows are those of document_windows.
    """
    n_windows = windows_per_epoch(n_tokens, seq_len, aligned)
    offsets = min(seq_len, n_tokens - n_windows * seq_len)
    starts = np.empty(len(rows), dtype=np.int64)
    epochs = rows // n_windows
    for epoch in np.unique(epochs):
        here = epochs == epoch
        key = seed_of(seed, epoch)
        order = permuted(rows[here] % n_windows, n_windows, key)
        starts[here] = key % offsets + seq_len * order.astype(np.int64) if aligned is None else aligned[order]
    return starts


def windows_per_epoch(n_tokens: int, seq_len: int, aligned: np.ndarray | None = None) -> int:
    return max(1, (n_tokens - seq_len) // seq_len) if aligned is None else len(aligned)


def position(data: "Data", cfg: Config, step: int) -> dict:
    """Where in the stream the batch of `step` starts, and what decides which stream it is."""
    windows = windows_per_epoch(data.train.n_tokens, cfg.seq_len, data.aligned)
    epoch, window = divmod(step * (cfg.batch_tokens // cfg.seq_len), windows)
    return dict(seed=cfg.seed, seq_len=cfg.seq_len, windows=windows, epoch=epoch, window=window)


def train_batch(data: "Data", cfg: Config, run_on: Launch, step: int) -> Tensor:
    """This rank's part of step's global batch: inputs and one target more, int64 (rows, seq_len + 1), on the CPU."""
    rows = cfg.batch_tokens // cfg.seq_len
    share = rows // run_on.world
    mine = step * rows + run_on.rank * share + np.arange(share, dtype=np.int64)
    starts = window_starts(mine, data.train.n_tokens, cfg.seq_len, cfg.seed, data.aligned)
    windows = torch.from_numpy(data.train.read(starts, cfg.seq_len + 1))
    return windows.pin_memory() if run_on.device.type == "cuda" else windows  # copied without holding up the host


def prefetched(load, first: int, last: int, depth: int):
    """load(first), ..., load(last - 1), in order, each prepared up to `depth` calls ahead by a background thread."""
    pool = ThreadPoolExecutor(1, thread_name_prefix="prefetch")
    try:
        ahead, following = deque(), first
        for _ in range(first, last):
            while following < last and len(ahead) <= depth:
                ahead.append(pool.submit(load, following))
                following += 1
            yield ahead.popleft().result()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


@dataclass
class Data:
    """A prepared folder: what its meta.json says, and its two splits."""

    folder: Path
    meta: dict
    train: Split
    val: Split
    aligned: np.ndarray | None = None  # windows of --doc_align

    @functools.cached_property
    def shards(self) -> list[list[tuple[str, int, str]]]:
        """Name, tokens and hash of a sample of each shard, of the training and of the validation split."""
        return [
            [(path.name, split.lengths[i], split.sample_hash(i)) for i, path in enumerate(split.paths)]
            for split in (self.train, self.val)
        ]

    def fingerprint(self) -> str:
        """Names the data: its shards and the hashes that meta.json records. A checkpoint keeps it."""
        return hashlib.sha256(json.dumps([self.shards, self.meta["files"]], sort_keys=True).encode()).hexdigest()


def data_folder(cfg: Config) -> Path:
    return Path(cfg.data or HERE / "data" / "python")


def recorded_hashes(meta: dict) -> dict[str, str | None]:
    """SHA-256 of each shard, by name, as meta.json records it."""
    return {name: shard.get("sha256") for name, shard in meta["files"].items()}


def open_data(cfg: Config, run_on: Launch) -> Data:
    """The data folder, checked; makes the default corpus first. Raises UserError."""
    folder = data_folder(cfg)
    error = ""
    if not cfg.data and run_on.local_rank == 0:  # each node has its own standard library
        try:
            prepare("python", out=folder)
        except UserError as e:
            error = str(e)
    if largest(run_on, bool(error)):
        raise UserError(error or "another rank could not make the default corpus; see its message")
    meta = load_meta(folder)
    if 0 < cfg.vocab_size < meta["vocab_size"]:
        raise UserError(
            f"--vocab_size {cfg.vocab_size} is less than the {meta['vocab_size']} of {folder}'s tokenizer; raise it"
        )
    vocab_size = max(cfg.vocab_size, meta["vocab_size"])
    hashes = recorded_hashes(meta)
    data = Data(folder, meta, *(Split(folder, split, vocab_size, hashes) for split in ("train", "val")))
    train, val = data.shards
    there = {name: tokens for name, tokens, _ in train + val}
    for name, shard in meta["files"].items():
        if there.get(name) != shard["tokens"]:
            found = f"has {there[name]} tokens" if name in there else "is missing"
            raise UserError(
                f"{folder / name} {found}, where meta.json says {shard['tokens']} tokens; prepare the data again"
            )
    for a in train:
        for b in val:
            if a[1:] == b[1:]:
                raise UserError(
                    f"{folder} has the same tokens for training in {a[0]} and for validation in {b[0]}; take one away"
                )
    if unknown := meta["files"] and sorted(there.keys() - meta["files"].keys()):
        raise UserError(f"{folder / unknown[0]} is a shard that {folder / 'meta.json'} does not name; take it away")
    for name, split in (("train", data.train), ("val", data.val)):
        if split.n_tokens <= cfg.seq_len:
            raise UserError(
                f"the {name} split of {folder} has {split.n_tokens} tokens, too few for one window of --seq_len "
                f"{cfg.seq_len} and a target; use a --seq_len below {split.n_tokens} or more data"
            )
    if cfg.doc_align:
        data.aligned = document_windows(data.train, meta["eot"], cfg.seq_len)
        if not len(data.aligned):
            raise UserError(
                f"--doc_align finds no document in {folder} with {cfg.seq_len} tokens behind its start (token "
                f"{meta['eot']}); use a smaller --seq_len or leave it out"
            )
    if largest(run_on, data.fingerprint() != from_rank0(run_on, data.fingerprint)):
        raise UserError(f"the ranks see different data in {folder}; give every node the same --data folder")
    return data


# ---------------------------------------------------------------------------------------------------------------------
# 4. Build


@dataclass
class Run:
    """What a training step works on. `model` is what is called; `gpt` is the same model without wrappers."""

    cfg: Config
    on: Launch
    gpt: GPT
    model: nn.Module
    optimizer: Optimizer
    scaler: torch.amp.GradScaler
    micro_batch: int
    skipped: deque  # of the last --log_every steps, bool () on the device: whether the update was skipped
    bad_steps: int = 0  # skipped updates in a row, as of the last report

    @property
    def grad_accum_steps(self) -> int:
        return self.cfg.batch_tokens // self.cfg.seq_len // self.on.world // self.micro_batch


def divisors(n: int) -> list[int]:
    return [d for i in range(1, math.isqrt(n) + 1) if n % i == 0 for d in (i, n // i)]


def rows_per_rank(cfg: Config, world: int) -> int:
    """Sequences that each rank takes per step. Raises UserError when they cannot be shared out."""
    rows = cfg.batch_tokens // cfg.seq_len
    if rows % world:
        near = max(1, round(rows / world)) * world * cfg.seq_len
        raise UserError(
            f"--batch_tokens {cfg.batch_tokens} is {rows} sequences of {cfg.seq_len}, which {world} ranks "
            f"cannot share evenly; use --batch_tokens {near}"
        )
    rows //= world
    if cfg.micro_batch and rows % cfg.micro_batch:
        fits = max(m for m in divisors(rows) if m <= cfg.micro_batch)
        raise UserError(
            f"--micro_batch {cfg.micro_batch} does not divide the {rows} sequences that each rank takes per step; "
            f"use --micro_batch {fits}, or another --batch_tokens"
        )
    return rows


def model_config(cfg: Config, vocab_size: int) -> GPTConfig:
    """The model's shape, for a tokenizer with so many tokens."""
    shape = {f.name: getattr(cfg, f.name) for f in dataclasses.fields(GPTConfig) if hasattr(cfg, f.name)}
    shape["vocab_size"] = cfg.vocab_size or -(-vocab_size // 64) * 64  # matrix products like multiples of 64
    return GPTConfig(**shape)


def build(cfg: Config, run_on: Launch, vocab_size: int, eot: int | None = None) -> Run:
    """The model and its optimizer, ready to step: weights are drawn from the seed, after the compiler is warm."""
    dtype, device, fsdp = DTYPES[dtype_of(cfg, run_on.device)], run_on.device, cfg.parallel == "fsdp"
    budget = activation_budget(cfg)
    if cfg.compile != "off" and device.type == "cpu":
        precompile_header()
    with torch.device("meta" if fsdp else device):
        gpt = GPT(model_config(cfg, vocab_size), dtype, cfg.loss_chunk, attn=attention_of(cfg, device), fp8=cfg.fp8,
                  checkpointing=cfg.checkpointing if budget == 1 else "none", doc_eot=eot if cfg.doc_mask else None,
                  offload=cfg.offload == "activations" and device.type == "cuda",
                  ngram_dropout=cfg.ngram_dropout, confidence_penalty=cfg.confidence_penalty)  # fmt: skip
    if fsdp:
        shard(gpt, device, dtype)
    micro_batch = cfg.micro_batch or fit_micro_batch(gpt, cfg, run_on)
    if cfg.compile != "off" or cfg.attn == "flex":
        torch._dynamo.reset()  # what else was compiled in this process counts against the limit of recompilations
    if cfg.compile != "off":
        torch._dynamo.config.optimize_ddp = False  # it cuts blocks in pieces, which overlap with sending as they are
        torch._functorch.config.activation_memory_budget = budget
        gpt.compile_parts(cfg.compile)
    model = gpt
    if run_on.world > 1 and not fsdp:
        model = DistributedDataParallel(gpt, gradient_as_bucket_view=True, broadcast_buffers=False,
                                        bucket_cap_mb=cfg.bucket_cap_mb)  # fmt: skip
    if cuda_graphs(cfg):
        for p in gpt.parameters():
            p.grad = torch.zeros_like(p)
    if cfg.compile != "off" or device.type == "cuda" or run_on.world > 1:  # DDP sorts its buckets in step 1
        warm_up(model, micro_batch, cfg)
    for name, param in gpt.named_parameters():
        put(param, initial_weight(name, param.shape, cfg.seed))
    groups = optimizer_groups(gpt, cfg.optimizer, *learning_rates(cfg), cfg.weight_decay)
    optimizer = Optimizer(groups, ns_dtype=torch.float32 if dtype == torch.float32 else torch.bfloat16,
                          offload=cfg.offload == "optimizer")  # fmt: skip
    scaler = torch.amp.GradScaler(device.type, enabled=dtype == torch.float16)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    return Run(cfg, run_on, gpt, model, optimizer, scaler, micro_batch, deque(maxlen=cfg.log_every))


def precompile_header() -> None:
    """Starts g++ on PyTorch's header, which every kernel includes, while the model is made and traced."""
    from torch._inductor.codecache import CppPythonBindingsCodeCache

    def work():
        with contextlib.suppress(Exception):  # what matters will stop the compiler too, and be told once
            CppPythonBindingsCodeCache.load_async("")

    threading.Thread(target=work).start()


def shard(gpt: GPT, device: torch.device, dtype: torch.dtype) -> None:
    """FSDP2: blocks first, then the rest, from the meta device; the weights are still to be put in."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    for module in (*gpt.blocks, gpt):
        fully_shard(module, mesh=mesh, mp_policy=policy)
    gpt.to_empty(device=device)
    gpt.reset_buffers()


def reshard(model: nn.Module) -> None:
    """After a forward pass without a backward one, FSDP's root still holds whole parameters: back to shards."""
    if hasattr(model, "reshard"):
        model.reshard()


@torch.no_grad()
def put(param: Tensor, full: Tensor, part: Tensor | None = None) -> None:
    """Copy a full tensor into a parameter, or into `part` of its size: under FSDP, the rows that this rank holds."""
    part = local(param) if part is None else part
    if hasattr(param, "to_local") and full.dim():
        full = full.split(shard_heights(len(full), dist.get_world_size()))[dist.get_rank()]
    part.copy_(full)


def gathered(param: Tensor, part: Tensor) -> Tensor:
    """The full tensor of which `part` is this rank's share, cut as the parameter is."""
    if hasattr(param, "to_local") and part.dim():
        from torch.distributed.tensor import DTensor

        part = DTensor.from_local(part.to(param.device), param.device_mesh, param.placements, run_check=False,
                                  shape=param.shape, stride=param.stride()).full_tensor()  # fmt: skip
    return part.detach()


def learning_rates(cfg: Config) -> tuple[float, float]:
    """Muon's and Adam's. Adam's own default depends on whether it has the matrices to train as well."""
    return cfg.muon_lr, cfg.adam_lr or (0.006 if cfg.optimizer == "muon" else 0.002)


def forward_backward(model: nn.Module, rows: int, cfg: Config) -> None:
    """One micro-step on dummy tokens, for what it compiles, loads or allocates."""
    x = torch.zeros((rows, cfg.seq_len), dtype=torch.int64, device=next(model.parameters()).device)
    mark_step(cfg)
    (model(x, x) / x.numel()).backward()


def warm_up(model: nn.Module, micro_batch: int, cfg: Config) -> None:
    """Compile and load kernels for training and evaluation before weights exist, so that nothing needs restoring."""
    for _ in range(3 if cuda_graphs(cfg) else 1):  # a graph is recorded at the second call
        forward_backward(model, micro_batch, cfg)
    model.zero_grad(set_to_none=not cuda_graphs(cfg))
    x = torch.zeros((micro_batch, cfg.seq_len), dtype=torch.int64, device=next(model.parameters()).device)
    for _ in range(3 if cuda_graphs(cfg) else 1):
        mark_step(cfg)
        with torch.no_grad():
            model(x, x)
    reshard(model)


def fit_micro_batch(gpt: GPT, cfg: Config, run_on: Launch) -> int:
    """As many sequences as fit. On a GPU by memory; elsewhere as many as make 8,192 tokens, more being no faster."""
    rows = rows_per_rank(cfg, run_on.world)
    if run_on.device.type != "cuda":
        return max(m for m in divisors(rows) if m * cfg.seq_len <= max(8192, cfg.seq_len))

    def peak(micro_batch: int) -> float:
        """Bytes at the peak of a micro-step, the largest of the ranks; infinite when one ran out of memory."""
        torch.cuda.reset_peak_memory_stats()
        try:
            forward_backward(gpt, micro_batch, cfg)
            used = torch.cuda.max_memory_allocated()
        except torch.OutOfMemoryError:
            used = math.inf
        torch.cuda.empty_cache()
        return largest(run_on, used)

    for p in gpt.parameters():
        p.grad = torch.zeros_like(p)  # as they are there in all micro-steps but the first
    free, total = torch.cuda.mem_get_info()
    budget = 0.92 * min(free + torch.cuda.memory_reserved(), total * torch.cuda.get_per_process_memory_fraction())
    if cfg.offload != "optimizer":
        budget -= 2 * sum(p.nbytes for p in gpt.parameters())  # the optimizer's state is not there yet
    fits = largest_that_fits(rows, peak, -largest(run_on, -budget))
    gpt.zero_grad(set_to_none=True)
    return fits


def largest_that_fits(rows: int, peak, budget: float) -> int:
    """A large divisor of rows whose peak(micro_batch) is within budget, by measuring what is predicted to fit.

    Each prediction is a line through the last two measurements; what does not fit after all is halved. Raises UserError
    when not even one sequence fits.
    """
    one = peak(1)
    if one > budget:
        raise UserError(
            f"one sequence needs {one / 2**30:.1f} GiB, of {budget / 2**30:.1f} GiB to be had on this device; "
            "use a smaller --seq_len or a smaller model"
        )
    (a, at_a), (b, at_b), most = (1, one), (min(2, rows), peak(min(2, rows))), rows
    fits = b if rows % b == 0 and at_b <= budget else 1
    while True:
        guess = a + (budget - at_a) * (b - a) / (at_b - at_a) if at_b > at_a else most
        following = max(m for m in divisors(rows) if m <= min(guess, most))
        if following <= fits:
            return fits
        used = peak(following)
        if used > budget:
            most = following // 2
        else:
            (a, at_a), (b, at_b), fits = (b, at_b), (following, used), following


def flops_per_token(cfg: Config, gpt: GPT) -> float:
    """Floating-point operations of one token, forward and backward: 6 a weight, and 12 * n_embd a token attended to."""
    t = cfg.seq_len
    attended = sum(sum(min(i, w or t) for i in range(1, t + 1)) / t for w in gpt.windows)
    weights = sum(p.numel() for name, p in gpt.named_parameters() if name not in ("wte.weight", "ngrams.weight"))
    return 6 * weights + 12 * cfg.n_embd * attended


# Dense bf16 (or fp16) TFLOP/s with fp32 accumulation, from the vendors' datasheets; MFU is blank for anything else.
PEAK_TFLOPS = {
    "B200": 2250, "H200": 989, "H100 PCIe": 756, "H100": 989, "A100": 312, "L40S": 362, "L40": 181, "L4": 121,
    "A10G": 70, "A10": 125, "A6000": 155, "RTX 5090": 210, "RTX 4090": 165, "RTX 3090": 71,
}  # fmt: skip


def peak_flops(device: torch.device, dtype: str) -> float | None:
    """FLOP/s that one device can reach in bf16; None where it is not known."""
    if device.type != "cuda" or dtype != "bf16":
        return None
    name = torch.cuda.get_device_name(device)
    return next((1e12 * peak for key, peak in PEAK_TFLOPS.items() if key in name), None)


# ---------------------------------------------------------------------------------------------------------------------
# 5. Step and evaluation


def lr_scale(step: int, cfg: Config) -> float:
    """Multiple of the learning rate in the update number `step` (from 0): up, flat, then down in a line to 0."""
    warmup, cooldown = cfg.warmup_frac * cfg.max_steps, cfg.cooldown_frac * cfg.max_steps
    return min(1.0, (step + 1) / warmup if warmup else 1.0, (cfg.max_steps - step) / cooldown if cooldown else 1.0)


def cuda_graphs(cfg: Config) -> bool:
    """Whether the compiler replays CUDA graphs: gradients must then be tensors of our own, not a graph's output."""
    return cfg.compile in ("reduce-overhead", "max-autotune")


def mark_step(cfg: Config) -> None:
    """Tell CUDA graphs, if there are any, that what an earlier call returned may be overwritten."""
    if cuda_graphs(cfg):
        torch.compiler.cudagraph_mark_step_begin()  # imports the compiler: more than a second


def train_step(run: Run, windows: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """One optimizer step on this rank's windows, int64 (rows, seq_len + 1), at `scale` times the learning rates.

    Returns the mean loss of this rank's tokens and the norm of the whole gradient before clipping, both fp32 () on the
    device: nothing here waits for it. Where that norm is not finite, every rank skips the update and notes it.
    """
    x, y = windows[:, :-1], windows[:, 1:]
    loss = torch.zeros((), device=run.on.device)
    for i in range(run.grad_accum_steps):
        rows = slice(i * run.micro_batch, (i + 1) * run.micro_batch)
        mark_step(run.cfg)
        with synchronised(run, i == run.grad_accum_steps - 1):
            part = run.model(x[rows], y[rows]) / y.numel()  # the ranks' means are averaged by DDP and FSDP
            run.scaler.scale(part).backward(1 + 0 * part.detach())  # a loss not finite is a NaN in all ranks' gradients
        loss += part.detach()
    run.scaler.unscale_(run.optimizer)
    grads = [p.grad for p in run.gpt.parameters()]
    norm = nn.utils.get_total_norm(grads)
    norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
    skip = ~norm.isfinite()
    run.skipped.append(skip)
    if run.scaler.is_enabled():
        for found_inf in run.scaler._found_inf_per_device(run.optimizer).values():
            found_inf.copy_(skip)
    if run.cfg.grad_clip:
        torch._foreach_mul_([local(grad) for grad in grads], (run.cfg.grad_clip / (norm + 1e-6)).clamp(max=1.0))
    for group in run.optimizer.param_groups:
        group["lr"] = group["base_lr"] * scale
    run.optimizer.step(skip)
    run.scaler.update()
    run.optimizer.zero_grad(set_to_none=not cuda_graphs(run.cfg))
    return loss, norm


def seed_step(run: Run, step: int) -> None:
    """All that is drawn is a function of (seed, step), and what your own edits draw of the rank: no state to save."""
    run.gpt.step_seed = seed_of(run.cfg.seed, step)
    torch.manual_seed(seed_of(run.cfg.seed, step, run.on.rank))


def report_skipped(run: Run, data: Data, log: "Log", step: int) -> None:
    """Tell which updates up to `step` were skipped since the last report; waits for the device.

    Raises RunError on every rank when --max_bad_steps in a row were.
    """
    cfg, flags = run.cfg, torch.stack(list(run.skipped)).tolist()
    run.skipped.clear()
    for number, bad in enumerate(flags, step - len(flags) + 1):
        run.bad_steps = run.bad_steps + 1 if bad else 0
        if not bad:
            continue
        at = position(data, cfg, number - 1)
        log.line(
            f"step {number} skipped: its loss or gradient is not finite ({run.bad_steps} in a row); its data: "
            f"{cfg.batch_tokens // cfg.seq_len} windows from number {at['window']} of epoch {at['epoch']} on"
        )
        if run.bad_steps == cfg.max_bad_steps:
            raise RunError(
                f"the loss or gradient was not finite in {run.bad_steps} steps in a row, up to step {number}, and "
                f"ckpt_{step}.pt keeps the weights from before; try lower learning rates, --grad_clip 1 or "
                "--dtype fp32, or look at the data there"
            )


def spikes(loss: float, before: deque) -> bool:
    """Whether a logged loss is above the mean of those before it by 4 standard deviations and by 0.1."""
    return len(before) >= 5 and loss > np.mean(before) + max(0.1, 4 * np.std(before))


def synchronised(run: Run, last: bool):
    """The ranks' gradients meet on the last micro-step only; a context for its forward and backward pass."""
    if hasattr(run.model, "set_requires_gradient_sync"):  # FSDP
        run.model.set_requires_gradient_sync(last)
    elif run.on.world > 1 and not last:
        return run.model.no_sync()
    return contextlib.nullcontext()


@torch.no_grad()
def evaluate(run: Run, val: Split, signals=()) -> float | None:
    """Mean loss over the first --eval_tokens validation tokens, in nats; the same for any ranks and micro-batch.

    None when `signals` of any rank has something in it: there may be little time left to save.
    """
    cfg = run.cfg
    n_rows = eval_rows(cfg, val)
    share = -(-n_rows // run.on.world)
    mine = np.arange(run.on.rank * share, min(n_rows, (run.on.rank + 1) * share))
    losses = []
    for i in range(0, share, run.micro_batch):
        if largest(run.on, bool(signals)):
            reshard(run.gpt)
            return None
        starts = mine[i : i + run.micro_batch] * cfg.seq_len
        windows = np.zeros((run.micro_batch, cfg.seq_len + 1), dtype=np.int64)  # one static shape for the compiler
        windows[: len(starts)] = val.read(starts, cfg.seq_len + 1)
        windows = torch.from_numpy(windows)
        y = windows[:, 1:].clone()
        y[len(starts) :] = -1
        mark_step(cfg)
        losses.append(run.gpt(windows[:, :-1].to(run.on.device), y.to(run.on.device)))
    reshard(run.gpt)
    total = torch.stack(losses).cpu().double().sum()
    if run.on.world > 1:
        dist.all_reduce(total, group=run.on.control)
    return total.item() / (n_rows * cfg.seq_len)


def eval_rows(cfg: Config, val: Split) -> int:
    """Validation windows in one evaluation: whole ones, at least one."""
    rows = (val.n_tokens - 1) // cfg.seq_len
    return min(rows, max(1, cfg.eval_tokens // cfg.seq_len)) if cfg.eval_tokens else rows


def sample_text(run: Run, tokenizer, n_tokens: int) -> str:
    """Text from the model as it stands, after an end-of-text token; the same every time for the same weights."""
    generator = torch.Generator(run.on.device).manual_seed(run.cfg.seed)
    prompt = torch.full((1, 1), tokenizer.eot, device=run.on.device)
    with torch.compiler.set_stance("force_eager"):  # every length would be a compilation of its own
        drawn = generate(run.gpt, prompt, n_tokens, tokenizer.vocab_size, 0.8, generator=generator)
        tokens = [token.item() for token in drawn]
    reshard(run.gpt)
    return tokenizer.decode_bytes(tokens).decode("utf-8", errors="replace")


# ---------------------------------------------------------------------------------------------------------------------
# 6. Checkpoint


def content_hash(checkpoint: dict) -> str:
    """SHA-256 over every value of a checkpoint but its own "sha256": torch.load itself accepts flipped bytes."""
    digest = hashlib.sha256()

    def feed(value) -> None:
        if isinstance(value, dict):
            for key in sorted(value):
                digest.update(b"k" + str(key).encode())
                feed(value[key])
        elif isinstance(value, Tensor):
            digest.update(f"t{value.dtype}{tuple(value.shape)}".encode())
            digest.update(value.contiguous().reshape(-1).view(torch.uint8).numpy())
        else:
            digest.update(b"v" + json.dumps(value).encode())

    feed({key: value for key, value in checkpoint.items() if key != "sha256"})
    return digest.hexdigest()


def snapshot(run: Run, data: Data, step: int, clock: dict) -> dict:
    """What a checkpoint holds, as a copy in host memory; on rank 0, but every rank has to take part."""
    checkpoint = {
        "step": step,
        "clock": clock,
        "config": dataclasses.asdict(run.cfg),
        "model_config": dataclasses.asdict(run.gpt.cfg),
        "tokenizer": data.meta["tokenizer"],
        "data": data.fingerprint(),
        "position": position(data, run.cfg, step),
        "scaler": run.scaler.state_dict(),
        "model": {},
        "optimizer": {},
    }
    for name, p in run.gpt.named_parameters():  # one whole tensor at a time
        for slot, part in {"": local(p), **run.optimizer.state[p]}.items():
            full = gathered(p, part)
            if run.on.rank == 0:
                place = checkpoint["optimizer"].setdefault(name, {}) if slot else checkpoint["model"]
                place[slot or name] = full.to("cpu", copy=True)
    return checkpoint


class Saver:
    """Saves checkpoints: a copy is made between two steps, then hashed and written by a thread, one at a time."""

    def __init__(self, run: Run, data: Data, log: "Log"):
        self.run, self.data, self.log, self.writing = run, data, log, None
        self.thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")

    def save(self, step: int, clock: dict) -> None:
        """Save on all ranks together; returns when the copy is made."""
        if self.writing:
            self.writing.result()
        largest(self.run.on, 0)  # the others wait for it here, on the CPU, and not in a collective that times out
        checkpoint = snapshot(self.run, self.data, step, clock)
        if self.run.on.rank == 0:
            self.writing = self.thread.submit(self.write, checkpoint)

    def write(self, checkpoint: dict) -> str:
        """Write ckpt_<step>.pt, complete or not at all, then delete old ones, as --keep says; returns what failed."""
        path = self.log.folder / f"ckpt_{checkpoint['step']}.pt"
        try:
            self.log.sync()
            checkpoint["sha256"] = content_hash(checkpoint)
            with whole_file(path) as file:
                torch.save(checkpoint, file)
                file.flush()
                read_checkpoint(Path(file.name))  # before an older one goes, this one has been read back
        except Exception as error:  # the run goes on, and its next save may find room
            while not isinstance(error, OSError) and error.__context__:  # torch.save hides that the disk is full
                error = error.__context__
            newest = next((path.name for path in checkpoints(self.log.folder)), "none")
            failed = f"{path} could not be saved ({error}); the newest checkpoint there is {newest}"
            self.log.line(f"WARNING: {failed}")
            return failed
        for old in checkpoints(self.log.folder)[self.run.cfg.keep :] if self.run.cfg.keep else []:
            try:
                old.unlink(missing_ok=True)
            except OSError as error:
                self.log.line(f"WARNING: {old} could not be deleted ({error})")
        return ""

    def finish(self) -> None:
        """Wait for what is being written. Raises RunError when it could not be."""
        if self.writing and (failed := self.writing.result()):
            raise RunError(f"{failed}; make room and --resume")

    def close(self) -> None:
        self.thread.shutdown(wait=True)


def step_of(path: Path) -> int:
    """The step in a checkpoint's name; -1 for any other file."""
    match = re.fullmatch(r"ckpt_(\d+)\.pt", path.name)
    return int(match[1]) if match else -1


def checkpoints(folder: Path) -> list[Path]:
    """The checkpoint files of a run's folder, newest first."""
    return sorted((path for path in folder.glob("ckpt_*.pt") if step_of(path) >= 0), key=step_of, reverse=True)


PARTS = dict(step=int, clock=dict, config=dict, model_config=dict, tokenizer=str, data=str, scaler=dict, model=dict,
             optimizer=dict)  # fmt: skip


def read_checkpoint(path: Path, verify: bool = True) -> dict:
    """The content of a checkpoint, mapped from the file. Raises UserError when it is missing, damaged or not ours."""
    if not Path(path).is_file():
        raise UserError(f"there is no checkpoint {path}; give the path of a ckpt_<step>.pt file")
    intact = False
    try:
        checkpoint = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        intact = not verify or content_hash(checkpoint) == checkpoint["sha256"]
        model, ours = dataclasses.asdict(GPTConfig(**checkpoint["model_config"])), dataclasses.asdict(GPTConfig())
        named = [checkpoint["model"], *checkpoint["optimizer"].values()]
        if not (
            all(type(checkpoint[key]) is kind for key, kind in PARTS.items())
            and all(type(model[key]) is type(value) for key, value in ours.items())
            and all(isinstance(key, str) and isinstance(value, Tensor) for part in named for key, value in part.items())
            and all(0 <= checkpoint["clock"][key] < math.inf for key in ("train_time", "wall_time"))
            and checkpoint["step"] >= 0
        ):
            raise ValueError
    except (MemoryError, PermissionError) as error:
        raise UserError(f"{path} cannot be read now ({error}); make it readable, or give more memory") from None
    except Exception as error:  # torn and foreign files fail in many ways, all of which mean the same here
        raise (UserError if intact else Damaged)(
            f"{path} is not a checkpoint of this trainer or is damaged ({type(error).__name__}); use another"
        ) from None
    if not intact:
        raise Damaged(f"{path} is damaged: its content does not have the hash that it was saved with; use another")
    return checkpoint


def plain_names(named: dict) -> dict:
    return {re.sub(r"(module|_orig_mod)\.", "", name): value for name, value in named.items()}


def load_weights(gpt: GPT, checkpoint: dict, path) -> None:
    """Copy the checkpoint's weights into the model; prefixes that wrappers leave on names are dropped."""
    weights = plain_names(checkpoint["model"])
    theirs, ours = dataclasses.asdict(GPTConfig(**checkpoint["model_config"])), dataclasses.asdict(gpt.cfg)
    wrong = {name for name, p in gpt.named_parameters() if name not in weights or weights[name].shape != p.shape}
    if wrong or theirs != ours:
        differ = ", ".join(f"{k} {theirs.get(k)} there and {ours[k]} here" for k in ours if theirs.get(k) != ours[k])
        differ = differ or ", ".join(sorted(wrong))
        raise UserError(f"{path} holds a model of another shape ({differ}); give the flags that it was made with")
    for name, p in gpt.named_parameters():
        put(p, weights[name])


def load_optimizer(run: Run, checkpoint: dict, path) -> None:
    """Copy the checkpoint's optimizer state into the run's."""
    names, theirs = {p: name for name, p in run.gpt.named_parameters()}, plain_names(checkpoint["optimizer"])
    for p, state in run.optimizer.state.items():
        saved = theirs.get(names[p], {})
        shapes = {slot: p.shape if part.dim() else part.shape for slot, part in state.items()}
        if {slot: value.shape for slot, value in saved.items()} != shapes:
            raise UserError(f"{path} was made with another --optimizer; give that one, or use --init_from {path}")
        for slot, part in state.items():
            put(p, saved[slot], part)
    if run.scaler.is_enabled() and checkpoint["scaler"].keys() == run.scaler.state_dict().keys():
        run.scaler.load_state_dict(checkpoint["scaler"])


def find_checkpoint(cfg: Config, folder: Path, say, restarted: bool = False) -> tuple[Path | None, bool]:
    """The file to start from, verified (None = from nothing), and whether to resume it. Raises UserError."""
    there, resume = checkpoints(folder), cfg.resume
    if there and restarted:
        resume = "newest"  # torchrun has restarted the job: what it saved counts, not what it was started from
    if not there and resume in ("", "auto") and any(folder.glob("ckpt_*.damaged")):
        raise UserError(
            f"{folder} holds damaged checkpoints only; give another --out_dir, or delete them to start over"
        )
    if there and not resume:
        raise UserError(f"{folder} already holds {there[0].name}; add --resume to go on, or give another --out_dir")
    if resume == "newest" or (resume == "auto" and there):
        for path in there:
            try:
                read_checkpoint(path)
                return path, True
            except Damaged as error:
                path.rename(path.with_name(path.name + ".damaged"))
                say(f"passing over a checkpoint, renamed to {path.name}.damaged: {error}")
        raise UserError(f"--resume found no valid checkpoint in {folder}; leave it out and give another --out_dir")
    path = Path(resume) if resume not in ("", "auto") else Path(cfg.init_from) if cfg.init_from else None
    if path:
        read_checkpoint(path)
    if resume and path and there and step_of(there[0]) > step_of(path):
        raise UserError(f"{folder} holds {there[0].name}, later than {path}; give another --out_dir to branch off")
    return path, bool(resume and path)


# ---------------------------------------------------------------------------------------------------------------------
# 7. Log


class Log:
    """The run's folder: log.txt, metrics.jsonl, summary.json and wandb. Silent on every rank but 0."""

    def __init__(self, folder: Path, run_on: Launch):
        self.folder, self.on = folder, run_on.rank == 0
        self.file = self.metrics = self.wandb = self.lock = None
        self.early = []  # lines from before log.txt is open

    def claim(self) -> None:
        """Make the folder and lock it against other runs. Raises UserError."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self.lock = open(self.folder / ".lock", "a")
        except OSError as error:
            raise UserError(
                f"the run's folder {self.folder} cannot be written ({error}); give another --out_dir"
            ) from None
        try:
            if fcntl:
                fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"another run is using {self.folder}; give another --out_dir or wait for it") from None
        except OSError as error:  # some network file systems
            self.line(f"{self.folder} is not locked against a second run ({error})")
        for partial in self.folder.glob(".tmp-*"):
            partial.unlink()

    def open(self, cfg: Config, first_step: int) -> list[dict]:
        """Start the files, or go on with them; returns the rows up to `first_step`: later updates were lost."""
        if not self.on:
            return []
        rows, kept = self.folder / "metrics.jsonl", []
        if first_step and rows.exists():
            for line in rows.read_text(encoding="utf-8", errors="replace").splitlines():
                with contextlib.suppress(ValueError, TypeError, KeyError):  # a torn last line
                    row = json.loads(line)
                    kept += [row] if row["step"] <= first_step else []
        with whole_file(rows) as file:
            file.writelines(json.dumps(row).encode() + b"\n" for row in kept)
        self.metrics = open(rows, "a", buffering=1, encoding="utf-8")
        self.file = open(self.folder / "log.txt", "a" if first_step else "w", buffering=1, encoding="utf-8")
        for name in ("train_gpt.py", "model.py"):
            self.file.write(f"{SECTION} {name}\n{(HERE / name).read_text(encoding='utf-8')}\n")
        self.file.write(f"{SECTION} run\n{json.dumps(dataclasses.asdict(cfg))}\n")
        self.file.writelines(line + "\n" for line in self.early)
        if cfg.wandb:
            try:
                import wandb

                self.wandb = wandb.init(project="train_gpt", name=self.folder.name, dir=self.folder,
                                        config=dataclasses.asdict(cfg))  # fmt: skip
            except Exception as error:  # no package, no login, no network
                raise UserError(
                    f"--wandb could not start ({error}); run `wandb login`, set WANDB_MODE=offline or leave it out"
                ) from None
        return kept

    def line(self, text: str) -> None:
        if self.on:
            print(text, flush=True)
            if self.file:
                self.write(self.file, text)
            else:
                self.early.append(text)

    def write(self, file, text: str) -> None:
        """A line that a full disk holds back is written when there is room again; it does not end the run."""
        try:
            file.write(text + "\n")
        except OSError as error:
            print(f"WARNING: {file.name} cannot be written ({error.strerror})", flush=True)

    def sync(self) -> None:
        """Put the rows so far on the disk: a checkpoint goes on from them."""
        self.metrics.flush()
        os.fsync(self.metrics.fileno())

    def row(self, **values) -> None:
        """One line of metrics.jsonl; what is not finite becomes null."""
        if self.on:
            values = finite(values)
            self.write(self.metrics, json.dumps(values))
            if self.wandb:
                self.wandb.log({k: v for k, v in values.items() if k != "step"}, step=values["step"])

    def summary(self, values: dict) -> None:
        if self.on:
            with whole_file(self.folder / "summary.json") as file:
                file.write(json.dumps(values, indent=1).encode() + b"\n")

    def close(self) -> None:
        for thing in (self.file, self.metrics, self.lock):
            if thing:
                with contextlib.suppress(OSError):  # a full disk has been told
                    thing.close()
        if self.wandb:
            self.wandb.finish()


def finite(value):
    """The same, inside dicts and lists too, with null for figures that are not finite: JSON has no word for them."""
    if isinstance(value, dict):
        return {k: finite(v) for k, v in value.items()}
    if isinstance(value, list):
        return [finite(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def peak_memory_mb(device: torch.device) -> float:
    """Most memory held so far: the GPU's allocations, or the whole process on a CPU."""
    if device.type == "cuda":
        return round(torch.cuda.max_memory_allocated() / 2**20, 1)
    try:
        import resource
    except ImportError:  # Windows
        return math.nan
    unit = 1 if sys.platform == "darwin" else 1024
    return round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**20, 1)


def environment(run_on: Launch) -> str:
    """Versions and machine, for log.txt."""
    parts = [f"torch {torch.__version__}", f"python {platform.python_version()}", platform.platform()]
    if shutil.which("git"):
        command = ["git", "-C", str(HERE), "describe", "--always", "--dirty", "--abbrev=40"]
        parts.append("git " + (subprocess.run(command, capture_output=True, text=True).stdout.strip() or "unknown"))
    if run_on.device.type == "cuda":
        parts += [f"cuda {torch.version.cuda}", f"cudnn {torch.backends.cudnn.version()}", torch.cuda.get_device_name()]
    return ", ".join(parts)


def device_name(device: torch.device) -> str:
    """What the GPU or the processor calls itself."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    info = Path("/proc/cpuinfo")
    models = re.findall(r"^model name\s*: (.+)$", info.read_text() if info.exists() else "", re.MULTILINE)
    return models[0] if models else platform.processor() or platform.machine()


def machine(run_on: Launch) -> str:
    """The devices of all ranks, with the threads of each where the CPU works."""
    threads = f", {torch.get_num_threads()} threads" if run_on.device.type == "cpu" else ""
    return f"{run_on.world} x {run_on.device.type} ({device_name(run_on.device)}{threads})"


def clock_text(seconds: float) -> str:
    minutes, seconds = divmod(int(max(0, seconds)), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{seconds:02d}"


# ---------------------------------------------------------------------------------------------------------------------
# 8. The run


class Clock:
    """Seconds of training steps, and of everything; the first stands still from `stop` to `run`."""

    def __init__(self, device: torch.device):
        self.device, self.train_time, self.wall_before, self.started = device, 0.0, 0.0, time.perf_counter()
        self.resumed_at = None

    def run(self) -> None:
        """Let the training clock go on, if it stands still."""
        if self.resumed_at is None:
            self.resumed_at = time.perf_counter()

    def stop(self) -> float:
        """Stop it once the device has done what it was given; returns the training time."""
        if self.device.type != "cpu":
            torch.accelerator.synchronize()
        if self.resumed_at is not None:
            self.train_time += time.perf_counter() - self.resumed_at
        self.resumed_at = None
        return self.train_time

    @property
    def wall_time(self) -> float:
        return self.wall_before + time.perf_counter() - self.started


@contextlib.contextmanager
def signals_noted():
    """Yields a list that SIGTERM, SIGINT, SIGUSR1 and SIGHUP land in by name; a second one ends the process at once.

    One within half a second of the first is the same again: systemd and schedulers signal torchrun and its ranks.
    """
    caught, before, since = [], {}, [0.0]

    def note(number, _):
        if not caught:
            since[0] = time.monotonic()
        elif time.monotonic() - since[0] > 0.5:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        caught.append(signal.Signals(number).name)

    if threading.current_thread() is threading.main_thread():
        for name in ("SIGTERM", "SIGINT", "SIGUSR1", "SIGHUP"):
            if hasattr(signal, name) and signal.getsignal(getattr(signal, name)) != signal.SIG_IGN:  # as nohup sets it
                before[getattr(signal, name)] = signal.signal(getattr(signal, name), note)
    try:
        yield caught
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def train(cfg: Config) -> dict:
    """A whole run, from data to the last checkpoint; returns what summary.json holds. Raises UserError."""
    run_on = launch(cfg)
    clock = Clock(run_on.device)
    torch.manual_seed(cfg.seed)  # nothing below draws from the global generator; your own edits may
    lines = check_device(cfg, run_on.device)
    rows_per_rank(cfg, run_on.world)
    data = open_data(cfg, run_on)
    folder = cfg.out_dir or from_rank0(run_on, lambda: f"runs/{time.strftime('%Y%m%d-%H%M%S')}-{cfg.preset}")
    log = Log(Path(folder), run_on)
    with contextlib.closing(log), signals_noted() as signals:
        from_rank0(run_on, log.claim)
        restarts = largest(run_on, int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)))  # only some nodes count
        path, resumes = from_rank0(run_on, lambda: find_checkpoint(cfg, log.folder, log.line, restarts > 0))
        run = build(cfg, run_on, data.meta["vocab_size"], data.meta["eot"])
        step, note = 0, ""
        if path:
            checkpoint = read_checkpoint(path, verify=False)
            load_weights(run.gpt, checkpoint, path)
            note = f"weights from {path}"
        if resumes:
            if checkpoint["data"] != data.fingerprint():
                raise UserError(
                    f"{path} was trained on other data than {data.folder} holds now; give the same --data, or start a "
                    f"new run with --init_from {path}"
                )
            load_optimizer(run, checkpoint, path)
            step = checkpoint["step"]
            was, now = checkpoint.get("position", {}), position(data, cfg, step)
            moved = [f"{key} {was[key]} there and {now[key]} here" for key in now if was.get(key, now[key]) != now[key]]
            if moved:
                raise UserError(
                    f"{path} goes on at another place of the stream ({', '.join(moved)}), so data were lost or seen "
                    f"twice; give its --seed, --seq_len, --batch_tokens and --doc_align, or use --init_from {path}"
                )
            clock.train_time, clock.wall_before = (checkpoint["clock"][k] for k in ("train_time", "wall_time"))
            changed = changed_flags(cfg, checkpoint["config"], path)
            note = f"resumed from {path}" + (f"; these flags have other values than then: {changed}" if changed else "")
        checkpoint = None
        earlier = log.open(cfg, step)
        describe(run, data, log)
        for line in filter(None, (*lines, note)):
            log.line(line)
        try:
            return loop(run, data, log, clock, signals, step, earlier)
        except UserError as error:
            if log.file:  # the command line prints it on standard error, which may be lost
                log.write(log.file, f"ended: {error}")
            raise


def changed_flags(cfg: Config, before: dict, path: Path) -> str:
    """Names of the flags that had other values before. Raises UserError under --trials if one of them matters."""
    changed = {k for k, v in dataclasses.asdict(cfg).items() if before.get(k, v) != v}
    changed -= {"resume", "out_dir", "data", "trials"}  # the data's content is compared, not its path
    harmless = {"eval_every", "save_every", "sample_every", "log_every", "keep", "prefetch", "max_minutes", "wandb"}
    if cfg.trials > 1 and changed - harmless:
        raise UserError(
            f"{path} was made with other values of {', '.join(sorted(changed - harmless))}, and --trials compares runs "
            "of equal flags; give those, or another --out_dir"
        )
    return ", ".join(sorted(changed))


def describe(run: Run, data: Data, log: Log) -> None:
    """Print what is in force and what was derived from the flags."""
    cfg, device = run.cfg, run.on.device
    n_params = sum(p.numel() for p in run.gpt.parameters())
    tokens = cfg.batch_tokens * cfg.max_steps
    muon_lr, adam_lr = learning_rates(cfg)
    log.line(environment(run.on))
    log.line(
        f"device: {machine(run.on)}, {dtype_of(cfg, device)}, compile {cfg.compile}, "
        + ("FSDP2" if cfg.parallel == "fsdp" else "one process" if run.model is run.gpt else "DDP")
        + f", attention {attention_kernels(run)}, matmul precision {torch.get_float32_matmul_precision()}"
    )  # fmt: skip
    if device.type == "cuda":
        settings = torch.cuda.memory._snapshot()["allocator_settings"]
        log.line(f"allocator: {', '.join(f'{k} {v}' for k, v in settings.items())}")
    log.line(
        f"data: {data.folder}, {data.train.n_tokens:,} + {data.val.n_tokens:,} tokens, tokenizer "
        f"{data.meta['tokenizer']}" + (" (assumed: there is no meta.json)" if data.meta.get("assumed") else "")
        + f", evaluation on {eval_rows(cfg, data.val) * cfg.seq_len:,} tokens"
    )  # fmt: skip
    log.line(
        f"model: {n_params:,} parameters, {flops_per_token(cfg, run.gpt) / 1e6:,.1f} MFLOP a token; "
        + (f"muon_lr {muon_lr:.4g}, " if cfg.optimizer == "muon" else "") + f"adam_lr {adam_lr:.4g}"
    )  # fmt: skip
    log.line(
        f"batch: {cfg.batch_tokens:,} tokens = {run.on.world} ranks x {run.grad_accum_steps} grad_accum_steps x "
        f"{run.micro_batch} micro_batch x {cfg.seq_len} seq_len; {cfg.max_steps:,} steps, {tokens:,} tokens, "
        f"{tokens / data.train.n_tokens:.2f} epochs"
    )


def attention_kernels(run: Run) -> str:
    """The kernels that attention runs on: what PyTorch chooses for tensors as the model's, not what a flag says."""
    if run.gpt.attn in ("blocked", "flex", "varlen"):
        return run.gpt.attn
    cfg, names = run.gpt.cfg, []
    q = torch.empty((run.micro_batch, cfg.n_head, cfg.seq_len, cfg.head_dim), dtype=run.gpt.compute_dtype,
                    device=run.on.device, requires_grad=True)  # fmt: skip
    idx = torch.zeros((run.micro_batch, cfg.seq_len), dtype=torch.int64, device=run.on.device)
    for window in sorted(set(run.gpt.windows)):
        mask = attention_mask("sdpa", idx, cfg.seq_len, window, run.gpt.doc_eot)
        pinned = SDPA_KERNELS.get(run.cfg.attn)
        with torch.nn.attention.sdpa_kernel(pinned) if pinned else contextlib.nullcontext():
            choice = torch._fused_sdp_choice(q, q, q, mask, 0.0, mask is None)
        names += [name.lower() for name, kernel in SDPBackend.__members__.items() if int(kernel) == choice]
    return f"{run.cfg.attn} ({', '.join(dict.fromkeys(names))})"


def profiler_of(run: Run, log: Log):
    """With --profile: a profiler that skips 2 steps, warms up for one, and reports the steps after them."""
    if not run.cfg.profile:
        return None
    cuda = run.on.device.type == "cuda"

    def report(profiler) -> None:
        profiler.export_chrome_trace(str(log.folder / f"trace_rank{run.on.rank}.json"))
        by = "self_device_time_total" if cuda else "self_cpu_time_total"
        log.line(profiler.key_averages().table(sort_by=by, row_limit=10, max_name_column_width=60))
        if cuda:
            torch.cuda.memory._dump_snapshot(str(log.folder / f"memory_rank{run.on.rank}.pickle"))

    if cuda:
        torch.cuda.memory._record_memory_history(stacks="python", max_entries=100_000)
    schedule = torch.profiler.schedule(wait=2, warmup=1, active=run.cfg.profile, repeat=1)
    return torch.profiler.profile(schedule=schedule, on_trace_ready=report)


def loop(run: Run, data: Data, log: Log, clock: Clock, signals: list, step: int, earlier: list[dict]) -> dict:
    """Train from `step` to the end of the run, or until something stops it; returns the summary.

    `earlier` holds the rows of metrics.jsonl that a resumed run goes on from.
    """
    cfg, first_step = run.cfg, step
    peak, per_token = peak_flops(run.on.device, dtype_of(cfg, run.on.device)), flops_per_token(cfg, run.gpt)
    counts = data.meta["splits"].get("val") or {}
    bits_per_nat = counts["tokens"] / counts["bytes"] / math.log(2) if counts.get("bytes") else math.nan
    base_lr = learning_rates(cfg)[0 if cfg.optimizer == "muon" else 1]
    evaluations = [row for row in earlier if row.get("val_loss") is not None]
    losses = deque((row["train_loss"] for row in earlier if row.get("train_loss") is not None), maxlen=10)
    waited, time_before, logged = 0.0, clock.train_time, (step, clock.train_time)
    try:
        tokenizer = get_tokenizer(data.meta["tokenizer"])
    except UserError as error:  # tokens alone are enough to train
        tokenizer = None
        log.line(f"no samples will be printed: {error}")
    stop = "max_steps" if step >= cfg.max_steps else ""

    def due(every: int) -> bool:
        return bool(stop) or (every > 0 and step % every == 0)

    def seen() -> bool:
        return any(row["step"] == step for row in evaluations)

    def at() -> str:
        return f"step {step:>{len(str(cfg.max_steps))}}/{cfg.max_steps}"

    batches = prefetched(lambda s: train_batch(data, cfg, run.on, s), step, cfg.max_steps, cfg.prefetch)
    profiler = profiler_of(run, log)
    if cfg.profile and cfg.max_steps - step < cfg.profile + 3:
        log.line(f"--profile {cfg.profile} has no effect: it starts after 3 steps, and {cfg.max_steps - step} are left")
    saver = Saver(run, data, log)
    skip_training = step > 0 and due(cfg.eval_every) and not largest(run.on, seen())  # stopped before that evaluation
    with contextlib.closing(saver), contextlib.closing(batches), profiler or contextlib.nullcontext():
        while True:
            if not stop and not skip_training:
                clock.run()
                asked = time.perf_counter()
                windows = next(batches).to(run.on.device, non_blocking=run.on.device.type == "cuda")
                waited += time.perf_counter() - asked
                seed_step(run, step)
                loss, norm = train_step(run, windows, lr_scale(step, cfg))
                step += 1
                if profiler:
                    profiler.step()
                late = cfg.max_minutes and clock.wall_time - clock.wall_before >= 60 * cfg.max_minutes
                wish = largest(run.on, 2 if signals else 1 if late else 0)  # ranks must stop at the same step
                stop = "signal" if wish == 2 else "max_minutes" if wish else ""
                stop = stop or ("max_steps" if step == cfg.max_steps else "")

                if due(cfg.log_every) or step == 1:
                    train_loss, grad_norm = mean_of_ranks(run.on, loss), norm.item()
                    clock.stop()
                    rate = (step - logged[0]) * cfg.batch_tokens / max(clock.train_time - logged[1], 1e-9)
                    logged = (step, clock.train_time)
                    mfu = rate * per_token / (peak * run.on.world) if peak else math.nan
                    lr, memory = base_lr * lr_scale(step - 1, cfg), peak_memory_mb(run.on.device)
                    left = (clock.train_time - time_before) / (step - first_step) * (cfg.max_steps - step)
                    spike = " SPIKE" if spikes(train_loss, losses) else ""
                    log.line(
                        f"{at()} | loss {train_loss:.4f}{spike} | lr {lr:.2e} | norm {grad_norm:.3f} | "
                        f"{rate:,.0f} tok/s | " + (f"mfu {mfu:.1%} | " if peak else "")
                        + f"{memory:,.0f} MB | {clock_text(clock.wall_time)} < {clock_text(left)}"
                    )  # fmt: skip
                    log.row(
                        step=step, train_loss=train_loss, lr=lr, grad_norm=grad_norm, tokens=step * cfg.batch_tokens,
                        tokens_per_s=rate, mfu=mfu, peak_mem_mb=memory, train_time_s=clock.train_time,
                        wall_time_s=clock.wall_time,
                    )  # fmt: skip
                    losses.extend([train_loss] if math.isfinite(train_loss) else [])
                    try:
                        report_skipped(run, data, log, step)
                    except RunError:  # what the guard has kept is not lost
                        saver.save(step, dict(train_time=clock.stop(), wall_time=clock.wall_time))
                        raise
            skip_training = False
            if saved := step > first_step and due(cfg.save_every):
                saver.save(step, dict(train_time=clock.stop(), wall_time=clock.wall_time))
            val_loss = None
            if stop != "signal" and due(cfg.eval_every) and not largest(run.on, seen()):
                clock.stop()
                val_loss = evaluate(run, data.val, signals)
                stop = "signal" if val_loss is None else stop
            if val_loss is not None:
                bpb = val_loss * bits_per_nat
                log.line(
                    f"{at()} | val_loss {val_loss:.4f} | "
                    + (f"val_bpb {bpb:.4f} | " if math.isfinite(bpb) else "") + f"train_time {clock.train_time:.1f} s"
                )  # fmt: skip
                row = dict(
                    step=step, val_loss=val_loss, val_bpb=bpb, tokens=step * cfg.batch_tokens,
                    train_time_s=clock.train_time, wall_time_s=clock.wall_time,
                )  # fmt: skip
                log.row(**row)
                evaluations.append(row)
                stop = stop or ("target_val_loss" if val_loss <= cfg.target_val_loss else "")
            if stop and not saved and step > first_step:
                saver.save(step, dict(train_time=clock.stop(), wall_time=clock.wall_time))
            if stop != "signal" and due(cfg.sample_every) and tokenizer:
                clock.stop()
                log.line(f"--- sample at step {step}\n{sample_text(run, tokenizer, 256)}\n---")
            if stop:
                break
        from_rank0(run.on, saver.finish)

    trained = clock.stop() - time_before
    if run.on.device.type == "cuda":
        if cfg.profile:
            torch.cuda.memory._record_memory_history(enabled=None)
        stats = torch.cuda.memory_stats()
        log.line(f"allocator: {stats['num_alloc_retries']} retries, {stats['num_ooms']} times out of memory")
    finished = [row["val_loss"] for row in evaluations if math.isfinite(row["val_loss"])]
    reached = next((row for row in evaluations if row["val_loss"] <= cfg.target_val_loss), None)
    last = evaluations[-1] if evaluations else dict(val_loss=math.nan, val_bpb=math.nan)
    summary = dict(
        stopped_by=signals[0] if stop == "signal" and signals else stop, step=step, val_loss=last["val_loss"],
        best_val_loss=min(finished, default=math.nan), val_bpb=last["val_bpb"],
        target_reached=reached and dict(step=reached["step"], train_time_s=reached["train_time_s"]),
        tokens=step * cfg.batch_tokens,
        tokens_per_s=(step - first_step) * cfg.batch_tokens / trained if trained else math.nan,
        machine=machine(run.on), val_tokens=eval_rows(cfg, data.val) * cfg.seq_len,
        files=recorded_hashes(data.meta),
        data_wait_s=waited, train_time_s=clock.train_time, wall_time_s=clock.wall_time,
    )  # fmt: skip
    summary = finite(summary)
    log.summary(summary)
    log.line(
        f"stopped by {summary['stopped_by']} at step {step}: train_time {clock.train_time:.1f} s (data waiting "
        f"{waited / max(trained, 1e-9):.2%}), wall time {clock.wall_time:.1f} s; everything is in {log.folder}"
    )
    log.line(
        f"next: python sample.py --run {log.folder} | train longer: --max_steps {10 * cfg.max_steps} | "
        "on your own text: python data/prepare.py files PATH | larger: --preset gpt2-small"
    )
    return summary


def finished(cfg: Config) -> dict | None:
    """The summary of a trial that is done, for --resume auto. Raises UserError when its flags or data were others."""
    folder = Path(cfg.out_dir)
    if not cfg.resume or not (folder / "summary.json").exists():
        return None
    try:
        summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
        log = (folder / "log.txt").read_text(encoding="utf-8")
        flags = json.loads(log.rpartition(f"{SECTION} run\n")[2].partition("\n")[0])
        done = summary["stopped_by"] == "max_steps" and summary["step"] == flags["max_steps"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{folder} is no run as it was left ({error!r}); delete it or give another --out_dir") from None
    if not done:
        return None
    changed_flags(cfg, flags, folder)
    if summary.get("files") != recorded_hashes(load_meta(data_folder(cfg))):
        raise UserError(f"{folder} was trained on other data; give the same --data, or another --out_dir")
    return summary


def train_trials(cfg: Config) -> list[dict]:
    """--trials whole runs, seed after seed, each in its own folder; returns their summaries."""
    run_on = launch(cfg)
    folder = cfg.out_dir or from_rank0(run_on, lambda: f"runs/{time.strftime('%Y%m%d-%H%M%S')}-{cfg.preset}")
    summaries = []
    for seed in range(cfg.seed, cfg.seed + cfg.trials):
        one = dataclasses.replace(cfg, seed=seed, out_dir=f"{folder}/seed_{seed}")
        summaries.append(from_rank0(run_on, lambda cfg=one: finished(cfg)) or train(one))
        if summaries[-1]["stopped_by"] != "max_steps":
            break
    losses = [s["val_loss"] for s in summaries]
    if run_on.rank == 0 and len(losses) > 1 and None not in losses:
        print(
            f"{len(losses)} trials in {folder}: val_loss {statistics.mean(losses):.4f} "
            f"+- {statistics.stdev(losses):.4f}, "
            f"train_time {statistics.mean(s['train_time_s'] for s in summaries):.1f} s each"
        )
    return summaries


def mean_of_ranks(run_on: Launch, value: Tensor) -> float:
    """The mean of a 0-d tensor over the ranks; waits for the device."""
    box = value.detach().cpu().double()
    if run_on.world > 1:
        dist.all_reduce(box, group=run_on.control)
    return box.item() / run_on.world


def out_of_memory(error: Exception) -> str:
    """What to say of an error that means that memory ran out; nothing for any other."""
    if not isinstance(error, (torch.OutOfMemoryError, MemoryError)) and not re.search(
        r"(?i)can(no|')t allocate memory|not enough memory|out of memory", str(error)
    ):
        return ""
    asked = re.search(r"allocate (\d+) bytes|allocate ([\d.]+ \w+)", str(error))
    asked = asked and (asked[2] or f"{int(asked[1]) / 2**30:,.1f} GiB") or "more"
    there, last = "", "a smaller model"
    if torch.cuda.is_initialized():
        free, total = torch.cuda.mem_get_info()
        there, last = f", with {free / 2**30:,.1f} of {total / 2**30:,.1f} GiB free", "--offload optimizer"
    elif "SC_AVPHYS_PAGES" in getattr(os, "sysconf_names", ()):
        there = f", with {os.sysconf('SC_AVPHYS_PAGES') * os.sysconf('SC_PAGE_SIZE') / 2**30:,.1f} GiB free"
    return (
        f"memory ran out: {asked} were asked for{there}; try, in this order, a smaller --micro_batch, "
        f"--checkpointing full, {last}; the last checkpoint is kept, and --resume goes on from it"
    )


NOT_OURS = (PermissionError, IsADirectoryError, NotADirectoryError)


def file_trouble(error: Exception) -> str:
    """What to say when there is no room for a file, or it may not be read or written; nothing for any other error."""
    if isinstance(error, NOT_OURS) and error.filename:
        return f"{error.filename} cannot be read or written ({error.strerror}); give another one, or change its rights"
    if not isinstance(error, OSError) or error.errno not in (errno.ENOSPC, errno.EROFS, getattr(errno, "EDQUOT", None)):
        return ""
    return f"{error.filename or 'a file'} could not be written ({error.strerror}); make room and --resume"


def compiler_failed(error: Exception) -> str:
    """What to say when the C++ compiler refuses a kernel of torch.compile; nothing for any other error."""
    if "C++ compile error" not in str(error):
        return ""
    found = re.search(r"error: .*", str(error))
    return (
        f"the C++ compiler could not compile PyTorch's code ({found[0] if found else 'no reason given'}); put "
        "TORCHINDUCTOR_VEC_ISA_OK= before the command, for instructions that it knows, or leave out --compile"
    )


def lost_rank(error: Exception) -> str:
    """What to say of an error that means that another rank has ended, whose own message matters; else nothing."""
    found = re.search(r"(?i)connection (closed|reset|refused)|broken pipe|timed out|remote process exited", str(error))
    network = (dist.DistNetworkError, dist.DistBackendError, dist.DistStoreError)
    if not (isinstance(error, network) or type(error) is RuntimeError and found):
        return ""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return ""
    return f"another rank has ended ({found[0] if found else type(error).__name__}); its own message says why"


def main(argv: list[str]) -> int:
    """The command line; returns the exit code: 0 done, 2 the user's mistake, 1 anything else."""
    sys.stdout.reconfigure(errors="replace")  # a sample may hold what a terminal cannot show
    try:
        cfg = parse_flags(argv)
        train_trials(cfg) if cfg.trials > 1 else train(cfg)
    except Exception as error:
        mistake = isinstance(error, (UserError, *NOT_OURS))
        sentence = str(error) if isinstance(error, UserError) else (
            out_of_memory(error) or file_trouble(error) or compiler_failed(error) or lost_rank(error)
        )  # fmt: skip
        if not sentence:
            raise
        rank = os.environ.get("RANK")
        print(f"error{f' [rank {rank}]' if rank else ''}: {sentence}", file=sys.stderr, flush=True)
        return 2 if mistake and not isinstance(error, RunError) else 1
    if dist.is_initialized():  # not after an error: it would wait for the other ranks
        dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
