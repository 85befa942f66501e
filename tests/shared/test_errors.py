"""What the error of a request holds of a client's values."""

from blockyard.shared.errors import MAX_FIELD_CHARS, MAX_MESSAGE_CHARS, RequestError


def test_long_messages_and_fields_lose_their_middle() -> None:
    error = RequestError("begin " + "x" * 100_000 + " end", "messages[0]." + "y" * 100_000)
    assert str(error).startswith("begin ") and str(error).endswith(" end") and " ... " in str(error)
    assert len(str(error)) <= MAX_MESSAGE_CHARS + 5 and len(error.field) <= MAX_FIELD_CHARS + 5
    whole = RequestError("z" * MAX_MESSAGE_CHARS, "f")
    assert (str(whole), whole.field) == ("z" * MAX_MESSAGE_CHARS, "f")
