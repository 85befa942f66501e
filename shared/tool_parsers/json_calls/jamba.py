"""Jamba 1.5 to 1.7: <tool_calls>[{"name": ..., "arguments": {...}}, ...]</tool_calls>, with each call in a line."""

from collections.abc import Sequence

from blockyard.shared.output_parsing.markers import Markers
from blockyard.shared.tool_parsers.grammar_rules import GrammarRules
from blockyard.shared.tool_parsers.interface import ToolFormat
from blockyard.shared.tool_parsers.json_calls.json_call import tagged_reader, write_call
from blockyard.shared.tool_parsers.tools import Tool

START, END = "<tool_calls>", "</tool_calls>"
read = tagged_reader(Markers(START), Markers(END))


def write_grammar(rules: GrammarRules, tools: Sequence[Tool], parallel: bool) -> str:
    calls = rules.repeated(write_call(rules, tools), parallel, rules.text(",\n    "))
    return f'{rules.marker(START)} "[\\n    " {calls} "\\n]" {rules.marker(END)}'


JAMBA = ToolFormat(
    name="jamba",
    models="Jamba 1.5 to 1.7",
    read=read,
    write_grammar=write_grammar,
    markers=(START, END),
    template_marks=("<|bom|>", START),
)
