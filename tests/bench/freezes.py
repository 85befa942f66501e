"""Freezes services of a running server by SIGSTOP, while clients ask one stream after another."""

import asyncio
import itertools
import os
import signal
import time
from dataclasses import dataclass, field

import aiohttp
from rig import StreamLog, completion, stream

from rig import Server  # isort: skip

OURS = "blockyard: "
LAUNCHER = "launcher"
GATEWAY = "api_gateway"
SERVICES = ("message_bus", "scheduler", "gpu_worker", "tokenizer_pool", "detokenizer", GATEWAY, LAUNCHER)
MOCK = ("--worker-cls", "mock", "--mock-step-ms", "10", "--data-parallel-size", "2")
NUM_TOKENS = 100
NUM_BODIES = 16
ANSWER_S = 90.0  # after which an answer counts as failed


@dataclass
class Freeze:
    """One freeze and what came of it until every client had an answer that it asked for after the wake-up."""

    service: str
    seconds: float
    killed: list[str] = field(default_factory=list)  # names of processes that were started again
    failed: list[str] = field(default_factory=list)  # requests without an answer, or with another text
    answers: int = 0
    longest_pause_s: float = 0.0  # within a stream

    def faults(self, hung_timeout_s: float) -> list[str]:
        """What must not happen: the end of a process that stood still for less than the timeout, and requests without
        an answer, except the streams of a gateway that was frozen for longer.
        """
        is_hung = self.seconds > hung_timeout_s and self.service != LAUNCHER
        expected = [name for name in self.killed if is_hung and self.service in name][:1]
        others = [name for name in self.killed if name not in expected]
        failed = [] if is_hung and self.service == GATEWAY else self.failed
        return [*(f"{name} was killed" for name in others), *failed]


class FrozenRing:
    """A server under the load of `num_clients` streams at a time."""

    def __init__(self, server: Server, num_clients: int) -> None:
        self._server, self._num_clients = server, num_clients
        self._bodies = [completion(NUM_TOKENS, prompt=f"def stream_{i}():", seed=i) for i in range(NUM_BODIES)]
        self._expected: list[str] = []
        self._current: Freeze | None = None
        self._begun_s = [0.0] * num_clients  # start of each client's last answer

    async def run(self, plan: list[tuple[str, float]]) -> list[Freeze]:
        """Freezes one service after another, each for its seconds."""
        timeout, connector = aiohttp.ClientTimeout(ANSWER_S), aiohttp.TCPConnector(limit=0, force_close=True)
        async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
            self._expected = [(await stream(session, self._server.url, body)).text for body in self._bodies]
            clients = [asyncio.create_task(self._ask(session, number)) for number in range(self._num_clients)]
            try:
                return [await self._freeze(service, seconds) for service, seconds in plan]
            finally:
                for client in clients:
                    client.cancel()
                await asyncio.gather(*clients, return_exceptions=True)

    def processes(self) -> dict[str, int]:
        """Process ids by name. A starting process has its command line as name."""
        titles = self._server.children()
        return {title.removeprefix(OURS): pid for title, pid in titles.items()} | {LAUNCHER: self._server.process.pid}

    async def _freeze(self, service: str, seconds: float) -> Freeze:
        before = self.processes()
        victim = next(pid for name, pid in sorted(before.items()) if name.startswith(service))
        self._current = freeze = Freeze(service, seconds)
        os.kill(victim, signal.SIGSTOP)
        await asyncio.sleep(seconds)
        try:
            os.kill(victim, signal.SIGCONT)
        except ProcessLookupError:
            pass  # it was killed
        await self._until_answered()
        after = self.processes()
        freeze.killed = sorted(name for name, pid in before.items() if after.get(name) != pid)
        return freeze

    async def _until_answered(self) -> None:
        """Until each client has an answer to a question of now, and all processes have their names."""
        awake_s = time.perf_counter()
        while min(self._begun_s) < awake_s or not all(map(_is_named, self._server.children())):
            await asyncio.sleep(0.1)
            if time.perf_counter() - awake_s > 2 * ANSWER_S:
                raise TimeoutError(f"no answers {2 * ANSWER_S:.0f} s after {self._current}")

    async def _ask(self, session: aiohttp.ClientSession, number: int) -> None:
        for place in itertools.count(number):
            begun_s, body = time.perf_counter(), self._bodies[place % NUM_BODIES]
            try:
                log = await stream(session, self._server.url, body)
            except (RuntimeError, aiohttp.ClientError, TimeoutError) as e:
                self._on_failed(f"{type(e).__name__} {e} after {time.perf_counter() - begun_s:.1f} s")
                await asyncio.sleep(0.5)
                continue
            if log.text != self._expected[place % NUM_BODIES]:
                self._on_failed(
                    f"another text, of {len(log.text)} characters, after {time.perf_counter() - begun_s:.1f} s"
                )
            self._begun_s[number] = begun_s
            if self._current is not None:
                self._current.answers += 1
                self._current.longest_pause_s = max(self._current.longest_pause_s, longest_pause_s(log))

    def _on_failed(self, words: str) -> None:
        if self._current is not None:
            self._current.failed.append(words)


def longest_pause_s(log: StreamLog) -> float:
    times = [log.started_s, *log.events_s]
    return max((after - before for before, after in itertools.pairwise(times)), default=0.0)


def _is_named(title: str) -> bool:
    return title.startswith(OURS)
