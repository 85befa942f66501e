import pytest
from call_answers import WEATHER, Call, common_answers
from recorded_answers import Answer, call, check_answer, check_held_back, check_mutations, content, tool_reader

from blockyard.shared.tool_parsers.json_calls.phi4_mini_json import PHI4_MINI_JSON

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


@pytest.mark.parametrize("answer", ANSWERS, ids=lambda a: a.name)
def test_answers_have_their_parts(answer: Answer) -> None:
    check_answer(READ, answer)


def test_damaged_answers() -> None:
    check_mutations(READ, ANSWERS, 500, ("functools", "<|tool_call|>", "<|/tool_call|>"))


def test_little_is_held_back() -> None:
    check_held_back(READ, "a funct functool b <|tool_cal functoo", len("functools <"))
