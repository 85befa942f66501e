"""An adapter in host memory from which a device copies, and where its matrices begin."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from blockyard.kernels.lora.adapter_table import NO_OFFSET, OFFSETS
from blockyard.kernels.lora.adapter_tokens import COLUMNS
from blockyard.services.gpu_worker.host_link import HostLink
from blockyard.services.gpu_worker.lora.targets import Delta

ALIGNED = 16  # elements; matrices begin at such places, for wide loads
CHUNK_BYTES = 8 << 20  # pinned at once: pinning takes about as long as copying, and no step is launched meanwhile


@dataclass(frozen=True, slots=True)
class PackedTokens:
    """A place's row of a `AdapterTokens`, on the host."""

    columns: Tensor  # [COLUMNS] int64
    token_ids: Tensor  # [most rows] int32


@dataclass(frozen=True, slots=True)
class PackedAdapter:
    """The matrices of an adapter one behind the other, and its rows of the tables. All tensors are the host's."""

    chunks: Sequence[Tensor]  # [elements], in order
    offsets: Tensor  # [entries, OFFSETS] int64, see `AdapterTable`
    ranks: Tensor  # [entries] int32
    own_ranks: Tensor  # [entries, 2] int32
    embedding: PackedTokens | None  # None: places have no rows of tokens
    head: PackedTokens | None
    added: PackedTokens | None  # of the head, for tokens that it adds

    @property
    def size_bytes(self) -> int:
        return sum(chunk.nbytes for chunk in self.chunks)


class AdapterPacker:
    """Moves tensors into memory that a device copies from.

    A thread may `copy`: it copies a chunk in one call, which leaves the interpreter to the steps.
    """

    def __init__(self, link: HostLink, dtype: torch.dtype, total: int) -> None:
        """total: elements of all, each `aligned`."""
        self._link, self._dtype, self._total, self._end = link, dtype, total, 0
        self._chunk_size = CHUNK_BYTES // dtype.itemsize
        self._pieces: list[list[Tensor]] = [[] for _ in range(-(-total // self._chunk_size))]  # of each chunk
        self._gap = torch.zeros(ALIGNED, dtype=dtype)

    def add(self, tensor: Tensor) -> int:
        """Puts a tensor behind the others. Returns its first element."""
        first, count = self._end, tensor.numel()
        for part in (tensor.flatten(), self._gap[: aligned(count) - count]):
            done = 0
            while done < len(part):
                number, start = divmod(self._end, self._chunk_size)
                step = min(len(part) - done, self._chunk_size - start)
                self._pieces[number].append(part[done : done + step])
                done, self._end = done + step, self._end + step
        return first

    def copy(self) -> list[Tensor]:
        """Returns the chunks, once all tensors are there."""
        assert self._end == self._total, f"{self._end} elements of {self._total}"
        chunks: list[Tensor] = []
        for pieces in self._pieces:
            chunk = self._link.host_tensor((sum(map(len, pieces)),), self._dtype)
            chunks.append(torch.cat(pieces, out=chunk))
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
        a, b, bias = (None if one is None else packer.add(one) for one in (delta.a, delta.b, delta.bias))
        done = 0
        for entry, size in enumerate(sizes, first):
            if done == delta.size:
                break
            self._ranks[entry] = delta.rank
            self._own_ranks[entry] = delta.own_start, 0 if delta.a is None else len(delta.a)
            for i, (at, step) in enumerate(((a, 0), (b, delta.rank), (bias, 1))):
                if at is not None:
                    self._offsets[entry, i] = at + done * step
            done += size
        assert done == delta.size, f"{delta.size} outputs are not those of whole parts"

    def on_host(self, link: HostLink) -> tuple[Tensor, Tensor, Tensor]:
        return on_host(self._offsets, link), on_host(self._ranks, link), on_host(self._own_ranks, link)


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


def on_host(values: "np.ndarray[tuple[int, ...], np.dtype[np.integer]]", link: HostLink) -> Tensor:
    """Copies numbers to memory that a device copies from."""
    tensor = torch.from_numpy(values)
    return link.host_tensor(tensor.shape, tensor.dtype).copy_(tensor)


def aligned(count: int) -> int:
    return -(-count // ALIGNED) * ALIGNED


def total_size(tensors: Iterable[Tensor]) -> int:
    """Elements that tensors take."""
    return sum(aligned(one.numel()) for one in tensors)
