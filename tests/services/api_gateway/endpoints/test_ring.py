"""The gateway as a member of the ring: recovery through real HTTP, health, metrics, changing models."""

import asyncio
import time
from typing import Any

import msgspec
import pytest
from fake_ring import (
    CARD,
    DETOKENIZER,
    MEMBERS,
    SCHEDULER,
    TOKENIZER,
    WORKER,
    member,
)

from blockyard.shared.messages import Generate, KVRole, RankStats, Role, Scrape, Stats, Tokenize
from blockyard.shared.ring_client import schedulers
from blockyard.shared.ring_client.recovery import hold
from blockyard.shared.token_ids import unpack

COMPLETION = "/v1/completions"
CHAT = "/v1/chat/completions"


def completion(**fields: Any) -> dict[str, Any]:
    return {"prompt": "hello", "max_tokens": 40} | fields


async def test_a_killed_scheduler_is_a_pause(rig) -> None:
    async with rig() as r:
        r.ring.step_s = 0.005
        asked = asyncio.create_task(r.events(COMPLETION, completion(n=2, logprobs=1)))
        await r.until(lambda: r.gateway.meters.output_tokens > 10)
        r.ring.running.clear()
        r.ring.lose(SCHEDULER)
        await asyncio.sleep(0.05)
        assert not asked.done()
        r.ring.join(member(Role.SCHEDULER, 22, card=CARD))
        events = await asyncio.wait_for(asked, 5)
        to, again = r.ring.sent[-1]
    assert to == 22 and isinstance(again, Generate) and again.attempt > 0
    known = [unpack(c.output_ids) for c in again.choices]
    assert [len(ids) > 4 for ids in known] == [True, True]
    for choice in (0, 1):
        mine = [e["choices"][0] for e in events[:-1] if e["choices"][0]["index"] == choice]
        assert "".join(c["text"] for c in mine) == "".join(f"w{i} " for i in range(40))
        assert sum(len(c["logprobs"]["tokens"]) for c in mine) == 40


async def test_a_killed_detokenizer_is_a_pause(rig) -> None:
    async with rig() as r:
        r.ring.step_s = 0.005
        asked = asyncio.create_task(r.post(COMPLETION, completion()))
        await r.until(lambda: r.gateway.meters.output_tokens > 5)
        r.ring.join(member(Role.DETOKENIZER, 44))
        r.ring.detokenizer = 44
        r.ring.lose(DETOKENIZER)
        status, answer = await asyncio.wait_for(asked, 5)
        generates = r.ring.frames(Generate)
    assert status == 200 and answer["choices"][0]["text"] == "".join(f"w{i} " for i in range(40))
    assert answer["usage"]["completion_tokens"] == 40
    assert [g.attempt for g in generates] == [0, 1] and generates[0].sampling.seed == generates[1].sampling.seed


async def test_a_scheduler_that_still_lists_a_dead_detokenizer_is_not_flooded(rig) -> None:
    async with rig() as r:
        r.ring.lose(DETOKENIZER)
        r.ring.silent = {Role.DETOKENIZER}
        asked = asyncio.create_task(r.post(COMPLETION, completion()))
        await asyncio.sleep(0.5)
        assert 2 <= len(r.ring.frames(Generate)) <= 6
        r.ring.join(member(Role.DETOKENIZER, 44))
        r.ring.detokenizer, r.ring.silent = 44, set()
        status, answer = await asyncio.wait_for(asked, 5)
    assert status == 200 and answer["usage"]["completion_tokens"] == 40


async def test_a_killed_tokenizer_has_no_visible_effect(rig) -> None:
    async with rig() as r:
        r.ring.silent = {Role.TOKENIZER_POOL}
        asked = [asyncio.create_task(r.post(COMPLETION, completion(max_tokens=2))) for _ in range(5)]
        await r.until(lambda: len(r.ring.frames(Tokenize)) == 2)  # at most this many wait at one tokenizer
        r.ring.silent = set()
        r.ring.lose(TOKENIZER)
        await asyncio.sleep(0.02)
        r.ring.join(member(Role.TOKENIZER_POOL, 11))
        answers = await asyncio.wait_for(asyncio.gather(*asked), 5)
        frames = [(to, f.request_id) for to, f in r.ring.sent if isinstance(f, Tokenize)]
    assert [status for status, _ in answers] == [200] * 5
    assert len([f for f in frames if f[0] == 11]) == 5 and {i for _, i in frames[2:4]} == {i for _, i in frames[:2]}


async def test_a_silent_request_is_sent_again(rig) -> None:
    async with rig(stall_timeout_s=0.3) as r:
        r.ring.silent = {Role.DETOKENIZER}
        asked = asyncio.create_task(r.post(COMPLETION, completion(max_tokens=3)))
        await r.until(lambda: len(r.ring.frames(Generate)) == 2)
        r.ring.silent = set()
        status, answer = await asyncio.wait_for(asked, 5)
    assert status == 200 and answer["choices"][0]["text"] == "w0 w1 w2 "


async def test_without_members_requests_are_a_503(rig) -> None:
    async with rig(join=False, served_model_names=["tiny"], stall_timeout_s=0.2) as r:
        status, answer = await r.post(COMPLETION, completion(model="tiny"))
        assert (status, answer["error"]["code"]) == (503, "service_unavailable")
        assert (await r.post(COMPLETION, completion()))[0] == 503
        assert (await r.post(COMPLETION, completion(model="other")))[0] == 404
        del r.ring.members[TOKENIZER]
        r.ring.join_all()
        status, answer = await r.post(COMPLETION, completion(model="tiny"))
        assert status == 503 and "tokenizer" in answer["error"]["message"]


@pytest.mark.parametrize("path", [COMPLETION, CHAT])
@pytest.mark.parametrize("stream", [False, True])
async def test_new_requests_wait_for_a_scheduler_that_restarts(rig, path: str, stream: bool) -> None:
    body = completion() if path == COMPLETION else {"messages": [{"role": "user", "content": "hello"}]}
    async with rig() as r:
        r.ring.lose(SCHEDULER)
        asked = asyncio.create_task((r.events if stream else r.post)(path, body | {"max_tokens": 2}))
        await r.until(lambda: len(r.gateway.client.dispatch.hold) == 1)
        await asyncio.sleep(0.2)
        r.ring.join(member(Role.SCHEDULER, 20, card=CARD))
        answer = await asyncio.wait_for(asked, 5)
        (sent,) = r.ring.frames(Generate)
        assert sent.attempt == 0, "as a new request, which the scheduler may refuse"
        assert not len(r.gateway.client.dispatch.hold)
    assert answer[-1] == "[DONE]" if stream else answer[0] == 200


async def test_held_requests_are_bounded_in_time_and_number(rig, monkeypatch) -> None:
    monkeypatch.setattr(hold, "MAX_HELD", 4)
    monkeypatch.setattr(schedulers, "AWAY_S", 3.0)
    async with rig() as r:
        r.gateway.client.dispatch.hold.hold_s = 0.5
        r.ring.lose(SCHEDULER)
        held = [asyncio.create_task(r.post(COMPLETION, completion(n=2))) for _ in range(2)]
        await r.until(lambda: len(r.gateway.client.dispatch.hold) == 2)
        status, answer = await r.post(COMPLETION, completion())
        assert (status, answer["error"]["code"]) == (503, "service_unavailable")
        for status, answer in await asyncio.gather(*held):
            assert status == 503 and "No scheduler is ready" in answer["error"]["message"]
        assert r.gateway.journal.entries == {}
        await r.until(lambda: not r.gateway.pipeline.schedulers.cards(), 7)
        asked_s = time.monotonic()
        assert (await r.post(COMPLETION, completion()))[0] == 503
        assert time.monotonic() - asked_s < 0.3, "it was not held: no scheduler has been there for AWAY_S"
        assert not r.ring.frames(Generate)


async def test_a_held_request_whose_client_leaves_is_not_sent(rig) -> None:
    async with rig() as r:
        r.ring.lose(SCHEDULER)
        asked = asyncio.create_task(r.post(COMPLETION, completion()))
        await r.until(lambda: len(r.gateway.client.dispatch.hold) == 1)
        asked.cancel()
        await r.until(lambda: not len(r.gateway.client.dispatch.hold))
        r.ring.join(member(Role.SCHEDULER, 20, card=CARD))
        assert not r.ring.frames(Generate)


async def test_health_ready_and_live(rig) -> None:
    async with rig() as r:

        async def status(path: str) -> int:
            async with r.http.get(path) as response:
                return response.status

        assert [await status(p) for p in ("/health", "/ready", "/live")] == [200, 200, 200]
        for role, incarnation in ((Role.DETOKENIZER, DETOKENIZER), (Role.TOKENIZER_POOL, TOKENIZER)):
            r.ring.lose(incarnation)
            assert [await status(p) for p in ("/health", "/ready", "/live")] == [503, 503, 200]
            r.ring.join(member(role, incarnation))
            assert [await status(p) for p in ("/health", "/ready", "/live")] == [200, 200, 200]
        r.ring.lose(WORKER)
        assert [await status(p) for p in ("/health", "/ready", "/live")] == [503, 503, 200]
        r.ring.join(member(Role.GPU_WORKER, WORKER, ready=False))
        assert await status("/health") == 503


async def get(r: Any, path: str) -> str:
    async with r.http.get(path) as response:
        assert response.status == 200
        return await response.text()


async def test_it_answers_scrapes_of_other_gateways(rig) -> None:
    async with rig() as r:
        r.gateway.handle(77, Scrape("s"))
        [(to, answer)] = r.ring.answered
    assert to == 77 and answer.request_id == "s" and "blockyard:requests_total" in answer.text


async def test_its_own_metrics_port(rig, unused_port: int) -> None:
    async with rig(metrics_port=unused_port) as r:
        async with r.http.get(f"http://127.0.0.1:{unused_port}/metrics") as response:
            assert "blockyard:requests_total" in await response.text()
        async with r.http.get(f"http://127.0.0.1:{unused_port}/v1/models") as response:
            assert response.status == 404


async def test_the_ring_for_the_playground(rig) -> None:
    async with rig() as r:
        await r.post(COMPLETION, completion(max_tokens=2))
        await r.until(lambda: r.ring.me.stats.requests_total == 1)
        r.ring.members[SCHEDULER] = msgspec.structs.replace(
            MEMBERS[1], stats=Stats(running=2, blocks_used=4, blocks_total=9, output_tokens_total=5, transfers_open=3)
        )
        r.ring.members[WORKER] = msgspec.structs.replace(
            r.ring.members[WORKER],
            kv_role=KVRole.PREFILL,
            stats=Stats(sends_to=[1, 2**64 - 1], ranks=[RankStats(0, 71, 9), RankStats(1, 72, 8, silent_s=3.0)]),
        )
        view = msgspec.json.decode(await get(r, "/ring"))
    roles = ["api_gateway", "tokenizer_pool", "scheduler", "gpu_worker", "detokenizer"]
    assert [m["role"] for m in view["members"]] == roles
    assert view["members"][2]["stats"]["blocks_used"] == 4 and view["members"][2]["ready"] is True
    assert view["members"][0]["stats"]["rss_bytes"] > 2**20
    assert view["members"][2]["stats"]["transfers_open"] == 3
    assert [m["kv_role"] for m in view["members"]] == ["", "", "", "prefill", ""]
    assert view["members"][3]["sends_to"] == ["0000000000000001", "ffffffffffffffff"]
    assert view["members"][3]["ranks"] == [
        {"rank": 0, "pid": 71, "rss_bytes": 9, "state": "running"},
        {"rank": 1, "pid": 72, "rss_bytes": 8, "state": "silent"},
    ]
    totals = view["totals"]
    assert (totals["requests_total"], totals["output_tokens_total"]) == (1, 5)
    assert (totals["running"], totals["blocks_used"], totals["blocks_total"]) == (2, 4, 9)
