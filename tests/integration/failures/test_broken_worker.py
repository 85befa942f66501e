"""A request that breaks every worker it runs on is identified and failed; the others get their tokens."""

import asyncio
import json
from collections.abc import Sequence

import aiohttp
from rig import Server, StreamLog, completion, serve, stream

FATAL_ID, NUM_TOKENS = 77, 60
FLAGS = ("--worker-cls", "mock", "--mock-step-ms", "10", "--mock-fatal-id", str(FATAL_ID))
PROMPTS = [[100 + i, 5, 6, 7] for i in range(4)]


async def run(server: Server, *more: Sequence[int]) -> tuple[list[StreamLog], list[tuple[int, str]]]:
    """The streams, and the answers to further prompts sent while they run."""
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(60)) as session:
        bodies = [completion(NUM_TOKENS, prompt=prompt, seed=1) for prompt in PROMPTS]
        streams = [asyncio.create_task(stream(session, server.url, body)) for body in bodies]
        await asyncio.sleep(0.2)
        answers = []
        for prompt in more:
            async with session.post(f"{server.url}/v1/completions", json=completion(9, prompt=prompt)) as answer:
                answers.append((answer.status, await answer.text()))
        return await asyncio.gather(*streams), answers


def test_a_request_that_breaks_workers_is_failed_and_the_others_continue() -> None:
    with serve("demo", *FLAGS) as server:
        disturbed, [(status, text)] = asyncio.run(run(server, [9, FATAL_ID, 9]))
        assert status == 500
        assert "workers broke while they ran this request alone" in json.loads(text)["error"]["message"]
        quiet, _ = asyncio.run(run(server))
        assert [log.text for log in disturbed] == [log.text for log in quiet]
        assert all(log.text for log in quiet)
