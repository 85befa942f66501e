import pytest
from recorded_answers import Answer, call, content, format_tests, tool_reader

from blockyard.shared.output_parsing.reader import read_all
from blockyard.shared.tool_parsers.json_calls.families import HERMES
from blockyard.shared.tool_parsers.json_calls.json_call import MAX_EARLY_ARGUMENTS

READ = tool_reader(HERMES)
ONE = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris", "days": 3}}\n</tool_call>'
ANSWERS = (
    Answer("none", "It is sunny < 5 and {fine}.", content("It is sunny < 5 and {fine}.")),
    Answer("one", ONE, call("get_weather", '{"city": "Paris", "days": 3}')),
    Answer(
        "several",
        ONE + '\n<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>',
        call("get_weather", '{"city": "Paris", "days": 3}') + call("get_time", "{}"),
    ),
    Answer(
        "nested",
        '<tool_call>\n{"name": "search", "arguments": {"query": "a \\"b\\" }", "filter": {"tags": ["x", "]"]}}}'
        "\n</tool_call>",
        call("search", '{"query": "a \\"b\\" }", "filter": {"tags": ["x", "]"]}}'),
    ),
    Answer(
        "unicode",
        '<tool_call>\n{"name": "search", "arguments": {"query": "Zürich 東京 \\u00e9 😀"}}\n</tool_call>',
        call("search", '{"query": "Zürich 東京 \\u00e9 😀"}'),
    ),
    Answer(
        "text around",
        f"Let me look.\n{ONE}\nDone <tool> now.",
        content("Let me look.\n") + call("get_weather", '{"city": "Paris", "days": 3}') + content("Done <tool> now."),
    ),
    Answer(
        "cut short",
        '<tool_call>\n{"name": "search", "arguments": {"query": "half',
        call("search", '{"query": "half'),
    ),
    Answer("cut before the arguments", '<tool_call>\n{"name": "sear', content('<tool_call>\n{"name": "sear')),
    Answer(
        "malformed",
        "a <tool_call>\nget_weather(1)\n</tool_call>",
        content("a <tool_call>\nget_weather(1)\n</tool_call>"),
    ),
    Answer(
        "brackets do not close",
        '<tool_call>\n{"name": "search", "arguments": {"query": [1}</tool_call> b',
        call("search", '{"query": [1}') + content("b"),
    ),
    Answer(
        "a marker in a text",
        '<tool_call>{"name": "search", "arguments": {"query": "</tool_call>"}}</tool_call>',
        call("search", '{"query": "</tool_call>"}'),
    ),
    Answer(
        "arguments first",
        '<tool_call>{"arguments": {"city": "Rome"}, "name": "get_weather"}</tool_call>',
        call("get_weather", '{"city": "Rome"}'),
    ),
    Answer(
        "null for arguments",
        '<tool_call>\n{"name": "get_time", "arguments": null}\n</tool_call>\n' + ONE,
        call("get_time", "{}") + call("get_weather", '{"city": "Paris", "days": 3}'),
    ),
    Answer(
        "null before the name", '<tool_call>{"arguments": null, "name": "get_time"}</tool_call>', call("get_time", "{}")
    ),
    Answer(
        "arguments that are no JSON",
        '<tool_call>{"name": "search", "arguments": Paris}</tool_call>',
        content('<tool_call>{"name": "search", "arguments": Paris}</tool_call>'),
    ),
    Answer("no call", "a <tool_call>\n</tool_call> b", content("a b")),
    Answer(
        "arguments as a text",
        '<tool_call>{"name": "get_weather", "arguments": "{\\"city\\": \\"R\\u00e9\\\\n\\"}"}</tool_call>',
        call("get_weather", '{"city": "Ré\\n"}'),
    ),
)

test_answers_have_their_parts, test_damaged_answers, test_little_is_held_back = format_tests(
    READ, ANSWERS, HERMES.markers, "a <tool <tool_cal> b </tool_call> <tool_c", len("<tool_call>")
)


@pytest.mark.parametrize(("more", "is_call"), [(0, True), (1, False)])
def test_arguments_before_the_name_are_bounded(more: int, is_call: bool) -> None:
    """They are read again if no name follows: without a bound many markers would take quadratic time."""
    arguments = '{"query": "' + "x" * (MAX_EARLY_ARGUMENTS - len('{"query": ""}') + more) + '"}'
    text = f'<tool_call>{{"arguments": {arguments}, "name": "search"}}</tool_call>'
    assert read_all(READ, text) == list(call("search", arguments) if is_call else content(text))
