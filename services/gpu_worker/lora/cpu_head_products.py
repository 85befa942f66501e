"""Products of adapters of latent attention's up-projections on the CPU, whose attention absorbs them."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from blockyard.services.gpu_worker.layers.adapter_rows import AdapterRows
from blockyard.services.gpu_worker.layers.latent.up_projection import UpProjection
from blockyard.services.gpu_worker.layers.linear import in_groups
from blockyard.services.gpu_worker.lora.targets import Delta


class HeadMatrices:
    """The delta of one adapter for an up-projection, by heads."""

    def __init__(self, delta: Delta, up: UpProjection) -> None:
        assert delta.a is not None and delta.b is not None, "no family has a bias of its own there"
        heads, width = up.weight.shape[:2]
        b = delta.b.view(heads, width, delta.rank)
        self._a, self._to_keys, self._to_values = delta.a, b[:, : up.plain_dim], b[:, up.plain_dim :].mT
        # the same bias of K for all tokens changes no softmax
        self._bias = None if delta.bias is None else delta.bias.view(heads, width)[:, up.plain_dim :]

    def of_queries(self, query: Tensor) -> Tensor:
        """query [rows, heads, plain] -> [rows, heads, latent]."""
        return torch.einsum("nhp,hpr->nhr", query, self._to_keys) @ self._a

    def of_attended(self, attended: Tensor) -> Tensor:
        """attended [rows, heads, latent] -> [rows, heads, value]."""
        found = torch.einsum("nhr,hrv->nhv", attended @ self._a.T, self._to_values)
        return found if self._bias is None else found.add_(self._bias)


class CpuAdaptedHeads:
    """Implements `AdaptedUpProjection` for one layer."""

    def __init__(self, up: UpProjection, rows: AdapterRows, *, batch_invariant: bool) -> None:
        self._up, self._rows, self._in_groups = up, rows, batch_invariant
        self._places: dict[int, HeadMatrices] = {}

    @property
    def is_active(self) -> bool:
        return self._rows.is_active

    def put(self, place: int, deltas: Sequence[Delta]) -> None:
        """Gives a place another adapter; without deltas: one that does not change this layer."""
        self._places.pop(place, None)
        for delta in deltas:
            self._places[place] = HeadMatrices(delta, self._up)

    def add_to_queries(self, out: Tensor, query: Tensor, rows: slice | Tensor | None = None) -> None:
        assert rows is None, "the CPU computes all rows"
        self._add(out, query, HeadMatrices.of_queries)

    def add_to_values(self, out: Tensor, attended: Tensor, rows: slice | Tensor | None = None) -> None:
        assert rows is None, "the CPU computes all rows"
        self._add(out, attended, HeadMatrices.of_attended)

    def add_to_keys_values(self, out: Tensor, latents: Tensor, rows: slice | Tensor, repeats: int) -> None:
        raise AssertionError("the CPU makes no K and V")

    def _add(self, out: Tensor, x: Tensor, product: Callable[[HeadMatrices, Tensor], Tensor]) -> None:
        for place, index in self._rows.groups():
            if (matrices := self._places.get(place)) is None:
                continue
            own = x if index is None else x.index_select(0, index)
            added = self._grouped(matrices, own, product) if self._in_groups else product(matrices, own)
            if index is None:
                out.add_(added)
            else:
                out.index_add_(0, index, added.to(out.dtype))

    def _grouped(self, matrices: HeadMatrices, x: Tensor, product: Callable[[HeadMatrices, Tensor], Tensor]) -> Tensor:
        """A product whose bits of a row do not depend on the other rows."""
        heads = x.shape[1]
        grouped = in_groups(lambda rows: product(matrices, rows.view(len(rows), heads, -1)).flatten(1))
        return grouped(x.flatten(1)).view(len(x), heads, -1)
