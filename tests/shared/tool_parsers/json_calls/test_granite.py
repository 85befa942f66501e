from call_answers import TIME, WEATHER, Call, common_answers
from recorded_answers import Answer, call, content, format_tests, tool_reader

from blockyard.shared.tool_parsers.json_calls.families import GRANITE

READ = tool_reader(GRANITE)


def spell(*calls: Call) -> str:
    objects = [f'{{"name": "{name}", "arguments": {arguments}}}' for name, arguments in calls]
    return f"<|tool_call|>[{', '.join(objects)}]"


ANSWERS = [
    *common_answers(spell, ("<|tool_call|>", "<tool_call>")),
    Answer("the marker of 3.1", spell(WEATHER).replace("<|tool_call|>", "<tool_call>"), call(*WEATHER)),
    Answer("no list", '<|tool_call|>{"name": "get_time", "arguments": {}}', call(*TIME)),
    Answer("an empty list", "a <|tool_call|>[] b", content("a b")),
    Answer("an object that is no call", '<|tool_call|>[{"a": 1}]', content('<|tool_call|>[{"a": 1}]')),
    Answer("no call behind a call", spell(WEATHER)[:-1] + ', {"a": 1}]', call(*WEATHER) + content(', {"a": 1}]')),
    Answer("an end marker", spell(WEATHER) + "</tool_call>", call(*WEATHER)),
]

test_answers_have_their_parts, test_damaged_answers, test_little_is_held_back = format_tests(
    READ, ANSWERS, ("<|tool_call|>", "<tool_call>"), "a <|tool <|tool_cal> b <tool <tool_c", len("<|tool_call|>")
)
