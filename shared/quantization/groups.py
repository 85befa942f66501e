"""Settings of formats that say of groups of matrices how weights and inputs are quantized."""

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from blockyard.shared.quantization.reading import Word, check_names, check_word

# compressed-tensors

PACK, INT, FLOAT, NAIVE = "pack-quantized", "int-quantized", "float-quantized", "naive-quantized"
NVFP4, MXFP4, MXFP8 = "nvfp4-pack-quantized", "mxfp4-pack-quantized", "mxfp8-quantized"
DENSE, MIXED = "dense", "mixed-precision"
FORMATS = (PACK, INT, FLOAT, NAIVE, NVFP4, MXFP4, MXFP8, DENSE)
SPARSE = "needs kernels of sparse weights; a checkpoint without 2:4 gaps is read"
REFUSED = {"marlin-24": SPARSE, "sparse-24": SPARSE, "sparse-24-bitmask": SPARSE, "sparse-bitmask": SPARSE}
TENSOR, CHANNEL, GROUP, BLOCK, TOKEN, TENSOR_GROUP = "tensor", "channel", "group", "block", "token", "tensor_group"
STRATEGIES = (TENSOR, CHANNEL, GROUP, BLOCK, TOKEN, TENSOR_GROUP)
AT_RUN_TIME = ("input", "output")  # locations of transforms that weights do not have in them
FLOAT_BITS = (4, 8)


class NumberArgs(msgspec.Struct, frozen=True):
    """How numbers are quantized. The fields that count."""

    num_bits: int = 8
    type: Word = Word("int")
    symmetric: bool = True
    strategy: Word | None = None
    group_size: int | None = None
    block_structure: tuple[int, int] | str | None = None  # as text "128x128"
    dynamic: bool | str = False
    actorder: bool | str | None = None

    def __post_init__(self) -> None:
        if self.type not in ("int", "float"):
            raise ValueError(f"type {self.type!r} is neither int nor float")
        if not 2 <= self.num_bits <= 8:
            raise ValueError(f"num_bits {self.num_bits}: 2 to 8 are read")
        check_word("strategy", self.kind, STRATEGIES)
        if self.kind in (GROUP, TENSOR_GROUP) and (self.group_size is None or self.group_size < 1):
            raise ValueError(f"group_size {self.group_size}: groups have at least 1")
        if self.kind == BLOCK:
            _ = self.block
        check_word("dynamic", str(self.dynamic).lower(), ("true", "false", "local"))

    @property
    def kind(self) -> str:
        """`strategy`, or what `group_size` means without one."""
        if self.strategy is not None:
            return self.strategy
        return TENSOR if self.group_size is None else GROUP if self.group_size > 0 else CHANNEL

    @property
    def block(self) -> tuple[int, int]:
        """Rows and columns. Raises ValueError."""
        said = self.block_structure
        sizes = said.lower().split("x") if isinstance(said, str) else said or ()
        if len(sizes) != 2 or not all(str(one).isdecimal() and int(one) > 0 for one in sizes):
            raise ValueError(f"block_structure {said!r}: blocks have two sizes of at least 1")
        rows, columns = map(int, sizes)
        return rows, columns

    @property
    def is_static(self) -> bool:
        return str(self.dynamic).lower() == "false"

    @property
    def has_order(self) -> bool:
        """Whether inputs are in groups of any others."""
        return str(self.actorder).lower() in ("true", GROUP, "dynamic")


class MatrixGroup(msgspec.Struct, frozen=True):
    targets: list[str]
    weights: NumberArgs | None = None
    input_activations: NumberArgs | None = None
    format: Word | None = None

    def __post_init__(self) -> None:
        args = self.weights
        if args is not None and args.kind == TOKEN:
            raise ValueError("weights: strategy 'token' is one of inputs")
        if args is not None and args.type == "float" and args.num_bits not in FLOAT_BITS:
            raise ValueError(f"weights: floats of {args.num_bits} bits; 4 and 8 are read")
        check_names(targets=self.targets)


class SparseWeights(msgspec.Struct, frozen=True):
    format: Word = Word(DENSE)


class TransformArgs(msgspec.Struct, frozen=True):
    location: Word = Word()


class TransformScheme(msgspec.Struct, frozen=True):
    apply: list[TransformArgs] = []


class Transforms(msgspec.Struct, frozen=True):
    config_groups: dict[str, TransformScheme] = {}


class CompressedSettings(msgspec.Struct, frozen=True):
    """The fields of quantization_config that count."""

    format: Word = Word(MIXED)
    config_groups: dict[str, MatrixGroup] = {}
    ignore: list[str] = []
    sparsity_config: SparseWeights = SparseWeights()
    transform_config: Transforms = Transforms()

    def __post_init__(self) -> None:
        _check_format("sparsity_config: ", self.sparsity_config.format, (DENSE,))
        _check_format("", self.format, (*FORMATS, MIXED))
        for key, group in self.config_groups.items():
            _check_format(f"config_groups {key}: ", self.format_of(key), (*FORMATS, MIXED))
            if self.format_of(key) == MIXED and group.weights is not None:
                raise ValueError(f"config_groups {key} has no format")
        for key, scheme in self.transform_config.config_groups.items():
            for one in scheme.apply:
                if one.location in AT_RUN_TIME:
                    raise ValueError(
                        f"transform_config: {key}: a transform of the {one.location} of layers; only those of weights "
                        "are read"
                    )
        check_names(ignore=self.ignore)

    def format_of(self, key: str) -> str:
        """The format of a group."""
        return self.config_groups[key].format or self.format


def _check_format(where: str, format_: str, known: Iterable[str]) -> None:
    """Raises ValueError for a format that is not read."""
    reason = REFUSED.get(format_)
    if reason is not None:
        raise ValueError(f"{where}format {format_!r} is refused: it {reason}")
    check_word(f"{where}format", format_, known)


# Quark

FP8, INT8, FP4 = "fp8_e4m3", "int8", "fp4"
PER_TENSOR, PER_CHANNEL, PER_GROUP = "per_tensor", "per_channel", "per_group"
MX_GROUP = 32  # inputs of a scale of mxfp4


class TensorConfig(msgspec.Struct, frozen=True):
    """How tensors are quantized. The fields that count."""

    dtype: Word
    qscheme: Word | None = None
    group_size: int | None = None
    symmetric: bool | None = None
    is_dynamic: bool | None = None
    scale_format: Word | None = None


class LayerConfig(msgspec.Struct, frozen=True):
    weight: TensorConfig | None = None
    input_tensors: TensorConfig | None = None

    def __post_init__(self) -> None:
        """Raises ValueError for weights that no layout has."""
        weight = self.weight
        if weight is None:
            return
        check_word("weight: dtype", weight.dtype, (FP8, INT8, FP4))
        if weight.dtype == FP4:
            if weight.qscheme != PER_GROUP or weight.group_size != MX_GROUP or weight.scale_format != "e8m0":
                raise ValueError(f"weight: {FP4} is read in groups of {MX_GROUP} with scales in e8m0 (mxfp4)")
        elif weight.qscheme not in (None, PER_TENSOR, PER_CHANNEL) or weight.symmetric is False:
            raise ValueError(
                f"weight: {weight.dtype} is read with qscheme {PER_TENSOR} or {PER_CHANNEL}, symmetric; it has "
                f"{weight.qscheme}, symmetric {weight.symmetric}"
            )


class QuarkSettings(msgspec.Struct, frozen=True):
    """The fields of quantization_config that count."""

    global_quant_config: LayerConfig = LayerConfig()
    layer_quant_config: dict[str, LayerConfig] = {}
    layer_type_quant_config: Mapping[str, Any] = {}
    exclude: list[str] = []

    def __post_init__(self) -> None:
        if self.layer_type_quant_config:
            named = ", ".join(self.layer_type_quant_config)
            raise ValueError(f"layer_type_quant_config {named}: settings by the class of a layer are not read")
        check_names(exclude=self.exclude, layer_quant_config=self.layer_quant_config)
