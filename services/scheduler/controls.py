"""What an operator asks for: pause and resume, sleep and wake, a prefix cache that knows nothing.

Each is done by what is there for other ends. A group whose KV is not to count any more is taken as lost, so that its
requests wait with the tokens that are known, and its worker is asked to attach again; one that sleeps is asked when it
is woken up.
"""

from collections.abc import Callable

from blockyard.services.scheduler.gate import Gate
from blockyard.services.scheduler.groups import Group, Groups
from blockyard.services.scheduler.outbox import Outbox
from blockyard.services.scheduler.queue_bounds import QueueBounds
from blockyard.shared.messages import Control, Controlled, Sleep, Slept, Verb


class Controls:
    def __init__(
        self,
        scheduler: int,
        groups: Groups,
        gate: Gate,
        bounds: QueueBounds,
        outbox: Outbox,
        clear: Callable[[Group, str], None],
        may_sleep: bool,
    ) -> None:
        self.level = 0  # of sleep
        self._scheduler, self._may_sleep = scheduler, may_sleep
        self._groups, self._gate, self._bounds, self._outbox, self._clear = groups, gate, bounds, outbox, clear
        self._asleep: dict[int, int | None] = {}  # workers, and the bytes that they freed once they have said so
        self._expected: set[int] = set()  # workers that were asked to attach again
        self._open: list[tuple[int, Control]] = []  # with gateway; answered when done

    @property
    def phase(self) -> str:
        """Empty while everything is as always."""
        return "asleep" if self.level else "paused" if self._gate.paused else ""

    def take(self, gateway: int, frame: Control, now: float) -> None:
        """Answered by `settle`, now or later."""
        match frame.verb:
            case Verb.RESET_PREFIX_CACHE:
                self._renew(now)
            case Verb.PAUSE:
                self._gate.paused, self._gate.frozen = True, not frame.drain
                if frame.clear_cache and not frame.drain:
                    self._renew(now)
            case Verb.RESUME:
                self._gate.paused = self._gate.frozen = False
            case Verb.SLEEP if not self._may_sleep:
                self._answer(gateway, frame, 400, "sleep needs a server that was started with --enable-sleep-mode")
                return
            case Verb.SLEEP if not 1 <= frame.level <= 2:
                self._answer(gateway, frame, 400, f"level must be 1 or 2, got {frame.level}")
                return
            case Verb.SLEEP:
                self._sleep(frame.level)
            case Verb.WAKE_UP:
                self._wake(now)
        self._open.append((gateway, frame))
        self.settle(now)

    def settle(self, now: float) -> None:
        """Answers what is done. To be called whenever something happened."""
        still: list[tuple[int, Control]] = []
        for gateway, frame in self._open:
            if frame.verb is Verb.WAKE_UP and self.level:
                self._answer(gateway, frame, 409, "it was put to sleep again")
            elif frame.verb is Verb.SLEEP and not self.level:
                self._answer(gateway, frame, 409, "it was woken up again")
            elif not self._is_done(frame):
                still.append((gateway, frame))
            elif frame.verb is Verb.PAUSE and frame.drain and frame.clear_cache:
                self._renew(now)
                self._answer(gateway, frame, 200, "")
            else:
                self._answer(gateway, frame, 200, "")
        self._open = still

    def attached(self, group: Group) -> None:
        """A group is there. One that comes while all others sleep is put to sleep."""
        self._expected.discard(group.worker)
        if self.level:
            self._rest(group)

    def slept(self, worker: int, frame: Slept) -> None:
        if worker in self._asleep and frame.level >= self.level:
            self._asleep[worker] = frame.freed_bytes

    def gone(self, member: int) -> None:
        self._asleep.pop(member, None)
        self._expected.discard(member)
        self._open = [(gateway, frame) for gateway, frame in self._open if gateway != member]

    def rests(self, worker: int) -> bool:
        return worker in self._asleep

    def _is_done(self, frame: Control) -> bool:
        groups = self._groups.attached.values()
        match frame.verb:
            case Verb.PAUSE if frame.drain:
                return not any(group.running or group.flight for group in groups)
            case Verb.PAUSE:
                return not any(group.flight for group in groups) and not self._expected
            case Verb.SLEEP:
                return all(freed is not None for freed in self._asleep.values())
            case Verb.WAKE_UP | Verb.RESET_PREFIX_CACHE:
                return not self._expected
        return True

    def _renew(self, now: float) -> None:
        """Nothing that any group holds is found any more. What runs is computed again."""
        for group in list(self._groups.attached.values()):
            self._lose(group)
            self._ask(group.worker, now, forget=True)

    def _sleep(self, level: int) -> None:
        if level <= self.level:
            return
        self.level, self._bounds.asleep = level, True
        for worker in self._asleep:
            self._asleep[worker] = None
            self._outbox.send(worker, Sleep(self._scheduler, level))
        for group in list(self._groups.attached.values()):
            self._rest(group)

    def _wake(self, now: float) -> None:
        self.level, self._bounds.asleep = 0, False
        asleep, self._asleep = self._asleep, {}
        for worker in asleep:
            self._ask(worker, now)

    def _rest(self, group: Group) -> None:
        self._lose(group)
        self._asleep[group.worker] = None
        self._outbox.send(group.worker, Sleep(self._scheduler, self.level))

    def _lose(self, group: Group) -> None:
        self._groups.detach(group.worker)
        self._clear(group, "is asked to begin anew")

    def _ask(self, worker: int, now: float, forget: bool = False) -> None:
        self._expected.add(worker)
        self._outbox.send(worker, self._groups.ask(worker, now, forget))

    def _answer(self, gateway: int, frame: Control, status: int, message: str) -> None:
        freed = sum(freed or 0 for freed in self._asleep.values())
        answer = Controlled(frame.request_id, status, message, self.level, self._gate.paused, freed)
        self._outbox.answer(gateway, answer)
