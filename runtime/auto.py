"""--params and --minutes: which model, batch and number of steps suit a number of weights, or a time."""

import math

from runtime.device import DTYPES, attention_s, faster_dtype, matmul_flops
from runtime.ranks import DistContext, run_on_rank0

# Tokens per weight of the blocks that gave the lowest loss in half a minute to 40 on two cores, weights per token of a
# small text, the fraction of matmul speed that training reached on a CPU, and the weight decay with which models of at
# least LARGE_MODEL weights per token of a text may see it 12 times (docs/rates.md).
TOKENS_PER_WEIGHT, WEIGHTS_PER_TOKEN, MFU_ON_CPU, STRONG_DECAY, LARGE_MODEL = 10, 9, 0.6, 0.8, 2


def max_epochs(weight_decay: float) -> int:
    """How often --minutes has a text seen: with n-grams, more epochs gave no lower loss on three small texts."""
    return 12 if weight_decay >= STRONG_DECAY else 6


def flags_for_size(params: float, given: dict, tokens: float = 0) -> dict:
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
    return MFU_ON_CPU * flop_s * 0.9 * 60 * minutes / (6 * weights + 6 * n_layer * n_embd * seq_len)


def largest_size_for_time(
    minutes: float, given: dict, seq_len: int, vocab_size: int, text_tokens: float, flop_s: float
) -> dict:
    """--minutes alone: params, and the flags of `sizes`, for the largest model that sees enough tokens.

    text_tokens: of the training split.
    """
    for exponent in range(50):  # 0.1M to 1.5B
        params = 1e5 * 1.22**exponent
        n_layer, n_embd = (flags_for_size(params, given)[name] for name in ("n_layer", "n_embd"))
        weights = 12 * n_layer * n_embd**2
        tokens = tokens_within(minutes, flop_s, n_layer, n_embd, seq_len, vocab_size)
        often = (
            weights >= LARGE_MODEL * text_tokens
            and tokens >= max_epochs(STRONG_DECAY) * text_tokens
        )
        enough = often or tokens >= TOKENS_PER_WEIGHT * weights
        if exponent == 0 or enough and weights <= WEIGHTS_PER_TOKEN * text_tokens:
            decay = dict(weight_decay=STRONG_DECAY) if often else {}
            tokens = min(tokens, max_epochs(STRONG_DECAY if often else 0) * text_tokens)
            best = flags_for_size(params, given, tokens) | decay | dict(params=round(params))
    return best


END_S = 4.0  # of --minutes: for imports, the last sample and checkpoint


def get_progress(f, step: int, epochs: float, wall_s: float, tail_s: float) -> float:
    """How much of a run is done, from 0 to 1 and beyond: of its steps, or under --minutes of the time for training.

    f: the flags as attributes; epochs: how often the text has been seen; tail_s: what the last step and evaluation will
    take, so that the whole run ends in time.
    """
    if not f.minutes:
        return step / f.max_steps
    return max(
        wall_s / max(1e-9, 60 * f.minutes - END_S - tail_s), epochs / max_epochs(f.weight_decay)
    )


# ---------------------------------------------------------------------------------------------------------------------
# The speed of matmuls


# ---------------------------------------------------------------------------------------------------------------------
# What the flags leave open

SIZED = frozenset({"weight_decay", *flags_for_size(1, {})})  # the flags that --params -1 chooses


def choose_auto_values(
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
                largest_size_for_time(
                    minutes, given, flags["seq_len"], vocab_size, text_tokens, flop_s
                )
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
            tokens = min(tokens, max_epochs(now["weight_decay"]) * text_tokens)
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
