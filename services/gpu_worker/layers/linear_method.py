"""Storage and multiplication of the weight of a linear layer. Each quantization format implements `LinearMethod`.

`UnquantizedLinear` picks the fastest layout for the shape of the weight and the number of rows. Microseconds on the CPU
with one thread (AMD EPYC, AVX-512, torch 2.13), with weights that are not in the L2 cache:

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

In float32 the packed weight is used for two or more rows. For one row a second copy is used if the matrix is small, so
that the copy costs little memory: transposed, or unchanged if there are more input than output features. In bfloat16
the packed weight is always the fastest.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from blockyard.services.gpu_worker.loading.weights import Arrange, WeightTable

SECOND_COPY_ELEMENTS = 1_500_000  # above it, one row is limited by memory bandwidth in any layout
TINY_ELEMENTS = 65_536  # up to it, the transposed copy is as fast as the packed weight
TINY_ROWS = 16

_dnn: Any = torch.ops.mkldnn


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearSpec:
    """The arguments of a linear layer, given by the model family."""

    outputs: Mapping[str, int]  # checkpoint names of the matrices in this layer -> output features, in order
    in_features: int
    bias: bool = False
    arrange: Mapping[str, Arrange] = field(default_factory=dict)  # reorders the loaded rows of a matrix
    transposed: bool = False  # checkpoints have matrices as [in, out]
    stored_rows: Mapping[str, int] = field(default_factory=dict)  # of matrices of which `arrange` makes more rows

    @property
    def out_features(self) -> int:
        return sum(self.outputs.values())


class DenseWeight(NamedTuple):
    """The weight as the kernels of `linear_tuning/` read it."""

    weight: Tensor  # [out, in], in the dtype of the activations
    bias: Tensor | None


class LinearMethod(Protocol):
    """The weight of one linear layer: its tensors in the checkpoint, its layout and its product."""

    def prepare(self) -> None:
        """Repacks the weight for the device. Called once, after the weights are loaded."""

    def apply(self, x: Tensor) -> Tensor:
        """Multiplies and adds the bias: x [rows, in] -> [rows, out]."""

    def dense_weight(self) -> DenseWeight | None:
        """Returns the weight for tuned kernels, or None if they cannot read it."""

    def tensors(self) -> dict[str, Tensor]:
        """Returns the tensors that --cpu-offload-gb may keep in host memory, by name. Called before `prepare`."""

    def replace(self, name: str, tensor: Tensor) -> None:
        """Makes `apply` and `dense_weight` read `tensor` instead of `tensors()[name]`."""


CreateLinearMethod = Callable[[WeightTable, LinearSpec], LinearMethod]


class UnquantizedLinear:
    """A weight in the dtype of the model, without quantization."""

    __slots__ = ("_bias", "_packed", "_second_rows", "_transposed", "_weight")

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self._weight: Tensor | None = weight  # [out, in]; None if `prepare` has replaced it by copies
        self._bias = bias
        self._transposed: Tensor | None = None
        self._second_rows = 0
        self._packed: Tensor | None = None

    @classmethod
    def create(cls, table: WeightTable, spec: LinearSpec) -> "UnquantizedLinear":
        return cls(
            *table.packed(spec.outputs, spec.in_features, spec.bias, spec.arrange, spec.transposed, spec.stored_rows)
        )

    def prepare(self) -> None:
        weight = self._weight
        if weight is None or not can_pack(weight):
            return
        out_features, in_features = weight.shape
        transposed, self._second_rows = second_copy(in_features, out_features, weight.dtype)
        self._packed = _dnn._reorder_linear_weight(weight)
        if transposed:
            self._transposed = weight.t().contiguous()
        if transposed or not self._second_rows:
            self._weight = None

    def apply(self, x: Tensor) -> Tensor:
        if self._packed is not None and x.shape[0] > self._second_rows:
            out: Tensor = _dnn._linear_pointwise(x, self._packed, self._bias, "none", [], "")
            return out
        if self._transposed is None:
            assert self._weight is not None
            return F.linear(x, self._weight, self._bias)
        if self._bias is None:
            return torch.mm(x, self._transposed)
        return torch.addmm(self._bias, x, self._transposed)

    def dense_weight(self) -> DenseWeight | None:
        return None if self._weight is None else DenseWeight(self._weight, self._bias)

    def tensors(self) -> dict[str, Tensor]:
        return {} if self._weight is None else {"weight": self._weight}

    def replace(self, name: str, tensor: Tensor) -> None:
        assert name == "weight"
        self._weight = tensor


def second_copy(in_features: int, out_features: int, dtype: torch.dtype) -> tuple[bool, int]:
    """Decides which second copy of the weight the CPU uses for few rows, beside the packed one.

    Returns whether that copy is transposed, and the largest number of rows that it is used for; 0: no second copy.
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


def _unquantized(quantization: Mapping[str, Any], spec: LinearSpec) -> CreateLinearMethod:
    return UnquantizedLinear.create


# `quant_method` in quantization_config of config.json -> function that returns `create` of the method for a layer
LINEAR_METHODS: dict[str | None, Callable[[Mapping[str, Any], LinearSpec], CreateLinearMethod]] = {None: _unquantized}


def pick_linear_method(config: Mapping[str, Any], spec: LinearSpec) -> CreateLinearMethod:
    """Returns `create` of the method for one layer. An unknown format is unquantized: its weights then fail to load."""
    found = config.get("quantization_config")
    quantization = found if isinstance(found, dict) else {}
    return LINEAR_METHODS.get(quantization.get("quant_method"), _unquantized)(quantization, spec)
