"""Operators' endpoints: the frames that they send and the answers that they return."""

import asyncio
import re

import msgspec
import pytest
from fake_ring import SCHEDULER

from blockyard.shared.messages import (
    Control,
    Controlled,
    ControlVerb,
    MemoryTag,
    QueueCapacity,
    QueueCapacityChanged,
    RefusalCount,
    Role,
    Stats,
    TenantShare,
)


@pytest.mark.parametrize(
    ("path", "control"),
    [
        ("/reset_prefix_cache", Control("", ControlVerb.RESET_PREFIX_CACHE)),
        ("/pause", Control("", ControlVerb.PAUSE)),
        ("/pause?mode=wait&clear_cache=false", Control("", ControlVerb.PAUSE, drain=True, clear_cache=False)),
        ("/resume", Control("", ControlVerb.RESUME)),
        ("/sleep", Control("", ControlVerb.SLEEP)),
        ("/sleep?level=2", Control("", ControlVerb.SLEEP, level=2)),
        ("/wake_up", Control("", ControlVerb.WAKE_UP)),
        ("/wake_up?tags=weights", Control("", ControlVerb.WAKE_UP, tags=[MemoryTag.WEIGHTS])),
        (
            "/wake_up?tags=weights&tags=kv_cache",
            Control("", ControlVerb.WAKE_UP, tags=[MemoryTag.KV_CACHE, MemoryTag.WEIGHTS]),
        ),
        (
            "/wake_up?tags=kv_cache,weights",
            Control("", ControlVerb.WAKE_UP, tags=[MemoryTag.KV_CACHE, MemoryTag.WEIGHTS]),
        ),
    ],
)
async def test_each_operation_is_one_frame_and_its_answer(rig, path: str, control: Control) -> None:
    async with rig() as r:
        r.ring.control = lambda frame: Controlled(frame.request_id, 200, "", 2, True, 77)
        assert await r.post(path, {}) == (200, {"sleep_level": 2, "paused": True, "freed_bytes": 77})
        [sent] = r.ring.frames(Control)
        assert msgspec.structs.replace(sent, request_id="") == control


async def test_is_sleeping_and_is_paused(rig) -> None:
    async with rig() as r:
        for level in (0, 1):
            r.ring.control = lambda frame, level=level: Controlled(frame.request_id, 200, "", level, not level)
            async with r.http.get("/is_sleeping") as answer:
                assert await answer.json() == {"is_sleeping": bool(level)}
            async with r.http.get("/is_paused") as answer:
                assert await answer.json() == {"is_paused": not level}
        assert {frame.verb for frame in r.ring.frames(Control)} == {ControlVerb.STATUS}


@pytest.mark.parametrize(
    ("path", "field"),
    [
        ("/sleep?level=3", "level"),
        ("/sleep?level=x", "level"),
        ("/pause?mode=abort", "mode"),
        ("/pause?clear_cache=maybe", "clear_cache"),
        ("/wake_up?tags=scheduling", "tags"),
        ("/wake_up?tags=", "tags"),
    ],
)
async def test_unknown_parameters_are_a_400(rig, path: str, field: str) -> None:
    async with rig() as r:
        status, body = await r.post(path, {})
        assert (status, body["error"]["param"]) == (400, field)
        assert not r.ring.frames(Control)


async def test_a_refusal_is_passed_on(rig) -> None:
    async with rig() as r:
        r.ring.control = lambda frame: Controlled(frame.request_id, 400, "start it with --enable-sleep-mode", 0, False)
        status, body = await r.post("/sleep", {})
        assert (status, body["error"]["message"]) == (400, "start it with --enable-sleep-mode")


async def test_operations_need_the_key(rig) -> None:
    async with rig(api_keys=["sk-a"]) as r:
        for path in ("/reset_prefix_cache", "/pause", "/resume", "/sleep", "/wake_up"):
            assert (await r.post(path, {}))[0] == 401, path
        async with r.http.get("/is_sleeping") as answer:
            assert answer.status == 401
        headers = {"Authorization": "Bearer sk-a"}
        assert (await r.post("/sleep", {}, headers=headers))[0] == 200


async def test_a_scheduler_that_is_lost_meanwhile_is_a_503(rig) -> None:
    async with rig() as r:
        r.ring.silent.add(Role.SCHEDULER)
        asked = asyncio.create_task(r.post("/sleep", {}))
        await r.until(lambda: bool(r.ring.frames(Control)))
        r.ring.lose(SCHEDULER)
        assert (await asked)[0] == 503
        assert (await r.post("/sleep", {}))[0] == 503


async def test_a_full_queue_of_sleepers_is_a_503_with_retry_after(rig) -> None:
    async with rig() as r:
        r.ring.receive(SCHEDULER, QueueCapacityChanged(QueueCapacity(0, 0, 4.0, asleep=True)))
        async with r.http.post("/v1/completions", json={"prompt": "x"}) as answer:
            assert (answer.status, answer.headers["Retry-After"]) == (503, "4")


@pytest.mark.parametrize(("num_host_blocks", "mode"), [(0, "recompute"), (9, "swap")])
async def test_metrics_show_the_queue(rig, num_host_blocks: int, mode: str) -> None:
    stats = Stats(
        preemptions_total=5,
        displaced_total=2,
        host_blocks_total=num_host_blocks,
        waiting_tokens=70,
        wait_s=1.5,
        refused=[RefusalCount("full", 3)],
        tenants=[TenantShare("key-1", 4, 6, 900)],
    )
    async with rig() as r:
        r.ring.members[SCHEDULER] = msgspec.structs.replace(r.ring.members[SCHEDULER], stats=stats)
        async with r.http.get("/metrics") as answer:
            lines = [line for line in (await answer.text()).splitlines() if 'member="scheduler"' in line]
    found = {re.sub(r"blockyard:|(member|model_name)=\"[^\"]*\",?", "", line).replace(",}", "}") for line in lines}
    assert "queue_tokens{} 70.0" in found
    assert "queue_wait_seconds{} 1.5" in found
    assert 'requests_refused_total{reason="full"} 3.0' in found
    assert {line for line in found if line.startswith("preemptions")} == {
        f'preemptions_total{{mode="{mode}"}} 3.0',
        'preemptions_total{mode="displaced"} 2.0',
    }
    assert 'tenant_served_tokens_total{tenant="key-1"} 900.0' in found
    assert 'tenant_waiting{tenant="key-1"} 6.0' in found


async def test_requests_are_aborted_by_the_ids_of_their_answers(rig) -> None:
    async with rig(api_keys=["key"], admin_keys=["admin"]) as r:
        r.ring.step_s = 0.05
        body = {"model": "tiny", "prompt": "hello", "max_tokens": 90}
        key, admin = ({"Authorization": f"Bearer {name}"} for name in ("key", "admin"))
        whole, other = (
            asyncio.create_task(r.post("/v1/completions", body, headers=key | {"X-Request-Id": name})) for name in "ab"
        )
        await r.until(lambda: len(r.ring.running) == 2)
        ids = {"request_ids": ["cmpl-a", "cmpl-none"]}
        assert (await r.post("/abort_requests", ids, headers=key))[0] == 401
        assert await r.post("/abort_requests", ids, headers=admin) == (200, {"num_aborted": 1})
        status, error = await whole
        assert (status, error["error"]["code"]) == (499, "request_aborted")
        await r.until(lambda: len(r.ring.running) == 1)
        assert not other.done()
        assert await r.post("/abort_requests", {"request_ids": ["cmpl-b"]}, headers=admin) == (200, {"num_aborted": 1})
        assert (await other)[0] == 499
        status, error = await r.post("/abort_requests", {"ids": []}, headers=admin)
        assert status == 400 and "request_ids" in error["error"]["message"]
