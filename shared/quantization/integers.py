"""Settings of formats with integers, codes of tables and codebooks."""

from typing import Any

import msgspec

from blockyard.shared.quantization.reading import (
    Word,
    check_expression,
    check_names,
    check_rule,
    check_word,
    convert,
)

WHOLE_ROW = -1  # the group size of one group a row


def group_of(said: int, bits: int) -> int | None:
    """The inputs of a scale from group_size; None: all of a row. Raises ValueError, also for unknown bits."""
    if bits not in (2, 3, 4, 8):
        raise ValueError(f"bits {bits} is none of 2, 3, 4, 8")
    if said != WHOLE_ROW and said < 1:
        raise ValueError(f"group_size {said}: it is {WHOLE_ROW} or at least 1")
    return None if said == WHOLE_ROW else said


# GPTQ

FIRST, SECOND, MARLIN = "gptq", "gptq_v2", "marlin"  # layouts
LEFT_OUT, CHANGED = "-:", "+:"  # in front of a rule of `dynamic`


class GptqSettings(msgspec.Struct, frozen=True):
    """The fields of quantization_config that count."""

    quant_method: Word = Word(FIRST)
    bits: int = 4
    group_size: int = 128
    desc_act: bool = False
    sym: bool = False
    lm_head: bool = False
    checkpoint_format: Word | None = None
    format: Word | None = None  # GPTQModel's name of checkpoint_format, which counts where both are
    is_marlin_format: bool = False
    dynamic: dict[str, dict[str, Any] | None] = {}
    modules_in_block_to_quantize: list[str | list[str]] = []

    def __post_init__(self) -> None:
        group_of(self.group_size, self.bits)
        check_word("checkpoint_format", self.layout, (FIRST, SECOND, MARLIN))
        if self.is_marlin and self.bits != 4:
            raise ValueError(f"bits {self.bits}: weights in Marlin's order have 4")
        own = {"bits": self.bits, "group_size": self.group_size}
        for key, rule in self.dynamic.items():
            check_expression("dynamic", key.removeprefix(LEFT_OUT).removeprefix(CHANGED), key)
            if not key.startswith(LEFT_OUT):
                check_rule("dynamic", key, own | (rule or {}), GptqSettings)

    @property
    def layout(self) -> str:
        return self.checkpoint_format or self.format or FIRST

    @property
    def is_marlin(self) -> bool:
        return self.is_marlin_format or MARLIN in (self.layout, self.quant_method)


# AWQ

GEMM, GEMV, GEMV_FAST = "gemm", "gemv", "gemv_fast"
VERSIONS = (GEMM, GEMV, GEMV_FAST, MARLIN)
AWQ_BITS = 4


class AwqSettings(msgspec.Struct, frozen=True):
    """The fields of quantization_config that count."""

    bits: int | None = None
    w_bit: int | None = None  # the older name of bits
    group_size: int | None = None
    q_group_size: int | None = None  # the older name of group_size
    zero_point: bool = True
    version: Word | None = None
    format: Word | None = None  # GPTQModel's name of version
    lm_head: bool = False
    modules_to_not_convert: list[str] = []

    def __post_init__(self) -> None:
        bits = next((one for one in (self.bits, self.w_bit) if one is not None), AWQ_BITS)
        if bits != AWQ_BITS:
            raise ValueError(f"bits {bits}: weights of AWQ have {AWQ_BITS}")
        group_of(self.stated_group, bits)
        check_word("version", self.packing, VERSIONS)
        check_names(modules_to_not_convert=self.modules_to_not_convert)

    @property
    def stated_group(self) -> int:
        return next((one for one in (self.group_size, self.q_group_size) if one is not None), 128)

    @property
    def packing(self) -> str:
        return self.version or self.format or GEMM


# AutoRound

NOT_QUANTIZED = 16  # bits
AWQ, GPTQ, GPTQ_MODEL = "awq", "gptq", "gptqmodel"  # in packing_format
UNSAID = ("", "auto")  # of packing_format and backend
OF_GPTQ = ("gptq", "exllama", "triton", "marlin")  # kernels in packing_format, all of which read GPTQ's layout
_MARKS = frozenset("*+?[](){}|^$\\")  # of a regular expression

Names = str | list[str | list[str]]


class AutoRoundSettings(msgspec.Struct, frozen=True):
    """The fields of quantization_config that count."""

    bits: int = 4
    group_size: int = 128
    sym: bool = True
    data_type: Word = Word("int")
    packing_format: Word = Word()
    backend: Word = Word()
    extra_config: dict[str, dict[str, Any] | None] = {}
    block_name_to_quantize: Names = []
    to_quant_block_names: Names = []

    def __post_init__(self) -> None:
        for key, rule in self.extra_config.items():
            if is_expression(key):
                check_expression("extra_config", key, key)
            check_rule("extra_config", key, self._stated | (rule or {}), AutoRoundSettings)
        if self.bits >= NOT_QUANTIZED:
            return
        group_of(self.group_size, self.bits)
        if self.data_type != "int":
            raise ValueError(f"data_type {self.data_type!r}: only int is supported")
        packing = self.packing
        if packing not in (*UNSAID, "auto_round") and not any(word in packing for word in (AWQ, *OF_GPTQ)):
            raise ValueError(f"packing_format {packing!r}: only layouts of GPTQ and AWQ are read")
        if AWQ in packing and self.bits != AWQ_BITS:
            raise ValueError(f"bits {self.bits}: weights of AWQ have {AWQ_BITS}")

    @property
    def packing(self) -> str:
        return self.packing_format or self.backend

    @property
    def _stated(self) -> dict[str, Any]:
        names = ("bits", "group_size", "sym", "data_type", "packing_format", "backend")
        return {name: getattr(self, name) for name in names}


def is_expression(key: str) -> bool:
    """Whether a key of extra_config is a regular expression, and no name."""
    return not _MARKS.isdisjoint(key)


# bitsandbytes

TABLES = ("nf4", "fp4")
STORAGES = ("uint8", "int8", "float16", "bfloat16", "float32")


class BitsAndBytesSettings(msgspec.Struct, frozen=True):
    """The fields of quantization_config that count."""

    load_in_4bit: bool = False
    load_in_8bit: bool = False  # neither: 4 bits
    bnb_4bit_quant_type: Word = Word("fp4")
    bnb_4bit_quant_storage: Word = Word("uint8")
    llm_int8_skip_modules: list[str] = []
    modules_to_not_convert: list[str] = []
    from_16_bits: bool = False  # the checkpoint is not quantized: see `shared.quantization.table`

    def __post_init__(self) -> None:
        if self.load_in_4bit and self.load_in_8bit:
            raise ValueError("load_in_4bit and load_in_8bit are both true")
        check_word("bnb_4bit_quant_type", self.bnb_4bit_quant_type, TABLES)
        check_word("bnb_4bit_quant_storage", self.bnb_4bit_quant_storage, STORAGES)
        check_names(
            llm_int8_skip_modules=self.llm_int8_skip_modules, modules_to_not_convert=self.modules_to_not_convert
        )


# HQQ

PARTS = {1: 8, 2: 4, 3: 10, 4: 2, 8: 1}  # bits -> integers of an element


class WeightParams(msgspec.Struct, frozen=True):
    """How integers are made of a matrix."""

    nbits: int = 4
    group_size: int | None = 64  # None: a row, or with axis 0 a column
    axis: int = 1
    channel_wise: bool = True

    def __post_init__(self) -> None:
        if self.nbits not in PARTS or self.axis not in (0, 1) or not self.channel_wise:
            raise ValueError(f"nbits {self.nbits}, axis {self.axis}, channel_wise {self.channel_wise}: not known")
        if self.group_size is not None and self.group_size < 1:
            raise ValueError(f"group_size {self.group_size}: 1 or more")


class QuantConfig(msgspec.Struct, frozen=True):
    """The settings of all matrices, or of some."""

    weight_quant_params: WeightParams
    scale_quant_params: None = None  # that are quantized themselves belong to releases before 0.2
    zero_quant_params: None = None


class HqqSettings(msgspec.Struct, frozen=True):
    """The fields of quantization_config that count."""

    quant_config: dict[str, Any] = {}
    skip_modules: list[str] = []

    def __post_init__(self) -> None:
        check_names(skip_modules=self.skip_modules)
        for tag, one in self._stated.items():
            check_rule("quant_config", tag, one, QuantConfig)

    @property
    def _stated(self) -> dict[str, Any]:
        """By tag; "": of all matrices."""
        said = self.quant_config
        return {"": said} if "weight_quant_params" in said else {tag: one for tag, one in said.items() if one}

    def params(self) -> dict[str, WeightParams]:
        """By tag; "": of all matrices."""
        stated = self._stated or {"": {"weight_quant_params": {}}}
        return {tag: convert(one, QuantConfig).weight_quant_params for tag, one in stated.items()}


# formats that are dequantized at load, and experts

SQUEEZELLM_BITS = (3, 4)
QQQ_BITS, QQQ_GROUP = 4, 128


class SqueezeLlmSettings(msgspec.Struct, frozen=True):
    """The fields of quantization_config that count."""

    wbits: int = 4

    def __post_init__(self) -> None:
        if self.wbits not in SQUEEZELLM_BITS:
            raise ValueError(f"wbits {self.wbits}: 3 and 4 are read")


class QqqSettings(msgspec.Struct, frozen=True):
    """The fields of quantization_config that count."""

    wbits: int = QQQ_BITS
    group_size: int = QQQ_GROUP

    def __post_init__(self) -> None:
        if self.wbits != QQQ_BITS or self.group_size not in (WHOLE_ROW, QQQ_GROUP):
            known = f"{QQQ_BITS}, and {WHOLE_ROW} or {QQQ_GROUP}"
            raise ValueError(f"wbits {self.wbits}, group_size {self.group_size}: {known}")


class AqlmSettings(msgspec.Struct, frozen=True):
    """The fields of quantization_config that count."""

    in_group_size: int = 8
    out_group_size: int = 1
    num_codebooks: int = 1
    nbits_per_codebook: int = 16
    linear_weights_not_to_quantize: list[str] = []

    def __post_init__(self) -> None:
        sizes = self.in_group_size, self.out_group_size, self.num_codebooks
        if min(sizes) < 1 or not 1 <= self.nbits_per_codebook <= 16:
            raise ValueError(f"groups {sizes[:2]}, {sizes[2]} codebooks of {self.nbits_per_codebook} bits: not known")
