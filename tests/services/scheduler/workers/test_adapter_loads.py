"""Adapters in a whole scheduler: at the start, by operators' commands, while requests run, and after losses."""

import msgspec
import pytest

from blockyard.services.gpu_worker.mock.adapters import BROKEN, mock_digest
from blockyard.services.scheduler.admission.request_handler import MAX_SILENCE_S
from blockyard.services.scheduler.batch.worker_groups import WorkerGroup
from blockyard.services.scheduler.from_config import settings_of
from blockyard.shared.config.services.lora import AdapterSettings, AdapterSource
from blockyard.shared.config.services.process import BusConfig, ProcessConfig
from blockyard.shared.config.services.scheduler import SchedulerConfig
from blockyard.shared.errors import LoadError
from blockyard.shared.messages import (
    AdapterLoaded,
    AdapterUse,
    Cancel,
    Control,
    Controlled,
    ControlVerb,
    DropAdapter,
    FinishReason,
    Generate,
    LoadAdapter,
    Refused,
    StepPlan,
)

from ..harness.world import Shape, World


def make(places: int = 1, host: int = 2, adapters: int = 2, workers: int = 1, **shape: object) -> World:
    world = World(
        Shape(
            num_adapter_places=places, num_host_adapters=host, num_adapters=adapters, max_num_batched_tokens=64, **shape
        )
    )
    world.add_gateway()
    for _ in range(workers):
        world.add_worker()
    world.add_detokenizer()
    world.settle()
    return world


def names(world: World) -> list[str]:
    assert world.core.card is not None
    return [card.name for card in world.core.card.adapters]


def command(world: World, verb: ControlVerb, name: str, path: str = "", **more: bool) -> None:
    [gateway] = world.gateways.values()
    world.tell(gateway.incarnation, Control(name, verb, adapter=name, adapter_path=path, **more))


def answers(world: World) -> list[tuple[int, str]]:
    [gateway] = world.gateways.values()
    controlled: list[Controlled] = gateway.controlled
    return [(one.status, one.field) for one in controlled]


def submit(world: World, name: str, adapter: str, max_tokens: int = 8) -> Generate:
    [gateway] = world.gateways.values()
    return world.submit(gateway, name, 5, adapter=adapter, max_tokens=max_tokens, ignore_eos=True)


def test_the_card_is_there_once_the_adapters_of_the_start_are_read() -> None:
    world = World(Shape(num_adapter_places=1, num_adapters=2))
    worker = world.add_worker()
    while worker.inbox and not any(isinstance(frame, LoadAdapter) for frame in worker.inbox):
        assert world.core.card is None
        world.work(worker)
    assert world.core.card is None
    world.settle()
    assert names(world) == ["a0", "a1"]
    assert [card.digest for card in world.core.adapters.cards] == [mock_digest("/0"), mock_digest("/1")]


def start_with_broken(*, is_restart: bool) -> World:
    config = SchedulerConfig(
        process=ProcessConfig(name="s", bus=BusConfig(registry="ipc:///x", bind="ipc:///x"), is_restart=is_restart),
        served_model_names=["m"],
        adapters=AdapterSettings(sources=[AdapterSource(name="a0", path="/0"), AdapterSource(name="bad", path=BROKEN)]),
    )
    world = World(Shape(num_adapter_places=1), adapters=settings_of(config).adapters)
    world.add_worker()
    world.settle()
    return world


def test_a_broken_adapter_ends_the_start() -> None:
    with pytest.raises(LoadError, match=f"^adapter bad: {BROKEN}: it is broken$"):
        start_with_broken(is_restart=False)


def test_a_scheduler_that_starts_again_leaves_a_broken_adapter_out() -> None:
    world = start_with_broken(is_restart=True)
    assert names(world) == ["a0"]
    assert world.core.notes[-1] == "adapter bad is not served: it is broken"


def test_a_load_that_takes_too_long_is_no_fault_of_the_client() -> None:
    world = make(adapters=1)
    command(world, ControlVerb.LOAD_ADAPTER, "b", "/b")
    [worker], number = world.workers.values(), max(world.core.adapters.all)
    world.turn()
    worker.inbox.clear()
    late = AdapterLoaded(number, error="its disk hangs", status=504)
    world.tell(worker.incarnation, late)
    world.settle()
    [gateway] = world.gateways.values()
    assert [(one.status, one.message) for one in gateway.controlled] == [(504, "adapter 'b': its disk hangs")]


def test_the_phase_tells_that_no_worker_serves_adapters() -> None:
    world = World(Shape(num_adapter_places=0, num_adapters=1))
    world.add_worker()
    world.settle()
    assert world.core.card is None and world.core.phase == "waiting for a worker with --enable-lora"


def test_a_request_whose_adapter_has_no_place_is_passed_over() -> None:
    world = make()
    submit(world, "1", "a0", 20)
    [worker] = world.workers.values()
    world.work(worker)
    submit(world, "2", "a1")
    submit(world, "3", "")
    submit(world, "4", "a0")
    running = {one.sequence.request.id for group in world.core.groups.values() for one in group.running}
    for _ in range(12):
        world.work(worker)
        running |= {one.sequence.request.id for group in world.core.groups.values() for one in group.running}
    assert running == {"1", "3", "4"}, "the only place is a0's while it runs"
    world.settle()
    world.check_outputs()
    world.check_idle()


def test_an_adapter_that_waits_for_long_gets_the_place_of_another() -> None:
    world = make()
    submit(world, "1", "a0", 40)
    [worker] = world.workers.values()
    for _ in range(4):
        world.work(worker)
    submit(world, "2", "a1")
    for _ in range(4):
        world.work(worker)
    world.now += 2.1
    world.turn()
    submit(world, "3", "a0")
    group = next(iter(world.core.groups.values()))
    for _ in range(3):
        world.work(worker)
    assert [one.sequence.request.id for one in group.running] == ["1"], "a0 takes no new sequences"
    world.now += 2.1
    world.turn()
    assert not [one for one in group.running if one.sequence.request.id == "1"], "it is preempted"
    world.settle()
    world.check_outputs()
    world.check_idle()


def test_operators_load_replace_and_unload() -> None:
    world = make(adapters=1)
    command(world, ControlVerb.LOAD_ADAPTER, "b", "/b")
    world.settle()
    assert names(world) == ["a0", "b"]
    command(world, ControlVerb.LOAD_ADAPTER, "b", "/c")
    command(world, ControlVerb.LOAD_ADAPTER, "m", "/c")
    command(world, ControlVerb.LOAD_ADAPTER, "x", "/broken")
    world.settle()
    assert answers(world) == [(200, ""), (400, "lora_name"), (400, "lora_name"), (400, "lora_path")]
    assert names(world) == ["a0", "b"]
    command(world, ControlVerb.LOAD_ADAPTER, "b", "/c", replace=True)
    world.settle()
    assert world.core.adapters.named("b").digest == mock_digest("/c")
    command(world, ControlVerb.UNLOAD_ADAPTER, "b")
    world.turn()
    command(world, ControlVerb.UNLOAD_ADAPTER, "b")
    world.settle()
    assert answers(world)[4:] == [(200, ""), (200, ""), (404, "lora_name")]
    assert names(world) == ["a0"] and len(world.core.adapters.all) == 1


def test_a_load_is_asked_again_of_workers_that_begin_anew() -> None:
    world = make(adapters=0, workers=2)
    command(world, ControlVerb.LOAD_ADAPTER, "b", "/b")
    [gateway] = world.gateways.values()
    world.tell(gateway.incarnation, Control("sleep", ControlVerb.SLEEP, level=1))
    world.settle()
    assert answers(world) == [(200, "")], "it sleeps"
    world.tell(gateway.incarnation, Control("wake", ControlVerb.WAKE_UP))
    world.settle()
    assert answers(world)[1:] == [(200, ""), (200, "")] and names(world) == ["b"]


def test_a_load_while_no_worker_is_there() -> None:
    world = make(adapters=0)
    [gateway] = world.gateways.values()
    world.tell(gateway.incarnation, Control("sleep", ControlVerb.SLEEP, level=1))
    world.settle()
    command(world, ControlVerb.LOAD_ADAPTER, "b", "/b")
    world.settle()
    assert len(answers(world)) == 1, "workers that sleep read nothing"
    world.tell(gateway.incarnation, Control("wake", ControlVerb.WAKE_UP))
    world.settle()
    assert len(answers(world)) == 3 and names(world) == ["b"]
    world.kill(next(iter(world.workers)))
    command(world, ControlVerb.LOAD_ADAPTER, "c", "/c")
    world.settle()
    assert len(answers(world)) == 3, "it waits for a worker"
    world.add_worker()
    world.settle()
    assert answers(world) == [(200, "")] * 4 and names(world) == ["b", "c"]


def test_a_load_by_workers_that_serve_no_adapters() -> None:
    world = make(places=0, adapters=0)
    command(world, ControlVerb.LOAD_ADAPTER, "b", "/b")
    world.kill(next(iter(world.workers)))
    command(world, ControlVerb.LOAD_ADAPTER, "c", "/c")
    world.add_worker()
    world.settle()
    assert answers(world) == [(400, "lora_name"), (400, "lora_path")]


def test_an_unload_waits_for_what_runs_and_refuses_what_comes() -> None:
    world = make(adapters=1)
    frame = submit(world, "1", "a0", 20)
    [worker] = world.workers.values()
    world.work(worker)
    command(world, ControlVerb.UNLOAD_ADAPTER, "a0")
    assert not answers(world)
    [gateway] = world.gateways.values()
    late = world.submit(gateway, "2", 5, adapter="a0")
    refused = [one.frame for one in world.sent if isinstance(one.frame, Refused)]
    assert [(one.request_id, one.status, one.field) for one in refused] == [(late.request_id, 404, "model")]
    del gateway.journals["2"]
    world.settle()
    assert answers(world) == [(200, "")]
    world.check_outputs()
    assert gateway.journals[frame.request_id].outputs[0].finish is FinishReason.LENGTH


def test_a_running_request_finishes_with_the_bytes_that_it_began_with() -> None:
    world = make(places=2, host=3, adapters=1)
    submit(world, "1", "a0", 30)
    [worker] = world.workers.values()
    for _ in range(4):
        world.work(worker)
    before = world.core.adapters.named("a0")
    command(world, ControlVerb.LOAD_ADAPTER, "a0", "/new", replace=True)
    for _ in range(6):
        world.work(worker)
    after = world.core.adapters.named("a0")
    submit(world, "2", "a0")
    group = next(iter(world.core.groups.values()))
    used = {one.sequence.request.id: one.sequence.request.adapter for one in group.running}
    assert used["1"] == before.number != after.number
    world.settle()
    world.check_outputs()
    assert before.number not in world.core.adapters.all


@pytest.mark.parametrize("workers", [1, 2])
def test_workers_that_are_lost_and_attached_again(workers: int) -> None:
    world = make(workers=workers)
    for number in range(6):
        submit(world, str(number), ("a0", "a1", "")[number % 3], 12)
    for worker in list(world.workers.values()):
        world.work(worker)
    world.blink(next(iter(world.workers)))
    world.settle()
    world.kill(next(iter(world.workers)))
    world.add_worker()
    world.settle()
    for number in range(6, 10):
        submit(world, str(number), ("a0", "a1")[number % 2])
    world.settle()
    world.check_outputs()
    world.check_idle()


def test_prompts_of_two_adapters_share_no_block() -> None:
    world = make(places=2, num_blocks=40)
    for number, adapter in enumerate(("a0", "a1", "", "a0")):
        [gateway] = world.gateways.values()
        world.submit(gateway, str(number), 17, prompt=list(range(10, 27)), adapter=adapter, max_tokens=2)
        world.settle()
    stats = world.core.stats()
    assert stats.prefix_hits_total == 16, "the fourth request finds the blocks of the first alone"
    world.check_outputs()


def test_a_request_goes_where_its_adapter_is() -> None:
    world = make(workers=2)
    submit(world, "1", "a0", 30)
    first, second = world.workers.values()
    for _ in range(3):
        world.work(first)
        world.work(second)
    holders = [group for group in world.core.groups.values() if group.running]
    submit(world, "2", "a0", 30)
    world.turn()
    for _ in range(3):
        world.work(first)
        world.work(second)
    assert [len(group.running) for group in holders] == [2], "the other group would need a place for it"
    world.settle()
    world.check_outputs()


def test_ten_thousand_loads_at_once_are_loaded_or_refused() -> None:
    world = make(adapters=0)
    [gateway] = world.gateways.values()
    for number in range(10_000):
        load = Control(str(number), ControlVerb.LOAD_ADAPTER, adapter=f"b{number}", adapter_path=f"/{number}")
        world.core.on_message(gateway.incarnation, load, world.now)
    world.turn()
    world.settle()
    statuses = [one.status for one in gateway.controlled]
    assert len(statuses) == 10_000 and set(statuses) == {200, 429}
    assert len(names(world)) == statuses.count(200) == 64
    assert {(one.field, one.adapters) for one in gateway.controlled if one.status == 429} == {("lora_name", None)}
    command(world, ControlVerb.LOAD_ADAPTER, "b9999", "/b")
    world.settle()
    assert gateway.controlled[-1].status == 200


def test_a_request_loads_no_adapter_that_an_operator_has_unloaded() -> None:
    world = make(adapters=1)
    command(world, ControlVerb.UNLOAD_ADAPTER, "a0")
    world.settle()
    command(world, ControlVerb.LOAD_ADAPTER, "a0", "/0", first_use=True)
    assert answers(world) == [(200, ""), (404, "lora_name")]
    command(world, ControlVerb.LOAD_ADAPTER, "a0", "/0")
    world.settle()
    command(world, ControlVerb.LOAD_ADAPTER, "b", "/b", first_use=True)
    world.settle()
    assert names(world) == ["a0", "b"]
    without = make(places=0, host=0, adapters=0)
    command(without, ControlVerb.LOAD_ADAPTER, "b", "/b", first_use=True)
    command(without, ControlVerb.LOAD_ADAPTER, "b", "/b")
    assert answers(without) == [(404, "lora_name"), (400, "lora_name")]


def test_an_unload_is_told_to_gateways_once_no_request_uses_the_adapter() -> None:
    """Before that, its operator has no answer, and may be told that it failed."""
    world = make(adapters=2)
    submit(world, "1", "a0")
    world.turn()
    command(world, ControlVerb.UNLOAD_ADAPTER, "a0")
    world.turn()
    assert world.core.card is not None and names(world) == ["a1"] and world.core.card.unloaded == []
    world.settle()
    [gateway] = world.gateways.values()
    assert [(one.status, one.unloaded) for one in gateway.controlled] == [(200, ["a0"])]
    assert world.core.card.unloaded == ["a0"]
    command(world, ControlVerb.LOAD_ADAPTER, "a0", "/0")
    world.settle()
    assert names(world) == ["a1", "a0"] and world.core.card.unloaded == []


def test_an_unload_before_the_scheduler_died_is_repeated_unless_an_operator_loads_the_name() -> None:
    world = make(adapters=1)
    command(world, ControlVerb.UNLOAD_ADAPTER, "a0", is_repeated=True)
    command(world, ControlVerb.UNLOAD_ADAPTER, "b", is_repeated=True)  # of --lora-dir
    world.settle()
    command(world, ControlVerb.LOAD_ADAPTER, "b", "/b", first_use=True)
    assert [status for status, _ in answers(world)] == [200, 200, 404]
    assert world.core.card is not None and names(world) == [] and world.core.card.unloaded == ["a0", "b"]
    command(world, ControlVerb.LOAD_ADAPTER, "a0", "/0")
    command(world, ControlVerb.UNLOAD_ADAPTER, "a0", is_repeated=True)  # another gateway, while it is loaded ...
    world.settle()
    command(world, ControlVerb.UNLOAD_ADAPTER, "a0", is_repeated=True)  # ... and when it is served
    world.settle()
    assert names(world) == ["a0"] and world.core.card.unloaded == ["b"]


@pytest.mark.parametrize("is_accepted", [False, True])
def test_an_adapter_that_no_worker_can_read_again_ends_its_requests_and_the_next_one_tries_again(
    is_accepted: bool,
) -> None:
    world = make(host=1, adapters=3)
    [worker], [gateway] = world.workers.values(), world.gateways.values()
    dropped = next(one.frame.adapter for one in world.sent if isinstance(one.frame, DropAdapter))
    name = world.core.adapters.all[dropped].name
    world.submit(gateway, "1", 5, 3, adapter=name)
    if is_accepted:
        world.now += MAX_SILENCE_S
        world.turn()
    index = next(i for i, frame in enumerate(worker.inbox) if isinstance(frame, LoadAdapter))
    worker.inbox[index] = msgspec.structs.replace(worker.inbox[index], path=f"/{BROKEN}")
    loads = [one for one in world.sent if isinstance(one.frame, LoadAdapter)]
    world.settle()
    assert [one for one in world.sent if isinstance(one.frame, LoadAdapter)] == loads, (
        "nothing is read without a request"
    )
    detail = f"no worker can read the adapter {name!r}: it is broken"
    refused = [one.frame for one in world.sent if isinstance(one.frame, Refused)]
    told = [(one.request_id, one.status, one.field, one.message) for one in refused]
    assert told == ([] if is_accepted else [("1", 400, "model", detail)])
    if is_accepted:
        outputs = gateway.journals["1"].outputs.values()
        assert [(one.finish, one.detail) for one in outputs] == [(FinishReason.FAILED, detail)] * 3
    else:
        assert [(one.request_id, one.status, one.field, one.message) for one in refused] == [
            ("1", 400, "model", detail)
        ]
    submit(world, "2", name)
    world.settle()
    assert gateway.journals["2"].outputs[0].finish is FinishReason.LENGTH
    world.check_idle()


def test_a_worker_with_other_bytes_does_not_serve_the_name(caplog: pytest.LogCaptureFixture) -> None:
    world = make(adapters=0, workers=2)
    first, second = world.workers.values()
    command(world, ControlVerb.LOAD_ADAPTER, "b", "/b")
    world.work(first)
    [load] = second.inbox
    second.inbox[0] = msgspec.structs.replace(load, path="/other")
    world.settle()
    assert answers(world) == [(200, "")] and names(world) == ["b"]
    assert "b is not served by worker" in caplog.text and "other bytes" in caplog.text
    assert [outgoing.to for outgoing in world.sent if isinstance(outgoing.frame, DropAdapter)] == [second.incarnation]
    for number in range(4):
        submit(world, str(number), "b")
    world.settle()
    world.check_outputs()
    plans = [outgoing.to for outgoing in world.sent if isinstance(outgoing.frame, StepPlan)]
    assert set(plans) == {first.incarnation}


def can_start(world: World, group: WorkerGroup, name: str) -> bool:
    adapter = world.core.adapters.named(name)
    assert adapter is not None
    return group.adapters.can_start(adapter.number)


def test_a_place_that_was_closed_opens_again_once_nothing_waits_for_it() -> None:
    world = make(places=2, host=3, adapters=3, max_num_seqs=6)
    [worker], [group] = world.workers.values(), world.core.groups.values()
    submit(world, "1", "a0", 50)
    world.work(worker)
    submit(world, "2", "a1", 50)
    world.work(worker)
    frame = submit(world, "3", "a2", 8)
    for _ in range(3):
        world.work(worker)
    world.now += 2.1
    world.turn()
    assert not can_start(world, group, "a0") and can_start(world, group, "a1")
    [gateway] = world.gateways.values()
    gateway.journals["3"].cancelled = True
    world.tell(gateway.incarnation, Cancel(frame.request_id, 0))
    submit(world, "4", "a0", 8)
    for _ in range(4):
        world.work(worker)
    assert "4" in {running.sequence.request.id for running in group.running} and can_start(world, group, "a0")
    world.settle()
    world.check_outputs()


def test_a_worker_that_joins_reads_what_is_served() -> None:
    world = make(host=2, adapters=2)
    worker = world.add_worker()
    world.settle()
    assert sorted(worker.mock.adapters.held.values()) == ["/0", "/1"]


def test_gateways_are_told_which_adapters_run_and_wait() -> None:
    world = make(places=1, host=2, adapters=2)
    assert world.core.stats().adapter_use == AdapterUse(1, [], [])
    [worker] = world.workers.values()
    submit(world, "1", "a0")
    world.work(worker)
    submit(world, "2", "a1")
    submit(world, "3", "")
    world.work(worker)
    assert world.core.stats().adapter_use == AdapterUse(1, ["a0"], ["a1"])
    world.settle()
    assert world.core.stats().adapter_use == AdapterUse(1, [], [])
    assert make(places=0, host=0, adapters=0).core.stats().adapter_use is None
