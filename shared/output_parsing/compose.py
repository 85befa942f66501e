"""One format out of a choice's reasoning, its tool calls and its content."""

from collections.abc import Collection

from blockyard.shared.output_parsing.json_text import json_string, string_value
from blockyard.shared.output_parsing.markers import Markers
from blockyard.shared.output_parsing.parts import CALL_END, Part, PartKind, Reading
from blockyard.shared.output_parsing.reader import Format, OutputReader
from blockyard.shared.output_parsing.text_input import SPACES, TextInput


def read_content(text: TextInput) -> Reading[None]:
    yield from text.rest(PartKind.CONTENT)


def in_order(reasoning: Format, answer: Format) -> Format:
    """Reasoning, and behind its end the answer."""

    def read(text: TextInput) -> Reading[None]:
        yield from reasoning(text)
        yield from answer(text)

    return read


def trimmed(parts: Format) -> Format:
    """Without whitespace around reasoning and calls: content and reasoning do not begin with it, nor end before a call.

    Whitespace at the end of the answer stays, if content comes before it.
    """

    def read(text: TextInput) -> Reading[None]:
        spaces = ""  # read, and not yielded
        last: PartKind | None = None
        for part in parts(text):
            if part is None:
                yield None
            elif part.kind not in (PartKind.CONTENT, PartKind.REASONING):
                spaces, last = "", part.kind
                yield part
            else:
                shown = spaces + part.text if part.kind == last else part.text.lstrip(SPACES)
                kept = shown.rstrip(SPACES)
                spaces = shown[len(kept) :]
                if kept:
                    last = part.kind
                    yield Part(part.kind, kept)
        if spaces and last == PartKind.CONTENT:
            yield Part(PartKind.CONTENT, spaces)

    return read


def without_marks(parts: Format, start: str, end: str) -> Format:
    """Content without the tag `start` at its beginning and, if it has that, the first `end` behind it.

    Without whitespace inside of the tags, and behind them.
    """

    def read(text: TextInput) -> Reading[None]:
        tags = _Tags(start, end)
        inner = OutputReader(tags.read)
        for part in parts(text):
            if part is not None and part.kind == PartKind.CONTENT:
                yield from inner.push(part.text)
                continue
            if part is not None and part.kind == PartKind.CALL:
                yield from inner.finish()
                inner = OutputReader(tags.read)
            yield part
        yield from inner.finish()

    return read


class _Tags:
    """Reads stretches of content, between which there are calls."""

    __slots__ = ("_end", "_is_open", "_start")

    def __init__(self, start: str, end: str) -> None:
        self._start, self._end = start, Markers(end)
        self._is_open = False

    def read(self, text: TextInput) -> Reading[None]:
        place = text.keep()
        yield from text.spaces()
        if not self._is_open and (yield from text.literal(self._start)):
            self._is_open = True
            text.release()
            yield from text.spaces()
        else:
            text.rewind(place)
        if self._is_open:
            yield from self._inside(text)
        yield from text.rest(PartKind.CONTENT)

    def _inside(self, text: TextInput) -> Reading[None]:
        """Reads up to the end tag, without whitespace before it, or behind it at the end of the text."""
        spaces, inside = "", text.until(PartKind.CONTENT, self._end)
        while True:
            try:
                part = next(inside)
            except StopIteration as end:
                self._is_open = not end.value
                break
            if part is None:
                yield None
                continue
            shown = spaces + part.text
            kept = shown.rstrip(SPACES)
            spaces = shown[len(kept) :]
            if kept:
                yield Part(PartKind.CONTENT, kept)
        place = text.keep()
        yield from text.spaces()
        if self._is_open or not text.ended:
            text.rewind(place)
        else:
            text.release()
        if self._is_open and spaces:
            yield Part(PartKind.CONTENT, spaces)


def with_custom_inputs(parts: Format, custom: Collection[str]) -> Format:
    """The arguments of calls to tools named in `custom` become their one text: {"input": "a"} becomes a."""

    def read(text: TextInput) -> Reading[None]:
        inner: OutputReader | None = None
        for part in parts(text):
            if part is None or part.kind in (PartKind.CONTENT, PartKind.REASONING):
                yield part
            elif part.kind == PartKind.CALL:
                inner = OutputReader(_read_input) if part.text in custom else None
                yield part
            elif inner is None:
                yield part
            elif part.kind == PartKind.ARGUMENTS:
                yield from inner.push(part.text)
            else:
                yield from inner.finish()
                yield CALL_END

    return read


def _read_input(text: TextInput) -> Reading[None]:
    place = text.keep()
    yield from text.spaces()
    if (yield from text.peek()) == '"':  # the text alone
        text.release()
        yield from string_value(text, PartKind.ARGUMENTS)
        yield from text.drop_rest()
        return
    if (yield from text.literal("{")):
        yield from text.spaces()
        key = yield from json_string(text)
        yield from text.spaces()
        if key is not None and (yield from text.literal(":")):
            yield from text.spaces()
            if (yield from text.peek()) == '"':
                text.release()
                yield from string_value(text, PartKind.ARGUMENTS)
                yield from text.drop_rest()
                return
    text.rewind(place)
    yield from text.rest(PartKind.ARGUMENTS)
