"""Whether the next waiting sequence may start: not while paused, delayed, or beside a quarantined request."""

from blockyard.services.scheduler.batch.worker_groups import WorkerGroup
from blockyard.services.scheduler.sequences.requests import Request
from blockyard.services.scheduler.workers.crash_quarantine import CrashQuarantine


class AdmissionDelay:
    """With `delay_factor`, the next prompt waits for that multiple of the last prefill step's time since its arrival.

    With 0.5 and steps of 0.4 s, prompts that arrive within 0.2 s of each other are computed in the same step, so that
    running sequences are delayed once. A prompt does not wait in a group without running sequences.
    """

    def __init__(self, delay_factor: float) -> None:
        self.paused = False  # no sequence starts
        self.frozen = False  # no sequence runs
        self.quarantine = CrashQuarantine()
        self._delay_factor = delay_factor
        self._over_at = -1.0  # time of the step in which a delay ended: all waiting sequences may start in it
        self._prompt_step_s = 0.0  # time of the last prefill step

    def pause(self, freeze: bool) -> None:
        """No sequence starts; with `freeze` none runs."""
        self.paused, self.frozen = True, freeze

    def resume(self) -> None:
        self.paused = self.frozen = False

    def on_prefill_step(self, step_s: float) -> None:
        self._prompt_step_s = step_s

    def may_admit(self, request: Request, group: WorkerGroup, now: float) -> bool:
        """`request` is the next waiting one of the group."""
        if self.paused or (self.quarantine.probations and not self.quarantine.may_run(group, request, now)):
            return False
        if not self._delay_factor or not group.running or self._over_at == now:
            return True
        if now - request.arrival_s > self._delay_factor * self._prompt_step_s:
            self._over_at = now
            return True
        return False
