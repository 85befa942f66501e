"""Experts of a 16-bit checkpoint in int8, quantized while they load: --quantization experts_int8.

Each row of each expert has a scale, so that its largest absolute value is 127; inputs stay as they are. Other matrices
are not quantized.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from blockyard.services.gpu_worker.loading.weights import FLOATS, WeightTable
from blockyard.services.gpu_worker.quantization.kept import w8a16
from blockyard.services.gpu_worker.quantization.kept.eight_bits import FLOOR
from blockyard.services.gpu_worker.quantization.kept.w8a16 import W8A16
from blockyard.services.gpu_worker.quantization.names import NamePatterns
from blockyard.services.gpu_worker.quantization.scheme import WEIGHT, Matrix, StoredMatrix
from blockyard.shared.quantization.reading import LeftOutNames, read

MOST = 127


class ExpertsInt8Scheme:
    """Implements `Scheme`."""

    def __init__(self, said: Mapping[str, Any]) -> None:
        """Raises ConfigError."""
        self._left_out = NamePatterns(read(said, LeftOutNames).modules_to_not_convert)

    def patterns(self) -> list[NamePatterns]:
        return [self._left_out]

    def stored(self, matrix: Matrix) -> StoredMatrix | None:
        if not matrix.is_expert or self._left_out.match(matrix.name):
            return None
        tensors = {WEIGHT: matrix.stored(WEIGHT, matrix.stored_shape, FLOATS)}

        def to_kept(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
            return _round(tensors[WEIGHT].mT if matrix.transposed else tensors[WEIGHT])

        return StoredMatrix(form=W8A16(torch.int8), tensors=tensors, to_kept=to_kept)


def build(said: Mapping[str, Any], table: WeightTable) -> ExpertsInt8Scheme:
    return ExpertsInt8Scheme(said)


def _round(weight: Tensor) -> dict[str, Tensor]:
    weight = weight.float()
    scales = weight.abs().amax(1).div_(MOST).clamp_(min=FLOOR)
    codes = (weight / scales[:, None]).round_().clamp_(-MOST, MOST)
    return {w8a16.CODES: codes.to(torch.int8), w8a16.SCALES: scales}
