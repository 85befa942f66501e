"""The files of a batch: lines of bounded size are read, and whole lines are appended."""

import codecs
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from blockyard.shared.errors import BatchError

PIECE_BYTES = 2**16


def read_lines(file: BinaryIO, max_bytes: int) -> Iterator[tuple[int, bytes | None]]:
    """Yields each line that is not blank with its number, from 1; None in place of a longer one. Raises OSError."""
    number = 0
    while piece := file.readline(max_bytes + 1):
        number += 1
        if number == 1:
            piece = piece.removeprefix(codecs.BOM_UTF8)
        if len(piece) > max_bytes and not piece.endswith(b"\n"):
            while piece and not piece.endswith(b"\n"):
                piece = file.readline(PIECE_BYTES)
            yield number, None
        elif line := piece.strip():
            yield number, line


class OutputFile:
    """A file that lines are appended to. After a failure it ends with the last whole line."""

    def __init__(self, path: Path) -> None:
        """Raises BatchError if the file cannot be written to."""
        self.path = path
        self.num_lines = 0  # that it has, once it was read
        try:
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as e:
            raise self._failed(e) from e
        self._is_regular = stat.S_ISREG(os.fstat(self._fd).st_mode)  # others, such as a pipe, hold nothing
        self._num_bytes = 0  # of whole lines

    def read(self, max_bytes: int) -> Iterator[tuple[int, bytes | None]]:
        """Yields the lines that it has, as `read_lines` does. Part of a line at the end is removed.

        To be read to its end before the first `append`. Raises BatchError.
        """
        if not self._is_regular:
            return
        try:
            self._num_bytes = self._end_of_lines()
            os.ftruncate(self._fd, self._num_bytes)
            with open(os.dup(self._fd), "rb") as file:
                for number, line in read_lines(file, max_bytes):
                    self.num_lines += 1
                    yield number, line
            os.lseek(self._fd, self._num_bytes, os.SEEK_SET)
        except OSError as e:
            raise self._failed(e) from e

    def append(self, line: bytes) -> None:
        """Writes a line and its end. Raises BatchError, for example if the disk is full."""
        rest = memoryview(line + b"\n")
        try:
            while rest:
                rest = rest[os.write(self._fd, rest) :]
        except OSError as e:
            if self._is_regular:
                os.ftruncate(self._fd, self._num_bytes)
            raise self._failed(e) from e
        self._num_bytes += len(line) + 1
        self.num_lines += 1

    def close(self) -> None:
        os.close(self._fd)

    def _end_of_lines(self) -> int:
        end = os.fstat(self._fd).st_size
        while end:
            begin = max(0, end - PIECE_BYTES)
            found = os.pread(self._fd, end - begin, begin).rfind(b"\n")
            if found >= 0:
                return begin + found + 1
            end = begin
        return 0

    def _failed(self, e: OSError) -> BatchError:
        return BatchError(e.strerror or str(e), self.path)
