"""/metrics: the summed counters of all gateways, and the counters of the ring's other members."""

import asyncio
import secrets
from collections.abc import Callable, Iterable, Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from blockyard.services.api_gateway.metrics.exposition import expose, member_families
from blockyard.shared.config.services.gateway import MetricsNames
from blockyard.shared.messages import PastText, Role, Scrape, Scraped
from blockyard.shared.ring_client.metrics.member_counts import MemberCounts, scheduler_totals
from blockyard.shared.ring_client.metrics.meters import Meters
from blockyard.shared.ring_client.metrics.metric_families import OF_CLIENT, OF_SCHEDULERS
from blockyard.shared.ring_client.metrics.peer_queries import PeerQueries
from blockyard.shared.ring_client.ring_links import RingLinks

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
SCRAPE_TIMEOUT_S = 0.5  # a gateway that does not answer in time is counted by its last answer
MAX_TEXTS = 64  # last answers that are kept, one a gateway; older answers are kept as one sum


class Metrics:
    def __init__(
        self, links: RingLinks, meters: Meters, counts: MemberCounts, names: MetricsNames = MetricsNames.BOTH
    ) -> None:
        self._links, self._meters, self._counts, self._names = links, meters, counts, names
        self._own = _registry(lambda: expose(OF_CLIENT, meters, meters, names))
        self._ring = _registry(self._of_ring)
        self._queries = PeerQueries(links)
        self._texts: dict[int, str] = {}  # each other gateway's last answer, by incarnation
        self._older = ""

    def own(self) -> str:
        return generate_latest(self._own).decode()

    async def all(self) -> str:
        """The sum over all gateways. Includes gateways that are gone or do not answer, so that no counter falls."""
        await asyncio.gather(self._counts.refresh(), self._ask_others())
        others = summed([self.own(), self._older, *self._texts.values()])
        return others + generate_latest(self._ring).decode()

    def scrape(self, peer: int, frame: Scrape) -> None:
        members = self._links.members
        past = [PastText(gateway, text) for gateway, text in self._texts.items() if gateway not in members]
        self._links.answer(peer, Scraped(frame.request_id, self.own(), past, self._counts.past()))

    def scraped(self, peer: int, frame: Scraped) -> None:
        """The answering gateway may know of gateways and members that left before this gateway started."""
        self._keep(peer, frame.text)
        for one in frame.past:
            known = self._texts.get(one.gateway)
            if one.gateway != self._links.me.incarnation and (known is None or _sum(known) < _sum(one.text)):
                self._keep(one.gateway, one.text)
        for member in frame.gone:
            self._counts.gone(member)
        self._queries.answered(peer, frame.request_id)

    def _keep(self, gateway: int, text: str) -> None:
        self._texts.pop(gateway, None)
        self._texts[gateway] = text  # last in the dict: the oldest answer is dropped first
        if len(self._texts) > MAX_TEXTS:
            self._older = summed([self._older, self._texts.pop(next(iter(self._texts)))])

    async def _ask_others(self) -> None:
        others = [m for m in self._links.members.values() if m.role == Role.API_GATEWAY]
        await self._queries.ask(others, Scrape(secrets.token_hex(8)), SCRAPE_TIMEOUT_S)

    def _of_ring(self) -> Iterator[Metric]:
        members = self._counts.members()
        yield from expose(OF_SCHEDULERS, scheduler_totals(members), self._meters, self._names)
        if self._names is not MetricsNames.VLLM:
            yield from member_families(members, self._meters.model_name)


def summed(texts: Iterable[str]) -> str:
    """One exposition in which samples of equal name and labels are added up."""
    families: dict[str, list[str]] = {}  # HELP and TYPE lines -> sample names, in order
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


def _sum(text: str) -> float:
    """The sum of all samples. Of two texts of one gateway, the later has the larger sum."""
    return sum(float(line.rpartition(" ")[2]) for line in text.splitlines() if not line.startswith("#"))


def _registry(collect: Callable[[], Iterator[Metric]]) -> CollectorRegistry:
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Adapter(collect))
    return registry


class _Adapter(Collector):
    """prometheus_client's interface around a function."""

    def __init__(self, collect: Callable[[], Iterator[Metric]]) -> None:
        self._collect = collect

    def collect(self) -> Iterator[Metric]:
        return self._collect()
