"""Embeddings of hashed n-grams (Over-Tokenized Transformer, Huang et al. 2025), and how to update
them."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ops.functional import shift_right
from ops.parallel import to_local

# Multipliers from xxHash and MurmurHash. A 31-bit hash times a 32-bit multiplier fits into int64
HASH_A = 0x9E3779B1
HASH_B = 0x85EBCA6B
HASH_MODULUS = 2**31


def hash_ngrams(
    tokens: Tensor,
    length: int,
    longest: int,
    n_rows: int,
    eot: int | None,
    dropout: float,
    seed: int,
) -> tuple[Tensor, Tensor | None]:
    """Hash the n-grams that end at each of the last `length` tokens to rows of a table.

    tokens: integer (B, S).
    longest: the n-grams have 2, ..., longest tokens.
    n_rows: the table's number of rows.
    eot: the token that starts a document. Before it, and before the first token, there is
    "no token".
    dropout, seed: as in dropout_weights.
    Returns the rows, int64 (B, length, longest - 1), and their weights; None for ones.
    """
    hashes = []
    previous = tokens.long() + 1  # 0 stands for "no token"
    code = previous
    for _ in range(2, longest + 1):
        previous = shift_right(previous)  # one token further back
        if eot is not None:
            # The next shift carries this 0 along: longer n-grams end there as well
            previous = previous.masked_fill(tokens == eot, 0)
        code = (code * HASH_A + previous) % HASH_MODULUS
        hashes.append(code)
    hashes = torch.stack(hashes, dim=-1)[:, -length:]

    # >> 7 drops the badly mixed low bits, which depend on the hash's low bits alone
    rows = ((hashes * HASH_B) >> 7) % n_rows
    weights = dropout_weights(hashes, dropout, seed) if dropout else None
    return rows, weights


def dropout_weights(hashes: Tensor, dropout: float, seed: int) -> Tensor:
    """Make the weights of n-grams under dropout: 0 with this probability, else 1 / (1 - dropout).

    hashes: (B, T, N). Returns fp32 (B, T, N). Pseudo-random by hashing instead of a generator, so
    that the result is the same however the batch is divided.
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


class NgramEmbedding(nn.Embedding):
    """A table of embeddings in which each n-gram has the row that its hash selects."""

    def forward(self, rows: Tensor, weights: Tensor | None) -> Tensor:
        """Sum the rows of each token's n-grams: fp32 (B, T, C).

        rows: int64 (B, T, N), for n-grams of N lengths. weights: their weights in the sum, of that
        shape; None for ones.
        """
        B, T, N = rows.shape
        if weights is not None:
            weights = weights.view(B * T, N)
        summed = F.embedding_bag(
            rows.view(B * T, N),
            self.weight.float(),  # fp32 already, except where FSDP has gathered it in bf16
            mode="sum",
            per_sample_weights=weights,
            sparse=self.sparse,
        )
        return summed.view(B, T, -1)


def rmsprop_rows_(
    weight: Tensor,
    grad: Tensor,
    state: dict,
    lr: float,
    beta: float,
    weight_decay: float,
    eps: float,
) -> None:
    """Update a table by RMSprop (Tieleman and Hinton 2012) with one mean square per row, in place.

    Rows that a step did not read change by weight decay alone. grad: dense, or on a CPU sparse
    with the rows that were read. state: holds "mean_square" (rows, 1) and "decay".
    """
    if "mean_square" not in state:
        state["mean_square"] = torch.zeros_like(weight[:, :1])
    means = state["mean_square"] = to_local(state["mean_square"])
    means.mul_(beta).clamp_(min=eps**2)  # avoids 0 / 0 for rows that were never read

    # Decaying the whole table takes as long as a layer, so decay is applied once it reaches 1 %
    state["decay"] = state.get("decay", 1.0) * (1 - lr * weight_decay)
    if state["decay"] < 0.99:
        weight.mul_(state["decay"])
        state["decay"] = 1.0

    if grad.is_sparse:
        grad = grad.coalesce()  # rows that occur twice are added up
        rows = grad.indices()[0]
        grad = grad.values()
        means[rows] += (1 - beta) * grad.square().mean(1, keepdim=True)
        weight.index_add_(0, rows, grad / means[rows].sqrt(), alpha=-lr)
    else:
        means += (1 - beta) * grad.square().mean(1, keepdim=True)
        weight.addcdiv_(grad, means.sqrt(), value=-lr)
