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
    parts = urlsplit(url)
    target = client.Endpoint(parts.hostname or "", parts.port or 80)
    plan = client.LoadPlan([target.request(body | {"stream": True}) for body in bodies], [0.0] * len(bodies))
    load = client.LoadRun(clock=time.time)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(client.run(target, plan, load))
    return [RawLog(x.sent_s, x.pieces) for x in load.exchanges]
