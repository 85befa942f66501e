"""Loads safetensors to a GPU: several threads read into pinned buffers while earlier buffers are copied.

A mapped file would be read page by page by one thread, from memory that the driver stages itself. Readers with two
pinned buffers each keep both the disk and the link to the GPU busy.

With several ranks, a rank copies its share of a weight to the GPU, and no more. Of rows and of whole experts it reads
its share alone; other shares are taken on the host. Ranks of a host read through the page cache, in the same order, so
that a file comes from disk once. Tensors that a quantization format converts are copied whole: the GPU converts them.
"""

import os
import re
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from blockyard.services.gpu_worker.loading.linear_spec import Arrange, Cut
from blockyard.services.gpu_worker.loading.tensor_headers import naming
from blockyard.services.gpu_worker.loading.weights import WeightTable
from blockyard.shared.errors import LoadError

READERS = 4
CHUNK_BYTES = 4 << 20

DTYPES = {
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "F64": torch.float64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_LAYER = re.compile(r"\.(?:layers|h)\.(\d+)\.")


class TensorEntry(msgspec.Struct):
    """One tensor in a file's header; offsets count from the header's end."""

    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


@dataclass(frozen=True, slots=True)
class Stored:
    """The place of a tensor's bytes."""

    name: str
    file: Path
    fd: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int  # in the file
    size_bytes: int

    @property
    def num_rows(self) -> int:
        """The first dimension."""
        return self.shape[0] if self.shape else 1

    @property
    def row_bytes(self) -> int:
        return self.size_bytes // max(self.num_rows, 1)


@contextmanager
def open_safetensors(file: Path) -> Iterator[Any]:
    """Opens a file with mmap: a tensor is read when it is copied. Raises LoadError if the file is not complete."""
    try:
        with safe_open(file, framework="pt") as opened_file:  # checks header, offsets and length
            yield opened_file
    except (SafetensorError, OSError) as e:
        raise LoadError(f"{file} is not a usable safetensors file: {e}") from e


def list_tensors(file: Path, fd: int) -> Iterator[Stored]:
    """Tensors of a file. Raises LoadError if it is not a complete safetensors file."""
    with open_safetensors(file):
        pass
    length = int.from_bytes(os.pread(fd, 8, 0), "little")
    header = msgspec.json.decode(os.pread(fd, length, 8), type=dict[str, msgspec.Raw])
    header.pop("__metadata__", None)
    for name, raw in header.items():
        entry = msgspec.json.decode(raw, type=TensorEntry)
        dtype = dtype_of(entry.dtype, name, file)
        begin, end = entry.data_offsets
        yield Stored(name, file, fd, dtype, entry.shape, 8 + length + begin, end - begin)


def dtype_of(word: str, name: str, file: Path) -> torch.dtype:
    """The dtype that a header calls `word`. Raises LoadError for an unknown one."""
    if word not in DTYPES:
        raise LoadError(f"{file}: {name} is of type {word}, known are {', '.join(DTYPES)}")
    return DTYPES[word]


class Reader:
    """A thread's two buffers, used in turn; for a GPU they are pinned, and copies have their own stream."""

    def __init__(self, table: WeightTable, chunk_bytes: int) -> None:
        self._device = table.device
        self._buffers = [table.link.host_tensor((chunk_bytes,), torch.uint8) for _ in range(2)]
        self._stream = table.link.stream()
        self._copied = [self._stream.event() for _ in range(2)]
        self._turn = 0  # the buffer that is filled next

    def load(self, stored: Stored, table: WeightTable) -> int:
        """Fills one weight and returns its bytes. The copy is complete after `wait`."""
        with torch.inference_mode(), self._stream.use(), naming(stored.file):
            take = table.share_of(stored.name, stored.shape)
            if take is None:
                table.put(stored.name, self._read_rows(stored, (range(stored.num_rows),)))
                return stored.size_bytes
            if not isinstance(take, Cut):
                share = self._take_of_whole(stored, take)
            elif take.dim % len(stored.shape) == 0:
                share = self._read_rows(stored, take.ranges)
            else:
                share = self._take_of_rows(stored, take)
            table.put_share(stored.name, share, stored.shape)
        return stored.size_bytes

    def wait(self) -> None:
        self._stream.synchronize()

    def _read_rows(self, stored: Stored, ranges: Sequence[range]) -> Tensor:
        """Returns ranges of the first dimension on the device."""
        shape = (sum(map(len, ranges)), *stored.shape[1:]) if stored.shape else ()
        value, done = torch.empty(shape, dtype=stored.dtype, device=self._device), 0
        for own in ranges:
            size, begin = len(own) * stored.row_bytes, stored.begin + own.start * stored.row_bytes
            self._fill(_bytes(value)[done : done + size], partial(_read_from, stored, begin))
            done += size
        return value

    def _take_of_rows(self, stored: Stored, cut: Cut) -> Tensor:
        """Returns a part of each row on the device. The host has as many rows at a time as fit into a buffer."""
        shape = [*stored.shape]
        shape[cut.dim] = sum(map(len, cut.ranges))
        value = torch.empty(shape, dtype=stored.dtype, device=self._device)
        step = max(len(self._buffers[0]) // max(stored.row_bytes, 1), 1)
        for start in range(0, stored.num_rows, step):
            rows = range(start, min(start + step, stored.num_rows))
            taken = _bytes(cut(_read_to_host(stored, rows)).contiguous())
            self._fill(_bytes(value[rows.start : rows.stop]), partial(_copy_from, taken))
        return value

    def _take_of_whole(self, stored: Stored, take: Arrange) -> Tensor:
        """Returns what `take` makes of the whole weight, which the host has meanwhile, on the device."""
        taken = take(_read_to_host(stored, range(stored.num_rows))).contiguous()
        value = torch.empty_like(taken, device=self._device)
        self._fill(_bytes(value), partial(_copy_from, _bytes(taken)))
        return value

    def _fill(self, target: Tensor, write: Callable[[Tensor, int], None]) -> None:
        """Fills bytes of the device by way of the buffers. write: fills one with those from a place on."""
        chunk = len(self._buffers[0])
        for start in range(0, len(target), chunk):
            buffer = self._buffers[self._turn][: min(chunk, len(target) - start)]
            self._copied[self._turn].synchronize()
            write(buffer, start)
            target[start : start + len(buffer)].copy_(buffer, non_blocking=True)
            self._copied[self._turn].record()
            self._turn = 1 - self._turn


def _bytes(value: Tensor) -> Tensor:
    return value.view(-1).view(torch.uint8)


def _read_to_host(stored: Stored, rows: range) -> Tensor:
    value = torch.empty((len(rows), *stored.shape[1:]) if stored.shape else (), dtype=stored.dtype)
    _read(stored, _bytes(value), stored.begin + rows.start * stored.row_bytes)
    return value


def _read_from(stored: Stored, begin: int, buffer: Tensor, start: int) -> None:
    _read(stored, buffer, begin + start)


def _copy_from(source: Tensor, buffer: Tensor, start: int) -> None:
    buffer.copy_(source[start : start + len(buffer)])


def _read(stored: Stored, buffer: Tensor, offset: int) -> None:
    rest = buffer.numpy().data
    while rest:
        try:
            num_read = os.preadv(stored.fd, [rest], offset)
        except OSError as e:
            raise LoadError(f"{stored.file}: {stored.name} cannot be read: {e.strerror}") from e
        if not num_read:
            raise LoadError(f"{stored.file} ends within {stored.name}")
        rest, offset = rest[num_read:], offset + num_read


@contextmanager
def opened(files: list[Path]) -> Iterator[list[int]]:
    fds: list[int] = []
    try:
        for file in files:
            try:
                fds.append(os.open(file, os.O_RDONLY))
            except OSError as e:
                raise LoadError(f"{file} cannot be opened: {e.strerror}") from e
        yield fds
    finally:
        for fd in fds:
            os.close(fd)


def _order(stored: Stored) -> tuple[int, int]:
    """Layer by layer, so that few groups of tensors wait for their last one; in a layer the largest tensors first."""
    layer = _LAYER.search(stored.name)
    return -1 if layer is None else int(layer[1]), -stored.size_bytes


def load(
    files: list[Path], table: WeightTable, progress: Callable[[float], None], chunk_bytes: int = CHUNK_BYTES
) -> None:
    """Fills the table from safetensors files. Raises LoadError. The caller checks for missing weights."""
    with opened(files) as fds:
        listed = [stored for file, fd in zip(files, fds, strict=True) for stored in list_tensors(file, fd)]
        table.expect([stored.name for stored in listed])
        wanted = sorted((s for s in listed if table.wants(s.name)), key=_order)
        total, done = sum(s.size_bytes for s in wanted), 0
        readers = [Reader(table, chunk_bytes) for _ in range(min(READERS, len(wanted)))]
        idle: SimpleQueue[Reader] = SimpleQueue()
        for reader in readers:
            idle.put(reader)

        def run(stored: Stored) -> int:
            reader = idle.get()
            try:
                return reader.load(stored, table)
            finally:
                idle.put(reader)

        with ThreadPoolExecutor(max(len(readers), 1)) as pool:
            futures = [pool.submit(run, stored) for stored in wanted]
            try:
                for future in as_completed(futures):
                    done += future.result()
                    progress(done / max(total, 1))
            finally:
                pool.shutdown(cancel_futures=True)
        for reader in readers:
            reader.wait()
    table.link.free_cached()  # frees memory that the readers' streams cached
