"""Folders below --lora-dir: which paths are taken, and adapters that the first request loads."""

import asyncio
from pathlib import Path

import msgspec
import pytest
from fake_ring import SCHEDULER

from blockyard.services.api_gateway import adapter_folders
from blockyard.services.api_gateway.adapter_folders import find_folder
from blockyard.shared.bus.member_list import Changed
from blockyard.shared.errors import RequestError
from blockyard.shared.messages import AdapterCard, Control, Controlled, ControlVerb, Generate


def test_paths_below_the_folder_alone(tmp_path: Path) -> None:
    base, outside = tmp_path / "base", tmp_path / "outside"
    for folder in (base / "a" / "b", outside):
        folder.mkdir(parents=True)
    (base / "link").symlink_to(outside)
    (base / "inner").symlink_to(base / "a")
    (base / "file").write_text("x")
    assert find_folder("a/b", str(base)) == base / "a" / "b"
    assert find_folder(str(base / "a"), str(base)) == base / "a"
    assert find_folder("inner", str(base)) == base / "a"
    for wrong in ("", ".", "..", "../outside", "link", "file", "missing", str(outside), "a/../..", "a\0b", "x" * 5000):
        with pytest.raises(RequestError) as e:
            find_folder(wrong, str(base))
        assert e.value.field == "lora_path"
    (base / "loop").symlink_to(base / "loop")
    for unreadable in ("loop", "y" * 300):  # too long for a name of a file
        with pytest.raises(RequestError) as e:
            find_folder(unreadable, str(base))
        assert str(base) not in str(e.value)


def test_files_of_a_folder_are_below_the_folder_of_all(tmp_path: Path) -> None:
    """A cache of the hub has links from one of its folders to another."""
    base = tmp_path / "base"
    folder, blob = base / "snapshots" / "a", base / "blobs" / "1"
    for one in (folder, blob.parent):
        one.mkdir(parents=True)
    for file in (blob, tmp_path / "secret"):
        file.write_text("{}")
    (folder / "adapter_config.json").symlink_to("../../blobs/1")
    assert find_folder("snapshots/a", str(base)) == folder
    (folder / "adapter_model.safetensors").symlink_to(tmp_path / "secret")
    with pytest.raises(RequestError, match="links that lead out of --lora-dir") as e:
        find_folder("snapshots/a", str(base))
    assert e.value.field == "lora_path" and "secret" not in str(e.value)


def folder_of(base: Path, name: str) -> Path:
    folder = base / name
    folder.mkdir(parents=True)
    (folder / "adapter_config.json").write_text("{}")
    return folder


def served(frame: Control) -> Controlled:
    """A scheduler that serves whatever it is asked for."""
    card = AdapterCard(frame.adapter, frame.adapter_path, "base", b"0123456789abcdef", 7)
    return Controlled(frame.request_id, 200, "", 0, False, adapters=[card])


def refused(status: int, field: str, text: str):
    return lambda frame: Controlled(frame.request_id, status, text, 0, False, field=field, adapters=[])


async def test_the_first_request_loads_the_folder_that_it_names(rig, tmp_path: Path) -> None:
    folder = folder_of(tmp_path, "team/sql")
    async with rig(lora_dir=str(tmp_path)) as r:
        r.ring.control = served
        asked = {"model": "team/sql", "prompt": "a", "max_tokens": 1}
        answers = await asyncio.gather(*(r.post("/v1/completions", asked) for _ in range(3)))
        assert [(status, body["model"]) for status, body in answers] == [(200, "team/sql")] * 3
        [sent] = r.ring.frames(Control)  # one for all of them
        assert (sent.verb, sent.adapter, sent.adapter_path) == (ControlVerb.LOAD_ADAPTER, "team/sql", str(folder))
        assert sent.first_use and not sent.replace
        assert {frame.adapter for frame in r.ring.frames(Generate)} == {"team/sql"}
        large = {"model": "team/sql", "messages": [{"role": "user", "content": "a" * 70_000}], "max_tokens": 1}
        status, body = await r.post("/v1/chat/completions", large)  # parsed in another process
        assert status != 404, body
        async with r.http.get("/v1/models") as answer:
            models = (await answer.json())["data"]
        assert [(one["id"], one["root"], one["parent"]) for one in models][-1] == ("team/sql", str(folder), "base")


@pytest.mark.parametrize(
    "name", ["missing", "plain", "../outside", "link", "./sql", "sql/", "x/../sql", "a" * 300, ".", "sql\0"]
)
async def test_other_names_are_unknown_and_load_nothing(rig, tmp_path: Path, name: str) -> None:
    base = tmp_path / "base"
    folder_of(base, "sql")
    folder_of(tmp_path, "outside")
    (base / "plain").mkdir()  # without a config
    (base / "link").symlink_to(tmp_path / "outside")
    async with rig(lora_dir=str(base)) as r:
        r.ring.control = served
        status, body = await r.post("/v1/completions", {"model": name, "prompt": "a"})
        assert (status, body["error"]["param"], body["error"]["code"]) == (404, "model", "model_not_found")
        status, body = await r.post("/v1/completions", {"model": str(base / "sql"), "prompt": "a"})
        assert status == 404
        assert not r.ring.frames(Control)


async def test_an_adapter_that_cannot_be_loaded_is_a_refusal_and_is_not_read_for_each_request(
    rig, tmp_path: Path
) -> None:
    folder_of(tmp_path, "sql")
    async with rig(lora_dir=str(tmp_path)) as r:
        r.ring.control = refused(400, "lora_path", "the rank 64 is above --max-lora-rank")
        for _ in range(3):
            status, body = await r.post("/v1/completions", {"model": "sql", "prompt": "a"})
            assert (status, body["error"]["param"]) == (400, "model") and "rank 64" in body["error"]["message"]
        assert len(r.ring.frames(Control)) == 1


async def test_a_name_that_an_operator_has_unloaded_stays_unknown(rig, tmp_path: Path) -> None:
    folder_of(tmp_path, "sql")
    async with rig(lora_dir=str(tmp_path)) as r:
        r.ring.control = refused(404, "lora_name", "the model 'sql' does not exist")
        status, body = await r.post("/v1/completions", {"model": "sql", "prompt": "a"})
        assert (status, body["error"]["code"]) == (404, "model_not_found")


@pytest.mark.parametrize("loads", [True, False])
async def test_an_adapter_that_another_gateway_has_just_loaded_is_known(
    rig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, loads: bool
) -> None:
    """Some milliseconds after the answer to its operator this gateway has the scheduler's new card."""
    looked_up = asyncio.Event()

    def look_up(path: str, lora_dir: str) -> Path:
        looked_up.set()
        return find_folder(path, lora_dir)

    monkeypatch.setattr(adapter_folders, "find_folder", look_up)
    async with rig(lora_dir=str(tmp_path)) as r:
        asked = asyncio.create_task(r.post("/v1/completions", {"model": "sql", "prompt": "a", "max_tokens": 1}))
        await looked_up.wait()
        scheduler = r.ring.members[SCHEDULER]
        adapters = [AdapterCard("sql", "/sql", "base", b"0123456789abcdef")] if loads else []
        card = msgspec.structs.replace(scheduler.card, adapters=adapters)
        r.ring.receive(SCHEDULER, Changed(msgspec.structs.replace(scheduler, card=card)))
        status, _ = await asked
        assert status == (200 if loads else 404)


async def test_too_many_loads_are_refused_for_a_second(rig, tmp_path: Path) -> None:
    folder_of(tmp_path, "sql")
    async with rig(lora_dir=str(tmp_path)) as r:
        r.ring.control = refused(429, "lora_name", "64 adapters are being loaded")
        async with r.http.post("/v1/completions", json={"model": "sql", "prompt": "a"}) as answer:
            assert answer.status == 429 and answer.headers["Retry-After"] == "1"
        r.ring.control = served
        status, _ = await r.post("/v1/completions", {"model": "sql", "prompt": "a", "max_tokens": 1})
        assert status == 200


async def test_a_load_by_another_gateway_is_waited_for(rig, tmp_path: Path) -> None:
    folder_of(tmp_path, "sql")
    async with rig(lora_dir=str(tmp_path)) as r:
        is_pending = refused(409, "lora_name", "'sql' is being loaded")
        r.ring.control = lambda frame: served(frame) if len(r.ring.frames(Control)) > 1 else is_pending(frame)
        status, body = await r.post("/v1/completions", {"model": "sql", "prompt": "a", "max_tokens": 1})
        assert (status, body["model"]) == (200, "sql")
