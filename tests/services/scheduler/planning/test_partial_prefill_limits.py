"""How prompts share a step, and when the next prompt is scheduled."""

from unittest.mock import Mock

from blockyard.services.scheduler.batch.worker_groups import BatchLimits, WorkerGroup
from blockyard.services.scheduler.kv_cache.kv_cache_manager import CacheStats
from blockyard.services.scheduler.kv_cache.prefix_cache import BlockHasher
from blockyard.services.scheduler.planning.partial_prefill_limits import PartialPrefillLimits
from blockyard.services.scheduler.planning.prefill_delay import PrefillDelay
from blockyard.services.scheduler.sequences.requests import Request
from blockyard.services.scheduler.simulator.simulation import Simulation
from blockyard.services.scheduler.simulator.trace import TraceRequest
from blockyard.shared.config.services.process import BusConfig, ProcessConfig
from blockyard.shared.config.services.scheduler import SchedulerConfig
from blockyard.shared.config.services.simulation import SimulationConfig
from blockyard.shared.messages import ChoiceState, Generate, Geometry, Sampling, StepPlan, TextOptions

from ..conftest import Ring


def simulate(requests: list[TraceRequest], **scheduler: object) -> Simulation:
    process = ProcessConfig(name="simulator", bus=BusConfig(registry="ipc://none", bind="ipc://none"))
    settings = SchedulerConfig(process=process, served_model_names=["m"], max_num_batched_tokens=2048, **scheduler)
    simulation = Simulation(SimulationConfig(process=process, scheduler=settings, trace=""), requests)
    simulation.run()
    return simulation


def ttft_s(simulation: Simulation, num_prompt: int) -> list[float]:
    return sorted(f.ttft_s for f in simulation.record.flows if f.request.prompt_tokens == num_prompt)


def test_a_long_prompt_does_not_keep_out_short_ones() -> None:
    """100,000 tokens take seconds; short prompts that arrive meanwhile wait for a few steps only."""
    requests = [TraceRequest(arrival_s=0.0, prompt_tokens=100_000, output_tokens=5)]
    requests += [TraceRequest(arrival_s=0.1 * i, prompt_tokens=200, output_tokens=5) for i in range(1, 30)]
    alone = ttft_s(simulate(requests[:1]), 100_000)[0]
    plain, shared = simulate(requests), simulate(requests, max_num_partial_prefills=2)
    assert alone > 3.0
    assert ttft_s(plain, 200)[len(requests) // 2] > 1.5, "without the flag they wait for the long one"
    assert ttft_s(shared, 200)[-1] < 0.5, "steps whose long part reads 90,000 tokens take 0.15 s"
    assert ttft_s(shared, 100_000)[0] < 1.15 * alone, "which takes what they leave"


def test_other_long_prompts_wait_and_short_ones_pass_them(ring: type[Ring]) -> None:
    shares = PartialPrefillLimits(max_partial=2, long_tokens=20)
    it = ring(
        max_num_seqs=8, max_model_len=200, num_blocks=100, max_num_batched_tokens=16, partial_prefills=shares, depth=0
    )
    it.submit("long", 100, max_tokens=2)
    it.submit("long too", 90, max_tokens=2)
    it.submit("short", 10, max_tokens=2)
    it.steps(3)
    assert it.output("short").ids
    assert not it.output("long").ids
    plans = [o.frame for o in it.world.sent if isinstance(o.frame, StepPlan)]
    assert [sum(run.max_tokens for run in plan.runs) for plan in plans[:3]] == [16, 16, 16], "no room is left over"
    assert sum(len(plan.starts) for plan in plans) == 2, "one long prompt at a time"
    it.finish()


def test_as_many_long_prompts_as_are_allowed_share_a_step(ring: type[Ring]) -> None:
    shares = PartialPrefillLimits(max_partial=2, max_long=2, long_tokens=20)
    it = ring(
        max_num_seqs=8, max_model_len=200, num_blocks=100, max_num_batched_tokens=16, partial_prefills=shares, depth=0
    )
    it.submit("a", 101, max_tokens=2)
    it.submit("b", 102, max_tokens=2, salt="b")
    it.submit("short", 10, max_tokens=2)
    it.steps(2)
    plans = [o.frame for o in it.world.sent if isinstance(o.frame, StepPlan)]
    assert [run.max_tokens for run in plans[1].runs] == [8, 8]
    assert [len(start.token_ids) // 4 for plan in plans[:2] for start in plan.starts] == [101, 102]
    it.finish()


def group_of(num_running: int) -> WorkerGroup:
    group = WorkerGroup(
        1, Geometry(9, 4, 64, 10, [], 8, 64), BatchLimits(8, 64, 1), BlockHasher("", enabled=True), CacheStats()
    )
    group.running = [Mock()] * num_running
    return group


def test_the_next_prompt_waits_by_the_delay_factor() -> None:
    frame = Generate("r", 0, "m", b"\0\0\0\0", b"", Sampling(9), TextOptions(), [ChoiceState(0)])
    request = Request("r", 0, frame, 0, 0, 1, arrival_s=10.0)
    delay = PrefillDelay(0.5)
    delay.on_prefill_step(0.4)
    assert not delay.is_over(request, group_of(3), 10.1)
    assert delay.is_over(request, group_of(0), 10.1), "nothing runs that could be held up"
    assert delay.is_over(request, group_of(3), 10.21)


def test_with_a_delay_prompts_are_computed_together() -> None:
    """Prompts arrive every 20 ms beside a decode; the delay batches them in fewer steps."""
    requests = [TraceRequest(arrival_s=0.0, prompt_tokens=100, output_tokens=400)]
    requests += [TraceRequest(arrival_s=0.1 + 0.02 * i, prompt_tokens=301, output_tokens=1) for i in range(60)]
    few, many = (simulate(requests, delay_factor=factor).record.gaps[""].gap_s for factor in (8.0, 0.0))
    assert sum(gap > 0.008 for gap in few) < 0.5 * sum(gap > 0.008 for gap in many)
