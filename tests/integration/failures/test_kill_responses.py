"""kill -9 of a service in mid-stream of /v1/responses: events stay numbered, and each item ends once, as without it."""

import asyncio
import json
import os
import signal
from collections.abc import Iterator
from functools import partial
from typing import Any

import aiohttp
import pytest
from rig import OnRead, Server, read_all, run_all, serve

SCHEMA = {
    "type": "object",
    "properties": {
        "rows": {"type": "array", "items": {"type": "string", "minLength": 3, "maxLength": 20}, "minItems": 30},
    },
    "required": ["rows"],
    "additionalProperties": False,
}
TOOLS = [{"type": "function", "name": name, "parameters": SCHEMA, "strict": True} for name in ("note", "list")]
FLAGS = ("--dtype", "float32", "--batch-invariant", "--data-parallel-size", "2", "--enable-auto-tool-choice")


@pytest.fixture(scope="module")
def ring() -> Iterator[Server]:
    with serve("demo", *FLAGS, "--tool-call-parser", "hermes", "--reasoning-parser", "deepseek_r1") as server:
        yield server


def bodies() -> list[dict[str, Any]]:
    """Streams in turn: reasoning and forced calls, reasoning and a schema, reasoning alone."""
    text = {"format": {"type": "json_schema", "name": "rows", "schema": SCHEMA}}
    kinds: list[dict[str, Any]] = [
        {"tools": TOOLS, "tool_choice": "required", "thinking_token_budget": 30},
        {"text": text, "thinking_token_budget": 40},
        {"ignore_eos": True},
    ]
    common = {"model": "demo", "max_output_tokens": 120, "min_tokens": 60, "temperature": 1.0, "stream": True}
    return [common | {"input": f"Return {i} rows.", "seed": i} | kinds[i % 3] for i in range(3)]


async def read(session: aiohttp.ClientSession, url: str, body: dict[str, Any], on_read: OnRead) -> list[dict[str, Any]]:
    """The items of the answer without their ids, checked against its events. on_read: called at each read of text."""
    async with session.post(f"{url}/v1/responses", json=body) as answer:
        text = await read_all(answer, on_read, b".delta")
    assert answer.status == 200, text[-500:]
    events = [json.loads(one.partition("data: ")[2]) for one in text.split("\n\n")[:-1] if not one.startswith(":")]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    kinds = [event["type"] for event in events]
    assert kinds[-1] in ("response.completed", "response.incomplete")
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert kinds.count("response.output_item.added") == len(done) and events[-1]["response"]["output"] == done
    sums = ["" for _ in done]
    for event in events:
        if event["type"].endswith(".delta"):
            sums[event["output_index"]] += event["delta"]
    assert sums == [item["arguments"] if "arguments" in item else item["content"][0]["text"] for item in done]
    return [{name: value for name, value in item.items() if name not in ("id", "call_id")} for item in done]


async def run_and_kill(server: Server, victim: str) -> list[Any]:
    async def kill() -> None:
        os.kill(next(pid for name, pid in server.children().items() if victim in name), signal.SIGKILL)

    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(60)) as session:
        readers = [partial(read, session, server.url, body) for body in bodies()]
        return await run_all(readers, kill if victim else None)


@pytest.fixture(scope="module")
def undisturbed(ring: Server) -> list[Any]:
    answers = asyncio.run(run_and_kill(ring, ""))
    assert {item["type"] for items in answers for item in items} >= {"reasoning", "function_call"}
    return answers


@pytest.mark.parametrize("victim", ["detokenizer", "gpu_worker", "scheduler"])
def test_items_survive(ring: Server, undisturbed: list[Any], victim: str) -> None:
    assert asyncio.run(run_and_kill(ring, victim)) == undisturbed
