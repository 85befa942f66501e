"""`quant_method` mxfp4, gpt-oss's: stacked experts alone are quantized.

The format is OCP's Microscaling Formats (MX) v1.0: blocks of 32 values of 4 bits (e2m1: sign, two bits of exponent, one
of mantissa) have a scale of 8 bits (e8m0: a power of two, its exponent plus 127). As in gpt-oss, a checkpoint has a
matrix [out, in] as `name`_blocks [out, in / 32, 16] uint8, two values in a byte, the first one in its lower half, and
`name`_scales [out, in / 32] uint8.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from blockyard.services.gpu_worker.loading.weights import WeightTable
from blockyard.services.gpu_worker.quantization.formats.layouts.scales import exponents
from blockyard.services.gpu_worker.quantization.kept import table4_a16
from blockyard.services.gpu_worker.quantization.kept.table4_a16 import E2M1, Table4A16
from blockyard.services.gpu_worker.quantization.names import NamePatterns
from blockyard.services.gpu_worker.quantization.scheme import Matrix, StoredMatrix
from blockyard.shared.errors import ConfigError
from blockyard.shared.quantization.reading import LeftOutNames, read

BLOCK = 32  # values of a scale
BYTES = frozenset({torch.uint8})
FORM = Table4A16(E2M1, BLOCK, torch.float8_e8m0fnu)


class Mxfp4Scheme:
    """Implements `Scheme`."""

    def __init__(self, said: Mapping[str, Any]) -> None:
        """Raises ConfigError for settings that it does not know."""
        self._left_out = NamePatterns(read(said, LeftOutNames).modules_to_not_convert)

    def patterns(self) -> list[NamePatterns]:
        return [self._left_out]

    def stored(self, matrix: Matrix) -> StoredMatrix | None:
        if self._left_out.match(matrix.name) or matrix.experts is None:
            return None
        if matrix.inputs % BLOCK:
            raise ConfigError(f"config.json: mxfp4 weights of {matrix.inputs} inputs; a multiple of {BLOCK} is needed")
        scales = (matrix.outputs, matrix.inputs // BLOCK)
        tensors = {
            "blocks": matrix.stored("blocks", (*scales, BLOCK // 2), BYTES),
            "scales": matrix.stored("scales", scales, BYTES),
        }
        return StoredMatrix(form=FORM, tensors=tensors, to_kept=partial(_to_kept, matrix))


def build(said: Mapping[str, Any], table: WeightTable) -> Mxfp4Scheme:
    return Mxfp4Scheme(said)


def _to_kept(matrix: Matrix, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    scales = exponents(matrix.tensor("scales"), tensors["scales"])
    return {table4_a16.CODES: tensors["blocks"].flatten(-2), table4_a16.SCALES: scales}
