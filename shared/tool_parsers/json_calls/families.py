"""The families whose calls `json_call.tagged_reader` reads: {"name": ..., "arguments": {...}} between two markers."""

from collections.abc import Sequence

from blockyard.shared.output_parsing.markers import Markers
from blockyard.shared.tool_parsers.grammar_rules import GrammarRules
from blockyard.shared.tool_parsers.interface import ToolFormat
from blockyard.shared.tool_parsers.json_calls.json_call import tagged_reader, write_call, write_list
from blockyard.shared.tool_parsers.tools import Tool

TOOL_CALL = ("<tool_call>", "</tool_call>")
TOOL_CALLS = ("<tool_calls>", "</tool_calls>")
GRANITE_STARTS = ("<|tool_call|>", "<tool_call>")  # the second from Granite 3.1 on
PHI4_TEXT, PHI4_MARKERS = "functools", ("<|tool_call|>", "<|/tool_call|>")  # the text or the first marker begins calls


def write_tool_call(rules: GrammarRules, tools: Sequence[Tool], parallel: bool) -> str:
    """Each call between <tool_call> and </tool_call>, in three lines."""
    start, end = map(rules.marker, TOOL_CALL)
    return rules.repeated(f'{start} "\\n" {write_call(rules, tools)} "\\n" {end}', parallel, '"\\n"')


def _write_granite(rules: GrammarRules, tools: Sequence[Tool], parallel: bool) -> str:
    return f"{rules.marker(GRANITE_STARTS[0])} {write_list(rules, tools, parallel)}"


def _write_phi4_mini(rules: GrammarRules, tools: Sequence[Tool], parallel: bool) -> str:
    return f"{rules.text(PHI4_TEXT)} {write_list(rules, tools, parallel)}"


def _write_jamba(rules: GrammarRules, tools: Sequence[Tool], parallel: bool) -> str:
    """A list with each call in a line."""
    start, end = map(rules.marker, TOOL_CALLS)
    calls = rules.repeated(write_call(rules, tools), parallel, rules.text(",\n    "))
    return f'{start} "[\\n    " {calls} "\\n]" {end}'


def _write_minimax(rules: GrammarRules, tools: Sequence[Tool], parallel: bool) -> str:
    """Calls line by line, without a list."""
    start, end = map(rules.marker, TOOL_CALLS)
    calls = rules.repeated(f'{write_call(rules, tools)} "\\n"', parallel)
    return f'{start} "\\n" {calls} {end}'


HERMES = ToolFormat(
    name="hermes",
    models="Hermes 2 Pro and 3, Qwen 2.5, Qwen 3, QwQ, Granite 4",
    read=tagged_reader(Markers(TOOL_CALL[0]), Markers(TOOL_CALL[1])),
    write_grammar=write_tool_call,
    markers=TOOL_CALL,
    aliases=("qwen", "qwen25", "qwen2_5", "qwen3", "granite4"),
    template_marks=("<tool_call>", '"arguments"'),
)
GRANITE = ToolFormat(
    name="granite",
    models="Granite 3",
    read=tagged_reader(Markers(*GRANITE_STARTS), Markers("</tool_call>")),
    write_grammar=_write_granite,
    markers=GRANITE_STARTS,
    openings=lambda tools: GRANITE_STARTS,
    template_marks=("<|start_of_role|>", "<|tool_call|>"),
)
PHI4_MINI_JSON = ToolFormat(
    name="phi4_mini_json",
    models="Phi 4 mini",
    read=tagged_reader(Markers(PHI4_TEXT, PHI4_MARKERS[0]), Markers(PHI4_MARKERS[1])),
    write_grammar=_write_phi4_mini,
    markers=PHI4_MARKERS,
    aliases=("phi4_mini",),
    openings=lambda tools: (f"{PHI4_TEXT}[", PHI4_MARKERS[0]),
    template_marks=("functools[",),
)
JAMBA = ToolFormat(
    name="jamba",
    models="Jamba 1.5 to 1.7",
    read=tagged_reader(Markers(TOOL_CALLS[0]), Markers(TOOL_CALLS[1])),
    write_grammar=_write_jamba,
    markers=TOOL_CALLS,
    template_marks=("<|bom|>", "<tool_calls>"),
)
MINIMAX = ToolFormat(
    name="minimax",
    models="MiniMax M1",
    read=tagged_reader(Markers(TOOL_CALLS[0]), Markers(TOOL_CALLS[1])),
    write_grammar=_write_minimax,
    markers=TOOL_CALLS,
    aliases=("minimax_m1",),
    template_marks=("tool_setting=tools", "<tool_calls>"),
)
