"""Forced calls of models without a format of their own."""

import pytest
from recorded_answers import TOOLS, Answer, call, check_answer, content

from blockyard.shared.output_parsing.text_input import TextInput
from blockyard.shared.tool_parsers.forced import read_arguments, read_call_list
from blockyard.shared.tool_parsers.tools import Tool, ToolKind

LISTS = (
    Answer("one", '[{"name": "get_time", "parameters": {}}]', call("get_time", "{}")),
    Answer(
        "several",
        ' [ {"name": "get_time", "parameters": {}} , {"name": "search", "parameters": {"query": "]é"}} ]\n',
        call("get_time", "{}") + call("search", '{"query": "]é"}'),
    ),
    Answer("cut short", '[{"name": "search", "parameters": {"que', call("search", '{"que')),
    Answer("cut before the arguments", '[{"name": "sea', content('[{"name": "sea')),
    Answer("no list", "hello", content("hello")),
    Answer("nothing", "", ()),
)
NAMED = (
    Answer("arguments", '{"city": "Paris"}', call("get_weather", '{"city": "Paris"}')),
    Answer("behind whitespace", '\n\n{"city": 1}\n', call("get_weather", '{"city": 1}') + content("\n")),
    Answer("cut short", '{"ci', call("get_weather", '{"ci')),
    Answer("nothing", "", ()),
    Answer("whitespace alone", "\n ", ()),
)


@pytest.mark.parametrize("answer", LISTS, ids=lambda a: a.name)
def test_lists_of_calls(answer: Answer) -> None:
    check_answer(lambda text: read_call_list(text, TOOLS), answer)


@pytest.mark.parametrize("answer", NAMED, ids=lambda a: a.name)
def test_the_arguments_of_a_named_tool(answer: Answer) -> None:
    check_answer(lambda text: read_arguments(text, TOOLS[:1]), answer)


def test_the_text_of_a_custom_tool_is_taken_as_it_is() -> None:
    tools = [Tool(ToolKind.CUSTOM, "run", {})]

    def read(text: TextInput):
        return read_arguments(text, tools)

    check_answer(read, Answer("text", "\n ls\n", call("run", "\n ls\n")))
    check_answer(read, Answer("nothing", "", ()))
