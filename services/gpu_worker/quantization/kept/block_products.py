"""Products of weights of 4 and 8 bits with inputs as they are, by kernels of a GPU. Imports Triton: for GPUs only."""

from collections.abc import Mapping

import torch
from torch import Tensor

from blockyard.kernels.layers.linear_stream_k import ALIGNMENT, Tiling, Workspace
from blockyard.kernels.quantized.block_weights import BLOCK, BlockWeights, can_be_blocks, to_blocks
from blockyard.kernels.quantized.linear_blocks import linear_blocks
from blockyard.kernels.quantized.packed_weights import E8M0, Codes, PackedWeights
from blockyard.kernels.quantized.unpack_blocks import unpack_blocks
from blockyard.services.gpu_worker.quantization.kept.act_order import ORDER
from blockyard.services.gpu_worker.quantization.kept.eight_bits import E4M3
from blockyard.services.gpu_worker.quantization.kept.form import KeptForm
from blockyard.services.gpu_worker.quantization.kept.table4_a16 import E2M1, ROW_SCALES, Table4A16
from blockyard.services.gpu_worker.quantization.kept.w4a16 import CODES, SCALES, W4A16, ZEROS
from blockyard.services.gpu_worker.quantization.kept.w8a16 import W8A16

MOST_ROWS = 256  # the weight of a product with more is unpacked first
CHUNK_BYTES, CHUNK_UNIT = 24 << 20, 128  # of unpacked outputs at a time, and a multiple of so many outputs
ROW_TILES = (16, 32, 64)  # without measured configs; the last one for any number of rows
OUT_TILE, STAGES, WARPS = 64, 4, 4

_BYTES = {torch.int8: Codes.INT8, torch.uint8: Codes.UINT8, E4M3: Codes.E4M3}


class BlockProduct:
    """The weight of a linear layer in blocks, and its products."""

    def __init__(self, weights: BlockWeights, order: Tensor | None) -> None:
        """order: see `act_order`; None: columns are in the order of inputs."""
        self.weights, self.order = weights, order
        device = weights.codes.device
        self.table = None if weights.table is None else torch.tensor(weights.table, device=device)
        self._space = Workspace(1, 1, device)

    @property
    def key(self) -> str:
        """What kernels are compiled for: kind of codes, group, scales, zeros."""
        one = self.weights
        scales = [None if tensor is None else tensor.dtype for tensor in (one.scales, one.zeros, one.row_scales)]
        kinds = "-".join("" if dtype is None else str(dtype).removeprefix("torch.") for dtype in scales)
        return f"{one.kind.name}-{one.group}-{kinds}"

    def tensors(self) -> dict[str, Tensor]:
        return self.weights.tensors() | ({} if self.order is None else {ORDER: self.order})

    def ordered(self, x: Tensor) -> Tensor:
        """x [rows, inputs] in the order of the columns."""
        return x if self.order is None else x.index_select(1, self.order)

    def __call__(self, x: Tensor) -> Tensor:
        """[rows, inputs] -> [rows, outputs], without bias, as no config says otherwise."""
        rows = len(x)
        x = self.ordered(x)
        if rows > MOST_ROWS:
            return self.multiply_unpacked(x)
        row_tile = next((one for one in ROW_TILES if rows <= one), ROW_TILES[-1])
        tiling = Tiling(OUT_TILE, row_tile, BLOCK, STAGES, WARPS, pdl=False)
        return linear_blocks(x.contiguous(), self.weights, None, tiling, self._space, 1, table=self.table)

    def multiply_unpacked(self, x: Tensor, chunk_bytes: int = CHUNK_BYTES) -> Tensor:
        """The same of x in the order of the columns, with numbers in its dtype, which are made some outputs at a time.

        Chunks have the same memory, so that it stays in the L2 cache.
        """
        outputs, inputs = self.weights.outputs, self.weights.inputs
        count = max(min(chunk_bytes // (inputs * x.element_size()) // CHUNK_UNIT * CHUNK_UNIT, outputs), CHUNK_UNIT)
        out = torch.empty((len(x), outputs), dtype=x.dtype, device=x.device)
        chunk = torch.empty((min(count, outputs), inputs), dtype=x.dtype, device=x.device)
        for begin in range(0, outputs, count):
            some = chunk[: outputs - begin]
            unpack_blocks(self.weights, some, begin, self.table)
            torch.mm(x, some.t(), out=out[:, begin : begin + len(some)])
        return out


def block_product(
    form: KeptForm, kept: Mapping[str, Tensor], shape: tuple[int, int], dtype: torch.dtype
) -> BlockProduct | None:
    """Brings a weight into the order of blocks. None: no kernel reads weights of this form, shape or dtype."""
    match form:
        case W4A16(group=group):
            kind, table, rows = Codes.INT4, None, None
        case W8A16(codes=codes, group=group):
            kind, table, rows = _BYTES[codes], None, None
        case Table4A16(table=numbers, group=group):
            is_float = numbers == E2M1
            kind, table, rows = (Codes.E2M1, None, None) if is_float else (Codes.TABLE4, numbers, None)
            rows = kept.get(ROW_SCALES)
        case _:
            return None
    if not can_be_blocks(group or 0) or dtype.itemsize != 2 or shape[0] * dtype.itemsize % ALIGNMENT:
        return None
    scales, zeros = kept[SCALES], kept.get(ZEROS)
    is_e8m0 = scales.dtype == E8M0
    scales = scales.view(torch.uint8) if is_e8m0 else scales
    packed = PackedWeights(
        codes=kept[CODES][None],
        kind=kind,
        inputs=shape[0],
        group=group or 0,
        scales=None if group is None else scales[None],
        zeros=None if zeros is None else zeros[None],
        row_scales=scales[None] if group is None else None if rows is None else rows[None],
        is_e8m0=is_e8m0 and group is not None,
    )
    return BlockProduct(to_blocks(packed, table), kept.get(ORDER))
