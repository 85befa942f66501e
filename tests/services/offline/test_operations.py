"""The commands of `sleep` and `wake_up`, in order, without a ring."""

import asyncio
from collections.abc import Callable, Coroutine
from types import SimpleNamespace
from typing import Any

import pytest

import blockyard
from blockyard.services.offline.operations import RingOperations
from blockyard.shared.messages import Control, ControlVerb, MemoryTag

HOLD = Control("", ControlVerb.PAUSE, drain=False, clear_cache=False)
DRAIN = Control("", ControlVerb.PAUSE, drain=True, clear_cache=False)
RESUME = Control("", ControlVerb.RESUME)


class Session:
    """Answers every command at once."""

    def __init__(self) -> None:
        self.sent: list[Control] = []
        self.aborts = 0

    def abort(self, why: str) -> None:
        self.aborts += 1

    def call(self, work: Callable[[Any], Coroutine[Any, Any, Any]]) -> Any:
        return asyncio.run(work(SimpleNamespace(controls=SimpleNamespace(ask=self._ask))))

    async def _ask(self, control: Control) -> list[Any]:
        self.sent.append(control)
        return []


class Operations(RingOperations):
    def __init__(self) -> None:
        self.session: Any = Session()
        self._session = self.session


def sleep(level: int) -> Control:
    return Control("", ControlVerb.SLEEP, level=level)


@pytest.mark.parametrize(
    ("level", "mode", "sent"),
    [
        (0, "abort", [HOLD]),
        (0, "keep", [HOLD]),
        (0, "wait", [DRAIN]),
        (1, "keep", [sleep(1)]),
        (2, "abort", [sleep(2)]),
        (1, "wait", [DRAIN, sleep(1), RESUME]),
    ],
)
def test_sleep(level: int, mode: str, sent: list[Control]) -> None:
    """The KV cache is kept at level 0, and while running requests finish."""
    llm = Operations()
    llm.sleep(level, mode)
    assert (llm.session.sent, llm.session.aborts) == (sent, int(mode == "abort"))


@pytest.mark.parametrize(
    ("tags", "sent"),
    [
        (None, [Control("", ControlVerb.WAKE_UP), RESUME]),
        (["scheduling"], [RESUME]),
        (["weights", "kv_cache"], [Control("", ControlVerb.WAKE_UP, tags=[MemoryTag.KV_CACHE, MemoryTag.WEIGHTS])]),
    ],
)
def test_wake_up(tags: list[str] | None, sent: list[Control]) -> None:
    llm = Operations()
    llm.wake_up(tags)
    assert llm.session.sent == sent


def test_errors_and_types_are_imported_from_the_package() -> None:
    assert {"RequestError", "RingLost", "ConfigError", "StartFailed", "LLM"} <= set(blockyard.__all__)
    assert all(getattr(blockyard, name) is not None for name in blockyard.__all__)
