"""Hermes 2 and 3, Qwen 2.5 and 3, Granite 4: <tool_call>{"name": ..., "arguments": {...}}</tool_call> for each call."""

from collections.abc import Sequence

from blockyard.shared.output_parsing.markers import Markers
from blockyard.shared.tool_parsers.grammar_rules import GrammarRules
from blockyard.shared.tool_parsers.interface import ToolFormat
from blockyard.shared.tool_parsers.json_calls.json_call import tagged_reader, write_call
from blockyard.shared.tool_parsers.tools import Tool

START, END = "<tool_call>", "</tool_call>"
read = tagged_reader(Markers(START), Markers(END))


def write_grammar(rules: GrammarRules, tools: Sequence[Tool], parallel: bool) -> str:
    call = f'{rules.marker(START)} "\\n" {write_call(rules, tools)} "\\n" {rules.marker(END)}'
    return rules.repeated(call, parallel, '"\\n"')


HERMES = ToolFormat(
    name="hermes",
    models="Hermes 2 Pro and 3, Qwen 2.5, Qwen 3, QwQ, Granite 4",
    read=read,
    write_grammar=write_grammar,
    markers=(START, END),
    aliases=("qwen", "qwen25", "qwen2_5", "qwen3", "granite4"),
    template_marks=("<tool_call>", '"arguments"'),
)
