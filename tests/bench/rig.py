"""Starts a real server for benchmarks and reads its streams; pytest times nothing here."""

import asyncio
import contextlib
import os
import signal
import socket
import statistics
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import aiohttp
import msgspec

from blockyard.services.message_bus.service import Membership, Registry
from blockyard.shared.bus.registry_socket import RegistrySocket
from blockyard.shared.config.services.process import BusConfig

ROOT = Path(__file__).parents[2]
START_LIMIT_S = 120.0
T = TypeVar("T")
OnRead = Callable[[], object]  # called when a reader has read a part of a stream


@dataclass
class Server:
    """A running `blockyard serve`."""

    process: subprocess.Popen[bytes]
    port: int
    launched_s: float  # perf_counter at launch
    ready_s: float = 0.0  # seconds from launch until /ready said yes

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def children(self) -> dict[str, int]:
        """Process ids by title, e.g. {"blockyard: scheduler": 123}."""
        found: dict[str, int] = {}
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit():
                continue
            with contextlib.suppress(OSError):
                stat = (entry / "stat").read_text()
                if int(stat.rpartition(")")[2].split()[1]) == self.process.pid:
                    title = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
                    found[title] = int(entry.name)
        return found

    def family(self) -> dict[int, str]:
        """Titles of the launcher and its descendants by process id. A starting one has its command line as title."""
        return family(self.process.pid)

    def matchers(self) -> list[int]:
        """Process ids of the matchers of all workers."""
        return sorted(pid for pid, title in self.family().items() if title.startswith("matcher"))


def family(root: int) -> dict[int, str]:
    """Titles of a process and its descendants by process id. A starting one has its command line as title."""
    parents: dict[int, int] = {}
    titles: dict[int, str] = {}
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            title = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
            titles[int(entry.name)] = title.removeprefix("blockyard: ")
    found = [root]
    for pid in found:
        found.extend(child for child, parent in parents.items() if parent == pid)
    return {pid: titles[pid] for pid in found if pid in titles}


@contextlib.contextmanager
def serve(*flags: str, log: Path | None = None) -> Iterator[Server]:
    """Runs `blockyard serve FLAGS` on a free port until the block ends."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT / ".src"), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, "-m", "blockyard", "serve", "--host", "127.0.0.1", "--port", str(port), *flags]
    with (log or Path(os.devnull)).open("wb") as out:
        launched = time.perf_counter()
        process = subprocess.Popen(command, env=env, stdout=out, stderr=subprocess.STDOUT)
        server = Server(process, port, launched)
        try:
            wait_ready(server)
            yield server
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(40)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def wait_ready(server: Server) -> None:
    while True:
        with (
            contextlib.suppress(urllib.error.URLError, ConnectionError),
            urllib.request.urlopen(f"{server.url}/ready", timeout=5) as answer,
        ):
            if answer.status == 200:
                break
        if server.process.poll() is not None:
            raise RuntimeError(f"blockyard serve ended with {server.process.returncode} before it was ready")
        if time.perf_counter() - server.launched_s > START_LIMIT_S:
            raise RuntimeError("blockyard serve was not ready in time")
        time.sleep(0.02)
    server.ready_s = time.perf_counter() - server.launched_s


class _Choice(msgspec.Struct):
    text: str = ""
    finish_reason: str | None = None


class Chunk(msgspec.Struct):
    """What benchmarks read of a streamed completion chunk."""

    choices: list[_Choice] = []
    stamp: float = 0.0


@dataclass
class StreamLog:
    """One stream as its client saw it."""

    started_s: float  # perf_counter
    events_s: list[float] = field(default_factory=list)  # perf_counter of each read, once per event in it
    text: str = ""


decode_chunk = msgspec.json.Decoder(Chunk).decode


async def stream(
    session: aiohttp.ClientSession, url: str, body: dict[str, object], on_read: OnRead = lambda: None
) -> StreamLog:
    """POSTs a streaming completion and reads it to its end. on_read: called at each read."""
    log = StreamLog(time.perf_counter())
    async with session.post(f"{url}/v1/completions", json=body | {"stream": True}) as answer:
        if answer.status != 200:
            raise RuntimeError(f"{answer.status}: {await answer.text()}")
        rest = b""
        async for data in answer.content.iter_any():
            now = time.perf_counter()
            on_read()
            *events, rest = (rest + data).split(b"\n\n")
            for event in events:
                if not event.startswith(b"data: ") or event == b"data: [DONE]":
                    continue
                log.events_s.append(now)
                log.text += "".join(c.text for c in decode_chunk(event[6:]).choices)
    return log


async def read_all(answer: aiohttp.ClientResponse, on_read: OnRead, mark: bytes = b"") -> str:
    """The body. on_read: called at each read that has the mark in it."""
    parts = []
    async for data in answer.content.iter_any():
        parts.append(data)
        if mark in data:
            on_read()
    return b"".join(parts).decode()


async def run_all(
    readers: Sequence[Callable[[OnRead], Coroutine[Any, Any, T]]],
    meanwhile: Callable[[], Coroutine[Any, Any, None]] | None = None,
    num_begun: int | None = None,
) -> list[T]:
    """Runs all at once. meanwhile: runs when the first `num_begun` (None: all) have read something and none has ended.

    So a signal finds streams under way, however slow the machine is.
    """
    begun = [asyncio.Event() for _ in readers]
    tasks = [asyncio.create_task(reader(first.set)) for reader, first in zip(readers, begun, strict=True)]
    try:
        if meanwhile is not None:
            await _all_begin(tasks[:num_begun], begun[:num_begun])
            await meanwhile()
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _all_begin(tasks: Sequence[asyncio.Task[Any]], begun: Sequence[asyncio.Event]) -> None:
    waiting = asyncio.create_task(_all_set(begun))
    await asyncio.wait([waiting, *tasks], return_when=asyncio.FIRST_COMPLETED)
    waiting.cancel()
    for task in tasks:
        if task.done():
            raise AssertionError("a stream has ended before all have begun") from task.exception()


async def _all_set(events: Sequence[asyncio.Event]) -> None:
    for event in events:
        await event.wait()


async def texts(
    url: str,
    bodies: Sequence[dict[str, object]],
    meanwhile: Callable[[], object] | None = None,
    connector: aiohttp.BaseConnector | None = None,
) -> list[str]:
    """The texts of streams, all at once. meanwhile: called when all have begun."""

    async def act() -> None:
        if meanwhile is not None:
            meanwhile()

    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(120)) as session:
        readers = [partial(stream, session, url, body) for body in bodies]
        return [log.text for log in await run_all(readers, None if meanwhile is None else act)]


async def streams(url: str, bodies: list[dict[str, object]]) -> list[StreamLog]:
    """All bodies at once, a connection each."""
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(600)) as session:
        return await asyncio.gather(*(stream(session, url, body) for body in bodies))


def completion(num_tokens: int, **fields: object) -> dict[str, object]:
    """A greedy completion of exactly so many tokens."""
    return {"prompt": "def main():", "max_tokens": num_tokens, "ignore_eos": True, "temperature": 0.0} | fields


def cpu_seconds(pid: int) -> float:
    """User and system time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def rss_mib(pid: int) -> float:
    """Resident memory, MiB."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) / 1024
    raise RuntimeError(f"no VmRSS of process {pid}")


def pss_mib(pid: int) -> float:
    """Resident memory, MiB; of a page that several processes share each has its part."""
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) / 1024
    raise RuntimeError(f"no Pss of process {pid}")


def percentile(values: list[float], share: float) -> float:
    """The smallest value that at least `share` of all are not above."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def median(values: list[float]) -> float:
    return statistics.median(values)


Row = tuple[str, str, str]


def table(rows: list[Row]) -> str:
    """A Markdown table of what, measured, bar."""
    lines = ["| what | measured | bar |", "|---|---|---|", *(f"| {a} | {b} | {c} |" for a, b, c in rows)]
    return "\n".join(lines)


@contextlib.contextmanager
def registry(bus: BusConfig) -> Iterator[None]:
    """A message bus in a thread of this process, with shorter timeouts for silent members than the real one."""
    stopped = threading.Event()
    server = RegistrySocket(bus)
    loop = Registry(server, Membership(time.monotonic(), dead_after_s=1.5, settle_s=1.2))
    thread = threading.Thread(target=loop.run, args=(stopped,))
    thread.start()
    try:
        yield
    finally:
        stopped.set()
        thread.join()
        server.close()
