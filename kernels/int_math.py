"""Integer math for grids and tiles, on the host: Triton's own functions take 5 us a call, a tenth of a launch."""


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """The smallest power of 2 that is n or more; n is above 0."""
    return 1 << (n - 1).bit_length()
