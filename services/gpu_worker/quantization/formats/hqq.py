"""`quant_method` hqq, as transformers saves it: integers of 1 to 8 bits with scales and zeros that are no integers.

A matrix [outputs, inputs] is n numbers in the order of rows, in groups of `group_size`: with `axis` 1 of successive
ones, as rows of [n / group_size, group_size]; with `axis` 0 as columns of [group_size, n / group_size]. It is stored as

- `W_q` U8, or I32 for 3 bits: integers of this matrix. Its rows are cut into as many parts as fit an element; the
  first part is in the upper bits. With `view_as_float` its bytes have a float dtype.
- `scale` and `zero` [n / group_size, 1] or [1, n / group_size]: a number is (integer - zero) * scale,
- `nbits`, `group_size`, `axis`, `shape` and more that repeat the settings.

Documented in hqq (core/quantize.py, core/bitpack.py) and transformers (integrations/hqq.py). `quant_config` has the
settings of all matrices, or of some by a tag, the name without "model", "layers" and numbers. 4 and 8 bits along
axis 1 are kept, with scales and zeros in the dtypes of the file; others are dequantized.
"""

import math
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from blockyard.services.gpu_worker.loading.tensor_groups import StoredTensor
from blockyard.services.gpu_worker.loading.weights import FLOATS, WeightTable
from blockyard.services.gpu_worker.quantization.formats.layouts.either import quantized_or_not
from blockyard.services.gpu_worker.quantization.kept import dequantized, w4a16, w8a16
from blockyard.services.gpu_worker.quantization.kept.dequantized import Dequantized
from blockyard.services.gpu_worker.quantization.kept.form import KeptForm
from blockyard.services.gpu_worker.quantization.kept.w4a16 import W4A16, pack
from blockyard.services.gpu_worker.quantization.kept.w8a16 import W8A16
from blockyard.services.gpu_worker.quantization.names import (
    ROUTERS,
    NamePatterns,
    NamesOfFile,
    SettingsByName,
    is_left_out,
)
from blockyard.services.gpu_worker.quantization.scheme import Matrix, StoredMatrix
from blockyard.shared.errors import LoadError
from blockyard.shared.quantization.integers import PARTS, HqqSettings, WeightParams
from blockyard.shared.quantization.reading import read

LEAST_GROUP = 16  # inputs; with fewer, scales take more memory than they save
CODES, SCALE, ZERO = "W_q", "scale", "zero"
REPEATED = ("nbits", "group_size", "axis", "shape")  # settings that files have as tensors, too
UNUSED = (
    *("channel_wise", "compute_dtype", "encoded_state_dict", "offload_meta", "optimize", "packing", "quant_scale"),
    *("quant_zero", "round_zero", "stores_quant_config", "unpack_view_dtype", "view_as_float"),
)
ANY = frozenset({torch.uint8, torch.int8, torch.int32, torch.int64, torch.bool, *FLOATS})


class HqqScheme:
    """Implements `Scheme`."""

    def __init__(self, said: Mapping[str, Any], dtype: torch.dtype) -> None:
        """dtype: of the model. Raises ConfigError for settings that it does not know."""
        settings = read(said, HqqSettings)
        self._dtype, self._left_out = dtype, NamePatterns(settings.skip_modules)
        params = settings.params()
        self._for_all, self._by_tag = params.pop("", None), SettingsByName(params)

    def patterns(self) -> list[NamesOfFile]:
        return [self._left_out, self._by_tag]

    def stored(self, matrix: Matrix) -> StoredMatrix | None:
        is_router = matrix.name.rpartition(".")[2] in ROUTERS
        if self._left_out.match(matrix.name) or (is_left_out(matrix.name) and not is_router):
            return None
        params = self._by_tag.find(_tag(matrix.name)) if self._by_tag else self._for_all
        if params is None or matrix.experts is not None:  # the library quantizes linear layers, and no stacks
            return None
        form, tensors = self._form(matrix, params), _tensors(matrix, params)
        stored = StoredMatrix(form=form, tensors=tensors, to_kept=partial(_to_kept, matrix, params, form))
        return quantized_or_not(matrix, stored, CODES, self._dtype) if matrix.plain or is_router else stored

    def _form(self, matrix: Matrix, params: WeightParams) -> KeptForm:
        group = params.group_size and math.gcd(params.group_size, matrix.inputs)
        if params.axis == 0 or params.nbits not in (4, 8) or (group and group < LEAST_GROUP):
            return Dequantized(self._dtype)
        scales, zeros = (matrix.float_dtype(key, self._dtype) for key in (SCALE, ZERO))
        if params.nbits == 4:
            return W4A16(group, zeros, scales)
        return W8A16(torch.uint8, group, zeros=True, scales=torch.promote_types(scales, zeros))


def build(said: Mapping[str, Any], table: WeightTable) -> HqqScheme:
    return HqqScheme(said, table.dtype)


def _tag(name: str) -> str:
    return ".".join(one for one in name.split(".") if one not in ("model", "layers") and not one.isnumeric())


def _grouped(matrix: Matrix, params: WeightParams) -> tuple[int, int]:
    """The shape of a matrix in groups, which lie along `params.axis`."""
    if params.group_size is None:
        return matrix.outputs, matrix.inputs
    groups = -(-matrix.outputs * matrix.inputs // params.group_size)
    return (groups, params.group_size) if params.axis == 1 else (params.group_size, groups)


def _tensors(matrix: Matrix, params: WeightParams) -> dict[str, StoredTensor]:
    rows, columns = _grouped(matrix, params)
    packed, scales = -(-rows // PARTS[params.nbits]), (rows, 1) if params.axis == 1 else (1, columns)
    dtype = torch.int32 if params.nbits == 3 else torch.uint8
    size = columns * dtype.itemsize  # bytes of a row
    viewed = {one: (packed, size // one.itemsize) for one in FLOATS if size % one.itemsize == 0}
    header, shape = matrix.header(CODES), (packed, columns)
    if header is not None:
        shape = viewed.get(header.dtype, shape)
    tensors = {
        CODES: matrix.stored(CODES, shape, frozenset({dtype, *viewed})),
        SCALE: matrix.stored(SCALE, scales, FLOATS),
        ZERO: matrix.stored(ZERO, scales, FLOATS),
    }
    said = {key: matrix.stored(key, (), ANY, other_shapes=((-1,),), optional=True) for key in (*REPEATED, *UNUSED)}
    return tensors | said


def _to_kept(matrix: Matrix, params: WeightParams, form: KeptForm, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    shape, grouped = (matrix.outputs, matrix.inputs), _grouped(matrix, params)
    _check(matrix, params, tensors)
    codes = _unpack(tensors[CODES], params.nbits)[: grouped[0]]
    scales, zeros = tensors[SCALE], tensors[ZERO]
    if isinstance(form, Dequantized):
        return {
            dequantized.WEIGHT: ((codes - zeros.float()) * scales.float()).flatten()[: math.prod(shape)].view(shape)
        }
    codes = codes.to(torch.uint8).flatten().view(shape)
    if params.group_size is not None:  # groups go on from one row to the next
        own = math.gcd(params.group_size, matrix.inputs)
        scales, zeros = (one.repeat_interleave(params.group_size // own, 0) for one in (scales, zeros))
    by_row = (matrix.outputs,) if params.group_size is None else (matrix.outputs, -1)
    if params.nbits == 4:
        return {w4a16.CODES: pack(codes), w4a16.SCALES: scales.view(by_row), w4a16.ZEROS: zeros.view(by_row)}
    return {w8a16.CODES: codes, w8a16.SCALES: scales.view(by_row), w8a16.ZEROS: zeros.view(by_row)}


def _unpack(stored: Tensor, bits: int) -> Tensor:
    """Elements [rows, columns] of parts of rows -> integers [rows * parts, columns]."""
    stored = stored.contiguous().view(torch.int32 if bits == 3 else torch.uint8)
    parts = PARTS[bits]
    return torch.cat([stored >> bits * (parts - 1 - i) & (1 << bits) - 1 for i in range(parts)])


def _check(matrix: Matrix, params: WeightParams, tensors: Mapping[str, Tensor]) -> None:
    """Raises LoadError for scales that are not finite, and settings that differ from the config's."""
    for key in (SCALE, ZERO):
        if not bool(tensors[key].isfinite().all()):
            raise LoadError(f"{matrix.tensor(key)}: the checkpoint has numbers that are not finite")
    want = {"nbits": [params.nbits], "axis": [params.axis], "shape": [matrix.outputs, matrix.inputs]}
    want |= {} if params.group_size is None else {"group_size": [params.group_size]}
    for key, numbers in want.items():
        if key in tensors and tensors[key].flatten().tolist() != numbers:
            raise LoadError(f"{matrix.tensor(key)}: the checkpoint has {tensors[key].tolist()}, expected {numbers}")
