from call_answers import TIME, WEATHER, Call, common_answers
from recorded_answers import Answer, call, content, format_tests, tool_reader

from blockyard.shared.tool_parsers.json_calls.families import JAMBA

READ = tool_reader(JAMBA)


def spell(*calls: Call) -> str:
    objects = [f'{{"name": "{name}", "arguments": {arguments}}}' for name, arguments in calls]
    return f"<tool_calls>[{', '.join(objects)}]</tool_calls>"


ANSWERS = [
    *common_answers(spell, ("<tool_calls>", "</tool_calls>")),
    Answer(
        "as the template writes calls",
        ' <tool_calls>[\n    {"name": "get_weather", "arguments": {"city": "Paris", "days": 3}},\n'
        '    {"name": "get_time", "arguments": {}}\n]</tool_calls>',
        content(" ") + call(*WEATHER) + call(*TIME),
    ),
    Answer("no end", spell(WEATHER)[: -len("]</tool_calls>")], call(*WEATHER)),
    Answer("an empty list", "a <tool_calls>[]</tool_calls> b", content("a b")),
    Answer("malformed", "<tool_calls>get_time()</tool_calls>", content("<tool_calls>get_time()</tool_calls>")),
    Answer(
        "brackets do not close",
        '<tool_calls>[{"name": "search", "arguments": {"query": [1}</tool_calls> b',
        call("search", '{"query": [1}') + content("b"),
    ),
]

test_answers_have_their_parts, test_damaged_answers, test_little_is_held_back = format_tests(
    READ, ANSWERS, ("<tool_calls>", "</tool_calls>"), "a <tool <tool_cal> b </tool_calls> <tool_c", len("<tool_calls>")
)
