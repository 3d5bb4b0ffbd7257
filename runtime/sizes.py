"""Sizes for --params, --minutes and --init_from: a model's shape, its batch, its steps."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from train_gpt import Config

# The loss that N parameters in blocks reach on D tokens is proportional to
#     1 + PARAMS_TERM / N^PARAMS_EXPONENT + TOKENS_TERM / D^TOKENS_EXPONENT
# with N in 100,000 and D in millions (Hoffmann et al. 2022, from whom the exponents are). The REUSE
# constants say how much more is gained by repeated tokens, and by parameters beyond what suits the
# dataset (Muennighoff et al. 2023). `python records/bench/2026-11-28_law/fit.py` fits these and the
# TERM constants to 136 runs, with an error of 1.5 % (root mean square)
PARAMS_TERM, PARAMS_EXPONENT, PARAMS_REUSE = 0.426, 0.34, 7.69
TOKENS_TERM, TOKENS_EXPONENT, TOKENS_REUSE = 0.940, 0.28, 0.989

# More epochs raise the loss of small datasets, which the formula does not show
MAX_EPOCHS_OF_BYTES, MAX_EPOCHS = 6, 5

TOKENS_PER_PARAM = 20  # Hoffmann et al. 2022
SIZES = (1e5, *(3.5e5 * 1.22**i for i in range(43)))  # parameters: 2 x 64, 2 x 128, ..., 1.5B
SEED_SPREAD = 1.005  # ratio of the losses of two seeds
MFU_ON_CPU = 0.6


def tokens_are_bytes(vocab_size: int) -> bool:
    """Bytes, or as few other tokens; else byte pairs, or longer ones."""
    return vocab_size < 258


def max_epochs(cfg: Config, n_tokens: int, vocab_size: int) -> float:
    """Most epochs of --minutes: more did not lower the loss on small datasets (docs/recipe.md)."""
    if cfg.init_from:
        return finetuning_tokens(n_tokens) / n_tokens
    return MAX_EPOCHS_OF_BYTES if tokens_are_bytes(vocab_size) else MAX_EPOCHS


def finetuning_tokens(n_tokens: int) -> float:
    """Tokens to train on with --init_from: 3 epochs of a million, 88 of 3,600, at least one."""
    return max(n_tokens, 3e6 * (n_tokens / 1e6) ** 0.4)


def batch_for_tokens(tokens: float) -> int:
    """Tokens per step, a power of 2 that grows with the square root of the tokens to train on."""
    return 1024 * 2 ** max(1, round(math.log2(8 * (tokens / 8e6) ** 0.5)))


# --------------------------------------------------------------------------------------------------
# Sizes


def flags_for_size(params: float, given: dict[str, Any], tokens: float = 0) -> dict[str, Any]:
    """Choose flags for a model with about `params` parameters in its blocks.

    given: flags that are fixed, by name. tokens: to train on; by default what suits the size.
    """
    # The 12 n_layer n_embd^2 parameters of the blocks, with n_embd = 64 n_layer as in GPT-2 small
    n_embd = (16 * params / 3) ** (1 / 3)
    multiple = 64 if n_embd < 480 else 128
    n_embd = multiple * max(1, round(n_embd / multiple))
    # Two layers at least, of less width: one cannot do induction
    if "n_layer" not in given and params < 18 * n_embd**2:
        n_embd = max(64, n_embd - multiple)
    n_embd = given.get("n_embd", n_embd)
    n_layer = given.get("n_layer", max(1, round(params / (12 * n_embd**2))))
    n_head = 1
    for head_dim in (64, 128):
        if n_embd % head_dim == 0:
            n_head = n_embd // head_dim

    n_params = 12 * n_layer * n_embd**2
    tokens = tokens or TOKENS_PER_PARAM * n_params
    batch_tokens = given.get("batch_tokens") or batch_for_tokens(tokens)
    # As in the presets: what was measured for a width of 128, n-grams for small models
    is_narrow = n_embd <= 256
    return dict(
        n_layer=n_layer,
        n_embd=n_embd,
        n_head=n_head,
        batch_tokens=batch_tokens,
        max_steps=max(1, round(tokens / batch_tokens)),
        eval_every=250,
        eval_tokens=min(10485760, max(262144, 16 * batch_tokens)),
        seq_len=2048 if is_narrow else 1024,
        window="SL:512" if is_narrow else "L",
        short_frac=0.7 if is_narrow else 0.0,
        ngram=None if n_params < 5e7 else 0,
        ngram_rows=2**26 // max(128, n_embd) if is_narrow else 65536,  # at most 268 MB
    )


def tokens_in_time(cfg: Config, n_tokens: int, vocab_size: int, flops: float) -> float:
    """Tokens that a run trains on in --minutes, on devices with so many FLOP/s in matmuls.

    n_tokens: in the training split, of which it trains on a few epochs at most.
    """
    n_params = 12 * cfg.n_layer * cfg.n_embd**2 + vocab_size * cfg.n_embd
    flop_per_token = 6 * n_params + 6 * cfg.n_layer * cfg.n_embd * cfg.seq_len
    tokens = MFU_ON_CPU * flops * 0.9 * 60 * cfg.minutes / flop_per_token
    return min(tokens, max_epochs(cfg, n_tokens, vocab_size) * n_tokens)


def effective_amount(amount: float, unique: float, reuse: float) -> float:
    """What parameters or tokens are worth: their number up to `unique`, then less and less."""
    repeats = max(0.0, amount / unique - 1)
    return min(amount, unique) + unique * reuse * (1 - math.exp(-repeats / reuse))


def expected_loss(n_params: int, tokens: float, n_tokens: int) -> float:
    """The loss after training on `tokens`, of which n_tokens are different, without its unit."""
    params = effective_amount(n_params, n_tokens / TOKENS_PER_PARAM, PARAMS_REUSE)
    tokens = effective_amount(tokens, n_tokens, TOKENS_REUSE)
    params_term = PARAMS_TERM / (params / 1e5) ** PARAMS_EXPONENT
    return 1 + params_term + TOKENS_TERM / (tokens / 1e6) ** TOKENS_EXPONENT


def choose_size(cfg: Config, n_tokens: int, vocab_size: int, flops: float) -> dict:
    """--params auto: choose flags for the size whose expected loss after --minutes is lowest.

    Given flags are kept. n_tokens: in the training split. flops: FLOP/s of all devices together.
    """
    names = flags_for_size(1, {}).keys() & set(cfg.given)
    given = {name: getattr(cfg, name) for name in names}
    given["seq_len"] = cfg.seq_len  # the dataset is open

    sizes = []
    for params in SIZES:
        sized = dataclasses.replace(cfg, **flags_for_size(params, given) | given)
        tokens = tokens_in_time(sized, n_tokens, vocab_size, flops)
        n_params = 12 * sized.n_layer * sized.n_embd**2
        sizes.append((expected_loss(n_params, tokens, n_tokens), params, tokens))

    # Of those that are as good, the smallest
    lowest_loss = min(sizes)[0]
    _, params, tokens = next(size for size in sizes if size[0] <= SEED_SPREAD * lowest_loss)
    return dict(params=round(params)) | flags_for_size(params, given, tokens) | given


def choose_finetuning(cfg: Config, n_tokens: int, multiple: int) -> dict:
    """--init_from: choose batch and steps, where they are open, by the number of training tokens.

    A step takes about half an epoch, of a multiple of `multiple` tokens. Both are at most what a
    new model of this size trains on.
    """
    most_tokens = TOKENS_PER_PARAM * 12 * cfg.n_layer * cfg.n_embd**2
    n_multiples = 2 ** max(0, round(math.log2(n_tokens / 2 / multiple)))
    most_multiples = max(1, batch_for_tokens(most_tokens) // multiple)
    batch_tokens = cfg.batch_tokens or multiple * min(n_multiples, most_multiples)
    tokens = min(finetuning_tokens(n_tokens), most_tokens)
    max_steps = cfg.max_steps or max(1, round(tokens / batch_tokens))
    return dict(batch_tokens=batch_tokens, max_steps=max_steps)
