"""Memory into which a reader copies a file of weights, and which its worker maps: numbers are copied once.

A file is copied, and its bytes are hashed, in pieces by several threads, because a request waits for its adapter.
"""

import functools
import mmap
import os
import weakref
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from blockyard.shared.errors import AdapterError
from blockyard.shared.lora.adapter_folder import LENGTH_BYTES, MAX_HEADER_BYTES

PIECE_BYTES = 1 << 20  # stays in a core's cache between its copy and its hash
ALIGNED_BYTES = 64


class FileMemory:
    """Memory without a name, that lives while this or a mapping of it does."""

    def __init__(self) -> None:
        self.descriptor = os.memfd_create("adapter", os.MFD_CLOEXEC)
        weakref.finalize(self, os.close, self.descriptor)
        self.size_bytes = 1  # none at all cannot be mapped
        os.ftruncate(self.descriptor, self.size_bytes)
        self._mapped: mmap.mmap | None = None
        self._first = 0  # address

    def copy_safetensors(self, path: Path, threads: int) -> bytes:
        """Copies a file once: what is checked is what is used, also if the file changes meanwhile. Returns a digest of
        its bytes. Raises AdapterError.

        The copy's header ends with more spaces, so that its tensors are aligned as those that torch makes: sums of
        products depend on that.
        """
        try:
            with path.open("rb", buffering=0) as file:
                size = os.fstat(file.fileno()).st_size
                head = LENGTH_BYTES + int.from_bytes(os.pread(file.fileno(), LENGTH_BYTES, 0), "little")
                if head > min(size, LENGTH_BYTES + MAX_HEADER_BYTES):
                    raise AdapterError(f"{path.name} is not a safetensors file: its header would end at byte {head}")
                more = -head % ALIGNED_BYTES
                starts = [0, *range(head, size, PIECE_BYTES)]
                with ThreadPoolExecutor(max(threads, 1)) as pool:
                    copy = functools.partial(self._copy_piece, file, more)
                    found = list(pool.map(copy, starts, [*starts[1:], size]))
        except OSError as e:
            raise AdapterError(f"{path.name} cannot be read: {e.strerror or e}") from e
        done = sum(length for length, _ in found)
        if done != size:
            raise AdapterError(f"{path.name} had {size} bytes and {done} could be read: it changes")
        os.pwrite(self.descriptor, (head - LENGTH_BYTES + more).to_bytes(LENGTH_BYTES, "little"), 0)
        os.pwrite(self.descriptor, b" " * more, head)
        self.size_bytes = size + more
        return sha256(b"".join(digest for _, digest in found)).digest()

    def _copy_piece(self, file: BinaryIO, more: int, start: int, end: int) -> tuple[int, bytes]:
        """All but the first, which is the header, are copied `more` bytes further behind."""
        piece = memoryview(bytearray(end - start))
        length = os.preadv(file.fileno(), [piece], start)
        if os.pwrite(self.descriptor, piece[:length], start + more if start else 0) != length:
            raise OSError("the memory is full")
        return length, sha256(piece[:length]).digest()

    def map(self) -> mmap.mmap:
        """The memory of the file, at once and not page by page when it is used."""
        if self._mapped is None:
            flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
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
