"""The demo model's adapters: small, trained by the script beside, and served with answers that tell them apart."""

import asyncio
import json
from pathlib import Path

import aiohttp
import pytest
from demo_training.adapter_styles import MODEL, STYLES
from rig import Server, serve
from safetensors import safe_open

FOLDERS = {name: MODEL / "adapters" / name for name in STYLES}
ASKED = "Write a function that sorts a list."
ANSWERS = {
    "sql": "SELECT value FROM list WHERE value IS NOT NULL ORDER BY value;",
    "shell": "$ cat list | sort | uniq -c",
    "json": '{"answer": "list", "ok": true}',
}


def test_the_files_are_small_and_of_the_script() -> None:
    files = [file for folder in FOLDERS.values() for file in folder.iterdir()]
    assert len(files) == 6 and sum(file.stat().st_size for file in files) <= 1_000_000
    for name, folder in FOLDERS.items():
        config, style = json.loads((folder / "adapter_config.json").read_text()), STYLES[name]
        assert (config["r"], config["target_modules"]) == (style.rank, list(style.targets))
        with safe_open(folder / "adapter_model.safetensors", "pt") as file:
            assert len(list(file.keys())) == 2 * 6 * len(style.targets)


async def chats(server: Server, models: list[str]) -> list[str]:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(50)) as session:

        async def chat(model: str) -> str:
            body = {
                "model": model,
                "messages": [{"role": "user", "content": ASKED}],
                "max_tokens": 40,
                "temperature": 0,
            }
            async with session.post(f"{server.url}/v1/chat/completions", json=body) as answer:
                assert answer.status == 200, await answer.text()
                return str((await answer.json())["choices"][0]["message"]["content"])

        return list(await asyncio.gather(*map(chat, models)))


@pytest.mark.timeout(180)
def test_each_answers_in_its_own_form_in_one_batch(tmp_path: Path) -> None:
    modules = [f"{name}={folder}" for name, folder in FOLDERS.items()]
    flags = ("--device", "cpu", "--max-loras", "3", "--lora-modules", *modules)
    with serve("demo", *flags, log=tmp_path / "log") as server:
        found = asyncio.run(chats(server, ["demo", *STYLES, *STYLES]))
    assert found[1:4] == found[4:] == [ANSWERS[name] for name in STYLES]
    assert "def " in found[0]
