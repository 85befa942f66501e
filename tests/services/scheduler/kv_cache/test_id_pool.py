"""Ids are given out in the order of one list of free ids, though ids that were never taken are in no list."""

import random

import pytest

from blockyard.services.scheduler.kv_cache.id_pool import IdPool
from blockyard.services.scheduler.plan_pacer import PlanClock


@pytest.mark.parametrize("seed", range(10))
def test_ids_are_taken_from_the_end_of_the_free_ones(seed: int) -> None:
    rng = random.Random(seed)
    pool = IdPool(30, PlanClock())
    free = list(range(29, -1, -1))
    taken: list[int] = []
    for _ in range(200):
        match rng.randrange(4):
            case 0:
                one = pool.take_one()
                assert one == (free.pop() if free else None)
                taken += [] if one is None else [one]
            case 1:
                count = rng.randrange(len(free) + 1)
                expected = [free.pop() for _ in range(count)]
                assert pool.take(count) == expected
                taken += expected
            case 2:
                back = rng.sample(taken, rng.randrange(len(taken) + 1))
                taken = [i for i in taken if i not in back]
                pool.release(list(back))
                free += back
            case 3:
                gone = rng.sample(free, min(len(free), rng.randrange(3)))
                pool.remove(gone)
                free = [i for i in free if i not in gone]
                taken += gone
        assert pool.free_ids() == free
        assert pool.num_free == len(free)


def test_more_ids_than_are_free_are_not_given_out() -> None:
    pool = IdPool(3, PlanClock())
    assert pool.take(3) == [0, 1, 2]
    assert pool.take_one() is None
    with pytest.raises(AssertionError, match="1 ids wanted, 0 free"):
        pool.take(1)


def test_a_released_id_is_free_after_the_plans_that_were_sent() -> None:
    plan_clock = PlanClock()
    pool = IdPool(2, plan_clock)
    ids = pool.take(2)
    plan_clock.on_sent(1)
    pool.release(ids)
    assert (pool.num_free, pool.num_pending) == (0, 2)
    plan_clock.on_completed(1)
    pool.free_pending()
    assert (pool.num_free, pool.num_pending, pool.take_one()) == (2, 0, 1)
