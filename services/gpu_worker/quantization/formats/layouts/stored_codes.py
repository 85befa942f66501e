"""How compressed-tensors and Quark store matrices: codes of each layout, and the kept forms that they become.

Both write a matrix [outputs, inputs] with scales `weight_scale` of the whole matrix [] or [1], of rows [outputs, 1] or
[outputs], of groups [outputs, groups] or of blocks [blocks of outputs, blocks of inputs]:

- integers in words: `weight_packed` int32 [outputs, ceil(inputs * bits / 32)], codes plus 2 ** (bits - 1) side by side
  in a row's bits, the first one in the lowest; `weight_shape` int64 [2]; zeros of asymmetric weights in words along the
  outputs, `weight_zero_point` int32 [ceil(outputs * bits / 32), groups]; `weight_g_idx` int32 [inputs], the group of
  each input, with act order,
- codes one by one: `weight` int8 or F8_E4M3 [outputs, inputs], `weight_zero_point` of the scales' shape,
- floats of 4 bits (e2m1): bytes [outputs, inputs / 2], the first one in the lower half, with scales of groups of 16 in
  F8_E4M3 and one for all in float32 (nvfp4), or of 32 as exponents uint8 plus 127 (mxfp4).

Documented by the package compressed-tensors (compressors/, `pack_to_int32`, quantization/quant_args.py).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from blockyard.services.gpu_worker.loading.tensor_groups import StoredTensor
from blockyard.services.gpu_worker.loading.weights import FLOATS
from blockyard.services.gpu_worker.quantization.formats.layouts.packing import as_bytes, unpack
from blockyard.services.gpu_worker.quantization.formats.layouts.scales import SCALES, check_scales, exponents
from blockyard.services.gpu_worker.quantization.kept import act_order, fp8_w8a8, int8_w8a8, table4_a16, w4a16, w8a16
from blockyard.services.gpu_worker.quantization.kept.eight_bits import E4M3
from blockyard.services.gpu_worker.quantization.kept.form import KeptForm
from blockyard.services.gpu_worker.quantization.kept.fp8_w8a8 import Fp8W8A8
from blockyard.services.gpu_worker.quantization.kept.int8_w8a8 import Int8W8A8
from blockyard.services.gpu_worker.quantization.kept.table4_a16 import E2M1, Table4A16
from blockyard.services.gpu_worker.quantization.kept.w4a16 import W4A16
from blockyard.services.gpu_worker.quantization.kept.w8a16 import W8A16
from blockyard.services.gpu_worker.quantization.scheme import WEIGHT, Matrix, StoredMatrix
from blockyard.shared.errors import ConfigError, LoadError

PACKED, SHAPE, ZERO, GROUPS = "weight_packed", "weight_shape", "weight_zero_point", "weight_g_idx"
SCALE, GLOBAL_SCALE = "weight_scale", "weight_global_scale"
INPUT_SCALE, INPUT_ZERO, INPUT_GLOBAL_SCALE = "input_scale", "input_zero_point", "input_global_scale"
WORDS, BYTES = frozenset({torch.int32}), frozenset({torch.uint8})
INDICES = frozenset({torch.int32, torch.int64})
ZEROS = FLOATS | {torch.int8, torch.int32, torch.int64, torch.uint8, E4M3}
E8M0 = torch.float8_e8m0fnu
EXPONENTS = frozenset({torch.uint8, E8M0})
WORD_BITS = 32
NV_GROUP, MX_GROUP = 16, 32


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeScheme:
    """How a matrix is quantized, whatever the words of the file. Without `rows`, `group` counts inputs."""

    bits: int = 8
    floats: bool = False
    group: int | None = None  # inputs of a scale; None: all
    rows: int | None = None  # outputs of a block
    has_zeros: bool = False
    order: bool = False  # inputs are in groups of any others
    inputs: "Inputs | None" = None  # how inputs are rounded; None: they are not


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """Inputs of 8 bits, of the weights' kind."""

    static: bool = False
    symmetric: bool = True


def check(matrix: Matrix) -> None:
    """Raises ConfigError for a matrix that these layouts do not have."""
    if matrix.transposed:
        raise ConfigError(f"quantization_config: {matrix.name} is stored as [inputs, outputs], which no layout has")


# integers in words


def words(matrix: Matrix, own: CodeScheme, dtype: torch.dtype) -> StoredMatrix:
    """Integers of up to 8 bits. dtype: of the model, which scales have in most files."""
    check(matrix)
    group = _group(own, matrix)
    groups = 1 if group is None else -(-matrix.inputs // group)
    scales = matrix.float_dtype(SCALE, dtype)
    tensors = {
        PACKED: matrix.stored(PACKED, (matrix.outputs, _num_words(matrix.inputs, own.bits)), WORDS),
        SCALE: _stored_scale(matrix, groups),
        SHAPE: matrix.stored(SHAPE, (2,), INDICES, optional=True),
    }
    if own.has_zeros:
        tensors[ZERO] = matrix.stored(ZERO, (_num_words(matrix.outputs, own.bits), groups), WORDS)
    order = matrix.name if own.order and group is not None else ""
    if order:
        tensors[GROUPS] = matrix.stored(GROUPS, (matrix.inputs,), INDICES)
    if own.bits == 4:
        form: KeptForm = W4A16(group, torch.uint8 if own.has_zeros else None, scales, order)
    else:
        form = W8A16(torch.int8, group, own.has_zeros, scales, order)
    return StoredMatrix(form=form, tensors=tensors, to_kept=partial(_from_words, matrix, own, group, scales))


def _from_words(
    matrix: Matrix, own: CodeScheme, group: int | None, dtype: torch.dtype, tensors: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    shape = tensors.get(SHAPE)
    if shape is not None and shape.tolist() != [matrix.outputs, matrix.inputs]:
        means = [matrix.outputs, matrix.inputs]
        raise LoadError(f"{matrix.tensor(SHAPE)}: the checkpoint has {shape.tolist()}, config.json means {means}")
    packed = as_bytes(tensors[PACKED])
    order = act_order.sorting(matrix.tensor(GROUPS), group, tensors[GROUPS].long()) if GROUPS in tensors else None
    scales = _of_rows(check_scales(matrix.tensor(SCALE), tensors[SCALE]), matrix.outputs, group)
    zeros = None
    if own.has_zeros:
        zeros = unpack(as_bytes(tensors[ZERO].t()), own.bits, matrix.outputs).t()
        zeros = zeros[:, 0] if group is None else zeros
    if own.bits == 4 and order is None:  # the words have the bytes of `W4A16`
        made = {w4a16.CODES: packed[:, : -(-matrix.inputs // 2)], w4a16.SCALES: scales}
        return made if zeros is None else made | {w4a16.ZEROS: zeros}
    codes = unpack(packed, own.bits, matrix.inputs)
    codes = codes if order is None else codes[:, order]
    if own.bits == 4:
        made = {w4a16.CODES: w4a16.pack(codes), w4a16.SCALES: scales}
        made |= {} if zeros is None else {w4a16.ZEROS: zeros}
    else:
        middle = 1 << own.bits - 1
        made = {w8a16.CODES: (codes - middle).view(torch.int8), w8a16.SCALES: scales}
        made |= {} if zeros is None else {w8a16.ZEROS: (zeros.short() - middle).to(dtype)}
    return made if order is None else made | {act_order.ORDER: order.int()}


def _num_words(count: int, bits: int) -> int:
    return -(-count * bits // WORD_BITS)


# codes one by one


def codes(matrix: Matrix, own: CodeScheme, has_products: bool) -> StoredMatrix:
    """int8 or e4m3. has_products: the device multiplies fp8 by fp8."""
    check(matrix)
    group = _group(own, matrix)
    form = _form_of_codes(own, group, has_products)
    if own.rows is not None:
        assert own.group is not None
        scale = matrix.stored(SCALE, (-(-matrix.outputs // own.rows), -(-matrix.inputs // own.group)), SCALES)
    else:
        scale = _stored_scale(matrix, 1 if group is None else -(-matrix.inputs // group))
    kind = frozenset({E4M3 if own.floats else torch.int8})
    tensors = {WEIGHT: matrix.stored(WEIGHT, (matrix.outputs, matrix.inputs), kind), SCALE: scale}
    if own.has_zeros:
        tensors[ZERO] = matrix.stored(ZERO, scale.shape[-2:], ZEROS, other_shapes=((1,), (matrix.outputs,)))
    if own.inputs is not None and own.inputs.static:
        is_used = any(one.is_one_number for one in form.tensors().values()) and not matrix.plain
        for key, needed in ((INPUT_SCALE, is_used), (INPUT_ZERO, is_used and not own.inputs.symmetric)):
            tensors[key] = matrix.stored(key, (), ZEROS, other_shapes=((1,),), optional=not needed)
    return StoredMatrix(form=form, tensors=tensors, to_kept=partial(_from_codes, matrix, own, group))


def _form_of_codes(own: CodeScheme, group: int | None, has_products: bool) -> KeptForm:
    inputs = own.inputs
    if inputs is None or own.has_zeros or (own.floats and not has_products):
        return W8A16(E4M3 if own.floats else torch.int8, group, own.has_zeros)
    if own.floats:
        return Fp8W8A8(group, inputs.static and group is None)
    if group is not None:
        return W8A16(torch.int8, group)
    return Int8W8A8(inputs.static, inputs.symmetric)


def _from_codes(matrix: Matrix, own: CodeScheme, group: int | None, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    scales = check_scales(matrix.tensor(SCALE), tensors[SCALE])
    if own.rows is not None:
        scales = scales.repeat_interleave(own.rows, 0)[: matrix.outputs]
    scales = _of_rows(scales, matrix.outputs, group)
    made = {fp8_w8a8.CODES: tensors[WEIGHT], fp8_w8a8.SCALES: scales}
    if own.has_zeros:
        made[w8a16.ZEROS] = _of_rows(tensors[ZERO].float(), matrix.outputs, group)
    if INPUT_SCALE in tensors:
        scale = check_scales(matrix.tensor(INPUT_SCALE), tensors[INPUT_SCALE])
        made[fp8_w8a8.INPUT_SCALE] = scale
        if INPUT_ZERO in tensors:
            zero = tensors[INPUT_ZERO].float()
            made[int8_w8a8.INPUT_HIGH] = (int8_w8a8.HIGH - zero) * scale
            made[int8_w8a8.INPUT_LOW] = (zero - int8_w8a8.LOW) * scale
    return made


# floats in 4 bits, and of 8 bits with exponents


def nvfp4(matrix: Matrix) -> StoredMatrix:
    """With the second scale that compressed-tensors has, which divides."""
    tensors = {
        **_four_bit_floats(matrix, PACKED, NV_GROUP, frozenset({E4M3})),
        GLOBAL_SCALE: matrix.stored(GLOBAL_SCALE, (1,), FLOATS, other_shapes=((),)),
        INPUT_GLOBAL_SCALE: matrix.stored(INPUT_GLOBAL_SCALE, (1,), FLOATS, other_shapes=((),), optional=True),
    }

    def to_kept(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        whole = check_scales(matrix.tensor(GLOBAL_SCALE), tensors[GLOBAL_SCALE])
        if not bool((whole > 0).all()):
            raise LoadError(f"{matrix.tensor(GLOBAL_SCALE)}: the checkpoint has a scale of 0, which divides")
        check_scales(matrix.tensor(SCALE), tensors[SCALE])
        rows = whole.reciprocal().flatten().expand(matrix.outputs)
        return {table4_a16.CODES: tensors[PACKED], table4_a16.SCALES: tensors[SCALE], table4_a16.ROW_SCALES: rows}

    return StoredMatrix(form=Table4A16(E2M1, NV_GROUP, E4M3, row_scales=True), tensors=tensors, to_kept=to_kept)


def mxfp4(matrix: Matrix, key: str = PACKED) -> StoredMatrix:
    """key: of the codes."""

    def to_kept(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {table4_a16.CODES: tensors[key], table4_a16.SCALES: exponents(matrix.tensor(SCALE), tensors[SCALE])}

    tensors = _four_bit_floats(matrix, key, MX_GROUP, EXPONENTS)
    return StoredMatrix(form=Table4A16(E2M1, MX_GROUP, E8M0), tensors=tensors, to_kept=to_kept)


def mxfp8(matrix: Matrix) -> StoredMatrix:
    check(matrix)
    groups = -(-matrix.inputs // MX_GROUP)
    tensors = {
        WEIGHT: matrix.stored(WEIGHT, (matrix.outputs, matrix.inputs), frozenset({E4M3})),
        SCALE: matrix.stored(SCALE, (matrix.outputs, groups), EXPONENTS),
    }

    def to_kept(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {w8a16.CODES: tensors[WEIGHT], w8a16.SCALES: exponents(matrix.tensor(SCALE), tensors[SCALE]).float()}

    return StoredMatrix(form=W8A16(E4M3, MX_GROUP), tensors=tensors, to_kept=to_kept)


def _four_bit_floats(matrix: Matrix, key: str, group: int, scales: frozenset[torch.dtype]) -> dict[str, StoredTensor]:
    check(matrix)
    if matrix.inputs % group:
        raise ConfigError(f"quantization_config: {matrix.name} has {matrix.inputs} inputs, no multiple of {group}")
    return {
        key: matrix.stored(key, (matrix.outputs, matrix.inputs // 2), BYTES),
        SCALE: matrix.stored(SCALE, (matrix.outputs, matrix.inputs // group), scales),
    }


# scales


def _group(own: CodeScheme, matrix: Matrix) -> int | None:
    """Raises ConfigError for groups that do not divide the inputs: files have no incomplete ones but of blocks."""
    if own.group is None:
        return None
    if own.rows is None and matrix.inputs % own.group:
        raise ConfigError(f"quantization_config: group_size {own.group}: {matrix.name} has {matrix.inputs} inputs")
    return own.group


def _stored_scale(matrix: Matrix, groups: int) -> StoredTensor:
    others = ((matrix.outputs,), (), (1,)) if groups == 1 else ()
    return matrix.stored(SCALE, (matrix.outputs, groups), SCALES, other_shapes=others)


def _of_rows(scales: Tensor, outputs: int, group: int | None) -> Tensor:
    """[outputs], or [outputs, groups], of scales of rows or of one for all."""
    if group is None:
        return scales.flatten().expand(outputs)
    return scales.reshape(-1, scales.shape[-1] if scales.dim() == 2 else 1).expand(outputs, -1)
