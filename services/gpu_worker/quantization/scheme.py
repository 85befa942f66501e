"""How a format stores one matrix: the interface that each file in `formats/` implements."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from blockyard.services.gpu_worker.loading.tensor_groups import StoredTensor
from blockyard.services.gpu_worker.loading.tensor_headers import TensorHeader, TensorHeaders
from blockyard.services.gpu_worker.quantization.kept.form import KeptForm
from blockyard.services.gpu_worker.quantization.names import NamesOfFile

WEIGHT = "weight"

# takes the tensors of one matrix by key, without optional tensors that the checkpoint lacks; returns the form's tensors
# by name, rows as stored
ToKept = Callable[[Mapping[str, Tensor]], dict[str, Tensor]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Matrix:
    """A matrix [outputs, inputs] that a model wants from a checkpoint, whole: no rank's share."""

    name: str
    outputs: int
    inputs: int
    experts: int | None = None  # so many are stacked: each tensor has a leading dimension of them
    suffix: str = ".weight"  # of the tensor's name in a checkpoint without quantization
    transposed: bool = False  # that tensor is [inputs, outputs]
    plain: bool = False  # wanted as numbers: an embedding, a router in float32, kv_b_proj
    is_expert: bool = False  # of a mixture's routed experts, or of all if they are stacked
    headers: TensorHeaders = field(default_factory=TensorHeaders, compare=False)  # of the checkpoint

    @property
    def stored_shape(self) -> tuple[int, int]:
        """Of its tensor in a checkpoint without quantization."""
        return (self.inputs, self.outputs) if self.transposed else (self.outputs, self.inputs)

    def header(self, key: str) -> TensorHeader | None:
        """None: the checkpoint has no such tensor, or its headers are not known."""
        return self.headers.find(self.tensor(key))

    def float_dtype(self, key: str, usual: torch.dtype) -> torch.dtype:
        """The dtype of 16 or 32 bits that holds a tensor's numbers as the file has them. usual: of dummy weights."""
        header = self.header(key)
        dtype = usual if header is None else header.dtype
        return dtype if dtype in (torch.float16, torch.bfloat16) else torch.float32

    def tensor(self, key: str) -> str:
        """The name of a tensor of this matrix: "a.weight_scale", of stacked experts "a_scale" as of "a" itself."""
        if self.suffix == ".weight":
            return f"{self.name}.{key}"
        short = key.removeprefix(WEIGHT)
        return f"{self.name}{self.suffix}{short if not short or short.startswith('_') else f'_{short}'}"

    def stored(
        self,
        key: str,
        shape: tuple[int, ...],
        dtypes: frozenset[torch.dtype],
        *,
        optional: bool = False,
        other_shapes: tuple[tuple[int, ...], ...] = (),
        other_keys: tuple[str, ...] = (),
    ) -> StoredTensor:
        """A tensor of this matrix. shape, other_shapes: of one expert. other_keys: that its name may have instead."""
        lead = () if self.experts is None else (self.experts,)
        return StoredTensor(
            name=self.tensor(key),
            shape=(*lead, *shape),
            dtypes=dtypes,
            optional=optional,
            other_shapes=tuple((*lead, *one) for one in other_shapes),
            other_names=tuple(map(self.tensor, other_keys)),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredMatrix:
    """How a checkpoint stores a matrix, and the form that it becomes."""

    form: KeptForm
    tensors: Mapping[str, StoredTensor]  # by key
    to_kept: ToKept  # of stacked experts it is called for each expert
    unused: tuple[str, ...] = ()  # names of tensors that files have without a use, if the model does not know them
    note: str = ""  # a line of the start's report on all matrices with this note
    is_certain: bool = True  # False: the tensors that the checkpoint has say whether the matrix is quantized


class Scheme(Protocol):
    """The meaning of one checkpoint's quantization_config. A file in `formats/` has one Scheme, or several."""

    def stored(self, matrix: Matrix) -> StoredMatrix | None:
        """Whether and how a matrix is quantized. None: it is not. Raises ConfigError for sizes that it cannot have."""

    def patterns(self) -> Sequence[NamesOfFile]:
        """Returns the file's lists of names. The start's report shows the names that mean no matrix."""
