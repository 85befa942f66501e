"""A linear layer: it calls the kernel installed for the number of rows, or else its `LinearMethod`.

**Batch invariance.** On the CPU, torch takes another code path for another number of rows, so the result of a row
depends on the batch. In float32 on one machine, the bits of a row changed in F.linear for up to 5 or 13 rows, in mm for
1 row and from 256 rows, and in the packed layout for 1 row. Only calls with equal shape and memory alignment give equal
bits. `make_batch_invariant` therefore copies the rows, pads them to a multiple of GROUP and multiplies GROUP rows at a
time. Measured in all three layouts, on one thread and on two, the bits of a row then did not depend on its place in the
group. Without the copy they did, because the alignment differed.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from blockyard.kernels.layers.rms_norm import RMSNorm
from blockyard.kernels.layers.rounding import InputRounding, RoundedRows
from blockyard.services.gpu_worker.loading.linear_spec import ExpertSpec, LinearSpec, MatrixPart, Rows, Split, part
from blockyard.services.gpu_worker.loading.weights import WeightTable
from blockyard.services.gpu_worker.quantization.dense import UnquantizedLinear
from blockyard.services.gpu_worker.quantization.method import ExpertMethod, Fusion, LinearMethod, RoundedInputs
from blockyard.services.gpu_worker.quantization.registry import find_format

GROUP = 16  # rows of each batch-invariant product
OF_SUMS = (Fusion.ADD, Fusion.GATED_ADD)

Product = Callable[[Tensor], Tensor]  # [rows, in] -> [rows, out]
RoundedProduct = Callable[[RoundedRows], Tensor]  # the same of rows that are rounded
AppendColumns = Callable[[Tensor, Tensor], Tensor]  # [rows, out] and [rows, in] -> [rows, out and more]
AddTo = Callable[[Tensor], Tensor]  # see `AdaptedRows.start`


class FusedProduct(Protocol):
    """A kernel that computes a matrix product together with the operations of a `Fusion`."""

    def __call__(
        self, x: Tensor, norm: RMSNorm | None = None, gated: bool = False, add_to: Tensor | None = None
    ) -> Tensor:
        """Multiplies norm(x), or silu(gate) * up if `gated`; then x is [rows, 2 * in]. Adds the result to `add_to` in
        place, if given."""


@dataclass(frozen=True, slots=True)
class OrderedProduct:
    """A product of a kernel that lets the next one begin only when all before it have ended, or when it has itself.

    The next kernel may therefore read the product's inputs at once.
    """

    product: Product

    def __call__(self, x: Tensor) -> Tensor:
        return self.product(x)


class AdaptedRows(Protocol):
    """Adds the products of adapters to rows of a layer's product."""

    @property
    def is_active(self) -> bool:
        """Whether a row of this step has an adapter."""

    def start(self, x: Tensor, *, is_ordered: bool = False) -> AddTo:
        """Begins the products of x [rows, in]; call it before the layer's own product, whose weights load meanwhile.
        is_ordered: that is an `OrderedProduct`.

        Returns what adds them to out [rows, out], in place, and returns out; of a head, with further columns behind it
        where adapters add tokens.
        """

    def fused(self, product: FusedProduct) -> FusedProduct | None:
        """Returns this product of the layer with what adapters add to it. None: they need the layer's own input."""

    def only(self, rows: Tensor) -> AbstractContextManager[None]:
        """Meanwhile products are of these rows of the step alone: rows [n] int64."""


class Linear:
    """A matrix product with optional bias: x [rows, in] -> [rows, out]."""

    __slots__ = (
        "_adapted",
        "_append",
        "_default",
        "_fused",
        "_join",
        "_products",
        "_rounded",
        "_rounded_default",
        "_wrappers",
        "fusion",
        "is_batch_invariant",
        "is_partial",
        "method",
        "rounding",
        "spec",
    )

    def __init__(
        self, method: LinearMethod, spec: LinearSpec, fusion: Fusion = Fusion.NONE, *, is_partial: bool = False
    ) -> None:
        """fusion: see `ask_fusion`. is_partial: the product of a rank is one of several that are added."""
        self.method, self.spec, self.is_partial = method, spec, is_partial
        self.is_batch_invariant = False
        self._products: Mapping[int, Product] = {}
        self._fused: Mapping[int, FusedProduct] = {}
        self._wrappers: list[Callable[[Product], Product]] = []
        self._adapted: AdaptedRows | None = None
        self._join: Product | None = None
        self._append: AppendColumns | None = None
        self._default: Product = method.apply
        self.rounding: InputRounding | None = None  # of inputs that `of_rounded` takes; None: it takes none
        self._rounded: Mapping[int, RoundedProduct] = {}
        self._rounded_default: RoundedProduct | None = None
        self.fusion = Fusion.NONE
        self.ask_fusion(fusion)

    @property
    def shape(self) -> tuple[int, int]:
        """Numbers of input and output features, of this rank."""
        return self.method.shape

    def ask_fusion(self, fusion: Fusion) -> None:
        """Lets kernels compute the product together with the steps around it. Call it before kernels are picked.

        Only what the method grants, and no sum with a partial product: it has to be added to the others first.
        """
        granted = fusion in self.method.fusions and not (self.is_partial and fusion in OF_SUMS)
        self.fusion = fusion if granted and self._is_plain else Fusion.NONE

    def disable_fusion(self) -> None:
        """Forbids fused kernels for this layer. Call it before kernels are picked."""
        self.fusion = Fusion.NONE

    def prepare(self) -> None:
        """Repacks the weight. Called once, after the weights are loaded."""
        self.method.prepare()
        if isinstance(self.method, RoundedInputs) and self._is_plain:
            self.rounding, self._rounded_default = self.method.input_rounding, self.method.apply_rounded

    def use(
        self,
        products: Mapping[int, Product],
        default: Product | None = None,
        fused: Mapping[int, FusedProduct] | None = None,
        rounded: Mapping[int, RoundedProduct] | None = None,
    ) -> None:
        """Installs kernels by number of rows. `default` is used for all other numbers; None keeps the current one.

        rounded: as `products`, for rows that are rounded; only for a method with a rounding.
        """
        self._products = {rows: self._wrapped(product) for rows, product in products.items()}
        self._fused = (fused or {}) if self._is_plain else {}
        self._rounded = rounded or {}
        if default is not None:
            self._default = self._wrapped(default)

    def _wrapped(self, product: Product) -> Product:
        for wrapper in self._wrappers:
            product = wrapper(product)
        return product

    def wrap(self, wrapper: Callable[[Product], Product]) -> None:
        """Replaces each product by `wrapper(product)`, also of kernels that are installed later.

        There are no fused kernels from here on and no rounded inputs, because `wrapper` cannot wrap them.
        """
        self.fusion, self._fused, self.rounding = Fusion.NONE, {}, None
        self._products = {rows: wrapper(product) for rows, product in self._products.items()}
        self._default = wrapper(self._default)
        self._wrappers.append(wrapper)

    def join(self, join: Product) -> None:
        """Makes each output `join` of the product [rows, own out], to which adapters have added theirs.

        There are no fused kernels from here on and no rounded inputs.
        """
        self.fusion, self._fused, self.rounding, self._join = Fusion.NONE, {}, None, join

    def append(self, append: AppendColumns) -> None:
        """Makes each output `append` of the joined product and the input, in steps in which a row has an adapter."""
        self._append = append

    @property
    def _is_plain(self) -> bool:
        """Whether kernels may take the place of the product."""
        return not self._wrappers and self._join is None

    def make_batch_invariant(self, product: Product | None = None, rounded: RoundedProduct | None = None) -> None:
        """Makes the result of each row independent of the other rows, to the last bit.

        product: one that does so. None: that of the `LinearMethod`, in groups of rows. rounded: the same product, of
        rows that are rounded.
        """
        self._rounded_default = rounded
        self.rounding = None if rounded is None else self.rounding
        self.use({}, in_groups(self.method.apply) if product is None else product)
        self.is_batch_invariant = True

    def adapt(self, adapted: AdaptedRows) -> None:
        """Adds to each product, in steps in which it is active. Other steps run the kernels that they ran without it.

        In an active step inputs are not rounded by the operation before: an adapter multiplies the layer's own input.
        """
        self._adapted = adapted

    def only(self, rows: Tensor) -> AbstractContextManager[None]:
        """Meanwhile products are of these rows of the step alone: rows [n] int64."""
        return nullcontext() if self._adapted is None else self._adapted.only(rows)

    @property
    def is_adapted(self) -> bool:
        """Whether a row of this step has an adapter."""
        return self._adapted is not None and self._adapted.is_active

    def fused(self, rows: int) -> FusedProduct | None:
        product = self._fused.get(rows)
        if product is None or self._adapted is None or not self._adapted.is_active:
            return product
        return self._adapted.fused(product)

    @contextmanager
    def only_kernels(
        self, fused: Mapping[int, FusedProduct], products: Mapping[int, Product] | None = None
    ) -> Iterator[None]:
        """Meanwhile these are the fused kernels by number of rows, if the layer asks for some, and these the others;
        None: those there are. For launches that are recorded."""
        before = self._fused, self._products
        self._fused = {} if self.fusion is Fusion.NONE else fused
        self._products = self._products if products is None else products
        try:
            yield
        finally:
            self._fused, self._products = before

    @property
    def step_rounding(self) -> InputRounding | None:
        """As `rounding`, in this step."""
        return None if self.is_adapted else self.rounding

    def __call__(self, x: Tensor) -> Tensor:
        product = self._products.get(x.shape[0], self._default)
        if self._adapted is None or not self._adapted.is_active:
            return product(x) if self._join is None else self._join(product(x))
        add_to = self._adapted.start(x, is_ordered=isinstance(product, OrderedProduct))
        out = add_to(product(x))
        if self._join is not None:
            out = self._join(out)
        return out if self._append is None else self._append(out, x)

    def of_rounded(self, rows: RoundedRows) -> Tensor:
        product = self._rounded.get(rows.codes.shape[0], self._rounded_default)
        assert product is not None, "this layer takes no rounded rows"
        return product(rows)


class LinearLayers:
    """Makes what multiplies in one model. Weights are stored in the format of config.json."""

    def __init__(self, table: WeightTable, config: Mapping[str, Any]) -> None:
        """Raises ConfigError for an unknown format."""
        self.table, self._format = table, find_format(config, table)

    def make(
        self,
        parts: Sequence[MatrixPart],
        inputs: int | Rows,
        *,
        split: Split = Split.NONE,
        bias: bool = False,
        fusion: Fusion = Fusion.NONE,
        transposed: bool = False,
        weighted: bool = False,
    ) -> Linear:
        """Makes one layer from checkpoint matrices with the same input, in the order of their output features.

        inputs: features, or how they are divided. transposed: checkpoints have [in, out], as layers that they call
        Conv1D. weighted: see `LinearSpec`.
        """
        spec = make_spec(parts, inputs, split=split, bias=bias, transposed=transposed, weighted=weighted)
        is_partial = split is Split.INPUTS and self.table.shard.size > 1
        return Linear(self._format.linear(self.table, spec), spec, fusion, is_partial=is_partial)

    def experts(self, spec: ExpertSpec) -> ExpertMethod:
        """Makes one product of all experts of a layer."""
        return self._format.experts(self.table, spec)

    def plain(
        self, one: MatrixPart, inputs: int, *, split: Split = Split.NONE, dtype: torch.dtype | None = None
    ) -> Tensor:
        """Makes a matrix [out, in] that is needed as numbers, however it is stored. dtype: None for the model's."""
        return self._format.plain(self.table, make_spec([one], inputs, split=split), dtype or self.table.dtype)


def make_spec(parts: Sequence[MatrixPart], inputs: int | Rows, **others: Any) -> LinearSpec:
    """inputs: features, which are divided one by one, or how they are divided."""
    return LinearSpec(parts=tuple(parts), inputs=inputs if isinstance(inputs, Rows) else Rows(inputs, inputs), **others)


def dense_linear(
    weight: Tensor,
    bias: Tensor | None = None,
    fusion: Fusion = Fusion.NONE,
    *,
    name: str = "",
    split: Split = Split.NONE,
    outputs: int | None = None,
) -> Linear:
    """Makes a linear layer from a tensor [out, in], for example a tied embedding. name: of it in a checkpoint.

    outputs: of all ranks; None: of the tensor.
    """
    out_features, in_features = weight.shape
    spec = make_spec([part(name, outputs or out_features)], in_features, bias=bias is not None, split=split)
    return Linear(UnquantizedLinear(weight, bias), spec, fusion)


def in_groups(product: Product) -> Product:
    """Wraps a product so that it computes GROUP rows at a time, and every call has the same shape."""

    def grouped(x: Tensor) -> Tensor:
        rows = x.shape[0]
        padded = F.pad(x, (0, 0, 0, max(-(-rows // GROUP), 1) * GROUP - rows))
        return torch.cat([product(group) for group in padded.view(-1, GROUP, x.shape[1])])[:rows]

    return grouped
