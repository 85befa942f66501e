"""-1 in fields where other servers take it for "no limit" or "all"."""

from typing import Any

import pytest
from fake_ring import CARD

from blockyard.shared.messages import Generate
from blockyard.shared.token_ids import unpack

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
USER: list[Any] = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {"messages": USER, "max_tokens": -1}),
        (CHAT, {"messages": USER, "max_completion_tokens": -1}),
        (COMPLETION, {"prompt": "hello", "max_tokens": -1}),
        (COMPLETION, {"prompt": "hello", "max_tokens": -1, "echo": True}),
    ],
)
async def test_max_tokens_minus_one_is_the_rest_of_the_context(rig, path: str, body: dict[str, Any]) -> None:
    async with rig() as r:
        r.ring.script = lambda request_id, index: "x"
        status, answer = await r.post(path, body | {"model": "tiny"})
        [frame] = r.ring.frames(Generate)
    assert status == 200 and frame.sampling.max_tokens == CARD.max_model_len - len(frame.prompt_ids) // 4
    assert answer["usage"]["completion_tokens"] == frame.sampling.max_tokens


async def test_all_log_probabilities(rig) -> None:
    """--max-logprobs -1 allows the whole vocabulary; a smaller limit refuses it, as vLLM does."""
    asked: list[tuple[str, dict[str, Any], str]] = [
        (COMPLETION, {"prompt": "ab", "logprobs": -1}, "logprobs"),
        (COMPLETION, {"prompt": "ab", "prompt_logprobs": -1}, "prompt_logprobs"),
        (CHAT, {"messages": USER, "logprobs": True, "top_logprobs": -1}, "top_logprobs"),
        (CHAT, {"messages": USER, "prompt_logprobs": -1}, "prompt_logprobs"),
    ]
    async with rig() as r:
        for path, body, field in asked:
            status, answer = await r.post(path, body | {"max_tokens": 1})
            assert (status, answer["error"]["param"]) == (400, field) and "--max-logprobs is 20" in str(answer)
            status, answer = await r.post(path, body | {field: -2})
            assert (status, answer["error"]["param"]) == (400, field)
    for most in (-1, CARD.vocab_size):
        async with rig(max_logprobs=most) as r:
            for path, body, field in asked:
                assert (await r.post(path, body | {"max_tokens": 1}))[0] == 200
                assert (await r.post(path, body | {"max_tokens": 1, field: CARD.vocab_size + 1}))[0] == 400
            sent = [(f.sampling.num_logprobs, f.sampling.num_prompt_logprobs) for f in r.ring.frames(Generate)]
        whole = CARD.vocab_size
        assert sent == [(whole, None), (None, whole), (whole, None), (None, whole)]


@pytest.mark.parametrize(("fields", "kept"), [({"max_tokens": 6}, 250), ({}, 240), ({"max_tokens": -1}, 255)])
async def test_a_prompt_is_cut_to_what_fits(rig, fields: dict[str, Any], kept: int) -> None:
    text = "".join(chr(97 + i % 26) for i in range(400))
    async with rig() as r:
        body = {"prompt": [text, "short"], "truncate_prompt_tokens": -1}
        assert (await r.post(COMPLETION, body | fields))[0] == 200
        long, short = r.ring.frames(Generate)
        assert bytes(unpack(long.prompt_ids)).decode() == text[-kept:] and len(short.prompt_ids) == 4 * 5
        status, answer = await r.post(COMPLETION, body | {"max_tokens": 256})
        assert (status, answer["error"]["param"]) == (400, "truncate_prompt_tokens")


async def test_a_token_that_is_not_shown_does_not_count(rig) -> None:
    """echo with max_tokens 0 samples one token to get the prompt's log-probabilities."""
    async with rig() as r:
        body = {"prompt": ["abc", "de"], "echo": True, "max_tokens": 0, "logprobs": 1}
        status, answer = await r.post(COMPLETION, body)
        async with r.http.get("/metrics") as response:
            lines = (await response.text()).splitlines()
    assert status == 200 and answer["usage"]["completion_tokens"] == 0
    label = '{engine="0",model_name="tiny"}'
    for name, value in (
        ("generation_tokens_total", 0),
        ("request_generation_tokens_sum", 0),
        ("request_params_max_tokens_sum", 0),
        ("prompt_tokens_total", 5),
    ):
        assert f"vllm:{name}{label} {float(value)}" in lines, [line for line in lines if name in line]
