"""The official client, unmodified, against the gateway."""

import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import anthropic
import msgspec
import pytest
from fake_ring import END, SCHEDULER, member
from recorded_answers import pieces_of

from blockyard.services.api_gateway.bodies.body_parser import LARGE_BYTES
from blockyard.shared.messages import Generate, Refused, Role, Tokenize, ToolDefaults

USER: Any = [{"role": "user", "content": "hi"}]
PARSERS = ToolDefaults(auto_choice=True, parser="hermes", reasoning_parser="qwen3", reasoning_end="</think>")
SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}}
TOOLS: Any = [{"name": "f", "description": "Does it.", "input_schema": SCHEMA}]
ANSWER = 'So.</think>Look: <tool_call>\n{"name": "f", "arguments": {"a": "\u00e9\\n"}}\n</tool_call>'

WEATHER = '<tool_call>\n{"name": "f", "arguments": {"a": "Z\u00fcrich", "b": [1, {"c": null}]}}\n</tool_call>'


@asynccontextmanager
async def client(url: str, **fields: Any) -> AsyncIterator[anthropic.AsyncAnthropic]:
    async with anthropic.AsyncAnthropic(base_url=url, max_retries=0, **({"api_key": "none"} | fields)) as made:
        yield made


def asked(**fields: Any) -> dict[str, Any]:
    return {"model": "tiny", "messages": USER, "max_tokens": 150} | fields


def shown(answer: Any) -> list[dict[str, Any]]:
    """The blocks of an answer without the ids of calls, which are random."""
    return [block.to_dict() | {"id": None} for block in answer.content]


def with_context(r: Any, length: int) -> None:
    """Gives the model a longer context."""
    card = msgspec.structs.replace(r.ring.members[SCHEDULER].card, max_model_len=length)
    r.ring.join(member(Role.SCHEDULER, SCHEDULER, card=card))


def script(text: Sequence[str]) -> Any:
    return lambda request_id, index: text[index] if index < len(text) else END


async def test_create(rig) -> None:
    async with rig() as r, client(r.url) as c:
        answer = await c.messages.create(**asked(max_tokens=3))
        r.ring.script = script("Hi")
        whole = await c.messages.create(**asked(stop_sequences=["x"]))
        nothing = await c.messages.create(**asked(max_tokens=0))
        r.ring.script = script("Hi and x")
        stopped = await c.messages.create(**asked(stop_sequences=["x"]))
    assert (answer.type, answer.role, answer.model, answer.id[:4]) == ("message", "assistant", "tiny", "msg_")
    [block] = answer.content
    assert (block.type, block.text) == ("text", "w0 w1 w2 ")
    assert (answer.stop_reason, answer.stop_sequence, answer.usage.output_tokens) == ("max_tokens", None, 3)
    assert answer.usage.cache_read_input_tokens == 3
    assert (whole.stop_reason, whole.content[0].text) == ("end_turn", "Hi")
    assert (nothing.content, nothing.stop_reason, nothing.usage.output_tokens) == ([], "max_tokens", 0)
    assert (stopped.stop_reason, stopped.stop_sequence, stopped.content[0].text) == ("stop_sequence", "x", "Hi and ")


async def test_a_stream_of_no_tokens_shows_none(rig) -> None:
    async with rig(tools=PARSERS) as r, client(r.url) as c:
        r.ring.script = script("<think>" + ANSWER)
        for thinking in ("adaptive", "disabled"):
            async with c.messages.stream(**asked(max_tokens=0, tools=TOOLS, thinking={"type": thinking})) as stream:
                kinds = [event.type async for event in stream]
                nothing = await stream.get_final_message()
            assert kinds == ["message_start", "message_delta", "message_stop"]
            assert (nothing.content, nothing.stop_reason, nothing.usage.output_tokens) == ([], "max_tokens", 0)
            details = nothing.usage.output_tokens_details
            assert details is not None and details.thinking_tokens == 0


async def test_a_stream_has_all_events_and_adds_up_to_the_whole_answer(rig) -> None:
    async with rig(tools=PARSERS) as r, client(r.url) as c:
        r.ring.script = script("<think>" + ANSWER)
        whole = await c.messages.create(**asked(tools=TOOLS))
        kinds, texts, thoughts, inputs, signatures = [], [], [], [], []
        async with c.messages.stream(**asked(tools=TOOLS)) as stream:
            async for event in stream:
                kinds.append(event.type)
                if event.type == "text":
                    texts.append(event.text)
                elif event.type == "thinking":
                    thoughts.append(event.thinking)
                elif event.type == "input_json":
                    inputs.append(event.partial_json)
                elif event.type == "signature":
                    signatures.append(event.signature)
            streamed = await stream.get_final_message()
    assert shown(streamed) == shown(whole)
    thinking, text, call = whole.content
    assert (thinking.type, thinking.thinking, text.type, text.text) == ("thinking", "So.", "text", "Look:")
    assert (call.type, call.name, call.input) == ("tool_use", "f", {"a": "\u00e9\n"})
    assert (whole.stop_reason, streamed.stop_reason) == ("tool_use", "tool_use")
    assert whole.usage.to_dict() == streamed.usage.to_dict() and whole.usage.output_tokens_details.thinking_tokens
    assert ("".join(thoughts), "".join(texts), "".join(inputs)) == ("So.", "Look:", '{"a": "\u00e9\\n"}')
    assert signatures == [thinking.signature] and len(inputs) > 5
    raw = [kind for kind in kinds if kind.startswith(("message", "content_block_st"))]
    assert raw == ["message_start", *["content_block_start", "content_block_stop"] * 3, "message_delta", "message_stop"]


@pytest.mark.parametrize(
    "text",
    [
        "It is < 5 & {fine}.",
        "",
        f"{WEATHER}\n{WEATHER}",
        f"<think>\nHm, 2 < 3.\n</think>\n\nYes.{WEATHER} done",
        "<think>\nI wonder",
        WEATHER[:-30],
        "<tool_call>\nnone()\n</tool_call>",
    ],
)
async def test_streamed_and_whole_answers_are_equal_in_every_split(rig, text: str) -> None:
    async with rig(tools=PARSERS) as r, client(r.url) as c:
        with_context(r, 4096)
        fields, kinds = asked(tools=TOOLS, thinking={"type": "adaptive"}, max_tokens=400), set()
        for seed in range(6):
            pieces = pieces_of(text, random.Random(seed)) if seed else list(text)
            r.ring.script = script(pieces)
            whole = await c.messages.create(**fields)
            async with c.messages.stream(**fields) as stream:
                streamed = await stream.get_final_message()
            assert shown(streamed) == shown(whole) and streamed.stop_reason == whole.stop_reason
            kinds.add(str(shown(whole)))
        assert len(kinds) == 1


async def test_an_agent_over_several_turns(rig) -> None:
    history: Any = [{"role": "user", "content": "Do it."}]
    async with rig(tools=PARSERS) as r, client(r.url) as c:
        with_context(r, 4096)
        r.ring.script = script("<think>" + ANSWER)
        ids = set()
        for turn in range(3):
            answer = await c.messages.create(**asked(messages=history, tools=TOOLS, max_tokens=100))
            [call] = [block for block in answer.content if block.type == "tool_use"]
            ids.add(call.id)
            result = {"type": "tool_result", "tool_use_id": call.id, "content": f"done {turn}"}
            history += [{"role": "assistant", "content": answer.content}, {"role": "user", "content": [result]}]
            sent = r.ring.frames(Tokenize)[-1].messages.decode()
            assert sent.count('"role":"tool"') == turn and sent.count('"reasoning_content":"So."') == turn
        assert len(ids) == 3


async def test_count_tokens_equals_the_usage(rig) -> None:
    fields: Any = {
        "model": "tiny",
        "messages": USER,
        "tools": TOOLS,
        "system": "Be brief.",
        "thinking": {"type": "adaptive"},
    }
    async with rig(tools=PARSERS) as r, client(r.url) as c:
        counted = await c.messages.count_tokens(**fields)
        beta = await c.beta.messages.count_tokens(**fields)
        usage = (await c.messages.create(max_tokens=2, **fields)).usage
        longest = await c.messages.count_tokens(model="tiny", messages=[{"role": "user", "content": "x" * 1000}])
    assert counted.input_tokens == beta.input_tokens == usage.input_tokens + usage.cache_read_input_tokens
    assert longest.input_tokens > 1000  # longer than the context of 256


async def test_models_in_the_form_of_the_client(rig) -> None:
    async with rig() as r, client(r.url) as c:
        models = [model async for model in c.models.list()]
        one = await c.models.retrieve("tiny-alias")
        with pytest.raises(anthropic.NotFoundError) as missing:
            await c.models.retrieve("gpt-9")
    assert [model.id for model in models] == ["tiny", "tiny-alias"] and one.id == "tiny-alias"
    assert (one.type, one.created_at.year, one.max_input_tokens) == ("model", 2023, 255)
    assert missing.value.type == "not_found_error"


async def test_errors_become_the_clients_exceptions(rig) -> None:
    async with rig(api_keys=["one"], max_body_bytes=9000) as r:
        for wrong in ({"api_key": "wrong"}, {"api_key": None, "auth_token": "wrong"}):
            async with client(r.url, **wrong) as c:
                with pytest.raises(anthropic.AuthenticationError) as refused:
                    await c.messages.create(**asked())
                assert refused.value.type == "authentication_error"
                with pytest.raises(anthropic.AuthenticationError) as refused:
                    await c.models.list()
                assert refused.value.type == "authentication_error"
        async with client(r.url, api_key=None, auth_token="one", default_headers={"X-Api-Key": "old"}) as c:
            assert (await c.messages.create(**asked(max_tokens=1))).content
        async with client(r.url, api_key="one") as c:
            with pytest.raises(anthropic.NotFoundError, match="gpt-9") as absent:
                await c.messages.create(**asked(model="gpt-9"))
            assert absent.value.type == "not_found_error"
            with pytest.raises(anthropic.BadRequestError, match="top_p must be greater") as bad:
                await c.messages.create(**asked(extra_body={"top_p": 0.0}))
            assert bad.value.type == "invalid_request_error"
            with pytest.raises(anthropic.ContentTooLargeError) as large:
                await c.messages.create(**asked(system="x" * 10_000))
            assert large.value.type == "request_too_large"
            with pytest.raises(anthropic.BadRequestError, match=r"prompt is too long: \d+ tokens > 256 maximum"):
                await c.messages.create(**asked(system="x" * 1000))
            capacity = r.ring.capacity
            for status, kind, error in (
                (429, "rate_limit_error", anthropic.RateLimitError),
                (503, "overloaded_error", anthropic.OverloadedError),
                (500, "api_error", anthropic.InternalServerError),
            ):
                r.ring.refuse = lambda g, status=status: Refused(
                    g.request_id, g.attempt, status, "", "not now", capacity
                )
                with pytest.raises(error) as busy:
                    await c.messages.create(**asked())
                assert busy.value.type == kind


async def test_a_failure_in_mid_stream_reaches_the_client(rig) -> None:
    async with rig() as r, client(r.url) as c:
        r.ring.fail_at = 3
        seen = []
        with pytest.raises(anthropic.APIStatusError, match="the worker stumbled") as failed:
            async with c.messages.stream(**asked()) as stream:
                async for text in stream.text_stream:
                    seen.append(text)
    assert seen == ["w0 ", "w1 ", "w2 "] and failed.value.type == "api_error"


async def test_a_body_of_the_process_for_large_ones(rig) -> None:
    async with rig(tools=PARSERS) as r, client(r.url) as c:
        with_context(r, 200_000)
        r.ring.script = script("Yes.")
        long = [{"type": "text", "text": "x-anthropic-billing-header: 1"}, {"type": "text", "text": "x" * LARGE_BYTES}]
        search = {"type": "web_search_20250305", "name": "web_search"}
        answer = await c.messages.with_raw_response.create(**asked(system=long, tools=[*TOOLS, search]))
        assert answer.headers["x-blockyard-ignored"] == "tools.web_search_20250305"
        assert (await answer.parse()).content[0].text == "Yes."
        async with c.messages.stream(**asked(system=long)) as stream:
            assert await stream.get_final_text() == "Yes."
        with pytest.raises(anthropic.BadRequestError, match=r"messages\[0\].content\[0\].type: "):
            image: Any = [{"role": "user", "content": [{"type": "image"}]}]
            await c.messages.create(**asked(system=long, messages=image))
        assert all(b"billing" not in frame.messages for frame in r.ring.frames(Tokenize))


async def test_a_stream_that_waits_has_pings(rig) -> None:
    async with rig(keepalive_s=0.05) as r:
        r.ring.step_s = 0.2
        body = {"model": "tiny", "max_tokens": 3, "messages": USER, "stream": True}
        async with r.http.post("/v1/messages", json=body) as response:
            events = (await response.text()).split("\n\n")
    assert events[0].startswith("event: message_start\n") and 'event: ping\ndata: {"type":"ping"}' in events
    assert events[-2] == 'event: message_stop\ndata: {"type":"message_stop"}' and events[-1] == ""


async def test_fields_reach_the_ring(rig) -> None:
    tool: Any = {"type": "tool", "name": "f", "disable_parallel_tool_use": True}
    async with rig(tools=PARSERS) as r, client(r.url) as c:
        r.ring.script = script("x")
        await c.messages.create(
            **asked(
                stop_sequences=["<stop>"],
                metadata={"user_id": "someone"},
                thinking={"type": "enabled", "budget_tokens": 40},
                output_config={"effort": "high", "format": {"type": "json_schema", "schema": SCHEMA}},
                extra_body={"seed": 11, "temperature": 0.5, "top_k": 7},
            )
        )
        await c.beta.messages.create(
            **asked(
                tools=TOOLS,
                tool_choice=tool,
                thinking={"type": "disabled"},
                context_management={"edits": [{"type": "clear_tool_uses_20250919"}]},
                betas=["context-management-2025-06-27"],
            )
        )
        first, second = r.ring.frames(Generate)
        prompt, forced = r.ring.frames(Tokenize)
    assert (first.sampling.temperature, first.sampling.top_k, first.sampling.seed, first.user) == (
        0.5,
        7,
        11,
        "someone",
    )
    assert first.text.stop == ["<stop>"]
    assert prompt.template_kwargs == b'{"enable_thinking":true,"thinking":true,"reasoning_effort":"high"}'
    assert (
        prompt.grammar is not None and prompt.grammar.source == '{"type":"object","properties":{"a":{"type":"string"}}}'
    )
    assert forced.template_kwargs == b'{"enable_thinking":false,"thinking":false}'
    assert forced.grammar is not None and b'"name":"f"' in forced.tools
    assert second.sampling.max_tokens == 150
