"""Gate functions of experts, in torch: they join the gate and the up projection."""

import enum

import torch
import torch.nn.functional as F
from torch import Tensor

SWIGLU_ALPHA, SWIGLU_LIMIT = 1.702, 7.0  # of gpt-oss


class Gate(enum.IntEnum):
    """Kernels know these by number."""

    NONE = 0  # the product has no gate
    SILU = 1  # silu(gate) * up
    GELU_TANH = 2  # gelu(gate) * up, gelu by its approximation with tanh
    CLAMPED_SWIGLU = 3  # gate * sigmoid(1.702 gate) * (up + 1), both limited to 7 (gpt-oss)


def gated(gate_up: Tensor, gate: Gate) -> Tensor:
    """gate_up [..., 2 * inner], the gate first -> [..., inner]."""
    if gate is Gate.NONE:
        return gate_up
    left, up = gate_up.chunk(2, -1)
    if gate is Gate.SILU:
        return F.silu(left) * up
    if gate is Gate.GELU_TANH:
        return F.gelu(left, approximate="tanh") * up
    left, up = left.clamp(max=SWIGLU_LIMIT), up.clamp(-SWIGLU_LIMIT, SWIGLU_LIMIT)
    return left * torch.sigmoid(SWIGLU_ALPHA * left) * (up + 1)
