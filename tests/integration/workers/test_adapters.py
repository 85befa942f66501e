"""Adapters beside every other feature of requests: one ring of two CPU workers with few KV blocks and two places each.

Each answer in the crowd is the one that the request gets alone.
"""

import asyncio
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest
from demo_adapters import demo_adapter, demo_prompt
from rig import Server, completion, serve
from ring_state import left_over, scheduler_stats

MODELS = ("demo", "one", "team/two", "three", "tuned")
FLAGS = (
    "--device",
    "cpu",
    "--dtype",
    "float32",
    "--data-parallel-size",
    "2",
    "--max-loras",
    "2",
    "--max-num-seqs",
    "6",
)
FLAGS += ("--num-gpu-blocks-override", "40", "--max-model-len", "256", "--swap-space", "0.05", "--enable-sleep-mode")
FLAGS += ("--scheduling-policy", "priority", "--lora-max-wait", "0.2")
LONG = "def number(n):\n    # one of the numbers that are asked for\n    return n\n\n"  # some blocks long
COMPLETIONS, CHAT, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/responses"
HELLO = [{"role": "user", "content": "Hello"}]

KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": (COMPLETIONS, completion(24)),
    "n": (COMPLETIONS, completion(12, n=3, temperature=0.7, seed=5)),
    "beams": (COMPLETIONS, completion(6, n=2, use_beam_search=True, ignore_eos=False)),
    "prefix": (COMPLETIONS, completion(10, prompt=LONG * 3)),
    "penalties": (COMPLETIONS, completion(16, presence_penalty=0.8, repetition_penalty=1.3)),
    "priority": (COMPLETIONS, completion(16, prompt="class A:", priority=-5)),
    "structured": (COMPLETIONS, completion(12, guided_regex="[abc]{8}", ignore_eos=False)),
    "logprobs": (COMPLETIONS, completion(8, logprobs=2, echo=True)),
    "chat": (CHAT, {"messages": HELLO, "max_tokens": 12, "temperature": 0.0}),
    "responses": (RESPONSES, {"input": "Hello", "max_output_tokens": 12, "temperature": 0.0, "store": False}),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("adapters")


@pytest.fixture(scope="module")
def ring(folder: Path) -> Iterator[Server]:
    for seed, name in enumerate(MODELS[1:-1]):
        demo_adapter(folder / name, seed, 4 + seed)
    demo_prompt(folder / "prompt", 7, 21)
    modules = ("--lora-modules", f"one={folder / 'one'}", "--lora-dir", str(folder))  # requests load the other two
    modules += ("--prompt-adapters", f"tuned={folder / 'prompt'}", "--max-prompt-adapter-token", "32")
    flags = (*FLAGS, *modules, "--batch-dir", str(folder / "batches"))
    with serve("demo", *flags, log=folder / "log") as server:
        yield server


async def post(session: aiohttp.ClientSession, path: str, body: dict[str, Any] | None = None) -> Any:
    async with session.post(path, json=body or {}) as answer:
        assert answer.status == 200, await answer.text()
        return await answer.json()


async def ask(session: aiohttp.ClientSession, model: str, kind: str) -> tuple[str, Any]:
    """The name of the model in the answer, and its texts, with the tokens of log-probabilities."""
    path, body = KINDS[kind]
    answer = await post(session, path, body | {"model": model})
    if path == RESPONSES:
        return answer["model"], [part["text"] for item in answer["output"] for part in item.get("content") or []]
    scores = [choice.get("logprobs") or {} for choice in answer["choices"]]
    texts = [choice.get("text") or choice.get("message", {}).get("content") for choice in answer["choices"]]
    return answer["model"], [texts, [one.get("tokens") for one in scores]]


Answers = dict[tuple[str, str], tuple[str, Any]]


async def ask_all(server: Server, event: str = "") -> Answers:
    """All kinds with all models at once, while the workers sleep, or stand still, for a moment."""
    asked = [(model, kind) for kind in KINDS for model in MODELS]
    async with aiohttp.ClientSession(server.url, timeout=aiohttp.ClientTimeout(120)) as session:
        tasks = [asyncio.create_task(ask(session, *one)) for one in asked]
        if event:
            await asyncio.sleep(0.3)
            await post(session, event)
            await post(session, "/resume" if event.startswith("/pause") else "/wake_up")
        return dict(zip(asked, await asyncio.gather(*tasks), strict=True))


@pytest.fixture(scope="module")
def alone(ring: Server) -> Answers:
    async def in_turn() -> Answers:
        async with aiohttp.ClientSession(ring.url, timeout=aiohttp.ClientTimeout(120)) as session:
            return {(model, kind): await ask(session, model, kind) for kind in KINDS for model in MODELS}

    return asyncio.run(in_turn())


@pytest.mark.timeout(240)
def test_each_adapter_is_a_model_of_its_own(alone: Answers, ring: Server) -> None:
    assert all(named == model for (model, _), (named, _) in alone.items())
    for kind in KINDS:
        texts = {json.dumps(alone[model, kind][1]) for model in MODELS}
        assert len(texts) == len(MODELS) or kind == "structured", kind


@pytest.mark.timeout(240)
@pytest.mark.parametrize("event", ["", "/pause?mode=keep&clear_cache=false", "/sleep?level=1", "/sleep?level=2"])
def test_a_crowd_gets_the_answers_that_each_gets_alone(ring: Server, alone: Answers, event: str) -> None:
    found = asyncio.run(ask_all(ring, event))
    assert [one for one, answer in alone.items() if found[one] != answer] == []
    assert asyncio.run(left_over(ring)) == {}
    assert asyncio.run(scheduler_stats(ring))["preemptions_total"] > 0


def breakages(folder: Path) -> dict[str, str]:
    """Writes broken adapters. Returns what is said of each."""
    for seed, name in enumerate(("cut", "no-json", "rank", "no-weights", "no-config", "pickled")):
        demo_adapter(folder / name, seed, 200 if name == "rank" else 4)
    weights, config = "adapter_model.safetensors", "adapter_config.json"
    (folder / "cut" / weights).write_bytes((folder / "cut" / weights).read_bytes()[:-9])
    (folder / "no-json" / config).write_text("{")
    (folder / "no-weights" / weights).unlink()
    (folder / "no-config" / config).unlink()
    (folder / "pickled" / weights).rename(folder / "pickled" / "adapter_model.bin")
    return {
        "cut": f"{weights} has ",
        "no-json": f"{config} is not a JSON object",
        "rank": f"{weights}: the adapter has rank 200",
        "no-weights": "the folder has neither",
        "no-config": f"the folder has no {config}",
        "pickled": "adapter_model.bin ",
    }


@pytest.mark.timeout(240)
def test_refusals_name_files_and_no_folder_of_the_server(ring: Server, folder: Path) -> None:
    """Clients see the names of the adapter and of the file, the log has the path."""
    said = breakages(folder / "broken")

    async def refusal(path: str, body: dict[str, Any]) -> str:
        async with aiohttp.ClientSession(ring.url) as session, session.post(path, json=body) as answer:
            assert answer.status in (400, 404), await answer.text()
            return str((await answer.json())["error"]["message"])

    for name, cause in said.items():
        asked = {"lora_name": name, "lora_path": f"broken/{name}"}
        messages = [asyncio.run(refusal("/v1/load_lora_adapter", asked))]
        if name != "no-config":  # which makes it no adapter that a request may name
            messages.append(asyncio.run(refusal(COMPLETIONS, completion(1) | {"model": f"broken/{name}"})))
        for message in messages:
            assert name in message and cause in message and str(folder) not in message
        assert f"{folder}/broken/{name}: {cause}" in (folder / "log").read_text()


@pytest.mark.timeout(240)
def test_lines_of_a_batch_name_adapters(ring: Server, alone: Answers) -> None:
    body = KINDS["plain"][1]
    lines = [
        {"custom_id": model, "method": "POST", "url": COMPLETIONS, "body": body | {"model": model}} for model in MODELS
    ]
    client = openai.OpenAI(base_url=f"{ring.url}/v1", api_key="none")
    file = client.files.create(file=("in.jsonl", "\n".join(map(json.dumps, lines)).encode()), purpose="batch")
    batch = client.batches.create(input_file_id=file.id, endpoint=COMPLETIONS, completion_window="24h")
    until = time.monotonic() + 60
    while batch.status not in ("completed", "failed") and time.monotonic() < until:
        time.sleep(0.1)
        batch = client.batches.retrieve(batch.id)
    assert batch.output_file_id is not None, batch
    answers = [json.loads(line) for line in client.files.content(batch.output_file_id).text.splitlines()]
    texts = {one["custom_id"]: one["response"]["body"]["choices"][0]["text"] for one in answers}
    assert texts == {model: alone[model, "plain"][1][0][0] for model in MODELS}
