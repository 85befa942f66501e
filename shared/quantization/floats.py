"""Settings of formats with floats of 8 and 4 bits."""

import msgspec

from blockyard.shared.quantization.reading import Word, check_names, check_word

DEEPSPEED = "deepspeedfp"
READ_BITS = 8  # of deepspeedfp


class Fp8Settings(msgspec.Struct, frozen=True):
    """The fields of quantization_config that count, also of deepspeedfp, whose checkpoints have 16 bits."""

    quant_method: Word = Word("fp8")
    activation_scheme: Word = Word("dynamic")
    weight_block_size: tuple[int, int] | None = None
    modules_to_not_convert: list[str] = []
    ignored_layers: list[str] = []
    activation_scale_ub: float | None = None
    bits: int = READ_BITS
    from_16_bits: bool = False  # the checkpoint is not quantized: see `shared.quantization.table`

    def __post_init__(self) -> None:
        check_word("activation_scheme", self.activation_scheme, ("dynamic", "static"))
        if self.weight_block_size is not None and min(self.weight_block_size) < 1:
            raise ValueError(f"weight_block_size {list(self.weight_block_size)}: sizes are 1 or more")
        if self.activation_scale_ub is not None and self.activation_scale_ub <= 0:
            raise ValueError(f"activation_scale_ub {self.activation_scale_ub}: a bound of scales is more than 0")
        if self.is_deepspeed and self.bits != READ_BITS:
            raise ValueError(f"bits {self.bits}: of {DEEPSPEED} only {READ_BITS} are read")
        check_names(modules_to_not_convert=self.modules_to_not_convert, ignored_layers=self.ignored_layers)

    @property
    def is_deepspeed(self) -> bool:
        return self.quant_method == DEEPSPEED

    @property
    def is_made_at_load(self) -> bool:
        return self.from_16_bits or self.is_deepspeed


# ModelOpt

FP8, FP8_ROWS, FP8_BLOCKS, MIXED = "fp8", "fp8_per_channel_per_token", "fp8_pb_wo", "mixed_precision"
NVFP4 = ("nvfp4", "w4a16_nvfp4")
READ = (FP8, FP8_ROWS, FP8_BLOCKS, *NVFP4, MIXED)
NV_GROUP = 16  # inputs of a scale of nvfp4


class Algorithm(msgspec.Struct, frozen=True):
    """How a matrix is quantized by ModelOpt."""

    quant_algo: Word | None = None  # None: it is not
    group_size: int = NV_GROUP

    def __post_init__(self) -> None:
        if self.quant_algo is not None:
            check_word("quant_algo", self.quant_algo.upper(), map(str.upper, READ))
        if self.quant_algo in NVFP4 and self.group_size != NV_GROUP:
            raise ValueError(f"group_size {self.group_size}: {self.quant_algo.upper()} has groups of {NV_GROUP}")


class ModelOptSettings(Algorithm, frozen=True):
    """The fields of quantization_config that count."""

    exclude_modules: list[str] = []
    ignore: list[str] = []
    modules_to_not_convert: list[str] = []
    quantized_layers: dict[str, Algorithm] = {}

    def __post_init__(self) -> None:
        super().__post_init__()
        check_names(
            exclude_modules=self.exclude_modules,
            ignore=self.ignore,
            modules_to_not_convert=self.modules_to_not_convert,
        )

    @property
    def left_out(self) -> list[str]:
        return [*self.exclude_modules, *self.ignore, *self.modules_to_not_convert]
