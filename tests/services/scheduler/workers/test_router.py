"""Several groups under one scheduler: requests go where their prefix is cached, and otherwise the load spreads."""

import time

import pytest

from blockyard.services.scheduler.simulator.simulation import Simulation
from blockyard.services.scheduler.simulator.trace import TraceRequest
from blockyard.services.scheduler.workers.group_queue import RUNNING_TOKENS, cost
from blockyard.shared.config.services.process import BusConfig, ProcessConfig
from blockyard.shared.config.services.scheduler import SchedulerConfig
from blockyard.shared.config.services.simulation import CostModel, SimulationConfig

from ..harness.world import Shape, World


def simulate(num_workers: int, requests: list[TraceRequest], num_blocks: int = 4000, **scheduler: object) -> Simulation:
    process = ProcessConfig(name="simulator", bus=BusConfig(registry="ipc://none", bind="ipc://none"))
    made = SchedulerConfig(process=process, served_model_names=["m"], **scheduler)
    settings = SimulationConfig(
        process=process,
        scheduler=made,
        trace="",
        cost=CostModel(hop_s=1e-4),
        num_workers=num_workers,
        num_blocks=num_blocks,
    )
    simulation = Simulation(settings, requests)
    simulation.run()
    return simulation


def ask(at: float, prompt: int, output: int, group: str = "", prefix: int | None = None) -> TraceRequest:
    return TraceRequest(
        arrival_s=at, prompt_tokens=prompt, output_tokens=output, prefix_group=group, prefix_tokens=prefix
    )


def test_the_cost_is_the_work_of_the_sequence_and_of_those_before_it() -> None:
    assert cost(100, 50, 0) < cost(100, 51, 0) < cost(200, 0, 0)
    assert cost(1000, 0, 1) < cost(1000 + RUNNING_TOKENS + 1, 0, 0), "a short way to a busy group"
    assert cost(10, 0, 2) == (10 + 2 * RUNNING_TOKENS, 2)
    assert cost(10 + RUNNING_TOKENS, 0, 1) < cost(10, 0, 2), "of the same, the one with fewer running"


@pytest.fixture
def two() -> World:
    world = World(Shape(num_blocks=200, max_num_seqs=8, max_num_batched_tokens=64, max_model_len=200))
    world.add_gateway()
    world.add_worker()
    world.add_worker()
    world.add_detokenizer()
    world.settle()
    return world


def submit(world: World, request_id: str, prompt: list[int], max_tokens: int = 4) -> None:
    (gateway,) = world.gateways.values()
    world.submit(gateway, request_id, len(prompt), prompt=prompt, max_tokens=max_tokens)


def where(world: World, request_id: str) -> int:
    (choice,) = world.core.lifecycle.requests[request_id].sequences.values()
    queues = world.core.router._queues.items()
    queued_ids = [
        worker for worker, queue in queues for routed in queue.entries if routed.waits and routed.sequence is choice
    ]
    return queued_ids[0] if queued_ids or choice.last_run is None else choice.last_run.worker


def cached(world: World, request_id: str) -> int | None:
    (gateway,) = world.gateways.values()
    return gateway.journals[request_id].outputs[0].num_cached_tokens


def test_requests_with_a_common_prefix_go_to_the_group_that_has_it(two: World) -> None:
    """With other requests between them, each prompt is computed once."""
    places = {}
    for i in range(12):
        kind = i % 2
        submit(two, str(i), [kind + 1] * 40 + [10 + i] * 6)
        places.setdefault(kind, set()).add(where(two, str(i)))
        two.settle()
        assert cached(two, str(i)) == (40 if i > 1 else 0)
    assert all(len(found) == 1 for found in places.values())


def test_a_request_waits_for_a_group_that_computes_its_prefix(two: World) -> None:
    """Both arrive before any plan: the second goes where the first computes their prefix."""
    first, second = [1] * 160 + [2] * 4, [1] * 160 + [3] * 4
    (gateway,) = two.gateways.values()
    for name, prompt in (("a", first), ("b", second)):
        frame = gateway.new(name, prompt, two.sampling(max_tokens=4), 1)
        two.core.on_message(gateway.incarnation, frame, two.now)
    two.turn()
    two.settle()
    assert cached(two, "b") == 160


def test_choices_of_one_request_run_in_one_group_without_a_cache() -> None:
    """150 tokens to compute cost more than a running sequence."""
    world = World(
        Shape(num_blocks=200, max_num_seqs=8, max_num_batched_tokens=64, max_model_len=200, prefix_caching=False)
    )
    gateway = world.add_gateway()
    workers = [world.add_worker(), world.add_worker()]
    world.add_detokenizer()
    world.settle()
    world.submit(gateway, "a", 150, 2, max_tokens=30)
    while not any(len(group.running) == 2 for group in world.core.groups.values()):
        assert sum(len(group.running) for group in world.core.groups.values()) < 2, "they run apart"
        for worker in workers:
            if worker.busy():
                world.work(worker)
    world.settle()
    world.check_outputs()
    assert world.num_copies == 1, "of the block that the prompt ends in"


def test_requests_without_a_common_prefix_spread(two: World) -> None:
    for i in range(8):
        submit(two, str(i), [i + 1] * 20, max_tokens=40)
    places = [where(two, str(i)) for i in range(8)]
    assert all(places.count(worker) == 4 for worker in two.workers)


def test_a_short_prefix_does_not_put_all_load_on_one_group(two: World) -> None:
    """The group that has it is busy, so that it is computed again in another group."""
    for i in range(8):
        submit(two, str(i), [1] * 8 + [i + 10] * 12, max_tokens=40)
        if not i:
            for worker in list(two.workers.values()):
                if worker.busy():
                    two.work(worker)
    assert len({where(two, str(i)) for i in range(8)}) == 2


def test_a_sequence_queued_at_a_lost_group_runs_at_the_other(two: World) -> None:
    for i in range(16):  # more than can run at once
        submit(two, str(i), [i + 1] * 30, max_tokens=10)
    assert any(queue.entries for queue in two.core.router._queues.values())
    lost = next(iter(two.workers))
    two.kill(lost)
    two.settle()
    two.check_outputs()
    two.check_idle()


def test_a_cancelled_sequence_leaves_its_group_queue(two: World) -> None:
    from blockyard.shared.messages import Cancel

    for i in range(16):
        submit(two, str(i), [i + 1] * 30, max_tokens=10)
    queued_ids = [c.sequence.request.id for d in two.core.router._queues.values() for c in d.entries if c.waits]
    assert queued_ids
    (gateway,) = two.gateways.values()
    for request_id in queued_ids:
        gateway.journals[request_id].cancelled = True
        two.tell(gateway.incarnation, Cancel(request_id, 0))
    assert len(two.core.waiting) <= 16 - len(queued_ids)
    two.settle()
    two.check_outputs()
    two.check_idle()


def test_replicas_are_one_cache() -> None:
    """Eight conversations of 4,000 tokens each on four workers, ten turns: a prompt is computed about once."""
    requests = [ask(0.5 * turn + 0.05 * i, 4000 + 50 * turn, 30, f"{i}", 4000) for turn in range(10) for i in range(8)]
    simulation = simulate(4, requests)
    num_cached_tokens = sum(flow.num_cached_tokens for flow in simulation.record.flows)
    assert num_cached_tokens > 0.97 * 9 * 8 * 4000


def test_four_workers_take_four_times_the_load() -> None:
    requests = [ask(0.002 * i, 100 + i % 90, 60) for i in range(400)]
    one, four = simulate(1, requests), simulate(4, requests)
    most = max(worker.num_steps for worker in four.workers.values())
    assert most < 1.15 * min(worker.num_steps for worker in four.workers.values())
    assert four.now < 0.75 * one.now
    mean = [sum(flow.ttft_s for flow in s.record.flows) / 400 for s in (one, four)]
    assert mean[1] < 0.8 * mean[0]


def test_a_thousand_workers_in_seconds() -> None:
    requests = [ask(0.001 * i, 50, 20) for i in range(200)]
    began = time.process_time()
    simulation = simulate(1000, requests, num_blocks=50)
    assert time.process_time() - began < 15
    assert all(flow.ended_s is not None for flow in simulation.record.flows)
