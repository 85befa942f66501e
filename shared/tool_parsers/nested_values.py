"""Reads values of notations like JSON and writes them as JSON while they arrive.

A `Notation` says how strings, single words and keys are written; lists and objects are nested as in JSON, without
recursion. Values that the notation does not know become strings, so that all of their characters survive.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from blockyard.shared.output_parsing.json_text import escaped
from blockyard.shared.output_parsing.markers import Markers
from blockyard.shared.output_parsing.parts import Part, PartKind, Reading, silent
from blockyard.shared.output_parsing.text_input import TextInput

MAX_WORD_CHARS = 256  # a longer word streams
_IN_NUMBERS = frozenset("0123456789.eE+-")
_UNPACKED = "**"  # before the entries of another dict: a key for its expression
_CLOSERS = {"(": ")", "[": "]", "{": "}"}


@dataclass(frozen=True, slots=True)
class Notation:
    """How a family writes values.

    `brackets` has the bracket that closes each that opens; "}" closes objects, others lists. `read_string` writes the
    string that follows, with its quotes, given the characters that may follow it: True if its end was read, None, with
    nothing read, if no string follows. `json_of_word` is the JSON of a word such as `True`, or None. `ends` are markers
    that end malformed values, and stay unread.
    """

    brackets: Mapping[str, str]
    read_string: Callable[[TextInput, str], Reading[bool | None]]
    json_of_word: Callable[[str], str | None]
    ends: tuple[str, ...] = ()


class ValueReader:
    """Reads values of one notation.

    An expression that is no value, such as a call or a sum, is a word, with all that stands in its brackets. Behind an
    object or list an expression goes on as it is written: the arguments are no JSON then, but later ones are read.
    """

    __slots__ = ("_behind_key", "_behind_word", "_notation", "_stops")

    def __init__(self, notation: Notation, closer: str) -> None:
        """`closer` is the bracket that may follow a whole value, besides a comma."""
        closers = {*notation.brackets.values(), closer}
        self._notation = notation
        self._behind_word = Markers(",", *closers, *notation.ends)
        self._behind_key = Markers(":", ",", *closers, *notation.ends)
        self._stops = frozenset(one[0] for one in (",", *closers, *notation.ends))

    def read(self, text: TextInput, behind: str) -> Reading[bool]:
        """Writes the value that follows. True if it is whole. `behind` are the characters that may follow it."""
        open_ones: list[_Open] = []
        while True:
            yield from text.spaces()
            first = yield from text.peek()
            if first and first in self._notation.brackets:
                text.skip(1)
                open_ones.append((yield from self._opened(text, self._notation.brackets[first])))
                yield _json("{" if open_ones[-1].is_object else "[")
                yield from text.spaces()
                if (yield from text.peek()) != open_ones[-1].closer:
                    if open_ones[-1].is_object and not (yield from self._key(text)):
                        return False
                    continue
            elif not (yield from self._string_or_word(text, "," + open_ones[-1].closer if open_ones else behind)):
                return False
            if not (yield from self._behind_value(text, open_ones)):
                return False
            if not open_ones:
                return True

    def _opened(self, text: TextInput, closer: str) -> Reading["_Open"]:
        """Returns the value that a bracket opens. A set of Python, which has an object's brackets, is a list."""
        if closer != "}":
            return _Open(closer, False)
        place = text.keep()
        yield from text.spaces()
        first = yield from text.peek()
        is_set = bool(first) and first in self._notation.brackets
        if first and first != closer and not (yield from text.literal(_UNPACKED)):
            is_string = yield from silent(self._notation.read_string(text, ":,}"))
            word = (yield from self.expression(text, ":")) if is_string is None else ""
            yield from text.spaces()
            behind = yield from text.peek()
            if is_string is not False and word is not None:
                is_set = behind == "," or (behind == closer and self._is_value(word))
        text.rewind(place)
        return _Open(closer, not is_set)

    def _is_value(self, word: str) -> bool:
        """Whether a word is a number, a known word or an expression, or empty: a string."""
        word = word.strip()
        return not word or self._notation.json_of_word(word) is not None or not _CLOSERS.keys().isdisjoint(word)

    def _behind_value(self, text: TextInput, open_ones: list["_Open"]) -> Reading[bool]:
        """Closes what ends behind a value, up to the next value. False if neither follows."""
        while open_ones:
            yield from text.spaces()
            more = yield from text.literal(",")
            yield from text.spaces()
            if (yield from text.literal(open_ones[-1].closer)):  # also behind a comma
                yield _json("}" if open_ones.pop().is_object else "]")
                rest = yield from self.expression(text)
                if rest and rest.strip():
                    yield _json(rest.rstrip())
            elif more:
                yield _json(", ")
                return not open_ones[-1].is_object or (yield from self._key(text))
            else:
                return False
        return True

    def _string_or_word(self, text: TextInput, behind: str) -> Reading[bool]:
        is_string = yield from self._notation.read_string(text, behind)
        return (yield from self._word(text)) if is_string is None else is_string

    def _word(self, text: TextInput) -> Reading[bool]:
        """Writes what stands up to the next comma, bracket or end: a number, a known word, or a string."""
        raw = yield from self.expression(text)
        if raw is None:
            raw = yield from text.before(self._behind_word, MAX_WORD_CHARS)
        if raw is None:
            start = yield from text.peek(MAX_WORD_CHARS + self._behind_word.longest)
            if len(start) <= MAX_WORD_CHARS:  # the text ends
                raw = start
                text.skip(len(raw))
            elif _IN_NUMBERS.issuperset(start[:MAX_WORD_CHARS].rstrip()):  # whitespace may follow it
                return (yield from _long_number(text))
            else:
                yield _json('"')
                found = yield from text.until(PartKind.ARGUMENTS, self._behind_word, escaped)
                text.back(len(found))
                yield _json('"')
                return bool(found)
        word = raw.strip()
        if not word:
            return False
        known = self._notation.json_of_word(word)
        yield _json(f'"{escaped(word)}"' if known is None else known)
        return True

    def expression(self, text: TextInput, also: str = "") -> Reading[str | None]:
        """Reads text up to a comma, bracket or end outside of its own brackets, or to a character of `also`.

        None, with nothing read, if the text ends before, or more than `MAX_WORD_CHARS` characters come before it.
        """
        place, raw, brackets = text.keep(), "", _Nesting()
        while len(raw) <= MAX_WORD_CHARS:
            char = yield from text.peek()
            if not char:
                break
            if char in self._stops or char in also:
                found = yield from text.next_marker(self._behind_word)
                if found and (brackets.are_closed or len(found) > 1):
                    text.release()
                    return raw
                if brackets.are_closed and char in also:
                    text.release()
                    return raw
            brackets.read(char, raw)
            raw += char
            text.skip(1)
        text.rewind(place)
        return None

    def _key(self, text: TextInput) -> Reading[bool]:
        yield from text.spaces()
        is_string = yield from self._notation.read_string(text, ":")
        if is_string is None:
            if (yield from text.literal(_UNPACKED)):
                yield _json(f'"{_UNPACKED}": ')
                return True
            raw = yield from self.expression(text, ":")
            if raw is None:
                raw = yield from text.before(self._behind_key, MAX_WORD_CHARS)
            word = (raw or "").strip()
            if not word:
                return False
            yield _json(f'"{escaped(self._notation.json_of_word(word) or word)}"')
        elif not is_string:
            return False
        yield from text.spaces()
        if not (yield from text.literal(":")):
            return False
        yield _json(": ")
        return True


class _Open(NamedTuple):
    """A list or object that is open."""

    closer: str
    is_object: bool


class _Nesting:
    """The brackets and quotes of an expression."""

    __slots__ = ("_closers", "_is_escaped", "_quote")

    def __init__(self) -> None:
        self._closers: list[str] = []
        self._quote, self._is_escaped = "", False

    @property
    def are_closed(self) -> bool:
        return not self._closers

    def read(self, char: str, before: str) -> None:
        """`before` is the text before this character: an apostrophe in a word is no quote."""
        if self._is_escaped:
            self._is_escaped = False
        elif self._quote:
            self._is_escaped = char == "\\"
            if char == self._quote:
                self._quote = ""
        elif char in _CLOSERS:
            self._closers.append(_CLOSERS[char])
        elif self._closers and char == self._closers[-1]:
            self._closers.pop()
        elif self._closers and char in "'\"" and not before[-1].isalnum():
            self._quote = char


def json_number(word: str) -> str | None:
    if word[0] not in "-0123456789":
        return None
    try:
        msgspec.json.decode(word, type=msgspec.Raw)  # also numbers that no float holds
    except msgspec.DecodeError:
        return None
    return word


def _long_number(text: TextInput) -> Reading[bool]:
    while True:
        data = text.unread(MAX_WORD_CHARS)
        if not data:
            if text.ended:
                return False
            yield None
            continue
        count = next((i for i, char in enumerate(data) if char not in _IN_NUMBERS), len(data))
        yield from text.emit(PartKind.ARGUMENTS, count)
        if count < len(data):
            return True


def _json(piece: str) -> Part:
    return Part(PartKind.ARGUMENTS, piece)
