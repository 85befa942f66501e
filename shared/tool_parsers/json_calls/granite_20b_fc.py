"""Granite 20B Functioncalling: <function_call> {"name": ..., "arguments": {...}} for each call."""

from collections.abc import Sequence

from blockyard.shared.output_parsing.markers import Markers
from blockyard.shared.output_parsing.parts import Part, PartKind, Reading
from blockyard.shared.output_parsing.text_input import TextInput
from blockyard.shared.tool_parsers.grammar_rules import GrammarRules
from blockyard.shared.tool_parsers.interface import ToolFormat
from blockyard.shared.tool_parsers.json_calls.json_call import JsonCall, quoted_names, write_call
from blockyard.shared.tool_parsers.tools import Tool

START = "<function_call>"
STARTS = Markers(START)
CALL = JsonCall()


def read(text: TextInput, tools: Sequence[Tool]) -> Reading[None]:
    names = quoted_names(tools)  # of no tool, `no_function`, is written where none fits: that is content
    while (yield from text.until(PartKind.CONTENT, STARTS)):
        if not (yield from CALL.read(text, STARTS, names)):
            yield Part(PartKind.CONTENT, START)
            continue
        yield from text.spaces()


def write_grammar(rules: GrammarRules, tools: Sequence[Tool], parallel: bool) -> str:
    return rules.repeated(f'{rules.marker(START)} " " {write_call(rules, tools)}', parallel)


GRANITE_20B_FC = ToolFormat(
    name="granite-20b-fc",
    models="Granite 20B Functioncalling",
    read=read,
    write_grammar=write_grammar,
    markers=(START,),
    aliases=("granite_20b_fc",),
    template_marks=("<|function_call_library|>", START),
)
