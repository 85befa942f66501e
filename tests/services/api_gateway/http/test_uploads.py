"""Bodies that arrive slowly, never end, or are too many at a time. Real sockets."""

import asyncio
import gzip
import time
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import Any

import msgspec
import openai
import pytest

COMPLETION = "/v1/completions"
HEAD = "POST %s HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
ASKS = {"prompt": "x", "max_tokens": 1}


@asynccontextmanager
async def upload(r: Any, announced: int, sent: int, path: str = COMPLETION) -> Any:
    """A connection on which part of a body was sent."""
    reader, writer = await asyncio.open_connection("127.0.0.1", r.port)
    writer.write((HEAD % (path, announced)).encode() + b'{"prompt":"' + b"x" * sent)
    try:
        yield reader
    finally:
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()


async def answer(reader: asyncio.StreamReader) -> tuple[int, dict[str, str], Any]:
    async with asyncio.timeout(10):
        head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        headers = dict(line.split(": ", 1) for line in head[1:] if line)
        body = msgspec.json.decode(await reader.readexactly(int(headers["Content-Length"])))
    return int(head[0].split()[1]), headers, body


@pytest.mark.parametrize("path", [COMPLETION, "/v1/chat/completions", "/tokenize", "/detokenize", "/invocations"])
async def test_a_body_that_does_not_arrive_is_a_408(rig, path: str) -> None:
    async with rig(body_timeout_s=0.2) as r, upload(r, 100_000, 1000, path) as reader:
        began = time.monotonic()
        status, headers, body = await answer(reader)
        assert (status, headers["Connection"], body["error"]["code"]) == (408, "close", "request_timeout")
        assert 0.15 < time.monotonic() - began < 5
        await r.until(lambda: r.gateway.num_active == 0)


async def test_a_slow_body_has_the_same_time_limit(rig) -> None:
    async with rig(body_timeout_s=0.5) as r:
        reader, writer = await asyncio.open_connection("127.0.0.1", r.port)
        writer.write((HEAD % (COMPLETION, 10_000)).encode())
        asked = asyncio.create_task(answer(reader))
        while not asked.done():
            writer.write(b" ")
            await asyncio.sleep(0.05)
        assert (await asked)[0] == 408
        writer.close()
        await writer.wait_closed()


async def test_above_the_sum_of_bodies_a_large_body_is_a_503_and_small_ones_are_served(rig) -> None:
    limits = {"max_body_bytes": 2**20, "max_total_body_bytes": 4 * 2**20, "body_timeout_s": 20.0}
    async with rig(**limits) as r, AsyncExitStack() as stack:
        readers = [await stack.enter_async_context(upload(r, 2**20, 900_000)) for _ in range(6)]
        answers = [asyncio.create_task(answer(reader)) for reader in readers]
        await r.until(lambda: sum(a.done() for a in answers) >= 3)
        refused = [a.result() for a in answers if a.done()]
        assert len(refused) == 3  # three of 0.9 MB fit in three quarters of 4 MiB
        for status, headers, body in refused:
            assert (status, headers["Connection"], headers["Retry-After"]) == (503, "close", "1")
            assert body["error"]["code"] == "service_unavailable"
        big = ASKS | {"metadata": {"text": "x" * 600_000}}
        assert (await r.post(COMPLETION, big))[0] == 503
        async with openai.AsyncOpenAI(base_url=f"{r.url}/v1", api_key="none", max_retries=0) as client:
            assert (await client.completions.create(model="tiny", **ASKS)).choices[0].text == "w0 "
        for task in answers:
            task.cancel()
        await stack.aclose()  # the uploads are aborted and their bytes are free
        await r.until(lambda: r.gateway.num_active == 0)
        assert [(await r.post(COMPLETION, big))[0] for _ in range(8)] == [200] * 8


async def test_the_announced_size_is_checked_before_the_body_arrives(rig) -> None:
    async with rig(max_body_bytes=10_000) as r, upload(r, 10_001, 0) as reader:
        status, headers, body = await answer(reader)
        assert (status, headers["Connection"], body["error"]["code"]) == (413, "close", "request_too_large")
    async with rig(max_body_bytes=100_000, max_total_body_bytes=100_000) as r, upload(r, 100_000, 90_000) as first:
        await asyncio.sleep(0.1)
        async with upload(r, 99_000, 0) as reader:
            assert (await answer(reader))[0] == 503
        assert not first.at_eof()


async def test_a_body_of_the_largest_size_is_served(rig) -> None:
    padded = msgspec.json.encode(ASKS).ljust(10_000)
    async with rig(max_body_bytes=10_000, max_total_body_bytes=20_000) as r:
        assert (await r.post(COMPLETION, padded))[0] == 200
        assert (await r.post(COMPLETION, padded + b" "))[0] == 413


async def test_a_compressed_body_counts_with_its_decompressed_size(rig) -> None:
    async with rig(max_body_bytes=10_000) as r:
        body = gzip.compress(b'{"prompt": "' + b"x" * 1_000_000 + b'"}')
        assert (await r.post(COMPLETION, body, headers={"Content-Encoding": "gzip"}))[0] == 413
        fits = gzip.compress(msgspec.json.encode(ASKS))
        assert (await r.post(COMPLETION, fits, headers={"Content-Encoding": "gzip"}))[0] == 200


async def test_a_request_id_has_128_characters_at_most(rig) -> None:
    """Every streamed event repeats the id: without a bound, a body of 8 MB became an answer of 647 MB."""
    async with rig() as r:
        for path, asks in (
            (COMPLETION, ASKS),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
        ):
            status, body = await r.post(path, asks | {"request_id": "é" * 129})
            assert (status, body["error"]["param"]) == (400, "request_id")
            status, body = await r.post(path, asks | {"request_id": "é" * 128})
            assert status == 200 and body["id"].endswith("-" + "é" * 128)
