"""Frames on their way out, in order, for whoever has the links."""

import enum
from typing import NamedTuple

from blockyard.shared.messages import Frame


class Verb(enum.Enum):
    SEND = enum.auto()  # on the link this process opens
    ANSWER = enum.auto()  # on the link the peer opened


class Outgoing(NamedTuple):
    verb: Verb
    to: int  # incarnation
    frame: Frame


class Outbox:
    def __init__(self) -> None:
        self._frames: list[Outgoing] = []

    def send(self, to: int, frame: Frame) -> None:
        self._frames.append(Outgoing(Verb.SEND, to, frame))

    def answer(self, to: int, frame: Frame) -> None:
        self._frames.append(Outgoing(Verb.ANSWER, to, frame))

    def take(self) -> list[Outgoing]:
        frames, self._frames = self._frames, []
        return frames
