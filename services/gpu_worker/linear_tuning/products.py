"""Makes the callables that compute linear layers by a given kernel config. Imports Triton: for GPUs only.

Kernels read one form of weights: `FORMS` has what makes them for each. A layer of another form has the product of its
method alone.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from blockyard.kernels.layers.linear_skinny import linear_skinny
from blockyard.kernels.layers.linear_stream_k import ALIGNMENT, Tiling, Workspace, linear_stream_k
from blockyard.kernels.layers.rms_norm import RMSNorm
from blockyard.kernels.programmatic_launch import supports_pdl
from blockyard.services.gpu_worker.layers.linear import (
    FusedProduct,
    Linear,
    OrderedProduct,
    Product,
    RoundedProduct,
    dense_linear,
)
from blockyard.services.gpu_worker.linear_tuning import kernel_configs
from blockyard.services.gpu_worker.linear_tuning.block_products import BlockProducts
from blockyard.services.gpu_worker.linear_tuning.kernel_configs import CUBLAS, KernelConfig, LinearShape
from blockyard.services.gpu_worker.linear_tuning.rounded_input_products import RoundedInputProducts
from blockyard.services.gpu_worker.quantization.dense import FORM, UnquantizedLinear
from blockyard.services.gpu_worker.quantization.kept.form import BLOCKS
from blockyard.services.gpu_worker.quantization.method import Fusion, LinearMethod, RoundedInputs

WORKSPACE_ELEMENTS = 6 << 20  # one tile of 128 x 256 for each of 192 programs
WORKSPACE_PROGRAMS = 1 << 14
EXAMPLE_FEATURES = 256  # of `FormProducts.example`, at least


class FormProducts(Protocol):
    """The kernels of one form of weights, for one GPU and one stream."""

    def candidates(self, layer: LinearShape, rows: int, group: Sequence[Linear]) -> list[KernelConfig]:
        """The kernel configs to measure against the method's own product. group: the layers of this shape."""

    def batch_invariant(self, layer: LinearShape) -> KernelConfig:
        """The kernel config for any number of rows under --batch-invariant. CUBLAS: the method's product, in groups."""

    def of(self, config: KernelConfig, method: LinearMethod) -> Product:
        """config: not CUBLAS."""

    def fused(self, config: KernelConfig, method: LinearMethod) -> FusedProduct:
        """config: of a kernel that fuses."""

    def example(self, config: KernelConfig, bias: bool, fusion: Fusion, like: LinearMethod) -> Linear:
        """A small layer of the same form as `like`, which a kernel is compiled for."""


def kernels_of(form: str | None) -> str:
    """The key in `FORMS` of a `LinearMethod.form`."""
    return (form or "").partition(" ")[0]


@runtime_checkable
class RoundedFormProducts(Protocol):
    """Kernels of a form whose inputs may come rounded, see `Linear.rounding`."""

    def rounded(self, config: KernelConfig, method: LinearMethod) -> RoundedProduct: ...


class Products:
    """Makes the products of one GPU and one stream."""

    def __init__(self, device: torch.device, dtype: torch.dtype, processors: int) -> None:
        """dtype: of the activations. processors: of the GPU."""
        self.forms: Mapping[str, FormProducts] = {form: make(device, dtype, processors) for form, make in FORMS.items()}

    def knows(self, linear: Linear) -> bool:
        """Whether there are kernels for the form of the weight, beside the method's."""
        method = linear.method
        if kernels_of(method.form) not in self.forms:
            return False
        needs_rounding = isinstance(self._of(linear), RoundedFormProducts)
        return not needs_rounding or (isinstance(method, RoundedInputs) and method.input_rounding is not None)

    def of(self, config: KernelConfig, linear: Linear) -> Product:
        return linear.method.apply if config == CUBLAS else self._of(linear).of(config, linear.method)

    def fused(self, config: KernelConfig, linear: Linear) -> FusedProduct:
        return self._of(linear).fused(config, linear.method)

    def rounded(self, config: KernelConfig, linear: Linear) -> RoundedProduct | None:
        """The product as `of` makes it, of rows that are rounded. None: the layer takes none."""
        if linear.rounding is None:
            return None
        own = self._of(linear)
        return own.rounded(config, linear.method) if isinstance(own, RoundedFormProducts) else None

    def _of(self, linear: Linear) -> FormProducts:
        return self.forms[kernels_of(linear.method.form)]


class DenseProducts:
    """Kernels of weights in the dtype of the activations. They share the workspace of the stream-K kernel."""

    def __init__(self, device: torch.device, dtype: torch.dtype, processors: int) -> None:
        self._device, self._dtype, self._processors = device, dtype, processors
        self._pdl = supports_pdl(device)
        self._workspace = Workspace(WORKSPACE_ELEMENTS, WORKSPACE_PROGRAMS, device)

    def candidates(self, layer: LinearShape, rows: int, group: Sequence[Linear]) -> list[KernelConfig]:
        if any(_dense(linear.method).weight.data_ptr() % ALIGNMENT for linear in group):
            return []
        return kernel_configs.candidates(layer, rows, self._dtype.itemsize, self._processors)

    def batch_invariant(self, layer: LinearShape) -> KernelConfig:
        return kernel_configs.batch_invariant_config(layer, self._dtype.itemsize, self._processors)

    def of(self, config: KernelConfig, method: LinearMethod) -> Product:
        if config.kernel == "skinny":
            return self.fused(config, method)
        weight, bias = _dense(method).weight, _dense(method).bias
        workspace, split, tiling = self._workspace, config.split, self._tiling(config)
        return OrderedProduct(lambda x: linear_stream_k(x, weight, bias, tiling, workspace, split))

    def _tiling(self, config: KernelConfig) -> Tiling:
        pdl = self._pdl
        return Tiling(config.out_tile, config.row_tile, config.in_tile, config.stages, config.warps, pdl, config.fetch)

    def fused(self, config: KernelConfig, method: LinearMethod) -> FusedProduct:
        """The skinny GEMM, which can fuse the norm, the gate and the residual addition. config: of that kernel."""
        weight, bias, pdl = _dense(method).weight, _dense(method).bias, self._pdl
        tiles = {"out_tile": config.out_tile, "tile": config.in_tile, "warps": config.warps, "early": config.stages}

        def product(
            x: Tensor, norm: RMSNorm | None = None, gated: bool = False, add_to: Tensor | None = None
        ) -> Tensor:
            return linear_skinny(x, weight, bias, pdl=pdl, norm=norm, gated=gated, add_to=add_to, **tiles)

        return product

    def example(self, config: KernelConfig, bias: bool, fusion: Fusion, like: LinearMethod) -> Linear:
        out_features = in_features = EXAMPLE_FEATURES
        if config.kernel == "skinny":
            in_features = max(config.in_tile * config.stages, EXAMPLE_FEATURES)
        weight = torch.zeros(out_features, in_features, dtype=self._dtype, device=self._device)
        vector = torch.zeros(out_features, dtype=self._dtype, device=self._device) if bias else None
        return dense_linear(weight, vector, fusion)


def _dense(method: LinearMethod) -> UnquantizedLinear:
    assert isinstance(method, UnquantizedLinear)
    return method


# form -> what makes its kernels for a device, the dtype of the activations and the processors of the GPU
FORMS: Mapping[str, Callable[[torch.device, torch.dtype, int], FormProducts]] = {
    FORM: DenseProducts,
    BLOCKS: BlockProducts,
    **dict.fromkeys(("Fp8W8A8", "Int8W8A8"), RoundedInputProducts),
}
