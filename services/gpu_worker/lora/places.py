"""The places of a worker's adapters: each holds one adapter that rows of a step may have."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from blockyard.services.gpu_worker.layers.adapter_rows import AdapterRows
from blockyard.services.gpu_worker.layers.linear import AdaptedRows, Linear
from blockyard.services.gpu_worker.lora.cpu_products import CpuAdaptedRows
from blockyard.services.gpu_worker.lora.targets import Delta


@dataclass(frozen=True, slots=True)
class HostAdapter:
    """An adapter in host memory, as the model's products need it."""

    digest: bytes
    deltas: Mapping[int, Sequence[Delta]]  # by the index of the linear layer

    @property
    def size_bytes(self) -> int:
        return sum(one.nbytes for deltas in self.deltas.values() for delta in deltas for one in delta.tensors())


class PlacedRows(AdaptedRows, Protocol):
    """The adapters of one layer."""

    def put(self, place: int, deltas: Sequence[Delta]) -> None:
        """Gives a place another adapter; without deltas: one that does not change this layer."""


class AdapterPlaces:
    """Adapts the linear layers of a model, and gives its places to adapters."""

    def __init__(self, linears: Sequence[Linear], rows: AdapterRows, num_places: int) -> None:
        """Call it after the kernels of the layers are picked. rows: of the model."""
        self.num_places = num_places
        self._layers: list[PlacedRows] = []
        for linear in linears:
            layer = CpuAdaptedRows(linear, rows)
            linear.adapt(layer)
            self._layers.append(layer)

    def put(self, place: int, adapter: HostAdapter) -> None:
        """The adapter of the plans that are launched from here on."""
        assert 0 <= place < self.num_places, f"place {place} of {self.num_places}"
        with torch.inference_mode():
            for index, layer in enumerate(self._layers):
                layer.put(place, adapter.deltas.get(index, ()))
