"""Counters of links to other workers, for this worker's entry in the membership list."""

from collections import Counter
from collections.abc import Iterable

from blockyard.services.kv_transfer.protocol.drops import Drops
from blockyard.services.kv_transfer.sender_link import SenderLink
from blockyard.shared.messages import NamedCount


class LinkCounts:
    """Sums over links. A link is added once it is closed, or to a copy for as long as it is open."""

    def __init__(self) -> None:
        self._bytes: Counter[str] = Counter()  # written, by connector
        self._dropped: Counter[str] = Counter()  # frames, by reason

    @property
    def bytes_written(self) -> list[NamedCount]:
        return _listed(self._bytes)

    @property
    def dropped(self) -> list[NamedCount]:
        return _listed(self._dropped)

    def copy(self) -> "LinkCounts":
        made = LinkCounts()
        made.add(self)
        return made

    def add(self, other: "LinkCounts") -> None:
        self._bytes.update(other._bytes)
        self._dropped.update(other._dropped)

    def add_named(self, bytes_written: Iterable[NamedCount], dropped: Iterable[NamedCount]) -> None:
        """Adds what another process has counted."""
        self._bytes.update({one.name: one.total for one in bytes_written})
        self._dropped.update({one.name: one.total for one in dropped})

    def add_sender(self, link: SenderLink) -> None:
        if link.bytes_written:
            self._bytes[link.connector] += link.bytes_written
        self.add_drops(link.drops)

    def add_drops(self, drops: Drops) -> None:
        self._dropped.update({reason.value: total for reason, total in drops.by_reason.items()})


def _listed(counts: Counter[str]) -> list[NamedCount]:
    return [NamedCount(name, total) for name, total in sorted(counts.items())]
