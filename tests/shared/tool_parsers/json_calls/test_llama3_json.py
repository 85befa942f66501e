from call_answers import TIME, WEATHER, Call, common_answers
from recorded_answers import Answer, call, content, format_tests, tool_reader

from blockyard.shared.tool_parsers.json_calls.llama3_json import LLAMA3_JSON

READ = tool_reader(LLAMA3_JSON)


def spell(*calls: Call) -> str:
    return "; ".join(f'{{"name": "{name}", "parameters": {arguments}}}' for name, arguments in calls)


ANSWERS = [
    *common_answers(spell, LLAMA3_JSON.markers, rest="\nDone <tool> now."),
    Answer("a tag", "<|python_tag|>" + spell(WEATHER, TIME), call(*WEATHER) + call(*TIME)),
    Answer("Llama 4", f"I look.<|python_start|>{spell(WEATHER)}<|python_end|>", content("I look.") + call(*WEATHER)),
    Answer("no separator", spell(WEATHER) + spell(TIME), call(*WEATHER) + call(*TIME)),
    Answer("lines", spell(WEATHER) + "\n" + spell(TIME) + "\n", call(*WEATHER) + call(*TIME) + content("\n")),
    Answer("a list", f"[{spell(WEATHER)}, {spell(TIME)}]", call(*WEATHER) + call(*TIME)),
    Answer("the key arguments", spell(WEATHER).replace("parameters", "arguments"), call(*WEATHER)),
    Answer("a type", spell(WEATHER).replace('"name"', '"type": "function", "name"'), call(*WEATHER)),
    Answer(
        "another function",
        '{"name": "get_news", "parameters": {}}',
        content('{"name": "get_news", "parameters": {}}'),
    ),
    Answer(
        "another function behind a tag",
        '<|python_tag|>{"name": "get_news", "parameters": {}}',
        call("get_news", "{}"),
    ),
    Answer("JSON in a text", 'It is {"a": {"name": 1}, "b": [{}]}.', content('It is {"a": {"name": 1}, "b": [{}]}.')),
    Answer(
        "arguments first", '{"parameters": {}, "name": "get_time"}', content('{"parameters": {}, "name": "get_time"}')
    ),
    Answer("code", '<|python_tag|>brave_search.call(query="a")', content('<|python_tag|>brave_search.call(query="a")')),
    Answer("a separator without a call", spell(TIME) + "; that is all", call(*TIME) + content("; that is all")),
]

test_answers_have_their_parts, test_damaged_answers, test_little_is_held_back = format_tests(
    READ, ANSWERS, LLAMA3_JSON.markers, "a <|pyt <|python_ta { b [ <|python_e", len("<|python_start|>")
)
