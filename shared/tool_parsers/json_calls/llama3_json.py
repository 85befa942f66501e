"""Llama 3.1 to 3.3 and 4: {"name": ..., "parameters": {...}}, several of them behind each other.

Some answers have <|python_tag|> before the object, or <|python_start|> and <|python_end|> around it. Without such a
marker an object is a call only if it names one of the given tools.
"""

from collections.abc import Sequence

from blockyard.shared.output_parsing.markers import Markers
from blockyard.shared.output_parsing.parts import Part, PartKind, Reading
from blockyard.shared.output_parsing.text_input import TextInput
from blockyard.shared.tool_parsers.grammar_rules import GrammarRules
from blockyard.shared.tool_parsers.interface import ToolFormat
from blockyard.shared.tool_parsers.json_calls.json_call import JsonCall, quoted_names, read_calls, write_call
from blockyard.shared.tool_parsers.tools import Tool

TAG, START, END = "<|python_tag|>", "<|python_start|>", "<|python_end|>"
STARTS, ENDS = Markers(TAG, START, "{", "["), Markers(TAG, END)
SEPARATORS = Markers(";", ",")
KEYS = ("parameters", "arguments")
MARKED, BARE = JsonCall(KEYS), JsonCall(KEYS, name_first=True)


def read(text: TextInput, tools: Sequence[Tool]) -> Reading[None]:
    names = quoted_names(tools)
    while found := (yield from text.until(PartKind.CONTENT, STARTS)):
        if found in (TAG, START):
            is_call = yield from read_calls(text, MARKED, ENDS, None, SEPARATORS)
        else:
            text.back(1)
            is_call = yield from read_calls(text, BARE, ENDS, names, SEPARATORS)
            text.skip(0 if is_call else 1)
        if is_call:
            yield from text.spaced_literal(END)
        else:
            yield Part(PartKind.CONTENT, found)


def write_grammar(rules: GrammarRules, tools: Sequence[Tool], parallel: bool) -> str:
    return rules.repeated(write_call(rules, tools, "parameters"), parallel, rules.text("; "))


LLAMA3_JSON = ToolFormat(
    name="llama3_json",
    models="Llama 3.1, 3.2, 3.3 and 4",
    read=read,
    write_grammar=write_grammar,
    markers=(TAG, START, END),
    aliases=("llama3", "llama4_json"),
    openings=lambda tools: ('{"name"', TAG, START),
    template_marks=('{"name": function name, "parameters":',),
)
