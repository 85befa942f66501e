from call_answers import TIME, WEATHER, Call, common_answers
from recorded_answers import Answer, call, content, format_tests, tool_reader

from blockyard.shared.tool_parsers.token_calls.deepseek_v3 import DEEPSEEK_V31

READ = tool_reader(DEEPSEEK_V31)


def spell(*calls: Call) -> str:
    each = [f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{arguments}<｜tool▁call▁end｜>" for name, arguments in calls]
    return f"<｜tool▁calls▁begin｜>{''.join(each)}<｜tool▁calls▁end｜>"


ANSWERS = [
    *common_answers(spell, DEEPSEEK_V31.markers),
    Answer("no section", spell(WEATHER).removeprefix("<｜tool▁calls▁begin｜>"), call(*WEATHER)),
    Answer("spaces", spell(WEATHER).replace("｜><｜", "｜>\n<｜").replace("{", "\n{"), call(*WEATHER)),
    Answer("empty arguments", spell(("get_time", "")), call(*TIME)),
    Answer("no end", spell(WEATHER)[: spell(WEATHER).index("<｜tool▁call▁end｜>")], call(*WEATHER)),
    Answer(
        "brackets do not close",
        spell(("search", '{"query": [1}'), TIME) + "b",
        call("search", '{"query": [1}') + call(*TIME) + content("b"),
    ),
    Answer("arguments are no object", spell(("search", "query")), content(spell(("search", "query")))),
    Answer("no name", spell(("", "{}")), content(spell(("", "{}")))),
    Answer(
        "the second is no call",
        spell(WEATHER, ("get time", "{}")),
        call(*WEATHER)
        + content("<｜tool▁call▁begin｜>get time<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>"),
    ),
]

test_answers_have_their_parts, test_damaged_answers, test_little_is_held_back = format_tests(
    READ,
    ANSWERS,
    DEEPSEEK_V31.markers,
    "a <｜tool <｜tool▁call b <｜tool▁calls▁end｜> <｜tool▁c",
    len("<｜tool▁calls▁begin｜>"),
)
