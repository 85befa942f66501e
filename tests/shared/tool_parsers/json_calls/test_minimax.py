from call_answers import TIME, WEATHER, Call, common_answers
from recorded_answers import Answer, call, content, format_tests, tool_reader

from blockyard.shared.tool_parsers.json_calls.families import MINIMAX

READ = tool_reader(MINIMAX)


def spell(*calls: Call) -> str:
    lines = [f'{{"name": "{name}", "arguments": {arguments}}}\n' for name, arguments in calls]
    return f"<tool_calls>\n{''.join(lines)}</tool_calls>"


ANSWERS = [
    *common_answers(spell, ("<tool_calls>", "</tool_calls>")),
    Answer("no end", spell(WEATHER, TIME)[: -len("</tool_calls>")], call(*WEATHER) + call(*TIME)),
    Answer("one line", spell(WEATHER, TIME).replace("\n", ""), call(*WEATHER) + call(*TIME)),
    Answer("nothing", "a <tool_calls>\n</tool_calls> b", content("a b")),
    Answer(
        "a line that is no call",
        spell(WEATHER).replace("</tool_calls>", "and more</tool_calls>"),
        call(*WEATHER) + content("and more</tool_calls>"),
    ),
    Answer("malformed", "<tool_calls>\nget_time\n</tool_calls>", content("<tool_calls>\nget_time\n</tool_calls>")),
]

test_answers_have_their_parts, test_damaged_answers, test_little_is_held_back = format_tests(
    READ, ANSWERS, ("<tool_calls>", "</tool_calls>"), "a <tool <tool_cal> b </tool_calls> <tool_c", len("<tool_calls>")
)
