"""Adapters over HTTP: operators load and unload them, and requests name them as their model."""

from pathlib import Path

import msgspec
import pytest

from blockyard.shared.messages import AdapterCard, Control, Controlled, ControlVerb, Generate, Tokenize

PROMPT = AdapterCard("tuned", "/adapters/tuned", "base", b"fedcba9876543210", 7, num_virtual_tokens=20)
CARD = AdapterCard("sql", "/adapters/sql", "base", b"0123456789abcdef", 7)


async def test_a_load_is_one_frame_and_the_adapter_is_a_model_at_once(rig, tmp_path: Path) -> None:
    (tmp_path / "sql").mkdir()
    async with rig(lora_dir=str(tmp_path)) as r:
        r.ring.control = lambda frame: Controlled(frame.request_id, 200, "", 0, False, adapters=[CARD])
        status, _ = await r.post("/v1/completions", {"model": "sql", "prompt": "a"})
        assert status == 404
        asked = {"lora_name": "sql", "lora_path": "sql", "load_inplace": True}
        async with r.http.post("/v1/load_lora_adapter", json=asked) as answer:
            assert (answer.status, await answer.text()) == (200, "Success: LoRA adapter 'sql' added successfully.")
        [sent] = r.ring.frames(Control)
        path = str(tmp_path / "sql")
        wanted = Control("", ControlVerb.LOAD_ADAPTER, adapter="sql", adapter_path=path, replace=True)
        assert msgspec.structs.replace(sent, request_id="") == wanted
        async with r.http.get("/v1/models") as answer:
            models = (await answer.json())["data"]
        assert [(one["id"], one["root"], one["parent"]) for one in models][-1] == ("sql", "/adapters/sql", "base")
        async with r.http.get("/v1/models/sql") as answer:
            assert (await answer.json())["parent"] == "base"
        status, body = await r.post("/v1/completions", {"model": "sql", "prompt": "a", "max_tokens": 1})
        assert (status, body["model"]) == (200, "sql")
        assert r.ring.frames(Tokenize)[-1].adapter_digest == CARD.digest
        frame = r.ring.frames(Generate)[-1]
        assert (frame.adapter, frame.adapter_digest) == ("sql", CARD.digest) and frame.model != "sql"


async def test_an_unload_and_a_refusal(rig) -> None:
    async with rig() as r:
        r.ring.control = lambda frame: Controlled(frame.request_id, 200, "", 0, False, adapters=[])
        async with r.http.post("/v1/unload_lora_adapter", json={"lora_name": "sql"}) as answer:
            assert answer.status == 200
        [sent] = r.ring.frames(Control)
        assert (sent.verb, sent.adapter) == (ControlVerb.UNLOAD_ADAPTER, "sql")
        refused = Controlled("", 404, "'sql' is not loaded", 0, False, field="lora_name", adapters=[])
        r.ring.control = lambda frame: msgspec.structs.replace(refused, request_id=frame.request_id)
        status, body = await r.post("/v1/unload_lora_adapter", {"lora_name": "sql"})
        assert (status, body["error"]["param"], body["error"]["message"]) == (404, "lora_name", "'sql' is not loaded")


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"lora_name": "a"}, "lora_path"),
        ({"lora_name": "", "lora_path": "a"}, "lora_name"),
        ({"lora_name": "a" * 300, "lora_path": "a"}, "lora_name"),
        ({"lora_name": "a\nb", "lora_path": "a"}, "lora_name"),
        ({"lora_name": "a", "lora_path": "a"}, "lora_path"),  # without --lora-dir
    ],
)
async def test_wrong_bodies(rig, body: dict[str, object], field: str) -> None:
    async with rig() as r:
        status, answer = await r.post("/v1/load_lora_adapter", body)
        assert (status, answer["error"]["param"]) == (400, field)
        assert not r.ring.frames(Control)


async def test_a_prompt_adapter_is_loaded_named_and_takes_room_of_the_context(rig, tmp_path: Path) -> None:
    (tmp_path / "tuned").mkdir()
    async with rig(lora_dir=str(tmp_path)) as r:
        r.ring.control = lambda frame: Controlled(frame.request_id, 200, "", 0, False, adapters=[PROMPT])
        asked = {"prompt_adapter_name": "tuned", "prompt_adapter_path": "tuned"}
        async with r.http.post("/v1/load_prompt_adapter", json=asked) as answer:
            assert (answer.status, await answer.text()) == (200, "Success: prompt adapter 'tuned' added successfully.")
        [sent] = r.ring.frames(Control)
        wanted = Control(
            "", ControlVerb.LOAD_ADAPTER, adapter="tuned", adapter_path=str(tmp_path / "tuned"), is_prompt=True
        )
        assert msgspec.structs.replace(sent, request_id="") == wanted
        async with r.http.get("/v1/models") as answer:
            base, *_, tuned = (await answer.json())["data"]
        assert tuned["max_model_len"] == base["max_model_len"] - 20
        status, body = await r.post("/v1/completions", {"model": "tuned", "prompt": "abc", "max_tokens": 1})
        assert (status, body["model"], body["usage"]["prompt_tokens"]) == (200, "tuned", 3)
        work, frame = r.ring.frames(Tokenize)[-1], r.ring.frames(Generate)[-1]
        assert (work.adapter_digest, work.num_virtual_tokens) == (PROMPT.digest, 20)
        assert (frame.adapter, frame.prompt_adapter, frame.prompt_adapter_digest) == ("", "tuned", PROMPT.digest)
        room = tuned["max_model_len"]
        status, body = await r.post("/v1/completions", {"model": "tuned", "prompt": "a" * (room + 1)})
        assert (status, body["error"]["code"]) == (400, "context_length_exceeded")
        async with r.http.post("/v1/unload_prompt_adapter", json={"prompt_adapter_name": "tuned"}) as answer:
            assert answer.status == 200
        sent = r.ring.frames(Control)[-1]
        assert (sent.verb, sent.adapter, sent.is_prompt) == (ControlVerb.UNLOAD_ADAPTER, "tuned", True)
        status, body = await r.post("/v1/load_prompt_adapter", {"prompt_adapter_name": "x", "prompt_adapter_path": "/"})
        assert (status, body["error"]["param"]) == (400, "prompt_adapter_path")
