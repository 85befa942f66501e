"""Decodes compressed request bodies (`Content-Encoding`) in bounded pieces, so that no small body fills the memory.

gzip and deflate are always decoded, br and zstd where their libraries are installed: the extra `compression`.
"""

import zlib
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from aiohttp import web

from blockyard.shared.errors import RequestError

try:
    import brotli
except ImportError:
    brotli = None
try:
    from backports import zstd
except ImportError:
    zstd = None  # type: ignore[assignment]

FIELD = "Content-Encoding"
PIECE_BYTES = 256 * 1024  # decoded at once
MAX_MEMBERS = 64  # members of a gzip body, frames of a zstd body
ZSTD_WINDOW_LOG = 23  # 8 MiB: the largest window that RFC 9659 allows in HTTP
GZIP, ZLIB, RAW_DEFLATE = 16 + zlib.MAX_WBITS, zlib.MAX_WBITS, -zlib.MAX_WBITS
DAMAGED = (zlib.error, *([] if brotli is None else [brotli.error]), *([] if zstd is None else [zstd.ZstdError]))


class BodyDecoder(Protocol):
    """Decodes one body. Methods raise an error of `DAMAGED` or ValueError for a damaged one."""

    def decode(self, data: bytes) -> Iterator[bytes]:
        """Yields what the next bytes decode to, in pieces of at most PIECE_BYTES."""
        ...

    def is_complete(self) -> bool: ...


class MemberCount:
    """Counts the members of a body: each costs more than its bytes."""

    def __init__(self) -> None:
        self._num = 1

    def next(self) -> None:
        self._num += 1
        if self._num > MAX_MEMBERS:
            raise ValueError(f"more than {MAX_MEMBERS} compressed streams in a row")


class Inflate:
    """gzip, or deflate, which clients send with zlib's header and without."""

    def __init__(self, gzip: bool) -> None:
        self._gzip, self._members = gzip, MemberCount()
        self._inner = zlib.decompressobj(GZIP) if gzip else None

    def decode(self, data: bytes) -> Iterator[bytes]:
        if self._inner is None:
            self._inner = zlib.decompressobj(ZLIB if data[0] & 0xF == zlib.DEFLATED else RAW_DEFLATE)
        while data:
            if self._inner.eof:
                if not self._gzip:
                    raise ValueError("bytes behind the end of the compressed body")
                self._members.next()
                self._inner = zlib.decompressobj(GZIP)
            yield (piece := self._inner.decompress(data, PIECE_BYTES))
            while len(piece) == PIECE_BYTES:  # zlib may hold more, also where it has taken all bytes
                yield (piece := self._inner.decompress(self._inner.unconsumed_tail, PIECE_BYTES))
            data = self._inner.unconsumed_tail or self._inner.unused_data

    def is_complete(self) -> bool:
        return self._inner is None or self._inner.eof


class Brotli:
    def __init__(self) -> None:
        self._inner = brotli.Decompressor()

    def decode(self, data: bytes) -> Iterator[bytes]:
        if self._inner.is_finished():
            raise ValueError("bytes behind the end of the compressed body")
        piece = self._inner.process(data, output_buffer_limit=PIECE_BYTES)
        while piece or not self._inner.can_accept_more_data():
            yield piece
            piece = self._inner.process(b"", output_buffer_limit=PIECE_BYTES)

    def is_complete(self) -> bool:
        return bool(self._inner.is_finished())


class Zstd:
    def __init__(self) -> None:
        self._inner, self._members = self._new(), MemberCount()

    def decode(self, data: bytes) -> Iterator[bytes]:
        while data:
            if self._inner.eof:
                self._members.next()
                self._inner = self._new()
            yield self._inner.decompress(data, PIECE_BYTES)
            while not (self._inner.needs_input or self._inner.eof):
                yield self._inner.decompress(b"", PIECE_BYTES)
            data = self._inner.unused_data if self._inner.eof else b""

    def is_complete(self) -> bool:
        return bool(self._inner.eof)

    def _new(self) -> Any:
        return zstd.ZstdDecompressor(options={zstd.DecompressionParameter.window_log_max: ZSTD_WINDOW_LOG})


DECODERS: dict[str, Callable[[], BodyDecoder]] = {
    "gzip": lambda: Inflate(gzip=True),
    "x-gzip": lambda: Inflate(gzip=True),
    "deflate": lambda: Inflate(gzip=False),
}
if brotli is not None:
    DECODERS["br"] = Brotli
if zstd is not None:
    DECODERS["zstd"] = Zstd


def open_decoder(request: web.BaseRequest) -> BodyDecoder | None:
    """The decoder of the request's body; None: it is not compressed. Raises RequestError: 415."""
    listed = ",".join(request.headers.getall(FIELD, []))
    names = [name for name in (part.strip().lower() for part in listed.split(",")) if name not in ("", "identity")]
    if not names:
        return None
    if len(names) > 1 or names[0] not in DECODERS:
        known = ", ".join(name for name in DECODERS if not name.startswith("x-"))
        raise RequestError(f"{FIELD} must be one of {known}, got {listed[:100]!r}", FIELD, status=415)
    return DECODERS[names[0]]()
