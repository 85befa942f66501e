"""Token ids in frames and in memory: little-endian uint32. No Python loop runs over a prompt's ids here."""

import struct
import sys
from array import array
from collections.abc import Iterable
from functools import lru_cache

ID_BYTES = 4
assert sys.byteorder == "little", "arrays of ids are sent as they lie in memory"
_LANES = 1024  # ids compared at once, few enough to stay in the L1 cache
_FEW_LANES = 64  # of short prompts: the operations take as long as their widest integer


def pack(token_ids: Iterable[int]) -> bytes:
    """Raises OverflowError for an id outside uint32, TypeError for a value of another type."""
    return array("I", token_ids).tobytes()


def unpack(data: bytes) -> list[int]:
    """Raises ValueError if `data` has a partial id."""
    return list(struct.unpack(f"<{num_ids(data)}I", data))


def virtual_ids(num_tokens: int) -> bytes:
    """Returns ids that stand for the virtual tokens of a prompt adapter, whose inputs are vectors."""
    return bytes(ID_BYTES * num_tokens)


def num_ids(data: bytes) -> int:
    """Returns the number of ids. Raises ValueError if `data` has a partial id."""
    num, rest = divmod(len(data), ID_BYTES)
    if rest:
        raise ValueError(f"token ids are 4 bytes each, got {len(data)} bytes")
    return num


def first_outside(data: bytes, vocab_size: int) -> int | None:
    """Returns the first id that is not below `vocab_size`, or None. Takes 10 ns an id; `max` of a list takes 30.

    Many ids are the 32-bit lanes of one large integer. 2**31 - vocab_size is added to each lane; an id is outside the
    vocabulary if its lane's top bit is set before or after. Only lanes with the bit set before carry into the next.
    """
    num_lanes = _FEW_LANES if len(data) <= ID_BYTES * _FEW_LANES else _LANES
    missing, top = _lanes(min(vocab_size, 1 << 31), num_lanes)
    for first in range(0, len(data), ID_BYTES * _LANES):
        part = data[first : first + ID_BYTES * _LANES]
        ids = int.from_bytes(part, "little")
        if (ids | (ids + missing)) & top:
            outside = [i for i in unpack(part) if i >= vocab_size]
            if outside:
                return outside[0]
    return None


@lru_cache(8)
def _lanes(limit: int, num_lanes: int) -> tuple[int, int]:
    """Returns two integers: 2**31 - limit in every lane, and the top bit in every lane."""

    def filled(lane: int) -> int:
        return int.from_bytes(lane.to_bytes(ID_BYTES, "little") * num_lanes, "little")

    return filled((1 << 31) - limit), filled(1 << 31)
