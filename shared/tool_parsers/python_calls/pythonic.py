"""Llama 3.2 and ToolACE: [get_weather(city='Paris'), get_time()]. Llama 4 may put the list between two markers."""

from collections.abc import Sequence

from blockyard.shared.output_parsing.markers import Markers
from blockyard.shared.output_parsing.parts import Part, PartKind, Reading
from blockyard.shared.output_parsing.text_input import TextInput
from blockyard.shared.tool_parsers.grammar_rules import GrammarRules
from blockyard.shared.tool_parsers.interface import ToolFormat
from blockyard.shared.tool_parsers.python_calls.call_rules import calls_rule
from blockyard.shared.tool_parsers.python_calls.literals import read_calls
from blockyard.shared.tool_parsers.tools import Tool

OPEN, CLOSE = "[", "]"
PYTHON_START, PYTHON_END = "<|python_start|>", "<|python_end|>"
_LIST = Markers(OPEN)
_MARKED_LIST = Markers(OPEN, PYTHON_START)


def read(text: TextInput, tools: Sequence[Tool]) -> Reading[None]:
    """Only lists that begin with a call of one of the tools are calls: other text has brackets, too."""
    if tools:
        names = _names(tools)
        while (yield from text.until(PartKind.CONTENT, _LIST)):
            if not (yield from read_calls(text, tools, CLOSE, names)):
                yield Part(PartKind.CONTENT, OPEN)
    yield from text.rest(PartKind.CONTENT)


def read_marked(text: TextInput, tools: Sequence[Tool]) -> Reading[None]:
    """The same, perhaps between two markers."""
    if tools:
        names = _names(tools)
        while found := (yield from text.until(PartKind.CONTENT, _MARKED_LIST)):
            place = text.keep()
            if found == PYTHON_START:
                yield from text.spaces()
            is_list = found == OPEN or (yield from text.literal(OPEN))
            if not is_list:
                text.rewind(place)
            if is_list and (yield from read_calls(text, tools, CLOSE, names, place)):
                if found == PYTHON_START:
                    yield from text.spaced_literal(PYTHON_END)
            else:
                yield Part(PartKind.CONTENT, found)
    yield from text.rest(PartKind.CONTENT)


def _names(tools: Sequence[Tool]) -> Markers:
    return Markers(*(f"{tool.name}(" for tool in tools))


def write_grammar(rules: GrammarRules, tools: Sequence[Tool], parallel: bool) -> str:
    return f"({calls_rule(rules, tools, parallel, ', ', before=OPEN)}) {rules.text(CLOSE)}"


def openings(tools: Sequence[Tool]) -> Sequence[str]:
    return [f"{OPEN}{tool.name}(" for tool in tools]


PYTHONIC = ToolFormat(
    name="pythonic",
    models="Llama 3.2, ToolACE",
    read=read,
    write_grammar=write_grammar,
    openings=openings,
    template_marks=("[func_name1(params_name1=params_value1", "<|start_header_id|>"),
)
LLAMA4_PYTHONIC = ToolFormat(
    name="llama4_pythonic",
    models="Llama 4",
    read=read_marked,
    write_grammar=write_grammar,
    markers=(PYTHON_START, PYTHON_END),
    openings=openings,
    template_marks=("func_name1(param", "<|header_start|>"),
)
