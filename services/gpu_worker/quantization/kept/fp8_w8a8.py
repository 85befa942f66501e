"""`Fp8W8A8`: weights in e4m3, and inputs that are rounded to e4m3 before they are multiplied.

A weight has a scale for each row, or for each row and `group` inputs; one scale for all becomes equal ones of rows,
and one of a block of rows and inputs becomes equal ones of these rows. Where blocks are still whole when the layer is
placed, kernels of a GPU read one scale for each (`compact`). Inputs have a scale for each row, for each row
and `group` inputs, or one that the file gives.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from blockyard.kernels.layers.rounding import InputRounding, round_rows_reference
from blockyard.kernels.quantized.operands import Weight8Bit
from blockyard.services.gpu_worker.quantization.kept.eight_bits import E4M3, expand, fill_e4m3, has_products
from blockyard.services.gpu_worker.quantization.kept.form import DUMMY_SCALE, KeptTensor, rounded_product
from blockyard.services.gpu_worker.quantization.kept.w8a8_products import has_kernels

CODES, SCALES, INPUT_SCALE = "codes", "scales", "input_scale"
GROUPS = (128, 256, 512)  # that kernels apply
BLOCK = 128  # rows and inputs
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
        codes, scales = kept[CODES], kept[SCALES]
        if self._block(kept) > 1:
            scales = scales.repeat_interleave(BLOCK, 0)[: len(codes)]
        return (codes.float() * expand(scales, self.group, inputs)).to(dtype)

    def _to_codes(self, x: Tensor, kept: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Codes [rows, inputs], and scales [rows] or [rows, groups]."""
        made = round_rows_reference(x, self._rounding(kept))
        return made.codes, made.scales

    def _rounding(self, kept: Mapping[str, Tensor]) -> InputRounding:
        return InputRounding(E4M3, self.group, self.most_input, kept[INPUT_SCALE] if self.static else None)

    def round_inputs(self, x: Tensor, kept: Mapping[str, Tensor]) -> Tensor:
        codes, scales = self._to_codes(x, kept)
        return (codes.float() * expand(scales, self.group, x.shape[-1])).to(x.dtype)

    def rounding(self, kept: Mapping[str, Tensor]) -> InputRounding | None:
        """Implements `RoundingForm`."""
        codes = kept[CODES]
        if not has_kernels(codes) or not has_products(codes.device):
            return None
        if self.group not in (None, *GROUPS):
            return None
        return self._rounding(kept)

    def weight(self, kept: Mapping[str, Tensor]) -> Weight8Bit:
        """Implements `RoundingForm`."""
        return Weight8Bit(kept[CODES], kept[SCALES], self.group, self._block(kept))

    def _block(self, kept: Mapping[str, Tensor]) -> int:
        """Rows that have one row of scales."""
        is_compact = self.group == BLOCK and kept[SCALES].shape[-2] < kept[CODES].shape[-2]
        return BLOCK if is_compact else 1

    def compact(self, kept: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Implements `RoundingForm`. Waits for the GPU."""
        scales = kept[SCALES]
        if self.group != BLOCK or scales.shape[0] == 1 or self._block(kept) > 1:
            return dict(kept)
        first = scales[::BLOCK].contiguous()
        is_whole = torch.equal(first.repeat_interleave(BLOCK, 0)[: len(scales)], scales)
        return {**kept, SCALES: first} if is_whole else dict(kept)

    def product(self, x: Tensor, kept: Mapping[str, Tensor]) -> Tensor | None:
        return rounded_product(self, x, kept)

    def fill(self, kept: Mapping[str, Tensor], generator: torch.Generator) -> None:
        fill_e4m3(kept[CODES], generator, DUMMY_STD)
        kept[SCALES].fill_(DUMMY_SCALE / DUMMY_STD)
        if self.static:
            kept[INPUT_SCALE].fill_(DUMMY_INPUT_SCALE)
