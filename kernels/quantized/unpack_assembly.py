"""Instructions of a GPU that make 16-bit floats of four bytes with two 4-bit codes each, for `inline_asm_elementwise`.

The code is the mantissa of a number whose last bit is worth 1, as in `unpack_tiles.int_numbers`, here for two codes an
instruction. E2M1's three lower bits are exponent and mantissa of the smallest floats, times a power of 2. A table lies
in eight registers, from which `prmt` takes a byte of four numbers at a time.
"""

import torch

from blockyard.kernels.quantized.packed_weights import Codes

_CONSTANTS = {  # bits of: the number to which a code is added, that number negated, the same less 8; 1
    torch.bfloat16: (0x4300, 0xC300, 0xC308, 0x3F80),
    torch.float16: (0x6400, 0xE400, 0xE408, 0x3C00),
}
_E2M1 = {torch.bfloat16: (6, 0x01C0, 0x7E80), torch.float16: (9, 0x0E00, 0x7400)}  # shift, mask, power of 2
OFFSET = {torch.bfloat16: 128, torch.float16: 1024}  # the number to which a code is added
_FMA = {torch.bfloat16: "fma.rn.bf16x2", torch.float16: "fma.rn.f16x2"}

# operands: $0, $1 the numbers of the lower halves, $2, $3 of the upper ones, $4 four bytes
_BYTES = "prmt.b32 a, $4, 0, 0x4140; prmt.b32 b, $4, 0, 0x4342;"  # two bytes in the lower bytes of 16 bits each
_ORDER = (("$0", "$2", "a"), ("$1", "$3", "b"))  # of lower and upper halves of these
# of a word: $0 to $3 the numbers of codes 0 and 4, 1 and 5, ..., which are 16 bits apart already
_WORD = "mov.b32 a, $4; shr.u32 b, $4, 8;"
_WORD_ORDER = (("$0", "$1", "a"), ("$2", "$3", "b"))


def unpack_assembly(
    kind: Codes,
    dtype: torch.dtype,
    middle: bool,
    table: tuple[float, ...] | None = None,
    *,
    of_words: bool = False,
    small: bool = False,
    has_offset: bool = False,
) -> str:
    """The instructions, or "" where there are none. middle: integers are less 8. table: of 16 numbers.

    of_words: a pair has codes i and i + 4 of a word, which takes fewer instructions than codes of adjacent bytes.
    small: numbers of E2M1 are multiplied by 2 ** -126, of float16 by 2 ** -14, for which scales that follow make up.
    has_offset: integers are greater than codes by OFFSET of this dtype, which saves a difference.
    """
    if dtype not in _CONSTANTS:
        return ""
    if kind is Codes.INT4:
        return _integers(dtype, middle, of_words, has_offset)
    if kind is Codes.E2M1:
        return _floats(dtype, of_words, small)
    if kind is Codes.TABLE4 and table is not None:
        return _from_table(torch.tensor(table).to(dtype).view(torch.int16).tolist(), of_words)
    return ""


def _twice(bits: int) -> str:
    return f"0x{bits << 16 | bits:08X}"


def _integers(dtype: torch.dtype, middle: bool, of_words: bool, has_offset: bool) -> str:
    base, less, less_8, one = _CONSTANTS[dtype]
    made = [_WORD if of_words else _BYTES]
    made.append(f"mov.b32 one, {_twice(one)}; mov.b32 less, {_twice(less_8 if middle else less)};")
    for low, high, word in _WORD_ORDER if of_words else _ORDER:
        made.append(f"lop3.b32 {low}, {word}, 0x000F000F, {_twice(base)}, 0xEA; shr.u32 {word}, {word}, 4;")
        made.append(f"lop3.b32 {high}, {word}, 0x000F000F, {_twice(base)}, 0xEA;")
    if not has_offset:
        made += [f"{_FMA[dtype]} ${i}, ${i}, one, less;" for i in range(4)]
    return f"{{ .reg .b32 a, b, one, less; {' '.join(made)} }}"


def _floats(dtype: torch.dtype, of_words: bool, small: bool) -> str:
    shift, mask, power = _E2M1[dtype]
    made = [_WORD if of_words else _BYTES, f"mov.b32 power, {_twice(power)}; mov.b32 zero, 0;"]
    for low, high, word in _WORD_ORDER if of_words else _ORDER:
        for out, by, sign in ((low, shift, 12), (high, shift - 4, 8)):
            if sign - by > 3:  # one product has the bits in both places, without a carry
                made.append(f"and.b32 c, {word}, {_twice(0xF << 12 - sign)}; mul.lo.u32 c, c, {1 << sign | 1 << by};")
                made.append(f"and.b32 {out}, c, {_twice(0x8000 | mask)};")
            else:
                made.append(f"shl.b32 c, {word}, {by}; and.b32 c, c, {_twice(mask)}; shl.b32 d, {word}, {sign};")
                made.append(f"lop3.b32 {out}, d, 0x80008000, c, 0xEA;")
            if not small:
                made.append(f"{_FMA[dtype]} {out}, {out}, power, zero;")
    return f"{{ .reg .b32 a, b, c, d, power, zero; {' '.join(made)} }}"


def _from_table(bits: list[int], of_words: bool) -> str:
    words = [[bits[i + j] >> 8 * byte & 255 for j in range(4)] for byte in (0, 1) for i in (0, 4, 8, 12)]
    # no grid has a third axis: of 0 the compiler does not know, so that it keeps the sums in registers, where constants
    # would be moved there anew each time
    made = ["mov.u32 z, %ctaid.z;"]
    made += [f"add.u32 t{i}, z, 0x{int.from_bytes(word, 'little'):08X};" for i, word in enumerate(words)]
    # two bytes at a time, whose four codes are those of a lower and of an upper output
    made.append("prmt.b32 x, $4, 0, 0x3120;" if of_words else "mov.b32 x, $4;")
    # an index has three bits; a mask of the fourth ones chooses between the halves of the table
    made.append("shl.b32 c, x, 4; and.b32 d, x, 0x77777777;")
    for i, (low, high) in enumerate((("$0", "$1"), ("$2", "$3")) if of_words else (("$0", "$2"), ("$1", "$3"))):
        made.append(f"prmt.b32 m, x, c, {('0x9D8C', '0xBFAE')[i]};" + " shr.u32 d, d, 16;" * i)
        for half, first in (("a", 0), ("b", 4)):  # lower and upper bytes of the four numbers
            made.append(f"prmt.b32 {half}, t{first}, t{first + 1}, d; prmt.b32 e, t{first + 2}, t{first + 3}, d;")
            made.append(f"lop3.b32 {half}, m, e, {half}, 0xCA;")
        made.append(f"prmt.b32 {low}, a, b, 0x6240; prmt.b32 {high}, a, b, 0x7351;")
    return f"{{ .reg .b32 a, b, c, d, e, m, x, z, t0, t1, t2, t3, t4, t5, t6, t7; {' '.join(made)} }}"
