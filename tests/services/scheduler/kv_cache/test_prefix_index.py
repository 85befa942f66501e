"""The index alone: who is found, who is told of, who goes first."""

from blockyard.services.scheduler.kv_cache.id_pool import Horizon
from blockyard.services.scheduler.kv_cache.prefix_index import PrefixIndex

A, B, C = b"a" * 16, b"b" * 16, b"c" * 16


def test_found_up_to_the_first_that_is_missing_or_the_limit() -> None:
    index = PrefixIndex(20, Horizon())
    for block, name in ((4, A), (2, B), (9, C)):
        assert index.put(block, name)
    assert index.find([A, B, C], 3) == [4, 2, 9]
    assert index.find([A, B, C], 2) == [4, 2]
    assert index.find([A, b"x" * 16, C], 3) == [4]


def test_the_first_block_of_a_name_keeps_it() -> None:
    index = PrefixIndex(20, Horizon())
    index.put(1, A)
    assert index.put(1, A)
    assert not index.put(2, A)
    assert index.find([A], 1) == [1]
    assert not index.has(2)


def test_nothing_is_told_of_a_block_that_was_given_up_since() -> None:
    index = PrefixIndex(20, Horizon())
    for block, name in ((1, A), (2, B), (3, C)):
        index.put(block, name)
    index.shelf.put([1])
    assert index.reclaim() == (1, A)
    index.drop(2)
    assert index.take_news() == {3: C}
    assert index.take_news() == {}


def test_what_was_left_under_a_plan_in_flight_is_found_but_not_given_up() -> None:
    horizon = Horizon()
    index = PrefixIndex(20, horizon)
    index.put(1, A)
    index.put(2, B)
    index.shelf.put([2])
    horizon.sent = 3
    index.shelf.put([1])
    assert (index.find([A], 1), index.shelf.num_cooling, index.shelf.num_idle) == ([1], 1, 1)
    assert (index.reclaim(), index.reclaim()) == ((2, B), None)
    horizon.done = 2
    index.shelf.settle()
    assert index.reclaim() is None
    horizon.done = 3
    index.shelf.settle()
    assert index.reclaim() == (1, A)
    assert index.find([A], 1) == []


def test_a_touched_block_is_given_up_last() -> None:
    index = PrefixIndex(20, Horizon())
    for block, name in ((1, A), (2, B)):
        index.put(block, name)
        index.shelf.put([block])
    assert index.touch(A) == 1
    assert index.touch(C) is None
    assert (index.reclaim(), index.reclaim()) == ((2, B), (1, A))


def test_of_an_attached_worker_each_name_is_taken_once_and_not_told_back() -> None:
    index = PrefixIndex(20, Horizon())
    assert index.adopt([5, 6, 7], [A, B, A]) == [5, 6]
    assert index.take_news() == {}
    assert index.reclaim() == (5, A)
