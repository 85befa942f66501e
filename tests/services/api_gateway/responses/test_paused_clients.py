"""Streams whose client does not read for a while, with a reader of calls and reasoning."""

import gc
import random

import msgspec
import pytest
from recorded_answers import pieces_of

from blockyard.services.api_gateway.apis.chat import CHAT
from blockyard.services.api_gateway.apis.interface import Usage
from blockyard.services.api_gateway.apis.responses.api import RESPONSES
from blockyard.services.api_gateway.requests.generate_request import ResponseOptions, ResponsesOptions
from blockyard.services.api_gateway.responses.event_stream import EventStream, Kept
from blockyard.services.api_gateway.responses.response_writer import ResponseWriter, UnreadText
from blockyard.shared.errors import RequestError
from blockyard.shared.messages import FinishReason, TextDelta, TextLogprobs, ToolDefaults
from blockyard.shared.output_parsing.parts import Part, PartKind
from blockyard.shared.ring_client.choice_reader import joined, open_reader
from blockyard.shared.ring_client.request_fields.output_format import (
    CallForm,
    OutputForm,
    OutputFormats,
)
from blockyard.shared.ring_client.request_fields.tools import ToolMode, ToolUse
from blockyard.shared.tool_parsers.tools import Tool, ToolKind

FORMATS = OutputFormats.load(ToolDefaults(parser="hermes", reasoning_parser="qwen3"))
USE = ToolUse(ToolMode.AUTO, [Tool(ToolKind.FUNCTION, "f", {})], b"")
CALL = '<tool_call>{"name": "f", "arguments": {"a": "' + "b" * 200 + '"}}</tool_call>'
TEXT = f"<think>{'so ' * 50}</think>Now:{CALL}{CALL}end"


class Transport:
    """Keeps what is written."""

    def __init__(self) -> None:
        self.data = b""

    def write(self, data: bytes) -> None:
        self.data += data

    def is_closing(self) -> bool:
        return False

    def get_write_buffer_size(self) -> int:
        return 0


def deltas(text: str, draw: random.Random | None = None) -> list[TextDelta]:
    pieces = pieces_of(text, draw) if draw else list(text)
    made = [TextDelta("r", 0, 0, i, [i], piece) for i, piece in enumerate(pieces)]
    return [*made, TextDelta("r", 0, 0, len(made), [len(made)], "", FinishReason.STOP)]


def shown(data: bytes) -> list[Part]:
    """The parts of a chat stream's events."""
    parts: list[Part] = []
    for event in data.split(b"\n\n")[:-1]:
        delta = msgspec.json.decode(event.removeprefix(b"data: "))["choices"][0]["delta"]
        if "reasoning" in delta:
            parts.append(Part(PartKind.REASONING, delta["reasoning"]))
        if delta.get("content"):
            parts.append(Part(PartKind.CONTENT, delta["content"]))
        for call in delta.get("tool_calls", []):
            function = call["function"]
            parts += [Part(PartKind.CALL, function["name"])] if "name" in function else []
            parts += [Part(PartKind.ARGUMENTS, function["arguments"])] if function["arguments"] else []
    return joined(parts)


@pytest.mark.parametrize("start_at", [0, 1, 40, 150, 10_000])
def test_a_client_that_pauses_gets_the_same_parts(start_at: int) -> None:
    errors: list[RequestError] = []
    unread, transport = UnreadText(1 << 20), Transport()
    writer = ResponseWriter(unread)
    options = ResponseOptions("id", 1, "tiny", has_reader=True, token_ids=True)
    of_choice = open_reader(OutputForm(CallForm.FAMILY, True), USE, FORMATS, None, True, errors.append)
    stream = EventStream(options, CHAT.events(options).choice(0, []), writer, lambda: Usage(0, 0), of_choice)
    for i, delta in enumerate(deltas(TEXT)):
        if i == start_at:
            assert unread.num_bytes == i * 65
            writer.start(transport, False, 0.0)  # type: ignore[arg-type]
        stream.push(delta, 0.0, 0.0)
    if start_at > len(TEXT):
        gc.collect()
        kept = [one for one in gc.get_objects() if type(one) is Kept]
        assert len(kept) < len(TEXT) // 64 + 64 and {one.delta.text for one in kept} == {""}
        writer.start(transport, False, 0.0)  # type: ignore[arg-type]
    call = [Part(PartKind.CALL, "f"), Part(PartKind.ARGUMENTS, '{"a": "' + "b" * 200 + '"}')]
    expected = [Part(PartKind.REASONING, ("so " * 50).strip()), Part(PartKind.CONTENT, "Now:")]
    assert shown(transport.data) == [*expected, *call, *call, Part(PartKind.CONTENT, "end")]
    events = [msgspec.json.decode(e[6:])["choices"][0] for e in transport.data.split(b"\n\n")[:-1]]
    assert [i for event in events for i in event["token_ids"] or []] == [*range(len(TEXT) + 1)]
    assert not errors and of_choice.num_reasoning == 3 * 50 + len("</think>")


@pytest.mark.parametrize("start_at", [0, 1, 150, 180, 10_000])
def test_log_probabilities_stay_with_their_text_while_a_client_pauses(start_at: int) -> None:
    transport = Transport()
    writer = ResponseWriter(UnreadText(1 << 30))
    own = ResponsesOptions(b'"a":1', {})
    options = ResponseOptions("resp_1", 1, "tiny", logprobs=True, has_reader=True, responses=own)
    of_choice = open_reader(OutputForm(CallForm.FAMILY, True), USE, FORMATS, None, True, lambda error: None)
    events = RESPONSES.events(options)
    stream = EventStream(options, events.choice(0, None), writer, lambda: Usage(0, 0), of_choice)
    given = deltas(TEXT)
    for i, delta in enumerate(given):
        if i == start_at:
            writer.start(transport, False, 0.0)  # type: ignore[arg-type]
        logprobs = [TextLogprobs(i, delta.text.encode(), -float(i), 1, [], [], [])]
        stream.push(msgspec.structs.replace(delta, logprobs=logprobs), 0.0, 0.0)
    if start_at > len(given):
        writer.start(transport, False, 0.0)  # type: ignore[arg-type]
    shown = [msgspec.json.decode(one.partition(b"data: ")[2]) for one in transport.data.split(b"\n\n")[:-1]]
    last = msgspec.json.decode(events.ending(lambda: Usage(0, 0)).partition(b"data: ")[2])["response"]
    messages = [item["content"][0] for item in last["output"] if item["type"] == "message"]
    assert [part["text"] for part in messages] == ["Now:", "end"]
    for part in messages:
        first = TEXT.index(part["text"])
        expected = [(one, -float(first + i)) for i, one in enumerate(part["text"])]
        assert [(one["token"], one["logprob"]) for one in part["logprobs"] if one["token"]] == expected
    streamed = [one for event in shown if event["type"] == "response.output_text.delta" for one in event["logprobs"]]
    assert streamed == [one for part in messages for one in part["logprobs"]]
