"""Carries out operators' requests: pause and resume, sleep and wake-up, reset of the prefix cache."""

from blockyard.services.scheduler.batch.worker_groups import WorkerGroups
from blockyard.services.scheduler.outbox import Outbox
from blockyard.services.scheduler.workers.worker_sleep import WorkerSleep
from blockyard.shared.messages import Control, Controlled, ControlVerb


class Controls:
    def __init__(self, groups: WorkerGroups, sleep: WorkerSleep, outbox: Outbox, may_sleep: bool) -> None:
        """`may_sleep`: the workers were started with sleep mode."""
        self.paused = False  # no sequence starts
        self.frozen = False  # no sequence runs
        self._groups, self._sleep, self._outbox, self._may_sleep = groups, sleep, outbox, may_sleep
        self.open: list[tuple[int, Control]] = []  # by gateway, until they are done

    @property
    def phase(self) -> str:
        """Empty during normal operation."""
        return "asleep" if self._sleep.level else "paused" if self.paused else ""

    def take(self, gateway: int, frame: Control, now: float) -> None:
        """Starts to carry out a request. `answer_done` answers it, now or later."""
        match frame.verb:
            case ControlVerb.RESET_PREFIX_CACHE:
                self._sleep.reset_prefix_cache(now)
            case ControlVerb.PAUSE:
                self.paused, self.frozen = True, not frame.drain
                if frame.clear_cache and not frame.drain:
                    self._sleep.reset_prefix_cache(now)
            case ControlVerb.RESUME:
                self.paused = self.frozen = False
            case ControlVerb.SLEEP if not self._may_sleep:
                self._answer(gateway, frame, 400, "sleep needs a server that was started with --enable-sleep-mode")
                return
            case ControlVerb.SLEEP if not 1 <= frame.level <= 2:
                self._answer(gateway, frame, 400, f"level must be 1 or 2, got {frame.level}")
                return
            case ControlVerb.SLEEP:
                self._sleep.sleep(frame.level)
            case ControlVerb.WAKE_UP:
                self._sleep.wake(now, frame.tags)
        self.open.append((gateway, frame))
        self.answer_done(now)

    def answer_done(self, now: float) -> None:
        """Answers requests that are done. To be called after every change."""
        still: list[tuple[int, Control]] = []
        for gateway, frame in self.open:
            if frame.verb is ControlVerb.WAKE_UP and self._sleep.level and not self._sleep.has_restored(frame.tags):
                self._answer(gateway, frame, 409, "the workers were put to sleep again")
            elif frame.verb is ControlVerb.SLEEP and not self._sleep.level:
                self._answer(gateway, frame, 409, "the workers were woken up again")
            elif not self._is_done(frame):
                still.append((gateway, frame))
            else:
                if frame.verb is ControlVerb.PAUSE and frame.drain and frame.clear_cache:
                    self._sleep.reset_prefix_cache(now)
                self._answer(gateway, frame, 200, "")
        self.open = still

    def on_lost(self, member: int) -> None:
        self._sleep.on_lost(member)
        self.open = [(gateway, frame) for gateway, frame in self.open if gateway != member]

    def _is_done(self, frame: Control) -> bool:
        groups = self._groups.attached.values()
        match frame.verb:
            case ControlVerb.PAUSE if frame.drain:
                return not any(group.running or group.in_flight for group in groups)
            case ControlVerb.PAUSE:
                return not any(group.in_flight for group in groups) and not self._sleep.reattaching
            case ControlVerb.SLEEP:
                return self._sleep.all_asleep
            case ControlVerb.WAKE_UP if self._sleep.level:  # partly
                return self._sleep.all_asleep
            case ControlVerb.WAKE_UP | ControlVerb.RESET_PREFIX_CACHE:
                return not self._sleep.reattaching
        return True

    def _answer(self, gateway: int, frame: Control, status: int, message: str) -> None:
        sleep = self._sleep
        answer = Controlled(frame.request_id, status, message, sleep.level, self.paused, sleep.freed_bytes)
        self._outbox.answer(gateway, answer)
