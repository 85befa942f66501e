"""Products of weights of 4 and 8 bits with inputs as they are, by kernels of a GPU."""

import torch
from torch import Tensor

from blockyard.kernels.quantized.block_weights import BLOCK, BlockWeights, can_be_blocks, to_blocks
from blockyard.kernels.quantized.packed_weights import PackedWeights

if torch.cuda.is_available():
    # they import Triton, which comes only with CUDA builds of torch
    from blockyard.kernels.layers.linear_stream_k import Tiling, Workspace
    from blockyard.kernels.quantized.linear_blocks import linear_blocks
    from blockyard.kernels.quantized.unpack_blocks import unpack_blocks

ALIGNMENT = 16  # bytes of a row that kernels read at once
MOST_ROWS = 256  # the weight of a product with more is unpacked first
# of unpacked outputs at a time, and a multiple of so many outputs: a product of all is quicker than several whose
# weights stay in the L2 cache
CHUNK_BYTES, CHUNK_UNIT = 256 << 20, 128
ROW_TILES = (16, 32, 64)  # without measured configs; the last one for any number of rows
OUT_TILE, STAGES, WARPS = 64, 4, 4


class BlockProduct:
    """The weight of a linear layer in blocks, and its products."""

    def __init__(self, weights: BlockWeights, order: Tensor | None) -> None:
        """order: which input each column is, see `act_order`; None: columns are in the order of inputs."""
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
        return self.weights.tensors() | ({} if self.order is None else {"order": self.order})

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
        """The same of x in the order of the columns, with numbers in its dtype, made for some outputs at a time."""
        outputs, inputs = self.weights.outputs, self.weights.inputs
        count = max(min(chunk_bytes // (inputs * x.element_size()) // CHUNK_UNIT * CHUNK_UNIT, outputs), CHUNK_UNIT)
        out = torch.empty((len(x), outputs), dtype=x.dtype, device=x.device)
        chunk = torch.empty((min(count, outputs), inputs), dtype=x.dtype, device=x.device)
        for begin in range(0, outputs, count):
            some = chunk[: outputs - begin]
            unpack_blocks(self.weights, some, begin, self.table)
            torch.mm(x, some.t(), out=out[:, begin : begin + len(some)])
        return out


def block_product(packed: PackedWeights, order: Tensor | None, dtype: torch.dtype) -> BlockProduct | None:
    """Brings the weight of one matrix into the order of blocks. None: no kernel reads weights like it, or rows of this
    dtype.

    order: as `BlockProduct` has it.
    """
    if not can_be_blocks(packed.group) or dtype.itemsize != 2 or packed.inputs * dtype.itemsize % ALIGNMENT:
        return None
    return BlockProduct(to_blocks(packed), order)
