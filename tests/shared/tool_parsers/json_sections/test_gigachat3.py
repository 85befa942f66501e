from call_answers import TIME, WEATHER, Call, common_answers
from recorded_answers import Answer, call, content, format_tests, tool_reader

from blockyard.shared.tool_parsers.json_sections.gigachat3 import GIGACHAT3

READ = tool_reader(GIGACHAT3)
TAGS = (*GIGACHAT3.markers, "function call<|role_sep|>\n")


def spell(*calls: Call) -> str:
    return "".join(f"<|message_sep|>\n\nfunction call<|role_sep|>\n{_object(one)}" for one in calls)


def _object(one: Call) -> str:
    return f'{{"name": "{one[0]}", "arguments": {one[1]}}}'


ANSWERS = [
    *common_answers(spell, TAGS[:3]),
    Answer("with a token", "I look.<|function_call|>" + _object(WEATHER), content("I look.") + call(*WEATHER)),
    Answer("without the end of a message", "function call<|role_sep|>\n" + _object(TIME), call(*TIME)),
    Answer("behind a text", "I look." + spell(TIME), content("I look.") + call(*TIME)),
    Answer("the end of the message", spell(TIME) + "<|message_sep|>\n\n", call(*TIME)),
    Answer("the words alone", "A function call is a call.", content("A function call is a call.")),
    Answer("another role", "a<|message_sep|>\n\nuser<|role_sep|>\n", content("a<|message_sep|>\n\nuser<|role_sep|>\n")),
    Answer("malformed", "<|function_call|>get_time()", content("<|function_call|>get_time()")),
]

test_answers_have_their_parts, test_damaged_answers, test_little_is_held_back = format_tests(
    READ,
    ANSWERS,
    TAGS,
    "a function call <|message_sep|>\n\nfunc b <|role_sep|> <|funct function cal",
    len("<|message_sep|>\n\nfunction call<|role_sep|>"),
)
