"""Hunyuan A13B: <tool_calls>[{"name": ..., "arguments": {...}}, ...]</tool_calls>.

Where the prompt has tools, the template tells the model to begin other answers with the name of their speaker, and
writes it before those of the history itself. It is no content. Answers that reason stand behind <answer>.
"""

from collections.abc import Sequence

from blockyard.shared.output_parsing.markers import Markers
from blockyard.shared.output_parsing.parts import Part, PartKind, Reading
from blockyard.shared.output_parsing.text_input import TextInput
from blockyard.shared.tool_parsers.grammar_rules import GrammarRules
from blockyard.shared.tool_parsers.interface import ToolFormat
from blockyard.shared.tool_parsers.json_calls.json_call import tagged_reader, write_list
from blockyard.shared.tool_parsers.tools import Tool

START, END = "<tool_calls>", "</tool_calls>"
ANSWER, SPEAKER = "<answer>", "助手："
_read_calls = tagged_reader(Markers(START), Markers(END))


def read(text: TextInput, tools: Sequence[Tool]) -> Reading[None]:
    place = text.keep()
    yield from text.spaces()
    in_answer = yield from text.literal(ANSWER)
    yield from text.spaces()
    if (yield from text.literal(SPEAKER)):
        text.release()
        if in_answer:
            yield Part(PartKind.CONTENT, ANSWER)  # which `compose.without_marks` removes
    else:
        text.rewind(place)
    yield from _read_calls(text, tools)


def write_grammar(rules: GrammarRules, tools: Sequence[Tool], parallel: bool) -> str:
    return f"{rules.marker(START)} {write_list(rules, tools, parallel)} {rules.marker(END)}"


HUNYUAN_A13B = ToolFormat(
    name="hunyuan_a13b",
    models="Hunyuan A13B",
    read=read,
    write_grammar=write_grammar,
    markers=(START, END),
    aliases=("hunyuan",),
    template_marks=("<|extra_0|>", START),
)
