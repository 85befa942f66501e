"""Hunyuan A13B: <tool_calls>[{"name": ..., "arguments": {...}}, ...]</tool_calls>."""

from collections.abc import Sequence

from blockyard.shared.output_parsing.markers import Markers
from blockyard.shared.tool_parsers.grammar_rules import GrammarRules
from blockyard.shared.tool_parsers.interface import ToolFormat
from blockyard.shared.tool_parsers.json_calls.json_call import tagged_reader, write_list
from blockyard.shared.tool_parsers.tools import Tool

START, END = "<tool_calls>", "</tool_calls>"
read = tagged_reader(Markers(START), Markers(END))


def write_grammar(rules: GrammarRules, tools: Sequence[Tool], parallel: bool) -> str:
    return f"{rules.marker(START)} {write_list(rules, tools, parallel)} {rules.marker(END)}"


HUNYUAN_A13B = ToolFormat(
    name="hunyuan_a13b",
    models="Hunyuan A13B",
    read=read,
    write_grammar=write_grammar,
    markers=(START, END),
    aliases=("hunyuan",),
    template_marks=("<|extra_0|>", START),
)
