"""Adapters of the demo model over HTTP: at the start, by an operator's command, and while services are killed."""

import asyncio
import json
import os
import signal
from pathlib import Path

import aiohttp
import pytest
import torch
from rig import Server, completion, serve, stream
from safetensors.torch import save_file

WIDTH, INNER, LAYERS = 256, 688, 6  # of the demo model
NUM_TOKENS = 80
MODELS = ("demo", "one", "two", "three")


def write(folder: Path, seed: int, rank: int) -> None:
    """A random adapter of two modules of each layer."""
    folder.mkdir(parents=True)
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 8, "target_modules": ["q_proj", "o_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    generator, tensors = torch.Generator().manual_seed(seed), {}
    for layer in range(LAYERS):
        for name in ("q_proj", "o_proj"):
            prefix = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            tensors[f"{prefix}.lora_A.weight"] = torch.randn(rank, WIDTH, generator=generator) * 0.1
            tensors[f"{prefix}.lora_B.weight"] = torch.randn(WIDTH, rank, generator=generator) * 0.1
    save_file(tensors, folder / "adapter_model.safetensors")


async def ask(server: Server, models: list[str], kills: list[tuple[float, str]]) -> list[str]:
    """Texts of one stream for each of `models`. kills: when, and which service."""
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(50)) as session:
        bodies = [completion(NUM_TOKENS, model=model, prompt=f"def number_{i}():") for i, model in enumerate(models)]
        tasks = [asyncio.create_task(stream(session, server.url, body)) for body in bodies]
        for delay_s, name in kills:
            await asyncio.sleep(delay_s)
            os.kill(server.children()[f"blockyard: {name}"], signal.SIGKILL)
        return [log.text for log in await asyncio.gather(*tasks)]


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


@pytest.mark.timeout(180)
def test_adapters_are_served_while_services_are_killed(tmp_path: Path) -> None:
    for seed, name in enumerate(MODELS[1:]):
        write(tmp_path / name, seed, 4 + seed)
    modules = [f"one={tmp_path / 'one'}", json.dumps({"name": "two", "path": str(tmp_path / "two")})]
    flags = ("--device", "cpu", "--dtype", "float32", "--max-loras", "2", "--lora-dir", str(tmp_path))
    with serve("demo", *flags, "--lora-modules", *modules, log=tmp_path / "log") as server:
        loaded: dict[str, object] = {"lora_name": "three", "lora_path": "three"}
        assert asyncio.run(post(server, "/v1/load_lora_adapter", loaded))[0] == 200
        models = [*MODELS, *MODELS]
        quiet = asyncio.run(ask(server, models, []))
        same = [asyncio.run(post(server, "/v1/completions", completion(9, model=model))) for model in MODELS]
        assert len({json.loads(text)["choices"][0]["text"] for _, text in same}) == 4, "each adapter has an effect"
        assert asyncio.run(ask(server, models, [(0.3, "gpu_worker"), (1.0, "scheduler")])) == quiet
        assert asyncio.run(post(server, "/v1/unload_lora_adapter", {"lora_name": "three"}))[0] == 200
        status, text = asyncio.run(post(server, "/v1/completions", completion(3, model="three")))
        assert status == 404 and "model_not_found" in text

        reader = next(number for number, title in server.family().items() if title == "adapters")
        os.kill(reader, signal.SIGSTOP)  # so that it ends while it reads
        texts, (status, text) = asyncio.run(ask_while_loading(server, models[:3], loaded, reader))
        assert texts == quiet[:3] and status == 200, text
        again = asyncio.run(post(server, "/v1/completions", completion(9, model="three")))[1]
        assert json.loads(again)["choices"][0]["text"] == json.loads(same[3][1])["choices"][0]["text"]
