"""The gateway's loop over its links: frames and membership to the parts that own them."""

import asyncio
import time
from collections.abc import AsyncIterable, Callable

from blockyard.services.api_gateway.metrics.scrape import Metrics
from blockyard.services.api_gateway.progress import Progress
from blockyard.services.api_gateway.request_pipeline import Flow
from blockyard.services.api_gateway.requests.body_parser import Bodies
from blockyard.services.api_gateway.responses.streams import Streams
from blockyard.shared.bus import Event
from blockyard.shared.config.gateway import GatewayConfig
from blockyard.shared.messages import GatewayIn, Scrape, Scraped, Stats
from blockyard.shared.ring_client.client import RingClient
from blockyard.shared.ring_client.ring_links import RingLinks
from blockyard.shared.serving import rss_bytes


class Gateway:
    """`handle` decides and sends; it never waits. One bad frame or request never ends the loop."""

    def __init__(self, config: GatewayConfig, links: RingLinks, clock: Callable[[], float] = time.monotonic) -> None:
        self.links = links
        self.draining = False
        self.num_active = 0  # HTTP requests that POST
        self.client = RingClient(links, config.served_model_names, config.stall_timeout_s, clock)
        self.meters, self.journal = self.client.meters, self.client.journal
        self.metrics = Metrics(links, self.meters, self.client.counts, config.metrics_names)
        self.streams = Streams(config.keepalive_s, config.client_timeout_s, config.max_unread_mib << 20)
        self.flow = Flow(self.client, config.log_requests)
        self.bodies = Bodies(config)
        self.progress = Progress(config.stall_timeout_s / 2)
        self._clock = clock

    async def run(self, events: AsyncIterable[tuple[int, Event | GatewayIn]]) -> None:
        """Serves the ring until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.client.keep_time(self._count))
            tasks.create_task(self.streams.sweep())
            tasks.create_task(self.bodies.run())
            async for peer, event in events:
                self.handle(peer, event)

    def handle(self, peer: int, event: Event | GatewayIn) -> None:
        match event:
            case Scrape():
                self.metrics.scrape(peer, event)
            case Scraped():
                self.metrics.scraped(peer, event)
            case _:
                self.client.handle(peer, event)

    def drain(self) -> None:
        """No new requests from here on; running ones end in their time."""
        self.draining = True
        self.links.update(ready=False, phase="draining")

    def _count(self) -> None:
        stats = Stats(
            running=self.client.num_open(),
            waiting=self.client.text_work.num_waiting,
            requests_total=self.meters.requests,
            prompt_tokens_total=self.meters.prompt_tokens,
            output_tokens_total=self.meters.output_tokens,
            rss_bytes=rss_bytes(),
            active=self.flow.num_active,
        )
        self.links.count(stats)
        self.progress.observe(self.links.members.values(), self._clock())
