import pytest
from recorded_answers import (
    TOOLS,
    Answer,
    call,
    check_answer,
    check_mutations,
    content,
    format_tests,
    reasoning,
    tool_reader,
)

from blockyard.shared.output_parsing.compose import in_order, read_content
from blockyard.shared.output_parsing.parts import CALL_END, Part
from blockyard.shared.output_parsing.reader import read_all
from blockyard.shared.tool_parsers.channels.openai import OPENAI, read_reasoning
from blockyard.shared.tool_parsers.forced import read_arguments

READ = tool_reader(OPENAI)
NEXT = "<|end|><|start|>assistant"
THINKS = "<|channel|>analysis<|message|>Need the weather."
CALLS = '<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{"city": "Paris", "days": 3}'
WEATHER = call("get_weather", '{"city": "Paris", "days": 3}')
ANSWERS = (
    Answer(
        "none",
        f"{THINKS}{NEXT}<|channel|>final<|message|>It is < 5 and |fine|.",
        reasoning("Need the weather.") + content("It is < 5 and |fine|."),
    ),
    Answer("one", f"{THINKS}{NEXT}{CALLS}<|call|>", reasoning("Need the weather.") + WEATHER),
    Answer("the stop token is not in the text", f"{THINKS}{NEXT}{CALLS}", reasoning("Need the weather.") + WEATHER),
    Answer(
        "several",
        f"{CALLS}<|call|><|start|>assistant<|channel|>commentary to=functions.get_time<|message|>{{}}<|call|>",
        WEATHER + call("get_time", "{}"),
    ),
    Answer(
        "recipient behind the role",
        ' to=functions.get_weather<|channel|>commentary json<|message|>{"city": "Paris", "days": 3}<|call|>',
        WEATHER,
    ),
    Answer(
        "recipient behind the role of a later message",
        f"{THINKS}{NEXT} to=functions.get_time<|channel|>commentary <|constrain|>json<|message|>{{}}",
        reasoning("Need the weather.") + call("get_time", "{}"),
    ),
    Answer(
        "nested",
        "<|channel|>commentary to=functions.search<|constrain|>json<|message|>"
        '{"query": "a \\"b\\" }", "filter": {"tags": ["x", "]"]}}<|call|>',
        call("search", '{"query": "a \\"b\\" }", "filter": {"tags": ["x", "]"]}}'),
    ),
    Answer(
        "unicode",
        '<|channel|>commentary to=functions.search<|message|>{"query": "Zürich 東京 \\u00e9 😀"}',
        call("search", '{"query": "Zürich 東京 \\u00e9 😀"}'),
    ),
    Answer(
        "text around",
        f"<|channel|>commentary<|message|>**Plan**:\n1. Look{NEXT}{CALLS}<|call|>",
        content("**Plan**:\n1. Look") + WEATHER,
    ),
    Answer(
        "two messages of one kind",
        f"{THINKS}{NEXT}<|channel|>analysis<|message|>And so on.{NEXT}<|channel|>final<|message|>Fine.<|return|>",
        reasoning("Need the weather.\nAnd so on.") + content("Fine."),
    ),
    Answer("cut short", CALLS[:-12], call("get_weather", '{"city": "Paris"')),
    Answer("cut in a header", "<|channel|>comment", content("<|channel|>comment")),
    Answer(
        "cut between messages",
        f"{THINKS}<|end|><|start|>assis",
        reasoning("Need the weather.") + content("<|start|>assis"),
    ),
    Answer(
        "malformed header",
        f"{THINKS}{NEXT}<|channel|>what is this<|message|>a",
        reasoning("Need the weather.") + content("<|start|>assistant<|channel|>what is this<|message|>a"),
    ),
    Answer("no header", "Just <text>.", content("Just <text>.")),
    Answer(
        "a marker in a text",
        '<|channel|>commentary to=functions.search<|message|>{"query": "<|call|> <|end|>"}<|call|>',
        call("search", '{"query": "<|call|> <|end|>"}'),
    ),
    Answer(
        "brackets do not close",
        '<|channel|>commentary to=functions.search<|message|>{"query": [1}<|call|>',
        call("search", '{"query": [1}'),
    ),
    Answer(
        "text behind the arguments",
        '<|channel|>commentary to=functions.get_time<|message|>{} and more<|call|>',
        call("get_time", "{}") + content("and more"),
    ),
    Answer("no arguments", "<|channel|>commentary to=functions.get_time<|message|><|call|>", call("get_time", "{}")),
    Answer("null", "<|channel|>commentary to=functions.get_time<|message|>null<|call|>", call("get_time", "{}")),
    Answer("arguments that are no JSON", "<|channel|>commentary to=get_time<|message|>now", call("get_time", "now")),
    Answer(
        "a tool of the model's own",
        "<|channel|>analysis to=python code<|message|>print(1)<|call|>",
        reasoning("print(1)"),
    ),
    Answer(
        "a channel in the middle of a message",
        f"{THINKS}<|channel|>final<|message|>Fine.",
        reasoning("Need the weather.") + content("Fine."),
    ),
)  # fmt: skip

test_answers_have_their_parts, test_damaged_answers, test_little_is_held_back = format_tests(
    READ, ANSWERS, OPENAI.markers, "a <|end <|messag <|constrain b <|channel> <|start <|retur", len("<|constrain|>")
)


BOTH = reasoning("Need the weather.") + content("Fine.")


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        (f"{THINKS}{NEXT}<|channel|>final<|message|>Fine.", BOTH),
        (f"{THINKS}<|channel|>final<|message|>Fine.", BOTH),
        ("<|channel|>final<|message|>Fine.", content("Fine.")),
        ("Fine.", content("Fine.")),
        (f"{THINKS}{NEXT}<|channel|>analysis<|message|>b", reasoning("Need the weather.\nb")),
        (f"<|channel|>commentary<|message|>Plan.{NEXT}{THINKS}", content("Plan.") + reasoning("Need the weather.")),
        (f"{THINKS}{NEXT}{CALLS}", reasoning("Need the weather.") + content(f"<|start|>assistant{CALLS}")),
        (f"{THINKS}<|en", reasoning("Need the weather.<|en")),
    ],
)
def test_reasoning_without_tools(text: str, parts: tuple[Part, ...]) -> None:
    read = in_order(lambda text: read_reasoning(text, None), read_content)
    check_answer(read, Answer("", text, parts))
    check_mutations(read, [Answer("", text, parts)], 50, OPENAI.markers)


def test_forced_calls_follow_in_the_final_message() -> None:
    tools = [tool for tool in TOOLS if tool.name == "get_time"]
    read = in_order(lambda text: read_reasoning(text, None), lambda text: read_arguments(text, tools))
    parts = read_all(read, f"{THINKS}{NEXT}<|channel|>final<|message|>{{}}")
    assert parts == [*reasoning("Need the weather."), *call("get_time", "{}")]
    assert parts[-1] == CALL_END
