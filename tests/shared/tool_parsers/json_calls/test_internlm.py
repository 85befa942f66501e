from call_answers import WEATHER, Call, common_answers
from recorded_answers import Answer, call, content, format_tests, tool_reader

from blockyard.shared.tool_parsers.json_calls.internlm import INTERNLM

READ = tool_reader(INTERNLM)


def spell(*calls: Call) -> str:
    objects = [f'{{"name": "{name}", "parameters": {arguments}}}' for name, arguments in calls]
    return "".join(f"<|action_start|><|plugin|>\n{one}<|action_end|>" for one in objects)


ANSWERS = [
    *common_answers(spell, ("<|action_start|>", "<|plugin|>", "<|action_end|>")),
    Answer("the key arguments", spell(WEATHER).replace("parameters", "arguments"), call(*WEATHER)),
    Answer("spaces", spell(WEATHER).replace("><", "> <").replace("<|action_end|>", "\n<|action_end|>"), call(*WEATHER)),
    Answer(
        "code",
        "<|action_start|><|interpreter|>\nprint(1)<|action_end|>",
        content("<|action_start|><|interpreter|>\nprint(1)<|action_end|>"),
    ),
    Answer("no end", spell(WEATHER)[: -len("<|action_end|>")], call(*WEATHER)),
    Answer(
        "brackets do not close",
        '<|action_start|><|plugin|>{"name": "search", "parameters": {"query": [1}<|action_end|> b',
        call("search", '{"query": [1}') + content("b"),
    ),
    Answer("malformed", "<|action_start|> <|plugin|> get_time", content("<|action_start|> <|plugin|> get_time")),
]

test_answers_have_their_parts, test_damaged_answers, test_little_is_held_back = format_tests(
    READ,
    ANSWERS,
    ("<|action_start|>", "<|plugin|>", "<|action_end|>"),
    "a <|act <|action_start> b <|plugin|> <|action_s",
    len("<|action_start|>"),
)
