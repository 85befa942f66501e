"""Files of a batch at URLs: GET into a local file, PUT of a local file."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from urllib.parse import urlsplit

import aiohttp

from blockyard.shared.errors import BatchError, ConfigError

TIMEOUT = aiohttp.ClientTimeout(total=None, sock_connect=30.0, sock_read=120.0)  # of silence: files may be large
DELAYS_S = (1.0, 5.0)  # before the second and the third attempt
PIECE_BYTES = 2**20


class RemoteError(Exception):
    """A transfer failed; `may_pass`: another attempt may succeed."""

    def __init__(self, message: str, may_pass: bool) -> None:
        super().__init__(message)
        self.may_pass = may_pass


def is_url(place: str) -> bool:
    return place.startswith(("http://", "https://"))


def shown(place: str) -> str:
    """The place without what may be secret in a URL: user, password, query."""
    if not is_url(place):
        return place
    parts = urlsplit(place)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"


async def fetch(url: str, path: Path, may_be_missing: bool = False) -> None:
    """Writes what is at a URL to a file. `may_be_missing`: a 404 is an empty file. Raises ConfigError."""

    async def attempt(session: aiohttp.ClientSession) -> None:
        async with session.get(url) as response:
            if response.status == 404 and may_be_missing:
                path.write_bytes(b"")
                return
            _check(response)
            with path.open("wb") as file:
                async for piece in response.content.iter_chunked(PIECE_BYTES):
                    file.write(piece)

    try:
        await _repeat(attempt)
    except (RemoteError, OSError) as e:
        raise ConfigError(f"{shown(url)}: cannot be read: {e}") from e


async def send(path: Path, url: str) -> None:
    """Sends a file by PUT, as stores of objects take it. Raises BatchError."""

    async def attempt(session: aiohttp.ClientSession) -> None:
        with path.open("rb") as file:
            async with session.put(url, data=file) as response:
                _check(response)

    try:
        await _repeat(attempt)
    except (RemoteError, OSError) as e:
        raise BatchError(f"{shown(url)}: cannot be written: {e}; the output is in {path}") from e


def _check(response: aiohttp.ClientResponse) -> None:
    if response.status >= 400:
        raise RemoteError(f"status {response.status} {response.reason or ''}".strip(), response.status >= 500)


def _said(error: Exception) -> str:
    """The error without the URL, or that of a redirect, whose query may be secret."""
    name = type(error).__name__
    if isinstance(error, aiohttp.InvalidURL):
        return f"the URL cannot be used ({name})"
    if isinstance(error, aiohttp.ClientResponseError):
        return f"status {error.status} {error.message}".strip() + f" ({name})"
    return str(error) or name


async def _repeat(attempt: Callable[[aiohttp.ClientSession], Awaitable[None]]) -> None:
    """Raises RemoteError after the last attempt, and OSError of the local file."""
    async with aiohttp.ClientSession(timeout=TIMEOUT, trust_env=True, auto_decompress=True) as session:
        for delay_s in (*DELAYS_S, None):
            try:
                await attempt(session)
                return
            except RemoteError as e:
                if delay_s is None or not e.may_pass:
                    raise
            except (aiohttp.ClientError, TimeoutError) as e:
                if delay_s is None or isinstance(e, aiohttp.InvalidURL):
                    raise RemoteError(_said(e), may_pass=False) from None  # its text may have the URL
            await asyncio.sleep(delay_s)
