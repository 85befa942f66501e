"""What a running server says of itself: its members, and what its scheduler holds."""

import asyncio
import time
from typing import Any

import aiohttp
from rig import Server

LEFT = ("running", "waiting", "arriving", "transfers_open", "blocks_quarantined", "blocks_used")
HEARTBEAT_S = 0.7  # counters are at most so old
LIMIT_S = 40.0


async def read_ring(server: Server) -> dict[str, Any]:
    async with aiohttp.ClientSession() as session, session.get(f"{server.url}/ring") as answer:
        found: dict[str, Any] = await answer.json()
        return found


async def wait_for(server: Server, names: tuple[str, ...]) -> None:
    """Until all these workers are ready. The ring is ready with its first worker."""
    deadline = time.monotonic() + LIMIT_S
    while True:
        ready = {m["name"] for m in (await read_ring(server))["members"] if m["ready"]}
        if ready.issuperset(names):
            break
        assert time.monotonic() < deadline, ready
        await asyncio.sleep(0.1)
    await asyncio.sleep(0.3)  # the scheduler attaches the last one


async def scheduler_stats(server: Server) -> dict[str, int]:
    (stats,) = [m["stats"] for m in (await read_ring(server))["members"] if m["role"] == "scheduler"]
    return dict(stats)


async def left_over(server: Server) -> dict[str, int]:
    """Counts that are not 0 when all answers have ended."""
    await asyncio.sleep(HEARTBEAT_S)
    deadline = time.monotonic() + LIMIT_S
    while True:
        counts = await scheduler_stats(server)
        left = {name: counts[name] for name in LEFT if counts[name]}
        if not left or time.monotonic() > deadline:
            return left
        await asyncio.sleep(0.1)
