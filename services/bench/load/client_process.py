"""One of several processes that the load generator is made of, and what it and its parent tell each other."""

import asyncio
import signal
import sys
import time
from collections.abc import Callable, Sequence
from typing import BinaryIO, TypeVar

import msgspec
import uvloop

from blockyard.services.bench.load import client, results
from blockyard.services.bench.load.client import Endpoint, LoadPlan, LoadRun
from blockyard.services.bench.load.results import RequestResult
from blockyard.shared import open_files

T = TypeVar("T")
PROGRESS_S = 0.5
LENGTH_BYTES = 4  # before each message


class ClientWork(msgspec.Struct, frozen=True):
    """A share of the requests. `asked`: tokens that each is to be answered with."""

    target: Endpoint
    plan: LoadPlan
    asked: list[int]


class ClientStart(msgspec.Struct, frozen=True):
    at_s: float  # CLOCK_MONOTONIC, which all processes of a host share


class ClientReady(msgspec.Struct, frozen=True, tag=True):
    """Everything is imported and the requests are there."""


class ClientProgress(msgspec.Struct, frozen=True, tag=True):
    num_running: int
    num_ended: int
    num_refused: int
    cpu_s: float  # since the process began


class ClientDone(msgspec.Struct, frozen=True, tag=True):
    outcomes: list[RequestResult]
    ended_s: float


class ClientFailed(msgspec.Struct, frozen=True, tag=True):
    reason: str


ClientMessage = ClientReady | ClientProgress | ClientDone | ClientFailed
encode = msgspec.msgpack.Encoder().encode


def framed(message: msgspec.Struct) -> bytes:
    data = encode(message)
    return len(data).to_bytes(LENGTH_BYTES, "big") + data


def main(source: BinaryIO, out: BinaryIO) -> int:
    """Takes ClientWork and ClientStart from `source`; tells `out` how it goes."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # the parent says what there is to say

    def tell(message: msgspec.Struct) -> None:
        out.write(framed(message))
        out.flush()

    open_files.raise_limit()  # a connection for each request under way
    work = _read(source, ClientWork)
    tell(ClientReady())
    load = LoadRun(started_s=_read(source, ClientStart).at_s)

    async def measure() -> None:
        telling = asyncio.create_task(_tell_progress(load, tell))
        await client.run(work.target, work.plan, load)
        telling.cancel()

    with client.QuietProcess(), asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        try:
            runner.run(measure())
        except OSError as e:
            tell(ClientFailed(f"{work.target.host}: {e.strerror or e}"))
            return 1
    tell(_progress(load))
    tell(ClientDone(read_all(load, work.asked), load.ended_s))
    return 0


def read_all(load: LoadRun, asked: Sequence[int]) -> list[RequestResult]:
    return [results.read(x, num) for x, num in zip(load.exchanges, asked, strict=True)]


def _progress(load: LoadRun) -> ClientProgress:
    return ClientProgress(load.num_running, load.num_ended, load.num_refused, time.process_time())


async def _tell_progress(load: LoadRun, tell: Callable[[msgspec.Struct], None]) -> None:
    while True:
        await asyncio.sleep(PROGRESS_S)
        tell(_progress(load))


def _read(source: BinaryIO, kind: type[T]) -> T:
    data = source.read(int.from_bytes(source.read(LENGTH_BYTES), "big"))
    return msgspec.msgpack.decode(data, type=kind)


if __name__ == "__main__":
    sys.exit(main(sys.stdin.buffer, sys.stdout.buffer))
