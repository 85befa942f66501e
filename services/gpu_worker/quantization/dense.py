"""Weights in the dtype of the model, without quantization.

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
that the copy costs little memory: transposed, or unchanged if there are more input than output features. With 5 to 11
output features, as of a router of 6 experts, the bits of a row in mm on a transposed copy depend on the row's place, so
that few outputs have the unchanged one. In bfloat16 the packed weight is always the fastest.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from blockyard.services.gpu_worker.loading.linear_spec import SUFFIXES, Arrange, Cut, ExpertSpec, LinearSpec, MatrixPart
from blockyard.services.gpu_worker.loading.weights import FLOATS, Fill, WeightTable, after
from blockyard.services.gpu_worker.quantization.method import ExpertLinear, ExpertMethod, Fusion, LinearMethod

FORM = "dense"  # see `LinearMethod.form`
SECOND_COPY_ELEMENTS = 1_500_000  # above it, one row is limited by memory bandwidth in any layout
TINY_ELEMENTS = 65_536  # up to it, the transposed copy is as fast as the packed weight
TINY_ROWS = 16
FEW_OUTPUTS = 12  # fewer are not multiplied by a transposed copy

_dnn: Any = torch.ops.mkldnn


class UnquantizedLinear:
    """A weight in the dtype of the model. Implements `LinearMethod`."""

    __slots__ = ("_packed", "_second_rows", "_transposed", "_weight", "bias", "shape", "size_bytes")
    form: str | None = FORM
    fusions = frozenset(Fusion)

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self._weight: Tensor | None = weight  # [out, in]; None if `prepare` has replaced it by copies
        self.bias, self.shape, self.size_bytes = bias, (weight.shape[1], weight.shape[0]), weight.nbytes
        self._transposed: Tensor | None = None
        self._second_rows = 0
        self._packed: Tensor | None = None

    @property
    def weight(self) -> Tensor:
        """[out, in]. It is not repacked on a GPU."""
        assert self._weight is not None
        return self._weight

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
            out: Tensor = _dnn._linear_pointwise(x, self._packed, self.bias, "none", [], "")
            return out
        if self._transposed is None:
            assert self._weight is not None
            return F.linear(x, self._weight, self.bias)
        if self.bias is None:
            return torch.mm(x, self._transposed)
        return torch.addmm(self.bias, x, self._transposed)

    def tensors(self) -> dict[str, Tensor]:
        return {} if self._weight is None else {"weight": self._weight}

    def replace(self, name: str, tensor: Tensor) -> None:
        assert name == "weight"
        self._weight = tensor

    def contents(self) -> list[Tensor]:
        """Implements `ExpertLinear`: the weight [out, in], and the bias if there is one."""
        weight = self._weight
        if weight is None:
            assert self._packed is not None
            weight = self._packed.to_dense() if self._transposed is None else self._transposed.t()
        return [weight] if self.bias is None else [weight, self.bias]

    def write(self, contents: Sequence[Tensor]) -> None:
        """Implements `ExpertLinear`."""
        weight = contents[0]
        if self._weight is not None:
            self._weight.copy_(weight)
        if self._transposed is not None:
            self._transposed.copy_(weight.t())
        if self._packed is not None:
            self._packed = _dnn._reorder_linear_weight(weight.contiguous())
        if self.bias is not None:
            self.bias.copy_(contents[1])


class Float32Linear(UnquantizedLinear):
    """A weight in float32, also in models of another dtype. The kernels of that dtype do not read it."""

    __slots__ = ()
    form = None
    fusions = frozenset()

    def apply(self, x: Tensor) -> Tensor:
        return super().apply(x.float())


class UnquantizedExperts:
    """Weights of experts in the dtype of the model. Implements `ExpertMethod`."""

    __slots__ = ("bias", "weight")

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.weight, self.bias = weight, bias  # [experts, out, in], [experts, out]

    @property
    def shape(self) -> tuple[int, int]:
        return self.weight.shape[2], self.weight.shape[1]

    @property
    def dtype(self) -> torch.dtype:
        return self.weight.dtype

    @property
    def size_bytes(self) -> int:
        return self.weight.nbytes

    def linear(self, expert: int) -> ExpertLinear:
        return UnquantizedLinear(self.weight[expert], None if self.bias is None else self.bias[expert])

    def numbers(self) -> list[Tensor]:
        return []

    def tensors(self) -> dict[str, Tensor]:
        return {"weight": self.weight} | ({} if self.bias is None else {"bias": self.bias})


class UnquantizedFormat:
    """A checkpoint without quantization. Implements `Format`."""

    def linear(self, table: WeightTable, spec: LinearSpec) -> LinearMethod:
        shape = spec.num_outputs(table.shard), spec.num_inputs(table.shard)
        [weight] = table.layer_memory(spec.parts[0].name, (shape, table.dtype))
        bias = table.empty(shape[0]) if spec.bias else None
        place_weights(table, spec, weight)
        if bias is not None:
            place_rows(table, spec, bias)
        return UnquantizedLinear(weight, bias)

    def experts(self, table: WeightTable, spec: ExpertSpec) -> ExpertMethod:
        outputs, inputs = spec.matrix.num_outputs(table.shard), spec.matrix.num_inputs(table.shard)
        [weight] = table.expert_memory(((spec.num_own, outputs, inputs), table.dtype))
        bias = table.empty(spec.num_own, outputs) if spec.matrix.bias else None
        if bias is not None:
            place_rows(table, spec.matrix, bias, spec.suffixes[1], is_stacked=spec.stacked, experts=spec)
        place_weights(table, spec.matrix, weight, spec.suffixes[0], is_stacked=spec.stacked, experts=spec)
        return UnquantizedExperts(weight, bias)

    def plain(self, table: WeightTable, spec: LinearSpec, dtype: torch.dtype) -> Tensor:
        weight = table.empty(spec.num_outputs(table.shard), spec.num_inputs(table.shard), dtype=dtype)
        place_weights(table, spec, weight)
        return weight


def place_weights(
    table: WeightTable,
    spec: LinearSpec,
    weight: Tensor,
    suffix: str = SUFFIXES[0],
    *,
    is_stacked: bool = True,
    stored: frozenset[torch.dtype] = FLOATS,
    fill: Fill | None = None,
    experts: ExpertSpec | None = None,
) -> None:
    """Gives the checkpoint's matrices places in weight [out, in], or [experts, out, in], of this rank.

    is_stacked: see `ExpertSpec`. stored, fill: see `WeightTable.place`. experts: those that the rank has.
    """
    for one, target, arrange in targets(table, spec, weight, -2):
        shape, cut = (one.stored_rows or one.size, spec.in_features), spec.cut(one, table.shard)
        how = after(_transpose, arrange) if spec.transposed else arrange
        shape = shape[::-1] if spec.transposed else shape
        whole = _cut_experts(experts, is_stacked)
        for name, own, lead in _tensors(table, one.name, suffix, target, weight.shape[:-2], is_stacked, experts):
            table.place(name, own, (*lead, *shape), how, stored, cut=whole or cut, fill=fill)


def place_rows(
    table: WeightTable,
    spec: LinearSpec,
    rows: Tensor,
    suffix: str = SUFFIXES[1],
    *,
    is_added: bool = True,
    is_stacked: bool = True,
    stored: frozenset[torch.dtype] = FLOATS,
    fill: Fill | None = None,
    experts: ExpertSpec | None = None,
) -> None:
    """Places one number for each row, [out] or [experts, out], as `place_weights` places weights.

    is_added: the numbers are a bias, which is in one of several partial sums; other numbers are in all.
    """
    for one, target, arrange in targets(table, spec, rows, -1):
        cut = spec.bias_cut(one, table.shard) if is_added else spec.row_cut(one, table.shard)
        whole = _cut_experts(experts, is_stacked)
        for name, own, lead in _tensors(table, one.name, suffix, target, rows.shape[:-1], is_stacked, experts):
            shape = (*lead, one.stored_rows or one.size)
            table.place(name, own, shape, arrange, stored, cut=whole or cut, fill=fill)


def targets(
    table: WeightTable, spec: LinearSpec, memory: Tensor, dim: int
) -> Iterator[tuple[MatrixPart, Tensor, Arrange | None]]:
    """Each part, its target, and what makes it of the checkpoint's rows, before a rank's share is taken.

    dim: of the rows, counted from the end. Runs of an interleaved part have a dimension of their own, so that views do.
    """
    start = 0
    for one in spec.parts:
        count = sum(map(len, spec.rows(one, table.shard)))
        target = memory.narrow(dim, start, count)
        if one.interleaved:
            runs = len(one.rows)
            yield one, torch.unflatten(target, dim, (runs, -1)), partial(_split_runs, runs, dim)
        else:
            yield one, target, one.arrange
        start += count


def _cut_experts(experts: ExpertSpec | None, is_stacked: bool) -> Cut | None:
    """Takes the experts of a rank from a stack of all. None: it has all."""
    return None if experts is None or experts.own is None or not is_stacked else Cut(0, (experts.own,))


def _tensors(
    table: WeightTable,
    name: str,
    suffix: str,
    target: Tensor,
    lead: tuple[int, ...],
    is_stacked: bool,
    experts: ExpertSpec | None,
) -> list[tuple[str, Tensor, tuple[int, ...]]]:
    """The checkpoint's tensors and their first dimensions: one, or with a number in the place of "{}" each expert's."""
    own = None if experts is None else experts.own
    if is_stacked:
        return [(f"{name}{suffix}", target, lead if own is None or experts is None else (experts.num_experts,))]
    if experts is not None and own is not None:
        for expert in set(range(experts.num_experts)).difference(own):
            table.leave_to_others(f"{name.format(expert)}{suffix}")
    first = 0 if own is None else own.start
    return [(f"{name.format(first + i)}{suffix}", part, ()) for i, part in enumerate(target)]


def _split_runs(runs: int, dim: int, stored: Tensor) -> Tensor:
    return torch.unflatten(stored, dim, (-1, runs)).transpose(dim - 1, dim)


def _transpose(stored: Tensor) -> Tensor:
    return stored.mT


def second_copy(in_features: int, out_features: int, dtype: torch.dtype) -> tuple[bool, int]:
    """Decides which second copy of the weight the CPU uses for few rows, beside the packed one.

    Returns whether that copy is transposed, and the largest number of rows that it is used for; 0: no second copy.
    """
    elements = in_features * out_features
    if dtype != torch.float32 or elements > SECOND_COPY_ELEMENTS:
        return False, 0
    if elements <= TINY_ELEMENTS:
        return out_features >= FEW_OUTPUTS, TINY_ROWS
    return in_features <= out_features, 1


def can_pack(weight: Tensor) -> bool:
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    if weight.dtype == torch.bfloat16:
        return hasattr(_dnn, "_is_mkldnn_bf16_supported") and bool(_dnn._is_mkldnn_bf16_supported())
    return weight.dtype == torch.float32 and hasattr(_dnn, "_reorder_linear_weight")
