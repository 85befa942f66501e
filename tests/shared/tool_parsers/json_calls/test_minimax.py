import pytest
from call_answers import TIME, WEATHER, Call, common_answers
from recorded_answers import Answer, call, check_answer, check_held_back, check_mutations, content, tool_reader

from blockyard.shared.tool_parsers.json_calls.minimax import MINIMAX

READ = tool_reader(MINIMAX)


def spell(*calls: Call) -> str:
    lines = [f'{{"name": "{name}", "arguments": {arguments}}}\n' for name, arguments in calls]
    return f"<tool_calls>\n{''.join(lines)}</tool_calls>"


ANSWERS = [
    *common_answers(spell, ("<tool_calls>", "</tool_calls>")),
    Answer("no end", spell(WEATHER, TIME)[: -len("</tool_calls>")], call(*WEATHER) + call(*TIME)),
    Answer("one line", spell(WEATHER, TIME).replace("\n", ""), call(*WEATHER) + call(*TIME)),
    Answer("nothing", "a <tool_calls>\n</tool_calls> b", content("a b")),
    Answer(
        "a line that is no call",
        spell(WEATHER).replace("</tool_calls>", "and more</tool_calls>"),
        call(*WEATHER) + content("and more</tool_calls>"),
    ),
    Answer("malformed", "<tool_calls>\nget_time\n</tool_calls>", content("<tool_calls>\nget_time\n</tool_calls>")),
]


@pytest.mark.parametrize("answer", ANSWERS, ids=lambda a: a.name)
def test_answers_have_their_parts(answer: Answer) -> None:
    check_answer(READ, answer)


def test_damaged_answers() -> None:
    check_mutations(READ, ANSWERS, 500, ("<tool_calls>", "</tool_calls>"))


def test_little_is_held_back() -> None:
    check_held_back(READ, "a <tool <tool_cal> b </tool_calls> <tool_c", len("<tool_calls>"))
