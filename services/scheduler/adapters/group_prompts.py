"""The prompt adapters of one worker group: all that are served, as long as they are. They need no places."""

from collections.abc import Sequence

from blockyard.services.scheduler.adapters.group_adapters import HostChanges


class GroupPrompts:
    """Pure state: numbers of adapters. No frames, no time."""

    def __init__(self, num_most: int) -> None:
        """num_most: adapters that the worker holds; 0: it serves none."""
        self.num_most = num_most
        self._wanted: list[int] = []  # to load, in order
        self._held: dict[int, bool] = {}  # whether it is loaded, or on its way
        self._refused: set[int] = set()  # could not be loaded here

    @property
    def serves_any(self) -> bool:
        return self.num_most > 0

    @property
    def has_work(self) -> bool:
        """Whether `take_changes` has something."""
        return bool(self._wanted)

    def is_refused(self, adapter: int) -> bool:
        """Whether this group cannot serve an adapter."""
        return adapter in self._refused or not self.num_most

    def is_loading(self, adapter: int) -> bool:
        """Whether the worker will have it soon."""
        return adapter in self._wanted or self._held.get(adapter) is False

    def can_start(self, adapter: int) -> bool:
        """Whether a sequence with this adapter may start in the next plan."""
        return self._held.get(adapter, False)

    def want(self, adapter: int) -> None:
        """Loads an adapter, unless it is there."""
        if adapter not in self._held and adapter not in self._wanted and not self.is_refused(adapter):
            self._wanted.append(adapter)

    def take_changes(self, waiting: Sequence[int] = ()) -> HostChanges:
        """What to tell the worker now. Nothing has to leave for what waits: the number of adapters is bounded."""
        load, self._wanted = self._wanted, []
        self._held.update(dict.fromkeys(load, False))
        return HostChanges(load=load)

    def on_loaded(self, adapter: int, *, is_usable: bool) -> None:
        if adapter not in self._held:
            return
        self._held[adapter] = is_usable
        if not is_usable:
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
        return self._held.pop(adapter, None) is not None
