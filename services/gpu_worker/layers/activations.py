"""Activation functions of MLPs, by config.json's hidden_act. A new one is a line in the table."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

# may write to their argument
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"silu": F.silu, "relu": torch.relu_}


def gate(x: Tensor, activation: str) -> Tensor:
    """x [rows, 2 * inner] -> [rows, inner]: activation(left half) * right half."""
    left, up = x.chunk(2, -1)
    return ACTIVATIONS[activation](left).mul_(up)
