"""DeepSeek V3, R1 and V3.1: calls between special tokens.

A call of V3 and R1 has its type, its name, and its arguments in a code block; one of V3.1 its name and its arguments.
"""

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
FENCE, FENCE_END = "```json", "```"
SEPARATORS, LINE_END, FENCES = Markers(SEPARATOR), Markers("\n"), Markers(FENCE, FENCE_END)
KIND = "function"  # there is no other


def _head_v3(text: TextInput) -> Reading[Part | None]:
    """function<｜tool▁sep｜>get_weather, and the beginning of a code block in the next line."""
    kind = yield from text.before(SEPARATORS, MAX_NAME_CHARS, lambda kind: KIND.startswith(kind.strip()))
    if kind is None or kind.strip() != KIND:
        return None
    yield from text.literal(SEPARATOR)
    name = yield from text.before(LINE_END, MAX_NAME_CHARS, begins_name)
    if name is None or not is_name(name.strip()):
        return None
    yield from text.spaces()
    yield from text.one_of(FENCES)
    return Part(PartKind.CALL, name.strip())


def _head_v31(text: TextInput) -> Reading[Part | None]:
    name = yield from text.before(SEPARATORS, MAX_NAME_CHARS, begins_name)
    if name is None or not is_name(name.strip()):
        return None
    yield from text.literal(SEPARATOR)
    return Part(PartKind.CALL, name.strip())


def _write_v3(rules: GrammarRules, tools: Sequence[Tool], parallel: bool) -> str:
    heads = [rules.text(f"{tool.name}\n{FENCE}\n") for tool in tools]
    calls = [f"{head} {rules.arguments(tool)}" for head, tool in zip(heads, tools, strict=True)]
    head = f'{rules.marker(CALL)} "{KIND}" {rules.marker(SEPARATOR)}'
    tail = f'"\\n{FENCE_END}" {rules.marker(CALL_END)}'
    repeated = rules.repeated(f"{head} {any_of(calls)} {tail}", parallel, '"\\n"')
    return f"{rules.marker(START)} {repeated} {rules.marker(END)}"


def _write_v31(rules: GrammarRules, tools: Sequence[Tool], parallel: bool) -> str:
    separator = rules.marker(SEPARATOR)
    calls = [f"{rules.text(tool.name)} {separator} {rules.arguments(tool)}" for tool in tools]
    repeated = rules.repeated(f"{rules.marker(CALL)} {any_of(calls)} {rules.marker(CALL_END)}", parallel)
    return f"{rules.marker(START)} {repeated} {rules.marker(END)}"


DEEPSEEK_V3 = ToolFormat(
    name="deepseek_v3",
    models="DeepSeek V3 and R1",
    read=CallSection(START, CALL, CALL_END, END, _head_v3, tail=FENCE_END).read,
    write_grammar=_write_v3,
    markers=(START, CALL, SEPARATOR, CALL_END, END),
    aliases=("deepseekv3",),
    openings=lambda tools: (START, CALL),
    template_marks=(SEPARATOR, FENCE),
)
DEEPSEEK_V31 = ToolFormat(
    name="deepseek_v31",
    models="DeepSeek V3.1",
    read=CallSection(START, CALL, CALL_END, END, _head_v31).read,
    write_grammar=_write_v31,
    markers=(START, CALL, SEPARATOR, CALL_END, END),
    aliases=("deepseekv31",),
    openings=lambda tools: (START, CALL),
    template_marks=(SEPARATOR,),
)
