"""Parses a recorded HTTP response: each server-sent event with the time at which its last byte was read. Pure."""

import bisect
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

TimedReads = Sequence[tuple[float, bytes]]  # (time of the read, bytes)


class BadResponse(Exception):
    """The bytes are not a valid HTTP/1 response."""


class ChunkedDecoder:
    """Decodes HTTP's chunked transfer encoding incrementally."""

    def __init__(self) -> None:
        self.ended = False
        self._line = b""
        self._left = 0  # bytes of the current chunk
        self._skip = 0  # bytes of the line end after it

    def feed(self, data: bytes) -> bytes:
        """Returns the payload bytes in `data`. Raises BadResponse."""
        found, at = [], 0
        while at < len(data) and not self.ended:
            if self._left:
                piece = data[at : at + self._left]
                found.append(piece)
                at += len(piece)
                self._left -= len(piece)
                self._skip = 0 if self._left else 2
            elif self._skip:
                step = min(self._skip, len(data) - at)
                at += step
                self._skip -= step
            else:
                at = self._read_size(data, at)
        return b"".join(found)

    def _read_size(self, data: bytes, at: int) -> int:
        end = data.find(b"\n", at)
        if end < 0:
            self._line += data[at:]
            return len(data)
        line, self._line = self._line + data[at:end], b""
        try:
            self._left = int(line.partition(b";")[0], 16)
        except ValueError:
            raise BadResponse(f"chunk size {line[:40]!r}") from None
        self.ended = self._left == 0
        return end + 1


@dataclass(frozen=True, slots=True)
class HttpResponse:
    """A response body with the arrival time of each of its parts."""

    status: int
    body: bytes
    ends: list[int]  # length of the body after each read
    times_s: list[float]  # time of each read
    complete: bool  # False: the connection ended before the response
    is_self_delimited: bool  # complete by its length or last chunk, not by the closed connection

    def complete_at(self, end: int) -> float:
        """Returns the time at which the body's first `end` bytes had been read."""
        return self.times_s[bisect.bisect_left(self.ends, end)]

    def events(self) -> Iterator[tuple[float, bytes]]:
        """Yields (time of its last byte, data) for each server-sent event with data."""
        data: list[bytes] = []
        start = 0
        while (newline := self.body.find(b"\n", start)) >= 0:
            line = self.body[start:newline].removesuffix(b"\r")
            start = newline + 1
            if line.startswith(b"data:"):
                data.append(line[5:].removeprefix(b" "))
            elif not line and data:
                yield self.complete_at(start), b"\n".join(data)
                data = []


def read(pieces: TimedReads) -> HttpResponse:
    """Raises BadResponse, also if there is no complete head."""
    head, status, rest_of, chunked, length = b"", 0, 0, False, -1
    for index, (_, piece) in enumerate(pieces):
        head += piece
        if (end := head.find(b"\r\n\r\n")) >= 0:
            status, chunked, length = _read_head(head[:end])
            first, rest_of = head[end + 4 :], index
            break
    else:
        raise BadResponse(f"the connection ended before a response: {head[:80]!r}")
    chunks = ChunkedDecoder()
    rest = [(pieces[rest_of][0], first), *pieces[rest_of + 1 :]]
    parts = [chunks.feed(piece) if chunked else piece for _, piece in rest]
    ends = list(itertools.accumulate(len(part) for part in parts))
    complete = chunks.ended if chunked else ends[-1] >= length
    is_self_delimited = complete and (chunked or length >= 0)
    return HttpResponse(status, b"".join(parts), ends, [at for at, _ in rest], complete, is_self_delimited)


def _read_head(head: bytes) -> tuple[int, bool, int]:
    """Returns (status, is chunked, content length or -1)."""
    first, *lines = head.split(b"\r\n")
    words = first.split()
    if len(words) < 2 or not words[0].startswith(b"HTTP/1.") or not words[1].isdigit():
        raise BadResponse(f"not HTTP/1: {first[:80]!r}")
    fields = {name.strip().lower(): value.strip().lower() for name, _, value in (x.partition(b":") for x in lines)}
    length = fields.get(b"content-length", b"")
    return int(words[1]), b"chunked" in fields.get(b"transfer-encoding", b""), int(length) if length.isdigit() else -1
