"""Sets of positions of a transfer, as bit masks in one integer."""


def bits(first: int, count: int) -> int:
    """Bit mask with bits [first, first + count) set."""
    return ((1 << count) - 1) << first if count > 0 and first >= 0 else 0


def ranges(mask: int) -> list[tuple[int, int]]:
    """Runs of set bits: (first bit, length), lowest first."""
    found: list[tuple[int, int]] = []
    at = 0
    while mask:
        zeros = (mask & -mask).bit_length() - 1
        mask >>= zeros
        ones = (~mask & (mask + 1)).bit_length() - 1
        found.append((at + zeros, ones))
        mask >>= ones
        at += zeros + ones
    return found
