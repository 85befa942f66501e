"""What adapters change of embedding and head on the CPU."""

import math

import torch
from torch import Tensor

from blockyard.services.gpu_worker.layers.adapter_rows import AdapterRows
from blockyard.services.gpu_worker.layers.linear import Product, in_groups
from blockyard.services.gpu_worker.lora.token_rows import EmbeddingDelta, ReplacedRows


class CpuAdaptedEmbedding:
    """Implements `AdaptedEmbedding`."""

    def __init__(self, rows: AdapterRows, *, batch_invariant: bool) -> None:
        self._rows, self._in_groups = rows, batch_invariant
        self._places: dict[int, EmbeddingDelta] = {}

    @property
    def is_active(self) -> bool:
        return self._rows.is_active

    def put(self, place: int, delta: EmbeddingDelta | None) -> None:
        self._places.pop(place, None)
        if delta is not None:
            self._places[place] = delta

    def add_to(self, found: Tensor, token_ids: Tensor) -> None:
        for place, index in self._rows.groups():
            if (delta := self._places.get(place)) is None:
                continue
            own, ids = (found, token_ids) if index is None else (found[index], token_ids[index])
            if delta.rows is not None:
                _replace(own, ids, delta.rows)
            if delta.a is not None and delta.b is not None:
                own.add_(grouped(delta.b.T, in_groups_too=self._in_groups)(delta.a.index_select(0, ids)))
            if index is not None:
                found.index_copy_(0, index, own)


def _replace(found: Tensor, token_ids: Tensor, rows: ReplacedRows) -> None:
    if not len(rows.token_ids):
        return
    at = torch.searchsorted(rows.token_ids, token_ids).clamp_(max=len(rows.token_ids) - 1)
    is_replaced = rows.token_ids[at] == token_ids
    found[is_replaced] = rows.values[at[is_replaced]].to(found.dtype)


def replace_logits(out: Tensor, x: Tensor, index: Tensor | None, rows: ReplacedRows, *, batch_invariant: bool) -> None:
    """Writes the logits of tokens whose rows of the head an adapter has replaced.

    out [rows, vocab_size], x [rows, width]. index [n] int64: of the rows with the adapter; None: all.
    """
    own = x if index is None else x.index_select(0, index)
    logits = grouped(rows.values.T, in_groups_too=batch_invariant)(own).to(out.dtype)
    if index is None:
        out.index_copy_(1, rows.token_ids, logits)
    else:
        out[index[:, None], rows.token_ids] = logits


class CpuAddedColumns:
    """The rows of the head that adapters have for the tokens that they add, by place."""

    def __init__(self, rows: AdapterRows, *, batch_invariant: bool) -> None:
        self._rows, self._in_groups = rows, batch_invariant
        self._places: dict[int, tuple[int, Tensor | None]] = {}

    def put(self, place: int, num_added: int, rows: Tensor | None) -> None:
        """rows [num_added, width]; None: the tokens are never generated."""
        self._places.pop(place, None)
        if num_added:
            self._places[place] = num_added, rows

    def append(self, out: Tensor, x: Tensor) -> Tensor:
        """out [rows, vocab_size], x [rows, width] -> logits [rows, vocab_size + most added tokens of a row].

        Without added tokens it is `out` itself.
        """
        here = [(index, *self._places[place]) for place, index in self._rows.groups() if place in self._places]
        if not here:
            return out
        size = out.shape[1]
        wide = out.new_full((len(out), size + max(num_added for _, num_added, _ in here)), -math.inf)
        wide[:, :size] = out
        for index, num_added, rows in here:
            if rows is None:
                continue
            own = x if index is None else x.index_select(0, index)
            logits = grouped(rows.T, in_groups_too=self._in_groups)(own).to(out.dtype)
            if index is None:
                wide[:, size : size + num_added] = logits
            else:
                wide[index, size : size + num_added] = logits
        return wide


def grouped(matrix: Tensor, *, in_groups_too: bool) -> Product:
    """The product with a matrix [in, out]; in_groups_too: the bits of a row do not depend on the others."""

    def product(rows: Tensor) -> Tensor:
        return rows @ matrix

    return in_groups(product) if in_groups_too else product
