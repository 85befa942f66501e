"""Adapters that operators had loaded, and which a scheduler that was started again does not know yet.

Clients of the ring remember them and load them again. Until then their requests wait, and none is refused.
"""

import msgspec

from blockyard.shared.messages import AdapterCard, Control, Controlled, ControlVerb, ModelCard

REQUEST = "restore "  # before the name, in the id of the command
PENDING = 409  # status of an answer: another client has asked for the same, and it is being loaded


class LostAdapters:
    """Pure: cards and frames in, frames out."""

    def __init__(self) -> None:
        self._missing: dict[int, dict[str, AdapterCard]] = {}  # by scheduler and name
        self._until: dict[int, float] = {}
        self._commands: list[tuple[int, Control]] = []

    def begin(self, scheduler: int, before: ModelCard, now: ModelCard, until: float) -> None:
        """A scheduler has joined in the place of one with the card `before`. until: when waiting ends."""
        known = {adapter.name for adapter in now.adapters}
        missing = {adapter.name: adapter for adapter in before.adapters if adapter.name not in known}
        if missing:
            self._missing[scheduler], self._until[scheduler] = missing, until
            self._commands += [(scheduler, _load(adapter)) for adapter in missing.values()]

    def take_commands(self) -> list[tuple[int, Control]]:
        """What to send, each to its scheduler."""
        commands, self._commands = self._commands, []
        return commands

    def waits(self, scheduler: int, adapter: str) -> bool:
        return adapter in self._missing.get(scheduler, ())

    def with_missing(self, scheduler: int, card: ModelCard) -> ModelCard:
        """A scheduler's card with what it will serve again."""
        missing = self._missing.get(scheduler)
        if not missing:
            return card
        for adapter in card.adapters:
            missing.pop(adapter.name, None)
        return msgspec.structs.replace(card, adapters=[*card.adapters, *missing.values()])

    def on_answer(self, scheduler: int, answer: Controlled) -> None:
        """What could not be loaded is lost."""
        missing = self._missing.get(scheduler, {})
        if answer.request_id.startswith(REQUEST) and answer.status not in (200, PENDING):
            missing.pop(answer.request_id.removeprefix(REQUEST), None)

    def gone(self, scheduler: int) -> None:
        self._missing.pop(scheduler, None)
        self._until.pop(scheduler, None)

    def tick(self, now: float) -> None:
        for scheduler in [one for one, until in self._until.items() if now > until]:
            self.gone(scheduler)


def _load(adapter: AdapterCard) -> Control:
    verb, name = ControlVerb.LOAD_ADAPTER, adapter.name
    return Control(REQUEST + name, verb, adapter=name, adapter_path=adapter.root, is_prompt=adapter.is_prompt)
