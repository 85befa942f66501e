"""/inference/v1/generate: token ids in, token ids out, whole and streamed."""

from typing import Any

import msgspec
import pytest

from blockyard.shared.messages import FinishReason, Generate, RepetitionDetection, Tokenize, ToolDefaults
from blockyard.shared.token_ids import unpack

PATH = "/inference/v1/generate"
IDS = [104, 105]
LOGITS: dict[str, Any] = {"max_tokens": 3, "n": 2, "logprobs": 2, "seed": 7}


def body(**fields: Any) -> dict[str, Any]:
    return {"model": "tiny", "token_ids": IDS, "sampling_params": {"max_tokens": 3}} | fields


async def test_the_route_is_there_with_its_flag_alone(rig) -> None:
    async with rig() as r:
        assert (await r.post(PATH, body()))[0] == 404
        assert (await r.post("/v1/chat/completions/render", {"messages": []}))[0] == 404


async def test_a_whole_answer_has_ids_and_no_text(rig) -> None:
    async with rig(scale_out=True) as r:
        status, answer = await r.post(PATH, body(sampling_params=LOGITS, request_id="mine", return_token_ids=True))
        [frame] = r.ring.frames(Generate)
    assert status == 200 and answer["request_id"] == "generate-tokens-mine" and answer["output_mode"] == "tokens"
    assert unpack(frame.prompt_ids) == IDS == answer["prompt_token_ids"]
    assert [choice["token_ids"] for choice in answer["choices"]] == [[97, 98, 99]] * 2
    first = answer["choices"][1]
    assert (first["index"], first["finish_reason"]) == (1, "length") and "text" not in first
    entry = first["logprobs"]["content"][0]
    assert (entry["token_id"], entry["logprob"], entry["rank"]) == (97, -1.5, 2)
    # the sampled token comes first, and once
    assert [(one["token_id"], one["rank"]) for one in entry["top_logprobs"]] == [(97, 2), (1, 1)]
    assert answer["usage"]["completion_tokens"] == 6 and answer["usage"]["prompt_tokens"] == 2
    assert (frame.sampling.num_logprobs, frame.sampling.seed, len(frame.choices)) == (2, 7, 2)


@pytest.mark.parametrize("mode", ["tokens", "text"])
async def test_a_stream_adds_up_to_the_whole_answer(rig, mode: str) -> None:
    asked = body(sampling_params=LOGITS, output_mode=mode, return_token_ids=True)
    async with rig(scale_out=True) as r:
        _, whole = await r.post(PATH, asked)
        *events, usage, done = await r.events(PATH, asked | {"stream_options": {"include_usage": True}})
    assert done == "[DONE]" and usage["choices"] == [] and usage["usage"] == whole["usage"]
    assert len({event["request_id"] for event in events}) == 1
    # the prompt's ids come once for each choice
    assert [event["prompt_token_ids"] for event in events if event["prompt_token_ids"]] == [IDS, IDS]
    for index, choice in enumerate(whole["choices"]):
        pieces = [event["choices"][0] for event in events if event["choices"][0]["index"] == index]
        assert [token for piece in pieces for token in piece["token_ids"]] == choice["token_ids"]
        content = [entry for piece in pieces for entry in piece["logprobs"]["content"]]
        assert content == choice["logprobs"]["content"]
        assert [piece["finish_reason"] for piece in pieces] == [None, None, "length"]
        if mode == "text":
            assert "".join(piece["text"] for piece in pieces) == choice["text"] == "w0 w1 w2 "
            assert content[0]["token"] == "a"


async def test_without_max_tokens_the_context_is_the_limit(rig) -> None:
    async with rig(scale_out=True, max_model_len=20) as r:
        _, answer = await r.post(PATH, body(sampling_params={}))
    assert len(answer["choices"][0]["token_ids"]) == 18


async def test_parameters_reach_the_ring(rig) -> None:
    asked = {
        "max_tokens": 2,
        "temperature": 0.5,
        "top_k": 5,
        "logit_bias": {"7": 1.5},
        "stop": ["never"],
        "repetition_detection": {"max_pattern_size": 4, "min_count": 3},
        "logprob_token_ids": [9, 8],
        "extra_args": {"a": [1, "b"], "kv_transfer_params": {"remote": 1}},
        "detokenize": True,
        "output_kind": 2,
    }
    async with rig(scale_out=True) as r:
        status, answer = await r.post(PATH, body(sampling_params=asked, cache_salt="s", priority=3))
        [frame] = r.ring.frames(Generate)
    assert status == 200, answer
    sampling = frame.sampling
    assert (sampling.temperature, sampling.top_k, sampling.logit_bias) == (0.5, 5, [(7, 1.5)])
    assert (sampling.logprob_token_ids, sampling.num_logprobs) == ([9, 8], 0)
    assert msgspec.json.decode(sampling.extra_args) == {"a": [1, "b"]}
    assert msgspec.json.decode(frame.kv_transfer_params) == {"remote": 1}
    assert frame.text.repetition == RepetitionDetection(4, 1, 3)
    assert (frame.text.stop, frame.cache_salt, frame.priority) == (["never"], "s", 3)


async def test_an_end_by_repetition_is_named(rig) -> None:
    async with rig(scale_out=True) as r:
        r.ring.finish_at = (1, FinishReason.REPETITION, "repetition_detected")
        _, whole = await r.post(PATH, body())
        *events, _ = await r.events(PATH, body())
    ends = (whole["choices"][0], events[-1]["choices"][0])
    assert [(end["finish_reason"], end["stop_reason"]) for end in ends] == [("repetition", "repetition_detected")] * 2


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"token_ids": []}, "token_ids"),
        ({"token_ids": [1, 300]}, "token_ids"),
        ({"token_ids": ["a"]}, "token_ids[0]"),
        ({"token_ids": [1] * 300}, "token_ids"),
        ({"sampling_params": {"top_p": 2.0}}, "sampling_params.top_p"),
        ({"sampling_params": {"max_tokens": 0}}, "sampling_params.max_tokens"),
        ({"sampling_params": {"extra_args": {"a": {}}}}, "sampling_params.extra_args"),
        ({"sampling_params": {"logprob_token_ids": [300]}}, "sampling_params.logprob_token_ids"),
        ({"sampling_params": {"repetition_detection": {"max_pattern_size": 2, "min_count": 1}}}, "min_count"),
        ({"sampling_params": {"structured_outputs": {"json": 3}}}, "sampling_params.structured_outputs"),
        ({"output_mode": "words"}, "output_mode"),
        ({"features": {"mm_hashes": {}}}, "features"),
        ({"kv_transfer_params": [1]}, "kv_transfer_params"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
    ],
)
async def test_bad_values_name_their_field(rig, fields: dict[str, Any], field: str) -> None:
    async with rig(scale_out=True) as r:
        status, answer = await r.post(PATH, body(**fields))
    assert status == 400 and answer["error"]["param"].endswith(field), answer


async def test_a_missing_prompt_names_its_field(rig) -> None:
    async with rig(scale_out=True) as r:
        status, answer = await r.post(PATH, {"sampling_params": {}})
    assert status == 400 and answer["error"]["param"] == "token_ids"


CHAT, COMPLETION, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
USER: list[Any] = [{"role": "user", "content": "hi"}]
SHAPE = {"model": "tiny", "max_tokens": 4, "seed": 5, "temperature": 0.3, "n": 2, "stop": ["zzz"], "top_k": 9}


def of_ring(frame: Generate) -> Generate:
    """The frame without what belongs to one request alone."""
    return msgspec.structs.replace(frame, request_id="", block_hashes=b"")


@pytest.mark.parametrize(
    ("path", "asked"),
    [
        (CHAT, {"messages": USER, **SHAPE}),
        (CHAT, {"messages": USER, **SHAPE, "logprobs": True, "top_logprobs": 3, "logit_bias": {"5": 1}}),
        (CHAT, {"messages": USER, **SHAPE, "logprobs": True, "logprob_token_ids": [3, 4]}),
        (CHAT, {"messages": USER, **SHAPE, "response_format": {"type": "json_object"}}),
        (CHAT, {"messages": USER, **SHAPE, "structured_outputs": {"choice": ["a", "b"]}, "bad_words": ["x"]}),
        (COMPLETION, {"prompt": "abc", **SHAPE, "min_tokens": 2, "allowed_token_ids": [5, 6]}),
        (COMPLETION, {"prompt": [1, 2, 3], **SHAPE, "repetition_detection": {"max_pattern_size": 3, "min_count": 2}}),
        (COMPLETION, {"prompt": "abc", **SHAPE, "vllm_xargs": {"a": 1}, "kv_transfer_params": {"b": {"c": 2}}}),
        (RESPONSES, {"input": "hi", "seed": 5, "top_p": 0.5, "max_output_tokens": 3}),
    ],
)
async def test_a_rendered_request_asks_the_ring_for_the_same(rig, path: str, asked: dict[str, Any]) -> None:
    async with rig(scale_out=True) as r:
        await r.post(path, asked)
        status, found = await r.post(f"{path}/render", asked)
        assert status == 200, found
        rendered = found[0] if isinstance(found, list) else found
        status, answer = await r.post(PATH, rendered)
        direct, after = r.ring.frames(Generate)
    assert status == 200, answer
    assert of_ring(direct) == of_ring(after)
    assert rendered["token_ids"] == unpack(direct.prompt_ids)


@pytest.mark.parametrize("family", ["hermes", "openai", "kimi_k2"])
async def test_a_forced_call_is_rendered_with_its_grammar(rig, family: str) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    asked = {"messages": USER, **SHAPE, "tools": [tool], "tool_choice": "required"}
    parsers = ToolDefaults(auto_choice=True, parser=family, reasoning_parser="qwen3", reasoning_end="</think>")
    async with rig(scale_out=True, tools=parsers) as r:
        await r.post(CHAT, asked)
        _, rendered = await r.post(f"{CHAT}/render", asked)
        status, answer = await r.post(PATH, rendered)
        direct, after = r.ring.frames(Generate)
    assert status == 200, answer
    assert rendered["sampling_params"]["structured_outputs"]["grammar"]
    assert direct.sampling.constraint is not None and direct.sampling == after.sampling


async def test_each_prompt_of_a_completion_is_rendered(rig) -> None:
    async with rig(scale_out=True) as r:
        _, found = await r.post(f"{COMPLETION}/render", {"prompt": ["ab", "c"], "request_id": "x", "stream": True})
    assert [one["token_ids"] for one in found] == [[97, 98], [99]]
    assert [one["request_id"] for one in found] == ["cmpl-x-0", "cmpl-x-1"]
    assert [one["prompt_text"] for one in found] == ["ab", "c"]
    assert found[0]["stream"] and found[0]["stream_options"] is None and found[0]["features"] is None
    assert found[0]["sampling_params"]["max_tokens"] == 16 and found[0]["sampling_params"]["seed"] is None


async def test_spans_of_tokens_come_if_they_are_asked_for(rig) -> None:
    chat = {"messages": [*USER, {"role": "assistant", "content": "yes"}]}
    async with rig(scale_out=True) as r:
        _, without = await r.post(f"{CHAT}/render", chat)
        _, found = await r.post(
            f"{CHAT}/render", chat | {"return_token_offsets": True, "return_assistant_tokens_mask": True}
        )
        _, of_ids = await r.post(f"{COMPLETION}/render", {"prompt": [97, 98], "return_token_offsets": True})
        await r.post(CHAT, chat | {"return_token_offsets": True, "max_tokens": 1})
        assert [frame.want_offsets for frame in r.ring.frames(Tokenize)] == [False, True, True, False]
    assert without["token_offsets"] is None and without["assistant_tokens_mask"] is None
    text = found["prompt_text"]
    assert found["token_offsets"] == [[i, i + 1] for i in range(len(text))]
    mask = found["assistant_tokens_mask"]
    assert "".join(char for char, is_own in zip(text, mask, strict=True) if is_own) == "yes"
    assert of_ids[0]["token_offsets"] is None


@pytest.mark.parametrize(
    ("path", "asked", "field"),
    [
        (CHAT, {"messages": USER, "use_beam_search": True, "n": 2}, "use_beam_search"),
        (COMPLETION, {"prompt": "a", "best_of": 3}, "best_of"),
        (CHAT, {"messages": []}, "messages"),
        (RESPONSES, {"input": 3}, "input"),
        (COMPLETION, {"prompt": "a", "return_token_offsets": 3}, "return_token_offsets"),
    ],
)
async def test_what_cannot_be_rendered_names_its_field(rig, path: str, asked: dict[str, Any], field: str) -> None:
    async with rig(scale_out=True) as r:
        status, answer = await r.post(f"{path}/render", asked)
        assert not r.ring.frames(Generate)
    assert status == 400 and answer["error"]["param"] == field, answer


async def test_a_model_that_is_not_served(rig) -> None:
    async with rig(scale_out=True) as r:
        assert (await r.post(PATH, body(model="other")))[0] == 404
        assert (await r.post(f"{CHAT}/render", {"model": "other", "messages": USER}))[0] == 404
