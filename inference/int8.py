"""A trained GPT with int8 weights and one scale per output channel or table row.

A quarter of the bytes of fp32 weights are read.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from inference.decode import is_matvec, matvec
from model import GPT, Linear
from ops.ngrams import NgramEmbedding, rows_of_hashes

# Up to this many rows, the CPU's int8 kernel is faster than bf16 matmuls with dequantized weights
FEW_ROWS = 16


class Int8Weight(nn.Module):
    """Holds a weight (N, K) in int8, and the scale of each of its rows."""

    weight_int8: Tensor
    weight_scale: Tensor

    def __init__(self, weight: Tensor):
        super().__init__()
        weight = weight.float()
        scale = weight.abs().amax(1).clamp(min=1e-12) / 127  # each row's largest magnitude
        self.register_buffer("weight_int8", (weight / scale[:, None]).round().to(torch.int8))
        self.register_buffer("weight_scale", scale)

    @property
    def weight(self) -> Tensor:
        """The dequantized weight, fp32 (N, K)."""
        return self.weight_int8 * self.weight_scale[:, None]


class Int8Linear(Int8Weight):
    """Computes x (..., K) @ w (N, K).T in x's dtype, with w in int8; for inference."""

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, -2)
        if is_matvec(x):  # a single compiled row
            y = matvec(rows, self.weight_int8) * self.weight_scale
        elif x.is_cpu and len(rows) <= FEW_ROWS and rows.size(1) % 16 == 0:
            # The kernel reads 16 columns at a time and computes in bf16. It gets scales of one,
            # because it would round the real ones to bf16
            ones = torch.ones_like(self.weight_scale, dtype=torch.bfloat16)
            y = torch._weight_int8pack_mm(rows.bfloat16(), self.weight_int8, ones)
            y = y * self.weight_scale
        else:
            y = F.linear(rows, self.weight.to(x.dtype))
        return y.to(x.dtype).view(*x.shape[:-1], y.size(-1))


class Int8Embedding(Int8Weight):
    """Looks up rows of an int8 table, dequantized to fp32."""

    def forward(self, idx: Tensor) -> Tensor:
        return self.weight_int8[idx] * self.weight_scale[idx][..., None]


class Int8NgramEmbedding(Int8Embedding):
    """Sums the rows of n-grams, without dropout."""

    def forward(self, hashes: Tensor, dropout: float = 0.0, seed: int = 0) -> Tensor:
        rows = rows_of_hashes(hashes, len(self.weight_scale))
        return super().forward(rows).sum(-2)


@torch.no_grad()
def quantize(model: GPT) -> GPT:
    """Convert a model's linear layers and tables to int8 in place, and return it.

    Layers with parameters besides `weight` are unchanged.
    """
    kinds = {Linear: Int8Linear, nn.Embedding: Int8Embedding, NgramEmbedding: Int8NgramEmbedding}
    for module in list(model.modules()):
        for name, child in module.named_children():
            parameters = dict(child.named_parameters())
            if type(child) in kinds and parameters.keys() == {"weight"}:
                setattr(module, name, kinds[type(child)](parameters["weight"]))
    return model
