"""A failing device: its requests run alone. A request that breaks a second worker is failed with the reason."""

from dataclasses import replace

import pytest

from blockyard.shared.messages import Cancel, FinishReason

from ..conftest import Ring
from ..harness.world import World

LENGTH, FAILED = FinishReason.LENGTH, FinishReason.FAILED


def owners(it: Ring) -> list[set[str]]:
    """The requests of each plan that was sent to the current worker."""
    group = it.world.core.groups[it.worker.incarnation]
    return [{running.sequence.request.id for running in record.all_sequences()} for record in group.in_flight]


def again(it: Ring) -> None:
    """Replaces the broken worker."""
    it.worker = it.world.add_worker()
    while it.worker.incarnation not in it.world.core.groups:
        it.world.work(it.worker)


@pytest.mark.parametrize("depth", [0, 1, 3])
def test_all_requests_are_tried_alone_and_then_run_together(ring: type[Ring], depth: int) -> None:
    it = ring(depth=depth)
    for name in "abc":
        it.submit(name, 6, max_tokens=30)
    it.steps(4)
    it.world.break_down(it.worker.incarnation)
    it.submit("new", 6, max_tokens=30)
    again(it)
    tried: list[str] = []
    while len(tried) < 3 or len(owners(it)[-1]) < 2:
        for ids in owners(it):
            if tried[-1:] != list(ids) and len(ids) == 1:
                tried += ids
        it.steps(1)
    assert tried[:3] == ["a", "b", "c"], "one at a time, before later requests"
    it.finish()
    assert {it.output(name).finish for name in ("a", "b", "c", "new")} == {LENGTH}


def test_a_request_that_breaks_a_second_worker_alone_is_failed(ring: type[Ring]) -> None:
    it = ring(depth=1)
    for name in ("a", "bad", "c"):
        it.submit(name, 6, max_tokens=12)
    it.steps(2)
    it.world.break_down(it.worker.incarnation)
    again(it)
    while {"bad"} not in owners(it):
        it.steps(1)
    it.world.break_down(it.worker.incarnation, "CUDA error: an illegal memory access was encountered")
    again(it)
    it.finish()
    assert it.output("bad").finish is FAILED
    assert it.output("bad").detail == (
        "workers broke while they ran this request alone: CUDA error: an illegal memory access was encountered"
    )
    assert {it.output(name).finish for name in "ac"} == {LENGTH}


def test_a_killed_worker_makes_no_request_suspect(ring: type[Ring]) -> None:
    it = ring()
    it.submit("a", 6, max_tokens=12)
    it.submit("b", 6, max_tokens=12)
    it.steps(2)
    it.world.kill(it.worker.incarnation)
    again(it)
    assert owners(it)[-1] == {"a", "b"}
    it.finish()


def test_a_cancelled_suspect_delays_no_request(ring: type[Ring]) -> None:
    it = ring()
    it.submit("a", 6, max_tokens=12)
    it.steps(2)
    it.world.break_down(it.worker.incarnation)
    it.submit("b", 6, max_tokens=12)
    it.journal("a").cancelled = True
    it.world.tell(it.gateway.incarnation, Cancel("a", it.journal("a").frame.attempt))
    again(it)
    it.finish()
    assert it.output("b").finish is LENGTH


def test_choices_of_one_suspect_run_together(ring: type[Ring]) -> None:
    it = ring(max_num_seqs=8)
    it.submit("a", 6, n=3, max_tokens=12)
    it.submit("b", 6, max_tokens=12)
    it.steps(3)
    it.world.break_down(it.worker.incarnation)
    again(it)
    it.finish()
    assert {it.output("a", i).finish for i in range(3)} == {LENGTH}


def test_with_another_worker_suspects_wait_for_an_empty_group() -> None:
    it = Ring(max_num_seqs=4, max_num_batched_tokens=64)
    other: World = it.world
    busy = other.add_worker()
    other.settle()
    for i in range(6):
        it.submit(f"{i}", 6, max_tokens=40)
    for worker in (it.worker, busy):
        for _ in range(3):
            other.work(worker)
    ran = {s.sequence.request.id for s in other.core.groups[it.worker.incarnation].running}
    other.break_down(it.worker.incarnation)
    for _ in range(10):
        other.work(busy)
    there = {s.sequence.request.id for s in other.core.groups[busy.incarnation].running}
    assert ran and not ran & there
    it.worker = other.add_worker()
    it.finish()


def test_without_another_worker_groups_are_emptied_for_them_in_the_end() -> None:
    """New requests do not keep the only worker from running the suspects alone."""
    it = Ring(max_num_seqs=2, max_num_batched_tokens=64)
    world = it.world
    busy = world.add_worker()
    world.settle()
    for i in range(4):
        it.submit(f"{i}", 6, max_tokens=20)
    for worker in (it.worker, busy):
        world.work(worker)
        world.work(worker)
    ran = {s.sequence.request.id for s in world.core.groups[it.worker.incarnation].running}
    world.break_down(it.worker.incarnation)
    for i in range(100):
        it.submit(f"more{i}", 6, max_tokens=20)
        world.now += 2.0
        for _ in range(3):
            if busy.busy():
                world.work(busy)
        while it.detokenizer.inbox:
            world.detokenize(it.detokenizer)
        if all(it.output(name).ids for name in ran):
            break
    assert i < 80, "it was tried"
    it.finish()


def test_a_suspect_behind_lower_classes_is_tried_when_several_workers_join_at_once() -> None:
    it = Ring(policy="priority", max_num_seqs=4, max_num_batched_tokens=64)
    world = it.world
    it.submit("suspect", 6, max_tokens=12, priority=5)
    it.steps(2)
    world.break_down(it.worker.incarnation)
    for name in "abcd":
        it.submit(name, 6, max_tokens=12, priority=0)
    workers = [world.add_worker() for _ in range(2)]
    while any(worker.incarnation not in world.core.groups for worker in workers):
        for worker in workers:
            world.work(worker, turn=False)
    world.turn()
    it.finish()
    assert {it.output(name).finish for name in ("suspect", *"abcd")} == {LENGTH}


def test_a_suspect_that_ran_beside_another_request_is_not_failed() -> None:
    """Two requests were in flight when the second worker broke: it is not known which of them broke it."""
    it = Ring(max_num_seqs=2, max_num_batched_tokens=64)
    world = it.world
    second = world.add_worker()
    world.settle()
    it.submit("other", 6, max_tokens=40)
    it.submit("suspect", 6, n=3, max_tokens=40)
    for _ in range(8):
        world.work(it.worker)
        world.work(second)
    near = {
        worker.incarnation: {s.sequence.request.id for s in world.core.groups[worker.incarnation].running}
        for worker in (it.worker, second)
    }
    alone = next(incarnation for incarnation, names in near.items() if names == {"suspect"})
    shared = next(incarnation for incarnation, names in near.items() if names == {"suspect", "other"})
    world.break_down(alone)
    assert "suspect" in world.core.quarantine.probations
    world.break_down(shared)
    it.worker = world.add_worker()
    it.finish()
    assert {it.output(*name).finish for name in (("suspect", 0), ("suspect", 2), ("other", 0))} == {LENGTH}


def test_a_suspect_that_ends_while_plans_are_built_delays_no_request(ring: type[Ring]) -> None:
    """The new worker has no room for its prompt: it ends in the step in which the next request starts."""
    it = ring(max_num_seqs=2)
    it.submit("suspect", 40, max_tokens=8)
    it.steps(1)
    it.world.break_down(it.worker.incarnation)
    it.submit("next", 6, max_tokens=8)
    it.world.shape = replace(it.world.shape, max_model_len=32)
    it.worker = it.world.add_worker()
    while it.worker.incarnation not in it.world.core.groups:
        it.world.work(it.worker)
    assert it.journal("suspect").open() == [0], "the detokenizer has not read it yet"
    assert owners(it)[0] == {"next"}, "in the same turn"
    it.finish()
    assert it.output("suspect").finish is FAILED


def test_a_preempted_suspect_with_results_due_keeps_no_other_group_empty() -> None:
    it = Ring(policy="priority", depth=1, num_blocks=4, block_size=4, max_num_seqs=8, max_num_batched_tokens=64)
    world = it.world
    it.submit("suspect", 4, n=3, max_tokens=8, priority=5)
    world.work(it.worker)
    world.break_down(it.worker.incarnation)
    it.worker = world.add_worker()
    it.submit("next", 3, max_tokens=4, priority=0)
    choices = world.core.lifecycle.requests["suspect"].active_sequences
    while not any(choice.ticket and choice.awaits_results() for choice in choices):
        world.work(it.worker)
        while it.detokenizer.inbox:
            world.detokenize(it.detokenizer)
    empty = world.add_worker()
    world.work(empty, turn=False)
    assert empty.incarnation in world.core.groups
    world.turn()
    assert any(choice.ticket and choice.awaits_results() for choice in choices), "its results are still due"
    assert [running.sequence.request.id for running in world.core.groups[empty.incarnation].running] == ["next"]
    it.finish()


def test_a_suspect_that_waits_for_an_adapter_lets_the_others_end_that_keep_its_place(ring: type[Ring]) -> None:
    it = ring(num_adapters=2, num_adapter_places=1, num_host_adapters=1)
    it.submit("suspect", 6, adapter="a1", max_tokens=20)
    while not any("suspect" in ids for ids in owners(it)):
        it.world.work(it.worker)
    it.submit("next", 6, adapter="a0", max_tokens=8)
    while not it.world.core.adapter_waits.deferred:  # it waits for the place
        it.world.work(it.worker)
    it.world.break_down(it.worker.incarnation)
    it.worker = it.world.add_worker()  # it reads a0 first
    it.finish()
    assert {it.output(name).finish for name in ("suspect", "next")} == {LENGTH}
