"""What a running server says of itself: its members, and what its scheduler holds."""

import asyncio
import time
from collections.abc import Sequence
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


async def wait_for(server: Server, names: Sequence[str]) -> None:
    """Until all these workers are ready, and the scheduler has attached them: it counts the blocks of each."""
    deadline = time.monotonic() + LIMIT_S
    while True:
        members = (await read_ring(server))["members"]
        blocks = {m["name"]: m["stats"]["blocks_total"] for m in members if m["role"] == "gpu_worker" and m["ready"]}
        attached = sum(m["stats"]["blocks_total"] for m in members if m["role"] == "scheduler")
        # counters of a member are 0 until its first heartbeat
        if blocks.keys() >= set(names) and all(blocks.values()) and sum(blocks.values()) == attached:
            break
        assert time.monotonic() < deadline, (blocks, attached)
        await asyncio.sleep(0.1)


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
