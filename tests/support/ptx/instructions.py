"""What instructions compute from the bits of registers, for all threads of a program at once."""

import numpy as np
import torch

from ptx.memory import Bits


def f32(bits: Bits) -> np.ndarray:
    return bits.astype(np.uint32).view(np.float32)


def of_f32(values: np.ndarray) -> Bits:
    with np.errstate(over="ignore"):
        return values.astype(np.float32).view(np.uint32).astype(np.uint64)


def half(bits: Bits, kind: str) -> np.ndarray:
    """float64 of 16-bit floats."""
    dtype = torch.bfloat16 if kind == "bf16" else torch.float16
    return torch.from_numpy(bits.astype(np.uint16).view(np.int16)).view(dtype).double().numpy()


def of_half(values: np.ndarray, kind: str) -> Bits:
    dtype = torch.bfloat16 if kind == "bf16" else torch.float16
    made = torch.from_numpy(np.asarray(values, np.float64)).to(dtype).view(torch.int16).numpy()
    return made.view(np.uint16).astype(np.uint64)


def signed(bits: Bits, width: int) -> np.ndarray:
    kind = {8: np.int8, 16: np.int16, 32: np.int32, 64: np.int64}[width]
    unsigned = {8: np.uint8, 16: np.uint16, 32: np.uint32, 64: np.uint64}[width]
    return bits.astype(unsigned).view(kind).astype(np.int64)


def lop3(a: Bits, b: Bits, c: Bits, table: Bits) -> Bits:
    made = np.zeros_like(a)
    for row in range(8):
        if int(table[0]) >> row & 1:
            made |= (a if row & 4 else ~a) & (b if row & 2 else ~b) & (c if row & 1 else ~c)
    return made


def popc(value: Bits) -> Bits:
    return np.array([int(one).bit_count() for one in value], np.uint64)


def extract(value: np.ndarray, first: np.ndarray, length: int, is_signed: bool) -> Bits:
    """The instruction bfe."""
    made = value >> first & ((1 << length) - 1)
    return (np.where(is_signed & (made >> (length - 1)), made - (1 << length), made)).view(np.uint64)


def integers(name: str, numbers: list[np.ndarray], width: int) -> np.ndarray:
    if name in ("shl", "shr"):
        by = numbers[1]
        return np.where(by < width, numbers[0] << by if name == "shl" else numbers[0] >> by, 0)
    if name in ("div", "rem"):
        quotient = np.fix(numbers[0] / np.where(numbers[1] == 0, 1, numbers[1])).astype(np.int64)
        return quotient if name == "div" else numbers[0] - quotient * numbers[1]
    return {
        "mov": lambda a: a, "add": lambda a, b: a + b, "sub": lambda a, b: a - b, "mul": lambda a, b: a * b,
        "mad": lambda a, b, c: a * b + c, "and": lambda a, b: a & b, "or": lambda a, b: a | b,
        "xor": lambda a, b: a ^ b, "not": lambda a: ~a, "min": np.minimum, "max": np.maximum, "neg": lambda a: -a,
    }[name](*numbers)  # fmt: skip


def floats(name: str, given: list[np.ndarray]) -> np.ndarray:
    with np.errstate(all="ignore"):
        return {
            "add": lambda a, b: a + b, "sub": lambda a, b: a - b, "mul": lambda a, b: a * b,
            "fma": lambda a, b, c: a * b + c, "div": lambda a, b: a / b, "min": np.fmin, "max": np.fmax,
            "ex2": np.exp2, "neg": lambda a: -a, "rcp": lambda a: 1 / a, "rsqrt": lambda a: a**-0.5,
            "mov": lambda a: a,
            "abs": np.abs,
        }[name](*given)  # fmt: skip


def prmt(a: Bits, b: Bits, selector: Bits) -> Bits:
    both = a | b << np.uint64(32)
    made = np.zeros_like(a)
    for i in range(4):
        nibble = selector >> np.uint64(4 * i) & np.uint64(15)
        byte = both >> (nibble & np.uint64(7)) * np.uint64(8) & np.uint64(255)
        sign = (byte >> np.uint64(7)) * np.uint64(255)
        made |= np.where(nibble & np.uint64(8), sign, byte) << np.uint64(8 * i)
    return made


BITWISE = {"lop3": lop3, "popc": popc, "prmt": prmt}
