"""Freezes services of a running server by SIGSTOP, while clients ask one stream after another."""

import asyncio
import contextlib
import itertools
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import aiohttp
from rig import Server, StreamLog, completion, stream

OURS = "blockyard: "
LAUNCHER = "launcher"
GATEWAY = "api_gateway"
SERVICES = ("message_bus", "scheduler", "gpu_worker", "tokenizer_pool", "detokenizer", GATEWAY, LAUNCHER)
MOCK = ("--worker-cls", "mock", "--mock-step-ms", "10", "--data-parallel-size", "2")
NUM_TOKENS, SHORT_TOKENS = 100, 20
NUM_BODIES = 16
ARRIVAL_S = 0.5  # between two short requests of new clients
ANSWER_S = 90.0  # after which an answer counts as failed
NOTHING = "nothing"  # in a plan: a while in which nothing is frozen


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
    """A server under the load of `num_clients` streams at a time, and of new clients twice a second."""

    def __init__(self, server: Server, num_clients: int) -> None:
        self._server, self._num_clients = server, num_clients
        self._expected: dict[tuple[int, int], str] = {}  # texts by place and number of tokens
        self._current: Freeze | None = None
        self._begun_s = [0.0] * num_clients  # start of each client's last answer
        self._open: set[asyncio.Task[bool]] = set()  # requests of new clients

    async def run(
        self, plan: list[tuple[str, float]], on_done: Callable[[Freeze], None] = lambda _: None
    ) -> list[Freeze]:
        """Freezes one service after another, each for its seconds. Calls `on_done` with each."""
        freezes = []
        timeout, connector = aiohttp.ClientTimeout(ANSWER_S), aiohttp.TCPConnector(limit=0, force_close=True)
        async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
            kinds = list(itertools.product(range(NUM_BODIES), (NUM_TOKENS, SHORT_TOKENS)))
            logs = await asyncio.gather(*(stream(session, self._server.url, make_body(*kind)) for kind in kinds))
            self._expected = {kind: log.text for kind, log in zip(kinds, logs, strict=True)}
            clients = [asyncio.create_task(self._ask_on(session, number)) for number in range(self._num_clients)]
            clients.append(asyncio.create_task(self._arrive(session)))
            try:
                for service, seconds in plan:
                    freezes.append(await self._freeze(service, seconds))
                    on_done(freezes[-1])
            finally:
                for task in (*clients, *self._open):
                    task.cancel()
                await asyncio.gather(*clients, *self._open, return_exceptions=True)
        return freezes

    def processes(self) -> dict[str, int]:
        """Process ids by name. A starting process has its command line as name."""
        titles = self._server.children()
        return {title.removeprefix(OURS): pid for title, pid in titles.items()} | {LAUNCHER: self._server.process.pid}

    async def _freeze(self, service: str, seconds: float) -> Freeze:
        before = self.processes()
        self._current = freeze = Freeze(service, seconds)
        victim = next((pid for name, pid in sorted(before.items()) if name.startswith(service)), None)
        assert victim or service == NOTHING, f"no {service} among {sorted(before)}"
        if victim:
            os.kill(victim, signal.SIGSTOP)
        await asyncio.sleep(seconds)
        if victim:
            with contextlib.suppress(ProcessLookupError):  # it was killed
                os.kill(victim, signal.SIGCONT)
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

    async def _ask_on(self, session: aiohttp.ClientSession, number: int) -> None:
        """A client that asks for one stream after another."""
        for place in itertools.count(number):
            begun_s = time.perf_counter()
            if await self._ask(session, place % NUM_BODIES, NUM_TOKENS):
                self._begun_s[number] = begun_s
            else:
                await asyncio.sleep(0.5)

    async def _arrive(self, session: aiohttp.ClientSession) -> None:
        """New clients, each with one short stream."""
        for place in itertools.count():
            task = asyncio.create_task(self._ask(session, place % NUM_BODIES, SHORT_TOKENS))
            self._open.add(task)
            task.add_done_callback(self._open.discard)
            await asyncio.sleep(ARRIVAL_S)

    async def _ask(self, session: aiohttp.ClientSession, place: int, num_tokens: int) -> bool:
        """Returns False for a request without an answer."""
        begun_s = time.perf_counter()
        try:
            log = await stream(session, self._server.url, make_body(place, num_tokens))
        except (RuntimeError, aiohttp.ClientError, TimeoutError) as e:
            self._on_failed(f"{type(e).__name__} {e} after {time.perf_counter() - begun_s:.1f} s")
            return False
        if log.text != self._expected[place, num_tokens]:
            self._on_failed(f"another text, of {len(log.text)} characters, after {time.perf_counter() - begun_s:.1f} s")
        if self._current is not None:
            self._current.answers += 1
            self._current.longest_pause_s = max(self._current.longest_pause_s, longest_pause_s(log))
        return True

    def _on_failed(self, words: str) -> None:
        if self._current is not None:
            self._current.failed.append(words)


def make_body(place: int, num_tokens: int) -> dict[str, object]:
    return completion(num_tokens, prompt=f"def stream_{place}():", seed=place)


def longest_pause_s(log: StreamLog) -> float:
    times = [log.started_s, *log.events_s]
    return max((after - before for before, after in itertools.pairwise(times)), default=0.0)


def _is_named(title: str) -> bool:
    return title.startswith(OURS)
