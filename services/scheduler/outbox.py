"""Frames that a step sends: to workers, gateways and detokenizers."""

import enum
from typing import NamedTuple

from blockyard.shared.messages import Cancel, Frame, StepPlan, StreamOpen, TokenBatch, TokenRows, TokenStep


class LinkSide(enum.Enum):
    OURS = enum.auto()  # the link that this process opened
    PEERS = enum.auto()  # the link that the peer opened


class Outgoing(NamedTuple):
    side: LinkSide
    to: int  # incarnation
    frame: Frame


class Outbox:
    """The frames of one step. Plans are sent first, because workers wait for them."""

    def __init__(self) -> None:
        self._plans: list[Outgoing] = []
        self._frames: list[Outgoing] = []  # in order

    def plan(self, worker: int, plan: StepPlan) -> None:
        """The only frame that this worker gets in this step."""
        self._plans.append(Outgoing(LinkSide.OURS, worker, plan))

    def send(self, to: int, frame: Frame) -> None:
        self._frames.append(Outgoing(LinkSide.OURS, to, frame))

    def answer(self, to: int, frame: Frame) -> None:
        self._frames.append(Outgoing(LinkSide.PEERS, to, frame))

    def take(self) -> list[Outgoing]:
        frames = self._plans + self._frames
        self._plans, self._frames = [], []
        return frames


class DetokenizerOutbox:
    """What a step sends to one live detokenizer."""

    __slots__ = ("_closed", "closes", "incarnation", "num_streams", "opens", "rows", "stamp_s", "steps")

    def __init__(self, incarnation: int) -> None:
        self.incarnation = incarnation
        self.num_streams = 0
        self.opens: list[StreamOpen] = []
        self.rows: list[TokenRows] = []
        self.steps: list[TokenStep] = []
        self.closes: list[Cancel] = []
        self.stamp_s = 0.0
        self._closed: list[TokenBatch] = []

    def stamp(self, stamp_s: float) -> None:
        """Of two results in one step the older time counts, so that no latency is hidden."""
        if not self.stamp_s:
            self.stamp_s = stamp_s

    def close_batch(self) -> None:
        """Starts a new batch: within one, the detokenizer reads `rows` before `steps`."""
        if self.opens or self.rows or self.steps or self.closes:
            self._closed.append(TokenBatch(self.opens, self.steps, self.closes, self.stamp_s, self.rows))
            self.opens, self.rows, self.steps, self.closes, self.stamp_s = [], [], [], [], 0.0

    def flush(self, outbox: Outbox) -> None:
        self.close_batch()
        for batch in self._closed:
            outbox.send(self.incarnation, batch)
        self._closed = []
