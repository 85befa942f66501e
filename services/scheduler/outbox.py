"""Frames on their way out, for whoever has the links: plans first, so that no worker waits for what others are told."""

import enum
from typing import NamedTuple

from blockyard.shared.messages import Frame, StepPlan


class LinkSide(enum.Enum):
    OURS = enum.auto()  # on the link this process opens
    PEERS = enum.auto()  # on the link the peer opened


class Outgoing(NamedTuple):
    side: LinkSide
    to: int  # incarnation
    frame: Frame


class Outbox:
    def __init__(self) -> None:
        self._plans: list[Outgoing] = []
        self._frames: list[Outgoing] = []  # in order

    def plan(self, worker: int, plan: StepPlan) -> None:
        """To a worker to which nothing else goes in this turn."""
        self._plans.append(Outgoing(LinkSide.OURS, worker, plan))

    def send(self, to: int, frame: Frame) -> None:
        self._frames.append(Outgoing(LinkSide.OURS, to, frame))

    def answer(self, to: int, frame: Frame) -> None:
        self._frames.append(Outgoing(LinkSide.PEERS, to, frame))

    def take(self) -> list[Outgoing]:
        frames = self._plans + self._frames
        self._plans, self._frames = [], []
        return frames
