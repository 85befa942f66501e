"""One product of all experts of a layer as Triton kernels, by the form of its weight. Imported only on a GPU."""

from typing import Any, Protocol

import torch
from torch import Tensor

from blockyard.kernels.layers.rms_norm import RMSNorm
from blockyard.kernels.moe.experts_skinny import SkinnyTiling, down_skinny, gate_up_skinny
from blockyard.kernels.moe.four_bits.grouped_mma import grouped_mma
from blockyard.kernels.moe.four_bits.mma_form import MmaTiling, mma_form
from blockyard.kernels.moe.four_bits.row_sums import row_sums
from blockyard.kernels.moe.gates import Gate
from blockyard.kernels.moe.grouped_linear import GroupedTiling, grouped_linear
from blockyard.kernels.moe.grouped_linear_prefill import PrefillTiling, fits, grouped_linear_prefill
from blockyard.kernels.moe.map_experts import ExpertMap
from blockyard.kernels.moe.quantized_grouped import grouped_quantized, takes_codes
from blockyard.kernels.moe.quantized_skinny import NO_ROUNDING, can_round, down_quantized, gate_up_quantized
from blockyard.kernels.moe.round_rows import round_rows
from blockyard.kernels.programmatic_launch import supports_pdl
from blockyard.kernels.quantized.packed_weights import ExpertRounding
from blockyard.services.gpu_worker.quantization.dense import FORM, UnquantizedExperts
from blockyard.services.gpu_worker.quantization.kept.form import KeptExperts
from blockyard.services.gpu_worker.quantization.kept.packed import pack
from blockyard.services.gpu_worker.quantization.method import ExpertMethod


class ExpertProduct(Protocol):
    """The product of the weight [experts, out, in] of an `ExpertMethod`. Options are the kernels'."""

    @property
    def form(self) -> str:
        """The form of the weight with its parameters: what measured configs are for."""

    @property
    def rounds_inputs(self) -> bool: ...

    @property
    def takes_prefill(self) -> bool:
        """Whether `prefill` multiplies it."""

    @property
    def takes_mma(self) -> bool:
        """Whether `mma` and `row_sums` multiply it."""

    @property
    def device(self) -> torch.device:
        """Of the weight, which may be in host memory."""

    def takes_norm(self, in_tile: int) -> bool:
        """Whether `gate_up` with tiles of so many inputs normalises them."""

    def gate_up(
        self, x: Tensor, experts: Tensor, tiling: SkinnyTiling, gate: Gate, norm: RMSNorm | None, **options: Any
    ) -> Tensor:
        """See `gate_up_skinny`."""

    def down(self, x: Tensor, experts: Tensor, tiling: SkinnyTiling, **options: Any) -> Tensor:
        """See `down_skinny`."""

    def grouped(
        self, x: Tensor, mapped: ExpertMap | Tensor, num_pairs: int, tiling: GroupedTiling, **options: Any
    ) -> Tensor:
        """See `grouped_linear`."""

    def prefill(self, x: Tensor, mapped: ExpertMap, num_pairs: int, tiling: PrefillTiling, **options: Any) -> Tensor:
        """See `grouped_linear_prefill`."""

    def mma(self, x: Tensor, mapped: ExpertMap | Tensor, num_pairs: int, tiling: MmaTiling, **options: Any) -> Tensor:
        """See `grouped_mma`."""

    def row_sums(self, x: Tensor, experts: Tensor, tiling: MmaTiling, **options: Any) -> Tensor:
        """See `row_sums`."""


class DenseProduct:
    """Implements `ExpertProduct` for weights in the dtype of the model."""

    form = FORM
    rounds_inputs = takes_mma = False

    def __init__(self, method: UnquantizedExperts) -> None:
        self._weight, self._bias = method.weight, method.bias
        self.device, self.takes_prefill = self._weight.device, fits(self._weight)

    def takes_norm(self, in_tile: int) -> bool:
        return True

    def gate_up(
        self, x: Tensor, experts: Tensor, tiling: SkinnyTiling, gate: Gate, norm: RMSNorm | None, **options: Any
    ) -> Tensor:
        return gate_up_skinny(x, self._weight, experts, tiling, gate, norm=norm, bias=self._bias, **options)

    def down(self, x: Tensor, experts: Tensor, tiling: SkinnyTiling, **options: Any) -> Tensor:
        return down_skinny(x, self._weight, experts, tiling, bias=self._bias, **options)

    def grouped(
        self, x: Tensor, mapped: ExpertMap | Tensor, num_pairs: int, tiling: GroupedTiling, **options: Any
    ) -> Tensor:
        return grouped_linear(x, self._weight, mapped, num_pairs, tiling, bias=self._bias, **options)

    def prefill(self, x: Tensor, mapped: ExpertMap, num_pairs: int, tiling: PrefillTiling, **options: Any) -> Tensor:
        return grouped_linear_prefill(x, self._weight, mapped, num_pairs, tiling, bias=self._bias, **options)

    def mma(self, x: Tensor, mapped: ExpertMap | Tensor, num_pairs: int, tiling: MmaTiling, **options: Any) -> Tensor:
        raise NotImplementedError  # see `takes_mma`

    def row_sums(self, x: Tensor, experts: Tensor, tiling: MmaTiling, **options: Any) -> Tensor:
        raise NotImplementedError


class QuantizedProduct:
    """Implements `ExpertProduct` for weights in a kept form. Inputs in groups that kernels do not know are rounded by
    torch."""

    takes_prefill = False  # `grouped` multiplies many pairs, too

    def __init__(self, method: KeptExperts) -> None:
        """Raises ConfigError for a form that kernels do not know."""
        self._weights, self._rounding = pack(method)
        self._method, self._bias, self.device = method, method.bias, self._weights.codes.device
        self._takes_codes = takes_codes(self._weights, self._rounding)
        self.rounds_inputs = self._rounding.kind != 0
        has_mma = supports_pdl(self.device) and not self.rounds_inputs  # instructions of compute capability 9.0
        self._mma = mma_form(self._weights, method.dtype) if has_mma else None
        self.takes_mma = self._mma is not None
        inputs = f"-inputs-{self._rounding.kind.name.lower()}" if self.rounds_inputs else ""
        self.form = f"{method.form}-{self._weights.key}{inputs}"

    def takes_norm(self, in_tile: int) -> bool:
        return can_round(self._rounding, in_tile)

    def gate_up(
        self, x: Tensor, experts: Tensor, tiling: SkinnyTiling, gate: Gate, norm: RMSNorm | None, **options: Any
    ) -> Tensor:
        x, rounding = self._rounded(x, tiling)
        return gate_up_quantized(
            x, self._weights, experts, tiling, gate, rounding=rounding, norm=norm, bias=self._bias, **options
        )

    def down(self, x: Tensor, experts: Tensor, tiling: SkinnyTiling, **options: Any) -> Tensor:
        x, rounding = self._rounded(x, tiling)
        return down_quantized(x, self._weights, experts, tiling, rounding=rounding, bias=self._bias, **options)

    def _rounded(self, x: Tensor, tiling: SkinnyTiling) -> tuple[Tensor, ExpertRounding]:
        """The input of a kernel, and how the kernel rounds it."""
        if can_round(self._rounding, tiling.in_tile):
            return x, self._rounding
        return self._method.round_inputs(x), NO_ROUNDING

    def grouped(
        self, x: Tensor, mapped: ExpertMap | Tensor, num_pairs: int, tiling: GroupedTiling, **options: Any
    ) -> Tensor:
        dtype, scales = x.dtype, None
        if self.rounds_inputs:
            if self._takes_codes:
                x, scales = round_rows(x, self._rounding)
            else:
                x = self._method.round_inputs(x)
        return grouped_quantized(
            x, self._weights, mapped, num_pairs, tiling, dtype, x_scales=scales, bias=self._bias, **options
        )

    def prefill(self, x: Tensor, mapped: ExpertMap, num_pairs: int, tiling: PrefillTiling, **options: Any) -> Tensor:
        raise NotImplementedError  # see `takes_prefill`

    def mma(self, x: Tensor, mapped: ExpertMap | Tensor, num_pairs: int, tiling: MmaTiling, **options: Any) -> Tensor:
        assert self._mma is not None
        return grouped_mma(x, self._weights, self._mma, mapped, num_pairs, tiling, bias=self._bias, **options)

    def row_sums(self, x: Tensor, experts: Tensor, tiling: MmaTiling, **options: Any) -> Tensor:
        assert self._mma is not None
        return row_sums(x, self._weights, self._mma, experts, tiling, bias=self._bias, **options)


def find_product(method: ExpertMethod) -> ExpertProduct:
    """The kernels of a weight's form. Raises ConfigError if there are none."""
    if isinstance(method, UnquantizedExperts):
        return DenseProduct(method)
    assert isinstance(method, KeptExperts)
    return QuantizedProduct(method)
