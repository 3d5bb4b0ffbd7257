"""Values that flags leave open: dtype, attention, loss_chunk, n-grams, decay, sizes and steps."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from data.stream import TokenStream
from ops.recompute import activation_budget
from runtime.device import DTYPES, faster_dtype, large_matmul_flops
from runtime.flag_checks import has_window
from runtime.ranks import DistContext, gather_objects
from runtime.sizes import (
    choose_finetuning,
    choose_size,
    max_epochs,
    tokens_are_bytes,
    tokens_in_time,
)

if TYPE_CHECKING:
    from train_gpt import Config

FEW_EPOCHS = 0.75  # in which nothing is memorized
PATIENCE = 5  # evaluations without improvement that end a run of more than twice the usual epochs
NGRAM_REPEATS = 0.55  # of a dataset's n-grams, at least, that occur earlier in it


def choose_auto_values(cfg: Config, stream: TokenStream, dist_ctx: DistContext) -> Config:
    """Replace automatic values by chosen ones: dtype, sizes, steps, kernels, n-grams, decay.

    Each may depend on those before it. Values that were given, or come from a checkpoint, are kept.
    """
    device = dist_ctx.device
    dtype = cfg.dtype
    if cfg.deterministic and device.type == "cpu" and dtype == "auto":
        dtype = "fp32"  # bf16 would be chosen by timing
    cfg = replace(cfg, dtype=faster_dtype(dtype, device, cfg.n_embd))
    cfg = replace(cfg, seq_len=min(cfg.seq_len, stream.seq_len))  # of a small dataset
    cfg = choose_sizes(cfg, stream, dist_ctx)
    if cfg.loss_chunk is None:
        vocab_size = cfg.vocab_size or stream.vocab_size
        cfg = replace(cfg, loss_chunk=choose_loss_chunk(cfg, device, vocab_size))
    if cfg.attn == "auto":
        cfg = replace(cfg, attn=choose_attention(cfg, device))
    cfg = replace(cfg, **choose_by_epochs(cfg, stream))
    return gather_objects(cfg)[0]  # speeds were measured: all take rank 0's choice


# --------------------------------------------------------------------------------------------------
# Kernels


def choose_loss_chunk(cfg: Config, device: torch.device, vocab_size: int) -> int:
    """On a GPU, as many tokens as fit their logits into a tenth of its memory, up to 32,768."""
    if device.type != "cuda":
        return 2048
    if cfg.dtype == "fp16":
        return 4096  # the head's gradient is a sum over the tokens of a chunk, and could overflow
    # Logits and their gradient; eager, also three tensors of their size in fp32
    eager_bytes = 0 if cfg.is_compiled else 12
    bytes_per_logit = 2 * DTYPES[cfg.dtype].itemsize + eager_bytes
    memory = torch.cuda.get_device_properties(device).total_memory
    available = memory * torch.cuda.get_per_process_memory_fraction()
    fitting = 0.1 * available / (bytes_per_logit * vocab_size)
    return max(1024, min(32768, 2 ** int(math.log2(fitting))))


def choose_attention(cfg: Config, device: torch.device) -> str:
    """Choose the faster of "sdpa" and, on a CPU, "blocked", which takes more memory."""
    if device.type != "cpu":
        return "sdpa"
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
    # Eager and without a window, only bf16 is faster, and not where SDPA's kernel has AMX
    if cfg.dtype == "bf16" and not torch.cpu._is_amx_tile_supported():
        return "blocked"
    return "sdpa"


# --------------------------------------------------------------------------------------------------
# Sizes and steps


def choose_sizes(cfg: Config, stream: TokenStream, dist_ctx: DistContext) -> Config:
    """Choose batch and steps, with --minutes also the model's size, where they are automatic."""
    n_tokens, vocab_size = stream.train.n_tokens, stream.vocab_size
    # A batch that all ranks can share
    smallest = cfg.seq_len * dist_ctx.world_size * (cfg.micro_batch or 1)
    if cfg.init_from:
        cfg = replace(cfg, **choose_finetuning(cfg, n_tokens, smallest))
    # --minutes chooses the steps, which a resumed run has already
    if cfg.minutes and "max_steps" not in cfg.given:
        flops = large_matmul_flops(dist_ctx.device, DTYPES[cfg.dtype]) * dist_ctx.world_size
        if cfg.params is None:
            cfg = replace(cfg, **choose_size(cfg, n_tokens, vocab_size, flops))
            if "batch_tokens" not in cfg.given:
                n_smallest = max(1, round(cfg.batch_tokens / smallest))
                cfg = replace(cfg, batch_tokens=smallest * n_smallest)
        tokens = tokens_in_time(cfg, n_tokens, vocab_size, flops)
        cfg = replace(cfg, max_steps=max(1, round(tokens / cfg.batch_tokens)))
        # Short sequences save time, which is left over if the epochs end first: tokens_in_time
        # counts FLOPs of whole sequences
        has_time = tokens == max_epochs(cfg, n_tokens, vocab_size) * n_tokens
        if has_time and "short_frac" not in cfg.given:
            cfg = replace(cfg, short_frac=0.0)
    if cfg.eval_every is None:  # ten evaluations
        cfg = replace(cfg, eval_every=math.ceil(cfg.max_steps / 10))
    if cfg.minutes and "eval_every" not in cfg.given:
        # An evaluation takes 0.4 of the time of training on its tokens: a twentieth between two
        eval_tokens = stream.num_eval_seqs(cfg.eval_tokens) * cfg.seq_len
        seldom = math.ceil(8 * eval_tokens / cfg.batch_tokens)
        cfg = replace(cfg, eval_every=max(cfg.eval_every, seldom))
    # Short sequences are eighths of whole ones, and so do not begin at documents
    if cfg.seq_len % 8 or cfg.doc_align:
        cfg = replace(cfg, short_frac=0.0)
    return cfg


# --------------------------------------------------------------------------------------------------
# By the dataset and the number of epochs


def choose_by_epochs(cfg: Config, stream: TokenStream) -> dict[str, Any]:
    """Choose n-grams, dropout, the decay of embeddings, patience, where automatic."""
    epochs = cfg.max_steps * cfg.batch_tokens / (stream.seqs_per_epoch * cfg.seq_len)
    ngram = cfg.ngram
    if ngram is None:
        ngram = 4 if cfg.ngram_rows >= 2**18 else 3  # a small table has no room for 4-grams
        if tokens_are_bytes(stream.vocab_size):
            ngram = 6
        if epochs > FEW_EPOCHS:
            n_tokens = min(stream.train.n_tokens, 2**22)
            start = stream.train.read_sequences(np.array([0]), n_tokens)[0]
            ngram = choose_ngram(start, stream.vocab_size, longest=ngram)

    dropout = cfg.dropout
    if dropout is None:
        # It gains nothing in 2.4 to 4.4 epochs, 1.3 % in 5 to 6 (docs/recipe.md)
        dropout = 0.1 if epochs > 4 else 0.0
        # --init_from was not tried. With a budget, the compiler may recompute another mask
        if cfg.init_from or activation_budget(cfg.checkpointing) < 1:
            dropout = 0.0

    ngram_dropout = cfg.ngram_dropout
    if ngram_dropout is None:
        ngram_dropout = dropout_for_epochs(epochs) if ngram > 1 else 0.0

    embed_decay = cfg.embed_decay
    if embed_decay is None:
        # It lowers the loss where the dataset is repeated, and may raise it otherwise
        # (docs/recipe.md). Embeddings of --init_from are trained already
        embed_decay = min(1.5, max(0.0, epochs - FEW_EPOCHS))
        if cfg.optimizer == "adamw" or cfg.init_from:
            embed_decay = 0.0

    patience = cfg.patience
    if patience is None:
        usual = max_epochs(cfg, stream.train.n_tokens, stream.vocab_size)
        patience = PATIENCE if epochs > 2 * usual else 0
        if cfg.init_from and "max_steps" not in cfg.given:
            patience = 3  # until val_loss rises
    return dict(
        dropout=dropout,
        ngram=ngram,
        ngram_dropout=ngram_dropout,
        embed_decay=embed_decay,
        patience=patience,
    )


def dropout_for_epochs(epochs: float) -> float:
    """Return the probability of dropping an n-gram's embedding in a run of so many epochs.

    n-grams of a dataset that is repeated are memorized. So there is no dropout up to 0.75 epochs;
    then it grows so that each n-gram is used in 1.3 of 2 epochs, 1.9 of 8, and in 2.2 at most.
    """
    repeats = max(0.0, epochs - FEW_EPOCHS)
    return 1 - 1 / (1 + 0.45 * repeats)


def choose_ngram(tokens: np.ndarray, vocab_size: int, longest: int) -> int:
    """Return the length of the longest n-grams, from 2 to `longest`, that have mostly occurred.

    Others are memorized (docs/recipe.md). tokens: int64 (N,), the first of the dataset.
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
