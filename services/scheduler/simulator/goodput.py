"""The most requests a second that workers serve within latency limits, and the best roles for a number of workers.

A trace is played faster or slower: all arrival times are divided by the same factor. Goodput is the highest rate at
which the 99th percentiles of TTFT and ITL are within their limits. Both searches assume that what is best has no worse
neighbour between it and where they begin, so that few settings are simulated.
"""

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec

from blockyard.services.scheduler.simulator.simulation import Simulation
from blockyard.services.scheduler.simulator.trace import TraceRequest
from blockyard.shared.config.services.simulation import LatencyLimits, SimulatedRole, SimulationConfig
from blockyard.shared.errors import ConfigError
from blockyard.shared.messages import KVRole
from blockyard.shared.percentiles import percentile

STEP_SIZES = (64, 96, 112, 128, 160, 192, 256, 320, 384, 448, 512, 768, 1024, 1536, 2048, 4096, 8192)  # tokens
PRECISION = 0.02  # of a goodput, as a share of it
WIDTH = 34  # of a setup's name
LEAST_SHARE = 1 / 1024  # of the trace's rate, below which no goodput is looked for


@dataclass(frozen=True, slots=True)
class Setup:
    """A way to use the workers."""

    name: str
    roles: list[SimulatedRole]


@dataclass(frozen=True, slots=True)
class Trial:
    """The 99th percentiles of one simulation; None: it was ended early, because one is above its limit."""

    ttft_ms: float | None = None
    itl_ms: float | None = None

    def is_within(self, limits: LatencyLimits) -> bool:
        if self.ttft_ms is None or self.itl_ms is None:
            return False
        return self.ttft_ms <= limits.ttft_ms and self.itl_ms <= limits.itl_ms


@dataclass(frozen=True, slots=True)
class Goodput:
    setup: Setup
    per_s: float  # requests; with `is_less` it has less than this
    trial: Trial
    is_less: bool = False


class LimitWatch:
    """Says when a percentile is above its limit, whatever is still to come."""

    def __init__(self, simulation: Simulation, limits: LatencyLimits) -> None:
        self._simulation, self._limits = simulation, limits
        flows = simulation.record.flows
        self._most_late = 1 + len(flows) // 100
        num_gaps = sum(flow.request.n * (flow.request.output_tokens - 1) for flow in flows)
        self._most_slow = 1 + num_gaps // 100
        self._num_slow = 0
        self._num_seen: dict[str, int] = {}  # gaps by tenant

    def is_hopeless(self) -> bool:
        record, limit_s = self._simulation.record, self._limits.itl_ms / 1000
        for tenant, gaps in record.gaps.items():
            seen = self._num_seen.get(tenant, 0)
            self._num_slow += sum(gap > limit_s for gap in gaps.gap_s[seen:])
            self._num_seen[tenant] = len(gaps.gap_s)
        if self._num_slow > self._most_slow:
            return True
        now, limit_s = self._simulation.now, self._limits.ttft_ms / 1000
        return sum(flow.is_late(now, limit_s) for flow in record.flows) > self._most_late


@dataclass
class GoodputSearch:
    """Simulates setups at rates, each once."""

    config: SimulationConfig
    requests: Sequence[TraceRequest]
    limits: LatencyLimits
    on_found: Callable[[Goodput], None] = lambda goodput: None
    found: list[Goodput] = field(default_factory=list)

    @property
    def own_rate(self) -> float:
        """Requests a second of the trace. Raises ConfigError if all come at once."""
        seconds = self.requests[-1].arrival_s
        if seconds <= 0:
            raise ConfigError("--goodput: the trace's requests must not all arrive at 0")
        return len(self.requests) / seconds

    def best(self, setups: Sequence[Setup], first: int) -> Goodput:
        """The setup with the highest goodput, looked for from the first one to both sides."""
        at, best = first, self._record(setups[first], None)
        step = max(1, len(setups) // 4)
        tried = {at}
        while step:
            for near in (at - step, at + step):
                if not 0 <= near < len(setups) or near in tried:
                    continue
                tried.add(near)
                goodput = self._record(setups[near], best)
                if not goodput.is_less:
                    at, best = near, goodput
                    break
            else:
                step //= 2
        return best

    def _record(self, setup: Setup, best: Goodput | None) -> Goodput:
        goodput = self.goodput(setup, best.per_s if best is not None else 0.0)
        self.found.append(goodput)
        self.on_found(goodput)
        return goodput

    def goodput(self, setup: Setup, more_than: float = 0.0) -> Goodput:
        """Requests a second, or `is_less` if that is hardly more than `more_than`."""
        rate = max(more_than * (1 + PRECISION), self.own_rate * LEAST_SHARE)
        trial = self.trial(setup, rate)
        if not trial.is_within(self.limits):
            return Goodput(setup, rate, trial, is_less=True)
        low, low_trial, high = rate, trial, max(2 * more_than, self.own_rate)
        while (trial := self.trial(setup, high)).is_within(self.limits):
            low, low_trial, high = high, trial, 2 * high
        while high > low * (1 + PRECISION):
            middle = (low * high) ** 0.5
            trial = self.trial(setup, middle)
            if trial.is_within(self.limits):
                low, low_trial = middle, trial
            else:
                high = middle
        return Goodput(setup, low, low_trial)

    def trial(self, setup: Setup, rate: float) -> Trial:
        if not gc.isenabled():
            gc.collect()  # earlier simulations
        simulation = Simulation(setup_config(self.config, setup), self.at_rate(rate))
        if not simulation.run(LimitWatch(simulation, self.limits).is_hopeless):
            return Trial()
        flows = simulation.record.flows
        if any(flow.first_s is None or flow.detail for flow in flows):
            return Trial()  # one was refused or failed
        ttfts = sorted(1000 * flow.ttft_s for flow in flows)
        gaps = sorted(1000 * gap for gaps in simulation.record.gaps.values() for gap in gaps.gap_s)
        return Trial(percentile(ttfts, 99), percentile(gaps, 99) if gaps else 0.0)

    def at_rate(self, rate: float) -> list[TraceRequest]:
        factor = self.own_rate / rate
        return [msgspec.structs.replace(one, arrival_s=one.arrival_s * factor) for one in self.requests]


def setup_config(config: SimulationConfig, setup: Setup) -> SimulationConfig:
    """The simulation of a setup. The scheduler's limits are the largest of its workers."""
    scheduler = msgspec.structs.replace(
        config.scheduler,
        max_num_seqs=max(each.max_num_seqs or config.scheduler.max_num_seqs for each in setup.roles),
        max_num_batched_tokens=max(
            each.max_num_batched_tokens or config.scheduler.max_num_batched_tokens for each in setup.roles
        ),
    )
    return msgspec.structs.replace(config, roles=setup.roles, scheduler=scheduler)


def splits(config: SimulationConfig) -> tuple[list[Setup], int]:
    """All splits of the workers into prefill and decode workers, and the index of the one to begin with.

    The settings of a role are its workers' in the configuration.
    """
    given = {each.role: each for each in config.fleet}
    num_workers = sum(each.num_workers for each in config.fleet)
    if num_workers < 2:
        raise ConfigError("--goodput: give --workers, or --prefill-workers and --decode-workers, at least 2 in all")
    prefill, decode = (given.get(role, SimulatedRole(role=role)) for role in (KVRole.PREFILL, KVRole.DECODE))
    setups = [
        Setup(
            f"{num} prefill + {num_workers - num} decode",
            [_resized(prefill, num), _resized(decode, num_workers - num)],
        )
        for num in range(1, num_workers)
    ]
    first = prefill.num_workers if KVRole.PREFILL in given and KVRole.DECODE in given else num_workers // 2
    return setups, min(first, num_workers - 1) - 1


def unified(config: SimulationConfig) -> tuple[list[Setup], int]:
    """Returns setups of as many unified workers, one for each of STEP_SIZES, and the index of the first to try."""
    num_workers = sum(each.num_workers for each in config.fleet)
    given = next((each for each in config.fleet if each.role is KVRole.BOTH), SimulatedRole())
    most_seqs = given.max_num_seqs or config.scheduler.max_num_seqs
    setups = [
        Setup(
            f"{num_workers} unified, {size:,} tokens a step",
            [
                msgspec.structs.replace(
                    given, num_workers=num_workers, max_num_batched_tokens=size, max_num_seqs=min(most_seqs, size)
                )
            ],
        )
        for size in STEP_SIZES
    ]
    return setups, STEP_SIZES.index(256)


def _resized(role: SimulatedRole, num_workers: int) -> SimulatedRole:
    return msgspec.structs.replace(role, num_workers=num_workers)


def head(limits: LatencyLimits) -> str:
    return (
        f"goodput: requests a second with the 99th percentiles of TTFT at most {limits.ttft_ms:g} ms "
        f"and of ITL at most {limits.itl_ms:g} ms\n\n"
        f"{'workers':<{WIDTH}}{'requests/s':>12}{'TTFT p99':>12}{'ITL p99':>12}"
    )


def row(goodput: Goodput) -> str:
    trial = goodput.trial
    per_s = f"{'under ' if goodput.is_less else ''}{goodput.per_s:,.2f}"
    cells = [f"{value:,.1f}" if value is not None else "-" for value in (trial.ttft_ms, trial.itl_ms)]
    return f"{goodput.setup.name:<{WIDTH}}{per_s:>12}" + "".join(f"{cell:>12}" for cell in cells)


def conclusion(apart: Goodput, together: Goodput) -> str:
    """The best split against the best unified setup."""
    if apart.is_less and together.is_less:
        return "no setup serves any rate within the limits"
    best, other = (apart, together) if apart.per_s >= together.per_s and not apart.is_less else (together, apart)
    ratio = "" if other.is_less else f", {best.per_s / other.per_s:.2f} times {other.setup.name}"
    return f"best: {best.setup.name}{ratio}"
