"""Command R7B and Command A: sections of an answer between tokens, one of them with a list of calls.

A call is {"tool_call_id": "0", "tool_name": ..., "parameters": {...}}. Content is <|START_RESPONSE|> to
<|END_RESPONSE|>, in later models <|START_TEXT|> to <|END_TEXT|>.
"""

from collections.abc import Sequence

from blockyard.shared.output_parsing.markers import Markers
from blockyard.shared.output_parsing.parts import Part, PartKind, Reading
from blockyard.shared.output_parsing.text_input import TextInput
from blockyard.shared.tool_parsers.grammar_rules import GrammarRules, any_of
from blockyard.shared.tool_parsers.interface import ToolFormat
from blockyard.shared.tool_parsers.json_calls.json_call import JsonCall, read_calls, read_no_calls
from blockyard.shared.tool_parsers.tools import Tool

START, END = "<|START_ACTION|>", "<|END_ACTION|>"
CONTENT_MARKERS = ("<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TEXT|>", "<|END_TEXT|>")
STARTS, ENDS = Markers(START, *CONTENT_MARKERS), Markers(END)
CALL = JsonCall(arguments=("parameters",), name="tool_name", call_id="tool_call_id")


def read(text: TextInput, tools: Sequence[Tool]) -> Reading[None]:
    while found := (yield from text.until(PartKind.CONTENT, STARTS)):
        if found != START:
            continue
        if not ((yield from read_calls(text, CALL, ENDS)) or (yield from read_no_calls(text, ENDS))):
            yield Part(PartKind.CONTENT, START)
            continue
        yield from text.spaces()
        yield from text.literal(END)
        yield from text.spaces()


def write_grammar(rules: GrammarRules, tools: Sequence[Tool], parallel: bool) -> str:
    begin, number = rules.text('    {"tool_call_id": "'), rules.regex("[0-9]{1,3}")
    heads = [rules.text(f'", "tool_name": "{tool.name}", "parameters": ') for tool in tools]
    calls = any_of([f"{head} {rules.arguments(tool)}" for head, tool in zip(heads, tools, strict=True)])
    listed = rules.repeated(f'{begin} {number} {calls} "}}"', parallel, '",\\n"')
    return f'{rules.marker(START)} "[\\n" {listed} "\\n]" {rules.marker(END)}'


COHERE_COMMAND3 = ToolFormat(
    name="cohere_command3",
    models="Command R7B, Command A",
    read=read,
    write_grammar=write_grammar,
    markers=(START, END, *CONTENT_MARKERS),
    aliases=("cohere_command4",),
    template_marks=(START, '"tool_name"'),
)
