"""The report of a simulation: a table for the terminal and charts for a page."""

import bisect
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from blockyard.services.scheduler.simulator.record import Flow, Gaps, Sample
from blockyard.services.scheduler.simulator.simulation import Simulation
from blockyard.shared.charts import COLOURS, Curve, Point, cdf, svg
from blockyard.shared.config.services.simulation import SimulationConfig
from blockyard.shared.messages import KVRole
from blockyard.shared.percentiles import Percentiles, percentile, percentiles_head, percentiles_of, percentiles_row

SLICES = 60  # of the time axis, for percentiles over time
MOST_TENANTS = 7  # shown one by one; the others are merged
WIDTH = 24  # of a row's name


@dataclass(frozen=True, slots=True)
class Summary:
    completed: int
    refused: int
    failed: int
    duration_s: float  # virtual
    wall_s: float
    input_tokens: int
    output_tokens: int
    cached_tokens: int
    preemptions: int
    num_steps: int
    num_events: int
    busy: float  # share of the time in which workers computed
    roles: dict[KVRole, float]  # the same by role; empty if all workers have the same
    transfers_landed: int
    transfers_aborted: int
    transfer_bytes: int
    ttft_ms: Percentiles | None
    itl_ms: Percentiles | None
    second_ms: Percentiles | None  # from the first token to the second
    tenants: dict[str, tuple[Percentiles | None, Percentiles | None]]  # TTFT and ITL; empty if there is one tenant


def summarize(simulation: Simulation, wall_s: float) -> Summary:
    record, workers, stats = simulation.record, simulation.all_workers, simulation.core.stats()
    done = _done(record.flows)
    names = sorted(record.gaps)
    tenants = {name: (_ttft(_of_tenant(done, name)), percentiles_of(record.gaps[name].gap_s, 1000)) for name in names}
    return Summary(
        completed=len(done),
        refused=sum(flow.refused > 0 for flow in record.flows),
        failed=sum(not flow.refused and bool(flow.detail) for flow in record.flows),
        duration_s=simulation.now,
        wall_s=wall_s,
        input_tokens=sum(flow.request.prompt_tokens for flow in done),
        output_tokens=record.num_output_tokens,
        cached_tokens=sum(flow.num_cached_tokens for flow in done),
        preemptions=stats.preemptions_total,
        num_steps=sum(worker.num_steps for worker in workers),
        num_events=simulation.num_events,
        busy=sum(simulation.busy_s().values()) / max(simulation.now * sum(simulation.num_workers.values()), 1e-9),
        roles=_busy_roles(simulation),
        transfers_landed=stats.transfers_landed_total,
        transfers_aborted=stats.transfers_aborted_total,
        transfer_bytes=simulation.transfers.num_bytes,
        ttft_ms=_ttft(done),
        itl_ms=percentiles_of((gap for gaps in record.gaps.values() for gap in gaps.gap_s), 1000),
        second_ms=percentiles_of((flow.second_gap_s for flow in done if flow.second_gap_s is not None), 1000),
        tenants=tenants if len(tenants) > 1 else {},
    )


def _busy_roles(simulation: Simulation) -> dict[KVRole, float]:
    """The share of the time in which the workers of each role computed; empty if there is one role."""
    busy_s, nums = simulation.busy_s(), simulation.num_workers
    return {role: busy_s[role] / max(simulation.now * num, 1e-9) for role, num in nums.items()} if len(nums) > 1 else {}


def _workers_text(config: SimulationConfig, simulation: Simulation) -> str:
    lines = []
    for role, geometry in simulation.geometries.items():
        num = simulation.num_workers[role]
        host = f" and {geometry.num_host_blocks:,} in host memory" if geometry.num_host_blocks else ""
        lines.append(
            f"{num:,} {'' if role is KVRole.BOTH else f'{role} '}worker{'s' if num > 1 else ''}, "
            f"each {geometry.num_blocks:,} KV blocks of {geometry.block_size} tokens{host}, "
            f"{geometry.max_num_seqs} sequences, {geometry.max_num_batched_tokens:,} tokens a step"
        )
    return f"{config.cost.name}: " + f"\n{' ' * len(config.cost.name)}  ".join(lines)


def _roles_lines(s: Summary) -> list[str]:
    if not s.roles:
        return []
    busy = ", ".join(f"{role} {share:.0%}" for role, share in s.roles.items())
    lost = f", {s.transfers_aborted:,} given up" if s.transfers_aborted else ""
    return [
        f"roles       busy: {busy}; {s.transfers_landed:,} transfers landed{lost}, "
        f"{s.transfer_bytes / 1e9:,.1f} GB sent"
    ]


def table(config: SimulationConfig, simulation: Simulation, s: Summary) -> str:
    """The table for the terminal and for the head of the page."""
    per_s = 1 / max(s.duration_s, 1e-9)
    lost = f", {s.refused} refused" if s.refused else ""
    lost += f", {s.failed} failed" if s.failed else ""
    lines = [
        _workers_text(config, simulation),
        f"{s.completed:,} requests completed{lost}, in {s.duration_s:,.1f} s; "
        f"simulated in {s.wall_s:.1f} s: {s.num_steps:,} steps, {s.num_events:,} events",
        f"tokens      {s.input_tokens:,} in, of which {s.cached_tokens:,} were found in the prefix cache; "
        f"{s.output_tokens:,} out",
        f"a second    {s.completed * per_s:,.2f} requests, {s.output_tokens * per_s:,.1f} tokens out; "
        f"workers busy {s.busy:.0%} of the time",
        _blocks_line(simulation, s),
        *_roles_lines(s),
        "",
        percentiles_head("ms", WIDTH),
        percentiles_row("TTFT", s.ttft_ms, WIDTH),
        percentiles_row("ITL", s.itl_ms, WIDTH),
        *([percentiles_row("first to second token", s.second_ms, WIDTH)] if s.roles else []),
    ]
    for name, (ttft, itl) in s.tenants.items():
        lines += [
            percentiles_row(f"TTFT of {name or '-'}", ttft, WIDTH),
            percentiles_row(f"ITL of {name or '-'}", itl, WIDTH),
        ]
    return "\n".join(lines)


def charts(simulation: Simulation) -> list[str]:
    """Queue, batch, blocks, throughput, percentiles over time and distributions; charts without points are left out.

    With roles, how busy the workers of each role are comes before the batch.
    """
    record = simulation.record
    samples = record.samples
    waiting = [(s.at_s, float(s.waiting)) for s in samples]
    unfilled = [(s.at_s, 100 * s.unfilled) for s in samples]
    done = _done(record.flows)
    names = sorted(record.gaps, key=lambda name: -len(record.gaps[name].gap_s))[:MOST_TENANTS]
    by_tenant = {name: _of_tenant(done, name) for name in names}
    legend: Callable[[str], str] = (lambda name: name or "-") if len(record.gaps) > 1 else (lambda name: "")
    gaps = _merged(list(record.gaps.values()))
    ttfts = sorted((flow.request.arrival_s, 1000 * flow.ttft_s) for flow in done)
    per_tenant = [Curve(cdf([1000 * f.ttft_s for f in found]), legend(n)) for n, found in by_tenant.items()]
    itls = [Curve(cdf([1000 * gap for gap in record.gaps[name].gap_s]), legend(name)) for name in names]
    batch = svg("Batch", "s", "running choices of a worker", *_batches(simulation))
    busy = svg("Workers busy", "s", "% of the time", *_busy(simulation))
    drawn = [
        svg("Queue", "s", "waiting choices", Curve(waiting)),
        busy if len(simulation.num_workers) > 1 else batch,
        svg("KV blocks", "s", "%", *_used(simulation), Curve(unfilled, "of their slots never filled")),
        svg("Throughput", "s", "tokens out a second", Curve(_rates(simulation))),
        batch if len(simulation.num_workers) > 1 else busy,
        svg("Time to first token, by arrival", "s", "ms", *_over_time(ttfts, simulation.now)),
        svg("Inter-token latency", "s", "ms", *_over_time(gaps, simulation.now)),
        svg("Time to first token", "ms", "share of requests", *per_tenant),
        svg("Inter-token latency", "ms", "share of all gaps", *itls),
    ]
    if legend("x"):
        found = [
            Curve(_slices([(f.request.arrival_s, 1000 * f.ttft_s) for f in by_tenant[n]], simulation.now, 95), n)
            for n in names
        ]
        drawn.append(svg("Time to first token, p95 by tenant", "s", "ms", *found))
    return [chart for chart in drawn if chart]


def _blocks_line(simulation: Simulation, s: Summary) -> str:
    record = simulation.record
    peak = max((sample.used for sample in record.samples), default=0.0)
    weight = sum(sample.used for sample in record.samples)
    unfilled = sum(sample.used * sample.unfilled for sample in record.samples) / weight if weight else 0.0
    line = f"KV blocks   at most {peak:.1%} in use, {unfilled:.2%} of their slots never filled"
    first = record.first_preemption
    if first is None:
        return f"{line}; no preemption"
    return (
        f"{line}; {s.preemptions:,} preemptions, the first at {first.at_s:.1f} s with {first.used:.1%} in use, "
        f"{first.unfilled:.2%} never filled"
    )


def _done(flows: Sequence[Flow]) -> list[Flow]:
    return [flow for flow in flows if flow.first_s is not None and not flow.detail]


def _of_tenant(flows: Sequence[Flow], tenant: str) -> list[Flow]:
    return [flow for flow in flows if flow.request.tenant == tenant]


def _ttft(flows: Sequence[Flow]) -> Percentiles | None:
    return percentiles_of((flow.ttft_s for flow in flows), 1000)


def _batches(simulation: Simulation) -> list[Curve]:
    """One line for each worker if there are few, else their mean."""
    samples = [sample for sample in simulation.record.samples if sample.running]
    num = len(samples[0].running) if samples else 0
    if not 1 < num <= len(COLOURS):
        return [Curve([(s.at_s, sum(s.running) / len(s.running)) for s in samples])]
    return [Curve([(s.at_s, float(s.running[i])) for s in samples if i < len(s.running)], f"{i}") for i in range(num)]


def _used(simulation: Simulation) -> list[Curve]:
    """The share of blocks in use, by role if there are several."""
    samples, roles = simulation.record.samples, simulation.num_workers
    if len(roles) == 1:
        return [Curve([(s.at_s, 100 * s.used) for s in samples], "in use")]
    return [
        Curve([(s.at_s, 100 * s.roles[role].used) for s in samples if role in s.roles], f"in use, {role}")
        for role in roles
    ]


def _busy(simulation: Simulation) -> list[Curve]:
    """The share of the time in which the workers of each role compute, a point for each slice of samples."""
    samples = _slice_ends(simulation)
    roles = simulation.num_workers
    points: dict[KVRole, list[Point]] = {role: [] for role in roles}
    for before, after in itertools.pairwise(samples):
        for role in roles.keys() & before.roles.keys() & after.roles.keys():
            busy_s = after.roles[role].busy_s - before.roles[role].busy_s
            worker_s = (after.at_s - before.at_s) * (before.roles[role].num_workers + after.roles[role].num_workers) / 2
            points[role].append((after.at_s, 100 * min(busy_s / max(worker_s, 1e-9), 1.0)))
    return [Curve(found, str(role) if len(roles) > 1 else "") for role, found in points.items()]


def _rates(simulation: Simulation) -> list[Point]:
    points: list[Point] = []
    for before, after in itertools.pairwise(_slice_ends(simulation)):
        seconds = after.at_s - before.at_s
        points.append((after.at_s, (after.output_tokens - before.output_tokens) / max(seconds, 1e-9)))
    return points


def _slice_ends(simulation: Simulation) -> list[Sample]:
    samples = simulation.record.samples
    return samples[:: max(1, len(samples) // SLICES)]


def _merged(all_gaps: Sequence[Gaps]) -> list[Point]:
    """(when, ms), by time."""
    return sorted((at, 1000 * gap) for gaps in all_gaps for at, gap in zip(gaps.at_s, gaps.gap_s, strict=True))


def _over_time(points: Sequence[Point], end_s: float) -> list[Curve]:
    return [Curve(_slices(points, end_s, percent), f"p{percent}") for percent in (50, 99)]


def _slices(points: Sequence[Point], end_s: float, percent: float) -> list[Point]:
    """The percentile of the points in each slice of time that has any, at the middle of the slice."""
    width = max(end_s, 1e-9) / SLICES
    found: list[Point] = []
    first = 0
    for i in range(SLICES):
        last = bisect.bisect_left(points, ((i + 1) * width, 0.0), first)
        if last > first:
            found.append(((i + 0.5) * width, percentile(sorted(y for _, y in points[first:last]), percent)))
        first = last
    return found
