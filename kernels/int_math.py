"""For grids and tiles, on the host: Triton's own functions of this kind take 5 us a call, a tenth of a launch."""


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """The next one from n on, which is above 0."""
    return 1 << (n - 1).bit_length()
