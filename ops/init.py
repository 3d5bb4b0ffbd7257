"""Initial values: functions that fill a tensor on the CPU with torch's generator, and the buffers of a model."""

import torch
from torch import Tensor, nn


class ModelError(ValueError):
    """The model of model.py cannot be trained: a parameter without a row of PARAM_TABLE, a loss that is no sum, ..."""


def normal(std: float, by_fan_in: bool = True):
    """Normal with this standard deviation; with by_fan_in, that of matrices is scaled by fan_in ** -0.5."""

    def fill(x: Tensor, generator: torch.Generator) -> Tensor:
        scale = x.size(-1) ** 0.5 if by_fan_in and x.dim() > 1 else 1.0
        return x.normal_(0, 1, generator=generator).mul_(std / scale)

    return fill


def constant(value: float):
    return lambda x, generator: x.fill_(value)


zeros, ones = constant(0.0), constant(1.0)


def orthogonal(gain: float = 1.0):
    """(Semi-)orthogonal (Saxe et al. 2014), for tensors of two dimensions and more."""
    return lambda x, generator: nn.init.orthogonal_(x, gain, generator=generator)


def persistent_buffers(model: nn.Module) -> dict[str, Tensor]:
    """The buffers that belong to the model's state_dict(), by name."""
    buffers = {}
    for prefix, module in model.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                buffers[f"{prefix}.{name}".lstrip(".")] = buffer
    return buffers
