"""--max-num-queued-reqs and --max-num-queued-tokens: what a gateway has open at most."""

import asyncio
from typing import Any

import pytest

from blockyard.services.api_gateway.responses.http_generation import OpenRequests
from blockyard.shared.errors import RequestError

BODY = {"model": "tiny", "prompt": "0123456789", "max_tokens": 4}


async def test_more_requests_than_the_bound_are_a_429_and_ended_ones_make_room(rig) -> None:
    async with rig(max_num_queued_reqs=3) as r:
        r.ring.step_s = 0.1
        answers = await asyncio.gather(*(r.post("/v1/completions", BODY) for _ in range(5)))
        assert sorted(status for status, _ in answers) == [200, 200, 200, 429, 429]
        refused = next(answer for status, answer in answers if status == 429)
        assert refused["error"]["type"] == "rate_limit_error"
        assert [status for status, _ in [await r.post("/v1/completions", BODY) for _ in range(4)]] == [200] * 4
    async with rig() as r:
        answers = await asyncio.gather(*(r.post("/v1/completions", BODY) for _ in range(5)))
        assert {status for status, _ in answers} == {200}


async def test_choices_and_prompts_count_each(rig) -> None:
    async with rig(max_num_queued_reqs=4) as r:
        r.ring.step_s = 0.1
        first = asyncio.create_task(r.post("/v1/completions", BODY | {"n": 3}))
        await r.until(lambda: r.gateway.pipeline.num_active == 1)
        assert (await r.post("/v1/completions", BODY | {"prompt": ["a", "b"]}))[0] == 429
        assert (await r.post("/v1/completions", BODY))[0] == 200
        assert (await first)[0] == 200
        assert (await r.post("/v1/completions", BODY | {"n": 5}))[0] == 200, "alone it may be of any size"


async def test_prompts_without_output_are_bounded_in_tokens(rig) -> None:
    async with rig(max_num_queued_tokens=20) as r:
        r.ring.step_s = 0.2  # the first token comes after that
        prompts = ["x" * 15, "y" * 15, "z" * 15]
        open_ones: list[asyncio.Task[Any]] = []
        for prompt in prompts[:2]:
            open_ones.append(asyncio.create_task(r.post("/v1/completions", BODY | {"prompt": prompt})))
            await r.until(lambda: len(r.gateway.journal.entries) == len(open_ones))
        async with r.http.post("/v1/completions", json=BODY | {"prompt": prompts[2]}) as response:
            assert response.status == 429
            assert response.headers["Retry-After"] == "1"
        assert [(await each)[0] for each in open_ones] == [200, 200]
        assert (await r.post("/v1/completions", BODY | {"prompt": prompts[2]}))[0] == 200


async def test_tokens_count_no_longer_once_there_is_output(rig) -> None:
    async with rig(max_num_queued_tokens=10) as r:
        r.ring.step_s = 0.05
        body = BODY | {"max_tokens": 40, "stream": True}
        async with r.http.post("/v1/completions", json=body) as response:
            await response.content.readany()  # its first event
            assert (await r.post("/v1/completions", BODY))[0] == 200
            await response.read()


def test_a_request_that_fails_is_counted_no_longer() -> None:
    requests = OpenRequests(1, None)
    with pytest.raises(ValueError), requests.counted(1):
        raise ValueError
    with requests.counted(1), pytest.raises(RequestError) as refusal, requests.counted(1):
        pass
    assert refusal.value.status == 429


TOOL = {"type": "function", "name": "search", "description": "x" * 10_000, "parameters": {"type": "object"}}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "y" * 200}]}),
        ("/v1/responses", {"input": "y" * 200, "tools": [TOOL], "tool_choice": "none"}),
        ("/v1/responses", {"input": "y" * 200, "tools": [TOOL], "tool_choice": "none", "background": True}),
    ],
)
async def test_an_open_answer_keeps_no_text_of_its_prompt(rig, path: str, body: Any) -> None:
    """The tools of a response are kept once, as its answer repeats them, and not with its prompt."""
    async with rig(max_model_len=20_000) as r:
        r.ring.step_s = 0.05
        async with r.http.post(path, json={"model": "tiny", "stream": True, "ignore_eos": True} | body) as response:
            assert response.status == 200
            await response.content.readany()
            await r.until(lambda: bool(r.gateway.journal.entries))
            (entry,) = r.gateway.journal.entries.values()
            request = entry.owner.request
            assert (request.prompts, entry.owner.num_prompts) == ([], 1)
            if request.options.responses is not None:
                assert request.options.responses.repeated.count(b"x" * 10_000) == 1
                assert b"x" * 10_000 not in request.options.responses.store.input_items
