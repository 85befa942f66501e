"""/metrics: this gateway's counters plus those of all others, and gauges a member from the membership list."""

import asyncio
import secrets
from collections.abc import Iterable, Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from blockyard.services.api_gateway.exposition import MeterFamilies
from blockyard.services.api_gateway.queue_metrics import queue_families
from blockyard.shared.messages import Member, Role, Scrape, Scraped
from blockyard.shared.ring_client.meters import Meters
from blockyard.shared.ring_client.ring_links import RingLinks

SCRAPE_TIMEOUT_S = 0.5  # a gateway that does not answer within it is left out

# name, help, field of Stats; vLLM's names where there is one
_GAUGES = (
    ("num_requests_running", "Choices in the batch, or open streams", "running"),
    ("num_requests_waiting", "Requests that wait", "waiting"),
    ("kv_blocks_used", "KV blocks in use", "blocks_used"),
    ("kv_blocks", "KV blocks", "blocks_total"),
    ("host_kv_blocks_used", "KV blocks in host memory that hold something", "host_blocks_used"),
    ("host_kv_blocks", "KV blocks in host memory", "host_blocks_total"),
    ("resident_bytes", "Resident memory", "rss_bytes"),
)
_COUNTERS = (
    ("num_preemptions", "Preemptions", "preemptions_total"),
    ("steps", "Steps", "steps_total"),
    ("prefix_cache_queries", "Tokens looked up in the prefix cache", "prefix_queries_total"),
    ("prefix_cache_hits", "Tokens found in the prefix cache", "prefix_hits_total"),
    ("kv_blocks_saved", "KV blocks copied to host memory", "blocks_saved_total"),
    ("kv_blocks_fetched", "KV blocks copied back from host memory", "blocks_fetched_total"),
    ("malformed_frames", "Frames that did not decode", "malformed_total"),
)
_LABELS = ["model_name", "member", "role"]


class Metrics:
    def __init__(self, links: RingLinks, meters: Meters) -> None:
        self._links = links
        self._own = _registry(MeterFamilies(meters))
        self._ring = _registry(_RingGauges(links, meters))
        self._scraping: dict[str, tuple[list[str], int, asyncio.Event]] = {}  # texts, how many, all there

    def own(self) -> str:
        return generate_latest(self._own).decode()

    async def all(self) -> str:
        """The sum over all gateways; the gauges are the same whoever is asked."""
        scrape = Scrape(secrets.token_hex(8))
        others = [m for m in self._links.members.values() if m.role == Role.API_GATEWAY]
        peers = [m for m in others if self._links.send(m.incarnation, scrape)]
        texts = [self.own()]
        if peers:
            everyone = asyncio.Event()
            self._scraping[scrape.request_id] = (texts, len(peers) + 1, everyone)
            try:
                async with asyncio.timeout(SCRAPE_TIMEOUT_S):
                    await everyone.wait()
            except TimeoutError:
                pass
            finally:
                del self._scraping[scrape.request_id]
        return summed(texts) + generate_latest(self._ring).decode()

    def scrape(self, peer: int, frame: Scrape) -> None:
        self._links.answer(peer, Scraped(frame.request_id, self.own()))

    def scraped(self, frame: Scraped) -> None:
        if frame.request_id in self._scraping:
            texts, expected, everyone = self._scraping[frame.request_id]
            texts.append(frame.text)
            if len(texts) == expected:
                everyone.set()


def summed(texts: Iterable[str]) -> str:
    """One exposition whose samples are the sums of those with the same name and labels."""
    families: dict[str, list[str]] = {}  # HELP and TYPE lines -> names of samples, in order
    values: dict[str, float] = {}
    for text in texts:
        head = ""
        for line in text.splitlines():
            if line.startswith("# HELP"):
                head = line
            elif line.startswith("# TYPE"):
                head = f"{head}\n{line}"
                families.setdefault(head, [])
            elif " " in line:
                name, _, value = line.rpartition(" ")
                if name not in values:
                    families.setdefault(head, []).append(name)
                values[name] = values.get(name, 0.0) + float(value)
    lines = []
    for head, names in families.items():
        lines.append(head)
        lines.extend(f"{name} {values[name]}" for name in names)
    return "\n".join(lines) + "\n"


class _RingGauges:
    """The membership list as gauges; prometheus_client calls `collect`."""

    def __init__(self, links: RingLinks, meters: Meters) -> None:
        self._links, self._meters = links, meters

    def collect(self) -> Iterator[Metric]:
        members = [self._links.me, *self._links.members.values()]
        for kind, table in ((GaugeMetricFamily, _GAUGES), (CounterMetricFamily, _COUNTERS)):
            for name, text, field in table:
                family = kind(f"blockyard:{name}", text, labels=_LABELS)
                for m in members:
                    family.add_metric(self._labels(m), getattr(m.stats, field))
                yield family
        usage = GaugeMetricFamily("blockyard:kv_cache_usage_perc", "Share of KV blocks in use, 0 to 1", labels=_LABELS)
        ready = GaugeMetricFamily("blockyard:member_ready", "1 for a member that serves", labels=_LABELS)
        for m in members:
            ready.add_metric(self._labels(m), float(m.ready))
            if m.stats.blocks_total:
                usage.add_metric(self._labels(m), m.stats.blocks_used / m.stats.blocks_total)
        yield usage
        yield ready
        yield from queue_families(members, self._meters.model_name)

    def _labels(self, member: Member) -> list[str]:
        return [self._meters.model_name, member.name, member.role.value]


def _registry(collector: MeterFamilies | _RingGauges) -> CollectorRegistry:
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Adapter(collector))
    return registry


class _Adapter(Collector):
    """prometheus_client's base class, kept out of our own types."""

    def __init__(self, source: MeterFamilies | _RingGauges) -> None:
        self._source = source

    def collect(self) -> Iterator[Metric]:
        return self._source.collect()
