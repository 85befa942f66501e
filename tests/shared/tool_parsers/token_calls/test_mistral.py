from call_answers import TIME, Call, common_answers
from recorded_answers import Answer, call, content, format_tests, tool_reader

from blockyard.shared.tool_parsers.token_calls.mistral import MISTRAL

READ = tool_reader(MISTRAL)


def spell(*calls: Call) -> str:
    return "".join(f"[TOOL_CALLS]{name}[ARGS]{arguments}" for name, arguments in calls)


def spell_list(*calls: Call) -> str:
    objects = [f'{{"name": "{name}", "arguments": {arguments}, "id": "a1B2c3D4e"}}' for name, arguments in calls]
    return f"[TOOL_CALLS] [{', '.join(objects)}]"


def listed(answer: Answer) -> Answer:
    return Answer(f"list: {answer.name}", answer.text, answer.parts)


ANSWERS = [
    *common_answers(spell, MISTRAL.markers),
    *map(listed, common_answers(spell_list, MISTRAL.markers)),
    Answer("a list without ids", '[TOOL_CALLS][{"name": "get_time", "arguments": {}}]', call(*TIME)),
    Answer(
        "an id first",
        '[TOOL_CALLS][{"id": "abcDEF123", "name": "get_time", "arguments": {}}]',
        call(*TIME, "abcDEF123"),
    ),
    Answer(
        "ids",
        "[TOOL_CALLS]get_time[CALL_ID]abcDEF123[ARGS]{}[TOOL_CALLS]get_time[CALL_ID]xyzXYZ789[ARGS]{}",
        call(*TIME, "abcDEF123") + call(*TIME, "xyzXYZ789"),
    ),
    Answer("without [ARGS]", "[TOOL_CALLS]get_time{}", call(*TIME)),
    Answer("spaces", "[TOOL_CALLS] get_time [ARGS] {}\n[TOOL_CALLS]\nget_time\n{}", call(*TIME) * 2),
    Answer("empty arguments", "[TOOL_CALLS]get_time[ARGS][TOOL_CALLS]get_time[ARGS]{}", call(*TIME) * 2),
    Answer("a parameter called name", spell(("search", '{"name": "x"}')), call("search", '{"name": "x"}')),
    Answer("text behind arguments", spell(TIME) + " Done.", call(*TIME) + content("Done.")),
    Answer("an empty list", "a [TOOL_CALLS][] b", content("a b")),
    Answer("no calls in the list", "[TOOL_CALLS][get_time]", content("[TOOL_CALLS][get_time]")),
    Answer("no name", "[TOOL_CALLS]the tool[ARGS]{}", content("[TOOL_CALLS]the tool[ARGS]{}")),
    Answer("arguments are no object", spell(("search", "query")), content(spell(("search", "query")))),
    Answer(
        "brackets do not close",
        spell(("search", '{"query": [1}'), TIME),
        call("search", '{"query": [1}') + call(*TIME),
    ),
]

test_answers_have_their_parts, test_damaged_answers, test_little_is_held_back = format_tests(
    READ, ANSWERS, MISTRAL.markers, "a [TOOL b [TOOL_CALL ] [ARGS] [TOOL_", len("[TOOL_CALLS]")
)
