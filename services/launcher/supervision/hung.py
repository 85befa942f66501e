"""Finds hung children: processes that are there, but whose heartbeat is missing."""

from dataclasses import dataclass

from blockyard.shared.messages import Member

STARTING_TIMES = 6  # a child that is not ready may be silent so many times longer: it imports, loads and captures
REGISTRY_S = 2.0  # a registry that is silent for longer is no witness against a child


@dataclass(slots=True)
class _Heartbeat:
    start: int  # which start of the child this is
    silent_since: float | None  # None while the registry hears it
    incarnation: int = 0  # 0: it has not announced itself yet
    ready: bool = False
    reported: bool = False


class HungDetector:
    """Judges the running children by the membership list. Times are seconds of one monotonic clock.

    `timeout_s`: silence of a ready child that counts as a hang; 0: nothing does. `dead_after_s`: silence after which
    the registry takes a member off its list.
    """

    def __init__(self, timeout_s: float, dead_after_s: float) -> None:
        self._timeout_s, self._dead_after_s = timeout_s, dead_after_s
        self._children: dict[str, _Heartbeat] = {}

    def running(self, name: str, start: int, now: float) -> None:
        """The child runs; `start` counts its starts."""
        known = self._children.get(name)
        if known is None or known.start != start:
            self._children[name] = _Heartbeat(start, now)

    def ended(self, name: str) -> None:
        self._children.pop(name, None)

    def heard(self, member: Member) -> None:
        """The list shows the member: its heartbeat is heard."""
        child = self._children.get(member.name)
        if child is not None:
            child.incarnation, child.ready, child.silent_since = member.incarnation, member.ready, None

    def lost(self, member: Member, now: float) -> None:
        """The member went off the list."""
        child = self._children.get(member.name)
        if child is not None and child.incarnation == member.incarnation:
            child.silent_since = now - self._dead_after_s

    def registry(self, name: str, heard_at: float, now: float) -> None:
        """The registry last spoke at `heard_at`. It is a child without an entry on the list."""
        child = self._children.get(name)
        if child is not None and heard_at > now - REGISTRY_S:
            child.silent_since, child.ready, child.incarnation = None, True, 1
        elif child is not None and child.silent_since is None:
            child.silent_since = heard_at
        if heard_at <= now - REGISTRY_S:
            for other, heartbeat in self._children.items():
                if other != name and heartbeat.silent_since is not None:
                    heartbeat.silent_since = now

    def hung(self, now: float, settled: bool) -> dict[str, float]:
        """Children to be killed, with the seconds of their silence. Each start of a child is named once.

        Before the ring is `settled`, a child that never announced itself is left alone: the first import of its
        packages from a slow disk has no bound.
        """
        found = {}
        for name, child in self._children.items():
            if not self._timeout_s or child.reported or child.silent_since is None:
                continue
            silent_s = now - child.silent_since
            limit_s = self._timeout_s if child.ready else self._timeout_s * STARTING_TIMES
            if silent_s >= limit_s and (settled or child.incarnation):
                child.reported = True
                found[name] = silent_s
        return found
