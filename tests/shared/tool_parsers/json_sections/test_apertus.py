from call_answers import TIME, WEATHER, Call, common_answers
from recorded_answers import Answer, call, content, format_tests, tool_reader

from blockyard.shared.tool_parsers.json_sections.apertus import APERTUS

READ = tool_reader(APERTUS)
TAGS = APERTUS.markers


def spell(*calls: Call) -> str:
    return "<|tools_prefix|>[" + ", ".join(f'{{"{name}": {text}}}' for name, text in calls) + "]<|tools_suffix|>"


ANSWERS = [
    *common_answers(spell, TAGS),
    Answer(
        "spaces",
        '<|tools_prefix|> [\n { "get_time" : {} } ,\n {"get_time":{}}\n] <|tools_suffix|>\n',
        call(*TIME) + call(*TIME),
    ),
    Answer("two lists", spell(WEATHER) + spell(TIME), call(*WEATHER) + call(*TIME)),
    Answer("no end", spell(WEATHER).removesuffix("]<|tools_suffix|>") + " b", call(*WEATHER) + content("b")),
    Answer(
        "a second call that is malformed",
        spell(WEATHER).replace("]<", ', "x"]<'),
        call(*WEATHER) + content(', "x"]<|tools_suffix|>'),
    ),
    Answer(
        "brackets do not close",
        '<|tools_prefix|>[{"get_time": {"a": [1}]<|tools_suffix|> b',
        call("get_time", '{"a": [1}]') + content("b"),
    ),
    Answer("an empty list", "<|tools_prefix|>[]<|tools_suffix|>", ()),
    Answer("no name", '<|tools_prefix|>[{"": {}}]', content('<|tools_prefix|>[{"": {}}]')),
]

test_answers_have_their_parts, test_damaged_answers, test_little_is_held_back = format_tests(
    READ, ANSWERS, TAGS, "a <|tool <|tools_pref b <|tools_suffix|> <|tools_p", len("<|tools_prefix|>")
)
