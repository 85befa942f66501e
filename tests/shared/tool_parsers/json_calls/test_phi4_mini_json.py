from call_answers import WEATHER, Call, common_answers
from recorded_answers import Answer, call, content, format_tests, tool_reader

from blockyard.shared.tool_parsers.json_calls.families import PHI4_MINI_JSON

READ = tool_reader(PHI4_MINI_JSON)


def spell(*calls: Call) -> str:
    objects = [f'{{"name": "{name}", "arguments": {arguments}}}' for name, arguments in calls]
    return f"functools[{', '.join(objects)}]"


ANSWERS = [
    *common_answers(spell, ("functools", "<|tool_call|>", "<|/tool_call|>")),
    Answer("special tokens", f"<|tool_call|>{spell(WEATHER).removeprefix('functools')}<|/tool_call|>", call(*WEATHER)),
    Answer("spaces", spell(WEATHER).replace("[", " [\n").replace("]", "\n]"), call(*WEATHER)),
    Answer("a module of Python", "import functools\n[functools.cache]", content("import functools\n[functools.cache]")),
    Answer("an empty list", "functools[] b", content("b")),
    Answer("no end", spell(WEATHER)[:-1], call(*WEATHER)),
]

test_answers_have_their_parts, test_damaged_answers, test_little_is_held_back = format_tests(
    READ,
    ANSWERS,
    ("functools", "<|tool_call|>", "<|/tool_call|>"),
    "a funct functool b <|tool_cal functoo",
    len("functools <"),
)
