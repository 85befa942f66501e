"""The products of all experts of a layer that are multiplied at once, as layers that adapters change."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Protocol

from torch import Tensor

from blockyard.kernels.lora.adapter_table import AdapterTiles
from blockyard.services.gpu_worker.layers.linear import make_spec
from blockyard.services.gpu_worker.loading.linear_spec import ExpertSpec, LinearSpec, part
from blockyard.services.gpu_worker.quantization.method import ExpertMethod


class AdaptedExperts(Protocol):
    """Adds the products of adapters to one product of all experts of a layer."""

    @property
    def is_active(self) -> bool:
        """Whether a row of this step has an adapter."""

    def start(
        self, x: Tensor, experts: Tensor, weights: Tensor | None, tiles: AdapterTiles
    ) -> Callable[[Tensor], None]:
        """Begins the products of x [rows or pairs, in]; call it before the layer's own. Returns what adds them to out
        [pairs, outputs], in place.

        experts [rows, top_k] int32: of each row, from the rank's first one; a pair is one of them with its row. weights
        [rows, top_k] float32 multiply what is added; None: nothing does. tiles: the pairs by expert.
        """


class ExpertMatrix:
    """One product of all experts of a layer, or of those that a rank has."""

    def __init__(self, method: ExpertMethod, stored: ExpertSpec | None, experts: range) -> None:
        """stored: None: they have no names. experts: those that the weight has."""
        self.method, self._stored, self._experts = method, stored, experts
        self._adapted: AdaptedExperts | None = None

    @cached_property
    def specs(self) -> Sequence[LinearSpec]:
        """Of each expert. Only workers with adapters ask for them."""
        return expert_specs(self.method.shape, self._stored, self._experts)

    def experts(self) -> list["AdaptableExpert"]:
        return [AdaptableExpert(self, i) for i in range(len(self.specs))]

    def adapt(self, adapted: AdaptedExperts) -> None:
        """Adds the products of adapters, in steps in which it is active."""
        self._adapted = adapted

    @property
    def adapted(self) -> AdaptedExperts | None:
        """What adds to this step; None: no row of it has an adapter."""
        return self._adapted if self._adapted is not None and self._adapted.is_active else None


@dataclass(frozen=True, slots=True)
class AdaptableExpert:
    """The matrix of one expert, as a layer with a name."""

    matrix: ExpertMatrix
    index: int  # in the weight

    @property
    def spec(self) -> LinearSpec:
        return self.matrix.specs[self.index]

    def product(self, x: Tensor) -> Tensor:
        """x [rows, in] -> [rows, out], without adapters."""
        return self.matrix.method.linear(self.index).apply(x)


def expert_specs(shape: tuple[int, int], stored: ExpertSpec | None, experts: range) -> Sequence[LinearSpec]:
    """The experts' layers, each under its own name: a stack X.experts.Y is X.experts.0.Y and so on.

    shape: inputs and outputs of each.
    """
    inputs, outputs = shape
    matrix = make_spec([part("", outputs)], inputs) if stored is None else stored.matrix

    def spec_of(expert: int) -> LinearSpec:
        return replace(matrix, parts=tuple(replace(one, name=_name_of(one.name, expert)) for one in matrix.parts))

    return [spec_of(expert) for expert in experts]


def _name_of(name: str, expert: int) -> str:
    prefix, _, last = name.rpartition(".")
    return name.format(expert) if "{}" in name or not name else f"{prefix}.{expert}.{last}"
