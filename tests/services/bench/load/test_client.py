"""The load generator against a faulty server."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
import uvloop

from blockyard.services.bench.load import client, results
from blockyard.services.bench.load.client import Endpoint, LoadPlan, LoadRun
from blockyard.services.bench.load.results import RequestResult

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
USAGE = b'data: {"choices":[],"usage":{"prompt_tokens":3,"completion_tokens":2}}\n\n'
DONE = b"data: [DONE]\n\n"
LAST = b"0\r\n\r\n"
HttpResponse = Callable[[bytes, asyncio.StreamWriter], Awaitable[None]]


def event(text: str) -> bytes:
    return b'data: {"choices":[{"index":0,"text":"%b","finish_reason":null}]}\n\n' % text.encode()


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


@contextlib.asynccontextmanager
async def serving(answer: HttpResponse) -> AsyncIterator[Endpoint]:
    """A server that reads a request and calls `answer`; it keeps the connection open if `answer` does."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            head = await reader.readuntil(b"\r\n\r\n")
            length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r")[0])
            await answer(head + await reader.readexactly(length), writer)
            await reader.read()  # until the client closes
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0, backlog=1000)
    try:
        yield Endpoint("localhost", server.sockets[0].getsockname()[1], headers=(("Authorization", "Bearer k"),))
    finally:
        server.close()


def run(
    answer: HttpResponse, num: int = 1, max_concurrency: int | None = None, timeout_s: float = 20.0, gap_s: float = 0.0
) -> tuple[list[RequestResult], LoadRun]:
    load = LoadRun()

    async def measure() -> None:
        async with serving(answer) as endpoint:
            requests = [endpoint.request({"index": i}) for i in range(num)]
            due_s = [i * gap_s for i in range(num)]
            await client.run(endpoint, LoadPlan(requests, due_s, max_concurrency, timeout_s), load)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(measure())
    return [results.read(x, 2) for x in load.exchanges], load


@pytest.mark.parametrize("step", [1, 7, 10_000])
def test_a_stream_in_pieces_of_any_size(step: int) -> None:
    async def answer(request: bytes, writer: asyncio.StreamWriter) -> None:
        assert request.startswith(b"POST /v1/completions HTTP/1.1\r\n") and request.endswith(b'{"index":0}')
        assert b"Authorization: Bearer k\r\n" in request
        both = event("a") + event("ä")
        whole = HEAD + chunk(both[:9]) + chunk(both[9:-1]) + chunk(both[-1:] + USAGE) + chunk(DONE) + LAST
        for i in range(0, len(whole), step):
            writer.write(whole[i : i + step])
            await writer.drain()
            await asyncio.sleep(0)

    (one,), load = run(answer)
    assert (one.failure, len(one.tokens_s), one.num_input, one.num_output) == ("", 2, 3, 2)
    assert load.started_s <= one.sent_s < one.tokens_s[0] <= one.tokens_s[1] == one.ended_s <= load.ended_s
    assert (load.num_ended, load.num_running, load.num_refused) == (1, 0, 0)


def test_times_are_those_of_arrival() -> None:
    async def answer(_: bytes, writer: asyncio.StreamWriter) -> None:
        for data in (HEAD, chunk(event("a")), chunk(event("b")), chunk(DONE) + LAST):
            await asyncio.sleep(0.1)
            writer.write(data)

    (one,), _ = run(answer)
    assert 0.19 < one.tokens_s[0] - one.sent_s < 2  # a loose bound, because the machine may be busy
    assert 0.05 < one.tokens_s[1] - one.tokens_s[0] < 2
    assert one.ended_s == one.tokens_s[1], "[DONE] is no token"


@pytest.mark.parametrize(
    ("data", "failure"),
    [
        (b'HTTP/1.1 429 Too Many\r\nContent-Length: 29\r\n\r\n{"error":{"message":"queue"}}', "HTTP 429: queue"),
        (b"HTTP/1.1 503 No\r\nTransfer-Encoding: chunked\r\n\r\n" + chunk(b"later") + LAST, "HTTP 503: later"),
        (HEAD + chunk(event("a")), "the stream ended before [DONE]"),
        (HEAD + chunk(event("a") + b'data: {"error":{"message":"lost"}}\n\n' + DONE) + LAST, "error event: lost"),
        (HEAD + b"xyz\r\n", "chunk size b'xyz\\r'"),
        (b"", "the connection ended before a response: b''"),
    ],
)
def test_a_failure_is_counted_and_stops_no_other_request(data: bytes, failure: str) -> None:
    async def answer(request: bytes, writer: asyncio.StreamWriter) -> None:
        good = HEAD + chunk(event("a") + DONE) + LAST
        writer.write(good if request.endswith(b'{"index":1}') else data)
        if data in (b"", HEAD + chunk(event("a")), HEAD + b"xyz\r\n"):
            writer.close()

    results, load = run(answer, num=3)
    assert [one.failure for one in results] == [failure, "", failure]
    assert load.num_refused == (2 if b" 200 " not in data else 0), "others are seen in the report"


def test_no_server_and_no_end() -> None:
    async def silence(_: bytes, writer: asyncio.StreamWriter) -> None:
        writer.write(HEAD)

    (one,), load = run(silence, timeout_s=0.2)
    assert one.failure == "no end within 0.2 s" and load.num_refused == 1
    load = LoadRun()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(client.run(Endpoint("127.0.0.1", 1), LoadPlan([b"x"], [0.0]), load))
    assert "refused" in results.read(load.exchanges[0], 1).failure


def test_concurrency_is_kept_and_arrivals_are_on_time() -> None:
    running = [0, 0]  # running requests now, and their maximum

    async def answer(_: bytes, writer: asyncio.StreamWriter) -> None:
        running[0] += 1
        running[1] = max(running)
        await asyncio.sleep(0.02)
        running[0] -= 1
        writer.write(HEAD + chunk(event("a") + DONE) + LAST)

    results, _ = run(answer, num=12, max_concurrency=3)
    assert running[1] == 3 and not any(one.failure for one in results)
    running[:] = [0, 0]
    results, load = run(answer, num=12)
    assert running[1] == 12
    start = time.perf_counter()
    results, load = run(answer, num=5, gap_s=0.1)
    assert time.perf_counter() - start > 0.4
    for i, one in enumerate(results):
        assert one.due_s == pytest.approx(load.started_s + 0.1 * i)
        assert -0.002 < one.sent_s - one.due_s < 2, "timers are good to a millisecond, and the machine may be busy"


def test_many_connections_at_once() -> None:
    async def answer(_: bytes, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(0.2)
        writer.write(HEAD + chunk(event("a") + DONE) + LAST)

    with client.QuietProcess():
        results, _ = run(answer, num=400)
    assert [one.failure for one in results if one.failure] == []
