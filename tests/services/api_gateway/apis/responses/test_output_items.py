"""A streamed answer equals the whole one, however its text comes in pieces, and its events add up to its items."""

import random
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter
from recorded_answers import pieces_of

from blockyard.services.api_gateway.apis.hidden_reasoning import read_hidden_reasoning
from blockyard.services.api_gateway.apis.interface import PLAIN, FinishedChoice, Usage
from blockyard.services.api_gateway.apis.responses.api import RESPONSES
from blockyard.services.api_gateway.requests.generate_request import ResponseOptions, ResponsesOptions
from blockyard.services.api_gateway.responses.event_stream import EventStream
from blockyard.services.api_gateway.responses.full_response import CollectedChoice
from blockyard.services.api_gateway.responses.response_writer import ResponseWriter, UnreadText
from blockyard.shared.errors import RequestError
from blockyard.shared.messages import FinishReason, TextDelta, TextLogprobs, ToolDefaults
from blockyard.shared.ring_client.choice_reader import ChoiceReader, open_reader
from blockyard.shared.ring_client.request_fields.output_format import CallForm, OutputForm, OutputFormats
from blockyard.shared.ring_client.request_fields.tools import TEXT_PARAMETERS, ToolMode, ToolUse
from blockyard.shared.tool_parsers.tools import Tool, ToolKind

EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
FORMATS = OutputFormats.load(ToolDefaults(parser="hermes", reasoning_parser="qwen3"))
TOOLS = [Tool(ToolKind.FUNCTION, name, {}) for name in ("f", "a__f", "tool_search")]
TOOLS.append(Tool(ToolKind.CUSTOM, "patch", TEXT_PARAMETERS))
USE = ToolUse(ToolMode.AUTO, TOOLS, b"")


def call(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


TEXTS = {
    "text": 'H\u00e9 "you"\n<b>',
    "nothing": "",
    "reasoning and text": "<think>So\u00e9.</think>\n\nYes.",
    "reasoning alone": "<think>So",
    "a call": call("f", '{"a": "\u00e9\\n"}'),
    "all": "<think>So.</think>Look: "
    + call("patch", '{"input": "*** Begin\\n+x\\\\"}')
    + "\n"
    + call("a__f", '{"b": [1, {}]}')
    + call("tool_search", '{"query": "x"}')
    + "\nBye",
    "a cut call": call("f", '{"a": 1}')[:40],
}
OWN = ResponsesOptions(
    b'"tools":[],"tool_choice":"auto","parallel_tool_calls":true', {"a__f": ("a", "f")}, "tool_search", True
)


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


def reader() -> ChoiceReader:
    errors: list[RequestError] = []
    return open_reader(OutputForm(CallForm.FAMILY, True), USE, FORMATS, None, True, errors.append)


def options(reads: bool, logprobs: bool = False) -> ResponseOptions:
    custom = ("patch",)
    return ResponseOptions(
        "resp_1", 7, "tiny", has_reader=reads, custom_tools=custom, responses=OWN, logprobs=logprobs, num_top=1
    )


def deltas(pieces: Sequence[str], finish: FinishReason, logprobs: bool = False) -> list[TextDelta]:
    """A token each piece, and one without text at the end. Log-probabilities tell the tokens apart."""
    made = []
    for i, piece in enumerate([*pieces, ""]):
        token = piece.encode() or b"<eos>"
        shown = [TextLogprobs(i, token, -float(i), 1, [i], [b"t"], [-float(i)])] if logprobs else []
        made.append(TextDelta("r", 0, 0, i, [i], piece, finish if i == len(pieces) else None, logprobs=shown))
    return made


def streamed(
    given: list[TextDelta], shown: ResponseOptions, start_at: int = 0, chunked: bool = False, valid: bool = True
) -> list[Any]:
    """The events, each valid by the official package. The client begins to read at this delta.

    The package takes most of the time: it is asked with `valid` alone.
    """
    writer, transport = ResponseWriter(UnreadText(1 << 20)), Transport()
    events, usage = RESPONSES.events(shown), Usage(3, 5, 1, 2)
    of_choice = reader() if shown.has_reader else None
    stream = EventStream(shown, events.choice(0, None), writer, lambda: usage, of_choice)
    for i, delta in enumerate(given):
        if i == start_at:
            writer.start(transport, chunked, 0.0)  # type: ignore[arg-type]
        stream.push(delta, 0.0, 0.0)
    if start_at >= len(given):
        writer.start(transport, chunked, 0.0)  # type: ignore[arg-type]
    writer.write_unpaused(events.ending(lambda: usage), 0.0)
    data = unchunked(transport.data) if chunked else transport.data
    decoded = []
    for text in data.decode().split("\n\n")[:-1]:
        head, _, body = text.partition("\ndata: ")
        decoded.append(msgspec.json.decode(body))
        assert head == f"event: {decoded[-1]['type']}"
        if valid:
            EVENT.validate_python(decoded[-1])
    assert [event["sequence_number"] for event in decoded] == list(range(len(decoded)))
    return decoded


def unchunked(data: bytes) -> bytes:
    out = b""
    while data:
        size, _, data = data.partition(b"\r\n")
        num = int(size, 16)
        assert data[num : num + 2] == b"\r\n"
        out, data = out + data[:num], data[num + 2 :]
    return out


def whole(given: list[TextDelta], shown: ResponseOptions) -> dict[str, Any]:
    collected = CollectedChoice(False, reader() if shown.has_reader else None)
    for delta in given:
        collected.push(delta, 0.0, 0.0)
    ends = collected.logprob_ends
    choice = FinishedChoice(collected.parts(), collected.finish, None, collected.logprobs, [], logprob_ends=ends)
    answer: dict[str, Any] = msgspec.json.decode(RESPONSES.whole(shown, [choice], Usage(3, 5, 1, 2)))
    Response.model_validate(answer)
    return answer


def built(events: list[Any]) -> list[dict[str, Any]]:
    """The items as a client adds them up from deltas, checked against every event that says the same."""
    items: list[dict[str, Any]] = []
    ended: list[int] = []
    for event in events:
        index = event.get("output_index")
        match event["type"].removeprefix("response."):
            case "output_item.added":
                assert index == len(items) == len(ended)
                items.append(event["item"])
            case "content_part.added":
                items[index]["content"].append(event["part"])
            case "output_text.delta" | "reasoning_text.delta":
                assert event["item_id"] == items[index]["id"]
                items[index]["content"][0]["text"] += event["delta"]
                if "logprobs" in event:
                    items[index]["content"][0]["logprobs"] += event["logprobs"]
            case "function_call_arguments.delta":
                items[index]["arguments"] += event["delta"]
            case "custom_tool_call_input.delta":
                items[index]["input"] += event["delta"]
            case "output_text.done" | "reasoning_text.done":
                assert event["text"] == items[index]["content"][0]["text"]
            case "content_part.done":
                assert event["part"] == items[index]["content"][0]
            case "function_call_arguments.done":
                assert event["arguments"] == items[index]["arguments"]
            case "custom_tool_call_input.done":
                assert event["input"] == items[index]["input"]
            case "output_item.done":
                ended.append(index)
                done = event["item"]
                late = ("status", "encrypted_content") + (("arguments",) if done["type"] == "tool_search_call" else ())
                items[index] |= {name: done[name] for name in late if name in done}
                assert done == items[index]
    assert ended == list(range(len(items)))
    assert events[-1]["response"]["output"] == items
    return items


def without_ids(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{name: value for name, value in item.items() if name not in ("id", "call_id")} for item in items]


def check(given: list[TextDelta], shown: ResponseOptions, **how: Any) -> list[dict[str, Any]]:
    """The items without ids, the same streamed and whole."""
    events, answer = streamed(given, shown, **how), whole(given, shown)
    items = without_ids(built(events))
    assert items == without_ids(answer["output"])
    last = events[-1]["response"]
    names = [name for name in answer if name not in ("output", "completed_at")]
    assert [last[name] for name in names] == [answer[name] for name in names]
    cut = given[-1].finish is FinishReason.LENGTH
    assert events[-1]["type"] == ("response.incomplete" if cut else "response.completed")
    return items


@pytest.mark.parametrize("name", TEXTS)
def test_streamed_and_whole_are_equal_in_every_split(name: str) -> None:
    text, shown = TEXTS[name], options(reads=True)
    splits = [[text], list(text), *([text[:i], text[i:]] for i in range(1, len(text)))]
    found = [
        check(deltas(pieces, FinishReason.STOP), shown, chunked=bool(i % 2), valid=i < 5)
        for i, pieces in enumerate(splits)
    ]
    assert all(items == found[0] for items in found)


def test_the_items_of_all_kinds() -> None:
    items = check(deltas(list(TEXTS["all"]), FinishReason.STOP), options(reads=True))
    kinds = ["reasoning", "message", "custom_tool_call", "function_call", "tool_search_call", "message"]
    assert [item["type"] for item in items] == kinds and {item["status"] for item in items} == {"completed"}
    reasoning, look, patch, function, search, bye = items
    assert reasoning["content"][0]["text"] == "So." == read_hidden_reasoning(reasoning["encrypted_content"])
    assert (look["content"][0]["text"], bye["content"][0]["text"]) == ("Look:", "Bye")
    assert (patch["name"], patch["input"], "namespace" in patch) == ("patch", "*** Begin\n+x\\", False)
    assert (function["namespace"], function["name"], function["arguments"]) == ("a", "f", '{"b": [1, {}]}')
    assert (search["execution"], search["arguments"]) == ("client", {"query": "x"})


@pytest.mark.parametrize("seed", range(20))
def test_a_client_that_begins_to_read_later_gets_the_same(seed: int) -> None:
    draw = random.Random(seed)
    text = TEXTS["all"]
    pieces = pieces_of(text, draw)
    expected = check(deltas([text], FinishReason.STOP), options(reads=True))
    given = deltas(pieces, FinishReason.STOP)
    assert check(given, options(reads=True), start_at=draw.randrange(len(given) + 2)) == expected


@pytest.mark.parametrize("reads", [False, True])
def test_an_answer_that_is_cut_anywhere_is_incomplete(reads: bool) -> None:
    text = TEXTS["all"]
    for end in range(0, len(text), 1 if reads else 17):
        items = check(deltas(list(text[:end]), FinishReason.LENGTH), options(reads), valid=end % 17 == 0)
        assert all(item["status"] == "completed" for item in items[:-1])
    cut_call = check(deltas(list(TEXTS["a cut call"]), FinishReason.STOP), options(reads=True))
    assert [item["status"] for item in cut_call] == ["incomplete"]


@pytest.mark.parametrize("reads", [False, True])
@pytest.mark.parametrize("name", TEXTS)
def test_log_probabilities_are_those_of_the_text(name: str, reads: bool) -> None:
    text, shown = TEXTS[name], options(reads, logprobs=True)
    for pieces in ([text], list(text), pieces_of(text, random.Random(1))):
        items = check(deltas(pieces, FinishReason.STOP, logprobs=True), shown)
        shown_tokens = [one for i in items if i["type"] == "message" for one in i["content"][0]["logprobs"]]
        places = [one["logprob"] for one in shown_tokens]
        assert len(set(places)) == len(places) and places == sorted(places, reverse=True)
        tokens = [one["token"] for one in shown_tokens]
        if not reads and text:
            assert tokens == [*pieces, "<eos>"]
        elif name == "all" and pieces == list(text):
            assert "".join(tokens) == "Look:Bye<eos>"


def test_a_failure_ends_no_item() -> None:
    events = RESPONSES.events(options(reads=True))
    choice, of_choice = events.choice(0, None), reader()
    data = choice.opening(None)
    text = TEXTS["a call"] + "\n" + TEXTS["a call"][:45]
    for part in of_choice.push(TextDelta("r", 0, 0, 0, [0], text)):
        data += choice.event(part, PLAIN)
    data += events.failed(RequestError("it broke", status=500))
    decoded = [msgspec.json.decode(one.partition("\ndata: ")[2]) for one in data.decode().split("\n\n")[:-1]]
    for event in decoded:
        EVENT.validate_python(event)
    kinds = [event["type"] for event in decoded]
    assert kinds.count("response.output_item.added") == 2 and kinds.count("response.output_item.done") == 1
    last = decoded[-1]
    assert last["type"] == "response.failed" and [item["type"] for item in last["response"]["output"]] == [
        "function_call"
    ]
    assert last["response"]["error"] == {"code": "server_error", "message": "it broke"}
    assert [event["sequence_number"] for event in decoded] == list(range(len(decoded)))
