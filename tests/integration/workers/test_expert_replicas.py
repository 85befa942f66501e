"""Replicas that have the experts of a mixture together: the tokens of one worker, also after a rank of one is killed.

A replica without requests serves those of the other, and none computes while there are no requests. Experts that move
between ranks of both change no token.
"""

import asyncio
import os
import signal
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import several_choices
import torch
from rig import OnRead, Server, completion, run_all, serve
from ring_state import left_over, scheduler_stats, wait_for
from ties import Ties
from tiny_models import BY_NAME, greedy_score
from worker.every_architecture import PROMPTS, TOKENIZER

FLAGS = ("--tokenizer", str(TOKENIZER), "--device", "cpu", "--dtype", "float32", "--detokenizers", "1")
FLAGS += ("--tokenizers", "1", "--enable-expert-parallel")
TWO = ("-dp", "2")
ROLES = ("--prefill-workers", "1", "--decode-workers", "1", "--decode-prefill-tokens", "0")
ROLES += ("--prefill.data-parallel-size", "2", "--decode.data-parallel-size", "2")
ROLES += ("--decode.pipeline-parallel-size", "2")
BALANCED = ("--enable-eplb", "--eplb-config", '{"step_interval": 20, "window_size": 20}')
NUM_TOKENS = 60
BLOCK = 16  # tokens
END_S = 30.0
IDLE_S, IDLE_TICKS = 2.0, 10  # of CPU time, 10 ms each: heartbeats and signs of life

Answer = tuple[list[int], list[int]]  # prompt and tokens


async def ask(session: aiohttp.ClientSession, server: Server, prompt: list[int], on_read: OnRead) -> Answer:
    [tokens] = await several_choices.ask(
        session, server.url, completion(NUM_TOKENS, prompt=prompt, stream=True), on_read
    )
    return prompt, tokens


async def answers(server: Server, num: int, victim: int = 0, least: int = 1) -> list[Answer]:
    """victim: a process that is killed meanwhile. least: tokens of a prompt."""

    async def kill() -> None:
        os.kill(victim, signal.SIGKILL)

    known = [prompt * (least // len(prompt) + 1) for prompt in PROMPTS]
    prompts = [[*known[i % len(known)], 5 + i] for i in range(num)]
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(100)) as session:
        return await run_all([partial(ask, session, server, prompt) for prompt in prompts], kill if victim else None)


def check(got: list[Answer], model: Any) -> None:
    """model: transformers'."""
    ties, score = Ties(), greedy_score(model)
    for i, (prompt, tokens) in enumerate(got):
        with torch.no_grad():
            logits = model(torch.tensor([prompt + tokens])).logits[0]
        ties.compare(f"answer {i}", prompt, logits.argmax(-1)[len(prompt) - 1 : -1].tolist(), tokens, score)
    ties.check()


def workers(server: Server) -> dict[str, int]:
    """Process ids of ranks by their names."""
    return {name: pid for pid, name in server.family().items() if name.startswith("gpu_worker")}


def leaders(ranks: dict[str, int]) -> list[str]:
    """The names of those that are members of the ring: others have a name once they are told which rank they are."""
    return [name for name in ranks if " rank " not in name]


def cpu_ticks(pid: int) -> int:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


def num_moved(server: Server) -> float:
    with urllib.request.urlopen(f"{server.url}/metrics", timeout=20) as answer:
        lines = answer.read().decode().splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith("blockyard:experts_moved_total{"))


def all_end(pids: list[int]) -> None:
    deadline = time.monotonic() + END_S
    while left := [pid for pid in pids if Path(f"/proc/{pid}").exists()]:
        assert time.monotonic() < deadline, f"{left} of {pids} have not ended"
        time.sleep(0.05)


@pytest.mark.parametrize(("flags", "victim"), [((), "gpu_worker 0"), (("-tp", "2", *BALANCED), "gpu_worker 1 rank 1")])
def test_tokens_are_those_of_one_worker(flags: tuple[str, ...], victim: str, tmp_path: Path) -> None:
    model, log = BY_NAME["qwen3-moe"].save(tmp_path / "model"), tmp_path / "log"
    with serve(str(tmp_path / "model"), *FLAGS, *TWO, *flags, log=log) as server:
        check(asyncio.run(answers(server, 1)), model)  # one replica has no rows
        check(asyncio.run(answers(server, 6)), model)
        ranks = workers(server)
        before = {pid: cpu_ticks(pid) for pid in ranks.values()}
        time.sleep(IDLE_S)
        assert all(cpu_ticks(pid) - ticks <= IDLE_TICKS for pid, ticks in before.items())
        with ThreadPoolExecutor(1) as pool:
            resumed = pool.submit(asyncio.run, answers(server, 6, ranks[victim]))
            while Path(f"/proc/{ranks[victim]}").exists():
                assert not resumed.done(), resumed.result()
                time.sleep(0.01)
            all_end(list(ranks.values()))
            check(resumed.result(), model)
        assert ranks.keys() == workers(server).keys() and not set(ranks.values()) & set(workers(server).values())
        check(asyncio.run(answers(server, 2)), model)
        if "--enable-eplb" in flags:
            assert num_moved(server) > 0
        last = list(workers(server).values())
    all_end(last)
    text = log.read_text("utf-8", "replace")
    assert f"replica {victim.split()[1]} of 2 has ended; all replicas end" in text
    assert "Traceback" not in text


def test_replicas_of_a_role_have_the_experts_together(tmp_path: Path) -> None:
    """Those of the decode worker have stages."""
    model, log = BY_NAME["qwen3-moe"].save(tmp_path / "model"), tmp_path / "log"
    with serve(str(tmp_path / "model"), *FLAGS, *ROLES, log=log) as server:
        before = workers(server)
        asyncio.run(wait_for(server, leaders(before)))
        check(asyncio.run(answers(server, 4, least=BLOCK)), model)
        assert asyncio.run(left_over(server)) == {}
        assert asyncio.run(scheduler_stats(server))["transfers_landed_total"] > 0
        check(asyncio.run(answers(server, 6, before["gpu_worker prefill 1"], BLOCK)), model)
        all_end([before["gpu_worker prefill 0"], before["gpu_worker prefill 1"]])
        assert asyncio.run(left_over(server)) == {}
        asyncio.run(wait_for(server, leaders(before)))
        now = workers(server)
        started = {name for name, pid in before.items() if now[name] != pid}
        assert started == {"gpu_worker prefill 0", "gpu_worker prefill 1"}, "those of the other role stay"
        last = list(workers(server).values())
    all_end(last)
    assert "replica 1 of 2 has ended; all replicas end" in log.read_text("utf-8", "replace")
