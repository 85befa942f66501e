"""What quantization_config may say: spellings, types and refusals, before any process is started.

compressed-tensors and transformers judge what a spelling means; configs that no package reads are refused in one line.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from compressed_tensors.quantization import QuantizationArgs
from transformers import AwqConfig, GPTQConfig

from blockyard.services.launcher.models import model_files
from blockyard.shared.config import parsed_flags
from blockyard.shared.config.parsed_flags import Values
from blockyard.shared.errors import ConfigError
from blockyard.shared.quantization.groups import CompressedSettings, NumberArgs
from blockyard.shared.quantization.integers import AwqSettings, GptqSettings
from blockyard.shared.quantization.method import check_quantization
from blockyard.shared.quantization.reading import convert

LLAMA = {"architectures": ["LlamaForCausalLM"]}
WEIGHTS = {"num_bits": 4, "group_size": 32}
NONE: Mapping[str, Any] = {}
IN_GROUP = r"config_groups\['group_0'\]"


def compressed(fields: Mapping[str, Any] = NONE, group: Mapping[str, Any] = NONE, **weights: Any) -> dict[str, Any]:
    groups = {
        "other": {"targets": ["re:.*o_proj"], "weights": WEIGHTS, "format": "pack-quantized"},
        "group_0": {"targets": ["Linear"], "weights": WEIGHTS | weights, **group},
    }
    return {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": groups, **fields}


def check_config(said: Any) -> None:
    check_quantization({"quantization_config": said})


@pytest.mark.parametrize(
    "fields",
    [
        *({"num_bits": "4"}, {"num_bits": 4.0}, {"symmetric": "true"}, {"symmetric": "False"}, {"type": "INT"}),
        *({"type": "Float"}, {"strategy": "GROUP", "group_size": 32}, {"strategy": "Channel"}, {"group_size": 32.0}),
        {"group_size": -1},
    ],
)
def test_numbers_mean_what_they_mean_to_compressed_tensors(fields: dict[str, Any]) -> None:
    theirs, mine = QuantizationArgs(**fields), convert(fields, NumberArgs)
    assert (mine.num_bits, mine.type, mine.symmetric) == (theirs.num_bits, theirs.type, theirs.symmetric)
    assert (mine.kind, mine.group_size) == (theirs.strategy, theirs.group_size)


@pytest.mark.parametrize("said", ["24x40", [24, 40]])
def test_blocks_mean_what_they_mean_to_compressed_tensors(said: Any) -> None:
    theirs = QuantizationArgs(strategy="block", block_structure=said)
    assert list(convert({"strategy": "block", "block_structure": said}, NumberArgs).block) == theirs.block_structure


@pytest.mark.parametrize("said", [None, False, "static", "weight"])
def test_an_order_that_compressed_tensors_still_reads_is_none_of_inputs(said: Any) -> None:
    assert QuantizationArgs(group_size=32, actorder=said).actorder in (None, "static", "weight")
    assert not convert({"actorder": said}, NumberArgs).has_order


@pytest.mark.parametrize("name", ["checkpoint_format", "format"])
def test_gptq_formats_are_those_of_transformers(name: str) -> None:
    for said in ("GPTQ", "gptq_v2", "Gptq_V2"):
        fields = {"bits": 4, name: said}
        assert convert(fields, GptqSettings).layout == GPTQConfig(**fields).format


def test_awq_versions_are_those_of_transformers() -> None:
    for fields in ({"version": "GEMM"}, {"version": "Gemv_Fast"}, {"format": "gemv"}, {}):
        assert convert(fields, AwqSettings).packing == AwqConfig(**fields).format


@pytest.mark.parametrize(
    "said",
    [
        *({"quant_method": "GPTQ"}, {"quant_method": "Intel/Auto-Round"}, {"quant_method": "auto_round"}),
        *(compressed({"quant_method": word}) for word in ("Compressed-Tensors", "compressed_tensors")),
        {"quant_method": "gptq", "bits": "4", "group_size": 32.0, "sym": "true", "desc_act": None, "dynamic": None},
        {"quant_method": "gptq", "dynamic": {"-:.*visual.*": None, r"+:.*\.0\..*": {"bits": "8"}}},
        {"quant_method": "gptq", "meta": {"quantizer": ["x"]}, "damp_percent": 0.1, "tokenizer": None},
        {"quant_method": "awq", "bits": None, "w_bit": 4, "version": None, "zero_point": "True"},
        compressed({"format": "Pack-Quantized", "ignore": None, "sparsity_config": {}, "kv_cache_scheme": None}),
        compressed({"format": None}, {"format": "PACK-quantized"}),
        compressed(dynamic="false", observer=None),
        {"load_in_4bit": True, "bnb_4bit_quant_type": "NF4"},
        {"quant_method": "fp8", "activation_scheme": "Static", "weight_block_size": None},
        {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "fp8", "kv_cache_quant_algo": None}},
        {"quant_method": "deepspeedfp", "bits": 8, "group_size": 512},
        {"quant_method": "hqq", "quant_config": {"weight_quant_params": {"nbits": "4", "group_size": None}}},
        {"quant_method": "quark", "global_quant_config": {"weight": {"dtype": "INT8", "qscheme": None}}},
        *({}, None),
    ],
)
def test_other_spellings_are_read(said: Any) -> None:
    check_config(said)


@pytest.mark.parametrize(
    ("said", "error"),
    [
        *(
            ("gptq", "is 'gptq', and no object"),
            ([4], r"is '\[4\]', and no object"),
            ({"bits": 4}, "has no quant_method"),
        ),
        ({"quant_method": ""}, "has quant_method '', which is not supported"),
        ({"quant_method": "gptq", "bits": 4.5}, "bits is 4.5: Expected `int`"),
        ({"quant_method": "gptq", "bits": "four"}, 'bits is "four": Expected `int`'),
        ({"quant_method": "gptq", "sym": "maybe"}, 'sym is "maybe": Expected `bool`'),
        ({"quant_method": "gptq", "format": "bitblas"}, "checkpoint_format 'bitblas' is none of gptq"),
        ({"quant_method": "gptq", "dynamic": {"+:a": {"bits": 7}}}, r"dynamic '\+:a': bits 7 is none of"),
        ({"quant_method": "gptq", "dynamic": {"-:(": {}}}, r"dynamic '-:\(' is not a regular expression"),
        ({"quant_method": "gptq", "dynamic": ["a"]}, r'dynamic is \["a"\]: Expected `object`'),
        ({"quant_method": "awq", "version": "exllama"}, "version 'exllama' is none of gemm"),
        ({"quant_method": "awq", "modules_to_not_convert": ["re:("]}, r"modules_to_not_convert 're:\(' is not a reg"),
        (compressed(num_bits="x"), IN_GROUP + r'\.weights\.num_bits is "x": Expected `int`'),
        (compressed(symmetric=None), IN_GROUP + r"\.weights\.symmetric is null"),
        (compressed(dynamic="often"), IN_GROUP + r"\.weights: dynamic 'often' is none of true, false, local"),
        (
            compressed(strategy="block", block_structure="128"),
            IN_GROUP + r"\.weights: block_structure '128': blocks",
        ),
        (compressed({"format": "pack_quantized"}), "format 'pack_quantized' is none of pack-quantized"),
        (
            compressed({"config_groups": {"W4.A16": ["Linear"]}}),
            r"config_groups\['W4.A16'\] is \[\"Linear\"\]: Expected",
        ),
        (compressed({"ignore": "lm_head"}), 'ignore is "lm_head": Expected `array`'),
        ({"quant_method": "bitsandbytes", "bnb_4bit_quant_type": "nf8"}, "bnb_4bit_quant_type 'nf8' is none of nf4"),
        ({"quant_method": "fp8", "weight_block_size": ["a", 1]}, r'weight_block_size\[0\] is "a": Expected `int`'),
        *(({"quant_method": "deepspeedfp", "bits": n}, f"bits {n}: of deepspeedfp only 8 are") for n in (6, 12)),
        ({"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}, "quant_algo 'W4A8_AWQ' is none of FP8"),
        ({"quant_method": "hqq", "quant_config": {"q_proj": "4bit"}}, "quant_config 'q_proj': \"4bit\" is no object"),
        (
            {"quant_method": "hqq", "quant_config": {"weight_quant_params": {"nbits": 5}}},
            "quant_config: weight_quant_params: nbits 5, ",
        ),
        (
            {"quant_method": "quark", "layer_quant_config": {"*q_proj": {"weight": {"dtype": "int3"}}}},
            r"layer_quant_config\['\*q_proj'\]: weight: dtype 'int3' is none of",
        ),
        (
            {"quant_method": "auto-round", "extra_config": {"lm_head": {"bits": 5}}},
            "extra_config 'lm_head': bits 5 is none of",
        ),
    ],
)
def test_a_refusal_is_one_line_with_file_field_and_value(said: Any, error: str) -> None:
    with pytest.raises(ConfigError, match=rf"^config\.json: quantization_config:? {error}[^\n]*$"):
        check_config(said)


def test_the_launcher_refuses_before_it_starts_a_process(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    (tmp_path / "quantize_config.json").write_text(json.dumps({"bits": 5}))
    values = Values(parsed_flags.from_command_line(["--model", str(tmp_path)])[0])
    with pytest.raises(ConfigError, match=r"^quantize_config\.json: bits 5 is none of 2, 3, 4, 8$"):
        model_files.find(values)


def test_the_format_of_a_group_counts_before_that_of_all() -> None:
    read = convert(compressed({"format": "dense"}, {"format": "Int-Quantized"}), CompressedSettings)
    assert read.format_of("group_0") == "int-quantized"
