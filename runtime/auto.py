"""What flags leave open: sizes for --params and --minutes, steps, dtype, dropout of n-grams, ..."""

import dataclasses
import math

import numpy as np
import torch

from data.stream import TokenStream
from runtime.flag_checks import has_window
from runtime.ranks import DistContext, run_on_rank0
from runtime.speed import DTYPES, faster_dtype, matmul_flops

# Measured on CPUs, for half a minute to 40 (docs/rates.md). Parameters are those of the blocks, and
# tokens those of the training split
TOKENS_PER_PARAM = 10  # at least, to train on
BYTES_FOR_WIDTH = 4  # per parameter, at least, for 2 x 128, which gains more than its time costs
PAIRS_FOR_WIDTH = 2.2
EPOCHS_FOR_WIDTH = 1.3  # of byte pairs, which are enough as well
PARAMS_PER_TOKEN = 9  # at most
MAX_EPOCHS = 6  # of bytes
MAX_EPOCHS_OF_PAIRS = 5  # of longer tokens, which are memorized sooner
LARGE_MODEL = 2  # parameters per byte, from which more epochs help, with the next two
STRONG_DECAY = 0.8  # weight decay
STRONG_DECAY_EPOCHS = 12
MFU_ON_CPU = 0.6
FEW_EPOCHS = 0.75  # in which nothing is memorized
NGRAM_REPEATS = 0.55  # of a dataset's n-grams, at least, that occur earlier in it


def tokens_are_bytes(vocab_size: int) -> bool:
    """Bytes, or as few other tokens; else byte pairs, or longer ones."""
    return vocab_size < 258


def max_epochs(cfg, n_tokens: int, vocab_size: int) -> float:
    """Most epochs of --minutes: more did not lower the loss on small datasets (docs/rates.md)."""
    if cfg.init_from:
        return finetuning_tokens(n_tokens) / n_tokens
    if not tokens_are_bytes(vocab_size):
        return MAX_EPOCHS_OF_PAIRS
    if cfg.weight_decay >= STRONG_DECAY:
        return STRONG_DECAY_EPOCHS
    return MAX_EPOCHS


def finetuning_tokens(n_tokens: int) -> float:
    """Tokens to train on with --init_from: 3 epochs of a million, 88 of 3,600, at least one."""
    return max(n_tokens, 3e6 * (n_tokens / 1e6) ** 0.4)


def tokens_for_params(n_params: int) -> int:
    """Tokens that a model of this size trains on: 20 per parameter (Hoffmann et al. 2022)."""
    return 20 * n_params


def batch_for_tokens(tokens: float) -> int:
    """Tokens a step, a power of 2: they grow with the square root of those to train on."""
    return 1024 * 2 ** max(1, round(math.log2(8 * (tokens / 8e6) ** 0.5)))


# --------------------------------------------------------------------------------------------------
# Sizes


def flags_for_size(params: float, given: dict, tokens: float = 0) -> dict:
    """Choose flags for a model with about `params` parameters in its blocks.

    given: flags that are fixed, by name, not yet checked. tokens: to train on; by default what
    suits the size.
    """
    # The 12 n_layer n_embd^2 parameters of the blocks, with n_embd = 64 n_layer as in GPT-2 small
    n_embd = (16 * params / 3) ** (1 / 3)
    multiple = 64 if n_embd < 480 else 128
    n_embd = multiple * max(1, round(n_embd / multiple))
    # Two layers at least, of less width: one cannot do induction
    if "n_layer" not in given and params < 18 * n_embd**2:
        n_embd = max(64, n_embd - multiple)
    n_embd = max(1, given.get("n_embd", n_embd))
    n_layer = max(1, given.get("n_layer", round(params / (12 * n_embd**2))))
    n_head = 1
    for head_dim in (64, 128):
        if n_embd % head_dim == 0:
            n_head = n_embd // head_dim

    n_params = 12 * n_layer * n_embd**2
    tokens = tokens or tokens_for_params(n_params)
    batch_tokens = max(1, given.get("batch_tokens", batch_for_tokens(tokens)))
    flags = dict(
        n_layer=n_layer,
        n_embd=n_embd,
        n_head=n_head,
        batch_tokens=batch_tokens,
        max_steps=max(1, round(tokens / batch_tokens)),
        eval_every=250,
        eval_tokens=min(10485760, max(262144, 16 * batch_tokens)),
    )
    # As in the presets: what was measured for a width of 128, n-grams only for small models
    if n_embd <= 256:
        rows = 2**26 // max(128, n_embd)  # 268 MB
        flags |= dict(seq_len=2048, window="SL:512", short_frac=0.7, ngram=-1, ngram_rows=rows)
    else:
        flags |= dict(seq_len=1024, window="L", short_frac=0.0, ngram=-1, ngram_rows=65536)
    if n_params >= 5e7:
        flags |= dict(ngram=0, ngram_rows=16384)
    return flags


def tokens_in_time(cfg, vocab_size: int, flops: float) -> float:
    """Tokens that a run trains on in --minutes, on devices with so many FLOP/s in matmuls."""
    n_params = 12 * cfg.n_layer * cfg.n_embd**2 + vocab_size * cfg.n_embd
    flop_per_token = 6 * n_params + 6 * cfg.n_layer * cfg.n_embd * cfg.seq_len
    return MFU_ON_CPU * flops * 0.9 * 60 * cfg.minutes / flop_per_token


def choose_size(cfg, n_tokens: int, vocab_size: int, flops: float) -> dict:
    """--params -1: choose flags for the largest model that trains on enough tokens in --minutes.

    Given flags are kept. n_tokens: in the training split. flops: of all devices together.
    """
    chosen_here = {"weight_decay", *flags_for_size(1, {})}
    given = {name: getattr(cfg, name) for name in cfg.given if name in chosen_here}
    given["seq_len"] = cfg.seq_len  # the dataset is open
    has_shape = bool({"n_layer", "n_embd"} & given.keys())
    is_bytes = tokens_are_bytes(vocab_size)
    can_decay = is_bytes and given.get("weight_decay", STRONG_DECAY) >= STRONG_DECAY

    for exponent in range(49, -1, -1):  # from 1.7B parameters to 0.1M
        params = 1e5 * 1.22**exponent
        flags = flags_for_size(params, given) | given
        n_params = 12 * flags["n_layer"] * flags["n_embd"] ** 2
        tokens = tokens_in_time(dataclasses.replace(cfg, **flags), vocab_size, flops)
        if not is_bytes:
            tokens = min(tokens, MAX_EPOCHS_OF_PAIRS * n_tokens)

        # Four layers of width 64 take nearly as long as two of 128
        if not has_shape and flags["n_embd"] == 64 and flags["n_layer"] > 3:
            continue
        enough_tokens = TOKENS_PER_PARAM * n_params
        if (flags["n_layer"], flags["n_embd"]) == (2, 128):
            if is_bytes:
                enough_tokens = BYTES_FOR_WIDTH * n_params
            else:
                enough_tokens = min(PAIRS_FOR_WIDTH * n_params, EPOCHS_FOR_WIDTH * n_tokens)

        is_large = n_params >= LARGE_MODEL * n_tokens
        repeats = can_decay and is_large and tokens >= STRONG_DECAY_EPOCHS * n_tokens
        if (repeats or tokens >= enough_tokens) and n_params <= PARAMS_PER_TOKEN * n_tokens:
            break

    chosen = dict(params=round(params), weight_decay=cfg.weight_decay)
    if is_bytes:  # their n-grams are few
        chosen["ngram_rows"] = min(131072, flags["ngram_rows"])
    if repeats:
        chosen["weight_decay"] = STRONG_DECAY
    sized = dataclasses.replace(cfg, **(chosen | given))
    most_tokens = max_epochs(sized, n_tokens, vocab_size) * n_tokens
    return flags_for_size(params, given, min(tokens, most_tokens)) | chosen | given


# --------------------------------------------------------------------------------------------------
# Regularization by the text and the number of epochs


def choose_ngram(tokens: np.ndarray, vocab_size: int, longest: int) -> int:
    """The length of the longest n-grams, from 2 to `longest`, most of which have occurred before.

    Others are memorized (docs/rates.md). tokens: int64 (N,), the first of the dataset.
    """
    # Each n-gram as a number in base vocab_size
    ngrams = tokens[:-1] * vocab_size + tokens[1:]
    for length in range(3, longest + 1):
        ngrams = ngrams[:-1] * vocab_size + tokens[length - 1 :]
        in_order = np.sort(ngrams)
        n_repeats = np.count_nonzero(in_order[1:] == in_order[:-1])
        if n_repeats < NGRAM_REPEATS * len(ngrams):
            return length - 1
    return longest


def get_ngram_dropout(cfg, epochs: float) -> float:
    """Probability of dropping an n-gram's embedding; --ngram_dropout -1 chooses it by the epochs.

    n-grams of a dataset that is repeated are memorized. So there is no dropout up to 0.75 epochs;
    then it grows so that each n-gram is used in 1.3 of 2 epochs, 1.9 of 8, and in 2.2 at most.
    """
    if cfg.ngram_dropout >= 0:
        return cfg.ngram_dropout
    if cfg.ngram < 2:
        return 0.0
    repeats = max(0.0, epochs - FEW_EPOCHS)
    return 1 - 1 / (1 + 0.45 * repeats)


def get_embed_decay(cfg, epochs: float) -> float:
    """The decay of the embeddings in a run: that of its steps at the peak rate, added up.

    --embed_decay -1 chooses it by the epochs: it lowers the loss where the dataset is repeated, and
    may raise it otherwise (docs/rates.md). Not with --init_from, whose embeddings are trained
    already.
    """
    if cfg.embed_decay >= 0:
        return cfg.embed_decay
    if cfg.optimizer == "adamw" or cfg.init_from:
        return 0.0
    return min(1.5, max(0.0, epochs - FEW_EPOCHS))


# --------------------------------------------------------------------------------------------------
# All that is open


def choose_auto_values(cfg, stream: TokenStream, dist_ctx: DistContext) -> dict:
    """Choose flags that are open: dtype, attn, n-grams, ...; with --minutes, sizes and steps.

    Returns their values by name, the same on every rank, because rank 0 measures the speeds.
    """
    device = dist_ctx.device
    n_tokens = stream.train.n_tokens
    vocab_size = stream.meta["vocab_size"]
    chosen = dict(dtype=run_on_rank0(dist_ctx, lambda: choose_dtype(cfg, device)))
    if cfg.init_from:
        chosen |= choose_finetuning(cfg, n_tokens, dist_ctx.world_size)

    if cfg.minutes and "max_steps" not in cfg.given:  # else a resumed run has its size and steps
        dtype = DTYPES[chosen["dtype"]]
        flops = run_on_rank0(dist_ctx, lambda: measure_flops(device, dtype)) * dist_ctx.world_size
        if cfg.params == -1:
            chosen |= choose_size(cfg, n_tokens, vocab_size=vocab_size, flops=flops)
            # A batch that all ranks can share, unless one was given
            if "batch_tokens" not in cfg.given:
                multiple = cfg.seq_len * dist_ctx.world_size * (cfg.micro_batch or 1)
                n_multiples = max(1, round(chosen["batch_tokens"] / multiple))
                chosen["batch_tokens"] = n_multiples * multiple
        sized = dataclasses.replace(cfg, **chosen)
        chosen["max_steps"] = choose_steps(sized, n_tokens, vocab_size, flops)

    resolved = dataclasses.replace(cfg, **chosen)
    if resolved.loss_chunk == -1:
        chosen["loss_chunk"] = run_on_rank0(
            dist_ctx, lambda: choose_loss_chunk(resolved, device, vocab_size)
        )
    if resolved.attn == "auto" and device.type == "cpu":
        chosen["attn"] = run_on_rank0(dist_ctx, lambda: choose_attention(resolved))

    # By the epochs
    resolved = dataclasses.replace(cfg, **chosen)
    tokens = resolved.max_steps * resolved.batch_tokens
    epochs = tokens / (stream.seqs_per_epoch * resolved.seq_len)
    if resolved.ngram == -1:
        if tokens_are_bytes(vocab_size):
            chosen["ngram"] = 6
        else:  # a small table has no room for 4-grams
            chosen["ngram"] = 4 if resolved.ngram_rows >= 2**18 else 3
        if epochs > FEW_EPOCHS:
            start = stream.train.read_sequences(np.array([0]), min(n_tokens, 2**22))[0]
            chosen["ngram"] = choose_ngram(start, vocab_size, longest=chosen["ngram"])
    resolved = dataclasses.replace(cfg, **chosen)
    chosen["ngram_dropout"] = get_ngram_dropout(resolved, epochs)
    chosen["embed_decay"] = get_embed_decay(resolved, epochs)
    return chosen


def choose_dtype(cfg, device) -> str:
    if cfg.dtype == "auto" and cfg.deterministic and device.type == "cpu":
        return "fp32"  # bf16 would be chosen by timing
    return faster_dtype(cfg.dtype, device, cfg.n_embd)


def measure_flops(device, dtype) -> float:
    """FLOP/s of one device in matmuls that are large enough for it."""
    if device.type == "cpu":
        return matmul_flops(device, dtype, 512, 3e9)
    return matmul_flops(device, dtype, 4096, 5e11)


def choose_steps(cfg, n_tokens: int, vocab_size: int, flops: float) -> int:
    """--minutes: estimate how many steps there will be."""
    tokens = tokens_in_time(cfg, vocab_size, flops)
    tokens = min(tokens, max_epochs(cfg, n_tokens, vocab_size) * n_tokens)
    return max(1, round(tokens / cfg.batch_tokens))


def choose_finetuning(cfg, n_tokens: int, world_size: int) -> dict:
    """--init_from: choose batch and steps, where they are 0, by the number of training tokens.

    A step takes about half an epoch. Both are at most what a new model of this size trains on.
    """
    most_tokens = tokens_for_params(12 * cfg.n_layer * cfg.n_embd**2)
    chosen = {}
    batch_tokens = cfg.batch_tokens
    if not batch_tokens:
        multiple = cfg.seq_len * world_size * (cfg.micro_batch or 1)
        n_multiples = 2 ** max(0, round(math.log2(n_tokens / 2 / multiple)))
        most_multiples = max(1, batch_for_tokens(most_tokens) // multiple)
        batch_tokens = multiple * min(n_multiples, most_multiples)
        chosen["batch_tokens"] = batch_tokens
    if not cfg.max_steps:
        tokens = min(finetuning_tokens(n_tokens), most_tokens)
        chosen["max_steps"] = max(1, round(tokens / batch_tokens))
    return chosen


def choose_loss_chunk(cfg, device, vocab_size: int) -> int:
    """On a GPU, as many tokens as have logits of a tenth of its memory, up to 32,768."""
    if device.type != "cuda":
        return 2048
    if cfg.dtype == "fp16":
        return 4096  # the head's gradient is a sum over the tokens of a chunk, and could overflow
    # Logits and their gradient; eager, also three tensors of their size in fp32
    bytes_per_logit = 2 * DTYPES[cfg.dtype].itemsize + (0 if cfg.is_compiled else 12)
    memory = torch.cuda.get_device_properties(device).total_memory
    memory *= torch.cuda.get_per_process_memory_fraction()
    fitting = 0.1 * memory / (bytes_per_logit * (cfg.vocab_size or vocab_size))
    return max(1024, min(32768, 2 ** int(math.log2(fitting))))


def choose_attention(cfg) -> str:
    """Choose the faster of "sdpa" and "blocked" on a CPU; blocked takes more memory."""
    if not cfg.is_compiled and cfg.checkpointing not in ("auto", "none"):
        return "sdpa"
    longest = 2048
    if cfg.n_layer * cfg.n_head > 8:  # each head's scores are kept for the backward pass
        longest = 1024 if cfg.is_compiled else 512
    if cfg.seq_len > longest:
        return "sdpa"
    # Blocks leave out what a window hides
    if cfg.is_compiled or has_window(cfg):
        return "blocked"
    # Eager and without a window, bf16 alone is faster, and not where SDPA's kernel has AMX
    if cfg.dtype == "bf16" and not torch.cpu._is_amx_tile_supported():
        return "blocked"
    return "sdpa"
