"""Reads arguments that stand alone, as text and not as JSON, into the JSON object of a call.

The tool's schema says what such a text is. A string is the text itself, without quotes and escapes, and is yielded as
it comes. Objects and lists are JSON or literals of Python, are written as JSON, and are yielded as they come too if
they begin like JSON; others wait for their end, and are strings if they are no literals. Where the schema allows a
string and something else, JSON of the other types counts as such, and all other text is a string.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace

from blockyard.shared.output_parsing.json_text import collected, escaped, json_value
from blockyard.shared.output_parsing.markers import Markers
from blockyard.shared.output_parsing.parts import Part, PartKind, Reading
from blockyard.shared.output_parsing.text_input import SPACES, TextInput
from blockyard.shared.tool_parsers.nested_values import ValueReader
from blockyard.shared.tool_parsers.python_calls.literals import NOTATION, json_of_word
from blockyard.shared.tool_parsers.schema_types import NESTED, NUMBERS, type_of

MAX_SCALAR_CHARS = 4000
_NUMBER_CHARS = frozenset("+-.0123456789eE")
# templates of several families show Python's words in the history of a conversation
_WORDS = {"true": "boolean", "false": "boolean", "True": "boolean", "False": "boolean", "null": "null", "None": "null"}
_BEHIND_BRACKET = {"{": '"}', "[": '"]-0123456789tfn'}  # of JSON
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
            if first and first in "{[(" and types & NESTED and "string" not in types:
                if (yield from _begins_like_json(text)):
                    text.release()
                    return (yield from self._read_json(text))
                value = yield from self._whole_literal(text)
            elif first and first in "{[" and types & NESTED:
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
        yield from self._values(json_of_word).read(text, "")
        place = text.keep()
        yield from text.spaces()
        if (yield from self._ends_here(text)):
            text.release()
            return True
        # the arguments are no JSON then, but the client sees what the model wrote
        text.rewind(place)
        return (yield from self._read_text(text))

    def _values(self, word: Callable[[str], str | None]) -> ValueReader:
        return ValueReader(replace(NOTATION, json_of_word=word, ends=(self._end, *self._later)), ")")

    def _whole_literal(self, text: TextInput) -> Reading[str | None]:
        """The JSON of an object or list in Python's spelling and the space behind it, if the value ends there."""
        unknown: list[str] = []

        def known_word(word: str) -> str | None:
            value = json_of_word(word)
            if value is None:
                unknown.append(word)
            return value

        value = yield from collected(self._values(known_word).read(text, ""))
        if value is None or unknown or isinstance(_decoded(value), str):
            return None
        return value if (yield from self._end_follows(text)) else None

    def _whole_json(self, text: TextInput, types: frozenset[str]) -> Reading[str | None]:
        """An object or list and the space behind it, if the value ends there."""
        value = yield from collected(json_value(text, PartKind.ARGUMENTS, self._ends))
        if value is None or not _is_of(_decoded(value), types):
            return None
        return value if (yield from self._end_follows(text)) else None

    def _end_follows(self, text: TextInput) -> Reading[bool]:
        """Reads whitespace. True if the value ends behind it; its closing tag stays unread."""
        yield from text.spaces()
        found = yield from text.next_marker(self._ends)
        return found == self._end or (bool(found) and (yield from self._is_missing(text, found)))

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


def _begins_like_json(text: TextInput) -> Reading[bool]:
    """Whether what stands behind the opening brackets that follow is JSON, as far as one character shows it."""
    place = text.keep()
    behind = first = yield from text.peek()
    while first and first in _BEHIND_BRACKET:
        behind = _BEHIND_BRACKET[first]
        text.skip(1)
        yield from text.spaces()
        before, first = first, (yield from text.peek())
        if before == "{":
            break
    text.rewind(place)
    return first in behind


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
