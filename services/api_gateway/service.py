"""The gateway's loop over its links: frames and membership to the parts that own them."""

import asyncio
import time
from collections.abc import AsyncIterable, Callable

from blockyard.services.api_gateway.flow import Flow
from blockyard.services.api_gateway.metrics import Metrics
from blockyard.services.api_gateway.streams import Streams
from blockyard.shared.bus import Changed, Event, Gone, Joined
from blockyard.shared.config.gateway import GatewayConfig
from blockyard.shared.messages import (
    Accepted,
    Detokenized,
    GatewayIn,
    Member,
    Refused,
    RoomChanged,
    Scrape,
    Scraped,
    Stats,
    TextBatch,
    TextRejected,
    Tokenized,
)
from blockyard.shared.ring_client.admission import Admission
from blockyard.shared.ring_client.dispatch import Dispatch
from blockyard.shared.ring_client.fanout import Fanout
from blockyard.shared.ring_client.journal import Journal
from blockyard.shared.ring_client.meters import Meters
from blockyard.shared.ring_client.ring_links import RingLinks
from blockyard.shared.ring_client.text_work import TextWork
from blockyard.shared.serving import rss_bytes

TICK_S = 0.1
TICKS_A_ROUND = 5  # of what is looked at less often


class Gateway:
    """`handle` decides and sends; it never waits. One bad frame or request never ends the loop."""

    def __init__(self, config: GatewayConfig, links: RingLinks, clock: Callable[[], float] = time.monotonic) -> None:
        self.links, self._config, self._clock = links, config, clock
        self.draining = False
        self.num_active = 0  # HTTP requests that POST
        self.meters = Meters(config.served_model_names[0] if config.served_model_names else "")
        self.metrics = Metrics(links, self.meters)
        self.streams = Streams(config.keepalive_s, config.client_timeout_s)
        self.journal = Journal()
        self._admission = Admission(config.served_model_names)
        self._text_work = TextWork(links)
        self._dispatch = Dispatch(links, self.journal, self._admission, self.meters, config.stall_timeout_s)
        self._fanout = Fanout(links, self.journal, self._dispatch, self.meters)
        self.flow = Flow(self._text_work, self._admission, self._dispatch, self.meters, clock)

    async def run(self, events: AsyncIterable[tuple[int, Event | GatewayIn]]) -> None:
        """Serves the ring until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._tick())
            tasks.create_task(self.streams.sweep())
            async for peer, event in events:
                self.handle(peer, event)

    def handle(self, peer: int, event: Event | GatewayIn) -> None:
        match event:
            case TextBatch():
                self._fanout.text(event, self._clock())
            case Tokenized() | Detokenized() | TextRejected():
                self._text_work.answered(peer, event)
            case Accepted():
                self._dispatch.accepted(peer, event, self._clock())
            case Refused():
                self._dispatch.refused(peer, event, self._clock())
            case RoomChanged():
                self._admission.heard(peer, event.room, self._clock())
            case Scrape():
                self.metrics.scrape(peer, event)
            case Scraped():
                self.metrics.scraped(event)
            case Joined() | Changed():
                self._changed(event.member)
            case Gone():
                self._gone(event.member)

    def drain(self) -> None:
        """No new requests from here on; running ones end in their time."""
        self.draining = True
        self.links.update(ready=False, phase="draining")

    def _changed(self, member: Member) -> None:
        self._admission.changed(member)
        self._text_work.changed(member)
        self._dispatch.changed(member, self._clock())
        if not self.meters.model_name and (cards := self._admission.cards()):
            self.meters.model_name = cards[0].names[0]

    def _gone(self, member: Member) -> None:
        self._admission.gone(member)
        self._text_work.gone(member)
        self._dispatch.gone(member, self._clock())

    async def _tick(self) -> None:
        while True:
            self._dispatch.tick(self._clock())
            self._text_work.tick(self._clock(), self._config.stall_timeout_s)
            self.links.count(self._stats())
            for _ in range(TICKS_A_ROUND):
                self._dispatch.retry(self._clock())
                await asyncio.sleep(TICK_S)

    def _stats(self) -> Stats:
        return Stats(
            running=sum(e.num_open for e in self.journal.entries.values()),
            waiting=self._text_work.num_waiting,
            requests_total=self.meters.requests,
            prompt_tokens_total=self.meters.prompt_tokens,
            output_tokens_total=self.meters.output_tokens,
            rss_bytes=rss_bytes(),
        )
