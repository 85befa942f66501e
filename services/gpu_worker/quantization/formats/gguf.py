"""`quant_method` gguf: a .gguf file beside config.json, or --quantization gguf.

The header of a tensor says how it is stored: each matrix has a type of blocks (`layouts.ggml_blocks`), or floats of 16
or 32 bits. Types without a kept form are dequantized. `loading.gguf_file` reads the file.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from blockyard.services.gpu_worker.loading import gguf_file
from blockyard.services.gpu_worker.loading.weights import WeightTable
from blockyard.services.gpu_worker.quantization.formats.layouts.ggml_blocks import TYPES
from blockyard.services.gpu_worker.quantization.formats.layouts.scales import check_scales
from blockyard.services.gpu_worker.quantization.kept import dequantized, w4a16
from blockyard.services.gpu_worker.quantization.kept.dequantized import Dequantized
from blockyard.services.gpu_worker.quantization.names import NamesOfFile
from blockyard.services.gpu_worker.quantization.scheme import WEIGHT, Matrix, StoredMatrix, ToKept
from blockyard.shared.errors import ConfigError, LoadError

BYTES = frozenset({torch.uint8})
DUMMY_TYPE = "Q4_K"  # of dummy weights


class GgufScheme:
    """Implements `Scheme`."""

    def __init__(self, dtype: torch.dtype) -> None:
        """dtype: of the model. Raises ConfigError if the package that reads files is missing."""
        self._dtype, self._package = dtype, gguf_file.package()

    def patterns(self) -> list[NamesOfFile]:
        return []

    def stored(self, matrix: Matrix) -> StoredMatrix | None:
        header = matrix.header(WEIGHT)
        name = DUMMY_TYPE if header is None else header.block_type
        numbers, size_bytes = self._sizes(name) if name else (1, 0)
        if not name or matrix.experts is not None or (header is None and (matrix.plain or matrix.inputs % numbers)):
            return None
        if matrix.inputs % numbers:
            raise ConfigError(f"{matrix.tensor(WEIGHT)}: {matrix.inputs} inputs are no whole blocks of {name}")
        blocks = matrix.inputs // numbers
        tensors = {WEIGHT: matrix.stored(WEIGHT, (matrix.outputs, blocks * size_bytes), BYTES)}
        if name not in TYPES:
            return StoredMatrix(
                form=Dequantized(self._dtype), tensors=tensors, to_kept=self._to_numbers(name, matrix.tensor(WEIGHT))
            )
        own = TYPES[name]

        def to_kept(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
            made = own.kept(tensors[WEIGHT].view(matrix.outputs, blocks, size_bytes), self._dtype)
            check_scales(matrix.tensor(WEIGHT), made[w4a16.SCALES], signed=True)
            return made

        return StoredMatrix(form=own.form(self._dtype), tensors=tensors, to_kept=to_kept)

    def _sizes(self, name: str) -> tuple[int, int]:
        """Numbers and bytes of a block."""
        numbers, size_bytes = self._package.GGML_QUANT_SIZES[self._package.GGMLQuantizationType[name]]
        return int(numbers), int(size_bytes)

    def _to_numbers(self, name: str, tensor: str) -> ToKept:
        def to_numbers(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
            stored, kind = tensors[WEIGHT], self._package.GGMLQuantizationType[name]
            made = torch.from_numpy(self._package.quants.dequantize(stored.cpu().numpy(), kind))
            if not bool(made.isfinite().all()):
                raise LoadError(f"{tensor}: the checkpoint has numbers that are not finite")
            return {dequantized.WEIGHT: made.to(stored.device)}

        return to_numbers


def build(said: Mapping[str, Any], table: WeightTable) -> GgufScheme:
    return GgufScheme(table.dtype)
