"""LongCat Flash: <longcat_tool_call>{"name": ..., "arguments": {...}}</longcat_tool_call> for each call."""

from collections.abc import Sequence

from blockyard.shared.output_parsing.markers import Markers
from blockyard.shared.tool_parsers.grammar_rules import GrammarRules
from blockyard.shared.tool_parsers.interface import ToolFormat
from blockyard.shared.tool_parsers.json_calls.json_call import tagged_reader, write_call
from blockyard.shared.tool_parsers.tools import Tool

START, END = "<longcat_tool_call>", "</longcat_tool_call>"
read = tagged_reader(Markers(START), Markers(END))


def write_grammar(rules: GrammarRules, tools: Sequence[Tool], parallel: bool) -> str:
    call = f'{rules.marker(START)} "\\n" {write_call(rules, tools)} "\\n" {rules.marker(END)}'
    return rules.repeated(call, parallel, '"\\n"')


LONGCAT = ToolFormat(
    name="longcat",
    models="LongCat Flash Chat and Thinking",
    read=read,
    write_grammar=write_grammar,
    markers=(START, END),
    template_marks=(START, '"arguments"'),
)
