"""`quant_method` bitsandbytes: codes of the tables nf4 and fp4, or integers of 8 bits. Inputs stay as they are.

With `load_in_4bit`, a matrix [outputs, inputs] is n codes in the order of rows. It is stored as

- `weight` U8 [n / 2, 1], two codes a byte, the first one in the upper half; other dtypes (`bnb_4bit_quant_storage`)
  have the same bytes,
- `weight.absmax` F32 [n / blocksize], the scales of successive codes; blocks go on from one row to the next,
- `weight.quant_map` F32 [16], the table,
- `weight.quant_state.bitsandbytes__nf4` or `__fp4` U8, JSON with quant_type, blocksize, shape and nested_offset.

With double quantization `weight.absmax` is U8, and stands for weight.nested_quant_map[absmax] *
weight.nested_absmax[of 256 scales] + nested_offset. With `load_in_8bit` the tensors are

- `weight` I8 [outputs, inputs] and `SCB` F32 [outputs]: weight * SCB / 127,
- `weight_format` U8, 0: rows. Other orders are of releases before 0.45.

Documented in bitsandbytes (functional.QuantState.as_dict, nn.Linear8bitLt) and transformers
(quantizers/quantizer_bnb_4bit.py). A 16-bit checkpoint is rounded while it loads, in blocks of 64 inputs. Outliers of
inputs, `llm_int8_threshold`, need no second product here: no input is rounded.
"""

import math
from collections.abc import Mapping
from functools import partial
from typing import Any

import msgspec
import torch
from torch import Tensor

from blockyard.services.gpu_worker.loading.tensor_groups import StoredTensor
from blockyard.services.gpu_worker.loading.weights import FLOATS, WeightTable
from blockyard.services.gpu_worker.quantization.formats.layouts.either import quantized_or_not
from blockyard.services.gpu_worker.quantization.formats.layouts.scales import check_scales
from blockyard.services.gpu_worker.quantization.kept import dequantized, table4_a16, w8a16
from blockyard.services.gpu_worker.quantization.kept.dequantized import Dequantized
from blockyard.services.gpu_worker.quantization.kept.table4_a16 import FP4, NF4, Table4A16, to_table
from blockyard.services.gpu_worker.quantization.kept.w4a16 import pack
from blockyard.services.gpu_worker.quantization.kept.w8a16 import W8A16
from blockyard.services.gpu_worker.quantization.names import ROUTERS, NamePatterns, is_left_out, is_left_out_at_load
from blockyard.services.gpu_worker.quantization.scheme import WEIGHT, Matrix, StoredMatrix
from blockyard.shared.errors import LoadError
from blockyard.shared.quantization.integers import BitsAndBytesSettings
from blockyard.shared.quantization.reading import read

TABLES = {"nf4": NF4, "fp4": FP4}
BLOCK = 64  # codes of a scale, unless the file says another number
BLOCKS = (32, 64, 128, 256, 512, 1024, 2048, 4096)
LEAST_GROUP = 16  # inputs; with fewer, scales take more memory than they save
LARGEST = 127  # of int8
ABSMAX, TABLE, STATE = "absmax", "quant_map", "quant_state"
NESTED_ABSMAX, NESTED_TABLE = "nested_absmax", "nested_quant_map"
SCALE, ORDER = "SCB", "weight_format"
BYTES, INT8, FLOAT32 = frozenset({torch.uint8}), frozenset({torch.int8}), frozenset({torch.float32})
STORAGES = {
    **{"uint8": torch.uint8, "int8": torch.int8},
    **{"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32},
}
INT8_FORM = W8A16(torch.int8)


class _State(msgspec.Struct, frozen=True):
    """The JSON of one matrix."""

    quant_type: str
    blocksize: int
    shape: list[int]
    nested_blocksize: int = 256
    nested_offset: float = 0.0


class BitsAndBytesScheme:
    """Implements `Scheme`."""

    def __init__(self, said: Mapping[str, Any], dtype: torch.dtype) -> None:
        """dtype: of the model. Raises ConfigError for settings that it does not know."""
        self._settings, self._dtype = read(said, BitsAndBytesSettings), dtype
        names = [*self._settings.llm_int8_skip_modules, *self._settings.modules_to_not_convert]
        self._left_out = NamePatterns(names)

    def patterns(self) -> list[NamePatterns]:
        return [self._left_out]

    def stored(self, matrix: Matrix) -> StoredMatrix | None:
        settings, is_router = self._settings, matrix.name.rpartition(".")[2] in ROUTERS
        if self._left_out.match(matrix.name) or (is_left_out(matrix.name) and not is_router):
            return None
        if settings.from_16_bits:
            is_out = matrix.plain or is_left_out_at_load(matrix.name)
            return None if is_out else self._rounded(matrix)
        if matrix.experts is not None:  # the library quantizes linear layers, and no stacks
            return None
        stored = _stored_8_bits(matrix) if settings.load_in_8bit else self._stored_4_bits(matrix)
        if matrix.plain or is_router:
            return quantized_or_not(matrix, stored, dtype=self._dtype)
        return stored

    def _stored_4_bits(self, matrix: Matrix) -> StoredMatrix:
        """Blocks go on from one row to the next: where they do not fit a row, groups are parts of them."""
        tensors, form = self._tensors_of_4_bits(matrix), self._form(math.gcd(matrix.inputs, _least_block(matrix)))
        to_kept = partial(self._kept_4_bits, matrix, form.group)
        if form.group >= LEAST_GROUP:
            return StoredMatrix(form=form, tensors=tensors, to_kept=to_kept)

        def to_numbers(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
            return {dequantized.WEIGHT: form.dequantize(to_kept(tensors), matrix.inputs, torch.float32)}

        return StoredMatrix(form=Dequantized(self._dtype), tensors=tensors, to_kept=to_numbers)

    def _form(self, group: int) -> Table4A16:
        return Table4A16(TABLES[self._settings.bnb_4bit_quant_type], group)

    def _tensors_of_4_bits(self, matrix: Matrix) -> dict[str, StoredTensor]:
        count, storage = matrix.outputs * matrix.inputs, STORAGES[self._settings.bnb_4bit_quant_storage]
        numbers, kind = -(-count // (2 * storage.itemsize)), self._settings.bnb_4bit_quant_type

        def of_weight(key: str) -> str:
            return f"{WEIGHT}.{key}"

        def blocks(size: int) -> tuple[int]:
            return (-(-count // size),)

        sizes = tuple(blocks(size) for size in BLOCKS)
        any_size = ((-1,),)
        return {
            WEIGHT: matrix.stored(WEIGHT, (numbers, 1), frozenset({storage})),
            ABSMAX: matrix.stored(of_weight(ABSMAX), blocks(BLOCK), FLOAT32 | BYTES, other_shapes=sizes),
            TABLE: matrix.stored(of_weight(TABLE), (16,), FLOAT32),
            STATE: matrix.stored(of_weight(f"{STATE}.bitsandbytes__{kind}"), (1,), BYTES, other_shapes=any_size),
            NESTED_ABSMAX: matrix.stored(of_weight(NESTED_ABSMAX), (1,), FLOAT32, other_shapes=any_size, optional=True),
            NESTED_TABLE: matrix.stored(of_weight(NESTED_TABLE), (256,), FLOAT32, optional=True),
        }

    def _kept_4_bits(self, matrix: Matrix, group: int, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        name, shape = matrix.tensor(WEIGHT), (matrix.outputs, matrix.inputs)
        state = _read_state(f"{name}.{STATE}", tensors[STATE])
        table = torch.tensor(TABLES[self._settings.bnb_4bit_quant_type])
        if tuple(state.shape) != shape or state.quant_type != self._settings.bnb_4bit_quant_type:
            raise LoadError(f"{name}: {STATE} says {state.quant_type} of {state.shape}, expected {list(shape)}")
        if not torch.allclose(tensors[TABLE].cpu(), table, atol=1e-4):  # releases differ in the last digits
            raise LoadError(f"{name}.{TABLE}: the checkpoint has another table than {state.quant_type}")
        scales = check_scales(f"{name}.{ABSMAX}", _absmax(name, state, tensors))
        count = math.prod(shape)
        if state.blocksize % group or len(scales) != -(-count // state.blocksize):
            raise LoadError(f"{name}: {len(scales)} scales for blocks of {state.blocksize} of {count} numbers")
        scales = scales.repeat_interleave(state.blocksize // group)[: count // group].view(matrix.outputs, -1)
        packed = tensors[WEIGHT].contiguous().view(torch.uint8).flatten()[: -(-count // 2)]
        if matrix.inputs % 2 == 0:
            codes = (packed >> 4 | packed << 4).view(matrix.outputs, -1)
        else:  # a byte has codes of two rows
            codes = pack(torch.stack((packed >> 4, packed & 15), -1).flatten()[:count].view(shape))
        return {table4_a16.CODES: codes, table4_a16.SCALES: scales}

    def _rounded(self, matrix: Matrix) -> StoredMatrix:
        tensors = {WEIGHT: matrix.stored(WEIGHT, matrix.stored_shape, FLOATS)}
        if self._settings.load_in_8bit:
            return StoredMatrix(form=INT8_FORM, tensors=tensors, to_kept=partial(_round_rows, matrix))
        form = self._form(BLOCK)
        return StoredMatrix(form=form, tensors=tensors, to_kept=partial(_round_to_table, matrix, form))


def build(said: Mapping[str, Any], table: WeightTable) -> BitsAndBytesScheme:
    return BitsAndBytesScheme(said, table.dtype)


def _least_block(matrix: Matrix) -> int:
    """Codes of a scale, or 64 of more: by the header of the scales, because the JSON is read too late."""
    header, count = matrix.header(f"{WEIGHT}.{ABSMAX}"), matrix.outputs * matrix.inputs
    if header is None:
        return BLOCK
    found = [size for size in BLOCKS if header.shape == (-(-count // size),)]
    return min([*found, BLOCK])


def _read_state(name: str, stored: Tensor) -> _State:
    try:
        return msgspec.json.decode(bytes(stored.cpu().tolist()), type=_State)
    except msgspec.DecodeError as e:
        raise LoadError(f"{name}: {e}") from e


def _absmax(name: str, state: _State, tensors: Mapping[str, Tensor]) -> Tensor:
    """Returns the scales of blocks in float32, and dequantizes scales that are quantized."""
    absmax = tensors[ABSMAX]
    if absmax.dtype != torch.uint8:
        return absmax
    for key in (NESTED_ABSMAX, NESTED_TABLE):
        if key not in tensors:
            raise LoadError(f"the checkpoint lacks {name}.{key}")
    outer = tensors[NESTED_ABSMAX].repeat_interleave(state.nested_blocksize)
    if len(outer) < len(absmax):
        raise LoadError(f"{name}.{NESTED_ABSMAX}: {len(tensors[NESTED_ABSMAX])} scales for {len(absmax)}")
    return tensors[NESTED_TABLE][absmax.int()] * outer[: len(absmax)] + state.nested_offset


def _stored_8_bits(matrix: Matrix) -> StoredMatrix:
    tensors = {
        WEIGHT: matrix.stored(WEIGHT, (matrix.outputs, matrix.inputs), INT8),
        SCALE: matrix.stored(SCALE, (matrix.outputs,), FLOAT32),
        ORDER: matrix.stored(ORDER, (), BYTES, other_shapes=((1,),), optional=True),
    }
    return StoredMatrix(form=INT8_FORM, tensors=tensors, to_kept=partial(_kept_8_bits, matrix))


def _kept_8_bits(matrix: Matrix, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    if ORDER in tensors and int(tensors[ORDER]):
        raise LoadError(f"{matrix.tensor(ORDER)}: the checkpoint has {int(tensors[ORDER])}, and only 0 is known: rows")
    scales = check_scales(matrix.tensor(SCALE), tensors[SCALE])
    return {w8a16.CODES: tensors[WEIGHT], w8a16.SCALES: scales / LARGEST}


def _round_rows(matrix: Matrix, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    weight = tensors[WEIGHT].mT if matrix.transposed else tensors[WEIGHT]
    scales = weight.float().abs().amax(1) / LARGEST
    codes = (weight / scales.clamp(min=torch.finfo(torch.float32).tiny)[:, None]).round_()
    return {w8a16.CODES: codes.to(torch.int8), w8a16.SCALES: scales}


def _round_to_table(matrix: Matrix, form: Table4A16, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    weight = tensors[WEIGHT].mT if matrix.transposed else tensors[WEIGHT]
    codes, scales = to_table(weight, form.table, form.group)
    return {table4_a16.CODES: pack(codes), table4_a16.SCALES: scales}
