"""Phi 4 mini: functools[{"name": ..., "arguments": {...}}, ...], or <|tool_call|>, the list and <|/tool_call|>."""

from collections.abc import Sequence

from blockyard.shared.output_parsing.markers import Markers
from blockyard.shared.tool_parsers.grammar_rules import GrammarRules
from blockyard.shared.tool_parsers.interface import ToolFormat
from blockyard.shared.tool_parsers.json_calls.json_call import tagged_reader, write_list
from blockyard.shared.tool_parsers.tools import Tool

START, TOKEN_START, TOKEN_END = "functools", "<|tool_call|>", "<|/tool_call|>"
read = tagged_reader(Markers(START, TOKEN_START), Markers(TOKEN_END))


def write_grammar(rules: GrammarRules, tools: Sequence[Tool], parallel: bool) -> str:
    return f"{rules.text(START)} {write_list(rules, tools, parallel)}"


PHI4_MINI_JSON = ToolFormat(
    name="phi4_mini_json",
    models="Phi 4 mini",
    read=read,
    write_grammar=write_grammar,
    markers=(TOKEN_START, TOKEN_END),
    aliases=("phi4_mini",),
    openings=lambda tools: (f"{START}[", TOKEN_START),
    template_marks=("functools[",),
)
