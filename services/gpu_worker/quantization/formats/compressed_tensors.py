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

import msgspec
import torch

from blockyard.services.gpu_worker.quantization.formats.layouts import stored_codes
from blockyard.services.gpu_worker.quantization.formats.layouts.settings import read
from blockyard.services.gpu_worker.quantization.formats.layouts.stored_codes import CodeScheme, Inputs
from blockyard.services.gpu_worker.quantization.kept.eight_bits import has_products
from blockyard.services.gpu_worker.quantization.names import HEAD, REGEX, NamePatterns, is_left_out
from blockyard.services.gpu_worker.quantization.scheme import Matrix, StoredMatrix
from blockyard.shared.errors import ConfigError

PACK, INT, FLOAT, NAIVE = "pack-quantized", "int-quantized", "float-quantized", "naive-quantized"
NVFP4, MXFP4, MXFP8 = "nvfp4-pack-quantized", "mxfp4-pack-quantized", "mxfp8-quantized"
DENSE, MIXED = "dense", "mixed-precision"
FORMATS = (PACK, INT, FLOAT, NAIVE, NVFP4, MXFP4, MXFP8, DENSE)
SPARSE = "needs kernels of sparse weights; a checkpoint without 2:4 gaps is read"
REFUSED = {"marlin-24": SPARSE, "sparse-24": SPARSE, "sparse-24-bitmask": SPARSE, "sparse-bitmask": SPARSE}
LINEAR = "Linear"
TENSOR, CHANNEL, GROUP, BLOCK, TOKEN, TENSOR_GROUP = "tensor", "channel", "group", "block", "token", "tensor_group"
AT_RUN_TIME = ("input", "output")  # locations of transforms that weights do not have in them
KEPT_INPUTS = "inputs that the file would quantize stay 16 bits"


class NumberArgs(msgspec.Struct, frozen=True):
    """How numbers are quantized. The fields that count."""

    num_bits: int = 8
    type: str = "int"
    symmetric: bool = True
    strategy: str | None = None
    group_size: int | None = None
    block_structure: tuple[int, int] | None = None
    dynamic: bool | str = False
    actorder: bool | str | None = None

    def __post_init__(self) -> None:
        if self.type not in ("int", "float"):
            raise ValueError(f"type {self.type!r} is neither int nor float")
        if not 2 <= self.num_bits <= 8:
            raise ValueError(f"num_bits {self.num_bits}: 2 to 8 are read")
        if self.kind in (GROUP, TENSOR_GROUP) and (self.group_size is None or self.group_size < 1):
            raise ValueError(f"group_size {self.group_size}: groups have at least 1")
        if self.kind == BLOCK and (self.block_structure is None or min(self.block_structure) < 1):
            raise ValueError(f"block_structure {self.block_structure}: blocks have two sizes of at least 1")
        if self.kind not in (TENSOR, CHANNEL, GROUP, BLOCK, TOKEN, TENSOR_GROUP):
            raise ValueError(f"strategy {self.strategy!r} is not known")

    @property
    def kind(self) -> str:
        """`strategy`, or what `group_size` means without one."""
        if self.strategy is not None:
            return self.strategy.lower()
        return TENSOR if self.group_size is None else GROUP if self.group_size > 0 else CHANNEL


class MatrixGroup(msgspec.Struct, frozen=True):
    targets: list[str]
    weights: NumberArgs | None = None
    input_activations: NumberArgs | None = None
    format: str | None = None


class SparseWeights(msgspec.Struct, frozen=True):
    format: str = DENSE


class TransformArgs(msgspec.Struct, frozen=True):
    location: str = ""


class TransformScheme(msgspec.Struct, frozen=True):
    apply: list[TransformArgs] = []


class Transforms(msgspec.Struct, frozen=True):
    config_groups: dict[str, TransformScheme] = {}


class CompressedSettings(msgspec.Struct, frozen=True):
    """The fields of quantization_config that count."""

    format: str = MIXED
    config_groups: dict[str, MatrixGroup] = {}
    ignore: list[str] = []
    sparsity_config: SparseWeights = SparseWeights()
    transform_config: Transforms = Transforms()

    def __post_init__(self) -> None:
        for key, scheme in self.transform_config.config_groups.items():
            for one in scheme.apply:
                if one.location in AT_RUN_TIME:
                    raise ValueError(
                        f"transform_config: {key}: a transform of the {one.location} of layers; only those of weights "
                        "are read"
                    )


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
        _refuse(self._settings.sparsity_config.format, "sparsity_config: ", (DENSE,))
        _refuse(self._settings.format, "", (*FORMATS, MIXED))
        self._schemes = {key: _scheme(key, group) for key, group in self._settings.config_groups.items()}
        self._formats = {key: self._format(key, group) for key, group in self._settings.config_groups.items()}

    def _format(self, key: str, group: MatrixGroup) -> str:
        said = group.format or self._settings.format
        if said == MIXED and group.weights is not None:
            raise ConfigError(f"quantization_config: config_groups {key} has no format")
        _refuse(said, f"config_groups {key}: ", (*FORMATS, MIXED))
        return said

    def patterns(self) -> list[NamePatterns]:
        named = self._targets
        return [self._ignored, *named.names.values(), *named.expressions.values(), named.others]

    def stored(self, matrix: Matrix) -> StoredMatrix | None:
        key = None if self._ignored.match(matrix.name) else self._targets.find(matrix.name)
        own = None if key is None else self._schemes[key]
        if key is None or own is None or self._formats[key] == DENSE:
            return None
        said, made = self._settings.config_groups[key], self._make(self._formats[key], matrix, own)
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


def _refuse(format_: str, where: str, known: tuple[str, ...]) -> None:
    if format_ in known:
        return
    reason = REFUSED.get(format_)
    what = f"refused: it {reason}" if reason else f"none of {', '.join(known)}"
    raise ConfigError(f"quantization_config: {where}format {format_!r} is {what}")


def _scheme(key: str, group: MatrixGroup) -> CodeScheme | None:
    """None: weights of the group are not quantized. Raises ConfigError for weights without a layout."""
    args = group.weights
    if args is None:
        return None
    where = f"quantization_config: config_groups {key}: weights:"
    if args.kind == TOKEN:
        raise ConfigError(f"{where} strategy 'token' is one of inputs")
    if args.type == "float" and args.num_bits not in (4, 8):
        raise ConfigError(f"{where} floats of {args.num_bits} bits; 4 and 8 are read")
    group_size = args.group_size if args.kind in (GROUP, TENSOR_GROUP) else None
    rows = None
    if args.kind == BLOCK:
        assert args.block_structure is not None
        rows, group_size = args.block_structure
    return CodeScheme(
        bits=args.num_bits,
        floats=args.type == "float",
        group=group_size,
        rows=rows,
        has_zeros=not args.symmetric,
        order=args.actorder is True or args.actorder in (GROUP, "dynamic"),
        inputs=_inputs(group.input_activations, args),
    )


def _inputs(said: NumberArgs | None, weights: NumberArgs) -> Inputs | None:
    """How inputs are rounded. None: they are not, or kernels do not round so."""
    if said is None or said.num_bits != 8 or weights.num_bits != 8 or said.type != weights.type:
        return None
    if said.kind in (GROUP, TENSOR_GROUP) and weights.kind != BLOCK:
        return None
    return Inputs(static=said.dynamic is False, symmetric=said.symmetric)
