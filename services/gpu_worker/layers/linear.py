"""A linear layer: the kernels that were picked for a batch size, over the layer's `LinearMethod`.

**Batch-invariant rows.** On the CPU each layout takes another code path for another number of rows: on one machine a
row in float32 had other bits in F.linear up to 5 or 13 rows, in mm for 1 and from 256, and packed for 1. Only calls of
one shape on memory of one alignment give the same bits. `make_batch_invariant` therefore computes GROUP rows at a time
out of a fresh copy, with the last group padded. A row's bits were the same at every place in its group, in all three
layouts, on one thread and on two. (Rows read in place, at other alignments, had other bits.)
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

GROUP = 16  # rows of every product that is batch invariant

Product = Callable[[Tensor], Tensor]  # [rows, in] -> [rows, out]


class Fusion(Enum):
    """The neighbours of a linear layer that one kernel can compute together with it."""

    NONE = "none"
    NORM = "norm"  # the RMSNorm of the input
    ADD = "add"  # adding the result to the residual
    GATED_ADD = "gated_add"  # silu(gate) * up of the input, and adding the result to the residual


class FusedProduct(Protocol):
    """A kernel that computes a product together with its neighbours."""

    def __call__(
        self, x: Tensor, norm: RMSNorm | None = None, gated: bool = False, add_to: Tensor | None = None
    ) -> Tensor:
        """The product of norm(x), or of silu(gate) * up where `gated` and x is [rows, 2 * in]. The result is added to
        `add_to` in place, if given."""


class Linear:
    """x [rows, in] -> [rows, out]."""

    __slots__ = ("_default", "_fused", "_products", "fusion", "method", "shape")

    def __init__(self, method: LinearMethod, shape: tuple[int, int], fusion: Fusion = Fusion.NONE) -> None:
        """shape: input and output features."""
        self.method, self.shape, self.fusion = method, shape, fusion
        self._products: Mapping[int, Product] = {}
        self._fused: Mapping[int, FusedProduct] = {}
        self._default: Product = method.apply

    def prepare(self) -> None:
        """Call once the weights are loaded."""
        self.method.prepare()

    def use(
        self,
        products: Mapping[int, Product],
        default: Product | None = None,
        fused: Mapping[int, FusedProduct] | None = None,
    ) -> None:
        """Installs kernels by number of rows. `default` computes all other numbers; None keeps the current one."""
        self._products, self._fused = products, fused or {}
        if default is not None:
            self._default = default

    def wrap(self, wrapper: Callable[[Product], Product]) -> None:
        """Replaces each product by `wrapper` of it. Fused kernels are no longer used: they would not be wrapped."""
        self._fused = {}
        self._products = {rows: wrapper(product) for rows, product in self._products.items()}
        self._default = wrapper(self._default)

    def disable_fusion(self) -> None:
        """No kernel computes this layer together with its neighbours. Call before kernels are picked."""
        self.fusion = Fusion.NONE

    def make_batch_invariant(self) -> None:
        """From now on the result of a row depends on that row alone."""
        self.use({}, in_groups(self.method.apply))

    def fused(self, rows: int) -> FusedProduct | None:
        return self._fused.get(rows)

    def __call__(self, x: Tensor) -> Tensor:
        return self._products.get(x.shape[0], self._default)(x)

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        """residual + self(x). May write to `residual`."""
        return residual.add_(self(x))


class LinearLayers:
    """Makes the linear layers of one model, each with the method that config.json asks for."""

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
    ) -> Linear:
        """One product of several checkpoint matrices that share their input: `outputs` names them in order."""
        spec = LinearSpec(outputs=outputs, in_features=in_features, bias=bias, arrange=arrange or {})
        method = pick_linear_method(self._config, spec)(self.table, spec)
        return Linear(method, (in_features, spec.out_features), fusion)


def dense_linear(weight: Tensor, bias: Tensor | None = None, fusion: Fusion = Fusion.NONE) -> Linear:
    """Of a weight [out, in] that is there already: the embedding as output matrix, for one."""
    return Linear(UnquantizedLinear(weight, bias), (weight.shape[1], weight.shape[0]), fusion)


def in_groups(product: Product) -> Product:
    """The same product, computed GROUP rows at a time, so that every call has one shape."""

    def grouped(x: Tensor) -> Tensor:
        rows = x.shape[0]
        padded = F.pad(x, (0, 0, 0, max(-(-rows // GROUP), 1) * GROUP - rows))
        return torch.cat([product(group) for group in padded.view(-1, GROUP, x.shape[1])])[:rows]

    return grouped
