"""An adapter in host memory from which a device copies, and where its matrices begin."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from blockyard.kernels.lora.adapter_table import ALIGNED, NO_OFFSET, OFFSETS
from blockyard.kernels.lora.adapter_tokens import COLUMNS
from blockyard.services.gpu_worker.host_link import HostLink
from blockyard.services.gpu_worker.lora.device.adapter_pages import PageLayout, aligned
from blockyard.services.gpu_worker.lora.device.packed_form import PackedChunk, PackedPiece
from blockyard.services.gpu_worker.lora.file_memory import FileMemory
from blockyard.services.gpu_worker.lora.targets import Delta, RowOrder

CHUNK_BYTES = 8 << 20  # pinned at once: pinning takes about as long as copying, and no step is launched meanwhile
TOKEN_ADDRESSES = [1, 3, 4]  # of the columns of `AdapterTokens`


@dataclass(frozen=True, slots=True)
class PackedTokens:
    """A place's row of a `AdapterTokens`, on the host."""

    columns: Tensor  # [COLUMNS] int64
    token_ids: Tensor  # [most rows] int32

    def columns_at(self, pages: Sequence[int], page_size: int) -> Tensor:
        """The columns of an adapter in these pages of a device."""
        found = self.columns.clone()
        found[TOKEN_ADDRESSES] = addresses(found[TOKEN_ADDRESSES], pages, page_size)
        return found


@dataclass(frozen=True, slots=True)
class PackedAdapter:
    """The matrices of an adapter as they lie in its pages, and its rows of the tables. All tensors are the host's.

    Elements are counted from the begin of the first page.
    """

    num_pages: int
    chunks: Sequence[PackedChunk]
    offsets: Tensor  # [entries, OFFSETS] int64, see `AdapterTable`
    ranks: Tensor  # [entries] int32
    own_ranks: Tensor  # [entries, 2] int32
    embedding: PackedTokens | None  # None: places have no rows of tokens
    head: PackedTokens | None
    added: PackedTokens | None  # of the head, for tokens that it adds
    # begins to copy another adapter of the same form out of the memory that it was read into; None: its form says too
    # little
    copy_alike: Callable[[FileMemory], "Future[list[PackedChunk]]"] | None = field(default=None, kw_only=True)

    @property
    def size_bytes(self) -> int:
        return sum(chunk.values.nbytes for chunk in self.chunks)


class AdapterPacker:
    """Moves tensors into memory that a device copies from.

    That memory is pinned in buffers of CHUNK_BYTES, whatever pages are: others would be padded to a power of two. A
    thread may `copy`: it copies a chunk in one call, which leaves the interpreter to the steps.
    """

    def __init__(self, link: HostLink, dtype: torch.dtype, page_size: int) -> None:
        self.layout = PageLayout(page_size)
        self._link, self._dtype, self._buffer_size = link, dtype, CHUNK_BYTES // dtype.itemsize
        # of each buffer its chunks, one behind the other: the first element, and pieces of matrices
        self.buffers: list[list[tuple[int, list[PackedPiece]]]] = []
        self._end = 0
        self._room = 0  # of the last buffer
        self._gap = torch.zeros(ALIGNED, dtype=dtype)

    def add(self, tensor: Tensor, order: RowOrder | None = None) -> int:
        """Puts a tensor behind the others. Returns its first element. order: that its rows were brought into."""
        count = tensor.numel()
        first = self.layout.add(count)
        begins = first != self._end or first % self.layout.page_size == 0
        self._end = first
        for part in (tensor.flatten(), self._gap[: aligned(count) - count]):
            done = 0
            while done < len(part):
                if not self._room:
                    self.buffers.append([])
                    self._room, begins = self._buffer_size, True
                if begins:
                    self.buffers[-1].append((self._end, []))
                    begins = False
                step = min(len(part) - done, self._room)
                self.buffers[-1][-1][1].append(PackedPiece(part[done : done + step], order, done))
                done, self._end, self._room = done + step, self._end + step, self._room - step
        return first

    def copy(self) -> list[PackedChunk]:
        """Returns the chunks, once all tensors are there."""
        chunks = list[PackedChunk]()
        for buffer in self.buffers:
            counts = [sum(len(one.values) for one in pieces) for _, pieces in buffer]
            parts = torch.split(self._link.host_tensor((sum(counts),), self._dtype), counts)
            for (first, pieces), values in zip(buffer, parts, strict=True):
                chunks.append(PackedChunk(first, torch.cat([one.values for one in pieces], out=values)))
                pieces.clear()
        return chunks


class PackedEntries:
    """The rows of an adapter in the tables of all layers."""

    def __init__(self, num_entries: int) -> None:
        self._offsets = np.full((num_entries, OFFSETS), NO_OFFSET, np.int64)
        self._ranks, self._own_ranks = np.zeros(num_entries, np.int32), np.zeros((num_entries, 2), np.int32)

    def set(self, first: int, sizes: Sequence[int], delta: Delta, packer: AdapterPacker) -> None:
        """first: the entry of the delta's first part. sizes: outputs of that part and of those behind it, of which a
        stack of experts changes several."""
        a = NO_OFFSET if delta.a is None else packer.add(delta.a)
        for entry, (b, bias) in enumerate(_of_parts(delta, sizes), first):
            self._ranks[entry] = delta.rank
            self._own_ranks[entry] = delta.own_start, 0 if delta.a is None else len(delta.a)
            order = delta.order if b is not None and len(b) == delta.size else None
            self._offsets[entry, 0] = a
            self._offsets[entry, 1] = NO_OFFSET if b is None else packer.add(b, order)
            self._offsets[entry, 2] = NO_OFFSET if bias is None else packer.add(bias)

    def on_host(self, link: HostLink) -> tuple[Tensor, Tensor, Tensor]:
        return on_host(self._offsets, link), on_host(self._ranks, link), on_host(self._own_ranks, link)


def counts_of(delta: Delta, sizes: Sequence[int]) -> list[int]:
    """Elements of each matrix of a delta, in the order of `PackedEntries.set`."""
    found = [delta.a, *(one for of_part in _of_parts(delta, sizes) for one in of_part)]
    return [one.numel() for one in found if one is not None]


def _of_parts(delta: Delta, sizes: Sequence[int]) -> list[tuple[Tensor | None, Tensor | None]]:
    """The rows of B and the bias of each part."""
    found, done = list[tuple[Tensor | None, Tensor | None]](), 0
    for size in sizes:
        if done == delta.size:
            break
        b, bias = (None if one is None else one[done : done + size] for one in (delta.b, delta.bias))
        found.append((b, bias))
        done += size
    assert done == delta.size, f"{delta.size} outputs are not those of whole parts"
    return found


def pack_tokens(
    rows: Sequence[tuple[Tensor, Tensor]], matrices: tuple[Tensor, Tensor] | None, most: int, packer: AdapterPacker,
    link: HostLink,
) -> PackedTokens:  # fmt: skip
    """rows: tokens [n] and their rows [n, width], one behind the other. matrices: A [tokens, rank] and B [width, rank].
    most: rows that the table has."""
    columns, ids = np.zeros(COLUMNS, np.int64), np.full(most, -1, np.int32)
    if rows:
        tokens, values = (torch.cat(parts) for parts in zip(*rows, strict=True))
        ids[: len(tokens)] = tokens.numpy()
        columns[:2] = len(tokens), packer.add(values)
    if matrices is not None:
        a, b = matrices
        columns[2:] = a.shape[1], packer.add(a), packer.add(b)
    return PackedTokens(on_host(columns, link), on_host(ids, link))


def token_counts(rows: Sequence[tuple[Tensor, Tensor]], matrices: tuple[Tensor, Tensor] | None) -> list[int]:
    """Elements of what `pack_tokens` packs, in its order."""
    found = [sum(values.numel() for _, values in rows)] if rows else []
    return [*found, *(one.numel() for one in matrices or ())]


def addresses(elements: Tensor, pages: Sequence[int], page_size: int) -> Tensor:
    """Where elements of an adapter are on a device that has it in these pages.

    elements: int64, `NO_OFFSET` for none.
    """
    of_pages = torch.tensor(pages or [0]) * page_size
    own = elements.clamp(min=0)
    page = (own // page_size).clamp(max=len(of_pages) - 1)  # a matrix without elements may be behind the last one
    return torch.where(elements < 0, elements, of_pages[page] + own % page_size)


def on_host(values: "np.ndarray[tuple[int, ...], np.dtype[np.integer]]", link: HostLink) -> Tensor:
    """Copies numbers to memory that a device copies from."""
    tensor = torch.from_numpy(values)
    return link.host_tensor(tensor.shape, tensor.dtype).copy_(tensor)
