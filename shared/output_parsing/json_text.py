"""Reads JSON out of text that arrives in pieces: values as they come, and short strings as a whole."""

import msgspec

from blockyard.shared.output_parsing.markers import Markers
from blockyard.shared.output_parsing.parts import Part, PartKind, Reading
from blockyard.shared.output_parsing.text_input import SPACES, TextInput

MAX_NAME_CHARS = 256  # of a tool's name or a key that a format knows
PIECE = 1 << 14  # characters that are looked at together
_STRING_STOPS = Markers('"', "\\")
_BEHIND_SCALAR = ",]}" + SPACES
_STRING_SPACES = Markers(" ", "\t", "\n", "\r", "\\t", "\\n", "\\r")
_NO_ARGUMENTS_IN_STRING = Markers('"', 'null"')


def json_string(text: TextInput, limit: int = MAX_NAME_CHARS) -> Reading[str | None]:
    """Reads a JSON string of at most `limit` characters and returns its value.

    None if something else follows; part of it may then be read.
    """
    if not (yield from text.literal('"')):
        return None
    raw = '"'
    while len(raw) <= limit:
        char = yield from text.peek()
        if not char:
            return None
        if char == "\\":
            char = yield from text.peek(2)
        text.skip(len(char))
        raw += char
        if char == '"':
            return _decoded(raw)
    return None


def collected(value: Reading[bool], limit: int | None = None) -> Reading[str | None]:
    """Reads a value without yielding it. Returns its text; None if it is not whole, or above `limit` characters."""
    pieces: list[str] = []
    num_chars = 0
    while True:
        try:
            part = next(value)
        except StopIteration as end:
            return "".join(pieces) if end.value else None
        if part is None:
            yield None
        else:
            pieces.append(part.text)
            num_chars += len(part.text)
            if limit is not None and num_chars > limit:
                return None


def escaped(text: str) -> str:
    return msgspec.json.encode(text)[1:-1].decode()


def json_value(text: TextInput, kind: PartKind, ends: Markers | None = None) -> Reading[bool]:
    """Yields one JSON value, character for character, as parts of this kind.

    True if the value is whole: brackets and quotes close. One of `ends` outside of strings ends a value too, which is
    then not whole, and stays unread. Whether text between brackets is JSON is not checked.
    """
    first = yield from text.peek()
    if first in ("{", "[", '"'):
        return (yield from _nested(text, kind, ends))
    while True:
        char = yield from text.peek()
        if not char or char in _BEHIND_SCALAR or (yield from _ends_here(text, ends)):
            return bool(first) and first not in _BEHIND_SCALAR
        yield from text.emit(kind, 1)


def _nested(text: TextInput, kind: PartKind, ends: Markers | None) -> Reading[bool]:
    scan = _Brackets()
    while True:
        data = text.unread(PIECE)
        if not data:
            if text.ended:
                return False
            yield None
            continue
        if scan.is_text(data):  # nearly all pieces of long arguments
            yield from text.emit(kind, len(data))
            continue
        count = 0
        for char in data:
            if ends is not None and not scan.in_string and ends.may_start_with(char):
                break
            count += 1
            scan.read(char)
            if scan.closed:
                break
        yield from text.emit(kind, count)
        if not scan.closed and count < len(data):  # at a character that may begin a marker
            if (yield from _ends_here(text, ends)):
                return False
            scan.read(data[count])
            yield from text.emit(kind, 1)
        if scan.closed:
            return True


class _Brackets:
    """Where a value between brackets or quotes closes."""

    __slots__ = ("_depth", "_is_escaped", "closed", "in_string")

    def __init__(self) -> None:
        self.in_string = self.closed = self._is_escaped = False
        self._depth = 0

    def is_text(self, data: str) -> bool:
        """Whether all of this stands inside of a string, which goes on behind it."""
        return self.in_string and not self._is_escaped and '"' not in data and "\\" not in data

    def read(self, char: str) -> None:
        if self._is_escaped:
            self._is_escaped = False
        elif self.in_string:
            if char == "\\":
                self._is_escaped = True
            elif char == '"':
                self.in_string, self.closed = False, self._depth == 0
        elif char == '"':
            self.in_string = True
        elif char in "{[":
            self._depth += 1
        elif char in "}]":
            self._depth -= 1
            self.closed = self._depth == 0


def object_value(text: TextInput, kind: PartKind, ends: Markers | None = None) -> Reading[Reading[bool] | None]:
    """Looks at the JSON value that follows, which is to be an object. Returns what yields it, `json_value` mostly.

    null, and a string of nothing or of null, is an empty object. A string with an object in it is that object: some
    models write the object as the text of a string. Other JSON is yielded as it is. None, with nothing read, for text
    that is no JSON.
    """
    first = yield from text.peek()
    if first == '"':
        place = text.keep()
        text.skip(1)
        while (yield from text.one_of(_STRING_SPACES)):
            pass
        is_empty = bool((yield from text.one_of(_NO_ARGUMENTS_IN_STRING)))
        is_object = (yield from text.peek()) == "{"
        if is_empty:
            text.release()
            return empty_object(kind)
        text.rewind(place)
        return string_value(text, kind) if is_object else json_value(text, kind, ends)
    if not first or first in "{[":
        return json_value(text, kind, ends)
    place = text.keep()
    raw = yield from collected(json_value(text, kind, ends), MAX_NAME_CHARS)
    if raw in ("null", "None"):
        text.release()
        return empty_object(kind)
    text.rewind(place)
    return json_value(text, kind, ends) if raw is not None and _is_json(raw) else None


def empty_object(kind: PartKind) -> Reading[bool]:
    """Yields {}, as the value of arguments that were left out."""
    yield Part(kind, "{}")
    return True


def string_value(text: TextInput, kind: PartKind) -> Reading[bool]:
    """Yields the value of a JSON string, without quotes and escapes, as it comes. True if its end was read."""
    if not (yield from text.literal('"')):
        return False
    while True:
        found = yield from text.until(kind, _STRING_STOPS)
        if found != "\\":
            return found == '"'
        yield from _escape(text, kind)


def _escape(text: TextInput, kind: PartKind) -> Reading[None]:
    """Reads what follows a backslash: an escape, two of UTF-16, or text that is neither, which is yielded as it is."""
    code = yield from text.peek()
    raw = "\\" + ((yield from text.peek(5)) if code == "u" else code)
    text.skip(len(raw) - 1)
    if _is_high_surrogate(raw):
        second = yield from text.peek(6)
        if _decoded(f'"{raw}{second}"') is not None:
            text.skip(len(second))
            raw += second
    value = _decoded(f'"{raw}"')
    yield Part(kind, raw if value is None else value)


def _is_high_surrogate(raw: str) -> bool:
    return len(raw) == 6 and raw[2] in "dD" and raw[3] in "89abAB"


def _ends_here(text: TextInput, ends: Markers | None) -> Reading[bool]:
    return ends is not None and bool((yield from text.next_marker(ends)))


def _is_json(raw: str) -> bool:
    try:
        msgspec.json.decode(raw, type=msgspec.Raw)  # also numbers that no float holds
    except (msgspec.DecodeError, UnicodeError):
        return False
    return True


def _decoded(raw: str) -> str | None:
    try:
        return msgspec.json.decode(raw, type=str)
    except (msgspec.DecodeError, UnicodeError):
        return None
