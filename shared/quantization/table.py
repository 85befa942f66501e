"""The table of quantization methods by name: which are read, which are other words for one, and why others are refused.

Names are as in --quantization and in `quant_method` of files. The flag's choices, --speculative-model-quantization,
FLAGS.md and the table in services/gpu_worker/quantization/README.md follow from it, and so does what the launcher
refuses and what a worker reads by a name: modules and settings are found by it alone.
"""

from collections.abc import Mapping
from typing import Any

import msgspec

from blockyard.shared.quantization import floats, groups, integers
from blockyard.shared.quantization.reading import LeftOutNames, NoSettings

BITSANDBYTES, GGUF = "bitsandbytes", "gguf"
AT_LOAD = "dequantized at load"
FOREIGN = "needs hardware that this project does not support"
FP8, FP8_BLOCK, INT8, W4 = QUANTIZED_TO = ("fp8", "fp8-block", "int8", "w4")  # by `blockyard quantize`


class QuantizationName(msgspec.Struct, frozen=True):
    """One name. It is refused, or files have it, or it is an alias of names that files have; some are both."""

    name: str
    settings: type[msgspec.Struct] | None = None  # fields of quantization_config that its format reads; None: no file
    format_of: str = ""  # the name that has its format, if it is another
    alias_of: tuple[str, ...] = ()  # names that files may have instead
    refused: str = ""  # why
    # quantization_config of a checkpoint that is not quantized, with `quant_method` where that is another; None: it
    # cannot be quantized while it loads
    of_16_bits: Mapping[str, Any] | None = None
    refused_on_gpu: str = ""  # why
    note: str = ""  # what the name means here, where that is not plain

    @property
    def module(self) -> str:
        """Of its format in `gpu_worker.quantization.formats`, by text because that imports torch; "": none."""
        return "" if self.settings is None else (self.format_of or self.name).replace("-", "_")


def _fp8(**more: Any) -> dict[str, Any]:
    return {"quant_method": "fp8", "from_16_bits": True, **more}


NF4 = {"quant_method": BITSANDBYTES, "from_16_bits": True, "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}

TABLE = (
    QuantizationName("aqlm", integers.AqlmSettings, note=AT_LOAD),
    QuantizationName("auto-round", integers.AutoRoundSettings),
    QuantizationName("awq", integers.AwqSettings),
    QuantizationName("awq_marlin", alias_of=("awq",)),
    QuantizationName("bitblas", refused="needs the kernels of BitBLAS; gptq reads the same weights"),
    QuantizationName(BITSANDBYTES, integers.BitsAndBytesSettings, of_16_bits=NF4),
    QuantizationName("compressed-tensors", groups.CompressedSettings),
    QuantizationName(
        "deepspeedfp", floats.Fp8Settings, format_of="fp8", alias_of=("fp8",), of_16_bits={}, note="8 bits"
    ),
    QuantizationName("experts_int8", LeftOutNames, of_16_bits={}, note="experts alone; inputs stay 16 bits"),
    QuantizationName("fbgemm_fp8", floats.Fp8Settings, format_of="fp8"),
    QuantizationName("fp8", floats.Fp8Settings, of_16_bits=_fp8()),
    QuantizationName("fp8_per_block", alias_of=("fp8",), of_16_bits=_fp8(weight_block_size=[128, 128])),
    QuantizationName("fp8_per_tensor", alias_of=("fp8",), of_16_bits=_fp8(), note="scales are of rows"),
    QuantizationName(GGUF, NoSettings, of_16_bits={}, note="a .gguf file beside config.json"),
    QuantizationName("gptq", integers.GptqSettings),
    QuantizationName("gptq_marlin", alias_of=("gptq",)),
    QuantizationName("gptq_marlin_24", refused="needs the sparse kernels of Marlin; gptq reads weights without gaps"),
    QuantizationName("hqq", integers.HqqSettings),
    QuantizationName(
        "ipex",
        alias_of=(
            *("auto-round", "awq", "bitsandbytes", "compressed-tensors", "fbgemm_fp8", "fp8", "gptq"),
            *("hqq", "modelopt", "mxfp4", "quark"),
        ),
        refused_on_gpu="is for Intel's devices; leave the flag out, and the file says how it is read",
        note="on the CPU what the file says",
    ),
    QuantizationName("marlin", integers.GptqSettings, format_of="gptq", alias_of=("gptq",)),
    QuantizationName("modelopt", floats.ModelOptSettings),
    QuantizationName("modelopt_fp4", alias_of=("modelopt",)),
    QuantizationName("moe_wna16", alias_of=("gptq", "awq")),
    QuantizationName("mxfp4", LeftOutNames),
    QuantizationName("neuron_quant", refused=FOREIGN),
    QuantizationName("ptpc_fp8", alias_of=("fp8",), of_16_bits=_fp8()),
    QuantizationName("qqq", integers.QqqSettings, note=AT_LOAD),
    QuantizationName("quark", groups.QuarkSettings),
    QuantizationName("squeezellm", integers.SqueezeLlmSettings, note=AT_LOAD),
    QuantizationName("torchao", refused="needs the kernels of torchao; fp8 quantizes a 16-bit checkpoint at load"),
    QuantizationName("tpu_int8", refused=FOREIGN),
)
NAMES = {one.name: one for one in TABLE}
READ = tuple(one.name for one in TABLE if one.module)  # values of `quant_method`


def refusals() -> dict[str, str]:
    """Names that are refused, with the reason."""
    return {one.name: one.refused for one in TABLE if one.refused}
