"""A linear layer: it calls the kernel installed for the number of rows, or else its `LinearMethod`.

**Batch invariance.** On the CPU, torch takes another code path for another number of rows, so the result of a row
depends on the batch. In float32 on one machine, the bits of a row changed in F.linear for up to 5 or 13 rows, in mm for
1 row and from 256 rows, and in the packed layout for 1 row. Only calls with equal shape and memory alignment give equal
bits. `make_batch_invariant` therefore copies the rows, pads them to a multiple of GROUP and multiplies GROUP rows at a
time. Measured in all three layouts, on one thread and on two, the bits of a row then did not depend on its place in the
group. Without the copy they did, because the alignment differed.
"""

from collections.abc import Callable, Mapping
from enum import Enum
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from blockyard.kernels.layers.rms_norm import RMSNorm
from blockyard.services.gpu_worker.layers.linear_method import (
    LinearMethod,
    LinearSpec,
    UnquantizedLinear,
    pick_linear_method,
)
from blockyard.services.gpu_worker.loading.weights import Arrange, WeightTable

GROUP = 16  # rows of each batch-invariant product

Product = Callable[[Tensor], Tensor]  # [rows, in] -> [rows, out]


class Fusion(Enum):
    """The operations before and after a linear layer that one kernel can compute together with it."""

    NONE = "none"
    NORM = "norm"  # RMSNorm of the input
    ADD = "add"  # addition of the result to the residual
    GATED_ADD = "gated_add"  # silu(gate) * up of the input, and addition of the result to the residual


class FusedProduct(Protocol):
    """A kernel that computes a matrix product together with the operations of a `Fusion`."""

    def __call__(
        self, x: Tensor, norm: RMSNorm | None = None, gated: bool = False, add_to: Tensor | None = None
    ) -> Tensor:
        """Multiplies norm(x), or silu(gate) * up if `gated`; then x is [rows, 2 * in]. Adds the result to `add_to` in
        place, if given."""


class Linear:
    """A matrix product with optional bias: x [rows, in] -> [rows, out]."""

    __slots__ = ("_default", "_fused", "_products", "fusion", "is_batch_invariant", "method", "shape")

    def __init__(self, method: LinearMethod, shape: tuple[int, int], fusion: Fusion = Fusion.NONE) -> None:
        """shape: numbers of input and output features."""
        self.method, self.shape, self.fusion = method, shape, fusion
        self.is_batch_invariant = False
        self._products: Mapping[int, Product] = {}
        self._fused: Mapping[int, FusedProduct] = {}
        self._default: Product = method.apply

    def prepare(self) -> None:
        """Repacks the weight. Called once, after the weights are loaded."""
        self.method.prepare()

    def use(
        self,
        products: Mapping[int, Product],
        default: Product | None = None,
        fused: Mapping[int, FusedProduct] | None = None,
    ) -> None:
        """Installs kernels by number of rows. `default` is used for all other numbers; None keeps the current one."""
        self._products, self._fused = products, fused or {}
        if default is not None:
            self._default = default

    def wrap(self, wrapper: Callable[[Product], Product]) -> None:
        """Replaces each product by `wrapper(product)`. Removes fused kernels, because `wrapper` cannot wrap them."""
        self._fused = {}
        self._products = {rows: wrapper(product) for rows, product in self._products.items()}
        self._default = wrapper(self._default)

    def disable_fusion(self) -> None:
        """Forbids fused kernels for this layer. Call it before kernels are picked."""
        self.fusion = Fusion.NONE

    def make_batch_invariant(self, product: Product | None = None) -> None:
        """Makes the result of each row independent of the other rows, to the last bit.

        product: one that does so. None: that of the `LinearMethod`, in groups of rows.
        """
        self.use({}, in_groups(self.method.apply) if product is None else product)
        self.is_batch_invariant = True

    def fused(self, rows: int) -> FusedProduct | None:
        return self._fused.get(rows)

    def __call__(self, x: Tensor) -> Tensor:
        return self._products.get(x.shape[0], self._default)(x)

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        """Returns residual + self(x). May write to `residual`."""
        return residual.add_(self(x))


class LinearLayers:
    """Makes the linear layers of one model, with the quantization method of config.json."""

    def __init__(self, table: WeightTable, config: Mapping[str, Any]) -> None:
        self.table, self._config = table, config

    def make(
        self,
        outputs: Mapping[str, int],
        in_features: int,
        *,
        bias: bool = False,
        arrange: Mapping[str, Arrange] | None = None,
        fusion: Fusion = Fusion.NONE,
        transposed: bool = False,
        stored_rows: Mapping[str, int] | None = None,
    ) -> Linear:
        """Makes one layer from checkpoint matrices with the same input. outputs: output features by name, in order.

        transposed: checkpoints have [in, out], as layers that they call Conv1D. stored_rows: of matrices by name, of
        which `arrange` makes more output features than checkpoints have.
        """
        spec = LinearSpec(
            outputs=outputs,
            in_features=in_features,
            bias=bias,
            arrange=arrange or {},
            transposed=transposed,
            stored_rows=stored_rows or {},
        )
        method = pick_linear_method(self._config, spec)(self.table, spec)
        return Linear(method, (in_features, spec.out_features), fusion)


def dense_linear(weight: Tensor, bias: Tensor | None = None, fusion: Fusion = Fusion.NONE) -> Linear:
    """Makes a linear layer from a tensor [out, in], for example a tied embedding."""
    return Linear(UnquantizedLinear(weight, bias), (weight.shape[1], weight.shape[0]), fusion)


def in_groups(product: Product) -> Product:
    """Wraps a product so that it computes GROUP rows at a time, and every call has the same shape."""

    def grouped(x: Tensor) -> Tensor:
        rows = x.shape[0]
        padded = F.pad(x, (0, 0, 0, max(-(-rows // GROUP), 1) * GROUP - rows))
        return torch.cat([product(group) for group in padded.view(-1, GROUP, x.shape[1])])[:rows]

    return grouped
