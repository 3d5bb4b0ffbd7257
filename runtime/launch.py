"""Devices, ranks and threads: where a run happens, and what that hardware and its PyTorch can do."""

import dataclasses
import functools
import logging
import math
import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from data.prepare import prepare
from data.shards import PYTHON_VOCABULARY
from data.stream import TokenStream
from data.tokenizers import get_tokenizer
from ops.cpu import tune_glibc_malloc
from runtime.errors import UserError
from runtime.ranks import (
    DistContext,
    agree,
    check_ranks,
    check_same_on_all_ranks,
    dist_max,
    rendezvous,
)

HERE = Path(__file__).resolve().parent.parent
ROOMS = sorted(path for room in ("data", "ops", "runtime") for path in HERE.glob(f"{room}/*.py"))
PAGES = [HERE / name for name in ("train_gpt.py", "model.py", "generation.py")]
SOURCE_FILES = {
    path.relative_to(HERE).as_posix(): path for path in (*PAGES, *ROOMS, PYTHON_VOCABULARY)
}
ALLOC_CONF_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
ENVIRONMENT = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")  # of torchrun


def launch(cfg) -> DistContext:
    """Choose the device, join the other ranks, if torchrun started any, and check that they match.

    Sets what belongs to the process: CUDA's allocator, threads, determinism, matmul precision, the flash kernel; may be
    called again in a process. Raises UserError.
    """
    rank = int(os.environ.get("RANK", 0))
    world_size = int(os.environ.get("WORLD_SIZE", 1))
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    device, deterministic, alloc_conf = select_device(cfg.device), cfg.deterministic, cfg.alloc_conf
    if device.type == "mps" and world_size > 1:
        raise UserError(
            "--device mps is for one process; start it with python, not torchrun, or use --device cpu"
        )
    if alloc_conf and not any(
        map(os.environ.get, ALLOC_CONF_VARIABLES)
    ):  # the user's wins; read as CUDA starts
        os.environ.update(dict.fromkeys(ALLOC_CONF_VARIABLES, alloc_conf))
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    if device.type == "cuda":
        n_devices = torch.cuda.device_count()
        if local_rank >= n_devices:
            wrong = f"{local_world_size} processes were started for {n_devices} CUDA device(s)"
            raise UserError(f"{wrong}; use torchrun --nproc_per_node={n_devices}")
        os.environ.setdefault(
            "TRITON_DEFAULT_FP_FUSION", "1"
        )  # the old default; Triton 3.9 warns that it will change
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
        set_flash_impl(cfg.attn)
    elif device.type == "cpu":
        tune_glibc_malloc()
        logging.getLogger("torch.utils.cpp_extension").setLevel(
            logging.ERROR
        )  # CUDA builds warn of a missing GPU
        if (
            local_world_size > 1 and os.environ.get("OMP_NUM_THREADS") == "1"
        ):  # torchrun's doing, not the user's
            torch.set_num_threads(max(1, cpu_cores() // local_world_size))
    if (
        deterministic != torch.are_deterministic_algorithms_enabled()
    ):  # the call imports the compiler: a second
        torch.use_deterministic_algorithms(deterministic)
    torch.set_float32_matmul_precision(cfg.matmul_precision)
    on_cuda, by_torchrun, cpu_group = device.type == "cuda", "WORLD_SIZE" in os.environ, None
    if (by_torchrun or cfg.parallel in ("fsdp", "hsdp")) and not dist.is_initialized():
        store = rendezvous(rank, world_size, device.type) if by_torchrun else dist.HashStore()
        where = dict(backend="nccl", device_id=device) if on_cuda else dict(backend="gloo")
        dist.init_process_group(**where, store=store, rank=rank, world_size=world_size)
    if dist.is_initialized():
        cpu_group = gloo_group(dist.group.WORLD) if on_cuda else dist.group.WORLD
    dist_ctx = DistContext(device, rank, world_size, local_rank, local_world_size, cpu_group)
    check_ranks(dist_ctx, dataclasses.asdict(cfg), SOURCE_FILES)
    return dist_ctx


def open_stream(folder: str, dist_ctx: DistContext, **options) -> TokenStream:
    """Open a data folder and check it, also across ranks; "": the default corpus, made first where it is not there.

    options: of TokenStream. Raises UserError.
    """
    path = Path(folder or HERE / "data" / "python")
    with agree(dist_ctx):
        # Each node has its own standard library
        if not folder and dist_ctx.local_rank == 0 and not (path / "meta.json").exists():
            prepare("python", out=path)
    with agree(dist_ctx):
        stream = TokenStream(path, **options)
    check_same_on_all_ranks(dist_ctx, stream.facts(), f"give every node the same data in {path}")
    try:
        stream.tokenizer = get_tokenizer(stream.meta["tokenizer"], stream.vocabulary)
    except UserError:  # tokens suffice to train
        stream.tokenizer = None
    if any(dist_max(dist_ctx, stream.tokenizer is None)):  # sampling under FSDP takes all ranks
        stream.tokenizer = None
    return stream


def describe_run(
    cfg, model, micro_batch: int, stream: TokenStream, dist_ctx: DistContext
) -> list[str]:
    """What is in effect in a run and what was derived from its flags, as lines for the console and log.txt."""
    device, meta, world_size = dist_ctx.device, stream.meta, dist_ctx.world_size
    parallel = (
        "one process" if world_size == 1 else cfg.parallel if cfg.parallel != "auto" else "ddp"
    )
    grad_accum_steps = cfg.batch_tokens // cfg.seq_len // world_size // micro_batch
    muon = f"muon_lr {cfg.muon_lr:.4g}, " if cfg.optimizer == "muon" else ""
    ngrams = (
        f", n-grams to {cfg.ngram}, ngram_dropout {cfg.ngram_dropout:.2g}" if cfg.ngram > 1 else ""
    )
    n_eval, n_all = (stream.num_eval_seqs(n) * cfg.seq_len for n in (cfg.eval_tokens, 0))
    mode = getattr(model.blocks[0], "ac_mode", "none")  # chosen with the micro-batch
    part = (
        ""
        if n_eval == n_all
        else dict(first=" (the first)", spread=" spread over the validation split")
    )
    n_params = sum(p.numel() for p in model.parameters())
    n_frozen = sum(p.numel() for p in model.parameters() if not p.requires_grad)
    lines = [
        software_versions(device, HERE),
        f"device: {device_summary(dist_ctx)}, {cfg.dtype}, compile {cfg.compile}, {parallel}, attention {cfg.attn}, "
        f"loss_chunk {cfg.loss_chunk}, checkpointing {mode}, matmul precision {torch.get_float32_matmul_precision()}",
        f"data: {stream.folder} ({meta['source']}), {stream.train.n_tokens:,} + {stream.val.n_tokens:,} tokens, "
        f"tokenizer {meta['tokenizer']}{' (assumed: there is no meta.json)' if meta.get('assumed') else ''}, "
        f"evaluation on {n_eval:,} tokens{part and part[stream.eval_part]}",
        f"model: n_layer {cfg.n_layer}, n_embd {cfg.n_embd}, n_head {cfg.n_head}, {n_params:,} parameters"
        f"{f' ({n_frozen:,} frozen)' * (n_frozen > 0)}, "
        f"{model.flops_per_token() / 1e6:,.1f} MFLOP a token; {muon}adam_lr {cfg.adam_lr:.4g}, "
        f"weight_decay {cfg.weight_decay:g}{ngrams}",
        f"batch: {cfg.batch_tokens:,} tokens = {world_size} ranks x {grad_accum_steps} grad_accum_steps x {micro_batch} "
        f"micro_batch x {cfg.seq_len} seq_len; {cfg.max_steps:,} steps{' (about)' if cfg.minutes else ''}, "
        f"{cfg.batch_tokens * cfg.max_steps / (stream.per_epoch * cfg.seq_len):.2f} epochs",
    ]
    if device.type == "cuda" and any(map(os.environ.get, ALLOC_CONF_VARIABLES)):
        settings = torch.cuda.memory._snapshot()["allocator_settings"]
        lines.append(
            "allocator: " + ", ".join(f"{name} {value}" for name, value in settings.items())
        )
    if stream.tokenizer is None:
        lines.append("no samples will be printed, as a rank has no tokenizer for this data")
    return lines


@functools.cache
def gloo_group(everyone: dist.ProcessGroup) -> dist.ProcessGroup:
    """A group of the same ranks that talks on the CPU; one for all runs in this process."""
    return dist.new_group(backend="gloo")


def set_flash_impl(attn: str) -> None:
    """Select SDPA's flash kernel: FlashAttention 3 or 4 ("fa3", "fa4": separate packages) or PyTorch's ("flash").

    Raises UserError when the package does not load.
    """
    kernels = torch.nn.attention
    if hasattr(kernels, "restore_flash_attention_impl") and kernels.current_flash_attention_impl():
        kernels.restore_flash_attention_impl()  # an earlier run in this process took another
    if attn in ("fa3", "fa4"):
        try:
            kernels.activate_flash_attention_impl(attn.upper())
        except Exception as error:  # whatever its package raises
            raise UserError(
                f"--attn {attn} needs a package that does not load ({error}); use flash"
            ) from None


# ---------------------------------------------------------------------------------------------------------------------
# The device


def select_device(name: str) -> torch.device:
    """The kind of device to run on; "auto" is cuda where there is one, else cpu. Raises UserError if it is absent."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        advice = (
            "use --device cpu, or install a CUDA build of PyTorch and check that nvidia-smi works"
        )
        raise UserError(
            f"--device cuda was asked for, but PyTorch sees no CUDA device here; {advice}"
        )
    if name == "mps" and not torch.backends.mps.is_available():
        raise UserError(
            "--device mps was asked for, but PyTorch sees no Apple GPU here; use --device cpu"
        )
    return torch.device(name)


# ---------------------------------------------------------------------------------------------------------------------
# The machine

# Dense bf16 or fp16 TFLOP/s with fp32 accumulation, from the vendors' datasheets; MFU is blank for anything else.
PEAK_TFLOPS = {
    "B200": 2250,
    "H200 NVL": 835,
    "H200": 989,
    "H100 NVL": 835,
    "H100 PCIe": 756,
    "H100": 989,
    "A100": 312,
}
PEAK_TFLOPS |= {"L40S": 362, "L40": 181, "L4": 121, "A10G": 70, "A10": 125, "A6000": 155}
PEAK_TFLOPS |= {"RTX 5090": 210, "RTX 4090": 165, "RTX 3090": 71}


def peak_flops(device: torch.device, dtype: str) -> float | None:
    """FLOP/s of one device's 16-bit matmuls by its datasheet; None for fp32 and where it is not known."""
    if device.type != "cuda" or dtype not in ("bf16", "fp16"):
        return None
    name = torch.cuda.get_device_name(device)
    if re.search(
        r"Laptop|Max-Q|MIG|GRID|-\d+[CQ]$| (D|Ti)\b", name
    ):  # a part of the device, or another one
        return None
    return next(
        (1e12 * peak for key, peak in PEAK_TFLOPS.items() if re.search(rf"\b{key}\b", name)), None
    )


def cpu_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


def peak_memory_mb(device: torch.device) -> float:
    """Most memory held so far, in MiB: the GPU's allocations, or the whole process on a CPU."""
    if device.type == "cuda":
        return round(torch.cuda.max_memory_allocated() / 2**20, 1)
    try:
        import resource
    except ImportError:  # Windows
        return math.nan
    unit = 1 if sys.platform == "darwin" else 1024
    return round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**20, 1)


def device_name(device: torch.device) -> str:
    """The model name of the GPU or the processor."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    info = Path("/proc/cpuinfo")
    models = re.findall(
        r"^model name\s*: (.+)$", info.read_text() if info.exists() else "", re.MULTILINE
    )
    return models[0] if models else platform.processor() or platform.machine()


def device_summary(dist_ctx: DistContext) -> str:
    """The devices of all ranks, with the threads of each where the CPU works."""
    device = dist_ctx.device
    threads = f", {torch.get_num_threads()} threads" if device.type == "cpu" else ""
    return f"{dist_ctx.world_size} x {device.type} ({device_name(device)}{threads})"


def software_versions(device: torch.device, repository: Path) -> str:
    """Versions of PyTorch, Python, the system, CUDA and the repository, for log.txt."""
    parts = [
        f"torch {torch.__version__}",
        f"python {platform.python_version()}",
        platform.platform(),
    ]
    if shutil.which("git"):
        command = ["git", "-C", str(repository), "describe", "--always", "--dirty", "--abbrev=40"]
        parts.append(
            "git "
            + (subprocess.run(command, capture_output=True, text=True).stdout.strip() or "unknown")
        )
    if device.type == "cuda":
        build = f"rocm {torch.version.hip}" if torch.version.hip else f"cuda {torch.version.cuda}"
        parts += [build, f"cudnn {torch.backends.cudnn.version()}", torch.cuda.get_device_name()]
    return ", ".join(parts)
