"""SqueezeLLM: `quant_method` squeezellm, codes of 3 or 4 bits of a table of each row. Dequantized at load.

A matrix [outputs, inputs] of b bits is stored as

- `qweight` int32 [inputs * b / 32, outputs], codes along the inputs with the first one in the lowest bits,
- `lookup_table` [outputs, 2 ** b],
- a sparse part, if the file has one, which is added: in compressed rows, `rows` int32 [outputs + 1], `cols` int32 and
  `vals` [count], and in whole rows, `full_rows` [inputs, n] and `full_row_indices` [n]. `startrows` says only where
  threads begin.

Documented in SqueezeLLM (squeezellm/quant.py, `pack2`, and quant_cuda_kernel.cu) and vLLM ("squeezellm").
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from blockyard.services.gpu_worker.loading.tensor_groups import StoredTensor
from blockyard.services.gpu_worker.loading.weights import FLOATS, WeightTable
from blockyard.services.gpu_worker.quantization.formats.layouts.integers import WORDS, check_sizes, is_outside
from blockyard.services.gpu_worker.quantization.formats.layouts.packing import as_bytes, unpack
from blockyard.services.gpu_worker.quantization.formats.layouts.scales import check_scales
from blockyard.services.gpu_worker.quantization.kept import dequantized
from blockyard.services.gpu_worker.quantization.kept.dequantized import Dequantized
from blockyard.services.gpu_worker.quantization.names import NamesOfFile
from blockyard.services.gpu_worker.quantization.scheme import Matrix, StoredMatrix
from blockyard.shared.errors import LoadError
from blockyard.shared.quantization.integers import SqueezeLlmSettings
from blockyard.shared.quantization.reading import read

CODES, TABLE = "qweight", "lookup_table"
ROWS, COLUMNS, VALUES, STARTS = "rows", "cols", "vals", "startrows"
WHOLE_ROWS, WHOLE_NUMBERS = "full_rows", "full_row_indices"
UNIT = 32  # inputs that fill whole words


class SqueezeLlmScheme:
    """Implements `Scheme`."""

    def __init__(self, said: Mapping[str, Any], dtype: torch.dtype) -> None:
        """dtype: of the model. Raises ConfigError for settings that it does not know."""
        self._bits = read(said, SqueezeLlmSettings).wbits
        self._form = Dequantized(dtype)

    def patterns(self) -> list[NamesOfFile]:
        return []

    def stored(self, matrix: Matrix) -> StoredMatrix | None:
        if is_outside(matrix.name):
            return None
        bits = self._bits
        check_sizes(matrix, inputs=UNIT if bits == 3 else UNIT // bits)
        tensors = {
            CODES: matrix.stored(CODES, (matrix.inputs * bits // UNIT, matrix.outputs), WORDS),
            TABLE: matrix.stored(TABLE, (matrix.outputs, 1 << bits), FLOATS),
            **_sparse_tensors(matrix),
        }

        def to_kept(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
            table = check_scales(matrix.tensor(TABLE), tensors[TABLE], signed=True)
            codes = unpack(as_bytes(tensors[CODES].t()), bits)
            return {dequantized.WEIGHT: _add_sparse(matrix, table.gather(1, codes.long()), tensors)}

        return StoredMatrix(form=self._form, tensors=tensors, to_kept=to_kept)


def build(said: Mapping[str, Any], table: WeightTable) -> SqueezeLlmScheme:
    return SqueezeLlmScheme(said, table.dtype)


def _sparse_tensors(matrix: Matrix) -> dict[str, StoredTensor]:
    """All are optional."""
    any_size = ((-1,),)
    return {
        ROWS: matrix.stored(ROWS, (matrix.outputs + 1,), WORDS, optional=True),
        **{key: matrix.stored(key, (1,), WORDS, optional=True, other_shapes=any_size) for key in (COLUMNS, STARTS)},
        VALUES: matrix.stored(VALUES, (1,), FLOATS, optional=True, other_shapes=any_size),
        WHOLE_ROWS: matrix.stored(WHOLE_ROWS, (matrix.inputs, 1), FLOATS, optional=True,
                                  other_shapes=((matrix.inputs, -1),)),
        WHOLE_NUMBERS: matrix.stored(WHOLE_NUMBERS, (1,), WORDS, optional=True, other_shapes=any_size),
    }  # fmt: skip


def _add_sparse(matrix: Matrix, numbers: Tensor, tensors: Mapping[str, Tensor]) -> Tensor:
    """Adds the numbers that are stored one by one. Raises LoadError for places that the matrix does not have."""
    if ROWS in tensors:
        for key in (COLUMNS, VALUES):
            if key not in tensors:
                raise LoadError(f"the checkpoint lacks {matrix.tensor(key)}")
        starts, columns, values = tensors[ROWS].long(), tensors[COLUMNS].long(), tensors[VALUES].float()
        counts = starts.diff()
        if int(starts[0]) or int(counts.min()) < 0 or not int(starts[-1]) == len(columns) == len(values):
            raise LoadError(
                f"{matrix.tensor(ROWS)}: the checkpoint has rows that are not those of {len(values)} numbers"
            )
        _check_places(matrix, COLUMNS, columns, matrix.inputs)
        rows = torch.arange(matrix.outputs, device=columns.device).repeat_interleave(counts)
        numbers.index_put_((rows, columns), values, accumulate=True)
    if WHOLE_ROWS in tensors:
        if WHOLE_NUMBERS not in tensors:
            raise LoadError(f"the checkpoint lacks {matrix.tensor(WHOLE_NUMBERS)}")
        places = tensors[WHOLE_NUMBERS].long()
        _check_places(matrix, WHOLE_NUMBERS, places, matrix.outputs)
        numbers.index_add_(0, places, tensors[WHOLE_ROWS].float().t())
    return numbers


def _check_places(matrix: Matrix, key: str, places: Tensor, most: int) -> None:
    if len(places) and not 0 <= int(places.min()) <= int(places.max()) < most:
        raise LoadError(f"{matrix.tensor(key)}: the checkpoint has {int(places.max())}, expected 0 to {most - 1}")
