"""Common parts of asyncio services: run until SIGTERM, publish counters."""

import asyncio
import os
import signal
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

PUBLISH_S = 0.5


async def run_until_stopped(*work: Coroutine[Any, Any, None]) -> None:
    """Runs all coroutines until SIGTERM or SIGINT cancels them. An exception of one ends the others."""
    loop = asyncio.get_running_loop()
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(coroutine) for coroutine in work]

        def stop() -> None:
            for task in tasks:
                task.cancel()

        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop)


async def publish(count: Callable[[], None]) -> None:
    """Calls `count` about twice a second, for ever."""
    while True:
        count()
        await asyncio.sleep(PUBLISH_S)


def rss_bytes() -> int:
    """Returns the resident memory of this process; 0 if it cannot be read, for example without a free descriptor."""
    try:
        pages = Path("/proc/self/statm").read_text("ascii").split()[1]
    except OSError:
        return 0
    return int(pages) * os.sysconf("SC_PAGESIZE")
