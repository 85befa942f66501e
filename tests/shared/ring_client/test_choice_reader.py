"""Readers of choices: ids of calls, tokens of reasoning, formats that raise."""

import random
from typing import Any

import pytest
from recorded_answers import call, pieces_of

from blockyard.shared.errors import RequestError
from blockyard.shared.messages import FinishReason, TextDelta, ToolDefaults
from blockyard.shared.output_parsing.parts import CALL_END, Part, PartKind
from blockyard.shared.output_parsing.reader import read_all
from blockyard.shared.ring_client.choice_reader import ChoiceReader, joined, open_reader
from blockyard.shared.ring_client.request_fields.output_format import (
    CallForm,
    OutputForm,
    OutputFormats,
    ReasoningMeter,
    answer_format,
)
from blockyard.shared.ring_client.request_fields.tools import ToolMode, ToolUse
from blockyard.shared.tool_parsers.interface import CallId, ToolFormat
from blockyard.shared.tool_parsers.json_calls.families import HERMES
from blockyard.shared.tool_parsers.tools import Tool, ToolKind

FORMATS = OutputFormats.load(ToolDefaults(parser="hermes", reasoning_parser="qwen3"))
USE = ToolUse(ToolMode.AUTO, [Tool(ToolKind.FUNCTION, "f", {})], b"")
CALL = '<tool_call>{"name": "f", "arguments": {"a": "' + "b" * 200 + '"}}</tool_call>'
TEXT = f"<think>{'so ' * 50}</think>Now:{CALL}{CALL}end"


def reader(call_id: CallId = CallId.OPENAI) -> ChoiceReader:
    meter, errors = ReasoningMeter(), list[Exception]()
    read = answer_format(OutputForm(CallForm.FAMILY, True), USE, FORMATS, None, meter)
    return ChoiceReader(read, meter, call_id, True, errors.append)


def calls_of(one: ChoiceReader, text: str) -> list[Part]:
    return [part for delta in deltas(text) for part in one.push(delta) if part.kind == PartKind.CALL]


def deltas(text: str, draw: random.Random | None = None) -> list[TextDelta]:
    pieces = pieces_of(text, draw) if draw else list(text)
    made = [TextDelta("r", 0, 0, i, [i], piece) for i, piece in enumerate(pieces)]
    return [*made, TextDelta("r", 0, 0, len(made), [len(made)], "", FinishReason.STOP)]


@pytest.mark.parametrize("call_id", list(CallId))
def test_calls_get_ids_in_the_form_of_the_family(call_id: CallId) -> None:
    one = reader(call_id)
    parts = [part for delta in deltas(TEXT, random.Random(3)) for part in one.push(delta)]
    first, second = [part.call_id for part in parts if part.kind == PartKind.CALL]
    assert first != second and len(first) == len(second)
    if call_id == CallId.KIMI:
        assert (first, second) == ("functions.f:0", "functions.f:1")


def test_an_id_of_the_answer_is_kept() -> None:
    one = reader()
    text = '<tool_call>{"name": "f", "id": "mine", "arguments": {}}</tool_call>'
    assert calls_of(one, text) == [Part(PartKind.CALL, "f", "mine")]


@pytest.mark.parametrize("call_id", list(CallId))
def test_an_id_that_the_answer_writes_twice_is_that_of_the_first_call(call_id: CallId) -> None:
    call = '<tool_call>{"name": "f", "id": "functions.f:1", "arguments": {}}</tool_call>'
    ids = [part.call_id for part in calls_of(reader(call_id), call * 3)]
    assert ids[0] == "functions.f:1" and len(set(ids)) == 3
    if call_id == CallId.KIMI:
        assert ids[1:] == ["functions.f:2", "functions.f:3"]


def test_tokens_of_reasoning_are_counted() -> None:
    one = reader()
    for delta in deltas(TEXT):
        one.push(delta)
    assert one.num_reasoning == 3 * 50 + len("</think>")


def test_a_reader_that_fails_names_its_flags() -> None:
    def broken(text: Any, tools: Any) -> Any:
        yield from text.peek(3)
        raise ValueError("no")

    errors: list[RequestError] = []
    formats = OutputFormats(ToolFormat("frail", "none", broken, HERMES.write_grammar))
    one = open_reader(OutputForm(CallForm.FAMILY, False), USE, formats, None, True, errors.append)
    assert [one.push(delta) for delta in deltas("abcdef")] == [[]] * 7
    (error,) = errors
    assert str(error) == "--tool-call-parser frail failed at this answer: ValueError: no"
    assert (error.status, error.code) == (422, "output_parser_failed")


def test_nothing_is_read_after_an_error() -> None:
    def broken(text: Any) -> Any:
        yield from text.peek(3)
        raise ValueError("no")

    errors: list[Exception] = []
    one = ChoiceReader(broken, ReasoningMeter(), CallId.OPENAI, True, errors.append)
    assert [one.push(delta) for delta in deltas("abcdef")] == [[]] * 7
    assert [str(e) for e in errors] == ["no"]


def test_pieces_are_joined_by_kind() -> None:
    content, call = Part(PartKind.CONTENT, "a"), Part(PartKind.CALL, "f", "1")
    arguments = Part(PartKind.ARGUMENTS, "x")
    assert joined([]) == []
    assert joined([content, content, call, call, arguments, arguments, CALL_END, CALL_END, content]) == [
        Part(PartKind.CONTENT, "aa"),
        call,
        call,
        Part(PartKind.ARGUMENTS, "xx"),
        CALL_END,
        CALL_END,
        content,
    ]


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        (
            "ernie45",
            'The tool fits.\n</think>\n\n<tool_call>\n{"name": "f", "arguments": {"a": "Paris"}}\n</tool_call>\n',
            [Part(PartKind.REASONING, "The tool fits."), *call("f", '{"a": "Paris"}')],
        ),
        (
            "ernie45",
            "A greeting.\n\nI answer.\n</think>\n\n<response>\nHello!\nHow are you?\n</response>\n",
            [Part(PartKind.REASONING, "A greeting.\n\nI answer."), Part(PartKind.CONTENT, "Hello!\nHow are you?")],
        ),
        (
            "hunyuan_a13b",
            "<think>\nNo tool.\n</think>\n<answer>\n助手：Which city?\n</answer>",
            [Part(PartKind.REASONING, "No tool."), Part(PartKind.CONTENT, "Which city?")],
        ),
        (
            "hunyuan_a13b",
            '<think>\nso\n</think>\n<answer>\n<tool_calls>[{"name": "f", "arguments": {}}]</tool_calls>\n</answer>',
            [Part(PartKind.REASONING, "so"), *call("f", "{}")],
        ),
    ],
)
def test_answers_of_families_with_their_reasoning(name: str, text: str, expected: list[Part]) -> None:
    formats = OutputFormats.load(ToolDefaults(parser=name, reasoning_parser=name))
    for draw in (None, random.Random(4), random.Random(5)):
        one = open_reader(OutputForm(CallForm.FAMILY, True), USE, formats, None, True, pytest.fail)
        parts = joined([Part(part.kind, part.text) for delta in deltas(text, draw) for part in one.push(delta)])
        assert parts == expected


def test_tags_around_an_answer_are_no_content() -> None:
    meter = ReasoningMeter()
    formats = OutputFormats.load(ToolDefaults(parser="hermes", reasoning_parser="hunyuan_a13b"))
    for form in (CallForm.NONE, CallForm.FAMILY):
        read = answer_format(OutputForm(form, True), USE, formats, None, meter)
        text = "<think>\na\n</think>\n<answer>\nb\n</answer>"
        assert read_all(read, text) == [Part(PartKind.REASONING, "a"), Part(PartKind.CONTENT, "b")]
