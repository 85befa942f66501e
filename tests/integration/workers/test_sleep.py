"""Sleep, wake, pause and resume through the whole ring: with the real demo model on CPU and with the mock worker."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
from rig import Server, serve

ASK = {"model": "demo", "prompt": "Once upon a time", "max_tokens": 40, "temperature": 0.8, "seed": 7}


@asynccontextmanager
async def client(server: Server) -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(server.url, timeout=aiohttp.ClientTimeout(60)) as session:
        yield session


async def post(http: aiohttp.ClientSession, path: str, body: dict[str, Any] | None = None) -> Any:
    async with http.post(path, json=body or {}) as answer:
        assert answer.status == 200, await answer.text()
        return await answer.json()


async def get(http: aiohttp.ClientSession, path: str) -> Any:
    async with http.get(path) as answer:
        assert answer.status == 200, await answer.text()
        return await answer.json()


async def text(http: aiohttp.ClientSession) -> str:
    answer = await post(http, "/v1/completions", ASK)
    return str(answer["choices"][0]["text"])


async def sleeps(server: Server) -> None:
    async with client(server) as http:
        before = await text(http)
        for level in (1, 2):
            state = await post(http, f"/sleep?level={level}")
            assert state["sleep_level"] == level
            assert await get(http, "/is_sleeping") == {"is_sleeping": True}
            assert await get(http, "/health") == {"status": "ok"}
            waits = asyncio.create_task(text(http))
            await asyncio.sleep(0.3)
            assert not waits.done()
            if level == 2:  # as a trainer that shares the device
                assert (await post(http, "/wake_up?tags=weights"))["sleep_level"] == 2
                assert await get(http, "/is_sleeping") == {"is_sleeping": True}
                assert not waits.done()
            assert (await post(http, f"/wake_up{'?tags=kv_cache' if level == 2 else ''}"))["sleep_level"] == 0
            assert await waits == before
            assert await text(http) == before


async def pauses(server: Server) -> None:
    async with client(server) as http:
        long = ASK | {"max_tokens": 300, "ignore_eos": True}
        running = asyncio.create_task(post(http, "/v1/completions", long))
        await asyncio.sleep(0.4)
        assert (await post(http, "/pause"))["paused"] is True
        more = asyncio.create_task(post(http, "/v1/completions", ASK))
        await asyncio.sleep(0.5)
        assert not running.done() and not more.done()
        assert (await post(http, "/resume"))["paused"] is False
        first = (await running)["choices"][0]["text"]
        await more
        assert (await post(http, "/v1/completions", long))["choices"][0]["text"] == first
        await post(http, "/reset_prefix_cache")
        assert (await post(http, "/sleep"))["sleep_level"] == 1
        assert (await post(http, "/wake_up"))["sleep_level"] == 0
        await post(http, "/v1/completions", ASK)


def test_the_demo_model_says_the_same_after_its_sleep() -> None:
    with serve("demo", "--device", "cpu", "--enable-sleep-mode", "--disable-log-requests") as server:
        asyncio.run(sleeps(server))


def test_a_pause_in_the_middle_of_an_answer() -> None:
    mock = ("--worker-cls", "mock", "--mock-step-ms", "5", "--enable-sleep-mode")
    with serve("demo", *mock, "--max-model-len", "600") as server:
        asyncio.run(pauses(server))
