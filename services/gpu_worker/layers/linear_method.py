"""How the weight of a linear layer is stored and multiplied. A quantization format is one implementation.

`UnquantizedLinear` picks the layout that is fastest for the shape and the rows of the step. Measured on CPU with one
thread (AMD EPYC, AVX-512, torch 2.13), microseconds, weights out of L2:

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

In float32 the packed weight is used from two rows on. One row uses a second copy where the matrix is small enough for
the copy to cost little memory: transposed, or as stored where the matrix is wider than high. In bfloat16 packed is
fastest everywhere.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from blockyard.services.gpu_worker.loading.weights import Arrange, WeightTable

SECOND_COPY_ELEMENTS = 1_500_000  # above it one row is bound by memory in any layout
TINY_ELEMENTS = 65_536  # up to here the transposed copy keeps up with packed
TINY_ROWS = 16

_dnn: Any = torch.ops.mkldnn


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearSpec:
    """What a model family says about a linear layer."""

    outputs: Mapping[str, int]  # checkpoint names of the matrices packed into this layer -> output features, in order
    in_features: int
    bias: bool = False
    arrange: Mapping[str, Arrange] = field(default_factory=dict)  # how loaded rows of a matrix are reordered

    @property
    def out_features(self) -> int:
        return sum(self.outputs.values())


class DenseWeight(NamedTuple):
    """What a kernel of `linear_tuning/` reads."""

    weight: Tensor  # [out, in], in the dtype of the activations
    bias: Tensor | None


class LinearMethod(Protocol):
    """The weight of one linear layer: its places in the checkpoint, its layout and its product."""

    def prepare(self) -> None:
        """Repacks the weight for the device. Called once, when the weights are loaded."""

    def apply(self, x: Tensor) -> Tensor:
        """x [rows, in] -> [rows, out], with the bias."""

    def dense_weight(self) -> DenseWeight | None:
        """The weight that tuned kernels may read; None if this layer is not tuned."""

    def tensors(self) -> dict[str, Tensor]:
        """The tensors that --cpu-offload-gb may keep in host memory, before `prepare`."""

    def replace(self, name: str, tensor: Tensor) -> None:
        """Makes `apply` and `dense_weight` read `tensor` in place of the one `tensors` has under this name."""


CreateLinearMethod = Callable[[WeightTable, LinearSpec], LinearMethod]


class UnquantizedLinear:
    """A weight in the dtype of the model."""

    __slots__ = ("_bias", "_packed", "_second_rows", "_transposed", "_weight")

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self._weight: Tensor | None = weight  # [out, in]; None where prepared copies have replaced it
        self._bias = bias
        self._transposed: Tensor | None = None
        self._second_rows = 0
        self._packed: Tensor | None = None

    @classmethod
    def create(cls, table: WeightTable, spec: LinearSpec) -> "UnquantizedLinear":
        return cls(*table.packed(spec.outputs, spec.in_features, spec.bias, spec.arrange))

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
    """The copy kept beside the packed one on CPU: whether it is transposed, and up to how many rows it is used.

    0 rows: there is no second copy.
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


# `quant_method` of config.json's quantization_config -> what picks the method of one layer
LINEAR_METHODS: dict[str | None, Callable[[Mapping[str, Any], LinearSpec], CreateLinearMethod]] = {None: _unquantized}


def pick_linear_method(config: Mapping[str, Any], spec: LinearSpec) -> CreateLinearMethod:
    """The method of one layer by config.json. An unknown format is unquantized: its weights then fail to load."""
    found = config.get("quantization_config")
    quantization = found if isinstance(found, dict) else {}
    return LINEAR_METHODS.get(quantization.get("quant_method"), _unquantized)(quantization, spec)
