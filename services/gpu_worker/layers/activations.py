"""Activation functions of MLPs, by the name in config.json. To add one, add an entry to `ACTIVATIONS`."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

# each may overwrite its argument
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"silu": F.silu, "relu": torch.relu_}


def gate(x: Tensor, activation: str) -> Tensor:
    """Computes activation(left half) * right half: x [rows, 2 * inner] -> [rows, inner]."""
    left, up = x.chunk(2, -1)
    return ACTIVATIONS[activation](left).mul_(up)
