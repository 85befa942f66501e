"""/metrics of a ring of real processes: vLLM's dashboards, gauges as of now, counters that never fall."""

import asyncio
import contextlib
import itertools
import os
import signal
from collections.abc import AsyncIterator, Iterator

import aiohttp
import pytest
from prometheus_client.parser import text_string_to_metric_families
from rig import Server, completion, serve, stream
from serving.vllm_dashboards import PANELS

Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]
NUM_STREAMS = 5
RUNNING = "vllm:num_requests_running"
RISING = ("_total", "_count", "_bucket")


@pytest.fixture(scope="module")
def ring() -> Iterator[Server]:
    with serve("demo", "--worker-cls", "mock", "--mock-step-ms", "10") as server:
        yield server


async def scrape(session: aiohttp.ClientSession, server: Server) -> Samples:
    async with session.get(f"{server.url}/metrics") as answer:
        families = list(text_string_to_metric_families(await answer.text()))
    return {(s.name, tuple(sorted(s.labels.items()))): s.value for family in families for s in family.samples}


def total(found: Samples, name: str, **labels: str) -> float:
    """The sum of all series of a name with these labels."""
    wanted = set(labels.items())
    return sum(value for (one, given), value in found.items() if one == name and wanted <= set(given))


@contextlib.asynccontextmanager
async def running(
    server: Server, num_tokens: int
) -> AsyncIterator[tuple[aiohttp.ClientSession, list[asyncio.Task[str]]]]:
    """Runs streams, each of which has received some text."""
    begun = asyncio.Semaphore(0)

    async def one(i: int) -> str:
        body = completion(num_tokens, prompt=f"def stream_{i}():", seed=i) | {"stream": True}
        text = b""
        async with session.post(f"{server.url}/v1/completions", json=body) as answer:
            async for line in answer.content:
                begun.release() if not text else None
                text += line
        return text.decode()

    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(60)) as session:
        tasks = [asyncio.create_task(one(i)) for i in range(NUM_STREAMS)]
        try:
            for _ in tasks:
                await begun.acquire()
            yield session, tasks
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


def test_each_panel_of_vllms_dashboards_has_series(ring: Server) -> None:
    async def some_requests() -> Samples:
        async with aiohttp.ClientSession() as session:
            for n in (1, 2):
                async with session.post(f"{ring.url}/v1/completions", json=completion(6, prompt="a", n=n)) as answer:
                    assert answer.status == 200
            assert (await stream(session, ring.url, completion(6, prompt="b"))).text
            return await scrape(session, ring)

    found = asyncio.run(some_requests())
    shown = {(name.removesuffix("_total"), labels) for name, labels in found} | found.keys()
    for dashboard, panels in PANELS.items():
        for panel, series in panels.items():
            for name, labels in series:
                given = [set(dict(pairs)) for one, pairs in shown if one == name]
                assert given and all({*labels} <= one for one in given), (dashboard, panel, name)
                if name.endswith("_bucket"):
                    assert all("le" in one for one in given), (dashboard, panel, name)
    for name, pairs in found:
        if name.startswith("vllm:"):
            assert {("model_name", "demo"), ("engine", "0")} <= set(pairs), name
    for name in ("e2e_request_latency_seconds", "request_queue_time_seconds", "request_prefill_time_seconds"):
        assert total(found, f"vllm:{name}_count") == 4, name
    assert total(found, "vllm:request_params_n_count") == 3 and total(found, "vllm:request_params_n_sum") == 4
    assert total(found, "vllm:iteration_tokens_total_sum") >= total(found, "vllm:generation_tokens_total") == 24
    assert total(found, "vllm:request_decode_time_seconds_sum") > 4 * 4 * 0.01


def test_running_requests_are_one_series_with_the_current_value(ring: Server) -> None:
    async def look() -> tuple[Samples, Samples, Samples]:
        async with running(ring, 600) as (session, tasks):
            during = await scrape(session, ring)
            for task in tasks[:3]:
                task.cancel()  # these clients disconnect
            await asyncio.gather(*tasks[:3], return_exceptions=True)
            for _ in range(100):
                left = await scrape(session, ring)
                if total(left, RUNNING) == 2:
                    break
                await asyncio.sleep(0.02)
            return during, left, await scrape(session, ring)

    during, left, later = asyncio.run(look())
    assert [value for (name, _), value in during.items() if name == RUNNING] == [NUM_STREAMS]
    assert total(during, "blockyard:num_requests_running") == NUM_STREAMS
    assert total(during, "vllm:kv_cache_usage_perc") > 0
    assert total(during, "blockyard:resident_bytes", role="scheduler") > 2**20
    assert total(left, RUNNING) == 2
    aborted = [total(one, "vllm:request_success_total", finished_reason="abort") for one in (during, later)]
    assert aborted[1] - aborted[0] == 3, "clients that left"


@pytest.mark.parametrize("service", ["gpu_worker", "detokenizer", "scheduler"])
def test_no_counter_falls_when_a_service_is_killed(ring: Server, service: str) -> None:
    async def kill() -> list[Samples]:
        seen: list[Samples] = []
        async with running(ring, 150) as (session, tasks):
            seen.append(await scrape(session, ring))
            pid = next(pid for name, pid in ring.children().items() if service in name)
            os.kill(pid, signal.SIGKILL)
            while not all(task.done() for task in tasks):
                seen.append(await scrape(session, ring))
                await asyncio.sleep(0.05)
            seen.append(await scrape(session, ring))
        return seen

    seen = asyncio.run(kill())
    for before, after in itertools.pairwise(seen):
        for (name, labels), value in before.items():
            if name.endswith(RISING):
                assert after.get((name, labels), -1.0) >= value, (name, labels)
    grown = total(seen[-1], "vllm:generation_tokens_total") - total(seen[0], "vllm:generation_tokens_total")
    assert grown > NUM_STREAMS * 100
