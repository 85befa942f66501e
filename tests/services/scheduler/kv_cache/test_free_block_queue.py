"""The shelf alone, against a list of blocks that is searched."""

from hypothesis import given
from hypothesis import strategies as st

from blockyard.services.scheduler.kv_cache.free_block_queue import Shelf
from blockyard.services.scheduler.kv_cache.id_pool import Horizon

from ..invariants import check_shelf

NUM_BLOCKS = 24
deeds = st.lists(st.tuples(st.sampled_from(["put", "take", "oldest", "one", "send", "done"]), st.binary(max_size=12)))


@given(deeds)
def test_the_first_that_was_left_is_given_up_first(deeds: list[tuple[str, bytes]]) -> None:
    horizon = Horizon()
    shelf = Shelf(NUM_BLOCKS, horizon)
    left: list[tuple[int, int]] = []  # blocks, and the last plan sent when each was left; the first is given up first
    for deed, data in deeds:
        blocks = list(dict.fromkeys(byte % NUM_BLOCKS for byte in data))
        there = {block for block, _ in left}
        if deed == "put":
            fresh = [block for block in blocks if block not in there]
            shelf.put(fresh)
            left += [(block, horizon.sent) for block in fresh]
        elif deed == "take":
            taken = [block for block in blocks if block in there]
            shelf.take(taken)
            left = [entry for entry in left if entry[0] not in taken]
        elif deed in ("oldest", "one"):
            count = len(data) if deed == "oldest" else 1
            idle = [block for block, plan in left if plan <= horizon.done][:count]
            got = shelf.oldest(count) if deed == "oldest" else [shelf.oldest_one()]
            assert got == (idle if deed == "oldest" else idle or [None])
            left = [entry for entry in left if entry[0] not in idle]
        elif deed == "send":
            horizon.sent += 1
        else:
            horizon.done = min(horizon.sent, horizon.done + len(data))
            shelf.settle()
        check_shelf(shelf, horizon)
        assert [block for block, _ in shelf.listed()] == [block for block, _ in left]
        idle = [block for block, plan in left if plan <= horizon.done]
        assert shelf.num_idle_of(blocks) == len(set(blocks) & set(idle))


def test_what_is_used_again_and_again_leaves_nothing_behind() -> None:
    shelf = Shelf(NUM_BLOCKS, Horizon())
    shelf.put([9])
    for _ in range(1000):
        shelf.put([1, 2, 3, 4])
        shelf.take([1, 2])
        shelf.take([3, 4])
    assert [*shelf.listed()] == [(9, True)]
    assert len(shelf._idle) == 1
