"""Products of adapters on the CPU: one pair of products for each adapter that rows of the step have."""

from collections.abc import Generator
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from blockyard.services.gpu_worker.layers.adapter_rows import AdapterRows
from blockyard.services.gpu_worker.layers.linear import AddTo, FusedProduct, Linear
from blockyard.services.gpu_worker.lora.cpu_head_products import CpuAdaptedHeads
from blockyard.services.gpu_worker.lora.cpu_token_products import (
    CpuAdaptedEmbedding,
    CpuAddedColumns,
    replace_logits,
)
from blockyard.services.gpu_worker.lora.file_memory import FileMemory
from blockyard.services.gpu_worker.lora.joined_deltas import JoinedDeltas
from blockyard.services.gpu_worker.lora.places import HostAdapter
from blockyard.services.gpu_worker.lora.targets import adapted_linears, layer_shares
from blockyard.services.gpu_worker.lora.token_rows import ReplacedRows, TokenDeltas
from blockyard.services.gpu_worker.models.interface import Model


class CpuAdaptedRows:
    """Implements `AdaptedRows` for one layer."""

    def __init__(self, linear: Linear, rows: AdapterRows) -> None:
        self.linear, self._rows = linear, rows
        self._places: dict[int, JoinedDeltas] = {}
        self._replaced: dict[int, ReplacedRows] = {}  # of a head, by place

    @property
    def is_active(self) -> bool:
        return self._rows.is_active

    @property
    def is_batch_invariant(self) -> bool:
        return self.linear.is_batch_invariant

    def put(self, place: int, joined: JoinedDeltas | None, replaced: ReplacedRows | None = None) -> None:
        """Gives a place another adapter; without arguments: one that does not change this layer."""
        self._places.pop(place, None)
        self._replaced.pop(place, None)
        if replaced is not None:
            self._replaced[place] = replaced
        if joined is not None:
            self._places[place] = joined

    def only(self, rows: Tensor) -> AbstractContextManager[None]:
        return self._rows.only(rows)

    def fused(self, product: FusedProduct) -> None:
        """No kernel is fused on the CPU."""

    def start(self, x: Tensor, *, is_ordered: bool = False) -> AddTo:
        """Nothing runs beside the layer's own product, so all of it is done behind that."""
        return partial(self._add, x)

    def _add(self, x: Tensor, out: Tensor) -> Tensor:
        for place, rows in self._rows.groups():
            if (replaced := self._replaced.get(place)) is not None:
                replace_logits(out, x, rows, replaced, batch_invariant=self.linear.is_batch_invariant)
            joined = self._places.get(place)
            if joined is None:
                continue
            for start, added in joined.products(x if rows is None else x.index_select(0, rows)):
                part = out.narrow(1, start, added.shape[1])
                if rows is None:
                    part.add_(added)
                else:
                    part.index_add_(0, rows, added.to(out.dtype))
        return out


class CpuPlaces:
    """Implements `AdapterPlaces`: a place refers to the matrices in host memory."""

    def __init__(self, model: Model, num_places: int, *, fully_sharded: bool = False) -> None:
        """fully_sharded: see `LayerShare`."""
        linears, ups = adapted_linears(model), model.adaptable.up_projections
        rows = self._rows = model.adapter_rows
        self.num_places = num_places
        of_linears = [CpuAdaptedRows(linear, rows) for linear in linears]
        for linear, layer in zip(linears, of_linears, strict=True):
            linear.adapt(layer)
        batch_invariant = any(linear.is_batch_invariant for linear in linears)
        of_ups = [CpuAdaptedHeads(up, rows, batch_invariant=batch_invariant) for up in ups]
        for up, heads in zip(ups, of_ups, strict=True):
            up.adapt(heads)
        self._linears, self._ups = of_linears, of_ups  # as `targets.adapted_layers`
        self._shares, self._ranks = layer_shares(model, fully_sharded=fully_sharded), model.table.ranks
        self._is_leader = model.table.shard.rank == 0  # which has the logits of all ranks
        self._added: CpuAddedColumns | None = None
        self._embedding = CpuAdaptedEmbedding(rows, batch_invariant=batch_invariant)
        if model.adaptable.embedding is not None:
            model.adaptable.embedding.adapt(self._embedding)

    @property
    def size_bytes(self) -> int:
        return 0

    def prepare(self, adapter: HostAdapter, memory: FileMemory | None = None) -> Generator[bool, None, HostAdapter]:
        joined: dict[int, JoinedDeltas] = {}
        for index, deltas in adapter.deltas.items():
            if index < len(self._linears):
                between = self._ranks.sum if self._ranks is not None and self._shares[index].sums_between else None
                batch_invariant = self._linears[index].is_batch_invariant
                joined[index] = JoinedDeltas(deltas, batch_invariant=batch_invariant, sum_of_ranks=between)
                yield True
        return replace(adapter, joined=joined)

    def put(self, place: int, adapter: HostAdapter) -> None:
        assert 0 <= place < self.num_places, f"place {place} of {self.num_places}"
        with torch.inference_mode():
            tokens = adapter.tokens or TokenDeltas()
            for index, layer in enumerate(self._linears):
                replaced = tokens.head_rows if index == tokens.head_layer else None
                layer.put(place, adapter.joined.get(index), replaced)
            self._put_added(place, tokens)
            for index, up in enumerate(self._ups, len(self._linears)):
                up.put(place, adapter.deltas.get(index, ()))
            self._embedding.put(place, tokens.embedding)

    def _put_added(self, place: int, tokens: TokenDeltas) -> None:
        if tokens.num_added and tokens.head_layer is not None and self._is_leader and self._added is None:
            head = self._linears[tokens.head_layer].linear
            self._added = CpuAddedColumns(self._rows, batch_invariant=head.is_batch_invariant)
            head.append(self._added.append)
        if self._added is not None:
            self._added.put(place, tokens.num_added, tokens.added_head)
