"""`quant_method` compressed-tensors: groups of matrices, each with a scheme of weights and of inputs.

`config_groups` has for each group `targets` (names, `re:` with a regular expression, or a module's class, of which
`Linear` is known), `weights` and `input_activations`, and in mixed-precision files a `format`. A matrix has the group
that names it, else the group with a matching expression, else the group of its class; a matrix in `ignore` has none.
Embeddings and routers are no linear layers, a head is one. `stored_codes` says how each format stores a matrix.

With weights of 4 bits, or of groups of inputs, inputs stay as they are, with a line: the accuracy is at least as good.
Documented by the package compressed-tensors (quantization/quant_config.py, quant_scheme.py, quant_args.py).
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch

from blockyard.services.gpu_worker.loading.weights import WeightTable
from blockyard.services.gpu_worker.quantization.formats.layouts import stored_codes
from blockyard.services.gpu_worker.quantization.formats.layouts.stored_codes import CodeScheme, Inputs
from blockyard.services.gpu_worker.quantization.kept.eight_bits import has_products
from blockyard.services.gpu_worker.quantization.names import HEAD, NamePatterns, is_left_out
from blockyard.services.gpu_worker.quantization.scheme import Matrix, StoredMatrix
from blockyard.shared.quantization.groups import (
    BLOCK,
    DENSE,
    GROUP,
    MXFP4,
    MXFP8,
    NVFP4,
    PACK,
    TENSOR_GROUP,
    CompressedSettings,
    MatrixGroup,
    NumberArgs,
)
from blockyard.shared.quantization.reading import REGEX, read

LINEAR = "Linear"
KEPT_INPUTS = "inputs that the file would quantize stay 16 bits"


class _GroupTargets:
    """The targets of the groups: names, expressions and classes of matrices."""

    def __init__(self, groups: Mapping[str, MatrixGroup]) -> None:
        self.names, self.expressions, self._classes = {}, {}, dict[str, str]()
        others = []
        for key, group in groups.items():
            self.names[key] = NamePatterns(one for one in group.targets if _is_name(one))
            self.expressions[key] = NamePatterns(one for one in group.targets if one.startswith(REGEX))
            for one in group.targets:
                if one == LINEAR:
                    self._classes.setdefault(one, key)
                elif not _is_name(one) and not one.startswith(REGEX):
                    others.append(one)
        self.others = NamePatterns(others)

    def find(self, name: str) -> str | None:
        """The key of the group of a matrix."""
        for some in (self.names, self.expressions):
            for key, patterns in some.items():
                if patterns.match(name):
                    return key
        is_linear = name.rpartition(".")[2] == HEAD or not is_left_out(name)
        return self._classes.get(LINEAR) if is_linear else None


def _is_name(target: str) -> bool:
    """Whether a target is no class: names of classes are words with a capital."""
    return not target.startswith(REGEX) and (not target[:1].isupper() or "." in target)


class CompressedTensorsScheme:
    """Implements `Scheme`."""

    def __init__(
        self, said: Mapping[str, Any], dtype: torch.dtype, device: torch.device, note: Callable[[str, str], None]
    ) -> None:
        """dtype: of the model. note: reports the treatment of a matrix by its name. Raises ConfigError for unknown
        settings."""
        self._settings, self._dtype, self._note = read(said, CompressedSettings), dtype, note
        self._has_products = has_products(device)
        self._ignored = NamePatterns(self._settings.ignore)
        self._targets = _GroupTargets(self._settings.config_groups)
        self._schemes = {key: _scheme(group) for key, group in self._settings.config_groups.items()}

    def patterns(self) -> list[NamePatterns]:
        named = self._targets
        return [self._ignored, *named.names.values(), *named.expressions.values(), named.others]

    def stored(self, matrix: Matrix) -> StoredMatrix | None:
        key = None if self._ignored.match(matrix.name) else self._targets.find(matrix.name)
        own = None if key is None else self._schemes[key]
        if key is None or own is None or self._settings.format_of(key) == DENSE:
            return None
        said, made = self._settings.config_groups[key], self._make(self._settings.format_of(key), matrix, own)
        if said.input_activations is not None and made.form.name not in ("Fp8W8A8", "Int8W8A8"):
            self._note(KEPT_INPUTS, matrix.name)
        return made

    def _make(self, format_: str, matrix: Matrix, own: CodeScheme) -> StoredMatrix:
        if format_ == PACK:
            return stored_codes.words(matrix, own, self._dtype)
        if format_ == NVFP4:
            return stored_codes.nvfp4(matrix)
        if format_ == MXFP4:
            return stored_codes.mxfp4(matrix)
        if format_ == MXFP8:
            return stored_codes.mxfp8(matrix)
        return stored_codes.codes(matrix, own, self._has_products)


def build(said: Mapping[str, Any], table: WeightTable) -> CompressedTensorsScheme:
    return CompressedTensorsScheme(said, table.dtype, table.device, table.note)


def _scheme(group: MatrixGroup) -> CodeScheme | None:
    """None: weights of the group are not quantized."""
    args = group.weights
    if args is None:
        return None
    group_size = args.group_size if args.kind in (GROUP, TENSOR_GROUP) else None
    rows = None
    if args.kind == BLOCK:
        rows, group_size = args.block
    return CodeScheme(
        bits=args.num_bits,
        floats=args.type == "float",
        group=group_size,
        rows=rows,
        has_zeros=not args.symmetric,
        order=args.has_order,
        inputs=_inputs(group.input_activations, args),
    )


def _inputs(said: NumberArgs | None, weights: NumberArgs) -> Inputs | None:
    """How inputs are rounded. None: they are not, or kernels do not round so."""
    if said is None or said.num_bits != 8 or weights.num_bits != 8 or said.type != weights.type:
        return None
    if said.kind in (GROUP, TENSOR_GROUP) and weights.kind != BLOCK:
        return None
    return Inputs(static=said.is_static, symmetric=said.symmetric)
