"""The prompt adapters of one worker group: all that are served, as long as they are. They need no places."""

from collections.abc import Sequence

from blockyard.services.scheduler.adapters.held_adapters import HeldAdapter, HeldAdapters, HostChanges


class GroupPrompts(HeldAdapters):
    """Pure state: numbers of adapters. No frames, no time."""

    def __init__(self, num_most: int) -> None:
        """num_most: adapters that the worker holds; 0: it serves none."""
        super().__init__(serves_any=num_most > 0)
        self.num_most = num_most

    def is_loading(self, adapter: int) -> bool:
        """Whether the worker will have it soon."""
        return adapter in self._wanted or super().is_loading(adapter)

    def can_start(self, adapter: int) -> bool:
        """Whether a sequence with this adapter may start in the next plan."""
        return self.is_loaded(adapter)

    def take_changes(self, waiting: Sequence[int] = ()) -> HostChanges:
        """What to tell the worker now. Nothing has to leave for what waits: the number of adapters is bounded."""
        changes = HostChanges(load=list(self._wanted))
        self._wanted.clear()
        self._held.update((number, HeldAdapter(number)) for number in changes.load)
        return changes
