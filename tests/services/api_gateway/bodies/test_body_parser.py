"""Large bodies are parsed in a process of their own: same answers, no stream pauses, bounded CPU time."""

import asyncio
import io
import os
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import pairwise
from typing import Any

import msgspec
import pytest
from fake_links import FakeLinks
from fake_ring import CARD

from blockyard.services.api_gateway.adapter_folders import AdapterFolders
from blockyard.services.api_gateway.bodies.body_frames import framed
from blockyard.services.api_gateway.bodies.body_parser import LARGE_BYTES, MAX_CPU_S, MODULE, BodyParser
from blockyard.services.api_gateway.bodies.parse_body import ParseContext
from blockyard.shared.config.services.gateway import GatewayConfig, ParserPlugins
from blockyard.shared.config.services.process import BusConfig, ProcessConfig
from blockyard.shared.errors import RequestError
from blockyard.shared.messages import Member, Role
from blockyard.shared.ring_client.controls import ControlClient
from blockyard.shared.ring_client.request_fields.output_format import ModelFormats
from blockyard.shared.ring_client.schedulers import Schedulers, Served

PROCESS = ProcessConfig(name="gateway", bus=BusConfig(registry="ipc:///unused", bind="ipc:///unused"))
CONTEXT = ParseContext("chat", "id", Served([CARD], []))
COMPLETION, CHAT = "/v1/completions", "/v1/chat/completions"
PADDING = b" " * LARGE_BYTES
USER = [{"role": "user", "content": "hello"}]


def nested(num_bytes: int) -> bytes:
    """A body that takes a second of CPU time for each 3 MB."""
    lists = b"[]," * (num_bytes // 3)
    return b'{"messages":[{"role":"user","content":"a"}],"chat_template_kwargs":{"a":[' + lists + b"[]]}}"


BODIES: list[tuple[str, dict[str, Any]]] = [
    (CHAT, {"messages": USER, "max_tokens": 2, "seed": -(2**70), "logprobs": True, "top_logprobs": 2}),
    (CHAT, {"messages": USER, "max_tokens": 2, "n": 2, "stop": ["w1"], "logit_bias": {"7": 1.5}, "a_new_field": 1}),
    (CHAT, {"messages": USER, "top_logprobs": 2}),
    (CHAT, {"messages": USER, "model": "nobody's"}),
    (COMPLETION, {"prompt": ["a", [1, 2], "b"], "max_tokens": 1, "echo": True, "logprobs": 1}),
    (COMPLETION, {"prompt": [1, 2, 3], "max_tokens": 1, "use_beam_search": True, "n": 2}),
    (COMPLETION, {"prompt": [1, 2, 300]}),
    (COMPLETION, {"prompt": [[1, 2, 3], [1] * 5000]}),
    (COMPLETION, {"prompt": [1] * 5000, "truncate_prompt_tokens": 3, "max_tokens": 1}),
    (COMPLETION, {"prompt": "a", "max_tokens": "many"}),
    ("/tokenize", {"prompt": "abc", "return_token_strs": True}),
    ("/tokenize", {"messages": USER}),
    ("/detokenize", {"tokens": [104, 105]}),
    ("/detokenize", {"tokens": [-1]}),
]


async def ask(rig: Any, path: str, body: bytes) -> tuple[int, Any, str]:
    """Status, the answer without its varying fields, and the header of ignored fields."""
    async with rig.http.post(path, data=io.BytesIO(body), headers={"Content-Type": "application/json"}) as response:
        answer = await response.json()
        return response.status, answer | {"id": "", "created": 0}, response.headers.get("x-blockyard-ignored", "")


def reader(rig: Any) -> Any:
    return rig.gateway.body_parser.process


async def test_large_bodies_are_answered_as_small_ones(rig) -> None:
    async with rig() as r:
        small = [await ask(r, path, msgspec.json.encode(fields)) for path, fields in BODIES]
        assert reader(r) is None
        large = [await ask(r, path, msgspec.json.encode(fields) + PADDING) for path, fields in BODIES]
        assert large == small
        process = reader(r)
        assert os.getpriority(os.PRIO_PROCESS, process.pid) == min(os.getpriority(os.PRIO_PROCESS, 0) + 10, 19)


async def test_no_stream_pauses_while_a_large_body_is_read(rig) -> None:
    async with rig(max_logprobs=5) as r:
        assert (await ask(r, CHAT, nested(LARGE_BYTES)))[0] == 200  # the process runs
        r.ring.step_s = 0.01
        body, times = nested(12_000_000), []
        async with r.http.post(COMPLETION, json={"prompt": "a", "max_tokens": 400, "stream": True}) as stream:
            asked = asyncio.create_task(ask(r, CHAT, body))
            async for _ in stream.content:
                times.append(time.monotonic())
                if asked.done():
                    break
        assert (await asked)[0] == 200
    assert len(times) > 20, "the body was read before it could disturb anything"
    assert max(after - before for before, after in pairwise(times)) < 0.4


def test_the_process_ends_with_its_stream() -> None:
    ours, theirs = socket.socketpair()
    with theirs:
        command = [sys.executable, "-P", "-m", MODULE, str(os.getpid()), "gateway", "10"]
        process = subprocess.Popen(command, stdin=theirs.fileno())
    ours.sendall(framed(GatewayConfig(process=PROCESS)))
    ours.close()
    assert process.wait(30) == 0


@asynccontextmanager
async def body_parser(max_cpu_s: float = MAX_CPU_S, **fields: Any) -> AsyncIterator[BodyParser]:
    config, formats = GatewayConfig(process=PROCESS, **fields), ModelFormats(ParserPlugins())
    controls = ControlClient(FakeLinks(Member("gateway", Role.API_GATEWAY, 1, "")))
    parser = BodyParser(config, formats, AdapterFolders("", controls, Schedulers([])), max_cpu_s)
    running = asyncio.create_task(parser.run())
    yield parser
    running.cancel()
    await asyncio.wait([running])


async def test_a_body_that_takes_too_long_is_refused_and_the_next_one_is_read() -> None:
    async with body_parser(max_cpu_s=0.2) as parser:
        with pytest.raises(RequestError, match="the body takes too long to be read") as refused:
            await parser.parse(nested(12_000_000), CONTEXT)
        assert refused.value.status == 413
        assert await parser.parse(nested(LARGE_BYTES), CONTEXT)


async def test_integers_of_more_than_64_bits_are_refused(rig) -> None:
    schema = b'{"type": "object", "maxProperties": %d}' % 2**70
    tools = (
        b'"tools": [{"type": "function", "function": {"name": "f", "parameters": %b}}], "tool_choice": "required"'
        % schema
    )
    async with rig() as r:
        body = b'{"messages": [{"role": "user", "content": "a"}], "max_tokens": 1, %b}' % tools
        status, answer, _ = await ask(r, CHAT, body + PADDING)
        assert (status, answer["error"]["param"]) == (400, "body")


async def test_a_body_reader_that_dies_is_replaced(rig) -> None:
    async with rig() as r:
        body = b'{"prompt": "a", "max_tokens": 1}' + PADDING
        assert (await ask(r, COMPLETION, body))[0] == 200
        reader(r).kill()
        assert (await ask(r, COMPLETION, body))[0] in (200, 500), "500 where it died with the body"
        assert (await ask(r, COMPLETION, body))[0] == 200


async def test_bodies_that_wait_are_bounded_and_the_smallest_is_next() -> None:
    async with body_parser(max_body_bytes=2**20) as parser:
        done: list[int] = []

        async def parse(size: int) -> None:
            await parser.parse(nested(size), CONTEXT)
            done.append(size)

        for _ in range(2):  # the second time, what waited before counts no longer
            done.clear()
            busy = asyncio.create_task(parse(2**20 - 200))
            await asyncio.sleep(0)
            await asyncio.sleep(0)  # `run` has taken it
            waiting = [asyncio.create_task(parse(2**20 - 100 - 3 * i)) for i in range(4)]
            await asyncio.sleep(0)
            with pytest.raises(RequestError, match="as many large bodies waiting as it takes") as refused:
                await parse(2**20 - 100)
            assert refused.value.status == 503
            waiting[0].cancel()
            await asyncio.gather(busy, *waiting[1:])
            assert done == [2**20 - 200, 2**20 - 109, 2**20 - 106, 2**20 - 103]
