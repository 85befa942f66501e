"""Metrics: API gateway <-> API gateway, and API gateway <-> scheduler."""

from blockyard.shared.messages.base import Frame, Record
from blockyard.shared.messages.membership import Member, Stats


class Scrape(Frame, frozen=True):
    request_id: str


class PastText(Record, frozen=True):
    """The last counters of a gateway that is gone."""

    gateway: int  # incarnation
    text: str


class Scraped(Frame, frozen=True):
    request_id: str
    text: str  # Prometheus exposition format
    past: list[PastText] = []
    gone: list[Member] = []  # other members that are gone, with their last counters


class AskStats(Frame, frozen=True):
    """Asks a scheduler for its current counters: its last heartbeat is older."""

    request_id: str


class StatsTold(Frame, frozen=True):
    request_id: str
    stats: Stats
