"""The products of adapters in the memory of a device, added to those of layers by kernels."""

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, Protocol

from torch import Tensor

from blockyard.kernels.layers.rms_norm import RMSNorm
from blockyard.kernels.lora.adapter_table import AdapterTable, AdapterTiles, Between
from blockyard.kernels.lora.adapter_tokens import AdapterTokens
from blockyard.services.gpu_worker.layers.adapter_rows import AdapterRows
from blockyard.services.gpu_worker.layers.linear import AddTo, FusedProduct


class StartAdapters(Protocol):
    """See `kernels.lora.add_adapters`."""

    def __call__(
        self,
        x: Tensor,
        places: Tensor,
        table: AdapterTable,
        between: Between | None = None,
        experts: Tensor | None = None,
        weights: Tensor | None = None,
        tiles: AdapterTiles | None = None,
        norm: RMSNorm | None = None,
        gated: bool = False,
        is_ordered: bool = False,
    ) -> Callable[[Tensor], None]: ...


class TileRows(Protocol):
    """See `kernels.lora.adapter_tiles`."""

    def __call__(self, places: Tensor, num_places: int, *, batch_invariant: bool = False) -> AdapterTiles: ...


class AddToHeads(Protocol):
    """See `kernels.lora.add_to_heads`."""

    def __call__(
        self, x: Tensor, places: Tensor, table: AdapterTable, plain_dim: int, out: Tensor, *, values: bool
    ) -> None: ...


class AdapterKernels(NamedTuple):
    """The products of adapters on one kind of device."""

    start: StartAdapters
    add_to_heads: AddToHeads
    adapt_embeddings: Callable[[Tensor, Tensor, Tensor, AdapterTokens], None]  # see `kernels.lora.adapt_embeddings`
    replace_logits: Callable[[Tensor, Tensor, AdapterTokens, Tensor], None]  # see `kernels.lora.replace_logits`
    tile_rows: TileRows | None = None  # None: `start` needs no tiles


def _and_return(add: Callable[[Tensor], None], out: Tensor) -> Tensor:
    add(out)
    return out


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

    def start(self, x: Tensor, *, is_ordered: bool = False) -> AddTo:
        add = self.kernels.start(
            x, self.rows.places, self.table, self.between, tiles=self.rows.tiles, is_ordered=is_ordered
        )
        return partial(_and_return, add)

    def fused(self, product: FusedProduct) -> FusedProduct | None:
        """The first product of adapters normalises and gates as `product` does."""
        return None if self.between is not None else partial(self._add_to_fused, product)

    def _add_to_fused(
        self,
        product: FusedProduct,
        x: Tensor,
        norm: RMSNorm | None = None,
        gated: bool = False,
        add_to: Tensor | None = None,
    ) -> Tensor:
        add = self.kernels.start(x, self.rows.places, self.table, tiles=self.rows.tiles, norm=norm, gated=gated)
        return _and_return(add, product(x, norm=norm, gated=gated, add_to=add_to))


@dataclass(frozen=True, slots=True)
class DeviceAdaptedHead:
    """Implements `AdaptedRows` for the output layer, of which adapters have rows of their own."""

    linear: DeviceAdaptedRows
    tokens: AdapterTokens

    @property
    def is_active(self) -> bool:
        return self.linear.is_active

    def only(self, rows: Tensor) -> AbstractContextManager[None]:
        return self.linear.only(rows)

    def start(self, x: Tensor, *, is_ordered: bool = False) -> AddTo:
        return partial(self._add, x, self.linear.start(x))  # other kernels follow the product

    def _add(self, x: Tensor, add_to: AddTo, out: Tensor) -> Tensor:
        self.linear.kernels.replace_logits(x, self.linear.rows.places, self.tokens, out)
        return add_to(out)

    def fused(self, product: FusedProduct) -> None:
        """Rows of adapters multiply the layer's own input."""


@dataclass(frozen=True, slots=True)
class DeviceAddedColumns:
    """The logits of tokens that adapters add."""

    rows: AdapterRows
    tokens: AdapterTokens  # behind the vocabulary
    kernels: AdapterKernels
    num_extra: int  # columns for them

    def append(self, out: Tensor, x: Tensor) -> Tensor:
        """Returns logits [rows, vocab_size + num_extra], -inf of tokens that a row's adapter does not add."""
        vocab_size = out.shape[1]
        wide = out.new_empty(len(out), vocab_size + self.num_extra)
        wide[:, :vocab_size] = out
        wide[:, vocab_size:] = -math.inf
        self.kernels.replace_logits(x, self.rows.places, self.tokens, wide)
        return wide


@dataclass(frozen=True, slots=True)
class DeviceAdaptedEmbedding:
    """Implements `AdaptedEmbedding`."""

    rows: AdapterRows
    tokens: AdapterTokens
    kernels: AdapterKernels

    @property
    def is_active(self) -> bool:
        return self.rows.is_active

    def add_to(self, found: Tensor, token_ids: Tensor) -> None:
        self.kernels.adapt_embeddings(found, token_ids, self.rows.places, self.tokens)


@dataclass(frozen=True, slots=True)
class DeviceAdaptedExperts:
    """Implements `AdaptedExperts` for one product."""

    rows: AdapterRows
    table: AdapterTable
    kernels: AdapterKernels

    @property
    def is_active(self) -> bool:
        return self.rows.is_active

    def start(
        self, x: Tensor, experts: Tensor, weights: Tensor | None, tiles: AdapterTiles
    ) -> Callable[[Tensor], None]:
        return self.kernels.start(x, self.rows.places, self.table, experts=experts, weights=weights, tiles=tiles)


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
        self.kernels.start(latents, self._places(rows).repeat_interleave(repeats), self.table)(out)

    def _places(self, rows: slice | Tensor | None) -> Tensor:
        return self.rows.places if rows is None else self.rows.places[rows]
