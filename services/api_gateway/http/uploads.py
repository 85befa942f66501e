"""Reads request bodies, within bounds on the time and size of each and on the sum of all."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from aiohttp import web

from blockyard.services.api_gateway.http.content_encoding import DAMAGED, FIELD, BodyDecoder, open_decoder
from blockyard.shared.errors import RequestError

SMALL_BYTES = 64 * 1024  # bodies up to this size may use the whole sum, larger ones only a part
LARGE_SHARE = 0.75  # of the sum, so that large uploads leave room for small requests
CHUNK_BYTES = 64  # memory of a chunk besides its bytes
RETRY_AFTER_S = 1.0


class Uploads:
    """The uploads of one gateway. Counts received bytes, not announced ones: announcing costs a client nothing."""

    def __init__(self, max_bytes: int, max_total_bytes: int | None, timeout_s: float) -> None:
        """`max_total_bytes` defaults to eight bodies of the largest size."""
        self._max, self._timeout_s = max_bytes, timeout_s
        self._max_total = max(8 * max_bytes if max_total_bytes is None else max_total_bytes, max_bytes)
        self._max_large = max(int(LARGE_SHARE * self._max_total), max_bytes)
        self.held_bytes = 0  # of bodies that are being read or parsed

    @asynccontextmanager
    async def read(self, request: web.Request) -> AsyncIterator[bytes]:
        """The whole body, decoded, counted until the block is left. Raises RequestError: 400, 408, 413, 415 or 503."""
        body = _Body(self)
        try:
            self._check_announced(request.content_length or 0)
            decoder = open_decoder(request)
            try:
                async with asyncio.timeout(self._timeout_s):
                    if decoder is None:
                        async for chunk in request.content.iter_any():
                            body.add(chunk)
                    else:
                        await _decode(request, decoder, body)
            except TimeoutError as e:
                said = f"the body did not arrive within {self._timeout_s:g} s"
                raise RequestError(said, "body", status=408) from e
            yield body.take()
        finally:
            body.release()

    def hold(self, size: int, of_body: int) -> None:
        """Counts `size` more bytes of a body that now has `of_body`. Raises RequestError if there is no room."""
        if of_body > self._max:
            raise RequestError(f"the body is larger than the {self._max} bytes this server takes", "body", status=413)
        self._check_room(size, of_body)
        self.held_bytes += size

    def release(self, size: int) -> None:
        self.held_bytes -= size

    def _check_announced(self, size: int) -> None:
        self.hold(0, size)
        self._check_room(size, size)

    def _check_room(self, size: int, of_body: int) -> None:
        most = self._max_total if of_body <= SMALL_BYTES else self._max_large
        if self.held_bytes + size > most:
            raise RequestError(
                "This server reads as many request bodies as it has memory for.",
                "body",
                status=503,
                retry_after_s=RETRY_AFTER_S,
            )


async def _decode(request: web.Request, decoder: BodyDecoder, body: "_Body") -> None:
    """Raises RequestError for a damaged body, and as soon as the decoded body is too large."""
    try:
        async for chunk in request.content.iter_any():
            for piece in decoder.decode(chunk):
                body.add(piece)
                await asyncio.sleep(0)  # open streams are written in between
    except RequestError:
        raise
    except (*DAMAGED, ValueError) as e:
        raise RequestError(f"the body cannot be decoded: {e}", FIELD) from e
    if not decoder.is_complete():
        raise RequestError("the body cannot be decoded: it ends too early", FIELD)


class _Body:
    """The received chunks of one body."""

    def __init__(self, uploads: Uploads) -> None:
        self._uploads = uploads
        self._chunks: list[bytes] = []
        self._size = self._held = 0

    def add(self, chunk: bytes) -> None:
        size = len(chunk) + CHUNK_BYTES
        self._uploads.hold(size, self._size + len(chunk))
        self._held += size
        self._size += len(chunk)
        self._chunks.append(chunk)

    def take(self) -> bytes:
        chunks, self._chunks = self._chunks, []
        return b"".join(chunks)

    def release(self) -> None:
        self._chunks.clear()
        self._uploads.release(self._held)
        self._held = 0
