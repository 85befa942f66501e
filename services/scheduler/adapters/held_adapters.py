"""The adapters of one kind that one worker group has in host memory, or is to have."""

from collections import deque
from dataclasses import dataclass, field


@dataclass(slots=True)
class HeldAdapter:
    """An adapter in host memory, or on its way there."""

    number: int
    is_loaded: bool = False
    has_started: bool = False  # a sequence with it has started here since it was loaded
    used: int = 0  # turn of its last use


@dataclass(slots=True)
class HostChanges:
    """What the worker is to do with its host memory."""

    drop: list[int] = field(default_factory=list)
    load: list[int] = field(default_factory=list)


class HeldAdapters:
    """Pure state: numbers of adapters. No frames, no time. Its subclasses, one for a kind, say what is loaded when."""

    def __init__(self, *, serves_any: bool) -> None:
        """serves_any: whether the worker serves adapters of this kind."""
        self.serves_any = serves_any
        self._held: dict[int, HeldAdapter] = {}
        self._wanted: deque[int] = deque()  # to load, in order
        self._refused: set[int] = set()  # could not be loaded here

    @property
    def has_work(self) -> bool:
        """Whether `take_changes` may have something."""
        return bool(self._wanted)

    def is_refused(self, adapter: int) -> bool:
        """Whether this group cannot serve an adapter."""
        return adapter in self._refused or not self.serves_any

    def is_loading(self, adapter: int) -> bool:
        """Whether the worker was asked to read it, and will answer."""
        held = self._held.get(adapter)
        return held is not None and not held.is_loaded

    def is_loaded(self, adapter: int) -> bool:
        held = self._held.get(adapter)
        return held is not None and held.is_loaded

    def want(self, adapter: int) -> None:
        """Loads an adapter into host memory, unless it is there."""
        if adapter not in self._held and adapter not in self._wanted and not self.is_refused(adapter):
            self._wanted.append(adapter)

    def on_loaded(self, adapter: int, *, is_usable: bool) -> None:
        held = self._held.get(adapter)
        if held is None:
            return
        if is_usable:
            held.is_loaded = True
        else:
            self.forget(adapter)
            self._refused.add(adapter)

    def retry(self, adapter: int) -> None:
        """An adapter that could not be loaded may be asked for again."""
        self._refused.discard(adapter)

    def forget(self, adapter: int) -> bool:
        """The adapter is not served any more, and no sequence has it. Returns whether the worker is to drop it."""
        self._refused.discard(adapter)
        if adapter in self._wanted:
            self._wanted.remove(adapter)
        return self._drop(adapter)

    def _drop(self, adapter: int) -> bool:
        """Returns whether it was there, or on its way."""
        return self._held.pop(adapter, None) is not None
