"""Optional fields of answers as the official client reads them: null if not requested, never absent."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import openai
import pytest

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
USER: list[Any] = [{"role": "user", "content": "hi"}]
IDS = {"return_token_ids": True}


@asynccontextmanager
async def client(url: str) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as made:
        yield made


async def test_fields_that_were_not_requested_are_null(rig) -> None:
    """An absent field is an AttributeError in the official client."""
    async with rig() as r, client(r.url) as c:
        chat: Any = await c.chat.completions.create(model="tiny", messages=USER, max_tokens=2)
        text: Any = await c.completions.create(model="tiny", prompt="x", max_tokens=2)
        chunks: list[Any] = [
            chunk
            async for chunk in await c.chat.completions.create(
                model="tiny", messages=USER, max_tokens=2, stream=True, stream_options={"include_usage": True}
            )
        ]
        events: list[Any] = [
            event async for event in await c.completions.create(model="tiny", prompt="x", max_tokens=2, stream=True)
        ]
    [choice] = chat.choices
    of_chat = [chat.prompt_logprobs, chat.prompt_token_ids, chat.service_tier, chat.system_fingerprint]
    of_chat += [chat.kv_transfer_params, chat.usage.prompt_tokens_details]
    of_chat += [choice.logprobs, choice.stop_reason, choice.token_ids]
    message = choice.message
    of_chat += [message.refusal, message.annotations, message.audio, message.function_call]
    of_chat += [message.reasoning, message.reasoning_content]
    assert of_chat == [None] * len(of_chat) and not message.tool_calls
    [choice] = text.choices
    of_text = [choice.logprobs, choice.stop_reason, choice.prompt_logprobs, choice.token_ids, choice.prompt_token_ids]
    of_text += [text.service_tier, text.system_fingerprint, text.kv_transfer_params]
    assert of_text == [None] * len(of_text)
    assert [chunk.prompt_token_ids for chunk in chunks] == [None] * 4
    for chunk in chunks[:-1]:
        assert (chunk.choices[0].stop_reason, chunk.choices[0].token_ids) == (None, None)
    for event in events:
        assert (event.choices[0].stop_reason, event.choices[0].token_ids) == (None, None)
        assert event.choices[0].prompt_token_ids is None


async def test_an_earlier_answer_can_be_sent_back_as_it_is(rig) -> None:
    async with rig() as r, client(r.url) as c:
        first = await c.chat.completions.create(model="tiny", messages=USER, max_tokens=2)
        history = [*USER, first.choices[0].message.model_dump(), *USER]
        raw = await c.chat.completions.with_raw_response.create(model="tiny", messages=history, max_tokens=2)
    assert "x-blockyard-ignored" not in raw.headers


async def test_a_stream_with_token_ids_begins_with_those_of_the_prompt(rig) -> None:
    async with rig() as r:
        prompt_ids = list(b'[{"role":"user","content":"hi"}]')
        chat = (await r.events(CHAT, {"messages": USER, "max_tokens": 2, "n": 2} | IDS))[:-1]
        assert [e["prompt_token_ids"] for e in chat] == [prompt_ids] + [None] * (len(chat) - 1)
        for index in range(2):
            choices = [e["choices"][0] for e in chat if e["choices"][0]["index"] == index]
            assert [c["token_ids"] for c in choices] == [None, [97], [98]]
        text = (await r.events(COMPLETION, {"prompt": ["ab", [99]], "max_tokens": 2} | IDS))[:-1]
        for index, ids in enumerate(([97, 98], [99])):
            choices = [e["choices"][0] for e in text if e["choices"][0]["index"] == index]
            assert [c["prompt_token_ids"] for c in choices] == [ids, None]
            assert [c["token_ids"] for c in choices] == [[97], [98]]


@pytest.mark.parametrize("path", [CHAT, COMPLETION])
@pytest.mark.parametrize(
    ("options", "every", "last"),
    [
        ({"continuous_usage_stats": True}, True, True),
        ({"continuous_usage_stats": True, "include_usage": True}, True, True),
        ({"continuous_usage_stats": True, "include_usage": False}, False, False),
        ({"include_usage": True}, False, True),
        ({"include_usage": False}, False, False),
        ({}, False, False),
    ],
)
async def test_usage_in_streams(rig, path: str, options: dict[str, bool], every: bool, last: bool) -> None:
    body: dict[str, Any] = {"messages": USER} if path == CHAT else {"prompt": "x"}
    async with rig() as r:
        events = (await r.events(path, body | {"max_tokens": 3, "stream_options": options}))[:-1]
    counts = [e["usage"] and e["usage"]["completion_tokens"] for e in events if "usage" in e]
    chunks = [0, 1, 2, 3] if path == CHAT else [1, 2, 3]
    if not last:
        assert counts == [] and all(e["choices"] for e in events)
    else:
        assert counts == [*(chunks if every else [None] * len(chunks)), 3]


@pytest.mark.parametrize("stream", [False, True])
async def test_top_logprobs_begin_with_the_token_itself(rig, stream: bool) -> None:
    body = {"prompt": "hey", "max_tokens": 2, "logprobs": 3, "echo": True}
    async with rig() as r:
        if stream:
            shown = [e["choices"][0]["logprobs"] for e in (await r.events(COMPLETION, body))[:-1]]
        else:
            shown = [(await r.post(COMPLETION, body))[1]["choices"][0]["logprobs"]]
    tokens = [token for part in shown for token in part["tokens"]]
    tops = [top for part in shown for top in part["top_logprobs"]]
    assert tokens == ["h", "e", "y", "a", "b"] and tops[0] is None
    assert [next(iter(top)) for top in tops[1:]] == tokens[1:]
    assert tops[1] == {"e": -1.5, "\x01": -0.5, "\x02": -2.5}
