"""Whether those who wait are seated now: not while the scheduler is paused, before their delay is over, or beside
somebody who is suspected of breaking workers."""

from blockyard.services.scheduler.sequences.requests import Request, Sequence
from blockyard.services.scheduler.workers.crash_quarantine import CrashQuarantine
from blockyard.services.scheduler.workers.worker_groups import WorkerGroup


class AdmissionDelay:
    """`delay_factor`: the next prompt waits so many times as long as the last step with a prompt took.

    With 0.5 and steps of 0.4 s prompts that come within 0.2 s of each other are computed in the same step, to which
    those that run already lose their time but once. Where nothing runs nobody waits.
    """

    def __init__(self, delay_factor: float) -> None:
        self.paused = False  # nobody is seated
        self.frozen = False  # nobody runs either
        self.quarantine = CrashQuarantine()
        self._delay_factor = delay_factor
        self._now = 0.0
        self._is_open = False  # for all who come after the one that it was opened for, in this turn
        self._prompt_s = 0.0  # the last step with a prompt

    def pause(self, freeze: bool) -> None:
        """No sequence is scheduled for the first time; with `freeze` none runs."""
        self.paused, self.frozen = True, freeze

    def resume(self) -> None:
        self.paused = self.frozen = False

    def begin_step(self, now: float) -> None:
        self._now, self._is_open = now, False
        if self.quarantine:
            self.quarantine.update()

    def on_prefill_step(self, step_s: float) -> None:
        """A step with a prompt."""
        self._prompt_s = step_s

    def on_scheduled(self, sequence: Sequence) -> None:
        """Notes how long it waited for its first seat."""
        if sequence.queued_s is None:
            sequence.queued_s = max(0.0, self._now - sequence.request.arrival_s)

    def next_probation(self, group: WorkerGroup) -> Sequence | None:
        """Who is to be seated in this group before whoever is next."""
        return self.quarantine.next_for(group) if self.quarantine else None

    def may_admit(self, request: Request, group: WorkerGroup) -> bool:
        """For the request that is next."""
        num_running = len(group.running)
        if self.paused or (self.quarantine and not self.quarantine.may_run(group, request, self._now)):
            return False
        if not self._delay_factor or not num_running:
            return True
        if not self._is_open:
            self._is_open = self._now - request.arrival_s > self._delay_factor * self._prompt_s
        return self._is_open
