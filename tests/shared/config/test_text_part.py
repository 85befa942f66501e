"""The text part of a config.json, and where it says how weights are quantized."""

from typing import Any

import pytest

from blockyard.shared.config.text_part import text_part, text_patch
from blockyard.shared.errors import ConfigError

GPTQ = {"quant_method": "gptq", "bits": 4}
KEYS = ("quantization_config", "compression_config")


def config(key: str, whole: Any, text: Any) -> dict[str, Any]:
    return {"architectures": ["A"], key: whole, "text_config": {"hidden_size": 8, key: text}}


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize(
    ("whole", "text"), [(GPTQ, None), (None, GPTQ), (GPTQ, GPTQ), (GPTQ, {}), ({}, GPTQ), (GPTQ | {"sym": None}, GPTQ)]
)
def test_how_weights_are_quantized_may_stand_in_either_place(key: str, whole: Any, text: Any) -> None:
    found = text_part(config(key, whole, text))[key]
    assert {name: value for name, value in found.items() if value is not None} == GPTQ


@pytest.mark.parametrize("key", KEYS)
def test_both_places_must_say_the_same(key: str) -> None:
    with pytest.raises(ConfigError, match=rf"^config.json: {key} and text_config.{key} differ in bits: 4 and 8$"):
        text_part(config(key, GPTQ, GPTQ | {"bits": 8}))


def test_overrides_of_the_text_part() -> None:
    assert text_patch({"a": 1, "text_config": {"a": 2, "b": None}, "c": None}) == {"a": 1, "b": None, "c": None}
    assert text_patch({"a": None}) == {"a": None}
