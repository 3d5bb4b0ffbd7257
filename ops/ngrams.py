"""Embeddings of hashed n-grams (Over-Tokenized Transformer, Huang et al. 2025); their optimizer."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ops.elementwise import shift_right
from ops.parallel import get_world_size, is_dtensor, to_local

# Multipliers from xxHash and MurmurHash. A 31-bit hash times a 32-bit multiplier fits into int64
HASH_A = 0x9E3779B1
HASH_B = 0x85EBCA6B
HASH_MODULUS = 2**31


def hash_ngrams(tokens: Tensor, longest: int, eot: int | None) -> Tensor:
    """Hash the n-grams of 2, ..., longest tokens that end at each token of tokens, integer (B, T).

    h = token, then h = (h * HASH_A + earlier token) % 2^31 for each token further back. eot: the
    token that starts a document. Before it, and before the first token, there is "no token", 0;
    other tokens count from 1. Returns int64 (B, T, longest - 1).
    """
    hashes = []
    previous = tokens.long() + 1
    code = previous
    for _ in range(2, longest + 1):
        previous = shift_right(previous)  # one token further back
        if eot is not None:
            # The next shift carries this 0 along: longer n-grams end there as well
            previous = previous.masked_fill(tokens == eot, 0)
        code = (code * HASH_A + previous) % HASH_MODULUS
        hashes.append(code)
    return torch.stack(hashes, dim=-1)


def rows_of_hashes(hashes: Tensor, n_rows: int) -> Tensor:
    """Return the row of a table of n_rows for each hash, int64.

    >> 7 drops the badly mixed low bits, which depend on the hash's low bits only.
    """
    return ((hashes * HASH_B) >> 7) % n_rows


def dropout_weights(hashes: Tensor, dropout: float, seed: int) -> Tensor | None:
    """Make the weights of n-grams: 0 with a probability of `dropout`, otherwise 1 / (1 - dropout).

    hashes: (B, T, N). Returns fp32 (B, T, N), or None for ones. Pseudo-random by hashing instead of
    a generator, so that the result is the same however the batch is divided.
    """
    if not dropout:
        return None
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

    def forward(self, hashes: Tensor, dropout: float = 0.0, seed: int = 0) -> Tensor:
        """Sum the rows of each token's n-grams: fp32 (B, T, C).

        hashes: int64 (B, T, N), of n-grams of N lengths. dropout, seed: as in dropout_weights.
        """
        B, T, N = hashes.shape
        weights = dropout_weights(hashes, dropout, seed)
        if weights is not None:
            weights = weights.view(B * T, N)
        summed = F.embedding_bag(
            rows_of_hashes(hashes, self.num_embeddings).view(B * T, N),
            self.weight.float(),  # fp32 already, except where FSDP has gathered it in bf16
            mode="sum",
            per_sample_weights=weights,
            sparse=self.sparse,
        )
        return summed.view(B, T, -1)


def use_sparse_gradients(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """On one CPU rank, give tables that model.py's RMSprop trains sparse gradients.

    A step reads few rows of an n-gram table; updating the others would take as long as a layer.
    GPUs, DDP and FSDP need dense gradients.
    """
    weights: set[Tensor] = set()
    for group in optimizer.param_groups:
        if group.get("kind") == "rmsprop" and get_world_size() == 1:
            weights.update(p for p in group["params"] if p.is_cpu and not is_dtensor(p))
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            module.sparse = module.weight in weights


def grad_values(param: Tensor) -> Tensor:
    """Return the gradient of a parameter; of a sparse one the rows, of which none occurs twice."""
    if not param.grad.is_sparse:
        return param.grad
    param.grad = param.grad.coalesce()  # adds up the rows that do, as clipping needs, too
    return param.grad.values()


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
