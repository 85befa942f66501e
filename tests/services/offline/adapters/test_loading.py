"""Which requests of the offline API read the folder of an adapter again."""

import asyncio
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any, cast

from blockyard import LoRARequest, PromptAdapterRequest
from blockyard.services.offline.adapters.loading import AdapterSession, read_adapters
from blockyard.shared.messages import AdapterCard, Control, ModelCard


class Ring:
    """A session whose scheduler loads whatever it is asked for, each time with other bytes."""

    def __init__(self) -> None:
        self.card = ModelCard(["m"], "m", 100, 100, 0)
        self.adapter_numbers: dict[str, int] = {}
        self.loads: list[Control] = []
        self.controls = SimpleNamespace(ask=self._ask)
        self.schedulers = SimpleNamespace(card=lambda model: self.card)

    async def _ask(self, control: Control) -> None:
        self.loads.append(control)
        columns = control.adapter, control.adapter_path, "m", bytes([len(self.loads)]), 0
        self.card = ModelCard(["m"], "m", 100, 100, 0, adapters=[AdapterCard(*columns, 5 * control.is_prompt)])

    def call(self, function: Callable[[Any], Awaitable[AdapterCard]]) -> AdapterCard:
        return asyncio.run(cast(Any, function(self)))

    def digest(self, **asked: Any) -> bytes:
        [found] = read_adapters(cast(AdapterSession, self), asked.get("lora"), 1, asked.get("prompt"))
        [card] = found.cards
        return card.digest


def test_another_number_of_a_name_is_read_again() -> None:
    """A caller that trains writes one folder again and again, and numbers what it has written."""
    ring = Ring()
    steps = [1, 1, 2, 2, 3]
    found = [ring.digest(lora=LoRARequest("policy", step, "/policy")) for step in steps]
    assert found == [bytes([step]) for step in steps]
    assert ring.digest(lora=LoRARequest("policy", 9)) == b"\x03", "there is no folder to be read"
    assert all(control.replace for control in ring.loads)


def test_a_prompt_adapter_is_read_again() -> None:
    ring = Ring()
    found = [ring.digest(prompt=PromptAdapterRequest("tuned", step, "/tuned")) for step in (1, 1, 2)]
    assert found == [b"\x01", b"\x01", b"\x02"]


def test_load_inplace() -> None:
    ring = Ring()
    found = [ring.digest(lora=LoRARequest("a", 1, "/a", load_inplace=again)) for again in (False, True, True, False)]
    assert found == [b"\x01", b"\x02", b"\x03", b"\x03"]
