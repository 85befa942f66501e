"""Replicas of a model under one scheduler: one cache, one queue, and a pause when a replica is killed."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import aiohttp
import pytest
from rig import Server, completion, run_all, serve
from several_choices import KINDS, Answer, ask, bodies

NUM_STREAMS = 6
PREFIX = 160  # length of the prefix of prompts of one kind: ten blocks


@pytest.fixture(scope="module")
def ring() -> Iterator[Server]:
    flags = ("--device", "cpu", "--dtype", "float32", "--batch-invariant", "--enable-prompt-tokens-details")
    with serve("demo", *flags, "--data-parallel-size", "2") as server:
        yield server


def plain(num_tokens: int) -> list[dict[str, object]]:
    return [completion(num_tokens, prompt=f"def stream_{i}():", seed=i, stream=True) for i in range(NUM_STREAMS)]


async def post(server: Server, **fields: object) -> dict[str, Any]:
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{server.url}/v1/completions", json=completion(4, **fields)) as answer,
    ):
        assert answer.status == 200, await answer.text()
        return await answer.json()


async def steps(server: Server) -> dict[str, int]:
    """Steps of each worker, from its heartbeat."""
    async with aiohttp.ClientSession() as session, session.get(f"{server.url}/ring") as answer:
        members = (await answer.json())["members"]
        return {m["name"]: m["stats"]["steps_total"] for m in members if m["role"] == "gpu_worker"}


async def run(server: Server, num_tokens: int, victim: str = "") -> list[Answer]:
    async def kill() -> None:
        os.kill(next(pid for name, pid in server.children().items() if victim in name), signal.SIGKILL)

    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(100)) as session:
        asked = [*plain(num_tokens), *bodies(len(KINDS), num_tokens)]
        readers = [partial(ask, session, server.url, body) for body in asked]
        return await run_all(readers, kill if victim else None, NUM_STREAMS)


def test_both_replicas_run_and_cached_prefixes_are_found(ring: Server) -> None:
    kinds = [[300 + kind] * PREFIX for kind in range(4)]
    for turn in range(3):
        for kind, prefix in enumerate(kinds):
            body = asyncio.run(post(ring, prompt=[*prefix, 700 + turn, 701 + turn]))
            cached = body["usage"]["prompt_tokens_details"]["cached_tokens"]
            assert cached == (PREFIX if turn else 0), f"kind {kind}, turn {turn}"
    deadline = time.monotonic() + 60  # the ring is ready with its first worker, the other may join later
    while not (worked := asyncio.run(steps(ring))) or min(worked.values()) < 20:
        assert time.monotonic() < deadline, worked
        asyncio.run(run(ring, 40))
        time.sleep(0.6)  # a heartbeat
    assert worked.keys() == {"gpu_worker 0", "gpu_worker 1"}


def test_a_killed_replica_costs_a_pause(ring: Server) -> None:
    """Streams with one choice, and requests with several: the choices join siblings on the other replica."""
    undisturbed = asyncio.run(run(ring, 60))
    assert all(undisturbed)
    assert asyncio.run(run(ring, 60, "gpu_worker 1")) == undisturbed
    deadline = time.monotonic() + 20
    while not any("gpu_worker 1" in name for name in ring.children()):
        assert time.monotonic() < deadline, "the launcher did not restart what was killed"
        time.sleep(0.1)


def test_too_few_gpus_are_refused_at_the_start() -> None:
    command = [sys.executable, "-m", "blockyard", "serve", "demo", "--device", "cuda", "--data-parallel-size", "2"]
    env = os.environ | {"CUDA_VISIBLE_DEVICES": "0"}
    run = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert run.returncode == 2
    assert "each of 2 workers needs its own GPU, and there is 1 here" in run.stderr
