"""Reads sections of calls in which special tokens, instead of a JSON object, hold the name and the arguments."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from blockyard.shared.output_parsing.json_text import empty_object, object_value
from blockyard.shared.output_parsing.markers import Markers
from blockyard.shared.output_parsing.parts import CALL_END, Part, PartKind, Reading
from blockyard.shared.output_parsing.text_input import TextInput
from blockyard.shared.tool_parsers.tools import Tool

NO_NAME = set(" \t\r\n\"'`{}[]<>(),:")  # characters of no tool's name


@dataclass(frozen=True, slots=True)
class CallSection:
    """The markers of a family, and what reads the beginning of a call."""

    start: str
    call: str  # begins each call; the section's start may be left out
    call_end: str
    end: str
    head: Callable[[TextInput], Reading[Part | None]]  # from behind `call` to the arguments; None: it is no call
    tail: str = ""  # between the arguments and `call_end`

    def read(self, text: TextInput, tools: Sequence[Tool]) -> Reading[None]:
        """Reads a whole answer: content, and calls of any tool. Markers that hold no call are content."""
        starts = Markers(self.start, self.call)
        ends = Markers(*filter(None, (self.tail, self.call, self.call_end, self.end)))
        while found := (yield from text.until(PartKind.CONTENT, starts)):
            if found == self.start and (yield from text.spaced_literal(self.end)):  # the model calls no tool
                yield from text.spaces()
                continue
            place = text.keep()
            if found == self.start:
                yield from text.spaces()
            is_call = found == self.call or (yield from text.literal(self.call))
            begin = (yield from self.head(text)) if is_call else None
            value = None if begin is None else (yield from arguments_value(text, ends))
            if begin is None or value is None:
                text.rewind(place)
                yield Part(PartKind.CONTENT, found)
                continue
            text.release()
            yield begin
            yield from value
            yield CALL_END
            for marker in filter(None, (self.tail, self.call_end, self.end)):
                yield from text.spaces()
                yield from text.literal(marker)
            yield from text.spaces()


def arguments_value(text: TextInput, ends: Markers) -> Reading[Reading[bool] | None]:
    """Returns what yields the arguments up to one of `ends`: see `object_value`. No text is no arguments: {}."""
    yield from text.spaces()
    if (yield from text.next_marker(ends)):
        return empty_object(PartKind.ARGUMENTS)
    return (yield from object_value(text, PartKind.ARGUMENTS, ends))


def is_name(text: str) -> bool:
    """Whether this may be the name of a tool: what a model writes by mistake mostly is not."""
    return bool(text) and NO_NAME.isdisjoint(text)


def begins_name(text: str) -> bool:
    """Whether this may be a name, or its beginning, with whitespace around it."""
    return NO_NAME.isdisjoint(text.strip())
