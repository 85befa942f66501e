"""Errors of requests."""

import pytest

from blockyard.shared.errors import MAX_CHARS, RequestError


@pytest.mark.parametrize("length", [0, 10, MAX_CHARS, MAX_CHARS + 1, 100_000])
def test_a_message_and_its_field_are_bounded_and_keep_their_ends(length: int) -> None:
    text = ("a" * length + "the end")[-length:] if length else ""
    error = RequestError(text, text)
    assert len(str(error)) <= MAX_CHARS + 40 and len(error.field) <= MAX_CHARS + 40
    assert str(error)[-5:] == text[-5:]
    assert (str(error) == text) is (length <= MAX_CHARS)
