from call_answers import TIME, WEATHER, Call, common_answers
from recorded_answers import Answer, call, content, format_tests, tool_reader

from blockyard.shared.tool_parsers.json_calls.hunyuan_a13b import HUNYUAN_A13B

READ = tool_reader(HUNYUAN_A13B)


def spell(*calls: Call) -> str:
    objects = [f'{{"name": "{name}", "arguments": {arguments}}}' for name, arguments in calls]
    return f"<tool_calls>[{', '.join(objects)}]</tool_calls>"


ANSWERS = [
    *common_answers(spell, ("<tool_calls>", "</tool_calls>")),
    Answer("text", "助手：今天天气晴。", content("今天天气晴。")),
    Answer("text of an answer", "\n<answer>\n助手：晴。\n</answer>", content("<answer>晴。\n</answer>")),
    Answer("another speaker", "<answer>助理：晴。", content("<answer>助理：晴。")),
    Answer("a speaker in a text", "我是助手：晴。", content("我是助手：晴。")),
    Answer("text before", "查询。" + spell(WEATHER), content("查询。") + call(*WEATHER)),
    Answer("arguments as a text", spell(("search", '"{\\"query\\": 1}"')), call("search", '{"query": 1}')),
    Answer("two lists", spell(WEATHER) + spell(TIME), call(*WEATHER) + call(*TIME)),
    Answer("malformed", "<tool_calls>[get_time]</tool_calls>", content("<tool_calls>[get_time]</tool_calls>")),
]

test_answers_have_their_parts, test_damaged_answers, test_little_is_held_back = format_tests(
    READ, ANSWERS, ("<tool_calls>", "</tool_calls>"), "a <tool <tool_cal> b </tool_calls> <tool_c", len("<tool_calls>")
)
