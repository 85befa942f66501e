"""Runs the load generator in this process, or in several when one could not keep up with the server.

A read costs about 10 us: one process is saturated by 50,000 tokens a second and would record each of them late.
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
from blockyard.services.bench.load.results import BenchError, RequestResult

STREAMS_A_PROCESS = 128
CORES_A_PROCESS = 4  # the server may be on the same machine
HEAD_START_S = 0.01  # for the start message to reach all processes

decode = msgspec.msgpack.Decoder(ClientMessage).decode


def num_for(num_streams: int) -> int:
    """Returns the number of processes for `num_streams` concurrent streams."""
    cores = len(os.sched_getaffinity(0))
    return max(1, min(-(-num_streams // STREAMS_A_PROCESS), cores // CORES_A_PROCESS))


async def run(
    endpoint: Endpoint, plan: LoadPlan, output_lens: list[int], load: LoadRun, num: int
) -> Callable[[], list[RequestResult]]:
    """Sends all requests from `num` processes and waits for the last response.

    Returns a function that parses the responses in the plan's order, so that parsing happens after the timed part.
    With `num` 1 this process sends them; run it inside QuietProcess. Raises OSError if the host has no address,
    BenchError if a client process fails.
    """
    num = min(num, len(plan.requests), plan.max_concurrency or num)
    if num <= 1:
        await client.run(endpoint, plan, load)
        return lambda: read_all(load, output_lens)
    shares = [ClientWork(endpoint, part(plan, i, num), output_lens[i::num]) for i in range(num)]
    async with contextlib.AsyncExitStack() as stack:
        children = [await stack.enter_async_context(_child(work)) for work in shares]
        for child in children:
            if not isinstance(await _receive(child), ClientReady):
                raise BenchError("a client process did not send ClientReady first")
        latest: dict[int, ClientProgress] = {}
        begin_s = time.perf_counter() + HEAD_START_S
        load.begin(begin_s, lambda: max((one.cpu_s for one in latest.values()), default=0.0))
        try:
            async with asyncio.TaskGroup() as tasks:
                ends = [tasks.create_task(_follow(i, child, load, latest)) for i, child in enumerate(children)]
        except ExceptionGroup as group:
            raise group.exceptions[0] from None
    results: list[RequestResult | None] = [None] * len(output_lens)
    for i, end in enumerate(ends):
        results[i::num] = end.result().results
    load.end(max(end.result().ended_s for end in ends))
    return lambda: [one for one in results if one is not None]


def part(plan: LoadPlan, index: int, num: int) -> LoadPlan:
    """Returns every `num`-th request from `index` on, with its share of the concurrency limit."""
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
    """Starts one process and copies its progress into `load` until it is done."""
    assert child.stdin is not None
    child.stdin.write(framed(ClientStart(load.started_s)))
    while True:
        message = await _receive(child)
        if isinstance(message, ClientDone):
            return message
        if isinstance(message, ClientProgress):
            latest[index] = message
            counts = [(one.num_running, one.num_ended, one.num_refused) for one in latest.values()]
            load.count(*map(sum, zip(*counts, strict=True)))


async def _receive(child: Process) -> ClientMessage:
    """Returns the next message. Raises BenchError if the process failed or ended."""
    assert child.stdout is not None
    try:
        size = await child.stdout.readexactly(LENGTH_BYTES)
        message: ClientMessage = decode(await child.stdout.readexactly(int.from_bytes(size, "big")))
    except asyncio.IncompleteReadError as e:
        raise BenchError(f"a client process ended with {await child.wait()}") from e
    if isinstance(message, ClientFailed):
        raise BenchError(message.reason)
    return message
