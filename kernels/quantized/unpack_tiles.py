"""Numbers of a tile of codes, made in registers, with their scales and zeros: functions of kernels.

Integers become floats by exponent arithmetic, which is quicker than a conversion: the code is the mantissa of a number
whose last bit is worth 1, and that number is subtracted. Constants of `CODES` are those of `packed_weights.Codes`.
"""

import triton
import triton.language as tl


@triton.jit
def int_numbers(code, OFFSET: tl.constexpr, DTYPE: tl.constexpr):
    """Whole numbers `code` - OFFSET in DTYPE, of codes from 0 to 255 (in bfloat16 to 127, exactly)."""
    if tl.float16 == DTYPE:
        return ((code.to(tl.int16) | 0x6400).to(tl.float16, bitcast=True) - (1024 + OFFSET)).to(tl.float16)
    elif tl.bfloat16 == DTYPE and OFFSET <= 8:  # noqa: RET505, only one branch is compiled
        return ((code.to(tl.int16) | 0x4300).to(tl.bfloat16, bitcast=True) - (128 + OFFSET)).to(tl.bfloat16)
    else:
        whole = (code.to(tl.int32) | 0x4B000000).to(tl.float32, bitcast=True) - (8388608.0 + OFFSET)
        return whole.to(DTYPE)


@triton.jit
def e2m1_numbers(code, DTYPE: tl.constexpr):
    """Floats of 4 bits. Their exponent and mantissa are as in the smallest numbers of DTYPE, times a power of 2."""
    if tl.float16 == DTYPE:
        code = code.to(tl.int16)
        bits = (code & 7) << 9 | (code & 8) << 12
        return bits.to(tl.float16, bitcast=True) * 16384.0
    elif tl.bfloat16 == DTYPE:  # noqa: RET505, only one branch is compiled
        code = code.to(tl.int16)
        bits = (code & 7) << 6 | (code & 8) << 12
        return bits.to(tl.bfloat16, bitcast=True) * 8.507059173023462e37
    else:
        code = code.to(tl.int32)
        bits = (code & 7) << 22 | (code & 8) << 28
        return bits.to(tl.float32, bitcast=True) * 8.507059173023462e37


@triton.jit
def numbers(code, table_ptr, CODES: tl.constexpr, MIDDLE: tl.constexpr, DTYPE: tl.constexpr):
    """What codes stand for, without scales and zeros. Of 4-bit codes `code` is 0 to 15. MIDDLE: less 8, of INT4."""
    if CODES == 1:
        return int_numbers(code, 8 if MIDDLE else 0, DTYPE)
    elif CODES == 2:  # noqa: RET505, only one branch is compiled
        return e2m1_numbers(code, DTYPE)
    elif CODES == 3:
        return tl.load(table_ptr + code.to(tl.int32)).to(DTYPE)
    elif CODES == 4:
        return int_numbers(code.to(tl.uint8, bitcast=True) ^ 0x80, 128, DTYPE)
    elif CODES == 5:
        return int_numbers(code, 0, tl.float32).to(DTYPE)
    else:
        return code.to(DTYPE)


@triton.jit
def halves(codes, table_ptr, CODES: tl.constexpr, MIDDLE: tl.constexpr, DTYPE: tl.constexpr, ASM: tl.constexpr):
    """The numbers of the lower and of the upper halves of bytes. ASM: the instructions, see `unpack_assembly`."""
    if ASM != "" and tl.bfloat16 == DTYPE:
        return tl.inline_asm_elementwise(
            ASM, "=r,=r,=r,=r,r", [codes], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=4
        )
    elif ASM != "":  # noqa: RET505, only one branch is compiled
        return tl.inline_asm_elementwise(
            ASM, "=r,=r,=r,=r,r", [codes], dtype=(tl.float16, tl.float16), is_pure=True, pack=4
        )
    else:
        low = numbers(codes & 15, table_ptr, CODES, MIDDLE, DTYPE)
        return low, numbers(codes >> 4, table_ptr, CODES, MIDDLE, DTYPE)


@triton.jit
def scale_numbers(scale, E8M0: tl.constexpr):
    """Loaded scales as float32. E8M0: they are bytes, exponents of 2 with a bias of 127; 255 is NaN."""
    if E8M0:
        bits = scale.to(tl.int32) << 23
        bits = tl.where(bits == 0, 0x00400000, bits)
        bits = tl.where(bits == 0x7F800000, 0x7FC00000, bits)
        return bits.to(tl.float32, bitcast=True)
    else:  # noqa: RET505, only one branch is compiled
        return scale.to(tl.float32)


@triton.jit
def less_zeros(number, zero, WHOLE: tl.constexpr):
    """number [..., inputs] less the zero [...] of its row. WHOLE: zeros are whole, so that the difference is exact in
    the dtype of the numbers."""
    if WHOLE:
        return number - tl.expand_dims(zero.to(number.dtype), -1)
    else:  # noqa: RET505, only one branch is compiled
        return (number.to(tl.float32) - tl.expand_dims(zero, -1)).to(number.dtype)


@triton.jit
def load_codes(codes_ptr, output, known, start, SIZE: tl.constexpr, CODES: tl.constexpr, TILE: tl.constexpr):
    """Codes of TILE inputs from `start` on: [..., TILE] of outputs [..., 1] int64, or [..., TILE / 2] bytes of two.

    Numbers of outputs that are not `known` and of inputs beyond SIZE are 0.
    """
    ROW: tl.constexpr = (SIZE + 1) // 2 if CODES <= 3 else SIZE
    WIDTH: tl.constexpr = TILE // 2 if CODES <= 3 else TILE
    first = start // 2 if CODES <= 3 else start
    cols = first + tl.arange(0, WIDTH)
    cols = cols[None, :] if len(output.shape) == 2 else cols[None, None, :]
    inside = known if SIZE % TILE == 0 else known & (cols < ROW)
    return tl.load(codes_ptr + output * ROW + cols, mask=inside, other=0.0)


@triton.jit
def load_scales(
    ptr, output, known, start,
    SIZE: tl.constexpr, GROUP: tl.constexpr, COUNT: tl.constexpr, EACH: tl.constexpr, E8M0: tl.constexpr,
):  # fmt: skip
    """Scales or zeros of COUNT times EACH inputs from `start` on as float32 [..., COUNT] of outputs [..., 1] int64.

    GROUP: inputs of a scale, a multiple of EACH; 0: an output has one scale, and the result is [..., 1].
    """
    if GROUP == 0:
        return scale_numbers(tl.load(ptr + output, mask=known, other=0.0), E8M0)
    else:  # noqa: RET505, only one branch is compiled
        GROUPS: tl.constexpr = (SIZE + GROUP - 1) // GROUP
        cols = start + tl.arange(0, COUNT) * EACH
        cols = cols[None, :] if len(output.shape) == 2 else cols[None, None, :]
        scale = tl.load(ptr + output * GROUPS + cols // GROUP, mask=known & (cols < SIZE), other=0.0)
        return scale_numbers(scale, E8M0)


@triton.jit
def unpack_tile(
    codes_ptr, scales_ptr, zeros_ptr, table_ptr, output, known, start,
    SIZE: tl.constexpr, CODES: tl.constexpr, GROUP: tl.constexpr, EACH: tl.constexpr, SCALES: tl.constexpr,
    E8M0: tl.constexpr, ZEROS: tl.constexpr, OUT_TILE: tl.constexpr, IN_TILE: tl.constexpr, DTYPE: tl.constexpr,
    ASM: tl.constexpr,
):  # fmt: skip
    """Numbers [OUT_TILE, IN_TILE] in DTYPE, of inputs from `start` on and of outputs [OUT_TILE, 1] int64.

    SCALES: they are multiplied by the scales of their groups, which are of a multiple of EACH inputs. ZEROS: those are
    subtracted. Where there is no input they are anything that is finite. Codes in DTYPE stay as they are.
    """
    codes = load_codes(codes_ptr, output, known, start, SIZE, CODES, IN_TILE)
    if codes_ptr.dtype.element_ty == DTYPE:
        return codes
    else:  # noqa: RET505, only one branch is compiled
        IS_EXACT: tl.constexpr = E8M0 and CODES == 2 and tl.bfloat16 == DTYPE  # also as products of bfloat16
        WORK: tl.constexpr = tl.float32 if (ZEROS or SCALES) and not IS_EXACT else DTYPE
        if CODES <= 3:
            low, high = halves(codes, table_ptr, CODES, not ZEROS, WORK, ASM if WORK == DTYPE else "")
            tile = tl.reshape(tl.join(low, high), [OUT_TILE, IN_TILE])
        else:
            tile = numbers(codes, table_ptr, CODES, not ZEROS, WORK)
        COUNT: tl.constexpr = IN_TILE // EACH
        if ZEROS:
            zero = load_scales(zeros_ptr, output, known, start, SIZE, GROUP, COUNT, EACH, False)
            if GROUP == 0:
                tile -= zero
            else:
                tile = tl.reshape(tl.reshape(tile, [OUT_TILE, COUNT, EACH]) - zero[:, :, None], [OUT_TILE, IN_TILE])
        if SCALES:
            scale = load_scales(scales_ptr, output, known, start, SIZE, GROUP, COUNT, EACH, E8M0).to(WORK)
            tile = tl.reshape(tl.reshape(tile, [OUT_TILE, COUNT, EACH]) * scale[:, :, None], [OUT_TILE, IN_TILE])
        return tile.to(DTYPE)


@triton.jit
def lane_sums(
    codes, x, table_ptr, CODES: tl.constexpr, MIDDLE: tl.constexpr, LANE: tl.constexpr,
):  # fmt: skip
    """Sums of LANE adjacent products: codes [k, outs, TILE or TILE / 2], x float32 [k, TILE] -> [k, outs, TILE / LANE].

    Products are of `numbers` in float32, without scales.
    """
    K: tl.constexpr = codes.shape[0]
    OUTS: tl.constexpr = codes.shape[1]
    TILE: tl.constexpr = x.shape[1]
    if CODES <= 3:
        even, odd = tl.split(tl.reshape(x, [K, TILE // 2, 2]))
        products = numbers(codes & 15, table_ptr, CODES, MIDDLE, tl.float32) * even[:, None, :]
        products += numbers(codes >> 4, table_ptr, CODES, MIDDLE, tl.float32) * odd[:, None, :]
        return tl.sum(tl.reshape(products, [K, OUTS, TILE // LANE, LANE // 2]), 3)
    else:  # noqa: RET505, only one branch is compiled
        products = numbers(codes, table_ptr, CODES, MIDDLE, tl.float32) * x[:, None, :]
        return tl.sum(tl.reshape(products, [K, OUTS, TILE // LANE, LANE]), 3)
