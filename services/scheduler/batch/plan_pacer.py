"""When the next plan of a worker leaves: as late as its device will not wait for it.

Who comes while a plan is on its way is not in it. A plan that leaves as soon as there is room for it costs a newcomer
up to a whole step; one that leaves when the steps under way have little left to run costs next to nothing. Steps of
half a millisecond have several plans under way, long ones none but the running one until shortly before its end.
"""

import math
from collections import deque

from blockyard.services.scheduler.batch.step_times import StepLoad, StepTimes

SEND_AHEAD_S = (
    0.002  # device time under way when the next plan leaves: a hop there and back, the plan, its launch, jitter
)
SEND_AHEAD_PER_ROW_S = 4e-6  # more for each choice in it, which scheduler, link and worker all look at
MAX_SEND_AHEAD_S = 0.008
# a step that begins so much later than it could was waited for, and one launched so shortly before its end
LATE_S = 0.0003
FADE = 0.99  # of what was added to the lead, with each step
MAX_PLANS_AHEAD = 7  # plans besides the running one


class PlanPacer:
    """The plans of a group that are in flight, and how long they will take."""

    def __init__(self, step_s: float, ahead: int | None) -> None:
        """`step_s`: of a step with one decode, 0 if that is not known. `ahead`: plans that leave at once."""
        self.times = StepTimes(step_s)
        self._ahead = ahead
        self._in_flight: deque[tuple[StepLoad, float, bool]] = (
            deque()
        )  # what each will take at least; was another under way
        self._under_way_s = 0.0  # what they take together
        self._oldest_began_s = 0.0  # the oldest one
        self._extra_ahead_s = 0.0  # lead, because steps were late
        self._ended_s = 0.0  # the last step, by its worker's clock

    @property
    def text(self) -> str:
        """For people."""
        if self._ahead is None:
            return f"plans leave {1000 * SEND_AHEAD_S:.0f} ms before the device needs them"
        return f"{self._ahead} plan{'s' if self._ahead != 1 else ''} ahead"

    @property
    def next_send_s(self) -> float:
        """When the next plan may leave; infinite: not before a result."""
        num_under_way = len(self._in_flight)
        if not num_under_way:
            return 0.0
        if self._ahead is not None:
            return 0.0 if num_under_way <= self._ahead else math.inf
        load, single_s = self._in_flight[-1][0], self.times.expected_s(StepLoad(1, 0))
        most = min(math.ceil(SEND_AHEAD_S / single_s), MAX_PLANS_AHEAD) if single_s > 0 else 1
        if num_under_way > most:
            return math.inf
        return (
            self._oldest_began_s
            + self._under_way_s
            - min(SEND_AHEAD_S + SEND_AHEAD_PER_ROW_S * load.decodes + self._extra_ahead_s, MAX_SEND_AHEAD_S)
        )

    def on_sent(self, load: StepLoad, now: float) -> None:
        if not self._in_flight:
            self._oldest_began_s, self._under_way_s = now, 0.0
        seconds = self.times.lower_bound(load) if self._ahead is None else 0.0
        self._under_way_s += seconds
        self._in_flight.append((load, seconds, bool(self._in_flight)))

    def on_completed(self, step_s: float, launch_s: float, ended_s: float, now: float) -> None:
        """The oldest plan in flight.

        Its step took so long on its worker, by whose clock it ended then, and the host so long to launch it.
        """
        load, seconds, followed = self._in_flight.popleft()
        self._under_way_s -= seconds
        self._oldest_began_s = now
        late_s = ended_s - self._ended_s - step_s if followed else 0.0
        if followed and launch_s > step_s - LATE_S and launch_s > SEND_AHEAD_S:
            late_s = max(late_s, launch_s)  # the device had to wait for the host: sooner launched, sooner done
        self._ended_s = ended_s
        self._extra_ahead_s *= FADE
        if late_s > LATE_S:
            self._extra_ahead_s = min(self._extra_ahead_s + late_s, MAX_SEND_AHEAD_S)
        self.times.record(load, step_s)
