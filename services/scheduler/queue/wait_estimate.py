"""Estimates how long a new request waits for its slot: for Retry-After, and to compare with the maximum delay.

A waiting sequence starts when running ones end. When they end follows from how long outputs are, from their
`max_tokens`, and from the tokens a second of a slot. Each slot that becomes free serves further sequences in the same
way. If slots are free, prompts wait for the token budget of steps only. Slots and blocks of batch lines count as free:
they give way.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import islice, pairwise

from blockyard.services.scheduler.batch.worker_groups import WorkerGroup
from blockyard.services.scheduler.plan_pacer import StepLoad
from blockyard.services.scheduler.queue.output_lengths import OutputLimit
from blockyard.services.scheduler.queue.waiting_queue import WaitingQueue
from blockyard.services.scheduler.sequences.requests import QueueAmount, RunningSequence

SAMPLE_S = 0.25  # between samples of the tokens that were generated
LOOK_S = 0.5  # between forecasts; one costs a millisecond
HALF_LIFE_S = 5.0  # of measured rates
LEAST_S = 0.5  # slot seconds below which nothing is estimated
NUM_SAMPLES = 48  # of running sequences
NUM_GROUPS = 64  # read for each estimate
NUM_POINTS = 28  # on the time axis
PARTS = 12  # of the mean time of a sequence, as resolution for `_renewals`

Curve = Callable[[float], float]


@dataclass(frozen=True, slots=True)
class StartForecast:
    """How many sequences will have started at points in time. After the last point, `per_s` start each second."""

    since_s: float
    since: int  # sequences that had started by then
    seconds: list[float]
    started: list[float]
    per_s: float

    def until(self, num_dequeued: int, now: float) -> float:
        """Seconds until `num_dequeued` sequences have started in all."""
        started, passed = self.started, now - self.since_s
        num = num_dequeued - self.since
        place = bisect_left(started, num)
        if place == 0:
            return max(0.0, self.seconds[0] - passed)
        if place == len(started):
            return max(0.0, self.seconds[-1] + (num - started[-1]) / max(self.per_s, 1e-9) - passed)
        (x0, x1), (y0, y1) = started[place - 1 : place + 1], self.seconds[place - 1 : place + 1]
        return max(0.0, y0 + (y1 - y0) * (num - x0) / (x1 - x0) - passed)


class WaitEstimate:
    def __init__(self, waiting: WaitingQueue, groups: Mapping[int, WorkerGroup]) -> None:
        self._waiting, self._groups = waiting, groups
        self._now: float | None = None  # the last sample
        self._forecast_at = 0.0
        self._forecast: StartForecast | None = None
        self._counted = (0, 0, 0)  # totals: tokens sampled, prompt tokens computed, tokens of started sequences
        self._sampled = self._slot_s = 0.0  # tokens sampled, and the slot seconds that they took
        self._computed = self._started = 0.0  # prompt tokens computed, and tokens of started sequences
        self._num_running = 0
        self.next_sample_s = 0.0  # when to call `sample`

    def sample(self, now: float, num_sampled: int, num_computed: int) -> None:
        """To be called from `next_sample_s` on, with the totals of sampled tokens and of computed prompt tokens."""
        counted = (num_sampled, num_computed, self._waiting.num_dequeued_tokens)
        num_running = sum(len(group.running) for group in self._groups.values())
        if self._now is not None:
            passed = now - self._now
            fade = 0.5 ** (passed / HALF_LIFE_S)
            sampled, prefilled, started = (at - before for at, before in zip(counted, self._counted, strict=True))
            slot_s = passed * (num_running + self._num_running) / 2
            if slot_s:  # nothing is learned while no sequence runs
                self._sampled, self._slot_s = self._sampled * fade + sampled, self._slot_s * fade + slot_s
            if started or prefilled:
                self._computed, self._started = self._computed * fade + prefilled, self._started * fade + started
        self.next_sample_s = now + SAMPLE_S
        self._now, self._counted, self._num_running = now, counted, num_running

    def seconds(self, amount: QueueAmount) -> float:
        """Seconds until a new request behind `amount` starts; 0 if nothing waits or nothing is known."""
        now = self._now
        if now is None or not amount.sequences:
            return 0.0
        if not any(group.has_kv for group in self._groups.values()):
            return self._prefill_s(amount.tokens)  # texts wait for the token budget of steps only
        if self._slot_s < LEAST_S:
            return 0.0
        if self._groups and (self._forecast is None or now >= self._forecast_at + LOOK_S):
            self._forecast_at, self._forecast = now, self._make_forecast(now)
        if self._forecast is None:
            return 0.0
        return max(
            self._forecast.until(self._waiting.num_dequeued + amount.sequences + 1, now), self._prefill_s(amount.tokens)
        )

    def _prefill_s(self, num_tokens: int) -> float:
        """Seconds to compute prompts of so many tokens in full steps, less the usual share of cached tokens.

        Of many groups, some stand for all: this is called for each request that is accepted while others wait.
        """
        per_s, stride = 0.0, -(-len(self._groups) // NUM_GROUPS) or 1
        for group in islice(self._groups.values(), stride // 2, None, stride):
            num_running = len(group.running)
            most = max(1, group.max_num_batched_tokens - num_running)
            step_s = group.pacer.times.expected_s(StepLoad(num_running, most))
            per_s += stride * most / step_s if step_s > 0 else 0.0
        if not per_s:
            return 0.0
        share = min(1.0, self._computed / self._started) if self._started else 1.0
        return num_tokens * share / per_s

    def _make_forecast(self, now: float) -> StartForecast:
        """Forecasts when running sequences end, and the ones that start in their slots."""
        sequences = [running for group in self._groups.values() for running in _online(group)]
        stride = max(1, -(-len(sequences) // NUM_SAMPLES))
        sampled = sequences[stride // 2 :: stride] or sequences[:1]
        weight = len(sequences) / len(sampled) if sampled else 0.0
        ages = [(len(running.sequence.outputs), _limit(running)) for running in sampled]
        survival = self._waiting.output_lengths.survival([age for age, limit in ages if not limit.is_fixed], weight)
        fresh = self._waiting_limits() or [(limit, 1 / len(ages)) for _, limit in ages]
        mean = sum(share * survival.left(0, limit) for limit, share in fresh)
        left = [survival.left(age, limit) for age, limit in ages]
        free = self._num_free(mean, weight * sum(left))
        num_slots = len(sequences) + free
        speed = self._speed(num_slots)
        mean_s = max(mean / speed, 1e-6)
        parts = [mean * i / PARTS for i in range(NUM_POINTS + 1)]
        ends = (survival.gone(0, limit, parts) for limit, _ in fresh)
        renewed = _renewals(mean_s, _summed(ends, [share for _, share in fresh], len(parts)))
        horizon = 2 * (self._waiting.usage.amount.sequences + 1) * mean_s / max(num_slots, 1)
        horizon = max(horizon + sum(left) / max(len(left), 1) / speed, 1e-3)
        times = [horizon * (i / NUM_POINTS) ** 2 for i in range(NUM_POINTS + 1)]
        tokens = [speed * t for t in times]
        leaving = _summed((survival.gone(age, limit, tokens) for age, limit in ages), [weight] * len(ages), len(times))
        steps = [(t, after - before) for (before, after), t in zip(pairwise(leaving), times[1:], strict=True)]
        started = [free * (1 + renewed(t)) for t in times]
        for i, t in enumerate(times):
            started[i] += sum(num * (1 + renewed(t - at)) for at, num in steps[:i])
        return StartForecast(now, self._waiting.num_dequeued, times, started, num_slots / mean_s)

    def _speed(self, num_slots: float) -> float:
        """Tokens a second of a slot: as measured, but at most the steps a second with `num_slots` slots in use."""
        speed = max(self._sampled / self._slot_s, 1e-9)
        load = StepLoad(int(num_slots / len(self._groups)), 0)
        slowest_s = max(group.pacer.times.expected_s(load) for group in self._groups.values())
        return min(speed, 1 / slowest_s) if slowest_s > 0 else speed

    def _waiting_limits(self) -> list[tuple[OutputLimit, float]]:
        """The output limits of waiting sequences, similar ones merged, with the share of sequences that have each."""
        found: dict[tuple[int, bool], tuple[int, int]] = {}
        for (most, fixed), num in self._waiting.output_limits.items():
            key = (most.bit_length(), fixed)
            count, total = found.get(key, (0, 0))
            found[key] = (count + num, total + num * most)
        num_all = sum(count for count, _ in found.values())
        return [(OutputLimit(total // count, fixed), count / num_all) for (_, fixed), (count, total) in found.items()]

    def _num_free(self, mean: float, left: float) -> float:
        """Free slots for which there are blocks, if the running sequences get `left` more tokens in all."""
        amount, free = self._waiting.usage.amount, 0.0
        online = {worker: _online(group) for worker, group in self._groups.items()}
        num_total = sum(len(running) for running in online.values())
        known = amount.tokens / max(amount.sequences, 1)
        for worker, group in self._groups.items():
            pool, num_running = group.kv_cache.blocks, len(online[worker])
            num_held = _num_held(group.running)
            shared = pool.num_used / num_held if num_held else 1.0
            num_used = pool.num_used - shared * (num_held - _num_held(online[worker]))
            growth = left * num_running / max(num_total, 1) / 2
            room = (pool.num_ids - num_used) * pool.block_size - growth
            fits = max(0.0, room / max(known * shared + mean / 2, 1.0))
            free += min(group.max_num_seqs - num_running, fits)
        return free


def _online(group: WorkerGroup) -> list[RunningSequence]:
    return [running for running in group.running if not running.sequence.request.is_batch_line]


def _num_held(running: Iterable[RunningSequence]) -> int:
    return sum(len(one.table.blocks) - one.table.num_freed for one in running)


def _limit(running: RunningSequence) -> OutputLimit:
    request = running.sequence.request
    return OutputLimit(running.max_num_tokens - request.num_prompt, request.has_fixed_length)


def _summed(columns: Iterable[list[float]], weights: list[float], size: int) -> list[float]:
    total = [0.0] * size
    for column, weight in zip(columns, weights, strict=True):
        total = [value + weight * more for value, more in zip(total, column, strict=True)]
    return total


def _renewals(mean_s: float, gone: list[float]) -> Curve:
    """How often a slot changes its sequence within a time after one started in it.

    `gone`: how likely a sequence has ended, at each `PARTS`-th of the mean time of a sequence.
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
