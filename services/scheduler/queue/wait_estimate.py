"""How long what waits will wait for its seats: what Retry-After says, and what the longest wait is compared with.

A choice waits until others have left their seats. When those that run will leave follows from how long outputs are,
from their `max_tokens`, and from the tokens that a seat gets a second; each seat that is left serves others after that,
as long as each of these takes. Where seats are free, prompts wait for the tokens of steps in place of them.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import pairwise

from blockyard.services.scheduler.batch.step_times import StepLoad
from blockyard.services.scheduler.queue.output_lengths import OutputLimit
from blockyard.services.scheduler.queue.waiting_queue import WaitingQueue
from blockyard.services.scheduler.sequences.requests import QueueAmount, RunningSequence
from blockyard.services.scheduler.workers.worker_groups import WorkerGroup

SAMPLE_S = 0.25  # between looks at what the seats got
LOOK_S = 0.5  # between looks at who runs; a look costs a millisecond
HALF_LIFE_S = 5.0  # of what was measured
LEAST_S = 0.5  # seconds of seats without which nothing is known
NUM_SAMPLES = 48  # of those that run
NUM_POINTS = 28  # in time
PARTS = 12  # of the time that a choice takes on average, for how often a seat changes hands

Curve = Callable[[float], float]


@dataclass(frozen=True, slots=True)
class StartForecast:
    """Choices that will have been seated, by seconds from a moment; both rise. Beyond the last point it goes on so."""

    since_s: float
    since: int  # choices that had been seated by then
    seconds: list[float]
    seated: list[float]
    per_s: float

    def until(self, num_dequeued: int, now: float) -> float:
        """Seconds until so many have been seated in all."""
        seated, passed = self.seated, now - self.since_s
        num = num_dequeued - self.since
        place = bisect_left(seated, num)
        if place == 0:
            return max(0.0, self.seconds[0] - passed)
        if place == len(seated):
            return max(0.0, self.seconds[-1] + (num - seated[-1]) / max(self.per_s, 1e-9) - passed)
        (x0, x1), (y0, y1) = seated[place - 1 : place + 1], self.seconds[place - 1 : place + 1]
        return max(0.0, y0 + (y1 - y0) * (num - x0) / (x1 - x0) - passed)


class WaitEstimate:
    def __init__(self, waiting: WaitingQueue, groups: dict[int, WorkerGroup]) -> None:
        self._waiting, self._groups = waiting, groups
        self._now: float | None = None  # the last sample
        self._forecast_at = 0.0
        self._forecast: StartForecast | None = None
        self._counted = (0, 0, 0)  # tokens sampled, of prompts computed, and known of those seated, so far
        self._drawn = self._seat_s = 0.0  # tokens, and seconds of all seats in which they came
        self._computed = self._seated = 0.0  # tokens of prompts, and those known of the choices that were seated
        self._num_running = 0

    def sample(self, now: float, num_drawn: int, num_computed: int) -> None:
        """Once a turn, with the tokens that were sampled, and computed of prompts, so far."""
        if self._now is not None and now < self._now + SAMPLE_S:
            return
        counted = (num_drawn, num_computed, self._waiting.num_dequeued_tokens)
        num_running = sum(len(group.running) for group in self._groups.values())
        if self._now is not None:
            passed = now - self._now
            fade = 0.5 ** (passed / HALF_LIFE_S)
            sampled, prefilled, seated = (at - before for at, before in zip(counted, self._counted, strict=True))
            seat_s = passed * (num_running + self._num_running) / 2
            if seat_s:  # while nobody runs nothing is learned
                self._drawn, self._seat_s = self._drawn * fade + sampled, self._seat_s * fade + seat_s
            if seated or prefilled:
                self._computed, self._seated = self._computed * fade + prefilled, self._seated * fade + seated
        self._now, self._counted, self._num_running = now, counted, num_running

    def seconds(self, amount: QueueAmount) -> float:
        """Until a newcomer behind so much has a seat, as of the last tick; 0 if nothing waits or nothing is known."""
        now = self._now
        if now is None or not amount.sequences or self._seat_s < LEAST_S:
            return 0.0
        if self._groups and (self._forecast is None or now >= self._forecast_at + LOOK_S):
            self._forecast_at, self._forecast = now, self._make_forecast(now)
        if self._forecast is None:
            return 0.0
        return max(
            self._forecast.until(self._waiting.num_dequeued + amount.sequences + 1, now), self._prefill_s(amount.tokens)
        )

    def _prefill_s(self, num_tokens: int) -> float:
        """What it takes to compute these prompts, less what is found of them, in steps that are full."""
        per_s = 0.0
        for group in self._groups.values():
            num_running = len(group.running)
            most = max(1, group.max_num_batched_tokens - num_running)
            step_s = group.pacer.times.expected_s(StepLoad(num_running, most))
            per_s += most / step_s if step_s > 0 else 0.0
        if not per_s:
            return 0.0
        share = min(1.0, self._computed / self._seated) if self._seated else 1.0
        return num_tokens * share / per_s

    def _make_forecast(self, now: float) -> StartForecast:
        """When those that run will have left their seats, and those that come after them."""
        sequences = [running for group in self._groups.values() for running in group.running]
        stride = max(1, -(-len(sequences) // NUM_SAMPLES))
        sampled = sequences[stride // 2 :: stride] or sequences[:1]
        weight = len(sequences) / len(sampled) if sampled else 0.0
        ages = [(len(running.sequence.outputs), _limit(running)) for running in sampled]
        survival = self._waiting.output_lengths.survival([age for age, limit in ages if not limit.is_fixed], weight)
        fresh = self._waiting_limits() or [(limit, 1 / len(ages)) for _, limit in ages]
        mean = sum(share * survival.left(0, limit) for limit, share in fresh)
        left = [survival.left(age, limit) for age, limit in ages]
        free = self._num_free(mean, weight * sum(left))
        num_seats = len(sequences) + free
        speed = self._speed(num_seats)
        mean_s = max(mean / speed, 1e-6)
        parts = [mean * i / PARTS for i in range(NUM_POINTS + 1)]
        ends = (survival.gone(0, limit, parts) for limit, _ in fresh)
        renewed = _renewals(mean_s, _summed(ends, [share for _, share in fresh], len(parts)))
        horizon = 2 * (self._waiting.usage.amount.sequences + 1) * mean_s / max(num_seats, 1)
        horizon = max(horizon + sum(left) / max(len(left), 1) / speed, 1e-3)
        times = [horizon * (i / NUM_POINTS) ** 2 for i in range(NUM_POINTS + 1)]
        tokens = [speed * t for t in times]
        leaving = _summed((survival.gone(age, limit, tokens) for age, limit in ages), [weight] * len(ages), len(times))
        steps = [(t, after - before) for (before, after), t in zip(pairwise(leaving), times[1:], strict=True)]
        seated = [free * (1 + renewed(t)) for t in times]
        for i, t in enumerate(times):
            seated[i] += sum(num * (1 + renewed(t - at)) for at, num in steps[:i])
        return StartForecast(now, self._waiting.num_dequeued, times, seated, num_seats / mean_s)

    def _speed(self, num_seats: float) -> float:
        """Tokens of a seat a second: as measured, but no more than there are steps a second with so many seats."""
        speed = max(self._drawn / self._seat_s, 1e-9)
        load = StepLoad(int(num_seats / len(self._groups)), 0)
        slowest_s = max(group.pacer.times.expected_s(load) for group in self._groups.values())
        return min(speed, 1 / slowest_s) if slowest_s > 0 else speed

    def _waiting_limits(self) -> list[tuple[OutputLimit, float]]:
        """The limits of those that wait, close ones as one, and the share of choices that have each."""
        found: dict[tuple[int, bool], tuple[int, int]] = {}
        for (most, fixed), num in self._waiting.output_limits.items():
            key = (most.bit_length(), fixed)
            count, total = found.get(key, (0, 0))
            found[key] = (count + num, total + num * most)
        num_all = sum(count for count, _ in found.values())
        return [(OutputLimit(total // count, fixed), count / num_all) for (_, fixed), (count, total) in found.items()]

    def _num_free(self, mean: float, left: float) -> float:
        """Seats that are free and have blocks, where those that run will take so many more tokens together."""
        amount, free = self._waiting.usage.amount, 0.0
        num_total = sum(len(group.running) for group in self._groups.values())
        known = amount.tokens / max(amount.sequences, 1)
        for group in self._groups.values():
            pool, num_running = group.kv_cache.blocks, len(group.running)
            held = sum(len(running.table.blocks) - running.table.num_freed for running in group.running)
            shared = pool.num_used / held if held else 1.0
            growth = left * num_running / max(num_total, 1) / 2
            room = (pool.num_ids - pool.num_used) * pool.block_size - growth
            fits = max(0.0, room / max(known * shared + mean / 2, 1.0))
            free += min(group.max_num_seqs - num_running, fits)
        return free


def _limit(running: RunningSequence) -> OutputLimit:
    request = running.sequence.request
    return OutputLimit(running.max_num_tokens - request.num_prompt, request.has_fixed_length)


def _summed(columns: Iterable[list[float]], weights: list[float], size: int) -> list[float]:
    total = [0.0] * size
    for column, weight in zip(columns, weights, strict=True):
        total = [value + weight * more for value, more in zip(total, column, strict=True)]
    return total


def _renewals(mean_s: float, gone: list[float]) -> Curve:
    """How often a seat changes hands within some seconds of being taken, by how likely its choice has left it.

    `gone`: that, at each `PARTS`-th of the time that a choice takes on average.
    """
    steps = [after - before for before, after in pairwise(gone)]
    counts = [0.0]
    for n in range(1, len(gone)):
        counts.append(sum(steps[j] * (1 + counts[n - 1 - j]) for j in range(n)))

    def renewed(seconds: float) -> float:
        place = PARTS * seconds / mean_s
        low = int(place)
        if low >= len(counts) - 1:
            return counts[-1] + (place - len(counts) + 1) / PARTS
        return counts[low] + (counts[low + 1] - counts[low]) * (place - low)

    return renewed
