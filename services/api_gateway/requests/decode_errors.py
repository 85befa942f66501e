"""Finds the field that a decoder's error is about.

The error's text and the body come from the client, so plain string searches are used: each is linear in the length,
and a regular expression may not be.
"""

from blockyard.services.api_gateway.responses.error_body import ApiError

UNKNOWN, MISSING, AT = "unknown field `", "missing required field `", " - at `$"
MAX_CHARS = 300  # of the decoder's text in an answer; it holds the whole name of an unknown field
MAX_KEY_BYTES = 300


def invalid(text: str) -> ApiError:
    """The answer to JSON that does not fit the request's type. `text` is the decoder's."""
    said, at, path = text.rpartition(AT)
    if not at or not path.endswith("`"):
        said, path = text, ""
    field = path.removesuffix("`").removeprefix(".")
    for before in (UNKNOWN, MISSING):
        _, found, name = said.partition(before)
        if found:
            name = name.removesuffix("`")
            field = f"{field}.{name}" if field else name
    return ApiError(_shortened(text).replace("`$.", "`"), _shortened(field))


def byte_offset(text: str) -> int | None:
    """The number in `(byte 17)` of the decoder's text on malformed JSON."""
    number = text.rpartition("(byte ")[2].partition(")")[0]
    return int(number) if number.isascii() and number.isdigit() else None


def field_before(body: bytes, at: int) -> str:
    """The key whose value holds byte `at` of malformed JSON, or "" where no key directly precedes it."""
    window = body[max(0, at - MAX_KEY_BYTES) : at]
    end = window.rfind(b'"')
    if end < 1 or not window[end + 1 :].lstrip().startswith(b":"):
        return ""
    start = window.rfind(b'"', 0, end)
    while start > 0 and _is_escaped(window, start):
        start = window.rfind(b'"', 0, start)
    return window[start + 1 : end].decode("utf-8", "replace") if start >= 0 else ""


def _is_escaped(text: bytes, at: int) -> bool:
    """True if an odd number of backslashes stands before byte `at`."""
    before = text[:at]
    return (len(before) - len(before.rstrip(b"\\"))) % 2 == 1


def _shortened(text: str) -> str:
    half = MAX_CHARS // 2
    return text if len(text) <= MAX_CHARS else f"{text[:half]} ... {text[-half:]}"
