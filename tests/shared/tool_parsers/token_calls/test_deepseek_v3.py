from call_answers import TIME, WEATHER, Call, common_answers
from recorded_answers import Answer, call, content, format_tests, tool_reader

from blockyard.shared.tool_parsers.token_calls.deepseek_v3 import DEEPSEEK_V3

READ = tool_reader(DEEPSEEK_V3)


def spell(*calls: Call) -> str:
    head, tail = "<｜tool▁call▁begin｜>function<｜tool▁sep｜>", "\n```<｜tool▁call▁end｜>"
    each = [f"{head}{name}\n```json\n{arguments}{tail}" for name, arguments in calls]
    return "<｜tool▁calls▁begin｜>" + "\n".join(each) + "<｜tool▁calls▁end｜>"


ANSWERS = [
    *common_answers(spell, DEEPSEEK_V3.markers),
    Answer("no section", spell(WEATHER).removeprefix("<｜tool▁calls▁begin｜>"), call(*WEATHER)),
    Answer("spaces", spell(WEATHER, TIME).replace("｜><｜", "｜>\n<｜"), call(*WEATHER) + call(*TIME)),
    Answer("another type", spell(TIME).replace("function", "code"), content(spell(TIME).replace("function", "code"))),
    Answer("no code block", spell(WEATHER).replace("```json\n", "").replace("\n```", ""), call(*WEATHER)),
    Answer("no language", spell(WEATHER).replace("```json", "```"), call(*WEATHER)),
    Answer("no line", spell(WEATHER).replace("\n", ""), content(spell(WEATHER).replace("\n", ""))),
    Answer("no end", spell(WEATHER)[: spell(WEATHER).index("\n```<")], call(*WEATHER)),
    Answer(
        "a code block in a text",
        spell(("search", '{"query": "```json\\n1\\n```"}')),
        call("search", '{"query": "```json\\n1\\n```"}'),
    ),
    Answer(
        "brackets do not close",
        spell(("search", '{"query": [1}'), TIME) + "b",
        call("search", '{"query": [1}\n') + call(*TIME) + content("b"),
    ),
    Answer(
        "nothing in the section",
        "a <｜tool▁calls▁begin｜><｜tool▁calls▁end｜>",
        content("a "),
    ),
]

test_answers_have_their_parts, test_damaged_answers, test_little_is_held_back = format_tests(
    READ,
    ANSWERS,
    DEEPSEEK_V3.markers,
    "a <｜tool <｜tool▁call b <｜tool▁calls▁end｜> <｜tool▁c",
    len("<｜tool▁calls▁begin｜>"),
)
