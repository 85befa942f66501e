"""Prefill and decode groups of unlike shape: the texts of one worker, also when single ranks are killed meanwhile."""

import asyncio
import os
import signal
from pathlib import Path

import rig
from rig import Server, completion, serve
from ring_state import left_over, scheduler_stats, wait_for

FLAGS = ("--device", "cpu", "--dtype", "float32", "--detokenizers", "1", "--tokenizers", "1")
ROLES = ("--prefill-workers", "1", "--decode-workers", "1", "--decode-prefill-tokens", "0")
SHAPE = ("--prefill.tensor-parallel-size", "2", "--decode.pipeline-parallel-size", "2")
FAULTS = ("--pd-faults", "delay=100ms")  # a kill finds transfers under way
WORKERS = ("gpu_worker prefill 0", "gpu_worker decode 0")
NUM_STREAMS = 6
NUM_TOKENS = 60


def texts(server: Server, first: int, victim: str = "") -> list[str]:
    """The texts of greedy and seeded streams. victim: end of the title of a process that is killed meanwhile."""

    def kill() -> None:
        os.kill(next(pid for pid, name in server.family().items() if name.endswith(victim)), signal.SIGKILL)

    bodies = [
        completion(NUM_TOKENS, prompt=f"def stream_{first + i}():" * 8, seed=i, temperature=0.7 * (i % 2))
        for i in range(NUM_STREAMS)
    ]
    return asyncio.run(rig.texts(server.url, bodies, kill if victim else None))


def test_texts_are_those_of_one_worker_also_after_kills(tmp_path: Path) -> None:
    victims = ("", "prefill 0 rank 1", "decode 0 rank 1")
    with serve("demo", *FLAGS) as server:
        expected = [texts(server, 10 * i) for i in range(len(victims))]
    with serve("demo", *FLAGS, *ROLES, *SHAPE, *FAULTS, log=tmp_path / "log") as server:
        for i, victim in enumerate(victims):
            asyncio.run(wait_for(server, WORKERS))
            before = asyncio.run(scheduler_stats(server))["transfers_landed_total"]
            assert texts(server, 10 * i, victim) == expected[i], victim
            assert asyncio.run(left_over(server)) == {}, victim
            if not victim:
                landed = asyncio.run(scheduler_stats(server))["transfers_landed_total"] - before
                assert landed > NUM_STREAMS // 2, "on a slow machine a transfer may be late, and KV is computed instead"
    assert "rank 1 of 2 has ended with code -9; all ranks end" in (tmp_path / "log").read_text("utf-8", "replace")
