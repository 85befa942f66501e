"""GPTQ: `quant_method` gptq, and marlin for the same weights in the order of the kernel of that name.

A matrix [outputs, inputs] of b bits is stored as

- `qweight` int32 [inputs * b / 32, outputs]: codes along the inputs, the first one in the lowest bits,
- `qzeros` int32 [groups, outputs * b / 32]: zeros along the outputs, each less one in the first version of the layout,
- `scales` [groups, outputs],
- `g_idx` int32 [inputs]: the group of each input, which with `desc_act` (act order) is any.

Documented in AutoGPTQ (nn_modules/qlinear, `pack`) and GPTQModel (`convert_gptq_v1_to_v2_format`, README: "Dynamic
quantization"). `checkpoint_format` gptq is the first version and gptq_v2 the second; but some files of the second one
say the first. In symmetric files the zeros tell, because the middle is known. The order of Marlin is in marlin.py.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from blockyard.services.gpu_worker.loading.weights import FLOATS, WeightTable
from blockyard.services.gpu_worker.quantization.formats.layouts import marlin
from blockyard.services.gpu_worker.quantization.formats.layouts.integers import (
    WORD_BITS,
    WORDS,
    Integers,
    check_middle,
    check_sizes,
    is_outside,
    stored_matrix,
)
from blockyard.services.gpu_worker.quantization.formats.layouts.packing import as_bytes, unpack
from blockyard.services.gpu_worker.quantization.formats.layouts.scales import check_scales
from blockyard.services.gpu_worker.quantization.kept import act_order
from blockyard.services.gpu_worker.quantization.names import NamePatterns, NamesOfFile, SettingsByPattern
from blockyard.services.gpu_worker.quantization.scheme import Matrix, StoredMatrix
from blockyard.shared.errors import LoadError
from blockyard.shared.quantization.integers import CHANGED, FIRST, LEFT_OUT, GptqSettings, group_of
from blockyard.shared.quantization.reading import read

CODES, ZEROS, SCALES, GROUPS = "qweight", "qzeros", "scales", "g_idx"
INDICES = frozenset({torch.int32, torch.int64})


class GptqScheme:
    """Implements `Scheme`."""

    def __init__(self, said: Mapping[str, Any], dtype: torch.dtype) -> None:
        """dtype: of the model. Raises ConfigError for settings that it does not know."""
        self._said, self._dtype = said, dtype
        self._settings = read(said, GptqSettings)
        within = self._settings.modules_in_block_to_quantize
        self._within = NamePatterns(name for some in within for name in ([some] if isinstance(some, str) else some))
        self._dynamic = SettingsByPattern(self._settings.dynamic, marks=(LEFT_OUT, CHANGED))

    def patterns(self) -> list[NamesOfFile]:
        return [self._within, self._dynamic]

    def stored(self, matrix: Matrix) -> StoredMatrix | None:
        settings = self._find_settings(matrix.name)
        if settings is None:
            return None
        group = group_of(settings.group_size, settings.bits)
        if group is not None and group >= matrix.inputs:
            group = None
        if settings.is_marlin:
            return marlin.stored(matrix, group, self._dtype, marlin.KEYS)
        order = matrix.name if settings.desc_act and group is not None else ""
        scales = matrix.float_dtype(SCALES, torch.float16)
        own = Integers(bits=settings.bits, group=group, zeros=not settings.sym, scales=scales, order=order)
        return _stored(matrix, settings, own, self._dtype)

    def _find_settings(self, name: str) -> GptqSettings | None:
        """None: the matrix is not quantized."""
        said = self._settings
        if is_outside(name, with_head=said.lm_head):
            return None
        if said.modules_in_block_to_quantize and not is_outside(name) and not self._within.match(name):
            return None
        found = self._dynamic.find(name)
        if found is None:
            return said
        key, rule = found
        return None if key.startswith(LEFT_OUT) else read({**self._said, **(rule or {})}, GptqSettings)


def build(said: Mapping[str, Any], table: WeightTable) -> GptqScheme:
    return GptqScheme(said, table.dtype)


def _stored(matrix: Matrix, settings: GptqSettings, own: Integers, dtype: torch.dtype) -> StoredMatrix:
    unit = WORD_BITS if own.bits == 3 else WORD_BITS // own.bits
    check_sizes(matrix, inputs=unit, outputs=unit)
    groups = own.num_groups(matrix.inputs)
    words_in, words_out = (size * own.bits // WORD_BITS for size in (matrix.inputs, matrix.outputs))
    tensors = {
        CODES: matrix.stored(CODES, (words_in, matrix.outputs), WORDS),
        ZEROS: matrix.stored(ZEROS, (groups, words_out), WORDS, optional=not own.zeros),
        SCALES: matrix.stored(SCALES, (groups, matrix.outputs), FLOATS),
        GROUPS: matrix.stored(GROUPS, (matrix.inputs,), INDICES, optional=not own.order),
    }
    is_first = settings.layout == FIRST
    return stored_matrix(matrix, own, dtype, tensors, partial(_to_kept, matrix, own, is_first))


def _to_kept(matrix: Matrix, own: Integers, is_first: bool, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    scales = check_scales(matrix.tensor(SCALES), tensors[SCALES], signed=True)
    zeros = None
    if ZEROS in tensors:
        zeros = unpack(as_bytes(tensors[ZEROS]), own.bits)
        if not own.zeros:
            check_middle(matrix.tensor(ZEROS), zeros, (own.middle - 1, own.middle))
        zeros = zeros.short().t() + is_first  # a byte does not hold 256
    order = _find_order(matrix, own, tensors[GROUPS].long()) if GROUPS in tensors else None
    return own.kept(as_bytes(tensors[CODES].t()), scales.t(), zeros if own.zeros else None, order)


def _find_order(matrix: Matrix, own: Integers, groups: Tensor) -> Tensor | None:
    """Returns the order that sorts the inputs by group. None: they are sorted. Raises LoadError for groups that
    config.json does not mean."""
    order = act_order.sorting(matrix.tensor(GROUPS), own.group, groups)
    if order is None or own.order:
        return order
    if not torch.equal(order, torch.arange(matrix.inputs, device=order.device)):
        name = matrix.tensor(GROUPS)
        raise LoadError(f"{name}: groups of inputs are in another order, but desc_act is false")
    return None
