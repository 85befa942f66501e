"""Apertus: <|tools_prefix|>[{"NAME": {...}}, ...]<|tools_suffix|>, with the arguments under the tool's name."""

from collections.abc import Sequence

from blockyard.shared.output_parsing.json_text import json_string, object_value
from blockyard.shared.output_parsing.markers import Markers
from blockyard.shared.output_parsing.parts import CALL_END, Part, PartKind, Reading
from blockyard.shared.output_parsing.text_input import TextInput
from blockyard.shared.tool_parsers.grammar_rules import GrammarRules, any_of
from blockyard.shared.tool_parsers.interface import ToolFormat
from blockyard.shared.tool_parsers.json_calls.json_call import read_no_calls
from blockyard.shared.tool_parsers.tools import Tool

START, END = "<|tools_prefix|>", "<|tools_suffix|>"
STARTS, ENDS = Markers(START), Markers(END)


def read(text: TextInput, tools: Sequence[Tool]) -> Reading[None]:
    while (yield from text.until(PartKind.CONTENT, STARTS)):
        if (yield from _call(text, "[")):
            while (yield from _call(text, ",")):
                pass
            yield from text.spaced_literal("]")
        elif not (yield from read_no_calls(text, ENDS)):
            yield Part(PartKind.CONTENT, START)
            continue
        yield from text.spaces()
        yield from text.literal(END)
        yield from text.spaces()


def _call(text: TextInput, before: str) -> Reading[bool]:
    """Reads `before` and one call. False, with nothing read, if no call follows."""
    place = text.keep()
    if (yield from text.spaced_literal(before)) and (yield from text.spaced_literal("{")):
        yield from text.spaces()
        name = yield from json_string(text)
        value = None
        if name and (yield from text.spaced_literal(":")):
            yield from text.spaces()
            value = yield from object_value(text, PartKind.ARGUMENTS, ENDS)
        if name and value is not None:
            text.release()
            yield Part(PartKind.CALL, name)
            yield from value
            yield CALL_END
            yield from text.spaced_literal("}")
            return True
    text.rewind(place)
    return False


def write_grammar(rules: GrammarRules, tools: Sequence[Tool], parallel: bool) -> str:
    heads = [rules.text(f'{{"{tool.name}": ') for tool in tools]
    calls = any_of([f"{head} {rules.arguments(tool)}" for head, tool in zip(heads, tools, strict=True)])
    listed = rules.repeated(f'{calls} "}}"', parallel, '", "')
    return f'{rules.marker(START)} "[" {listed} "]" {rules.marker(END)}'


APERTUS = ToolFormat(
    name="apertus",
    models="Apertus",
    read=read,
    write_grammar=write_grammar,
    markers=(START, END),
    template_marks=(START, END),
)
