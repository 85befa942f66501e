"""The bounds of both stores, and responses that outlive their process on the disk."""

import contextlib
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import openai
import pytest

from blockyard.services.api_gateway.stored_responses.disk_store import DiskStore
from blockyard.services.api_gateway.stored_responses.event_log import PIECE_BYTES, EventLog
from blockyard.services.api_gateway.stored_responses.memory_store import MemoryStore
from blockyard.services.api_gateway.stored_responses.response_store import (
    RECORD_BYTES,
    ResponseStore,
    StoreLimits,
    num_bytes,
)
from blockyard.shared.errors import ConfigError
from blockyard.shared.messages import StoredResponse

Make = Callable[..., ResponseStore]


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


CLOCK = Clock()


@pytest.fixture(params=["memory", "disk"])
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Make:
    def store(most: int = 100, most_bytes: int = 2**20, ttl_s: float = 60.0) -> ResponseStore:
        limits = StoreLimits(most, most_bytes, ttl_s)
        return MemoryStore(limits, CLOCK) if request.param == "memory" else DiskStore(tmp_path, limits, 7, CLOCK)

    return store


def response(name: str, size: int = 10, **fields: Any) -> StoredResponse:
    return StoredResponse(name, "t", "", b'{"status":"in_progress","output":[]}' + b" " * size, b"[]", **fields)


@contextlib.contextmanager
def killed_gateway(folder: Path, *responses: StoredResponse) -> Iterator[None]:
    """A process that has stored `responses` as gateway 77, and is killed at the end of the block."""
    script = (
        "import sys, time, pathlib, msgspec\n"
        "from blockyard.services.api_gateway.stored_responses.disk_store import DiskStore\n"
        "from blockyard.services.api_gateway.stored_responses.response_store import StoreLimits\n"
        "from blockyard.shared.messages import StoredResponse\n"
        "store = DiskStore(pathlib.Path(sys.argv[1]), StoreLimits(100, 2**20, 60.0), 77)\n"
        "for one in msgspec.json.decode(sys.argv[2], type=list[StoredResponse]):\n"
        "    store.put(one)\n"
        "print(flush=True)\n"
        "time.sleep(60)\n"
    )
    command = [sys.executable, "-P", "-c", script, str(folder), msgspec.json.encode(responses)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline() == b"\n"
        try:
            yield
        finally:
            process.kill()


def left(store: ResponseStore, *names: str) -> list[str]:
    """Which of them are kept. Looking is a use."""
    return [name for name in names if store.get(name) is not None]


def test_a_response_comes_back_as_it_was(make: Make) -> None:
    store = make()
    one = response("a", background=True, streams=True)
    store.put(one, b"events")
    assert store.get("a") == one and store.events("a") == b"events"
    store.put(msgspec.structs.replace(one, data=b"new"))
    assert store.get("a") == msgspec.structs.replace(one, data=b"new") and store.events("a") == b""
    store.delete("a")
    store.delete("b")
    assert store.get("a") is None and store.events("a") == b""
    store.close()


def test_the_least_recently_used_goes_first_and_none_in_progress(make: Make) -> None:
    store = make(most=4)
    for name in "rabc":
        CLOCK.now += 2
        store.put(response(name, ended=name != "r"))
    CLOCK.now += 2
    assert left(store, "a") == ["a"]
    CLOCK.now += 2
    store.put(response("d"))
    assert left(store, *"rabcd") == ["r", "a", "c", "d"]
    store.close()


def test_bytes_are_bounded(make: Make) -> None:
    size = num_bytes(response("a", 20_000), b"e")
    store = make(most_bytes=10 * size)
    for i in range(50):
        CLOCK.now += 2
        store.put(response(f"a{i}", 20_000), b"e")
    assert left(store, *(f"a{i}" for i in range(50))) == [f"a{i}" for i in range(40, 50)]
    store.put(response("large", 11 * size))
    assert left(store, "large") == []
    store.close()


def test_what_is_not_used_expires(make: Make) -> None:
    store = make(ttl_s=60.0)
    for name in "abr":
        store.put(response(name, ended=name != "r"))
    CLOCK.now += 40
    assert left(store, "a") == ["a"]
    CLOCK.now += 40
    assert left(store, "a", "b", "r") == ["a", "r"]
    CLOCK.now += 61
    store.sweep()
    CLOCK.now -= 61
    assert left(store, "a", "r") == ["r"]
    store.close()


def test_memory_is_counted_exactly() -> None:
    store = MemoryStore(StoreLimits(1000, 2**30, 60.0))
    for i in range(10_000):
        store.put(response(f"a{i}", 20_000))
    assert len(store) == 1000 and store.num_bytes == 1000 * num_bytes(response("a", 20_000), b"")
    for i in range(10_000):
        store.delete(f"a{i}")
    assert (len(store), store.num_bytes) == (0, 0) and RECORD_BYTES > 0


def test_a_response_whose_gateway_was_killed_has_failed(tmp_path: Path) -> None:
    other = DiskStore(tmp_path, StoreLimits(100, 2**20, 60.0), 8)
    with killed_gateway(tmp_path, response("a", ended=False), response("b", ended=False), response("c")):
        other.sweep()
        assert not other.get("a").ended  # type: ignore[union-attr]
    found = other.get("a")
    assert found is not None and found.ended
    answer = msgspec.json.decode(found.data)
    assert answer["status"] == "failed" and "ended before it" in answer["error"]["message"]
    other.sweep()
    assert [one.name for one in (tmp_path / "gateways").iterdir()] == [f"{8:016x}"]
    assert other.get("b").ended and msgspec.json.decode(other.get("c").data)["status"] == "in_progress"  # type: ignore[union-attr]
    other.close()


def test_a_folder_that_cannot_be_used(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="--response-store"):
        DiskStore(tmp_path / "file", StoreLimits(1, 1, 1.0), 7)


def test_an_event_log_is_read_from_any_number() -> None:
    log = EventLog()
    events = [b"event: %d\ndata: " % i + b"x" * (i % 7 * 50) + b"\n\n" for i in range(3000)]
    for i in range(0, 3000, 3):
        log.append(b"".join(events[i : i + 3]))
    assert sum(map(len, events)) > 4 * PIECE_BYTES and log.last == 2999
    for ended in (False, True):
        if ended:
            log.end()
            log = EventLog.unpacked(log.packed())
        for after in (-1, 0, 1, 500, 1499, 2998, 2999):
            found, last = b"", after
            while last < log.last:
                data, last = log.read(last)
                found += data
            assert found == b"".join(events[after + 1 :]) and log.read(2999) == (b"", 2999)
    assert log.ended and len(log.packed()) < 50_000


async def test_responses_outlive_their_server(rig, client, tmp_path: Path) -> None:
    body: dict[str, Any] = {"model": "tiny", "input": "hi", "max_output_tokens": 3}
    async with rig(response_store=str(tmp_path)) as r, client(r) as c:
        made = await c.responses.create(**body)
        stream = await c.responses.create(**body, background=True, stream=True)
        events = [event.to_dict() async for event in stream]
    lost = f"resp_s{77:016x}{'0' * 24}"
    data = msgspec.json.encode(made.to_dict() | {"id": lost, "status": "in_progress", "output": []})
    with killed_gateway(tmp_path, StoredResponse(lost, "", made.id, data, b"[]", True, True, False)):
        pass
    async with rig(response_store=str(tmp_path)) as r, client(r) as c:
        assert (await c.responses.retrieve(made.id)).to_dict() == made.to_dict()
        more = await c.responses.create(**body, previous_response_id=made.id)
        assert len((await c.responses.input_items.list(more.id)).data) == 3
        again = await c.responses.retrieve(events[0]["response"]["id"], stream=True, starting_after=3)
        assert [event.to_dict() async for event in again] == events[4:]
        failed = await c.responses.retrieve(lost)
        assert failed.status == "failed" and failed.error is not None and "process" in failed.error.message
        [last] = [event async for event in await c.responses.retrieve(lost, stream=True, starting_after=9)]
        assert (last.type, last.sequence_number) == ("response.failed", 10)
        assert (await c.responses.cancel(lost)).status == "failed"
        await c.responses.delete(made.id)
        with pytest.raises(openai.NotFoundError):
            await c.responses.retrieve(made.id)
