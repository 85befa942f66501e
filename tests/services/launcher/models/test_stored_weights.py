"""What a launcher tells by the names of weight files and of their tensors, before any process is started."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from blockyard.services.launcher.models import model_files
from blockyard.services.launcher.models.stored_weights import find_quantized
from blockyard.shared.config import parsed_flags
from blockyard.shared.config.checkpoint import quantized_overrides
from blockyard.shared.config.parsed_flags import Values
from blockyard.shared.errors import ConfigError

PLAIN, PACKED = "model.layers.0.self_attn.q_proj.weight", "model.layers.0.self_attn.q_proj.qweight"
SCALES = "model.layers.0.self_attn.q_proj.SCB"


def write(folder: Path, *names: str, file: str = "model.safetensors", **config: Any) -> None:
    (folder / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"]} | config))
    if names:
        save_file({name: np.zeros(2, np.float16) for name in names}, folder / file)


def settle(folder: Path, *words: str) -> dict[str, Any]:
    values = Values(parsed_flags.from_command_line(["--model", str(folder), "--device", "cpu", *words])[0])
    return quantized_overrides(values, model_files.find(values))


def overriding(said: dict[str, Any] | None) -> tuple[str, str]:
    return "--hf-overrides", json.dumps({"quantization_config": said})


def test_quantized_weights_of_which_no_file_says_how(tmp_path: Path) -> None:
    write(tmp_path, PLAIN, PACKED)
    error = rf"checkpoint has quantized weights \({PACKED}\), and neither config\.json .* \"gptq\""
    for words in ((), ("-q", "fp8"), ("-q", "gptq"), overriding(None)):
        with pytest.raises(ConfigError, match=error):
            settle(tmp_path, *words)
    said = {"quant_method": "gptq", "bits": 4, "group_size": 128}
    assert settle(tmp_path, *overriding(said)) == {"quantization_config": said}
    assert settle(tmp_path, "--load-format", "dummy") == {}
    (tmp_path / "quantize_config.json").write_text(json.dumps(said))
    assert settle(tmp_path) == {"quantization_config": said}


def test_the_index_counts_and_other_files_do_not(tmp_path: Path) -> None:
    write(tmp_path, PACKED, file="consolidated.safetensors")
    assert find_quantized(tmp_path, "auto", []) is None
    write(tmp_path, PACKED, file="other.safetensors")
    assert find_quantized(tmp_path, "auto", []) == PACKED
    assert find_quantized(tmp_path, "auto", ["other*"]) is None
    assert find_quantized(tmp_path, "pt", []) is None
    write(tmp_path, PLAIN)
    assert find_quantized(tmp_path, "auto", []) == ""
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {PACKED: "other.safetensors"}}))
    assert find_quantized(tmp_path, "auto", []) == PACKED
    (tmp_path / "model.safetensors.index.json").write_text("[]")  # the worker says so
    assert find_quantized(tmp_path, "auto", []) is None


def test_a_gguf_file_that_is_asked_for(tmp_path: Path) -> None:
    write(tmp_path, PLAIN)
    for words in (("-q", "gguf"), ("--load-format", "gguf")):
        with pytest.raises(ConfigError, match=rf"{words[0]} gguf: {tmp_path} has no \.gguf file"):
            settle(tmp_path, *words)
    assert settle(tmp_path, "-q", "gguf", "--load-format", "dummy")
    (tmp_path / "model.gguf").touch()
    assert settle(tmp_path, "-q", "gguf") == {"quantization_config": {"quant_method": "gguf"}}


@pytest.mark.parametrize(
    "said",
    [{"load_in_8bit": True}, {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}],
)
def test_settings_of_bitsandbytes_quantize_16_bits_while_they_load(tmp_path: Path, said: dict[str, Any]) -> None:
    """As they do in transformers, whether the weights are known to have 16 bits or nothing says the opposite."""
    made = {"quantization_config": {**said, "quant_method": "bitsandbytes", "from_16_bits": True}}
    write(tmp_path)
    assert settle(tmp_path, *overriding(said), "--load-format", "dummy") == made
    write(tmp_path, PLAIN)
    assert settle(tmp_path, *overriding(said)) == settle(tmp_path, *overriding(said), "-q", "bitsandbytes") == made
    write(tmp_path, PLAIN, quantization_config=said)
    assert settle(tmp_path) == made
    write(tmp_path, PLAIN, SCALES, quantization_config=said)
    assert settle(tmp_path) == {}
