"""Prefill and decode workers of mock models: kills, aborted clients and faults of transfers change no answer.

Tokens of mock workers do not depend on KV. But each mock worker knows which tokens a block holds, its blocks move
through the real links, and it ends with a PlanError if a plan reads a block with other tokens.
"""

import asyncio
import os
import signal
import time
import urllib.request
from collections.abc import Callable, Coroutine, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from kv_peers import needs_nixl
from prometheus_client.parser import text_string_to_metric_families
from rig import Server, completion, run_all, serve
from ring_state import LIMIT_S, left_over, read_ring, scheduler_stats, wait_for
from several_choices import KINDS, Answer, Body, ask, bodies

ROLES = ("--prefill-workers", "2", "--decode-workers", "2", "--decode-prefill-tokens", "0")
MOCK = ("demo", "--worker-cls", "mock", "--mock-step-ms", "5")
SLOW = ("--pd-faults", "delay=300ms")  # so that a kill finds transfers under way
WORKERS = ("gpu_worker prefill 0", "gpu_worker prefill 1", "gpu_worker decode 0", "gpu_worker decode 1")
NUM_STREAMS = 12
SOME_STREAMS = 4  # of both prefill workers; more may not all begin before the first of them ends
VICTIMS = ("prefill 0", "decode 1", "scheduler", "message_bus")


CONNECTORS = {
    "shm": '{"kv_connector": "shm", "kv_role": "kv_both"}',
    "tcp": '{"kv_connector": "tcp", "kv_role": "kv_both", "kv_connector_extra_config": {"encrypt": false}}',
    "nixl": '{"kv_connector": "NixlConnector", "kv_role": "kv_both"}',
}
WAYS = ["shm", "tcp", pytest.param("nixl", marks=needs_nixl)]


@pytest.fixture(scope="module")
def unified() -> Iterator[Server]:
    with serve(*MOCK) as server:
        yield server


@pytest.fixture(scope="module", params=WAYS)
def ring(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("ring") / "log"
    flags = (
        *ROLES,
        *SLOW,
        "--kv-transfer-config",
        CONNECTORS[request.param],
        "--enable-sleep-mode",
        "--enable-prompt-tokens-details",
    )
    with serve(*MOCK, *flags, log=log) as server:
        asyncio.run(wait_for(server, WORKERS))
        yield server
    assert "PlanError" not in log.read_text("utf-8", "replace")


def stream(seed: int, num_prompt: int, num_tokens: int, start: int) -> Body:
    """One choice of `num_tokens`. `start` decides on the prompt's tokens."""
    prompt = [300 + (start + j) % 3000 for j in range(num_prompt)]
    return completion(num_tokens, prompt=prompt, seed=seed, stream=True)


def requests(first: int = 0) -> list[Body]:
    """Streams of one choice with prompts of 2 to 10 blocks, and requests with several choices."""
    plain = [stream(i, 30 + 10 * i, 60, 31 * (first + i)) for i in range(NUM_STREAMS)]
    return [*plain, *bodies(len(KINDS), 60)]


async def run(
    server: Server, asked: list[Body], meanwhile: Callable[[], Coroutine[Any, Any, None]] | None = None
) -> list[Answer]:
    """meanwhile: runs when some streams of one choice have their first token, which is read while KV is on its way."""
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(100)) as session:
        return await run_all([partial(ask, session, server.url, body) for body in asked], meanwhile, SOME_STREAMS)


def changes_no_answer(
    ring: Server, unified: Server, first: int, meanwhile: Callable[[], Coroutine[Any, Any, None]], *, aborts: bool
) -> None:
    """`meanwhile` runs during transfers. aborts: it aborts some, at the latest when it is done for the third time."""
    for again in range(3):
        asked = requests(first + 1000 * again)  # no cache holds these prompts, so all are sent
        expected = asyncio.run(run(unified, asked))
        before = asyncio.run(scheduler_stats(ring))
        assert asyncio.run(run(ring, asked, meanwhile)) == expected
        asyncio.run(wait_for(ring, WORKERS))
        assert asyncio.run(left_over(ring)) == {}
        after = asyncio.run(scheduler_stats(ring))
        if not aborts or after["transfers_aborted_total"] > before["transfers_aborted_total"]:
            return
    pytest.fail("no transfer was under way")


def test_answers_are_those_of_unified_workers(ring: Server, unified: Server) -> None:
    expected = asyncio.run(run(unified, requests()))
    before = asyncio.run(scheduler_stats(ring))["transfers_landed_total"]
    assert asyncio.run(run(ring, requests())) == expected
    assert asyncio.run(left_over(ring)) == {}
    assert asyncio.run(scheduler_stats(ring))["transfers_landed_total"] - before >= NUM_STREAMS


def test_an_operator_sees_roles_and_transfers(ring: Server, request: pytest.FixtureRequest) -> None:
    asyncio.run(run(ring, requests(first=5000)))
    assert asyncio.run(left_over(ring)) == {}
    roles = {m["name"]: m["kv_role"] for m in asyncio.run(read_ring(ring))["members"] if m["kv_role"]}
    assert roles == {name: name.split(" ")[1] for name in WORKERS}
    with urllib.request.urlopen(f"{ring.url}/metrics", timeout=20) as answer:
        text = answer.read().decode()
    samples = [
        (sample.name, sample.labels, sample.value)
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    ]
    sent = [(labels, value) for name, labels, value in samples if name == "blockyard:kv_transfer_bytes_total"]
    connector = request.node.callspec.params["ring"]
    assert {labels["connector"] for labels, _ in sent} == {connector}
    assert {labels["kv_role"] for labels, value in sent if value > 0} >= {"prefill"}
    (handed_over,) = [value for name, _, value in samples if name == "blockyard:second_token_seconds_count"]
    assert handed_over >= NUM_STREAMS


async def post(server: Server, body: Body) -> tuple[int, dict[str, Any]]:
    async with aiohttp.ClientSession() as session, session.post(f"{server.url}/v1/completions", json=body) as answer:
        return answer.status, await answer.json()


def test_a_proxy_sends_the_prompt_and_its_continuation_as_two_requests(ring: Server, unified: Server) -> None:
    """As a proxy in front of vLLM does: the second request has the `kv_transfer_params` of the first one's answer."""
    body = stream(7, 200, 12, 2100) | {"stream": False, "return_token_ids": True}
    first = {"max_tokens": 1, "min_tokens": 1, "kv_transfer_params": {"do_remote_decode": True}}
    expected = asyncio.run(post(unified, body))[1]["choices"][0]["token_ids"]
    before = asyncio.run(scheduler_stats(ring))["transfers_landed_total"]
    status, prefilled = asyncio.run(post(ring, body | first))
    params = prefilled["kv_transfer_params"]
    assert (status, params["do_remote_prefill"], prefilled["choices"][0]["token_ids"]) == (200, True, expected[:1])
    members = {m["incarnation"]: m["name"] for m in asyncio.run(read_ring(ring))["members"]}
    assert members[params["remote_engine_id"]] in WORKERS[:2]
    status, answer = asyncio.run(post(ring, body | {"kv_transfer_params": params}))
    assert (status, answer["choices"][0]["token_ids"], answer.get("kv_transfer_params")) == (200, expected, None)
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] >= 192
    assert asyncio.run(left_over(ring)) == {}
    deadline = time.monotonic() + LIMIT_S
    while (landed := asyncio.run(scheduler_stats(ring))["transfers_landed_total"]) == before:
        assert time.monotonic() < deadline
    assert landed == before + 1
    status, refusal = asyncio.run(post(unified, body | first))
    assert (status, refusal["error"]["param"]) == (400, "kv_transfer_params")


@pytest.mark.parametrize("victim", VICTIMS)
def test_a_kill_during_transfers_changes_no_answer(ring: Server, unified: Server, victim: str) -> None:
    async def kill() -> None:
        os.kill(next(pid for name, pid in ring.children().items() if victim in name), signal.SIGKILL)

    first = 100 * (1 + VICTIMS.index(victim))
    changes_no_answer(ring, unified, first, kill, aborts=victim.startswith(("prefill", "decode")))


def test_workers_that_sleep_and_wake_up_during_transfers_change_no_answer(ring: Server, unified: Server) -> None:
    async def sleep_and_wake() -> None:
        async with aiohttp.ClientSession() as session:
            for path in ("/sleep?level=1", "/wake_up", "/sleep?level=2", "/wake_up"):
                async with session.post(f"{ring.url}{path}") as answer:
                    assert answer.status == 200, await answer.text()

    changes_no_answer(ring, unified, 700, sleep_and_wake, aborts=True)


def test_clients_that_leave_between_prefill_and_decode_leave_no_block(ring: Server) -> None:
    async def leave() -> None:
        async with aiohttp.ClientSession() as session:
            posts = [
                session.post(f"{ring.url}/v1/completions", json=body) for body in requests(first=900)[:NUM_STREAMS]
            ]
            answers = await asyncio.gather(*posts)
            for answer in answers:
                await answer.content.readany()  # the first token
                answer.close()

    asyncio.run(leave())
    assert asyncio.run(left_over(ring)) == {}


def test_lost_delayed_and_corrupt_transfers_change_no_answer(unified: Server, tmp_path: Path) -> None:
    asked = [stream(i, 40 + i % 100, 8, 37 * i) for i in range(150)]
    log = tmp_path / "log"
    expected = asyncio.run(run(unified, asked))
    faults = ("--pd-faults", "drop=0.04,delay=50ms,flip=0.04")
    with serve(*MOCK, *ROLES, *faults, log=log) as server:
        asyncio.run(wait_for(server, WORKERS))
        assert asyncio.run(run(server, asked)) == expected
        assert asyncio.run(left_over(server)) == {}
        counts = asyncio.run(scheduler_stats(server))
    assert counts["transfers_landed_total"] > 90 and counts["transfers_aborted_total"] > 0
    assert "PlanError" not in log.read_text("utf-8", "replace")
