"""Decides when the next plan of a worker is sent: just early enough that the device does not wait for it.

A request that arrives after a plan was sent waits for the next plan, so plans should be sent late. The next plan is
sent when the steps in flight have little time left to run. `StepTimes` predicts that time.
"""

import heapq
import math
from collections import deque
from typing import NamedTuple

SEND_AHEAD_S = 0.002  # device time left when the next plan is sent: two hops, building the plan, its launch, jitter
SEND_AHEAD_PER_ROW_S = 4e-6  # more for each sequence, which scheduler, link and worker all process
MAX_SEND_AHEAD_S = 0.008
LATE_S = 0.0003  # a step is late if it began this long after it could, or was launched this shortly before its end
AHEAD_FADE = 0.99  # of the time added for late steps, with each step
MAX_PLANS_AHEAD = 7  # plans in flight besides the running one
TIMER_SLACK_S = 0.001  # precision of the operating system's timers

HALF_LIFE_FADE = 0.5 ** (1 / 32)  # of the weight of a step, with each later step
DECODES, TOKENS = 64.0, 512.0  # units of the fit, so that its three times are of one size
MOST_TOKENS = 1 << 30
PRIOR = 0.02  # weight of the previous fit, in steps


class PlanClock:
    """The numbers of the last plan sent to a worker and of the last plan with a result."""

    __slots__ = ("last_completed", "last_sent")

    def __init__(self) -> None:
        self.last_sent = 0
        self.last_completed = 0

    def on_sent(self, number: int) -> None:
        self.last_sent = number

    def on_completed(self, number: int) -> None:
        self.last_completed = number


class StepLoad(NamedTuple):
    """The work in a plan."""

    decodes: int  # sequences that get one more token
    tokens: int  # of prompts


class StepTimes:
    """Predicts the time of a step, from the steps that were measured.

    A step takes a fixed time, a time for each decode, and a time for each token of a prompt. The three are fitted by
    least squares with a half-life, and with a small weight on their previous values, so that what the steps cannot tell
    apart stays as it was. Context length is left out: it changes slowly, and the fit follows it.
    """

    def __init__(self, step_s: float) -> None:
        """`step_s`: time of a step with one decode, 0 if unknown."""
        self.num_steps = 0
        self._base, self._decode, self._token = step_s, 0.0, 0.0  # seconds: fixed, of DECODES decodes, of TOKENS tokens
        self._off_s = 0.0  # average error of recent predictions
        self._sums = (0.0,) * 9  # weighted, over steps of d decodes, t tokens, y s: 1, d, t, dd, dt, tt, y, dy, ty

    @property
    def is_known(self) -> bool:
        return self.num_steps > 0 or self._base > 0

    def expected_s(self, load: StepLoad) -> float:
        """Seconds of a step."""
        return self._base + self._decode * load.decodes / DECODES + self._token * load.tokens / TOKENS

    def tokens_within(self, seconds: float) -> int:
        """How many prompt tokens lengthen a step by so many seconds; MOST_TOKENS if that is unknown."""
        return int(seconds * TOKENS / self._token) if self._token * MOST_TOKENS > seconds * TOKENS else MOST_TOKENS

    def lower_bound(self, load: StepLoad) -> float:
        """Seconds that nearly every step of this load takes at least."""
        expected = self.expected_s(load)
        return max(expected - 2 * self._off_s, expected / 2)

    def record(self, load: StepLoad, step_s: float) -> None:
        if step_s <= 0:
            return  # the worker does not say
        off_s = abs(step_s - self.expected_s(load))
        self._off_s += (min(off_s, step_s) - self._off_s) / 16 if self.num_steps else 0.0
        self.num_steps += 1
        d, t = load.decodes / DECODES, load.tokens / TOKENS
        n, sd, st, sdd, sdt, stt, sy, sdy, sty = self._sums
        self._sums = (
            n * HALF_LIFE_FADE + 1.0,
            sd * HALF_LIFE_FADE + d,
            st * HALF_LIFE_FADE + t,
            sdd * HALF_LIFE_FADE + d * d,
            sdt * HALF_LIFE_FADE + d * t,
            stt * HALF_LIFE_FADE + t * t,
            sy * HALF_LIFE_FADE + step_s,
            sdy * HALF_LIFE_FADE + d * step_s,
            sty * HALF_LIFE_FADE + t * step_s,
        )
        self._fit()

    def _fit(self) -> None:
        """Solves the normal equations by elimination; no time is below 0."""
        n, d, t, dd, dt, tt, y, dy, ty = self._sums
        n, dd, tt = n + PRIOR, dd + PRIOR, tt + PRIOR
        y, dy, ty = y + PRIOR * self._base, dy + PRIOR * self._decode, ty + PRIOR * self._token
        a, b = d / n, t / n
        dd, dt, dy = dd - a * d, dt - a * t, dy - a * y
        tt, ty = tt - b * t, ty - b * y
        c = dt / dd
        token = (ty - c * dy) / (tt - c * dt)
        token = token if token > 0.0 else 0.0
        decode = (dy - dt * token) / dd
        decode = decode if decode > 0.0 else 0.0
        base = (y - d * decode - t * token) / n
        self._base, self._decode, self._token = base if base > 0.0 else 0.0, decode, token


class PlanPacer:
    """Predicts when the plans in flight of a group will be done."""

    def __init__(self, step_s: float, ahead: int | None) -> None:
        """`step_s`: time of a step with one decode, 0: unknown. `ahead`: plans sent ahead at once; None: by time."""
        self.times = StepTimes(step_s)
        self._ahead = ahead
        # of each plan: its load, the least time that it takes, and whether another plan was in flight when it was sent
        self._in_flight: deque[tuple[StepLoad, float, bool]] = deque()
        self._under_way_s = 0.0  # sum of these times
        self._oldest_began_s = 0.0
        self._extra_ahead_s = 0.0  # added because steps were late
        self._ended_s = 0.0  # the last step, by its worker's clock

    @property
    def text(self) -> str:
        """For the start-up report."""
        if self._ahead is None:
            return f"plans leave {1000 * SEND_AHEAD_S:.0f} ms before the device needs them"
        return f"{self._ahead} plan{'s' if self._ahead != 1 else ''} ahead"

    @property
    def next_send_s(self) -> float:
        """When the next plan may be sent; infinity: after the next result."""
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
        """The oldest plan in flight has a result.

        `step_s`: time of its step; `launch_s`: time of the worker's host to launch it; `ended_s`: its end by the
        worker's clock.
        """
        load, seconds, followed = self._in_flight.popleft()
        self._under_way_s -= seconds
        self._oldest_began_s = now
        late_s = ended_s - self._ended_s - step_s if followed else 0.0
        if followed and launch_s > step_s - LATE_S and launch_s > SEND_AHEAD_S:
            late_s = max(late_s, launch_s)  # the device waited for the host: an earlier launch would have ended earlier
        self._ended_s = ended_s
        self._extra_ahead_s *= AHEAD_FADE
        if late_s > LATE_S:
            self._extra_ahead_s = min(self._extra_ahead_s + late_s, MAX_SEND_AHEAD_S)
        self.times.record(load, step_s)


class WakeupTimers:
    """Times at which the next plan of a worker group may be sent."""

    def __init__(self) -> None:
        self.heap: list[tuple[float, int]] = []  # time and worker
        self._next_s: dict[int, float] = {}  # the timer that counts, by worker

    def may_send(self, worker: int, pacer: PlanPacer, now: float) -> bool:
        """Whether the next plan may be sent now. If it may be sent later without a result, sets a timer."""
        send_s = pacer.next_send_s - TIMER_SLACK_S
        if send_s <= now:
            return True
        if send_s < self._next_s.get(worker, math.inf):
            self._next_s[worker] = send_s
            heapq.heappush(self.heap, (send_s, worker))
        return False

    def next(self) -> float | None:
        return self.heap[0][0] if self.heap else None

    def take_due(self, now: float) -> list[int]:
        """Removes and returns the workers that are due."""
        workers = []
        while self.heap and self.heap[0][0] <= now:
            send_s, worker = heapq.heappop(self.heap)
            if self._next_s.get(worker) == send_s:
                del self._next_s[worker]
                workers.append(worker)
        return workers
