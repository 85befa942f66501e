"""Reads forced calls of models without a format of their own, as `request_fields/forced_calls` writes their grammar."""

from collections.abc import Sequence

from blockyard.shared.output_parsing.json_text import json_value
from blockyard.shared.output_parsing.parts import CALL_END, Part, PartKind, Reading
from blockyard.shared.output_parsing.text_input import TextInput
from blockyard.shared.tool_parsers.json_calls.json_call import JsonCall
from blockyard.shared.tool_parsers.tools import Tool, ToolKind

CALL = JsonCall(arguments=("parameters", "arguments"))


def read_call_list(text: TextInput, tools: Sequence[Tool]) -> Reading[None]:
    """A JSON list of {"name": ..., "parameters": {...}}. Other text is content."""
    yield from text.spaces()
    if (yield from text.literal("[")):
        if not (yield from CALL.read(text)):
            yield Part(PartKind.CONTENT, "[")
        else:
            while True:
                yield from text.spaces()
                if not (yield from text.literal(",")) or not (yield from CALL.read(text)):
                    break
            yield from text.literal("]")
            yield from text.spaces()
    yield from text.rest(PartKind.CONTENT)


def read_arguments(text: TextInput, tools: Sequence[Tool]) -> Reading[None]:
    """The arguments of the only tool, or the text of a custom one, and nothing else. Without text there is no call."""
    if tools[0].kind == ToolKind.FUNCTION:
        yield from text.spaces()
    if not (yield from text.peek()):
        return
    yield Part(PartKind.CALL, tools[0].name)
    if (yield from text.peek()) == "{" and tools[0].kind == ToolKind.FUNCTION:
        yield from json_value(text, PartKind.ARGUMENTS)
        yield CALL_END
        yield from text.rest(PartKind.CONTENT)
    else:
        yield from text.rest(PartKind.ARGUMENTS)
        yield CALL_END
