"""Values that flags leave open: dtype, attention, loss_chunk, n-grams, decay, sizes and steps."""

import math
from dataclasses import replace

import numpy as np
import torch

from data.stream import TokenStream
from runtime.flag_checks import has_window
from runtime.flags import keep_flags
from runtime.ranks import DistContext, run_on_rank0
from runtime.sizes import choose_finetuning, choose_size, tokens_are_bytes, tokens_in_time
from runtime.speed import DTYPES, faster_dtype, matmul_flops

FEW_EPOCHS = 0.75  # in which nothing is memorized
NGRAM_REPEATS = 0.55  # of a dataset's n-grams, at least, that occur earlier in it

# --------------------------------------------------------------------------------------------------
# By the machine


def choose_loss_chunk(cfg, device: torch.device, vocab_size: int) -> int:
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


# --------------------------------------------------------------------------------------------------
# By the dataset and the number of epochs


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


def measure_flops(device: torch.device, dtype: torch.dtype) -> float:
    """FLOP/s of one device in matmuls that are large enough for it."""
    if device.type == "cpu":
        return matmul_flops(device, dtype, 512, 3e9)
    return matmul_flops(device, dtype, 4096, 5e11)


def choose_auto_values(cfg, saved_flags: dict, stream: TokenStream, dist_ctx: DistContext):
    """Choose flags that are open: dtype, attn, n-grams, ...; with --minutes, sizes and steps.

    saved_flags: those in the checkpoint that is resumed, which are kept, or {}. Returns cfg
    with the values, the same on every rank, because rank 0 measures the speeds.
    """
    cfg = keep_flags(cfg, saved_flags)
    device = dist_ctx.device
    n_tokens, vocab_size = stream.train.n_tokens, stream.meta["vocab_size"]
    if cfg.dtype == "auto" and cfg.deterministic and device.type == "cpu":
        cfg = replace(cfg, dtype="fp32")  # bf16 would be chosen by timing
    dtype = run_on_rank0(dist_ctx, lambda: faster_dtype(cfg.dtype, device, cfg.n_embd))
    cfg = replace(cfg, dtype=dtype)

    # Batch and steps; with --minutes also sizes, unless a resumed run has them
    shared = cfg.seq_len * dist_ctx.world_size * (cfg.micro_batch or 1)  # all ranks can share it
    if cfg.init_from:
        cfg = replace(cfg, **choose_finetuning(cfg, n_tokens, shared))
    if cfg.minutes and "max_steps" not in cfg.given:
        dtype = DTYPES[cfg.dtype]
        flops = run_on_rank0(dist_ctx, lambda: measure_flops(device, dtype)) * dist_ctx.world_size
        if cfg.params == -1:
            cfg = replace(cfg, **choose_size(cfg, n_tokens, vocab_size, flops))
            if "batch_tokens" not in cfg.given:
                cfg = replace(cfg, batch_tokens=shared * max(1, round(cfg.batch_tokens / shared)))
        tokens = tokens_in_time(cfg, n_tokens, vocab_size, flops)
        cfg = replace(cfg, max_steps=max(1, round(tokens / cfg.batch_tokens)))
    if cfg.eval_every == -1:  # ten evaluations
        cfg = replace(cfg, eval_every=math.ceil(cfg.max_steps / 10))

    # Short sequences are eighths of whole ones, and so do not begin at documents
    if cfg.seq_len % 8 or cfg.doc_align:
        cfg = replace(cfg, short_frac=0.0)

    # How it is computed
    if cfg.loss_chunk == -1:
        tokens = run_on_rank0(dist_ctx, lambda: choose_loss_chunk(cfg, device, vocab_size))
        cfg = replace(cfg, loss_chunk=tokens)
    if cfg.attn == "auto" and device.type == "cpu":
        cfg = replace(cfg, attn=run_on_rank0(dist_ctx, lambda: choose_attention(cfg)))

    # By the epochs
    epochs = cfg.max_steps * cfg.batch_tokens / (stream.seqs_per_epoch * cfg.seq_len)
    if cfg.ngram == -1:
        longest = 4 if cfg.ngram_rows >= 2**18 else 3  # a small table has no room for 4-grams
        if tokens_are_bytes(vocab_size):
            longest = 6
        if epochs > FEW_EPOCHS:
            start = stream.train.read_sequences(np.array([0]), min(n_tokens, 2**22))[0]
            longest = choose_ngram(start, vocab_size, longest)
        cfg = replace(cfg, ngram=longest)
    return replace(
        cfg,
        ngram_dropout=get_ngram_dropout(cfg, epochs),
        embed_decay=get_embed_decay(cfg, epochs),
    )
