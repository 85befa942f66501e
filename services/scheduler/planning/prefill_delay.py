"""Delays the next prompt for a while, so that prompts that arrive close together are computed in the same step."""

from blockyard.services.scheduler.batch.worker_groups import WorkerGroup
from blockyard.services.scheduler.sequences.requests import Request


class PrefillDelay:
    """The next prompt waits for `delay_factor` times the last prefill step's time since its arrival.

    With 0.5 and steps of 0.4 s, prompts that arrive within 0.2 s of each other are computed in the same step, so that
    running sequences are delayed once. A prompt does not wait in a group without running sequences.
    """

    def __init__(self, delay_factor: float) -> None:
        self._delay_factor = delay_factor
        self._over_at = -1.0  # time of the step in which a delay ended: all waiting sequences may start in it
        self._prefill_step_s = 0.0  # time of the last prefill step

    def on_prefill_step(self, step_s: float) -> None:
        self._prefill_step_s = step_s

    def is_over(self, request: Request, group: WorkerGroup, now: float) -> bool:
        """`request` is the next waiting one of the group."""
        if not group.running or self._over_at == now:
            return True
        if now - request.arrival_s > self._delay_factor * self._prefill_step_s:
            self._over_at = now
            return True
        return False
