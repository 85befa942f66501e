from call_answers import TIME, WEATHER, Call, common_answers
from recorded_answers import Answer, call, content, format_tests, tool_reader

from blockyard.shared.tool_parsers.json_sections.cohere_command3 import COHERE_COMMAND3

READ = tool_reader(COHERE_COMMAND3)
TAGS = COHERE_COMMAND3.markers


def spell(*calls: Call) -> str:
    objects = [f'    {{"tool_name": "{name}", "parameters": {arguments}}}' for name, arguments in calls]
    return "<|START_ACTION|>[\n" + ",\n".join(objects) + "\n]<|END_ACTION|>"


WITH_IDS = (
    '<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "get_weather", "parameters": {"city": "Rome"}},\n'
    '    {"tool_call_id": "1", "tool_name": "get_time", "parameters": {}}\n]<|END_ACTION|>'
)
ANSWERS = [
    *common_answers(spell, TAGS),
    Answer("ids", WITH_IDS, call("get_weather", '{"city": "Rome"}', "0") + call("get_time", "{}", "1")),
    Answer("one object", spell(WEATHER).replace("[\n", "").replace("\n]", ""), call(*WEATHER)),
    Answer("a response", "<|START_RESPONSE|>It is <b>sunny</b>.<|END_RESPONSE|>", content("It is <b>sunny</b>.")),
    Answer("a text", "<|START_TEXT|>It is\nsunny.<|END_TEXT|>", content("It is\nsunny.")),
    Answer("a text that is cut", "<|START_TEXT|>It is", content("It is")),
    Answer("a text and a call", "<|START_TEXT|>I look.<|END_TEXT|>" + spell(TIME), content("I look.") + call(*TIME)),
    Answer("no end", spell(WEATHER).removesuffix("<|END_ACTION|>"), call(*WEATHER)),
    Answer("no list end", spell(WEATHER).replace("\n]", ""), call(*WEATHER)),
    Answer("malformed", "<|START_ACTION|>[1]<|END_ACTION|>", content("<|START_ACTION|>[1]<|END_ACTION|>")),
]

test_answers_have_their_parts, test_damaged_answers, test_little_is_held_back = format_tests(
    READ, ANSWERS, TAGS, "a <|START <|START_ACT b <|END_ACTION|> <|START_RESP", len("<|START_RESPONSE|>")
)
