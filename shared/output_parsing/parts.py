"""The parts of an answer, in order. Pieces of one kind that follow each other belong together."""

import enum
from collections.abc import Generator
from typing import NamedTuple, TypeVar


class PartKind(enum.IntEnum):
    CONTENT = 0
    REASONING = 1
    CALL = 2  # a call begins; the text is the tool's name
    ARGUMENTS = 3  # a piece of the begun call's arguments: JSON text, or a custom tool's input
    CALL_END = 4  # the begun call is whole; without text


class Part(NamedTuple):
    kind: PartKind
    text: str = ""
    call_id: str = ""  # of a CALL whose format spells ids; empty: the answer gives it one


T = TypeVar("T")
# Reads text: yields parts, and None where it needs more text; returns a T.
Reading = Generator[Part | None, None, T]

CALL_END = Part(PartKind.CALL_END)


def silent(reading: Reading[T]) -> Reading[T]:
    """Reads without the parts, as syntax. Returns what `reading` does."""
    while True:
        try:
            part = next(reading)
        except StopIteration as end:
            value: T = end.value
            return value
        if part is None:
            yield None
