"""kill -9 of a service in mid-stream does not change any answer.

There are two workers, and requests with one choice and with several. Tokens of mock workers do not depend on KV,
but a mock worker checks that the KV which a plan relies on is there, and ends with a PlanError if not.

Mock workers make no masks: structured output is on two workers with the demo model, with plain streams beside it. So
are tool calls and reasoning.
"""

import asyncio
import json
import os
import signal
import time
from collections.abc import Callable, Coroutine, Iterator
from functools import partial
from typing import Any

import aiohttp
import pytest
from rig import OnRead, Server, completion, read_all, run_all, serve, stream
from several_choices import KINDS, ask
from several_choices import bodies as several

STEP_MS = 10
NUM_TOKENS = 120
NUM_STREAMS = 8
Read = Callable[[aiohttp.ClientSession, str, dict[str, Any], OnRead], Coroutine[Any, Any, object]]


@pytest.fixture(scope="module")
def ring(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    flags = ("--worker-cls", "mock", "--mock-step-ms", str(STEP_MS), "--detokenizers", "2", "--tokenizers", "2")
    log = tmp_path_factory.mktemp("ring") / "log"
    with serve("demo", *flags, "--data-parallel-size", "2", log=log) as server:
        yield server
    assert "PlanError" not in log.read_text("utf-8", "replace")


def bodies() -> list[dict[str, object]]:
    return [completion(NUM_TOKENS, prompt=f"def stream_{i}():", seed=i) for i in range(NUM_STREAMS)]


async def message(session: aiohttp.ClientSession, url: str, text: str, on_read: OnRead) -> object:
    """The text of a streamed answer of /v1/messages, whose events have to be in order, each block ended once."""
    asked = {"model": "demo", "messages": [{"role": "user", "content": text}], "max_tokens": NUM_TOKENS, "stream": True}
    async with session.post(f"{url}/v1/messages", json=asked | {"seed": 1, "ignore_eos": True}) as response:
        lines = (await read_all(response, on_read, b"content_block_delta")).split("\n")
    events = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: ")]
    kinds = [event["type"] for event in events if event["type"] != "ping"]
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert set(kinds[2:-3]) == {"content_block_delta"}
    assert events[-2]["usage"]["output_tokens"] == NUM_TOKENS
    return "".join(event["delta"]["text"] for event in events if event["type"] == "content_block_delta")


async def run_and_kill(server: Server, *titles: str) -> list[object]:
    """Runs all at once and kills each named process when streams have begun, half a second apart.

    Returns texts, then texts of messages, then ids of choices.
    """

    async def text(body: dict[str, object], on_read: OnRead) -> object:
        return (await stream(session, server.url, body, on_read)).text

    async def kill() -> None:
        for i, title in enumerate(titles):
            await asyncio.sleep(0.5 if i else 0.0)
            os.kill(next(pid for name, pid in server.children().items() if title in name), signal.SIGKILL)

    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(60)) as session:
        readers: list[Callable[[OnRead], Coroutine[Any, Any, object]]] = [partial(text, body) for body in bodies()]
        readers += [partial(message, session, server.url, f"say {i}") for i in range(2)]
        begin = len(readers)  # the others include answers that come as a whole
        readers += [partial(ask, session, server.url, body) for body in several(len(KINDS), NUM_TOKENS)]
        return await run_all(readers, kill if titles else None, begin)


@pytest.fixture(scope="module")
def undisturbed(ring: Server) -> list[object]:
    answers = asyncio.run(run_and_kill(ring))
    assert all(answers)
    return answers


def wait_until_whole(server: Server, *titles: str) -> None:
    deadline = time.monotonic() + 20
    while not all(any(t in name for name in server.children()) for t in titles):
        assert time.monotonic() < deadline, "the launcher did not restart what was killed"
        time.sleep(0.1)


@pytest.mark.parametrize(
    "victims",
    [
        ("detokenizer",),
        ("gpu_worker",),
        ("scheduler",),
        ("tokenizer_pool",),
        ("message_bus",),
        ("message_bus", "scheduler"),
    ],
    ids="+".join,
)
def test_streams_survive(ring: Server, undisturbed: list[object], victims: tuple[str, ...]) -> None:
    assert asyncio.run(run_and_kill(ring, *victims)) == undisturbed
    wait_until_whole(ring, *victims)


SCHEMA = {
    "type": "object",
    "properties": {
        "rows": {"type": "array", "items": {"type": "string", "minLength": 3, "maxLength": 20}, "minItems": 60},
    },
    "required": ["rows"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def model_ring() -> Iterator[Server]:
    """Prompts open no reasoning: models of this parser think by themselves, up to their budget."""
    flags = ("--dtype", "float32", "--batch-invariant", "--data-parallel-size", "2", "--enable-auto-tool-choice")
    with serve("demo", *flags, "--tool-call-parser", "hermes", "--reasoning-parser", "deepseek_r1") as server:
        yield server


def guided_bodies() -> list[dict[str, Any]]:
    """Streams in turn with a schema, without, and with a schema and two choices."""
    kinds: list[dict[str, Any]] = [
        {"structured_outputs": {"json": SCHEMA}},
        {},
        {"structured_outputs": {"json": SCHEMA}, "n": 2},
    ]
    return [
        completion(120, prompt=f"Rows {i}: ", seed=i, temperature=1.0) | {"stream": True} | kinds[i % 3]
        for i in range(6)
    ]


async def run_and_kill_guided(server: Server, victim: str, read: Read, bodies: list[dict[str, Any]]) -> list[object]:
    """What `read` returns for each body. Kills a process, or all matchers, when the first, which has masks, runs."""

    async def kill() -> None:
        named = [pid for name, pid in server.children().items() if victim in name]
        pids = server.matchers() if victim == "matcher" else named[:1]
        assert pids
        for pid in pids:
            os.kill(pid, signal.SIGKILL)

    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(60)) as session:
        readers = [partial(read, session, server.url, body) for body in bodies]
        return await run_all(readers, kill if victim else None, 1)


@pytest.fixture(scope="module")
def undisturbed_guided(model_ring: Server) -> list[object]:
    answers = asyncio.run(run_and_kill_guided(model_ring, "", ask, guided_bodies()))
    assert all(answers)
    return answers


@pytest.mark.parametrize("victim", ["matcher", "gpu_worker", "scheduler"])
def test_guided_streams_survive(model_ring: Server, undisturbed_guided: list[object], victim: str) -> None:
    before = model_ring.matchers()
    assert asyncio.run(run_and_kill_guided(model_ring, victim, ask, guided_bodies())) == undisturbed_guided
    if victim == "matcher":
        assert before and set(model_ring.matchers()).isdisjoint(before)
    else:
        wait_until_whole(model_ring, victim)


def parsed_bodies() -> list[dict[str, Any]]:
    """Chat streams in turn: reasoning and forced calls, the same twice, reasoning and a schema, reasoning alone."""
    tools = [{"type": "function", "function": {"name": name, "parameters": SCHEMA}} for name in ("note", "list")]
    forced = {"tools": tools, "tool_choice": "required", "thinking_token_budget": 30}
    schema = {"response_format": {"type": "json_schema", "json_schema": {"name": "rows", "schema": SCHEMA}}}
    kinds: list[dict[str, Any]] = [
        forced,
        forced | {"n": 2},
        schema | {"thinking_token_budget": 40},
        {"ignore_eos": True},
    ]
    common = {"model": "demo", "max_tokens": 160, "min_tokens": 60, "temperature": 1.0, "stream": True}
    return [
        common
        | {"messages": [{"role": "user", "content": f"Write a function that returns {i} rows."}], "seed": i}
        | kinds[i % 4]
        for i in range(8)
    ]


async def read_parts(session: aiohttp.ClientSession, url: str, body: dict[str, Any], on_read: OnRead) -> object:
    """Reasoning, content, calls and the reason of the end of each choice, joined from the stream."""
    found = [{"reasoning": "", "content": "", "calls": [], "end": None} for _ in range(body.get("n", 1))]
    async with session.post(f"{url}/v1/chat/completions", json=body) as answer:
        text = await read_all(answer, on_read, b'"reasoning"')
    assert answer.status == 200 and 'data: {"error"' not in text, text[-500:]
    for line in text.splitlines():
        if not line.startswith("data: {"):
            continue
        for choice in json.loads(line[6:])["choices"]:
            parts: dict[str, Any] = found[choice["index"]]
            parts["reasoning"] += choice["delta"].get("reasoning") or ""
            parts["content"] += choice["delta"].get("content") or ""
            parts["end"] = choice["finish_reason"] or parts["end"]
            for piece in choice["delta"].get("tool_calls") or []:
                if piece.get("id"):
                    parts["calls"].append([piece["function"]["name"], ""])
                assert piece["index"] == len(parts["calls"]) - 1
                parts["calls"][-1][1] += piece["function"].get("arguments") or ""
    return found


@pytest.fixture(scope="module")
def undisturbed_parsed(model_ring: Server) -> list[object]:
    answers: list[Any] = asyncio.run(run_and_kill_guided(model_ring, "", read_parts, parsed_bodies()))
    for choice in (choice for answer in answers for choice in answer):
        assert choice["reasoning"]
    assert all(choice["calls"] for i in (0, 1, 4, 5) for choice in answers[i])
    assert all(choice["content"].lstrip().startswith("{") for i in (2, 6) for choice in answers[i])
    return answers


@pytest.mark.parametrize("victim", ["matcher", "gpu_worker", "scheduler", "detokenizer"])
def test_calls_and_reasoning_survive(model_ring: Server, undisturbed_parsed: list[object], victim: str) -> None:
    found = asyncio.run(run_and_kill_guided(model_ring, victim, read_parts, parsed_bodies()))
    assert found == undisturbed_parsed
    if victim != "matcher":
        wait_until_whole(model_ring, victim)


def test_blocks_of_a_killed_gateways_requests_are_freed(ring: Server) -> None:
    """Its connections drop, and the scheduler cancels its requests: blocks go back to 0."""

    async def doomed() -> None:
        async with aiohttp.ClientSession() as session:
            task = asyncio.create_task(stream(session, ring.url, completion(100_000 // 50)))
            await asyncio.sleep(1.0)
            pid = next(pid for name, pid in ring.children().items() if "api_gateway" in name)
            os.kill(pid, signal.SIGKILL)
            with pytest.raises(aiohttp.ClientError):
                await task

    asyncio.run(doomed())
    asyncio.run(blocks_become_free(ring))


async def blocks_become_free(server: Server) -> None:
    deadline = time.monotonic() + 20
    async with aiohttp.ClientSession() as session:
        while time.monotonic() < deadline:
            try:
                async with session.get(f"{server.url}/ring") as answer:
                    totals = (await answer.json())["totals"]
                    if totals["blocks_total"] and not totals["blocks_used"] and not totals["running"]:
                        return
            except aiohttp.ClientError:
                pass  # the gateway is being restarted
            await asyncio.sleep(0.2)
    pytest.fail("blocks of a request that nobody waits for are still in use")
