"""Token ids as they travel and are kept: little-endian uint32."""

import struct
from collections.abc import Sequence


def pack(token_ids: Sequence[int]) -> bytes:
    return struct.pack(f"<{len(token_ids)}I", *token_ids)


def unpack(data: bytes) -> list[int]:
    """Raises ValueError if `data` is no whole number of ids."""
    count, rest = divmod(len(data), 4)
    if rest:
        raise ValueError(f"token ids are 4 bytes each, got {len(data)} bytes")
    return list(struct.unpack(f"<{count}I", data))
