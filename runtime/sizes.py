"""--params and --minutes: which model, batch and number of steps suit a number of weights, or a time."""

import math
import time
from collections.abc import Callable

import torch

from ops.attention import attention
from runtime.ranks import DistContext, run_on_rank0

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
BF16_GAIN = (
    1.2  # how many times faster bf16 matmuls must be: casts and norms in bf16 cost a part of that
)

# Tokens per weight of the blocks that gave the lowest loss in half a minute to 40 on two cores, weights per token of a
# small text, the fraction of matmul speed that training reached on a CPU, and the weight decay with which models of at
# least LARGE weights per token of a text may see it 12 times (docs/rates.md).
TOKENS_PER_WEIGHT, WEIGHTS_PER_TOKEN, REACHED, STRONG_DECAY, LARGE = 10, 9, 0.6, 0.8, 2


def most_epochs(weight_decay: float) -> int:
    """How often --minutes has a text seen: with n-grams, more epochs gave no lower loss on three small texts."""
    return 12 if weight_decay >= STRONG_DECAY else 6


def largest_divisor(n: int, most: int) -> int:
    """The largest divisor of n that is at most `most`; at least 1."""
    for divisor in range(min(n, max(1, most)), 0, -1):
        if n % divisor == 0:
            return divisor


def sizes(params: float, given: dict, tokens: float = 0) -> dict:
    """--params: flags for a model with about this many weights in its blocks, and for a run on this many tokens.

    As in GPT-2 small, the width is 64 times the depth. tokens: 0 = 20 per weight (Hoffmann et al. 2022); the batch
    grows with their square root. N-grams help small models most; from 50M weights on there are none. given: flags that
    are fixed, and from which the others follow.
    """
    n_embd = (16 * params / 3) ** (
        1 / 3
    )  # where 12 n_layer n_embd**2 weights have n_embd = 64 n_layer
    unit = 64 if n_embd < 480 else 128  # a head
    n_embd = unit * max(1, round(n_embd / unit))
    if (
        "n_layer" not in given and params < 18 * n_embd**2
    ):  # one layer cannot do induction: narrower
        n_embd = max(64, n_embd - unit)
    n_embd = max(1, given.get("n_embd", n_embd))
    n_layer = max(1, given.get("n_layer", round(params / (12 * n_embd**2))))
    head = next((size for size in (128, 64) if n_embd % size == 0), n_embd)
    weights = 12 * n_layer * n_embd**2
    tokens = tokens or 20 * weights
    batch_tokens = 1024 * 2 ** max(1, round(math.log2(8 * (tokens / 8e6) ** 0.5)))
    batch_tokens = max(1, given.get("batch_tokens", batch_tokens))
    has_ngrams, small = weights < 5e7, n_embd <= 256  # measured for 128
    return dict(
        n_layer=n_layer,
        n_embd=n_embd,
        n_head=n_embd // head,
        batch_tokens=batch_tokens,
        max_steps=max(1, round(tokens / batch_tokens)),
        eval_every=250,
        seq_len=2048 if small else 1024,
        window="SL:512" if small else "L",
        short_frac=0.7 if small else 0.0,
        eval_tokens=min(10485760, max(262144, 16 * batch_tokens)),
        ngram=-1 if has_ngrams else 0,
        ngram_rows=(131072 if small else 65536) if has_ngrams else 16384,
    )


def tokens_within(
    minutes: float, flop_s: float, n_layer: int, n_embd: int, seq_len: int, vocab_size: int
) -> float:
    """Tokens that a model sees in a time, on devices that reach `flop_s` in matmuls together."""
    weights = 12 * n_layer * n_embd**2 + vocab_size * n_embd
    return REACHED * flop_s * 0.9 * 60 * minutes / (6 * weights + 6 * n_layer * n_embd * seq_len)


def sizes_within(
    minutes: float, given: dict, seq_len: int, vocab_size: int, text_tokens: float, flop_s: float
) -> dict:
    """--minutes alone: params, and the flags of `sizes`, for the largest model that sees enough tokens.

    text_tokens: of the training split.
    """
    for exponent in range(50):  # 0.1M to 1.5B
        params = 1e5 * 1.22**exponent
        n_layer, n_embd = (sizes(params, given)[name] for name in ("n_layer", "n_embd"))
        weights = 12 * n_layer * n_embd**2
        tokens = tokens_within(minutes, flop_s, n_layer, n_embd, seq_len, vocab_size)
        often = weights >= LARGE * text_tokens and tokens >= most_epochs(STRONG_DECAY) * text_tokens
        enough = often or tokens >= TOKENS_PER_WEIGHT * weights
        if exponent == 0 or enough and weights <= WEIGHTS_PER_TOKEN * text_tokens:
            decay = dict(weight_decay=STRONG_DECAY) if often else {}
            tokens = min(tokens, most_epochs(STRONG_DECAY if often else 0) * text_tokens)
            best = sizes(params, given, tokens) | decay | dict(params=round(params))
    return best


END_S = 4.0  # of --minutes: for imports, the last sample and checkpoint


def fraction_done(f, step: int, epochs: float, wall_s: float, tail_s: float) -> float:
    """How much of a run is done, from 0 to 1 and beyond: of its steps, or under --minutes of the time for training.

    f: the flags as attributes; epochs: how often the text has been seen; tail_s: what the last step and evaluation will
    take, so that the whole run ends in time.
    """
    if not f.minutes:
        return step / f.max_steps
    return max(
        wall_s / max(1e-9, 60 * f.minutes - END_S - tail_s), epochs / most_epochs(f.weight_decay)
    )


# ---------------------------------------------------------------------------------------------------------------------
# The speed of matmuls


def fastest_s(function: Callable, least: int = 1) -> float:
    """Seconds of the fastest of the calls that 0.1 s allows, and of at least so many."""
    seconds, end = [], time.perf_counter() + 0.1
    while len(seconds) < least or time.perf_counter() < end:
        t0 = time.perf_counter()
        function()
        seconds.append(time.perf_counter() - t0)
    return min(seconds)


def matmul_flops(device: torch.device, dtype: torch.dtype, width: int, flop: float = 3e8) -> float:
    """FLOP/s of matmuls of this width, of about `flop` each: the fastest of those that 0.1 s allows, at least one."""
    rows = max(64, round(flop / (8 * width**2)))
    x, w = (
        torch.ones(rows, width, dtype=dtype, device=device),
        torch.ones(width, 4 * width, dtype=dtype, device=device),
    )
    return (
        8 * rows * width**2 / fastest_s(lambda: (x @ w)[0, 0].item())
    )  # which waits for the device


def attention_s(backend: str, shape: tuple[int, int, int, int]) -> float:
    """Seconds of causal attention in bf16 on a CPU, forward and backward, of this shape (B, H, T, D)."""
    q = torch.ones(shape, dtype=torch.bfloat16, requires_grad=True)
    return fastest_s(lambda: attention(q, q, q, None, backend).sum().backward(), least=3)


def hardware_dtype(dtype: str, device: torch.device) -> str:
    """`dtype`; for auto bf16 on CUDA devices that have it and fp32 on other GPUs, but still auto on a CPU."""
    if dtype != "auto" or device.type == "cpu":
        return dtype
    has_bf16 = device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
    return "bf16" if has_bf16 else "fp32"


def faster_dtype(dtype: str, device: torch.device, n_embd: int) -> str:
    """`dtype`; for auto, bf16 where it is there and, on a CPU, faster than fp32 in a block's matmuls."""
    dtype = hardware_dtype(dtype, device)
    if dtype != "auto":
        return dtype
    fp32, bf16 = (matmul_flops(device, DTYPES[name], min(n_embd, 512)) for name in ("fp32", "bf16"))
    return "bf16" if bf16 >= BF16_GAIN * fp32 else "fp32"


def sampling_dtype(dtype: str, trained_in: str, n_embd: int, device: torch.device) -> str:
    """What to run a model in: `dtype`; for auto what it was trained in, where the device is fast in that."""
    if dtype != "auto" or trained_in == "fp32":
        return trained_in if dtype == "auto" else dtype
    return (
        "fp16"
        if device.type == "cuda" and trained_in == "fp16"
        else faster_dtype("auto", device, n_embd)
    )


# ---------------------------------------------------------------------------------------------------------------------
# What the flags leave open

SIZED = frozenset({"weight_decay", *sizes(1, {})})  # the flags that --params -1 chooses


def settle_flags(
    flags: dict, preset: dict, text_tokens: float, vocab_size: int, dist_ctx: DistContext
) -> dict:
    """Values for the flags that are open: dtype, attn, loss_chunk, ngram; with --minutes, steps, sizes, weight decay.

    flags, preset: all flags, as given and as the preset has them; text_tokens: of the training split. Measured on rank
    0, and the same on every rank.
    """
    device, minutes, chosen = dist_ctx.device, flags["minutes"], {}

    def choose() -> dict:
        dtype = (
            "fp32"
            if flags["deterministic"] and device.type == "cpu" and flags["dtype"] == "auto"
            else None
        )
        chosen["dtype"] = dtype = dtype or faster_dtype(flags["dtype"], device, flags["n_embd"])
        if minutes:
            width, flop = (512, 3e9) if device.type == "cpu" else (4096, 5e11)
            flop_s = matmul_flops(device, DTYPES[dtype], width, flop) * dist_ctx.world_size
        if flags["params"] == -1:
            given = {name: flags[name] for name in SIZED if flags[name] != preset[name]}
            given["seq_len"] = flags["seq_len"]  # the stream is open
            chosen.update(
                sizes_within(minutes, given, flags["seq_len"], vocab_size, text_tokens, flop_s)
                | given
            )
            step = (
                flags["seq_len"] * dist_ctx.world_size * (flags["micro_batch"] or 1)
            )  # which all ranks can share
            chosen["batch_tokens"] = max(1, round(chosen["batch_tokens"] / step)) * step
        now = flags | chosen
        if minutes:
            tokens = tokens_within(
                minutes, flop_s, now["n_layer"], now["n_embd"], now["seq_len"], vocab_size
            )
            tokens = min(tokens, most_epochs(now["weight_decay"]) * text_tokens)
            chosen["max_steps"] = max(1, round(tokens / now["batch_tokens"]))
        if now["ngram"] == -1:
            chosen["ngram"] = 6 if vocab_size < 258 else 3  # a byte tokenizer, or longer tokens
        if now["loss_chunk"] == -1:
            chosen["loss_chunk"] = 4096 if device.type == "cuda" else 2048
        if (
            now["attn"] == "auto" and device.type == "cpu"
        ):  # `blocked` is faster, while it takes little memory
            eager, longest = now["compile"] == "off", 2048
            pattern, _, width = now["window"].partition(":")
            slides = "S" in pattern and int(width or 1) < now["seq_len"]
            in_doubt = eager and not slides  # blocks leave out what a window hides
            if (
                eager
                and now["checkpointing"] not in ("auto", "none")
                or in_doubt
                and dtype != "bf16"
            ):
                longest = 0
            elif now["n_layer"] * now["n_head"] > 8:  # each head's scores are kept
                longest = 512 if eager else 1024
            blocked = now["seq_len"] <= longest
            if blocked and in_doubt and not flags["deterministic"]:
                shape = (2, now["n_head"], now["seq_len"], now["n_embd"] // now["n_head"])
                blocked = attention_s("blocked", shape) < attention_s("sdpa", shape)
            chosen["attn"] = "blocked" if blocked else "sdpa"
        return chosen

    return run_on_rank0(dist_ctx, choose)
