"""Routes that platforms and load balancers use: /ping, /load, /invocations, and every path with a slash at its end."""

import asyncio
from typing import Any

import msgspec
import openai
import pytest
from fake_ring import DETOKENIZER, SCHEDULER

from blockyard.shared.messages import Member, Role, Stats

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
USER: list[Any] = [{"role": "user", "content": "hi"}]


async def test_ping_is_health(rig) -> None:
    async with rig(api_keys=["sk"]) as r:
        for ask in (r.http.get, r.http.post):
            async with ask("/ping") as response:
                assert response.status == 200
        r.ring.lose(SCHEDULER)
        for path in ("/ping", "/health"):
            async with r.http.get(path) as response:
                assert response.status == 503


async def load(r) -> int:
    async with r.http.get("/load") as response:
        answer = await response.json()
        assert response.status == 200 and list(answer) == ["server_load"]
        return int(answer["server_load"])


async def test_load_counts_requests_in_progress_on_all_gateways(rig) -> None:
    async with rig() as r:
        assert await load(r) == 0
        r.ring.silent.add(Role.DETOKENIZER)
        body_parser = [{"prompt": ["x", "y"], "n": 2}, {"prompt": "x", "stream": True}]
        asked = [asyncio.create_task(r.post(COMPLETION, body)) for body in body_parser]
        await r.until(lambda: r.gateway.pipeline.num_active == 2)
        assert await load(r) == 2
        other = Member("api_gateway 1", Role.API_GATEWAY, 77, "ipc:///77", ready=True, stats=Stats(active=5, running=9))
        r.ring.join(other)
        assert await load(r) == 7
        for task in asked:
            task.cancel()
        await r.until(lambda: r.gateway.pipeline.num_active == 0)
        r.ring.lose(77)
        assert await load(r) == 0
        assert (await r.post(COMPLETION, {"prompt": "x", "top_p": 2}))[0] == 400 and await load(r) == 0
        await r.until(lambda: r.ring.me.stats.active == 0)


async def test_load_reaches_the_other_gateways(rig) -> None:
    async with rig() as r:
        r.ring.silent.add(Role.DETOKENIZER)
        asked = asyncio.create_task(r.post(COMPLETION, {"prompt": "x"}))
        await r.until(lambda: r.ring.me.stats.active == 1)
        r.ring.lose(DETOKENIZER)
        asked.cancel()


async def test_invocations_answers_by_its_body(rig) -> None:
    async with rig(api_keys=["sk"]) as r:
        key = {"Authorization": "Bearer sk"}
        assert (await r.post("/invocations", {"prompt": "x"}))[0] == 401
        for body, kind in (
            ({"messages": USER}, "chat.completion"),
            ({"messages": USER, "prompt": None}, "chat.completion"),
            ({"prompt": "x"}, "text_completion"),
            ({"prompt": "x", "messages": None}, "text_completion"),
        ):
            status, answer = await r.post("/invocations", body | {"max_tokens": 2}, headers=key)
            assert (status, answer["object"]) == (200, kind)
        marked = b"\xef\xbb\xbf" + msgspec.json.encode({"messages": USER})
        assert (await r.post("/invocations", marked, headers=key))[1]["object"] == "chat.completion"
        for wrong, field in (
            ({}, "messages"),
            ({"prompt": None}, "messages"),
            ({"input": "x"}, "model"),
            ({"prompt": "x", "model": "other"}, "model"),
            ({"messages": []}, "messages"),
            ({"messages": USER, "top_p": 2}, "top_p"),
            ({"prompt": 5}, "prompt"),
            (b'{"prompt": x}', "prompt"),
            (b"[]", None),
        ):
            status, answer = await r.post("/invocations", wrong, headers=key)
            assert (status, answer["error"]["param"]) == (404 if "other" in str(wrong) else 400, field), wrong
        async with r.http.post("/invocations", json={"prompt": "x", "stream": True}, headers=key) as response:
            assert (await response.text()).endswith("data: [DONE]\n\n")


@pytest.mark.parametrize("root", ["", "/llm"])
async def test_every_path_may_end_in_a_slash(rig, root: str) -> None:
    async with rig(root_path=root, api_keys=["sk"]) as r:
        key = {"Authorization": "Bearer sk"}
        for path, body in (
            (CHAT, {"messages": USER}),
            (COMPLETION, {"prompt": "x"}),
            ("/invocations", {"prompt": "x"}),
            ("/tokenize", {"prompt": "x"}),
            ("/detokenize", {"tokens": [1]}),
            ("/sleep", {}),
        ):
            assert (await r.post(f"{root}{path}/", body))[0] == 401, path
            assert (await r.post(f"{root}{path}/", body, headers=key))[0] == 200, path
        for path in ("/v1/models", "/v1/models/tiny", "/ring", "/is_sleeping"):
            async with r.http.get(f"{root}{path}/") as response:
                assert response.status == 401, path
            async with r.http.get(f"{root}{path}/", headers=key) as response:
                assert response.status == 200, path
        for path in ("/health", "/metrics", "/version", "/load", "/ping"):
            async with r.http.get(f"{root}{path}/") as response:
                assert response.status == 200, path
        async with r.http.get(f"{root}{COMPLETION}//", headers=key) as response:
            assert response.status == 404


async def test_the_official_client_with_a_slash_at_the_end_of_its_base(rig) -> None:
    async with rig() as r, openai.AsyncOpenAI(base_url=f"{r.url}/v1/", api_key="x", max_retries=0) as client:
        assert [model.id async for model in client.models.list()] == ["tiny", "tiny-alias"]
        one = await client.models.retrieve("tiny/")
        assert one.id == "tiny"
