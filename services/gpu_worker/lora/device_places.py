"""Places of adapters in the memory of a device, and the products of their layers.

A place is a part of one tensor that holds the largest adapter that `AdapterLimits` allow. Within its place an adapter
takes its own bytes: its matrices follow each other as they do in host memory, so that one copy moves them all, and a
table says where each one begins.
"""

from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from blockyard.kernels.lora.adapter_table import NO_OFFSET, OFFSETS, AdapterTable, Between
from blockyard.services.gpu_worker.host_link import HostLink, put
from blockyard.services.gpu_worker.layers.adapter_rows import AdapterRows
from blockyard.services.gpu_worker.layers.latent.up_projection import UpProjection
from blockyard.services.gpu_worker.lora.module_tensors import last_name
from blockyard.services.gpu_worker.lora.places import HostAdapter
from blockyard.services.gpu_worker.lora.ranks.layer_share import LayerShare
from blockyard.services.gpu_worker.lora.read_modules import AdapterLimits
from blockyard.services.gpu_worker.lora.targets import AdaptedLayer, Delta, adapted_layers, layer_shares
from blockyard.services.gpu_worker.models.interface import Model
from blockyard.shared.errors import AdapterError

ALIGNED = 16  # elements; matrices begin at such places, for wide loads


class AddToHeads(Protocol):
    """See `kernels.lora.add_to_heads`."""

    def __call__(
        self, x: Tensor, places: Tensor, table: AdapterTable, plain_dim: int, out: Tensor, *, values: bool
    ) -> None: ...


class AdapterKernels(NamedTuple):
    """The products of adapters on one kind of device."""

    add: Callable[[Tensor, Tensor, AdapterTable, Tensor, Between | None], None]  # see `kernels.lora.add_adapters`
    add_to_heads: AddToHeads


@dataclass(frozen=True, slots=True)
class DeviceAdaptedRows:
    """Implements `AdaptedRows` for one layer."""

    rows: AdapterRows
    table: AdapterTable
    kernels: AdapterKernels
    between: Between | None = None  # adds what ranks have between A and B; None: this one has all

    @property
    def is_active(self) -> bool:
        return self.rows.is_active

    def only(self, rows: Tensor) -> AbstractContextManager[None]:
        return self.rows.only(rows)

    def add_to(self, out: Tensor, x: Tensor) -> Tensor:
        self.kernels.add(x, self.rows.places, self.table, out, self.between)
        return out


@dataclass(frozen=True, slots=True)
class DeviceAdaptedHeads:
    """Implements `AdaptedUpProjection` for one layer."""

    rows: AdapterRows
    table: AdapterTable
    kernels: AdapterKernels
    plain_dim: int

    @property
    def is_active(self) -> bool:
        return self.rows.is_active

    def add_to_queries(self, out: Tensor, query: Tensor, rows: slice | Tensor | None = None) -> None:
        self.kernels.add_to_heads(query, self._places(rows), self.table, self.plain_dim, out, values=False)

    def add_to_values(self, out: Tensor, attended: Tensor, rows: slice | Tensor | None = None) -> None:
        self.kernels.add_to_heads(attended, self._places(rows), self.table, self.plain_dim, out, values=True)

    def add_to_keys_values(self, out: Tensor, latents: Tensor, rows: slice | Tensor, repeats: int) -> None:
        self.kernels.add(latents, self._places(rows).repeat_interleave(repeats), self.table, out, None)

    def _places(self, rows: slice | Tensor | None) -> Tensor:
        return self.rows.places if rows is None else self.rows.places[rows]


class DevicePlaces:
    """Implements `AdapterPlaces`."""

    def __init__(
        self,
        model: Model,
        num_places: int,
        limits: AdapterLimits,
        kernels: AdapterKernels,
        device: torch.device,
        link: HostLink,
    ) -> None:
        self.num_places, self._dtype, self._device, self._link = num_places, limits.dtype, device, link
        layers, rows, ranks = adapted_layers(model), model.adapter_rows, model.table.ranks
        self._shares = layer_shares(model, fully_sharded=limits.fully_sharded)
        self._place_size = place_size(layers, self._shares, limits)
        self._memory = torch.zeros(num_places * self._place_size, dtype=limits.dtype, device=device)
        # entries of the tables of all layers: of each layer [places, parts]
        self._parts = [share.sizes for share in self._shares]
        counts = [num_places * len(sizes) for sizes in self._parts]
        self._firsts = np.concatenate([[0], np.cumsum(counts)])
        self._offsets = np.full((int(self._firsts[-1]), OFFSETS), NO_OFFSET, np.int64)
        self._ranks = np.zeros(int(self._firsts[-1]), np.int32)
        self._own_ranks = np.zeros((int(self._firsts[-1]), 2), np.int32)
        self._device_offsets = torch.from_numpy(self._offsets).to(device, copy=True)
        self._device_ranks = torch.from_numpy(self._ranks).to(device, copy=True)
        self._device_own_ranks = torch.from_numpy(self._own_ranks).to(device, copy=True)
        for index, layer in enumerate(layers):
            table = self._table(index, limits.max_rank)
            if isinstance(layer, UpProjection):
                layer.adapt(DeviceAdaptedHeads(rows, table, kernels, layer.plain_dim))
            else:
                between = ranks.sum if ranks is not None and self._shares[index].sums_between else None
                layer.adapt(DeviceAdaptedRows(rows, table, kernels, between))

    @property
    def size_bytes(self) -> int:
        return self._memory.nbytes

    def prepare(self, adapter: HostAdapter) -> Generator[None, None, HostAdapter]:
        """Moves all matrices into one tensor, from which the device copies while the host goes on. Raises
        AdapterError for what no kernel computes."""
        if adapter.tokens is not None:
            if (added := adapter.tokens.num_added) > 0:
                raise AdapterError(f"the adapter adds {added} tokens: such adapters are served on the CPU alone")
            raise AdapterError("adapters that change the embedding, or rows of the head, are served on the CPU alone")
        found = [one for deltas in adapter.deltas.values() for delta in deltas for one in delta.tensors()]
        memory = self._link.host_tensor((sum(_aligned(one.numel()) for one in found),), self._dtype)
        end = 0

        def moved(tensor: Tensor | None) -> Tensor | None:
            nonlocal end
            if tensor is None:
                return None
            own = memory[end : end + tensor.numel()].view(tensor.shape)
            own.copy_(tensor)
            end += _aligned(tensor.numel())
            return own

        deltas: dict[int, list[Delta]] = {}
        for layer, of_layer in adapter.deltas.items():
            deltas[layer] = [replace(one, a=moved(one.a), b=moved(one.b), bias=moved(one.bias)) for one in of_layer]
            yield
        return replace(adapter, deltas=deltas, memory=memory)

    @torch.inference_mode()  # as the memory was made
    def put(self, place: int, adapter: HostAdapter) -> None:
        memory = adapter.memory
        assert 0 <= place < self.num_places and memory is not None and len(memory) <= self._place_size
        first = place * self._place_size
        self._memory[first : first + len(memory)].copy_(memory, non_blocking=True)
        for layer, sizes in enumerate(self._parts):
            begin = int(self._firsts[layer]) + place * len(sizes)
            of_place = slice(begin, begin + len(sizes))
            self._offsets[of_place], self._ranks[of_place], self._own_ranks[of_place] = NO_OFFSET, 0, 0
            starts = dict(zip(self._shares[layer].starts, range(len(sizes)), strict=True))
            for delta in adapter.deltas.get(layer, ()):
                entry = begin + starts[delta.start]
                self._ranks[entry] = delta.rank
                self._own_ranks[entry] = delta.own_start, 0 if delta.a is None else len(delta.a)
                for i, one in enumerate((delta.a, delta.b, delta.bias)):
                    self._offsets[entry, i] = NO_OFFSET if one is None else first + one.storage_offset()
        self._device_offsets.copy_(put(self._offsets.copy(), self._device, self._link))
        self._device_ranks.copy_(put(self._ranks.copy(), self._device, self._link))
        self._device_own_ranks.copy_(put(self._own_ranks.copy(), self._device, self._link))

    def _table(self, layer: int, max_rank: int) -> AdapterTable:
        sizes, entries = self._parts[layer], slice(int(self._firsts[layer]), int(self._firsts[layer + 1]))
        starts, own_ranks = np.array(self._shares[layer].starts), None
        if self._shares[layer].sums_between:
            own_ranks = self._device_own_ranks[entries].view(self.num_places, len(sizes), 2)
        return AdapterTable(
            self._memory,
            self._device_offsets[entries].view(self.num_places, len(sizes), OFFSETS),
            self._device_ranks[entries].view(self.num_places, len(sizes)),
            torch.from_numpy(starts.astype(np.int32)).to(self._device),
            torch.tensor(sizes, dtype=torch.int32, device=self._device),
            max(sizes),
            max_rank,
            own_ranks,
        )


def place_size(layers: Sequence[AdaptedLayer], shares: Sequence[LayerShare], limits: AdapterLimits) -> int:
    """Elements of the largest adapter that may be placed, of a rank."""
    total = 0
    for layer, share in zip(layers, shares, strict=True):
        for one, size in zip(layer.spec.parts, share.sizes, strict=True):
            if not limits.target_modules or last_name(one.name) in limits.target_modules:
                total += _largest(size, share, limits)
    return total


def _largest(size: int, share: LayerShare, limits: AdapterLimits) -> int:
    bias = _aligned(size) if limits.with_bias else 0
    own_rank = max(-(-limits.max_rank // share.num_shrunk), 1)
    return _aligned(own_rank * len(share.inputs)) + _aligned(limits.max_rank * size) + bias


def _aligned(count: int) -> int:
    return -(-count // ALIGNED) * ALIGNED
