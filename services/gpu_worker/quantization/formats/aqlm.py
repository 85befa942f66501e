"""AQLM: `quant_method` aqlm, groups of weights that are sums of vectors of several codebooks. Dequantized at load.

A matrix [outputs, inputs] is stored as

- `codes` [outputs / out_group_size, inputs / in_group_size, codebooks], int8, int16 or int32 by
  `nbits_per_codebook`; negative ones are counted from the end of a codebook,
- `codebooks` [codebooks, 2 ** nbits_per_codebook, out_group_size, in_group_size],
- `scales` [outputs / out_group_size, 1, 1, 1].

`linear_weights_not_to_quantize` has the names of weights that are not quantized. Documented in AQLM (inference_lib,
`_dequantize_weight`, `unpack_int_data`) and transformers (`AqlmConfig`).
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from blockyard.services.gpu_worker.loading.weights import FLOATS, WeightTable
from blockyard.services.gpu_worker.quantization.formats.layouts.integers import check_sizes
from blockyard.services.gpu_worker.quantization.formats.layouts.scales import check_scales
from blockyard.services.gpu_worker.quantization.kept import dequantized
from blockyard.services.gpu_worker.quantization.kept.dequantized import Dequantized
from blockyard.services.gpu_worker.quantization.names import NamePatterns, is_left_out
from blockyard.services.gpu_worker.quantization.scheme import WEIGHT, Matrix, StoredMatrix
from blockyard.shared.errors import LoadError
from blockyard.shared.quantization.integers import AqlmSettings
from blockyard.shared.quantization.reading import read

CODES, BOOKS, SCALES = "codes", "codebooks", "scales"
INTEGERS = frozenset({torch.int8, torch.int16, torch.int32})


class AqlmScheme:
    """Implements `Scheme`."""

    def __init__(self, said: Mapping[str, Any], dtype: torch.dtype) -> None:
        """dtype: of the model. Raises ConfigError for settings that it does not know."""
        self._settings, self._form = read(said, AqlmSettings), Dequantized(dtype)
        names = self._settings.linear_weights_not_to_quantize
        self._left_out = NamePatterns(name.removesuffix(f".{WEIGHT}") for name in names)

    def patterns(self) -> list[NamePatterns]:
        return [self._left_out]

    def stored(self, matrix: Matrix) -> StoredMatrix | None:
        said = self._settings
        if self._left_out.match(matrix.name) or is_left_out(matrix.name) or matrix.experts is not None:
            return None
        check_sizes(matrix, inputs=said.in_group_size, outputs=said.out_group_size)
        rows, columns = matrix.outputs // said.out_group_size, matrix.inputs // said.in_group_size
        book = (said.num_codebooks, 1 << said.nbits_per_codebook, said.out_group_size, said.in_group_size)
        tensors = {
            CODES: matrix.stored(CODES, (rows, columns, said.num_codebooks), INTEGERS),
            BOOKS: matrix.stored(BOOKS, book, FLOATS),
            SCALES: matrix.stored(SCALES, (rows, 1, 1, 1), FLOATS),
        }

        def to_kept(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
            books = tensors[BOOKS].float()
            if not bool(books.isfinite().all()):
                raise LoadError(f"{matrix.tensor(BOOKS)}: the checkpoint has numbers that are not finite")
            codes = tensors[CODES].long() % (1 << said.nbits_per_codebook)
            groups = sum((one[codes[..., i]] for i, one in enumerate(books)), torch.zeros((), device=codes.device))
            groups = groups * check_scales(matrix.tensor(SCALES), tensors[SCALES], signed=True)
            return {dequantized.WEIGHT: groups.transpose(1, 2).reshape(matrix.outputs, matrix.inputs)}

        return StoredMatrix(form=self._form, tensors=tensors, to_kept=to_kept)


def build(said: Mapping[str, Any], table: WeightTable) -> AqlmScheme:
    return AqlmScheme(said, table.dtype)
