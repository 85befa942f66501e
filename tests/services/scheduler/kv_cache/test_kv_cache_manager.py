"""What the KV cache of a group says of a prefix before it is looked up."""

import pytest

from blockyard.services.scheduler.kv_cache.kv_cache_manager import CacheStats, KVCacheManager
from blockyard.services.scheduler.kv_cache.prefix_cache import BlockHasher
from blockyard.services.scheduler.plan_pacer import PlanClock
from blockyard.shared.messages import Geometry

A, B = b"a" * 16, b"b" * 16


@pytest.mark.parametrize("window", [None, 8])
def test_a_prefix_may_be_cached_if_its_first_block_is_or_lies_outside_the_window(window: int | None) -> None:
    geometry = Geometry(8, 4, 64, 100, [1], 4, 32, window=window)
    cache = KVCacheManager(geometry, 32, PlanClock(), BlockHasher("", enabled=True), CacheStats())
    cache.blocks.index.insert(3, A)
    assert cache.may_have_cached(A)
    assert cache.may_have_cached(B) == (window is not None)


def test_no_block_is_reserved_while_a_plan_in_flight_names_it() -> None:
    """The worker adds the hashes of a plan when it completes; by then a transfer may have written the block."""
    clock = PlanClock()
    cache = KVCacheManager(Geometry(4, 4, 64, 100, [1], 4, 32), 32, clock, BlockHasher("", enabled=True), CacheStats())
    pool = cache.blocks
    blocks = pool.reserve(3)
    assert blocks is not None
    pool.land(blocks[:2], [A, B])
    pool.release(blocks, ())
    assert (pool.num_free, pool.num_pending) == (4, 0)
    clock.on_sent(1)
    full_blocks, _, _ = cache.take_plan_changes()
    assert [full.block for full in full_blocks] == blocks[:2]
    assert (pool.num_free, pool.num_pending) == (2, 2)
    assert pool.reserve(3) is None
    assert pool.index.find([A, B], 2) == blocks[:2], "later plans may read them"
    clock.on_completed(1)
    pool.free_pending()
    assert pool.reserve(3) is not None
    assert pool.index.get(A) == blocks[0], "the last block of a chain is evicted first"
