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
from blockyard.services.bench.load.client import Course, Plan, Target
from blockyard.services.bench.load.results import Outcome
from blockyard.shared import open_files

T = TypeVar("T")
PROGRESS_S = 0.5
LENGTH_BYTES = 4  # before each message


class Work(msgspec.Struct, frozen=True):
    """A share of the requests. `asked`: tokens that each is to be answered with."""

    target: Target
    plan: Plan
    asked: list[int]


class Start(msgspec.Struct, frozen=True):
    at_s: float  # CLOCK_MONOTONIC, which all processes of a host share


class Ready(msgspec.Struct, frozen=True, tag=True):
    """Everything is imported and the requests are there."""


class Progress(msgspec.Struct, frozen=True, tag=True):
    num_running: int
    num_ended: int
    num_refused: int
    cpu_s: float  # since the process began


class Done(msgspec.Struct, frozen=True, tag=True):
    outcomes: list[Outcome]
    ended_s: float


class Broke(msgspec.Struct, frozen=True, tag=True):
    reason: str


FromClient = Ready | Progress | Done | Broke
encode = msgspec.msgpack.Encoder().encode


def framed(message: msgspec.Struct) -> bytes:
    data = encode(message)
    return len(data).to_bytes(LENGTH_BYTES, "big") + data


def main(source: BinaryIO, out: BinaryIO) -> int:
    """Takes Work and Start from `source`; tells `out` how it goes."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # the parent says what there is to say

    def tell(message: msgspec.Struct) -> None:
        out.write(framed(message))
        out.flush()

    open_files.raise_limit()  # a connection for each request under way
    work = _read(source, Work)
    tell(Ready())
    course = Course(started_s=_read(source, Start).at_s)

    async def measure() -> None:
        telling = asyncio.create_task(_tell_progress(course, tell))
        await client.run(work.target, work.plan, course)
        telling.cancel()

    with client.QuietProcess(), asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        try:
            runner.run(measure())
        except OSError as e:
            tell(Broke(f"{work.target.host}: {e.strerror or e}"))
            return 1
    tell(_progress(course))
    tell(Done(read_all(course, work.asked), course.ended_s))
    return 0


def read_all(course: Course, asked: Sequence[int]) -> list[Outcome]:
    return [results.read(x, num) for x, num in zip(course.exchanges, asked, strict=True)]


def _progress(course: Course) -> Progress:
    return Progress(course.num_running, course.num_ended, course.num_refused, time.process_time())


async def _tell_progress(course: Course, tell: Callable[[msgspec.Struct], None]) -> None:
    while True:
        await asyncio.sleep(PROGRESS_S)
        tell(_progress(course))


def _read(source: BinaryIO, kind: type[T]) -> T:
    data = source.read(int.from_bytes(source.read(LENGTH_BYTES), "big"))
    return msgspec.msgpack.decode(data, type=kind)


if __name__ == "__main__":
    sys.exit(main(sys.stdin.buffer, sys.stdout.buffer))
