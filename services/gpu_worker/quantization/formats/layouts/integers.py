"""Integers of 2, 3, 4 or 8 bits with scales and zeros of groups: what GPTQ's, AWQ's and other packings become.

4 bits are kept in `W4A16` and 8 bits in `W8A16`, with scales in the dtype of the file; no form has 2 or 3 bits, which
are dequantized.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from blockyard.services.gpu_worker.loading.tensor_groups import StoredTensor
from blockyard.services.gpu_worker.quantization.formats.layouts.packing import pack, unpack
from blockyard.services.gpu_worker.quantization.kept import act_order, dequantized, w4a16, w8a16
from blockyard.services.gpu_worker.quantization.kept.dequantized import Dequantized
from blockyard.services.gpu_worker.quantization.kept.eight_bits import expand
from blockyard.services.gpu_worker.quantization.kept.form import KeptForm
from blockyard.services.gpu_worker.quantization.kept.w4a16 import W4A16
from blockyard.services.gpu_worker.quantization.kept.w8a16 import W8A16
from blockyard.services.gpu_worker.quantization.names import HEAD, is_left_out, layer_of
from blockyard.services.gpu_worker.quantization.scheme import Matrix, StoredMatrix, ToKept
from blockyard.shared.errors import ConfigError, LoadError

WORDS = frozenset({torch.int32})  # that codes are packed in
WORD_BITS = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Integers:
    """How a matrix is quantized, whatever its packing."""

    bits: int
    group: int | None  # inputs of a scale; None: all of a row
    zeros: bool  # each scale has one; otherwise it is `middle`
    scales: torch.dtype = torch.float16  # of the file
    order: str = ""  # see `W4A16`

    @property
    def middle(self) -> int:
        return 1 << self.bits - 1

    def num_groups(self, inputs: int) -> int:
        return 1 if self.group is None else -(-inputs // self.group)

    def form(self, dtype: torch.dtype) -> KeptForm:
        """dtype: of the model."""
        if self.bits == 4:
            return W4A16(self.group, torch.uint8 if self.zeros else None, self.scales, self.order)
        if self.bits == 8:
            return W8A16(torch.uint8 if self.zeros else torch.int8, self.group, self.zeros, self.scales, self.order)
        return Dequantized(dtype)

    def kept(
        self, packed: Tensor, scales: Tensor, zeros: Tensor | None = None, order: Tensor | None = None
    ) -> dict[str, Tensor]:
        """The tensors of `form`.

        packed: bytes uint8 [outputs, inputs * bits / 8], codes of inputs side by side as of `unpack`. scales, zeros:
        [outputs, groups]. order: of the inputs, int64 [inputs], which sorts them by group.
        """
        if self.group is None:
            scales, zeros = scales[:, 0], None if zeros is None else zeros[:, 0]
        if order is not None:
            packed = pack(unpack(packed, self.bits)[:, order], self.bits)
        if self.bits in (2, 3):
            return {dequantized.WEIGHT: self._numbers(unpack(packed, self.bits), scales, zeros, order)}
        names = w4a16 if self.bits == 4 else w8a16
        if self.bits == 8 and not self.zeros:
            packed = (packed ^ self.middle).view(torch.int8)
        made = {names.CODES: packed, names.SCALES: scales}
        if self.zeros:
            assert zeros is not None
            made[names.ZEROS] = zeros
        return made if order is None else made | {act_order.ORDER: order.int()}

    def _numbers(self, codes: Tensor, scales: Tensor, zeros: Tensor | None, order: Tensor | None) -> Tensor:
        inputs = codes.shape[1]
        of_group = self.middle if zeros is None else expand(zeros.float(), self.group, inputs)
        values = (codes.float() - of_group) * expand(scales.float(), self.group, inputs)
        return values if order is None else act_order.of_inputs(values, {act_order.ORDER: order})


def stored_matrix(
    matrix: Matrix, own: Integers, dtype: torch.dtype, tensors: Mapping[str, StoredTensor], to_kept: ToKept
) -> StoredMatrix:
    """A matrix that becomes `own.form`. Files of all packings have biases of zeros where models have none."""
    return StoredMatrix(form=own.form(dtype), tensors=tensors, to_kept=to_kept, unused=(matrix.tensor("bias"),))


def check_sizes(matrix: Matrix, *, inputs: int = 1, outputs: int = 1) -> None:
    """Raises ConfigError if sizes of a matrix are no multiples of these."""
    for size, unit, what in ((matrix.inputs, inputs, "inputs"), (matrix.outputs, outputs, "outputs")):
        if size % unit:
            raise ConfigError(f"quantization_config: {matrix.name} has {size} {what}; a multiple of {unit} is needed")


def check_middle(name: str, zeros: Tensor, allowed: tuple[int, ...]) -> None:
    """Raises LoadError if a symmetric matrix has other zeros, or several."""
    low, high = (int(one) for one in zeros.aminmax())
    if low != high or low not in allowed:
        known = " or ".join(map(str, allowed))
        raise LoadError(f"{name}: a symmetric matrix has zeros of {low} to {high}, expected {known}")


def is_outside(name: str, with_head: bool = False) -> bool:
    """Whether these methods leave a matrix out. They quantize the linear layers of a decoder's blocks, without routers,
    and perhaps the head."""
    if name.rpartition(".")[2] == HEAD:
        return not with_head
    return not layer_of(name) or is_left_out(name)
