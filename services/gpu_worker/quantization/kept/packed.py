"""Experts in a kept form as kernels read them: codes and scales, and how inputs are rounded."""

from torch import Tensor

from blockyard.kernels.quantized.packed_weights import Codes, ExpertRounding, PackedWeights, RoundedTo
from blockyard.services.gpu_worker.quantization.kept import int8_w8a8
from blockyard.services.gpu_worker.quantization.kept.form import KeptExperts, PackedForm, packed_codes
from blockyard.services.gpu_worker.quantization.kept.fp8_w8a8 import CODES, INPUT_SCALE, SCALES, Fp8W8A8
from blockyard.services.gpu_worker.quantization.kept.int8_w8a8 import Int8W8A8
from blockyard.shared.errors import ConfigError


def pack(method: KeptExperts) -> tuple[PackedWeights, ExpertRounding]:
    """Returns views of the tensors of a weight, and how its inputs are rounded.

    Raises ConfigError for a form or a group that no kernel of experts reads.
    """
    form, kept, inputs = method.kept_form, method.tensors(), method.shape[0]
    if isinstance(form, PackedForm):
        packed, rounding = form.packed(kept, inputs), ExpertRounding()
    elif isinstance(form, Fp8W8A8):
        packed = packed_codes(Codes.E4M3, kept[CODES], inputs, form.group, kept[SCALES])
        rounding = _of_floats(form, kept.get(INPUT_SCALE))
    elif isinstance(form, Int8W8A8):
        packed = packed_codes(Codes.INT8, kept[CODES], inputs, None, kept[SCALES])
        rounding = _of_integers(form, kept)
    else:
        raise ConfigError(f"no kernel of experts multiplies weights in the form {form.name}")
    if packed.group % 2 and packed.kind <= Codes.TABLE4:
        raise ConfigError(f"quantization_config: experts have groups of {packed.group} inputs, expected an even number")
    return packed, rounding


def _of_floats(form: Fp8W8A8, static: Tensor | None) -> ExpertRounding:
    if static is not None:
        return ExpertRounding(kind=RoundedTo.E4M3, high=static)
    return ExpertRounding(kind=RoundedTo.E4M3, group=form.group or 0, most=form.most_input)


def _of_integers(form: Int8W8A8, kept: dict[str, Tensor]) -> ExpertRounding:
    if form.symmetric:
        return ExpertRounding(kind=RoundedTo.INT8, high=kept.get(int8_w8a8.INPUT_SCALE))
    high, low = kept.get(int8_w8a8.INPUT_HIGH), kept.get(int8_w8a8.INPUT_LOW)
    return ExpertRounding(kind=RoundedTo.ASYMMETRIC_INT8, high=high, low=low)
