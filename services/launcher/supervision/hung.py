"""Finds hung children: processes that run but send no heartbeat."""

from dataclasses import dataclass

from blockyard.shared.messages import Member

STARTING_TIMES = 6  # factor on the timeout for a child that is not ready: it imports, loads and captures
REGISTRY_S = 2.0  # when the registry is silent for longer, a child's missing heartbeat proves nothing


@dataclass(slots=True)
class _Heartbeat:
    start: int  # number of the child's start
    silent_since: float | None  # None while its heartbeat arrives
    incarnation: int = 0  # 0: it has not announced itself yet
    ready: bool = False
    reported: bool = False

    def on_arrived(self, incarnation: int, ready: bool) -> None:
        self.incarnation, self.ready, self.silent_since = incarnation, ready, None

    def on_silent(self, since: float) -> None:
        self.silent_since = since

    def on_reported(self) -> None:
        self.reported = True


class HungDetector:
    """Detects hung children from the membership list. Times are seconds of one monotonic clock.

    `timeout_s`: silence after which a ready child is hung; 0 turns detection off. `dead_after_s`: silence after which
    the registry removes a member from its list.
    """

    def __init__(self, timeout_s: float, dead_after_s: float) -> None:
        self._timeout_s, self._dead_after_s = timeout_s, dead_after_s
        self._children: dict[str, _Heartbeat] = {}

    def on_running(self, name: str, start: int, now: float) -> None:
        """Call while the child runs; `start` is the number of its start."""
        known = self._children.get(name)
        if known is None or known.start != start:
            self._children[name] = _Heartbeat(start, now)

    def on_ended(self, name: str) -> None:
        self._children.pop(name, None)

    def on_member(self, member: Member) -> None:
        """The member is on the list: its heartbeat arrives."""
        child = self._children.get(member.name)
        if child is not None:
            child.on_arrived(member.incarnation, member.ready)

    def on_gone(self, member: Member, now: float) -> None:
        """The member was removed from the list."""
        child = self._children.get(member.name)
        if child is not None and child.incarnation == member.incarnation:
            child.on_silent(now - self._dead_after_s)

    def on_registry(self, name: str, heard_at: float, now: float) -> None:
        """The registry's last message came at `heard_at`. The registry is a child without an entry on the list."""
        child = self._children.get(name)
        if child is not None and heard_at > now - REGISTRY_S:
            child.on_arrived(incarnation=1, ready=True)
        elif child is not None and child.silent_since is None:
            child.on_silent(heard_at)
        if heard_at <= now - REGISTRY_S:
            for other, heartbeat in self._children.items():
                if other != name and heartbeat.silent_since is not None:
                    heartbeat.on_silent(now)

    def find_hung(self, now: float, settled: bool) -> dict[str, float]:
        """Returns the children to kill with their seconds of silence. Each start of a child is returned once.

        Until the ring is `settled`, a child that never joined is not hung: importing its packages from a slow disk may
        take any time.
        """
        found = {}
        for name, child in self._children.items():
            if not self._timeout_s or child.reported or child.silent_since is None:
                continue
            silent_s = now - child.silent_since
            limit_s = self._timeout_s if child.ready else self._timeout_s * STARTING_TIMES
            if silent_s >= limit_s and (settled or child.incarnation):
                child.on_reported()
                found[name] = silent_s
        return found
