"""Reads JSON that ends anywhere, as clients of a streamed call read its input so far."""

from typing import Any

import msgspec

MAX_DEPTH = 256  # deeper input is not read
CLOSERS = {"{": "}", "[": "]"}


def complete_object(text: str) -> msgspec.Raw:
    """The JSON object in `text`; of one that is cut off, the members and elements that are whole.

    Whatever else the text is, the object is empty, and so is one that is nested too deeply.
    """
    if _is_object(text):
        return msgspec.Raw(text.encode())
    for closed in _closed(text):
        if _is_object(closed):
            return msgspec.Raw(closed.encode())
    return msgspec.Raw(b"{}")


def _is_object(text: str) -> bool:
    try:
        msgspec.json.decode(text, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeEncodeError, RecursionError):
        return False
    return True


def _closed(text: str) -> tuple[str, str]:
    """Closes the open lists and objects: at the text's end, and behind its last string, list, object or number.

    Returns both texts. The first is JSON if the text ends with a whole value: a number so far is one.
    """
    opened: list[str] = []
    whole, closers = 0, ""
    is_key = False  # the next string is the key of a member
    place, end = 0, len(text)
    while place < end:
        char = text[place]
        if char == '"':
            place = _string_end(text, place)
            if place < 0:
                break
            if not is_key:
                whole, closers = place, _closers(opened)
            continue
        if char in "{[":
            if len(opened) == MAX_DEPTH:
                break
            opened.append(char)
            whole, closers = place + 1, _closers(opened)
        elif char in "]}" and opened:
            opened.pop()
            whole, closers = place + 1, _closers(opened)
        elif char == "," and text[place - 1] not in '"]}':
            whole, closers = place, _closers(opened)
        if char in "{,":
            is_key = bool(opened) and opened[-1] == "{"
        elif char in ":[":
            is_key = False
        place += 1
    return text + _closers(opened), text[:whole] + closers


def _string_end(text: str, start: int) -> int:
    """The place behind a string; -1 if it does not end."""
    place = start + 1
    while True:
        quote, escape = text.find('"', place), text.find("\\", place)
        if quote < 0:
            return -1
        if escape < 0 or quote < escape:
            return quote + 1
        place = escape + 2


def _closers(opened: list[str]) -> str:
    return "".join(CLOSERS[char] for char in reversed(opened))
