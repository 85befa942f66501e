"""The report of a simulation: a table for the terminal and charts for a page."""

import bisect
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from blockyard.services.scheduler.simulator.record import Flow, Gaps
from blockyard.services.scheduler.simulator.simulation import Simulation
from blockyard.shared.charts import COLOURS, Curve, Point, cdf, svg
from blockyard.shared.config.services.simulation import SimulationConfig
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
    ttft_ms: Percentiles | None
    itl_ms: Percentiles | None
    tenants: dict[str, tuple[Percentiles | None, Percentiles | None]]  # TTFT and ITL; empty if there is one tenant


def summarize(simulation: Simulation, wall_s: float) -> Summary:
    record, workers = simulation.record, simulation.workers.values()
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
        preemptions=simulation.core.stats().preemptions_total,
        num_steps=sum(worker.num_steps for worker in workers),
        num_events=simulation.num_events,
        busy=sum(worker.busy_s for worker in workers) / max(simulation.now * len(workers), 1e-9),
        ttft_ms=_ttft(done),
        itl_ms=percentiles_of((gap for gaps in record.gaps.values() for gap in gaps.gap_s), 1000),
        tenants=tenants if len(tenants) > 1 else {},
    )


def _host_text(config: SimulationConfig) -> str:
    return f" and {config.num_host_blocks:,} in host memory" if config.num_host_blocks else ""


def table(config: SimulationConfig, simulation: Simulation, s: Summary) -> str:
    """The table for the terminal and for the head of the page."""
    per_s = 1 / max(s.duration_s, 1e-9)
    lost = f", {s.refused} refused" if s.refused else ""
    lost += f", {s.failed} failed" if s.failed else ""
    workers = f"{config.num_workers} worker{'s' if config.num_workers > 1 else ''}"
    lines = [
        f"{config.cost.name}: {workers}, each {config.num_blocks:,} KV blocks of {config.block_size} tokens"
        f"{_host_text(config)}, {config.scheduler.max_num_seqs} sequences, "
        f"{config.scheduler.max_num_batched_tokens:,} tokens a step",
        f"{s.completed:,} requests completed{lost}, in {s.duration_s:,.1f} s; "
        f"simulated in {s.wall_s:.1f} s: {s.num_steps:,} steps, {s.num_events:,} events",
        f"tokens      {s.input_tokens:,} in, of which {s.cached_tokens:,} were found in the prefix cache; "
        f"{s.output_tokens:,} out",
        f"a second    {s.completed * per_s:,.2f} requests, {s.output_tokens * per_s:,.1f} tokens out; "
        f"workers busy {s.busy:.0%} of the time",
        _blocks_line(simulation, s),
        "",
        percentiles_head("ms", WIDTH),
        percentiles_row("TTFT", s.ttft_ms, WIDTH),
        percentiles_row("ITL", s.itl_ms, WIDTH),
    ]
    for name, (ttft, itl) in s.tenants.items():
        lines += [
            percentiles_row(f"TTFT of {name or '-'}", ttft, WIDTH),
            percentiles_row(f"ITL of {name or '-'}", itl, WIDTH),
        ]
    return "\n".join(lines)


def charts(simulation: Simulation) -> list[str]:
    """Queue, batch, blocks, throughput, percentiles over time and distributions; charts without points are left out."""
    record = simulation.record
    samples = record.samples
    waiting = [(s.at_s, float(s.waiting)) for s in samples]
    used = [(s.at_s, 100 * s.used) for s in samples]
    unfilled = [(s.at_s, 100 * s.unfilled) for s in samples]
    done = _done(record.flows)
    names = sorted(record.gaps, key=lambda name: -len(record.gaps[name].gap_s))[:MOST_TENANTS]
    by_tenant = {name: _of_tenant(done, name) for name in names}
    legend: Callable[[str], str] = (lambda name: name or "-") if len(record.gaps) > 1 else (lambda name: "")
    gaps = _merged(list(record.gaps.values()))
    ttfts = sorted((flow.request.arrival_s, 1000 * flow.ttft_s) for flow in done)
    per_tenant = [Curve(cdf([1000 * f.ttft_s for f in found]), legend(n)) for n, found in by_tenant.items()]
    itls = [Curve(cdf([1000 * gap for gap in record.gaps[name].gap_s]), legend(name)) for name in names]
    drawn = [
        svg("Queue", "s", "waiting choices", Curve(waiting)),
        svg("Batch", "s", "running choices of a worker", *_batches(simulation)),
        svg("KV blocks", "s", "%", Curve(used, "in use"), Curve(unfilled, "of their slots never filled")),
        svg("Throughput", "s", "tokens out a second", Curve(_rates(simulation))),
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
    return [Curve([(s.at_s, float(s.running[i])) for s in samples if i < num], f"{i}") for i in range(num)]


def _rates(simulation: Simulation) -> list[Point]:
    samples = simulation.record.samples
    points: list[Point] = []
    step = max(1, len(samples) // SLICES)
    for before, after in zip(samples[::step], samples[step::step], strict=False):
        seconds = after.at_s - before.at_s
        points.append((after.at_s, (after.output_tokens - before.output_tokens) / max(seconds, 1e-9)))
    return points


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
