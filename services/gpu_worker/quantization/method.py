"""The interfaces of a weight. Whatever multiplies, tunes, times, moves or fills one asks these and reads no tensor."""

from collections.abc import Sequence
from enum import Enum
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from blockyard.kernels.layers.rounding import InputRounding, RoundedRows
from blockyard.services.gpu_worker.loading.linear_spec import ExpertSpec, LinearSpec
from blockyard.services.gpu_worker.loading.weights import WeightTable


class Fusion(Enum):
    """The operations before and after a linear layer that one kernel can compute together with it."""

    NONE = "none"
    NORM = "norm"  # RMSNorm of the input
    ADD = "add"  # addition of the result to the residual
    GATED_ADD = "gated_add"  # silu(gate) * up of the input, and addition of the result to the residual


class LinearMethod(Protocol):
    """The weight of one linear layer: its layout and its product."""

    @property
    def form(self) -> str | None:
        """The layout that kernels read, a key of `linear_tuning.products.FORMS`, and behind a blank what else kernels
        are compiled for. None: `apply` alone multiplies."""

    @property
    def fusions(self) -> frozenset[Fusion]:
        """Operations that kernels of this form can fuse with the product. A layer that asks for more gets none."""

    @property
    def shape(self) -> tuple[int, int]:
        """Numbers of input and output features, of this rank."""

    @property
    def size_bytes(self) -> int:
        """Bytes that a product reads."""

    def prepare(self) -> None:
        """Repacks the weight for the device. Called once, after the weights are loaded."""

    def apply(self, x: Tensor) -> Tensor:
        """Multiplies and adds the bias: x [rows, in] -> [rows, out]."""

    def tensors(self) -> dict[str, Tensor]:
        """Returns the tensors of the weight by name: --cpu-offload-gb keeps them in host memory, sleep moves them."""

    def replace(self, name: str, tensor: Tensor) -> None:
        """Makes products read `tensor` instead of `tensors()[name]`. Not after `prepare`."""


@runtime_checkable
class RoundedInputs(Protocol):
    """A `LinearMethod` that rounds its inputs to 8 bits: the kernel that makes them may write the codes."""

    @property
    def input_rounding(self) -> InputRounding | None:
        """How. None: it takes only rows in the dtype of the model."""

    def apply_rounded(self, rows: RoundedRows) -> Tensor:
        """As `LinearMethod.apply`, of rows that are rounded."""


class ExpertLinear(LinearMethod, Protocol):
    """The weight of one expert."""

    def contents(self) -> list[Tensor]:
        """Returns the weight as tensors that `write` of another expert of the same product takes, on any rank."""

    def write(self, contents: Sequence[Tensor]) -> None:
        """Replaces the weight by the `contents` of another expert, where products find it. Also after `prepare`."""


class ExpertMethod(Protocol):
    """The weight of one product of all experts of a layer: a `LinearMethod` with a leading dimension of experts."""

    @property
    def shape(self) -> tuple[int, int]:
        """Numbers of input and output features, of this rank."""

    @property
    def dtype(self) -> torch.dtype:
        """Of the model."""

    @property
    def size_bytes(self) -> int: ...

    def linear(self, expert: int) -> ExpertLinear:
        """Returns the weight of one expert, in the memory of all: for devices that multiply expert by expert, and to
        move it."""

    def numbers(self) -> list[Tensor]:
        """Returns the tensors with one number for all experts of the model's layer, of which the largest counts."""

    def tensors(self) -> dict[str, Tensor]:
        """Returns the tensors of the weight by name, as `LinearMethod.tensors` does."""


class Format(Protocol):
    """How a checkpoint stores weights. Each method allocates memory in the table and gives the checkpoint's tensors
    places there, each with the share of the table's rank, and how dummy weights fill it."""

    def linear(self, table: WeightTable, spec: LinearSpec) -> LinearMethod: ...

    def experts(self, table: WeightTable, spec: ExpertSpec) -> ExpertMethod: ...

    def plain(self, table: WeightTable, spec: LinearSpec, dtype: torch.dtype) -> Tensor:
        """A matrix [out, in] that is needed as numbers: it is looked up, or other code than a linear layer reads it."""
