"""Where tokens are in the text that they were made of, and which of them are the assistant's.

A chat template marks the assistant's text by `{% generation %}`. For a request that asks for the mask, the block is
rendered between two marks that no client can guess; they are taken out again before the text is encoded.
"""

import secrets
from array import array
from collections.abc import Iterable
from typing import NamedTuple

from blockyard.shared.token_ids import unpack

PRIVATE = "\ue000"  # of a private use area: no text of a template is one character with it


class Marks(NamedTuple):
    """Texts around the assistant's text while a template is rendered; both empty: it is not marked."""

    begin: str = ""
    end: str = ""

    @classmethod
    def new(cls) -> "Marks":
        name = secrets.token_hex(8)
        return cls(f"{PRIVATE}b{name}{PRIVATE}", f"{PRIVATE}e{name}{PRIVATE}")


NO_MARKS = Marks()


def without_marks(text: str, marks: Marks) -> tuple[str, list[tuple[int, int]]]:
    """The text without marks, and the spans between them in it. The end of the text ends an open span."""
    pieces: list[str] = []
    spans: list[tuple[int, int]] = []
    at = 0  # in the text without marks
    before, *marked = text.split(marks.begin)
    pieces.append(before)
    at += len(before)
    for part in marked:
        inside, _, behind = part.partition(marks.end)
        behind = behind.replace(marks.end, "")  # of a block within a block
        spans.append((at, at + len(inside)))
        pieces += (inside, behind)
        at += len(inside) + len(behind)
    return "".join(pieces), spans


def packed_offsets(offsets: Iterable[tuple[int, int]]) -> bytes:
    """The first character of each token and the one behind it, as uint32."""
    return array("I", (number for pair in offsets for number in pair)).tobytes()


def unpacked_offsets(data: bytes) -> list[tuple[int, int]]:
    numbers = unpack(data)
    return list(zip(numbers[::2], numbers[1::2], strict=True))


def assistant_mask(offsets: Iterable[tuple[int, int]], spans: list[tuple[int, int]]) -> bytes:
    """1 for each token that has a character of a span. Both are in order; tokens without text are 0."""
    mask, left = bytearray(), list(reversed(spans))
    for start, end in offsets:
        while left and left[-1][1] <= start:
            left.pop()
        mask.append(bool(left) and start < end and end > left[-1][0])
    return bytes(mask)
