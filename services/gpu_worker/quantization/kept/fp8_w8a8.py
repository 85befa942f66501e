"""`Fp8W8A8`: weights in e4m3, and inputs that are rounded to e4m3 before they are multiplied.

A weight has a scale for each row, or for each row and `group` inputs; one scale for all becomes equal ones of rows,
and one of a block of rows and inputs becomes equal ones of these rows. Inputs have a scale for each row, for each row
and `group` inputs, or one that the file gives.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from blockyard.services.gpu_worker.quantization.kept.eight_bits import (
    E4M3,
    expand,
    fill_e4m3,
    scaled_to_e4m3,
    to_e4m3,
)
from blockyard.services.gpu_worker.quantization.kept.form import DUMMY_SCALE, KeptTensor

CODES, SCALES, INPUT_SCALE = "codes", "scales", "input_scale"
ALIGNMENT = 16  # numbers; `torch._scaled_mm` requires it
DUMMY_STD = 112.0  # of codes: a quarter of the largest
DUMMY_INPUT_SCALE = 0.05


@dataclass(frozen=True, slots=True)
class Fp8W8A8:
    """Implements `KeptForm`."""

    group: int | None = None  # inputs of a scale; None: all of a row
    static: bool = False  # inputs have one scale, `input_scale`
    most_input: float | None = None  # a row of inputs counts as having at most this absolute value
    name = "Fp8W8A8"
    multiplies_on_host = False

    def tensors(self) -> Mapping[str, KeptTensor]:
        made = {CODES: KeptTensor(E4M3, inputs=1), SCALES: KeptTensor(torch.float32, inputs=self.group)}
        return made | ({INPUT_SCALE: KeptTensor(torch.float32, rows=False)} if self.static else {})

    def dequantize(self, kept: Mapping[str, Tensor], inputs: int, dtype: torch.dtype) -> Tensor:
        return (kept[CODES].float() * expand(kept[SCALES], self.group, inputs)).to(dtype)

    def _to_codes(self, x: Tensor, kept: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Codes [rows, inputs], and scales [rows] or [rows, groups]."""
        if self.static:
            scale = kept[INPUT_SCALE]
            return scaled_to_e4m3(x, scale), scale.expand(len(x))
        return to_e4m3(x, self.group, self.most_input)

    def round_inputs(self, x: Tensor, kept: Mapping[str, Tensor]) -> Tensor:
        codes, scales = self._to_codes(x, kept)
        return (codes.float() * expand(scales, None if self.static else self.group, x.shape[-1])).to(x.dtype)

    def product(self, x: Tensor, kept: Mapping[str, Tensor]) -> Tensor | None:
        codes = kept[CODES]
        if x.device.type != "cuda" or x.dtype != torch.bfloat16 or self.group is not None or _is_odd(codes):
            return None
        if torch.cuda.get_device_capability(x.device) < (9, 0):  # older GPUs have no scales of rows
            return None
        rounded, scales = self._to_codes(x, kept)
        out: Tensor = torch._scaled_mm(
            rounded,
            codes.t(),
            scale_a=scales[:, None].contiguous(),
            scale_b=kept[SCALES][None],
            out_dtype=x.dtype,
        )
        return out

    def fill(self, kept: Mapping[str, Tensor], generator: torch.Generator) -> None:
        fill_e4m3(kept[CODES], generator, DUMMY_STD)
        kept[SCALES].fill_(DUMMY_SCALE / DUMMY_STD)
        if self.static:
            kept[INPUT_SCALE].fill_(DUMMY_INPUT_SCALE)


def _is_odd(codes: Tensor) -> bool:
    return any(size % ALIGNMENT for size in codes.shape) or codes.data_ptr() % ALIGNMENT != 0
