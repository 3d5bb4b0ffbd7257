"""Hashes of n-grams: which rows of the embedding table they have, and which of them are dropped."""

import torch
import torch.nn.functional as F
from torch import Tensor

# Multipliers of xxHash and MurmurHash. Hashes have 31 bits, so that products fit into int64
HASH_A = 0x9E3779B1
HASH_B = 0x85EBCA6B
HASH_MODULUS = 2**31


def ngram_hashes(tokens: Tensor, length: int, longest: int, doc_eot: int | None) -> Tensor:
    """Hash the n-grams that end at each of the last `length` tokens: int64 (B, length, longest - 1).

    tokens: integer (B, S). longest: n-grams have 2 to so many tokens. Before the start of the
    context, or of a document (the token doc_eot, if given), there is "no token".
    """
    hashes = []
    before = code = tokens.long() + 1  # 0 stands for "no token"
    for _ in range(2, longest + 1):
        before = F.pad(before, (1, -1))  # one token further back
        if doc_eot is not None:
            before = before.masked_fill(tokens == doc_eot, 0)
        code = (code * HASH_A + before) % HASH_MODULUS
        hashes.append(code)
    return torch.stack(hashes, dim=-1)[:, -length:]


def ngram_table_rows(hashes: Tensor, n_rows: int) -> Tensor:
    """The row of each n-gram in a table of n_rows embeddings."""
    return ((hashes * HASH_B) >> 7) % n_rows


def ngram_keep_mask(hashes: Tensor, dropout: float, seed: int) -> Tensor:
    """Weights of n-grams under dropout: 0 with this probability, else 1 / (1 - dropout), in fp32.

    hashes: (B, T, N). A function of hash, position and seed, so that ranks and micro-batches do
    not matter.
    """
    position = torch.arange(hashes.size(1), device=hashes.device)[:, None]
    mixed = mix(hashes, position * HASH_B % HASH_MODULUS)
    mixed = mix(mixed, seed % HASH_MODULUS)
    uniform = (mixed % 2**24) / 2**24
    return (uniform >= dropout) / (1 - dropout)


def mix(hashes: Tensor, value: Tensor | int) -> Tensor:
    """Mix a value into hashes, as MurmurHash does: multiply and fold, twice."""
    hashes = (hashes ^ value) * HASH_A % HASH_MODULUS
    hashes = (hashes ^ (hashes >> 15)) * HASH_B % HASH_MODULUS
    return hashes ^ (hashes >> 13)
