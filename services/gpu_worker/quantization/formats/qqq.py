"""QQQ: `quant_method` qqq, weights of 4 bits for products with inputs of 8. Dequantized at load; no input is rounded.

A matrix [outputs, inputs] is stored in the order of a kernel like Marlin's:

- `B` int32 [inputs / 16, outputs * 2]: tiles of 16 inputs by 16 outputs, four of them together,
- `s_channel` F32 [1, outputs],
- `s_group` F16 [groups, outputs] with groups of 128, or [0] with `group_size` -1.

Weights of groups are integers of 8 bits, round((code - 8) * s_group), times s_channel. Without groups a code is signed,
and 16 times it is times s_channel. Documented in QQQ (qlinear_marlin.py, `pack`) and vLLM (marlin_utils_test_qqq.py).
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from blockyard.services.gpu_worker.loading.weights import FLOATS, WeightTable
from blockyard.services.gpu_worker.quantization.formats.layouts.integers import (
    WORDS,
    check_sizes,
    is_outside,
)
from blockyard.services.gpu_worker.quantization.formats.layouts.marlin import RUN, TILE, ordered_scales
from blockyard.services.gpu_worker.quantization.formats.layouts.packing import as_bytes, unpack
from blockyard.services.gpu_worker.quantization.formats.layouts.scales import check_scales
from blockyard.services.gpu_worker.quantization.kept import dequantized
from blockyard.services.gpu_worker.quantization.kept.dequantized import Dequantized
from blockyard.services.gpu_worker.quantization.names import NamesOfFile
from blockyard.services.gpu_worker.quantization.scheme import Matrix, StoredMatrix
from blockyard.shared.quantization.integers import QQQ_BITS, QQQ_GROUP, QqqSettings
from blockyard.shared.quantization.reading import read

CODES, ROW_SCALES, GROUP_SCALES = "B", "s_channel", "s_group"
SHIFT = 16  # a signed code is in the upper half of a byte
IN_GROUPS, IN_ROWS = (0, 2, 4, 6, 1, 3, 5, 7), (4, 0, 5, 1, 6, 2, 7, 3)  # the codes of a word


class QqqScheme:
    """Implements `Scheme`."""

    def __init__(self, said: Mapping[str, Any], dtype: torch.dtype) -> None:
        """dtype: of the model. Raises ConfigError for settings that it does not know."""
        self._has_groups = read(said, QqqSettings).group_size == QQQ_GROUP
        self._form = Dequantized(dtype)

    def patterns(self) -> list[NamesOfFile]:
        return []

    def stored(self, matrix: Matrix) -> StoredMatrix | None:
        if is_outside(matrix.name):
            return None
        check_sizes(matrix, inputs=QQQ_GROUP if self._has_groups else TILE, outputs=RUN)
        group_shape = (matrix.inputs // QQQ_GROUP, matrix.outputs) if self._has_groups else (0,)
        tensors = {
            CODES: matrix.stored(CODES, (matrix.inputs // TILE, matrix.outputs * 2), WORDS),
            ROW_SCALES: matrix.stored(ROW_SCALES, (1, matrix.outputs), FLOATS),
            GROUP_SCALES: matrix.stored(GROUP_SCALES, group_shape, FLOATS, optional=not self._has_groups),
        }

        def to_kept(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
            rows = check_scales(matrix.tensor(ROW_SCALES), tensors[ROW_SCALES])
            codes = _codes(matrix, tensors[CODES], IN_GROUPS if self._has_groups else IN_ROWS).float()
            if self._has_groups:
                groups = ordered_scales(check_scales(matrix.tensor(GROUP_SCALES), tensors[GROUP_SCALES]), is_row=False)
                whole = torch.round((codes - 8) * groups.t().repeat_interleave(QQQ_GROUP, 1))
            else:
                whole = torch.where(codes > 7, codes - 16, codes) * SHIFT
            return {dequantized.WEIGHT: whole * ordered_scales(rows, is_row=True).t()}

        return StoredMatrix(form=self._form, tensors=tensors, to_kept=to_kept)


def build(said: Mapping[str, Any], table: WeightTable) -> QqqScheme:
    return QqqScheme(said, table.dtype)


def _codes(matrix: Matrix, words: Tensor, order: tuple[int, ...]) -> Tensor:
    """Codes uint8 [outputs, inputs]. order: which of a lane's eight codes each of a word is."""
    places = torch.tensor(order, device=words.device).argsort()
    lanes = torch.unflatten(unpack(as_bytes(words), QQQ_BITS), -1, (-1, 8))[..., places]
    # of four tiles: an output and a run of 4 inputs of a lane, the tile, the half of its outputs, an input of the run
    tiles = lanes.reshape(matrix.inputs // TILE, -1, 8, 4, 4, 2, 4)
    return tiles.permute(1, 4, 5, 2, 0, 3, 6).reshape(matrix.outputs, matrix.inputs)
