"""Host memory for KV blocks from the command line: --preemption-mode swap, --swap-space, metrics."""

import asyncio

import aiohttp
import pytest
from rig import Server, completion, serve, stream

MOCK = ("--worker-cls", "mock", "--mock-step-ms", "1", "--num-gpu-blocks-override", "40", "--max-model-len", "600")
NUM_STREAMS = 8


async def crowd(server: Server) -> list[str]:
    """More sequences than fit: 8 of 300 tokens, 19 blocks each."""
    bodies = [completion(280, prompt=[500 + i] * 20, seed=i, ignore_eos=True) for i in range(NUM_STREAMS)]
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(60)) as session:
        logs = await asyncio.gather(*(stream(session, server.url, body) for body in bodies))
        return [log.text for log in logs]


async def counters(server: Server) -> dict[str, float]:
    """The scheduler's counters, by name."""
    async with aiohttp.ClientSession() as session, session.get(f"{server.url}/metrics") as answer:
        lines = (await answer.text()).splitlines()
    shown = ('role="scheduler"', 'engine="0"')  # of its member, or of all schedulers together
    found = [line for line in lines if line.startswith("blockyard:") and any(one in line for one in shown)]
    return {line.partition("{")[0].partition(":")[2]: float(line.rpartition(" ")[2]) for line in found}


async def after(server: Server) -> tuple[list[str], dict[str, float]]:
    return await crowd(server), await counters(server)


@pytest.fixture(scope="module")
def plain() -> list[str]:
    """Answers with enough blocks for all."""
    with serve("demo", *MOCK[:4], "--max-model-len", "600") as server:
        texts, counts = asyncio.run(after(server))
    assert (counts["num_preemptions_total"], counts["host_kv_blocks"]) == (0, 0)
    return texts


@pytest.mark.parametrize("flags", [["--preemption-mode", "swap"], ["--swap-space", "1", "--no-enable-prefix-caching"]])
def test_preempted_sequences_come_back_from_host_memory(plain: list[str], flags: list[str]) -> None:
    with serve("demo", *MOCK, *flags) as server:
        texts, counts = asyncio.run(after(server))
    assert texts == plain
    assert counts["num_preemptions_total"] > 0
    assert counts["host_kv_blocks"] > 0
    assert min(counts["kv_blocks_saved_total"], counts["kv_blocks_fetched_total"]) > 0


def test_recompute_takes_no_host_memory(plain: list[str]) -> None:
    with serve("demo", *MOCK, "--preemption-mode", "recompute", "--swap-space", "1") as server:
        texts, counts = asyncio.run(after(server))
    assert texts == plain
    assert counts["num_preemptions_total"] > 0
    assert (counts["host_kv_blocks"], counts["kv_blocks_fetched_total"]) == (0, 0)
