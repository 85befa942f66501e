"""Memory into which a reader copies a file of weights, and which its worker maps or reads: numbers are copied once.

A file is copied, its bytes are hashed, and its tensors are looked at, in pieces by several threads, because a request
waits for its adapter. The pages of new memory take longer than that: `MemoryPool` keeps memory for files of equal size.
"""

import contextlib
import functools
import mmap
import os
import threading
import weakref
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from blockyard.shared.errors import AdapterError
from blockyard.shared.lora.adapter_folder import LENGTH_BYTES, MAX_HEADER_BYTES, HeaderTensor, read_header

PIECE_BYTES = 1 << 20  # stays in a core's cache between its copy, its hash, and its tensors
MOST_PIECE_BYTES = 64 << 20  # larger tensors are cut
ALIGNED_BYTES = 64
KEPT_BYTES = 512 << 20  # of a pool
MAPPED = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}

TakeTensor = Callable[[str, Tensor], None]  # is told a tensor that was copied, by its name, and may change its numbers


@dataclass(slots=True)
class FilePiece:
    """Some bytes of a file."""

    start: int
    end: int
    tensors: list[tuple[str, HeaderTensor]] = field(default_factory=list)  # that are there as a whole


class FileMemory:
    """Memory without a name, that lives while this or a mapping of it does."""

    def __init__(self, descriptor: int | None = None, size_bytes: int = 1) -> None:
        """descriptor: of such memory, with its size; None: it is new."""
        self._is_new = descriptor is None
        self.descriptor = os.memfd_create("adapter", os.MFD_CLOEXEC) if descriptor is None else descriptor
        self._close = weakref.finalize(self, os.close, self.descriptor)
        self.size_bytes = size_bytes  # none at all cannot be mapped
        if self._is_new:
            os.ftruncate(self.descriptor, self.size_bytes)
        self._mapped: mmap.mmap | None = None
        self._first = 0  # address
        self.file_bytes = 0  # of the file that was copied

    def copy_safetensors(self, path: Path, threads: int, take: TakeTensor | None = None) -> bytes:
        """Copies a file once: what is checked is what is used, also if the file changes meanwhile. Returns a digest of
        its bytes. Raises AdapterError.

        The copy's header ends with more spaces, so that its tensors are aligned as those that torch makes: sums of
        products depend on that. take: called by the threads.
        """
        try:
            with path.open("rb", buffering=0) as file:
                size = os.fstat(file.fileno()).st_size
                head = LENGTH_BYTES + int.from_bytes(os.pread(file.fileno(), LENGTH_BYTES, 0), "little")
                if head > min(size, LENGTH_BYTES + MAX_HEADER_BYTES):
                    raise AdapterError(f"{path.name} is not a safetensors file: its header would end at byte {head}")
                more, self.file_bytes = -head % ALIGNED_BYTES, size
                self._resize(size + more)
                copy = functools.partial(self._copy_piece, file, more, take)
                found = [copy(FilePiece(0, head))]
                length = head - LENGTH_BYTES + more
                self.map()[: head + more] = b"".join(
                    (length.to_bytes(LENGTH_BYTES, "little"), self.map()[LENGTH_BYTES:head], b" " * more)
                )
                with ThreadPoolExecutor(max(threads, 1)) as pool:
                    found += pool.map(copy, file_pieces(self._entries(path.name), head, size))
        except OSError as e:
            raise AdapterError(f"{path.name} cannot be read: {e.strerror or e}") from e
        done = sum(length for length, _ in found)
        if done != size:
            raise AdapterError(f"{path.name} had {size} bytes and {done} could be read: it changes")
        return sha256(b"".join(digest for _, digest in found)).digest()

    def _resize(self, size: int) -> None:
        os.ftruncate(self.descriptor, size)
        self.size_bytes = size
        if self._mapped is not None and len(self._mapped) != size:
            self._mapped = None

    def _entries(self, name: str) -> dict[str, HeaderTensor]:
        """Of the copied header. A broken one is refused behind the copy."""
        with contextlib.suppress(AdapterError):
            return read_header(Path(f"/proc/self/fd/{self.descriptor}"), name)
        return {}

    def _copy_piece(self, file: BinaryIO, more: int, take: TakeTensor | None, piece: FilePiece) -> tuple[int, bytes]:
        """All but the first, which is the header, are copied `more` bytes further behind."""
        mapped, shift = self.map(), more if piece.start else 0
        content = memoryview(mapped)[piece.start + shift : piece.end + shift]
        length = os.preadv(file.fileno(), [content], piece.start)
        digest = sha256(content[:length]).digest()
        if take is not None and length == len(content):
            for name, entry in piece.tensors:
                first = piece.start + shift + entry.data_offsets[0] - piece.tensors[0][1].data_offsets[0]
                dtype, count = MAPPED.get(entry.dtype), torch.Size(entry.shape).numel()
                if dtype is not None and count * dtype.itemsize == entry.data_offsets[1] - entry.data_offsets[0]:
                    take(name, torch.frombuffer(mapped, dtype=dtype, count=count, offset=first))
        return length, digest

    def map(self) -> mmap.mmap:
        """The memory of the file: of a new one at once, and not page by page when it is used."""
        if self._mapped is None:
            flags = mmap.MAP_SHARED | (mmap.MAP_POPULATE if self._is_new else 0)
            self._mapped = mmap.mmap(self.descriptor, self.size_bytes, flags=flags)
            self._first = torch.frombuffer(self._mapped, dtype=torch.uint8).data_ptr()
        return self._mapped

    def start_of(self, tensor: Tensor) -> int | None:
        """Where a tensor lies that is a view of the mapped memory; None: it is elsewhere."""
        start = tensor.data_ptr() - self._first
        if self._mapped is None or not 0 <= start < len(self._mapped) or not tensor.is_contiguous():
            return None
        return start

    def append(self, tensor: Tensor) -> int:
        """Copies a tensor behind all others. Returns where it starts."""
        start = end = -(-self.size_bytes // ALIGNED_BYTES) * ALIGNED_BYTES
        content = tensor.contiguous().flatten().view(torch.uint8).numpy().data
        while content:
            done = os.pwrite(self.descriptor, content, end)
            content, end = content[done:], end + done
        self.size_bytes = end
        return start

    @property
    def is_closed(self) -> bool:
        return not self._close.alive

    def close(self) -> None:
        """Leaves the memory to the tensors in it. What is freed takes milliseconds: call it in a thread."""
        self._mapped = None
        self._close()


def file_pieces(entries: Mapping[str, HeaderTensor], head: int, size: int) -> list[FilePiece]:
    """The pieces of a file behind its header, by the bytes of the file alone. They end where tensors end."""
    pieces, last = list[FilePiece](), FilePiece(head, head)
    for name, entry in sorted(entries.items(), key=lambda one: one[1].data_offsets):
        first, end = (head + one for one in entry.data_offsets)
        if first != last.end or not first < end <= size:
            continue  # it is empty, or the file is broken, and refused behind the copy
        if (last.end > last.start and end - last.start > PIECE_BYTES) or end - first > MOST_PIECE_BYTES:
            pieces.append(last)
            last = FilePiece(first, first)
        last.end = end
        last.tensors.append((name, entry))
    pieces += [last, FilePiece(last.end, size)]
    found = list[FilePiece]()
    for piece in pieces:
        if piece.end - piece.start <= (MOST_PIECE_BYTES if piece.tensors else PIECE_BYTES):
            found.append(piece)
            continue
        starts = range(piece.start, piece.end, PIECE_BYTES)
        found += [FilePiece(start, min(start + PIECE_BYTES, piece.end)) for start in starts]
    return [piece for piece in found if piece.end > piece.start]


class MemoryPool:
    """Memory that adapters are read into. Threads may call it."""

    def __init__(self) -> None:
        self._kept: list[FileMemory] = []
        self._lent: dict[int, FileMemory] = {}  # by descriptor
        self._lock = threading.Lock()

    def take(self, file_bytes: int) -> FileMemory:
        """Memory for a file of so many bytes."""
        with self._lock:
            found = next((one for one in self._kept if one.file_bytes == file_bytes), None)
            if found is not None:
                self._kept.remove(found)
        return found or FileMemory()

    def lend(self, memory: FileMemory) -> int:
        """Holds it until the worker has it. Returns its descriptor."""
        self._lent[memory.descriptor] = memory
        return memory.descriptor

    def end_loan(self, descriptor: int, *, is_copied: bool) -> None:
        """is_copied: the worker does not use it any more."""
        memory = self._lent.pop(descriptor)
        with self._lock:
            if is_copied and memory.size_bytes + sum(one.size_bytes for one in self._kept) <= KEPT_BYTES:
                self._kept.append(memory)
