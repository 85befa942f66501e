"""Makes linear layers and experts of what a `Scheme` says: the rules that hold for all formats.

- Parts of a product with equal forms share memory, others are cut into products of their own, with a line.
- Each tensor of a form has the rows of its matrix, so `arrange` reorders codes and scales alike, and a rank takes the
  same rows of all, or the inputs that elements stand for.
- A matrix that is needed as numbers is dequantized while it is loaded, with a line. So is a matrix with columns in an
  order of their own, where matrices share memory (experts) or ranks divide the inputs.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import groupby
from threading import Lock

import torch
from torch import Tensor

from blockyard.services.gpu_worker.loading.linear_spec import Cut, ExpertSpec, LinearSpec, MatrixPart, Split
from blockyard.services.gpu_worker.loading.weights import WeightTable
from blockyard.services.gpu_worker.parallel.shares import Shard
from blockyard.services.gpu_worker.quantization.dense import (
    UnquantizedExperts,
    UnquantizedFormat,
    UnquantizedLinear,
    place_rows,
)
from blockyard.services.gpu_worker.quantization.kept.dequantized import WEIGHT, Dequantized
from blockyard.services.gpu_worker.quantization.kept.form import (
    INPUT_SCALE,
    KeptExperts,
    KeptForm,
    KeptLinear,
    KeptTensor,
    fits_host,
    is_dequantized_on,
    kinds,
)
from blockyard.services.gpu_worker.quantization.method import ExpertMethod, Fusion, LinearMethod
from blockyard.services.gpu_worker.quantization.names import HEAD
from blockyard.services.gpu_worker.quantization.scheme import Matrix, Scheme, StoredMatrix
from blockyard.shared.errors import ConfigError, LoadError

GB = 1e9  # bytes
MOST_NAMED = 10  # names of a file in one line


class QuantizedFormat:
    """Implements `Format` by a scheme."""

    def __init__(self, scheme: Scheme, table: WeightTable, method: str) -> None:
        """method: its name, for the start's report."""
        self._scheme, self._others, self._method = scheme, UnquantizedFormat(), method
        self._dequantized, self._has_quantized = _Dequantized(), False
        table.after_load(partial(self._name_unused, table))
        table.after_load(partial(self._dequantized.name_memory, table))
        table.after_load(partial(self._name_nothing, table))

    def linear(self, table: WeightTable, spec: LinearSpec) -> LinearMethod:
        stored = [self._stored(_matrix(table, one, spec)) for one in spec.parts]
        if spec.split is Split.INPUTS and table.shard.size > 1:
            stored = [_without_order(one, spec.in_features, table.dtype) for one in stored]
        runs = [
            (form, [i for i, _ in some])
            for form, some in groupby(enumerate(stored), key=lambda pair: None if pair[1] is None else pair[1].form)
        ]
        methods = [
            self._run(table, replace(spec, parts=tuple(spec.parts[i] for i in own)), [stored[i] for i in own])
            for _, own in runs
        ]
        if len(methods) == 1:
            return methods[0]
        table.note("products that are cut because their parts are not quantized alike", spec.parts[0].name)
        return CutLinear(methods)

    def _run(self, table: WeightTable, spec: LinearSpec, stored: Sequence[StoredMatrix | None]) -> LinearMethod:
        """A product of parts that are all in one form, or all not quantized."""
        known = [one for one in stored if one is not None]
        if not known:
            return self._others.linear(table, spec)
        form, name = known[0].form, spec.parts[0].name
        inputs, outputs = spec.num_inputs(table.shard), spec.num_outputs(table.shard)
        wanted = kinds(form, outputs, inputs)
        memory = dict(zip(wanted, table.layer_memory(name, *wanted.values()), strict=True))
        bias = table.empty(outputs) if spec.bias else None
        placement = _Placement(table, spec, form, memory)
        placement.place(known)
        table.after_load(placement.check_inputs)
        if bias is not None:
            place_rows(table, spec, bias)
        if isinstance(form, Dequantized):
            if all(one.is_certain for one in known):
                self._dequantized.add(table, name, memory[WEIGHT], known)
            return UnquantizedLinear(memory[WEIGHT], bias)
        _note(table, form, name, (inputs, outputs), known)
        return KeptLinear(form, memory, (inputs, outputs), table.dtype, bias)

    def experts(self, table: WeightTable, spec: ExpertSpec) -> ExpertMethod:
        matrix, name = spec.matrix, spec.matrix.parts[0].name
        stored = [self._of_expert(table, spec, i) for i in range(1 if spec.stacked else spec.num_experts)]
        flat = [one for some in stored for one in some]
        known = [one for one in flat if one is not None]
        if not known:
            return self._others.experts(table, spec)
        form = known[0].form
        if len(known) < len(flat) or any(one.form != form for one in known):
            raise ConfigError(f"quantization_config: experts {name.partition('.{}')[0]} are not quantized alike")
        inputs, outputs = matrix.num_inputs(table.shard), matrix.num_outputs(table.shard)
        wanted = kinds(form, outputs, inputs, (spec.num_own,))
        memory = dict(zip(wanted, table.expert_memory(*wanted.values()), strict=True))
        bias = table.empty(spec.num_own, outputs) if matrix.bias else None
        if bias is not None:
            place_rows(table, matrix, bias, spec.suffixes[1], is_stacked=spec.stacked, experts=spec)
        own = spec.own or range(spec.num_experts)
        placement = _Placement(table, matrix, form, memory, of_experts=True)
        for number, some in enumerate(stored):
            parts = [one for one in some if one is not None]
            if spec.stacked:
                placement.place(parts, stacked=own)
            elif number in own:
                placement.place(parts, number - own.start)
            else:
                placement.leave_to_others(parts)
        table.after_load(placement.check_inputs)
        if isinstance(form, Dequantized):
            self._dequantized.add(table, name, memory[WEIGHT], known)
            return UnquantizedExperts(memory[WEIGHT], bias)
        _note(table, form, name, (inputs, outputs), known)
        return KeptExperts(form, memory, (inputs, outputs), table.dtype, bias)

    def _of_expert(self, table: WeightTable, spec: ExpertSpec, number: int) -> list[StoredMatrix | None]:
        """Finds the storage of an expert's parts, or of all experts' parts if they are stacked."""
        found = []
        for one in spec.matrix.parts:
            matrix = replace(_matrix(table, one, spec.matrix), is_expert=True)
            if spec.stacked:
                matrix = replace(matrix, experts=spec.num_experts, suffix=spec.suffixes[0])
            else:
                matrix = replace(matrix, name=one.name.format(number))
            found.append(_without_order(self._stored(matrix), matrix.inputs, table.dtype))
        return found

    def plain(self, table: WeightTable, spec: LinearSpec, dtype: torch.dtype) -> Tensor:
        [one] = spec.parts
        stored = self._stored(replace(_matrix(table, one, spec), plain=True))
        if stored is None:
            return self._others.plain(table, spec, dtype)
        weight = table.empty(spec.num_outputs(table.shard), spec.num_inputs(table.shard), dtype=dtype)
        numbers = _as_numbers(stored, spec.in_features, dtype)

        def to_kept(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
            if stored.is_certain or len(tensors) > 1:  # a format may take unquantized weights, too
                self._dequantized.add(table, one.name, weight, [stored])
            return numbers.to_kept(tensors)

        _Placement(table, spec, numbers.form, {WEIGHT: weight}).place([replace(numbers, to_kept=to_kept)])
        return weight

    def _stored(self, matrix: Matrix) -> StoredMatrix | None:
        found = self._scheme.stored(matrix)
        self._has_quantized = self._has_quantized or (found is not None and found.is_certain)
        return found

    def _name_nothing(self, table: WeightTable) -> None:
        if not self._has_quantized:
            table.note("quantization that quantizes no weight of this model", self._method)

    def _name_unused(self, table: WeightTable) -> None:
        """Files may also name norms and heads, tied ones too, and parts of the checkpoint that are not used."""
        unused = list[str]()
        for names in self._scheme.patterns():
            for other in {HEAD, *table.names_besides_groups()} if names.unused() else ():
                names.match(other)
            unused += names.unused()
        if unused:
            more = f" and {len(unused) - MOST_NAMED} more" if len(unused) > MOST_NAMED else ""
            table.note("quantization_config names what the model does not have", ", ".join(unused[:MOST_NAMED]) + more)


class _Dequantized:
    """The matrices that are kept as numbers although the file has them quantized."""

    def __init__(self) -> None:
        self._name, self._bytes, self._stored_bytes, self._lock = "", 0, 0, Lock()

    def add(self, table: WeightTable, name: str, weight: Tensor, stored: Sequence[StoredMatrix]) -> None:
        """Several threads that read files may call it."""
        headers = [table.headers.find(tensor.name) for one in stored for tensor in one.tensors.values()]
        with self._lock:
            table.note("dequantized at load", name)
            self._name, self._bytes = self._name or name, self._bytes + weight.nbytes
            self._stored_bytes += sum(one.size_bytes for one in headers if one is not None)

    def name_memory(self, table: WeightTable) -> None:
        """Says what a rank keeps, and what the file has for all ranks."""
        if self._bytes:
            took = f"{self._bytes / GB:.3f} GB, {self._stored_bytes / GB:.3f} GB in the files"
            table.note(f"weights that are dequantized at load take {took}", self._name)


class _Placement:
    """Gives the stored tensors of a product places in its memory."""

    def __init__(
        self,
        table: WeightTable,
        spec: LinearSpec,
        form: KeptForm,
        memory: Mapping[str, Tensor],
        *,
        of_experts: bool = False,
    ) -> None:
        """memory: of this rank, of experts with a leading dimension. Raises ConfigError if a rank's inputs cut what
        one element stands for."""
        self._table, self._spec, self._memory, self._fill = table, spec, memory, form.fill
        self._stated, self._lock = form.tensors(), Lock()
        self._columns = {name: _columns(one, spec, table.shard, of_experts) for name, one in self._stated.items()}
        self._is_filled = False
        for name, one in self._stated.items():
            if one.is_one_number:
                memory[name].zero_()

    def place(self, stored: Sequence[StoredMatrix], expert: int | None = None, stacked: range | None = None) -> None:
        """stored: one a part. expert: where the parts' expert is in memory. stacked: a tensor has all experts, of which
        these go to memory."""
        start = 0
        for one, how in zip(self._spec.parts, stored, strict=True):
            rows = self._spec.rows(one, self._table.shard)
            convert = partial(self._convert, one, how, start, expert, stacked)
            for name in how.unused:
                self._table.ignore(name)
            self._table.place_group(how.tensors, convert, self._fill_once)
            start += sum(map(len, rows))

    def leave_to_others(self, stored: Sequence[StoredMatrix]) -> None:
        """Another rank has these parts of an expert."""
        for how in stored:
            for name in [*how.unused, *(one.name for one in how.tensors.values())]:
                self._table.leave_to_others(name)

    def check_inputs(self) -> None:
        """Raises LoadError after loading, if inputs would be divided by 0: of the parts' scales the largest counts."""
        numbers = [self._memory[name] for name, one in self._stated.items() if one.is_one_number]
        if numbers and not any(map(float, numbers)):
            names = ", ".join(f"{one.name}.{INPUT_SCALE}" for one in self._spec.parts)
            raise LoadError(f"{names}: the checkpoint has a scale of 0, by which inputs are divided")

    def _fill_once(self, generator: torch.Generator) -> None:
        if not self._is_filled:
            self._fill(self._memory, generator)
        self._is_filled = True

    def _convert(
        self,
        one: MatrixPart,
        how: StoredMatrix,
        start: int,
        expert: int | None,
        stacked: range | None,
        tensors: Mapping[str, Tensor],
    ) -> None:
        with self._lock:  # parts write to the numbers that they share
            if stacked is None:
                self._write(one, how.to_kept(tensors), start, expert)
            for i, number in enumerate(stacked or ()):
                self._write(one, how.to_kept({key: value[number] for key, value in tensors.items()}), start, i)
            self._table.link.synchronize_thread()

    def _write(self, one: MatrixPart, made: Mapping[str, Tensor], start: int, expert: int | None) -> None:
        rows = self._spec.rows(one, self._table.shard)
        for name, stated in self._stated.items():
            target, value = self._memory[name], made[name]
            if stated.is_one_number:
                target.copy_(torch.maximum(target, value.to(target.device, target.dtype).reshape(())))
                continue
            target, value = _as_bytes(target if expert is None else target[expert], value)
            if stated.rows:
                target = target.narrow(0, start, sum(map(len, rows)))
                value = Cut(0, tuple(rows))(one.in_order(value))
            columns = self._columns[name]
            target.copy_(value if columns is None else value[..., columns.start : columns.stop])


def _matrix(table: WeightTable, one: MatrixPart, spec: LinearSpec) -> Matrix:
    return Matrix(
        name=one.name,
        outputs=one.stored_rows or one.size,
        inputs=spec.in_features,
        transposed=spec.transposed,
        headers=table.headers,
    )


def _as_numbers(stored: StoredMatrix, inputs: int, dtype: torch.dtype) -> StoredMatrix:
    """The same matrix, dequantized while it is loaded."""

    def to_kept(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {WEIGHT: stored.form.dequantize(stored.to_kept(tensors), inputs, dtype)}

    return replace(stored, form=Dequantized(dtype), to_kept=to_kept)


def _without_order(stored: StoredMatrix | None, inputs: int, dtype: torch.dtype) -> StoredMatrix | None:
    """The same matrix as numbers, if its columns are in an order of their own."""
    if stored is None or not any(one.is_order for one in stored.form.tensors().values()):
        return stored
    return _as_numbers(stored, inputs, dtype)


def _columns(one: KeptTensor, spec: LinearSpec, shard: Shard, of_experts: bool) -> range | None:
    """The elements of the last dimension that a rank has. None: all."""
    if one.inputs is None or spec.split is not Split.INPUTS:
        return None
    own = spec.inputs.share(shard)
    if own.start % one.inputs or (own.stop % one.inputs and own.stop != spec.in_features):
        whole = "; with --enable-expert-parallel a rank has whole experts" if of_experts else ""
        raise ConfigError(
            f"--tensor-parallel-size {shard.size}: {spec.parts[0].name.format(0)}: inputs {own.start} to "
            f"{own.stop - 1}, which a rank has, are no whole groups of {one.inputs}{whole}"
        )
    return range(own.start // one.inputs, -(-own.stop // one.inputs))


def _as_bytes(target: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Views of 8-bit floats as bytes, because not all operations take them."""
    if value.dtype == target.dtype and value.is_floating_point() and value.dtype.itemsize == 1:
        return target.view(torch.uint8), value.view(torch.uint8)
    return target, value


def _note(
    table: WeightTable, form: KeptForm, name: str, shape: tuple[int, int], stored: Sequence[StoredMatrix]
) -> None:
    for note in dict.fromkeys(one.note for one in stored if one.note):
        table.note(note, name)
    if is_dequantized_on(table.device, form) and not fits_host(form, shape, table.dtype):
        dtype = str(table.dtype).removeprefix("torch.")
        table.note(f"{form.name} weights, dequantized because the CPU has no product of them in {dtype}", name)


class CutLinear:
    """A product of parts in different forms: one product for each run of parts with equal forms, side by side.

    Implements `LinearMethod`.
    """

    form = None
    fusions = frozenset[Fusion]()

    def __init__(self, methods: Sequence[LinearMethod]) -> None:
        self.methods = methods
        self.shape = methods[0].shape[0], sum(one.shape[1] for one in methods)

    @property
    def size_bytes(self) -> int:
        return sum(one.size_bytes for one in self.methods)

    def prepare(self) -> None:
        for one in self.methods:
            one.prepare()

    def apply(self, x: Tensor) -> Tensor:
        return torch.cat([one.apply(x) for one in self.methods], -1)

    def tensors(self) -> dict[str, Tensor]:
        return {f"{i}.{name}": own for i, one in enumerate(self.methods) for name, own in one.tensors().items()}

    def replace(self, name: str, tensor: Tensor) -> None:
        number, _, own = name.partition(".")
        self.methods[int(number)].replace(own, tensor)
