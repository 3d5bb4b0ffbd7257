"""--dtype auto: bf16 on GPUs that have it; on a CPU, where the model's own matmuls are faster in it than in fp32."""

import math
import time

import torch
from torch import Tensor

from runtime.launch import DTYPES
from runtime.ranks import DistContext, run_on_rank0

EMULATED = 0.5  # a CPU that emulates bf16 reaches at most this fraction of its fp32 speed
BF16_GAIN = 1.2  # how many times faster bf16 matmuls must be: casts and norms in bf16 cost a part of that
ROUNDS = 3  # of timing; the first warms up
SIZING_S = 1.0  # for --minutes: beside other work, short matmuls wait for a second core longer than they run
MOST_TOKENS, MOST_FLOPS, MOST_SECONDS = 8192, 200e9, 0.07  # FLOP of all rounds at one size, in both dtypes
KINDS = (6, 8, 8, 8)  # FLOP of each timed matmul, per row and n_embd**2


def hardware_dtype(dtype: str, device: torch.device) -> str:
    """`dtype`; for auto bf16 on CUDA devices that have it and fp32 on other GPUs, but still auto on a CPU."""
    if dtype != "auto" or device.type == "cpu":
        return dtype
    has_bf16 = device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
    return "bf16" if has_bf16 else "fp32"


def saved_dtype(dtype: str, config: dict) -> str:
    """`dtype`; for auto that of a checkpoint's config, which is still auto in old ones."""
    saved = config.get("dtype")
    return saved if dtype == "auto" and saved in list(DTYPES) else dtype


def resolve_dtype(f, dist_ctx: DistContext) -> tuple[str, list[str]]:
    """bf16, fp16 or fp32 for the flags f, the same on every rank, and lines to say."""
    dtype = hardware_dtype(f.dtype, dist_ctx.device)
    if dtype != "auto":
        return dtype, []
    if f.deterministic:
        return "fp32", ["dtype auto: fp32, as --deterministic leaves nothing to timing"]
    tokens = f.micro_batch * f.seq_len or f.batch_tokens // dist_ctx.world_size
    dtype, note = run_on_rank0(dist_ctx, lambda: faster_dtype(f.n_embd, tokens))
    return dtype, [note]


def sampling_dtype(dtype: str, config: dict, n_embd: int, device: torch.device) -> str:
    """What to run a model in: `dtype`; for auto what its run's config has, or fp32 where that is only emulated."""
    wanted = saved_dtype(dtype, config)
    if dtype != "auto" or wanted == "fp32":
        return wanted
    if device.type != "cpu":
        return "fp16" if wanted == "fp16" else hardware_dtype("auto", device)
    speeds = matmul_speeds(n_embd, MOST_TOKENS)
    return "bf16" if wanted == "bf16" and speeds["bf16"] > EMULATED * speeds["fp32"] else "fp32"


def matmul_speed(f, device: torch.device) -> float:
    """FLOP/s of matmuls on one device, in the dtype that the flags f will train in."""
    if device.type == "cpu":
        speeds = matmul_speeds(512, MOST_TOKENS, SIZING_S)
        auto = "fp32" if f.deterministic else faster_of(speeds)
        return speeds["bf16" if f.dtype == "bf16" or (f.dtype == "auto" and auto == "bf16") else "fp32"]
    size, seconds = 4096, []
    a = torch.ones(size, size, device=device, dtype=DTYPES[hardware_dtype(f.dtype, device)])
    for _ in range(ROUNDS):
        t0 = time.perf_counter()
        torch.mm(a, a)[0, 0].item()  # waits for the device
        seconds.append(time.perf_counter() - t0)
    return 2 * size**3 / min(seconds)


def faster_of(speeds: dict[str, float]) -> str:
    """bf16 or fp32, by what matmul_speeds found."""
    return "bf16" if speeds["bf16"] >= BF16_GAIN * speeds["fp32"] else "fp32"


def faster_dtype(n_embd: int, tokens: int) -> tuple[str, str]:
    """bf16 or fp32 for micro-batches of so many tokens on this CPU, and a line with the figures that decided."""
    speeds = matmul_speeds(n_embd, tokens)
    name = faster_of(speeds)
    bf16, fp32 = speeds["bf16"] / 1e12, speeds["fp32"] / 1e12
    return name, f"dtype auto: {name}, matmuls of this model reach {bf16:.3f} TFLOP/s in bf16 and {fp32:.3f} in fp32"


def matmul_speeds(n_embd: int, tokens: int, most_seconds: float = MOST_SECONDS) -> dict[str, float]:
    """FLOP/s of a block's matmuls on this CPU in fp32 and bf16, measured in less than 0.1 s by default.

    A small one first shows what fits into that time: as many rows (tokens) as possible, or a narrower block for 128.
    """
    deadline, tokens = time.perf_counter() + most_seconds, min(tokens, MOST_TOKENS)
    width, rows, kinds = min(n_embd, 128), min(tokens, 64), 1
    while True:
        speeds, done = time_matmuls(width, rows, kinds, deadline), sum(KINDS[:kinds]) * rows * width**2
        left = max(0.0, deadline - time.perf_counter()) / sum(1 / speed for speed in speeds.values())
        fits, kinds = min(MOST_FLOPS / 2, left) / ROUNDS / sum(KINDS), len(KINDS)
        width = max(width, min(n_embd, 64 * int(math.sqrt(fits / min(tokens, 128)) / 64)))
        rows = min(tokens, int(fits / width**2))
        if sum(KINDS) * rows * width**2 < 1.5 * done:
            return speeds


def time_matmuls(width: int, rows: int, kinds: int, deadline: float) -> dict[str, float]:
    """FLOP/s in fp32 and bf16 of the first kinds of a block's matmuls: each one's best time of ROUNDS, interleaved.

    deadline: on time.perf_counter's clock; two rounds are timed even after it.
    """
    pairs = {name: block_matmuls(width, rows, DTYPES[name]) for name in ("fp32", "bf16")}
    best = {name: [math.inf] * kinds for name in pairs}
    for done in range(ROUNDS):
        if done > 1 and time.perf_counter() > deadline:
            break
        for i in range(kinds):
            for name in pairs:
                best[name][i] = min(best[name][i], matmul_seconds(*pairs[name][i]))
    return {name: sum(KINDS[:kinds]) * rows * width**2 / sum(seconds) for name, seconds in best.items()}


def block_matmuls(width: int, rows: int, dtype: torch.dtype) -> list[tuple[Tensor, Tensor]]:
    """Operands of a block's matmuls: queries, keys and values; into the MLP; out of it; the gradient of its weight.

    All ones: drawing random numbers would advance the RNG that a run's own edits use.
    """
    x, inside = torch.ones(rows, width, dtype=dtype), torch.ones(rows, 4 * width, dtype=dtype)
    weights = [torch.ones(shape, dtype=dtype) for shape in ((3 * width, width), (4 * width, width), (width, 4 * width))]
    return [*zip((x, x, inside), (weight.T for weight in weights)), (inside.T, x)]


def matmul_seconds(a: Tensor, b: Tensor) -> float:
    """Seconds that a @ b takes."""
    t0 = time.perf_counter()
    torch.mm(a, b)
    return time.perf_counter() - t0
