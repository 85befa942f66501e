"""The waiting queue from the command line: order, refusals, and Retry-After."""

import asyncio
from typing import Any

import aiohttp
import pytest
from rig import Server, completion, serve

MOCK = ("--worker-cls", "mock", "--mock-step-ms", "10", "--max-model-len", "600", "--max-num-seqs", "1")


class Client:
    """Requests sent one after another, by name, and the order in which they are answered."""

    def __init__(self, http: aiohttp.ClientSession) -> None:
        self._http = http
        self.ended: list[str] = []
        self.tasks: list[asyncio.Task[tuple[int, str]]] = []

    async def send(self, name: str, num_tokens: int, key: str = "none", **fields: Any) -> None:
        self.tasks.append(asyncio.create_task(self._post(name, num_tokens, key, fields)))
        await asyncio.sleep(0.2)

    async def _post(self, name: str, num_tokens: int, key: str, fields: dict[str, Any]) -> tuple[int, str]:
        body = completion(num_tokens, prompt=[5 + len(self.tasks)] * 10, ignore_eos=True, **fields)
        headers = {"Authorization": f"Bearer {key}"}
        async with self._http.post("/v1/completions", json=body, headers=headers) as answer:
            await answer.read()
            self.ended.append(name)
            return answer.status, answer.headers.get("Retry-After", "")


async def priorities(server: Server) -> None:
    async with aiohttp.ClientSession(server.url, timeout=aiohttp.ClientTimeout(60)) as http:
        client = Client(http)
        await client.send("running", 200, priority=-9)
        await client.send("low", 5, priority=3)
        await client.send("high", 5, priority=1)
        await client.send("one too many", 5)
        answers = await asyncio.gather(*client.tasks)
        assert client.ended == ["one too many", "running", "high", "low"]
        assert [status for status, _ in answers] == [200, 200, 200, 429]
        assert 1 <= int(answers[3][1]) <= 600


def test_a_lower_priority_number_is_next_and_a_full_queue_is_a_429() -> None:
    with serve("demo", *MOCK, "--scheduling-policy", "priority", "--max-queue-len", "2") as server:
        asyncio.run(priorities(server))


async def two_keys(server: Server, light: str) -> list[str]:
    async with aiohttp.ClientSession(server.url, timeout=aiohttp.ClientTimeout(60)) as http:
        client = Client(http)
        await client.send("running", 200, "heavy")
        for i in range(3):
            await client.send(f"heavy {i}", 10, "heavy")
        await client.send("light", 10, light)
        assert {status for status, _ in await asyncio.gather(*client.tasks)} == {200}
        return client.ended


@pytest.mark.parametrize(("policy", "place"), [("fair", 1), ("fcfs", 4)])
def test_keys_share_fairly(policy: str, place: int) -> None:
    """Under fair, the key with less service is next, even if other requests arrived earlier."""
    flags = ("--scheduling-policy", policy, "--api-key", "heavy", "other")
    with serve("demo", *MOCK, *flags) as server:
        ended = asyncio.run(two_keys(server, "other"))
    assert ended.index("light") == place
