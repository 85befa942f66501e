"""One matrix product, in the layout that is quickest for its shape and the rows of the step.

Measured on CPU with one thread (AMD EPYC, AVX-512, torch 2.13), microseconds, weights out of L2:

    in x out     rows   F.linear   mm on transposed   oneDNN-packed
    256 x 4096    1       452           127               150
    256 x 4096    2       675           243               186
    256 x 4096   16       916           756               392
    256 x 256     1         8             7                17
    256 x 256    16        29            27                32
    1024 x 256    1        21            26                31
    1024 x 256    2        39            48                31
    2048 x 2048   1       790           651               639
    2048 x 2048  16      2566          2953              1383

So in float32: packed from two rows on, and for one row a second copy where the matrix is small enough for it to cost
little memory: transposed, or as it is where it is wider than high. In bfloat16 packed is best everywhere.

**Rows that do not depend on each other.** Each of these takes another path for another number of rows: on the same
machine one row in float32 had other bits in F.linear up to 5 or 13 rows, in mm for 1 and from 256, packed for 1. What
holds is one call of one shape on memory of one alignment: `freeze` computes GROUP rows at a time out of a fresh copy,
the last group padded, and a row's bits were the same at every place in its group, in all three layouts, on one thread
and on two. (Rows read where they lay, at other alignments, had other bits.)
"""

from collections.abc import Callable, Mapping
from typing import Any, Literal, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from blockyard.kernels.layers.rms_norm import RMSNorm

SECOND_COPY_ELEMENTS = 1_500_000  # above it one row is bound by memory in any layout
TINY_ELEMENTS = 65_536  # up to here the transposed copy keeps up with packed
TINY_ROWS = 16
GROUP = 16  # rows of every product once frozen

Around = Literal["", "norm", "add", "gate"]
Product = Callable[[Tensor], Tensor]  # [rows, in] -> [rows, out]


class Fused(Protocol):
    """A product with what comes before and after it, in one kernel."""

    def __call__(
        self, x: Tensor, norm: RMSNorm | None = None, gated: bool = False, add_to: Tensor | None = None
    ) -> Tensor:
        """Of norm(x), or of silu(gate) * up where x is [rows, 2 * in]; added to `add_to` in place, where given."""


_dnn: Any = torch.ops.mkldnn


def second_copy(in_features: int, out_features: int, dtype: torch.dtype) -> tuple[bool, int]:
    """Of the copy beside the packed one on CPU: whether it is transposed, and up to how many rows it is used.

    0 rows: there is none.
    """
    elements = in_features * out_features
    if dtype != torch.float32 or elements > SECOND_COPY_ELEMENTS:
        return False, 0
    if elements <= TINY_ELEMENTS:
        return True, TINY_ROWS
    return in_features <= out_features, 1


def can_pack(weight: Tensor) -> bool:
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    if weight.dtype == torch.bfloat16:
        return hasattr(_dnn, "_is_mkldnn_bf16_supported") and bool(_dnn._is_mkldnn_bf16_supported())
    return weight.dtype == torch.float32 and hasattr(_dnn, "_reorder_linear_weight")


class Linear:
    """x [rows, in] -> [rows, out]. `weight` [out, in] takes the checkpoint's; `prepare` then picks the layouts."""

    __slots__ = (
        "_fused",
        "_otherwise",
        "_packed",
        "_products",
        "_second_rows",
        "_transposed",
        "around",
        "bias",
        "shape",
        "weight",
    )

    def __init__(self, weight: Tensor, bias: Tensor | None = None, around: Around = "") -> None:
        """`around`: in a model x is the result of a norm ("norm"), or the product is added to the residual ("add"),
        where x may be silu(gate) * up ("gate")."""
        self.weight: Tensor | None = weight
        self.bias = bias
        self.around: Around = around
        self.shape = (weight.shape[1], weight.shape[0])  # in, out
        self._transposed: Tensor | None = None
        self._second_rows = 0
        self._packed: Tensor | None = None
        self._products: Mapping[int, Product] = {}
        self._fused: Mapping[int, Fused] = {}
        self._otherwise: Product = self._plain

    def prepare(self) -> None:
        """Call once the weight is loaded; on CPU the prepared copies take its place."""
        weight = self.weight
        if weight is None or not can_pack(weight):
            return
        transposed, self._second_rows = second_copy(*self.shape, weight.dtype)
        self._packed = _dnn._reorder_linear_weight(weight)
        if transposed:
            self._transposed = weight.t().contiguous()
        if transposed or not self._second_rows:
            self.weight = None

    def use(
        self,
        products: Mapping[int, Product],
        otherwise: Product | None = None,
        fused: Mapping[int, Fused] | None = None,
    ) -> None:
        """What computes so many rows, and what all others, None leaves these as they are; for which rows that can take
        in what is around it."""
        self._products, self._fused = products, fused or {}
        if otherwise is not None:
            self._otherwise = otherwise

    def wrap(self, around: Callable[[Product], Product]) -> None:
        """What is to be done before and after each product; none takes in what is around it from then on."""
        self._fused = {}
        self._products = {rows: around(product) for rows, product in self._products.items()}
        self._otherwise = around(self._otherwise)

    def freeze(self) -> None:
        """From now on a row's result follows from that row alone."""
        self.use({}, in_groups(self._plain))

    def fused(self, rows: int) -> Fused | None:
        return self._fused.get(rows)

    def __call__(self, x: Tensor) -> Tensor:
        return self._products.get(x.shape[0], self._otherwise)(x)

    def _plain(self, x: Tensor) -> Tensor:
        if self._packed is not None and x.shape[0] > self._second_rows:
            out: Tensor = _dnn._linear_pointwise(x, self._packed, self.bias, "none", [], "")
            return out
        if self._transposed is None:
            assert self.weight is not None
            return F.linear(x, self.weight, self.bias)
        if self.bias is None:
            return torch.mm(x, self._transposed)
        return torch.addmm(self.bias, x, self._transposed)

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        """residual + self(x). May write to `residual`."""
        return residual.add_(self(x))


def in_groups(product: Product) -> Product:
    """The same, GROUP rows at a time, so that every call has one shape."""

    def grouped(x: Tensor) -> Tensor:
        rows = x.shape[0]
        padded = F.pad(x, (0, 0, 0, max(-(-rows // GROUP), 1) * GROUP - rows))
        return torch.cat([product(some) for some in padded.view(-1, GROUP, x.shape[1])])[:rows]

    return grouped
