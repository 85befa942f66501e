from call_answers import TIME, WEATHER, Call, common_answers
from recorded_answers import Answer, call, content, format_tests, tool_reader

from blockyard.shared.tool_parsers.json_calls.granite_20b_fc import GRANITE_20B_FC

READ = tool_reader(GRANITE_20B_FC)


def spell(*calls: Call) -> str:
    objects = [f'{{"name": "{name}", "arguments": {arguments}}}' for name, arguments in calls]
    return "".join(f"<function_call> {one}" for one in objects)


ANSWERS = [
    *common_answers(spell, ("<function_call>",)),
    Answer("lines", spell(WEATHER) + "\n" + spell(TIME), call(*WEATHER) + call(*TIME)),
    Answer(
        "no tool fits",
        '<function_call> {"name": "no_function", "arguments": {}}',
        content('<function_call> {"name": "no_function", "arguments": {}}'),
    ),
    Answer(
        "brackets do not close",
        '<function_call> {"name": "search", "arguments": {"query": [1}' + spell(TIME),
        call("search", '{"query": [1}') + call(*TIME),
    ),
    Answer("malformed", "<function_call> get_time()", content("<function_call> get_time()")),
]

test_answers_have_their_parts, test_damaged_answers, test_little_is_held_back = format_tests(
    READ, ANSWERS, ("<function_call>",), "a <func <function_cal> b <function_c", len("<function_call>")
)
