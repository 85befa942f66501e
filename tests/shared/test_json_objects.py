"""JSON files of model folders, with what Python's `json` and transformers write besides JSON."""

import json
import math
from pathlib import Path

import pytest

from blockyard.shared.chat_template_files import json_object
from blockyard.shared.json_objects import decode_object


def test_numbers_that_json_lacks(tmp_path: Path) -> None:
    found = decode_object(b'{"a": [0.0, Infinity, -Infinity], "b": {"c": NaN}}')
    assert found["a"] == [0.0, math.inf, -math.inf]
    assert math.isnan(found["b"]["c"])
    (tmp_path / "tokenizer_config.json").write_text('{"model_max_length": Infinity}')
    assert json_object(tmp_path / "tokenizer_config.json") == {"model_max_length": math.inf}


def test_tags_of_transformers() -> None:
    tagged = {"a": [{"__float__": "Infinity"}], "b": {"__float__": "-Infinity"}, "c": {"__float__": "x"}, "d": 1}
    assert decode_object(json.dumps(tagged).encode()) == {
        "a": [math.inf],
        "b": -math.inf,
        "c": {"__float__": "x"},
        "d": 1,
    }


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b"[Infinity]", b"NaN", b'{"a": Inf}', b"\xff{}", b"[" * 100_000])
def test_other_files_are_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        decode_object(data)
