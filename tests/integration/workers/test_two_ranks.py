"""A ring whose worker has two ranks: the texts of one rank, also after one is killed; no rank outlives the launcher."""

import asyncio
import os
import signal
import time
from pathlib import Path

import aiohttp
import pytest
from rig import Server, completion, serve, stream

FLAGS = ("--device", "cpu", "--dtype", "float32", "--detokenizers", "1", "--tokenizers", "1")
NUM_STREAMS = 3
NUM_TOKENS = 120


async def texts(server: Server, victim: str = "") -> list[str]:
    """The texts of greedy and seeded streams. victim: title of a process that is killed meanwhile."""
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(90)) as session:
        bodies = [
            completion(NUM_TOKENS, prompt=f"def stream_{i}():", seed=i, temperature=0.7 * (i % 2))
            for i in range(NUM_STREAMS)
        ]
        tasks = [asyncio.create_task(stream(session, server.url, body)) for body in bodies]
        if victim:
            await asyncio.sleep(0.5)
            assert not any(task.done() for task in tasks), "the kill comes too late to mean anything"
            os.kill(rank(server, victim), signal.SIGKILL)
        return [one.text for one in await asyncio.gather(*tasks)]


def rank(server: Server, title: str) -> int:
    return next(pid for pid, name in server.family().items() if title in name)


@pytest.fixture(scope="module")
def expected() -> list[str]:
    with serve("demo", *FLAGS) as server:
        return asyncio.run(texts(server))


@pytest.mark.parametrize("flag", ["-tp", "-pp"])
def test_two_ranks_give_the_texts_of_one_and_end_together(flag: str, tmp_path: Path, expected: list[str]) -> None:
    with serve("demo", *FLAGS, flag, "2", log=tmp_path / "log") as server:
        assert asyncio.run(texts(server)) == expected
        killed = rank(server, "rank 1")
        assert asyncio.run(texts(server, "rank 1")) == expected
        follower = rank(server, "rank 1")
        assert follower != killed
        server.process.kill()
        server.process.wait()
        deadline = time.monotonic() + 2
        while Path(f"/proc/{follower}").exists():
            assert time.monotonic() < deadline, "the rank outlives the launcher"
            time.sleep(0.05)
    log = (tmp_path / "log").read_text("utf-8", "replace")
    assert "rank 1 of 2 has ended with code -9; all ranks end" in log
