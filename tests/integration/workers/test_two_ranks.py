"""A ring whose worker has two ranks: the texts of one rank, also after one is killed or stopped.

No rank outlives another one, or the launcher.
"""

import asyncio
import os
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import rig
from rig import Server, completion, serve

FLAGS = ("--device", "cpu", "--dtype", "float32", "--detokenizers", "1", "--tokenizers", "1")
NUM_STREAMS = 3
NUM_TOKENS = 60
ENDED_S = 30.0  # a rank may be silent for 4 s; the rest is for slow machines


def texts(server: Server, meanwhile: Callable[[], object] | None = None) -> list[str]:
    """The texts of greedy and seeded streams."""
    bodies = [
        completion(NUM_TOKENS, prompt=f"def stream_{i}():", seed=i, temperature=0.7 * (i % 2))
        for i in range(NUM_STREAMS)
    ]
    return asyncio.run(rig.texts(server.url, bodies, meanwhile))


def all_end(pids: list[int]) -> None:
    deadline = time.monotonic() + ENDED_S
    while left := [pid for pid in pids if Path(f"/proc/{pid}").exists()]:
        assert time.monotonic() < deadline, f"{left} of {pids} have not ended"
        time.sleep(0.05)


def rank(server: Server, title: str) -> int:
    return next(pid for pid, name in server.family().items() if name.endswith(title))


@pytest.fixture(scope="module")
def expected() -> list[str]:
    with serve("demo", *FLAGS) as server:
        return texts(server)


@pytest.mark.parametrize("flag", ["-tp", "-pp"])
def test_two_ranks_give_the_texts_of_one_and_end_together(flag: str, tmp_path: Path, expected: list[str]) -> None:
    with serve("demo", *FLAGS, flag, "2", log=tmp_path / "log") as server:
        assert texts(server) == expected
        killed = rank(server, "rank 1")
        assert texts(server, lambda: os.kill(killed, signal.SIGKILL)) == expected
        ranks = [rank(server, title) for title in ("gpu_worker", "rank 1")]
        assert killed not in ranks
        with ThreadPoolExecutor(1) as pool:
            resumed = pool.submit(texts, server, lambda: os.kill(ranks[0], signal.SIGSTOP))
            all_end(ranks)
            assert resumed.result() == expected
        follower = rank(server, "rank 1")
        assert follower != ranks[1]
        server.process.kill()
        server.process.wait()
        all_end([follower])
    log = (tmp_path / "log").read_text("utf-8", "replace")
    assert "rank 1 of 2 has ended with code -9; all ranks end" in log
    assert "the leader is silent for" in log


def test_a_rank_that_cannot_start_ends_all_with_one_line(tmp_path: Path) -> None:
    """Rank 1 has the first stage and no room for a sequence, while the leader waits for it."""
    flags, log = ("-pp", "2", "--pipeline-layers", "5,1", "--kv-cache-memory-bytes", "5M"), tmp_path / "log"
    with pytest.raises(RuntimeError, match="ended with 3"), serve("demo", *FLAGS, *flags, log=log):
        pass
    last = log.read_text("utf-8", "replace").splitlines()[-1]
    assert last.startswith(
        "blockyard serve: error: gpu_worker: rank 1: not enough memory for one sequence: 4096 tokens"
    )
    assert last.endswith("set --kv-cache-memory-bytes 20971520 or more, or set --max-model-len 1024 or less")
