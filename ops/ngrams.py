"""Hashes of n-grams, rows of their table, and which ones dropout keeps."""

import torch
import torch.nn.functional as F
from torch import Tensor

HASH_A, HASH_B, HASH_MODULUS = 0x9E3779B1, 0x85EBCA6B, 1 << 31  # multipliers of MurmurHash and xxHash


def ngram_hashes(tokens: Tensor, length: int, longest: int, eot: int | None) -> Tensor:
    """Hashes of the n-grams of 2 to `longest` tokens that end at each of the last `length` of tokens (B, S).

    int64 (B, length, longest - 1). Where an n-gram would reach back past the start of the context, or of its document
    (which begins with `eot`), it has "no token".
    """
    tokens = tokens[:, -(length + longest - 1) :]
    doc_ids = None if eot is None else (tokens == eot).cumsum(1)
    code, codes = tokens[:, -length:].long() + 1, []
    for back in range(1, longest):
        before = F.pad(tokens + 1, (back, 0))[:, -length - back : -back]
        if doc_ids is not None:
            same_doc = doc_ids == F.pad(doc_ids, (back, 0), value=-1)[:, :-back]
            before = before * same_doc[:, -length:]
        code = (code * HASH_A + before) % HASH_MODULUS
        codes.append(code)
    return torch.stack(codes, -1)


def ngram_rows(codes: Tensor, n_rows: int) -> Tensor:
    """The row of a table of n_rows that each n-gram's hash falls into."""
    return (codes * HASH_B >> 7) % n_rows


def hashed_uniform(code: Tensor, place: Tensor, seed: int) -> Tensor:
    """Pseudo-random numbers in [0, 1), fp32: functions of int64 code (N, M), its place (N, 1) and the seed."""
    for mixed_in in (place * HASH_B % HASH_MODULUS, seed % HASH_MODULUS):  # multiplying and folding, as in MurmurHash
        code = (code ^ mixed_in) * HASH_A % HASH_MODULUS
        code = (code ^ code >> 15) * HASH_B % HASH_MODULUS
        code = code ^ code >> 13
    return (code % (1 << 24)) / (1 << 24)
