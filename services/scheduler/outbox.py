"""Frames on their way out, for whoever has the links: plans first, so that no worker waits for what others are told."""

import enum
from typing import NamedTuple

from blockyard.shared.messages import Frame, StepPlan


class Verb(enum.Enum):
    SEND = enum.auto()  # on the link this process opens
    ANSWER = enum.auto()  # on the link the peer opened


class Outgoing(NamedTuple):
    verb: Verb
    to: int  # incarnation
    frame: Frame


class Outbox:
    def __init__(self) -> None:
        self._plans: list[Outgoing] = []
        self._frames: list[Outgoing] = []  # in order

    def plan(self, worker: int, plan: StepPlan) -> None:
        """To a worker to which nothing else goes in this turn."""
        self._plans.append(Outgoing(Verb.SEND, worker, plan))

    def send(self, to: int, frame: Frame) -> None:
        self._frames.append(Outgoing(Verb.SEND, to, frame))

    def answer(self, to: int, frame: Frame) -> None:
        self._frames.append(Outgoing(Verb.ANSWER, to, frame))

    def take(self) -> list[Outgoing]:
        frames = self._plans + self._frames
        self._plans, self._frames = [], []
        return frames
