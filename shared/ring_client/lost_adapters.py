"""Adapters that operators had loaded or unloaded, and which a scheduler that was started again does not know yet.

It may have read another one under the name: its flags name that, and an operator had put another one in its place, or
had unloaded it.

Clients of the ring remember them and repeat the commands. Until then requests of loaded ones wait, and none is refused;
unloaded ones are unknown.
"""

from collections import deque
from dataclasses import dataclass, field

import msgspec

from blockyard.shared.messages import AdapterCard, Control, Controlled, ControlVerb, ModelCard

REQUEST = "restore "  # before the name, in the id of the command
PENDING = 409  # status of an answer: another client has asked for the same, and it is being loaded
FULL = 429  # status of an answer: too many are being loaded
MOST_ASKED = 16  # at a time of one scheduler, which all clients ask
QUIET_S = 20.0  # a scheduler that has answered nothing for so long loads no more


@dataclass(slots=True)
class _Restore:
    """What one scheduler is to load and to unload again."""

    missing: dict[str, AdapterCard]  # by name
    unloaded: list[str]  # names, until the scheduler's card says the same
    to_unload: list[str]  # not asked yet
    to_ask: deque[str]
    replaced: dict[str, str]  # by name, of some: the path of what the scheduler has under it
    asked: set[str] = field(default_factory=set)  # and not answered
    refused: list[str] = field(default_factory=list)  # to be asked again at the next tick
    until: float | None = None  # None: until QUIET_S after the next tick


class LostAdapters:
    """Pure: cards and frames in, frames out."""

    def __init__(self) -> None:
        self._restores: dict[int, _Restore] = {}  # by scheduler

    def begin(self, scheduler: int, before: ModelCard, now: ModelCard) -> None:
        """A scheduler has joined in the place of one whose last card was `before`."""
        paths = {adapter.name: adapter.root for adapter in now.adapters}
        missing = {one.name: one for one in before.adapters if one.name not in paths}
        missing |= {one.name: one for one in before.adapters if one.was_asked_for and paths.get(one.name) != one.root}
        replaced = {name: paths[name] for name in missing if name in paths}
        unloaded = before.unloaded
        if missing or unloaded:
            self._restores[scheduler] = _Restore(missing, unloaded, unloaded, deque(missing), replaced)

    def take_commands(self) -> list[tuple[int, Control]]:
        """What to send, each to its scheduler. Call it after each other method that takes something in."""
        commands = []
        for scheduler, restore in self._restores.items():  # before requests ask for the same names
            commands += [(scheduler, _unload(name)) for name in restore.to_unload]
            restore.to_unload = []
            while restore.to_ask and len(restore.asked) < MOST_ASKED:
                name = restore.to_ask.popleft()
                if (adapter := restore.missing.get(name)) is not None:
                    restore.asked.add(name)
                    commands.append((scheduler, _load(adapter, replace=name in restore.replaced)))
        return commands

    def waits(self, scheduler: int, adapter: str) -> bool:
        restore = self._restores.get(scheduler)
        return restore is not None and adapter in restore.missing

    def with_missing(self, scheduler: int, card: ModelCard) -> ModelCard:
        """A scheduler's card with what it will serve again, and without what it will unload again."""
        restore = self._restores.get(scheduler)
        if restore is None:
            return card
        for adapter in card.adapters:
            if adapter.root != restore.replaced.get(adapter.name):
                restore.missing.pop(adapter.name, None)
        done = {*card.unloaded, *(adapter.name for adapter in card.adapters if adapter.was_asked_for)}
        restore.unloaded = [name for name in restore.unloaded if name not in done]
        hidden = {*restore.missing, *restore.unloaded}
        adapters = [adapter for adapter in card.adapters if adapter.name not in hidden]
        unloaded = [*card.unloaded, *restore.unloaded]
        return msgspec.structs.replace(card, adapters=[*adapters, *restore.missing.values()], unloaded=unloaded)

    def on_answer(self, scheduler: int, answer: Controlled) -> None:
        """What could not be loaded is lost. What was unloaded is known by the card."""
        restore = self._restores.get(scheduler)
        if restore is None or not answer.request_id.startswith(REQUEST):
            return
        name, restore.until = answer.request_id.removeprefix(REQUEST), None
        restore.asked.discard(name)
        if answer.status == FULL:
            restore.refused.append(name)
        elif answer.status not in (200, PENDING):
            restore.missing.pop(name, None)

    def gone(self, scheduler: int) -> None:
        self._restores.pop(scheduler, None)

    def tick(self, now: float) -> None:
        for scheduler, restore in list(self._restores.items()):
            restore.until = now + QUIET_S if restore.until is None else restore.until
            restore.to_ask += restore.refused
            restore.refused.clear()
            if now > restore.until:
                self.gone(scheduler)


def _load(adapter: AdapterCard, *, replace: bool) -> Control:
    verb, name, path = ControlVerb.LOAD_ADAPTER, adapter.name, adapter.root
    return Control(REQUEST + name, verb, adapter=name, adapter_path=path, replace=replace, is_prompt=adapter.is_prompt)


def _unload(name: str) -> Control:
    return Control(REQUEST + name, ControlVerb.UNLOAD_ADAPTER, adapter=name, is_repeated=True)
