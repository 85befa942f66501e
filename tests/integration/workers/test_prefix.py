"""Prefix caching through the ring: usage, metrics, and cache hits after kill -9 of the scheduler."""

import asyncio
import os
import signal
from collections.abc import Iterator
from typing import Any

import aiohttp
import pytest
from rig import Server, completion, serve, stream

PROMPT = [300 + i for i in range(100)]  # 6 blocks of 16 tokens, and 4 tokens
NUM_STREAMS = 6


@pytest.fixture(scope="module")
def ring() -> Iterator[Server]:
    with serve("demo", "--worker-cls", "mock", "--mock-step-ms", "10", "--enable-prompt-tokens-details") as server:
        yield server


async def post(server: Server, **fields: object) -> dict[str, Any]:
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{server.url}/v1/completions", json=completion(4, **fields)) as answer,
    ):
        assert answer.status == 200, await answer.text()
        return await answer.json()


def cached(server: Server, **fields: object) -> int:
    return asyncio.run(post(server, **fields))["usage"]["prompt_tokens_details"]["cached_tokens"]


def counter(server: Server, name: str) -> float:
    """From /metrics."""

    async def read() -> str:
        async with aiohttp.ClientSession() as session, session.get(f"{server.url}/metrics") as answer:
            return await answer.text()

    lines = asyncio.run(read()).splitlines()
    [found] = [line for line in lines if line.startswith(f"vllm:{name}{{")]
    return float(found.rpartition(" ")[2])


def test_usage_and_metrics_say_what_was_found(ring: Server) -> None:
    assert cached(ring, prompt=PROMPT) == 0
    assert cached(ring, prompt=PROMPT) == 96
    assert cached(ring, prompt=PROMPT[:96]) == 80, "the last token of a prompt is computed"
    assert cached(ring, prompt=[*PROMPT[:50], 7]) == 48
    assert cached(ring, prompt=PROMPT, cache_salt="mine") == 0
    assert cached(ring, prompt=PROMPT, cache_salt="mine") == 96
    assert cached(ring, prompt=[7, *PROMPT], n=3) == 0, "choices of one request are no hits of its prompt"
    assert counter(ring, "prefix_cache_hits_total") == 96 + 80 + 48 + 96
    assert counter(ring, "prefix_cache_queries_total") == 2 * 100 + 96 + 51 + 2 * 100 + 101


def test_a_salt_keeps_texts_apart(ring: Server) -> None:
    """A tokenizer computes their block hashes."""
    text = "def add(a, b):\n    return a + b\n" * 20
    plain = [cached(ring, prompt=text) for _ in range(2)]
    salted = [cached(ring, prompt=text, cache_salt="mine") for _ in range(2)]
    assert plain == salted and plain[0] == 0 < plain[1]


def test_a_continued_text_finds_generated_blocks(ring: Server) -> None:
    """Block hashes of tokenizer and scheduler belong to one chain."""
    first = asyncio.run(post(ring, prompt=[9, *PROMPT], max_tokens=60, return_token_ids=True))
    ids = first["choices"][0]["token_ids"]
    assert cached(ring, prompt=[9, *PROMPT, *ids, 5]) == 160


def test_after_a_kill_of_the_scheduler_the_worker_still_has_it(ring: Server) -> None:
    """Each prompt is new, so that all hits belong to requests resubmitted to the new scheduler."""

    async def kill() -> list[str]:
        bodies = [completion(150, prompt=[1000 + i, *PROMPT], seed=i) for i in range(NUM_STREAMS)]
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(60)) as session:
            tasks = [asyncio.create_task(stream(session, ring.url, body)) for body in bodies]
            await asyncio.sleep(0.9)
            assert not any(task.done() for task in tasks)
            os.kill(next(pid for name, pid in ring.children().items() if "scheduler" in name), signal.SIGKILL)
            return [log.text for log in await asyncio.gather(*tasks)]

    before = counter(ring, "prefix_cache_hits_total")
    assert all(asyncio.run(kill()))
    assert counter(ring, "prefix_cache_hits_total") >= before + NUM_STREAMS * 96


def test_switched_off(ring: Server) -> None:
    flags = ("--worker-cls", "mock", "--enable-prompt-tokens-details", "--no-enable-prefix-caching")
    with serve("demo", *flags) as server:
        assert [cached(server, prompt=PROMPT) for _ in range(2)] == [0, 0]
