"""Both groups of a handover hold the sequence's adapter; where one cannot get it, other groups take the sequence."""

import pytest

from blockyard.services.scheduler.adapters.group_adapters import GroupAdapters
from blockyard.services.scheduler.sequences.requests import Phase
from blockyard.shared.messages import Cancel, KVReceive, KVRole, LoadAdapter

from ..harness.fake_worker import FakeWorker
from .pair import D, P, Pair


def number(it: Pair, name: str) -> int:
    adapter = it.world.core.adapters.named(name)
    assert adapter is not None
    return adapter.number


def adapters(it: Pair, worker: FakeWorker) -> GroupAdapters:
    return it.world.core.groups[worker.incarnation].adapters


def pair(*roles: KVRole, **shape: object) -> Pair:
    """Each worker has one place, and has read the three adapters."""
    it = Pair(*roles, num_adapters=3, num_adapter_places=1, num_host_adapters=3, **shape)
    it.world.settle()
    return it


def holders(it: Pair, name: str) -> list[FakeWorker]:
    """The workers where sequences with an adapter run, or are on their way to."""
    return [worker for worker in it.workers if adapters(it, worker).num_sequences(number(it, name))]


def test_both_groups_give_the_adapter_a_place_before_blocks_move() -> None:
    it = pair()
    it.submit("1", 9, adapter="a1")
    assert holders(it, "a1") == it.workers
    assert it.frames(KVReceive, it.target)
    it.prefill()
    assert it.sequence("1").phase is Phase.ARRIVING
    assert holders(it, "a1") == [it.target], "the source's place is free again"
    it.finish()
    assert [start.adapter_place for start in it.starts(it.target)] == [0]


@pytest.mark.parametrize("prefilled", [False, True])
def test_a_cancelled_handover_gives_the_place_back(prefilled: bool) -> None:
    it = pair()
    it.submit("1", 9, adapter="a1")
    if prefilled:
        it.prefill()
    it.gateway.journals["1"].cancelled = True
    it.world.tell(it.gateway.incarnation, Cancel("1", 0))
    assert holders(it, "a1") == []
    it.submit("2", 9, adapter="a2")  # its placement replaces the one that no plan of the target has told of
    it.finish()
    assert it.target.places == {0: number(it, "a2")}


def test_a_group_whose_places_are_taken_is_passed_over_for_another_pair() -> None:
    it = pair(P, D, D)
    source = it.source
    for request_id, name in (("1", "a0"), ("2", "a1")):
        it.submit(request_id, 9, adapter=name, max_tokens=40, ignore_eos=True)
        it.prefill()
        it.world.move(source.incarnation)
        it.notify()
    assert [*holders(it, "a0"), *holders(it, "a1")] in (it.workers[1:], it.workers[:0:-1])
    it.submit("3", 9, adapter="a2")
    assert holders(it, "a2") == [source] and it.sequence("3").handover is None, "it does not wait for a place elsewhere"
    it.finish()
    assert [len(it.starts(worker)) for worker in it.workers] == [3, 1, 1]


def test_a_group_that_loads_the_adapter_is_waited_for() -> None:
    it = pair()
    adapters(it, it.target).forget(number(it, "a0"))
    loads = len(it.frames(LoadAdapter, it.target))
    it.submit("1", 9, adapter="a0", max_tokens=3)
    assert it.sequence("1").handover is None and holders(it, "a0") == [it.source], "it runs where the adapter is"
    assert len(it.frames(LoadAdapter, it.target)) == loads + 1
    it.submit("2", 10, adapter="a0")
    assert holders(it, "a0") == [it.source] and it.sequence("2").phase is Phase.WAITING
    it.work(it.target)
    assert it.sequence("2").handover is not None
    it.finish()
    assert len(it.starts(it.source)) == 2 and len(it.starts(it.target)) == 1


def test_a_group_that_cannot_read_the_adapter_gets_none_of_its_sequences() -> None:
    it = pair()
    adapters(it, it.target).on_loaded(number(it, "a0"), is_usable=False)
    for request_id, name in (("1", "a0"), ("2", "a1"), ("3", "")):
        it.submit(request_id, 9, adapter=name)
        it.world.settle()
    it.finish()
    assert [start.adapter_place is None for start in it.starts(it.target)] == [False, True]
    assert len(it.starts(it.source)) == 3


def test_a_request_whose_groups_have_no_room_holds_up_none_for_other_groups() -> None:
    it = pair(P, D, P, D, max_num_seqs=1)
    it.submit("1", 9, adapter="a0", max_tokens=30, ignore_eos=True)
    first = holders(it, "a0")
    assert len(first) == 2
    others = [adapters(it, worker) for worker in it.workers if worker not in first]
    for one in others:
        one.forget(number(it, "a0"))
    it.submit("2", 10, adapter="a0")
    it.submit("3", 11)
    assert it.sequence("2").phase is Phase.WAITING and it.sequence("3").handover is not None
    it.finish()
