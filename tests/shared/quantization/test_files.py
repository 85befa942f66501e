"""Files beside config.json that say how weights are quantized, where config.json or another one says it, too."""

import json
from pathlib import Path
from typing import Any

import pytest

from blockyard.shared.errors import ConfigError
from blockyard.shared.quantization.files import read_quantization

GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32}
OLDER = {"quant_method": "GPTQ", "bits": "4", "group_size": 32.0, "damp_percent": 0.1}


def write(folder: Path, **files: dict[str, Any]) -> None:
    for name, said in files.items():
        (folder / f"{name}.json").write_text(json.dumps(said))


@pytest.mark.parametrize(
    ("said", "notes"),
    [
        (OLDER, []),
        ({"bits": 8, "group_size": 32}, ["quantize_config.json says bits 8, config.json 4; config.json counts"]),
        ({"wbits": 4}, ["quantize_config.json says squeezellm, config.json gptq; config.json counts"]),
        ({"bits": 5}, []),  # wrong by itself, and not read
    ],
)
def test_config_json_counts(tmp_path: Path, said: dict[str, Any], notes: list[str]) -> None:
    write(tmp_path, quantize_config=said)
    found = read_quantization(tmp_path, {"quantization_config": GPTQ})
    assert (found.said, found.notes) == ({}, notes)


def test_two_files_that_say_the_same(tmp_path: Path) -> None:
    write(tmp_path, quantize_config=GPTQ, quant_config=OLDER)
    found = read_quantization(tmp_path, {})
    assert (found.said, found.file) == (GPTQ, "quantize_config.json")


def test_two_files_that_differ_are_refused(tmp_path: Path) -> None:
    write(tmp_path, quantize_config=GPTQ, quant_config={"w_bit": 4, "q_group_size": 128})
    with pytest.raises(ConfigError, match=r"quant_config\.json says awq, quantize_config.json gptq; only one"):
        read_quantization(tmp_path, {})
