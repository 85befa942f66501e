"""The places of adapters in a device's memory.

Memory is one tensor, divided into pages (`adapter_pages`), as many as all places need if each has the largest adapter.
A place is its row of the tables, which say where each matrix of its adapter begins.
"""

from collections.abc import Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from blockyard.kernels.lora.adapter_table import ALIGNED, NO_OFFSET, OFFSETS, AdapterTable
from blockyard.kernels.lora.adapter_tokens import COLUMNS, AdapterTokens
from blockyard.services.gpu_worker.host_link import HostLink
from blockyard.services.gpu_worker.layers.latent.up_projection import UpProjection
from blockyard.services.gpu_worker.layers.moe.expert_matrices import AdaptableExpert
from blockyard.services.gpu_worker.lora.device.adapter_pages import AdapterPages, PageLayout
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
    addresses,
    counts_of,
    pack_tokens,
    token_counts,
)
from blockyard.services.gpu_worker.lora.device.packed_form import AdapterForm, PackedChunk, find_form
from blockyard.services.gpu_worker.lora.device.place_sizes import TokenSizes, has_place, largest_counts, place_layout
from blockyard.services.gpu_worker.lora.file_memory import FileMemory
from blockyard.services.gpu_worker.lora.module_tensors import EXPERTS
from blockyard.services.gpu_worker.lora.places import HostAdapter
from blockyard.services.gpu_worker.lora.read_modules import AdapterLimits
from blockyard.services.gpu_worker.lora.reader_client import reader_threads
from blockyard.services.gpu_worker.lora.targets import Delta, adapted_layers, layer_shares
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
        counts = [*largest_counts(self._layers, self._shares, limits), *self._tokens.counts(limits)]
        self._largest = place_layout(counts, limits.dtype.itemsize)
        self._page_size, num_pages = self._largest.page_size, num_places * self._largest.num_pages
        self._pages = AdapterPages(num_pages)
        self._memory = torch.zeros(num_pages * self._page_size, dtype=limits.dtype, device=device)
        # of a place: those of a layer side by side
        num_entries = [len(share.sizes) * has for share, has in zip(self._shares, self._has_place, strict=True)]
        self._firsts = np.concatenate([[0], np.cumsum(num_entries)]).tolist()
        entries = (num_places, self._firsts[-1])
        self._offsets = torch.full((*entries, OFFSETS), NO_OFFSET, dtype=torch.int64, device=device)
        self._ranks = torch.zeros(entries, dtype=torch.int32, device=device)
        self._own_ranks = torch.zeros((*entries, 2), dtype=torch.int32, device=device)
        self._embedding = self._token_table(self._tokens.most_embedding) if self._tokens.has_embedding else None
        self._head = self._token_table(limits.max_rows) if self._tokens.head_layer is not None else None
        self._added = self._token_table(self._tokens.num_extra) if self._tokens.num_extra else None
        self._batch_invariant = any(linear.is_batch_invariant for linear in model.linears())
        if kernels.tile_rows is not None:
            tile_rows = partial(kernels.tile_rows, num_places=num_places, batch_invariant=self._batch_invariant)
            self._rows.tile_rows = tile_rows
        self._copier = ThreadPoolExecutor(1, "adapters")  # to pinned memory, while steps go on
        self._copy_helpers = ThreadPoolExecutor(reader_threads(), "adapter copies")  # of one adapter
        self._copies = link.stream()
        self._copied = self._copies.event()
        self._adapt_layers(limits.max_rank)
        if model.adaptable.embedding is not None and self._embedding is not None:
            model.adaptable.embedding.adapt(DeviceAdaptedEmbedding(self._rows, self._embedding, kernels))

    @property
    def size_bytes(self) -> int:
        return self._memory.nbytes

    def prepare(self, adapter: HostAdapter, memory: FileMemory | None = None) -> Generator[bool, None, HostAdapter]:
        """Moves all matrices to memory from which the device copies while the host goes on, and takes them out of the
        adapter. Raises AdapterError for what has no room in a place.

        memory: that it was read into, if others of its form are to be copied by `PackedAdapter.copy_alike`; it is
        closed.
        """
        tokens = adapter.tokens or TokenDeltas()
        embedding = tokens.embedding if tokens.embedding is not None and self._embedding is not None else None
        embedding, (head, added) = embedding or EmbeddingDelta(), self._head_rows(tokens)
        matrices = None if embedding.a is None or embedding.b is None else (embedding.a, embedding.b)
        rows = [] if embedding.rows is None else [(embedding.rows.token_ids, embedding.rows.values)]
        of_tokens = ((rows, matrices), (head, None), (added, None))
        layers, counts, layout = sorted(adapter.deltas), list[int](), PageLayout(self._page_size)
        for layer in layers:
            self._check_place(layer)
            for _, sizes, delta in self._entries(layer, adapter.deltas[layer]):
                for count in counts_of(delta, sizes):
                    layout.add(count)
                    counts.append(count)
            yield True
        for count in (one for own in of_tokens for one in token_counts(*own)):
            layout.add(count)
            counts.append(count)
        self._check_room(layout, counts)
        packer, entries = AdapterPacker(self._link, self._dtype, self._page_size), PackedEntries(self._firsts[-1])
        for layer in layers:
            for entry, sizes, delta in self._entries(layer, adapter.deltas.pop(layer)):
                entries.set(entry, sizes, delta, packer)
            yield True
        tables: list[PackedTokens | None] = []
        for table, (own, pair) in zip(self._tables, of_tokens, strict=True):
            most = 0 if table is None else table.token_ids.shape[1]
            packed = pack_tokens(own, pair, most, packer, self._link)
            tables.append(None if table is None else packed)
        copied = self._copier.submit(_copy, packer, memory)
        while not copied.done():
            yield False
        num_pages, of_entries = packer.layout.num_pages, entries.on_host(self._link)
        chunks, form = copied.result()
        copy_alike = None if form is None or adapter.tokens is not None else partial(self._copy_alike, form)
        of_device = PackedAdapter(num_pages, chunks, *of_entries, *tables, copy_alike=copy_alike)
        kept = None if adapter.tokens is None else TokenDeltas(num_added=tokens.num_added)
        return replace(adapter, deltas={}, tokens=kept, packed=of_device)

    def _copy_alike(self, form: AdapterForm, memory: FileMemory) -> "Future[list[PackedChunk]]":
        return self._copier.submit(form.copy, memory, self._link, self._dtype, self._copy_helpers)

    @property
    def _tables(self) -> tuple[AdapterTokens | None, ...]:
        """Of a `PackedAdapter`, in the order of its fields."""
        return self._embedding, self._head, self._added

    @torch.inference_mode()  # as the memory was made
    def put(self, place: int, adapter: HostAdapter) -> None:
        """Copies beside the steps in flight, none of which reads the place. Later ones wait for the copies."""
        packed, size = adapter.packed, self._page_size
        assert 0 <= place < self.num_places and packed is not None
        pages, has_bytes = self._pages.place(place, adapter.digest, packed.num_pages)
        with self._copies.use():
            self._send(self._offsets[place], addresses(packed.offsets, pages, size))
            self._ranks[place].copy_(packed.ranks, non_blocking=True)
            self._own_ranks[place].copy_(packed.own_ranks, non_blocking=True)
            for table, own in zip(self._tables, (packed.embedding, packed.head, packed.added), strict=True):
                if table is not None and own is not None:
                    self._send(table.columns[place], own.columns_at(pages, size))
                    table.token_ids[place].copy_(own.token_ids, non_blocking=True)
            for chunk in () if has_bytes else packed.chunks:
                number, within = divmod(chunk.first, size)
                begin = pages[number] * size + within
                self._memory[begin : begin + len(chunk.values)].copy_(chunk.values, non_blocking=True)
        self._copied.record()
        self._copied.hold_steps()

    def _send(self, target: Tensor, values: Tensor) -> None:
        target.copy_(self._link.host_tensor(values.shape, values.dtype).copy_(values), non_blocking=True)

    def _entries(self, layer: int, deltas: Sequence[Delta]) -> list[tuple[int, Sequence[int], Delta]]:
        """Deltas in the order of `largest_counts`, each with the entry of its first part, and the outputs of that part
        and of those behind it."""
        share, found = self._shares[layer], list[tuple[int, Sequence[int], Delta]]()
        for delta in sorted(deltas, key=lambda one: one.start):
            part = share.starts.index(delta.start)
            found.append((self._firsts[layer] + part, share.sizes[part:], delta))
        return found

    def _check_place(self, layer: int) -> None:
        if not self._has_place[layer]:
            name = self._layers[layer].spec.parts[0].name
            raise AdapterError(
                f"the adapter changes {name}, for which places on the device have no room: give an adapter of "
                f"experts in --lora-modules, or name {EXPERTS} in --lora-target-modules"
            )

    def _check_room(self, layout: PageLayout, counts: Sequence[int]) -> None:
        """counts: elements of each matrix. layout: of all of them."""
        if layout.num_pages > self._largest.num_pages or max(counts, default=0) > self._page_size:
            size, most = (one * self._dtype.itemsize / MIB for one in (sum(counts), self._largest.size))
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
            is_wide=not any(one % ALIGNED for one in (*share.starts, *share.sizes)),
            batch_invariant=self._batch_invariant,
        )

    def _token_table(self, most: int) -> AdapterTokens:
        columns = torch.zeros((self.num_places, COLUMNS), dtype=torch.int64, device=self._device)
        ids = torch.full((self.num_places, most), -1, dtype=torch.int32, device=self._device)
        return AdapterTokens(self._memory, columns, ids)


def _copy(packer: AdapterPacker, memory: FileMemory | None) -> tuple[list[PackedChunk], AdapterForm | None]:
    """Call it in a thread, which gives the memory back, too."""
    if memory is None:
        return packer.copy(), None
    form = find_form(packer.buffers, memory)
    memory.close()
    return packer.copy(), form
