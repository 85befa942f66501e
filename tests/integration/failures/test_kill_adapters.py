"""Adapters of the demo model over HTTP: at the start, by an operator's command, and while services are killed."""

import asyncio
import json
import os
import shutil
import signal
import urllib.request
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import aiohttp
import pytest
from demo_adapters import demo_adapter
from rig import Server, completion, run_all, serve, stream
from ring_state import left_over, scheduler_stats, wait_for

PROMPT = "\n    # one of the numbers that are asked for\n    return " * 2  # some blocks long
NUM_TOKENS = 50
FLAGS = ("--device", "cpu", "--dtype", "float32", "--max-loras", "2", "--max-cpu-loras", "3")
ROLES = ("--prefill-workers", "1", "--decode-workers", "1", "--decode-prefill-tokens", "0")
WORKERS = ["gpu_worker prefill 0", "gpu_worker decode 0"]
MODELS = ("demo", "one", "two", "three")
ASKED = [*MODELS, *MODELS]


async def ask(server: Server, models: list[str], kills: list[tuple[float, str]]) -> list[str]:
    """Texts of one stream for each of `models`. kills: services, after seconds; the first when one has begun."""

    async def kill() -> None:
        for delay_s, name in kills:
            await asyncio.sleep(delay_s)
            os.kill(next(pid for pid, title in server.family().items() if title.endswith(name)), signal.SIGKILL)

    prompts = [f"def number_{i}():" + PROMPT for i in range(len(models))]
    bodies = [completion(NUM_TOKENS, model=model, prompt=prompt) for model, prompt in zip(models, prompts, strict=True)]
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(50)) as session:
        readers = [partial(stream, session, server.url, body) for body in bodies]
        return [log.text for log in await run_all(readers, kill if kills else None, 1)]


async def ask_while_loading(
    server: Server, models: list[str], loaded: dict[str, object], reader: int
) -> tuple[list[str], tuple[int, str]]:
    """Asks while an adapter is loaded whose reader is killed."""
    loading = asyncio.create_task(post(server, "/v1/load_lora_adapter", loaded))
    asking = asyncio.create_task(ask(server, models, []))
    await asyncio.sleep(0.3)
    os.kill(reader, signal.SIGKILL)
    return await asking, await loading


async def post(server: Server, path: str, body: dict[str, object]) -> tuple[int, str]:
    async with aiohttp.ClientSession() as session, session.post(f"{server.url}{path}", json=body) as answer:
        return answer.status, await answer.text()


async def answer_to(server: Server, model: str) -> tuple[int, str]:
    """The answer to a completion once a scheduler is ready."""
    async with asyncio.timeout(30):
        while (answer := await post(server, "/v1/completions", completion(3, model=model)))[0] == 503:
            await asyncio.sleep(0.1)
    return answer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("adapters")
    for seed, name in enumerate(MODELS[1:]):
        demo_adapter(folder / name, seed, 4 + seed)
    return folder


@pytest.fixture(scope="module")
def unified(folder: Path) -> Iterator[Server]:
    """One worker with three adapters. Two are of the start, and an operator loads the third."""
    modules = [f"one={folder / 'one'}", json.dumps({"name": "two", "path": str(folder / "two")})]
    with serve("demo", *FLAGS, "--lora-dir", str(folder), "--lora-modules", *modules, log=folder / "log") as server:
        loaded = {"lora_name": "three", "lora_path": "three"}
        assert asyncio.run(post(server, "/v1/load_lora_adapter", loaded))[0] == 200
        yield server


@pytest.fixture(scope="module")
def quiet(unified: Server) -> list[str]:
    """The texts of `ASKED` without kills."""
    return asyncio.run(ask(unified, ASKED, []))


@pytest.mark.timeout(180)
def test_adapters_are_served_while_services_are_killed(unified: Server, quiet: list[str]) -> None:
    same = [asyncio.run(post(unified, "/v1/completions", completion(9, model=model))) for model in MODELS]
    assert len({json.loads(text)["choices"][0]["text"] for _, text in same}) == 4, "each adapter has an effect"
    assert asyncio.run(ask(unified, ASKED, [(0.0, "gpu_worker"), (1.0, "scheduler")])) == quiet


@pytest.mark.timeout(180)
def test_prefill_and_decode_workers_hand_over_sequences_with_adapters(
    folder: Path, quiet: list[str], tmp_path: Path
) -> None:
    modules = [f"{name}={folder / name}" for name in MODELS[1:]]
    with serve("demo", *FLAGS, *ROLES, "--lora-modules", *modules, log=tmp_path / "log") as server:
        for kills in ([], [(0.0, WORKERS[1])], [(0.0, WORKERS[0])]):
            asyncio.run(wait_for(server, WORKERS))
            assert asyncio.run(ask(server, ASKED, kills)) == quiet
        assert asyncio.run(left_over(server)) == {}
        landed = asyncio.run(scheduler_stats(server))["transfers_landed_total"]
        assert landed >= len(ASKED) // 4, "of all rounds: what a kill interrupts may go on without a handover"


@pytest.mark.timeout(180)
def test_ranks_serve_adapters_while_one_is_killed(folder: Path, quiet: list[str], tmp_path: Path) -> None:
    """Three adapters and two places: two are of the start, and requests load the third."""
    own = tmp_path / "adapters"
    shutil.copytree(folder, own, ignore=lambda _, names: [name for name in names if name == "log"])
    modules = [f"{name}={own / name}" for name in MODELS[1:3]]
    flags = (*FLAGS, "-tp", "2", "--fully-sharded-loras", "--lora-dir", str(own), "--lora-modules", *modules)
    with serve("demo", *flags, log=tmp_path / "log") as server:
        assert asyncio.run(ask(server, ASKED, [(0.0, "rank 1")])) == quiet
        shutil.copytree(own / "one", own / "three", dirs_exist_ok=True)
        loaded: dict[str, object] = {"lora_name": "three", "lora_path": "three", "load_inplace": True}
        assert asyncio.run(post(server, "/v1/load_lora_adapter", loaded))[0] == 200
        prompts = [asyncio.run(post(server, "/v1/completions", completion(20, model=one))) for one in ("one", "three")]
        texts = [json.loads(text)["choices"][0]["text"] for _, text in prompts]
        assert texts[0] == texts[1], "the new bytes are those of the other adapter"
        assert asyncio.run(post(server, "/v1/unload_lora_adapter", {"lora_name": "three"}))[0] == 200
        assert asyncio.run(left_over(server)) == {}
    assert "rank 1 of 2 has ended with code -9; all ranks end" in (tmp_path / "log").read_text("utf-8", "replace")


@pytest.mark.timeout(180)
def test_the_list_of_adapters_survives_the_scheduler_and_the_workers(unified: Server, quiet: list[str]) -> None:
    """The gateway alone is left. The adapter that an operator loaded is in no flag."""
    killed = ["scheduler", "gpu_worker", "message_bus", "tokenizer_pool 0", "detokenizer 0"]
    asyncio.run(ask(unified, ASKED[:4], [(0.0, name) for name in killed]))
    with urllib.request.urlopen(f"{unified.url}/v1/models", timeout=20) as answer:
        assert [model["id"] for model in json.load(answer)["data"]] == [*MODELS]
    assert asyncio.run(ask(unified, ASKED, [])) == quiet


@pytest.mark.timeout(180)
def test_an_adapter_that_is_unloaded_is_unknown_also_when_the_scheduler_was_killed(unified: Server) -> None:
    """The flags name one of them, and the other one is a folder that a request could load."""
    for name in ("two", "three"):
        assert asyncio.run(post(unified, "/v1/unload_lora_adapter", {"lora_name": name}))[0] == 200
    asyncio.run(ask(unified, ["one"], [(0.0, "scheduler")]))
    for name in ("two", "three"):
        status, text = asyncio.run(answer_to(unified, name))
        assert status == 404 and "model_not_found" in text
    loaded: dict[str, object] = {"lora_name": "two", "lora_path": "two"}
    assert asyncio.run(post(unified, "/v1/load_lora_adapter", loaded))[0] == 200


@pytest.mark.timeout(180)
def test_a_reader_that_is_killed_delays_its_adapter_alone(unified: Server, quiet: list[str]) -> None:
    """Runs after the test above, which unloads the third adapter."""
    reader = next(number for number, title in unified.family().items() if title == "adapters")
    os.kill(reader, signal.SIGSTOP)  # so that it ends while it reads
    loaded: dict[str, object] = {"lora_name": "three", "lora_path": "three"}
    texts, (status, text) = asyncio.run(ask_while_loading(unified, ASKED[:3], loaded, reader))
    assert texts == quiet[:3] and status == 200, text
    assert asyncio.run(ask(unified, ASKED[:4], [])) == quiet[:4]
