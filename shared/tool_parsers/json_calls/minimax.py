"""MiniMax M1: calls line by line between <tool_calls> and </tool_calls>, each {"name": ..., "arguments": {...}}."""

from collections.abc import Sequence

from blockyard.shared.output_parsing.markers import Markers
from blockyard.shared.tool_parsers.grammar_rules import GrammarRules
from blockyard.shared.tool_parsers.interface import ToolFormat
from blockyard.shared.tool_parsers.json_calls.json_call import tagged_reader, write_call
from blockyard.shared.tool_parsers.tools import Tool

START, END = "<tool_calls>", "</tool_calls>"
read = tagged_reader(Markers(START), Markers(END))


def write_grammar(rules: GrammarRules, tools: Sequence[Tool], parallel: bool) -> str:
    calls = rules.repeated(f'{write_call(rules, tools)} "\\n"', parallel)
    return f'{rules.marker(START)} "\\n" {calls} {rules.marker(END)}'


MINIMAX = ToolFormat(
    name="minimax",
    models="MiniMax M1",
    read=read,
    write_grammar=write_grammar,
    markers=(START, END),
    aliases=("minimax_m1",),
    template_marks=("tool_setting=tools", START),
)
