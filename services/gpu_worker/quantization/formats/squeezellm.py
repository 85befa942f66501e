"""SqueezeLLM: `quant_method` squeezellm, 4-bit codes of a table of 16 numbers for each row. Dequantized at load.

A matrix [outputs, inputs] is stored as `qweight` int32 [inputs / 8, outputs], codes along the inputs with the first one
in the lowest bits, and `lookup_table` [outputs, 16]. Documented in SqueezeLLM (squeezellm/quant.py, `pack2`) and vLLM
("squeezellm"). Files with a sparse part (`rows`, `cols`, `vals`) are refused, as tensors without a use.
"""

from collections.abc import Mapping
from typing import Any

import msgspec
import torch
from torch import Tensor

from blockyard.services.gpu_worker.loading.weights import FLOATS
from blockyard.services.gpu_worker.quantization.formats.layouts.integers import WORDS, check_sizes, is_outside
from blockyard.services.gpu_worker.quantization.formats.layouts.packing import as_bytes, unpack
from blockyard.services.gpu_worker.quantization.formats.layouts.settings import check_scales, read
from blockyard.services.gpu_worker.quantization.kept import dequantized
from blockyard.services.gpu_worker.quantization.kept.dequantized import Dequantized
from blockyard.services.gpu_worker.quantization.names import NamesOfFile
from blockyard.services.gpu_worker.quantization.scheme import Matrix, StoredMatrix

CODES, TABLE = "qweight", "lookup_table"
BITS, CODES_OF_WORD = 4, 8


class SqueezeLlmSettings(msgspec.Struct, frozen=True):
    """The fields of quantization_config that count."""

    wbits: int = BITS

    def __post_init__(self) -> None:
        if self.wbits != BITS:
            raise ValueError(f"wbits {self.wbits}: {BITS} are read")


class SqueezeLlmScheme:
    """Implements `Scheme`."""

    def __init__(self, said: Mapping[str, Any], dtype: torch.dtype) -> None:
        """dtype: of the model. Raises ConfigError for settings that it does not know."""
        read(said, SqueezeLlmSettings)
        self._form = Dequantized(dtype)

    def patterns(self) -> list[NamesOfFile]:
        return []

    def stored(self, matrix: Matrix) -> StoredMatrix | None:
        if is_outside(matrix.name):
            return None
        check_sizes(matrix, inputs=CODES_OF_WORD)
        tensors = {
            CODES: matrix.stored(CODES, (matrix.inputs // CODES_OF_WORD, matrix.outputs), WORDS),
            TABLE: matrix.stored(TABLE, (matrix.outputs, 1 << BITS), FLOATS),
        }

        def to_kept(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
            table = check_scales(matrix.tensor(TABLE), tensors[TABLE], signed=True)
            codes = unpack(as_bytes(tensors[CODES].t()), BITS)
            return {dequantized.WEIGHT: table.gather(1, codes.long())}

        return StoredMatrix(form=self._form, tensors=tensors, to_kept=to_kept)
