"""Linear layer on tensor cores by stream-K (https://arxiv.org/abs/2301.03598), for steps of few rows; on a GPU.

The weight is the left operand, so that few rows fill a tile. The output is cut into tiles, each tile's sum over `in`
into steps, and the steps of all tiles in order are divided evenly among the programs. A program works from its last
tile to its first. It finishes the tile that it began last in time: other programs store their partial sums of it
early. Partial sums are added in the order of programs, never by atomics, so the result is the same in every run.

**Batch invariance.** With `split` parts a tile (programs = tiles * split), part s of any tile has the steps from s *
steps // split to (s + 1) * steps // split, whatever the number of tiles. A row of x is one column of the right
operand: its sum has the same terms in the same order at any index, beside any other rows and for any number of rows,
as long as the tiling and `split` are the same.

With `pdl` (programmatic dependent launch, compute capability 9.0) the kernel starts while the kernel before it ends:
it prefetches its first weights to the L2 cache, then waits for that kernel before it reads or writes anything else.
Behind its wait it announces the next kernel, which may therefore read at once what earlier kernels wrote.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.tools.tensor_descriptor import TensorDescriptor

from blockyard.kernels.int_math import ceil_div
from blockyard.kernels.programmatic_launch import pdl_options, prefetch

ALIGNMENT = 16  # bytes, of each row that a tensor descriptor copies


def linear_stream_k_reference(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return F.linear(x, weight, bias)


@dataclass(frozen=True, slots=True)
class Tiling:
    """Sizes of tiles, all powers of two; `out_tile` at least 64, `row_tile` and `in_tile` at least 16."""

    out_tile: int
    row_tile: int
    in_tile: int
    stages: int  # tiles of both operands in flight
    warps: int
    pdl: bool
    fetch: int = 0  # with `pdl`: cache lines of each output's weights to prefetch; a power of two, or 0


class Workspace:
    """Partial sums that programs leave for each other. Serves all products of one stream."""

    def __init__(self, elements: int, programs: int, device: torch.device) -> None:
        self.parts = torch.empty(elements, dtype=torch.float32, device=device)
        self.arrived = torch.zeros(programs, dtype=torch.int32, device=device)  # 0 between kernels

    def programs(self, tiling: Tiling) -> int:
        """How many programs have room at most."""
        return min(self.parts.numel() // (tiling.out_tile * tiling.row_tile), self.arrived.numel())

    def rows_at_once(self, tiling: Tiling, rows: int, parts: int, programs: int = 0) -> int:
        """How many of the rows a launch takes, whose tiles of rows have `parts` parts. Raises ValueError for none.

        programs: as in `linear_stream_k`.
        """
        room = self.programs(tiling)
        if max(parts, programs) > room:
            raise ValueError(f"a workspace for {room} programs is too small for {max(parts, programs)}")
        return rows if programs else room // parts * tiling.row_tile


@triton.jit
def leave_part(total, program, parts_ptr, arrived_ptr, place):
    """Stores the partial sum of a tile for the program that has the tile's last step."""
    tl.store(parts_ptr + program * place.shape[0] * place.shape[1] + place, total)
    tl.debug_barrier()  # stores of all threads come before the flag
    tl.atomic_xchg(arrived_ptr + program, 1, sem="release", scope="gpu")


@triton.jit
def with_parts(total, other, program, parts_ptr, arrived_ptr, place):
    """Adds the partial sums of programs `other` to `program` - 1 to a tile, in their order, and resets their flags."""
    while other < program:
        while tl.atomic_add(arrived_ptr + other, 0, sem="acquire", scope="gpu") == 0:
            pass
        tl.debug_barrier()
        total += tl.load(parts_ptr + other * place.shape[0] * place.shape[1] + place, cache_modifier=".cg")
        tl.store(arrived_ptr + other, 0)
        other += 1
    return total


@triton.jit
def with_bias(total, bias, inside, BIAS: tl.constexpr):
    if BIAS:
        total += tl.load(bias, mask=inside, other=0.0).to(tl.float32)[:, None]
    return total


@triton.jit(do_not_specialize=["rows"])
def _linear_stream_k_kernel(
    x_desc, weight_desc, weight_ptr, bias_ptr, out_ptr, parts_ptr, arrived_ptr, rows, outs, size,
    OUT_TILE: tl.constexpr, ROW_TILE: tl.constexpr, IN_TILE: tl.constexpr, STAGES: tl.constexpr, BIAS: tl.constexpr,
    PDL: tl.constexpr, FETCH: tl.constexpr,
):  # fmt: skip
    # program p: steps p * work / programs to (p + 1) * work / programs
    program = tl.program_id(0).to(tl.int64)
    programs = tl.num_programs(0).to(tl.int64)
    row_tiles = tl.cdiv(rows, ROW_TILE)
    steps = tl.cdiv(size, IN_TILE)
    work = tl.cdiv(outs, OUT_TILE) * row_tiles * steps
    begin = (program * work // programs).to(tl.int32)
    end = ((program + 1) * work // programs).to(tl.int32)
    place = tl.arange(0, OUT_TILE)[:, None] * ROW_TILE + tl.arange(0, ROW_TILE)[None, :]
    if PDL:
        if FETCH > 0:
            tile = (end - 1) // steps
            line: tl.constexpr = 1024 // weight_ptr.dtype.element_ty.primitive_bitwidth
            lines = tl.maximum(begin - tile * steps, 0) * IN_TILE + tl.arange(0, FETCH) * line
            early = tl.minimum(tile // row_tiles * OUT_TILE + tl.arange(0, OUT_TILE), outs - 1).to(tl.int64)
            prefetch(weight_ptr + (early * size)[:, None] + tl.minimum(lines, size - 1)[None, :])
        gdc_wait()
        gdc_launch_dependents()
    while end > begin:
        tile = (end - 1) // steps
        first = tl.maximum(begin - tile * steps, 0)
        last = end - tile * steps
        out_start = tile // row_tiles * OUT_TILE
        row_start = tile % row_tiles * ROW_TILE
        total = tl.zeros([OUT_TILE, ROW_TILE], tl.float32)
        for step in tl.range(first, last, num_stages=STAGES):
            weight = weight_desc.load([out_start, step * IN_TILE])
            x = x_desc.load([row_start, step * IN_TILE])
            total = tl.dot(weight, x.T, total, input_precision="ieee")
        end = tile * steps + first
        if last < steps:
            leave_part(total, program, parts_ptr, arrived_ptr, place)
        else:
            if first > 0:
                other = ((tile.to(tl.int64) * steps + 1) * programs - 1) // work  # the program of the tile's first step
                total = with_parts(total, other, program, parts_ptr, arrived_ptr, place)
            out = out_start + tl.arange(0, OUT_TILE)
            row = row_start + tl.arange(0, ROW_TILE)
            total = with_bias(total, bias_ptr + out, out < outs, BIAS)
            inside = (out < outs)[:, None] & (row < rows)[None, :]
            where = out_ptr + row.to(tl.int64)[None, :] * outs + out[:, None]
            tl.store(where, total.to(out_ptr.dtype.element_ty), mask=inside)


def linear_stream_k(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    tiling: Tiling,
    workspace: Workspace,
    split: int,
    programs: int = 0,
) -> Tensor:
    """x [rows, in], weight [out, in], bias [out] -> [rows, out], accumulated in float32.

    Every tile is cut into `split` parts; or, where `programs` is not 0, the steps are divided among that many programs.
    Rows for which the workspace has no room are computed by further launches, which does not change their results.
    Weight, bias and each row of x are contiguous and aligned to 16 bytes. Raises ValueError for other layouts, shapes
    and dtypes.
    """
    rows, size = x.shape
    outs = weight.shape[0]
    if weight.shape != (outs, size) or (bias is not None and bias.shape != (outs,)):
        raise ValueError(f"rows {list(x.shape)} do not fit a weight {list(weight.shape)}")
    if x.dtype != weight.dtype or (bias is not None and bias.dtype != weight.dtype):
        raise ValueError(f"dtypes differ: {x.dtype}, {weight.dtype}")
    if not fits(x) or not fits(weight) or not weight.is_contiguous():
        raise ValueError(f"rows must be contiguous and aligned, got strides {x.stride()}, {weight.stride()}")
    out = torch.empty((rows, outs), dtype=x.dtype, device=x.device)
    if out.numel() == 0:
        return out
    parts = max(split, 1) * ceil_div(outs, tiling.out_tile)  # of one tile of rows
    most = workspace.rows_at_once(tiling, rows, parts, programs) if split > 1 or programs else rows
    weights = TensorDescriptor.from_tensor(weight, [tiling.out_tile, tiling.in_tile])
    for start in range(0, rows, most):
        some, result = x[start : start + most], out[start : start + most]
        grid = programs or parts * ceil_div(len(some), tiling.row_tile)
        _linear_stream_k_kernel[(grid,)](
            TensorDescriptor.from_tensor(some, [tiling.row_tile, tiling.in_tile]), weights, weight,
            weight if bias is None else bias, result, workspace.parts, workspace.arrived, len(some), outs, size,
            OUT_TILE=tiling.out_tile, ROW_TILE=tiling.row_tile, IN_TILE=tiling.in_tile, STAGES=tiling.stages,
            BIAS=bias is not None, PDL=tiling.pdl, FETCH=tiling.fetch, num_warps=tiling.warps,
            num_stages=tiling.stages, **pdl_options(tiling.pdl),
        )  # fmt: skip
    return out


def fits(matrix: Tensor) -> bool:
    """Whether a tensor descriptor (TMA) can copy tiles of this matrix."""
    contiguous, step = matrix.stride(1) == 1, matrix.stride(0) * matrix.element_size()
    return contiguous and step % ALIGNMENT == 0 and matrix.data_ptr() % ALIGNMENT == 0
