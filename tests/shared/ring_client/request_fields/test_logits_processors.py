"""Which logits processors a request may name."""

import pytest

from blockyard.shared.errors import RequestError
from blockyard.shared.messages import LogitsProcessor
from blockyard.shared.ring_client.request_fields.logits_processors import read_logits_processors


def test_names_with_and_without_arguments() -> None:
    value = ["own.first", {"qualname": "own.Second", "args": [1, "a"], "kwargs": {"b": None}}]
    assert read_logits_processors(value, r"own\..*", ["all.requests"]) == [
        LogitsProcessor("all.requests"),
        LogitsProcessor("own.first"),
        LogitsProcessor("own.Second", b'[1,"a"]', b'{"b":null}'),
    ]
    assert read_logits_processors(None, "", []) == read_logits_processors([], "", []) == []


@pytest.mark.parametrize(
    ("value", "pattern"),
    [
        (["os.system"], ""),
        (["os.system"], r"own\..*"),
        (["own.first.evil"], r"own\.first"),  # the whole name has to match
        ([5], ".*"),
        ("own.first", ".*"),
        ([{"name": "own.first"}], ".*"),
        (["own.first"] * 17, ".*"),
        ([{"qualname": "own.first", "args": ["a" * 70000]}], ".*"),
    ],
)
def test_refused(value: object, pattern: str) -> None:
    with pytest.raises(RequestError) as caught:
        read_logits_processors(value, pattern, [])
    assert caught.value.field == "logits_processors"
