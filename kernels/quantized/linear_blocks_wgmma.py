"""Linear layer of 9 to 256 rows with weights of 4 bits on Hopper's tensor cores, in Gluon; on a GPU.

The weight is the left operand of products of warp groups (wgmma), in registers, as in Machete
(https://github.com/vllm-project/vllm/tree/main/csrc/quantization/machete), without its order of codes. One warp copies
codes, scales and rows to shared memory by TMA, some blocks ahead. Two or four warp groups share a program's outputs. A
thread makes numbers of the codes that it has in the left operand and multiplies them by their scale, in the dtype of
the rows (`left_operand`), while tensor cores multiply: other outputs of its warp group, and those of other groups. With
few rows there are fewer sums than weights, and it is the sums of a block that are multiplied, in float32.

The work is divided as `layers.linear_stream_k` says. Of a tile with several programs each of them adds the partial sums
of some outputs, in the order of programs: one alone would read for longer than it multiplied. So they wait for each
other, and there are at most as many programs as run at the same time, one on each multiprocessor.
"""

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from blockyard.kernels.int_math import ceil_div
from blockyard.kernels.layers.linear_stream_k import Tiling, Workspace, fits
from blockyard.kernels.programmatic_launch import pdl_options
from blockyard.kernels.quantized.block_weights import BLOCK, BlockWeights
from blockyard.kernels.quantized.left_operand import left_operands, of_group
from blockyard.kernels.quantized.unpack_assembly import unpack_assembly

HALF = 64  # bytes of the codes of one output in a block, and inputs of each half
OUT_TILE = 256  # outputs of a program
GROUP_WARPS = 4  # of a warp group
ALIGNMENT = 16  # outputs: scales of one byte are copied in runs of 16 bytes
PIECE = gl.constexpr(16)  # outputs of a tile whose partial sums one program adds at a time
# by warps that multiply: registers of a thread at first, of those that multiply, and of those that copy
REGISTERS = {8: (168, 232, 40), 16: (96, 112, 32)}


@gluon.jit
def _corner(tile, row_tiles, OUT_TILE: gl.constexpr, ROW_TILE: gl.constexpr):
    """The first output and the first row of a tile."""
    return tile // row_tiles * OUT_TILE, tile % row_tiles * ROW_TILE


@gluon.jit
def _programs_of(tile, steps, work):
    """The first and the last program with steps of a tile."""
    programs = gl.num_programs(0)
    begin = tile * steps
    return ((begin + 1) * programs - 1) // work, ((begin + steps) * programs - 1) // work


@gluon.jit
def _load_weights(
    codes_desc, scales_desc, zeros_desc, codes, scales, zeros, ready, stage, step, out, outs,
    BYTES: gl.constexpr, GROUP: gl.constexpr, SCALES: gl.constexpr, ZEROS: gl.constexpr,
):  # fmt: skip
    mbarrier.expect(ready, BYTES)
    group = 0 if GROUP == 0 else step * 128 // GROUP
    tma.async_copy_global_to_shared(codes_desc, [step * outs + out, 0], ready, codes.index(stage))
    if SCALES:
        tma.async_copy_global_to_shared(scales_desc, [group, out], ready, scales.index(stage))
    if ZEROS:
        tma.async_copy_global_to_shared(zeros_desc, [group, out], ready, zeros.index(stage))


@gluon.jit
def _load_x(x_desc, x, ready, stage, step, row):
    for i in gl.static_range(2):
        half = 2 * step + i
        tma.async_copy_global_to_shared(x_desc, [row, half * 64], ready, x.index(2 * stage + i))


@gluon.jit
def _load_partition(
    copied, share,
    OUT_TILE: gl.constexpr, ROW_TILE: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr,
    SCALES: gl.constexpr, ZEROS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """The warp that starts all copies, in the order in which tiles are multiplied."""
    x_desc, codes_desc, scales_desc, zeros_desc, x, codes, scales, zeros, full, empty = copied
    begin, end, _, steps, _, outs, row_tiles = share
    BYTES: gl.constexpr = (
        2 * x_desc.block_type.nbytes + codes_desc.block_type.nbytes
        + (scales_desc.block_type.nbytes if SCALES else 0) + (zeros_desc.block_type.nbytes if ZEROS else 0)
    )  # fmt: skip
    count = end - begin
    highest = (end - 1) // steps
    start = gl.maximum(begin - highest * steps, 0)
    tile = highest
    out, row = _corner(tile, row_tiles, OUT_TILE, ROW_TILE)
    step = start
    behind = end - tile * steps
    for i in range(gl.minimum(count, STAGES)):  # weights, which no kernel writes
        _load_weights(
            codes_desc, scales_desc, zeros_desc, codes, scales, zeros, full.index(i), i, step, out, outs,
            BYTES, GROUP, SCALES, ZEROS,
        )  # fmt: skip
        step += 1
        if step == behind:
            tile -= 1
            out, row = _corner(tile, row_tiles, OUT_TILE, ROW_TILE)
            step = gl.maximum(begin - tile * steps, 0)
            behind = steps
    if PDL:
        gdc_wait()
    tile = highest
    out, row = _corner(tile, row_tiles, OUT_TILE, ROW_TILE)
    step = start
    behind = end - tile * steps
    stage = 0
    phase = 1
    for i in range(count):
        if i >= STAGES:
            mbarrier.wait(empty.index(stage), phase)
            _load_weights(
                codes_desc, scales_desc, zeros_desc, codes, scales, zeros, full.index(stage), stage, step, out, outs,
                BYTES, GROUP, SCALES, ZEROS,
            )  # fmt: skip
        _load_x(x_desc, x, full.index(stage), stage, step, row)
        step += 1
        if step == behind:
            tile -= 1
            out, row = _corner(tile, row_tiles, OUT_TILE, ROW_TILE)
            step = gl.maximum(begin - tile * steps, 0)
            behind = steps
        stage += 1
        if stage == STAGES:
            stage = 0
            phase ^= 1


@gluon.jit
def _product(low, high, x, at, total, ADD: gl.constexpr):
    """Of a block, added to the total if ADD."""
    total = warpgroup_mma(low, x.index(2 * at).permute((1, 0)), total, use_acc=ADD, is_async=True)
    return warpgroup_mma(high, x.index(2 * at + 1).permute((1, 0)), total, is_async=True)


@gluon.jit
def _add_block(
    totals, x, codes, scales, zeros, stage,
    START: gl.constexpr, C: gl.constexpr, OUT_TILE: gl.constexpr, ROW_TILE: gl.constexpr, GROUP: gl.constexpr,
    SCALES: gl.constexpr, E8M0: gl.constexpr, EXACT: gl.constexpr, ZEROS: gl.constexpr, WHOLE: gl.constexpr,
    DTYPE: gl.constexpr, ASM: gl.constexpr,
):  # fmt: skip
    """Adds the products of a stage to each [64, ROW_TILE] of the outputs from START on."""
    # registers have room for so many sums twice
    SUMS: gl.constexpr = SCALES and GROUP % 128 == 0 and 32 * len(totals) >= ROW_TILE
    running = ()
    for i in gl.static_range(len(totals)):
        low, high = left_operands(
            codes, scales, zeros, START + 64 * i, C, OUT_TILE, GROUP, SCALES and not SUMS, E8M0, EXACT, ZEROS, WHOLE,
            DTYPE, ASM,
        )  # fmt: skip
        running = running + (_product(low, high, x, stage, totals[i], not SUMS),)  # type: ignore[assignment]  # noqa: RUF005
    if len(totals) == 1:  # noqa: SIM108, only one branch is compiled
        sums = (warpgroup_mma_wait(0, running),)
    else:
        sums = warpgroup_mma_wait(0, running)
    if SUMS:
        added = ()
        for i in gl.static_range(len(totals)):
            scale = of_group(scales, START + 64 * i, 0, OUT_TILE, C, E8M0)
            added = added + (totals[i] + sums[i] * scale,)  # type: ignore[assignment]  # noqa: RUF005
        return added
    else:  # noqa: RET505, only one branch is compiled
        return sums


@gluon.jit
def _place(program, start, OUT_TILE: gl.constexpr, ROW_TILE: gl.constexpr, C: gl.constexpr):
    """Where a program keeps the partial sums of 64 outputs."""
    out = start + gl.expand_dims(gl.arange(0, 64, gl.SliceLayout(1, C)), 1)
    return (program * OUT_TILE + out) * ROW_TILE + gl.expand_dims(gl.arange(0, ROW_TILE, gl.SliceLayout(0, C)), 0)


@gluon.jit
def _store(
    total, out_ptr, row_scales_ptr, bias_ptr, out_start, row_start, rows, outs,
    OUTS: gl.constexpr, ROW_TILE: gl.constexpr, ROW_SCALES: gl.constexpr, BIAS: gl.constexpr,
):  # fmt: skip
    """Writes sums [OUTS, ROW_TILE] times their scales with their bias."""
    L: gl.constexpr = total.type.layout
    out = out_start + gl.arange(0, OUTS, gl.SliceLayout(1, L))
    if ROW_SCALES:
        total *= gl.expand_dims(gl.load(row_scales_ptr + out, mask=out < outs, other=0.0).to(gl.float32), 1)
    if BIAS:
        total += gl.expand_dims(gl.load(bias_ptr + out, mask=out < outs, other=0.0).to(gl.float32), 1)
    S: gl.constexpr = gl.BlockedLayout([8, 1], [OUTS // 8, 256 // OUTS], [1, 4], [0, 1])  # runs of outputs
    y = gl.convert_layout(total.to(out_ptr.dtype.element_ty), S)
    out = out_start + gl.arange(0, OUTS, gl.SliceLayout(1, S))
    row = row_start + gl.arange(0, ROW_TILE, gl.SliceLayout(0, S))
    inside = gl.expand_dims(out < outs, 1) & gl.expand_dims(row < rows, 0)
    gl.store(out_ptr + gl.expand_dims(row, 0) * outs + gl.expand_dims(out, 1), y, mask=inside)


@gluon.jit
def _leave_part(
    totals, parts_ptr, arrived_ptr, program, first, last,
    PART: gl.constexpr, PARTS: gl.constexpr, OUT_TILE: gl.constexpr, ROW_TILE: gl.constexpr, C: gl.constexpr,
):  # fmt: skip
    """Keeps partial sums of a tile for all its programs. Of two such tiles of a program it is the last one of one."""
    OUTS: gl.constexpr = OUT_TILE // PARTS
    slot = 2 * program + (program == last).to(gl.int32)
    for i in gl.static_range(OUTS // 64):
        gl.store(parts_ptr + _place(slot, OUTS * PART + 64 * i, OUT_TILE, ROW_TILE, C), totals[i])
    gl.thread_barrier()  # stores of all threads come before the flag, which counts those who will read
    readers = gl.minimum(last - first + 1, OUTS // PIECE)
    gl.atomic_xchg(arrived_ptr + PARTS * slot + PART, readers, sem="release", scope="gpu")


@gluon.jit
def _add_parts(
    out_start, row_start, out_ptr, row_scales_ptr, bias_ptr, parts_ptr, arrived_ptr, program, first, last, rows, outs,
    PART: gl.constexpr, PARTS: gl.constexpr, OUT_TILE: gl.constexpr, ROW_TILE: gl.constexpr, ROW_SCALES: gl.constexpr,
    BIAS: gl.constexpr,
):  # fmt: skip
    """Adds the partial sums of a tile in the order of its programs, each of which has some of the outputs."""
    OUTS: gl.constexpr = OUT_TILE // PARTS
    AHEAD: gl.constexpr = 8 if ROW_TILE <= 64 else 4  # loads on their way: how long they take would add up
    count = last - first + 1
    if program - first < OUTS // PIECE:
        T: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
        other = gl.minimum(first + gl.arange(0, 128, T), last)
        flags = arrived_ptr + PARTS * (2 * other + (other == last).to(gl.int32)) + PART
        gl.inline_asm_elementwise(
            "{ .reg .pred no; wait: ld.acquire.gpu.global.b32 $0, [$1]; setp.eq.s32 no, $0, 0; @no bra wait; }",
            "=r,l", [flags], dtype=gl.int32, is_pure=False, pack=1,
        )  # fmt: skip
        gl.thread_barrier()
        P: gl.constexpr = gl.BlockedLayout([1, ROW_TILE // 16], [2, 16], [4, 1], [1, 0])
        for piece in range(program - first, OUTS // PIECE, count):
            out = OUTS * PART + piece * PIECE
            place = gl.expand_dims(out + gl.arange(0, PIECE, gl.SliceLayout(1, P)), 1) * ROW_TILE
            place += gl.expand_dims(gl.arange(0, ROW_TILE, gl.SliceLayout(0, P)), 0)
            total = gl.zeros([PIECE, ROW_TILE], gl.float32, P)
            for start in range(first, last + 1, AHEAD):
                for i in gl.static_range(AHEAD):
                    one = start + i
                    slot = 2 * one + (one == last).to(gl.int32)
                    at = parts_ptr + slot * OUT_TILE * ROW_TILE + place
                    total += gl.load(at, mask=one <= last, other=0.0, cache_modifier=".cg")
            _store(
                total, out_ptr, row_scales_ptr, bias_ptr, out_start + out, row_start, rows, outs, PIECE, ROW_TILE,
                ROW_SCALES, BIAS,
            )  # fmt: skip
        gl.thread_barrier()
        gl.atomic_add(
            flags, gl.full([128], -1, gl.int32, T), mask=gl.arange(0, 128, T) < count, sem="relaxed", scope="gpu"
        )


@gluon.jit
def _multiply_partition(
    PART: gl.constexpr, shared, given, share,
    PARTS: gl.constexpr, OUT_TILE: gl.constexpr, ROW_TILE: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr,
    SCALES: gl.constexpr, E8M0: gl.constexpr, EXACT: gl.constexpr, ZEROS: gl.constexpr, WHOLE: gl.constexpr,
    ROW_SCALES: gl.constexpr, ASM: gl.constexpr, BIAS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Warp group PART of PARTS, with as large a share of the outputs of each tile, in products of 64 outputs."""
    x, codes, scales, zeros, full, empty = shared
    row_scales_ptr, bias_ptr, out_ptr, parts_ptr, arrived_ptr = given
    begin, end, work, steps, rows, outs, row_tiles = share
    C: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROW_TILE, 16])
    START: gl.constexpr = OUT_TILE // PARTS * PART
    PRODUCTS: gl.constexpr = OUT_TILE // PARTS // 64
    DTYPE: gl.constexpr = out_ptr.dtype.element_ty
    program = gl.program_id(0)
    highest = (end - 1) // steps
    lowest = begin // steps
    first_of_highest, last_of_highest = _programs_of(highest, steps, work)
    first_of_lowest, last_of_lowest = _programs_of(lowest, steps, work)
    if PDL:
        gdc_wait()
    stage = 0
    phase = 0
    tile = highest
    left = end
    while left > begin:
        count = left - gl.maximum(begin, tile * steps)
        totals = ()
        for _ in gl.static_range(PRODUCTS):
            totals = totals + (gl.zeros([64, ROW_TILE], gl.float32, C),)  # type: ignore[assignment]  # noqa: RUF005
        for _ in range(count):
            mbarrier.wait(full.index(stage), phase)
            totals = _add_block(
                totals, x, codes.index(stage), scales.index(stage), zeros.index(stage), stage, OUT_TILE // PARTS * PART,
                C, OUT_TILE, ROW_TILE, GROUP, SCALES, E8M0, EXACT, ZEROS, WHOLE, DTYPE, ASM,
            )  # fmt: skip
            mbarrier.arrive(empty.index(stage))
            stage += 1
            if stage == STAGES:
                stage = 0
                phase ^= 1
        if count < steps:
            first = first_of_highest if tile == highest else first_of_lowest
            last = last_of_highest if tile == highest else last_of_lowest
            _leave_part(totals, parts_ptr, arrived_ptr, program, first, last, PART, PARTS, OUT_TILE, ROW_TILE, C)
        else:
            out, row = _corner(tile, row_tiles, OUT_TILE, ROW_TILE)
            for i in gl.static_range(PRODUCTS):
                _store(
                    totals[i], out_ptr, row_scales_ptr, bias_ptr, out + START + 64 * i, row, rows, outs, 64, ROW_TILE,
                    ROW_SCALES, BIAS,
                )  # fmt: skip
        left -= count
        tile -= 1
    for i in range(2):  # the tiles that other programs have too
        first = first_of_lowest if i else first_of_highest
        last = last_of_lowest if i else last_of_highest
        if (first < last) & ((i == 0) | (lowest < highest)):
            out, row = _corner(lowest if i else highest, row_tiles, OUT_TILE, ROW_TILE)
            _add_parts(
                out, row, out_ptr, row_scales_ptr, bias_ptr, parts_ptr, arrived_ptr, program, first, last, rows, outs,
                PART, PARTS, OUT_TILE, ROW_TILE, ROW_SCALES, BIAS,
            )  # fmt: skip


@gluon.jit
def _two_groups(
    shared, given, share, copied,
    OUT_TILE: gl.constexpr, ROW_TILE: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr,
    SCALES: gl.constexpr, E8M0: gl.constexpr, EXACT: gl.constexpr, ZEROS: gl.constexpr, WHOLE: gl.constexpr,
    ROW_SCALES: gl.constexpr, ASM: gl.constexpr, BIAS: gl.constexpr, PDL: gl.constexpr, REGISTERS: gl.constexpr,
    COPY_REGISTERS: gl.constexpr,
):  # fmt: skip
    gl.warp_specialize(
        [
            (_multiply_partition, (
                0, shared, given, share, 2, OUT_TILE, ROW_TILE, STAGES, GROUP, SCALES, E8M0, EXACT, ZEROS, WHOLE,
                ROW_SCALES, ASM, BIAS, PDL,
            )),
            (_multiply_partition, (
                1, shared, given, share, 2, OUT_TILE, ROW_TILE, STAGES, GROUP, SCALES, E8M0, EXACT, ZEROS, WHOLE,
                ROW_SCALES, ASM, BIAS, PDL,
            )),
            (_load_partition, (copied, share, OUT_TILE, ROW_TILE, STAGES, GROUP, SCALES, ZEROS, PDL)),
        ],
        [4, 1],
        [REGISTERS, COPY_REGISTERS],
    )  # fmt: skip


@gluon.jit
def _four_groups(
    shared, given, share, copied,
    OUT_TILE: gl.constexpr, ROW_TILE: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr,
    SCALES: gl.constexpr, E8M0: gl.constexpr, EXACT: gl.constexpr, ZEROS: gl.constexpr, WHOLE: gl.constexpr,
    ROW_SCALES: gl.constexpr, ASM: gl.constexpr, BIAS: gl.constexpr, PDL: gl.constexpr, REGISTERS: gl.constexpr,
    COPY_REGISTERS: gl.constexpr,
):  # fmt: skip
    gl.warp_specialize(
        [
            (_multiply_partition, (
                0, shared, given, share, 4, OUT_TILE, ROW_TILE, STAGES, GROUP, SCALES, E8M0, EXACT, ZEROS, WHOLE,
                ROW_SCALES, ASM, BIAS, PDL,
            )),
            (_multiply_partition, (
                1, shared, given, share, 4, OUT_TILE, ROW_TILE, STAGES, GROUP, SCALES, E8M0, EXACT, ZEROS, WHOLE,
                ROW_SCALES, ASM, BIAS, PDL,
            )),
            (_multiply_partition, (
                2, shared, given, share, 4, OUT_TILE, ROW_TILE, STAGES, GROUP, SCALES, E8M0, EXACT, ZEROS, WHOLE,
                ROW_SCALES, ASM, BIAS, PDL,
            )),
            (_multiply_partition, (
                3, shared, given, share, 4, OUT_TILE, ROW_TILE, STAGES, GROUP, SCALES, E8M0, EXACT, ZEROS, WHOLE,
                ROW_SCALES, ASM, BIAS, PDL,
            )),
            (_load_partition, (copied, share, OUT_TILE, ROW_TILE, STAGES, GROUP, SCALES, ZEROS, PDL)),
        ],
        [4, 4, 4, 1],
        [REGISTERS, REGISTERS, REGISTERS, COPY_REGISTERS],
    )  # fmt: skip


@gluon.jit(do_not_specialize=["rows", "steps"])
def _linear_blocks_wgmma_kernel(
    x_desc, codes_desc, scales_desc, zeros_desc, row_scales_ptr, bias_ptr, out_ptr, parts_ptr, arrived_ptr, rows, outs,
    steps,
    PARTS: gl.constexpr, OUT_TILE: gl.constexpr, ROW_TILE: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr,
    PER: gl.constexpr, SCALES: gl.constexpr, E8M0: gl.constexpr, EXACT: gl.constexpr, ZEROS: gl.constexpr,
    WHOLE: gl.constexpr, ROW_SCALES: gl.constexpr, ASM: gl.constexpr, BIAS: gl.constexpr, PDL: gl.constexpr,
    REGISTERS: gl.constexpr, COPY_REGISTERS: gl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()
    program = gl.program_id(0)
    programs = gl.num_programs(0)
    row_tiles = (rows + ROW_TILE - 1) // ROW_TILE
    work = (outs + OUT_TILE - 1) // OUT_TILE * row_tiles * steps
    begin = program * work // programs
    end = (program + 1) * work // programs

    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    x = gl.allocate_shared_memory(x_desc.dtype, [2 * STAGES, ROW_TILE, 64], x_desc.layout)
    code_tiles = gl.allocate_shared_memory(gl.uint8, [STAGES, OUT_TILE, 64], codes_desc.layout)
    codes = code_tiles._reinterpret(gl.uint16, [STAGES, OUT_TILE, 32], gl.NVMMASharedLayout(64, 16))
    scale_tiles = code_tiles
    scales = code_tiles
    if SCALES:
        scale_tiles = gl.allocate_shared_memory(scales_desc.dtype, [STAGES, PER, OUT_TILE], scales_desc.layout)
        scales = scale_tiles._reinterpret(scales_desc.dtype, [STAGES, PER * OUT_TILE], FLAT)
    zero_tiles = code_tiles
    zeros = code_tiles
    if ZEROS:
        zero_tiles = gl.allocate_shared_memory(zeros_desc.dtype, [STAGES, PER, OUT_TILE], zeros_desc.layout)
        zeros = zero_tiles._reinterpret(zeros_desc.dtype, [STAGES, PER * OUT_TILE], FLAT)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=PARTS)
    fence_async_shared()
    shared = (x, codes, scales, zeros, full, empty)
    given = (row_scales_ptr, bias_ptr, out_ptr, parts_ptr, arrived_ptr)
    share = (begin, end, work, steps, rows, outs, row_tiles)
    copied = (x_desc, codes_desc, scales_desc, zeros_desc, x, code_tiles, scale_tiles, zero_tiles, full, empty)
    if PARTS == 2:
        _two_groups(
            shared, given, share, copied, OUT_TILE, ROW_TILE, STAGES, GROUP, SCALES, E8M0, EXACT, ZEROS, WHOLE,
            ROW_SCALES, ASM, BIAS, PDL, REGISTERS, COPY_REGISTERS,
        )  # fmt: skip
    else:
        _four_groups(
            shared, given, share, copied, OUT_TILE, ROW_TILE, STAGES, GROUP, SCALES, E8M0, EXACT, ZEROS, WHOLE,
            ROW_SCALES, ASM, BIAS, PDL, REGISTERS, COPY_REGISTERS,
        )  # fmt: skip


def can_multiply(weights: BlockWeights, dtype: torch.dtype) -> bool:
    """Whether `linear_blocks_wgmma` takes these weights with rows of this dtype: numbers times scales must be within
    its range, and runs of outputs and inputs aligned for TMA."""
    scales = weights.scales
    known = unpack_assembly(weights.kind, dtype, weights.zeros is None, weights.table) if weights.is_4bit else ""
    in_range = dtype == torch.bfloat16 or scales is None or scales.dtype in (torch.float16, torch.float8_e4m3fn)
    return known != "" and in_range and weights.outputs % ALIGNMENT == 0 and weights.inputs * dtype.itemsize % 16 == 0


def linear_blocks_wgmma(
    x: Tensor, weights: BlockWeights, bias: Tensor | None, tiling: Tiling, workspace: Workspace, programs: int
) -> Tensor:
    """x [rows, in], bias [out] -> [rows, out], accumulated in float32.

    tiling: `out_tile` is OUT_TILE, `in_tile` BLOCK and `warps` one of REGISTERS; it has at least 16 rows. The steps of
    all tiles, a block each, are divided among `programs` at most. They must run at the same time, unless there are as
    many as tiles: then none waits for another. Raises ValueError for other shapes, dtypes and layouts, and if the
    workspace is too small.
    """
    (rows, size), outs, group = x.shape, weights.outputs, weights.group
    if size != weights.inputs or (bias is not None and bias.shape != (outs,)):
        raise ValueError(f"rows {list(x.shape)} do not fit a weight [{outs}, {weights.inputs}]")
    if not fits(x) or not can_multiply(weights, x.dtype) or (bias is not None and bias.dtype != x.dtype):
        raise ValueError(f"rows must be aligned, of 16 bits and of the bias' dtype, got {x.dtype} {x.stride()}")
    if (tiling.out_tile, tiling.in_tile) != (OUT_TILE, BLOCK) or tiling.warps not in REGISTERS:
        raise ValueError(f"a tile must have {OUT_TILE} outputs, {BLOCK} inputs and 8 or 16 warps, got {tiling}")
    out = torch.empty((rows, outs), dtype=x.dtype, device=x.device)
    if out.numel() == 0:
        return out
    steps = len(weights.codes)  # blocks
    tiles = ceil_div(outs, OUT_TILE) * ceil_div(rows, tiling.row_tile)
    # each has a step, for which others may wait; a warp group waits for as many as it has threads, at most
    programs = min(programs, tiles * min(steps, 64))
    if tiles * steps * programs >= 1 << 31:
        raise ValueError(f"{tiles} tiles of {steps} steps are too many for {programs} programs")
    parts = tiling.warps // GROUP_WARPS
    room = min(workspace.arrived.numel() // parts, workspace.programs(tiling))
    if programs != tiles and 2 * programs > room:
        raise ValueError(f"a workspace for {room} tiles is too small for two of {programs} programs")
    codes, scales, zeros, row_scales = weights.codes, weights.scales, weights.zeros, weights.row_scales
    codes_desc = TensorDescriptor.from_tensor(codes.view(-1, HALF), [OUT_TILE, HALF], gl.NVMMASharedLayout(HALF, 8))
    groups = 1 if group % BLOCK == 0 else BLOCK // group  # of a block
    is_exact = scales is None or scales.dtype in (x.dtype, torch.uint8, torch.float8_e4m3fn)
    registers, multiply_registers, copy_registers = REGISTERS[tiling.warps]
    _linear_blocks_wgmma_kernel[(programs,)](
        TensorDescriptor.from_tensor(x, [tiling.row_tile, HALF], gl.NVMMASharedLayout(128, 16)), codes_desc,
        codes_desc if scales is None else _groups_desc(scales, groups),
        codes_desc if zeros is None else _groups_desc(zeros, groups),
        codes if row_scales is None else row_scales, codes if bias is None else bias, out, workspace.parts,
        workspace.arrived, rows, outs, steps, PARTS=parts, OUT_TILE=OUT_TILE, ROW_TILE=tiling.row_tile,
        STAGES=tiling.stages, GROUP=group, PER=groups, SCALES=scales is not None, E8M0=weights.is_e8m0,
        EXACT=is_exact, ZEROS=zeros is not None, WHOLE=zeros is not None and not zeros.is_floating_point(),
        ROW_SCALES=row_scales is not None, ASM=unpack_assembly(weights.kind, x.dtype, zeros is None, weights.table),
        BIAS=bias is not None, PDL=tiling.pdl, REGISTERS=multiply_registers, COPY_REGISTERS=copy_registers,
        num_warps=GROUP_WARPS, maxnreg=registers, **pdl_options(tiling.pdl),
    )  # fmt: skip
    return out


def _groups_desc(groups: Tensor, count: int) -> TensorDescriptor:
    """Of scales or zeros [groups, outputs], `count` of a block."""
    layout = gl.NVMMASharedLayout(0, 8 * groups.element_size())
    return TensorDescriptor(groups, list(groups.shape), [groups.shape[1], 1], [count, OUT_TILE], layout)
