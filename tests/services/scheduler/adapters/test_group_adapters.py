"""Places and host memory of one group: what is given to another adapter, and when."""

from blockyard.services.scheduler.adapters.group_adapters import GroupAdapters
from blockyard.services.scheduler.plan_pacer import PlanClock
from blockyard.shared.messages import AdapterPlaced, Geometry


def group(places: int = 1, host: int = 2) -> tuple[GroupAdapters, PlanClock]:
    clock = PlanClock()
    geometry = Geometry(8, 4, 32, 100, [7], 4, 16, num_adapter_places=places, num_host_adapters=host)
    return GroupAdapters(geometry, clock), clock


def load(adapters: GroupAdapters, *numbers: int) -> None:
    for number in numbers:
        adapters.want(number)
        assert adapters.take_changes().load == [number]
        adapters.on_loaded(number, is_usable=True)


def test_a_place_is_given_away_once_the_last_plan_that_reads_it_has_completed() -> None:
    adapters, clock = group()
    load(adapters, 1, 2)
    assert adapters.can_start(1) and adapters.can_start(2)
    place = adapters.start(1)
    assert adapters.take_placed() == [AdapterPlaced(place, 1)]
    assert adapters.start(1) == place and not adapters.take_placed(), "the same adapter is placed once"
    clock.on_sent(1)
    adapters.end(place)
    assert not adapters.can_start(2), "one of its sequences runs"
    adapters.end(place)
    assert not adapters.can_start(2) and adapters.can_start(1), "plan 1 may still read the place"
    clock.on_completed(1)
    assert adapters.can_start(2)
    assert adapters.start(2) == place and adapters.take_placed() == [AdapterPlaced(place, 2)]
    assert not adapters.can_start(1) and not adapters.is_placed(1)


def test_host_memory_keeps_what_is_used_or_waited_for() -> None:
    adapters, _ = group(places=1, host=2)
    load(adapters, 1, 2)
    adapters.end(adapters.start(1))
    adapters.want(3)
    assert adapters.take_changes([2, 3]).drop == [1], "2 was loaded for a sequence that has not started"
    adapters.on_loaded(3, is_usable=True)
    place = adapters.start(2)
    adapters.want(4)
    changes = adapters.take_changes([3, 4])
    assert (changes.drop, changes.load) == ([], []), "2 runs, and 3 was loaded for a sequence"
    adapters.end(place)
    assert adapters.take_changes([3, 4]).drop == [2]


def test_what_could_not_be_loaded_is_refused_until_it_is_asked_for_again() -> None:
    adapters, _ = group()
    adapters.want(1)
    adapters.take_changes()
    adapters.on_loaded(1, is_usable=False)
    assert adapters.is_refused(1) and not adapters.can_start(1)
    adapters.want(1)
    assert adapters.take_changes().load == []
    adapters.retry(1)
    adapters.want(1)
    assert adapters.take_changes().load == [1]


def test_the_least_recently_used_place_is_closed_for_an_adapter_that_waits() -> None:
    adapters, clock = group(places=2, host=4)
    load(adapters, 1, 2, 3)
    first, second = adapters.start(1), adapters.start(2)
    clock.on_sent(1)
    adapters.start(1)
    closed = adapters.make_room([3], 5.0)
    assert closed is not None and (adapters.index(closed), closed.closed_s) == (second, 5.0)
    assert not adapters.can_start(2) and adapters.can_start(1)
    assert adapters.make_room([3, 4], 6.0) is closed and closed.closed_s == 5.0, "one place at a time"
    adapters.end(second)
    clock.on_completed(1)
    assert adapters.make_room([3], 7.0) is None, "the place is free"
    assert adapters.can_start(3) and adapters.start(3) == second and first != second
    assert adapters.can_start(3), "it is closed no more"


def test_an_adapter_that_has_waited_for_long_has_the_next_place_and_memory() -> None:
    adapters, clock = group(places=1, host=1)
    load(adapters, 1)
    place = adapters.start(1)
    adapters.want(2)
    adapters.want(3)
    assert not adapters.take_changes([2, 3]).load, "the only adapter in host memory is in use"
    assert adapters.make_room([3, 2], 1.0) is not None, "so a place is closed for one that is not even read"
    clock.on_sent(1)
    adapters.end(place)
    clock.on_completed(1)
    changes = adapters.take_changes([2, 3])
    assert (changes.drop, changes.load) == ([1], [3])
    adapters.on_loaded(3, is_usable=True)
    adapters.want(1)
    assert not adapters.can_start(1) and adapters.can_start(3)
    adapters.start(3)
    assert adapters.make_room([1], 2.0) is not None
    assert adapters.make_room([], 2.0) is None
    assert adapters.can_start(3), "nothing waits for its place any more"


def test_the_next_adapter_takes_memory_only_from_those_that_have_waited_less() -> None:
    """Otherwise two of them could displace each other for ever, each before its first sequence has KV blocks."""
    adapters, _ = group(places=1, host=1)
    load(adapters, 2)
    for other, order, dropped in ((3, [2, 3], []), (1, [1, 2], [2])):
        adapters.want(other)
        adapters.make_room([other], 1.0)
        assert adapters.take_changes(order).drop == dropped


def test_an_adapter_that_is_forgotten_leaves_its_place() -> None:
    adapters, clock = group()
    load(adapters, 1, 2)
    place = adapters.start(1)
    clock.on_sent(1)
    adapters.end(place)
    assert adapters.forget(1) and not adapters.forget(1)
    assert not adapters.can_start(2), "plan 1 may still read the place"
    clock.on_completed(1)
    assert adapters.can_start(2)
