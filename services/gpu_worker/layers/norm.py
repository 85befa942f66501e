"""Norms: RMSNorm with and without unit offset, and LayerNorm."""

import torch
import torch.nn.functional as F
from torch import Tensor

from blockyard.kernels.layers.rms_norm import RMSNorm
from blockyard.services.gpu_worker.loading.weights import WeightTable


def make_rms_norm(table: WeightTable, name: str, size: int, eps: float, unit_offset: bool = False) -> RMSNorm:
    """The RMSNorm whose weight the checkpoint has as `name`.weight.

    unit_offset: the checkpoint stores weight - 1, as Gemma's does. One is added when it is loaded, in float32.
    """
    if not unit_offset:
        return RMSNorm(table.vector(f"{name}.weight", size), eps)
    weight = table.empty(size, dtype=torch.float32)
    table.place(f"{name}.weight", weight, (size,), lambda stored: stored.float() + 1.0)
    return RMSNorm(weight, eps)


class LayerNorm:
    """(x - mean) / std, times weight plus bias if `affine`."""

    def __init__(self, table: WeightTable, name: str, size: int, affine: bool = True) -> None:
        self._size = (size,)
        self._weight = table.vector(f"{name}.weight", size) if affine else None
        self._bias = table.vector(f"{name}.bias", size) if affine else None

    def __call__(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self._size, self._weight, self._bias)
