"""A trained GPT with int8 weights and a scale per output channel or table row: a quarter of fp32's bytes to read."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model import GPT, Linear, NgramEmbedding
from ops.linear import is_matvec, matvec

FEW_ROWS = 16  # up to this many, the CPU's int8 kernel is faster than bf16 matmuls with dequantized weights


def round_to_int8(weight: Tensor) -> tuple[Tensor, Tensor]:
    """weight (N, K) in int8, and its fp32 scales (N,); the largest magnitude of each row becomes 127."""
    scale = weight.float().abs().amax(1).clamp(min=1e-12) / 127
    return (weight.float() / scale[:, None]).round().to(torch.int8), scale


class Int8Weight(nn.Module):
    """A weight (N, K) in int8, and the scale of each of its rows."""

    def __init__(self, weight: Tensor):
        super().__init__()
        for name, tensor in zip(("weight_int8", "weight_scale"), round_to_int8(weight)):
            self.register_buffer(name, tensor)

    @property
    def weight(self) -> Tensor:
        """The dequantized weight, fp32 (N, K), for models that use a weight directly."""
        return self.weight_int8 * self.weight_scale[:, None]


class Int8Linear(Int8Weight):
    """x (..., K) @ w (N, K).T in x's dtype, with w in int8; for inference.

    w is read as int8 for a single compiled row, and for few rows on a CPU (whose kernel rounds x to bf16); otherwise it
    is dequantized to x's dtype first.
    """

    def forward(self, x: Tensor) -> Tensor:
        rows, w = x.flatten(0, -2), self.weight_int8
        if is_matvec(x):
            y = matvec(rows, w) * self.weight_scale
        elif (
            not x.is_cpu or len(rows) > FEW_ROWS or rows.size(1) % 16
        ):  # the kernel reads 16 columns at a time
            y = F.linear(rows, (w * self.weight_scale[:, None]).to(x.dtype))
        else:
            ones = torch.ones_like(
                self.weight_scale, dtype=torch.bfloat16
            )  # it would round real scales to bf16
            y = torch._weight_int8pack_mm(rows.bfloat16(), w, ones) * self.weight_scale
        return y.to(x.dtype).view(*x.shape[:-1], len(w))


class Int8Embedding(Int8Weight):
    """Rows of an int8 table, dequantized to fp32."""

    def forward(self, idx: Tensor) -> Tensor:
        return self.weight_int8[idx] * self.weight_scale[idx][..., None]


class Int8NgramEmbedding(Int8Embedding):
    def forward(self, rows: Tensor, weights: None) -> Tensor:
        return super().forward(rows).sum(1)


@torch.no_grad()
def quantize(model: GPT) -> GPT:
    """The model with linear layers and tables in int8; layers with parameters besides `weight` stay as they are."""
    kinds = {Linear: Int8Linear, nn.Embedding: Int8Embedding, NgramEmbedding: Int8NgramEmbedding}
    for module in list(model.modules()):
        for name, child in module.named_children():
            if type(child) in kinds and [n for n, _ in child.named_parameters()] == ["weight"]:
                setattr(module, name, kinds[type(child)](child.weight))
    return model
