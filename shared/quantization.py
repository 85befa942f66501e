"""The table of quantization methods by name: which are read, which are other words for one, and why others are refused.

Names are as in --quantization and in `quant_method` of files. The flag's choices, --speculative-model-quantization
and FLAGS.md follow from the table; `gpu_worker.quantization.registry` has the format of each module.
"""

from collections.abc import Mapping
from typing import Any

import msgspec

from blockyard.shared.errors import ConfigError

GGUF = "gguf"
AT_LOAD = "dequantized at load"
FOREIGN = "needs hardware that this project does not support"
KEY, CONFIG = "quantization_config", "config.json"
_MOST_SHOWN = 80  # characters of a value
VENDOR = "intel/"  # in front of auto-round in older files
FP8, FP8_BLOCK, INT8, W4 = QUANTIZED_TO = ("fp8", "fp8-block", "int8", "w4")  # by `blockyard quantize`


class QuantizationName(msgspec.Struct, frozen=True):
    """One name. It is refused, or has a module, or is an alias of names that have one; some are both."""

    name: str
    module: str = ""  # of its format in `gpu_worker.quantization.formats`
    alias_of: tuple[str, ...] = ()  # names that files may have instead
    refused: str = ""  # why
    of_16_bits: Mapping[str, Any] | None = None  # quantization_config for a checkpoint that is not quantized
    refused_on_gpu: str = ""  # why
    note: str = ""  # what the name means here, where that is not plain


def _fp8(**more: Any) -> dict[str, Any]:
    return {"quant_method": "fp8", "from_16_bits": True, **more}


NF4 = {"quant_method": "bitsandbytes", "from_16_bits": True, "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}

TABLE = (
    QuantizationName("aqlm", module="aqlm", note=AT_LOAD),
    QuantizationName("auto-round", module="auto_round"),
    QuantizationName("awq", module="awq"),
    QuantizationName("awq_marlin", alias_of=("awq",)),
    QuantizationName("bitblas", refused="needs the kernels of BitBLAS; gptq reads the same weights"),
    QuantizationName("bitsandbytes", module="bitsandbytes", of_16_bits=NF4),
    QuantizationName("compressed-tensors", module="compressed_tensors"),
    QuantizationName(
        "deepspeedfp", module="fp8", alias_of=("fp8",), of_16_bits={"quant_method": "deepspeedfp"}, note="8 bits"
    ),
    QuantizationName(
        "experts_int8",
        module="experts_int8",
        of_16_bits={"quant_method": "experts_int8"},
        note="experts alone; inputs stay 16 bits",
    ),
    QuantizationName("fbgemm_fp8", module="fp8"),
    QuantizationName("fp8", module="fp8", of_16_bits=_fp8()),
    QuantizationName("fp8_per_block", alias_of=("fp8",), of_16_bits=_fp8(weight_block_size=[128, 128])),
    QuantizationName("fp8_per_tensor", alias_of=("fp8",), of_16_bits=_fp8(), note="scales are of rows"),
    QuantizationName(GGUF, module="gguf", of_16_bits={"quant_method": GGUF}, note="a .gguf file beside config.json"),
    QuantizationName("gptq", module="gptq"),
    QuantizationName("gptq_marlin", alias_of=("gptq",)),
    QuantizationName("gptq_marlin_24", refused="needs the sparse kernels of Marlin; gptq reads weights without gaps"),
    QuantizationName("hqq", module="hqq"),
    QuantizationName(
        "ipex",
        alias_of=(
            *("auto-round", "awq", "bitsandbytes", "compressed-tensors", "fbgemm_fp8", "fp8", "gptq"),
            *("hqq", "modelopt", "mxfp4", "quark"),
        ),
        refused_on_gpu="is for Intel's devices; leave the flag out, and the file says how it is read",
        note="on the CPU what the file says",
    ),
    QuantizationName("marlin", module="gptq", alias_of=("gptq",)),
    QuantizationName("modelopt", module="modelopt"),
    QuantizationName("modelopt_fp4", alias_of=("modelopt",)),
    QuantizationName("moe_wna16", alias_of=("gptq", "awq")),
    QuantizationName("mxfp4", module="mxfp4"),
    QuantizationName("neuron_quant", refused=FOREIGN),
    QuantizationName("ptpc_fp8", alias_of=("fp8",), of_16_bits=_fp8()),
    QuantizationName("qqq", module="qqq", note=AT_LOAD),
    QuantizationName("quark", module="quark"),
    QuantizationName("squeezellm", module="squeezellm", note=AT_LOAD),
    QuantizationName("torchao", refused="needs the kernels of torchao; fp8 quantizes a 16-bit checkpoint at load"),
    QuantizationName("tpu_int8", refused=FOREIGN),
)
NAMES = {one.name: one for one in TABLE}
READ = tuple(one.name for one in TABLE if one.module)  # values of `quant_method`


def refusals() -> dict[str, str]:
    """Names that are refused, with the reason."""
    return {one.name: one.refused for one in TABLE if one.refused}


def stated(said: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns quantization_config with the fields of the object in which ModelOpt has them."""
    inner = said.get("quantization")
    return {**said, **inner} if isinstance(inner, Mapping) else said


def _said_method(said: Mapping[str, Any]) -> Any:
    """The method by `quant_method`, or by what files without it have: those of ModelOpt name their producer, and older
    ones of bitsandbytes a number of bits."""
    producer, method = said.get("producer"), said.get("quant_method")
    if method is None and isinstance(producer, Mapping):
        return producer.get("name")
    if method is None and (said.get("load_in_4bit") or said.get("load_in_8bit")):
        return "bitsandbytes"
    return method


def _find_spelled(method: str) -> QuantizationName | None:
    """Files write names in any case, and with either dash."""
    spelled = method.strip().lower().removeprefix(VENDOR).replace("_", "-")
    return next((one for name, one in NAMES.items() if name.replace("_", "-") == spelled), None)


def quantization_method(config: Mapping[str, Any], file: str = CONFIG) -> QuantizationName | None:
    """Returns the method that quantization_config of config.json names. None: weights are not quantized.

    file: that has it. Raises ConfigError for a method that is refused or unknown, or not said.
    """
    said = config.get(KEY)
    if not said:
        return None
    method = _said_method(said) if isinstance(said, Mapping) else None
    found = _find_spelled(method) if isinstance(method, str) else None
    if found is not None and not found.module and found.of_16_bits is None and len(found.alias_of) == 1:
        found = NAMES[found.alias_of[0]]
    if found is not None and found.module:
        return found
    if not isinstance(said, Mapping):
        what = f"is {str(said)[:_MOST_SHOWN]!r}, and no object"
    elif method is None:
        what = "has no quant_method"
    else:
        refused = found.refused if found is not None else ""
        what = f"has quant_method {method!r}, which is {f'refused: {refused}' if refused else 'not supported'}"
    raise ConfigError(
        f"{file}: {KEY} {what}; supported: {', '.join(READ)}; without quantization: "
        f"""--hf-overrides '{{"{KEY}": null}}'"""
    )


def has_fp8_kv(said: Mapping[str, Any]) -> bool:
    """Whether quantization_config says that the KV cache has 8-bit floats: compressed-tensors' `kv_cache_scheme`, that
    of AutoFP8 and AMD, which is the word static, modelopt's `kv_cache_quant_algo`. Raises ConfigError for one that no
    pool has."""
    said = stated(said)
    scheme = said.get("kv_cache_scheme")
    if isinstance(scheme, Mapping):
        words = {key: str(value).lower() for key, value in scheme.items()}
        if words.get("strategy") == "attn_head":
            raise ConfigError(f"config.json: {KEY}: kv_cache_scheme has scales of heads; one scale of a layer is read")
        return words.get("num_bits") in ("8", "8.0") and words.get("type") == "float"
    if isinstance(scheme, str) and scheme.lower() == "static":
        return str(_said_method(said)).lower() == "fp8"
    algo = said.get("kv_cache_quant_algo")
    return isinstance(algo, str) and algo.upper() == "FP8"


def settle_quantization(asked: str, config: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Returns what is merged over config.json for a name of --quantization: nothing, or how a 16-bit checkpoint is
    quantized while it loads.

    config: with what other files of the checkpoint say. where: the flag in errors. Raises ConfigError for a name that
    is not the checkpoint's, and for what `quantization_method` refuses.
    """
    stored = quantization_method(config)
    one = NAMES[asked.lower()]
    if stored is not None:
        if stored.name not in (one.name, *one.alias_of):
            raise ConfigError(f"{where} {asked}: the checkpoint is quantized by {stored.name}; leave the flag out")
        return {}
    if one.of_16_bits is None:
        others = (other.name for other in TABLE if other.of_16_bits is not None and other.module)
        at_load = ", ".join(name for name in others if name != GGUF)
        raise ConfigError(f"{where} {asked}: the checkpoint is not quantized; while it loads it can be by: {at_load}")
    return {KEY: dict(one.of_16_bits)}
