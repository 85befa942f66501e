"""`Int8W8A8`: weights in int8, and inputs that are rounded to int8 before they are multiplied.

A weight has a scale for each row; one scale for all becomes equal ones of rows. Inputs are rounded each row by itself:
symmetrically, so that the largest absolute value is 127, or asymmetrically with a zero by the range, which has 0 in it
and becomes -128 to 127, as compressed-tensors defines it (`calculate_qparams`, `quantize`). Its symmetric scale is by
127.5, which leaves to the last bit of a division whether the largest number is -127 or -128. Static inputs have what
the file says:

- symmetric: `input_scale`, of which the largest of all parts counts,
- asymmetric: `input_high` and `input_low`, the largest number that codes stand for and the smallest one, negated, so
  that parts together have the range of all.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from blockyard.kernels.layers.rounding import FLOOR, InputRounding, divided
from blockyard.kernels.quantized.operands import Weight8Bit
from blockyard.services.gpu_worker.quantization.kept.form import (
    KeptTensor,
    fill_codes,
    rounded_product,
    uniform_scale,
)
from blockyard.services.gpu_worker.quantization.kept.w8a8_products import has_kernels

CODES, SCALES = "codes", "scales"
INPUT_SCALE, INPUT_HIGH, INPUT_LOW = "input_scale", "input_high", "input_low"
LOW, HIGH, STEPS = -128, 127, 255  # of codes
DUMMY_INPUT_SCALE = 0.05
CUDA_ROWS, CUDA_ALIGNMENT = 32, 8  # `torch._int_mm` needs more than 16 rows there, and sizes that are multiples


@dataclass(frozen=True, slots=True)
class Int8W8A8:
    """Implements `KeptForm`."""

    static: bool = False  # inputs have the scale of the file
    symmetric: bool = True  # inputs have no zero
    name = "Int8W8A8"

    @property
    def multiplies_on_host(self) -> bool:
        return self.symmetric

    def tensors(self) -> Mapping[str, KeptTensor]:
        made = {CODES: KeptTensor(torch.int8, inputs=1), SCALES: KeptTensor(torch.float32)}
        if self.static:
            names = (INPUT_SCALE,) if self.symmetric else (INPUT_HIGH, INPUT_LOW)
            made |= {name: KeptTensor(torch.float32, rows=False) for name in names}
        return made

    def dequantize(self, kept: Mapping[str, Tensor], inputs: int, dtype: torch.dtype) -> Tensor:
        return kept[CODES].float().mul_(kept[SCALES][..., None]).to(dtype)

    def _to_codes(self, x: Tensor, kept: Mapping[str, Tensor]) -> tuple[Tensor, Tensor, Tensor | None]:
        """Codes as numbers [rows, inputs], scales [rows, 1] or [], and zeros as scales; None: inputs have none."""
        x = x.float()
        if self.symmetric:
            scales = kept[INPUT_SCALE] if self.static else divided(x.abs().amax(-1, keepdim=True), HIGH)
            scales = scales.clamp(min=FLOOR)
            return (x / scales).round_().clamp_(LOW, HIGH), scales, None
        if self.static:
            high, low = kept[INPUT_HIGH], -kept[INPUT_LOW]
        else:
            high, low = x.amax(-1, keepdim=True).clamp_(min=0), x.amin(-1, keepdim=True).clamp_(max=0)
        scales = divided(high - low, STEPS).clamp(min=FLOOR)
        zeros = (LOW - low / scales).round_().clamp_(LOW, HIGH)
        return (x / scales + zeros).round_().clamp_(LOW, HIGH), scales, zeros

    def round_inputs(self, x: Tensor, kept: Mapping[str, Tensor]) -> Tensor:
        codes, scales, zeros = self._to_codes(x, kept)
        return ((codes if zeros is None else codes - zeros) * scales).to(x.dtype)

    def rounding(self, kept: Mapping[str, Tensor]) -> InputRounding | None:
        """Implements `RoundingForm`."""
        if not self.symmetric or not has_kernels(kept[CODES]):
            return None
        return InputRounding(torch.int8, scale=kept[INPUT_SCALE] if self.static else None)

    def weight(self, kept: Mapping[str, Tensor]) -> Weight8Bit:
        """Implements `RoundingForm`."""
        return Weight8Bit(kept[CODES], kept[SCALES])

    def compact(self, kept: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Implements `RoundingForm`."""
        return dict(kept)

    def product(self, x: Tensor, kept: Mapping[str, Tensor]) -> Tensor | None:
        """Sums of integers are exact: a row does not depend on the number of rows."""
        if x.device.type == "cpu":
            return self._on_host(x, kept) if self.symmetric else None
        own = rounded_product(self, x, kept)
        return self._on_cuda(x, kept) if own is None else own

    def _on_host(self, x: Tensor, kept: Mapping[str, Tensor]) -> Tensor:
        codes, scales, _ = self._to_codes(x, kept)
        sums: Tensor = torch._int_mm(codes.to(torch.int8), kept[CODES].t())
        return sums.float().mul_(scales).mul_(kept[SCALES]).to(x.dtype)

    def _on_cuda(self, x: Tensor, kept: Mapping[str, Tensor]) -> Tensor | None:
        """The product of inputs with zeros, or of a size that own kernels do not read, by `torch._int_mm`.

        The zero of a row times the sum of an output's codes is subtracted; a row of ones gives these sums.
        """
        weight, rows = kept[CODES], len(x)
        if any(size % CUDA_ALIGNMENT for size in weight.shape):
            return None
        codes, scales, zeros = self._to_codes(x, kept)
        codes = F.pad(F.pad(codes, (0, 0, 0, 1), value=1.0), (0, 0, 0, max(CUDA_ROWS - rows - 1, 0)))
        sums: Tensor = torch._int_mm(codes.to(torch.int8), weight.t())
        made = sums[:rows] if zeros is None else sums[:rows] - zeros.to(torch.int32) * sums[rows]
        return made.float().mul_(scales).mul_(kept[SCALES]).to(x.dtype)

    def fill(self, kept: Mapping[str, Tensor], generator: torch.Generator) -> None:
        fill_codes(kept[CODES], generator)
        kept[SCALES].fill_(uniform_scale(STEPS))
        if self.static and self.symmetric:
            kept[INPUT_SCALE].fill_(DUMMY_INPUT_SCALE)
        elif self.static:
            kept[INPUT_HIGH].fill_(DUMMY_INPUT_SCALE * HIGH)
            kept[INPUT_LOW].fill_(-DUMMY_INPUT_SCALE * LOW)
