"""Compressed request bodies: encodings that are decoded, damaged bodies, bombs, and encodings that nothing decodes."""

import gzip
import zlib
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from blockyard.services.api_gateway.http.content_encoding import (
    DECODERS,
    MAX_MEMBERS,
    PIECE_BYTES,
    BodyDecoder,
    Brotli,
    Inflate,
    Zstd,
    brotli,
    zstd,
)

COMPLETION = "/v1/completions"
BODY = msgspec.json.encode({"prompt": "x", "max_tokens": 1})


def raw_deflate(data: bytes) -> bytes:
    packed = zlib.compressobj(wbits=-zlib.MAX_WBITS)
    return packed.compress(data) + packed.flush()


KINDS: dict[str, tuple[Callable[[], BodyDecoder], Callable[[bytes], bytes]]] = {
    "gzip": (lambda: Inflate(gzip=True), gzip.compress),
    "deflate": (lambda: Inflate(gzip=False), zlib.compress),
    "raw deflate": (lambda: Inflate(gzip=False), raw_deflate),
}
if brotli is not None:
    KINDS["br"] = Brotli, brotli.compress
if zstd is not None:
    KINDS["zstd"] = Zstd, zstd.compress


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("step", [1, 7, 10**9])
def test_a_body_in_pieces_of_any_size(kind: str, step: int) -> None:
    make, compress = KINDS[kind]
    plain = bytes(range(256)) * 300
    data, decoder = compress(plain), make()
    found = [piece for i in range(0, len(data), step) for piece in decoder.decode(data[i : i + step])]
    assert b"".join(found) == plain and decoder.is_complete()


@pytest.mark.parametrize("kind", KINDS)
def test_a_bomb_is_decoded_in_small_pieces(kind: str) -> None:
    make, compress = KINDS[kind]
    data = compress(bytes(100 * PIECE_BYTES))
    sizes = [len(piece) for piece in make().decode(data)]
    assert sum(sizes) == 100 * PIECE_BYTES and max(sizes) <= 2 * PIECE_BYTES


@pytest.mark.parametrize("name", ["gzip", "x-gzip", "GZIP", "identity, gzip", "deflate", "identity", ""])
async def test_encodings_that_are_decoded(rig, name: str) -> None:
    data = gzip.compress(BODY) if "gzip" in name.lower() else zlib.compress(BODY) if name == "deflate" else BODY
    async with rig() as r:
        assert (await r.post(COMPLETION, data, headers={"Content-Encoding": name}))[0] == 200
        members = gzip.compress(BODY[:9]) + gzip.compress(BODY[9:])
        assert (await r.post(COMPLETION, members, headers={"Content-Encoding": "gzip"}))[0] == 200


@pytest.mark.parametrize("path", [COMPLETION, "/v1/chat/completions", "/tokenize", "/detokenize", "/invocations"])
async def test_other_encodings_are_a_415_with_our_error_body(rig, monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    for optional in ("br", "zstd"):
        monkeypatch.delitem(DECODERS, optional, raising=False)
    async with rig() as r:
        for name in ("br", "zstd", "compress", "gzip, gzip", "gzip, br", "nonsense", "\x22"):
            status, answer = await r.post(path, BODY, headers={"Content-Encoding": name})
            assert (status, answer["error"]["param"]) == (415, "Content-Encoding"), name
            assert "gzip, deflate, got" in answer["error"]["message"]
        assert (await r.post(COMPLETION, BODY))[0] == 200


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("gzip", b"not gzip at all"),
        ("gzip", gzip.compress(BODY)[:-9]),
        ("gzip", gzip.compress(BODY) + b"rest"),
        ("gzip", gzip.compress(b" ") * (MAX_MEMBERS + 1)),
        ("deflate", b"\xff" * 20),
        ("deflate", zlib.compress(BODY) + b"rest"),
    ],
    ids=["no gzip", "cut", "rest behind gzip", "many members", "no deflate", "rest behind deflate"],
)
async def test_a_damaged_body_is_a_400(rig, name: str, data: bytes) -> None:
    async with rig() as r:
        status, answer = await r.post(COMPLETION, data, headers={"Content-Encoding": name})
        assert (status, answer["error"]["param"]) == (400, "Content-Encoding")
        assert (await r.post(COMPLETION, BODY))[0] == 200


async def test_bombs_are_bounded(rig) -> None:
    async with rig(max_body_bytes=2**20) as r:
        bombs: list[tuple[str, Any]] = [("gzip", gzip.compress(bytes(2**26))), ("deflate", zlib.compress(bytes(2**26)))]
        for name, data in bombs:
            assert len(data) < 2**20
            assert (await r.post(COMPLETION, data, headers={"Content-Encoding": name}))[0] == 413
