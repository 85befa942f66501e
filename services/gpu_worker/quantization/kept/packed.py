"""Experts in a kept form as kernels read them: codes and scales, and how inputs are rounded."""

import torch
from torch import Tensor

from blockyard.kernels.quantized.packed_weights import E8M0, Codes, InputRounding, PackedWeights, RoundedTo
from blockyard.services.gpu_worker.quantization.kept import int8_w8a8
from blockyard.services.gpu_worker.quantization.kept.eight_bits import E4M3
from blockyard.services.gpu_worker.quantization.kept.form import KeptExperts
from blockyard.services.gpu_worker.quantization.kept.fp8_w8a8 import INPUT_SCALE, Fp8W8A8
from blockyard.services.gpu_worker.quantization.kept.int8_w8a8 import Int8W8A8
from blockyard.services.gpu_worker.quantization.kept.table4_a16 import E2M1, ROW_SCALES, Table4A16
from blockyard.services.gpu_worker.quantization.kept.w4a16 import CODES, SCALES, W4A16, ZEROS
from blockyard.services.gpu_worker.quantization.kept.w8a16 import W8A16
from blockyard.shared.errors import ConfigError

_BYTES = {torch.int8: Codes.INT8, torch.uint8: Codes.UINT8, E4M3: Codes.E4M3}


def pack(method: KeptExperts) -> tuple[PackedWeights, InputRounding]:
    """Returns views of the tensors of a weight, and how its inputs are rounded.

    Raises ConfigError for a form or a group that no kernel of experts reads.
    """
    form, kept, inputs = method.kept_form, method.tensors(), method.shape[0]
    table: Tensor | None = None
    group: int | None = None
    rows: Tensor | None = None
    rounding = InputRounding()
    match form:
        case W4A16(group=group):
            kind = Codes.INT4
        case W8A16(codes=codes, group=group):
            kind = _BYTES[codes]
        case Table4A16(table=numbers, group=group):
            kind, rows = (Codes.E2M1 if numbers == E2M1 else Codes.TABLE4), kept.get(ROW_SCALES)
            if kind is Codes.TABLE4:
                table = torch.tensor(numbers, dtype=torch.float32, device=kept[CODES].device)
        case Fp8W8A8(group=group):
            kind, rounding = Codes.E4M3, _of_floats(form, kept.get(INPUT_SCALE))
        case Int8W8A8():
            kind, rounding = Codes.INT8, _of_integers(form, kept)
        case _:
            raise ConfigError(f"no kernel of experts multiplies weights in the form {form.name}")
    if group is not None and kind <= Codes.TABLE4 and group % 2:
        raise ConfigError(f"quantization_config: experts have groups of {group} inputs, expected an even number")
    scales = kept[SCALES]
    packed = PackedWeights(
        codes=kept[CODES],
        kind=kind,
        inputs=inputs,
        group=group or 0,
        scales=None if group is None else scales.view(torch.uint8) if scales.dtype == E8M0 else scales,
        zeros=kept.get(ZEROS),
        row_scales=scales if group is None else rows,
        table=table,
        is_e8m0=scales.dtype == E8M0 and group is not None,
    )
    return packed, rounding


def _of_floats(form: Fp8W8A8, static: Tensor | None) -> InputRounding:
    if static is not None:
        return InputRounding(kind=RoundedTo.E4M3, high=static)
    return InputRounding(kind=RoundedTo.E4M3, group=form.group or 0, most=form.most_input)


def _of_integers(form: Int8W8A8, kept: dict[str, Tensor]) -> InputRounding:
    if form.symmetric:
        return InputRounding(kind=RoundedTo.INT8, high=kept.get(int8_w8a8.INPUT_SCALE))
    high, low = kept.get(int8_w8a8.INPUT_HIGH), kept.get(int8_w8a8.INPUT_LOW)
    return InputRounding(kind=RoundedTo.ASYMMETRIC_INT8, high=high, low=low)
