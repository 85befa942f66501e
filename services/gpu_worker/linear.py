"""One matrix product, in the layout that is quickest for its shape and the rows of the step.

Measured on CPU with one thread (AMD EPYC, AVX-512, torch 2.13), microseconds, weights out of L2:

    in x out     rows   F.linear   mm on transposed   oneDNN-packed
    256 x 4096    1       452           127               150
    256 x 4096    2       675           243               186
    256 x 4096   16       916           756               392
    256 x 256     1         8             7                17
    256 x 256    16        29            27                32
    704 x 256     1        15            18                26
    704 x 256    16        77            74                67
    2048 x 2048   1       790           651               639
    2048 x 2048  16      2566          2953              1383

So in float32: packed from two rows on, and at one row the transposed copy where the matrix is small enough for a
second copy to cost little memory. In bfloat16 packed is best at every row count and shape.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

SECOND_COPY_ELEMENTS = 1_500_000  # above it one row is bound by memory in either layout
TINY_ELEMENTS = 65_536  # up to here `mm` keeps up with packed
TINY_ROWS = 16

_dnn: Any = torch.ops.mkldnn


def transposed_rows(in_features: int, out_features: int, dtype: torch.dtype) -> int:
    """Up to how many rows the product is taken with the transposed copy on CPU; 0 keeps no such copy."""
    elements = in_features * out_features
    if dtype != torch.float32 or elements > SECOND_COPY_ELEMENTS:
        return 0
    return TINY_ROWS if elements <= TINY_ELEMENTS else 1


def can_pack(weight: Tensor) -> bool:
    return (
        weight.device.type == "cpu"
        and weight.dtype in (torch.float32, torch.bfloat16)
        and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
        and hasattr(_dnn, "_reorder_linear_weight")
    )


class Linear:
    """x [rows, in] -> [rows, out]. `weight` [out, in] takes the checkpoint's; `prepare` then picks the layouts."""

    __slots__ = ("_packed", "_transposed", "_transposed_rows", "bias", "shape", "weight")

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.weight: Tensor | None = weight
        self.bias = bias
        self.shape = (weight.shape[1], weight.shape[0])  # in, out
        self._transposed: Tensor | None = None
        self._transposed_rows = 0
        self._packed: Tensor | None = None

    def prepare(self) -> None:
        """Call once the weight is loaded; on CPU it is replaced by the prepared copies."""
        weight = self.weight
        if weight is None or not can_pack(weight):
            return
        self._transposed_rows = transposed_rows(*self.shape, weight.dtype)
        if self._transposed_rows:
            self._transposed = weight.t().contiguous()
        self._packed = _dnn._reorder_linear_weight(weight)
        self.weight = None

    def __call__(self, x: Tensor) -> Tensor:
        if self._transposed is not None and x.shape[0] <= self._transposed_rows:
            if self.bias is None:
                return torch.mm(x, self._transposed)
            return torch.addmm(self.bias, x, self._transposed)
        if self._packed is not None:
            out: Tensor = _dnn._linear_pointwise(x, self._packed, self.bias, "none", [], "")
            return out
        assert self.weight is not None
        return F.linear(x, self.weight, self.bias)

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        """residual + self(x), in one kernel where there is one. May write to `residual`."""
        if self._transposed is not None and self.bias is None and x.shape[0] <= self._transposed_rows:
            return torch.addmm(residual, x, self._transposed)
        return residual.add_(self(x))
