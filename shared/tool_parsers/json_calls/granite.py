"""Granite 3: <|tool_call|>[{"name": ..., "arguments": {...}}, ...], from 3.1 on with the marker <tool_call>."""

from collections.abc import Sequence

from blockyard.shared.output_parsing.markers import Markers
from blockyard.shared.tool_parsers.grammar_rules import GrammarRules
from blockyard.shared.tool_parsers.interface import ToolFormat
from blockyard.shared.tool_parsers.json_calls.json_call import tagged_reader, write_list
from blockyard.shared.tool_parsers.tools import Tool

START, PLAIN_START = "<|tool_call|>", "<tool_call>"
read = tagged_reader(Markers(START, PLAIN_START), Markers("</tool_call>"))


def write_grammar(rules: GrammarRules, tools: Sequence[Tool], parallel: bool) -> str:
    return f"{rules.marker(START)} {write_list(rules, tools, parallel)}"


GRANITE = ToolFormat(
    name="granite",
    models="Granite 3",
    read=read,
    write_grammar=write_grammar,
    markers=(START, PLAIN_START),
    openings=lambda tools: (START, PLAIN_START),
    template_marks=("<|start_of_role|>", START),
)
