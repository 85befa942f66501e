from call_answers import WEATHER, Call, common_answers
from recorded_answers import Answer, call, content, format_tests, tool_reader

from blockyard.shared.tool_parsers.xml_calls.longcat import LONGCAT

READ = tool_reader(LONGCAT)


def spell(*calls: Call) -> str:
    objects = [f'{{"name": "{name}", "arguments": {arguments}}}' for name, arguments in calls]
    return "".join(f"<longcat_tool_call>\n{one}\n</longcat_tool_call>" for one in objects)


def argument(key: str, value: str) -> str:
    return f"<longcat_arg_key>{key}</longcat_arg_key>\n<longcat_arg_value>{value}</longcat_arg_value>\n"


TAGGED = f"<longcat_tool_call>get_weather\n{argument('city', 'Paris')}{argument('days', '3')}</longcat_tool_call>"


ANSWERS = [
    *common_answers(spell, LONGCAT.markers),
    Answer("one line", spell(WEATHER).replace("\n", ""), call(*WEATHER)),
    Answer("no end", spell(WEATHER)[: -len("</longcat_tool_call>")], call(*WEATHER)),
    Answer("tags", f"I look.\n{TAGGED}", content("I look.\n") + call(*WEATHER)),
    Answer("both", TAGGED + spell(WEATHER) + TAGGED, call(*WEATHER) * 3),
    Answer("tags without arguments", "<longcat_tool_call>get_time\n</longcat_tool_call>", call("get_time", "{}")),
    Answer("a name alone", "<longcat_tool_call>get_time</longcat_tool_call>", call("get_time", "{}")),
    Answer(
        "tags that are cut",
        TAGGED[: TAGGED.index("ris")],
        call("get_weather", '{"city": "Pa'),
    ),
    Answer(
        "brackets do not close",
        '<longcat_tool_call>{"name": "search", "arguments": {"query": [1}</longcat_tool_call> b',
        call("search", '{"query": [1}') + content("b"),
    ),
]

test_answers_have_their_parts, test_damaged_answers, test_little_is_held_back = format_tests(
    READ, ANSWERS, LONGCAT.markers, "a <longcat <longcat_tool> b <longcat_tool_cal", len("<longcat_tool_call>")
)
