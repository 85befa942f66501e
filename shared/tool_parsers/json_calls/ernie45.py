"""ERNIE 4.5: <response>content</response>, and calls as <tool_call>{"name": ..., "arguments": {...}}</tool_call>."""

from collections.abc import Sequence

from blockyard.shared.output_parsing.markers import Markers
from blockyard.shared.output_parsing.parts import Part, PartKind, Reading
from blockyard.shared.output_parsing.text_input import TextInput
from blockyard.shared.tool_parsers.interface import ToolFormat
from blockyard.shared.tool_parsers.json_calls.families import write_tool_call
from blockyard.shared.tool_parsers.json_calls.json_call import JsonCall, read_calls, read_no_calls
from blockyard.shared.tool_parsers.tools import Tool

START, END = "<tool_call>", "</tool_call>"
RESPONSE, RESPONSE_END = "<response>", "</response>"
STARTS, ENDS = Markers(START), Markers(END)
STARTS_AND_END = Markers(START, RESPONSE_END, f"\n{RESPONSE_END}")
CALL = JsonCall()


def read(text: TextInput, tools: Sequence[Tool]) -> Reading[None]:
    """`<response>` is syntax at the beginning of the answer, and its end then, with the line breaks at them."""
    place = text.keep()
    yield from text.spaces()
    in_response = yield from text.literal(RESPONSE)
    if in_response:
        text.release()
        yield from text.spaces()
    else:
        text.rewind(place)
    while found := (yield from text.until(PartKind.CONTENT, STARTS_AND_END if in_response else STARTS)):
        if found != START:
            in_response = False
            yield from text.spaces()
        elif (yield from read_calls(text, CALL, ENDS)) or (yield from read_no_calls(text, ENDS)):
            yield from text.spaces()
            yield from text.literal(END)
            yield from text.spaces()
        else:
            yield Part(PartKind.CONTENT, START)


ERNIE45 = ToolFormat(
    name="ernie45",
    models="ERNIE 4.5 Thinking",
    read=read,
    write_grammar=write_tool_call,
    markers=(START, END, RESPONSE, RESPONSE_END),
    template_marks=(START, RESPONSE),
)
