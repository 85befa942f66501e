"""The official client, unmodified, against the gateway."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import openai
import pytest

from blockyard.shared.messages import ToolDefaults

USER = [{"role": "user", "content": "hi"}]


@asynccontextmanager
async def client(url: str, key: str = "none") -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0) as made:
        yield made


async def test_chat(rig) -> None:
    async with rig() as r, client(r.url) as c:
        answer = await c.chat.completions.create(model="tiny", messages=USER, max_completion_tokens=3)
    assert answer.object == "chat.completion" and answer.model == "tiny" and answer.id.startswith("chatcmpl-")
    [choice] = answer.choices
    assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", "w0 w1 w2 ", "length")
    assert answer.usage is not None and answer.usage.completion_tokens == 3
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 3


async def test_chat_stream(rig) -> None:
    async with rig() as r, client(r.url) as c:
        stream = await c.chat.completions.create(
            model="tiny", messages=USER, max_tokens=4, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
    assert len({chunk.id for chunk in chunks}) == 1
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(c.choices[0].delta.content or "" for c in chunks[:-1]) == "w0 w1 w2 w3 "
    assert [c.choices[0].finish_reason for c in chunks[:-1]] == [None, None, None, None, "length"]
    assert all(c.usage is None for c in chunks[:-1])
    assert chunks[-1].choices == [] and chunks[-1].usage is not None and chunks[-1].usage.completion_tokens == 4


async def test_chat_logprobs(rig) -> None:
    async with rig() as r, client(r.url) as c:
        answer = await c.chat.completions.create(
            model="tiny", messages=USER, max_tokens=2, logprobs=True, top_logprobs=3
        )
        stream = await c.chat.completions.create(
            model="tiny", messages=USER, max_tokens=2, logprobs=True, top_logprobs=3, stream=True
        )
        streamed = [
            entry
            async for chunk in stream
            if chunk.choices[0].logprobs is not None
            for entry in chunk.choices[0].logprobs.content or []
        ]
    whole = answer.choices[0].logprobs
    assert whole is not None and whole.content is not None
    assert [(t.token, t.bytes, t.logprob) for t in whole.content] == [("a", [97], -1.5), ("b", [98], -1.5)]
    assert [t.token for t in whole.content[0].top_logprobs] == ["\x01", "a", "\x02"]
    assert streamed == whole.content


async def test_tool_calls_and_reasoning_with_the_helper_for_streams(rig) -> None:
    text = '<think>So.</think>Look: <tool_call>\n{"name": "f", "arguments": {"a": "\u00e9\\n"}}\n</tool_call>'
    tools: Any = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    asked: Any = {"model": "tiny", "messages": USER, "tools": tools, "max_tokens": 150, "stop": "<end>"}
    parsers = ToolDefaults(auto_choice=True, parser="hermes", reasoning_parser="qwen3", reasoning_end="</think>")
    async with rig(tools=parsers) as r, client(r.url) as c:
        r.ring.script = lambda request_id, index: text[index] if index < len(text) else "<end>"
        whole = (await c.chat.completions.create(**asked)).choices[0]
        names, pieces = [], []
        async with c.chat.completions.stream(**asked) as stream:
            async for event in stream:
                if event.type == "tool_calls.function.arguments.delta":
                    pieces.append(event.arguments_delta)
                elif event.type == "tool_calls.function.arguments.done":
                    names.append((event.name, event.arguments))
            streamed = (await stream.get_final_completion()).choices[0]
    assert (whole.finish_reason, streamed.finish_reason) == ("tool_calls", "tool_calls")
    for message in (whole.message, streamed.message):
        assert message.content == "Look:" and message.tool_calls is not None
        assert [call.function.arguments for call in message.tool_calls] == ['{"a": "\u00e9\\n"}']
        assert (message.model_extra or {})["reasoning"] == "So."
    assert names == [("f", '{"a": "\u00e9\\n"}')] and "".join(pieces) == names[0][1] and len(pieces) > 5


async def test_completion_of_many_prompts(rig) -> None:
    async with rig() as r, client(r.url) as c:
        answer = await c.completions.create(model="tiny", prompt=["one", "three"], n=2, max_tokens=2)
        streamed = ["", "", "", ""]
        async for chunk in await c.completions.create(
            model="tiny", prompt=[[65, 66], [67]], n=2, max_tokens=2, stream=True
        ):
            for choice in chunk.choices:
                streamed[choice.index] += choice.text
    assert [(c.index, c.text) for c in answer.choices] == [(i, "w0 w1 ") for i in range(4)]
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (8, 8)
    assert streamed == ["w0 w1 "] * 4


async def test_models(rig) -> None:
    async with rig() as r, client(r.url) as c:
        models = [m async for m in c.models.list()]
        one = await c.models.retrieve("tiny-alias")
    assert [m.id for m in models] == ["tiny", "tiny-alias"] and one.id == "tiny-alias"
    assert models[0].model_extra is not None
    assert models[0].model_extra["max_model_len"] == 256 and models[0].model_extra["root"] == "/models/tiny"


async def test_errors_become_the_clients_exceptions(rig) -> None:
    async with rig(api_keys=["one", "two"]) as r:
        async with client(r.url, "wrong") as c:
            with pytest.raises(openai.AuthenticationError):
                await c.models.list()
        async with client(r.url, "two") as c:
            with pytest.raises(openai.NotFoundError, match="gpt-9"):
                await c.chat.completions.create(model="gpt-9", messages=USER)
            with pytest.raises(openai.BadRequestError) as caught:
                await c.chat.completions.create(model="tiny", messages=USER, top_p=0.0)
            assert caught.value.param == "top_p"


async def test_a_failure_in_mid_stream_reaches_the_client(rig) -> None:
    async with rig() as r, client(r.url) as c:
        r.ring.fail_at = 3
        seen = []
        with pytest.raises(openai.APIError, match="the worker stumbled"):
            async for chunk in await c.chat.completions.create(model="tiny", messages=USER, stream=True):
                seen.append(chunk.choices[0].delta.content)
    assert seen == ["", "w0 ", "w1 ", "w2 "]
