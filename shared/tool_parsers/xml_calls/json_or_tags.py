"""Reads calls of models that write a call between two markers in tags or as a JSON object."""

from collections.abc import Callable, Sequence

from blockyard.shared.output_parsing.markers import Markers
from blockyard.shared.output_parsing.parts import Part, PartKind, Reading
from blockyard.shared.output_parsing.text_input import TextInput
from blockyard.shared.tool_parsers.json_calls.json_call import JsonCall
from blockyard.shared.tool_parsers.tools import Tool
from blockyard.shared.tool_parsers.xml_calls.tagged_call import TaggedCalls

JSON_CALL = JsonCall()


def either_reader(calls: TaggedCalls) -> Callable[[TextInput, Sequence[Tool]], Reading[None]]:
    """`ToolFormat.read` for calls in these tags, in place of which {"name": ..., "arguments": {...}} may stand."""
    starts, ends = Markers(calls.call.start), Markers(calls.call.end)

    def read(text: TextInput, tools: Sequence[Tool]) -> Reading[None]:
        while found := (yield from text.until(PartKind.CONTENT, starts)):
            text.back(len(found))
            place = text.keep()
            text.skip(len(found))
            yield from text.spaces()
            is_object = (yield from text.peek()) == "{"
            text.rewind(place)
            text.skip(len(found))
            if not is_object:
                yield from calls.read_opened(text, tools, found)
            elif (yield from JSON_CALL.read(text, ends)):
                yield from text.spaces()
                yield from text.one_of(ends)
                yield from text.spaces()
            else:
                yield Part(PartKind.CONTENT, found)

    return read
