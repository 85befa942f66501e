"""The official client, unmodified, against /v1/responses. The package's own types judge every event and answer."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import openai
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import BaseModel, TypeAdapter

from blockyard.shared.messages import GrammarKind, Tokenize, ToolDefaults

EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
PARSERS = ToolDefaults(auto_choice=True, parser="hermes", reasoning_parser="qwen3", reasoning_end="</think>")
TOOL: dict[str, Any] = {
    "type": "function",
    "name": "f",
    "description": "Does f.",
    "parameters": {"type": "object", "properties": {"a": {"type": "string"}}},
    "strict": False,
}
PATCH: dict[str, Any] = {"type": "custom", "name": "patch", "description": "Edits files."}
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": "\u00e9\\n"}}\n</tool_call>'
CUSTOM = '<tool_call>\n{"name": "patch", "arguments": {"input": "*** Begin\\n+x"}}\n</tool_call>'


@asynccontextmanager
async def client(url: str, key: str = "none") -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0) as made:
        yield made


def answering(text: str) -> Any:
    """A script of the ring: a character a token, and the end of the answer behind them."""
    return lambda request_id, index: text[index] if index < len(text) else "<end>"


def asked(**fields: Any) -> dict[str, Any]:
    return {"model": "tiny", "input": "hi", "extra_body": {"stop": "<end>"}} | fields


async def events_of(c: openai.AsyncOpenAI, **fields: Any) -> list[Any]:
    """The events of a streamed answer, after checks that hold for all."""
    stream = await c.responses.create(**asked(stream=True, **fields))
    events = [event async for event in stream]
    for event in events:
        EVENT.validate_python(event.to_dict())
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]
    return events


def items_of(events: list[Any]) -> list[dict[str, Any]]:
    """The items as their deltas add up, checked against what says the same."""
    built: list[dict[str, Any]] = []
    for event in events:
        match event.type:
            case "response.output_item.added":
                assert event.output_index == len(built)
                built.append(event.item.to_dict())
            case "response.content_part.added":
                assert event.content_index == len(built[-1]["content"])
                built[-1]["content"].append(event.part.to_dict())
            case "response.output_text.delta" | "response.reasoning_text.delta":
                assert event.item_id == built[-1]["id"]
                part = built[-1]["content"][event.content_index]
                part["text"] += event.delta
                if part["type"] == "output_text":
                    part["logprobs"] += [one.to_dict() for one in event.logprobs]
            case "response.function_call_arguments.delta":
                built[-1]["arguments"] += event.delta
            case "response.custom_tool_call_input.delta":
                built[-1]["input"] += event.delta
            case "response.output_text.done" | "response.reasoning_text.done":
                assert event.text == built[-1]["content"][event.content_index]["text"]
            case "response.function_call_arguments.done":
                assert event.arguments == built[-1]["arguments"]
            case "response.custom_tool_call_input.done":
                assert event.input == built[-1]["input"]
            case "response.content_part.done":
                assert event.part.text == built[-1]["content"][event.content_index]["text"]
            case "response.output_item.done":
                only_known_at_the_end = ("status", "encrypted_content")
                done = event.item.to_dict()
                built[-1] |= {name: done[name] for name in only_known_at_the_end if name in done}
                assert event.item.to_dict() == built[event.output_index]
    last = events[-1].response.to_dict()
    assert last["output"] == [item for item in built if item["status"] != "in_progress"]
    return built


async def test_text(rig) -> None:
    async with rig() as r, client(r.url) as c:
        answer = await c.responses.create(model="tiny", input="hi", max_output_tokens=3, metadata={"a": "b"})
        Response.model_validate(answer.to_dict())
    assert (answer.object, answer.model, answer.id[:5]) == ("response", "tiny", "resp_")
    assert (answer.status, answer.output_text) == ("incomplete", "w0 w1 w2 ")
    assert answer.incomplete_details is not None and answer.incomplete_details.reason == "max_output_tokens"
    assert answer.metadata == {"a": "b"} and answer.max_output_tokens == 3 and answer.to_dict()["store"] is True
    usage = answer.usage
    assert usage is not None and usage.output_tokens == 3 and usage.input_tokens_details.cached_tokens == 3
    assert usage.total_tokens == usage.input_tokens + 3
    [item] = answer.output
    assert (item.type, item.status) == ("message", "incomplete")


async def test_a_stream_of_text(rig) -> None:
    async with rig() as r, client(r.url) as c:
        r.ring.script = answering("Hi\u00e9!")
        events = await events_of(c)
    assert [event.type.removeprefix("response.") for event in events] == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        *["output_text.delta"] * 4,
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "completed",
    ]
    [item] = items_of(events)
    assert item["content"][0]["text"] == "Hi\u00e9!" and events[-1].response.status == "completed"


async def test_items_are_in_the_order_of_the_model(rig) -> None:
    text = f"<think>So.</think>Look: {CALL}\n{CUSTOM}"
    async with rig(tools=PARSERS) as r, client(r.url) as c:
        r.ring.script = answering(text)
        fields = {"tools": [TOOL, PATCH], "include": ["reasoning.encrypted_content"]}
        whole = await c.responses.create(**asked(**fields))
        Response.model_validate(whole.to_dict())
        items = items_of(await events_of(c, **fields))
    assert [item["type"] for item in items] == ["reasoning", "message", "function_call", "custom_tool_call"]
    reasoning, message, call, custom = items
    assert reasoning["content"] == [{"type": "reasoning_text", "text": "So."}]
    assert message["content"][0]["text"] == "Look:"
    assert (call["name"], call["arguments"], call["status"]) == ("f", '{"a": "\u00e9\\n"}', "completed")
    assert (custom["name"], custom["input"]) == ("patch", "*** Begin\n+x")
    assert len({item["id"] for item in items}) == 4
    volatile = {"id": None, "call_id": None}
    shown = [item.to_dict() for item in whole.output]
    assert [one | volatile for one in shown] == [one | volatile for one in items]
    assert whole.usage is not None and whole.usage.output_tokens_details.reasoning_tokens > 0


async def test_the_helper_for_streams(rig) -> None:
    async with rig(tools=PARSERS) as r, client(r.url) as c:
        r.ring.script = answering(f"<think>So.</think>{CALL}")
        arguments = ""
        async with c.responses.stream(**asked(tools=[TOOL | {"strict": True}])) as stream:
            async for event in stream:
                if event.type == "response.function_call_arguments.delta":
                    arguments = event.snapshot
            final = await stream.get_final_response()
    call = final.output[1]
    assert call.type == "function_call" and call.arguments == arguments == '{"a": "\u00e9\\n"}'
    assert call.parsed_arguments == {"a": "\u00e9\n"}


async def test_parsed_text(rig) -> None:
    class Answer(BaseModel):
        word: str

    async with rig() as r, client(r.url) as c:
        r.ring.script = answering('{"word": "yes"}')
        answer = await c.responses.parse(**asked(text_format=Answer))
    [asked_for] = r.ring.frames(Tokenize)
    assert answer.output_parsed == Answer(word="yes")
    assert asked_for.grammar.kind is GrammarKind.JSON_SCHEMA and '"word"' in asked_for.grammar.source


async def test_logprobs_are_of_the_text(rig) -> None:
    fields = {"include": ["message.output_text.logprobs"], "top_logprobs": 2, "max_output_tokens": 2}
    async with rig() as r, client(r.url) as c:
        whole = await c.responses.create(**asked(**fields))
        events = await events_of(c, **fields)
    assert len(items_of(events)) == 1
    shown = whole.output[0].to_dict()["content"][0]["logprobs"]
    assert [(one["token"], one["logprob"], len(one["top_logprobs"])) for one in shown] == [
        ("a", -1.5, 2),
        ("b", -1.5, 2),
    ]
    deltas = [one.to_dict() for e in events if e.type == "response.output_text.delta" for one in e.logprobs]
    assert deltas == shown == events[-1].response.to_dict()["output"][0]["content"][0]["logprobs"]


async def test_errors_become_the_clients_exceptions(rig) -> None:
    async with rig(api_keys=["one"]) as r:
        async with client(r.url, "wrong") as c:
            with pytest.raises(openai.AuthenticationError):
                await c.responses.create(**asked())
        async with client(r.url, "one") as c:
            with pytest.raises(openai.NotFoundError, match="gpt-9"):
                await c.responses.create(**asked(model="gpt-9"))
            with pytest.raises(openai.BadRequestError) as caught:
                await c.responses.create(**asked(input="a" * 300))
            assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "input")


async def test_a_stream_of_a_prompt_that_does_not_fit_fails_with_its_code(rig) -> None:
    """Agents look for the code in the stream alone, and then shorten their history."""
    async with rig() as r, client(r.url) as c:
        stream = await c.responses.create(**asked(input="a" * 300, stream=True))
        events = [event async for event in stream]
        with pytest.raises(openai.BadRequestError):
            await c.responses.create(**asked(top_p=0.0, stream=True))
    assert [event.type for event in events] == ["response.created", "response.in_progress", "response.failed"]
    assert events[-1].response.error.code == "context_length_exceeded"


async def test_a_failure_in_mid_stream(rig) -> None:
    async with rig() as r, client(r.url) as c:
        r.ring.fail_at = 3
        stream = await c.responses.create(**asked(stream=True))
        events = [event async for event in stream]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    last = events[-1]
    assert last.type == "response.failed" and last.response.status == "failed" and last.response.output == []
    assert last.response.error.code == "server_error" and "the worker stumbled" in last.response.error.message
