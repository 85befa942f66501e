"""Where the bytes of an adapter go when it is packed, learned from one, for others of the same form.

Adapters of one form have the same modules and shapes, and the same places in the memory that they are read into. To
look at each of their hundreds of matrices again takes longer than a step. Their bytes are copied without that, by
system calls that read many matrices each and leave the interpreter to the steps.
"""

import os
from collections.abc import Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from blockyard.services.gpu_worker.host_link import HostLink
from blockyard.services.gpu_worker.lora.file_memory import FileMemory
from blockyard.services.gpu_worker.lora.targets import RowOrder

PART_BYTES = 8 << 20  # that one call reads, about: several threads read an adapter
MOST_TARGETS = 1024  # of one call of preadv


@dataclass(frozen=True, slots=True)
class PackedChunk:
    """Some of an adapter's elements, all of one page."""

    first: int
    values: Tensor  # [elements]


@dataclass(frozen=True, slots=True)
class PackedPiece:
    """Some elements of a matrix."""

    values: Tensor  # [elements]
    order: RowOrder | None  # of the whole matrix; None: its rows are in the order in which they were read
    first: int  # element of the matrix


@dataclass(slots=True)
class FormPart:
    """Successive bytes of the memory that adapters are read into."""

    start: int
    end: int
    targets: list[tuple[int, int, int]]  # buffers, the first byte there, and the one behind the last


@dataclass(slots=True)
class RowGroup:
    """Matrices [out, width] whose rows are brought into another order. They are one behind the other in a buffer."""

    width: int
    num_stored: int = 0  # rows, as they are read
    rows: list[Tensor] = field(default_factory=list)  # of these, in order
    num_ordered: int = 0
    moves: list[tuple[int, int, int, int]] = field(default_factory=list)  # its bytes; a buffer, and its first byte


@dataclass(frozen=True, slots=True)
class AdapterForm:
    """Copies the adapters of one form into buffers that a device copies from."""

    chunks: list[list[tuple[int, int]]]  # of each buffer, one behind the other: the first element, and how many
    groups: list[RowGroup]  # whose buffers are behind the others
    parts: list[FormPart]

    def copy(self, memory: FileMemory, link: HostLink, dtype: torch.dtype, pool: Executor) -> list[PackedChunk]:
        """Call it in a thread. memory: that an adapter of this form was read into; it is closed. Raises OSError."""
        counts = [[count for _, count in chunks] for chunks in self.chunks]
        buffers = [link.host_tensor((sum(of_buffer),), dtype) for of_buffer in counts]
        stored = [torch.empty((group.num_stored, group.width), dtype=dtype) for group in self.groups]
        views = [_bytes_of(one) for one in (*buffers, *stored)]
        list(pool.map(partial(_read_part, memory, views), self.parts))
        memory.close()
        for group, rows in zip(self.groups, stored, strict=True):
            ordered = _bytes_of(rows.index_select(0, torch.cat(group.rows)))
            for first, end, number, target in group.moves:
                views[number][target : target + end - first] = ordered[first:end]
        found = list[PackedChunk]()
        for chunks, of_buffer, buffer in zip(self.chunks, counts, buffers, strict=True):
            values = torch.split(buffer, of_buffer)
            found += [PackedChunk(first, one) for (first, _), one in zip(chunks, values, strict=True)]
        return found


def find_form(buffers: Sequence[Sequence[tuple[int, list[PackedPiece]]]], memory: FileMemory) -> AdapterForm | None:
    """buffers: of each its chunks, one behind the other: the first element, and the pieces. None: some are not in the
    memory, such as matrices of which a rank has some columns."""
    moved, groups, begins = list[tuple[int, int, int, int]](), dict[int, RowGroup](), dict[int, int]()
    chunks = [[(first, sum(len(one.values) for one in pieces)) for first, pieces in one] for one in buffers]
    numbers = dict[int, int]()  # of the buffers of groups, by width
    for number, of_buffer in enumerate(buffers):
        done = 0
        for piece in (one for _, pieces in of_buffer for one in pieces):
            begin, done = done, done + piece.values.nbytes
            matrix = piece.values if piece.order is None else piece.order.stored
            if (start := memory.start_of(matrix)) is None:
                return None
            if piece.order is None:
                moved.append((start, number, begin, done))
                continue
            group = groups.setdefault(width := matrix.shape[1], RowGroup(width))
            row_bytes = width * matrix.itemsize
            if id(piece.order) not in begins:
                begins[id(piece.order)] = group.num_ordered * row_bytes
                own = numbers.setdefault(width, len(buffers) + len(numbers))
                moved.append((start, own, group.num_stored * row_bytes, (group.num_stored + len(matrix)) * row_bytes))
                group.rows.append(piece.order.rows + group.num_stored)
                group.num_stored, group.num_ordered = (
                    group.num_stored + len(matrix),
                    group.num_ordered + len(piece.order.rows),
                )
            first = begins[id(piece.order)] + piece.first * matrix.itemsize
            group.moves.append((first, first + done - begin, number, begin))
    return AdapterForm(chunks, list(groups.values()), _parts_of(moved))


def _parts_of(moved: list[tuple[int, int, int, int]]) -> list[FormPart]:
    """moved: where bytes are in the memory, their buffer, the first byte there, and the one behind the last."""
    parts = list[FormPart]()
    for start, number, first, end in sorted(moved):
        last = parts[-1] if parts else None
        if last is None or last.end != start or start - last.start >= PART_BYTES or len(last.targets) == MOST_TARGETS:
            parts.append(last := FormPart(start, start, []))
        last.targets.append((number, first, end))
        last.end += end - first
    return parts


def _read_part(memory: FileMemory, views: Sequence[memoryview], part: FormPart) -> None:
    done = os.preadv(memory.descriptor, [views[number][first:end] for number, first, end in part.targets], part.start)
    if done != part.end - part.start:
        raise OSError(f"{done} bytes of an adapter could be read instead of {part.end - part.start}")


def _bytes_of(values: Tensor) -> memoryview:
    return values.flatten().view(torch.uint8).numpy().data
