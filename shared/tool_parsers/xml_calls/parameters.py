"""Reads arguments that stand alone, as text and not as JSON, into the JSON object of a call.

The tool's schema says what such a text is. A string is the text itself, without quotes and escapes, and is yielded as
it comes; objects and lists are JSON, and are yielded as they come too. Where the schema allows a string and something
else, JSON of the other types counts as such, and all other text is a string.
"""

import json
from collections.abc import Callable, Sequence

from blockyard.shared.output_parsing.json_text import collected, escaped, json_value
from blockyard.shared.output_parsing.markers import Markers
from blockyard.shared.output_parsing.parts import Part, PartKind, Reading
from blockyard.shared.output_parsing.text_input import SPACES, TextInput
from blockyard.shared.tool_parsers.schema_types import NESTED, NUMBERS, type_of

MAX_SCALAR_CHARS = 4000
_NUMBER_CHARS = frozenset("+-.0123456789eE")
# templates of several families show Python's words in the history of a conversation
_WORDS = {"true": "boolean", "false": "boolean", "True": "boolean", "False": "boolean", "null": "null", "None": "null"}
_JSON_WORDS = {"True": "true", "False": "false", "None": "null"}


def _never(text: TextInput, mark: str) -> Reading[bool]:
    yield from ()
    return False


class ValueText:
    """The text of a value up to its closing tag. `padding` is what the format puts on either side of it.

    Models forget closing tags: a value ends before one of `later`, which stays unread, if `is_missing` says so there.
    A line break before such a tag is the layout's.
    """

    __slots__ = ("_end", "_ends", "_is_missing", "_later", "_padding", "_text_ends")

    def __init__(
        self,
        end: str,
        padding: str = "",
        later: Sequence[str] = (),
        is_missing: Callable[[TextInput, str], Reading[bool]] = _never,
    ) -> None:
        self._end, self._later, self._padding, self._is_missing = end, later, padding, is_missing
        self._ends = Markers(end, *later)
        unclosed = [before + one for before in ("", "\n", padding, padding + "\n") for one in later]
        self._text_ends = Markers(end, padding + end, *unclosed)

    def read(self, text: TextInput, types: frozenset[str]) -> Reading[bool]:
        """Yields the value as JSON of one of these types, and reads the closing tag. False if the text ends first."""
        if types != {"string"}:
            place = text.keep()
            yield from text.spaces()
            first = yield from text.peek()
            if first and first in "{[" and types & NESTED:
                if "string" not in types:
                    text.release()
                    return (yield from self._read_json(text))
                value = yield from self._whole_json(text, types)
            else:
                value = yield from self._scalar(text, types)
            if value is not None:
                text.release()
                yield Part(PartKind.ARGUMENTS, value)
                return (yield from self._ends_here(text))
            text.rewind(place)
        is_padded = (yield from text.literal(self._padding)) and bool(self._padding)
        yield Part(PartKind.ARGUMENTS, '"')
        is_whole = yield from self._read_text(text, escaped, in_lines=is_padded)
        if is_whole:
            yield Part(PartKind.ARGUMENTS, '"')
        return is_whole

    def _ends_here(self, text: TextInput) -> Reading[bool]:
        """Reads the closing tag. True, with nothing read, before a tag that shows that it is missing."""
        if (yield from text.literal(self._end)):
            return True
        found = yield from text.next_marker(self._ends)
        return bool(found) and (yield from self._is_missing(text, found))

    def _read_text(
        self, text: TextInput, encode: Callable[[str], str] | None = None, in_lines: bool = False
    ) -> Reading[bool]:
        """Yields text up to the end of the value. False if the text ends first. `in_lines`: tags begin lines."""
        while found := (yield from text.until(PartKind.ARGUMENTS, self._text_ends, encode)):
            if found.endswith(self._end):
                return True
            mark = next(one for one in self._later if found.endswith(one))
            text.back(len(mark))
            if (found != mark or not in_lines) and (yield from self._is_missing(text, mark)):
                return True
            text.skip(len(mark))
            yield Part(PartKind.ARGUMENTS, found if encode is None else encode(found))
        return False

    def _read_json(self, text: TextInput) -> Reading[bool]:
        yield from json_value(text, PartKind.ARGUMENTS, self._ends)
        place = text.keep()
        yield from text.spaces()
        if (yield from self._ends_here(text)):
            text.release()
            return True
        # the arguments are no JSON then, but the client sees what the model wrote
        text.rewind(place)
        return (yield from self._read_text(text))

    def _whole_json(self, text: TextInput, types: frozenset[str]) -> Reading[str | None]:
        """An object or list and the space behind it, if the value ends there."""
        value = yield from collected(json_value(text, PartKind.ARGUMENTS, self._ends))
        yield from text.spaces()
        if value is None or not _is_of(_decoded(value), types):
            return None
        found = yield from text.next_marker(self._ends)
        if found and found != self._end and not (yield from self._is_missing(text, found)):
            return None
        return value if found else None

    def _scalar(self, text: TextInput, types: frozenset[str]) -> Reading[str | None]:
        """A number or word and the space behind it, up to the end of the value or of the text."""
        words = [word for word, kind in _WORDS.items() if kind in types]
        is_number, is_over, raw = bool(types & NUMBERS), False, ""
        while not (found := (yield from text.next_marker(self._ends))):
            char = yield from text.peek()
            if not char:
                break
            if char in SPACES:
                is_over = True
            else:
                raw += char
                is_number = is_number and char in _NUMBER_CHARS
                words = [word for word in words if word.startswith(raw)] if words else words
                if is_over or len(raw) > MAX_SCALAR_CHARS or not (is_number or words):
                    return None
            text.skip(1)
        if found and found != self._end and not (yield from self._is_missing(text, found)):
            return None
        raw = _JSON_WORDS.get(raw, raw)
        return raw if _is_of(_decoded(raw), types) else None


def _decoded(raw: str) -> object:
    """The JSON value; the text itself if it is none, or a string."""
    try:
        value: object = json.loads(raw, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return raw
    return raw if isinstance(value, str) else value


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON")


def _is_of(value: object, types: frozenset[str]) -> bool:
    return not isinstance(value, str) and type_of(value) in types
