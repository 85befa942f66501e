"""Mistral: [TOOL_CALLS][{"name": ..., "arguments": {...}}, ...], or [TOOL_CALLS]name[ARGS]{...} for each call.

The second form is that of tokenizers from version 11 on; version 11 has [CALL_ID] and an id between name and [ARGS].
"""

from collections.abc import Sequence

from blockyard.shared.output_parsing.json_text import MAX_NAME_CHARS
from blockyard.shared.output_parsing.markers import Markers
from blockyard.shared.output_parsing.parts import CALL_END, Part, PartKind, Reading
from blockyard.shared.output_parsing.text_input import TextInput
from blockyard.shared.tool_parsers.grammar_rules import GrammarRules, any_of
from blockyard.shared.tool_parsers.interface import CallId, ToolFormat
from blockyard.shared.tool_parsers.json_calls.json_call import JsonCall, read_calls, read_no_calls, write_list
from blockyard.shared.tool_parsers.token_calls.call_section import arguments_value, begins_name, is_name
from blockyard.shared.tool_parsers.tools import Tool

START, CALL_ID, ARGUMENTS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
STARTS, NAME_ENDS, ID_ENDS = Markers(START), Markers(CALL_ID, ARGUMENTS, "{"), Markers(ARGUMENTS)
MAX_ID_CHARS = 64
CALL = JsonCall()


def read(text: TextInput, tools: Sequence[Tool]) -> Reading[None]:
    while (yield from text.until(PartKind.CONTENT, STARTS)):
        if (yield from read_calls(text, CALL, STARTS)) or (yield from read_no_calls(text)):
            yield from text.spaces()
            continue
        place = text.keep()
        begin = yield from _head(text)
        value = None if begin is None else (yield from arguments_value(text, STARTS))
        if begin is None or value is None:
            text.rewind(place)
            yield Part(PartKind.CONTENT, START)
            continue
        text.release()
        yield begin
        yield from value
        yield CALL_END
        yield from text.spaces()


def _head(text: TextInput) -> Reading[Part | None]:
    """get_weather[CALL_ID]a1B2c3D4e[ARGS]: one marker or both may be left out before an object."""
    name = yield from text.before(NAME_ENDS, MAX_NAME_CHARS, begins_name)
    call_id: str | None = ""
    if (yield from text.literal(CALL_ID)):
        call_id = yield from text.before(ID_ENDS, MAX_ID_CHARS, begins_name)
    yield from text.literal(ARGUMENTS)
    if name is None or call_id is None or not is_name(name.strip()):
        return None
    return Part(PartKind.CALL, name.strip(), call_id.strip())


def write_grammar(rules: GrammarRules, tools: Sequence[Tool], parallel: bool) -> str:
    """The model picks the form that it was trained on."""
    start = rules.marker(START)
    head = f"({rules.marker(CALL_ID)} {rules.regex('[a-zA-Z0-9]{9}')})? {rules.marker(ARGUMENTS)}"
    calls = [f"{rules.text(tool.name)} {head} {rules.arguments(tool)}" for tool in tools]
    return (
        f'({start} " "? {write_list(rules, tools, parallel)} | {rules.repeated(f"{start} {any_of(calls)}", parallel)})'
    )


MISTRAL = ToolFormat(
    name="mistral",
    models="Mistral, Mixtral, Ministral, Magistral and Devstral",
    read=read,
    write_grammar=write_grammar,
    markers=(START, CALL_ID, ARGUMENTS),
    template_marks=(START,),
    call_id=CallId.MISTRAL,
)
