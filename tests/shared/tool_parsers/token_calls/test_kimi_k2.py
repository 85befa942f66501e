import pytest
from call_answers import TIME, WEATHER, Call, common_answers
from recorded_answers import Answer, call, check_answer, check_held_back, check_mutations, content, tool_reader

from blockyard.shared.output_parsing.parts import Part, PartKind
from blockyard.shared.tool_parsers.token_calls.kimi_k2 import KIMI_K2

READ = tool_reader(KIMI_K2)


def spell(*calls: Call, first: int = 0) -> str:
    each = [
        f"<|tool_call_begin|>functions.{name}:{first + i}<|tool_call_argument_begin|>{arguments}<|tool_call_end|>"
        for i, (name, arguments) in enumerate(calls)
    ]
    return f"<|tool_calls_section_begin|>{''.join(each)}<|tool_calls_section_end|>"


def numbered(name: str, arguments: str, index: int = 0) -> tuple[Part, ...]:
    return call(name, arguments, f"functions.{name}:{index}")


def with_ids(answer: Answer) -> Answer:
    """An answer of `common_answers`, whose calls have no ids."""
    parts, index = list(answer.parts), 0
    for i, part in enumerate(parts):
        if part.kind == PartKind.CALL:
            parts[i] = Part(part.kind, part.text, f"functions.{part.text}:{index}")
            index += 1
    return Answer(answer.name, answer.text, tuple(parts))


ANSWERS = [
    *map(with_ids, common_answers(spell, KIMI_K2.markers)),
    Answer("a later turn", spell(TIME, first=12), numbered(*TIME, index=12)),
    Answer("no section", spell(WEATHER).removeprefix("<|tool_calls_section_begin|>"), numbered(*WEATHER)),
    Answer(
        "spaces",
        spell(WEATHER, TIME).replace("|><|", "|>\n<|").replace(":0", ":0 ").replace("{", "\n{"),
        numbered(*WEATHER) + numbered(*TIME, index=1),
    ),
    Answer("no number", spell(WEATHER).replace(":0", ""), call(*WEATHER)),
    Answer("no prefix", spell(WEATHER).replace("functions.", ""), call(*WEATHER, "get_weather:0")),
    Answer("a dot in the name", spell(("a.b", "{}")), numbered("a.b", "{}")),
    Answer("empty arguments", spell(("get_time", "")), numbered(*TIME)),
    Answer("no end", spell(WEATHER)[: spell(WEATHER).index("<|tool_call_end|>")], numbered(*WEATHER)),
    Answer(
        "brackets do not close",
        spell(("search", '{"query": [1}'), TIME) + "b",
        numbered("search", '{"query": [1}') + numbered(*TIME, index=1) + content("b"),
    ),
    Answer("no name", spell(("", "{}")), content(spell(("", "{}")))),
    Answer("arguments are no object", spell(("search", "query")), content(spell(("search", "query")))),
]


@pytest.mark.parametrize("answer", ANSWERS, ids=lambda a: a.name)
def test_answers_have_their_parts(answer: Answer) -> None:
    check_answer(READ, answer)


def test_damaged_answers() -> None:
    check_mutations(READ, ANSWERS, 500, KIMI_K2.markers)


def test_little_is_held_back() -> None:
    check_held_back(
        READ, "a <|tool <|tool_call b <|tool_calls_section_end|> <|tool_c", len("<|tool_calls_section_begin|>")
    )
