"""vLLM's fields that the engine's parts read, in chats and completions, whole and streamed, by the official client."""

import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import openai
import pytest

from blockyard.shared.messages import FinishReason, Generate, RepetitionDetection
from blockyard.shared.token_ids import num_ids

CHAT, COMPLETION, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
USER: list[Any] = [{"role": "user", "content": "hi"}]
TWO: dict[str, Any] = {"model": "tiny", "max_tokens": 2, "n": 2}
BODIES = {CHAT: {"messages": USER}, COMPLETION: {"prompt": "hi"}}
PATHS = pytest.mark.parametrize("path", [CHAT, COMPLETION])


@asynccontextmanager
async def client(url: str) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as made:
        yield made


async def both(rig: Any, path: str, fields: dict[str, Any], **settings: Any) -> tuple[Any, list[Any], list[Generate]]:
    """The whole answer, the events of the streamed one, and what the ring was asked for."""
    async with rig(**settings) as r, client(r.url) as c:
        r.ring.kv_transfer_params = (settings and b"") or b'{"remote":[1]}'
        create: Any = c.chat.completions.create if path == CHAT else c.completions.create
        body = TWO | BODIES[path]
        whole = await create(**body, extra_body=fields)
        events = [event async for event in await create(**body, stream=True, extra_body=fields)]
        return whole, events, r.ring.frames(Generate)


@PATHS
async def test_listed_tokens_are_shown_in_place_of_the_likeliest(rig, path: str) -> None:
    shows = {"logprobs": True} if path == CHAT else {"logprobs": 0}
    whole, events, frames = await both(rig, path, shows | {"logprob_token_ids": [9, 5, 9]})
    assert all(frame.sampling.logprob_token_ids == [9, 5] and frame.sampling.num_logprobs == 0 for frame in frames)
    for index in range(2):
        logprobs = whole.choices[index].logprobs
        pieces = [e.choices[0].logprobs for e in events if e.choices[0].index == index and e.choices[0].logprobs]
        if path == CHAT:
            shown = [[(top.token, top.logprob) for top in entry.top_logprobs] for entry in logprobs.content]
            assert shown == [[("\t", -9.0), ("\x05", -5.0)]] * 2
            assert [entry for piece in pieces for entry in piece.content] == logprobs.content
        else:
            assert logprobs.top_logprobs[0] == {"a": -1.5, "\t": -9.0, "\x05": -5.0}
            assert [top for piece in pieces for top in piece.top_logprobs] == logprobs.top_logprobs


@PATHS
async def test_an_answer_that_repeats_itself_ends_with_that_reason(rig, path: str) -> None:
    asked = {"repetition_detection": {"max_pattern_size": 6, "min_pattern_size": 2, "min_count": 3}}
    async with rig() as r:
        r.ring.finish_at = (1, FinishReason.REPETITION, "repetition_detected")
        body = TWO | BODIES[path] | asked | {"max_tokens": 9}
        status, whole = await r.post(path, body)
        *events, _ = await r.events(path, body)
        frames = r.ring.frames(Generate)
        _, metrics = await metrics_of(r)
    assert status == 200 and {f.text.repetition for f in frames} == {RepetitionDetection(6, 2, 3)}
    ends = [choice for event in events for choice in event["choices"] if choice["finish_reason"]]
    for choice in (*whole["choices"], *ends):
        assert (choice["finish_reason"], choice["stop_reason"]) == ("repetition", "repetition_detected")
    assert len(ends) == 2 and re.search(r"request_success_total\{[^}]*repetition[^}]*\} 4", metrics)


async def metrics_of(r: Any) -> tuple[int, str]:
    async with r.http.get("/metrics") as response:
        return response.status, await response.text()


@PATHS
async def test_the_text_of_the_prompt(rig, path: str) -> None:
    whole, events, frames = await both(rig, path, {"return_prompt_text": True})
    if path == CHAT:
        assert '"content":"hi"' in whole.prompt_text
        assert [e.prompt_text for e in events if getattr(e, "prompt_text", None)] == [whole.prompt_text]
    else:
        assert [choice.prompt_text for choice in whole.choices] == ["hi", "hi"]
        shown = [getattr(event.choices[0], "prompt_text", None) for event in events]
        assert [text for text in shown if text] == ["hi", "hi"]
    assert len(frames) == 2
    without, _, _ = await both(rig, path, {})
    assert without.choices[0].model_extra.get("prompt_text") is None


async def test_the_text_of_each_prompt_and_of_one_that_is_cut(rig) -> None:
    async with rig() as r:
        _, several = await r.post(COMPLETION, {"prompt": ["ab", [99, 100]], "return_prompt_text": True})
        _, cut = await r.post(COMPLETION, {"prompt": "abcd", "truncate_prompt_tokens": 2, "return_prompt_text": True})
    assert [choice["prompt_text"] for choice in several["choices"]] == ["ab", "cd"]
    assert cut["choices"][0]["prompt_text"] == "cd"


@PATHS
async def test_parameters_for_the_connector_and_its_answer(rig, path: str) -> None:
    params = {"do_remote_decode": True, "nested": {"a": [1, None, 2.5]}}
    whole, _, frames = await both(rig, path, {"kv_transfer_params": params})
    assert whole.kv_transfer_params == {"remote": [1]}
    assert [msgspec.json.decode(frame.kv_transfer_params) for frame in frames] == [params, params]


@PATHS
async def test_arguments_for_logits_processors(rig, path: str) -> None:
    asked = {"word": "x", "weights": [1, 2.5, "y"], "k": 3}
    _, _, frames = await both(rig, path, {"vllm_xargs": asked})
    assert [msgspec.json.decode(frame.sampling.extra_args) for frame in frames] == [asked, asked]


@PATHS
async def test_the_server_and_its_tier_are_named(rig, path: str) -> None:
    whole, events, _ = await both(rig, path, {"service_tier": "flex"}, system_fingerprint="blockyard-1-abc")
    for one in (whole, *events):
        assert (one.system_fingerprint, one.service_tier) == ("blockyard-1-abc", "default")


ASSISTANT: list[Any] = [*USER, {"role": "assistant", "content": "I say "}]


@pytest.mark.parametrize("form", ["text", "parts"])
async def test_a_chat_repeats_the_message_that_it_continues(rig, form: str) -> None:
    content: Any = "I say " if form == "text" else [{"type": "text", "text": "I say "}]
    messages = [*USER, {"role": "assistant", "content": content}]
    body = TWO | {"messages": messages, "echo": True}
    async with rig() as r:
        _, whole = await r.post(CHAT, body)
        *events, _ = await r.events(CHAT, body)
        _, other = await r.post(CHAT, body | {"messages": USER})
        _, last = await r.post(CHAT, body | {"messages": USER, "add_generation_prompt": False})
    assert [choice["message"]["content"] for choice in whole["choices"]] == ["I say w0 w1 "] * 2
    assert whole["usage"]["completion_tokens"] == 4
    for index in range(2):
        deltas = [e["choices"][0]["delta"] for e in events if e["choices"][0]["index"] == index]
        assert "".join(delta.get("content") or "" for delta in deltas) == "I say w0 w1 "
        assert deltas[0]["role"] == "assistant" and deltas[1] == {"content": "I say "}
    assert other["choices"][0]["message"]["content"] == "w0 w1 "  # of another role
    assert last["choices"][0]["message"]["content"] == "hiw0 w1 "  # the answer continues it


async def test_minus_one_keeps_what_the_answer_leaves(rig) -> None:
    async with rig(max_model_len=20) as r:
        for path, body in ((CHAT, {"messages": USER}), (COMPLETION, {"prompt": "a" * 60})):
            status, answer = await r.post(path, TWO | body | {"truncate_prompt_tokens": -1})
            assert status == 200 and answer["usage"]["prompt_tokens"] == 18
        assert [num_ids(frame.prompt_ids) for frame in r.ring.frames(Generate)] == [18, 18]


async def test_responses_have_these_fields_too(rig) -> None:
    asked = {
        "input": "hi",
        "include": ["message.output_text.logprobs"],
        "logprob_token_ids": [5],
        "repetition_detection": {"max_pattern_size": 3, "min_count": 2},
        "vllm_xargs": {"a": 1},
        "kv_transfer_params": {"b": 2},
    }
    async with rig() as r:
        status, answer = await r.post(RESPONSES, asked | {"max_output_tokens": 2})
        [frame] = r.ring.frames(Generate)
    assert status == 200, answer
    assert answer["output"][0]["content"][0]["logprobs"][0]["top_logprobs"][0]["token"] == "\x05"
    assert (frame.sampling.extra_args, frame.kv_transfer_params) == (b'{"a":1}', b'{"b":2}')
    assert frame.text.repetition == RepetitionDetection(3, 1, 2)


@PATHS
@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"logprob_token_ids": []}, "logprob_token_ids"),
        ({"logprob_token_ids": [300]}, "logprob_token_ids"),
        ({"logprob_token_ids": [1] * 129}, "logprob_token_ids"),
        ({"logprob_token_ids": ["x"]}, "logprob_token_ids[0]"),
        ({"logprob_token_ids": [1], "logprobs": None}, "logprob_token_ids"),
        ({"repetition_detection": {"max_pattern_size": 3}}, "repetition_detection.min_count"),
        ({"repetition_detection": {"max_pattern_size": -1, "min_count": 2}}, "repetition_detection.max_pattern_size"),
        ({"repetition_detection": {"min_pattern_size": 3, "min_count": 2}}, "repetition_detection.min_pattern_size"),
        ({"repetition_detection": {"max_pattern_size": 9999, "min_count": 2}}, "repetition_detection.max_pattern_size"),
        ({"repetition_detection": {"max_pattern_size": 9, "min_count": 10**9}}, "repetition_detection.min_count"),
        ({"repetition_detection": 3}, "repetition_detection"),
        ({"kv_transfer_params": "x"}, "kv_transfer_params"),
        ({"kv_transfer_params": {"x": "y" * 70_000}}, "kv_transfer_params"),
        ({"vllm_xargs": {"x": {"y": 1}}}, "vllm_xargs"),
        ({"vllm_xargs": {"x": None}}, "vllm_xargs"),
        ({"vllm_xargs": [1]}, "vllm_xargs"),
        ({"return_prompt_text": "yes"}, "return_prompt_text"),
        ({"service_tier": "golden"}, "service_tier"),
        ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
    ],
)
async def test_bad_values_name_their_field(rig, path: str, fields: dict[str, Any], field: str) -> None:
    shows = {"logprobs": True} if path == CHAT else {"logprobs": 0}
    async with rig() as r:
        for stream in (False, True):
            status, answer = await r.post(path, TWO | BODIES[path] | shows | fields | {"stream": stream})
            assert status == 400 and answer["error"]["param"] == field, answer
        assert not r.ring.frames(Generate)


async def test_bad_values_of_chats_alone(rig) -> None:
    async with rig() as r:
        for fields in ({"echo": 3}, {"return_assistant_tokens_mask": "x"}):
            status, answer = await r.post(CHAT, {"messages": USER} | fields)
            assert (status, answer["error"]["param"]) == (400, next(iter(fields)))
        beams = {"prompt": "x", "use_beam_search": True, "n": 2}
        asked = {
            "repetition_detection": {"max_pattern_size": 3, "min_count": 2},
            "logprob_token_ids": [1],
            "logprobs": 1,
        }
        status, answer = await r.post(COMPLETION, beams | asked)
        assert status == 400 and answer["error"]["param"] == "logprob_token_ids"
