"""Links between live processes are cut, and a gateway stalls: each stream pauses briefly and keeps its text."""

import asyncio
import signal
import time
from collections.abc import Callable, Iterator
from itertools import pairwise

import aiohttp
import pytest
from proxied import ProxiedRing, proxied_ring
from rig import StreamLog, completion, stream

STEP_MS = 10
NUM_TOKENS = 120
NUM_STREAMS = 8
DEAD_AFTER_S = 2.0
STALL_S = 12  # the wait of a stream if its gateway is not told


@pytest.fixture(scope="module")
def ring(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProxiedRing]:
    flags = ("--worker-cls", "mock", "--mock-step-ms", str(STEP_MS), "--stall-timeout", str(STALL_S))
    with proxied_ring(tmp_path_factory.mktemp("ring"), *flags, dead_after_s=DEAD_AFTER_S) as server:
        yield server


async def run(ring: ProxiedRing, disturb: Callable[[], object]) -> list[StreamLog]:
    """Runs all streams at once and calls `disturb` while they run."""
    bodies = [completion(NUM_TOKENS, prompt=f"def stream_{i}():", seed=i) for i in range(NUM_STREAMS)]
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(60)) as session:
        tasks = [asyncio.create_task(stream(session, ring.url, body)) for body in bodies]
        await asyncio.sleep(0.4)
        assert not any(task.done() for task in tasks), "it comes too late to mean anything"
        await asyncio.to_thread(disturb)
        return await asyncio.gather(*tasks)


@pytest.fixture(scope="module")
def undisturbed(ring: ProxiedRing) -> list[str]:
    texts = [log.text for log in asyncio.run(run(ring, lambda: None))]
    assert all(texts)
    return texts


def longest_pause(log: StreamLog, since: float = 0.0) -> float:
    times = [since or log.started_s, *(at for at in log.events_s if at > since)]
    return max((after - before for before, after in pairwise(times)), default=0.0)


@pytest.mark.parametrize(
    ("member", "refuse_s", "bar_s"),
    [
        ("detokenizer 0", 0.0, 1.0),
        ("api_gateway 0", 0.0, 1.0),
        ("scheduler", 0.0, 1.0),
        ("gpu_worker", 0.0, 1.0),
        ("api_gateway 0", 0.2, 3.0),  # longer than the timeout of a member: it leaves the list and returns
        ("detokenizer 0", 0.2, 3.0),
    ],
)
def test_a_link_is_cut(ring: ProxiedRing, undisturbed: list[str], member: str, refuse_s: float, bar_s: float) -> None:
    """The cut links: scheduler to detokenizer, detokenizer to gateway, gateway to scheduler, scheduler to worker."""
    proxy = ring.proxies[member]
    assert proxy.num_connections == 1
    logs = asyncio.run(run(ring, lambda: proxy.cut(refuse_s)))
    assert [log.text for log in logs] == undisturbed
    assert max(map(longest_pause, logs)) < bar_s


def test_a_prompt_is_tokenized_though_the_link_was_cut(ring: ProxiedRing, undisturbed: list[str]) -> None:
    """The link breaks while it is idle, and again while prompts are in flight."""
    ring.proxies["tokenizer_pool 0"].cut()
    logs = asyncio.run(run(ring, ring.proxies["tokenizer_pool 0"].cut))
    assert [log.text for log in logs] == undisturbed
    assert max(map(longest_pause, logs)) < 1.0


def test_new_requests_wait_while_the_scheduler_restarts(ring: ProxiedRing, undisturbed: list[str]) -> None:
    """Running streams, and streams that arrive between the scheduler's death and the restart."""
    ring.running["scheduler"].kill()
    ring.running["scheduler"].wait()
    logs = asyncio.run(run(ring, lambda: ring.start("scheduler")))
    assert [log.text for log in logs] == undisturbed


def test_a_gateway_sends_its_requests_again_after_a_stall(ring: ProxiedRing, undisturbed: list[str]) -> None:
    """It leaves the list meanwhile; most streams have sampled their last token when it returns."""
    woke_s = 0.0

    def stand_still() -> None:
        nonlocal woke_s
        gateway = ring.running["api_gateway 0"]
        gateway.send_signal(signal.SIGSTOP)
        time.sleep(DEAD_AFTER_S + 1.0)
        gateway.send_signal(signal.SIGCONT)
        woke_s = time.perf_counter()

    logs = asyncio.run(run(ring, stand_still))
    assert [log.text for log in logs] == undisturbed
    assert max(longest_pause(log, woke_s) for log in logs) < 2.0
