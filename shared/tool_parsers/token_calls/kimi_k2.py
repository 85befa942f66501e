"""Kimi K2: calls between special tokens, each with an id that names the function, and its arguments."""

from collections.abc import Sequence

from blockyard.shared.output_parsing.json_text import MAX_NAME_CHARS
from blockyard.shared.output_parsing.markers import Markers
from blockyard.shared.output_parsing.parts import Part, PartKind, Reading
from blockyard.shared.output_parsing.text_input import TextInput
from blockyard.shared.tool_parsers.grammar_rules import GrammarRules, any_of
from blockyard.shared.tool_parsers.interface import CallId, ToolFormat
from blockyard.shared.tool_parsers.token_calls.call_section import NO_NAME, CallSection, is_name
from blockyard.shared.tool_parsers.tools import Tool

START, END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
CALL, ARGUMENTS, CALL_END = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"
ARGUMENTS_START = Markers(ARGUMENTS)
PREFIX = "functions."
_NO_ID = NO_NAME - {":"}


def _head(text: TextInput) -> Reading[Part | None]:
    """functions.get_weather:0 is the id; its number may be left out."""
    call_id = yield from text.before(ARGUMENTS_START, MAX_NAME_CHARS, _begins_id)
    if call_id is None:
        return None
    yield from text.literal(ARGUMENTS)
    call_id = call_id.strip()
    name, _, index = call_id.rpartition(":")
    if not index.isdecimal():
        name, call_id = call_id, ""
    name = name.removeprefix(PREFIX)
    return Part(PartKind.CALL, name, call_id) if is_name(name) else None


def _begins_id(text: str) -> bool:
    return _NO_ID.isdisjoint(text.strip())


SECTION = CallSection(START, CALL, CALL_END, END, _head)


def write_grammar(rules: GrammarRules, tools: Sequence[Tool], parallel: bool) -> str:
    index, arguments = rules.regex("[0-9]{1,3}"), rules.marker(ARGUMENTS)
    calls = [f"{rules.text(f'{PREFIX}{tool.name}:')} {index} {arguments} {rules.arguments(tool)}" for tool in tools]
    repeated = rules.repeated(f"{rules.marker(CALL)} {any_of(calls)} {rules.marker(CALL_END)}", parallel)
    return f"{rules.marker(START)} {repeated} {rules.marker(END)}"


KIMI_K2 = ToolFormat(
    name="kimi_k2",
    models="Kimi K2",
    read=SECTION.read,
    write_grammar=write_grammar,
    markers=(START, CALL, ARGUMENTS, CALL_END, END),
    aliases=("kimi",),
    openings=lambda tools: (START, CALL),
    template_marks=("tool_declare", "<|im_middle|>"),
    call_id=CallId.KIMI,
)
