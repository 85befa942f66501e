"""When a gateway collects garbage."""

import asyncio
import gc

import pytest

from blockyard.services.api_gateway import garbage
from blockyard.services.api_gateway.garbage import IDLE_S, MOST_YOUNG, is_due


def test_full_collections_wait_until_no_stream_is_open() -> None:
    assert is_due(1, 0, IDLE_S + 1)
    assert not is_due(1, 1, IDLE_S + 1)  # a stream is open
    assert not is_due(1, 0, IDLE_S - 1)  # the last one was just now
    assert not is_due(0, 0, IDLE_S + 1)  # nothing was made since
    assert is_due(MOST_YOUNG + 1, 1, 0.0)  # memory is bounded


def test_python_begins_no_full_collection_by_itself() -> None:
    threshold = gc.get_threshold()
    seen: list[int] = []

    def note(phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            seen.append(info["generation"])

    try:
        garbage.begin()
        gc.callbacks.append(note)
        kept = [[i] for i in range(100_000)]
        assert 2 not in seen and 1 in seen
        assert gc.get_count()[2] > 0 and len(kept) == 100_000
    finally:
        gc.callbacks.remove(note)
        gc.set_threshold(*threshold)
        gc.unfreeze()


async def test_a_gateway_without_streams_collects(rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(garbage, "CHECK_S", 0.001)
    monkeypatch.setattr(garbage, "IDLE_S", 0.0)
    async with rig() as r:
        began: list[int] = []
        monkeypatch.setattr(gc, "collect", lambda: began.append(1))
        monkeypatch.setattr(gc, "get_count", lambda: (0, 0, 1))
        task = asyncio.create_task(garbage.collect(r.gateway))
        await r.until(lambda: len(began) > 1)
        task.cancel()
