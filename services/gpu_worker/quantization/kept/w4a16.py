"""`W4A16`: integers of 4 bits with scales and zeros; inputs stay as they are.

A weight [outputs, inputs] is (code - zero) * scale, with codes from 0 to 15. Its tensors:

- `codes` uint8 [outputs, ceil(inputs / 2)]: two codes a byte, of an even input in the lower half and of the next one in
  the upper half (`pack`, `unpack`).
- `scales` [outputs, groups], or [outputs] if `group` is None, in the dtype that the file has. Kernels read 16 bits;
  float32 is for files with scales that are products, which 16 bits would round.
- `zeros`, as many as scales, if `zeros` is a dtype: uint8 for whole ones, one to a byte, so that 16 fits as well as 0;
  a float dtype for others. Without them every zero is 8. A weight of code * scale + offset has the zero
  -offset / scale; where its scale is 0, it is code 0 with the scale -offset and the zero 1.
- `order` int32 [inputs], if `order` is a name: which input each column of the codes is (act order). The name is the
  matrix's, so that no two matrices fuse.

Groups are of `group` columns side by side, of which the last may be incomplete. Kernels know groups of 32, 64, 128 and
a row; the plain product takes any.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from blockyard.kernels.quantized.packed_weights import Codes, PackedWeights
from blockyard.services.gpu_worker.quantization.kept import act_order, host_w4
from blockyard.services.gpu_worker.quantization.kept.eight_bits import expand
from blockyard.services.gpu_worker.quantization.kept.form import (
    KeptForm,
    KeptTensor,
    fill_codes,
    fill_scales,
    packed_codes,
    uniform_scale,
)

CODES, SCALES, ZEROS = "codes", "scales", "zeros"
MIDDLE = 8  # the zero of weights without zeros


@dataclass(frozen=True, slots=True)
class W4A16(KeptForm):
    """Implements `HostForm` and `PackedForm`. The module says what its tensors hold."""

    group: int | None = None  # inputs of a scale; None: all of a row
    zeros: torch.dtype | None = None  # uint8, or a float dtype; None: every zero is 8
    scales: torch.dtype = torch.float16  # as the file has them
    order: str = ""  # the name of a matrix with columns in another order than inputs
    name = "W4A16"
    multiplies_on_host = False

    def tensors(self) -> Mapping[str, KeptTensor]:
        made = {CODES: KeptTensor(torch.uint8, inputs=2), SCALES: KeptTensor(self.scales, inputs=self.group)}
        if self.zeros is not None:
            made[ZEROS] = KeptTensor(self.zeros, inputs=self.group)
        if self.order:
            made[act_order.ORDER] = act_order.TENSOR
        return made

    def dequantize(self, kept: Mapping[str, Tensor], inputs: int, dtype: torch.dtype) -> Tensor:
        values = unpack(kept[CODES], inputs).float()
        values -= MIDDLE if self.zeros is None else expand(kept[ZEROS].float(), self.group, inputs)
        values *= expand(kept[SCALES].float(), self.group, inputs)
        return (act_order.of_inputs(values, kept) if self.order else values).to(dtype)

    def packed(self, kept: Mapping[str, Tensor], inputs: int) -> PackedWeights:
        return packed_codes(Codes.INT4, kept[CODES], inputs, self.group, kept[SCALES], kept.get(ZEROS))

    def fits_host(self, shape: tuple[int, int], dtype: torch.dtype) -> bool:
        return host_w4.fits(self.group, shape, dtype)

    def for_host(self, kept: Mapping[str, Tensor], shape: tuple[int, int]) -> dict[str, Tensor]:
        scales, zeros = kept[SCALES].float(), kept[ZEROS].float() if self.zeros is not None else None
        if self.group is None:
            scales, zeros = scales[:, None], None if zeros is None else zeros[:, None]
        zeros = torch.full_like(scales, MIDDLE) if zeros is None else zeros
        made = host_w4.pack(unpack(kept[CODES], shape[0]), scales, zeros)
        return made | ({act_order.ORDER: kept[act_order.ORDER]} if self.order else {})

    def from_host(self, packed: Mapping[str, Tensor], shape: tuple[int, int]) -> Tensor:
        values = host_w4.dequantize(packed, shape)
        return act_order.of_inputs(values, packed) if self.order else values

    def host_product(self, x: Tensor, packed: Mapping[str, Tensor]) -> Tensor | None:
        if len(x) > host_w4.MOST_ROWS:
            return None
        return host_w4.product(x[:, packed[act_order.ORDER]] if self.order else x, packed)

    def fill(self, kept: Mapping[str, Tensor], generator: torch.Generator) -> None:
        fill_codes(kept[CODES], generator)
        fill_scales(kept[SCALES], uniform_scale(16), generator)
        if self.zeros is not None:
            kept[ZEROS].fill_(MIDDLE)
        if self.order:
            act_order.fill(kept[act_order.ORDER])


def pack(codes: Tensor) -> Tensor:
    """Codes [..., inputs] from 0 to 15, of any integer dtype -> bytes uint8 [..., ceil(inputs / 2)]."""
    codes = F.pad(codes.to(torch.uint8), (0, codes.shape[-1] % 2))
    return codes[..., ::2] | codes[..., 1::2] << 4


def unpack(packed: Tensor, inputs: int) -> Tensor:
    """Bytes [..., ceil(inputs / 2)] -> codes uint8 [..., inputs]."""
    return torch.stack((packed & 15, packed >> 4), -1).flatten(-2)[..., :inputs]
