"""Full garbage collections of a gateway, while no stream is open.

A full collection visits every object: 25 to 65 ms with 2,000 connections, which each open stream would wait for.
Python begins one whenever the number of objects has grown by a quarter. Collections of young objects take 1 ms at most
and stay automatic.
"""

import asyncio
import gc

from blockyard.services.api_gateway.service import Gateway

CHECK_S = 0.5
IDLE_S = 10.0  # at least this long between two collections without a stream
MOST_YOUNG = 300  # collections of the middle generation until a full one cannot wait: about 2 million objects
NEVER = 1 << 30


def begin() -> None:
    """Excludes all current objects from later collections, and ends automatic full collections."""
    gc.collect()
    gc.freeze()
    young, middle, _ = gc.get_threshold()
    gc.set_threshold(young, middle, NEVER)


def is_due(num_young: int, num_open: int, since_s: float) -> bool:
    """num_young: collections of the middle generation since the last full one, `since_s` ago. num_open: streams."""
    return num_young > MOST_YOUNG or (num_young > 0 and not num_open and since_s > IDLE_S)


async def collect(gateway: Gateway) -> None:
    """Runs until cancelled, after `begin`."""
    clock = asyncio.get_running_loop().time
    last_s = clock()
    while True:
        await asyncio.sleep(CHECK_S)
        if is_due(gc.get_count()[2], gateway.client.num_open(), clock() - last_s):
            gc.collect()
            last_s = clock()
