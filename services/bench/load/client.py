"""The load generator's HTTP client: records bytes with their arrival times and parses them after the last response.

It often shares the machine's cores with the server it measures, so a read costs one clock call and one list entry.
Each request opens its own connection and asks the server to close it.
"""

import asyncio
import gc
import ssl
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec

from blockyard.services.bench.load import http_response
from blockyard.shared.process import open_files

LAST_CHUNK = b"\r\n0\r\n\r\n"  # the line end of the previous chunk and the empty chunk that ends the body
Clock = Callable[[], float]


@dataclass(frozen=True, slots=True)
class Endpoint:
    """The server address and path that requests are sent to."""

    host: str
    port: int
    tls: bool = False
    path: str = "/v1/completions"
    headers: tuple[tuple[str, str], ...] = ()

    def request(self, body: object) -> bytes:
        """Returns the bytes of a POST with `body` as JSON."""
        text = msgspec.json.encode(body)
        lines = [
            f"POST {self.path} HTTP/1.1",
            f"Host: {self.host}:{self.port}",
            "Content-Type: application/json",
            f"Content-Length: {len(text)}",
            "Accept: text/event-stream",
            "Connection: close",
            *(f"{name}: {value}" for name, value in self.headers),
        ]
        return "\r\n".join([*lines, "", ""]).encode() + text


class Exchange(asyncio.Protocol):
    """One request and its response as it was read. Times are by `clock`."""

    def __init__(self, request: bytes, due_s: float, clock: Clock) -> None:
        self.due_s = due_s
        self.sent_s = 0.0  # before the connection is opened, so that connecting is part of the TTFT
        self.pieces: list[tuple[float, bytes]] = []
        self.ended_s = 0.0
        self.failure = ""  # of the connection; the response is read after the run
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._request, self._clock = request, clock
        self._is_stream = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # uvloop's transport is no subclass
        self._transport = transport
        transport.write(self._request)
        self._request = b""

    def data_received(self, data: bytes) -> None:
        self.pieces.append((self._clock(), data))
        if len(self.pieces) == 1:
            self._is_stream = b" 200 " in data[:16]
        if data.endswith(LAST_CHUNK) or (len(data) < len(LAST_CHUNK) and self._tail().endswith(LAST_CHUNK)):
            self._transport.close()
        elif not self._is_stream and self._is_whole():
            self._transport.close()  # an error response of a server that keeps connections open

    def connection_lost(self, exc: Exception | None) -> None:
        if exc is not None and not self.failure:
            self.failure = f"the connection broke: {exc}"
        self.ended_s = self._clock()
        if not self.ended.done():
            self.ended.set_result(None)

    def mark_sent(self) -> None:
        self.sent_s = self._clock()

    def fail(self, reason: str) -> None:
        """There is no connection."""
        self.failure, self.ended_s = reason, self._clock()

    def abort(self, reason: str) -> None:
        self.failure = reason
        self._transport.abort()

    @property
    def is_refused(self) -> bool:
        """Whether the response is an error, from its first bytes only: cheap enough for the progress bar."""
        begin = b"".join(piece for _, piece in self.pieces[:16])[:16]
        return bool(self.failure) or b" 200 " not in begin

    def _is_whole(self) -> bool:
        try:
            return http_response.read(self.pieces).is_self_delimited
        except http_response.BadResponse:
            return False

    def _tail(self) -> bytes:
        return b"".join(piece for _, piece in self.pieces[-len(LAST_CHUNK) :])


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """Requests and when each is sent."""

    requests: Sequence[bytes]
    due_s: Sequence[float]  # seconds after the start
    max_concurrency: int | None = None
    timeout_s: float = 3600.0  # of one request


@dataclass(slots=True)
class LoadRun:
    """Progress and recordings of a run. Displays read it while the run goes on."""

    clock: Clock = time.perf_counter
    started_s: float = 0.0  # 0: when `run` is called
    ended_s: float = 0.0
    exchanges: list[Exchange] = field(default_factory=list)
    num_running: int = 0
    num_ended: int = 0
    num_refused: int = 0
    cpu_s: Callable[[], float] = time.process_time  # of the busiest client process
    started_cpu_s: float = 0.0  # CPU time at the start

    def begin(self, at_s: float, cpu_s: Callable[[], float]) -> None:
        self.started_s, self.cpu_s, self.started_cpu_s = at_s, cpu_s, cpu_s()

    def end(self, at_s: float) -> None:
        self.ended_s = at_s

    def count(self, running: int, ended: int, refused: int) -> None:
        self.num_running, self.num_ended, self.num_refused = running, ended, refused


async def run(endpoint: Endpoint, plan: LoadPlan, load: LoadRun) -> None:
    """Sends all requests and returns when the last has ended. Raises OSError if the host has no address."""
    loop = asyncio.get_running_loop()
    info = await loop.getaddrinfo(endpoint.host, endpoint.port, type=1)  # once: each lookup takes a thread
    address = str(info[0][4][0])
    tls = ssl.create_default_context() if endpoint.tls else None
    free = asyncio.Semaphore(plan.max_concurrency or len(plan.requests) or 1)

    async def one(exchange: Exchange) -> None:
        load.count(load.num_running + 1, load.num_ended, load.num_refused)
        exchange.mark_sent()
        try:
            await loop.create_connection(
                lambda: exchange, address, endpoint.port, ssl=tls, server_hostname=endpoint.host if tls else None
            )
            try:
                async with asyncio.timeout(plan.timeout_s):
                    await asyncio.shield(exchange.ended)
            except TimeoutError:
                exchange.abort(f"no end within {plan.timeout_s:g} s")
                await exchange.ended
        except OSError as e:
            exchange.fail(f"no connection: {e.strerror or e}")
        load.count(load.num_running - 1, load.num_ended + 1, load.num_refused + exchange.is_refused)
        free.release()

    load.begin(load.started_s or load.clock(), load.cpu_s)
    async with asyncio.TaskGroup() as tasks:
        for request, due_s in zip(plan.requests, plan.due_s, strict=True):
            wait_s = load.started_s + due_s - load.clock()
            if wait_s > 0:
                await asyncio.sleep(wait_s)
            await free.acquire()
            exchange = Exchange(request, load.started_s + due_s, load.clock)
            load.exchanges.append(exchange)
            tasks.create_task(one(exchange))
    load.end(max((x.ended_s for x in load.exchanges), default=load.clock()))


class QuietProcess:
    """Raises the limit on open files and disables garbage collection: its pauses would count as ITL."""

    def __enter__(self) -> None:
        open_files.raise_limit()  # a connection for each running request
        gc.disable()

    def __exit__(self, *exc: object) -> None:
        gc.enable()
