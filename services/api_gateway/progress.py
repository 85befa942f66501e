"""Whether schedulers' work moves: a worker that hangs keeps its heartbeat, but no step of it ends."""

from collections.abc import Iterable

from blockyard.shared.messages import Member, Role

PAUSED = "paused"  # phase of a scheduler whose steps stand still on purpose


class Progress:
    """Watches the steps that schedulers count. `patience_s`: how long one step may take while choices run."""

    def __init__(self, patience_s: float) -> None:
        self._patience_s = patience_s
        self._seen: dict[int, tuple[int, float]] = {}  # scheduler -> its steps, and when that number was new
        self.stalled: frozenset[int] = frozenset()

    def observe(self, members: Iterable[Member], now: float) -> None:
        """Takes in the membership list as it is now."""
        seen = {}
        for member in members:
            if member.role == Role.SCHEDULER:
                before = self._seen.get(member.incarnation)
                moved = before is None or before[0] != member.stats.steps_total or not member.stats.running
                moved = moved or member.phase == PAUSED
                seen[member.incarnation] = (member.stats.steps_total, now) if moved or before is None else before
        self._seen = seen
        self.stalled = frozenset(i for i, (_, since) in seen.items() if now - since > self._patience_s)
