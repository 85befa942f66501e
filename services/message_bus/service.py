"""The registry's loop: receives announcements, decides which members are alive, sends the list when it changes."""

import threading

import msgspec

from blockyard.shared.bus.registry_socket import RegistrySocket
from blockyard.shared.messages import Announce, Frame, Leave, LinkLost, Member, Members, Stats
from blockyard.shared.process.awake_clock import AwakeClock
from blockyard.shared.process.liveness import LivenessPipe

PUSH_STATS_S = 0.5
PUSH_S = 1.0  # a member that hears no list for three times as long dials anew

_NO_STATS = Stats()


class Membership:
    """The membership list. Times are seconds of one monotonic clock."""

    def __init__(self, now: float, dead_after_s: float, settle_s: float) -> None:
        self._settled_at = now + settle_s
        self._dead_after_s = dead_after_s
        self._heard: dict[int, float] = {}  # incarnation -> last heartbeat
        self._members: dict[int, Member] = {}
        self._changed = False
        self._stats_changed = False
        self._pushed_at = now
        self._was_settled = False

    def settled(self, now: float) -> bool:
        """True once a missing member counts as lost: every live one has announced itself since the start."""
        return now >= self._settled_at

    def members(self) -> list[Member]:
        return list(self._members.values())

    def apply(self, frame: Frame, now: float) -> None:
        """Applies one frame. A member that announces itself is alive, even after a report of its loss."""
        match frame:
            case Announce(member):
                self._announce(member, now)
            case Leave(incarnation) | LinkLost(incarnation):
                self._remove(incarnation)

    def due(self, now: float) -> bool:
        """Removes silent members. Returns True if the list is due now: at once after a change, 0.5 s after the last
        one if only counters have changed, 1 s after it otherwise.
        """
        for incarnation, heard in list(self._heard.items()):
            if now - heard > self._dead_after_s:
                self._remove(incarnation)
        if self.settled(now) and not self._was_settled:
            self._was_settled = self._changed = True
        due = self._changed or now - self._pushed_at >= (PUSH_STATS_S if self._stats_changed else PUSH_S)
        if due:
            self._changed = self._stats_changed = False
            self._pushed_at = now
        return due

    def _announce(self, member: Member, now: float) -> None:
        before = self._members.get(member.incarnation)
        if before is None:
            for other in list(self._members.values()):
                if (other.name, other.role) == (member.name, member.role):  # the new member is its next incarnation
                    self._remove(other.incarnation)
        self._members[member.incarnation] = member
        self._heard[member.incarnation] = now
        if before is None or _without_stats(before) != _without_stats(member):
            self._changed = True
        elif before != member:
            self._stats_changed = True

    def _remove(self, incarnation: int) -> None:
        if self._members.pop(incarnation, None) is not None:
            del self._heard[incarnation]
            self._changed = True


def _without_stats(member: Member) -> Member:
    return msgspec.structs.replace(member, stats=_NO_STATS)


TICK_S = 0.1
LONGEST_TURN_S = 0.5  # of the loop: more time was none in which a heartbeat could arrive


class Registry:
    """Serves the list. The time in which this process stands still counts for no member's silence."""

    def __init__(self, socket: RegistrySocket, membership: Membership, liveness: LivenessPipe | None = None) -> None:
        self._socket, self._membership = socket, membership
        self._liveness = liveness or LivenessPipe(None)

    def run(self, stopped: threading.Event) -> None:
        """Serves until `stopped` is set."""
        clock = AwakeClock(LONGEST_TURN_S)
        while not stopped.is_set():
            self._liveness.turned()
            frames = self._socket.poll(TICK_S)
            now = clock.now()
            for frame in frames:
                self._membership.apply(frame, now)
            due = self._membership.due(now)
            if due or self._socket.has_requests:
                news = Members(self._membership.settled(now), self._membership.members())
                if due:
                    self._socket.push(news)
                self._socket.answer(news)
