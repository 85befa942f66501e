"""Streamed answers on real sockets: format, slow and disconnected clients, keep-alives, draining."""

import asyncio
import gc
import socket
from typing import Any

import aiohttp
import msgspec
import pytest
from fake_ring import SCHEDULER

from blockyard.services.api_gateway.apis.completions import COMPLETIONS
from blockyard.services.api_gateway.apis.interface import Usage
from blockyard.services.api_gateway.requests.generate_request import ResponseOptions
from blockyard.services.api_gateway.responses.event_stream import EventStream, Kept, merged
from blockyard.services.api_gateway.responses.response_writer import ResponseWriter, UnreadText
from blockyard.shared.messages import (
    Cancel,
    Generate,
    QueueCapacity,
    QueueCapacityChanged,
    Refused,
    Role,
    TextDelta,
    Tokenize,
)

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
USER = [{"role": "user", "content": "hi"}]


def completion(**fields: Any) -> dict[str, Any]:
    return {"prompt": "hello", "max_tokens": 5, "stream": True} | fields


async def raw(
    port: int, body: dict[str, Any], version: str = "1.1", rcvbuf: int = 0, headers: str = ""
) -> tuple[Any, Any]:
    """A connection on which `body` was posted."""
    sock = socket.socket()
    if rcvbuf:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, rcvbuf)
    sock.setblocking(False)
    await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", port))
    reader, writer = await asyncio.open_connection(sock=sock)
    send(writer, body, version, headers)
    return reader, writer


def send(writer: Any, body: Any, version: str = "1.1", headers: str = "") -> None:
    data = msgspec.json.encode(body)
    head = f"POST {COMPLETION} HTTP/{version}\r\nHost: x\r\nContent-Type: application/json\r\n"
    writer.write(f"{head}{headers}Content-Length: {len(data)}\r\n\r\n".encode() + data)


def dechunked(data: bytes) -> bytes:
    out = b""
    while data:
        size, _, data = data.partition(b"\r\n")
        length = int(size, 16)
        assert data[length : length + 2] == b"\r\n"
        out, data = out + data[:length], data[length + 2 :]
        if length == 0:
            break
    return out


async def test_the_bytes_of_a_stream(rig) -> None:
    async with rig() as r:
        reader, writer = await raw(r.port, completion(max_tokens=2))
        head = await reader.readuntil(b"\r\n\r\n")
        body = dechunked(await reader.readuntil(b"\r\n0\r\n\r\n"))
        writer.close()
    assert head.startswith(b"HTTP/1.1 200 OK\r\n") and b"Content-Type: text/event-stream" in head
    first, last, done, rest = body.split(b"\n\n")
    event = msgspec.json.decode(first.removeprefix(b"data: "))
    empty = ("logprobs", "finish_reason", "stop_reason", "token_ids", "prompt_token_ids")
    assert event["id"].startswith("cmpl-") and isinstance(event["created"], int)
    assert event | {"id": "", "created": 0} == {
        "id": "",
        "object": "text_completion",
        "created": 0,
        "model": "tiny",
        "choices": [{"index": 0, "text": "w0 "} | dict.fromkeys(empty)],
    }
    assert msgspec.json.decode(last.removeprefix(b"data: "))["choices"][0]["finish_reason"] == "length"
    assert (done, rest) == (b"data: [DONE]", b"")


async def test_a_connection_is_used_again(rig) -> None:
    async with rig() as r:
        reader, writer = await raw(r.port, completion(max_tokens=2))
        for _ in range(3):
            await reader.readuntil(b"\r\n0\r\n\r\n")
            send(writer, completion(max_tokens=2))
        assert b"[DONE]" in await reader.readuntil(b"\r\n0\r\n\r\n")
        writer.close()


@pytest.mark.parametrize("headers", ["", "Connection: keep-alive\r\n"])
async def test_http_1_0_gets_plain_bytes_and_the_close(rig, headers: str) -> None:
    async with rig() as r:
        reader, writer = await raw(r.port, completion(max_tokens=3), "1.0", headers=headers)
        async with asyncio.timeout(5):
            head, _, body = (await reader.read()).partition(b"\r\n\r\n")
        writer.close()
    assert b"chunked" not in head.lower() and b"keep-alive" not in head.lower()
    assert [e.split(b":")[0] for e in body.split(b"\n\n") if e] == [b"data"] * 4


@pytest.mark.parametrize("text", ['é漢🎉\n\r"\\\u2028', "\x00\x1f", "x" * 5000])
async def test_any_text_arrives_as_it_is(rig, text: str) -> None:
    async with rig() as r:
        r.ring.script = lambda request_id, index: text
        events = await r.events(COMPLETION, completion(max_tokens=3))
        whole = await r.post(CHAT, {"messages": USER, "max_tokens": 3})
    assert "".join(e["choices"][0]["text"] for e in events[:-1]) == 3 * text
    assert whole[1]["choices"][0]["message"]["content"] == 3 * text


async def test_text_held_back_makes_no_event(rig) -> None:
    async with rig() as r:
        r.ring.script = lambda request_id, index: "" if index % 2 == 0 else f"{index} "
        events = await r.events(COMPLETION, completion(max_tokens=6))
    assert [e["choices"][0]["text"] for e in events[:-1]] == ["1 ", "3 ", "5 "]


async def test_stop_strings_and_their_reason(rig) -> None:
    async with rig() as r:
        events = await r.events(COMPLETION, completion(stop=["w2"], max_tokens=9))
    last = events[-2]["choices"][0]
    assert (last["text"], last["finish_reason"], last["stop_reason"]) == ("", "stop", "w2")
    assert "".join(e["choices"][0]["text"] for e in events[:-1]) == "w0 w1 "


async def test_extras_of_events(rig) -> None:
    async with rig() as r:
        r.ring.stamp_s = 1234.5
        events = await r.events(
            COMPLETION,
            completion(
                max_tokens=2,
                return_stamps=True,
                return_token_ids=True,
                stream_options={"include_usage": True, "continuous_usage_stats": True},
            ),
        )
    assert [e["stamp"] for e in events[:2]] == [1234.5, 1234.5]
    assert [e["choices"][0]["token_ids"] for e in events[:2]] == [[97], [98]]
    assert [e["usage"]["completion_tokens"] for e in events[:3]] == [1, 2, 2] and events[2]["choices"] == []


async def test_echo_comes_first(rig) -> None:
    async with rig() as r:
        events = await r.events(COMPLETION, completion(prompt="ab", echo=True, logprobs=1, max_tokens=2))
    first, second = events[0]["choices"][0], events[1]["choices"][0]
    assert (first["text"], second["text"]) == ("abw0 ", "w1 ")
    assert first["logprobs"]["tokens"] == ["a", "b", "a"] and second["logprobs"]["tokens"] == ["b"]
    assert first["logprobs"]["token_logprobs"] == [None, -1.5, -1.5]
    assert first["logprobs"]["text_offset"] == [0, 1, 2] and second["logprobs"]["text_offset"] == [5]


@pytest.mark.parametrize("stream", [True, False])
async def test_a_disconnected_client_is_cancelled(rig, stream: bool) -> None:
    async with rig() as r:
        r.ring.step_s = 0.01
        _, writer = await raw(r.port, completion(max_tokens=200, stream=stream, n=2))
        await r.until(lambda: r.gateway.meters.output_tokens > 4)
        writer.close()
        await r.until(lambda: bool(r.ring.frames(Cancel)))
        [sent] = r.ring.frames(Generate)
        assert r.ring.frames(Cancel) == [Cancel(sent.request_id, 0)]
        await r.until(lambda: not r.ring.running and r.gateway.num_active == 0)
        assert r.gateway.journal.entries == {}


@pytest.mark.parametrize("role", [Role.TOKENIZER_POOL, Role.SCHEDULER])
async def test_a_client_that_disconnects_before_the_first_token(rig, role: Role) -> None:
    async with rig() as r:
        r.ring.silent = {role}
        _, writer = await raw(r.port, completion())
        await r.until(lambda: bool(r.ring.frames(Tokenize if role == Role.TOKENIZER_POOL else Generate)))
        writer.close()
        await r.until(lambda: r.gateway.num_active == 0)
        assert bool(r.ring.frames(Cancel)) is (role == Role.SCHEDULER)
        assert r.gateway.journal.entries == {}


@pytest.mark.parametrize("middleware", [[], ["user_middlewares.First"], ["user_middlewares.function"]])
async def test_a_slow_reader_delays_no_other_stream_and_gets_all_of_its_text(rig, middleware: list[str]) -> None:
    """The client stops reading, another stream runs to its end, then the first gets all text in fewer events."""
    async with rig(middleware=middleware) as r:
        r.ring.script = lambda request_id, index: f"[{index}]" + "x" * 60_000
        reader, writer = await raw(r.port, completion(max_tokens=200), rcvbuf=4096)
        await r.until(lambda: r.gateway.meters.output_tokens == 200)
        assert r.gateway.journal.entries == {}, "all of it has arrived, though the client has not read it"
        r.ring.script = lambda request_id, index: "quick "
        events = await r.events(COMPLETION, completion(max_tokens=5))
        assert len(events) == 6
        await reader.readuntil(b"\r\n\r\n")
        data = dechunked(await whole_body(reader))
        writer.close()
        await r.until(lambda: r.gateway.num_active == 0)
    got = [msgspec.json.decode(e[6:]) for e in data.split(b"\n\n") if e.startswith(b"data: {")]
    text = "".join(e["choices"][0]["text"] for e in got)
    assert text == "".join(f"[{i}]" + "x" * 60_000 for i in range(200))
    assert len(got) < 200
    assert [e["choices"][0]["finish_reason"] for e in got] == [None] * (len(got) - 1) + ["length"]


async def whole_body(reader: asyncio.StreamReader) -> bytes:
    data = b""
    while not data.endswith(b"\r\n0\r\n\r\n"):
        data += await reader.read(1 << 20)
    return data


@pytest.mark.parametrize("middleware", [[], ["user_middlewares.First"], ["user_middlewares.function"]])
async def test_unread_text_is_bounded_and_the_slowest_client_is_cancelled(rig, middleware: list[str]) -> None:
    """Two clients read nothing: the one with more unread text is cancelled, the other gets its whole answer."""
    async with rig(max_unread_mib=8, middleware=middleware) as r:
        r.ring.script = lambda request_id, index: "x" * 60_000
        r.ring.step_s = 0.005
        small, small_writer = await raw(r.port, completion(max_tokens=60), rcvbuf=4096)
        await r.until(lambda: r.gateway.meters.output_tokens == 60)
        _, large_writer = await raw(r.port, completion(max_tokens=240), rcvbuf=4096)
        await r.until(lambda: bool(r.ring.frames(Cancel)))
        assert r.gateway.meters.output_tokens < 60 + 240
        await r.until(lambda: r.gateway.num_active == 1)
        assert 0 < r.gateway.streams.unread_text.num_bytes <= 60 * 60_100
        await small.readuntil(b"\r\n\r\n")
        data = dechunked(await whole_body(small))
        small_writer.close()
        large_writer.close()
        await r.until(lambda: r.gateway.num_active == 0)
        assert r.gateway.streams.unread_text.num_bytes == 0
    got = [msgspec.json.decode(e[6:]) for e in data.split(b"\n\n") if e.startswith(b"data: {")]
    assert sum(len(e["choices"][0]["text"]) for e in got) == 60 * 60_000


def test_kept_deltas_are_merged_without_losing_text() -> None:
    """4,000 unread tokens are kept as 64 times fewer objects and give the same text."""
    unread_text = UnreadText(1 << 20)
    writer = ResponseWriter(unread_text)
    options = ResponseOptions("cmpl-1", 1, "tiny")
    stream = EventStream(options, COMPLETIONS.events(options).choice(0, None), writer, lambda: Usage(0, 0))
    for i in range(4000):
        stream.push(TextDelta("r", 0, 0, i, [i], f"{i} "), 0.0, 1.0)
    gc.collect()
    kept = [one for one in gc.get_objects() if type(one) is Kept]
    assert len(kept) <= 4000 // 64 + 64
    together = merged(sorted(kept, key=lambda one: one.delta.first)).delta
    assert (together.token_ids, together.text) == ([*range(4000)], "".join(f"{i} " for i in range(4000)))
    assert unread_text.num_bytes == 4000 * 64 + len(together.text)


@pytest.mark.parametrize("middleware", [[], ["user_middlewares.First"], ["user_middlewares.function"]])
@pytest.mark.parametrize("num_tokens", [250, 200])
async def test_a_client_that_reads_nothing_is_cancelled(rig, num_tokens: int, middleware: list[str]) -> None:
    """While its text is generated, and after its end."""
    async with rig(client_timeout_s=0.3, middleware=middleware) as r:
        r.ring.script = lambda request_id, index: "x" * 60_000
        r.ring.step_s = 0.0 if num_tokens == 200 else 0.01
        _, writer = await raw(r.port, completion(max_tokens=num_tokens), rcvbuf=4096)
        await r.until(lambda: r.gateway.num_active == 1)
        await r.until(lambda: r.gateway.num_active == 0)
        assert bool(r.ring.frames(Cancel)) is (num_tokens == 250)
        writer.close()


@pytest.mark.parametrize(("path", "body"), [(CHAT, {"messages": USER}), (COMPLETION, {"prompt": "hello"})])
async def test_a_failure_instead_of_the_first_token_is_a_status(rig, path: str, body: dict[str, Any]) -> None:
    async with rig() as r:
        r.ring.fail_at = 0
        status, error = await r.post(path, body | {"stream": True})
    assert (status, error["error"]["message"]) == (500, "the worker stumbled")


async def test_the_status_of_a_stream_waits_for_its_first_token_but_not_for_long(rig) -> None:
    async with rig(keepalive_s=0.2) as r:
        r.ring.silent.add(Role.DETOKENIZER)
        async with r.http.post(CHAT, json={"messages": USER, "stream": True}) as response:
            assert response.status == 200
            assert b'"role":"assistant"' in await response.content.readuntil(b"\n\n")


async def test_a_silent_stream_gets_keep_alive_comments(rig) -> None:
    async with rig(keepalive_s=0.1) as r:
        r.ring.silent = {Role.DETOKENIZER}
        reader, writer = await raw(r.port, completion())
        for _ in range(2):
            await asyncio.wait_for(reader.readuntil(b": keep-alive\n\n\r\n"), 5)
        writer.close()


async def test_without_an_interval_a_silent_stream_stays_silent(rig) -> None:
    async with rig(keepalive_s=0) as r:
        r.ring.silent = {Role.DETOKENIZER}
        reader, writer = await raw(r.port, completion())
        assert b"200 OK" in await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 8)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(reader.readuntil(b"keep-alive"), 0.3)
        writer.close()


async def test_a_failure_after_the_first_byte_is_one_event_and_the_close(rig) -> None:
    async with rig() as r:
        r.ring.fail_at = 2
        reader, writer = await raw(r.port, completion())
        _, _, body = (await asyncio.wait_for(reader.read(), 5)).partition(b"\r\n\r\n")
        writer.close()
        status, answer = await r.post(COMPLETION, completion(stream=False))
    events = dechunked(body).split(b"\n\n")
    assert len(events) == 4 and events[-1] == b""
    error = msgspec.json.decode(events[-2].removeprefix(b"data: "))["error"]
    assert error == {"message": "the worker stumbled", "type": "server_error", "param": None, "code": None}
    assert (status, answer["error"]) == (500, error)


async def test_one_failing_prompt_cancels_the_others(rig) -> None:
    async with rig() as r:
        r.ring.step_s = 0.01
        r.ring.script = lambda request_id, index: "rest "
        r.ring.refuse = lambda frame: refused(frame, 429) if frame.request_id.endswith("-1") else None
        status, answer = await r.post(COMPLETION, completion(prompt=["a", "b", "c"], max_tokens=100))
        await r.until(lambda: not r.ring.running)
        assert (status, answer["error"]["type"]) == (429, "rate_limit_error")
        assert {f.request_id[-2:] for f in r.ring.frames(Cancel)} == {"-0", "-2"}
        assert r.gateway.journal.entries == {}


def refused(frame: Generate, status: int) -> Refused:
    return Refused(frame.request_id, frame.attempt, status, "", "no room", QueueCapacity(0, 0, 6.2))


async def test_a_full_queue_is_a_429_before_tokenization(rig) -> None:
    async with rig() as r:
        r.ring.capacity = QueueCapacity(0, 0, 6.2)
        assert (await r.post(COMPLETION, completion(stream=False)))[0] == 200  # its Accepted: the queue is full
        r.ring.sent.clear()
        async with r.http.post(CHAT, json={"messages": USER}) as response:
            assert response.status == 429 and response.headers["Retry-After"] == "7"
            assert (await response.json())["error"]["code"] == "rate_limit_exceeded"
        assert r.ring.sent == []
        r.ring.receive(SCHEDULER, QueueCapacityChanged(QueueCapacity(5, 1000)))
        assert (await r.post(COMPLETION, completion(stream=False)))[0] == 200


async def test_a_queue_full_for_one_tenant_accepts_others(rig) -> None:
    async with rig(api_keys=["sk-a", "sk-b"]) as r:
        r.ring.capacity = QueueCapacity(0, 0, 6.2, "key-0", "ann")

        async def ask(key: str, user: str) -> int:
            headers = {"Authorization": f"Bearer {key}"}
            return (await r.post(COMPLETION, completion(stream=False, user=user), headers=headers))[0]

        assert await ask("sk-b", "ann") == 200  # its Accepted: full for ann of the first key
        assert [await ask("sk-a", "ann"), await ask("sk-a", "bob"), await ask("sk-b", "ann")] == [429, 200, 200]


@pytest.mark.parametrize("stream", [True, False])
async def test_a_refusal_of_the_scheduler_is_a_status_code(rig, stream: bool) -> None:
    async with rig() as r:
        r.ring.refuse = lambda frame: refused(frame, 429)
        async with r.http.post(COMPLETION, json=completion(stream=stream)) as response:
            assert response.status == 429 and response.headers["Retry-After"] == "7"


async def test_the_drain_lets_running_requests_end(rig) -> None:
    async with rig() as r:
        r.ring.step_s = 0.01
        stream = asyncio.create_task(r.events(COMPLETION, completion(max_tokens=50)))
        async with aiohttp.ClientSession(r.url) as other:
            async with other.get("/ready") as response:  # leaves an open connection
                assert response.status == 200
            await r.until(lambda: r.gateway.meters.output_tokens > 3)
            drain = asyncio.create_task(r.server.drain())
            await r.until(lambda: r.gateway.draining)
            assert not r.ring.me.ready
            async with other.post(COMPLETION, json=completion()) as response:
                assert response.status == 503 and (await response.json())["error"]["code"] == "service_unavailable"
            with pytest.raises(aiohttp.ClientConnectionError):
                async with aiohttp.ClientSession(r.url) as new, new.get("/live"):
                    pass
            assert not drain.done()
            assert len(await stream) == 51
            await asyncio.wait_for(drain, 5)


async def test_the_drain_has_an_end(rig) -> None:
    async with rig(shutdown_timeout_s=0.2) as r:
        r.ring.step_s = 0.05
        stream = asyncio.create_task(r.events(COMPLETION, completion(max_tokens=200)))
        await r.until(lambda: r.gateway.meters.output_tokens > 1)
        await asyncio.wait_for(r.server.drain(), 5)
        assert (await stream)[-1]["error"]["code"] == "service_unavailable"
        assert len(r.ring.frames(Cancel)) == 1
