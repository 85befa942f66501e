"""Products of adapters on the CPU: one pair of products for each adapter that rows of the step have."""

from collections.abc import Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from blockyard.services.gpu_worker.layers.adapter_rows import AdapterRows
from blockyard.services.gpu_worker.layers.linear import Linear, in_groups
from blockyard.services.gpu_worker.lora.cpu_head_products import CpuAdaptedHeads
from blockyard.services.gpu_worker.lora.cpu_token_products import CpuAdaptedEmbedding, replace_logits
from blockyard.services.gpu_worker.lora.places import HostAdapter
from blockyard.services.gpu_worker.lora.targets import Delta
from blockyard.services.gpu_worker.lora.token_rows import ReplacedRows, TokenDeltas
from blockyard.services.gpu_worker.models.interface import Model


class JoinedDeltas:
    """The deltas of one adapter for one layer. All A are one matrix, so that the input is read once."""

    def __init__(self, deltas: Sequence[Delta], *, batch_invariant: bool) -> None:
        ranks = [delta.rank for delta in deltas]
        matrices = [delta.a for delta in deltas if delta.a is not None]
        self._a = torch.cat(matrices).T.contiguous() if len(matrices) > 1 else matrices[0].T if matrices else None
        self._ranks, self._deltas = ranks, [(d.start, d.size, None if d.b is None else d.b.T, d.bias) for d in deltas]
        self._in_groups = batch_invariant

    def products(self, x: Tensor) -> list[tuple[int, Tensor]]:
        """x [rows, in] -> for each part its first output, and what is added there: [rows, outputs] or [outputs]."""
        shrunk = [] if self._a is None else torch.split(self._product(x, self._a), self._ranks, dim=1)
        found = []
        for i, (start, _, b, bias) in enumerate(self._deltas):
            if b is None:
                assert bias is not None
                found.append((start, bias.expand(x.shape[0], -1)))
                continue
            product = self._product(shrunk[i], b)
            found.append((start, product if bias is None else product.add_(bias)))
        return found

    def _product(self, x: Tensor, matrix: Tensor) -> Tensor:
        return in_groups(lambda rows: rows @ matrix)(x) if self._in_groups else x @ matrix


class CpuAdaptedRows:
    """Implements `AdaptedRows` for one layer."""

    def __init__(self, linear: Linear, rows: AdapterRows) -> None:
        self._linear, self._rows = linear, rows
        self._places: dict[int, JoinedDeltas] = {}
        self._replaced: dict[int, ReplacedRows] = {}  # of a head, by place

    @property
    def is_active(self) -> bool:
        return self._rows.is_active

    def put(self, place: int, deltas: Sequence[Delta], replaced: ReplacedRows | None = None) -> None:
        """Gives a place another adapter; without deltas: one that does not change this layer."""
        self._places.pop(place, None)
        self._replaced.pop(place, None)
        if replaced is not None:
            self._replaced[place] = replaced
        if deltas:
            self._places[place] = JoinedDeltas(deltas, batch_invariant=self._linear.is_batch_invariant)

    def only(self, rows: Tensor) -> AbstractContextManager[None]:
        return self._rows.only(rows)

    def add_to(self, out: Tensor, x: Tensor) -> None:
        for place, rows in self._rows.groups():
            if (replaced := self._replaced.get(place)) is not None:
                replace_logits(out, x, rows, replaced, batch_invariant=self._linear.is_batch_invariant)
            joined = self._places.get(place)
            if joined is None:
                continue
            for start, added in joined.products(x if rows is None else x.index_select(0, rows)):
                part = out.narrow(1, start, added.shape[1])
                if rows is None:
                    part.add_(added)
                else:
                    part.index_add_(0, rows, added.to(out.dtype))


class CpuPlaces:
    """Implements `AdapterPlaces`: a place refers to the matrices in host memory."""

    def __init__(self, model: Model, num_places: int) -> None:
        rows, linears, ups = model.adapter_rows, model.linears(), model.adaptable.up_projections
        self.num_places = num_places
        of_linears = [CpuAdaptedRows(linear, rows) for linear in linears]
        for linear, layer in zip(linears, of_linears, strict=True):
            linear.adapt(layer)
        batch_invariant = any(linear.is_batch_invariant for linear in linears)
        of_ups = [CpuAdaptedHeads(up, rows, batch_invariant=batch_invariant) for up in ups]
        for up, heads in zip(ups, of_ups, strict=True):
            up.adapt(heads)
        self._linears, self._ups = of_linears, of_ups  # as `targets.adapted_layers`
        self._embedding = CpuAdaptedEmbedding(rows, batch_invariant=batch_invariant)
        if model.adaptable.embedding is not None:
            model.adaptable.embedding.adapt(self._embedding)

    @property
    def size_bytes(self) -> int:
        return 0

    def prepare(self, adapter: HostAdapter) -> HostAdapter:
        return adapter

    def put(self, place: int, adapter: HostAdapter) -> None:
        assert 0 <= place < self.num_places, f"place {place} of {self.num_places}"
        with torch.inference_mode():
            tokens = adapter.tokens or TokenDeltas()
            for index, layer in enumerate(self._linears):
                replaced = tokens.head_rows if index == tokens.head_layer else None
                layer.put(place, adapter.deltas.get(index, ()), replaced)
            for index, up in enumerate(self._ups, len(self._linears)):
                up.put(place, adapter.deltas.get(index, ()))
            self._embedding.put(place, tokens.embedding)
