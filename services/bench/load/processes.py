"""The load generator as a whole: in this process, or as several, where one could not read what the server writes.

A read costs about 10 us, so that one process is busy with 50,000 tokens a second and late with each.
"""

import asyncio
import contextlib
import os
import sys
import time
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Callable

import msgspec

from blockyard.services.bench.load import client
from blockyard.services.bench.load.client import Endpoint, LoadPlan, LoadRun
from blockyard.services.bench.load.client_process import (
    LENGTH_BYTES,
    ClientDone,
    ClientFailed,
    ClientMessage,
    ClientProgress,
    ClientReady,
    ClientStart,
    ClientWork,
    framed,
    read_all,
)
from blockyard.services.bench.load.results import RequestResult
from blockyard.services.bench.server import BenchError

STREAMS_A_PROCESS = 128
CORES_A_PROCESS = 4  # the server may be on the same machine
HEAD_START_S = 0.01  # so that all of them have heard when it begins

decode = msgspec.msgpack.Decoder(ClientMessage).decode


def num_for(num_streams: int) -> int:
    """Processes for so many streams at a time."""
    cores = len(os.sched_getaffinity(0))
    return max(1, min(-(-num_streams // STREAMS_A_PROCESS), cores // CORES_A_PROCESS))


async def run(
    target: Endpoint, plan: LoadPlan, asked: list[int], load: LoadRun, num: int
) -> Callable[[], list[RequestResult]]:
    """Sends all requests from `num` processes and waits for the last answer. What it returns reads the answers, in
    the plan's order, once nothing is timed any more.

    With one process it is this one, which QuietProcess should be around. Raises OSError if the host has no address,
    BenchError if a process breaks.
    """
    num = min(num, len(plan.requests), plan.max_concurrency or num)
    if num <= 1:
        await client.run(target, plan, load)
        return lambda: read_all(load, asked)
    shares = [ClientWork(target, part(plan, i, num), asked[i::num]) for i in range(num)]
    async with contextlib.AsyncExitStack() as stack:
        children = [await stack.enter_async_context(_child(work)) for work in shares]
        for child in children:
            if not isinstance(await _hear(child), ClientReady):
                raise BenchError("a client process did not begin with being ready")
        load.started_s = time.perf_counter() + HEAD_START_S
        latest: dict[int, ClientProgress] = {}
        load.cpu_s = lambda: max((one.cpu_s for one in latest.values()), default=0.0)
        try:
            async with asyncio.TaskGroup() as tasks:
                ends = [tasks.create_task(_follow(i, child, load, latest)) for i, child in enumerate(children)]
        except ExceptionGroup as group:
            raise group.exceptions[0] from None
    outcomes: list[RequestResult | None] = [None] * len(asked)
    for i, end in enumerate(ends):
        outcomes[i::num] = end.result().outcomes
    load.ended_s = max(end.result().ended_s for end in ends)
    return lambda: [one for one in outcomes if one is not None]


def part(plan: LoadPlan, index: int, num: int) -> LoadPlan:
    """Each `num`-th request, from `index` on, and its share of those that may run at a time."""
    most = plan.max_concurrency
    share = None if most is None else most // num + (index < most % num)
    return LoadPlan(plan.requests[index::num], plan.due_s[index::num], share, plan.timeout_s)


@contextlib.asynccontextmanager
async def _child(work: ClientWork) -> AsyncIterator[Process]:
    command = [sys.executable, "-P", "-m", "blockyard.services.bench.load.client_process"]
    child = await asyncio.create_subprocess_exec(*command, stdin=PIPE, stdout=PIPE)
    try:
        assert child.stdin is not None
        child.stdin.write(framed(work))
        yield child
    finally:
        if child.returncode is None:
            child.kill()
        await child.wait()


async def _follow(index: int, child: Process, load: LoadRun, latest: dict[int, ClientProgress]) -> ClientDone:
    """From the start to the end of one process."""
    assert child.stdin is not None
    child.stdin.write(framed(ClientStart(load.started_s)))
    while True:
        heard = await _hear(child)
        if isinstance(heard, ClientDone):
            return heard
        if isinstance(heard, ClientProgress):
            latest[index] = heard
            load.num_running = sum(one.num_running for one in latest.values())
            load.num_ended = sum(one.num_ended for one in latest.values())
            load.num_refused = sum(one.num_refused for one in latest.values())


async def _hear(child: Process) -> ClientMessage:
    """What it says next. Raises BenchError when it breaks."""
    assert child.stdout is not None
    try:
        size = await child.stdout.readexactly(LENGTH_BYTES)
        heard: ClientMessage = decode(await child.stdout.readexactly(int.from_bytes(size, "big")))
    except asyncio.IncompleteReadError as e:
        raise BenchError(f"a client process ended with {await child.wait()}") from e
    if isinstance(heard, ClientFailed):
        raise BenchError(heard.reason)
    return heard
