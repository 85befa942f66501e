"""The client of `blockyard bench serve` for benchmarks that look at single events.

On two cores the client is part of what it measures; this one costs a few microseconds an event.
"""

import asyncio
import time
from dataclasses import dataclass
from urllib.parse import urlsplit

import uvloop

from blockyard.services.bench.load import client, http_response
from blockyard.services.bench.load.results import DONE, StreamChunk, decode_chunk


@dataclass
class RawLog:
    """One stream: pieces of the response as they were read."""

    started_s: float  # CLOCK_REALTIME, as are the other times
    pieces: http_response.TimedReads

    def events(self) -> list[tuple[float, StreamChunk]]:
        """When each event was whole, and the event."""
        found = http_response.read(self.pieces)
        if found.status != 200:
            raise RuntimeError(f"HTTP {found.status}: {found.body[-300:]!r}")
        return [(at, decode_chunk(data)) for at, data in found.events() if data != DONE]


def raw_streams(url: str, bodies: list[dict[str, object]]) -> list[RawLog]:
    """All bodies at once, a connection each, to the end of the last."""
    return [RawLog(x.sent_s, x.pieces) for x in _exchanges(url, [body | {"stream": True} for body in bodies])]


def raw_statuses(url: str, bodies: list[dict[str, object]], timeout_s: float) -> list[str]:
    """The status of each answer, or the reason that there is none. All bodies at once, a connection each."""
    return [x.failure or str(http_response.read(x.pieces).status) for x in _exchanges(url, bodies, timeout_s)]


def _exchanges(url: str, bodies: list[dict[str, object]], timeout_s: float = 3600.0) -> list[client.Exchange]:
    parts = urlsplit(url)
    target = client.Endpoint(parts.hostname or "", parts.port or 80)
    requests = [target.request(body) for body in bodies]
    plan = client.LoadPlan(requests, [0.0] * len(bodies), timeout_s=timeout_s)
    load = client.LoadRun(clock=time.time)
    with client.QuietProcess(), asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(client.run(target, plan, load))
    return load.exchanges
