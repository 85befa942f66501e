"""The places of adapters in a device's memory.

A place is a part of one tensor, as large as an adapter may be. An adapter's matrices lie in it one behind the other, as
they do in host memory, and tables say where each one begins.
"""

from collections.abc import Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from blockyard.kernels.lora.adapter_table import NO_OFFSET, OFFSETS, AdapterTable
from blockyard.kernels.lora.adapter_tokens import COLUMNS, AdapterTokens
from blockyard.services.gpu_worker.host_link import HostLink
from blockyard.services.gpu_worker.layers.embedding import HEAD
from blockyard.services.gpu_worker.layers.latent.up_projection import UpProjection
from blockyard.services.gpu_worker.layers.moe.expert_matrices import AdaptableExpert
from blockyard.services.gpu_worker.lora.device.device_products import (
    AdapterKernels,
    DeviceAdaptedEmbedding,
    DeviceAdaptedExperts,
    DeviceAdaptedHead,
    DeviceAdaptedHeads,
    DeviceAdaptedRows,
    DeviceAddedColumns,
)
from blockyard.services.gpu_worker.lora.device.packed_adapter import (
    AdapterPacker,
    PackedAdapter,
    PackedEntries,
    PackedTokens,
    aligned,
    pack_tokens,
    total_size,
)
from blockyard.services.gpu_worker.lora.module_tensors import EXPERTS, last_name
from blockyard.services.gpu_worker.lora.places import HostAdapter
from blockyard.services.gpu_worker.lora.ranks.layer_share import LayerShare
from blockyard.services.gpu_worker.lora.read_modules import AdapterLimits
from blockyard.services.gpu_worker.lora.targets import AdaptedLayer, ModelTargets, adapted_layers, layer_shares
from blockyard.services.gpu_worker.lora.token_rows import EmbeddingDelta, TokenDeltas
from blockyard.services.gpu_worker.models.interface import Model
from blockyard.shared.errors import AdapterError

MIB = 1 << 20


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
        self._kernels, self._rows, self._ranks_group = kernels, model.adapter_rows, model.table.ranks
        self._layers, self._shares = adapted_layers(model), layer_shares(model, fully_sharded=limits.fully_sharded)
        self._has_place = [has_place(layer, limits) for layer in self._layers]
        self._tokens = TokenSizes(model, limits)
        self._place_size = place_size(self._layers, self._shares, limits) + self._tokens.place_size(limits)
        self._memory = torch.zeros(num_places * self._place_size, dtype=limits.dtype, device=device)
        # of a place: those of a layer side by side
        counts = [len(share.sizes) * has for share, has in zip(self._shares, self._has_place, strict=True)]
        self._firsts = np.concatenate([[0], np.cumsum(counts)]).tolist()
        entries = (num_places, self._firsts[-1])
        self._offsets = torch.full((*entries, OFFSETS), NO_OFFSET, dtype=torch.int64, device=device)
        self._ranks = torch.zeros(entries, dtype=torch.int32, device=device)
        self._own_ranks = torch.zeros((*entries, 2), dtype=torch.int32, device=device)
        self._embedding = self._token_table(self._tokens.most_embedding) if self._tokens.has_embedding else None
        self._head = self._token_table(limits.max_rows) if self._tokens.head_layer is not None else None
        self._added = self._token_table(self._tokens.num_extra) if self._tokens.num_extra else None
        self._copier = ThreadPoolExecutor(1, "adapters")  # to pinned memory, while steps go on
        self._copies = link.stream()
        self._copied = self._copies.event()
        self._adapt_layers(limits.max_rank)
        if model.adaptable.embedding is not None and self._embedding is not None:
            model.adaptable.embedding.adapt(DeviceAdaptedEmbedding(self._rows, self._embedding, kernels))

    @property
    def size_bytes(self) -> int:
        return self._memory.nbytes

    def prepare(self, adapter: HostAdapter) -> Generator[bool, None, HostAdapter]:
        """Moves all matrices to memory from which the device copies while the host goes on, and takes them out of the
        adapter. Raises AdapterError for what has no room in a place."""
        tokens = adapter.tokens or TokenDeltas()
        embedding = tokens.embedding if tokens.embedding is not None and self._embedding is not None else None
        embedding, (head, added) = embedding or EmbeddingDelta(), self._head_rows(tokens)
        matrices = None if embedding.a is None or embedding.b is None else (embedding.a, embedding.b)
        rows = [] if embedding.rows is None else [(embedding.rows.token_ids, embedding.rows.values)]
        of_tokens = [*(values for _, values in (*rows, *head, *added)), *(matrices or ())]
        total = total_size(of_tokens)
        for of_layer in adapter.deltas.values():
            total += total_size(one for delta in of_layer for one in delta.tensors())
            yield True
        self._check_room(adapter, total)
        packer, entries = AdapterPacker(self._link, self._dtype, total), PackedEntries(self._firsts[-1])
        for layer in list(adapter.deltas):
            share = self._shares[layer]
            for delta in adapter.deltas.pop(layer):
                part = share.starts.index(delta.start)
                entries.set(self._firsts[layer] + part, share.sizes[part:], delta, packer)
            yield True
        tables: list[PackedTokens | None] = []
        for table, own, pair in zip(self._tables, (rows, head, added), (matrices, None, None), strict=True):
            most = 0 if table is None else table.token_ids.shape[1]
            packed = pack_tokens(own, pair, most, packer, self._link)
            tables.append(None if table is None else packed)
        copied = self._copier.submit(packer.copy)
        while not copied.done():
            yield False
        of_device = PackedAdapter(copied.result(), *entries.on_host(self._link), *tables)
        kept = None if adapter.tokens is None else TokenDeltas(num_added=tokens.num_added)
        return replace(adapter, deltas={}, tokens=kept, packed=of_device)

    @property
    def _tables(self) -> tuple[AdapterTokens | None, ...]:
        """Of a `PackedAdapter`, in the order of its fields."""
        return self._embedding, self._head, self._added

    @torch.inference_mode()  # as the memory was made
    def put(self, place: int, adapter: HostAdapter) -> None:
        """Copies beside the steps in flight, none of which reads the place. Later ones wait for the copies."""
        packed = adapter.packed
        assert 0 <= place < self.num_places and packed is not None
        with self._copies.use():
            end = place * self._place_size
            for chunk in packed.chunks:
                self._memory[end : end + len(chunk)].copy_(chunk, non_blocking=True)
                end += len(chunk)
            self._offsets[place].copy_(packed.offsets, non_blocking=True)
            self._ranks[place].copy_(packed.ranks, non_blocking=True)
            self._own_ranks[place].copy_(packed.own_ranks, non_blocking=True)
            for table, own in zip(self._tables, (packed.embedding, packed.head, packed.added), strict=True):
                if table is not None and own is not None:
                    table.columns[place].copy_(own.columns, non_blocking=True)
                    table.token_ids[place].copy_(own.token_ids, non_blocking=True)
        self._copied.record()
        self._copied.hold_steps()

    def _check_room(self, adapter: HostAdapter, total: int) -> None:
        for layer in adapter.deltas:
            if not self._has_place[layer]:
                name = self._layers[layer].spec.parts[0].name
                raise AdapterError(
                    f"the adapter changes {name}, for which places on the device have no room: give an adapter of "
                    f"experts in --lora-modules, or name {EXPERTS} in --lora-target-modules"
                )
        if total > self._place_size:
            size, most = (one * self._dtype.itemsize / MIB for one in (total, self._place_size))
            raise AdapterError(f"the adapter takes {size:.1f} MiB on the device, a place has {most:.1f} MiB")

    def _head_rows(self, tokens: TokenDeltas) -> tuple[list[tuple[Tensor, Tensor]], list[tuple[Tensor, Tensor]]]:
        """Columns of logits with the rows of the head that make them: of the vocabulary, and behind it."""
        rows, added, first = tokens.head_rows, tokens.added_head, self._tokens.vocab_size
        replaced = [] if rows is None or self._head is None else [(rows.token_ids, rows.values)]
        if added is None or self._added is None:
            return replaced, []
        return replaced, [(torch.arange(first, first + len(added)), added)]

    def _adapt_layers(self, max_rank: int) -> None:
        kernels, rows = self._kernels, self._rows
        for index, layer in enumerate(self._layers):
            if not self._has_place[index]:
                continue
            if isinstance(layer, AdaptableExpert):
                if layer.index == 0:
                    num_experts = len(layer.matrix.specs)
                    layer.matrix.adapt(DeviceAdaptedExperts(rows, self._table(index, max_rank, num_experts), kernels))
                continue
            table = self._table(index, max_rank)
            if isinstance(layer, UpProjection):
                layer.adapt(DeviceAdaptedHeads(rows, table, kernels, layer.plain_dim))
                continue
            ranks = self._ranks_group if self._shares[index].sums_between else None
            adapted = DeviceAdaptedRows(rows, table, kernels, None if ranks is None else ranks.sum)
            if index == self._tokens.head_layer and self._head is not None:
                layer.adapt(DeviceAdaptedHead(adapted, self._head))
                if self._added is not None:
                    layer.append(DeviceAddedColumns(rows, self._added, kernels, self._tokens.num_extra).append)
            else:
                layer.adapt(adapted)

    def _table(self, layer: int, max_rank: int, num_experts: int = 1) -> AdapterTable:
        """Of a layer, or of so many experts from that one on."""
        share, of_layers = self._shares[layer], slice(self._firsts[layer], self._firsts[layer + num_experts])
        return AdapterTable(
            self._memory,
            self._offsets[:, of_layers],
            self._ranks[:, of_layers],
            torch.tensor(share.starts, dtype=torch.int32, device=self._device),
            torch.tensor(share.sizes, dtype=torch.int32, device=self._device),
            max(share.sizes),
            max_rank,
            self._own_ranks[:, of_layers] if share.sums_between else None,
            self._place_size,
        )

    def _token_table(self, most: int) -> AdapterTokens:
        columns = torch.zeros((self.num_places, COLUMNS), dtype=torch.int64, device=self._device)
        ids = torch.full((self.num_places, most), -1, dtype=torch.int32, device=self._device)
        return AdapterTokens(self._memory, self._place_size, columns, ids)


class TokenSizes:
    """What a place has for rows of tokens."""

    def __init__(self, model: Model, limits: AdapterLimits) -> None:
        stage, embedding, head = model.table.stage, model.adaptable.embedding, ModelTargets(model).find(HEAD)
        self.has_embedding = embedding is not None and is_allowed(embedding.name, limits)
        self.has_embedding = self.has_embedding and (stage is None or stage.is_first)
        is_head = head is not None and is_allowed(head.name, limits)
        self.head_layer = head.layer if head is not None and is_head else None
        may_add = embedding is not None and is_allowed(embedding.name, limits)
        # the leader has the logits of all ranks
        self.num_extra = limits.max_rows if may_add and is_head and model.table.shard.rank == 0 else 0
        has_last = embedding is not None and embedding.own_tokens.stop == embedding.vocab_size
        self._most_added = limits.max_rows if has_last else 0  # rows of the embedding behind the vocabulary
        self.most_embedding = limits.max_rows + self._most_added
        self.vocab_size = model.shape.vocab_size
        self._width = 0 if embedding is None else embedding.weight.shape[1]
        self._head_width = 0 if head is None else adapted_layers(model)[head.layer].spec.in_features
        self._num_tokens = 0 if embedding is None else len(embedding.own_tokens)

    def place_size(self, limits: AdapterLimits) -> int:
        """Elements of the most rows and the largest matrices."""
        total = 0
        if self.has_embedding:
            total += aligned(self.most_embedding * self._width) + aligned(limits.max_rank * self._width)
            total += aligned(limits.max_rank * (self._num_tokens + self._most_added))
        if self.head_layer is not None:
            total += aligned(limits.max_rows * self._head_width) + aligned(self.num_extra * self._head_width)
        return total


def is_allowed(name: str, limits: AdapterLimits) -> bool:
    return not limits.target_modules or last_name(name) in limits.target_modules


def has_place(layer: AdaptedLayer, limits: AdapterLimits) -> bool:
    """Whether an adapter may change a layer. Experts take much memory, and only if they are asked for."""
    if isinstance(layer, AdaptableExpert) and EXPERTS in limits.target_modules:
        return True
    if isinstance(layer, AdaptableExpert) and not limits.target_modules:
        return limits.with_experts
    return any(is_allowed(one.name, limits) for one in layer.spec.parts)


def place_size(layers: Sequence[AdaptedLayer], shares: Sequence[LayerShare], limits: AdapterLimits) -> int:
    """Elements of the largest adapter that may be placed, of a rank, without rows of tokens."""
    total = 0
    for layer, share in zip(layers, shares, strict=True):
        if has_place(layer, limits):
            for one, size in zip(layer.spec.parts, share.sizes, strict=True):
                if isinstance(layer, AdaptableExpert) or is_allowed(one.name, limits):
                    total += _largest(size, share, limits)
    return total


def _largest(size: int, share: LayerShare, limits: AdapterLimits) -> int:
    bias = aligned(size) if limits.with_bias else 0
    own_rank = max(-(-limits.max_rank // share.num_shrunk), 1)
    return aligned(own_rank * len(share.inputs)) + aligned(limits.max_rank * size) + bias
