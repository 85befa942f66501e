"""4-bit weights in the order that the kernel Marlin reads, which is undone at load.

Documented in Marlin (README, `Layer.pack`) and AutoGPTQ (nn_modules/qlinear/qlinear_marlin.py). A matrix
[outputs, inputs] is stored as

- `B` int32 [inputs / 16, outputs * 2]: tiles of 16 inputs by 16 outputs side by side. Four of them, 1,024 codes, are in
  the order in which the lanes of a warp multiply them; the first code of a word is in its lowest bits,
- `s` [groups, outputs]: in runs of 64 outputs, or of 32 if a row is one group, in the order in which lanes need them.

All weights are symmetric.
"""

import math
from collections.abc import Mapping
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from blockyard.services.gpu_worker.loading.weights import FLOATS
from blockyard.services.gpu_worker.quantization.formats.layouts.integers import (
    WORDS,
    Integers,
    check_sizes,
    stored_matrix,
)
from blockyard.services.gpu_worker.quantization.formats.layouts.packing import as_bytes, pack, unpack
from blockyard.services.gpu_worker.quantization.formats.layouts.scales import check_scales
from blockyard.services.gpu_worker.quantization.scheme import Matrix, StoredMatrix

TILE = 16
RUN = 64  # outputs of four tiles
CODES_OF_WORD = 8


class MarlinKeys(NamedTuple):
    """The names of the tensors of a matrix."""

    codes: str = "B"
    scales: str = "s"


KEYS = MarlinKeys()


def stored(matrix: Matrix, group: int | None, dtype: torch.dtype, keys: MarlinKeys) -> StoredMatrix:
    """group: see `Integers`. dtype: of the model."""
    check_sizes(matrix, inputs=TILE if group is None else math.lcm(TILE, group), outputs=RUN)
    own = Integers(bits=4, group=group, zeros=False, scales=matrix.float_dtype(keys.scales, torch.float16))
    words = matrix.outputs * TILE // CODES_OF_WORD
    tensors = {
        keys.codes: matrix.stored(keys.codes, (matrix.inputs // TILE, words), WORDS),
        keys.scales: matrix.stored(keys.scales, (own.num_groups(matrix.inputs), matrix.outputs), FLOATS),
    }
    return stored_matrix(matrix, own, dtype, tensors, partial(_to_kept, matrix, own, keys))


def _to_kept(matrix: Matrix, own: Integers, keys: MarlinKeys, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    scales = check_scales(matrix.tensor(keys.scales), tensors[keys.scales], signed=True)
    codes = unpack(as_bytes(tensors[keys.codes]), own.bits)
    # of four tiles: a lane's output and pair of inputs, the tile, an input of the pair, halves of outputs and of inputs
    lanes = codes.view(-1, 8, 4, 4, 2, 2, 2)
    tiles = lanes.permute(0, 3, 6, 2, 4, 5, 1).reshape(matrix.inputs // TILE, -1, TILE, TILE)
    ordered = tiles.permute(1, 3, 0, 2).reshape(matrix.outputs, matrix.inputs)
    return own.kept(pack(ordered, own.bits), ordered_scales(scales, own.group is None).t())


def ordered_scales(scales: Tensor, is_row: bool) -> Tensor:
    """Scales [groups, outputs] in the order of outputs."""
    if is_row:
        return scales.view(-1, 4, 4, 2).transpose(1, 2).reshape(scales.shape)
    return scales.view(-1, 8, 8).mT.reshape(scales.shape)
