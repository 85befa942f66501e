"""RMSNorm, with and without unit offset, and LayerNorm."""

import torch
import torch.nn.functional as F
from torch import Tensor

from blockyard.kernels.layers.rms_norm import RMSNorm
from blockyard.services.gpu_worker.loading.weights import WeightTable


def make_rms_norm(table: WeightTable, name: str, size: int, eps: float, unit_offset: bool = False) -> RMSNorm:
    """Makes an RMSNorm with the weight `name`.weight of the checkpoint.

    unit_offset: the checkpoint stores weight - 1, as for Gemma. Loading adds 1, in float32.
    """
    if not unit_offset:
        return RMSNorm(table.vector(f"{name}.weight", size), eps)
    weight = table.empty(size, dtype=torch.float32)
    table.place(f"{name}.weight", weight, (size,), lambda stored: stored.float() + 1.0)
    return RMSNorm(weight, eps)


class LayerNorm:
    """Computes (x - mean) / std, and if `affine` multiplies by a weight and adds a bias."""

    def __init__(self, table: WeightTable, name: str, size: int, affine: bool = True) -> None:
        self._size = (size,)
        self._weight = table.vector(f"{name}.weight", size) if affine else None
        self._bias = table.vector(f"{name}.bias", size) if affine else None

    def __call__(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self._size, self._weight, self._bias)
