"""`W8A16`: integers of 8 bits or e4m3 with scales and zeros; inputs stay as they are.

With `order` it has a tensor of that name, as `W4A16`. Signed integers with scales of rows are multiplied on the CPU by
`torch.ops.aten._weight_int8pack_mm`, in bfloat16, to which scales are rounded, as whole weights are where they are
dequantized. Microseconds of the products that host_w4.py has: 5,600 for one row, 6,400 for 4, 21,400 for 16, and
34,800 for 65, which are dequantized each time.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from blockyard.kernels.quantized.packed_weights import Codes, PackedWeights
from blockyard.services.gpu_worker.quantization.kept import act_order
from blockyard.services.gpu_worker.quantization.kept.eight_bits import E4M3, expand, fill_e4m3
from blockyard.services.gpu_worker.quantization.kept.form import (
    DUMMY_SCALE,
    KeptForm,
    KeptTensor,
    fill_codes,
    fill_numbers,
    packed_codes,
    uniform_scale,
)

CODES, SCALES, ZEROS = "codes", "scales", "zeros"
DUMMY_STD = 112.0  # of codes in e4m3
MIDDLE = 128  # of uint8
UNIT = 64  # inputs; the CPU's product reads beyond rows of other numbers, such as 72
_KINDS = {torch.int8: Codes.INT8, torch.uint8: Codes.UINT8, E4M3: Codes.E4M3}
MOST_ROWS = 16  # more are multiplied by dequantized weights


@dataclass(frozen=True, slots=True)
class W8A16(KeptForm):
    """Implements `HostForm` and `PackedForm`. A weight is (code - zero) * scale."""

    codes: torch.dtype  # int8, uint8 or e4m3
    group: int | None = None  # inputs of a scale; None: all of a row
    zeros: bool = False  # each scale has a zero, in its dtype
    scales: torch.dtype = torch.float32  # as the file has them
    order: str = ""  # the name of a matrix with columns in another order than inputs
    name = "W8A16"
    multiplies_on_host = False

    def tensors(self) -> Mapping[str, KeptTensor]:
        scales = KeptTensor(self.scales, inputs=self.group)
        made = {CODES: KeptTensor(self.codes, inputs=1), SCALES: scales}
        made |= {ZEROS: scales} if self.zeros else {}
        return made | ({act_order.ORDER: act_order.TENSOR} if self.order else {})

    def dequantize(self, kept: Mapping[str, Tensor], inputs: int, dtype: torch.dtype) -> Tensor:
        values = kept[CODES].float()
        if self.zeros:
            values -= expand(kept[ZEROS].float(), self.group, inputs)
        values *= expand(kept[SCALES].float(), self.group, inputs)
        return (act_order.of_inputs(values, kept) if self.order else values).to(dtype)

    def packed(self, kept: Mapping[str, Tensor], inputs: int) -> PackedWeights:
        return packed_codes(_KINDS[self.codes], kept[CODES], inputs, self.group, kept[SCALES], kept.get(ZEROS))

    def fits_host(self, shape: tuple[int, int], dtype: torch.dtype) -> bool:
        is_plain = self.codes == torch.int8 and self.group is None and not self.zeros and not self.order
        return is_plain and dtype == torch.bfloat16 and shape[0] % UNIT == 0

    def for_host(self, kept: Mapping[str, Tensor], shape: tuple[int, int]) -> dict[str, Tensor]:
        return {CODES: kept[CODES], SCALES: kept[SCALES].bfloat16()}

    def from_host(self, packed: Mapping[str, Tensor], shape: tuple[int, int]) -> Tensor:
        return packed[CODES].float().mul_(packed[SCALES].float()[:, None]).to(packed[SCALES].dtype)

    def host_product(self, x: Tensor, packed: Mapping[str, Tensor]) -> Tensor | None:
        if len(x) > MOST_ROWS:
            return None
        made: Tensor = torch.ops.aten._weight_int8pack_mm(x.contiguous(), packed[CODES], packed[SCALES])
        return made

    def fill(self, kept: Mapping[str, Tensor], generator: torch.Generator) -> None:
        if self.codes == E4M3:
            fill_e4m3(kept[CODES], generator, DUMMY_STD)
            fill_numbers(kept[SCALES], DUMMY_SCALE / DUMMY_STD)
        else:
            fill_codes(kept[CODES], generator)
            fill_numbers(kept[SCALES], uniform_scale(255))
        if self.zeros:
            kept[ZEROS].fill_(MIDDLE if self.codes == torch.uint8 else 0)
        if self.order:
            act_order.fill(kept[act_order.ORDER])
