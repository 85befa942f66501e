"""Kernels of weights of 4 and 8 bits in blocks, with inputs as they are. Imports Triton: for GPUs only.

Beside the method's own product: the skinny GEMM for few rows, the GEMM whose codes never leave registers for up to 16,
the GEMM of Hopper's warp groups from nine rows on, or the stream-K GEMM, and for many rows cuBLAS with a weight that is
unpacked first.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from blockyard.kernels.gpu_facts import runs_hopper_kernels
from blockyard.kernels.int_math import ceil_div
from blockyard.kernels.layers.linear_stream_k import Tiling, Workspace
from blockyard.kernels.layers.rms_norm import RMSNorm
from blockyard.kernels.programmatic_launch import supports_pdl
from blockyard.kernels.quantized import linear_blocks_wgmma
from blockyard.kernels.quantized.block_weights import BLOCK
from blockyard.kernels.quantized.linear_blocks import linear_blocks
from blockyard.kernels.quantized.linear_blocks_mma import (
    MAX_ROWS,
    can_multiply,
    is_even,
    linear_blocks_mma,
    mma_row_tile,
)
from blockyard.kernels.quantized.linear_blocks_skinny import linear_blocks_skinny
from blockyard.services.gpu_worker.layers.linear import FusedProduct, Linear, Product, make_spec
from blockyard.services.gpu_worker.linear_tuning import kernel_configs
from blockyard.services.gpu_worker.linear_tuning.kernel_configs import KernelConfig, LinearShape, of_rows
from blockyard.services.gpu_worker.loading.linear_spec import part
from blockyard.services.gpu_worker.quantization.kept.block_products import BlockProduct
from blockyard.services.gpu_worker.quantization.kept.form import KeptLinear
from blockyard.services.gpu_worker.quantization.method import Fusion, LinearMethod

Tile = tuple[int, int, int, int, int]

WORKSPACE_ELEMENTS = 9 << 20  # two tiles of 128 x 256 for each of 144 programs
WORKSPACE_PROGRAMS = 1 << 14
EXAMPLE_FEATURES = 256  # of `example`
SHARED_BYTES = 226 << 10  # usable shared memory of one SM, compute capability 9.0
FEWEST_BLOCKS = 3  # of inputs, in each part of a split tile
PARTS = (1, 2, 3, 4)  # programs of a multiprocessor that splits are made for, at most

# rows -> candidates: out_tile, in_tile, tiles loaded at a time, warps
SKINNY_TILES = {
    1: ((8, 512, 2, 4), (8, 512, 4, 4), (16, 512, 2, 8), (16, 512, 1, 8), (8, 1024, 1, 8), (8, 1024, 2, 8),
        (4, 512, 4, 2), (4, 1024, 2, 4), (16, 256, 4, 4), (32, 256, 2, 8)),
    2: ((8, 512, 1, 4), (8, 512, 2, 4), (16, 512, 1, 8), (16, 512, 2, 8), (8, 1024, 1, 8), (16, 256, 2, 4)),
    4: ((8, 512, 1, 4), (16, 512, 1, 8), (16, 256, 1, 4), (8, 512, 2, 4)),
}  # fmt: skip
# the same of weights of 4 bits, for its fused forms: each takes seconds to compile
SKINNY_BESIDE_MMA = {1: ((8, 512, 2, 4), (8, 512, 4, 4), (16, 512, 2, 8), (8, 1024, 2, 8))}
MMA_ALONE = 8  # rows, up to which the stream-K GEMM took twice as long
# candidates for up to MAX_ROWS rows: out_tile, warps, steps loaded before the PDL wait
MMA_TILES = (
    *((16, 4, 4), (32, 4, 1), (32, 4, 2), (32, 4, 4), (16, 8, 2), (16, 8, 4), (32, 8, 2), (32, 8, 4), (16, 4, 1)),
    *((16, 4, 7), (64, 4, 2)),
)
# most rows -> candidates: out_tile, row_tile, in_tile, stages, warps
TILES: dict[int, tuple[Tile, ...]] = {
    16: ((64, 16, BLOCK, 4, 4), (64, 16, BLOCK, 6, 4), (128, 16, BLOCK, 4, 4), (128, 16, BLOCK, 4, 8),
         (64, 16, BLOCK, 3, 4)),
    32: ((64, 32, BLOCK, 4, 4), (64, 32, BLOCK, 6, 4), (128, 32, BLOCK, 4, 4), (128, 32, BLOCK, 4, 8)),
    64: ((64, 64, BLOCK, 4, 4), (128, 64, BLOCK, 4, 4), (128, 64, BLOCK, 4, 8), (128, 64, BLOCK, 3, 4)),
    128: ((64, 128, BLOCK, 3, 4), (128, 128, BLOCK, 3, 8), (128, 128, BLOCK, 4, 8), (128, 64, BLOCK, 4, 4),
          (256, 64, BLOCK, 3, 8)),
    256: ((128, 128, BLOCK, 3, 8), (128, 128, BLOCK, 4, 8), (128, 256, BLOCK, 2, 8), (256, 128, BLOCK, 2, 8)),
}  # fmt: skip
# the same of the stream-K GEMM beside that of warp groups: for few outputs, of which that GEMM has few tiles
TILES_BESIDE_WGMMA: dict[int, tuple[Tile, ...]] = {
    32: (),
    64: ((64, 64, BLOCK, 4, 4),),
    128: ((64, 128, BLOCK, 3, 4),),
    256: ((128, 128, BLOCK, 3, 8),),
}
# most rows -> candidates: row_tile, stages, warps
WGMMA_TILES = {
    16: ((16, 6, 16),),
    32: ((32, 6, 16),),
    64: ((64, 5, 8), (64, 5, 16)),
    256: ((128, 4, 8),),
}
BATCH_INVARIANT = (64, 32, BLOCK, 4, 4)  # as in TILES, for any number of rows
UNPACKED = KernelConfig("unpacked")


class BlockProducts:
    """Implements `FormProducts`. Its kernels share the workspace of the stream-K kernel."""

    def __init__(self, device: torch.device, dtype: torch.dtype, processors: int) -> None:
        self._device, self._dtype, self._processors = device, dtype, processors
        self._pdl, self._hopper = supports_pdl(device), runs_hopper_kernels(device)
        self._space: Workspace | None = None

    def candidates(self, layer: LinearShape, rows: int, group: Sequence[Linear]) -> list[KernelConfig]:
        if rows > kernel_configs.MAX_ROWS:
            return []
        weights = _blocks(group[0].method).weights
        in_registers = rows <= MAX_ROWS and can_multiply(weights, self._dtype)
        skinny = (SKINNY_BESIDE_MMA if in_registers else SKINNY_TILES).get(rows, ())
        made = [
            KernelConfig("skinny", out, 0, size, early, warps)
            for out, size, early, warps in skinny
            if layer.in_features % (size * early) == 0
        ]
        if in_registers:
            row_tile = mma_row_tile(rows)
            made += [KernelConfig("mma", out, row_tile, BLOCK, ahead, warps) for out, warps, ahead in MMA_TILES]
        if in_registers and rows <= MMA_ALONE:
            return made
        tiles = TILES
        if self._hopper and linear_blocks_wgmma.can_multiply(weights, self._dtype):
            made += self._of_warp_groups(layer, rows)
            tiles = TILES_BESIDE_WGMMA
        made += [
            self._config(layer, one, split) for one in of_rows(rows, tiles) for split in self._splits(layer, rows, one)
        ]
        return [*made, UNPACKED] if rows > 64 else made

    def _of_warp_groups(self, layer: LinearShape, rows: int) -> list[KernelConfig]:
        """With as many parts of each tile as there are multiprocessors for. Where that is one, the multiprocessors may
        share the steps of all tiles instead."""
        made = []
        out_tile = linear_blocks_wgmma.OUT_TILE
        for row_tile, stages, warps in of_rows(rows, WGMMA_TILES):
            tiles = ceil_div(layer.out_features, out_tile) * ceil_div(rows, row_tile)
            most = max(min(self._processors // tiles, layer.in_features // BLOCK // FEWEST_BLOCKS), 1)
            splits = (most,) if most > 1 else (1, 0)
            made += [KernelConfig("wgmma", out_tile, row_tile, BLOCK, stages, warps, split) for split in splits]
        return made

    def _splits(self, layer: LinearShape, rows: int, tiles: tuple[int, int, int, int, int]) -> list[int]:
        """Split-K factors with which one to four programs run on each multiprocessor."""
        out_tile, row_tile, _, stages, _ = tiles
        count = -(-layer.out_features // out_tile) * -(-rows // row_tile)
        room = SHARED_BYTES // ((out_tile // 2 + 2 * row_tile) * BLOCK * stages)
        most = max(layer.in_features // BLOCK // FEWEST_BLOCKS, 1)
        found = {min(max(self._processors * parts // count, 1), most) for parts in PARTS if parts <= max(room, 1)}
        return sorted(found)

    def _config(self, layer: LinearShape, tiles: tuple[int, int, int, int, int], split: int) -> KernelConfig:
        fetch = 2 if layer.in_features * layer.out_features <= kernel_configs.FETCH_ELEMENTS else 0
        return KernelConfig("blocks", *tiles, split, fetch)

    def batch_invariant(self, layer: LinearShape) -> KernelConfig:
        count = -(-layer.out_features // BATCH_INVARIANT[0])
        most = max(layer.in_features // BLOCK // FEWEST_BLOCKS, 1)
        return self._config(layer, BATCH_INVARIANT, min(max(round(self._processors / count), 1), most))

    def of(self, config: KernelConfig, method: LinearMethod) -> Product:
        blocks, bias = _blocks(method), _kept(method).bias
        if config == UNPACKED:

            def unpacked(x: Tensor) -> Tensor:
                out = blocks.multiply_unpacked(blocks.ordered(x))
                return out if bias is None else out.add_(bias)

            return unpacked
        if config.kernel == "skinny":
            few = self.fused(config, method)
            return few if blocks.order is None else lambda x: few(blocks.ordered(x))
        weights, pdl = blocks.weights, self._pdl
        if config.kernel == "mma":
            out_tile, warps, ahead = config.out_tile, config.warps, config.stages
            return lambda x: linear_blocks_mma(
                blocks.ordered(x), weights, bias, out_tile=out_tile, warps=warps, ahead=ahead, pdl=pdl
            )
        workspace, split, table = self._workspace(), config.split, blocks.table
        if config.kernel == "wgmma":
            return self._warp_groups(config, blocks, bias, workspace)
        tiling = Tiling(
            config.out_tile, config.row_tile, config.in_tile, config.stages, config.warps, self._pdl, config.fetch
        )
        if blocks.order is None:
            return lambda x: linear_blocks(x, weights, bias, tiling, workspace, split, table=table)
        return lambda x: linear_blocks(blocks.ordered(x), weights, bias, tiling, workspace, split, table=table)

    def _warp_groups(
        self, config: KernelConfig, blocks: BlockProduct, bias: Tensor | None, workspace: Workspace
    ) -> Product:
        weights, processors, row_tile = blocks.weights, self._processors, config.row_tile
        tiling = Tiling(config.out_tile, row_tile, config.in_tile, config.stages, config.warps, self._pdl)
        out_tiles = ceil_div(weights.outputs, config.out_tile)

        def product(x: Tensor) -> Tensor:
            tiles = out_tiles * ceil_div(len(x), row_tile)
            programs = tiles * config.split or processors
            return linear_blocks_wgmma.linear_blocks_wgmma(
                blocks.ordered(x), weights, bias, tiling, workspace, programs
            )

        return product

    def fused(self, config: KernelConfig, method: LinearMethod) -> FusedProduct:
        """The skinny GEMM of rows in the order of the columns, which can fuse the norm, the gate and the residual
        addition. config: of that kernel."""
        blocks, bias, pdl = _blocks(method), _kept(method).bias, self._pdl
        weights, table = blocks.weights, blocks.table
        tiles = {"out_tile": config.out_tile, "tile": config.in_tile, "warps": config.warps, "early": config.stages}

        def product(
            x: Tensor, norm: RMSNorm | None = None, gated: bool = False, add_to: Tensor | None = None
        ) -> Tensor:
            return linear_blocks_skinny(
                x, weights, bias, pdl=pdl, norm=norm, gated=gated, add_to=add_to, table=table, **tiles
            )

        return product

    def example(self, config: KernelConfig, bias: bool, fusion: Fusion, like: LinearMethod) -> Linear:
        one, size = _blocks(like).weights, EXAMPLE_FEATURES
        if config.kernel == "skinny":
            size = -(-size // (config.in_tile * config.stages)) * config.in_tile * config.stages
        if config.kernel == "mma" and is_even(one.inputs, config.warps, config.stages):
            size = BLOCK * config.warps * config.stages
        groups = -(-size // one.group) if one.group else 1
        made = replace(
            one,
            inputs=size,
            codes=_first(one.codes, size // BLOCK, EXAMPLE_FEATURES, one.codes.shape[2]),
            scales=None if one.scales is None else _first(one.scales, groups, EXAMPLE_FEATURES),
            zeros=None if one.zeros is None else _first(one.zeros, groups, EXAMPLE_FEATURES),
            row_scales=None if one.row_scales is None else one.row_scales.new_zeros(EXAMPLE_FEATURES),
        )
        vector = torch.zeros(EXAMPLE_FEATURES, dtype=self._dtype, device=self._device) if bias else None
        spec = make_spec([part("", EXAMPLE_FEATURES)], size, bias=bias)
        method = KeptLinear(_kept(like).kept_form, {}, (size, EXAMPLE_FEATURES), self._dtype, vector)
        method.blocks = BlockProduct(made, None)
        return Linear(method, spec, fusion)

    def _workspace(self) -> Workspace:
        """It is made for the first model of such a form: others need no memory for it."""
        if self._space is None:
            self._space = Workspace(WORKSPACE_ELEMENTS, WORKSPACE_PROGRAMS, self._device)
        return self._space


def _first(like: Tensor, *shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.uint8, device=like.device).to(like.dtype)


def _kept(method: LinearMethod) -> KeptLinear:
    assert isinstance(method, KeptLinear)
    return method


def _blocks(method: LinearMethod) -> BlockProduct:
    blocks = _kept(method).blocks
    assert isinstance(blocks, BlockProduct)
    return blocks
