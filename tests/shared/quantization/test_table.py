"""The table of quantization names, from the command line and from `LLM`."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from blockyard.shared.config import parsed_flags, quantization_documents
from blockyard.shared.config.checkpoint import Checkpoint, file_format, quantized_overrides
from blockyard.shared.config.flags import FLAGS
from blockyard.shared.config.parsed_flags import Values
from blockyard.shared.errors import ConfigError
from blockyard.shared.quantization.files import read_quantization
from blockyard.shared.quantization.method import quantization_method
from blockyard.shared.quantization.table import NAMES, TABLE

README = Path(__file__).parents[3] / "services/gpu_worker/quantization/README.md"
LLAMA: dict[str, Any] = {"architectures": ["LlamaForCausalLM"]}


def values(*words: str) -> Values:
    return Values(parsed_flags.from_command_line(list(words))[0])


def overrides(config: dict[str, Any], *words: str, **others: Any) -> dict[str, Any]:
    checkpoint = Checkpoint(name="m", path=Path("m"), tokenizer_path=Path("m"), config=config, **others)
    return quantized_overrides(values(*words), checkpoint)


def quantized(method: str, **fields: Any) -> dict[str, Any]:
    return LLAMA | {"quantization_config": {"quant_method": method, **fields}}


def test_each_name_is_read_or_an_alias_or_refused() -> None:
    assert [one.name for one in TABLE] == sorted(one.name for one in TABLE)
    for one in TABLE:
        assert bool(one.module or one.alias_of) != bool(one.refused), one.name
        assert all(NAMES[other].module for other in one.alias_of)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("flag", ["quantization", "speculative-model-quantization"])
def test_the_flags_know_each_name(name: str, flag: str) -> None:
    known = FLAGS[flag]
    assert (name in known.choices) != (name in known.refused_values)
    assert known.refused_values.get(name, "") == NAMES[name].refused


@pytest.mark.parametrize("name", NAMES)
def test_each_name_from_the_command_line_and_from_python(name: str) -> None:
    from_python = partial(parsed_flags.from_mapping, {"quantization": name.upper()}, "")
    for given in (lambda: values("--quantization", name.upper()), lambda: Values(from_python())):
        if NAMES[name].refused:
            with pytest.raises(ConfigError, match=rf"quantization.* {name}: "):
                given()
        else:
            assert given()["quantization"] == name


def test_the_readme_has_each_name() -> None:
    document = README.read_text("utf-8")
    command = "blockyard flags --quantization --write services/gpu_worker/quantization/README.md"
    assert quantization_documents.TABLES.written_in(document) == document, f"run `{command}`"
    assert quantization_documents.markdown().count("\n| `") == len(NAMES)


def test_an_unknown_name() -> None:
    with pytest.raises(ConfigError, match=r"'fp9' is none of .*fp8"):
        values("--quantization", "fp9")


@pytest.mark.parametrize(
    ("asked", "stored"),
    [
        *(("fp8", "fp8"), ("ptpc_fp8", "fp8"), ("mxfp4", "mxfp4"), ("awq_marlin", "awq"), ("gptq_marlin", "gptq")),
        *(("marlin", "gptq"), ("marlin", "marlin"), ("moe_wna16", "awq"), ("moe_wna16", "gptq")),
    ],
)
def test_the_name_of_the_file_or_an_alias(asked: str, stored: str) -> None:
    assert overrides(quantized(stored), "-q", asked) == {}
    assert quantization_method(quantized(stored.upper())) == NAMES[stored]


def test_a_name_with_its_vendor() -> None:
    assert quantization_method(quantized("intel/auto-round")) == NAMES["auto-round"]


def test_ipex_is_what_the_file_says_on_the_cpu() -> None:
    assert overrides(quantized("fp8"), "-q", "ipex", "--device", "cpu") == {}
    with pytest.raises(ConfigError, match="-q ipex: is for Intel's devices"):
        overrides(quantized("fp8"), "-q", "ipex", "--device", "cuda")


def test_a_load_format_that_is_a_quantization() -> None:
    given = ["--load-format", "bitsandbytes"]
    assert overrides(LLAMA, *given) == overrides(LLAMA, "-q", "bitsandbytes") != {}
    assert overrides(LLAMA, *given, "-q", "bitsandbytes") != {}
    assert file_format(values(*given)) == "auto"
    assert file_format(values("--load-format", "pt")) == "pt"
    with pytest.raises(ConfigError, match="--load-format bitsandbytes and -q fp8: give one of them"):
        overrides(LLAMA, *given, "-q", "fp8")
    with pytest.raises(ConfigError, match="--load-format bitsandbytes: the checkpoint is quantized by fp8"):
        overrides(quantized("fp8"), *given)


def test_another_name_than_the_files() -> None:
    with pytest.raises(ConfigError, match="-q mxfp4: the checkpoint is quantized by fp8; leave the flag out"):
        overrides(quantized("fp8"), "-q", "mxfp4")


def test_a_checkpoint_that_is_not_quantized() -> None:
    assert overrides(LLAMA, "-q", "fp8_per_block") == {
        "quantization_config": {"quant_method": "fp8", "from_16_bits": True, "weight_block_size": [128, 128]}
    }
    with pytest.raises(ConfigError, match=r"-q mxfp4: the checkpoint is not quantized; .* can be by: .*fp8"):
        overrides(LLAMA, "-q", "mxfp4")
    assert overrides(LLAMA) == {}


@pytest.mark.parametrize(
    ("file", "said", "want"),
    [
        ("quantize_config.json", {"bits": 4, "group_size": 32}, {"quant_method": "gptq", "bits": 4, "group_size": 32}),
        ("quant_config.json", {"w_bit": 4}, {"quant_method": "awq", "w_bit": 4}),
        ("quant_config.json", {"wbits": 4}, {"quant_method": "squeezellm", "wbits": 4}),
        (
            "quantize_config.json",
            {"wbits": 4, "group_size": -1},
            {"quant_method": "qqq", "wbits": 4, "group_size": -1},
        ),
        (
            "hf_quant_config.json",
            {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8"}},
            {"quant_method": "modelopt", "quant_algo": "FP8"},
        ),
    ],
)
def test_files_beside_config_json(tmp_path: Path, file: str, said: dict[str, Any], want: dict[str, Any]) -> None:
    (tmp_path / file).write_text(json.dumps(said))
    assert read_quantization(tmp_path, LLAMA).said == want
    assert read_quantization(tmp_path, quantized("fp8")).said == {}, "config.json counts"
    assert read_quantization(tmp_path / "none", LLAMA | {"compression_config": {"format": "dense"}}).said == {
        "quant_method": "compressed-tensors",
        "format": "dense",
    }


def test_what_another_file_says_is_merged_with_overrides() -> None:
    fields = {"quant_method": "fp8", "activation_scheme": "static"}
    assert overrides(LLAMA, quantization=fields) == {"quantization_config": fields}
    given = '{"quantization_config": {"activation_scheme": "dynamic"}}'
    assert overrides(LLAMA, "--hf-overrides", given, quantization=fields) == {
        "quantization_config": {"quant_method": "fp8", "activation_scheme": "dynamic"}
    }
    assert overrides(LLAMA, "--hf-overrides", '{"quantization_config": null}', quantization=fields) == {
        "quantization_config": None
    }


@pytest.mark.parametrize(
    ("stored", "read"), [("gptq_marlin", "gptq"), ("awq_marlin", "awq"), ("modelopt_fp4", "modelopt")]
)
def test_files_may_have_a_name_that_stands_for_another(stored: str, read: str) -> None:
    assert quantization_method(quantized(stored)) == NAMES[read]
    assert overrides(quantized(stored), "-q", read) == overrides(quantized(stored), "-q", stored) == {}
