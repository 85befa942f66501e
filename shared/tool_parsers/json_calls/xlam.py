"""xLAM: a JSON list of {"name": ..., "arguments": {...}}, alone, in a code block or between the marks of others.

There is no marker: an object is a call only if it names one of the given tools.
"""

from collections.abc import Sequence

from blockyard.shared.output_parsing.markers import Markers
from blockyard.shared.output_parsing.parts import Part, PartKind, Reading
from blockyard.shared.output_parsing.text_input import TextInput
from blockyard.shared.tool_parsers.grammar_rules import GrammarRules
from blockyard.shared.tool_parsers.interface import ToolFormat
from blockyard.shared.tool_parsers.json_calls.json_call import (
    JsonCall,
    quoted_names,
    read_calls,
    read_no_calls,
    write_list,
)
from blockyard.shared.tool_parsers.tools import Tool

LIST = "["
# what may stand before the list -> what stands behind it
ENDS = {"```json": "```", "```": "```", "<tool_call>": "</tool_call>", "[TOOL_CALLS]": ""}
STARTS, BEHIND = Markers(*ENDS, LIST), Markers(*filter(None, ENDS.values()))
# with nothing between them they call nothing; an empty code block of no language may be any text
EMPTY = {start: Markers(ENDS[start]) for start in ("```json", "<tool_call>")}
CALL = JsonCall(name_first=True)


def read(text: TextInput, tools: Sequence[Tool]) -> Reading[None]:
    """An empty list calls nothing, if it stands between two marks or is the whole answer. Nor does nothing there."""
    names, place = quoted_names(tools), text.keep()
    if (yield from read_no_calls(text)):
        yield from text.spaces()
        if not (yield from text.peek()):
            text.release()
            return
    text.rewind(place)
    while found := (yield from text.until(PartKind.CONTENT, STARTS)):
        if found == LIST:
            text.back(1)
        is_read = yield from read_calls(text, CALL, BEHIND, names)
        if found == LIST:
            text.skip(0 if is_read else 1)
        elif is_read or (yield from _is_empty(text, found)):
            yield from text.spaces()
            yield from text.literal(ENDS[found])
            yield from text.spaces()
            continue
        if not is_read:
            yield Part(PartKind.CONTENT, found)


def _is_empty(text: TextInput, start: str) -> Reading[bool]:
    """Reads an empty list or nothing behind `start`. False, with nothing read, if something else follows."""
    if (yield from read_no_calls(text, EMPTY.get(start))):
        return True
    place = text.keep()
    yield from text.spaces()
    is_last = not ENDS[start] and not (yield from text.peek())
    if is_last:
        text.release()
    else:
        text.rewind(place)
    return is_last


def write_grammar(rules: GrammarRules, tools: Sequence[Tool], parallel: bool) -> str:
    return write_list(rules, tools, parallel)


XLAM = ToolFormat(
    name="xlam",
    models="xLAM 2",
    read=read,
    write_grammar=write_grammar,
    openings=lambda tools: ('[{"name"',),
    template_marks=("calls in a single JSON array",),
)
