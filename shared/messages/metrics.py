"""Metrics: API gateway <-> API gateway, and API gateway <-> scheduler."""

from blockyard.shared.messages.base import Frame, FrameStruct
from blockyard.shared.messages.membership import Member, Stats


class Scrape(Frame, frozen=True):
    request_id: str


class PastText(FrameStruct, frozen=True):
    """The last counters of a gateway that is gone."""

    gateway: int  # incarnation
    text: str


class Scraped(Frame, frozen=True):
    request_id: str
    text: str  # Prometheus exposition format
    past: list[PastText] = []
    gone: list[Member] = []  # other members that are gone, with their last counters


class StatsRequest(Frame, frozen=True, tag="AskStats"):
    """Asks a scheduler for its current counters: its last heartbeat is older."""

    request_id: str


class StatsResponse(Frame, frozen=True, tag="StatsTold"):
    """Answers StatsRequest."""

    request_id: str
    stats: Stats
