"""Both operands of a product on tensor cores, of weights with codes of 4 bits: a block of 128 inputs for each warp,
or for several, which have other rows of the weight.

Of a block, each of the four threads that share a row of an operand has 32 adjacent inputs: it reads their codes, 16
bytes, at once, and most groups have one scale for all of them. Which inputs meet in one instruction is the same in both
operands, and a sum does not depend on it otherwise.

Shapes: W blocks of inputs, R rows of the weight, a multiple of 16, and N columns, a multiple of 8. Words have 8 codes.
V warps share the rows of a block, and read the same inputs, which only the first of them has to fetch to the L1 cache.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from blockyard.kernels.quantized.number_pairs import less, of_pairs, times, times_pair
from blockyard.kernels.quantized.unpack_tiles import scale_numbers


@gluon.constexpr_function
def _bits(size: int, dim: int, first: int = 1) -> list[list[int]]:
    """Bases of a layout of four dimensions: the powers of 2 below `size` from `first` on, in one of them."""
    places = [2**i for i in range(size.bit_length() - 1)]
    return [[place if i == dim else 0 for i in range(4)] for place in places if place >= first]


@gluon.constexpr_function
def code_layout(warps: int, row_warps: int, rows: int) -> gl.DistributedLinearLayout:
    """Of words [W, R, 4, 4]: a thread has all of the last dimension."""
    registers = _bits(4, 3) + _bits(16, 1, 8) + _bits(rows, 1, 16 * row_warps)
    threads = _bits(4, 2) + _bits(8, 1)
    split = _bits(16 * row_warps, 1, 16) + _bits(warps, 0)
    return gl.DistributedLinearLayout(registers, threads, split, [], [warps, rows, 4, 4])


@gluon.constexpr_function
def x_layout(warps: int, row_warps: int, columns: int) -> gl.DistributedLinearLayout:
    """Of inputs [W, 4, 32, N]: a thread has all of the third dimension, and warps of other rows have the same."""
    registers = _bits(32, 2) + _bits(columns, 3, 8)
    threads = _bits(4, 1) + _bits(8, 3)
    split = [[0, 0, 0, 0]] * (row_warps.bit_length() - 1) + _bits(warps, 0)
    return gl.DistributedLinearLayout(registers, threads, split, [], [warps, 4, 32, columns])


@gluon.constexpr_function
def sum_layout(warps: int, row_warps: int) -> gl.NVMMADistributedLayout:
    """Of sums [W, R, N]."""
    return gl.NVMMADistributedLayout([2, 0], [warps, row_warps, 1], [1, 16, 8])


@gluon.jit
def along_4(SIZE: gl.constexpr, DIM: gl.constexpr, L: gl.constexpr):
    """0 to SIZE - 1 along dimension DIM of four; the others have size 1."""
    FIRST: gl.constexpr = 1 if DIM == 0 else 0
    SECOND: gl.constexpr = 2 if DIM < 2 else 1
    THIRD: gl.constexpr = 2 if DIM == 3 else 3
    number = gl.arange(0, SIZE, gl.SliceLayout(FIRST, gl.SliceLayout(SECOND, gl.SliceLayout(THIRD, L))))
    return gl.expand_dims(gl.expand_dims(gl.expand_dims(number, FIRST), SECOND), THIRD)


@gluon.jit
def along_3(SIZE: gl.constexpr, DIM: gl.constexpr, L: gl.constexpr):
    """As `along_4`, of three dimensions."""
    FIRST: gl.constexpr = 1 if DIM == 0 else 0
    SECOND: gl.constexpr = 1 if DIM == 2 else 2
    number = gl.arange(0, SIZE, gl.SliceLayout(FIRST, gl.SliceLayout(SECOND, L)))
    return gl.expand_dims(gl.expand_dims(number, FIRST), SECOND)


@gluon.jit
def along_2(SIZE: gl.constexpr, DIM: gl.constexpr, L: gl.constexpr):
    """As `along_4`, of two dimensions."""
    return gl.expand_dims(gl.arange(0, SIZE, gl.SliceLayout(1 - DIM, L)), 1 - DIM)


@gluon.jit
def weight_rows(number, start, inner, GATE: gl.constexpr):
    """The rows of an expert's weight of rows `number` of a tile from output `start` on. Behind the last one: that one.

    GATE: 8 rows of gate and 8 of up in turn, so that a thread has both of an output.
    """
    if GATE:
        return gl.minimum(start + number // 16 * 8 + number % 8, inner - 1) + number // 8 % 2 * inner
    else:  # noqa: RET505, only one branch is compiled
        return gl.minimum(start + number, inner - 1)


@gluon.jit
def block_of(step, warp, expert, experts_ptr, BLOCKS: gl.constexpr, W: gl.constexpr, TOP_K: gl.constexpr):
    """The block of inputs of each warp in a step, its expert, and which one of the row's that is: all three have the
    shape of `warp`. TOP_K: the inputs of so many experts are taken in turn, otherwise all are of `expert`.

    There are no inputs in blocks from BLOCKS on.
    """
    item = step * W + warp
    if TOP_K:
        k = gl.minimum(item // BLOCKS, TOP_K - 1)
        return item - k * BLOCKS, gl.load(experts_ptr + k).to(gl.int64), k
    else:  # noqa: RET505, only one branch is compiled
        return item, expert + warp * 0, warp * 0


@gluon.jit
def code_places(
    codes_ptr, step, expert, experts_ptr, start, inner, outs,
    SIZE: gl.constexpr, TOP_K: gl.constexpr, GATE: gl.constexpr, W: gl.constexpr, R: gl.constexpr, L: gl.constexpr,
):  # fmt: skip
    """Where a step's codes are, as int32 [W, R, 4, 4] in the layout L. Behind the inputs and the outputs they are any
    of the weight: there `load_x` is 0, and nothing is stored."""
    BLOCKS: gl.constexpr = (SIZE + 127) // 128
    block, own, _ = block_of(step, along_4(W, 0, L), expert, experts_ptr, BLOCKS, W, TOP_K)
    row = weight_rows(along_4(R, 1, L), start, inner, GATE)
    chunk = gl.minimum(block * 4 + along_4(4, 2, L), SIZE // 32 - 1)
    places = codes_ptr + own * outs * (SIZE // 8) + (row * (SIZE // 8) + along_4(4, 3, L))
    return places + chunk * 4


@gluon.jit
def load_factors(
    ptr, step, expert, experts_ptr, start, inner, outs,
    SIZE: gl.constexpr, GROUP: gl.constexpr, TOP_K: gl.constexpr, GATE: gl.constexpr, W: gl.constexpr,
    R: gl.constexpr, L: gl.constexpr,
):  # fmt: skip
    """Scales or zeros of the words in the layout L, for each thread's inputs: [W, R, 4, 1], in groups of 16 inputs
    [W, R, 4, 4]."""
    BLOCKS: gl.constexpr = (SIZE + 127) // 128
    GROUPS: gl.constexpr = (SIZE + GROUP - 1) // GROUP if GROUP else 1
    if GROUP == 16:
        block, own, _ = block_of(step, along_4(W, 0, L), expert, experts_ptr, BLOCKS, W, TOP_K)
        row = weight_rows(along_4(R, 1, L), start, inner, GATE)
        chunk = gl.minimum(block * 4 + along_4(4, 2, L), SIZE // 32 - 1)
        return gl.load(ptr + own * outs * GROUPS + (row * GROUPS + chunk * 2 + along_4(4, 3, L) // 2))
    else:  # noqa: RET505, only one branch is compiled
        S: gl.constexpr = gl.SliceLayout(3, L)
        block, own, _ = block_of(step, along_3(W, 0, S), expert, experts_ptr, BLOCKS, W, TOP_K)
        row = weight_rows(along_3(R, 1, S), start, inner, GATE)
        chunk = gl.minimum(block * 4 + along_3(4, 2, S), SIZE // 32 - 1)
        group = chunk * 0 if GROUP == 0 else chunk * 32 // GROUP
        return gl.expand_dims(gl.load(ptr + own * outs * GROUPS + (row * GROUPS + group)), 3)


@gluon.jit
def load_x(
    x_ptr, row, step, experts_ptr,
    SIZE: gl.constexpr, TOP_K: gl.constexpr, W: gl.constexpr, X: gl.constexpr,
):  # fmt: skip
    """Inputs [W, 4, 32, N] in the layout X, 0 behind them. row: of x for each column [1, 1, 1, N]; with TOP_K of the
    first expert, and those of the others follow."""
    BLOCKS: gl.constexpr = (SIZE + 127) // 128
    block, _, k = block_of(step, along_4(W, 0, X), 0, experts_ptr, BLOCKS, W, TOP_K)
    chunk = block * 4 + along_4(4, 1, X)
    places = x_ptr + (row + k).to(gl.int64) * SIZE + (along_4(32, 2, X) + chunk * 32)
    if SIZE % 128 == 0 and (BLOCKS * (TOP_K if TOP_K else 1)) % W == 0:
        return gl.load(places)
    else:  # noqa: RET505, only one branch is compiled
        return gl.load(places, mask=chunk < SIZE // 32, other=0.0)


@gluon.jit
def load_norm(norm_ptr, step, SIZE: gl.constexpr, W: gl.constexpr, X: gl.constexpr):
    """The norm's weight of the inputs that `load_x` loads without TOP_K, [W, 4, 32, 1] in the layout X."""
    chunk = (step * W + along_4(W, 0, X)) * 4 + along_4(4, 1, X)
    return gl.load(norm_ptr + (along_4(32, 2, X) + gl.minimum(chunk, SIZE // 32 - 1) * 32))


@gluon.jit
def inverse_length(x_ptr, row, eps, SIZE: gl.constexpr):
    """What an RMSNorm multiplies the inputs of a row by, beside its weight."""
    TILE: gl.constexpr = 256 * gl.num_warps()
    col = gl.arange(0, TILE, gl.BlockedLayout([8], [32], [gl.num_warps()], [0]))
    squares = gl.zeros_like(col).to(gl.float32)
    for start in gl.static_range(0, SIZE, TILE):
        x = gl.load(x_ptr + row.to(gl.int64) * SIZE + start + col, mask=start + col < SIZE, other=0.0).to(gl.float32)
        squares += x * x
    return gl.rsqrt(gl.sum(squares, 0) / SIZE + eps)


@gluon.jit
def _scale_pairs(scale, SMALL: gl.constexpr):
    """Scales of e8m0, which are bytes, two times as bfloat16 in 32 bits, as `scale_numbers` makes them; SMALL: times
    2 ** 64, at most 2 ** 127."""
    if SMALL:
        bits = (gl.minimum(scale.to(gl.int32), 190) + 64) * 0x800080
        return gl.where(scale == 255, 0x7FC07FC0, bits)
    bits = gl.maximum(scale.to(gl.int32) << 7, 0x40)
    return gl.where(bits == 0x7F80, 0x7FC0, bits) * 0x10001


@gluon.jit
def left_operand(
    words, factors,
    SCALES: gl.constexpr, E8M0: gl.constexpr, EXACT: gl.constexpr, SMALL: gl.constexpr, ZEROS: gl.constexpr,
    DTYPE: gl.constexpr, ASM: gl.constexpr, W: gl.constexpr, R: gl.constexpr, C: gl.constexpr,
):  # fmt: skip
    """Numbers [W, R, 128] in the layout of the left operand of products in C. factors: scales, then zeros, of what
    there is. SMALL: times 2 ** -62, see `mma_form`."""
    # of a word's codes: 0 and 4, 1 and 5, 2 and 6, 3 and 7
    numbers = gl.inline_asm_elementwise(
        ASM, "=r,=r,=r,=r,r", [words], dtype=(gl.int32, gl.int32, gl.int32, gl.int32), is_pure=True, pack=1
    )
    made = ()
    for i in gl.static_range(4):
        pairs = numbers[i]
        if ZEROS:
            pairs = less(pairs, factors[1 if SCALES else 0].to(gl.float32), DTYPE)
        if SCALES and E8M0:
            pairs = times_pair(pairs, _scale_pairs(factors[0], SMALL), DTYPE)
        elif SCALES:
            scale = scale_numbers(factors[0], False)
            pairs = times(pairs, scale * 18446744073709551616.0 if SMALL else scale, DTYPE, EXACT)
        made = made + (pairs,)  # type: ignore[assignment]  # noqa: RUF005
    # dimensions behind words: upper, lower bit of the first code's number, first or second
    joined = gl.join(gl.join(made[0], made[2]), gl.join(made[1], made[3]))  # type: ignore[misc]
    first, second = of_pairs(joined, DTYPE)
    tile = gl.permute(gl.join(first, second), (0, 1, 3, 4, 5, 2, 6))
    return gl.convert_layout(gl.reshape(tile, [W, R, 128]), gl.DotOperandLayout(0, C, 2))


@gluon.jit
def right_operand(x, W: gl.constexpr, N: gl.constexpr, C: gl.constexpr):
    """Inputs of `load_x` [W, 128, N] in the layout of the right operand, in the order of `left_operand`."""
    # a chunk's input is 8 * word + 4 * (second of a pair) + 2 * (upper bit of the pair) + lower bit
    x = gl.permute(gl.reshape(x, [W, 4, 4, 2, 2, 2, N]), (0, 2, 4, 5, 1, 3, 6))
    return gl.convert_layout(gl.reshape(x, [W, 128, N]), gl.DotOperandLayout(1, C, 2))
