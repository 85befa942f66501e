"""One client process of the load generator, and the messages between it and its parent."""

import asyncio
import signal
import sys
from collections.abc import Callable, Sequence
from typing import BinaryIO, TypeVar

import msgspec
import uvloop

from blockyard.services.bench.load import client, results
from blockyard.services.bench.load.client import Endpoint, LoadPlan, LoadRun
from blockyard.services.bench.load.results import RequestResult

T = TypeVar("T")
PROGRESS_S = 0.5  # between two ClientProgress messages
LENGTH_BYTES = 4  # size prefix of each message


class ClientWork(msgspec.Struct, frozen=True):
    """This process's share of the requests. `output_lens`: expected output tokens of each."""

    endpoint: Endpoint
    plan: LoadPlan
    output_lens: list[int]


class ClientStart(msgspec.Struct, frozen=True):
    at_s: float  # CLOCK_MONOTONIC is the same in all processes of a host


class ClientReady(msgspec.Struct, frozen=True, tag=True):
    """All modules are imported and the requests have arrived."""


class ClientProgress(msgspec.Struct, frozen=True, tag=True):
    num_running: int
    num_ended: int
    num_refused: int
    cpu_s: float  # of this process since its start message


class ClientDone(msgspec.Struct, frozen=True, tag=True):
    results: list[RequestResult]
    ended_s: float


class ClientFailed(msgspec.Struct, frozen=True, tag=True):
    reason: str


ClientMessage = ClientReady | ClientProgress | ClientDone | ClientFailed
encode = msgspec.msgpack.Encoder().encode


def framed(message: msgspec.Struct) -> bytes:
    data = encode(message)
    return len(data).to_bytes(LENGTH_BYTES, "big") + data


def main(source: BinaryIO, out: BinaryIO) -> int:
    """Reads ClientWork and ClientStart from `source` and writes ClientMessages to `out`. Returns the exit code."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # the parent reports the interrupt

    def send(message: msgspec.Struct) -> None:
        out.write(framed(message))
        out.flush()

    work = _read(source, ClientWork)
    send(ClientReady())
    load = LoadRun(started_s=_read(source, ClientStart).at_s)

    async def measure() -> None:
        reporter = asyncio.create_task(_send_progress(load, send))
        await client.run(work.endpoint, work.plan, load)
        reporter.cancel()

    with client.QuietProcess(), asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        try:
            runner.run(measure())
        except OSError as e:
            send(ClientFailed(f"{work.endpoint.host}: {e.strerror or e}"))
            return 1
    send(_progress(load))
    send(ClientDone(read_all(load, work.output_lens), load.ended_s))
    return 0


def read_all(load: LoadRun, output_lens: Sequence[int]) -> list[RequestResult]:
    return [results.read(x, num) for x, num in zip(load.exchanges, output_lens, strict=True)]


def _progress(load: LoadRun) -> ClientProgress:
    return ClientProgress(load.num_running, load.num_ended, load.num_refused, load.cpu_s() - load.started_cpu_s)


async def _send_progress(load: LoadRun, send: Callable[[msgspec.Struct], None]) -> None:
    while True:
        await asyncio.sleep(PROGRESS_S)
        send(_progress(load))


def _read(source: BinaryIO, kind: type[T]) -> T:
    data = source.read(int.from_bytes(source.read(LENGTH_BYTES), "big"))
    return msgspec.msgpack.decode(data, type=kind)


if __name__ == "__main__":
    sys.exit(main(sys.stdin.buffer, sys.stdout.buffer))
