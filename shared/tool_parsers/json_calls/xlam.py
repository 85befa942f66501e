"""xLAM: a JSON list of {"name": ..., "arguments": {...}}, alone or in a code block.

There is no marker: an object is a call only if it names one of the given tools.
"""

from collections.abc import Sequence

from blockyard.shared.output_parsing.markers import Markers
from blockyard.shared.output_parsing.parts import Part, PartKind, Reading
from blockyard.shared.output_parsing.text_input import TextInput
from blockyard.shared.tool_parsers.grammar_rules import GrammarRules
from blockyard.shared.tool_parsers.interface import ToolFormat
from blockyard.shared.tool_parsers.json_calls.json_call import JsonCall, quoted_names, read_calls, write_list
from blockyard.shared.tool_parsers.tools import Tool

FENCE, FENCE_END, LIST = "```json", "```", "["
STARTS, ENDS = Markers(FENCE, LIST), Markers(FENCE_END)
CALL = JsonCall(name_first=True)


def read(text: TextInput, tools: Sequence[Tool]) -> Reading[None]:
    names = quoted_names(tools)
    while found := (yield from text.until(PartKind.CONTENT, STARTS)):
        if found == LIST:
            text.back(1)
        is_call = yield from read_calls(text, CALL, ENDS, names)
        if is_call and found == FENCE:
            yield from text.spaces()
            yield from text.literal(FENCE_END)
            yield from text.spaces()
        elif not is_call:
            text.skip(1 if found == LIST else 0)
            yield Part(PartKind.CONTENT, found)


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
