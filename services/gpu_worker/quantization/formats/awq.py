"""AWQ: `quant_method` awq, integers of 4 bits in four packings, which `version` names.

A matrix [outputs, inputs] is stored as

- gemm: `qweight` int32 [inputs, outputs / 8], `qzeros` int32 [groups, outputs / 8], `scales` [groups, outputs]. The
  codes of a word are of outputs 0, 2, 4, 6, 1, 3, 5, 7 from its lowest bits on,
- gemv: `qweight` int32 [outputs, inputs / 8], `qzeros` int32 [outputs, width], `scales` [outputs, width * 8], with
  groups side by side and a width that is rounded up (`_padded_words`),
- gemv_fast: `qweight` int16 [outputs / 4, inputs], `scales` and `scaled_zeros` [width * 8, outputs], the latter
  -scale * zero,
- marlin: symmetric, as in marlin.py.

Documented in AutoAWQ (awq/modules/linear/gemm.py, gemv.py, gemv_fast.py, marlin.py; utils/packing_utils.py) and in
transformers (`AwqConfig`).
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from blockyard.services.gpu_worker.loading.weights import FLOATS, WeightTable
from blockyard.services.gpu_worker.quantization.formats.layouts import marlin
from blockyard.services.gpu_worker.quantization.formats.layouts.integers import (
    WORDS,
    Integers,
    check_middle,
    check_sizes,
    is_outside,
    stored_matrix,
)
from blockyard.services.gpu_worker.quantization.formats.layouts.packing import as_bytes, pack, unpack
from blockyard.services.gpu_worker.quantization.formats.layouts.scales import check_scales
from blockyard.services.gpu_worker.quantization.names import NamePatterns
from blockyard.services.gpu_worker.quantization.scheme import Matrix, StoredMatrix
from blockyard.shared.errors import LoadError
from blockyard.shared.quantization.integers import (
    AWQ_BITS,
    GEMM,
    GEMV,
    GEMV_FAST,
    MARLIN,
    AwqSettings,
    group_of,
)
from blockyard.shared.quantization.reading import read

CODES, ZEROS, SCALES, SCALED_ZEROS = "qweight", "qzeros", "scales", "scaled_zeros"
CODES_OF_WORD = 8
HALF_WORDS = frozenset({torch.int16})
FAST_ROWS, FAST_COLUMNS = 4, 64  # that are packed together in gemv_fast
NEAR = 0.1  # of a whole number


class AwqScheme:
    """Implements `Scheme`."""

    def __init__(self, said: Mapping[str, Any], dtype: torch.dtype) -> None:
        """dtype: of the model. Raises ConfigError for settings that it does not know."""
        self._settings, self._dtype = read(said, AwqSettings), dtype
        self._left_out = NamePatterns(self._settings.modules_to_not_convert)

    def patterns(self) -> list[NamePatterns]:
        return [self._left_out]

    def stored(self, matrix: Matrix) -> StoredMatrix | None:
        said = self._settings
        if self._left_out.match(matrix.name) or is_outside(matrix.name, with_head=said.lm_head):
            return None
        group, version = group_of(said.stated_group, AWQ_BITS), said.packing
        if group is not None:
            check_sizes(matrix, inputs=group)
            group = None if group == matrix.inputs else group
        if version == MARLIN:
            return marlin.stored(matrix, group, self._dtype, marlin.MarlinKeys(CODES, SCALES))
        scales = matrix.float_dtype(SCALES, torch.float16)
        own = Integers(bits=AWQ_BITS, group=group, zeros=said.zero_point, scales=scales)
        return _PACKINGS[version](matrix, own, self._dtype)


def build(said: Mapping[str, Any], table: WeightTable) -> AwqScheme:
    return AwqScheme(said, table.dtype)


def _gemm(matrix: Matrix, own: Integers, dtype: torch.dtype) -> StoredMatrix:
    check_sizes(matrix, inputs=2, outputs=CODES_OF_WORD)  # of which a byte has two
    groups, words = own.num_groups(matrix.inputs), matrix.outputs // CODES_OF_WORD
    tensors = {
        CODES: matrix.stored(CODES, (matrix.inputs, words), WORDS),
        ZEROS: matrix.stored(ZEROS, (groups, words), WORDS, optional=not own.zeros),
        SCALES: matrix.stored(SCALES, (groups, matrix.outputs), FLOATS),
    }

    def to_kept(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        zeros = _in_turn(tensors[ZEROS]).t() if ZEROS in tensors else None
        return _kept(matrix, own, _packed_rows(tensors[CODES]), tensors[SCALES].t(), zeros)

    return stored_matrix(matrix, own, dtype, tensors, to_kept)


def _in_turn(words: Tensor) -> Tensor:
    """Words [rows, outputs / 8] of gemm -> codes [rows, outputs]."""
    halves = torch.unflatten(unpack(as_bytes(words), AWQ_BITS), -1, (-1, 2, CODES_OF_WORD // 2))
    return halves.mT.flatten(1)


def _packed_rows(words: Tensor) -> Tensor:
    """The same, packed along the inputs: bytes uint8 [outputs, inputs / 2]. No code is unpacked into its own byte."""
    parts = torch.unflatten(as_bytes(words), 1, (-1, CODES_OF_WORD // 2))  # [inputs, words, bytes of a word]
    even, odd = parts[::2], parts[1::2]
    both = torch.stack((even & 15 | odd << 4, even >> 4 | odd & 240), -1)
    # the number of an output in its word, in bits: the lower one of the byte's, the half of the byte, the upper one
    return torch.unflatten(both, 2, (2, 2)).permute(1, 3, 4, 2, 0).reshape(-1, len(even))


def _gemv(matrix: Matrix, own: Integers, dtype: torch.dtype) -> StoredMatrix:
    check_sizes(matrix, inputs=CODES_OF_WORD)
    groups, words = own.num_groups(matrix.inputs), _padded_words(matrix, own)
    tensors = {
        CODES: matrix.stored(CODES, (matrix.outputs, matrix.inputs // CODES_OF_WORD), WORDS),
        ZEROS: matrix.stored(ZEROS, (matrix.outputs, words), WORDS, optional=not own.zeros),
        SCALES: matrix.stored(SCALES, (matrix.outputs, words * CODES_OF_WORD), FLOATS),
    }

    def to_kept(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        zeros = unpack(as_bytes(tensors[ZEROS]), AWQ_BITS)[:, :groups] if ZEROS in tensors else None
        return _kept(matrix, own, as_bytes(tensors[CODES]), tensors[SCALES][:, :groups], zeros)

    return stored_matrix(matrix, own, dtype, tensors, to_kept)


def _gemv_fast(matrix: Matrix, own: Integers, dtype: torch.dtype) -> StoredMatrix:
    check_sizes(matrix, inputs=FAST_COLUMNS, outputs=FAST_ROWS)
    groups, numbers = own.num_groups(matrix.inputs), (_padded_words(matrix, own) * CODES_OF_WORD, matrix.outputs)
    tensors = {
        CODES: matrix.stored(CODES, (matrix.outputs // FAST_ROWS, matrix.inputs), HALF_WORDS),
        SCALES: matrix.stored(SCALES, numbers, FLOATS),
        SCALED_ZEROS: matrix.stored(SCALED_ZEROS, numbers, FLOATS, optional=not own.zeros),
    }

    def to_kept(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        scales, zeros = tensors[SCALES][:groups].t(), None
        if SCALED_ZEROS in tensors:
            zeros = _whole_zeros(matrix.tensor(SCALED_ZEROS), scales.float(), tensors[SCALED_ZEROS][:groups].t())
        codes = unpack(as_bytes(tensors[CODES]), AWQ_BITS)
        rows = torch.unflatten(codes, 1, (-1, FAST_ROWS, FAST_COLUMNS)).transpose(1, 2).flatten(2).flatten(0, 1)
        # of 32 inputs: the pair in a run of 8, the input of that pair, the run
        ordered = torch.unflatten(rows, 1, (-1, 4, 2, 4)).permute(0, 1, 4, 2, 3).flatten(1)
        return _kept(matrix, own, pack(ordered, AWQ_BITS), scales, zeros)

    return stored_matrix(matrix, own, dtype, tensors, to_kept)


_PACKINGS = {GEMM: _gemm, GEMV: _gemv, GEMV_FAST: _gemv_fast}


def _padded_words(matrix: Matrix, own: Integers) -> int:
    """Words of zeros in a row of gemv: groups of 64 come in two words at a time, and of 32 in four."""
    group = matrix.inputs if own.group is None else own.group
    unit = 1 if group >= 128 else 128 // group
    words = -(-(matrix.inputs // group) // CODES_OF_WORD)
    return -(-words // unit) * unit


def _whole_zeros(name: str, scales: Tensor, scaled: Tensor) -> Tensor:
    """The zeros that -scale * zero stands for. Raises LoadError for one that is none."""
    found = torch.where(scales == 0, 0.0, -scaled.float() / scales)
    zeros = found.round().clamp(0, 15)
    if bool(((found - zeros).abs() > NEAR).any()):
        raise LoadError(f"{name}: the checkpoint has numbers that are no multiples of scales")
    return zeros


def _kept(matrix: Matrix, own: Integers, packed: Tensor, scales: Tensor, zeros: Tensor | None) -> dict[str, Tensor]:
    if zeros is not None and not own.zeros:
        check_middle(matrix.tensor(ZEROS), zeros, (own.middle,))
        zeros = None
    return own.kept(packed, check_scales(matrix.tensor(SCALES), scales, signed=True), zeros)
