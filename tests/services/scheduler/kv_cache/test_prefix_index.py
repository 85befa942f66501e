"""The index alone: lookup, hashes to report to the worker, order of eviction."""

from blockyard.services.scheduler.kv_cache.prefix_index import PrefixIndex
from blockyard.services.scheduler.plan_pacer import PlanClock

A, B, C = b"a" * 16, b"b" * 16, b"c" * 16


def test_blocks_are_found_up_to_the_first_miss_or_the_limit() -> None:
    index = PrefixIndex(20, PlanClock())
    for block, name in ((4, A), (2, B), (9, C)):
        assert index.insert(block, name)
    assert index.find([A, B, C], 3) == [4, 2, 9]
    assert index.find([A, B, C], 2) == [4, 2]
    assert index.find([A, b"x" * 16, C], 3) == [4]


def test_the_first_block_with_a_hash_keeps_it() -> None:
    index = PrefixIndex(20, PlanClock())
    index.insert(1, A)
    assert index.insert(1, A)
    assert not index.insert(2, A)
    assert index.find([A], 1) == [1]
    assert not index.has(2)


def test_the_hash_of_an_evicted_block_is_not_sent() -> None:
    index = PrefixIndex(20, PlanClock())
    for block, name in ((1, A), (2, B), (3, C)):
        index.insert(block, name)
    index.free_queue.put([1])
    assert index.evict_one() == (1, A)
    index.remove(2)
    assert index.take_new() == {3: C}
    assert index.take_new() == {}


def test_all_inserted_hashes_are_sent_once() -> None:
    index = PrefixIndex(20, PlanClock())
    index.insert_all([1], [A])
    index.insert_all([2, 3], [B, C])
    assert index.take_new() == {1: A, 2: B, 3: C}
    assert index.take_new() == {}


def test_a_block_freed_under_a_plan_in_flight_is_found_and_not_evicted() -> None:
    plan_clock = PlanClock()
    index = PrefixIndex(20, plan_clock)
    index.insert(1, A)
    index.insert(2, B)
    index.free_queue.put([2])
    plan_clock.last_sent = 3
    index.free_queue.put([1])
    assert (index.find([A], 1), index.free_queue.num_pending, index.free_queue.num_free) == ([1], 1, 1)
    assert (index.evict_one(), index.evict_one()) == ((2, B), None)
    plan_clock.last_completed = 2
    index.free_queue.free_pending()
    assert index.evict_one() is None
    plan_clock.last_completed = 3
    index.free_queue.free_pending()
    assert index.evict_one() == (1, A)
    assert index.find([A], 1) == []


def test_a_touched_block_is_evicted_last() -> None:
    index = PrefixIndex(20, PlanClock())
    for block, name in ((1, A), (2, B)):
        index.insert(block, name)
        index.free_queue.put([block])
    assert index.touch(A) == 1
    assert index.touch(C) is None
    assert (index.evict_one(), index.evict_one()) == ((2, B), (1, A))


def test_hashes_of_an_attached_worker_are_taken_once_and_not_sent_back() -> None:
    index = PrefixIndex(20, PlanClock())
    assert index.restore([5, 6, 7], [A, B, A]) == [5, 6]
    assert index.take_new() == {}
    assert index.evict_one() == (5, A)
