"""Step3: tokens around all calls and around each, and in them <steptml:invoke name="NAME">.

An argument is <steptml:parameter name="KEY">VALUE</steptml:parameter>. Values stand as they are.
"""

from collections.abc import Sequence

from blockyard.shared.output_parsing.markers import Markers
from blockyard.shared.output_parsing.parts import Part, PartKind, Reading
from blockyard.shared.output_parsing.text_input import TextInput
from blockyard.shared.tool_parsers.grammar_rules import GrammarRules, any_of
from blockyard.shared.tool_parsers.interface import ToolFormat
from blockyard.shared.tool_parsers.tools import Tool
from blockyard.shared.tool_parsers.xml_calls.tagged_call import TaggedCall

CALLS_BEGIN, CALLS_END = "<｜tool_calls_begin｜>", "<｜tool_calls_end｜>"
CALL_BEGIN, CALL_END = "<｜tool_call_begin｜>", "<｜tool_call_end｜>"
SEPARATOR = "<｜tool_sep｜>"
STARTS = Markers(CALLS_BEGIN, CALL_BEGIN)
CALL = TaggedCall(
    start='<steptml:invoke name="',
    name_end='">',
    end="</steptml:invoke>",
    key='<steptml:parameter name="',
    key_end='">',
    value_end="</steptml:parameter>",
    line_break="",
    outer_end=CALL_END,
)


def read(text: TextInput, tools: Sequence[Tool]) -> Reading[None]:
    while found := (yield from text.until(PartKind.CONTENT, STARTS)):
        text.back(len(found))
        if not (yield from _call(text, tools)):
            text.skip(len(found))
            if found == CALLS_BEGIN and (yield from text.spaced_literal(CALLS_END)):  # no calls
                yield from text.spaces()
            else:
                yield Part(PartKind.CONTENT, found)  # it was no marker
            continue
        while (yield from _call(text, tools)):
            pass
        yield from text.spaces()
        if (yield from text.literal(CALLS_END)):
            yield from text.spaces()


def _call(text: TextInput, tools: Sequence[Tool]) -> Reading[bool]:
    """Reads a call and the tokens around it, perhaps after the token before all calls. False, with nothing read."""
    place = text.keep()
    yield from text.spaces()
    if (yield from text.literal(CALLS_BEGIN)):
        yield from text.spaces()
    if (yield from text.literal(CALL_BEGIN)):
        yield from text.spaces()
        if (yield from text.literal("function" + SEPARATOR)) and (yield from CALL.read(text, tools)):
            text.release()
            yield from text.spaced_literal(CALL_END)
            return True
    text.rewind(place)
    return False


def write_grammar(rules: GrammarRules, tools: Sequence[Tool], parallel: bool) -> str:
    call = any_of([CALL.write_grammar(rules, tool) for tool in tools])
    one = f'{rules.marker(CALL_BEGIN)} "\\nfunction" {rules.marker(SEPARATOR)} {call} {rules.marker(CALL_END)}'
    calls = rules.repeated(one, parallel, '"\\n"')
    return f'{rules.marker(CALLS_BEGIN)} "\\n" {calls} "\\n" {rules.marker(CALLS_END)}'


STEP3 = ToolFormat(
    name="step3",
    models="Step3",
    read=read,
    write_grammar=write_grammar,
    markers=(CALLS_BEGIN, CALLS_END, CALL_BEGIN, CALL_END, SEPARATOR),
    template_marks=("<steptml:invoke",),
)
