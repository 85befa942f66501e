"""The interface of a kept form, and the linear layers and experts that are made of one."""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from torch import Tensor

from blockyard.kernels.layers.rounding import InputRounding, RoundedRows
from blockyard.kernels.quantized.operands import Weight8Bit
from blockyard.kernels.quantized.packed_weights import E8M0, Codes, PackedWeights
from blockyard.services.gpu_worker.loading.weights import Kind
from blockyard.services.gpu_worker.quantization.dense import UnquantizedLinear
from blockyard.services.gpu_worker.quantization.kept.block_products import BlockProduct, block_product
from blockyard.services.gpu_worker.quantization.kept.w8a8_products import (
    multiply,
    multiply_rounded,
    prepare_products,
)
from blockyard.services.gpu_worker.quantization.method import ExpertLinear, Fusion

BLOCKS = "blocks"  # the layout of weights that kernels of a GPU read, followed by its parameters
INPUT_SCALE = "input_scale"  # the tensor, one number, by which forms with rounded inputs divide them
DUMMY_SCALE = 0.02  # standard deviation of the numbers that dummy weights stand for


class KeptTensor(NamedTuple):
    """One tensor of a matrix: [outputs, inputs / `inputs`], [outputs] or [inputs / `inputs`].

    With neither dimension it is one number of the whole product, of all parts and experts; the largest one counts.
    """

    dtype: torch.dtype
    rows: bool = True  # the first dimension is the outputs
    inputs: int | None = None  # that one element of the last dimension stands for; None: there is no such dimension

    @property
    def is_one_number(self) -> bool:
        return not self.rows and self.inputs is None

    @property
    def is_order(self) -> bool:
        """It says which inputs the columns of a matrix are: matrices do not share it, and ranks do not cut it."""
        return not self.rows and self.inputs is not None

    def shape(self, outputs: int, inputs: int) -> tuple[int, ...]:
        columns = () if self.inputs is None else (-(-inputs // self.inputs),)
        return (*((outputs,) if self.rows else ()), *columns)


class KeptForm(Protocol):
    """A form with its parameters. Parts of one product are kept together if their forms are equal."""

    @property
    def name(self) -> str:
        """The key of its kernels, see `LinearMethod.form`."""

    @property
    def multiplies_on_host(self) -> bool:
        """Whether the CPU multiplies it as it is. Otherwise it is dequantized there at load, with a line."""

    def tensors(self) -> Mapping[str, KeptTensor]:
        """The tensors of a matrix by name."""

    def dequantize(self, kept: Mapping[str, Tensor], inputs: int, dtype: torch.dtype) -> Tensor:
        """The reference of all kernels: [..., outputs, inputs] of the tensors. inputs: of the rank."""

    def round_inputs(self, x: Tensor, kept: Mapping[str, Tensor]) -> Tensor:
        """x [rows, inputs] as products see it, in its dtype. Rows do not depend on each other."""
        return x

    def product(self, x: Tensor, kept: Mapping[str, Tensor]) -> Tensor | None:
        """x [rows, inputs] -> [rows, outputs], without bias. None: this device or dtype has only the plain product."""
        return None

    def fill(self, kept: Mapping[str, Tensor], generator: torch.Generator) -> None:
        """Writes dummy weights: their numbers have a standard deviation of DUMMY_SCALE."""


@runtime_checkable
class HostForm(Protocol):
    """A form of which the CPU multiplies some weights without making numbers of them all."""

    def fits_host(self, shape: tuple[int, int], dtype: torch.dtype) -> bool:
        """Whether it multiplies weights of this shape, inputs and outputs, in a model of this dtype."""

    def for_host(self, kept: Mapping[str, Tensor], shape: tuple[int, int]) -> dict[str, Tensor]:
        """The tensors that it multiplies, made once."""

    def from_host(self, packed: Mapping[str, Tensor], shape: tuple[int, int]) -> Tensor:
        """The numbers [outputs, inputs] that tensors of `for_host` stand for, in the dtype of the model."""

    def host_product(self, x: Tensor, packed: Mapping[str, Tensor]) -> Tensor | None:
        """Multiplies as `product` does, by tensors of `for_host`. None: to dequantize is quicker for so many rows."""


@runtime_checkable
class PackedForm(Protocol):
    """A form with weights that kernels of a GPU unpack in registers; inputs stay as they are."""

    def packed(self, kept: Mapping[str, Tensor], inputs: int) -> PackedWeights:
        """The weights as kernels read them: views of tensors with a leading dimension of matrices."""


@runtime_checkable
class RoundingForm(Protocol):
    """A form with inputs rounded to 8 bits, by kernels of a GPU too."""

    def rounding(self, kept: Mapping[str, Tensor]) -> InputRounding | None:
        """How kernels round the inputs, as `KeptForm.round_inputs` does. None: this device has no such products."""

    def weight(self, kept: Mapping[str, Tensor]) -> Weight8Bit:
        """The weight as kernels read it. Only where there is a rounding."""

    def compact(self, kept: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The tensors with as few scales as say the same: `weight` and `KeptForm.dequantize` take these, too."""


def rounded_product(form: RoundingForm, x: Tensor, kept: Mapping[str, Tensor]) -> Tensor | None:
    """`KeptForm.product` by kernels of a GPU; None where there are none."""
    rounding = form.rounding(kept)
    if rounding is None:
        return None
    return multiply(x, rounding, form.weight(kept))


def kinds(form: KeptForm, outputs: int, inputs: int, lead: tuple[int, ...] = ()) -> dict[str, Kind]:
    """Shapes and dtypes of the tensors by name, of experts with their number in `lead`."""
    return {
        name: (one.shape(outputs, inputs) if one.is_one_number else (*lead, *one.shape(outputs, inputs)), one.dtype)
        for name, one in form.tensors().items()
    }


def packed_codes(
    kind: Codes,
    codes: Tensor,
    inputs: int,
    group: int | None,
    scales: Tensor,
    zeros: Tensor | None = None,
    row_scales: Tensor | None = None,
    table: Tensor | None = None,
) -> PackedWeights:
    """Views of the tensors of a weight, of experts with a leading dimension of them.

    group: inputs of a scale; None: each row has a scale. row_scales: of a weight that has groups, too.
    """
    is_e8m0 = scales.dtype == E8M0 and group is not None
    return PackedWeights(
        codes=codes,
        kind=kind,
        inputs=inputs,
        group=group or 0,
        scales=None if group is None else scales.view(torch.uint8) if is_e8m0 else scales,
        zeros=zeros,
        row_scales=scales if group is None else row_scales,
        table=table,
        is_e8m0=is_e8m0,
    )


class KeptLinear:
    """A weight in a kept form. Implements `LinearMethod`."""

    def __init__(
        self,
        kept_form: KeptForm,
        kept: Mapping[str, Tensor],
        shape: tuple[int, int],
        dtype: torch.dtype,
        bias: Tensor | None = None,
    ) -> None:
        """shape: numbers of inputs and outputs. dtype: of the model."""
        self.kept_form, self.shape, self._dtype, self._bias = kept_form, shape, dtype, bias
        self._kept = dict(kept)
        self.size_bytes = sum(one.nbytes for one in kept.values())
        self._dense: UnquantizedLinear | None = None  # on the CPU, if the form is not multiplied as it is
        self._packed: dict[str, Tensor] = {}  # on the CPU, see `HostForm`
        self._is_moved = False  # products read other memory than was loaded to
        self.blocks: BlockProduct | None = None  # on a GPU, if it has kernels for this weight

    @property
    def form(self) -> str | None:
        if self.blocks is not None:
            return f"{BLOCKS} {self.blocks.key}"
        if self.input_rounding is None:
            return self.kept_form.name
        weight = self.weight8()
        return f"{self.kept_form.name} {weight.group or 'row'}-{weight.block}"

    @property
    def fusions(self) -> frozenset[Fusion]:
        """Kernels that fuse read the inputs in order."""
        is_in_order = not any(one.is_order for one in self.kept_form.tensors().values())
        has_kernels = self.input_rounding is not None or (isinstance(self.kept_form, PackedForm) and is_in_order)
        return frozenset(Fusion) if has_kernels else frozenset()

    @property
    def input_rounding(self) -> InputRounding | None:
        """Implements `RoundedInputs`."""
        form = self.kept_form
        return form.rounding(self._kept) if isinstance(form, RoundingForm) and self._dense is None else None

    @property
    def bias(self) -> Tensor | None:
        return self._bias

    def weight8(self) -> Weight8Bit:
        """The weight as kernels of rounded rows read it. Only where there is an `input_rounding`."""
        assert isinstance(self.kept_form, RoundingForm)
        return self.kept_form.weight(self._kept)

    def apply_rounded(self, rows: RoundedRows) -> Tensor:
        """Implements `RoundedInputs`."""
        out = multiply_rounded(rows, self.weight8())
        return out if self._bias is None else out.add_(self._bias)

    def dequantized(self) -> Tensor:
        """[outputs, inputs] in the dtype of the model."""
        if self._packed:
            assert isinstance(self.kept_form, HostForm)
            return self.kept_form.from_host(self._packed, self.shape)
        return self.kept_form.dequantize(self._kept, self.shape[0], self._dtype)

    def prepare(self) -> None:
        if self._dense is not None or self._packed or self.blocks is not None:
            return
        form, device = self.kept_form, next(iter(self._kept.values())).device
        if device.type == "cpu" and fits_host(form, self.shape, self._dtype):
            assert isinstance(form, HostForm)
            self._packed = form.for_host(self._kept, self.shape)
            self.size_bytes = sum(one.nbytes for one in self._packed.values())
            self._drop_matrix()
        elif is_dequantized_on(device, form):
            self._dense = UnquantizedLinear(self.dequantized(), self._bias)
            self._dense.prepare()
            self.size_bytes = self._dense.size_bytes
            self._drop_matrix()
        elif self.input_rounding is not None:
            assert isinstance(form, RoundingForm)
            if not self._is_moved:
                self._kept = form.compact(self._kept)
                self.size_bytes = sum(one.nbytes for one in self._kept.values())
            prepare_products(self.weight8(), self._dtype)
        elif device.type == "cuda" and not self._is_moved and isinstance(form, PackedForm):
            whole = {
                name: one if self.kept_form.tensors()[name].is_order else one[None] for name, one in self._kept.items()
            }
            order = next((one for name, one in whole.items() if self.kept_form.tensors()[name].is_order), None)
            self.blocks = block_product(form.packed(whole, self.shape[0]), order, self._dtype)
            if self.blocks is not None:
                self._kept = {}
                self.size_bytes = sum(one.nbytes for one in self.blocks.tensors().values())

    def _drop_matrix(self) -> None:
        """The weight is in memory once. The tensors that `round_inputs` needs stay."""
        self._kept = {name: one for name, one in self._kept.items() if self.kept_form.tensors()[name].is_one_number}

    def apply(self, x: Tensor) -> Tensor:
        if self._dense is not None:
            return self._dense.apply(self.kept_form.round_inputs(x, self._kept))
        out = self._product(x)
        if out is None:
            return F.linear(self.kept_form.round_inputs(x, self._kept), self.dequantized(), self._bias)
        return out if self._bias is None else out.add_(self._bias)

    def _product(self, x: Tensor) -> Tensor | None:
        if self.blocks is not None:
            return self.blocks(x)
        if self._packed:
            assert isinstance(self.kept_form, HostForm)
            return self.kept_form.host_product(x, self._packed)
        return self.kept_form.product(x, self._kept)

    def tensors(self) -> dict[str, Tensor]:
        packed = {f"packed.{name}": one for name, one in self._packed.items()}
        if self.blocks is not None:
            return self.blocks.tensors()
        return self._kept | packed | ({} if self._dense is None else self._dense.tensors())

    def replace(self, name: str, tensor: Tensor) -> None:
        self._kept[name], self._is_moved = tensor, True

    def contents(self) -> list[Tensor]:
        """Implements `ExpertLinear`."""
        bias = [] if self._bias is None else [self._bias]
        return [*self._own_tensors(), *(bias if self._dense is None else self._dense.contents())]

    def write(self, contents: Sequence[Tensor]) -> None:
        """Implements `ExpertLinear`."""
        own = self._own_tensors()
        if self._dense is not None:
            self._dense.write(contents[len(own) :])
        elif self._bias is not None:
            own.append(self._bias)
        for one, other in zip(own, contents, strict=self._dense is None):
            one.copy_(other)

    def _own_tensors(self) -> list[Tensor]:
        """Those of this weight alone, without what others share."""
        stated = self.kept_form.tensors()
        kept = [one for name, one in self._kept.items() if not stated[name].is_one_number]
        return [*kept, *self._packed.values()]


def fits_host(form: KeptForm, shape: tuple[int, int], dtype: torch.dtype) -> bool:
    """Whether the CPU multiplies weights of this form, shape (inputs and outputs) and model without making numbers of
    them all."""
    return isinstance(form, HostForm) and form.fits_host(shape, dtype)


def is_dequantized_on(device: torch.device, form: KeptForm) -> bool:
    """Whether weights of this form become numbers of the model's dtype when they are prepared."""
    return device.type == "cpu" and not form.multiplies_on_host


class KeptExperts:
    """The weights of experts in a kept form. Implements `ExpertMethod`."""

    def __init__(
        self,
        kept_form: KeptForm,
        kept: Mapping[str, Tensor],
        shape: tuple[int, int],
        dtype: torch.dtype,
        bias: Tensor | None = None,
    ) -> None:
        """kept: tensors with a leading dimension of experts. bias: [experts, outputs]. Others: see `KeptLinear`."""
        self.kept_form, self.shape, self.dtype, self.bias = kept_form, shape, dtype, bias
        self._kept = dict(kept)
        self.size_bytes = sum(one.nbytes for one in kept.values())

    @property
    def form(self) -> str:
        return self.kept_form.name

    def linear(self, expert: int) -> ExpertLinear:
        stated = self.kept_form.tensors()
        own = {name: one if stated[name].is_one_number else one[expert] for name, one in self._kept.items()}
        return KeptLinear(self.kept_form, own, self.shape, self.dtype, None if self.bias is None else self.bias[expert])

    def round_inputs(self, x: Tensor) -> Tensor:
        return self.kept_form.round_inputs(x, self._kept)

    def numbers(self) -> list[Tensor]:
        return [self._kept[name] for name, one in self.kept_form.tensors().items() if one.is_one_number]

    def tensors(self) -> dict[str, Tensor]:
        return self._kept | ({} if self.bias is None else {"bias": self.bias})


def fill_codes(codes: Tensor, generator: torch.Generator) -> None:
    """Writes random bytes."""
    flat = codes.view(torch.uint8)
    made = torch.empty(flat.shape, dtype=torch.uint8, device=generator.device)
    flat.copy_(made.random_(0, 256, generator=generator))


def fill_numbers(tensor: Tensor, number: float) -> None:
    """Writes the nearest number in the dtype of the tensor: 8-bit ones as bytes, which every device can write."""
    one = torch.tensor(number).to(tensor.dtype)
    if tensor.dtype.itemsize == 1 and tensor.is_floating_point():
        tensor, one = tensor.view(torch.uint8), one.view(torch.uint8)
    tensor.fill_(one.item())


def fill_scales(scales: Tensor, scale: float, generator: torch.Generator) -> None:
    """Writes a scale with random signs. Codes whose numbers are not even about zero would give all outputs a common
    part, which grows from layer to layer until rows are alike, and choose the same experts."""
    signs = torch.empty(scales.shape, device=generator.device).uniform_(-1.0, 1.0, generator=generator).sign()
    scales.copy_(signs * scale)


def uniform_scale(high: float) -> float:
    """The factor that gives numbers drawn evenly from 0 to `high` a standard deviation of DUMMY_SCALE."""
    return DUMMY_SCALE * math.sqrt(12) / high
