"""The gateway's parts, and the loop that hands them the frames and membership events of its links."""

import asyncio
import time
from collections.abc import AsyncIterable, Callable, Iterable, Iterator
from contextlib import contextmanager

from blockyard.services.api_gateway.adapter_folders import AdapterFolders
from blockyard.services.api_gateway.bodies.body_parser import BodyParser
from blockyard.services.api_gateway.metrics.scrape import Metrics
from blockyard.services.api_gateway.request_pipeline import RequestPipeline
from blockyard.services.api_gateway.responses.streamed_responses import StreamedResponses
from blockyard.services.api_gateway.stored_responses.stored_responses import StoredResponses
from blockyard.shared.bus.member_list import Event, Gone
from blockyard.shared.config.services.gateway import GatewayConfig
from blockyard.shared.messages import GatewayIn, Member, ResponseQuery, ResponseReply, Role, Scrape, Scraped, Stats
from blockyard.shared.process.service_main import rss_bytes
from blockyard.shared.ring_client.client import RingClient
from blockyard.shared.ring_client.request_fields.output_format import ModelFormats
from blockyard.shared.ring_client.ring_links import RingLinks
from blockyard.shared.ring_client.tokenizer_jobs import MANY_WAITING, MAX_WAITING

CHECK_WAIT_S = 10.0
PAUSED = "paused"  # phase of a scheduler that was paused by an operator


class StallDetector:
    """Finds schedulers that finish no step for `max_step_s` although sequences run.

    Heartbeats do not show this: a worker that hangs in a step still sends them.
    """

    def __init__(self, max_step_s: float) -> None:
        self._max_step_s = max_step_s
        self._seen: dict[int, tuple[int, float]] = {}  # scheduler -> its step count, and when that changed
        self.stalled: frozenset[int] = frozenset()

    def observe(self, members: Iterable[Member], now: float) -> None:
        seen = {}
        for member in members:
            if member.role == Role.SCHEDULER:
                before = self._seen.get(member.incarnation)
                moved = before is None or before[0] != member.stats.steps_total or not member.stats.running
                moved = moved or member.phase == PAUSED
                seen[member.incarnation] = (member.stats.steps_total, now) if moved or before is None else before
        self._seen = seen
        self.stalled = frozenset(i for i, (_, since) in seen.items() if now - since > self._max_step_s)


class Gateway:
    """`handle` never waits. One bad frame or request never ends the loop."""

    def __init__(self, config: GatewayConfig, links: RingLinks, clock: Callable[[], float] = time.monotonic) -> None:
        self.links = links
        self.draining = False
        self.num_active = 0  # POST requests that are being served
        self.client = RingClient(
            links,
            config.served_model_names,
            config.stall_timeout_s,
            clock,
            check_wait_s=CHECK_WAIT_S,
            max_waiting_texts=MAX_WAITING if config.batch is None else MANY_WAITING,
        )
        self.meters, self.journal = self.client.meters, self.client.journal
        self.metrics = Metrics(links, self.meters, self.client.counts, config.metrics_names)
        self.streams = StreamedResponses(config.keepalive_s, config.client_timeout_s, config.max_unread_mib << 20)
        formats = ModelFormats(config.parser_plugins)
        self.pipeline = RequestPipeline(self.client, formats, config)
        folders = AdapterFolders(config.lora_dir, self.client.controls, self.client.schedulers, clock)
        self.body_parser = BodyParser(config, formats, folders)
        self.stall_detector = StallDetector(config.stall_timeout_s / 2)
        self.stored = StoredResponses(config, links, self.pipeline, self.counted)
        self._clock = clock

    async def run(self, events: AsyncIterable[tuple[int, Event | GatewayIn]]) -> None:
        """Serves the ring until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.client.keep_time(self._count))
            tasks.create_task(self.streams.sweep())
            tasks.create_task(self.body_parser.run())
            tasks.create_task(self.stored.local.run())
            async for peer, event in events:
                self.handle(peer, event)

    def handle(self, peer: int, event: Event | GatewayIn) -> None:
        match event:
            case Scrape():
                self.metrics.scrape(peer, event)
            case Scraped():
                self.metrics.scraped(peer, event)
            case ResponseQuery():
                self.stored.asked(peer, event)
            case ResponseReply():
                self.stored.others.replied(event)
            case _:
                if isinstance(event, Gone):
                    self.stored.others.gone(event.member)
                self.client.handle(peer, event)

    @contextmanager
    def counted(self) -> Iterator[None]:
        self.num_active += 1
        try:
            yield
        finally:
            self.num_active -= 1

    def drain(self) -> None:
        """Refuses new requests; open ones continue."""
        self.draining = True
        self.links.update(ready=False, phase="draining")

    def _count(self) -> None:
        stats = Stats(
            running=self.client.num_open(),
            waiting=self.client.tokenizer_client.num_waiting,
            requests_total=self.meters.requests,
            prompt_tokens_total=self.meters.prompt_tokens,
            output_tokens_total=self.meters.output_tokens,
            rss_bytes=rss_bytes(),
            active=self.pipeline.num_active,
        )
        self.links.count(stats)
        self.stall_detector.observe(self.links.members.values(), self._clock())
