"""The free block queue alone, against a plain list of blocks."""

from hypothesis import given, settings
from hypothesis import strategies as st

from blockyard.services.scheduler.kv_cache.free_block_queue import FreeBlockQueue
from blockyard.services.scheduler.plan_pacer import PlanClock

from ..harness.invariants import blocks_in_order, check_free_queue

NUM_BLOCKS = 24
deeds = st.lists(st.tuples(st.sampled_from(["put", "take", "oldest", "one", "send", "done"]), st.binary(max_size=12)))


@settings(deadline=None)
@given(deeds)
def test_the_block_that_was_freed_first_is_evicted_first(deeds: list[tuple[str, bytes]]) -> None:
    plan_clock = PlanClock()
    free_queue = FreeBlockQueue(NUM_BLOCKS, plan_clock)
    left: list[tuple[int, int]] = []  # blocks in the order of eviction, with the last plan sent when each was freed
    for deed, data in deeds:
        blocks = list(dict.fromkeys(byte % NUM_BLOCKS for byte in data))
        there = {block for block, _ in left}
        if deed == "put":
            fresh = [block for block in blocks if block not in there]
            free_queue.put(fresh)
            left += [(block, plan_clock.last_sent) for block in fresh]
        elif deed == "take":
            taken = [block for block in blocks if block in there]
            free_queue.take(taken)
            left = [entry for entry in left if entry[0] not in taken]
        elif deed in ("oldest", "one"):
            count = len(data) if deed == "oldest" else 1
            idle = [block for block, plan in left if plan <= plan_clock.last_completed][:count]
            got = free_queue.pop(count) if deed == "oldest" else [free_queue.pop_one()]
            assert got == (idle if deed == "oldest" else idle or [None])
            left = [entry for entry in left if entry[0] not in idle]
        elif deed == "send":
            plan_clock.last_sent += 1
        else:
            plan_clock.last_completed = min(plan_clock.last_sent, plan_clock.last_completed + len(data))
            free_queue.free_pending()
        check_free_queue(free_queue, plan_clock)
        assert [block for block, _ in blocks_in_order(free_queue)] == [block for block, _ in left]
        idle = [block for block, plan in left if plan <= plan_clock.last_completed]
        assert free_queue.num_free_of(blocks) == len(set(blocks) & set(idle))


def test_blocks_that_are_used_often_leave_no_entries_behind() -> None:
    plan_clock = PlanClock()
    free_queue = FreeBlockQueue(NUM_BLOCKS, plan_clock)
    free_queue.put([9])
    for _ in range(1000):
        free_queue.put([1, 2, 3, 4])
        free_queue.take([1, 2])
        free_queue.take([3, 4])
    assert blocks_in_order(free_queue) == [(9, True)]
    check_free_queue(free_queue, plan_clock)  # no batch is without blocks
