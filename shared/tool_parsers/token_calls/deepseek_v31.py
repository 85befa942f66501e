"""DeepSeek V3.1: calls between special tokens, each with its name and its arguments."""

from collections.abc import Sequence

from blockyard.shared.output_parsing.json_text import MAX_NAME_CHARS
from blockyard.shared.output_parsing.markers import Markers
from blockyard.shared.output_parsing.parts import Part, PartKind, Reading
from blockyard.shared.output_parsing.text_input import TextInput
from blockyard.shared.tool_parsers.grammar_rules import GrammarRules, any_of
from blockyard.shared.tool_parsers.interface import ToolFormat
from blockyard.shared.tool_parsers.token_calls.call_section import CallSection, begins_name, is_name
from blockyard.shared.tool_parsers.tools import Tool

START, END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL, SEPARATOR, CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
SEPARATORS = Markers(SEPARATOR)


def _head(text: TextInput) -> Reading[Part | None]:
    name = yield from text.before(SEPARATORS, MAX_NAME_CHARS, begins_name)
    if name is None or not is_name(name.strip()):
        return None
    yield from text.literal(SEPARATOR)
    return Part(PartKind.CALL, name.strip())


SECTION = CallSection(START, CALL, CALL_END, END, _head)


def read(text: TextInput, tools: Sequence[Tool]) -> Reading[None]:
    yield from SECTION.read(text)


def write_grammar(rules: GrammarRules, tools: Sequence[Tool], parallel: bool) -> str:
    separator = rules.marker(SEPARATOR)
    calls = [f"{rules.text(tool.name)} {separator} {rules.arguments(tool)}" for tool in tools]
    repeated = rules.repeated(f"{rules.marker(CALL)} {any_of(calls)} {rules.marker(CALL_END)}", parallel)
    return f"{rules.marker(START)} {repeated} {rules.marker(END)}"


DEEPSEEK_V31 = ToolFormat(
    name="deepseek_v31",
    models="DeepSeek V3.1",
    read=read,
    write_grammar=write_grammar,
    markers=(START, CALL, SEPARATOR, CALL_END, END),
    aliases=("deepseekv31",),
    openings=lambda tools: (START, CALL),
    template_marks=(SEPARATOR,),
)
