"""InternLM 2 and 2.5: calls as <|action_start|><|plugin|>{"name": ..., "parameters": {...}}<|action_end|>."""

from collections.abc import Sequence

from blockyard.shared.output_parsing.markers import Markers
from blockyard.shared.output_parsing.parts import Part, PartKind, Reading
from blockyard.shared.output_parsing.text_input import TextInput
from blockyard.shared.tool_parsers.grammar_rules import GrammarRules
from blockyard.shared.tool_parsers.interface import ToolFormat
from blockyard.shared.tool_parsers.json_calls.json_call import JsonCall, read_calls, read_no_calls, write_call
from blockyard.shared.tool_parsers.tools import Tool

START, PLUGIN, END = "<|action_start|>", "<|plugin|>", "<|action_end|>"
STARTS, ENDS = Markers(START), Markers(END)
CALL = JsonCall(arguments=("parameters", "arguments"))


def read(text: TextInput, tools: Sequence[Tool]) -> Reading[None]:
    while (yield from text.until(PartKind.CONTENT, STARTS)):
        place = text.keep()
        yield from text.spaces()
        is_call = (yield from text.literal(PLUGIN)) and (
            (yield from read_calls(text, CALL, ENDS)) or (yield from read_no_calls(text, ENDS))
        )
        if not is_call:
            text.rewind(place)
            yield Part(PartKind.CONTENT, START)  # of another kind: code, for <|interpreter|>
            continue
        text.release()
        yield from text.spaces()
        yield from text.literal(END)
        yield from text.spaces()


def write_grammar(rules: GrammarRules, tools: Sequence[Tool], parallel: bool) -> str:
    head = f'{rules.marker(START)} {rules.marker(PLUGIN)} "\\n"'
    return rules.repeated(f"{head} {write_call(rules, tools, 'parameters')} {rules.marker(END)}", parallel)


INTERNLM = ToolFormat(
    name="internlm",
    models="InternLM 2 and 2.5, Intern-S1",
    read=read,
    write_grammar=write_grammar,
    markers=(START, PLUGIN, END),
    aliases=("internlm2", "interns1"),
    template_marks=(START, PLUGIN),
)
